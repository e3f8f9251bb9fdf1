"""Thermodynamic integration as users meet it; what it computes is in tests/statistical."""

from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import DataError, ModelError, OptionError, SamplingWarning
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
from daskfactor.executors import SerialExecutor
from daskfactor.inference.point import chosen_dispersion
from tests.refusals import refused

X = np.array([[2.0, 1, 0, 4], [0, 3, 1, 1], [5, 0, 2, 0]])
SHORT = dfac.ThermodynamicIntegration(temperatures=4, draws=200, tune=20)
MODEL = dfac.TweedieNMF(2)


def evidence(V=X, model=MODEL, method=SHORT, **options):
    settings = {"random_seed": 1, "progressbar": False, "executor": "serial"} | options
    return dfac.log_evidence(V, model, method, **settings)


def test_same_seed_same_bits_on_every_executor_and_grid():
    serial, lanes = evidence(), evidence(executor="lanes", blocks=2)
    assert (serial.value, serial.standard_error) == (lanes.value, lanes.standard_error)
    assert evidence(random_seed=2).value != serial.value


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("unstored", ["zero", "missing"])
def test_entries_that_are_not_stored_are_zero_or_missing(beta, unstored):
    model = dfac.TweedieNMF(2, beta=beta, dispersion=1.0)
    stored = evidence(sparse.csr_array(X), model, unstored=unstored).value
    seen = X if unstored == "zero" else np.where(X == 0, np.nan, X)
    assert stored == pytest.approx(evidence(seen, model).value, abs=1e-9)
    assert (abs(stored - evidence(X, model).value) > 1) == (unstored == "missing")


@pytest.mark.quick("underflow", "frozen", "0.5")
@pytest.mark.parametrize(
    ("V", "model", "draws"),
    [
        (X, dfac.TweedieNMF(1, shape_w=0.01, shape_h=0.01), 200),  # priors that underflow
        (X, dfac.TweedieNMF(2, fixed_w=np.array([[1.0], [2.0], [0.5]])), 200),
        *((X + 1, dfac.TweedieNMF(1, beta=own, dispersion=0.5), 800) for own in (2.0, 0.5, 0.0)),
    ],
    ids=["underflow", "frozen", "2", "0.5", "0"],
)
def test_frozen_components_and_all_laws(V, model, draws):
    method = dfac.ThermodynamicIntegration(temperatures=4, draws=draws)
    assert np.isfinite(evidence(V, model, method).value)


def test_trace_tells_how_it_was_made():
    found = evidence()
    trace = found.trace
    assert trace.sizes == {"temperature": 5}
    assert float(trace["acceptance"][-1]) > 0.5
    assert list(trace["draws"].values) == [20, 20, 25, 84, 200]
    total = (trace["weight"] * trace["mean"] + trace["variance_weight"] * trace["variance"]).sum()
    assert float(total) == pytest.approx(found.value)
    errors = np.sqrt(float((trace["contribution_error"] ** 2).sum()))
    assert (errors, trace.attrs["dispersion"]) == (pytest.approx(found.standard_error), 1.0)
    assert trace.attrs["rate_w"] == pytest.approx(np.sqrt(2 / X.mean()))
    assert "nats" in str(found)


@pytest.mark.quick("sampler0", "sampler3")
@pytest.mark.parametrize("sampler", [dfac.PSGLD(), dfac.PSGRRLD(), dfac.BlockHMC(), dfac.SGHMC()])
def test_samplers_of_the_package_walk_the_ladder(sampler):
    ladder = {"temperatures": 4, "draws": 200, "tune": 40, "every": 4}
    method = dfac.ThermodynamicIntegration(**ladder, sampler=sampler)
    exact = sampler == dfac.BlockHMC()
    with nullcontext() if exact else pytest.warns(SamplingWarning, match="bias of"):
        found, other = (evidence(method=method, executor=own) for own in ("serial", "lanes"))
    assert found.trace.attrs["sampler"] == sampler.name
    assert abs(found.value - evidence().value) < 3
    assert other.value == found.value


