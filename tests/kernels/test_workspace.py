import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskfactor.kernels.views import TILE_BYTES, UNPACKED_TERMS, Workspace, tile_rows


@given(
    m=st.integers(1, 10_000),
    n=st.integers(1, 200_000),
    K=st.integers(1, 500),
    itemsize=st.sampled_from([4, 8]),
)
def test_tile_rows(m, n, K, itemsize):
    rows = tile_rows(m, n, K, itemsize)
    assert 1 <= rows <= min(m, 512)
    assert rows * n * itemsize <= max(TILE_BYTES, 16 * n * itemsize)
    if 48 * n * K <= UNPACKED_TERMS:
        assert rows * n * K <= UNPACKED_TERMS


def buffers(workspace, m, n, K):
    tiles, gradients = workspace.tiles(m, n, K), workspace.gradients(m, n, K)
    return [*tiles, *gradients, *workspace.sums(K)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_shapes_and_dtype(dtype):
    found = buffers(Workspace(dtype), 30, 20, 4)
    shapes = [(30, 20), (30, 20), (2, 20), (30, 4), (20, 4), (4, 4), (2, 4, 4), (64, 4)]
    assert [b.shape for b in found] == shapes
    assert [b.dtype for b in found] == [dtype] * 6 + [np.float64] * 2
    assert all(b.flags.c_contiguous and b.ctypes.data % 64 == 0 for b in found)


def test_memory_is_reused_and_grows_once():
    workspace = Workspace()
    shapes = (300, 200), (30, 20), (300, 200)
    large, small, again = (buffers(workspace, *shape, 16) for shape in shapes)
    for a, b, c in zip(large, small, again, strict=True):
        assert np.shares_memory(a, b)
        assert np.shares_memory(a, c)
    for one, other in itertools.combinations(large, 2):
        assert not np.shares_memory(one, other)


def test_another_dtype_starts_new_buffers():
    workspace = Workspace()
    one, _ = workspace.gradients(30, 20, 4)
    other, _ = workspace.gradients(30, 20, 4, np.float64)
    assert other.dtype == np.float64
    assert not np.shares_memory(one, other)
