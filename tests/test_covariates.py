"""Covariates through whole runs: rows without data, permuted data, many covariates, readers."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy import sparse, stats

import daskfactor as dfac
from daskfactor.errors import DataError, DataWarning, ModelError, OptionError
from daskfactor.models import covariates as module
from tests.refusals import refused

QUICK = {"draws": 6, "tune": 24, "random_seed": 3, "progressbar": False}
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 3)), RNG.normal(size=(30, 2))
LINK, OTHER = RNG.normal(size=(3, 3)), RNG.normal(size=(2, 2))
W = X @ LINK + 0.3 * RNG.normal(size=(40, 3))
H = np.c_[Y @ OTHER + 0.3 * RNG.normal(size=(30, 2)), np.ones(30)]
TRUTH = 2 + W @ H.T
SEEN = RNG.random(TRUTH.shape) < 0.5
SEEN[:, -1] = SEEN[0] = True
SEEN[-6:] = SEEN[:, :3] = False
V = np.where(SEEN, TRUTH + 0.3 * RNG.normal(size=TRUTH.shape), np.nan)
MODEL = dfac.GaussianMF(2, covariates_w=X, covariates_h=Y)
# The same of counts: covariates change prior means by factors.
MEANS = np.exp(X @ [[1.0, -0.5], [0.3, 0.8], [-0.4, 0.2]]) * RNG.gamma(3.0, 1.0, (40, 2))
MEANS = MEANS @ (np.exp(Y @ [[0.5, -0.8], [0.6, 0.3]]) * RNG.gamma(3.0, 1.0, (30, 2))).T
COUNTS = np.where(SEEN, RNG.poisson(MEANS), np.nan)
RATES = dfac.TweedieNMF(2, dispersion=1.0, covariates_w=X, covariates_h=Y)


def error(trace, rows, columns, truth=TRUTH):
    """Root mean square of the posterior mean's error."""
    found = dfac.predict(trace, rows=rows, columns=columns)["mean"].values
    return float(np.sqrt(np.mean((found - truth[rows][:, columns]) ** 2)))


@pytest.mark.parametrize("sampler", [dfac.SGHMC(), dfac.Gibbs()], ids=lambda own: own.name)
def test_rows_and_columns_without_data_are_predicted_from_their_covariates(sampler):
    settings = QUICK | {"draws": 150, "tune": 150}
    with_them = dfac.sample(V, MODEL, sampler, **settings)
    with dfac.as_blocks(V, allow_empty=True) as data:
        without = dfac.sample(data, dfac.GaussianMF(2), sampler, **settings)
    spread, cold, warm = TRUTH.std(), slice(-6, None), slice(3, None)
    assert error(with_them, cold, warm) < 0.35 * spread
    assert error(with_them, slice(0, -6), slice(0, 3)) < 0.35 * spread
    assert error(without, cold, warm) > 0.7 * spread
    cells = dfac.predict(with_them, rows=cold)
    inside = (cells["lower"] < TRUTH[cold]) & (TRUTH[cold] < cells["upper"])
    assert 0.75 < float(inside.mean()) < 1.0


OF_COUNTS = {own.name: (dfac.TweedieNMF, own) for own in (dfac.Gibbs(), dfac.PSGLD(), dfac.SGHMC())}
OF_COUNTS |= {"negative binomial": (dfac.NegativeBinomialNMF, dfac.PSGLD())}


@pytest.mark.parametrize("kind", OF_COUNTS)
def test_so_are_counts(kind):
    model, sampler = OF_COUNTS[kind]
    settings = QUICK | {"draws": 150, "tune": 300}
    options = {"dispersion": 0.05 if model is dfac.NegativeBinomialNMF else 1.0}
    linked = model(2, covariates_w=X, covariates_h=Y, **options)
    with_them = dfac.sample(COUNTS, linked, sampler, **settings)
    with dfac.as_blocks(COUNTS, allow_empty=True) as data:
        without = dfac.sample(data, model(2, **options), sampler, **settings)
    cold, warm = slice(-6, None), slice(3, None)
    for rows, columns in ((cold, warm), (slice(0, -6), slice(0, 3))):
        errors = [error(own, rows, columns, MEANS) for own in (with_them, without)]
        assert errors[0] < 0.8 * errors[1]
    drawn = RNG.poisson(MEANS)
    cells = dfac.predict(with_them, rows=cold, of="observation")
    inside = (cells["lower"] <= drawn[cold]) & (drawn[cold] <= cells["upper"])
    assert 0.75 < float(inside.mean()) <= 1.0


