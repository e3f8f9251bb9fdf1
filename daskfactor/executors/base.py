"""Interfaces of executors and block programs.

A *program* defines what an operation computes. An *executor* decides where and in which order
operations run. All executors give bitwise equal results: operations of one round share no band,
and all sums are taken later in a fixed order.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import DaskfactorError, EngineError
from daskfactor.executors.plan import Action, Op, Round
from daskfactor.executors.state import (
    BlockCells,
    ChainState,
    Evaluation,
    FactorBand,
    Portion,
    factor_name,
)
from daskfactor.kernels.views import Workspace

T = TypeVar("T")
R = TypeVar("R")

OnDone = Callable[[int], None]
"""Callback that receives the number of operations done so far."""
ProgressReporter = Callable[..., None]
"""Callback of tasks: receives the rank or name of the sender, and its operations done."""
_local = threading.local()
logger = logging.getLogger(__name__)

MAX_STEP = 2.0
"""Seconds between two readings of a timer above which this process itself must have been paused."""


class BlockProgram(Protocol):
    """Defines what an operation computes: an update or an evaluation of a block.

    A program may also define ``touches(op)``, the names of the arrays that an operation reads or
    writes, and ``changes(op)``, the names of those that it writes; both are the same for all
    operations of a round. Without them every operation is assumed to change every array.
    """

    def update(
        self, op: Op, data: BlockedData, bands: tuple[FactorBand, ...], workspace: Workspace
    ) -> None:
        """Move the bands of a block, one of each factor, in place."""
        ...

    def evaluate(
        self,
        op: Op,
        data: BlockedData,
        bands: tuple[FactorBand, ...],
        cells: BlockCells | None,
        workspace: Workspace,
    ) -> Evaluation:
        """Return the sums over a block; update the moments of its monitored cells in place."""
        ...


@dataclass(slots=True)
class RunReport:
    """Time and resources that the runs of an executor took.

    ``lost_segments`` counts segments that were repeated because a worker was lost. ``workers`` is
    the number of processes in the last segment, and ``balance`` the mean of their threads' busy
    seconds divided by the maximum.
    """

    wall_seconds: float = 0.0
    busy_seconds: float = 0.0
    lanes: int = 1
    workers: int = 1
    lost_segments: int = 0
    balance: float = 1.0

    @property
    def utilisation(self) -> float:
        """Fraction of the lanes' time spent inside block operations."""
        total = self.wall_seconds * self.lanes
        return self.busy_seconds / total if total else 1.0


def ignore(*event: Any) -> None:
    """Discard an event: the default callback."""
    del event


class Placement(Protocol):
    """Moves bands and monitored cells to the device that operations run on, and back."""

    def __call__(
        self, op: Op, work: "Work", bands: Sequence[FactorBand], cells: BlockCells | None
    ) -> Any:
        """Move the arrays of an operation to the device in place; return the data on the device."""
        ...

    def to_host(self, bands: Iterable[FactorBand], cells: Iterable[BlockCells] = ()) -> None:
        """Move all arrays to host memory, in place."""
        ...


@dataclass(frozen=True)
class Work:
    """A plan with its program, data and callbacks.

    ``on_done`` is called in the caller's process, ``report_progress`` in tasks that run elsewhere.
    ``placement`` moves data, bands and monitored cells to the device of an operation.
    """

    plan: Sequence[Round]
    program: BlockProgram
    data: BlockedData
    on_done: OnDone = ignore
    report_progress: ProgressReporter = ignore
    placement: "Placement | None" = None

    def for_tasks(self, report_progress: ProgressReporter) -> "Work":
        """Return a copy to send to tasks, without the plan, which only the caller needs."""
        return replace(self, plan=(), on_done=ignore, report_progress=report_progress)


