"""Frozen components through whole runs: kept to the bit by every verb, step and executor."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import ModelError
from tests.models.laws import log_density
from tests.refusals import refused

QUICK = {"draws": 6, "tune": 10, "random_seed": 3, "progressbar": False}
SAMPLERS = {
    "metric": dfac.PSGLD(),
    "plain": dfac.PSGLD(step=1e-4, preconditioner="identity"),
    "richardson": dfac.PSGRRLD(),
    "momentum": dfac.SGHMC(),
}
RNG = np.random.default_rng(0)
TRUE_W, TRUE_H = RNG.gamma(2, 1, (23, 3)), RNG.gamma(2, 1, (3, 17))
COUNTS = RNG.poisson(TRUE_W @ TRUE_H).astype(float)
PART = np.where(np.arange(2) == 1, TRUE_W[:, :2], np.nan)
"""The second component of W, the first being free."""
MODEL = dfac.TweedieNMF(3, fixed_w=PART, fixed_h=7 * TRUE_H[:1])


def single(values):
    return np.asarray(values, dtype=np.float32)


def assert_same(one, other):
    """Draws have the same bits."""
    one, other = (own["posterior"].to_dataset().compute() for own in (one, other))
    xr.testing.assert_equal(one, other)


def check(tree):
    """What is frozen has its bits, what is free has moved."""
    W, H = tree["W"].values, tree["H"].values
    draws = W[..., 1], H[..., 0, :]
    for got, known in zip(draws, (TRUE_W[:, 1], 7 * TRUE_H[0]), strict=True):
        np.testing.assert_array_equal(got, np.broadcast_to(single(known), got.shape))
    if W.ndim == 4:
        assert (np.ptp(W[..., [0, 2]], axis=1) > 0).all()
        assert (np.ptp(H[..., 1:, :], axis=1) > 0).all()


@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_hold_the_frozen_values(name):
    V = COUNTS.copy()
    V[3, 4] = np.nan
    tree = dfac.sample(V, MODEL, SAMPLERS[name], **QUICK, blocks=3)
    check(tree["posterior"])
    for executor in ("serial", "tasks") if name == "metric" else ("serial",):
        other = dfac.sample(V, MODEL, SAMPLERS[name], executor=executor, **QUICK, blocks=3)
        assert_same(tree, other)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_mean_of_a_known_factor_is_itself(name):
    tree = dfac.sample(COUNTS, dfac.TweedieNMF(3, fixed_w=TRUE_W), SAMPLERS[name], **QUICK)
    moments = tree["posterior_moments"]
    np.testing.assert_array_equal(moments["W_mean"].values[0], single(TRUE_W))
    np.testing.assert_array_equal(moments["W_var"].values, 0)
    assert (moments["H_var"].values > 0).all()


def test_rows_and_columns_that_were_permuted():
    """Balanced sparse data are in an order of their own; values are in the caller's."""
    V = COUNTS * (np.random.default_rng(1).random(COUNTS.shape) < 0.4)
    V[5] = COUNTS[5]
    model = replace(MODEL, dispersion=1.0)
    data = dfac.as_blocks(sparse.csr_array(V), 3, unstored="zero", balance=True)
    assert data.row_order is not None
    assert not np.array_equal(data.row_order, np.arange(23))
    run = QUICK | {"draws": 40}  # a row whose first paths are refused moves later
    check(dfac.sample(data, model, **run)["posterior"])
    data = dfac.as_blocks(sparse.csr_array(V), 3, unstored="missing", balance=True)
    check(dfac.optimize(data, model, dfac.DSGD(max_iter=4), random_seed=0, progressbar=False))


@pytest.mark.parametrize("method", [dfac.MultiplicativeUpdates(max_iter=80), dfac.DSGD()])
def test_point_estimates(method):
    options = {"random_seed": 0, "progressbar": False}
    fit = dfac.optimize(COUNTS, MODEL, method, **options)
    check(fit)
    values = fit["objective"].values
    assert values[-1] < values[0]
    known = dfac.TweedieNMF(3, fixed_w=TRUE_W, fixed_h=TRUE_H, dispersion=1.0)
    fit = dfac.optimize(COUNTS, known, method, **options)
    np.testing.assert_array_equal(fit["W"], single(TRUE_W))
    np.testing.assert_array_equal(fit["H"], single(TRUE_H))


def test_a_point_estimate_under_a_known_factor_is_the_mode():
    model = dfac.TweedieNMF(1, fixed_w=TRUE_W[:, :1], rate_h=0.5, shape_h=3.0, dispersion=1.0)
    fit = dfac.optimize(COUNTS, model, random_seed=0, progressbar=False)
    mode = (COUNTS.sum(axis=0) + 2.0) / (TRUE_W[:, 0].sum() + 0.5)
    np.testing.assert_allclose(fit["H"].values[0], mode, rtol=1e-5)


def test_lp_counts_the_free_entries_under_their_gamma_priors():
    prior = {"rate_w": 0.7, "rate_h": 0.4, "shape_w": 2.5, "shape_h": 0.8}
    model = dfac.TweedieNMF(3, **prior, fixed_w=PART, dispersion=1.0)
    tree = dfac.sample(COUNTS, model, dfac.PSGLD(), **QUICK, blocks=3)
    assert (tree.attrs["shape_w"], tree.attrs["shape_h"]) == (2.5, 0.8)
    W, H = tree["posterior"]["W"].values[0], tree["posterior"]["H"].values[0]
    np.testing.assert_array_equal(W[:, :, 1], np.broadcast_to(single(TRUE_W[:, 1]), (6, 23)))
    for draw in (0, 5):
        wanted = log_density(COUNTS, W[draw] @ H[draw], 1.0, 1.0).sum()
        free = W[draw][:, [0, 2]]
        plain = dfac.TweedieNMF(3, shape_w=2.5, shape_h=0.8)
        wanted += plain.log_prior(free, H[draw], 0.7, 0.4)
        assert tree["sample_stats"]["lp"].values[0, draw] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", ["metric", "plain"])
def test_a_stopped_run_goes_on(name, tmp_path):
    given, path = (COUNTS, MODEL, SAMPLERS[name]), tmp_path / "run.zarr"
    dfac.sample(*given, store=path, **QUICK)
    tree = dfac.resume(path, draws=3, progressbar=False)
    assert_same(tree, dfac.sample(*given, **QUICK | {"draws": 9}))
    assert '"fixed_w": [1]' in tree.attrs["model"]


def test_a_run_stopped_in_its_warm_start_begins_again(tmp_path):
    def press(event):
        if event.phase == "warm start":
            raise KeyboardInterrupt

    path = tmp_path / "run.zarr"
    stopped = {"store": path, "callback": press} | QUICK
    refused(KeyboardInterrupt, None, dfac.sample, COUNTS, MODEL, **stopped)
    tree = dfac.resume(path, progressbar=False)
    check(tree["posterior"].to_dataset().compute())
    assert_same(tree, dfac.sample(COUNTS, MODEL, **QUICK))


def test_values_of_other_data_are_refused_before_anything_is_written(tmp_path):
    path = tmp_path / "run.zarr"
    for verb in (lambda V: dfac.sample(V, MODEL, store=path), lambda V: dfac.optimize(V, MODEL)):
        refused(ModelError, "data's 22 rows", verb, COUNTS[:-1])
    assert not path.exists()
