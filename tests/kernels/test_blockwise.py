"""Dispatch: a dense and a sparse view of one block give the same answers."""

import tracemalloc

import numpy as np
import pytest

from daskfactor.kernels import blockwise
from daskfactor.kernels.blockwise import SLAB, observed_values
from daskfactor.kernels.views import BlockView, SparseBlock, Workspace, index_type, pointer_type
from daskfactor.models.tweedie_law import Tweedie
from tests.kernels.sparse_problem import FLOOR, ZEROS, dense_view, factor_pair, sparse_block

RULES = pytest.mark.parametrize(("beta", "zeros"), [(1.0, False), (0.5, False), *ZEROS])
SHAPE = (150, 90, 11)


def both(zeros, density=0.1):
    """Sparse view, dense view, factors: all float32."""
    m, n, K = SHAPE
    block = sparse_block(np.float32, m, n, zeros, density)
    return block, dense_view(block, np.float32), *factor_pair(np.float32, m, n, K)


def assert_close(ours, theirs, tolerance=1e-5):
    scale = np.abs(theirs).max()
    np.testing.assert_allclose(ours / scale, theirs / scale, rtol=0, atol=tolerance)


@RULES
def test_sparse_and_dense_views_give_the_same(beta, zeros):
    sparse, dense, W, H = both(zeros)
    law, results = Tweedie(beta), []
    for view in (sparse, dense):
        first = blockwise.gradient(view, law, W, H, 2.5, FLOOR, Workspace())
        assert [own.shape for own in first] == [W.shape, H.shape]
        curvatures = np.ones_like(W), np.ones_like(H)
        second = blockwise.gradient(view, law, W, H, 2.5, FLOOR, Workspace(), curvatures)
        found = [*first, *second, *curvatures]
        for by_rows, side in ((True, W), (False, H)):
            num, den = np.ones_like(side), np.ones_like(side)
            blockwise.multiplicative(view, law, by_rows, W, H, FLOOR, (num, den), Workspace())
            found += [num, den]
        out, mean, m2 = np.array([1.0, 2.0]), np.zeros(2, np.float32), np.zeros(2, np.float32)
        cells = (np.array([0, 7], np.int32), np.array([3, 89], np.int32), mean, m2, 1)
        blockwise.evaluate(view, law, W, H, FLOOR, out, cells, Workspace())
        alone = np.array([1.0, 2.0])
        blockwise.evaluate(view, law, W, H, FLOOR, alone, None, Workspace())
        np.testing.assert_array_equal(out, alone)
        results.append([*found, *out, *mean])
    for a, b in zip(*results, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("zeros", [False, True])
def test_observed_values(zeros):
    block = sparse_block(np.float32, 150, 90, zeros)
    values, _, unstored, columns = zip(*observed_values(block, by_column=True), strict=True)
    found = np.concatenate(values)
    assert found.dtype == np.float64
    expected = dense_view(block).block
    totals = np.bincount(np.concatenate(columns), found, expected.shape[1])
    np.testing.assert_allclose(totals, np.nansum(expected, axis=0, dtype=np.float64))
    expected = expected[~np.isnan(expected)]
    assert found.size + sum(unstored) == expected.size
    np.testing.assert_allclose(found.sum(), expected.sum(), rtol=1e-12)
    assert not any(np.isnan(part).any() for part in values)


def test_observed_values_of_a_dense_block_in_slabs():
    array = np.arange(2.0 * SLAB).reshape(4, -1)
    array[1, 5] = np.nan
    slabs = list(observed_values(BlockView(array, 1, 0, 3, array.shape[1]), by_column=True))
    assert [values.size for values, *_ in slabs] == [SLAB - 1, SLAB // 2]
    assert all(zeros == 0 for _, _, zeros, _ in slabs)
    assert [columns[0] for *_, columns in slabs] == [0, 0]
    expected = array[1:][~np.isnan(array[1:])]
    np.testing.assert_array_equal(np.concatenate([values for values, *_ in slabs]), expected)


@pytest.mark.parametrize("work", [Workspace(), Workspace(np.float64)])
def test_gradients_are_buffers_of_the_workspace(work):
    sparse, _, W, H = both(zeros=False)
    first = blockwise.gradient(sparse, Tweedie(1.0), W, H, 1.0, FLOOR, work)
    second = blockwise.gradient(sparse, Tweedie(1.0), W, H, 1.0, FLOOR, work)
    assert first[0].dtype == W.dtype
    for a, b in zip(first, second, strict=True):
        assert np.shares_memory(a, b)


def test_a_workspace_may_serve_both_kinds_in_turn():
    sparse, dense, W, H = both(zeros=True)
    work = Workspace()
    fresh = [
        x.copy() for x in blockwise.gradient(sparse, Tweedie(1.0), W, H, 1.0, FLOOR, Workspace())
    ]
    blockwise.gradient(dense, Tweedie(1.0), W, H, 1.0, FLOOR, work)
    again = blockwise.gradient(sparse, Tweedie(1.0), W, H, 1.0, FLOOR, work)
    for a, b in zip(fresh, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("beta", "zeros"), [(1.0, False), (1.0, True), (2.0, True)])
def test_memory_grows_with_rows_and_columns_only(beta, zeros):
    m = n = 20_000
    rng = np.random.default_rng(0)
    indptr = np.minimum(np.arange(m + 1), 1000).astype(np.int32)
    values = rng.gamma(2.0, size=1000).astype(np.float32)
    block = SparseBlock(indptr, rng.integers(0, n, 1000).astype(np.uint16), values, m, n, zeros)
    W, H = factor_pair(np.float32, m, n, 11)
    out, work = np.zeros(2), Workspace()
    blockwise.gradient(
        sparse_block(np.float32, 5, 5, zeros), Tweedie(beta), W[:5], H[:5], 1.0, 0.1, work
    )
    tracemalloc.start()
    blockwise.gradient(block, Tweedie(beta), W, H, 1.0, FLOOR, work)
    blockwise.multiplicative(block, Tweedie(beta), True, W, H, FLOOR, (W.copy(), W.copy()), work)
    blockwise.evaluate(block, Tweedie(beta), W, H, FLOOR, out, None, work)
    assert sum(found[2] for found in observed_values(block)) == (m * n - 1000 if zeros else 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    compiler = 30e6  # what compiling leaves behind; a tile of one row in ten would be 160 MB
    assert peak < 5 * (W.nbytes + H.nbytes) + compiler


def test_index_types():
    assert index_type(65536) == np.uint16
    assert index_type(65537) == np.int32
    assert pointer_type(2**31 - 1) == np.int32
    assert pointer_type(2**31) == np.int64


@pytest.mark.parametrize("dense", [False, True])
def test_a_share_multiplies_what_a_block_adds(dense):
    """Gradients, curvatures, both sides' updates and slopes with their fits: 0.3 of all of them."""
    sparse_view, dense_one, W, H = both(True)
    view, law, work = dense_one if dense else sparse_view, Tweedie(1.0), Workspace()

    def added(law):
        found = [np.zeros_like(own) for own in (W, H)]
        gradients = blockwise.gradient(view, law, W, H, 2.5, FLOOR, work, tuple(found))
        found += [own.copy() for own in gradients]
        found += [own.copy() for own in blockwise.gradient(view, law, W, H, 2.5, FLOOR, work)]
        for by_rows, side in ((True, W), (False, H)):
            num, den, slope = (np.zeros_like(side) for _ in range(3))
            fits = np.zeros(len(side))
            blockwise.multiplicative(view, law, by_rows, W, H, FLOOR, (num, den), work)
            blockwise.slope(view, law, by_rows, W, H, FLOOR, (slope, fits), work)
            found += [num, den, slope, fits]
        return found

    for own, whole in zip(added(law.shared(0.3)), added(law), strict=True):
        assert np.abs(whole).max() > 0
        assert_close(own, 0.3 * whole)
