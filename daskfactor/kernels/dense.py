"""One dense block, one step: fused kernels over row tiles, around three matrix products.

A tile of T rows of mu = W H.T is computed, turned into residuals where it
lies, and multiplied into both gradients while it is still in the second-level
cache: 6 m n K operations and one read of V. V is the full array the block
lives in, so a view of a user's array needs no copy; NaN marks missing entries.

Shapes, all C-contiguous: V (I, J), any real dtype; W (m, K), H (n, K), tile
(T, n) of one float dtype. The block is V[row0 : row0 + m, col0 : col0 + n].
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from numpy.typing import NDArray

from daskfactor.kernels.blas import add_matmul_nn, add_matmul_tn, matmul_nn, matmul_nt
from daskfactor.kernels.elementwise import tile_kernels
from daskfactor.kernels.jit import jit
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]


class DenseKernels(NamedTuple):
    """The jitted kernels of one beta. Outputs are the caller's arrays; nothing is allocated.

    In all of them mu = max(W H.T, floor), M is 1 where V is observed, products
    of arrays are entry by entry, and the block starts at (row0, col0) of V.

    gradient(V, row0, col0, W, H, scale, floor, GW, GH, tile)
        R = scale M (V - mu) mu**(beta - 2);  GW = R H,  GH = R.T W.
    gradient_curvature(V, row0, col0, W, H, scale, floor, GW, GH, CW, CH, tile, tile2)
        as gradient, and CW += C H,  CH += C.T W  with C = M mu**(beta - 1).
    multiplicative_rows(V, row0, col0, W, H, floor, num, den, tile, tile2)
        num (m, K) += (M V mu**(beta - 2)) H,  den += (M mu**(beta - 1)) H.
    multiplicative_cols(V, row0, col0, W, H, floor, num, den, tile, tile2)
        num (n, K) += (M V mu**(beta - 2)).T W,  den += (M mu**(beta - 1)).T W.
    evaluate(V, row0, col0, W, H, floor, tile, out, cell_rows, cell_cols, mean, m2, count)
        out (2,) float64 += (-sum M d_beta(V | mu), sum M (V - mu)**2 mu**(beta - 2)); the
        means of the monitored cells (block-local, row-major order, not floored) go into
        the running mean and sum of squares, ``count`` draws including this one.

    Source: Şimşekli et al. 2017, eq. 6 and 7; Şimşekli et al. 2015, section 4.
    """

    gradient: Callable[..., None]
    gradient_curvature: Callable[..., None]
    multiplicative_rows: Callable[..., None]
    multiplicative_cols: Callable[..., None]
    evaluate: Callable[..., None]


@jit
def _monitor(
    tile: Array,
    first: int,
    cell: int,
    cell_rows: NDArray[Any],
    cell_cols: NDArray[Any],
    mean: Array,
    m2: Array,
    count: int,
) -> int:
    """Welford update of the cells in the rows of this tile; return the next cell."""
    while cell < cell_rows.size and cell_rows[cell] < first + tile.shape[0]:
        value = tile[cell_rows[cell] - first, cell_cols[cell]]
        delta = value - mean[cell]
        mean[cell] += delta / count
        m2[cell] += delta * (value - mean[cell])
        cell += 1
    return cell


def _gradients(likelihood: Likelihood) -> tuple[Callable[..., None], Callable[..., None]]:
    tiles = tile_kernels(likelihood)
    residual, residual_curvature = tiles.residual, tiles.residual_curvature

    @jit
    def gradient(
        V: Array,
        row0: int,
        col0: int,
        W: Array,
        H: Array,
        scale: float,
        floor: float,
        GW: Array,
        GH: Array,
        tile: Array,
    ) -> None:
        GH[:, :] = 0
        for begin in range(0, W.shape[0], tile.shape[0]):
            end = min(begin + tile.shape[0], W.shape[0])
            w, r = W[begin:end], tile[: end - begin]
            matmul_nt(w, H, r)
            residual(V, row0 + begin, col0, r, scale, floor)
            matmul_nn(r, H, GW[begin:end])
            add_matmul_tn(r, w, GH)

    @jit
    def gradient_curvature(
        V: Array,
        row0: int,
        col0: int,
        W: Array,
        H: Array,
        scale: float,
        floor: float,
        GW: Array,
        GH: Array,
        CW: Array,
        CH: Array,
        tile: Array,
        tile2: Array,
    ) -> None:
        GH[:, :] = 0
        for begin in range(0, W.shape[0], tile.shape[0]):
            end = min(begin + tile.shape[0], W.shape[0])
            w, r, c = W[begin:end], tile[: end - begin], tile2[: end - begin]
            matmul_nt(w, H, r)
            residual_curvature(V, row0 + begin, col0, r, c, scale, floor)
            matmul_nn(r, H, GW[begin:end])
            add_matmul_tn(r, w, GH)
            add_matmul_nn(c, H, CW[begin:end])
            add_matmul_tn(c, w, CH)

    return gradient, gradient_curvature


def _multiplicative(likelihood: Likelihood) -> tuple[Callable[..., None], Callable[..., None]]:
    ratio_curvature = tile_kernels(likelihood).ratio_curvature

    @jit
    def multiplicative_rows(
        V: Array,
        row0: int,
        col0: int,
        W: Array,
        H: Array,
        floor: float,
        num: Array,
        den: Array,
        tile: Array,
        tile2: Array,
    ) -> None:
        for begin in range(0, W.shape[0], tile.shape[0]):
            end = min(begin + tile.shape[0], W.shape[0])
            q, c = tile[: end - begin], tile2[: end - begin]
            matmul_nt(W[begin:end], H, q)
            ratio_curvature(V, row0 + begin, col0, q, c, floor)
            add_matmul_nn(q, H, num[begin:end])
            add_matmul_nn(c, H, den[begin:end])

    @jit
    def multiplicative_cols(
        V: Array,
        row0: int,
        col0: int,
        W: Array,
        H: Array,
        floor: float,
        num: Array,
        den: Array,
        tile: Array,
        tile2: Array,
    ) -> None:
        for begin in range(0, W.shape[0], tile.shape[0]):
            end = min(begin + tile.shape[0], W.shape[0])
            w, q, c = W[begin:end], tile[: end - begin], tile2[: end - begin]
            matmul_nt(w, H, q)
            ratio_curvature(V, row0 + begin, col0, q, c, floor)
            add_matmul_tn(q, w, num)
            add_matmul_tn(c, w, den)

    return multiplicative_rows, multiplicative_cols


def _evaluation(likelihood: Likelihood) -> Callable[..., None]:
    deviance = tile_kernels(likelihood).deviance

    @jit
    def evaluate(
        V: Array,
        row0: int,
        col0: int,
        W: Array,
        H: Array,
        floor: float,
        tile: Array,
        out: Array,
        cell_rows: NDArray[Any],
        cell_cols: NDArray[Any],
        mean: Array,
        m2: Array,
        count: int,
    ) -> None:
        cell = 0
        for begin in range(0, W.shape[0], tile.shape[0]):
            end = min(begin + tile.shape[0], W.shape[0])
            mu = tile[: end - begin]
            matmul_nt(W[begin:end], H, mu)
            cell = _monitor(mu, begin, cell, cell_rows, cell_cols, mean, m2, count)
            deviance(V, row0 + begin, col0, mu, floor, out)

    return evaluate


def dense_kernels(likelihood: Likelihood) -> DenseKernels:
    """Kernels of one beta-divergence, made once and compiled when first called.

    beta = 2, 1, 0.5, 0 and -1 compile to multiplications, divisions and square
    roots; any other beta goes through a power. Compilation takes about half a
    second for each kernel and dtype.
    """
    return _dense_kernels(likelihood)


@lru_cache(maxsize=64)
def _dense_kernels(likelihood: Likelihood) -> DenseKernels:
    return DenseKernels(
        *_gradients(likelihood), *_multiplicative(likelihood), _evaluation(likelihood)
    )
