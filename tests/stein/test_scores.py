"""Scores against finite differences of the log density, for every kind of data."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from daskfactor.executors import LanesExecutor, SerialExecutor
from daskfactor.models.silf import SILFNMF
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.stein.particles import Particles
from tests.stein.posed import posed
from tests.stein.problems import BY_NAME, PROBLEMS


def scored(problem, count=3, blocks=2, dtype="float64"):
    """In the caller's order of rows and columns."""
    with problem.open(blocks, dtype) as data:
        found = posed(problem, data).scores(Particles.of(*problem.particles(count), data))
        row, col = data.row_order, data.col_order
        if row is None or col is None:
            return found
        W, H = np.empty_like(found.W), np.empty_like(found.H)
        W[:, row], H[:, :, col] = found.W, found.H
        return found._replace(W=W, H=H)


def numeric(problem, W, H):
    out = []
    for own, density in (
        (W, lambda x: problem.log_density(x, H)),
        (H, lambda x: problem.log_density(W, x)),
    ):
        gradient = np.empty_like(own)
        for at in np.ndindex(own.shape):
            step = np.zeros_like(own)
            step[at] = 1e-6 * max(1e-2, own[at])
            gradient[at] = (density(own + step) - density(own - step)) / (2 * step[at])
        out.append(gradient)
    return out[0], out[1]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_scores_are_gradients_of_the_log_density(problem):
    found = scored(problem)
    W, H = problem.particles(3)
    for at in range(3):
        by_w, by_h = numeric(problem, W[at], H[at])
        if isinstance(problem.model, TweedieNMF):
            for gradient, mask in zip((by_w, by_h.T), problem.model.frozen, strict=True):
                if mask is not None:
                    gradient[:, mask] = 0.0
        scale = max(np.abs(by_w).max(), np.abs(by_h).max())
        assert_allclose(found.W[at], by_w, rtol=1e-5, atol=1e-6 * scale)
        assert_allclose(found.H[at], by_h, rtol=1e-5, atol=1e-6 * scale)
    expected = [problem.log_density(*pair) for pair in zip(W, H, strict=True)]
    assert_allclose(found.log_density, expected, rtol=1e-10)


def test_the_problems_cover_the_transition_of_the_loss():
    """Else slopes of 0 and 1 are all that is tested."""
    problem = BY_NAME["silf, in the transition"]
    assert isinstance(problem.model, SILFNMF)
    slopes = [
        problem.model.slope(problem.model.objective(problem.dense, *pair))
        for pair in zip(*problem.particles(3), strict=True)
    ]
    assert all(-1.9 < slope < -0.1 for slope in slopes)


@pytest.mark.parametrize("name", ["silf, above", "poisson, zeros", "gaussian, missing, permuted"])
def test_blocks_make_no_difference(name):
    problem = BY_NAME[name]
    whole = scored(problem, blocks=1)
    for blocks in (2, 3):
        parts = scored(problem, blocks=blocks)
        for one, other in zip(whole, parts, strict=True):
            assert_allclose(other, one, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["silf, above", "poisson, zeros"])
def test_executors_give_the_same_bits(name):
    problem = BY_NAME[name]
    with problem.open(3, "float32") as data:
        particles = Particles.of(*problem.particles(4), data)
        lanes = LanesExecutor(3)
        here, there = (
            posed(problem, data, executor=own).scores(particles)
            for own in (SerialExecutor(), lanes)
        )
        for one, other in zip(here, there, strict=True):
            assert_array_equal(one, other)
        lanes.close()


def test_single_precision_is_near_double():
    problem = BY_NAME["silf, above"]
    wide, narrow = scored(problem), scored(problem, dtype="float32")
    assert narrow.W.dtype == np.float32
    assert_allclose(narrow.W, wide.W, rtol=1e-3, atol=1e-4 * np.abs(wide.W).max())
    assert_allclose(narrow.H, wide.H, rtol=1e-3, atol=1e-4 * np.abs(wide.H).max())


def test_the_models_own_score_agrees():
    problem = BY_NAME["silf, above"]
    model, V = problem.model, problem.dense
    assert isinstance(model, SILFNMF)
    found = scored(problem, 1)
    W, H = (one[0] for one in problem.particles(1))
    residual = np.nan_to_num(V - W @ H)
    by_w, by_h = model.score(model.objective(V, W, H), -2 * residual @ H.T, -2 * W.T @ residual)
    assert_allclose(found.W[0], by_w, rtol=1e-9)
    assert_allclose(found.H[0], by_h, rtol=1e-9)
    with problem.open() as data:
        posterior = posed(problem, data)
        sums = posterior.divergences(Particles.of(W[None], H[None], data))
    assert posterior.objectives(sums)[0] == pytest.approx(model.objective(V, W, H), rel=1e-12)
    assert found.divergence[0] == sums[0]
