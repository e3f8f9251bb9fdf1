"""Block updates as Dask tasks on a `distributed` cluster, of any size at any moment.

Dask places the tasks and computes again what a lost worker held; what it gives
up is run again from the client's state. Good where a task takes 100 ms or more
and where workers come and go.
"""

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from distributed import Client, Future, get_worker

from daskfactor.data.blocks import BlockedData
from daskfactor.executors import sizes
from daskfactor.executors.base import BlockProgram, OnDone, RunReport
from daskfactor.executors.cluster import Cluster, News, Patience, large_graphs
from daskfactor.executors.graph import (
    Context,
    SuperBlock,
    TaskResult,
    build_graph,
    group_rounds,
    join_state,
    split_state,
)
from daskfactor.executors.mapping import map_on_cluster, unpack
from daskfactor.executors.plan import Round
from daskfactor.executors.serialization import Handle, Packed, open_reader
from daskfactor.executors.state import ChainState
from daskfactor.kernels.workspace import Workspace

T = TypeVar("T")
R = TypeVar("R")

MOST_TASKS = 4000
"""Tasks of one graph: the scheduler remembers them all until the graph is done."""
SPLIT_BYTES = 2**20
"""Row bands of more bytes than this are not sent along with column bands."""
TELL_EVERY = 0.25

sizes.register()


