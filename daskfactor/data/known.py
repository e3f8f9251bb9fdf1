"""What is known of a matrix: origin and labels before it is read, then counts, moments, extremes.

Labels are the user's own names of rows and columns, kept for the results. Dense blocks are
scanned in fixed tiles of rows that are copied first, so that sums and checksums do not depend
on how the block lies in memory or where it came from.
"""

import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import warn
from daskfactor.data.grid import Block, Grid, TensorGrid
from daskfactor.data.storage import FloatArray, FloatType, as_bytes
from daskfactor.errors import DataError, DataWarning
from daskfactor.kernels.views import AnyBlock, SparseBlock
from daskfactor.machine import available_memory

DEFAULT_DIMS = ("row", "column")
NUMERIC = "biuf"
"""Kinds of NumPy types that are real numbers."""

_ADVICE = {
    "c": "take their modulus (numpy.abs) or their real part (numpy.real)",
    "M": "turn times into numbers, for example (V - V.min()) / numpy.timedelta64(1, 's')",
    "m": "turn times into numbers, for example V / numpy.timedelta64(1, 's')",
}
TILE_ENTRIES = 65_536
TILE_COUNTS = 2**21
NAMED = 5
EACH, LARGE = 32, 2**28
"""Bytes that a row or column takes at least; so many are not worth a look at what is free."""
_RESULTS = (
    "W H chain draw component component_name W_mean W_var H_mean H_var count V weights "
    "row_feature column_feature row_index column_index mean sd lower upper rank position mu "
    "rate rate_w rate_h shape_w shape_h noise dispersion precision_w precision_h link_w link_h "
    "effective_components objective iteration"
)
RESERVED = frozenset(_RESULTS.split())
"""Names of variables and dimensions of results, which no dimension of the data can have."""
LONGEST_NAME = 200
"""Bytes of a name that a file system surely takes."""
TOLD = ("long_name", "standard_name", "units")
"""Attributes of arrays and coordinates that travel with them, as the CF conventions call them."""

Locate = Callable[[int], tuple[int, int]]
"""From the position of an entry among some values to its row and column in the matrix."""


