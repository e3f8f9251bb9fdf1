"""Executors of this process, and the scheduler of bands that they share with rings.

Every band has a counter of the rounds it has been through. An operation of round
n may start once all of its bands stand at n, and each round touches each band
once, so the counters alone order everything, without a barrier.
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
    perform,
)
from daskfactor.executors.plan import Op, ops_by_row
from daskfactor.executors.state import Band, ChainState, Evaluation, travellers
from daskfactor.kernels.views import Workspace
from daskfactor.machine import single_threaded_blas

LOOK = 0.2
"""Seconds between looks at the progress of threads."""


class BandScheduler:
    """Hands the operations of some row bands to the threads of one process.

    A lane keeps to the row bands it owns while one of them is ready (their data stay
    in its cache) and takes over a belated operation of another lane otherwise. Among
    equals one goes first that has a band which another process waits for.

    Parameters
    ----------
    ops
        By row band, one operation for every round.
    lanes
        Threads that will ask for operations, numbered from 0.
    leaves
        Says whether a band of another factor goes to another process for a round.
        Without it all bands are here from the start and stay.
    patience
        Seconds without anything to do after which the segment is lost.
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
        self._needs = {row: _at_round(own[0], 0) for row, own in ops.items()}
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
            foreign = self._owner[row] != lane  # another lane's only when it lags behind our own
            leaves = self._leaves
            stays = leaves is None or not any(leaves(band, number + 1) for band, _ in needs)
            rank = (number + foreign, foreign, stays)
            if rank < best_rank:
                best, best_rank = row, rank
        return best

    def take(self, lane: int) -> Op | None:
        """Return the next operation for a lane; wait for one; None when all is done or failed."""
        with self.condition:
            since = time.monotonic()
            while self.remaining and self.failure is None:
                row = self._choose(lane)
                if row is not None:
                    self._running.add(row)
                    return self.ops[row][self.position[row]]
                self.condition.wait(min(60.0, self._patience))
                if time.monotonic() - since > self._patience:
                    lost = f"no band arrived within {self._patience:g} s"
                    self.fail(SegmentLost(lost))
            return None

    def arrive(self, band: Band, number: int) -> None:
        """Note that a band is here, with all that its operation of a round needs."""
        with self.condition:
            self.ready.add((band, number))
            self.condition.notify_all()

    def finish(self, op: Op, found: Evaluation | None, seconds: float) -> None:
        """Note an operation as done."""
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
            if found is not None:
                self.evaluations.append(found)
            self.condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop all threads; the first error stays."""
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
        """Do all operations on threads of a pool; raise the first error.

        The calling thread only watches: it alone sees Ctrl-C.
        """
        futures = [pool.submit(self._work, lane, operate) for lane in range(lanes)]
        try:
            while wait(futures, LOOK).not_done:
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
    """Return the bands of an operation that travel, with the rounds they have been through."""
    return frozenset([(band, number) for band in travellers(op.block)])


def run_in_order(work: Work, state: ChainState, workspace: Workspace) -> float:
    """Do a plan's operations one after the other, in this thread; return the seconds they took."""
    evaluations: list[Evaluation] = []
    busy, done = 0.0, 0
    with single_threaded_blas():
        for part in work.plan:
            for op in part.ops:
                found, seconds = perform(op, work, state, workspace)
                busy += seconds
                if found is not None:
                    evaluations.append(found)
            done += len(part.ops)
            work.on_done(done)
    state.settle(evaluations)
    return busy


class SerialExecutor(Executor):
    """Runs a plan in the calling thread; what every other executor is compared with.

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
        """Give the buffers back."""
        self._workspace = Workspace()


class ThreadsExecutor(Executor):
    """Runs a plan on threads of this process: the default on one machine.

    Parameters
    ----------
    lanes
        Number of threads; as many as there are processors by default.

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
        # Not `local_workspace`: `close` gives these buffers back, those of the caller's thread too.
        self._of_thread, self._reporting = threading.local(), threading.Lock()

    def run_chains(
        self,
        chains: Sequence[Callable[[], None]],
        at_once: bool,
        watch: Callable[[], None],
        stop: threading.Event,
    ) -> None:
        """Work on several chains at once, each of which does its operations in order.

        They have threads of their own: what a chain maps over its bands waits for those of the
        pool.
        """
        lanes = min(self.lanes, len(chains))
        if not at_once or lanes <= 1:
            super().run_chains(chains, at_once, watch, stop)
            return
        with ThreadPoolExecutor(lanes, thread_name_prefix="daskfactor-chain") as pool:
            running = {pool.submit(chain) for chain in chains}
            try:
                while running:
                    done, running = wait(running, LOOK, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    watch()
            except BaseException:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _run(self, work: Work, state: ChainState) -> ChainState:
        self.report.lanes = lanes = min(self.lanes, state.blocks)
        if lanes == 1:  # handing an operation to a thread would take .1 ms
            if not hasattr(self._of_thread, "workspace"):
                self._of_thread.workspace = Workspace()
            busy = run_in_order(work, state, self._of_thread.workspace)
            with self._reporting:
                self.report.busy_seconds += busy
            return state
        scheduler = BandScheduler(ops_by_row(work.plan), lanes)

        def operate(op: Op) -> tuple[Evaluation | None, float]:
            return perform(op, work, state, local_workspace())

        with single_threaded_blas():
            scheduler.run(self._pool, lanes, operate, work.on_done)
        state.settle(scheduler.evaluations)
        self.report.busy_seconds += scheduler.busy
        return state

    def _map(self, function: Callable[..., R], items: Sequence[Any], name: str) -> list[R]:
        with single_threaded_blas():

            def call(item: Any) -> R:
                return function(item, local_workspace())

            return list(self._pool.map(call, items))

    def close(self) -> None:
        """End the threads; their buffers go with them."""
        self._pool.shutdown(wait=True)
        self._of_thread = threading.local()


def share_bands(
    blocks: int, threads: Sequence[int], lanes: int | None, speeds: Sequence[float] | None = None
) -> list[int]:
    """Share consecutive row bands out to workers; zero for workers that are not needed.

    A thread of speed s gets at most floor(T s) bands, where T is the shortest time, in
    operations of a thread of speed 1, in which all threads together get through a round.

    Parameters
    ----------
    blocks
        Row bands to share out.
    threads
        Threads of each worker.
    lanes
        Fewest bands per thread of the fastest worker; None for as many threads as have a
        share in the shortest possible round.
    speeds
        How fast a thread of each worker is, beside the others; alike by default.
    """
    speeds = speeds or [1.0] * len(threads)

    def loads(time: float) -> list[int]:
        """Return the bands that a thread of each worker gets through in some time."""
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
