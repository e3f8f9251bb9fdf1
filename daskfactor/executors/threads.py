"""Executors of this process, and the band scheduler that they share with rings.

The scheduler counts the finished rounds of each band. An operation of round n may start when all of
its bands have finished n rounds. Each round touches each band once, so no barrier is needed.
"""

import bisect
import itertools
import math
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from concurrent.futures import Executor as Pool
from typing import Any

import numpy as np
from dask.system import cpu_count

from daskfactor.executors.base import (
    Executor,
    OnDone,
    R,
    SegmentLost,
    Work,
    local_workspace,
    run_operation,
)
from daskfactor.executors.plan import Op, ops_by_row
from daskfactor.executors.state import Band, ChainState, Evaluation, moving_bands
from daskfactor.kernels.views import Workspace
from daskfactor.machine import single_threaded_blas

POLL = 0.2
"""Seconds between checks of the progress of threads."""


class BandScheduler:
    """Assigns the operations of some row bands to the threads of one process.

    A lane prefers the row bands that it owns, whose data are in its cache. When none of them is
    ready, it takes over an operation of another lane that is behind. Ties go to operations with a
    band that another process waits for.

    Parameters
    ----------
    ops
        Operations of each row band, one for every round.
    lanes
        Number of threads, which are numbered from 0.
    leaves
        Predicate: True if a moving band is needed by another process in a round. By default all
        bands stay in this process.
    patience
        Seconds without a ready operation after which the segment is lost.
    """

    def __init__(
        self,
        ops: Mapping[int, Sequence[Op]],
        lanes: int,
        leaves: Callable[[Band, int], bool] | None = None,
        patience: float = math.inf,
    ) -> None:
        self.condition = threading.Condition()
        self.ops = ops
        self.position = dict.fromkeys(ops, 0)
        self.ready: set[tuple[Band, int]] = set()
        self._needs = {row: _at_round(row_ops[0], 0) for row, row_ops in ops.items()}
        self.evaluations: list[Evaluation] = []
        self.busy = 0.0
        self.total = self.remaining = sum(map(len, ops.values()))
        self.failure: BaseException | None = None
        self._owner = dict(
            zip(ops, (np.arange(len(ops)) * lanes // len(ops)).tolist(), strict=True)
        )
        self._leaves = leaves
        self._patience = patience
        self._running: set[int] = set()
        if leaves is None:
            self.ready.update(*self._needs.values())

    def _choose(self, lane: int) -> int | None:
        best, best_rank = None, (math.inf, False, False)
        for row, number in self.position.items():
            ops = self.ops[row]
            if number > best_rank[0] or row in self._running or number == len(ops):
                continue
            needs = self._needs[row]
            if not needs <= self.ready:
                continue
            foreign = self._owner[row] != lane  # taken over only if it is behind the own ones
            leaves = self._leaves
            stays = leaves is None or not any(leaves(band, number + 1) for band, _ in needs)
            rank = (number + foreign, foreign, stays)
            if rank < best_rank:
                best, best_rank = row, rank
        return best

    def take(self, lane: int) -> Op | None:
        """Return the next operation of a lane; None when all are done or one has failed."""
        with self.condition:
            since = time.monotonic()
            while self.remaining and self.failure is None:
                row = self._choose(lane)
                if row is not None:
                    self._running.add(row)
                    return self.ops[row][self.position[row]]
                self.condition.wait(min(60.0, self._patience))
                if time.monotonic() - since > self._patience:
                    self.fail(SegmentLost(f"no band arrived within {self._patience:g} s"))
            return None

    def arrive(self, band: Band, number: int) -> None:
        """Mark a band as ready for its operation of a round."""
        with self.condition:
            self.ready.add((band, number))
            self.condition.notify_all()

    def finish(self, op: Op, evaluation: Evaluation | None, seconds: float) -> None:
        """Mark an operation as done."""
        row = op.block[0]
        with self.condition:
            self.position[row] = number = self.position[row] + 1
            self.ready -= self._needs[row]
            if self._leaves is None:
                self.ready |= _at_round(op, number)
            if number < len(self.ops[row]):
                self._needs[row] = _at_round(self.ops[row][number], number)
            self._running.discard(row)
            self.remaining -= 1
            self.busy += seconds
            if evaluation is not None:
                self.evaluations.append(evaluation)
            self.condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop all threads; keep the first error."""
        with self.condition:
            self.failure = self.failure or error
            self.condition.notify_all()

    def run(
        self,
        pool: Pool,
        lanes: int,
        operate: Callable[[Op], tuple[Evaluation | None, float]],
        on_done: OnDone,
    ) -> None:
        """Run all operations on threads of a pool; raise the first error.

        The calling thread only waits, since it alone receives Ctrl-C.
        """
        futures = [pool.submit(self._work, lane, operate) for lane in range(lanes)]
        try:
            while wait(futures, POLL).not_done:
                on_done(self.total - self.remaining)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            wait(futures)
        if self.failure is not None:
            raise self.failure
        on_done(self.total)

    def _work(self, lane: int, operate: Callable[[Op], tuple[Evaluation | None, float]]) -> None:
        try:
            while (op := self.take(lane)) is not None:
                self.finish(op, *operate(op))
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            self.fail(error)


def _at_round(op: Op, number: int) -> frozenset[tuple[Band, int]]:
    """Return the moving bands of an operation with the number of rounds they have finished."""
    return frozenset([(band, number) for band in moving_bands(op.block)])


def run_in_order(work: Work, state: ChainState, workspace: Workspace) -> float:
    """Run a plan's operations in order in this thread; return their seconds."""
    evaluations: list[Evaluation] = []
    busy, done = 0.0, 0
    with single_threaded_blas():
        for part in work.plan:
            for op in part.ops:
                evaluation, seconds = run_operation(op, work, state, workspace)
                busy += seconds
                if evaluation is not None:
                    evaluations.append(evaluation)
            done += len(part.ops)
            work.on_done(done)
    state.add_evaluations(evaluations)
    return busy


class SerialExecutor(Executor):
    """Runs a plan in the calling thread: the reference for all other executors.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 10, "tune": 10, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> same = dfac.sample(V, dfac.TweedieNMF(2), executor=dfac.SerialExecutor(), **run)
    >>> same["posterior"].equals(trace["posterior"])
    True
    """

    name = "serial"

    def __init__(self) -> None:
        super().__init__()
        self._workspace = Workspace()

    def _run(self, work: Work, state: ChainState) -> ChainState:
        self.report.busy_seconds += run_in_order(work, state, self._workspace)
        return state

    def _map(self, function: Callable[..., R], items: Sequence[Any], name: str) -> list[R]:
        with single_threaded_blas():
            return [function(item, self._workspace) for item in items]

    def close(self) -> None:
        """Release the buffers."""
        self._workspace = Workspace()


class ThreadsExecutor(Executor):
    """Runs a plan on threads of this process: the default on one machine.

    Parameters
    ----------
    lanes
        Number of threads; by default the number of processors.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 10, "tune": 10, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> same = dfac.sample(V, dfac.TweedieNMF(2), executor=dfac.ThreadsExecutor(lanes=2), **run)
    >>> same["posterior"].equals(trace["posterior"])
    True
    """

    name = "threads"

    def __init__(self, lanes: int | None = None) -> None:
        self.lanes = lanes or cpu_count()
        super().__init__(self.lanes)
        self._pool = ThreadPoolExecutor(self.lanes, thread_name_prefix="daskfactor-lane")
        # Not `local_workspace`: `close` also releases the buffers of the caller's thread.
        self._thread_local, self._report_lock = threading.local(), threading.Lock()

    def run_chains(
        self,
        chains: Sequence[Callable[[], None]],
        at_once: bool,
        watch: Callable[[], None],
        stop: threading.Event,
    ) -> None:
        """Run several chains in parallel, each with its operations in order.

        Chains have their own threads, because they wait for the pool when they map functions over
        bands.
        """
        lanes = min(self.lanes, len(chains))
        if not at_once or lanes <= 1:
            super().run_chains(chains, at_once, watch, stop)
            return
        with ThreadPoolExecutor(lanes, thread_name_prefix="daskfactor-chain") as pool:
            running = {pool.submit(chain) for chain in chains}
            try:
                while running:
                    done, running = wait(running, POLL, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    watch()
            except BaseException:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _run(self, work: Work, state: ChainState) -> ChainState:
        self.report.lanes = lanes = min(self.lanes, state.blocks)
        if lanes == 1:  # an operation in another thread costs .1 ms
            if not hasattr(self._thread_local, "workspace"):
                self._thread_local.workspace = Workspace()
            busy = run_in_order(work, state, self._thread_local.workspace)
            with self._report_lock:
                self.report.busy_seconds += busy
            return state
        scheduler = BandScheduler(ops_by_row(work.plan), lanes)

        def operate(op: Op) -> tuple[Evaluation | None, float]:
            return run_operation(op, work, state, local_workspace())

        with single_threaded_blas():
            scheduler.run(self._pool, lanes, operate, work.on_done)
        state.add_evaluations(scheduler.evaluations)
        self.report.busy_seconds += scheduler.busy
        return state

    def _map(self, function: Callable[..., R], items: Sequence[Any], name: str) -> list[R]:
        with single_threaded_blas():

            def call(item: Any) -> R:
                return function(item, local_workspace())

            return list(self._pool.map(call, items))

    def close(self) -> None:
        """End the threads and release their buffers."""
        self._pool.shutdown(wait=True)
        self._thread_local = threading.local()


def share_bands(
    blocks: int, threads: Sequence[int], lanes: int | None, speeds: Sequence[float] | None = None
) -> list[int]:
    """Return the number of consecutive row bands of each worker; zero if it is not needed.

    A thread of speed s gets at most floor(T s) bands, where T is the shortest time, in
    operations of a thread of speed 1, in which all threads together get through a round.

    Parameters
    ----------
    blocks
        Number of row bands.
    threads
        Number of threads of each worker.
    lanes
        Minimum number of bands per thread of the fastest worker; None uses all threads that
        shorten the round.
    speeds
        Relative speed of a thread of each worker; equal by default.
    """
    speeds = speeds or [1.0] * len(threads)

    def loads(time: float) -> list[int]:
        """Return the number of bands that a thread of each worker finishes in some time."""
        return [int(time * speed * (1 + 1e-9)) for speed in speeds]

    least = (lanes or 1) / max(speeds)
    times = sorted({n / speed for speed in set(speeds) for n in range(1, blocks + 1)})
    enough = bisect.bisect_left(
        times, blocks, key=lambda t: sum(map(operator.mul, loads(t), threads))
    )
    load = loads(max(times[enough], least))
    needed, used = blocks, [0] * len(threads)
    order = sorted(range(len(threads)), key=lambda number: -load[number])
    while needed > 0:  # one thread of every worker before a second one of any, fast ones first
        for number in order:
            if needed > 0 and load[number] and used[number] < threads[number]:
                used[number] += 1
                needed -= load[number]
    ends = list(itertools.accumulate(map(operator.mul, used, load), initial=0))
    edges = [blocks * end // ends[-1] for end in ends]
    return [high - low for low, high in itertools.pairwise(edges)]
