"""Choice of how to draw a dimension: as image, map, time series, curve, bars or list of names."""

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

MAX_BARS: Final = 30
"""Largest number of entries that are drawn as bars with a name for each."""
MIN_FILL: Final = 0.2
"""Smallest share of a grid that entries must fill to be drawn as a map."""
SMOOTH: Final = 0.3
"""Threshold for a curve: mean squared difference of neighbors over twice the variance.

Independent entries have 1.
"""


class Grid(NamedTuple):
    """Arrangement of entries in an image.

    Attributes
    ----------
    shape
        Height and width.
    at
        Position of each entry in the image, row by row.
    coordinates
        Coordinates of the rows and of the columns of the image; None for plain pixels.
    names
        Names of the coordinates with their units.
    """

    shape: tuple[int, int]
    at: NDArray[np.int64]
    coordinates: tuple[Array, Array] | None
    names: tuple[str, str]

    def picture(self, values: Array) -> Array:
        """Return values of the entries as an image, NaN where there is no entry."""
        pixels = np.full(self.shape[0] * self.shape[1], np.nan)
        pixels[self.at] = values
        return pixels.reshape(self.shape)

    def height_over_width(self) -> float:
        """Return the aspect ratio of the image or map, or a default for an extreme one."""
        height, width = map(np.ptp, self.coordinates) if self.coordinates else self.shape
        ratio = float(height) / float(width)
        return ratio if 0.25 <= ratio <= 4.0 else 0.75


class FactorAxis(NamedTuple):
    """Axis of the entries of a factor in a figure.

    Attributes
    ----------
    kind
        Kind of drawing.
    dim
        Dimension of the data.
    label
        Label of the axis, with its unit.
    at
        Positions along the axis: numbers, dates, or 0, 1, 2, ...
    order
        Entries in ascending order of their positions.
    names
        Names of the entries.
    grid
        Arrangement of the entries in an image or map, else None.
    """

    kind: Kind
    dim: str
    label: str
    at: NDArray[Any]
    order: NDArray[np.int64]
    names: list[str]
    grid: Grid | None = None


def factor_axis(
    factor: Factor,
    image_shape: tuple[int, int] | None = None,
    show: Mapping[Any, str] | None = None,
) -> FactorAxis:
    """Return the axis of a factor, of a kind that suits its labels.

    Parameters
    ----------
    factor
        Factor with labels.
    image_shape
        Height and width of an image whose pixels are the entries; ignored if the numbers of pixels
        and entries differ.
    show
        Kinds by dimension, which replace the automatic choice.

    Raises
    ------
    OptionError
        If a kind in ``show`` does not exist, or does not suit the labels.
    """
    labels, dim, count = factor.labels, factor.dim, factor.mean.shape[1]
    index = labels[dim] if dim in labels.coords else None
    label = format_quantity({} if index is None else index.attrs, dim)
    grid = pixel_grid(image_shape, count) or _grid(labels, dim)
    kind = (show or {}).get(dim) or _kind(factor, index, grid if image_shape else None, grid)
    if kind not in KINDS:
        raise OptionError(f"show[{dim!r}] must be one of {', '.join(KINDS)}, got {kind!r}")
    if kind in ("picture", "map") and grid is None:
        raise OptionError(
            f"{dim} cannot be drawn as {kind}; pass image_shape=(height, width) with {count} "
            "pixels, or data with two numeric coordinates along it, such as latitude and longitude"
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
    return FactorAxis(kind, dim, label, at, order, factor.names, grid)  # type: ignore[arg-type]


def _kind(factor: Factor, index: xr.DataArray | None, image: Grid | None, grid: Grid | None) -> str:
    """Return the kind that suits the labels; ``image`` is the grid for a passed shape."""
    if image is not None and image.coordinates is None:
        return "picture"
    if index is not None and index.dtype.kind in "Mm":
        return "time"
    if grid is not None and not _is_measured(index):
        return "picture" if grid.coordinates is None else "map"
    if _is_measured(index):
        return "curve"
    count = factor.mean.shape[1]
    has_names = index is not None and index.dtype.kind in "OUT"
    if not has_names and count > MAX_BARS and _is_smooth(factor.mean):
        return "curve"
    return "bars" if count <= MAX_BARS else "names"


def _is_measured(index: xr.DataArray | None) -> bool:
    """Return whether labels are numbers with a unit, or ascending fractional numbers."""
    if index is None or index.dtype.kind not in "iuf" or np.unique(index.values).size < index.size:
        return False
    if index.attrs.get("units"):
        return True
    fractions = index.dtype.kind == "f" and bool((index.values % 1 != 0).any())
    return fractions and bool((np.diff(index.values) > 0).all())


def _is_smooth(mean: Array) -> bool:
    """Return whether neighboring entries are similar (von Neumann 1941)."""
    centred = mean - mean.mean(axis=1, keepdims=True)
    total = float(np.square(centred).sum())
    return total > 0 and float(np.square(np.diff(mean, axis=1)).sum()) < SMOOTH * 2 * total


def pixel_grid(shape: tuple[int, int] | None, count: int) -> Grid | None:
    """Return the grid of an image with this number of pixels, or None."""
    if shape is None or shape[0] * shape[1] != count:
        return None
    return Grid((shape[0], shape[1]), np.arange(count), None, ("", ""))


def _verticality(labels: xr.Dataset, name: Hashable) -> tuple[bool, float]:
    """Return a score of a coordinate as the vertical one, by its name and how seldom it changes."""
    text = f"{labels[name].attrs.get('standard_name', '')} {name}".lower()
    vertical = bool(re.search(r"lat|north|row|height|depth|\by\b|^ y", text))
    across = bool(re.search(r"lon|east|col|width|\bx\b", text))
    values = labels[name].values
    changes = float(np.count_nonzero(np.diff(values)))
    return vertical and not across, -changes - values.size * across


def _grid(labels: xr.Dataset, dim: str) -> Grid | None:
    """Return the grid of two numeric coordinates along a dimension, or None."""
    pair: list[Hashable] = [
        name for name, one in labels.coords.items() if name != dim and one.dtype.kind in "iuf"
    ]
    if len(pair) != 2:
        return None
    if _verticality(labels, pair[1]) > _verticality(labels, pair[0]):
        pair = pair[::-1]
    values = [labels[name].values for name in pair]
    if not all(np.isfinite(one).all() for one in values):
        return None
    (rows, row), (columns, column) = (np.unique(one, return_inverse=True) for one in values)
    shape, at = (rows.size, columns.size), row * columns.size + column
    size = shape[0] * shape[1]
    if min(shape) < 2 or np.unique(at).size < at.size or at.size < MIN_FILL * size:
        return None
    names = tuple(format_quantity(labels[name].attrs, str(name)) for name in pair)
    are_pixels = all(
        one.dtype.kind in "iu" and not labels[n].attrs for one, n in zip(values, pair, strict=True)
    )
    return Grid(shape, at.astype(np.int64), None if are_pixels else (rows, columns), names)  # type: ignore[arg-type]
