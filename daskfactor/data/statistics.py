"""Statistics of the observed entries of a matrix, and its origin.

Dense blocks are scanned in fixed tiles of rows that are copied first, so that sums and checksums
do not depend on the memory layout of a block or on its source.
"""

import hashlib
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import warn
from daskfactor.data.grid import Block, BlockAddress, Grid
from daskfactor.data.labels import NAMED, Labels
from daskfactor.data.storage import FloatArray, FloatType, as_bytes
from daskfactor.errors import DataError, DataWarning
from daskfactor.kernels.views import AnyBlock, BlockView, SparseBlock, TensorBlock
from daskfactor.machine import available_memory

NUMERIC = "biuf"
"""Kinds of NumPy dtypes that hold real numbers."""

_ADVICE = {
    "c": "take their modulus (numpy.abs) or their real part (numpy.real)",
    "M": "turn times into numbers, for example (V - V.min()) / numpy.timedelta64(1, 's')",
    "m": "turn times into numbers, for example V / numpy.timedelta64(1, 's')",
}
TILE_ENTRIES = 65_536
TILE_COUNTS = 2**21
EACH, LARGE = 32, 2**28
"""Minimum bytes per row or column, and the total below which free memory is not checked."""

Cell = tuple[int, ...]
Locate = Callable[[int], Cell]
"""Function from the position of an entry among some values to its row and column."""


CODES: Final = frozenset({-9.0, -99.0, -999.0, -9999.0, -99999.0, -32768.0})
"""Values that tables often use for missing cells where real values are not negative."""


@dataclass(frozen=True)
class SourceInfo:
    """Origin of a matrix.

    ``kind`` is ``"numpy"``, ``"dask"``, ``"zarr"``, ``"xarray"``, ``"pandas"``, ``"scipy"``,
    ``"sparse"``, ``"anndata"`` or ``"blocks"`` (a blocked sparse store). ``location`` is a path or
    URL that ``as_blocks`` accepts again, or None. ``lazy`` is True if the input was not in memory.
    ``rule`` is how values become weights of cells, if they do (see
    `daskfactor.data.loading.as_weights`). ``layer`` and ``mask_var`` are those of an AnnData.
    ``table`` holds the columns of a long table, as `daskfactor.data.tables.ReadOptions` has them.
    """

    kind: str
    location: str | None = None
    lazy: bool = False
    rule: str | None = None
    layer: str | None = None
    mask_var: str | None = None
    table: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return kind and location, and the layer, mask or columns if they were chosen."""
        part = {"layer": self.layer, "mask_var": self.mask_var, "table": self.table}
        selection = {name: value for name, value in part.items() if value is not None}
        location = None if self.location is None else str(self.location)
        return {"kind": self.kind, "location": location, **selection}


class Layout(NamedTuple):
    """Order of rows and columns, and the meaning of entries that sparse blocks do not store.

    ``unstored`` is ``"zero"`` or ``"missing"``, None for dense blocks, or a dict by block where
    blocks differ; ``row_order`` (I,) and ``col_order`` (J,) hold the caller's row and column at
    each position of the grid, None if they were not permuted.
    """

    unstored: str | Mapping[Block, str | None] | None = None
    row_order: NDArray[np.int64] | None = None
    col_order: NDArray[np.int64] | None = None

    def callers(self, row: Any, col: Any) -> tuple[Any, Any]:
        """Return the caller's row and column numbers of cells of the grid."""
        return (
            row if self.row_order is None else self.row_order[row],
            col if self.col_order is None else self.col_order[col],
        )


DENSE = Layout()


