"""State of a chain: bands of factors, monitored cells, evaluations, and parts of a state."""

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.grid import BlockAddress, Grid, block_at, inverse
from daskfactor.machine import single_threaded_blas

if TYPE_CHECKING:
    from daskfactor.data.blocks import BlockedData
    from daskfactor.runs.files import Checkpoints, Late
    from daskfactor.runs.run_writer import Sink

Array = NDArray[Any]

Record = tuple[int, list[Array], dict[Any, float]]
"""Records of a moving band in an operation: position in the plan, draws, sums."""
Band = tuple[int, int]
"""Number of a factor and of a band: factor 0 holds rows, 1 columns, 2 and more further axes."""
CELLS = -1
"""Factor number that stands for monitored cells in keys."""
SMALL_OBJECT = 200
"""Bytes of a small Python object with its slots."""


def _nbytes(*arrays: Array) -> int:
    return SMALL_OBJECT + sum(array.nbytes for array in arrays)


def factor_name(factor: int) -> str:
    """Return the name of a factor in checkpoints, dashboards and errors."""
    return ("rows", "columns")[factor] if factor < 2 else f"factor-{factor}"


def moving_bands(block: BlockAddress) -> tuple[Band, ...]:
    """Return the bands of a block that move to the worker of its row band."""
    return tuple(enumerate(block))[1:]


@dataclass(slots=True)
class FactorBand:
    """One band of a factor with its arrays and records.

    Attributes
    ----------
    offset
        Index of the band's first row in the factor; part of the key of its random numbers.
    values
        The factor, shape (rows, K).
    arrays
        Arrays of the sampler with the shape of ``values`` (metric, moments, momentum), by name.
    counts
        Counters that belong to ``arrays``, by name.
    draws
        Copies of ``values`` at the recorded cycles of the running segment.
    sums
        Log prior density at the evaluated cycles, by cycle; other sums over the band by cycle
        and name, numbers or small arrays.
    """

    offset: int
    values: Array
    arrays: dict[str, Array] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    draws: list[Array] = field(default_factory=list)
    sums: dict[Any, Any] = field(default_factory=dict)

    @property
    def span(self) -> slice:
        """Rows of the factor that the band holds, in the grid's order."""
        return slice(self.offset, self.offset + len(self.values))

    def __sizeof__(self) -> int:
        """Return the size in bytes for Dask, so that workers spill in time."""
        return _nbytes(self.values, *self.arrays.values(), *self.draws)

    def copy(self) -> "FactorBand":
        """Return an independent copy; recorded draws, which never change, are shared."""
        return FactorBand(
            self.offset,
            self.values.copy(),
            {name: array.copy() for name, array in self.arrays.items()},
            dict(self.counts),
            list(self.draws),
            dict(self.sums),
        )


@dataclass(slots=True)
class BlockCells:
    """Monitored cells of one block, and the moments of their predicted means.

    ``at`` holds their indices along each axis within the block, in row-major order; ``where``
    their positions in the caller's list.
    """

    at: tuple[NDArray[np.int32], ...]
    where: NDArray[np.int64]
    mean: Array
    m2: Array
    count: int = 0

    def __sizeof__(self) -> int:
        """Return the size in bytes for Dask."""
        return _nbytes(*self.at, self.where, self.mean, self.m2)

    def copy(self) -> "BlockCells":
        return replace(self, mean=self.mean.copy(), m2=self.m2.copy())


@dataclass(slots=True)
class Evaluation:
    """Sums over the observed entries of one block at the end of one cycle."""

    cycle: int
    block: BlockAddress
    values: NDArray[np.float64]