class Stack(NamedTuple):
    """Dimensions that lie behind one another along one: all labels of each, by its name.

    ``maps`` says that the caller had them apart, so that results unfold them.
    """

    levels: Mapping[str, NDArray[Any]]
    maps: bool

    def renamed(self, names: Mapping[str, str]) -> "Stack":
        """The same under other names, where there are any."""
        levels = {names.get(name, name): labels for name, labels in self.levels.items()}
        return self._replace(levels=levels)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can have it."""
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
        """From what `to_dict` made."""
        levels = stored["levels"].items()
        labels = {n: np.array(of["labels"]).astype(of["dtype"]) for n, of in levels}
        return cls(labels, stored["maps"])


@dataclass(frozen=True)
class Labels:
    """Dimension names, one-dimensional coordinates and the name of a data matrix.

    The coordinates are indexed by coordinate name; the one that is called like
    its dimension, if there is one, is the index that messages quote. ``attrs`` holds units and
    long names (see `TOLD`) of coordinates, and ``about`` those of the values.
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
        """Refuse names that results cannot have, and tell apart what rows and columns call alike.

        The latter get an underscore at the end.
        """
        self._refuse_unusable()
        taken = {self.row_dim}
        col_dim = free_name(self.col_dim, taken)
        taken.add(col_dim)
        found, moved = [], {} if col_dim == self.col_dim else {self.col_dim: col_dim}
        stacks = dict(self.stacks)
        sides = (
            (self.row_dim, self.row_dim, self.row_coords),
            (self.col_dim, col_dim, self.col_coords),
        )
        for given, dim, coords in sides:
            names: dict[str, str] = {}
            for key in coords:
                others = {*taken, *names.values(), *coords} - ({key} - taken)
                names[key] = dim if key == given else free_name(key, others)
            taken.update(names.values())
            if (stack := stacks.pop(given, None)) is not None:
                stacks[dim] = stack.renamed(names)
            moved |= {key: name for key, name in names.items() if key != name}
            found.append((names, coords))
        if not moved:
            return  # values need not be read
        attrs = dict(self.attrs) | {new: self.attrs.get(old, {}) for old, new in moved.items()}
        renamed = ({names[key]: own for key, own in side.items()} for names, side in found)
        told_apart = col_dim, *renamed, attrs, stacks
        fields = "col_dim", "row_coords", "col_coords", "attrs", "stacks"
        for name, value in zip(fields, told_apart, strict=True):
            object.__setattr__(self, name, value)
        shown = ", ".join(f"{key!r} of one is {name!r}" for key, name in moved.items())
        warn(
            f"rows and columns have dimensions or coordinates of one name: in the results {shown}; "
            "rename them to have names of your own, for example with DataArray.rename",
            DataWarning,
        )

    def _refuse_unusable(self) -> None:
        """Refuse dimensions that results cannot have, and leave such coordinates out."""
        levels = (name for stack in self.stacks.values() for name in stack.levels)
        dims = [self.row_dim, self.col_dim, *levels]
        for name in dims:
            if not is_usable(name):
                raise DataError(
                    f"results cannot have a dimension of the name {name!r}, which they use "
                    "themselves or which no store takes; give it another one, for example "
                    f"V.rename({{{name!r}: 'x'}}) of a DataArray"
                )
        for side in ("row_coords", "col_coords"):
            coords = getattr(self, side)
            if unusable := [name for name in coords if not is_usable(name)]:
                kept = {name: own for name, own in coords.items() if name not in unusable}
                object.__setattr__(self, side, kept)
                warn(
                    f"the coordinate {unusable[0]!r} is left out, since results have another use "
                    "for its name or no store takes it; rename it to keep it, for example with "
                    "DataArray.rename",
                    DataWarning,
                )

    @property
    def coords(self) -> dict[str, tuple[str, NDArray[Any], Mapping[str, str]]]:
        """All coordinates as xarray takes them: dimension, values and attributes, by name."""
        sides = (self.row_dim, self.row_coords), (self.col_dim, self.col_coords)
        return {
            name: (dim, values, self.attrs.get(name, {}))
            for dim, side in sides
            for name, values in side.items()
        }

    @property
    def stacked(self) -> dict[str, str]:
        """What results say of dimensions that are stacked, if any are."""
        found = {dim: stack.to_dict() for dim, stack in self.stacks.items()}
        return {"stacks": json.dumps(found)} if found else {}

    @property
    def folded(self) -> dict[str, list[str]]:
        """Dimensions of the caller's array that are rows, and columns, if any are stacked here."""
        if not any(stack.maps for stack in self.stacks.values()):
            return {}
        levels = {dim: list(stack.levels) for dim, stack in self.stacks.items() if stack.maps}
        sides = {"rows": self.row_dim, "columns": self.col_dim}
        return {side: levels.get(dim, [dim]) for side, dim in sides.items()}

    @property
    def index(self) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        """The labels of rows and of columns; None where there are none."""
        return self.row_coords.get(self.row_dim), self.col_coords.get(self.col_dim)

    @property
    def keys(self) -> tuple[Any, Any]:
        """Labels by which rows, and columns, are matched; where stacked, those of each dimension.

        None where there are none; see `daskfactor.checks.match_labels`.
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
        """How a message calls one row: its number and its label."""
        return f"row {index}{self._label(self.row_dim, self.row_coords, index)}"

    def column(self, index: int) -> str:
        """How a message calls one column: its number and its label."""
        return f"column {index}{self._label(self.col_dim, self.col_coords, index)}"

    def _label(self, dim: str, coords: Mapping[str, NDArray[Any]], index: int) -> str:
        if dim in self.stacks:
            shown = (f"{name} {coords[name][index]!s}" for name in self.stacks[dim].levels)
            return f" ({', '.join(shown)})"
        return f" ({coords[dim][index]!s})" if dim in coords else ""

    def cell(self, row: int, col: int) -> str:
        """How a message calls one cell."""
        return f"{self.row(row)}, {self.column(col)}"


CODES: Final = frozenset({-9.0, -99.0, -999.0, -9999.0, -99999.0, -32768.0})
"""What tables write for missing cells where values are never negative."""


def told(attrs: Mapping[Any, Any]) -> dict[str, str]:
    """What attributes say of names and units, as text."""
    return {name: str(attrs[name]) for name in TOLD if attrs.get(name) not in (None, "")}


@dataclass(frozen=True)
class SourceInfo:
    """Where a matrix came from.

    ``kind`` is ``"numpy"``, ``"dask"``, ``"zarr"``, ``"xarray"``, ``"pandas"``,
    ``"scipy"``, ``"sparse"``, ``"anndata"`` or ``"blocks"`` (a blocked sparse store);
    ``location`` is a path or URL that ``as_blocks`` accepts again, or None;
    ``lazy`` tells that the input itself was not in memory; ``rule`` how it becomes weights of
    cells, if it does (see `daskfactor.data.loading.weighed`); ``layer`` and ``mask_var``, of an
    AnnData, which matrix of it and which of its variables; ``table``, of a table with a line for
    each entry, its columns as `daskfactor.data.tables.Wanted` has them.
    """

    kind: str
    location: str | None = None
    lazy: bool = False
    rule: str | None = None
    layer: str | None = None
    mask_var: str | None = None
    table: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """What results tell of it: kind and place, and which part or columns of it, if not all."""
        part = {"layer": self.layer, "mask_var": self.mask_var, "table": self.table}
        told = {name: value for name, value in part.items() if value is not None}
        where = None if self.location is None else str(self.location)
        return {"kind": self.kind, "location": where, **told}


class Layout(NamedTuple):
    """What is particular to sparse blocks.

    ``unstored`` is ``"zero"`` or ``"missing"``, and None of dense blocks, or one of these by
    block, where blocks differ; ``row_order`` (I,) and
    ``col_order`` (J,) hold the caller's row and column at each position of the grid, None if
    they were not permuted.
    """

    unstored: str | Mapping[Block, str | None] | None = None
    row_order: NDArray[np.int64] | None = None
    col_order: NDArray[np.int64] | None = None

    def callers(self, row: Any, col: Any) -> tuple[Any, Any]:
        """A cell, or many, as the caller numbers them."""
        return (
            row if self.row_order is None else self.row_order[row],
            col if self.col_order is None else self.col_order[col],
        )


DENSE = Layout()


def usable_dims(row: object, col: object) -> tuple[str, str]:
    """Name two dimensions whose source may have no names for them, unusable or equal ones."""
    row_dim, col_dim = (
        default if name is None or not is_usable(str(name)) else str(name)
        for name, default in zip((row, col), DEFAULT_DIMS, strict=True)
    )
    return DEFAULT_DIMS if row_dim == col_dim else (row_dim, col_dim)


def is_usable(name: str) -> bool:
    """Tell whether results can have a dimension or coordinate of this name.

    A path of a store takes no slash, no dots alone and no name that is empty, long or zarr's own.
    """
    path = bool(name.strip(".")) and name != "zarr.json" and len(name.encode()) <= LONGEST_NAME
    return path and not re.search(r"[/\\\0]", name) and name not in RESERVED


def free_name(name: str, taken: Collection[str]) -> str:
    """A name, with as many underscores at its end as it takes to be none of those ``taken``."""
    while name in taken:
        name += "_"
    return name


def storable(name: str, labels: NDArray[Any], index_of: bool = True) -> NDArray[Any]:
    """Labels as a store can keep them: times with a zone as UTC, periods as their names.

    Of other types than texts, numbers and times they are texts, which a warning tells. Those of
    an index (``index_of``) must all be there.

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
        tensor = ", or in Python pass CP(...) to factor them as a tensor"
        raise DataError(
            f"the data have {len(shape)} dimension{'' if len(shape) == 1 else 's'}, shape "
            f"{tuple(shape)}; a matrix with rows and columns is needed, so select or reshape to "
            f"two dimensions{tensor if len(shape) > 2 else ''}"
        )
    rows, cols = (int(side) for side in shape)
    if not rows or not cols:
        raise DataError(
            f"the data are empty, shape {rows} x {cols}; pass at least one row and one column"
        )
    countable((rows, cols))
    return rows, cols