class ClusterTasksExecutor:
    """Runs plans as Dask graphs on the workers of a `distributed` client.

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
    reason = "as asked for"

    def __init__(
        self,
        client: Client,
        workers: Sequence[str] | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.report = RunReport()
        self._cluster = Cluster(client, workers, patience or Patience())

    def run(
        self,
        plan: Sequence[Round],
        program: BlockProgram,
        state: ChainState,
        data: BlockedData,
        on_done: OnDone | None = None,
    ) -> ChainState:
        if not plan:
            return state
        started = time.perf_counter()
        handle = self._cluster.shares.handle(data)
        groups = group_rounds(plan)
        total = sum(len(task.ops) for group in groups for task in group)
        done, busy = 0, 0.0
        for part in _portions(groups):
            piece = _Piece(self._cluster, part, program, state, handle, done, on_done)
            try:
                state, seconds = self._cluster.persist(piece.attempt, self.report)
            finally:
                self._cluster.forget(piece.token)
            done += piece.operations
            busy += seconds
        if on_done is not None:
            on_done(total)
        workers = self._cluster.workers()
        self.report.add(
            RunReport(
                time.perf_counter() - started, busy, sum(workers.values()) or 1, len(workers) or 1
            )
        )
        return state

    def map(
        self,
        function: Callable[[T, Workspace], R],
        items: Sequence[T],
        name: str = "pass-over-data",
    ) -> list[R]:
        return map_on_cluster(self._cluster, self.report, function, items, name)

    def close(self) -> None:
        self._cluster.close()


class _Piece:
    """One graph: attempts at it until one succeeds."""

    def __init__(
        self,
        cluster: Cluster,
        groups: Sequence[Sequence[SuperBlock]],
        program: BlockProgram,
        state: ChainState,
        handle: Handle,
        before: int,
        on_done: OnDone | None,
    ) -> None:
        self.cluster = cluster
        self.groups = groups
        self.program = program
        self.state = state
        self.handle = handle
        self.before = before
        self.on_done = on_done
        self.token = cluster.fresh()
        self.operations = sum(len(task.ops) for group in groups for task in group)
        self.told = 0
        self.seen = time.monotonic()

    def attempt(self, number: int) -> tuple[ChainState, float]:
        """Send the starts and the graph, wait, and put the state together."""
        self.cluster.await_workers()
        token = f"-{self.token}-{number}"
        news = self.cluster.listen(self.token, number)
        futures: list[Any] = []
        try:
            starts = {}
            context = self._send(self._context(number), f"send-program{token}", futures)
            for key, value in split_state(self.state, self.groups[0][0].size).items():
                name = "-".join(str(part) for part in key) + token
                starts[key] = self._send(value, name, futures)
            split = _row_bytes(self.state, self.groups[0][0].size) > SPLIT_BYTES
            graph, ends = build_graph(self.groups, context, starts, token=token, split=split)
            keys = [*ends.rows, *ends.cols, *ends.cells]
            wanted = [key for key in keys if not isinstance(key, Future)]
            with large_graphs():
                found = self.cluster.client.get(graph, wanted, sync=False)
            futures.extend(found)
            by_key = dict(zip(wanted, found, strict=True))
            for future in found:
                self.cluster.watch(future)
            look = self._look(news)
            self.cluster.wait(found, look)
            results = self.cluster.gather(
                [key if isinstance(key, Future) else by_key[key] for key in keys], look
            )
        finally:
            for future in futures:
                future.release()
        return self._join(results, len(ends.rows), len(ends.cols))

    def _context(self, number: int) -> "SharedContext":
        program = self.cluster.shares.pack(self.program)
        return SharedContext(self.token, number, self.cluster.topic, program, self.handle)

    def _send(self, value: Any, key: str, futures: list[Any]) -> Any:
        """Give the scheduler a value of its own, so that no graph holds it."""
        future = self.cluster.submit(unpack, self.cluster.shares.pack(value), key=key)
        futures.append(future)
        return future

    def _look(self, news: News) -> Callable[[], None]:
        def look() -> None:
            done = min(sum(news.done.values()), self.operations - 1)
            if self.on_done is not None and done > self.told:
                self.told = done
                self.on_done(self.before + done)
            if time.monotonic() - self.seen > 1.0:
                self.cluster.await_workers()
                self.seen = time.monotonic()
            self.cluster.check_quiet(news.quiet, "block")

        return look

    def _join(
        self, results: Sequence[TaskResult], rows: int, cols: int
    ) -> tuple[ChainState, float]:
        parts = results[:rows], results[rows : rows + cols], results[rows + cols :]
        return join_state(self.state, *parts), sum(result.busy for result in results[:rows])


def _portions(groups: Sequence[list[SuperBlock]]) -> Iterator[list[list[SuperBlock]]]:
    """Groups in portions that one graph may hold."""
    portion: list[list[SuperBlock]] = []
    tasks = 0
    for group in groups:
        if portion and tasks + len(group) > MOST_TASKS:
            yield portion
            portion, tasks = [], 0
        portion.append(group)
        tasks += len(group)
    yield portion


def _row_bytes(state: ChainState, size: int) -> int:
    return max(sizes.band_bytes(band) for band in state.rows) * size


class SharedContext:
    """What all tasks of a graph share, as it is sent to workers."""

    def __init__(
        self, token: str, attempt: int, topic: str, program: Packed, handle: Handle
    ) -> None:
        self.token = token
        self.attempt = attempt
        self.topic = topic
        self.program = program
        self.handle = handle

    def load(self) -> Context:
        """The context, from this worker's own memory if a task has opened it before."""
        with _lock:
            known = _contexts.get((self.token, self.attempt))
        if known is None:
            known = Context(self.program.load(), open_reader(self.handle), _Teller(self).tell)
            with _lock:
                _contexts[self.token, self.attempt] = known
                while len(_contexts) > MOST_CONTEXTS:
                    _contexts.popitem(last=False)
        return known


_contexts: OrderedDict[tuple[str, int], Context] = OrderedDict()
_lock = threading.Lock()
MOST_CONTEXTS = 8


class _Teller:
    """Sums up the operations that a worker process has done and tells the client at times."""

    def __init__(self, shared: SharedContext) -> None:
        self._shared = shared
        self._done = 0
        self._told = 0.0
        self._lock = threading.Lock()
        self._rank = uuid.uuid4().hex

    def tell(self, operations: int) -> None:
        with self._lock:
            self._done += operations
            now = time.monotonic()
            if now - self._told < TELL_EVERY:
                return
            self._told = now
        shared = self._shared
        get_worker().log_event(
            shared.topic,
            {
                "kind": "progress",
                "token": shared.token,
                "attempt": shared.attempt,
                "rank": self._rank,
                "done": self._done,
            },
        )
