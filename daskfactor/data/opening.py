"""Open any input as a `Source`: a location by its kind, an object by its type.

To add a format of files, write a module with the function that reads it, and add an entry to
`FORMATS`. To add a type of objects, add an entry to `OBJECTS`, or to
`daskfactor.data.adapters.MATRICES` if it is a plain matrix.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from daskfactor.checks import require
from daskfactor.data.adapters import (
    MATRICES,
    Kind,
    Source,
    find_kind,
    from_annotated,
    from_blocks,
)
from daskfactor.data.annotated import open_annotated, part_of
from daskfactor.data.blocks import BlockedData
from daskfactor.data.datasets import ARRAYS, read_file, read_group
from daskfactor.data.long_tables import (
    UnclearTableError,
    is_frame,
    is_long,
    long_file,
    names_columns,
    open_frame,
)
from daskfactor.data.matrix_market import open_matrix_market
from daskfactor.data.numpy_files import read_npy, read_npz
from daskfactor.data.places import find_place, parquet_files
from daskfactor.data.stacking import data_array, open_array
from daskfactor.data.store import BlockStore
from daskfactor.data.tables import (
    ReadOptions,
    TableColumns,
    inspect_csv,
    inspect_parquet,
    open_csv,
    open_parquet,
    read_table,
)
from daskfactor.data.tenx import is_hdf5, is_netcdf, read_hdf5
from daskfactor.errors import DaskfactorError, DataError, OptionError, StoreError
from daskfactor.machine import available_memory
from daskfactor.urls import (
    PACKINGS,
    Location,
    check_options,
    error_summary,
    locate,
    safe_cause,
    url_errors,
)

ANYTHING = ReadOptions()
DIMENSIONS = frozenset(["rows", "columns"])
TABLE = frozenset(["rows", "columns", "values", "table"])
PART = frozenset(["layer", "mask_var"])
"""Read options that a kind of input may take."""


def open_source(V: Any, options: ReadOptions = ANYTHING, as_table: bool = False) -> Source:
    """Return the source of any input: an object, or a path or URL.

    Parameters
    ----------
    V
        The input.
    options
        How to read it.
    as_table
        True if a table in a file has a line for each entry, unless ``options`` say that it has not.

    Raises
    ------
    DataError
        If it cannot be read, or could be a table of entries as well as a matrix.
    OptionError
        If options are not for such an input.
    """
    check_options(options.storage_options, [V])
    if isinstance(V, str | PathLike):
        V = load(locate(V), options, as_table)  # what was found there before may have changed
    return open_object(V, options)


def reopen(V: Any, described: Mapping[str, Any]) -> Any:
    """Return the data that a run was made from, with the same layer, mask or columns.

    ``described`` is the dict that the run stores, see `SourceInfo.to_dict`.
    """
    columns = ReadOptions(**(described.get("table") or {"table": False}))
    part = {name: described.get(name) for name in PART}
    if isinstance(V, str | PathLike):
        location = Location(V)
        takes = format_of(location.divide()[0]).takes
        V = load(location, columns if takes >= TABLE else ANYTHING)
    if any(part.values()) and object_kind(V).takes >= PART:
        return part_of(V, **part)
    return open_frame(V, columns) if is_frame(V) else V


def refuse_options(data: Any, options: ReadOptions, takes: frozenset[str] = frozenset()) -> None:
    """Refuse options for a part of an AnnData, or for columns of a table, unless data take them."""
    got = str(data) if isinstance(data, str | PathLike) else type(data).__name__
    if not takes >= PART and (options.layer is not None or options.mask_var is not None):
        option = "mask_var" if options.layer is None else "layer"
        raise OptionError(
            f"{option} is for AnnData, an object or a file of one, got {got}; leave it out"
        )
    if takes >= TABLE or (takes >= DIMENSIONS and options.values is None and not options.table):
        return
    if names_columns(options) or options.table:
        raise OptionError(
            "rows, columns, values and table say how to read a table with a line for each entry "
            "(a DataFrame, a CSV or Parquet file), and rows and columns name dimensions of an "
            f"xarray.DataArray, got {got}; leave them out"
        )


# -- objects --------------------------------------------------------------------------------


def open_object(data: Any, options: ReadOptions = ANYTHING) -> Source:
    """Return the source of an object in memory, or of one that `load` has opened."""
    kind = object_kind(data)
    refuse_options(data, options, kind.takes)
    return kind.read(data, options) if kind.takes else kind.read(data)


def object_kind(data: Any) -> Kind:
    """Return the table entry of an object."""
    return FRAME if is_frame(data) else find_kind(data, OBJECTS)


def _open_part(data: Any, options: ReadOptions) -> Source:
    return from_annotated(part_of(data, options.layer, options.mask_var))


def _open_labelled(data: Any, options: ReadOptions) -> Source:
    return open_array(data_array(data), options.rows, options.columns)


def _open_store(store: BlockStore) -> Source:
    return replace(from_blocks(store.known, store.read), store=store)


def _open_blocks(data: BlockedData) -> Source:
    if not data.is_sparse:
        raise DataError("these blocks are dense; pass the data that they were made from")
    return from_blocks(data.known, data.view)


def _open_frame(data: Any, options: ReadOptions) -> Source:
    if type(data).__module__.startswith(("dask.dataframe", "dask_expr")):
        raise DataError(
            "a dask DataFrame is read as a whole: pass frame.compute(), or write it as Parquet, "
            "which is read piece by piece, and pass the path"
        )
    return open_frame(data, options)


FRAME = Kind("", "", _open_frame, TABLE)
"""Tables in memory, of any library."""
OBJECTS = (
    Kind("daskfactor.data.adapters", "Source", lambda source, _: source, TABLE | PART),
    Kind("daskfactor.data.store", "BlockStore", _open_store),
    Kind("daskfactor.data.blocks", "BlockedData", _open_blocks),
    Kind("daskfactor.data.annotated", "Annotated", from_annotated),
    Kind("daskfactor.data.annotated", "AnnotatedFile", _open_part, PART),
    Kind("anndata", "AnnData", _open_part, PART),
    Kind("anndata", "Raw", _open_part, PART),
    Kind("xarray", "DataArray", _open_labelled, DIMENSIONS),
    Kind("xarray", "Dataset", _open_labelled, DIMENSIONS),
    *MATRICES,
)
"""Supported types of objects."""


# -- locations ------------------------------------------------------------------------------


class Format(NamedTuple):
    """Format of files or folders.

    Attributes
    ----------
    load
        Function of location, name and options that returns an object of one of the `OBJECTS`.
    endings
        Endings of its files.
    takes
        Options that it takes.
    holds_several
        True if it may hold several matrices, of which ``location:name`` selects one.
    may_be_packed
        True if its files may be compressed.
    lists_entries
        True if `convert` reads it as a table with a line for each entry.
    """

    load: Callable[[Location, str | None, ReadOptions], Any]
    endings: tuple[str, ...] = ()
    takes: frozenset[str] = frozenset()
    holds_several: bool = False
    may_be_packed: bool = False
    lists_entries: bool = False


def load(
    place: str | PathLike[str], options: ReadOptions = ANYTHING, as_table: bool = False
) -> Any:
    """Return the object at a path or URL, which is not read yet if its library can do that.

    ``file.npz:name`` (or ``file.nc:name``, ``file.zarr:name``) selects one array of several, and
    ``file.h5ad:name`` a layer of an AnnData. A table with a line for each entry is a `Source`, see
    `open_source` for ``as_table``.

    Raises
    ------
    DataError
        If there is no matrix, or none of that name.
    StoreError
        If a store cannot be opened.
    """
    location, name = Location.of(place, options.storage_options).divide()
    file_format = format_of(location)
    if as_table and options.table is None and file_format.lists_entries:
        options = replace(options, table=True)
    if file_format is not FORMATS["nothing"] or Path(location).is_dir():
        refuse_options(location, options, file_format.takes)
    is_file = location.is_url or Path(location).is_file()
    if is_file and location.lower().endswith(PACKINGS) and not file_format.may_be_packed:
        raise DataError(
            f"{location} is compressed, which is supported for tables and .mtx files only, by "
            "their names (name.csv.gz); unpack it, and pass the unpacked file"
        )
    if name is not None and not file_format.holds_several:
        raise DataError(
            f"{location} holds one matrix, without a name, not {name!r}; give {location}"
        )
    with url_errors(location):
        return file_format.load(location, name, options)


def format_of(location: Location) -> Format:
    """Return the format of what is at a location: by its ending, or else by its contents."""
    by_ending = BY_ENDING.get(location.suffix)
    if location.is_url and by_ending not in (None, FORMATS["parquet"]):
        return by_ending
    kind = find_place(location).kind
    if kind != "file":
        return FORMATS["nothing" if kind == "folder" else kind]
    if by_ending is not None:
        return by_ending
    _refuse_foreign(location)
    return FORMATS["hdf5" if is_hdf5(location) else "netcdf"]


def _load_table(
    inspect: Callable[[Location, ReadOptions], TableColumns],
    entries: Callable[[Location, ReadOptions], Source],
    read_all: Callable[[Location], Any],
    location: Location,
    name: str | None,
    options: ReadOptions,
) -> Any:
    """Return a table: a `Source` if it has a line for each entry, else its matrix."""
    columns = inspect(location, options)
    try:
        long = is_long(location, columns.names, columns.labelled, columns.has_keys, options)
    except UnclearTableError as error:
        if columns.fault is None:
            raise
        raise DataError(columns.fault) from error
    if long:
        return long_file(location, columns, entries(location, options), options)
    return read_all(location)


def _read_parquet(location: Location) -> Any:
    """Return a table of numbers with a column for each column of the matrix."""
    pa = require("pyarrow", "tables", "Parquet files")
    import pyarrow.parquet as pq

    parts = []
    for path in parquet_files(location):
        with pq.ParquetFile(path.path_or_file()) as file:
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


def _load_hdf5(location: Location, name: str | None, options: ReadOptions) -> Any:
    if is_netcdf(location):
        return read_file(location, name, options)
    return read_hdf5(location, name)


def _load_annotated(location: Location, name: str | None, options: ReadOptions) -> Any:
    return open_annotated(location, name)


def _refuse_run(location: Location, name: str | None, options: ReadOptions) -> Any:
    raise DataError(
        f"{location} is a run of daskfactor, not data; pass the data that it was made from, or "
        "read its results with open_run, or continue it with resume"
    )


def _refuse_nothing(location: Location, name: str | None, options: ReadOptions) -> Any:
    """Raise the error for a location without anything to read."""
    if not location.is_url and (name is not None or location.suffix in BY_ENDING):
        if Path(location).is_dir():
            raise DataError(
                f"{location} is a folder without Parquet files, counts of 10x Genomics or a zarr "
                "store that can be opened; pass a file in it"
            )
        raise DataError(f"{location} does not exist; give a file or store: {ARRAYS}")
    error = find_place(location).error or FileNotFoundError()
    if isinstance(error, DaskfactorError):
        raise error
    nothing = isinstance(error, FileNotFoundError)
    reason = "there is nothing of that kind" if nothing else error_summary(error, location)
    raise StoreError(
        f"no zarr array can be opened at {location} ({reason}); check the path, or pass that "
        "of an array or a blocked store that exists and can be read"
    ) from safe_cause(error, location)


FORMATS = {
    "table": Format(
        partial(_load_table, inspect_csv, open_csv, read_table),
        (".csv", ".tsv", ".txt", ".dat", ".data", ".tab", ".inter"),
        TABLE,
        may_be_packed=True,
        lists_entries=True,
    ),
    "parquet": Format(
        partial(_load_table, inspect_parquet, open_parquet, _read_parquet),
        (".parquet", ".pq"),
        TABLE,
        lists_entries=True,
    ),
    "matrix market": Format(
        lambda location, name, options: open_matrix_market(location),
        (".mtx", ".mm"),
        may_be_packed=True,
    ),
    "npy": Format(read_npy, (".npy",)),
    "npz": Format(read_npz, (".npz",), TABLE, holds_several=True, lists_entries=True),
    "hdf5": Format(_load_hdf5, (".h5", ".hdf5", ".hspy"), DIMENSIONS, holds_several=True),
    "netcdf": Format(read_file, (".nc", ".nc4", ".cdf"), DIMENSIONS, holds_several=True),
    "anndata": Format(_load_annotated, (".h5ad",), PART, holds_several=True),
    # Without an ending, by their contents, see `daskfactor.data.places.Kind`:
    "blocks": Format(lambda location, name, options: BlockStore(location)),
    "array": Format(lambda location, name, options: find_place(location).node),
    "group": Format(read_group, (), DIMENSIONS, holds_several=True),
    "10x": Format(
        lambda location, name, options: open_matrix_market(find_place(location).files[0])
    ),
    "run": Format(_refuse_run, (), TABLE | PART),
    "nothing": Format(_refuse_nothing, holds_several=True),
}
"""Formats by name, or by the kind of a place."""
BY_ENDING = {ending: one for one in FORMATS.values() for ending in one.endings}


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


def _refuse_foreign(location: Location) -> None:
    """Refuse a file that another library reads, and name the call."""
    call = OF_OTHER_LIBRARIES.get(location.suffix)
    if location.suffix == ".mat" and is_hdf5(location):  # from version 7.3 on
        call = "h5py.File({path!r})['NAME'][...].T"
    if call is not None and not location.is_url:
        raise DataError(
            f"files like {location} are not read here; pass what "
            f"{call.format(path=str(location))} gives, or write that as .csv, .npz or .parquet"
        )
