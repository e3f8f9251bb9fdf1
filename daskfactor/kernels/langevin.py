"""Langevin updates of one factor band, noise and mirror included, in place.

Noise comes by address in chunks that stay in the first-level cache; the
update then runs over contiguous memory. Everything follows IEEE 754 exactly,
so a row has the same bits however the rows are split into bands.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import jit_exact, stack_array
from daskfactor.kernels.philox import CHUNK, NUMBERS, normal_chunk

Scalar = Any
_ROOT_HALF = 0.7071067811865476
_TINY = 1e-30
"""Where the pull of a gamma prior, (shape - 1) / theta, stops growing."""


@jit_exact
def _noise(
    start: int,
    components: int,
    key: NDArray[np.uint32],
    iteration: int,
    factor: int,
    row0: int,
    coarse: bool,
    z: NDArray[Any],
) -> int:
    """Fill ``z`` with one chunk; the coarse chain sums the two fine chains' numbers.

    Source: Şimşekli et al. 2017, eq. 11.
    """
    if not coarse:
        return normal_chunk(start, components, key, iteration, factor, row0, z)
    second = stack_array(NUMBERS, z.dtype)
    normal_chunk(start, components, key, 2 * iteration + 1, factor, row0, second)
    count = normal_chunk(start, components, key, 2 * iteration, factor, row0, z)
    half = z.dtype.type(_ROOT_HALF)
    for i in range(NUMBERS):
        z[i] = (z[i] + second[i]) * half
    return count


@jit_exact
def _clip(value: Scalar, limit: Scalar) -> Scalar:
    """``value`` within +-limit; NaN stays NaN, so that a divergence can be seen."""
    value = limit if value > limit else value
    return -limit if value < -limit else value


@jit_exact
def _metric_update(
    theta: NDArray[Any],
    grad: NDArray[Any],
    metric: NDArray[Any],
    step: Scalar,
    rate: Scalar,
    shape: Scalar,
    z: NDArray[Any],
) -> None:
    two = theta.dtype.type(2)
    for i in range(theta.size):
        x = theta[i]
        y = step / metric[i]
        limit = two * np.sqrt(two * y * (x + y))
        drift = _clip(y * x * (grad[i] - rate), limit)
        theta[i] = np.abs(x + drift + y * shape + np.sqrt(two * y * x) * z[i])


@jit_exact
def _plain_update(
    theta: NDArray[Any], grad: NDArray[Any], step: Scalar, rate: Scalar, z: NDArray[Any]
) -> None:
    two = theta.dtype.type(2)
    deviation = np.sqrt(two * step)
    limit = two * deviation
    for i in range(theta.size):
        drift = _clip(step * (grad[i] - rate), limit)
        theta[i] = np.abs(theta[i] + drift + deviation * z[i])


@jit_exact
def _plain_gamma_update(
    theta: NDArray[Any],
    grad: NDArray[Any],
    step: Scalar,
    rate: Scalar,
    shape: Scalar,
    z: NDArray[Any],
) -> None:
    """As `_plain_update` under a gamma prior; the clip bounds its pull near zero."""
    real = theta.dtype.type
    two, tiny = real(2), real(_TINY)
    deviation = np.sqrt(two * step)
    limit = two * deviation
    for i in range(theta.size):
        x = theta[i]
        push = (shape - real(1)) / (x if x > tiny else tiny)
        drift = _clip(step * (grad[i] - rate + push), limit)
        theta[i] = np.abs(x + drift + deviation * z[i])


@jit_exact
def metric_step(
    theta: NDArray[Any],
    grad: NDArray[Any],
    metric: NDArray[Any],
    step: float,
    rate: float,
    key: NDArray[np.uint32],
    iteration: int,
    factor: int,
    row0: int,
    coarse: bool,
    shape: float = 1.0,
) -> None:
    """Preconditioned Langevin step with the majoriser metric, in place on ``theta``.

    y = step / metric,  G = grad - rate,
    theta <- |theta + clip(y theta G, +-2 sqrt(2 y (theta + y))) + a y + sqrt(2 y theta) z|

    The metric's divergence term y and the gradient (a - 1) / theta of a gamma prior of
    shape a, which the metric makes (a - 1) y, come to a y. Where the metric is infinite,
    theta keeps its bits.

    Parameters
    ----------
    theta, grad, metric : (n, K), C-contiguous, one float dtype, n rows of a factor;
        ``grad`` without the prior, ``metric`` the denominator of the multiplicative update
    step : unitless step size
    rate, shape : of the gamma prior, ``rate`` in units of 1 / theta; shape 1: exponential
    key, iteration, factor, row0 : noise address, see :func:`fill_normals`
    coarse : True draws z = (z(2 iteration) + z(2 iteration + 1)) / sqrt 2

    Source: Şimşekli et al. 2017, eq. 6, with D = theta / metric and its divergence term.
    """
    flat, flat_grad = theta.reshape(theta.size), grad.reshape(theta.size)
    flat_metric = metric.reshape(theta.size)
    z = stack_array(NUMBERS, theta.dtype)
    real = theta.dtype.type
    begin = start = 0
    while begin < flat.size:
        count = _noise(start, theta.shape[1], key, iteration, factor, row0, coarse, z)
        end = min(begin + count, flat.size)
        _metric_update(
            flat[begin:end],
            flat_grad[begin:end],
            flat_metric[begin:end],
            real(step),
            real(rate),
            real(shape),
            z,
        )
        begin = end
        start += CHUNK


@jit_exact
def plain_step(
    theta: NDArray[Any],
    grad: NDArray[Any],
    step: float,
    rate: float,
    key: NDArray[np.uint32],
    iteration: int,
    factor: int,
    row0: int,
    coarse: bool,
    shape: float = 1.0,
) -> None:
    """Langevin step of the papers, mirrored at zero, in place on ``theta``.

    theta <- |theta + clip(step G, +-2 sqrt(2 step)) + sqrt(2 step) z|,
    G = grad - rate + (shape - 1) / theta

    Parameters as for :func:`metric_step`; ``step`` is in units of theta squared.
    Source: Şimşekli et al. 2017, eq. 6 to 8 (the clip only acts near mu = 0).
    """
    flat, flat_grad = theta.reshape(theta.size), grad.reshape(theta.size)
    z = stack_array(NUMBERS, theta.dtype)
    real = theta.dtype.type
    begin = start = 0
    while begin < flat.size:
        count = _noise(start, theta.shape[1], key, iteration, factor, row0, coarse, z)
        end = min(begin + count, flat.size)
        own, push = flat[begin:end], flat_grad[begin:end]
        if shape == 1.0:
            _plain_update(own, push, real(step), real(rate), z)
        else:
            _plain_gamma_update(own, push, real(step), real(rate), real(shape), z)
        begin = end
        start += CHUNK


@jit_exact
def accumulate_moments(
    theta: NDArray[Any], count: int, mean: NDArray[Any], m2: NDArray[Any]
) -> None:
    """Add one draw to a running mean and sum of squared deviations (Welford), in place.

    delta = theta - mean;  mean += delta / count;  m2 += delta (theta - mean)

    Parameters
    ----------
    theta : (n, K), C-contiguous, the draw
    count : number of draws including this one, >= 1
    mean, m2 : (n, K), C-contiguous, one float dtype; the population variance is m2 / count
    """
    flat, flat_mean, flat_m2 = theta.reshape(-1), mean.reshape(-1), m2.reshape(-1)
    real = mean.dtype.type
    weight = real(1) / real(count)
    for i in range(flat.size):
        value = real(flat[i])
        delta = value - flat_mean[i]
        flat_mean[i] += delta * weight
        flat_m2[i] += delta * (value - flat_mean[i])
