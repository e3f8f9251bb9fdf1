"""Steps along paths of rows, against processors'."""

import numpy as np
import pytest
from scipy.special import ndtr

from daskfactor.kernels import langevin, steps
from tests.kernels.cuda.fake import standing_in

REALS = [np.float32, np.float64]


@pytest.fixture(autouse=True, scope="module")
def device():
    with standing_in() as found:
        yield found


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("shape", [1.0, 0.3, 2.5])
def test_kicks_and_drifts_have_the_same_bits(device, real, shape):
    rng = np.random.default_rng(0)
    theta = rng.gamma(0.3, 1.0, (301, 7)).astype(real)
    theta[5], theta[6, 0] = 0, np.nan
    u, grad = rng.normal(0.0, 3.0, (2, *theta.shape)).astype(real)
    spread = rng.gamma(1.0, 1.0, theta.shape).astype(real)
    x, p, g, s = map(device.put, (theta, u, grad, spread))
    for _ in range(3):
        langevin.leapfrog_kick(theta, u, grad, spread, 0.3, 1 / 0.7, 0.45, shape)
        langevin.leapfrog_drift(theta, u, spread, 0.31)
        steps.leapfrog_kick(x, p, g, s, 0.3, 1 / 0.7, 0.45, shape)
        steps.leapfrog_drift(x, p, s, 0.31)
    assert np.array_equal(device.take(x), theta, equal_nan=True)
    assert np.array_equal(device.take(p), u, equal_nan=True)


@pytest.mark.parametrize("real", REALS)
def test_places_below_the_smallest_number(device, real):
    rng, smallest = np.random.default_rng(1), np.finfo(real).tiny
    theta = np.where(rng.random((40, 3)) < 0.5, smallest, 1.0).astype(real)
    place, z = rng.random(theta.shape).astype(real), rng.normal(0.0, 2.0, theta.shape).astype(real)
    wanted = np.where(theta <= smallest, place * ndtr(z.astype(float)), place)
    x = device.put(place)
    steps.level_places(x, device.put(theta), smallest, device.put(z))
    steps.level_places(place, theta, smallest, z)
    for own in (place, device.take(x)):
        np.testing.assert_allclose(own, wanted, rtol=4 * np.finfo(real).eps)


@pytest.mark.parametrize("real", REALS)
def test_rows_go_back(device, real):
    rng = np.random.default_rng(2)
    theta, other = rng.random((2, 40, 3)).astype(real)
    back, x = rng.random(40) < 0.5, device.put(theta)
    steps.take_rows(x, device.put(other), device.put(back))
    steps.take_rows(theta, other, back)
    assert np.array_equal(device.take(x), theta)
