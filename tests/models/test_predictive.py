"""Predictive intervals: exact special cases, and coverage by simulation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from daskfactor.errors import ModelError, OptionError
from daskfactor.models.tweedie_law import _probability_of_zero
from tests.models.laws import (
    observation_interval,
    observation_variance,
    sample,
)

DRAWS = 40_000
ERROR = 5 * 0.5 / np.sqrt(DRAWS)  # five standard errors of a share, at most


def simulate(m, cv, phi, beta):
    """Observations whose mean is gamma with mean ``m`` and coefficient of variation ``cv``."""
    rng = np.random.default_rng(int(1000 * (m + cv + phi + beta + 5)))
    means = np.full(DRAWS, m)
    if cv > 0:
        means = np.maximum(m * cv**2 * rng.standard_gamma(1 / cv**2, size=DRAWS), 1e-12)
    return sample(rng, means, phi, beta)


def shares(x, ends):
    lower, upper = ends
    return float(np.mean((x >= lower) & (x <= upper))), np.mean(x < lower), np.mean(x > upper)


@pytest.mark.parametrize("cv", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("m", [0.2, 4.0, 60.0])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_counts_are_covered_by_the_exact_mixture(m, cv, level):
    """A gamma posterior makes the negative binomial exact; coverage may only exceed the level."""
    ends = observation_interval(m, (m * cv) ** 2, 1.0, 1.0, level)
    inside, below, above = shares(simulate(m, cv, 1.0, 1.0), ends)
    tail = 0.5 * (1 - level)
    assert inside > level - ERROR
    assert below < tail + ERROR
    assert above < tail + ERROR
    assert np.all(np.mod(ends, 1.0) == 0)


@given(
    m=st.floats(1e-4, 1e6),
    excess=st.one_of(st.just(0.0), st.floats(1e-12, 1e3)),
    level=st.floats(0.05, 0.995),
)
@settings(max_examples=150, deadline=None)
def test_count_interval_is_the_shortest_with_such_tails(m, excess, level):
    lower, upper = observation_interval(m, excess * m, 1.0, 1.0, level)
    tail = 0.5 * (1 - level)
    law = stats.nbinom(m / excess, 1 / (1 + excess)) if excess > 1e-6 else stats.poisson(m)
    slack = 1e-4 * tail  # near-Poisson negative binomials are compared with the Poisson law
    assert law.cdf(lower - 1) <= tail + slack
    assert law.cdf(lower) >= tail - slack
    assert law.sf(upper) <= tail + slack
    assert law.sf(upper - 1) >= tail - slack


@pytest.mark.parametrize("beta", [0.8, 0.5, 0.2])
@pytest.mark.parametrize("phi", [0.1, 1.0])
@pytest.mark.parametrize(("m", "cv"), [(0.1, 0.0), (2.0, 0.0), (2.0, 0.5), (20.0, 0.3)])
def test_compound_poisson_coverage(beta, phi, m, cv):
    x = simulate(m, cv, phi, beta)
    ends = observation_interval(m, (m * cv) ** 2, phi, beta, 0.9)
    inside, below, above = shares(x, ends)
    assert 0.865 < inside < 0.965
    assert 0.04 < above < 0.06
    assert below < 0.085
    if np.mean(x == 0) > 0.06:  # an observed zero must not lie outside
        assert ends[0] == 0.0


@pytest.mark.parametrize("phi", [0.1, 1.0])
@pytest.mark.parametrize("cv", [0.0, 0.5])
def test_gamma_coverage(phi, cv):
    ends = observation_interval(3.0, (3.0 * cv) ** 2, phi, 0.0, 0.9)
    inside, below, above = shares(simulate(3.0, cv, phi, 0.0), ends)
    slack = ERROR if cv == 0.0 else 0.02  # exact where the mean is known
    assert abs(inside - 0.9) < slack
    assert abs(below - 0.05) < slack
    assert abs(above - 0.05) < slack


def test_gaussian_interval_is_exact_and_not_clipped():
    lower, upper = observation_interval(0.5, 0.3, 0.7, 2.0, 0.95)
    assert (lower, upper) == pytest.approx((0.5 - 1.959964, 0.5 + 1.959964), abs=1e-5)


@pytest.mark.parametrize(("phi", "m"), [(0.4, 0.3), (2.5, 1.0), (1.0, 3.0)])
def test_probability_of_zero_is_exact_for_lattice_counts(phi, m):
    """Gamma mean, Poisson lattice: the zero class of a negative binomial."""
    cv = 0.8
    got = _probability_of_zero(np.array([m]), np.array([(cv * m) ** 2]), phi, 1.0)[0]
    shape = 1 / cv**2
    assert got == pytest.approx(stats.nbinom.pmf(0, shape, shape / (shape + m / phi)), rel=1e-12)
    plain = _probability_of_zero(np.array([m]), np.zeros(1), phi, 0.5)[0]
    assert plain == pytest.approx(np.exp(-np.sqrt(m) / (phi * 0.5)))


@pytest.mark.parametrize(("beta", "phi"), [(0.5, 0.6), (1.0, 2.0), (0.0, 0.4)])
def test_matched_law_has_the_mean_and_variance(beta, phi):
    """Both are recovered from the quantiles: E X = int q, E X^2 = int q^2 over the levels."""
    m, spread, n = 1.4, 0.3, 20_000
    levels = 1 - (2 * np.arange(n // 2) + 1) / n
    ends = [observation_interval(m, spread, phi, beta, level) for level in levels[25::50]]
    fine = np.concatenate([[e[0], e[1]] for e in ends]).astype(float)
    total = float(observation_variance(m, spread, phi, beta))
    assert fine.mean() == pytest.approx(m, rel=0.01)
    assert fine.var() == pytest.approx(total, rel=0.03)


@pytest.mark.parametrize("beta", [3.0, 2.0, 1.0, 0.5, 0.0, -1.0])
def test_intervals_broadcast_and_keep_missing(beta):
    mean = np.array([[0.5, np.nan, 3.0], [2.0, 0.0, 1e4]])
    for phi in (1.0, 0.3):
        lower, upper = observation_interval(mean, np.array([0.1, 0.2, 0.0]), phi, beta)
        assert lower.shape == upper.shape == mean.shape
        assert np.isnan(lower[0, 1])
        assert np.isnan(upper[0, 1])
        seen = ~np.isnan(mean)
        assert np.all(lower[seen] <= upper[seen])
        # for beta > 2 the variance has no bound towards a mean of 0
        assert np.all(np.isfinite(upper[seen & ((mean > 0) | (beta <= 2.0))]))
        if beta < 2.0:
            assert lower[1, 1] == upper[1, 1] == 0.0
            assert np.all(lower[seen] >= 0.0)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, 90.0, np.nan])
def test_bad_level(level):
    with pytest.raises(OptionError, match="level"):
        observation_interval(1.0, 0.1, 1.0, 1.0, level)


def test_bad_moments_and_law():
    with pytest.raises(OptionError, match="negative"):
        observation_interval(-1.0, 0.1, 1.0, 1.0)
    with pytest.raises(OptionError, match="negative"):
        observation_interval(1.0, -0.1, 1.0, 2.0)
    with pytest.raises(ModelError, match="beta"):
        observation_interval(1.0, 0.1, 1.0, 1.5)
    assert np.all(np.isfinite(observation_interval(-1.0, 0.1, 1.0, 2.0)))
