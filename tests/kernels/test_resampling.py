import numpy as np
import pytest

from daskfactor.allocation.resampling import SCHEMES, choose_parents, count_offspring, normalise

WEIGHTS = np.array([0.05, 0.4, 0.0, 0.11, 0.24, 0.2])
RUNS = 20_000


def offspring_of(scheme, weights, draws):
    offspring = np.full(weights.size, 99)
    count_offspring(SCHEMES[scheme], weights.copy(), draws, offspring)
    return offspring


def reference(scheme, weights, draws):
    """Points on the unit line, by NumPy."""
    P = weights.size
    kept, left = np.zeros(P, int), weights
    points = draws
    if scheme in ("systematic", "stratified"):
        points = (np.arange(P) + (draws[0] if scheme == "systematic" else draws)) / P
    if scheme == "residual":
        kept = np.floor(P * weights).astype(int)
        left = P * weights - kept
        points = draws[: P - kept.sum()] * left.sum()
    at = np.searchsorted(np.cumsum(left), points, side="right")
    return kept + np.bincount(np.minimum(at, P - 1), minlength=P)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_of_offspring(scheme):
    """As many as the weights say on average, and P in all."""
    rng, P = np.random.default_rng(5), WEIGHTS.size
    seen = np.array([offspring_of(scheme, WEIGHTS, rng.random(P)) for _ in range(RUNS)])
    assert (seen.sum(axis=1) == P).all()
    error = np.maximum(seen.std(axis=0), 1e-9) / np.sqrt(RUNS)
    assert (np.abs(seen.mean(axis=0) - P * WEIGHTS) < 5 * error + 1e-12).all()
    assert (seen[:, 2] == 0).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_reference(scheme):
    rng = np.random.default_rng(6)
    for P in (1, 2, 7, 64):
        weights = rng.gamma(0.3, size=P)
        weights /= weights.sum()
        draws = rng.random(P)
        expected = reference(scheme, weights, draws)
        np.testing.assert_array_equal(offspring_of(scheme, weights, draws), expected)


def test_spread():
    """Systematic offspring is never off by a whole particle; multinomial is."""
    rng, P = np.random.default_rng(7), WEIGHTS.size
    seen = {
        scheme: np.array([offspring_of(scheme, WEIGHTS, rng.random(P)) for _ in range(2000)])
        for scheme in SCHEMES
    }
    off = {scheme: np.abs(n - P * WEIGHTS).max() for scheme, n in seen.items()}
    assert off["systematic"] < 1 < off["multinomial"]
    assert (seen["residual"] >= np.floor(P * WEIGHTS)).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rounding(scheme):
    """Draws at the very end of the line, and one particle with all the weight."""
    almost = np.full(5, 1 - 2.0**-53)
    for weights in (np.full(5, 0.2), np.array([0, 0, 1.0, 0, 0]), np.array([1.0, 0, 0, 0, 0])):
        offspring = offspring_of(scheme, weights, almost)
        assert offspring.sum() == 5
        assert (offspring[weights == 0] == 0).all()


def test_parents():
    rng = np.random.default_rng(8)
    for _ in range(200):
        P = int(rng.integers(1, 30))
        offspring = rng.multinomial(P, rng.dirichlet(np.full(P, 0.3)))
        parents = np.empty(P, np.int64)
        choose_parents(offspring.copy(), parents)
        np.testing.assert_array_equal(np.bincount(parents, minlength=P), offspring)
        stayed = np.flatnonzero(offspring)
        np.testing.assert_array_equal(parents[stayed], stayed)


def test_normalise():
    logs, weights = np.array([-1000.0, -1001.0, -1003.0]), np.empty(3)
    mean, size = normalise(logs, weights)
    assert mean == pytest.approx(-1000 + np.log(np.mean(np.exp([0.0, -1, -3]))))
    np.testing.assert_allclose(weights.sum(), 1)
    assert size == pytest.approx(1 / np.sum(weights**2))
