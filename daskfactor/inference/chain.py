"""One chain of a run: segments, the way back after a divergence, and what each leaves behind."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import DivergenceError
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.executors.state import ChainState, FactorBand, make_state, place_cells
from daskfactor.inference.bands import is_finite, pieces_of, take_array, take_counts
from daskfactor.inference.base import StepSize, Track
from daskfactor.inference.links import LINK_PRECISIONS, LINKS, SIDES
from daskfactor.inference.multiplicative import OnStep
from daskfactor.inference.program import Fit, Program, take_fits
from daskfactor.inference.setting import RunOptions, Setting, in_callers_order
from daskfactor.kernels.philox import Address
from daskfactor.models.likelihood import Likelihood
from daskfactor.random import Stream, generator, noise_key
from daskfactor.results.files import Late
from daskfactor.results.schema import COLUMN, FEATURES, MOMENTS, ROW, Kind, Variable
from daskfactor.results.sink import Sink
from daskfactor.results.trace import extrapolated_moments

Array = NDArray[Any]
Arrays = dict[str, Array]
OnShare = Callable[[float], None]

MOST_REDUCTIONS = 20
ADAPT_EVERY = 5
DRAWS_AT_ONCE = 2**23
"""Bytes of draws that are copied at a time on their way to the results."""


def learnt_variables(setting: Setting) -> tuple[Variable, ...]:
    """Declare what the model learns; what grows with the data only where draws are kept.

    Means of links are always there.
    """
    kept, names = setting.options.keep_every, {"row": ROW, "column": COLUMN}
    found = []
    for name, own, doc, averaged, _ in setting.model.learnt:
        dims, linked = [names.get(dim, dim) for dim in own], bool(set(own) & set(FEATURES))
        kind: Kind = "factor" if linked else "real"
        if kept or not (linked or names.keys() & set(own)):
            found.append(Variable("posterior", name, ("chain", "draw", *dims), kind, doc))
        if linked or averaged:
            doc = f"mean over cycles: {doc}"
            found.append(Variable(MOMENTS, f"{name}_mean", ("chain", *dims), kind, doc))
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

    def snapshot(self, chain: int) -> tuple[Late, dict[str, Any]]:
        """Return what a chain's track needs to go on: arrays, put together late, JSON values."""
        own, state = f"{chain}/{self.track.name}", self.state
        names = [sorted(state.names(factor)) for factor in range(len(SIDES))]
        arrays: Late = {
            f"{own}/{side}/{name or 'values'}": partial(state.gather, side, name)
            for side, found in zip(SIDES, names, strict=True)
            for name in (None, *found)
        }
        if state.cells:
            arrays |= {
                f"{own}/cells/{name}": partial(self.gather_cells, name) for name in ("mean", "m2")
            }
        meta = {
            "name": self.track.name,
            "cycle": self.cycle,
            "counts": state.counts,
            "cell_count": self.cell_count,
            "arrays": sorted({*names[0], *names[1]}),
        }
        return arrays, meta

    @classmethod
    def restore(cls, chain: "Chain", arrays: Arrays, meta: dict[str, Any]) -> Self:
        """Make the track of a chain that a snapshot holds."""
        setting, name = chain.setting, f"{chain.number}/{meta['name']}"
        data, grid = setting.data, setting.data.grid
        state = make_state(grid, arrays[f"{name}/rows/values"], arrays[f"{name}/columns/values"])
        for factor, side in enumerate(SIDES):
            for key in (key for key in meta["arrays"] if f"{name}/{side}/{key}" in arrays):
                pieces = pieces_of(grid, factor, arrays[f"{name}/{side}/{key}"])
                state.each(partial(take_array, name=key), factor, pieces)
        state.each(partial(take_counts, counts=meta["counts"]))
        cells = setting.placed_cells
        if cells is not None and meta["cell_count"] is not None:
            state.cells = place_cells(grid, *cells, data.dtype)
            for own in state.cells.values():
                own.mean[:] = arrays[f"{name}/cells/mean"][own.where]
                own.m2[:] = arrays[f"{name}/cells/m2"][own.where]
                own.count = meta["cell_count"]
        (track,) = (own for own in setting.sampler.tracks if own.name == meta["name"])
        return cls.of(track, setting, setting.executor.hold(state), meta["cycle"])


