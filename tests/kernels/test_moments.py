"""Steps that match two moments, against those of the Cox-Ingersoll-Ross process."""

import numpy as np
import pytest
from scipy import stats

from daskfactor.kernels.langevin import cir_step, langevin_step, mean_share
from daskfactor.kernels.philox import Address
from tests.kernels import reference
from tests.pairwise import pairwise

PROCESS = (1.0, np.inf)
"""Neither shares nor bounds: the moments of the process."""
KEY = np.array([3, 4], np.uint32)


def moved(theta, grad, metric, step, rate, shape, matched=PROCESS, coarse=False, row0=13):
    out = theta.copy()
    address = Address(KEY, 6, 1, row0)
    langevin_step(out, grad, metric, step, (rate, shape), address, coarse, matched)
    return out


@pairwise(
    real=[(np.float32, 3e-5), (np.float64, 1e-11)],
    size=[(1, 1), (1, 9), (7, 5), (65, 3), (40, 100)],
    kind=[(False, 1.0, (1.0, np.inf)), (True, 1.0, (0.3, 2.0)), (False, 0.3, (0.7, np.inf))],
)
def test_the_step_equals_the_twin(size, real, kind):
    (dtype, tolerance), (coarse, shape, matched) = real, kind
    rng = np.random.default_rng(0)
    theta, metric = (rng.gamma(2.0, size=size).astype(dtype) for _ in range(2))
    theta.flat[0] = 0
    grad = rng.normal(scale=3, size=size).astype(dtype)
    got = moved(theta, grad, metric, 0.2, 1.5, shape, matched, coarse)
    twin = theta.astype(float)
    reference.moment_step(twin, grad, metric, 0.2, 1.5, KEY, 6, 1, 13, coarse, shape, matched)
    mean, variance = reference.step_moments(theta, grad, metric, 0.2, 1.5, shape, matched)
    squared = variance < 2 * mean**2  # gamma numbers elsewhere
    np.testing.assert_allclose(got[squared], twin[squared], rtol=tolerance, atol=tolerance)


def fits(new, mean, variance):
    """Whether many numbers have this mean and variance, within five standard errors."""
    fourth = np.mean((new - mean) ** 4)
    return (
        abs(new.mean() - mean) < 5 * np.sqrt(variance / new.size)
        and abs(new.var() - variance) < 5 * np.sqrt(fourth / new.size)
        and new.min() > 0
    )


def process(theta, num, c, step, shape):
    """Mean and variance of the process (Cox, Ingersoll and Ross 1985, equation 19)."""
    decay = np.exp(-step)
    level, spread = (theta * num + shape) / c, (1 - decay) / c
    return (
        theta * decay + level * (1 - decay),
        2 * theta * spread * decay + level * spread * (1 - decay),
    )


@pairwise(
    shape=[0.3, 0.5, 0.6, 1.0, 2.5],
    theta0=[1e-6, 0.02, 0.4, 30.0],
    step=[0.05, 0.7],
    num=[0.0, 4.0],
)
def test_a_step_has_the_moments_of_the_process_and_of_its_exact_step(step, theta0, shape, num):
    size, rate, c = (3000, 40), 0.5, 2.3
    theta = np.full(size, theta0)
    grad, metric = np.full(size, num - (c - rate)), np.full(size, c)
    exact = theta.copy()
    curvature = np.full(size, c - rate)
    cir_step(exact, grad, curvature, metric, 1.0, step, (rate, shape), Address(KEY, 1, 1))
    wanted = process(theta0, num, c, step, shape)
    assert fits(exact, *wanted)
    assert fits(moved(theta, grad, metric, step, rate, shape), *wanted)


@pytest.mark.parametrize(
    ("bug", "shape"), [(None, 1.0), ("variance", 1.0), ("shape", 2.5), ("squared", 0.3)]
)
def test_planted_bugs_are_seen(monkeypatch, bug, shape):
    """Twice the variance; no shape of the prior; squared normal numbers above psi = 2."""
    theta, c, num, step, rate = np.full((3000, 40), 0.02), 2.3, 0.0, 0.2, 0.5
    right = reference.step_moments

    def wrong(*arguments):
        mean, variance = right(*arguments)
        return mean, 2 * variance

    if bug == "variance":
        monkeypatch.setattr(reference, "step_moments", wrong)
    metric, grad = np.full(theta.shape, c), np.full(theta.shape, num - (c - rate))
    new, used = theta.copy(), 1.0 if bug == "shape" else shape
    reference.moment_step(new, grad, metric, step, rate, KEY, 6, 1, 13, False, used)
    assert fits(new, *process(0.02, num, c, step, shape)) == (bug is None)


