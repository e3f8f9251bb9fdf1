"""Labels and statistics of a matrix.

Labels are the caller's names of rows and columns; results keep them. Dense blocks are scanned in
fixed tiles of rows that are copied first, so that sums and checksums do not depend on the memory
layout of a block or on its source.
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
"""Kinds of NumPy dtypes that hold real numbers."""

_ADVICE = {
    "c": "take their modulus (numpy.abs) or their real part (numpy.real)",
    "M": "turn times into numbers, for example (V - V.min()) / numpy.timedelta64(1, 's')",
    "m": "turn times into numbers, for example V / numpy.timedelta64(1, 's')",
}
TILE_ENTRIES = 65_536
TILE_COUNTS = 2**21
NAMED = 5
EACH, LARGE = 32, 2**28
"""Minimum bytes per row or column, and the total below which free memory is not checked."""
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
CF_ATTRS = ("long_name", "standard_name", "units")
"""Attributes of arrays and coordinates that results keep, by their CF names."""

Locate = Callable[[int], tuple[int, int]]
"""Function from the position of an entry among some values to its row and column."""


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


CODES: Final = frozenset({-9.0, -99.0, -999.0, -9999.0, -99999.0, -32768.0})
"""Values that tables often use for missing cells where real values are not negative."""


def cf_attrs(attrs: Mapping[Any, Any]) -> dict[str, str]:
    """Return the long name, standard name and units among some attributes, as text."""
    return {name: str(attrs[name]) for name in CF_ATTRS if attrs.get(name) not in (None, "")}


@dataclass(frozen=True)
class SourceInfo:
    """Origin of a matrix.

    ``kind`` is ``"numpy"``, ``"dask"``, ``"zarr"``, ``"xarray"``, ``"pandas"``, ``"scipy"``,
    ``"sparse"``, ``"anndata"`` or ``"blocks"`` (a blocked sparse store). ``location`` is a path or
    URL that ``as_blocks`` accepts again, or None. ``lazy`` is True if the input was not in memory.
    ``rule`` is how values become weights of cells, if they do (see
    `daskfactor.data.loading.as_weights`). ``layer`` and ``mask_var`` are those of an AnnData.
    ``table`` holds the columns of a long table, as `daskfactor.data.tables.ReadOptions` has them.
    """

    kind: str
    location: str | None = None
    lazy: bool = False
    rule: str | None = None
    layer: str | None = None
    mask_var: str | None = None
    table: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return kind and location, and the layer, mask or columns if they were chosen."""
        part = {"layer": self.layer, "mask_var": self.mask_var, "table": self.table}
        selection = {name: value for name, value in part.items() if value is not None}
        location = None if self.location is None else str(self.location)
        return {"kind": self.kind, "location": location, **selection}


class Layout(NamedTuple):
    """Order of rows and columns, and the meaning of entries that sparse blocks do not store.

    ``unstored`` is ``"zero"`` or ``"missing"``, None for dense blocks, or a dict by block where
    blocks differ; ``row_order`` (I,) and ``col_order`` (J,) hold the caller's row and column at
    each position of the grid, None if they were not permuted.
    """

    unstored: str | Mapping[Block, str | None] | None = None
    row_order: NDArray[np.int64] | None = None
    col_order: NDArray[np.int64] | None = None

    def callers(self, row: Any, col: Any) -> tuple[Any, Any]:
        """Return the caller's row and column numbers of cells of the grid."""
        return (
            row if self.row_order is None else self.row_order[row],
            col if self.col_order is None else self.col_order[col],
        )


DENSE = Layout()


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


def check_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a matrix, refused unless it holds real numbers."""
    if dtype.kind not in NUMERIC:
        advice = _ADVICE.get(dtype.kind, "convert them, for example with .astype('float64')")
        raise DataError(
            f"the entries have dtype {dtype}; they must be real numbers (bool, integer or float, "
            f"NaN where missing); {advice}"
        )
    return dtype


def check_shape(piece: Any, shape: tuple[int, int], row0: int, col0: int) -> None:
    """Refuse a piece whose shape differs from the one that its source declared."""
    if tuple(np.shape(piece)) != shape:
        raise DataError(
            f"the data say that their piece at row {row0}, column {col0} is {shape[0]} x "
            f"{shape[1]}, but reading it gave shape {tuple(np.shape(piece))}; if they are a dask "
            "array, name the true chunks where you make it (map_blocks(..., chunks=...)), or call "
            "its compute_chunk_sizes()"
        )


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the numbers of rows and columns, refused unless both are positive."""
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
    nbytes = EACH * sum(shape)
    if nbytes > LARGE and nbytes > available_memory():
        raise DataError(
            f"the data have shape {shape[0]} x {shape[1]}; counts of every row and column "
            f"take {nbytes} bytes, more than is free"
        )


