"""Sharing counts out among components: by draws, or in their mean.

Draws
-----
    (s_ij1, ..., s_ijK) ~ Multinomial(v_ij; w_i1 h_1j, ..., w_iK h_Kj)

Only sums of S over rows and over columns are kept. A cell's random numbers come
from a stream of its own, addressed by its global row and column, so S does not
depend on how the matrix is cut into blocks. Zeros need no numbers.

Source: A. T. Cemgil, "Bayesian inference for nonnegative matrix factorisation
models", Computational Intelligence and Neuroscience, 2009, section 3.

Mean field
----------
A sweep over observed cells of an allocation model shares the count of each out among the
hidden states in proportion to products of table entries, one factor for each draw of a token:

    q(h | m) = prod_n weight[row[m, n] + column[n, h]] / norm[m]

Source: M. B. Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor
factorizations by simulating Pólya urns".
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import inline, jit, jit_exact, stack_array
from daskfactor.kernels.polynomials import log
from daskfactor.kernels.variates import STREAM, Stream, binomial, start_cell, uniform
from daskfactor.kernels.views import AnyBlock, SparseBlock, cell_at, row_cells

Scalar = Any
Array = NDArray[Any]
Wide = NDArray[np.float64]
Places = NDArray[np.int64]

PLACE = 3
"""A count is placed unit by unit while it is at most PLACE times K, beyond that by binomials."""
FAINT = 1e-280
"""Products below which a cell is done again with logarithms: the tables' entries underflow."""
_HALF_LOG_TURN = 0.91893853320467274178  # log(2 pi) / 2


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
def _allocate(
    block: tuple[Array, Any, Any],
    factors: tuple[Array, Array],
    offsets: tuple[int, int],
    key: NDArray[np.uint32],
    sweep: int,
    c: Wide,
    sums: tuple[Wide, Wide],
) -> None:
    first, second, third = block
    W, H = factors
    SW, SH = sums
    stream = stack_array(STREAM, np.uint64)
    for i in range(W.shape[0]):
        begin, end = row_cells(first, i, H.shape[0])
        for at in range(begin, end):
            j, count = cell_at(first, second, third, i, at)
            if count > 0:  # neither a zero nor NaN
                start_cell(stream, key, sweep, offsets[0] + i, offsets[1] + j)
                _share_out(np.int64(count), W[i], H[j], c, stream, SW[i], SH[j])


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
    _allocate(view.arguments[:3], (W, H), offsets, key, sweep, c, (SW, SH))


@jit_exact
def _any_missing(values: Array) -> bool:
    return bool(np.isnan(values).any())


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
        few = not view.zeros
        torn = few or _any_missing(view.values)
    else:
        few = torn = _any_missing(view.block)
    if few:  # over observed cells alone: nothing cancels, however few they are
        _add_rates(view.arguments[:3], rows, False, other, rates)
        return
    rates += other.sum(axis=0, dtype=np.float64)
    if torn:
        _add_rates(view.arguments[:3], rows, True, other, rates)


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
    """Log p(V | W, H) of a block of Poisson counts, in double precision.

    Parameters
    ----------
    view : block of whole numbers, NaN where missing
    W, H : (m, K) and (n, K), float64, positive
    """
    rates = np.zeros(W.shape)
    add_rates(view, True, H, rates)
    return float(_log_fit(view.arguments[:3], W, H)) - float((W * rates).sum())


