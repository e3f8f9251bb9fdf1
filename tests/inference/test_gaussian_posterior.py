"""The real-valued sampler against exact posteriors, and planted bugs that must not pass."""

import numpy as np
import pytest

from daskfactor import as_blocks
from daskfactor.executors import SerialExecutor
from daskfactor.inference.gaussian_chain import column_table, warm_start
from daskfactor.inference.program import COLUMNS
from daskfactor.inference.sghmc import SGHMC
from daskfactor.models.gaussian import GaussianMF
from tests.inference.gaussian_reference import cell_moments, gibbs, moments_of_copies, run_chain

pytestmark = pytest.mark.statistical
NAN = float("nan")


def distance(noise, sampler=None, draws=2000):
    """Error of the means in posterior standard deviations, and the ratios of variances."""
    away, ratios = moments_of_copies(noise, sampler, tune=200, draws=draws)
    return float(np.sqrt(np.mean(away.mean(axis=0) ** 2))), ratios


def passes(away, ratios):
    return away < 0.10 and bool(np.all((ratios > 0.90) & (ratios < 1.12)))


@pytest.mark.parametrize("noise", [1.0, 0.3])
def test_fixed_hyperparameters_against_quadrature(noise):
    away, ratios = distance(noise)
    assert passes(away, ratios), f"{away:.3f} {ratios.round(3)}"


class TwiceTheGradient(SGHMC):
    def block_step(self, program, op, *rest):
        super().block_step(program, op._replace(scale=2 * op.scale), *rest)


class NoScale(SGHMC):
    def block_step(self, program, op, *rest):
        super().block_step(program, op._replace(scale=1.0), *rest)


class HotMomentum(SGHMC):
    """The momentum a twentieth too large after every cycle."""

    def block_step(self, program, op, data, bands, work):
        super().block_step(program, op, data, bands, work)
        if op.last:
            for band in bands:
                band.arrays["momentum"] *= 1.05


class NoPriorOnColumns(SGHMC):
    def _move(self, program, op, band, gradient, factor):
        if factor == COLUMNS:
            table = column_table(program.hyper, band.values.shape[1])[factor]
            columns = table.astype(band.values.dtype)
            gradient = gradient + columns[1] * (band.values - columns[0])
        super()._move(program, op, band, gradient, factor)


@pytest.mark.parametrize("bug", [TwiceTheGradient, NoScale, HotMomentum, NoPriorOnColumns])
def test_every_planted_bug_is_seen(bug):
    away, ratios = distance(0.3, bug(), 1000)
    assert not passes(away, ratios), f"{away:.3f} {ratios.round(3)}"


@pytest.mark.parametrize(("blocks", "heat"), [(1, 0.02), (2, 0.05)])
def test_everything_sampled_against_gibbs(blocks, heat):
    """Factors, biases, level, precisions and noise at once, with a row without data.

    Visiting the parts in random order heats the chain by some 3 %; a single part does not.
    """
    rng = np.random.default_rng(3)
    height, width, K = 36, 24, 2
    V = 1 + 0.5 * rng.normal(size=(height, 1)) + 0.7 * rng.normal(size=width)
    V = (
        V
        + rng.normal(size=(height, K)) @ rng.normal(size=(width, K)).T
        + 0.5 * rng.normal(size=(height, width))
    )
    V[rng.random((height, width)) < 0.6] = NAN
    V[5] = NAN
    model = GaussianMF(K)
    rows, cols = (index.ravel() for index in np.indices((height, width)))
    with as_blocks(V, blocks, dtype="float64", allow_empty=True) as data:
        _, priors = warm_start(data, model, 0, 0, SerialExecutor())
        found = run_chain(data, model, tune=500, draws=12_000, cells=(rows, cols))
    exact = gibbs(V, model, priors, 5000, 1)
    mean, variance = cell_moments(found.state, rows.size)
    mu = exact.mu.reshape(len(exact.mu), -1)
    away = (mean - mu.mean(axis=0)) / mu.std(axis=0)
    ratios = variance / mu.var(axis=0)
    assert np.sqrt(np.mean(away**2)) < 0.06
    assert abs(ratios.mean() - 1) < heat
    assert abs(ratios[rows == 5].mean() - 1) < heat + 0.03
    noise = np.array([hyper.noise for hyper in found.hypers])
    assert abs(noise.mean() - exact.noise.mean()) < 0.2 * exact.noise.std()
    assert abs(noise.std() / exact.noise.std() - 1) < 0.15
    precision = np.array([np.sort(hyper.precision_w) for hyper in found.hypers])
    np.testing.assert_allclose(precision.mean(axis=0), exact.precision.mean(axis=0), rtol=0.05)
    level = np.array([hyper.mean for hyper in found.hypers])
    assert abs(level.mean() - exact.mean.mean()) < 0.25 * exact.mean.std()
