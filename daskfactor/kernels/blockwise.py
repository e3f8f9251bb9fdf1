"""What a program asks of a block, whatever kind of block it is, and however many factors it has.

Factors are a tuple of bands (I_n, K), C-contiguous, of one float dtype; of a matrix they are W
(m, K) and H (n, K). ``work`` is the thread's :class:`Workspace`; gradients that are returned are
its buffers, good until the next call. The letters of the formulas are those of `BlockKernels`.
Blocks that lie on a GPU are answered by :mod:`daskfactor.kernels.cuda.blocks`. Laws whose
unstored zeros do not add up in a closed form (`Likelihood.visits_all`) are not served of a tensor.

Source: Şimşekli et al. 2017, eq. 6 and 7; Şimşekli et al. 2015, sections 4 and 6; Kolda and
Bader 2009, section 3.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels import subsample
from daskfactor.kernels.cuda import blocks as cuda
from daskfactor.kernels.cuda.device import is_here
from daskfactor.kernels.dense import dense_kernels
from daskfactor.kernels.jit import jit_exact
from daskfactor.kernels.langevin import leapfrog_drift, leapfrog_kick, mean_share
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
Arrays = tuple[Array, ...]
Sums = tuple[Any, ...]
AnyView = AnyBlock | TensorBlock | cuda.Part

SLAB = 2**17
"""Entries that :func:`observed_values` looks at together."""
NO_FITS = np.empty(0)
"""In place of sums of fit that nobody asks for."""


def _parts(
    view: AnyBlock | TensorBlock,
    likelihood: Likelihood,
    factors: Arrays,
    floor: float,
    work: Workspace,
) -> tuple[BlockKernels, Any, Law, Any]:
    """Kernels for a block, the block as they take it, what they are told of the law, scratch."""
    N, K, dtype = len(factors), factors[0].shape[1], factors[0].dtype
    law = floor, likelihood.numbers
    if isinstance(view, BlockView) or (
        isinstance(view, SparseBlock) and likelihood.visits_all(view.zeros)
    ):
        complete = isinstance(view, BlockView) and view.complete
        tiles = work.tiles(view.m, view.n, K, dtype)
        return dense_kernels(likelihood, complete), view.arguments, law, tiles
    kernels = sparse_kernels(likelihood, view.zeros, N, K, view.weights is not None)
    return kernels, view.entries, law, work.sums(N, K, dtype)


def gradient(
    view: AnyView,
    likelihood: Likelihood,
    factors: Arrays,
    scale: float,
    floor: float,
    work: Workspace,
    curvatures: Arrays | None = None,
) -> Arrays:
    """Every factor's gradient (I_n, K), in buffers of ``work``; of a matrix ``(R H, R.T W)``.

    R = scale M (V - mu) w, with s / dispersion for ``scale``; ``floor`` may be -inf for means
    of any sign. ``curvatures`` gain theirs, ``C H`` and ``C.T W``.
    """
    if isinstance(view, cuda.Part):
        return cuda.gradient(view, likelihood, factors, scale, floor, curvatures)
    kernels, block, law, scratch = _parts(view, likelihood, factors, floor, work)
    out = work.gradients(view.shape, factors[0].shape[1], factors[0].dtype)
    scale = scale * likelihood.share
    if curvatures is None:
        kernels.gradient(block, factors, scale, law, (out, out), scratch)
        return out
    added = _addends(likelihood, curvatures)
    kernels.gradient_curvature(block, factors, scale, law, (out, added), scratch)
    _add(likelihood, curvatures, added)
    return out


def _addends(likelihood: Likelihood, sums: Sums) -> Sums:
    """Give arrays of zeros to add to, for `_add`; ``sums`` themselves where the share is 1."""
    if likelihood.share == 1.0:
        return sums
    return tuple(None if own is None else np.zeros_like(own) for own in sums)


def _add(likelihood: Likelihood, sums: Sums, added: Sums) -> None:
    """Add the law's share of what `_addends` gave to ``sums``."""
    if added is not sums:
        for own, more in zip(sums, added, strict=True):
            if own is not None:
                own += likelihood.share * more


