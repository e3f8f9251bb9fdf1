"""Which rows, columns and cells of a run a user names: by label, position, slice or mask."""

import difflib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import first_places
from daskfactor.data.labels import is_usable
from daskfactor.errors import OptionError
from daskfactor.results.stacks import stacks_of
from daskfactor.results.trace import Run

MOST_COMPARED: Final = 10**5
"""Labels that are compared with one that is not among them."""


def select(run: Run, rows: Any, columns: Any) -> tuple[xr.DataArray, xr.DataArray]:
    """Find the positions of rows and of columns that a user names, with the labels they have.

    Parameters
    ----------
    run
        With draws.
    rows, columns
        None (all), a label, an array of labels, a slice, or a boolean mask; integer
        positions where there is no coordinate. Two DataArrays that share their one
        dimension name single cells, as in xarray's vectorised indexing.

    Raises
    ------
    OptionError
        If a label or position does not exist, or the two do not go together.
    """
    pointwise = all(isinstance(key, xr.DataArray) for key in (rows, columns))
    pointwise = pointwise and bool(set(rows.dims) & set(columns.dims))
    usable = pointwise and rows.dims == columns.dims and rows.ndim == 1
    if pointwise and not (usable and is_usable(str(rows.dims[0]))):
        raise OptionError(
            "rows and columns that name single cells must have the same single dimension, of a "
            f"name that results do not use, got dimensions {rows.dims} and {columns.dims}"
        )
    chosen_rows, chosen_columns = (
        _chosen(_positions(run, dim), key, what, pointwise)
        for dim, key, what in zip(run.dims, (rows, columns), ("rows", "columns"), strict=True)
    )
    if pointwise and chosen_rows.size != chosen_columns.size:
        raise OptionError(
            f"rows and columns that share the dimension {rows.dims[0]!r} must be equally long, "
            f"got {chosen_rows.size} and {chosen_columns.size}"
        )
    return chosen_rows, chosen_columns


def paired(cells: tuple[xr.DataArray, xr.DataArray]) -> bool:
    """Whether rows and columns name single cells, and not a grid of them."""
    return bool(set(cells[0].dims) & set(cells[1].dims))


def keys_of(at: xr.DataArray) -> Any:
    """Return labels of what `select` found, None if there are none; by name where some are stacked.

    What rows and columns are matched by, see `daskfactor.checks.match_labels`.
    """
    names = at.attrs.get("levels", {})
    if not names or any(name not in at.coords for name in names):
        return at.indexes.get(at.dims[0])
    return {name: np.broadcast_to(at[name].values, max(1, at.size)) for name in names}


def _positions(run: Run, dim: str) -> xr.DataArray:
    """Positions of all rows, or columns, and their labels."""
    coords = run.posterior.coords.items()
    labels = {name: coord for name, coord in coords if set(coord.dims) <= {dim}}
    stack = stacks_of(run.attrs).get(dim)
    about = {"levels": {} if stack is None else stack.levels}
    return xr.DataArray(np.arange(run.posterior.sizes[dim]), labels, (dim,), attrs=about)


def _chosen(at: xr.DataArray, key: Any, what: str, pointwise: bool) -> xr.DataArray:
    """The positions, out of all of them, that a key names."""
    dim = at.dims[0]
    if key is None:
        return at
    if isinstance(key, Mapping) and set(key) == {dim}:
        key = key[dim]
    if isinstance(key, Mapping):
        return at[np.flatnonzero(_on_levels(at, key, what))]
    if at.attrs["levels"] and not pointwise and _are_tuples(key):
        return at[_of_tuples(at, key, what)]
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
        # Positions: fewer than the mask is long, or none, of whatever type the labels are.
        chosen, mask = np.flatnonzero(key.values), True
        key = key[chosen].drop_vars(dim, errors="ignore").copy(data=chosen)
    elif np.ndim(key) == 1 and len(key) == 0:
        return at[:0]
    labelled = dim in at.coords and not mask
    try:
        found = at.sel({dim: key}) if labelled else at.isel({dim: key})
    except (KeyError, IndexError, TypeError, ValueError, pd.errors.InvalidIndexError) as error:
        raise OptionError(_unknown(at, key, what, labelled)) from error
    if pointwise and dim not in at.coords and dim not in key.dims:
        return found.assign_coords({dim: (key.dims, found.values)})
    return found


