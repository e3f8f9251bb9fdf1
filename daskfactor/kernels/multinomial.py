"""Sharing the counts of a block out among the components, and the rates that go with it.

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
from daskfactor.kernels.views import AnyBlock, BlockView, SparseBlock

Scalar = Any
Array = NDArray[Any]
Wide = NDArray[np.float64]

PLACE = 3
"""A count is placed unit by unit while it is at most PLACE times K, beyond that by binomials."""


@inline
def _cumulate(w: Array, h: Array, c: Wide) -> Scalar:
    """Running sums of the weights w h, and the last of them."""
    total = 0.0
    for k in range(c.size):
        total += np.float64(w[k]) * np.float64(h[k])
        c[k] = total
    return total


@inline
def _place_units(count: int, c: Wide, total: Scalar, stream: Stream, sw: Wide, sh: Wide) -> None:
    last = c.size - 1
    for _ in range(count):
        u = uniform(stream) * total
        k = 0
        while k < last and c[k] <= u:
            k += 1
        sw[k] += 1.0
        sh[k] += 1.0


@inline
def _split_count(
    count: Scalar, w: Array, h: Array, c: Wide, stream: Stream, sw: Wide, sh: Wide
) -> None:
    """Binomials from the last component down; c[k] is what components 0 to k weigh."""
    left = count
    for k in range(c.size - 1, 0, -1):
        if left == 0:
            break
        share = np.float64(w[k]) * np.float64(h[k]) / c[k]
        part = binomial(left, share, stream)
        sw[k] += part
        sh[k] += part
        left -= part
    sw[0] += left
    sh[0] += left


@inline
def _share_out(
    count: Scalar, w: Array, h: Array, c: Wide, stream: Stream, sw: Wide, sh: Wide
) -> None:
    """Add one cell's S to its row's and its column's sums; nothing if all weights are zero."""
    total = _cumulate(w, h, c)
    if not total > 0.0:
        return
    if count <= PLACE * c.size:
        _place_units(count, c, total, stream, sw, sh)
    else:
        _split_count(count, w, h, c, stream, sw, sh)


@jit_exact
def _allocate_dense(
    V: Array,
    corner: tuple[int, int],
    W: Array,
    H: Array,
    offsets: tuple[int, int],
    key: NDArray[np.uint32],
    sweep: int,
    c: Wide,
    SW: Wide,
    SH: Wide,
) -> None:
    stream = stack_array(STREAM, np.uint64)
    for i in range(W.shape[0]):
        for j in range(H.shape[0]):
            count = V[corner[0] + i, corner[1] + j]
            if count > 0:  # neither a zero nor NaN
                start_cell(stream, key, sweep, offsets[0] + i, offsets[1] + j)
                _share_out(np.int64(count), W[i], H[j], c, stream, SW[i], SH[j])


@jit_exact
def _allocate_sparse(
    block: tuple[Array, Array, Array],
    W: Array,
    H: Array,
    offsets: tuple[int, int],
    key: NDArray[np.uint32],
    sweep: int,
    c: Wide,
    SW: Wide,
    SH: Wide,
) -> None:
    indptr, indices, values = block
    stream = stack_array(STREAM, np.uint64)
    for i in range(W.shape[0]):
        for at in range(indptr[i], indptr[i + 1]):
            if values[at] > 0:
                j = np.int64(indices[at])
                start_cell(stream, key, sweep, offsets[0] + i, offsets[1] + j)
                _share_out(np.int64(values[at]), W[i], H[j], c, stream, SW[i], SH[j])


def allocate(
    view: AnyBlock,
    W: Array,
    H: Array,
    offsets: tuple[int, int],
    key: NDArray[np.uint32],
    sweep: int,
    SW: Wide,
    SH: Wide,
) -> None:
    """Draw S of every observed cell of a block; add its sums over the block to SW and SH.

    SW[i, k] += sum_j s_ijk,  SH[j, k] += sum_i s_ijk

    Parameters
    ----------
    view : block of whole numbers of at most 2**31, NaN where missing
    W, H : (m, K) and (n, K), C-contiguous, one float dtype, not negative
    offsets : global numbers of the block's first row and column
    key, sweep : the rest of the address, see :func:`start_cell`
    SW, SH : (m, K) and (n, K), float64
    """
    c = np.empty(W.shape[1])
    rest = (W, H, offsets, key, sweep, c, SW, SH)
    if isinstance(view, SparseBlock):
        _allocate_sparse((view.indptr, view.indices, view.values), *rest)
        return
    _allocate_dense(view.array, (view.row0, view.col0), *rest)


