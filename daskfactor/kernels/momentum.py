"""Dynamics with momentum on one factor band, in place: Langevin, and leapfrog steps.

Langevin dynamics: the three pieces of the splitting scheme BAOAB, in coordinates in which
the momentum is standard normal. With d_ik = sqrt(step / (weight_i curvature_k + precision_k)):

    kick     q <- q + d G,  G = grad - precision (x - mean)
    drift    x <- x + d q
    refresh  q <- c q + sqrt(1 - c^2) z

Kick, half a drift, refresh, half a drift leaves x with its exact variance wherever
the target is Gaussian, whatever the step (Leimkuhler and Matthews 2013, "Rational
construction of stochastic numerical methods for molecular sampling").

Each column has a mean, a precision, a curvature, and 1 if it moves or 0 if it is
frozen: the rows of ``columns`` (4, K). IEEE 754 throughout, so a row has the same
bits however the rows are split into bands.

Leapfrog steps (:func:`leapfrog_kick`, :func:`leapfrog_drift`) are mirrored at zero. With mass
m and s = 1/√m, u = p / √m, so that a kick is u += ε s G and a drift x += ε s u. An entry with
s = 0 does not move.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import jit_exact, stack_array
from daskfactor.kernels.langevin import NEAR_ZERO
from daskfactor.kernels.philox import CHUNK, NUMBERS, Address, normal_chunk

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
    z, address = stack_array(NUMBERS, momentum.dtype), Address(key, iteration, factor, row0)
    real = momentum.dtype.type
    kept, spread = real(keep), real(np.sqrt(1.0 - keep * keep))
    begin = start = 0
    while begin < flat.size:
        count = normal_chunk(start, momentum.shape[1], address, z)
        end = min(begin + count, flat.size)
        for i in range(end - begin):
            flat[begin + i] = kept * flat[begin + i] + spread * z[i]
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


@jit_exact
def leapfrog_kick(
    theta: Array,
    momentum: Array,
    grad: Array,
    spread: Array,
    size: float,
    precision: float,
    rate: float,
    shape: float,
) -> None:
    """Change the momentum by the gradient of the log posterior.

    u <- u + size s (precision grad - rate + (shape - 1) / theta)

    Parameters
    ----------
    theta, momentum, grad, spread : (n, K), C-contiguous, one float dtype; ``grad`` of the
        log-likelihood at dispersion 1, ``spread`` s = 1 / sqrt(mass)
    size : time, in units in which ``spread`` is a length
    precision : 1 / dispersion
    rate, shape : of the gamma prior

    Source: Neal 2011, "MCMC using Hamiltonian dynamics", equation 2.28.
    """
    real = theta.dtype.type
    x, u = theta.reshape(theta.size), momentum.reshape(theta.size)
    g, s = grad.reshape(theta.size), spread.reshape(theta.size)
    excess, tiny = real(shape) - real(1), real(NEAR_ZERO)
    for i in range(x.size):
        pull = real(precision) * g[i] - real(rate)
        if excess != 0:
            pull += excess / (x[i] if x[i] > tiny else tiny)
        u[i] += real(size) * s[i] * pull


@jit_exact
def leapfrog_drift(theta: Array, momentum: Array, spread: Array, size: float) -> None:
    """Move along the momentum; an entry that passes zero comes back, and its momentum turns.

    x = theta + size s u;  theta <- |x|,  u <- -u where x < 0

    That is a drift in the mirrored density p(|x|), folded back: reversible, and volumes
    stay. Parameters as for :func:`leapfrog_kick`.
    """
    real = theta.dtype.type
    x, u = theta.reshape(theta.size), momentum.reshape(theta.size)
    s = spread.reshape(theta.size)
    for i in range(x.size):
        moved = x[i] + real(size) * s[i] * u[i]
        back = moved < 0
        x[i] = -moved if back else moved
        u[i] = -u[i] if back else u[i]
