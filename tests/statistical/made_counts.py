"""Counts that are what a Poisson model says, and counts that vary more."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

SHAPE, K = (60, 40), 3


def means(rng: np.random.Generator, shape: float, mean: float) -> NDArray[Any]:
    """Draw the means of a matrix."""
    (rows, columns), mu = SHAPE, np.zeros(1)
    while not mu.mean():
        mu = rng.gamma(shape, size=(rows, K)) @ rng.gamma(shape, size=(K, columns))
    return mu * mean / mu.mean()


def counts(rng: np.random.Generator, mu: NDArray[Any], ratio: float = 1.0) -> NDArray[Any]:
    """Draw counts that vary ``ratio`` times as much as Poisson counts; some are positive."""
    V = np.zeros(1)
    while not V.any():
        excess = ratio - 1
        V = rng.poisson(rng.gamma(mu / excess, excess) if excess else mu)
    return V.astype(np.float64)
