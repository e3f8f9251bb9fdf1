"""Matrices in files, by file ending: as entries for `convert`, or as one array.

To add a format, write the functions that read it, and add a line to `FORMATS`.
"""

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from io import BytesIO
from os import PathLike, fspath
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.checks import require
from daskfactor.data.adapters import (
    Source,
    from_blocks,
    npy_at,
    npy_header,
    open_source,
)
from daskfactor.data.annotated import is_annotated, open_annotated, part_in, part_of
from daskfactor.data.blocks import BlockedData
from daskfactor.data.coo import (
    Piece,
    coordinate_pieces,
    text_array,
)
from daskfactor.data.dialects import PACKINGS, plain
from daskfactor.data.labels import DEFAULT_DIMS, Labels, usable_dims
from daskfactor.data.long_tables import (
    UnclearTableError,
    is_frame,
    is_long,
    long_file,
    names_columns,
    open_frame,
)
from daskfactor.data.stacking import data_array, open_array
from daskfactor.data.statistics import NUMERIC, SourceInfo
from daskfactor.data.store import BlockStore, is_blocked_store, zarr_kind
from daskfactor.data.tables import (
    ReadOptions,
    TableColumns,
    has_parquet,
    inspect_csv,
    inspect_parquet,
    open_csv,
    open_parquet,
    parquet_files,
    read_table,
)
from daskfactor.data.tenx import is_hdf5, is_netcdf, matrix_in, read_hdf5, with_cells_as_rows
from daskfactor.errors import DaskfactorError, DataError, OptionError
from daskfactor.machine import available_memory
from daskfactor.urls import (
    as_url,
    child,
    error_summary,
    file_system,
    is_url,
    open_binary,
    path_kind,
    path_or_file,
    safe_cause,
    url_errors,
)

ARRAYS = ".npy, .npz, .csv, .tsv, .txt, .parquet, .zarr, .h5ad or netCDF (.nc)"
NETCDF = (".nc", ".nc4", ".cdf")
ANYTHING = ReadOptions()
UNREADABLE = (ValueError, EOFError, SyntaxError, TokenError, zipfile.BadZipFile)
"""Errors that NumPy raises for damaged, truncated or foreign files."""
TEXT_CHUNK = 2**24
"""Bytes of a Matrix Market file that are parsed together."""
LONGEST_LINE = 2**24
_CALLS = {
    "pandas.read_excel({path!r}, index_col=0)": (".xlsx", ".xls", ".ods"),
    "pandas.read_feather({path!r})": (".feather", ".arrow"),
    "pandas.read_orc({path!r})": (".orc",),
    "pandas.read_stata({path!r})": (".dta",),
    "pandas.read_spss({path!r})": (".sav",),
    "pandas.read_sas({path!r})": (".sas7bdat",),
    "pandas.read_pickle({path!r})": (".pkl", ".pickle"),
    "scipy.io.loadmat({path!r})['NAME']": (".mat",),
    "sklearn.datasets.load_svmlight_file({path!r})[0]": (".svm", ".svmlight", ".libsvm"),
    "scanpy.read_loom({path!r})": (".loom",),
    "mudata.read_h5mu({path!r})['NAME']": (".h5mu",),
    "pyreadr.read_r({path!r})[None]": (".rds",),
    "pyreadr.read_r({path!r})['NAME']": (".rdata", ".rda"),
    "cmapPy.pandasGEXpress.parse.parse({path!r}).data_df": (".gct", ".gctx"),
    "biom.load_table({path!r}).to_dataframe(dense=True)": (".biom",),
    "rioxarray.open_rasterio({path!r}).squeeze()": (".tif", ".tiff"),
}
OF_OTHER_LIBRARIES = {ending: call for call, endings in _CALLS.items() for ending in endings}
"""Calls of other libraries that read unsupported files, by file ending."""
_BLANK_LINE = re.compile(rb"^[ \t]*(%.*)?\r?\n", re.MULTILINE)
"""Pattern of a blank line or comment."""


