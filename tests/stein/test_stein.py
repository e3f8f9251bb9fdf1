"""The Stein matrix against loops over pairs, and however its particles are kept."""

import dask.array as da
import numpy as np
import pytest
import zarr
from numpy.testing import assert_allclose, assert_array_equal

from daskfactor.executors import LanesExecutor, SerialExecutor, TasksExecutor
from daskfactor.models.silf import SILFNMF
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.stein.kernel import Block
from daskfactor.stein.particles import BandScore, Particles, products
from tests.stein import naive
from tests.stein.posed import KERNEL, posed
from tests.stein.problems import BY_NAME, PROBLEMS, Problem


def matrix(
    problem,
    count=5,
    blocks=2,
    *,
    kernel=KERNEL,
    tangent=False,
    executor=None,
    kept=None,
    dtype="float64",
):
    """The Stein matrix of a problem's particles; ``kept`` changes how they are kept."""
    W, H = problem.particles(count)
    if kept is not None:
        W, H = kept("W", W), kept("H", H)
    with problem.open(blocks, dtype) as data:
        settings = {"executor": executor or SerialExecutor(), "kernel": kernel, "tangent": tangent}
        return posed(problem, data, **settings).stein_matrix(Particles.of(W, H, data))


def expected(problem, count=5, tangent=False):
    W, H = problem.particles(count)
    lost, free = 0, np.ones(problem.model.n_components, bool)
    with problem.open(1) as data:
        if data.row_order is not None and data.col_order is not None:
            W, H = W[:, data.row_order], H[:, :, data.col_order]
        found = posed(problem, data).scores(Particles.of(*problem.particles(count), data))
    by_w = found.W
    if tangent:
        by_w = by_w - by_w.mean(axis=1, keepdims=True)
        lost = problem.model.n_components
    if isinstance(problem.model, TweedieNMF) and problem.model.frozen[0] is not None:
        free = ~problem.model.frozen[0]
    points = naive.points_of(W[:, :, free], H, by_w[:, :, free], found.H)
    return naive.stein_matrix(points, KERNEL, lost)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_matrix_is_that_of_a_loop_over_pairs(problem):
    found = matrix(problem).matrix
    assert_allclose(found, expected(problem), rtol=1e-8)
    assert_array_equal(found, found.T)


def test_scores_along_the_simplex():
    problem = BY_NAME["silf, above"]
    found = matrix(problem, tangent=True).matrix
    assert_allclose(found, expected(problem, tangent=True), rtol=1e-8)
    assert not np.allclose(found, matrix(problem).matrix, rtol=1e-3)


@pytest.mark.parametrize("name", ["silf, above", "poisson, zeros"])
def test_matrix_is_positive_semidefinite(name):
    found = matrix(BY_NAME[name], 12).matrix
    values = np.linalg.eigvalsh(found)
    assert values[0] > -1e-10 * values[-1]


@pytest.mark.parametrize("name", ["silf, above", "gaussian, missing, permuted"])
def test_blocks_make_no_difference(name):
    whole = matrix(BY_NAME[name], blocks=1).matrix
    for blocks in (2, 3):
        assert_allclose(matrix(BY_NAME[name], blocks=blocks).matrix, whole, rtol=1e-10)


def test_slabs_make_no_difference(monkeypatch):
    problem = BY_NAME["silf, above"]
    for tangent in (False, True):
        whole = matrix(problem, tangent=tangent).matrix
        with monkeypatch.context() as patch:
            patch.setattr("daskfactor.stein.particles.SLAB_BYTES", 1)
            found = matrix(problem, tangent=tangent).matrix
        assert_allclose(found, whole, rtol=1e-10)


def test_executors_give_the_same_bits():
    problem = BY_NAME["silf, above"]
    one = matrix(problem, blocks=3, dtype="float32").matrix
    for executor in (LanesExecutor(3), TasksExecutor()):
        other = matrix(problem, blocks=3, dtype="float32", executor=executor).matrix
        assert_array_equal(other, one)
        executor.close()


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

    problem = BY_NAME[name]
    assert_array_equal(matrix(problem, kept=kept).matrix, matrix(problem).matrix)


def test_lazy_particles_are_read_once_if_there_is_room(monkeypatch):
    problem = BY_NAME["silf, above"]
    W, H = (da.from_array(one) for one in problem.particles(3))
    with problem.open() as data:
        particles = Particles.of(W, H, data)
        assert type(particles.loaded().W) is np.ndarray
        monkeypatch.setattr("daskfactor.stein.particles.memory_budget", lambda limit: 10)
        assert particles.loaded() is particles


def test_near_duplicates_keep_their_distance():
    """Centring: |x - y|² of 1e-7 beside a common offset of 1000, and what scores make of it."""
    rng = np.random.default_rng(0)
    spread = np.array([0.0, 1e-4, 1.0])[:, None, None]
    x = 1e3 + spread * rng.standard_normal((25, 2))
    s = 1e3 + spread * rng.standard_normal((3, 25, 2))
    band = BandScore(x, s, np.full(3, -1.0), 0.0, 0.0, np.ones(2))
    found = Block.of(*products(band)[:3], 50)
    apart = x[:, None] - x
    assert_allclose(found.r2, (apart**2).sum(axis=(2, 3)), rtol=1e-6)
    cross = ((s[:, None] - s) * apart).sum(axis=(2, 3))
    assert_allclose(found.cross, cross, rtol=1e-6)


def test_equal_particles():
    problem = BY_NAME["silf, above"]
    found = matrix(problem, kept=lambda name, values: np.repeat(values[:1], 3, axis=0)).matrix
    assert_allclose(found, found[0, 0], rtol=1e-10)


def test_one_particle_has_the_trace_and_its_score():
    problem = BY_NAME["silf, above"]
    with problem.open() as data:
        found = posed(problem, data).scores(Particles.of(*problem.particles(1), data))
    square = float((found.W**2).sum() + (found.H**2).sum())
    W, H = problem.particles(1)
    trace = W.size * 0.5 / KERNEL.scale_w**2 + H.size * 0.3 / KERNEL.scale_h**2
    assert matrix(problem, 1).matrix[0, 0] == pytest.approx(square + trace, rel=1e-10)


def test_flat_posterior_leaves_the_prior_and_the_trace():
    """Below the threshold the score is -λ for H, 0 for W."""
    problem = Problem("flat", SILFNMF(2, threshold=1e9, rate=0.5), *2 * (BY_NAME["gamma"].V,))
    W, H = problem.particles(4)
    points = naive.points_of(W, H, 0 * W, np.full_like(H, -0.5))
    assert_allclose(matrix(problem, 4).matrix, naive.stein_matrix(points, KERNEL), rtol=1e-9)
