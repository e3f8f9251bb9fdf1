"""What a program asks of a block, whatever kind of block it is.

``work`` is the thread's :class:`Workspace`; gradients that are returned are its
buffers, good until the next call. W is (m, K) and H (n, K), C-contiguous, of one
float dtype; the letters of the formulas are those of `BlockKernels`.

Source: Şimşekli et al. 2017, eq. 6 and 7; Şimşekli et al. 2015, section 4.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.dense import dense_kernels
from daskfactor.kernels.jit import jit_exact
from daskfactor.kernels.langevin import leapfrog_drift, leapfrog_kick
from daskfactor.kernels.sparse import sparse_kernels
from daskfactor.kernels.views import (
    AnyBlock,
    BlockKernels,
    BlockView,
    Kernel,
    Law,
    SparseBlock,
    TensorBlock,
    Watched,
    Workspace,
)
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]

SLAB = 2**17
"""Entries that :func:`observed_values` looks at together."""


def _parts(
    view: AnyBlock, likelihood: Likelihood, W: Array, floor: float, work: Workspace
) -> tuple[BlockKernels, Law, tuple[Array, Array], tuple[Array, ...]]:
    """Kernels for a block, what they are told of the law, buffers of gradients, and scratch."""
    K, shape = W.shape[1], (view.m, view.n, W.shape[1], W.dtype)
    law, out = (floor, likelihood.numbers), work.gradients(*shape)
    if isinstance(view, SparseBlock) and not likelihood.visits_all(view.zeros):
        kernels = sparse_kernels(likelihood, view.zeros, K, view.weights is not None)
        return kernels, law, out, work.sums(K, W.dtype)
    complete = isinstance(view, BlockView) and view.complete
    return dense_kernels(likelihood, complete), law, out, work.tiles(*shape)


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
    kernels, law, out, scratch = _parts(view, likelihood, W, floor, work)
    block, scale = view.arguments, scale * likelihood.share
    if curvatures is None:
        kernels.gradient(block, W, H, scale, law, out, scratch)
        return out
    with by_share(likelihood, curvatures) as added:
        kernels.gradient_curvature(block, W, H, scale, law, (*out, *added), scratch)
    return out


@contextmanager
def by_share(likelihood: Likelihood, sums: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Give arrays to add to; times the law's share they come to ``sums``. None stays None."""
    if likelihood.share == 1.0:
        yield sums
        return
    added: tuple[Any, ...] = tuple(None if own is None else np.zeros_like(own) for own in sums)
    yield added
    for own, more in zip(sums, added, strict=True):
        if own is not None:
            own += likelihood.share * more


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
    kernels, law, _, scratch = _parts(view, likelihood, W, floor, work)
    share = kernels.multiplicative_rows if by_rows else kernels.multiplicative_cols
    with by_share(likelihood, out) as added:
        share(view.arguments, W, H, law, added, scratch)


NO_FITS = np.empty(0)
"""In place of sums of fit that nobody asks for."""


def slope(
    view: AnyBlock,
    likelihood: Likelihood,
    by_rows: bool,
    W: Array,
    H: Array,
    floor: float,
    out: tuple[Array, NDArray[np.float64] | None],
    work: Workspace,
) -> None:
    """Add the block's share of one side's gradient, and of the fit of each of its rows.

    ``out`` is (gradient, fits): gradient += R H (m, K) for the row factor, or R.T W (n, K) for
    the column factor, with R = M (V - mu) w; fits, if not None, (m,) or (n,), -= M deviance
    summed over the other side.
    """
    kernels, law, buffers, scratch = _parts(view, likelihood, W, floor, work)
    add = kernels.slope_rows if by_rows else kernels.slope_cols
    with by_share(likelihood, out) as (gradient, fits):
        found = gradient, NO_FITS if fits is None else fits
        add(view.arguments, W, H, law, found, (buffers[0 if by_rows else 1], *scratch))


@lru_cache(maxsize=128)
def _path_kernel(slope: Kernel) -> Kernel:
    @jit_exact
    def steps(
        block: Any,
        W: Array,
        H: Array,
        law: Law,
        band: tuple[Array, Array, Array, Array],
        prior: tuple[float, float, float],
        count: int,
        work: Any,
    ) -> None:
        theta, momentum, spread, gradient = band
        precision, rate, shape = prior
        nothing = np.empty(0)
        for _ in range(count):
            slope(block, W, H, law, (gradient, nothing), work)
            leapfrog_kick(theta, momentum, gradient, spread, 1.0, precision, rate, shape)
            leapfrog_drift(theta, momentum, spread, 1.0)
            gradient[:, :] = 0

    return steps


def leapfrog(
    view: AnyBlock,
    likelihood: Likelihood,
    by_rows: bool,
    W: Array,
    H: Array,
    floor: float,
    band: tuple[Array, Array, Array, Array],
    prior: tuple[float, float, float],
    count: int,
    work: Workspace,
) -> None:
    """Take whole steps of a path of one side's rows, all of whose data are in the block.

    ``band`` is (theta, momentum, spread, gradient), of which theta is W or H, and ``prior``
    (precision, rate, shape), all as `leapfrog_kick` takes them. ``gradient`` is zero before and
    after. One compiled call does what `slope`, `leapfrog_kick` and `leapfrog_drift` do in turn.
    """
    kernels, law, buffers, scratch = _parts(view, likelihood, W, floor, work)
    slope = kernels.slope_rows if by_rows else kernels.slope_cols
    rest = (buffers[0 if by_rows else 1], *scratch)
    _path_kernel(slope)(view.arguments, W, H, law, band, prior, count, rest)


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
    kernels, law, _, scratch = _parts(view, likelihood, W, floor, work)
    kernels.evaluate(view.arguments, W, H, law, out, cells, scratch)


def observed_values(
    view: AnyBlock, by_column: bool = False
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64] | None, int, NDArray[np.int64]]]:
    """Observed entries in slabs: ``(values, weights, zeros, columns)``.

    ``values`` are observed stored entries in float64, ``weights`` theirs, if cells have any, and
    ``zeros`` is how many observed zeros that are not stored belong to the slab. ``columns`` are
    those of the entries inside the block, if they are asked for, and none else.
    """
    columns = np.empty(0, np.int64)
    if isinstance(view, SparseBlock | TensorBlock):
        stored, step = view.values, SLAB
        if view.zeros and stored.size < view.cells:
            none, rest = np.empty(0), view.cells - stored.size
            yield none, None if view.weights is None else none, rest, columns
    else:
        stored, step = view.block, max(1, SLAB // max(1, view.n))
    for start in range(0, len(stored), step):
        wide = stored[start : start + step].astype(np.float64)
        seen, weights = ~np.isnan(wide), None
        if view.weights is not None:
            weights = view.weights[start : start + step][seen].astype(np.float64)
        if by_column and isinstance(view, SparseBlock):
            columns = view.indices[start : start + step][seen].astype(np.int64)
        elif by_column:
            columns = np.nonzero(seen)[1]
        yield wide[seen], weights, 0, columns
