"""Counts of tokens: the data of an `AllocationModel`, whatever they come in."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.adapters import open_source, zarr_array
from daskfactor.data.blocks import BlockedData
from daskfactor.data.labels import DEFAULT_DIMS
from daskfactor.data.sparse_source import (
    SparseSource,
    from_blocks,
    is_pydata_sparse,
    is_scipy_sparse,
    meaning_of_fill,
)
from daskfactor.data.store import BlockStore, is_blocked_store
from daskfactor.errors import DataError, OptionError
from daskfactor.models.allocation import AllocationModel
from daskfactor.random import Stream, generator

LARGEST_TOTAL = 2**63 - 1
MISSING = (
    "entries that the input does not store are missing (its fill_value is NaN, or it was made with "
    'unstored="missing"), but this model has no missing cells; make it anew with zeros there'
)

Part = tuple[NDArray[np.int64], NDArray[Any]]
"""Some entries: where they are, (M, D), and their values, (M,)."""


@dataclass(frozen=True, eq=False)
class Counts:
    """The cells of a tensor that hold tokens, in row-major order.

    Attributes
    ----------
    indices : array (M, D) of int64
        Where they are, each cell once.
    values : array (M,) of int64
        Tokens in each of them, at least 1.
    shape
        Sizes of the tensor, one for each observed variable of the model.
    dims
        Names of its dimensions: the data's own, or else the model's.
    labels
        Labels along dims, for those that have any.

    Notes
    -----
    Memory is D + 1 numbers for each cell that holds a token; the shape costs nothing.
    """

    indices: NDArray[np.int64]
    values: NDArray[np.int64]
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    labels: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of tokens T."""
        return int(self.values.sum())

    def thinned(self, share: float, seed: int) -> "Counts":
        r"""Counts of which each token is kept with probability p.

        .. math:: X'(i_V) \sim \mathrm{Binomial}(X(i_V), p)

        They follow the model with :meth:`AllocationModel.with_thinning`. The same seed
        keeps the same tokens of the same counts.

        Raises
        ------
        OptionError
            If the share is not in (0, 1].
        DataError
            If no token is left.
        """
        if not 0.0 < share <= 1.0:
            raise OptionError(f"the share of tokens to keep must be in (0, 1], got {share!r}")
        kept = generator(seed, 0, Stream.THINNING).binomial(self.values, share)
        held = kept > 0
        if not held.any():
            raise DataError(
                f"thinning by {share:g} leaves none of the {self.total} tokens; keep more of them"
            )
        return replace(self, indices=self.indices[held], values=kept[held].astype(np.int64))


class _Tensor(NamedTuple):
    """A tensor as a stream of its entries that are not zero, each once.

    ``dims`` names its dimensions, None where there is no name; ``labels`` go by these names.
    """

    shape: tuple[int, ...]
    parts: Callable[[], Iterator[Part]]
    dims: tuple[str | None, ...]
    labels: Mapping[str, NDArray[Any]] = {}


def as_counts(X: Any, model: AllocationModel) -> Counts:
    """Read the counts of a model from data of any kind.

    Parameters
    ----------
    X
        Whole numbers of at least 0 with one dimension for each observed variable of the
        model: a NumPy array; scipy sparse matrix or array (duplicates are summed); array
        of the sparse package; dask array of any of these, read chunk by chunk;
        xarray.DataArray (its dims are matched by name if they are the model's variables,
        else by their order; labels are kept); zarr array or path or URL of one; path of a
        blocked sparse store; AnnData object or pandas.DataFrame; `BlockedData`; or
        `Counts`, which are returned as they are.
    model
        Says how many dimensions there are, and perhaps their sizes.

    Raises
    ------
    DataError
        If an entry is negative, a fraction, missing or infinite (it names the first), if
        there is no token at all, or more than an int64 can hold.
    ModelError
        If the model does not fit the shape.
    """
    if isinstance(X, Counts):
        model.check_shape(X.shape)
        return X
    source = _open(X, model.dims)
    model.check_shape(source.shape)
    dims = _usable(source.dims, model)
    nothing = np.zeros((0, len(source.shape)), np.int64), np.zeros(0, np.int64)
    parts = [nothing, *(_checked(*part, dims, source) for part in source.parts())]
    indices, values = (np.concatenate(own) for own in zip(*parts, strict=True))
    order = np.lexsort(indices.T[::-1])
    _check_total(values)
    labels = {
        dim: source.labels[own]
        for dim, own in zip(dims, source.dims, strict=True)
        if own is not None and own in source.labels
    }
    return Counts(indices[order], values[order], source.shape, dims, labels)


