"""Block updates as Dask tasks: a plan as a graph, on a scheduler of this process or a cluster.

Consecutive rounds that stay inside the same super-blocks become one task per
super-block, so that with a nested schedule a task holds (B / groups)² updates
and is worth its overhead. A task copies the bands it is given and returns the
copies: what an earlier task returned is never written to. On a cluster Dask
places the tasks and computes again what a lost worker held; what it gives up is
run again from the client's state. Good where a task takes 100 ms or more and
where workers come and go.
"""

import itertools
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import dask
from dask.callbacks import Callback
from dask.delayed import Delayed

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError
from daskfactor.executors.base import (
    BlockProgram,
    OnDone,
    R,
    RunReport,
    T,
    local_workspace,
    perform,
)
from daskfactor.executors.plan import Action, Op, Round
from daskfactor.executors.state import BlockCells, ChainState, Portion, bare, join_portions
from daskfactor.kernels.workspace import Workspace
from daskfactor.threads import available_cores, single_threaded_blas

if TYPE_CHECKING:
    from distributed import Client

    from daskfactor.data.grid import Block
    from daskfactor.executors.cluster import Attempt, Patience

MOST_TASKS = 4000
"""Tasks of one graph: a cluster's scheduler remembers them all until the graph is done."""
SPLIT_BYTES = 2**20
"""Row bands of more bytes than this are not sent along with column bands."""

_Graph = dict[Any, Any]


class _Opaque:
    """Carries a value through a graph without Dask looking inside."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def load(self) -> Any:
        return self.value


class Context(NamedTuple):
    """What all tasks of a graph share; ``tell`` takes a task's name and its operations."""

    program: BlockProgram
    data: BlockedData
    tell: Callable[[str, int], None] | None = None


class SuperBlock(NamedTuple):
    """A super-block's address and what one task does in it, ``position`` along the plan."""

    row: int
    col: int
    size: int
    position: int
    ops: tuple[Op, ...]


def update_super_block(
    context: Any, work: _Opaque, rows: Portion, cols: Portion, cells: Portion | None
) -> Portion:
    """Do all operations of one task, on copies of the bands that earlier tasks returned.

    ``context`` is anything whose ``load()`` gives the `Context`. Evaluations, records
    and seconds add up along the row bands' chain of tasks, so that only the last task
    of each has to be kept.
    """
    task: SuperBlock = work.value
    program, data, tell = context.load()
    own: dict[Block, BlockCells] = {}
    if cells is not None and _evaluates(task):
        own = {block: found.copy() for block, found in cells.cells.items()}
    after = Portion(
        {number: band.copy() for number, band in rows.rows.items()},
        {number: band.copy() for number, band in cols.cols.items()},
        own,
        list(rows.evaluations),
        {col: list(records) for col, records in rows.records.items()},
        rows.busy,
    )
    with single_threaded_blas():
        for number, op in enumerate(task.ops):
            found, seconds = perform(op, program, data, after, local_workspace())
            after.busy += seconds
            after.strip(op.block.col, task.position + number)
            if found is not None:
                after.evaluations.append(found)
    if tell is not None:
        tell(f"{task.position}-{task.row}-{task.col}", len(task.ops))
    return after


def _evaluates(task: SuperBlock) -> bool:
    return any(op.action == Action.EVALUATE for op in task.ops)


def hand_on(portion: Portion, part: str) -> Portion:
    """Return one part of a portion alone, so that the rest need not travel or be kept."""
    return Portion(**{part: getattr(portion, part)})


