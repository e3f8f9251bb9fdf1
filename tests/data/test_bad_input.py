"""What cannot be factorized is refused at the border, with one clear sentence."""

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
    with pytest.raises(DataError, match=message) as caught:
        as_blocks(data, memory_limit=memory_limit)
    assert isinstance(caught.value, ValueError)


def test_masked_entries_may_hold_anything():
    values = changed(2, 3, np.inf)
    values[1, 1] = 1e300
    data = as_blocks(np.ma.MaskedArray(values, values != 1))
    assert data.n_missing == 2
    assert data.maximum == 1
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


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nowhere", StoreError, r"no zarr array can be opened at .*nowhere"),
        ("empty", StoreError, r"no zarr array can be opened at .*empty"),
        ("nonsense://x/y", DataError, "nonsense:// is no kind of URL that fsspec knows"),
        ("g", DataError, r"holds 1 zarr array \(counts\); name one as .*:NAME"),
    ],
)
def test_a_missing_or_wrong_store_is_named(tmp_path, name, error, message):
    (tmp_path / "empty").mkdir()
    zarr.open_group(str(tmp_path / "g"), mode="w").create_array("counts", shape=(2, 2), dtype="f4")
    refused(error, message, as_blocks, name if "://" in name else tmp_path / name)


@pytest.mark.parametrize("limit", [None, 0])
def test_a_damaged_zarr_chunk_is_named(tmp_path, limit):
    array = zarr.create_array(str(tmp_path / "a"), shape=(8, 8), chunks=(2, 4), dtype="f8")
    array[:] = 1.0
    (tmp_path / "a" / "c" / "2" / "1").write_bytes(b"not a chunk")
    with pytest.raises(StoreError) as caught:
        as_blocks(tmp_path / "a", 2, memory_limit=limit)
    message = str(caught.value)
    assert f"reading rows 4 to 7, columns 4 to 7 of {tmp_path / 'a'} (zarr input)" in message
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
    with pytest.raises(DataError, match=message):
        as_blocks(data, unstored="zero", memory_limit=memory_limit, balance=balance)


def test_rows_and_columns_of_nothing():
    dense = np.eye(6)
    dense[2, 2] = 0
    dense[4, 4] = np.nan
    matrix = sp.csr_array(dense)
    for balance in (False, True):
        with pytest.raises(DataError, match=r"2 of 6 rows have no observed entry: row 2, row 4;"):
            as_blocks(matrix, 2, unstored="missing", balance=balance)
        allowed = as_blocks(matrix, 2, unstored="missing", balance=balance, allow_empty=True)
        assert allowed.total_observed == 4
    assert as_blocks(matrix, 2, unstored="zero").n_missing == 1
    with pytest.raises(DataError, match="drop it from the matrix, or pass allow_empty=True"):
        as_blocks(matrix, 2, unstored="missing")
    with pytest.raises(DataError, match="all 6 x 6 entries are missing"):
        as_blocks(sp.csr_array((6, 6)), unstored="missing", allow_empty=True)
    assert as_blocks(sp.csr_array((6, 6)), unstored="zero").mean == 0
    dense = np.where(np.arange(6)[:, None] == 3, np.nan, ONES)
    refused(DataError, r"1 of 6 rows .* allow_empty=True", as_blocks, dense)
    assert as_blocks(dense, allow_empty=True).row_observed[3] == 0


def test_fill_values_decide():
    dense = np.eye(4)
    coo = sparse.COO.from_numpy(dense)
    assert as_blocks(coo).unstored == "zero"
    assert as_blocks(coo, unstored="missing").unstored == "missing"
    rated = sparse.COO(coo.coords, coo.data, coo.shape, fill_value=np.nan)
    assert as_blocks(rated).unstored == "missing"
    with pytest.raises(OptionError, match="the input says that entries it does not store are miss"):
        as_blocks(rated, unstored="zero")
    with pytest.raises(DataError, match=r"fill_value 1.0; it must be 0 .* or NaN"):
        as_blocks(sparse.COO(coo.coords, coo.data, coo.shape, fill_value=1.0))


def doubled(name):
    rows, cols, values = [0, 0, 1, 2, 2, 2], [1, 1, 0, 2, 2, 0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    coo = sp.coo_array((values, (rows, cols)), shape=(3, 3))
    if name == "coo":
        return coo
    order = np.lexsort((cols, rows)) if name == "csr" else np.lexsort((rows, cols))
    long, short = (rows, cols) if name == "csr" else (cols, rows)
    pointers = np.searchsorted(np.array(long)[order], np.arange(4))
    parts = (np.array(values)[order], np.array(short)[order], pointers)
    matrix = (sp.csr_array if name == "csr" else sp.csc_array)(parts, shape=(3, 3))
    if name != "dask":
        return matrix
    return da.from_array(np.zeros((3, 3)), chunks=3).map_blocks(
        lambda _: doubled("csr"), meta=sp.csr_array((0, 0))
    )


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("name", ["coo", "csr", "csc", "dask"])
def test_a_rating_that_is_there_twice_is_refused(name, balance):
    with pytest.raises(DataError, match=r'^2 entries name a cell that .*"missing".*sum_duplicates'):
        as_blocks(doubled(name), 1, unstored="missing", balance=balance)
    counted = as_blocks(doubled(name), 1, unstored="zero", balance=balance)
    assert counted.to_numpy().tolist() == [[0, 3, 0], [3, 0, 0], [6, 0, 9]]


def test_ratings_held_out_are_of_one_value_and_one_place():
    rated = {"unstored": "missing"}
    refused(DataError, "2 entries name a cell", hold_out, doubled("coo"), 0.4, **rated)
    assert hold_out(doubled("coo"), 0.4, unstored="zero", random_seed=0).train.shape == (3, 3)
    with pytest.raises(DataError, match="column indices go from -1 to 3"):
        hold_out(damaged(indices=[-1, 1, 2, 3]), 0.4, **rated)
    refused(DataError, "row indices go from -1 to 3", hold_out, displaced(0, 1, -1), 0.4, **rated)
