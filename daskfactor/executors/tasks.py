"""Plans as Dask graphs, and an executor that runs them on a scheduler of this process.

Consecutive rounds within the same super-blocks become one task per super-block, so that with a
nested schedule a task has (B / groups)² updates and its overhead is small. A task copies its input
bands and returns the copies: outputs of earlier tasks are never changed.
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
    run_operation,
)
from daskfactor.executors.plan import Action, Op, Round
from daskfactor.executors.state import (
    CELLS,
    ChainState,
    Portion,
    factor_name,
    join_portions,
    select_part,
    without_records,
)
from daskfactor.machine import single_threaded_blas

Graph = dict[Any, Any]
Outputs = list[list[Any]]
"""Keys of the portions that make up the final state: of each factor, then of cells."""


@dataclass(frozen=True)
class SuperBlock:
    """Operations of one task in the super-block ``at``, from ``position`` in the plan."""

    at: BlockAddress
    position: int
    ops: tuple[Op, ...]


def update_super_block(
    packed: Any, task: SuperBlock, cells: Portion | None, *parts: Portion
) -> Portion:
    """Run all operations of one task, on copies of the bands that earlier tasks returned.

    ``packed`` is a `Work` or its pickled bytes; ``parts`` have the bands of each factor.
    Evaluations, records and seconds accumulate along the chain of tasks of a row band, so that only
    its last task has to be stored.
    """
    work: Work = packed if isinstance(packed, Work) else pickle.loads(packed.data)
    monitored = cells.cells if cells is not None and _evaluates(task) else {}
    bands = itertools.chain.from_iterable(
        part.factor_bands(factor).items() for factor, part in enumerate(parts)
    )
    after = replace(parts[0], bands=dict(bands), cells=monitored).copy()
    with single_threaded_blas():
        for number, op in enumerate(task.ops):
            evaluation, seconds = run_operation(op, work, after, local_workspace())
            after.busy += seconds
            after.strip(op.block, task.position + number)
            if evaluation is not None:
                after.evaluations.append(evaluation)
    work.report_progress("-".join(map(str, (task.position, *task.at))), len(task.ops))
    return after


def _evaluates(task: SuperBlock) -> bool:
    return any(op.action == Action.EVALUATE for op in task.ops)


def group_rounds(plan: Sequence[Round]) -> list[list[SuperBlock]]:
    """Return lists of tasks, one for each run of rounds within the same super-blocks."""
    groups, position = [], 0
    for (_, size), rounds in itertools.groupby(plan, key=lambda r: (r.outer, r.size)):
        ops: dict[BlockAddress, list[Op]] = {}
        for op in itertools.chain.from_iterable(part.ops for part in rounds):
            ops.setdefault(super_block(op.block, size), []).append(op)
        groups.append([SuperBlock(at, position, tuple(of_block)) for at, of_block in ops.items()])
        position += sum(map(len, ops.values()))
    return groups


def super_block(block: BlockAddress, size: int) -> BlockAddress:
    """Return the address of the super-block that a block is in."""
    return tuple([band // size for band in block])


def input_key(factor: int, *at: int) -> tuple[Any, ...]:
    """Return the key of the input of a factor's super-band, or of a super-block's cells."""
    return (f"start-{'cells' if factor == CELLS else factor_name(factor)}", *at)


def split_state(state: ChainState, size: int) -> Graph:
    """Return the inputs of the first tasks of a state, by key."""
    inputs: Graph = {}
    for factor, bands in enumerate(state.factors):
        for number, band in enumerate(bands):
            portion = inputs.setdefault(input_key(factor, number // size), Portion())
            portion.bands[factor, number] = without_records(band)
    for block, cells in state.cells.items():
        key = input_key(CELLS, *super_block(block, size))
        inputs.setdefault(key, Portion()).cells[block] = cells
    return inputs


def join_outputs(
    outputs: Outputs, before: ChainState, results: Sequence[Portion]
) -> tuple[ChainState, float]:
    """Return the state joined from the output portions, and the seconds in operations."""
    parts = zip((*range(before.n_factors), CELLS), outputs, strict=True)
    kinds = [part for part, keys in parts for _ in keys]
    portions = list(map(select_part, results, kinds))
    return join_portions(before, portions), sum(portion.busy for portion in portions)


def build_graph(
    groups: Sequence[Sequence[SuperBlock]],
    context: Any,
    inputs: Graph,
    token: str = "",
    split: bool = False,
) -> tuple[Graph, Outputs]:
    """Return the graph of a plan's groups of tasks, and the keys of its outputs.

    Parameters
    ----------
    groups
        Groups of tasks from `group_rounds`, all of one size, as in every schedule.
    context
        The first argument of every task.
    inputs
        Values or futures by the keys of `split_state`.
    token
        Suffix that makes keys unique on a shared scheduler.
    split
        Add a task for the bands of each moving factor, so that row bands are not sent with them.
    """
    graph: Graph = {}
    current: Graph = dict(inputs)
    factors = len(groups[0][0].at)
    for number, group in enumerate(groups):
        after: Graph = {}
        for task in group:
            at = (number, *task.at)
            bands = [input_key(*band) for band in enumerate(task.at)]
            cells = input_key(CELLS, *task.at)
            key = (f"update-block-{task.ops[0].cycle}{token}", *at)
            parts = current.get(cells), *(current[band] for band in bands)
            graph[key] = (update_super_block, context, task, *parts)
            after |= dict.fromkeys(bands, key)
            for factor in range(1, factors) if split else ():
                after[bands[factor]] = (f"hand-on-{factor_name(factor)}{token}", *at)
                graph[after[bands[factor]]] = (select_part, key, factor)
            if cells in current and _evaluates(task):
                after[cells] = (f"hand-on-cells{token}", *at)
                graph[after[cells]] = (select_part, key, CELLS)
        current.update(after)
    kinds = [input_key(part)[0] for part in (*range(factors), CELLS)]
    ordered = sorted(current)
    return graph, [[current[key] for key in ordered if key[0] == kind] for kind in kinds]


class TasksExecutor(Executor):
    """Runs a plan as one Dask graph on a scheduler of this process.

    Parameters
    ----------
    scheduler
        ``"threads"`` (the default) or ``"synchronous"``. For other processes and machines pass
        ``client=`` to the run instead.
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
        inputs = split_state(state, work.plan[0].size)
        groups = group_rounds(work.plan)
        graph, outputs = build_graph(groups, "work", {key: key for key in inputs})
        graph |= {**inputs, "work": work}
        done = 0

        def count(key: Any, *_: Any) -> None:
            nonlocal done
            task = graph.get(key)
            if isinstance(task, tuple) and task[0] is update_super_block:
                done += len(task[2].ops)
                work.on_done(done)

        with Callback(posttask=count):  # type: ignore[no-untyped-call]
            results = self._compute(graph, [key for part in outputs for key in part])
        after, busy = join_outputs(outputs, state, results)
        self.report.busy_seconds += busy
        return after

    def _map(self, function: Callable[..., R], items: Sequence[Any], name: str) -> list[R]:
        graph: Graph = {
            (name, number): (partial(_call, function, item),) for number, item in enumerate(items)
        }
        return self._compute(graph, list(graph))

    def close(self) -> None:
        """Do nothing: the threads belong to Dask."""


def _call(function: Callable[..., R], item: Any) -> R:
    return function(item, local_workspace())