def _usable(given: tuple[str | None, ...], model: AllocationModel) -> tuple[str, ...]:
    """Take the data's names of dims, or the model's where they would clash with other names."""
    names = [own or name for own, name in zip(given, model.dims, strict=True)]
    if len(set(names)) < len(names) or set(model.hidden) & set(names):
        return model.dims
    return tuple(names)


def _checked(
    indices: NDArray[np.int64], values: NDArray[Any], dims: tuple[str, ...], source: _Tensor
) -> Part:
    """Take the entries that hold tokens, as whole numbers."""
    if values.dtype.kind not in "biuf":
        raise DataError(
            f"the counts have dtype {values.dtype}; they must be whole numbers of at least 0, so "
            "convert them, for example with .astype('int64')"
        )
    wrong = values < 0
    if values.dtype.kind == "f":
        values = values.astype(np.promote_types(values.dtype, np.float64), copy=False)
        wrong |= ~np.isfinite(values) | (values != np.floor(values)) | (values >= 2.0**63)
    elif values.dtype.kind == "u":
        wrong |= values > np.uint64(LARGEST_TOTAL)
    if wrong.any():
        places = np.flatnonzero(wrong)
        first = places[np.lexsort(indices[places].T[::-1])[0]]
        raise _refusal(indices[first], values[first], dims, source)
    held = values != 0
    return indices[held], values[held].astype(np.int64)


def _refusal(
    cell: NDArray[np.int64], value: Any, dims: tuple[str, ...], source: _Tensor
) -> DataError:
    """Name a cell whose value is no count, and say what to do."""
    told = []
    for dim, own, index in zip(dims, source.dims, cell, strict=True):
        label = source.labels.get(own or "")
        told.append(f"{dim} {index}" + ("" if label is None else f" ({label[index]!s})"))
    if value < 0:
        advice = "a count cannot be negative"
    elif np.isnan(value):
        advice = "this model has no missing cells; fill them, or drop their rows or columns"
    elif not np.isfinite(value):
        advice = "a count must be finite"
    elif value >= 2**63:
        advice = "it must be below 2**63"
    else:
        advice = "counts are whole numbers; rescale and round the data if they stand for counts"
    return DataError(f"the count at {', '.join(told)} is {value}; {advice}")


def _check_total(values: NDArray[np.int64]) -> None:
    low, high = values & 0xFFFFFFFF, values >> 32
    total = (int(high.sum()) << 32) + int(low.sum())
    if total > LARGEST_TOTAL:
        raise DataError(
            f"the counts sum to {total}, more than 2**63 - 1; rescale them, or thin them first"
        )
    if not total:
        raise DataError("the data hold no tokens: every count is 0; pass at least one count above")


def _open(data: Any, wanted: Sequence[str]) -> _Tensor:
    """Open data of any kind; a DataArray's dims go as ``wanted`` if it has these.

    Raises
    ------
    DataError
        If there is no way to read it.
    """
    if isinstance(data, BlockedData):
        return _matrix(from_blocks(data, data.view) if data.is_sparse else data)
    if isinstance(data, str | PathLike):
        return _at(fspath(data))
    doors: list[tuple[str, str, Callable[[Any], _Tensor]]] = [
        ("xarray", "DataArray", lambda array: _labelled(array, wanted)),
        ("dask.array", "Array", _dask),
        ("zarr", "Array", _zarr),
    ]
    for module, name, opened in doors:
        if module in sys.modules and isinstance(data, getattr(sys.modules[module], name)):
            return opened(data)
    if isinstance(data, np.ndarray) or is_pydata_sparse(data):
        return _unnamed(data.shape, lambda: iter([_part_of(data)]))
    if is_scipy_sparse(data) and len(data.shape) != 2:
        return _unnamed(data.shape, lambda: iter([_part_of(data)]))
    return _matrix(open_source(data))


