"""One sparse block, one step: one pass over its stored entries, both gradients at once.

For a stored entry (i, j) the pass computes mu = W[i] . H[j], turns it into a
coefficient a, and adds a H[j] to row i and a W[i] to row j: 6 K operations an
entry, and memory of order (m + n) K. Row i and its gradient stay in registers
while the entries of the row are visited; rows j of H and of its gradient are
asked for a few entries ahead. One thread owns a block, so nothing races.

What an entry adds, stored or not, is said in ``entries.py``.

Shapes, all C-contiguous: indptr (m + 1,), indices and values (nnz,), W (m, K),
H (n, K) of one float dtype; scratch gram (K, K) of that dtype and sums
(2, K, K) and wide (any, K), both float64.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.entries import entry_rules, zero_rules
from daskfactor.kernels.jit import jit, stack_array
from daskfactor.kernels.vectors import (
    add_row,
    add_to_row,
    dot_row,
    load_row,
    prefetch_row,
    store_row,
)
from daskfactor.kernels.views import BlockKernels, Kernel, Watched
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]
Rows = tuple[Array, Array, Array]
Scratch = tuple[Array, Array, Array]

CHUNK = 256
"""Entries whose fit is computed together."""
AHEAD = 8
"""How many entries before its turn a row is asked for."""


@lru_cache(maxsize=256)
def sparse_kernels(likelihood: Likelihood, zeros: bool, K: int) -> BlockKernels:
    """Kernels of one likelihood and K components, compiled when first called.

    ``block`` is (indptr, indices, values) and ``work`` (gram, sums, wide). ``zeros`` says
    what an entry is that is not stored: an observed zero (only where `Likelihood.zeros`
    says how they add up) or missing. Compilation takes about half a second for each
    kernel, K and dtype.
    """
    return BlockKernels(
        gradient=_gradient(likelihood, zeros, K, False),
        gradient_curvature=_gradient(likelihood, zeros, K, True),
        multiplicative_rows=_multiplicative(likelihood, zeros, K, True),
        multiplicative_cols=_multiplicative(likelihood, zeros, K, False),
        evaluate=_evaluate(likelihood, zeros, K),
    )


@jit
def _clear(rows: Array) -> None:
    rows[:, :] = 0


def _gradient(likelihood: Likelihood, zeros: bool, K: int, curved: bool) -> Kernel:
    step, zero_part = entry_rules(likelihood, zeros).step, zero_rules(likelihood, zeros).part

    @jit
    def gradient(
        block: Rows,
        W: Array,
        H: Array,
        scale: float,
        floor: float,
        out: tuple[Array, ...],
        work: Scratch,
    ) -> None:
        indptr, indices, values = block
        gram, sums, _ = work
        GW, GH = out[0], out[1]
        _clear(GW)
        _clear(GH)
        zero_part(-scale, W, H, GW, gram, sums)
        zero_part(-scale, H, W, GH, gram, sums)
        real, last = W.dtype.type, indices.size - 1
        w, gw = stack_array(K, W.dtype), stack_array(K, W.dtype)
        if curved:
            CW, CH = out[2], out[3]
            zero_part(1.0, W, H, CW, gram, sums)
            zero_part(1.0, H, W, CH, gram, sums)
            cw = stack_array(K, W.dtype)
        for i in range(W.shape[0]):
            load_row(K, W, i, w)
            load_row(K, GW, i, gw)
            if curved:
                load_row(K, CW, i, cw)
            for p in range(indptr[i], indptr[i + 1]):
                j, later = np.intp(indices[p]), np.intp(indices[min(p + AHEAD, last)])
                prefetch_row(K, H, later)
                prefetch_row(K, GH, later)
                if curved:
                    prefetch_row(K, CH, later)
                mu = dot_row(K, w, H, j)
                a, c = step(real(values[p]), mu, real(floor), real(scale))
                add_row(K, a, H, j, gw)
                add_to_row(K, a, w, GH, j)
                if curved and c != 0:
                    add_row(K, c, H, j, cw)
                    add_to_row(K, c, w, CH, j)
            store_row(K, gw, GW, i)
            if curved:
                store_row(K, cw, CW, i)

    return gradient


def _multiplicative(likelihood: Likelihood, zeros: bool, K: int, by_rows: bool) -> Kernel:
    ratio, zero_part = entry_rules(likelihood, zeros).ratio, zero_rules(likelihood, zeros).part

    @jit
    def multiplicative(
        block: Rows, W: Array, H: Array, floor: float, out: tuple[Array, Array], work: Scratch
    ) -> None:
        indptr, indices, values = block
        gram, sums, _ = work
        num, den = out
        real, last = W.dtype.type, indices.size - 1
        w = stack_array(K, W.dtype)
        if by_rows:
            zero_part(1.0, W, H, den, gram, sums)
            above, below = stack_array(K, W.dtype), stack_array(K, W.dtype)
        else:
            zero_part(1.0, H, W, den, gram, sums)
        for i in range(W.shape[0]):
            load_row(K, W, i, w)
            if by_rows:
                load_row(K, num, i, above)
                load_row(K, den, i, below)
            for p in range(indptr[i], indptr[i + 1]):
                j, later = np.intp(indices[p]), np.intp(indices[min(p + AHEAD, last)])
                prefetch_row(K, H, later)
                if not by_rows:
                    prefetch_row(K, num, later)
                    prefetch_row(K, den, later)
                q, c = ratio(real(values[p]), dot_row(K, w, H, j), real(floor))
                if by_rows:
                    add_row(K, q, H, j, above)
                    if c != 0:
                        add_row(K, c, H, j, below)
                else:
                    add_to_row(K, q, w, num, j)
                    if c != 0:
                        add_to_row(K, c, w, den, j)
            if by_rows:
                store_row(K, above, num, i)
                store_row(K, below, den, i)

    return multiplicative


def _monitor(K: int) -> Kernel:
    @jit
    def monitor(W: Array, H: Array, cells: Watched) -> None:
        """Welford update of the monitored cells."""
        rows, cols, mean, m2, count = cells
        w = stack_array(K, W.dtype)
        for cell in range(rows.size):
            load_row(K, W, np.intp(rows[cell]), w)
            value = dot_row(K, w, H, np.intp(cols[cell]))
            delta = value - mean[cell]
            mean[cell] += delta / count
            m2[cell] += delta * (value - mean[cell])

    return monitor


def _fits(likelihood: Likelihood, zeros: bool) -> Kernel:
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
        block: Rows,
        W: Array,
        H: Array,
        floor: float,
        out: Array,
        cells: Watched,
        work: Scratch,
    ) -> None:
        indptr, indices, values = block
        _, sums, wide = work
        monitor(W, H, cells)
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
