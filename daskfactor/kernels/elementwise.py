"""What beta means, entry by entry: written once, shared by every dense kernel.

    residual   (v - mu) * mu**(beta - 2)     d log p / d mu, times the dispersion
    curvature  mu**(beta - 1)
    ratio      v * mu**(beta - 2)
    deviance   d_beta(v | mu)

so a divergence is one function ``weight(mu) = mu**(beta - 2)`` and one
function ``deviance(v, mu)``. beta = 2, 1, 0.5, 0 and -1 need no power. A
missing entry is NaN: the sums skip it.

Source: Şimşekli et al. 2017, eq. 2 to 4; Şimşekli et al. 2015, section 4.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import inline, jit
from daskfactor.kernels.polynomials import expm1, log, log_tail, power, split

Scalar = Any
Array = NDArray[Any]
_LOG_2 = math.log(2.0)
_SERIES_RANGE = 0.03


class TileKernels(NamedTuple):
    """What is done to a tile of means between two matrix products."""

    residual: Callable[[Array, int, int, Array, float, float], None]
    residual_curvature: Callable[[Array, int, int, Array, Array, float, float], None]
    ratio_curvature: Callable[[Array, int, int, Array, Array, float], None]
    deviance: Callable[[Array, int, int, Array, float, Array], None]


class EntryKernels(NamedTuple):
    """What a divergence is, for one entry."""

    floored: Callable[[Scalar, Scalar], Scalar]
    weight: Callable[[Scalar], Scalar]
    deviance: Callable[[Scalar, Scalar], Scalar]


@inline
def _floored(mu: Scalar, floor: Scalar) -> Scalar:
    """The larger of the two; NaN stays NaN, so that a divergence can be seen."""
    return floor if mu < floor else mu


@inline
def _weight_2(mu: Scalar) -> Scalar:
    return type(mu)(1)


@inline
def _weight_1(mu: Scalar) -> Scalar:
    return type(mu)(1) / mu


@inline
def _weight_half(mu: Scalar) -> Scalar:
    return type(mu)(1) / (mu * np.sqrt(mu))


@inline
def _weight_0(mu: Scalar) -> Scalar:
    return type(mu)(1) / (mu * mu)


@inline
def _weight_minus_1(mu: Scalar) -> Scalar:
    return type(mu)(1) / (mu * mu * mu)


def _general_weight(beta: float) -> Callable[[Scalar], Scalar]:
    exponent = beta - 2.0

    @inline
    def weight(mu: Scalar) -> Scalar:
        return power(mu, exponent)

    return weight


@inline
def _log_parts(ratio: Scalar, x: Scalar) -> Scalar:
    """``(f, log(1 + f) - f, e)`` of ratio = 1 + x, with f = x itself where e = 0."""
    f, exponent = split(ratio)
    f = x if exponent == 0 else f
    return f, log_tail(f), exponent


@inline
def _deviance_2(v: Scalar, mu: Scalar) -> Scalar:
    return type(mu)(0.5) * (v - mu) * (v - mu)


@inline
def _deviance_1(v: Scalar, mu: Scalar) -> Scalar:
    """Mu (r log r - x), r = v / mu, x = r - 1; without cancellation near r = 1."""
    ratio = v / mu
    x = (v - mu) / mu
    f, tail, exponent = _log_parts(ratio, x)
    near = x * (x + tail) + tail
    far = ratio * (f + tail + exponent * type(mu)(_LOG_2)) - x
    return mu * (near if exponent == 0 else far)


@inline
def _deviance_half(v: Scalar, mu: Scalar) -> Scalar:
    """2 (sqrt v - sqrt mu)**2 / sqrt mu."""
    root = np.sqrt(mu)
    difference = (v - mu) / (np.sqrt(v) + root)
    return type(mu)(2) * difference * difference / root


@inline
def _deviance_0(v: Scalar, mu: Scalar) -> Scalar:
    """X - log r, r = v / mu, x = r - 1; without cancellation near r = 1."""
    x = (v - mu) / mu
    f, tail, exponent = _log_parts(v / mu, x)
    return -tail if exponent == 0 else x - f - tail - exponent * type(mu)(_LOG_2)


@inline
def _deviance_minus_1(v: Scalar, mu: Scalar) -> Scalar:
    difference = (v - mu) / mu
    return type(mu)(0.5) * difference * difference / v


@inline
def _deviance_series(x: Scalar, beta: Scalar) -> Scalar:
    g = 1.0 + (beta - 10.0) * x / 11.0
    g = 1.0 + (beta - 9.0) * x / 10.0 * g
    g = 1.0 + (beta - 8.0) * x / 9.0 * g
    g = 1.0 + (beta - 7.0) * x / 8.0 * g
    g = 1.0 + (beta - 6.0) * x / 7.0 * g
    g = 1.0 + (beta - 5.0) * x / 6.0 * g
    g = 1.0 + (beta - 4.0) * x / 5.0 * g
    g = 1.0 + (beta - 3.0) * x / 4.0 * g
    g = 1.0 + (beta - 2.0) * x / 3.0 * g
    return 0.5 * x * x * g


def _general_deviance(beta: float) -> Callable[[Scalar, Scalar], Scalar]:
    """``mu**beta g(r)``, r = 1 + x = v / mu.

    Near r = 1: g = x**2 / 2 (1 + (beta - 2) x / 3 (1 + (beta - 3) x / 4 (...))).
    Elsewhere through expm1, of beta log r where beta is nearer 0 than 1 and of
    (beta - 1) log r otherwise, so that the limits at 0 and 1 are approached smoothly.
    """
    near_zero = abs(beta) < abs(beta - 1.0)
    exponent = beta if near_zero else beta - 1.0

    @inline
    def deviance(v: Scalar, mu: Scalar) -> Scalar:
        data, mean = np.float64(v), np.float64(mu)
        x = (data - mean) / mean
        ratio = data / mean
        growth = expm1(exponent * log(ratio)) / exponent
        far = (growth - x) / (beta - 1.0) if near_zero else (ratio * growth - x) / beta
        far = far if data > 0.0 else 1.0 / beta
        near = _deviance_series(x, beta)
        return power(mean, beta) * (near if abs(x) < _SERIES_RANGE else far)

    return deviance


_WEIGHTS: dict[float, Callable[[Scalar], Scalar]] = {
    2.0: _weight_2,
    1.0: _weight_1,
    0.5: _weight_half,
    0.0: _weight_0,
    -1.0: _weight_minus_1,
}
_DEVIANCES: dict[float, Callable[[Scalar, Scalar], Scalar]] = {
    2.0: _deviance_2,
    1.0: _deviance_1,
    0.5: _deviance_half,
    0.0: _deviance_0,
    -1.0: _deviance_minus_1,
}


def entry_kernels(beta: float) -> EntryKernels:
    """What beta means for a single entry, inlined where it is called."""
    return EntryKernels(
        floored=_floored,
        weight=_WEIGHTS.get(beta) or _general_weight(beta),
        deviance=_DEVIANCES.get(beta) or _general_deviance(beta),
    )


@lru_cache(maxsize=64)
def tile_kernels(beta: float) -> TileKernels:
    """Jitted tile operations of one beta; every tile comes in as means and is overwritten.

    In each, row i of the tile belongs to row ``row + i`` of V and its first
    column to column ``col``; means are floored at ``floor``.
    """
    _, weight, entry_deviance = entry_kernels(beta)

    @jit
    def residual(V: Array, row: int, col: int, tile: Array, scale: Scalar, floor: Scalar) -> None:
        """Tile <- scale (v - mu) mu**(beta - 2), 0 where v is missing."""
        real = tile.dtype.type
        for i in range(tile.shape[0]):
            data, line = V[row + i, col : col + tile.shape[1]], tile[i]
            for j in range(line.size):
                v = real(data[j])
                mu = _floored(line[j], real(floor))
                value = real(scale) * (v - mu) * weight(mu)
                line[j] = value if v == v else real(0)

    @jit
    def residual_curvature(
        V: Array, row: int, col: int, tile: Array, tile2: Array, scale: Scalar, floor: Scalar
    ) -> None:
        """Tile <- residual as above, tile2 <- mu**(beta - 1), 0 where v is missing."""
        real = tile.dtype.type
        for i in range(tile.shape[0]):
            data, line, line2 = V[row + i, col : col + tile.shape[1]], tile[i], tile2[i]
            for j in range(line.size):
                v = real(data[j])
                mu = _floored(line[j], real(floor))
                w = weight(mu)
                line[j] = real(scale) * (v - mu) * w if v == v else real(0)
                line2[j] = mu * w if v == v else real(0)

    @jit
    def ratio_curvature(
        V: Array, row: int, col: int, tile: Array, tile2: Array, floor: Scalar
    ) -> None:
        """Tile <- v mu**(beta - 2), tile2 <- mu**(beta - 1), 0 where v is missing."""
        real = tile.dtype.type
        for i in range(tile.shape[0]):
            data, line, line2 = V[row + i, col : col + tile.shape[1]], tile[i], tile2[i]
            for j in range(line.size):
                v = real(data[j])
                mu = _floored(line[j], real(floor))
                w = weight(mu)
                line[j] = v * w if v == v else real(0)
                line2[j] = mu * w if v == v else real(0)

    @jit
    def deviance(V: Array, row: int, col: int, tile: Array, floor: Scalar, out: Array) -> None:
        """out[0] -= sum of d_beta(v | mu), out[1] += sum of (v - mu)**2 mu**(beta - 2)."""
        real = tile.dtype.type
        total = pearson = 0.0
        for i in range(tile.shape[0]):
            data, line = V[row + i, col : col + tile.shape[1]], tile[i]
            for j in range(line.size):
                mu = _floored(line[j], real(floor))
                v = real(data[j])
                v = v if v == v else mu  # a missing entry adds d(mu | mu) = 0
                total += np.float64(entry_deviance(v, mu))
                pearson += np.float64((v - mu) * (v - mu) * weight(mu))
        out[0] -= total
        out[1] += pearson

    return TileKernels(residual, residual_curvature, ratio_curvature, deviance)
