"""What one pass over the blocks finds out: counts, moments, extremes, a fingerprint.

Blocks are scanned in fixed tiles of rows that are copied first, so that sums and
checksums do not depend on how the block lies in memory or where it came from.
"""

import hashlib
import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.grid import Block, Grid
from daskfactor.data.labels import Labels
from daskfactor.data.storage import FloatArray
from daskfactor.errors import DataError

TILE_ENTRIES = 65_536
NAMED = 5


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


class StatisticsBuilder:
    """Collects the statistics block by block, in any order of blocks."""

    def __init__(self, grid: Grid, labels: Labels) -> None:
        count = grid.blocks
        self._grid = grid
        self._labels = labels
        self._observed = np.zeros((count, count), np.int64)
        self._checksums = np.zeros((count, count), np.uint32)
        self._totals = np.zeros((count, count))
        self._rows = np.zeros(grid.shape[0], np.int64)
        self._cols = np.zeros(grid.shape[1], np.int64)
        self._low, self._high = math.nan, math.nan
        self._is_integer = True

    def scan(self, block: Block, values: FloatArray) -> None:
        """Add one block; its values are (m, n) with NaN where missing."""
        height = max(1, TILE_ENTRIES // values.shape[1])
        rows, cols = self._grid.slices(block)
        checksum, total = 0, 0.0
        for start in range(0, values.shape[0], height):
            # Adding zero copies, makes the tile contiguous and turns -0.0 into 0.0.
            tile = values[start : start + height] + values.dtype.type(0)
            observed = ~np.isnan(tile)
            everything = bool(observed.all())
            if not everything:
                tile[~observed] = np.nan
            checksum = zlib.crc32(tile.data, checksum)
            self._extremes(tile, rows.start + start, cols.start)
            self._rows[rows.start + start : rows.start + start + tile.shape[0]] += observed.sum(1)
            self._cols[cols] += observed.sum(0)
            if not everything:
                tile[~observed] = 0
            self._is_integer = self._is_integer and bool((tile == np.rint(tile)).all())
            total += float(tile.sum(dtype=np.float64))
            self._observed[block] += int(np.count_nonzero(observed))
        self._checksums[block] = checksum
        self._totals[block] = total

    def finish(self, allow_empty: bool = False) -> Statistics:
        """The statistics of the whole matrix, once every block has been scanned."""
        refuse_unobserved(self._observed, self._rows, self._cols, self._labels, allow_empty)
        return Statistics(
            n_observed=self._observed,
            row_observed=self._rows,
            col_observed=self._cols,
            total=math.fsum(self._totals.ravel()),
            minimum=self._low,
            maximum=self._high,
            is_integer=self._is_integer,
            fingerprint=self._fingerprint(),
        )

    def _extremes(self, tile: FloatArray, row0: int, col0: int) -> None:
        low, high = float(np.fmin.reduce(tile, None)), float(np.fmax.reduce(tile, None))
        if math.isinf(low) or math.isinf(high):
            row, col = (int(index[0]) for index in np.nonzero(np.isinf(tile)))
            raise infinite(self._labels, row0 + row, col0 + col, float(tile[row, col]))
        self._low = float(np.fmin(self._low, low))
        self._high = float(np.fmax(self._high, high))

    def _fingerprint(self) -> str:
        rows, cols = self._grid.shape
        digest = hashlib.blake2b(digest_size=8)
        digest.update(repr((self._grid.rows.offsets, self._grid.cols.offsets)).encode())
        digest.update(self._observed.astype("<i8").tobytes())
        digest.update(self._checksums.astype("<u4").tobytes())
        return f"{rows}x{cols}-{int(self._observed.sum())}-{digest.hexdigest()}"


def infinite(labels: Labels, row: int, col: int, value: float) -> DataError:
    """The error for an infinite entry."""
    return DataError(
        f"the entry at {labels.cell(row, col)} is {value}; entries must be finite numbers, or NaN "
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
    if not allow_empty:
        _refuse_missing(rows, "row", labels.row)
        _refuse_missing(cols, "column", labels.column)


def unpermuted(counts: NDArray[np.int64], order: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Counts by position of the grid, as counts by the caller's rows."""
    if order is None:
        return counts
    callers = np.empty_like(counts)
    callers[order] = counts
    return callers


def _refuse_missing(counts: NDArray[np.int64], side: str, name: Any) -> None:
    empty = np.flatnonzero(counts == 0)
    if empty.size == 0:
        return
    shown = ", ".join(name(int(index)) for index in empty[:NAMED])
    more = f" and {empty.size - NAMED} more" if empty.size > NAMED else ""
    raise DataError(
        f"{empty.size} of {counts.size} {side}s have no observed entry: {shown}{more}; such a "
        f"{side} says nothing about its factors, so drop it from the matrix, or pass "
        "allow_empty=True to leave them to the prior"
    )
