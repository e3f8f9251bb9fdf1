"""One sparse block, one step: one pass over its stored entries, both gradients at once.

For a stored entry (i, j) the pass computes mu = W[i] . H[j], turns it into a
coefficient a, and adds a H[j] to row i and a W[i] to row j: 6 K operations an
entry, and memory of order (m + n) K. Row i and its gradient stay in registers
while the entries of the row are visited; rows j of H and of its gradient are
asked for a few entries ahead. One thread owns a block, so nothing races.

What an entry adds, stored or not, is said in ``sparse_rules.py``.

Shapes, all C-contiguous: indptr (m + 1,), indices and values (nnz,), W (m, K),
H (n, K) of one float dtype; scratch gram (K, K) of that dtype and sums
(2, K, K) and wide (any, K), both float64.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import jit, stack_array
from daskfactor.kernels.sparse_rules import entry_rules, zero_rules
from daskfactor.kernels.vectors import (
    add_row,
    add_to_row,
    dot_row,
    load_row,
    prefetch_row,
    store_row,
)
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]
Kernel = Callable[..., None]

CHUNK = 256
"""Entries whose fit is computed together."""
AHEAD = 8
"""How many entries before its turn a row is asked for."""


class SparseKernels(NamedTuple):
    """The jitted kernels of one beta and one K, for one meaning of what is not stored.

    As :class:`daskfactor.kernels.dense.DenseKernels`, with ``(indptr, indices,
    values)`` for the block.

    gradient(block..., W, H, scale, floor, GW, GH, gram, sums)
    gradient_curvature(block..., W, H, scale, floor, GW, GH, CW, CH, gram, sums)
    multiplicative_rows(block..., W, H, floor, num, den, gram, sums)
    multiplicative_cols(block..., W, H, floor, num, den, gram, sums)
    evaluate(block..., W, H, floor, sums, wide, out, cell_rows, cell_cols, mean, m2, count)

    Source: Şimşekli et al. 2017, eq. 6 and 7; Şimşekli et al. 2015, section 4.
    """

    gradient: Kernel
    gradient_curvature: Kernel
    multiplicative_rows: Kernel
    multiplicative_cols: Kernel
    evaluate: Kernel


@jit
def _clear(rows: Array) -> None:
    rows[:, :] = 0


def _gradient(likelihood: Likelihood, zeros: bool, K: int) -> Kernel:
    step, zero_part = entry_rules(likelihood, zeros).step, zero_rules(likelihood, zeros).part

    @jit
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
        gram: Array,
        sums: Array,
    ) -> None:
        _clear(GW)
        _clear(GH)
        zero_part(-scale, W, H, GW, gram, sums)
        zero_part(-scale, H, W, GH, gram, sums)
        real, last = W.dtype.type, indices.size - 1
        w, gw = stack_array(K, W.dtype), stack_array(K, W.dtype)
        for i in range(W.shape[0]):
            load_row(K, W, i, w)
            load_row(K, GW, i, gw)
            for p in range(indptr[i], indptr[i + 1]):
                j, later = np.intp(indices[p]), np.intp(indices[min(p + AHEAD, last)])
                prefetch_row(K, H, later)
                prefetch_row(K, GH, later)
                mu = dot_row(K, w, H, j)
                a, _ = step(real(values[p]), mu, real(floor), real(scale))
                add_row(K, a, H, j, gw)
                add_to_row(K, a, w, GH, j)
            store_row(K, gw, GW, i)

    return gradient


def _gradient_curvature(likelihood: Likelihood, zeros: bool, K: int) -> Kernel:
    step, zero_part = entry_rules(likelihood, zeros).step, zero_rules(likelihood, zeros).part

    @jit
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
        gram: Array,
        sums: Array,
    ) -> None:
        _clear(GW)
        _clear(GH)
        zero_part(-scale, W, H, GW, gram, sums)
        zero_part(-scale, H, W, GH, gram, sums)
        zero_part(1.0, W, H, CW, gram, sums)
        zero_part(1.0, H, W, CH, gram, sums)
        real, last = W.dtype.type, indices.size - 1
        w, gw, cw = (stack_array(K, W.dtype), stack_array(K, W.dtype), stack_array(K, W.dtype))
        for i in range(W.shape[0]):
            load_row(K, W, i, w)
            load_row(K, GW, i, gw)
            load_row(K, CW, i, cw)
            for p in range(indptr[i], indptr[i + 1]):
                j, later = np.intp(indices[p]), np.intp(indices[min(p + AHEAD, last)])
                prefetch_row(K, H, later)
                prefetch_row(K, GH, later)
                prefetch_row(K, CH, later)
                mu = dot_row(K, w, H, j)
                a, c = step(real(values[p]), mu, real(floor), real(scale))
                add_row(K, a, H, j, gw)
                add_to_row(K, a, w, GH, j)
                if c != 0:
                    add_row(K, c, H, j, cw)
                    add_to_row(K, c, w, CH, j)
            store_row(K, gw, GW, i)
            store_row(K, cw, CW, i)

    return gradient_curvature


def _multiplicative_rows(likelihood: Likelihood, zeros: bool, K: int) -> Kernel:
    ratio, zero_part = entry_rules(likelihood, zeros).ratio, zero_rules(likelihood, zeros).part

    @jit
    def multiplicative_rows(
        indptr: Array,
        indices: Array,
        values: Array,
        W: Array,
        H: Array,
        floor: float,
        num: Array,
        den: Array,
        gram: Array,
        sums: Array,
    ) -> None:
        zero_part(1.0, W, H, den, gram, sums)
        real, last = W.dtype.type, indices.size - 1
        w, above, below = (
            stack_array(K, W.dtype),
            stack_array(K, W.dtype),
            stack_array(K, W.dtype),
        )
        for i in range(W.shape[0]):
            load_row(K, W, i, w)
            load_row(K, num, i, above)
            load_row(K, den, i, below)
            for p in range(indptr[i], indptr[i + 1]):
                j, later = np.intp(indices[p]), np.intp(indices[min(p + AHEAD, last)])
                prefetch_row(K, H, later)
                q, c = ratio(real(values[p]), dot_row(K, w, H, j), real(floor))
                add_row(K, q, H, j, above)
                if c != 0:
                    add_row(K, c, H, j, below)
            store_row(K, above, num, i)
            store_row(K, below, den, i)

    return multiplicative_rows


def _multiplicative_cols(likelihood: Likelihood, zeros: bool, K: int) -> Kernel:
    ratio, zero_part = entry_rules(likelihood, zeros).ratio, zero_rules(likelihood, zeros).part

    @jit
    def multiplicative_cols(
        indptr: Array,
        indices: Array,
        values: Array,
        W: Array,
        H: Array,
        floor: float,
        num: Array,
        den: Array,
        gram: Array,
        sums: Array,
    ) -> None:
        zero_part(1.0, H, W, den, gram, sums)
        real, last = W.dtype.type, indices.size - 1
        w = stack_array(K, W.dtype)
        for i in range(W.shape[0]):
            load_row(K, W, i, w)
            for p in range(indptr[i], indptr[i + 1]):
                j, later = np.intp(indices[p]), np.intp(indices[min(p + AHEAD, last)])
                prefetch_row(K, H, later)
                prefetch_row(K, num, later)
                prefetch_row(K, den, later)
                q, c = ratio(real(values[p]), dot_row(K, w, H, j), real(floor))
                add_to_row(K, q, w, num, j)
                if c != 0:
                    add_to_row(K, c, w, den, j)

    return multiplicative_cols


def _monitor(K: int) -> Kernel:
    @jit
    def monitor(
        W: Array,
        H: Array,
        cell_rows: Array,
        cell_cols: Array,
        mean: Array,
        m2: Array,
        count: int,
    ) -> None:
        """Welford update of the monitored cells."""
        w = stack_array(K, W.dtype)
        for cell in range(cell_rows.size):
            load_row(K, W, np.intp(cell_rows[cell]), w)
            value = dot_row(K, w, H, np.intp(cell_cols[cell]))
            delta = value - mean[cell]
            mean[cell] += delta / count
            m2[cell] += delta * (value - mean[cell])

    return monitor


def _fits(likelihood: Likelihood, zeros: bool) -> Callable[..., tuple[float, float]]:
    fit = entry_rules(likelihood, zeros).fit

    @jit
    def fits(values: Array, means: Array, floor: float) -> tuple[float, float]:
        """Sums over a chunk: logarithms and powers need a loop of their own to be vectors."""
        real = means.dtype.type
        total = pearson = 0.0
        for p in range(values.size):
            deviance, square = fit(real(values[p]), means[p], real(floor))
            total += deviance
            pearson += square
        return total, pearson

    return fits


def _evaluate(likelihood: Likelihood, zeros: bool, K: int) -> Kernel:
    zero_fit, monitor, fits = (
        zero_rules(likelihood, zeros).fit,
        _monitor(K),
        _fits(likelihood, zeros),
    )

    @jit
    def evaluate(
        indptr: Array,
        indices: Array,
        values: Array,
        W: Array,
        H: Array,
        floor: float,
        sums: Array,
        wide: Array,
        out: Array,
        cell_rows: Array,
        cell_cols: Array,
        mean: Array,
        m2: Array,
        count: int,
    ) -> None:
        monitor(W, H, cell_rows, cell_cols, mean, m2, count)
        last = indices.size - 1
        total, pearson = zero_fit(W, H, sums, wide)
        w, means = stack_array(K, W.dtype), stack_array(CHUNK, W.dtype)
        begin = 0
        for i in range(W.shape[0]):
            load_row(K, W, i, w)
            for p in range(indptr[i], indptr[i + 1]):
                if p - begin == CHUNK:
                    deviances, squares = fits(values[begin:p], means, floor)
                    total, pearson, begin = total + deviances, pearson + squares, p
                later = np.intp(indices[min(p + AHEAD, last)])
                prefetch_row(K, H, later)
                means[p - begin] = dot_row(K, w, H, np.intp(indices[p]))
        deviances, squares = fits(values[begin:], means, floor)
        total, pearson = total + deviances, pearson + squares
        out[0] -= total
        out[1] += pearson

    return evaluate


def sparse_kernels(likelihood: Likelihood, zeros: bool, K: int) -> SparseKernels:
    """Kernels of one beta-divergence and K components, compiled when first called.

    ``zeros`` says what an entry is that is not stored: an observed zero (beta = 1
    and 2 only) or missing. Compilation takes about half a second for each kernel,
    K and dtype.
    """
    return _sparse_kernels(likelihood, bool(zeros), int(K))


@lru_cache(maxsize=256)
def _sparse_kernels(likelihood: Likelihood, zeros: bool, K: int) -> SparseKernels:
    makers = (_gradient, _gradient_curvature, _multiplicative_rows, _multiplicative_cols, _evaluate)
    return SparseKernels(*(make(likelihood, zeros, K) for make in makers))
