"""One chain of a run: segments, the way back after a divergence, and what each leaves behind."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import DivergenceError
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.executors.state import ChainState, FactorBand, Piece, place_cells, saved_as
from daskfactor.inference.bands import is_finite
from daskfactor.inference.base import Track
from daskfactor.inference.links import LINK_PRECISIONS, LINKS, SIDES
from daskfactor.inference.multiplicative import OnStep
from daskfactor.inference.passes import Place
from daskfactor.inference.program import Fit, Kernel, Program, factor_word, take_fits
from daskfactor.inference.setting import RunOptions, Setting, in_callers_order
from daskfactor.inference.steps import StepSize
from daskfactor.kernels.philox import Address
from daskfactor.models.likelihood import Likelihood
from daskfactor.random import Stream, generator, noise_key
from daskfactor.results.files import Checkpoints, Late
from daskfactor.results.schema import COLUMN, FEATURES, MOMENTS, MONITOR, ROW, Kind, Variable
from daskfactor.results.sink import Sink
from daskfactor.results.trace import extrapolated_moments

Array = NDArray[Any]
Arrays = dict[str, Array]
OnShare = Callable[[float], None]

FACTORS = ("W", -2), ("H", -1)
"""Factors as results have them, and the axis of their rows and columns."""
MOST_REDUCTIONS = 20
ADAPT_EVERY = 5
DRAWS_AT_ONCE = 2**23
"""Bytes of draws that are copied at a time on their way to the results."""


def stacked(state: ChainState, factor: int) -> list[int]:
    """Return the factors of a state that results hold as W (0), or as H (1): all others."""
    return [0] if factor == 0 else list(range(1, state.n_factors))


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
        options, each = setting.options, track.stride
        scaled = replace(options, draws=options.draws // each, tune=options.tune // each)
        return cls(track, scaled, state, cycle)

    def forget(self) -> None:
        """Drop the segment's draws and fits, once they are written."""
        self.state.forget()
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
        if state.cells:
            arrays |= {
                f"{prefix}/cells/{name}": partial(self.gather_cells, name)
                for name in ("mean", "m2")
            }
        meta = {
            "name": self.track.name,
            "cycle": self.cycle,
            "counts": state.counts,
            "cell_count": self.cell_count,
            "arrays": [sorted(state.names(factor)) for factor in range(state.n_factors)],
        }
        return arrays, meta

    @classmethod
    def restore(cls, chain: "Chain", arrays: Mapping[str, Array], meta: dict[str, Any]) -> Self:
        """Make the track of a chain that a snapshot holds."""
        setting, name = chain.setting, f"{chain.number}/{meta['name']}"
        data, grid = setting.data, setting.data.grid
        offsets = tuple(side.offsets for side in grid.sides)
        band = partial(saved_band, arrays, name, meta, offsets)
        shared, factors = getattr(arrays, "shared", False), len(grid.sides)
        state = setting.executor.state_of(grid.blocks, band, shared, factors)
        cells = setting.placed_cells
        if cells is not None and meta["cell_count"] is not None:
            placed = place_cells(grid, cells, data.dtype)
            mean, m2 = (arrays[f"{name}/cells/{kind}"] for kind in ("mean", "m2"))
            for block in placed.values():
                block.mean[:], block.m2[:] = (
                    mean[block.where],
                    m2[block.where],
                )
                block.count = meta["cell_count"]
            state.cells = placed  # complete: they may go to workers from here
        (track,) = (track for track in setting.sampler.tracks if track.name == meta["name"])
        return cls.of(track, setting, state, meta["cycle"])


def saved_band(
    arrays: Mapping[str, Array],
    name: str,
    meta: dict[str, Any],
    offsets: tuple[tuple[int, ...], ...],
    factor: int,
    number: int,
) -> FactorBand:
    """Read a band of a track from what `TrackRun.snapshot` gave."""
    values, *others = (
        arrays[saved_as(name, factor, number, array)] for array in ("", *meta["arrays"][factor])
    )
    named = dict(zip(meta["arrays"][factor], others, strict=True))
    return FactorBand(offsets[factor][number], values, named, dict(meta["counts"]))


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
    if missing := {saved_as(f"{n}/{name}", 0, 0, "") for n, name in pairs} - set(arrays):
        raise KeyError(min(missing))


def refresh_band(band: FactorBand, kernel: Kernel, key: Array, factor: int, shape: float) -> None:
    """Draw the momentum of a band whose values are a draw."""
    kernel.refresh(band, Address(key, 0, factor_word(factor), band.offset), shape)