def _part_of(array: Any) -> Part:
    """Take the entries of an array in memory that are not zero."""
    if is_pydata_sparse(array):
        if meaning_of_fill(array.fill_value) == "missing":
            raise DataError(MISSING)
        array = array if type(array).__name__ == "COO" else array.asformat("coo")
        return (array.coords.T.astype(np.int64), array.data)
    if is_scipy_sparse(array):
        array = array.tocoo(copy=True)
        array.sum_duplicates()
        return (np.stack(array.coords, axis=1).astype(np.int64), array.data)
    if masked := int(np.count_nonzero(np.ma.getmask(array))):
        raise DataError(
            f"{masked} cells are masked, but this model has no missing cells; fill them, or drop "
            "their rows or columns"
        )
    array = np.asarray(array)
    where = np.nonzero(array)
    return (np.stack(where, axis=1).astype(np.int64), array[where])


def _unnamed(shape: Sequence[int], parts: Callable[[], Iterator[Part]]) -> _Tensor:
    return _Tensor(tuple(int(side) for side in shape), parts, (None,) * len(shape))


def _dask(array: Any, scheduler: str | None = None) -> _Tensor:
    """Open a dask array of dense or sparse chunks, computed one chunk after another."""
    if any(np.isnan(side) for sides in array.chunks for side in sides):
        raise DataError(
            "the dask array has chunks of unknown size; call its compute_chunk_sizes() first"
        )
    starts = [np.cumsum((0, *sides[:-1])) for sides in array.chunks]

    def parts() -> Iterator[Part]:
        for place in np.ndindex(*array.numblocks):
            origin = [edges[index] for edges, index in zip(starts, place, strict=True)]
            where, values = _part_of(array.blocks[place].compute(scheduler=scheduler))
            yield where + np.array(origin, np.int64), values

    return _unnamed(array.shape, parts)


def _labelled(array: Any, wanted: Sequence[str]) -> _Tensor:
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
    opened = _open(array.data, wanted)
    return opened._replace(dims=tuple(map(str, array.dims)), labels=labels)


def _zarr(array: Any) -> _Tensor:
    import dask.array as da

    names = getattr(array.metadata, "dimension_names", None)
    names = names or array.attrs.get("_ARRAY_DIMENSIONS") or (None,) * array.ndim
    chunked = da.from_zarr(array)  # type: ignore[no-untyped-call]
    return _dask(chunked, "threads")._replace(dims=tuple(names))


def _at(location: str) -> _Tensor:
    """Open a blocked sparse store or a zarr array."""
    if is_blocked_store(location):
        store = BlockStore(location)
        return _matrix(from_blocks(store, store.read))
    return _zarr(zarr_array(location)[0])


def _matrix(data: Any) -> _Tensor:
    """Open a matrix as the readers of `as_blocks` see it, or a dense one on its grid."""
    dims = (data.labels.row_dim, data.labels.col_dim)
    coords = dict(data.labels.row_coords) | dict(data.labels.col_coords)
    labels = {dim: coords[dim] for dim in dims if dim in coords}
    names = (None, None) if dims == DEFAULT_DIMS and not labels else dims
    if isinstance(data, BlockedData):
        return _Tensor(data.shape, lambda: iter([_part_of(data.to_numpy())]), names, labels)
    if not isinstance(data, SparseSource):
        whole = tuple(slice(0, side) for side in data.shape)
        return _Tensor(data.shape, lambda: iter([_part_of(data.read(*whole))]), names, labels)
    if data.unstored == "missing":
        raise DataError(MISSING)

    def parts() -> Iterator[Part]:
        for piece in data.pieces(True, True):
            where = [np.asarray(side, np.int64) for side in (piece.rows, piece.cols)]
            yield np.stack(where, axis=1), np.asarray(piece.values)

    return _Tensor(tuple(data.shape or ()), parts, names, labels)
