"""One block, every cell, one step: fused kernels over row tiles, around three matrix products.

A tile of T rows of mu = W H.T is computed, turned into residuals where it
lies, and multiplied into both gradients while it is still in the second-level
cache: 6 m n K operations and one read of V. V is the full array the block
lives in, so a view of a user's array needs no copy; NaN marks missing entries. Rows of a
sparse block whose unstored entries are zeros are written out one by one: laws under which
zeros do not add up in a closed form (`Likelihood.zeros`) have to visit them.

Shapes, all C-contiguous: V (I, J), any real dtype; W (m, K), H (n, K), tiles
(T, n) of one float dtype. The block (V, row0, col0) is
V[row0 : row0 + m, col0 : col0 + n].
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import jit, jit_inner
from daskfactor.kernels.linalg import add_matmul_nn, add_matmul_tn, matmul_nt
from daskfactor.kernels.views import (
    Kernel,
    Kind,
    Law,
    Watched,
    entry_kernels,
    floored,
    law_at,
    weighed,
    weight_row,
    written_row,
)
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]
Window = tuple[Array, Any, Any, Any]
Pair = tuple[Array, Array]
Scratch = tuple[Array, Array, Array]


@lru_cache(maxsize=256)
def accumulation(
    likelihood: Likelihood, kind: Kind, factor: int | None, curved: bool, complete: bool = False
) -> Kernel:
    """Make the kernel that adds a block's `Sums` of one factor, whichever, or of both, if None.

    kernel(block, factors, scale, law, out, work), compiled when first called, in about half a
    second for each dtype. ``block`` is (V, row0, col0), or (indptr, indices, values) of a sparse
    block whose unstored entries are zeros, with weights of cells or `NO_WEIGHTS` behind them;
    ``law`` a :data:`Law`; ``out`` terms and curvatures, a pair of arrays each, of which those not
    needed are empty, and the fits of one factor, which may be empty; ``work`` two tiles
    (T, n) and two lines (2, n).

    Where a block is ``complete`` and the law's curvatures add up in a closed form, those of the
    multiplicative update form no matrix of them.
    """
    if factor == 1:
        return accumulation(likelihood, kind, 0, curved, complete)
    closed = _CURVATURES[likelihood.zeros] if complete and kind == "ratio" and curved else None
    if complete and closed is None:
        # All arguments are positional, as in other calls: the cache tells call forms apart.
        return accumulation(likelihood, kind, factor, curved, False)
    tiled = curved and closed is None
    fittable = kind == "score" and factor is not None
    # The ratio of a law that adds no matrix of curvatures may be v, whatever the mean.
    means = closed is None or likelihood.zeros == "constant"
    terms = tile_terms(likelihood, kind, "curvature" if tiled else None)
    fitted = tile_terms(likelihood, "score", "deviance") if fittable else terms
    add_closed = closed or _add_nothing

    @jit
    def accumulate(
        block: Window,
        factors: Pair,
        scale: float,
        law: Law,
        out: tuple[Pair, Pair, Array],
        work: Scratch,
    ) -> None:
        (W, H), (sums, curvatures, fits) = factors, out
        tile, tile2, line = work
        by_rows, by_columns = sums[0].size > 0, sums[1].size > 0
        for begin in range(0, W.shape[0], tile.shape[0]):
            end = min(begin + tile.shape[0], W.shape[0])
            w, r, c = W[begin:end], tile[: end - begin], tile2[: end - begin]
            if means:
                matmul_nt(w, H, r)
            if fittable and fits.size:
                fitted(block, begin, r, c, scale, law, line)
                _take_off_sums(c, by_rows, fits[begin:end] if by_rows else fits)
            else:
                terms(block, begin, r, c, scale, law, line)
            if by_rows:
                add_matmul_nn(r, H, sums[0][begin:end])
                if tiled:
                    add_matmul_nn(c, H, curvatures[0][begin:end])
            if by_columns:
                add_matmul_tn(r, w, sums[1])
                if tiled:
                    add_matmul_tn(c, w, curvatures[1])
        if by_rows:
            add_closed(W, H, curvatures[0])
        if by_columns:
            add_closed(H, W, curvatures[1])

    return accumulate


@lru_cache(maxsize=256)
def tile_terms(likelihood: Likelihood, kind: str, other: str | None) -> Kernel:
    """Make the kernel that replaces a tile of means from row ``row`` of the block on by terms.

    tile <- scale (v - mu) w, "score", or the ratio of a multiplicative update, "ratio", or
    (v - mu)**2 w, "square"; tile2 <- the "curvature" or "deviance", if any; 0 where v is missing.
    """
    weight, curvature, ratio, deviance, _ = entry_kernels(likelihood)
    score, square = kind == "score", kind == "square"
    curved, fitted = other == "curvature", other == "deviance"

    @jit_inner
    def terms(
        block: Window, row: int, tile: Array, tile2: Array, scale: float, law: Law, spare: Array
    ) -> None:
        first, second, third, weights = block
        real = tile.dtype.type
        for i in range(tile.shape[0]):
            data, line = written_row(first, second, third, row + i, spare[0]), tile[i]
            q = weight_row(first, second, weights, row + i, spare[1])
            if curved or fitted:
                line2 = tile2[i]
            for j in range(line.size):
                floor, numbers = law_at(law, j)
                v, mu = real(data[j]), floored(line[j], floor)
                seen = v == v
                if fitted:
                    v = v if seen else mu  # a missing entry adds d(mu | mu) = 0
                w = weight(v, mu, *numbers)
                if score:
                    term = weighed(real(scale) * (v - mu) * w, q, j, seen)
                elif square:
                    term = weighed((v - mu) * (v - mu) * w, q, j, seen)
                else:
                    term = weighed(ratio(v, mu, w, *numbers), q, j, seen)
                line[j] = term if seen else real(0)
                if curved:
                    term = weighed(curvature(real(1), v, mu, w, *numbers), q, j, seen)
                    line2[j] = term if seen else real(0)
                if fitted:
                    line2[j] = weighed(deviance(v, mu, *numbers), q, j, seen)

    return terms


@jit_inner
def _add_nothing(theta: Array, other: Array, den: Array) -> None:
    """Leave the denominator as it is."""


@jit_inner
def _add_column_sums(theta: Array, other: Array, den: Array) -> None:
    """Add C H for curvatures of 1: the column sums of H, to every row."""
    sums = np.zeros(other.shape[1])
    for j in range(other.shape[0]):
        for k in range(sums.size):
            sums[k] += other[j, k]
    for i in range(theta.shape[0]):
        for k in range(sums.size):
            den[i, k] += den.dtype.type(sums[k])


@jit_inner
def _add_gram_product(theta: Array, other: Array, den: Array) -> None:
    """Add C H for curvatures mu = W H.T: W (H.T H)."""
    gram = np.zeros((other.shape[1], other.shape[1]), other.dtype)
    add_matmul_tn(other, other, gram)
    add_matmul_nn(theta, gram, den)


_CURVATURES: dict[str | None, Kernel | None] = {
    None: None,
    "constant": _add_column_sums,
    "linear": _add_gram_product,
}
"""Kernel that adds the curvatures of a complete block, by `Likelihood.zeros`."""


@jit_inner
def _sum(line: Array) -> float:
    """Add up a line in double precision."""
    total = 0.0
    for j in range(line.size):
        total += np.float64(line[j])
    return total


@jit_inner
def _take_off_sums(tile: Array, by_rows: bool, out: Array) -> None:
    """Subtract the sums of a tile's rows, or of its columns."""
    for i in range(tile.shape[0]):
        line = tile[i]
        if by_rows:
            out[i] -= _sum(line)
        else:
            for j in range(line.size):
                out[j] -= np.float64(line[j])


