"""Files that hold a matrix, by their endings: as entries for `convert`, or as one array.

A format is added here alone: functions that read it, and a line of `FORMATS`.
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
from daskfactor.data.dialects import PACKINGS, plain
from daskfactor.data.entries import (
    Piece,
    coordinate_pieces,
    text_array,
)
from daskfactor.data.folding import data_array, open_array
from daskfactor.data.frames import (
    UnclearTableError,
    asked_for,
    is_frame,
    is_long,
    long_file,
    open_frame,
)
from daskfactor.data.known import DEFAULT_DIMS, NUMERIC, Labels, SourceInfo, usable_dims
from daskfactor.data.store import BlockStore, is_blocked_store, zarr_kind
from daskfactor.data.tables import (
    Look,
    Wanted,
    has_parquet,
    look_at_csv,
    look_at_parquet,
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
ANYTHING = Wanted()
UNREADABLE = (ValueError, EOFError, SyntaxError, TokenError, zipfile.BadZipFile)
"""What NumPy raises at files that are damaged, cut off, or none of its own."""
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
"""Calls that read files which are not read here, by their endings."""
_NOTHING = re.compile(rb"^[ \t]*(%.*)?\r?\n", re.MULTILINE)
"""A blank line, or a comment."""


def open_sparse(source: Any, wanted: Wanted) -> Source:
    """Return the entries of a file or of a sparse matrix in memory.

    A table has a line for each entry, and so has an archive of three arrays.

    Raises
    ------
    DataError
        If it is dense, or cannot be read.
    """
    if isinstance(source, BlockedData) and source.is_sparse:
        return from_blocks(source.known, source.view)
    source = as_url(source, wanted.storage_options)
    if isinstance(source, str | PathLike):
        if not is_url(fspath(source)):
            source = str(Path(fspath(source).removeprefix("file://")).expanduser())
        if is_blocked_store(source):
            store = BlockStore(fspath(source))
            return from_blocks(store.known, store.read)
        form = FORMATS.get(_suffix(fspath(source)))
        if wanted.table is None and (form in (_TABLE, _PARQUET, _NPZ) or _holds_parquet(source)):
            wanted = replace(wanted, table=True)
    if isinstance(source, BlockedData):
        what = "these blocks are"
    else:
        found = open_input(source, wanted)
        if found.is_sparse:
            return found
        what = f"the {found.info.kind} input is"
    raise DataError(
        f"{what} dense, and convert is for sparse matrices; pass the data to as_blocks or sample"
    )


def open_input(data: Any, wanted: Wanted = ANYTHING) -> Source:
    """Whatever the caller passed: a table or file by what is in it, all else by its kind.

    Raises
    ------
    DataError
        If it cannot be read, or may be a table of entries as well as a matrix.
    OptionError
        If columns of a table are named, and it is none.
    """
    data = as_url(data, wanted.storage_options)
    wanted = replace(wanted, storage_options=None)
    if wanted.layer is not None or wanted.mask_var is not None:
        data = part_of(data, wanted.layer, wanted.mask_var)
        wanted = replace(wanted, layer=None, mask_var=None)
    if isinstance(data, str | PathLike) and is_readable_file(fspath(data)):
        data = read_matrix(fspath(data), wanted)
    if type(data).__module__.startswith(("dask.dataframe", "dask_expr")):
        raise DataError(
            "a dask DataFrame is read as a whole: pass frame.compute(), or write it as Parquet, "
            "which is read piece by piece, and pass the path"
        )
    if is_frame(data):
        return open_frame(data, wanted)
    array = data_array(data)
    if array is not None and wanted.values is None and not wanted.table:
        return open_array(array, wanted.rows, wanted.columns)
    refuse_columns(data, wanted)
    return open_source(data)


def opened_again(data: Any, source: Mapping[str, Any]) -> Any:
    """What a run was made from, found again: the same part, or the same columns, of it.

    ``source`` is what the run tells of it, see `SourceInfo.to_dict`.
    """
    part = source.get("layer"), source.get("mask_var")
    if any(part) and is_annotated(data):
        return part_of(data, *part)
    path = isinstance(data, str | PathLike) and is_readable_file(fspath(data))
    told = Wanted(**(source.get("table") or {"table": False}))
    if is_frame(data) or (path and told.table is None):
        return open_input(data, told)
    return read_matrix(fspath(data), told) if path else data


def refuse_columns(data: Any, wanted: Wanted) -> None:
    """Refuse columns of a table, or a part of an AnnData, that are asked for of what is none."""
    if wanted.layer is not None or wanted.mask_var is not None:
        part_of(data, wanted.layer, wanted.mask_var)
    if (asked_for(wanted) or wanted.table) and not isinstance(data, Source):
        raise OptionError(
            "rows, columns, values and table say how to read a table with a line for each entry "
            "(a DataFrame, a CSV or Parquet file), and rows and columns name dimensions of an "
            f"xarray.DataArray, got {type(data).__name__}; leave them out"
        )


def is_readable_file(text: str) -> bool:
    """Whether a location is that of a file, or of an array in one, or ends as a table does."""
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
    """Whether a location is that of a folder with such files, or with folders ``key=value``."""
    if is_url(text):
        return zarr_kind(text) is None and path_kind(text) == "folder" and bool(parquet_files(text))
    return Path(text).is_dir() and has_parquet(*file_system(text))


def _suffix(location: str) -> str:
    """The ending that says what is in a file, whether or not it is compressed."""
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


def read_matrix(text: str, wanted: Wanted = ANYTHING) -> Any:
    """The matrix in a file or store that `sample` does not read by itself, opened or read.

    ``file.npz:name`` (or ``file.nc:name``, ``file.zarr:name``) picks one array of several, and
    ``file.h5ad:name`` a layer of an AnnData; a file whose own name has a colon wins. What
    `sample` reads by its location is left to it. A table with a line for each entry is a
    `Source`.

    Raises
    ------
    DataError
        If the file holds no matrix, or not the one that was named.
    """
    location, name = part_in(text)
    suffix = _suffix(location)
    form = FORMATS.get(suffix)
    if not is_url(text) and not Path(location).exists():
        raise DataError(f"{location} does not exist; give a file or store: {ARRAYS}")
    if (form is None or not is_url(text)) and _holds_parquet(text):
        form = _PARQUET
    _refuse_foreign(location)
    annotated = open_annotated(location, name)
    if annotated is not None:
        return annotated
    if form is None and suffix not in NETCDF and is_hdf5(location):
        form = _HDF5
    if form is _HDF5 and is_netcdf(location):
        form = None
    folder = matrix_in(text)
    if folder is not None:
        return open_matrix_market(folder)
    if form is not None and form.look is not None and form.entries is not None and name is None:
        look = form.look(text, wanted)
        try:
            long = is_long(text, look.names, look.labelled, look.has_keys, wanted)
        except UnclearTableError as error:
            if look.fault is None:
                raise
            raise DataError(look.fault) from error
        if long:
            return long_file(text, look, form.entries(text, wanted), wanted)
    if location.lower().endswith(PACKINGS) and form not in (_TABLE, _MATRIX_MARKET):
        raise DataError(
            f"{location} is compressed, which is read of tables and .mtx files alone, if it is "
            "called as these are (name.csv.gz); unpack it, and pass what was in it"
        )
    if form is not None:
        if name is not None and form not in (_NPZ, _HDF5):
            raise DataError(
                f"{location} holds one matrix, without a name, not {name!r}; give {location}"
            )
        with url_errors(location):
            return form.array(location, name, wanted)
    if name is None and zarr_kind(location) in ("blocks", "array", "run"):
        return location  # as_blocks opens it, or refuses it with the right sentence
    return _read_labelled(location, name, wanted)


def open_matrix_market(location: str) -> Source:
    """A Matrix Market file of coordinates, compressed or not, read in pieces."""
    with plain(location) as file:
        banner = file.readline(LONGEST_LINE)
        kinds = banner.decode("ascii", "replace").lower().split()
        if kinds[:2] != ["%%matrixmarket", "matrix"] or len(kinds) != 5:
            raise DataError(f"{location} is no Matrix Market file: it begins with {banner[:40]!r}")
        if kinds[2] != "coordinate" or kinds[3] == "complex":
            raise DataError(
                f"{location} holds a {kinds[2]} matrix of {kinds[3]} numbers; what is read here is "
                "coordinate real, integer or pattern"
            )
        rows, cols, entries = _sizes(location, file)
        start = file.tell()

    def pieces(add: bool) -> Iterator[Piece]:
        found = 0
        with plain(location) as file:
            file.seek(start)
            while text := file.read(TEXT_CHUNK) + file.readline(LONGEST_LINE):
                text = _NOTHING.sub(b"", text + b"\n")
                count = text.count(b"\n")
                found += count
                coo = _parsed(location, banner + b"%d %d %d\n" % (rows, cols, count) + text)
                yield from coordinate_pieces(coo.row, coo.col, coo.data)
        if found != entries:
            raise DataError(
                f"{location} says that it has {entries} entries, but has {found}; it was cut off "
                "or changed"
            )

    source = Source(
        SourceInfo("matrix market", location, lazy=True),
        (rows, cols),
        labels=Labels(
            row_coords=_labels_beside(location, "row", "rows", rows),
            col_coords=_labels_beside(location, "column", "columns", cols),
        ),
        pieces=pieces,
        entries=entries if kinds[4] == "general" else None,
    )
    return with_cells_as_rows(source, location)


def _sparse_archive(location: str, arrays: Mapping[str, Any], wanted: Wanted) -> Source:
    """Return the sparse matrix in the arrays of a NumPy archive.

    Either what scipy.sparse.save_npz writes; or compressed rows as ``data``, ``indices``,
    ``indptr``, ``shape``; or three arrays of positions and values, called row, col and data or as
    ``wanted`` says. Arrays ``row_labels`` and ``column_labels`` are labels.
    """
    dims = usable_dims(*arrays.get("dims", np.array(DEFAULT_DIMS)).tolist())
    coords = _labels(arrays, dims[0], "row_labels"), _labels(arrays, dims[1], "column_labels")
    about: dict[str, Any] = {
        "info": SourceInfo("npz", location),
        "unstored": str(arrays["unstored"]) if "unstored" in arrays else None,
    }
    if wanted.rows is None and ("format" in arrays or "indptr" in arrays):
        if "format" in arrays:
            with open_binary(location) as file:
                matrix = sparse.load_npz(file)
        else:
            parts = arrays["data"], arrays["indices"], arrays["indptr"]
            matrix = sparse.csr_array(parts, shape=tuple(arrays["shape"].tolist()))
        return replace(open_source(matrix), labels=Labels(*dims, *coords), **about)
    rows, cols, data = _triples(location, arrays, wanted)
    shape = tuple(arrays["shape"].tolist()) if "shape" in arrays else None
    return Source(
        shape=shape,
        labels=Labels() if shape is None else Labels(*dims, *coords),
        pieces=lambda add: coordinate_pieces(rows, cols, data),
        entries=data.size,
        **about,
    )


def label_file(target: Path, side: str) -> Path:
    """Where `export` puts the labels of one side of a Matrix Market file."""
    stem = target.name.removesuffix(".gz").removesuffix(".bz2").removesuffix(".mtx")
    return target.with_name(f"{stem}.{side}.txt")


def _why(error: BaseException, location: str) -> str:
    """What NumPy says, but for advice to load what may be anything."""
    foreign = any(word in str(error) for word in ("pickle", "Python objects"))
    text = error_summary(error, location) if is_url(location) else str(error)
    return "it holds no numbers, or is no file of NumPy's" if foreign else text


@contextmanager
def _archive(location: str) -> Iterator[Any]:
    """A NumPy archive, whose arrays together are no larger than memory."""
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
            f"{location} is no NumPy archive that can be read: {_why(error, location)}"
        ) from safe_cause(error, location)


def _matrices(archive: Any) -> list[str]:
    """Return names of matrices of numbers in an archive, or of arrays of more dimensions."""
    known: dict[str, tuple[int, str]] = {}
    for name in archive.files:
        with archive.zip.open(f"{name}.npy") as file:
            shape, _, dtype = npy_header(file)
            known[name] = len(shape), dtype.kind
    if len(known) == 1:
        return list(known)
    for least, most, kinds in ((2, 2, "iuf"), (2, 99, "biuf")):
        found = [name for name, (n, kind) in known.items() if least <= n <= most and kind in kinds]
        if found:
            return found
    return []


def _read_npz(location: str, name: str | None, wanted: Wanted) -> Any:
    """Return an array of an archive, or the sparse matrix in several of them."""
    with _archive(location) as archive:
        names = list(archive.files)
        named = wanted.table or asked_for(wanted)
        kinds = {"format", "data"}, {"data", "indices", "indptr"}, {"row", "col", "data"}
        if name is None and (named or any(kind <= {*names} for kind in kinds)):
            return _sparse_archive(location, {own: archive[own] for own in names}, wanted)
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


def _read_npy(location: str, name: str | None, wanted: Wanted) -> Any:
    try:
        return npy_at(location) if is_url(location) else np.load(location, "r", False)
    except DaskfactorError:
        raise
    except UNREADABLE as error:
        raise DataError(
            f"{location} is no NumPy array file that can be read: {_why(error, location)}"
        ) from safe_cause(error, location)


def _read_parquet(location: str, name: str | None, wanted: Wanted) -> Any:
    """A table of numbers, a column for each of the matrix."""
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
    """Names of the arrays in a zarr group whose dimensions have none, which xarray refuses."""
    from daskfactor.data.careful import open_zarr

    return sorted(open_zarr(location).array_keys()) if zarr_kind(location) == "group" else []


def _dataset(location: str) -> Any:
    """What xarray reads at a location, none of its variables read."""
    import xarray as xr

    from daskfactor.data.careful import zarr_store

    if zarr_kind(location) is None:
        if not is_url(location):
            return xr.open_dataset(location, chunks={})
        return xr.open_dataset(open_binary(location), engine="h5netcdf", chunks={})
    store: Any = zarr_store(location)
    told: dict[str, Any] = {"engine": "zarr", "group": store.inside, "chunks": {}}
    try:  # a server of files has no list of them
        return xr.open_dataset(store, consolidated=is_url(location), **told)
    except (KeyError, ValueError):
        return xr.open_dataset(store, consolidated=False, **told)


def _read_labelled(location: str, name: str | None, wanted: Wanted) -> Any:
    """A variable of a file that xarray reads; one of more dimensions, if some are named."""
    try:
        dataset = _dataset(location)
    except DaskfactorError:
        raise
    except Exception as error:  # every backend has errors of its own
        try:
            arrays = _bare_arrays(location)
        except Exception:  # noqa: BLE001 - of arrays that zarr refuses it tells nothing more
            arrays = []
        if name in arrays:
            return child(location, name)
        if arrays:
            raise DataError(
                f"{location} holds {len(arrays)} zarr array{'s' if len(arrays) > 1 else ''} "
                f"({', '.join(arrays)}); name one as {location}:NAME"
            ) from error
        reason = " ".join(str(error).split())[:200]
        told = f". xarray says: {reason}"
        if "did not find a match" in reason:
            told = _if_text(location)
        raise DataError(f"{location} cannot be read; give {ARRAYS}{told}") from safe_cause(
            error, location
        )
    # A store lists its arrays in no order of its own.
    names = sorted(map(str, dataset.data_vars))
    bounds = {own.attrs.get("bounds") for own in dataset.variables.values()}
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
    """How files with one ending are read.

    ``array`` reads a matrix, of several the one with a name. Of a table ``look`` finds the
    columns, and ``entries`` reads one with a line for each entry.
    """

    array: Callable[[str, str | None, Wanted], Any]
    look: Callable[[str, Wanted], Look] | None = None
    entries: Callable[[str, Wanted], Source] | None = None


_TABLE = Format(lambda location, name, wanted: read_table(location), look_at_csv, open_csv)
_PARQUET = Format(_read_parquet, look_at_parquet, open_parquet)
_HDF5 = Format(lambda location, name, wanted: read_hdf5(location, name))
_NPZ = Format(_read_npz)
_MATRIX_MARKET = Format(lambda location, name, wanted: open_matrix_market(location))

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
    """The entries in some lines, read as if they were a file of their own."""
    from scipy.io import mmread

    # From 1.18 on SciPy warns where this is left open, before 1.15 it does not know it.
    known = "spmatrix" in signature(mmread).parameters
    options: dict[str, Any] = {"spmatrix": False} if known else {}
    try:
        return mmread(BytesIO(text), **options)
    except Exception as error:
        raise DataError(f"{location} cannot be read as Matrix Market: {error}") from error


def _labels_beside(location: str, dim: str, side: str, size: int) -> dict[str, NDArray[Any]]:
    beside = label_file(Path(location), side)
    if is_url(location) or not beside.is_file():
        return {}
    names = beside.read_text(encoding="utf-8").splitlines()
    if len(names) != size:
        raise DataError(
            f"{beside} has {len(names)} labels for {size} {side} of {location}; correct it, or "
            "move it away"
        )
    return {dim: text_array(names)}


def _labels(arrays: Mapping[str, NDArray[Any]], dim: str, name: str) -> dict[str, NDArray[Any]]:
    if name not in arrays:
        return {}
    array = arrays[name]
    return {dim: np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array}


def _triples(
    location: str, arrays: Mapping[str, NDArray[Any]], wanted: Wanted
) -> list[NDArray[Any]]:
    """Rows, columns and values of an archive that holds an array of each."""
    names = []
    for choice, usual in (
        (wanted.rows, ("row", "rows")),
        (wanted.columns, ("col", "cols", "column", "columns")),
        (wanted.values, ("data", "values", "value")),
    ):
        allowed = usual if choice is None else (str(choice),)
        found = [name for name in allowed if name in arrays]
        if not found:
            raise DataError(
                f"{location} has no array {' or '.join(allowed)}; it has {', '.join(arrays)}; name "
                "the arrays with rows, columns and values"
            )
        names.append(found[0])
    shapes = [arrays[name].shape for name in names]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise DataError(
            f"the arrays {', '.join(names)} of {location} have shapes {shapes[0]}, {shapes[1]} "
            f"and {shapes[2]}; they must be as long as each other"
        )
    return [arrays[name] for name in names]
