"""One side's gradient with the fit of every row, dense and sparse, against the twin."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from daskfactor.kernels import blockwise
from daskfactor.kernels.views import Workspace
from daskfactor.models.tweedie_law import Tweedie
from tests.kernels import reference
from tests.kernels.sparse_problem import FLOOR, dense_view, factor_pair, sparse_block

Array = NDArray[Any]


def found(view, beta, by_rows, W, H, fitted):
    """Gradient and fits, added to what was there."""
    gradient = np.full_like(W if by_rows else H, 7.0)
    fits = np.full(len(gradient), 3.0)
    work, law = Workspace(W.dtype), Tweedie(beta)
    out = gradient, fits if fitted else None
    blockwise.slope(view, law, by_rows, W, H, FLOOR, out, work)
    return gradient, fits


def check(view, full, beta, by_rows, factors, tolerance):
    wide = tuple(factor.astype(float) for factor in factors)
    exact = np.full(wide[0 if by_rows else 1].shape, 7.0), np.full(len(wide[not by_rows]), 3.0)
    reference.slope(*full.arguments[:3], *wide, FLOOR, by_rows, *exact, beta)
    got = found(view, beta, by_rows, *factors, True)
    for ours, theirs in zip(got, exact, strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours / scale, theirs / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize(
    ("beta", "zeros", "dtype", "tolerance"),
    [(0.5, False, "float32", 2e-5), (1.0, True, "float32", 2e-5), (2.0, True, "float64", 1e-11)],
)
def test_both_kinds_of_block_equal_the_twin(beta, zeros, dtype, tolerance, by_rows):
    real = np.dtype(dtype).type
    block, factors = sparse_block(real, 53, 31, zeros), factor_pair(real, 53, 31, 11)
    full = dense_view(block, real)
    check(block, full, beta, by_rows, factors, tolerance)
    check(full, full, beta, by_rows, factors, tolerance)


@pytest.mark.parametrize("by_rows", [True, False])
def test_blocks_without_an_entry_and_of_several_tiles(by_rows):
    for density, m, n in ((0.0, 5, 7), (0.3, 700, 40)):
        block = sparse_block(np.float64, m, n, True, density=density)
        factors = factor_pair(np.float64, m, n, 3)
        for view in (block, dense_view(block)):
            check(view, dense_view(block), 1.0, by_rows, factors, 1e-11)
            alone, untouched = found(view, 1.0, by_rows, *factors, False)
            with_fits = found(view, 1.0, by_rows, *factors, True)[0]
            np.testing.assert_allclose(alone, with_fits, rtol=1e-12)
            assert np.all(untouched == 3.0)
    empty = sparse_block(np.float64, 5, 7, False, density=0.0)
    gradient, fits = found(empty, 0.5, by_rows, *factor_pair(np.float64, 5, 7, 3), True)
    assert np.all(gradient == 7.0)
    assert np.all(fits == 3.0)
