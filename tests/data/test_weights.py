"""Weights of cells: the same weights whatever form they come in, wherever the blocks are."""

import pickle

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import xarray as xr
import zarr

from daskfactor import as_blocks, convert, hold_out
from daskfactor.data.blocks import BlockedData, open_shared
from daskfactor.data.weights import StoredWeights
from daskfactor.errors import DataError, OptionError
from tests.random_sparse import random_array
from tests.refusals import refused

RNG = np.random.default_rng(11)
SHAPE = (23, 17)
V = RNG.gamma(2.0, 3.0, SHAPE)
V[RNG.random(SHAPE) < 0.2] = np.nan
SEEN = ~np.isnan(V)
BY_ROW, BY_COL = RNG.uniform(0.1, 3.0, SHAPE[0]), RNG.uniform(0.5, 2.0, SHAPE[1])
SIGMA = np.outer(BY_ROW, BY_COL)
Q = (SIGMA**-2.0).astype("float32")
WANTED = np.where(SEEN, Q, np.nan)
LABELS = {"day": np.arange(SHAPE[0]) * 3, "species": [f"s{j}" for j in range(SHAPE[1])]}
BY_SPECIES = xr.DataArray(BY_COL, dims="species")
ROWS_ONLY = V / BY_ROW[:, None]


def labelled(values):
    return xr.DataArray(values, LABELS, ["day", "species"])


def stored(values):
    """Values of the observed cells of V."""
    rows, cols = np.nonzero(SEEN)
    return sp.csr_array((values[rows, cols], (rows, cols)), shape=SHAPE)


def dense_of(data):
    """Weights of the observed cells, by all ways there are to look at them."""
    weights = data.weights.to_numpy()
    for block in data.grid.all_blocks():
        view = data.view(*block)
        own = data.weights.view(*block)
        beside = view.weights
        assert beside.flags.c_contiguous
        np.testing.assert_array_equal(beside, own.block if own[0].ndim == 2 else own.values)
        if not data.is_sparse:
            np.testing.assert_array_equal(weights[data.grid.slices(block)], beside)
    return np.where(np.isnan(data.to_numpy()), np.nan, weights)


LAZY = {"uncertainty": da.from_array(SIGMA), "unstored": "missing"}
FORMS = {
    "numpy": (V, SIGMA),
    "masked": (np.ma.masked_invalid(V), np.ma.masked_array(SIGMA, ~SEEN)),
    "pair": (V, (BY_ROW, BY_COL)),
    "frame": (pd.DataFrame(V), pd.DataFrame(SIGMA)),
    "dask": (da.from_array(V, chunks=(5, 9)), da.from_array(SIGMA, chunks=(11, 4))),
    "zarr": (V, zarr.open_array),
    "path": (V, str),
    "turned": (labelled(V), labelled(SIGMA).T),
    "lazily turned": (labelled(V), labelled(SIGMA).chunk(day=6).transpose()),
    "one dimension": (labelled(ROWS_ONLY), BY_SPECIES),
    "one row": (ROWS_ONLY, BY_COL[None]),
    "two of one": (labelled(ROWS_ONLY), xr.DataArray(np.ones(SHAPE[0]), dims="day") * BY_SPECIES),
    "sparse": (stored(V), stored(SIGMA)),
    "sparse columns": (stored(V).tocsc(), stored(SIGMA).tocoo()),
    "sparse and pair": (stored(V), (BY_ROW, BY_COL)),
    "sparse and array": (stored(V), SIGMA),
}


def form(name, tmp_path):
    """V and its uncertainty in a form; a function is called with the path of an array."""
    values, sigma = FORMS[name]
    if name in ("zarr", "path"):
        zarr.create_array(str(tmp_path / "sigma"), data=SIGMA, chunks=(7, 5))
        sigma = sigma(str(tmp_path / "sigma"))
    return values, sigma


@pytest.mark.parametrize("memory_limit", [None, 0])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_weights(name, memory_limit, tmp_path):
    values, sigma = form(name, tmp_path)
    options = {"memory_limit": memory_limit, "uncertainty": sigma}
    if "sparse" in name:
        options["unstored"] = "missing"
    with as_blocks(values, 3, **options) as data:
        wanted = WANTED
        if "one" in name:  # only one of the two vectors
            wanted = np.where(SEEN, (BY_COL**-2.0).astype("float32"), np.nan)
        np.testing.assert_allclose(dense_of(data), wanted, rtol=3e-7)
        assert data.weighting == "uncertainty"
        assert data.in_memory == (memory_limit is None)
        sums = np.nan_to_num(wanted.astype(float))
        order = slice(None) if data.row_order is None else data.row_order
        np.testing.assert_allclose(data.mass.rows, sums.sum(1)[order], rtol=1e-6)
        np.testing.assert_allclose(data.mass.cols, sums.sum(0), rtol=1e-6)
        np.testing.assert_allclose(data.total_mass, sums.sum(), rtol=1e-6)
        for block in data.grid.all_blocks():
            own = sums[data.grid.slices(block)].sum()
            np.testing.assert_allclose(data.mass.blocks[block], own, rtol=1e-6)
        assert data.mean == pytest.approx(np.nanmean(np.asarray(data.to_numpy(), float)), rel=1e-6)


