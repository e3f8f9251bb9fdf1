"""Entries become sorted compressed rows, in any order; duplicates keep that of the source."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from daskfactor.data.sparse import compress, entry_type

F4 = np.dtype(np.float32)
cells = st.lists(
    st.tuples(
        st.integers(0, 6), st.integers(0, 4), st.sampled_from([0.0, -0.0, 1.5, -2.0, np.nan])
    ),
    max_size=40,
)


def records(triples):
    return np.array(triples, entry_type(F4))


def expected(triples, zeros):
    """The plain twin: a dictionary of cells."""
    found = {}
    for row, col, value in triples:
        before = found.get((row, col))
        found[row, col] = value if before is None or not zeros else before + value
    kept = {
        cell: value
        for cell, value in sorted(found.items())
        if (value != 0 if zeros else not np.isnan(value))
    }
    return kept, len(triples) - len(found)


@given(cells, st.booleans(), st.booleans())
def test_compress_is_what_a_dictionary_gives(triples, zeros, in_order):
    if in_order:
        triples = sorted({(row, col): (row, col, v) for row, col, v in triples}.values())
    wanted, doubles = expected(triples, zeros)
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