class Executor(ABC):
    """Runs plans and maps functions over bands.

    Attributes
    ----------
    reason
        The reason for the choice of this executor.
    report
        Time and resources of its runs.
    in_process
        True if mapped functions run in this process, so that they may call back.
    device
        Name of the GPU for the results; None without a GPU.
    max_losses
        Largest number of consecutive losses of bands from which a run recovers.
    placement
        See `Work`.
    """

    name: ClassVar[str]
    in_process: ClassVar[bool] = True
    reason: str = "as asked for"
    device: str | None = None
    max_losses: int = 0
    placement: "Placement | None" = None

    def __init__(self, lanes: int = 1) -> None:
        self.report = RunReport(lanes=lanes)

    @property
    def on_device(self) -> bool:
        """True if blocks are updated on a GPU."""
        return self.device is not None

    def run(
        self,
        plan: Sequence[Round],
        program: BlockProgram,
        state: ChainState,
        data: BlockedData,
        on_done: OnDone | None = None,
    ) -> ChainState:
        """Run every operation of a plan on a state; return the state afterwards.

        The state passed in may be changed in place and must not be used again.
        ``on_done`` is called with the number of operations done, the last time with all of them.
        """
        if not plan:
            return state
        reported = 0

        def report(done: int) -> None:
            """Report progress, which never decreases when operations are repeated."""
            nonlocal reported
            if done > reported and on_done is not None:
                reported = done
                on_done(done)

        started = time.perf_counter()
        after = self._run(Work(plan, program, data, report, placement=self.placement), state)
        self.report.wall_seconds += time.perf_counter() - started
        return after

    def distribute(self, state: ChainState) -> ChainState:
        """Return the state with its bands in the processes where this executor keeps them.

        `ChainState.replace_with` then accepts the states that plans return.
        """
        return state

    def state_from_bands(
        self,
        blocks: int,
        band: Callable[[int, int], FactorBand],
        shared: Path | bool = False,
        factors: int = 2,
    ) -> ChainState:
        """Return a state of the bands that ``band(factor, number)`` returns, rows first.

        ``shared`` is the folder that it reads from; or True if all processes can read them, False
        if none can.
        """
        factor_bands = [
            [band(factor, number) for number in range(blocks)] for factor in range(factors)
        ]
        return ChainState(factor_bands, {})

    def run_chains(
        self,
        chains: Sequence[Callable[[], None]],
        at_once: bool,
        watch: Callable[[], None],
        stop: threading.Event,
    ) -> None:
        """Run several chains, each of which runs its own plans; in parallel if ``at_once``.

        ``watch`` is called regularly in the calling thread and may raise an error. An error sets
        ``stop``, after which chains in other threads end soon.
        """
        del at_once, stop
        for chain in chains:
            chain()
            watch()

    def map(
        self,
        function: Callable[[T, Workspace], R],
        items: Sequence[T],
        name: str = "pass-over-data",
    ) -> list[R]:
        """Return ``function`` of every item, in the items' order.

        ``name`` is the name of the tasks on a cluster's dashboard.
        """
        return self._map(function, items, name) if len(items) else []

    def retry_on_loss(
        self,
        work: Callable[[], R],
        recover: Callable[[], Callable[[], R]] | None = None,
        losses: int = 0,
    ) -> R:
        """Return the result of ``work``; repeat it if bands are lost.

        ``recover`` returns the function to call instead of ``work`` after a loss. ``losses`` is
        the number of consecutive losses so far.

        Raises
        ------
        EngineError
            If bands are lost `max_losses` times in a row.
        """
        while True:
            try:
                return work()
            except StateLost as loss:
                losses += 1
                self.report.lost_segments += 1
                if losses > self.max_losses:
                    raise EngineError(
                        f"bands of factors were lost {losses} times in a row, the last time "
                        f"because of: {loss}; find out why workers die (memory is the usual "
                        "reason) and run again, or resume the run from its store"
                    ) from loss
                logger.warning("bands of factors were lost and are computed again: %s", loss)
                work = work if recover is None else recover()

    @abstractmethod
    def _run(self, work: Work, state: ChainState) -> ChainState:
        """Run a plan that is not empty; add its busy seconds and losses to the report."""

    @abstractmethod
    def _map(self, function: Callable[..., R], items: Sequence[Any], name: str) -> list[R]:
        """Call a function with each of at least one item."""

    @abstractmethod
    def close(self) -> None:
        """Release threads and buffers."""


class SegmentLost(Exception):  # noqa: N818  # not an error of the caller: the segment is repeated
    """Loss of a worker or its work, after which the segment is repeated."""


class StateLost(SegmentLost):
    """Loss of bands, after which a run returns to its last saved state."""


class WaitTimer:
    """Timer of a wait that does not count the time while this process was paused.

    The sleep of a laptop or a paused client must not count as silence of other processes.
    """

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.monotonic()

    def seconds(self) -> float:
        """Return the seconds so far; steps longer than `MAX_STEP` are not counted in full."""
        now = time.monotonic()
        self._seconds += min(now - self._last, MAX_STEP)
        self._last = now
        return self._seconds

    def restart(self) -> None:
        """Restart at zero."""
        self._seconds, self._last = 0.0, time.monotonic()


def run_operation(
    op: Op, work: Work, state: ChainState | Portion, workspace: Workspace
) -> tuple[Evaluation | None, float]:
    """Run one operation on the bands of a state; return its evaluation, if any, and its seconds.

    An error names the block where it happened.
    """
    program, data, bands = work.program, work.data, state.block_bands(op.block)
    start, evaluation, cells = time.perf_counter(), None, state.cells.get(op.block)
    try:
        if work.placement is not None:
            data = work.placement(op, work, bands, cells)
        if op.action == Action.UPDATE:
            program.update(op, data, bands, workspace)
        else:
            evaluation = program.evaluate(op, data, bands, cells, workspace)
    except (DaskfactorError, MemoryError) as error:
        error.add_note(f"in {_describe_block(op)}")
        raise_gpu_memory_error(error)
        raise
    except Exception as error:
        raise EngineError(
            f"the update of {_describe_block(op)} failed: {type(error).__name__}: {error}"
        ) from error
    return evaluation, time.perf_counter() - start


GPU_MEMORY_REMEDY = (
    'pass fewer components, or a smaller memory limit for data: device=CUDA(memory_limit="8 GiB")'
)


def raise_gpu_memory_error(error: Exception, remedy: str = GPU_MEMORY_REMEDY) -> None:
    """Raise an EngineError in place of CuPy's error for a full GPU memory.

    CuPy's class may be missing in the process that receives the error. NumPy's MemoryError passes.
    """
    if isinstance(error, MemoryError) and type(error).__module__.startswith("cupy"):
        raise EngineError(f"the memory of the GPU is full ({error}); {remedy}") from error


def _describe_block(op: Op) -> str:
    named = (f"{factor_name(f).removesuffix('s')} band {n}" for f, n in enumerate(op.block))
    return f"block ({', '.join(named)}) in cycle {op.cycle}"


def local_workspace() -> Workspace:
    """Return the workspace of the calling thread."""
    if not hasattr(_local, "workspace"):
        _local.workspace = Workspace()
    workspace: Workspace = _local.workspace
    return workspace
