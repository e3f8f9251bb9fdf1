"""Blocks: what they tell of themselves, and sharing them with other processes, to the bit."""

import multiprocessing
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask
import numpy as np
import pytest
import scipy.sparse as sp
import zarr

from daskfactor import as_blocks, convert
from daskfactor.data.blocks import MAX_OPEN, BlockedData, open_shared
from daskfactor.data.labels import Labels, usable_dims
from daskfactor.data.storage import PREFIX
from daskfactor.errors import DataWarning, OptionError, StoreError
from daskfactor.kernels.views import BlockView, SparseBlock
from tests.refusals import refused

RNG = np.random.default_rng(4)
DENSE = np.where(RNG.random((50, 40)) < 0.4, RNG.random((50, 40)), np.nan).astype("float32")
MATRIX = sp.csr_array(np.nan_to_num(DENSE))


@pytest.fixture(autouse=True)
def folder(tmp_path):
    place = tmp_path / "scratch"
    with dask.config.set({"temporary-directory": str(place)}):
        yield place
    assert not place.exists() or list(place.iterdir()) == []


def dense_zarr(tmp_path):
    zarr.create_array(str(tmp_path / "v"), data=DENSE, chunks=(7, 40))
    return str(tmp_path / "v")


def store(tmp_path):
    convert(MATRIX, tmp_path / "s.zarr", unstored="zero", blocks=3, progressbar=False)
    return str(tmp_path / "s.zarr")


SHEET, ZERO = np.asfortranarray(DENSE), {"unstored": "zero"}
KINDS = {
    "array": ("file", lambda f: as_blocks(DENSE.copy(), 3)),
    "cache": ("file", lambda f: as_blocks(SHEET, 3, dtype="float64")),
    "scratch": ("file", lambda f: as_blocks(SHEET, 3, memory_limit=0)),
    "sparse": ("file", lambda f: as_blocks(MATRIX, 3, **ZERO)),
    "balanced": ("file", lambda f: as_blocks(MATRIX, 3, unstored="missing", balance=True)),
    "sparse scratch": ("file", lambda f: as_blocks(MATRIX, 3, memory_limit=0, **ZERO)),
    "zarr": ("zarr", lambda f: as_blocks(dense_zarr(f), 3, dtype="float64")),
    "zarr in scratch": ("zarr", lambda f: as_blocks(dense_zarr(f), 3, memory_limit=0)),
    "store": ("store", lambda f: as_blocks(store(f))),
    "store, other blocks": ("file", lambda f: as_blocks(store(f), 4)),
}


def arrays(view):
    return list(view[:3]) if isinstance(view, SparseBlock) else [view.block]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("memory_limit", [None, 0])
def test_copies_give_the_blocks_bit_for_bit(name, memory_limit, tmp_path):
    kind, make = KINDS[name]
    data = make(tmp_path)
    handle = data.share()
    assert handle.kind == kind
    sent = pickle.dumps(handle)
    assert len(sent) < (5000 if kind == "zarr" else 1000)
    copy = open_shared(pickle.loads(sent), memory_limit)
    assert isinstance(copy, BlockedData)
    blocks = data.grid.all_blocks()
    wanted = {block: [own.copy() for own in arrays(data.view(*block))] for block in blocks}

    def check(block):
        view = copy.view(*block)
        for array, found in zip(wanted[block], arrays(view), strict=True):
            np.testing.assert_array_equal(found, array, strict=True)
            assert found.flags.behaved  # aligned and writeable
        if isinstance(view, BlockView):
            assert view.array.flags.c_contiguous

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, blocks * 3))
    copy.close()
    data.close()


FACTS = (
    *("grid", "shape", "dtype", "source", "unstored", "is_sparse", "nbytes", "imbalance"),
    *("n_stored", "n_observed", "row_observed", "col_observed", "total_observed", "n_missing"),
    *("total", "mean", "minimum", "maximum", "is_integer", "fingerprint", "row_order"),
    "col_order",
)


