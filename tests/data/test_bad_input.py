"""What cannot be factorized is refused at the border, with one clear sentence."""

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from scipy import sparse

from daskfactor.data.sources import as_blocks
from daskfactor.errors import DataError, DataWarning, StoreError

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


BAD = [
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
    (
        pd.DataFrame({"a": [1, 2], "who": ["x", "y"]}),
        "1 column of the DataFrame holds no numbers",
    ),
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


@pytest.mark.parametrize("memory_limit", [None, 0])
@pytest.mark.parametrize(
    ("data", "message"), BAD, ids=[f"{n} {message[:40]}" for n, (_, message) in enumerate(BAD)]
)
def test_bad_data_are_refused(data, message, memory_limit):
    with pytest.raises(DataError, match=message) as caught:
        as_blocks(data, memory_limit=memory_limit)
    assert isinstance(caught.value, ValueError)


def test_bad_cells_are_named_by_their_labels():
    array = xr.DataArray(
        changed(2, 3, np.inf), dims=("gene", "cells"), coords={"gene": [*"uvwxyz"]}
    )
    with pytest.raises(DataError, match=r"the entry at row 2 \(w\), column 3 is inf"):
        as_blocks(array)
    frame = pd.DataFrame(without([3], [1]), columns=[*"abcdefghijkl"])
    with pytest.raises(DataError, match="1 of 20 rows"):
        as_blocks(frame)
    with pytest.raises(DataError, match=r"column 1 \(b\)"):
        as_blocks(frame.drop(index=3))


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


def test_what_overflows_float32_fits_float64():
    assert as_blocks(changed(4, 0, 1e39), dtype="float64").maximum == 1e39


@pytest.mark.parametrize(
    ("value", "dtype", "exact"),
    [
        (2**24 + 1, "int64", False),
        (-(2**24) - 1, "int64", False),
        (2**25 + 2, "int32", False),
        (2**25 + 4, "int32", True),
        (2**63, "uint64", True),
        (2**63 + 1, "uint64", False),
        (-(2**63), "int64", True),
        (2**24, "int64", True),
    ],
)
def test_integers_that_float32_rounds_are_reported(value, dtype, exact):
    values = np.ones((4, 4), dtype)
    values[2, 1] = value
    assert (int(np.float32(value)) == value) == exact
    if exact:
        as_blocks(values)
    else:
        with pytest.warns(DataWarning, match=r"1 integer entries above 2\*\*24 were rounded"):
            as_blocks(values)


def test_integers_that_float64_rounds_are_reported():
    with pytest.warns(DataWarning, match=r"above 2\*\*53 were rounded.*rescale"):
        as_blocks(np.full((3, 3), 2**53 + 1), dtype="float64")


def test_values_that_vanish_are_reported():
    with pytest.warns(DataWarning, match="1 entries other than zero became zero"):
        as_blocks(changed(0, 0, 1e-60))


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


def test_a_missing_or_wrong_store_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"no zarr array can be opened at .*nowhere"):
        as_blocks(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match=r"no zarr array can be opened at .*empty"):
        as_blocks(str(tmp_path / "empty"))
    with pytest.raises(DataError, match="nonsense:// is no kind of URL that fsspec knows"):
        as_blocks("nonsense://x/y")
    zarr.open_group(str(tmp_path / "g"), mode="w").create_array("counts", shape=(2, 2), dtype="f4")
    with pytest.raises(DataError, match=r"holds 1 zarr array \(counts\); name one as .*:NAME"):
        as_blocks(tmp_path / "g")


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
    sparse_chunks = empty.map_blocks(sparse.csr_array, meta=sparse.csr_array((0, 0)))
    assert as_blocks(sparse_chunks, 2, unstored="zero").total == 360


def test_a_sparse_chunk_of_another_shape_is_refused():
    chunked = da.ones((8, 18), chunks=4).map_blocks(
        lambda b: sparse.csr_array(b[:0]), meta=sparse.csr_array((0, 0)), dtype="f8"
    )
    with pytest.raises(DataError, match=r"is 4 x 4, but reading it gave shape \(0, 4\)"):
        as_blocks(chunked, 2, unstored="zero")
