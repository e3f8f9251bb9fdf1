import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskfactor.kernels.dense import dense_kernels
from daskfactor.kernels.views import NO_WEIGHTS, Workspace
from daskfactor.models.tweedie_law import Tweedie
from tests.kernels import reference
from tests.kernels.sparse_problem import FLOOR, in_threads
from tests.pairwise import pairwise

BETAS = (2.0, 1.0, 0.5, 0.0, -1.0, 0.3, 3.0)
EVERY_BETA = pytest.mark.parametrize("beta", BETAS)

# Every law and type is compiled anew. Factors are float32 unless somebody asks for more, so all
# laws are tried in it; a rule of one law and the general rule in both.
RULES = pytest.mark.parametrize(
    ("beta", "dtype", "tolerance"),
    [(beta, np.float32, 1e-4) for beta in BETAS]
    + [(beta, np.float64, 1e-10) for beta in (1.0, 0.3)],
)
LAW = FLOOR, ()


class Problem:
    """A block inside a larger V, with everything a kernel needs, in two precisions."""

    def __init__(self, beta, dtype, m, n, K, offset=(2, 3), missing=0.2, tile=None, seed=0):
        rng = np.random.default_rng(seed)
        self.beta, self.dtype = beta, dtype
        V = rng.gamma(2.0, size=(m + 4, n + 5)) + 0.05
        if beta > 0:
            V[rng.random(V.shape) < 0.2] = 0
        V[rng.random(V.shape) < missing] = np.nan
        W = rng.gamma(2.0, size=(m, K)) + 0.01
        H = rng.gamma(2.0, size=(n, K)) / (2 * K) + 0.01
        self.block = (V.astype(dtype), *offset, W.astype(dtype), H.astype(dtype))
        self.shapes = {"m": (m, K), "n": (n, K)}
        self.window = (*self.block[:3], NO_WEIGHTS)
        tiles = (np.full((tile or m, n), np.nan, dtype) for _ in range(2))
        self.tiles = (*tiles, np.full((2, n), np.nan, dtype))

    def outputs(self, *axes):
        """Filled arrays for the kernel and for the twin, so that a missed write shows."""
        return [
            [np.full(self.shapes[axis], 7.0, dtype) for axis in axes]
            for dtype in (self.dtype, np.float64)
        ]

    @property
    def wide_block(self):
        V, row0, col0, W, H = self.block
        return V.astype(float), row0, col0, W.astype(float), H.astype(float)

    def check(self, name, scalars, axes, tolerance):
        got, exact = self.outputs(*axes)
        kernel = getattr(dense_kernels(Tweedie(self.beta)), name)
        kernel(self.window, *self.block[3:], *scalars[:-1], LAW, tuple(got), self.tiles)
        getattr(reference, name)(*self.wide_block, *scalars, *exact, self.beta)
        for ours, theirs in zip(got, exact, strict=True):
            scale = max(np.abs(theirs).max(), np.finfo(self.dtype).tiny)
            np.testing.assert_allclose(ours / scale, theirs / scale, rtol=0, atol=tolerance)

    def check_all(self, tolerance):
        self.check("gradient", (1.7, FLOOR), "mn", tolerance)
        self.check("gradient_curvature", (1.7, FLOOR), "mnmn", tolerance)
        self.check("multiplicative_rows", (FLOOR,), "mm", tolerance)
        self.check("multiplicative_cols", (FLOOR,), "nn", tolerance)


@RULES
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_kernels_equal_their_twins(beta, dtype, tolerance, missing):
    Problem(beta, dtype, 53, 31, 11, missing=missing, tile=16).check_all(tolerance)


@pairwise(
    real=[(np.float32, 1e-4), (np.float64, 1e-10)],
    shape=[(1, 1, 1), (1, 9, 2), (9, 1, 4), (7, 5, 3), (5, 7, 20), (130, 3, 1)],
    tile=[1, 4, None],
)
def test_odd_shapes(real, shape, tile):
    (dtype, tolerance), (m, n, K) = real, shape
    tile = None if tile is None else min(tile, m)
    Problem(1.0, dtype, m, n, K, tile=tile).check_all(tolerance)
    Problem(1.0, dtype, m, n, K, missing=0.0, tile=tile, offset=(0, 0)).check_all(tolerance)


@settings(max_examples=25)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    K=st.integers(1, 20),
    tile=st.integers(1, 45),
    row0=st.integers(0, 4),
    col0=st.integers(0, 5),
    beta=st.sampled_from([1.0, 0.3]),
)
def test_any_shape_and_offset(m, n, K, tile, row0, col0, beta):
    Problem(beta, np.float64, m, n, K, (row0, col0), tile=tile).check_all(1e-10)


