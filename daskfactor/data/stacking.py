"""Arrays of many dimensions as matrices: some dimensions form the rows, the others the columns.

Dimensions of a side are stacked in C order. Positions of a side without any observed entry, such as
land in a map of the sea, are left out. Nothing is copied for that: a piece of the matrix is read as
the smallest box of the array that contains it. An array that is not in memory is first copied chunk
by chunk into a form that can be read this way (see `ScratchCopy`).
"""

import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import nearly_same, warn
from daskfactor.data.adapters import (
    Source,
    decoded,
    from_matrix,
    from_xarray,
    is_pydata_sparse,
)
from daskfactor.data.labels import NAMED, Labels, Stack, cf_attrs, free_name, storable
from daskfactor.data.loading import read_budget, reading_errors
from daskfactor.data.staging import Box, ScratchCopy, boxes
from daskfactor.data.statistics import SourceInfo, check_dtype
from daskfactor.errors import DataError, DataWarning, OptionError

Dims = str | int | Iterable[Any] | None


@dataclass(frozen=True)
class Side:
    """Dimensions of an array that form the rows, or the columns, of a matrix.

    ``at`` holds the retained positions, (n,), ascending in C order; None: all of them.
    """

    dims: tuple[Any, ...]
    shape: tuple[int, ...]
    at: NDArray[np.int64] | None = None

    @property
    def places(self) -> NDArray[np.int64]:
        """Return the position of every row or column on the grid of the dimensions, in C order."""
        return np.arange(math.prod(self.shape)) if self.at is None else self.at

    @property
    def size(self) -> int:
        """Return the number of rows or columns."""
        return math.prod(self.shape) if self.at is None else len(self.at)

    def box(self, part: slice) -> tuple[slice, NDArray[np.int64] | slice]:
        """Return the slice to read along the first dimension for a part, and an index into it."""
        inner = math.prod(self.shape[1:])
        if inner == 1 and self.at is None:
            return part, slice(None)
        if self.at is None:
            first, last = part.start // inner, -(-part.stop // inner)
            return slice(first, last), slice(part.start - first * inner, part.stop - first * inner)
        places = self.at[part]
        first, last = int(places[0]) // inner, int(places[-1]) // inner + 1
        return slice(first, last), places - first * inner

    def bands(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """Return the number of rows or columns in each chunk along the first dimension."""
        edges = np.cumsum([0, *sizes]) * math.prod(self.shape[1:])
        counts = np.diff(edges if self.at is None else np.searchsorted(self.at, edges))
        return tuple(int(count) for count in counts if count)


@dataclass(frozen=True)
class Stacking:
    """Array with the two sides of the matrix that it forms."""

    array: Any
    rows: Side
    cols: Side
    scratch: ScratchCopy | None = None

    @property
    def dims(self) -> tuple[Any, ...]:
        """Return the dimensions of the rows, then those of the columns."""
        return (*self.rows.dims, *self.cols.dims)

    def box(self, box: Box) -> NDArray[Any]:
        """Return a part of the array, with axes in the order of `dims`."""
        part = self.array.isel(dict(zip(self.dims, box, strict=True)))
        return np.asarray(part.transpose(*self.dims).to_numpy())

    def boxes(self, budget: int) -> Iterator[Box]:
        """Yield boxes that cover the array, each of chunks joined up to a budget of bytes."""
        edges = {
            dim: np.cumsum([0, *(self._chunks(dim) or np.ones(self.array.sizes[dim], int))])
            for dim in self.dims
        }
        entries = budget // self.array.dtype.itemsize
        parts = boxes(
            {dim: offsets.tolist() for dim, offsets in edges.items()}, self.array.dims, entries
        )
        yield from itertools.product(*(parts[dim] for dim in self.dims))

    def read(self, rows: slice, cols: slice) -> NDArray[Any]:
        """Return a piece of the matrix."""
        (above, inside), (left, within) = self.rows.box(rows), self.cols.box(cols)
        if self.scratch is None:
            part = dict.fromkeys(self.dims, slice(None))
            part |= {self.rows.dims[0]: above, self.cols.dims[0]: left}
            values = self.box(tuple(part.values()))
        else:
            values = self.scratch.read(above, left)
        matrix = values.reshape((above.stop - above.start) * math.prod(self.rows.shape[1:]), -1)
        if not isinstance(inside, slice) or inside != slice(None):
            matrix = matrix[inside]
        return np.asarray(matrix[:, within])

    def source(self) -> Source:
        """Return the source of the matrix; stacked dimensions get a joint name."""
        array, sides, steps = self.array, (self.rows, self.cols), None
        chunks = [
            side.bands(lengths) if (lengths := self._chunks(side.dims[0])) else None
            for side in sides
        ]
        if self.scratch is not None:
            above, left = self.scratch.bands
            steps = (self.rows.bands(above.sizes), self.cols.bands(left.sizes))
        lazy = array.chunks is not None or not getattr(array.variable, "_in_memory", True)
        rows, cols = chunks
        return Source(
            SourceInfo("xarray", lazy=lazy),
            (self.rows.size, self.cols.size),
            check_dtype(array.dtype),
            labels=labels_of(array, self.rows, self.cols),
            chunks=None if rows is None or cols is None else (rows, cols),
            read=self.read,
            stacking=self,
            steps=steps,
        )

    def like(self, other: Any, what: str) -> Source:
        """Return the source of another array, with some of the dimensions, at these positions."""
        other = decoded(other)
        sizes = dict(zip(self.dims, (*self.rows.shape, *self.cols.shape), strict=True))
        foreign = [str(dim) for dim in other.dims if dim not in sizes]
        wrong = [dim for dim in other.dims if dim in sizes and other.sizes[dim] != sizes[dim]]
        if foreign or wrong:
            raise DataError(
                f"{what} as a DataArray must have dimensions of V, with its sizes "
                f"{ {str(dim): size for dim, size in sizes.items()} }, got {dict(other.sizes)}"
            )
        for dim in other.dims:
            index, other_index = self.array.indexes.get(dim), other.indexes.get(dim)
            if (
                index is not None
                and other_index is not None
                and not nearly_same(index, other_index)
            ):
                raise DataError(
                    f"the labels of {what} along {dim!r} are not those of V, or in another order; "
                    "bring them into the order of V, for example with reindex_like(V)"
                )
        missing = {dim: size for dim, size in sizes.items() if dim not in other.dims}
        full = other.reset_coords(drop=True).expand_dims(missing)
        return replace(self, array=full, scratch=None).source()

    def _chunks(self, dim: Any) -> tuple[int, ...] | None:
        """Return the chunk sizes along a dimension, None without chunks."""
        size = self.array.sizes[dim]
        if self.array.chunks is not None:
            return tuple(self.array.chunksizes[dim])
        step = self.array.encoding.get("preferred_chunks", {}).get(dim)
        if not isinstance(step, int):
            return step if isinstance(step, tuple) else None
        return tuple(min(step, size - start) for start in range(0, size, step))


def open_array(array: Any, rows: Dims = None, columns: Dims = None) -> Source:
    """Return the source of a DataArray; ``rows`` and ``columns`` name dimensions.

    One of the two may be left out and then has all other dimensions. Packed values are decoded.

    Raises
    ------
    OptionError
        If dimensions do not exist, or some are in neither argument.
    DataError
        If the array has too many dimensions without names in the arguments, or too few.
    """
    array = decoded(array)
    names = " and ".join(repr(str(dim)) for dim in array.dims)
    if rows is None and columns is None:
        if array.ndim > 2:
            first = str(array.dims[0])
            raise DataError(
                f"the DataArray has {array.ndim} dimensions, {names}: name those that are rows, "
                f"all others are columns, as in sample(V, model, rows={first!r}) or "
                f"as_blocks(V, rows={first!r})"
            )
        return from_xarray(array)
    requested = [None if dims is None else _named(array, dims) for dims in (rows, columns)]
    used = [dim for dims in requested if dims is not None for dim in dims]
    rest = tuple(dim for dim in array.dims if dim not in used)
    row_dims, col_dims = (rest if dims is None else dims for dims in requested)
    if (
        len(set(used)) < len(used)
        or (rest and None not in requested)
        or not (row_dims and col_dims)
    ):
        raise OptionError(
            "every dimension of the DataArray must be in rows or in columns, once, and each of "
            f"them needs one, got rows={rows!r} and columns={columns!r} of {names}; leave one "
            "out, and it has all others"
        )
    if len(row_dims) == len(col_dims) == 1:
        return from_xarray(array.transpose(*row_dims, *col_dims))
    sides = [Side(dims, tuple(array.sizes[dim] for dim in dims)) for dims in (row_dims, col_dims)]
    if 0 in array.shape:
        raise DataError(f"the data are empty, sizes {dict(array.sizes)}; pass at least one entry")
    if is_pydata_sparse(getattr(array.variable, "_data", None)):
        data = array.transpose(*row_dims, *col_dims).data.reshape(
            tuple(side.size for side in sides)
        )
        source = from_matrix(data)
        info = replace(source.info, kind="xarray")
        return replace(source, info=info, labels=labels_of(array, *sides))
    return Stacking(array, sides[0], sides[1]).source()


def data_array(data: Any) -> Any:
    """Return the DataArray among data: itself, or the only variable of a Dataset; else None.

    Raises
    ------
    DataError
        If a Dataset has several variables, or none.
    """
    xarray: Any = sys.modules.get("xarray")
    if xarray is None or isinstance(data, xarray.DataArray):
        return data if xarray else None
    if not isinstance(data, xarray.Dataset):
        return None
    names = list(data.data_vars)
    if len(names) == 1:
        return data[names[0]]
    if not names:
        raise DataError("the Dataset has no variables; pass one that has, or a DataArray")
    listing = ", ".join(repr(str(name)) for name in names[:NAMED])
    listing += ", ..." if len(names) > NAMED else ""
    raise DataError(
        f"the Dataset has {len(names)} variables ({listing}), "
        f"and one matrix is factorized at a time: pass one of them, ds[{str(names[0])!r}], or put "
        "them side by side as one with ds.to_dataarray()"
    )


def _named(array: Any, dims: Any) -> tuple[Any, ...]:
    """Return the dimensions of an argument that is one or several."""
    several = isinstance(dims, list | tuple) and dims not in array.dims
    requested = tuple(dims) if several else (dims,)
    unknown = [dim for dim in requested if dim not in array.dims]
    if unknown:
        names = ", ".join(repr(str(dim)) for dim in array.dims)
        raise OptionError(f"there is no dimension {unknown[0]!r}; the DataArray has {names}")
    return requested


def drop_all_missing(source: Source, limit: int) -> Source:
    """Drop positions of stacked dimensions that have no observed entry at all.

    That takes a pass over data that can have missing entries. An array that is not in memory is
    copied during this pass, to scratch unless a third of ``limit`` holds it, so that it is read
    only once.
    """
    stacking: Stacking | None = source.stacking
    if stacking is None:
        return source
    floats, budget, scratch = source.dtype.kind == "f", read_budget(limit), None
    if source.info.lazy:
        shape, size = (*stacking.rows.shape, *stacking.cols.shape), 3 * stacking.array.nbytes
        entries = budget // source.dtype.itemsize
        scratch = ScratchCopy(shape, len(stacking.rows.dims), source.dtype, entries, size <= limit)
    if scratch is None and not floats:
        return source
    seen = [np.zeros(side.shape, bool) for side in (stacking.rows, stacking.cols)]
    split = len(stacking.rows.dims)
    for box in stacking.boxes(budget):
        region = {
            str(dim): f"{part.start}:{part.stop}"
            for dim, part in zip(stacking.dims, box, strict=True)
        }
        with reading_errors(f"{region} of the DataArray failed", "the chunks there"):
            values = stacking.box(box)
        if scratch is not None:
            scratch.put(box, values)
        if floats:
            observed = ~np.isnan(values)
            seen[0][box[:split]] |= observed.any(axis=tuple(range(split, len(box))))
            seen[1][box[split:]] |= observed.any(axis=tuple(range(split)))
    stacking = replace(stacking, scratch=scratch)
    return _drop_unobserved(stacking, seen) if floats else stacking.source()


def _drop_unobserved(stacking: Stacking, seen: list[NDArray[np.bool_]]) -> Source:
    """Return the matrix of the observed positions, with a warning about the others."""
    sides, left_out = [], []
    for side, mask in zip((stacking.rows, stacking.cols), map(np.ravel, seen), strict=True):
        gone = mask.size - int(mask.sum())
        if len(side.dims) > 1 and 0 < gone < mask.size:
            names = ", ".join(map(str, side.dims))
            left_out.append(f"{gone} of {mask.size} places on the grid of ({names})")
            side = replace(side, at=np.flatnonzero(mask))
        sides.append(side)
    if left_out:
        warn(
            f"{' and '.join(left_out)} have no observed entry and are left out; in maps they are "
            "NaN",
            DataWarning,
        )
    return replace(stacking, rows=sides[0], cols=sides[1]).source()


def labels_of(array: Any, rows: Side, cols: Side) -> Labels:
    """Return names and coordinates of both sides; stacked dimensions have one at every position."""
    used_names = {str(name) for name in (*array.dims, *array.coords)}
    dims, coords, stacks = [], [], {}
    for side in (rows, cols):
        stacked = len(side.dims) > 1
        name = str(side.dims[0])
        if stacked:
            name = free_name("_".join(map(str, side.dims)), used_names)
            used_names.add(name)
            levels = {str(dim): _level(array, dim) for dim in side.dims}
            stacks[name] = Stack(levels, maps=True)
        dims.append(name)
        coords.append(_coords(array, side, stacked))
    attrs = {
        str(key): units for key, coord in array.coords.items() if (units := cf_attrs(coord.attrs))
    }
    array_name = None if array.name is None else str(array.name)
    return Labels(
        dims[0], dims[1], coords[0], coords[1], array_name, attrs, cf_attrs(array.attrs), stacks
    )


def _level(array: Any, dim: Any) -> NDArray[Any]:
    """Return the labels along a stacked dimension, or else its positions."""
    index = array.indexes.get(dim)
    if index is None:
        return np.arange(array.sizes[dim])
    if index.nlevels > 1 or not index.is_unique:
        raise DataError(
            f"the labels of {str(dim)!r} are not unique, or a MultiIndex, so that it cannot be "
            "stacked with others; make them unique, for example with drop_duplicates or reset_index"
        )
    return storable(str(dim), array[dim].to_numpy())


def _coords(array: Any, side: Side, stacked: bool) -> dict[str, NDArray[Any]]:
    """Return the coordinates along the dimensions of a side, at each of its positions."""
    indices = dict(zip(side.dims, np.unravel_index(side.places, side.shape), strict=True))
    coords = {str(dim): _level(array, dim)[indices[dim]] for dim in side.dims} if stacked else {}
    for key, coord in array.coords.items():
        levels = getattr(array.indexes.get(key), "nlevels", 1)
        if str(key) in coords or not coord.dims or not {*coord.dims} <= {*side.dims} or levels > 1:
            continue
        values = storable(str(key), coord.to_numpy(), key in coord.dims)
        coords[str(key)] = values[tuple(indices[dim] for dim in coord.dims)] if stacked else values
    return coords
