"""Arrays of many dimensions, seen as matrices: some dimensions are rows, the others columns.

Dimensions that make one side lie behind one another in the order of C. Places of the side that
have no observed entry at all, such as land in a map of the sea, are left out. Nothing is stacked:
a piece of the matrix is read as the smallest box of the array that contains it. What is not in
memory is read once, chunk by chunk, into a copy that can be read so (see `Stage`).
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
    from_xarray,
    is_pydata_sparse,
    open_source,
)
from daskfactor.data.known import (
    NAMED,
    Labels,
    SourceInfo,
    Stack,
    check_dtype,
    free_name,
    storable,
    told,
)
from daskfactor.data.loading import read_budget, reading_errors
from daskfactor.data.staging import Box, Stage, boxes
from daskfactor.errors import DataError, DataWarning, OptionError

Dims = str | int | Iterable[Any] | None


@dataclass(frozen=True)
class Side:
    """Dimensions of an array that are the rows, or the columns, of a matrix.

    ``at`` holds the places that are kept, (n,), in the order of C and rising; None: all of them.
    """

    dims: tuple[Any, ...]
    shape: tuple[int, ...]
    at: NDArray[np.int64] | None = None

    @property
    def places(self) -> NDArray[np.int64]:
        """Where every row or column is on the grid of the dimensions, counted in C's order."""
        return np.arange(math.prod(self.shape)) if self.at is None else self.at

    @property
    def size(self) -> int:
        """How many rows or columns there are."""
        return math.prod(self.shape) if self.at is None else len(self.at)

    def box(self, part: slice) -> tuple[slice, NDArray[np.int64] | slice]:
        """What to read along the first dimension for a part, and what to take of it then."""
        inner = math.prod(self.shape[1:])
        if inner == 1 and self.at is None:
            return part, slice(None)
        if self.at is None:
            first, last = part.start // inner, -(-part.stop // inner)
            return slice(first, last), slice(part.start - first * inner, part.stop - first * inner)
        wanted = self.at[part]
        first, last = int(wanted[0]) // inner, int(wanted[-1]) // inner + 1
        return slice(first, last), wanted - first * inner

    def bands(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """How many rows or columns are in each chunk along the first dimension, of such sizes."""
        edges = np.cumsum([0, *sizes]) * math.prod(self.shape[1:])
        counts = np.diff(edges if self.at is None else np.searchsorted(self.at, edges))
        return tuple(int(count) for count in counts if count)


@dataclass(frozen=True)
class Fold:
    """An array and the two sides that it is seen from."""

    array: Any
    rows: Side
    cols: Side
    stage: Stage | None = None

    @property
    def dims(self) -> tuple[Any, ...]:
        """The dimensions of the rows, then those of the columns."""
        return (*self.rows.dims, *self.cols.dims)

    def box(self, box: Box) -> NDArray[Any]:
        """A part of the array, along `dims`."""
        part = self.array.isel(dict(zip(self.dims, box, strict=True)))
        return np.asarray(part.transpose(*self.dims).to_numpy())

    def boxes(self, budget: int) -> Iterator[Box]:
        """Parts of the array that cover it, whole chunks within a budget of bytes."""
        edges = {
            dim: np.cumsum([0, *(self._chunks(dim) or np.ones(self.array.sizes[dim], int))])
            for dim in self.dims
        }
        entries = budget // self.array.dtype.itemsize
        parts = boxes({dim: own.tolist() for dim, own in edges.items()}, self.array.dims, entries)
        yield from itertools.product(*(parts[dim] for dim in self.dims))

    def read(self, rows: slice, cols: slice) -> NDArray[Any]:
        """A piece of the matrix."""
        (above, inside), (left, within) = self.rows.box(rows), self.cols.box(cols)
        if self.stage is None:
            part = dict.fromkeys(self.dims, slice(None))
            part |= {self.rows.dims[0]: above, self.cols.dims[0]: left}
            values = self.box(tuple(part.values()))
        else:
            values = self.stage.read(above, left)
        matrix = values.reshape((above.stop - above.start) * math.prod(self.rows.shape[1:]), -1)
        if not isinstance(inside, slice) or inside != slice(None):
            matrix = matrix[inside]
        return np.asarray(matrix[:, within])

    def source(self) -> Source:
        """The matrix, under names of its own where dimensions are stacked."""
        array, sides, steps = self.array, (self.rows, self.cols), None
        chunks = [
            side.bands(lengths) if (lengths := self._chunks(side.dims[0])) else None
            for side in sides
        ]
        if self.stage is not None:
            above, left = (np.diff(cuts).tolist() for cuts in self.stage.cuts)
            steps = (self.rows.bands(above), self.cols.bands(left))
        lazy = array.chunks is not None or not getattr(array.variable, "_in_memory", True)
        rows, cols = chunks
        return Source(
            SourceInfo("xarray", lazy=lazy),
            (self.rows.size, self.cols.size),
            check_dtype(array.dtype),
            labels=labels_of(array, self.rows, self.cols),
            chunks=None if rows is None or cols is None else (rows, cols),
            read=self.read,
            fold=self,
            steps=steps,
        )

    def like(self, other: Any, what: str) -> Source:
        """Another array, with some of the dimensions, on the same places."""
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
            own, given = self.array.indexes.get(dim), other.indexes.get(dim)
            if own is not None and given is not None and not nearly_same(own, given):
                raise DataError(
                    f"the labels of {what} along {dim!r} are not those of V, or in another order; "
                    "bring them into the order of V, for example with reindex_like(V)"
                )
        missing = {dim: size for dim, size in sizes.items() if dim not in other.dims}
        whole = other.reset_coords(drop=True).expand_dims(missing)
        return replace(self, array=whole, stage=None).source()

    def _chunks(self, dim: Any) -> tuple[int, ...] | None:
        """Sizes of the chunks along a dimension, if there are any."""
        size = self.array.sizes[dim]
        if self.array.chunks is not None:
            return tuple(self.array.chunksizes[dim])
        step = self.array.encoding.get("preferred_chunks", {}).get(dim)
        if not isinstance(step, int):
            return step if isinstance(step, tuple) else None
        return tuple(min(step, size - start) for start in range(0, size, step))


def open_array(array: Any, rows: Dims = None, columns: Dims = None) -> Source:
    """A DataArray whose rows, and columns, are the dimensions named; the others, if left out.

    Packed values are decoded.

    Raises
    ------
    OptionError
        If there are no such dimensions, or some are in neither.
    DataError
        If the array has too many dimensions and nothing is named, or too few.
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
    wanted = [None if dims is None else _named(array, dims) for dims in (rows, columns)]
    taken = [dim for dims in wanted if dims is not None for dim in dims]
    rest = tuple(dim for dim in array.dims if dim not in taken)
    row_dims, col_dims = (rest if dims is None else dims for dims in wanted)
    if len(set(taken)) < len(taken) or (rest and None not in wanted) or not (row_dims and col_dims):
        raise OptionError(
            "every dimension of the DataArray must be in rows or in columns, once, and each of "
            f"them needs one, got rows={rows!r} and columns={columns!r} of {names}; leave one "
            "out to have all others there"
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
        found = open_source(data)
        info = replace(found.info, kind="xarray")
        return replace(found, info=info, labels=labels_of(array, *sides))
    return Fold(array, sides[0], sides[1]).source()


def data_array(data: Any) -> Any:
    """The DataArray that the caller passed, alone or as the one variable of a Dataset.

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
    shown = ", ".join(repr(str(name)) for name in names[:NAMED])
    raise DataError(
        f"the Dataset has {len(names)} variables ({shown}{', ...' if len(names) > NAMED else ''}), "
        f"and one matrix is factorized at a time: pass one of them, ds[{str(names[0])!r}], or put "
        "them side by side as one with ds.to_dataarray()"
    )


def _named(array: Any, dims: Any) -> tuple[Any, ...]:
    """Dimensions that are named, one alone or several."""
    several = isinstance(dims, list | tuple) and dims not in array.dims
    found = tuple(dims) if several else (dims,)
    unknown = [dim for dim in found if dim not in array.dims]
    if unknown:
        names = ", ".join(repr(str(dim)) for dim in array.dims)
        raise OptionError(f"there is no dimension {unknown[0]!r}; the DataArray has {names}")
    return found


def settled(source: Source, limit: int) -> Source:
    """The same without places of stacked dimensions that have no observed entry at all.

    That takes a pass over data that can have missing entries. What is not in memory is copied
    on the way, to scratch unless a third of ``limit`` holds it, so that it is read only once.
    """
    fold: Fold | None = source.fold
    if fold is None:
        return source
    floats, budget, stage = source.dtype.kind == "f", read_budget(limit), None
    if source.info.lazy:
        shape, size = (*fold.rows.shape, *fold.cols.shape), 3 * fold.array.nbytes
        entries = budget // source.dtype.itemsize
        stage = Stage(shape, len(fold.rows.dims), source.dtype, entries, size <= limit)
    if stage is None and not floats:
        return source
    seen = [np.zeros(side.shape, bool) for side in (fold.rows, fold.cols)]
    split = len(fold.rows.dims)
    for box in fold.boxes(budget):
        where = {
            str(dim): f"{own.start}:{own.stop}" for dim, own in zip(fold.dims, box, strict=True)
        }
        with reading_errors(f"{where} of the DataArray failed", "the chunks there"):
            values = fold.box(box)
        if stage is not None:
            stage.put(box, values)
        if floats:
            observed = ~np.isnan(values)
            seen[0][box[:split]] |= observed.any(axis=tuple(range(split, len(box))))
            seen[1][box[split:]] |= observed.any(axis=tuple(range(split)))
    fold = replace(fold, stage=stage)
    return _kept(fold, seen) if floats else fold.source()


def _kept(fold: Fold, seen: list[NDArray[np.bool_]]) -> Source:
    """The matrix of those places that have been seen, with a warning of those that are left out."""
    sides, left_out = [], []
    for side, mask in zip((fold.rows, fold.cols), map(np.ravel, seen), strict=True):
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
    return replace(fold, rows=sides[0], cols=sides[1]).source()


def labels_of(array: Any, rows: Side, cols: Side) -> Labels:
    """Names and coordinates of both sides, those of stacked dimensions at every place."""
    taken = {str(name) for name in (*array.dims, *array.coords)}
    dims, coords, stacks = [], [], {}
    for side in (rows, cols):
        stacked = len(side.dims) > 1
        name = str(side.dims[0])
        if stacked:
            name = free_name("_".join(map(str, side.dims)), taken)
            taken.add(name)
            levels = {str(dim): _level(array, dim) for dim in side.dims}
            stacks[name] = Stack(levels, True)
        dims.append(name)
        coords.append(_coords(array, side, stacked))
    attrs = {str(key): found for key, coord in array.coords.items() if (found := told(coord.attrs))}
    called = None if array.name is None else str(array.name)
    return Labels(dims[0], dims[1], coords[0], coords[1], called, attrs, told(array.attrs), stacks)


def _level(array: Any, dim: Any) -> NDArray[Any]:
    """Labels along a dimension that is stacked; positions where there are none."""
    index = array.indexes.get(dim)
    if index is None:
        return np.arange(array.sizes[dim])
    if index.nlevels > 1 or not index.is_unique:
        raise DataError(
            f"the labels of {str(dim)!r} are not unique, or a MultiIndex, and it is to be stacked "
            "with others; make them unique, for example with drop_duplicates or reset_index"
        )
    return storable(str(dim), array[dim].to_numpy())


def _coords(array: Any, side: Side, stacked: bool) -> dict[str, NDArray[Any]]:
    """Coordinates along the dimensions of a side, at each of its places."""
    along = dict(zip(side.dims, np.unravel_index(side.places, side.shape), strict=True))
    found = {str(dim): _level(array, dim)[along[dim]] for dim in side.dims} if stacked else {}
    for name, own, values in _further(array, side):
        found[name] = values[tuple(along[dim] for dim in own)] if stacked else values
    return found


def _further(array: Any, side: Side) -> Iterator[tuple[str, tuple[Any, ...], NDArray[Any]]]:
    """Coordinates of dimensions of a side that are no levels of it: names, dimensions, values."""
    levels = {str(dim) for dim in side.dims} if len(side.dims) > 1 else set()
    for key, coord in array.coords.items():
        own = coord.dims
        nlevels = getattr(array.indexes.get(key), "nlevels", 1)
        if str(key) not in levels and own and set(own) <= set(side.dims) and nlevels == 1:
            yield str(key), own, storable(str(key), coord.to_numpy(), key in own)
