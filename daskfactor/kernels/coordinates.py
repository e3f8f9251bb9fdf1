"""Coordinate descent on a sum of squares: non-negative rows, given their Gram matrix."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import jit

Array = NDArray[Any]


TILE = 64
"""Rows that move side by side: their loops vectorise, and they stay in the first-level cache."""


@jit
def descend_rows(theta: Array, pull: Array, gram: Array, free: Array, sweeps: int) -> None:
    """Bring θ G θᵀ / 2 - p θᵀ down for every row θ >= 0, entry by entry, in place.

    ``theta`` and ``pull`` are (m, K) and ``gram`` (K, K), of one dtype, and ``free`` (K,)
    says which entries move. A sweep sets one entry after the other to its best value given the
    rest. Source: Cichocki and Phan 2009, algorithm 2.
    """
    width, real = gram.shape[0], theta.dtype.type
    tiny = real(1e-30)
    rows, slopes = np.empty((width, TILE), theta.dtype), np.empty((width, TILE), theta.dtype)
    moves = np.empty(TILE, theta.dtype)
    for begin in range(0, theta.shape[0], TILE):
        count = min(TILE, theta.shape[0] - begin)
        for i in range(count):
            for k in range(width):
                rows[k, i], slopes[k, i] = theta[begin + i, k], pull[begin + i, k]
        for k in range(width):
            for other in range(width):
                for i in range(count):
                    slopes[other, i] -= rows[k, i] * gram[k, other]
        for _ in range(sweeps):
            for k in range(width):
                if not free[k]:
                    continue
                # Where the other factor's column is zero the prior alone pulls: to zero.
                positive = gram[k, k] > tiny
                scale = real(1) / gram[k, k] if positive else real(0)
                for i in range(count):
                    step = slopes[k, i] * scale
                    if not positive and slopes[k, i] < 0:
                        step = -rows[k, i]
                    moves[i] = max(step, -rows[k, i])
                    rows[k, i] += moves[i]
                for other in range(width):
                    for i in range(count):
                        slopes[other, i] -= moves[i] * gram[k, other]
        for i in range(count):
            for k in range(width):
                theta[begin + i, k] = rows[k, i]
