"""Exact transitions of the Cox-Ingersoll-Ross process: a Langevin step without an Euler error.

In the majoriser's metric c, with numerator and denominator of the multiplicative
update held where they are, a factor's entry follows

    d theta = ((theta_0 num + a) - den theta) / c dt + sqrt(2 theta / c) dB

whose transition over a time eps is a gamma number with a Poisson shift:

    tau = eps den / c,   n ~ Poisson(den theta / (e**tau - 1)),
    theta <- Gamma(theta num + a + n, rate den / (1 - e**-tau))

Nothing is clipped or mirrored, and theta stays positive. Source: Baker et al. 2018,
"Large-scale stochastic sampling from the probability simplex", section 4, with the
multiplicative update's terms in place of the simplex's counts.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import jit_exact, stack_array
from daskfactor.kernels.polynomials import expm1
from daskfactor.kernels.variates import STREAM, TINY, gamma, normal, poisson, start_entry

MOST = 1e8
"""Mean beyond which a count is drawn as a normal number, 10**-4 of its mean wide."""
LONGEST = 60.0
"""e**-tau beyond this tau is nothing beside 1: the transition forgets where it began."""


@jit_exact
def _transition(
    theta: float, num: float, den: float, tau: float, shape: float, stream: NDArray[np.uint64]
) -> float:
    growth = expm1(tau)
    mean = den * theta / growth
    if mean < MOST:
        shift = float(poisson(mean, stream))
    else:
        shift = mean + np.sqrt(mean) * normal(stream)
    return gamma(theta * num + shape + shift, den * (growth + 1.0) / growth, stream)


@jit_exact
def _cir_step(
    theta: NDArray[Any],
    grad: NDArray[Any],
    curvature: NDArray[Any],
    metric: NDArray[Any],
    scale: float,
    step: float,
    rate: float,
    shape: float,
    key: NDArray[np.uint32],
    iteration: int,
    factor: int,
    row0: int,
    smallest: float,
) -> None:
    stream = stack_array(STREAM, np.uint64)
    for i in range(theta.shape[0]):
        for k in range(theta.shape[1]):
            c = float(metric[i, k])
            if c == np.inf:
                continue
            x, pull = float(theta[i, k]), scale * float(curvature[i, k])
            num, den = max(float(grad[i, k]) + pull, 0.0), pull + rate
            tau = step * den / c
            if not (x * (num + den) < np.inf and tau > 0.0):
                theta[i, k] = np.nan  # a divergence, to be seen as one
                continue
            start_entry(stream, key, iteration, factor, row0 + i, k)
            moved = _transition(x, num, den, min(tau, LONGEST), shape, stream)
            theta[i, k] = max(moved, smallest)


def cir_step(
    theta: NDArray[Any],
    grad: NDArray[Any],
    curvature: NDArray[Any],
    metric: NDArray[Any],
    scale: float,
    step: float,
    rate: float,
    shape: float,
    key: NDArray[np.uint32],
    iteration: int,
    factor: int,
    row0: int,
) -> None:
    """One exact transition of every entry of a band, in place on ``theta``.

    den = scale curvature + rate,  num = grad + scale curvature

    Parameters
    ----------
    theta, grad, curvature, metric : (n, K), one float dtype, n rows of a factor;
        ``grad`` = num - scale curvature, without the prior; ``metric`` c as in
        :func:`daskfactor.kernels.langevin.metric_step`, infinite where theta stays
    scale : s / dispersion, which ``grad`` has in it and ``curvature`` has not
    step : unitless step size
    rate, shape : of the gamma prior
    key, iteration, factor, row0 : address of the random numbers, see
        :func:`daskfactor.kernels.variates.start_entry`
    """
    numbers = (float(scale), float(step), float(rate), float(shape))
    smallest = TINY[theta.dtype.name]
    _cir_step(theta, grad, curvature, metric, *numbers, key, iteration, factor, row0, smallest)
