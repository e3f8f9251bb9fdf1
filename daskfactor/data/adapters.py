"""Adapters: each kind of input seen as one `Source` that can be read by region.

Nothing is computed or copied here. Libraries that the caller has not imported
are not imported either: an object of theirs cannot have been passed.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.decode import KINDS, check_dtype, matrix_shape
from daskfactor.data.grid import Chunks, expand_chunks
from daskfactor.data.labels import Labels, SourceInfo, storable, usable_dims
from daskfactor.data.sparse_source import (
    SparseSource,
    from_backed,
    from_pydata,
    from_scipy,
    from_sparse_dask,
    is_pydata_sparse,
    is_scipy_sparse,
    is_sparse,
)
from daskfactor.data.statistics import NAMED
from daskfactor.data.store import zarr_kind
from daskfactor.errors import DataError, StoreError


@dataclass(frozen=True)
class Source:
    """A matrix that can be read by region; ``array`` is set if it is in memory as one."""

    shape: tuple[int, int]
    dtype: np.dtype[Any]
    labels: Labels
    info: SourceInfo
    read: Callable[[slice, slice], Any]
    chunks: Chunks | None = None
    array: NDArray[Any] | None = None


def open_source(data: Any) -> Source | SparseSource:
    """The adapter for whatever the caller passed."""
    if is_scipy_sparse(data):
        return from_scipy(data)
    if is_pydata_sparse(data):
        return from_pydata(data)
    if isinstance(data, np.ndarray):
        return from_numpy(data)
    if isinstance(data, str | PathLike):
        return open_zarr(fspath(data))
    for module, name, adapter in (
        ("dask.array", "Array", from_dask),
        ("zarr", "Array", from_zarr),
        ("xarray", "DataArray", from_xarray),
        ("pandas", "DataFrame", from_pandas),
        ("anndata", "AnnData", from_anndata),
    ):
        if module in sys.modules and isinstance(data, getattr(sys.modules[module], name)):
            return adapter(data)
    hint = "; of a Dataset, pass one variable" if type(data).__name__ == "Dataset" else ""
    raise DataError(
        f"data of type {type(data).__name__} cannot be read; pass a NumPy array, a masked array, a "
        "scipy or pydata/sparse matrix, a dask array, a zarr array or the path of one, a blocked "
        f"store, an AnnData object, an xarray.DataArray or a pandas.DataFrame{hint}"
    )


def from_numpy(array: NDArray[Any]) -> Source:
    """A NumPy array or masked array; masked entries are missing."""
    shape = matrix_shape(array.shape)
    check_dtype(array.dtype)
    return Source(
        shape,
        array.dtype,
        Labels(),
        SourceInfo("numpy"),
        lambda rows, cols: array[rows, cols],
        array=None if isinstance(array, np.ma.MaskedArray) else np.asarray(array),
    )


def from_dask(array: Any) -> Source | SparseSource:
    """A dask array of NumPy or sparse chunks, computed region by region while the pass goes on.

    The scheduler is the one that is configured (or the current cluster), by
    default dask's threads.
    """
    if any(np.isnan(size) for sizes in array.chunks for size in sizes):
        raise DataError(
            "the dask array has chunks of unknown size; call its compute_chunk_sizes() first"
        )
    shape = matrix_shape(array.shape)
    check_dtype(array.dtype)
    if is_sparse(array._meta):
        return from_sparse_dask(array, shape)
    rows, cols = (tuple(int(size) for size in sizes if size) for sizes in array.chunks)
    return Source(
        shape,
        array.dtype,
        Labels(),
        SourceInfo("dask", lazy=True),
        lambda rows, cols: array[rows, cols].compute(),
        (rows, cols),
    )


def from_zarr(array: Any, location: str | None = None) -> Source:
    """A zarr array; chunks that its store does not hold have its fill value."""
    shape = matrix_shape(array.shape)
    check_dtype(array.dtype)
    stored_at = str(array.store_path)
    if location is None and stored_at.startswith("file://"):
        location = stored_at.removeprefix("file://")
    return Source(
        shape,
        array.dtype,
        Labels(*usable_dims(*_zarr_dims(array))),
        SourceInfo("zarr", location, lazy=True),
        lambda rows, cols: array[rows, cols],
        expand_chunks(shape, array.chunks),
    )


def open_zarr(location: str) -> Source:
    """The zarr array at a path or URL."""
    array, place = zarr_array(location)
    return from_zarr(array, place)


def zarr_array(location: str) -> tuple[Any, str]:
    """The zarr array at a path or URL, and its place, written out in full."""
    import zarr

    if "://" not in location:
        location = str(Path(location).expanduser().absolute())
    try:
        found = zarr.open(store=location, mode="r")
    except Exception as error:
        raise StoreError(
            f"no zarr array can be opened at {location} ({type(error).__name__}: {error}); pass "
            "the path or URL of an array or a blocked store that exists and can be read"
        ) from error
    if isinstance(found, zarr.Array):
        return found, location
    if zarr_kind(location) == "run":
        raise DataError(
            f"{location} is a run of daskfactor, not data: read its results with open_run, or go "
            "on with it by resume; pass the data that it was made from"
        )
    inside = ", ".join(sorted(name for name, _ in found.arrays())) or "none"
    raise DataError(
        f"{location} is a zarr group, not an array; pass the path of one of its arrays ({inside})"
    )


def from_xarray(array: Any) -> Source | SparseSource:
    """A DataArray backed by NumPy, sparse or dask, or by a file that xarray reads lazily."""
    shape = matrix_shape(array.shape)
    labels = _xarray_labels(array)
    source: Source | SparseSource
    if is_pydata_sparse(getattr(array.variable, "_data", None)):
        source = from_pydata(array.data)
    elif array.chunks is not None:
        source = from_dask(array.data)
    elif getattr(array.variable, "_in_memory", True):
        source = from_numpy(np.asanyarray(array.data))
    else:
        check_dtype(array.dtype)
        row_dim, col_dim = array.dims
        source = Source(
            shape,
            array.dtype,
            labels,
            SourceInfo("xarray", lazy=True),
            lambda rows, cols: array.isel({row_dim: rows, col_dim: cols}).to_numpy(),
            _preferred_chunks(array),
        )
    return replace(source, labels=labels, info=replace(source.info, kind="xarray"))


def from_pandas(frame: Any) -> Source:
    """A DataFrame of numbers; its index and columns become labels."""
    matrix_shape(frame.shape)
    wrong = [str(name) for name, dtype in frame.dtypes.items() if dtype.kind not in KINDS]
    if wrong:
        raise DataError(
            f"{len(wrong)} columns of the DataFrame are not numbers: {', '.join(wrong[:NAMED])}; "
            "drop them, convert them, or make them the index with set_index"
        )
    kinds = set(frame.dtypes)
    plain = len(kinds) == 1 and all(isinstance(dtype, np.dtype) for dtype in kinds)
    source = from_numpy(frame.to_numpy() if plain else frame.to_numpy("f8", na_value=np.nan))
    row_dim, col_dim = usable_dims(frame.index.name, frame.columns.name)
    labels = Labels(
        row_dim, col_dim, _axis_coords(row_dim, frame.index), _axis_coords(col_dim, frame.columns)
    )
    return replace(source, labels=labels, info=SourceInfo("pandas"))


def from_anndata(annotated: Any) -> Source | SparseSource:
    """The matrix X of an AnnData object; names of observations and variables become labels."""
    matrix = annotated.X
    source: Source | SparseSource
    if matrix is None:
        raise DataError(
            "the AnnData object has no X; set it, or pass one of its layers: adata.layers[name]"
        )
    if hasattr(matrix, "backend"):
        source = from_backed(matrix)
    elif "h5py" in sys.modules and isinstance(matrix, sys.modules["h5py"].Dataset):
        source = from_file(matrix)
    else:
        source = open_source(matrix)
    obs, var = annotated.obs_names.to_numpy(), annotated.var_names.to_numpy()
    labels = Labels("obs", "var", {"obs": obs}, {"var": var})
    return replace(source, labels=labels, info=replace(source.info, kind="anndata"))


def from_file(dataset: Any) -> Source:
    """A dense two-dimensional dataset of an HDF5 file that is open."""
    shape = matrix_shape(dataset.shape)
    check_dtype(dataset.dtype)
    chunks = None if dataset.chunks is None else expand_chunks(shape, dataset.chunks)
    return Source(
        shape,
        dataset.dtype,
        Labels(),
        SourceInfo("hdf5", lazy=True),
        lambda rows, cols: dataset[rows, cols],
        chunks,
    )


def _zarr_dims(array: Any) -> tuple[object, object]:
    names = getattr(array.metadata, "dimension_names", None)
    names = names or array.attrs.get("_ARRAY_DIMENSIONS") or (None, None)
    return names[0], names[1]


def _xarray_labels(array: Any) -> Labels:
    row_dim, col_dim = array.dims
    found: dict[Any, dict[str, NDArray[Any]]] = {row_dim: {}, col_dim: {}}
    for key, coord in array.coords.items():
        levels = getattr(array.indexes.get(key), "nlevels", 1)
        # The tuples of a MultiIndex cannot be stored; its levels are coordinates of their own.
        if len(coord.dims) == 1 and not (key in array.dims and levels > 1):
            found[coord.dims[0]][str(key)] = storable(str(key), coord.to_numpy())
    name = None if array.name is None else str(array.name)
    return Labels(str(row_dim), str(col_dim), found[row_dim], found[col_dim], name)


def _preferred_chunks(array: Any) -> Chunks | None:
    """The chunks of the file behind a lazy DataArray, if it has regular ones."""
    preferred = array.encoding.get("preferred_chunks", {})
    sizes = [preferred.get(dim, size) for dim, size in zip(array.dims, array.shape, strict=True)]
    if not preferred or not all(isinstance(size, int) for size in sizes):
        return None
    return expand_chunks(array.shape, sizes)


def _axis_coords(dim: str, index: Any) -> dict[str, NDArray[Any]]:
    """Labels of a pandas axis; a plain numbering is no label."""
    if index.nlevels > 1:
        names = [f"{dim}_{n}" if name is None else str(name) for n, name in enumerate(index.names)]
        levels = [index.get_level_values(n).to_numpy() for n in range(index.nlevels)]
        return {name: storable(name, level) for name, level in zip(names, levels, strict=True)}
    counted = type(index).__name__ == "RangeIndex" and index.name is None
    return {} if counted else {dim: storable(dim, index.to_numpy())}
