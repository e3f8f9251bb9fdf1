"""Options and timetable of a run, and all that its chains share."""

import math
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import (
    cells_at,
    cells_of_tensor,
    one_of,
    positive_number,
    refuse_unknown,
    warn,
    whole_number,
)
from daskfactor.coupled.source import CoupledData
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import inverse
from daskfactor.errors import DataWarning, ModelError, OptionError
from daskfactor.executors.base import Executor
from daskfactor.executors.state import RowPositions
from daskfactor.inference.base import Sampler, is_dense_pass, longest_stride, pass_size
from daskfactor.inference.inits import USUAL, Init
from daskfactor.inference.program import Kernel, relative_size
from daskfactor.models.settings import FactorModel
from daskfactor.random import MAX_COMPONENTS, resolve_seed

Array = NDArray[Any]
Keep = Literal["auto", "draws", "moments"]
Cells = tuple[NDArray[np.int64], NDArray[np.int64]]
MONITOR = (
    'monitor takes None, "missing", a boolean mask of the shape of V, or a pair (rows, columns) '
    "of integer positions"
)
SMALL_DATA = 2**28
"""Bytes of data that a trace in memory holds a copy of; a store always does."""
DRAWS_BUDGET = 2**30
"""Bytes that draws may take under ``keep="auto"``."""
SEGMENT_BYTES = 2**25
"""Bytes of draws until a segment's end, where the states of the chains do not take more."""
SEGMENT_FLOPS = 2e11
DEVICE_PACE = 100.0
"""Factor of the work between segments' ends on a GPU, whose states come home and go back there."""
LONGEST_SEGMENT = 500
TUNE_SEGMENTS = 10
USUAL_DRAWS, USUAL_TUNE = 500, 500
"""Draws of a run, and cycles of tuning of a chain, where nobody asks for others."""
SEVERAL_CHAINS, SHORT_TUNE = 4, 250
"""Chains that share the usual draws where data are small, and what each tunes."""
WORTH_A_THREAD = 2e6
"""Entries times components of a pass from which on two chains gain from two threads: measured,
at 2e5 (200 x 100, K = 10) they take 1.6 times as long as one after the other, at 5e6 .65 to .85."""
FROZEN_FROM = 0.8
"""Share of tuning after which a single chain's metric and dispersion stay as they are."""
MOST_PASSES, FEWEST_PASSES = 100, 20
DEAR_PASS = 1e9
"""Entries times components from which on a warm start takes fewer passes."""
LONGEST_WARM_START, CHEAP_PASS = 2000, 100
"""Passes that it takes at most, and by how much cheaper than a dear pass they are for that."""
FLOPS_PER_NORMAL = 150
SPARSE_PENALTY = 5
"""Cost of an operation on a stored entry, in units of one inside a matrix product."""


