"""The scale that W and H of a component share: its conditional, and what it leaves invariant."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

import daskfactor as dfac
from daskfactor.executors import SerialExecutor
from daskfactor.inference import tweedie_chain
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.models.rates import draw_scales

pytestmark = pytest.mark.statistical

Array = NDArray[Any]
COPIES = 4000
MODEL = dfac.TweedieNMF(COPIES, dispersion=1.0, rate_w=0.5, rate_h=3.0, shape_w=2.0, shape_h=0.8)
"""Components that know nothing of each other are so many copies of one."""


@pytest.mark.parametrize(
    ("power", "rise", "fall"),
    [(0.0, 1.0, 1.0), (-7.0, 0.5, 9.0), (10.0, 3.0, 2.5), (0.3, 1e-3, 1e-2), (50.0, 120.0, 90.0)],
)
def test_scales_follow_a_generalised_inverse_gaussian_law(
    power: float, rise: float, fall: float
) -> None:
    uniform = np.array([1e-4, 0.01, 0.1, 0.5, 0.9, 0.99, 0.9999])
    scales = draw_scales(power, np.full(7, rise), np.full(7, fall), uniform)
    law = stats.geninvgauss(power, 2 * np.sqrt(rise * fall), scale=np.sqrt(fall / rise))
    np.testing.assert_allclose(law.cdf(scales), uniform, atol=1e-4)


def test_tall_data_have_their_scale_where_the_prior_puts_it() -> None:
    scales = draw_scales(2969.0, np.full(3, 2000.0), np.full(3, 15.0), np.array([0.1, 0.5, 0.9]))
    wanted = 2969.0 / 2000.0 * np.exp(np.array([-1.2816, 0.0, 1.2816]) / np.sqrt(2969.0))
    np.testing.assert_allclose(scales, wanted, rtol=0.01)


def moved(rng: np.random.Generator) -> tuple[list[Array], list[Array]]:
    """Factors of 3 x 2 data from their priors, (length, COPIES), and where the move takes them."""
    with dfac.as_blocks(np.ones((3, 2)), 1, dtype="float64") as data:
        options, sampler = RunOptions(1, 0, 1, 1, 0, "moments", 0, "float64"), dfac.Gibbs(0)
        setting = Setting(data, MODEL, sampler, options, SerialExecutor())
        made: Any = sampler.chain(setting, 0)
        made.start()
        run = made.tracks[0]
        before = []
        for factor, band in enumerate(run.state.bands()):
            rate, shape = made.hyper.prior(factor)
            band.values[:] = rng.gamma(shape, 1 / rate, band.values.shape)
            before.append(band.values.copy())
        made._rescale(run)
        return before, [band.values for band in run.state.bands()]


def worst_shift() -> float:
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


def test_the_priors_are_invariant() -> None:
    assert worst_shift() < 5


@pytest.mark.parametrize("volume", [-1.0, 1.0], ids=["of the priors alone", "twice"])
def test_another_volume_is_seen(volume: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """c^(I - J) left out, or taken twice."""

    def wrong(power: float, *given: Any) -> Array:
        return draw_scales(power + volume * (3 - 2), *given)

    monkeypatch.setattr(tweedie_chain, "draw_scales", wrong)
    assert worst_shift() > 5


def test_the_metric_stays_with_the_scale() -> None:
    """After a thousand cycles of a large step it has gone wherever the factors went."""
    V = np.random.default_rng(5).poisson(1.0, (20, 15)).astype(float)
    sampler, model = dfac.PSGLD(0.5, transition="euler"), dfac.TweedieNMF(2, dispersion=1.0)
    with dfac.as_blocks(V, 2, dtype="float64") as data:
        options = RunOptions(1000, 100, 1, 1, 0, "moments", 0, "float64")
        made: Any = sampler.chain(Setting(data, model, sampler, options, SerialExecutor()), 0)
        made.start()
        found = []
        for end in (100, 1100):
            made.advance(end)
            state, rate = made.tracks[0].state, made.hyper.rate_w
            ratios = [
                np.log((state.gather("rows", name) - less).sum(axis=0))
                - np.log((state.gather("columns", name) - less).sum(axis=0))
                for name, less in ((None, 0.0), ("metric", rate))
            ]
            found.append(sum(ratios))
            made.forget()
    np.testing.assert_allclose(found[1], found[0], atol=1e-3)
