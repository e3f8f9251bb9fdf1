"""What a program asks of a block, whatever kind of block it is.

``work`` is the thread's :class:`Workspace`; gradients that are returned are its
buffers, good until the next call. W is (m, K) and H (n, K), C-contiguous, of one
float dtype; the letters of the formulas are those of `BlockKernels`.

Source: Şimşekli et al. 2017, eq. 6 and 7; Şimşekli et al. 2015, section 4.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.dense import dense_kernels
from daskfactor.kernels.sparse import sparse_kernels
from daskfactor.kernels.views import AnyBlock, BlockKernels, SparseBlock, Watched
from daskfactor.kernels.workspace import Workspace
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]

SLAB = 2**17
"""Entries that :func:`observed_values` looks at together."""


def _parts(
    view: AnyBlock, likelihood: Likelihood, W: Array, H: Array, work: Workspace
) -> tuple[BlockKernels, tuple[Any, ...], tuple[Array, Array], tuple[Array, ...]]:
    """Kernels for a block, the block as they take it, buffers of gradients, and scratch."""
    shape = (view.m, view.n, W.shape[1], W.dtype)
    if isinstance(view, SparseBlock):
        GW, GH, *scratch = work.gradients(*shape)
        block: tuple[Any, ...] = (view.indptr, view.indices, view.values)
        return sparse_kernels(likelihood, view.zeros, W.shape[1]), block, (GW, GH), tuple(scratch)
    tile, tile2, GW, GH = work.arrays(*shape)
    return dense_kernels(likelihood), (view.array, view.row0, view.col0), (GW, GH), (tile, tile2)


def gradient(
    view: AnyBlock,
    likelihood: Likelihood,
    W: Array,
    H: Array,
    scale: float,
    floor: float,
    work: Workspace,
    curvatures: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """``(R H, R.T W)`` with R = scale M (V - mu) w, in buffers of ``work``.

    Shapes (m, K) and (n, K). ``scale`` is s / dispersion; ``floor`` may be -inf for means
    of any sign. ``curvatures`` (CW, CH) gain ``C H`` and ``C.T W``.
    """
    kernels, block, out, scratch = _parts(view, likelihood, W, H, work)
    if curvatures is None:
        kernels.gradient(block, W, H, scale, floor, out, scratch)
    else:
        kernels.gradient_curvature(block, W, H, scale, floor, (*out, *curvatures), scratch)
    return out


def multiplicative(
    view: AnyBlock,
    likelihood: Likelihood,
    by_rows: bool,
    W: Array,
    H: Array,
    floor: float,
    out: tuple[Array, Array],
    work: Workspace,
) -> None:
    """Add the block's share of a multiplicative update to ``out``, numerator and denominator.

    Q H and C H, both (m, K), for the row factor, or Q.T W and C.T W, both (n, K), for the
    column factor, with Q = M ratio.
    """
    kernels, block, _, scratch = _parts(view, likelihood, W, H, work)
    share = kernels.multiplicative_rows if by_rows else kernels.multiplicative_cols
    share(block, W, H, floor, out, scratch)


def evaluate(
    view: AnyBlock,
    likelihood: Likelihood,
    W: Array,
    H: Array,
    floor: float,
    out: Array,
    cells: Watched | None,
    work: Workspace,
) -> None:
    """Add the block's sums of fit to ``out``; move the moments of its monitored cells.

    Parameters
    ----------
    out : (2,) float64, += (-sum M deviance, sum M (V - mu)**2 w); entries that are
        observed zeros count
    cells : (rows, columns, mean, m2, count) or None; int32 positions inside the block
        in row-major order, and running means and sums of squared deviations of
        their mu (not floored) over ``count`` draws including this one
    """
    if cells is None:
        none, nothing = np.empty(0, np.int32), np.empty(0, W.dtype)
        cells = (none, none, nothing, nothing, 1)
    kernels, block, _, scratch = _parts(view, likelihood, W, H, work)
    kernels.evaluate(block, W, H, floor, out, cells, scratch)


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
