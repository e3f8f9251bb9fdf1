"""Labels of a matrix: the caller's names of rows and columns, which results keep."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import warn
from daskfactor.errors import DataError, DataWarning

DEFAULT_DIMS = ("row", "column")
NAMED = 5
_RESULTS = (
    "W H chain draw component component_name W_mean W_var H_mean H_var count V weights "
    "row_feature column_feature row_index column_index mean sd lower upper rank position mu "
    "rate rate_w rate_h shape_w shape_h noise dispersion precision_w precision_h link_w link_h "
    "effective_components objective iteration"
)
RESERVED = frozenset(_RESULTS.split())
"""Names that results use themselves, so that no dimension or coordinate may have them."""
LONGEST_NAME = 200
"""Longest name in bytes that every file system accepts."""
SIDES = ("row", "column")
"""Dimensions of results for sides with several factors, of coupled matrices or a tensor."""
LABEL = "{}_label"
"""Coordinate of such a dimension with labels as text."""
FACTOR = "{}_factor"
"""Coordinate of such a dimension with names of factors."""
CF_ATTRS = ("long_name", "standard_name", "units")
"""Attributes of arrays and coordinates that results keep, by their CF names."""


class Stack(NamedTuple):
    """Labels of the dimensions that are stacked into one, by the name of each dimension.

    ``maps`` is True if the caller's array had them as separate dimensions, so that results unstack
    them.
    """

    levels: Mapping[str, NDArray[Any]]
    maps: bool

    def renamed(self, names: Mapping[str, str]) -> "Stack":
        """Return a copy in which some levels have other names."""
        levels = {names.get(name, name): labels for name, labels in self.levels.items()}
        return self._replace(levels=levels)

    def to_dict(self) -> dict[str, Any]:
        """Return the stack as a JSON-compatible dict."""
        levels = {
            name: {
                "dtype": labels.dtype.str,
                "labels": (labels.astype(str) if labels.dtype.kind in "mM" else labels).tolist(),
            }
            for name, labels in self.levels.items()
        }
        return {"maps": self.maps, "levels": levels}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Stack":
        """Return the stack that `to_dict` wrote."""
        levels = stored["levels"].items()
        labels = {n: np.array(of["labels"]).astype(of["dtype"]) for n, of in levels}
        return cls(labels, stored["maps"])


@dataclass(frozen=True)
class Labels:
    """Dimension names, one-dimensional coordinates and the name of a data matrix.

    Coordinates are indexed by their names; one with the name of its dimension is the index that
    messages quote. ``attrs`` holds units and long names (see `CF_ATTRS`) of the coordinates,
    ``about`` those of the values.
    """

    row_dim: str = DEFAULT_DIMS[0]
    col_dim: str = DEFAULT_DIMS[1]
    row_coords: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    col_coords: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    name: str | None = None
    attrs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, Stack] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse reserved names, and rename what rows and columns have in common.

        The later of two equal names gets an underscore at its end.
        """
        self._refuse_unusable()
        used_names = {self.row_dim}
        col_dim = free_name(self.col_dim, used_names)
        used_names.add(col_dim)
        renames, moved = [], {} if col_dim == self.col_dim else {self.col_dim: col_dim}
        stacks = dict(self.stacks)
        sides = (
            (self.row_dim, self.row_dim, self.row_coords),
            (self.col_dim, col_dim, self.col_coords),
        )
        for dim, new_dim, coords in sides:
            names: dict[str, str] = {}
            for key in coords:
                others = {*used_names, *names.values(), *coords} - ({key} - used_names)
                names[key] = new_dim if key == dim else free_name(key, others)
            used_names.update(names.values())
            if (stack := stacks.pop(dim, None)) is not None:
                stacks[new_dim] = stack.renamed(names)
            moved |= {key: name for key, name in names.items() if key != name}
            renames.append((names, coords))
        if not moved:
            return  # values need not be read
        attrs = dict(self.attrs) | {new: self.attrs.get(old, {}) for old, new in moved.items()}
        renamed = ({names[key]: values for key, values in side.items()} for names, side in renames)
        changes = col_dim, *renamed, attrs, stacks
        fields = "col_dim", "row_coords", "col_coords", "attrs", "stacks"
        for name, value in zip(fields, changes, strict=True):
            object.__setattr__(self, name, value)
        listing = ", ".join(f"{key!r} of one is {name!r}" for key, name in moved.items())
        warn(
            f"rows and columns have dimensions or coordinates of the same name: in the results "
            f"{listing}; rename them to choose the names, for example with DataArray.rename",
            DataWarning,
        )

    def _refuse_unusable(self) -> None:
        """Refuse dimensions with unusable names, and drop such coordinates with a warning."""
        levels = (name for stack in self.stacks.values() for name in stack.levels)
        dims = [self.row_dim, self.col_dim, *levels]
        for name in dims:
            if not is_usable(name):
                raise DataError(
                    f"results cannot have a dimension of the name {name!r}: it is reserved, or not "
                    "a valid name in a store; rename the dimension, for a DataArray with "
                    f"V.rename({{{name!r}: 'x'}})"
                )
        for side in ("row_coords", "col_coords"):
            coords = getattr(self, side)
            if unusable := [name for name in coords if not is_usable(name)]:
                usable = {name: values for name, values in coords.items() if name not in unusable}
                object.__setattr__(self, side, usable)
                warn(
                    f"the coordinate {unusable[0]!r} is left out: its name is reserved for "
                    "results, or not a valid name in a store; rename it to keep it, for example "
                    "with DataArray.rename",
                    DataWarning,
                )

    @property
    def coords(self) -> dict[str, tuple[str, NDArray[Any], Mapping[str, str]]]:
        """Return all coordinates as xarray takes them: (dimension, values, attributes) by name."""
        sides = (self.row_dim, self.row_coords), (self.col_dim, self.col_coords)
        return {
            name: (dim, values, self.attrs.get(name, {}))
            for dim, side in sides
            for name, values in side.items()
        }

    @property
    def stacked(self) -> dict[str, str]:
        """Return the attribute in which results keep stacked dimensions; empty without any."""
        stacks = {dim: stack.to_dict() for dim, stack in self.stacks.items()}
        return {"stacks": json.dumps(stacks)} if stacks else {}

    @property
    def folded(self) -> dict[str, list[str]]:
        """Return the dimensions of the caller's array by side, empty unless some are stacked."""
        if not any(stack.maps for stack in self.stacks.values()):
            return {}
        levels = {dim: list(stack.levels) for dim, stack in self.stacks.items() if stack.maps}
        sides = {"rows": self.row_dim, "columns": self.col_dim}
        return {side: levels.get(dim, [dim]) for side, dim in sides.items()}

    @property
    def index(self) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        """Return the labels of rows and of columns; None for a side without labels."""
        return self.row_coords.get(self.row_dim), self.col_coords.get(self.col_dim)

    @property
    def keys(self) -> tuple[Any, Any]:
        """Return the labels by which rows and columns are matched.

        A side has None without labels, and the labels of each dimension if it is stacked; see
        `daskfactor.checks.match_labels`.
        """
        sides = (self.row_dim, self.row_coords), (self.col_dim, self.col_coords)
        rows, cols = (
            {name: coords[name] for name in self.stacks[dim].levels}
            if dim in self.stacks
            else coords.get(dim)
            for dim, coords in sides
        )
        return rows, cols

    def row(self, index: int) -> str:
        """Return the number and the label of a row, for messages."""
        return f"row {index}{self._label(self.row_dim, self.row_coords, index)}"

    def column(self, index: int) -> str:
        """Return the number and the label of a column, for messages."""
        return f"column {index}{self._label(self.col_dim, self.col_coords, index)}"

    def _label(self, dim: str, coords: Mapping[str, NDArray[Any]], index: int) -> str:
        if dim in self.stacks:
            texts = (f"{name} {coords[name][index]!s}" for name in self.stacks[dim].levels)
            return f" ({', '.join(texts)})"
        return f" ({coords[dim][index]!s})" if dim in coords else ""

    def cell(self, row: int, col: int) -> str:
        """Return the row and the column of a cell, for messages."""
        return f"{self.row(row)}, {self.column(col)}"