def group_rounds(plan: Sequence[Round]) -> list[list[SuperBlock]]:
    """Make runs of rounds inside the same super-blocks into one list of tasks each."""
    groups = []
    position = 0
    for (_, size), rounds in itertools.groupby(plan, key=lambda r: (r.outer, r.size)):
        ops = [op for part in rounds for op in part.ops]
        where: dict[tuple[int, int], list[Op]] = {}
        for op in ops:
            where.setdefault((op.block.row // size, op.block.col // size), []).append(op)
        groups.append(
            [SuperBlock(row, col, size, position, tuple(own)) for (row, col), own in where.items()]
        )
        position += len(ops)
    return groups


def _split_state(state: ChainState, size: int) -> _Graph:
    """Cut a state into what the first tasks take, by key."""
    starts: _Graph = {}
    for low in range(0, len(state.rows), size):
        span = range(low, low + size)
        starts["start-rows", low // size] = Portion(rows={n: bare(state.rows[n]) for n in span})
        starts["start-columns", low // size] = Portion(cols={n: bare(state.cols[n]) for n in span})
    for block, cells in state.cells.items():
        key = ("start-cells", block.row // size, block.col // size)
        starts.setdefault(key, Portion()).cells[block] = cells
    return starts


class _Ends(NamedTuple):
    """Keys (or what else stands for them) whose portions make up the state afterwards."""

    rows: list[Any]
    cols: list[Any]
    cells: list[Any]

    def join(self, before: ChainState, results: Sequence[Portion]) -> tuple[ChainState, float]:
        """Put the state together, and add up the seconds inside operations."""
        found = iter(results)
        rows = [replace(next(found), cols={}, cells={}) for _ in self.rows]
        cols = [hand_on(next(found), "cols") for _ in self.cols]
        cells = [hand_on(next(found), "cells") for _ in self.cells]
        return join_portions(before, [*rows, *cols, *cells]), sum(part.busy for part in rows)


def _build_graph(
    groups: Iterable[Sequence[SuperBlock]],
    context: Any,
    starts: _Graph,
    token: str = "",
    split: bool = False,
) -> tuple[_Graph, _Ends]:
    """Make the graph of a plan's groups of tasks, and the keys of its ends.

    Parameters
    ----------
    groups
        As `group_rounds` returns them; all of one size, which every schedule gives.
    context
        The first argument of every task.
    starts
        Values or futures by the keys of `_split_state`.
    token
        Makes keys unique on a scheduler that others use too.
    split
        Give column bands a task of their own, so that row bands stay where they are.
    """
    graph: _Graph = {}
    now: _Graph = dict(starts)
    for number, group in enumerate(groups):
        after: _Graph = {}
        for task in group:
            at = (number, task.row, task.col)
            rows, cols = ("start-rows", task.row), ("start-columns", task.col)
            cells = ("start-cells", task.row, task.col)
            key = (f"update-block-{task.ops[0].cycle}{token}", *at)
            graph[key] = (
                update_super_block,
                context,
                _Opaque(task),
                now[rows],
                now[cols],
                now.get(cells),
            )
            after[rows] = after[cols] = key
            if split:
                after[cols] = (f"hand-on-columns{token}", *at)
                graph[after[cols]] = (hand_on, key, "cols")
            if cells in now and _evaluates(task):
                after[cells] = (f"hand-on-cells{token}", *at)
                graph[after[cells]] = (hand_on, key, "cells")
        now.update(after)
    kinds = ("start-rows", "start-columns", "start-cells")
    return graph, _Ends(*([now[key] for key in sorted(now) if key[0] == kind] for kind in kinds))


class TasksExecutor:
    """Runs a plan as one Dask graph on a scheduler of this process.

    Parameters
    ----------
    scheduler
        ``"threads"`` (the default) or ``"synchronous"``; for other processes
        and machines pass ``client`` instead.
    num_workers
        Threads of the threaded scheduler; all available cores by default.
    """

    name = "tasks"
    reason = "as asked for"
    in_process = True

    def __init__(self, scheduler: str = "threads", num_workers: int | None = None) -> None:
        if scheduler not in ("threads", "synchronous"):
            raise OptionError(
                f'scheduler must be "threads" or "synchronous", got {scheduler!r}; for workers '
                "of a cluster pass client= instead"
            )
        self.scheduler = scheduler
        self.num_workers = num_workers or available_cores()
        self.report = RunReport(lanes=self.num_workers)

    def _compute(self, graph: _Graph, keys: Sequence[Any]) -> list[Any]:
        graph = {**graph, "collect": (_Opaque, list(keys))}
        with single_threaded_blas():
            (result,) = dask.compute(  # type: ignore[attr-defined,no-untyped-call]
                Delayed("collect", graph),  # type: ignore[no-untyped-call]
                scheduler=self.scheduler,
                num_workers=self.num_workers,
                optimize_graph=False,
            )
        values: list[Any] = result.value
        return values

    def run(
        self,
        plan: Sequence[Round],
        program: BlockProgram,
        state: ChainState,
        data: BlockedData,
        on_done: OnDone | None = None,
    ) -> ChainState:
        """Run a plan's operations as soon as the tasks before them are done."""
        if not plan:
            return state
        started = time.perf_counter()
        starts = _split_state(state, plan[0].size)
        graph, ends = _build_graph(group_rounds(plan), "context", {key: key for key in starts})
        graph |= {**starts, "context": _Opaque(Context(program, data))}
        with Callback(posttask=_counter(graph, on_done)):  # type: ignore[no-untyped-call]
            results = self._compute(graph, [key for kind in ends for key in kind])
        after, busy = ends.join(state, results)
        self.report.add(RunReport(time.perf_counter() - started, busy, self.num_workers))
        return after

    def map(
        self,
        function: Callable[[T, Workspace], R],
        items: Sequence[T],
        name: str = "pass-over-data",
    ) -> list[R]:
        """Call a function with every item, in a task each."""
        graph: _Graph = {
            (name, number): (_call, _Opaque(function), _Opaque(item))
            for number, item in enumerate(items)
        }
        return [result.value for result in self._compute(graph, list(graph))]

    def close(self) -> None:
        """Give nothing back: the scheduler's threads are Dask's own."""


def _counter(graph: _Graph, on_done: OnDone | None) -> Callable[..., None]:
    """Make a callback for Dask that tells ``on_done`` how many operations are done."""
    total = 0

    def count(key: Any, *_: Any) -> None:
        nonlocal total
        task = graph.get(key)
        if isinstance(task, tuple) and task[0] is update_super_block:
            total += len(task[2].value.ops)
            if on_done is not None:
                on_done(total)

    return count


def _call(function: _Opaque, item: _Opaque) -> _Opaque:
    return _Opaque(function.value(item.value, local_workspace()))


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
    in_process = False

    def __init__(
        self,
        client: "Client",
        workers: Sequence[str] | None = None,
        patience: "Patience | None" = None,
    ) -> None:
        from daskfactor.executors.cluster import Cluster  # `distributed` takes a second

        self.report = RunReport()
        self._cluster = Cluster(client, workers, patience)

    def run(
        self,
        plan: Sequence[Round],
        program: BlockProgram,
        state: ChainState,
        data: BlockedData,
        on_done: OnDone | None = None,
    ) -> ChainState:
        """Run a plan as graphs of bounded size, one after the other."""
        from daskfactor.executors.cluster import rising

        if not plan:
            return state
        started = time.perf_counter()
        cluster, done, busy = self._cluster, 0, 0.0
        for groups in _portions(group_rounds(plan)):
            operations = sum(len(task.ops) for group in groups for task in group)
            tell = rising(on_done, done, operations)
            piece = partial(self._attempt, groups, (program, data), state, tell)
            state, seconds = cluster.persist(piece, self.report)
            done += operations
            busy += seconds
        if on_done is not None:
            on_done(done)
        threads = cluster.workers().values()
        wall = time.perf_counter() - started
        self.report.add(RunReport(wall, busy, sum(threads) or 1, len(threads) or 1))
        return state

    def _attempt(
        self,
        groups: Sequence[Sequence[SuperBlock]],
        work: tuple[BlockProgram, BlockedData],
        state: ChainState,
        tell: OnDone,
        attempt: "Attempt",
    ) -> tuple[ChainState, float]:
        """Send a graph and what it starts from, wait, and put the state together."""
        from daskfactor.executors.cluster import Teller, large_graphs, pack, unpack

        cluster, size, token = self._cluster, groups[0][0].size, f"-{uuid.uuid4().hex}"
        cluster.await_workers()
        cluster.listen()
        futures: list[Any] = []

        def send(name: str, value: Any) -> Any:
            """Give the scheduler a value of its own, so that no graph holds it."""
            futures.append(cluster.submit(name, unpack, pack(value)))
            return futures[-1]

        try:
            context = send("send-program", _Sent(Teller(cluster.topic, attempt.key), pack(work)))
            found = _split_state(state, size)
            starts = {key: send(key[0], value) for key, value in found.items()}
            wide = max(map(sys.getsizeof, state.rows)) * size > SPLIT_BYTES
            graph, ends = _build_graph(groups, context, starts, token, wide)
            keys = [key for kind in ends for key in kind]
            wanted = [key for key in keys if isinstance(key, tuple)]
            with large_graphs():
                made = cluster.client.get(graph, wanted, sync=False)
            futures.extend(made)
            for future in made:
                cluster.watch(future)
            by_key = dict(zip(wanted, made, strict=True))
            ready = [by_key[key] if isinstance(key, tuple) else key for key in keys]
            results = cluster.results(ready, attempt, lambda: tell(sum(attempt.done.values())))
        finally:
            for future in futures:
                future.release()
        return ends.join(state, results)

    def map(
        self,
        function: Callable[[T, Workspace], R],
        items: Sequence[T],
        name: str = "pass-over-data",
    ) -> list[R]:
        """Call a function with every item, a share on every thread of the cluster."""
        return self._cluster.map(self.report, function, items, name)

    def close(self) -> None:
        """Stop listening to the cluster."""
        self._cluster.close()


class _Sent(NamedTuple):
    """The context of a graph's tasks as it is sent to workers."""

    teller: Any
    work: Any

    def load(self) -> Context:
        """Open it in a task, which tells the client what it has done."""
        from distributed import get_worker

        from daskfactor.executors.cluster import unpack

        program, data = unpack(self.work)
        return Context(program, data, partial(self.teller.tell, get_worker(), "progress"))


def _portions(groups: Sequence[list[SuperBlock]]) -> Iterator[list[list[SuperBlock]]]:
    """Cut groups into portions that one graph may hold."""
    portion: list[list[SuperBlock]] = []
    tasks = 0
    for group in groups:
        if portion and tasks + len(group) > MOST_TASKS:
            yield portion
            portion, tasks = [], 0
        portion.append(group)
        tasks += len(group)
    yield portion
