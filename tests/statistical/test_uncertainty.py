"""Uncertainties of cells against exact posteriors, and planted bugs that must not pass."""

from functools import cache

import numpy as np
import pytest
from scipy import special, stats

import daskfactor as dfac
from daskfactor.data import loading
from daskfactor.inference.block_hmc import BlockHMC
from daskfactor.inference.gibbs import Gibbs
from daskfactor.inference.langevin import PSGLD
from daskfactor.inference.sghmc import SGHMC
from daskfactor.kernels import blockwise
from daskfactor.kernels.views import Sums
from tests.inference.gaussian_reference import exact_one_component
from tests.statistical import exact
from tests.statistical.exact import Case
from tests.statistical.replicas import BY_NAME, Biased, Distance, distance, moments, run_tracks
from tests.tiers import tiered

pytestmark = pytest.mark.statistical
SIGMA = np.array([[0.4, 2.5, 1.0], [1.5, 0.6, 3.0]])
CASE = BY_NAME["gaussian-gaps"]._replace(
    name="uneven", V=np.array([[1.2, np.nan, 2.9], [2.1, 3.0, 0.4]]), rate_w=1.0
)
"""Against one dispersion for all cells the posterior means move by 0.3 to 0.9 of their sd."""


@cache
def exact_moments():
    """Moments of w_i h_j under exponential priors of rate 1, on a grid over H."""
    H, log_weight = exact._outer_grid(3, 1.0, exact.OUTER_NODES[3])
    rows = [
        exact._gaussian_row(v[seen], H[:, seen], 2.0, sigma[seen] ** 2, 1.0)
        for v, sigma, seen in zip(CASE.V, SIGMA, ~np.isnan(CASE.V), strict=True)
    ]
    p = special.softmax(log_weight + sum(log_z for log_z, _, _ in rows))
    mean = np.array([(p * first) @ H for _, first, _ in rows])
    square = np.array([(p * second) @ H**2 for _, _, second in rows])
    sum_w = sum(p @ first for _, first, _ in rows)
    return {"mean_mu": mean, "var_mu": square - mean**2, "sum_w": sum_w}


def found(sampler, kind=Distance, sigma=SIGMA, **settings):
    return distance(CASE, sampler, kind, exact_moments(), uncertainty=sigma, **settings)


@pytest.mark.parametrize("dense", tiered([False, True], lambda dense: not dense))
def test_rows_of_hamiltonian_paths(dense):
    copies = {"copies": 64, "draws": 600} if dense else {"copies": 512, "draws": 250}
    result = found(BlockHMC(warm_start=5), tune=100, dense=dense, **copies)
    assert result.error < 0.02
    assert result.passes, str(result)


class Near(Biased):
    """The tolerances of samplers with a step, of the observed cells: others have long tails."""

    def __init__(self, got, exact):
        super().__init__(got, exact)
        self.ratios = self.ratios[~np.isnan(CASE.V)]


def test_steps_of_a_finite_size():
    sampler = PSGLD(step=0.02, warm_start=5)
    result = found(sampler, Near, copies=1024, tune=500, draws=500)
    assert result.error < 0.05
    assert result.passes, str(result)


def unweighed_fit(block, kind, sums, *rest, **more):
    """The weight forgotten in the deviance."""
    right(block, kind, sums._replace(fits=()), *rest, **more)
    if any(own is not None for own in sums.fits):
        terms = tuple(None if own is None else np.zeros_like(own) for own in sums.terms)
        fits = Sums(terms, fits=sums.fits)
        right((block[0]._replace(weights=None), *block[1:]), kind, fits, *rest, **more)


right, right_weights = blockwise.accumulate, loading.weights_of


@pytest.mark.full
@pytest.mark.parametrize("bug", ["fit", "root", "none"])
def test_every_planted_bug_is_seen(bug, monkeypatch):
    sigma = SIGMA
    if bug == "fit":
        monkeypatch.setattr(blockwise, "accumulate", unweighed_fit)
    elif bug == "root":
        roots = lambda *given: np.sqrt(right_weights(*given))  # noqa: E731
        monkeypatch.setattr(loading, "weights_of", roots)  # 1 / sigma in place of 1 / sigma**2
    else:
        sigma = np.ones_like(SIGMA)
    settings = {"copies": 512, "tune": 100, "draws": 250}
    result = found(BlockHMC(warm_start=5), sigma=sigma, **settings)
    assert not result.passes, str(result)


@pytest.mark.parametrize(
    ("sampler", "draws"),
    tiered([(Gibbs(), 400), (SGHMC(step=0.004), 4000)], lambda own: own[1] == 400),
)
def test_real_valued_factors(sampler, draws):
    case = Case("signed", np.array([[1.4, -0.3], [np.nan, 2.2], [0.2, 0.9]]), 2.0)
    model = dfac.GaussianMF(1, noise=1.0, precision_w=1.2, precision_h=0.8, biases=False)
    run = {"copies": 48, "tune": 200, "draws": draws, "dense": True, "uncertainty": SIGMA.T}
    got = moments(*run_tracks(case, sampler, model=model, **run))
    mean, variance = exact_one_component(case.V, SIGMA.T**2, 1.2, 0.8, np.nanmean(case.V))
    assert (got.mean_error < 0.06 * np.sqrt(variance)).all()
    assert (np.abs(got.mean - mean) < 5 * got.mean_error).all()
    np.testing.assert_allclose(got.variance / variance, 1, atol=0.12)


@pytest.mark.parametrize(
    ("kind", "dispersion"), [("uncertainty", "auto"), ("uncertainty", 2.5), ("weights", 2.5)]
)
def test_densities_are_normalised(kind, dispersion):
    rng = np.random.default_rng(4)
    V, sigma = rng.normal(3, 1, (9, 8)), rng.uniform(0.3, 2, (9, 8))
    V[2, 3] = np.nan
    data = dfac.as_blocks(V, 2, dtype="float64", **{kind: sigma})
    options = {"draws": 4, "tune": 4, "progressbar": False, "random_seed": 0}
    for model in (
        dfac.TweedieNMF(2, beta=2, dispersion=dispersion, rate_w=1.0, rate_h=2.0),
        dfac.GaussianMF(2, noise=dispersion, precision_w=1.0, precision_h=2.0, biases=False),
    ):
        trace = dfac.sample(data, model, keep="draws", **options)
        post = trace["posterior"].to_dataset().isel(chain=0)
        W, H = post["W"].values, post["H"].values
        mu = W @ H  # the level is a column of theirs
        phi = 1.0 if dispersion == "auto" else dispersion
        if kind == "uncertainty":
            density = stats.norm.logpdf(V, mu, sigma * phi**0.5)
        else:
            density = sigma * stats.norm.logpdf(V, mu, phi**0.5)
        prior = np.zeros(len(W))
        for factor, rate in ((W[:, :, :2], 1.0), (H[:, :2], 2.0)):
            own = stats.expon(scale=1 / rate) if model.nonnegative else stats.norm(0, rate**-0.5)
            prior += own.logpdf(factor).sum(axis=(1, 2))
        wanted = np.nansum(density, axis=(1, 2)) + prior
        np.testing.assert_allclose(trace["sample_stats"]["lp"].values[0], wanted, rtol=1e-9)
