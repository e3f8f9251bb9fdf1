"""What a program asks of a block of a matrix or of a tensor, whatever number of factors it has.

``factors`` has a band (I_n, K) of each of the N factors that meet in the block. Of two it is
:mod:`daskfactor.kernels.blockwise` that answers, of more :mod:`daskfactor.kernels.tensorwise`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels import blockwise, tensorwise
from daskfactor.kernels.views import AnyBlock, TensorBlock, Workspace
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]
Arrays = tuple[Array, ...]
Watched = tuple[Arrays, Array, Array, int]
"""Monitored cells of a block: places along each factor, running mean and sum of squares, count."""


def gradient(
    view: AnyBlock | TensorBlock,
    likelihood: Likelihood,
    factors: Arrays,
    scale: float,
    floor: float,
    work: Workspace,
    curvatures: Arrays | None = None,
) -> Arrays:
    """Give every factor's gradient (I_n, K), in buffers of ``work``; ``curvatures`` gain theirs."""
    if isinstance(view, TensorBlock):
        return tensorwise.gradient(view, likelihood, factors, scale, floor, work, curvatures)
    W, H = factors
    both: Any = curvatures
    return blockwise.gradient(view, likelihood, W, H, scale, floor, work, both)


def multiplicative(
    view: AnyBlock | TensorBlock,
    likelihood: Likelihood,
    factor: int,
    factors: Arrays,
    floor: float,
    out: tuple[Array, Array],
    work: Workspace,
) -> None:
    """Add the block's share of a factor's multiplicative update, numerator and denominator."""
    if isinstance(view, TensorBlock):
        tensorwise.multiplicative(view, likelihood, factor, factors, floor, out, work)
    else:
        W, H = factors
        blockwise.multiplicative(view, likelihood, factor == 0, W, H, floor, out, work)


def slope(
    view: AnyBlock | TensorBlock,
    likelihood: Likelihood,
    factor: int,
    factors: Arrays,
    floor: float,
    out: tuple[Array, NDArray[np.float64] | None],
    work: Workspace,
) -> None:
    """Add the block's share of a factor's gradient, and of the fit of each of its rows."""
    if isinstance(view, TensorBlock):
        tensorwise.slope(view, likelihood, factor, factors, floor, out, work)
    else:
        W, H = factors
        blockwise.slope(view, likelihood, factor == 0, W, H, floor, out, work)


def evaluate(
    view: AnyBlock | TensorBlock,
    likelihood: Likelihood,
    factors: Arrays,
    floor: float,
    out: Array,
    cells: Watched | None,
    work: Workspace,
) -> None:
    """Add the block's sums of fit to ``out`` (2,); move the moments of its monitored cells."""
    if isinstance(view, TensorBlock):
        tensorwise.evaluate(view, likelihood, factors, floor, out, cells, work)
        return
    W, H = factors
    watched = None if cells is None else (cells[0][0], cells[0][1], *cells[1:])
    blockwise.evaluate(view, likelihood, W, H, floor, out, watched, work)
