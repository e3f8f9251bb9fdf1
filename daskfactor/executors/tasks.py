"""Block updates as Dask tasks: a plan as a graph, on a scheduler of this process.

Consecutive rounds that stay inside the same super-blocks become one task per
super-block, so that with a nested schedule a task holds (B / groups)² updates
and is worth its overhead. A task copies the bands it is given and returns the
copies: what an earlier task returned is never written to.
"""

import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dask.base import get_scheduler
from dask.callbacks import Callback
from dask.system import cpu_count

from daskfactor.checks import one_of
from daskfactor.data.grid import BlockAddress
from daskfactor.executors.base import (
    Executor,
    R,
    Work,
    local_workspace,
    perform,
)
from daskfactor.executors.plan import Action, Op, Round
from daskfactor.executors.state import (
    CELLS,
    ChainState,
    Portion,
    bare,
    ending,
    factor_name,
    join_portions,
)
from daskfactor.machine import single_threaded_blas

Graph = dict[Any, Any]
Ends = list[list[Any]]
"""Keys of the portions that make up the state afterwards: of each factor, and of cells."""


@dataclass(frozen=True)
class SuperBlock:
    """A super-block's address and what one task does in it, ``position`` along the plan."""

    at: BlockAddress
    position: int
    ops: tuple[Op, ...]


def update_super_block(
    packed: Any, task: SuperBlock, cells: Portion | None, *parts: Portion
) -> Portion:
    """Do all operations of one task, on copies of the bands that earlier tasks returned.

    ``packed`` is `Work` or the bytes that it was pickled to; ``parts`` have the bands of each
    factor. Evaluations, records and seconds add up along the row bands' chain of tasks, so that
    only the last task of each has to be kept.
    """
    work: Work = packed if isinstance(packed, Work) else pickle.loads(packed.data)
    watched = cells.cells if cells is not None and _evaluates(task) else {}
    bands = itertools.chain.from_iterable(own.of(n).items() for n, own in enumerate(parts))
    after = replace(parts[0], bands=dict(bands), cells=watched).copy()
    with single_threaded_blas():
        for number, op in enumerate(task.ops):
            found, seconds = perform(op, work, after, local_workspace())
            after.busy += seconds
            after.strip(op.block, task.position + number)
            if found is not None:
                after.evaluations.append(found)
    work.tell("progress", "-".join(map(str, (task.position, *task.at))), len(task.ops))
    return after


def _evaluates(task: SuperBlock) -> bool:
    return any(op.action == Action.EVALUATE for op in task.ops)


def group_rounds(plan: Sequence[Round]) -> list[list[SuperBlock]]:
    """Make runs of rounds inside the same super-blocks into one list of tasks each."""
    groups, position = [], 0
    for (_, size), rounds in itertools.groupby(plan, key=lambda r: (r.outer, r.size)):
        where: dict[BlockAddress, list[Op]] = {}
        for op in itertools.chain.from_iterable(part.ops for part in rounds):
            where.setdefault(super_block(op.block, size), []).append(op)
        groups.append([SuperBlock(at, position, tuple(ops)) for at, ops in where.items()])
        position += sum(map(len, where.values()))
    return groups


