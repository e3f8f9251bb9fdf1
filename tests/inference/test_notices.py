"""What runs say by themselves: steps that are too large, runs that still move, devices."""

import warnings

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.errors import SamplingWarning
from daskfactor.inference import chain

QUIET = {"progressbar": False, "executor": "serial", "random_seed": 0, "blocks": 1}
V = np.random.default_rng(0).poisson(3.0, (12, 9)).astype("float32")
QUICK = {"tune": 4, "random_seed": 0, "progressbar": False}


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
    [
        (dfac.PSGLD(), 1e-4),
        (dfac.PSGLD(transition="euler"), 0.1),
        pytest.param(dfac.LangevinDynamics(), 1e-4, marks=pytest.mark.full),
    ],
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
    monkeypatch.setattr(chain, "FALL", -1e9)  # below which everything is
    V = np.random.default_rng(0).poisson(notes() * 20).astype(np.float32)
    run = {"draws": 4, "tune": 4, "random_seed": 0, "progressbar": False}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        dfac.sample(V, model, sampler, **run)
    assert told == any("below that of the start" in str(each.message) for each in found)


def poisson(mean):
    rng = np.random.default_rng(0)
    return rng.poisson(mean * rng.gamma(1, 1, (40, 3)) @ rng.gamma(1, 1, (3, 30)) / 3)


def test_a_run_without_tuning_from_a_random_start_is_told_to_tune(tmp_path):
    V, model = poisson(50.0), dfac.TweedieNMF(3, dispersion=1.0)
    sampler = dfac.PSGLD(warm_start=0, step=0.02)
    with pytest.warns(SamplingWarning, match=r"log density still rose by .* tune longer"):
        tree = dfac.sample(V, model, sampler, 100, 0, store=tmp_path / "run.zarr", **QUIET)
    assert "still rose" in dfac.summarize(tree).verdict
    with warnings.catch_warnings(action="error"):  # nothing is drawn, nor said again
        dfac.resume(tmp_path / "run.zarr", progressbar=False)


def test_a_run_at_rest_says_nothing():
    with warnings.catch_warnings(action="error"):
        model = dfac.TweedieNMF(3, dispersion=1.0)
        tree = dfac.sample(poisson(3.0), model, None, 300, 200, **QUIET)
    assert "log density still" not in dfac.summarize(tree).verdict


class OnGPU(dfac.SerialExecutor):
    """Works on a processor, and says that it was a GPU."""

    device = "cuda: NVIDIA H100 80GB HBM3"


def test_results_name_the_device_if_there_is_one():
    assert "device" not in dfac.sample(V, dfac.TweedieNMF(2), draws=4, **QUICK).attrs
    trace = dfac.sample(V, dfac.TweedieNMF(2), draws=4, executor=OnGPU(), **QUICK)
    assert trace.attrs["device"] == OnGPU.device
    quiet = {"random_seed": 0, "progressbar": False}
    point = dfac.optimize(V, dfac.TweedieNMF(2), executor=OnGPU(), **quiet)
    assert point.attrs["device"] == OnGPU.device


def test_a_resume_on_another_device_is_warned_of_and_noted(tmp_path):
    store = tmp_path / "run.zarr"
    dfac.sample(V, dfac.TweedieNMF(2), draws=4, executor=OnGPU(), store=store, **QUICK)
    with warnings.catch_warnings(action="error"):
        dfac.resume(store, progressbar=False)  # nothing is left to draw
        dfac.resume(store, draws=2, executor=OnGPU(), progressbar=False)
    with pytest.warns(SamplingWarning, match=r"goes on with processors: .* other bits"):
        trace = dfac.resume(store, draws=2, progressbar=False)
    assert trace.attrs["device"] == f"{OnGPU.device}; processors"
    with warnings.catch_warnings(action="error"):
        dfac.resume(store, draws=2, progressbar=False)
