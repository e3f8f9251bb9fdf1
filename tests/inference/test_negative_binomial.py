"""Overdispersed counts through the public verbs."""

import numpy as np
import pytest
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import ModelError
from tests.random_sparse import random_array

ALPHA, K = 0.5, 2
QUIET = {"random_seed": 1, "progressbar": False, "executor": "serial"}


def counts(rows=60, columns=50):
    rng = np.random.default_rng(4)
    mu = rng.gamma(1.0, 1.0, (rows, K)) @ rng.gamma(1.0, 1.5, (K, columns))
    return rng.poisson(mu * rng.gamma(1 / ALPHA, ALPHA, mu.shape)).astype(np.float32)


def uneven(rows=60, columns=50):
    """Counts of which every column has a dispersion of its own, and those."""
    rng = np.random.default_rng(0)
    alpha = np.exp(rng.normal(-1.0, 1.0, columns))
    mu = rng.gamma(1.0, 1.0, (rows, K)) @ rng.gamma(1.0, 1.5, (K, columns))
    return rng.poisson(mu * rng.gamma(1 / alpha, alpha, mu.shape)).astype(np.float32), alpha


def test_a_sparse_matrix_gives_the_bits_of_the_dense_one():
    """Rows are written out one by one; under beta=0.5 as well, whose zeros do not add up."""
    V = counts(20, 15)
    V[3, 4] = np.nan
    whole, rows = dfac.PSGLD(warm_start=3), dfac.BlockHMC(steps=2, warm_start=3)
    for model, sampler in (
        (dfac.NegativeBinomialNMF(K), rows),
        (dfac.NegativeBinomialNMF(K, dispersion="column"), rows),
        (dfac.NegativeBinomialNMF(K, dispersion="column"), whole),
        (dfac.TweedieNMF(K, beta=0.5, dispersion=1.0), whole),
    ):
        dense, zeros = (
            dfac.sample(own, model, sampler, draws=4, tune=10, blocks=2, **options, **QUIET)
            for own, options in ((V, {}), (sparse.csr_array(V), {"unstored": "zero"}))
        )
        for name, values in dense["posterior"].data_vars.items():
            np.testing.assert_array_equal(zeros["posterior"][name], values, err_msg=name)
        np.testing.assert_array_equal(zeros["sample_stats"]["lp"], dense["sample_stats"]["lp"])


def test_the_dispersion_is_found_and_intervals_hold_what_poissons_do_not():
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


BY_COLUMN = dfac.NegativeBinomialNMF(K, dispersion="column")


def test_every_column_has_its_dispersion_in_the_callers_order():
    V, alpha = uneven()
    V[:, 7] = 0.0
    V[0, 7] = 1.0
    order = np.argsort(-V.sum(axis=0))  # so that blocks are evened out
    data = dfac.as_blocks(sparse.csr_array(V[:, order]), 3, unstored="zero", balance=True)
    assert data.col_order is not None
    sampler = dfac.BlockHMC()
    trace = dfac.sample(data, BY_COLUMN, sampler, draws=150, tune=100, **QUIET)
    drawn = np.log(trace["posterior"]["dispersion"].values[0])
    assert trace["posterior"]["dispersion"].dims == ("chain", "draw", "column")
    z = (drawn.mean(axis=0) - np.log(alpha[order])) / drawn.std(axis=0)
    assert np.delete(z, np.argmax(order == 7)).std() < 1.4
    assert np.corrcoef(drawn.mean(axis=0), np.log(alpha[order]))[0, 1] > 0.8
    spread = drawn.std(axis=0)[np.argmax(order == 7)]  # one count says next to nothing
    assert spread > 1.5 * np.median(drawn.std(axis=0))
    means = trace["posterior_moments"]["dispersion_mean"].values[0]
    np.testing.assert_allclose(means, np.exp(drawn).mean(axis=0), rtol=1e-6)


