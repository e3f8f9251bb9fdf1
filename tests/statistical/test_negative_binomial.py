"""Negative binomial counts against exact posteriors, of factors and of the dispersion."""

from functools import lru_cache

import numpy as np
import pytest
from scipy import special, stats

import daskfactor as dfac
from daskfactor.inference.dispersion import LearntDispersion
from daskfactor.inference.tweedie_chain import TweedieChain
from daskfactor.models import negative_binomial
from tests.statistical.distance import Biased, Distance
from tests.statistical.exact import NEGATIVE_BINOMIAL, Case, exact_posterior
from tests.statistical.replicas import replicate_sparse, run_copies
from tests.tiers import tiered

pytestmark = pytest.mark.statistical

FIXED = Case("negative-binomial", np.array([[4.0], [0.0], [9.0]]), NEGATIVE_BINOMIAL, 0.7)

SMALL_STEP = dfac.PSGLD(step=0.03)


def distance(kind, sampler, draws):
    moments = run_copies(FIXED, sampler, copies=1024, tune=draws, draws=draws, blocks=1)[0]
    return kind(moments, exact_posterior(FIXED.V, FIXED.beta, FIXED.dispersion))


@pytest.mark.parametrize(
    ("kind", "sampler", "draws"),
    [(Biased, SMALL_STEP, 1000), (Distance, dfac.BlockHMC(warm_start=5), 250)],
    ids=["PSGLD", "BlockHMC"],
)
def test_exact_posteriors_at_a_dispersion(kind, sampler, draws):
    found = distance(kind, sampler, draws)
    assert found.error < 0.025, "too few draws for the tolerances to mean anything"
    assert found.passes, str(found)


def test_the_wrong_sign_of_the_curvature_is_seen(monkeypatch):
    """The term of (v + r) / (r + mu) in the slope, kernels made anew from it."""

    class Turned(negative_binomial.NegativeBinomial):
        def __hash__(self):
            return 1

        def entry(self, arithmetic):
            entry = super().entry(arithmetic)

            def weight(v, mu, alpha):
                one, a = type(mu)(1), type(mu)(alpha)
                slope = v / mu + (one + a * v) / (one + a * mu)
                return slope / (v - mu + type(mu)(1e-9))

            return entry._replace(weight=weight)

    monkeypatch.setattr(negative_binomial, "NegativeBinomial", Turned)
    found = distance(Biased, SMALL_STEP, 100)
    assert found.rms > 0.5


OFTEN = np.array([[3.0], [2.0], [0.25]])


def counted_often():
    """The moments under weights n, by quadrature: the cell n times, p(v | w h)^n."""
    x, dx = np.polynomial.legendre.leggauss(400)
    w, dw = 10.0 * (1 + x) ** 2, 20.0 * (1 + x) * dx  # from 0 to 40, closer near 0
    alpha, rows = FIXED.dispersion, []
    for v, n in zip(FIXED.V[:, 0], OFTEN[:, 0], strict=True):
        law = stats.nbinom(1 / alpha, 1 / (1 + alpha * np.outer(w, w)))
        density = np.exp(n * law.logpmf(v) - w[:, None]) * dw[:, None]  # (w, h)
        rows.append([(w[:, None] ** power * density).sum(axis=0) for power in range(3)])
    whole = np.prod([row[0] for row in rows], axis=0) * np.exp(-w) * dw
    parts = [[whole @ (row[m] / row[0] * w**m) / whole.sum() for row in rows] for m in (1, 2)]
    mean, square = (np.array(part)[:, None] for part in parts)
    sum_w = sum(whole @ (row[1] / row[0]) for row in rows) / whole.sum()
    return {"mean_mu": mean, "var_mu": square - mean**2, "sum_w": sum_w}


@pytest.mark.parametrize("weights", [OFTEN, np.ones((3, 1))], ids=["weights", "none"])
def test_a_weight_says_how_often_a_cell_counts(weights):
    settings = {"copies": 1024, "tune": 250, "draws": 250, "blocks": 1}
    moments = run_copies(FIXED, dfac.BlockHMC(warm_start=5), weights=weights, **settings)[0]
    found = Distance(moments, counted_often())
    assert found.error < 0.025
    assert found.passes == (weights is OFTEN), str(found)


COPIES = 30
TALL = np.array([[4.0, 0.0], [0.0, 3.0], [9.0, 2.0], [1.0, 8.0], [5.0, 5.0], [2.0, 0.0]])

