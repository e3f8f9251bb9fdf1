"""Dynamics of one factor band, in place: Langevin steps, with and without momentum; leapfrog.

Loops, and kernels for GPUs, come from functions of numbers (:mod:`daskfactor.kernels.entrywise`).
Noise comes by address in chunks that stay in the first-level cache.

:func:`moment_step` matches the mean and the variance of a process that needs no mirror, with
one normal number. In the majoriser's metric c an entry follows Cox, Ingersoll and Ross's

    d theta = (theta G + a) dt + sqrt(2 theta / c) dB

with G = grad - rate: theta stays positive, and the mean is linear in the gradient, so that parts
of the data average out. With s = (1 - exp(-eps)) / c,

    m = theta + s (theta G + a)
    v = 2 s m - s^2 (a + f theta (G + c))

For f = 1 that is the process. An entry is pulled back at the rate k = -d(theta G) / d theta,
which is c only if it alone makes up the means that it is a part of: then theta num stays where
it is. In general k theta = a + f theta num on average, with f the entry's share of these means,
and v keeps the variance where it is for every f. The number with both moments is

    theta <- m (b + z)^2 / (1 + b^2),  b^2 = r - 1 + sqrt(r (r - 1)),  r = 2 m^2 / v >= 1

and where r < 1, which it can be near zero if a < 1/2, a gamma number of this mean and variance:
exact in a process without numerator that starts from zero. Source: Andersen 2008, "Simple and
efficient simulation of the Heston stochastic volatility model", section 3.2; f is our own.

Langevin dynamics with momentum has the three pieces of the splitting scheme BAOAB, in
coordinates in which the momentum is standard normal. With
d_ik = sqrt(step / (weight_i curvature_k + precision_k)):

    kick     q <- q + d G,  G = grad - precision (x - mean)
    drift    x <- x + d q
    refresh  q <- c q + sqrt(1 - c^2) z

Kick, half a drift, refresh, half a drift leaves x with its exact variance wherever
the target is Gaussian, whatever the step (Leimkuhler and Matthews 2013, "Rational
construction of stochastic numerical methods for molecular sampling").

Each column has a mean, a precision, a curvature, and 1 if it moves or 0 if it is
frozen: the rows of ``columns`` (4, K), in this order.

Leapfrog steps (:func:`leapfrog_kick`, :func:`leapfrog_drift`) are mirrored at zero. With mass
m and s = 1/√m, u = p / √m, so that a kick is u += ε s G and a drift x += ε s u. An entry with
s = 0 does not move.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels import polynomials
from daskfactor.kernels.entrywise import (
    Column,
    Double,
    Entry,
    Moving,
    Normal,
    Place,
    Real,
    Row,
    Share,
    Stream,
    entrywise,
)
from daskfactor.kernels.jit import inline, jit_exact
from daskfactor.kernels.variates import TINY_32, gamma, start_entry

Array = NDArray[Any]
Scalar = Any
Numbers = tuple[Scalar, Scalar, Scalar, Scalar, Scalar]

SMALLEST = TINY_32
"""The smallest entry that a step which matches moments leaves."""
SQUARED = 0.5
"""Shape of the prior from which on a squared normal number is wide enough near zero."""
SEEN = 64
"""Number of cells of a block that :func:`mean_share` uses."""
NEAR_ZERO = 1e-30
"""Smallest theta in the pull of a gamma prior, (shape - 1) / theta."""


@jit_exact
def _clip(value: Scalar, limit: Scalar) -> Scalar:
    """Clip a value to +-limit; NaN stays NaN, so that a divergence can be seen."""
    value = limit if value > limit else value
    return -limit if value < -limit else value


@entrywise
def fill_normals(out: Moving, z: Normal) -> Any:
    """Fill a factor band with the standard normal numbers of one iteration.

    out[i, k] = z(key; counter = (k // 4, row0 + i, iteration, factor))[k % 4]
    """
    return z


@entrywise
def metric_step(
    theta: Moving, grad: Entry, metric: Entry, step: Real, rate: Real, shape: Real, z: Normal
) -> Any:
    """Take a step in the majoriser's metric.

    With y = step / metric and G = grad - rate:

    theta <- |theta + clip(y theta G, +-2 sqrt(2 y (theta + y))) + shape y + sqrt(2 y theta) z|

    The metric's divergence term y and the gradient (shape - 1) / theta of a gamma prior, which
    the metric makes (shape - 1) y, come to shape y. Where the metric is infinite, theta keeps its
    bits.
    """
    two = type(theta)(2)
    y = step / metric
    limit = two * np.sqrt(two * y * (theta + y))
    drift = _clip(y * theta * (grad - rate), limit)
    return np.abs(theta + drift + y * shape + np.sqrt(two * y * theta) * z)


@entrywise
def plain_step(theta: Moving, grad: Entry, step: Real, rate: Real, shape: Real, z: Normal) -> Any:
    """Take a step without a metric; the clip bounds the pull of a prior near zero.

    With G = grad - rate + (shape - 1) / theta:

    theta <- |theta + clip(step G, +-2 sqrt(2 step)) + sqrt(2 step) z|
    """
    real = type(theta)
    two, tiny, excess = real(2), real(NEAR_ZERO), shape - real(1)
    deviation = np.sqrt(two * step)
    limit = two * deviation
    push = grad - rate
    if excess != 0:
        push += excess / (theta if theta > tiny else tiny)
    return np.abs(theta + _clip(step * push, limit) + deviation * z)


@inline
def _match(theta: Scalar, grad: Scalar, metric: Scalar, numbers: Numbers, z: Scalar) -> Scalar:
    """Return s, mean and variance of an entry after a step, and a multiple of (b + z)^2.

    It has this mean and variance, or a variance of 2 mean^2 if that is less.
    """
    gone, rate, shape, share, most = numbers
    real, one = type(theta), type(theta)(1)
    s, zero, stays = real(gone) / metric, real(0), real(1.0 - gone)
    born, moved = s * shape, theta + s * theta * (grad - rate)
    moved = zero if moved < zero else moved  # NaN stays NaN
    highest = theta + most * np.sqrt(s * (theta + s))
    moved = highest if moved > highest else moved
    mean = moved + born
    variance = s * (mean + mean - born - share * (moved - theta * stays))
    r = (mean + mean) * (mean / variance)
    r = one if r < one else r
    b = np.sqrt(r - one + np.sqrt(r * (r - one)))
    return s, mean, variance, mean * ((b + z) * (b + z) / (one + b * b))


@inline
def _finish(theta: Scalar, s: Scalar, moved: Scalar) -> Scalar:
    """Return the entry after a step, at least `SMALLEST`; theta where the metric is infinite."""
    smallest, zero = type(theta)(SMALLEST), type(theta)(0)
    moved = smallest if moved < smallest else moved
    return moved if s > zero else theta


@entrywise
def moment_step(
    theta: Moving,
    grad: Entry,
    metric: Entry,
    gone: Double,
    rate: Real,
    shape: Real,
    share: Share,
    most: Real,
    z: Normal,
) -> Any:
    """Take a step that matches moments, where ``gone`` is 1 - exp(-step).

    theta + s theta G lies between 0 and theta + most sqrt(s (theta + s)).
    """
    s, _, _, moved = _match(theta, grad, metric, (gone, rate, shape, share, most), z)
    return _finish(theta, s, moved)


@entrywise
def spiked_step(
    theta: Moving,
    grad: Entry,
    metric: Entry,
    gone: Double,
    rate: Real,
    shape: Real,
    share: Share,
    most: Real,
    z: Normal,
    stream: Stream,
    place: Place,
) -> Any:
    """Take a `moment_step`, with a gamma number where no squared normal one is wide enough."""
    s, mean, variance, moved = _match(theta, grad, metric, (gone, rate, shape, share, most), z)
    if variance > type(theta)(2) * mean * mean:
        start_entry(stream, place[0], place[1], place[2], place[3], place[4])
        m = np.float64(mean)  # float() of a float32 is one in kernels
        form = max(m * m / np.float64(variance), np.float64(shape))
        moved = type(theta)(gamma(form, form / m, stream))
    return _finish(theta, s, moved)


@jit_exact
def mean_share(W: Array, H: Array) -> float:
    """Return the mean share of a component in the means that it is a part of.

    sum of (w_ik h_jk)^2 / mu_ij over sum of mu_ij: 1 if each mean is one component's, 1 / K
    if all are equal. Taken over K and at `SEEN` cells of the block, spread evenly.

    Parameters
    ----------
    W, H : (m, K) and (n, K), not negative
    """
    squares = total = 0.0
    for number in range(SEEN):
        i = number * W.shape[0] // SEEN
        j = (number * 2654435769 % 4294967296) * H.shape[0] >> 32
        mu = square = 0.0
        for k in range(W.shape[1]):
            part = np.float64(W[i, k]) * np.float64(H[j, k])
            mu += part
            square += part * part
        if mu > 0.0 or mu != mu:
            total += mu
            squares += square / mu
    return squares / total if total != 0.0 else 1.0


@entrywise
def accumulate_moments(theta: Entry, count: Real, mean: Moving, m2: Moving) -> Any:
    """Add one draw to a running mean and sum of squared deviations (Welford).

    delta = theta - mean;  mean += delta / count;  m2 += delta (theta - mean)

    ``count`` is the number of draws with this one; the population variance is m2 / count.
    """
    delta = theta - mean
    mean = mean + delta * (type(count)(1) / count)
    return mean, m2 + delta * (theta - mean)


@inline
def _mobility(weight: Scalar, column: Any, step: Scalar) -> Scalar:
    """Return the d of an entry, from its row's weight and its column."""
    return column[3] * np.sqrt(step / (weight * column[2] + column[1]))


@entrywise
def kick_drift(
    x: Moving, momentum: Moving, grad: Entry, weight: Row, column: Column, step: Real, share: Real
) -> Any:
    """Kick by the gradient and take ``share`` of a drift.

    q <- q + d (grad - precision (x - mean));  x <- x + share d q

    Parameters
    ----------
    x, momentum
        An entry and its momentum.
    grad
        The gradient without the prior.
    weight
        How much data the row has.
    column
        Mean, precision, curvature, free.
    step
        Squared time step, without a unit.
    share
        1 for a whole drift, 0.5 where a refresh follows.
    """
    d = _mobility(weight, column, step)
    momentum = momentum + d * (grad - column[1] * (x - column[0]))
    return x + share * d * momentum, momentum


@entrywise
def drift(x: Moving, momentum: Entry, weight: Row, column: Column, step: Real, share: Real) -> Any:
    """Take ``share`` of a drift: x <- x + share d q; as :func:`kick_drift`."""
    return x + share * _mobility(weight, column, step) * momentum


@entrywise
def refresh(momentum: Moving, keep: Double, z: Normal) -> Any:
    """Mix fresh noise into the momentum: q <- keep q + sqrt(1 - keep^2) z.

    ``keep`` is the correlation of the momentum with what it was, from 0 to 1.
    """
    real = type(momentum)
    return real(keep) * momentum + real(np.sqrt(1.0 - keep * keep)) * z


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


@entrywise
def leapfrog_kick(
    theta: Entry,
    momentum: Moving,
    grad: Entry,
    spread: Entry,
    size: Real,
    precision: Real,
    rate: Real,
    shape: Real,
) -> Any:
    """Change the momentum by the gradient of the log posterior.

    u <- u + size s (precision grad - rate + (shape - 1) / theta)

    Parameters
    ----------
    theta, momentum
        An entry and its momentum.
    grad
        The gradient of the log-likelihood at dispersion 1.
    spread
        s = 1 / sqrt(mass).
    size
        Time, in units in which ``spread`` is a length.
    precision
        1 / dispersion.
    rate, shape
        Of the gamma prior.

    Source: Neal 2011, "MCMC using Hamiltonian dynamics", equation 2.28.
    """
    real = type(theta)
    excess, tiny = shape - real(1), real(NEAR_ZERO)
    pull = precision * grad - rate
    if excess != 0:
        pull += excess / (theta if theta > tiny else tiny)
    return momentum + size * spread * pull


@entrywise
def leapfrog_drift(theta: Moving, momentum: Moving, spread: Entry, size: Real) -> Any:
    """Move along the momentum; an entry that passes zero comes back, and its momentum turns.

    x = theta + size s u;  theta <- |x|,  u <- -u where x < 0

    That is a drift in the mirrored density p(|x|), folded back: reversible, and volumes
    stay. Parameters as for :func:`leapfrog_kick`.
    """
    moved = theta + size * spread * momentum
    back = moved < 0
    return (-moved if back else moved), (-momentum if back else momentum)


@inline
def steepness(theta: Scalar, power: Scalar) -> Scalar:
    """Return dθ/dy of y = θ^p: θ^(1 - p) / p; of y = log θ, which p = 0 stands for, θ."""
    real = type(theta)
    smallest = real(SMALLEST)
    theta = theta if theta > smallest else smallest
    return theta if power == 0 else polynomials.power(theta, real(1) - power) / power


@entrywise
def warped_kick(
    theta: Entry,
    momentum: Moving,
    grad: Entry,
    spread: Entry,
    size: Real,
    precision: Real,
    rate: Real,
    shape: Real,
    power: Real,
) -> Any:
    """Change the momentum of y = θ^p by the gradient of the log posterior of y; p = 0: log θ.

    u <- u + size s dθ/dy (precision grad - rate + (shape - p) / theta)

    Parameters as for :func:`leapfrog_kick`.
    """
    real = type(theta)
    excess, tiny = shape - power, real(NEAR_ZERO)
    pull = precision * grad - rate
    if excess != 0:
        pull += excess / (theta if theta > tiny else tiny)
    return momentum + size * spread * steepness(theta, power) * pull


@entrywise
def warped_drift(
    theta: Moving, place: Moving, momentum: Moving, spread: Entry, size: Real, power: Real
) -> Any:
    """Move y = θ^p along the momentum, and θ with it, but for entries of spread 0.

    As :func:`leapfrog_drift` does; log θ has no border.
    """
    real = type(place)
    moved, smallest = place + size * spread * momentum, real(SMALLEST)
    back = power != 0 and moved < 0
    moved = -moved if back else moved
    if power == 0:
        new = polynomials.exp(moved)
    else:
        new = polynomials.power(moved if moved > smallest else smallest, real(1) / power)
    return (new if spread > 0 else theta), moved, (-momentum if back else momentum)


@jit_exact
def row_energies(
    theta: Array,
    momentum: Array,
    fits: NDArray[np.float64],
    rates: NDArray[np.float64],
    prior: tuple[float, float, float],
    free: NDArray[np.bool_],
    out: NDArray[np.float64],
) -> None:
    """Set ``out`` (n,) to -log p(y | ...) of every row but for a constant, plus u's energy.

    sum_k (rate theta - (shape - power) log theta + u^2 / 2) - fit / phi, of the free columns (K,)

    Parameters
    ----------
    theta, momentum : (n, K), C-contiguous, one float dtype
    fits : (n,) minus the deviances
    rates : rates of the gamma prior, (n, K) or with axes of length 1
    prior : shape, power, and the dispersion phi
    """
    shape, power, phi = prior
    excess, last = shape - power, (rates.shape[0] - 1, rates.shape[1] - 1)
    for i in range(theta.shape[0]):
        penalty, moving = 0.0, 0.0
        for k in range(theta.shape[1]):
            u = np.float64(momentum[i, k])
            moving += u * u
            if free[k]:
                x = np.float64(theta[i, k])
                penalty += rates[min(i, last[0]), min(k, last[1])] * x
                if excess != 0:
                    penalty -= excess * np.log(x)
        out[i] = penalty + 0.5 * moving - fits[i] / phi


@entrywise
def average_square(mass: Moving, pull: Entry, weight: Real) -> Any:
    """Move a mass towards the square of a gradient: m <- m + weight (pull^2 - m)."""
    return mass + weight * (pull * pull - mass)


@jit_exact
def multiply_share(theta: Array, num: Array, den: Array, penalty: float) -> None:
    """Multiply theta by num / (den + penalty), in place; 0 / 0 counts as 0."""
    real = theta.dtype.type
    for i in range(theta.shape[0]):
        for k in range(theta.shape[1]):
            total = den[i, k] + real(penalty)
            ratio = num[i, k] / total if total > 0 else real(0)
            theta[i, k] *= real(0) if ratio < 0 else ratio  # NaN stays NaN
