"""Real-valued factorization: what the model accepts, where it starts, how factors are packed."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskfactor.errors import DataError, ModelError
from daskfactor.models.gaussian import GaussianHyper, GaussianMF

positive = st.one_of(st.just("auto"), st.floats(1e-6, 1e6))


@given(count=st.integers(1, 500), noise=positive, w=positive, h=positive, biases=st.booleans())
def test_model_survives_json_and_pickle(count, noise, w, h, biases):
    model = GaussianMF(count, noise=noise, precision_w=w, precision_h=h, biases=biases)
    stored = json.loads(json.dumps(model.to_dict()))
    assert stored["type"] == "GaussianMF"
    assert GaussianMF.from_dict(stored) == model
    assert pickle.loads(pickle.dumps(model)) == model
    hyper = model.start(3.5, 1.1)
    assert GaussianHyper.from_dict(json.loads(json.dumps(hyper.to_dict()))) == hyper


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_components": 0}, "at least 1"),
        ({"n_components": 2.5}, "whole number"),
        ({"n_components": 3, "noise": 0.0}, "noise"),
        ({"n_components": 3, "noise": "some"}, "noise"),
        ({"n_components": 3, "precision_w": -1}, "precision_w"),
        ({"n_components": 3, "precision_h": np.inf}, "precision_h"),
        ({"n_components": 3, "biases": "yes"}, "True or False"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ModelError, match=words):
        GaussianMF(**settings)


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"type": "TweedieNMF", "n_components": 2}, "expected a stored model"),
        ({"type": "GaussianMF"}, "lacks"),
        ({"type": "GaussianMF", "n_components": 2, "colour": 1}, "unknown settings"),
    ],
)
def test_foreign_dictionaries_are_refused(stored, words):
    with pytest.raises(ModelError, match=words):
        GaussianMF.from_dict(stored)


def test_data_must_be_finite_and_may_be_negative():
    GaussianMF(2).check_values(-5.0, 7.0)
    with pytest.raises(DataError, match="finite"):
        GaussianMF(2).check_values(0.0, np.inf)


@pytest.mark.parametrize("fixed", [{}, {"precision_w": 3.0}, {"precision_h": 0.2}, {"noise": 0.4}])
def test_the_prior_has_its_share_of_the_variance(fixed):
    hyper = GaussianMF(7, **fixed).start(2.0, 5.0)
    variance = np.sum(1 / (np.array(hyper.precision_w) * np.array(hyper.precision_h)))
    assert variance == pytest.approx(0.3 * 5.0)
    assert hyper.noise == fixed.get("noise", pytest.approx(3.5))
    assert hyper.dispersion == hyper.noise
    for name in ("precision_w", "precision_h"):
        if name in fixed:
            assert getattr(hyper, name) == (fixed[name],) * 7


def test_constant_data_have_a_start_all_the_same():
    assert GaussianMF(2).start(1.0, 0.0).noise > 0


@pytest.mark.parametrize("biases", [True, False])
def test_packed_factors_multiply_to_the_mean(biases):
    rng = np.random.default_rng(0)
    model = GaussianMF(3, biases=biases)
    W, H, a, b = (rng.normal(size=size) for size in ((5, 3), (4, 3), 5, 4))
    rows, cols = model.pack("rows", W, a, 2.0), model.pack("columns", H, b, 2.0)
    assert rows.shape == (5, model.width)
    assert cols.shape == (4, model.width)
    expected = W @ H.T + (a[:, None] + b if biases else 2.0)
    np.testing.assert_allclose(rows @ cols.T, expected)
    parts = model.unpack("rows", rows) | model.unpack("columns", cols)
    np.testing.assert_array_equal(parts["W"], W)
    np.testing.assert_array_equal(parts["H"], H)
    if biases:
        np.testing.assert_array_equal(parts["row_bias"], a)
        np.testing.assert_array_equal(parts["column_bias"], b)
    else:
        assert sorted(parts) == ["H", "W"]
