"""Observed entries of a matrix by rows and by columns."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.kernels.rowwise import Entries
from daskfactor.kernels.views import AnyBlock, SparseBlock
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]


class Sides(NamedTuple):
    """The same entries by rows and by columns.

    ``constant`` is what -Σ d_β(v|μ) has besides the part that the kernels compute.
    """

    by_rows: Entries
    by_cols: Entries
    constant: float


def listed_entries(data: BlockedData, likelihood: Likelihood) -> int:
    """How many cells a sweep over rows looks at.

    Zeros need no look where they are summed over rows; cells that sparse input leaves out as
    missing do, because they are taken off the sums over all.
    """
    if data.is_sparse and data.unstored == "zero" and likelihood.zeros == "constant":
        return int(data.n_stored.sum())
    return data.shape[0] * data.shape[1] if data.is_sparse else data.total_observed


def both_sides(data: BlockedData, likelihood: Likelihood) -> Sides:
    """Copies of the observed entries, in the grid's order, for `daskfactor.kernels.rowwise`."""
    summed = likelihood.zeros == "constant"
    found = [
        _cells(data.view(block.row, block.col), summed, *_corner(data, block.row, block.col))
        for block in data.grid.all_blocks()
    ]
    seen = np.concatenate([cells for cells, _ in found], axis=1)
    gone = np.concatenate([cells for _, cells in found], axis=1)
    rows, cols = data.shape
    return Sides(
        _by_rows(seen, gone, (rows, cols)),
        _by_rows(seen[[1, 0, 2]], gone[[1, 0, 2]], (cols, rows)),
        likelihood.fit_constant(seen[2]),
    )


def _corner(data: BlockedData, row: int, col: int) -> tuple[int, int]:
    return data.grid.rows.offsets[row], data.grid.cols.offsets[col]


def _cells(view: AnyBlock, summed: bool, row0: int, col0: int) -> tuple[Array, Array]:
    """(rows, columns, values) of the entries to list and of the missing ones, (3, n) each.

    Zeros are not listed if they are ``summed`` over rows.
    """
    if isinstance(view, SparseBlock):
        rows = np.repeat(np.arange(view.m), np.diff(view.indptr))
        stored = np.stack([rows + row0, view.indices.astype(np.int64) + col0, view.values])
        missing = np.isnan(stored[2])
        if not view.zeros:
            missing = _complement(view, stored[:2], row0, col0)
            return stored[:, ~np.isnan(stored[2])], missing
        listed = stored[:, ~missing]
        if not summed:
            zeros = _complement(view, stored[:2], row0, col0)
            listed = np.concatenate([listed, zeros], axis=1)
        return listed, stored[:, missing]
    block = np.asarray(view.block, dtype=np.float64)
    missing = np.isnan(block)
    listed = ~missing & (block != 0) if summed else ~missing
    return _positions(block, listed, row0, col0), _positions(block, missing, row0, col0)


def _complement(view: SparseBlock, stored: Array, row0: int, col0: int) -> Array:
    """Cells of a block that it does not store."""
    absent = np.ones((view.m, view.n), dtype=bool)
    absent[stored[0].astype(np.int64) - row0, stored[1].astype(np.int64) - col0] = False
    return _positions(np.zeros(absent.shape), absent, row0, col0)


def _positions(block: Array, wanted: NDArray[np.bool_], row0: int, col0: int) -> Array:
    rows, cols = np.nonzero(wanted)
    return np.stack([rows + row0, cols + col0, block[rows, cols]]).astype(np.float64)


def _by_rows(seen: Array, gone: Array, shape: tuple[int, int]) -> Entries:
    pointers, columns, values = _compressed(seen, shape)
    missing_pointers, missing, _ = _compressed(gone, shape)
    return Entries(pointers, columns, values, missing_pointers, missing)


def _compressed(cells: Array, shape: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Row pointers, columns and values, rows and columns ascending."""
    rows, cols = cells[:2].astype(np.int64)
    order = np.lexsort((cols, rows))
    pointers = np.searchsorted(rows[order], np.arange(shape[0] + 1)).astype(np.int64)
    return pointers, cols[order], np.ascontiguousarray(cells[2][order])
