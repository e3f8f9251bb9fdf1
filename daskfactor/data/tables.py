"""Tables in files: lines of row key, column key and value, read in pieces; and dense tables.

A long table has a column of row keys, one of column keys and, unless its lines are only counted,
one of values. Keys are whole numbers or texts. A dense table has a line of numbers for each row of
the matrix.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from daskfactor.checks import require, warn
from daskfactor.data.adapters import Source
from daskfactor.data.columns import keys_of, listed, values_of, without_keys
from daskfactor.data.coo import PIECE, Keys, Piece
from daskfactor.data.dialects import (
    MISSING,
    UNIT,
    Dialect,
    blocks_of_text,
    dialect_of,
    fault_of,
    has_decimal_comma,
    is_number,
    lines_of,
    number,
    numbers,
    plain,
    readable,
    unreadable,
)
from daskfactor.data.labels import DEFAULT_DIMS, Labels, usable_dims
from daskfactor.data.places import parquet_files
from daskfactor.data.statistics import SourceInfo
from daskfactor.errors import DataError, DataWarning, OptionError

Column = str | int

CSV_BLOCK = 2**24
COUNTED = 0.0, 1.0
"""First numbers of column names that are mere positions."""
_CODE = re.compile(r"0\d+")
_NO_GENES = re.compile(
    r"__(no_feature|ambiguous|too_low_aQual|not_aligned|alignment_not_unique)"
    r"|N_(unmapped|multimapping|noFeature|ambiguous)|_total_\w+"
)
"""Row names under which HTSeq, STAR and QoRTs count reads without a gene."""
UNCLEAR_WIDTH = 3
"""Number of columns at which a table may be a matrix or a long table."""
INDEX_LEVEL = "__index_level_"
"""Prefix of the column in which pandas stores an unnamed index."""


@dataclass(frozen=True)
class ReadOptions:
    """Options that select what to read of an input.

    Columns of a table are names, positions from 0, or None for the default ones; ``values`` False
    counts lines. ``header`` is True if the first line of a CSV file holds names; None detects it.
    ``layer`` is a layer of an AnnData, in place of X, and ``mask_var`` selects its variables.
    ``table`` is True for a table with a line for each entry, and False for one with a line for each
    row of a matrix; None decides by whether columns are named. ``storage_options`` are those of
    fsspec for a URL.
    """

    rows: Any = None
    columns: Any = None
    values: Column | bool | None = None
    header: bool | None = None
    layer: str | None = None
    mask_var: Any = None
    table: bool | None = None
    storage_options: Any = None

    @classmethod
    def of(cls, reading: Mapping[str, Any]) -> "ReadOptions":
        """Return those of some keyword arguments that are read options."""
        return cls(**{name: reading.get(name) for name in cls.__dataclass_fields__})


class TableColumns(NamedTuple):
    """Columns of a table in a file.

    ``labelled`` is True if rows have labels besides; ``has_keys`` if the first two columns may be
    keys (see `may_be_keys`; it matters at a width of ``UNCLEAR_WIDTH + 1`` alone). ``header`` is
    the option to read the file with. ``fault`` describes an error in one of the first lines.
    """

    names: list[str]
    labelled: bool
    has_keys: bool = False
    header: bool | None = None
    fault: str | None = None


def open_parquet(location: str, options: ReadOptions) -> Source:
    """Return the source of a Parquet file, or of a folder of them in the order of their names."""
    pa = require("pyarrow", "tables", "Parquet files")
    import pyarrow.parquet as pq

    paths = parquet_files(location)
    try:
        with pq.ParquetFile(paths[0].path_or_file()) as file:
            schema = file.schema_arrow
        entries = sum(pq.read_metadata(path.path_or_file()).num_rows for path in paths)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(location, error) from error
    names = chosen_columns(location, schema.names, options)
    texts = [name for name in names[:2] if _is_text(pa, schema.field(name).type)]

    def pieces(add: bool) -> Iterator[Piece]:
        for path in paths:
            try:
                with pq.ParquetFile(path.path_or_file(), read_dictionary=texts) as file:
                    for batch in file.iter_batches(PIECE, columns=names):
                        yield _piece(location, batch, names, schema.names)
            except (pa.ArrowException, KeyError) as error:
                raise unreadable(path, error) from error

    info = SourceInfo("parquet", location, lazy=True)
    labels = Labels(*usable_dims(*names[:2]))
    return Source(info, labels=labels, pieces=pieces, entries=entries, merges=True)


def open_csv(location: str, options: ReadOptions) -> Source:
    """Return the source of a CSV, TSV or other delimited text file, compressed or not.

    Keys of a column are whole numbers if those of the first block of lines are, else texts.

    Raises
    ------
    DataError
        If the file is damaged, or a later key is a text where those before are whole numbers.
    """
    pa = require("pyarrow", "tables", "CSV files")
    from pyarrow import csv as arrow

    dialect = dialect_of(location)
    if not dialect.lines:
        raise DataError(f"{location} is empty; a table with columns of keys is needed")
    header, all_names = _names_of(dialect, options)
    if len(set(all_names)) < len(all_names):
        raise DataError(
            f"{location} has two columns of one name in its header: {', '.join(all_names)}"
        )
    names = chosen_columns(location, all_names, options)
    # Keys are read as they are written: 007 is not 7.
    types = dict.fromkeys(names[2:], pa.float64())
    types |= dict.fromkeys(names[:2], pa.dictionary(pa.int32(), pa.string()))
    written = dict[str, str]()

    def pieces(add: bool) -> Iterator[Piece]:
        convert = arrow.ConvertOptions(
            include_columns=names, column_types=types, null_values=MISSING
        )
        parse = arrow.ParseOptions(
            delimiter=dialect.mark, quote_char=False if dialect.mark == UNIT else '"'
        )
        skipped = int(header)
        try:
            with readable(location), plain(location) as file:
                for block in blocks_of_text(file, dialect, CSV_BLOCK):
                    shape = arrow.ReadOptions(
                        block_size=max(CSV_BLOCK, len(block)),
                        column_names=all_names,
                        skip_rows=skipped,
                    )
                    skipped = 0
                    with arrow.open_csv(pa.BufferReader(block), shape, parse, convert) as reader:
                        for batch in reader:
                            yield _piece(location, batch, names, all_names, written)
        except pa.ArrowInvalid as error:
            raise unreadable(location, error) from error

    has_names = header or dialect.names is not None
    labels = Labels(*usable_dims(*names[:2])) if has_names else Labels()
    info = SourceInfo("csv", location, lazy=True)
    return Source(info, labels=labels, pieces=pieces, merges=True)


def may_be_keys(integer: bool, repeats: bool, fractional: bool) -> bool:
    """Return whether the first two columns of a table may hold keys.

    Parameters
    ----------
    integer, repeats
        True if the first column holds integers, and if it holds a value more than once.
    fractional
        True if the second column holds numbers that are not integers.
    """
    return (integer or repeats) and not fractional


def inspect_parquet(location: str, options: ReadOptions) -> TableColumns:
    """Return the columns of a Parquet file; a stored pandas index holds labels of rows."""
    pa = require("pyarrow", "tables", "Parquet files")
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(parquet_files(location)[0].path_or_file()) as file:
            schema, batch = file.schema_arrow, None
            if len(schema.names) == UNCLEAR_WIDTH + 1:
                batch = next(file.iter_batches(PIECE, columns=schema.names[:1]), None)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(location, error) from error
    index = (schema.pandas_metadata or {}).get("index_columns", [])
    labelled = any(isinstance(level, str) for level in index)
    names = [name for name in schema.names if not name.startswith(INDEX_LEVEL)]
    if batch is None:
        return TableColumns(names, labelled)
    first, second = (schema.field(name).type for name in schema.names[:2])
    repeats = len(batch.column(0).unique()) < len(batch)
    has_keys = may_be_keys(pa.types.is_integer(first), repeats, pa.types.is_floating(second))
    return TableColumns(names, labelled, has_keys)


def inspect_csv(location: str, options: ReadOptions) -> TableColumns:
    """Return the columns of a text file, by its first lines."""
    dialect = dialect_of(location)
    if not dialect.lines:
        raise DataError(f"{location} is empty")
    header, names = _names_of(dialect, options)
    width = len(names)
    # The corner above the row names may be empty, or missing altogether.
    lines = [dialect.fields(line) for line in dialect.lines if line.strip()][header:]
    first = [line[0] for line in lines]
    # pandas writes its index as an unnamed column; a mere numbering is not a label.
    counts = header and not names[0] and _numbered(first)
    counts = counts and not _counts_up(names[1:])
    corner = (not names[0] and not counts) or any(len(line) == width + 1 for line in lines)
    pairs = [line[counts : counts + 2] for line in lines if len(line) > counts + 1]
    keys = [key for key, _ in pairs]
    fractional = not all(two.isdecimal() or not is_number(two) for _, two in pairs)
    has_keys = may_be_keys(all(map(str.isdecimal, keys)), len(set(keys)) < len(keys), fractional)
    if _describes_genes(names):
        names, corner = [names[0], *names[6:]], True
    header_option = None if dialect.names is not None and options.header is None else header
    split = dialect.split(iter(dialect.lines))
    faults = (fault_of(location, dialect.skipped + line, fields, width) for line, fields in split)
    return TableColumns(
        names, header and corner, has_keys, header_option, next(filter(None, faults), None)
    )


def _names_of(dialect: Dialect, options: ReadOptions) -> tuple[bool, list[str]]:
    """Return whether the first line of a text table holds names, and the names of all columns."""
    first = dialect.fields(dialect.lines[0])
    if dialect.names is not None and options.header is None:
        return False, dialect.names
    if _has_header(first, options):
        return True, first
    return False, [f"f{at}" for at in range(len(first))]


def _describes_genes(header: Sequence[str]) -> bool:
    """Return whether a header is that of featureCounts, with five columns about each gene."""
    return list(header[1:6]) == ["Chr", "Start", "End", "Strand", "Length"]


def read_table(location: str | PathLike[str]) -> Any:
    """Read a table of numbers from text, with or without header and row names.

    Empty fields, ``NA``, ``NaN``, ``null``, ``none`` and ``?`` are missing cells. A first line is a
    header if a field other than the first is not a number; or if its first field is empty and the
    others are rising numbers, such as positions, years or wavelengths; or if it counts from 0. A
    first column holds row names if its header is empty, if a field of it is not a number, or if a
    field begins with 0 as codes do.

    Returns
    -------
    numpy.ndarray or xarray.DataArray
        With names, where there are any.

    Raises
    ------
    DataError
        If lines differ in length or a cell is no number; it names the line.
    """
    import xarray as xr

    dialect = dialect_of(location)
    lines = lines_of(location, dialect)
    if dialect.names is not None:
        lines.insert(0, (dialect.skipped, dialect.names))
    elif _describes_genes(lines[0][1]):
        warn(
            f"columns Chr to Length of {location} describe its genes, and are left out", DataWarning
        )
        lines = [(line, [*fields[:1], *fields[6:]]) for line, fields in lines]
    # A first field that is not a number may also be the name of the first row.
    tell_tale = lines[0][1][1:] or lines[0][1]
    by_numbers = _names_by_numbers(lines[0][1])
    if by_numbers and float(lines[0][1][1]) not in COUNTED:
        warn(
            f"the first line of {location} was taken for names of columns, because its first field "
            "is empty and the numbers behind it rise; if it is data, write NaN into that field",
            DataWarning,
        )
    counts = _counts_up(lines[0][1])
    if counts:
        warn(
            f"the first line of {location} was taken for names of columns, because it counts from "
            "0 on; if it is data, write a line of names before it",
            DataWarning,
        )
    names_columns = by_numbers or counts or not all(map(is_number, tell_tale))
    header = lines.pop(0)[1] if names_columns else None
    if not lines:
        raise DataError(f"{location} has a header and no line of numbers")
    width = len(lines[0][1])
    for line, fields in lines:
        if len(fields) != width:
            raise DataError(fault_of(str(location), line, fields, width))
    corner = header is not None and len(header) == width
    has_row_names = bool(corner and header and not header[0])
    first = [fields[0] for _, fields in lines]
    has_row_names = has_row_names or not all(
        is_number(field) or has_decimal_comma(field) for field in first
    )
    if not has_row_names and width > 1 and all(map(is_number, first)):
        others = (field for _, fields in lines for field in fields[1:])
        if any(map(_CODE.fullmatch, first)) and not any(map(_CODE.fullmatch, others)):
            warn(
                f"the first column of {location} is taken for labels of rows, because some of it "
                "begins with 0 as codes do; if it is data, write its numbers without leading zeros",
                DataWarning,
            )
            has_row_names = True
    summaries = [bool(has_row_names and _NO_GENES.fullmatch(name)) for name in first]
    if any(summaries) and not all(summaries):
        warn(
            f"{sum(summaries)} rows of {location} are not genes but summaries of HTSeq or STAR "
            f"({first[summaries.index(True)]}, ...), and are left out",
            DataWarning,
        )
        lines = [line for line, gone in zip(lines, summaries, strict=True) if not gone]
        first = [name for name, gone in zip(first, summaries, strict=True) if not gone]
    mark = dialect.separator
    values = np.array([numbers(str(location), *line, int(has_row_names), mark) for line in lines])
    row_dim, col_dim = DEFAULT_DIMS
    names: dict[str, Any] = {row_dim: first} if has_row_names else {}
    if header is not None:
        # Some writers leave the corner above the row names out altogether.
        names[col_dim] = header[int(has_row_names and corner) :]
        if len(names[col_dim]) != values.shape[1]:
            raise DataError(
                f"{location} has {len(names[col_dim])} names in its header, "
                f"but {values.shape[1]} columns of numbers"
            )
    return xr.DataArray(values, dims=(row_dim, col_dim), coords=names) if names else values


def _has_header(first: list[str], options: ReadOptions) -> bool:
    """Return whether the first line holds names: a number is missing where one belongs."""
    if options.header is not None:
        return options.header
    if any(isinstance(column, str) for column in (options.rows, options.columns, options.values)):
        return True
    if _names_by_numbers(first):
        return True
    if options.values is not False and len(first) > 2:
        place = options.values if type(options.values) is int else 2
        return not (place < len(first) and is_number(first[place]))
    return not all(is_number(field) for field in first)


def _names_by_numbers(first: Sequence[str]) -> bool:
    """Return whether a first line names columns by rising numbers after an empty corner."""
    if len(first) < 2 or first[0] or not all(map(is_number, first)):
        return False
    behind = list(map(number, first[1:]))
    rises = all(one < other for one, other in pairwise(behind))
    return rises and (len(behind) > 1 or behind[0] in COUNTED)


def _counts_up(first: Sequence[str]) -> bool:
    """Return whether a line is 0, 1, 2, ..., which pandas writes for unnamed columns."""
    return len(first) > 2 and _numbered(first)


def _numbered(fields: Sequence[str]) -> bool:
    """Return whether fields are 0, 1, 2, ..."""
    return list(fields) == [str(at) for at in range(len(fields))]


def chosen_columns(location: str, all_names: Sequence[str], options: ReadOptions) -> list[str]:
    """Return the names of the columns of row keys, column keys and, unless lines count, values.

    The defaults are the first columns with a name: a written index has none.
    """
    first = int(len(all_names) > 1 and not all_names[0])
    names = [_column(location, all_names, options.rows, first, "rows")]
    names.append(_column(location, all_names, options.columns, first + 1, "columns"))
    values = None if options.values is True else options.values
    if not (values is False or (values is None and len(all_names) == first + 2)):
        names.append(_column(location, all_names, values, first + 2, "values"))
    if len(set(names)) < len(names):
        raise OptionError(
            f"rows, columns and values need different columns, got {', '.join(names)}; "
            f"{location} has {listed(all_names)}"
        )
    return names


def _column(
    location: str, all_names: Sequence[str], choice: Column | None, usual: int, role: str
) -> str:
    position = usual if choice is None else choice
    if isinstance(position, str):
        if position in all_names:
            return position
        if position.isdigit() and int(position) < len(all_names):
            return all_names[int(position)]
        near = difflib.get_close_matches(position, all_names, 1, 0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DataError(
            f"{location} has no column {position!r} for {role}; {hint}it has {listed(all_names)}"
        )
    if not 0 <= position < len(all_names):
        raise DataError(
            f"{location} has no column at position {position} for {role}; it has "
            f"{listed(all_names)}; choose columns with rows, columns and values"
        )
    return all_names[position]


def _is_text(pa: Any, kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(pa, kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _written_keys(location: str, name: str, array: Any, written: dict[str, str]) -> Keys:
    """Return keys of a text file: whole numbers if all of the column look like them.

    Raises
    ------
    DataError
        If earlier keys were whole numbers, and these are not.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    codes, texts = array.indices.to_numpy(), array.dictionary
    trimmed = pc.utf8_trim_whitespace(texts)
    is_integer = np.asarray(pc.match_substring_regex(trimmed, r"^(0|-?[1-9][0-9]{0,18})$"))
    is_missing = np.asarray(pc.is_in(trimmed, pa.array(MISSING)))
    kind, others = written.get(name), np.flatnonzero(~(is_integer | is_missing))
    if kind != "text" and not others.size:
        if is_missing.any():
            raise without_keys(location, name, int(is_missing[codes].sum()))
        with suppress(pa.ArrowInvalid):  # too large
            numbers = np.asarray(pc.cast(trimmed, pa.int64()))
            written[name] = "number"
            keys: Keys = numbers[codes]
            return keys
    if kind == "number":
        text = texts[others[0]].as_py() if others.size else max(texts.to_pylist(), key=len)
        raise DataError(
            f"the key column {name!r} of {location} begins with whole numbers and has the text "
            f"{text!r} later; read it as texts: pass what pandas.read_csv({location!r}, "
            f"dtype={{{name!r}: str}}) gives"
        )
    written[name] = "text"
    if (is_empty := np.asarray(pc.equal(texts, ""))[codes]).any():
        raise without_keys(location, name, int(is_empty.sum()))
    return _keys(location, name, array)


