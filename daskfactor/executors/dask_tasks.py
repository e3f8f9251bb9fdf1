"""Block updates as Dask tasks, for any Dask scheduler."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import dask
from dask.callbacks import Callback
from dask.delayed import Delayed

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError
from daskfactor.executors.base import BlockProgram, OnDone, RunReport
from daskfactor.executors.graph import (
    Context,
    Ends,
    Graph,
    Opaque,
    build_graph,
    group_rounds,
    join_state,
    split_state,
    update_super_block,
)
from daskfactor.executors.plan import Round
from daskfactor.executors.state import ChainState
from daskfactor.executors.workspaces import local_workspace
from daskfactor.kernels.workspace import Workspace
from daskfactor.threads import available_cores, single_threaded_blas

T = TypeVar("T")
R = TypeVar("R")


class _Here:
    """A context for schedulers of this process."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def load(self) -> Context:
        return self._context


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

    def __init__(self, scheduler: str = "threads", num_workers: int | None = None) -> None:
        if scheduler not in ("threads", "synchronous"):
            raise OptionError(
                f'scheduler must be "threads" or "synchronous", got {scheduler!r}; for workers '
                "of a cluster pass client= instead"
            )
        self.scheduler = scheduler
        self.num_workers = num_workers or available_cores()
        self.report = RunReport(lanes=self.num_workers)

    def _compute(self, graph: Graph, keys: Sequence[Any]) -> list[Any]:
        graph = {**graph, "collect": (_collect, list(keys))}
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
        starts = split_state(state, plan[0].size)
        graph, ends = build_graph(group_rounds(plan), "context", {key: key for key in starts})
        graph |= {**starts, "context": _Here(Context(program, data))}
        with Callback(posttask=_counter(graph, on_done)):  # type: ignore[no-untyped-call]
            results = self._compute(graph, [*ends.rows, *ends.cols, *ends.cells])
        after = join_state(state, *_parts(results, ends))
        busy = sum(result.busy for result in results[: len(ends.rows)])
        self.report.add(RunReport(time.perf_counter() - started, busy, self.num_workers))
        return after

    def map(
        self,
        function: Callable[[T, Workspace], R],
        items: Sequence[T],
        name: str = "pass-over-data",
    ) -> list[R]:
        graph: Graph = {
            (name, number): (_call, Opaque(function), Opaque(item))
            for number, item in enumerate(items)
        }
        return [result.value for result in self._compute(graph, list(graph))]

    def close(self) -> None:
        """Nothing to give back: the scheduler's threads are Dask's own."""


def _parts(results: Sequence[Any], ends: Ends) -> tuple[Sequence[Any], ...]:
    rows, cols = len(ends.rows), len(ends.cols)
    return results[:rows], results[rows : rows + cols], results[rows + cols :]


def _collect(results: list[Any]) -> Opaque:
    return Opaque(results)


def _counter(graph: Graph, on_done: OnDone | None) -> Callable[..., None]:
    """A callback for Dask that tells ``on_done`` how many operations are done."""
    total = 0

    def count(key: Any, *_: Any) -> None:
        nonlocal total
        task = graph.get(key)
        if isinstance(task, tuple) and task[0] is update_super_block:
            total += len(task[2].value.ops)
            if on_done is not None:
                on_done(total)

    return count


def _call(function: Opaque, item: Opaque) -> Opaque:
    return Opaque(function.value(item.value, local_workspace()))
