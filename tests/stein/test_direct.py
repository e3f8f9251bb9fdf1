"""The gradient of the discrepancy against finite differences, and descent on it."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from daskfactor.errors import OptionError
from daskfactor.models.silf import SILFNMF
from daskfactor.stein import descent
from daskfactor.stein.descent import SteinDescent
from tests.pairwise import pairwise
from tests.refusals import refused
from tests.stein.posed import posed, starts
from tests.stein.problems import BY_NAME, Problem


def square(posterior, W, H):
    """S², by way of the Stein matrix."""
    cloud = descent.Cloud.at(posterior, (W, H))
    return descent.equal_discrepancy(cloud, posterior.kernel) ** 2


def closed(posterior, W, H):
    return descent.gradient(descent.Cloud.at(posterior, (W, H)), posterior.kernel)


CASES = [
    ("silf, in the transition", False),
    ("silf, in the transition", True),
    ("silf, counts", True),
    ("gaussian, missing, permuted", False),
    ("gamma priors", False),
    ("frozen", False),
    ("compound", False),
]


@pytest.mark.parametrize(("name", "tangent"), CASES)
def test_gradient_is_that_of_the_discrepancy(name, tangent):
    """Along random directions of all particles, and of a single entry."""
    case, rng = BY_NAME[name], np.random.default_rng(0)
    with case.open() as data:
        posterior = posed(case, data, tangent=tangent)
        W, H = starts(case, data, 3)
        by_w, by_h = closed(posterior, W, H)
        for trial in range(4):
            a, b = rng.standard_normal(W.shape) * W, rng.standard_normal(H.shape) * H
            if trial == 2:
                b[:] = 0
            if trial == 3:
                a[:], b[:2], b[2, 0, 1:] = 0, 0, 0
            if name == "frozen":
                a[:, :, case.model.frozen[0]] = 0
            h = 1e-5
            ends = [square(posterior, W + s * h * a, H + s * h * b) for s in (1, -1)]
            numeric = (ends[0] - ends[1]) / (2 * h)
            assert (by_w * a).sum() + (by_h * b).sum() == pytest.approx(numeric, rel=1e-4)


def test_second_derivatives_of_squares_are_exact_at_any_distance():
    case, rng = BY_NAME["gaussian"], np.random.default_rng(1)
    V, seen = np.nan_to_num(case.dense), ~np.isnan(case.dense)
    with case.open() as data:
        W, H = starts(case, data, 2)
        a, b = rng.standard_normal(W.shape), rng.standard_normal(H.shape)
        by_w, by_h = descent.second_derivative(posed(case, data), (W, H), (a, b))
    for m in range(2):
        residual = seen * (V - W[m] @ H[m])
        change = seen * (a[m] @ H[m] + W[m] @ b[m])
        assert_allclose(by_w[m], change @ H[m].T - residual @ b[m].T, rtol=1e-10)
        assert_allclose(by_h[m], W[m].T @ change - a[m].T @ residual, rtol=1e-10)


@pairwise(
    name=["silf, in the transition", "frozen"], dtype=["float64", "float32"], step=["auto", 0.3]
)
def test_it_never_ends_worse_than_it_starts(name, step, dtype):
    """A run of fewer steps is the beginning of one of more, but for fixed steps, which fall."""
    case, told = BY_NAME[name], []
    with case.open(dtype=dtype) as data:
        posterior, begun = posed(case, data), starts(case, data, 4)
        (W, H), taken = SteinDescent(25, step).move(posterior, begun, told.append)
        levels = [square(posterior, *begun), square(posterior, W, H)]
        if step == "auto":
            ends = (SteinDescent(n).move(posterior, begun)[0] for n in range(1, 25, 4))
            levels[1:1] = [square(posterior, *end) for end in ends]
    assert told == [done / 25 for done in range(1, 26)]
    assert taken == 25
    rounding = 0.0 if dtype == "float64" else 1e-2
    assert np.all(np.diff(levels) <= rounding * levels[0])
    if step == "auto":
        assert levels[-1] < 0.81 * levels[0]
    assert W.dtype == H.dtype == dtype
    assert min(W.min(), H.min()) >= 0
    if isinstance(case.model, SILFNMF):
        assert_allclose(W.sum(axis=1), 1.0, rtol=1e-6)
    else:
        frozen = case.model.frozen[0]
        assert_array_equal(W[:, :, frozen], begun[0][:, :, frozen].astype(dtype))


def test_the_best_is_kept_where_fixed_steps_lead_up(monkeypatch):
    case, levels = BY_NAME["frozen"], []
    measure = descent.equal_discrepancy

    def heard(*given):
        levels.append(measure(*given))
        return levels[-1]

    monkeypatch.setattr(descent, "equal_discrepancy", heard)
    with case.open() as data:
        begun = starts(case, data, 4)
        (W, _), _ = SteinDescent(8, 1.0).move(posed(case, data), begun)
    assert len(levels) == 9
    assert levels[-1] > levels[0] == min(levels)
    assert_array_equal(W, begun[0])


def test_it_stops_where_nothing_leads_down():
    """One particle where the likelihood is flat: its discrepancy is the same everywhere."""
    case, told = Problem("flat", SILFNMF(2, threshold=1e9), *2 * (BY_NAME["gamma"].V,)), []
    with case.open() as data:
        begun = starts(case, data, 1)
        (_, H), taken = SteinDescent(500).move(posed(case, data), begun, told.append)
    assert 20 < taken < 60
    assert told[-1] == 1.0
    assert_allclose(H, begun[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"step": -1.0}, "step must be a positive"),
        ({"step": "fast"}, "step must be"),
    ],
)
def test_bad_options(settings, message):
    refused(OptionError, message, SteinDescent, **settings)