def super_block(block: BlockAddress, size: int) -> BlockAddress:
    """Return the address of the super-block that a block is in."""
    return tuple([band // size for band in block])


def start_of(factor: int, *at: int) -> tuple[Any, ...]:
    """Return the key of what a factor's super-band, or a super-block's cells, are at first."""
    return (f"start-{'cells' if factor == CELLS else factor_name(factor)}", *at)


def split_state(state: ChainState, size: int) -> Graph:
    """Cut a state into what the first tasks take, by key."""
    starts: Graph = {}
    for factor, bands in enumerate(state.factors):
        for number, band in enumerate(bands):
            own = starts.setdefault(start_of(factor, number // size), Portion())
            own.bands[factor, number] = bare(band)
    for block, cells in state.cells.items():
        key = start_of(CELLS, *super_block(block, size))
        starts.setdefault(key, Portion()).cells[block] = cells
    return starts


def join_ends(
    ends: Ends, before: ChainState, results: Sequence[Portion]
) -> tuple[ChainState, float]:
    """Put the state together from what its ends are, and add up the seconds in operations."""
    parts = zip((*range(before.n_factors), CELLS), ends, strict=True)
    kinds = [part for part, keys in parts for _ in keys]
    portions = list(map(ending, results, kinds))
    return join_portions(before, portions), sum(found.busy for found in portions)


def build_graph(
    groups: Sequence[Sequence[SuperBlock]],
    context: Any,
    starts: Graph,
    token: str = "",
    split: bool = False,
) -> tuple[Graph, Ends]:
    """Make the graph of a plan's groups of tasks, and the keys of its ends.

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
        Give bands of columns and further factors tasks of their own, so that row bands stay
        where they are.
    """
    graph: Graph = {}
    now: Graph = dict(starts)
    factors = len(groups[0][0].at)
    for number, group in enumerate(groups):
        after: Graph = {}
        for task in group:
            at = (number, *task.at)
            bands, cells = [start_of(*own) for own in enumerate(task.at)], start_of(CELLS, *task.at)
            key = (f"update-block-{task.ops[0].cycle}{token}", *at)
            parts = now.get(cells), *(now[own] for own in bands)
            graph[key] = (update_super_block, context, task, *parts)
            after |= dict.fromkeys(bands, key)
            for factor in range(1, factors) if split else ():
                after[bands[factor]] = (f"hand-on-{factor_name(factor)}{token}", *at)
                graph[after[bands[factor]]] = (ending, key, factor)
            if cells in now and _evaluates(task):
                after[cells] = (f"hand-on-cells{token}", *at)
                graph[after[cells]] = (ending, key, CELLS)
        now.update(after)
    kinds = [start_of(part)[0] for part in (*range(factors), CELLS)]
    return graph, [[now[key] for key in sorted(now) if key[0] == kind] for kind in kinds]


class TasksExecutor(Executor):
    """Runs a plan as one Dask graph on a scheduler of this process.

    Parameters
    ----------
    scheduler
        ``"threads"`` (the default) or ``"synchronous"``; for other processes
        and machines pass ``client`` instead.
    num_workers
        Threads of the threaded scheduler; all available cores by default.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 10, "tune": 10, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> executor = dfac.TasksExecutor(num_workers=2)
    >>> same = dfac.sample(V, dfac.TweedieNMF(2), executor=executor, **run)
    >>> same["posterior"].equals(trace["posterior"])
    True
    """

    name = "tasks"

    def __init__(self, scheduler: str = "threads", num_workers: int | None = None) -> None:
        advice = "; for workers of a cluster pass client= instead"
        one_of("scheduler", scheduler, ("threads", "synchronous"), advice)
        self.scheduler = scheduler
        self.num_workers = num_workers or cpu_count()
        super().__init__(self.num_workers)

    def _compute(self, graph: Graph, keys: Sequence[Any]) -> list[Any]:
        get = get_scheduler(scheduler=self.scheduler)  # type: ignore[no-untyped-call]
        with single_threaded_blas():
            return list(get(graph, list(keys), num_workers=self.num_workers))

    def _run(self, work: Work, state: ChainState) -> ChainState:
        starts = split_state(state, work.plan[0].size)
        groups = group_rounds(work.plan)
        graph, ends = build_graph(groups, "work", {key: key for key in starts})
        graph |= {**starts, "work": work}
        done = 0

        def count(key: Any, *_: Any) -> None:
            nonlocal done
            task = graph.get(key)
            if isinstance(task, tuple) and task[0] is update_super_block:
                done += len(task[2].ops)
                work.on_done(done)

        with Callback(posttask=count):  # type: ignore[no-untyped-call]
            results = self._compute(graph, [key for kind in ends for key in kind])
        after, busy = join_ends(ends, state, results)
        self.report.busy_seconds += busy
        return after

    def _map(self, function: Callable[..., R], items: Sequence[Any], name: str) -> list[R]:
        graph: Graph = {
            (name, number): (partial(_call, function, item),) for number, item in enumerate(items)
        }
        return self._compute(graph, list(graph))

    def close(self) -> None:
        """Give nothing back: the scheduler's threads are Dask's own."""


def _call(function: Callable[..., R], item: Any) -> R:
    return function(item, local_workspace())
