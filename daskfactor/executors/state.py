"""What executors move about: bands of factors, statistics of blocks, and parts of them."""

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
    from daskfactor.results.files import Checkpoints, Late
    from daskfactor.results.run_writer import Sink

Array = NDArray[Any]


Record = tuple[int, list[Array], dict[Any, float]]
"""What a band that travels recorded in an operation: position along the plan, draws, sums."""
Band = tuple[int, int]
"""A factor and the number of a band: factor 0 has the rows, 1 the columns, a tensor more."""
CELLS = -1
"""What monitored cells have in place of a factor, where bands and they are told apart."""
SMALL_OBJECT = 200
"""Bytes of a small Python object with its slots."""


def _nbytes(*arrays: Array) -> int:
    return SMALL_OBJECT + sum(array.nbytes for array in arrays)


def factor_name(factor: int) -> str:
    """Name a factor: in checkpoints, on dashboards, and in errors."""
    return ("rows", "columns")[factor] if factor < 2 else f"factor-{factor}"


def travellers(block: BlockAddress) -> tuple[Band, ...]:
    """Return the bands of a block that go where its row band is."""
    return tuple(enumerate(block))[1:]


@dataclass(slots=True)
class FactorBand:
    """One band of a factor with everything that travels with it.

    Attributes
    ----------
    offset
        Global number of the band's first row (part of the noise's address).
    values
        The factor, shape (rows, K).
    arrays
        Whatever the sampler keeps per entry (metric, moments, momentum), by
        name, each of the shape of ``values``.
    counts
        Small counters that belong to ``arrays``, by name.
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
        """Which rows of the whole factor these are, in the grid's order."""
        return slice(self.offset, self.offset + len(self.values))

    def __sizeof__(self) -> int:
        """Return the bytes that Dask is to count, so that workers spill in time."""
        return _nbytes(self.values, *self.arrays.values(), *self.draws)

    def copy(self) -> "FactorBand":
        """An independent copy; recorded draws are never written to and stay shared."""
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

    ``at`` has their positions along each axis, local to the block, in row-major order;
    ``where`` is their position in the caller's list.
    """

    at: tuple[NDArray[np.int32], ...]
    where: NDArray[np.int64]
    mean: Array
    m2: Array
    count: int = 0

    def __sizeof__(self) -> int:
        """Return the bytes that Dask is to count."""
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
    """Everything one chain carries from segment to segment.

    Whatever is not an executor asks a state and its bands through `each`, `gather` and the small
    methods beside them, so that bands may lie in other processes.

    Attributes
    ----------
    factors
        The bands of each factor, as many of every one: first W's, of rows, then Hᵀ's, of columns,
        then those of further axes.
    """

    factors: list[list[FactorBand]]
    cells: dict[BlockAddress, BlockCells]
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """Bands of each factor."""
        return len(self.factors[0])

    @property
    def n_factors(self) -> int:
        """Two for a matrix."""
        return len(self.factors)

    def met(self, block: BlockAddress) -> tuple[FactorBand, ...]:
        """Return the bands that an operation in a block touches, one of each factor."""
        return tuple([bands[n] for bands, n in zip(self.factors, block, strict=True)])

    def copy(self) -> "ChainState":
        return ChainState(
            [list(map(FactorBand.copy, bands)) for bands in self.factors],
            dict(zip(self.cells, map(BlockCells.copy, self.cells.values()), strict=True)),
            list(self.evaluations),
        )

    def become(self, after: "ChainState") -> None:
        """Take over what a plan has left of this state, whoever else refers to it."""
        self.factors, self.cells = after.factors, after.cells
        self.evaluations = after.evaluations

    def local(self) -> "ChainState":
        """Return the state with all bands in the caller's process."""
        return self

    def bare(self) -> "ChainState":
        """Return the state without what it has recorded; it shares all arrays."""
        return ChainState([list(map(bare, bands)) for bands in self.factors], self.cells)

    def followed_by(self, after: "ChainState") -> "ChainState":
        """Return what a plan made of `bare`, with what had been recorded before."""
        for band, own in zip(self.bands(), after.bands(), strict=True):
            own.draws, own.sums = [*band.draws, *own.draws], band.sums | own.sums
        after.evaluations = [*self.evaluations, *after.evaluations]
        return after

    def settle(self, evaluations: Iterable[Evaluation]) -> None:
        """Take evaluations in, in the one order that all executors share."""
        self.evaluations += sorted(evaluations, key=attrgetter("cycle", "block"))

    def forget(self) -> None:
        """Drop what the running segment recorded, once it has been read."""
        for band in self.bands():
            band.draws.clear()
            band.sums.clear()
        self.evaluations.clear()

    def bands(self, factor: int | None = None) -> list[FactorBand]:
        """Return the bands of one factor, or all, rows first."""
        return list(itertools.chain(*self.factors)) if factor is None else self.factors[factor]

    def each(
        self, function: Callable[..., Any], factor: int | None = None, *given: Sequence[Any]
    ) -> list[Any]:
        """Call ``function(band, *own)`` for bands where they lie; give the results in their order.

        Parameters
        ----------
        function
            One of a module, or a partial of one, because it may go to other processes. It may
            change its band in place. What it returns is small: it comes to the caller.
        factor
            0 for the bands of rows, 1 for those of columns, and so on; None for all, rows first.
        given
            Sequences with an item for each of these bands.
        """
        with single_threaded_blas():
            at = zip(self.bands(factor), *given, strict=True)
            return [function(band, *own) for band, *own in at]

    @property
    def counts(self) -> dict[str, int]:
        """Counters that all bands have in common."""
        return dict(self.factors[0][0].counts)

    def names(self, factor: int) -> frozenset[str]:
        """Return the names of the arrays that the bands of a factor have."""
        return frozenset(self._arrays(factor, 0)) - {""}

    @property
    def recorded(self) -> int:
        """Draws of the running segment that have been recorded."""
        return len(self.factors[0][0].draws)

    def sums(self, key: Any, factor: int | None = None) -> list[Any]:
        """Return what the bands of a factor, or all, recorded under a key of their ``sums``."""
        return [band.sums[key] for band in self.bands(factor)]

    def gather(self, side: str | int, name: str | None = None) -> Array:
        """Bring a whole factor (or one of its arrays) to the caller: shape (I, K) or (J, K).

        ``side`` is ``"rows"``, ``"columns"`` or the number of a factor. For results, and for what
        needs all rows at once; sums of bands are for `each`.
        """
        return self._taken(Piece(*self._whole(side), name=name))

    def gather_draws(self, side: str | int, part: slice = slice(None)) -> Array:
        """Bring some draws of the segment to the caller: (draws, I, K) or (draws, J, K)."""
        return self._taken(Piece(*self._whole(side), draws=range(self.recorded)[part]))

    # -- what results and checkpoints take ---------------------------------------------

    def write(self, sink: "Sink", pieces: Iterable["Piece"]) -> None:
        """Write pieces of factors into the results, from where the bands are."""
        for piece in pieces:
            sink.write(piece.path, piece.region, piece.settled(self._taken(piece)))

    def save(self, kept: "Checkpoints", name: str) -> "Late":
        """Save values and arrays of all bands with the next checkpoint, where they are.

        Returned is what could not be saved there, by the names that `saved_as` gives.
        """
        del kept
        return {own: partial(self._all_of, source) for own, source in self._named(name).items()}

    def _named(self, name: str) -> dict[str, Any]:
        """Return the sources of all values and arrays, under what they are saved as."""
        return {
            saved_as(name, factor, number, own): source
            for factor in range(self.n_factors)
            for number in range(len(self._spans(factor)))
            for own, source in self._arrays(factor, number).items()
        }

    def _all_of(self, source: Any) -> Array:
        ((_, values),) = self._bring([source], [slice(None)])
        return values

    def _taken(self, piece: "Piece") -> Array:
        """Bring the rows of a piece to the caller."""
        at = piece.at(self._spans(piece.factor), self._sources(piece))
        sources, rows, places = zip(*at, strict=True)
        found = self._bring(sources, rows)
        return put_together(piece, ((values, places[number]) for number, values in found))

    def _sources(self, piece: "Piece") -> list[list[Any]]:
        """Return the sources of all bands of what a piece is of, of one draw after another."""
        factor, bands = piece.factor, range(len(self._spans(piece.factor)))
        if piece.draws is None:
            return [[self._arrays(factor, number)[piece.name or ""] for number in bands]]
        return [[self._draw(factor, number, draw) for number in bands] for draw in piece.draws]

    def _whole(self, side: str | int) -> tuple[int, slice]:
        """Return the number of a factor, and all of its rows."""
        factor = side if isinstance(side, int) else int(side != "rows")
        spans = self._spans(factor)
        return factor, slice(spans[0].start, spans[-1].stop)

    # -- sources of arrays: here these themselves, elsewhere what says where they are ------

    def _spans(self, factor: int) -> list[slice]:
        """Return the rows of each band of a factor."""
        return [band.span for band in self.bands(factor)]

    def _arrays(self, factor: int, number: int) -> Mapping[str, Any]:
        """Return the sources of a band's arrays by name, and of its values under ``""``."""
        band = self.bands(factor)[number]
        return {"": band.values, **band.arrays}

    def _draw(self, factor: int, number: int, draw: int) -> Any:
        """Return the source of a draw of a band, of those that the segment has recorded."""
        return self.bands(factor)[number].draws[draw]

    def _bring(self, sources: Sequence[Any], rows: Sequence[Any]) -> Iterator[tuple[int, Array]]:
        """Bring some rows of arrays to the caller, with their places in the list, in any order."""
        return enumerate(source[own] for source, own in zip(sources, rows, strict=True))


