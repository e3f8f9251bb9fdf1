"""Uniformity of ranks: p values that are as uniform as they claim, and what they see."""

import numpy as np
import pytest
from scipy import stats

from daskfactor.results.ranks import band, uniformity

COUNT, LEVELS = 150, 15


def test_p_values_of_uniform_ranks_are_uniform():
    rng = np.random.default_rng(0)
    found = [uniformity(rng.integers(0, LEVELS + 1, COUNT), LEVELS) for _ in range(1000)]
    for name in ("ecdf_p", "chi_square_p"):
        p = np.array([getattr(one, name) for one in found])
        for level in (0.01, 0.1, 0.5):
            within = np.mean(p <= level)
            assert abs(within - level) < 5 * np.sqrt(level * (1 - level) / p.size) + 0.01
    for level in (0.01, 0.1):
        within = np.mean([one.p <= level for one in found])
        assert within < level + 5 * np.sqrt(level * (1 - level) / len(found))
        assert within > level / 4
    for name in ("shift", "spread"):
        z = np.array([getattr(one, name) for one in found])
        assert abs(z.mean()) < 5 / np.sqrt(z.size)
        assert abs(z.var() - 1) < 5 * np.sqrt(2 / z.size)


@pytest.mark.parametrize(
    ("name", "a", "b", "sign"),
    [
        ("shift", 1.6, 1.0, 1),
        ("shift", 1.0, 1.6, -1),
        ("spread", 0.6, 0.6, 1),
        ("spread", 1.8, 1.8, -1),
    ],
)
def test_what_is_not_uniform_is_seen_and_named(name, a, b, sign):
    rng = np.random.default_rng(1)
    ranks = rng.binomial(LEVELS, rng.beta(a, b, 2 * COUNT))
    found = uniformity(ranks, LEVELS)
    assert found.p < 0.001
    assert max(found.ecdf_p, found.chi_square_p) < 0.05
    assert sign * getattr(found, name) > 3.5


def test_bins_of_many_levels_expect_what_they_hold():
    ranks = np.random.default_rng(2).integers(0, 64, 100)
    parts = np.array_split(np.arange(64), 20)
    observed = [np.isin(ranks, part).sum() for part in parts]
    wanted = stats.chisquare(observed, [100 * len(part) / 64 for part in parts]).pvalue
    assert uniformity(ranks, 63).chi_square_p == pytest.approx(wanted)


def test_the_band_holds_whole_lines():
    lower, upper = band(COUNT, LEVELS)
    rng = np.random.default_rng(3)
    drawn = rng.multinomial(COUNT, np.full(LEVELS + 1, 1 / (LEVELS + 1)), 4000)
    share = drawn.cumsum(axis=1)[:, :-1] / COUNT
    inside = ((share >= lower) & (share <= upper)).all(axis=1).mean()
    assert 0.93 < inside < 0.98
