import numpy as np
import pytest
from scipy import stats

from daskfactor.kernels.multinomial import PLACE, add_rates, allocate, log_likelihood
from tests.kernels.problems import compressed, window
from tests.kernels.test_random_numbers import check_discrete
from tests.refusals import refused

KEY = np.array([0x12345678, 0x9ABCDEF0], np.uint32)


def problem(m, n, K, dtype=np.float64, mean=3.0):
    rng = np.random.default_rng(7)
    V = rng.poisson(mean * rng.gamma(0.5, size=(m, n))).astype(dtype)
    V[rng.random((m, n)) < 0.2] = np.nan
    return V, rng.gamma(1.0, size=(m, K)).astype(dtype), rng.gamma(1.0, size=(n, K)).astype(dtype)


def sums(view, W, H, offsets=(0, 0), sweep=0):
    SW, SH = np.zeros(W.shape), np.zeros(H.shape)
    allocate(view.arguments[:3], (W, H), offsets, KEY, sweep, (SW, SH))
    return SW, SH


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("K", [1, 2, 7])
def test_every_unit_is_placed_once(K, dtype):
    V, W, H = problem(9, 8, K, dtype, mean=30.0)
    SW, SH = sums(window(V), W, H)
    np.testing.assert_array_equal(SW.sum(axis=1), np.nansum(V, axis=1))
    np.testing.assert_array_equal(SH.sum(axis=1), np.nansum(V, axis=0))
    np.testing.assert_array_equal(SW.sum(axis=0), SH.sum(axis=0))
    assert (SW >= 0).all()


def test_sparse_blocks_give_what_dense_ones_give():
    V, W, H = problem(9, 8, 3)
    dense, *others = (sums(view, W, H) for view in (window(V), *(compressed(V, z) for z in (0, 1))))
    np.testing.assert_equal(others, [dense, dense])


def test_blocks_do_not_matter():
    V, W, H = problem(11, 10, 3)
    SW, SH = np.zeros(W.shape), np.zeros(H.shape)
    for rows in (slice(0, 4), slice(4, 11)):
        for cols in (slice(0, 7), slice(7, 10)):
            part = np.ascontiguousarray(V[rows, cols])
            where = (rows.start + 5, cols.start + 2)
            block, factors = window(part).arguments[:3], (W[rows], H[cols])
            allocate(block, factors, where, KEY, 3, (SW[rows], SH[cols]))
    np.testing.assert_equal((SW, SH), sums(window(V), W, H, (5, 2), 3))
    other = sums(window(V), W, H, (5, 2), 4)
    assert (other[0] != SW).any()


WEIGHTS = np.array([0.5, 3.0, 0.01, 1.5])


def shares_of(count, cells):
    """S of many cells with the same count and weights, one to a row: (cells, K)."""
    V = np.full((cells, 1), float(count))
    return sums(window(V), np.tile(WEIGHTS, (cells, 1)), np.ones((1, 4)))[0]


def check_multinomial(S, count):
    """Marginals by chi-square, and all covariances."""
    p, cells = WEIGHTS / WEIGHTS.sum(), len(S)
    covariance = count * (np.diag(p) - np.outer(p, p))
    error = np.sqrt(np.outer(covariance.diagonal(), covariance.diagonal()) + covariance**2)
    assert (np.abs(S.mean(axis=0) - count * p) < 5 * np.sqrt(covariance.diagonal() / cells)).all()
    spread = 5 * (error + np.sqrt(error)) / np.sqrt(cells)
    assert (np.abs(np.cov(S.T) - covariance) < spread).all()
    for k in range(4):
        check_discrete(S[:, k], stats.binom(count, p[k]))


@pytest.mark.parametrize("count", [1, 3, 4 * PLACE, 4 * PLACE + 1, 200, 2**31])
def test_shares_are_multinomial(count):
    """Below and above the count from which binomials take over."""
    check_multinomial(shares_of(count, 10_000), count)


def test_wrong_shares_are_seen():
    S = shares_of(30, 10_000)
    refused(AssertionError, None, check_multinomial, S[:, [1, 0, 2, 3]], 30)
    # Right means, but the components drawn one by one.
    apart = np.random.default_rng(0).binomial(30, WEIGHTS / WEIGHTS.sum(), (10_000, 4))
    refused(AssertionError, None, check_multinomial, apart, 30)


def test_cells_of_no_weight_are_left_out():
    V, W, H = np.full((2, 2), 5.0), np.array([[0.0, 0.0], [0.0, 2.0]]), np.ones((2, 2))
    SW, SH = sums(window(V), W, H)
    np.testing.assert_array_equal(SW, [[0, 0], [0, 10]])
    np.testing.assert_array_equal(SH, [[0, 5], [0, 5]])


def test_tiny_weights_are_no_zeros():
    W = np.array([[1e-37, 3e-37]], np.float32)
    SW, _ = sums(window(np.full((1, 1), 1000.0, np.float32)), W, W[:, ::-1].copy())
    assert SW.sum() == 1000
    assert abs(SW[0, 0] - 500) < 5 * np.sqrt(250)


@pytest.mark.parametrize("kind", ["dense", "full", "zero", "zero full", "missing"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rates(kind, dtype):
    V, W, H = problem(9, 8, 3, dtype)
    if "full" in kind:
        V = np.nan_to_num(V)
    view = window(V) if kind in ("dense", "full") else compressed(V, "zero" in kind)
    seen = (~np.isnan(V)).astype(np.float64)
    for rows, other, exact in ((True, H, seen @ H), (False, W, seen.T @ W)):
        rates = np.ones(exact.shape)
        add_rates(view, rows, other, rates)
        np.testing.assert_allclose(rates, 1 + exact, rtol=1e-12)


@pytest.mark.parametrize("kind", ["dense", "zero", "missing"])
def test_log_likelihood(kind):
    V, W, H = problem(9, 8, 3)
    view = window(V) if kind == "dense" else compressed(V, kind == "zero")
    exact = np.nansum(stats.poisson.logpmf(V, W @ H.T))
    assert log_likelihood(view, W, H) == pytest.approx(exact, rel=1e-12)