def evaluate(problem, cells, count=1, previous=None):
    """Outputs of the kernel and of its twin: sums, mean, m2."""
    rows, cols = (np.array(axis, np.int32) for axis in zip(*cells, strict=True))
    results = []
    for wide in (False, True):
        out = np.array([10.0, 20.0])
        mean, m2 = np.zeros((2, len(rows))) if previous is None else np.copy(previous)
        monitored = (out, rows, cols, mean, m2, count)
        if wide:
            reference.evaluate(*problem.wide_block, FLOOR, *monitored, problem.beta)
        else:
            kernel = dense_kernels(Tweedie(problem.beta)).evaluate
            kernel(problem.window, *problem.block[3:], LAW, out, monitored[1:], problem.tiles)
        results.append((out, mean, m2))
    return results


@EVERY_BETA
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-12)])
def test_evaluate_equals_its_twin(beta, dtype, tolerance):
    problem = Problem(beta, dtype, 53, 31, 11, tile=16)
    cells = [(0, 0), (0, 30), (15, 2), (16, 2), (16, 3), (52, 30)]
    ours, exact = evaluate(problem, cells, 3, np.array([[1.0] * 6, [0.5] * 6]))
    for got, expected in zip(ours, exact, strict=True):
        np.testing.assert_allclose(got, expected, rtol=tolerance)


def test_evaluate_reads_monitored_means_before_the_floor():
    problem = Problem(1.0, np.float64, 4, 4, 2, missing=0.0)
    problem.block[3][:] = 0
    (out, mean, _), (expected, _, _) = evaluate(problem, [(1, 1)])
    assert mean == 0
    np.testing.assert_allclose(out, expected)


def test_evaluate_skips_missing_entries():
    problem = Problem(1.0, np.float32, 20, 10, 3, missing=1.1)
    out, _, _ = evaluate(problem, [(0, 0)])[0]
    np.testing.assert_array_equal(out, [10.0, 20.0])


@pairwise(
    beta=BETAS,
    real=[(np.float32, 2e-6), (np.float64, 1e-13)],
    distance=[0.0, 1e-3, 0.02, 0.05, 0.3, 0.5, 1.0, 30.0],
)
def test_deviance_has_no_cancellation(beta, real, distance):
    # One row, K = 1: mu is exactly W; the twin computes in extended precision.
    dtype, tolerance = real
    mu = np.array([[0.37, 1.0, 250.0]]).astype(dtype)
    v = (mu.astype(float) * (1 + distance)).astype(dtype)
    out, none = np.zeros(2), np.zeros(0, np.int32)
    arguments = (out, (none, none, np.zeros(0), np.zeros(0), 1), scratch(3, dtype))
    dense_kernels(Tweedie(beta)).evaluate(
        (v, 0, 0, NO_WEIGHTS), np.ones((1, 1), dtype), mu.T.copy(), LAW, *arguments
    )
    wide_v, wide_mu = v.astype(np.longdouble), mu.astype(np.longdouble)
    exact = deviance_by_definition(wide_v, wide_mu, beta).sum()
    slack = np.finfo(np.longdouble).eps * 1e3 * float(np.abs(wide_v).max() ** max(beta, 1))
    assert abs(-out[0] - exact) <= max(tolerance * exact, slack)


def scratch(n, dtype):
    return np.zeros((1, n), dtype), np.zeros((1, n), dtype), np.zeros((2, n), dtype)


def deviance_by_definition(v, mu, beta):
    if beta == 1:
        return v * np.log(v / mu) - v + mu
    if beta == 0:
        return v / mu - np.log(v / mu) - 1
    b = np.longdouble(beta)
    return v**b / (b * (b - 1)) - v * mu ** (b - 1) / (b - 1) + mu**b / b


@pytest.mark.parametrize("beta", [2.0, 1.0, 0.5, 0.3, 0.01, 3.0])
def test_deviance_of_a_zero(beta):
    v, W = np.zeros((1, 1)), np.full((1, 1), 2.5)
    out, none = np.zeros(2), np.zeros(0, np.int32)
    arguments = (out, (none, none, np.zeros(0), np.zeros(0), 1), scratch(1, float))
    dense_kernels(Tweedie(beta)).evaluate(
        (v, 0, 0, NO_WEIGHTS), W, np.ones((1, 1)), LAW, *arguments
    )
    np.testing.assert_allclose(-out[0], 2.5**beta / beta, rtol=1e-13)
    np.testing.assert_allclose(out[1], 2.5**beta, rtol=1e-13)


