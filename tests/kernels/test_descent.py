import numpy as np
import pytest
import scipy.sparse as sp

from daskfactor.kernels.descent import descent_kernel
from daskfactor.kernels.views import NO_WEIGHTS
from daskfactor.models.tweedie_law import Tweedie
from tests.kernels.problems import compressed

BETAS = (2.0, 1.0, 0.5, 0.0, -1.0, 0.3)
FLOOR = 1e-3
SHAPE = (17, 11)
K = 5


def visit(beta, block, order, W, H, share_w, share_h, col_w, col_h, step, floor, projected=True):
    kernel, given = descent_kernel(Tweedie(beta), projected, W.shape[1]), (*block, NO_WEIGHTS)
    kernel(given, order, (W, H), (share_w, share_h), (col_w, col_h), step, (floor, ()))


def problem(dtype, seed=0):
    rng = np.random.default_rng(seed)
    V = rng.gamma(2.0, size=SHAPE).astype(dtype) + dtype(0.1)
    V[rng.random(SHAPE) < 0.3] = np.nan
    W, H = (rng.random((n, K)).astype(dtype) for n in SHAPE)
    W[rng.random(W.shape) < 0.2] = 0
    seen = ~np.isnan(V)
    with np.errstate(divide="ignore"):
        shares = [np.where(n > 0, 1 / n, 0).astype(dtype) for n in (seen.sum(1), seen.sum(0))]
    columns = [np.zeros((3, K), dtype) for _ in range(2)]
    for table, pull in zip(columns, (7.0, 1.3), strict=True):
        table[1], table[2] = pull, 1
    return V, rng.permutation(SHAPE[0]), W, H, *shares, *columns


def twin(V, order, W, H, share_w, share_h, col_w, col_h, step, floor, beta, projected):
    """The kernels in plain NumPy, one entry after the other."""
    W, H = W.astype(float), H.astype(float)
    for i in order:
        for j in range(V.shape[1]):
            if np.isnan(V[i, j]):
                continue
            w, h = W[i].copy(), H[j].copy()
            mean = max(w @ h, floor)
            e = np.clip(step * (float(V[i, j]) - mean) * mean ** (beta - 2), -1, 1)
            away = (1.0, 1.0) if projected else (w - col_w[0], h - col_h[0])
            W[i] = w + e * h * col_w[2] - step * col_w[1] * share_w[i] * away[0]
            H[j] = h + e * w * col_h[2] - step * col_h[1] * share_h[j] * away[1]
            if projected:
                W[i], H[j] = np.maximum(W[i], 0), np.maximum(H[j], 0)
    return W, H


CASES = [(beta, np.float32, 2e-5) for beta in BETAS]
CASES += [(beta, np.float64, 1e-12) for beta in (1.0, 0.3)]


@pytest.mark.quick("2.0-float32-2e-05", "0.3-float32-2e-05", "1.0-float64-1e-12")
@pytest.mark.parametrize(("beta", "dtype", "tolerance"), CASES)
def test_both_kernels_equal_their_twin(beta, dtype, tolerance):
    V, *rest = problem(dtype)
    scalars = (0.05, FLOOR)
    exact = twin(V, *rest, *scalars, beta, True)
    for block in (compressed(V, False)[:3], (V, 0, 0)):
        order, W, H, *shares = (array.copy() for array in rest)
        visit(beta, block, order, W, H, *shares, *scalars)
        for ours, theirs in zip((W, H), exact, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
        assert W.min() == 0


def test_real_valued_factors_under_gaussian_priors():
    V, order, W, H, *shares, col_w, col_h = problem(np.float64)
    V, W, H = V - 2, W - 0.5, H - 0.5
    col_w[:, -1] = 0.0, 0.0, 0.0  # a frozen column
    col_h[0] = 0.4
    rest = (*shares, col_w, col_h, 0.05, -np.inf)
    before = W[:, -1].copy()
    exact = twin(V, order, W, H, *rest, 2.0, False)
    visit(2.0, (V, 0, 0), order, W, H, *rest, projected=False)
    np.testing.assert_allclose(W, exact[0], rtol=1e-12)
    np.testing.assert_allclose(H, exact[1], rtol=1e-12)
    assert (W < 0).any()
    assert (W[:, -1] == before).all()


def test_a_small_step_goes_down_the_gradient():
    """To first order in the step, a visit of every entry is a step of gradient descent."""
    V, order, W, H, *rest = problem(np.float64)
    W, H = W + 0.5, H + 0.5
    step = 1e-7
    mu = W @ H.T
    R = np.where(np.isnan(V), 0, (V - mu) / mu)
    W_new, H_new = W.copy(), H.copy()
    visit(1.0, (V, 0, 0), order, W_new, H_new, *rest, step, FLOOR)
    np.testing.assert_allclose((W_new - W) / step, R @ H - 7.0, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose((H_new - H) / step, R.T @ W - 1.3, rtol=1e-4, atol=1e-4)


def test_an_entry_far_off_moves_no_row_further_than_the_other_is_long():
    V, one, columns = np.array([[1000.0]]), np.ones(1), np.zeros((3, 3))
    W, H = np.full((1, 3), 1e-4), np.full((1, 3), 3e-4)
    rest = (one, one, columns, columns, 10.0, 1e-3)
    visit(1.0, (V, 0, 0), np.zeros(1, int), W, H, *rest)
    np.testing.assert_allclose(np.concatenate([W, H]), 4e-4)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_bits_do_not_depend_on_how_a_block_is_stored(beta):
    """Compressed, dense, as a window of more, and as SciPy compresses it."""
    V, order, *factors = problem(np.float32)
    wide = np.full((SHAPE[0] + 5, SHAPE[1] + 7), 9.0, np.float32)
    wide[3:20, 4:15] = V
    matrix = sp.csr_array(np.nan_to_num(V))
    scipys = matrix.indptr, matrix.indices, matrix.data
    found = []
    for block in (compressed(V, False)[:3], (V, 0, 0), (wide, 3, 4), scipys):
        W, H, *shares = (array.copy() for array in factors)
        visit(beta, block, order, W, H, *shares, 0.05, FLOOR)
        found.append(W.tobytes() + H.tobytes())
    assert len(set(found)) == 1
