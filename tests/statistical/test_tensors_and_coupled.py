"""CP models and coupled matrices against exact posteriors, and planted bugs."""

import functools
import itertools
import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import sparse
from scipy import special, stats
from scipy.sparse import csr_array

import daskfactor as dfac
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import SamplingWarning
from daskfactor.evidence import tempered
from daskfactor.inference import calibration
from daskfactor.kernels import blockwise
from daskfactor.models.coupled import JointLaw
from daskfactor.results.views import factors
from daskfactor.runs.schema import BIASED
from tests.statistical.allocations import Priors, component
from tests.tiers import tiered

pytestmark = pytest.mark.statistical

COPIES, EVIDENT, ERRORS = 400, 40, 5.0
COUNTS = np.array([[[2, 0], [1, 3]], [[0, 1], [0, 2]]])


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


def on_diagonal(v):
    """Put problems (copies, 2, 2, 2) on a diagonal, whose other cells are missing."""
    at = np.array(list(np.ndindex(v.shape[1:])))
    places = np.concatenate([at + 2 * copy for copy in range(len(v))]).T
    values = v.ravel().astype(np.float64)
    return sparse.COO(places, values, (2 * len(v),) * 3, fill_value=np.nan)


def copied(v, copies=COPIES):
    return np.broadcast_to(v, (copies, *v.shape))


def factor_draws(v, model, sampler, draws=300, tune=200):
    """Draws of the factors of every problem: (draws, copies, 2, components) each."""
    settings = {"draws": draws, "tune": tune, "random_seed": 3, "progressbar": False}
    trace = dfac.sample(on_diagonal(v), model, sampler, blocks=2, **settings)
    values = [own.values[0].astype(np.float64) for own in factors(trace).values()]
    return [one.reshape(draws, len(v), 2, -1) for one in values]


def drawn(v, model, sampler, draws=300, tune=200):
    """Means of mu over the draws of every copy: (copies, 2, 2, 2)."""
    own = factor_draws(copied(v), model, sampler, draws, tune)
    return np.einsum("dcik,dcjk,dclk->cijl", *own) / draws


def off(found, true):
    """The largest difference from the exact means in standard errors, and the largest error in
    units of the means."""
    error = found.std(axis=0, ddof=1) / math.sqrt(COPIES)
    return float(np.abs((found.mean(axis=0) - true) / error).max()), float((error / true).max())


TWO = dfac.CP(2, dispersion=1.0, rate_w=1.0, rate_h=1.0)
LARGER = replace(TWO, rate_w=0.5, rate_h=0.5)
NORMAL_ONE = dfac.CP(1, beta=2.0, dispersion=0.4, rate_w=1.0, rate_h=1.0)


def test_the_enumeration_is_the_integral_of_one_component():
    """Without a second component E[mu] of all counts in one cell is a ratio of two integrals."""
    nodes = np.linspace(-9.0, 5.5, 160)  # of log A, log B and log C, all three by sums
    a, b, c = np.meshgrid(*(np.exp(nodes),) * 3, indexing="ij")
    weight = np.exp(-a * b * c - a - b - c)
    sums = [float((weight * (a * b * c) ** (n + 2)).sum()) for n in (2, 3)]
    assert math.exp(log_sums(3) - log_sums(2)) == pytest.approx(sums[1] / sums[0], rel=1e-4)


def test_the_exact_posterior_of_counts():
    distance, error = off(drawn(COUNTS, TWO, dfac.BlockHMC()), exact_counts(COUNTS)[0])
    assert error < 0.03
    assert distance < ERRORS


PROBLEMS = 300


def calibration_of(true, draws, names):
    """Judge ranks of true numbers (problems, ...) among their draws (draws, problems, ...)."""
    pairs = zip(names, zip(true, draws, strict=True), strict=True)
    values = {name: np.concatenate([own, one[None]]) for name, (one, own) in pairs}
    return calibration._judge(values, {BIASED: 0})


@pytest.mark.quick("counts-SGHMC")
@pytest.mark.parametrize("sampler", [dfac.BlockHMC(), dfac.SGHMC()], ids=lambda own: own.name)
@pytest.mark.parametrize(
    "model", [TWO, LARGER, NORMAL_ONE], ids=["counts", "larger counts", "normal"]
)
def test_true_factors_of_tensors_have_uniform_ranks(sampler, model):
    rng = np.random.default_rng(8)
    size = PROBLEMS, 2, model.n_components
    true = [rng.exponential(1 / model.rate_w, size) for _ in "abc"]
    mu = np.einsum("cik,cjk,clk->cijl", *true)
    v = model.likelihood.sample(rng, mu, model.dispersion)
    draws = factor_draws(v, model, sampler, draws=1500, tune=400)

    def numbers(own):
        """Sums and largest entries of factors, which no order of components changes; one mean."""
        first = np.prod([one[..., 0, :] for one in own], axis=0).sum(axis=-1)
        sides = (-2, -1)
        return [*(one.sum(axis=sides) for one in own), *(one.max(axis=sides) for one in own), first]

    names = [f"{kind} of {name}" for kind in ("sum", "largest") for name in "abc"]
    found = calibration_of(numbers(true), numbers(draws), [*names, "mu"])
    assert found.attrs["calibrated"], str(found)
    assert np.isfinite(found["p"]).all(), "too few draws to say anything"


