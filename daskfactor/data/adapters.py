"""Adapters: one `Source` for each kind of matrix, in memory or open in its library.

Nothing is computed or copied here. Libraries that the caller has not imported are not imported
either: an object of theirs cannot have been passed.

To add a kind of matrix, write a function that returns its `Source`, and add a line to `MATRICES`.
"""

import base64
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.checks import warn
from daskfactor.data.annotated import Annotated, Compressed, compressed
from daskfactor.data.coo import (
    DENSE_PART,
    MIN_LINES,
    Piece,
    canonical,
    check_pointers,
    compressed_pieces,
    summable,
)
from daskfactor.data.grid import Block, Chunks, expand_chunks
from daskfactor.data.labels import NAMED, Labels, Stack, cf_attrs, free_name, storable, usable_dims
from daskfactor.data.statistics import (
    NUMERIC,
    DataInfo,
    SourceInfo,
    check_dtype,
    check_shape,
    countable,
    matrix_shape,
    stored_cells,
)
from daskfactor.errors import DataError, DataWarning
from daskfactor.urls import Location

FLOAT = np.dtype(np.float64)
PACKING = frozenset({"scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned"})
"""Attributes by which netCDF and similar formats mark packed values."""
SCALING = frozenset({"scale_factor", "add_offset"})


@dataclass(frozen=True)
class Source:
    """Input of any kind, as the pass over it sees it; sparse if it has `pieces`.

    Attributes
    ----------
    info
        Kind and location.
    shape
        (I, J); None if keys of rows and columns are names that the pass collects.
    dtype
        Type of its values, if known in advance.
    labels
        Labels of rows and columns. If the pass collects them: names of the dimensions, with an
        empty coordinate for labels that are text in the pieces and times for the caller.
    chunks
        Lengths of its chunks of rows and of columns, if any.
    steps
        Lengths of rows and columns to read at once, if a scratch copy has other chunks.
    read
        Function that returns the entries in some rows and columns, for a dense source.
    array
        The array, for a dense source in memory.
    pieces
        Function ``pieces(add)`` that starts a stream of the entries of a sparse source, the same
        in the same order each time. With ``add`` entries of one cell are added up, without it a
        matrix in memory refuses them.
    matrix
        Function ``matrix(add)`` that returns all entries of a sparse source in memory as
        compressed rows or columns without duplicates.
    entries
        Number of entries of a sparse source, if known before they are read.
    unstored
        Meaning of unstored entries according to the sparse source itself.
    usual
        Default meaning of unstored entries, if neither source nor caller define it.
    stacking
        `Stacking` of an array with stacked dimensions, which the source was made from.
    store
        `BlockStore` that it was opened from, whose blocks may be used unchanged.
    merges
        True if several entries may name one cell, as lines of tables may: they are added up if
        unstored entries are zero; otherwise the last one is used.
    """

    info: SourceInfo
    shape: tuple[int, int] | None = None
    dtype: np.dtype[Any] = FLOAT
    labels: Labels = field(default_factory=Labels)
    chunks: Chunks | None = None
    read: Callable[[slice, slice], Any] | None = None
    array: NDArray[Any] | None = None
    pieces: Callable[[bool], Iterator[Piece]] | None = None
    matrix: Callable[[bool], Any] | None = None
    entries: int | None = None
    unstored: str | None = None
    usual: str = "zero"
    stacking: Any = None
    merges: bool = False
    steps: Chunks | None = None
    store: Any = None

    def __post_init__(self) -> None:
        """Refuse more rows and columns than there is memory to count entries for."""
        if self.shape is not None:
            countable(self.shape)

    @property
    def is_sparse(self) -> bool:
        """Return whether the source is read as entries with their positions."""
        return self.pieces is not None

    @property
    def where(self) -> str:
        """Return the location, or else the kind of input, for messages."""
        return self.info.location or f"the {self.info.kind} input"


