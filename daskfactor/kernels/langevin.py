"""Dynamics of one factor band, in place: Langevin steps, with and without momentum; leapfrog.

Noise comes by address in chunks that stay in the first-level cache; the
update then runs over contiguous memory. Everything follows IEEE 754 exactly,
so a row has the same bits however the rows are split into bands.

:func:`langevin_step` can match the mean and the variance of a process that needs no mirror, with
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

from daskfactor.kernels.jit import inline, jit_exact, stack_array
from daskfactor.kernels.philox import CHUNK, NUMBERS, Address, normal_chunk
from daskfactor.kernels.polynomials import expm1
from daskfactor.kernels.variates import STREAM, TINY, gamma, start_entry

Array = NDArray[Any]
Scalar = Any
Numbers = tuple[Scalar, Scalar, Scalar, Scalar, Scalar]

SMALLEST = TINY["float32"]
"""The smallest entry that a step which matches moments leaves."""
SQUARED = 0.5
"""Shape of the prior from which on a squared normal number is wide enough near zero."""
SEEN = 64
"""Cells of a block at which :func:`mean_share` looks."""
NEAR_ZERO = 1e-30
"""Where the pull of a gamma prior, (shape - 1) / theta, stops growing."""
ROOT_HALF = 0.7071067811865476


@jit_exact
def _noise(start: int, components: int, address: Address, coarse: bool, z: Array) -> int:
    """Fill ``z`` with one chunk; the coarse chain sums the two fine chains' numbers.

    Source: Şimşekli et al. 2017, eq. 11.
    """
    if not coarse:
        return normal_chunk(start, components, address, z)
    key, iteration, factor, row0 = address
    second = stack_array(NUMBERS, z.dtype)
    normal_chunk(start, components, Address(key, 2 * iteration + 1, factor, row0), second)
    count = normal_chunk(start, components, Address(key, 2 * iteration, factor, row0), z)
    half = z.dtype.type(ROOT_HALF)
    for i in range(NUMBERS):
        z[i] = (z[i] + second[i]) * half
    return count


@jit_exact
def _clip(value: Scalar, limit: Scalar) -> Scalar:
    """``value`` within +-limit; NaN stays NaN, so that a divergence can be seen."""
    value = limit if value > limit else value
    return -limit if value < -limit else value


@inline
def metric_entry(
    x: Scalar, push: Scalar, held: Scalar, step: Scalar, rate: Scalar, shape: Scalar, z: Scalar
) -> Scalar:
    """An entry after a step in the majoriser's metric."""
    two = type(x)(2)
    y = step / held
    limit = two * np.sqrt(two * y * (x + y))
    drift = _clip(y * x * (push - rate), limit)
    return np.abs(x + drift + y * shape + np.sqrt(two * y * x) * z)


@jit_exact
def _metric_update(
    theta: Array, grad: Array, metric: Array, step: Scalar, rate: Scalar, shape: Scalar, z: Array
) -> None:
    for i in range(theta.size):
        theta[i] = metric_entry(theta[i], grad[i], metric[i], step, rate, shape, z[i])


@inline
def plain_entry(
    x: Scalar, push: Scalar, step: Scalar, rate: Scalar, shape: Scalar, z: Scalar
) -> Scalar:
    """An entry after a step without a metric; the clip bounds the pull of a prior near zero."""
    real = type(x)
    two, tiny, excess = real(2), real(NEAR_ZERO), shape - real(1)
    deviation = np.sqrt(two * step)
    limit = two * deviation
    push = push - rate
    if excess != 0:
        push += excess / (x if x > tiny else tiny)
    return np.abs(x + _clip(step * push, limit) + deviation * z)


@jit_exact
def _plain_update(
    theta: Array, grad: Array, step: Scalar, rate: Scalar, shape: Scalar, z: Array
) -> None:
    for i in range(theta.size):
        theta[i] = plain_entry(theta[i], grad[i], step, rate, shape, z[i])


@inline
def _moments(x: Scalar, grad: Scalar, s: Scalar, numbers: Numbers) -> Scalar:
    """Mean and variance of an entry after a step."""
    stays, rate, shape, share, most = numbers
    zero, born = type(x)(0), s * shape
    kept = x + s * x * (grad - rate)
    kept = zero if kept < zero else kept  # NaN stays NaN
    highest = x + most * np.sqrt(s * (x + s))
    kept = highest if kept > highest else kept
    mean = kept + born
    return mean, s * (mean + mean - born - share * (kept - x * stays))


