"""Entries as squared lengths: against vectors written out, exact laws, bands that do not matter."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from daskfactor.kernels.langevin import refresh
from daskfactor.kernels.squares import STEEPEST, flight, kick_flight, refresh_length

Array = NDArray[Any]
KEY = np.array([5, 8], np.uint32)
RATE = 0.7


def band(shape, dtype="float64", seed=0):
    """Entries, momenta along and across, gradient, metric; every third column is frozen."""
    rng = np.random.default_rng(seed)
    theta, metric = rng.gamma(0.7, size=shape), 0.2 + rng.gamma(2.0, size=shape)
    metric[:, ::3] = np.inf
    moving = rng.normal(size=(3, *shape))
    moving[2] *= 20
    return tuple(array.astype(dtype) for array in (theta, *moving, metric))


def vectors(theta, along, across, metric):
    """u and its momentum in the plane, (2, n, K), with u on a ray of its own."""
    angle = np.random.default_rng(3).uniform(0, 2 * np.pi, theta.shape)
    ray, normal = (np.cos(angle), np.sin(angle)), (-np.sin(angle), np.cos(angle))
    u = 2 * np.sqrt(metric * theta) * np.array(ray)
    return u, along * np.array(ray) + across * np.array(normal)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_kicks_and_drifts_are_those_of_vectors(dtype, share):
    arrays = theta, along, across, _, metric = band((40, 7), dtype)
    begun = theta.copy()
    free = np.isfinite(metric)
    wide = [np.where(free, a, 1.0).astype(float) for a in arrays]
    u, v = vectors(*wide[:3], wide[4])
    length = np.sqrt((u * u).sum(axis=0))
    pull = 0.8 * np.sqrt(wide[0] / wide[4]) * (wide[3] - RATE)  # of log p(|u|² / 4c) along u
    most = STEEPEST + length
    assert 0.01 < np.mean(pull > most) < 0.5
    assert 0.01 < np.mean(pull < -most) < 0.5
    v += np.clip(pull, -most, most) * u / length
    u += share * 0.8 * v
    kick_flight(*arrays, RATE, 0.8, share)
    u += 0.3 * v
    flight(theta, along, across, metric, 0.3)
    length = np.sqrt((u * u).sum(axis=0))
    tolerance = {"rtol": 2e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 1e-9}
    for got, wanted in (
        (theta, length**2 / (4 * wide[4])),
        (along, (u * v).sum(axis=0) / length),
        (across, (u[0] * v[1] - u[1] * v[0]) / length),
    ):
        np.testing.assert_allclose(got[free], wanted[free], **tolerance)
        assert np.isfinite(got).all()
    np.testing.assert_array_equal(theta[~free], begun[~free])


def test_a_path_goes_back_the_way_it_came():
    theta, along, across, _, metric = band((30, 4))
    first = theta.copy()

    def leapfrog():  # a Poisson law of 3 counts; the kick in the middle of two drifts
        for _ in range(20):
            flight(theta, along, across, metric, 0.1)
            kick_flight(theta, along, across, 3 / (theta + 0.5) - 1, metric, RATE, 0.2, 0.5)

    leapfrog()
    assert np.abs(theta - first)[:, 1].min() > 1e-3
    np.negative(along, out=along)
    np.negative(across, out=across)
    leapfrog()
    np.testing.assert_allclose(theta, first, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("shape", [1.0, 2.3, 0.6])
@pytest.mark.parametrize("size", [0.4, 2.0])
def test_the_prior_alone_has_its_exact_law_at_any_step(shape, size):
    theta = np.full((100, 100), 0.5)
    along, across, gradient = (np.zeros_like(theta) for _ in range(3))
    metric = np.full_like(theta, 0.9 * RATE)
    for iteration in range(40):
        kick_flight(theta, along, across, gradient, metric, RATE, size, 0.5)
        refresh(along, 0.5, KEY, iteration, 0, 0)
        if shape == 1:
            refresh(across, 0.5, KEY, iteration, 2, 0)
        else:
            refresh_length(across, 0.5, shape, KEY, iteration, 0, 0)
        flight(theta, along, across, metric, 0.5 * size)
    assert stats.kstest(theta.ravel(), stats.gamma(shape, scale=1 / RATE).cdf).pvalue > 1e-4


def test_a_length_that_is_refreshed_is_a_noncentral_one():
    """And of one dimension, shape 1, it is the absolute value of what `refresh` makes."""
    across = np.full((200, 100), 1.3)
    refresh_length(across, 0.8, 1.0, KEY, 3, 1, 0)
    law = stats.foldnorm(0.8 * 1.3 / 0.6, scale=0.6)
    assert stats.kstest(across.ravel(), law.cdf).pvalue > 1e-4
    across[:] = 1.3
    refresh_length(across, 0.8, 0.5, KEY, 3, 1, 0)  # no dimension at all but for what is left
    assert np.mean(across == 0) == pytest.approx(np.exp(-0.5 * (0.8 * 1.3 / 0.6) ** 2), abs=0.02)


def test_a_diverged_gradient_shows():
    arrays = theta, along, across, gradient, metric = band((4, 3), "float32")
    gradient[1, 2] = np.nan
    kick_flight(*arrays, RATE, 0.5, 0.5)
    refresh_length(across, 0.8, 2.0, KEY, 3, 1, 0)
    flight(theta, along, across, metric, 0.25)
    np.testing.assert_array_equal(np.isnan(theta), np.isnan(gradient))


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 60), K=st.integers(1, 20), data=st.data())
def test_bands_do_not_matter(n, K, data):
    cut = data.draw(st.integers(1, n - 1))
    results = []
    for bands in ([slice(0, n)], [slice(0, cut), slice(cut, n)]):
        theta, along, across, gradient, metric = band((n, K), "float32")
        for rows in bands:
            own = theta[rows], along[rows], across[rows]
            kick_flight(*own, gradient[rows], metric[rows], RATE, 0.7, 0.5)
            refresh_length(across[rows], 0.7, 1.4, KEY, 9, 0, 50 + rows.start)
            flight(*own, metric[rows], 0.35)
        results.append(np.stack([theta, along, across]))
    np.testing.assert_array_equal(*results)