@inline
def _stirling(x: Scalar) -> Scalar:
    """Digamma and log-gamma of x > 0, from their asymptotic series at x + 8."""
    q = x * (x + 7.0)
    q1, q2, q3 = q + 6.0, q + 10.0, q + 12.0
    left, right = q * q1, q2 * q3
    slope = (2.0 * x + 7.0) * ((q + q1) / left + (q2 + q3) / right)
    y = x + 8.0
    inverse = 1.0 / y
    r = inverse * inverse
    p = 1.0 / 12.0 * r - 691.0 / 32760.0
    p = p * r + 1.0 / 132.0
    p = p * r - 1.0 / 240.0
    p = p * r + 1.0 / 252.0
    p = p * r - 1.0 / 120.0
    p = p * r + 1.0 / 12.0
    g = 1.0 / 156.0 * r - 691.0 / 360360.0
    g = g * r + 1.0 / 1188.0
    g = g * r - 1.0 / 1680.0
    g = g * r + 1.0 / 1260.0
    g = g * r - 1.0 / 360.0
    g = g * r + 1.0 / 12.0
    level = log(y)
    digamma = level - 0.5 * inverse - p * r - slope
    lgamma = (y - 0.5) * level - y + _HALF_LOG_TURN + g * inverse - (log(left) + log(right))
    return digamma, lgamma


@jit
def gamma_functions(shapes: Wide, counts: Wide, digamma: Wide) -> float:
    """Sum of log Gamma(shapes + counts); their digamma goes into ``digamma``.

    Parameters
    ----------
    shapes, counts : (cells,), sums between 1e-300 and 1e30
    digamma : (cells,), overwritten
    """
    total = 0.0
    for cell in range(shapes.size):
        digamma[cell], lgamma = _stirling(shapes[cell] + counts[cell])
        total += lgamma
    return total


@jit
def add_up(owner: Places, counts: Wide, totals: Wide) -> None:
    """Totals of the counts: ``owner`` (cells,) is the total that each adds to."""
    totals[:] = 0.0
    for cell in range(counts.size):
        totals[owner[cell]] += counts[cell]


@jit
def inner(x: Wide, y: Wide) -> float:
    """Sum of products, the same bits wherever the arrays lie in memory."""
    total = 0.0
    for cell in range(x.size):
        total += x[cell] * y[cell]
    return total


@inline
def _products(m: int, row: Places, column: Places, straight: Any, weight: Wide, share: Wide) -> Any:
    """Products of table entries for one observed cell, and their sum."""
    share[:] = 1.0
    for n in range(row.shape[1]):
        start = row[m, n]
        if straight[n]:
            for h in range(share.size):
                share[h] *= weight[start + h]
        else:
            for h in range(share.size):
                share[h] *= weight[start + column[n, h]]
    norm = 0.0
    for h in range(share.size):
        norm += share[h]
    return norm


@inline
def _faint_products(m: int, row: Places, column: Places, level: Wide, share: Wide) -> Any:
    """The same over their largest, from logarithms; returns the sum and that largest one's log."""
    share[:] = 0.0
    for n in range(row.shape[1]):
        for h in range(share.size):
            share[h] += level[row[m, n] + column[n, h]]
    top = share[0]
    for h in range(share.size):
        top = max(top, share[h])
    norm = 0.0
    for h in range(share.size):
        share[h] = np.exp(share[h] - top)
        norm += share[h]
    return norm, top


@jit
def share_out(
    row: Places,
    column: Places,
    straight: NDArray[np.bool_],
    values: Places,
    weight: Wide,
    level: Wide,
    share: Wide,
    counts: Wide,
) -> float:
    """Expected counts of all tables under q, and the sum of values times log norm.

    Parameters
    ----------
    row : (M, N)
    column : (N, H)
    straight : (N,), whether ``column[n]`` is 0, 1, ..., H - 1
    values : (M,) counts of the observed cells
    weight, level : (cells,), table entries and their logarithms
    share : (H,) scratch
    counts : (cells,), overwritten
    """
    counts[:] = 0.0
    total = 0.0
    for m in range(values.size):
        norm = _products(m, row, column, straight, weight, share)
        top = 0.0
        if not norm > FAINT:
            norm, top = _faint_products(m, row, column, level, share)
        scale = values[m] / norm
        for h in range(share.size):
            share[h] *= scale
        for n in range(row.shape[1]):
            start = row[m, n]
            if straight[n]:
                for h in range(share.size):
                    counts[start + h] += share[h]
            else:
                for h in range(share.size):
                    counts[start + column[n, h]] += share[h]
        total += values[m] * (np.log(norm) + top)
    return total
