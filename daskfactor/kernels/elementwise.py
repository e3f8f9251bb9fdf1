"""A likelihood entry by entry, compiled once and shared by every kernel that is made of it.

    residual   (v - mu) weight(mu)     d log p / d mu, times the dispersion

and ``curvature``, ``ratio`` and ``deviance`` as `daskfactor.models.likelihood.Entry` has
them. A missing entry is NaN: the sums skip it.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels import polynomials
from daskfactor.kernels.jit import inline, jit
from daskfactor.models.likelihood import Entry, Likelihood

Scalar = Any
Array = NDArray[Any]


class TileKernels(NamedTuple):
    """What is done to a tile of means between two matrix products."""

    residual: Callable[[Array, int, int, Array, float, float], None]
    residual_curvature: Callable[[Array, int, int, Array, Array, float, float], None]
    ratio_curvature: Callable[[Array, int, int, Array, Array, float], None]
    deviance: Callable[[Array, int, int, Array, float, Array], None]


@inline
def floored(mu: Scalar, floor: Scalar) -> Scalar:
    """The larger of the two; NaN stays NaN, so that a divergence can be seen."""
    return floor if mu < floor else mu


@lru_cache(maxsize=64)
def entry_kernels(likelihood: Likelihood) -> Entry:
    """What the likelihood means for a single entry, inlined where it is called."""
    made: list[Any] = [each and inline(each) for each in likelihood.entry(polynomials)]
    return Entry(*made)


@lru_cache(maxsize=64)
def tile_kernels(likelihood: Likelihood) -> TileKernels:
    """Jitted tile operations of one likelihood; every tile comes in as means and is overwritten.

    In each, row i of the tile belongs to row ``row + i`` of V and its first
    column to column ``col``; means are floored at ``floor``.
    """
    weight, curvature, ratio, entry_deviance, _ = entry_kernels(likelihood)

    @jit
    def residual(V: Array, row: int, col: int, tile: Array, scale: Scalar, floor: Scalar) -> None:
        """Tile <- scale (v - mu) mu**(beta - 2), 0 where v is missing."""
        real = tile.dtype.type
        for i in range(tile.shape[0]):
            data, line = V[row + i, col : col + tile.shape[1]], tile[i]
            for j in range(line.size):
                v = real(data[j])
                mu = floored(line[j], real(floor))
                value = real(scale) * (v - mu) * weight(v, mu)
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
                mu = floored(line[j], real(floor))
                w = weight(v, mu)
                line[j] = real(scale) * (v - mu) * w if v == v else real(0)
                line2[j] = curvature(v, mu, w) if v == v else real(0)

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
                mu = floored(line[j], real(floor))
                w = weight(v, mu)
                line[j] = ratio(v, mu, w) if v == v else real(0)
                line2[j] = curvature(v, mu, w) if v == v else real(0)

    @jit
    def deviance(V: Array, row: int, col: int, tile: Array, floor: Scalar, out: Array) -> None:
        """out[0] -= sum of d_beta(v | mu), out[1] += sum of (v - mu)**2 mu**(beta - 2)."""
        real = tile.dtype.type
        total = pearson = 0.0
        for i in range(tile.shape[0]):
            data, line = V[row + i, col : col + tile.shape[1]], tile[i]
            for j in range(line.size):
                mu = floored(line[j], real(floor))
                v = real(data[j])
                v = v if v == v else mu  # a missing entry adds d(mu | mu) = 0
                total += np.float64(entry_deviance(v, mu))
                pearson += np.float64((v - mu) * (v - mu) * weight(v, mu))
        out[0] -= total
        out[1] += pearson

    return TileKernels(residual, residual_curvature, ratio_curvature, deviance)
