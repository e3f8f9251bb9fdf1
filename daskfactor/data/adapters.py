"""Adapters: each kind of matrix in memory, or open in its library, seen as one `Source`.

Nothing is computed or copied here. Libraries that the caller has not imported
are not imported either: an object of theirs cannot have been passed.

A kind of input is added here alone: a function that makes its `Source`, and a line of `KINDS`.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from os import fspath
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.data.entries import (
    Piece,
    backed_pieces,
    canonical,
    compressed_pieces,
    summable,
)
from daskfactor.data.grid import Block, Chunks, expand_chunks
from daskfactor.data.known import (
    NAMED,
    NUMERIC,
    Known,
    Labels,
    SourceInfo,
    check_dtype,
    check_shape,
    matrix_shape,
    storable,
    stored_cells,
    usable_dims,
)
from daskfactor.data.store import zarr_kind
from daskfactor.errors import DataError, StoreError

FLOAT = np.dtype(np.float64)


@dataclass(frozen=True)
class Source:
    """Any input, as one pass over it sees it; sparse if it has `pieces`.

    Attributes
    ----------
    info
        What it is and where.
    shape
        (I, J); None if keys of rows and columns are names to be learnt.
    dtype
        Type of its values, where that is known.
    labels
        Labels of rows and columns, or, where they are learnt, the names of the dimensions.
    chunks
        Lengths of its chunks of rows and of columns, if it has any.
    read
        Of a dense source: gives the entries in some rows and columns.
    array
        Of a dense source that is in memory: the array itself.
    pieces
        Of a sparse source: starts a stream of its entries, the same in the same order each
        time: ``pieces(values, add)``. Without ``values`` only keys are needed; without ``add``
        a matrix refuses entries that name a cell again rather than adding them up.
    matrix
        Of a sparse source in memory: called with ``add``, all of it, compressed, no cell twice.
    entries
        How many entries a sparse source has, if that is known before they are read.
    unstored
        What a sparse source itself says about entries that it does not store.
    """

    info: SourceInfo
    shape: tuple[int, int] | None = None
    dtype: np.dtype[Any] = FLOAT
    labels: Labels = field(default_factory=Labels)
    chunks: Chunks | None = None
    read: Callable[[slice, slice], Any] | None = None
    array: NDArray[Any] | None = None
    pieces: Callable[[bool, bool], Iterator[Piece]] | None = None
    matrix: Callable[[bool], Any] | None = None
    entries: int | None = None
    unstored: str | None = None

    @property
    def is_sparse(self) -> bool:
        """Whether it is read as entries with their places."""
        return self.pieces is not None

    @property
    def where(self) -> str:
        """How a message calls it."""
        return self.info.location or f"the {self.info.kind} input"


def open_source(data: Any) -> Source:
    """The adapter for whatever the caller passed."""
    for module, name, adapter in KINDS:
        # A module may be the user's own, under the name of a library.
        if isinstance(data, getattr(sys.modules.get(module), name, ())):
            return adapter(data)
    hint = "; of a Dataset, pass one variable" if type(data).__name__ == "Dataset" else ""
    raise DataError(
        f"data of type {type(data).__name__} cannot be read; pass a NumPy array, a masked array, a "
        "scipy or pydata/sparse matrix, a dask array, a zarr array or the path of one, a blocked "
        f"store, an AnnData object, an xarray.DataArray or a pandas.DataFrame{hint}"
    )


def from_numpy(array: NDArray[Any]) -> Source:
    """A NumPy array or masked array; masked entries are missing."""
    return Source(
        SourceInfo("numpy"),
        matrix_shape(array.shape),
        check_dtype(array.dtype),
        read=lambda rows, cols: array[rows, cols],
        array=None if isinstance(array, np.ma.MaskedArray) else np.asarray(array),
    )


def from_scipy(matrix: Any) -> Source:
    """A scipy sparse matrix or array of any format."""
    return _in_memory("scipy", matrix, lambda: matrix)


def from_pydata(array: Any) -> Source:
    """A two-dimensional array of the sparse package: COO, GCXS or DOK."""
    source = _in_memory("sparse", array, lambda: _scipy_of(array))
    return replace(source, unstored=meaning_of_fill(array.fill_value))


def from_dask(array: Any) -> Source:
    """A dask array of NumPy or sparse chunks, computed part by part while the pass goes on.

    The scheduler is the one that is configured (or the current cluster), by
    default dask's threads.
    """
    if any(np.isnan(size) for sizes in array.chunks for size in sizes):
        raise DataError(
            "the dask array has chunks of unknown size; call its compute_chunk_sizes() first"
        )
    shape = matrix_shape(array.shape)
    rows, cols = (tuple(int(size) for size in sizes if size) for sizes in array.chunks)
    source = Source(
        SourceInfo("dask", lazy=True), shape, check_dtype(array.dtype), chunks=(rows, cols)
    )
    if not (is_scipy_sparse(array._meta) or is_pydata_sparse(array._meta)):
        return replace(source, read=lambda rows, cols: array[rows, cols].compute())
    fill = meaning_of_fill(array._meta.fill_value) if is_pydata_sparse(array._meta) else None
    return replace(source, pieces=lambda values, add: _dask_pieces(array, fill, add), unstored=fill)


def from_chunked(array: Any, kind: str, location: str | None = None) -> Source:
    """An array in a file that gives regions: of zarr, or a dataset of HDF5 that is open."""
    shape = matrix_shape(array.shape)
    return Source(
        SourceInfo(kind, location, lazy=True),
        shape,
        check_dtype(array.dtype),
        chunks=None if array.chunks is None else expand_chunks(shape, array.chunks),
        read=lambda rows, cols: array[rows, cols],
    )


def from_zarr(array: Any, location: str | None = None) -> Source:
    """A zarr array; chunks that its store does not hold have its fill value."""
    stored_at = str(array.store_path)
    if location is None and stored_at.startswith("file://"):
        location = stored_at.removeprefix("file://")
    source = from_chunked(array, "zarr", location)
    names = getattr(array.metadata, "dimension_names", None)
    names = names or array.attrs.get("_ARRAY_DIMENSIONS") or (None, None)
    return replace(source, labels=Labels(*usable_dims(*names)))


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


def from_xarray(array: Any) -> Source:
    """A DataArray backed by NumPy, sparse or dask, or by a file that xarray reads lazily."""
    shape = matrix_shape(array.shape)
    row_dim, col_dim = array.dims
    if is_pydata_sparse(getattr(array.variable, "_data", None)) or array.chunks is not None:
        source = open_source(array.data)
    elif getattr(array.variable, "_in_memory", True):
        source = from_numpy(np.asanyarray(array.data))
    else:
        preferred = array.encoding.get("preferred_chunks", {})
        sizes = [preferred.get(dim, size) for dim, size in zip(array.dims, shape, strict=True)]
        regular = preferred and all(isinstance(size, int) for size in sizes)
        source = Source(
            SourceInfo("xarray", lazy=True),
            shape,
            check_dtype(array.dtype),
            chunks=expand_chunks(shape, sizes) if regular else None,
            read=lambda rows, cols: array.isel({row_dim: rows, col_dim: cols}).to_numpy(),
        )
    coords: dict[Any, dict[str, NDArray[Any]]] = {row_dim: {}, col_dim: {}}
    for key, coord in array.coords.items():
        levels = getattr(array.indexes.get(key), "nlevels", 1)
        # The tuples of a MultiIndex cannot be stored; its levels are coordinates of their own.
        if len(coord.dims) == 1 and not (key in array.dims and levels > 1):
            coords[coord.dims[0]][str(key)] = storable(str(key), coord.to_numpy())
    name = None if array.name is None else str(array.name)
    labels = Labels(str(row_dim), str(col_dim), coords[row_dim], coords[col_dim], name)
    return replace(source, labels=labels, info=replace(source.info, kind="xarray"))


def from_pandas(frame: Any) -> Source:
    """A DataFrame of numbers; its index and columns become labels."""
    matrix_shape(frame.shape)
    wrong = [str(name) for name, dtype in frame.dtypes.items() if dtype.kind not in NUMERIC]
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


def from_anndata(annotated: Any) -> Source:
    """The matrix X of an AnnData object; names of observations and variables become labels."""
    if annotated.X is None:
        raise DataError(
            "the AnnData object has no X; set it, or pass one of its layers: adata.layers[name]"
        )
    source = open_source(annotated.X)
    obs, var = annotated.obs_names.to_numpy(), annotated.var_names.to_numpy()
    labels = Labels("obs", "var", {"obs": obs}, {"var": var})
    return replace(source, labels=labels, info=replace(source.info, kind="anndata"))


def from_backed(dataset: Any) -> Source:
    """A sparse dataset of AnnData that is left in its file: read a few rows at a time."""
    shape = matrix_shape(dataset.shape)
    return Source(
        SourceInfo("anndata", lazy=True),
        shape,
        check_dtype(dataset.dtype),
        pieces=lambda values, add: backed_pieces(dataset, shape, add),
    )


def from_blocks(known: Known, view: Callable[[int, int], Any]) -> Source:
    """The entries of a blocked store, or of sparse `BlockedData`, in the caller's order."""
    grid, layout = known.grid, known.layout

    def pieces(values: bool, add: bool) -> Iterator[Piece]:
        for block in grid.all_blocks():
            found = view(*block)
            rows, cols = (part.start for part in grid.slices(Block(*block)))
            row, col = stored_cells(found)
            row, col = layout.callers(row + rows, col + np.int64(cols))
            yield Piece(row, col, found.values.copy() if values else None)

    stored = known.statistics.n_stored
    assert stored is not None
    return Source(
        SourceInfo("blocks", known.source.location, lazy=True),
        grid.shape,
        labels=known.labels,
        chunks=(grid.rows.sizes, grid.cols.sizes) if layout.row_order is None else None,
        pieces=pieces,
        entries=int(stored.sum()),
        unstored=layout.unstored,
    )