@dataclass(slots=True)
class ChainState:
    """State of one chain between segments.

    Code outside the executors uses `each`, `gather` and the other methods, so that bands may be in
    other processes.

    Attributes
    ----------
    factors
        Bands of each factor, equally many: of W (rows), of Hᵀ (columns), then of further axes.
    """

    factors: list[list[FactorBand]]
    cells: dict[BlockAddress, BlockCells]
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """Number of bands of each factor."""
        return len(self.factors[0])

    @property
    def n_factors(self) -> int:
        """Number of factors: two for a matrix."""
        return len(self.factors)

    def block_bands(self, block: BlockAddress) -> tuple[FactorBand, ...]:
        """Return the bands of a block, one of each factor."""
        return tuple([bands[n] for bands, n in zip(self.factors, block, strict=True)])

    def copy(self) -> "ChainState":
        return ChainState(
            [list(map(FactorBand.copy, bands)) for bands in self.factors],
            dict(zip(self.cells, map(BlockCells.copy, self.cells.values()), strict=True)),
            list(self.evaluations),
        )

    def replace_with(self, after: "ChainState") -> None:
        """Replace the content of this state, in place, by the state that a plan returned."""
        self.factors, self.cells = after.factors, after.cells
        self.evaluations = after.evaluations

    def local(self) -> "ChainState":
        """Return the state with all bands in this process."""
        return self

    def without_records(self) -> "ChainState":
        """Return the state without draws, sums and evaluations; arrays are shared."""
        return ChainState([list(map(without_records, bands)) for bands in self.factors], self.cells)

    def prepend_records(self, after: "ChainState") -> "ChainState":
        """Return the later state with the records of this one before its own."""
        for band, later in zip(self.bands(), after.bands(), strict=True):
            later.draws, later.sums = [*band.draws, *later.draws], band.sums | later.sums
        after.evaluations = [*self.evaluations, *after.evaluations]
        return after

    def add_evaluations(self, evaluations: Iterable[Evaluation]) -> None:
        """Add evaluations, sorted so that the order is the same for all executors."""
        self.evaluations += sorted(evaluations, key=attrgetter("cycle", "block"))

    def clear_records(self) -> None:
        """Drop the draws, sums and evaluations of the segment."""
        for band in self.bands():
            band.draws.clear()
            band.sums.clear()
        self.evaluations.clear()

    def bands(self, factor: int | None = None) -> list[FactorBand]:
        """Return the bands of one factor, or of all, rows first."""
        return list(itertools.chain(*self.factors)) if factor is None else self.factors[factor]

    def each(
        self, function: Callable[..., Any], factor: int | None = None, *args: Sequence[Any]
    ) -> list[Any]:
        """Call ``function(band, *items)`` in the process of each band; return the results in order.

        Parameters
        ----------
        function
            A function of a module, or a partial of one, because it may be sent to other
            processes. It may change its band in place. Its result should be small: it is sent to
            the caller.
        factor
            0 for the bands of rows, 1 for those of columns, and so on; None for all, rows first.
        args
            Sequences with one item per band.
        """
        with single_threaded_blas():
            bands = zip(self.bands(factor), *args, strict=True)
            return [function(band, *items) for band, *items in bands]

    @property
    def counts(self) -> dict[str, int]:
        """Counters that are the same for all bands."""
        return dict(self.factors[0][0].counts)

    def names(self, factor: int) -> frozenset[str]:
        """Return the names of the arrays that the bands of a factor have."""
        return frozenset(self._arrays(factor, 0)) - {""}

    @property
    def recorded(self) -> int:
        """Number of draws recorded in the segment."""
        return len(self.factors[0][0].draws)

    def sums(self, key: Any, factor: int | None = None) -> list[Any]:
        """Return the ``sums[key]`` of the bands of a factor, or of all."""
        return [band.sums[key] for band in self.bands(factor)]

    def gather(self, side: str | int, name: str | None = None) -> Array:
        """Return a factor, or one of its arrays, of shape (I, K) or (J, K).

        ``side`` is ``"rows"``, ``"columns"`` or the number of a factor. Use `each` for sums over
        bands, which does not move the rows.
        """
        return self._gather_piece(Piece(*self._all_rows(side), name=name))

    def gather_draws(self, side: str | int, part: slice = slice(None)) -> Array:
        """Return some draws of the segment, of shape (draws, I, K) or (draws, J, K)."""
        return self._gather_piece(Piece(*self._all_rows(side), draws=range(self.recorded)[part]))

    # -- results and checkpoints --------------------------------------------------------

    def write(self, sink: "Sink", pieces: Iterable["Piece"]) -> None:
        """Write pieces of factors to the results, from the processes of the bands."""
        for piece in pieces:
            sink.write(piece.path, piece.region, piece.to_result_layout(self._gather_piece(piece)))

    def save(self, checkpoints: "Checkpoints", name: str) -> "Late":
        """Save values and arrays of all bands with the next checkpoint, from their processes.

        Return those that the caller has to save, by their `checkpoint_name`.
        """
        del checkpoints
        sources = self._sources_by_name(name)
        return {key: partial(self._fetch_one, source) for key, source in sources.items()}

    def _sources_by_name(self, name: str) -> dict[str, Any]:
        """Return the sources of all values and arrays, by their `checkpoint_name`."""
        return {
            checkpoint_name(name, factor, number, array): source
            for factor in range(self.n_factors)
            for number in range(len(self._spans(factor)))
            for array, source in self._arrays(factor, number).items()
        }

    def _fetch_one(self, source: Any) -> Array:
        ((_, values),) = self._fetch([source], [slice(None)])
        return values

    def _gather_piece(self, piece: "Piece") -> Array:
        """Return the rows of a piece."""
        parts = piece.parts_of(self._spans(piece.factor), self._sources(piece))
        sources, rows, targets = zip(*parts, strict=True)
        arrays = self._fetch(sources, rows)
        return assemble_rows(piece, ((values, targets[number]) for number, values in arrays))

    def _sources(self, piece: "Piece") -> list[list[Any]]:
        """Return the sources of a piece in all bands: one list, or one per draw."""
        factor, bands = piece.factor, range(len(self._spans(piece.factor)))
        if piece.draws is None:
            return [[self._arrays(factor, number)[piece.name or ""] for number in bands]]
        return [[self._draw(factor, number, draw) for number in bands] for draw in piece.draws]

    def _all_rows(self, side: str | int) -> tuple[int, slice]:
        """Return the number of a factor and the slice of all its rows."""
        factor = side if isinstance(side, int) else int(side != "rows")
        spans = self._spans(factor)
        return factor, slice(spans[0].start, spans[-1].stop)

    # -- sources: arrays here, references to arrays in a `RemoteState` -----------------------

    def _spans(self, factor: int) -> list[slice]:
        """Return the rows of each band of a factor."""
        return [band.span for band in self.bands(factor)]

    def _arrays(self, factor: int, number: int) -> Mapping[str, Any]:
        """Return the sources of a band's arrays by name, and of its values under ``""``."""
        band = self.bands(factor)[number]
        return {"": band.values, **band.arrays}

    def _draw(self, factor: int, number: int, draw: int) -> Any:
        """Return the source of a recorded draw of a band."""
        return self.bands(factor)[number].draws[draw]

    def _fetch(self, sources: Sequence[Any], rows: Sequence[Any]) -> Iterator[tuple[int, Array]]:
        """Yield some rows of each source with its position in the list, in any order."""
        return enumerate(source[index] for source, index in zip(sources, rows, strict=True))