@jit_exact
def _any_missing(values: Array) -> bool:
    return bool(np.isnan(values).any())


@jit_exact
def _rates_dense(V: Array, corner: tuple[int, int], rows: bool, other: Array, rates: Wide) -> None:
    """Add over the observed cells alone: nothing cancels, however few they are."""
    m = rates.shape[0] if rows else other.shape[0]
    n = other.shape[0] if rows else rates.shape[0]
    for i in range(m):
        for j in range(n):
            if not np.isnan(V[corner[0] + i, corner[1] + j]):
                own, met = (i, j) if rows else (j, i)
                for k in range(other.shape[1]):
                    rates[own, k] += other[met, k]


@jit_exact
def _rates_sparse(
    block: tuple[Array, Array, Array],
    rows: bool,
    missing: bool,
    sign: float,
    other: Array,
    rates: Wide,
) -> None:
    """Add ``sign`` times the other factor over the stored cells that are (or are not) missing."""
    indptr, indices, values = block
    for i in range(indptr.size - 1):
        for at in range(indptr[i], indptr[i + 1]):
            if np.isnan(values[at]) == missing:
                j = np.int64(indices[at])
                own, met = (i, j) if rows else (j, i)
                for k in range(other.shape[1]):
                    rates[own, k] += sign * other[met, k]


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
    if isinstance(view, SparseBlock):
        block = (view.indptr, view.indices, view.values)
        if not view.zeros:
            _rates_sparse(block, rows, False, 1.0, other, rates)
            return
        rates += other.sum(axis=0, dtype=np.float64)
        if _any_missing(view.values):
            _rates_sparse(block, rows, True, -1.0, other, rates)
        return
    assert isinstance(view, BlockView)
    if _any_missing(view.block):
        _rates_dense(view.array, (view.row0, view.col0), rows, other, rates)
        return
    rates += other.sum(axis=0, dtype=np.float64)


@jit_exact
def _log_fit(v: Scalar, w: Array, h: Array) -> float:
    mu = 0.0
    for k in range(w.size):
        mu += w[k] * h[k]
    return v * np.log(mu) - math.lgamma(v + 1.0)


@jit_exact
def _log_fit_dense(V: Array, corner: tuple[int, int], W: Array, H: Array) -> float:
    total = 0.0
    for i in range(W.shape[0]):
        for j in range(H.shape[0]):
            v = np.float64(V[corner[0] + i, corner[1] + j])
            if v > 0:
                total += _log_fit(v, W[i], H[j])
    return total


@jit_exact
def _log_fit_sparse(block: tuple[Array, Array, Array], W: Array, H: Array) -> float:
    indptr, indices, values = block
    total = 0.0
    for i in range(W.shape[0]):
        for at in range(indptr[i], indptr[i + 1]):
            v = np.float64(values[at])
            if v > 0:
                total += _log_fit(v, W[i], H[np.int64(indices[at])])
    return total


def log_likelihood(view: AnyBlock, W: Wide, H: Wide) -> float:
    """Log p(V | W, H) of a block of Poisson counts, in double precision.

    Parameters
    ----------
    view : block of whole numbers, NaN where missing
    W, H : (m, K) and (n, K), float64, positive
    """
    rates = np.zeros(W.shape)
    add_rates(view, True, H, rates)
    whole = float((W * rates).sum())
    if isinstance(view, SparseBlock):
        return _log_fit_sparse((view.indptr, view.indices, view.values), W, H) - whole
    return _log_fit_dense(view.array, (view.row0, view.col0), W, H) - whole
