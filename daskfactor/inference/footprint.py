"""The arithmetic of a run's memory: what is alive in each of its phases.

Chains advance one after another, each with a copy to go back to; draws wait on
the bands until their segment ends, are then gathered side by side and handed to
the sink; a checkpoint gathers all states once more.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from daskfactor.data.outline import Outline
from daskfactor.data.schedules import NestedReshuffled
from daskfactor.errors import OptionError
from daskfactor.inference.chain import Setting
from daskfactor.inference.description import SMALL_DATA
from daskfactor.kernels.blockwise import SLAB
from daskfactor.kernels.workspace import tile_rows
from daskfactor.models.gaussian import GaussianMF
from daskfactor.results.layout import CHUNK_BYTES

OPERATION_BYTES = 256
"""A planned block update with its address."""
EVALUATION_BYTES = 512
"""A planned evaluation and its result."""
TASK_BYTES = 4096
"""A task in a Dask graph."""
DENSITY_BYTES = 128
"""What a thread takes for log-densities, for each entry of a slab."""
WRITING_BYTES = 6 * CHUNK_BYTES
"""Chunks that are on their way to the store at one time."""
CELL_BYTES = 80
"""A monitored cell: positions, positions in its block, results; its moments come on top."""
WORKER_COPIES = 5
"""A worker's bands as they were sent, unpacked, worked on, and on their way back."""
FLOPS = 4e10
"""Floating-point operations per second and thread that the kernels reach on usual machines."""
EVALUATION = 0.33
"""Work of an evaluation, in updates."""


@dataclass(frozen=True)
class Place:
    """Where a run is to happen: its executor, processes, threads of each, store or not."""

    executor: str
    workers: int
    lanes: int
    stored: bool

    @property
    def elsewhere(self) -> bool:
        """Whether blocks are updated in other processes than the caller's."""
        return self.executor == "ring" or (self.executor == "tasks" and self.workers > 1)


