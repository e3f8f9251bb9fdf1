"""One chain of a run: segments, the way back after a divergence, and what each leaves behind."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import DivergenceError
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.executors.state import (
    ChainState,
    FactorBand,
    make_state,
    place_cells,
    split_factor,
)
from daskfactor.inference.base import TUNING, RunOptions, Setting, StepSize, Track, in_callers_order
from daskfactor.inference.dispersion import dispersion_rule, typical_value
from daskfactor.inference.multiplicative import (
    OnStep,
    balance,
    even_out,
    mean_floor,
    start_state,
    totals_of,
)
from daskfactor.inference.program import (
    RATE,
    Fit,
    Program,
    band_prior,
    column_sums,
    prepare_state,
    refresh_metric,
    shares,
    take_fits,
)
from daskfactor.inference.starts import FAR, climb
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.rates import draw_scales
from daskfactor.models.settings import EFFECTIVE, held
from daskfactor.models.tweedie import Hyperparameters, TweedieNMF
from daskfactor.random import Stream, generator, noise_key
from daskfactor.results.schema import COLUMN, FEATURES, MOMENTS, ROW, Kind, Variable
from daskfactor.results.sink import Sink
from daskfactor.results.trace import extrapolated_moments

Array = NDArray[Any]
Arrays = dict[str, Array]
OnShare = Callable[[float], None]

MOST_REDUCTIONS = 20
ADAPT_EVERY = 5
HEATING = 10
"""Sweeps from the mode of a posterior to the bulk of one of its powers."""
RUNAWAY = 1e3
"""A chain whose average μ is this many times the data's is taken to have diverged."""
FALL = 3.0
"""Nats per parameter below its start at which a chain no longer samples the posterior.

A posterior lies about half a nat per parameter below its mode.
"""


def learnt_variables(setting: Setting) -> tuple[Variable, ...]:
    """Declare what the model learns; what grows with the data only where draws are kept.

    Means of links are always there.
    """
    kept, names = setting.options.keep_every, {"row": ROW, "column": COLUMN}
    found = []
    for name, own, doc in setting.model.learnt:
        dims, linked = [names.get(dim, dim) for dim in own], bool(set(own) & set(FEATURES))
        if kept or not (linked or names.keys() & set(own)):
            kind: Kind = "factor" if linked else "real"
            found.append(Variable("posterior", name, ("chain", "draw", *dims), kind, doc))
        if linked:
            doc = f"mean over cycles: {doc}"
            found.append(Variable(MOMENTS, f"{name}_mean", ("chain", *dims), "factor", doc))
    return tuple(found)


