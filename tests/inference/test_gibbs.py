"""Gibbs through `sample`: executors, precisions, resuming, refusals, frozen components."""

import json
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import DataError, ModelError
from daskfactor.executors import SerialExecutor
from daskfactor.inference.gibbs import Gibbs
from daskfactor.inference.setting import RunOptions, Setting
from tests.executors.audit import AuditExecutor
from tests.refusals import refused

QUIET = {"progressbar": False, "random_seed": 5}


def counts(shape=(23, 17), K=3, missing=0.0):
    rng = np.random.default_rng(1)
    W, H = rng.gamma(0.7, 2.0, (shape[0], K)), rng.gamma(0.7, 2.0, (K, shape[1]))
    V = rng.poisson(W @ H).astype(np.float64)
    V[rng.random(shape) < missing] = np.nan
    return V


def drawn(V, sampler=None, **options):
    settings = {"draws": 6, "tune": 3, **QUIET, **options}
    model = settings.pop("model", dfac.TweedieNMF(2))  # sparse kernels that others compile, too
    reading = {"dtype": "float64", "unstored": settings.pop("unstored", None)}
    reading |= {name: settings.pop(name) for name in ("dtype", "allow_empty") if name in settings}
    data = dfac.as_blocks(V, settings.pop("blocks", 3), **reading)
    return dfac.sample(data, model, sampler or dfac.Gibbs(warm_start=3), **settings)


def factors(trace):
    return trace["posterior"]["W"].values, trace["posterior"]["H"].values


