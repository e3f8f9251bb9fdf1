"""Sparse matrices on a grid: the blocks, what is known about them, and reading back."""

import tracemalloc
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from daskfactor.data.grid import Bands, Grid
from daskfactor.data.sources import as_blocks
from daskfactor.data.sparse import compress, entry_type
from daskfactor.errors import DataWarning, OptionError
from daskfactor.kernels.views import SparseBlock
from tests.refusals import refused

FORMATS = ("csr", "csc", "coo", "lil", "dok", "bsr", "dia")


def counts(rows=70, cols=45, density=0.3, seed=3):
    rng = np.random.default_rng(seed)
    values = rng.poisson(3.0, (rows, cols)) + 1.0
    return np.where(rng.random((rows, cols)) < density, values, 0.0)


def in_format(dense, name):
    with warnings.catch_warnings(action="ignore", category=sp.SparseEfficiencyWarning):
        return sp.coo_array(dense).asformat(name)


def expected(dense, unstored):
    return np.where(dense == 0, np.nan, dense) if unstored == "missing" else dense


def check_blocks(data):
    """Every block keeps the promises that kernels rely on."""
    for block in data.grid.all_blocks():
        view = data.view(*block)
        assert isinstance(view, SparseBlock)
        m, n = data.grid.block_shape(block)
        assert (view.m, view.n, view.zeros) == (m, n, data.unstored == "zero")
        assert view.indptr.shape == (m + 1,)
        assert view.indptr.dtype == np.int32
        assert view.indices.dtype == (np.uint16 if n <= 65536 else np.int32)
        assert view.values.dtype == data.dtype
        assert view.indptr[0] == 0
        assert view.indptr[-1] == view.indices.size == view.values.size == data.n_stored[block]
        for row in range(m):
            own = view.indices[view.indptr[row] : view.indptr[row + 1]].astype(int)
            assert (np.diff(own) > 0).all()
            assert (own < n).all()
        assert all(part.flags.carray for part in view[:3])  # contiguous, aligned, writeable
        assert (view.values != 0).all() if view.zeros else not np.isnan(view.values).any()


CHOICES = [("zero", False, None), ("zero", True, 0), ("missing", False, 0), ("missing", True, None)]
OTHERS = [("missing", True, 0), ("missing", False, None), ("zero", True, None), ("zero", False, 0)]
PAIRS = [(name, *choices[n % 4]) for n, name in enumerate(FORMATS) for choices in (CHOICES, OTHERS)]
"""Every format with either of each choice, and every two choices."""


@pytest.mark.parametrize(("name", "unstored", "balance", "memory_limit"), PAIRS)
def test_every_format_gives_the_same_blocks(name, unstored, balance, memory_limit):
    dense = counts()
    options = {"unstored": unstored, "balance": balance}
    data = as_blocks(in_format(dense, name), 4, memory_limit=memory_limit, **options)
    kept = as_blocks(sp.csr_array(dense), 4, **options)
    with data:
        assert data.is_sparse
        assert data.unstored == unstored
        assert data.in_memory == (memory_limit is None)
        assert data.source.kind == "scipy"
        assert data.fingerprint == kept.fingerprint
        check_blocks(data)
        np.testing.assert_array_equal(data.to_numpy(), expected(dense, unstored))


@pytest.mark.parametrize("unstored", ["zero", "missing"])
@pytest.mark.parametrize("balance", [False, True])
def test_statistics_are_those_of_the_dense_matrix(unstored, balance):
    dense = counts()
    dense[5, 7] = np.nan
    dense[3, 3] = 2.5
    matrix = expected(dense, unstored)
    data = as_blocks(sp.csr_array(dense), 4, unstored=unstored, balance=balance)
    reference = as_blocks(matrix, 4, dtype="float32")
    assert data.mean == pytest.approx(reference.mean)
    for name in ("total_observed", "minimum", "maximum", "is_integer", "n_missing"):
        assert getattr(data, name) == getattr(reference, name)
    rows = slice(None) if data.row_order is None else data.row_order
    cols = slice(None) if data.col_order is None else data.col_order
    np.testing.assert_array_equal(data.row_observed, reference.row_observed[rows])
    np.testing.assert_array_equal(data.col_observed, reference.col_observed[cols])
    observed = ~np.isnan(matrix)
    permuted = observed[rows][:, cols]
    for block in data.grid.all_blocks():
        assert data.n_observed[block] == permuted[data.grid.slices(block)].sum()
    held_out = 1 if unstored == "zero" else 0
    assert data.n_stored.sum() == (dense > 0).sum() + held_out
    np.testing.assert_array_equal(data.missing_cells(), reference.missing_cells())


