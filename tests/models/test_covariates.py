"""Covariates: what is accepted, what is refused and how, what is stored, and draws of the link."""

import json
import pickle

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy import sparse

from daskfactor.errors import ModelError
from daskfactor.models import covariates as module
from daskfactor.models.covariates import Covariates
from daskfactor.models.gaussian import GaussianMF

pytestmark = pytest.mark.libraries

NAN = np.nan
X = np.array([[1.0, 0.0, 2.0], [0.0, -1.0, 0.0]])


def test_every_kind_of_array_is_the_same_covariates():
    labelled = xr.DataArray(X, {"age": ["a", "b", "c"]}, ("person", "age"))
    given = [X, X.tolist(), X.astype(np.float32), np.ma.array(X), labelled, pd.DataFrame(X)]
    models = [GaussianMF(2, covariates_w=one) for one in given]
    assert all(model == models[0] for model in models)
    assert models[4].covariates_w.names == ("a", "b", "c")
    assert models[5].covariates_w.names == ("0", "1", "2")
    kinds = (sparse.csr_array, sparse.coo_matrix, sparse.csc_array)
    compressed = [GaussianMF(2, covariates_w=kind(X)) for kind in kinds]
    assert all(model == compressed[0] for model in compressed)
    np.testing.assert_array_equal(compressed[0].covariates_w.values.toarray(), X)
    assert compressed[0].covariates_w.values.data.dtype == np.float64


def test_models_stay_values():
    given = X.copy()
    one, same, other = (GaussianMF(3, covariates_h=values) for values in (given, X, 2 * X))
    given[:] = 7.0
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != GaussianMF(3)
    assert pickle.loads(pickle.dumps(one)) == one
    assert one.with_components(5).covariates == one.covariates
    assert "Covariates(shape=(2, 3))" in repr(one)
    assert one.n_covariates == 3


@pytest.mark.parametrize("values", [X, sparse.csr_array(X)], ids=["dense", "sparse"])
def test_only_their_shape_is_stored_with_the_settings(values):
    model = GaussianMF(3, covariates_w=values, link_precision_w=2.0)
    stored = json.loads(json.dumps(model.to_dict()))
    assert stored["covariates_w"] == [2, 3]
    assert stored["covariates_h"] is None
    again = GaussianMF.from_dict(stored)
    assert again.covariates_w.values is None
    assert again != model
    assert again.with_arrays(model.arrays()) == model


def test_models_of_older_stores_have_none():
    old = GaussianMF(3).to_dict()
    for name in ("covariates_w", "covariates_h", "link_precision_w", "link_precision_h"):
        del old[name]
    assert GaussianMF.from_dict(old) == GaussianMF(3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0, NAN]], "1 of its entries are NaN, infinite or masked"),
        ([[1.0, np.inf]], "1 of its entries are NaN"),
        (np.ma.array(X, mask=X == 0), "3 of its entries are NaN"),
        (sparse.csr_array([[1.0, np.inf]]), "1 of its entries are NaN"),
        ([1.0, 2.0], r"\(rows, covariates\), got shape \(2,\)"),
        (np.ones((3, 0)), r"got shape \(3, 0\)"),
        (np.ones((0, 3)), r"got shape \(0, 3\)"),
        ([["male"], ["female"]], "encode categories as columns of 0 and 1"),
        ([[1.0, 2.0], [3.0]], "got list of dtype object"),
        ("abc", "got str of dtype object"),
    ],
)
def test_bad_values_are_refused(values, message):
    with pytest.raises(ModelError, match=message) as caught:
        GaussianMF(2, covariates_w=values)
    assert "\n" not in str(caught.value)
    turned = message.replace("rows", "columns")
    with pytest.raises(ModelError, match=turned):
        GaussianMF(2, covariates_h=values)
    with pytest.raises(ModelError, match="link_precision_w must be a positive"):
        GaussianMF(2, covariates_w=X, link_precision_w=0)


