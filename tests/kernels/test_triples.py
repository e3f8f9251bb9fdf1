"""Triples become sorted compressed rows, in any order; duplicates keep that of the source."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskfactor.kernels.triples import (
    compress,
    count_blocks,
    count_keys,
    deal_blocks,
    is_sorted,
    look_up,
    triple_type,
)

F4 = np.dtype(np.float32)
cells = st.lists(
    st.tuples(
        st.integers(0, 6), st.integers(0, 4), st.sampled_from([0.0, -0.0, 1.5, -2.0, np.nan])
    ),
    max_size=40,
)


def records(triples: list[tuple[int, int, float]]) -> np.ndarray:
    return np.array(triples, triple_type(F4))


def expected(triples, add, drop_zeros, drop_nans):
    """The plain twin: a dictionary of cells."""
    found: dict[tuple[int, int], float] = {}
    for row, col, value in triples:
        before = found.get((row, col))
        found[row, col] = value if before is None or not add else before + value
    kept = {
        cell: value
        for cell, value in sorted(found.items())
        if not (drop_zeros and value == 0) and not (drop_nans and np.isnan(value))
    }
    return kept, len(triples) - len(found)


@given(cells, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_compress_is_what_a_dictionary_gives(triples, add, drop_zeros, drop_nans, in_order):
    if in_order:
        triples = sorted({(row, col): (row, col, v) for row, col, v in triples}.values())
    wanted, doubles = expected(triples, add, drop_zeros, drop_nans)
    indptr, columns, values, merged = compress(
        records(triples), (7, 5), add=add, drop_zeros=drop_zeros, drop_nans=drop_nans
    )
    rows = np.repeat(np.arange(7), np.diff(indptr))
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == list(wanted)
    np.testing.assert_array_equal(values, np.array(list(wanted.values()), F4))
    assert merged == doubles
    assert not np.signbit(values[values == 0]).any()
    assert indptr[0] == 0


def test_sums_of_duplicates_do_not_lose_what_float32_would():
    triples = records([(0, 0, 2.0**24)] + [(0, 0, 1.0)] * 64)
    _, _, values, merged = compress(triples, (1, 1), add=True, drop_zeros=True, drop_nans=False)
    assert values.tolist() == [2.0**24 + 64]
    assert merged == 64


@pytest.mark.parametrize(
    ("pairs", "answer"),
    [([], True), ([(0, 0), (0, 1), (1, 0)], True), ([(0, 1), (0, 0)], False),
     ([(0, 0), (0, 0)], False), ([(1, 0), (0, 1)], False)],
)  # fmt: skip
def test_is_sorted(pairs, answer):
    assert is_sorted(records([(row, col, 1.0) for row, col in pairs])) == answer


@given(cells)
def test_dealing_keeps_the_order_inside_a_block(triples):
    rows = np.array([t[0] for t in triples], np.int64)
    cols = np.array([t[1] for t in triples], np.int64)
    values = np.arange(len(triples), dtype=F4)
    row_band = np.array([0, 0, 1, 1, 1, 0, 1], np.uint16)
    col_band = np.array([1, 0, 1, 0, 0], np.uint16)
    counts = np.zeros((2, 2), np.int64)
    count_blocks(rows, cols, row_band, col_band, counts)
    assert counts.sum() == len(triples)
    starts = np.concatenate([[0], np.cumsum(counts.ravel())])
    out = np.empty(len(triples), triple_type(F4))
    local = np.arange(7, dtype=np.uint32) + 10
    deal_blocks(
        rows, cols, values, row_band, col_band, local, local, starts[:-1].reshape(2, 2).copy(), out
    )
    for block in range(4):
        part = out[starts[block] : starts[block + 1]]
        inside = (row_band[rows] * 2 + col_band[cols]) == block if rows.size else []
        np.testing.assert_array_equal(part["value"], values[inside])
        np.testing.assert_array_equal(part["row"], rows[inside] + 10)
        np.testing.assert_array_equal(part["col"], cols[inside] + 10)


def test_keys_are_counted_and_looked_up():
    keys = np.array([7, 5, 7, 9], np.int64)
    counts = np.zeros(5, np.int64)
    count_keys(keys, 5, counts)
    assert counts.tolist() == [1, 0, 2, 0, 1]
    table = np.array([0, -1, 1, -1, 2], np.int32)
    out = np.empty(4, np.int64)
    assert look_up(keys, 5, table, out)
    assert out.tolist() == [1, 0, 1, 2]
    for stranger in (4, 6, 10):
        assert not look_up(np.array([7, stranger], np.int64), 5, table, np.empty(2, np.int64))
