"""The gradient of the discrepancy against finite differences, and descent on it."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from daskfactor.errors import OptionError
from daskfactor.executors import LanesExecutor, SerialExecutor
from daskfactor.models.silf import SILFNMF
from daskfactor.stein import state, stein_descent, svgd
from daskfactor.stein.stein_descent import SteinDescent
from tests.stein.posed import posed, quiet
from tests.stein.problems import BY_NAME, Problem

Array = NDArray[np.float64]


def square(problem: state.Problem, W: Array, H: Array) -> float:
    """S², by way of the Stein matrix."""
    cloud = svgd.evaluate(problem, (W, H))
    return svgd.equal_discrepancy(svgd.blocks_of(problem, cloud), problem.kernel) ** 2


def closed(problem: state.Problem, W: Array, H: Array) -> tuple[Array, Array]:
    cloud = svgd.evaluate(problem, (W, H))
    return stein_descent.gradient(problem, cloud, svgd.blocks_of(problem, cloud), problem.kernel)


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
def test_gradient_is_that_of_the_discrepancy(name: str, tangent: bool) -> None:
    """Along random directions of all particles, and of a single entry."""
    case, rng = BY_NAME[name], np.random.default_rng(0)
    with case.open() as data:
        problem = posed(case, data, 3, tangent=tangent)
        W, H = problem.starts
        by_w, by_h = closed(problem, W, H)
        for trial in range(4):
            a, b = rng.standard_normal(W.shape) * W, rng.standard_normal(H.shape) * H
            if trial == 2:
                b[:] = 0
            if trial == 3:
                a[:], b[:2], b[2, 0, 1:] = 0, 0, 0
            if name == "frozen":
                a[:, :, case.model.frozen[0]] = 0
            h = 1e-5
            ends = [square(problem, W + s * h * a, H + s * h * b) for s in (1, -1)]
            numeric = (ends[0] - ends[1]) / (2 * h)
            assert (by_w * a).sum() + (by_h * b).sum() == pytest.approx(numeric, rel=1e-4)


def test_second_derivatives_of_squares_are_exact_at_any_distance() -> None:
    case, rng = BY_NAME["gaussian"], np.random.default_rng(1)
    V, seen = np.nan_to_num(case.dense), ~np.isnan(case.dense)
    with case.open() as data:
        problem = posed(case, data, 2)
        W, H = problem.starts
        a, b = rng.standard_normal(W.shape), rng.standard_normal(H.shape)
        by_w, by_h = stein_descent.second_derivative(problem, (W, H), (a, b))
    for m in range(2):
        residual = seen * (V - W[m] @ H[m])
        change = seen * (a[m] @ H[m] + W[m] @ b[m])
        np.testing.assert_allclose(by_w[m], change @ H[m].T - residual @ b[m].T, rtol=1e-10)
        np.testing.assert_allclose(by_h[m], W[m].T @ change - a[m].T @ residual, rtol=1e-10)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("step", ["auto", 0.3])
@pytest.mark.parametrize("name", ["silf, in the transition", "frozen"])
def test_it_never_ends_worse_than_it_starts(name: str, step: Any, dtype: str) -> None:
    case, history, told = BY_NAME[name], state.History(), []
    with case.open(dtype=dtype) as data:
        problem = posed(case, data, 4)
        made = SteinDescent(25, step).make(
            problem, 4, 0, lambda done, of: told.append((done, of)), history
        )
        end = square(problem, made.W, made.H)
    levels = np.array([level for _, level in history])
    assert told == [(done, 25) for done in range(1, 26)]
    assert len(levels) == 26
    assert end == pytest.approx(levels.min() ** 2, rel=1e-6 if dtype == "float64" else 1e-2)
    if step == "auto":
        assert np.all(np.diff(levels) <= 0)
        assert levels[-1] < 0.9 * levels[0]
    assert made.W.dtype == made.H.dtype == dtype
    assert made.W.min() >= 0
    assert made.H.min() >= 0
    if isinstance(case.model, SILFNMF):
        np.testing.assert_allclose(made.W.sum(axis=1), 1.0, rtol=1e-6)
    else:
        frozen = case.model.frozen[0]
        np.testing.assert_array_equal(
            made.W[:, :, frozen], problem.starts[0][:, :, frozen].astype(dtype)
        )


def test_the_best_is_kept_where_fixed_steps_lead_up() -> None:
    case, history = BY_NAME["frozen"], state.History()
    with case.open() as data:
        problem = posed(case, data, 4)
        made = SteinDescent(8, 1.0).make(problem, 4, 0, quiet, history)
    assert history[-1][1] > history[0][1] == min(level for _, level in history)
    np.testing.assert_array_equal(made.W, problem.starts[0])


def test_it_stops_where_nothing_leads_down() -> None:
    """One particle where the likelihood is flat: its discrepancy is the same everywhere."""
    case, told = Problem("flat", SILFNMF(2, threshold=1e9), *2 * (BY_NAME["gamma"].V,)), []
    with case.open() as data:
        problem = posed(case, data, 1)
        made = SteinDescent(500).make(problem, 1, 0, lambda *at: told.append(at))
    assert 20 < made.n_iter[0] < 60
    assert told[-1] == (500, 500)
    np.testing.assert_allclose(made.H, problem.starts[1])


def test_executors_give_the_same_bits() -> None:
    case = BY_NAME["silf, above"]
    with case.open(3, "float32") as data:
        lanes = LanesExecutor(3)
        one, other = (
            SteinDescent(5).make(posed(case, data, 3, executor=own), 3, 0, quiet)
            for own in (SerialExecutor(), lanes)
        )
        lanes.close()
    np.testing.assert_array_equal(one.W, other.W)
    np.testing.assert_array_equal(one.H, other.H)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"step": -1.0}, "step must be a positive"),
        ({"step": "fast"}, "step must be"),
    ],
)
def test_bad_options(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SteinDescent(**settings)
