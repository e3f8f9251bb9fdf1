"""Exact transitions of the CIR process against its known moments and its stationary law."""

import numpy as np
import pytest
from scipy import stats

from daskfactor.kernels import langevin as cir
from daskfactor.kernels.langevin import cir_step
from daskfactor.kernels.philox import Address

KEY = np.array([3, 4], np.uint32)


def moved(
    theta, grad, curvature, metric, *, scale=1.0, step=0.1, rate=0.5, shape=1.0, at=(6, 1, 0)
):
    out = theta.copy()
    cir_step(out, grad, curvature, metric, scale, step, (rate, shape), Address(KEY, *at))
    return out


@pytest.mark.parametrize("step", [0.05, 0.7, 40.0])
@pytest.mark.parametrize(("theta0", "shape"), [(0.02, 0.6), (3.0, 1.0), (30.0, 2.5)])
def test_transitions_have_the_moments_of_the_process(step, theta0, shape):
    """Cox, Ingersoll and Ross 1985, equation 19; a normal shift in place of a large count."""
    size, scale, rate, curvature, num, c = (3000, 40), 2.0, 0.5, 1.5, 4.0, 2.3
    theta = np.full(size, theta0)
    grad = np.full(size, num - scale * curvature)
    told = {"scale": scale, "step": step, "rate": rate, "shape": shape}
    new = moved(theta, grad, np.full(size, curvature), np.full(size, c), **told)
    den = scale * curvature + rate
    speed, level = den / c, (theta0 * num + shape) / den
    decay = np.exp(-speed * step)
    mean = theta0 * decay + level * (1 - decay)
    spread = 2 / c / speed * (1 - decay)
    variance = theta0 * spread * decay + level * spread / 2 * (1 - decay)
    assert abs(new.mean() - mean) < 5 * np.sqrt(variance / theta.size)
    fourth = np.mean((new - mean) ** 4)
    assert abs(new.var() - variance) < 5 * np.sqrt(fourth / theta.size)
    assert new.min() > 0
    if step == 40.0:  # stationary: the gamma law that the metric's diffusion leaves alone
        law = stats.gamma(theta0 * num + shape, scale=1 / den)
        assert stats.kstest(new.ravel()[:20000], law.cdf).pvalue > 1e-3


def test_a_normal_shift_stands_for_huge_counts(monkeypatch):
    theta, ones = np.full((400, 50), 1000.0), np.ones((400, 50))
    counted = moved(theta, 9 * ones, ones, 10 * ones, step=0.1)
    monkeypatch.setattr(cir, "MOST", 1e8)
    huge = moved(1e9 * theta, 9 * ones, ones, 10 * ones, step=0.1)
    assert np.isfinite(huge).all()
    tau = 0.1 * 1.5 / 10
    decay = np.exp(-tau)
    for new, start in ((counted, 1e3), (huge, 1e12)):
        level = (start * 10 + 1) / 1.5
        mean = start * decay + level * (1 - decay)
        variance = (1 - decay) / 1.5 * (2 * start * decay + level * (1 - decay))
        assert abs(new.mean() - mean) < 5 * np.sqrt(variance / new.size)
        assert abs(new.var() / variance - 1) < 5 * np.sqrt(2 / new.size)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bands_do_not_matter_and_an_infinite_metric_keeps_the_bits(dtype):
    rng = np.random.default_rng(0)
    theta, curvature, metric = (rng.gamma(0.7, size=(20, 5)).astype(dtype) for _ in range(3))
    grad = rng.normal(size=(20, 5)).astype(dtype)
    theta[3, 3] = 0.0
    metric[:, 2] = np.inf
    whole = moved(theta, grad, curvature, metric, at=(6, 1, 100))
    assert whole.dtype == dtype
    np.testing.assert_array_equal(whole[:, 2], theta[:, 2])
    assert (whole[:, [0, 1, 3, 4]] > 0).all()
    low, high = (
        moved(theta[part], grad[part], curvature[part], metric[part], at=(6, 1, 100 + first))
        for part, first in ((slice(0, 7), 0), (slice(7, 20), 7))
    )
    np.testing.assert_array_equal(np.concatenate([low, high]), whole)
    assert not np.array_equal(moved(theta, grad, curvature, metric, at=(7, 1, 100)), whole)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_diverged_gradient_shows(bad):
    theta, grad = np.ones((2, 3)), np.zeros((2, 3))
    grad[1, 1] = bad
    new = moved(theta, grad, np.ones((2, 3)), np.ones((2, 3)))
    np.testing.assert_array_equal(np.isnan(new), grad != 0)
