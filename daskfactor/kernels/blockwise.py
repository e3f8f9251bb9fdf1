"""What a program asks of a block, whatever kind of block it is, and however many factors it has.

Factors are a tuple of bands (I_n, K), C-contiguous, of one float dtype; of a matrix they are W
(m, K) and H (n, K). ``work`` is the thread's :class:`Workspace`; gradients that are returned are
its buffers, good until the next call. The letters of the formulas are those of `Sums`.
Blocks that lie on a GPU are answered by :mod:`daskfactor.kernels.cuda.blocks`. Laws whose
unstored zeros do not add up in a closed form (`Likelihood.visits_all`) are not served of a tensor.

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
from daskfactor.kernels.cuda.device import is_here
from daskfactor.kernels.langevin import mean_share
from daskfactor.kernels.paths import Path, path_kernel
from daskfactor.kernels.views import (
    AnyBlock,
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
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]
Arrays = tuple[Array, ...]
AnyView = AnyBlock | TensorBlock | cuda.Part

SLAB = 2**17
"""Entries that :func:`observed_values` looks at together."""
NO_FITS = np.empty(0)
"""In place of sums of fit that nobody asks for."""


class Taken(NamedTuple):
    """A block as kernels take it: their maker, the block, the law, and scratch."""

    accumulation: Callable[..., Kernel]
    evaluation: Callable[[], Kernel]
    block: Any
    law: Law
    work: Any


def _taken(
    view: AnyBlock | TensorBlock,
    likelihood: Likelihood,
    factors: Arrays,
    floor: float,
    work: Workspace,
    factor: int | None = None,
) -> Taken:
    N, K, dtype = len(factors), factors[0].shape[1], factors[0].dtype
    law = floor, likelihood.numbers
    if isinstance(view, BlockView) or (
        isinstance(view, SparseBlock) and likelihood.visits_all(view.zeros)
    ):
        whole = isinstance(view, BlockView) and view.complete
        add, fit = partial(dense.accumulation, likelihood), partial(dense.evaluation, likelihood)
        tiles = work.tiles(view.m, view.n, K, dtype)
        return Taken(partial(add, complete=whole), fit, view.arguments, law, tiles)
    about = likelihood, view.zeros, N, K, view.weights is not None
    add, fit = partial(sparse.accumulation, *about), partial(sparse.evaluation, *about)
    rows = 0 if factor is None else view.shape[factor]
    return Taken(add, fit, view.entries, law, work.sums(N, K, rows, dtype))


def accumulate(
    view: AnyView,
    likelihood: Likelihood,
    factors: Arrays,
    floor: float,
    kind: Kind,
    sums: Sums,
    work: Workspace,
    scale: float = 1.0,
    cells: Watched | None = None,
) -> None:
    """Add the sums over a block's entries to the arrays that ask for them.

    Parameters
    ----------
    view, likelihood
        The block and the law of its entries, whose share counts.
    floor
        Smallest mean; it may be -inf for means of any sign.
    kind
        What ``sums.terms`` are of.
    sums
        Arrays of all factors, or of one of them; those of `Sums.total` alone or beside others.
    scale
        Of terms of the kind "score": the part of the data's scale over the dispersion.
    cells : (places, mean, m2, count) or None
        Monitored cells, which an evaluation moves; int32 positions inside the block along each
        factor, of a matrix in row-major order, and running means and sums of squared deviations
        of their mu (not floored) over ``count`` draws including this one.
    """
    if isinstance(view, cuda.Part):
        cuda.accumulate(view, likelihood, factors, floor, kind, sums, scale, cells)
        return
    if sums.total is not None:
        _evaluate(_taken(view, likelihood, factors, floor, work), factors, sums.total, cells)
    wanted = [n for n, term in enumerate(sums.terms) if term is not None]
    if not wanted:
        return
    factor = wanted[0] if len(wanted) == 1 else None
    taken = _taken(view, likelihood, factors, floor, work, factor)
    added = sums if likelihood.share == 1.0 else sums.zeros()
    some = added.terms[wanted[0]]
    terms = tuple(some if term is None else term for term in added.terms)
    curvatures = tuple(some if own is None else own for own in added.curvatures) or terms
    fits = added.fits[factor] if factor is not None and added.fits else None
    out = terms, curvatures, NO_FITS if fits is None else fits
    kernel = taken.accumulation(kind=kind, factor=factor, curved=sums.curved)
    kernel(taken.block, factors, scale, taken.law, out, taken.work)
    if added is not sums:
        sums.add(likelihood.share, added)


def _evaluate(taken: Taken, factors: Arrays, out: Array, cells: Watched | None) -> None:
    if cells is None:
        none, nothing = np.empty(0, np.int32), np.empty(0, factors[0].dtype)
        cells = (none,) * len(factors), nothing, nothing, 1
    taken.evaluation()(taken.block, factors, taken.law, out, cells, taken.work)


def gradient(
    view: AnyView,
    likelihood: Likelihood,
    factors: Arrays,
    scale: float,
    floor: float,
    work: Workspace,
    curvatures: Arrays | None = None,
) -> Arrays:
    """Return every factor's gradient (I_n, K), in buffers of ``work``; ``curvatures`` gain theirs.

    These are the sums of `accumulate` of the kind "score".
    """
    if isinstance(view, cuda.Part):
        return cuda.gradient(view, likelihood, factors, scale, floor, curvatures)
    out = work.gradients(view.shape, factors[0].shape[1], factors[0].dtype)
    for array in out:
        array[:] = 0
    sums = Sums(out, curvatures or ())
    accumulate(view, likelihood, factors, floor, "score", sums, work, scale)
    return out


def go_path(
    view: AnyBlock | TensorBlock,
    likelihood: Likelihood,
    factor: int,
    factors: Arrays,
    floor: float,
    path: Path,
    work: Workspace,
) -> None:
    """Go a whole path in one compiled call: what `accumulate`, kicks and drifts do in turn."""
    taken = _taken(view, likelihood, factors, floor, work, factor)
    slope = taken.accumulation(kind="score", factor=factor, curved=False)
    go = path_kernel(slope, path.prior[1] != 1.0)
    each = (path.gradient,) * len(factors)
    go(taken.block, factors, taken.law, path, each, likelihood.share, taken.work)


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
