"""Selection of rows, columns and cells of a run by label, position, slice or mask."""

import difflib
from collections.abc import Mapping
from typing import Any, Final

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from daskfactor.data.labels import is_usable
from daskfactor.errors import OptionError
from daskfactor.runs.stacks import stacks_of
from daskfactor.runs.trace import Run

Cells = tuple[xr.DataArray, xr.DataArray]
"""Positions of rows and columns with the user's names and labels: of a grid of cells, or of single
cells if they share their dimension."""

asarray: Final[Any] = da.asarray  # dask's functions carry no types
MAX_COMPARED: Final = 10**5
"""Largest number of labels that are searched for a similar one."""


def select(run: Run, rows: Any, columns: Any) -> Cells:
    """Return positions of selected rows and columns, with their labels.

    Parameters
    ----------
    run
        Run with draws.
    rows, columns
        None (all), a label, an array of labels, a slice, or a boolean mask; integer positions
        without a coordinate. Two DataArrays with the same single dimension name single cells, as
        in xarray's vectorised indexing.

    Raises
    ------
    OptionError
        If a label or position does not exist, or rows and columns do not match.
    """
    pointwise = all(isinstance(key, xr.DataArray) for key in (rows, columns))
    pointwise = pointwise and bool(set(rows.dims) & set(columns.dims))
    usable = pointwise and rows.dims == columns.dims and rows.ndim == 1
    if pointwise and not (usable and is_usable(str(rows.dims[0]))):
        raise OptionError(
            "rows and columns that name single cells must have the same single dimension, with a "
            f"name that results do not use, got dimensions {rows.dims} and {columns.dims}; rename "
            "it, for example to 'cell'"
        )
    chosen_rows, chosen_columns = (
        _selected(_positions(run, dim), key, what, pointwise)
        for dim, key, what in zip(run.dims, (rows, columns), ("rows", "columns"), strict=True)
    )
    if pointwise and chosen_rows.size != chosen_columns.size:
        raise OptionError(
            f"rows and columns that share the dimension {rows.dims[0]!r} must be equally long, "
            f"got {chosen_rows.size} and {chosen_columns.size}"
        )
    return chosen_rows, chosen_columns


def paired(cells: Cells) -> bool:
    """Return True if rows and columns name single cells instead of a grid."""
    return bool(set(cells[0].dims) & set(cells[1].dims))


def values_at(matrix: xr.DataArray, cells: Cells) -> Any:
    """Return entries of a matrix, lazily: of a grid of cells, or of single ones."""
    values = asarray(matrix.data)
    rows, columns = (np.atleast_1d(at.values) for at in cells)
    return values.vindex[rows, columns] if paired(cells) else values[rows][:, columns]


def keys_of(at: xr.DataArray) -> Any:
    """Return labels of a selection, None if there are none; by name for stacked dimensions.

    They are keys of `daskfactor.checks.match_labels`.
    """
    names = at.attrs.get("levels", {})
    if not names or any(name not in at.coords for name in names):
        return at.indexes.get(at.dims[0])
    return {name: np.broadcast_to(at[name].values, max(1, at.size)) for name in names}


def _positions(run: Run, dim: str) -> xr.DataArray:
    """Return positions of all rows, or columns, with their labels."""
    coords = run.posterior.coords.items()
    labels = {name: coord for name, coord in coords if set(coord.dims) <= {dim}}
    stack = stacks_of(run.attrs).get(dim)
    about = {"levels": {} if stack is None else stack.levels}
    return xr.DataArray(np.arange(run.posterior.sizes[dim]), labels, (dim,), attrs=about)


def _selected(at: xr.DataArray, key: Any, what: str, pointwise: bool) -> xr.DataArray:
    """Return the selected positions of a key."""
    dim = at.dims[0]
    if key is None:
        return at
    if isinstance(key, Mapping) and set(key) == {dim}:
        key = key[dim]
    if isinstance(key, Mapping):
        return at[np.flatnonzero(_mask_of_levels(at, key, what))]
    if at.attrs["levels"] and not pointwise and _are_tuples(key):
        return at[_positions_of_tuples(at, key, what)]
    if isinstance(key, xr.DataArray) and not pointwise:
        key = key.values
    if np.ndim(key) > 1:
        raise OptionError(
            f"{what} must be one-dimensional, got {np.ndim(key)} dimensions; for a mask pass "
            "*[xarray.DataArray(at, dims='cell') for at in numpy.nonzero(mask)] as rows and columns"
        )
    if isinstance(key, list | tuple | set | pd.Index | pd.Series):
        key = np.asarray(list(key))
    mask = not isinstance(key, slice) and np.asarray(key).dtype == bool
    if pointwise and key.size in (0, at.size if mask else 0):
        # Convert the mask to positions, which may be fewer, whatever the type of the labels.
        chosen, mask = np.flatnonzero(key.values), True
        key = key[chosen].drop_vars(dim, errors="ignore").copy(data=chosen)
    elif np.ndim(key) == 1 and len(key) == 0:
        return at[:0]
    labelled = dim in at.coords and not mask
    try:
        subset = at.sel({dim: key}) if labelled else at.isel({dim: key})
    except (KeyError, IndexError, TypeError, ValueError, pd.errors.InvalidIndexError) as error:
        raise OptionError(_unknown(at, key, what, labelled)) from error
    if pointwise and dim not in at.coords and dim not in key.dims:
        return subset.assign_coords({dim: (key.dims, subset.values)})
    return subset


