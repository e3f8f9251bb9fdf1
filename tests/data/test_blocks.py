"""What `BlockedData` offers beyond its blocks."""

import numpy as np
import pytest

from daskfactor.data.known import Labels, usable_dims
from daskfactor.data.sources import as_blocks
from daskfactor.errors import DataWarning, OptionError
from tests.refusals import refused


def matrix(rows=30, cols=21):
    rng = np.random.default_rng(1)
    values = rng.random((rows, cols), "float32")
    values[rng.random(values.shape) < 0.2] = np.nan
    return values


def test_describe_says_it_in_one_line():
    values = np.ones((10304, 400), "float32")
    data, told = as_blocks(values), "x 8 blocks, float32 in memory"
    assert data.describe() == f"10304 x 400, all 4.1 M observed, 8 {told}"
    assert repr(data) == f"<BlockedData {data.describe()}>"
    values[: 1030 * 5, :200] = np.nan
    told = "3.1 M observed of 4.1 M, 4 x 4 blocks, float32 in memory"
    assert as_blocks(values, 4).describe() == f"10304 x 400, {told}"
    told = "20 x 20, all 400 observed, 2 x 2 blocks, float64 in memory"
    assert as_blocks(np.ones((20, 20)), dtype="float64").describe() == told
    assert "all 2.0 k observed" in as_blocks(np.ones((50, 40))).describe()


@pytest.mark.parametrize("blocks", [1, 2, 5, 21])
def test_missing_cells_come_row_by_row(blocks):
    values = matrix()
    rows, cols = as_blocks(values, blocks).missing_cells()
    assert rows.dtype == cols.dtype == np.int64
    np.testing.assert_array_equal((rows, cols), np.nonzero(np.isnan(values)))
    rows, cols = as_blocks(np.ones((30, 21)), blocks).missing_cells()
    assert rows.shape == cols.shape == (0,)
    assert rows.dtype == np.int64


def test_values_come_in_the_order_asked_for_and_to_numpy_gives_a_copy():
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


@pytest.mark.parametrize(
    ("rows", "cols", "message"),
    [
        ([0, 30], [0, 0], "row indices of cells .* from 0 to 29, .* from 0 to 30"),
        ([0, 1], [-1, 0], "column indices of cells .* from 0 to 20, .* from -1 to 0"),
        ([0.5], [0], "row indices .* got float64"),
        ([0, 1], [0], "as many rows as columns, got 2 rows and 1 columns"),
        ([[0, 1]], [0], r"row indices .* of shape \(1, 2\)"),
        ([True, False], [0, 0], "row indices .* got bool"),
    ],
)
def test_impossible_cells_are_refused(rows, cols, message):
    refused(OptionError, message, as_blocks(matrix()).values, rows, cols)


def test_labels_name_cells_and_tell_names_apart_that_rows_and_columns_share():
    labels = Labels("gene", "cells", {"gene": np.array(["a", "b"])}, {"batch": np.array([4, 5])})
    assert labels.cell(1, 0) == "row 1 (b), column 0"
    Labels("chain", "x", {}, {"component": np.arange(3)})  # names of results are free
    own, other = np.arange(2), np.arange(3)
    with pytest.warns(DataWarning, match="'x' of one is 'x_', 'k' of one is 'k_'"):
        labels = Labels("x", "x", {"x": own, "k": own}, {"x": other, "k": other})
    assert (labels.row_dim, labels.col_dim) == ("x", "x_")
    assert labels.row_coords == {"x": own, "k": own}
    assert labels.col_coords.keys() == {"x_", "k_"}
    assert labels.index[1] is other
    with pytest.warns(DataWarning, match="'y' of one is 'y_'"):  # the dimension has the name
        labels = Labels("x", "y", {"y": own}, {"y": other})
    assert labels.row_coords == {"y_": own}
    assert labels.col_coords == {"y": other}


def test_dims_that_cannot_be_used_are_replaced():
    given = [("a", "b"), (None, 3), ("a", "a"), ("chain", "b"), ("column", None)]
    assert [usable_dims(*dims) for dims in given] == [
        *(("a", "b"), ("row", "3"), ("row", "column"), ("chain", "b"), ("row", "column"))
    ]
