"""Counts from every kind of data, and what is refused."""

import itertools
import time
import tracemalloc

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import sparse
import xarray as xr
import zarr
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import chisquare, nbinom

from daskfactor.allocation.compiled_model import compile_model
from daskfactor.allocation.counts import Counts, as_counts, simulate
from daskfactor.allocation.model import AllocationModel
from daskfactor.data.convert import convert
from daskfactor.data.sources import as_blocks
from daskfactor.errors import DataError, ModelError, OptionError, StoreError
from daskfactor.models.tweedie import TweedieNMF
from tests.allocation.cases import enumerate_evidence
from tests.refusals import refused

NMF = AllocationModel.nmf(2)
CP = AllocationModel.cp(2)
X = np.random.default_rng(0).poisson(0.7, (6, 5))
TENSOR = np.random.default_rng(1).poisson(0.4, (4, 3, 5))


def dense(counts):
    out = np.zeros(counts.shape, np.int64)
    out[tuple(counts.indices.T)] = counts.values
    return out


def same(counts, expected):
    assert_array_equal(dense(counts), expected)
    assert counts.indices.dtype == counts.values.dtype == np.int64
    assert counts.indices.shape == (len(counts.values), expected.ndim)
    assert counts.values.min() > 0
    place = np.ravel_multi_index(tuple(counts.indices.T), counts.shape)
    assert (np.diff(place) > 0).all()
    assert counts.total == expected.sum()


def duplicated(array):
    """A scipy matrix that stores every entry in two halves, and an explicit zero."""
    rows, cols = np.nonzero(array)
    values = array[rows, cols]
    half = values // 2
    pairs = (np.r_[rows, rows, 0], np.r_[cols, cols, 0])
    return sp.coo_array((np.r_[half, values - half, 0], pairs), shape=array.shape)


def store_of(array, path):
    convert(sp.csr_array(array), path, unstored="zero", progressbar=False, blocks=2)
    return path


def zarr_of(array, path):
    zarr.save_array(path, array)
    return path


MATRICES = {
    "numpy": lambda x, _: x,
    "float32": lambda x, _: x.astype(np.float32),
    "unsigned": lambda x, _: x.astype(np.uint64),
    "fortran": lambda x, _: np.asfortranarray(x),
    "masked, no mask": lambda x, _: np.ma.array(x),
    "duplicates": lambda x, _: duplicated(x),
    "csr": lambda x, _: sp.csr_array(x),
    "csc matrix": lambda x, _: sp.csc_matrix(x.astype(float)),
    "COO": lambda x, _: sparse.COO.from_numpy(x),
    "GCXS": lambda x, _: sparse.GCXS.from_numpy(x),
    "DOK": lambda x, _: sparse.DOK.from_numpy(x),
    "dask": lambda x, _: da.from_array(x, chunks=(4, 2)),
    "dask of COO": lambda x, _: da.from_array(x, chunks=(4, 2)).map_blocks(sparse.COO.from_numpy),
    "dask of csr": lambda x, _: da.from_array(x, chunks=(4, 2)).map_blocks(sp.csr_array),
    "xarray": lambda x, _: xr.DataArray(x),
    "xarray of COO": lambda x, _: xr.DataArray(sparse.COO.from_numpy(x)),
    "xarray of dask": lambda x, _: xr.DataArray(x).chunk(3),
    "pandas": lambda x, _: pd.DataFrame(x),
    "zarr": lambda x, path: zarr.array(x, chunks=(4, 2, *x.shape[2:])),
    "path of zarr": lambda x, path: zarr_of(x, path / "a.zarr"),
    "store": lambda x, path: store_of(x, path / "s.zarr"),
    "path text of store": lambda x, path: str(store_of(x, path / "s.zarr")),
    "blocks": lambda x, _: as_blocks(x, blocks=2),
    "sparse blocks": lambda x, _: as_blocks(sp.csr_array(x), 2, unstored="zero", balance=True),
}
TENSORS = ["numpy", "float32", "COO", "GCXS", "DOK", "zarr", "path of zarr"]
TENSORS += ["xarray", "xarray of COO", "xarray of dask"]


@pytest.mark.parametrize("kind", MATRICES)
def test_matrices_and_tensors(kind, tmp_path):
    same(as_counts(MATRICES[kind](X, tmp_path), NMF), X)
    if kind in TENSORS:
        tmp_path.joinpath("tensor").mkdir()
        same(as_counts(MATRICES[kind](TENSOR, tmp_path / "tensor"), CP), TENSOR)