def countable(shape: tuple[int, int]) -> None:
    """Refuse more rows and columns than there is memory to count entries for."""
    needed = EACH * sum(shape)
    if needed > LARGE and needed > available_memory():
        raise DataError(
            f"the data have shape {shape[0]} x {shape[1]}; what is counted of each row and column "
            f"takes {needed} bytes, more than is free"
        )


class Mass(NamedTuple):
    """Sums of the weights of observed cells: of every block (B, B), row (I,) and column (J,).

    And of their squares, of rows and of columns.
    """

    blocks: NDArray[np.float64]
    rows: NDArray[np.float64]
    cols: NDArray[np.float64]
    row_squares: NDArray[np.float64]
    col_squares: NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """Counts and moments of the observed entries of a matrix.

    ``n_observed`` is (B, B), one count per block; ``row_observed`` (I,) and
    ``col_observed`` (J,) count per row and column; ``total`` is the sum of the
    observed values, ``minimum`` and ``maximum`` their extremes; ``n_stored`` is
    (B, B), the entries that sparse blocks store, and None if blocks are dense; ``mass`` is
    what their weights add up to, where cells have any, and ``kind`` what these are:
    ``"uncertainty"`` (one over the variance) or ``"weights"`` (factors of log-likelihoods).
    """

    n_observed: NDArray[np.int64]
    row_observed: NDArray[np.int64]
    col_observed: NDArray[np.int64]
    total: float
    minimum: float
    maximum: float
    is_integer: bool
    fingerprint: str
    n_stored: NDArray[np.int64] | None = None
    mass: Mass | None = None
    kind: str | None = None


