"""Rates, shapes, dispersions and the number of components that are learnt."""

import re

import numpy as np
import pytest
import xarray as xr
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import DaskfactorWarning, DataWarning, ModelError, OptionError
from daskfactor.executors import SerialExecutor
from daskfactor.inference.parameters import Parameter
from daskfactor.inference.sampling import NOT_STARTED, ChainsRun, run_spec
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.models.settings import FactorModel, Learnt
from daskfactor.runs.run_writer import Sink
from tests.inference.gaussian_reference import chain_of
from tests.inference.test_conformance import LEARNT, SHARED, WARM, counts
from tests.random_sparse import random_array
from tests.refusals import refused
from tests.tiers import tiered

SETTINGS = {"random_seed": 5, "progressbar": False, "executor": "serial", "blocks": 2}
ALPHA, K = 0.5, 2
BY_COLUMN = dfac.NegativeBinomialNMF(K, dispersion="column")
QUIETLY = {"random_seed": 1, "progressbar": False, "executor": "serial"}


def draw(model, sampler=None, V=None, **options):
    settings = {"draws": 6, "tune": 4, **SETTINGS, **options}
    V = counts() if V is None else V
    return dfac.sample(V, model, sampler or dfac.Gibbs(**WARM), **settings)


def test_draws_have_the_dimensions_of_what_they_are_of():
    V = xr.DataArray(counts(), dims=("gene", "cell"))
    found = draw(LEARNT, V=V, chains=2)["posterior"]
    assert found["rate_w"].sizes == {"chain": 2, "draw": 6, "gene": 7}
    assert found["rate_h"].sizes == {"chain": 2, "draw": 6, "component": 2}
    assert found["shape_w"].sizes == {"chain": 2, "draw": 6}
    assert np.unique(found["rate_w"]).size == 2 * 6 * 7  # a draw for each
    V = xr.DataArray(counts(), coords={"rate": ("gene", np.arange(7))}, dims=("gene", "cell"))
    with pytest.warns(DataWarning, match="the coordinate 'rate' is left out"):
        shared = draw(SHARED, V=V)
    assert shared["posterior"]["rate"].dims == ("chain", "draw", "component")
    assert "rate_w" not in shared.attrs


def test_several_chains_share_rates_where_the_dispersion_is_estimated():
    """Those after the first know that the counts are no Poisson counts, and not yet how far."""
    V = np.random.default_rng(0).negative_binomial(1, 0.1, (30, 11)).astype(float)
    model = dfac.TweedieNMF(2, rate_w="component", rate_h="component")
    with pytest.warns(DaskfactorWarning):
        found = draw(model, dfac.PSGLD(), V, chains=2)
    assert found.attrs["dispersion"] > 1.0


def test_rows_have_their_rates_in_the_callers_order():
    """A row of large counts has a small rate, wherever the grid puts it."""
    V = np.full((8, 6), 2.0)
    V[2] = 60.0
    V[[0, 1, 5, 6], 1:] = 0.0  # not stored, so that rows are moved to even the blocks out
    for balance in (False, True):
        data = dfac.as_blocks(sparse.csr_array(V), 2, unstored="missing", balance=balance)
        assert not balance or (data.row_order is not None and data.row_order[2] != 2)
        model = dfac.TweedieNMF(1, dispersion=1.0, rate_w="row")
        rates = draw(model, V=data, draws=60, blocks=None)["posterior"]["rate_w"]
        assert np.argmin(rates.values.mean(axis=(0, 1))) == 2


def test_moments_alone_come_with_the_rates_of_components():
    tree = draw(LEARNT, keep="moments")
    assert set(tree["posterior"].data_vars) == {"rate_h", "shape_w"}
    assert "lp" in str(dfac.summarize(tree)["functional"].values)
    refused(OptionError, "stored only moments", dfac.align, tree)


def test_room_for_draws_counts_the_rates_of_rows(monkeypatch):
    """A draw is 13 rows of two entries in single precision, and seven rates in double."""
    factors, model = (7 + 6) * 2 * 4, dfac.TweedieNMF(2, dispersion=1.0, rate_w="row")
    for each, kept in ((factors, 3), (factors + 7 * 8, 6)):
        monkeypatch.setattr("daskfactor.inference.setting.DRAWS_BUDGET", 6 * each)
        assert draw(model, keep="auto")["posterior"].sizes["draw"] == kept