def test_dask_tensors_chunk_by_chunk():
    array = da.from_array(TENSOR, chunks=(3, 2, 2))
    same(as_counts(array, CP), TENSOR)
    same(as_counts(array.map_blocks(sparse.COO.from_numpy), CP), TENSOR)
    unknown = da.from_array(X.ravel(), chunks=4)
    unknown = unknown[unknown > 0]
    with pytest.raises(DataError, match="compute_chunk_sizes"):
        as_counts(unknown, AllocationModel("r -> i", {"r": 2}))


def test_vectors_scipy_coo_arrays_and_half_precision():
    model, vector = AllocationModel("r -> i", {"r": 2}), np.array([0, 3, 0, 1])
    same(as_counts(vector, model), vector)
    same(as_counts(vector.astype(np.float16), model), vector)
    same(as_counts(vector > 0, model), (vector > 0).astype(int))
    twice = sp.coo_array((np.array([1, 2, 1]), (np.array([1, 1, 3]),)), shape=(4,))
    same(as_counts(twice, model), vector)


def test_anndata_names():
    anndata = pytest.importorskip("anndata")
    adata = anndata.AnnData(sp.csr_matrix(X.astype(np.float32)))
    adata.obs_names = [f"cell {n}" for n in range(6)]
    counts = as_counts(adata, NMF)
    same(counts, X)
    assert counts.dims == ("obs", "var")
    assert counts.labels["obs"][2] == "cell 2"


def test_dims_are_matched_by_name_or_by_order():
    labels = {"i": np.arange(6) * 10}
    counts = as_counts(xr.DataArray(X.T, dims=("j", "i"), coords=labels), NMF)
    same(counts, X)
    assert counts.dims == ("i", "j")
    assert_array_equal(counts.labels["i"], labels["i"])
    assert "j" not in counts.labels
    assert as_counts(xr.DataArray(X, dims=("from", "to")), NMF).dims == ("from", "to")
    clash = as_counts(xr.DataArray(X, dims=("r", "to"), coords={"r": list("abcdef")}), NMF)
    assert clash.dims == ("i", "j")
    assert clash.labels["i"][5] == "f"
    assert as_counts(X, NMF).dims == ("i", "j")
    assert as_counts(pd.DataFrame(X, index=list("abcdef")), NMF).labels["row"][1] == "b"
    array = xr.DataArray(np.ones((2, 3), np.int64), dims=("j", "x"))
    refused(DataError, "so 'j' would be two things; rename", as_counts, array, NMF)
    assert as_counts(array.rename(j="i"), NMF).dims == ("i", "x")


def test_a_lazy_file_keeps_its_names(tmp_path):
    array = xr.DataArray(TENSOR, dims=("c", "a", "b"), name="counts")
    array.to_dataset().to_zarr(tmp_path / "x.zarr", consolidated=False)
    lazy = xr.open_zarr(tmp_path / "x.zarr", consolidated=False, chunks=None)["counts"]
    model = AllocationModel("r -> a, r -> b, r -> c", {"r": 2})
    same(as_counts(lazy, model), TENSOR.transpose(1, 2, 0))


def test_a_huge_shape_costs_nothing():
    coords = np.array([[5, 999_999], [7, 0], [1, 2]])
    huge = sparse.COO(coords, np.array([2, 3]), shape=(10**6, 10**6, 10**6))
    counts = as_counts(huge, CP)
    assert counts.shape == (10**6, 10**6, 10**6)
    assert_array_equal(counts.indices, coords.T)
    assert as_counts(counts, CP) is counts


def changed(*cells, dtype=float):
    out = X.astype(dtype)
    for row, col, value in cells:
        out[row, col] = value
    return out


