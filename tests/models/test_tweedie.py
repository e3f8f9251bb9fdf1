"""The model: what it accepts, what it refuses and how, and that it survives JSON."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from daskfactor.errors import DataError, ModelError
from daskfactor.models.gamma_factors import Hyperparameters, gamma_log_density
from daskfactor.models.tweedie import TweedieNMF

positive = st.one_of(st.just("auto"), st.floats(1e-6, 1e6))


@given(
    count=st.integers(1, 500),
    beta=st.one_of(st.floats(-3, 1), st.floats(2, 4)),
    dispersion=positive,
    rate_w=positive,
    rate_h=positive,
)
def test_model_survives_json_and_pickle(count, beta, dispersion, rate_w, rate_h):  # type: ignore[no-untyped-def]
    model = TweedieNMF(count, beta=beta, dispersion=dispersion, rate_w=rate_w, rate_h=rate_h)
    stored = json.loads(json.dumps(model.to_dict()))
    assert stored["type"] == "TweedieNMF"
    assert TweedieNMF.from_dict(stored) == model
    assert pickle.loads(pickle.dumps(model)) == model


def test_numpy_numbers_become_plain_ones():
    model = TweedieNMF(np.int64(3), beta=np.float32(0.5), rate_w=np.float64(2.0))  # type: ignore[arg-type]
    assert json.dumps(model.to_dict())
    assert model == TweedieNMF(3, beta=0.5, rate_w=2.0)
    assert type(model.n_components) is int
    assert type(model.beta) is float


def test_settings_are_keywords_and_frozen():
    with pytest.raises(TypeError):
        TweedieNMF(3, 1.0)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        TweedieNMF(3).beta = 0.5  # type: ignore[misc]


BAD = [
    *(("n_components", one, 'at least 1 or "auto", got') for one in (0, -1, 2.0, "3", None, True)),
    *(
        (name, one, "must be a positive")
        for name in ("dispersion", "rate_w", "rate_h")
        for one in (0.0, -1.0, np.nan, np.inf, "automatic", None, True)
    ),
    ("rate_w", "small", 'must be a positive number or "auto"'),
    ("beta", 1.5, r"1 < beta < 2, got beta=1\.5"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_settings(name, value, message):
    with pytest.raises(ModelError, match=message) as caught:
        TweedieNMF(**{"n_components": 2, name: value})
    assert name in str(caught.value)


def test_foreign_and_newer_dictionaries_are_refused():
    stored = TweedieNMF(2).to_dict()
    with pytest.raises(ModelError, match="GaussianMF"):
        TweedieNMF.from_dict(stored | {"type": "GaussianMF"})
    with pytest.raises(ModelError, match="newer version"):
        TweedieNMF.from_dict(stored | {"tilt": 1})
    with pytest.raises(ModelError, match="n_components"):
        TweedieNMF.from_dict({"type": "TweedieNMF"})


@pytest.mark.parametrize(
    ("beta", "ends", "message"),
    [
        (1.0, (-0.5, 5.0), "no negative data, got a smallest value of -0.5"),
        (3.0, (-0.5, 5.0), "no negative data"),
        (0.0, (-0.5, 5.0), "no negative data"),
        (0.0, (0.0, 5.0), "positive data only"),
        (-1.0, (0.0, 5.0), "positive data only"),
        *((2.0, ends, "finite") for ends in ((np.nan, 1.0), (0.0, np.inf), (-np.inf, 1.0))),
    ],
)
def test_data_that_the_law_cannot_produce(beta, ends, message):
    with pytest.raises(DataError, match=message):
        TweedieNMF(2, beta=beta).check_values(*ends)


@pytest.mark.parametrize(
    ("beta", "minimum"), [(2.0, -3.0), (2.0, 0.0), (1.0, 0.0), (0.5, 0.0), (0.0, 1e-9)]
)
def test_data_that_the_law_can_produce(beta, minimum):
    TweedieNMF(2, beta=beta).check_values(minimum, 5.0)


def test_log_prior_is_that_of_scipy():
    rng = np.random.default_rng(0)
    W, H = rng.exponential(size=(4, 2)), rng.exponential(size=(2, 3))
    wanted = stats.expon.logpdf(W, scale=1 / 0.7).sum() + stats.expon.logpdf(H, scale=1 / 3).sum()
    assert TweedieNMF(2).log_prior(W, H, 0.7, 3.0) == pytest.approx(wanted)
    assert TweedieNMF(2).log_prior(W, H.T, 0.7, 3.0) == pytest.approx(wanted)
    assert TweedieNMF(2).log_prior(W, -H, 0.7, 3.0) == -np.inf


def test_log_prior_sums_in_double_precision():
    many = np.full(3_000_001, 0.1, dtype=np.float32)
    wanted = -float(np.float32(0.1)) * many.size
    assert gamma_log_density(many, 1.0) == pytest.approx(wanted, rel=1e-12)
    with pytest.raises(ModelError, match="rate"):
        gamma_log_density(many, 0.0)


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
    with pytest.raises(ModelError, match="dispersion"):
        TweedieNMF(2).resolve(8.0, 0.0)


@pytest.mark.parametrize("mean", [0.0, -2.0, np.nan, np.inf])
def test_auto_rate_needs_a_positive_mean(mean):
    with pytest.raises(DataError, match="mean"):
        TweedieNMF(2).auto_rate(mean)