class Kind(NamedTuple):
    """Type of input: module and name of a class, how to read it, and the read options it takes.

    ``read`` has the options as second argument if the kind takes some.
    """

    module: str
    name: str
    read: Callable[..., Source]
    takes: frozenset[str] = frozenset()


def find_kind(data: Any, kinds: tuple[Kind, ...]) -> Kind:
    """Return the kind of an object, without importing its library.

    Raises
    ------
    DataError
        If it is of none of the kinds.
    """
    for kind in kinds:
        # A module of the user may have the name of a library.
        if isinstance(data, getattr(sys.modules.get(kind.module), kind.name, ())):
            return kind
    hint = HINTS.get(type(data).__name__, "")
    raise DataError(
        f"data of type {type(data).__name__} cannot be read; pass a NumPy array, a masked array, a "
        "scipy or pydata/sparse matrix, a dask array, a zarr array or the path of one, a blocked "
        f"store, an AnnData object, an xarray.DataArray or a pandas.DataFrame"
        f"{hint and f'; here pass {hint}'}"
    )


def from_matrix(data: Any) -> Source:
    """Return the source of a matrix of one of the kinds in `MATRICES`."""
    return find_kind(data, MATRICES).read(data)


HINTS = {"Dataset": "one variable of it", "Series": "V.to_frame()", "list": "numpy.array(V)"}
"""Expression to pass instead, by unsupported type."""


def from_numpy(array: NDArray[Any]) -> Source:
    """Return the source of a NumPy array or masked array; masked entries are missing."""
    return Source(
        SourceInfo("numpy"),
        matrix_shape(array.shape),
        check_dtype(array.dtype),
        read=lambda rows, cols: array[rows, cols],
        array=None if isinstance(array, np.ma.MaskedArray) else np.asarray(array),
    )


def from_scipy(matrix: Any) -> Source:
    """Return the source of a scipy sparse matrix; `hold_out` sets its attribute ``unstored``."""
    source = _in_memory("scipy", matrix, lambda: matrix)
    return replace(source, unstored=getattr(matrix, "unstored", None))


def from_pydata(array: Any) -> Source:
    """Return the source of a two-dimensional array of the sparse package: COO, GCXS or DOK."""
    source = _in_memory("sparse", array, lambda: _scipy_of(array))
    return replace(source, unstored=unstored_of_fill(array.fill_value))