def stirred(band: FactorBand, sampler: Any, key: Array, factor: int, shape: float) -> None:
    """Let a band whose values are a draw have the momentum of one."""
    sampler.stir(band, Address(key, 0, factor, band.offset), shape)


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
    links
        Of factors that have covariates, by the names that results have, and what else there is
        of them; replaced, never changed.
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
        self.links: Arrays = {}
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

    def recall_links(self, memory: dict[str, Any]) -> None:
        """Take over links, and the means of what is learnt, if there are any."""
        names = (*LINKS, *LINK_PRECISIONS)
        self.links = {name: memory[name] for name in names if name in memory}
        self.means = {name: own for name, own in memory.items() if name.endswith("_mean")}

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

    def _stir(self, state: ChainState, shapes: tuple[float, float] = (1.0, 1.0)) -> None:
        """Let a state whose values are a draw have the momentum of one."""
        key = noise_key(self.setting.options.seed, self.number, Stream.START)
        for factor, shape in enumerate(shapes):
            how: Any = {
                "sampler": self.setting.sampler,
                "key": key,
                "factor": factor,
                "shape": shape,
            }
            state.each(partial(stirred, **how), factor)

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
        for run in self.tracks:
            run.state = setting.executor.hold(run.state)
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
        prior = math.fsum(run.state.sums(cycle))
        run.fits[cycle] = fit
        run.densities[cycle] = self._lp(fit) + (self._prior_constant() + prior)
        draw = run.options.draw_index(cycle)
        if draw is None:
            return
        averaged = {name: self.links[name] for name in LINKS if name in self.links}
        averaged |= {o.name: learnt[o.name] for o in self.setting.model.learnt if o.averaged}
        for name, value in averaged.items():  # the same bits wherever a segment ends
            before = self.means.get(f"{name}_mean", np.zeros_like(value))
            mean = before + (value - before) / (draw + 1)
            self.means = self.means | {f"{name}_mean": mean}

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

    def step_sizes(self, run: TrackRun, cycles: list[int]) -> Array:
        """Return the last step of every cycle, reductions included."""
        moves = self.setting.sampler.work(self.setting.data.grid.blocks).moves
        step = self.step_for(run.track)
        return np.array([float(step((cycle + 1) * moves - 1)) * self.shrink for cycle in cycles])

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
            and all(run.state.each(is_finite))
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

    def write(self, sink: Sink, end: int, moments: bool = True) -> None:
        """Write draws and statistics of the segment that ended at ``end``, and all ``moments``."""
        fine, setting = self.tracks[0], self.setting
        tuning = end <= setting.options.tune
        cycles = [cycle for cycle in sorted(fine.fits) if fine.options.place(cycle) is not None]
        cycles = [end - 1] if tuning else cycles
        stats = {
            "lp": np.array([fine.densities[cycle] for cycle in cycles]),
            "step_size": self.step_sizes(fine, cycles),
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
        if moments:
            self._write_moments(sink)

    def _write_draws(self, sink: Sink, run: TrackRun) -> None:
        options, data, state = run.options, self.setting.data, run.state
        count = state.recorded
        if not count:
            return
        taken = (run.cycle - options.tune) // options.thin // options.keep_every
        one = sum(data.shape) * self.setting.model.width * data.dtype.itemsize
        each = max(1, DRAWS_AT_ONCE // one)
        for start in range(0, count, each):
            part = slice(start, start + each)
            W = in_callers_order(data, "rows", state.gather_draws("rows", part), axis=1)
            Ht = in_callers_order(data, "columns", state.gather_draws("columns", part), axis=1)
            sink.write_draws(self.number, taken - count + start, W, Ht, run.track.group)

    def _write_moments(self, sink: Sink) -> None:
        state, data = self.tracks[0].state, self.setting.data
        count = state.counts["moments"]
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

    def snapshot(self) -> tuple[Late, dict[str, Any]]:
        """Return everything the chain needs to go on with the same bits.

        Arrays of the state are put together when they are called, so that a checkpoint holds
        one of them at a time.
        """
        found = [run.snapshot(self.number) for run in self.tracks]
        arrays: Late = {name: array for own, _ in found for name, array in own.items()}
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
