"""Results say on which device they were made, and what a run went on with."""

import warnings

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.errors import SamplingWarning

V = np.random.default_rng(0).poisson(3.0, (12, 9)).astype("float32")
QUICK = {"tune": 4, "random_seed": 0, "progressbar": False}


class OnGPU(dfac.SerialExecutor):
    """Works on a processor, and says that it was a GPU."""

    device = "cuda: NVIDIA H100 80GB HBM3"


def test_results_of_processors_name_no_device():
    trace = dfac.sample(V, dfac.TweedieNMF(2), draws=4, **QUICK)
    assert "device" not in trace.attrs


def test_results_name_the_device():
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
