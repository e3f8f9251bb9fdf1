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


def _twin(function):
    """The twin of a sparse kernel, from that of the dense one."""

    def twin(indptr, indices, values, W, H, *rest):
        *rest, zeros = rest
        full = written_out(indptr, indices, values, len(H), zeros, W.dtype)
        function(full, 0, 0, W, H, *rest)

    return twin


gradient = _twin(reference.gradient)
gradient_curvature = _twin(reference.gradient_curvature)
multiplicative_rows = _twin(reference.multiplicative_rows)
multiplicative_cols = _twin(reference.multiplicative_cols)
evaluate = _twin(reference.evaluate)