def half_step(base: StepSize, iteration: int) -> float:
    """Return a fine chain's step: half of the coarse chain's step at the same time."""
    return 0.5 * base(iteration // 2)


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
        self.noise_sum: Any = 0.0
        self.noise_draws = 0

    # -- what a model adds -----------------------------------------------------

    @abstractmethod
    def start(self, on_step: OnStep | None = None, first: "Chain | None" = None) -> None:
        """Set the first track's state near a mode; ``first`` is the run's first chain."""

    @abstractmethod
    def attrs(self) -> dict[str, float]:
        """Return hyperparameters under the names that results use."""

    def memory(self) -> dict[str, Any]:
        """Return JSON values and arrays that a checkpoint keeps besides the state."""
        noise = [np.asarray(self.noise_sum).tolist(), self.noise_draws]
        return {"noise": noise, **self.links, **self.means}

    def recall(self, memory: dict[str, Any]) -> None:
        """Take over what `memory` gave."""
        noise, self.noise_draws = memory.get("noise", (0.0, 0))  # older versions have none
        self.noise_sum = np.asarray(noise)
        names = (*LINKS, *LINK_PRECISIONS)
        self.links = {name: memory[name] for name in names if name in memory}
        self.means = {name: value for name, value in memory.items() if name.endswith("_mean")}

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

    def _refresh(self, state: ChainState, shapes: Sequence[float] = (1.0, 1.0)) -> None:
        """Draw the momentum of a state whose values are a draw."""
        key = noise_key(self.setting.options.seed, self.number, Stream.START)
        for factor, shape in enumerate(shapes):
            how: Any = {"kernel": self.setting.kernel, "key": key, "factor": factor}
            state.each(partial(refresh_band, shape=shape, **how), factor)

    def _place(self, state: ChainState) -> Place:
        return Place(self.setting.executor, self.setting.data, state, self.floor)

    def _prior_constant(self) -> float:
        """Return the part of the log prior density that bands do not record."""
        return 0.0

    def _between(self, run: TrackRun, start: int) -> None:
        """Learn from a track's cycles since ``start``; a divergence takes it back."""
        spent = (self.setting.options.draw_index(cycle) for cycle in range(start, run.cycle))
        draws = sum(draw is not None for draw in spent)
        self.noise_sum = self.noise_sum + draws * np.asarray(self.hyper.dispersion)
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
        names = (variable.name for variable in self.setting.model.learnt)
        return {name: np.asarray(getattr(self.hyper, name)) for name in names}

    @property
    def mean_dispersion(self) -> Any:
        """The mean of the dispersion over the draws, as predictions take it."""
        if not self.noise_draws:
            return self.hyper.dispersion
        return (self.noise_sum / self.noise_draws).tolist()

    def _adapt(self, end: int) -> None:
        """Learn from a segment that ended soundly at fine cycle ``end``."""
        del end

    @property
    def estimate(self) -> Any:
        """The chain's new estimate of the dispersion, for `take_dispersion`; None: it has none."""
        return None

    def take_dispersion(self, estimates: Sequence[Any]) -> None:
        """Take what the estimates of all chains of a run say, in place of the chain's own."""
        del estimates

    def warnings(self) -> tuple[str | None, str | None]:
        """Tell what the user should know of data and model, and of the sampler, at the end."""
        return None, None

    def statistics(self, cycles: list[int]) -> dict[str, Array]:
        """Return the kernel's own statistics of cycles of the running segment: means over rows."""
        state, rows = self.tracks[0].state, sum(self.setting.data.shape)
        names = (variable.name for variable in self.setting.kernel.statistics)
        totals = {n: [math.fsum(state.sums((cycle, n))) for cycle in cycles] for n in names}
        return {name: np.array(values) / rows for name, values in totals.items()}

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
        before_cycles = sum(cycle for cycle, _ in before)
        total = sum(end // run.track.stride for run in self.tracks) - before_cycles

        def tell(ahead: float) -> None:
            """``ahead``: cycles that are done of the running plan."""
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
            run.state = setting.executor.hold(run.state)
        for track in setting.sampler.tracks[len(self.tracks) :]:
            fine = self.tracks[0]
            if fine.cycle >= setting.split:
                state, cycle = fine.state.copy(), fine.cycle // track.stride
                self.tracks.append(TrackRun.of(track, setting, state, cycle))
        cells, data = setting.placed_cells, setting.data
        if self.cycle == setting.options.tune and cells is not None:
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
        plan = build_plan(
            setting.kernel.schedule,
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
            setting.kernel,
            self.law,
            self.floor,
            self.tempered,
            (int(key[0]), int(key[1])),
            setting.model.frozen,
            self.step_for(track),
            self.shrink,
            track.stride > 1,
        )

    def step_for(self, track: Track) -> StepSize:
        """Return the step of one track."""
        step = self.setting.kernel.step_size
        return partial(half_step, step) if track.stride < self.setting.stride else step

    def step_sizes(self, run: TrackRun, cycles: list[int]) -> Array:
        """Return the last step of every cycle, reductions included."""
        moves = self.setting.kernel.work.moves
        step = self.step_for(run.track)
        return np.array([float(step((cycle + 1) * moves - 1)) * self.shrink for cycle in cycles])

    def _wanted(self, run: TrackRun, cycle: int, end: int) -> CycleOptions:
        options, fine = run.options, cycle * run.track.stride
        drawn = options.draw_index(cycle) is not None
        adapts = fine < self.setting.frozen_from and cycle % ADAPT_EVERY == 0
        if self.setting.kernel.adapts_always:
            adapts = cycle < options.tune
        return CycleOptions(
            adapt=adapts,
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
                    any(cycle - span < start <= cycle for start in self.divergences)
                    for cycle in cycles
                ]
            )
            stats |= self.statistics(cycles)
            place = cast("int", fine.options.place(cycles[0]))
            sink.write_stats(self.number, place, stats)
            values = {
                variable.name: np.stack([fine.learnt[cycle][variable.name] for cycle in cycles])
                for variable in learnt_variables(setting)
                if variable.group == "posterior"
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
        recorded = (run.cycle - options.tune) // options.thin // options.keep_every
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
        state = self.tracks[0].state
        count = state.counts["moments"]
        if not count:
            return
        pieces = [
            piece
            for factor, (name, _) in enumerate(FACTORS)
            if len(stacked(state, factor)) == 1
            for kind, options in (
                ("mean", {"name": "mean"}),
                ("var", {"name": "m2", "divisor": count}),
            )
            for piece in self._pieces(sink, f"{MOMENTS}/{name}_{kind}", factor, (), **options)
        ]
        with sink.replacing(MOMENTS, self.number, count):
            state.write(sink, pieces)
            if state.n_factors > 2:
                self._write_stacked(sink, count)
            for name, value in self.means.items():
                sink.write(f"{MOMENTS}/{name}", self.number, value)
        if not state.cells:
            return
        moments_of = []
        for run in self.tracks:
            mean, m2 = (run.gather_cells(name).astype(np.float64) for name in ("mean", "m2"))
            moments_of.append((mean, m2 / (run.cell_count or 1)))
        mean, var = moments_of[0]
        if len(moments_of) > 1:
            mean, var = extrapolated_moments(moments_of[0], moments_of[1], nonnegative=True)
        with sink.replacing(MONITOR, self.number, self.tracks[0].cell_count or 0):
            for name, value in (("mean", mean), ("var", var)):
                sink.write(f"{MONITOR}/{name}", self.number, value)

    def _write_stacked(self, sink: Sink, count: int) -> None:
        """Write the moments of a tensor's further factors, one behind another, as those of H."""
        state = self.tracks[0].state
        for kind, name, divisor in (("mean", "mean", 1), ("var", "m2", count)):
            stacked_rows = (
                np.concatenate([state.gather(n, name) for n in stacked(state, 1)]) / divisor
            )
            value = in_callers_order(self.setting.data, SIDES[1], stacked_rows).T
            sink.write(f"{MOMENTS}/H_{kind}", self.number, value)

    def _pieces(
        self, sink: Sink, path: str, factor: int, before: tuple[slice, ...], **what: Any
    ) -> Iterator[Piece]:
        """Cut a factor's array of the results into pieces that may be written at the same time.

        ``before`` are the indices between the chain's and those of the factor.
        """
        axis, places = FACTORS[factor][1], self.setting.places[factor]
        for part in sink.parts(path, axis):
            region = (self.number, *before, *((part,) if axis == -2 else (slice(None), part)))
            what |= {"path": path, "region": region, "turned": axis == -1}
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
        meta = {
            "tracks": [meta for _, meta in snapshots],
            "memory": memory,
            "shrink": self.shrink,
            "divergences": self.divergences,
        }
        return arrays, meta

    def restore(self, arrays: Mapping[str, Array], meta: dict[str, Any]) -> None:
        """Take over the state that a snapshot holds."""
        start = f"{self.number}/memory/"
        saved = {key.removeprefix(start): arrays[key] for key in arrays if key.startswith(start)}
        self.recall(meta["memory"] | saved)
        self.shrink = meta["shrink"]
        self.divergences = list(meta["divergences"])
        self.tracks = [TrackRun.restore(self, arrays, track) for track in meta["tracks"]]