def test_links_are_in_the_results_under_their_labels(tmp_path):
    named = xr.DataArray(X, {"trait": ["age", "income", "size"]}, ("person", "trait"))
    model = dfac.GaussianMF(2, covariates_w=named, covariates_h=Y)
    trace = dfac.sample(V, model, store=tmp_path / "run.zarr", **QUICK)
    draws, means = trace["posterior"], trace["posterior_moments"]
    assert draws["link_w"].dims == ("chain", "draw", "row_feature", "component")
    assert draws["row_feature"].values.tolist() == ["age", "income", "size"]
    assert draws["link_h"].sizes == {"chain": 1, "draw": 6, "column_feature": 2, "component": 4}
    np.testing.assert_allclose(means["link_w_mean"], draws["link_w"].mean("draw"), rtol=1e-5)
    assert (draws["link_w"].values[..., :3] != 0).all()
    np.testing.assert_array_equal(draws["link_w"].sel(component=3), 0)
    moments = dfac.sample(V, model, **QUICK, keep="moments")
    xr.testing.assert_equal(moments["posterior_moments"].to_dataset(), means.to_dataset().compute())
    assert (draws["link_precision_w"] > 0).all()


def is_refused(data, covariates, message):
    model = dfac.GaussianMF(2, covariates_w=covariates)
    refused(ModelError, message, dfac.sample, data, model, **QUICK)


def test_covariates_are_found_by_the_labels_of_the_data(tmp_path):
    people, days = [f"p{i}" for i in range(40)], np.arange("2020-01", "2022-07", dtype="M8[M]")
    data = xr.DataArray(V, {"person": people, "day": days.astype("M8[ns]")}, ("person", "day"))
    more = pd.DataFrame(np.r_[X, X[:5] + 1], index=[*people, *"abcde"])[::-1]
    turned = xr.DataArray(Y, {"day": days.astype("M8[s]")}, ("day", "trait"))[::-1]
    model = dfac.GaussianMF(2, covariates_w=more, covariates_h=turned)
    known = dfac.sample(data, MODEL, **QUICK)
    short = QUICK | {"draws": 2}
    dfac.sample(data, model, store=tmp_path / "run.zarr", **short)
    found = dfac.resume(tmp_path / "run.zarr", 4, progressbar=False)
    for name in ("W", "H", "link_w", "link_h"):
        np.testing.assert_array_equal(found["posterior"][name], known["posterior"][name])
    for count in (2, "auto"):
        rates = dfac.TweedieNMF(count, covariates_w=more).sized(V.shape, (np.array(people), None))
        assert rates.covariates_w == RATES.covariates_w
    by_position = dfac.sample(V, dfac.GaussianMF(2, covariates_w=pd.DataFrame(X)), **QUICK)
    again = dfac.sample(data, dfac.GaussianMF(2, covariates_w=pd.DataFrame(X)), **QUICK)
    np.testing.assert_array_equal(again["posterior"]["W"], by_position["posterior"]["W"])
    match = r"covariates_w lacks 1 of the data's 40 rows, the first of them 'p7'"
    is_refused(data, more.drop("p7"), match)
    is_refused(data, pd.concat([more, more[-2:]]), r"more than one row labelled 'p1'")