BAD = [
    (changed((4, 1, -2), (2, 3, -1), dtype=int), "the count at i 2, j 3 is -1; a count cannot be"),
    (changed((2, 3, np.nan)), "the count at i 2, j 3 is nan; this model has no missing cells"),
    (changed((2, 3, np.inf)), "i 2, j 3 is inf; a count must be finite"),
    (changed((2, 3, -np.inf)), "i 2, j 3 is -inf; a count cannot be negative"),
    (changed((2, 3, 1.5)), "i 2, j 3 is 1.5; counts are whole numbers; rescale and round"),
    (changed((2, 3, 1e19)), r"is 1e\+19; it must be below 2\*\*63"),
    (changed((2, 3, 2**63), dtype=np.uint64), r"9223372036854775808; it must be below"),
    (np.full((3, 2), 2**62), r"sum to 27670116110564327424, more than 2\*\*63 - 1"),
    (np.zeros((3, 2)), "hold no tokens: every count is 0"),
    (np.zeros((0, 2)), "hold no tokens"),
    (X.astype(complex), "dtype complex128; they must be whole numbers"),
    (np.full((2, 2), "a"), "the counts have dtype <U1"),
    (np.ma.array(X, mask=X == 2), "cells are masked, but this model has no missing cells"),
    (sparse.COO.from_numpy(changed((0, 0, np.nan)), fill_value=np.nan), "are missing"),
    (sparse.COO.from_numpy(X + 1, fill_value=1), "fill_value 1; it must be 0"),
    (sp.csr_array(changed((2, 3, -1), dtype=int)), "i 2, j 3 is -1"),
    (da.from_array(changed((4, 3, 0.5)), chunks=(2, 2)), "i 4, j 3 is 0.5"),
    (
        xr.DataArray(changed((2, 3, -1)), dims=("from", "to"), coords={"to": list("vwxyz")}),
        r"from 2, to 3 \(y\) is -1",
    ),
    ([[1, 2], [3, 4]], "data of type list cannot be read"),
]


def test_bad_counts_and_what_does_not_fit_are_refused(tmp_path):
    for data, message in BAD:
        refused(DataError, message, as_counts, data, NMF)
    zarr.create_group(tmp_path / "g.zarr").create_array("inside", data=X)
    convert(sp.csr_array(X), tmp_path / "s.zarr", unstored="missing", progressbar=False)
    for error, match, data, model in (
        (ModelError, "3 dimensions", TENSOR, NMF),
        (ModelError, "2 dimensions", sp.csr_array(X), CP),
        (ModelError, "3 dimensions", as_counts(TENSOR, CP), NMF),
        (StoreError, "no zarr array can be opened", tmp_path / "nothing.zarr", NMF),
        (DataError, r"holds 1 zarr array \(inside\); name one", tmp_path / "g.zarr", NMF),
        (DataError, "missing", tmp_path / "s.zarr", NMF),
        (DataError, "missing", as_blocks(sp.csr_array(X), unstored="missing"), NMF),
    ):
        refused(error, match, as_counts, data, model)


def test_thinning_keeps_tokens_by_address():
    counts = as_counts(np.full((40, 50), 3), NMF)
    thin, again, other = (counts.thinned(0.25, seed) for seed in (7, 7, 8))
    assert isinstance(thin, Counts)
    assert_array_equal(dense(thin), dense(again))
    assert (dense(thin) != dense(other)).any()
    assert 0 < thin.values.min() < thin.values.max() <= 3
    assert abs(thin.total - 1500) < 5 * np.sqrt(6000 * 0.25 * 0.75)
    # A binomial, not a share of every cell: its variance over cells.
    assert dense(thin).var() == pytest.approx(3 * 0.25 * 0.75, rel=0.15)
    assert_array_equal(dense(counts.thinned(1.0, 0)), 3)
    refused(OptionError, r"in \(0, 1\], got 0", counts.thinned, 0, 1)
    one = as_counts(np.array([[1]]), NMF)
    refused(DataError, "leaves none of the 1 tokens", one.thinned, 1e-9, 0)


MANY = AllocationModel.nmf(3, concentration=20.0)


def test_what_comes_back_fits_together():
    made = simulate(MANY, (30, 40), total=5000, random_seed=1)
    assert made.dims == ("i", "j", "r")
    assert made.allocation.shape == (30, 40, 3)
    assert made.counts.dtype == made.allocation.dtype == np.int64
    assert_array_equal(made.allocation.sum(axis=2).todense(), made.counts.todense())
    assert made.counts.sum() == 5000
    shapes = {name: table.shape for name, table in made.tables.items()}
    assert shapes == {"r": (3,), "i": (3, 30), "j": (3, 40)}
    for table in made.tables.values():
        assert_allclose(table.sum(axis=-1), 1.0)
    # With so many tokens, tables are near the shares that were drawn from them.
    shares = made.allocation.sum(axis=(0, 1)).todense() / 5000
    assert_allclose(made.tables["r"], shares, atol=0.05)
    assert as_counts(made.counts, MANY).total == 5000
    same, other = (simulate(MANY, (30, 40), total=5000, random_seed=seed) for seed in (1, 2))
    assert (made.allocation != same.allocation).nnz == 0
    assert_array_equal(made.tables["i"], same.tables["i"])
    assert (made.counts != other.counts).nnz
    none = simulate(MANY, (3, 4), total=0, random_seed=0)
    assert none.counts.nnz == none.allocation.nnz == 0
    assert none.counts.shape == (3, 4)


