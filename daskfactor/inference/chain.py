"""One chain of a run: segments, the way back after a divergence, and what each leaves behind."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import DivergenceError
from daskfactor.executors.base import BlockProgram, Executor
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.inference.base import Sampler, Setup, StepSize, Track
from daskfactor.inference.options import (
    ADAPT_EVERY,
    FROZEN_FROM,
    RunOptions,
    boundaries,
    segment_length,
)
from daskfactor.inference.passes import Fit
from daskfactor.inference.run import Arrays, Member, OnShare, OnStep, Run
from daskfactor.inference.track import (
    Cells,
    TrackRun,
    in_callers_order,
    monitored,
    positions,
)
from daskfactor.models.settings import FactorModel
from daskfactor.progress import OnEvent
from daskfactor.random import Stream, generator, noise_key
from daskfactor.results.sink import Sink

Array = NDArray[Any]

MOST_REDUCTIONS = 20
MOST_PASSES, FEWEST_PASSES = 100, 20
DEAR_PASS = 1e9
"""Entries times components from which on a warm start takes fewer passes."""
FLOPS_PER_NORMAL = 150
SPARSE_PENALTY = 5
"""Cost of an operation on a stored entry, in units of one inside a matrix product."""


@dataclass(frozen=True)
class Setting:
    """The data, model, sampler and timetable that all chains of a run share.

    ``cells`` are positions in the caller's order; ``temperature`` is the power t
    of the likelihood in p(V | W, H)^t p(W, H), 1 for the posterior.
    """

    data: BlockedData
    model: FactorModel
    sampler: Sampler
    options: RunOptions
    executor: Executor
    cells: Cells | None = None
    temperature: float = 1.0

    def chain(self, number: int) -> "Chain":
        """Make one of the run's chains, not started yet."""
        return self.sampler.chain(self, number)

    def run(self, sink: Sink | None, on_event: OnEvent) -> "Run[Chain]":
        """Make the run of all chains, not started yet."""
        chains = [self.chain(number) for number in range(self.options.chains)]
        return Run(chains, self.options, self.ends, sink, on_event)

    @property
    def coarseness(self) -> int:
        """Fine cycles for each cycle of the coarsest track."""
        return max(track.coarseness for track in self.sampler.tracks)

    @property
    def split(self) -> int:
        """Fine cycle at which a pair's coarse track leaves the fine one's state."""
        return self.options.tune // 2 // self.coarseness * self.coarseness

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
    def work(self) -> float:
        """Floating-point operations of a cycle, or what takes as long; from sizes alone."""
        data, width = self.data, self.model.width
        passes = self.sampler.work(data.grid.blocks).passes
        if not data.is_sparse:
            return passes * 8.0 * data.shape[0] * data.shape[1] * width
        entries = SPARSE_PENALTY * 8.0 * float(data.n_stored.sum())
        noise = FLOPS_PER_NORMAL * data.grid.blocks * sum(data.shape)
        return passes * (entries + noise) * width

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Fine cycles at which segments end, where results are written and all is saved."""
        options = self.options
        kept = 0.0
        if options.keep_every:
            itemsize = np.dtype(options.dtype).itemsize
            kept = sum(self.data.shape) * self.model.width * itemsize
            kept /= options.thin * options.keep_every
            kept *= options.chains  # all chains hold their draws until the segment is written
        length = segment_length(self.work, kept, self.coarseness)
        return tuple(boundaries(options, length, self.split, self.coarseness))

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


class Chain(Member):
    """A chain on its way through a run's segments.

    What depends on the model is left to a subclass: where a chain starts, its densities,
    and what is learnt of hyperparameters on the way.

    Attributes
    ----------
    hyper
        The present hyperparameters.
    floor
        Smallest mean μ that gradients are taken at.
    """

    hyper: Any
    floor: float

    def __init__(self, setting: Setting, number: int) -> None:
        self.setting = setting
        self.number = number
        self.shrink = 1.0
        self.divergences: list[int] = []
        self.tracks: list[TrackRun] = []

    # -- what a model adds -----------------------------------------------------

    @abstractmethod
    def start(self, on_step: OnStep | None = None, first: "Chain | None" = None) -> None:
        """Set the first track's state near a mode; ``first`` is the run's first chain."""

    @abstractmethod
    def memory(self) -> dict[str, Any]:
        """Return JSON values that a checkpoint keeps besides the state."""

    @abstractmethod
    def recall(self, memory: dict[str, Any]) -> None:
        """Take over what `memory` gave."""

    @abstractmethod
    def _lp(self, fit: Fit) -> float:
        """Return the log-likelihood, from a fit's sums."""

    @abstractmethod
    def _ran_away(self, run: TrackRun) -> bool:
        """Tell whether a finite state is beyond anything the data could mean."""

    @property
    def tempered(self) -> Any:
        """Hyperparameters of p(V | W, H)^t p(W, H)."""
        return self.hyper

    def _prior_constant(self) -> float:
        """Return the part of the log prior density that bands do not record."""
        return 0.0

    def _between(self, run: TrackRun, start: int, stop: int) -> None:
        """Learn from the cycles up to ``stop``; a divergence takes it back."""
        del run, start, stop

    def _adapt(self, end: int) -> None:
        """Learn from a segment that ended soundly at fine cycle ``end``."""
        del end

    def model_warning(self) -> str | None:
        """Tell what the user should know of data and model at the end of the run."""
        return None

    def sampler_warning(self) -> str | None:
        """Tell what the user should know of the sampler at the end of the run."""
        return None

    def statistics(self, cycles: list[int]) -> dict[str, Array]:
        """Return the sampler's own statistics of cycles of the running segment."""
        del cycles
        return {}

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
            self._watch_cells()
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
                run.forget()
                run.state, run.cycle = state.copy(), cycle
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

    def _watch_cells(self) -> None:
        """Watch the monitored cells; called once, before the first draw."""
        cells, data = self.setting.placed_cells, self.setting.data
        if cells is not None:
            for run in self.tracks:
                run.watch(data.grid, cells, data.dtype)

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
            run.densities[cycle] = self._density(run, cycle)

    def _density(self, run: TrackRun, cycle: int) -> float:
        """Return log p(V | W, H) + log p(W) + log p(H) of what moves, at an evaluated cycle."""
        prior = math.fsum(band.sums[cycle] for band in run.state.bands())
        return self._lp(run.fits[cycle]) + (self._prior_constant() + prior)

    def _program(self, track: Track) -> BlockProgram:
        """Make the operations of one track at the present hyperparameters."""
        setting = self.setting
        key = noise_key(setting.options.seed, self.number)
        return setting.sampler.program(
            Setup(
                model=setting.model,
                hyper=self.tempered,
                floor=self.floor,
                key=(int(key[0]), int(key[1])),
                step=self.step_for(track),
                shrink=self.shrink,
                coarse=track.coarseness > 1,
                blocks=setting.data.grid.blocks,
                observed=setting.data.n_observed,
            )
        )

    def step_for(self, track: Track) -> StepSize:
        """Return the sampler's step for one track on this grid."""
        setting = self.setting
        return setting.sampler.step_for(track, setting.data.grid.blocks, setting.model.n_components)

    def step_size(self, run: TrackRun, cycle: int) -> float:
        """Return the last step of a cycle, reductions included."""
        moves = self.setting.sampler.work(self.setting.data.grid.blocks).moves
        return float(self.step_for(run.track)((cycle + 1) * moves - 1)) * self.shrink

    def track_options(self, track: Track) -> RunOptions:
        """Return the timetable in a track's own cycles and draws."""
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
        """Tell whether all entries are finite and the fit has not run away."""
        if not all(np.isfinite(fit.negative_divergence) for fit in run.fits.values()):
            return False
        if not all(bool(np.isfinite(band.values).all()) for band in run.state.bands()):
            return False
        return not self._ran_away(run)

    # -- what a segment gave ---------------------------------------------------

    def log_likelihood(self) -> float:
        """Log-likelihood of the latest evaluated state."""
        fine = self.tracks[0]
        return self._lp(fine.fits[max(fine.fits)]) if fine.fits else math.nan

    def forget(self) -> None:
        """Drop the segment's draws and fits, once they are written."""
        for run in self.tracks:
            run.forget()

    def write(self, sink: Sink, end: int) -> None:
        """Write the draws and statistics of the segment that ended at ``end``, and all moments."""
        fine = self.tracks[0]
        if end <= self.setting.options.tune:
            number = self.setting.ends.index(end)
            stats = self._statistics(fine, [end - 1])
            sink.write_stats(self.number, number, stats, "warmup_sample_stats")
            return
        options = self.track_options(fine.track)
        every = options.keep_every or 1
        draws = {cycle: options.draw_index(cycle) for cycle in sorted(fine.fits)}
        kept = {
            cycle: draw // every
            for cycle, draw in draws.items()
            if draw is not None and (not options.keep_every or options.is_kept(draw))
        }
        if kept:
            cycles = list(kept)
            stats = self._statistics(fine, cycles)
            stats["diverging"] = np.array([self._diverged(cycle) for cycle in cycles])
            stats |= self.statistics(cycles)
            sink.write_stats(self.number, kept[cycles[0]], stats)
        for run in self.tracks:
            self._write_draws(sink, run)
        self._write_moments(sink)

    def _statistics(self, fine: TrackRun, cycles: list[int]) -> dict[str, Array]:
        return {
            "lp": np.array([fine.densities[cycle] for cycle in cycles]),
            "step_size": np.array([self.step_size(fine, cycle) for cycle in cycles]),
        }

    def _diverged(self, cycle: int) -> bool:
        """Tell whether this draw is the first after a roll-back."""
        options = self.setting.options
        span = options.thin * (options.keep_every or 1)
        return any(cycle - span < start <= cycle for start in self.divergences)

    def _write_draws(self, sink: Sink, run: TrackRun) -> None:
        options, data = self.track_options(run.track), self.setting.data
        count = len(run.state.rows[0].draws)
        if not count:
            return
        taken = (run.cycle - options.tune) // options.thin // options.keep_every
        W, Ht = (
            in_callers_order(data, side, run.state.gather_draws(side), axis=1)
            for side in ("rows", "columns")
        )
        sink.write_draws(self.number, taken - count, W, Ht, run.track.group)

    def _write_moments(self, sink: Sink) -> None:
        fine, data = self.tracks[0], self.setting.data
        count = fine.state.rows[0].counts["moments"]
        if not count:
            return
        moments: dict[str, Array] = {}
        for name, side in (("W", "rows"), ("Ht", "columns")):
            mean, m2 = fine.state.gather(side, "mean"), fine.state.gather(side, "m2")
            moments[f"{name}_mean"] = in_callers_order(data, side, mean)
            moments[f"{name}_var"] = in_callers_order(data, side, m2) / count
        sink.write_moments(self.number, **moments, count=count)
        if fine.state.cells:
            mean, var, count = monitored(self.tracks)
            sink.write_monitor(self.number, mean=mean, var=var, count=count)

    def snapshot(self) -> tuple[Arrays, dict[str, Any]]:
        """Return everything the chain needs to go on with the same bits."""
        found = [run.snapshot() for run in self.tracks]
        arrays = {name: array for own, _ in found for name, array in own.items()}
        meta = {
            "tracks": [meta for _, meta in found],
            "memory": self.memory(),
            "shrink": self.shrink,
            "divergences": self.divergences,
        }
        return arrays, meta

    def restore(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        """Take over the state that a snapshot holds."""
        setting = self.setting
        tracks = {track.name: track for track in setting.sampler.tracks}
        self.recall(meta.get("memory", meta))  # the first stores kept it one level up
        self.shrink = meta["shrink"]
        self.divergences = list(meta["divergences"])
        self.tracks = [
            TrackRun.restore(tracks[own["name"]], setting.data, setting.placed_cells, arrays, own)
            for own in meta["tracks"]
        ]
