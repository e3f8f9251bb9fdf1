"""How kernels see a block: a window of a dense array, or compressed sparse rows."""

from collections.abc import Callable
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
"""What the kernels take, dense or sparse."""
Watched = tuple[NDArray[np.int32], NDArray[np.int32], FloatArray, FloatArray, int]
"""Monitored cells of a block, see `BlockKernels`."""
Kernel = Callable[..., Any]


class BlockKernels(NamedTuple):
    """The jitted kernels of one likelihood and one kind of block.

    Outputs and ``work`` are the caller's arrays; nothing is allocated. In all of them
    mu = max(W H.T, floor), M is 1 where V is observed, w = weight(V, mu), and products of
    arrays are entry by entry.

    gradient(block, W, H, scale, floor, (GW, GH), work)
        R = scale M (V - mu) w;  GW = R H,  GH = R.T W.
    gradient_curvature(block, W, H, scale, floor, (GW, GH, CW, CH), work)
        as gradient, and CW += C H,  CH += C.T W  with C = M curvature(V, mu, w).
    multiplicative_rows(block, W, H, floor, (num, den), work)
        num (m, K) += (M ratio(V, mu, w)) H,  den += C H.
    multiplicative_cols(block, W, H, floor, (num, den), work)
        num (n, K) += (M ratio(V, mu, w)).T W,  den += C.T W.
    evaluate(block, W, H, floor, out, cells, work)
        out (2,) float64 += (-sum M deviance(V, mu), sum M (V - mu)**2 w); the means of the
        monitored ``cells`` (rows, cols, mean, m2, count), block-local, in row-major order
        and not floored, go into the running mean and sum of squares of ``count`` draws,
        this one among them.

    Source: Şimşekli et al. 2017, eq. 6 and 7; Şimşekli et al. 2015, section 4.
    """

    gradient: Kernel
    gradient_curvature: Kernel
    multiplicative_rows: Kernel
    multiplicative_cols: Kernel
    evaluate: Kernel


def index_type(n: int) -> np.dtype[Any]:
    """The dtype of column numbers in a sparse block of n columns."""
    return np.dtype(np.uint16 if n <= NARROW_COLUMNS else np.int32)


def pointer_type(entries: int) -> np.dtype[Any]:
    """The dtype of row pointers in a sparse block with so many entries."""
    return np.dtype(np.int32 if entries < 2**31 else np.int64)