def open_sparse(source: Any, options: ReadOptions) -> Source:
    """Return the entries of a file or of a sparse matrix in memory.

    A table is read as one with a line for each entry, and an archive as three arrays.

    Raises
    ------
    DataError
        If it is dense, or cannot be read.
    """
    if isinstance(source, BlockedData) and source.is_sparse:
        return from_blocks(source.known, source.view)
    source = as_url(source, options.storage_options)
    if isinstance(source, str | PathLike):
        if not is_url(fspath(source)):
            source = str(Path(fspath(source).removeprefix("file://")).expanduser())
        if is_blocked_store(source):
            store = BlockStore(fspath(source))
            return from_blocks(store.known, store.read)
        file_format = FORMATS.get(_suffix(fspath(source)))
        if options.table is None and (
            file_format in (_TABLE, _PARQUET, _NPZ) or _holds_parquet(source)
        ):
            options = replace(options, table=True)
    if isinstance(source, BlockedData):
        what = "these blocks are"
    else:
        opened = open_input(source, options)
        if opened.is_sparse:
            return opened
        what = f"the {opened.info.kind} input is"
    raise DataError(
        f"{what} dense, and convert is for sparse matrices; pass the data to as_blocks or sample"
    )


def open_input(data: Any, options: ReadOptions = ANYTHING) -> Source:
    """Return the source of any input: tables and files by their contents, else by type.

    Raises
    ------
    DataError
        If it cannot be read, or could be a table of entries as well as a matrix.
    OptionError
        If columns of a table are named, but the data are not a table.
    """
    data = as_url(data, options.storage_options)
    options = replace(options, storage_options=None)
    if options.layer is not None or options.mask_var is not None:
        data = part_of(data, options.layer, options.mask_var)
        options = replace(options, layer=None, mask_var=None)
    if isinstance(data, str | PathLike) and is_readable_file(fspath(data)):
        data = read_matrix(fspath(data), options)
    if type(data).__module__.startswith(("dask.dataframe", "dask_expr")):
        raise DataError(
            "a dask DataFrame is read as a whole: pass frame.compute(), or write it as Parquet, "
            "which is read piece by piece, and pass the path"
        )
    if is_frame(data):
        return open_frame(data, options)
    array = data_array(data)
    if array is not None and options.values is None and not options.table:
        return open_array(array, options.rows, options.columns)
    refuse_columns(data, options)
    return open_source(data)


def reopen(data: Any, source: Mapping[str, Any]) -> Any:
    """Return the data that a run was made from, with the same layer, mask or columns.

    ``source`` is the dict that the run stores, see `SourceInfo.to_dict`.
    """
    part = source.get("layer"), source.get("mask_var")
    if any(part) and is_annotated(data):
        return part_of(data, *part)
    path = isinstance(data, str | PathLike) and is_readable_file(fspath(data))
    options = ReadOptions(**(source.get("table") or {"table": False}))
    if is_frame(data) or (path and options.table is None):
        return open_input(data, options)
    return read_matrix(fspath(data), options) if path else data


def refuse_columns(data: Any, options: ReadOptions) -> None:
    """Refuse options for columns of a table, or a layer, if the data have none."""
    if options.layer is not None or options.mask_var is not None:
        part_of(data, options.layer, options.mask_var)
    if (names_columns(options) or options.table) and not isinstance(data, Source):
        raise OptionError(
            "rows, columns, values and table say how to read a table with a line for each entry "
            "(a DataFrame, a CSV or Parquet file), and rows and columns name dimensions of an "
            f"xarray.DataArray, got {type(data).__name__}; leave them out"
        )


def is_readable_file(text: str) -> bool:
    """Return whether a location is a file, an array in a file, or has the ending of a table."""
    if _suffix(part_in(text)[0]) in FORMATS:
        return True
    if is_url(text):
        kind = zarr_kind(text)
        return (
            kind == "group" if kind else _holds_parquet(text) or bool(path_kind(part_in(text)[0]))
        )
    path, head = Path(text), text.rpartition(":")[0]
    if path.is_file() or _holds_parquet(text) or matrix_in(text):
        return True
    return bool(head) and Path(head).exists() if not path.is_dir() else zarr_kind(text) == "group"


def _holds_parquet(text: str) -> bool:
    """Return whether a location is a folder with Parquet files, or with ``key=value`` folders."""
    if is_url(text):
        return zarr_kind(text) is None and path_kind(text) == "folder" and bool(parquet_files(text))
    return Path(text).is_dir() and has_parquet(*file_system(text))


def _suffix(location: str) -> str:
    """Return the ending of a file name without that of a compression."""
    name = location.lower().rstrip("/")
    for ending in PACKINGS:
        name = name.removesuffix(ending)
    return Path(name).suffix


