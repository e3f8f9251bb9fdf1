"""Divergences, densities, draws, intervals: against SciPy, quadrature and simulation."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from daskfactor.errors import ModelError, OptionError
from daskfactor.kernels import polynomials
from daskfactor.models import tweedie_law
from daskfactor.models.tweedie_law import Tweedie
from tests.models.laws import (
    compound_density,
    divergence,
    log_density,
    log_normalizer,
    observation_interval,
    sample,
)
from tests.refusals import refused

BETAS = [2.0, 3.5, 1.0, 0.8, 0.5, 0.2, 0.0, -1.0, -2.5]
KNOWN = [beta for beta in BETAS if Tweedie(beta).has_density]


def decimal_divergence(v, mu, beta):
    """The definition in 150 digits, so that its cancellation does not matter."""
    with localcontext() as context:
        context.prec = 150
        x, m, b = Decimal(v), Decimal(mu), Decimal(beta)
        if beta == 1.0:
            return float(x * (x / m).ln() - x + m)
        if beta == 0.0:
            return float(x / m - (x / m).ln() - 1)
        return float(x**b / (b * (b - 1)) - x * m ** (b - 1) / (b - 1) + m**b / b)


near_limits = st.builds(lambda e, base: base - 10.0**e, st.floats(-14, -1), st.sampled_from([0, 1]))
smooth = [st.floats(*ends) for ends in ((1e-14, 1.0), (-3.0, -1e-14), (2.0, 4.0))]
betas = st.one_of(st.sampled_from(BETAS), near_limits, *smooth)
ratios = st.one_of(st.floats(1e-3, 1e3), st.floats(0.99, 1.01))


@given(v=st.floats(1e-3, 1e3), ratio=ratios, beta=betas)
@settings(max_examples=150, deadline=None)
def test_divergence_is_the_definition_to_rounding(v, ratio, beta):
    mu = v / ratio
    got, wanted = float(divergence(v, mu, beta)), decimal_divergence(v, mu, beta)
    assert got == pytest.approx(wanted, rel=1e-11, abs=1e-80)


def test_divergence_at_zero():
    mu = np.array([0.3, 2.0])
    for beta in (2.0, 1.0, 0.5, 0.2, 3.5):
        np.testing.assert_allclose(divergence(0.0, mu, beta), mu**beta / beta, rtol=1e-14)
    for beta in (0.0, -1.0, -2.5):
        assert np.all(np.isposinf(divergence(0.0, mu, beta)))
    assert divergence(0.0, 0.0, 1.0) == 0.0
    assert divergence(2.0, 0.0, 0.5) == np.inf
    assert divergence(2.0, 0.0, 3.0) == pytest.approx(8.0 / 6.0)


@pytest.mark.parametrize("beta", BETAS)
def test_divergence_keeps_missing_and_refuses_negative(beta):
    got = divergence([np.nan, 1.0, -1.0], [1.0, 1.0, 1.0], beta)
    assert np.isnan(got[0])
    assert got[1] == 0.0
    assert got[2] == 2.0 if beta == 2.0 else np.isnan(got[2])
    assert np.isnan(divergence(np.nan, 0.0, beta))


@pytest.mark.parametrize("beta", [*BETAS, 1 - 1e-5, 1 - 1e-11, -1e-5, -1e-11])
def test_the_scalar_functions_of_an_entry_are_those_of_the_law(beta):
    law = Tweedie(beta)
    weight, curvature, ratio, deviance, fit = law.entry(polynomials)
    step = 1e-6
    for v, mu in np.array([[0.2, 0.5], [1.7, 1.0], [6.0, 4.0], [3.0, 3.1]]):
        w = weight(v, mu)
        slope = (law.deviance(v, mu - step) - law.deviance(v, mu + step)) / (2 * step)
        assert (v - mu) * w == pytest.approx(slope, rel=1e-6)
        assert ratio(v, mu, w) - curvature(1.0, v, mu, w) == pytest.approx((v - mu) * w)
        assert curvature(0.3, v, mu, w) == pytest.approx(0.3 * mu ** (beta - 1))
        assert deviance(v, mu) == pytest.approx(float(law.deviance(v, mu)), rel=1e-12)
        assert 1 / w == pytest.approx(float(law.variance(mu, 1.0)))
        value, above, below = fit(v, mu)
        summed = law.zeros == "constant"
        assert above == pytest.approx(ratio(v, mu, w))
        assert below == pytest.approx(0.0 if summed else curvature(1.0, v, mu, w))
        left_out = law.fit_constant(np.array([v])) - (mu if summed else 0.0)
        if abs(beta - round(beta)) > 1e-9 or beta in BETAS:  # the two cancel nearer the limits
            assert value + left_out == pytest.approx(-float(law.deviance(v, mu)))


def test_beta_without_a_law_and_dispersions_that_are_not_positive_are_refused():
    for bad in (1.5, 1.0001, 1.9999, np.nan, np.inf, "one", None):
        refused(ModelError, "beta", divergence, 1.0, 1.0, bad)
    for phi in (0.0, -1.0, np.nan, np.inf):
        refused(ModelError, "dispersion", log_density, 1.0, 1.0, phi, 1.0)
        refused(ModelError, "dispersion", Tweedie(1.0).variance, 1.0, phi)


# --- densities ------------------------------------------------------------------------------


def test_known_values_of_the_compound_poisson_density():
    assert log_density(1.0, 1.0, 1.0, 0.5) == pytest.approx(-1.02861522034198, abs=1e-13)
    assert log_density(0.0, 2.5, 0.7, 0.5) == pytest.approx(-4.51753951452626, abs=1e-13)


@pytest.mark.parametrize("phi", [0.03, 0.8, 2.0])
def test_densities_are_those_of_scipy(phi):
    v, mu = np.array([0.05, 0.9, 3.0, 12.0])[:, None], np.array([0.4, 2.5])
    counts = np.array([0, 1, 5, 40])[:, None]
    shape = 1.0 / phi
    pairs = [
        (log_density(v - 1, mu, phi, 2), stats.norm.logpdf(v - 1, mu, np.sqrt(phi))),
        (log_density(counts * phi, mu, phi, 1), stats.poisson.logpmf(counts, mu / phi)),
        (log_density(v, mu, phi, 0), stats.gamma.logpdf(v, shape, scale=phi * mu)),
        (log_density(v, mu, phi, -1), stats.invgauss.logpdf(v, mu * phi, scale=1 / phi)),
    ]
    for got, wanted in pairs:
        np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-11)
    n = 1e12  # large counts keep their digits
    assert log_density(n, n, 1.0, 1.0) == pytest.approx(-0.5 * np.log(2 * np.pi * n), abs=1e-12)


@pytest.mark.parametrize("beta", [0.003, 0.1, 0.35, 0.5, 0.65, 0.9, 0.98])
@pytest.mark.parametrize("phi", [0.02, 0.6, 4.0])
def test_compound_poisson_is_the_mixture_it_stands_for(beta, phi):
    for v, mu in [(1e-4, 1.0), (0.3, 0.3), (1.7, 0.6), (9.0, 14.0), (35.0, 20.0)]:
        if v**beta / (phi * beta) > 2000:
            continue
        wanted = compound_density(v, mu, phi, beta)
        assert float(log_density(v, mu, phi, beta)) == pytest.approx(wanted, rel=1e-10, abs=1e-9)


def test_compound_series_meets_its_closed_form_over_thirty_decades():
    v = np.geomspace(1e-12, 1e18, 301)
    for phi in (1e-4, 0.3, 50.0):
        series = log_normalizer(v, phi, np.nextafter(0.5, 0.0))
        np.testing.assert_allclose(series, log_normalizer(v, phi, 0.5), rtol=1e-11, atol=1e-11)


def test_compound_poisson_tends_to_gamma():
    v, mu = np.array([0.1, 1.0, 7.0])[:, None], np.array([0.5, 3.0])
    gamma = log_density(v, mu, 0.4, 0.0)
    for beta in (1e-3, 1e-5, 1e-7):
        assert np.max(np.abs(log_density(v, mu, 0.4, beta) - gamma)) <= 60 * beta


@pytest.mark.parametrize("beta", KNOWN)
@pytest.mark.parametrize(("mu", "phi"), [(0.7, 0.3), (3.0, 1.0), (2.0, 2.4)])
def test_density_has_unit_mass_and_the_right_moments(beta, mu, phi):
    if beta == 1.0:
        support = phi * np.arange(400)
        weights = np.exp(log_density(support, mu, phi, beta))
        moments = [float(np.sum(weights * support**k)) for k in range(3)]
    elif beta == 2.0:
        power = (lambda v, k=k: v**k * np.exp(log_density(v, mu, phi, 2)) for k in range(3))
        moments = [integrate.quad(own, -30, 40)[0] for own in power]
    else:
        # in u = log v, where neither end is steep
        u = np.linspace(-90.0 if beta >= 0 else -8.0, 7.0, 8001)
        f = np.exp(log_density(np.exp(u), mu, phi, beta) + u)
        moments = [float(np.sum(f * np.exp(k * u)) * (u[1] - u[0])) for k in range(3)]
        if 0.0 < beta < 1.0:
            moments[0] += float(np.exp(log_density(0.0, mu, phi, beta)))
    spread = float(Tweedie(beta).variance(mu, phi))
    assert moments[0] == pytest.approx(1.0, abs=1e-8)
    assert moments[1] == pytest.approx(mu, rel=1e-7)
    assert moments[2] - moments[1] ** 2 == pytest.approx(spread, rel=1e-6)


@pytest.mark.parametrize("beta", KNOWN)
def test_normalizer_is_free_of_the_mean(beta):
    v, mu, phi = np.array([0.6, 1.2, 6.0])[:, None], np.array([0.1, 1.0, 9.0]), 0.6
    base = log_density(v, mu, phi, beta) + divergence(v, mu, beta) / phi
    wanted = np.broadcast_to(log_normalizer(v, phi, beta), base.shape)
    np.testing.assert_allclose(base, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("beta", KNOWN)
def test_outside_the_support(beta):
    got = log_density([np.nan, -1.0, 0.0], 1.0, 0.5, beta)
    assert np.isnan(got[0])
    for value, inside in ((got[1], beta == 2.0), (got[2], beta > 0.0)):
        assert np.isfinite(value) if inside else np.isneginf(value)
    base = log_normalizer([np.nan, -1.0, 0.0], 0.5, beta)
    np.testing.assert_array_equal(np.isneginf(base), np.isneginf(got))
    assert np.isnan(base[0])


def test_off_lattice_values_continue_the_lattice():
    v = np.array([1.0, 1.0 + 1e-9, 1.5])
    got = log_density(v, 2.0, 0.5, 1.0)
    assert got[1] == pytest.approx(got[0], abs=1e-8)
    n = 3.0
    wanted = -4.0 + n * np.log(4.0) - special.gammaln(n + 1.0)
    assert got[2] == pytest.approx(wanted)


@pytest.mark.parametrize("beta", [-2.5, -0.5, 2.5])
def test_laws_without_a_density_say_so(beta):
    assert not Tweedie(beta).has_density
    for call in (
        lambda: log_density(1.0, 1.0, 1.0, beta),
        lambda: log_normalizer(1.0, 1.0, beta),
        lambda: sample(np.random.default_rng(0), 1.0, 1.0, beta),
    ):
        refused(ModelError, "neither a closed form nor a series", call)
    assert np.isfinite(divergence(1.0, 2.0, beta))


# --- draws ----------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", KNOWN)
@pytest.mark.parametrize(("mu", "phi"), [(0.6, 0.4), (5.0, 1.5)])
def test_draws_have_the_mean_variance_and_distribution(beta, mu, phi):
    n = 100_000
    draws = sample(np.random.default_rng(7), np.full(n, mu), phi, beta)
    deviations = draws - mu
    spread = float(Tweedie(beta).variance(mu, phi))
    assert abs(deviations.mean()) < 5 * np.sqrt(spread / n)
    square = deviations**2
    assert abs(square.mean() - spread) < 5 * square.std() / np.sqrt(n)
    if beta == 1.0:
        steps = np.round(draws / phi)
        np.testing.assert_allclose(steps * phi, draws)
        return
    # a smooth statistic that sees the shape, integrated under the density
    u = np.linspace(-60.0 if beta >= 0 else -8.0, 7.0, 5001) if beta != 2.0 else None
    grid = np.exp(u) if u is not None else np.linspace(mu - 15, mu + 15, 5001)
    f = np.exp(log_density(grid, mu, phi, beta)) * (grid if u is not None else 1.0)
    step = (u[1] - u[0]) if u is not None else grid[1] - grid[0]
    expected = float(np.sum(f * np.exp(-np.abs(grid)))) * step
    if 0.0 < beta < 1.0:
        expected += float(np.exp(log_density(0.0, mu, phi, beta)))
    got = np.exp(-np.abs(draws))
    assert abs(got.mean() - expected) < 5 * got.std() / np.sqrt(n)


def test_draws_take_any_shape_of_means():
    rng = np.random.default_rng(0)
    for beta in KNOWN:
        for means in (np.ones((2, 3)), 1.0):
            assert sample(rng, means, 0.5, beta).shape == np.shape(means)


# --- predictive intervals: exact special cases, and coverage by simulation ------------------

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


excesses = st.one_of(st.just(0.0), st.floats(1e-12, 1e3))


@given(m=st.floats(1e-4, 1e6), excess=excesses, level=st.floats(0.05, 0.995))
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
    got = tweedie_law._probability_of_zero(np.array([m]), np.array([(cv * m) ** 2]), phi, 1.0)[0]
    shape = 1 / cv**2
    assert got == pytest.approx(stats.nbinom.pmf(0, shape, shape / (shape + m / phi)), rel=1e-12)
    plain = tweedie_law._probability_of_zero(np.array([m]), np.zeros(1), phi, 0.5)[0]
    assert plain == pytest.approx(np.exp(-np.sqrt(m) / (phi * 0.5)))


@pytest.mark.parametrize(("beta", "phi"), [(0.5, 0.6), (1.0, 2.0), (0.0, 0.4)])
def test_matched_law_has_the_mean_and_variance(beta, phi):
    """Both are recovered from the quantiles: E X = int q, E X^2 = int q^2 over the levels."""
    m, spread, n = 1.4, 0.3, 20_000
    levels = 1 - (2 * np.arange(n // 2) + 1) / n
    ends = [observation_interval(m, spread, phi, beta, level) for level in levels[25::50]]
    fine = np.concatenate([[e[0], e[1]] for e in ends]).astype(float)
    total = float(Tweedie(beta).observation_variance(m, spread, phi))
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


def test_bad_levels_moments_and_laws():
    for error, message, *told in (
        *((OptionError, "level", 1.0, 0.1, 1.0, 1.0, x) for x in (0.0, 1.0, -0.1, 90.0, np.nan)),
        (OptionError, "negative", -1.0, 0.1, 1.0, 1.0),
        (OptionError, "negative", 1.0, -0.1, 1.0, 2.0),
        (ModelError, "beta", 1.0, 0.1, 1.0, 1.5),
    ):
        refused(error, message, observation_interval, *told)
    assert np.all(np.isfinite(observation_interval(-1.0, 0.1, 1.0, 2.0)))
