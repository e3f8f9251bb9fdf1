"""Thermodynamic integration as users meet it; what it computes is in tests/statistical."""

from contextlib import nullcontext

import numpy as np
import pytest
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import DataError, ModelError, OptionError, SamplingWarning
from daskfactor.inference.point import chosen_dispersion
from tests.refusals import refused

X = np.array([[2.0, 1, 0, 4], [0, 3, 1, 1], [5, 0, 2, 0]])
SHORT = dfac.ThermodynamicIntegration(temperatures=4, draws=200, tune=20)
MODEL = dfac.TweedieNMF(2)


def evidence(V=X, model=MODEL, method=SHORT, **options):
    settings = {"random_seed": 1, "progressbar": False, "executor": "serial"} | options
    return dfac.log_evidence(V, model, method, **settings)


def test_same_seed_same_bits_on_every_executor_and_grid():
    serial = evidence()
    lanes = evidence(executor="lanes", blocks=2)
    assert serial.value == lanes.value
    assert serial.standard_error == lanes.standard_error
    assert evidence(random_seed=2).value != serial.value
    stored = evidence(sparse.csr_array(X), unstored="zero")
    assert stored.value == pytest.approx(serial.value, abs=1e-9)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_zeros_that_are_not_stored_are_observed(beta):
    model = dfac.TweedieNMF(2, beta=beta, dispersion=1.0)
    stored = evidence(sparse.csr_array(X), model, unstored="zero")
    assert stored.value == pytest.approx(evidence(X, model).value, abs=1e-9)


def test_priors_that_underflow_are_survived():
    model = dfac.TweedieNMF(1, shape_w=0.01, shape_h=0.01)
    assert np.isfinite(evidence(model=model).value)


def test_unstored_missing_is_not_zero():
    seen = np.where(X == 0, np.nan, X)
    as_missing = evidence(sparse.csr_array(X), unstored="missing")
    assert as_missing.value == pytest.approx(evidence(seen).value, abs=1e-9)
    assert abs(as_missing.value - evidence().value) > 1


def test_trace_tells_how_it_was_made():
    found = evidence()
    trace = found.trace
    assert trace.sizes == {"temperature": 5}
    assert float(trace["acceptance"][-1]) > 0.5
    assert list(trace["draws"].values) == [20, 20, 25, 84, 200]
    total = (trace["weight"] * trace["mean"] + trace["variance_weight"] * trace["variance"]).sum()
    assert float(total) == pytest.approx(found.value)
    errors = np.sqrt(float((trace["contribution_error"] ** 2).sum()))
    assert errors == pytest.approx(found.standard_error)
    assert trace.attrs["dispersion"] == 1.0
    assert trace.attrs["rate_w"] == pytest.approx(np.sqrt(2 / X.mean()))
    assert "nats" in str(found)


@pytest.mark.parametrize("sampler", [dfac.PSGLD(), dfac.PSGRRLD(), dfac.BlockHMC(), dfac.SGHMC()])
def test_samplers_of_the_package_walk_the_ladder(sampler):
    method = dfac.ThermodynamicIntegration(
        temperatures=4, draws=200, tune=40, every=4, sampler=sampler
    )
    exact = sampler == dfac.BlockHMC()
    with nullcontext() if exact else pytest.warns(SamplingWarning, match="bias of"):
        found = evidence(method=method)
        other = evidence(method=method, executor="lanes")
    assert found.trace.attrs["sampler"] == sampler.name
    assert abs(found.value - evidence().value) < 3
    assert other.value == found.value


def test_frozen_components_and_all_laws():
    fixed = dfac.TweedieNMF(2, fixed_w=np.array([[1.0], [2.0], [0.5]]))
    assert np.isfinite(evidence(model=fixed).value)
    for beta in (2.0, 0.5, 0.0):
        model = dfac.TweedieNMF(1, beta=beta, dispersion=0.5)
        method = dfac.ThermodynamicIntegration(temperatures=4, draws=800)
        assert np.isfinite(evidence(X + 1, model, method).value)


def test_large_problems_are_left_to_the_sampler_that_judges_others():
    method = dfac.ThermodynamicIntegration()
    with dfac.as_blocks(X) as data:
        assert method.choice(data, MODEL) == "exact"
        assert method.choice(data, dfac.TweedieNMF(10**6)) == dfac.BlockHMC()


def test_dispersion_is_one_for_counts_and_estimated_else():
    from daskfactor.executors import SerialExecutor

    rng = np.random.default_rng(0)
    V = np.outer(rng.gamma(5, 1, 30), rng.gamma(5, 1, 20)) + rng.normal(0, 0.5, (30, 20))
    model = dfac.TweedieNMF(1, beta=2.0)
    with dfac.as_blocks(V) as data:
        assert chosen_dispersion(data, model, 0, SerialExecutor()) == pytest.approx(0.25, rel=0.2)
    with dfac.as_blocks(X * 100) as data:
        assert chosen_dispersion(data, dfac.TweedieNMF(1), 0, SerialExecutor()) == 1.0


def test_a_chain_that_hardly_moves_is_told_of():
    short = dfac.ThermodynamicIntegration(temperatures=2, draws=10, tune=0)
    with pytest.warns(SamplingWarning, match="effective sample size"):
        evidence(method=short)


def test_chains_that_have_not_moved_claim_a_large_error():
    """They vary by nothing where the slope of their means says that they should."""
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
    unsaid, none, said = (
        evidence(V, model, dfac.ThermodynamicIntegration(4, draws=2000, tune=tune)).value
        for tune in (None, 0, usual)
    )
    assert unsaid == said
    assert none != said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperatures": 1}, "temperatures must be a whole number of at least 2"),
        ({"power": 1.5}, r"power must be 1 .* or at least 2"),
        ({"draws": 3}, "draws must be"),
        ({"rule": "simpson"}, 'rule must be "'),
        ({"sampler": "psgld"}, "sampler must be None"),
    ],
)
def test_bad_options_are_named(options, message):
    refused(OptionError, message, dfac.ThermodynamicIntegration, **options)


def test_what_has_no_evidence_is_refused():
    refused(OptionError, "GaussianAdditive", evidence, model=dfac.GaussianMF(2))
    refused(ModelError, "no density", evidence, model=dfac.TweedieNMF(2, beta=3.0))
    for sampler in (dfac.Gibbs(), dfac.HMC()):
        with pytest.raises(ModelError, match="does not sample powers"):
            evidence(method=dfac.ThermodynamicIntegration(sampler=sampler))
    for sampler in (dfac.PSGLD(), dfac.PSGRRLD(), dfac.SGHMC()):
        with pytest.raises(ModelError, match="steps of a finite size"):
            evidence(
                X + 1, dfac.TweedieNMF(2, beta=0.0), dfac.ThermodynamicIntegration(sampler=sampler)
            )
    refused(OptionError, "method must be", evidence, method="ti")
    refused(DataError, "allows no negative data", evidence, V=-X)
    refused(ModelError, "fixed_w", evidence, model=dfac.TweedieNMF(2, fixed_w=np.ones((5, 1))))