def test_covariates_of_stacked_dimensions_are_found_by_the_labels_of_each():
    places = pd.MultiIndex.from_product([range(8), list("abcde")], names=["depth", "site"])
    sites = {"site": list("abcde")}
    maps = xr.DataArray(V.reshape(8, 5, 30), sites, ("depth", "site", "day"))
    with pytest.warns(DataWarning, match="6 of 40 places"):  # those without data are no rows
        data = dfac.as_blocks(maps, rows=["depth", "site"], allow_empty=True)
    known = data.labels.keys[0]
    frame = pd.DataFrame(X, index=places)
    depths = sites | {"depth": range(8)}
    stacked = xr.DataArray(X.reshape(8, 5, 3), depths, ("depth", "site", "trait"))
    stacked = stacked.stack(place=("site", "depth")).T
    of = zip(known["depth"], known["site"], strict=True)
    wanted = X[[list(places).index(place) for place in of]]
    for given in (frame[::-1], stacked):
        model = dfac.GaussianMF(2, covariates_w=given).sized(data.shape, data.labels.keys)
        np.testing.assert_array_equal(model.covariates_w.values, wanted)
    is_refused(data, frame[1:], "lacks 1 of the data's 34 rows, the first of them depth 0, site a")
    others = frame.set_axis([f"p{i}" for i in range(40)])
    is_refused(data, others, "lacks 34 of .* begin with 'p0'")


@pytest.mark.parametrize("sampler", [dfac.SGHMC(), dfac.Gibbs()], ids=lambda own: own.name)
def test_lp_counts_factors_around_what_covariates_predict(sampler):
    model = dfac.GaussianMF(2, covariates_w=X, covariates_h=Y, biases=False)
    trace = dfac.sample(V, model, sampler, **QUICK, blocks=2)
    draw = trace["posterior"].isel(chain=0, draw=-1)
    W, H = draw["W"].values.astype(float), draw["H"].values.T.astype(float)
    wanted = stats.norm(W @ H.T, np.sqrt(draw["noise"].item())).logpdf(V)[SEEN].sum()
    for factor, covariates, side in ((W, X, "w"), (H, Y, "h")):
        spread = 1 / np.sqrt(draw[f"precision_{side}"].values[:2])
        centre = covariates @ draw[f"link_{side}"].values[:, :2]
        wanted += stats.norm(centre, spread).logpdf(factor[:, :2]).sum()
    assert trace["sample_stats"]["lp"].values[0, -1] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("sampler", [dfac.PSGLD(), dfac.Gibbs()], ids=lambda own: own.name)
def test_lp_counts_rates_links_and_their_priors(sampler):
    fixed = {"dispersion": 1.0, "rate_h": 0.4, "shape_w": 1.5}
    model = dfac.TweedieNMF(2, covariates_w=X, covariates_h=Y, **fixed)
    trace = dfac.sample(COUNTS, model, sampler, **QUICK, blocks=2)
    draw = trace["posterior"].isel(chain=0, draw=-1)
    W, H = draw["W"].values.astype(float), draw["H"].values.T.astype(float)
    wanted = stats.poisson(W @ H.T).logpmf(np.nan_to_num(COUNTS))[SEEN].sum()
    prior = model.hyperpriors(np.nanmean(COUNTS), (1.5, 1.0))[0]
    assert prior is not None
    wanted += stats.gamma(prior.shape, scale=1 / prior.rate).logpdf(draw["rate_w"]).sum()
    sides = (W, X, "w", draw["rate_w"].values, 1.5), (H, Y, "h", 0.4, 1.0)
    for factor, own, side, rate, shape in sides:
        link, precision = draw[f"link_{side}"].values, draw[f"link_precision_{side}"].item()
        wanted += stats.gamma(shape, scale=np.exp(own @ link) / rate).logpdf(factor).sum()
        wanted += stats.norm(0, precision**-0.5).logpdf(link).sum()
        wanted += stats.expon(scale=np.mean(np.sum(own**2, axis=1))).logpdf(precision)
    assert trace["sample_stats"]["lp"].values[0, -1] == pytest.approx(wanted, rel=1e-5)


def test_components_that_are_frozen_have_no_link():
    known = RNG.gamma(2.0, 1.0, (40, 2))
    known[:, 1] = np.nan
    model = dfac.TweedieNMF(2, dispersion=1.0, fixed_w=known, covariates_w=X, shape_w="auto")
    draws = dfac.sample(COUNTS[:, 3:], model, dfac.Gibbs(), **QUICK)["posterior"]
    frozen, free = (draws["link_w"].values[..., k] for k in (0, 1))
    assert not frozen.any()
    assert free.all()
    np.testing.assert_allclose(draws["W"].values[0, -1, :, 0], known[:, 0], rtol=1e-6)
    assert np.unique(draws["W"].values[0, :, -1, 1]).size == 6


