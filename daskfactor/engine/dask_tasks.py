"""A Dask graph of block updates, for any Dask scheduler.

Consecutive rounds that stay inside the same super-blocks become one task per
super-block, so that with a nested schedule a task holds (B / groups)² updates
and is worth its overhead. A task copies the bands it is given and returns the
copies: what an earlier task returned is never written to.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import dask
from dask.callbacks import Callback
from dask.delayed import Delayed

from daskfactor.engine.base import BlockProgram, OnDone, RunReport, perform, settle
from daskfactor.engine.plan import Action, Op, Round
from daskfactor.engine.state import BlockCells, ChainState, Evaluation, FactorBand
from daskfactor.errors import OptionError
from daskfactor.grid.bands import Block
from daskfactor.io.blocks import BlockedData
from daskfactor.kernels.workspace import Workspace
from daskfactor.threads import available_cores, single_threaded_blas

T = TypeVar("T")
R = TypeVar("R")
Graph = dict[Any, Any]

_local = threading.local()


def _workspace() -> Workspace:
    if not hasattr(_local, "workspace"):
        _local.workspace = Workspace()
    workspace: Workspace = _local.workspace
    return workspace


class Opaque:
    """Carries a value through a graph without Dask looking inside."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class SuperBlock(NamedTuple):
    """A super-block's address and what one task does in it."""

    row: int
    col: int
    size: int
    ops: tuple[Op, ...]


class TaskResult:
    """What a task returns; one object, because a pair split in two costs two tasks more.

    Evaluations and seconds add up along the row bands' chain of tasks, so that
    only the last task of each has to be kept.
    """

    __slots__ = ("busy", "cells", "cols", "evaluations", "rows")

    def __init__(
        self,
        rows: list[FactorBand],
        cols: list[FactorBand],
        cells: dict[Block, BlockCells],
        evaluations: list[Evaluation],
        busy: float,
    ) -> None:
        self.rows = rows
        self.cols = cols
        self.cells = cells
        self.evaluations = evaluations
        self.busy = busy


def update_super_block(
    program: Opaque,
    data: Opaque,
    work: Opaque,
    rows_from: TaskResult,
    cols_from: TaskResult,
    cells_from: TaskResult,
) -> TaskResult:
    """All operations of one task, on copies of the bands that earlier tasks returned."""
    task: SuperBlock = work.value
    rows = [band.copy() for band in rows_from.rows]
    cols = [band.copy() for band in cols_from.cols]
    evaluates = any(op.action == Action.EVALUATE for op in task.ops)
    cells: dict[Block, BlockCells] = {}
    if evaluates:
        cells = {block: own.copy() for block, own in cells_from.cells.items()}
    evaluations = list(rows_from.evaluations)
    busy = rows_from.busy
    for op in task.ops:
        begun = time.perf_counter()
        result = perform(
            op,
            program.value,
            data.value,
            rows[op.block.row - task.row * task.size],
            cols[op.block.col - task.col * task.size],
            cells.get(op.block),
            _workspace(),
        )
        busy += time.perf_counter() - begun
        if result is not None:
            evaluations.append(result)
    return TaskResult(rows, cols, cells, evaluations, busy)


def _only_cells(result: TaskResult) -> TaskResult:
    return TaskResult([], [], result.cells, [], 0.0)


def _collect(results: list[Any]) -> Opaque:
    return Opaque(results)


