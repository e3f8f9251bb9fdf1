"""Langevin dynamics with momentum on one factor band: kick, drift, refresh, in place.

The three pieces of the splitting scheme BAOAB, in coordinates in which the momentum
is standard normal. With d_ik = sqrt(step / (weight_i curvature_k + precision_k)):

    kick     q <- q + d G,  G = grad - precision (x - mean)
    drift    x <- x + d q
    refresh  q <- c q + sqrt(1 - c^2) z

Kick, half a drift, refresh, half a drift leaves x with its exact variance wherever
the target is Gaussian, whatever the step (Leimkuhler and Matthews 2013, "Rational
construction of stochastic numerical methods for molecular sampling").

Each column has a mean, a precision, a curvature, and 1 if it moves or 0 if it is
frozen: the rows of ``columns`` (4, K). IEEE 754 throughout, so a row has the same
bits however the rows are split into bands.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import jit_exact, stack_array
from daskfactor.kernels.philox import CHUNK, NUMBERS, normal_chunk

Array = NDArray[Any]
MEAN, PRECISION, CURVATURE, FREE = 0, 1, 2, 3
"""Rows of ``columns``."""


@jit_exact
def kick_drift(
    x: Array,
    momentum: Array,
    grad: Array,
    weights: Array,
    columns: Array,
    step: float,
    share: float,
) -> None:
    """A kick by the gradient and ``share`` of a drift, in place on ``x`` and ``momentum``.

    q <- q + d (grad - precision (x - mean));  x <- x + share d q

    Parameters
    ----------
    x, momentum, grad : (n, K), C-contiguous, one float dtype; ``grad`` without the prior
    weights : (n, 1), how much data a row has
    columns : (4, K) mean, precision, curvature, free
    step : squared time step, without a unit
    share : 1 for a whole drift, 0.5 where a refresh follows
    """
    n, K = x.shape
    real = x.dtype.type
    size, part = real(step), real(share)
    for i in range(n):
        weight = weights[i, 0]
        for k in range(K):
            precision = columns[1, k]
            d = columns[3, k] * np.sqrt(size / (weight * columns[2, k] + precision))
            q = momentum[i, k] + d * (grad[i, k] - precision * (x[i, k] - columns[0, k]))
            momentum[i, k] = q
            x[i, k] += part * d * q


@jit_exact
def drift(
    x: Array, momentum: Array, weights: Array, columns: Array, step: float, share: float
) -> None:
    """``share`` of a drift: x <- x + share d q, in place on ``x``; as :func:`kick_drift`."""
    n, K = x.shape
    real = x.dtype.type
    size, part = real(step), real(share)
    for i in range(n):
        weight = weights[i, 0]
        for k in range(K):
            d = columns[3, k] * np.sqrt(size / (weight * columns[2, k] + columns[1, k]))
            x[i, k] += part * d * momentum[i, k]


@jit_exact
def _mix(momentum: Array, keep: Any, spread: Any, z: Array) -> None:
    for i in range(momentum.size):
        momentum[i] = keep * momentum[i] + spread * z[i]


@jit_exact
def refresh(
    momentum: Array, keep: float, key: NDArray[np.uint32], iteration: int, factor: int, row0: int
) -> None:
    """Mix fresh noise into the momentum, in place: q <- keep q + sqrt(1 - keep^2) z.

    Parameters
    ----------
    momentum : (n, K), C-contiguous, float32 or float64
    keep : correlation of the momentum with what it was, from 0 to 1
    key, iteration, factor, row0 : noise address, see :func:`fill_normals`
    """
    flat = momentum.reshape(momentum.size)
    z = stack_array(NUMBERS, momentum.dtype)
    real = momentum.dtype.type
    kept, spread = real(keep), real(np.sqrt(1.0 - keep * keep))
    begin = start = 0
    while begin < flat.size:
        count = normal_chunk(start, momentum.shape[1], key, iteration, factor, row0, z)
        end = min(begin + count, flat.size)
        _mix(flat[begin:end], kept, spread, z)
        begin = end
        start += CHUNK


@jit_exact
def sums_of_squares(x: Array, centre: Array, out: NDArray[np.float64]) -> None:
    """Add the squares of every column of a band to ``out``: out_k += sum_i (x_ik - centre_k)^2.

    Parameters
    ----------
    x : (n, K), C-contiguous
    centre, out : (K,) float64; rows are added one after the other
    """
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            away = np.float64(x[i, k]) - centre[k]
            out[k] += away * away
