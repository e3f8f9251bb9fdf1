"""One chain of a run: segments, the way back after a divergence, and what each leaves behind."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import DivergenceError
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.executors.state import ChainState, FactorBand, Piece, checkpoint_name, place_cells
from daskfactor.inference.bands import drop_arrays, is_finite
from daskfactor.inference.base import Track
from daskfactor.inference.gamma_parameters import gamma_parameters
from daskfactor.inference.multiplicative import OnStep
from daskfactor.inference.normal_parameters import normal_parameters
from daskfactor.inference.parameters import LINKS, SIDES, Values, View, stored_hyper
from daskfactor.inference.passes import Place, SharePass, every, init_band, run_pass
from daskfactor.inference.program import STEPS, Fit, Program, refresh_metric, take_fits
from daskfactor.inference.setting import Setting, in_callers_order
from daskfactor.inference.starts import FAR
from daskfactor.inference.steps import StepSize
from daskfactor.models.gamma_factors import GammaFactors
from daskfactor.models.likelihood import Likelihood
from daskfactor.random import Stream, generator, noise_key
from daskfactor.runs.files import Checkpoints, Late
from daskfactor.runs.run_writer import Sink
from daskfactor.runs.schema import COLUMN, FEATURES, MOMENTS, MONITOR, ROW, Kind, Variable
from daskfactor.runs.trace import extrapolated_moments

Array = NDArray[Any]
Arrays = dict[str, Array]
OnShare = Callable[[float], None]

FACTORS = ("W", -2), ("H", -1)
"""Factors as results have them, and the axis of their rows and columns."""
MOST_REDUCTIONS = 20
ADAPT_EVERY = 5
FIRST: Values = {"climb": (0, 0.0), "effective": 0.0, "fits": None, "log_hyper": 0.0, "looks": []}
FIRST |= {"normalizer": 0.0, "variations": {}, "dispersion_sum": (0.0, 0)}
"""Values at first: iterations of an automatic warm start, and how fast the density rose at its end;
effective components; minus divergences at the start and now; log prior density of what is learnt;
estimates of the dispersion while tuning; what fits leave out of the log-likelihood; variation of
counts as a multiple of that of Poisson counts, where not once; the sum of the dispersion over the
draws, and how many these are."""
FALL = 3.0
"""Nats per parameter below its start at which a chain no longer samples the posterior.

A posterior lies about half a nat per parameter below its mode.
"""
DRAWS_AT_ONCE = 2**23
"""Bytes of draws that are copied at a time on their way to the results."""


def stacked(state: ChainState, factor: int) -> list[int]:
    """Return the factors of a state that results hold as W (0), or as H (1): all others."""
    return [0] if factor == 0 else list(range(1, state.n_factors))


def gather_side(
    state: ChainState, data: BlockedData, factor: int, name: str | None = None
) -> Array:
    """Bring W (0) or Hᵀ (1), or one of their arrays, to the caller, in the caller's order."""
    parts = [state.gather(n, name) for n in stacked(state, factor)]
    values = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return in_callers_order(data, SIDES[factor], values)


def learnt_variables(setting: Setting) -> tuple[Variable, ...]:
    """Declare what the model learns; what grows with the data only where draws are kept.

    Means of links are always there.
    """
    keeps_draws, names = setting.options.keep_every, {"row": ROW, "column": COLUMN}
    variables = []
    for name, axes, doc, averaged, _ in setting.model.learnt:
        dims, linked = [names.get(dim, dim) for dim in axes], bool(set(axes) & set(FEATURES))
        kind: Kind = "factor" if linked else "real"
        if keeps_draws or not (linked or names.keys() & set(axes)):
            variables.append(Variable("posterior", name, ("chain", "draw", *dims), kind, doc))
        if linked or averaged:
            doc = f"mean over cycles: {doc}"
            variables.append(Variable(MOMENTS, f"{name}_mean", ("chain", *dims), kind, doc))
    return tuple(variables)