def group_rounds(plan: Sequence[Round]) -> list[list[SuperBlock]]:
    """Runs of rounds inside the same super-blocks, as one list of tasks each."""
    groups = []
    for (_, size), rounds in itertools.groupby(plan, key=lambda r: (r.outer, r.size)):
        ops = [op for part in rounds for op in part.ops]
        where: dict[tuple[int, int], list[Op]] = {}
        for op in ops:
            where.setdefault((op.block.row // size, op.block.col // size), []).append(op)
        groups.append([SuperBlock(row, col, size, tuple(own)) for (row, col), own in where.items()])
    return groups


def build_graph(
    plan: Sequence[Round], program: BlockProgram, state: ChainState, data: BlockedData
) -> tuple[Graph, list[Any]]:
    """The graph of a plan, and the keys whose values make up the state afterwards.

    All rounds must have the same super-block size, which every schedule gives.
    """
    groups = group_rounds(plan)
    size = groups[0][0].size
    count = len(state.rows) // size
    graph: Graph = {"program": Opaque(program), "data": Opaque(data)}
    row_key: list[Any] = []
    col_key: list[Any] = []
    for band in range(count):
        span = slice(band * size, (band + 1) * size)
        graph["start-rows", band] = TaskResult(state.rows[span], [], {}, [], 0.0)
        graph["start-columns", band] = TaskResult([], state.cols[span], {}, [], 0.0)
        row_key.append(("start-rows", band))
        col_key.append(("start-columns", band))
    cells_key: dict[tuple[int, int], Any] = {}
    for row, col in itertools.product(range(count), repeat=2):
        own = {
            block: cells
            for block, cells in state.cells.items()
            if (block.row // size, block.col // size) == (row, col)
        }
        graph["start-cells", row, col] = TaskResult([], [], own, [], 0.0)
        cells_key[row, col] = ("start-cells", row, col)
    for number, group in enumerate(groups):
        for task in group:
            key = (f"update-cycle-{task.ops[0].cycle}", number, task.row, task.col)
            graph[key] = (
                update_super_block,
                "program",
                "data",
                Opaque(task),
                row_key[task.row],
                col_key[task.col],
                cells_key[task.row, task.col],
            )
            row_key[task.row] = col_key[task.col] = key
            if any(op.action == Action.EVALUATE for op in task.ops):
                cells_key[task.row, task.col] = key
    ends = []
    for address, key in cells_key.items():
        graph["end-cells", *address] = (_only_cells, key)
        ends.append(("end-cells", *address))
    return graph, [*row_key, *col_key, *ends]


class TasksExecutor:
    """Runs a plan as one Dask graph.

    Parameters
    ----------
    scheduler
        A Dask scheduler of this process: ``"threads"`` (the default) or
        ``"synchronous"``.
    num_workers
        Threads of the threaded scheduler; all available cores by default.
    """

    name = "tasks"

    def __init__(self, scheduler: str = "threads", num_workers: int | None = None) -> None:
        if scheduler not in ("threads", "synchronous"):
            raise OptionError(
                f'scheduler must be "threads" or "synchronous", got {scheduler!r}; schedulers of '
                "other processes are not supported in this version"
            )
        self.scheduler = scheduler
        self.num_workers = num_workers or available_cores()
        self.report = RunReport(lanes=self.num_workers)

    def _compute(self, graph: Graph, keys: list[Any]) -> list[Any]:
        graph = {**graph, "collect": (_collect, keys)}
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
        if not plan:
            return state
        started = time.perf_counter()
        graph, ends = build_graph(plan, program, state, data)
        with Callback(posttask=_counter(graph, on_done)):  # type: ignore[no-untyped-call]
            results = self._compute(graph, ends)
        bands = len(state.rows) // plan[0].size
        rows, cols = results[:bands], results[bands : 2 * bands]
        cells = results[2 * bands :]
        after = ChainState(
            [band for result in rows for band in result.rows],
            [band for result in cols for band in result.cols],
            {block: own for result in cells for block, own in result.cells.items()},
            state.evaluations,
        )
        settle(after, [evaluation for result in rows for evaluation in result.evaluations])
        wall = time.perf_counter() - started
        self.report.add(RunReport(wall, sum(result.busy for result in rows), self.num_workers))
        return after

    def map(self, function: Callable[[T, Workspace], R], items: Sequence[T]) -> list[R]:
        graph: Graph = {
            ("map", number): (_call, Opaque(function), Opaque(item))
            for number, item in enumerate(items)
        }
        return [result.value for result in self._compute(graph, list(graph))]

    def close(self) -> None:
        """Nothing to give back: the scheduler's threads are Dask's own."""


def _counter(graph: Graph, on_done: OnDone | None) -> Callable[..., None]:
    """A callback for Dask that tells ``on_done`` how many operations are done."""
    total = 0

    def count(key: Any, *_: Any) -> None:
        nonlocal total
        task = graph.get(key)
        if isinstance(task, tuple) and task[0] is update_super_block:
            total += len(task[3].value.ops)
            if on_done is not None:
                on_done(total)

    return count


def _call(function: Opaque, item: Opaque) -> Opaque:
    return Opaque(function.value(item.value, _workspace()))