@pytest.mark.parametrize("dense", [True, False])
def test_an_infinite_uncertainty_is_a_missing_cell(dense):
    rows, cols = np.nonzero(SEEN)
    sigma, without = SIGMA.copy(), V.copy()
    sigma[rows[::5], cols[::5]] = np.inf
    without[rows[::5], cols[::5]] = np.nan
    before = V.astype("float32")
    kept = before.copy()
    wrap, options = (np.asarray, {}) if dense else (stored, {"unstored": "missing"})
    data = as_blocks(wrap(before), 3, uncertainty=wrap(sigma), **options)
    other = without.astype("float32") if dense else sp.csr_array(stored(without))
    other = as_blocks(other, 3, uncertainty=wrap(SIGMA), **options)
    np.testing.assert_array_equal(before, kept)  # the caller's own array is left alone
    assert data.known.statistics.fingerprint == other.known.statistics.fingerprint
    assert data.total_observed == SEEN.sum() - len(rows[::5])
    np.testing.assert_array_equal(dense_of(data), dense_of(other))
    np.testing.assert_array_equal(data.missing_cells(), other.missing_cells())
    np.testing.assert_allclose(data.mass.rows, other.mass.rows)


def test_an_array_is_used_where_it_is_if_no_cell_vanishes():
    values = V.astype("float32")
    data = as_blocks(values, 2, uncertainty=SIGMA)
    assert np.shares_memory(data.view(0, 0).block, values)
    # Anything will do where nothing is observed.
    sigma = np.where(SEEN, SIGMA, np.resize([np.nan, 0, -999, np.inf], SHAPE))
    np.testing.assert_array_equal(dense_of(as_blocks(V, 3, uncertainty=sigma)), WANTED)


@pytest.mark.parametrize("bad", [np.nan, 0.0, -1.0, 1e-30])
@pytest.mark.parametrize("dense", [True, False])
def test_an_observed_cell_needs_an_uncertainty(bad, dense):
    row, col = (int(at[7]) for at in np.nonzero(SEEN))
    sigma = SIGMA.copy()
    sigma[row, col] = bad
    name = rf"uncertainty at row {row}, column {col} is {bad:g}" if dense else rf"row {row}, "
    values, given = (V, sigma) if dense else (stored(V), stored(sigma))
    options = {} if dense else {"unstored": "missing", "balance": True}
    refused(DataError, name, as_blocks, values, 3, uncertainty=given, **options)


def test_weights_are_taken_as_they_are_and_fingerprints_know_them():
    weights = RNG.integers(0, 3, SHAPE)
    data = as_blocks(V, 3, weights=weights)
    assert data.weighting == "weights"
    np.testing.assert_array_equal(dense_of(data), np.where(SEEN & (weights > 0), weights, np.nan))
    negative, match = -np.ones(SHAPE, int), r"weight at row 0.* is -1, where V is observed"
    refused(DataError, match, as_blocks, V, 3, weights=negative)
    again = as_blocks(V, 3, weights=StoredWeights("uncertainty", Q))
    assert again.fingerprint == as_blocks(V, 3, uncertainty=SIGMA).fingerprint
    others = [as_blocks(V, 3), *(as_blocks(V, 3, uncertainty=s) for s in (1.0, 2.0, SIGMA))]
    others.append(as_blocks(V, 3, weights=1.0))
    assert len({data.fingerprint for data in others}) == len(others)
    assert "with uncertainty of cells" in others[1].describe()


def test_zeros_that_are_not_stored_have_weight_one():
    counts = random_array(SHAPE, density=0.3, rng=RNG).tocsr()
    weights = counts.copy()
    weights.data[:] = RNG.uniform(0.5, 2, counts.nnz)
    data = as_blocks(counts, 3, unstored="zero", balance=True, weights=weights)
    whole = np.where(counts.toarray() != 0, weights.toarray(), 1)
    np.testing.assert_allclose(data.mass.rows, whole.sum(1)[data.row_order], rtol=1e-6)
    np.testing.assert_allclose(data.mass.cols, whole.sum(0)[data.col_order], rtol=1e-6)
    np.testing.assert_allclose(data.mass.blocks.sum(), whole.sum(), rtol=1e-6)
    match, given = (
        "implicit zeros have none",
        {"unstored": "zero", "uncertainty": weights},
    )
    refused(OptionError, match, as_blocks, counts, 3, **given)