@pytest.mark.parametrize("limit", [0.0, 1.0])
@pytest.mark.parametrize("distance", [1e-11, 1e-5])
def test_continuous_in_beta(limit, distance):
    cells = [(0, 0)]
    at_limit, near = (
        evaluate(Problem(beta, np.float64, 30, 20, 4, missing=0.1), cells)[0][0]
        for beta in (limit, limit - distance)
    )
    np.testing.assert_allclose(near, at_limit, rtol=20 * distance + 1e-12)


@EVERY_BETA
def test_gradient_is_the_slope_of_the_log_likelihood(beta):
    problem = Problem(beta, np.float64, 6, 5, 2)
    W, H = problem.block[3:]
    GW, GH = problem.outputs("m", "n")[0]
    kernel = dense_kernels(Tweedie(beta)).gradient
    kernel(problem.window, W, H, 1.0, LAW, (GW, GH), problem.tiles)
    for factor, grad in ((W, GW), (H, GH)):
        width = 1e-5
        slopes = []
        for sign in (1, -1):
            factor[2, 1] += sign * width
            slopes.append(evaluate(problem, [(0, 0)])[0][0][0])
            factor[2, 1] -= sign * width
        np.testing.assert_allclose((slopes[0] - slopes[1]) / (2 * width), grad[2, 1], rtol=1e-6)


def test_data_may_have_another_dtype():
    problem = Problem(1.0, np.float32, 20, 10, 3, missing=0.0)
    V, *rest = problem.block
    whole = np.rint(V).astype(np.int64)
    results = []
    for data in (whole, whole.astype(np.float32)):
        GW, GH = problem.outputs("m", "n")[0]
        kernel = dense_kernels(Tweedie(1.0)).gradient
        kernel((data, *rest[:2], NO_WEIGHTS), *rest[2:], 1.0, LAW, (GW, GH), problem.tiles)
        results.append(GW)
    np.testing.assert_array_equal(*results)


def test_a_diverged_factor_shows():
    problem = Problem(1.0, np.float32, 20, 10, 3, missing=0.0)
    problem.block[3][4, 1] = np.nan
    GW, GH = problem.outputs("m", "n")[0]
    kernel, factors = dense_kernels(Tweedie(1.0)).gradient, problem.block[3:]
    kernel(problem.window, *factors, 1.0, LAW, (GW, GH), problem.tiles)
    assert np.isnan(GW[4]).all()
    assert np.isnan(evaluate(problem, [(0, 0)])[0][0]).all()


def test_read_only_data():
    problem = Problem(1.0, np.float32, 20, 10, 3)
    problem.block[0].flags.writeable = False
    problem.check("gradient", (1.0, FLOOR), "mn", 1e-4)


def test_threads_do_not_share_scratch():
    problems = [Problem(1.0, np.float32, 200, 40, 16, seed=seed) for seed in range(4)]
    kernel = dense_kernels(Tweedie(1.0)).gradient
    alone, together = ([p.outputs("m", "n")[0] for p in problems] for _ in range(2))
    for problem, outputs in zip(problems, alone, strict=True):
        kernel(problem.window, *problem.block[3:], 1.0, LAW, tuple(outputs), problem.tiles)

    def work(problem, outputs):
        for _ in range(50):
            kernel(problem.window, *problem.block[3:], 1.0, LAW, tuple(outputs), problem.tiles)

    in_threads(work, zip(problems, together, strict=True))
    for ours, theirs in zip(alone, together, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(a).max())


def test_kernels_are_made_once():
    assert dense_kernels(Tweedie(1)) is dense_kernels(Tweedie(1.0))


def test_workspace_buffers_fit_the_kernels():
    workspace = Workspace(np.float32)
    for m, n, K in ((300, 40, 8), (7, 5, 3), (1, 1, 1)):
        problem = Problem(0.5, np.float32, m, n, K)
        (tile, tile2, line), (GW, GH) = workspace.tiles(m, n, K), workspace.gradients(m, n, K)
        kernel = dense_kernels(Tweedie(0.5)).gradient
        kernel(problem.window, *problem.block[3:], 1.0, LAW, (GW, GH), (tile, tile2, line))
        exact = problem.outputs("m", "n")[1]
        reference.gradient(*problem.wide_block, 1.0, FLOOR, *exact, 0.5)
        np.testing.assert_allclose(GW, exact[0], rtol=1e-3, atol=1e-4 * np.abs(exact[0]).max())
        assert tile.shape == tile2.shape
