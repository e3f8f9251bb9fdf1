"""Sparse matrices that cannot be factorized are refused at the border."""

import numpy as np
import pytest
import scipy.sparse as sp
import sparse

from daskfactor.data.holdout import hold_out
from daskfactor.data.sources import as_blocks
from daskfactor.errors import DataError, DataWarning, OptionError

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


def displaced():
    matrix = sp.coo_array(np.eye(4))
    matrix.coords[1][2] = 4
    return matrix


BAD = [
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
    (displaced(), "column indices go from 0 to 4"),
]


@pytest.mark.parametrize(("memory_limit", "balance"), [(None, True), (0, False)])
@pytest.mark.parametrize(
    ("data", "message"), BAD, ids=[f"{n} {message[:30]}" for n, (_, message) in enumerate(BAD)]
)
def test_bad_data_are_refused(data, message, memory_limit, balance):
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


def test_allow_empty_counts_for_dense_data_too():
    dense = np.ones((6, 4))
    dense[3] = np.nan
    with pytest.raises(DataError, match=r"1 of 6 rows .* allow_empty=True"):
        as_blocks(dense)
    assert as_blocks(dense, allow_empty=True).row_observed[3] == 0


def test_what_is_lost_in_conversion_is_said():
    with pytest.warns(DataWarning, match=r"1 integer entries above 2\*\*24 were rounded"):
        as_blocks(sp.csr_array([[2**24 + 1, 1], [1, 1]]), unstored="zero")
    with pytest.warns(DataWarning, match="1 entries other than zero became zero"):
        data = as_blocks(sp.csr_array([[1e-60, 1], [1, 1]]), unstored="zero")
    assert data.n_stored.sum() == 3


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
    import dask.array as da

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
    with pytest.raises(DataError, match="2 entries name a cell"):
        hold_out(doubled("coo"), 0.4)
    assert hold_out(doubled("coo"), 0.4, unstored="zero", random_seed=0).train.shape == (3, 3)
    with pytest.raises(DataError, match="column indices go from -1 to 3"):
        hold_out(damaged(indices=[-1, 1, 2, 3]), 0.4)
    displaced = sp.coo_array(np.eye(4))
    displaced.coords[0][1] = -1
    with pytest.raises(DataError, match="row indices go from -1 to 3"):
        hold_out(displaced, 0.4)
