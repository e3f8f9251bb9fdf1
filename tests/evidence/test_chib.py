"""Chib's estimate against exact evidences, and the averages over labellings it rests on."""

from itertools import permutations

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from scipy.special import logsumexp

from daskfactor.data.sources import as_blocks
from daskfactor.errors import DataError, ModelError, OptionError, SamplingWarning
from daskfactor.evidence.base import EvidenceProblem, checked_method
from daskfactor.evidence.chib import (
    Chib,
    average,
    entries,
    permuted_mean,
    sample_permutations,
    table,
)
from daskfactor.evidence.gaussian_additive import GaussianAdditive
from daskfactor.executors import SerialExecutor
from daskfactor.kernels.linalg import log_permanent
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.progress import ignore
from tests.refusals import refused
from tests.statistical.allocations import Priors, posterior
from tests.statistical.exact import CASES, reference_posterior

BY_NAME = {case.name: case for case in CASES}
EXPONENTIAL = Priors()
SMALL = np.array([[2.0, 1.0], [0.0, 3.0]])


def estimate(V, K, priors=EXPONENTIAL, method=None, **options):
    model = TweedieNMF(K, dispersion=1.0, **priors._asdict(), **options.pop("fixed", {}))
    with as_blocks(V, options.pop("blocks", 1), dtype="float32", **options) as data:
        problem = EvidenceProblem(data, model, 3, SerialExecutor(), ignore)
        return (method or Chib(draws=800, tune=200)).estimate(problem)


def check(found, exact, largest_error=0.08):
    assert 0 < found.standard_error < largest_error
    assert abs(found.value - exact) < 5 * found.standard_error, (found, exact)


TINY = np.array([[2.0, 1.0], [0.0, 1.0]])
GAMMA = Priors(1.0, 0.5, 2.0, 0.7)
GAPS = [BY_NAME[name] for name in ("poisson-gaps", "poisson-two-gaps")]


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("V", "K", "exact", "options"),
    [
        (np.array([[4.0, 7.0], [2.0, 5.0]]), 1, lambda: -12.46773, {}),
        (SMALL, 1, lambda: -8.525465119275, {}),
        (SMALL, 2, lambda: -7.504036700896, {}),
        (SMALL, 2, lambda: posterior(SMALL, 2, GAMMA)["log_evidence"], {"priors": GAMMA}),
        (TINY, 3, lambda: posterior(TINY, 3, Priors())["log_evidence"], {"blocks": 2}),
    ],
    ids=["one", "small", "two", "gamma priors", "three"],
)
def test_known_evidences(V, K, exact, options):
    found = estimate(V, K, **options)
    check(found, exact())
    assert found.discretization_error == 0


@pytest.mark.statistical
@pytest.mark.parametrize("case", GAPS, ids=lambda case: case.name)
def test_missing_cells(case):
    found = estimate(case.V, case.K, Priors(case.rate_w, case.rate_h))
    check(found, reference_posterior(case)["log_evidence"], 0.12)


@pytest.mark.statistical
def test_a_chain_that_keeps_its_labelling():
    """Far apart components never change places: the density at one naming is 2! too large."""
    V = np.array([[40.0, 0.0], [0.0, 30.0]])
    exact = posterior(V, 2, EXPONENTIAL)["log_evidence"]
    check(estimate(V, 2), exact, 0.15)
    check(estimate(V, 2, method=Chib(draws=800, tune=200, permutations=1)), exact, 0.15)


@pytest.mark.statistical
def test_frozen_components():
    """One component, H known: rows are gamma-Poisson mixtures with a closed form."""
    h, V = np.array([[0.7, 1.6]]), np.array([[2.0, 5.0], [0.0, 1.0]])
    found = estimate(V, 1, fixed={"fixed_h": h})
    n, total = V.sum(axis=1), h.sum()
    exact = stats.nbinom.logpmf(n, 1.0, 1 / (1 + total)).sum()
    exact += sum(stats.multinomial.logpmf(v, v.sum(), h[0] / total) for v in V)
    assert found.value == pytest.approx(exact, abs=1e-4)


