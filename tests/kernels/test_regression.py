"""Regressions of rows against their definition: normal equations, factors, draws."""

import numpy as np
import pytest

from daskfactor.kernels.langevin import fill_normals
from daskfactor.kernels.philox import Address
from daskfactor.kernels.regression import add_equations, draw_rows, transposed, triangle
from daskfactor.kernels.views import BlockView
from tests.kernels import reference
from tests.kernels.problems import compressed, window
from tests.pairwise import pairwise

KEY = np.array([7, 11], np.uint32)
M, N = 9, 13
SHARES = {"complete": 0.0, "few gaps": 0.2, "many gaps": 0.7}


def matrix(missing, dtype=np.float64):
    rng = np.random.default_rng(1)
    V = rng.normal(2.0, 1.0, (M, N)).astype(dtype)
    V[rng.random(V.shape) < missing] = np.nan
    if missing:
        V[3] = np.nan
        V[:, 5] = np.nan
        V[6] = 1.0
        V[6, 5] = np.nan
    return V


def rows_of(count, K, dtype=np.float64):
    return np.random.default_rng(2).normal(0.3, 1.0, (count, K)).astype(dtype)


def square(grams, m, K):
    """Whole matrices from triangles, one for each row."""
    whole = np.zeros((len(grams), K, K))
    whole[:, *np.triu_indices(K)] = grams
    whole = whole + np.swapaxes(whole, 1, 2) - whole * np.eye(K)
    return np.broadcast_to(whole, (m, K, K))


def sums_of(view, other):
    K = other.shape[1]
    grams, targets = np.zeros((1, triangle(K))), np.zeros((view.m, K))
    return add_equations(view, other, grams, targets), targets


def check(view, V, K=6):
    """Both sides of a block against the reference; returns the triangles of its rows."""
    found = []
    for own, wanted in ((view, V), (transposed(view), V.T)):
        other = rows_of(own.n, K, V.dtype)
        grams, targets = sums_of(own, other)
        exact = reference.equations(wanted, other)
        np.testing.assert_allclose(square(grams, own.m, K), exact[0], rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(targets, exact[1], rtol=1e-11, atol=1e-11)
        found.append(grams)
    return found[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("share", SHARES)
def test_normal_equations(share, dtype):
    V = matrix(SHARES[share], dtype)
    assert len(check(window(V), V)) == (1 if share == "complete" else M)
    assert len(check(compressed(V, False), V)) == M


@pytest.mark.parametrize("share", SHARES)
def test_zeros_that_are_not_stored_are_observed(share):
    V = matrix(SHARES[share])
    V[np.random.default_rng(3).random(V.shape) < 0.6] = 0.0
    assert len(check(compressed(V, True), V)) == (1 if share == "complete" else M)


def test_blocks_add_up_and_one_matrix_becomes_many():
    V, K = matrix(0.3), 4
    V[:, :5] = 1.0
    other = rows_of(N, K)
    grams, targets = np.zeros((1, triangle(K))), np.zeros((M, K))
    sizes = []
    for low, high in ((0, 5), (5, 9), (9, N)):
        part = BlockView(V, 0, low, M, high - low)
        grams = add_equations(part, other[low:high], grams, targets)
        sizes.append(len(grams))
    assert sizes == [1, M, M]
    exact = reference.equations(V, other)
    np.testing.assert_allclose(square(grams, M, K), exact[0], rtol=1e-11)
    np.testing.assert_allclose(targets, exact[1], rtol=1e-11)


COLUMNS = np.array(
    [[0.0, 0.5, -1.0, 0.0, 2.0], [1.5, 0.7, 3.0, 1.0, 0.4], [0.0] * 5, [1.0, 1.0, 1.0, 0.0, 1.0]]
)


@pairwise(
    dtype=[np.float32, np.float64], share=list(SHARES), still=[(3,), (0, 3), (), (0, 1, 2, 3, 4)]
)
def test_draws(share, still, dtype):
    V, other, columns = matrix(SHARES[share], dtype), rows_of(N, 5, dtype), COLUMNS.copy()
    columns[3] = 1.0
    columns[3, list(still)] = 0.0
    before = rows_of(M, 5, dtype)
    values, wanted = before.copy(), before.astype(np.float64)
    draw_rows(values, *sums_of(window(V), other), columns, 0.3, Address(KEY, 4, 1, 20))
    z = np.empty((M, 5))
    fill_normals(z, KEY, 4, 1, 20)
    reference.draw_rows(wanted, *reference.equations(V, other), columns, 0.3, z)
    tolerance = 1e-10 if dtype == np.float64 else 1e-6
    np.testing.assert_allclose(values, wanted, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(values[:, still], before[:, still])


def test_rows_have_the_same_bits_however_they_are_split():
    V, other = matrix(0.4), rows_of(N, 5)

    def drawn(low, high):
        values = rows_of(M, 5)[low:high]
        sums = sums_of(BlockView(V, low, 0, high - low, N), other)
        draw_rows(values, *sums, COLUMNS, 0.3, Address(KEY, 4, 1, low))
        return values

    np.testing.assert_array_equal(drawn(0, M), np.concatenate([drawn(0, 4), drawn(4, M)]))
