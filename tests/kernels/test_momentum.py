import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskfactor.kernels.langevin import drift, kick_drift, refresh, sums_of_squares
from daskfactor.kernels.philox import fill_normals
from tests.kernels import reference

KEY = np.array([5, 8], np.uint32)


def band(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x, momentum, grad = (rng.normal(size=shape).astype(dtype) for _ in range(3))
    weights = rng.poisson(2.0, size=(shape[0], 1)).astype(dtype)
    columns = rng.gamma(2.0, size=(4, shape[1]))
    columns[3] = rng.random(shape[1]) < 0.7
    return x, momentum, grad, weights, columns.astype(dtype)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (7, 5), (65, 3), (40, 100)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-5), (np.float64, 1e-12)])
def test_kernels_equal_their_twins(shape, dtype, tolerance):
    x, momentum, grad, weights, columns = band(shape, dtype)
    mixed, exact = momentum.copy(), momentum.copy()
    refresh(mixed, 0.8, KEY, 6, 1, 13)
    reference.refresh(exact, 0.8, KEY, 6, 1, 13)
    np.testing.assert_allclose(mixed, exact, rtol=tolerance, atol=tolerance)
    squares, exact = np.ones((2, shape[1]))
    sums_of_squares(x, columns[0].astype(float), squares)
    reference.sums_of_squares(x, columns[0].astype(float), exact)
    np.testing.assert_allclose(squares, exact, rtol=1e-12)
    assert squares.min() > 1
    got, expected = (x.copy(), momentum.copy()), (x.astype(float), momentum.astype(float))
    for kernels, (position, speed) in (
        ((kick_drift, drift), got),
        ((reference.kick_drift, reference.drift), expected),
    ):
        kernels[0](position, speed, grad, weights, columns, 0.3, 0.5)
        kernels[1](position, speed, weights, columns, 0.3, 0.5)
    np.testing.assert_allclose(got[0], expected[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(got[1], expected[1], rtol=tolerance, atol=tolerance)


def test_frozen_columns_never_move():
    x, momentum, grad, weights, columns = band((20, 8), np.float64)
    columns[3] = np.arange(8) % 2
    moved = x.copy()
    for iteration in range(3):
        kick_drift(moved, momentum, grad, weights, columns, 0.4, 0.5)
        refresh(momentum, 0.7, KEY, iteration, 0, 0)
        drift(moved, momentum, weights, columns, 0.4, 0.5)
    np.testing.assert_array_equal(moved[:, ::2], x[:, ::2])
    assert (moved[:, 1::2] != x[:, 1::2]).all()


def test_a_diverged_gradient_shows():
    x, momentum, grad, weights, columns = band((4, 3), np.float32)
    columns[3], grad[1, 2] = 1, np.nan
    kick_drift(x, momentum, grad, weights, columns, 0.4, 1.0)
    np.testing.assert_array_equal(np.isnan(x), np.isnan(grad))


def test_refresh_mixes_in_the_addressed_noise_and_keeps_the_variance():
    momentum, z = np.ones((3_000, 40)), np.empty((3_000, 40))
    fill_normals(z, KEY, 4, 1, 100)
    refresh(momentum, 0.6, KEY, 4, 1, 100)
    np.testing.assert_allclose(momentum, 0.6 + 0.8 * z, rtol=1e-13, atol=1e-13)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(2, 60),
    K=st.integers(1, 30),
    data=st.data(),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_bands_do_not_matter(n, K, data, dtype):
    cut = data.draw(st.integers(1, n - 1))
    x, momentum, grad, weights, columns = band((n, K), dtype)
    results = []
    for bands in ([slice(0, n)], [slice(0, cut), slice(cut, n)]):
        moved, speed = x.copy(), momentum.copy()
        for rows in bands:
            kick_drift(moved[rows], speed[rows], grad[rows], weights[rows], columns, 0.3, 0.5)
            refresh(speed[rows], 0.7, KEY, 9, 0, 50 + rows.start)
            drift(moved[rows], speed[rows], weights[rows], columns, 0.3, 0.5)
        results.append(np.stack([moved, speed]))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("step", [0.1, 1.0, 3.0])
def test_a_gaussian_target_has_its_exact_variance_at_any_step(step):
    """Independent chains of x ~ N(1, 1/5), data of weight 3 included in its curvature.

    Twenty times the usual friction would hide a wrong scheme; half a drift too much
    or too little, or a refresh outside the drift, gives a variance that depends on
    the step.
    """
    chains, rng = 60_000, np.random.default_rng(1)
    x, momentum = np.full((chains, 2), 1.0), rng.normal(size=(chains, 2))
    weights = np.full((chains, 1), 3.0)
    columns = np.array([[0.0, 0.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0]])
    for iteration in range(60):
        grad = 5.0 - 3.0 * x  # with the prior of mean 0: 5 - 5 x
        kick_drift(x, momentum, grad, weights, columns, step, 0.5)
        refresh(momentum, 0.5, KEY, iteration, 0, 0)
        drift(x, momentum, weights, columns, step, 0.5)
    error = 5 * np.sqrt(2 / x.size)
    assert abs(x.var() * 5 - 1) < error
    assert abs(x.mean() - 1) < 5 * np.sqrt(0.2 / x.size)