def test_aligned_components_keep_their_rates():
    tree = draw(SHARED, draws=20)
    posterior = tree["posterior"].to_dataset()
    turned = posterior.isel(component=[1, 0]).assign_coords(component=posterior["component"])
    tree["posterior"] = xr.DataTree(xr.concat([posterior, turned], "draw"))
    tree["posterior"] = xr.DataTree(tree["posterior"].to_dataset().assign_coords(draw=range(40)))
    aligned = dfac.align(xr.DataTree.from_dict({"posterior": tree["posterior"].to_dataset()}))
    order = aligned["alignment"]["permutation"].values
    assert np.unique(order[0], axis=0).shape == (2, 2)
    drawn = np.take_along_axis(tree["posterior"]["rate"].values, order, -1)
    np.testing.assert_array_equal(aligned["posterior"]["rate"], drawn)


@pytest.mark.parametrize("model", [LEARNT, SHARED])
def test_the_metric_follows_the_rates(model):
    sampler = dfac.PSGLD(**WARM)
    with dfac.as_blocks(counts(), 2) as data:
        chain = chain_of(data, model, sampler, tune=10, draws=40)
        chain.start()
        for end in chain.setting.ends:
            chain.advance(end)
            state = chain.tracks[0].state
            for factor, bands in enumerate(state.factors):
                for band in bands:
                    rate = band.arrays.get("rate", chain.hyper.prior(factor)[0])
                    wanted = band.arrays["curvature"] + np.asarray(rate, np.float32)
                    np.testing.assert_allclose(band.arrays["metric"], wanted, rtol=1e-6)
            chain.forget()


@pytest.mark.parametrize(
    ("components", "settings", "sentence"),
    [
        (2, {"rate_w": "column"}, r'rate_w must be a .* or "auto" or "component" or "row", got'),
        (2, {"rate_h": "row"}, r'rate_h must be .* or "column", got'),
        (2, {"shape_w": "component"}, r'shape_w must be a positive, finite number or "auto", got'),
        (2, {"shape_h": 0.0}, r'shape_h must be a positive, finite number or "auto", got 0'),
        (
            *("auto", {"rate_w": 1.0}),
            r'n_components="auto" gives .* got rate_w=1.0 and rate_h=.auto.; leave',
        ),
        (
            *("auto", {"rate_h": "column"}),
            r'n_components="auto" gives every component one rate in W and H',
        ),
        (
            "auto",
            {"fixed_w": np.ones((7, 1))},
            r'n_components="auto" .* leave .* fixed_w and fixed',
        ),
    ],
)
def test_other_words_are_refused(components, settings, sentence):
    refused(ModelError, sentence, dfac.TweedieNMF, components, **settings)


@pytest.mark.parametrize("model", [LEARNT, SHARED])
def test_what_takes_settled_priors_says_so(model):
    V, names = counts(), " and ".join(own.name for own in model.learnt)
    words = re.escape(f"this model learns {names}; pass numbers")
    refused(ModelError, words, dfac.sample, V, model, dfac.PSGRRLD(), **SETTINGS)
    for call in (dfac.optimize, dfac.log_evidence, dfac.stein_posterior):
        refused(ModelError, words, call, V, model)


def low_rank(rank, shape=(80, 60)):
    rng = np.random.default_rng(rank)
    mu = rng.gamma(0.5, 1, (shape[0], rank)) @ rng.gamma(0.5, 1, (rank, shape[1]))
    return rng.poisson(20 * mu / mu.mean()).astype(np.float32)


def test_few_counts_do_not_make_components_fade_that_they_support():
    """Mean 1, six counts for each entry: the mode of the posterior alone has four components."""
    rng = np.random.default_rng([0, 10])
    mu = rng.gamma(0.5, 1.0, (200, 10)) @ rng.gamma(0.5, 1.0, (10, 150))
    V = rng.poisson(mu / mu.mean()).astype(np.float32)
    settings = {**SETTINGS, "draws": 40, "tune": 60, "blocks": 1}
    tree = dfac.sample(V, dfac.TweedieNMF("auto", dispersion=1.0), **settings)
    assert 9 <= np.median(tree["posterior"]["effective_components"]) <= 11


@pytest.mark.parametrize("rank", tiered([2, 5], lambda rank: rank == 5))
def test_the_number_of_components_is_found(rank):
    settings = {**SETTINGS, "draws": 60, "tune": 60}
    tree = dfac.sample(low_rank(rank), dfac.TweedieNMF("auto"), draws=2, tune=0, **SETTINGS)
    sums = (tree["posterior"][name].values[0, 0] for name in "WH")
    W, H = (own.sum(axis=axis) for own, axis in zip(sums, (0, 1), strict=True))
    assert abs(np.count_nonzero(1e-3 * (W @ H) < W * H) - rank) <= 1  # where the chain starts
    tree = dfac.sample(low_rank(rank), dfac.TweedieNMF("auto"), **settings)
    assert tree["posterior"].sizes["component"] == 23  # 3 √60
    found = tree["posterior"]["effective_components"].values
    assert abs(np.median(found) - rank) <= 1
    # At fixed rates every component is in use.
    fixed = dfac.sample(low_rank(rank), dfac.TweedieNMF(23, dispersion=1.0), **settings)
    sizes = (fixed["posterior"]["W"].sum("row") * fixed["posterior"]["H"].sum("column"))[0, -1]
    assert np.count_nonzero(sizes > 0.1 * sizes.mean()) > 10
    summary = dfac.summarize(tree)
    assert f"Number of components that the data support: {np.median(found):g}" in summary.verdict
    assert "effective_components" in summary["functional"]


