"""Rates and shapes that are learnt: where their draws are, and what is refused."""

import re

import numpy as np
import pytest
import xarray as xr
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import DataWarning, ModelError, OptionError
from daskfactor.executors import SerialExecutor
from daskfactor.inference.sampling import NOT_STARTED, Run, run_spec
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.results.sink import Sink
from tests.inference.test_conformance import LEARNT, SHARED, WARM, counts
from tests.refusals import refused

SETTINGS = {"random_seed": 5, "progressbar": False, "executor": "serial", "blocks": 2}


def draw(model, sampler=None, V=None, **options):
    settings = {"draws": 6, "tune": 4, **SETTINGS, **options}
    return dfac.sample(
        counts() if V is None else V, model, sampler or dfac.Gibbs(**WARM), **settings
    )


def test_draws_have_the_dimensions_of_what_they_are_of():
    V = xr.DataArray(counts(), dims=("rate", "component_"))
    found = draw(LEARNT, V=V, chains=2)["posterior"]
    assert found["rate_w"].sizes == {"chain": 2, "draw": 6, "rate": 7}
    assert found["rate_h"].sizes == {"chain": 2, "draw": 6, "component": 2}
    assert found["shape_w"].sizes == {"chain": 2, "draw": 6}
    assert np.unique(found["rate_w"]).size == 2 * 6 * 7  # a draw for each
    V = xr.DataArray(counts(), coords={"rate": ("gene", np.arange(7))}, dims=("gene", "cell"))
    with pytest.warns(DataWarning, match="'rate' is 'rate_'"):
        shared = draw(SHARED, V=V)
    assert shared["posterior"]["rate"].dims == ("chain", "draw", "component")
    assert "rate_w" not in shared.attrs


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
    refused(OptionError, "kept moments only", dfac.align, tree)


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
        options = RunOptions(40, 10, 1, 1, 0, "moments", 0, "float32")
        chain = sampler.chain(Setting(data, model, sampler, options, SerialExecutor()), 0)
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
    ("settings", "sentence"),
    [
        ({"rate_w": "column"}, r'rate_w must be a .* or "auto" or "component" or "row", got'),
        ({"rate_h": "row"}, r'rate_h must be .* or "column", got'),
        ({"shape_w": "component"}, r'shape_w must be a positive number or "auto", got'),
        ({"shape_h": 0.0}, r"shape_h must be a positive, finite number, got 0"),
    ],
)
def test_other_words_are_refused(settings, sentence):
    refused(ModelError, sentence, dfac.TweedieNMF, 2, **settings)


@pytest.mark.parametrize("model", [LEARNT, SHARED])
def test_what_takes_settled_priors_says_so(model):
    V, names = counts(), " and ".join(own.name for own in model.learnt)
    for call in (
        lambda: dfac.sample(V, model, dfac.PSGRRLD(), **SETTINGS),
        lambda: dfac.optimize(V, model),
        lambda: dfac.log_evidence(V, model),
        lambda: dfac.stein_posterior(V, model),
    ):
        refused(ModelError, re.escape(f"this model learns {names}; pass numbers"), call)


def test_hmc_takes_no_shapes_that_are_learnt():
    with pytest.raises(ModelError, match=r'HMC\(\) takes shapes .* got "auto"; use BlockHMC'):
        dfac.sample(counts(), LEARNT, dfac.HMC(), **SETTINGS)
    assert (
        "shape_w"
        in dfac.sample(counts(), LEARNT, dfac.BlockHMC(steps=1, **WARM), 2, 2, **SETTINGS)[
            "posterior"
        ]
    )


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


@pytest.mark.parametrize("rank", [2, 5])
def test_the_number_of_components_is_found(rank):
    settings = {**SETTINGS, "draws": 60, "tune": 60}
    tree = dfac.sample(low_rank(rank), dfac.TweedieNMF("auto"), **settings)
    assert tree["posterior"].sizes["component"] == 23  # 3 √60
    found = tree["posterior"]["effective_components"].values
    assert abs(np.median(found) - rank) <= 1
    summary = dfac.summarize(tree)
    assert f"Components that the data support: {np.median(found):g}" in summary.verdict
    assert "effective_components" in summary["functional"]


def test_components_have_faded_where_a_chain_starts():
    tree = dfac.sample(low_rank(5), dfac.TweedieNMF("auto"), draws=2, tune=0, **SETTINGS)
    sums = (tree["posterior"][name].values[0, 0] for name in "WH")
    W, H = (own.sum(axis=axis) for own, axis in zip(sums, (0, 1), strict=True))
    assert abs(np.count_nonzero(1e-3 * (W @ H) < W * H) - 5) <= 1


def test_without_fading_there_are_more():
    """What finds the number is the rates: at fixed ones every component is in use."""
    settings = {**SETTINGS, "draws": 60, "tune": 60}
    tree = dfac.sample(low_rank(2), dfac.TweedieNMF(23, dispersion=1.0), **settings)
    sizes = (tree["posterior"]["W"].sum("row") * tree["posterior"]["H"].sum("column")).values[0, -1]
    assert np.count_nonzero(sizes > 0.1 * sizes.mean()) > 10


def test_the_number_of_components_is_told_of_real_valued_factors():
    rng = np.random.default_rng(1)
    V = rng.normal(size=(60, 2)) @ rng.normal(size=(2, 50)) + 0.3 * rng.normal(size=(60, 50))
    settings = {**SETTINGS, "draws": 60, "tune": 200}
    tree = dfac.sample(V, dfac.GaussianMF(8), dfac.Gibbs(), **settings)
    assert np.median(tree["posterior"]["effective_components"]) == 2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rate_w": 1.0}, r'n_components="auto" gives .* got rate_w=1.0 and rate_h=.auto.; leave'),
        ({"rate_h": "column"}, r'n_components="auto" gives every component one rate in W and H'),
        ({"fixed_w": np.ones((7, 1))}, r'n_components="auto" does not go with fixed_w'),
    ],
)
def test_what_does_not_go_with_a_number_to_be_found(settings, sentence):
    refused(ModelError, sentence, dfac.TweedieNMF, "auto", **settings)


def test_the_cost_of_a_number_to_be_found_is_that_of_the_first_one():
    V = counts()
    assert dfac.estimate_cost(V, dfac.TweedieNMF("auto")).factors == (
        dfac.estimate_cost(V, dfac.TweedieNMF(6)).factors
    )


def test_chains_have_one_dispersion():
    """And one chain has the one that it had alone."""
    rng = np.random.default_rng(3)
    V = rng.gamma(2.0, rng.gamma(1, 1, (12, 2)) @ rng.gamma(1, 1, (2, 9)))
    options = RunOptions(10, 20, 2, 1, 0, "moments", 0, "float32")
    model, sampler = dfac.TweedieNMF(2, beta=0.0), dfac.PSGLD(**WARM)
    with dfac.as_blocks(V, 2) as data:
        setting = Setting(data, model, sampler, options, SerialExecutor())
        run = Run(setting, Sink(run_spec(setting, False)), lambda event: None)
        run.restore({}, NOT_STARTED)
        run.go()
        phi = {chain.hyper.dispersion for chain in run.chains}
        assert len(phi) == 1
        for chain in run.chains:
            band = chain.tracks[0].state.factors[0][0]
            assert np.isfinite(band.arrays["metric"]).all()
        assert run.attrs()["dispersion"] in phi
