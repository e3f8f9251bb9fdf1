"""Learnt rates, shapes and links of rates against quadrature, and planted bugs."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy import special, stats

import daskfactor as dfac
from daskfactor.inference import priors
from daskfactor.inference.multiplicative import sum_entries
from daskfactor.kernels import langevin, variates
from daskfactor.models.rates import FLOOR, Totals, draw_positive
from daskfactor.results.diagnose import convergence
from tests.models.test_log_linear import NoJacobian

pytestmark = pytest.mark.statistical

V = np.array([[4.0, 7.0], [2.0, 5.0], [0.0, 1.0]])
"""Counts of three rows: b of the hyperpriors follows from their mean."""


def model(**settings):
    return dfac.TweedieNMF(1, dispersion=1.0, **settings)


def nodes(low, high, count):
    """Points in log x and log weights, the Jacobian among them."""
    t = np.linspace(np.log(low), np.log(high), count)
    return np.exp(t), t + np.log(t[1] - t[0])


def log_gamma(x, shape, rate):
    return shape * np.log(rate) - special.gammaln(shape) + (shape - 1.0) * np.log(x) - rate * x


@cache
def exact(law, shape_w=False):
    """Posterior means under K = 1 by summation over H, and over w given H row by row.
    ``rate_w="row"`` and ``rate_h`` fixed, or both by component; a learnt ``shape_w`` too. Twice as
    many points a side change the means by 1e-4 at most."""
    h, log_h = nodes(2e-2, 40.0, 31)
    first, second = (own.ravel() for own in np.meshgrid(h, h, indexing="ij"))
    weight = np.add.outer(log_h, log_h).ravel()
    total, data = first + second, special.xlogy(V[:, :1], first) + special.xlogy(V[:, 1:], second)
    a, log_a = nodes(0.03, 12.0, 31) if shape_w else (np.ones(1), np.zeros(1))
    log_p, means = [], []
    for shape, log_shape in zip(a, log_a, strict=True):
        shapes = (float(shape), 1.0)
        prior_w, prior_h = law.hyperpriors(V.mean(), shapes)
        assert prior_w is not None
        lam, log_lam = nodes(5e-3, 60.0, 61)
        log_lam = log_lam + log_gamma(lam, *prior_w)
        own = log_shape - shape if shape_w else 0.0
        counts = V.sum(axis=1)[:, None, None] + shape
        # p(v_i | h, λ) and E w_i, (rows, λ, h)
        slope = lam[:, None] + total
        rows = data[:, None] + special.gammaln(counts) - counts * np.log(slope)
        rows = rows + shape * np.log(lam)[:, None] - special.gammaln(shape)
        if prior_h is None:  # each row has its own rate
            at = law.rates_under(V.mean(), shapes)[1]
            of_h = log_gamma(first, 1.0, at) + log_gamma(second, 1.0, at)
            joint = rows + log_lam[:, None]
            log_p.append(special.logsumexp(joint, axis=1).sum(axis=0) + weight + of_h + own)
            inside = special.softmax(joint, axis=1)
            log_rate = (inside * np.log(lam)[:, None]).sum(axis=1).mean(axis=0)
        else:
            of_h = log_gamma(first, 1.0, lam[:, None]) + log_gamma(second, 1.0, lam[:, None])
            whole = rows.sum(axis=0) + log_lam[:, None] + weight + of_h
            log_p.append(special.logsumexp(whole, axis=0) + own)
            inside = special.softmax(whole, axis=0)
            log_rate = (inside * np.log(lam)[:, None]).sum(axis=0)
        mean_w = (inside * counts / slope).sum(axis=1)
        means.append((mean_w, log_rate, np.full(first.size, np.log(shape))))
    p = special.softmax(log_p)
    mean_w, *others = (np.array(own) for own in zip(*means, strict=True))
    rate, shape = (float((p * own).sum()) for own in others)
    found = {f"mu {i}": float((p * mean_w[:, i] * first).sum()) for i in range(3)}
    found |= {"log rate": rate, "sum w": float((p[:, None] * mean_w).sum())}
    return found | ({"log shape": shape} if shape_w else {})


def largest(series, wanted):
    """The largest difference of means from the exact ones, in standard errors by the ESS."""
    found = []
    for name, values in series.items():
        worth = convergence(values)[1]
        assert worth > 100, (name, worth)
        found.append(abs(values.mean() - wanted[name]) / (values.std() / np.sqrt(worth)))
    return max(found)


def z_scores(law, draws=1000):
    """How far the means of a run are from the exact ones, in standard errors by the ESS."""
    shape_w = law.shape_w == "auto"
    settings = {"random_seed": 2, "executor": "serial", "progressbar": False}
    tree = dfac.sample(V, law, dfac.Gibbs(), draws, 200, 2, blocks=1, **settings)
    posterior = tree["posterior"].to_dataset()
    W, H = (posterior[name].values.astype(float) for name in "WH")
    rate = posterior["rate_w" if "rate_w" in posterior else "rate"].values
    series = {f"mu {i}": W[:, :, i, 0] * H[:, :, 0, 0] for i in range(3)}
    series |= {"log rate": np.log(rate).mean(axis=-1), "sum w": W.sum(axis=(2, 3))}
    if shape_w:
        series["log shape"] = np.log(posterior["shape_w"].values)
    return largest(series, exact(law, shape_w))


BY_ROW = model(rate_w="row", rate_h=0.8)
SHARED = model(rate_w="component", rate_h="component")
SHAPED = model(rate_w="row", rate_h=0.8, shape_w="auto")


@pytest.mark.quick("shape")
@pytest.mark.parametrize("law", [BY_ROW, SHARED, SHAPED], ids=["rows", "shared", "shape"])
def test_exact_posteriors(law):
    assert z_scores(law) < 5


def no_count(shapes, totals):
    """The power of λ in the density of the factors left out."""
    return [0.5 * shape * own.entries for shape, own in zip(shapes, totals, strict=True)]


def of_log(density, shape, rng):
    """The density of log a taken for that of a."""
    return draw_positive(lambda a: density(a) - 2.0 * np.log(a), shape, rng)


@pytest.mark.full
@pytest.mark.parametrize(
    ("law", "name", "bug"),
    [
        (BY_ROW, "_weights", no_count),
        (SHARED, "_weights", no_count),
        (SHAPED, "draw_positive", of_log),
    ],
    ids=["rows", "shared", "shape"],
)
def test_planted_bugs_are_seen(law, name, bug, monkeypatch):
    monkeypatch.setattr(f"daskfactor.models.gamma_factors.{name}", bug)
    assert z_scores(law, 300) > 5


def spiked(shape, count, seed, dtype):
    """Entries of W at rate 1, (count, 1), as samplers write them: none below a smallest number."""
    rng = np.random.default_rng(seed)
    # θ = g u^(1/a) with g ~ Gamma(a + 1): in logarithms, which do not underflow.
    logs = np.log(rng.gamma(shape + 1.0, size=(count, 1))) + np.log(rng.random((count, 1))) / shape
    return np.maximum(np.exp(np.maximum(logs, -700.0)), variates.TINY[dtype]).astype(dtype)


def totals(W):
    """The sums of W as a chain has them, and of an H that says nothing of shapes."""
    own = sum_entries(W, None, logs=True, by_rows=False)
    ones = np.ones(1)
    first = Totals(W.size * ones, own.columns, own.logs, own.floored)
    return [first, Totals(0.0 * ones, 0.0 * ones)]


SPIKED = dfac.TweedieNMF(1, dispersion=1.0, rate_w=1.0, rate_h=1.0, shape_w="auto")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_entries_at_the_floor_have_the_probability_of_all_below(dtype):
    # No kernel writes what is below the floor but for double precision.
    assert variates.TINY["float32"] == langevin.SMALLEST == FLOOR > variates.TINY["float64"]
    W = spiked(0.02, 300, 0, dtype)
    above, law = W[np.dtype(dtype).type(FLOOR) < W].astype(float), stats.gamma
    assert 20 < W.size - above.size < 100
    shapes = np.array([0.02, 0.03, 0.1, 1.0])
    found = [SPIKED.log_marginal(1.0, (a, 1.0), totals(W)) for a in shapes]
    few = W.size - above.size
    wanted = [law.logpdf(above, a).sum() + few * law.logcdf(FLOOR, a) for a in shapes]
    np.testing.assert_allclose(np.diff(found), np.diff(wanted), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_shapes_of_entries_that_underflow(dtype):
    """Posteriors of 25 sets of 500 entries lie around the shape that made them. Taken for entries
    of 1e-37, those below put a shape of .03 two standard deviations too high."""
    rng, z, shape = np.random.default_rng(1), [], 0.03
    for seed in range(25):
        sums, a, drawn = totals(spiked(shape, 500, seed, dtype)), (shape, 1.0), []
        for _ in range(50):
            a = SPIKED.draw_shapes(1.0, a, sums, rng)
            drawn.append(a[0])
        z.append((np.mean(drawn) - shape) / np.std(drawn))
    assert abs(np.mean(z)) < 4.0 / np.sqrt(len(z))
    assert 0.6 < np.std(z) < 1.6


NAN = np.nan
LINKED_V = np.array([[6.0, 9.0], [0.0, 2.0], [NAN, NAN], [1.0, 0.0], [12.0, 8.0], [3.0, 4.0]])
LINKED_X = np.array([[1.0], [-0.2], [0.8], [0.1], [1.4], [0.9]])
DRAWN = dfac.TweedieNMF(1, dispersion=1.0, rate_h=0.8, shape_w=1.4, covariates_w=LINKED_X)
FIXED = replace(DRAWN, rate_w=0.6)
"""The same with a rate that is fixed: BlockHMC, which draws no scales, is slow without one."""


@cache
def exact_links(model):
    """Posterior means, on a grid of γ, log λ and log Σh; w, τ and the ratio of both h aside."""
    seen = ~np.isnan(LINKED_V[:, 0])
    prior = model.hyperpriors(float(LINKED_V[seen].mean()), (1.4, 1.0))[0]
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
    log_p = log_p + (np.nansum(LINKED_V) + 2) * log_total - 0.8 * total
    found, means = [], []
    for x, counts in zip(LINKED_X[:, 0], LINKED_V.sum(axis=1), strict=True):
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


def z_of_links(model, sampler, draws=1500):
    """How far the means of a run are from the exact ones, in standard errors by the ESS."""
    settings = {"random_seed": 4, "executor": "serial", "progressbar": False}
    tree = dfac.sample(LINKED_V, model, sampler, draws, 200, 2, blocks=1, **settings)
    drawn = tree["posterior"].to_dataset()
    W, H = (drawn[name].values.astype(float) for name in "WH")
    series = {f"row {i}": W[:, :, i, 0] * H[:, :, 0].sum(axis=-1) for i in range(len(LINKED_V))}
    series["row 2"] = np.log(W[:, :, 2, 0])
    link = drawn["link_w"].values[..., 0, 0].astype(float)
    series |= {"link": link, "link squared": link**2}
    if model is DRAWN:
        series["log rate"] = np.log(drawn["rate_w"].values[..., 0])
    series["log precision"] = np.log(drawn["link_precision_w"].values)
    return largest(series, exact_links(model))


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "sampler"),
    [(DRAWN, dfac.Gibbs()), (FIXED, dfac.BlockHMC(steps=3))],
    ids=("drawn", "fixed"),
)
def test_exact_posteriors_of_links(model, sampler):
    assert z_of_links(model, sampler) < 5


@pytest.mark.full
def test_a_wrong_jacobian_is_seen(monkeypatch):
    monkeypatch.setattr(priors, "LinkLaw", NoJacobian)
    assert z_of_links(DRAWN, dfac.Gibbs(), 1000) > 5


@pytest.mark.full
def test_rates_of_a_former_link_are_seen(monkeypatch):
    monkeypatch.setattr(priors, "_tell_rows", lambda *given: None)
    assert z_of_links(FIXED, dfac.Gibbs(), 200) > 5