def test_large_problems_are_left_to_the_sampler_that_judges_others():
    choice = dfac.ThermodynamicIntegration().choice
    with dfac.as_blocks(X) as data:
        assert choice(data, MODEL) is None
        assert choice(data, dfac.TweedieNMF(10**6)) == dfac.BlockHMC()


def test_dispersion_is_one_for_counts_and_estimated_else():
    rng = np.random.default_rng(0)
    V = np.outer(rng.gamma(5, 1, 30), rng.gamma(5, 1, 20)) + rng.normal(0, 0.5, (30, 20))
    for values, beta, expected in ((V, 2.0, 0.25), (X * 100, 1.0, 1.0)):
        with dfac.as_blocks(values) as data:
            found = chosen_dispersion(data, dfac.TweedieNMF(1, beta=beta), 0, SerialExecutor())
        assert found == pytest.approx(expected, rel=0.2 * (beta == 2.0))


def test_chains_that_have_not_moved_claim_a_large_error():
    """They vary by nothing where the slope of their means says that they should."""
    short = dfac.ThermodynamicIntegration(temperatures=2, draws=10, tune=0)
    with pytest.warns(SamplingWarning, match="effective sample size"):
        evidence(method=short)
    stuck = dfac.ThermodynamicIntegration(8, draws=50, tune=0, sampler=dfac.BlockHMC(step=1e-6))
    with pytest.warns(SamplingWarning, match="sees a small part"):
        found = evidence(method=stuck)
    right = evidence(method=dfac.ThermodynamicIntegration(draws=2000))
    assert found.standard_error > 0.3
    assert abs(found.value - right.value) < 2.5 * found.total_error
    assert right.standard_error < 0.1


@pytest.mark.parametrize("given", ["vector", "matrix"])
def test_no_tuning_is_no_tuning(given):
    """And None is the usual number, which is another."""
    model, V, usual = MODEL, X, 200
    if given == "vector":
        model, usual = dfac.GaussianAdditive(2, scale=2.0), 1000
        V = model.generate(np.random.default_rng(0), 50)
    methods = (dfac.ThermodynamicIntegration(4, draws=2000, tune=own) for own in (None, 0, usual))
    unsaid, none, said = (evidence(V, model, method).value for method in methods)
    assert unsaid == said != none


FINITE = [dfac.PSGLD(), dfac.PSGRRLD(), dfac.SGHMC()]


def by(**options):
    return {"method": dfac.ThermodynamicIntegration(**options)}


def test_what_has_no_evidence_is_refused():
    for error, message, options in (
        (OptionError, "GaussianAdditive", {"model": dfac.GaussianMF(2)}),
        (ModelError, "no density", {"model": dfac.TweedieNMF(2, beta=3.0)}),
        (OptionError, "method must be", {"method": "ti"}),
        (DataError, "allows no negative data", {"V": -X}),
        (ModelError, "fixed_w", {"model": dfac.TweedieNMF(2, fixed_w=np.ones((5, 1)))}),
    ):
        refused(error, message, evidence, **options)


def test_samplers_and_options_of_the_ladder_are_checked():
    refused(ModelError, "does not sample powers", evidence, **by(sampler=dfac.Gibbs()))
    positive = {"V": X + 1, "model": dfac.TweedieNMF(2, beta=0.0)}
    for sampler in FINITE:
        refused(ModelError, "steps of a finite size", evidence, **positive, **by(sampler=sampler))
    for options, message in (
        ({"temperatures": 1}, "temperatures must be a whole number of at least 2"),
        ({"power": 1.5}, r"power must be 1 .* or at least 2"),
        ({"draws": 3}, "draws must be"),
        ({"rule": "simpson"}, 'rule must be "'),
        ({"sampler": "psgld"}, "sampler must be None"),
    ):
        refused(OptionError, message, by, **options)


