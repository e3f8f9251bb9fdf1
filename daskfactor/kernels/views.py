"""How kernels see a block: a window of a dense array, or compressed sparse rows."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]

NARROW_COLUMNS = 65536
"""Blocks of at most this many columns keep their column numbers in 16 bits."""


class BlockView(NamedTuple):
    """A block inside a C-contiguous array: ``array[row0:row0 + m, col0:col0 + n]``.

    NaN marks a missing entry.
    """

    array: FloatArray
    row0: int
    col0: int
    m: int
    n: int

    @property
    def block(self) -> FloatArray:
        """The m x n block alone, as a NumPy view."""
        return self.array[self.row0 : self.row0 + self.m, self.col0 : self.col0 + self.n]


class SparseBlock(NamedTuple):
    """A block as compressed sparse rows: entries ``indptr[i]:indptr[i + 1]`` are row i's.

    Attributes
    ----------
    indptr
        (m + 1,) int32; int64 where the block holds 2**31 entries or more.
    indices
        (nnz,) columns inside the block, ascending in each row, none twice; uint16
        where n <= 65536, else int32.
    values
        (nnz,) float32 or float64, the dtype of the factors. A stored NaN is a
        missing entry; it has a meaning only where ``zeros`` is True.
    m, n
        Rows and columns of the block.
    zeros
        True: an entry that is not stored is an observed zero. False: it is missing.
    """

    indptr: NDArray[np.integer[Any]]
    indices: NDArray[np.integer[Any]]
    values: FloatArray
    m: int
    n: int
    zeros: bool


AnyBlock = BlockView | SparseBlock


def index_type(n: int) -> np.dtype[Any]:
    """The dtype of column numbers in a sparse block of n columns."""
    return np.dtype(np.uint16 if n <= NARROW_COLUMNS else np.int32)


def pointer_type(entries: int) -> np.dtype[Any]:
    """The dtype of row pointers in a sparse block with so many entries."""
    return np.dtype(np.int32 if entries < 2**31 else np.int64)


"""What the kernels take, dense or sparse."""
