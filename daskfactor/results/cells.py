r"""Numbers of cells from all draws of mu = WH, lazily: moments, and quantiles by weight.

A block of the result covers so few cells that all draws of it fit in memory. It is
one operation, which takes the rows of W and the columns of H of all draws and chains.

With weights w and their distribution function F, the quantile at level p is

.. math:: Q(p) = n \int_{p (1 - 1/n)}^{p (1 - 1/n) + 1/n} F^{-1}(u) \, du, \qquad
    n = \frac{1}{\sum_m w_m^2}.

For n equal weights the window of width 1/n overlaps two neighbouring steps of the inverse
of F, in the very shares in which `numpy.quantile` takes their mean. A weight of 0 is as
good as none, and a small one does little, however far off its value is. A value that is
split into two of half its weight counts as two draws: n rises, and the new window lies
within the old one. That cannot be otherwise: of 0, 0, 1, 1, all of one weight, the usual
quantile is not that of 0, 1.

Source: Akinshin 2023, "Weighted quantile estimators" (that of type 7); n is Kish's.
"""

from collections.abc import Callable, Hashable, Mapping
from math import isqrt
from typing import Any, Final, NamedTuple

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from daskfactor.errors import OptionError
from daskfactor.machine import single_threaded_blas
from daskfactor.results.trace import Running, effective_number, relative

Positions = NDArray[np.int64]


class Cells(NamedTuple):
    """Selected cells: a grid of rows by columns, or points where ``points`` names their dim."""

    rows: Positions
    columns: Positions
    points: Hashable | None
    dims: tuple[Hashable, ...]
    coords: xr.Dataset
    dropped: tuple[Hashable, ...]


def select(labels: xr.Dataset, sizes: Mapping[str, int], rows: Any, columns: Any) -> Cells:
    """Resolve what a user says of rows and columns against the labels of a group.

    Parameters
    ----------
    labels
        The user's coordinates.
    sizes
        Names of rows and of columns, and how many there are.
    rows, columns
        None (all), a label, an array of labels, a slice, or a boolean mask; integer
        positions where there is no coordinate. Two DataArrays that share their one
        dimension name single cells, as in xarray's vectorised indexing.

    Raises
    ------
    OptionError
        If a label or position does not exist, or the two do not go together.
    """
    points = _shared_dim(rows, columns)
    dims = tuple(sizes)
    row_at, column_at = (
        _positions(labels, dim, sizes[dim], key, what)
        for dim, key, what in zip(dims, (rows, columns), ("rows", "columns"), strict=True)
    )
    if points is None:
        chosen = dict(zip(dims, (row_at, column_at), strict=True))
        coords = labels.isel({dim: at for dim, at in chosen.items() if dim in labels.sizes})
        # A label may be that of many rows: then all of them are meant.
        dropped = tuple(
            dim
            for dim, key in zip(dims, (rows, columns), strict=True)
            if len(chosen[dim]) == 1 and not (key is None or isinstance(key, slice) or np.ndim(key))
        )
        return Cells(row_at, column_at, None, dims, coords, dropped)
    if len(row_at) != len(column_at):
        raise OptionError(
            f"rows and columns that share the dimension {points!r} must be equally long, "
            f"got {len(row_at)} and {len(column_at)}"
        )
    coords = _point_coords(labels, dims, points, rows, row_at, columns, column_at)
    return Cells(row_at, column_at, points, (points,), coords, ())


def _shared_dim(rows: Any, columns: Any) -> Hashable | None:
    if not (isinstance(rows, xr.DataArray) and isinstance(columns, xr.DataArray)):
        return None
    if not set(rows.dims) & set(columns.dims):
        return None
    if rows.dims != columns.dims or rows.ndim != 1:
        raise OptionError(
            "rows and columns that name single cells must have the same single dimension, "
            f"got dimensions {rows.dims} and {columns.dims}"
        )
    return rows.dims[0]


def _positions(labels: xr.Dataset, dim: str, size: int, key: Any, what: str) -> Positions:
    if key is None:
        return np.arange(size)
    if isinstance(key, xr.DataArray):
        key = key.values
    if np.ndim(key) > 1:
        raise OptionError(f"{what} must be one-dimensional, got {np.ndim(key)} dimensions")
    at = xr.DataArray(np.arange(size), dims=dim)
    mask = not isinstance(key, slice) and np.asarray(key).dtype == bool
    labelled = dim in labels.coords and not mask
    if isinstance(key, list | tuple | set | pd.Index | pd.Series):
        key = np.asarray(list(key))
    if np.ndim(key) == 1 and len(key) == 0:
        return np.arange(0)
    try:
        if labelled:
            found = at.assign_coords({dim: labels.coords[dim]}).sel({dim: key})
        else:
            found = at.isel({dim: key})
    except (KeyError, IndexError, TypeError, ValueError, pd.errors.InvalidIndexError) as error:
        raise OptionError(_unknown(labels, dim, size, key, what, labelled)) from error
    return np.atleast_1d(np.asarray(found.values, dtype=np.int64))


