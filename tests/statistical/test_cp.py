"""CP models of 2 x 2 x 2 tensors against their exact posterior, and planted bugs.

Two components of counts by enumeration: given which component each count is of, sums of factors
and their shares are independent. One component under a normal law by quadrature. Hundreds of
copies of the problem share a run, as blocks on a diagonal whose other cells are missing.
"""

import functools
import itertools
import math

import numpy as np
import pytest
import sparse
from scipy import special

import daskfactor as dfac
from daskfactor.errors import SamplingWarning
from daskfactor.evidence import tempered
from daskfactor.kernels import factorwise
from daskfactor.results.views import factors
from tests.tiers import tiered

pytestmark = pytest.mark.statistical

COPIES, EVIDENT, ERRORS = 400, 40, 5.0
COUNTS = np.array([[[2, 0], [1, 3]], [[0, 1], [0, 2]]])
VALUES = np.array([[[1.2, 0.1], [0.7, 2.0]], [[-0.3, 0.6], [0.2, 1.1]]])
PHI = 0.4


@functools.cache
def log_sums(count):
    """log of the integral of (ABC)^(n+1) exp(-ABC - A - B - C) over positive A, B, C."""
    nodes = np.linspace(-14.0, 5.0, 400)
    size = np.exp(nodes)
    # Over C in closed form: Gamma(n + 2) / (1 + AB)^(n + 2)
    log_f = (count + 2) * (nodes[:, None] + nodes[None, :]) - size[:, None] - size[None, :]
    log_f += math.lgamma(count + 2) - (count + 2) * np.log1p(size[:, None] * size[None, :])
    step = nodes[1] - nodes[0]
    return float(special.logsumexp(log_f) + 2 * math.log(step))


def log_of_one(n):
    """Log evidence of counts under one component, exponential priors of rate 1."""
    margins = (n.sum((1, 2)), n.sum((0, 2)), n.sum((0, 1)))
    shares = sum(special.gammaln(own + 1).sum() - math.lgamma(own.sum() + 2) for own in margins)
    return float(log_sums(int(n.sum())) + shares - special.gammaln(n + 1).sum())


def exact_counts(v):
    """Posterior means of mu of two components and log evidence, exponential priors of rate 1."""

    def mean(n):
        count = int(n.sum())
        product = math.exp(log_sums(count + 1) - log_sums(count))  # of ABC
        margins = (n.sum((1, 2)), n.sum((0, 2)), n.sum((0, 1)))
        shares = [(own + 1) / (count + 2) for own in margins]
        return product * np.einsum("i,j,k->ijk", *shares)

    logs, means = [], []
    for split in itertools.product(*(range(count + 1) for count in v.ravel())):
        first = np.array(split).reshape(v.shape)
        logs.append(log_of_one(first) + log_of_one(v - first))
        means.append(mean(first) + mean(v - first))
    weights = special.softmax(logs)
    return np.tensordot(weights, np.array(means), axes=1), float(special.logsumexp(logs))


def exact_normal(v, phi):
    """Posterior means of mu of one component under a normal law, priors of rate 1."""
    nodes = np.linspace(-6.0, 2.2, 34)
    x = np.exp(nodes)
    b1, b2, c1, c2 = np.meshgrid(x, x, x, x, indexing="ij")
    log_p = -(b1 + b2 + c1 + c2) + np.log(b1) + np.log(b2) + np.log(c1) + np.log(c2)
    pairs = [[b1 * c1, b1 * c2], [b2 * c1, b2 * c2]]
    square = sum(own**2 for row in pairs for own in row)
    a_means = []
    for i in range(2):
        # a | b, c is normal of this mean and variance, cut off at zero
        along = sum(v[i, j, k] * pairs[j][k] for j in range(2) for k in range(2))
        variance = phi / square
        mean = (along / phi - 1.0) * variance
        sd = np.sqrt(variance)
        log_tail = special.log_ndtr(mean / sd)
        log_p = log_p + 0.5 * mean**2 / variance + np.log(sd) + log_tail
        pdf = np.exp(-0.5 * (mean / sd) ** 2 - 0.5 * math.log(2 * math.pi) - log_tail)
        a_means.append(mean + sd * pdf)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    found = [[[(p * a * own).sum() for own in row] for row in pairs] for a in a_means]
    return np.array(found)


def copied(v, copies=COPIES):
    """Put copies of a problem on a diagonal, whose other cells are missing."""
    at = np.array(list(np.ndindex(v.shape)))
    places = np.concatenate([at + 2 * copy for copy in range(copies)]).T
    values = np.tile(v.ravel(), copies).astype(np.float64)
    return sparse.COO(places, values, (2 * copies,) * 3, fill_value=np.nan)


