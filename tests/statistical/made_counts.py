"""Counts that are what a Poisson model says, and counts that vary more."""

import numpy as np

SHAPE, K = (60, 40), 3


def means(rng, shape, mean):
    """Draw the means of a matrix."""
    (rows, columns), mu = SHAPE, np.zeros(1)
    while not mu.mean():
        mu = rng.gamma(shape, size=(rows, K)) @ rng.gamma(shape, size=(K, columns))
    return mu * mean / mu.mean()


def counts(rng, mu, ratio=1.0):
    """Draw counts that vary ``ratio`` times as much as Poisson counts; some are positive."""
    V = np.zeros(1)
    while not V.any():
        excess = ratio - 1
        V = rng.poisson(rng.gamma(mu / excess, excess) if excess else mu)
    return V.astype(np.float64)