def test_they_must_belong_to_the_data():
    model = GaussianMF(2, covariates_w=X, covariates_h=np.ones((4, 1)))
    model.check_shape((2, 4))
    with pytest.raises(ModelError, match="covariates_w must have one row for each of the data's 3"):
        model.check_shape((3, 4))
    with pytest.raises(ModelError, match="of the data's 5 columns, got 4 rows"):
        model.check_shape((2, 5))


def test_the_scale_of_covariates_is_that_of_their_link():
    starts = [GaussianMF(2, covariates_w=c * X).start(0.0, 1.0) for c in (1.0, 10.0)]
    assert starts[0].link_precision_w == pytest.approx(np.mean(np.sum(X**2, axis=1)))
    assert starts[1].link_precision_w == pytest.approx(100 * starts[0].link_precision_w)
    assert GaussianMF(2, covariates_w=0 * X).start(0.0, 1.0).link_precision_w == 1.0
    assert GaussianMF(2, covariates_w=X, link_precision_w=3).start(0.0, 1.0).link_precision_w == 3.0


def test_draws_of_the_prior_vary_as_covariates_say():
    fixed = {"noise": 1.0, "precision_w": 2.0, "precision_h": 1.0, "biases": False}
    model = GaussianMF(1, covariates_w=X, link_precision_w=0.5, **fixed)
    rng, shape = np.random.default_rng(0), (2, 1)
    drawn = np.array([model.draw_prior(rng, shape, 0.0, 1.0).W[:, 0] for _ in range(5000)])
    wanted = (np.eye(2) + X @ X.T / 0.5) / 2.0
    variances = np.diag(wanted)
    error = np.sqrt((np.outer(variances, variances) + wanted**2) / 5000)
    assert np.abs((np.cov(drawn.T) - wanted) / error).max() < 5.0
    assert model.draw_prior(rng, shape, 0.0, 1.0).learnt == {}


# -- draws of the link, against their law in closed form -----------------------------------

RNG = np.random.default_rng(1)
TALL = RNG.normal(size=(9, 4)) * [1.0, 3.0, 0.2, 1.0]
FACTOR, PRECISION, RIDGE = RNG.normal(size=(9, 2)), np.array([0.5, 4.0]), 0.7
COUNT = 4000


class Mute:
    """Random numbers without any noise, but of the prior."""

    def __init__(self, seed, silent):
        self.rng, self.silent = np.random.default_rng(seed), silent

    def normal(self, size):
        return self.rng.normal(size=size) * (size not in self.silent)


def away(covariates, silent=()):
    """Largest z of mean and covariance of drawn links."""
    # All copies at once: as many columns of the factor.
    factor, precision = np.tile(FACTOR, COUNT), np.tile(PRECISION, COUNT)
    rng = Mute(3, silent)
    drawn = covariates.draw_link(factor, precision, RIDGE, rng).reshape(4, COUNT, 2)
    worst = 0.0
    A = TALL.T @ TALL + RIDGE * np.eye(4)
    for k in range(2):
        covariance = np.linalg.inv(A) / PRECISION[k]
        variances = np.diag(covariance)
        mean = np.linalg.solve(A, TALL.T @ FACTOR[:, k])
        z = (drawn[..., k].mean(axis=1) - mean) / np.sqrt(variances / COUNT)
        error = np.sqrt((np.outer(variances, variances) + covariance**2) / COUNT)
        spread = (np.cov(drawn[..., k]) - covariance) / error
        worst = max(worst, np.abs(z).max(), np.abs(spread).max())
    return float(worst)


@pytest.mark.parametrize("most", [1000, 3], ids=["decomposed", "solved"])
@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_array], ids=["dense", "sparse"])
def test_links_follow_their_conditional(most, kind, monkeypatch):
    monkeypatch.setattr(module, "MOST_DIRECT", most)
    assert away(Covariates(TALL.shape, kind(TALL))) < 5.0


@pytest.mark.parametrize("silent", [(9, 2 * COUNT), (4, 2 * COUNT)], ids=["factor", "prior"])
def test_a_solution_without_one_of_its_noises_is_seen(silent, monkeypatch):
    monkeypatch.setattr(module, "MOST_DIRECT", 3)
    assert away(Covariates(TALL.shape, TALL), (silent,)) > 5.0