def test_predictions_have_the_dispersion_of_their_column():
    V, _ = uneven(20, 12)
    cells = np.arange(12), np.arange(12)
    settings = {"draws": 20, "tune": 20, "monitor": cells, **QUIET}
    trace = dfac.sample(V, BY_COLUMN, **settings)
    drawn = trace["posterior"]
    mu = drawn["W"].values[0] @ drawn["H"].values[0]
    alpha = drawn["dispersion"].values[0].mean(axis=0)
    mean, var = mu.mean(axis=0), mu.var(axis=0)
    wanted = np.sqrt(mean + alpha * (mean**2 + var) + var)
    np.testing.assert_allclose(dfac.predict(trace)["sd"], wanted, rtol=1e-4)
    part = dfac.predict(trace, rows=[3, 1], columns=[5, 0, 2])["sd"]
    np.testing.assert_allclose(part, wanted[[3, 1]][:, [5, 0, 2]], rtol=1e-4)
    assert float(dfac.predict(trace, 3, 5)["sd"]) == pytest.approx(wanted[3, 5], rel=1e-4)
    np.testing.assert_allclose(dfac.predict(dfac.align(trace))["sd"], wanted, rtol=1e-4)
    own = dfac.monitored(trace)["sd"]
    np.testing.assert_allclose(own, wanted[cells], rtol=1e-3)
    moments = dfac.sample(V, BY_COLUMN, keep="moments", **settings)
    assert "posterior" not in moments.children or "dispersion" not in moments["posterior"]
    np.testing.assert_array_equal(dfac.monitored(moments)["sd"], own)


@pytest.mark.parametrize(
    "call",
    [
        lambda V: dfac.optimize(V, BY_COLUMN, **QUIET),
        lambda V: dfac.log_evidence(V, BY_COLUMN, **QUIET),
        lambda V: dfac.select_rank(V, BY_COLUMN, [1, 2], **QUIET),
        lambda V: dfac.sample(V, BY_COLUMN, dfac.PSGRRLD(), **QUIET),
    ],
    ids=["optimize", "log_evidence", "select_rank", "PSGRRLD"],
)
def test_what_takes_one_dispersion_says_so(call):
    with pytest.raises(ModelError, match=r'the model has one for every column; pass dispersion="a'):
        call(counts(8, 6))


def test_draws_of_dispersions_cost_passes_and_room():
    V, cost = np.ones((40, 30), np.float32), dfac.estimate_cost
    fixed, drawn, each = (
        cost(V, dfac.NegativeBinomialNMF(K, dispersion=own), draws=100, tune=100)
        for own in (1.0, "auto", "column")
    )
    assert drawn.flops == each.flops > 1.1 * fixed.flops
    assert each.result - drawn.result == 100 * 8 * 29  # thirty numbers in place of one


@pytest.mark.parametrize("method", [dfac.MultiplicativeUpdates(), dfac.DSGD()])
def test_point_estimates_find_a_dispersion(method):
    point = dfac.optimize(counts(), dfac.NegativeBinomialNMF(K), method, **QUIET)
    assert 0.25 < point.attrs["dispersion"] < 0.75
    objective = point["objective"].values
    assert objective[-1] <= objective[len(objective) // 2]


def test_every_cell_of_a_sparse_matrix_counts_beforehand():
    V = random_array((2000, 1500), density=0.01, rng=np.random.default_rng(0))
    costs = [
        dfac.estimate_cost(V, model, unstored="zero")
        for model in (dfac.TweedieNMF(10), dfac.NegativeBinomialNMF(10))
    ]
    assert costs[1].flops > 5 * costs[0].flops
    assert costs[1].task > costs[0].task


def test_gibbs_says_why_not():
    with pytest.raises(ModelError, match=r"has a negative binomial law; use PSGLD\(\)"):
        dfac.sample(counts(), dfac.NegativeBinomialNMF(K), dfac.Gibbs(), **QUIET)


def test_columns_without_any_count_have_dispersions():
    model = dfac.NegativeBinomialNMF(1, rate_w=1.0, rate_h=1.0, dispersion="column")
    trace = dfac.sample(np.zeros((3, 4)), model, draws=5, tune=5, random_seed=0, progressbar=False)
    assert np.isfinite(trace["posterior"]["dispersion"]).all()
    assert np.isfinite(trace["sample_stats"]["lp"]).all()