def _mask_of_levels(at: xr.DataArray, key: Mapping[Any, Any], what: str) -> NDArray[np.bool_]:
    """Return a mask of rows, or columns, by labels of their stacked dimensions."""
    mask, levels = np.ones(at.size, dtype=bool), at.attrs["levels"]
    for name, level_key in key.items():
        if name not in levels:
            names = ", ".join(map(repr, levels)) or "none"
            raise OptionError(
                f"{what} has the key {name!r}, but the dimensions stacked in {at.dims[0]!r} are "
                f"{names}; pass one of these"
            )
        labels = levels[name]
        try:
            chosen = xr.DataArray(labels, {name: labels}, (name,)).sel({name: level_key})
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise OptionError(
                f"{what}: there is no {level_key!r} among the {len(labels)} labels of {name!r} "
                f"({', '.join(map(repr, labels[:3].tolist()))}, ...)"
            ) from error
        mask &= np.isin(at[name].values, np.atleast_1d(chosen.values))
    return mask


def _are_tuples(key: Any) -> bool:
    """Return True for a label of a stack (a tuple with one of each level), or a list of them."""
    if isinstance(key, tuple):
        return not any(isinstance(entry, bool | slice) for entry in key)
    several = isinstance(key, list | pd.MultiIndex) and len(key) > 0
    return several and all(isinstance(entry, tuple) for entry in key)


def _positions_of_tuples(at: xr.DataArray, key: Any, what: str) -> Any:
    """Return positions of labels of a stack, or of a single label."""
    levels, one = at.attrs["levels"], isinstance(key, tuple)
    index = pd.MultiIndex.from_arrays([at[name].values for name in levels])
    keys = [key] if one else list(key)
    place = {label: n for n, label in reversed([*enumerate(index.tolist())])}
    unknown = next((label for label in keys if label not in place), None)
    if unknown is not None:
        raise OptionError(
            f"{what}: there is no {unknown!r} among the {at.size} labels of {at.dims[0]!r}, which "
            f"are {', '.join(map(str, levels))}, such as {index[0]!r}; pass such tuples, or "
            f"{{{next(iter(levels))!r}: ...}}"
        )
    positions = [place[label] for label in keys]
    return positions[0] if one else positions


def _unknown(at: xr.DataArray, key: Any, what: str, labelled: bool) -> str:
    dim = at.dims[0]
    if not labelled:
        return (
            f"{what}={key!r} does not fit the {at.size} positions of {dim!r}, which has "
            f"no labels; pass integers from 0 to {at.size - 1}, a slice or a mask"
        )
    index = at.indexes[dim]
    first = ", ".join(repr(label) for label in index[:3].tolist())
    if not index.is_unique:
        return f"the labels of {dim!r} are not unique; select {what} with a boolean mask"
    keys = [] if isinstance(key, slice) else np.atleast_1d(np.asarray(key)).tolist()
    missing = [label for label in keys if label not in index]
    got = ", ".join(map(repr, missing))[:200] or repr(key)
    near = near_labels(index, missing[0]) if missing else ""
    places = all(isinstance(label, int) for label in keys) and index.dtype.kind not in "iu"
    cut = f"; for positions select from the trace, trace.isel({{{dim!r}: ...}})" if places else ""
    return (
        f"{what}: there is no {got} among the {len(index)} labels of {dim!r} ({first}, ...); "
        f"{near}pass labels of this coordinate, a slice of them, or None for all{cut}"
    )


def near_labels(index: Any, label: Any) -> str:
    """Return a question about similarly spelt labels, or an empty text.

    For numbers return their range, since similar spelling does not mean similar values.
    """
    if index.dtype.kind in "iuf":
        return f"they are from {index.min()} to {index.max()}; " if len(index) else ""
    names = {str(entry): entry for entry in index[:MAX_COMPARED].tolist()}
    lower = {name.lower(): name for name in names}
    matches = difflib.get_close_matches(str(label).lower(), lower, 3, 0.6)
    return f"did you mean {' or '.join(repr(names[lower[name]]) for name in matches)}? " * bool(
        matches
    )