def saved_as(name: str, factor: int, number: int, array: str) -> str:
    """Name an array of a band, or under ``""`` its values, in the checkpoint of a state."""
    return f"{name}/{factor_name(factor)}/{number}/{array or 'values'}"


class Places:
    """Where the grid has the caller's rows of a factor, found in the process that asks for it."""

    def __init__(self, data: "BlockedData", factor: int) -> None:
        self.data, self.factor = data, factor

    def __reduce__(self) -> tuple[Any, ...]:
        return Places, (self.data, self.factor)

    @cached_property
    def found(self) -> NDArray[np.int64]:
        """The place of every row."""
        layout = self.data.known.layout
        return inverse(np.asarray((layout.row_order, layout.col_order)[self.factor]))


@dataclass(frozen=True)
class Piece:
    """Rows of a factor, and the region of an array of the results that they fill.

    Attributes
    ----------
    factor
        0 for W, 1 for Hᵀ.
    rows
        Which ones, as the caller numbers them.
    places
        Where the grid has them; None where it has the caller's order.
    name
        An array of the bands; None for the values.
    draws
        Numbers of draws that the running segment has recorded, in place of ``name``: the first
        axis.
    path, region
        Where they go.
    turned
        Whether the results have components first.
    divisor
        What values are divided by, if by anything.
    """

    factor: int
    rows: slice
    places: Places | None = None
    name: str | None = None
    draws: range | None = None
    path: str = ""
    region: tuple[Any, ...] = ()
    turned: bool = False
    divisor: float | None = None

    def parts(self, spans: Iterable[slice]) -> list[tuple[int, Any, Any]]:
        """Return the bands that have rows of it: their number, which rows, and where they go."""
        found: list[tuple[int, Any, Any]] = []
        rows: Any = self.rows if self.places is None else self.places.found[self.rows]
        for number, span in enumerate(spans):
            if isinstance(rows, slice):
                low, high = max(rows.start, span.start), min(rows.stop, span.stop)
                if low < high:
                    at = slice(low - rows.start, high - rows.start)
                    found.append((number, slice(low - span.start, high - span.start), at))
            elif (among := np.flatnonzero((span.start <= rows) & (rows < span.stop))).size:
                found.append((number, rows[among] - span.start, among))
        return found

    def at(
        self, spans: Iterable[slice], sources: Sequence[Sequence[Any]]
    ) -> list[tuple[Any, Any, Any]]:
        """Return where its rows are: sources, which rows, and where they go."""
        parts = self.parts(spans)
        return [
            (own[number], rows, at if self.draws is None else (place, at))
            for place, own in enumerate(sources)
            for number, rows, at in parts
        ]

    def settled(self, values: Array) -> Array:
        """Return rows as the results have them."""
        values = values if self.divisor is None else values / self.divisor
        return np.swapaxes(values, -1, -2) if self.turned else values


