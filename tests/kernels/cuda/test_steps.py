"""Steps of factors on a device have the bits of those on a processor."""

import numpy as np
import pytest
from scipy.special import ndtr

from daskfactor.kernels import langevin, steps
from daskfactor.kernels.philox import Address
from daskfactor.models.tweedie_law import Tweedie
from tests.pairwise import pairwise

KEY = np.array([5, 8], np.uint32)
ADDRESS = Address(KEY, 11, 1, 40)
FAR = Address(np.array([2**32 - 1, 2**31], np.uint32), 2**31 - 1, 2**32 - 1, 2**32 - 31)
REALS = [np.float32, np.float64]
DTYPES = pytest.mark.parametrize("dtype", REALS)
EACH = {"dtype": REALS, "size": [(1, 1), (31, 7), (13, 100)]}
ADDRESSED = EACH | {"address": [ADDRESS, FAR]}


class Band:
    """A factor's entries, a gradient, a metric, and moments of several sizes."""

    def __init__(self, size, dtype, seed=0):
        rng = np.random.default_rng(seed)
        self.theta = rng.gamma(0.3, size=size).astype(dtype)
        self.theta.flat[0] = 0.0
        self.grad = rng.normal(0, 3, size).astype(dtype)
        self.grad.flat[-1] = 1e9
        self.metric = rng.gamma(2.0, size=size).astype(dtype)
        self.momentum = rng.normal(0, 1, size).astype(dtype)
        self.other = rng.gamma(1.0, size=size).astype(dtype)
        self.weights = rng.gamma(1.0, size=(size[0], 1)).astype(dtype)
        self.columns = rng.gamma(1.0, size=(4, size[1])).astype(dtype)


def assert_same(device, name, changed, *rest):
    """A step changes copies of arrays alike here and there, and changes them."""
    step = getattr(steps, name)
    here, there = [own.copy() for own in changed], [device.put(own) for own in changed]
    step(*here, *rest)
    step(*there, *(device.put(own) if is_entries(own, changed) else own for own in rest))
    for own, found in zip(here, map(device.take, there), strict=True):
        assert found.dtype == own.dtype
        np.testing.assert_array_equal(np.isnan(found), np.isnan(own))
        seen = ~np.isnan(own)
        assert found[seen].tobytes() == own[seen].tobytes()
    return here


def is_entries(own, changed):
    """Whether an argument lies where the factor does: it has a row for each of its rows."""
    return getattr(own, "ndim", 0) == 2 and len(own) == len(changed[0])


@pairwise(**ADDRESSED)
def test_normal_numbers_have_the_same_bits(stand_in, size, dtype, address):
    (z,) = assert_same(stand_in, "fill_normals", [np.zeros(size, dtype)], *address)
    assert np.isfinite(z).all()
    assert (z != 0).all()


@pairwise(**ADDRESSED, coarse=[False, True], shape=[1.0, 2.5, 0.3])
def test_plain_steps_have_the_same_bits(stand_in, size, dtype, address, coarse, shape):
    band = Band(size, dtype)
    told = band.grad, None, 0.02, (0.5, shape), address, coarse
    (moved,) = assert_same(stand_in, "langevin_step", [band.theta], *told)
    assert (moved != band.theta).mean() > 0.9


MATCHED = {"none": None, "share": (0.4, np.inf), "cap": (0.4, 2.8)}


@pairwise(**ADDRESSED, coarse=[False, True], shape=[1.0, 0.3], matched=list(MATCHED))
def test_metric_steps_have_the_same_bits(stand_in, size, dtype, address, coarse, shape, matched):
    band = Band(size, dtype)
    told = band.grad, band.metric, 0.2, (0.5, shape), address, coarse, MATCHED[matched]
    (moved,) = assert_same(stand_in, "langevin_step", [band.theta], *told)
    assert (moved != band.theta).mean() > 0.6


