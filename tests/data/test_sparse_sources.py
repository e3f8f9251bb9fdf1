"""Sparse input of other libraries: the same blocks as from scipy, and names if there are any."""

import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
import sparse
import xarray as xr

from daskfactor.data import grid as grids
from daskfactor.data.sources import as_blocks
from daskfactor.errors import DataError, StoreError
from tests.refusals import refused

pytestmark = pytest.mark.libraries

DENSE = np.where(
    np.random.default_rng(7).random((60, 40)) < 0.3,
    np.random.default_rng(8).poisson(2.0, (60, 40)) + 1.0,
    0.0,
).astype("float32")
COO = sparse.COO.from_numpy(DENSE)


def same(data, *, blocks=3, **options):
    """Blocks of ``data``, which must be those of the scipy matrix, with and without memory."""
    reference = as_blocks(sp.csr_array(DENSE), blocks, unstored="zero")
    for extra in ({}, {"memory_limit": 0}, {"balance": True}):
        found = as_blocks(data, reference.grid, **options, **extra)
        np.testing.assert_array_equal(found.to_numpy(), DENSE)
        if "balance" not in extra:
            assert found.fingerprint == reference.fingerprint
    return as_blocks(data, reference.grid, **options)


@pytest.mark.parametrize("name", ["coo", "gcxs", "dok"])
def test_arrays_of_the_sparse_package(name):
    assert same(COO.asformat(name)).source.kind == "sparse"


def test_values_of_half_precision():
    assert same(sparse.COO(COO.coords, COO.data.astype("float16"), COO.shape)).dtype == "float32"


QUICK = *(f"{kind}-chunks0" for kind in (None, "csr_matrix", "coo_array")), "csr_array-chunks1"


@pytest.mark.quick(*QUICK, "csc_matrix-chunks2", "None-chunks3", "csr_array-chunks3")
@pytest.mark.parametrize("chunks", [(20, 10), (7, 40), (60, 9), ((0, 31, 29), (40,))])
@pytest.mark.parametrize("kind", [None, sp.csr_matrix, sp.csr_array, sp.csc_matrix, sp.coo_array])
def test_dask_arrays_with_sparse_chunks(chunks, kind):
    array = da.from_array(DENSE, chunks=chunks)
    if kind is None:
        data = same(array.map_blocks(sparse.COO))
    else:
        data = same(array.map_blocks(kind, meta=kind((0, 0), dtype="f4")), unstored="zero")
    assert data.source.kind == "dask"
    assert data.source.lazy


def test_the_chunk_grid_of_dask_decides_where_blocks_are_worth_it(monkeypatch):
    array = da.from_array(COO, chunks=(20, 10))
    assert as_blocks(array).grid.blocks == 1
    monkeypatch.setattr(grids, "WORTHWHILE_WORK", 12 * 100)
    assert as_blocks(array).grid.rows.sizes == (20, 20, 20)
    assert as_blocks(da.from_array(COO, chunks=(5, 40))).grid.blocks == 2


def test_every_dask_chunk_is_computed_once():
    seen = []

    def made(block, block_info=None):
        if block_info:
            seen.append(block_info[0]["chunk-location"])
        return sp.csr_array(block)

    array = da.from_array(DENSE, chunks=(7, 40)).map_blocks(made, meta=sp.csr_array((0, 0)))
    as_blocks(array, unstored="zero", balance=True)
    assert sorted(seen) == [(n, 0) for n in range(9)]


def test_dask_chunks_that_turn_out_dense_or_broken():
    meta = sp.csr_array((0, 0), dtype="f4")
    array = da.from_array(DENSE, chunks=(20, 20))
    same(array.map_blocks(np.asarray, meta=meta), unstored="zero")
    wrong = array.map_blocks(sp.csr_array, meta=np.empty((0, 0), "f4"))
    refused(DataError, r"a piece of the data is sparse .* name the kind", as_blocks, wrong)

    rated = sparse.COO([[0], [0]], [1.0], shape=(20, 20), fill_value=np.nan)
    zero, ones = sparse.COO([[0], [0]], [1.0], shape=(20, 20)), da.ones((40, 20), chunks=20)
    mixed = da.map_blocks(lambda block: rated, ones, meta=zero[:0, :0], dtype="f8")
    refused(DataError, "a chunk of the dask array has fill_value nan", as_blocks, mixed)

    def broken(block):
        raise RuntimeError("the sensor was off")

    match = "the dask input failed after 0 pieces: RuntimeError"
    refused(StoreError, match, as_blocks, array.map_blocks(broken, meta=meta), unstored="zero")


@pytest.mark.parametrize("lazy", [False, True])
def test_xarray_keeps_its_names(lazy):
    names = [f"user {n}" for n in range(60)]
    values = da.from_array(COO, chunks=(20, 20)) if lazy else COO
    array = xr.DataArray(values, dims=("user", "film"), coords={"user": names}, name="stars")
    data = same(array)
    assert (data.source.kind, data.labels.row_dim, data.labels.name) == ("xarray", "user", "stars")
    assert data.labels.row(3) == "row 3 (user 3)"
    broken = array.copy(data=sparse.COO([[7], [3]], [np.inf], shape=(60, 40)))
    refused(DataError, r"row 7 \(user 7\), column 3 is inf", as_blocks, broken, balance=True)
