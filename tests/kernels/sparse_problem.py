"""Sparse blocks to try kernels on, with the same block written out in full."""

import threading

import numpy as np

from daskfactor.kernels.views import BlockView, SparseBlock, index_type, pointer_type
from tests.kernels.reference_sparse import written_out

FLOOR = 1e-6
RULES = [(beta, False) for beta in (2.0, 1.0, 0.5, 0.0, -1.0, 0.3, 3.0)]
RULES += [(1.0, True), (2.0, True)]
ZEROS = [(1.0, True), (2.0, True)]


def sparse_block(dtype, m, n, zeros, density=0.3, held_out=0.2, seed=0):
    """Random entries; with ``zeros`` some of the stored ones are missing (NaN)."""
    rng = np.random.default_rng(seed)
    stored = rng.random((m, n)) < density
    values = rng.gamma(2.0, size=int(stored.sum())).astype(dtype) + dtype(0.05)
    if zeros:
        values[rng.random(values.size) < held_out] = np.nan
    indptr = np.concatenate([[0], np.cumsum(stored.sum(axis=1))])
    return SparseBlock(
        indptr.astype(pointer_type(values.size)),
        np.nonzero(stored)[1].astype(index_type(n)),
        values,
        m,
        n,
        zeros,
    )


def factor_pair(dtype, m, n, K, seed=1):
    rng = np.random.default_rng(seed)
    W = rng.gamma(2.0, size=(m, K)) + 0.01
    H = rng.gamma(2.0, size=(n, K)) / (2 * K) + 0.01
    return W.astype(dtype), H.astype(dtype)


def dense_view(block, dtype=np.float64):
    """The same block as a window of a dense array, away from its corner."""
    full = written_out(*block[:3], block.n, block.zeros, dtype)
    array = np.full((block.m + 3, block.n + 2), 99.0, dtype)
    array[2 : 2 + block.m, 1 : 1 + block.n] = full
    return BlockView(array, 2, 1, block.m, block.n)


def in_threads(function, cases):
    """Call a function with each case, all at once, in threads of their own."""
    threads = [threading.Thread(target=function, args=case) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
