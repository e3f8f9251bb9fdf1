"""Sums over the entries of a block of any kind, with any number of factors.

Factors are a tuple of bands (I_n, K), C-contiguous, of one float dtype; of a matrix they are W
(m, K) and H (n, K). ``work`` is the thread's :class:`Workspace`; gradients that are returned are
its buffers, good until the next call. The letters of the formulas are those of `Sums`.
Blocks on a GPU are passed on to :mod:`daskfactor.kernels.cuda.blocks`. Tensors do not support
laws whose unstored zeros do not add up in a closed form (`Likelihood.visits_all`).

Source: Şimşekli et al. 2017, eq. 6 and 7; Şimşekli et al. 2015, sections 4 and 6; Kolda and
Bader 2009, section 3.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels import dense, sparse, subsample
from daskfactor.kernels.cuda import blocks as cuda
from daskfactor.kernels.cuda.device import is_on_host
from daskfactor.kernels.langevin import mean_share
from daskfactor.kernels.paths import RowPaths, path_kernel, update_kernel
from daskfactor.kernels.views import (
    AnyBlock,
    Block,
    BlockView,
    Kernel,
    Kind,
    Law,
    SparseBlock,
    Sums,
    TensorBlock,
    Watched,
    Workspace,
)

Array = NDArray[Any]
Arrays = tuple[Array, ...]
AnyView = AnyBlock | TensorBlock | cuda.Part

SLAB = 2**17
"""Entries of a slab of :func:`observed_values`."""
NO_FITS = np.empty(0)
"""Stands for sums of fit that are not needed."""


class Prepared(NamedTuple):
    """A block as kernels take it: their factory, the block, the law, and scratch."""

    accumulation: Callable[..., Kernel]
    evaluation: Callable[[], Kernel]
    block: Any
    law: Law
    work: Any


def _prepared(block: Block, work: Workspace, factor: int | None = None) -> Prepared:
    view, likelihood, factors, floor = block
    N, K, dtype = len(factors), factors[0].shape[1], factors[0].dtype
    law = floor, likelihood.numbers
    if isinstance(view, BlockView) or (
        isinstance(view, SparseBlock) and likelihood.visits_all(view.zeros)
    ):
        complete = isinstance(view, BlockView) and view.complete
        add = partial(dense.accumulation, likelihood, complete=complete)
        fit, tiles = partial(dense.evaluation, likelihood), work.tiles(view.m, view.n, K, dtype)
        return Prepared(add, fit, view.arguments, law, tiles)
    kind = likelihood, view.zeros, N, K, view.weights is not None
    add, fit = partial(sparse.accumulation, *kind), partial(sparse.evaluation, *kind)
    rows = 0 if factor is None else view.shape[factor]
    return Prepared(add, fit, view.entries, law, work.sums(N, K, rows, dtype))


def accumulate(block: Block, kind: Kind, sums: Sums, work: Workspace, scale: float = 1.0) -> None:
    """Add the sums over a block's entries to the arrays of ``sums``.

    Parameters
    ----------
    block
        The block, its law, the factors and the smallest mean.
    kind
        Kind of ``sums.terms``.
    sums
        Arrays of all factors, or of one of them. There are scores of all factors, with or without
        curvatures; scores of one, with or without fits; and ratios with curvatures of one.
    scale
        Of terms of the kind "score": the part of the data's scale over the dispersion.
    """
    view, likelihood, factors, _ = block
    if isinstance(view, cuda.Part):
        cuda.accumulate(cuda.Pass(*block), kind, sums, scale)
        return
    numbers = [n for n, term in enumerate(sums.terms) if term is not None]
    factor = numbers[0] if len(numbers) == 1 else None
    prepared = _prepared(block, work, factor)
    curved, share = bool(sums.curvatures), likelihood.share
    if kind == "score" and not (curved or sums.fits):
        scale, share = scale * share, 1.0
    gains = sums if share == 1.0 else sums.zeros()
    none, nothing = gains.terms[numbers[0]][:0], (None,) * len(factors)
    terms, curvatures = (
        tuple(none if array is None else array for array in arrays or nothing)
        for arrays in gains[:2]
    )
    fits = gains.fits[factor] if factor is not None and gains.fits else NO_FITS
    kernel = prepared.accumulation(kind=kind, factor=factor, curved=curved)
    kernel(prepared.block, factors, scale, prepared.law, (terms, curvatures, fits), prepared.work)
    if gains is not sums:
        sums.add(share, gains)


def evaluate(
    block: Block, out: NDArray[np.float64], work: Workspace, cells: Watched | None = None
) -> None:
    """Add a block's (-sum M deviance(V, mu), sum M (V - mu)**2 w) to ``out``.

    ``cells`` are monitored cells of the block, of a matrix in row-major order; the means, not
    floored, go into their running moments of ``count`` draws, this one among them.
    """
    view, _, factors, _ = block
    if isinstance(view, cuda.Part):
        cuda.evaluate(cuda.Pass(*block), out, cells)
        return
    prepared = _prepared(block, work)
    if cells is None:
        moments = np.empty(0, factors[0].dtype)
        cells = (np.empty(0, np.int32),) * len(factors), moments, moments, 1
    prepared.evaluation()(prepared.block, factors, prepared.law, out, cells, prepared.work)


def gradient(
    block: Block, scale: float, work: Workspace, curvatures: Arrays | None = None
) -> Arrays:
    """Return every factor's gradient (I_n, K), in buffers of ``work``; ``curvatures`` gain theirs.

    These are the sums of `accumulate` of the kind "score".
    """
    view, _, factors, _ = block
    if isinstance(view, cuda.Part):
        return cuda.gradient(cuda.Pass(*block), scale, curvatures)
    out = work.gradients(view.shape, factors[0].shape[1], factors[0].dtype)
    for array in out:
        array[:] = 0
    accumulate(block, "score", Sums(out, curvatures or ()), work, scale)
    return out


def go_path(block: Block, factor: int, path: RowPaths, work: Workspace) -> None:
    """Go a whole path in one compiled call: what `accumulate`, kicks and drifts do in turn."""
    prepared, (_, likelihood, factors, _) = _prepared(block, work, factor), block
    slope = prepared.accumulation(kind="score", factor=factor, curved=False)
    go = path_kernel(slope, path.prior[1] != 1.0)
    each = tuple(path.gradient[: None if n == factor else 0] for n in range(len(factors)))
    go(prepared.block, factors, prepared.law, path, each, likelihood.share, prepared.work)


def update_block(
    block: Block, penalties: tuple[float, float], cycles: int, work: Workspace
) -> None:
    """Do cycles of multiplicative updates of a matrix whose data are all in this block.

    They are those of `multiply_by_share` without a pull, at an exponent of 1.
    """
    prepared, factors = _prepared(block, work), block[2]
    adds = [prepared.accumulation(kind="ratio", factor=n, curved=True) for n in range(2)]
    shares = [tuple([np.zeros_like(theta) for theta in factors]) for _ in range(2)]
    kernel = update_kernel(*adds)
    kernel(prepared.block, factors, prepared.law, *shares, penalties, cycles, prepared.work)


def add_subsample(block: Block, *rest: Any) -> None:
    """Add the terms of drawn entries to gradients, as `subsample.add_subsample` does.

    A part on the device has several blocks, and as many numbers of draws and streams.
    """
    if isinstance(block[0], cuda.Part):
        cuda.add_subsample(cuda.Pass(*block), *rest)
    else:
        subsample.add_subsample(block, *rest)


def mean_shares(
    factors: Arrays, evenness: Sequence[Any], view: Callable[[], AnyView]
) -> Sequence[Any]:
    """Return `mean_share` of two factors in a block, times the evenness of each factor's band.

    On the device there is one for every row, that of its block.
    """
    if is_on_host(factors[0]):
        share = mean_share(*factors)
        return [share * even for even in evenness]
    part: Any = view()
    return cuda.mean_shares(part, factors, evenness)


def observed_values(
    view: AnyBlock, by_column: bool = False
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64] | None, int, NDArray[np.int64]]]:
    """Yield observed entries in slabs: ``(values, weights, zeros, columns)``.

    ``values`` are observed stored entries in float64, ``weights`` theirs, if cells have any, and
    ``zeros`` is the number of the slab's observed zeros that are not stored. ``columns`` are
    those of the entries inside the block if ``by_column``, else there are none.
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
