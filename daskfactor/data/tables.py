"""Tables of triples: CSV, Parquet and Matrix Market files, read in pieces.

A table has a column of row keys, one of column keys and, unless its lines are
only counted, one of values. Keys are whole numbers or texts.
"""

import difflib
from collections.abc import Iterator, Sequence
from csv import reader as csv_reader
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.keys import Coded, Keys
from daskfactor.data.labels import Labels, SourceInfo, usable_dims
from daskfactor.data.sparse_source import PIECE, KeysAreText, Piece, SparseSource
from daskfactor.errors import DataError, OptionError

Column = str | int

MISSING = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "none", "?"]
DELIMITERS = ",\t;| "
CSV_BLOCK = 2**24
MOST_LISTED = 20


@dataclass(frozen=True)
class Wanted:
    """Which columns of a table: names, positions from 0, or None for the usual ones.

    ``values`` False counts lines. ``header`` says whether the first line of a CSV file
    holds names; None finds out.
    """

    rows: Column | None = None
    columns: Column | None = None
    values: Column | bool | None = None
    header: bool | None = None


def open_parquet(location: str, wanted: Wanted) -> SparseSource:
    """A Parquet file, or a folder of them in the order of their names."""
    pa = require("pyarrow", "tables", "Parquet files")
    import pyarrow.parquet as pq

    paths = _parquet_files(location)
    try:
        with pq.ParquetFile(opened(paths[0])) as file:
            schema = file.schema_arrow
        entries = sum(pq.read_metadata(opened(path)).num_rows for path in paths)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(location, error) from error
    names = _chosen(location, schema.names, wanted)
    _check_types(pa, location, names, schema)
    texts = [name for name in names[:2] if _is_text(pa, schema.field(name).type)]

    def pieces(values: bool, add: bool) -> Iterator[Piece]:
        read = list(dict.fromkeys(names if values else names[:2]))
        for path in paths:
            try:
                with pq.ParquetFile(opened(path), read_dictionary=texts) as file:
                    for batch in file.iter_batches(PIECE, columns=read):
                        yield _piece(location, batch, names, values)
            except (pa.ArrowException, KeyError) as error:
                raise _unreadable(path, error) from error

    return SparseSource(
        SourceInfo("parquet", location, lazy=True), pieces, labels=_named(names), entries=entries
    )


def open_csv(location: str, wanted: Wanted) -> SparseSource:
    """A CSV, TSV or other delimited text file, compressed or not."""
    pa = require("pyarrow", "tables", "CSV files")
    from pyarrow import csv

    skipped, lines = _first_lines(location)
    if not lines:
        raise DataError(f"{location} is empty; a table with columns of keys is needed")
    delimiter = max(DELIMITERS, key=lines[0].count)
    fields = [_fields(line, delimiter) for line in lines]
    header = _has_header(fields, wanted) if wanted.header is None else wanted.header
    given = fields[0] if header else [f"f{number}" for number in range(len(fields[0]))]
    if len(set(given)) < len(given):
        raise DataError(f"{location} has two columns of one name in its header: {', '.join(given)}")
    names = _chosen(location, given, wanted)
    types: dict[str, Any] = {name: pa.float64() for name in names[2:]}

    def pieces(values: bool, add: bool) -> Iterator[Piece]:
        read = list(dict.fromkeys(names if values else names[:2]))
        convert = csv.ConvertOptions(
            include_columns=read,
            column_types={name: types[name] for name in read if name in types},
            null_values=MISSING,
        )
        shape = csv.ReadOptions(
            block_size=CSV_BLOCK, column_names=given, skip_rows=skipped + header
        )
        parse = csv.ParseOptions(delimiter=delimiter)
        try:
            with csv.open_csv(_stream(pa, location), shape, parse, convert) as reader:
                for batch in reader:
                    if types.keys().isdisjoint(names[:2]) and _needs_text(pa, batch, names):
                        raise KeysAreText
                    yield _piece(location, batch, names, values)
        except pa.ArrowInvalid as error:
            if "conversion error to int64" in str(error):
                raise KeysAreText from error
            raise _unreadable(location, error) from error

    def as_text() -> None:
        types.update(dict.fromkeys(names[:2], pa.string()))

    return SparseSource(
        SourceInfo("csv", location, lazy=True),
        pieces,
        labels=_named(names, header),
        as_text=as_text,
    )