def test_blocks_of_a_store_with_weights_in_memory(tmp_path):
    place, sigma = str(tmp_path / "v"), tmp_path / "sigma"
    for values, path in ((V, place), (SIGMA, sigma)):
        convert(stored(values), path, unstored="missing", blocks=3, balance=True, progressbar=False)
    for options in ({}, {"balance": True, "memory_limit": 0}, {"blocks": 2}):
        data = as_blocks(place, uncertainty=stored(SIGMA), **options)
        assert (data.row_order is not None) == ("balance" in options)
        np.testing.assert_allclose(dense_of(data), WANTED, rtol=3e-7)
    match = "both in memory, .*, which is not in memory; pass its contents as a scipy"
    refused(OptionError, match, as_blocks, place, uncertainty=sigma)


@pytest.mark.parametrize("memory_limit", [None, 0])
@pytest.mark.parametrize("name", ["numpy", "zarr", "sparse", "pair"])
def test_other_processes_read_the_same_weights(name, memory_limit, tmp_path):
    values, sigma = form(name, tmp_path)
    if name == "zarr":
        sigma = np.where(SEEN & (RNG.random(SHAPE) < 0.2), np.inf, SIGMA)
        for key, array in (("v", V), ("inf", sigma)):
            zarr.create_array(str(tmp_path / key), data=array, chunks=(7, 5))
        values, sigma = str(tmp_path / "v"), str(tmp_path / "inf")
    unstored = "missing" if name == "sparse" else None
    data = as_blocks(values, 3, uncertainty=sigma, unstored=unstored, memory_limit=memory_limit)
    sent = pickle.loads(pickle.dumps(data.share()))
    assert sent.kind == sent.weights.kind == ("zarr" if name == "zarr" else "file")
    copy = open_shared(sent, memory_limit)
    assert copy is open_shared(sent)
    assert copy.fingerprint == data.fingerprint
    np.testing.assert_array_equal(dense_of(copy), dense_of(data))
    np.testing.assert_array_equal(copy.to_numpy(), data.to_numpy())
    data.close()


@pytest.mark.parametrize("unstored", [None, "missing", "zero"])
def test_cells_are_held_out_with_the_weights_of_the_others(unstored):
    values, weights = (V, SIGMA) if unstored is None else (stored(V), stored(SIGMA))
    data = as_blocks(values, 3, unstored=unstored, balance=unstored == "zero", weights=weights)
    held = hold_out(data, 0.2, random_seed=1)
    found, before = dense_of(held.train), dense_of(data)
    observed = ~np.isnan(held.train.to_numpy())
    assert observed.sum() < data.total_observed
    if unstored == "zero":
        observed &= SEEN  # others are not stored
    np.testing.assert_array_equal(found[observed], before[observed])
    assert np.isnan(held.train.values(*held.cells)).all()


@pytest.mark.parametrize(
    ("values", "options", "words"),
    [
        (V, {"uncertainty": 1.0, "weights": 1.0}, "both given"),
        (V, {"uncertainty": SIGMA.T}, "shape of V"),
        (V, {"uncertainty": BY_COL}, "shape of V"),
        (V, {"uncertainty": (BY_COL, BY_ROW)}, "one number for each"),
        (V, {"uncertainty": stored(SIGMA)}, "must be dense"),
        (V, {"uncertainty": labelled(SIGMA)}, "dimensions"),
        (V, {"uncertainty": "no such place"}, "no zarr array"),
        (as_blocks(V, 2), {"uncertainty": SIGMA}, "cannot be added"),
        (labelled(V), {"uncertainty": labelled(SIGMA)[::-1]}, "order of V"),
        (stored(V), LAZY, "sparse with the"),
    ],
)
def test_what_cannot_be_used_is_refused(values, options, words):
    blocks = None if isinstance(values, BlockedData) else 2
    refused((DataError, OptionError, OSError), words, as_blocks, values, blocks, **options)


def test_weights_of_a_multiindex_must_be_in_its_order():
    coords = {"lat": [10, 20], "lon": [1.0, 2.0, 3.0]}
    maps = xr.DataArray(np.arange(1.0, 31).reshape(5, 2, 3), coords, ("time", "lat", "lon"))
    V = maps.stack(place=("lat", "lon"))
    for weights in (V[0], V, V.values):
        as_blocks(V, weights=weights).close()
    match = "column labels of weights are not those of V"
    for weights in (V[0, ::-1], V[:, ::-1], maps.stack(place=("lon", "lat"))):
        refused(DataError, match, as_blocks, V, weights=weights)
