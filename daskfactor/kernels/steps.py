"""Steps of bands, taken where these lie: by numba on a processor, by CUDA on a GPU.

Both have the same names and arguments; which one it is only the arrays know.
"""

from functools import wraps
from typing import Any

import numpy as np
from scipy.special import ndtr

from daskfactor.kernels import langevin, squares
from daskfactor.kernels.cuda import steps as cuda
from daskfactor.kernels.cuda.device import current, is_here
from daskfactor.kernels.philox import Address
from daskfactor.kernels.polynomials import expm1


def _by_place(step: Any) -> Any:
    """Take a step on the device if its first argument is there."""
    move = getattr(step, "move", None)
    there = cuda.over_entries(move) if move else getattr(cuda, step.__name__)

    @wraps(step)
    def taken(first: Any, *rest: Any) -> Any:
        return step(first, *rest) if is_here(first) else there(first, *rest)

    return taken


fill_normals = _by_place(langevin.fill_normals)
plain_step = _by_place(langevin.plain_step)
metric_step = _by_place(langevin.metric_step)
moment_step = _by_place(langevin.moment_step)
spiked_step = _by_place(langevin.spiked_step)
accumulate_moments = _by_place(langevin.accumulate_moments)
kick_drift = _by_place(langevin.kick_drift)
drift = _by_place(langevin.drift)
refresh = _by_place(langevin.refresh)
leapfrog_kick = _by_place(langevin.leapfrog_kick)
leapfrog_drift = _by_place(langevin.leapfrog_drift)
kick_flight = _by_place(squares.kick_flight)
flight = _by_place(squares.flight)
refresh_length = _by_place(squares.refresh_length)


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


def take_share(theta: Any, num: Any, den: Any, penalty: Any, power: float) -> None:
    """Take theta (num / (den + penalty))^power, in place on ``theta``; 0 / 0 counts as 0."""
    if not is_here(theta):
        cuda.take_share(theta, num, den, penalty, power)
        return
    if power == 1.0 and not np.ndim(penalty):
        langevin.multiply_share(theta, num, den, penalty)
        return
    total, ratio = den + penalty, np.zeros_like(num)
    np.divide(num, total, out=ratio, where=total > 0)
    np.maximum(ratio, 0, out=ratio)
    theta *= ratio if power == 1.0 else ratio**power


@_by_place
def level_places(place: Any, theta: Any, smallest: float, z: Any) -> None:
    """Multiply places by Φ(z), in place, where ``theta`` is not above the smallest number."""
    lost = theta <= smallest
    place[lost] *= ndtr(z)[lost]


@_by_place
def take_rows(theta: Any, other: Any, back: Any) -> None:
    """Take some rows of another array over, in place."""
    theta[back] = other[back]


def here(array: Any) -> Any:
    """Return an array in the memory of this process; one that is there stays what it is."""
    return array if is_here(array) else current().take(array)


def beside(array: Any, value: Any) -> Any:
    """Return a number, or an array where another one lies."""
    there = is_here(array) or not np.ndim(value) or not is_here(value)
    return value if there else current().put(value)


def zeros_beside(array: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Make an array of zeros where another one lies."""
    return np.zeros(shape, dtype) if is_here(array) else current().zeros(shape, dtype)
