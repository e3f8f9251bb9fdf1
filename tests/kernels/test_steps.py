"""Steps of a factor: against NumPy and exact laws; bands and frozen entries; planted bugs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from daskfactor.kernels import langevin
from daskfactor.kernels.langevin import drift, kick_drift, refresh
from daskfactor.kernels.philox import Address
from daskfactor.kernels.squares import STEEPEST, flight, kick_flight, refresh_length
from daskfactor.kernels.steps import langevin_step
from tests.kernels import reference
from tests.pairwise import pairwise

mirror_kick, mirror_drift = langevin.leapfrog_kick, langevin.leapfrog_drift
KEY = np.array([5, 8], np.uint32)
REALS = pytest.mark.parametrize("dtype", [np.float32, np.float64])
SHAPES = [(1, 1), (1, 9), (7, 5), (65, 3), (40, 100)]
PROCESS = (1.0, np.inf)
"""Neither shares nor bounds: the moments of the process."""
RATE, SIZE = 0.7, 0.3


def band(shape, dtype, seed=0):
    """Rows of a factor and all that steps take; every third column is frozen."""
    rng, made = np.random.default_rng(seed), {}
    for name in ("theta", "curvature", "metric", "spread"):
        made[name] = rng.gamma(0.7, size=shape)
    for name, scale in (("grad", 30), ("momentum", 1), ("across", 20), ("mean", 1), ("m2", 1)):
        made[name] = rng.normal(scale=scale, size=shape)
    made["weights"] = rng.poisson(2.0, size=(shape[0], 1))
    made["theta"].flat[0] = 0
    made["metric"][:, ::3], made["spread"][:, ::3] = np.inf, 0
    made["columns"] = rng.gamma(2.0, size=(4, shape[1]))
    made["columns"][3] = np.arange(shape[1]) % 3 != 0
    return {name: own.astype(dtype) for name, own in made.items()}


def langevin_of(step, metric=True, shape=1.0, coarse=False, matched=None):
    def run(a, row0):
        address, own = Address(KEY, 9, 1, row0), a["metric"] if metric else None
        more = () if matched is None else (matched,)
        langevin_step(a["theta"], a["grad"], own, step, (1.5, shape), address, coarse, *more)

    return run


def momentum_step(a, row0):
    rest = a["weights"], a["columns"], 0.3, 0.5
    kick_drift(a["theta"], a["momentum"], a["grad"], *rest)
    refresh(a["momentum"], 0.7, KEY, 9, 0, row0)
    drift(a["theta"], a["momentum"], *rest)


def length_step(a, row0):
    moving = a["theta"], a["momentum"], a["across"]
    kick_flight(*moving, a["grad"], a["metric"], RATE, 0.7, 0.5)
    refresh_length(a["across"], 0.7, 1.4, KEY, 9, 0, row0)
    flight(*moving, a["metric"], 0.35)


def mirror_step(a, row0):
    mirror_kick(a["theta"], a["momentum"], a["grad"], a["spread"], SIZE, 0.5, RATE, 1.0)
    mirror_drift(a["theta"], a["momentum"], a["spread"], SIZE)


POSITIVE = {
    "moments": langevin_of(0.2, matched=PROCESS),
    "moments, spiked": langevin_of(0.2, shape=0.3, matched=PROCESS),
}
FREEZING = POSITIVE | {
    "metric": langevin_of(0.2, shape=2.0),
    "momentum": momentum_step,
    "lengths": length_step,
    "mirror": mirror_step,
}
STEPS = FREEZING | {
    "plain": langevin_of(0.02, metric=False),
    "plain, coarse": langevin_of(0.02, metric=False, coarse=True),
    "metric, coarse": langevin_of(0.1, coarse=True),
    "sums": lambda a, row0: langevin.accumulate_moments(a["theta"], 7, a["mean"], a["m2"]),
}


@pytest.mark.full
@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(2, 60), st.integers(1, 30)),
    data=st.data(),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_bands_do_not_matter(shape, data, dtype):
    cut = data.draw(st.integers(1, shape[0] - 1))
    for name, step in STEPS.items():
        whole, parts = band(shape, dtype), band(shape, dtype)
        step(whole, 50)
        for rows in (slice(0, cut), slice(cut, None)):
            own = {key: a if key == "columns" else a[rows] for key, a in parts.items()}
            step(own, 50 + rows.start)
        for key, own in whole.items():
            np.testing.assert_array_equal(parts[key], own, err_msg=name)


@REALS
@pytest.mark.parametrize("name", FREEZING)
def test_frozen_entries_keep_their_bits(name, dtype):
    arrays, free = band((30, 7), dtype), np.arange(7) % 3 != 0
    before = arrays["theta"].copy()
    for iteration in range(3):
        FREEZING[name](arrays, iteration)
        np.testing.assert_array_equal(arrays["theta"][:, ~free], before[:, ~free])
    assert (arrays["theta"] != before)[:, free].mean() > 0.99
    assert (arrays["theta"][:, free] > 0).all() or name not in POSITIVE
    assert arrays["theta"].dtype == dtype


DIVERGING = [(name, np.nan) for name in STEPS if name != "sums"]
DIVERGING += [(name, np.inf) for name in POSITIVE]  # others clip it


@pytest.mark.parametrize(("name", "bad"), DIVERGING)
def test_a_diverged_gradient_shows(name, bad):
    arrays = band((4, 3), np.float64)
    arrays["grad"][1, 2] = bad
    STEPS[name](arrays, 13)
    np.testing.assert_array_equal(np.isfinite(arrays["theta"]), np.isfinite(arrays["grad"]))


# -- steps of a gradient and noise ---------------------------------------------------------


def run(step, theta, *arguments):
    moved = theta.copy()
    step(moved, *arguments)
    return moved


def moved(theta, grad, metric, step, rate, shape, matched=PROCESS, coarse=False):
    told = (rate, shape), Address(KEY, 6, 1, 13), coarse, matched
    return run(langevin_step, theta, grad, metric, step, *told)


@pairwise(
    real=[(np.float32, 2e-5), (np.float64, 1e-12)],
    shape=SHAPES,
    kind=[(False, 1.0), (True, 1.0), (False, 2.5), (False, 0.6)],
)
def test_steps_equal_their_twins(shape, real, kind):
    (dtype, tolerance), rng = real, np.random.default_rng(0)
    theta, metric = rng.gamma(0.7, size=shape).astype(dtype), rng.gamma(2.0, size=shape)
    grad, metric = rng.normal(scale=100, size=shape).astype(dtype), metric.astype(dtype)
    theta.flat[0] = 0
    coarse, power = kind
    for own, step in ((metric, 0.2), (None, 0.02)) if power != 0.6 else ((None, 0.02),):
        told = grad, own, step, (1.5, power), Address(KEY, 6, 1, 13), coarse
        found, exact = run(langevin_step, theta, *told), theta.astype(float)
        reference.langevin_step(exact, *told)
        np.testing.assert_allclose(found, exact, rtol=tolerance, atol=tolerance)


@REALS
def test_moments_are_those_of_the_draws(dtype):
    draws = np.random.default_rng(0).gamma(2.0, size=(30, 9, 5)).astype(dtype)
    mean, m2 = np.zeros((2, 9, 5))
    for count, draw in enumerate(draws, start=1):
        langevin.accumulate_moments(draw, count, mean, m2)
    wide = draws.astype(np.float64)
    np.testing.assert_allclose(mean, wide.mean(0), rtol=1e-13)
    np.testing.assert_allclose(m2 / len(draws), wide.var(0), rtol=1e-12)


# -- steps with the moments of the process, and its exact ones -----------------------------


@pairwise(
    real=[(np.float32, 3e-5), (np.float64, 1e-11)],
    size=SHAPES,
    kind=[(False, 1.0, PROCESS), (True, 1.0, (0.3, 2.0)), (False, 0.3, (0.7, np.inf))],
)
def test_steps_that_match_moments_equal_the_twin(size, real, kind):
    (dtype, tolerance), (coarse, shape, matched) = real, kind
    rng = np.random.default_rng(0)
    theta, metric = (rng.gamma(2.0, size=size).astype(dtype) for _ in range(2))
    theta.flat[0] = 0
    grad = rng.normal(scale=3, size=size).astype(dtype)
    got = moved(theta, grad, metric, 0.2, 1.5, shape, matched, coarse)
    twin = theta.astype(float)
    reference.moment_step(twin, grad, metric, 0.2, 1.5, (KEY, 6, 1, 13, coarse), shape, matched)
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
    decay, level = np.exp(-step), (theta * num + shape) / c
    spread = (1 - decay) / c
    mean = theta * decay + level * (1 - decay)
    return mean, 2 * theta * spread * decay + level * spread * (1 - decay)


@pairwise(
    shape=[0.3, 0.5, 0.6, 1.0, 2.5],
    theta0=[1e-6, 0.02, 0.4, 3.0, 30.0],
    step=[0.05, 0.7],
    num=[0.0, 4.0],
)
def test_a_step_has_the_moments_of_the_process(step, theta0, shape, num):
    size, rate, c = (2000, 30), 0.5, 2.3
    theta, metric = np.full(size, theta0), np.full(size, c)
    grad = num - np.full(size, c - rate)
    wanted = process(theta0, num, c, step, shape)
    assert fits(moved(theta, grad, metric, step, rate, shape), *wanted)


@pytest.mark.parametrize(
    ("bug", "shape"), [(None, 1.0), ("variance", 1.0), ("shape", 2.5), ("squared", 0.3)]
)
def test_planted_bugs_are_seen(monkeypatch, bug, shape):
    """Twice the variance; no shape of the prior; squared normal numbers above psi = 2."""
    theta, c, step, rate, right = np.full((3000, 40), 0.02), 2.3, 0.2, 0.5, reference.step_moments

    def wrong(*arguments):
        mean, variance = right(*arguments)
        return mean, 2 * variance

    if bug == "variance":
        monkeypatch.setattr(reference, "step_moments", wrong)
    metric, used = np.full(theta.shape, c), 1.0 if bug == "shape" else shape
    reference.moment_step(theta, rate - metric, metric, step, rate, (KEY, 6, 1, 13, False), used)
    assert fits(theta, *process(0.02, 0.0, c, step, shape)) == (bug is None)


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


def test_the_share_of_a_component():
    rng = np.random.default_rng(0)
    W, H = rng.gamma(1.0, size=(300, 4)), rng.gamma(1.0, size=(200, 4))
    parts = W[:, None] * H
    mu = parts.sum(axis=2)
    exact = (parts**2).sum(axis=2) / mu
    assert langevin.mean_share(W, H) == pytest.approx(exact.sum() / mu.sum(), rel=0.15)
    assert langevin.mean_share(W[:, :1], H[:, :1]) == pytest.approx(1.0)
    assert langevin.mean_share(np.ones((2, 5)), np.ones((3, 5))) == pytest.approx(0.2)
    assert langevin.mean_share(np.zeros((2, 5)), H[:, :1].repeat(5, 1)) == 1.0
    assert np.isnan(langevin.mean_share(np.full((2, 1), np.nan), np.ones((3, 1))))


# -- steps with momentum -------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-5), (np.float64, 1e-12)])
def test_momentum_kernels_equal_their_twins(shape, dtype, tolerance):
    rng = np.random.default_rng(0)
    x, momentum, grad = (rng.normal(size=shape).astype(dtype) for _ in range(3))
    weights, columns = rng.poisson(2.0, (shape[0], 1)), rng.gamma(2.0, size=(4, shape[1]))
    columns[3] = rng.random(shape[1]) < 0.7
    weights, columns = weights.astype(dtype), columns.astype(dtype)
    found, squares = [], np.ones((2, shape[1]))
    for module, real, sums in ((langevin, dtype, squares[0]), (reference, float, squares[1])):
        position, speed, mixed = (own.astype(real) for own in (x, momentum, momentum))
        module.sums_of_squares(x, columns[0].astype(float), sums)
        module.refresh(mixed, 0.8, KEY, 6, 1, 13)
        module.kick_drift(position, speed, grad, weights, columns, 0.3, 0.5)
        module.drift(position, speed, weights, columns, 0.3, 0.5)
        found.append((position, speed, mixed))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(squares[0], squares[1], rtol=1e-12)
    assert squares.min() > 1


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
    assert abs(x.var() * 5 - 1) < 5 * np.sqrt(2 / x.size)
    assert abs(x.mean() - 1) < 5 * np.sqrt(0.2 / x.size)


# -- leapfrog steps with a mirror ----------------------------------------------------------


def mirror_start(dtype="float64"):
    rng = np.random.default_rng(0)
    theta, spread = rng.random((9, 3)) * 0.4, rng.random((9, 3)) + 0.2
    momentum, grad = rng.normal(size=(9, 3)), rng.normal(size=(9, 3))
    return tuple(array.astype(dtype) for array in (theta, momentum, grad, spread))


@pytest.mark.parametrize("shape", [1.0, 2.5, 0.6])
@REALS
def test_kick_and_drift_against_numpy(shape, dtype):
    theta, momentum, grad, spread = mirror_start(dtype)
    pull = 0.5 * grad.astype("f8") - 0.7 + (shape - 1) / theta
    kicked = momentum + SIZE * spread * pull
    x = theta + SIZE * spread * kicked
    mirror_kick(theta, momentum, grad, spread, SIZE, 0.5, 0.7, shape)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == np.float32 else {"rtol": 1e-12}
    np.testing.assert_allclose(momentum, kicked, **tolerance)
    mirror_drift(theta, momentum, spread, SIZE)
    assert shape > 1 or np.any(x < 0)
    np.testing.assert_allclose(theta, np.abs(x), **tolerance)
    np.testing.assert_allclose(momentum, np.where(x < 0, -kicked, kicked), **tolerance)


def mirror_path(theta, momentum, spread):
    """In the density of Gamma(2, 3) from data, exp(-1.3 θ) from the prior."""
    for _ in range(25):
        for move, size in ((mirror_kick, 0.5), (mirror_drift, 1), (mirror_kick, 0.5)):
            pull = (1.0 / (theta + 0.1) - 3.0,) if move is mirror_kick else ()
            rest = (1.0, 1.3, 1.0) if pull else ()
            move(theta, momentum, *pull, spread, size * SIZE, *rest)


def length_path(theta, along, across, metric):
    """A Poisson law of 3 counts; the kick in the middle of two drifts."""
    for _ in range(20):
        flight(theta, along, across, metric, 0.1)
        kick_flight(theta, along, across, 3 / (theta + 0.5) - 1, metric, RATE, 0.2, 0.5)


@pytest.mark.parametrize("path", [mirror_path, length_path])
def test_a_path_goes_back_the_way_it_came(path):
    rng = np.random.default_rng(0)
    theta, momentum, _, spread = mirror_start()
    moving = [momentum]
    if path is length_path:
        theta, spread = rng.gamma(0.7, size=(9, 3)), 0.2 + rng.gamma(2.0, size=(9, 3))
        moving.append(20 * rng.normal(size=(9, 3)))
    first = [own.copy() for own in (theta, *moving)]
    path(theta, *moving, spread)
    assert np.max(np.abs(theta - first[0])) > 0.1
    for own in moving:
        np.negative(own, out=own)
    path(theta, *moving, spread)
    np.testing.assert_allclose(theta, first[0], rtol=1e-7, atol=1e-9)
    if path is mirror_path:
        np.testing.assert_allclose(-momentum, first[1], rtol=1e-8, atol=1e-10)


def test_a_reflected_path_is_the_unfolded_one():
    """In a potential that is even and smooth at zero the mirror must change nothing."""
    theta, momentum, _, spread = mirror_start()
    x, u = theta.copy(), momentum.copy()
    for _ in range(40):  # U = x**2, whose gradient is odd
        mirror_kick(theta, momentum, -2 * theta, spread, SIZE, 1.0, 0.0, 1.0)
        mirror_drift(theta, momentum, spread, SIZE)
        u += SIZE * spread * -2 * x
        x += SIZE * spread * u
    assert np.any(x < 0)
    np.testing.assert_allclose(theta, np.abs(x), atol=1e-10)


# -- entries as squared lengths ------------------------------------------------------------


def vectors(theta, along, across, metric):
    """u and its momentum in the plane, (2, n, K), with u on a ray of its own."""
    angle = np.random.default_rng(3).uniform(0, 2 * np.pi, theta.shape)
    ray, normal = (np.cos(angle), np.sin(angle)), (-np.sin(angle), np.cos(angle))
    u = 2 * np.sqrt(metric * theta) * np.array(ray)
    return u, along * np.array(ray) + across * np.array(normal)


@REALS
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_kicks_and_drifts_are_those_of_vectors(dtype, share):
    rng = np.random.default_rng(0)
    theta, metric = rng.gamma(0.7, size=(40, 7)), 0.2 + rng.gamma(2.0, size=(40, 7))
    moving = rng.normal(size=(3, 40, 7)) * np.array([1, 1, 20])[:, None, None]
    arrays = [array.astype(dtype) for array in (theta, *moving, metric)]
    wide = [array.astype(float) for array in arrays]
    u, v = vectors(*wide[:3], wide[4])
    length = np.sqrt((u * u).sum(axis=0))
    pull = 0.8 * np.sqrt(wide[0] / wide[4]) * (wide[3] - RATE)  # of log p(|u|² / 4c) along u
    most = STEEPEST + length
    assert 0.01 < np.mean(pull > most) < 0.5
    assert 0.01 < np.mean(pull < -most) < 0.5
    v += np.clip(pull, -most, most) * u / length
    u += share * 0.8 * v + 0.3 * v
    kick_flight(*arrays, RATE, 0.8, share)
    flight(*arrays[:3], arrays[4], 0.3)
    length = np.sqrt((u * u).sum(axis=0))
    wanted = length**2 / (4 * wide[4]), (u * v).sum(axis=0), u[0] * v[1] - u[1] * v[0]
    tolerance = {"rtol": 2e-4, "atol": 1e-4} if dtype == np.float32 else {"rtol": 1e-9}
    for got, exact, by in zip(arrays, wanted, (1, length, length), strict=False):
        np.testing.assert_allclose(got, exact / by, **tolerance)


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