def _refuse_foreign(location: str) -> None:
    """Refuse a file that another library reads, and name the call."""
    call = OF_OTHER_LIBRARIES.get(_suffix(location))
    if _suffix(location) == ".mat" and is_hdf5(location):  # from version 7.3 on
        call = "h5py.File({path!r})['NAME'][...].T"
    if call is not None and not is_url(location) and Path(location).is_file():
        raise DataError(
            f"files like {location} are not read here; pass what "
            f"{call.format(path=location)} gives, or write that as .csv, .npz or .parquet"
        )


def read_matrix(text: str, options: ReadOptions = ANYTHING) -> Any:
    """Open or read the matrix in a file or store that `sample` does not open by itself.

    ``file.npz:name`` (or ``file.nc:name``, ``file.zarr:name``) selects one array of several, and
    ``file.h5ad:name`` a layer of an AnnData; a file whose own name has a colon has priority. A
    location that `sample` opens by itself is returned unchanged. A table with a line for each entry
    is a `Source`.

    Raises
    ------
    DataError
        If the file holds no matrix, or none of that name.
    """
    location, name = part_in(text)
    suffix = _suffix(location)
    file_format = FORMATS.get(suffix)
    if not is_url(text) and not Path(location).exists():
        raise DataError(f"{location} does not exist; give a file or store: {ARRAYS}")
    if (file_format is None or not is_url(text)) and _holds_parquet(text):
        file_format = _PARQUET
    _refuse_foreign(location)
    annotated = open_annotated(location, name)
    if annotated is not None:
        return annotated
    if file_format is None and suffix not in NETCDF and is_hdf5(location):
        file_format = _HDF5
    if file_format is _HDF5 and is_netcdf(location):
        file_format = None
    folder = matrix_in(text)
    if folder is not None:
        return open_matrix_market(folder)
    if (
        file_format is not None
        and file_format.inspect is not None
        and file_format.entries is not None
        and name is None
    ):
        columns = file_format.inspect(text, options)
        try:
            long = is_long(text, columns.names, columns.labelled, columns.has_keys, options)
        except UnclearTableError as error:
            if columns.fault is None:
                raise
            raise DataError(columns.fault) from error
        if long:
            return long_file(text, columns, file_format.entries(text, options), options)
    if location.lower().endswith(PACKINGS) and file_format not in (_TABLE, _MATRIX_MARKET):
        raise DataError(
            f"{location} is compressed, which is supported for tables and .mtx files only, by "
            "their names (name.csv.gz); unpack it, and pass the unpacked file"
        )
    if file_format is not None:
        if name is not None and file_format not in (_NPZ, _HDF5):
            raise DataError(
                f"{location} holds one matrix, without a name, not {name!r}; give {location}"
            )
        with url_errors(location):
            return file_format.array(location, name, options)
    if name is None and zarr_kind(location) in ("blocks", "array", "run"):
        return location  # as_blocks opens it, or raises the specific error
    return _read_labelled(location, name, options)


def open_matrix_market(location: str) -> Source:
    """Return the source of a coordinate Matrix Market file, read in pieces."""
    with plain(location) as file:
        banner = file.readline(LONGEST_LINE)
        kinds = banner.decode("ascii", "replace").lower().split()
        if kinds[:2] != ["%%matrixmarket", "matrix"] or len(kinds) != 5:
            raise DataError(
                f"{location} is not a Matrix Market file: it begins with {banner[:40]!r}"
            )
        if kinds[2] != "coordinate" or kinds[3] == "complex":
            raise DataError(
                f"{location} holds a {kinds[2]} matrix of {kinds[3]} numbers; only "
                "coordinate matrices of real, integer or pattern entries are supported"
            )
        rows, cols, entries = _sizes(location, file)
        start = file.tell()

    def pieces(add: bool) -> Iterator[Piece]:
        count_read = 0
        with plain(location) as file:
            file.seek(start)
            while text := file.read(TEXT_CHUNK) + file.readline(LONGEST_LINE):
                text = _BLANK_LINE.sub(b"", text + b"\n")
                count = text.count(b"\n")
                count_read += count
                coo = _parsed(location, banner + b"%d %d %d\n" % (rows, cols, count) + text)
                yield from coordinate_pieces(coo.row, coo.col, coo.data)
        if count_read != entries:
            raise DataError(
                f"{location} says that it has {entries} entries, but has {count_read}; it was cut "
                "off or changed"
            )

    source = Source(
        SourceInfo("matrix market", location, lazy=True),
        (rows, cols),
        labels=Labels(
            row_coords=_read_labels(location, "row", "rows", rows),
            col_coords=_read_labels(location, "column", "columns", cols),
        ),
        pieces=pieces,
        entries=entries if kinds[4] == "general" else None,
    )
    return with_cells_as_rows(source, location)