def from_dask(array: Any) -> Source:
    """Return the source of a dask array with NumPy or sparse chunks, computed part by part.

    The scheduler is the configured one (or the current cluster), by default dask's threads.
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
    fill = unstored_of_fill(array._meta.fill_value) if is_pydata_sparse(array._meta) else None
    return replace(source, pieces=lambda add: _dask_pieces(array, fill, add), unstored=fill)


def from_chunked(array: Any, kind: str, location: str | None = None) -> Source:
    """Return the source of an array in a file: zarr, or an open HDF5 dataset."""
    shape, dtype = matrix_shape(array.shape), check_dtype(array.dtype)
    decode = decoder(array)

    def read(rows: slice, cols: slice) -> Any:
        return array[rows, cols] if decode is None else decode(array[rows, cols])

    return Source(
        SourceInfo(kind, location, lazy=True),
        shape,
        dtype if decode is None else decode(np.empty((0, 0), dtype)).dtype,
        chunks=_chunk_sizes(array, shape),
        read=read,
    )


def _chunk_sizes(array: Any, shape: tuple[int, int]) -> Chunks | None:
    """Return the lengths of chunks.

    Newer versions of zarr provide them, and only they support chunks of different sizes.
    """
    sizes = getattr(array, "read_chunk_sizes", None)
    if sizes is not None:
        rows, cols = (tuple(map(int, lengths)) for lengths in sizes)
        return rows, cols
    return None if array.chunks is None else expand_chunks(shape, array.chunks)


def decoder(array: Any) -> Callable[[NDArray[Any]], NDArray[Any]] | None:
    """Return the function that unpacks values as attributes in zarr or HDF5 say.

    None if the values are not packed in the way of netCDF.
    """
    attrs = array.attrs
    packing = {name: _number_of(name, attrs[name]) for name in PACKING if name in attrs}
    old = getattr(getattr(array, "metadata", None), "zarr_format", 3) == 2
    if old and "_ARRAY_DIMENSIONS" in attrs and array.fill_value is not None:
        # For xarray the fill value means missing; for others it is the value of absent chunks.
        packing["_FillValue"] = array.fill_value
    if not packing:
        return None

    def decode(values: NDArray[Any]) -> NDArray[Any]:
        from xarray import Variable
        from xarray.conventions import decode_cf_variable

        packed = Variable(list(map(str, range(values.ndim))), values, packing)
        return np.asarray(decode_cf_variable("values", packed, decode_times=False).values)

    return decode


def _number_of(name: str, value: Any) -> Any:
    """Return the number or numbers in an attribute; zarr writes floats as base64 text."""
    if isinstance(value, str) and name != "_Unsigned":
        try:
            raw = base64.b64decode(value, validate=True)
        except ValueError:
            raw = b""
        value = np.frombuffer(raw, "<f8") if len(raw) == 8 else float(value)
    numbers = np.ravel(value)
    return numbers[0] if numbers.size == 1 else numbers


def from_zarr(array: Any) -> Source:
    """Return the source of a zarr array; chunks absent from its store have its fill value."""
    source = from_chunked(array, "zarr", _location_of(array))
    names = getattr(array.metadata, "dimension_names", None)
    names = names or array.attrs.get("_ARRAY_DIMENSIONS") or (None, None)
    return replace(source, labels=Labels(*usable_dims(*names)))


def _location_of(array: Any) -> Location | None:
    """Return the path or URL of a zarr array; None if it was not opened from one."""
    location, inside = getattr(array.store, "location", None), getattr(array.store, "inside", "")
    if isinstance(location, Location):
        below = array.path.removeprefix(inside).strip("/")
        return location.child(below) if below else location
    stored_at = str(array.store_path)
    return Location(stored_at) if stored_at.startswith("file://") else None


def decoded(array: Any) -> Any:
    """Return a DataArray with unpacked values, if its attributes mark them as packed."""
    if PACKING.isdisjoint(array.attrs):
        return array
    if is_pydata_sparse(getattr(array.variable, "_data", None)):
        raise DataError(
            f"the DataArray is sparse, and its attributes ({', '.join(PACKING & {*array.attrs})}) "
            "say that its values are packed; unpack them, and remove these attributes"
        )
    scaled = SCALING & {*array.attrs}
    if scaled:
        floats = array.dtype.kind == "f"  # arithmetic keeps attributes: they are unpacked already
        treatment = "are taken as they are" if floats else "were unpacked"
        warn(
            f"the DataArray has the attributes {', '.join(sorted(scaled))}, and its values "
            f"{treatment}; remove these attributes where they no longer hold",
            DataWarning,
        )
        if floats:
            array = array.copy(deep=False)
            array.attrs = {key: value for key, value in array.attrs.items() if key not in SCALING}
    if array.chunks is None and not getattr(array.variable, "_in_memory", True):
        from xarray import decode_cf

        name = free_name("values", {*map(str, array.coords), *map(str, array.dims)})
        dataset = decode_cf(array.to_dataset(name=name), decode_times=False, decode_coords=False)
        return dataset[name].rename(array.name)
    from xarray.conventions import decode_cf_variable

    variable = decode_cf_variable("values", array.variable, decode_times=False)
    result = array.copy(data=variable.data)
    result.attrs = variable.attrs
    return result


def from_xarray(array: Any) -> Source:
    """Return the source of a DataArray: NumPy, sparse, dask or lazily read from a file."""
    array = decoded(array)
    shape = matrix_shape(array.shape)
    names = row_dim, col_dim = array.dims
    if row_dim == col_dim:  # xarray makes such an array, and can do nothing with it
        array, col_dim = array.copy(deep=False), f"{row_dim}_"
        array.variable.dims = row_dim, col_dim
    if is_pydata_sparse(getattr(array.variable, "_data", None)) or array.chunks is not None:
        source = from_matrix(array.data)
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
    indexes = {dim: array.indexes.get(dim) for dim in array.dims}
    stacks = {
        str(dim): _stack(str(dim), index, list(map(str, index.names)))
        for dim, index in indexes.items()
        if getattr(index, "nlevels", 1) > 1
    }
    coords: dict[Any, dict[str, NDArray[Any]]] = {row_dim: {}, col_dim: {}}
    for key, coord in array.coords.items():
        levels = getattr(array.indexes.get(key), "nlevels", 1)
        # The tuples of a MultiIndex cannot be stored; its levels are coordinates of their own.
        if len(coord.dims) == 1 and not (key in array.dims and levels > 1):
            coords[coord.dims[0]][str(key)] = storable(
                str(key), coord.to_numpy(), key in array.dims
            )
    attrs = {
        str(key): units for key, coord in array.coords.items() if (units := cf_attrs(coord.attrs))
    }
    name = None if array.name is None else str(array.name)
    sides = coords[row_dim], coords[row_dim if names[0] == names[1] else col_dim]
    labels = Labels(
        str(names[0]), str(names[1]), *sides, name, attrs, cf_attrs(array.attrs), stacks
    )
    return replace(source, labels=labels, info=replace(source.info, kind="xarray"))


def _stack(dim: str, index: Any, names: list[str]) -> Stack:
    """Return all labels of each level of a MultiIndex; pandas allows missing ones.

    Raises
    ------
    DataError
        If a position has no label.
    """
    for name, codes in zip(names, index.codes, strict=True):
        gone = np.flatnonzero(np.asarray(codes) < 0)
        if gone.size:
            raise DataError(
                f"{gone.size} of the {len(index)} labels of {dim!r} are missing at the level "
                f"{name!r}, the first at position {gone[0]}; every position needs a label: "
                "fill them in, drop these positions, or drop the index with reset_index"
            )
    levels = {n: storable(n, of.to_numpy()) for n, of in zip(names, index.levels, strict=True)}
    return Stack(levels, maps=False)


def from_pandas(frame: Any) -> Source:
    """Return the source of a DataFrame of numbers; its index and columns become labels."""
    matrix_shape(frame.shape)
    wrong = [str(name) for name, dtype in frame.dtypes.items() if dtype.kind not in NUMERIC]
    if wrong:
        several = len(wrong) > 1
        what, them = ("columns", "them") if several else ("column", "it")
        raise DataError(
            f"{len(wrong)} {what} of the DataFrame {'hold' if several else 'holds'} no numbers: "
            f"{', '.join(wrong[:NAMED])}; drop {them}, convert {them}, or make {them} the index "
            "with set_index; for a table with a line for each entry pass rows, columns and values"
        )
    kinds = set(frame.dtypes)
    plain = len(kinds) == 1 and all(isinstance(dtype, np.dtype) for dtype in kinds)
    if all(hasattr(dtype, "fill_value") for dtype in kinds):
        source = _from_sparse_columns(frame)
    else:
        source = from_numpy(frame.to_numpy() if plain else frame.to_numpy("f8", na_value=np.nan))
    row_dim, col_dim = usable_dims(frame.index.name, frame.columns.name)
    row_dim, col_dim = (  # levels may be called row and column
        free_name(dim, [] if index.nlevels == 1 else _level_names(dim, index))
        for dim, index in ((row_dim, frame.index), (col_dim, frame.columns))
    )
    axes = {row_dim: frame.index, col_dim: frame.columns}
    stacks = {
        dim: _stack(dim, index, _level_names(dim, index))
        for dim, index in axes.items()
        if index.nlevels > 1
    }
    rows, cols = (_axis_coords(dim, index) for dim, index in axes.items())
    labels = Labels(row_dim, col_dim, rows, cols, stacks=stacks)
    return replace(source, labels=labels, info=SourceInfo("pandas"))


def _from_sparse_columns(frame: Any) -> Source:
    """Return the source of a DataFrame whose columns are pandas sparse arrays."""
    fills = {unstored_of_fill(dtype.fill_value) for dtype in set(frame.dtypes)}
    if len(fills) > 1:
        raise DataError(
            "some columns of the DataFrame are sparse with fill value 0 and others with NaN; give "
            "all of them one, for example with .astype(pandas.SparseDtype('float64', 0))"
        )
    columns = [column.array for _, column in frame.items()]
    rows = np.concatenate([column.sp_index.indices for column in columns])
    column_of = np.repeat(np.arange(len(columns)), [column.sp_values.size for column in columns])
    values = np.concatenate([column.sp_values for column in columns])
    matrix = sparse.coo_array((values, (rows, column_of)), shape=frame.shape)
    return replace(_in_memory("pandas", matrix, lambda: matrix), unstored=fills.pop())


def from_annotated(part: Annotated) -> Source:
    """Return the source of one matrix of an AnnData, labelled by its names."""
    source = from_matrix(part.matrix)
    if source.shape != (part.obs.size, part.var.size):
        raise DataError(
            f"the matrix is {source.shape}, but the AnnData has {part.obs.size} observations and "
            f"{part.var.size} variables; write it again"
        )
    var = part.var
    if part.chosen is not None:
        source, var = masked(source, part.chosen), var[part.chosen]
    return replace(
        source,
        labels=Labels("obs", "var", {"obs": part.obs}, {"var": var}),
        info=replace(part.info, lazy=part.info.lazy or source.info.lazy),
        unstored=part.unstored if source.is_sparse else None,
    )


def from_compressed(matrix: Compressed) -> Source:
    """Return the source of compressed rows or columns in a file, read in pieces."""

    def pieces(add: bool) -> Iterator[Piece]:
        loaded = matrix._replace(indptr=np.asarray(matrix.indptr[:]))
        length = matrix.shape[matrix.format == "csc"]
        check_pointers(loaded.indptr, loaded.indices, loaded.data, length)
        yield from compressed_pieces(loaded)

    return Source(
        SourceInfo("anndata", lazy=True),
        matrix_shape(matrix.shape),
        check_dtype(matrix.data.dtype),
        pieces=pieces,
        entries=int(matrix.data.shape[0]),
    )


def masked(source: Source, chosen: NDArray[np.int64]) -> Source:
    """Return the source of some columns of another, by their positions in ascending order."""
    assert source.shape is not None
    (height, width), chunks, matrix = source.shape, source.chunks, source.matrix
    place = np.full(width, -1, np.int64)
    place[chosen] = np.arange(chosen.size)
    if chunks is not None:
        sizes = np.add.reduceat(place >= 0, np.cumsum([0, *chunks[1][:-1]]), dtype=np.int64)
        chunks = chunks[0], tuple(int(size) for size in sizes if size)

    def some(add: bool) -> Iterator[Piece]:
        assert source.pieces is not None
        for piece in source.pieces(add):
            position = place[np.asarray(piece.cols)]
            keep = position >= 0
            yield Piece(np.asarray(piece.rows)[keep], position[keep], piece.values[keep])

    return replace(
        source,
        shape=(height, chosen.size),
        chunks=chunks,
        array=None,
        read=None if source.read is None else partial(_masked_region, source, chosen),
        pieces=None if source.pieces is None else some,
        matrix=None if matrix is None else lambda add: matrix(add)[:, chosen],
        entries=None,
    )


def _masked_region(source: Source, chosen: NDArray[np.int64], rows: slice, cols: slice) -> Any:
    """Return a region of a masked source; all columns between are read, in few rows at once."""
    assert source.read is not None
    columns = chosen[cols]
    first, last = int(columns[0]), int(columns[-1]) + 1
    # Read whole chunks: a part of one costs as much.
    least = MIN_LINES if source.chunks is None else max(source.chunks[0])
    step = max(least, DENSE_PART // (last - first))
    parts = []
    for start in range(rows.start, rows.stop, step):
        lines = slice(start, min(start + step, rows.stop))
        parts.append(source.read(lines, slice(first, last))[:, columns - first])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def from_blocks(info: DataInfo, view: Callable[[int, int], Any]) -> Source:
    """Return the source of a blocked store or sparse `BlockedData`, in the caller's order."""
    grid, layout = info.grid, info.layout

    def pieces(add: bool) -> Iterator[Piece]:
        for block in grid.all_blocks():
            view_of_block = view(*block)
            rows, cols = (part.start for part in grid.slices(Block(*block)))
            row, col = stored_cells(view_of_block)
            row, col = layout.callers(row + rows, col + np.int64(cols))
            yield Piece(row, col, view_of_block.values.copy())

    stored = info.statistics.n_stored
    assert stored is not None
    return Source(
        SourceInfo("blocks", info.source.location, lazy=True),
        grid.shape,
        labels=info.labels,
        chunks=(grid.rows.sizes, grid.cols.sizes) if layout.row_order is None else None,
        pieces=pieces,
        entries=int(stored.sum()),
        unstored=cast("str | None", layout.unstored),
    )


