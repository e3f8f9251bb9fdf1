"""Whether ranks are uniform, and in which way they are not."""

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ranks = NDArray[np.int64]

SIMULATIONS: Final = 4000
"""Sets of uniform ranks that bands and their p values come from."""
FEWEST_EXPECTED: Final = 5
"""Ranks that a bin of the chi-square test expects at least."""


class Uniformity(NamedTuple):
    """What the ranks of one quantity say.

    Attributes
    ----------
    p
        Of two tests, twice the smaller p value: `ecdf_p`, and that of shift² + spread².
    ecdf_p
        Of simultaneous bands around the distribution function, which see anything a little.
    chi_square_p
        Of Pearson's test on bins of equally many ranks; no part of p.
    shift, spread
        Standard normal under uniform ranks; positive where draws lie too low, and where they
        are too narrow.
    """

    p: float
    ecdf_p: float
    chi_square_p: float
    shift: float
    spread: float


class Bands(NamedTuple):
    """The law of N uniform ranks among L draws.

    Attributes
    ----------
    tails
        (L, N + 1): probability, twice the smaller tail, of a count of ranks up to each one.
    least
        The smallest tail along every simulated set of ranks, in ascending order.
    """

    tails: Array
    least: Array


@lru_cache(maxsize=32)
def bands(count: int, levels: int) -> Bands:
    """Simulate how far the counts of ``count`` uniform ranks 0 to ``levels`` stray.

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
    """Return between which shares of ranks the distribution function stays, with probability."""
    found = bands(count, levels)
    inside = found.tails >= np.quantile(found.least, 1 - level)
    lower = inside.argmax(axis=1)
    upper = count - inside[:, ::-1].argmax(axis=1)
    return lower / count, upper / count


def uniformity(ranks: Ranks, levels: int) -> Uniformity:
    r"""Test whether ranks among ``levels`` draws, 0 to ``levels``, are uniform.

    With u the middle of a rank's share of the unit interval:

    .. math:: {\rm shift} = \sqrt{12 N}\,(\bar u - \tfrac12), \qquad
        {\rm spread} = \sqrt{5/N} \sum_n (6 u_n^2 - 6 u_n + 1)

    Under few levels both are scaled to a variance of 1. They are the first two terms of
    Neyman's smooth test, which sees best what samplers do wrong.
    """
    from scipy.stats import chi2

    count = len(ranks)
    found, seen = bands(count, levels), np.bincount(ranks, minlength=levels + 1)
    least = found.tails[np.arange(levels), seen.cumsum()[:-1]].min()
    ecdf_p = (1 + np.searchsorted(found.least, least, side="right")) / (1 + SIMULATIONS)
    bins = max(2, min(levels + 1, count // FEWEST_EXPECTED))
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