def put_together(piece: Piece, parts: Iterable[tuple[Array, Any]]) -> Array:
    """Put the rows of a piece together from those of bands, each with where they go."""
    count = piece.rows.stop - piece.rows.start
    shape = (count,) if piece.draws is None else (len(piece.draws), count)
    out: Any = None
    for values, at in parts:
        out = np.empty((*shape, *values.shape[1:]), values.dtype) if out is None else out
        out[at] = values
    whole: Array = out
    return whole


@dataclass(slots=True)
class Portion:
    """What one worker, or one task, leaves behind of its part of a plan.

    A band that travels, which is one of columns or of a further axis, may come from several: its
    values from one, and arrays that later rounds did not need from others. ``records`` are what
    such bands recorded on their way, which stays where it was recorded.
    """

    bands: dict[Band, FactorBand] = field(default_factory=dict)
    cells: dict[BlockAddress, BlockCells] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    records: dict[Band, list[Record]] = field(default_factory=dict)
    busy: float = 0.0

    def met(self, block: BlockAddress) -> tuple[FactorBand, ...]:
        """Return the bands that an operation in a block touches, one of each factor."""
        return tuple([self.bands[at] for at in enumerate(block)])

    def of(self, factor: int) -> dict[Band, FactorBand]:
        """Return the bands of one factor."""
        return {at: band for at, band in self.bands.items() if at[0] == factor}

    def copy(self) -> "Portion":
        """An independent copy; what was recorded is never written to and stays shared."""
        return Portion(
            {at: band.copy() for at, band in self.bands.items()},
            {block: cells.copy() for block, cells in self.cells.items()},
            list(self.evaluations),
            {at: list(records) for at, records in self.records.items()},
            self.busy,
        )

    def __sizeof__(self) -> int:
        """Return the bytes that Dask is to count."""
        parts = (*self.bands.values(), *self.cells.values())
        draws = (d for found in self.records.values() for _, own, _ in found for d in own)
        return (
            sum(map(sys.getsizeof, parts))
            + sum(draw.nbytes for draw in draws)
            + SMALL_OBJECT * (1 + len(self.evaluations))
        )

    def strip(self, block: BlockAddress, position: int) -> None:
        """Take what bands recorded in an operation off those that travel."""
        for at in travellers(block):
            band = self.bands[at]
            if band.draws or band.sums:
                self.records.setdefault(at, []).append((position, band.draws, band.sums))
                band.draws, band.sums = [], {}


