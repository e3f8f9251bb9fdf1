"""What cannot be factorized is refused at the border, with one clear sentence."""

import re
from contextlib import nullcontext

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import sparse
import xarray as xr
import zarr
from scipy import sparse as sp

from daskfactor import as_blocks, hold_out
from daskfactor.errors import DataError, DataWarning, OptionError, StoreError
from tests.refusals import refused

ONES = np.ones((6, 4))
UNKNOWN = da.from_array(ONES, chunks=2)


def changed(row, col, value, dtype="float64"):
    values = ONES.astype(dtype)
    values[row, col] = value
    return values


def without(rows, cols):
    values = np.ones((20, 12))
    values[rows] = np.nan
    values[:, cols] = np.nan
    return values


LETTERS = pd.DataFrame(without([3], [1]), columns=[*"abcdefghijkl"])
NAMED = xr.DataArray(changed(2, 3, np.inf), {"gene": [*"uvwxyz"]}, ("gene", "cells"))
BAD = [
    (NAMED, r"the entry at row 2 \(w\), column 3 is inf"),
    (LETTERS, "1 of 20 rows"),
    (LETTERS.drop(index=3), r"column 1 \(b\)"),
    (np.ones(3), r"the data have 1 dimension, shape \(3,\); a matrix with rows and columns"),
    (np.ones((2, 2, 2)), "the data have 3 dimensions"),
    (da.ones((2, 2, 2)), "the data have 3 dimensions"),
    (xr.DataArray(np.ones(3)), "the data have 1 dimension,"),
    (np.ones((0, 4)), "the data are empty, shape 0 x 4"),
    (pd.DataFrame(), "the data are empty, shape 0 x 0"),
    (ONES.astype(complex), "the entries have dtype complex128; they must be real numbers"),
    (ONES.astype(complex), r"take their modulus \(numpy.abs\) or their real part"),
    (ONES.astype(object), r"the entries have dtype object.*astype\('float64'\)"),
    (ONES.astype(str), "the entries have dtype <U"),
    (ONES.astype("M8[s]"), "the entries have dtype datetime64.*turn times into numbers"),
    (
        da.ones((8, 18), chunks=4).map_blocks(lambda b: b[:0], dtype="f8", meta=ONES[:0]),
        r"their piece at row 0, column 0 is .* gave shape \(0, \d+\); .*compute_chunk",
    ),
    (da.ones((4, 4), dtype=complex), "the entries have dtype complex128"),
    (UNKNOWN[UNKNOWN[:, 0] > 0], r"compute_chunk_sizes\(\) first"),
    ([[1.0, 2.0]], "data of type list cannot be read; pass a NumPy array"),
    (None, "data of type NoneType cannot be read"),
    (xr.Dataset({"v": (("a", "b"), ONES), "w": (("a", "b"), ONES)}), "the Dataset has 2 variables"),
    (xr.Dataset(), "the Dataset has no variables"),
    (pd.DataFrame({"a": [1, 2], "who": [*"xy"]}), "1 column of the DataFrame holds no numbers"),
    (changed(2, 3, np.inf), "the entry at row 2, column 3 is inf; entries must be finite"),
    (changed(2, 3, -np.inf), "the entry at row 2, column 3 is -inf"),
    (changed(2, 3, np.inf, "float32"), "the entry at row 2, column 3 is inf"),
    (da.from_array(changed(5, 1, np.inf), chunks=2), "the entry at row 5, column 1 is inf"),
    (changed(4, 0, 1e39), r'row 4, column 0 is 1e\+39, outside the range.*pass dtype="float64"'),
    (changed(4, 0, -1e39), r"row 4, column 0 is -1e\+39, outside the range of float32"),
    (np.full((3, 3), np.nan), "all 3 x 3 entries are missing"),
    (without([3], []), r"1 of 20 rows have no observed entry: row 3; .* drop it"),
    (without([], [0, 7]), "2 of 12 columns have no observed entry: column 0, column 7"),
    (without(list(range(2, 10)), []), "8 of 20 rows .* row 2, row 3, row 4, row 5, row 6 and 3 mo"),
]


