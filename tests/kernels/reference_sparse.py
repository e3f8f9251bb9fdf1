"""Plain-NumPy twins of the sparse kernels: the dense twins on the block written out in full.

Same names and arguments as the kernels, without scratch and with ``beta`` and
``zeros`` last. They compute in the dtype of the factors.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernels import reference

Array = NDArray[Any]


def written_out(indptr, indices, values, n, zeros, dtype):
    """The block as an (m, n) array, NaN where missing."""
    full = np.full((indptr.size - 1, n), 0 if zeros else np.nan, dtype)
    full[np.repeat(np.arange(indptr.size - 1), np.diff(indptr)), indices] = values
    return full


def _window(indptr, indices, values, W, H, zeros):
    return written_out(indptr, indices, values, len(H), zeros, W.dtype), 0, 0, W, H


def gradient(indptr, indices, values, W, H, scale, floor, GW, GH, beta, zeros):
    """Twin of ``SparseKernels.gradient``."""
    window = _window(indptr, indices, values, W, H, zeros)
    reference.gradient(*window, scale, floor, GW, GH, beta)


def gradient_curvature(indptr, indices, values, W, H, scale, floor, GW, GH, CW, CH, beta, zeros):
    """Twin of ``SparseKernels.gradient_curvature``."""
    window = _window(indptr, indices, values, W, H, zeros)
    reference.gradient_curvature(*window, scale, floor, GW, GH, CW, CH, beta)


def multiplicative_rows(indptr, indices, values, W, H, floor, num, den, beta, zeros):
    """Twin of ``SparseKernels.multiplicative_rows``."""
    window = _window(indptr, indices, values, W, H, zeros)
    reference.multiplicative_rows(*window, floor, num, den, beta)


def multiplicative_cols(indptr, indices, values, W, H, floor, num, den, beta, zeros):
    """Twin of ``SparseKernels.multiplicative_cols``."""
    window = _window(indptr, indices, values, W, H, zeros)
    reference.multiplicative_cols(*window, floor, num, den, beta)


def evaluate(
    indptr, indices, values, W, H, floor, out, cell_rows, cell_cols, mean, m2, count, beta, zeros
):
    """Twin of ``SparseKernels.evaluate``."""
    window = _window(indptr, indices, values, W, H, zeros)
    reference.evaluate(*window, floor, out, cell_rows, cell_cols, mean, m2, count, beta)