class WeightSums(NamedTuple):
    """Sums of the weights of observed cells: by block (B, B), row (I,) and column (J,).

    The last two fields are sums of squared weights, by row and by column.
    """

    blocks: NDArray[np.float64]
    rows: NDArray[np.float64]
    cols: NDArray[np.float64]
    row_squares: NDArray[np.float64]
    col_squares: NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """Counts and moments of the observed entries of a matrix.

    ``n_observed`` is (B, B), one count per block; ``row_observed`` (I,) and ``col_observed`` (J,)
    count per row and column; ``total`` is the sum of the observed values, ``minimum`` and
    ``maximum`` their extremes; ``n_stored`` is (B, B), the number of entries that sparse blocks
    store, None for dense blocks; ``mass`` holds the sums of the weights of cells, if there are any;
    ``kind`` is ``"uncertainty"`` (one over the variance) or ``"weights"`` (factors of
    log-likelihoods).
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
    mass: WeightSums | None = None
    kind: str | None = None


class DataInfo(NamedTuple):
    """Description of blocked data: everything except the blocks."""

    grid: Grid
    labels: Labels
    statistics: Statistics
    source: SourceInfo
    dtype: FloatType
    layout: Layout = DENSE


class Weighing(NamedTuple):
    """Kind of the weights of cells, and the error for an observed cell without weight."""

    kind: str
    refuse: Callable[[int, int], DataError]


class StatisticsBuilder:
    """Statistics of a matrix, accumulated block by block in any order.

    NaN is a missing entry; entries that sparse blocks do not store are observed zeros or missing,
    as the layout says. Blocks have weights of cells if ``weighing`` is passed.
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
        self._mass = WeightSums(np.zeros(square), *sides, *(np.zeros_like(side) for side in sides))

    def scan(self, block: Block, view: AnyBlock) -> None:
        """Add one block."""
        if isinstance(view, SparseBlock):
            self._scan_sparse(block, view)
        else:
            self._scan_dense(block, view.block, view.weights)

    def finish(self, source: SourceInfo, dtype: FloatType, allow_empty: bool = False) -> DataInfo:
        """Return the description of the matrix, after the last block."""
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
        info = DataInfo(self._grid, self._labels, statistics, source, dtype, self._layout)
        if source.rule is None:  # for weights, missing cells are reported with the data
            refuse_unobserved(info, allow_empty)
            self._warn_of_codes()
        return info

    def _warn_of_codes(self) -> None:
        """Warn if the only negative value looks like a code for missing cells."""
        if len(self._coded) == 1 and None not in self._coded:
            ((code, count),) = self._coded.items()
            warn(
                f"{count} cells are {code:g}, and no other value is negative: if that stands for "
                "missing cells, set them to NaN; otherwise they are data",
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
                tile_rows = slice(first, first + tile.shape[0])
                self._mass.rows[tile_rows] += q.sum(1)
                self._mass.cols[cols] += q.sum(0)
                self._mass.row_squares[tile_rows] += (q * q).sum(1)
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
        is_missing = np.isnan(values)
        missing = int(np.count_nonzero(is_missing))
        self._stored[block] = stored
        self._observed[block] = (view.m * view.n if view.zeros else stored) - missing
        # Entries are sorted, and NaN and zero have one bit pattern each.
        lengths = np.diff(view.indptr).astype(np.int64)
        self._checksums[block] = crc32((lengths, view.indices, values))
        self._count(block, view, is_missing if missing else None)
        if view.weights is not None:
            self._weigh_sparse(block, view)
        if view.zeros and stored < view.m * view.n:
            self._low, self._high = float(np.fmin(self._low, 0)), float(np.fmax(self._high, 0))
        if missing == stored:
            return
        self._extend(values, partial(cell_of, self._grid, self._layout, block, view))
        observed = values[~is_missing] if missing else values
        self._totals[block] = observed.sum(dtype=np.float64)
        self._is_integer = self._is_integer and bool((observed == np.rint(observed)).all())

    def _weigh(self, block: Block, locate: Locate, weights: FloatArray) -> None:
        """Add weights of observed cells to the sum of their block; refuse NaN."""
        total = float(weights.sum())
        if math.isnan(total) and self._weighing is not None:
            raise self._weighing.refuse(*locate(int(np.argmax(np.isnan(weights)))))
        self._mass.blocks[block] += total

    def _weigh_sparse(self, block: Block, view: SparseBlock) -> None:
        """Add up the weights of a block; zeros that it does not store have weight 1."""
        assert view.weights is not None
        rows, cols = self._grid.slices(block)
        seen, zeros = ~np.isnan(view.values), int(view.zeros)
        q = np.where(seen, view.weights, 0).astype(np.float64)
        self._weigh(block, partial(cell_of, self._grid, self._layout, block, view), q)
        self._mass.blocks[block] += zeros * (view.m * view.n - q.size)
        index, columns = stored_cells(view)
        by_rows, by_cols = (self._mass.rows, self._mass.row_squares), self._mass[2::2]
        for squared, of_rows, of_cols in zip((q, q * q), by_rows, by_cols, strict=True):
            of_rows[rows] += zeros * view.n + np.bincount(index, squared - zeros, view.m)
            of_cols[cols] += zeros * view.m + np.bincount(columns, squared - zeros, view.n)

    def _count(self, block: Block, view: SparseBlock, is_missing: NDArray[np.bool_] | None) -> None:
        rows, cols = self._grid.slices(block)
        if view.zeros:
            self._rows[rows] += view.n
            self._cols[cols] += view.m
        else:
            self._rows[rows] += np.diff(view.indptr)
            self._cols[cols] += np.bincount(view.indices, minlength=view.n)
        if is_missing is not None:
            entry_rows = np.searchsorted(view.indptr, np.flatnonzero(is_missing), side="right") - 1
            self._rows[rows] -= np.bincount(entry_rows, minlength=view.m)
            self._cols[cols] -= np.bincount(view.indices[is_missing], minlength=view.n)

    def _extend(self, values: FloatArray, locate: Locate) -> None:
        """Update the extremes, and refuse infinite values."""
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
    """Return the meaning of unstored entries as text that is equal for equal layouts."""
    if isinstance(unstored, str):
        return unstored
    return ",".join(f"{row} {col} {meaning}" for (row, col), meaning in sorted(unstored.items()))


def infinite(labels: Labels, cell: tuple[int, int], value: float) -> DataError:
    """Return the error for an infinite entry."""
    return DataError(
        f"the entry at {labels.cell(*cell)} is {value}; entries must be finite numbers, or NaN "
        "where they are missing; correct it, or set it to NaN"
    )


def refuse_unobserved(info: DataInfo, allow_empty: bool) -> None:
    """Refuse a matrix without observations; also empty rows and columns, unless allowed."""
    labels, statistics, (_, *orders) = info.labels, info.statistics, info.layout
    if not statistics.n_observed.any():
        shape = " x ".join(str(side.size) for side in info.grid.sides)
        raise DataError(
            f"all {shape} entries are missing (NaN, masked or not stored); "
            "pass a matrix with at least one observed entry in every row and column"
        )
    counted = statistics.row_observed, statistics.col_observed
    names = ("row", labels.row), ("column", labels.column)
    function = "as_tensor" if isinstance(info.grid, TensorGrid) else "as_blocks"
    advice = f", or pass {function}(V, allow_empty=True) to leave them to the prior"
    advice *= info.source.kind != "coupled"
    for counts, order, (side, name) in zip(counted, orders, names, strict=True):
        if allow_empty or not has_zeros(counts):
            continue
        empty = np.flatnonzero(np.asarray(counts) == 0)
        empty = empty if order is None else np.sort(order[empty])
        listing = ", ".join(name(int(index)) for index in empty[:NAMED])
        more = f" and {empty.size - NAMED} more" if empty.size > NAMED else ""
        raise DataError(
            f"{empty.size} of {len(counts)} {side}s have no observed entry: {listing}{more}; such "
            f"a {side} says nothing about its factors, so drop it from the matrix{advice}"
        )


def has_zeros(counts: NDArray[np.int64]) -> bool:
    """Return whether any count is zero; reads a stored array piece by piece."""
    starts = range(0, len(counts), TILE_COUNTS)
    return any((counts[start : start + TILE_COUNTS] == 0).any() for start in starts)


def dense_cells(row0: int, col0: int, width: int) -> Locate:
    """Return the function from a position to its cell, for a dense piece at (row0, col0)."""
    return lambda position: (row0 + position // width, col0 + position % width)


def cell_of(grid: Grid, layout: Layout, block: Block, view: Any, position: int) -> tuple[int, int]:
    """Return the caller's row and column of a stored entry of a block."""
    row = int(np.searchsorted(view.indptr, position, side="right")) - 1
    rows, cols = grid.slices(block)
    return layout.callers(rows.start + row, cols.start + int(view.indices[position]))


def stored_cells(view: SparseBlock) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the row and column inside the block of every stored entry."""
    return np.repeat(np.arange(view.m), np.diff(view.indptr)), view.indices


def crc32(arrays: Iterable[NDArray[Any]]) -> int:
    """Return the CRC-32 of arrays in little-endian byte order, one after another."""
    checksum = 0
    for array in arrays:
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        checksum = zlib.crc32(as_bytes(little), checksum)
    return checksum