@dataclass(frozen=True)
class RunOptions:
    """Say how long a run is and what it keeps; plain values, written into the results.

    ``keep_every`` is the number of draws between kept ones; 0 keeps none. ``pace`` is how much
    more work is done between segments' ends than on processors.
    """

    draws: int
    tune: int
    chains: int
    thin: int
    seed: int
    keep: Keep
    keep_every: int
    dtype: str
    pace: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Make what `to_dict` described.

        Raises
        ------
        StoreFormatError, OptionError
            If there are options that this version does not know, or that no run can have.
        """
        refuse_unknown("the stored run", values, [option.name for option in fields(cls)])
        options = cls(**values)
        for name, least in {"draws": 1, "tune": 0, "chains": 1, "thin": 1, "keep_every": 0}.items():
            whole_number(name, values[name], least)
        resolve_seed(whole_number("seed", options.seed, 0))
        positive_number("pace", options.pace)
        one_of("keep", options.keep, get_args(Keep))
        one_of("dtype", options.dtype, ("float32", "float64"))
        return options

    @property
    def cycles(self) -> int:
        """Count cycles of the finest track of each chain, tuning included."""
        return self.tune + self.draws * self.thin

    @property
    def spacing(self) -> int:
        """Draws from one that results tell of to the next; all have statistics if none is kept."""
        return self.keep_every or 1

    @property
    def index(self) -> NDArray[np.int64]:
        """Return the cycles whose draws the results hold or tell of, in order."""
        numbers = np.arange(1, self.draws // self.spacing + 1, dtype=np.int64)
        return self.tune + self.thin * self.spacing * numbers - 1

    def draws_after(self, cycles: int) -> int:
        """Return the number of draws in so many cycles, tuning included."""
        return max(0, cycles - self.tune) // self.thin

    def draw_index(self, cycle: int) -> int | None:
        """Return the number of the draw that a cycle ends with, or None."""
        after = cycle - self.tune + 1
        return after // self.thin - 1 if after > 0 and after % self.thin == 0 else None

    def place(self, cycle: int) -> int | None:
        """Return where in `index` the draw is that a cycle ends with, or None."""
        draw = self.draw_index(cycle)
        return None if draw is None or (draw + 1) % self.spacing else draw // self.spacing


def checked_lengths(sampler: Sampler | None, **lengths: Any) -> dict[str, int]:
    """Return ``draws``, ``tune``, ``chains`` and ``thin`` as whole numbers that a run can have.

    Those that are None are left out.
    """
    numbers = {
        name: whole_number(name, value, 0 if name == "tune" else 1)
        for name, value in lengths.items()
        if value is not None
    }
    if sampler is not None:
        check_stride(sampler, numbers.get("draws", USUAL_DRAWS), numbers.get("tune", USUAL_TUNE))
    return numbers


def check_stride(sampler: Sampler, draws: int, tune: int) -> None:
    """Raise OptionError if a track cannot take its share of so many cycles."""
    stride = longest_stride(sampler)
    for name, value in (("draws", draws), ("tune", tune)):
        if value % stride:
            raise OptionError(
                f"{sampler.name} takes {stride} fine cycles for each coarse one and needs "
                f"an even {name}; got {value}, pass {value + stride - value % stride}"
            )


def learnt_bytes(data: BlockedData, model: FactorModel, banded: bool = False) -> int:
    """Count the bytes that a draw of what is learnt takes beside the factors and links.

    ``banded``: only of what travels with bands, because rows or columns have their own.
    """
    sizes = {"row": data.shape[0], "column": data.shape[1], "component": model.n_components}
    total = 0
    for variable in model.learnt:
        dims = set(variable.dims)
        if dims <= sizes.keys() and (not banded or {"row", "column"} & dims):
            total += 8 * math.prod(sizes[dim] for dim in variable.dims)
    return total


def draw_bytes(data: BlockedData, model: FactorModel, share: float = 1.0) -> float:
    """Count the bytes of a draw of factors, links, and what else is learnt.

    ``share`` is how many factors there are for each draw: more than one where tracks are.
    """
    rows: int = sum(data.shape) + sum(
        table.shape[1] for table in model.covariates if table is not None
    )
    return rows * model.width * data.dtype.itemsize * share + learnt_bytes(data, model)


def copies_in_memory(data: BlockedData, stored: bool) -> tuple[bool, bool]:
    """Return whether results hold a copy of the data, and of the weights of their cells.

    Data are held if they are dense, in memory, and small or for a store; their weights with them,
    or alone if they are small and nothing says where to read them again.
    """
    small = data.shape[0] * data.shape[1] * data.dtype.itemsize <= SMALL_DATA
    # What is kept of several matrices in units of their means would not be those matrices.
    keeps_data = (stored or small) and not (data.is_sparse or data.source.lazy or data.placed)
    if data.weights is None:
        return keeps_data, False
    return keeps_data, keeps_data or (
        small and data.weights.source.location is None and not data.is_sparse
    )


def plan_run(
    data: BlockedData,
    model: FactorModel,
    sampler: Sampler,
    keep: str,
    seed: int,
    on_device: bool = False,
    **lengths: int,
) -> RunOptions:
    """Choose the lengths that ``lengths``, of `checked_lengths`, lack, and how many draws to keep.

    Data of one block get several short chains, which run side by side: one alone cannot show
    whether others would end elsewhere. If any of ``draws``, ``tune`` and ``chains`` is given, the
    others are 500, 500 and 1. ``keep="auto"`` keeps as many draws as the memory for them has room
    for, evenly spaced; none if that would leave no draw of a coarse track.
    """
    one_of("keep", keep, get_args(Keep))
    stride = longest_stride(sampler)
    usual = {"draws": USUAL_DRAWS, "tune": USUAL_TUNE, "chains": 1}
    if data.grid.blocks == 1 and not on_device and not usual.keys() & lengths.keys():
        draws, tune = USUAL_DRAWS // SEVERAL_CHAINS, SHORT_TUNE
        usual = {"draws": draws + -draws % stride, "tune": tune + -tune % stride}
        usual["chains"] = SEVERAL_CHAINS
    lengths = usual | lengths
    draws, every = lengths["draws"], int(keep == "draws")
    shares = sum(1 / track.stride for track in sampler.tracks)
    each = draw_bytes(data, model, shares) * lengths["chains"]
    affordable = int(DRAWS_BUDGET / max(each, 1))
    if keep == "auto" and affordable:
        every = -(-draws // min(affordable, draws))
        every = every if every <= draws // stride else 0
    options: Any = {**lengths, "keep": keep, "keep_every": every}
    pace = DEVICE_PACE if on_device else 1.0
    return RunOptions(seed=seed, dtype=str(data.dtype), pace=pace, **options)


@dataclass(frozen=True)
class Setting:
    """The data, model, kernel and timetable that all chains of a run share.

    ``cells`` are positions in the caller's order; ``temperature`` is the power t
    of the likelihood in p(V | W, H)^t p(W, H), 1 for the posterior; ``init`` says
    where chains begin.
    """

    data: BlockedData
    model: FactorModel
    kernel: Kernel
    options: RunOptions
    executor: Executor
    cells: Cells | None = None
    temperature: float | None = None
    init: Init = USUAL

    def __post_init__(self) -> None:
        if (count := self.model.n_components) >= MAX_COMPONENTS:
            raise ModelError(
                f"n_components must be below {MAX_COMPONENTS}, got {count}; pass fewer"
            )

    @property
    def sampler(self) -> Sampler:
        """The sampler, with values in place of what ``"auto"`` stands for."""
        sampler: Sampler = self.kernel.options
        return sampler

    def tempered(self, hyper: Any) -> Any:
        """Return hyperparameters of p(V | W, H)^t p(W, H), with what divides divergences."""
        model: Any = self.model
        _, hyper = model.at(hyper)
        power = self.temperature
        return hyper if power is None else hyper._replace(dispersion=hyper.dispersion / power)

    @property
    def stride(self) -> int:
        """Fine cycles for each cycle of the coarsest track."""
        return longest_stride(self.sampler)

    @property
    def split(self) -> int:
        """Fine cycle at which a pair's coarse track leaves the fine one's state."""
        return self.options.tune // 2 // self.stride * self.stride

    @property
    def frozen_from(self) -> int:
        """Cycle from which metric and dispersion no longer change."""
        if len(self.sampler.tracks) > 1:
            return self.split
        return int(self.options.tune * FROZEN_FROM)

    @property
    def learns_every(self) -> int:
        """Cycles between draws of hyperparameters, and of the scale that W and H share."""
        if self.model.learnt:
            return self.kernel.learns_every
        return self.rescales_every or self.options.cycles

    @property
    def rescales_every(self) -> int | None:
        """Cycles between draws of the scale; None of coupled chains, which would draw their own."""
        return self.kernel.rescales_every if len(self.sampler.tracks) == 1 else None

    @property
    def at_once(self) -> bool:
        """Tell whether chains run side by side: of one block, if it is more work than Python is."""
        large = pass_size(self.model, self.data) >= WORTH_A_THREAD
        return self.data.grid.blocks == 1 and large

    @property
    def warm_passes(self) -> tuple[int, int]:
        """Passes of the warm start, at least and at most: fewer where a pass is dear."""
        passes = self.sampler.warm_start
        if passes != "auto":
            return passes, passes
        if not self.init.climbs:
            return 0, 0
        dear = DEAR_PASS / max(1.0, pass_size(self.model, self.data))
        least = min(MOST_PASSES, max(FEWEST_PASSES, int(MOST_PASSES * dear)))
        return least, max(least, int(LONGEST_WARM_START * min(1.0, dear / CHEAP_PASS)))

    @property
    def work(self) -> float:
        """Floating-point operations of a cycle, or what takes as long; from sizes alone."""
        data, width = self.data, self.model.width
        work = self.kernel.work
        passes = work.passes + work.passes_per_column * width
        if is_dense_pass(self.model, data):
            return passes * 8.0 * data.shape[0] * data.shape[1] * width
        entries = SPARSE_PENALTY * 8.0 * float(data.n_stored.sum())
        noise = FLOPS_PER_NORMAL * data.grid.parts * sum(data.shape)
        return passes * (entries + noise) * width

    @cached_property
    def tenths(self) -> frozenset[int]:
        """Fine cycles at which tenths of tuning end."""
        tune, each = self.options.tune, self.stride
        return frozenset(
            tune * number // TUNE_SEGMENTS // each * each for number in range(1, TUNE_SEGMENTS)
        )

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Fine cycles at which segments end, where results are written and all is saved.

        About a second's work lies between them, bounded in memory. They depend on sizes
        only, never on a clock, so that every machine checks for divergence at the same cycles.
        """
        options, stride = self.options, self.stride
        length = min(options.pace * SEGMENT_FLOPS / max(self.work, 1.0), LONGEST_SEGMENT)
        if options.keep_every:
            # All chains hold their draws until the segment is written.
            draw = draw_bytes(self.data, self.model) * options.chains
            carried = 1 + relative_size(self.kernel.arrays, self.model.width, "chain")
            room = max(SEGMENT_BYTES, carried * draw)
            length = min(length, room / draw * options.thin * options.keep_every)
        step = max(1, int(length) // stride) * stride
        ends = {
            *self.tenths,
            *range(step, options.tune, step),
            *range(options.tune + step, options.cycles, step),
            *(self.split, options.tune, options.cycles),
        }
        return tuple(sorted(end for end in ends if 0 < end <= options.cycles))

    @cached_property
    def observed_covariates(self) -> tuple[Any, Any]:
        """Covariates of those rows, and of those columns, that have data; None: there are none."""
        tables: list[Any] = list(self.model.covariates)
        for factor, side in enumerate(("rows", "columns")):
            if (table := tables[factor]) is not None:
                counts = np.asarray(self.data.counts(factor))
                observed = in_callers_order(self.data, side, counts) > 0
                tables[factor] = table if observed.all() else table.at(observed)
        return tables[0], tables[1]

    @cached_property
    def places(self) -> tuple[RowPositions | None, RowPositions | None]:
        """Positions on the grid of the caller's rows, and columns; None: they are in its order."""
        data = self.data
        return (RowPositions(data, 0), RowPositions(data, 1)) if data.is_balanced else (None, None)

    @property
    def placed_cells(self) -> tuple[Array, ...] | None:
        """Monitored cells as positions on each axis of the grid, in the order of the grid."""
        if self.cells is None:
            return None
        rows, columns = self.cells
        sizes = [side.size for side in self.data.grid.sides[1:]]
        further = np.unravel_index(columns, sizes)  # of a matrix the columns
        first, others = self.places
        if first is None or others is None:
            return (rows, *further)
        starts = np.cumsum([0, *sizes[:-1]])
        at = zip(starts, further, strict=True)
        others_at = (others.positions[start + axis] - start for start, axis in at)
        return (first.positions[rows], *others_at)


def in_callers_order(data: BlockedData, side: str, values: Array, axis: int = 0) -> Array:
    """Put rows (or columns) of a factor in the order in which the caller numbers them."""
    order = data.row_order if side == "rows" else data.col_order
    return values if order is None else np.take(values, inverse(order), axis=axis)


def monitored_cells(monitor: Any, data: BlockedData) -> Cells | None:
    """Find row and column positions of the cells to watch, in the caller's order.

    Parameters
    ----------
    monitor
        None, ``"missing"`` for every missing cell, a boolean mask (I, J), or a
        pair of integer arrays of equal length.

    Raises
    ------
    OptionError
        For anything else, and for positions outside the matrix.
    """
    if monitor is None:
        return None
    if data.grid.is_tensor:
        return cells_of_tensor(monitor, data.grid.sizes)
    if isinstance(monitor, dict) and isinstance(data, CoupledData):
        return _cells_of(monitor, data)
    if isinstance(monitor, str):
        if monitor != "missing":
            raise OptionError(f"{MONITOR}; got {monitor!r}")
        if data.n_missing == 0:
            warn('monitor="missing", but no cell is missing: nothing is monitored', DataWarning)
        cells = data.missing_cells()
    else:
        dims = data.labels.row_dim, data.labels.col_dim
        rows, columns = cells_at(monitor, data.shape, MONITOR, dims, data.labels.keys)
        cells = rows, columns
    return cells if cells[0].size else None


def _cells_of(monitor: dict[str, Any], data: CoupledData) -> Cells | None:
    """Find cells that are named matrix by matrix."""
    names, cells_of_each = [joint.name for joint in data.joints], []
    for name, cells in monitor.items():
        if name not in names:
            raise OptionError(f"monitor names {name!r}, and the matrices are {', '.join(names)}")
        named = cells_at(cells, data.part_shape(name), MONITOR, ("row", "column"))
        cells_of_each.append(data.cells_of(name, *named))
    if not cells_of_each:
        return None
    rows, cols = (np.concatenate(positions) for positions in zip(*cells_of_each, strict=True))
    return (rows, cols) if rows.size else None