@DTYPES
@pytest.mark.parametrize("shape", [1.0, 0.3])
def test_shares_of_rows_are_those_of_their_row(stand_in, dtype, shape):
    """Rows by rows, a share of each is what a band of that row alone is given."""
    band, shares = Band((9, 7), dtype), np.linspace(0.05, 1.0, 9).astype(dtype)
    there = stand_in.put(band.theta)
    told = stand_in.put(band.grad), stand_in.put(band.metric), 0.2, (0.5, shape), ADDRESS, False
    steps.langevin_step(there, *told, (stand_in.put(shares), 2.8))
    for i, share in enumerate(shares):
        own, address = band.theta[i : i + 1].copy(), ADDRESS._replace(row0=ADDRESS.row0 + i)
        told = band.grad[i : i + 1], band.metric[i : i + 1], 0.2, (0.5, shape), address, False
        steps.langevin_step(own, *told, (share, 2.8))
        np.testing.assert_array_equal(stand_in.take(there)[i : i + 1], own)


@DTYPES
@pytest.mark.parametrize("matched", MATCHED)
def test_entries_of_an_infinite_metric_stay(stand_in, dtype, matched):
    band = Band((31, 7), dtype)
    band.metric[:, 2] = np.inf
    for shape in (1.0, 0.3):
        told = band.grad, band.metric, 0.2, (0.5, shape), ADDRESS, False, MATCHED[matched]
        (moved,) = assert_same(stand_in, "langevin_step", [band.theta], *told)
        np.testing.assert_array_equal(moved[:, 2], band.theta[:, 2])


@pairwise(dtype=REALS, shape=[1.0, 0.3], matched=[None, *MATCHED])
def test_nan_stays_nan(stand_in, dtype, shape, matched):
    band = Band((31, 7), dtype)
    band.theta[3, 1] = band.grad[4, 2] = np.nan
    metric = None if matched is None else band.metric
    how = MATCHED[matched or "none"]
    told = band.grad, metric, 0.2, (0.5, shape), ADDRESS, False, how
    (moved,) = assert_same(stand_in, "langevin_step", [band.theta], *told)
    assert np.isnan(moved[3, 1])
    assert np.isnan(moved[4, 2])
    assert np.isnan(moved).sum() == 2


@pairwise(**EACH)
def test_moments_have_the_same_bits(stand_in, size, dtype):
    band = Band(size, dtype)
    mean, m2 = np.zeros(size, dtype), np.zeros(size, dtype)
    there = stand_in.put(mean), stand_in.put(m2)
    for count in range(1, 4):
        theta = band.theta * dtype(count)
        langevin.accumulate_moments(theta, count, mean, m2)
        steps.accumulate_moments(stand_in.put(theta), count, *there)
    np.testing.assert_array_equal(stand_in.take(there[0]), mean)
    np.testing.assert_array_equal(stand_in.take(there[1]), m2)
    np.testing.assert_allclose(mean, 2 * band.theta, rtol=1e-6)


@pairwise(**ADDRESSED)
def test_kicks_drifts_and_refreshed_momenta_have_the_same_bits(stand_in, size, dtype, address):
    band = Band(size, dtype)
    pair = [band.theta, band.momentum]
    assert_same(stand_in, "kick_drift", pair, band.grad, band.weights, band.columns, 0.1, 0.5)
    (x, momentum) = assert_same(stand_in, "drift", pair, band.weights, band.columns, 0.1, 0.5)
    assert (x != band.theta).any()
    np.testing.assert_array_equal(momentum, band.momentum)
    assert_same(stand_in, "refresh", [band.momentum], 0.9, *address)


@pairwise(**ADDRESSED)
def test_flights_and_refreshed_lengths_have_the_same_bits(stand_in, size, dtype, address):
    band = Band(size, dtype)
    band.metric[:, 0] = np.inf
    three = [band.theta, band.momentum, band.other]
    assert_same(stand_in, "kick_flight", three, band.grad, band.metric, 0.5, 0.3, 0.5)
    assert_same(stand_in, "flight", three, band.metric, 0.15)
    for shape in (2.5, 0.5, 1.0):
        assert_same(stand_in, "refresh_length", [band.other], 0.9, shape, *address)