@given(st.data())
def test_any_matrix_comes_back(data):
    shape = data.draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    cells = st.sampled_from([0.0, 0.0, 1.0, -2.5, np.nan])
    dense = data.draw(hnp.arrays(np.float64, shape, elements=cells))
    unstored = data.draw(st.sampled_from(["zero", "missing"]))
    matrix = expected(dense, unstored)
    if np.isnan(matrix).all():
        return
    blocks = data.draw(st.integers(1, min(shape)))
    options = {"unstored": unstored, "allow_empty": True, "dtype": "float64"}
    chosen = {"balance": st.booleans(), "memory_limit": st.sampled_from([None, 0])}
    chosen = {name: data.draw(own) for name, own in chosen.items()}
    matrix_in = in_format(dense, data.draw(st.sampled_from(["csr", "csc", "coo"])))
    with as_blocks(matrix_in, blocks, **options, **chosen) as found:
        check_blocks(found)
        np.testing.assert_array_equal(found.to_numpy(), matrix)
        np.testing.assert_array_equal(found.missing_cells(), np.nonzero(np.isnan(matrix)))
        rows, cols = np.indices(shape).reshape(2, -1)
        np.testing.assert_array_equal(found.values(rows, cols), matrix[rows, cols])
        options["balance"] = found.row_order is not None
        again = as_blocks(found.observed_sparse(), found.grid, **options)
        assert again.fingerprint == found.fingerprint


def test_explicit_zeros_are_observed_where_others_are_missing():
    matrix = sp.coo_array(([1.0, 0.0, -0.0, 4.0], ([0, 0, 1, 1], [0, 1, 0, 1])), shape=(2, 2))
    rated = as_blocks(matrix, 1, unstored="missing")
    assert (rated.total_observed, rated.minimum) == (4, 0)
    assert not np.signbit(rated.view(0, 0).values).any()
    counted = as_blocks(matrix, 1, unstored="zero")
    assert (counted.total_observed, counted.n_stored.sum()) == (4, 2)
    np.testing.assert_array_equal(rated.to_numpy(), counted.to_numpy())
    assert rated.fingerprint != counted.fingerprint


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int64", "float32", "float64"])
@pytest.mark.parametrize("name", ["csr", "csc", "coo"])
def test_duplicates_are_summed_without_wrapping(name, dtype):
    rows, cols = [0, 0, 0, 1, 1], [1, 1, 1, 0, 0]
    values = np.array([100, 100, 100, 1, 0]).astype(dtype)
    coo = sp.coo_array((values, (rows, cols)), shape=(2, 2))
    if name == "coo":
        matrix = coo
    elif name == "csr":
        matrix = sp.csr_array((values, np.array(cols), np.array([0, 3, 5])), shape=(2, 2))
    else:
        parts = values[[3, 4, 0, 1, 2]], np.array([1, 1, 0, 0, 0]), np.array([0, 2, 5])
        matrix = sp.csc_array(parts, shape=(2, 2))
    before = matrix.data.copy()
    data = as_blocks(matrix, 1, unstored="zero")
    total = 3 if dtype == "bool" else 300
    np.testing.assert_array_equal(data.to_numpy(), [[0, total], [1, 0]])
    np.testing.assert_array_equal(matrix.data, before)
    assert matrix.data is not data.view(0, 0).values


@pytest.mark.parametrize("name", ["bsr", "dia"])
def test_padding_is_not_data(name):
    dense = counts(20, 20)
    dense[:2, :2] = [[1, 0], [0, 2]]
    matrix = sp.bsr_array(dense, blocksize=(2, 2)) if name == "bsr" else in_format(dense, name)
    assert np.count_nonzero(matrix.data) < matrix.data.size
    data = as_blocks(matrix, 2, unstored="missing")
    assert data.total_observed == np.count_nonzero(dense)


