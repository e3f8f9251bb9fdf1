"""One chain of a run: segments, the way back after a divergence, and what a model must add."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import DivergenceError
from daskfactor.executors.base import BlockProgram, Executor
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.executors.state import ChainState, place_cells
from daskfactor.inference.base import Sampler, Track
from daskfactor.inference.multiplicative import OnIteration
from daskfactor.inference.options import ADAPT_EVERY, FROZEN_FROM, RunOptions
from daskfactor.inference.passes import Fit
from daskfactor.models.gaussian import GaussianMF
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.random import Stream, generator

Array = NDArray[Any]
Cells = tuple[NDArray[np.int64], NDArray[np.int64]]
Model = TweedieNMF | GaussianMF

OnShare = Callable[[float], None]

MOST_REDUCTIONS = 20
MOST_PASSES, FEWEST_PASSES = 100, 20
DEAR_PASS = 1e9
"""Entries times components from which on a warm start takes fewer passes."""


def positions(order: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    """Where on the grid each of the caller's rows lies; None if they are not permuted."""
    if order is None:
        return None
    position = np.empty_like(order)
    position[order] = np.arange(order.size)
    return position


def in_callers_order(data: BlockedData, side: str, values: Array, axis: int = 0) -> Array:
    """Rows (or columns) of a factor as the caller numbers them."""
    position = positions(data.row_order if side == "rows" else data.col_order)
    return values if position is None else np.take(values, position, axis=axis)


@dataclass
class TrackRun:
    """One track's state and what it has produced in the running segment."""

    track: Track
    state: ChainState
    cycle: int = 0
    fits: dict[int, Fit] = field(default_factory=dict)
    densities: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """What all chains of a run share.

    ``cells`` are positions in the caller's order; ``temperature`` is the power t
    of the likelihood in p(V | W, H)^t p(W, H), 1 for the posterior.
    """

    data: BlockedData
    model: Model
    sampler: Sampler
    options: RunOptions
    executor: Executor
    cells: Cells | None = None
    temperature: float = 1.0

    def chain(self, number: int) -> "ChainRun":
        """Make one of the run's chains, not started yet."""
        return self.sampler.chain(self, number)

    @property
    def split(self) -> int:
        """Fine cycle at which a pair's coarse track leaves the fine one's state."""
        coarseness = max(track.coarseness for track in self.sampler.tracks)
        return self.options.tune // 2 // coarseness * coarseness

    @property
    def frozen_from(self) -> int:
        """Cycle from which metric and dispersion no longer change."""
        if len(self.sampler.tracks) > 1:
            return self.split
        return int(self.options.tune * FROZEN_FROM)

    @property
    def warm_passes(self) -> int:
        """Passes of the warm start: fewer where a pass is dear."""
        entries = int(self.data.n_stored.sum())
        asked = self.sampler.warm_start
        if asked != "auto":
            return asked
        affordable = int(MOST_PASSES * DEAR_PASS / max(1, entries * self.model.n_components))
        return min(MOST_PASSES, max(FEWEST_PASSES, affordable))

    @property
    def placed_cells(self) -> Cells | None:
        """Monitored cells as positions on the grid, which may be in an order of its own."""
        if self.cells is None:
            return None
        rows, cols = positions(self.data.row_order), positions(self.data.col_order)
        return (
            self.cells[0] if rows is None else rows[self.cells[0]],
            self.cells[1] if cols is None else cols[self.cells[1]],
        )