class Known(NamedTuple):
    """All that is known of blocked data, but not the blocks."""

    grid: Grid
    labels: Labels
    statistics: Statistics
    source: SourceInfo
    dtype: FloatType
    layout: Layout = DENSE


class Weighing(NamedTuple):
    """What the weights of cells are, and the error for an observed cell that has none."""

    kind: str
    refuse: Callable[[int, int], DataError]


class StatisticsBuilder:
    """Collects the statistics block by block, in any order of blocks.

    NaN is a missing entry; entries that sparse blocks do
    not store are observed zeros or missing, as the layout says. Blocks have weights of
    cells where ``weighing`` is given.
    """

    def __init__(
        self,
        grid: Grid,
        labels: Labels,
        layout: Layout = DENSE,
        weighing: Weighing | None = None,
    ) -> None:
        square, (height, width) = (grid.blocks, grid.blocks), grid.shape
        self._grid = grid
        self._labels = labels
        self._layout = layout
        self._stored = np.zeros(square, np.int64)
        self._observed = np.zeros(square, np.int64)
        self._checksums = np.zeros(square, np.uint32)
        self._totals = np.zeros(square)
        self._rows, self._cols = np.zeros(height, np.int64), np.zeros(width, np.int64)
        self._low, self._high = math.nan, math.nan
        self._is_integer = True
        self._coded: dict[float | None, int] = {}
        self._weighing = weighing
        sides = np.zeros(height), np.zeros(width)
        self._mass = Mass(np.zeros(square), *sides, *(np.zeros_like(side) for side in sides))

    def scan(self, block: Block, view: AnyBlock) -> None:
        """Add one block."""
        if isinstance(view, SparseBlock):
            self._scan_sparse(block, view)
        else:
            self._scan_dense(block, view.block, view.weights)

    def finish(self, source: SourceInfo, dtype: FloatType, allow_empty: bool = False) -> Known:
        """What is known of the whole matrix, once every block has been scanned."""
        statistics = Statistics(
            n_observed=self._observed,
            row_observed=self._rows,
            col_observed=self._cols,
            total=math.fsum(self._totals.ravel()),
            minimum=self._low,
            maximum=self._high,
            is_integer=self._is_integer,
            fingerprint=self._fingerprint(),
            n_stored=self._stored if self._layout.unstored else None,
            mass=self._mass if self._weighing else None,
            kind=self._weighing.kind if self._weighing else None,
        )
        known = Known(self._grid, self._labels, statistics, source, dtype, self._layout)
        if source.rule is None:  # what has no weight is told of with the data
            refuse_unobserved(known, allow_empty)
            self._warn_of_codes()
        return known

    def _warn_of_codes(self) -> None:
        """Say that the one negative value there is may stand for missing cells."""
        if len(self._coded) == 1 and None not in self._coded:
            ((code, count),) = self._coded.items()
            warn(
                f"{count} cells are {code:g}, and no other value is negative: if that stands for "
                "missing cells, set them to NaN; they are taken for data",
                DataWarning,
            )

    def _scan_dense(self, block: Block, values: FloatArray, weights: FloatArray | None) -> None:
        width = values.shape[1]
        height = max(1, TILE_ENTRIES // width)
        rows, cols = self._grid.slices(block)
        checksum, total = 0, 0.0
        for start in range(0, values.shape[0], height):
            # Adding zero copies, makes the tile contiguous and turns -0.0 into 0.0.
            tile = values[start : start + height] + values.dtype.type(0)
            first = rows.start + start
            observed = ~np.isnan(tile)
            everything = bool(observed.all())
            if not everything:
                tile[~observed] = np.nan
            checksum = zlib.crc32(tile.data, checksum)
            self._extend(tile, dense_cells(first, cols.start, width))
            self._rows[first : first + tile.shape[0]] += observed.sum(1)
            self._cols[cols] += observed.sum(0)
            if weights is not None:
                q = np.where(observed, weights[start : start + height], 0).astype(np.float64)
                self._weigh(block, dense_cells(first, cols.start, width), q)
                here = slice(first, first + tile.shape[0])
                self._mass.rows[here] += q.sum(1)
                self._mass.cols[cols] += q.sum(0)
                self._mass.row_squares[here] += (q * q).sum(1)
                self._mass.col_squares[cols] += (q * q).sum(0)
            if not everything:
                tile[~observed] = 0
            self._is_integer = self._is_integer and bool((tile == np.rint(tile)).all())
            total += float(tile.sum(dtype=np.float64))
            self._observed[block] += int(np.count_nonzero(observed))
        self._checksums[block] = checksum
        self._totals[block] = total
        self._stored[block] = values.size

    def _scan_sparse(self, block: Block, view: SparseBlock) -> None:
        values, stored = view.values, view.values.size
        held_out = np.isnan(values)
        missing = int(np.count_nonzero(held_out))
        self._stored[block] = stored
        self._observed[block] = (view.m * view.n if view.zeros else stored) - missing
        # The entries have one order, and NaN and zero one form each.
        lengths = np.diff(view.indptr).astype(np.int64)
        self._checksums[block] = crc32((lengths, view.indices, values))
        self._count(block, view, held_out if missing else None)
        if view.weights is not None:
            self._weigh_sparse(block, view)
        if view.zeros and stored < view.m * view.n:
            self._low, self._high = float(np.fmin(self._low, 0)), float(np.fmax(self._high, 0))
        if missing == stored:
            return
        self._extend(values, partial(cell_of, self._grid, self._layout, block, view))
        known = values[~held_out] if missing else values
        self._totals[block] = known.sum(dtype=np.float64)
        self._is_integer = self._is_integer and bool((known == np.rint(known)).all())

    def _weigh(self, block: Block, locate: Locate, weights: FloatArray) -> None:
        """Add weights of observed cells to those of their block; refuse NaN."""
        total = float(weights.sum())
        if math.isnan(total) and self._weighing is not None:
            raise self._weighing.refuse(*locate(int(np.argmax(np.isnan(weights)))))
        self._mass.blocks[block] += total

    def _weigh_sparse(self, block: Block, view: SparseBlock) -> None:
        """Add up the weights of a block; those of zeros that it does not store are 1."""
        assert view.weights is not None
        rows, cols = self._grid.slices(block)
        seen, zeros = ~np.isnan(view.values), int(view.zeros)
        q = np.where(seen, view.weights, 0).astype(np.float64)
        self._weigh(block, partial(cell_of, self._grid, self._layout, block, view), q)
        self._mass.blocks[block] += zeros * (view.m * view.n - q.size)
        index, columns = stored_cells(view)
        by_rows, by_cols = (self._mass.rows, self._mass.row_squares), self._mass[2::2]
        for own, of_rows, of_cols in zip((q, q * q), by_rows, by_cols, strict=True):
            of_rows[rows] += zeros * view.n + np.bincount(index, own - zeros, view.m)
            of_cols[cols] += zeros * view.m + np.bincount(columns, own - zeros, view.n)

    def _count(self, block: Block, view: SparseBlock, held_out: NDArray[np.bool_] | None) -> None:
        rows, cols = self._grid.slices(block)
        if view.zeros:
            self._rows[rows] += view.n
            self._cols[cols] += view.m
        else:
            self._rows[rows] += np.diff(view.indptr)
            self._cols[cols] += np.bincount(view.indices, minlength=view.n)
        if held_out is not None:
            where = np.searchsorted(view.indptr, np.flatnonzero(held_out), side="right") - 1
            self._rows[rows] -= np.bincount(where, minlength=view.m)
            self._cols[cols] -= np.bincount(view.indices[held_out], minlength=view.n)

    def _extend(self, values: FloatArray, locate: Locate) -> None:
        """Take note of the extremes of some values, and refuse infinite ones."""
        low, high = float(np.fmin.reduce(values, None)), float(np.fmax.reduce(values, None))
        if math.isinf(low) or math.isinf(high):
            position = int(np.argmax(np.isinf(values)))
            raise infinite(self._labels, locate(position), float(values.flat[position]))
        self._low, self._high = float(np.fmin(self._low, low)), float(np.fmax(self._high, high))
        if low < 0:
            coded = values[values < 0] if low in CODES else np.empty(0)
            key = low if coded.size and np.all(coded == low) else None
            self._coded[key] = self._coded.get(key, 0) + coded.size

    def _fingerprint(self) -> str:
        rows, cols = self._grid.shape
        digest = hashlib.blake2b(digest_size=8)
        digest.update(repr((self._grid.rows.offsets, self._grid.cols.offsets)).encode())
        if self._layout.unstored:
            digest.update(f"unstored {_by_block(self._layout.unstored)}".encode())
            for order in (self._layout.row_order, self._layout.col_order):
                digest.update(b"" if order is None else order.astype("<i8").tobytes())
        digest.update(self._observed.astype("<i8").tobytes())
        digest.update(self._checksums.astype("<u4").tobytes())
        return f"{rows}x{cols}-{int(self._observed.sum())}-{digest.hexdigest()}"


def _by_block(unstored: Any) -> str:
    """What is not stored, as a text that is the same for the same."""
    if isinstance(unstored, str):
        return unstored
    return ",".join(f"{row} {col} {own}" for (row, col), own in sorted(unstored.items()))


def infinite(labels: Labels, cell: tuple[int, int], value: float) -> DataError:
    """The error for an infinite entry."""
    return DataError(
        f"the entry at {labels.cell(*cell)} is {value}; entries must be finite numbers, or NaN "
        "where they are missing; correct it, or set it to NaN"
    )


def refuse_unobserved(known: Known, allow_empty: bool) -> None:
    """Refuse a matrix of nothing, and rows and columns of nothing unless they are allowed."""
    labels, statistics, (_, *orders) = known.labels, known.statistics, known.layout
    if not statistics.n_observed.any():
        shape = " x ".join(str(side.size) for side in known.grid.sides)
        raise DataError(
            f"all {shape} entries are missing (NaN, masked or not stored); "
            "pass a matrix with at least one observed entry in every row and column"
        )
    counted = statistics.row_observed, statistics.col_observed
    names = ("row", labels.row), ("column", labels.column)
    make = "as_tensor" if isinstance(known.grid, TensorGrid) else "as_blocks"
    other = f", or pass {make}(V, allow_empty=True) to leave them to the prior"
    other *= known.source.kind != "coupled"
    for counts, order, (side, name) in zip(counted, orders, names, strict=True):
        if allow_empty or not has_zeros(counts):
            continue
        empty = np.flatnonzero(np.asarray(counts) == 0)
        empty = empty if order is None else np.sort(order[empty])
        shown = ", ".join(name(int(index)) for index in empty[:NAMED])
        more = f" and {empty.size - NAMED} more" if empty.size > NAMED else ""
        raise DataError(
            f"{empty.size} of {len(counts)} {side}s have no observed entry: {shown}{more}; such a "
            f"{side} says nothing about its factors, so drop it from the matrix{other}"
        )


def has_zeros(counts: NDArray[np.int64]) -> bool:
    """Whether a count is zero, of an array that may have to be read."""
    starts = range(0, len(counts), TILE_COUNTS)
    return any((counts[start : start + TILE_COUNTS] == 0).any() for start in starts)


def dense_cells(row0: int, col0: int, width: int) -> Locate:
    """Where the entries of a dense piece are whose first cell is (row0, col0)."""
    return lambda position: (row0 + position // width, col0 + position % width)


def cell_of(grid: Grid, layout: Layout, block: Block, view: Any, position: int) -> tuple[int, int]:
    """Row and column, as the caller numbers them, of a stored entry of a block."""
    row = int(np.searchsorted(view.indptr, position, side="right")) - 1
    rows, cols = grid.slices(block)
    return layout.callers(rows.start + row, cols.start + int(view.indices[position]))


def stored_cells(view: SparseBlock) -> tuple[NDArray[Any], NDArray[Any]]:
    """Row and column inside the block of every stored entry."""
    return np.repeat(np.arange(view.m), np.diff(view.indptr)), view.indices


def crc32(arrays: Iterable[NDArray[Any]]) -> int:
    """CRC-32 of arrays as a store has them, little-endian, one after another."""
    checksum = 0
    for array in arrays:
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        checksum = zlib.crc32(as_bytes(little), checksum)
    return checksum
