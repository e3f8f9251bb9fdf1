"""Ladder, weights, and errors of series: everything but chains."""

import numpy as np
import pandas as pd
import pytest

from daskfactor.evidence.thermodynamic import (
    FitSeries,
    correlation_time,
    discretization_error,
    first_integral,
    integral,
    ladder,
    standard_error,
    summarize,
    unseen,
    weights,
)

NO_DRAWS = np.zeros(1)
"""Too few draws from the prior to say anything."""


def regular(t, scale):
    """E_t and Var_t of d/2 Gaussian directions: -½ Σ 1/(t + scale), as log p(V|θ) has them."""
    return -0.5 / (t + scale), 0.5 / (t + scale) ** 2


@pytest.mark.parametrize("rule", ["euler-maclaurin", "variance", "trapezoid"])
def test_a_constant_is_integrated_and_the_ends_are_there(rule):
    t = ladder(10, 5)
    assert t[0] == 0
    assert t[-1] == 1
    own = weights(10, 5, rule)
    assert integral(own, np.ones(11), np.zeros(11)) == pytest.approx(1, abs=2e-3)


def test_variance_rule_is_exact_for_cubics():
    t = ladder(7, 3)
    assert integral(weights(7, 3, "variance"), t**3, 3 * t**2) == pytest.approx(0.25)
    t = ladder(7, 1)
    assert integral(weights(7, 1, "euler-maclaurin"), t**3, 3 * t**2) == pytest.approx(0.25)


def test_a_constant_moves_the_value_alone():
    """So the unit of the data is none of the rule's business."""
    means, variances = regular(ladder(10, 5), 0.01)
    own = weights(10, 5, "euler-maclaurin")
    shifted = integral(own, means - 1e6, variances)
    assert shifted + 1e6 == pytest.approx(integral(own, means, variances), abs=1e-8)
    errors = [
        discretization_error(10, 5, "euler-maclaurin", moved, variances, moved[:1])
        for moved in (means, means - 1e6)
    ]
    assert errors[0] == pytest.approx(errors[1], abs=1e-8)


@pytest.mark.parametrize("power", [1, 2, 3, 5])
def test_the_rules_orders_and_their_errors_cover(power):
    exact = -0.5 * np.log((1 + 0.1) / 0.1)
    for rule, ratio in (("euler-maclaurin", 12), ("variance", 12), ("trapezoid", 3.5)):
        misses = []
        for count in (20, 40):
            moments = regular(ladder(count, power), 0.1)
            misses.append(abs(integral(weights(count, power, rule), *moments) - exact))
            reported = discretization_error(count, power, rule, *moments, NO_DRAWS)
            assert misses[-1] <= 1.5 * reported + 1e-9, (rule, count)
        assert misses[0] >= ratio * misses[1] or misses[1] < 1e-7, rule


def test_a_first_interval_is_that_of_draws_from_the_prior():
    """Squares of normals are gamma draws: log E exp(-t s x² / 2) = -½ log(1 + s t)."""
    draws = -0.5 * 40 * np.random.default_rng(0).standard_normal(100000) ** 2
    found = first_integral(0.05, np.array([-1e9, -5.0]), np.array([np.inf, 3.0]), draws)
    assert found == pytest.approx(-0.5 * np.log(3), abs=0.01)


def mixture(t, sizes, scales, far):
    """Means and variances of Gaussian directions, of which some lie far from their prior."""
    t = t[:, None]
    means = -0.5 * sizes * (1 / (t + scales) + far * scales / (t + scales) ** 2)
    variances = 0.5 * sizes * (1 / (t + scales) ** 2 + 2 * far * scales / (t + scales) ** 3)
    return means.sum(axis=1), variances.sum(axis=1)


@pytest.mark.parametrize("rule", ["euler-maclaurin", "variance", "trapezoid"])
@pytest.mark.parametrize("power", [4, 5])
def test_differences_of_both_signs_do_not_hide_an_error(power, rule):
    """Twelve scales at T = 10, c = 5 are missed by 1.3 nats, where signed sums differ by 0.2."""
    rng = np.random.default_rng(power)
    problems = [(np.full(12, 10.0), np.logspace(-5, 0, 12), np.zeros(12))]
    for _ in range(200):
        many = rng.integers(1, 6)
        scales = 10 ** rng.uniform(rng.uniform(-6, 0), 0, many)
        problems.append((rng.exponential(20, many), scales, rng.exponential(5, many)))
    ratios = []
    for count in (6, 7, 8, 10, 16):
        t, own = ladder(count, power), weights(count, power, rule)
        for sizes, scales, far in problems:
            exact = -0.5 * float(sizes @ (np.log1p(1 / scales) + far / (1 + scales)))
            means, variances = mixture(t, sizes, scales, far)
            miss = integral(own, means, variances) - exact
            error = discretization_error(count, power, rule, means, variances, NO_DRAWS)
            ratios.append(abs(miss) / error)
    assert max(ratios) < 3
    assert np.quantile(ratios, 0.95) < 1.5


