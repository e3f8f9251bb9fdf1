"""A plan as a Dask graph of block updates.

Consecutive rounds that stay inside the same super-blocks become one task per
super-block, so that with a nested schedule a task holds (B / groups)² updates
and is worth its overhead. A task copies the bands it is given and returns the
copies: what an earlier task returned is never written to.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Block
from daskfactor.executors.base import BlockProgram, perform, settle
from daskfactor.executors.plan import Action, Op, Round
from daskfactor.executors.records import Records, bare, with_own, with_records
from daskfactor.executors.state import BlockCells, ChainState, Evaluation, FactorBand
from daskfactor.executors.workspaces import local_workspace
from daskfactor.threads import single_threaded_blas

Graph = dict[Any, Any]
Address = tuple[int, int]


class Opaque:
    """Carries a value through a graph without Dask looking inside."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Context(NamedTuple):
    """What all tasks of a graph share; ``tell`` is told of operations that are done."""

    program: BlockProgram
    data: BlockedData
    tell: Callable[[int], None] | None = None


class SuperBlock(NamedTuple):
    """A super-block's address and what one task does in it, ``position`` along the plan."""

    row: int
    col: int
    size: int
    position: int
    ops: tuple[Op, ...]


@dataclass(slots=True)
class TaskResult:
    """What a task returns; one object, because a pair split in two costs two tasks more.

    Evaluations, records and seconds add up along the row bands' chain of tasks,
    so that only the last task of each has to be kept.
    """

    rows: list[FactorBand] = field(default_factory=list)
    cols: list[FactorBand] = field(default_factory=list)
    cells: dict[Block, BlockCells] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    records: Records = field(default_factory=Records)
    busy: float = 0.0


def update_super_block(
    context: Any,
    work: Opaque,
    rows_from: TaskResult,
    cols_from: TaskResult,
    cells_from: TaskResult | None,
) -> TaskResult:
    """All operations of one task, on copies of the bands that earlier tasks returned.

    ``context`` is anything whose ``load()`` gives the `Context`.
    """
    task: SuperBlock = work.value
    program, data, tell = context.load()
    rows = [band.copy() for band in rows_from.rows]
    cols = [band.copy() for band in cols_from.cols]
    cells: dict[Block, BlockCells] = {}
    if cells_from is not None and any(op.action == Action.EVALUATE for op in task.ops):
        cells = {block: own.copy() for block, own in cells_from.cells.items()}
    evaluations, records = list(rows_from.evaluations), rows_from.records.copy()
    started = time.perf_counter()
    with single_threaded_blas():
        for number, op in enumerate(task.ops):
            col = cols[op.block.col - task.col * task.size]
            row = rows[op.block.row - task.row * task.size]
            found = perform(op, program, data, row, col, cells.get(op.block), local_workspace())
            records.strip(op.block.col, task.position + number, col)
            if found is not None:
                evaluations.append(found)
    busy = rows_from.busy + time.perf_counter() - started
    if tell is not None:
        tell(len(task.ops))
    return TaskResult(rows, cols, cells, evaluations, records, busy)


def only_cols(result: TaskResult) -> TaskResult:
    """The column bands alone, so that row bands do not travel with them."""
    return TaskResult(cols=result.cols)


def only_cells(result: TaskResult) -> TaskResult:
    """The monitored cells alone, so that bands need not be kept with them."""
    return TaskResult(cells=result.cells)


def group_rounds(plan: Sequence[Round]) -> list[list[SuperBlock]]:
    """Runs of rounds inside the same super-blocks, as one list of tasks each."""
    groups = []
    position = 0
    for (_, size), rounds in itertools.groupby(plan, key=lambda r: (r.outer, r.size)):
        ops = [op for part in rounds for op in part.ops]
        where: dict[Address, list[Op]] = {}
        for op in ops:
            where.setdefault((op.block.row // size, op.block.col // size), []).append(op)
        groups.append(
            [SuperBlock(row, col, size, position, tuple(own)) for (row, col), own in where.items()]
        )
        position += len(ops)
    return groups


def split_state(state: ChainState, size: int) -> Graph:
    """A state as the results that the first tasks take, by key."""
    count = len(state.rows) // size
    starts: Graph = {}
    for band in range(count):
        span = slice(band * size, (band + 1) * size)
        starts["start-rows", band] = TaskResult(rows=[bare(row) for row in state.rows[span]])
        starts["start-columns", band] = TaskResult(cols=[bare(col) for col in state.cols[span]])
    for block, cells in state.cells.items():
        key = ("start-cells", block.row // size, block.col // size)
        starts.setdefault(key, TaskResult()).cells[block] = cells
    return starts


class Ends(NamedTuple):
    """Keys whose values make up the state afterwards."""

    rows: list[Any]
    cols: list[Any]
    cells: list[Any]


def build_graph(
    groups: Iterable[Sequence[SuperBlock]],
    context: Any,
    starts: Graph,
    *,
    token: str = "",
    split: bool = False,
) -> tuple[Graph, Ends]:
    """The graph of a plan's groups of tasks, and the keys of its ends.

    Parameters
    ----------
    groups
        As `group_rounds` returns them; all of one size, which every schedule gives.
    context
        The first argument of every task.
    starts
        Values or futures by the keys of `split_state`.
    token
        Makes keys unique on a scheduler that others use too.
    split
        Give column bands a task of their own, so that row bands stay where they are.
    """
    graph: Graph = {}
    now: Graph = dict(starts)
    rows = sorted(key for key in starts if key[0] == "start-rows")
    for number, group in enumerate(groups):
        after: Graph = {}
        for task in group:
            name = f"update-block-{task.ops[0].cycle}{token}"
            key = (name, number, task.row, task.col)
            cells = ("start-cells", task.row, task.col)
            graph[key] = (
                update_super_block,
                context,
                Opaque(task),
                now["start-rows", task.row],
                now["start-columns", task.col],
                now.get(cells),
            )
            after["start-rows", task.row] = after["start-columns", task.col] = key
            if split:
                after["start-columns", task.col] = (f"hand-on-columns{token}", *key[1:])
                graph[f"hand-on-columns{token}", *key[1:]] = (only_cols, key)
            if cells in now and any(op.action == Action.EVALUATE for op in task.ops):
                after[cells] = (f"hand-on-cells{token}", *key[1:])
                graph[f"hand-on-cells{token}", *key[1:]] = (only_cells, key)
        now.update(after)
    cols = sorted(key for key in starts if key[0] == "start-columns")
    cells_ends = [value for key, value in now.items() if key[0] == "start-cells"]
    return graph, Ends([now[key] for key in rows], [now[key] for key in cols], cells_ends)


def join_state(
    before: ChainState,
    rows: Sequence[TaskResult],
    cols: Sequence[TaskResult],
    cells: Sequence[TaskResult],
) -> ChainState:
    """The state that a graph's ends make up; the one before is not changed."""
    records = [result.records for result in rows]
    row_bands = [band for result in rows for band in result.rows]
    col_bands = [band for result in cols for band in result.cols]
    after = ChainState(
        [with_own(old, new) for old, new in zip(before.rows, row_bands, strict=True)],
        [
            with_records(old, new, col, records)
            for col, (old, new) in enumerate(zip(before.cols, col_bands, strict=True))
        ],
        {block: own for result in cells for block, own in result.cells.items()},
        list(before.evaluations),
    )
    settle(after, [evaluation for result in rows for evaluation in result.evaluations])
    return after