def require(module: str, extra: str, what: str) -> Any:
    """An optional library, or a sentence on how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise OptionError(
            f"{what} are read with {module}, which is not installed here: "
            f"run  pip install 'daskfactor[{extra}]'"
        ) from error


def opened(location: str) -> Any:
    """What a reader takes: a local path as it is, anything else as an open file."""
    if "://" not in location:
        return location
    import fsspec

    return fsspec.open(location, "rb").open()


def _parquet_files(location: str) -> list[str]:
    """The file itself, or those of a folder; what begins with a dot or underscore is no data."""
    import fsspec

    system, path = fsspec.core.url_to_fs(location)
    if not system.exists(path):
        raise DataError(f"{location} does not exist")
    if not system.isdir(path):
        return [location]
    found = [
        name
        for name in sorted(system.find(path))
        if name.endswith((".parquet", ".pq")) and not name.rpartition("/")[2].startswith(("_", "."))
    ]
    if not found:
        raise DataError(f"there is no .parquet file in {location}")
    return [system.unstrip_protocol(name) if "://" in location else name for name in found]


def _stream(pa: Any, location: str) -> Any:
    kind = compression_of(location) or None
    return pa.input_stream(opened(location), compression=kind)


def compression_of(location: str) -> str | None:
    """How a text file is compressed, from its name."""
    endings = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
    return next((kind for end, kind in endings.items() if location.lower().endswith(end)), None)


def _first_lines(location: str) -> tuple[int, list[str]]:
    """How many lines of comment a text file begins with, and the two lines after them."""
    import pyarrow as pa

    try:
        with _stream(pa, location) as stream:
            text = stream.read(2**16).decode("utf-8-sig", "replace")
    except OSError as error:
        raise _unreadable(location, error) from error
    lines = text.splitlines()
    comments = next((n for n, line in enumerate(lines) if not line.startswith(("#", "%"))), 0)
    return comments, lines[comments : comments + 2]


def _fields(line: str, delimiter: str) -> list[str]:
    return [field.strip() for field in next(csv_reader([line], delimiter=delimiter), [])]


def _has_header(lines: list[list[str]], wanted: Wanted) -> bool:
    """Whether the first line holds names: it does if a number is not where one should be."""
    first = lines[0]
    if any(isinstance(column, str) for column in (wanted.rows, wanted.columns, wanted.values)):
        return True
    if wanted.values is not False and len(first) > 2:
        place = wanted.values if type(wanted.values) is int else 2
        return not (place < len(first) and _is_number(first[place]))
    return not all(_is_number(field) for field in first)


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return field in MISSING
    return True


def _chosen(location: str, given: Sequence[str], wanted: Wanted) -> list[str]:
    """Names of the columns of row keys, column keys and, unless lines are counted, values."""
    names = [_column(location, given, wanted.rows, 0, "rows")]
    names.append(_column(location, given, wanted.columns, 1, "columns"))
    usual = wanted.values is None or wanted.values is True
    if not (wanted.values is False or (usual and len(given) == 2)):
        place = None if usual else wanted.values
        names.append(_column(location, given, place, 2, "values"))
    if len(set(names)) < len(names):
        raise OptionError(
            f"rows, columns and values need different columns, got {', '.join(names)}; "
            f"{location} has {_listing(given)}"
        )
    return names


def _column(
    location: str, given: Sequence[str], choice: Column | None, usual: int, role: str
) -> str:
    place = usual if choice is None else choice
    if isinstance(place, str):
        if place in given:
            return place
        if place.isdigit() and int(place) < len(given):
            return given[int(place)]
        near = difflib.get_close_matches(place, given, 1, 0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DataError(
            f"{location} has no column {place!r} for {role}; {hint}it has {_listing(given)}"
        )
    if not 0 <= place < len(given):
        raise DataError(
            f"{location} has no column at position {place} for {role}; it has {_listing(given)}; "
            "choose columns with rows, columns and values"
        )
    return given[place]


def _listing(given: Sequence[str]) -> str:
    shown = ", ".join(given[:MOST_LISTED])
    more = f" and {len(given) - MOST_LISTED} more" if len(given) > MOST_LISTED else ""
    return f"the columns {shown}{more}" if len(given) > 1 else f"the single column {shown}"


def _check_types(pa: Any, location: str, names: list[str], schema: Any) -> None:
    for name in names[:2]:
        kind = schema.field(name).type
        if pa.types.is_floating(kind) or pa.types.is_nested(kind):
            raise DataError(
                f"column {name!r} of {location} holds {kind}; keys must be whole numbers or "
                "texts; convert it, or choose others with rows and columns"
            )
    for name in names[2:]:
        kind = schema.field(name).type
        numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if not (numeric or pa.types.is_boolean(kind) or pa.types.is_decimal(kind)):
            raise DataError(
                f"column {name!r} of {location} holds {kind}; values must be numbers; choose "
                f"another with values, or values=False (--count) to count lines; it has "
                f"{_listing(schema.names)}"
            )


def _is_text(pa: Any, kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(pa, kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _needs_text(pa: Any, batch: Any, names: list[str]) -> bool:
    kinds = [batch.schema.field(name).type for name in names[:2]]
    return any(not (pa.types.is_integer(kind) or _is_text(pa, kind)) for kind in kinds)


def _named(names: list[str], header: bool = True) -> Labels:
    """Dimensions called like the columns of the keys, where they have names."""
    return Labels(*usable_dims(names[0], names[1])) if header else Labels()


def _piece(location: str, batch: Any, names: list[str], values: bool) -> Piece:
    rows = _keys(location, names[0], batch.column(names[0]))
    cols = _keys(location, names[1], batch.column(names[1]))
    if not values:
        return Piece(rows, cols, None)
    if len(names) == 2:
        return Piece(rows, cols, np.ones(batch.num_rows, np.float32))
    return Piece(rows, cols, _values(batch.column(names[2])))


def _keys(location: str, name: str, array: Any) -> Keys:
    import pyarrow as pa

    if array.null_count:
        raise DataError(
            f"{array.null_count} lines of {location} have nothing in the key column {name!r}; "
            "remove them, or fill it in"
        )
    if pa.types.is_integer(array.type):
        numbers = array.to_numpy()
        if numbers.dtype == np.uint64 and numbers.size and numbers.max() >= 2**63:
            raise DataError(
                f"the key column {name!r} of {location} has numbers above 2**63; convert it to text"
            )
        return np.asarray(numbers, np.int64)
    if not pa.types.is_dictionary(array.type):
        array = (array if _is_text(pa, array.type) else array.cast(pa.string())).dictionary_encode()
    names = array.dictionary.cast(pa.string()).to_pylist()
    return Coded(array.indices.to_numpy(), names)


def _values(array: Any) -> NDArray[Any]:
    """Numbers, NaN where there is nothing."""
    import pyarrow as pa

    plain = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
    if array.null_count or not plain:
        array = array.cast(pa.float64())
    found: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return found.astype(np.float32) if found.dtype == np.float16 else found


def _unreadable(location: str, error: BaseException) -> DataError:
    reason = " ".join(str(error).split())[:200]
    return DataError(f"{location} cannot be read as a table: {reason}")