def checkpoint_name(name: str, factor: int, number: int, array: str) -> str:
    """Return the name of a band's array, or of its values (``""``), in a checkpoint."""
    return f"{name}/{factor_name(factor)}/{number}/{array or 'values'}"


class RowPositions:
    """Positions on the grid of the caller's rows of a factor, computed where they are used."""

    def __init__(self, data: "BlockedData", factor: int) -> None:
        self.data, self.factor = data, factor

    def __reduce__(self) -> tuple[Any, ...]:
        return RowPositions, (self.data, self.factor)

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """Position of every row on the grid."""
        layout = self.data.known.layout
        return inverse(np.asarray((layout.row_order, layout.col_order)[self.factor]))


@dataclass(frozen=True)
class Piece:
    """Rows of a factor and the region of an array of the results to write them to.

    Attributes
    ----------
    factor
        Number of the factor: 0 for W, 1 for Hᵀ.
    rows
        Rows in the caller's order.
    grid_rows
        Positions of the caller's rows on the grid; None if the orders are equal.
    name
        Name of an array of the bands; None for the values.
    draws
        Numbers of recorded draws, the first axis; then ``name`` is not used.
    path, region
        Array of the results, and the region of it to write.
    transposed
        True if the results have components first.
    divisor
        Divisor of the values; None for no division.
    """

    factor: int
    rows: slice
    grid_rows: RowPositions | None = None
    name: str | None = None
    draws: range | None = None
    path: str = ""
    region: tuple[Any, ...] = ()
    transposed: bool = False
    divisor: float | None = None

    def parts(self, spans: Iterable[slice]) -> list[tuple[int, Any, Any]]:
        """Return the number, the rows and their target in the piece, for each band of the piece."""
        parts: list[tuple[int, Any, Any]] = []
        rows: Any = self.rows if self.grid_rows is None else self.grid_rows.positions[self.rows]
        for number, span in enumerate(spans):
            if isinstance(rows, slice):
                low, high = max(rows.start, span.start), min(rows.stop, span.stop)
                if low < high:
                    target = slice(low - rows.start, high - rows.start)
                    parts.append((number, slice(low - span.start, high - span.start), target))
            elif (inside := np.flatnonzero((span.start <= rows) & (rows < span.stop))).size:
                parts.append((number, rows[inside] - span.start, inside))
        return parts

    def parts_of(
        self, spans: Iterable[slice], sources: Sequence[Sequence[Any]]
    ) -> list[tuple[Any, Any, Any]]:
        """Return the sources with rows of the piece, these rows, and their target in the piece."""
        parts = self.parts(spans)
        return [
            (bands[number], rows, target if self.draws is None else (draw, target))
            for draw, bands in enumerate(sources)
            for number, rows, target in parts
        ]

    def to_result_layout(self, values: Array) -> Array:
        """Return rows divided and transposed as in the results."""
        values = values if self.divisor is None else values / self.divisor
        return np.swapaxes(values, -1, -2) if self.transposed else values


