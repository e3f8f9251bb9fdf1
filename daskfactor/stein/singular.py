"""Leading singular vectors of data on a grid, missing entries filled in from a fit.

The solver is scipy's; what it is given are products of the data with a few vectors, summed
block by block on the engine: X = P(V - WH) + WH, P the observed entries, is never formed.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import linalg

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import DataError, OptionError
from daskfactor.executors.base import Executor
from daskfactor.executors.state import ChainState
from daskfactor.kernels.views import BlockView, SparseBlock
from daskfactor.kernels.workspace import Workspace
from daskfactor.random import Stream, generator
from daskfactor.stein.particles import Side

Array = NDArray[np.float64]

TOLERANCE: Final = 1e-6
"""Relative, of the squared singular values; blocks may be in single precision."""
SMALL: Final = 2
"""Matrices with fewer rows or columns than so many times the rank are taken whole."""


class Singular(NamedTuple):
    """U (I, R), singular values (R,) in falling order, Vᵀ (R, J); X ≈ U diag(values) Vᵀ."""

    left: Array
    values: Array
    right: Array


def truncated_svd(
    executor: Executor,
    data: BlockedData,
    rank: int,
    seed: int = 0,
    fill: ChainState | None = None,
) -> Singular:
    r"""Leading singular triplets, signs fixed by :func:`consistent_signs`.

    .. math:: X \approx U_R \Sigma_R V_R^\top

    Parameters
    ----------
    rank
        R, from 1 to min(I, J).
    fill
        Factors whose product stands in for missing entries; needed if there are any.

    Returns
    -------
    Singular
        In the order of the grid's rows and columns.

    Raises
    ------
    OptionError
        If the matrix has no so many singular values, or lacks a fill.
    DataError
        If all values are zero.

    Notes
    -----
    Implicitly restarted Lanczos (ARPACK, by `scipy.sparse.linalg.svds`), which looks at the
    data some tens of times.
    """
    short = min(data.shape)
    if not 1 <= rank <= short:
        raise OptionError(
            f"a matrix of {data.shape[0]} x {data.shape[1]} has {short} singular vectors, "
            f"asked for {rank}; take a smaller rank"
        )
    if data.n_missing and fill is None:
        raise OptionError("entries are missing; pass factors that fill them in")
    if data.maximum == data.minimum == 0:
        raise DataError("all entries are zero, so there are no singular vectors; check the data")
    matrix = _Completed(executor, data, fill)
    if short < SMALL * rank + 2:
        whole = matrix.times("rows", np.eye(data.shape[1]))
        found = whole_svd(whole, rank)
    else:
        operator = linalg.LinearOperator(
            data.shape,
            matvec=lambda x: matrix.times("rows", x.reshape(-1, 1)).ravel(),
            rmatvec=lambda y: matrix.times("columns", y.reshape(-1, 1)).ravel(),
            dtype=np.float64,
        )
        first = generator(seed, 0, Stream.START, 2).standard_normal(short)
        triplets = linalg.svds(operator, k=rank, tol=TOLERANCE, v0=first, solver="arpack")
        left, values, right = (np.asarray(one, np.float64) for one in triplets)
        order = np.argsort(-values)
        found = Singular(left[:, order], values[order], right[order])
    return consistent_signs(found)


def whole_svd(matrix: Array, rank: int) -> Singular:
    """Leading triplets of an array in memory, signs as LAPACK has them."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return Singular(*(np.asarray(one) for one in (left[:, :rank], values[:rank], right[:rank])))


def consistent_signs(found: Singular) -> Singular:
    r"""The same triplets, each pair of vectors turned to where most of the data point.

    .. math:: s_u = \sum_j \mathrm{sign}(v_{rj}) v_{rj}^2, \quad
        s_v = \sum_i \mathrm{sign}(u_{ir}) u_{ir}^2

    and the one of larger size decides for both: inner products of the data's columns with
    u_r, once the other triplets are taken off, are σ_r v_r, so that no look at the data is
    needed.

    References
    ----------
    Bro, Acar and Kolda 2008, algorithm 1; Masood and Doshi-Velez, section 8.3.
    """
    by_right = (np.sign(found.right) * found.right**2).sum(axis=1)
    by_left = (np.sign(found.left) * found.left**2).sum(axis=0)
    sign = np.sign(np.where(np.abs(by_left) >= np.abs(by_right), by_left, by_right))
    sign[sign == 0] = 1.0
    return Singular(found.left * sign, found.values, found.right * sign[:, None])


class _Completed:
    """Products of the completed data with vectors, band by band."""

    def __init__(self, executor: Executor, data: BlockedData, fill: ChainState | None) -> None:
        self.executor, self.data, self.fill = executor, data, fill

    def times(self, side: Side, vectors: Array) -> Array:
        """X x for ``"rows"``, Xᵀ y for ``"columns"``: (I, n) of (J, n), or the other way."""
        data, fill = self.data, self.fill
        grid = data.grid
        inner = grid.cols if side == "rows" else grid.rows
        parts = [
            np.ascontiguousarray(vectors[low:high], data.dtype)
            for low, high in zip(inner.offsets[:-1], inner.offsets[1:], strict=True)
        ]

        def one(band: int, work: Workspace) -> Array:
            del work
            total: Any = 0.0
            for other, x in enumerate(parts):
                row, col = (band, other) if side == "rows" else (other, band)
                factors = None if fill is None else (fill.rows[row].values, fill.cols[col].values)
                total = total + _product(data.view(row, col), side, x, factors)
            return np.asarray(total, dtype=np.float64)

        return np.concatenate(self.executor.map(one, range(grid.blocks), "singular-vectors"))


def compressed(view: SparseBlock, values: NDArray[Any] | None = None) -> Any:
    """A sparse block, or other values in its places, as scipy has it.

    Column numbers are as wide as scikit-learn takes them.
    """
    stored = view.values if values is None else values
    return sparse.csr_array(
        (stored, view.indices.astype(np.int32), view.indptr), shape=(view.m, view.n)
    )


def _product(
    view: BlockView | SparseBlock, side: Side, x: NDArray[Any], fill: tuple[Any, Any] | None
) -> Array:
    """One block's completed values, or their transpose, times a few vectors."""
    if isinstance(view, BlockView):
        values: Any = view.block
        if fill is not None:
            values = np.where(np.isnan(values), fill[0] @ fill[1].T, values)
        product = (values if side == "rows" else values.T) @ x
        return np.asarray(product, dtype=np.float64)
    stored, low_rank = view.values, None
    if fill is not None:
        W, H = fill
        rows = np.repeat(np.arange(view.m), np.diff(view.indptr))
        if view.zeros:  # only what is stored as NaN is missing
            at = np.flatnonzero(np.isnan(stored))
            stored = stored.copy()
            stored[at] = np.einsum("ek,ek->e", W[rows[at]], H[view.indices[at]])
        else:
            stored = stored - np.einsum("ek,ek->e", W[rows], H[view.indices])
            low_rank = W @ (H.T @ x) if side == "rows" else H @ (W.T @ x)
    block = compressed(view, stored)
    product = (block if side == "rows" else block.T) @ x
    return np.asarray(product if low_rank is None else product + low_rank, dtype=np.float64)
