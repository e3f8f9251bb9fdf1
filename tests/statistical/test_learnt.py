"""Learnt shapes of entries that underflow, and precisions of links."""

import numpy as np
import pytest
from scipy import stats

import daskfactor as dfac
from daskfactor.inference.bands import sum_entries
from daskfactor.kernels import langevin, variates
from daskfactor.models.rates import FLOOR, Totals

pytestmark = pytest.mark.statistical


def spiked(shape, count, seed, dtype):
    """Entries of W at rate 1, (count, 1), as samplers write them: none below a smallest number."""
    rng = np.random.default_rng(seed)
    # θ = g u^(1/a) with g ~ Gamma(a + 1): in logarithms, which do not underflow.
    logs = np.log(rng.gamma(shape + 1.0, size=(count, 1))) + np.log(rng.random((count, 1))) / shape
    smallest = variates.TINY_32 if dtype == "float32" else variates.TINY_64
    return np.maximum(np.exp(np.maximum(logs, -700.0)), smallest).astype(dtype)


def totals(W):
    """The sums of W as a chain has them, and of an H that says nothing of shapes."""
    own = sum_entries(W, None, logs=True, by_rows=False)
    ones = np.ones(1)
    first = Totals(W.size * ones, own.columns, own.logs, own.floored)
    return [first, Totals(0.0 * ones, 0.0 * ones)]


SPIKED = dfac.TweedieNMF(1, dispersion=1.0, rate_w=1.0, rate_h=1.0, shape_w="auto")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_entries_at_the_floor_have_the_probability_of_all_below(dtype):
    # No kernel writes what is below the floor but for double precision.
    assert variates.TINY_32 == langevin.SMALLEST == FLOOR > variates.TINY_64
    W = spiked(0.02, 300, 0, dtype)
    above, law = W[np.dtype(dtype).type(FLOOR) < W].astype(float), stats.gamma
    assert 20 < W.size - above.size < 100
    shapes = np.array([0.02, 0.03, 0.1, 1.0])
    found = [SPIKED.log_marginal(1.0, (a, 1.0), totals(W)) for a in shapes]
    few = W.size - above.size
    wanted = [law.logpdf(above, a).sum() + few * law.logcdf(FLOOR, a) for a in shapes]
    np.testing.assert_allclose(np.diff(found), np.diff(wanted), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_shapes_of_entries_that_underflow(dtype):
    """Posteriors of 25 sets of 500 entries lie around the shape that made them. Taken for entries
    of 1e-37, those below put a shape of .03 two standard deviations too high."""
    rng, z, shape = np.random.default_rng(1), [], 0.03
    for seed in range(25):
        sums, a, drawn = totals(spiked(shape, 500, seed, dtype)), (shape, 1.0), []
        for _ in range(50):
            a = SPIKED.draw_shapes(1.0, a, sums, rng)
            drawn.append(a[0])
        z.append((np.mean(drawn) - shape) / np.std(drawn))
    assert abs(np.mean(z)) < 4.0 / np.sqrt(len(z))
    assert 0.6 < np.std(z) < 1.6


def test_precisions_of_links_are_drawn_given_these():
    """τ ~ Gamma(1 + n / 2, 1 / τ⁰ + ½ Σ γ²) given n numbers γ of a draw."""
    rng = np.random.default_rng(0)
    model = dfac.TweedieNMF(2, dispersion=1.0, covariates_w=rng.normal(size=(12, 3)))
    run = {"random_seed": 1, "executor": "serial", "progressbar": False}
    tree = dfac.sample(rng.poisson(4.0, (12, 9)), model, dfac.Gibbs(), 500, 50, **run)
    link, precision = (tree["posterior"][own].values[0] for own in ("link_w", "link_precision_w"))
    rate = 1 / model.starting_ridges[0] + 0.5 * (link**2).sum(axis=(1, 2))
    law = stats.gamma(1 + link[0].size / 2, scale=1 / rate)
    assert stats.kstest(law.cdf(precision), "uniform").pvalue > 1e-3
    assert np.ptp(rate) > 0.1 * rate.mean()