@pytest.mark.quick("PSGLD")
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
    return dfac.log_evidence(on_diagonal(copied(COUNTS, EVIDENT)), model, method, **options)


@pytest.mark.parametrize("n_components", tiered([1, 2], lambda own: own == 2))
def test_the_evidence_of_counts(n_components):
    exact = EVIDENT * (log_of_one(COUNTS) if n_components == 1 else exact_counts(COUNTS)[1])
    found = log_evidence(n_components)
    assert found.total_error < 2.0  # of 520 and 470 nats
    assert abs(found.value - exact) < ERRORS * found.total_error


@pytest.mark.full
def test_an_evidence_whose_chains_forget_the_temperature_is_seen(monkeypatch):
    """Chains of low temperatures are those of twice that."""
    right = tempered.TemperedChains.advance

    def wrong(self, item, work):
        number, t, *rest = item
        return right(self, (number, min(1.0, 2 * t), *rest), work)

    monkeypatch.setattr(tempered.TemperedChains, "advance", wrong)
    with pytest.warns(SamplingWarning, match="sees a small part"):
        found = log_evidence(1)
    assert abs(found.value - EVIDENT * log_of_one(COUNTS)) > ERRORS * found.total_error


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:the log density still")  # it does, of the wrong posterior
def test_a_gradient_that_leaves_a_factor_out_is_seen(monkeypatch):
    right = blockwise.accumulate

    def wrong(block, kind, sums, *rest, **more):
        view, law, given, floor = block
        bent = tuple(own if n != 2 else own * 1.1 for n, own in enumerate(given))
        of_first = bool(sums.terms) and sums.terms[0] is not None
        right((view, law, bent if of_first else given, floor), kind, sums, *rest, **more)

    monkeypatch.setattr(blockwise, "accumulate", wrong)
    distance, _ = off(drawn(COUNTS, TWO, dfac.BlockHMC()), exact_counts(COUNTS)[0])
    assert distance > ERRORS


class Views(NamedTuple):
    """Two columns of data of the same rows, and their laws."""

    name: str
    first: list[float]
    second: list[float]
    relations: dict[str, dfac.Relation]


POISSON = dfac.Relation(law="poisson", dispersion=1.0)
NORMAL = dfac.Relation(law="normal", dispersion=0.7)
HALF = dfac.Relation(law="poisson", dispersion=1.0, weight=0.5)
COUNTED = dfac.Relation(law="negative binomial", dispersion=0.4)
GAMMA = dfac.Relation(law="gamma", dispersion=0.3)
VIEWS = [
    Views("poisson-normal", [4, 1, 9], [1.5, 0.4, 2.6], {"a": POISSON, "b": NORMAL}),
    Views("weighted-overdispersed", [2, 0, 5], [7, 3, 30], {"a": HALF, "b": COUNTED}),
    Views("gamma-normal", [2.5, 0.3, 1.2], [3.5, 0.1, -0.6], {"a": GAMMA, "b": NORMAL}),
]


def log_density(relation, v, mu):
    """Log-densities by SciPy's own distributions."""
    phi = float(relation.dispersion)
    law = {
        "poisson": lambda: stats.poisson.logpmf(v, mu),
        "normal": lambda: stats.norm.logpdf(v, mu, np.sqrt(phi)),
        "gamma": lambda: stats.gamma.logpdf(v, 1 / phi, scale=phi * mu),
        "negative binomial": lambda: stats.nbinom.logpmf(v, 1 / phi, 1 / (1 + phi * mu)),
    }[relation.law]
    return relation.weight * law()


def exact_pair(pair):
    """Posterior means of row factors, and of the means of both views: (3,), (2, 3). On a grid of
    log h and log g, with w of every row on a grid of its own."""
    columns = np.array(pair.first), np.array(pair.second)
    units = [float(np.mean(own)) for own in columns]
    nodes = np.linspace(-5.5, 2.5, 161)
    h, w = np.exp(nodes), np.exp(np.linspace(-8.0, 3.0, 301))
    prior = nodes - h  # of a logarithm
    log_joint, rows = prior[:, None] + prior, []
    for values in zip(*columns, strict=True):
        first, second = (
            log_density(pair.relations[name], value, unit * np.outer(h, w))
            for name, value, unit in zip("ab", values, units, strict=True)
        )
        # A sum over w of exp(a + b) for all h and g is a product of matrices.
        left = w * np.exp(first - first.max() - w)
        right = np.exp(second - second.max()).T
        total = left @ right + np.finfo(float).tiny
        rows.append((left * w) @ right / total)
        log_joint += np.log(total)
    p = special.softmax(log_joint)
    means = np.array([(p * own).sum() for own in rows])
    mu = [[(p * own * one).sum() for own in rows] for one in (h[:, None], h[None, :])]
    return means, np.array(mu) * np.array(units)[:, None]