def ending(portion: Portion, part: int) -> Portion:
    """Return a factor's bands or the cells alone, so that the rest need not travel or be kept.

    What was recorded and evaluated on the way goes with the rows.
    """
    if part == 0:
        return replace(portion, bands=portion.of(0), cells={})
    return Portion(cells=portion.cells) if part == CELLS else Portion(portion.of(part))


def bare(band: FactorBand, names: Iterable[str] | None = None) -> FactorBand:
    """Return a band without what it has recorded, with all of its arrays or some."""
    arrays = band.arrays if names is None else {name: band.arrays[name] for name in names}
    return FactorBand(band.offset, band.values, dict(arrays), band.counts)


def join_portions(before: ChainState, portions: Sequence[Portion]) -> ChainState:
    """Put a state together from what workers left behind; the one before is not changed."""
    parts: dict[Band, list[FactorBand]] = defaultdict(list)
    records: dict[Band, list[Record]] = defaultdict(list)
    for portion in portions:
        for at, band in portion.bands.items():
            parts[at].append(band)
        for at, own in portion.records.items():
            records[at] += own
    factors = [
        [_joined(band, parts[at, n], records[at, n]) for n, band in enumerate(bands)]
        for at, bands in enumerate(before.factors)
    ]
    after = ChainState(factors, dict(before.cells), list(before.evaluations))
    for portion in portions:
        after.cells.update(portion.cells)
    after.settle(found for portion in portions for found in portion.evaluations)
    return after