@pytest.mark.parametrize("shape", [0.5, 1.0, 2.5])
def test_many_steps_leave_the_gamma_law(shape):
    """Counts held and a denominator: mean, variance and the law's own quantiles."""
    size, c, held = (400, 50), 2.0, 1.0
    theta, metric = np.full(size, (held + shape) / c), np.full(size, c)
    for iteration in range(60):
        address = Address(KEY, iteration, 0)
        langevin_step(theta, held / theta - c, metric, 0.3, (0.0, shape), address, False, PROCESS)
    law = stats.gamma(held + shape, scale=1 / c)
    assert fits(theta, law.mean(), law.var())
    for chance in (0.1, 0.5, 0.9):
        assert abs(np.mean(theta < law.ppf(chance)) - chance) < 0.02


@pytest.mark.parametrize(("share", "wrong"), [(0.2, 1.0), (1.0, 0.0)])
def test_the_share_keeps_the_variance(share, wrong):
    """The target (theta + others)^n e^(-c theta): counts n that other components share in."""
    c, typical = 2.0, 60.0
    others = typical * (1 / share - 1)
    n = c * (typical + others)
    grid = np.linspace(1e-3, 6 * typical, 20000)
    density = n * np.log(grid + others) - c * grid
    density = np.exp(density - density.max())
    mean = np.average(grid, weights=density)
    variance = np.average((grid - mean) ** 2, weights=density)
    ratios = []
    for used in (share, wrong):
        theta, seen = np.full((400, 50), mean), []
        for iteration in range(400):
            address = Address(KEY, iteration, 0)
            gradient, metric = n / (theta + others) - c, np.full(theta.shape, c)
            langevin_step(theta, gradient, metric, 0.4, (0.0, 1.0), address, False, (used, np.inf))
            if iteration >= 150 and iteration % 25 == 0:
                seen.append(theta.copy())
        ratios.append(np.var(seen) / variance)
        assert np.mean(seen) == pytest.approx(mean, abs=0.03 * variance**0.5)
    assert abs(ratios[0] - 1) < 0.02
    assert abs(ratios[1] - 1) > 0.05


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [0.3, 1.0])
def test_bands_do_not_matter_and_an_infinite_metric_keeps_the_bits(dtype, shape):
    rng = np.random.default_rng(0)
    theta, metric = (rng.gamma(0.7, size=(20, 5)).astype(dtype) for _ in range(2))
    grad = rng.normal(scale=100, size=(20, 5)).astype(dtype)
    theta[3, 2:4] = 0.0
    metric[:, 2] = np.inf
    whole = moved(theta, grad, metric, 0.2, 1.5, shape, row0=100)
    assert whole.dtype == dtype
    np.testing.assert_array_equal(whole[:, 2], theta[:, 2])
    assert (whole[:, [0, 1, 3, 4]] > 0).all()
    parts = [
        moved(theta[at], grad[at], metric[at], 0.2, 1.5, shape, row0=100 + at.start)
        for at in (slice(0, 7), slice(7, 20))
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("shape", [0.3, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_diverged_gradient_shows(bad, shape):
    theta, grad = np.ones((2, 3)), np.zeros((2, 3))
    grad[1, 1] = bad
    new = moved(theta, grad, np.ones((2, 3)), 0.1, 0.5, shape)
    np.testing.assert_array_equal(np.isfinite(new), grad == 0)


def test_the_share_of_a_component():
    rng = np.random.default_rng(0)
    W, H = rng.gamma(1.0, size=(300, 4)), rng.gamma(1.0, size=(200, 4))
    parts = W[:, None] * H
    mu = parts.sum(axis=2)
    exact = (parts**2).sum(axis=2) / mu
    assert mean_share(W, H) == pytest.approx(exact.sum() / mu.sum(), rel=0.15)
    assert mean_share(W[:, :1], H[:, :1]) == pytest.approx(1.0)
    assert mean_share(np.ones((2, 5)), np.ones((3, 5))) == pytest.approx(0.2)
    assert mean_share(np.zeros((2, 5)), H[:, :1].repeat(5, 1)) == 1.0
    assert np.isnan(mean_share(np.full((2, 1), np.nan), np.ones((3, 1))))
