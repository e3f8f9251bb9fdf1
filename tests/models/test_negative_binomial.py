"""The negative binomial law against SciPy's, by number, entry and interval."""

import numpy as np
import pytest
from scipy import stats

from daskfactor.errors import ModelError
from daskfactor.kernels import polynomials
from daskfactor.kernels.dense import evaluation
from daskfactor.kernels.jit import jit_exact
from daskfactor.models.likelihood import Entry
from daskfactor.models.negative_binomial import NegativeBinomial
from daskfactor.models.tweedie_law import POISSON
from tests.refusals import refused

COUNTS = np.array([0, 0, 1, 3, 3, 50, 50, 10_000, 2])
MEANS = np.array([0.01, 5, 0.2, 3.3, 40, 49, 1e-4, 1e3, 1e-6])
ALPHAS = pytest.mark.parametrize("alpha", [1e-3, 0.03, 0.5, 1.0, 20.0])


def scipy_law(mu, alpha):
    return stats.nbinom(1 / alpha, 1 / (1 + alpha * mu))


@ALPHAS
def test_density_and_moments_are_scipys(alpha):
    law = NegativeBinomial(alpha)
    exact = scipy_law(MEANS, alpha)
    got = law.log_density(COUNTS, MEANS, alpha)
    np.testing.assert_allclose(got, exact.logpmf(COUNTS), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(law.variance(MEANS, alpha), exact.var())
    other = NegativeBinomial(7.0)  # what a method is told counts, not the law's own number
    np.testing.assert_allclose(other.log_density(COUNTS, MEANS, alpha), got)
    outside = law.log_density([-1.0, np.nan], 2.0, alpha)
    assert outside[0] == -np.inf
    assert np.isnan(outside[1])
    refused(ModelError, "dispersion must be positive", law.variance, 1.0, 0.0)


def test_the_limit_is_poissons():
    law = NegativeBinomial(1e-8)
    wanted = POISSON.log_density(COUNTS[:-2], MEANS[:-2], 1.0)
    np.testing.assert_allclose(law.log_density(COUNTS[:-2], MEANS[:-2], 1e-8), wanted, rtol=1e-5)


@ALPHAS
@pytest.mark.parametrize("compiled", [False, True])
def test_the_scalar_functions_of_an_entry_are_those_of_the_law(alpha, compiled):
    law = NegativeBinomial(alpha)
    entry = law.entry(polynomials)
    if compiled:
        entry = Entry(*(each and jit_exact(each) for each in entry))
    for v, mu in zip(COUNTS.astype(float), np.maximum(MEANS, 0.1), strict=True):
        w, step = entry.weight(v, mu, alpha), 1e-4 * mu
        slope = (law.deviance(v, mu - step) - law.deviance(v, mu + step)) / (2 * step)
        assert (v - mu) * w == pytest.approx(slope, rel=1e-5, abs=1e-9)
        above, below = entry.ratio(v, mu, w, alpha), entry.curvature(1.0, v, mu, w, alpha)
        assert above == pytest.approx(v / mu)
        assert below == pytest.approx((v + 1 / alpha) / (mu + 1 / alpha))
        assert above - below == pytest.approx((v - mu) * w, abs=1e-12)
        assert entry.curvature(0.3, v, mu, w, alpha) == pytest.approx(0.3 * below)
        assert entry.deviance(v, mu, alpha) == pytest.approx(float(law.deviance(v, mu)), rel=1e-9)
        assert 1 / w == pytest.approx(float(law.variance(mu, alpha)))


@pytest.mark.parametrize(("real", "tolerance"), [(np.float32, 3e-6), (np.float64, 1e-12)])
@pytest.mark.parametrize("alpha", [1e-8, 1e-3, 0.4, 30.0])
@pytest.mark.parametrize("distance", [1e-3, 0.02, 0.3, 0.5, 30.0])
def test_deviance_has_no_cancellation(real, tolerance, alpha, distance):
    deviance = NegativeBinomial().entry(polynomials).deviance
    for mu in map(real, (0.37, 1.0, 250.0)):
        v = real(mu * (1 + distance))
        x, m, a = (np.longdouble(number) for number in (v, mu, alpha))
        growth = np.log1p(a * (x - m) / (1 + a * m))
        exact = x * np.log(x / m) - (x + 1 / a) * growth
        slack = 1e3 * np.finfo(np.longdouble).eps * float(x + 1)
        assert abs(deviance(v, mu, alpha) - exact) <= max(tolerance * exact * (1 + a * m), slack)


def test_laws_that_differ_in_their_numbers_share_kernels():
    first, second = NegativeBinomial(0.3), NegativeBinomial(0.8)
    assert first.numbers == (0.3,)
    assert evaluation(first) is evaluation(second)
    law, phi = first.at(0.5)
    assert (law.numbers, phi) == ((0.5,), 1.0)
    assert POISSON.at(2.0) == (POISSON, 2.0)
    assert evaluation(first) is not evaluation(POISSON)


@pytest.mark.parametrize("alpha", [0.05, 0.7])
@pytest.mark.parametrize(("mean", "share"), [(0.3, 0.0), (4.0, 0.4), (80.0, 0.2)])
def test_intervals_cover_new_counts_and_variances_are_exact(alpha, mean, share):
    """Randomised at the ends, so that the level is met and not only reached."""
    law, count, rng = NegativeBinomial(), 40_000, np.random.default_rng(int(100 * (alpha + mean)))
    spread = (share * mean) ** 2
    means = rng.gamma(1 / share**2, mean * share**2, count) if share else np.full(count, mean)
    drawn = law.sample(rng, means, alpha)
    error = 5 * np.sqrt(np.mean((drawn - mean) ** 4) / count)
    total = float(law.observation_variance(mean, spread, alpha))
    assert drawn.var() == pytest.approx(total, abs=error)
    assert total == pytest.approx(mean + alpha * (mean**2 + spread) + spread)
    lower, upper = law.interval(mean, spread, alpha, 0.9)
    inside = np.mean((drawn >= lower) & (drawn <= upper))
    assert inside > 0.9 - 5 * np.sqrt(0.09 / count) - (0.01 if share else 0)
    if not share:
        assert (lower, upper) == tuple(scipy_law(mean, alpha).ppf([0.05, 0.95]))