@pytest.mark.parametrize("name", KINDS)
def test_a_pickled_copy_stands_in_for_the_data(name, tmp_path):
    data = KINDS[name][1](tmp_path)
    copy = pickle.loads(pickle.dumps(data))
    assert copy is not data
    assert pickle.loads(pickle.dumps(data)) is copy, "one for each data set and process"
    for fact in FACTS:
        np.testing.assert_equal(getattr(copy, fact), getattr(data, fact), fact)
    for fact in ("row_dim", "col_dim"):
        assert getattr(copy.labels, fact) == getattr(data.labels, fact)
    np.testing.assert_array_equal(copy.to_numpy(), data.to_numpy())
    data.close()


def test_few_data_sets_stay_open():
    every = [as_blocks(DENSE.copy(), 2) for _ in range(MAX_OPEN + 1)]
    copies = [pickle.loads(pickle.dumps(data)) for data in every]
    assert pickle.loads(pickle.dumps(every[-1])) is copies[-1]
    assert pickle.loads(pickle.dumps(every[0])) is not copies[0]
    np.testing.assert_array_equal(copies[0].view(0, 0).block, every[0].view(0, 0).block)


def checked(data, pipe):
    try:
        if not isinstance(data, BlockedData):
            data = open_shared(data)
        pipe.send(sum(float(data.view(*block).values.sum()) for block in data.grid.all_blocks()))
    except StoreError as error:
        pipe.send(str(error))


def elsewhere(data):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=checked, args=(data, there))
    process.start()
    found = here.recv()
    process.join()
    return found


def test_another_process_reads_and_removes_nothing(folder):
    data = as_blocks(MATRIX, 3, unstored="zero", dtype="float64")
    assert elsewhere(data) == pytest.approx(data.total)
    assert len(list(folder.iterdir())) == 1
    handle = data.share()
    data.unshare()
    data.unshare()
    said = elsewhere(handle)
    assert "cannot read the shared data at" in said
    assert "only be shared with workers on the same machine" in said
    assert "daskfactor convert" in said
    assert data.share().location != handle.location
    data.close()


def test_the_file_goes_with_the_data(folder):
    data = as_blocks(DENSE.copy(), 2)
    copy = pickle.loads(pickle.dumps(data))
    assert len(list(folder.iterdir())) == 1
    del data
    assert list(folder.iterdir()) == []
    np.testing.assert_array_equal(copy.to_numpy(), DENSE)


@pytest.mark.parametrize("harm", ["other", "cut", "something else"])
def test_a_file_of_other_data_is_refused(harm):
    with as_blocks(DENSE.copy(), 2) as data, as_blocks(DENSE.copy(), 2) as other:
        handle = data.share()
        assert handle.token != other.share().token
        if harm == "other":
            handle = handle._replace(location=other.share().location)
        elif harm == "cut":
            os.truncate(handle.location, 5000)
        else:
            size = Path(handle.location).stat().st_size
            Path(handle.location).write_bytes(b"x" * size)
        refused(StoreError, "cannot read the shared data", open_shared, handle)


def test_files_of_killed_processes_are_swept_away(folder):
    with as_blocks(DENSE.copy(), 2) as data, as_blocks(DENSE.copy(), 2) as another:
        held = Path(data.share().location)
        old, young = (folder / f"{PREFIX}{name}.blocks" for name in ("old", "young"))
        for left in (old, young):
            left.write_bytes(b"left behind")
        for place in (old, held):
            os.utime(place, (time.time() - 3600,) * 2)
        another.share()
        assert [place.exists() for place in (old, young, held)] == [False, True, True]
        young.unlink()


def test_data_that_are_gone_or_changed_are_refused(tmp_path):
    place, gone = dense_zarr(tmp_path), {"location": str(tmp_path / "nowhere")}
    handle, stored = as_blocks(place, 3).share(), as_blocks(store(tmp_path)).share()
    zarr.create_array(place, data=DENSE[:30], chunks=(7, 40), overwrite=True)
    convert(2 * MATRIX, stored.location, overwrite=True, progressbar=False, **ZERO)
    for shared, match in (
        (handle, "is not the one that was shared: its shape"),
        (handle._replace(**gone), r"cannot open the data at .*under one location"),
        (stored._replace(**gone), "cannot open the data at"),
        (stored, "its blocks are others"),
    ):
        refused(StoreError, match, open_shared, shared)


