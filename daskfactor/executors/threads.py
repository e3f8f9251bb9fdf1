"""Persistent threads and no barrier: the default on one machine.

Every band has a counter of the rounds it has been through. An operation of
round n may start once both of its bands stand at n, and each round touches each
band once, so the counters alone order everything. A lane keeps to the row bands
it owns while one of them is ready (their data stay in its cache) and takes over
the most belated ready operation of another lane otherwise.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.base import BlockProgram, OnDone, RunReport, perform, settle
from daskfactor.executors.plan import Op, Round
from daskfactor.executors.state import ChainState, Evaluation
from daskfactor.kernels.workspace import Workspace
from daskfactor.threads import available_cores, single_threaded_blas

T = TypeVar("T")
R = TypeVar("R")


class _Ledger:
    """Which operation of each row band is next, and which bands are free to take it."""

    def __init__(self, plan: Sequence[Round], blocks: int, lanes: int) -> None:
        self.condition = threading.Condition()
        self.queues: list[list[Op]] = [[] for _ in range(blocks)]
        for part in plan:
            for op in part.ops:
                self.queues[op.block.row].append(op)
        self.rounds = len(plan)
        self.row_round = [0] * blocks
        self.col_round = [0] * blocks
        self.row_taken = [False] * blocks
        self.owner = [row * lanes // blocks for row in range(blocks)]
        self.remaining = self.rounds * blocks
        self.failure: BaseException | None = None

    def _choose(self, lane: int) -> int | None:
        best, best_rank = None, (self.rounds, 2)
        for row, position in enumerate(self.row_round):
            if self.row_taken[row] or position == self.rounds:
                continue
            if self.col_round[self.queues[row][position].block.col] != position:
                continue
            rank = (position, int(self.owner[row] != lane))
            if rank[1]:  # another lane's work only when it lags behind our own
                rank = (position + 1, 1)
            if rank < best_rank:
                best, best_rank = row, rank
        return best

    def take(self, lane: int) -> Op | None:
        """The next operation for a lane; waits for one; None when all is done or has failed."""
        with self.condition:
            while self.remaining and self.failure is None:
                row = self._choose(lane)
                if row is not None:
                    self.row_taken[row] = True
                    return self.queues[row][self.row_round[row]]
                self.condition.wait(timeout=60.0)
            return None

    def finish(self, op: Op) -> None:
        with self.condition:
            self.row_round[op.block.row] += 1
            self.col_round[op.block.col] += 1
            self.row_taken[op.block.row] = False
            self.remaining -= 1
            self.condition.notify_all()

    def fail(self, error: BaseException) -> None:
        with self.condition:
            if self.failure is None:
                self.failure = error
            self.condition.notify_all()


class LanesExecutor:
    """Runs a plan on threads of this process."""

    name = "lanes"
    reason = "as asked for"

    def __init__(self, lanes: int | None = None) -> None:
        self.lanes = lanes or available_cores()
        self.report = RunReport(lanes=self.lanes)
        self._pool = ThreadPoolExecutor(self.lanes, thread_name_prefix="daskfactor-lane")
        self._workspaces = [Workspace() for _ in range(self.lanes)]

    def run(
        self,
        plan: Sequence[Round],
        program: BlockProgram,
        state: ChainState,
        data: BlockedData,
        on_done: OnDone | None = None,
    ) -> ChainState:
        blocks = len(state.rows)
        lanes = min(self.lanes, blocks)
        ledger = _Ledger(plan, blocks, lanes)
        total = ledger.remaining
        started = time.perf_counter()
        with single_threaded_blas():
            futures = [
                self._pool.submit(self._lane, lane, ledger, program, state, data)
                for lane in range(lanes)
            ]
            try:
                self._watch(ledger, total, on_done)
            except BaseException as error:
                ledger.fail(error)
                raise
            finally:
                results = [future.result() for future in futures]
        if ledger.failure is not None:
            raise ledger.failure
        settle(state, [evaluation for evaluations, _ in results for evaluation in evaluations])
        busy = sum(seconds for _, seconds in results)
        self.report.add(RunReport(time.perf_counter() - started, busy, lanes))
        return state

    def _watch(self, ledger: _Ledger, total: int, on_done: OnDone | None) -> None:
        """Wait for the lanes in the calling thread, which alone sees Ctrl-C."""
        while True:
            with ledger.condition:
                if not ledger.remaining or ledger.failure is not None:
                    break
                ledger.condition.wait_for(
                    lambda: not ledger.remaining or ledger.failure is not None, timeout=0.2
                )
                done = total - ledger.remaining
            if on_done is not None:
                on_done(done)
        if on_done is not None and ledger.failure is None:
            on_done(total)

    def _lane(
        self,
        lane: int,
        ledger: _Ledger,
        program: BlockProgram,
        state: ChainState,
        data: BlockedData,
    ) -> tuple[list[Evaluation], float]:
        workspace = self._workspaces[lane]
        evaluations: list[Evaluation] = []
        busy = 0.0
        try:
            while (op := ledger.take(lane)) is not None:
                begun = time.perf_counter()
                result = perform(
                    op,
                    program,
                    data,
                    state.rows[op.block.row],
                    state.cols[op.block.col],
                    state.cells.get(op.block),
                    workspace,
                )
                busy += time.perf_counter() - begun
                if result is not None:
                    evaluations.append(result)
                ledger.finish(op)
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            ledger.fail(error)
        return evaluations, busy

    def map(
        self,
        function: Callable[[T, Workspace], R],
        items: Sequence[T],
        name: str = "pass-over-data",
    ) -> list[R]:
        del name  # nobody watches threads
        spare = list(self._workspaces)

        def call(item: T) -> R:
            workspace = spare.pop()
            try:
                return function(item, workspace)
            finally:
                spare.append(workspace)

        with single_threaded_blas():
            return list(self._pool.map(call, items))

    def close(self) -> None:
        self._pool.shutdown(wait=True)