def multiplicative(
    view: AnyView,
    likelihood: Likelihood,
    factor: int,
    factors: Arrays,
    floor: float,
    out: tuple[Array, Array],
    work: Workspace,
) -> None:
    """Add the block's share of one factor's multiplicative update to ``out``.

    Numerator and denominator, (I_n, K); of W they are Q H and C H, of H Q.T W and C.T W, with
    Q = M ratio.
    """
    if isinstance(view, cuda.Part):
        cuda.multiplicative(view, likelihood, factor, factors, floor, out)
        return
    kernels, block, law, scratch = _parts(view, likelihood, factors, floor, work)
    added = _addends(likelihood, out)
    kernels.multiplicative[factor](block, factors, law, added, scratch)
    _add(likelihood, out, added)


def slope(
    view: AnyView,
    likelihood: Likelihood,
    factor: int,
    factors: Arrays,
    floor: float,
    out: tuple[Array, NDArray[np.float64] | None],
    work: Workspace,
) -> None:
    """Add the block's share of one factor's gradient, and of the fit of each of its rows.

    ``out`` is (gradient, fits): gradient (I_n, K) += R H for W, or R.T W for H, with
    R = M (V - mu) w; fits, if not None, (I_n,), -= M deviance summed over the other factors.
    """
    if isinstance(view, cuda.Part):
        cuda.slope(view, likelihood, factor, factors, floor, out)
        return
    kernels, block, law, scratch = _parts(view, likelihood, factors, floor, work)
    part = work.gradients(view.shape, factors[0].shape[1], factors[0].dtype)[factor]
    gradient, fits = added = _addends(likelihood, out)
    found = gradient, NO_FITS if fits is None else fits
    kernels.slope[factor](block, factors, law, found, (part, *scratch))
    _add(likelihood, out, added)


@lru_cache(maxsize=128)
def _path_kernel(slope: Kernel) -> Kernel:
    @jit_exact
    def steps(
        block: Any,
        factors: Arrays,
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
            slope(block, factors, law, (gradient, nothing), work)
            leapfrog_kick(theta, momentum, gradient, spread, 1.0, precision, rate, shape)
            leapfrog_drift(theta, momentum, spread, 1.0)
            gradient[:, :] = 0

    return steps


def leapfrog(
    view: AnyBlock,
    likelihood: Likelihood,
    factor: int,
    factors: Arrays,
    floor: float,
    band: tuple[Array, Array, Array, Array],
    prior: tuple[float, float, float],
    count: int,
    work: Workspace,
) -> None:
    """Take whole steps of a path of one factor's rows, all of whose data are in the block.

    ``band`` is (theta, momentum, spread, gradient), of which theta is the factor, and ``prior``
    (precision, rate, shape), all as `leapfrog_kick` takes them. ``gradient`` is zero before and
    after. One compiled call does what `slope`, `leapfrog_kick` and `leapfrog_drift` do in turn.
    """
    kernels, block, law, scratch = _parts(view, likelihood, factors, floor, work)
    part = work.gradients(view.shape, factors[0].shape[1], factors[0].dtype)[factor]
    path = _path_kernel(kernels.slope[factor])
    path(block, factors, law, band, prior, count, (part, *scratch))


def evaluate(
    view: AnyView,
    likelihood: Likelihood,
    factors: Arrays,
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
    cells : (places, mean, m2, count) or None; int32 positions inside the block along each
        factor, of a matrix in row-major order, and running means and sums of squared deviations
        of their mu (not floored) over ``count`` draws including this one
    """
    if isinstance(view, cuda.Part):
        cuda.evaluate(view, likelihood, factors, floor, out, cells)
        return
    if cells is None:
        none, nothing = np.empty(0, np.int32), np.empty(0, factors[0].dtype)
        cells = (none,) * len(factors), nothing, nothing, 1
    kernels, block, law, scratch = _parts(view, likelihood, factors, floor, work)
    kernels.evaluate(block, factors, law, out, cells, scratch)


def add_subsample(view: AnyView, *rest: Any) -> None:
    """Add what drawn entries give to gradients, as `subsample.add_subsample` says.

    Blocks on the device are several, and have as many numbers of draws and streams.
    """
    add: Any = cuda.add_subsample if isinstance(view, cuda.Part) else subsample.add_subsample
    add(view, *rest)


def mean_shares(
    factors: Arrays, evenness: Sequence[Any], view: Callable[[], AnyView]
) -> Sequence[Any]:
    """Give `mean_share` of two factors in a block, times the evenness of each factor's band.

    On the device there is one for every row, and blocks say which rows are theirs.
    """
    if is_here(factors[0]):
        share = mean_share(*factors)
        return [share * even for even in evenness]
    part: Any = view()
    return cuda.mean_shares(part, factors, evenness)


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
