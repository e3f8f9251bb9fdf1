"""Sparse kernels against their twins, and what only they can get wrong."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskfactor.kernels.sparse import CHUNK, sparse_kernels
from daskfactor.kernels.views import SparseBlock, Workspace
from daskfactor.models.tweedie_law import Tweedie
from tests.kernels import reference_sparse
from tests.kernels.sparse_problem import FLOOR, RULES, ZEROS, factor_pair, in_threads, sparse_block

EVERY_RULE = pytest.mark.parametrize(("beta", "zeros"), RULES)
K = 11
SINGLE, DOUBLE = (np.float32, 1e-5), (np.float64, 1e-12)
# A kernel is compiled for every rule, K and dtype: not every combination is tried.
LAW = FLOOR, ()
CHIEF = [(1.0, False), *ZEROS]
CASES = pytest.mark.parametrize(
    ("beta", "zeros", "dtype", "tolerance"),
    [(*rule, *SINGLE) for rule in RULES] + [(*rule, *DOUBLE) for rule in CHIEF],
)
KERNELS = {
    "gradient": ((1.7, FLOOR), "mn"),
    "gradient_curvature": ((1.7, FLOOR), "mnmn"),
    "multiplicative_rows": ((FLOOR,), "mm"),
    "multiplicative_cols": ((FLOOR,), "nn"),
}
CHIEF_RULES = pytest.mark.parametrize(("beta", "zeros"), CHIEF)
NONE = (np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0), np.zeros(0), 1)


def call(name, block, beta, W, H):
    """Outputs of a kernel on arrays that were 7 before."""
    scalars, axes = KERNELS[name]
    out = [np.full_like(W if axis == "m" else H, 7.0) for axis in axes]
    scratch = Workspace().sums(W.shape[1], W.dtype)
    kernel = getattr(sparse_kernels(Tweedie(beta), block.zeros, W.shape[1]), name)
    kernel(block.arguments, W, H, *scalars[:-1], LAW, tuple(out), scratch)
    return out


def exact(name, block, beta, W, H):
    """The same from the twin, in float64."""
    scalars, axes = KERNELS[name]
    out = [np.full((W if axis == "m" else H).shape, 7.0) for axis in axes]
    arguments = (*block[:3], W.astype(float), H.astype(float), *scalars, *out)
    getattr(reference_sparse, name)(*arguments, beta, block.zeros)
    return out


def check(name, block, beta, W, H, tolerance):
    for ours, theirs in zip(
        call(name, block, beta, W, H), exact(name, block, beta, W, H), strict=True
    ):
        scale = max(np.abs(theirs).max(), 1.0)  # sums of cancelling terms may be zero
        np.testing.assert_allclose(ours / scale, theirs / scale, rtol=0, atol=tolerance)


def evaluation(block, beta, W, H, cells=NONE):
    """Sums of the kernel and of its twin."""
    ours, theirs = np.array([10.0, 20.0]), np.array([10.0, 20.0])
    copies = [tuple(np.copy(part) for part in cells[:4]) for _ in range(2)]
    scratch = Workspace().sums(W.shape[1], W.dtype)
    kernel = sparse_kernels(Tweedie(beta), block.zeros, W.shape[1]).evaluate
    kernel(block.arguments, W, H, LAW, ours, (*copies[0], cells[4]), scratch)
    wide = (W.astype(float), H.astype(float))
    reference_sparse.evaluate(
        *block[:3], *wide, FLOOR, theirs, *copies[1], cells[4], beta, block.zeros
    )
    return (ours, *copies[0][2:]), (theirs, *copies[1][2:])


@CASES
def test_kernels_equal_their_twins(beta, zeros, dtype, tolerance):
    cells = (
        np.array([0, 0, 15, 16, 52], np.int32),
        np.array([0, 30, 2, 3, 30], np.int32),
        np.ones(5),
        np.full(5, 0.5),
        3,
    )
    block, factors = sparse_block(dtype, 53, 31, zeros), factor_pair(dtype, 53, 31, K)
    for name in KERNELS:
        check(name, block, beta, *factors, tolerance)
    assert block.values.size > CHUNK
    ours, theirs = evaluation(block, beta, *factors, cells)
    for got, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, expected, rtol=tolerance)


@pytest.mark.parametrize("components", [1, 8, 17, 50, 64, 300])
def test_any_number_of_components(components):
    block = sparse_block(np.float32, 40, 23, zeros=False)
    check("gradient", block, 1.0, *factor_pair(np.float32, 40, 23, components), 1e-5)


def blocks(zeros):
    """Any block: rows and columns without an entry, blocks without any, and full ones."""
    return st.builds(
        sparse_block,
        dtype=st.just(np.float64),
        m=st.integers(1, 40),
        n=st.integers(1, 40),
        zeros=st.just(zeros),
        density=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
        held_out=st.sampled_from([0.0, 0.3, 1.0]),
        seed=st.integers(0, 1000),
    )


@CHIEF_RULES
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_block(beta, zeros, data):
    block = data.draw(blocks(zeros))
    W, H = factor_pair(np.float64, block.m, block.n, K)
    for name in KERNELS:
        check(name, block, beta, W, H, 1e-11)
    ours, theirs = evaluation(block, beta, W, H)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-10, atol=1e-9)


@EVERY_RULE
def test_a_block_without_entries(beta, zeros):
    block = sparse_block(np.float32, 6, 5, zeros, density=0.0)
    W, H = factor_pair(np.float32, 6, 5, K)
    GW, GH = call("gradient", block, beta, W, H)
    if not zeros:
        assert not GW.any()
        assert not GH.any()
        np.testing.assert_array_equal(evaluation(block, beta, W, H)[0][0], [10.0, 20.0])
    check("gradient", block, beta, W, H, 1e-5)


@pytest.mark.parametrize(("beta", "zeros"), ZEROS)
def test_a_held_out_entry_adds_nothing(beta, zeros):
    """All entries stored and missing: the zeros' part is taken back everywhere."""
    block = sparse_block(np.float64, 9, 7, zeros, density=1.1, held_out=1.1)
    W, H = factor_pair(np.float64, 9, 7, K)
    GW, GH = call("gradient", block, beta, W, H)
    size = np.abs(W @ (H.T @ H)).max()
    np.testing.assert_allclose(GW, 0, atol=1e-12 * size)
    np.testing.assert_allclose(GH, 0, atol=1e-12 * size)
    sums = evaluation(block, beta, W, H)[0][0]
    np.testing.assert_allclose(sums, [10.0, 20.0], rtol=1e-12)


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_missing_values_that_slipped_through(beta):
    """Stored NaN where unstored entries are missing anyway: nothing, not NaN everywhere."""
    block = sparse_block(np.float32, 20, 10, zeros=False)
    block.values[::3] = np.nan
    for name in KERNELS:
        check(name, block, beta, *factor_pair(np.float32, 20, 10, K), 1e-5)
    ours, theirs = evaluation(block, beta, *factor_pair(np.float32, 20, 10, K))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)


