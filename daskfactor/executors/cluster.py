"""Executors on a cluster, seen from the client: its workers, those lost, tasks, trying again."""

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
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
from dask.utils import format_bytes
from distributed import Client, KilledWorker, get_worker, secede
from distributed.comm.core import CommClosedError
from numpy.typing import NDArray

from daskfactor.data import blocks
from daskfactor.errors import DaskfactorError, EngineError, OptionError
from daskfactor.executors.base import (
    Executor,
    R,
    SegmentLost,
    StateLost,
    T,
    Tell,
    Waited,
    Work,
    local_workspace,
)
from daskfactor.executors.connection import ANSWERS_WITHIN
from daskfactor.executors.held import HeldState, Keeper, starting_points
from daskfactor.executors.segment import Exchange
from daskfactor.executors.state import CELLS, ChainState, FactorBand
from daskfactor.executors.store import (
    PLUGIN,
    leave_portion,
    pack,
    read_portion,
    unpack,
)
from daskfactor.executors.tasks import (
    SuperBlock,
    build_graph,
    group_rounds,
)
from daskfactor.executors.threads import share_bands
from daskfactor.machine import single_threaded_blas
from daskfactor.results.files import PARTIAL

logger = logging.getLogger(__name__)

MOST_TASKS = 4000
"""Tasks of one graph: the scheduler remembers them all until the graph is done."""
SPLIT_BYTES = 2**20
"""Row bands of more bytes than this are not sent along with bands of other factors."""

LOSSES = (
    SegmentLost,
    KilledWorker,
    CommClosedError,
    concurrent.futures.CancelledError,
    OSError,
    TimeoutError,
)
"""What a segment is run again for."""

POLL = 0.2
"""Seconds between looks at futures that have not called back."""
CACHE_SHARE = 0.4
"""Of a worker's memory limit, for decoded blocks; Dask starts to spill at 0.6."""
AFTER_LOSS = 5.0
"""Seconds for workers to answer after a loss: a dead one may be listed for a while."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for what, in seconds, and how often to try again.

    Attributes
    ----------
    start
        Until all workers of a ring have started their part.
    stall
        Without a finished block anywhere. Longer than any block takes,
        compilation and reading included.
    workers
        Until the first worker is there.
    grace
        After a failure, for the other workers to say what they know.
    losses
        Times in a row that a segment is run again.
    """

    start: float = 120.0
    stall: float = 1800.0
    workers: float = 60.0
    grace: float = 30.0
    losses: int = 10


@dataclass
class Attempt:
    """One attempt at a segment, and what its workers have told; written by the event loop.

    Workers are known by their place among ``members``; without members any worker
    may take part. ``what`` is what they finish, one after the other.
    """

    key: tuple[str, int]
    what: str = "block"
    members: tuple[str, ...] = ()
    started: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    done: dict[Any, int] = field(default_factory=dict)
    lost: bool = False
    finished: int = 0
    quiet: Waited = field(default_factory=Waited)

    def hear(self, message: Mapping[str, Any]) -> None:
        """Take in what a worker tells."""
        rank = message["rank"]
        self.quiet.restart()
        match message["kind"]:
            case "started":
                self.lost |= rank in self.started  # again: its worker died and came back
                self.started.add(rank)
            case "ended":
                self.ended.add(rank)
            case "progress":
                self.done[rank] = message["done"]
            case "lost":
                self.lost = True


def tell_client(
    topic: str,
    attempt: tuple[str, int],
    kind: str,
    rank: Any = None,
    done: int = 0,
    worker: Any = None,
) -> None:
    """Tell the client how an attempt goes on, from one of its workers, without waiting."""
    message = {"attempt": attempt, "kind": kind, "rank": rank, "done": done}
    (worker or get_worker()).log_event(topic, message)


def _budget() -> int | None:
    """Return what decoded blocks may take; None outside of workers and without a limit."""
    try:
        limit = get_worker().memory_manager.memory_limit
    except ValueError:
        return None
    return int(limit * CACHE_SHARE) if limit else None


blocks.blocks_budget = _budget


