"""Executors of this process: one operation after the other, or persistent threads."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.base import (
    BlockProgram,
    OnDone,
    R,
    RunReport,
    T,
    local_workspace,
    perform,
)
from daskfactor.executors.plan import Op, Round, ops_by_row
from daskfactor.executors.scheduler import BandScheduler
from daskfactor.executors.state import ChainState, Evaluation
from daskfactor.kernels.workspace import Workspace
from daskfactor.threads import available_cores, single_threaded_blas


class SerialExecutor:
    """Runs a plan in the calling thread; what every other executor is compared with."""

    name = "serial"
    reason = "as asked for"
    in_process = True

    def __init__(self) -> None:
        self.report = RunReport()
        self._workspace = Workspace()

    def run(
        self,
        plan: Sequence[Round],
        program: BlockProgram,
        state: ChainState,
        data: BlockedData,
        on_done: OnDone | None = None,
    ) -> ChainState:
        """Run a plan's operations in its own order."""
        evaluations: list[Evaluation] = []
        started = time.perf_counter()
        busy, done = 0.0, 0
        with single_threaded_blas():
            for part in plan:
                for op in part.ops:
                    found, seconds = perform(op, program, data, state, self._workspace)
                    busy += seconds
                    if found is not None:
                        evaluations.append(found)
                done += len(part.ops)
                if on_done is not None:
                    on_done(done)
        state.settle(evaluations)
        self.report.add(RunReport(time.perf_counter() - started, busy, 1))
        return state

    def map(
        self,
        function: Callable[[T, Workspace], R],
        items: Sequence[T],
        name: str = "pass-over-data",
    ) -> list[R]:
        """Call a function with one item after the other."""
        del name  # nobody watches
        with single_threaded_blas():
            return [function(item, self._workspace) for item in items]

    def close(self) -> None:
        """Give the buffers back."""
        self._workspace = Workspace()


class ThreadsExecutor:
    """Runs a plan on threads of this process: the default on one machine."""

    name = "threads"
    reason = "as asked for"
    in_process = True

    def __init__(self, lanes: int | None = None) -> None:
        self.lanes = lanes or available_cores()
        self.report = RunReport(lanes=self.lanes)
        self._pool = ThreadPoolExecutor(self.lanes, thread_name_prefix="daskfactor-lane")

    def run(
        self,
        plan: Sequence[Round],
        program: BlockProgram,
        state: ChainState,
        data: BlockedData,
        on_done: OnDone | None = None,
    ) -> ChainState:
        """Run a plan's operations as soon as their bands are free."""
        lanes = min(self.lanes, len(state.rows))
        scheduler = BandScheduler(ops_by_row(plan), lanes)
        started = time.perf_counter()

        def operate(op: Op) -> tuple[Evaluation | None, float]:
            return perform(op, program, data, state, local_workspace())

        with single_threaded_blas():
            scheduler.run(self._pool, lanes, operate, on_done)
        state.settle(scheduler.evaluations)
        self.report.add(RunReport(time.perf_counter() - started, scheduler.busy, lanes))
        return state

    def map(
        self,
        function: Callable[[T, Workspace], R],
        items: Sequence[T],
        name: str = "pass-over-data",
    ) -> list[R]:
        """Call a function with every item, on all threads."""
        del name  # nobody watches
        with single_threaded_blas():
            return list(self._pool.map(lambda item: function(item, local_workspace()), items))

    def close(self) -> None:
        """End the threads; their buffers go with them."""
        self._pool.shutdown(wait=True)