class ChainRun(ABC):
    """A chain on its way through a run's segments.

    What depends on the model is left to a subclass: where a chain starts, what an
    operation does, and what is learnt between segments.
    """

    hyper: Any

    def __init__(self, setting: Setting, number: int) -> None:
        self.setting = setting
        self.number = number
        self.shrink = 1.0
        self.divergences: list[int] = []
        self.tracks: list[TrackRun] = []

    # -- what a model adds -----------------------------------------------------

    @abstractmethod
    def warm_start(
        self, on_iteration: OnIteration | None = None, like: "ChainRun | None" = None
    ) -> None:
        """Set the first track's state near a mode; ``like`` is the run's first chain."""

    @abstractmethod
    def attrs(self) -> dict[str, float]:
        """Hyperparameters under the names that results use."""

    @abstractmethod
    def memory(self) -> dict[str, Any]:
        """JSON values that a checkpoint keeps besides the state."""

    @abstractmethod
    def recall(self, memory: dict[str, Any]) -> None:
        """Take over what ``memory`` gave."""

    @abstractmethod
    def _program(self, track: Track) -> BlockProgram:
        """The operations of one track at the present hyperparameters."""

    @abstractmethod
    def _log_prior(self, state: ChainState, cycle: int) -> float:
        """Log-density of the factors at the end of an evaluated cycle."""

    @abstractmethod
    def _ran_away(self, run: TrackRun) -> bool:
        """Whether a finite state is beyond anything the data could mean."""

    @abstractmethod
    def _adapt(self, end: int) -> None:
        """Learn from a segment that ended soundly at fine cycle ``end``."""

    @abstractmethod
    def _lp(self, fit: Fit) -> float:
        """Log-likelihood from a fit's sums."""

    def _between(self, run: TrackRun, start: int, stop: int) -> None:
        """Learn from the cycles up to ``stop``; a divergence takes it back."""
        del run, start, stop

    def model_warning(self) -> str | None:
        """What the user should be told about data and model at the end of the run."""
        return None

    def sampler_warning(self) -> str | None:
        """What the user should be told about the sampler at the end of the run."""
        return None

    # -- segments ------------------------------------------------------------

    def start_recording(self) -> None:
        """Watch the monitored cells; called once, before the first draw."""
        cells = self.setting.placed_cells
        if cells is None:
            return
        for run in self.tracks:
            run.state.cells = place_cells(self.setting.data.grid, *cells, self.setting.data.dtype)

    @property
    def cycle(self) -> int:
        """Fine cycles done."""
        return self.tracks[0].cycle

    def advance(self, end: int, on_share: OnShare | None = None) -> None:
        """Run all tracks to fine cycle ``end``; on divergence go back and halve the step.

        ``on_share`` is told which share of the segment is done.
        """
        self._split_if_due()
        if self.cycle == self.setting.options.tune:
            self.start_recording()
        memory = self.memory()
        before = [run.state.copy() for run in self.tracks]
        cycles = [run.cycle for run in self.tracks]
        for _ in range(MOST_REDUCTIONS):
            done = 0.0
            whole = sum(1 / run.track.coarseness for run in self.tracks)
            for run in self.tracks:
                share = 1 / run.track.coarseness / whole
                self._run_segment(run, end // run.track.coarseness, on_share, done, share)
                done += share
            if all(self._is_sound(run) for run in self.tracks):
                self._adapt(end)
                return
            self.divergences.append(cycles[0])
            self.shrink /= 2
            for run, state, cycle in zip(self.tracks, before, cycles, strict=True):
                run.state, run.cycle = state.copy(), cycle
                run.fits.clear()
                run.densities.clear()
            self.recall(memory)
        raise DivergenceError(
            f"chain {self.number} diverged between cycles {cycles[0]} and {end} even with the step "
            f"reduced to {self.shrink:.2g} of what was asked for; look for extreme entries in the "
            "data, and leave step and preconditioner at their defaults"
        )

    def _split_if_due(self) -> None:
        """Let the coarse track leave the fine one's state, with the metric as it is."""
        tracks = self.setting.sampler.tracks
        if len(self.tracks) < len(tracks) and self.cycle >= self.setting.split:
            fine = self.tracks[0]
            for track in tracks[1:]:
                self.tracks.append(
                    TrackRun(track, fine.state.copy(), fine.cycle // track.coarseness)
                )

    def _run_segment(
        self, run: TrackRun, end: int, on_share: OnShare | None, before: float, share: float
    ) -> None:
        start, length = run.cycle, end - run.cycle
        every = self.setting.sampler.learns_every or end
        for stop in (*range(start - start % every + every, end, every), end):
            done = before + share * (run.cycle - start) / length
            first = run.cycle
            self._run_stretch(run, stop, on_share, done, share * (stop - first) / length)
            self._between(run, first, stop)

    def _run_stretch(
        self, run: TrackRun, end: int, on_share: OnShare | None, before: float, share: float
    ) -> None:
        setting = self.setting
        coarse = run.track.coarseness > 1
        stream = Stream.COARSE_SCHEDULE if coarse else Stream.SCHEDULE
        plan = build_plan(
            setting.sampler.schedule,
            setting.data.n_observed,
            range(run.cycle, end),
            lambda cycle: generator(setting.options.seed, self.number, stream, cycle),
            lambda cycle: self._wanted(run.track, cycle, end),
        )
        operations = sum(len(part.ops) for part in plan)

        def on_done(done: int) -> None:
            if on_share is not None:
                on_share(before + share * done / operations)

        run.state = setting.executor.run(
            plan, self._program(run.track), run.state, setting.data, on_done
        )
        run.cycle = end
        for evaluation in run.state.evaluations:
            fit = run.fits.get(evaluation.cycle, Fit(0.0, 0.0))
            run.fits[evaluation.cycle] = Fit(
                fit.negative_divergence + float(evaluation.values[0]),
                fit.pearson + float(evaluation.values[1]),
            )
        run.state.evaluations.clear()
        for cycle in run.fits.keys() - run.densities.keys():
            prior = self._log_prior(run.state, cycle)
            run.densities[cycle] = self._lp(run.fits[cycle]) + prior

    def step_for(self, track: Track) -> Any:
        """The sampler's step for one track on this grid."""
        setting = self.setting
        return setting.sampler.step_for(track, setting.data.grid.blocks, setting.model.n_components)

    def step_size(self, run: TrackRun, cycle: int) -> float:
        """The last step of a cycle, reductions included."""
        moves = self.setting.sampler.work(self.setting.data.grid.blocks).moves
        return float(self.step_for(run.track)((cycle + 1) * moves - 1)) * self.shrink

    def statistics(self, cycles: list[int]) -> dict[str, Array]:
        """What results hold of cycles of the running segment besides density and step."""
        del cycles
        return {}

    def track_options(self, track: Track) -> RunOptions:
        """The timetable in a track's own cycles and draws."""
        options = self.setting.options
        return replace(
            options,
            draws=options.draws // track.coarseness,
            tune=options.tune // track.coarseness,
        )

    def _wanted(self, track: Track, cycle: int, end: int) -> CycleOptions:
        options = self.track_options(track)
        draw = options.draw_index(cycle)
        fine = cycle * track.coarseness
        return CycleOptions(
            adapt=fine < self.setting.frozen_from and cycle % ADAPT_EVERY == 0,
            record=draw is not None,
            keep=draw is not None and options.is_kept(draw),
            evaluate=draw is not None or cycle == end - 1,
        )

    def _is_sound(self, run: TrackRun) -> bool:
        """Whether all entries are finite and the fit has not run away."""
        if not all(np.isfinite(fit.negative_divergence) for fit in run.fits.values()):
            return False
        if not all(bool(np.isfinite(band.values).all()) for band in run.state.bands()):
            return False
        return not self._ran_away(run)

    # -- what a segment gave ---------------------------------------------------

    def log_likelihood(self) -> float:
        """Of the latest evaluated state."""
        fine = self.tracks[0]
        if not fine.fits:
            return math.nan
        return self._lp(fine.fits[max(fine.fits)])

    def log_posterior(self, run: TrackRun, cycle: int) -> float:
        """Log p(V | W, H) + log p(W) + log p(H) at the end of an evaluated cycle."""
        return run.densities[cycle]

    def forget(self) -> None:
        """Drop the segment's draws and fits, once they are written."""
        for run in self.tracks:
            run.state.forget()
            run.fits.clear()
            run.densities.clear()
