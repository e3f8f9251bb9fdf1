"""Leapfrog steps with a mirror: against NumPy, reversible, and the unfolded path."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from daskfactor.kernels.langevin import leapfrog_drift as drift
from daskfactor.kernels.langevin import leapfrog_kick as kick

Array = NDArray[Any]
SIZE = 0.3


def start(dtype="float64"):
    rng = np.random.default_rng(0)
    theta, spread = rng.random((9, 3)) * 0.4, rng.random((9, 3)) + 0.2
    momentum, grad = rng.normal(size=(9, 3)), rng.normal(size=(9, 3))
    spread[:, 1] = 0  # frozen
    return tuple(array.astype(dtype) for array in (theta, momentum, grad, spread))


@pytest.mark.parametrize("shape", [1.0, 2.5, 0.6])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kick_and_drift_against_numpy(shape, dtype):
    theta, momentum, grad, spread = start(dtype)
    pull = 0.5 * grad.astype("f8") - 0.7 + (shape - 1) / theta
    kicked = momentum + SIZE * spread * pull
    x = theta + SIZE * spread * kicked
    kick(theta, momentum, grad, spread, SIZE, 0.5, 0.7, shape)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 1e-12}
    np.testing.assert_allclose(momentum, kicked, **tolerance)
    before = theta.copy()
    drift(theta, momentum, spread, SIZE)
    assert shape > 1 or np.any(x < 0)
    np.testing.assert_allclose(theta, np.abs(x), **tolerance)
    np.testing.assert_allclose(momentum, np.where(x < 0, -kicked, kicked), **tolerance)
    np.testing.assert_array_equal(theta[:, 1], before[:, 1])


def leapfrog(theta, momentum, spread, steps, size):
    """In the density of Gamma(2, 3) from data, exp(-1.3 θ) from the prior."""

    def gradient():
        return 1.0 / (theta + 0.1) - 3.0

    for _ in range(steps):
        kick(theta, momentum, gradient(), spread, size / 2, 1.0, 1.3, 1.0)
        drift(theta, momentum, spread, size)
        kick(theta, momentum, gradient(), spread, size / 2, 1.0, 1.3, 1.0)


def test_a_path_with_reflections_goes_back_the_way_it_came():
    theta, momentum, _, spread = start()
    first, least = theta.copy(), momentum.copy()
    leapfrog(theta, momentum, spread, 25, SIZE)
    assert np.max(np.abs(theta - first)) > 0.1
    np.negative(momentum, out=momentum)
    leapfrog(theta, momentum, spread, 25, SIZE)
    np.testing.assert_allclose(theta, first, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(-momentum, least, rtol=1e-8, atol=1e-10)


def test_a_reflected_path_is_the_unfolded_one():
    """In a potential that is even and smooth at zero the mirror must change nothing."""
    theta, momentum, _, spread = start()
    x, u = theta.copy(), momentum.copy()
    for _ in range(40):  # U = x**2, whose gradient is odd
        kick(theta, momentum, -2 * theta, spread, SIZE, 1.0, 0.0, 1.0)
        drift(theta, momentum, spread, SIZE)
        u += SIZE * spread * -2 * x
        x += SIZE * spread * u
    assert np.any(x < 0)
    np.testing.assert_allclose(theta, np.abs(x), atol=1e-10)
