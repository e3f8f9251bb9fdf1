"""The scale that W and H of a component share: its conditional, and what it leaves invariant."""

import numpy as np
import pytest
from scipy import stats

import daskfactor as dfac
from daskfactor.inference import gamma_parameters
from daskfactor.models.rates import draw_scales
from daskfactor.results.diagnose import effective_size
from tests.inference.gaussian_reference import chain_of
from tests.tiers import tiered

pytestmark = pytest.mark.statistical

COPIES = 4000
MODEL = dfac.TweedieNMF(COPIES, dispersion=1.0, rate_w=0.5, rate_h=3.0, shape_w=2.0, shape_h=0.8)
"""Components that know nothing of each other are so many copies of one."""


@pytest.mark.parametrize(
    ("power", "rise", "fall"),
    [(0.0, 1.0, 1.0), (-7.0, 0.5, 9.0), (10.0, 3.0, 2.5), (0.3, 1e-3, 1e-2), (50.0, 120.0, 90.0)],
)
def test_scales_follow_a_generalised_inverse_gaussian_law(power, rise, fall):
    uniform = np.array([1e-4, 0.01, 0.1, 0.5, 0.9, 0.99, 0.9999])
    scales = draw_scales(power, np.full(7, rise), np.full(7, fall), uniform)
    law = stats.geninvgauss(power, 2 * np.sqrt(rise * fall), scale=np.sqrt(fall / rise))
    np.testing.assert_allclose(law.cdf(scales), uniform, atol=1e-4)
    # Tall data have their scale where the prior puts it.
    scales = draw_scales(2969.0, np.full(3, 2000.0), np.full(3, 15.0), np.array([0.1, 0.5, 0.9]))
    wanted = 2969.0 / 2000.0 * np.exp(np.array([-1.2816, 0.0, 1.2816]) / np.sqrt(2969.0))
    np.testing.assert_allclose(scales, wanted, rtol=0.01)


def moved(rng):
    """Factors of 3 x 2 data from their priors, (length, COPIES), and where the move takes them."""
    with dfac.as_blocks(np.ones((3, 2)), 1, dtype="float64") as data:
        made = chain_of(data, MODEL, dfac.Gibbs(0))
        made.start()
        run = made.tracks[0]
        before = []
        for factor, band in enumerate(run.state.bands()):
            rate, shape = made.hyper.prior(factor)
            band.values[:] = rng.gamma(shape, 1 / rate, band.values.shape)
            before.append(band.values.copy())
        made.update(run.state, run.cycle)
        return before, [band.values for band in run.state.bands()]


def worst_shift():
    """How far moments of the moved factors are from the priors', in standard errors."""
    (W, H), (new_w, new_h) = moved(np.random.default_rng(1))
    np.testing.assert_allclose(new_w[0] * new_h[1], W[0] * H[1], rtol=1e-12)
    assert np.corrcoef(np.log(W.sum(axis=0)), np.log(new_w.sum(axis=0)))[0, 1] < 0.7
    found = []
    for values, (rate, shape) in zip((new_w, new_h), ((0.5, 2.0), (3.0, 0.8)), strict=True):
        law = stats.gamma(shape, scale=1 / rate)
        logs = stats.loggamma(shape)
        for own, mean, sd in (
            (values[0], law.mean(), law.std()),
            (np.log(values[0] * rate), logs.mean(), logs.std()),
            (values.sum(axis=0), len(values) * law.mean(), np.sqrt(len(values)) * law.std()),
        ):
            found.append((own.mean() - mean) / (sd / np.sqrt(COPIES)))
    return float(np.abs(found).max())


def test_the_priors_are_invariant():
    assert worst_shift() < 5


@pytest.mark.full
@pytest.mark.parametrize("volume", [-1.0, 1.0], ids=["of the priors alone", "twice"])
def test_another_volume_is_seen(volume, monkeypatch):
    """c^(I - J) left out, or taken twice."""

    def wrong(power, *given):
        return draw_scales(power + volume * (3 - 2), *given)

    monkeypatch.setattr(gamma_parameters, "draw_scales", wrong)
    assert worst_shift() > 5


