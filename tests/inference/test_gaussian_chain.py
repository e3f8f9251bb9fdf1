"""Runs of real-valued models: extended, split, and with a noise of any size."""

import numpy as np
import pytest

import daskfactor as dfac


def matrix(noise=0.5):
    rng = np.random.default_rng(0)
    mean = rng.normal(size=(40, 2)) @ rng.normal(size=(2, 30))
    return (mean + noise * rng.normal(size=mean.shape)).astype(np.float32)


def test_an_extended_run_has_the_draws_of_one_in_one_go(tmp_path):
    """Also where a segment ends between two draws of the hyperparameters."""
    model, settings = dfac.GaussianMF(2), {"random_seed": 1, "progressbar": False, "blocks": 2}
    store = tmp_path / "run.zarr"
    dfac.sample(matrix(), model, draws=15, tune=22, store=store, **settings)
    extended = dfac.resume(store, draws=18, progressbar=False)
    whole = dfac.sample(matrix(), model, draws=33, tune=22, **settings)
    for name in ("W", "H"):
        np.testing.assert_array_equal(
            extended["posterior"][name].values, whole["posterior"][name].values
        )
    assert extended.attrs["dispersion"] == whole.attrs["dispersion"]


@pytest.mark.parametrize("noise", [1e-3, 1e-4])
def test_a_fixed_noise_far_below_the_variance_is_no_divergence(noise):
    trace = dfac.sample(
        matrix(noise**0.5),
        dfac.GaussianMF(2, noise=noise),
        draws=20,
        tune=200,
        random_seed=0,
        blocks=2,
        progressbar=False,
    )
    assert trace.attrs["divergences"] == 0
    assert trace.attrs["dispersion"] == pytest.approx(noise)
