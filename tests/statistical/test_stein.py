"""Stein discrepancies of draws whose distribution is known.

Counts that no row or column lacks make the density vanish at the boundary for K = 1, so
that the expected kernel is exactly zero under the posterior: a wrong sign of the score, a
missing term or a wrong trace all show.
"""

import warnings

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.errors import SamplingWarning
from daskfactor.executors import SerialExecutor
from daskfactor.stein.particles import Particles, Posterior
from tests.tiers import tiered

pytestmark = pytest.mark.statistical

COUNTS = np.array([[4.0, 7.0], [2.0, 5.0]])
POISSON = dfac.TweedieNMF(1, dispersion=1.0, rate_w=1.0, rate_h=1.0)
KERNEL = dfac.IMQ(2.0, 3.0)

SIMPLEX = dfac.SILFNMF(1, beta=1.0, threshold=1e-9, sharpness=1.0, rate=0.5)
"""All but a Poisson likelihood: the loss is its divergence."""
SIMPLEX_KERNEL = dfac.IMQ(0.2, 4.0)

FLAT = dfac.SILFNMF(1, threshold=1e9, rate=0.5)
"""The prior."""


def posterior_draws(count, rng):
    """Independent draws from `POISSON`'s posterior.

    With t = ΣH: H/t ~ Dirichlet(1 + column sums), W | t ~ Gamma(1 + row sums, 1 + t), and
    p(t) ∝ t^(n + J - 1) e^(-t) (1 + t)^(-(I + n)), by inversion on a grid.
    """
    (rows, cols), n = COUNTS.shape, COUNTS.sum()
    grid = np.linspace(1e-6, 60.0, 200_001)
    log = (n + cols - 1) * np.log(grid) - grid - (rows + n) * np.log1p(grid)
    mass = np.cumsum(np.exp(log - log.max()))
    t = np.interp(rng.random(count), mass / mass[-1], grid)
    H = rng.dirichlet(1 + COUNTS.sum(axis=0), count) * t[:, None]
    W = rng.standard_gamma(1 + COUNTS.sum(axis=1), (count, rows)) / (1 + t[:, None])
    return W[:, :, None], H[:, None, :]


def simplex_draws(count, rng):
    """Independent draws from `SIMPLEX`'s posterior: a Dirichlet and gamma variables."""
    W = rng.dirichlet(1 + COUNTS.sum(axis=1), count)
    H = rng.standard_gamma(1 + COUNTS.sum(axis=0), (count, 2)) / (1 + SIMPLEX.rate)
    return W[:, :, None], H[:, None, :]


def prior_draws(count, rng):
    W = rng.dirichlet(np.ones(2), count)
    return W[:, :, None], rng.exponential(1 / FLAT.rate, (count, 1, 2))


def kernel_matrix(draws, model, kernel, tangent=False):
    with dfac.as_blocks(COUNTS, 1, dtype="float64") as data:
        posterior = Posterior(SerialExecutor(), data, model, kernel, tangent)
        return posterior.stein_matrix(Particles.of(*draws, data)).matrix


def expected_kernel(sampler, model, kernel, tangent=False):
    """Mean of K_p over pairs of different draws, and its standard error over 24 batches."""
    rng = np.random.default_rng(1)
    means = []
    for _ in range(24):
        K = kernel_matrix(sampler(400, rng), model, kernel, tangent)
        means.append((K.sum() - np.trace(K)) / (400 * 399))
    return float(np.mean(means)), float(np.std(means, ddof=1) / np.sqrt(24))


def test_expected_kernel_is_zero_under_the_posterior():
    mean, error = expected_kernel(posterior_draws, POISSON, KERNEL)
    assert error < 0.01
    assert abs(mean) < 5 * error


def test_along_the_simplex_it_is_zero_too():
    mean, error = expected_kernel(simplex_draws, SIMPLEX, SIMPLEX_KERNEL, tangent=True)
    assert error < 0.05
    assert abs(mean) < 5 * error


def test_scores_in_all_of_space_do_not_know_of_the_simplex():
    """The paper's own, whose discrepancy of the posterior from itself is not zero."""
    mean, error = expected_kernel(simplex_draws, SIMPLEX, SIMPLEX_KERNEL)
    assert mean > 50 * error


@pytest.mark.parametrize("tangent", [False, True])
def test_it_is_not_zero_where_the_density_is_positive_at_the_boundary(tangent):
    mean, error = expected_kernel(prior_draws, FLAT, SIMPLEX_KERNEL, tangent)
    assert mean > 5 * error


SHIFTS = {
    "larger W": lambda W, H: (1.1 * W, H),
    "smaller W": lambda W, H: (0.9 * W, H),
    "larger H": lambda W, H: (W, 1.1 * H),
    "moved W": lambda W, H: (W + 0.15, H),
}


@pytest.mark.parametrize("shift", tiered(SHIFTS, lambda name: name in ("larger H", "moved W")))
def test_exact_draws_are_nearer_than_shifted_ones(shift):
    """Over 20 sets of 100 draws, by five standard errors of the difference."""
    rng = np.random.default_rng(2)
    gains = []
    for _ in range(20):
        draws = posterior_draws(100, rng)
        exact, moved = (
            kernel_matrix(own, POISSON, KERNEL).mean() for own in (draws, SHIFTS[shift](*draws))
        )
        gains.append(moved - exact)
    assert np.mean(gains) > 5 * np.std(gains, ddof=1) / np.sqrt(20)


THREE = dfac.TweedieNMF(3, dispersion=1.0)
THREE_KERNEL = dfac.IMQ(4.0, 4.5)


def more_counts():
    rng = np.random.default_rng(0)
    return rng.poisson(rng.gamma(1, 2, (60, 3)) @ rng.gamma(1, 2, (3, 40))).astype(np.float64)


CHAINS = {
    "two by two": (COUNTS, POISSON, KERNEL, 1, 0.05, 20),
    "three components": (more_counts(), THREE, THREE_KERNEL, 2, 0.2, 5),
}
"""Data, model, kernel, blocks, the automatic step, and how far apart draws are."""


def discrepancy_at(name, factor, seed):
    V, model, kernel, blocks, step, thin = CHAINS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)  # the large step is told of
        sampler = dfac.PSGLD(step=factor * step, transition="euler")  # of a bias that grows
        run = {"blocks": blocks, "progressbar": False, "executor": "serial"}
        trace = dfac.sample(V, model, sampler, 150, 200, thin=thin, random_seed=seed, **run)
    found = dfac.stein_discrepancy(trace, V, model, kernel=kernel, **run)
    return float(found["discrepancy"])


@pytest.mark.full
@pytest.mark.parametrize("name", CHAINS)
def test_draws_with_a_step_ten_times_too_large_are_ranked_worse(name):
    """Chains of 150 draws, 8 seeds: by five standard errors, and in every pair."""
    pairs = np.array([[discrepancy_at(name, by, seed) for by in (1, 10)] for seed in range(8)])
    gains = np.log(pairs[:, 1] / pairs[:, 0])
    assert gains.min() > 0
    assert gains.mean() > 5 * gains.std(ddof=1) / np.sqrt(8)
