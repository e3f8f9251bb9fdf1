"""Stein discrepancies of draws whose distribution is known, and paths on the simplex."""

import numpy as np
import pytest
from scipy import stats

import daskfactor as dfac
from daskfactor.executors import SerialExecutor
from daskfactor.stein.kernel import IMQ
from daskfactor.stein.particles import Particles, Posterior
from daskfactor.stein.simplex_hmc import SimplexHMC
from tests.stein.posed import stacked
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
    """Independent draws from `POISSON`'s posterior. With t = ΣH: H/t ~ Dirichlet(1 + column sums),
    W | t ~ Gamma(1 + row sums, 1 + t), and p(t) ∝ t^(n + J - 1) e^(-t) (1 + t)^(-(I + n)), by
    inversion on a grid."""
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


def expected_kernel(sampler, model, kernel, tangent=False, batches=24):
    """Mean of K_p over pairs of different draws, and its standard error over batches."""
    rng = np.random.default_rng(1)
    means = []
    for _ in range(batches):
        K = kernel_matrix(sampler(400, rng), model, kernel, tangent)
        means.append((K.sum() - np.trace(K)) / (400 * 399))
    return float(np.mean(means)), float(np.std(means, ddof=1) / np.sqrt(batches))


def test_expected_kernel_is_zero_under_the_posterior():
    mean, error = expected_kernel(posterior_draws, POISSON, KERNEL)
    assert error < 0.01
    assert abs(mean) < 5 * error
    mean, error = expected_kernel(simplex_draws, SIMPLEX, SIMPLEX_KERNEL, tangent=True)
    assert error < 0.05
    assert abs(mean) < 5 * error


def test_expected_kernel_is_not_zero_off_the_simplex_or_with_a_density_at_the_boundary():
    """The paper's own scores, in all of space, do not know of the simplex."""
    mean, error = expected_kernel(simplex_draws, SIMPLEX, SIMPLEX_KERNEL)
    assert mean > 50 * error
    for tangent in (False, True):
        mean, error = expected_kernel(prior_draws, FLAT, SIMPLEX_KERNEL, tangent, batches=8)
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


BATCHES = 25


def chain_of(V, model, draws, steps, seed=0):
    rng = np.random.default_rng(seed)
    K = model.n_components
    W = rng.dirichlet(np.ones(len(V)), (1, K)).swapaxes(1, 2)
    H = rng.exponential(V.mean(), (1, K, V.shape[1]))
    with dfac.as_blocks(V, 1, dtype="float64") as data:
        posterior = Posterior(SerialExecutor(), data, model, IMQ())
        options = SimplexHMC(draws=draws, tune=150, steps=steps)
        made = stacked(options.chain(posterior, (W, H), draws, seed))
    return made.W, made.H


