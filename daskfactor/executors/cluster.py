"""Executors on a cluster: workers and their loss, tasks, retries."""

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import os
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
from dask.base import annotate
from dask.utils import format_bytes
from distributed import Client, KilledWorker, get_worker, secede
from distributed.comm.core import CommClosedError
from distributed.diagnostics.plugin import SchedulerPlugin
from numpy.typing import NDArray

from daskfactor.data import blocks
from daskfactor.errors import DaskfactorError, EngineError, OptionError
from daskfactor.executors.base import (
    Executor,
    ProgressReporter,
    R,
    SegmentLost,
    StateLost,
    T,
    WaitTimer,
    Work,
    ignore,
    local_workspace,
)
from daskfactor.executors.connection import ANSWERS_WITHIN
from daskfactor.executors.remote_state import (
    PartRef,
    RemoteState,
    WorkerStateClient,
    graph_sources,
)
from daskfactor.executors.segment import PLUGIN, RingWorkerPlugin
from daskfactor.executors.state import CELLS, ChainState, FactorBand
from daskfactor.executors.store import (
    StatePart,
    WorkerReport,
    pack,
    read_portion,
    report_of,
    store_portion,
    unpack,
)
from daskfactor.executors.tasks import (
    SuperBlock,
    build_graph,
    group_rounds,
)
from daskfactor.executors.threads import share_bands
from daskfactor.machine import single_threaded_blas
from daskfactor.runs.files import PARTIAL

logger = logging.getLogger(__name__)

MAX_TASKS = 4000
"""Tasks of one graph: the scheduler keeps all of them until the graph is done."""
SPLIT_BYTES = 2**20
"""Bytes above which row bands are not sent together with bands of other factors."""

LOSSES = (
    SegmentLost,
    KilledWorker,
    CommClosedError,
    concurrent.futures.CancelledError,
    OSError,
    TimeoutError,
)
"""Errors after which a segment is repeated."""

MARK = "daskfactor"
"""Annotation of tasks that are cancelled when their only worker goes."""
POLL = 0.2
"""Seconds between checks of futures that have not called back."""
CACHE_SHARE = 0.4
"""Fraction of a worker's memory limit for decoded blocks; Dask starts to spill at 0.6."""
AFTER_LOSS = 5.0
"""Seconds for workers to answer after a loss: dead ones stay listed for a while."""


@dataclass(frozen=True)
class Patience:
    """Time limits, in seconds, and the limit on retries.

    Attributes
    ----------
    start
        Limit for all workers of a ring to start their part.
    stall
        Limit without any finished block. Longer than any block takes, including compilation and
        reading.
    workers
        Limit for the first worker to connect.
    losses
        Number of consecutive losses after which a segment is not repeated any more.
    """

    start: float = 120.0
    stall: float = 1800.0
    workers: float = 60.0
    losses: int = 10


@dataclass
class Attempt:
    """One attempt at a segment: the operations that its tasks have reported, by sender.

    ``what`` names the units of work for messages.
    """

    what: str = "block"
    done: dict[Any, int] = field(default_factory=dict)
    finished: int = 0
    quiet: WaitTimer = field(default_factory=WaitTimer)


def report_progress(topic: str, run_id: str, sender: Any, done: int) -> None:
    """Send the number of operations done from a worker to the client, without waiting."""
    get_worker().log_event(topic, {"run_id": run_id, "sender": sender, "done": done})


def loss_plugin() -> Any:
    """Return a scheduler plugin that cancels marked tasks whose only worker has gone.

    The client then gives the attempt up on all workers. A class made in a function is pickled by
    value, so that the scheduler does not need daskfactor.
    """
    mark = MARK

    class CancelStranded(SchedulerPlugin):
        name, idempotent = "daskfactor-losses", True

        def remove_worker(self, scheduler: Any, worker: str, **_: Any) -> None:
            self.cancel(scheduler)

        def update_graph(self, scheduler: Any, **_: Any) -> None:
            scheduler.loop.add_callback(self.cancel, scheduler)  # once the tasks are assigned

        def cancel(self, scheduler: Any) -> None:
            """Tell clients that tasks are cancelled which no worker may run."""
            for task in list(scheduler.unrunnable):
                workers = task.worker_restrictions
                if workers and workers.isdisjoint(scheduler.workers) and mark in task.annotations:
                    message = {"reason": "lost-worker", "msg": f"lost worker {', '.join(workers)}"}
                    scheduler.report({"op": "cancelled-keys", "keys": [task.key], **message}, task)

    return CancelStranded()


