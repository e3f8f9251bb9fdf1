"""Log-linear rates in whole runs, against quadrature, and planted bugs that must not pass."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy import special

import daskfactor as dfac
from daskfactor.inference import priors
from daskfactor.results.diagnose import convergence
from tests.models.test_log_linear import NoJacobian

pytestmark = pytest.mark.statistical

NAN = np.nan
V = np.array([[6.0, 9.0], [0.0, 2.0], [NAN, NAN], [1.0, 0.0], [12.0, 8.0], [3.0, 4.0]])
X = np.array([[1.0], [-0.2], [0.8], [0.1], [1.4], [0.9]])
DRAWN = dfac.TweedieNMF(1, dispersion=1.0, rate_h=0.8, shape_w=1.4, covariates_w=X)
FIXED = replace(DRAWN, rate_w=0.6)
"""The same with a rate that is fixed: BlockHMC, which draws no scales, is slow without one."""


@cache
def exact(model):
    """Posterior means, on a grid of γ, log λ and log Σh; w, τ and the ratio of both h aside."""
    seen = ~np.isnan(V[:, 0])
    prior = model.hyperpriors(float(V[seen].mean()), (1.4, 1.0))[0]
    link = np.linspace(-5, 6, 221)[:, None, None]
    log_rate = np.linspace(-6, 5, 89)[None, :, None]
    if prior is None:
        log_rate = np.log(np.full((1, 1, 1), float(model.rate_w)))
    log_total = np.linspace(-1, 5, 81)[None, None, :]
    rate, total, first = np.exp(log_rate), np.exp(log_total), 1 / model.starting_ridges[0]
    # τ ~ Exponential(first) is summed over; a grid of logarithms has them as Jacobian.
    log_p = -1.5 * np.log(first + 0.5 * link**2)
    if prior is not None:
        log_p = log_p + prior.shape * log_rate - prior.rate * rate
    log_p = log_p + (np.nansum(V) + 2) * log_total - 0.8 * total
    found, means = [], []
    for x, counts in zip(X[:, 0], V.sum(axis=1), strict=True):
        own = rate * np.exp(-x * link)
        if np.isnan(counts):  # a row without data: log w, whose mean is always finite
            means.append(special.digamma(1.4) - np.log(own))
            continue
        log_p = log_p + 1.4 * np.log(own) - (counts + 1.4) * np.log(own + total)
        means.append((counts + 1.4) / (own + total) * total)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    found = {f"row {i}": float((p * mean).sum()) for i, mean in enumerate(means)}
    log_precision = special.digamma(1.5) - np.log(first + 0.5 * link**2)
    ends = {"link": link, "link squared": link**2, "log precision": log_precision}
    ends |= {"log rate": log_rate} if prior is not None else {}
    return found | {name: float((p * own).sum()) for name, own in ends.items()}


def z_scores(model, sampler, draws=1500):
    """How far the means of a run are from the exact ones, in standard errors by the ESS."""
    settings = {"random_seed": 4, "executor": "serial", "progressbar": False}
    tree = dfac.sample(V, model, sampler, draws, 200, 2, blocks=1, **settings)
    drawn = tree["posterior"].to_dataset()
    W, H = (drawn[name].values.astype(float) for name in "WH")
    series = {f"row {i}": W[:, :, i, 0] * H[:, :, 0].sum(axis=-1) for i in range(len(V))}
    series["row 2"] = np.log(W[:, :, 2, 0])
    link = drawn["link_w"].values[..., 0, 0].astype(float)
    series |= {"link": link, "link squared": link**2}
    if model is DRAWN:
        series["log rate"] = np.log(drawn["rate_w"].values[..., 0])
    series["log precision"] = np.log(drawn["link_precision_w"].values)
    wanted, found = exact(model), {}
    for name, values in series.items():
        worth = convergence(values)[1]
        assert worth > 100, (name, worth)
        found[name] = float((values.mean() - wanted[name]) / (values.std() / np.sqrt(worth)))
    return found


@pytest.mark.parametrize(
    ("model", "sampler"),
    [(DRAWN, dfac.Gibbs()), (FIXED, dfac.BlockHMC(steps=3))],
    ids=("drawn", "fixed"),
)
def test_exact_posteriors(model, sampler):
    z = z_scores(model, sampler)
    assert max(map(abs, z.values())) < 5, z


def test_a_wrong_jacobian_is_seen(monkeypatch):
    monkeypatch.setattr(priors, "LinkLaw", NoJacobian)
    z = z_scores(DRAWN, dfac.Gibbs(), 1000)
    assert max(map(abs, z.values())) > 5, z


def test_rates_of_a_former_link_are_seen(monkeypatch):
    monkeypatch.setattr(priors, "_tell_rows", lambda *given: None)
    z = z_scores(FIXED, dfac.Gibbs(), 200)
    assert max(map(abs, z.values())) > 5, z