def test_what_cannot_be_drawn():
    model = AllocationModel("r -> i, r -> j", {"r": 2}, {"j": 4, "i": 3})
    assert simulate(model, total=5, random_seed=0).counts.shape == (4, 3)  # its own sizes
    refused(ModelError, "size 5 along 'j', but the model has 4", simulate, model, (5, 3))
    for model, shape, options, match in (
        (TweedieNMF(2), (3, 4), {}, r"model must be an AllocationModel\(\.\.\.\), got"),
        (MANY, None, {}, "sizes of the observed variables i, j are missing"),
        (MANY, 5, {}, "shape must be a list of sizes such as"),
        (MANY, (10**10, 10**10), {}, "pass a smaller shape"),
        (MANY, (10**200, 10**200), {}, r"would have 10\^400 cells"),
        (MANY, (3, 4), {"total": -1}, "total must be a whole number of at least 0, got -1"),
        (MANY, (3, 4), {"total": 10**13}, r"1e\+13 tokens are more than can be drawn"),
        (AllocationModel.nmf(2, rate=1e-30), (3, 4), {}, "more than can be drawn one by one"),
    ):
        refused(OptionError, match, simulate, model, shape, random_seed=0, **options)


def test_the_total_is_negative_binomial():
    model = AllocationModel.nmf(1, rate=0.2, concentration=3.0)
    totals = [simulate(model, (1, 1), random_seed=seed).counts.data.sum() for seed in range(1000)]
    law = nbinom(3.0, 0.2 / 1.2)
    assert abs(np.mean(totals) - law.mean()) < 5 * law.std() / np.sqrt(1000)
    assert np.var(totals) == pytest.approx(law.var(), rel=0.25)


def test_cost_follows_the_tokens_and_not_the_shape():
    model = AllocationModel.nmf(5, concentration=1e5)
    simulate(model, (100, 100), total=100, random_seed=0)
    tracemalloc.start()
    start = time.perf_counter()
    made = simulate(model, (10**6, 10**6), total=10_000, random_seed=0)
    seconds, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made.counts.sum() == 10_000
    assert made.counts.nnz > 5000
    assert list(made.tables) == ["r"]
    assert seconds < 2.0
    assert peak < 20e6


MODELS = {
    "nmf": (AllocationModel.nmf(2, concentration=2.0), (2, 2)),
    "symmetric": (AllocationModel.symmetric_nmf(2, concentration_shared=0.3), (2, 2)),
    "collider": (AllocationModel("r -> i, s -> i, s -> j", {"r": 2, "s": 2}), (2, 2)),
    "tied chain": (AllocationModel("s -> i -> j", {"s": 2}, tied={("i", "j"): 0.4}), (2, 2)),
}


@pytest.mark.quick("collider")
@pytest.mark.statistical
@pytest.mark.parametrize("name", MODELS)
def test_the_law_of_the_counts(name):
    """Frequencies of every X of three tokens beside its exact probability."""
    model, shape = MODELS[name]
    draws, total, found = 2000, 3, {}
    for seed in range(draws):
        X = simulate(model, shape, total=total, random_seed=seed).counts.todense()
        found[X.tobytes()] = found.get(X.tobytes(), 0) + 1
    law = nbinom(model.total_shape, model.rate / (model.rate + 1)).logpmf(total)
    expected, seen = [], []
    for cells in itertools.combinations_with_replacement(range(4), total):
        X = np.bincount(cells, minlength=4).reshape(shape)
        exact = enumerate_evidence(compile_model(model, as_counts(X, model)))
        expected.append(draws * np.exp(exact - law))
        seen.append(found.get(X.tobytes(), 0))
    assert sum(expected) == pytest.approx(draws)
    assert chisquare(seen, expected).pvalue > 1e-4


@pytest.mark.statistical
def test_the_joint_law_of_tables_and_tokens():
    """θ is Dirichlet, and a token is a draw from it: E θ = E C/T and E θ C/T = E θ²."""
    a, R, draws, total = 1.5, 3, 3000, 4
    model, (theta, share) = AllocationModel.nmf(R, concentration=a), np.empty((2, draws))
    for seed in range(draws):
        made = simulate(model, (2, 2), total=total, random_seed=seed)
        theta[seed] = made.tables["r"][0]
        share[seed] = made.allocation[:, :, 0].data.sum() / total
    for power, exact in ((1, 1 / R), (2, (1 / R) * (a / R + 1) / (a + 1))):
        for values in (theta**power, share * theta ** (power - 1)):
            assert abs(values.mean() - exact) < 5 * values.std() / np.sqrt(draws)
