"""Which cells of the matrix a prediction is for: labels, positions, slices, grids, points."""

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from daskfactor.errors import OptionError

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
        keys = zip(dims, (rows, columns), strict=True)
        # A label may be that of many rows: then all of them are meant.
        dropped = tuple(d for d, key in keys if _is_scalar(key) and len(chosen[d]) == 1)
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


def _is_scalar(key: Any) -> bool:
    return key is not None and not isinstance(key, slice) and np.ndim(key) == 0


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