def _unknown(labels: xr.Dataset, dim: str, size: int, key: Any, what: str, labelled: bool) -> str:
    if not labelled:
        return (
            f"{what}={key!r} does not fit the {size} positions of {dim!r}, which has "
            f"no labels; pass integers from 0 to {size - 1}, a slice or a mask"
        )
    index = labels.indexes[dim]
    first = ", ".join(repr(label) for label in index[:3].tolist())
    if not index.is_unique:
        return f"the labels of {dim!r} are not unique; select {what} with a boolean mask"
    wanted = [] if isinstance(key, slice) else np.atleast_1d(np.asarray(key)).tolist()
    missing = ", ".join(repr(label) for label in wanted if label not in index)
    got = missing[:200] or repr(key)
    return (
        f"{what}: there is no {got} among the {len(index)} labels of {dim!r} ({first}, ...); "
        "pass labels of that coordinate, a slice of them, or None for all"
    )


def _point_coords(
    labels: xr.Dataset,
    dims: tuple[Hashable, ...],
    points: Hashable,
    rows: xr.DataArray,
    row_at: Positions,
    columns: xr.DataArray,
    column_at: Positions,
) -> xr.Dataset:
    """Labels of every point, or its positions where there are none, and what it brought along."""
    coords: dict[Hashable, Any] = {}
    for dim, at in zip(dims, (row_at, column_at), strict=True):
        if dim != points:
            coords[dim] = (points, labels[dim].values[at] if dim in labels.coords else at)
    brought = {
        name: coord
        for key in (rows, columns)
        for name, coord in key.coords.items()
        if name not in dims
    }
    return xr.Dataset(coords=brought | coords)


Array = NDArray[Any]
Lazy = Any  # dask.array.Array

# dask's functions carry no types.
_blockwise: Final[Any] = da.blockwise
_from_array: Final[Any] = da.from_array
_concatenate: Final[Any] = da.concatenate

BLOCK_BYTES: Final = 64 * 2**20
"""Draws of the cells of a block, at most."""
FACTOR_BYTES: Final = 2**28
"""Draws of the rows of a block, and of its columns, at most."""
_SLAB: Final = 2**18
"""Values that are sorted at a time: their order and weights take several times their room."""


class Draws(NamedTuple):
    """Selected rows and columns of the factors, (chain, draw, row, component) and so on.

    ``weight`` (chain, draw) is in units of the largest, all positive; None where draws
    count alike. For points, W and H hold the rows and columns that occur, ``row_at`` and
    ``column_at`` (p,) say which of them each point takes; for a grid they are None.
    """

    W: Lazy
    H: Lazy
    row_at: Lazy | None
    column_at: Lazy | None
    weight: NDArray[np.float64] | None = None


