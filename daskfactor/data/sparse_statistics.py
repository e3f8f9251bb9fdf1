"""What one pass over sparse blocks finds out: counts, moments, extremes, a fingerprint."""

import hashlib
import math
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.grid import Block, Grid
from daskfactor.data.labels import Labels, SparseLayout
from daskfactor.data.statistics import Statistics, infinite, refuse_unobserved, unpermuted
from daskfactor.data.storage import as_bytes
from daskfactor.kernels.views import SparseBlock


class SparseStatisticsBuilder:
    """Collects the statistics of sparse blocks, in any order of blocks.

    Observed are the entries that are stored and not NaN and, with ``zeros``,
    all that are not stored.
    """

    def __init__(self, grid: Grid, labels: Labels, layout: SparseLayout) -> None:
        square = (grid.blocks, grid.blocks)
        self._grid = grid
        self._labels = labels
        self._zeros = zeros = layout.unstored == "zero"
        self._layout = layout
        self._stored = np.zeros(square, np.int64)
        self._observed = np.zeros(square, np.int64)
        self._checksums = np.zeros(square, np.uint32)
        self._totals = np.zeros(square)
        self._rows = np.full(grid.shape[0], grid.shape[1] if zeros else 0, np.int64)
        self._cols = np.full(grid.shape[1], grid.shape[0] if zeros else 0, np.int64)
        self._low, self._high = math.nan, math.nan
        self._is_integer = True

    def scan(self, block: Block, view: SparseBlock) -> None:
        """Add one block; NaN among its values is an entry that is missing."""
        values, stored = view.values, view.values.size
        held_out = np.isnan(values)
        missing = int(np.count_nonzero(held_out))
        self._stored[block] = stored
        self._observed[block] = view.m * view.n - missing if self._zeros else stored - missing
        self._checksums[block] = _checksum(view)
        self._count(block, view, held_out if missing else None)
        if self._zeros and stored < view.m * view.n:
            self._extend(0.0, 0.0)
        if missing == stored:
            return
        low, high = float(np.fmin.reduce(values)), float(np.fmax.reduce(values))
        if math.isinf(low) or math.isinf(high):
            raise self._infinite(block, view)
        self._extend(low, high)
        known = values[~held_out] if missing else values
        self._totals[block] = known.sum(dtype=np.float64)
        self._is_integer = self._is_integer and bool((known == np.rint(known)).all())

    def finish(self, allow_empty: bool) -> Statistics:
        """The statistics of the whole matrix, once every block has been scanned."""
        callers = [unpermuted(self._rows, self._layout.row_order)]
        callers.append(unpermuted(self._cols, self._layout.col_order))
        refuse_unobserved(self._observed, callers[0], callers[1], self._labels, allow_empty)
        return Statistics(
            n_observed=self._observed,
            row_observed=self._rows,
            col_observed=self._cols,
            total=math.fsum(self._totals.ravel()),
            minimum=self._low,
            maximum=self._high,
            is_integer=self._is_integer,
            fingerprint=self._fingerprint(),
            n_stored=self._stored,
        )

    def _count(self, block: Block, view: SparseBlock, held_out: NDArray[np.bool_] | None) -> None:
        rows, cols = self._grid.slices(block)
        if not self._zeros:
            self._rows[rows] += np.diff(view.indptr)
            self._cols[cols] += np.bincount(view.indices, minlength=view.n)
        if held_out is not None:
            where = np.searchsorted(view.indptr, np.flatnonzero(held_out), side="right") - 1
            self._rows[rows] -= np.bincount(where, minlength=view.m)
            self._cols[cols] -= np.bincount(view.indices[held_out], minlength=view.n)

    def _extend(self, low: float, high: float) -> None:
        self._low, self._high = float(np.fmin(self._low, low)), float(np.fmax(self._high, high))

    def _infinite(self, block: Block, view: SparseBlock) -> Exception:
        first = int(np.argmax(np.isinf(view.values)))
        row, col = self._layout.callers(*cell_of(self._grid, block, view, first))
        return infinite(self._labels, row, col, float(view.values[first]))

    def _fingerprint(self) -> str:
        rows, cols = self._grid.shape
        digest = hashlib.blake2b(digest_size=8)
        digest.update(repr((self._grid.rows.offsets, self._grid.cols.offsets)).encode())
        digest.update(b"unstored zero" if self._zeros else b"unstored missing")
        for order in (self._layout.row_order, self._layout.col_order):
            digest.update(b"" if order is None else order.astype("<i8").tobytes())
        digest.update(self._observed.astype("<i8").tobytes())
        digest.update(self._checksums.astype("<u4").tobytes())
        return f"{rows}x{cols}-{int(self._observed.sum())}-{digest.hexdigest()}"


def cell_of(grid: Grid, block: Block, view: Any, position: int) -> tuple[int, int]:
    """Row and column on the grid of a stored entry of a block."""
    row = int(np.searchsorted(view.indptr, position, side="right")) - 1
    rows, cols = grid.slices(block)
    return rows.start + row, cols.start + int(view.indices[position])


def _checksum(view: SparseBlock) -> int:
    """Of what is stored where; the entries have one order and NaN and zero one form each."""
    checksum = 0
    for part in (np.diff(view.indptr).astype(np.int64), view.indices, view.values):
        little = np.ascontiguousarray(part, part.dtype.newbyteorder("<"))
        checksum = zlib.crc32(as_bytes(little), checksum)
    return checksum