class TrackRun:
    """One track's state and what it has produced in the running segment.

    ``options`` are the run's in the track's own cycles and draws.
    """

    def __init__(self, track: Track, setting: Setting, state: ChainState, cycle: int = 0) -> None:
        self.track, self.state, self.cycle = track, state, cycle
        draws, tune = setting.options.draws // track.stride, setting.options.tune // track.stride
        self.options = replace(setting.options, draws=draws, tune=tune)
        self.fits = dict[int, Fit]()
        self.densities = dict[int, float]()
        self.learnt = dict[int, Arrays]()

    def forget(self) -> None:
        """Drop the segment's draws and fits, once they are written."""
        self.state.clear_records()
        self.fits.clear()
        self.densities.clear()
        self.learnt.clear()

    def gather_cells(self, name: str) -> Array:
        """Return means or sums of squares of the monitored cells, in the caller's order."""
        parts = list(self.state.cells.values())
        out = np.empty(sum(part.where.size for part in parts), parts[0].mean.dtype)
        for part in parts:
            out[part.where] = getattr(part, name)
        return out

    @property
    def cell_count(self) -> int | None:
        """Draws in the monitored cells' moments; None before they are watched."""
        return next((part.count for part in self.state.cells.values()), None)

    def snapshot(self, checkpoints: Checkpoints, chain: int) -> tuple[Late, dict[str, Any]]:
        """Return what a chain's track needs to go on: arrays, put together late, JSON values.

        Bands may be saved where they are, for the next of the ``checkpoints``.
        """
        prefix, state = f"{chain}/{self.track.name}", self.state
        arrays = state.save(checkpoints, prefix)
        for name in ("mean", "m2") if state.cells else ():
            arrays[f"{prefix}/cells/{name}"] = partial(self.gather_cells, name)
        names = [sorted(state.names(factor)) for factor in range(state.n_factors)]
        meta = {"name": self.track.name, "cycle": self.cycle, "cell_count": self.cell_count}
        return arrays, meta | {"counts": state.counts, "arrays": names}

    @classmethod
    def restore(cls, chain: "Chain", arrays: Mapping[str, Array], meta: dict[str, Any]) -> Self:
        """Make the track of a chain that a snapshot holds."""
        setting, name = chain.setting, f"{chain.number}/{meta['name']}"
        data, grid = setting.data, setting.data.grid
        offsets = tuple(side.offsets for side in grid.sides)
        band = partial(saved_band, arrays, name, meta, offsets)
        shared, factors = getattr(arrays, "shared", False), len(grid.sides)
        state = setting.executor.state_from_bands(grid.blocks, band, shared, factors)
        cells = setting.placed_cells
        if cells is not None and meta["cell_count"] is not None:
            placed = place_cells(grid, cells, data.dtype)
            mean, m2 = (arrays[f"{name}/cells/{kind}"] for kind in ("mean", "m2"))
            for block in placed.values():
                block.mean[:], block.m2[:] = mean[block.where], m2[block.where]
                block.count = meta["cell_count"]
            state.cells = placed  # complete: they may go to workers from here
        (track,) = (track for track in setting.sampler.tracks if track.name == meta["name"])
        return cls(track, setting, state, meta["cycle"])


def saved_band(
    arrays: Mapping[str, Array], name: str, meta: Any, offsets: Any, factor: int, number: int
) -> FactorBand:
    """Read a band of a track from what `TrackRun.snapshot` gave."""
    names = ("", *meta["arrays"][factor])
    named = {array: arrays[checkpoint_name(name, factor, number, array)] for array in names}
    return FactorBand(offsets[factor][number], named.pop(""), named, dict(meta["counts"]))


