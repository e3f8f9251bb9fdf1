"""Steps of bands, by numba on a processor or by CUDA on a GPU, as the arrays lie there."""

from functools import wraps
from typing import Any

import numpy as np
from scipy.special import ndtr

from daskfactor.kernels import langevin, squares
from daskfactor.kernels.cuda import steps as cuda
from daskfactor.kernels.cuda.device import current, is_on_host
from daskfactor.kernels.philox import Address
from daskfactor.kernels.polynomials import expm1
from daskfactor.models.likelihood import Likelihood

NEWTON_STEPS = 12


def _dispatch(step: Any) -> Any:
    """Take a step on the device if its first argument is there."""
    move = getattr(step, "move", None)
    on_device = cuda.over_entries(move) if move else getattr(cuda, step.__name__)

    @wraps(step)
    def dispatched(first: Any, *rest: Any) -> Any:
        return step(first, *rest) if is_on_host(first) else on_device(first, *rest)

    return dispatched


fill_normals = _dispatch(langevin.fill_normals)
plain_step = _dispatch(langevin.plain_step)
metric_step = _dispatch(langevin.metric_step)
moment_step = _dispatch(langevin.moment_step)
spiked_step = _dispatch(langevin.spiked_step)
accumulate_moments = _dispatch(langevin.accumulate_moments)
kick_drift = _dispatch(langevin.kick_drift)
drift = _dispatch(langevin.drift)
refresh = _dispatch(langevin.refresh)
leapfrog_kick = _dispatch(langevin.leapfrog_kick)
leapfrog_drift = _dispatch(langevin.leapfrog_drift)
row_energies = _dispatch(langevin.row_energies)
average_square = _dispatch(langevin.average_square)
warped_kick = _dispatch(langevin.warped_kick)
warped_drift = _dispatch(langevin.warped_drift)
kick_flight = _dispatch(squares.kick_flight)
flight = _dispatch(squares.flight)
refresh_length = _dispatch(squares.refresh_length)


def langevin_step(
    theta: Any,
    grad: Any,
    metric: Any,
    step: float,
    prior: tuple[float, float],
    address: Address,
    coarse: bool,
    matched: tuple[Any, float] | None = None,
) -> None:
    """Take a Langevin step, mirrored at zero, in place on ``theta``.

    Parameters
    ----------
    theta, grad, metric
        (n, K), C-contiguous, one float dtype, n rows of a factor; ``grad`` without the prior,
        ``metric`` the denominator of the multiplicative update, or None.
    step
        Unitless step size; without a metric in units of theta squared.
    prior
        Rate, in units of 1 / theta, and shape of the gamma prior; shape 1: exponential.
    address
        Of the noise, and of gamma numbers.
    coarse
        True draws z = (z(2 iteration) + z(2 iteration + 1)) / sqrt 2.
    matched
        None, or f in [0, 1] and a bound for the step that matches moments (see
        :mod:`daskfactor.kernels.langevin`), which needs a metric and keeps theta positive. On a
        GPU f may be one number per row.

    Source: Şimşekli et al. 2017, eq. 6 to 8, with D = theta / metric and its divergence term
    (the clip only acts near mu = 0).
    """
    noise = *address, coarse
    if metric is None:
        plain_step(theta, grad, step, *prior, *noise)
    elif matched is None:
        metric_step(theta, grad, metric, step, *prior, *noise)
    else:
        gone = -expm1(-float(step))
        form = spiked_step if theta.dtype.type(prior[1]) < langevin.SQUARED else moment_step
        form(theta, grad, metric, gone, *prior, *matched, *noise)


def multiply_by_share(
    theta: Any, share: Any, penalty: Any, pull: float, likelihood: Likelihood, smallest: float
) -> None:
    """Take the multiplicative update of a band, in place on ``theta``; 0 / 0 counts as 0.

    Without a pull θ ← θ (num / (den + penalty))^γ; a negative one joins the penalty as -pull / θ,
    and a positive one is solved for: D r^m = num r^n + pull / θ, in double precision.

    Parameters
    ----------
    theta, share
        Entries of a band, (rows, K), and their numerator and denominator.
    penalty, pull
        φ λ and φ (a - 1) of their prior.
    likelihood
        The law, with γ and the majoriser's powers (m, n).
    smallest
        Least value of an entry, where there is a pull.
    """
    (num, den, *_), power = share, likelihood.exponent
    if not pull and not is_on_host(theta):
        cuda.take_share(theta, num, den, penalty, power)
    elif not pull and power == 1.0 and not np.ndim(penalty):
        langevin.multiply_share(theta, num, den, penalty)
    elif not pull:
        total, ratio = den + penalty, np.zeros_like(num)
        np.divide(num, total, out=ratio, where=total > 0)
        np.maximum(ratio, 0, out=ratio)
        theta *= ratio if power == 1.0 else ratio**power
    else:
        values, den = to_host(theta), to_host(den)
        penalty = to_host(penalty) if np.ndim(penalty) else penalty
        total = np.maximum(den + penalty, np.finfo(values.dtype).tiny).astype(np.float64)
        old = np.maximum(values.astype(np.float64), smallest)
        num, prior = np.maximum(to_host(num).astype(np.float64), 0.0), np.abs(pull) / old
        if pull < 0:
            ratio = (num / (total + prior)) ** power
        elif likelihood.majorizer == (1.0, 0.0):
            ratio = (num + prior) / total
        else:
            ratio = _root(num, total, prior, likelihood)
        updated = np.maximum(old * ratio, smallest).astype(values.dtype)
        theta[:] = on_device_of(theta, updated)


def _root(num: Any, den: Any, prior: Any, likelihood: Likelihood) -> Any:
    """Return the one positive r with den r^m = num r^n + prior, by Newton's method.

    den r^m - num r^n - prior is concave for n < 0 and m = 1 and convex for m > 1 and n = 1,
    where it increases, and the steps begin below the root in the first case and above it in
    the second, so that none overshoots.
    """
    m, n = likelihood.majorizer
    alone, rest = (num / den) ** likelihood.exponent, prior / den
    r = np.maximum(alone, rest) if n < 0 else alone + rest ** (1.0 / m)
    for _ in range(NEWTON_STEPS):
        value = den * r**m - num * r**n - prior
        r = r - value / (m * den * r ** (m - 1.0) - n * num * r ** (n - 1.0))
    return r


@_dispatch
def level_places(place: Any, theta: Any, smallest: float, z: Any) -> None:
    """Multiply ``place`` by Φ(z), in place, where ``theta`` is not above the smallest number."""
    zero = theta <= smallest
    place[zero] *= ndtr(z)[zero]


def to_host(array: Any) -> Any:
    """Return an array in the memory of this process; one that is there stays what it is."""
    return array if is_on_host(array) else current().take(array)


def on_device_of(array: Any, value: Any) -> Any:
    """Return a number, or an array on the device of another one."""
    move = not is_on_host(array) and np.ndim(value) and is_on_host(value)
    return current().put(value) if move else value


def zeros_on_device_of(array: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Make an array of zeros on the device of another one."""
    return np.zeros(shape, dtype) if is_on_host(array) else current().zeros(shape, dtype)
