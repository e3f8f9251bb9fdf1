"""What is known of a matrix before its entries are read: shape, type, origin, and labels.

Labels are the user's own names of rows and columns, kept for the results.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import warn
from daskfactor.errors import DataError, DataWarning

DEFAULT_DIMS = ("row", "column")
NUMERIC = "biuf"
"""Kinds of NumPy types that are real numbers."""

_ADVICE = {
    "c": "take their modulus (numpy.abs) or their real part (numpy.real)",
    "M": "turn times into numbers, for example (V - V.min()) / numpy.timedelta64(1, 's')",
    "m": "turn times into numbers, for example V / numpy.timedelta64(1, 's')",
}


@dataclass(frozen=True)
class Labels:
    """Dimension names, one-dimensional coordinates and the name of a data matrix.

    The coordinates are indexed by coordinate name; the one that is called like
    its dimension, if there is one, is the index that messages quote.
    """

    row_dim: str = DEFAULT_DIMS[0]
    col_dim: str = DEFAULT_DIMS[1]
    row_coords: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    col_coords: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    name: str | None = None

    def __post_init__(self) -> None:
        names = [self.row_dim, self.col_dim]
        names += [key for key in self.row_coords if key != self.row_dim]
        names += [key for key in self.col_coords if key != self.col_dim]
        if len(set(names)) < len(names):
            raise DataError(
                "dimensions and coordinates of rows and columns need names that differ, "
                f"got {', '.join(names)}; rename them, for example with DataArray.rename"
            )

    def row(self, index: int) -> str:
        """How a message calls one row: its number and its label."""
        return f"row {index}{_label(self.row_dim, self.row_coords, index)}"

    def column(self, index: int) -> str:
        """How a message calls one column: its number and its label."""
        return f"column {index}{_label(self.col_dim, self.col_coords, index)}"

    def cell(self, row: int, col: int) -> str:
        """How a message calls one cell."""
        return f"{self.row(row)}, {self.column(col)}"


@dataclass(frozen=True)
class SourceInfo:
    """Where a matrix came from.

    ``kind`` is ``"numpy"``, ``"dask"``, ``"zarr"``, ``"xarray"``, ``"pandas"``,
    ``"scipy"``, ``"sparse"``, ``"anndata"`` or ``"blocks"`` (a blocked sparse store);
    ``location`` is a path or URL that ``as_blocks`` accepts again, or None;
    ``lazy`` tells that the input itself was not in memory.
    """

    kind: str
    location: str | None = None
    lazy: bool = False


class Layout(NamedTuple):
    """What is particular to sparse blocks.

    ``unstored`` is ``"zero"`` or ``"missing"``, and None of dense blocks; ``row_order`` (I,) and
    ``col_order`` (J,) hold the caller's row and column at each position of the grid, None if
    they were not permuted.
    """

    unstored: str | None = None
    row_order: NDArray[np.int64] | None = None
    col_order: NDArray[np.int64] | None = None

    def callers(self, row: int, col: int) -> tuple[int, int]:
        """The cell as the caller numbers it."""
        return (
            row if self.row_order is None else int(self.row_order[row]),
            col if self.col_order is None else int(self.col_order[col]),
        )


DENSE = Layout()


def usable_dims(row: object, col: object) -> tuple[str, str]:
    """Name two dimensions whose source may have no names for them, or equal ones."""
    row_dim = DEFAULT_DIMS[0] if row is None else str(row)
    col_dim = DEFAULT_DIMS[1] if col is None else str(col)
    return DEFAULT_DIMS if row_dim == col_dim else (row_dim, col_dim)


def storable(name: str, labels: NDArray[Any]) -> NDArray[Any]:
    """Labels as a store can keep them: times with a zone as UTC, periods as their names."""
    if labels.dtype.kind != "O":
        return labels
    import pandas as pd

    index = pd.Index(labels)
    if isinstance(index, pd.DatetimeIndex) and index.tz is not None:
        warn(
            f"the labels {name!r} are times with the zone {index.tz}; they are kept as times in "
            "UTC, without zone",
            DataWarning,
        )
        return np.asarray(index.tz_convert(None))
    if isinstance(index, pd.PeriodIndex):
        return np.asarray([str(period) for period in index])
    return labels


def check_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of a matrix, refused if it is not one of real numbers."""
    if dtype.kind not in NUMERIC:
        advice = _ADVICE.get(dtype.kind, "convert them, for example with .astype('float64')")
        raise DataError(
            f"the entries have dtype {dtype}; they must be real numbers (bool, integer or float, "
            f"NaN where missing); {advice}"
        )
    return dtype


def check_shape(piece: Any, wanted: tuple[int, int], row0: int, col0: int) -> None:
    """Refuse a piece of another shape than its source had said."""
    if tuple(np.shape(piece)) != wanted:
        raise DataError(
            f"the data say that their piece at row {row0}, column {col0} is {wanted[0]} x "
            f"{wanted[1]}, but reading it gave shape {tuple(np.shape(piece))}; if they are a dask "
            "array, name the true chunks where you make it (map_blocks(..., chunks=...)), or call "
            "its compute_chunk_sizes()"
        )


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The two sides of a matrix that has any entries."""
    if len(shape) != 2:
        raise DataError(
            f"the data have {len(shape)} dimensions, shape {tuple(shape)}; a matrix with rows and "
            "columns is needed, so select or reshape to two dimensions"
        )
    rows, cols = (int(side) for side in shape)
    if not rows or not cols:
        raise DataError(
            f"the data are empty, shape {rows} x {cols}; pass at least one row and one column"
        )
    return rows, cols


def _label(dim: str, coords: Mapping[str, NDArray[Any]], index: int) -> str:
    return f" ({coords[dim][index]!s})" if dim in coords else ""