def check_saved(
    arrays: Mapping[str, Array], chains: Sequence[dict[str, Any]], tracks: Sequence[Track]
) -> None:
    """Raise KeyError if chains were saved otherwise than band by band, as before 0.2.0.

    ValueError if they are of another sampler.
    """
    names = [track.name for track in tracks]  # coarse ones begin after the fine one
    saved = [[track["name"] for track in chain["tracks"]] for chain in chains]
    if any(tracks_of_chain != names[: len(tracks_of_chain)] for tracks_of_chain in saved):
        raise ValueError(f"chains without the tracks {', '.join(names)}")
    pairs = ((n, track["name"]) for n, chain in enumerate(chains) for track in chain["tracks"])
    if missing := {checkpoint_name(f"{n}/{name}", 0, 0, "") for n, name in pairs} - set(arrays):
        raise KeyError(min(missing))


def half_step(base: StepSize, iteration: int) -> float:
    """Return a fine chain's step: half of the coarse chain's step at the same time."""
    return 0.5 * base(iteration // 2)


def sum_log_steps(band: FactorBand) -> tuple[float, int]:
    """Add up the logarithms of the steps of a band's rows; with how many these are."""
    return float(band.arrays[STEPS][:, 1].sum()), len(band.values)


class Chain:
    """A chain on its way through a run's segments.

    Attributes
    ----------
    parameters
        What is learnt between segments, in the order of the draws.
    dispersion
        The one of these that the likelihood depends on.
    values
        Values of the parameters, their means over the draws (``NAME_mean``), and what else a
        checkpoint keeps; replaced, never changed.
    floor
        Smallest mean μ that gradients are taken at.
    """

    def __init__(self, setting: Setting, number: int) -> None:
        self.setting, self.number, self.model = setting, number, cast("Any", setting.model)
        self.shrink = 1.0
        self.divergences: list[int] = []
        self.tracks: list[TrackRun] = []
        self.values = FIRST
        make: Any = gamma_parameters if self.model.nonnegative else normal_parameters
        self.dispersion, self.parameters = make(setting)
        self.floor: float = self.dispersion.floor
        self.variables = self.model.learnt

    @property
    def hyper(self) -> Any:
        """The present hyperparameters."""
        return self.dispersion.hyper(self.values)

    @property
    def law(self) -> Likelihood:
        """The law of an entry at the present hyperparameters."""
        law: Likelihood = self.model.at(self.hyper)[0]
        return law

    def start(self, on_step: OnStep | None = None, first: "Chain | None" = None) -> None:
        """Set the first track's state near a mode; ``first`` is the run's first chain."""
        setting, first_dispersion = self.setting, (first or self).dispersion
        state, values, fit = self.dispersion.start(self.number, first_dispersion, on_step)
        self.values = self.values | values
        for parameter in self.parameters:
            self.values = self.values | parameter.initial(self.values)
        self.tracks = [TrackRun(setting.sampler.tracks[0], setting, state)]
        self.update(state, 0, fit)
        kernel, adapted = setting.kernel, ("adapt", "adapted")
        names = tuple(name for name, spec in kernel.arrays.items() if spec.changes in adapted)
        if names:  # begin what the kernel learns, by denominators of the multiplicative update
            tempered = setting.temperature is not None
            how: Any = {"kernel": kernel, "hyper": setting.tempered(self.hyper)}
            finish = partial(init_band, tempered=tempered, **how)
            program = SharePass(self.law, self.floor, every(state), (), names, finish)
            run_pass(Place(setting.executor, setting.data, state, self.floor), program)
        self._refresh_metrics()
        self.values = self.dispersion.normalized(self.values)

    def update(self, state: ChainState, cycle: int, fit: Fit | None = None) -> None:
        """Update the parameters, given the state that a track has come to."""
        address = self.setting.options.seed, self.number
        rng, tuning = generator(*address, Stream.HYPER, cycle), cycle <= self.setting.frozen_from
        view = View(address, state, cycle, fit, cycle > 0 and tuning, len(self.tracks) == 1, rng)
        for parameter in self.parameters:
            if parameter.due(view):
                self.values = self.values | parameter.update(view, self.values)

    def attrs(self) -> dict[str, Any]:
        """Return hyperparameters under the names that results use, for predictions by means."""
        total, draws = self.values["dispersion_sum"]
        mean = (np.asarray(total) / draws).tolist() if draws else self.hyper.dispersion
        attrs, values = {"dispersion": mean}, self.values | {"mean_dispersion": mean}
        for parameter in self.parameters:
            attrs |= parameter.attrs(values)
        return attrs

    def learnt(self, run: TrackRun) -> Arrays:
        """Return the present values of what the model learns, by name."""
        if not self.variables:
            return {}
        values = dict(self.values)
        for parameter in self.parameters:
            values |= parameter.results(run.state, self.values)
        names = (variable.name for variable in self.variables)
        return {name: np.asarray(values[name]) for name in names}

    def memory(self) -> dict[str, Any]:
        """Return JSON values and arrays that a checkpoint keeps besides the state."""
        hyper = self.hyper._asdict()
        rest = {name: value for name, value in self.values.items() if name not in hyper}
        return {"hyper": hyper, **rest}

    def recall(self, memory: dict[str, Any]) -> None:
        """Take over what `memory` gave."""
        rest = dict(memory)
        hyper = stored_hyper(self.model, rest.pop("hyper"))
        if "noise" in rest:  # the name that older versions have for it
            rest["dispersion_sum"] = rest.pop("noise")
        if "priors" in rest:
            rest["priors"] = stored_hyper(self.model, rest["priors"])
        self.values = FIRST | rest | hyper
        self.dispersion.recall(self.values)

    def _between(self, run: TrackRun, start: int) -> None:
        """Learn from a track's cycles since ``start``; a divergence takes it back."""
        options, (total, before) = self.setting.options, self.values["dispersion_sum"]
        draws = options.draws_after(run.cycle) - options.draws_after(start)
        total = np.asarray(total) + draws * np.asarray(self.hyper.dispersion)
        self.values = self.values | {"dispersion_sum": (total.tolist(), before + draws)}
        fit = run.fits[run.cycle - 1]  # where it is not finite the segment is run again
        # A segment's end must leave no trace in the draws.
        if run.cycle % self.setting.learns_every == 0 and math.isfinite(fit.negative_divergence):
            self.update(run.state, run.cycle, fit)
            if self.variables:
                self._refresh_metrics()

    def _refresh_metrics(self) -> None:
        """Recompute the metric, which depends on the hyperparameters."""
        if "metric" in self.setting.kernel.arrays:
            for run in self.tracks:
                hyper = self.setting.tempered(self.hyper)
                refresh_metric(run.state, hyper, self.model.frozen)

    def _adapt(self, end: int) -> None:
        """Estimate the dispersion anew while tuning; free what is for tuning alone after it."""
        fine, arrays = self.tracks[0], self.setting.kernel.arrays.items()
        if self.values["fits"] is not None and fine.fits:
            latest = fine.fits[max(fine.fits)].negative_divergence
            self.values = self.values | {"fits": (self.values["fits"][0], latest)}
        look = self.dispersion.look(fine.state, fine.fits[fine.cycle - 1], end, self.values)
        self.values = self.values | look
        if end >= self.setting.options.tune:
            # Rates that move take the metric with them.
            required = {"curvature"} if self.variables else set()
            names = [n for n, spec in arrays if spec.life == "tune" and n not in required]
            for run in self.tracks:
                run.state.each(partial(drop_arrays, names=names))

    def take_dispersion(self, estimates: Sequence[Any]) -> None:
        """Take what the estimates of all chains of a run say, in place of the chain's own."""
        before = self.values["dispersion"]
        self.values = self.values | self.dispersion.take(estimates, self.values)
        if self.values["dispersion"] != before:
            self._refresh_metrics()

    def warnings(self) -> tuple[str | None, str | None]:
        """Tell what the user should know of data and model, and of the sampler, at the end."""
        of_model = of_sampler = None
        climbed, K = self.values["climb"], self.model.n_components
        behind = climbed[1] > FAR  # and then the dispersion may yet come down
        if self.values["variations"] and not behind:
            of_model = variation_text(self.values["variations"], self.model)
        earlier, latest = self.values["fits"] or (0.0, 0.0)
        phi = self.model.at(self.hyper)[1].dispersion
        fall = (earlier - latest) / phi / (sum(self.setting.data.shape) * K)
        sampler = self.setting.sampler
        # Exact draws take no step too far, and fits under different laws say nothing.
        steps = self.values["fits"] and self.dispersion.rule.divides and sampler.biased
        if fall > FALL and self.setting.warm_passes[1] and steps:
            of_sampler = (
                f"the log-likelihood is {fall:.1f} nats per parameter below that of the start, "
                "where a posterior would be less than one: the step is too large for data as "
                "informative as these, and the draws are spread too widely; choose a smaller step "
                "or fewer blocks, or use BlockHMC() or LangevinDynamics()"
            )
        elif behind:
            of_sampler = (
                f"the warm start ended after {climbed[0]} passes, its limit for data of this "
                f"size, while the log density still rose by {climbed[1]:.2g} nats per parameter "
                "in 20 of them: draws may not have come as far as the posterior; pass "
                f"{sampler.name}(warm_start={10 * climbed[0]}) as sampler, or a larger tune"
            )
        return of_model, of_sampler

    def statistics(self, cycles: list[int]) -> dict[str, Array]:
        """Return the kernel's own statistics of cycles of the running segment: means over rows."""
        state, rows, means = self.tracks[0].state, sum(self.setting.data.shape), dict[str, Array]()
        for variable in self.setting.kernel.statistics:
            totals = [math.fsum(state.sums((cycle, variable.name))) for cycle in cycles]
            means[variable.name] = np.array(totals) / rows
        return means

    # -- segments ------------------------------------------------------------

    def advance(self, end: int, on_share: OnShare | None = None) -> None:
        """Run all tracks to fine cycle ``end``; on divergence go back and halve the step.

        ``on_share`` is told which share of the segment is done.
        """
        self._prepare_segment()
        memory = self.memory()
        before = [(run.cycle, run.state.copy()) for run in self.tracks]
        before_cycles = sum(cycle for cycle, _ in before)
        total = sum(end // run.track.stride for run in self.tracks) - before_cycles

        def tell(ahead: float) -> None:
            """Report progress, ``ahead`` cycles of the running plan included."""
            if on_share is not None:
                on_share((sum(run.cycle for run in self.tracks) + ahead - before_cycles) / total)

        for _ in range(MOST_REDUCTIONS):
            for run in self.tracks:
                self._run_segment(run, end // run.track.stride, tell)
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
        for run in self.tracks:
            run.state = setting.executor.distribute(run.state)
        for track in setting.sampler.tracks[len(self.tracks) :]:
            fine = self.tracks[0]
            if fine.cycle >= setting.split:
                state, cycle = fine.state.copy(), fine.cycle // track.stride
                self.tracks.append(TrackRun(track, setting, state, cycle))
        cells, data = setting.placed_cells, setting.data
        if self.tracks[0].cycle == setting.options.tune and cells is not None:
            for run in self.tracks:
                run.state.cells = place_cells(data.grid, cells, data.dtype)

    def _run_segment(self, run: TrackRun, end: int, tell: OnShare) -> None:
        every = self.setting.learns_every
        for stop in (*range(run.cycle - run.cycle % every + every, end, every), end):
            start = run.cycle
            self._run_cycles(run, stop, tell)
            self._between(run, start)

    def _run_cycles(self, run: TrackRun, end: int, tell: OnShare) -> None:
        setting, cycles = self.setting, end - run.cycle
        stream = Stream.COARSE_SCHEDULE if run.track.stride > 1 else Stream.SCHEDULE
        rng = partial(generator, setting.options.seed, self.number, stream)
        order, cycle_options = setting.kernel.schedule, partial(self._cycle_options, run, end)
        plan = build_plan(order, setting.data.n_observed, range(run.cycle, end), rng, cycle_options)
        operations = sum(len(part.ops) for part in plan)
        work = plan, self.program(run.track), run.state, setting.data
        run.state = setting.executor.run(*work, lambda done: tell(cycles * done / operations))
        run.cycle = end
        learnt, state, values = self.learnt(run), self.tracks[0].state, self.values
        constant = sum(parameter.log_prior(state, values) for parameter in self.parameters)
        for cycle, fit in take_fits(run.state).items():
            self._note(run, cycle, fit, learnt, constant)

    def _note(self, run: TrackRun, cycle: int, fit: Fit, learnt: Arrays, constant: float) -> None:
        """Keep a cycle's fit, what is learnt, and log p(V | W, H) + log p(W, H) of what moves."""
        run.learnt[cycle] = learnt
        prior = math.fsum(run.state.sums(cycle))
        run.fits[cycle] = fit
        run.densities[cycle] = self._lp(fit) + (constant + prior)
        draw = run.options.draw_index(cycle)
        if draw is None:
            return
        averaged = {name: self.values[name] for name in LINKS if name in self.values}
        averaged |= {o.name: learnt[o.name] for o in self.variables if o.averaged}
        for name, value in averaged.items():  # the same bits wherever a segment ends
            before = self.values.get(f"{name}_mean", np.zeros_like(value))
            mean = before + (value - before) / (draw + 1)
            self.values = self.values | {f"{name}_mean": mean}

    def program(self, track: Track) -> Program:
        """Make the block operations of one track at the present hyperparameters."""
        setting, hyper = self.setting, self.setting.tempered(self.hyper)
        one, other = map(int, noise_key(setting.options.seed, self.number))
        fixed = setting.kernel, self.law, self.floor, hyper, (one, other), setting.model.frozen
        return Program(*fixed, self.step_for(track), self.shrink, track.stride > 1)

    def step_for(self, track: Track) -> StepSize:
        """Return the step of one track."""
        step = self.setting.kernel.step_size
        return partial(half_step, step) if track.stride < self.setting.stride else step

    def step_sizes(self, run: TrackRun, cycles: list[int]) -> Array:
        """Return the last step of every cycle, reductions included.

        The geometric mean, where rows have steps of their own.
        """
        kernel = self.setting.kernel
        if STEPS in kernel.arrays:
            step: Any = kernel.options.step
            if step == "auto":
                logs, rows = zip(*run.state.each(sum_log_steps), strict=True)
                step = math.exp(math.fsum(logs) / sum(rows))
            return np.full(len(cycles), float(step * self.shrink))
        moves = kernel.work.moves
        step = self.step_for(run.track)
        return np.array([float(step((cycle + 1) * moves - 1)) * self.shrink for cycle in cycles])

    def _cycle_options(self, run: TrackRun, end: int, cycle: int) -> CycleOptions:
        options, fine = run.options, cycle * run.track.stride
        drawn = options.draw_index(cycle) is not None
        adapts = fine < self.setting.frozen_from and cycle % ADAPT_EVERY == 0
        if self.setting.kernel.adapts_always:
            adapts = cycle < options.tune
        keep = bool(options.keep_every) and options.place(cycle) is not None
        last = cycle == end - 1
        return CycleOptions(adapt=adapts, record=drawn, keep=keep, evaluate=drawn or last)

    def _is_sound(self, run: TrackRun) -> bool:
        """Tell whether all entries are finite and the fit has not run away."""
        fits = run.fits.values()
        finite = all(np.isfinite(fit.negative_divergence) for fit in fits)
        sound = finite and all(run.state.each(is_finite))
        return sound and not self.dispersion.has_diverged(fits, run.state, self.values)

    def _lp(self, fit: Fit) -> float:
        """Return the log-likelihood, from a fit's sums."""
        return float(self.dispersion.log_likelihood(fit, self.values))

    # -- what a segment gave ---------------------------------------------------

    def log_likelihood(self) -> float:
        """Return the log-likelihood of the latest evaluated state."""
        fine = self.tracks[0]
        return self._lp(fine.fits[max(fine.fits)]) if fine.fits else math.nan

    def forget(self) -> None:
        """Drop the segment's draws and fits, once they are written."""
        for run in self.tracks:
            run.forget()

    def write(self, sink: Sink, end: int, moments: bool = True) -> None:
        """Write draws and statistics of the segment that ended at ``end``, and all ``moments``."""
        fine, setting = self.tracks[0], self.setting
        tuning = end <= setting.options.tune
        cycles = [cycle for cycle in sorted(fine.fits) if fine.options.place(cycle) is not None]
        cycles = [end - 1] if tuning else cycles
        densities = np.array([fine.densities[cycle] for cycle in cycles])
        stats = {"lp": densities, "step_size": self.step_sizes(fine, cycles)}
        if tuning:
            sink.write_stats(self.number, setting.ends.index(end), stats, "warmup_sample_stats")
            return
        if cycles:
            span = fine.options.thin * fine.options.spacing
            # A draw is marked if it is the first after a roll-back.
            marks = [any(n - span < start <= n for start in self.divergences) for n in cycles]
            stats |= {"diverging": np.array(marks), **self.statistics(cycles)}
            place = cast("int", fine.options.place(cycles[0]))
            sink.write_stats(self.number, place, stats)
            names = [each.name for each in learnt_variables(setting) if each.group == "posterior"]
            values = {name: np.stack([fine.learnt[n][name] for n in cycles]) for name in names}
            sink.write_stats(self.number, place, values, "posterior")
        for run in self.tracks:
            self._write_draws(sink, run)
        if moments:
            self._write_moments(sink)

    def _write_draws(self, sink: Sink, run: TrackRun) -> None:
        options, data, state = run.options, self.setting.data, run.state
        count = state.recorded
        if not count:
            return
        recorded = options.draws_after(run.cycle) // options.keep_every
        for factor, (name, axis) in enumerate(FACTORS):
            path = f"{run.track.group}/{name}"
            in_parts = next(sink.parts(path, axis)).stop < data.shape[factor]
            if in_parts and state.n_factors == 2:
                pieces = (
                    self._pieces(sink, path, factor, (slice(at, at + 1),), draws=range(n, n + 1))
                    for n, at in enumerate(range(recorded - count, recorded))
                )
                state.write(sink, itertools.chain.from_iterable(pieces))
                continue
            # Several draws may be in a chunk, which only one process can write.
            one = data.shape[factor] * self.setting.model.width * data.dtype.itemsize
            each = max(1, DRAWS_AT_ONCE // one)
            for start in range(0, count, each):
                part = slice(start, start + each)
                parts = [state.gather_draws(n, part) for n in stacked(state, factor)]
                drawn = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
                values = in_callers_order(data, SIDES[factor], drawn, axis=1)
                values = np.swapaxes(values, 1, 2) if axis == -1 else values
                sink.append(path, self.number, recorded - count + start, values)

    def _write_moments(self, sink: Sink) -> None:
        state, pieces, other = self.tracks[0].state, list[Piece](), dict[str, Array]()
        count = state.counts["moments"]
        if not count:
            return
        kinds = ("mean", "mean", None), ("var", "m2", count)
        for factor, (label, _) in enumerate(FACTORS):
            for kind, name, divisor in kinds:
                path = f"{label}_{kind}"
                if factor == 0 or state.n_factors == 2:
                    what: Any = {"name": name, "divisor": divisor}
                    pieces += self._pieces(sink, f"{MOMENTS}/{path}", factor, (), **what)
                else:  # a tensor's further factors, one behind another
                    rows = gather_side(state, self.setting.data, factor, name)
                    other[path] = (rows / (divisor or 1)).T
        other |= {name: mean for name, mean in self.values.items() if name.endswith("_mean")}
        state.write(sink, pieces)
        for path, value in (other | {"count": np.array(count)}).items():
            sink.write(f"{MOMENTS}/{path}", self.number, value)
        if not state.cells:
            return
        moments_of = []
        for run in self.tracks:
            mean, m2 = (run.gather_cells(name).astype(np.float64) for name in ("mean", "m2"))
            moments_of.append((mean, m2 / (run.cell_count or 1)))
        mean, var = moments_of[0]
        if len(moments_of) > 1:
            mean, var = extrapolated_moments(moments_of[0], moments_of[1])
        monitored = {"mean": mean, "var": var, "count": np.array(self.tracks[0].cell_count or 0)}
        for name, moment in monitored.items():
            sink.write(f"{MONITOR}/{name}", self.number, moment)

    def _pieces(
        self, sink: Sink, path: str, factor: int, before: tuple[slice, ...], **what: Any
    ) -> Iterator[Piece]:
        """Cut a factor's array of the results into pieces that may be written at the same time.

        ``before`` are the indices between the chain's and those of the factor.
        """
        axis, places = FACTORS[factor][1], self.setting.places[factor]
        for part in sink.parts(path, axis):
            region = (self.number, *before, *((part,) if axis == -2 else (slice(None), part)))
            what |= {"path": path, "region": region, "transposed": axis == -1}
            yield Piece(factor, part, places, **what)

    def snapshot(self, checkpoints: Checkpoints) -> tuple[Late, dict[str, Any]]:
        """Return everything the chain needs to go on with the same bits.

        What is not saved where it is is brought here when it is called, so that a checkpoint
        holds an array of one band at a time.
        """
        snapshots = [run.snapshot(checkpoints, self.number) for run in self.tracks]
        arrays: Late = {name: array for named, _ in snapshots for name, array in named.items()}
        memory = self.memory()
        names = [name for name, value in memory.items() if isinstance(value, np.ndarray)]
        arrays |= {f"{self.number}/memory/{name}": memory.pop(name) for name in names}
        meta = {"tracks": [meta for _, meta in snapshots], "memory": memory}
        return arrays, meta | {"shrink": self.shrink, "divergences": self.divergences}

    def restore(self, arrays: Mapping[str, Array], meta: dict[str, Any]) -> None:
        """Take over the state that a snapshot holds."""
        start = f"{self.number}/memory/"
        saved = {key.removeprefix(start): arrays[key] for key in arrays if key.startswith(start)}
        self.recall(meta["memory"] | saved)
        self.shrink = meta["shrink"]
        self.divergences = list(meta["divergences"])
        self.tracks = [TrackRun.restore(self, arrays, track) for track in meta["tracks"]]


def variation_text(variations: dict[str, float], model: GammaFactors) -> str:
    """Say that counts vary more, or less, than Poisson counts, and what to do."""
    above = {name: ratio for name, ratio in variations.items() if ratio > 1}
    listed = ", ".join(
        (f"the counts of {name!r} vary" if name else "the counts vary") + f" {ratio:.3g}"
        for name, ratio in (above or variations).items()
    )
    other = 'law="negative binomial"' if model.joins else "NegativeBinomialNMF"
    K = model.n_components
    components = "1 component gives" if K == 1 else f"{K} components give"
    cause = (
        "the dispersion was set to that: they need more components, or are no Poisson counts, or "
        f"would fit better from another start; compare with a larger n_components, with {other} "
        "and with starts=5, or pass dispersion=1.0 for Poisson counts all the same"
        if above
        # More components could only fit them more closely.
        else "the dispersion is 1 all the same: they are no Poisson counts, as counts without "
        "their zeros are not, or have too many components; compare with a smaller n_components"
    )
    return (
        f"around the means that {components} them, {listed} times as much as Poisson counts, "
        f"and {cause}"
    )