def test_index_types_do_not_matter():
    block = sparse_block(np.float32, 30, 20, zeros=False)
    W, H = factor_pair(np.float32, 30, 20, K)
    results = []
    for pointer, index in ((np.int32, np.uint16), (np.int64, np.int32)):
        other = block._replace(
            indptr=block.indptr.astype(pointer), indices=block.indices.astype(index)
        )
        results.append(call("gradient", other, 1.0, W, H))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_last_column_of_a_block_as_wide_as_uint16_goes():
    n = 65536
    block = SparseBlock(
        np.array([0, 2], np.int32),
        np.array([0, n - 1], np.uint16),
        np.array([1.0, 2.0], np.float32),
        1,
        n,
        False,
    )
    W, H = np.ones((1, K), np.float32), np.ones((n, K), np.float32)
    _, GH = call("gradient", block, 2.0, W, H)
    expected = np.zeros_like(GH)
    expected[0], expected[-1] = 1.7 * (1 - K), 1.7 * (2 - K)
    np.testing.assert_allclose(GH, expected, rtol=1e-6)


def shifted(array, offset):
    """A copy of an array that starts ``offset`` bytes beyond a cache line."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    result = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


def test_bits_depend_on_the_content_alone():
    block = sparse_block(np.float32, 64, 37, zeros=True)
    W, H = factor_pair(np.float32, 64, 37, K)
    results = []
    for offset in (0, 4, 20):
        moved = block._replace(values=shifted(block.values, offset))
        for _ in range(2):
            found = call("gradient_curvature", moved, 1.0, shifted(W, offset), shifted(H, offset))
            results.append([*found, evaluation(moved, 1.0, W, H)[0][0]])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@CHIEF_RULES
def test_gradient_is_the_slope_of_the_log_likelihood(beta, zeros):
    block = sparse_block(np.float64, 6, 5, zeros, density=0.7)
    W, H = factor_pair(np.float64, 6, 5, K)
    GW, GH = (gradient / 1.7 for gradient in call("gradient", block, beta, W, H))
    width = 1e-5
    for factor, gradient in ((W, GW), (H, GH)):
        slopes = []
        for sign in (1, -1):
            factor[2, 1] += sign * width
            slopes.append(evaluation(block, beta, W, H)[0][0][0])
            factor[2, 1] -= sign * width
        slope = (slopes[0] - slopes[1]) / (2 * width)
        np.testing.assert_allclose(slope, gradient[2, 1], rtol=1e-6)


def test_means_below_the_floor():
    """Floored where entries are stored; the data of beta = 1 need it."""
    block = sparse_block(np.float32, 12, 9, zeros=False)
    W, H = factor_pair(np.float32, 12, 9, K)
    W[3] = 0
    W[4] = 1e-42  # denormal
    check("gradient", block, 1.0, W, H, 1e-5)
    assert np.isfinite(evaluation(block, 1.0, W, H)[0][0]).all()


def test_no_floor_for_real_valued_factors():
    block = sparse_block(np.float32, 12, 9, zeros=False)
    W, H = factor_pair(np.float32, 12, 9, K)
    W -= W.mean()
    GW, GH = np.empty_like(W), np.empty_like(H)
    scratch = Workspace().sums(K, np.float32)
    kernel = sparse_kernels(Tweedie(2.0), False, K).gradient
    kernel(block.arguments, W, H, 1.0, (-np.inf, ()), (GW, GH), scratch)
    expected = [np.empty_like(W), np.empty_like(H)]
    reference_sparse.gradient(*block[:3], W, H, 1.0, -np.inf, *expected, 2.0, False)
    np.testing.assert_allclose(GW, expected[0], atol=1e-4)
    np.testing.assert_allclose(GH, expected[1], atol=1e-4)


@CHIEF_RULES
def test_a_diverged_factor_shows(beta, zeros):
    block = sparse_block(np.float32, 20, 10, zeros)
    W, H = factor_pair(np.float32, 20, 10, K)
    W[4, 1] = np.nan
    GW, GH = call("gradient", block, beta, W, H)
    assert np.isnan(GW).any() or np.isnan(GH).any()
    assert np.isnan(evaluation(block, beta, W, H)[0][0]).all()


def test_read_only_data():
    block = sparse_block(np.float32, 20, 10, zeros=False)
    for part in block[:3]:
        part.flags.writeable = False
    check("gradient", block, 1.0, *factor_pair(np.float32, 20, 10, K), 1e-5)


def test_threads_do_not_share_anything():
    problems = [sparse_block(np.float32, 200, 40, zeros=True, seed=seed) for seed in range(4)]
    W, H = factor_pair(np.float32, 200, 40, K)
    alone = [call("gradient", block, 1.0, W, H) for block in problems]
    together = [[] for _ in problems]

    def work(block, results):
        results.extend(call("gradient", block, 1.0, W, H) for _ in range(30))

    in_threads(work, zip(problems, together, strict=True))
    for ours, theirs in zip(alone, together, strict=True):
        assert len(theirs) == 30
        for other in theirs:
            np.testing.assert_array_equal(ours[0], other[0])
            np.testing.assert_array_equal(ours[1], other[1])


def test_kernels_are_made_once():
    assert sparse_kernels(Tweedie(1), 0, 5) is sparse_kernels(Tweedie(1.0), False, 5)