def test_the_number_of_components_is_told_of_real_valued_factors():
    rng = np.random.default_rng(1)
    V = rng.normal(size=(60, 2)) @ rng.normal(size=(2, 50)) + 0.3 * rng.normal(size=(60, 50))
    settings = {**SETTINGS, "draws": 60, "tune": 200}
    tree = dfac.sample(V, dfac.GaussianMF(8), dfac.Gibbs(), **settings)
    assert np.median(tree["posterior"]["effective_components"]) == 2


def test_chains_have_one_dispersion():
    """And one chain has the one that it had alone."""
    rng = np.random.default_rng(3)
    V = rng.gamma(2.0, rng.gamma(1, 1, (12, 2)) @ rng.gamma(1, 1, (2, 9)))
    options = RunOptions(10, 20, 2, 1, 0, "moments", 0, "float32")
    model, sampler = dfac.TweedieNMF(2, beta=0.0), dfac.PSGLD(**WARM)
    with dfac.as_blocks(V, 2) as data:
        setting = Setting(data, model, sampler.kernel(model, data), options, SerialExecutor())
        run = ChainsRun(setting, Sink(run_spec(setting, False)), lambda event: None)
        run.restore({}, NOT_STARTED)
        run.go()
        phi = {chain.hyper.dispersion for chain in run.chains}
        assert len(phi) == 1
        for chain in run.chains:
            band = chain.tracks[0].state.factors[0][0]
            assert np.isfinite(band.arrays["metric"]).all()
        assert run.attrs()["dispersion"] in phi


def overdispersed(rows=60, columns=50):
    rng = np.random.default_rng(4)
    mu = rng.gamma(1.0, 1.0, (rows, K)) @ rng.gamma(1.0, 1.5, (K, columns))
    return rng.poisson(mu * rng.gamma(1 / ALPHA, ALPHA, mu.shape)).astype(np.float32)


def uneven(rows=60, columns=50):
    """Counts of which every column has a dispersion of its own, and those."""
    rng = np.random.default_rng(0)
    alpha = np.exp(rng.normal(-1.0, 1.0, columns))
    mu = rng.gamma(1.0, 1.0, (rows, K)) @ rng.gamma(1.0, 1.5, (K, columns))
    return rng.poisson(mu * rng.gamma(1 / alpha, alpha, mu.shape)).astype(np.float32), alpha


@pytest.mark.full
def test_a_sparse_matrix_gives_the_bits_of_the_dense_one():
    """Rows are written out one by one; under beta=0.5 as well, whose zeros do not add up."""
    V = overdispersed(20, 15)
    V[3, 4] = np.nan
    whole, rows = dfac.PSGLD(warm_start=3), dfac.BlockHMC(steps=2, warm_start=3)
    for model, sampler in (
        (dfac.NegativeBinomialNMF(K), rows),
        (dfac.NegativeBinomialNMF(K, dispersion="column"), rows),
        (dfac.NegativeBinomialNMF(K, dispersion="column"), whole),
        (dfac.TweedieNMF(K, beta=0.5, dispersion=1.0), whole),
    ):
        dense, zeros = (
            dfac.sample(own, model, sampler, draws=4, tune=10, blocks=2, **options, **QUIETLY)
            for own, options in ((V, {}), (sparse.csr_array(V), {"unstored": "zero"}))
        )
        for name, values in dense["posterior"].data_vars.items():
            np.testing.assert_array_equal(zeros["posterior"][name], values, err_msg=name)
        np.testing.assert_array_equal(zeros["sample_stats"]["lp"], dense["sample_stats"]["lp"])


@pytest.mark.full
def test_the_dispersion_is_found_and_intervals_hold_what_poissons_do_not():
    V = overdispersed()
    held = np.random.default_rng(0).random(V.shape) < 0.2
    train = np.where(held, np.nan, V)
    inside = {}
    for model in (dfac.NegativeBinomialNMF(K), dfac.TweedieNMF(K, dispersion=1.0)):
        trace = dfac.sample(train, model, draws=200, tune=200, monitor="missing", **QUIETLY)
        found = dfac.monitored(trace, interval=0.9)
        covered = (V[held] >= found["lower"].values) & (V[held] <= found["upper"].values)
        inside[type(model).__name__] = float(covered.mean())
        if "dispersion" in trace["posterior"]:
            alpha = trace["posterior"]["dispersion"].values
            assert abs(alpha.mean() - ALPHA) < 5 * alpha.std()
            assert trace.attrs["dispersion"] == pytest.approx(alpha.mean(), rel=1e-6)
    assert inside["NegativeBinomialNMF"] > 0.88
    assert inside["TweedieNMF"] < 0.85