@DTYPES
def test_columns_of_drifts_may_lie_on_the_device(stand_in, dtype):
    band = Band((31, 7), dtype)
    there = [[stand_in.put(own) for own in (band.theta, band.momentum)] for _ in range(2)]
    told = stand_in.put(band.grad), stand_in.put(band.weights)
    for own, columns in zip(there, (band.columns, stand_in.put(band.columns)), strict=True):
        steps.kick_drift(*own, *told, columns, 0.1, 0.5)
    for one, other in zip(*there, strict=True):
        np.testing.assert_array_equal(stand_in.take(one), stand_in.take(other))


PENALTIES = {
    "number": lambda n, K: 0.3,
    "component": lambda n, K: np.linspace(0.1, 2.0, K),
    "row": lambda n, K: np.linspace(0.1, 2.0, n)[:, None],
    "none": lambda n, K: 0.0,
}


@pairwise(**EACH, penalty=list(PENALTIES), beta=[1.0, 0.0, -1.0])
def test_shares_of_multiplicative_updates_are_those_of_numpy(stand_in, size, dtype, penalty, beta):
    band, more = Band(size, dtype), PENALTIES[penalty](*size)
    num, den = band.momentum, band.other.copy()
    den.flat[::3] = 0.0
    num.flat[::6] = 0.0
    own, there = band.theta.copy(), stand_in.put(band.theta)
    prior = more, 0.0, Tweedie(beta), 0.0
    steps.multiply_by_share(own, (num, den), *prior)
    steps.multiply_by_share(there, (stand_in.put(num), stand_in.put(den)), *prior)
    tolerance = 4 * np.finfo(dtype).eps  # a power may be rounded otherwise
    found = stand_in.take(there)
    np.testing.assert_allclose(found, own, rtol=tolerance, atol=np.finfo(dtype).tiny)
    assert np.isfinite(found).all()


def test_arrays_are_taken_and_put_where_others_lie(stand_in):
    here = np.arange(6.0).reshape(2, 3)
    there = stand_in.put(here)
    assert steps.to_host(here) is here
    np.testing.assert_array_equal(steps.to_host(there), here)
    assert steps.on_device_of(here, here) is here
    assert steps.on_device_of(there, 2.0) == 2.0
    assert steps.on_device_of(there, there) is there
    np.testing.assert_array_equal(stand_in.take(steps.on_device_of(there, here) + there), 2 * here)


@DTYPES
@pytest.mark.parametrize("shape", [1.0, 0.3, 2.5])
def test_kicks_and_drifts_with_a_mirror_have_the_same_bits(stand_in, dtype, shape):
    rng = np.random.default_rng(0)
    theta = rng.gamma(0.3, 1.0, (301, 7)).astype(dtype)
    theta[5], theta[6, 0] = 0, np.nan
    u, grad = rng.normal(0.0, 3.0, (2, *theta.shape)).astype(dtype)
    spread = rng.gamma(1.0, 1.0, theta.shape).astype(dtype)
    told = grad, spread, 0.3, 1 / 0.7, 0.45, shape
    for _ in range(3):
        _, u = assert_same(stand_in, "leapfrog_kick", [theta, u], *told)
        theta, u = assert_same(stand_in, "leapfrog_drift", [theta, u], spread, 0.31)


@DTYPES
def test_places_below_the_smallest_number(stand_in, dtype):
    rng, smallest = np.random.default_rng(1), np.finfo(dtype).tiny
    theta = np.where(rng.random((40, 3)) < 0.5, smallest, 1.0).astype(dtype)
    place = rng.random(theta.shape).astype(dtype)
    z = rng.normal(0.0, 2.0, theta.shape).astype(dtype)
    wanted = np.where(theta <= smallest, place * ndtr(z.astype(float)), place)
    x = stand_in.put(place)
    steps.level_places(x, stand_in.put(theta), smallest, stand_in.put(z))
    steps.level_places(place, theta, smallest, z)
    for own in (place, stand_in.take(x)):
        np.testing.assert_allclose(own, wanted, rtol=4 * np.finfo(dtype).eps)