def test_the_callers_matrix_is_left_alone():
    matrix = sp.csr_array(counts(20, 20))
    before = matrix.copy()
    data = as_blocks(matrix, 2, unstored="zero", dtype="float64")
    data.view(0, 0).values[:] = -1
    for part in ("data", "indices", "indptr"):
        np.testing.assert_array_equal(getattr(matrix, part), getattr(before, part))


def test_the_meaning_of_unstored_entries_is_said_once():
    matrix = sp.csr_array(counts())
    said = 'taken to be observed zeros, as in counts; say unstored="zero"'
    with pytest.warns(DataWarning, match=said) as seen:
        data = as_blocks(matrix)
    assert seen[0].filename == __file__
    assert data.unstored == "zero"
    for options in ({}, {"unstored": "zero"}):
        assert as_blocks(data, **options) is data
    match = "unstored is 'missing', but these data were made with"
    refused(OptionError, match, as_blocks, data, unstored="missing")
    refused(OptionError, "made without balance=True", as_blocks, data, balance=True)


def test_the_grid_follows_from_the_entries():
    def blocks(rows, cols, entries, **options):
        rng = np.random.default_rng(0)
        where = rng.choice(rows * cols, entries, replace=False)
        matrix = sp.coo_array((np.ones(entries), np.divmod(where, cols)), shape=(rows, cols))
        return as_blocks(matrix, unstored="zero", **options).grid.blocks

    assert blocks(1000, 1000, 4 * 4 * 16_384) == 1
    assert blocks(2000, 2000, 2**21 - 1) == 1
    assert blocks(2000, 2000, 2**21) == 2
    assert blocks(1000, 1000, 2 * 10**5, workers=10) == 3
    grid, matrix = Grid(Bands((0, 10, 70)), Bands((0, 40, 45))), sp.csr_array(counts())
    for balance in (False, True):
        assert as_blocks(matrix, grid, unstored="zero", balance=balance).grid == grid
    match, other = r"grid is for a matrix of shape \(70, 45\)", sp.csr_array(counts(30, 30))
    refused(OptionError, match, as_blocks, other, grid, unstored="zero")
    match = "blocks must be a whole number from 1 to 45"
    refused(OptionError, match, as_blocks, matrix, 46, unstored="zero")


@contextmanager
def traced():
    """Trace memory; afterwards the result returns its peak."""
    peaks = []
    tracemalloc.start()
    try:
        yield peaks.pop
    finally:
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


def test_nothing_is_as_large_as_the_matrix():
    size, entries = 10**6, 10**5
    rng = np.random.default_rng(0)
    where = rng.integers(0, size, entries), rng.integers(0, size, entries)
    matrix = sp.coo_array((rng.random(entries) + 1, where), shape=(size, size))
    with traced() as peak:
        data = as_blocks(matrix, unstored="missing", balance=True, allow_empty=True)
        row, col, value = int(where[0][0]), int(where[1][0]), float(np.float32(matrix.data[0]))
        np.testing.assert_array_equal(data.values([row, row], [col, (col + 1) % size])[0], value)
    assert peak() < 150e6, "a few arrays of a million numbers"
    assert data.nbytes < 20e6
    refused(OptionError, r"too large .*observed_sparse", data.to_numpy)
    refused(OptionError, "999999900000 cells are missing, too many to list", data.missing_cells)
    assert data.observed_sparse().nnz == entries