def test_every_column_has_its_dispersion_in_the_callers_order():
    V, alpha = uneven()
    V[:, 7] = 0.0
    V[0, 7] = 1.0
    order = np.argsort(-V.sum(axis=0))  # so that blocks are evened out
    data = dfac.as_blocks(sparse.csr_array(V[:, order]), 3, unstored="zero", balance=True)
    assert data.col_order is not None
    sampler = dfac.BlockHMC()
    trace = dfac.sample(data, BY_COLUMN, sampler, draws=150, tune=100, **QUIETLY)
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
    settings = {"draws": 20, "tune": 20, "monitor": cells, **QUIETLY}
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


def test_what_takes_one_dispersion_or_poisson_counts_says_so():
    V, words = overdispersed(8, 6), r'the model has one for every column; pass dispersion="a'
    others = (dfac.select_rank, [1, 2]), (dfac.sample, dfac.PSGRRLD())
    for call, *given in ((dfac.optimize,), (dfac.log_evidence,), *others):
        refused(ModelError, words, call, V, BY_COLUMN, *given, **QUIETLY)
    words = r"has a negative binomial law; use PSGLD\(\)"
    refused(ModelError, words, dfac.sample, V, dfac.NegativeBinomialNMF(K), dfac.Gibbs(), **QUIETLY)


def test_draws_of_dispersions_cost_passes_and_room():
    V, cost = np.ones((40, 30), np.float32), dfac.estimate_cost
    fixed, drawn, each = (
        cost(V, dfac.NegativeBinomialNMF(K, dispersion=own), draws=100, tune=100)
        for own in (1.0, "auto", "column")
    )
    assert drawn.flops == each.flops > 1.1 * fixed.flops
    assert each.result - drawn.result == 100 * 8 * 29  # thirty numbers in place of one
    # Every cell of a sparse matrix counts.
    V = random_array((2000, 1500), density=0.01, rng=np.random.default_rng(0))
    models = dfac.TweedieNMF(10), dfac.NegativeBinomialNMF(10)
    poisson, wide = (cost(V, model, unstored="zero") for model in models)
    assert wide.flops > 5 * poisson.flops
    assert wide.task > poisson.task


@pytest.mark.parametrize("method", [dfac.MultiplicativeUpdates(), dfac.DSGD()])
def test_point_estimates_find_a_dispersion(method):
    point = dfac.optimize(overdispersed(), dfac.NegativeBinomialNMF(K), method, **QUIETLY)
    assert 0.25 < point.attrs["dispersion"] < 0.75
    objective = point["objective"].values  # of other dispersions before it is settled
    assert objective[-1] <= objective[3 * len(objective) // 4]


def test_columns_without_any_count_have_dispersions():
    model = dfac.NegativeBinomialNMF(1, rate_w=1.0, rate_h=1.0, dispersion="column")
    trace = dfac.sample(np.zeros((3, 4)), model, draws=5, tune=5, random_seed=0, progressbar=False)
    assert np.isfinite(trace["posterior"]["dispersion"]).all()
    assert np.isfinite(trace["sample_stats"]["lp"]).all()


class Number(Parameter):
    """A number of which the data say nothing, with the prior Exponential(1)."""

    learnt = (Learnt("number", (), "a number"),)

    @classmethod
    def from_prior(cls, rng, model, values):
        return {"number": rng.exponential()}

    def initial(self, values):
        return {"number": 1.0}

    def update(self, view, values):
        return self.from_prior(view.rng, self.model, values)

    def log_prior(self, state, values):
        return -values["number"]


@pytest.mark.parametrize("model", [dfac.TweedieNMF(2, dispersion=1.0), dfac.GaussianMF(2)])
def test_a_model_learns_what_its_classes_of_parameters_declare(model, monkeypatch):
    V = np.random.default_rng(0).poisson(2.0, (8, 6)).astype(float)
    monkeypatch.setattr(FactorModel, "parameter_classes", [Number])
    run = {"draws": 30, "tune": 20, "random_seed": 0, "progressbar": False}
    numbers = dfac.sample(V, model, **run)["posterior"]["number"].values[0]
    assert len(set(numbers)) >= 3  # some samplers draw every tenth cycle
    assert (numbers > 0).all()
    drawn = model.draw_prior(np.random.default_rng(0), (3, 2), 1.0, 1.0)
    assert drawn.learnt["number"] > 0
