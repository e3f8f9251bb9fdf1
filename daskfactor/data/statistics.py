"""What one pass over the blocks finds out: counts, moments, extremes, a fingerprint.

Dense blocks are scanned in fixed tiles of rows that are copied first, so that sums and
checksums do not depend on how the block lies in memory or where it came from.
"""

import hashlib
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.grid import Block, Grid, inverse
from daskfactor.data.labels import DENSE, Labels, Layout, SourceInfo
from daskfactor.data.storage import FloatArray, FloatType, as_bytes
from daskfactor.errors import DataError
from daskfactor.kernels.views import AnyBlock, SparseBlock

TILE_ENTRIES = 65_536
NAMED = 5

Locate = Callable[[int], tuple[int, int]]
"""From the position of an entry among some values to its row and column in the matrix."""


@dataclass(frozen=True)
class Statistics:
    """Counts and moments of the observed entries of a matrix.

    ``n_observed`` is (B, B), one count per block; ``row_observed`` (I,) and
    ``col_observed`` (J,) count per row and column; ``total`` is the sum of the
    observed values, ``minimum`` and ``maximum`` their extremes; ``n_stored`` is
    (B, B), the entries that sparse blocks store, and None if blocks are dense.
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


class Known(NamedTuple):
    """All that is known of blocked data, but not the blocks."""

    grid: Grid
    labels: Labels
    statistics: Statistics
    source: SourceInfo
    dtype: FloatType
    layout: Layout = DENSE


class StatisticsBuilder:
    """Collects the statistics block by block, in any order of blocks.

    NaN is a missing entry; entries that sparse blocks do
    not store are observed zeros or missing, as the layout says.
    """

    def __init__(self, grid: Grid, labels: Labels, layout: Layout = DENSE) -> None:
        square, (height, width) = (grid.blocks, grid.blocks), grid.shape
        self._grid = grid
        self._labels = labels
        self._layout = layout
        self._zeros = zeros = layout.unstored == "zero"
        self._stored = np.zeros(square, np.int64)
        self._observed = np.zeros(square, np.int64)
        self._checksums = np.zeros(square, np.uint32)
        self._totals = np.zeros(square)
        self._rows = np.full(height, width if zeros else 0, np.int64)
        self._cols = np.full(width, height if zeros else 0, np.int64)
        self._low, self._high = math.nan, math.nan
        self._is_integer = True

    def scan(self, block: Block, view: AnyBlock) -> None:
        """Add one block."""
        if isinstance(view, SparseBlock):
            self._scan_sparse(block, view)
        else:
            self._scan_dense(block, view.block)

    def finish(self, source: SourceInfo, dtype: FloatType, allow_empty: bool = False) -> Known:
        """What is known of the whole matrix, once every block has been scanned."""
        rows = unpermuted(self._rows, self._layout.row_order)
        cols = unpermuted(self._cols, self._layout.col_order)
        refuse_unobserved(self._observed, rows, cols, self._labels, allow_empty)
        statistics = Statistics(
            n_observed=self._observed,
            row_observed=self._rows,
            col_observed=self._cols,
            total=math.fsum(self._totals.ravel()),
            minimum=self._low,
            maximum=self._high,
            is_integer=self._is_integer,
            fingerprint=self._fingerprint(),
            n_stored=self._stored if self._layout.unstored else None,
        )
        return Known(self._grid, self._labels, statistics, source, dtype, self._layout)

    def _scan_dense(self, block: Block, values: FloatArray) -> None:
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
            self._rows[first : first + tile.shape[0]] += observed.sum(1)
            self._cols[cols] += observed.sum(0)
            if not everything:
                tile[~observed] = 0
            self._is_integer = self._is_integer and bool((tile == np.rint(tile)).all())
            total += float(tile.sum(dtype=np.float64))
            self._observed[block] += int(np.count_nonzero(observed))
        self._checksums[block] = checksum
        self._totals[block] = total

    def _scan_sparse(self, block: Block, view: SparseBlock) -> None:
        values, stored = view.values, view.values.size
        held_out = np.isnan(values)
        missing = int(np.count_nonzero(held_out))
        self._stored[block] = stored
        self._observed[block] = view.m * view.n - missing if self._zeros else stored - missing
        # The entries have one order, and NaN and zero one form each.
        lengths = np.diff(view.indptr).astype(np.int64)
        self._checksums[block] = crc32(lengths, view.indices, values)
        self._count(block, view, held_out if missing else None)
        if self._zeros and stored < view.m * view.n:
            self._low, self._high = float(np.fmin(self._low, 0)), float(np.fmax(self._high, 0))
        if missing == stored:
            return
        self._extend(values, partial(cell_of, self._grid, self._layout, block, view))
        known = values[~held_out] if missing else values
        self._totals[block] = known.sum(dtype=np.float64)
        self._is_integer = self._is_integer and bool((known == np.rint(known)).all())

    def _count(self, block: Block, view: SparseBlock, held_out: NDArray[np.bool_] | None) -> None:
        rows, cols = self._grid.slices(block)
        if not self._zeros:
            self._rows[rows] += np.diff(view.indptr)
            self._cols[cols] += np.bincount(view.indices, minlength=view.n)
        if held_out is not None:
            where = np.searchsorted(view.indptr, np.flatnonzero(held_out), side="right") - 1
            self._rows[rows] -= np.bincount(where, minlength=view.m)
            self._cols[cols] -= np.bincount(view.indices[held_out], minlength=view.n)

    def _extend(self, values: FloatArray, locate: Locate) -> None:
        """Take note of the extremes of some values, and refuse infinite ones."""
        low, high = float(np.fmin.reduce(values, None)), float(np.fmax.reduce(values, None))
        if math.isinf(low) or math.isinf(high):
            position = int(np.argmax(np.isinf(values)))
            raise infinite(self._labels, locate(position), float(values.flat[position]))
        self._low, self._high = float(np.fmin(self._low, low)), float(np.fmax(self._high, high))

    def _fingerprint(self) -> str:
        rows, cols = self._grid.shape
        digest = hashlib.blake2b(digest_size=8)
        digest.update(repr((self._grid.rows.offsets, self._grid.cols.offsets)).encode())
        if self._layout.unstored:
            digest.update(f"unstored {self._layout.unstored}".encode())
            for order in (self._layout.row_order, self._layout.col_order):
                digest.update(b"" if order is None else order.astype("<i8").tobytes())
        digest.update(self._observed.astype("<i8").tobytes())
        digest.update(self._checksums.astype("<u4").tobytes())
        return f"{rows}x{cols}-{int(self._observed.sum())}-{digest.hexdigest()}"


def infinite(labels: Labels, cell: tuple[int, int], value: float) -> DataError:
    """The error for an infinite entry."""
    return DataError(
        f"the entry at {labels.cell(*cell)} is {value}; entries must be finite numbers, or NaN "
        "where they are missing; correct it, or set it to NaN"
    )


def refuse_unobserved(
    observed: NDArray[np.int64],
    rows: NDArray[np.int64],
    cols: NDArray[np.int64],
    labels: Labels,
    allow_empty: bool,
) -> None:
    """Refuse a matrix of nothing, and rows and columns of nothing unless they are allowed."""
    if not observed.any():
        raise DataError(
            f"all {rows.size} x {cols.size} entries are missing (NaN, masked or not stored); "
            "pass a matrix with at least one observed entry in every row and column"
        )
    for counts, side, name in ((rows, "row", labels.row), (cols, "column", labels.column)):
        empty = np.flatnonzero(counts == 0)
        if allow_empty or not empty.size:
            continue
        shown = ", ".join(name(int(index)) for index in empty[:NAMED])
        more = f" and {empty.size - NAMED} more" if empty.size > NAMED else ""
        raise DataError(
            f"{empty.size} of {counts.size} {side}s have no observed entry: {shown}{more}; such a "
            f"{side} says nothing about its factors, so drop it from the matrix, or pass "
            "allow_empty=True to leave them to the prior"
        )


def unpermuted(counts: NDArray[np.int64], order: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Counts by position of the grid, as counts by the caller's rows."""
    return counts if order is None else counts[inverse(order)]


def dense_cells(row0: int, col0: int, width: int) -> Locate:
    """Where the entries of a dense piece are whose first cell is (row0, col0)."""
    return lambda position: (row0 + position // width, col0 + position % width)


def cell_of(grid: Grid, layout: Layout, block: Block, view: Any, position: int) -> tuple[int, int]:
    """Row and column, as the caller numbers them, of a stored entry of a block."""
    row = int(np.searchsorted(view.indptr, position, side="right")) - 1
    rows, cols = grid.slices(block)
    return layout.callers(rows.start + row, cols.start + int(view.indices[position]))


def crc32(*arrays: NDArray[Any]) -> int:
    """CRC-32 of arrays as a store has them, little-endian, one after another."""
    checksum = 0
    for array in arrays:
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        checksum = zlib.crc32(as_bytes(little), checksum)
    return checksum
