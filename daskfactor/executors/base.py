"""The two small interfaces between the engine and everything else.

A *program* knows what an operation computes and nothing of where it runs. An
*executor* knows where and in which order operations run and nothing of what
they compute. Every executor leaves the same bits behind: operations of one
round share no band, and all sums are taken later in a fixed order.
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
Tell = Callable[..., None]
_local = threading.local()
logger = logging.getLogger(__name__)

LONGEST_STEP = 2.0
"""Seconds between two looks beyond which this process must have been stopped itself."""


class BlockProgram(Protocol):
    """Says what an operation computes: one update, one evaluation.

    A program may also have ``touches(op)`` and ``changes(op)``, names of the arrays
    that an operation reads or writes and of those that it writes, the same for all
    operations of a round. Of a program that does not say, every operation is taken
    to change every array.
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
        """Sum over a block at the present state; move the moments of its monitored cells."""
        ...


@dataclass(slots=True)
class RunReport:
    """What a run of a plan cost.

    ``lost_segments`` counts segments that were run again because a worker was
    lost; ``workers`` is the number of machines' processes that took part last, and
    ``balance`` the mean of their threads' busy seconds over that of the busiest one.
    """

    wall_seconds: float = 0.0
    busy_seconds: float = 0.0
    lanes: int = 1
    workers: int = 1
    lost_segments: int = 0
    balance: float = 1.0

    @property
    def utilisation(self) -> float:
        """Share of the lanes' time spent inside block operations."""
        total = self.wall_seconds * self.lanes
        return self.busy_seconds / total if total else 1.0


def ignore(*news: Any) -> None:
    """Listen to work that nobody watches."""
    del news


class Place(Protocol):
    """Has bands and monitored cells lie where operations work, and takes them home again."""

    def __call__(
        self, op: Op, work: "Work", bands: Sequence[FactorBand], cells: BlockCells | None
    ) -> Any:
        """Move what an operation touches, in place; return the data, there."""
        ...

    def home(self, bands: Iterable[FactorBand], cells: Iterable[BlockCells] = ()) -> None:
        """Move all arrays into the memory of this process, in place."""
        ...


@dataclass(frozen=True)
class Work:
    """A plan, and what its operations are done with.

    ``on_done`` is told how many operations are done, in the caller's process. ``tell`` is
    for tasks that run elsewhere: a kind of news, who tells it, and operations done. ``place``,
    if there is one, has an operation's data, bands and monitored cells lie where it works.
    """

    plan: Sequence[Round]
    program: BlockProgram
    data: BlockedData
    on_done: OnDone = ignore
    tell: Tell = ignore
    place: "Place | None" = None

    def sent(self, tell: Tell) -> "Work":
        """Return what operations need where they are done: the plan stays with the caller."""
        return replace(self, plan=(), on_done=ignore, tell=tell)