KINDS: tuple[tuple[str, str, Callable[[Any], Source]], ...] = (
    ("scipy.sparse", "spmatrix", from_scipy),
    ("scipy.sparse", "sparray", from_scipy),
    ("sparse", "SparseArray", from_pydata),
    ("numpy", "ndarray", from_numpy),
    ("builtins", "str", lambda place: from_zarr(*zarr_array(place))),
    ("os", "PathLike", lambda place: from_zarr(*zarr_array(fspath(place)))),
    ("dask.array", "Array", from_dask),
    ("zarr", "Array", from_zarr),
    ("xarray", "DataArray", from_xarray),
    ("pandas", "DataFrame", from_pandas),
    ("anndata", "AnnData", from_anndata),
    ("anndata.abc", "CSRDataset", from_backed),
    ("anndata.abc", "CSCDataset", from_backed),
    ("h5py", "Dataset", lambda dataset: from_chunked(dataset, "hdf5")),
)
"""What `open_source` reads: module and name of a class, and what makes a `Source` of it."""


def is_pydata_sparse(data: object) -> bool:
    """Whether an object is an array of the sparse package."""
    return isinstance(data, getattr(sys.modules.get("sparse"), "SparseArray", ()))


def is_scipy_sparse(data: object) -> bool:
    """Whether an object is a sparse matrix or array of scipy."""
    return bool(sparse.issparse(data))


