"""What a dimension of the data looks like: a picture, a map, a course of time, a curve, names."""

import re
from collections.abc import Hashable, Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.errors import OptionError
from daskfactor.results.components import Factor, format_quantity

Array = NDArray[np.float64]
Kind = Literal["picture", "map", "time", "curve", "bars", "names"]
KINDS: Final = get_args(Kind)

MOST_BARS: Final = 30
"""Entries of which each gets its bar and its name below the axis."""
FULL: Final = 0.2
"""Share of a grid that entries must fill to be shown as a map."""
SMOOTH: Final = 0.3
"""Mean square of steps between neighbours, over twice the variance, below which they form a curve.

Independent entries have 1.
"""


class Grid(NamedTuple):
    """Where entries lie in a picture.

    Attributes
    ----------
    shape
        Height and width.
    at
        Position of each entry in the picture, row by row.
    sides
        Coordinates of rows and of columns of the picture; None of plain pixels.
    names
        What these are, with their units.
    """

    shape: tuple[int, int]
    at: NDArray[np.int64]
    sides: tuple[Array, Array] | None
    names: tuple[str, str]

    def picture(self, values: Array) -> Array:
        """Entries in their places, NaN where there is none."""
        found = np.full(self.shape[0] * self.shape[1], np.nan)
        found[self.at] = values
        return found.reshape(self.shape)


class Side(NamedTuple):
    """How the entries of a factor are shown.

    Attributes
    ----------
    kind
        The kind of figure.
    dim
        Dimension of the data.
    label
        What the axis is, with its unit.
    at
        Positions along the axis: numbers, dates, or 0, 1, 2, ...
    order
        Entries in ascending order of their positions.
    names
        What entries are called.
    grid
        Of pictures and maps.
    """

    kind: Kind
    dim: str
    label: str
    at: NDArray[Any]
    order: NDArray[np.int64]
    names: list[str]
    grid: Grid | None = None


def side_of(
    factor: Factor,
    image_shape: tuple[int, int] | None = None,
    show: Mapping[Any, str] | None = None,
) -> Side:
    """Choose how the entries of a factor are shown, by what their labels are.

    Parameters
    ----------
    factor
        With its labels.
    image_shape
        Height and width, if its entries are the pixels of an image; of another number of
        pixels it is not meant.
    show
        Kinds by dimension, for those that are not to be chosen.

    Raises
    ------
    OptionError
        If a kind is none, or cannot be shown of these labels.
    """
    labels, dim, count = factor.labels, factor.dim, factor.mean.shape[1]
    index = labels[dim] if dim in labels.coords else None
    label = format_quantity({} if index is None else index.attrs, dim)
    grid = _pixels(image_shape, count) or _grid(labels, dim)
    kind = (show or {}).get(dim) or _kind(factor, index, grid if image_shape else None, grid)
    if kind not in KINDS:
        raise OptionError(f"{dim} is shown as one of {', '.join(KINDS)}, got {kind!r}")
    if kind in ("picture", "map") and grid is None:
        raise OptionError(
            f"{dim} is no picture: that takes image_shape=(height, width) with {count} pixels, or "
            "two coordinates of numbers along it, such as latitude and longitude"
        )
    at: NDArray[Any] = np.arange(count)
    if index is not None and kind in ("time", "curve") and index.dtype.kind in "iufMm":
        at = index.values
        if index.dtype.kind == "m":
            at, label = at / np.timedelta64(1, "s"), f"{label} [s]"
    if kind == "time" and at.dtype.kind != "M":
        kind = "curve"
    order = np.argsort(at, kind="stable")
    order = order[~np.isnan(at[order]) if at.dtype.kind in "fM" else slice(None)]
    return Side(kind, dim, label, at, order, factor.names, grid)  # type: ignore[arg-type]


def _kind(factor: Factor, index: xr.DataArray | None, asked: Grid | None, grid: Grid | None) -> str:
    if asked is not None and asked.sides is None:
        return "picture"
    if index is not None and index.dtype.kind in "Mm":
        return "time"
    if grid is not None and not _measured(index):
        return "picture" if grid.sides is None else "map"
    if _measured(index):
        return "curve"
    count = factor.mean.shape[1]
    named = index is not None and index.dtype.kind in "OUT"
    if not named and count > MOST_BARS and _is_smooth(factor.mean):
        return "curve"
    return "bars" if count <= MOST_BARS else "names"


def _measured(index: xr.DataArray | None) -> bool:
    """Whether labels are numbers with a unit, or that differ by fractions."""
    if index is None or index.dtype.kind not in "iuf" or np.unique(index.values).size < index.size:
        return False
    if index.attrs.get("units"):
        return True
    fractions = index.dtype.kind == "f" and bool((index.values % 1 != 0).any())
    return fractions and bool((np.diff(index.values) > 0).all())


def _is_smooth(mean: Array) -> bool:
    """Whether neighbouring entries are alike (von Neumann 1941)."""
    centred = mean - mean.mean(axis=1, keepdims=True)
    total = float(np.square(centred).sum())
    return total > 0 and float(np.square(np.diff(mean, axis=1)).sum()) < SMOOTH * 2 * total


def _pixels(shape: tuple[int, int] | None, count: int) -> Grid | None:
    if shape is None or shape[0] * shape[1] != count:
        return None
    return Grid((shape[0], shape[1]), np.arange(count), None, ("", ""))


def _upright(labels: xr.Dataset, name: Hashable) -> tuple[bool, float]:
    """How likely a coordinate is the vertical one: by its name, else by changing seldom."""
    told = f"{labels[name].attrs.get('standard_name', '')} {name}".lower()
    named = bool(re.search(r"lat|north|row|height|depth|\by\b|^ y", told))
    across = bool(re.search(r"lon|east|col|width|\bx\b", told))
    values = labels[name].values
    return named and not across, -float(np.count_nonzero(np.diff(values))) - values.size * across


def _grid(labels: xr.Dataset, dim: str) -> Grid | None:
    """The picture that two coordinates of numbers along a dimension span, if they do."""
    pair: list[Hashable] = [
        name for name, one in labels.coords.items() if name != dim and one.dtype.kind in "iuf"
    ]
    if len(pair) != 2:
        return None
    if _upright(labels, pair[1]) > _upright(labels, pair[0]):
        pair = pair[::-1]
    values = [labels[name].values for name in pair]
    if not all(np.isfinite(one).all() for one in values):
        return None
    (rows, row), (columns, column) = (np.unique(one, return_inverse=True) for one in values)
    shape, at = (rows.size, columns.size), row * columns.size + column
    size = shape[0] * shape[1]
    if min(shape) < 2 or np.unique(at).size < at.size or at.size < FULL * size:
        return None
    names = tuple(format_quantity(labels[name].attrs, str(name)) for name in pair)
    whole = all(
        one.dtype.kind in "iu" and not labels[n].attrs for one, n in zip(values, pair, strict=True)
    )
    return Grid(shape, at.astype(np.int64), None if whole else (rows, columns), names)  # type: ignore[arg-type]
