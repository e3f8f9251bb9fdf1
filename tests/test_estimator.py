"""`BayesianNMF` beside scikit-learn: its own checks, and what users of it do in the first hour."""

import pickle
import warnings
from copy import copy

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy import sparse
from scipy.special import logsumexp
from scipy.stats import poisson
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

import daskfactor as dfac
from daskfactor.data.holdout import hold_out
from daskfactor.errors import DaskfactorWarning, StoreError
from daskfactor.results.predict import with_new
from daskfactor.runs.trace import Run
from tests.refusals import refused

SHORT = {"draws": 30, "tune": 30, "random_state": 0}
rng = np.random.default_rng(1)
W, H = rng.gamma(1, 2, (60, 2)), rng.gamma(1, 2, (2, 12))
COUNTS = rng.poisson(W @ H).astype(float)
FACTORS = dfac.TweedieNMF(2, dispersion=1.0)


@pytest.fixture(autouse=True)
def quiet():
    """Chains of thirty draws are told not to have settled, and these need not."""
    with warnings.catch_warnings(action="ignore", category=DaskfactorWarning):
        yield


@pytest.fixture(scope="module")
def fitted():
    with warnings.catch_warnings(action="ignore", category=DaskfactorWarning):
        return dfac.BayesianNMF(model=FACTORS, **SHORT).fit(COUNTS)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([dfac.BayesianNMF(draws=6, tune=6, random_state=0)])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def test_a_fit_holds_means_and_deviations_of_its_draws(fitted):
    H = fitted.trace_["posterior"]["H"].values.reshape(-1, 2, 12)
    np.testing.assert_allclose(fitted.components_, H.mean(0), rtol=1e-4)
    np.testing.assert_allclose(fitted.components_sd_, H.std(0), rtol=1e-3)
    assert fitted.n_iter_ == 60
    assert fitted.n_components_ == 2
    back = fitted.inverse_transform(fitted.transform(COUNTS))
    assert np.corrcoef(back.ravel(), (W @ H.mean(0)).ravel())[0, 1] > 0.5
    assert np.abs(back - COUNTS).mean() < 1.2 * np.sqrt(COUNTS).mean()
    mean = fitted.trace_["posterior"]["W"].mean(("chain", "draw")).values[:, :2]
    assert (np.diff(mean.sum(0) * fitted.components_.sum(1)) <= 0).all()  # the largest comes first


def test_a_point_is_the_mean_of_draws_of_new_rows(fitted):
    long = dfac.BayesianNMF(model=FACTORS, draws=400, tune=100, random_state=0).fit(COUNTS)
    new = COUNTS[:6]
    draws = long.sample_transform(new)
    assert draws.shape == (400, 6, 2)
    point, error = long.transform(new), draws.std(0) / np.sqrt(50)  # of about 50 that count
    assert (np.abs(point - draws.mean(0)) < 5 * error).all()


def test_rows_do_not_know_of_each_other_and_may_be_sparse(fitted):
    found = fitted.transform(COUNTS)
    np.testing.assert_allclose(fitted.transform(COUNTS[::-1])[::-1], found, rtol=1e-9)
    np.testing.assert_allclose(fitted.transform(COUNTS[7:8]), found[7:8], rtol=1e-9)
    apart = fitted.transform(sparse.csr_array(COUNTS)) - found
    apart /= fitted.sample_transform(COUNTS).std(0)
    # Rounding leads paths apart: two means over 30 draws, or less that count.
    assert np.sqrt((apart**2).mean()) < 0.4


def test_centred_data_are_taken_under_a_normal_law():
    found = dfac.BayesianNMF(2, beta_loss="frobenius", **SHORT)
    assert not found.__sklearn_tags__().input_tags.positive_only
    centred = COUNTS - COUNTS.mean()
    assert found.fit_transform(centred).min() >= 0
    back = found.inverse_transform(found.transform(centred))
    assert np.corrcoef(back.ravel(), centred.ravel())[0, 1] > 0.7


def test_missing_entries_say_nothing(fitted):
    holes = COUNTS.copy()
    holes[rng.random(COUNTS.shape) < 0.2] = np.nan
    twice = holes.copy()
    twice[0] = np.nan
    once, again = fitted.transform(holes), fitted.transform(twice)
    np.testing.assert_allclose(once[1:], again[1:], rtol=1e-9)
    assert np.isfinite(again).all()


