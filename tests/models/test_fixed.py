"""Frozen components: what is accepted, what is refused and how, and what is stored."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest

from daskfactor.errors import ModelError
from daskfactor.models.settings import FixedComponents, held
from daskfactor.models.tweedie import TweedieNMF

NAN = np.nan
W = np.array([[1.0, NAN, 2.0], [0.0, NAN, 5.0]])


def test_components_of_nan_alone_are_free():
    model = TweedieNMF(5, fixed_w=W, fixed_h=[[1, 2, 3, 4]])
    w, h = model.frozen
    np.testing.assert_array_equal(w, [True, False, True, False, False])
    np.testing.assert_array_equal(h, [True, False, False, False, False])
    factor = np.full((2, 5), 9.0, np.float32)
    assert model.fixed[0] is not None
    model.fixed[0].put(factor, np.array([1, 0]))
    np.testing.assert_array_equal(factor, [[0, 9, 5, 9, 9], [1, 9, 2, 9, 9]])
    assert TweedieNMF(5).frozen == (None, None)


def test_models_stay_values():
    one, same, other = (TweedieNMF(3, fixed_w=values) for values in (W, W.copy(), 2 * W))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != TweedieNMF(3)
    assert pickle.loads(pickle.dumps(one)) == one
    assert replace(one, n_components=4).frozen[0] is not None
    given = W.copy()
    model = TweedieNMF(3, fixed_w=given)
    given[:] = 7.0
    assert model == one
    assert "FixedComponents([0, 2], length=2)" in repr(one)


def test_only_the_numbers_of_frozen_components_are_stored():
    stored = json.loads(json.dumps(TweedieNMF(3, fixed_w=W).to_dict()))
    assert stored["fixed_w"] == [0, 2]
    assert stored["fixed_h"] is None
    again = TweedieNMF.from_dict(stored)
    assert again.fixed[0] == FixedComponents((0, 2))
    np.testing.assert_array_equal(again.frozen[0], [True, False, True])
    again.check_shape((7, 7))  # nothing to check
    with pytest.raises(ModelError, match="pass them again as fixed_w"):
        again.fixed[0].put(np.zeros((2, 3)), slice(None))  # type: ignore[union-attr]


def test_models_of_older_stores_have_exponential_priors():
    old = TweedieNMF(3).to_dict()
    for name in ("shape_w", "shape_h", "fixed_w", "fixed_h"):
        del old[name]
    assert TweedieNMF.from_dict(old) == TweedieNMF(3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.ones((4, 3)), r"fixed_w has 3 components \(rows, F\), the model 2"),
        ([[1.0, -2.0]], "must hold finite values of at least 0, got -2"),
        ([[1.0, np.inf]], "must hold finite values of at least 0, got inf"),
        ([[1.0, 2.0], [NAN, 2.0]], "component 0 of fixed_w has 1 NaN among its 2 entries"),
        (np.full((3, 2), NAN), "is all NaN, so it freezes nothing"),
        ([1.0, 2.0], r"two dimensions, \(rows, F\), got shape \(2,\)"),
        (np.ones((3, 0)), r"got shape \(3, 0\)"),
        ("abc", "array of non-negative numbers"),
    ],
)
def test_bad_values_are_refused(values, message):
    with pytest.raises(ModelError, match=message):
        TweedieNMF(2, fixed_w=values)  # type: ignore[arg-type]
    if np.ndim(values) == 2:  # type: ignore[arg-type]
        turned = message.replace("fixed_w", "fixed_h").replace(r"\(rows, F\)", r"\(F, columns\)")
        turned = turned.replace(r"\(3, 0\)", r"\(0, 3\)")
        with pytest.raises(ModelError, match=turned):
            TweedieNMF(2, fixed_h=np.transpose(values))  # type: ignore[arg-type]


def test_values_must_belong_to_the_data():
    model = TweedieNMF(3, fixed_w=W, fixed_h=np.ones((1, 4)))
    model.check_shape((2, 4))
    with pytest.raises(ModelError, match=r"data's 3 rows, \(rows, F\), got 2 for data of 3 x 4"):
        model.check_shape((3, 4))
    with pytest.raises(ModelError, match=r"data's 5 columns, \(F, columns\), got 4"):
        model.check_shape((2, 5))


@pytest.mark.parametrize("shapes", [(1.0, 1.0), (2.0, 0.5)])
@pytest.mark.parametrize(
    "fixed", [{}, {"fixed_w": 50 * W}, {"fixed_h": np.full((2, 4), 0.01)}, {"fixed_w": 0 * W}]
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
    with held(values, np.array([False, True, False])):
        values += 10
    np.testing.assert_array_equal(values, [[10, 1, 12], [13, 4, 15]])
    with held(values, None):
        values += 10
    assert values[0, 1] == 11