def test_a_first_interval_that_holds_the_whole_change_is_seen():
    """The prior is left behind at 10⁻⁶, the first temperature is 8 10⁻⁴: 22 nats are missed."""
    means, variances = regular(ladder(6, 4), 1e-6)
    exact = -0.5 * np.log1p(1e6)
    miss = integral(weights(6, 4, "euler-maclaurin"), means, variances) - exact
    reported = discretization_error(6, 4, "euler-maclaurin", means, variances, NO_DRAWS)
    assert reported == pytest.approx(abs(miss), rel=0.1)


def test_priors_without_a_mean_log_likelihood_are_survived():
    means, variances = regular(ladder(10, 5), 0.01)
    means[0], variances[0] = -np.inf, np.inf
    assert np.isfinite(integral(weights(10, 5, "euler-maclaurin"), means, variances))
    draws = np.append(-np.inf, np.zeros(9))
    for prior in (draws, np.append(draws, -1e3)):
        error = discretization_error(10, 5, "euler-maclaurin", means, variances, prior)
        assert np.isfinite(error)


def autoregressive(rng, rho, size):
    noise = rng.standard_normal(size)
    series = np.empty(size)
    series[0] = noise[0] / np.sqrt(1 - rho**2)
    for i in range(1, size):
        series[i] = rho * series[i - 1] + noise[i]
    return series


def test_correlation_time_of_an_autoregression():
    rng = np.random.default_rng(0)
    assert correlation_time(autoregressive(rng, 0.8, 20000)) == pytest.approx(9, rel=0.2)
    assert correlation_time(rng.standard_normal(20000)) == pytest.approx(1, rel=0.1)
    assert correlation_time(np.ones(10)) == 1


def test_standard_error_covers():
    rng = np.random.default_rng(1)
    runs = [autoregressive(rng, 0.7, 400) for _ in range(200)]
    z = np.array([run.mean() / standard_error(run) for run in runs])
    assert 0.8 < z.std() < 1.3


@pytest.mark.parametrize("effective", [2, 4, 8])
def test_standard_errors_of_slow_chains_cover(effective):
    """Of four draws' worth in 200, 2 errors of Geyer's sequence alone cover 75 % only."""
    rng, rho = np.random.default_rng(effective), (200 / effective - 1) / (200 / effective + 1)
    runs = [autoregressive(rng, rho, 200) for _ in range(300)]
    z = np.array([abs(run.mean()) / standard_error(run) for run in runs])
    assert (z < 2).mean() > 0.8
    assert 0.57 < (z < 1).mean() < 0.8


def series_table(means, variances, seen):
    """What chains of 200 independent draws that see a share of the variance would tell."""
    noise = {"mean_error": np.sqrt(variances / 200), "variance_error": 0.1 * variances}
    errors = {name: np.sqrt(seen) * own for name, own in noise.items()}
    return pd.DataFrame({"mean": means, "variance": seen * variances} | errors)


def test_a_variance_that_the_slope_asks_for_and_no_draw_has_is_one_of_the_mean():
    t = ladder(10, 5)
    for far in (0.0, 30.0):
        means, variances = mixture(t, np.ones(1), np.array([0.001]), np.array([far]))
        assert (unseen(t, series_table(means, variances, 1.0))[3:] == 0).all()
    means, variances = regular(t, 0.001)
    missing = unseen(t, series_table(means, variances, 1e-3))[3:] / variances[3:]
    assert ((missing > 0.3) & (missing <= 1)).all()
    still = np.zeros(11)
    assert (unseen(t, series_table(still, still, 1.0)) == 0).all()


def test_a_pair_is_extrapolated_draw_by_draw():
    rng = np.random.default_rng(2)
    common = rng.standard_normal(2000)
    fine, coarse = common + 1, common.reshape(-1, 2).mean(axis=1) + 2
    found = summarize(FitSeries(fine, coarse), 1.0, 0.0)
    assert found["mean"] == pytest.approx(0 + common.mean())
    assert found["contribution_error"] == pytest.approx(1 / np.sqrt(2000), rel=0.2)
    alone = summarize(FitSeries(fine), 0.5, -0.1)
    assert alone["variance"] == pytest.approx(1, rel=0.1)
    assert alone["contribution_error"] < 0.5 * alone["mean_error"] + 0.1 * alone["variance_error"]