def numbered(cases):
    return [pytest.param(*case, id=f"{n} {case[1][:40]}") for n, case in enumerate(cases)]


@pytest.mark.parametrize("memory_limit", [None, 0])
@pytest.mark.parametrize(("data", "message"), numbered(BAD))
def test_bad_data_are_refused(data, message, memory_limit):
    refused(DataError, message, as_blocks, data, memory_limit=memory_limit)
    assert issubclass(DataError, ValueError)


def test_masked_entries_may_hold_anything():
    values = changed(2, 3, np.inf)
    values[1, 1] = 1e300
    data = as_blocks(np.ma.MaskedArray(values, values != 1))
    assert (data.n_missing, data.maximum) == (2, 1)
    assert values[1, 1] == 1e300
    narrow = np.ma.MaskedArray(np.full((3, 3), 7, "float32"), np.eye(3, dtype=bool))
    assert as_blocks(narrow).n_missing == 3
    assert (narrow.data == 7).all()
    integers = np.ma.MaskedArray([[2**40 + 1, 1], [1, 1]], [[True, False], [False, False]])
    assert as_blocks(integers).total == 3


@pytest.mark.parametrize(
    ("value", "dtype", "exact"),
    [
        *((2**24 + 1, "int64", False), (-(2**24) - 1, "int64", False), (2**25 + 2, "int32", False)),
        *((2**25 + 4, "int32", True), (2**63, "uint64", True), (2**63 + 1, "uint64", False)),
        *((-(2**63), "int64", True), (2**24, "int64", True)),
    ],
)
def test_integers_that_float32_rounds_are_reported(value, dtype, exact):
    values = np.ones((4, 4), dtype)
    values[2, 1] = value
    assert (int(np.float32(value)) == value) == exact
    told = pytest.warns(DataWarning, match=r"1 integer entries above 2\*\*24 were rounded")
    with nullcontext() if exact else told:
        as_blocks(values)


def test_what_is_lost_in_conversion_is_said():
    rounded, vanished = r"1 integer entries above 2\*\*24 were", "1 entries other .* became zero"
    rounded_more = r"above 2\*\*53 were rounded.*rescale"
    for values, message, options in (
        (np.full((3, 3), 2**53 + 1), rounded_more, {"dtype": "float64"}),
        (changed(0, 0, 1e-60), vanished, {}),
        (sp.csr_array([[2**24 + 1, 1], [1, 1]]), rounded, {"unstored": "zero"}),
        (sp.csr_array([[1e-60, 1], [1, 1]]), vanished, {"unstored": "zero"}),
    ):
        with pytest.warns(DataWarning, match=message):
            data = as_blocks(values, **options)
    assert data.n_stored.sum() == 3
    assert as_blocks(changed(4, 0, 1e39), dtype="float64").maximum == 1e39  # nothing


def test_a_failing_dask_chunk_is_named():
    def broken(block, block_info=None):
        if block_info and block_info[0]["chunk-location"] == (2, 1):
            raise RuntimeError("the sensor was off")
        return block

    array = da.from_array(ONES, chunks=2).map_blocks(broken, meta=np.empty((0, 0)))
    with pytest.raises(StoreError, match="the sensor was off") as caught:
        as_blocks(array, 2)
    assert "reading rows 4 to 5, columns 2 to 3 (dask input) failed" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_missing_or_empty_store_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "empty"):
        refused(StoreError, f"no zarr array can be opened at .*{name}", as_blocks, tmp_path / name)


