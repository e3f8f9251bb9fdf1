"""The soft insensitive loss and the model around it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskfactor.errors import ModelError
from daskfactor.stein.silf import SILFNMF, silf, silf_slope
from tests.models.laws import divergence
from tests.refusals import refused

CASES = [(0.5, 0.1), (3.0, 0.4), (1e6, 0.1), (1e-4, 1.0)]


def printed(y, eps, smoothness):
    """What the paper prints: the middle without the threshold."""
    low, high = (1 - smoothness) * eps, (1 + smoothness) * eps
    middle = (y - (1 - smoothness)) ** 2 / (4 * smoothness * eps)
    return np.where(y <= low, 0.0, np.where(y >= high, y - eps, middle))


def assert_smooth(loss, eps, smoothness):
    """Value and slope do not jump at either end of the transition."""
    step = 1e-6 * eps
    for end in ((1 - smoothness) * eps, (1 + smoothness) * eps):
        at = end + step * np.array([-2.0, -1.0, 1.0, 2.0])
        values = loss(at, eps, smoothness)
        # The slope is at most 1, and changes by 1 over 2 β ε.
        assert abs(values[2] - values[1]) <= 2.001 * step
        left, right = (values[1] - values[0]) / step, (values[3] - values[2]) / step
        assert abs(right - left) <= 4 * step / (2 * smoothness * eps) + 1e-5


@pytest.mark.parametrize(("eps", "smoothness"), CASES)
def test_value_and_slope_are_continuous_and_not_in_the_form_that_the_paper_prints(eps, smoothness):
    assert_smooth(silf, eps, smoothness)
    if smoothness < 1:
        refused(AssertionError, None, assert_smooth, printed, eps, smoothness)


@given(y=st.floats(0, 10), eps=st.floats(0.01, 5), smoothness=st.floats(0.01, 1.0))
def test_slope_is_the_derivative(y, eps, smoothness):
    h = 1e-6
    numeric = (silf(y + h, eps, smoothness) - silf(y - h, eps, smoothness)) / (2 * h)
    assert abs(numeric - silf_slope(y, eps, smoothness)) < 1e-6 + h / (smoothness * eps)


def test_values_by_hand():
    y = np.array([0.0, 0.9, 1.0, 1.1, 3.0])
    np.testing.assert_allclose(silf(y, 1.0, 0.1), [0, 0, 0.025, 0.1, 2.0], atol=1e-12)
    np.testing.assert_allclose(silf_slope(y, 1.0, 0.1), [0, 0, 0.5, 1.0, 1.0], atol=1e-12)


def factors():
    rng = np.random.default_rng(0)
    V = rng.gamma(2.0, size=(4, 5))
    V[0, 1] = np.nan
    return V, rng.dirichlet(np.ones(4), 2).T, rng.exponential(size=(2, 5)) * 4


@pytest.mark.parametrize("beta", [2.0, 1.0, 0.5, 0.0])
def test_objective(beta):
    V, W, H = factors()
    model = SILFNMF(2, beta=beta, threshold=1.0)
    seen = ~np.isnan(V)
    if beta == 2.0:
        expected = float(((V - W @ H)[seen] ** 2).sum())
    else:
        expected = float(divergence(V[seen], (W @ H)[seen], beta).sum())
    assert model.objective(V, W, H) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("share", [0.5, 0.97, 1.02, 3.0])
def test_score_is_the_gradient_of_the_log_density(share):
    V, W, H = factors()
    f = SILFNMF(2, threshold=1.0).objective(V, W, H)
    model = SILFNMF(2, threshold=f / share, sharpness=1.5, rate=0.3)
    residual = np.nan_to_num(V - W @ H)
    score_w, score_h = model.score(f, -2 * residual @ H.T, -2 * W.T @ residual)

    def density(W, H):
        return model.log_density(model.objective(V, W, H), H)

    h = 1e-6
    for factor, score in ((W, score_w), (H, score_h)):
        for at, wanted in np.ndenumerate(score):
            ends = []
            for sign in (1, -1):
                factor[at] += sign * h
                ends.append(density(W, H))
                factor[at] -= sign * h
            assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_density_is_flat_below_the_threshold_and_zero_where_weights_are_negative():
    model = SILFNMF(2, threshold=10.0, rate=2.0)
    H = np.array([[1.0, 2.0]])
    assert model.log_density(3.0, H) == model.log_density(8.9, H) == -6.0
    assert model.log_density(20.0, H) == pytest.approx(-6.0 - 2.0 * 10.0)
    assert model.log_density(1.0, -H) == -np.inf


def test_threshold_from_pilot_runs():
    model = SILFNMF(3, sharpness=4.0)
    assert model.resolve([1.0, 5.0, 2.0]) == SILFNMF(3, sharpness=4.0, threshold=6.0)
    assert SILFNMF(3, threshold=2.0).resolve([100.0]).threshold == 2.0
    with pytest.raises(ModelError, match="resolved first"):
        _ = model.eps
    for bad in ([], [np.nan], [0.0], [-1.0, 2.0]):
        refused(ModelError, r"1\.2 times the largest", model.resolve, bad)
