"""Hamiltonian dynamics of positive entries that are squared lengths, in place on a factor band.

An entry under a gamma prior of shape a is taken for the squared length of a vector u of
2a dimensions,

    theta = |u|^2 / (4c)

with c its metric, as in :func:`daskfactor.kernels.steps.langevin_step`. Where all u are equally
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

from daskfactor.kernels.entrywise import Double, Entry, Moving, Place, Real, Stream, entrywise
from daskfactor.kernels.jit import inline
from daskfactor.kernels.variates import gamma, poisson, start_entry

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
    """Return entry and both momenta after a drift; ``root`` is sqrt(theta / c)."""
    real = type(root)
    reach = size / (real(2) * c)
    along, across = root + reach * p, reach * s
    far = np.sqrt(along * along + across * across)
    moved = c * far * far
    far = real(NEAREST) if far < real(NEAREST) else far  # NaN stays NaN
    return moved, (along * p + across * s) / far, root * s / far


@entrywise
def flight(theta: Moving, along: Moving, across: Moving, metric: Entry, size: Real) -> Any:
    """Drift over a time ``size``; an infinite metric leaves the entry where it is."""
    root = np.sqrt(theta / metric)
    moved, along, across = _flight(root, metric, along, across, size)
    return (moved if metric < type(theta)(np.inf) else theta), along, across


@entrywise
def kick_flight(
    theta: Moving,
    along: Moving,
    across: Moving,
    grad: Entry,
    metric: Entry,
    rate: Real,
    size: Real,
    share: Real,
) -> Any:
    """Kick by the gradient and take ``share`` of a drift.

    Parameters
    ----------
    theta, along, across
        An entry, p and s.
    grad
        The gradient of the log-likelihood.
    metric
        c, infinite where theta keeps its bits.
    rate
        Of the gamma prior.
    size
        Time h, without a unit.
    share
        1 for a whole drift, 0.5 where a refresh follows.
    """
    real = type(theta)
    root = np.sqrt(theta / metric)
    push = size * (root * (grad - rate))
    most = real(STEEPEST) + real(2) * metric * root
    push = most if push > most else push
    push = -most if push < -most else push
    moved, along, across = _flight(root, metric, along + push, across, size * share)
    return (moved if metric < real(np.inf) else theta), along, across


@entrywise
def refresh_length(
    across: Moving, keep: Double, shape: Double, stream: Stream, place: Place
) -> Any:
    """Refresh s, the length of 2 shape - 1 dimensions; shape at least 1/2.

    n ~ Poisson(k^2 s^2 / (2 (1 - k^2))),  s^2 <- 2 (1 - k^2) Gamma(shape - 1/2 + n)

    ``keep`` is k, the share of the momentum that stays, from 0 to below 1.
    """
    length, fresh = keep * np.float64(across), 1.0 - keep * keep
    if not length * length < FARTHEST:
        return across  # a divergence, to be seen as one
    start_entry(stream, place[0], place[1], place[2], place[3], place[4])
    form = shape - 0.5 + np.float64(poisson(length * length / (2.0 * fresh), stream))
    square = gamma(form, 1.0, stream) if form > 0.0 else 0.0
    return type(across)(np.sqrt(2.0 * fresh * square))
