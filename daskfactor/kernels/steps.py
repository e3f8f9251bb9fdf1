"""Steps of bands, taken where these lie: by numba on a processor, by CUDA on a GPU.

Both have the same names and arguments; which one it is only the arrays know.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
from scipy.special import ndtr

from daskfactor.kernels import langevin, philox, squares
from daskfactor.kernels.cuda import steps as cuda
from daskfactor.kernels.cuda.device import current, is_here

F = TypeVar("F", bound=Callable[..., Any])


def _by_place(step: F) -> F:
    """Take a step on the device if its first argument is there."""
    name = step.__name__

    @wraps(step)
    def taken(first: Any, *rest: Any) -> Any:
        return step(first, *rest) if is_here(first) else getattr(cuda, name)(first, *rest)

    return cast("F", taken)


fill_normals = _by_place(philox.fill_normals)
langevin_step = _by_place(langevin.langevin_step)
accumulate_moments = _by_place(langevin.accumulate_moments)
kick_drift = _by_place(langevin.kick_drift)
drift = _by_place(langevin.drift)
refresh = _by_place(langevin.refresh)
leapfrog_kick = _by_place(langevin.leapfrog_kick)
leapfrog_drift = _by_place(langevin.leapfrog_drift)
kick_flight = _by_place(squares.kick_flight)
flight = _by_place(squares.flight)
refresh_length = _by_place(squares.refresh_length)


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