def test_a_score_is_the_density_of_entries_held_out(fitted):
    found = fitted.score(COUNTS, share=0.3, random_seed=4)
    held = hold_out(COUNTS, 0.3, random_seed=4)
    new = dfac.transform(fitted.trace_, held.train, random_seed=4, progressbar=False).values[0]
    H = fitted.trace_["posterior"]["H"].values[0]
    mu = np.einsum("drk,dkc->drc", new, H)[:, held.cells[0], held.cells[1]]
    direct = logsumexp(poisson.logpmf(held.values, mu), axis=0) - np.log(len(mu))
    assert found == pytest.approx(direct.mean(), abs=1e-4)


def test_a_search_and_auto_find_the_number_of_components():
    search = GridSearchCV(dfac.BayesianNMF(**SHORT), {"n_components": [1, 2]}, cv=2).fit(COUNTS)
    assert search.best_params_ == {"n_components": 2}
    found = dfac.BayesianNMF(draws=60, tune=60, random_state=0).fit(COUNTS)
    assert found.components_.shape == (found.n_components_, 12)
    assert 2 <= found.n_components_ <= 4
    assert found.transform(COUNTS).shape == (60, found.n_components_)


def test_frames_give_and_take_names():
    frame = pd.DataFrame(COUNTS, columns=[f"gene{i}" for i in range(12)])
    found = make_pipeline(FunctionTransformer(feature_names_out="one-to-one"), fresh())
    out = found.set_output(transform="pandas").fit_transform(frame)
    assert list(out.columns) == ["bayesiannmf0", "bayesiannmf1"]
    assert list(found[-1].trace_["posterior"]["H"]["column"].values) == list(frame.columns)
    with pytest.raises(ValueError, match="feature names should match"):
        found[-1].transform(frame[frame.columns[::-1]])


def test_labelled_arrays_go_in_as_sample_takes_them():
    array = xr.DataArray(COUNTS, {"gene": list("abcdefghijkl")}, ("cell", "gene"))
    found = fresh().fit(array)
    assert found.n_features_in_ == 12
    assert found.trace_["posterior"]["H"].dims[-1] == "gene"
    np.testing.assert_allclose(found.transform(array), found.transform(COUNTS), rtol=1e-6)


def test_estimators_with_a_store_are_pickled(tmp_path):
    made = dfac.BayesianNMF(2, store=tmp_path / "run.zarr", **SHORT).fit(COUNTS)
    again = pickle.loads(pickle.dumps(made))
    np.testing.assert_array_equal(again.transform(COUNTS[:3]), made.transform(COUNTS[:3]))


def fresh():
    return dfac.BayesianNMF(model=FACTORS, **SHORT)


def test_parameters_that_cannot_be_used_are_named_at_the_fit():
    for made, said in (
        ({"beta_loss": "huber"}, "beta_loss must be a number or one of 'frobenius'"),
        ({"beta_loss": 1.5}, "beta"),
        ({"n_components": 0}, "n_components"),
        ({"model": dfac.GaussianMF(2)}, "non-negative factors"),
        ({"model": "nmf"}, "non-negative factors"),
        ({"model": FACTORS, "n_components": 3}, "leave one of them out"),
        ({"draws": 0}, "draws"),
        ({"unstored": "nothing"}, "unstored"),
    ):
        refused(ValueError, said, dfac.BayesianNMF(**SHORT | made).fit, sparse.csr_array(COUNTS))
    # What unstored means is checked for dense data as well.
    match = 'unstored must be "zero" or "missing", got \'x\''
    refused(ValueError, match, dfac.BayesianNMF(2, unstored="x", **SHORT).fit, COUNTS)


