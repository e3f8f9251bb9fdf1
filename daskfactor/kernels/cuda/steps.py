"""Steps of factors on the device: moves of entries, and functions named as their twins in `steps`.

Noise and updates have the bits of processors: all is compiled without fused multiply-adds, from
the same functions of numbers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from daskfactor.kernels.cuda.device import DeviceArray, current, is_on_host
from daskfactor.kernels.cuda.source import NAMES, steps
from daskfactor.kernels.entrywise import Column, Double, Move, Normal, Real, Share


def _launch(name: str, theta: DeviceArray, *arguments: Any, quads: bool = False) -> None:
    """Launch a kernel over all entries of a factor, or over quads of them."""
    source, (rows, K) = steps(NAMES[theta.dtype.char]), theta.shape
    threads = rows * (-(-K // 4) if quads else K)
    current().launch(source, name, threads, np.int64(rows), np.int64(K), theta, *arguments)


def over_entries(move: Move) -> Callable[..., None]:
    """Make the launch of a move for all entries of a factor, with the arguments of its loop."""
    normal = bool(move.named(Normal))
    kinds = [move.kinds[name] for name in move.arguments]

    def run(*arguments: Any) -> None:
        real: Any = arguments[0].dtype.type
        parameters: list[Any] = []
        for kind, value in zip(kinds, arguments, strict=False):
            if kind is Real:
                parameters.append(real(value))
            elif kind is Double:
                parameters.append(np.float64(value))
            elif kind is Share:
                parameters += [real(0), value] if np.ndim(value) else [real(value), None]
            else:
                put = kind is Column and is_on_host(value)
                parameters.append(current().put(value, real) if put else value)
        if address := arguments[len(kinds) :]:
            key, *words = address[:4]
            parameters += [np.uint32(key[0]), np.uint32(key[1]), *map(np.uint64, words)]
        if normal:
            parameters.append(np.int32(address[4:] == (True,)))
        _launch(move.name, *parameters, quads=normal)

    return run


def level_places(place: DeviceArray, theta: DeviceArray, smallest: float, z: DeviceArray) -> None:
    """Multiply ``place`` by Φ(z), in place, where ``theta`` is not above the smallest number."""
    _launch("level_places", place, theta, place.dtype.type(smallest), z)


def take_share(
    theta: DeviceArray, num: DeviceArray, den: DeviceArray, penalty: Any, power: float
) -> None:
    """Take theta (num / (den + penalty))^power, in place on ``theta``; 0 / 0 counts as 0."""
    penalties, by_row = None, 0
    if np.ndim(penalty):
        by_row = int(np.ndim(penalty) == 2 and penalty.shape[1] == 1 < theta.shape[1])
        penalties = current().put(penalty, np.float64) if is_on_host(penalty) else penalty
        penalty = 0.0
    rest = np.float64(penalty), penalties, np.int32(by_row), np.float64(power)
    _launch("take_share", theta, num, den, *rest)


def row_energies(
    theta: DeviceArray,
    momentum: DeviceArray,
    fits: DeviceArray,
    rates: DeviceArray,
    prior: tuple[float, float, float],
    free: DeviceArray,
    out: DeviceArray,
) -> None:
    """Set energies of rows, as :func:`daskfactor.kernels.langevin.row_energies` does."""
    (shape, power, phi), wide = prior, np.float64
    prior_terms = rates * theta.astype(wide)
    if shape != power:
        prior_terms = prior_terms - (shape - power) * np.log(theta.astype(wide))
    moving = 0.5 * np.square(momentum.astype(wide)).sum(axis=1)
    out[:] = np.where(free, prior_terms, 0.0).sum(axis=1) + moving - fits / phi
