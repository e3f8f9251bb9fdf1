"""Weights against two other ways to solve the quadratic programme."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy import optimize

from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.stein import discrepancy, stein_weights
from tests.refusals import refused


def random_matrix(seed, count, rank=None, spread=0.0):
    """Positive (semi)definite, with diagonals that differ by up to 10 ** spread."""
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((count, rank or count + 2)) + rng.standard_normal(rank or count + 2)
    root *= 10 ** (0.5 * spread * rng.random(count))[:, None]
    return np.asarray(root @ root.T)


def enumerated(K):
    """The best solution over all supports, each from its linear equations."""
    count = len(K)
    best, weights = np.inf, np.zeros(count)
    for size in range(1, count + 1):
        for support in combinations(range(count), size):
            own = list(support)
            try:
                x = np.linalg.solve(K[np.ix_(own, own)], np.ones(size))
            except np.linalg.LinAlgError:
                continue
            if x.min() < 0 or not x.sum() > 0:
                continue
            w = np.zeros(count)
            w[own] = x / x.sum()
            if w @ K @ w < best:
                best, weights = float(w @ K @ w), w
    return best, weights


@pytest.mark.parametrize("count", [2, 3, 5, 8, 12])
@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_weights_are_those_of_an_enumeration_of_supports(count, spread):
    for seed in range(4):
        K = random_matrix(seed, count, spread=spread)
        value, weights = enumerated(K)
        found = stein_weights(K)
        assert found @ K @ found == pytest.approx(value, rel=1e-8)
        assert_allclose(found, weights, atol=1e-8)


COUNTS = st.integers(1, 30)


@given(seed=st.integers(0, 10**6), count=COUNTS, rank=COUNTS, spread=st.floats(0, 24))
@settings(deadline=None)
def test_never_worse_than_equal_weights_or_one_particle(seed, count, rank, spread):
    K = random_matrix(seed, count, rank, spread)
    w, equal = stein_weights(K), np.full(count, 1 / count)
    assert w.shape == (count,)
    assert w.min() >= 0
    assert w.sum() == pytest.approx(1.0, abs=1e-12)
    value, rounding = w @ K @ w, 1e-12 * np.abs(K).max()
    assert value <= equal @ K @ equal
    assert value <= K.diagonal().min() + (rounding if count == 1 else 0.0)


def test_a_bad_particle_takes_no_digits_from_good_ones():
    good, K = random_matrix(1, 4), np.zeros((5, 5))
    K[:4, :4], K[4, 4] = good, 1e20
    w = stein_weights(K)
    assert_allclose(w[:4], enumerated(good)[1], atol=1e-8)
    assert 0 < w[4] < 1e-15


def test_singular_matrices():
    twins = np.array([[2.0, 2.0, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, 1.0]])
    w = stein_weights(twins)
    assert_allclose([w[0] + w[1], w[2]], [1 / 3, 2 / 3], atol=1e-8)
    assert_array_equal(stein_weights([[0.0, 0.0], [0.0, 1.0]]), [1.0, 0.0])
    assert_array_equal(stein_weights([[3.0]]), [1.0])
    slightly = twins - 1e-14 * np.eye(3)  # a negative eigenvalue, from rounding
    assert stein_weights(slightly).sum() == pytest.approx(1.0)


def test_a_solver_that_gives_up_is_told_of(monkeypatch):
    def give_up(*args, **options):
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr(optimize, "nnls", give_up)
    with pytest.warns(SamplingWarning, match="equal weights or the best single"):
        w = stein_weights([[1.0, 0.0], [0.0, 2.0]])
    assert_array_equal(w, [0.5, 0.5])


def test_discrepancy():
    K = np.array([[4.0, 1.0], [1.0, 2.0]])
    assert discrepancy(K) == pytest.approx(np.sqrt(2.0))
    assert discrepancy(K, [0.0, 1.0]) == pytest.approx(np.sqrt(2.0))
    assert discrepancy(K, stein_weights(K)) == pytest.approx(np.sqrt(1.75))
    assert discrepancy([[1e-20, -1e-19], [-1e-19, 1e-20]]) == 0.0


def test_matrices_that_are_refused():
    for matrix, message in (
        (np.ones((2, 3)), "square"),
        (np.zeros((0, 0)), "square"),
        ([[1.0, np.nan], [np.nan, 1.0]], "finite"),
        ([[1.0, 0.5], [0.2, 1.0]], "symmetric"),
        ([[-1.0, 0.0], [0.0, 1.0]], "negative diagonal"),
    ):
        refused(OptionError, message, stein_weights, matrix)


@pytest.mark.parametrize("weights", [[1.0], [0.7, 0.7], [1.5, -0.5], [np.nan, 1.0]])
def test_weights_that_are_refused(weights):
    refused(OptionError, "weights must be", discrepancy, np.eye(2), weights)