def _sparse_archive(location: str, arrays: Mapping[str, Any], options: ReadOptions) -> Source:
    """Return the sparse matrix in the arrays of a NumPy archive.

    The archive is one of three kinds: from scipy.sparse.save_npz; compressed rows as ``data``,
    ``indices``, ``indptr``, ``shape``; or three arrays of positions and values, named row, col and
    data or as ``options`` say. Arrays ``row_labels`` and ``column_labels`` are labels.
    """
    dims = usable_dims(*arrays.get("dims", np.array(DEFAULT_DIMS)).tolist())
    coords = _labels(arrays, dims[0], "row_labels"), _labels(arrays, dims[1], "column_labels")
    shared: dict[str, Any] = {
        "info": SourceInfo("npz", location),
        "unstored": str(arrays["unstored"]) if "unstored" in arrays else None,
    }
    if options.rows is None and ("format" in arrays or "indptr" in arrays):
        if "format" in arrays:
            with open_binary(location) as file:
                matrix = sparse.load_npz(file)
        else:
            parts = arrays["data"], arrays["indices"], arrays["indptr"]
            matrix = sparse.csr_array(parts, shape=tuple(arrays["shape"].tolist()))
        return replace(open_source(matrix), labels=Labels(*dims, *coords), **shared)
    rows, cols, data = _triples(location, arrays, options)
    shape = tuple(arrays["shape"].tolist()) if "shape" in arrays else None
    return Source(
        shape=shape,
        labels=Labels() if shape is None else Labels(*dims, *coords),
        pieces=lambda add: coordinate_pieces(rows, cols, data),
        entries=data.size,
        **shared,
    )


def label_file(target: Path, side: str) -> Path:
    """Return the file in which `export` writes the labels of a side of a Matrix Market file."""
    stem = target.name.removesuffix(".gz").removesuffix(".bz2").removesuffix(".mtx")
    return target.with_name(f"{stem}.{side}.txt")


def _why(error: BaseException, location: str) -> str:
    """Return the reason of a NumPy error, without its advice to allow pickles."""
    foreign = any(word in str(error) for word in ("pickle", "Python objects"))
    text = error_summary(error, location) if is_url(location) else str(error)
    return "it holds no numbers, or is not a NumPy file" if foreign else text


@contextmanager
def _archive(location: str) -> Iterator[Any]:
    """Open a NumPy archive, refused if its arrays exceed free memory."""
    try:
        with open_binary(location) as file:
            with zipfile.ZipFile(file) as members:
                size = sum(member.file_size for member in members.infolist())
            if size > available_memory():
                raise DataError(
                    f"{location} holds arrays of {size} bytes, which are read whole, and less is "
                    "free; write it as a zarr array, or as a table that convert reads"
                )
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                yield archive
    except DaskfactorError:
        raise
    except (OSError, MemoryError, *UNREADABLE) as error:
        raise DataError(
            f"{location} is not a readable NumPy archive: {_why(error, location)}"
        ) from safe_cause(error, location)


def _matrices(archive: Any) -> list[str]:
    """Return the names of numeric matrices in an archive, or of arrays with more dimensions."""
    kinds_of: dict[str, tuple[int, str]] = {}
    for name in archive.files:
        with archive.zip.open(f"{name}.npy") as file:
            shape, _, dtype = npy_header(file)
            kinds_of[name] = len(shape), dtype.kind
    if len(kinds_of) == 1:
        return list(kinds_of)
    for lowest, highest, kinds in ((2, 2, "iuf"), (2, 99, "biuf")):
        matrices = [
            name for name, (n, kind) in kinds_of.items() if lowest <= n <= highest and kind in kinds
        ]
        if matrices:
            return matrices
    return []


def _read_npz(location: str, name: str | None, options: ReadOptions) -> Any:
    """Return an array of an archive, or the sparse matrix in several of them."""
    with _archive(location) as archive:
        names = list(archive.files)
        names_given = options.table or names_columns(options)
        kinds = {"format", "data"}, {"data", "indices", "indptr"}, {"row", "col", "data"}
        if name is None and (names_given or any(kind <= {*names} for kind in kinds)):
            return _sparse_archive(location, {key: archive[key] for key in names}, options)
        if name is None:
            chosen = _matrices(archive)
            if len(chosen) == 1:
                return archive[chosen[0]]
        elif name in names:
            return archive[name]
    if not names:
        raise DataError(f"{location} holds no array")
    if name is None:
        raise DataError(
            f"{location} holds {len(chosen) or 'no'} matrices of numbers (its arrays are "
            f"{', '.join(chosen or names)}); name one as {location}:NAME"
        )
    raise DataError(f"{location} has no array {name!r}, only {', '.join(names)}")


