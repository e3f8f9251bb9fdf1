"""One chain of a run: warm start, tuning, draws, and a way back after a divergence."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.engine.base import Executor
from daskfactor.engine.plan import CycleOptions, build_plan
from daskfactor.engine.state import ChainState, place_cells
from daskfactor.errors import DivergenceError
from daskfactor.io.blocks import BlockedData
from daskfactor.models.tweedie import Hyperparameters, TweedieNMF
from daskfactor.optimizers.multiplicative import (
    DispersionRule,
    OnIteration,
    balance,
    initial_state,
    mean_floor,
    run_updates,
    typical_value,
)
from daskfactor.optimizers.passes import Fit, evaluate, shares
from daskfactor.random import Stream, generator, noise_key
from daskfactor.runs.likelihood import log_normalizer_sum
from daskfactor.runs.options import ADAPT_EVERY, FROZEN_FROM, RunOptions
from daskfactor.samplers import PSGLD, Track
from daskfactor.samplers.program import (
    LangevinProgram,
    drop_adaptation,
    prepare_state,
    refresh_metric,
)

Array = NDArray[Any]

OnShare = Callable[[float], None]

MOST_REDUCTIONS = 20
RUNAWAY = 1e3
"""A chain whose average μ is this many times the data's is taken to have diverged."""


@dataclass
class TrackRun:
    """One track's state and what it has produced in the running segment."""

    track: Track
    state: ChainState
    cycle: int = 0
    fits: dict[int, Fit] = field(default_factory=dict)
    priors: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """What all chains of a run share."""

    data: BlockedData
    model: TweedieNMF
    sampler: PSGLD
    options: RunOptions
    executor: Executor
    cells: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

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


class ChainRun:
    """A chain on its way through a run's segments."""

    def __init__(self, setting: Setting, number: int) -> None:
        self.setting = setting
        self.number = number
        self.rule = DispersionRule(setting.model, setting.data)
        self.hyper = Hyperparameters(1.0, 1.0, 1.0)
        self.shrink = 1.0
        self.normalizer = 0.0
        self.divergences: list[int] = []
        self.tracks: list[TrackRun] = []

    # -- start ---------------------------------------------------------------

    def warm_start(
        self, on_iteration: OnIteration | None = None, like: "ChainRun | None" = None
    ) -> None:
        """Start near a mode: multiplicative updates, balance, and the metric there.

        ``like`` is the run's first chain, which decides for all whether counts
        are Poisson.
        """
        setting = self.setting
        if like is not None:
            self.rule.follow(like.rule)
        data, model, executor = setting.data, setting.model, setting.executor
        state = initial_state(data, model.n_components, setting.options.seed, self.number)
        passes = setting.sampler.warm_start
        if passes:
            point = run_updates(
                data, model, state, executor, self.rule, passes, on_iteration=on_iteration
            )
            fit = point.fit
        else:
            fit = evaluate(executor, data, state, model.beta, self._floor)
        estimate = self.rule.at_point(fit)
        self.rule.settle(estimate)
        self.hyper = model.resolve(data.mean, self.rule.fixed or estimate)
        balance(state)
        prepare_state(state, setting.sampler.majorizer)
        if setting.sampler.majorizer:
            self._first_metric(state)
        self._refresh_normalizer()
        self.tracks = [TrackRun(setting.sampler.tracks[0], state)]

    def _first_metric(self, state: ChainState) -> None:
        setting = self.setting
        for side, bands in (("rows", state.rows), ("columns", state.cols)):
            for band, share in zip(
                bands,
                shares(
                    setting.executor,
                    setting.data,
                    state,
                    side,
                    setting.model.beta,
                    self._floor,
                ),
                strict=True,
            ):
                band.arrays["curvature"][:] = share.denominator
                band.counts["curvature"] = 1
        refresh_metric(state, self.hyper)

    @property
    def _floor(self) -> float:
        return mean_floor(self.setting.data, self.setting.model.beta)

    def _refresh_normalizer(self) -> None:
        self.normalizer = log_normalizer_sum(
            self.setting.data,
            self.hyper.dispersion,
            self.setting.model.beta,
            self.setting.executor,
        )

    def start_recording(self) -> None:
        """Watch the monitored cells; called once, before the first draw."""
        if self.setting.cells is None:
            return
        for run in self.tracks:
            run.state.cells = place_cells(
                self.setting.data.grid, *self.setting.cells, self.setting.data.dtype
            )

    # -- segments ------------------------------------------------------------

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
                run.priors.clear()
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
        for cycle in run.fits:
            run.priors[cycle] = self._log_prior(run.state, cycle)

    def _log_prior(self, state: ChainState, cycle: int) -> float:
        """Log p(W) + log p(H) from the sums of the factors at the end of a cycle."""
        result = 0.0
        for bands, rate in ((state.rows, self.hyper.rate_w), (state.cols, self.hyper.rate_h)):
            size = sum(band.values.size for band in bands)
            result += size * math.log(rate) - rate * sum(band.sums[cycle] for band in bands)
        return result

    def _program(self, track: Track) -> LangevinProgram:
        setting = self.setting
        key = noise_key(setting.options.seed, self.number)
        return LangevinProgram(
            beta=setting.model.beta,
            hyper=self.hyper,
            floor=self._floor,
            key=(int(key[0]), int(key[1])),
            step=setting.sampler.step_for(
                track, setting.data.grid.blocks, setting.model.n_components
            ),
            shrink=self.shrink,
            majorizer=setting.sampler.majorizer,
            coarse=track.coarseness > 1,
        )

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
        """Whether all entries are finite and the average mean has not run away."""
        data, state = self.setting.data, run.state
        if not all(np.isfinite(fit.negative_divergence) for fit in run.fits.values()):
            return False
        if not all(bool(np.isfinite(band.values).all()) for band in state.bands()):
            return False
        columns = [
            np.sum([band.values.sum(axis=0, dtype=np.float64) for band in bands], axis=0)
            for bands in (state.rows, state.cols)
        ]
        average = float(columns[0] @ columns[1]) / (data.shape[0] * data.shape[1])
        size = max(typical_value(data), abs(data.maximum), abs(data.minimum))
        return average <= RUNAWAY * size

    def _adapt(self, end: int) -> None:
        """Estimate the dispersion anew while tuning; free what is for tuning alone after it."""
        if end <= self.setting.frozen_from and self.rule.fixed is None:
            fine = self.tracks[0]
            estimate = self.rule.at_draw(fine.fits[fine.cycle - 1])
            self.hyper = self.hyper._replace(dispersion=estimate)
            if self.setting.sampler.majorizer:
                for run in self.tracks:
                    refresh_metric(run.state, self.hyper)
            self._refresh_normalizer()
        if end >= self.setting.options.tune:
            for run in self.tracks:
                drop_adaptation(run.state)

    # -- what a segment gave ---------------------------------------------------

    def log_likelihood(self) -> float:
        """Of the latest evaluated state."""
        fine = self.tracks[0]
        if not fine.fits:
            return math.nan
        return self._lp(fine.fits[max(fine.fits)])

    def _lp(self, fit: Fit) -> float:
        return fit.negative_divergence / self.hyper.dispersion + self.normalizer

    def log_posterior(self, run: TrackRun, cycle: int) -> float:
        """Log p(V | W, H) + log p(W) + log p(H) at the end of an evaluated cycle."""
        return self._lp(run.fits[cycle]) + run.priors[cycle]

    def forget(self) -> None:
        """Drop the segment's draws and fits, once they are written."""
        for run in self.tracks:
            run.state.forget()
            run.fits.clear()
            run.priors.clear()
