"""Amounts of rain whose posterior has many modes."""

import numpy as np


def rainfall(weathers=6, often=0.15, patchy=0.5):
    """Return compound Poisson amounts at 60 stations on the wet days of a year, and their means.
    Each kind of weather comes ``often``, and wets stations by gamma numbers of shape ``patchy``."""
    rng = np.random.default_rng(5)
    W, H = rng.gamma(patchy, 1 / patchy, (60, weathers)), rng.gamma(1, 1, (weathers, 365))
    mu = W @ (H * (rng.random(H.shape) < often))
    mu *= 3 / mu.mean()
    showers = rng.poisson(2 * mu**0.5 / 0.3)
    V = np.where(showers > 0, rng.gamma(np.maximum(showers, 1), 0.15 * mu**0.5), 0.0)
    wet = V.sum(axis=0) > 0
    return V[:, wet].astype(np.float32), mu[:, wet]