def _piece(
    location: str,
    batch: Any,
    names: list[str],
    all_names: Sequence[str],
    written: dict[str, str] | None = None,
) -> Piece:
    """Return the entries of a batch; ``written`` collects key types of a text file by column."""
    rows, cols = (
        _keys(location, name, batch.column(name))
        if written is None
        else _written_keys(location, name, batch.column(name), written)
        for name in names[:2]
    )
    if len(names) == 2:
        return Piece(rows, cols, np.ones(batch.num_rows, np.float32))
    values = batch.column(names[2])
    import pyarrow as pa

    if pa.types.is_boolean(values.type) or pa.types.is_decimal(values.type):
        values = values.cast(pa.float64())
    return Piece(rows, cols, values_of(location, names[2], values.to_pandas(), all_names))


def _keys(location: str, name: str, array: Any) -> Keys:
    """Return the keys in a column of Arrow; types that pandas lacks become texts."""
    import pandas as pd
    import pyarrow as pa

    kind, types = array.type, pa.types
    if array.null_count:
        raise without_keys(location, name, array.null_count)
    timed = types.is_date(kind) or (types.is_timestamp(kind) and kind.tz is None)
    if types.is_integer(kind):  # files of a folder may have different types
        numbers = array.to_numpy(zero_copy_only=False)
        if numbers.dtype == np.uint64 and numbers.size and numbers.max() >= 2**63:
            raise DataError(
                f"the key column {name!r} of {location} has numbers of 2**63 or more; convert it "
                "to text"
            )
        return np.asarray(numbers, np.int64)
    if timed or types.is_floating(kind) or types.is_nested(kind):
        return keys_of(location, name, array.to_pandas(date_as_object=False))
    if not types.is_dictionary(kind):
        array = array.cast(pa.string()).dictionary_encode()
    names = pd.Index(array.dictionary.cast(pa.string()).to_pylist(), dtype=object)
    return pd.Categorical.from_codes(array.indices.to_numpy(), names)
