"""Dispersions of counts, of all cells or of each column, against exact posteriors; planted bugs."""

from functools import lru_cache

import numpy as np
import pytest
from scipy import special, stats

import daskfactor as dfac
from daskfactor.inference.chain import Chain
from daskfactor.inference.dispersion import ColumnDispersions
from daskfactor.inference.passes import fit_columns
from daskfactor.inference.program import DISPERSION
from tests.statistical.replicas import replicate_sparse

pytestmark = pytest.mark.statistical

COPIES = 30
TALL = np.array([[4.0, 0.0], [0.0, 3.0], [9.0, 2.0], [1.0, 8.0], [5.0, 5.0], [2.0, 0.0]])
TWICE = np.array([[2.0, 1.0], [1.0, 0.5], [3.0, 1.0], [1.0, 2.0], [0.5, 1.0], [2.0, 2.0]])


@lru_cache
def exact_dispersion(weighed=False):
    """Mean and sd of log α given copies of a matrix: exp(-α) Z(α)^copies on a grid. Z integrates
    over both entries of H, and over the entry of W of each row in turn."""
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


def errors(x):
    """Standard errors of means, from batches."""
    batches = x[: len(x) // 30 * 30].reshape(30, -1, *x.shape[1:]).mean(axis=1)
    return batches.std(axis=0, ddof=1) / np.sqrt(30)


WARM = {"warm_start": 5}
ROWS = dfac.BlockHMC(**WARM)


@pytest.mark.quick("weights")
@pytest.mark.parametrize(
    ("sampler", "draws", "weights"),
    [
        (ROWS, 600, TWICE),
        (ROWS, 600, None),
        (dfac.PSGLD(step=0.02, **WARM), 4000, None),
        (dfac.SGHMC(**WARM), 4000, None),
    ],
    ids=["weights", "BlockHMC", "PSGLD", "SGHMC"],
)
def test_draws_of_the_dispersion_have_its_exact_posterior(sampler, draws, weights):
    x, (mean, sd) = drawn_dispersions(sampler, draws, weights), exact_dispersion(weights is TWICE)
    assert errors(x) < 0.1 * sd, "too few draws for the tolerances to mean anything"
    assert abs(x.mean() - mean) < 5 * errors(x) + (0.05 * sd if sampler.biased else 0)
    square = (x - mean) ** 2
    bias = 0.1 * sd**2 if sampler.biased else 0
    assert abs(square.mean() - sd**2) < 5 * errors(square) + bias


@pytest.mark.full
@pytest.mark.parametrize("weighed", [True, False], ids=["weights forgotten", "kernels keep one"])
def test_planted_bugs_are_seen(weighed, monkeypatch):
    if not weighed:  # kernels keep the first dispersion
        law = property(lambda chain: chain.model.likelihood.at(4.0)[0])
        monkeypatch.setattr(Chain, "law", law)
    x, (mean, sd) = drawn_dispersions(ROWS, 600), exact_dispersion(weighed)
    assert abs(x.mean() - mean) > 5 * errors(x) + 0.3 * sd


V = np.array([[0, 1], [0, 2], [9, 4], [1, 2], [25, 3], [0, 1], [6, 3], [0, 2]], np.float64)
"""The first column varies far more than the second: a dispersion of the other one is plain."""

W = np.array([0.5, 0.8, 2.0, 1.0, 1.0, 0.4, 1.5, 0.7])
"""Of one component, frozen: given the dispersions, the two entries of H are independent."""


def log_prior(x):
    """Log p(x_1, x_2) on a grid, m and s integrated out numerically: (x, x)."""
    m, log_s2 = np.linspace(-12.0, 12.0, 241)[:, None], np.linspace(-3.5, 4.0, 151)
    s2 = np.exp(log_s2)
    outer = stats.invgamma.logpdf(s2, 2, scale=1.0) + log_s2 + np.log(m[1] - m[0])
    outer = outer + stats.norm.logpdf(m, -0.58, np.sqrt(s2)) + np.log(log_s2[1] - log_s2[0])
    each = stats.norm.pdf(x[:, None, None], m, np.sqrt(s2))
    found = (each * np.exp(outer)).reshape(x.size, -1) @ each.reshape(x.size, -1).T
    return np.asarray(np.log(found))


@lru_cache
def exact_of_columns():
    """Means and covariance of log α_1 and log α_2; first and second moments of
    log h_1 and log h_2."""
    x, y = np.linspace(-9.0, 5.0, 113), np.linspace(-6.0, 5.0, 200)
    alpha, h = np.exp(x)[:, None], np.exp(y)
    log_density, conditional = log_prior(x), []
    for column, axis in ((0, 1), (1, 0)):
        total = y - h + np.zeros_like(alpha)  # of the logarithm of an Exponential(1) number
        for v, w in zip(V[:, column], W, strict=True):
            total = total + stats.nbinom.logpmf(v, 1 / alpha, 1 / (1 + alpha * w * h))
        log_density = log_density + np.expand_dims(special.logsumexp(total, axis=1), axis)
        conditional.append(special.softmax(total, axis=1) @ np.stack([y, y**2], axis=1))
    weight = np.exp(log_density - special.logsumexp(log_density))
    grid = np.stack(np.meshgrid(x, x, indexing="ij")).reshape(2, -1)
    mean = grid @ weight.ravel()
    gap = grid - mean[:, None]
    each = [weight.sum(axis=1 - own) @ moments for own, moments in enumerate(conditional)]
    return mean, gap * weight.ravel() @ gap.T, np.array(each).T


def test_the_prior_of_all_is_what_its_integral_says():
    x = np.array([-3.0, -1.0, 0.4])
    wanted = log_prior(x)
    for i, j in ((0, 1), (2, 2), (1, 2)):
        found = ColumnDispersions.prior.log_marginal(x[[i, j]])
        assert found == pytest.approx(wanted[i, j], abs=2e-3)


def compared():
    """Of draws, dispersions, squares and product around exact means, both h and squares; what the
    means of all these are."""
    model = dfac.NegativeBinomialNMF(1, dispersion="column", fixed_w=W[:, None], rate_h=1.0)
    run = {"random_seed": 3, "executor": "serial", "progressbar": False}
    trace = dfac.sample(dfac.as_blocks(V, 1, dtype="f8"), model, ROWS, 2000, 100, **run)
    drawn = trace["posterior"].to_dataset().isel(chain=0)
    x, h = np.log(drawn["dispersion"].values), np.log(drawn["H"].values[:, 0])
    mean, covariance, moments = exact_of_columns()
    gap = x - mean
    found = np.column_stack([gap, gap**2, gap[:, :1] * gap[:, 1:], h, h**2])
    return found, np.array([0.0, 0.0, *np.diag(covariance), covariance[0, 1], *moments.ravel()])


def enough(found):
    """Whether there are draws enough for the tolerances to mean anything."""
    return bool(np.all(errors(found)[:2] < 0.1 * np.sqrt(np.diag(exact_of_columns()[1]))))


def agrees(found, wanted):
    return bool(np.all(np.abs(found.mean(axis=0) - wanted) < 5 * errors(found)))


@pytest.mark.full
def test_dispersions_of_columns_have_their_exact_posterior():
    found, wanted = compared()
    assert enough(found)
    assert agrees(found, wanted), (found.mean(axis=0) - wanted) / errors(found)


def law_of_another(law, _, columns):
    return law.at(columns.arrays[DISPERSION][::-1, 0].copy())[0]


normalizers = ColumnDispersions.normalizers
FIT = "inference.dispersion.fit_columns"
OF_COLUMNS = "inference.dispersion.ColumnDispersions.normalizers"
BUGS = {
    "columns do not share": ("models.rates.Common.posterior", lambda self, x: self),
    "kernels take another": ("inference.block_hmc.law_of", lambda law, *_: law.at(20.0)[0]),
    "kernels take that of another column": ("inference.block_hmc.law_of", law_of_another),
    "no normaliser": (OF_COLUMNS, lambda *given: np.zeros_like(given[-1])),
    "the normaliser of another column": (OF_COLUMNS, lambda *given: normalizers(*given)[::-1]),
    "the fit of another": (FIT, lambda *given: fit_columns(*given)[::-1]),
    "they hardly move": ("inference.dispersion.WIDTH", 0.02),
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::daskfactor.errors.SamplingWarning")
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_of_columns_are_seen(monkeypatch, bug):
    place, wrong = BUGS[bug]
    monkeypatch.setattr(f"daskfactor.{place}", wrong)
    assert not agrees(*compared())


@pytest.mark.full
def test_a_sum_over_all_columns_never_settles(monkeypatch):
    sums = lambda *given: np.full_like(V[0], fit_columns(*given).sum())  # noqa: E731
    monkeypatch.setattr(f"daskfactor.{FIT}", sums)
    assert not enough(compared()[0])
