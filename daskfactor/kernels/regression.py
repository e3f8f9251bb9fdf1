"""Bayesian linear regressions, one for every row: of its entries on the other factor's rows.

    v_ij ~ N(x_i . h_j, noise),    x_ik ~ N(m_k, 1 / lambda_k)

What the data say of a row are two sums over its observed entries, in double precision:

    G_i = sum_j q_ij h_j h_j',    t_i = sum_j q_ij v_ij h_j

q are the weights of cells, 1 where there are none.
G_i is kept as its upper triangle, row after row. Columns of x that do not move are taken to
the left-hand side; for those that do

    A = G_i / noise + diag(lambda),    b = t_i / noise + lambda m,    A = U' U,
    x_i ~ N(A^-1 b, A^-1) = U^-1 (U'^-1 b + z)

Everything follows IEEE 754 exactly, sum by sum, so that a row has the same bits however the
rows are split into bands.

Source: R. Salakhutdinov and A. Mnih, "Bayesian probabilistic matrix factorization using
Markov chain Monte Carlo", ICML 2008, equations 11 to 14.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.kernels.jit import inline, jit_exact
from daskfactor.kernels.langevin import fill_normals
from daskfactor.kernels.philox import Address
from daskfactor.kernels.views import (
    AnyBlock,
    BlockView,
    SparseBlock,
    cell_at,
    row_cells,
    row_weights,
    weighed,
)

Scalar = Any
Array = NDArray[Any]
Wide = NDArray[np.float64]
Columns = NDArray[np.intp]

TOGETHER = 4
"""Number of rows whose products are added at once: fewer passes over G."""


def triangle(K: int) -> int:
    """Count the numbers of the upper triangle of a K x K matrix."""
    return K * (K + 1) // 2


@inline
def _place(a: Scalar, b: Scalar, K: int) -> Scalar:
    """Return the place of entry (a, b) of a symmetric matrix in its triangle."""
    low, high = min(a, b), max(a, b)
    return low * K - low * (low - 1) // 2 + high - low


@inline
def _add_products(h: Wide, factors: Wide, gram: Wide) -> None:
    """Add f_1 h_1 h_1' + ... + f_4 h_4 h_4'."""
    K = h.shape[1]
    start = 0
    for a in range(K):
        p, q = factors[0] * h[0, a], factors[1] * h[1, a]
        r, s = factors[2] * h[2, a], factors[3] * h[3, a]
        for b in range(a, K):
            gram[start + b] += p * h[0, b] + q * h[1, b] + r * h[2, b] + s * h[3, b]
        start += K - 1 - a


@inline
def _coefficient(weights: Array, zeros: bool, rest: bool, at: int, seen: bool) -> Scalar:
    """Return the coefficient of an entry's product: its weight less that in the total."""
    if weights.ndim == 3:
        return (-1.0 if rest else 1.0) if seen != rest else 0.0
    else:
        weight = np.float64(weights[at]) if seen else 0.0
        return weight - 1.0 if zeros else weight


@jit_exact
def _add_grams(
    block: tuple[Array, Any, Any, Any], zeros: bool, other: Array, total: Wide, grams: Wide, h: Wide
) -> None:
    """Add up over observed entries; if most are, subtract the missing ones from the total."""
    (first, second, third, weights), factors = block, np.zeros(TOGETHER)
    for i in range(grams.shape[0]):
        begin, end = row_cells(first, i, other.shape[0])
        missing = 0
        for at in range(begin, end):
            missing += np.isnan(cell_at(first, second, third, i, at)[1])
        rest = zeros or (weights.ndim == 3 and first.ndim == 2 and 2 * missing < end - begin)
        if rest:
            for k in range(total.size):
                grams[i, k] += total[k]
        row, count = row_weights(first, weights, i), 0
        for at in range(begin, end):
            j, v = cell_at(first, second, third, i, at)
            factor = _coefficient(row, zeros, rest, at, not np.isnan(v))
            if factor != 0.0:
                factors[count] = factor
                for k in range(h.shape[1]):
                    h[count, k] = other[j, k]
                count += 1
                if count == TOGETHER:
                    _add_products(h, factors, grams[i])
                    count = 0
        if count:
            h[count:] = 0.0
            _add_products(h, factors, grams[i])


@jit_exact
def _add_targets(block: tuple[Array, Any, Any, Any], other: Array, targets: Wide) -> None:
    first, second, third, weights = block
    for i in range(targets.shape[0]):
        begin, end = row_cells(first, i, other.shape[0])
        for at in range(begin, end):
            j, v = cell_at(first, second, third, i, at)
            if not np.isnan(v):
                v = weighed(np.float64(v), row_weights(first, weights, i), at, True)
                for k in range(targets.shape[1]):
                    targets[i, k] += np.float64(v) * np.float64(other[j, k])


