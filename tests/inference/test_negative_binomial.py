"""Overdispersed counts through the public verbs."""

from typing import Any

import numpy as np
import pytest
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import ModelError

ALPHA, K = 0.5, 2
QUIET: dict[str, Any] = {"random_seed": 1, "progressbar": False, "executor": "serial"}


def counts(rows: int = 60, columns: int = 50) -> np.ndarray:
    rng = np.random.default_rng(4)
    mu = rng.gamma(1.0, 1.0, (rows, K)) @ rng.gamma(1.0, 1.5, (K, columns))
    return rng.poisson(mu * rng.gamma(1 / ALPHA, ALPHA, mu.shape)).astype(np.float32)


def test_a_sparse_matrix_gives_the_bits_of_the_dense_one() -> None:
    """Rows are written out one by one; under beta=0.5 as well, whose zeros do not add up."""
    V = counts(20, 15)
    V[3, 4] = np.nan
    for model in (dfac.NegativeBinomialNMF(K), dfac.TweedieNMF(K, beta=0.5, dispersion=1.0)):
        for sampler in (dfac.PSGLD(warm_start=3), dfac.BlockHMC(steps=2, warm_start=3)):
            dense, zeros = (
                dfac.sample(own, model, sampler, draws=4, tune=10, blocks=2, **options, **QUIET)
                for own, options in ((V, {}), (sparse.csr_array(V), {"unstored": "zero"}))
            )
            for name, values in dense["posterior"].data_vars.items():
                np.testing.assert_array_equal(zeros["posterior"][name], values, err_msg=name)
            np.testing.assert_array_equal(zeros["sample_stats"]["lp"], dense["sample_stats"]["lp"])


def test_the_dispersion_is_found_and_intervals_hold_what_poissons_do_not() -> None:
    V = counts()
    held = np.random.default_rng(0).random(V.shape) < 0.2
    train = np.where(held, np.nan, V)
    inside = {}
    for model in (dfac.NegativeBinomialNMF(K), dfac.TweedieNMF(K, dispersion=1.0)):
        trace = dfac.sample(train, model, draws=200, tune=200, monitor="missing", **QUIET)
        found = dfac.monitored(trace, interval=0.9)
        covered = (V[held] >= found["lower"].values) & (V[held] <= found["upper"].values)
        inside[type(model).__name__] = float(covered.mean())
        if "dispersion" in trace["posterior"]:
            alpha = trace["posterior"]["dispersion"].values
            assert abs(alpha.mean() - ALPHA) < 5 * alpha.std()
            assert trace.attrs["dispersion"] == pytest.approx(alpha.mean(), rel=1e-6)
    assert inside["NegativeBinomialNMF"] > 0.88
    assert inside["TweedieNMF"] < 0.85


@pytest.mark.parametrize("method", [dfac.MultiplicativeUpdates(), dfac.DSGD()])
def test_point_estimates_find_a_dispersion(method: Any) -> None:
    point = dfac.optimize(counts(), dfac.NegativeBinomialNMF(K), method, **QUIET)
    assert 0.25 < point.attrs["dispersion"] < 0.75
    objective = point["objective"].values
    assert objective[-1] <= objective[len(objective) // 2]


def test_every_cell_of_a_sparse_matrix_counts_beforehand() -> None:
    V = sparse.random_array((2000, 1500), density=0.01, rng=np.random.default_rng(0))
    costs = [
        dfac.estimate_cost(V, model, unstored="zero")
        for model in (dfac.TweedieNMF(10), dfac.NegativeBinomialNMF(10))
    ]
    assert costs[1].flops > 5 * costs[0].flops
    assert costs[1].task > costs[0].task


def test_gibbs_says_why_not() -> None:
    with pytest.raises(ModelError, match=r"has a negative binomial law; use PSGLD\(\)"):
        dfac.sample(counts(), dfac.NegativeBinomialNMF(K), dfac.Gibbs(), **QUIET)
