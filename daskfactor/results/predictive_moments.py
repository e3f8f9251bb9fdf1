r"""Moments and quantiles of cells from all draws of mu = WH, lazily and in blocks.

All draws of a block fit in memory. A block is one operation on the rows of W and the columns of H
of all draws and chains.

With weights w and their distribution function F, the quantile at level p is

.. math:: Q(p) = n \int_{p (1 - 1/n)}^{p (1 - 1/n) + 1/n} F^{-1}(u) \, du, \qquad
    n = \frac{1}{\sum_m w_m^2}.

For n equal weights the window of width 1/n overlaps two neighbouring steps of the inverse of F,
with the shares that `numpy.quantile` uses. A weight of 0 has no effect, and a small one little,
however extreme its value is. A value that is split into two of half the weight counts as two
draws: n grows, and the new window is inside the old one. This is consistent with the usual
quantile, which differs between 0, 0, 1, 1 and 0, 1.

Source: Akinshin 2023, "Weighted quantile estimators" (that of type 7); n is Kish's.
"""

from collections.abc import Callable
from math import isqrt
from typing import Any, Final, NamedTuple

import dask.array as da
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.machine import single_threaded_blas
from daskfactor.results.selection import Cells, paired
from daskfactor.runs.trace import Running, effective_number, factors_of, relative

Array = NDArray[Any]
Positions = NDArray[np.int64]
Lazy = Any  # dask.array.Array

# dask's functions carry no types.
map_blocks: Final[Any] = da.map_blocks
blockwise: Final[Any] = da.blockwise
from_array: Final[Any] = da.from_array
concatenate: Final[Any] = da.concatenate

BLOCK_BYTES: Final = 64 * 2**20
"""Largest bytes of draws of the cells of a block."""
FACTOR_BYTES: Final = 2**24
"""Largest bytes of draws of the rows of a block, and of its columns."""
_SLAB: Final = 2**18
"""Number of values sorted at a time: order and weights need several times their memory."""


class Draws(NamedTuple):
    """Selected rows and columns of the factors, (chain, draw, row, component) and so on.

    ``weight`` (chain, draw) is positive, in units of the largest; None for equal weights. For
    points, W and H hold the rows and columns that occur, and ``row_at`` and ``column_at`` (p,)
    their positions for each point; for a grid they are None.
    """

    W: Lazy
    H: Lazy
    row_at: Lazy | None
    column_at: Lazy | None
    weight: NDArray[np.float64] | None = None


