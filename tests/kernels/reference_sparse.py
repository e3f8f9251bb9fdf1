"""Plain-NumPy twins of the sparse kernels: the dense twins on the block written out in full.

Same names and arguments as the kernels, without scratch and with ``beta`` and
``zeros`` last. They compute in the dtype of the factors.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernels import reference

Array = NDArray[Any]


def written_out(
    indptr: Array, indices: Array, values: Array, n: int, zeros: bool, dtype: Any
) -> Array:
    """The block as an (m, n) array, NaN where missing."""
    full = np.full((indptr.size - 1, n), 0 if zeros else np.nan, dtype)
    full[np.repeat(np.arange(indptr.size - 1), np.diff(indptr)), indices] = values
    return full


def _window(
    indptr: Array, indices: Array, values: Array, W: Array, H: Array, zeros: bool
) -> tuple[Array, int, int, Array, Array]:
    return written_out(indptr, indices, values, len(H), zeros, W.dtype), 0, 0, W, H


def gradient(
    indptr: Array,
    indices: Array,
    values: Array,
    W: Array,
    H: Array,
    scale: float,
    floor: float,
    GW: Array,
    GH: Array,
    beta: float,
    zeros: bool,
) -> None:
    """Twin of ``SparseKernels.gradient``."""
    window = _window(indptr, indices, values, W, H, zeros)
    reference.gradient(*window, scale, floor, GW, GH, beta)


def gradient_curvature(
    indptr: Array,
    indices: Array,
    values: Array,
    W: Array,
    H: Array,
    scale: float,
    floor: float,
    GW: Array,
    GH: Array,
    CW: Array,
    CH: Array,
    beta: float,
    zeros: bool,
) -> None:
    """Twin of ``SparseKernels.gradient_curvature``."""
    window = _window(indptr, indices, values, W, H, zeros)
    reference.gradient_curvature(*window, scale, floor, GW, GH, CW, CH, beta)


def multiplicative_rows(
    indptr: Array,
    indices: Array,
    values: Array,
    W: Array,
    H: Array,
    floor: float,
    num: Array,
    den: Array,
    beta: float,
    zeros: bool,
) -> None:
    """Twin of ``SparseKernels.multiplicative_rows``."""
    window = _window(indptr, indices, values, W, H, zeros)
    reference.multiplicative_rows(*window, floor, num, den, beta)


def multiplicative_cols(
    indptr: Array,
    indices: Array,
    values: Array,
    W: Array,
    H: Array,
    floor: float,
    num: Array,
    den: Array,
    beta: float,
    zeros: bool,
) -> None:
    """Twin of ``SparseKernels.multiplicative_cols``."""
    window = _window(indptr, indices, values, W, H, zeros)
    reference.multiplicative_cols(*window, floor, num, den, beta)


def evaluate(
    indptr: Array,
    indices: Array,
    values: Array,
    W: Array,
    H: Array,
    floor: float,
    out: Array,
    cell_rows: Array,
    cell_cols: Array,
    mean: Array,
    m2: Array,
    count: int,
    beta: float,
    zeros: bool,
) -> None:
    """Twin of ``SparseKernels.evaluate``."""
    window = _window(indptr, indices, values, W, H, zeros)
    reference.evaluate(*window, floor, out, cell_rows, cell_cols, mean, m2, count, beta)