def _from_backed(matrix: Any) -> Source:
    return from_compressed(compressed("", matrix.group))


MATRICES = (
    Kind("scipy.sparse", "spmatrix", from_scipy),
    Kind("scipy.sparse", "sparray", from_scipy),
    Kind("sparse", "SparseArray", from_pydata),
    Kind("numpy", "ndarray", from_numpy),
    Kind("dask.array", "Array", from_dask),
    Kind("zarr", "Array", from_zarr),
    Kind("anndata.abc", "CSRDataset", _from_backed),
    Kind("anndata.abc", "CSCDataset", _from_backed),
    Kind("daskfactor.data.annotated", "Compressed", from_compressed),
    Kind("h5py", "Dataset", lambda dataset: from_chunked(dataset, "hdf5")),
)
"""Matrices of all libraries, also as parts of the objects that `daskfactor.data.opening` opens."""


def is_pydata_sparse(data: object) -> bool:
    """Return whether an object is an array of the sparse package."""
    return isinstance(data, getattr(sys.modules.get("sparse"), "SparseArray", ()))


def is_scipy_sparse(data: object) -> bool:
    """Return whether an object is a sparse matrix or array of scipy."""
    return bool(sparse.issparse(data))


def unstored_of_fill(fill: Any) -> str:
    """Return the meaning of unstored entries for a fill value: "zero" or "missing"."""
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
        pieces=lambda add: compressed_pieces(canonical(as_scipy(), add)),
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
            if unstored_of_fill(chunk.fill_value) != fill:
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
    """Return an array of the sparse package as a scipy COO array."""
    coo = array if type(array).__name__ == "COO" else array.asformat("coo")
    values = summable(coo.data) if coo.data.dtype == np.float16 else coo.data
    return sparse.coo_array((values, tuple(coo.coords)), shape=coo.shape)


def _level_names(dim: str, index: Any) -> list[str]:
    """Return the names of the levels of a MultiIndex of pandas; numbered if unnamed."""
    return [f"{dim}_{n}" if name is None else str(name) for n, name in enumerate(index.names)]


def _axis_coords(dim: str, index: Any) -> dict[str, NDArray[Any]]:
    """Return the labels of a pandas axis; a default RangeIndex has none."""
    if index.nlevels > 1:
        names = _level_names(dim, index)
        levels = [index.get_level_values(n).to_numpy() for n in range(index.nlevels)]
        return {name: storable(name, level) for name, level in zip(names, levels, strict=True)}
    counted = type(index).__name__ == "RangeIndex" and index.name is None
    return {} if counted else {dim: storable(dim, index.to_numpy())}