def _read_npy(location: str, name: str | None, options: ReadOptions) -> Any:
    try:
        return npy_at(location) if is_url(location) else np.load(location, "r", False)
    except DaskfactorError:
        raise
    except UNREADABLE as error:
        raise DataError(
            f"{location} is not a readable NumPy array file: {_why(error, location)}"
        ) from safe_cause(error, location)


def _read_parquet(location: str, name: str | None, options: ReadOptions) -> Any:
    """Return a table of numbers with a column for each column of the matrix."""
    pa = require("pyarrow", "tables", "Parquet files")
    import pyarrow.parquet as pq

    parts = []
    for path in parquet_files(location):
        with pq.ParquetFile(path_or_file(path)) as file:
            about = file.metadata
            groups = map(about.row_group, range(about.num_row_groups))
            size = sum(group.total_byte_size for group in groups)
            if size > available_memory() // 2:
                raise DataError(
                    f"{path} holds a matrix of {size} bytes, which is read whole, and less than "
                    "twice that is free; write it as a zarr array"
                )
            parts.append(file.read())
    return pa.concat_tables(parts).to_pandas()


def _bare_arrays(location: str) -> list[str]:
    """Return the names of arrays in a zarr group without dimension names, which xarray refuses."""
    from daskfactor.data.safe_zarr import open_zarr

    return sorted(open_zarr(location).array_keys()) if zarr_kind(location) == "group" else []


def _dataset(location: str) -> Any:
    """Open the dataset at a location with xarray."""
    import xarray as xr

    from daskfactor.data.safe_zarr import zarr_store

    if zarr_kind(location) is None:
        if not is_url(location):
            return xr.open_dataset(location, chunks={})
        return xr.open_dataset(open_binary(location), engine="h5netcdf", chunks={})
    store: Any = zarr_store(location)
    options: dict[str, Any] = {"engine": "zarr", "group": store.inside, "chunks": {}}
    try:  # a web server cannot list files, so metadata must be consolidated
        return xr.open_dataset(store, consolidated=is_url(location), **options)
    except (KeyError, ValueError):
        return xr.open_dataset(store, consolidated=False, **options)


def _read_labelled(location: str, name: str | None, options: ReadOptions) -> Any:
    """Return the variable of a dataset that ``name`` selects, or its only matrix."""
    try:
        dataset = _dataset(location)
    except DaskfactorError:
        raise
    except Exception as error:  # every backend raises errors of other types
        try:
            arrays = _bare_arrays(location)
        except Exception:  # noqa: BLE001 - the first error is the one to report
            arrays = []
        if name in arrays:
            return child(location, name)
        if arrays:
            raise DataError(
                f"{location} holds {len(arrays)} zarr array{'s' if len(arrays) > 1 else ''} "
                f"({', '.join(arrays)}); name one as {location}:NAME"
            ) from error
        reason = " ".join(str(error).split())[:200]
        reason_text = f". xarray says: {reason}"
        if "did not find a match" in reason:
            reason_text = _if_text(location)
        raise DataError(f"{location} cannot be read; give {ARRAYS}{reason_text}") from safe_cause(
            error, location
        )
    # A store lists its arrays in arbitrary order.
    names = sorted(map(str, dataset.data_vars))
    bounds = {variable.attrs.get("bounds") for variable in dataset.variables.values()}
    large = [
        key
        for key in names
        if dataset[key].ndim >= 2 and key not in bounds and dataset[key].dtype.kind in NUMERIC
    ]
    matrices = [key for key in large if dataset[key].ndim == 2] or large
    if name is not None and name not in names:
        raise DataError(f"{location} has no variable {name!r}, only {', '.join(names)}")
    if name is None and len(matrices) != 1:
        raise DataError(
            f"{location} holds {len(matrices)} variables of two dimensions or more "
            f"({', '.join(matrices) or 'none'}); name one as {location}:NAME"
        )
    return dataset[name or matrices[0]]