def meaning_of_fill(fill: Any) -> str:
    """What an array with this fill value says about entries that it does not store."""
    if fill == 0:
        return "zero"
    if np.isnan(fill):
        return "missing"
    raise DataError(
        f"the sparse array has fill_value {fill}; it must be 0 (entries that are not stored are "
        "zeros) or NaN (they are missing); make a new array with one of these"
    )


def _in_memory(kind: str, matrix: Any, as_scipy: Callable[[], Any]) -> Source:
    return Source(
        SourceInfo(kind),
        matrix_shape(matrix.shape),
        check_dtype(matrix.dtype),
        pieces=lambda values, add: compressed_pieces(canonical(as_scipy(), add)),
        matrix=lambda add: canonical(as_scipy(), add),
    )


def _dask_pieces(array: Any, fill: str | None, add: bool) -> Iterator[Piece]:
    origins = [np.concatenate([[0], np.cumsum(side)]).astype(int) for side in array.chunks]
    for i, j in np.ndindex(*array.numblocks):
        row0, col0 = int(origins[0][i]), int(origins[1][j])
        shape = int(array.chunks[0][i]), int(array.chunks[1][j])
        if 0 in shape:
            continue
        chunk = array.blocks[i, j].compute()
        check_shape(chunk, shape, row0, col0)
        if is_pydata_sparse(chunk):
            if meaning_of_fill(chunk.fill_value) != fill:
                raise DataError(
                    f"a chunk of the dask array has fill_value {chunk.fill_value}, unlike the "
                    "array itself; give all chunks one fill_value"
                )
            chunk = _scipy_of(chunk)
        elif not sparse.issparse(chunk):  # operations on sparse chunks may give dense ones
            rows, cols = np.indices(shape).reshape(2, -1)
            pairs = (rows, cols)
            chunk = sparse.coo_array((np.asarray(chunk).ravel(), pairs), shape=shape)
        yield from compressed_pieces(canonical(chunk, add), row0, col0)


def _scipy_of(array: Any) -> Any:
    """An array of the sparse package as coordinates; what it does not store is left open."""
    coo = array if type(array).__name__ == "COO" else array.asformat("coo")
    values = summable(coo.data) if coo.data.dtype == np.float16 else coo.data
    return sparse.coo_array((values, tuple(coo.coords)), shape=coo.shape)


def _axis_coords(dim: str, index: Any) -> dict[str, NDArray[Any]]:
    """Labels of a pandas axis; a plain numbering is no label."""
    if index.nlevels > 1:
        names = [f"{dim}_{n}" if name is None else str(name) for n, name in enumerate(index.names)]
        levels = [index.get_level_values(n).to_numpy() for n in range(index.nlevels)]
        return {name: storable(name, level) for name, level in zip(names, levels, strict=True)}
    counted = type(index).__name__ == "RangeIndex" and index.name is None
    return {} if counted else {dim: storable(dim, index.to_numpy())}