NO_DRAWS = np.zeros(1)
"""Too few draws from the prior to say anything."""


def regular(t, scale):
    """E_t and Var_t of d/2 Gaussian directions: -½ Σ 1/(t + scale), as log p(V|θ) has them."""
    return -0.5 / (t + scale), 0.5 / (t + scale) ** 2


def test_a_constant_moves_the_value_alone():
    """So the unit of the data is none of the rule's business."""
    (means, variances), rule = regular(ladder(10, 5), 0.01), (10, 5, "euler-maclaurin")
    both = (means, means - 1e6)
    one, other = (integral(weights(*rule), own, variances) for own in both)
    assert other + 1e6 == pytest.approx(one, abs=1e-8)
    one, other = (discretization_error(*rule, own, variances, own[:1]) for own in both)
    assert one == pytest.approx(other, abs=1e-8)


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
    rng, ratios = np.random.default_rng(power), []
    problems = [(np.full(12, 10.0), np.logspace(-5, 0, 12), np.zeros(12))]
    for many in (rng.integers(1, 6) for _ in range(200)):
        scales = 10 ** rng.uniform(rng.uniform(-6, 0), 0, many)
        problems.append((rng.exponential(20, many), scales, rng.exponential(5, many)))
    for count in (6, 7, 8, 10, 16):
        t, own = ladder(count, power), weights(count, power, rule)
        for sizes, scales, far in problems:
            exact = -0.5 * float(sizes @ (np.log1p(1 / scales) + far / (1 + scales)))
            moments = mixture(t, sizes, scales, far)
            error = discretization_error(count, power, rule, *moments, NO_DRAWS)
            ratios.append(abs(integral(own, *moments) - exact) / error)
    assert max(ratios) < 3
    assert np.quantile(ratios, 0.95) < 1.5


def test_a_first_interval_that_holds_the_whole_change_is_seen():
    """The prior is left behind at 10⁻⁶, the first temperature is 8 10⁻⁴: 22 nats are missed."""
    moments, rule = regular(ladder(6, 4), 1e-6), (6, 4, "euler-maclaurin")
    miss = integral(weights(*rule), *moments) + 0.5 * np.log1p(1e6)
    reported = discretization_error(*rule, *moments, NO_DRAWS)
    assert reported == pytest.approx(abs(miss), rel=0.1)


def test_priors_without_a_mean_log_likelihood_are_survived():
    (means, variances), rule = regular(ladder(10, 5), 0.01), (10, 5, "euler-maclaurin")
    means[0], variances[0] = -np.inf, np.inf
    assert np.isfinite(integral(weights(*rule), means, variances))
    draws = np.append(-np.inf, np.zeros(9))
    for prior in (draws, np.append(draws, -1e3)):
        assert np.isfinite(discretization_error(*rule, means, variances, prior))


def autoregressive(rng, rho, size):
    noise, series = rng.standard_normal(size), np.empty(size)
    series[0] = noise[0] / np.sqrt(1 - rho**2)
    for i in range(1, size):
        series[i] = rho * series[i - 1] + noise[i]
    return series


def test_correlation_time_of_an_autoregression():
    rng = np.random.default_rng(0)
    assert correlation_time(autoregressive(rng, 0.8, 20000)) == pytest.approx(9, rel=0.2)
    assert correlation_time(rng.standard_normal(20000)) == pytest.approx(1, rel=0.1)
    assert correlation_time(np.ones(10)) == 1


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
    found = summarize(FitSeries((fine, coarse)), 1.0, 0.0)
    assert found["mean"] == pytest.approx(0 + common.mean())
    assert found["contribution_error"] == pytest.approx(1 / np.sqrt(2000), rel=0.2)
    alone = summarize(FitSeries((fine,)), 0.5, -0.1)
    assert alone["variance"] == pytest.approx(1, rel=0.1)
    assert alone["contribution_error"] < 0.5 * alone["mean_error"] + 0.1 * alone["variance_error"]