@jit_inner
def _monitor(tile: Array, first: int, cell: int, cells: Watched) -> int:
    """Update the moments of the cells in the rows of this tile; return the next cell."""
    (rows, cols), mean, m2, count = cells
    while cell < rows.size and rows[cell] < first + tile.shape[0]:
        value = tile[rows[cell] - first, cols[cell]]
        delta = value - mean[cell]
        mean[cell] += delta / count
        m2[cell] += delta * (value - mean[cell])
        cell += 1
    return cell


@lru_cache(maxsize=64)
def evaluation(likelihood: Likelihood) -> Kernel:
    """Make the kernel that adds to a block's ``total``, and moves its monitored ``cells``.

    kernel(block, factors, law, out, cells, work). The means of the cells, a :data:`Watched`,
    block-local, in row-major order, not floored, go into the running mean and sum of squares of
    ``count`` draws, this one among them.
    """
    fitted = tile_terms(likelihood, "square", "deviance")

    @jit
    def evaluate(
        block: Window, factors: Pair, law: Law, out: Array, cells: Watched, work: Scratch
    ) -> None:
        (W, H), (tile, tile2, line) = factors, work
        cell = 0
        for begin in range(0, W.shape[0], tile.shape[0]):
            end = min(begin + tile.shape[0], W.shape[0])
            mu, lost = tile[: end - begin], tile2[: end - begin]
            matmul_nt(W[begin:end], H, mu)
            cell = _monitor(mu, begin, cell, cells)
            fitted(block, begin, mu, lost, 1.0, law, line)
            for i in range(end - begin):
                out[0] -= _sum(lost[i])
                out[1] += _sum(mu[i])

    return evaluate