def drawn(v, model, sampler, draws=300, tune=200):
    """Means of mu over the draws of every copy: (copies, 2, 2, 2)."""
    tensor = copied(v)
    settings = {"draws": draws, "tune": tune, "random_seed": 3, "progressbar": False}
    trace = dfac.sample(tensor, model, sampler, blocks=2, **settings)
    own = [
        f.values[0].astype(np.float64).reshape(draws, COPIES, 2, -1)
        for f in factors(trace).values()
    ]
    return np.einsum("dcik,dcjk,dclk->cijl", *own) / draws


def off(found, true):
    """The largest difference from the exact means in standard errors, and the largest error in
    units of the means."""
    error = found.std(axis=0, ddof=1) / math.sqrt(COPIES)
    return float(np.abs((found.mean(axis=0) - true) / error).max()), float((error / true).max())


TWO = dfac.CP(2, dispersion=1.0, rate_w=1.0, rate_h=1.0)
ONE = dfac.CP(1, beta=2.0, dispersion=PHI, rate_w=1.0, rate_h=1.0)


def test_the_enumeration_is_the_integral_of_one_component():
    """Without a second component E[mu] of all counts in one cell is a ratio of two integrals."""
    nodes = np.linspace(-9.0, 5.5, 160)  # of log A, log B and log C, all three by sums
    a, b, c = np.meshgrid(*(np.exp(nodes),) * 3, indexing="ij")
    weight = np.exp(-a * b * c - a - b - c)
    sums = [float((weight * (a * b * c) ** (n + 2)).sum()) for n in (2, 3)]
    assert math.exp(log_sums(3) - log_sums(2)) == pytest.approx(sums[1] / sums[0], rel=1e-4)


def test_two_components_of_counts():
    distance, error = off(drawn(COUNTS, TWO, dfac.BlockHMC()), exact_counts(COUNTS)[0])
    assert error < 0.03
    assert distance < ERRORS


def test_one_component_under_a_normal_law():
    distance, error = off(drawn(VALUES, ONE, dfac.BlockHMC()), exact_normal(VALUES, PHI))
    assert error < 0.03
    assert distance < ERRORS


@pytest.mark.parametrize(
    "sampler",
    [dfac.PSGLD(step=0.1), dfac.SGHMC(), dfac.LangevinDynamics(step=0.1)],
    ids=lambda own: own.name,
)
def test_samplers_with_a_step_are_near(sampler):
    """Within a tenth: their bias in the step, with eight cells to go by."""
    true, _ = exact_counts(COUNTS)
    found = drawn(COUNTS, TWO, sampler, 600, 300).mean(axis=0)
    np.testing.assert_allclose(found, true, rtol=0.1)


def log_evidence(n_components):
    """Of forty copies of the counts, whose exact one is forty times that of one."""
    method = dfac.ThermodynamicIntegration(draws=400, tune=100)
    model = dfac.CP(n_components, dispersion=1.0, rate_w=1.0, rate_h=1.0)
    options = {"random_seed": 5, "progressbar": False, "blocks": 1}
    return dfac.log_evidence(copied(COUNTS, EVIDENT), model, method, **options)


@pytest.mark.parametrize("n_components", tiered([1, 2], lambda own: own == 2))
def test_the_evidence_of_counts(n_components):
    exact = EVIDENT * (log_of_one(COUNTS) if n_components == 1 else exact_counts(COUNTS)[1])
    found = log_evidence(n_components)
    assert found.total_error < 2.0  # of 520 and 470 nats
    assert abs(found.value - exact) < ERRORS * found.total_error


def test_an_evidence_whose_chains_forget_the_temperature_is_seen(monkeypatch):
    """Chains of low temperatures are those of twice that."""
    right = tempered._sampled_fits

    def wrong(*given):
        *before, t, lengths = given
        return right(*before, min(1.0, 2 * t), lengths)

    monkeypatch.setattr(tempered, "_sampled_fits", wrong)
    with pytest.warns(SamplingWarning, match="sees a small part"):
        found = log_evidence(1)
    assert abs(found.value - EVIDENT * log_of_one(COUNTS)) > ERRORS * found.total_error


@pytest.mark.filterwarnings("ignore:the log density still")  # it does, of the wrong posterior
def test_a_gradient_that_leaves_a_factor_out_is_seen(monkeypatch):
    right = factorwise.slope

    def wrong(view, law, factor, given, *rest):
        bent = tuple(own if n != 2 else own * 1.1 for n, own in enumerate(given))
        right(view, law, factor, bent if factor == 0 else given, *rest)

    monkeypatch.setattr(factorwise, "slope", wrong)
    distance, _ = off(drawn(COUNTS, TWO, dfac.BlockHMC()), exact_counts(COUNTS)[0])
    assert distance > ERRORS
