"""The oracle: one operation after the other, in the plan's order."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.base import BlockProgram, OnDone, RunReport, perform, settle
from daskfactor.executors.plan import Round
from daskfactor.executors.state import ChainState
from daskfactor.kernels.workspace import Workspace
from daskfactor.threads import single_threaded_blas

T = TypeVar("T")
R = TypeVar("R")


class SerialExecutor:
    """Runs a plan in the calling thread; what every other executor is compared with."""

    name = "serial"
    reason = "as asked for"

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
        evaluations = []
        started = time.perf_counter()
        busy = 0.0
        done = 0
        with single_threaded_blas():
            for part in plan:
                for op in part.ops:
                    begun = time.perf_counter()
                    result = perform(
                        op,
                        program,
                        data,
                        state.rows[op.block.row],
                        state.cols[op.block.col],
                        state.cells.get(op.block),
                        self._workspace,
                    )
                    busy += time.perf_counter() - begun
                    if result is not None:
                        evaluations.append(result)
                    done += 1
                if on_done is not None:
                    on_done(done)
        settle(state, evaluations)
        self.report.add(RunReport(time.perf_counter() - started, busy, 1))
        return state

    def map(
        self,
        function: Callable[[T, Workspace], R],
        items: Sequence[T],
        name: str = "pass-over-data",
    ) -> list[R]:
        del name  # nobody watches threads
        with single_threaded_blas():
            return [function(item, self._workspace) for item in items]

    def close(self) -> None:
        self._workspace = Workspace()