def test_both_factors_may_share_the_rates_that_covariates_change():
    both = {"rate_w": "component", "rate_h": "component"}
    model = dfac.TweedieNMF(2, dispersion=1.0, covariates_w=X, **both)
    draws = dfac.sample(COUNTS[:, 3:], model, dfac.Gibbs(), **QUICK)["posterior"]
    assert {"rate", "effective_components", "link_w", "link_precision_w"} <= set(draws.data_vars)


@pytest.mark.parametrize(
    ("V", "model", "truth"), [(V, MODEL, TRUTH), (COUNTS, RATES, MEANS)], ids=("normal", "counts")
)
def test_the_order_of_the_data_is_that_of_the_caller(V, model, truth):
    """Balanced sparse data are in an order of their own; covariates and links are not."""
    rows, cols = np.nonzero(SEEN)
    table = sparse.coo_array((V[SEEN], (rows, cols)), V.shape)
    options = {"unstored": "missing", "allow_empty": True}
    found = []
    for balance in (False, True):
        with dfac.as_blocks(table, 3, balance=balance, **options) as data:
            assert (data.row_order is not None) == balance
            trace = dfac.sample(data, model, dfac.Gibbs(), **QUICK | {"draws": 200, "tune": 50})
            found.append(error(trace, slice(-6, None), slice(3, None), truth))
    assert max(found) < (0.35 if model is MODEL else 0.8) * truth.std()


def test_many_covariates_are_solved_for_and_a_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_DIRECT", 1)
    one = np.zeros((40, 5))
    one[np.arange(40), np.arange(40) % 5] = 1
    model = dfac.GaussianMF(2, covariates_w=sparse.csr_array(one), covariates_h=Y)
    whole = dfac.sample(V, model, **QUICK | {"draws": 17}, executor="serial")
    path = tmp_path / "run.zarr"
    dfac.sample(V, model, **QUICK, store=path)
    tree = dfac.resume(path, draws=11, progressbar=False)
    for group in ("posterior", "posterior_moments"):
        xr.testing.assert_equal(whole[group].to_dataset(), tree[group].to_dataset().compute())


def test_an_alignment_takes_links_along():
    trace = dfac.sample(V, MODEL, dfac.Gibbs(), **QUICK, chains=2)
    aligned = dfac.align(trace)
    found = aligned["alignment"]
    order, factor = found["permutation"].values[:, :, None], found["factor"].values[:, :, None]
    assert (factor[..., :2] != 1).all()
    for name, scale in (("link_w", factor), ("link_h", 1 / factor)):
        moved = np.take_along_axis(trace["posterior"][name].values, order, -1) * scale
        np.testing.assert_allclose(aligned["posterior"][name].values, moved, rtol=1e-5)
    trace = dfac.sample(COUNTS, RATES, dfac.Gibbs(), **QUICK, chains=2)
    aligned = dfac.align(trace)
    order = aligned["alignment"]["permutation"].values[:, :, None]
    for name in ("link_w", "link_h"):  # of logarithms: no scale
        moved = np.take_along_axis(trace["posterior"][name].values, order, -1)
        np.testing.assert_array_equal(aligned["posterior"][name].values, moved)


def test_what_is_not_for_covariates_or_for_these_alone_says_so(tmp_path):
    refused(DataError, "have no observed entry", dfac.sample, V, dfac.GaussianMF(2), **QUICK)
    path = tmp_path / "run.zarr"
    match = "covariates_w must have one entry for each of the data's 39"
    refused(ModelError, match, dfac.sample, V[:-1], MODEL, store=path)
    assert not path.exists()
    match = "DSGD learns no link to covariates"
    refused(OptionError, match, dfac.optimize, V, MODEL, progressbar=False)
    match = r"learns rate_w and .* for rates, and leave covariates"
    refused(ModelError, match, dfac.optimize, COUNTS, RATES, progressbar=False)
    match = "covariates_h say what the rates of columns are"
    refused(ModelError, match, dfac.TweedieNMF, 2, covariates_h=Y, rate_h="column")
    trace = dfac.sample(COUNTS, RATES, dfac.PSGLD(), **QUICK)
    match = r"compare with Gibbs\(\) or BlockHMC\(\)"
    refused(ModelError, match, dfac.discretization_bias, trace, COUNTS)
