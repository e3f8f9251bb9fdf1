"""Random numbers by their addresses: words, normal numbers, and laws made of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from daskfactor.kernels import variates
from daskfactor.kernels.jit import jit_exact, stack_array
from daskfactor.kernels.langevin import fill_normals
from daskfactor.kernels.philox import CHUNK, philox4x32
from daskfactor.kernels.variates import (
    STREAM,
    binomial,
    fill_gamma,
    gamma,
    normal,
    poisson,
    start_cell,
    start_entry,
    uniform,
)
from tests.kernels import reference
from tests.refusals import refused

KEY = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
N = 20_000
UNSEEN = 1e-4
"""Smallest p-value of a right generator here; about one such test in 10**4 would go below."""


FULL = 0xFFFFFFFF
# Random123, kat_vectors, philox4x32 10: counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL,) * 4, (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def normals_of(shape, key=KEY, iteration=0, factor=0, row0=0, dtype=np.float32):
    out = np.empty(shape, dtype)
    fill_normals(out, key, iteration, factor, row0)
    return out


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter, key, words):
    assert tuple(int(word) for word in philox4x32(*counter, *key)) == words
    assert tuple(int(word) for word in reference.philox4x32(*counter, *key)) == words


@given(st.lists(st.integers(0, FULL), min_size=6, max_size=6))
def test_words_equal_the_twin(address):
    assert tuple(philox4x32(*address)) == tuple(reference.philox4x32(*address))


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-14)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (7, 5), (CHUNK + 1, 4), (61, 37), (5, 1001)])
def test_normals_equal_the_twin(shape, dtype, tolerance):
    z = normals_of(shape, iteration=FULL, factor=1, row0=2**31, dtype=dtype)
    exact = reference.normals(shape, KEY, FULL, 1, 2**31, dtype)
    assert np.abs(z - exact).max() <= tolerance * np.abs(exact).max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 2e-15)])
def test_radius_is_relatively_accurate(dtype, tolerance):
    # A pair has radius**2 = -2 log(uniform); the words are the twin's, tails included.
    n = 200_000
    z = normals_of((n, 2), dtype=dtype).astype(np.float64)
    words = reference.philox4x32(0, np.arange(n), 0, 0, *(int(k) for k in KEY))[0]
    uniform = (words.astype(dtype) + dtype(0.5)).astype(np.float64) * 2.0**-32
    inside = uniform < 1
    radius = np.sqrt(-2 * np.log(uniform[inside]))
    np.testing.assert_allclose(np.hypot(*z[inside].T), radius, rtol=tolerance)
    assert radius.max() > 4.5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_distribution(dtype):
    z = normals_of((20_000, 100), dtype=dtype).ravel().astype(np.float64)
    assert stats.kstest(z, "norm").pvalue > 1e-4
    error = 5 / np.sqrt(z.size)
    assert abs(z.mean()) < error
    assert abs(z.var() - 1) < error * np.sqrt(2)
    assert abs((z**3).mean()) < error * np.sqrt(15)
    assert abs((z**4).mean() - 3) < error * np.sqrt(96)
    for bound in (3.0, 4.0):
        expected = 2 * stats.norm.sf(bound) * z.size
        assert abs((np.abs(z) > bound).sum() - expected) < 5 * np.sqrt(expected)
    assert np.abs(z).max() > 4.7
    assert np.unique(z).size > 0.9 * z.size


def correlation(a, b):
    return abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) * np.sqrt(a.size)


def test_rows_and_components_are_uncorrelated():
    z = normals_of((40_000, 8)).astype(np.float64)
    for values in (z, z**2):
        matrix = np.corrcoef(values, rowvar=False) - np.eye(8)
        assert np.abs(matrix).max() * np.sqrt(len(z)) < 5
        assert correlation(values[:-1], values[1:]) < 5
    # The two halves of a Box-Muller pair: no structure in the signs either.
    signs = np.sign(z)
    for i in range(8):
        for j in range(i):
            assert abs((signs[:, i] * signs[:, j]).mean()) * np.sqrt(len(z)) < 5


def test_no_write_outside_the_band():
    frame = np.full((30, 5), np.nan, np.float32)
    fill_normals(frame[10:20], KEY, 0, 0, 10)
    assert np.isnan(frame[:10]).all()
    assert np.isnan(frame[20:]).all()
    np.testing.assert_array_equal(frame[10:20], normals_of((30, 5))[10:20])


# -- laws made of words ------------------------------------------------------------------


@jit_exact
def uniforms(out):
    stream = stack_array(STREAM, np.uint64)
    start_cell(stream, KEY, 0, 0, 0)
    for i in range(out.size):
        out[i] = uniform(stream)


@jit_exact
def normals(out):
    stream = stack_array(STREAM, np.uint64)
    for i in range(out.size):
        start_entry(stream, KEY, 3, 1, i, 0)
        out[i] = normal(stream)


@jit_exact
def gammas(shape, rate, out):
    stream = stack_array(STREAM, np.uint64)
    for i in range(out.size):
        start_entry(stream, KEY, 0, 0, i, 0)
        out[i] = gamma(shape, rate, stream)


@jit_exact
def poissons(mean, out):
    stream = stack_array(STREAM, np.uint64)
    for i in range(out.size):
        start_cell(stream, KEY, 1, i, 0)
        out[i] = poisson(mean, stream)


@jit_exact
def binomials(n, p, out):
    stream = stack_array(STREAM, np.uint64)
    for i in range(out.size):
        start_cell(stream, KEY, 2, i, 7)
        out[i] = binomial(n, p, stream)


def drawn(draw, *parameters, dtype=np.float64):
    out = np.empty(N, dtype)
    draw(*parameters, out)
    return out


def check_continuous(values, law):
    assert stats.kstest(values, law.cdf).pvalue > UNSEEN
    mean, variance, kurtosis = law.stats("mvk")
    assert abs(values.mean() - mean) < 5 * np.sqrt(variance / values.size)
    spread = np.sqrt((kurtosis + 2) / values.size)
    assert abs(values.var() / variance - 1) < 5 * spread


def check_discrete(values, law):
    """Chi-square over cells that hold at least 20 expected counts each, and moments."""
    edges = np.unique(law.ppf(np.linspace(0, 1, 41)[1:-1]))
    expected = np.diff(np.concatenate([[0.0], law.cdf(edges), [1.0]])) * values.size
    found = np.bincount(np.searchsorted(edges, values), minlength=edges.size + 1)
    keep = expected > 20
    rest = values.size - expected[keep].sum()
    expected = np.append(expected[keep], max(rest, 1e-9))
    found = np.append(found[keep], values.size - found[keep].sum())
    if expected[-1] < 20:
        expected, found = expected[:-1], found[:-1]
    statistic = ((found - expected) ** 2 / expected).sum()
    assert stats.chi2(max(expected.size - 1, 1)).sf(statistic) > UNSEEN
    mean, variance, kurtosis = law.stats("mvk")
    assert abs(values.mean() - mean) < 5 * np.sqrt(variance / values.size)
    assert abs(values.var() / variance - 1) < 5 * np.sqrt((kurtosis + 2) / values.size)


def test_uniforms_and_normals():
    values = drawn(uniforms)
    check_continuous(values, stats.uniform())
    assert values.min() > 0
    assert values.max() < 1
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 5 / np.sqrt(N)
    check_continuous(drawn(normals), stats.norm())


GAMMAS = [(0.05, 1.0), (0.3, 2.0), (0.999, 1.0), (1.0, 0.5), (1.7, 3.0), (12.0, 1e-3)]


@pytest.mark.parametrize(("shape", "rate"), [*GAMMAS, (1e4, 5.0), (1e9, 1.0), (1e13, 1e6)])
def test_gamma(shape, rate):
    check_continuous(drawn(gammas, shape, rate), stats.gamma(shape, scale=1 / rate))


def test_gamma_of_a_tiny_shape_is_log_exact():
    """At shape a, log(x) * a is nearly -Exponential(1): x = u**(1 / a) times a number near 1."""
    values = drawn(gammas, 0.02, 1.0)
    seen = values[values > 0]
    law = stats.gamma(0.02)
    assert stats.kstest(law.cdf(seen), stats.uniform(loc=0, scale=1).cdf).pvalue > UNSEEN


MEANS = [1e-3, 0.2, 1.0, 5.5, 9.99, 10.0, 14.3, 100.0, 5e3, 1e6, 1e9]


@pytest.mark.parametrize("mean", MEANS)
def test_poisson(mean):
    check_discrete(drawn(poissons, mean, dtype=np.int64), stats.poisson(mean))


def test_poisson_of_nothing():
    assert not drawn(poissons, 0.0, dtype=np.int64).any()


FEW = [(1, 0.3), (1, 0.8), (3, 0.5), (7, 0.02), (19, 0.5), (20, 0.5), (25, 0.9), (40, 0.26)]
MANY = [(1000, 0.004), (1000, 0.03), (1000, 0.97), (10**6, 0.5)]
HUGE = [(2**31, p) for p in (1e-9, 1e-4, 0.4, 1 - 3e-9)]


@pytest.mark.parametrize(("n", "p"), [*FEW, *MANY, *HUGE])
def test_binomial(n, p):
    values = drawn(binomials, n, p, dtype=np.int64)
    assert values.min() >= 0
    assert values.max() <= n
    check_discrete(values, stats.binom(n, p))


def test_certain_binomials():
    for n, p, result in ((0, 0.5, 0), (5, 0.0, 0), (5, -1e-17, 0), (5, 1.0, 5), (5, 1.1, 5)):
        assert set(drawn(binomials, n, p, dtype=np.int64)) == {result}


def gammas_of(shape, key=KEY, iteration=0, factor=0, row0=0, dtype=np.float64):
    rows = np.arange(row0, row0 + shape[0])[:, None]
    out, shapes = np.empty(shape, dtype), 0.2 + (rows % 5) * np.arange(1, shape[1] + 1)
    fill_gamma(shapes, np.full(shape, 2.0), key, iteration, factor, row0, out)
    return out


FILLED = pytest.mark.parametrize("filled", [normals_of, gammas_of])


@FILLED
@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 60), st.integers(1, 33)),
    cut=st.integers(0, 60),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_bands_and_width_do_not_matter(filled, shape, cut, dtype):
    (n, K), cut, where = shape, min(cut, shape[0]), {"iteration": 3, "factor": 1, "dtype": dtype}
    whole = filled(shape, row0=11, **where)
    parts = filled((cut, K), row0=11, **where), filled((n - cut, K), row0=11 + cut, **where)
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(filled((n, K + 1), row0=11, **where)[:, :K], whole)


@FILLED
@pytest.mark.parametrize("change", ["iteration", "factor", "key0", "key1", "row0"])
def test_every_part_of_the_address_counts(filled, change):
    shape, far = (2_000, 50), {"key": KEY.copy()}
    if change.startswith("key"):
        far["key"][int(change[-1])] ^= np.uint32(1)
    else:
        far[change] = 2_000 if change == "row0" else 1
    a, b = filled(shape), filled(shape, **far)
    if filled is gammas_of:  # whose shapes are alike in every fifth row
        a, b = a[::5], b[::5]
    assert correlation(a, b) < 5
    assert correlation(a**2, b**2) < 5
    assert not np.any(a == b)


def test_entries_and_cells_have_streams_of_their_own():
    @jit_exact
    def both(out):
        stream = stack_array(STREAM, np.uint64)
        start_entry(stream, KEY, 5, 3, 9, 0)
        out[0] = uniform(stream)
        start_cell(stream, KEY, 5, 9, 3)
        out[1] = uniform(stream)

    out = np.empty(2)
    both(out)
    assert out[0] != out[1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_component_is_lost_to_underflow(dtype):
    out = np.empty((500, 2), dtype)
    fill_gamma(np.full(out.shape, 1e-3), np.ones(out.shape), KEY, 0, 0, 0, out)
    assert (out > 0).all()
    assert np.float64(out.min()) ** 2 > 0


def test_rates_may_be_shared_by_all_rows():
    rates, shape = np.array([0.5, 3.0]), np.full((6, 2), 1.5)
    one, other = np.empty((6, 2)), np.empty((6, 2))
    fill_gamma(shape, np.broadcast_to(rates, shape.shape), KEY, 0, 0, 0, one)
    fill_gamma(shape, np.tile(rates, (6, 1)), KEY, 0, 0, 0, other)
    np.testing.assert_array_equal(one, other)


def test_broken_copies_are_seen():
    """A shape below 1 without its boost, counts that are one too many, a chance that is larger."""
    values = drawn(gammas, 1.3, 1.0)
    refused(AssertionError, None, check_continuous, values, stats.gamma(0.3))
    values = drawn(poissons, 1e3, dtype=np.int64) + 1
    refused(AssertionError, None, check_discrete, values, stats.poisson(1e3))
    values = drawn(binomials, 40, 1.03 * 0.3, dtype=np.int64)
    refused(AssertionError, None, check_discrete, values, stats.binom(40, 0.3))


def test_the_tail_of_stirlings_formula():
    @jit_exact
    def tails(k, out):
        for i in range(k.size):
            out[i] = variates._stirling_tail(k[i])

    k = np.array([0, 1, 2, 5, 9, 10, 11, 40, 1000], dtype=np.float64)
    out = np.empty(k.size)
    tails(k, out)
    from scipy.special import gammaln

    exact = gammaln(k + 1) - (np.log(2 * np.pi) / 2 + (k + 0.5) * np.log(k + 1) - (k + 1))
    np.testing.assert_allclose(out, exact, atol=2e-12)
