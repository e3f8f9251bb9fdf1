"""Steps of factors on the device; each has the name and arguments of its numba twin.

Noise and updates have the bits of processors: `steps.cu` is compiled without fused
multiply-adds, from the same functions of numbers.
"""

from typing import Any

import numpy as np

from daskfactor.kernels.cuda.device import Device, DeviceArray, current, is_here
from daskfactor.kernels.cuda.source import NAMES, Source, steps
from daskfactor.kernels.langevin import SQUARED
from daskfactor.kernels.philox import Address
from daskfactor.kernels.polynomials import expm1


class _Run:
    """One launch over all entries of a factor."""

    def __init__(self, theta: DeviceArray) -> None:
        self.device: Device = current()
        self.source: Source = steps(NAMES[theta.dtype.char])
        self.rows, self.components = theta.shape
        self.real = theta.dtype.type

    def __call__(self, name: str, *arguments: Any, quads: bool = False) -> None:
        each = -(-self.components // 4) if quads else self.components
        size = np.int64(self.rows), np.int64(self.components)
        self.device.launch(self.source, name, self.rows * each, *size, *arguments)


def _noise(key: Any, iteration: int, factor: int, row0: int) -> tuple[np.unsignedinteger[Any], ...]:
    words = np.uint64(iteration), np.uint64(factor), np.uint64(row0)
    return (np.uint32(key[0]), np.uint32(key[1]), *words)


def fill_normals(out: DeviceArray, key: Any, iteration: int, factor: int, row0: int) -> None:
    """Standard normal numbers of one factor band at one iteration."""
    _Run(out)("fill_normals", out, *_noise(key, iteration, factor, row0), quads=True)


def langevin_step(
    theta: DeviceArray,
    grad: DeviceArray,
    metric: DeviceArray | None,
    step: float,
    prior: tuple[float, float],
    address: Address,
    coarse: bool,
    matched: tuple[Any, float] | None = None,
) -> None:
    """Langevin step, mirrored at zero, in place; a share of ``matched`` may be one per row."""
    run = _Run(theta)
    real, (rate, shape) = run.real, prior
    size, stays, share, shares, most = real(step), real(0), real(0), None, real(0)
    form = "plain_step" if metric is None else "metric_step"
    if metric is not None and matched is not None:
        form, gone = "spiked_step" if real(shape) < SQUARED else "moment_step", -expm1(-float(step))
        size, stays = real(gone), real(1.0 - gone)
        most = real(matched[1])
        if np.ndim(matched[0]):
            shares = matched[0]
        else:
            share = real(matched[0])
    numbers = size, real(rate), real(shape), stays, share, shares, most, np.int32(coarse)
    run(form, theta, grad, metric, *numbers, *_noise(*address), quads=True)


def accumulate_moments(theta: DeviceArray, count: int, mean: DeviceArray, m2: DeviceArray) -> None:
    """Add one draw to a running mean and sum of squared deviations, in place."""
    run = _Run(theta)
    run("accumulate_moments", theta, run.real(1) / run.real(count), mean, m2)


def _kick_drift(
    x: DeviceArray,
    momentum: DeviceArray,
    grad: DeviceArray | None,
    weights: DeviceArray,
    columns: Any,
    step: float,
    share: float,
) -> None:
    run = _Run(x)
    table = run.device.put(columns, x.dtype) if is_here(columns) else columns
    run("kick_drift", x, momentum, grad, weights, table, run.real(step), run.real(share))


def kick_drift(
    x: DeviceArray,
    momentum: DeviceArray,
    grad: DeviceArray,
    weights: DeviceArray,
    columns: Any,
    step: float,
    share: float,
) -> None:
    """A kick by the gradient and ``share`` of a drift, in place."""
    _kick_drift(x, momentum, grad, weights, columns, step, share)


def drift(
    x: DeviceArray,
    momentum: DeviceArray,
    weights: DeviceArray,
    columns: Any,
    step: float,
    share: float,
) -> None:
    """``share`` of a drift, in place."""
    _kick_drift(x, momentum, None, weights, columns, step, share)


def refresh(
    momentum: DeviceArray, keep: float, key: Any, iteration: int, factor: int, row0: int
) -> None:
    """Mix fresh noise into the momentum, in place."""
    run = _Run(momentum)
    kept, spread = run.real(keep), run.real(np.sqrt(1.0 - keep * keep))
    run("refresh", momentum, kept, spread, *_noise(key, iteration, factor, row0), quads=True)


def leapfrog_kick(
    theta: DeviceArray,
    momentum: DeviceArray,
    grad: DeviceArray,
    spread: DeviceArray,
    size: float,
    precision: float,
    rate: float,
    shape: float,
) -> None:
    """Change the momentum by the gradient of the log posterior, in place."""
    run = _Run(theta)
    numbers = map(run.real, (size, precision, rate, shape))
    run("leapfrog_kick", theta, momentum, grad, spread, *numbers)


def leapfrog_drift(
    theta: DeviceArray, momentum: DeviceArray, spread: DeviceArray, size: float
) -> None:
    """Move along the momentum, mirrored at zero, in place."""
    run = _Run(theta)
    run("leapfrog_drift", theta, momentum, spread, run.real(size))


def level_places(place: DeviceArray, theta: DeviceArray, smallest: float, z: DeviceArray) -> None:
    """Multiply places by Φ(z), in place, where ``theta`` is not above the smallest number."""
    run = _Run(place)
    run("level_places", place, theta, run.real(smallest), z)


def take_rows(theta: DeviceArray, other: DeviceArray, back: DeviceArray) -> None:
    """Take some rows of another array over, in place."""
    _Run(theta)("take_rows", theta, other, back)


def kick_flight(
    theta: DeviceArray,
    along: DeviceArray,
    across: DeviceArray,
    grad: DeviceArray,
    metric: DeviceArray,
    rate: float,
    size: float,
    share: float,
) -> None:
    """A kick by the gradient and ``share`` of a drift of squared lengths, in place."""
    run = _Run(theta)
    numbers = run.real(rate), run.real(size), run.real(size * share)
    run("kick_flight", theta, along, across, grad, metric, *numbers)


def flight(
    theta: DeviceArray, along: DeviceArray, across: DeviceArray, metric: DeviceArray, size: float
) -> None:
    """A drift of squared lengths over a time, in place."""
    run = _Run(theta)
    numbers = run.real(0), run.real(0), run.real(size)
    run("kick_flight", theta, along, across, None, metric, *numbers)


def refresh_length(
    across: DeviceArray,
    keep: float,
    shape: float,
    key: Any,
    iteration: int,
    factor: int,
    row0: int,
) -> None:
    """Refresh the length of 2 shape - 1 dimensions, in place."""
    numbers = np.float64(keep), np.float64(shape)
    _Run(across)("refresh_length", across, *numbers, *_noise(key, iteration, factor, row0))


def take_share(
    theta: DeviceArray, num: DeviceArray, den: DeviceArray, penalty: Any, power: float
) -> None:
    """Take theta (num / (den + penalty))^power, in place on ``theta``; 0 / 0 counts as 0."""
    run, penalties, by_row = _Run(theta), None, 0
    if np.ndim(penalty):
        by_row = int(np.ndim(penalty) == 2 and penalty.shape[1] == 1 < run.components)
        penalties = run.device.put(penalty, np.float64) if is_here(penalty) else penalty
        penalty = 0.0
    rest = np.float64(penalty), penalties, np.int32(by_row), np.float64(power)
    run("take_share", theta, num, den, *rest)
