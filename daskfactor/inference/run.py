"""A run from its first segment to its last: chains in step, results written as they come."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from daskfactor.executors.state import make_state, place_cells, split_factor
from daskfactor.inference.chain import ChainRun, Setting, TrackRun, in_callers_order
from daskfactor.inference.options import boundaries, segment_length
from daskfactor.progress import OnEvent, Phase, RunEvent
from daskfactor.results.extrapolation import extrapolated_moments

Array = NDArray[Any]


Arrays = dict[str, NDArray[Any]]
SIDES = ("rows", "columns")


def snapshot(chain: ChainRun) -> tuple[Arrays, dict[str, Any]]:
    """Everything a chain needs to go on with the same bits."""
    arrays: Arrays = {}
    tracks = []
    for run in chain.tracks:
        state = run.state
        names = [None, *sorted(state.rows[0].arrays)]
        for side in SIDES:
            for name in names:
                arrays[f"{run.track.name}/{side}/{name or 'values'}"] = state.gather(side, name)
        if state.cells:
            arrays[f"{run.track.name}/cells/mean"] = gather_cells(run, "mean")
            arrays[f"{run.track.name}/cells/m2"] = gather_cells(run, "m2")
        tracks.append(
            {
                "name": run.track.name,
                "cycle": run.cycle,
                "counts": dict(state.rows[0].counts),
                "cell_count": cell_count(run),
                "arrays": [name for name in names if name is not None],
            }
        )
    meta = {
        "tracks": tracks,
        "memory": chain.memory(),
        "shrink": chain.shrink,
        "divergences": chain.divergences,
    }
    return arrays, meta


def restore(chain: ChainRun, arrays: Arrays, meta: dict[str, Any]) -> None:
    """Put a fresh chain into the state that a snapshot holds."""
    setting = chain.setting
    by_name = {track.name: track for track in setting.sampler.tracks}
    chain.recall(meta.get("memory", meta))
    chain.shrink = meta["shrink"]
    chain.divergences = list(meta["divergences"])
    chain.tracks = []
    for values in meta["tracks"]:
        name = values["name"]
        grid = setting.data.grid
        state = make_state(grid, arrays[f"{name}/rows/values"], arrays[f"{name}/columns/values"])
        for side, bands, offsets in (
            ("rows", state.rows, grid.rows.offsets),
            ("columns", state.cols, grid.cols.offsets),
        ):
            for key in values["arrays"]:
                pieces = split_factor(arrays[f"{name}/{side}/{key}"], offsets)
                for band, piece in zip(bands, pieces, strict=True):
                    band.arrays[key] = piece
            for band in bands:
                band.counts = dict(values["counts"])
        run = TrackRun(by_name[name], state, values["cycle"])
        if setting.cells is not None and values["cell_count"] is not None:
            _restore_cells(run, setting.placed_cells, chain, arrays, values["cell_count"])
        chain.tracks.append(run)


def _restore_cells(run: TrackRun, cells: Any, chain: ChainRun, arrays: Arrays, count: int) -> None:
    data = chain.setting.data
    rows, cols = cells
    run.state.cells = place_cells(data.grid, rows, cols, data.dtype)
    for own in run.state.cells.values():
        own.mean[:] = arrays[f"{run.track.name}/cells/mean"][own.where]
        own.m2[:] = arrays[f"{run.track.name}/cells/m2"][own.where]
        own.count = count


def gather_cells(run: TrackRun, name: str) -> NDArray[Any]:
    """Means or sums of squares of the monitored cells, in the caller's order."""
    size = sum(own.where.size for own in run.state.cells.values())
    first = next(iter(run.state.cells.values()))
    out = np.empty(size, first.mean.dtype)
    for own in run.state.cells.values():
        out[own.where] = getattr(own, name)
    return out


def cell_count(run: TrackRun) -> int | None:
    """Draws in the monitored cells' moments; None before they are watched."""
    for own in run.state.cells.values():
        return own.count
    return None


class Sink(Protocol):
    """Where results go: a store on disk or arrays in memory."""

    keeps_checkpoints: ClassVar[bool]

    def write_draws(
        self, chain: int, start: int, W: Array, Ht: Array, group: str = "posterior"
    ) -> None: ...

    def write_stats(
        self, chain: int, start: int, stats: dict[str, Array], group: str = "sample_stats"
    ) -> None: ...

    def write_moments(
        self,
        chain: int,
        *,
        W_mean: Array,
        W_var: Array,
        Ht_mean: Array,
        Ht_var: Array,
        count: int,
    ) -> None: ...

    def write_monitor(self, chain: int, *, mean: Array, var: Array, count: int) -> None: ...

    def checkpoint(self, arrays: dict[str, Array], meta: dict[str, Any]) -> None: ...

    def update_attrs(self, attrs: dict[str, Any]) -> None: ...


