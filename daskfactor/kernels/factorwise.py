"""What a program asks of a block of a matrix or of a tensor, whatever number of factors it has.

Factors are a tuple of bands (I_n, K), C-contiguous, of one float dtype. Blocks of a matrix are
answered by :mod:`daskfactor.kernels.blockwise`, and those of a part of it that lie on a GPU by
:mod:`daskfactor.kernels.cuda.blocks`. Laws whose unstored zeros do not add up in a
closed form (`Likelihood.visits_all`) are not served of a tensor.

Source: Şimşekli et al. 2015, section 6; Kolda and Bader 2009, section 3.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels import blockwise, subsample
from daskfactor.kernels.blockwise import NO_FITS, by_share
from daskfactor.kernels.cuda import blocks as cuda
from daskfactor.kernels.cuda.device import is_here
from daskfactor.kernels.langevin import mean_share
from daskfactor.kernels.tensor import TensorKernels, tensor_kernels
from daskfactor.kernels.views import AnyBlock, TensorBlock, Workspace
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]
Arrays = tuple[Array, ...]
AnyView = AnyBlock | TensorBlock | cuda.Part
Parts = tuple[TensorKernels, tuple[float, tuple[Any, ...]], tuple[Array, Array, Array]]
Watched = tuple[Arrays, Array, Array, int]
"""Monitored cells of a block: places along each factor, running mean and sum of squares, count."""


def _parts(
    view: TensorBlock, likelihood: Likelihood, factors: Arrays, floor: float, work: Workspace
) -> Parts:
    """Kernels for a block, what they are told of the law, and scratch."""
    N, K = len(factors), factors[0].shape[1]
    kernels = tensor_kernels(likelihood, view.zeros, N, K)
    return kernels, (floor, likelihood.numbers), work.tensor_sums(N, K, factors[0].dtype)


def gradient(
    view: AnyView,
    likelihood: Likelihood,
    factors: Arrays,
    scale: float,
    floor: float,
    work: Workspace,
    curvatures: Arrays | None = None,
) -> Arrays:
    """Give every factor's gradient (I_n, K), in buffers of ``work``; ``curvatures`` gain theirs."""
    if isinstance(view, cuda.Part):
        return cuda.gradient(view, likelihood, factors, scale, floor, curvatures)
    if not isinstance(view, TensorBlock):
        (W, H), both = factors, curvatures
        return blockwise.gradient(view, likelihood, W, H, scale, floor, work, both)  # type: ignore[arg-type]
    kernels, law, scratch = _parts(view, likelihood, factors, floor, work)
    out = work.tensor_gradients(view.shape, factors[0].shape[1], factors[0].dtype)
    block, scale = view.arguments, scale * likelihood.share
    if curvatures is None:
        kernels.gradient(block, factors, scale, law, (out, out), scratch)
        return out
    with by_share(likelihood, curvatures) as added:
        kernels.gradient_curvature(block, factors, scale, law, (out, added), scratch)
    return out


def multiplicative(
    view: AnyView,
    likelihood: Likelihood,
    factor: int,
    factors: Arrays,
    floor: float,
    out: tuple[Array, Array],
    work: Workspace,
) -> None:
    """Add the block's share of one factor's multiplicative update, numerator and denominator."""
    if isinstance(view, cuda.Part):
        cuda.multiplicative(view, likelihood, factor, factors, floor, out)
        return
    if not isinstance(view, TensorBlock):
        W, H = factors
        blockwise.multiplicative(view, likelihood, factor == 0, W, H, floor, out, work)
        return
    kernels, law, scratch = _parts(view, likelihood, factors, floor, work)
    with by_share(likelihood, out) as added:
        kernels.multiplicative[factor](view.arguments, factors, law, added, scratch)


def slope(
    view: AnyView,
    likelihood: Likelihood,
    factor: int,
    factors: Arrays,
    floor: float,
    out: tuple[Array, NDArray[np.float64] | None],
    work: Workspace,
) -> None:
    """Add the block's share of one factor's gradient, and of the fit of each of its rows."""
    if isinstance(view, cuda.Part):
        cuda.slope(view, likelihood, factor, factors, floor, out)
        return
    if not isinstance(view, TensorBlock):
        W, H = factors
        blockwise.slope(view, likelihood, factor == 0, W, H, floor, out, work)
        return
    kernels, law, scratch = _parts(view, likelihood, factors, floor, work)
    K, dtype = factors[0].shape[1], factors[0].dtype
    part = work.tensor_gradients(view.shape, K, dtype)[factor]
    with by_share(likelihood, out) as (gradient, fits):
        found = gradient, NO_FITS if fits is None else fits
        kernels.slope[factor](view.arguments, factors, law, found, (part, *scratch))


def add_subsample(view: AnyView, *rest: Any) -> None:
    """Add what drawn entries give to gradients, as `subsample.add_subsample` says.

    Blocks on the device are several, and have as many numbers of draws and streams.
    """
    add: Any = cuda.add_subsample if isinstance(view, cuda.Part) else subsample.add_subsample
    add(view, *rest)


def evaluate(
    view: AnyView,
    likelihood: Likelihood,
    factors: Arrays,
    floor: float,
    out: Array,
    cells: Watched | None,
    work: Workspace,
) -> None:
    """Add the block's sums of fit to ``out`` (2,); move the moments of its monitored cells."""
    if isinstance(view, cuda.Part):
        cuda.evaluate(view, likelihood, factors, floor, out, cells)
        return
    if not isinstance(view, TensorBlock):
        W, H = factors
        watched = None if cells is None else (*cells[0], *cells[1:])
        blockwise.evaluate(view, likelihood, W, H, floor, out, watched, work)  # type: ignore[arg-type]
        return
    kernels, law, scratch = _parts(view, likelihood, factors, floor, work)
    if cells is None:
        none, nothing = np.empty(0, np.int32), np.empty(0, factors[0].dtype)
        cells = (none,) * len(factors), nothing, nothing, 1
    kernels.evaluate(view.arguments, factors, law, out, cells, scratch)


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