def check_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a matrix, refused unless it holds real numbers."""
    if dtype.kind not in NUMERIC:
        advice = _ADVICE.get(dtype.kind, "convert them, for example with .astype('float64')")
        raise DataError(
            f"the entries have dtype {dtype}; they must be real numbers (bool, integer or float, "
            f"NaN where missing); {advice}"
        )
    return dtype


def check_shape(piece: Any, shape: tuple[int, int], row0: int, col0: int) -> None:
    """Refuse a piece whose shape differs from the one that its source declared."""
    if tuple(np.shape(piece)) != shape:
        raise DataError(
            f"the data say that their piece at row {row0}, column {col0} is {shape[0]} x "
            f"{shape[1]}, but reading it gave shape {tuple(np.shape(piece))}; if they are a dask "
            "array, name the true chunks where you make it (map_blocks(..., chunks=...)), or call "
            "its compute_chunk_sizes()"
        )


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the numbers of rows and columns, refused unless both are positive."""
    if len(shape) != 2:
        tensor = ", or in Python pass CP(...) to factor them as a tensor"
        raise DataError(
            f"the data have {len(shape)} dimension{'' if len(shape) == 1 else 's'}, shape "
            f"{tuple(shape)}; a matrix with rows and columns is needed, so select or reshape to "
            f"two dimensions{tensor if len(shape) > 2 else ''}"
        )
    rows, cols = (int(side) for side in shape)
    if not rows or not cols:
        raise DataError(
            f"the data are empty, shape {rows} x {cols}; pass at least one row and one column"
        )
    countable((rows, cols))
    return rows, cols


def countable(shape: tuple[int, int]) -> None:
    """Refuse more rows and columns than there is memory to count entries for."""
    nbytes = EACH * sum(shape)
    if nbytes > LARGE and nbytes > available_memory():
        raise DataError(
            f"the data have shape {shape[0]} x {shape[1]}; counts of every row and column "
            f"take {nbytes} bytes, more than is free"
        )


class WeightSums(NamedTuple):
    """Sums of the weights of observed cells: by block (B, B), row (I,) and column (J,).

    The last two fields are sums of squared weights, by row and by column.
    """

    blocks: NDArray[np.float64]
    rows: NDArray[np.float64]
    cols: NDArray[np.float64]
    row_squares: NDArray[np.float64]
    col_squares: NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """Counts and moments of the observed entries of a matrix.

    ``n_observed`` is (B, B), one count per block; ``row_observed`` (I,) and ``col_observed`` (J,)
    count per row and column; ``total`` is the sum of the observed values, ``minimum`` and
    ``maximum`` their extremes; ``n_stored`` is (B, B), the number of entries that sparse blocks
    store, None for dense blocks; ``mass`` holds the sums of the weights of cells, if there are any;
    ``kind`` is ``"uncertainty"`` (one over the variance) or ``"weights"`` (factors of
    log-likelihoods).
    """

    n_observed: NDArray[np.int64]
    row_observed: NDArray[np.int64]
    col_observed: NDArray[np.int64]
    total: float
    minimum: float
    maximum: float
    is_integer: bool
    fingerprint: str
    n_stored: NDArray[np.int64] | None = None
    mass: WeightSums | None = None
    kind: str | None = None


class DataInfo(NamedTuple):
    """Description of blocked data: everything except the blocks."""

    grid: Grid
    labels: Labels
    statistics: Statistics
    source: SourceInfo
    dtype: FloatType
    layout: Layout = DENSE


class Weighing(NamedTuple):
    """Kind of the weights of cells, and the error for an observed cell without weight."""

    kind: str
    refuse: Callable[[int, int], DataError]


