"""Settings of models: what is accepted, what is refused and how, what is stored and read back."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse, stats

from daskfactor.allocation.model import AllocationModel
from daskfactor.errors import DataError, ModelError
from daskfactor.inference.parameters import stored_hyper
from daskfactor.models import model_from_dict
from daskfactor.models.gamma_factors import Hyperparameters, gamma_log_density
from daskfactor.models.gaussian import GaussianMF
from daskfactor.models.negative_binomial import NegativeBinomial, NegativeBinomialNMF
from daskfactor.models.settings import FixedComponents, preserve_columns
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.stein.silf import SILFNMF
from tests.refusals import refused

NAN = np.nan
FIXED = np.array([[1.0, NAN, 2.0], [0.0, NAN, 5.0]])
X = np.array([[1.0, 0.0, 2.0], [0.0, -1.0, 0.0]])
positive = st.one_of(st.just("auto"), st.floats(1e-6, 1e6))
counts, betas = st.integers(1, 500), st.one_of(st.floats(-3, 1), st.floats(2, 4))
rates = dict.fromkeys(("dispersion", "rate_w", "rate_h"), positive)
precisions = dict.fromkeys(("noise", "precision_w", "precision_h"), positive)
MODELS = st.one_of(
    st.builds(TweedieNMF, counts, beta=betas, **rates),
    st.builds(GaussianMF, counts, biases=st.booleans(), **precisions),
    st.builds(NegativeBinomialNMF, counts, dispersion=positive, shape_w=st.floats(0.1, 9)),
)


@given(MODELS)
def test_models_survive_json_and_pickle(model):
    stored = json.loads(json.dumps(model.to_dict()))
    assert stored["type"] == type(model).__name__
    assert type(model).from_dict(stored) == model_from_dict(stored) == model
    assert pickle.loads(pickle.dumps(model)) == model
    if isinstance(model, GaussianMF):
        hyper = model.start(3.5, 1.1)
        for saved in (hyper._asdict(), list(hyper)):
            assert stored_hyper(model, json.loads(json.dumps(saved))) == hyper._asdict()


def test_numpy_numbers_become_plain_ones_and_stay():
    model = TweedieNMF(np.int64(3), beta=np.float32(0.5), rate_w=np.float64(2.0))
    assert json.dumps(model.to_dict())
    assert model == TweedieNMF(3, beta=0.5, rate_w=2.0)
    assert (type(model.n_components), type(model.beta)) == (int, float)
    silf = SILFNMF(4, beta=1, threshold=np.float32(0.5), smoothness=0.2)
    assert SILFNMF.from_dict(silf.to_dict()) == silf
    assert type(silf.to_dict()["threshold"]) is float
    refused(TypeError, None, TweedieNMF, 3, 1.0)  # settings are keywords, and frozen
    refused(AttributeError, None, setattr, model, "beta", 0.25)


def test_hyperparameters_that_older_checkpoints_do_not_have_are_the_defaults():
    assert stored_hyper(TweedieNMF(2), [1.0, 2.0, 3.0])["shape_h"] == 1.0
    hyper = GaussianMF(2).start(0.0, 1.0)._asdict()
    older = {name: value for name, value in hyper.items() if not name.startswith("link")}
    assert stored_hyper(GaussianMF(2), older) == hyper


POSITIVE = 'must be a positive, finite number or "auto"'
COUNTED = 'n_components.* at least 1 or "auto", got'
BAD = [
    *((TweedieNMF, {"n_components": one}, COUNTED) for one in (0, -1, 2.0, "3", None, True)),
    *(
        (TweedieNMF, {name: one}, f"{name} must be a positive")
        for name in rates
        for one in (0.0, -1.0, NAN, np.inf, "automatic", None, True)
    ),
    (TweedieNMF, {"rate_w": "small"}, f"rate_w {POSITIVE}"),
    (TweedieNMF, {"beta": 1.5}, r"1 < beta < 2, got beta=1\.5"),
    (NegativeBinomialNMF, {"dispersion": 0.0}, "dispersion must be a positive"),
    (GaussianMF, {"n_components": 0}, "at least 1"),
    (GaussianMF, {"n_components": 2.5}, "whole number"),
    (GaussianMF, {"noise": 0.0}, "noise"),
    (GaussianMF, {"noise": "some"}, "noise"),
    (GaussianMF, {"precision_w": -1}, "precision_w"),
    (GaussianMF, {"precision_h": np.inf}, "precision_h"),
    (GaussianMF, {"biases": "yes"}, "True or False"),
    (GaussianMF, {"covariates_w": X, "link_precision_w": 0}, "link_precision_w must be a pos"),
    (SILFNMF, {"beta": 1.5}, "no Tweedie law"),
    (SILFNMF, {"threshold": 0.0}, "threshold must be"),
    (SILFNMF, {"threshold": "median"}, "threshold must be"),
    (SILFNMF, {"smoothness": 1.1}, "at most 1"),
    (SILFNMF, {"smoothness": 0}, "smoothness must be"),
    (SILFNMF, {"sharpness": np.inf}, "sharpness must be"),
    (SILFNMF, {"rate": -1}, "rate must be"),
]


def test_bad_settings():
    for kind, settings, message in BAD:
        refused(ModelError, message, kind, **{"n_components": 2} | settings)


def test_stored_models_that_cannot_be_read():
    tweedie, gaussian, allocation = TweedieNMF(2), GaussianMF(2), AllocationModel.nmf(3)
    for model, name, value, message in (
        (tweedie, "type", "GaussianMF", "expected a stored model of type 'Tw.*GaussianMF"),
        (tweedie, "tilt", 1, "has 'tilt', which this version does not know .*newer version"),
        (tweedie, "n_components", None, "lacks 'n_components'"),
        (gaussian, "type", "TweedieNMF", "expected a stored model"),
        (gaussian, "n_components", None, "lacks"),
        (gaussian, "colour", 1, "has 'colour', which this version does not know"),
        (allocation, "type", "TweedieNMF", "type 'AllocationModel', got 'Tweed"),
        (allocation, "colour", 1, "has 'colour', which this version does not know .*upgrade"),
        (allocation, "graph", None, "the stored model lacks 'graph'"),
    ):
        stored = model.to_dict() | {name: value}
        if value is None:
            del stored[name]
        refused(ModelError, message, type(model).from_dict, stored)


def test_models_of_older_stores_have_what_was_meant_then():
    links = "covariates_w", "covariates_h", "link_precision_w", "link_precision_h"
    shapes = "shape_w", "shape_h", "fixed_w", "fixed_h"
    for model, newer in ((TweedieNMF(3), shapes), (GaussianMF(3), links)):
        old = {name: value for name, value in model.to_dict().items() if name not in newer}
        assert type(model).from_dict(old) == model


def test_models_with_arrays_stay_values():
    for kind, name, values, shown in (
        (TweedieNMF, "fixed_w", FIXED, "FixedComponents([0, 2], length=2)"),
        (GaussianMF, "covariates_h", X, "Covariates(shape=(2, 3))"),
    ):
        given_ = values.copy()
        one, same, other = (kind(3, **{name: own}) for own in (given_, values, 2 * values))
        given_[:] = 7.0
        assert one == same
        assert hash(one) == hash(same)
        assert one != other
        assert one != kind(3)
        assert pickle.loads(pickle.dumps(one)) == one
        again = replace(one, n_components=5) if kind is TweedieNMF else one.with_components(5)
        assert getattr(again, name) == getattr(one, name)
        assert shown in repr(one)


MISFITS = [
    (TweedieNMF(3, fixed_w=FIXED, fixed_h=np.ones((1, 4))), (2, 4), None),
    (TweedieNMF(3, fixed_w=FIXED), (3, 4), "of the data's 3 rows, .* got 2 for data of 3 x 4"),
    (TweedieNMF(3, fixed_h=np.ones((1, 4))), (2, 5), "one entry for .* data's 5 columns, .* got 4"),
    (GaussianMF(2, covariates_w=X, covariates_h=np.ones((4, 1))), (2, 4), None),
    (GaussianMF(2, covariates_w=X), (3, 4), "covariates_w must have one entry for .* data's 3"),
    (GaussianMF(2, covariates_h=np.ones((4, 1))), (2, 5), "of the data's 5 columns, .* got 4"),
]


def test_arrays_must_belong_to_the_data():
    for model, shape, message in MISFITS:
        if message is None:
            model.check_shape(shape)
        else:
            refused(ModelError, message, model.check_shape, shape)


# -- data and hyperparameters --------------------------------------------------------------


def test_data_that_a_law_can_and_cannot_produce():
    for model, message, *ends in (
        (TweedieNMF(2, beta=1.0), "no negative data, got a smallest value of -0.5", -0.5, 5.0),
        (TweedieNMF(2, beta=3.0), "no negative data", -0.5, 5.0),
        (TweedieNMF(2, beta=0.0), "no negative data", -0.5, 5.0),
        (TweedieNMF(2, beta=0.0), "positive data only", 0.0, 5.0),
        (TweedieNMF(2, beta=-1.0), "positive data only", 0.0, 5.0),
        (NegativeBinomial(), "smallest value of -1", -1.0, 3.0),
        (GaussianMF(2), "finite", 0.0, np.inf),
        (TweedieNMF(2, beta=2.0), "finite", NAN, 1.0),
        (TweedieNMF(2, beta=2.0), "finite", 0.0, np.inf),
        (TweedieNMF(2, beta=2.0), "finite", -np.inf, 1.0),
    ):
        refused(DataError, message, model.check_values, *ends)
    for beta, minimum in ((2.0, -3.0), (2.0, 0.0), (1.0, 0.0), (0.5, 0.0), (0.0, 1e-9)):
        TweedieNMF(2, beta=beta).check_values(minimum, 5.0)
    GaussianMF(2).check_values(-5.0, 7.0)


def test_log_prior_is_that_of_scipy_and_sums_in_double_precision():
    rng = np.random.default_rng(0)
    W, H = rng.exponential(size=(4, 2)), rng.exponential(size=(2, 3))
    wanted = stats.expon.logpdf(W, scale=1 / 0.7).sum() + stats.expon.logpdf(H, scale=1 / 3).sum()
    assert TweedieNMF(2).log_prior(W, H, 0.7, 3.0) == pytest.approx(wanted)
    assert TweedieNMF(2).log_prior(W, H.T, 0.7, 3.0) == pytest.approx(wanted)
    assert TweedieNMF(2).log_prior(W, -H, 0.7, 3.0) == -np.inf
    many = np.full(3_000_001, 0.1, dtype=np.float32)
    wanted = -float(np.float32(0.1)) * many.size
    assert gamma_log_density(many, 1.0) == pytest.approx(wanted, rel=1e-12)
    refused(ModelError, "rate", gamma_log_density, many, 0.0)


@given(mean=st.floats(1e-3, 1e3), count=st.integers(1, 50), fixed=st.floats(1e-2, 1e2))
def test_auto_rates_give_mu_the_mean_of_the_data(mean, count, fixed):
    both = TweedieNMF(count).resolve(mean, 1.0)
    assert both.rate_w == both.rate_h == TweedieNMF(count).auto_rate(mean)
    one_fixed = (TweedieNMF(count, rate_w=fixed), TweedieNMF(count, rate_h=fixed))
    for model in (TweedieNMF(count), *one_fixed):
        rates = model.resolve(mean, 1.0)
        assert count / (rates.rate_w * rates.rate_h) == pytest.approx(mean)
    assert one_fixed[0].resolve(mean, 1.0).rate_w == fixed
    assert one_fixed[1].resolve(mean, 1.0).rate_h == fixed


def test_fixed_settings_win():
    model = TweedieNMF(2, dispersion=0.3, rate_w=2.0, rate_h=5.0)
    assert model.resolve(-1.0, 9.0) == Hyperparameters(0.3, 2.0, 5.0)
    assert TweedieNMF(2).resolve(8.0, 9.0) == Hyperparameters(9.0, 0.5, 0.5)
    refused(ModelError, "dispersion", TweedieNMF(2).resolve, 8.0, 0.0)
    for mean in (0.0, -2.0, NAN, np.inf):
        refused(DataError, "mean", TweedieNMF(2).auto_rate, mean)
    assert NegativeBinomialNMF(2, dispersion=0.2).likelihood.numbers == (0.2,)
    assert [own.name for own in NegativeBinomialNMF(2).learnt] == ["dispersion"]
    assert NegativeBinomialNMF(2, dispersion=0.2).learnt == ()


@pytest.mark.parametrize("fixed", [{}, {"precision_w": 3.0}, {"precision_h": 0.2}, {"noise": 0.4}])
def test_a_gaussian_prior_has_its_share_of_the_variance(fixed):
    hyper = GaussianMF(7, **fixed).start(2.0, 5.0)
    variance = np.sum(1 / (np.array(hyper.precision_w) * np.array(hyper.precision_h)))
    assert variance == pytest.approx(0.3 * 5.0)
    assert hyper.noise == hyper.dispersion == fixed.get("noise", pytest.approx(3.5))
    for name in fixed.keys() - {"noise"}:
        assert getattr(hyper, name) == (fixed[name],) * 7
    assert GaussianMF(2).start(1.0, 0.0).noise > 0  # of constant data, all the same


@pytest.mark.parametrize("biases", [True, False])
def test_packed_factors_multiply_to_the_mean(biases):
    rng = np.random.default_rng(0)
    model = GaussianMF(3, biases=biases)
    W, H, a, b = (rng.normal(size=size) for size in ((5, 3), (4, 3), 5, 4))
    rows, cols = model.pack("rows", W, a, 2.0), model.pack("columns", H, b, 2.0)
    assert (rows.shape, cols.shape) == ((5, model.width), (4, model.width))
    expected = W @ H.T + (a[:, None] + b if biases else 2.0)
    np.testing.assert_allclose(rows @ cols.T, expected)
    wanted = {"W": W, "H": H} | ({"row_bias": a, "column_bias": b} if biases else {})
    parts = model.unpack("rows", rows) | model.unpack("columns", cols)
    assert parts.keys() == wanted.keys()
    for name, own in wanted.items():
        np.testing.assert_array_equal(parts[name], own)


# -- frozen components ---------------------------------------------------------------------


def test_components_of_nan_alone_are_free():
    model = TweedieNMF(5, fixed_w=FIXED, fixed_h=[[1, 2, 3, 4]])
    w, h = model.frozen
    np.testing.assert_array_equal(w, [True, False, True, False, False])
    np.testing.assert_array_equal(h, [True, False, False, False, False])
    factor = np.full((2, 5), 9.0, np.float32)
    model.fixed[0].put(factor, np.array([1, 0]))
    np.testing.assert_array_equal(factor, [[0, 9, 5, 9, 9], [1, 9, 2, 9, 9]])
    assert TweedieNMF(5).frozen == (None, None)


def test_only_the_numbers_of_frozen_components_are_stored():
    stored = json.loads(json.dumps(TweedieNMF(3, fixed_w=FIXED).to_dict()))
    assert (stored["fixed_w"], stored["fixed_h"]) == ([0, 2], None)
    again = TweedieNMF.from_dict(stored)
    assert again.fixed[0] == FixedComponents((0, 2))
    np.testing.assert_array_equal(again.frozen[0], [True, False, True])
    again.check_shape((7, 7))  # nothing to check
    with pytest.raises(ModelError, match="pass them again as fixed_w"):
        again.fixed[0].put(np.zeros((2, 3)), slice(None))


def test_bad_values_of_frozen_components():
    for values, message in (
        (np.ones((4, 3)), r"fixed_w has 3 components \(rows, F\), the model 2"),
        ([[1.0, -2.0]], "must hold finite values of at least 0, got -2"),
        ([[1.0, np.inf]], "must hold finite values of at least 0, got inf"),
        ([[1.0, 2.0], [NAN, 2.0]], "component 0 of fixed_w has 1 NaN among its 2 entries"),
        (np.full((3, 2), NAN), "is all NaN, so it freezes nothing"),
        ([1.0, 2.0], r"two dimensions, \(rows, F\), got shape \(2,\)"),
        (np.ones((3, 0)), r"got shape \(3, 0\)"),
        ("abc", "array of real numbers in two dim"),
    ):
        refused(ModelError, message, TweedieNMF, 2, fixed_w=values)
        if np.ndim(values) == 2:
            turned = message.replace("fixed_w", "fixed_h").replace(r"\(rows, F", r"\(F, columns")
            turned = turned.replace(r"\(3, 0\)", r"\(0, 3\)")
            refused(ModelError, turned, TweedieNMF, 2, fixed_h=np.transpose(values))


@pytest.mark.parametrize("shapes", [(1.0, 1.0), (2.0, 0.5)])
@pytest.mark.parametrize(
    "fixed",
    [{}, {"fixed_w": 50 * FIXED}, {"fixed_h": np.full((2, 4), 0.01)}, {"fixed_w": 0 * FIXED}],
)
def test_automatic_rates_put_free_entries_on_the_scale_of_frozen_ones(fixed, shapes):
    model = TweedieNMF(3, shape_w=shapes[0], shape_h=shapes[1], **fixed)
    hyper = model.resolve(8.0, 1.0)
    w, h = hyper.shape_w / hyper.rate_w, hyper.shape_h / hyper.rate_h
    assert (hyper.shape_w, hyper.shape_h) == shapes
    assert 3 * w * h == pytest.approx(8.0)
    if "fixed_h" in fixed:
        assert h == pytest.approx(0.01)
    elif np.nan_to_num(fixed.get("fixed_w", np.zeros(1))).any():
        assert w == pytest.approx(100.0)  # the mean of what is not NaN
    else:
        assert w == pytest.approx(h)


def test_held_puts_columns_back():
    values = np.arange(6.0).reshape(2, 3)
    with preserve_columns(values, np.array([False, True, False])):
        values += 10
    np.testing.assert_array_equal(values, [[10, 1, 12], [13, 4, 15]])
    with preserve_columns(values, None):
        values += 10
    assert values[0, 1] == 11


# -- covariates ----------------------------------------------------------------------------


@pytest.mark.libraries
def test_every_kind_of_array_is_the_same_covariates():
    labelled = xr.DataArray(X, {"age": ["a", "b", "c"]}, ("person", "age"))
    arrays = [X, X.tolist(), X.astype(np.float32), np.ma.array(X), labelled, pd.DataFrame(X)]
    models = [GaussianMF(2, covariates_w=one) for one in arrays]
    assert all(model == models[0] for model in models)
    assert models[4].covariates_w.names == ("a", "b", "c")
    assert models[5].covariates_w.names == ("0", "1", "2")
    kinds = (sparse.csr_array, sparse.coo_matrix, sparse.csc_array)
    compressed = [GaussianMF(2, covariates_w=kind(X)) for kind in kinds]
    assert all(model == compressed[0] for model in compressed)
    np.testing.assert_array_equal(compressed[0].covariates_w.values.toarray(), X)
    assert compressed[0].covariates_w.values.data.dtype == np.float64


@pytest.mark.parametrize("values", [X, sparse.csr_array(X)], ids=["dense", "sparse"])
def test_only_the_shape_of_covariates_is_stored_with_the_settings(values):
    model = GaussianMF(3, covariates_w=values, link_precision_w=2.0)
    stored = json.loads(json.dumps(model.to_dict()))
    assert (stored["covariates_w"], stored["covariates_h"]) == ([2, 3], None)
    again = GaussianMF.from_dict(stored)
    assert again.covariates_w.values is None
    assert again != model
    assert again.with_arrays(model.arrays()) == model


def test_bad_values_of_covariates():
    for values, message in (
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
    ):
        assert "\n" not in refused(ModelError, message, GaussianMF, 2, covariates_w=values)
        turned = message.replace("rows", "columns")
        refused(ModelError, turned, GaussianMF, 2, covariates_h=values)


def test_the_scale_of_covariates_is_that_of_their_link():
    starts = [GaussianMF(2, covariates_w=c * X).start(0.0, 1.0) for c in (1.0, 10.0)]
    assert starts[0].link_precision_w == pytest.approx(np.mean(np.sum(X**2, axis=1)))
    assert starts[1].link_precision_w == pytest.approx(100 * starts[0].link_precision_w)
    assert GaussianMF(2, covariates_w=0 * X).start(0.0, 1.0).link_precision_w == 1.0
    assert GaussianMF(2, covariates_w=X, link_precision_w=3).start(0.0, 1.0).link_precision_w == 3.0


def test_draws_of_the_prior_vary_as_covariates_say():
    settled = {"noise": 1.0, "precision_w": 2.0, "precision_h": 1.0, "biases": False}
    model = GaussianMF(1, covariates_w=X, link_precision_w=0.5, **settled)
    rng, count = np.random.default_rng(0), 1500
    drawn = np.array([model.draw_prior(rng, (2, 1), 0.0, 1.0).W[:, 0] for _ in range(count)])
    wanted = (np.eye(2) + X @ X.T / 0.5) / 2.0
    variances = np.diag(wanted)
    error = np.sqrt((np.outer(variances, variances) + wanted**2) / count)
    assert np.abs((np.cov(drawn.T) - wanted) / error).max() < 5.0
    assert model.draw_prior(rng, (2, 1), 0.0, 1.0).learnt == {}
