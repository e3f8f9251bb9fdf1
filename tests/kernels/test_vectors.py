"""Rows of a compile-time length, piece by piece."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core.errors import TypingError

from daskfactor.kernels import linalg as vectors
from daskfactor.kernels.jit import jit, stack_array
from daskfactor.kernels.linalg import (
    VECTOR_BYTES,
    add_row,
    add_to_row,
    dot_row,
    load_row,
    prefetch_row,
    store_row,
)


@given(count=st.integers(1, 700), itemsize=st.sampled_from([4, 8]))
def test_pieces_cover_every_number_once(count, itemsize):
    found = vectors.pieces(count, itemsize)
    ends = [start + width for start, width in found]
    assert [0, *ends[:-1]] == [start for start, _ in found]
    assert ends[-1] == count
    widths = [width for _, width in found]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] * itemsize <= VECTOR_BYTES
    assert all(width & (width - 1) == 0 for width in widths)


@given(size=st.integers(1, 1000))
def test_prefetch_stays_inside_the_row_and_touches_its_lines(size):
    offsets = vectors._prefetched(size)
    assert all(0 <= offset < size for offset in offsets)
    if size <= vectors.MOST_PREFETCHED:
        for shift in range(0, 64, 4):
            lines = {(shift + byte) // 64 for byte in range(size)}
            touched = {(shift + offset) // 64 for offset in offsets}
            assert touched == lines or size % 64 == 0


def workout(K):
    @jit
    def function(factor, rows, out):
        registers = stack_array(K, rows.dtype)
        load_row(K, rows, 1, registers)
        prefetch_row(K, rows, 2)
        total = dot_row(K, registers, rows, 2)
        add_row(K, factor, rows, 0, registers)
        add_to_row(K, factor, registers, out, 0)
        store_row(K, registers, out, 2)
        return total

    return function


def plain(K, factor, rows, out):
    """The same by the functions that stand in when the JIT is off."""
    registers = np.empty(K, rows.dtype)
    vectors._plain_load_row(K, rows, 1, registers)
    vectors._plain_prefetch_row(K, rows, 2)
    total = vectors._plain_dot_row(K, registers, rows, 2)
    vectors._plain_add_row(K, factor, rows, 0, registers)
    vectors._plain_add_to_row(K, factor, registers, out, 0)
    vectors._plain_store_row(K, registers, out, 2)
    return total


@pytest.mark.parametrize("K", [1, 3, 8, 13, 16, 32, 63, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-13)])
def test_every_function(K, dtype, tolerance):
    rng = np.random.default_rng(K)
    rows = rng.normal(size=(3, K)).astype(dtype)
    factor, out, expected = dtype(0.75), np.ones((3, K), dtype), np.ones((3, K), dtype)
    total = workout(K)(factor, rows, out)
    size = np.abs(rows[1]) @ np.abs(rows[2])
    np.testing.assert_allclose(total, plain(K, factor, rows, expected), atol=tolerance * size)
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)


def test_rows_must_be_contiguous():
    rows = np.ones((4, 3), np.float32).T[:, ::1]
    with pytest.raises(TypingError):
        workout(4)(np.float32(1), rows, np.ones((3, 4), np.float32))


def test_the_length_must_be_a_constant():
    @jit
    def function(K, rows):
        return dot_row(K, rows[0], rows, 1)

    with pytest.raises(TypingError):
        function(4, np.ones((3, 4), np.float32))