def view_draws(columns, relations, sampler, draws, tune=150):
    """Draws of the rows' and the views' factors, (draws, problems, 3) and (draws, problems) each.

    ``columns`` are those of every problem, (problems, 3) for each view.
    """
    rows = np.arange(columns[0].size)
    data = {
        name: csr_array((own.ravel().astype(float), (rows, rows // 3)), (rows.size, len(own)))
        for name, own in zip("ab", columns, strict=True)
    }
    model = dfac.Coupled(1, relations=relations, rate_w=1.0, rate_h=1.0)
    settings = {"draws": draws, "tune": tune, "random_seed": 5, "progressbar": False}
    trace = dfac.sample(data, model, sampler, unstored="missing", blocks=4, **settings)
    found = factors(trace)
    W, *others = (found[name].values[0, ..., 0].astype(np.float64) for name in ("row", "a", "b"))
    return W.reshape(draws, -1, 3), *others


def drawn_pair(pair, sampler):
    """Means over the draws of every copy: (copies, 3), (copies, 2, 3)."""
    columns = [np.tile(own, (COPIES, 1)) for own in (pair.first, pair.second)]
    W, *others = view_draws(columns, pair.relations, sampler, draws=300)
    mu = [own.mean() * W * h[:, :, None] for own, h in zip(columns, others, strict=True)]
    return W.mean(axis=0), np.stack([one.mean(axis=0) for one in mu], axis=1)


def worst(pair, sampler):
    """The same as `off`, of row factors and of the means of both views."""
    pairs = zip(drawn_pair(pair, sampler), exact_pair(pair), strict=True)
    return np.max([off(found, true) for found, true in pairs], axis=0)


def test_quadrature_of_one_view_is_that_of_a_matrix_alone():
    """With the second view's weight near nothing the first is a gamma-Poisson problem."""
    vague = dfac.Relation(law="normal", dispersion=1e8)
    pair = Views("alone", [4, 1, 9], [1.5, 0.4, 2.6], {"a": POISSON, "b": vague})
    means, mu = exact_pair(pair)
    counts = np.array(pair.first)[:, None]
    alone, shares = component(counts, Priors(rate_h=1 / counts.mean())), (counts + 1)[:, 0]
    np.testing.assert_allclose(means, alone.sum_w * shares / shares.sum(), rtol=2e-3)
    np.testing.assert_allclose(mu[0], alone.mean[:, 0], rtol=2e-3)


@pytest.mark.quick("weighted-overdispersed")
@pytest.mark.parametrize("pair", VIEWS, ids=lambda pair: pair.name)
def test_exact_posteriors_of_coupled_matrices(pair):
    size, error = worst(pair, dfac.BlockHMC(warm_start=5))
    assert error < 0.02, "too few draws for the tolerance to mean anything"
    assert size < ERRORS


@pytest.mark.full
@pytest.mark.parametrize("sampler", [dfac.BlockHMC(), dfac.SGHMC()], ids=lambda own: own.name)
def test_true_factors_of_coupled_matrices_have_uniform_ranks(sampler, monkeypatch):
    """In units of 1: the mean of the data would make the prior depend on them."""
    monkeypatch.setattr(BlockedData, "level", 1.0)
    rng = np.random.default_rng(9)
    true = [rng.exponential(size=(PROBLEMS, 3)), *rng.exponential(size=(2, PROBLEMS))]
    means = [true[0] * own[:, None] for own in true[1:]]
    columns = [rng.poisson(means[0]), rng.normal(means[1], np.sqrt(0.7))]
    draws = view_draws(columns, VIEWS[0].relations, sampler, draws=1500, tune=400)
    found = calibration_of(
        *([own[0].sum(axis=-1), own[0][..., 0], *own[1:]] for own in (true, draws)),
        ["sum of rows", "first row", "a", "b"],
    )
    assert found.attrs["calibrated"], str(found)
    assert np.isfinite(found["p"]).all(), "too few draws to say anything"


@pytest.mark.full
@pytest.mark.parametrize("bug", ["share", "turned"])
def test_planted_bugs_are_seen(bug, monkeypatch):
    if bug == "share":
        monkeypatch.setattr(JointLaw, "parts", property(lambda law: law.laws))
    else:
        own = JointLaw.of
        monkeypatch.setattr(JointLaw, "of", lambda law, block: own(law, (block[0], 0)))
    size, _ = worst(VIEWS[0], dfac.BlockHMC(warm_start=5))
    assert size > 2 * ERRORS