def transposed(view: AnyBlock) -> AnyBlock:
    """Copy a block with its columns as rows."""
    weights = view.weights
    if isinstance(view, BlockView):
        weights = None if weights is None else np.ascontiguousarray(weights.T)
        return BlockView(np.ascontiguousarray(view.block.T), 0, 0, view.n, view.m, weights)
    shape, pattern = (view.m, view.n), (view.indices, view.indptr)
    cols = sparse.csr_array((view.values, *pattern), shape=shape).tocsc()
    if weights is not None:
        weights = sparse.csr_array((weights, *pattern), shape=shape).tocsc().data
    return SparseBlock(cols.indptr, cols.indices, cols.data, view.n, view.m, view.zeros, weights)


def add_equations(view: AnyBlock, other: Array, grams: Wide, targets: Wide) -> Wide:
    """Add a block's share of G and t of its rows; return G, which may have become one per row.

    Parameters
    ----------
    view : block of m rows, NaN where missing
    other : (n, K), the other factor's rows
    grams : (m, K (K + 1) / 2), or (1, K (K + 1) / 2) as long as all rows have observed the same
    targets : (m, K)
    """
    K = other.shape[1]
    _add_targets(view.arguments, other, targets)
    is_sparse = isinstance(view, SparseBlock)
    total = np.zeros(triangle(K))
    if view.zeros or not is_sparse:
        wide = other.astype(np.float64)
        total += (wide.T @ wide)[np.triu_indices(K)]
        if view.weights is None and not np.isnan(view.stored[-1]).any():
            grams += total
            return grams
    if len(grams) < len(targets):
        grams = np.repeat(grams, len(targets), axis=0)
    scratch = np.empty((TOGETHER, K))
    _add_grams(view.arguments, view.zeros, other, total, grams, scratch)
    return grams


@jit_exact
def _fill_precision(gram: Wide, precision: Wide, noise: float, free: Columns, A: Wide) -> None:
    """Fill the upper triangle of G / noise + diag(lambda) over the columns that move."""
    K, scale = precision.size, 1.0 / noise
    for a in range(free.size):
        start = _place(free[a], free[a], K) - free[a]
        for b in range(a, free.size):
            A[a, b] = scale * gram[start + free[b]]
        A[a, a] += precision[free[a]]


@jit_exact
def _factorize(A: Wide) -> None:
    """Make A = U' U into U, in place, row after row; only upper triangles are read."""
    K = A.shape[0]
    for a in range(K):
        row, done = A[a], a // 4 * 4
        for c in range(0, done, 4):  # four rows at once: fewer passes over this one
            p, q, r, s = A[c, a], A[c + 1, a], A[c + 2, a], A[c + 3, a]
            for b in range(a, K):
                row[b] -= p * A[c, b] + q * A[c + 1, b] + r * A[c + 2, b] + s * A[c + 3, b]
        for c in range(done, a):
            p = A[c, a]
            for b in range(a, K):
                row[b] -= p * A[c, b]
        scale = 1.0 / np.sqrt(row[a])
        for b in range(a, K):
            row[b] *= scale


@jit_exact
def _solve(U: Wide, z: Wide, free: Columns, x: Wide) -> None:
    """Make b into U^-1 (U'^-1 b + z), in place."""
    K = x.size
    for a in range(K):
        x[a] /= U[a, a]
        for b in range(a + 1, K):
            x[b] -= x[a] * U[a, b]
    for a in range(K - 1, -1, -1):
        x[a] += z[free[a]]
        for b in range(a + 1, K):
            x[a] -= U[a, b] * x[b]
        x[a] /= U[a, a]


@jit_exact
def _draw(
    values: Array,
    grams: Wide,
    targets: Wide,
    columns: Wide,
    noise: float,
    places: tuple[Columns, Columns],
    z: Wide,
) -> None:
    (free, still), K, mean, precision = places, values.shape[1], columns[0], columns[1]
    U, x = np.empty((free.size, free.size)), np.empty(free.size)
    for i in range(values.shape[0]):
        gram = grams[min(i, grams.shape[0] - 1)]
        if i < grams.shape[0]:
            _fill_precision(gram, precision, noise, free, U)
            _factorize(U)
        for a in range(free.size):
            k = free[a]
            residual = targets[i, k]
            for c in still:
                residual -= gram[_place(k, c, K)] * np.float64(values[i, c])
            x[a] = residual / noise + precision[k] * mean[k]
        _solve(U, z[i], free, x)
        for a in range(free.size):
            values[i, free[a]] = x[a]


def draw_rows(
    values: Array, grams: Wide, targets: Wide, columns: Wide, noise: float, address: Address | None
) -> None:
    """Draw the rows of a band from their conditionals, in place.

    Parameters
    ----------
    values : (m, K), float32 or float64
    grams, targets : what `add_equations` added up over all blocks of the band
    columns : (4, K), of every column: prior mean, prior precision, anything, and 1 if it moves
        or 0 if it does not
    noise : variance of an observation
    address : of the normal numbers, see :func:`fill_normals`; in double precision. None: they
        are 0, and rows become their conditional means
    """
    free, still = np.flatnonzero(columns[3]), np.flatnonzero(columns[3] == 0)
    z = np.zeros(values.shape)
    if address is not None:
        fill_normals(z, *address)
    _draw(values, grams, targets, columns, noise, (free, still), z)
