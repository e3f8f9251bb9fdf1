"""Tensors of any kind and order as a stream of entries: (indices, values), part by part."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.adapters import open_source, zarr_array
from daskfactor.data.blocks import BlockedData
from daskfactor.data.labels import DEFAULT_DIMS, Labels
from daskfactor.data.sparse_source import (
    SparseSource,
    from_blocks,
    is_pydata_sparse,
    is_scipy_sparse,
    meaning_of_fill,
)
from daskfactor.data.store import BlockStore, is_blocked_store
from daskfactor.errors import DataError

MISSING = (
    "entries that the input does not store are missing (its fill_value is NaN, or it was made with "
    'unstored="missing"), but this model has no missing cells; make it anew with zeros there'
)


Names = tuple[tuple[str | None, ...], Mapping[str, NDArray[Any]]]


class Part(NamedTuple):
    """Some entries: where they are, (M, D), and their values, (M,)."""

    indices: NDArray[np.int64]
    values: NDArray[Any]


@dataclass(frozen=True)
class Entries:
    """A tensor as a stream of its entries that are not zero, each once.

    Attributes
    ----------
    shape
        Sizes.
    parts
        Starts the stream.
    dims
        Names of dimensions; None where there is none.
    labels
        Labels along dims, by the names of these.
    """

    shape: tuple[int, ...]
    parts: Callable[[], Iterator[Part]]
    dims: tuple[str | None, ...]
    labels: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def open_entries(data: Any, wanted: Sequence[str]) -> Entries:
    """The entries of data of any kind; a DataArray's dims go as ``wanted`` if it has these.

    Raises
    ------
    DataError
        If there is no way to read it.
    """
    if isinstance(data, BlockedData):
        return _blocked(data)
    if isinstance(data, str | PathLike):
        return _at(fspath(data))
    doors: list[tuple[str, str, Callable[[Any], Entries]]] = [
        ("xarray", "DataArray", lambda array: _labelled(array, wanted)),
        ("dask.array", "Array", _dask),
        ("zarr", "Array", _zarr),
    ]
    for module, name, opened in doors:
        if module in sys.modules and isinstance(data, getattr(sys.modules[module], name)):
            return opened(data)
    if isinstance(data, np.ndarray) or is_pydata_sparse(data):
        return _unnamed(data.shape, lambda: iter([part_of(data)]))
    if is_scipy_sparse(data) and len(data.shape) != 2:
        return _unnamed(data.shape, lambda: iter([part_of(data)]))
    return _matrix(open_source(data))


def part_of(array: Any) -> Part:
    """The entries of an array in memory that are not zero."""
    if is_pydata_sparse(array):
        if meaning_of_fill(array.fill_value) == "missing":
            raise DataError(MISSING)
        array = array if type(array).__name__ == "COO" else array.asformat("coo")
        return Part(array.coords.T.astype(np.int64), array.data)
    if is_scipy_sparse(array):
        array = array.tocoo(copy=True)
        array.sum_duplicates()
        return Part(np.stack(array.coords, axis=1).astype(np.int64), array.data)
    if masked := int(np.count_nonzero(np.ma.getmask(array))):
        raise DataError(
            f"{masked} cells are masked, but this model has no missing cells; fill them, or drop "
            "their rows or columns"
        )
    array = np.asarray(array)
    where = np.nonzero(array)
    return Part(np.stack(where, axis=1).astype(np.int64), array[where])


def _unnamed(shape: Sequence[int], parts: Callable[[], Iterator[Part]]) -> Entries:
    return Entries(tuple(int(side) for side in shape), parts, (None,) * len(shape))


def _dask(array: Any, scheduler: str | None = None) -> Entries:
    """A dask array of dense or sparse chunks, computed one chunk after another."""
    if any(np.isnan(side) for sides in array.chunks for side in sides):
        raise DataError(
            "the dask array has chunks of unknown size; call its compute_chunk_sizes() first"
        )
    starts = [np.cumsum((0, *sides[:-1])) for sides in array.chunks]

    def parts() -> Iterator[Part]:
        for place in np.ndindex(*array.numblocks):
            origin = [edges[index] for edges, index in zip(starts, place, strict=True)]
            found = part_of(array.blocks[place].compute(scheduler=scheduler))
            yield Part(found.indices + np.array(origin, np.int64), found.values)

    return _unnamed(array.shape, parts)


def _labelled(array: Any, wanted: Sequence[str]) -> Entries:
    if set(array.dims) == set(wanted):
        array = array.transpose(*wanted)
    elif moved := [
        d for d, own in zip(array.dims, wanted, strict=False) if d in wanted and d != own
    ]:
        raise DataError(
            f"the data have the dims {', '.join(map(str, array.dims))} and the model the observed "
            f"variables {', '.join(wanted)}, so {moved[0]!r} would be two things; rename the dims "
            "of the data to the model's, or to other names in the model's order"
        )
    labels = {
        str(dim): array.coords[dim].to_numpy()
        for dim in array.dims
        if dim in array.coords and array.indexes[dim].nlevels == 1
    }
    if not getattr(array.variable, "_in_memory", True) and array.chunks is None:
        array = array.chunk({})  # as the file has them
    return replace(
        open_entries(array.data, wanted), dims=tuple(map(str, array.dims)), labels=labels
    )


def _zarr(array: Any) -> Entries:
    import dask.array as da

    names = getattr(array.metadata, "dimension_names", None)
    names = names or array.attrs.get("_ARRAY_DIMENSIONS") or (None,) * array.ndim
    chunked = da.from_zarr(array)  # type: ignore[no-untyped-call]
    return replace(_dask(chunked, "threads"), dims=tuple(names))


def _at(location: str) -> Entries:
    """A blocked sparse store or a zarr array."""
    if is_blocked_store(location):
        store = BlockStore(location)
        return _matrix(from_blocks(store, store.read))
    return _zarr(zarr_array(location)[0])


def _matrix(source: Any) -> Entries:
    """Any other matrix, as the readers of `as_blocks` see it."""
    names = _names(source.labels)
    if not isinstance(source, SparseSource):
        whole = tuple(slice(0, side) for side in source.shape)
        return Entries(source.shape, lambda: iter([part_of(source.read(*whole))]), *names)
    if source.unstored == "missing":
        raise DataError(MISSING)

    def parts() -> Iterator[Part]:
        for piece in source.pieces(True, True):
            where = [np.asarray(side, np.int64) for side in (piece.rows, piece.cols)]
            yield Part(np.stack(where, axis=1), np.asarray(piece.values))

    return Entries(tuple(source.shape or ()), parts, *names)


def _blocked(data: BlockedData) -> Entries:
    if data.is_sparse:
        return _matrix(from_blocks(data, data.view))
    return Entries(data.shape, lambda: iter([part_of(data.to_numpy())]), *_names(data.labels))


def _names(labels: Labels) -> Names:
    """Names and labels of a matrix, if it has any of its own."""
    dims = (labels.row_dim, labels.col_dim)
    coords = dict(labels.row_coords) | dict(labels.col_coords)
    own = {dim: coords[dim] for dim in dims if dim in coords}
    return ((None, None) if dims == DEFAULT_DIMS and not own else dims), own