@dataclass
class RunState:
    """How far a run has come.

    ``cycle`` counts the fine cycles that every chain has done; ``written`` the
    draws, warm-up evaluations and statistics that the sink has.
    """

    chains: list[ChainRun]
    cycle: int = 0
    warmups: int = 0
    seconds: float = 0.0
    log_likelihood: float = math.nan
    started: float = field(default_factory=time.perf_counter)


def hyper_attrs(state: RunState) -> dict[str, float]:
    """Hyperparameters as results name them; the dispersion is the mean over chains."""
    attrs = state.chains[0].attrs()
    spread = [chain.attrs()["dispersion"] for chain in state.chains]
    return attrs | {"dispersion": float(np.mean(spread))}


FLOPS_PER_NORMAL = 150
SPARSE_PENALTY = 5
"""How much dearer an operation on stored entries is than one inside a matrix product."""


def work_per_cycle(setting: Setting) -> float:
    """Floating-point operations of a cycle, or what takes as long; from sizes alone."""
    data, components = setting.data, setting.model.width
    passes = setting.sampler.work(data.grid.blocks).passes
    if not data.is_sparse:
        return passes * 8.0 * data.shape[0] * data.shape[1] * components
    entries = SPARSE_PENALTY * 8.0 * float(data.n_stored.sum())
    noise = FLOPS_PER_NORMAL * data.grid.blocks * sum(data.shape)
    return passes * (entries + noise) * components