def assemble_rows(piece: Piece, parts: Iterable[tuple[Array, Any]]) -> Array:
    """Return the rows of a piece, assembled from parts and their targets."""
    count = piece.rows.stop - piece.rows.start
    shape = (count,) if piece.draws is None else (len(piece.draws), count)
    out: Any = None
    for values, at in parts:
        out = np.empty((*shape, *values.shape[1:]), values.dtype) if out is None else out
        out[at] = values
    assembled: Array = out
    return assembled


@dataclass(slots=True)
class Portion:
    """Part of a state that one worker or one task returns after its part of a plan.

    Parts of a moving band (one of columns or of a further axis) may come from several workers: its
    values from one, arrays that later rounds did not need from others. ``records`` are the draws
    and sums of moving bands, which stay on the worker that recorded them.
    """

    bands: dict[Band, FactorBand] = field(default_factory=dict)
    cells: dict[BlockAddress, BlockCells] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    records: dict[Band, list[Record]] = field(default_factory=dict)
    busy: float = 0.0

    def block_bands(self, block: BlockAddress) -> tuple[FactorBand, ...]:
        """Return the bands of a block, one of each factor."""
        return tuple([self.bands[at] for at in enumerate(block)])

    def factor_bands(self, factor: int) -> dict[Band, FactorBand]:
        """Return the bands of one factor."""
        return {at: band for at, band in self.bands.items() if at[0] == factor}

    def copy(self) -> "Portion":
        """Return an independent copy; records, which never change, are shared."""
        return Portion(
            {at: band.copy() for at, band in self.bands.items()},
            {block: cells.copy() for block, cells in self.cells.items()},
            list(self.evaluations),
            {at: list(records) for at, records in self.records.items()},
            self.busy,
        )

    def __sizeof__(self) -> int:
        """Return the size in bytes for Dask."""
        parts = (*self.bands.values(), *self.cells.values())
        records = itertools.chain.from_iterable(self.records.values())
        draws = (draw for _, draws, _ in records for draw in draws)
        return (
            sum(map(sys.getsizeof, parts))
            + sum(draw.nbytes for draw in draws)
            + SMALL_OBJECT * (1 + len(self.evaluations))
        )

    def strip(self, block: BlockAddress, position: int) -> None:
        """Move the records of an operation from its moving bands to ``records``."""
        for at in moving_bands(block):
            band = self.bands[at]
            if band.draws or band.sums:
                self.records.setdefault(at, []).append((position, band.draws, band.sums))
                band.draws, band.sums = [], {}


