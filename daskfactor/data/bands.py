"""One band of rows or columns as a single block."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.data.blocks import BlockedData, as_scipy
from daskfactor.data.grid import Bands, Grid
from daskfactor.data.statistics import stored_cells
from daskfactor.kernels.views import (
    AnyBlock,
    BlockView,
    SparseBlock,
    index_type,
    pointer_type,
)

Array = NDArray[Any]


class OneBlock:
    """Grid of a single block that stands for all data."""

    def __init__(self, block: AnyBlock) -> None:
        self.block = block
        self.grid = Grid(Bands((0, block.m)), Bands((0, block.n)))

    def view(self, row: int, col: int) -> AnyBlock:
        """Return the block for reading."""
        del row, col
        return self.block


def part_of(block: AnyBlock, by_rows: bool, start: int, stop: int) -> AnyBlock:
    """Return some of the rows, or of the columns, of a block."""
    at = (slice(start, stop), slice(None)) if by_rows else (slice(None), slice(start, stop))
    if isinstance(block, BlockView):
        weights = None if block.weights is None else np.ascontiguousarray(block.weights[at])
        rows, cols = block.block[at].shape
        first = (block.row0 + start, block.col0) if by_rows else (block.row0, block.col0 + start)
        return BlockView(block.array, *first, rows, cols, weights)
    values, weights = _scipy(block)
    part = values[at]
    part_weights = None if weights is None else weights[at].data
    return _compressed(part.indptr, part.indices, part.data, part.shape, block.zeros, part_weights)


def _scipy(block: SparseBlock) -> tuple[Any, Any]:
    """Return the values of a sparse block and its weights, None without any, as scipy matrices."""
    values = as_scipy(block, block.values.copy())
    return values, None if block.weights is None else as_scipy(block, block.weights.copy())


def band_of(data: BlockedData, by_rows: bool, number: int) -> AnyBlock:
    """Return the blocks of a band of rows, or of columns, as one block in memory of its own.

    Windows of the caller's array are not copied.
    """
    others = range(data.grid.blocks)
    places = [(number, other) if by_rows else (other, number) for other in others]
    first = data.view(*places[0])
    if isinstance(first, SparseBlock):
        return _joined_sparse(data, places, by_rows)
    if first.array.shape == data.shape and data.weights is None and data.in_memory:
        m, n = (first.m, data.shape[1]) if by_rows else (data.shape[0], first.n)
        return BlockView(first.array, first.row0, first.col0, m, n)
    parts: list[Array] = []
    weights: list[Array] = []
    for place in places:
        view: Any = data.view(*place)
        parts.append(view.block.copy())
        if view.weights is not None:
            weights.append(view.weights.copy())
    block = np.ascontiguousarray(np.concatenate(parts, int(by_rows)))
    joined = np.ascontiguousarray(np.concatenate(weights, int(by_rows))) if weights else None
    return BlockView(block, 0, 0, block.shape[0], block.shape[1], joined)


def _joined_sparse(data: BlockedData, places: list[tuple[int, int]], by_rows: bool) -> AnyBlock:
    values: list[Any] = []
    weights: list[Any] = []
    stack: Any = sparse.hstack if by_rows else sparse.vstack
    for place in places:
        view: Any = data.view(*place)
        part_values, weight = _scipy(view)
        values.append(part_values)
        weights += [] if weight is None else [weight]
    joined = stack(values, format="csr")
    joined_weights = stack(weights, format="csr").data if weights else None
    return _compressed(
        joined.indptr, joined.indices, joined.data, joined.shape, view.zeros, joined_weights
    )


def _compressed(
    indptr: Array, indices: Array, values: Array, shape: Any, zeros: bool, weights: Array | None
) -> SparseBlock:
    """Return compressed rows with the index types that kernels are compiled for."""
    m, n = shape
    pointers = indptr.astype(pointer_type(values.size))
    return SparseBlock(pointers, indices.astype(index_type(n)), values, m, n, zeros, weights)


def expand_block(block: AnyBlock) -> SparseBlock:
    """Return every observed cell of a block as an entry of compressed rows.

    Sums over these entries have the same bits whatever other rows there are; those of a matrix
    product depend on the number of rows.
    """
    if isinstance(block, SparseBlock):
        if not block.zeros:
            return block
        cells = stored_cells(block)
        dense = np.zeros((block.m, block.n), block.values.dtype)
        dense[cells] = block.values
        weights = None
        if block.weights is not None:
            weights = np.ones_like(dense)
            weights[cells] = block.weights
    else:
        dense, weights = block.block, block.weights
    seen = ~np.isnan(dense)
    indptr = np.concatenate([[0], np.cumsum(seen.sum(axis=1))])
    indices = np.nonzero(seen)[1]
    entry_weights = None if weights is None else weights[seen]
    return _compressed(indptr, indices, dense[seen], dense.shape, False, entry_weights)
