"""Uncertainties of cells against exact posteriors, and planted bugs that must not pass."""

import numpy as np
import pytest
from scipy import stats

import daskfactor as dfac
from daskfactor.data import loading
from daskfactor.inference.block_hmc import BlockHMC
from daskfactor.inference.gibbs import Gibbs
from daskfactor.inference.hmc import HMC
from daskfactor.inference.langevin import PSGLD
from daskfactor.inference.sghmc import SGHMC
from daskfactor.kernels import blockwise
from tests.inference.gaussian_reference import block_copies, exact_one_component
from tests.statistical.replicas import BY_NAME, Biased, Distance, distance
from tests.tiers import tiered

pytestmark = pytest.mark.statistical
SIGMA = np.array([[0.4, 2.5, 1.0], [1.5, 0.6, 3.0]])
CASE = BY_NAME["gaussian-gaps"]._replace(
    name="uneven", V=np.array([[1.2, np.nan, 2.9], [2.1, 3.0, 0.4]]), rate_w=1.0
)
"""Against one dispersion for all cells the posterior means move by 0.3 to 0.9 of their sd."""


def exact_posterior(V, sigma):
    """Moments of w_i h_j under exponential priors of rate 1, by products of Gauss's nodes."""
    x, weight = np.polynomial.legendre.leggauss(90)
    w, dw = 3.0 * (1 + x) ** 2, 6.0 * (1 + x) * weight  # from 0 to 12, closer near 0
    h = np.stack(np.meshgrid(w, w, w, indexing="ij"), axis=-1).reshape(-1, 3)
    dh = np.stack(np.meshgrid(dw, dw, dw, indexing="ij"), axis=-1).reshape(-1, 3).prod(axis=1)
    rows = []
    for v, s in zip(V, sigma, strict=True):
        seen = ~np.isnan(v)
        log = np.zeros((len(h), w.size))
        for j in np.flatnonzero(seen):
            log -= 0.5 * ((v[j] - h[:, j, None] * w) / s[j]) ** 2
        density = np.exp(log - w) * dw
        rows.append([density @ w**power for power in range(3)])
    whole = dh * np.exp(-h.sum(axis=1))
    both = whole * rows[0][0] * rows[1][0]
    total = both.sum()
    first, second = np.empty(V.shape), np.empty(V.shape)
    for i, (zeroth, one, two) in enumerate(rows):
        first[i] = (both * one / zeroth) @ h / total
        second[i] = (both * two / zeroth) @ h**2 / total
    sum_w = sum((both * one / zeroth).sum() / total for zeroth, one, _ in rows)
    return {"mean_mu": first, "var_mu": second - first**2, "sum_w": sum_w}


EXACT = exact_posterior(CASE.V, SIGMA)


def found(sampler, kind=Distance, sigma=SIGMA, **settings):
    return distance(CASE, sampler, kind, EXACT, uncertainty=sigma, **settings)


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


@pytest.mark.parametrize(
    ("sampler", "settings"),
    tiered(
        [
            (PSGLD(step=0.02, warm_start=5), {"copies": 1024, "tune": 500, "draws": 500}),
            (HMC(warm_start=5), {"copies": 4, "tune": 400, "draws": 2000}),
        ],
        lambda own: own[0].name == "PSGLD",
    ),
    ids=["psgld", "hmc"],
)
def test_other_samplers(sampler, settings):
    result = found(sampler, Near, **settings)
    assert result.error < 0.05
    assert result.passes, str(result)


def unweighed_fit(*args):
    """The weight forgotten in the deviance."""
    view, *rest, (gradient, fits), work = args
    right_slope(view, *rest, (gradient, None), work)
    if fits is not None:
        right_slope(view._replace(weights=None), *rest, (np.zeros_like(gradient), fits), work)


right_slope, right_weights = blockwise.slope, loading.weights_of


@pytest.mark.full
@pytest.mark.parametrize("bug", ["fit", "root", "none"])
def test_every_planted_bug_is_seen(bug, monkeypatch):
    sigma = SIGMA
    if bug == "fit":
        monkeypatch.setattr(blockwise, "slope", unweighed_fit)
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
    V, sigma = np.array([[1.4, -0.3], [np.nan, 2.2], [0.2, 0.9]]), SIGMA.T
    copies = 48
    data = block_copies(V, copies, sigma)
    model = dfac.GaussianMF(1, precision_w=1.2, precision_h=0.8, biases=False)
    rows, cols = (at.ravel() for at in np.indices(V.shape))
    each = np.repeat(np.arange(copies), V.size)
    cells = np.tile(rows, copies) + 3 * each, np.tile(cols, copies) + 2 * each
    options = {"progressbar": False, "random_seed": 1, "keep": "moments"}
    trace = dfac.sample(data, model, sampler, draws, 200, monitor=cells, **options)
    assert trace.attrs["dispersion"] == 1
    group = trace["monitor"].to_dataset().isel(chain=0)
    means, variances = (group[name].values.reshape(copies, *V.shape) for name in ("mean", "var"))
    mean, variance = exact_one_component(V, sigma**2, 1.2, 0.8, data.mean)
    error = means.std(axis=0) / np.sqrt(copies)
    assert (error < 0.06 * np.sqrt(variance)).all()
    assert (np.abs(means.mean(axis=0) - mean) < 5 * error).all()
    spread = (variances + means**2).mean(axis=0) - means.mean(axis=0) ** 2
    np.testing.assert_allclose(spread / variance, 1, atol=0.12)


@pytest.mark.parametrize("dispersion", ["auto", 2.5])
@pytest.mark.parametrize("kind", ["uncertainty", "weights"])
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
        if kind == "weights" and dispersion == "auto":
            continue
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