class Executor(ABC):
    """Runs plans and maps functions over bands.

    Attributes
    ----------
    reason
        Why this executor was chosen.
    report
        What its runs have cost.
    in_process
        Whether mapped functions run in this process, so that they may call the
        caller back.
    device
        Which GPU that is, as results tell it; None: processors do the work.
    most_losses
        Times in a row that a run may go back to where it saved bands that were lost.
    place
        See `Work`.
    """

    name: ClassVar[str]
    in_process: ClassVar[bool] = True
    reason: str = "as asked for"
    device: str | None = None
    most_losses: int = 0
    place: "Place | None" = None

    def __init__(self, lanes: int = 1) -> None:
        self.report = RunReport(lanes=lanes)

    @property
    def on_device(self) -> bool:
        """Whether blocks are worked on by a GPU."""
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
        ``on_done`` is told how many operations are done, the last time of all.
        """
        if not plan:
            return state
        told = 0

        def tell(done: int) -> None:
            """Pass progress on, which does not go back when operations are done again."""
            nonlocal told
            if done > told and on_done is not None:
                told = done
                on_done(done)

        started = time.perf_counter()
        after = self._run(Work(plan, program, data, tell, place=self.place), state)
        self.report.wall_seconds += time.perf_counter() - started
        return after

    def hold(self, state: ChainState) -> ChainState:
        """Return a state with its bands where the plans of this executor leave them.

        What plans make of it can then be taken over with `ChainState.become`.
        """
        return state

    def state_of(
        self,
        blocks: int,
        band: Callable[[int, int], FactorBand],
        shared: Path | bool = False,
        factors: int = 2,
    ) -> ChainState:
        """Make a state of bands; ``band(factor, number)`` gives each of them, rows first.

        ``shared``: the folder that it reads them from, or whether all processes can.
        """
        made = [[band(factor, number) for number in range(blocks)] for factor in range(factors)]
        return ChainState(made, {})

    def run_chains(
        self,
        chains: Sequence[Callable[[], None]],
        at_once: bool,
        watch: Callable[[], None],
        stop: threading.Event,
    ) -> None:
        """Call functions that each run plans for a chain of their own; ``at_once``: where possible.

        ``watch`` is called now and then in the calling thread, and may raise an error. Functions
        that run in other threads end soon after ``stop`` is set, which an error does.
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

        ``name`` says what is computed, for those who watch a cluster's dashboard.
        """
        return self._map(function, items, name) if len(items) else []

    def until_kept(
        self,
        work: Callable[[], R],
        instead: Callable[[], Callable[[], R]] | None = None,
        losses: int = 0,
    ) -> R:
        """Do something with bands; where they are lost, again, or what ``instead`` gives then.

        ``losses`` are those in a row before.

        Raises
        ------
        EngineError
            If they are lost `most_losses` times in a row.
        """
        while True:
            try:
                return work()
            except StateLost as loss:
                losses += 1
                self.report.lost_segments += 1
                if losses > self.most_losses:
                    raise EngineError(
                        f"bands of factors were lost {losses} times in a row, the last time "
                        f"because of: {loss}; find out why workers die (memory is the usual "
                        "reason) and run again, or resume the run from its store"
                    ) from loss
                logger.warning("bands of factors were lost, and are made again: %s", loss)
                work = work if instead is None else instead()

    @abstractmethod
    def _run(self, work: Work, state: ChainState) -> ChainState:
        """Run a plan that is not empty; add what it cost to the report, but for wall seconds."""

    @abstractmethod
    def _map(self, function: Callable[..., R], items: Sequence[Any], name: str) -> list[R]:
        """Call a function with items, of which there is one at least."""

    @abstractmethod
    def close(self) -> None:
        """Give threads and buffers back."""


class SegmentLost(Exception):  # noqa: N818  # no error of the caller's: the segment is run again
    """A worker or its work was lost and the segment has to be run again."""


class StateLost(SegmentLost):
    """Bands were lost, so that a run has to go back to where it saved them."""


class Waited:
    """Counts seconds waited, without those that the whole machine or process was stopped for.

    A laptop that was closed or a client that was paused must not take the time
    away for other processes' silence.
    """

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.monotonic()

    def seconds(self) -> float:
        """Return the seconds so far; to be called at least every second or so."""
        now = time.monotonic()
        self._seconds += min(now - self._last, LONGEST_STEP)
        self._last = now
        return self._seconds

    def restart(self) -> None:
        """Begin at zero."""
        self._seconds, self._last = 0.0, time.monotonic()


def perform(
    op: Op, work: Work, state: ChainState | Portion, workspace: Workspace
) -> tuple[Evaluation | None, float]:
    """Do one operation on a state's bands; return what it evaluated, and its seconds.

    ``state`` is a `ChainState` or a `Portion`. An error names the block it happened in.
    """
    program, data, bands = work.program, work.data, state.met(op.block)
    began, found, cells = time.perf_counter(), None, state.cells.get(op.block)
    try:
        if work.place is not None:
            data = work.place(op, work, bands, cells)
        if op.action == Action.UPDATE:
            program.update(op, data, bands, workspace)
        else:
            found = program.evaluate(op, data, bands, cells, workspace)
    except (DaskfactorError, MemoryError) as error:
        error.add_note(f"in {_where(op)}")
        raise_of_gpu(error)
        raise
    except Exception as error:
        raise EngineError(
            f"the update of {_where(op)} failed: {type(error).__name__}: {error}"
        ) from error
    return found, time.perf_counter() - began


LEAVE_ROOM = (
    'pass fewer components, or leave more to them than data take: device=CUDA(memory_limit="8 GiB")'
)


def raise_of_gpu(error: Exception, remedy: str = LEAVE_ROOM) -> None:
    """Raise a sentence in place of what CuPy says of a GPU's memory.

    Its own error may be unknown where it would arrive. NumPy has one of its own, too.
    """
    if isinstance(error, MemoryError) and type(error).__module__.startswith("cupy"):
        raise EngineError(f"the memory of the GPU is full ({error}); {remedy}") from error


def _where(op: Op) -> str:
    named = (f"{factor_name(f).removesuffix('s')} band {n}" for f, n in enumerate(op.block))
    return f"block ({', '.join(named)}) in cycle {op.cycle}"


def local_workspace() -> Workspace:
    """Return the calling thread's own workspace."""
    if not hasattr(_local, "workspace"):
        _local.workspace = Workspace()
    workspace: Workspace = _local.workspace
    return workspace
