import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskfactor.kernels.langevin import accumulate_moments, langevin_step
from daskfactor.kernels.philox import Address, fill_normals
from tests.kernels import reference
from tests.pairwise import pairwise

KEY = np.array([5, 8], np.uint32)
REALS = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def metric_step(theta, grad, metric, step, rate, key, iteration, factor, row0, coarse, shape=1.0):
    address = Address(key, iteration, factor, row0)
    langevin_step(theta, grad, metric, step, (float(rate), shape), address, coarse)


def plain_step(theta, grad, *arguments):
    metric_step(theta, grad, None, *arguments)


def band(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    theta = rng.gamma(0.7, size=shape).astype(dtype)
    theta.flat[0] = 0
    grad = rng.normal(scale=100, size=shape).astype(dtype)
    return theta, grad, rng.gamma(2.0, size=shape).astype(dtype)


def run(step, theta, *arguments):
    moved = theta.copy()
    step(moved, *arguments)
    return moved


@pairwise(
    real=[(np.float32, 2e-5), (np.float64, 1e-12)],
    shape=[(1, 1), (1, 9), (7, 5), (65, 3), (40, 100)],
    kind=[(False, 1.0), (True, 1.0), (False, 2.5), (False, 0.6)],
)
def test_steps_equal_their_twins(shape, real, kind):
    (theta, grad, metric), tolerance = band(shape, real[0]), real[1]
    address, wide = (KEY, 6, 1, 13, *kind), theta.astype(float)
    if kind[1] != 0.6:
        moved = run(metric_step, theta, grad, metric, 0.2, 1.5, *address)
        exact = run(reference.metric_step, wide, grad, metric, 0.2, 1.5, *address)
        np.testing.assert_allclose(moved, exact, rtol=tolerance, atol=tolerance)
    moved = run(plain_step, theta, grad, 0.02, 1.5, *address)
    exact = run(reference.plain_step, wide, grad, 0.02, 1.5, *address)
    np.testing.assert_allclose(moved, exact, rtol=tolerance, atol=tolerance)


def test_steps_are_the_gradient_step_plus_the_addressed_noise():
    z = np.empty((30, 7))
    fill_normals(z, KEY, 4, 1, 100)
    theta, grad, metric = np.full((30, 7), 9.0), np.full((30, 7), 0.1), np.full((30, 7), 2.0)
    plain = run(plain_step, theta, grad, 0.01, 0.5, KEY, 4, 1, 100, False)
    np.testing.assert_allclose(plain - np.sqrt(0.02) * z, theta - 0.004, rtol=1e-13)
    y = 0.1 / 2.0
    moved = run(metric_step, theta, grad, metric, 0.1, 0.5, KEY, 4, 1, 100, False)
    drift = y * 9.0 * (0.1 - 0.5) + y
    np.testing.assert_allclose(moved - np.sqrt(2 * y * 9.0) * z, theta + drift, rtol=1e-13)


def test_coarse_noise_is_the_sum_of_the_two_fine_ones():
    fine = np.empty((2, 20, 6))
    for i in range(2):
        fill_normals(fine[i], KEY, 2 * 21 + i, 0, 3)
    theta = np.full((20, 6), 30.0)
    moved = run(plain_step, theta, np.zeros_like(theta), 0.5, 0.0, KEY, 21, 0, 3, True)
    np.testing.assert_allclose(moved - theta, fine.sum(0) / np.sqrt(2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_drift_is_clipped(sign):
    theta, metric = np.full((4, 4), 100.0), np.ones((4, 4))
    grad = np.full((4, 4), sign * 1e9)
    z = np.empty((4, 4))
    fill_normals(z, KEY, 0, 0, 0)
    moved = run(plain_step, theta, grad, 0.5, 0.0, KEY, 0, 0, 0, False)
    np.testing.assert_allclose(moved, 100 + sign * 2 + z, rtol=1e-12)
    y = 0.5
    limit = 2 * np.sqrt(2 * y * (100 + y))
    moved = run(metric_step, theta, grad, metric, 0.5, 0.0, KEY, 0, 0, 0, False)
    np.testing.assert_allclose(moved, 100 + sign * limit + y + 10 * z, rtol=1e-12)


@REALS
def test_an_infinite_metric_keeps_the_bits(dtype):
    theta, grad, metric = band((30, 7), dtype)
    metric[:, 2] = np.inf
    moved = run(metric_step, theta, grad, metric, 0.2, 1.5, KEY, 6, 1, 13, False, 2.0)
    np.testing.assert_array_equal(moved[:, 2], theta[:, 2])
    assert (moved[:, [0, 1, 3, 4, 5, 6]] != theta[:, [0, 1, 3, 4, 5, 6]]).mean() > 0.99


def test_a_diverged_gradient_shows():
    theta, metric = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    grad = np.array([[np.nan, 0, 0], [0, 0, 0]], np.float32)
    for step in (
        run(plain_step, theta, grad, 0.1, 0.0, KEY, 0, 0, 0, False),
        run(metric_step, theta, grad, metric, 0.1, 0.0, KEY, 0, 0, 0, False),
    ):
        np.testing.assert_array_equal(np.isnan(step), np.isnan(grad))


@settings(max_examples=40)
@given(
    n=st.integers(2, 60),
    K=st.integers(1, 30),
    data=st.data(),
    dtype=st.sampled_from([np.float32, np.float64]),
    coarse=st.booleans(),
)
def test_bands_do_not_matter(n, K, data, dtype, coarse):
    cut = data.draw(st.integers(1, n - 1))
    theta, grad, metric = band((n, K), dtype)
    results = []
    for bands in ([slice(0, n)], [slice(0, cut), slice(cut, n)]):
        plain, moved = theta.copy(), theta.copy()
        mean, m2 = grad.copy(), metric.copy()
        for rows in bands:
            tail = (KEY, 9, 0, 50 + rows.start, coarse)
            plain_step(plain[rows], grad[rows], 0.02, 0.3, *tail)
            metric_step(moved[rows], grad[rows], metric[rows], 0.1, 0.3, *tail)
            accumulate_moments(theta[rows], 7, mean[rows], m2[rows])
        results.append(np.stack([plain, moved, mean, m2]))
    np.testing.assert_array_equal(*results)


@REALS
def test_moments_are_those_of_the_draws(dtype):
    draws = np.random.default_rng(0).gamma(2.0, size=(30, 9, 5)).astype(dtype)
    mean, m2 = np.zeros((9, 5)), np.zeros((9, 5))
    twin_mean, twin_m2 = np.zeros((9, 5)), np.zeros((9, 5))
    for count, draw in enumerate(draws, start=1):
        accumulate_moments(draw, count, mean, m2)
        reference.accumulate_moments(draw.astype(float), count, twin_mean, twin_m2)
    wide = draws.astype(np.float64)
    np.testing.assert_allclose(mean, wide.mean(0), rtol=1e-13)
    np.testing.assert_allclose(m2 / len(draws), wide.var(0), rtol=1e-12)
    np.testing.assert_allclose([mean, m2], [twin_mean, twin_m2], rtol=1e-12)
