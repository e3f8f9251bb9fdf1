"""From a stream of entries to sparse blocks: deal the entries out, then put blocks together."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.data.decode import Decoder
from daskfactor.data.grid import Bands, Block, Grid, inverse
from daskfactor.data.scratch import Spool, joined
from daskfactor.data.sparse_source import PIECE, Piece, summable
from daskfactor.data.sparse_statistics import Orders, cell_of
from daskfactor.errors import OptionError
from daskfactor.kernels.views import SparseBlock, index_type, pointer_type

MOST_COLUMNS = 2**31 - 1


class Dealer:
    """Deals entries out to blocks, and says which row bands are complete.

    An entry is kept as (row in the block, column in the block, value), the first
    two in as few bits as they need.
    """

    def __init__(self, grid: Grid, orders: Orders, spool: Spool) -> None:
        if max(*grid.rows.sizes, *grid.cols.sizes) > MOST_COLUMNS:
            raise OptionError(
                f"blocks of {max(grid.rows.sizes)} x {max(grid.cols.sizes)} are too large: at most "
                f"{MOST_COLUMNS} rows and columns; pass a larger number of blocks"
            )
        self._blocks = grid.blocks
        self._sides = [_Side(grid.rows, orders.rows), _Side(grid.cols, orders.cols)]
        self._spool = spool

    def deal(self, piece: Piece) -> None:
        """Keep all entries of a piece with the blocks they belong to."""
        sides = zip(self._sides, (piece.rows, piece.cols), strict=True)
        (row_bands, rows), (col_bands, cols) = (side.locate(index) for side, index in sides)
        # Numbers of 16 bits are sorted by counting, which is by far the fastest.
        number = np.dtype(np.uint16 if self._blocks <= 256 else np.int64)
        owner = np.multiply(row_bands, self._blocks, dtype=number) + col_bands.astype(number)
        order = np.argsort(owner, kind="stable")
        owner = owner[order]
        arrays = rows[order], cols[order], piece.values[order]
        edges = np.flatnonzero(np.diff(owner)) + 1
        for start, stop in zip([0, *edges], [*edges, owner.size], strict=True):
            if stop > start:
                # Copies, so that a part that stays does not keep its neighbours.
                group = tuple(array[start:stop].copy() for array in arrays)
                self._spool.append(int(owner[start]), group)

    def take(self, block: Block) -> list[tuple[NDArray[Any], ...]]:
        """The entries of a block, given away."""
        return self._spool.take(block.row * self._blocks + block.col)


class _Side:
    """Finds the band of a row (or column) and its place in that band."""

    def __init__(self, bands: Bands, order: NDArray[np.int64] | None) -> None:
        sizes = np.array(bands.sizes)
        narrow = np.uint8 if len(bands) <= 256 else np.int32
        self._band = np.repeat(np.arange(len(bands), dtype=narrow), sizes)
        self._first = np.array(bands.offsets[:-1])
        self._position = None if order is None else inverse(order)
        self._local = np.uint16 if max(bands.sizes) <= 2**16 else np.int32

    def locate(self, index: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        if self._position is not None:
            index = self._position[index]
        band = self._band[index]
        return band, (index - self._first[band]).astype(self._local)


class Assembler:
    """Puts the entries of one block together: sums duplicates, decodes, compresses rows."""

    def __init__(self, grid: Grid, orders: Orders, decoder: Decoder, zeros: bool) -> None:
        self._grid = grid
        self._orders = orders
        self._decoder = decoder
        self._zeros = zeros
        self.doubles = 0

    def assemble(self, block: Block, groups: list[tuple[NDArray[Any], ...]]) -> SparseBlock:
        """The block of these entries; an entry that says nothing new is not stored.

        That is a zero where zeros are not stored, NaN where what is missing is not.
        """
        m, n = self._grid.block_shape(block)
        if not groups:
            groups = [(np.zeros(0, "i4"), np.zeros(0, "i4"), np.zeros(0, "f8"))]
        rows, cols, values = joined(groups)
        groups.clear()
        csr = sparse.coo_array((summable(values), (rows, cols)), shape=(m, n)).tocsr()
        self.doubles += values.size - csr.nnz
        del rows, cols, values

        def locate(position: int) -> tuple[int, int]:
            return self._orders.callers(*cell_of(self._grid, block, csr, position))

        decoded = self._decoder.convert(csr.data, None, locate)
        decoded += 0  # -0.0 becomes 0.0
        return compressed(csr.indptr, csr.indices, decoded, (m, n), self._zeros)


def compressed(
    indptr: NDArray[Any],
    indices: NDArray[Any],
    values: NDArray[Any],
    shape: tuple[int, int],
    zeros: bool,
) -> SparseBlock:
    """A block of sorted compressed rows, with what says nothing new left out."""
    missing = np.isnan(values)
    if zeros:
        values[missing] = np.nan  # one form of it, for the checksum
    keep = values != 0 if zeros else ~missing
    if not keep.all():
        before = np.concatenate([[0], np.cumsum(keep)])
        indptr, indices, values = before[indptr], indices[keep], values[keep]
    return SparseBlock(
        np.ascontiguousarray(indptr, pointer_type(values.size)),
        np.ascontiguousarray(indices, index_type(shape[1])),
        np.ascontiguousarray(values),
        *shape,
        zeros,
    )


def gathered(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The same entries in pieces that are not much smaller than the usual one."""
    waiting: list[Piece] = []
    for piece in pieces:
        waiting.append(piece)
        if sum(part.values.size for part in waiting) >= PIECE // 2:
            yield _together(waiting)
            waiting = []
    if waiting:
        yield _together(waiting)


def _together(pieces: list[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    rows, cols, values = (np.concatenate(parts) for parts in list(zip(*pieces, strict=True))[:3])
    return Piece(rows, cols, values, pieces[-1].done)