@pytest.mark.parametrize("limit", [None, 0])
def test_a_damaged_zarr_chunk_is_named(tmp_path, limit):
    array = zarr.create_array(str(tmp_path / "a"), shape=(8, 8), chunks=(2, 4), dtype="f8")
    array[:] = 1.0
    (tmp_path / "a" / "c" / "2" / "1").write_bytes(b"not a chunk")
    place = re.escape(f"reading rows 4 to 7, columns 4 to 7 of {tmp_path / 'a'} (zarr input)")
    with pytest.raises(StoreError, match=place) as caught:
        as_blocks(tmp_path / "a", 2, memory_limit=limit)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("chunks", [((0, 20), (18,)), ((10, 0, 10), (9, 0, 9))])
def test_chunks_of_no_size_are_nothing(chunks):
    empty = da.from_array(np.ones((20, 18)), chunks=chunks)
    for memory_limit in (None, 0):
        assert as_blocks(empty, 2, memory_limit=memory_limit).total == 360
    sparse_chunks = empty.map_blocks(sp.csr_array, meta=sp.csr_array((0, 0)))
    assert as_blocks(sparse_chunks, 2, unstored="zero").total == 360


# -- sparse matrices -------------------------------------------------------------------------

EYE = sp.eye_array(6, 6, format="csr")


def with_entry(row, col, value, dtype="float64"):
    dense = np.eye(6)
    dense[row, col] = value
    return sp.csr_array(dense.astype(dtype))


def damaged(kind=sp.csr_array, **parts):
    matrix = kind(np.eye(4))
    for name, value in parts.items():
        setattr(matrix, name, np.asarray(value))
    return matrix


def displaced(axis, at, to):
    matrix = sp.coo_array(np.eye(4))
    matrix.coords[axis][at] = to
    return matrix


OF_LESS = da.ones((8, 18), chunks=4).map_blocks(
    lambda block: sp.csr_array(block[:0]), meta=sp.csr_array((0, 0)), dtype="f8"
)
SPARSE = [
    (sp.csr_array((0, 5)), "the data are empty, shape 0 x 5"),
    (sp.coo_array(np.ones(4)), "the data have 1 dimension, shape"),
    (EYE.astype(complex), "the entries have dtype complex128; they must be real"),
    (sparse.COO.from_numpy(np.ones((2, 2, 2))), "the data have 3 dimensions"),
    (with_entry(2, 3, np.inf), "the entry at row 2, column 3 is inf; entries must be finite"),
    (with_entry(2, 3, -np.inf, "float32"), "the entry at row 2, column 3 is -inf"),
    (with_entry(4, 0, 1e39), r'row 4, column 0 is 1e\+39, outside the range.*dtype="float64"'),
    (damaged(indptr=[0, 2, 1, 3, 4]), "is damaged: indptr falls after position 1"),
    (damaged(indptr=[0, 1, 2, 3]), "is damaged: indptr must have 5 entries, the first of them 0"),
    (damaged(indptr=[1, 1, 2, 3, 4]), "the first of them 0"),
    (damaged(indptr=[0, 1, 2, 3, 9]), "is damaged: indptr ends at 9, with 4 indices"),
    (damaged(indices=[0, 1, 2, 4]), "column indices go from 0 to 4, but it has 4 columns"),
    (damaged(indices=[-1, 1, 2, 3]), "column indices go from -1 to 3"),
    (damaged(sp.csc_array, indices=[0, 1, 2, 4]), "row indices go from 0 to 4"),
    (damaged(sp.csc_array, indptr=[0, 2, 1, 3, 4]), "indptr falls"),
    (displaced(1, 2, 4), "column indices go from 0 to 4"),
    (OF_LESS, r"is 4 x 4, but reading it gave shape \(0, 4\)"),
]


@pytest.mark.parametrize(("memory_limit", "balance"), [(None, True), (0, False)])
@pytest.mark.parametrize(("data", "message"), numbered(SPARSE))
def test_bad_sparse_data_are_refused(data, message, memory_limit, balance):
    options = {"unstored": "zero", "memory_limit": memory_limit, "balance": balance}
    refused(DataError, message, as_blocks, data, **options)


