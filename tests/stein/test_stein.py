"""The Stein matrix against loops over pairs, and however its particles are kept."""

from itertools import combinations

import dask.array as da
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy import optimize

from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.executors import LanesExecutor, TasksExecutor
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.stein import discrepancy, stein_weights
from daskfactor.stein.kernel import IMQ, Block, Multiquadric
from daskfactor.stein.particles import BandScore, Particles, products
from daskfactor.stein.silf import SILFNMF
from tests.refusals import refused
from tests.stein import naive
from tests.stein.posed import KERNEL, posed
from tests.stein.problems import BY_NAME, PROBLEMS, Problem

ABOVE = BY_NAME["silf, above"]


def matrix(problem, count=5, blocks=2, *, kept=lambda _, values: values, dtype="float64", **more):
    """The Stein matrix of a problem's particles; ``kept`` changes how they are kept."""
    W, H = problem.particles(count)
    with problem.open(blocks, dtype) as data:
        particles = Particles.of(kept("W", W), kept("H", H), data)
        return posed(problem, data, **more).stein_matrix(particles).matrix


def expected(problem, count=5, tangent=False):
    W, H = problem.particles(count)
    found, model = scored(problem, count, blocks=1), problem.model
    free = np.ones(model.n_components, bool)
    if isinstance(model, TweedieNMF) and model.frozen[0] is not None:
        free = ~model.frozen[0]
    by_w = found.W - (found.W.mean(axis=1, keepdims=True) if tangent else 0)
    points = naive.points_of(W[:, :, free], H, by_w[:, :, free], found.H)
    return naive.stein_matrix(points, KERNEL, tangent * model.n_components)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_matrix_is_that_of_a_loop_over_pairs(problem):
    found = matrix(problem)
    assert_allclose(found, expected(problem), rtol=1e-8)
    assert_array_equal(found, found.T)


def test_scores_along_the_simplex_and_slabs_that_make_no_difference(monkeypatch):
    found, straight = (matrix(ABOVE, tangent=tangent) for tangent in (True, False))
    assert_allclose(found, expected(ABOVE, tangent=True), rtol=1e-8)
    assert not np.allclose(found, straight, rtol=1e-3)
    monkeypatch.setattr("daskfactor.stein.particles.SLAB_BYTES", 1)
    assert_allclose(matrix(ABOVE, tangent=True), found, rtol=1e-10)
    assert_allclose(matrix(ABOVE), straight, rtol=1e-10)


@pytest.mark.parametrize("name", ["silf, above", "gaussian, missing, permuted"])
@pytest.mark.parametrize("kind", ["memory-mapped", "zarr", "dask", "dask on zarr"])
def test_particles_may_be_anywhere(name, kind, tmp_path):
    def kept(factor, values):
        path = tmp_path / factor
        if kind == "memory-mapped":
            np.save(path, values)
            return np.load(f"{path}.npy", mmap_mode="r")
        if kind == "dask":
            return da.from_array(values, chunks=(2, 3, 2))
        stored = zarr.create_array(path, data=values, chunks=(1, *values.shape[1:]))
        return da.from_zarr(str(path)) if "dask" in kind else stored

    assert_array_equal(matrix(BY_NAME[name], kept=kept), matrix(BY_NAME[name]))


def test_lazy_particles_are_read_once_if_there_is_room(monkeypatch):
    W, H = (da.from_array(one) for one in ABOVE.particles(3))
    with ABOVE.open() as data:
        particles = Particles.of(W, H, data)
        assert type(particles.loaded().W) is np.ndarray
        monkeypatch.setattr("daskfactor.stein.particles.memory_budget", lambda limit: 10)
        assert particles.loaded() is particles


