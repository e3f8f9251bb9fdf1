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

from daskfactor.kernels.jit import jit
from daskfactor.kernels.linalg import add_matmul_nn, add_matmul_tn, matmul_nn, matmul_nt
from daskfactor.kernels.views import (
    BlockKernels,
    Kernel,
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


@lru_cache(maxsize=64)
def dense_kernels(likelihood: Likelihood, complete: bool = False) -> BlockKernels:
    """Kernels of one likelihood, made once and compiled when first called.

    Where a block is ``complete`` and the law's curvatures add up in a closed form, those of the
    multiplicative update form no matrix of them.

    ``block`` is (V, row0, col0), or (indptr, indices, values) of a sparse block whose unstored
    entries are zeros, with weights of cells or `NO_WEIGHTS` behind them, and ``work`` two tiles
    (T, n) and two lines (2, n). Compilation takes about half a second for each kernel and dtype.
    """
    if complete:
        # The argument is said: what is cached goes by how it was called.
        same, closed = dense_kernels(likelihood, False), _CURVATURES[likelihood.zeros]
        if closed is None:
            return same
        terms = tile_terms(likelihood, False, False)
        means = likelihood.zeros == "constant"  # else the ratio is v, whatever the mean
        sides = (_multiplicative(terms, by_rows, closed, means) for by_rows in (True, False))
        return same._replace(multiplicative=tuple(sides))
    # Kernels that do the same with a tile share what does it: each is compiled for itself.
    residuals, fitted = tile_terms(likelihood, True, False), _fitted(likelihood, False)
    ratios = tile_terms(likelihood, False, True)
    return BlockKernels(
        gradient=_gradient(residuals, False),
        gradient_curvature=_gradient(tile_terms(likelihood, True, True), True),
        multiplicative=(_multiplicative(ratios, True), _multiplicative(ratios, False)),
        slope=(_slope(residuals, fitted, True), _slope(residuals, fitted, False)),
        evaluate=_evaluation(_fitted(likelihood, True)),
    )


def tile_terms(likelihood: Likelihood, residual: bool, curved: bool) -> Kernel:
    """What becomes of a tile of means whose first row is ``row`` of the block.

    tile <- scale (v - mu) w if ``residual``, else the ratio of a multiplicative update;
    tile2 <- the curvature, if ``curved``; both 0 where v is missing.
    """
    weight, curvature, ratio, _, _ = entry_kernels(likelihood)

    @jit
    def terms(
        block: Window, row: int, tile: Array, tile2: Array, scale: float, law: Law, spare: Array
    ) -> None:
        first, second, third, weights = block
        real = tile.dtype.type
        for i in range(tile.shape[0]):
            data, line = written_row(first, second, third, row + i, spare[0]), tile[i]
            q = weight_row(first, second, weights, row + i, spare[1])
            if curved:
                line2 = tile2[i]
            for j in range(line.size):
                floor, numbers = law_at(law, j)
                v = real(data[j])
                mu = floored(line[j], floor)
                w, seen = weight(v, mu, *numbers), v == v
                if residual:
                    found = weighed(real(scale) * (v - mu) * w, q, j, seen)
                else:
                    found = weighed(ratio(v, mu, w, *numbers), q, j, seen)
                line[j] = found if seen else real(0)
                if curved:
                    found = weighed(curvature(real(1), v, mu, w, *numbers), q, j, seen)
                    line2[j] = found if seen else real(0)

    return terms


def _gradient(terms: Kernel, curved: bool) -> Kernel:
    @jit
    def gradient(
        block: Window,
        factors: Pair,
        scale: float,
        law: Law,
        out: tuple[Pair, Pair],
        work: Scratch,
    ) -> None:
        (W, H), ((GW, GH), (CW, CH)) = factors, out
        tile, tile2, line = work
        GH[:, :] = 0
        for begin in range(0, W.shape[0], tile.shape[0]):
            end = min(begin + tile.shape[0], W.shape[0])
            w, r, c = W[begin:end], tile[: end - begin], tile2[: end - begin]
            matmul_nt(w, H, r)
            terms(block, begin, r, c, scale, law, line)
            matmul_nn(r, H, GW[begin:end])
            add_matmul_tn(r, w, GH)
            if curved:
                add_matmul_nn(c, H, CW[begin:end])
                add_matmul_tn(c, w, CH)

    return gradient


@jit
def _add_nothing(theta: Array, other: Array, den: Array) -> None:
    """Leave the denominator as it is."""


@jit
def _add_column_sums(theta: Array, other: Array, den: Array) -> None:
    """Add C H for curvatures of 1: the column sums of H, to every row."""
    sums = np.zeros(other.shape[1])
    for j in range(other.shape[0]):
        for k in range(sums.size):
            sums[k] += other[j, k]
    for i in range(theta.shape[0]):
        for k in range(sums.size):
            den[i, k] += den.dtype.type(sums[k])


@jit
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


def _multiplicative(
    terms: Kernel, by_rows: bool, closed: Kernel | None = None, means: bool = True
) -> Kernel:
    """Make the kernel of one side; ``closed`` adds the curvatures in place of a matrix of them.

    Without ``means`` the ratio is the same at every mean, and none is computed.
    """
    curved, add_closed = closed is None, closed or _add_nothing

    @jit
    def multiplicative(block: Window, factors: Pair, law: Law, out: Pair, work: Scratch) -> None:
        (W, H), (num, den) = factors, out
        tile, tile2, line = work
        for begin in range(0, W.shape[0], tile.shape[0]):
            end = min(begin + tile.shape[0], W.shape[0])
            w, q, c = W[begin:end], tile[: end - begin], tile2[: end - begin]
            if means:
                matmul_nt(w, H, q)
            terms(block, begin, q, c, 1.0, law, line)
            if by_rows:
                add_matmul_nn(q, H, num[begin:end])
            else:
                add_matmul_tn(q, w, num)
            if curved:
                if by_rows:
                    add_matmul_nn(c, H, den[begin:end])
                else:
                    add_matmul_tn(c, w, den)
        if by_rows:
            add_closed(W, H, den)
        else:
            add_closed(H, W, den)

    return multiplicative


def _fitted(likelihood: Likelihood, squares: bool) -> Kernel:
    weight, _, _, deviance, _ = entry_kernels(likelihood)

    @jit
    def fitted(block: Window, row: int, tile: Array, out: Array, law: Law, spare: Array) -> None:
        """Set ``out`` to the deviances of a tile of means, and tile to (v - mu) w.

        Or to (v - mu)**2 w, if ``squares``.
        """
        first, second, third, weights = block
        real = tile.dtype.type
        for i in range(tile.shape[0]):
            data, line, lost = written_row(first, second, third, row + i, spare[0]), tile[i], out[i]
            q = weight_row(first, second, weights, row + i, spare[1])
            for j in range(line.size):
                floor, numbers = law_at(law, j)
                v, mu = real(data[j]), floored(line[j], floor)
                seen = v == v
                v = v if seen else mu  # a missing entry adds d(mu | mu) = 0
                term = (v - mu) * (v - mu) if squares else v - mu
                term = weighed(term * weight(v, mu, *numbers), q, j, seen)
                line[j] = term if seen else real(0)
                lost[j] = weighed(deviance(v, mu, *numbers), q, j, seen)

    return fitted


@jit
def _sum(line: Array) -> float:
    """Add up a line in double precision."""
    total = 0.0
    for j in range(line.size):
        total += np.float64(line[j])
    return total


@jit
def _take_off_sums(tile: Array, by_rows: bool, out: Array) -> None:
    """Subtract the sums of a tile's rows, or of its columns."""
    for i in range(tile.shape[0]):
        line = tile[i]
        if by_rows:
            out[i] -= _sum(line)
        else:
            for j in range(line.size):
                out[j] -= np.float64(line[j])


def _slope(terms: Kernel, fitted: Kernel, by_rows: bool) -> Kernel:
    @jit
    def slope(
        block: Window,
        factors: Pair,
        law: Law,
        out: Pair,
        work: tuple[Array, Array, Array, Array],
    ) -> None:
        (W, H), (gradient, fits) = factors, out
        _, tile, tile2, line = work
        for begin in range(0, W.shape[0], tile.shape[0]):
            end = min(begin + tile.shape[0], W.shape[0])
            w, r, d = W[begin:end], tile[: end - begin], tile2[: end - begin]
            matmul_nt(w, H, r)
            if fits.size:
                fitted(block, begin, r, d, law, line)
                _take_off_sums(d, by_rows, fits[begin:end] if by_rows else fits)
            else:
                terms(block, begin, r, d, 1.0, law, line)
            if by_rows:
                add_matmul_nn(r, H, gradient[begin:end])
            else:
                add_matmul_tn(r, w, gradient)

    return slope


@jit
def _monitor(tile: Array, first: int, cell: int, cells: Watched) -> int:
    """Welford update of the cells in the rows of this tile; return the next cell."""
    (rows, cols), mean, m2, count = cells
    while cell < rows.size and rows[cell] < first + tile.shape[0]:
        value = tile[rows[cell] - first, cols[cell]]
        delta = value - mean[cell]
        mean[cell] += delta / count
        m2[cell] += delta * (value - mean[cell])
        cell += 1
    return cell


def _evaluation(fitted: Kernel) -> Kernel:
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
            fitted(block, begin, mu, lost, law, line)
            for i in range(end - begin):
                out[0] -= _sum(lost[i])
                out[1] += _sum(mu[i])

    return evaluate
