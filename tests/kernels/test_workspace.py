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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_shapes_and_dtype(dtype):
    buffers = Workspace(dtype).arrays(30, 20, 4)
    assert [b.shape for b in buffers] == [(30, 20), (30, 20), (30, 4), (20, 4)]
    assert all(b.dtype == dtype and b.flags.c_contiguous for b in buffers)


def test_memory_is_reused_and_grows_once():
    workspace = Workspace()
    large = workspace.arrays(300, 200, 16)
    small = workspace.arrays(30, 20, 16)
    again = workspace.arrays(300, 200, 16)
    for a, b, c in zip(large, small, again, strict=True):
        assert np.shares_memory(a, b)
        assert np.shares_memory(a, c)
    assert not np.shares_memory(large.tile, large.tile2)
    assert not np.shares_memory(large.GW, large.GH)