def test_near_duplicates_keep_their_distance():
    """Centring: |x - y|² of 1e-7 beside a common offset of 1000, and what scores make of it."""
    rng, spread = np.random.default_rng(0), np.array([0.0, 1e-4, 1.0])[:, None, None]
    x = 1e3 + spread * rng.standard_normal((25, 2))
    s = 1e3 + spread * rng.standard_normal((3, 25, 2))
    band = BandScore(x, s, np.full(3, -1.0), 0.0, 0.0, np.ones(2))
    found, apart = Block.of(*products(band)[:3], 50), x[:, None] - x
    assert_allclose(found.r2, (apart**2).sum(axis=(2, 3)), rtol=1e-6)
    cross = ((s[:, None] - s) * apart).sum(axis=(2, 3))
    assert_allclose(found.cross, cross, rtol=1e-6)


def test_one_particle_has_the_trace_and_its_score_and_so_have_equal_ones():
    found, (W, H) = scored(ABOVE, 1), ABOVE.particles(1)
    square = float((found.W**2).sum() + (found.H**2).sum())
    trace = W.size * 0.5 / KERNEL.scale_w**2 + H.size * 0.3 / KERNEL.scale_h**2
    alone = matrix(ABOVE, 1)[0, 0]
    assert alone == pytest.approx(square + trace, rel=1e-10)
    equal = matrix(ABOVE, 1, kept=lambda _, values: np.repeat(values, 3, axis=0))
    assert_allclose(equal, alone, rtol=1e-10)


def test_flat_posterior_leaves_the_prior_and_the_trace():
    """Below the threshold the score is -λ for H, 0 for W."""
    problem = Problem("flat", SILFNMF(2, threshold=1e9, rate=0.5), *2 * (BY_NAME["gamma"].V,))
    W, H = problem.particles(4)
    points = naive.points_of(W, H, 0 * W, np.full_like(H, -0.5))
    assert_allclose(matrix(problem, 4), naive.stein_matrix(points, KERNEL), rtol=1e-9)


def direct(x, y, c, b):
    """Equation 7, one block."""
    return float((((x - y) ** 2).sum() + c**2) ** b / (2 * (c**2) ** b))


@pytest.mark.parametrize(("c", "b"), [(0.4, -0.5), (1.7, -0.2), (30.0, -0.9)])
def test_gradient_and_trace_are_derivatives(c, b):
    x, y = c * np.random.default_rng(0).standard_normal((2, 5))
    kernel, r2 = Multiquadric(c, b), float(((x - y) ** 2).sum())
    assert kernel.value(r2) == pytest.approx(direct(x, y, c, b), rel=1e-12)
    h = 1e-4 * c
    steps = h * np.eye(5)
    gradient = [(direct(x + e, y, c, b) - direct(x - e, y, c, b)) / (2 * h) for e in steps]
    assert_allclose(2 * kernel.slope(r2) * (x - y), gradient, rtol=1e-6, atol=1e-9 / c)
    signs = (1, 1), (1, -1), (-1, 1), (-1, -1)
    corners = [s * t * direct(x + s * e, y + t * e, c, b) for e in steps for s, t in signs]
    assert kernel.trace(r2, 5) == pytest.approx(sum(corners) / (4 * h**2), rel=1e-5)


def test_median_scales():
    points = np.array([0.0, 1.0, 4.0])
    r2 = (points[:, None] - points) ** 2
    kernel = IMQ("median", 5.0).resolve(r2, 100 * r2)
    assert (kernel.scale_w, kernel.scale_h) == (3.0, 5.0)
    assert IMQ(2.0, "median").resolve(r2, 100 * r2).scale_h == 30.0
    with pytest.raises(OptionError, match="resolved"):
        _ = IMQ("median").blocks
    assert IMQ("median", 5.0).resolve(np.zeros((3, 3)), r2).scale_w == 1.0
    assert IMQ(5.0, "median").resolve(np.zeros((1, 1)), np.zeros((1, 1))).scale_h == 1.0


def scored(problem, count=3, blocks=2, dtype="float64", **more):
    """In the caller's order of rows and columns."""
    with problem.open(blocks, dtype) as data:
        found = posed(problem, data, **more).scores(Particles.of(*problem.particles(count), data))
        row, col = data.row_order, data.col_order
        if row is None or col is None:
            return found
        W, H = np.empty_like(found.W), np.empty_like(found.H)
        W[:, row], H[:, :, col] = found.W, found.H
        return found._replace(W=W, H=H)