class ClusterExecutor(Executor):
    """What executors on the workers of a `distributed` client share.

    Parameters
    ----------
    client
        A synchronous client.
    workers
        Addresses to use; all workers by default.
    patience
        Limits on waiting and on trying again.
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
                "client was made with asynchronous=True, which this package cannot wait for; "
                "make one without"
            )
        _leave_thread_pool()
        self.client: Any = client  # so much of it is without types
        self.patience = patience or Patience()
        self.topic = f"daskfactor-{uuid.uuid4().hex}"
        self._only = None if workers is None else frozenset(workers)
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._ready: set[str] = set()
        self._registered, self._doubt = False, False
        self._unended: list[Attempt] = []
        self.most_losses = self.patience.losses
        self.keeper = Keeper(self)
        self._reaching: dict[Path, dict[str, bool]] = {}
        self._changed = threading.Event()
        self._listening = False
        self._seen = 0.0

    # -- workers ---------------------------------------------------------------

    def workers(self) -> dict[str, int]:
        """Return the threads of every worker that may be used, as the scheduler sees it."""
        found: dict[str, int] = self.client.nthreads()
        return {
            address: threads
            for address, threads in found.items()
            if threads > 0 and (self._only is None or address in self._only)
        }

    def await_workers(self) -> dict[str, int]:
        """Return the workers, once there is one.

        A cluster that grows by itself starts one when there is a task to do.
        """
        if found := self.workers():
            return found
        waited, task = Waited(), self.submit("wait-for-a-worker", _same, pack(None))
        while not (found := self.workers()):
            if waited.seconds() > self.patience.workers:
                raise EngineError(
                    f"no worker was there within {self.patience.workers:g} s"
                    + (f" (of {', '.join(sorted(self._only))})" if self._only else "")
                    + "; start workers and run again, or resume the run from its store"
                )
            self._changed.wait(POLL)
        task.release()
        return found

    def responding_workers(
        self, question: Callable[..., bool], addresses: Sequence[str], limit: float
    ) -> set[str]:
        """Return those workers whose answer is yes within ``limit`` seconds."""

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
        """Return the threads of the workers that will take part, all of them known to answer.

        After a loss every one of them is asked again.
        """
        fresh, self._doubt = self._doubt, False
        if fresh or not self._registered:  # a scheduler that was started again has forgotten it
            self.client.register_plugin(Exchange())
            self._registered = True
        waited = Waited()
        while True:
            found = self.await_workers()
            self._ready = set() if fresh else self._ready & set(found)
            new = sorted(set(found) - self._ready)
            if new:
                limit = AFTER_LOSS if fresh else self.patience.workers
                self._ready |= self.responding_workers(_has_plugin, new, limit)
            members = {address: found[address] for address in sorted(self._ready)}
            if members:
                self.keeper.anchor(members, anew=fresh)
                return members
            if waited.seconds() > self.patience.workers:
                raise EngineError(
                    f"none of {len(found)} workers answered within {self.patience.workers:g} s; "
                    "look at their logs"
                )
            time.sleep(0.1)

    def shares(self, blocks: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return how many row bands each worker has that is needed, and threads of all."""
        threads = self.members()
        counts = self._share(blocks, threads)
        return {a: count for a, count in zip(threads, counts, strict=True) if count}, threads

    def _share(self, blocks: int, threads: Mapping[str, int]) -> list[int]:
        """Return how many row bands each worker is to have."""
        return share_bands(blocks, list(threads.values()), None)

    # -- states ----------------------------------------------------------------------

    def hold(self, state: ChainState) -> ChainState:
        """Send a state to the workers, where its bands stay from now on.

        A cluster that grows and shrinks by itself retires workers whenever they have nothing
        to do, so that a state stays with the client and goes out for every plan.
        """
        if isinstance(state, HeldState) or is_adaptive(self.client):
            return state
        with self._at_stake():
            return self._hold(state)

    def _hold(self, state: ChainState) -> HeldState:
        held = self.keeper.hold(state.bands(), self._owners(state.blocks))
        if state.cells:
            held.cells = state.cells
        held.evaluations = list(state.evaluations)
        return held

    def _owners(self, blocks: int) -> list[str]:
        shares, _ = self.shares(blocks)
        return [address for address, count in shares.items() for _ in range(count)]

    def state_of(
        self,
        blocks: int,
        band: Callable[[int, int], FactorBand],
        shared: Path | bool = False,
        factors: int = 2,
    ) -> ChainState:
        """Make a state of bands, which workers read where they can, or are sent one by one."""
        if is_adaptive(self.client):
            return super().state_of(blocks, band, factors=factors)
        with self._at_stake():
            owners = self._owners(blocks)
            if self.reaches(shared, sorted(set(owners))):
                return self.keeper.read(band, owners, factors)
            at = itertools.product(range(factors), range(blocks))
            return self.keeper.hold(itertools.starmap(band, at), owners)

    def reaches(self, folder: Path | bool, addresses: Sequence[str]) -> bool:
        """Whether workers can write into a folder of this process; True and False are answers."""
        if isinstance(folder, bool):
            return folder
        known = self._reaching.setdefault(folder, {})
        if new := sorted(set(addresses) - set(known)):
            mark = folder / f"{uuid.uuid4().hex}{PARTIAL}"
            try:
                mark.touch()
                with self._at_stake():
                    asked = partial(_can_write, str(mark))
                    yes = self.responding_workers(asked, new, self.patience.workers)
                mark.unlink(missing_ok=True)
            except OSError:
                return False  # the client will say what is wrong when it writes itself
            known |= {address: address in yes for address in new}
        return all(known[address] for address in addresses)

    def _run(self, work: Work, state: ChainState) -> ChainState:
        after: ChainState
        if isinstance(state, HeldState):
            with self._at_stake(), self._attempting(uuid.uuid4().hex, 0) as attempt:
                after = self._segment(work, state, attempt)
        else:

            def whole(attempt: Attempt) -> ChainState:
                return self._segment(work, self._hold(state.bare()), attempt).local()

            after = state.followed_by(self.persist(whole))
        work.on_done(sum(len(part.ops) for part in work.plan))
        return after

    @abstractmethod
    def _segment(self, work: Work, state: HeldState, attempt: Attempt) -> HeldState:
        """Run a plan once, on bands where they are; what it changes must not be used again."""

    def call(self, task: Callable[..., T], jobs: Mapping[str, Any]) -> dict[str, T]:
        """Do something with bands on the workers that have them, each with a job of its own."""
        attempt = Attempt(("", 0), "call with bands", tuple(jobs))
        futures = []
        try:
            with self._at_stake():
                for address, job in jobs.items():
                    where = {"workers": [address], "priority": 10}
                    futures.append(self.submit("each-band", task, pack(job), **where))
                found = self.results(futures, attempt)
        finally:
            for future in futures:
                future.release()
        return dict(zip(jobs, found, strict=True))

    def wait_for(self, ask: Callable[[str], Awaitable[T]], addresses: Sequence[str]) -> list[T]:
        """Ask workers something, all at once, and wait for their answers."""

        async def ask_all() -> list[T]:
            return await asyncio.gather(*map(ask, addresses))

        if not addresses:
            return []
        attempt = Attempt(("", 0), "transfer of bands", tuple(addresses))
        with self._at_stake():
            return self._await(ask_all(), attempt, None)

    @contextmanager
    def _at_stake(self) -> Iterator[None]:
        """Turn losses into `StateLost`, while bands are in the workers alone."""
        try:
            yield
        except (DaskfactorError, StateLost):
            self._doubt = True
            raise
        except Exception as loss:
            self._doubt = True
            self._check_client(loss)
            if isinstance(loss, LOSSES):
                raise StateLost(str(loss) or type(loss).__name__) from loss
            raise

    # -- attempts ------------------------------------------------------------------

    @contextmanager
    def _attempting(self, token: str, number: int) -> Iterator[Attempt]:
        """Listen to the news of an attempt."""
        attempt = self._attempts[token, number] = Attempt((token, number))
        try:
            yield attempt
        finally:
            if attempt not in self._unended:
                del self._attempts[token, number]

    def persist(self, work: Callable[[Attempt], T]) -> T:
        """Try until it succeeds or was lost too often; losses are counted and logged."""
        token, most = uuid.uuid4().hex, self.patience.losses + 1
        for number in range(most):
            try:
                with self._attempting(token, number) as attempt:
                    return work(attempt)
            except DaskfactorError:
                raise
            except Exception as loss:
                self._check_client(loss)
                if not isinstance(loss, LOSSES):
                    raise
                self._doubt = True
                self.report.lost_segments += 1
                logger.warning("a segment is run again: %s", loss)
                last: BaseException = loss
        raise EngineError(
            f"a segment was lost {most} times in a row, the last time "
            f"because of: {last}; find out why workers die (memory is the usual reason) and "
            "resume the run from its store"
        ) from last

    def _check_client(self, error: Exception) -> None:
        """Raise EngineError for a closed client, which fails in many ways.

        One whose connection broke is waited for while it tries to connect again; the
        scheduler has forgotten by then what it was to tell.
        """
        waited = Waited()
        while self.client.status == "connecting" and waited.seconds() < self.patience.workers:
            time.sleep(POLL)
        if self.client.status != "running":
            raise EngineError(
                f"the client has lost its scheduler (it is {self.client.status}); connect to a "
                "cluster again and resume the run from its store"
            ) from error
        self._listening = False

    def teller(self, attempt: Attempt) -> Tell:
        """Return what workers tell their news with; they are heard from now on."""
        if not self._listening:
            self.client.subscribe_topic(self.topic, self._hear)
            self._listening = True
        return partial(tell_client, self.topic, attempt.key)

    def _hear(self, event: tuple[float, Mapping[str, Any]]) -> None:
        attempt = self._attempts.get(tuple(event[1]["attempt"]))
        if attempt is not None:
            attempt.hear(event[1])
            if event[1]["kind"] != "progress":
                self._changed.set()

    # -- futures -------------------------------------------------------------------

    def submit(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Submit one task under a readable name, however large its arguments."""
        with large_graphs():
            key = f"{name}-{uuid.uuid4().hex}"
            future = self.client.submit(_task, function, *args, key=key, pure=False, **options)
        self.watch(future)
        return future

    def watch(self, future: Any) -> None:
        """Wake up when a future is done."""
        future.add_done_callback(lambda _: self._changed.set())

    def results(
        self, futures: Sequence[Any], attempt: Attempt, look: Callable[[], None] | None = None
    ) -> list[Any]:
        """Wait for futures and fetch their results; ``look`` is called meanwhile and may raise.

        Raises the error of a failed one; an error that is more than a loss is
        preferred, and waited for a little.
        """
        since_failure: Waited | None = None
        while True:
            statuses = [future.status for future in futures]
            if all(status == "finished" for status in statuses):
                return self._await(self._gather(futures), attempt, look)
            if any(status in ("error", "cancelled", "lost") for status in statuses):
                since_failure = since_failure or Waited()
                late = since_failure.seconds() > self.patience.grace
                errors = [future.exception() for future in futures if future.status == "error"]
                real = _real_error(errors)
                if late or "pending" not in statuses or real:
                    raise real or SegmentLost(str(errors[0]) if errors else "a task was cancelled")
            if statuses.count("finished") > attempt.finished:
                attempt.finished = statuses.count("finished")
                attempt.quiet.restart()
            self._look(attempt, look)
            self._changed.wait(POLL)
            self._changed.clear()

    async def _gather(self, futures: Sequence[Any]) -> list[Any]:
        return list(await self.client.gather(list(futures), asynchronous=True))

    def _await(
        self, coroutine: Coroutine[Any, Any, T], attempt: Attempt, look: Callable[[], None] | None
    ) -> T:
        """Wait for what the client's event loop does; raise if workers have gone meanwhile."""
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
                self._look(attempt, look)
        except BaseException:
            task.cancel()
            raise

    def _look(self, attempt: Attempt, look: Callable[[], None] | None) -> None:
        """Raise if workers have gone, or nothing has moved anywhere for too long."""
        now = time.monotonic()
        if now - self._seen > 0.5 or attempt.lost:
            self._seen = now
            gone = sorted(set(attempt.members) - set(self.client.nthreads()))
            if gone:
                raise SegmentLost(f"lost worker {', '.join(gone)}")
            self.await_workers()
            if attempt.quiet.seconds() > self.patience.start:
                self.check_paused(attempt.members or tuple(self.workers()), idle=True)
        if attempt.lost:
            raise SegmentLost("workers lost their connection to each other")
        if look is not None:
            look()
        if attempt.quiet.seconds() > self.patience.stall:
            raise EngineError(
                f"no {attempt.what} was finished anywhere for {self.patience.stall:g} s; look at "
                "the workers' logs, and allow more time if it takes that long"
            )

    def paused(self, needed: Sequence[str], idle: bool = False) -> list[str]:
        """Return which workers Dask lets begin nothing for want of memory, and what they have.

        ``idle``: none while any worker is at work, who might make room.
        """
        known = self.client.sync(self.client.scheduler.identity)["workers"]
        if idle and any(_executing(own["metrics"]) for own in known.values()):
            return []
        return [
            f"{address} ({format_bytes(own['metrics']['memory'])} of "
            f"{format_bytes(own['memory_limit'])})"
            for address in needed
            if (own := known.get(address)) is not None and own["status"] == "paused"
        ]

    def check_paused(self, needed: Sequence[str], idle: bool = False) -> None:
        """Raise EngineError if workers that are needed are paused; see `paused`."""
        if told := self.paused(needed, idle):
            raise EngineError(
                "workers are paused because their memory is full, and nothing was begun for "
                f"{self.patience.start:g} s: {', '.join(told)}; give workers more memory or use "
                "more of them, and run again, or resume the run from its store"
            )

    def _map(self, function: Callable[..., R], items: Sequence[Any], name: str) -> list[R]:
        """Send a batch to every thread of the cluster; again when workers are lost."""
        packed = pack(function)

        def work(attempt: Attempt) -> list[R]:
            attempt.what = "share of a pass over the data"
            batches = min(len(items), sum(self.await_workers().values()))
            edges = [len(items) * n // batches for n in range(batches + 1)]
            sent = self.submit(f"send-{name}", _same, packed)
            futures = [
                self.submit(name, _call_batch, sent, list(items[low:high]))
                for low, high in itertools.pairwise(edges)
            ]
            try:
                return list(itertools.chain.from_iterable(self.results(futures, attempt)))
            finally:
                for future in (sent, *futures):
                    future.release()

        return self.persist(work)

    def close(self) -> None:
        """Stop listening to the cluster, and have workers drop what they keep."""
        self.keeper.close()
        if self._listening and self.client.status == "running":
            self.client.unsubscribe_topic(self.topic)
        self._listening = False


@contextmanager
def large_graphs() -> Iterator[None]:
    """Give no warning of the size of what is sent: a segment's state is meant to travel."""
    with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1000 PiB"}):
        yield


def is_adaptive(client: Any) -> bool:
    """Whether a client's cluster grows and shrinks by itself.

    A client that has only the address of a scheduler asks there: the cluster may be an object of
    that process; of any other it is known once the scheduler has had workers retired.
    """
    cluster = getattr(client, "cluster", None)
    if cluster is not None:
        return getattr(cluster, "_adaptive", None) is not None

    # A function within one is sent as it is, so that a scheduler needs no daskfactor.
    def scales(dask_scheduler: Any) -> bool:
        from distributed.deploy.spec import SpecCluster

        here = [own for own in SpecCluster._instances if own.scheduler is dask_scheduler]
        events = [event for _, event in dask_scheduler.get_events("all")]
        return any(own._adaptive is not None for own in here) or any(
            own.get("action") == "retire-workers" and own.get("retired") for own in events
        )

    async def ask() -> bool:
        asked = client.run_on_scheduler(scales, asynchronous=True)
        return bool(await asyncio.wait_for(asked, ANSWERS_WITHIN))

    with contextlib.suppress(OSError, TimeoutError):
        return bool(client.sync(ask))
    return False


def _can_write(mark: str) -> bool:
    """Whether a file of the client's is here, in a folder that may be written to."""
    return Path(mark).exists() and os.access(Path(mark).parent, os.W_OK)


def _executing(metrics: Mapping[str, Any]) -> int:
    """Return the tasks that a worker is at work on."""
    return int(metrics.get("task_counts", {}).get("executing", 0))


def _has_plugin(dask_worker: Any) -> bool:
    return PLUGIN in dask_worker.plugins


def _same(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return what a function is sent in: workers pass it on among themselves."""
    return packed


def _call_batch(packed: NDArray[np.uint8], items: Sequence[Any]) -> list[Any]:
    """Call a function with every item of a batch: the task."""
    function = unpack(packed)
    with single_threaded_blas():
        return [function(item, local_workspace()) for item in items]


def _task(function: Callable[..., Any], *args: Any) -> Any:
    """Call what a task is to call; an error of this package goes to the client without causes.

    Those of other libraries do not all survive pickling, and would take the error with them.
    """
    try:
        return function(*args)
    except DaskfactorError as error:
        error.__cause__ = error.__context__ = None
        raise


def _real_error(errors: Sequence[BaseException]) -> BaseException | None:
    """Return the first error that is more than the loss of a worker."""
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
    """Make room for other tasks if this is one: those it waits for may need its thread."""
    try:
        get_worker()
    except ValueError:
        return  # not inside a task
    with contextlib.suppress(KeyError):  # the task has left it already
        secede()  # type: ignore[no-untyped-call]


class ClusterTasksExecutor(ClusterExecutor):
    """Runs plans as Dask graphs on the workers of a `distributed` client.

    Dask places the tasks. A graph begins with tasks that read bands where they are, and ends
    with tasks that leave them where they were made. Good where a task takes 100 ms or more
    and where workers come and go.

    Parameters
    ----------
    client
        A synchronous client of any cluster.
    workers
        Addresses of the workers to start with; all by default. Tasks may be moved to others.
    patience
        Limits on waiting and on trying again.
    """

    name = "tasks"

    def _segment(self, work: Work, state: HeldState, attempt: Attempt) -> HeldState:
        done = 0
        groups = group_rounds(work.plan)
        most = max(1, MOST_TASKS // max(map(len, groups)))  # groups of one graph
        for at in range(0, len(groups), most):
            part = groups[at : at + most]
            state = self._graph(part, work, state, done, attempt)
            done += sum(len(task.ops) for group in part for task in group)
        threads = self.workers().values()
        self.report.lanes, self.report.workers = sum(threads) or 1, len(threads) or 1
        return state

    def _graph(
        self,
        groups: Sequence[Sequence[SuperBlock]],
        work: Work,
        state: HeldState,
        done: int,
        attempt: Attempt,
    ) -> HeldState:
        """Send a graph, wait, and note what its ends have left in the workers."""
        size, token = work.plan[0].size, f"-{uuid.uuid4().hex}"
        keepers, version = list(self.members()), self.keeper.next_version()
        attempt.members = state.places()
        futures: list[Any] = []

        def send(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            futures.append(self.submit(name, function, *args, **options))
            return futures[-1]

        try:
            # As bytes, which workers pass on among themselves and every task opens.
            program = send("send-program", unpack, pack(pack(work.sent(self.teller(attempt)))))
            starts = {
                key: send(key[0], read_portion, pack(told), workers=[told.place], priority=10)
                for key, told in starting_points(state, size).items()
            }
            wide = state.widest * size > SPLIT_BYTES
            graph, ends = build_graph(groups, program, starts, token, wide)
            keys = list(itertools.chain.from_iterable(ends))
            wanted = [key for key in keys if isinstance(key, tuple)]
            with large_graphs():
                made = self.client.get(graph, wanted, sync=False)
            futures.extend(made)
            by_key = dict(zip(wanted, made, strict=True))
            left = [
                send("leave-bands", leave_portion, self.keeper.token, version, kind, by_key[key],
                     workers=keepers, priority=10)
                for kind, own in zip((*range(state.n_factors), CELLS), ends, strict=True)
                for key in own if key in by_key
            ]  # fmt: skip
            for future in made:
                future.release()
            reports = self.results(
                left, attempt, lambda: work.on_done(done + sum(attempt.done.values()))
            )
        finally:
            for future in futures:
                future.release()
        self.report.busy_seconds += sum(report.busy for report in reports)
        return state.after(reports, version)