def _budget() -> int | None:
    """Return the byte limit of decoded blocks; None outside of workers and without a limit."""
    try:
        limit = get_worker().memory_manager.memory_limit
    except ValueError:
        return None
    return int(limit * CACHE_SHARE) if limit else None


blocks.blocks_budget = _budget


class ClusterExecutor(Executor):
    """Base class of executors on the workers of a `distributed` client.

    Parameters
    ----------
    client
        A synchronous client.
    workers
        Addresses to use; all workers by default.
    patience
        Time limits and the limit on retries.
    """

    in_process = False

    def __init__(
        self,
        client: Client,
        workers: Sequence[str] | None = None,
        patience: Patience | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(client, Client):
            raise OptionError(
                f"client must be a dask.distributed Client, got {client!r}; make one with "
                "Client() or Client(address)"
            )
        if client.asynchronous:
            raise OptionError(
                "client must be synchronous, got one made with asynchronous=True; make one without"
            )
        _leave_thread_pool()
        self.client: Any = client  # most of its methods are untyped
        self.patience = patience or Patience()
        self.topic = f"daskfactor-{uuid.uuid4().hex}"
        self._only = None if workers is None else frozenset(workers)
        self._attempts: dict[str, Attempt] = {}
        self._ready: set[str] = set()
        self._registered, self._recheck_workers = False, False
        self.max_losses = self.patience.losses
        self.state_client = WorkerStateClient(self)
        self._write_access: dict[Path, dict[str, bool]] = {}
        self._changed = threading.Event()
        self._listening = False
        self._last_check = 0.0

    # -- workers ---------------------------------------------------------------

    def workers(self) -> dict[str, int]:
        """Return the number of threads of every usable worker that the scheduler lists."""
        listed: dict[str, int] = self.client.nthreads()
        return {
            address: threads
            for address, threads in listed.items()
            if threads > 0 and (self._only is None or address in self._only)
        }

    def await_workers(self) -> dict[str, int]:
        """Return the workers; wait for the first one.

        An adaptive cluster starts a worker when a task is pending, so a task is submitted.
        """
        if workers := self.workers():
            return workers
        waited, task = WaitTimer(), self.submit("wait-for-a-worker", _identity, pack(None))
        while not (workers := self.workers()):
            if waited.seconds() > self.patience.workers:
                raise EngineError(
                    f"no worker was there within {self.patience.workers:g} s"
                    + (f" (of {', '.join(sorted(self._only))})" if self._only else "")
                    + "; start workers and run again, or resume the run from its store"
                )
            self._changed.wait(POLL)
        task.release()
        return workers

    def responding_workers(
        self, question: Callable[..., bool], addresses: Sequence[str], limit: float
    ) -> set[str]:
        """Return the workers that answer True within ``limit`` seconds."""

        async def ask(address: str) -> bool:
            options = {"workers": [address], "on_error": "ignore", "asynchronous": True}
            with contextlib.suppress(OSError, TimeoutError):
                answer = await asyncio.wait_for(self.client.run(question, **options), limit)
                return bool(answer.get(address))
            return False

        async def ask_all() -> list[bool]:
            return await asyncio.gather(*map(ask, addresses))

        return set(itertools.compress(addresses, self.client.sync(ask_all)))

    def members(self) -> dict[str, int]:
        """Return the number of threads of the workers that take part, which all respond.

        After a loss all workers are checked again.
        """
        recheck, self._recheck_workers = self._recheck_workers, False
        if recheck or not self._registered:  # a restarted scheduler has lost the plugin
            self.client.register_plugin(RingWorkerPlugin())
            self.client.register_plugin(loss_plugin())
            self._registered = True
        waited = WaitTimer()
        while True:
            workers = self.await_workers()
            self._ready = set() if recheck else self._ready & set(workers)
            new = sorted(set(workers) - self._ready)
            if new:
                limit = AFTER_LOSS if recheck else self.patience.workers
                self._ready |= self.responding_workers(_has_plugin, new, limit)
            members = {address: workers[address] for address in sorted(self._ready)}
            if members:
                return members
            if waited.seconds() > self.patience.workers:
                raise EngineError(
                    f"none of {len(workers)} workers answered within {self.patience.workers:g} s; "
                    "look at their logs"
                )
            time.sleep(0.1)

    def shares(self, blocks: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return the row bands of each worker that gets any, and the threads of all workers."""
        threads = self.members()
        counts = self._share(blocks, threads)
        return {a: count for a, count in zip(threads, counts, strict=True) if count}, threads

    def _share(self, blocks: int, threads: Mapping[str, int]) -> list[int]:
        """Return the number of row bands of each worker."""
        return share_bands(blocks, list(threads.values()), None)

    # -- states ----------------------------------------------------------------------

    def distribute(self, state: ChainState) -> ChainState:
        """Send the bands of a state to the workers, where they stay.

        An adaptive cluster retires idle workers. There the state stays with the client and is
        sent for every plan.
        """
        if isinstance(state, RemoteState) or is_adaptive(self.client):
            return state
        with self._as_state_lost():
            return self._distribute(state)

    def _distribute(self, state: ChainState) -> RemoteState:
        owners, factors = self._owners(state.blocks), state.factors
        band = lambda factor, number: factors[factor][number]  # noqa: E731
        remote = self.state_client.distribute(band, owners, len(factors))
        if state.cells:
            remote.cells = state.cells
        remote.evaluations = list(state.evaluations)
        return remote

    def _owners(self, blocks: int) -> list[str]:
        shares, _ = self.shares(blocks)
        return [address for address, count in shares.items() for _ in range(count)]

    def state_from_bands(
        self,
        blocks: int,
        band: Callable[[int, int], FactorBand],
        shared: Path | bool = False,
        factors: int = 2,
    ) -> ChainState:
        """Return a state of bands, read by the workers if they can, otherwise sent one by one."""
        if is_adaptive(self.client):
            return super().state_from_bands(blocks, band, factors=factors)
        with self._as_state_lost():
            owners = self._owners(blocks)
            if self.can_write(shared, sorted(set(owners))):
                return self.state_client.read(band, owners, factors)
            return self.state_client.distribute(band, owners, factors)

    def can_write(self, folder: Path | bool, addresses: Sequence[str]) -> bool:
        """Check whether workers can write to a folder of this process; return a bool as it is."""
        if isinstance(folder, bool):
            return folder
        access = self._write_access.setdefault(folder, {})
        if new := sorted(set(addresses) - set(access)):
            mark = folder / f"{uuid.uuid4().hex}{PARTIAL}"
            try:
                mark.touch()
                with self._as_state_lost():
                    question = partial(_can_write, str(mark))
                    writers = self.responding_workers(question, new, self.patience.workers)
                mark.unlink(missing_ok=True)
            except OSError:
                return False  # the client then writes, and raises the error
            access |= {address: address in writers for address in new}
        return all(access[address] for address in addresses)

    def _run(self, work: Work, state: ChainState) -> ChainState:
        after: ChainState
        if isinstance(state, RemoteState):
            with self._as_state_lost():
                after = self._segment(work, state)
        else:

            def run_segment() -> ChainState:
                return self._segment(work, self._distribute(state.without_records())).local()

            after = state.prepend_records(self.retry_segment(run_segment))
        work.on_done(sum(len(part.ops) for part in work.plan))
        return after

    @abstractmethod
    def _segment(self, work: Work, state: RemoteState) -> RemoteState:
        """Run a plan once on the workers' bands; the input state must not be used again."""

    def _submit_each(
        self, name: str, task: Callable[..., Any], jobs: Mapping[str, Any]
    ) -> list[Any]:
        """Submit a task to each worker, with its job; return the futures."""
        return [
            self.submit(name, task, pack(job), workers=[address], priority=10)
            for address, job in jobs.items()
        ]

    def call(self, task: Callable[..., T], jobs: Mapping[str, Any]) -> dict[str, T]:
        """Run a task on each worker, with its job; return the results by address."""
        with self._as_state_lost():
            futures = self._submit_each("each-band", task, jobs)
            try:
                results = self.results(futures, Attempt("call with bands"))
            finally:
                for future in futures:
                    future.release()
        return dict(zip(jobs, results, strict=True))

    def make_parts(
        self,
        name: str,
        task: Callable[..., StatePart],
        jobs: Mapping[str, Any],
        attempt: Attempt | None = None,
        check: Callable[[], None] = ignore,
    ) -> list[tuple[WorkerReport, PartRef]]:
        """Run a task on each worker, with its job; return reports and the parts that stay there."""
        with self._as_state_lost():
            futures = self._submit_each(name, task, jobs)
            return self.parts_of(futures, attempt or Attempt("call with bands"), check)

    def parts_of(
        self, futures: Sequence[Any], attempt: Attempt, check: Callable[[], None] = ignore
    ) -> list[tuple[WorkerReport, PartRef]]:
        """Return the reports of parts that tasks make, and references to the parts."""
        reports = [self.submit("report", report_of, future, priority=10) for future in futures]

        def check_parts() -> None:
            if any(future.cancelled() for future in futures):
                raise SegmentLost("a worker was lost")
            check()

        try:
            outcomes = self.results(reports, attempt, check_parts)
        except BaseException:
            for future in futures:
                future.release()
            raise
        finally:
            for future in reports:
                future.release()
        parts = [
            self.state_client.refer(future, report.address)
            for future, report in zip(futures, outcomes, strict=True)
        ]
        return list(zip(outcomes, parts, strict=True))

    @contextmanager
    def _as_state_lost(self) -> Iterator[None]:
        """Turn losses into `StateLost` while only the workers have the bands."""
        try:
            yield
        except (DaskfactorError, StateLost):
            self._recheck_workers = True
            raise
        except Exception as loss:
            self._recheck_workers = True
            self._check_client(loss)
            if isinstance(loss, LOSSES):
                raise StateLost(str(loss) or type(loss).__name__) from loss
            raise

    # -- attempts ------------------------------------------------------------------

    def retry_segment(self, work: Callable[[], T]) -> T:
        """Return the result of ``work``; repeat it after losses, which are counted and logged."""
        max_attempts = self.patience.losses + 1
        for _ in range(max_attempts):
            try:
                return work()
            except DaskfactorError:
                raise
            except Exception as loss:
                self._check_client(loss)
                if not isinstance(loss, LOSSES):
                    raise
                self._recheck_workers = True
                self.report.lost_segments += 1
                logger.warning("a segment is repeated: %s", loss)
                last: BaseException = loss
        raise EngineError(
            f"a segment was lost {max_attempts} times in a row, the last time "
            f"because of: {last}; find out why workers die (memory is the usual reason) and "
            "resume the run from its store"
        ) from last

    def _check_client(self, error: Exception) -> None:
        """Raise EngineError if the client is closed, which causes many kinds of errors.

        Wait for a client that is reconnecting. The scheduler has then lost its subscription.
        """
        timer = WaitTimer()
        while self.client.status == "connecting" and timer.seconds() < self.patience.workers:
            time.sleep(POLL)
        if self.client.status != "running":
            raise EngineError(
                f"the client has lost its scheduler (it is {self.client.status}); connect to a "
                "cluster again and resume the run from its store"
            ) from error
        self._listening = False

    @contextmanager
    def reporting(self) -> Iterator[tuple[Attempt, str, ProgressReporter]]:
        """Yield an attempt, its identifier, and the function with which its tasks report to it."""
        attempt, run_id = Attempt(), uuid.uuid4().hex
        if not self._listening:
            self.client.subscribe_topic(self.topic, self._on_event)
            self._listening = True
        self._attempts[run_id] = attempt
        try:
            yield attempt, run_id, partial(report_progress, self.topic, run_id)
        finally:
            del self._attempts[run_id]

    def _on_event(self, event: tuple[float, Mapping[str, Any]]) -> None:
        attempt = self._attempts.get(event[1]["run_id"])
        if attempt is not None:
            attempt.quiet.restart()
            attempt.done[event[1]["sender"]] = event[1]["done"]

    # -- futures -------------------------------------------------------------------

    def submit(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Submit a task with a readable name, without a warning for large arguments."""
        with large_graphs(), annotate(**{MARK: True}):
            key = f"{name}-{uuid.uuid4().hex}"
            future = self.client.submit(_task, function, *args, key=key, pure=False, **options)
        self.watch(future)
        return future

    def watch(self, future: Any) -> None:
        """Wake up the waiting thread when a future is done."""
        future.add_done_callback(lambda _: self._changed.set())

    def results(
        self, futures: Sequence[Any], attempt: Attempt, check: Callable[[], None] | None = None
    ) -> list[Any]:
        """Return the results of futures; ``check`` is called regularly and may raise.

        Raises the first error of a failed future, or SegmentLost.
        """
        while True:
            statuses = [future.status for future in futures]
            if all(status == "finished" for status in statuses):
                return self._await(self._gather(futures), attempt, check)
            if any(status in ("error", "cancelled", "lost") for status in statuses):
                errors = [future.exception() for future in futures if future.status == "error"]
                reason = str(errors[0]) if errors else "a worker was lost"
                raise _real_error(errors) or SegmentLost(reason)
            if statuses.count("finished") > attempt.finished:
                attempt.finished = statuses.count("finished")
                attempt.quiet.restart()
            self._check(attempt, check)
            self._changed.wait(POLL)
            self._changed.clear()

    async def _gather(self, futures: Sequence[Any]) -> list[Any]:
        return list(await self.client.gather(list(futures), asynchronous=True))

    def _await(
        self, coroutine: Coroutine[Any, Any, T], attempt: Attempt, check: Callable[[], None] | None
    ) -> T:
        """Return the result of a coroutine on the client's event loop; raise if workers die."""
        try:
            task = asyncio.run_coroutine_threadsafe(coroutine, self.client.loop.asyncio_loop)
        except BaseException:
            coroutine.close()  # the client's event loop has ended
            raise
        try:
            while True:
                done, _ = concurrent.futures.wait([task], POLL)
                if done:
                    return task.result()
                self._check(attempt, check)
        except BaseException:
            task.cancel()
            raise

    def _check(self, attempt: Attempt, check: Callable[[], None] | None) -> None:
        """Raise if no worker is left, or none has made progress for too long."""
        now = time.monotonic()
        if now - self._last_check > 0.5:
            self._last_check = now
            self.await_workers()
            if attempt.quiet.seconds() > self.patience.start:
                self.check_paused(tuple(self.workers()), idle=True)
        if check is not None:
            check()
        if attempt.quiet.seconds() > self.patience.stall:
            raise EngineError(
                f"no {attempt.what} was finished anywhere for {self.patience.stall:g} s; look at "
                "the workers' logs, and allow more time if it takes that long"
            )

    def paused(self, needed: Sequence[str], idle: bool = False) -> list[str]:
        """Return those of the needed workers that Dask has paused, with their memory use.

        With ``idle``, return none while any worker runs a task, which may free memory.
        """
        workers = self.client.sync(self.client.scheduler.identity)["workers"]
        if idle and any(_executing(worker["metrics"]) for worker in workers.values()):
            return []
        return [
            f"{address} ({format_bytes(worker['metrics']['memory'])} of "
            f"{format_bytes(worker['memory_limit'])})"
            for address in needed
            if (worker := workers.get(address)) is not None and worker["status"] == "paused"
        ]

    def check_paused(self, needed: Sequence[str], idle: bool = False) -> None:
        """Raise EngineError if needed workers are paused; see `paused`."""
        if paused := self.paused(needed, idle):
            raise EngineError(
                "workers are paused because their memory is full, and nothing was begun for "
                f"{self.patience.start:g} s: {', '.join(paused)}; give workers more memory or use "
                "more of them, and run again, or resume the run from its store"
            )

    def _map(self, function: Callable[..., R], items: Sequence[Any], name: str) -> list[R]:
        """Send every item as a task, in their order; repeat after losses."""
        packed = pack(function)

        def work() -> list[R]:
            self.await_workers()
            key, large = uuid.uuid4().hex, packed.nbytes > MAX_REPEATED
            shared: Any = self.submit(f"send-{name}", _identity, packed) if large else packed
            futures = [self.submit(name, _call_item, key, shared, item) for item in items]
            try:
                return self.results(futures, Attempt("share of a pass over the data"))
            finally:
                for future in (*futures, *([shared] if large else [])):
                    future.release()

        return self.retry_segment(work)

    def close(self) -> None:
        """Unsubscribe from events, and release the bands on the workers."""
        self.state_client.close()
        if self._listening and self.client.status == "running":
            self.client.unsubscribe_topic(self.topic)
        self._listening = False


@contextmanager
def large_graphs() -> Iterator[None]:
    """Disable Dask's warning about large graphs: the state of a segment is large."""
    with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1000 PiB"}):
        yield


def is_adaptive(client: Any) -> bool:
    """Check whether a client's cluster adapts its number of workers.

    A client that has only the address of a scheduler asks the scheduler: its process may hold the
    cluster object. Any other cluster counts as adaptive once the scheduler has retired workers.
    """
    cluster = getattr(client, "cluster", None)
    if cluster is not None:
        return getattr(cluster, "_adaptive", None) is not None

    # A nested function is pickled by value, so that the scheduler does not need daskfactor.
    def scales(dask_scheduler: Any) -> bool:
        from distributed.deploy.spec import SpecCluster

        clusters = [c for c in SpecCluster._instances if c.scheduler is dask_scheduler]
        events = [event for _, event in dask_scheduler.get_events("all")]
        return any(cluster._adaptive is not None for cluster in clusters) or any(
            event.get("action") == "retire-workers" and event.get("retired") for event in events
        )

    async def ask() -> bool:
        answer = client.run_on_scheduler(scales, asynchronous=True)
        return bool(await asyncio.wait_for(answer, ANSWERS_WITHIN))

    with contextlib.suppress(OSError, TimeoutError):
        return bool(client.sync(ask))
    return False


def _can_write(mark: str) -> bool:
    """Check whether a file of the client exists here, in a writable folder."""
    return Path(mark).exists() and os.access(Path(mark).parent, os.W_OK)


def _executing(metrics: Mapping[str, Any]) -> int:
    """Return the number of tasks that a worker executes."""
    return int(metrics.get("task_counts", {}).get("executing", 0))


def _has_plugin(dask_worker: Any) -> bool:
    return PLUGIN in dask_worker.plugins


def _identity(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a packed function, so that workers copy it from each other."""
    return packed


def _call_item(key: str, packed: NDArray[np.uint8], item: Any) -> Any:
    """Call a function with an item (a task).

    The threads of a worker share the function that was unpacked last: it may hold data.
    """
    global _unpacked
    with _unpacking:
        if _unpacked[0] != key:
            _unpacked = key, unpack(packed)
        function = _unpacked[1]
    with single_threaded_blas():
        return function(item, local_workspace())


MAX_REPEATED = 2**16
"""Bytes of a function up to which every task has a copy, so that Dask may run it anywhere at once:
tasks that share an input begin where it is, and are moved later."""
_unpacked: tuple[str, Any] = "", None
_unpacking = threading.Lock()


def _task(function: Callable[..., Any], *args: Any) -> Any:
    """Call the function of a task; remove the causes of errors of this package.

    Causes from other libraries may fail to unpickle, and the error would be lost with them.
    """
    try:
        return function(*args)
    except DaskfactorError as error:
        error.__cause__ = error.__context__ = None
        raise


def _real_error(errors: Sequence[BaseException]) -> BaseException | None:
    """Return the first error that is not the loss of a worker."""
    for error in errors:
        if isinstance(error, (DaskfactorError, MemoryError)):
            return error
        if not isinstance(error, LOSSES):
            wrapped = EngineError(
                f"a worker failed outside of any block: {type(error).__name__}: {error}"
            )
            wrapped.__cause__ = error
            return wrapped
    return None


def _leave_thread_pool() -> None:
    """Leave the worker's thread pool if this runs in a task, which may wait for other tasks."""
    try:
        get_worker()
    except ValueError:
        return  # not inside a task
    with contextlib.suppress(KeyError):  # the task has left it already
        secede()  # type: ignore[no-untyped-call]


class ClusterTasksExecutor(ClusterExecutor):
    """Runs plans as Dask graphs on the workers of a `distributed` client.

    Dask assigns the tasks to workers. The first tasks of a graph read bands from the stores of
    workers; the last ones store the new bands where they were computed. Suited to tasks of 100 ms
    or more, and to adaptive clusters.

    Parameters
    ----------
    client
        A synchronous client of any cluster.
    workers
        Addresses of the first workers; all by default. Tasks may move to others.
    patience
        Time limits and the limit on retries.
    """

    name = "tasks"

    def _segment(self, work: Work, state: RemoteState) -> RemoteState:
        done = 0
        groups = group_rounds(work.plan)
        groups_per_graph = max(1, MAX_TASKS // max(map(len, groups)))
        for start in range(0, len(groups), groups_per_graph):
            part = groups[start : start + groups_per_graph]
            state = self._run_graph(part, work, state, done)
            done += sum(len(task.ops) for group in part for task in group)
        threads = self.workers().values()
        self.report.lanes, self.report.workers = sum(threads) or 1, len(threads) or 1
        return state

    def _run_graph(
        self,
        groups: Sequence[Sequence[SuperBlock]],
        work: Work,
        state: RemoteState,
        done: int,
    ) -> RemoteState:
        """Run one graph; return the state that its last tasks have stored on the workers."""
        size, token = work.plan[0].size, f"-{uuid.uuid4().hex}"
        members, version = list(self.members()), next(self.state_client.versions)
        futures: list[Any] = []

        def send(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            futures.append(self.submit(name, function, *args, **options))
            return futures[-1]

        with self.reporting() as (attempt, _, report_progress):
            try:
                # As bytes, which workers copy from each other and every task unpickles.
                packed_work = pack(work.for_tasks(report_progress))
                program = send("send-program", unpack, pack(packed_work))
                inputs = {
                    key: send(
                        key[0], read_portion, pack(source), workers=[source.address], priority=10
                    )
                    for key, source in graph_sources(state, size).items()
                }
                split = state.widest * size > SPLIT_BYTES
                graph, outputs = build_graph(groups, program, inputs, token, split)
                # Keys that are no tuples are inputs that no task has changed.
                keys = [key for key in itertools.chain(*outputs) if isinstance(key, tuple)]
                with large_graphs():
                    portions = self.client.get(graph, keys, sync=False)
                futures.extend(portions)
                by_key = dict(zip(keys, portions, strict=True))
                parts, where = (
                    (*range(state.n_factors), CELLS),
                    {"workers": members, "priority": 10},
                )
                stored = [
                    self.submit("leave-bands", store_portion, version, part, by_key[key], **where)
                    for part, part_keys in zip(parts, outputs, strict=True)
                    for key in part_keys
                    if key in by_key
                ]
                for future in portions:
                    future.release()

                def check() -> None:
                    if any(future.cancelled() for future in inputs.values()):
                        raise SegmentLost("a worker with bands was lost")
                    work.on_done(done + sum(attempt.done.values()))

                outcomes = self.parts_of(stored, attempt, check)
            finally:
                for future in futures:
                    future.release()
        self.report.busy_seconds += sum(report.busy for report, _ in outcomes)
        return state.with_reports(outcomes)