TWICE = np.array([[2.0, 1.0], [1.0, 0.5], [3.0, 1.0], [1.0, 2.0], [0.5, 1.0], [2.0, 2.0]])


@lru_cache
def exact_dispersion(weighed=False):
    """Mean and sd of log α given copies of a matrix: exp(-α) Z(α)^copies on a grid.

    Z integrates over both entries of H, and over the entry of W of each row in turn.
    """
    y, x = np.linspace(-9.0, 3.8, 90), np.linspace(-4.0, 2.5, 66)
    prior = y - np.exp(y) + np.log(y[1] - y[0])  # of the logarithm of an Exponential(1) number
    log_mu = y[:, None] + y[None, :]
    log_density = np.zeros(x.size)
    for at, alpha in enumerate(np.exp(x)):
        law = stats.nbinom(1 / alpha, 1 / (1 + alpha * np.exp(log_mu)))
        each = {v: law.logpmf(v) for v in np.unique(TALL)}
        total = prior[:, None] + prior[None, :]
        for row, counts in zip(TALL, TWICE if weighed else np.ones_like(TALL), strict=True):
            pairs = zip(row, counts, strict=True)
            both = [np.exp(n * each[v] + 0.5 * prior[:, None]) for v, n in pairs]
            total = total + np.log(both[0].T @ both[1])
        log_density[at] = COPIES * special.logsumexp(total) - alpha + x[at]
    weight = np.exp(log_density - special.logsumexp(log_density))
    mean = float(weight @ x)
    return mean, float(np.sqrt(weight @ (x - mean) ** 2))


def drawn_dispersions(sampler, draws, weights=None):
    """Log α at draws, from one chain of all copies."""
    often = None if weights is None else replicate_sparse(weights, COPIES)
    model = dfac.NegativeBinomialNMF(1, rate_w=1.0, rate_h=1.0)
    V, run = replicate_sparse(TALL, COPIES), {"random_seed": 3, "progressbar": False}
    data = dfac.as_blocks(V, 1, unstored="missing", dtype="f8", weights=often)
    trace = dfac.sample(data, model, sampler, draws, 200, executor="serial", **run)
    return np.asarray(np.log(trace["posterior"]["dispersion"].values[0]))


def error_of(x):
    """Standard error of a mean, from batches."""
    batches = x[: x.size // 30 * 30].reshape(30, -1).mean(axis=1)
    return float(batches.std(ddof=1) / np.sqrt(30))


CHAINS = [
    (dfac.BlockHMC(warm_start=5), 600),
    (dfac.HMC(warm_start=5), 600),
    (dfac.PSGLD(step=0.02, warm_start=5), 4000),
    (dfac.SGHMC(warm_start=5), 4000),
]


@pytest.mark.parametrize(
    ("sampler", "draws", "weights"),
    tiered(
        [*((*chain, None) for chain in CHAINS), (*CHAINS[0], TWICE)],
        lambda own: own[0].name not in ("HMC", "PSGLD"),
    ),
    ids=["BlockHMC", "HMC", "PSGLD", "SGHMC", "weights"],
)
def test_draws_of_the_dispersion_have_its_exact_posterior(sampler, draws, weights):
    x, (mean, sd) = drawn_dispersions(sampler, draws, weights), exact_dispersion(weights is TWICE)
    assert error_of(x) < 0.1 * sd, "too few draws for the tolerances to mean anything"
    assert abs(x.mean() - mean) < 5 * error_of(x) + (0.05 * sd if sampler.biased else 0)
    square = (x - mean) ** 2
    assert abs(square.mean() - sd**2) < 5 * error_of(square) + (
        0.1 * sd**2 if sampler.biased else 0
    )


def held_law(chain):
    """Another law than that of the present dispersion."""
    return chain.model.likelihood.at(4.0)[0]


def without_normalizer(rule, executor, dispersion):
    return 0.0


@pytest.mark.parametrize(
    ("place", "name", "bug"),
    [
        (TweedieChain, "law", property(held_law)),
        (LearntDispersion, "normalizer", without_normalizer),
    ],
    ids=["kernels keep the first dispersion", "no normaliser"],
)
def test_planted_bugs_are_seen(monkeypatch, place, name, bug):
    monkeypatch.setattr(place, name, bug)
    x, (mean, sd) = drawn_dispersions(dfac.BlockHMC(warm_start=5), 600), exact_dispersion()
    assert abs(x.mean() - mean) > 5 * error_of(x) + 0.3 * sd
