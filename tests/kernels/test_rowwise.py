"""The exact row moves against plain densities."""

import math

import numpy as np
import pytest
from scipy import stats

from daskfactor.data.sources import as_blocks
from daskfactor.evidence import rowwise
from daskfactor.evidence.rowwise import NEW, OLD, PROPOSED, SCRATCH, Prior, Target, row_kernels
from daskfactor.evidence.tempered import both_sides
from daskfactor.models.tweedie_law import Tweedie
from tests.inner import called

K = 3


def problem(beta, seed=0):
    rng = np.random.default_rng(seed)
    V = rng.gamma(2.0, 1.0, (4, 5)).astype(np.float32)
    if beta == 1.0:
        V = np.round(V)
    V[1, 2] = V[3, 0] = np.nan
    W, H = rng.gamma(1.0, 1.0, (4, K)), rng.gamma(1.0, 1.0, (5, K))
    sides = both_sides(as_blocks(V, 2), Tweedie(beta))
    return V.astype(np.float64), W, H, sides, rng


def twin(v, w, H, beta):
    """Log-likelihood at dispersion 1 up to a constant, num and den of one row."""
    seen = ~np.isnan(v)
    v, H = v[seen], H[seen]
    mu = H @ w
    fit = np.where(v > 0, v * np.log(mu), 0.0) - mu
    if beta != 1.0:
        fit = v * mu ** (beta - 1) / (beta - 1) - mu**beta / beta
    return fit.sum(), (v * mu ** (beta - 2)) @ H, mu ** (beta - 1) @ H


@pytest.mark.parametrize("beta", [1.0, 2.0, 0.5])
@pytest.mark.parametrize("tau", [math.inf, 0.7])
def test_acceptance_is_metropolis_and_hastings_ratio(beta, tau):
    V, W, H, sides, rng = problem(beta)
    s, prior, work = 0.6, Prior(1.3, 1.7, np.zeros(K, bool)), np.empty((SCRATCH, K))
    share = 1.0 if tau == math.inf else 1 - math.exp(-tau)
    called(rowwise._sum_columns)(H, work)
    look = called(row_kernels(Tweedie(beta)).look)
    sum_observed, propose = called(rowwise._sum_observed), called(rowwise._propose)
    log_ratio = called(rowwise._log_ratio)
    for i in range(4):
        sum_observed(H, sides.by_rows, i, work)
        fit = look(W, i, H, sides.by_rows, i, work, OLD)
        propose(W, i, work, s, prior, share, rng)
        new_fit = look(work, NEW, H, sides.by_rows, i, work, PROPOSED)
        got = s * (new_fit - fit) + log_ratio(W, i, work, s, prior, share)
        w, new, n = W[i], work[NEW], work[rowwise.COUNT]

        def joint(w, new, i=i, n=n):
            """Log p(w) q(n, new | w)."""
            value, num, den = twin(V[i], w, H, beta)
            rate = s * den + prior.rate
            law = stats.gamma(s * w * num + prior.shape + n, scale=share / rate)
            total = s * value + law.logpdf(new).sum()
            total += stats.gamma(prior.shape, scale=1 / prior.rate).logpdf(w).sum()
            if share < 1:
                total += stats.poisson(w * rate * (1 / share - 1)).logpmf(n).sum()
            return total

        assert got == pytest.approx(joint(new, w) - joint(w, new), abs=1e-7)
        np.testing.assert_allclose(work[OLD], twin(V[i], w, H, beta)[1], rtol=1e-12)


def test_the_constant_completes_the_likelihood():
    from tests.models.laws import divergence

    for beta in (1.0, 2.0, 0.5):
        V, W, H, sides, _ = problem(beta)
        seen = ~np.isnan(V)
        expected = -divergence(V[seen], (W @ H.T)[seen], beta).sum()
        log_fit = row_kernels(Tweedie(beta)).log_fit
        got = log_fit(W, H, sides.by_rows) + sides.constant
        assert got == pytest.approx(expected, rel=1e-10)
        by_columns = log_fit(H, W, sides.by_cols) + sides.constant
        assert by_columns == pytest.approx(expected, rel=1e-10)


def test_frozen_components_stay_and_one_component_is_always_accepted():
    _, W, H, sides, rng = problem(1.0)
    frozen = np.array([True, False, False])
    priors = Prior(1.0, 1.0, frozen), Prior(1.0, 1.0, ~frozen)
    before = W.copy(), H.copy()
    fits = np.empty(5)
    law, kernels = Target(sides.by_rows, sides.by_cols, 1.0, *priors), row_kernels(Tweedie(1.0))
    kernels.start_chain(W, H, law, 2)
    accepted = kernels.run_sweeps(W, H, law, math.inf, rng, fits)
    assert 0 < accepted <= 45
    np.testing.assert_array_equal(W[:, 0], before[0][:, 0])
    np.testing.assert_array_equal(H[:, 1:], before[1][:, 1:])
    assert (W[:, 1:] != before[0][:, 1:]).all()
    assert fits[-1] == pytest.approx(kernels.log_fit(W, H, sides.by_rows), rel=1e-10)
    free = Prior(1.0, 1.0, np.zeros(1, bool))
    one = np.ascontiguousarray(W[:, :1]), np.ascontiguousarray(H[:, :1])
    law = Target(sides.by_rows, sides.by_cols, 0.3, free, free)
    assert kernels.run_sweeps(*one, law, math.inf, rng, fits) == 45
