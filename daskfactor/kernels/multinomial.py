"""Share counts out among components by draws from multinomial laws.

    (s_ij1, ..., s_ijK) ~ Multinomial(v_ij; w_i1 h_1j, ..., w_iK h_Kj)

Only sums of S over rows and over columns are kept. A cell's random numbers come
from a stream of its own, addressed by its global row and column, so S does not
depend on how the matrix is cut into blocks. Zeros need no numbers.

Source: A. T. Cemgil, "Bayesian inference for nonnegative matrix factorisation
models", Computational Intelligence and Neuroscience, 2009, section 3.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import inline, jit_exact, stack_array
from daskfactor.kernels.variates import STREAM, Stream, binomial, start_cell, uniform
from daskfactor.kernels.views import AnyBlock, SparseBlock, cell_at, row_cells

Array = NDArray[Any]
Scalar = Any
Wide = NDArray[np.float64]

PLACE = 3
"""A count is placed unit by unit while it is at most PLACE times K, beyond that by binomials."""


@inline
def _place_units(count: Scalar, c: Wide, stream: Stream, sw: Wide, sh: Wide) -> None:
    last = c.size - 1
    for _ in range(count):
        u = uniform(stream) * c[last]
        k = 0
        while k < last and c[k] <= u:
            k += 1
        sw[k] += 1.0
        sh[k] += 1.0


@inline
def _split_count(
    count: Scalar, w: Array, h: Array, c: Wide, stream: Stream, sw: Wide, sh: Wide
) -> None:
    """Draw binomials from the last component down; c[k] is the weight of components 0 to k."""
    left = count
    for k in range(c.size - 1, 0, -1):
        if left == 0:
            break
        part = binomial(left, np.float64(w[k]) * np.float64(h[k]) / c[k], stream)
        sw[k] += part
        sh[k] += part
        left -= part
    sw[0] += left
    sh[0] += left


@jit_exact
def allocate(
    block: tuple[Array, Any, Any],
    factors: tuple[Array, Array],
    offsets: tuple[int, int],
    key: NDArray[np.uint32],
    sweep: int,
    sums: tuple[Wide, Wide],
) -> None:
    """Draw S of every observed cell of a block; add its sums over the block to SW and SH.

    SW[i, k] += sum_j s_ijk,  SH[j, k] += sum_i s_ijk

    Parameters
    ----------
    block : a view's first three arguments, of whole numbers of at most 2**31, NaN where missing
    factors : W (m, K) and H (n, K), C-contiguous, one float dtype, not negative
    offsets : global numbers of the block's first row and column
    key, sweep : the rest of the address, see :func:`start_cell`
    sums : SW (m, K) and SH (n, K), float64
    """
    (first, second, third), (W, H), (SW, SH) = block, factors, sums
    K, stream = W.shape[1], stack_array(STREAM, np.uint64)
    c = np.empty(K)
    for i in range(W.shape[0]):
        begin, end = row_cells(first, i, H.shape[0])
        for at in range(begin, end):
            j, value = cell_at(first, second, third, i, at)
            if value > 0:  # neither a zero nor NaN
                count, total = np.int64(value), 0.0
                for k in range(K):
                    total += np.float64(W[i, k]) * np.float64(H[j, k])
                    c[k] = total
                start_cell(stream, key, sweep, offsets[0] + i, offsets[1] + j)
                if total > 0.0 and count <= PLACE * K:
                    _place_units(count, c, stream, SW[i], SH[j])
                elif total > 0.0:
                    _split_count(count, W[i], H[j], c, stream, SW[i], SH[j])


@jit_exact
def _add_rates(
    block: tuple[Array, Any, Any], rows: bool, missing: bool, other: Array, rates: Wide
) -> None:
    """Add the other factor over observed cells, or take it off over stored ``missing`` ones."""
    first, second, third = block
    m = rates.shape[0] if rows else other.shape[0]
    n = other.shape[0] if rows else rates.shape[0]
    sign = -1.0 if missing else 1.0
    for i in range(m):
        begin, end = row_cells(first, i, n)
        for at in range(begin, end):
            j, v = cell_at(first, second, third, i, at)
            if np.isnan(v) == missing:
                row, column = (i, j) if rows else (j, i)
                for k in range(other.shape[1]):
                    rates[row, k] += sign * other[column, k]


def add_rates(view: AnyBlock, rows: bool, other: Array, rates: Wide) -> None:
    """Add a block's share of the rates of W (``rows``) or of H.

    rates[i, k] += sum of h_kj over observed j,  or  rates[j, k] += sum of w_ik over observed i

    Where every cell is observed a column sum of the other factor stands for it; where
    zeros are not stored, missing cells are taken off it again.

    Parameters
    ----------
    view : block
    rows : True for W, False for H
    other : the other factor, (n, K) for W and (m, K) for H
    rates : (m, K) or (n, K), float64
    """
    block, is_sparse = view.arguments[:3], isinstance(view, SparseBlock)
    observed_only = is_sparse and not view.zeros
    missing = not observed_only and bool(np.isnan(view.stored[-1]).any())
    if observed_only or (missing and not is_sparse):  # nothing cancels, however few they are
        _add_rates(block, rows, False, other, rates)
        return
    rates += other.sum(axis=0, dtype=np.float64)
    if missing:
        _add_rates(block, rows, True, other, rates)


@jit_exact
def _log_fit(block: tuple[Array, Any, Any], W: Array, H: Array) -> float:
    first, second, third = block
    total = 0.0
    for i in range(W.shape[0]):
        begin, end = row_cells(first, i, H.shape[0])
        for at in range(begin, end):
            j, stored = cell_at(first, second, third, i, at)
            v = np.float64(stored)
            if v > 0:
                mu = 0.0
                for k in range(W.shape[1]):
                    mu += W[i, k] * H[j, k]
                total += v * np.log(mu) - math.lgamma(v + 1.0)
    return total


def log_likelihood(view: AnyBlock, W: Wide, H: Wide) -> float:
    """Return log p(V | W, H) of a block of Poisson counts, in double precision.

    Parameters
    ----------
    view : block of whole numbers, NaN where missing
    W, H : (m, K) and (n, K), float64, positive
    """
    rates = np.zeros(W.shape)
    add_rates(view, True, H, rates)
    return float(_log_fit(view.arguments[:3], W, H)) - float((W * rates).sum())