class StatisticsBuilder:
    """Statistics of a matrix or a tensor, accumulated block by block.

    NaN is a missing entry; entries that sparse blocks do not store are observed zeros or missing,
    as the layout says. Blocks have weights of cells if ``weighing`` is passed. Blocks of a matrix
    come in any order, those of a tensor in that of its grid.
    """

    def __init__(
        self,
        grid: Grid,
        labels: Labels,
        layout: Layout = DENSE,
        weighing: Weighing | None = None,
    ) -> None:
        square, (height, width) = (grid.blocks,) * len(grid.sides), grid.shape
        self._grid = grid
        self._labels = labels
        self._layout = layout
        self._stored = np.zeros(square, np.int64)
        self._observed = np.zeros(square, np.int64)
        self._checksums = np.zeros(square, np.uint32)
        self._digest = hashlib.blake2b(digest_size=16)  # of a tensor
        self._digest.update(repr((grid.sides, layout.unstored)).encode())
        self._totals = np.zeros(square)
        self._counts = [np.zeros(size, np.int64) for size in grid.sizes]
        self._low, self._high = math.nan, math.nan
        self._is_integer = True
        self._coded: dict[float | None, int] = {}
        self._weighing = weighing
        sides = np.zeros(height), np.zeros(width)
        self._mass = WeightSums(np.zeros(square), *sides, *(np.zeros_like(side) for side in sides))

    def scan(self, block: BlockAddress, view: AnyBlock | TensorBlock) -> None:
        """Add one block."""
        if isinstance(view, BlockView):
            self._scan_dense(block, view.block, view.weights)
        else:
            self._scan_sparse(block, view)

    def scan_all(
        self, views: Iterable[tuple[Any, Any]], put: Callable[[Any, Any], None]
    ) -> "StatisticsBuilder":
        """Add blocks as they come, and pass each of them on to ``put``; return self."""
        for block, view in views:
            self.scan(block, view)
            put(block, view)
        return self

    def finish(self, source: SourceInfo, dtype: FloatType, allow_empty: bool = False) -> DataInfo:
        """Return the description of the matrix, after the last block."""
        statistics = Statistics(
            n_observed=self._observed,
            row_observed=self._counts[0],
            col_observed=np.concatenate(self._counts[1:]),
            total=math.fsum(self._totals.ravel()),
            minimum=self._low,
            maximum=self._high,
            is_integer=self._is_integer,
            fingerprint=self._fingerprint(),
            n_stored=self._stored if self._layout.unstored else None,
            mass=self._mass if self._weighing else None,
            kind=self._weighing.kind if self._weighing else None,
        )
        info = DataInfo(self._grid, self._labels, statistics, source, dtype, self._layout)
        if source.rule is None:  # for weights, missing cells are reported with the data
            refuse_unobserved(info, allow_empty)
            self._warn_of_codes()
        return info

    def _warn_of_codes(self) -> None:
        """Warn if the only negative value looks like a code for missing cells."""
        if len(self._coded) == 1 and None not in self._coded:
            ((code, count),) = self._coded.items()
            warn(
                f"{count} cells are {code:g}, and no other value is negative: if that stands for "
                "missing cells, set them to NaN; otherwise they are data",
                DataWarning,
            )

    def _scan_dense(
        self, block: BlockAddress, values: FloatArray, weights: FloatArray | None
    ) -> None:
        width = values.shape[1]
        height = max(1, TILE_ENTRIES // width)
        rows, cols = self._grid.slices(block)
        checksum, total = 0, 0.0
        for start in range(0, values.shape[0], height):
            # Adding zero copies, makes the tile contiguous and turns -0.0 into 0.0.
            tile = values[start : start + height] + values.dtype.type(0)
            first = rows.start + start
            observed = ~np.isnan(tile)
            everything = bool(observed.all())
            if not everything:
                tile[~observed] = np.nan
            checksum = zlib.crc32(tile.data, checksum)
            self._extend(tile, dense_cells(first, cols.start, width))
            self._counts[0][first : first + tile.shape[0]] += observed.sum(1)
            self._counts[1][cols] += observed.sum(0)
            if weights is not None:
                q = np.where(observed, weights[start : start + height], 0).astype(np.float64)
                self._weigh(block, dense_cells(first, cols.start, width), q)
                tile_rows = slice(first, first + tile.shape[0])
                self._mass.rows[tile_rows] += q.sum(1)
                self._mass.cols[cols] += q.sum(0)
                self._mass.row_squares[tile_rows] += (q * q).sum(1)
                self._mass.col_squares[cols] += (q * q).sum(0)
            if not everything:
                tile[~observed] = 0
            self._is_integer = self._is_integer and bool((tile == np.rint(tile)).all())
            total += float(tile.sum(dtype=np.float64))
            self._observed[block] += int(np.count_nonzero(observed))
        self._checksums[block] = checksum
        self._totals[block] = total
        self._stored[block] = values.size

    def _scan_sparse(self, block: BlockAddress, view: SparseBlock | TensorBlock) -> None:
        values, stored, cells = view.values, view.values.size, math.prod(view.shape)
        is_missing = np.isnan(values)
        missing = int(np.count_nonzero(is_missing))
        self._stored[block] = stored
        self._observed[block] = (cells if view.zeros else stored) - missing
        # Entries are sorted, and NaN and zero have one bit pattern each.
        if isinstance(view, TensorBlock):
            for array in view.stored:
                self._digest.update(as_bytes(np.ascontiguousarray(array)))
        else:
            lengths = np.diff(view.indptr).astype(np.int64)
            self._checksums[block] = crc32((lengths, view.indices, values))
        self._count(block, view, is_missing if missing else None)
        if isinstance(view, SparseBlock) and view.weights is not None:
            self._weigh_sparse(block, view)
        if view.zeros and stored < cells:
            self._low, self._high = float(np.fmin(self._low, 0)), float(np.fmax(self._high, 0))
        if missing == stored:
            return
        self._extend(values, partial(cell_of, self._grid, self._layout, block, view))
        observed = values[~is_missing] if missing else values
        # A sum of single-precision values depends on where they are converted.
        precise = observed.astype(np.float64) if isinstance(view, TensorBlock) else observed
        self._totals[block] = precise.sum(dtype=np.float64)
        self._is_integer = self._is_integer and bool((observed == np.rint(observed)).all())

    def _weigh(self, block: BlockAddress, locate: Locate, weights: FloatArray) -> None:
        """Add weights of observed cells to the sum of their block; refuse NaN."""
        total = float(weights.sum())
        if math.isnan(total) and self._weighing is not None:
            raise self._weighing.refuse(*locate(int(np.argmax(np.isnan(weights)))))
        self._mass.blocks[block] += total

    def _weigh_sparse(self, block: BlockAddress, view: SparseBlock) -> None:
        """Add up the weights of a block; zeros that it does not store have weight 1."""
        assert view.weights is not None
        rows, cols = self._grid.slices(block)
        seen, zeros = ~np.isnan(view.values), int(view.zeros)
        q = np.where(seen, view.weights, 0).astype(np.float64)
        self._weigh(block, partial(cell_of, self._grid, self._layout, block, view), q)
        self._mass.blocks[block] += zeros * (view.m * view.n - q.size)
        index, columns = stored_cells(view)
        by_rows, by_cols = (self._mass.rows, self._mass.row_squares), self._mass[2::2]
        for squared, of_rows, of_cols in zip((q, q * q), by_rows, by_cols, strict=True):
            of_rows[rows] += zeros * view.n + np.bincount(index, squared - zeros, view.m)
            of_cols[cols] += zeros * view.m + np.bincount(columns, squared - zeros, view.n)

    def _count(
        self,
        block: BlockAddress,
        view: SparseBlock | TensorBlock,
        is_missing: NDArray[np.bool_] | None,
    ) -> None:
        """Count the observed entries of a block along every axis."""
        indices = indices_of(view)
        counts = [
            count[part] for count, part in zip(self._counts, self._grid.slices(block), strict=True)
        ]
        if view.zeros:
            for count in counts:
                count += math.prod(view.shape) // count.size
        else:
            counts[0] += np.diff(view.indptr)
            for count, places in zip(counts[1:], indices, strict=True):
                count += np.bincount(places, minlength=count.size)
        if is_missing is not None:
            rows = np.searchsorted(view.indptr, np.flatnonzero(is_missing), side="right") - 1
            others = [places[is_missing] for places in indices]
            for count, places in zip(counts, (rows, *others), strict=True):
                count -= np.bincount(places, minlength=count.size)

    def _extend(self, values: FloatArray, locate: Locate) -> None:
        """Update the extremes, and refuse infinite values."""
        low, high = float(np.fmin.reduce(values, None)), float(np.fmax.reduce(values, None))
        if math.isinf(low) or math.isinf(high):
            position = int(np.argmax(np.isinf(values)))
            raise infinite(self._labels, locate(position), float(values.flat[position]))
        self._low, self._high = float(np.fmin(self._low, low)), float(np.fmax(self._high, high))
        if low < 0:
            coded = values[values < 0] if low in CODES else np.empty(0)
            key = low if coded.size and np.all(coded == low) else None
            self._coded[key] = self._coded.get(key, 0) + coded.size

    def _fingerprint(self) -> str:
        rows, cols = self._grid.shape
        if self._grid.is_tensor:
            sizes = "x".join(map(str, self._grid.sizes))
            return f"{sizes} {int(self._observed.sum())} {self._digest.hexdigest()}"
        digest = hashlib.blake2b(digest_size=8)
        digest.update(repr((self._grid.rows.offsets, self._grid.cols.offsets)).encode())
        if self._layout.unstored:
            digest.update(f"unstored {_by_block(self._layout.unstored)}".encode())
            for order in (self._layout.row_order, self._layout.col_order):
                digest.update(b"" if order is None else order.astype("<i8").tobytes())
        digest.update(self._observed.astype("<i8").tobytes())
        digest.update(self._checksums.astype("<u4").tobytes())
        return f"{rows}x{cols}-{int(self._observed.sum())}-{digest.hexdigest()}"


def _by_block(unstored: Any) -> str:
    """Return the meaning of unstored entries as text that is equal for equal layouts."""
    if isinstance(unstored, str):
        return unstored
    return ",".join(f"{row} {col} {meaning}" for (row, col), meaning in sorted(unstored.items()))


def cell_name(labels: Labels, cell: Cell) -> str:
    """Return the name of a cell of a matrix or a tensor, for messages."""
    return labels.cell(*cell) if len(cell) == 2 else str(cell)


def infinite(labels: Labels, cell: Cell, value: float) -> DataError:
    """Return the error for an infinite entry."""
    return DataError(
        f"the entry at {cell_name(labels, cell)} is {value}; entries must be finite numbers, "
        "or NaN where they are missing; correct it, or set it to NaN"
    )


def refuse_unobserved(info: DataInfo, allow_empty: bool) -> None:
    """Refuse a matrix without observations; also empty rows and columns, unless allowed."""
    labels, statistics, (_, *orders) = info.labels, info.statistics, info.layout
    if not statistics.n_observed.any():
        shape = " x ".join(map(str, info.grid.sizes))
        raise DataError(
            f"all {shape} entries are missing (NaN, masked or not stored); "
            "pass a matrix with at least one observed entry in every row and column"
        )
    counted = statistics.row_observed, statistics.col_observed
    names = ("row", labels.row), ("column", labels.column)
    function = "as_tensor" if info.grid.is_tensor else "as_blocks"
    advice = f", or pass {function}(V, allow_empty=True) to leave them to the prior"
    advice *= info.source.kind != "coupled"
    for counts, order, (side, name) in zip(counted, orders, names, strict=True):
        if allow_empty or not has_zeros(counts):
            continue
        empty = np.flatnonzero(np.asarray(counts) == 0)
        empty = empty if order is None else np.sort(order[empty])
        listing = ", ".join(name(int(index)) for index in empty[:NAMED])
        more = f" and {empty.size - NAMED} more" if empty.size > NAMED else ""
        raise DataError(
            f"{empty.size} of {len(counts)} {side}s have no observed entry: {listing}{more}; such "
            f"a {side} says nothing about its factors, so drop it from the matrix{advice}"
        )


def has_zeros(counts: NDArray[np.int64]) -> bool:
    """Return whether any count is zero; reads a stored array piece by piece."""
    starts = range(0, len(counts), TILE_COUNTS)
    return any((counts[start : start + TILE_COUNTS] == 0).any() for start in starts)


def dense_cells(row0: int, col0: int, width: int) -> Locate:
    """Return the function from a position to its cell, for a dense piece at (row0, col0)."""
    return lambda position: (row0 + position // width, col0 + position % width)


def cell_of(grid: Grid, layout: Layout, block: BlockAddress, view: Any, position: int) -> Cell:
    """Return the caller's cell of a stored entry of a block."""
    row = int(np.searchsorted(view.indptr, position, side="right")) - 1
    places = (row, *(int(index[position]) for index in indices_of(view)))
    cell = [part.start + place for part, place in zip(grid.slices(block), places, strict=True)]
    if not grid.is_tensor:
        return layout.callers(*cell)
    # The columns of a tensor are its further axes, one after another.
    starts = grid.starts[:-1]
    others = [start + place for start, place in zip(starts, cell[1:], strict=True)]
    first, columns = layout.callers(cell[0], np.array(others))
    return int(first), *(columns - starts).tolist()


def indices_of(view: SparseBlock | TensorBlock) -> tuple[NDArray[Any], ...]:
    """Return the places of the stored entries along every axis but the first."""
    return view.indices if isinstance(view.indices, tuple) else (view.indices,)


def stored_cells(view: SparseBlock) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the row and column inside the block of every stored entry."""
    return np.repeat(np.arange(view.m), np.diff(view.indptr)), view.indices


def crc32(arrays: Iterable[NDArray[Any]]) -> int:
    """Return the CRC-32 of arrays in little-endian byte order, one after another."""
    checksum = 0
    for array in arrays:
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        checksum = zlib.crc32(as_bytes(little), checksum)
    return checksum