# -- what is offered beside blocks -----------------------------------------------------------


def matrix(rows=30, cols=21):
    rng = np.random.default_rng(1)
    values = rng.random((rows, cols), "float32")
    values[rng.random(values.shape) < 0.2] = np.nan
    return values


def test_describe_says_it_in_one_line():
    values = np.ones((10304, 400), "float32")
    data = as_blocks(values)
    assert data.describe() == "10304 x 400, all 4.1 M observed, one block, float32 in memory"
    assert repr(data) == f"<BlockedData {data.describe()}>"
    values[: 1030 * 5, :200] = np.nan
    told = "3.1 M observed of 4.1 M, 4 x 4 blocks, float32 in memory"
    assert as_blocks(values, 4).describe() == f"10304 x 400, {told}"
    told = "20 x 20, all 400 observed, 2 x 2 blocks, float64 in memory"
    assert as_blocks(np.ones((20, 20)), 2, dtype="float64").describe() == told
    assert "all 2.0 k observed" in as_blocks(np.ones((50, 40))).describe()


def test_values_come_in_the_order_asked_for_and_where_none_is_missing_nothing():
    values = matrix()
    data = as_blocks(values, 4)
    rng = np.random.default_rng(2)
    rows, cols = rng.integers(0, 30, 200), rng.integers(0, 21, 200)
    np.testing.assert_array_equal(data.values(rows, cols), values[rows, cols])
    np.testing.assert_array_equal(data.values(29, 20), values[29:, 20])
    nothing = data.values([], [])
    assert (nothing.shape, nothing.dtype) == ((0,), np.float32)
    copy = as_blocks(values, 2).to_numpy()
    np.testing.assert_array_equal(copy, values)
    assert not np.shares_memory(copy, values)
    rows, cols = as_blocks(np.ones((30, 21)), 2).missing_cells()
    assert rows.shape == cols.shape == (0,)
    assert rows.dtype == cols.dtype == np.int64


@pytest.mark.parametrize(
    ("rows", "cols", "message"),
    [
        ([0, 30], [0, 0], "positions of rows must lie between 0 and 29, got 0 to 30"),
        ([0, 1], [-1, 0], "positions of columns must lie between 0 and 20, got -1 to 0"),
        ([0.5], [0], "got rows of dtype float64"),
        ([0, 1], [0], "rows and columns must have equal lengths, got 2 and 1"),
        ([[0, 1]], [0], r"got rows of dtype int64, shape \(1, 2\)"),
        ([True, False], [0, 0], "got rows of dtype bool"),
    ],
)
def test_impossible_cells_are_refused(rows, cols, message):
    refused(OptionError, message, as_blocks(matrix()).values, rows, cols)


def test_labels_name_cells_and_tell_names_apart_that_rows_and_columns_share():
    labels = Labels("gene", "cells", {"gene": np.array(["a", "b"])}, {"batch": np.array([4, 5])})
    assert labels.cell(1, 0) == "row 1 (b), column 0"
    own, other = np.arange(2), np.arange(3)
    with pytest.warns(DataWarning, match="'x' of one is 'x_', 'k' of one is 'k_'"):
        labels = Labels("x", "x", {"x": own, "k": own}, {"x": other, "k": other})
    assert (labels.row_dim, labels.col_dim) == ("x", "x_")
    assert labels.row_coords == {"x": own, "k": own}
    assert labels.col_coords.keys() == {"x_", "k_"}
    assert labels.index[1] is other
    with pytest.warns(DataWarning, match="'y' of one is 'y_'"):  # the dimension has the name
        labels = Labels("x", "y", {"y": own}, {"y": other})
    assert (labels.row_coords, labels.col_coords) == ({"y_": own}, {"y": other})
    given = [("a", "b"), (None, 3), ("a", "a"), ("column", None)]
    assert [usable_dims(*dims) for dims in given] == [
        *(("a", "b"), ("row", "3"), ("row", "column"), ("row", "column"))
    ]