def same(one, other):
    for a, b in zip(factors(one), factors(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["counts", "real-valued"])
def test_every_executor_draws_the_same_bits(kind, dtype):
    V, options = counts(missing=0.1), {"dtype": dtype, "chains": 2}
    if kind == "real-valued":
        V, options = signed(), options | {"model": REAL}
    one = drawn(V, executor="serial", **options)
    same(one, drawn(V, executor=AuditExecutor(), **options))
    W, H = factors(one)
    assert W.dtype == dtype
    if kind == "counts":
        assert min(W.min(), H.min()) > 0
        assert not (W[0] == W[1]).any()
        assert not (W[:, 1:] == W[:, :-1]).any()


def close(one, other):
    for a, b in zip(factors(one), factors(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_sparse_and_dense_inputs_agree():
    """But for the rounding of the warm start."""
    V = counts()
    stored = drawn(sparse.csr_array(V), unstored="zero")
    close(drawn(V), stored)


def test_what_is_not_stored_may_be_missing():
    V = counts()
    V[V == 0] = np.nan
    stored = sparse.csr_array(np.nan_to_num(V))
    close(drawn(V), drawn(stored, unstored="missing"))


def test_the_grid_changes_rounding_alone():
    """S is drawn cell by cell and by cycle: another grid gives other sums of floats only."""
    V = counts()
    close(drawn(V, blocks=1), drawn(V, blocks=4))


def test_results_say_that_the_dispersion_is_one():
    trace = drawn(3 * counts())  # overdispersed: PSGLD would estimate it
    assert trace.attrs["dispersion"] == 1.0
    assert json.loads(trace.attrs["sampler"])["type"] == "Gibbs"
    assert (trace["sample_stats"]["step_size"].values == 1).all()
    lp = trace["sample_stats"]["lp"].values
    assert np.isfinite(lp).all()


REFUSED = [
    ({"beta": 2.0}, 1.0, ModelError, r"beta=1, and the model has beta=2; use PSGLD"),
    ({"dispersion": 2.5}, 1.0, ModelError, r"dispersion=2\.5; leave it at"),
    ({}, 0.5, DataError, r"whole numbers, got data with fractions"),
    ({}, 2.0**31, DataError, r"up to 2\*\*31, got one of"),
]


@pytest.mark.parametrize(("settings", "scale", "error", "message"), REFUSED)
def test_refusals(settings, scale, error, message):
    refused(error, message, drawn, scale * counts(), model=dfac.TweedieNMF(3, **settings))


def test_tempered_posteriors_are_refused():
    model, sampler = dfac.TweedieNMF(2), Gibbs(warm_start=1)
    options = RunOptions(2, 2, 1, 1, 0, "draws", 1, "float32")
    with dfac.as_blocks(counts(), 2) as data:
        setting = Setting(data, model, sampler, options, SerialExecutor(), temperature=0.5)
        chain = sampler.chain(setting, 0)
        chain.start()
        refused(ModelError, "use PSGLD", chain.advance, 2)
        chain = sampler.chain(replace(setting, temperature=1.0), 0)
        chain.start()
        chain.advance(2)


def test_frozen_components_do_not_move():
    V = counts()
    rng = np.random.default_rng(2)
    known = rng.gamma(1.0, size=(1, V.shape[1]))
    trace = drawn(V, model=dfac.TweedieNMF(3, fixed_h=known))
    W, H = factors(trace)
    assert (H[0, :, 0] == known[0]).all()
    assert not (H[0, 1:, 1:] == H[0, :-1, 1:]).any()
    assert not (W[0, 1:] == W[0, :-1]).any()


def test_empty_rows_come_from_the_prior():
    V = counts((40, 12))
    V[3:] = np.nan
    model = dfac.TweedieNMF(3, rate_w=2.0, rate_h=1.0)
    trace = drawn(V, model=model, draws=200, allow_empty=True)
    free = factors(trace)[0][0, :, 3:]
    assert abs(free.mean() * 2.0 - 1) < 5 / np.sqrt(free.size)


# -- real-valued models --------------------------------------------------------------------

REAL = dfac.GaussianMF(3)


def signed(missing=0.3):
    rng = np.random.default_rng(4)
    V = rng.normal(size=(23, 3)) @ rng.normal(size=(3, 17)) + rng.normal(size=17)
    V += 0.3 * rng.normal(size=V.shape)
    V[rng.random(V.shape) < missing] = np.nan
    return V


def test_real_valued_gaps_are_entries_that_are_not_stored():
    V = signed()
    seen = ~np.isnan(V)
    table = sparse.csr_array((V[seen], np.nonzero(seen)), shape=V.shape)
    close(drawn(V, model=REAL), drawn(table, unstored="missing", model=REAL))
    V = np.where(np.random.default_rng(1).random(V.shape) < 0.6, 0.0, signed(0.0))
    close(drawn(V, model=REAL), drawn(sparse.csr_array(V), unstored="zero", model=REAL))


@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_the_grid_changes_rounding_alone_of_real_valued_draws(missing):
    close(drawn(signed(missing), model=REAL, blocks=1), drawn(signed(missing), model=REAL))


def test_real_valued_results_are_read_like_any_other(tmp_path):
    V, store = signed(0.1), tmp_path / "run.zarr"
    held = dfac.hold_out(V, 0.1, random_seed=0)
    options = {"tune": 40, "monitor": held.cells, **QUIET}
    whole = dfac.sample(held.train, REAL, dfac.Gibbs(), draws=60, **options)
    dfac.sample(held.train, REAL, dfac.Gibbs(), draws=30, store=store, **options)
    trace = dfac.resume(store, draws=30, progressbar=False)
    same(whole, trace)
    assert json.loads(trace.attrs["sampler"]) == dfac.Gibbs().to_dict()
    rows, cols = (xr.DataArray(index, dims="cell") for index in held.cells)
    found = dfac.predict(trace, rows=rows, columns=cols)["mean"].values
    np.testing.assert_allclose(dfac.monitored(trace)["mean"].values.ravel(), found, rtol=1e-3)
    assert np.sqrt(np.mean((found - held.values) ** 2)) < 0.5 * np.nanstd(V)
    summary = dfac.summarize(trace)
    assert float(summary["rhat"].sel(functional="lp")) < 1.2
