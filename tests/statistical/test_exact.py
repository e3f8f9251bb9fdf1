"""The ground truth itself: published values, converged grids, and routes that agree."""

import operator

import numpy as np
import pytest

from tests.statistical import exact
from tests.statistical.allocations import Priors, posterior
from tests.statistical.exact import CASES, Case, exact_posterior, reference_posterior
from tests.tiers import tiered

ONE = [case for case in CASES if case.K == 1]
TWO = [case for case in CASES if case.K == 2]
KEYS = ("mean_mu", "var_mu", "sum_w", "log_evidence")
NAME = operator.attrgetter("name")


def quadrature(case, **settings):
    shape = (case.V.shape[0], case.V.shape[1])
    given = case.beta, case.dispersion, case.rate_w, case.rate_h
    return exact._one_component(case.V.tobytes(), shape, *given, **settings)


def assert_same(got, wanted, tolerance):
    for key in KEYS:
        given = got[key], wanted[key]
        np.testing.assert_allclose(*given, rtol=tolerance, atol=tolerance, err_msg=key)


def test_published_posteriors_and_evidences():
    V = np.array([[4.0, 7.0], [2.0, 5.0]])
    got = exact_posterior(V, 1.0)
    np.testing.assert_allclose(got["mean_mu"], [[3.3199, 6.1655], [2.2132, 4.1103]], atol=5e-5)
    np.testing.assert_allclose(got["var_mu"], [[2.0515, 4.4742], [1.1352, 2.7148]], atol=5e-5)
    assert got["sum_w"] == pytest.approx(4.1911, abs=5e-5)
    assert got["log_evidence"] == pytest.approx(-12.46773, abs=5e-6)
    got = exact_posterior(V, 2.0)
    np.testing.assert_allclose(got["mean_mu"], [[3.3836, 6.8136], [2.1977, 4.4461]], atol=5e-5)
    for K, published in ((1, -8.525465119275), (2, -7.504036700896)):
        got = exact_posterior(np.array([[2.0, 1.0], [0.0, 3.0]]), 1.0, K=K)
        assert got["log_evidence"] == pytest.approx(published, abs=1e-10)


@pytest.mark.parametrize(
    "case", tiered(ONE, lambda case: case.V.shape[1] == 2 or case.name == "poisson-gaps"), ids=NAME
)
def test_quadrature_has_converged(case):
    columns = case.V.shape[1]
    finer = {2: 2 * exact.OUTER_NODES[2] - 1, 3: 53}[columns]
    assert_same(reference_posterior(case), quadrature(case, outer=finer), 1e-7)


@pytest.mark.parametrize(
    ("beta", "shape"), [(2.0, 1.0), (1.0, 1.0), (1.0, 0.7), (1.0, 2.5), (0.5, 1.0), (0.0, 1.0)]
)
@pytest.mark.parametrize("row", [[0.7, 2.0], [np.nan, 0.4], [np.nan, np.nan], [6.0, 3.0]])
def test_closed_row_integrals_meet_the_plain_sum(beta, shape, row):
    h = np.geomspace(1e-3, 20.0, 7)
    H = np.stack(np.meshgrid(h, h), axis=-1).reshape(-1, 2)
    closed = exact._row_integrals(np.array(row), H, beta, 0.7, 1.3, shape=shape)
    plain = exact._row_integrals(np.array(row), H, beta, 0.7, 1.3, True, shape)
    likely = plain[0] > plain[0].max() - 40.0
    for got, wanted in zip(closed, plain, strict=True):
        np.testing.assert_allclose(got[likely], wanted[likely], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("case", [c for c in ONE if c.V.shape == (2, 2)], ids=NAME)
def test_posterior_of_the_transpose_is_the_transpose(case):
    """W is integrated out in closed form and H on a grid, so this swaps the two routes."""
    got = reference_posterior(case)
    rates = {"rate_w": case.rate_h, "rate_h": case.rate_w}
    swapped = exact_posterior(case.V.T, case.beta, case.dispersion, **rates)
    for key in ("mean_mu", "var_mu"):
        np.testing.assert_allclose(got[key], swapped[key].T, rtol=1e-8)
    assert got["log_evidence"] == pytest.approx(swapped["log_evidence"], abs=1e-9)


@pytest.mark.parametrize(
    ("X", "K", "priors"),
    [
        ([[2, 1], [0, 3]], 2, Priors(0.4, 1.7)),
        ([[1, 0, 2], [1, 0, 1]], 2, Priors()),
        ([[2, 1], [0, 3]], 1, Priors(0.8, 1.5, 0.5, 1.5)),
        ([[1, 0, 4], [2, 0, 1]], 1, Priors()),
        ([[3], [5], [0]], 1, Priors(0.4, 1.7)),
    ],
)
def test_sums_over_allocations_meet_the_other_routes(X, K, priors):
    case = Case("", np.array(X, dtype=np.float64), 1.0, 1.0, *priors[:2], K, *priors[2:])
    assert_same(posterior(case.V, K, priors), reference_posterior(case), 1e-7)


MET = ("gaussian-skewed", "poisson-two")
MORE = ("poisson-tall", "compound-gaps", "gamma-gaps", "poisson-two-gaps")


@pytest.mark.statistical
@pytest.mark.parametrize("name", tiered(MET + MORE, MET.__contains__))
def test_monte_carlo_meets_the_exact_routes(name):
    """Independent code for the same posterior: within five standard errors, and those small."""
    (case,) = (case for case in CASES if case.name == name)
    wanted = reference_posterior(case)
    settings = case.dispersion, case.rate_w, case.rate_h
    got = exact.metropolis_posterior(case.V, case.beta, case.K, *settings, steps=60)
    for key in KEYS:
        z = (np.asarray(got[key]) - wanted[key]) / got[key + "_se"]
        assert np.max(np.abs(z)) < 5.0, (key, z)
    assert np.max(got["mean_mu_se"] / np.sqrt(wanted["var_mu"])) < 0.02
    assert got["log_evidence_se"] < 0.05


@pytest.mark.statistical
@pytest.mark.parametrize(
    "case",
    tiered([c for c in TWO if c.beta != 1.0], lambda case: case.name == "compound-two"),
    ids=NAME,
)
def test_monte_carlo_cases_are_precise_enough(case):
    """Their errors must be small beside the 0.1 posterior sd that samplers are held to."""
    got = reference_posterior(case)
    assert np.max(got["mean_mu_se"] / np.sqrt(got["var_mu"])) < 0.01
    assert np.max(got["var_mu_se"] / got["var_mu"]) < 0.03
    assert got["sum_w_se"] < 0.003 * got["sum_w"]
    assert got["log_evidence_se"] < 0.03


def test_cases_are_named_once_and_cover_every_law():
    assert len({case.name for case in CASES}) == len(CASES)
    for count in (1, 2):
        assert {case.beta for case in CASES if count == case.K} == {2.0, 1.0, 0.5, 0.0}
    assert any(np.isnan(case.V).any() for case in TWO)
