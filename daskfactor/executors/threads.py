"""Executors of this process: one operation after the other, or persistent threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dask.system import cpu_count

from daskfactor.executors.base import Executor, R, RunReport, Work, local_workspace, perform
from daskfactor.executors.plan import Op, ops_by_row
from daskfactor.executors.scheduler import BandScheduler
from daskfactor.executors.state import ChainState, Evaluation
from daskfactor.kernels.views import Workspace
from daskfactor.machine import single_threaded_blas


class SerialExecutor(Executor):
    """Runs a plan in the calling thread; what every other executor is compared with."""

    name = "serial"

    def __init__(self) -> None:
        super().__init__()
        self._workspace = Workspace()

    def _run(self, work: Work, state: ChainState) -> tuple[ChainState, RunReport]:
        evaluations: list[Evaluation] = []
        busy, done = 0.0, 0
        with single_threaded_blas():
            for part in work.plan:
                for op in part.ops:
                    found, seconds = perform(op, work, state, self._workspace)
                    busy += seconds
                    if found is not None:
                        evaluations.append(found)
                done += len(part.ops)
                work.on_done(done)
        state.settle(evaluations)
        return state, RunReport(busy_seconds=busy)

    def _map(self, function: Callable[..., R], items: Sequence[Any], name: str) -> list[R]:
        with single_threaded_blas():
            return [function(item, self._workspace) for item in items]

    def close(self) -> None:
        """Give the buffers back."""
        self._workspace = Workspace()


class ThreadsExecutor(Executor):
    """Runs a plan on threads of this process: the default on one machine."""

    name = "threads"

    def __init__(self, lanes: int | None = None) -> None:
        self.lanes = lanes or cpu_count()
        super().__init__(self.lanes)
        self._pool = ThreadPoolExecutor(self.lanes, thread_name_prefix="daskfactor-lane")

    def _run(self, work: Work, state: ChainState) -> tuple[ChainState, RunReport]:
        lanes = min(self.lanes, len(state.rows))
        scheduler = BandScheduler(ops_by_row(work.plan), lanes)

        def operate(op: Op) -> tuple[Evaluation | None, float]:
            return perform(op, work, state, local_workspace())

        with single_threaded_blas():
            scheduler.run(self._pool, lanes, operate, work.on_done)
        state.settle(scheduler.evaluations)
        return state, RunReport(busy_seconds=scheduler.busy, lanes=lanes)

    def _map(self, function: Callable[..., R], items: Sequence[Any], name: str) -> list[R]:
        with single_threaded_blas():
            return list(self._pool.map(lambda item: function(item, local_workspace()), items))

    def close(self) -> None:
        """End the threads; their buffers go with them."""
        self._pool.shutdown(wait=True)