def numeric(problem, *pair):
    """The gradient of the log density by finite differences."""
    out = [np.empty_like(own) for own in pair]
    for n, own in enumerate(pair):
        for at in np.ndindex(own.shape):
            step = [0.0, 0.0]
            step[n] = np.zeros_like(own)
            step[n][at] = size = 1e-6 * max(1e-2, own[at])
            moved = ([x + s * d for x, d in zip(pair, step, strict=True)] for s in (1, -1))
            ends = [problem.log_density(*own) for own in moved]
            out[n][at] = (ends[0] - ends[1]) / (2 * size)
    return out


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_scores_are_gradients_of_the_log_density(problem):
    found, pairs = scored(problem), list(zip(*problem.particles(3), strict=True))
    for at, pair in enumerate(pairs):
        by_w, by_h = numeric(problem, *pair)
        if isinstance(problem.model, TweedieNMF):
            for gradient, mask in zip((by_w, by_h.T), problem.model.frozen, strict=True):
                if mask is not None:
                    gradient[:, mask] = 0.0
        scale = max(np.abs(by_w).max(), np.abs(by_h).max())
        assert_allclose(found.W[at], by_w, rtol=1e-5, atol=1e-6 * scale)
        assert_allclose(found.H[at], by_h, rtol=1e-5, atol=1e-6 * scale)
    expected = [problem.log_density(*pair) for pair in pairs]
    assert_allclose(found.log_density, expected, rtol=1e-10)


def test_the_problems_cover_the_transition_of_the_loss():
    """Else slopes of 0 and 1 are all that is tested."""
    problem = BY_NAME["silf, in the transition"]
    for pair in zip(*problem.particles(3), strict=True):
        slope = problem.model.slope(problem.model.objective(problem.dense, *pair))
        assert -1.9 < slope < -0.1


@pytest.mark.parametrize("name", ["silf, above", "poisson, zeros", "gaussian, missing, permuted"])
def test_blocks_make_no_difference(name):
    whole, pairs = scored(BY_NAME[name], blocks=1), matrix(BY_NAME[name], blocks=1)
    for blocks in (2, 3):
        for one, other in zip(whole, scored(BY_NAME[name], blocks=blocks), strict=True):
            assert_allclose(other, one, rtol=1e-10, atol=1e-10)
        assert_allclose(matrix(BY_NAME[name], blocks=blocks), pairs, rtol=1e-10)


@pytest.mark.parametrize("name", ["silf, above", "poisson, zeros"])
@pytest.mark.parametrize("kind", [lambda: LanesExecutor(3), TasksExecutor])
def test_executors_give_the_same_bits(name, kind):
    executor, given = kind(), (BY_NAME[name], 4, 3)
    here, there = (scored(*given, dtype="float32", **own) for own in ({}, {"executor": executor}))
    for one, other in zip(here, there, strict=True):
        assert_array_equal(one, other)
    pairs = matrix(*given, dtype="float32", executor=executor)
    assert_array_equal(pairs, matrix(*given, dtype="float32"))
    executor.close()


def test_single_precision_is_near_double():
    wide, narrow = scored(ABOVE), scored(ABOVE, dtype="float32")
    assert narrow.W.dtype == np.float32
    for one, other in ((narrow.W, wide.W), (narrow.H, wide.H)):
        assert_allclose(one, other, rtol=1e-3, atol=1e-4 * np.abs(other).max())


def random_matrix(seed, count, rank=None, spread=0.0):
    """Positive (semi)definite, with diagonals that differ by up to 10 ** spread."""
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((count, rank or count + 2)) + rng.standard_normal(rank or count + 2)
    root *= 10 ** (0.5 * spread * rng.random(count))[:, None]
    return np.asarray(root @ root.T)