def _joined(
    before: FactorBand, parts: Sequence[FactorBand], records: Sequence[Record]
) -> FactorBand:
    """Return a band with what it had before it was sent out and did not take along.

    One that stayed where it was has its records with it.
    """
    after = replace(next(part for part in parts if len(part.values)))
    after.arrays = before.arrays | {k: v for part in parts for k, v in part.arrays.items()}
    records = sorted(records, key=itemgetter(0)) or [(0, after.draws, after.sums)]
    after.draws = [*before.draws, *(draw for _, draws, _ in records for draw in draws)]
    after.sums = before.sums | {k: v for _, _, sums in records for k, v in sums.items()}
    return after


def split_factor(factor: Array, offsets: tuple[int, ...]) -> list[Array]:
    """Cut a factor into contiguous bands; views where the factor allows it."""
    return [np.ascontiguousarray(factor[low:high]) for low, high in itertools.pairwise(offsets)]


def empty_state(grid: Grid, width: int, dtype: np.dtype[Any]) -> ChainState:
    """Make a state whose bands have no rows yet; `ChainState.each` gives them some."""
    none = np.empty((0, width), dtype)
    factors = [
        [FactorBand(offset, none.copy()) for offset in side.offsets[:-1]] for side in grid.sides
    ]
    return ChainState(factors, {})


def make_state(grid: Grid, *factors: Array) -> ChainState:
    """Make a chain's state from whole factors: W (I, K), Hᵀ (J, K), and those of further axes."""
    split = [
        list(map(FactorBand, side.offsets, split_factor(factor, side.offsets)))
        for side, factor in zip(grid.sides, factors, strict=True)
    ]
    return ChainState(split, {})


def place_cells(
    grid: Grid, at: Sequence[NDArray[np.int64]], dtype: np.dtype[Any]
) -> dict[BlockAddress, BlockCells]:
    """Sort monitored cells into the blocks they lie in; ``at`` has their positions on each axis."""
    bands = [
        np.searchsorted(side.offsets, own, side="right") - 1
        for side, own in zip(grid.sides, at, strict=True)
    ]
    code = np.ravel_multi_index(bands, [len(side) for side in grid.sides])
    order = np.lexsort((*reversed(at), code))
    _, starts = np.unique(code[order], return_index=True)
    placed = {}
    for where in np.split(order, starts)[1:]:
        block = block_at(*(int(band[where[0]]) for band in bands))
        placed[block] = BlockCells(
            tuple(
                (own[where] - side.offsets[band]).astype(np.int32)
                for own, side, band in zip(at, grid.sides, block, strict=True)
            ),
            where.astype(np.int64),
            np.zeros(where.size, dtype),
            np.zeros(where.size, dtype),
        )
    return placed
