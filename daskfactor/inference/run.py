"""Run members through segments together, and write results as they come: the one loop."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from daskfactor.executors.state import ChainState
from daskfactor.inference.options import RunOptions
from daskfactor.progress import OnEvent, Phase, RunEvent
from daskfactor.results.sink import Sink

Arrays = dict[str, NDArray[Any]]
OnShare = Callable[[float], None]
OnStep = Callable[[int, int], None]


class Member(ABC):
    """A thing that a run moves on: a chain, a descent, a set of particles.

    Attributes
    ----------
    number
        Its place among the run's members.
    finished
        Whether it has nothing more to do before the run's end.
    """

    number: int = 0
    finished: bool = False

    def start(self, on_step: OnStep | None = None, first: Any = None) -> None:
        """Go to where the first segment begins; ``first`` is the run's first member."""
        del on_step, first

    @abstractmethod
    def advance(self, end: int, on_share: OnShare | None = None) -> None:
        """Go to the end of a segment; ``on_share`` is told how much of it is done."""

    def log_likelihood(self) -> float:
        """Return what the progress bar shows, or NaN."""
        return math.nan

    def attrs(self) -> dict[str, float]:
        """Return hyperparameters under the names that results use."""
        return {}

    def write(self, sink: Sink, end: int) -> None:
        """Write what the segment that ended at ``end`` gave."""
        del sink, end

    def forget(self) -> None:  # noqa: B027 - most have nothing to drop
        """Drop what has been written."""

    def snapshot(self) -> tuple[Arrays, dict[str, Any]]:
        """Return all that the next segment needs: arrays and JSON values."""
        return {}, {}

    def restore(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        """Take over what `snapshot` gave."""
        del arrays, meta


class PointFit(NamedTuple):
    """A point estimate: factors, hyperparameters, fit, and the objective at iterations."""

    state: ChainState
    hyper: Any
    fit: Any
    objective: list[tuple[int, float]]


class Descent(Member):
    """A point estimate on its way; its segments are iterations, counted from 1."""

    @abstractmethod
    def result(self) -> PointFit:
        """Return where it has come to."""


M = TypeVar("M", bound=Member)


class Run(Generic[M]):
    """A run on its way.

    Parameters
    ----------
    members
        What is moved on, in the order of their numbers.
    options
        Its timetable.
    ends
        Cycles at which segments end, in order.
    sink
        Where results and checkpoints go; None: nowhere.
    on_event
        Is told of progress.
    phases
        What tuning and drawing are called there.

    Attributes
    ----------
    cycle
        Cycles that every member has done and the sink has.
    seconds
        How long the run took before it was taken up again.
    started
        When it was, on this process's clock.
    """

    def __init__(
        self,
        members: Sequence[M],
        options: RunOptions,
        ends: Sequence[int],
        sink: Sink | None,
        on_event: OnEvent,
        phases: tuple[Phase, Phase] = ("tune", "draw"),
    ) -> None:
        self.members = members
        self.options, self.ends, self.sink = options, ends, sink
        self.on_event, self.phases = on_event, phases
        self.cycle, self.seconds, self.started = 0, 0.0, time.perf_counter()
        self._shown = math.nan

    def start(self) -> None:
        """Start every member from the beginning."""
        for position, member in enumerate(self.members):

            def report(done: int, total: int, before: int = position) -> None:
                whole = total * len(self.members)
                self.on_event(RunEvent("warm start", before * total + done, whole))

            member.start(report, self.members[0] if position else None)

    def restore(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        """Take over what a checkpoint holds; start if no member had started yet."""
        if not meta["chains"]:
            self.start()
            return
        for member, own in zip(self.members, meta["chains"], strict=True):
            prefix = f"{member.number}/"
            kept = {
                name.removeprefix(prefix): value
                for name, value in arrays.items()
                if name.startswith(prefix)
            }
            member.restore(kept, own)
        self.cycle, self.seconds = meta["cycle"], meta["seconds"]

    def go(self) -> None:
        """Run all segments that are still to come; a checkpoint after each."""
        for end in self.ends:
            if end <= self.cycle or all(member.finished for member in self.members):
                continue
            for position, member in enumerate(self.members):
                self._advance(member, position, end)
            before, self.cycle = self.cycle, end
            if self.sink is not None:
                self._write(self.sink, before)

    def _write(self, sink: Sink, before: int) -> None:
        """Write what a segment gave; it began at cycle ``before``."""
        for member in self.members:
            member.write(sink, self.cycle)
        if before <= self.options.tune < self.cycle:
            # With these a run that is cut short can be predicted from, too.
            sink.update_attrs(self.attrs())
        if sink.keeps_checkpoints:
            sink.checkpoint(*self._snapshot())
        for member in self.members:
            member.forget()

    def _advance(self, member: M, position: int, end: int) -> None:
        options, count = self.options, len(self.members)
        tuning = end <= options.tune
        offset = 0 if tuning else options.tune
        total = (options.tune if tuning else options.cycles - options.tune) * count
        before = position * (end - self.cycle) + count * (self.cycle - offset)

        def on_share(share: float) -> None:
            done = before + share * (end - self.cycle)
            phase = self.phases[0 if tuning else 1]
            self.on_event(RunEvent(phase, done, total, self._shown))

        member.advance(end, on_share)
        self._shown = member.log_likelihood()
        on_share(1.0)

    def attrs(self) -> dict[str, float]:
        """Return hyperparameters as results name them; the dispersion is the mean over members."""
        found: list[dict[str, float]] = [member.attrs() for member in self.members]
        spread = [own["dispersion"] for own in found if "dispersion" in own]
        return found[0] | ({"dispersion": float(np.mean(spread))} if spread else {})

    def _snapshot(self) -> tuple[Arrays, dict[str, Any]]:
        arrays: Arrays = {}
        chains = []
        for member in self.members:
            own, meta = member.snapshot()
            arrays |= {f"{member.number}/{name}": value for name, value in own.items()}
            chains.append(meta)
        options = self.options
        drawn = max(0, self.cycle - options.tune) // options.thin
        return arrays, {
            "cycle": self.cycle,
            "warmup_draws": sum(end <= min(self.cycle, options.tune) for end in self.ends),
            "draws": drawn // options.keep_every if options.keep_every else drawn,
            "chains": chains,
            "seconds": self.seconds + time.perf_counter() - self.started,
        }