def cf_attrs(attrs: Mapping[Any, Any]) -> dict[str, str]:
    """Return the long name, standard name and units among some attributes, as text."""
    return {name: str(attrs[name]) for name in CF_ATTRS if attrs.get(name) not in (None, "")}


def usable_dims(row: object, col: object) -> tuple[str, str]:
    """Return names for two dimensions; default names replace missing, unusable or equal ones."""
    row_dim, col_dim = (
        default if name is None or not is_usable(str(name)) else str(name)
        for name, default in zip((row, col), DEFAULT_DIMS, strict=True)
    )
    return DEFAULT_DIMS if row_dim == col_dim else (row_dim, col_dim)


def is_usable(name: str) -> bool:
    """Return whether results can have a dimension or coordinate of this name.

    Zarr refuses names that are empty, too long, made of dots, its own, or contain a slash.
    """
    path = bool(name.strip(".")) and name != "zarr.json" and len(name.encode()) <= LONGEST_NAME
    return path and not re.search(r"[/\\\0]", name) and name not in RESERVED


def free_name(name: str, used_names: Collection[str]) -> str:
    """Append underscores to a name until it differs from all ``used_names``."""
    while name in used_names:
        name += "_"
    return name


def storable(name: str, labels: NDArray[Any], index_of: bool = True) -> NDArray[Any]:
    """Return labels in a type that a store can hold: times with a zone as UTC, periods as text.

    Types other than text, numbers and times become text, with a warning. Labels of an index
    (``index_of``) must not be missing.

    Raises
    ------
    DataError
        If labels of an index are missing.
    """
    if labels.dtype.kind not in "OSV" or labels.ndim != 1:
        return labels
    import pandas as pd

    index = pd.Index(labels).infer_objects()
    if isinstance(index, pd.DatetimeIndex) and index.tz is not None:
        warn(
            f"the labels {name!r} are times with the zone {index.tz}; they are kept as times in "
            "UTC, without zone",
            DataWarning,
        )
        return np.asarray(index.tz_convert(None))
    if isinstance(index, pd.PeriodIndex):
        return np.asarray([str(period) for period in index])
    if index.dtype.kind in "iufbMm":
        return np.asarray(index)
    gone = np.flatnonzero(np.asarray(pd.isna(index)))
    if gone.size and not index_of:
        return labels
    if gone.size:
        raise DataError(
            f"{gone.size} of the {len(index)} labels {name!r} are missing, the first at position "
            f"{gone[0]}; fill them in, or drop them"
        )
    others = sorted({type(label).__name__ for label in index} - {"str", "str_"})
    if not others:
        return labels
    texts = [
        label.decode(errors="replace") if isinstance(label, bytes) else str(label)
        for label in index
    ]
    warn(
        f"the labels {name!r} are of type {' and '.join(others)}, which no store keeps; they are "
        f"kept as texts, such as {texts[0]!r}",
        DataWarning,
    )
    return np.asarray(texts, dtype=object)


class JointLabels(Labels):
    """Labels whose messages name the factor, too, if a side has several."""

    def _label(self, dim: str, coords: Mapping[str, NDArray[Any]], index: int) -> str:
        if (factor := coords.get(FACTOR.format(dim))) is None:
            return super()._label(dim, coords, index)
        return f" ({coords[LABEL.format(dim)][index]!s} of {factor[index]!s})"


def stacked_labels(
    dim: str, factors: Sequence[tuple[str, int, NDArray[Any] | None]]
) -> dict[str, NDArray[Any]]:
    """Return the coordinates of a side with several factors (name, length, labels)."""
    names, lengths, labels = zip(*factors, strict=True)
    texts = [
        (np.arange(length) if values is None else values).astype(str)
        for values, length in zip(labels, lengths, strict=True)
    ]
    return {
        FACTOR.format(dim): np.repeat(names, lengths),
        LABEL.format(dim): np.concatenate(texts),
    }