def draws_of(group: xr.Dataset, cells: Cells, weights: NDArray[np.float64] | None = None) -> Draws:
    """Select factors lazily, chunked by the rows and columns of the blocks of the result.

    Draws without weight are omitted; ``weight`` is None if all others are equal.
    """
    selection = None if weights is None or (weights > 0).all() else weights > 0
    if weights is not None:
        weights = relative(group, weights if selection is None else weights[selection][None])
        weights = None if (weights == 1.0).all() else weights
    W, H = (factor.data for factor in factors_of(group))
    n_draws = W.shape[0] * W.shape[1] if selection is None else int(selection.sum())
    block = max(1, BLOCK_BYTES // (n_draws * W.dtype.itemsize))
    rows, columns = (np.atleast_1d(at.values) for at in cells)
    if not paired(cells):
        # With many components, rows and columns may be larger than the block.
        most = max(1, FACTOR_BYTES // (n_draws * W.shape[3] * W.dtype.itemsize))
        side = min(len(columns), isqrt(block) or 1, most)
        height = max(1, min(len(rows), block // max(1, side), most))
        width = max(1, min(len(columns), block // height, most))
        W = _cut(_take(W, 2, rows), 2, height, selection)
        return Draws(W, _cut(_take(H, 3, columns), 3, width, selection), None, None, weights)
    rows, row_at = np.unique(rows, return_inverse=True)
    columns, column_at = np.unique(columns, return_inverse=True)
    # A point gathers a row of W and a column of H, which may be larger than its draws.
    length = min(block, max(1, BLOCK_BYTES // (2 * W.shape[3] * W.dtype.itemsize)))
    return Draws(
        _cut(_take(W, 2, rows), 2, -1, selection),
        _cut(_take(H, 3, columns), 3, -1, selection),
        from_array(row_at.reshape(-1), chunks=length),
        from_array(column_at.reshape(-1), chunks=length),
        weights,
    )


def _take(array: Any, axis: int, at: Positions) -> Any:
    """Return entries of one axis, without a copy if they are contiguous."""
    key: list[Any] = [slice(None)] * 4
    contiguous = len(at) > 0 and bool(np.all(np.diff(at) == 1))
    key[axis] = slice(int(at[0]), int(at[-1]) + 1) if contiguous else at
    return array[tuple(key)]


def _cut(array: Any, axis: int, length: int, selection: NDArray[np.bool_] | None) -> Lazy:
    """Rechunk rows or columns, with all components in one chunk and draws unchanged.

    Draws outside ``selection`` are dropped before chunks are merged, so that they are not read.
    """
    if isinstance(array, np.ndarray):
        # Use a random name, since a hash would read all draws.
        chunks = [-1, -1, -1, -1]
        chunks[axis] = length
        array = from_array(array, chunks=tuple(chunks), name=False)
    if selection is not None:  # selected draws of all chains, concatenated, (1, draw, ...)
        chosen = [
            array[at : at + 1, np.flatnonzero(mask)]
            for at, mask in enumerate(selection)
            if mask.any()
        ]
        array = concatenate(chosen, axis=1)
    return array.rechunk({2: -1, 3: -1} | {axis: length})


def per_cell(function: Callable[..., Array], draws: Draws, **options: Any) -> tuple[Lazy, Lazy]:
    """Compute two quantities of every cell from all its draws, (cells), float64.

    Parameters
    ----------
    function
        `moments` or `quantiles`, a function of W (chain, draw, r, K), H (chain, draw, K, c),
        rows and columns of points or None, and weights of the draws or None.
    """
    # Draws of W and H may have different chunks, hence the letters s, d and t, u.
    axes = "p"
    arguments = [draws.W, "sdik", draws.H, "tulj", draws.row_at, "p", draws.column_at, "p"]
    if draws.row_at is None:
        axes = "rc"
        arguments = [draws.W, "sdrk", draws.H, "tulc", None, None, None, None]
    first, second = blockwise(
        function,
        "q" + axes,
        *arguments,
        new_axes={"q": 2},
        concatenate=True,
        align_arrays=False,
        weight=draws.weight,
        dtype=np.float64,
        meta=np.empty((0,) * (1 + len(axes))),
        **options,
    )
    return first, second


def mu_of(W: Array, H: Array, row_at: Array | None, column_at: Array | None) -> Array:
    """Return mu of one draw, (r, c) or (p,)."""
    if row_at is None:
        return np.asarray(W @ H)
    # With components last, both gathers read contiguous values.
    return np.asarray(np.einsum("pk,pk->p", W[row_at], np.ascontiguousarray(H.T)[column_at]))


def moments(
    W: Array, H: Array, row_at: Array | None, column_at: Array | None, *, weight: Array | None
) -> Array:
    """Return weighted mean and population variance of mu over chains and draws.

    Moments of each chain are computed in one pass (West 1979), and then combined (Chan, Golub and
    LeVeque 1983).
    """
    shape = (W.shape[2], H.shape[3]) if row_at is None else (len(row_at),)
    chains = [Running(shape) for _ in W]
    with single_threaded_blas():
        for at in np.ndindex(W.shape[:2]):
            mass = 1.0 if weight is None else float(weight[at])
            chains[at[0]].add(mu_of(W[at], H[at], row_at, column_at), mass)
    means = np.stack([one.mean for one in chains])
    totals = np.reshape([one.total for one in chains], (-1, *(1,) * len(shape)))
    counts = np.broadcast_to(totals, means.shape)
    count = counts.sum(axis=0)
    mean = (counts * means).sum(axis=0) / count
    square = np.sum([one.square for one in chains], axis=0)
    square += (counts * (means - mean) ** 2).sum(axis=0)
    return np.stack([mean, square / count])


def quantiles(
    W: Array,
    H: Array,
    row_at: Array | None,
    column_at: Array | None,
    *,
    weight: Array | None,
    levels: tuple[float, float],
) -> Array:
    """Return quantiles of mu over chains and draws, linear between draws as `numpy.quantile`.

    A vectorised sort of contiguous values is seven times as fast as the partition along a strided
    axis in `numpy.quantile`.
    """
    shape = (W.shape[2], H.shape[3]) if row_at is None else (len(row_at),)
    ordered = np.empty((*shape, W.shape[0] * W.shape[1]), W.dtype)
    with single_threaded_blas():
        for number, at in enumerate(np.ndindex(W.shape[:2])):
            ordered[..., number] = mu_of(W[at], H[at], row_at, column_at)
    if weight is not None:
        return weighted_quantiles(np.moveaxis(ordered, -1, 0), weight.reshape(-1), levels)
    ordered.sort(axis=-1)
    ends, count = [], ordered.shape[-1]
    for level in levels:
        below, share = divmod(level * (count - 1), 1.0)
        low = ordered[..., int(below)].astype(np.float64)
        high = ordered[..., min(int(below) + 1, count - 1)]
        ends.append(low + share * (high - low))
    return np.stack(ends)


def weighted_quantiles(
    values: Array, weights: NDArray[np.float64], levels: tuple[float, ...]
) -> NDArray[np.float64]:
    r"""Return quantiles over the first axis, :math:`n \int F^{-1}` over windows of width 1/n.

    Parameters
    ----------
    values
        (M, ...), any unit.
    weights
        (M,), positive, with any sum.
    levels
        Levels between 0 and 1.

    Returns
    -------
    ndarray of float64
        (level, ...), in the unit of the values.

    References
    ----------
    Akinshin 2023.
    """
    masses = weights / weights.sum()
    width = 1.0 / effective_number(masses)
    count = len(values)
    flat = values.reshape(count, -1)
    out = np.empty((len(levels), flat.shape[1]))
    step = max(1, _SLAB // count)
    for start in range(0, flat.shape[1], step):
        part = np.ascontiguousarray(flat[:, start : start + step].T)
        order = np.argsort(part, axis=1, kind="stable")
        ordered = np.take_along_axis(part, order, axis=1).astype(np.float64)
        above = np.cumsum(masses[order], axis=1)
        for at, level in enumerate(levels):
            out[at, start : start + step] = _window_mean(ordered, above, level, width)
    return out.reshape(len(levels), *values.shape[1:])


def _window_mean(
    ordered: NDArray[np.float64], above: NDArray[np.float64], level: float, width: float
) -> NDArray[np.float64]:
    """Return the mean of the inverse distribution function of each row over a window."""
    low = level * (1.0 - width)
    inside = np.clip(above, low, low + width)
    inside[:, 1:] -= inside[:, :-1].copy()
    inside[:, 0] -= low
    first = ordered[:, :1]  # so that constants are reproduced exactly
    mean = np.einsum("nm,nm->n", inside, ordered - first) / inside.sum(axis=1)
    return np.asarray(first[:, 0] + mean)