@dataclass
class TrackRun:
    """One track's state and what it has produced in the running segment.

    ``options`` are the run's in the track's own cycles and draws.
    """

    track: Track
    options: RunOptions
    state: ChainState
    cycle: int = 0
    fits: dict[int, Fit] = field(default_factory=dict)
    densities: dict[int, float] = field(default_factory=dict)
    learnt: dict[int, Arrays] = field(default_factory=dict)

    @classmethod
    def of(cls, track: Track, setting: Setting, state: ChainState, cycle: int = 0) -> Self:
        options, each = setting.options, track.coarseness
        own = replace(options, draws=options.draws // each, tune=options.tune // each)
        return cls(track, own, state, cycle)

    def forget(self) -> None:
        """Drop the segment's draws and fits, once they are written."""
        self.state.forget()
        self.fits.clear()
        self.densities.clear()
        self.learnt.clear()

    def gather_cells(self, name: str) -> Array:
        """Return means or sums of squares of the monitored cells, in the caller's order."""
        parts = list(self.state.cells.values())
        out = np.empty(sum(own.where.size for own in parts), parts[0].mean.dtype)
        for own in parts:
            out[own.where] = getattr(own, name)
        return out

    @property
    def cell_count(self) -> int | None:
        """Draws in the monitored cells' moments; None before they are watched."""
        return next((own.count for own in self.state.cells.values()), None)

    def snapshot(self, chain: int) -> tuple[Arrays, dict[str, Any]]:
        """Return everything that a chain's track needs to go on: arrays and JSON values."""
        own, state = f"{chain}/{self.track.name}", self.state
        bands = {"rows": state.rows[0], "columns": state.cols[0]}
        names = sorted({*bands["rows"].arrays, *bands["columns"].arrays})
        arrays = {
            f"{own}/{side}/{name or 'values'}": state.gather(side, name)
            for side, band in bands.items()
            for name in (None, *names)
            if name is None or name in band.arrays
        }
        if state.cells:
            arrays |= {f"{own}/cells/{name}": self.gather_cells(name) for name in ("mean", "m2")}
        meta = {
            "name": self.track.name,
            "cycle": self.cycle,
            "counts": dict(state.rows[0].counts),
            "cell_count": self.cell_count,
            "arrays": names,
        }
        return arrays, meta

    @classmethod
    def restore(cls, chain: "Chain", arrays: Arrays, meta: dict[str, Any]) -> Self:
        """Make the track of a chain that a snapshot holds."""
        setting, name = chain.setting, f"{chain.number}/{meta['name']}"
        data, grid = setting.data, setting.data.grid
        state = make_state(grid, arrays[f"{name}/rows/values"], arrays[f"{name}/columns/values"])
        for side, bands, offsets in (
            ("rows", state.rows, grid.rows.offsets),
            ("columns", state.cols, grid.cols.offsets),
        ):
            for key in (key for key in meta["arrays"] if f"{name}/{side}/{key}" in arrays):
                pieces = split_factor(arrays[f"{name}/{side}/{key}"], offsets)
                for band, piece in zip(bands, pieces, strict=True):
                    band.arrays[key] = piece
            for band in bands:
                band.counts = dict(meta["counts"])
        cells = setting.placed_cells
        if cells is not None and meta["cell_count"] is not None:
            state.cells = place_cells(grid, *cells, data.dtype)
            for own in state.cells.values():
                own.mean[:] = arrays[f"{name}/cells/mean"][own.where]
                own.m2[:] = arrays[f"{name}/cells/m2"][own.where]
                own.count = meta["cell_count"]
        (track,) = (own for own in setting.sampler.tracks if own.name == meta["name"])
        return cls.of(track, setting, state, meta["cycle"])


class Chain(ABC):
    """A chain on its way through a run's segments.

    What depends on the model is left to a subclass: where a chain starts, its densities,
    and what is learnt of hyperparameters on the way.

    Attributes
    ----------
    hyper
        The present hyperparameters.
    floor
        Smallest mean μ that gradients are taken at.
    means
        Means over the draws of what is learnt, by the names that results have; replaced, never
        changed.
    """

    hyper: Any
    floor: float

    def __init__(self, setting: Setting, number: int) -> None:
        self.setting = setting
        self.number = number
        self.shrink = 1.0
        self.divergences: list[int] = []
        self.tracks: list[TrackRun] = []
        self.means: Arrays = {}
        self.noise_sum = 0.0
        self.noise_draws = 0

    # -- what a model adds -----------------------------------------------------

    @abstractmethod
    def start(self, on_step: OnStep | None = None, first: "Chain | None" = None) -> None:
        """Set the first track's state near a mode; ``first`` is the run's first chain."""

    @abstractmethod
    def attrs(self) -> dict[str, float]:
        """Return hyperparameters under the names that results use."""

    @abstractmethod
    def memory(self) -> dict[str, Any]:
        """Return JSON values and arrays that a checkpoint keeps besides the state."""

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
    def law(self) -> Likelihood:
        """The law of an entry at the present hyperparameters."""
        return self.setting.model.likelihood

    @property
    def tempered(self) -> Any:
        """Hyperparameters of p(V | W, H)^t p(W, H), with what divides divergences."""
        return self.hyper

    def _prior_constant(self) -> float:
        """Return the part of the log prior density that bands do not record."""
        return 0.0

    def _between(self, run: TrackRun, start: int) -> None:
        """Learn from a track's cycles since ``start``; a divergence takes it back."""
        spent = (self.setting.options.draw_index(cycle) for cycle in range(start, run.cycle))
        draws = sum(draw is not None for draw in spent)
        self.noise_sum += draws * self.hyper.dispersion
        self.noise_draws += draws
        # A segment's end must leave no trace in the draws.
        if self.setting.model.learnt and run.cycle % self.setting.learns_every == 0:
            self._learn(run)

    @abstractmethod
    def _learn(self, run: TrackRun) -> None:
        """Draw the model's learnt hyperparameters, given the state that a track has come to."""

    def learnt(self, run: TrackRun) -> Arrays:
        """Return the present values of what the model learns, by name."""
        del run
        names = (own.name for own in self.setting.model.learnt)
        return {name: np.asarray(getattr(self.hyper, name)) for name in names}

    @property
    def mean_dispersion(self) -> float:
        """The mean of the dispersion over the draws, as predictions take it."""
        if not self.noise_draws:
            return float(self.hyper.dispersion)
        return self.noise_sum / self.noise_draws

    def _adapt(self, end: int) -> None:
        """Learn from a segment that ended soundly at fine cycle ``end``."""
        del end

    @property
    def estimate(self) -> float | None:
        """The dispersion as the chain has just estimated it; None: there is nothing to estimate."""
        return None

    def take_dispersion(self, dispersion: float) -> None:
        """Take what all chains of a run agreed on in place of an estimate of the chain's own."""
        del dispersion

    def warnings(self) -> tuple[str | None, str | None]:
        """Tell what the user should know of data and model, and of the sampler, at the end."""
        return None, None

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
        self._prepare_segment()
        memory = self.memory()
        before = [(run.cycle, run.state.copy()) for run in self.tracks]
        begun = sum(cycle for cycle, _ in before)
        whole = sum(end // run.track.coarseness for run in self.tracks) - begun

        def tell(ahead: float) -> None:
            """``ahead``: cycles that are done of the running plan."""
            if on_share is not None:
                on_share((sum(run.cycle for run in self.tracks) + ahead - begun) / whole)

        for _ in range(MOST_REDUCTIONS):
            for run in self.tracks:
                self._run_segment(run, end // run.track.coarseness, tell)
            if all(self._is_sound(run) for run in self.tracks):
                self._adapt(end)
                return
            self.divergences.append(before[0][0])
            self.shrink /= 2
            for run, (cycle, state) in zip(self.tracks, before, strict=True):
                run.forget()
                run.state, run.cycle = state.copy(), cycle
            self.recall(memory)
        raise DivergenceError(
            f"chain {self.number} diverged between cycles {before[0][0]} and {end} even with the "
            f"step reduced to {self.shrink:.2g} of what was asked for; look for extreme entries in "
            "the data, and leave step and preconditioner at their defaults"
        )

    def _prepare_segment(self) -> None:
        """Let coarse tracks leave the fine one's state if that is due; begin to watch cells."""
        setting = self.setting
        for track in setting.sampler.tracks[len(self.tracks) :]:
            fine = self.tracks[0]
            if fine.cycle >= setting.split:
                state, cycle = fine.state.copy(), fine.cycle // track.coarseness
                self.tracks.append(TrackRun.of(track, setting, state, cycle))
        cells, data = setting.placed_cells, setting.data
        if self.cycle == setting.options.tune and cells is not None:
            for run in self.tracks:
                run.state.cells = place_cells(data.grid, *cells, data.dtype)

    def _run_segment(self, run: TrackRun, end: int, tell: OnShare) -> None:
        every = self.setting.learns_every
        for stop in (*range(run.cycle - run.cycle % every + every, end, every), end):
            start = run.cycle
            self._run_cycles(run, stop, tell)
            self._between(run, start)

    def _run_cycles(self, run: TrackRun, end: int, tell: OnShare) -> None:
        setting, cycles = self.setting, end - run.cycle
        stream = Stream.COARSE_SCHEDULE if run.track.coarseness > 1 else Stream.SCHEDULE
        plan = build_plan(
            setting.sampler.schedule,
            setting.data.n_observed,
            range(run.cycle, end),
            lambda cycle: generator(setting.options.seed, self.number, stream, cycle),
            lambda cycle: self._wanted(run, cycle, end),
        )
        operations = sum(len(part.ops) for part in plan)
        run.state = setting.executor.run(
            plan,
            self.program(run.track),
            run.state,
            setting.data,
            lambda done: tell(cycles * done / operations),
        )
        run.cycle = end
        learnt = self.learnt(run)
        for cycle, fit in take_fits(run.state).items():
            self._note(run, cycle, fit, learnt)

    def _note(self, run: TrackRun, cycle: int, fit: Fit, learnt: Arrays) -> None:
        """Keep a cycle's fit, what is learnt, and log p(V | W, H) + log p(W, H) of what moves."""
        run.learnt[cycle] = learnt
        prior = math.fsum(band.sums[cycle] for band in run.state.bands())
        run.fits[cycle] = fit
        run.densities[cycle] = self._lp(fit) + (self._prior_constant() + prior)

    def program(self, track: Track) -> Program:
        """Make the block operations of one track at the present hyperparameters."""
        setting = self.setting
        key = noise_key(setting.options.seed, self.number)
        return Program(
            setting.sampler,
            self.law,
            self.floor,
            self.tempered,
            (int(key[0]), int(key[1])),
            setting.model.frozen,
            self.step_for(track),
            self.shrink,
            track.coarseness > 1,
        )

    def step_for(self, track: Track) -> StepSize:
        """Return the sampler's step for one track on this grid."""
        setting = self.setting
        return setting.sampler.step_for(track, setting.data.grid.blocks, setting.model.n_components)

    def step_size(self, run: TrackRun, cycle: int) -> float:
        """Return the last step of a cycle, reductions included."""
        moves = self.setting.sampler.work(self.setting.data.grid.blocks).moves
        return float(self.step_for(run.track)((cycle + 1) * moves - 1)) * self.shrink

    def _wanted(self, run: TrackRun, cycle: int, end: int) -> CycleOptions:
        options, fine = run.options, cycle * run.track.coarseness
        drawn = options.draw_index(cycle) is not None
        return CycleOptions(
            adapt=fine < self.setting.frozen_from and cycle % ADAPT_EVERY == 0,
            record=drawn,
            keep=bool(options.keep_every) and options.place(cycle) is not None,
            evaluate=drawn or cycle == end - 1,
        )

    def _is_sound(self, run: TrackRun) -> bool:
        """Tell whether all entries are finite and the fit has not run away."""
        return (
            all(np.isfinite(fit.negative_divergence) for fit in run.fits.values())
            and all(bool(np.isfinite(band.values).all()) for band in run.state.bands())
            and not self._ran_away(run)
        )

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
        fine, setting = self.tracks[0], self.setting
        tuning = end <= setting.options.tune
        cycles = [cycle for cycle in sorted(fine.fits) if fine.options.place(cycle) is not None]
        cycles = [end - 1] if tuning else cycles
        stats = {
            "lp": np.array([fine.densities[cycle] for cycle in cycles]),
            "step_size": np.array([self.step_size(fine, cycle) for cycle in cycles]),
        }
        if tuning:
            sink.write_stats(self.number, setting.ends.index(end), stats, "warmup_sample_stats")
            return
        if cycles:
            span = fine.options.thin * fine.options.spacing
            # A draw is marked if it is the first after a roll-back.
            stats["diverging"] = np.array(
                [
                    any(cycle - span < begun <= cycle for begun in self.divergences)
                    for cycle in cycles
                ]
            )
            stats |= self.statistics(cycles)
            place = cast("int", fine.options.place(cycles[0]))
            sink.write_stats(self.number, place, stats)
            values = {
                own.name: np.stack([fine.learnt[cycle][own.name] for cycle in cycles])
                for own in learnt_variables(setting)
                if own.group == "posterior"
            }
            sink.write_stats(self.number, place, values, "posterior")
        for run in self.tracks:
            self._write_draws(sink, run)
        self._write_moments(sink)

    def _write_draws(self, sink: Sink, run: TrackRun) -> None:
        options, data, state = run.options, self.setting.data, run.state
        count = len(state.rows[0].draws)
        if not count:
            return
        taken = (run.cycle - options.tune) // options.thin // options.keep_every
        W = in_callers_order(data, "rows", state.gather_draws("rows"), axis=1)
        Ht = in_callers_order(data, "columns", state.gather_draws("columns"), axis=1)
        sink.write_draws(self.number, taken - count, W, Ht, run.track.group)

    def _write_moments(self, sink: Sink) -> None:
        state, data = self.tracks[0].state, self.setting.data
        count = state.rows[0].counts["moments"]
        if not count:
            return
        moments: dict[str, Array] = {}
        for name, side in (("W", "rows"), ("Ht", "columns")):
            moments[f"{name}_mean"] = in_callers_order(data, side, state.gather(side, "mean"))
            moments[f"{name}_var"] = in_callers_order(data, side, state.gather(side, "m2")) / count
        sink.write_moments(self.number, **moments, **self.means, count=count)
        if not state.cells:
            return
        found = []
        for run in self.tracks:
            mean, m2 = (run.gather_cells(name).astype(np.float64) for name in ("mean", "m2"))
            found.append((mean, m2 / (run.cell_count or 1)))
        mean, var = found[0]
        if len(found) > 1:
            mean, var = extrapolated_moments(found[0], found[1], nonnegative=True)
        sink.write_monitor(self.number, mean=mean, var=var, count=self.tracks[0].cell_count or 0)

    def snapshot(self) -> tuple[Arrays, dict[str, Any]]:
        """Return everything the chain needs to go on with the same bits."""
        found = [run.snapshot(self.number) for run in self.tracks]
        arrays = {name: array for own, _ in found for name, array in own.items()}
        memory = self.memory()
        held = [name for name, value in memory.items() if isinstance(value, np.ndarray)]
        arrays |= {f"{self.number}/memory/{name}": memory.pop(name) for name in held}
        meta = {
            "tracks": [meta for _, meta in found],
            "memory": memory,
            "shrink": self.shrink,
            "divergences": self.divergences,
        }
        return arrays, meta

    def restore(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        """Take over the state that a snapshot holds."""
        memory, start = meta.get("memory", meta), f"{self.number}/memory/"
        held = {key.removeprefix(start): arrays[key] for key in arrays if key.startswith(start)}
        self.recall(memory | held)  # the first stores kept it one level up
        self.shrink = meta["shrink"]
        self.divergences = list(meta["divergences"])
        self.tracks = [TrackRun.restore(self, arrays, own) for own in meta["tracks"]]


class TweedieChain(Chain):
    """A chain of a `TweedieNMF`: multiplicative warm start, the majoriser's metric, φ."""

    hyper: Hyperparameters
    model: TweedieNMF

    def __init__(self, setting: Setting, number: int) -> None:
        super().__init__(setting, number)
        self.model = cast("TweedieNMF", setting.model)
        self.rule: Any = dispersion_rule(self.model, setting.data, setting.sampler.dispersion)
        self.hyper = Hyperparameters(1.0, 1.0, 1.0)
        self.normalizer = 0.0
        self.log_hyper = self.effective = 0.0
        self.gauge: list[float] | None = None
        """Half the log of ΣW_k / ΣH_k at the scale that the metric is of, (K,)."""
        self.floor = mean_floor(setting.data, setting.model.likelihood)
        self.fits: tuple[float, float] | None = None
        """Minus the divergence at the start, and where the chain is now."""
        self.climb = (0, 0.0)
        """Iterations of an automatic warm start, and how fast the density rose at its end."""

    def start(self, on_step: OnStep | None = None, first: Chain | None = None) -> None:
        """Start from multiplicative updates, balanced, with the metric there.

        The run's first chain decides for all whether counts are Poisson.
        """
        setting = self.setting
        data, model, executor = setting.data, self.model, setting.executor
        if isinstance(first, TweedieChain):
            self.rule.fixed, self.rule.settled = first.rule.fixed, first.rule.settled
        state = start_state(data, model, setting.options.seed, self.number)
        passes = setting.warm_passes
        if passes[1]:
            free = model.without_spikes()
            found = climb(data, free, state, executor, self.rule, passes, on_step)
            fit = found.point.fit
            if setting.sampler.warm_start == "auto":
                self.climb = found.iterations, found.rise
        else:
            fit, _ = self.rule.look(executor, state, self.floor)
        self.fits = fit.negative_divergence, fit.negative_divergence
        estimate = self.rule.estimate(fit)
        self.rule.settle(estimate)
        self.hyper = model.resolve(data.mean, self.rule.fixed or estimate)
        balance(state, model.frozen)
        if model.shares_rates and model.fixed == (None, None):
            even_out(state)
        if setting.temperature is not None:
            self._heat(state)
        prepare_state(state, setting.sampler.arrays)
        self.tracks = [TrackRun.of(setting.sampler.tracks[0], setting, state)]
        if "metric" in setting.sampler.arrays:
            for _, band, denominator in self._denominators(state):
                band.arrays["curvature"][:] = denominator
                band.counts["curvature"] = 1
        if model.learnt:
            self._draw_priors(self.tracks[0], 0)
        if setting.sampler.rescales:
            self._rescale(self.tracks[0])
        self._follow_dispersion()

    def _heat(self, state: ChainState) -> None:
        """Take a state from the mode of the posterior to the bulk of p(V | W, H)^t p(W, H).

        Entries are drawn from Gamma(t θ num / φ + a, t den / φ + λ), in which numerator and
        denominator are those of the multiplicative update: the prior at t = 0, and with one
        component and β = 1 the full conditional at every t.
        """
        setting, law, phi = self.setting, self.law, self.tempered.dispersion
        rng = generator(setting.options.seed, self.number, Stream.TEMPERATURE)
        for factor, side in HEATING * [(0, "rows"), (1, "columns")]:
            rate, shape = self.tempered.prior(factor)
            found = shares(setting.executor, setting.data, state, side, law, self.floor)
            for band, own in zip((state.rows, state.cols)[factor], found, strict=True):
                num, den = (np.maximum(each.astype(np.float64), 0.0) / phi for each in own)
                drawn = rng.standard_gamma(band.values * num + shape) / (den + rate)
                with held(band.values, self.model.frozen[factor]):
                    band.values[:] = np.maximum(drawn, np.finfo(band.values.dtype).tiny)

    def _denominators(self, state: ChainState) -> Iterator[tuple[int, FactorBand, Array]]:
        """Give the multiplicative update's denominators, with their factor and band."""
        setting, law = self.setting, self.law
        for factor, side in enumerate(("rows", "columns")):
            found = shares(setting.executor, setting.data, state, side, law, self.floor)
            for band, (_, denominator) in zip((state.rows, state.cols)[factor], found, strict=True):
                yield factor, band, denominator

    def _follow_dispersion(self) -> None:
        """Recompute what depends on the dispersion: the metric, and the normaliser if it is known.

        Where it would cost a series per entry log-likelihoods are relative ones.
        """
        self._refresh_metrics()
        self.normalizer = self.rule.normalizer(self.setting.executor, self.hyper.dispersion)

    def _refresh_metrics(self) -> None:
        if "metric" in self.setting.sampler.arrays:
            for run in self.tracks:
                refresh_metric(run.state, self.tempered, self.model.frozen)

    # -- what is drawn of scales and priors ------------------------------------

    def _between(self, run: TrackRun, start: int) -> None:
        super()._between(run, start)
        if self.setting.sampler.rescales and run.cycle % self.setting.learns_every == 0:
            self._rescale(run)

    def _rescale(self, run: TrackRun) -> None:
        """Draw how W and H share the scale of every component that moves in both.

        W_k → c_k W_k and H_k → H_k / c_k with c_k from its conditional. The metric is taken to
        where the chain now is, with what the chain has drifted since the last time, lest that add
        up in the metric. Draws that were recorded stay as they are.
        """
        K, state = self.model.n_components, run.state
        sides, totals = (state.rows, state.cols), []
        for factor, bands in enumerate(sides):
            parts = (band_prior(band, self.hyper, factor)[0] * band.values for band in bands)
            totals.append(np.sum([part.sum(axis=0, dtype=np.float64) for part in parts], axis=0))
        free = (totals[0] > 0) & (totals[1] > 0)
        for mask in self.model.frozen:
            free &= True if mask is None else ~mask
        shapes = self.hyper.shape_w, self.hyper.shape_h
        rows, columns = self.setting.data.shape
        uniform = generator(self.setting.options.seed, self.number, Stream.SCALE, run.cycle).random(
            K
        )
        scale = np.ones(K)
        taken = totals[0][free], totals[1][free], uniform[free]
        scale[free] = draw_scales(shapes[0] * rows - shapes[1] * columns, *taken)
        here = np.zeros(K)
        here[free] = 0.5 * np.log(np.divide(*(own[free] for own in column_sums(state))))
        begun = here if self.gauge is None else np.array(self.gauge)
        self.gauge = (here + np.log(scale)).tolist()
        metric = np.where(free, np.exp(self.gauge - begun), 1.0)
        moves = (scale, metric), (1.0 / scale, 1.0 / metric)
        for factor, (bands, (move, own)) in enumerate(zip(sides, moves, strict=True)):
            for band in bands:
                band.values *= move.astype(band.values.dtype)
                rate = np.asarray(band_prior(band, self.hyper, factor)[0], band.values.dtype)
                for name, rest in (("curvature", 0.0), ("metric", rate)):
                    if name in band.arrays:
                        band.arrays[name][:] = (band.arrays[name] - rest) / own + rest

    def _learn(self, run: TrackRun) -> None:
        self._draw_priors(run, run.cycle)
        if self.rule.drawn and len(self.tracks) == 1:
            address = self.setting.options.seed, self.number, Stream.HYPER, run.cycle, 1
            place, rng = (self.setting.executor, run.state, self.floor), generator(*address)
            drawn = self.rule.draw(*place, self.hyper.dispersion, rng)
            self.hyper = self.hyper._replace(dispersion=drawn)
            self._follow_dispersion()
        else:
            self._refresh_metrics()

    def _draw_priors(self, run: TrackRun, cycle: int) -> None:
        """Draw shapes and rates of the priors from their conditionals, given a state."""
        model, mean, hyper = self.model, self.setting.data.mean, self.hyper
        rng = generator(self.setting.options.seed, self.number, Stream.HYPER, cycle)
        totals = totals_of(model, run.state)
        shapes = hyper.shape_w, hyper.shape_h
        shapes = model.draw_shapes(mean, shapes, totals, rng)
        drawn = model.draw_rates(mean, shapes, totals, rng)
        rates: list[Any] = list(model.rates_under(mean, shapes))
        for factor, bands in enumerate((run.state.rows, run.state.cols)):
            own = drawn[factor]
            if own is None:
                continue
            if model.rates_of[factor] == "component":
                rates[factor] = tuple(map(float, own))
                continue
            for band in bands:
                here = slice(band.offset, band.offset + len(band.values))
                band.arrays[RATE] = own[here, None].copy()
        self.hyper = Hyperparameters(hyper.dispersion, rates[0], rates[1], *shapes)
        self.log_hyper = model.log_hyperprior(mean, shapes, drawn)
        if model.shares_rates:
            about = hyper.dispersion, mean, self.setting.data.total_mass
            self.effective = model.effective_components(totals, *about)

    def learnt(self, run: TrackRun) -> Arrays:
        found: Arrays = {}
        for own in self.model.learnt:
            if own.dims in (("row",), ("column",)):
                side = "rows" if own.dims == ("row",) else "columns"
                values = run.state.gather(side, RATE)[:, 0]
                found[own.name] = in_callers_order(self.setting.data, side, values)
            elif own is EFFECTIVE:
                found[own.name] = np.asarray(self.effective)
            else:
                name = "rate_w" if own.name == "rate" else own.name
                found[own.name] = np.asarray(getattr(self.hyper, name))
        return found

    def _prior_constant(self) -> float:
        return self.log_hyper - (self.hyper.dispersion if self.rule.drawn else 0.0)

    def attrs(self) -> dict[str, float]:
        """Return hyperparameters; of those that are learnt the draws tell."""
        given = self.hyper._asdict()
        learnt = {own.name for own in self.model.learnt} - {"dispersion"}
        if self.rule.drawn:
            given["dispersion"] = self.mean_dispersion
        if learnt:  # rates that are chosen may follow shapes that are learnt
            names = ("rate_w", "rate_h")
            learnt |= {name for name in names if isinstance(getattr(self.model, name), str)}
        return {name: value for name, value in given.items() if name not in learnt}

    def memory(self) -> dict[str, Any]:
        return {
            "hyper": list(self.hyper),
            "log_hyper": self.log_hyper,
            "effective": self.effective,
            "fixed": self.rule.fixed,
            "normalizer": self.normalizer,
            "fits": self.fits,
            "climb": self.climb,
            "gauge": self.gauge,
            "noise": [self.noise_sum, self.noise_draws],
        }

    def recall(self, memory: dict[str, Any]) -> None:
        values: Any = [tuple(own) if isinstance(own, list) else own for own in memory["hyper"]]
        self.hyper = Hyperparameters(*values)
        self.log_hyper = memory.get("log_hyper", 0.0)  # runs of older versions have none
        self.effective = memory.get("effective", 0.0)
        self.rule.fixed = memory["fixed"]
        self.normalizer = memory["normalizer"]
        self.noise_sum, self.noise_draws = memory.get("noise", (0.0, 0))
        fits = memory.get("fits")  # runs of older versions have neither
        self.fits = None if fits is None else (fits[0], fits[1])
        self.gauge = memory.get("gauge")
        iterations, rise = memory.get("climb", self.climb)
        self.climb = iterations, rise

    def warnings(self) -> tuple[str | None, str | None]:
        of_model = of_sampler = None
        phi, K = self.hyper.dispersion, self.model.n_components
        behind = self.climb[1] > FAR  # and then the dispersion may yet come down
        if self.rule.counts and self.rule.fixed is None and not behind:
            components = "1 component gives" if K == 1 else f"{K} components give"
            cause = (
                "they need more components, or are no Poisson counts; compare with a larger "
                "n_components and with NegativeBinomialNMF"
                if phi > 1
                # More components could only fit them more closely.
                else "they are no Poisson counts, as counts without their zeros are not, or have "
                "too many components; compare with a smaller n_components"
            )
            of_model = (
                f"around the means that {components} them, the counts vary {phi:.3g} times as much "
                f"as Poisson counts, and the dispersion was set to that: {cause}, or pass "
                "dispersion=1.0 for Poisson counts all the same"
            )
        begun, now = self.fits or (0.0, 0.0)
        phi = self.model.at(self.hyper)[1].dispersion
        fall = (begun - now) / phi / (sum(self.setting.data.shape) * K)
        if fall > FALL and self.setting.warm_passes[1]:
            of_sampler = (
                f"the log-likelihood is {fall:.1f} nats per parameter below that of the start, "
                "where a posterior would be less than one: the step is too large for data as "
                "informative as these, and the draws are spread too widely; choose a smaller step "
                'or fewer blocks, or use PSGLD(transition="cir") or LangevinDynamics()'
            )
        elif behind:
            of_sampler = (
                f"the warm start ended after {self.climb[0]} passes, its limit for data of this "
                f"size, while the log density still rose by {self.climb[1]:.2g} nats per parameter "
                "in 20 of them: draws may not have come as far as the posterior; pass a sampler "
                f"with warm_start={10 * self.climb[0]}, or a larger tune"
            )
        return of_model, of_sampler

    @property
    def law(self) -> Likelihood:
        return self.model.at(self.hyper)[0]

    @property
    def tempered(self) -> Hyperparameters:
        """Return hyperparameters of p(V | W, H)^t p(W, H), φ / t for the dispersion."""
        power = 1.0 if self.setting.temperature is None else self.setting.temperature
        _, divided = self.model.at(self.hyper)
        return divided._replace(dispersion=divided.dispersion / power)

    def _ran_away(self, run: TrackRun) -> bool:
        data, (rows, cols) = self.setting.data, column_sums(run.state)
        average = float(rows @ cols) / (data.shape[0] * data.shape[1])
        size = max(typical_value(data), abs(data.maximum), abs(data.minimum))
        return bool(average > RUNAWAY * size)

    def _adapt(self, end: int) -> None:
        """Estimate the dispersion anew while tuning; free what is for tuning alone after it."""
        fine = self.tracks[0]
        if self.fits is not None and fine.fits:
            latest = fine.fits[max(fine.fits)].negative_divergence
            self.fits = self.fits[0], latest
        if end <= self.setting.frozen_from and self.rule.fixed is None and not self.rule.drawn:
            estimate = self.rule.estimate(fine.fits[fine.cycle - 1], at_point=False)
            self.hyper = self.hyper._replace(dispersion=estimate)
            self._follow_dispersion()
        if end >= self.setting.options.tune:
            for band in (band for run in self.tracks for band in run.state.bands()):
                for name in TUNING if not self.model.learnt else TUNING[1:]:
                    band.arrays.pop(name, None)  # rates that move take the metric with them

    @property
    def estimate(self) -> float | None:
        tuning = self.cycle <= self.setting.frozen_from
        estimated = self.rule.fixed is None and not self.rule.drawn
        return self.hyper.dispersion if tuning and estimated else None

    def take_dispersion(self, dispersion: float) -> None:
        if dispersion != self.hyper.dispersion:
            self.hyper = self.hyper._replace(dispersion=dispersion)
            self._follow_dispersion()

    def _lp(self, fit: Fit) -> float:
        return fit.negative_divergence / self.model.at(self.hyper)[1].dispersion + self.normalizer