def over_all(A, count, rng):
    """The mean of a table none of whose components has a name."""
    size = len(A)
    return permuted_mean(A, np.arange(size), np.arange(0), sample_permutations(size, count, rng))


def test_every_name_is_looked_at_and_named_components_keep_theirs():
    rng = np.random.default_rng(0)
    for K in (1, 2, 3, 5):
        A = rng.normal(scale=4.0, size=(K, K))
        each = [A[range(K), p].sum() for p in permutations(range(K))]
        assert log_permanent(A, np.empty(2**K)) == pytest.approx(logsumexp(each), rel=1e-12)
        assert over_all(A, "auto", rng) == pytest.approx(logsumexp(each) - np.log(len(each)))
    A = np.full((3, 3), -np.inf)
    A[range(3), [2, 0, 1]] = 1.0
    assert log_permanent(A, np.empty(8)) == pytest.approx(3.0)
    A = np.array([[1.0, 9.0, 9.0], [9.0, 2.0, 3.0], [9.0, 4.0, 5.0]])
    found = permuted_mean(A, np.array([1, 2]), np.array([0]), None)
    assert found == pytest.approx(1 + np.logaddexp(2 + 5, 3 + 4) - np.log(2))
    assert permuted_mean(A, np.arange(0), np.arange(3), None) == pytest.approx(1 + 2 + 5)


def test_a_sample_of_names_is_without_bias():
    rng = np.random.default_rng(1)
    A = rng.normal(scale=1.5, size=(5, 5))
    exact, found = over_all(A, "auto", rng), np.array([over_all(A, 20, rng) for _ in range(2000)])
    ratio = np.exp(found - exact)
    assert abs(ratio.mean() - 1) < 5 * ratio.std() / np.sqrt(ratio.size)
    assert ratio.std() > 0.01
    far = -100.0 * (1 - np.eye(30))  # only one of 30! counts, and no sample would find it
    assert over_all(far, "auto", rng) == pytest.approx(-np.log(np.arange(1, 31)).sum())


def test_tables_are_gamma_densities():
    rng = np.random.default_rng(2)
    point, shapes, rates = (rng.gamma(2.0, size=(4, 3)) for _ in range(3))
    each = stats.gamma.logpdf(point[:, :, None], shapes[:, None], scale=1 / rates[:, None])
    assert_allclose(table(point, shapes, rates), each.sum(axis=0), rtol=1e-12)
    assert_allclose(entries(point, shapes, rates).sum(axis=0), np.diag(table(point, shapes, rates)))


def test_averages_and_their_errors():
    rng = np.random.default_rng(3)
    errors, values = [], []
    for _ in range(80):
        result = average(rng.normal(scale=0.5, size=(40, 2)) for _ in range(25))
        errors.append(result.error)
        values.append(result.log_ordinate)
    assert np.mean(values) == pytest.approx(2 * 0.125, abs=0.01)
    assert np.std(values) == pytest.approx(np.mean(errors), rel=0.3)
    assert result.spread == pytest.approx(0.5, rel=0.1)
    assert result.effective == pytest.approx(1000 * np.exp(-0.25), rel=0.1)


def test_a_handful_of_sweeps_that_count_are_no_estimate():
    rng = np.random.default_rng(4)
    V = rng.poisson(rng.gamma(1, 2, (30, 3)) @ rng.gamma(1, 2, (3, 25))).astype(float)
    with pytest.warns(SamplingWarning, match="too large by an unknown amount"):
        found = estimate(V, 3, method=Chib(draws=50, tune=20))
    assert found.trace["spread_w"] > 5


def test_refusals():
    refused(ModelError, "beta=1", Chib().check, TweedieNMF(2, beta=2.0))
    match = "use ThermodynamicIntegration"
    refused(ModelError, match, checked_method, Chib(), GaussianAdditive(2))
    refused(DataError, "whole numbers", estimate, SMALL + 0.5, 1)
    for wrong in ({"draws": 10}, {"tune": 0}, {"permutations": 0}, {"permutations": "all"}):
        refused(OptionError, None, Chib, **wrong)
