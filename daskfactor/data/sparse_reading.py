"""Reading back from sparse blocks: single cells, missing cells, whole matrices.

Cells are numbered as the caller numbers them; blocks may hold rows and columns
in another order.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.grid import Block, inverse
from daskfactor.data.storage import FloatArray
from daskfactor.errors import OptionError
from daskfactor.kernels.views import SparseBlock

if TYPE_CHECKING:
    from daskfactor.data.blocks import BlockedData

Cells = tuple[NDArray[np.int64], NDArray[np.int64]]

MOST_MISSING = 10_000_000
LARGEST_DENSE = 2**28


def values(data: "BlockedData", rows: NDArray[np.int64], cols: NDArray[np.int64]) -> FloatArray:
    """Entries at the given cells; one that is not stored is 0 or NaN, as ``unstored`` says."""
    if data.row_order is not None:
        rows = inverse(data.row_order)[rows]
    if data.col_order is not None:
        cols = inverse(data.col_order)[cols]
    row_band = np.searchsorted(data.grid.rows.offsets, rows, side="right") - 1
    col_band = np.searchsorted(data.grid.cols.offsets, cols, side="right") - 1
    owner = row_band * data.grid.blocks + col_band
    out = np.full(rows.size, 0 if data.unstored == "zero" else np.nan, data.dtype)
    order = np.argsort(owner, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(owner[order])) + 1):
        if group.size:
            block = Block(int(row_band[group[0]]), int(col_band[group[0]]))
            row_part, col_part = data.grid.slices(block)
            view = _view(data, block)
            out[group] = _looked_up(
                view, rows[group] - row_part.start, cols[group] - col_part.start, out[group]
            )
    return out


def missing_cells(data: "BlockedData") -> Cells:
    """Rows and columns of the missing cells, in row-major order of the caller."""
    if data.unstored == "missing":
        return _unstored_cells(data)
    found = [_callers(data, *cells) for cells in _nan_cells(data)]
    return _sorted_cells(
        np.concatenate([rows for rows, _ in found]), np.concatenate([cols for _, cols in found])
    )


def to_numpy(data: "BlockedData") -> FloatArray:
    """The matrix as a dense array, refused where that would be very large."""
    size = data.shape[0] * data.shape[1]
    if size > LARGEST_DENSE:
        raise OptionError(
            f"a dense array of {data.shape[0]} x {data.shape[1]} = {short(size)} entries is too "
            f"large (at most {short(LARGEST_DENSE)}); use observed_sparse(), or values(rows, cols)"
        )
    out = np.full(data.shape, 0 if data.unstored == "zero" else np.nan, data.dtype)
    for rows, cols, found in _entries(data):
        out[_callers(data, rows, cols)] = found
    return out


def to_scipy(data: "BlockedData") -> Any:
    """The stored entries as a ``csr_array`` in the caller's order."""
    from scipy import sparse

    index = np.int32 if max(data.shape) < 2**31 else np.int64
    parts = [
        (*(side.astype(index) for side in _callers(data, rows, cols)), found.copy())
        for rows, cols, found in _entries(data)
    ]
    rows, cols, found = (np.concatenate(part) for part in zip(*parts, strict=True))
    parts.clear()
    return sparse.coo_array((found, (rows, cols)), shape=data.shape).tocsr()


def describe(data: "BlockedData") -> str:
    """One line for logs: shape, stored and observed entries, grid, balance, type and place."""
    rows, cols = data.shape
    stored = int(data.n_stored.sum())
    held_out = data.n_missing if data.unstored == "zero" else 0
    others = "zero" if data.unstored == "zero" else "missing"
    aside = f", {short(held_out)} of them missing" if held_out else ""
    blocks = data.grid.blocks
    order = ", rows and columns permuted" if data.row_order is not None else ""
    return (
        f"{rows} x {cols} sparse, {short(stored)} stored of {short(rows * cols)}{aside} (others "
        f"{others}), {blocks} x {blocks} blocks (largest {data.imbalance:.2f} times the "
        f"mean{order}), {data.dtype} {data.place}"
    )


def short(count: int) -> str:
    """A count in three digits or so."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def row_of_entries(view: SparseBlock) -> NDArray[np.int64]:
    """The row inside the block of every stored entry."""
    return np.repeat(np.arange(view.m), np.diff(view.indptr))


def _view(data: "BlockedData", block: Block) -> SparseBlock:
    view = data.view(block.row, block.col)
    assert isinstance(view, SparseBlock)
    return view


def _entries(data: "BlockedData") -> Iterator[tuple[NDArray[Any], NDArray[Any], FloatArray]]:
    """Rows and columns on the grid, and values, of the stored entries of every block."""
    for block in data.grid.all_blocks():
        rows, cols = data.grid.slices(block)
        view = _view(data, block)
        yield row_of_entries(view) + rows.start, view.indices + np.int64(cols.start), view.values


def _callers(
    data: "BlockedData", rows: NDArray[Any], cols: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    return (
        rows if data.row_order is None else data.row_order[rows],
        cols if data.col_order is None else data.col_order[cols],
    )


def _nan_cells(data: "BlockedData") -> Iterator[Cells]:
    for rows, cols, found in _entries(data):
        held_out = np.isnan(found)
        yield rows[held_out], cols[held_out]


def _unstored_cells(data: "BlockedData") -> Cells:
    if data.n_missing > MOST_MISSING:
        raise OptionError(
            f"{data.n_missing} cells are missing, too many to list (at most {MOST_MISSING}); name "
            "the cells that you want, as (rows, columns)"
        )
    width = data.shape[1]
    stored = [
        row.astype(np.int64) * width + col
        for rows, cols, _ in _entries(data)
        for row, col in [_callers(data, rows, cols)]
    ]
    taken = np.sort(np.concatenate(stored))
    # The k-th stored cell lies behind taken[k] - k missing ones.
    missing = np.arange(data.n_missing)
    missing += np.searchsorted(taken - np.arange(taken.size), missing, side="right")
    rows, cols = np.divmod(missing, width)
    return rows, cols


def _sorted_cells(rows: NDArray[np.int64], cols: NDArray[np.int64]) -> Cells:
    order = np.lexsort((cols, rows))
    return rows[order], cols[order]


def _looked_up(
    view: SparseBlock,
    rows: NDArray[np.int64],
    cols: NDArray[np.int64],
    default: FloatArray,
) -> FloatArray:
    """Stored values at cells of one block, each found by bisection in its row."""
    if view.values.size == 0:
        return default
    low, high = view.indptr[rows].astype(np.int64), view.indptr[rows + 1].astype(np.int64)
    end = high.copy()
    while (low < high).any():
        middle = np.minimum((low + high) // 2, view.values.size - 1)
        left = (low < high) & (view.indices[middle] < cols)
        high = np.where(left, high, np.minimum(middle, high))
        low = np.where(left, middle + 1, low)
    place = np.minimum(low, view.values.size - 1)
    stored = (low < end) & (view.indices[place] == cols)
    return np.where(stored, view.values[place], default)