def enumerated(K):
    """The best solution over all supports, each from its linear equations."""
    count = len(K)
    best, weights = np.inf, np.zeros(count)
    for size in range(1, count + 1):
        for support in combinations(range(count), size):
            own = list(support)
            try:
                x = np.linalg.solve(K[np.ix_(own, own)], np.ones(size))
            except np.linalg.LinAlgError:
                continue
            if x.min() < 0 or not x.sum() > 0:
                continue
            w = np.zeros(count)
            w[own] = x / x.sum()
            if w @ K @ w < best:
                best, weights = float(w @ K @ w), w
    return best, weights


@pytest.mark.parametrize("count", [2, 3, 5, 8, 12])
@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_weights_are_those_of_an_enumeration_of_supports(count, spread):
    for seed in range(4):
        K = random_matrix(seed, count, spread=spread)
        value, weights = enumerated(K)
        found = stein_weights(K)
        assert found @ K @ found == pytest.approx(value, rel=1e-8)
        assert_allclose(found, weights, atol=1e-8)


COUNTS = st.integers(1, 30)


@given(seed=st.integers(0, 10**6), count=COUNTS, rank=COUNTS, spread=st.floats(0, 24))
@settings(deadline=None)
def test_never_worse_than_equal_weights_or_one_particle(seed, count, rank, spread):
    K = random_matrix(seed, count, rank, spread)
    w, equal = stein_weights(K), np.full(count, 1 / count)
    assert w.shape == (count,)
    assert w.min() >= 0
    assert w.sum() == pytest.approx(1.0, abs=1e-12)
    value, rounding = w @ K @ w, 1e-12 * np.abs(K).max()
    assert value <= equal @ K @ equal
    assert value <= K.diagonal().min() + (rounding if count == 1 else 0.0)


def test_a_bad_particle_takes_no_digits_from_good_ones():
    good, K = random_matrix(1, 4), np.zeros((5, 5))
    K[:4, :4], K[4, 4] = good, 1e20
    w = stein_weights(K)
    assert_allclose(w[:4], enumerated(good)[1], atol=1e-8)
    assert 0 < w[4] < 1e-15


def test_singular_matrices():
    twins = np.array([[2.0, 2.0, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, 1.0]])
    w = stein_weights(twins)
    assert_allclose([w[0] + w[1], w[2]], [1 / 3, 2 / 3], atol=1e-8)
    assert_array_equal(stein_weights([[0.0, 0.0], [0.0, 1.0]]), [1.0, 0.0])
    assert_array_equal(stein_weights([[3.0]]), [1.0])
    slightly = twins - 1e-14 * np.eye(3)  # a negative eigenvalue, from rounding
    assert stein_weights(slightly).sum() == pytest.approx(1.0)


def test_a_solver_that_gives_up_is_told_of(monkeypatch):
    def give_up(*args, **options):
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr(optimize, "nnls", give_up)
    with pytest.warns(SamplingWarning, match="equal weights or the best single"):
        w = stein_weights([[1.0, 0.0], [0.0, 2.0]])
    assert_array_equal(w, [0.5, 0.5])


def test_discrepancy():
    K = np.array([[4.0, 1.0], [1.0, 2.0]])
    assert discrepancy(K) == pytest.approx(np.sqrt(2.0))
    assert discrepancy(K, [0.0, 1.0]) == pytest.approx(np.sqrt(2.0))
    assert discrepancy(K, stein_weights(K)) == pytest.approx(np.sqrt(1.75))
    assert discrepancy([[1e-20, -1e-19], [-1e-19, 1e-20]]) == 0.0


def test_matrices_and_weights_that_are_refused():
    for matrix, message in (
        (np.ones((2, 3)), "square"),
        (np.zeros((0, 0)), "square"),
        ([[1.0, np.nan], [np.nan, 1.0]], "finite"),
        ([[1.0, 0.5], [0.2, 1.0]], "symmetric"),
        ([[-1.0, 0.0], [0.0, 1.0]], "negative diagonal"),
    ):
        refused(OptionError, message, stein_weights, matrix)
    for weights in ([1.0], [0.7, 0.7], [1.5, -0.5], [np.nan, 1.0]):
        refused(OptionError, "weights must be", discrepancy, np.eye(2), weights)
