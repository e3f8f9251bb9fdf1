"""Ladder, weights, and errors of series: everything but chains."""

import numpy as np
import pytest

from daskfactor.evidence.thermodynamic import (
    FitSeries,
    correlation_time,
    discretization_error,
    integral,
    ladder,
    standard_error,
    summarize,
    weights,
)


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


@pytest.mark.parametrize("power", [1, 2, 3, 5])
def test_the_rules_orders_and_their_errors_cover(power):
    exact = -0.5 * np.log((1 + 0.1) / 0.1)
    for rule, ratio in (("euler-maclaurin", 12), ("variance", 12), ("trapezoid", 3.5)):
        misses = []
        for count in (20, 40):
            moments = regular(ladder(count, power), 0.1)
            misses.append(abs(integral(weights(count, power, rule), *moments) - exact))
            reported = discretization_error(count, power, rule, *moments)
            assert misses[-1] <= 1.5 * reported + 1e-9, (rule, count)
        assert misses[0] >= ratio * misses[1] or misses[1] < 1e-7, rule


def test_a_ladder_without_a_half_gets_the_rigorous_bound():
    means, variances = regular(ladder(5, 5), 0.01)
    exact = -0.5 * np.log(1.01 / 0.01)
    for rule in ("euler-maclaurin", "trapezoid"):
        value = integral(weights(5, 5, rule), means, variances)
        assert abs(value - exact) <= discretization_error(5, 5, rule, means, variances)


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
