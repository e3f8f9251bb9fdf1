"""Rows of a compile-time length, piece by piece, and elementary functions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core.errors import TypingError

from daskfactor.kernels import polynomials
from daskfactor.kernels import rows as vectors
from daskfactor.kernels.jit import jit, jit_exact, stack_array
from tests.refusals import refused

NAMES = "copy_row", "dot_rows", "multiply_rows", "add_products", "scale_row", "add_scaled"
NAMES += ("prefetch_row",)


@given(count=st.integers(1, 700), itemsize=st.sampled_from([4, 8]))
def test_pieces_cover_every_number_once(count, itemsize):
    found = vectors.pieces(count, itemsize)
    ends = [start + width for start, width in found]
    assert [0, *ends[:-1]] == [start for start, _ in found]
    assert ends[-1] == count
    widths = [width for _, width in found]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] * itemsize <= vectors.VECTOR_BYTES
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


def workout(K, functions, empty=stack_array):
    """Every function once, on rows of an array and on ones of their own."""
    copy, dot, multiply, add_products, scale, add_scaled, prefetch = functions
    room = 2 * K

    def function(factor, rows, out):
        own = empty(room, rows.dtype)
        copy(K, rows, 1, own, 0)
        prefetch(K, rows, 2)
        total = dot(K, own, 0, rows, 2)
        add_scaled(K, factor, rows, 0, own, 0)
        multiply(K, own, 0, rows, 2, own, 1)
        add_products(K, own, 1, rows, 1, out, 1)
        add_scaled(K, factor, own, 0, out, 0)
        scale(K, factor, own, 1, out, 2)
        return total

    return function


def compiled(K):
    return jit(workout(K, [getattr(vectors, name) for name in NAMES]))


def plain(K):
    """The same by the functions that stand in when the JIT is off."""
    return workout(K, [getattr(vectors, name).plain for name in NAMES], np.empty)


@pytest.mark.parametrize("K", [1, 3, 8, 13, 16, 32, 63, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-13)])
def test_every_function(K, dtype, tolerance):
    rng = np.random.default_rng(K)
    rows = rng.normal(size=(3, K)).astype(dtype)
    factor, out, expected = dtype(0.75), np.ones((3, K), dtype), np.ones((3, K), dtype)
    total = compiled(K)(factor, rows, out)
    size = np.abs(rows[1]) @ np.abs(rows[2])
    np.testing.assert_allclose(total, plain(K)(factor, rows, expected), atol=tolerance * size)
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)


def test_rows_must_be_contiguous():
    rows = np.ones((4, 3), np.float32).T[:, ::1]
    refused(TypingError, None, compiled(4), np.float32(1), rows, np.ones((3, 4), np.float32))


def test_the_length_must_be_a_constant():
    @jit
    def function(K, rows):
        return vectors.dot_rows(K, rows, 0, rows, 1)

    refused(TypingError, None, function, 4, np.ones((3, 4), np.float32))


@jit_exact
def evaluate_all(x, log, power):
    for i in range(x.size):
        log[i] = polynomials.log(x[i])
        power[i] = polynomials.power(x[i], -1.7)


@jit_exact
def evaluate_expm1(x, out):
    for i in range(x.size):
        out[i] = polynomials.expm1(x[i])


@jit_exact
def evaluate_sincos(x, sine, cosine):
    for i in range(x.size):
        sine[i], cosine[i] = polynomials.sincos(x[i])


@pytest.mark.parametrize(("dtype", "ulps"), [(np.float32, 3), (np.float64, 3)])
def test_log_and_power(dtype, ulps):
    x = np.concatenate([np.geomspace(1e-30, 1e30, 20_001), np.linspace(0.6, 1.6, 20_001)])
    x = x.astype(dtype)
    x = np.abs(x[np.abs(np.log(x)) < 50])
    log, power = np.empty_like(x), np.empty_like(x)
    evaluate_all(x, log, power)
    wide = x.astype(np.longdouble)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(log, np.log(wide).astype(dtype), rtol=ulps * eps, atol=1e-40)
    rtol = 2 * eps if dtype == np.float32 else 300 * eps  # |1.7 log x| ulps
    np.testing.assert_allclose(power, (wide ** np.longdouble(-1.7)).astype(dtype), rtol=rtol)


def test_expm1_which_is_held_within_the_range_of_doubles():
    x = np.concatenate([np.linspace(-700, 700, 10_001), np.geomspace(1e-300, 1, 1_001)])
    out, ends = np.empty_like(x), np.empty(2)
    evaluate_expm1(x, out)
    np.testing.assert_allclose(out, np.expm1(x), rtol=2e-15)
    evaluate_expm1(np.array([-1e300, 1e300]), ends)
    np.testing.assert_allclose(ends, np.expm1([-708.0, 708.0]), rtol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sincos(dtype):
    x = np.linspace(-np.pi / 4, np.pi / 4, 30_001).astype(dtype)
    sine, cosine = np.empty_like(x), np.empty_like(x)
    evaluate_sincos(x, sine, cosine)
    rtol = 2 * np.finfo(dtype).eps
    np.testing.assert_allclose(sine, np.sin(x.astype(np.longdouble)).astype(dtype), rtol=rtol)
    np.testing.assert_allclose(cosine, np.cos(x.astype(np.longdouble)).astype(dtype), rtol=rtol)


def test_python_forms_equal_the_compiled_ones():
    for x in (np.float32(0.3), np.float64(7.7)):
        log, power = np.empty(1, x.dtype), np.empty(1, x.dtype)
        evaluate_all(np.array([x]), log, power)
        f, exponent = polynomials.split(x)
        assert (1 + f) * 2.0**exponent == x
        found = f + polynomials.log_tail(f) + exponent * np.log(2)
        np.testing.assert_allclose(found, log[0], rtol=1e-6)
        sine, cosine = polynomials.sincos(x / 10)
        np.testing.assert_allclose([sine, cosine], [np.sin(x / 10), np.cos(x / 10)], rtol=1e-6)