@inline
def _squared(mean: Scalar, variance: Scalar, z: Scalar) -> Scalar:
    """A multiple of (b + z)^2 of this mean and variance; of variance 2 mean^2 at most."""
    one = type(mean)(1)
    r = (mean + mean) * (mean / variance)
    r = one if r < one else r
    b = np.sqrt(r - one + np.sqrt(r * (r - one)))
    z = b + z
    return mean * (z * z / (one + b * b))


@inline
def moment_entry(
    x: Scalar, push: Scalar, held: Scalar, gone: Scalar, numbers: Numbers, z: Scalar
) -> Scalar:
    """An entry after a step that matches moments; z is a normal number."""
    s, smallest = gone / held, type(x)(SMALLEST)
    mean, variance = _moments(x, push, s, numbers)
    moved = _squared(mean, variance, z)
    moved = smallest if moved < smallest else moved
    return moved if s > type(x)(0) else x


@jit_exact
def _moment_update(
    theta: Array, grad: Array, metric: Array, gone: Scalar, numbers: Numbers, z: Array
) -> None:
    for i in range(theta.size):
        theta[i] = moment_entry(theta[i], grad[i], metric[i], gone, numbers, z[i])


@inline
def spiked_entry(
    x: Scalar,
    push: Scalar,
    held: Scalar,
    gone: Scalar,
    numbers: Numbers,
    z: Scalar,
    stream: Array,
    address: tuple[Any, ...],
) -> Scalar:
    """As `moment_entry`; a gamma number where no squared normal one is wide enough.

    ``address`` is that of `start_entry`: key, iteration, factor, row and component.
    """
    s, smallest, two = gone / held, type(x)(SMALLEST), type(x)(2)
    mean, variance = _moments(x, push, s, numbers)
    moved = _squared(mean, variance, z)
    if variance > two * mean * mean:
        start_entry(stream, address[0], address[1], address[2], address[3], address[4])
        m = np.float64(mean)  # float() of a float32 is one in kernels
        form = max(m * m / np.float64(variance), np.float64(numbers[2]))
        moved = type(x)(gamma(form, form / m, stream))
    moved = smallest if moved < smallest else moved
    return moved if s > type(x)(0) else x


@jit_exact
def _spiked_update(
    theta: Array,
    grad: Array,
    metric: Array,
    gone: Scalar,
    numbers: Numbers,
    z: Array,
    address: Address,
    place: tuple[int, int],
) -> None:
    first, components = place
    key, iteration, factor, row0 = address
    stream = stack_array(STREAM, np.uint64)
    for i in range(theta.size):
        row, k = (first + i) // components, (first + i) % components
        at = key, iteration, factor, row0 + row, k
        theta[i] = spiked_entry(theta[i], grad[i], metric[i], gone, numbers, z[i], stream, at)