class Driver:
    """Runs all chains of a run through its segments."""

    def __init__(self, setting: Setting, sink: Sink, on_event: OnEvent) -> None:
        self.setting = setting
        self.sink = sink
        self.on_event = on_event
        options = setting.options
        self.coarseness = max(track.coarseness for track in setting.sampler.tracks)
        shape, components = setting.data.shape, setting.model.width
        work = work_per_cycle(setting)
        itemsize = np.dtype(options.dtype).itemsize
        kept = 0.0
        if options.keep_every:
            kept = sum(shape) * components * itemsize / (options.thin * options.keep_every)
            kept *= options.chains  # all chains hold their draws until the segment is written
        length = segment_length(work, kept, self.coarseness)
        self.ends = list(boundaries(options, length, setting.split, self.coarseness))

    def warmup_count(self) -> int:
        """Evaluations while tuning: one at the end of every segment."""
        return sum(end <= self.setting.options.tune for end in self.ends)

    def start(self) -> RunState:
        """Warm starts of all chains."""
        state = RunState([self.setting.chain(n) for n in range(self.setting.options.chains)])
        passes = self.setting.warm_passes
        for chain in state.chains:
            done = chain.number * passes

            def report(iteration: int, objective: float, done: int = done) -> None:
                del objective
                self.on_event(RunEvent("warm start", done + iteration, passes * len(state.chains)))

            chain.warm_start(report, None if chain.number == 0 else state.chains[0])
        return state

    def restart(self, arrays: dict[str, Array], meta: dict[str, Any]) -> RunState:
        """The state that a checkpoint holds; from the beginning if no chain had started yet."""
        if not meta["chains"]:
            return self.start()
        state = RunState([self.setting.chain(n) for n in range(self.setting.options.chains)])
        for chain in state.chains:
            prefix = f"{chain.number}/"
            own = {
                name.removeprefix(prefix): value
                for name, value in arrays.items()
                if name.startswith(prefix)
            }
            restore(chain, own, meta["chains"][chain.number])
        state.cycle, state.warmups = meta["cycle"], meta["warmup_draws"]
        state.seconds = meta["seconds"]
        return state

    def run(self, state: RunState) -> None:
        """All segments that are still to come; a checkpoint after each."""
        for end in self.ends:
            if end <= state.cycle:
                continue
            for chain in state.chains:
                self._advance(state, chain, end)
            first_draws = state.cycle <= self.setting.options.tune < end
            self._write(state, end)
            state.cycle = end
            if first_draws:  # a run that is cut short can be predicted from, too
                self.sink.update_attrs(hyper_attrs(state))
            self._checkpoint(state)
            for chain in state.chains:
                chain.forget()

    def _advance(self, state: RunState, chain: ChainRun, end: int) -> None:
        options = self.setting.options
        tuning = end <= options.tune
        offset = 0 if tuning else options.tune
        total = (options.tune if tuning else options.cycles - options.tune) * options.chains
        done_before = chain.number * (end - state.cycle) + options.chains * (state.cycle - offset)

        def on_share(share: float) -> None:
            done = done_before + share * (end - state.cycle)
            phase: Phase = "tune" if tuning else "draw"
            self.on_event(RunEvent(phase, done, total, state.log_likelihood))

        chain.advance(end, on_share)
        state.log_likelihood = chain.log_likelihood()
        on_share(1.0)

    # -- results ---------------------------------------------------------------

    def _write(self, state: RunState, end: int) -> None:
        if end <= self.setting.options.tune:
            for chain in state.chains:
                self._write_warmup(chain, state.warmups, end)
            state.warmups += 1
            return
        for chain in state.chains:
            self._write_stats(chain)
            for run in chain.tracks:
                self._write_draws(chain, run)
            self._write_moments(chain)

    def _write_warmup(self, chain: ChainRun, number: int, end: int) -> None:
        fine = chain.tracks[0]
        stats = {
            "lp": np.array([chain.log_posterior(fine, end - 1)]),
            "step_size": np.array([chain.step_size(fine, end - 1)]),
        }
        self.sink.write_stats(chain.number, number, stats, "warmup_sample_stats")

    def _write_stats(self, chain: ChainRun) -> None:
        """Statistics of the draws of the segment that are kept (of all, if none is)."""
        fine = chain.tracks[0]
        options = chain.track_options(fine.track)
        cycles, numbers = [], []
        for cycle in sorted(fine.fits):
            draw = options.draw_index(cycle)
            if draw is not None and (not options.keep_every or options.is_kept(draw)):
                cycles.append(cycle)
                numbers.append(draw // (options.keep_every or 1))
        if not cycles:
            return
        stats = {
            "lp": np.array([chain.log_posterior(fine, cycle) for cycle in cycles]),
            "step_size": np.array([chain.step_size(fine, cycle) for cycle in cycles]),
            "diverging": np.array([self._diverged(chain, cycle) for cycle in cycles]),
            **chain.statistics(cycles),
        }
        self.sink.write_stats(chain.number, numbers[0], stats)

    def _diverged(self, chain: ChainRun, cycle: int) -> bool:
        """Whether this draw is the first after a roll-back."""
        options = self.setting.options
        span = options.thin * (options.keep_every or 1)
        return any(cycle - span < start <= cycle for start in chain.divergences)

    def _write_draws(self, chain: ChainRun, run: TrackRun) -> None:
        options = chain.track_options(run.track)
        count = len(run.state.rows[0].draws)
        if not count:
            return
        data = self.setting.data
        taken = (run.cycle - options.tune) // options.thin // options.keep_every
        self.sink.write_draws(
            chain.number,
            taken - count,
            in_callers_order(data, "rows", run.state.gather_draws("rows"), axis=1),
            in_callers_order(data, "columns", run.state.gather_draws("columns"), axis=1),
            run.track.group,
        )

    def _write_moments(self, chain: ChainRun) -> None:
        fine, data = chain.tracks[0], self.setting.data
        count = fine.state.rows[0].counts["moments"]
        if not count:
            return
        moments: dict[str, Array] = {}
        for name, side in (("W", "rows"), ("Ht", "columns")):
            mean, m2 = fine.state.gather(side, "mean"), fine.state.gather(side, "m2")
            moments[f"{name}_mean"] = in_callers_order(data, side, mean)
            moments[f"{name}_var"] = in_callers_order(data, side, m2) / count
        self.sink.write_moments(chain.number, **moments, count=count)
        if fine.state.cells:
            mean, var, count = self.monitored(chain.tracks)
            self.sink.write_monitor(chain.number, mean=mean, var=var, count=count)

    @staticmethod
    def monitored(tracks: Sequence[TrackRun]) -> tuple[Array, Array, int]:
        """Mean and variance of the monitored cells, extrapolated where there is a coarse track."""
        found = []
        for run in tracks:
            mean = gather_cells(run, "mean").astype(np.float64)
            variance = gather_cells(run, "m2").astype(np.float64) / (cell_count(run) or 1)
            found.append((mean, variance))
        count = cell_count(tracks[0]) or 0
        if len(found) == 1:
            return (*found[0], count)
        return (*extrapolated_moments(found[0], found[1], nonnegative=True), count)

    def _checkpoint(self, state: RunState) -> None:
        if not self.sink.keeps_checkpoints:
            return
        arrays: dict[str, Array] = {}
        chains = []
        for chain in state.chains:
            own, meta = snapshot(chain)
            arrays.update({f"{chain.number}/{name}": value for name, value in own.items()})
            chains.append(meta)
        options = self.setting.options
        drawn = max(0, state.cycle - options.tune) // options.thin
        meta = {
            "cycle": state.cycle,
            "warmup_draws": state.warmups,
            "draws": drawn // options.keep_every if options.keep_every else drawn,
            "chains": chains,
            "seconds": state.seconds + time.perf_counter() - state.started,
        }
        self.sink.checkpoint(arrays, meta)