def select_part(portion: Portion, part: int) -> Portion:
    """Return only the bands of one factor, or only the cells.

    Records and evaluations go with the rows.
    """
    if part == 0:
        return replace(portion, bands=portion.factor_bands(0), cells={})
    if part == CELLS:
        return Portion(cells=portion.cells)
    return Portion(portion.factor_bands(part))


def without_records(band: FactorBand, names: Iterable[str] | None = None) -> FactorBand:
    """Return a band without draws and sums, with all of its arrays or some."""
    arrays = band.arrays if names is None else {name: band.arrays[name] for name in names}
    return FactorBand(band.offset, band.values, dict(arrays), band.counts)


def join_portions(before: ChainState, portions: Sequence[Portion]) -> ChainState:
    """Return the state after a plan, joined from the portions of all workers."""
    parts: dict[Band, list[FactorBand]] = defaultdict(list)
    records: dict[Band, list[Record]] = defaultdict(list)
    for portion in portions:
        for at, band in portion.bands.items():
            parts[at].append(band)
        for at, band_records in portion.records.items():
            records[at] += band_records
    factors = [
        [_joined(band, parts[at, n], records[at, n]) for n, band in enumerate(bands)]
        for at, bands in enumerate(before.factors)
    ]
    after = ChainState(factors, dict(before.cells), list(before.evaluations))
    for portion in portions:
        after.cells.update(portion.cells)
    after.add_evaluations(itertools.chain.from_iterable(part.evaluations for part in portions))
    return after


def _joined(
    before: FactorBand, parts: Sequence[FactorBand], records: Sequence[Record]
) -> FactorBand:
    """Return a band joined from its parts, and from its arrays before that were not sent.

    A band without ``records`` has not moved: its draws and sums are its own.
    """
    after = replace(next(part for part in parts if len(part.values)))
    after.arrays = before.arrays | {k: v for part in parts for k, v in part.arrays.items()}
    records = sorted(records, key=itemgetter(0)) or [(0, after.draws, after.sums)]
    after.draws = [*before.draws, *(draw for _, draws, _ in records for draw in draws)]
    after.sums = before.sums | {k: v for _, _, sums in records for k, v in sums.items()}
    return after


def split_factor(factor: Array, offsets: tuple[int, ...]) -> list[Array]:
    """Return the contiguous bands of a factor, as views if it is contiguous."""
    return [np.ascontiguousarray(factor[low:high]) for low, high in itertools.pairwise(offsets)]


def empty_state(grid: Grid, width: int, dtype: np.dtype[Any]) -> ChainState:
    """Return a state whose bands have no rows yet, to be filled by `ChainState.each`."""
    none = np.empty((0, width), dtype)
    factors = [
        [FactorBand(offset, none.copy()) for offset in side.offsets[:-1]] for side in grid.sides
    ]
    return ChainState(factors, {})


def make_state(grid: Grid, *factors: Array) -> ChainState:
    """Return the state with the factors W (I, K), Hᵀ (J, K), and those of further axes."""
    split = [
        list(map(FactorBand, side.offsets, split_factor(factor, side.offsets)))
        for side, factor in zip(grid.sides, factors, strict=True)
    ]
    return ChainState(split, {})


def place_cells(
    grid: Grid, at: Sequence[NDArray[np.int64]], dtype: np.dtype[Any]
) -> dict[BlockAddress, BlockCells]:
    """Return the monitored cells of each block; ``at`` holds their indices along each axis."""
    bands = [
        np.searchsorted(side.offsets, indices, side="right") - 1
        for side, indices in zip(grid.sides, at, strict=True)
    ]
    code = np.ravel_multi_index(bands, [len(side) for side in grid.sides])
    order = np.lexsort((*reversed(at), code))
    _, starts = np.unique(code[order], return_index=True)
    placed = {}
    for where in np.split(order, starts)[1:]:
        block = block_at(*(int(band[where[0]]) for band in bands))
        placed[block] = BlockCells(
            tuple(
                (indices[where] - side.offsets[band]).astype(np.int32)
                for indices, side, band in zip(at, grid.sides, block, strict=True)
            ),
            where.astype(np.int64),
            np.zeros(where.size, dtype),
            np.zeros(where.size, dtype),
        )
    return placed