@jit_exact
def mean_share(W: Array, H: Array) -> float:
    """Share that a component has in the means that it is a part of, on average.

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


@jit_exact
def langevin_step(
    theta: Array,
    grad: Array,
    metric: Array | None,
    step: float,
    prior: tuple[float, float],
    address: Address,
    coarse: bool,
    matched: tuple[float, float] | None = None,
) -> None:
    """Langevin step, mirrored at zero, in place on ``theta``.

    With a metric (the majoriser's), y = step / metric and G = grad - rate:

    theta <- |theta + clip(y theta G, +-2 sqrt(2 y (theta + y))) + a y + sqrt(2 y theta) z|

    The metric's divergence term y and the gradient (a - 1) / theta of a gamma prior of
    shape a, which the metric makes (a - 1) y, come to a y. Where the metric is infinite,
    theta keeps its bits. Without one, as in the papers, with G = grad - rate + (a - 1) / theta:

    theta <- |theta + clip(step G, +-2 sqrt(2 step)) + sqrt(2 step) z|

    Parameters
    ----------
    theta, grad, metric : (n, K), C-contiguous, one float dtype, n rows of a factor;
        ``grad`` without the prior, ``metric`` the denominator of the multiplicative update,
        or None
    step : unitless step size; without a metric in units of theta squared
    prior : rate, in units of 1 / theta, and shape of the gamma prior; shape 1: exponential
    address : of the noise, see :func:`fill_normals`
    coarse : True draws z = (z(2 iteration) + z(2 iteration + 1)) / sqrt 2
    matched : None, or f in [0, 1] and a bound for the step that matches moments (see the
        module), which needs a metric and keeps theta positive: theta + s theta G is held
        between 0 and theta + bound sqrt(s (theta + s)); gamma numbers have the address of
        :func:`daskfactor.kernels.variates.start_entry`

    Source: Şimşekli et al. 2017, eq. 6 to 8, with D = theta / metric and its divergence term
    (the clip only acts near mu = 0).
    """
    x, push = theta.reshape(theta.size), grad.reshape(theta.size)
    z = stack_array(NUMBERS, theta.dtype)
    real = theta.dtype.type
    size, rate, shape = real(step), real(prior[0]), real(prior[1])
    begin = start = 0
    while begin < x.size:
        count = _noise(start, theta.shape[1], address, coarse, z)
        end = min(begin + count, x.size)
        if metric is None:
            _plain_update(x[begin:end], push[begin:end], size, rate, shape, z)
        elif matched is None:
            held = metric.reshape(theta.size)[begin:end]
            _metric_update(x[begin:end], push[begin:end], held, size, rate, shape, z)
        else:
            held, gone = metric.reshape(theta.size)[begin:end], -expm1(-float(step))
            numbers = real(1.0 - gone), rate, shape, real(matched[0]), real(matched[1])
            if shape < SQUARED:
                place = begin, theta.shape[1]
                _spiked_update(
                    x[begin:end], push[begin:end], held, real(gone), numbers, z, address, place
                )
            else:
                _moment_update(x[begin:end], push[begin:end], held, real(gone), numbers, z)
        begin = end
        start += CHUNK


@inline
def welford(value: Scalar, mean: Scalar, m2: Scalar, weight: Scalar) -> Scalar:
    """Mean and sum of squared deviations with one number more; ``weight`` is 1 / count."""
    delta = value - mean
    mean = mean + delta * weight
    return mean, m2 + delta * (value - mean)


@jit_exact
def accumulate_moments(theta: Array, count: int, mean: Array, m2: Array) -> None:
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
        flat_mean[i], flat_m2[i] = welford(real(flat[i]), flat_mean[i], flat_m2[i], weight)


@inline
def mobility(weight: Scalar, column: Any, size: Scalar) -> Scalar:
    """The d of an entry, from its row's weight and its column of ``columns``."""
    return column[3] * np.sqrt(size / (weight * column[2] + column[1]))


@inline
def kicked(
    x: Scalar, q: Scalar, grad: Scalar, weight: Scalar, column: Any, size: Scalar, part: Scalar
) -> Scalar:
    """Entry and momentum after a kick and a part of a drift."""
    d = mobility(weight, column, size)
    q = q + d * (grad - column[1] * (x - column[0]))
    return x + part * d * q, q


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
            column = columns[0, k], columns[1, k], columns[2, k], columns[3, k]
            given = x[i, k], momentum[i, k], grad[i, k], weight
            x[i, k], momentum[i, k] = kicked(*given, column, size, part)


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
            column = columns[0, k], columns[1, k], columns[2, k], columns[3, k]
            x[i, k] = x[i, k] + part * mobility(weight, column, size) * momentum[i, k]


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


@inline
def leapfrog_kicked(
    x: Scalar,
    u: Scalar,
    grad: Scalar,
    s: Scalar,
    size: Scalar,
    precision: Scalar,
    rate: Scalar,
    shape: Scalar,
) -> Scalar:
    """Momentum after a kick."""
    real = type(x)
    excess, tiny = shape - real(1), real(NEAR_ZERO)
    pull = precision * grad - rate
    if excess != 0:
        pull += excess / (x if x > tiny else tiny)
    return u + size * s * pull


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
    numbers = real(size), real(precision), real(rate), real(shape)
    for i in range(x.size):
        u[i] = leapfrog_kicked(x[i], u[i], g[i], s[i], *numbers)


@inline
def leapfrog_moved(x: Scalar, u: Scalar, s: Scalar, size: Scalar) -> Scalar:
    """Entry and momentum after a drift; both turn where the entry passes zero."""
    moved = x + size * s * u
    back = moved < 0
    return (-moved if back else moved), (-u if back else u)


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
        x[i], u[i] = leapfrog_moved(x[i], u[i], s[i], real(size))


@jit_exact
def multiply_share(theta: Array, num: Array, den: Array, penalty: float) -> None:
    """Multiply theta by num / (den + penalty), in place; 0 / 0 counts as 0."""
    real = theta.dtype.type
    for i in range(theta.shape[0]):
        for k in range(theta.shape[1]):
            total = den[i, k] + real(penalty)
            ratio = num[i, k] / total if total > 0 else real(0)
            theta[i, k] *= real(0) if ratio < 0 else ratio  # NaN stays NaN