class Footprint:
    """Bytes of the parts of a run, and of its phases."""

    def __init__(self, setting: Setting, data: Outline, cells: int, place: Place) -> None:
        self.setting, self.data, self.cells, self.place = setting, data, cells, place
        self.options, self.model = setting.options, setting.model
        self.itemsize = data.dtype.itemsize
        self.width = self.model.width
        self.tracks = len(setting.sampler.tracks)
        self.shares = sum(1 / track.coarseness for track in setting.sampler.tracks)

    # -- parts -----------------------------------------------------------------

    @property
    def rows(self) -> int:
        """One W."""
        return self.data.shape[0] * self.width * self.itemsize

    @property
    def cols(self) -> int:
        """One H."""
        return self.data.shape[1] * self.width * self.itemsize

    @property
    def factors(self) -> int:
        return self.rows + self.cols

    @property
    def arrays(self) -> tuple[float, float]:
        """Arrays of the factors' shape that a chain carries while it tunes, and after."""
        return self.setting.sampler.carried(self.width)

    def state(self, arrays: float) -> int:
        """One chain with all its tracks."""
        return int(self.tracks * arrays * self.factors)

    @cached_property
    def ends(self) -> Sequence[int]:
        """Cycles at which segments end."""
        return self.setting.ends

    @cached_property
    def stops(self) -> Sequence[int]:
        """Cycles at which plans end: where segments do, and where hyperparameters are drawn."""
        every = self.setting.sampler.learns_every or self.options.cycles
        return sorted({*self.ends, *range(every, self.options.cycles, every)})

    @cached_property
    def longest(self) -> int:
        """Cycles of the longest plan."""
        return max(end - start for start, end in itertools.pairwise([0, *self.stops]))

    def kept_until(self, cycle: int) -> int:
        """Draws of one fine track that are kept among the first cycles."""
        every = self.options.keep_every
        return max(0, cycle - self.options.tune) // self.options.thin // every if every else 0

    @property
    def kept_per_segment(self) -> int:
        """Draws of one fine track that wait for the end of a segment, at most."""
        starts = [0, *self.ends[:-1]]
        return max(
            self.kept_until(end) - self.kept_until(start)
            for start, end in zip(starts, self.ends, strict=True)
        )

    @property
    def segment_draws(self) -> int:
        """Draws of all chains that wait for the end of a segment."""
        return int(self.kept_per_segment * self.options.chains * self.shares * self.factors)

    @property
    def draws(self) -> int:
        """Draws that results hold."""
        return int(self.options.kept * self.options.chains * self.shares * self.factors)

    @property
    def moments(self) -> int:
        """Means and variances that results hold, of factors and of monitored cells."""
        return self.options.chains * (2 * self.factors + 16 * self.cells)

    @property
    def observed(self) -> int:
        """The copy of the data that results hold."""
        size = self.data.shape[0] * self.data.shape[1] * self.itemsize
        small = self.place.stored or size <= SMALL_DATA
        return size if self.data.keeps_copy and small else 0

    @property
    def monitor(self) -> int:
        """Monitored cells with their moments and the copy to go back to."""
        tracks = self.options.chains * self.tracks + self.tracks
        return self.cells * (CELL_BYTES + tracks * 2 * self.itemsize)

    @property
    def checkpoint(self) -> int:
        """What a checkpoint gathers of all chains."""
        tuning, drawing = self.arrays
        return self.options.chains * self.state(tuning if self.options.tune else drawing)

    @property
    def result(self) -> int:
        """Results in memory."""
        return self.draws + self.moments + self.observed

    @property
    def store(self) -> int:
        """Results on disk, with both slots of the checkpoint."""
        return self.result + 2 * self.checkpoint

    @property
    def band(self) -> int:
        """The largest band of rows and of columns with all that travels with them."""
        grid = self.data.grid
        both = (max(grid.rows.sizes) + max(grid.cols.sizes)) * self.width * self.itemsize
        return int(both * self.arrays[0])

    @property
    def buffers(self) -> int:
        """Buffers of one thread for the block it works on."""
        grid = self.data.grid
        m, n = max(grid.rows.sizes), max(grid.cols.sizes)
        # Gradients, and while tuning the curvature and its weighted copy.
        own = 3 * (m + n) * self.width * self.itemsize
        if isinstance(self.model, GaussianMF):
            own += 24 * max(m, n) * self.width  # sums of squares in double precision
        if not self.data.is_sparse:
            own += 2 * tile_rows(m, n, self.width, self.itemsize) * n * self.itemsize
        return own + (self.data.largest if self.data.buffered else 0)

    @property
    def slab(self) -> int:
        """What a thread takes for log-densities."""
        return DENSITY_BYTES * min(SLAB, int(self.data.n_stored.max()))

    @property
    def task(self) -> int:
        """What one block update works on."""
        copies = 2 if self.place.executor == "tasks" else 1
        return self.buffers + copies * self.band

    # -- operations ------------------------------------------------------------

    @property
    def starts(self) -> list[tuple[int, int]]:
        """Of every track: the fine cycle that it starts at, and its coarseness."""
        split = self.setting.split
        tracks = self.setting.sampler.tracks
        return [(0 if t.coarseness == 1 else split, t.coarseness) for t in tracks]

    @property
    def plans(self) -> int:
        """Plans that are run one after another, of all chains and tracks."""
        own = (sum(stop > start for stop in self.stops) for start, _ in self.starts)
        return self.options.chains * sum(own)

    @property
    def evaluations(self) -> int:
        """Cycles of all chains and tracks at whose end every block is evaluated."""
        tune, draws, thin = self.options.tune, self.options.draws, self.options.thin
        between = [stop for stop in self.stops if stop <= tune or (stop - tune) % thin]
        own = (
            sum(stop > start for stop in between) + draws // coarseness
            for start, coarseness in self.starts
        )
        return self.options.chains * sum(own)

    @property
    def all_cycles(self) -> int:
        """Cycles of all chains and tracks."""
        cycles = self.options.cycles
        own = ((cycles - start) // coarseness for start, coarseness in self.starts)
        return self.options.chains * sum(own)

    @property
    def updates(self) -> int:
        """Block updates and evaluations of the whole run."""
        visits = self.setting.sampler.work(self.data.grid.blocks).visits
        return self.data.grid.blocks**2 * (visits * self.all_cycles + self.evaluations)

    @property
    def tasks(self) -> dict[str, int]:
        """Dask tasks of the whole run, for each executor."""
        schedule = self.setting.sampler.schedule
        side = schedule.groups if isinstance(schedule, NestedReshuffled) else self.data.grid.blocks
        return {
            "tasks": self.updates * side**2 // self.data.grid.blocks**2,
            "ring": self.plans * self.place.workers,
            "threads": 0,
            "lanes": 0,
        }

    @property
    def plan(self) -> int:
        """Plan and evaluations of the longest segment."""
        blocks = self.data.grid.blocks**2
        evaluated = max(1, self.longest // self.options.thin)
        own = blocks * (self.longest * OPERATION_BYTES + evaluated * EVALUATION_BYTES)
        if self.place.executor == "tasks":
            share = self.tasks["tasks"] / max(1, self.updates)
            own += int(blocks * (self.longest + evaluated) * share * TASK_BYTES)
        return own

    @property
    def flops(self) -> float:
        """Floating-point operations of the whole run, its warm start included."""
        each = self.setting.work
        passes = 1.5 * self.setting.warm_passes * self.options.chains
        return each * (self.all_cycles + EVALUATION * self.evaluations + passes)

    # -- phases ----------------------------------------------------------------

    @property
    def threads(self) -> int:
        """What the threads of this process take."""
        if self.place.elsewhere:
            return 0
        return self.place.lanes * (self.buffers + self.slab)

    @property
    def phases(self) -> dict[str, int]:
        """Bytes of the process that runs it, in each phase."""
        tuning, drawing = self.arrays
        chains, place = self.options.chains, self.place
        base = self.data.held + self.observed + self.monitor + self.threads
        one = self.state(drawing)
        carried = base + chains * one
        draws, waiting = self.draws, self.segment_draws
        so_far = CHUNK_BYTES * 2 * chains if place.stored else draws
        # Results that earlier segments left; the last one's come on top of its waiting draws.
        before = so_far if place.stored else draws - waiting
        copies = self.copies
        found = {
            "reading the data": self.data.loading,
            "warm start": base + (chains - 1) * self.state(tuning) + self.warm,
            "tuning": base
            + (chains + 1) * self.state(tuning)
            + int(copies * self.state(tuning) / self.tracks)
            + self.plan,
            "drawing": carried
            + one
            + int(copies * one / self.tracks)
            + waiting
            + before
            + self.plan,
            "writing draws": carried + waiting + so_far + self.gathering,
            "checkpoint": carried + self.checkpoint_of(drawing) + waiting + so_far,
        }
        if place.stored:
            found["checkpoint"] += WRITING_BYTES
            found["storing the data"] = base + WRITING_BYTES
        else:
            rows, cols = self.share(self.rows), self.share(self.cols)
            joined = max(2 * rows, rows + 2 * cols)
            # The C library keeps what the waiting draws took: they were many small pieces.
            found["putting results together"] = carried + draws + joined + self.moments + waiting
        if not self.options.tune:
            found["drawing"] += (chains + 1) * (self.state(tuning) - one)
        return found

    def checkpoint_of(self, arrays: float) -> int:
        return self.options.chains * self.state(arrays)

    def share(self, factor: int) -> int:
        """The part of the kept draws that is of one factor."""
        return int(self.draws * factor / self.factors)

    @property
    def warm(self) -> int:
        """A start in double precision; or one factor's numerator and denominator."""
        start = self.factors + int(max(self.rows, self.cols) * 16 / self.itemsize)
        return max(start, self.state(self.arrays[0]) + 2 * max(self.rows, self.cols))

    @property
    def copies(self) -> float:
        """States of one track beside the chain's own while a plan is run.

        In a graph, a task's result holds two bands until both their successors are
        done; between processes, states are packed, sent, received and put together.
        """
        if self.place.elsewhere:
            return 4.0 if self.place.executor == "ring" else 5.0
        return 3.0 if self.place.executor == "tasks" else 0.0

    @property
    def gathering(self) -> int:
        """One chain's waiting draws stacked by band, put together, and on their way out."""
        rows, cols = (self.kept_per_segment * factor for factor in (self.rows, self.cols))
        gathered = max(2 * rows, rows + 2 * cols)
        if self.place.stored:
            # The sink copies each factor's draws and joins them with those that waited there.
            gathered = max(gathered, rows + cols + 2 * max(rows, cols)) + WRITING_BYTES
        return max(gathered, 2 * self.factors)

    @property
    def worker(self) -> int:
        """Peak of one worker."""
        place = self.place
        if not place.elsewhere:
            return max(self.phases.values())
        share = 1 / place.workers
        tuning, drawing = self.arrays
        blocks = int(self.data.decoded * share)
        bands = WORKER_COPIES * max(
            int(self.state(tuning) / self.tracks * share),
            int(self.state(drawing) / self.tracks * share),
        )
        draws = int(self.kept_per_segment * self.factors * share)
        threads = place.lanes * (self.buffers + self.band + self.slab)
        return blocks + bands + 2 * draws + threads


def count_cells(monitor: Any, data: Outline) -> int:
    """How many cells ``monitor`` names.

    Raises
    ------
    OptionError
        If that is not known without reading the data.
    """
    if monitor is None:
        return 0
    if isinstance(monitor, tuple) and len(monitor) == 2:
        return int(np.size(monitor[0]))
    if not isinstance(monitor, str):
        return int(np.count_nonzero(getattr(monitor, "values", monitor)))
    if monitor == "missing" and data.n_missing is not None:
        return data.n_missing
    raise OptionError(
        'how many cells monitor="missing" names is not known before the data are read; pass '
        "the result of as_blocks"
        if monitor == "missing"
        else f'monitor takes "missing", a mask or (rows, columns), got {monitor!r}'
    )