def batched(values):
    """Means (functions,) and their standard errors from means of consecutive draws."""
    used = values[: len(values) // BATCHES * BATCHES]
    means = used.reshape(BATCHES, -1, values.shape[1]).mean(axis=1)
    return values.mean(axis=0), means.std(axis=0, ddof=1) / np.sqrt(BATCHES)


def check(values, exact, exact_error=0.0):
    """By five standard errors, each of which is small beside the spread of the draws."""
    means, errors = batched(values)
    assert np.all(errors < 0.1 * values.std(axis=0)), errors / values.std(axis=0)
    z = (means - exact) / np.hypot(errors, exact_error)
    assert np.abs(z).max() < 5, z


def distance(values, law):
    """Kolmogorov and Smirnov's distance of draws that hang together, times √(effective size)."""
    (error,) = batched(values[:, None])[1]
    effective = min(len(values), (values.std() / error) ** 2)
    return float(stats.kstest(values, law.cdf).statistic * np.sqrt(effective))


def test_a_dirichlet_posterior():
    """One component under a Poisson likelihood: W a Dirichlet, H gamma variables."""
    W, H = chain_of(COUNTS, SIMPLEX, 900, 8)
    by_row, by_column = 1 + COUNTS.sum(axis=1), 1 + COUNTS.sum(axis=0)
    w = stats.beta(by_row[0], by_row[1])
    laws = [stats.gamma(a, scale=1 / 1.5) for a in by_column]
    values = np.stack([W[:, 0, 0], H[:, 0, 0], H[:, 0, 1]], axis=1)
    check(values, np.array([w.mean(), *(law.mean() for law in laws)]))
    spread = np.array([w.var(), *(law.var() for law in laws)])
    check((values - values.mean(axis=0)) ** 2, spread)
    for own, law in zip(values.T, [w, *laws], strict=True):
        assert distance(own, law) < 2.2


def functions_of_one(w, a, b):
    """Of W = (w, 1 - w) and H = (a, b), along a last axis."""
    return np.stack([w, w**2, a, a**2, b, b**2, w * a, a * b, w * (1 - w) * b], axis=-1)


@pytest.mark.full
def test_the_loss_by_quadrature():
    """2 x 2 under ‖V - WH‖², where the loss bends and the boundaries of W and H are near."""
    V = np.array([[1.4, 0.2], [0.3, 0.6]])
    model = dfac.SILFNMF(1, threshold=0.8, smoothness=0.6, sharpness=3.0, rate=0.7)
    w = (np.arange(80) + 0.5) / 80
    h = (np.arange(120) + 0.5) * 6.0 / 120
    grid = np.stack(np.meshgrid(w, h, h, indexing="ij"), axis=-1)
    at, a, b = np.moveaxis(grid, -1, 0)
    f = (V[0, 0] - at * a) ** 2 + (V[0, 1] - at * b) ** 2
    f += (V[1, 0] - (1 - at) * a) ** 2 + (V[1, 1] - (1 - at) * b) ** 2
    mass = np.exp(model.log_likelihood(f) - model.rate * (a + b))
    mass /= mass.sum()
    assert mass[:, -1].sum() + mass[:, :, -1].sum() < 1e-4
    slopes = model.slope(f) / -model.sharpness
    assert 0.3 < (mass * ((slopes > 0) & (slopes < 1))).sum() < 0.9
    exact = (mass[..., None] * functions_of_one(at, a, b)).sum(axis=(0, 1, 2))
    W, H = chain_of(V, model, 1500, 8, seed=2)
    check(functions_of_one(W[:, 0, 0], H[:, 0, 0], H[:, 0, 1]), exact, 1e-4)


def functions_of_two(W, H):
    """That do not tell components apart."""
    mu = W @ H
    return np.concatenate(
        [
            mu.reshape(len(mu), -1),
            H.sum(axis=(1, 2))[:, None],
            (W[:, :, 0] * W[:, :, 1]),
            (W[:, 0] * H.sum(axis=2)).sum(axis=1)[:, None] ** 2,
        ],
        axis=1,
    )


@pytest.mark.parametrize("beta", tiered([2.0, 1.0], lambda own: own == 2.0))
def test_two_components_by_weighted_draws_of_the_prior(beta):
    V = np.array([[1.0, 0.3], [0.4, 2.0], [0.2, 0.6]])
    model = dfac.SILFNMF(2, beta=beta, threshold=0.7, smoothness=0.7, sharpness=2.5)
    rng, n = np.random.default_rng(0), 200_000
    W = rng.dirichlet(np.ones(3), (n, 2)).swapaxes(1, 2)
    H = rng.exponential(1.0, (n, 2, 2))
    mu = W @ H
    d = ((V - mu) ** 2) if beta == 2.0 else V * np.log(V / mu) - V + mu
    mass = np.exp(model.log_likelihood(d.sum(axis=(1, 2))))
    mass /= mass.sum()
    assert 1 / (mass**2).sum() > 10_000
    values = functions_of_two(W, H)
    exact = mass @ values
    error = np.sqrt((mass**2) @ (values - exact) ** 2)
    check(functions_of_two(*chain_of(V, model, 1200, 8, seed=1)), exact, error)


def test_the_orthant():
    """Poisson counts and exponential priors: E μ and Var μ by quadrature."""
    W, H = chain_of(COUNTS, POISSON, 1200, 8)
    mean = np.array([[3.3199, 6.1655], [2.2132, 4.1103]])
    variance = np.array([[2.0515, 4.4742], [1.1352, 2.7148]])
    mu = (W @ H).reshape(len(W), -1)
    check(mu, mean.ravel())
    check((mu - mean.ravel()) ** 2, variance.ravel())