def draws_of(
    group: xr.Dataset,
    dims: tuple[str, str],
    cells: Cells,
    weights: NDArray[np.float64] | None = None,
) -> Draws:
    """Select factors lazily, cut into the rows and columns of the blocks of the result.

    Of draws with ``weights`` (chain, draw) those without mass are left out; where all
    others have the same, they count alike.
    """
    kept = None if weights is None or (weights > 0).all() else weights > 0
    if weights is not None:
        weights = relative(group, weights if kept is None else weights[kept][None])
        weights = None if (weights == 1.0).all() else weights
    W = group["W"].transpose("chain", "draw", dims[0], "component").data
    H = group["H"].transpose("chain", "draw", "component", dims[1]).data
    n_draws = W.shape[0] * W.shape[1] if kept is None else int(kept.sum())
    block = max(1, BLOCK_BYTES // (n_draws * W.dtype.itemsize))
    if cells.points is None:
        # With many components rows and columns may be larger than the cells they make.
        most = max(1, FACTOR_BYTES // (n_draws * W.shape[3] * W.dtype.itemsize))
        side = min(len(cells.columns), isqrt(block) or 1, most)
        height = max(1, min(len(cells.rows), block // max(1, side), most))
        width = max(1, min(len(cells.columns), block // height, most))
        W = _cut(_take(W, 2, cells.rows), 2, height, kept)
        return Draws(W, _cut(_take(H, 3, cells.columns), 3, width, kept), None, None, weights)
    rows, row_at = np.unique(cells.rows, return_inverse=True)
    columns, column_at = np.unique(cells.columns, return_inverse=True)
    # A point gathers a row of W and a column of H: that may be larger than its draws.
    length = min(block, max(1, BLOCK_BYTES // (2 * W.shape[3] * W.dtype.itemsize)))
    return Draws(
        _cut(_take(W, 2, rows), 2, -1, kept),
        _cut(_take(H, 3, columns), 3, -1, kept),
        _from_array(row_at.reshape(-1), chunks=length),
        _from_array(column_at.reshape(-1), chunks=length),
        weights,
    )


def _take(array: Any, axis: int, at: Positions) -> Any:
    """Entries of one axis; without a copy where they are neighbours."""
    key: list[Any] = [slice(None)] * 4
    contiguous = len(at) > 0 and bool(np.all(np.diff(at) == 1))
    key[axis] = slice(int(at[0]), int(at[-1]) + 1) if contiguous else at
    return array[tuple(key)]


def _cut(array: Any, axis: int, length: int, kept: NDArray[np.bool_] | None) -> Lazy:
    """Chunks of some rows or columns and all components; draws lie as they are.

    Draws that are not ``kept`` go before chunks are joined, so that they are never read.
    """
    if isinstance(array, np.ndarray):
        # A random name: hashing the draws would read them all.
        chunks = [-1, -1, -1, -1]
        chunks[axis] = length
        array = _from_array(array, chunks=tuple(chunks), name=False)
    if kept is not None:  # chosen draws of all chains one after the other, (1, draw, ...)
        chosen = [
            array[at : at + 1, np.flatnonzero(own)] for at, own in enumerate(kept) if own.any()
        ]
        array = _concatenate(chosen, axis=1)
    return array.rechunk({2: -1, 3: -1} | {axis: length})


def per_cell(function: Callable[..., Array], draws: Draws, **options: Any) -> tuple[Lazy, Lazy]:
    """Compute two numbers of every cell from all draws of it, (cells), float64.

    Parameters
    ----------
    function
        `moments` or `quantiles`; called with W (chain, draw, r, K), H (chain, draw, K, c),
        the rows and columns of points or None, and the weights of the draws or None.
    """
    # Draws of W and of H have chunks of their own, and the letters s, d and t, u.
    axes = "p"
    arguments = [draws.W, "sdik", draws.H, "tulj", draws.row_at, "p", draws.column_at, "p"]
    if draws.row_at is None:
        axes = "rc"
        arguments = [draws.W, "sdrk", draws.H, "tulc", None, None, None, None]
    first, second = _blockwise(
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


def _mu(W: Array, H: Array, row_at: Array | None, column_at: Array | None) -> Array:
    """Mu of one draw, (r, c) or (p,)."""
    if row_at is None:
        return np.asarray(W @ H)
    # With components last both gathers take neighbouring values.
    return np.asarray(np.einsum("pk,pk->p", W[row_at], np.ascontiguousarray(H.T)[column_at]))


def moments(
    W: Array, H: Array, row_at: Array | None, column_at: Array | None, *, weight: Array | None
) -> Array:
    """Mean and population variance of mu over chains and draws, by weight.

    Each chain's are taken in one pass (West 1979, with each weight 1 where there are none),
    and then those of their union (Chan, Golub and LeVeque 1983).
    """
    shape = (W.shape[2], H.shape[3]) if row_at is None else (len(row_at),)
    chains = [Running(shape) for _ in W]
    with single_threaded_blas():
        for at in np.ndindex(W.shape[:2]):
            mass = 1.0 if weight is None else float(weight[at])
            chains[at[0]].add(_mu(W[at], H[at], row_at, column_at), mass)
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
    """Quantiles of mu over chains and draws, linear between draws as `numpy.quantile` has them.

    A full sort of neighbouring values is vectorised: measured seven times as fast
    as the partition along a strided axis that `numpy.quantile` does.
    """
    with single_threaded_blas():
        mu = np.stack([_mu(W[at], H[at], row_at, column_at) for at in np.ndindex(W.shape[:2])])
    if weight is not None:
        return weighted_quantiles(mu, weight.reshape(-1), levels)
    ordered = np.ascontiguousarray(np.moveaxis(mu, 0, -1))
    del mu
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
    r"""Quantiles over the first axis, :math:`n \int F^{-1}` over windows of width 1/n.

    Parameters
    ----------
    values
        (M, ...), any unit.
    weights
        (M,), positive, of any sum.
    levels
        Between 0 and 1.

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
    """Mean of each row's inverse distribution function over the window of a level."""
    low = level * (1.0 - width)
    inside = np.clip(above, low, low + width)
    inside[:, 1:] -= inside[:, :-1].copy()
    inside[:, 0] -= low
    first = ordered[:, :1]  # what is equal in all draws stays so to the last bit
    mean = np.einsum("nm,nm->n", inside, ordered - first) / inside.sum(axis=1)
    return np.asarray(first[:, 0] + mean)