def test_what_is_not_fitted_says_so(fitted):
    for method in ("transform", "sample_transform", "inverse_transform", "score"):
        refused(NotFittedError, "is not fitted yet", getattr(fresh(), method), COUNTS)
    refused(ValueError, "Negative values in data", fresh().fit, -COUNTS)
    refused(ValueError, "the weight at row 0", fresh().fit, COUNTS, weights=-np.ones(COUNTS.shape))
    refused(ValueError, "infinity", fresh().fit, np.where(COUNTS == 0, np.inf, COUNTS))
    refused(ValueError, "shape \\(n_samples, 2\\)", fitted.inverse_transform, COUNTS)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_fit_with_missing_cells_has_a_score(kind):
    X = np.where(np.random.default_rng(2).random(COUNTS.shape) < 0.2, np.nan, COUNTS + 1)
    if kind == "sparse":
        X = sparse.csr_array(np.nan_to_num(X))
    own = dfac.BayesianNMF(model=FACTORS, unstored="missing", **SHORT).fit(X)
    for new in (X, COUNTS):
        assert -4 < own.score(new) < -1


@pytest.mark.parametrize("kind", ["uncertainty", "weights"])
def test_what_a_fit_is_told_of_cells_new_rows_are_told_too(kind):
    told = {kind: np.random.default_rng(3).uniform(0.5, 4, COUNTS.shape)}
    own = dfac.BayesianNMF(model=dfac.TweedieNMF(2, beta=2.0), **SHORT)
    found = own.fit_transform(COUNTS, **told)
    options = {"point": True, "random_seed": 0, "progressbar": False}
    wanted = dfac.transform(own.trace_, COUNTS, **told, **options)
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    flat = {kind: np.ones_like(COUNTS)}
    assert not np.allclose(found, own.transform(COUNTS, **flat), rtol=1e-3)
    for method in (own.transform, own.score, own.sample_transform):
        refused(ValueError, f"pass {kind}=", method, COUNTS)
    held = hold_out(COUNTS, 0.2, random_seed=0)
    drawn = dfac.transform(own.trace_, held.train, **told, random_seed=0, progressbar=False)
    run, _ = with_new(Run.of(own.trace_), "W", drawn)
    at = {kind: told[kind][held.cells]}
    direct = dfac.log_likelihood(run.tree, held.cells, held.values, held_out=True, **at)
    densities = direct["held_out_log_likelihood"].to_dataset()["V"].values[0]
    each = logsumexp(densities, axis=0) - np.log(len(densities))
    assert own.score(COUNTS, **told) == pytest.approx(each.mean(), rel=1e-5)


def test_no_fit_replaces_the_run_of_another_estimator(tmp_path):
    store = tmp_path / "run.zarr"
    first = dfac.BayesianNMF(2, store=store, **SHORT).fit(COUNTS)
    expected = first.transform(COUNTS)
    match = r"exists and holds a run .* overwrite=True"
    refused(StoreError, match, dfac.BayesianNMF(2, store=store, **SHORT).fit, COUNTS + 1)
    assert np.array_equal(first.transform(COUNTS), expected)
    again = copy(first).fit(COUNTS + 1)  # the run of its own last fit
    assert dfac.open_run(store).attrs["trace_id"] == again.trace_.attrs["trace_id"]


def test_draws_of_another_run_are_never_taken_for_those_of_the_fit(tmp_path):
    store = tmp_path / "run.zarr"
    first = dfac.BayesianNMF(2, store=store, **SHORT).fit(COUNTS)
    trace = dfac.open_run(store)
    dfac.BayesianNMF(2, store=store, overwrite=True, **SHORT).fit(COUNTS + 1)
    for read in (lambda: trace["posterior"]["W"].values, lambda: first.transform(COUNTS)):
        refused(StoreError, "another run has taken the place of this one", read)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.FitFailedWarning")
def test_clones_say_that_one_store_is_not_for_all_of_them(tmp_path):
    estimator = dfac.BayesianNMF(2, store=tmp_path / "run.zarr", **SHORT)
    search = GridSearchCV(estimator, {"n_components": [1, 2]}, cv=2)
    refused(ValueError, r"store=.* which is a clone; pass store=None", search.fit, COUNTS)
    assert list(tmp_path.iterdir()) == []
    clone(estimator).set_params(store=tmp_path / "other.zarr").fit(COUNTS)
    scores = search.set_params(estimator__store=None).fit(COUNTS).cv_results_["mean_test_score"]
    assert np.isfinite(scores).all()
