"""Tests of the uniformity of ranks."""

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ranks = NDArray[np.int64]

SIMULATIONS: Final = 4000
"""Number of simulated sets of uniform ranks for bands and p values."""
MIN_EXPECTED: Final = 5
"""Least expected count in a bin of the chi-square test."""


class Uniformity(NamedTuple):
    """Results of uniformity tests for the ranks of one quantity.

    Attributes
    ----------
    p
        Twice the smaller p value of two tests: `ecdf_p`, and that of shift² + spread².
    ecdf_p
        P value of simultaneous bands around the distribution function, a general test.
    chi_square_p
        P value of Pearson's test on bins of equally many ranks; not part of p.
    shift, spread
        Standard normal for uniform ranks; positive if draws are too low, or too narrow.
    """

    p: float
    ecdf_p: float
    chi_square_p: float
    shift: float
    spread: float


class Bands(NamedTuple):
    """Distribution of N uniform ranks among L draws.

    Attributes
    ----------
    tails
        Two-sided tail probability of each count of ranks up to each level, (L, N + 1).
    least
        Smallest tail of every simulated set of ranks, in ascending order.
    """

    tails: Array
    least: Array


@lru_cache(maxsize=32)
def bands(count: int, levels: int) -> Bands:
    """Simulate the cumulative counts of ``count`` uniform ranks from 0 to ``levels``.

    Notes
    -----
    Säilynoja, Bürkner and Vehtari 2022, "Graphical test for discrete uniformity and its
    applications in goodness-of-fit evaluation and multiple sample comparison", section 3.
    """
    from scipy.stats import binom  # takes a second to import

    at = np.arange(1, levels + 1)[:, None] / (levels + 1)
    below = binom.cdf(np.arange(count + 1), count, at)
    above = binom.sf(np.arange(-1, count), count, at)
    tails = np.minimum(1.0, 2.0 * np.minimum(below, above))
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(count, np.full(levels + 1, 1 / (levels + 1)), SIMULATIONS)
    counts = drawn.cumsum(axis=1)[:, :-1]
    return Bands(tails, np.sort(tails[np.arange(levels), counts].min(axis=1)))


def band(count: int, levels: int, level: float = 0.95) -> tuple[Array, Array]:
    """Return a simultaneous band of the distribution function with probability ``level``."""
    simulated = bands(count, levels)
    inside = simulated.tails >= np.quantile(simulated.least, 1 - level)
    lower = inside.argmax(axis=1)
    upper = count - inside[:, ::-1].argmax(axis=1)
    return lower / count, upper / count


def uniformity(ranks: Ranks, levels: int) -> Uniformity:
    r"""Test whether ranks among ``levels`` draws, 0 to ``levels``, are uniform.

    With u the midpoint of the interval of a rank in the unit interval:

    .. math:: {\rm shift} = \sqrt{12 N}\,(\bar u - \tfrac12), \qquad
        {\rm spread} = \sqrt{5/N} \sum_n (6 u_n^2 - 6 u_n + 1)

    With few levels both are scaled to a variance of 1. They are the first two terms of Neyman's
    smooth test, which is powerful against typical errors of samplers.
    """
    from scipy.stats import chi2

    count = len(ranks)
    simulated, seen = bands(count, levels), np.bincount(ranks, minlength=levels + 1)
    least = simulated.tails[np.arange(levels), seen.cumsum()[:-1]].min()
    ecdf_p = (1 + np.searchsorted(simulated.least, least, side="right")) / (1 + SIMULATIONS)
    bins = max(2, min(levels + 1, count // MIN_EXPECTED))
    parts = np.array_split(seen, bins)
    observed = np.array([part.sum() for part in parts])
    expected = np.array([len(part) for part in parts]) * count / (levels + 1)
    squares = float(((observed - expected) ** 2 / expected).sum())
    u = (np.arange(levels + 1) + 0.5) / (levels + 1)
    scores = []
    for values in (u - 0.5, 6 * u**2 - 6 * u + 1):
        centred = values - values.mean()
        scores.append(float(seen @ centred) / np.sqrt(count * np.mean(centred**2)))
    smooth = float(np.exp(-0.5 * np.square(scores).sum()))
    p = min(1.0, 2.0 * min(float(ecdf_p), smooth))
    return Uniformity(p, float(ecdf_p), float(chi2.sf(squares, bins - 1)), *scores)
