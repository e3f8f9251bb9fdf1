"""The multiplicative update under gamma priors: its equation, its objective, its limits."""

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.errors import DataWarning, OptionError
from daskfactor.inference.multiplicative import gamma_update
from daskfactor.models.tweedie_law import Tweedie
from tests.models.laws import divergence

BETAS = [-1.0, 0.0, 0.5, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("pull", [-0.3, 1e-4, 0.8, 1e4])
def test_each_update_solves_its_equation(beta, pull):
    rng = np.random.default_rng(0)
    theta, num, den = (np.exp(rng.normal(scale=3, size=(200, 4))) for _ in range(3))
    num[:20] = 0.0
    theta[20:30] = 0.0
    new = gamma_update(theta, num, den, pull, Tweedie(beta), 1e-9)
    assert (new >= 1e-9).all()
    old = np.maximum(theta, 1e-9)
    ratio, share = new / old, pull / old
    if pull < 0:
        gamma = 1 / (2 - beta) if beta < 1 else 1 / max(1, beta - 1)
        expected = np.maximum(old * (num / (den - share)) ** gamma, 1e-9)
        np.testing.assert_allclose(new, expected, rtol=1e-12)
        return
    m, n = (1.0, beta - 1.0) if beta <= 1 else (beta, 1.0)
    left, right = den * ratio**m, num * ratio**n + share
    free = new > 1e-9
    np.testing.assert_allclose(left[free], right[free], rtol=1e-8)


@pytest.mark.parametrize(
    ("beta", "shapes"), [(0.5, (2.0, 1.0)), (1.0, (1.5, 3.0)), (1.0, (1.0, 0.7)), (2.0, (2.0, 1.5))]
)
def test_the_objective_never_rises(beta, shapes):
    rng = np.random.default_rng(1)
    V = np.maximum(rng.poisson(rng.gamma(1, 2, (12, 2)) @ rng.gamma(1, 2, (2, 9))), 0.3)
    V = V.astype(float)
    V[2, 3] = np.nan
    model = dfac.TweedieNMF(2, beta=beta, dispersion=1.5, shape_w=shapes[0], shape_h=shapes[1])
    if min(shapes) < 1:
        with pytest.warns(DataWarning, match="shape_h=0.7 the posterior density is infinite"):
            fit = optimize(V, model)
    else:
        fit = optimize(V, model)
    found = fit["objective"].values
    assert (np.diff(found) <= 1e-9 * np.abs(found[:-1])).all()
    W, H = fit["W"].values, fit["H"].values
    seen = ~np.isnan(V)
    wanted = divergence(V[seen], (W @ H)[seen], beta).sum()
    for factor, side, shape in ((W, "w", shapes[0]), (H, "h", shapes[1])):
        rate = fit.attrs[f"rate_{side}"]
        wanted += 1.5 * (rate * factor.sum() - (shape - 1) * np.log(factor).sum())
    assert found[-1] == pytest.approx(wanted, rel=1e-6)


def optimize(V, model):
    method = dfac.MultiplicativeUpdates(max_iter=200, tol=0)
    return dfac.optimize(
        dfac.as_blocks(V, dtype="float64"), model, method, random_seed=0, progressbar=False
    )


def test_ends_where_the_gradient_of_the_posterior_is_zero():
    rng = np.random.default_rng(2)
    V = rng.poisson(6.0, (9, 7)).astype(float)
    model = dfac.TweedieNMF(1, dispersion=2.0, rate_w=1.0, rate_h=2.0, shape_w=3.0, shape_h=1.5)
    method = dfac.MultiplicativeUpdates(max_iter=3000, tol=0)
    fit = dfac.optimize(
        dfac.as_blocks(V, dtype="float64"), model, method, random_seed=0, progressbar=False
    )
    W, H = fit["W"].values, fit["H"].values
    R = (V / (W @ H) - 1) / 2.0
    np.testing.assert_allclose(R @ H.T - 1.0 + 2.0 / W, 0, atol=1e-6)
    np.testing.assert_allclose(W.T @ R - 2.0 + 0.5 / H, 0, atol=1e-6)


def test_descent_entry_by_entry_takes_exponential_priors_only():
    with pytest.raises(OptionError, match="exponential priors only, got shape_w=2"):
        dfac.optimize(np.ones((4, 4)), dfac.TweedieNMF(2, shape_w=2.0), dfac.DSGD())