def _on_levels(at: xr.DataArray, key: Mapping[Any, Any], what: str) -> NDArray[np.bool_]:
    """Which rows, or columns, have labels that are wanted of each of the dimensions stacked."""
    wanted, levels = np.ones(at.size, dtype=bool), at.attrs["levels"]
    for name, own in key.items():
        if name not in levels:
            known = ", ".join(map(repr, levels)) or "none"
            raise OptionError(
                f"{what} has the key {name!r}, and dimensions that are stacked in {at.dims[0]!r} "
                f"are {known}"
            )
        labels = levels[name]
        try:
            chosen = xr.DataArray(labels, {name: labels}, (name,)).sel({name: own})
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise OptionError(
                f"{what}: there is no {own!r} among the {len(labels)} labels of {name!r} "
                f"({', '.join(map(repr, labels[:3].tolist()))}, ...)"
            ) from error
        wanted &= np.isin(at[name].values, np.atleast_1d(chosen.values))
    return wanted


def _are_tuples(key: Any) -> bool:
    """Whether this is a label of a stack, or a list of them: a tuple with one of each level."""
    if isinstance(key, tuple):
        return not any(isinstance(own, bool | slice) for own in key)
    several = isinstance(key, list | pd.MultiIndex) and len(key) > 0
    return several and all(isinstance(own, tuple) for own in key)


def _of_tuples(at: xr.DataArray, key: Any, what: str) -> Any:
    """Positions of labels of a stack, or of a single one."""
    levels, one = at.attrs["levels"], isinstance(key, tuple)
    index = pd.MultiIndex.from_arrays([at[name].values for name in levels])
    wanted = [key] if one else list(key)
    place = first_places(index.tolist())
    unknown = next((own for own in wanted if own not in place), None)
    if unknown is not None:
        raise OptionError(
            f"{what}: there is no {unknown!r} among the {at.size} labels of {at.dims[0]!r}, which "
            f"are {', '.join(map(str, levels))}, such as {index[0]!r}; pass such tuples, or "
            f"{{{next(iter(levels))!r}: ...}}"
        )
    found = [place[own] for own in wanted]
    return found[0] if one else found


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
    wanted = [] if isinstance(key, slice) else np.atleast_1d(np.asarray(key)).tolist()
    missing = [label for label in wanted if label not in index]
    got = ", ".join(map(repr, missing))[:200] or repr(key)
    near = near_labels(index, missing[0]) if missing else ""
    places = all(isinstance(label, int) for label in wanted) and index.dtype.kind not in "iu"
    cut = f", or for positions cut the trace: trace.isel({{{dim!r}: ...}})" if places else ""
    return (
        f"{what}: there is no {got} among the {len(index)} labels of {dim!r} ({first}, ...); "
        f"{near}pass labels of that coordinate, a slice of them, or None for all{cut}"
    )


def near_labels(index: Any, label: Any) -> str:
    """Ask whether one of the labels was meant that are spelt almost alike; or say nothing.

    Numbers that are spelt almost alike are not near, so that their range is told.
    """
    if index.dtype.kind in "iuf":
        return f"they are from {index.min()} to {index.max()}; " if len(index) else ""
    names = {str(own): own for own in index[:MOST_COMPARED].tolist()}
    lower = {name.lower(): name for name in names}
    found = difflib.get_close_matches(str(label).lower(), lower, 3, 0.6)
    return f"did you mean {' or '.join(repr(names[lower[name]]) for name in found)}? " * bool(found)
