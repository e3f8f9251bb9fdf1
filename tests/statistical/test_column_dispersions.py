"""Dispersions of two columns against their exact posterior, by quadrature."""

from functools import lru_cache

import numpy as np
import pytest
from scipy import special, stats

import daskfactor as dfac
from daskfactor.inference import dispersion, program
from daskfactor.inference.dispersion import ColumnDispersions
from daskfactor.inference.passes import fit_columns
from daskfactor.inference.program import DISPERSION
from daskfactor.models.rates import Common

pytestmark = pytest.mark.statistical

V = np.array([[0, 1], [0, 2], [9, 4], [1, 2], [25, 3], [0, 1], [6, 3], [0, 2]], np.float64)
"""The first column varies far more than the second: a dispersion of the other one is plain."""
W = np.array([0.5, 0.8, 2.0, 1.0, 1.0, 0.4, 1.5, 0.7])
"""Of one component, frozen: given the dispersions, the two entries of H are independent."""
DRAWS = 2000
normalizers = ColumnDispersions.normalizers


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
def exact():
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


def drawn(draws):
    model = dfac.NegativeBinomialNMF(1, dispersion="column", fixed_w=W[:, None], rate_h=1.0)
    run = {"tune": 100, "random_seed": 3, "executor": "serial", "progressbar": False}
    data, sampler = dfac.as_blocks(V, 1, dtype="f8"), dfac.BlockHMC(warm_start=5)
    trace = dfac.sample(data, model, sampler, draws=draws, **run)
    posterior = trace["posterior"]
    both = posterior["dispersion"].values[0], posterior["H"].values[0].reshape(draws, 2)
    return np.asarray(np.log(np.hstack(both)))


def errors(x):
    """Standard errors of means, from batches."""
    batches = x[: len(x) // 30 * 30].reshape(30, -1, x.shape[1]).mean(axis=1)
    return np.asarray(batches.std(axis=0, ddof=1) / np.sqrt(30))


def compared(x):
    """Dispersions, squares and product around exact means; both h and squares; what these are."""
    mean, covariance, moments = exact()
    gap, h = x[:, :2] - mean, x[:, 2:]
    found = np.column_stack([gap, gap**2, gap[:, :1] * gap[:, 1:], h, h**2])
    return found, np.array([0.0, 0.0, *np.diag(covariance), covariance[0, 1], *moments.ravel()])


def enough(found):
    """Whether there are draws enough for the tolerances to mean anything."""
    return bool(np.all(errors(found)[:2] < 0.1 * np.sqrt(np.diag(exact()[1]))))


def agrees(found, wanted):
    return bool(np.all(np.abs(found.mean(axis=0) - wanted) < 5 * errors(found)))


def test_draws_have_the_exact_posterior():
    found, wanted = compared(drawn(DRAWS))
    assert enough(found)
    assert agrees(found, wanted), (found.mean(axis=0) - wanted) / errors(found)


def apart(self, x):
    return self


def other_law(likelihood, block, columns):
    return likelihood.at(20.0)[0]


def another_law(likelihood, block, columns):
    return likelihood.at(columns.arrays[DISPERSION][::-1, 0].copy())[0]


def normalizers_of_others(self, executor, dispersions):
    return normalizers(self, executor, dispersions)[::-1]


def fits_of_others(*arguments):
    return fit_columns(*arguments)[::-1]


def sum_of_all(*arguments):
    found = fit_columns(*arguments)
    return np.full_like(found, found.sum())


def without(self, executor, dispersions):
    return np.zeros_like(dispersions)


BUGS = {
    "columns do not share": (Common, "given", apart),
    "kernels take another": (program, "law_of", other_law),
    "kernels take that of another column": (program, "law_of", another_law),
    "no normaliser": (ColumnDispersions, "normalizers", without),
    "the normaliser of another column": (ColumnDispersions, "normalizers", normalizers_of_others),
    "the fit of another column": (dispersion, "fit_columns", fits_of_others),
    "they hardly move": (dispersion, "WIDTH", 0.02),
}


@pytest.mark.filterwarnings("ignore::daskfactor.errors.SamplingWarning")
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(monkeypatch, bug):
    place, name, bug = BUGS[bug]
    monkeypatch.setattr(place, name, bug)
    if name == "law_of":
        monkeypatch.setattr("daskfactor.inference.block_hmc.law_of", bug)
    found, wanted = compared(drawn(DRAWS))
    assert not agrees(found, wanted)


def test_a_sum_over_all_columns_never_settles(monkeypatch):
    monkeypatch.setattr(dispersion, "fit_columns", sum_of_all)
    found, _ = compared(drawn(DRAWS))
    assert not enough(found)
