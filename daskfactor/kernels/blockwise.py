"""What a program asks of a block, whatever kind of block it is.

``work`` is the thread's :class:`Workspace`; gradients that are returned are its
buffers, good until the next call. In all functions mu = max(W H.T, floor), M is
1 where V is observed, products of arrays are entry by entry; W is (m, K) and H
(n, K), C-contiguous, of one float dtype.

Source: Şimşekli et al. 2017, eq. 6 and 7; Şimşekli et al. 2015, section 4.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.dense import dense_kernels
from daskfactor.kernels.sparse import sparse_kernels
from daskfactor.kernels.views import AnyBlock, BlockView, SparseBlock
from daskfactor.kernels.workspace import Buffers, Gradients, Workspace
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]
Cells = tuple[NDArray[np.int32], NDArray[np.int32], Array, Array, int]

SLAB = 2**17
"""Entries that :func:`observed_values` looks at together."""


def _dense(view: BlockView, W: Array, H: Array, work: Workspace) -> tuple[tuple[Any, ...], Buffers]:
    buffers = work.arrays(view.m, view.n, W.shape[1], W.dtype)
    return (view.array, view.row0, view.col0, W, H), buffers


def _sparse(
    view: SparseBlock, W: Array, H: Array, work: Workspace
) -> tuple[tuple[Any, ...], Gradients]:
    buffers = work.gradients(view.m, view.n, W.shape[1], W.dtype)
    return (view.indptr, view.indices, view.values, W, H), buffers


def gradient(
    view: AnyBlock,
    likelihood: Likelihood,
    W: Array,
    H: Array,
    scale: float,
    floor: float,
    work: Workspace,
) -> tuple[Array, Array]:
    """``(R H, R.T W)`` with R = scale M (V - mu) mu**(beta - 2), in buffers of ``work``.

    Shapes (m, K) and (n, K). ``scale`` is s / dispersion; ``floor`` may be -inf
    for beta = 2.
    """
    if isinstance(view, SparseBlock):
        block, scratch = _sparse(view, W, H, work)
        out = scratch.GW, scratch.GH
        kernels = sparse_kernels(likelihood, view.zeros, W.shape[1])
        kernels.gradient(*block, scale, floor, *out, scratch.gram, scratch.sums)
        return out
    window, buffers = _dense(view, W, H, work)
    dense_kernels(likelihood).gradient(*window, scale, floor, buffers.GW, buffers.GH, buffers.tile)
    return buffers.GW, buffers.GH


def gradient_curvature(
    view: AnyBlock,
    likelihood: Likelihood,
    W: Array,
    H: Array,
    scale: float,
    floor: float,
    CW: Array,
    CH: Array,
    work: Workspace,
) -> tuple[Array, Array]:
    """As :func:`gradient`; adds ``C H`` to CW and ``C.T W`` to CH, C = M mu**(beta - 1)."""
    if isinstance(view, SparseBlock):
        block, scratch = _sparse(view, W, H, work)
        out = scratch.GW, scratch.GH
        kernels = sparse_kernels(likelihood, view.zeros, W.shape[1])
        kernels.gradient_curvature(*block, scale, floor, *out, CW, CH, scratch.gram, scratch.sums)
        return out
    window, buffers = _dense(view, W, H, work)
    tile, tile2, GW, GH = buffers
    dense_kernels(likelihood).gradient_curvature(*window, scale, floor, GW, GH, CW, CH, tile, tile2)
    return GW, GH


def multiplicative(
    view: AnyBlock,
    likelihood: Likelihood,
    by_rows: bool,
    W: Array,
    H: Array,
    floor: float,
    num: Array,
    den: Array,
    work: Workspace,
) -> None:
    """Add the block's share of a multiplicative update to ``num`` and ``den``.

    With Q = M V mu**(beta - 2) and C = M mu**(beta - 1): num += Q H and den += C H,
    both (m, K), for the row factor; num += Q.T W and den += C.T W, both (n, K), for
    the column factor.
    """
    if isinstance(view, SparseBlock):
        block, scratch = _sparse(view, W, H, work)
        sparse = sparse_kernels(likelihood, view.zeros, W.shape[1])
        share = sparse.multiplicative_rows if by_rows else sparse.multiplicative_cols
        share(*block, floor, num, den, scratch.gram, scratch.sums)
        return
    window, buffers = _dense(view, W, H, work)
    dense = dense_kernels(likelihood)
    share = dense.multiplicative_rows if by_rows else dense.multiplicative_cols
    share(*window, floor, num, den, buffers.tile, buffers.tile2)


def evaluate(
    view: AnyBlock,
    likelihood: Likelihood,
    W: Array,
    H: Array,
    floor: float,
    out: Array,
    cells: Cells | None,
    work: Workspace,
) -> None:
    """Add the block's sums of fit to ``out``; move the moments of its monitored cells.

    Parameters
    ----------
    out : (2,) float64, += (-sum M d_beta(V | mu), sum M (V - mu)**2 mu**(beta - 2));
        entries that are observed zeros count
    cells : (rows, columns, mean, m2, count) or None; int32 positions inside the block
        in row-major order, and running means and sums of squared deviations of
        their mu (not floored) over ``count`` draws including this one
    """
    if cells is None:
        none, nothing = np.empty(0, np.int32), np.empty(0, W.dtype)
        cells = (none, none, nothing, nothing, 1)
    if isinstance(view, SparseBlock):
        block, scratch = _sparse(view, W, H, work)
        sparse_kernels(likelihood, view.zeros, W.shape[1]).evaluate(
            *block, floor, scratch.sums, scratch.wide, out, *cells
        )
        return
    window, buffers = _dense(view, W, H, work)
    dense_kernels(likelihood).evaluate(*window, floor, buffers.tile, out, *cells)


def observed_values(view: AnyBlock) -> Iterator[tuple[NDArray[np.float64], int]]:
    """Observed entries in slabs: ``(values, zeros)``.

    ``values`` are observed stored entries in float64, ``zeros`` is how many
    observed zeros that are not stored belong to the slab.
    """
    if isinstance(view, SparseBlock):
        yield from _stored_values(view)
        return
    block = view.block
    rows = max(1, SLAB // max(1, view.n))
    for start in range(0, view.m, rows):
        yield _seen(block[start : start + rows]), 0


def _stored_values(view: SparseBlock) -> Iterator[tuple[NDArray[np.float64], int]]:
    unstored = view.m * view.n - view.values.size if view.zeros else 0
    if unstored:
        yield np.empty(0), unstored
    for start in range(0, view.values.size, SLAB):
        yield _seen(view.values[start : start + SLAB]), 0


def _seen(values: Array) -> NDArray[np.float64]:
    wide: NDArray[np.float64] = values.astype(np.float64)
    return wide[~np.isnan(wide)]
