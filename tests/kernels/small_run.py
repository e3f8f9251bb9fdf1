"""Every kernel once on small odd shapes; run as a script it saves what came out.

Run under other compiler settings by ``test_compiler_modes.py``.
"""

import sys

import numpy as np

from daskfactor.kernels.langevin import accumulate_moments, fill_normals
from daskfactor.kernels.philox import Address
from daskfactor.kernels.steps import langevin_step
from daskfactor.kernels.views import BlockView, SparseBlock, Workspace
from daskfactor.models.tweedie_law import Tweedie
from tests.kernels.problems import everything

KEY = np.array([7, 11], np.uint32)


def exact_results(dtype):
    """Kernels that promise the same bits everywhere."""
    rng = np.random.default_rng(3)
    results = {}
    for n, K in ((1, 1), (3, 5), (2, 8)):
        tag = f"{n}x{K}"
        z = np.empty((n, K), dtype)
        fill_normals(z, KEY, 5, 1, 9)
        theta = rng.gamma(1.0, size=(n, K)).astype(dtype)
        grad = rng.normal(size=(n, K)).astype(dtype) * 30
        metric = rng.gamma(3.0, size=(n, K)).astype(dtype)
        metric_draw, plain_draw, coarse_draw = theta.copy(), theta.copy(), theta.copy()
        first, second = Address(KEY, 2, 0, 4), Address(KEY, 2, 1, 4)
        langevin_step(metric_draw, grad, metric, 0.1, (0.5, 1.0), first, False)
        langevin_step(coarse_draw, grad, metric, 0.1, (0.5, 1.0), first, True)
        langevin_step(plain_draw, grad, None, 0.01, (0.5, 1.0), second, False)
        gamma_draw = theta.copy()
        langevin_step(gamma_draw, grad, None, 0.01, (0.5, 1.7), second, False)
        squared_draw, spiked_draw = theta.copy(), theta.copy()
        langevin_step(squared_draw, grad, metric, 0.1, (0.5, 1.0), second, False, (0.4, 2.8))
        langevin_step(spiked_draw, grad, metric, 0.1, (0.5, 0.3), second, False, (0.4, 2.8))
        mean, m2 = theta.astype(np.float64), np.ones((n, K))
        accumulate_moments(z, 3, mean, m2)
        values = (z, metric_draw, coarse_draw, plain_draw, gamma_draw, mean, m2)
        values += squared_draw, spiked_draw
        results |= {f"exact/{tag}/{i}/{dtype.__name__}": x for i, x in enumerate(values)}
    return results


class SmallTiles(Workspace):
    """Buffers in which dense blocks are visited three rows at a time."""

    def tiles(self, m, n, K, dtype):
        return super().tiles(min(m, 3), n, K, dtype)


def dense_results(dtype, beta):
    """Kernels that may sum in another order, on a block that ends where its array does."""
    rng = np.random.default_rng(4)
    V = rng.gamma(2.0, size=(9, 8)).astype(dtype)
    V[2, 3] = V[4, 4] = np.nan
    W, H = (rng.gamma(2.0, size=(rows, 3)).astype(dtype) for rows in (7, 5))
    told = {"slopes": True, "cells": True, "work": SmallTiles(dtype)}
    found = everything(BlockView(V, 2, 3, 7, 5), Tweedie(beta), W, H, **told)
    return {f"dense/{beta}/{name}/{dtype.__name__}": own for name, own in found.items()}


def sparse_results(dtype, beta, zeros):
    """The same on compressed rows, one of them empty."""
    rng = np.random.default_rng(5)
    # As many components as in test_blocks.py, for which most of this is compiled anyway.
    W, H = (rng.gamma(2.0, size=(rows, 11)).astype(dtype) for rows in (4, 5))
    values = rng.gamma(2.0, size=6).astype(dtype)
    values[4] = np.nan
    pattern = np.array([0, 2, 2, 5, 6], np.int32), np.array([0, 4, 1, 2, 3, 4], np.uint16)
    block = SparseBlock(*pattern, values, 4, 5, zeros)
    found = everything(block, Tweedie(beta), W, H, slopes=True, cells=True)
    tag = f"sparse/{beta}/{zeros}"
    return {f"{tag}/{name}/{dtype.__name__}": own for name, own in found.items()}


def all_results():
    """Dense kernels first: they must not lend their fast arithmetic to the exact ones."""
    results = dense_results(np.float32, 1.0) | dense_results(np.float64, 0.3)
    results |= sparse_results(np.float32, 1.0, True) | sparse_results(np.float64, 2.0, True)
    results |= sparse_results(np.float32, 0.3, False)
    return results | exact_results(np.float32) | exact_results(np.float64)


def indexed_results():
    """All ways to go through arrays: types and laws change what is done with an entry alone."""
    results = dense_results(np.float32, 1.0) | sparse_results(np.float64, 2.0, True)
    return results | exact_results(np.float32) | sparse_results(np.float32, 0.3, False)


WANTED = {"all": all_results, "indexed": indexed_results}

if __name__ == "__main__":
    np.savez(sys.argv[1], **WANTED[sys.argv[2]]())
