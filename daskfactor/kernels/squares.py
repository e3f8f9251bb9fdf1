"""Hamiltonian dynamics of positive entries that are squared lengths, in place on a factor band.

An entry under a gamma prior of shape a is taken for the squared length of a vector u of
2a dimensions,

    theta = |u|^2 / (4c)

with c its metric, as in :func:`daskfactor.kernels.langevin.langevin_step`. Where all u are equally
likely theta has the density theta^(a - 1), so that the prior leaves exp(-rate theta) of the
density of u: zero is a place like any other, with no wall and no pole. The diffusion of u at
unit mass is that of theta in the metric c / theta, Cox, Ingersoll and Ross's. Everything depends
on |u| alone, so that of the momentum only two numbers count: p along u, and the length s of the
rest, which has 2a - 1 dimensions. With x = |u| = 2 sqrt(c theta) and G = grad - rate:

    kick     p <- p + h sqrt(theta / c) G
    drift    y = x + h p,  x' = sqrt(y^2 + (h s)^2),  p <- (y p + h s^2) / x',  s <- s x / x'
    refresh  p <- k p + sqrt(1 - k^2) z,  s^2 <- |k s + sqrt(1 - k^2) z|^2 of 2a - 1 dimensions

A drift is free flight along a straight line. Where G is constant, u is in a quadratic well, in
which a kick, half a drift, a refresh and half a drift leave the exact law of theta, whatever h
(Leimkuhler and Matthews 2013, "Rational construction of stochastic numerical methods for
molecular sampling").
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import inline, jit_exact, stack_array
from daskfactor.kernels.variates import STREAM, gamma, poisson, start_entry

Array = NDArray[Any]
Scalar = Any

STEEPEST = 1.0
"""A kick is at most this and the entry's x: laws have poles where mu = 0, and slopes that grow
without end; what goes further would come back from further still."""
NEAREST = 1e-30
"""Smallest x / (2c) that is divided by."""
FARTHEST = 1e8
"""Squared momentum beyond which there is no thermal one."""


@inline
def _flight(root: Scalar, c: Scalar, p: Scalar, s: Scalar, size: Scalar) -> Scalar:
    """Entry and both momenta after a drift; ``root`` is sqrt(theta / c)."""
    real = type(root)
    reach = size / (real(2) * c)
    along, across = root + reach * p, reach * s
    far = np.sqrt(along * along + across * across)
    moved = c * far * far
    far = real(NEAREST) if far < real(NEAREST) else far  # NaN stays NaN
    return moved, (along * p + across * s) / far, root * s / far


@inline
def flight_entry(x: Scalar, p: Scalar, s: Scalar, c: Scalar, part: Scalar) -> Scalar:
    """Entry and both momenta after a drift; an infinite c leaves the entry where it is."""
    moved, p, s = _flight(np.sqrt(x / c), c, p, s, part)
    return (moved if c < type(x)(np.inf) else x), p, s


@inline
def kick_entry(
    x: Scalar,
    p: Scalar,
    s: Scalar,
    grad: Scalar,
    c: Scalar,
    rate: Scalar,
    size: Scalar,
    part: Scalar,
) -> Scalar:
    """Entry and both momenta after a kick and a part of a drift."""
    real = type(x)
    root = np.sqrt(x / c)
    push = size * (root * (grad - rate))
    most = real(STEEPEST) + real(2) * c * root
    push = most if push > most else push
    push = -most if push < -most else push
    moved, p, s = _flight(root, c, p + push, s, part)
    return (moved if c < real(np.inf) else x), p, s


@jit_exact
def kick_flight(
    theta: Array,
    along: Array,
    across: Array,
    grad: Array,
    metric: Array,
    rate: float,
    size: float,
    share: float,
) -> None:
    """A kick by the gradient and ``share`` of a drift, in place on all but the last arrays.

    Parameters
    ----------
    theta, along, across, grad, metric : (n, K), C-contiguous, one float dtype: entries, p and s,
        the gradient of the log-likelihood, and c, infinite where theta keeps its bits
    rate : of the gamma prior
    size : time h, without a unit
    share : 1 for a whole drift, 0.5 where a refresh follows
    """
    real = theta.dtype.type
    x, p, s = theta.reshape(theta.size), along.reshape(theta.size), across.reshape(theta.size)
    g, held = grad.reshape(theta.size), metric.reshape(theta.size)
    h, part, pull = real(size), real(size * share), real(rate)
    for i in range(x.size):
        x[i], p[i], s[i] = kick_entry(x[i], p[i], s[i], g[i], held[i], pull, h, part)


@jit_exact
def flight(theta: Array, along: Array, across: Array, metric: Array, size: float) -> None:
    """A drift over a time ``size``; arrays as for :func:`kick_flight`."""
    real = theta.dtype.type
    x, p, s = theta.reshape(theta.size), along.reshape(theta.size), across.reshape(theta.size)
    held, part = metric.reshape(theta.size), real(size)
    for i in range(x.size):
        x[i], p[i], s[i] = flight_entry(x[i], p[i], s[i], held[i], part)


@inline
def length_entry(length: Scalar, keep: float, shape: float, stream: Array) -> Scalar:
    """A refreshed length; the stream is that of its entry."""
    kept, fresh = keep * np.float64(length), 1.0 - keep * keep
    if not kept * kept < FARTHEST:
        return length  # a divergence, to be seen as one
    form = shape - 0.5 + np.float64(poisson(kept * kept / (2.0 * fresh), stream))
    square = gamma(form, 1.0, stream) if form > 0.0 else 0.0
    return type(length)(np.sqrt(2.0 * fresh * square))


@jit_exact
def refresh_length(
    across: Array,
    keep: float,
    shape: float,
    key: NDArray[np.uint32],
    iteration: int,
    factor: int,
    row0: int,
) -> None:
    """Refresh s, the length of 2 shape - 1 dimensions, in place; shape at least 1/2.

    n ~ Poisson(k^2 s^2 / (2 (1 - k^2))),  s^2 <- 2 (1 - k^2) Gamma(shape - 1/2 + n)

    Parameters
    ----------
    across : (n, K)
    keep : k, the share of the momentum that stays, from 0 to below 1
    key, iteration, factor, row0 : address, see
        :func:`daskfactor.kernels.variates.start_entry`
    """
    stream = stack_array(STREAM, np.uint64)
    for i in range(across.shape[0]):
        for k in range(across.shape[1]):
            start_entry(stream, key, iteration, factor, row0 + i, k)
            across[i, k] = length_entry(across[i, k], keep, shape, stream)
