"""Runs whose log density still moves while they draw say so."""

import warnings

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.errors import SamplingWarning

QUIET = {"progressbar": False, "executor": "serial", "random_seed": 0, "blocks": 1}


def counts(mean):
    rng = np.random.default_rng(0)
    return rng.poisson(mean * rng.gamma(1, 1, (40, 3)) @ rng.gamma(1, 1, (3, 30)) / 3)


def test_a_run_without_tuning_from_a_random_start_is_told_to_tune(tmp_path):
    V, model = counts(50.0), dfac.TweedieNMF(3, dispersion=1.0)
    sampler = dfac.PSGLD(warm_start=0, step=0.02)
    with pytest.warns(SamplingWarning, match=r"log density still rose by .* tune longer"):
        tree = dfac.sample(V, model, sampler, 100, 0, store=tmp_path / "run.zarr", **QUIET)
    assert "still rose" in dfac.summarize(tree).verdict
    with warnings.catch_warnings(
        action="error"
    ):  # nothing is drawn, so there is nothing to say again
        dfac.resume(tmp_path / "run.zarr", progressbar=False)


def test_a_run_at_rest_is_not():
    with warnings.catch_warnings(action="error"):
        tree = dfac.sample(counts(3.0), dfac.TweedieNMF(3, dispersion=1.0), None, 300, 200, **QUIET)
    assert "log density still" not in dfac.summarize(tree).verdict