def test_the_metric_stays_when_scales_move():
    V = np.random.default_rng(5).poisson(1.0, (20, 15)).astype(float)
    with dfac.as_blocks(V, 2, dtype="float64") as data:
        model = dfac.TweedieNMF(2, dispersion=1.0)
        made = chain_of(data, model, dfac.PSGLD(0.5, transition="euler"), tune=100, draws=200)
        made.start()
        made.advance(100)
        state = made.tracks[0].state
        before = [band.arrays["metric"].copy() for band in state.bands()]
        made.advance(300)
        for band, metric in zip(made.tracks[0].state.bands(), before, strict=True):
            np.testing.assert_array_equal(band.arrays["metric"], metric)


POISSON = dfac.TweedieNMF(2, dispersion=1.0)
BY_ROW = dfac.TweedieNMF(2, dispersion=1.0, rate_w="row", rate_h="column")
LINKS = np.random.default_rng(9).normal(size=(40, 1))
MIXED = {
    "BlockHMC": (POISSON, dfac.BlockHMC()),
    "BlockHMC, rates of rows": (BY_ROW, dfac.BlockHMC()),
    "BlockHMC, negative binomial": (dfac.NegativeBinomialNMF(2), dfac.BlockHMC()),
    "Gibbs": (POISSON, dfac.Gibbs()),
    "SGHMC": (POISSON, dfac.SGHMC()),
    "PSGLD": (POISSON, dfac.PSGLD()),
    "Gibbs, real-valued": (dfac.GaussianMF(1, biases=False), dfac.Gibbs()),
    "Gibbs, biases": (dfac.GaussianMF(1), dfac.Gibbs()),
    "Gibbs, covariates": (dfac.GaussianMF(1, covariates_w=LINKS), dfac.Gibbs()),
    "SGHMC, biases": (dfac.GaussianMF(1), dfac.SGHMC()),
}
"""Data from these say much of W H, and nothing of the sizes and levels that W and H share."""


def times_to_forget(model, sampler):
    """Autocorrelation times of sizes and levels, in draws."""
    rng = np.random.default_rng(7)
    if model.nonnegative:
        W, H = rng.gamma(1.0, 7.0, (40, 2)), rng.gamma(1.0, 7.0, (2, 30))
        V = rng.poisson(W @ H).astype(float)
    else:
        V = rng.normal(size=(40, 1)) * rng.normal(size=30) + rng.normal(2.0, 1.0, (40, 1))
        V += rng.normal(0.0, 0.2, V.shape)
    run = {"progressbar": False, "executor": "serial", "random_seed": 1}
    trace = dfac.sample(V, model, sampler, draws=800, tune=300, blocks=1, **run)
    W, H = (trace["posterior"][name].values[0] for name in "WH")
    K = model.n_components
    found = {f"size of W {k}": np.log(np.square(W[:, :, k]).sum(axis=1)) for k in range(K)}
    found |= {f"size of H {k}": np.log(np.square(H[:, k]).sum(axis=1)) for k in range(K)}
    if getattr(model, "biases", False):
        found |= {"biases of rows": W[:, :, K].mean(axis=1)}
        found |= {"biases of columns": H[:, K + 1].mean(axis=1)}
        found |= {"level of W": W[:, :, 0].mean(axis=1), "level of H": H[:, 0].mean(axis=1)}
    return {name: len(own) / float(effective_size(own[None])) for name, own in found.items()}


@pytest.mark.parametrize("name", tiered(MIXED, {"BlockHMC", "SGHMC", "Gibbs, biases"}.__contains__))
def test_sizes_and_levels_of_factors_are_forgotten(name):
    """Held by the priors alone, they took hundreds of draws of most of these samplers."""
    times = times_to_forget(*MIXED[name])
    assert max(times.values()) < 60, times


@pytest.mark.full
@pytest.mark.parametrize("name", ["BlockHMC", "SGHMC"])
def test_a_sampler_that_does_not_draw_the_scale_is_seen(name, monkeypatch):
    model, sampler = MIXED[name]
    monkeypatch.setattr(type(sampler.kernel(model)), "rescales_every", None)
    times = times_to_forget(model, sampler)
    assert max(times.values()) > 60, times