def _if_text(location: str) -> str:
    """Return advice for a file of unknown kind, if it holds text."""
    if is_url(location) or not Path(location).is_file():
        return ""
    with open_binary(location) as file:
        text = file.read(2**12)
    printable = bool(text) and not re.search(rb"[\x00-\x08\x0e-\x1f]", text)
    return "; if it is a table of text, copy it to a name that ends in .csv" if printable else ""


class Format(NamedTuple):
    """Functions that read files with one ending.

    ``array`` reads a matrix, selected by name if there are several. For tables, ``inspect`` returns
    the columns, and ``entries`` reads a table with a line for each entry.
    """

    array: Callable[[str, str | None, ReadOptions], Any]
    inspect: Callable[[str, ReadOptions], TableColumns] | None = None
    entries: Callable[[str, ReadOptions], Source] | None = None


_TABLE = Format(lambda location, name, options: read_table(location), inspect_csv, open_csv)
_PARQUET = Format(_read_parquet, inspect_parquet, open_parquet)
_HDF5 = Format(lambda location, name, options: read_hdf5(location, name))
_NPZ = Format(_read_npz)
_MATRIX_MARKET = Format(lambda location, name, options: open_matrix_market(location))

FORMATS = {
    ".csv": _TABLE,
    ".tsv": _TABLE,
    ".txt": _TABLE,
    ".dat": _TABLE,
    ".data": _TABLE,
    ".tab": _TABLE,
    ".parquet": _PARQUET,
    ".pq": _PARQUET,
    ".inter": _TABLE,
    ".mtx": _MATRIX_MARKET,
    ".mm": _MATRIX_MARKET,
    ".npz": _NPZ,
    ".npy": Format(_read_npy),
    ".h5": _HDF5,
    ".hdf5": _HDF5,
    ".hspy": _HDF5,
}


def _sizes(location: str, file: IO[bytes]) -> tuple[int, int, int]:
    line = b"%"
    while line.startswith(b"%") or (line and not line.strip()):
        line = file.readline(LONGEST_LINE)
    try:
        rows, cols, entries = (int(field) for field in line.split())
    except ValueError:
        raise DataError(
            f"{location} has {line[:40]!r} where its numbers of rows, columns and entries should be"
        ) from None
    return rows, cols, entries


def _parsed(location: str, text: bytes) -> Any:
    """Return the entries in some lines, parsed as a separate file."""
    from scipy.io import mmread

    # SciPy from 1.18 warns unless this option is passed; before 1.15 it does not exist.
    has_option = "spmatrix" in signature(mmread).parameters
    keywords: dict[str, Any] = {"spmatrix": False} if has_option else {}
    try:
        return mmread(BytesIO(text), **keywords)
    except Exception as error:
        raise DataError(f"{location} cannot be read as Matrix Market: {error}") from error


def _read_labels(location: str, dim: str, side: str, size: int) -> dict[str, NDArray[Any]]:
    file = label_file(Path(location), side)
    if is_url(location) or not file.is_file():
        return {}
    names = file.read_text(encoding="utf-8").splitlines()
    if len(names) != size:
        raise DataError(
            f"{file} has {len(names)} labels for {size} {side} of {location}; correct it, or "
            "move it away"
        )
    return {dim: text_array(names)}


def _labels(arrays: Mapping[str, NDArray[Any]], dim: str, name: str) -> dict[str, NDArray[Any]]:
    if name not in arrays:
        return {}
    array = arrays[name]
    return {dim: np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array}


def _triples(
    location: str, arrays: Mapping[str, NDArray[Any]], options: ReadOptions
) -> list[NDArray[Any]]:
    """Return rows, columns and values from an archive with an array for each."""
    names = []
    for choice, usual in (
        (options.rows, ("row", "rows")),
        (options.columns, ("col", "cols", "column", "columns")),
        (options.values, ("data", "values", "value")),
    ):
        candidates = usual if choice is None else (str(choice),)
        present = [name for name in candidates if name in arrays]
        if not present:
            raise DataError(
                f"{location} has no array {' or '.join(candidates)}; it has {', '.join(arrays)}; "
                "name the arrays with rows, columns and values"
            )
        names.append(present[0])
    shapes = [arrays[name].shape for name in names]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise DataError(
            f"the arrays {', '.join(names)} of {location} have shapes {shapes[0]}, {shapes[1]} "
            f"and {shapes[2]}; they must have the same length"
        )
    return [arrays[name] for name in names]
