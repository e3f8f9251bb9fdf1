import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from daskfactor.kernels.philox import CHUNK, fill_normals, philox4x32
from tests.kernels import reference

KEY = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
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


def normals(shape, key=KEY, iteration=0, factor=0, row0=0, dtype=np.float32):
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
    z = normals(shape, iteration=FULL, factor=1, row0=2**31, dtype=dtype)
    exact = reference.normals(shape, KEY, FULL, 1, 2**31, dtype)
    assert np.abs(z - exact).max() <= tolerance * np.abs(exact).max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 2e-15)])
def test_radius_is_relatively_accurate(dtype, tolerance):
    # A pair has radius**2 = -2 log(uniform); the words are the twin's, tails included.
    n = 200_000
    z = normals((n, 2), dtype=dtype).astype(np.float64)
    words = reference.philox4x32(0, np.arange(n), 0, 0, *(int(k) for k in KEY))[0]
    uniform = (words.astype(dtype) + dtype(0.5)).astype(np.float64) * 2.0**-32
    inside = uniform < 1
    radius = np.sqrt(-2 * np.log(uniform[inside]))
    np.testing.assert_allclose(np.hypot(*z[inside].T), radius, rtol=tolerance)
    assert radius.max() > 4.5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_distribution(dtype):
    z = normals((20_000, 100), dtype=dtype).ravel().astype(np.float64)
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


@pytest.mark.parametrize("change", ["iteration", "factor", "key0", "key1", "row0"])
def test_addresses_are_uncorrelated(change):
    shape = (2_000, 50)
    base, far = {"key": KEY}, {"key": KEY.copy()}
    if change.startswith("key"):
        far["key"][int(change[-1])] ^= np.uint32(1)
    else:
        far[change] = 2_000 if change == "row0" else 1
    a, b = normals(shape, **base), normals(shape, **far)
    assert correlation(a, b) < 5
    assert correlation(a**2, b**2) < 5
    assert not np.any(a == b)


def test_rows_and_components_are_uncorrelated():
    z = normals((40_000, 8)).astype(np.float64)
    for values in (z, z**2):
        matrix = np.corrcoef(values, rowvar=False) - np.eye(8)
        assert np.abs(matrix).max() * np.sqrt(len(z)) < 5
        assert correlation(values[:-1], values[1:]) < 5
    # The two halves of a Box-Muller pair: no structure in the signs either.
    signs = np.sign(z)
    for i in range(8):
        for j in range(i):
            assert abs((signs[:, i] * signs[:, j]).mean()) * np.sqrt(len(z)) < 5


@settings(max_examples=40)
@given(
    n=st.integers(1, 70),
    K=st.integers(1, 33),
    cut=st.integers(0, 70),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_bands_do_not_matter(n, K, cut, dtype):
    cut = min(cut, n)
    whole = normals((n, K), iteration=3, factor=1, row0=11, dtype=dtype)
    parts = [
        normals((cut, K), iteration=3, factor=1, row0=11, dtype=dtype),
        normals((n - cut, K), iteration=3, factor=1, row0=11 + cut, dtype=dtype),
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("K", [1, 2, 3, 5, 7])
def test_more_components_extend_the_row(K):
    np.testing.assert_array_equal(normals((300, 8))[:, :K], normals((300, K)))


def test_no_write_outside_the_band():
    frame = np.full((30, 5), np.nan, np.float32)
    fill_normals(frame[10:20], KEY, 0, 0, 10)
    assert np.isnan(frame[:10]).all()
    assert np.isnan(frame[20:]).all()
    np.testing.assert_array_equal(frame[10:20], normals((30, 5))[10:20])