def test_rows_and_columns_of_nothing():
    dense, rated = np.diag([1, 1, 0, 1, np.nan, 1]), {"unstored": "missing"}
    matrix, match = sp.csr_array(dense), r"2 of 6 rows have no observed entry: row 2, row 4;"
    for balance in (False, True):
        refused(DataError, match, as_blocks, matrix, 2, **rated, balance=balance)
        allowed = as_blocks(matrix, 2, **rated, balance=balance, allow_empty=True)
        assert allowed.total_observed == 4
    assert as_blocks(matrix, 2, unstored="zero").n_missing == 1
    match = r"drop it from the matrix, or pass as_blocks\(V, allow_empty=True\)"
    refused(DataError, match, as_blocks, matrix, 2, **rated)
    empty, match = sp.csr_array((6, 6)), "all 6 x 6 entries are missing"
    refused(DataError, match, as_blocks, empty, **rated, allow_empty=True)
    assert as_blocks(empty, unstored="zero").mean == 0
    dense = np.where(np.arange(6)[:, None] == 3, np.nan, ONES)
    refused(DataError, r"1 of 6 rows .* allow_empty=True", as_blocks, dense)
    assert as_blocks(dense, allow_empty=True).row_observed[3] == 0


def test_fill_values_decide():
    coo = sparse.COO.from_numpy(np.eye(4))
    assert as_blocks(coo).unstored == "zero"
    assert as_blocks(coo, unstored="missing").unstored == "missing"
    rated, wrong = (sparse.COO(coo.coords, coo.data, coo.shape, fill_value=x) for x in (np.nan, 1))
    assert as_blocks(rated).unstored == "missing"
    match = "the input says that entries it does not store are miss"
    refused(OptionError, match, as_blocks, rated, unstored="zero")
    refused(DataError, r"fill_value 1.0; it must be 0 .* or NaN", as_blocks, wrong)


TWICE = sp.coo_array((np.arange(1.0, 7), ([0, 0, 1, 2, 2, 2], [1, 1, 0, 2, 2, 0])), shape=(3, 3))


def doubled(name):
    """Two entries for each of two cells, which `tocsr` would add up."""
    rows, cols = TWICE.coords
    if name == "coo":
        return TWICE
    if name == "dask":
        empty = da.from_array(np.zeros((3, 3)), chunks=3)
        return empty.map_blocks(lambda _: doubled("csr"), meta=sp.csr_array((0, 0)))
    long, short = (rows, cols) if name == "csr" else (cols, rows)
    order, kind = np.lexsort((short, long)), sp.csr_array if name == "csr" else sp.csc_array
    pointers = np.searchsorted(long[order], np.arange(4))
    return kind((TWICE.data[order], short[order], pointers), shape=(3, 3))


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("name", ["coo", "csr", "csc", "dask"])
def test_a_rating_that_is_there_twice_is_refused(name, balance):
    match = r'^2 entries name a cell that .*"missing".*sum_duplicates'
    refused(DataError, match, as_blocks, doubled(name), 1, unstored="missing", balance=balance)
    counted = as_blocks(doubled(name), 1, unstored="zero", balance=balance)
    assert counted.to_numpy().tolist() == [[0, 3, 0], [3, 0, 0], [6, 0, 9]]


def test_ratings_held_out_are_of_one_value_and_one_place():
    rated, cut = {"unstored": "missing"}, damaged(indices=[-1, 1, 2, 3])
    refused(DataError, "2 entries name a cell", hold_out, TWICE, 0.4, **rated)
    assert hold_out(TWICE, 0.4, unstored="zero", random_seed=0).train.shape == (3, 3)
    refused(DataError, "column indices go from -1 to 3", hold_out, cut, 0.4, **rated)
    refused(DataError, "row indices go from -1 to 3", hold_out, displaced(0, 1, -1), 0.4, **rated)
