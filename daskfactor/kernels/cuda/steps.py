"""Steps of factors on the device: moves of entries, and functions named as their twins in `steps`.

Noise and updates have the bits of processors: all is compiled without fused multiply-adds, from
the same functions of numbers.
"""

from typing import Any

import numpy as np

from daskfactor.kernels.cuda.device import Device, DeviceArray, current, is_here
from daskfactor.kernels.cuda.source import NAMES, Source, steps
from daskfactor.kernels.entrywise import COLUMN, DOUBLE, NORMAL, REAL, SHARE, Move


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


def run(move: Move, *arguments: Any) -> None:
    """Move all entries of a factor; the arguments are those of the loop on processors."""
    launch, roles = _Run(arguments[0]), move.arguments.values()
    parameters: list[Any] = []
    for role, value in zip(roles, arguments, strict=False):
        if role is REAL:
            value = launch.real(value)
        elif role is DOUBLE:
            value = np.float64(value)
        elif role is COLUMN and is_here(value):
            value = launch.device.put(value, arguments[0].dtype)
        elif role is SHARE:
            by_row = bool(np.ndim(value))
            parameters.append(launch.real(0 if by_row else value))
            value = value if by_row else None
        parameters.append(value)
    if address := arguments[len(roles) :]:
        key, *words = address[:4]
        parameters += [np.uint32(key[0]), np.uint32(key[1]), *map(np.uint64, words)]
    normal = move.takes(NORMAL)
    if normal:
        parameters.append(np.int32(address[4:] == (True,)))
    launch(move.name, *parameters, quads=normal)


def level_places(place: DeviceArray, theta: DeviceArray, smallest: float, z: DeviceArray) -> None:
    """Multiply places by Φ(z), in place, where ``theta`` is not above the smallest number."""
    run = _Run(place)
    run("level_places", place, theta, run.real(smallest), z)


def take_rows(theta: DeviceArray, other: DeviceArray, back: DeviceArray) -> None:
    """Take some rows of another array over, in place."""
    _Run(theta)("take_rows", theta, other, back)


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