def test_a_large_matrix_takes_little_more_than_itself():
    entries, rows, cols = 3_000_000, 20_000, 5_000
    rng = np.random.default_rng(0)
    indices = np.sort(rng.integers(0, cols, (rows, entries // rows), np.int32), 1).ravel()
    indptr = np.arange(0, entries + 1, entries // rows)
    matrix = sp.csr_array((rng.random(entries), indices, indptr), shape=(rows, cols))
    size = matrix.data.nbytes + matrix.indices.nbytes
    with traced() as peak:
        data = as_blocks(matrix, 8, unstored="zero")
    assert peak() < 2.2 * size
    assert data.nbytes == pytest.approx(data.n_stored.sum() * 6, rel=0.1)
    options = {"unstored": "zero", "memory_limit": 0, "balance": True}
    with traced() as peak, as_blocks(matrix, 8, **options) as data:
        assert not data.in_memory
    assert peak() < 100e6


def test_balance_evens_the_blocks_out():
    rng = np.random.default_rng(5)
    weight = 1 / np.arange(1, 1001)
    weight /= weight.sum()
    pair = rng.choice(1000, 40_000, p=weight), rng.choice(1000, 40_000, p=weight)
    matrix = sp.coo_array((np.ones(40_000), pair), shape=(1000, 1000))
    plain = as_blocks(matrix, 4, unstored="zero")
    even = as_blocks(matrix, 4, unstored="zero", balance=True)
    assert plain.imbalance > 5
    assert even.imbalance < 1.2
    assert even.n_stored.sum() == plain.n_stored.sum()
    assert even.row_order is not None
    np.testing.assert_array_equal(np.sort(even.row_order), np.arange(1000))
    assert even.fingerprint != plain.fingerprint
    again = as_blocks(matrix.tocsc(), even.grid, unstored="zero", balance=True)
    assert again.fingerprint == even.fingerprint
    assert f"largest {even.imbalance:.2f} times the mean, rows and col" in even.describe()


def test_describe_says_it_in_one_line():
    data = as_blocks(sp.csr_array(np.eye(200)), 2, unstored="zero")
    assert data.describe() == (
        "200 x 200 sparse, 200 stored of 40.0 k (others zero), 2 x 2 blocks "
        "(largest 2.00 times the mean), float32 in memory"
    )
    with as_blocks(sp.csr_array(np.eye(20)), 1, unstored="missing", memory_limit=0) as data:
        assert "(others missing), one block" in data.describe()
        assert data.describe().endswith("float32 in a scratch file")
    dense = as_blocks(np.ones((20, 20)))
    assert not dense.is_sparse
    assert dense.unstored is None
    assert (dense.nbytes, dense.n_stored.sum()) == (1600, 400)
    refused(OptionError, r"these blocks are dense; use to_numpy\(\)", dense.observed_sparse)


# -- entries in any order become sorted compressed rows --------------------------------------

F4 = np.dtype(np.float32)
VALUES = st.sampled_from([0.0, -0.0, 1.5, -2.0, np.nan])
cells = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4), VALUES), max_size=40)


def records(triples):
    return np.array(triples, entry_type(F4))


def by_dictionary(triples, zeros):
    """The plain twin: a dictionary of cells."""
    found = {}
    for row, col, value in triples:
        before = found.get((row, col))
        found[row, col] = value if before is None or not zeros else before + value
    kept = {cell: v for cell, v in sorted(found.items()) if (v != 0 if zeros else not np.isnan(v))}
    return kept, len(triples) - len(found)


@given(cells, st.booleans(), st.booleans())
def test_compress_is_what_a_dictionary_gives(triples, zeros, in_order):
    if in_order:
        triples = sorted({(row, col): (row, col, v) for row, col, v in triples}.values())
    wanted, doubles = by_dictionary(triples, zeros)
    block, merged = compress(records(triples), (7, 5), zeros)
    rows = np.repeat(np.arange(7), np.diff(block.indptr))
    assert list(zip(rows.tolist(), block.indices.tolist(), strict=True)) == list(wanted)
    np.testing.assert_array_equal(block.values, np.array(list(wanted.values()), F4))
    assert merged == doubles
    assert not np.signbit(block.values[block.values == 0]).any()
    assert (block.m, block.n, block.zeros, block.indptr[0]) == (7, 5, zeros, 0)
    assert (block.indptr.dtype, block.indices.dtype, block.values.dtype) == ("i4", "u2", "f4")


def test_sums_of_duplicates_do_not_lose_what_float32_would():
    triples = records([(0, 0, 2.0**24)] + [(0, 0, 1.0)] * 64)
    block, merged = compress(triples, (1, 1), zeros=True)
    assert block.values.tolist() == [2.0**24 + 64]
    assert merged == 64
