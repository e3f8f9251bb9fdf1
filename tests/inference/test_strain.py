"""A step that is too large for the data is told of, and only that."""

import warnings

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.errors import SamplingWarning
from daskfactor.inference import tweedie_chain


def notes():
    """A spectrogram of six notes one after the other: every block is of one or two of them."""
    rng = np.random.default_rng(0)
    W, H = rng.gamma(0.3, 1, (64, 6)), np.zeros((6, 80))
    for k in range(6):
        H[k, 12 * k : 12 * k + 16] = np.exp(-np.arange(16) / 5)
    return ((W @ H + 1e-3) * rng.gamma(50, 1 / 50, (64, 80))).astype(np.float32)


def draw(sampler, dispersion):
    run = {"draws": 40, "tune": 100, "random_seed": 0, "blocks": 8, "progressbar": False}
    model = dfac.TweedieNMF(6, dispersion=dispersion)
    dfac.sample(notes(), model, sampler, executor="serial", **run)


def test_a_chain_far_below_its_start_is_told_of():
    with pytest.warns(SamplingWarning, match=r"nats per parameter below that of the start"):
        draw(dfac.PSGLD(transition="euler"), 1e-4)


@pytest.mark.parametrize(
    ("sampler", "dispersion"),
    [(dfac.PSGLD(), 1e-4), (dfac.PSGLD(transition="euler"), 0.1), (dfac.LangevinDynamics(), 1e-4)],
)
def test_a_chain_that_samples_is_not(sampler, dispersion):
    with warnings.catch_warnings(action="error"):
        draw(sampler, dispersion)


@pytest.mark.parametrize(
    ("model", "sampler", "told"),
    [
        (dfac.TweedieNMF(6, dispersion=1.0), dfac.PSGLD(), True),
        (dfac.TweedieNMF(6, dispersion=1.0), dfac.PSGRRLD(), True),
        (dfac.TweedieNMF(6, dispersion=1.0), dfac.BlockHMC(), False),
        (dfac.NegativeBinomialNMF(6), dfac.PSGLD(), False),
    ],
    ids=["a step", "two steps", "no bias", "a law that moves"],
)
def test_a_fall_is_told_of_where_a_step_can_be_its_cause(model, sampler, told, monkeypatch):
    monkeypatch.setattr(tweedie_chain, "FALL", -1e9)  # below which everything is
    V = np.random.default_rng(0).poisson(notes() * 20).astype(np.float32)
    run = {"draws": 4, "tune": 4, "random_seed": 0, "progressbar": False}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        dfac.sample(V, model, sampler, **run)
    assert told == any("below that of the start" in str(each.message) for each in found)
