"""A client's workers, seen from the client: who is there, who has gone, and trying again."""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import dask
from distributed import Client, KilledWorker, get_worker, secede
from distributed.comm.core import CommClosedError

from daskfactor.errors import DaskfactorError, EngineError, OptionError
from daskfactor.executors.base import RunReport
from daskfactor.executors.scheduler import SegmentLost
from daskfactor.executors.serialization import Shares
from daskfactor.executors.timeout import Waited

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOSSES = (SegmentLost, KilledWorker, CommClosedError, concurrent.futures.CancelledError)
"""What a segment is run again for."""

POLL = 0.2
"""Seconds between looks at futures that have not called back."""


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
class News:
    """What workers have told of the running attempt; written by the client's event loop."""

    started: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    done: dict[int, int] = field(default_factory=dict)
    lost: bool = False
    quiet: Waited = field(default_factory=Waited)


class Cluster:
    """What executors on a `distributed` client share.

    Parameters
    ----------
    client
        A synchronous client.
    workers
        Addresses to use; all workers by default.
    """

    def __init__(self, client: Client, workers: Sequence[str] | None, patience: Patience) -> None:
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
        self.patience = patience
        self.shares = Shares()
        self.token = uuid.uuid4().hex
        self.topic = f"daskfactor-{self.token}"
        self._only = None if workers is None else frozenset(workers)
        self._news: dict[tuple[str, int], News] = {}
        self._changed = threading.Event()
        self._listening = False

    # -- workers ---------------------------------------------------------------

    def workers(self) -> dict[str, int]:
        """Threads of every worker that may be used, by address, as the scheduler sees it."""
        found: dict[str, int] = self.client.nthreads()
        return {
            address: threads
            for address, threads in found.items()
            if threads > 0 and (self._only is None or address in self._only)
        }

    def await_workers(self) -> dict[str, int]:
        """The workers, once there is one."""
        waited = Waited()
        while not (found := self.workers()):
            if waited.seconds() > self.patience.workers:
                raise EngineError(
                    f"no worker was there within {self.patience.workers:g} s"
                    + (f" (of {', '.join(sorted(self._only))})" if self._only else "")
                    + "; start workers and run again, or resume the run from its store"
                )
            self._changed.wait(POLL)
        return found

    def who_says_yes(
        self, question: Callable[..., bool], addresses: Sequence[str], limit: float
    ) -> set[str]:
        """Those workers whose answer is yes within ``limit`` seconds."""

        async def ask(address: str) -> bool:
            run = self.client.run
            try:
                answer = run(question, workers=[address], on_error="ignore", asynchronous=True)
                return bool((await asyncio.wait_for(answer, limit)).get(address))
            except (OSError, TimeoutError):
                return False

        async def ask_all() -> list[bool]:
            return await asyncio.gather(*(ask(address) for address in addresses))

        answers = self.client.sync(ask_all)
        return {address for address, yes in zip(addresses, answers, strict=True) if yes}

    def check_any(self) -> None:
        """Raise EngineError if there is no worker any more and none comes."""
        self.await_workers()

    def check_members(self, members: Sequence[str]) -> None:
        """Raise SegmentLost if one of these workers has gone."""
        gone = sorted(set(members) - set(self.client.nthreads()))
        if gone:
            raise SegmentLost(f"lost worker {', '.join(gone)}")

    def check_quiet(self, quiet: Waited, what: str) -> None:
        """Raise EngineError if nothing has moved anywhere for too long."""
        if quiet.seconds() > self.patience.stall:
            raise EngineError(
                f"no {what} was finished anywhere for {self.patience.stall:g} s; look at the "
                "workers' logs, and allow more time if it takes that long"
            )

    # -- news --------------------------------------------------------------------

    def listen(self, token: str, attempt: int) -> News:
        """Start to listen for news of an attempt."""
        if not self._listening:
            self.client.subscribe_topic(self.topic, self._hear)
            self._listening = True
        news = self._news[token, attempt] = News()
        return news

    def forget(self, token: str) -> None:
        """Stop to listen for news of all attempts of a run."""
        for key in [key for key in self._news if key[0] == token]:
            del self._news[key]

    def _hear(self, event: tuple[float, Mapping[str, Any]]) -> None:
        message = event[1]
        news = self._news.get((message["token"], message["attempt"]))
        if news is None:
            return
        news.quiet.restart()
        match message["kind"]:
            case "started":
                news.started.add(message["rank"])
            case "ended":
                news.ended.add(message["rank"])
            case "progress":
                news.done[message["rank"]] = message["done"]
            case "lost":
                news.lost = True
        if message["kind"] != "progress":
            self._changed.set()

    # -- futures -------------------------------------------------------------------

    def fresh(self) -> str:
        """A name that no other task has."""
        return uuid.uuid4().hex

    def submit(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Submit one task, however large its arguments."""
        with large_graphs():
            future = self.client.submit(function, *args, pure=False, **options)
        self.watch(future)
        return future

    def watch(self, future: Any) -> None:
        """Wake up when a future is done."""
        future.add_done_callback(lambda _: self._changed.set())

    def wait(self, futures: Sequence[Any], look: Callable[[], None]) -> None:
        """Until all are finished; ``look`` is called now and then and may raise.

        Raises the error of a failed one; an error that is more than a loss is
        preferred, and waited for a little.
        """
        since_failure: Waited | None = None
        while True:
            statuses = [future.status for future in futures]
            if all(status == "finished" for status in statuses):
                return
            if any(status in ("error", "cancelled", "lost") for status in statuses):
                since_failure = since_failure or Waited()
                late = since_failure.seconds() > self.patience.grace
                if late or "pending" not in statuses or self._real_error(futures):
                    raise self._real_error(futures) or SegmentLost(_reason(futures))
            look()
            self._changed.wait(POLL)
            self._changed.clear()

    def _real_error(self, futures: Sequence[Any]) -> BaseException | None:
        for future in futures:
            if future.status == "error":
                error: BaseException = future.exception()
                if isinstance(error, (DaskfactorError, MemoryError)):
                    return error
                if not isinstance(error, (*LOSSES, OSError, TimeoutError)):
                    wrapped = EngineError(
                        f"a worker failed outside of any block: {type(error).__name__}: {error}"
                    )
                    wrapped.__cause__ = error
                    return wrapped
        return None

    def gather(self, futures: Any, look: Callable[[], None]) -> Any:
        """Results of finished futures; ``look`` may raise while they are on their way."""

        async def pull() -> Any:
            return await self.client.gather(futures, asynchronous=True)

        task = asyncio.run_coroutine_threadsafe(pull(), self.client.loop.asyncio_loop)
        try:
            while True:
                done, _ = concurrent.futures.wait([task], POLL)
                if done:
                    return task.result()
                look()
        except BaseException:
            task.cancel()
            raise

    # -- trying again ------------------------------------------------------------------

    def persist(self, attempt: Callable[[int], T], report: RunReport, first: int = 0) -> T:
        """Try until it succeeds or was lost too often; losses are counted and logged."""
        for number in range(first, first + self.patience.losses + 1):
            try:
                return attempt(number)
            except DaskfactorError:
                raise
            except Exception as loss:
                self._check_client(loss)
                if not isinstance(loss, (*LOSSES, OSError, TimeoutError)):
                    raise
                report.lost_segments += 1
                logger.warning("a segment is run again: %s", loss)
                last: BaseException = loss
        raise EngineError(
            f"a segment was lost {self.patience.losses + 1} times in a row, the last time "
            f"because of: {last}; find out why workers die (memory is the usual reason) and "
            "resume the run from its store"
        ) from last

    def _check_client(self, error: Exception) -> None:
        """A closed client fails in many ways; there is one thing to say of all."""
        if self.client.status != "running":
            raise EngineError(
                f"the client has lost its scheduler (it is {self.client.status}); connect to a "
                "cluster again and resume the run from its store"
            ) from error

    def close(self) -> None:
        """Remove what was written for workers, and stop listening."""
        if self._listening and self.client.status == "running":
            self.client.unsubscribe_topic(self.topic)
        self._listening = False
        self.shares.close()


def _leave_thread_pool() -> None:
    """Make room for other tasks if this is one: those it waits for may need its thread."""
    try:
        get_worker()
    except ValueError:
        return  # not inside a task
    with contextlib.suppress(KeyError):  # the task has left it already
        secede()  # type: ignore[no-untyped-call]


def _reason(futures: Sequence[Any]) -> str:
    for future in futures:
        if future.status == "error":
            return str(future.exception())
    return "a task was cancelled"


@contextmanager
def large_graphs() -> Iterator[None]:
    """No warning of the size of what is sent: a segment's state is meant to travel."""
    with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1000 PiB"}):
        yield
