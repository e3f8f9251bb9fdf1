"""Long tables, with a line for each entry: their distinction from matrices, and those in memory.

A frame is a table in memory: of pandas, or of any library that exports its columns by the dataframe
interchange protocol (``__dataframe__``) or as Arrow streams (``__arrow_c_stream__``).
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import require
from daskfactor.data.adapters import Source, from_pandas
from daskfactor.data.columns import keys_of, values_of
from daskfactor.data.coo import Axis, Keys, Piece, coordinate_pieces
from daskfactor.data.labels import DEFAULT_DIMS, Labels, usable_dims
from daskfactor.data.statistics import SourceInfo
from daskfactor.data.tables import (
    UNCLEAR_WIDTH,
    ReadOptions,
    TableColumns,
    chosen_columns,
    may_be_keys,
)
from daskfactor.errors import DataError, OptionError


class UnclearTableError(DataError):
    """Error: a table that may be a matrix, or have a line for each entry."""


ROLES = ("rows", "columns", "values")


def is_long(
    table: str, names: Sequence[str], labelled: bool, has_keys: bool, options: ReadOptions
) -> bool:
    """Return whether a table has a line for each entry, not one for each row of a matrix.

    It does if options name a column of it, or if ``table`` is True.

    Parameters
    ----------
    table
        Name of the table in messages.
    names
        Names of its columns.
    labelled
        True if its rows have labels, so that no column holds keys.
    has_keys
        True if the first two named columns may hold keys: the first one integers or repeated
        values, the second one integers or texts.

    Raises
    ------
    UnclearTableError
        If it has three columns, or keys in two of four (as in ratings with times), and the
        options do not decide.
    """
    if options.table is not None or names_columns(options):
        return options.table is not False
    named = [at for at, name in enumerate(names) if name]  # a written index has no name
    if not labelled and (
        len(named) == UNCLEAR_WIDTH or (len(named) == UNCLEAR_WIDTH + 1 and has_keys)
    ):
        columns = [_called(names, at) for at in named[:UNCLEAR_WIDTH]]
        called = ", ".join(f"{role}={column}" for role, column in zip(ROLES, columns, strict=True))
        raise UnclearTableError(
            f"{table} could be a table with a line for each entry (row key, column key, value) "
            f"or a matrix of {len(named)} columns; say which: pass {called} (or table=True) if it "
            "has a line for each entry, table=False if it is a matrix"
        )
    return False


def _called(names: Sequence[str], at: int) -> str:
    """Return the name of a column, or its position if the file has no names."""
    return str(at) if names[at] == f"f{at}" else repr(names[at])


def names_columns(options: ReadOptions) -> bool:
    """Return whether options name columns of a table."""
    return (options.rows, options.columns, options.values) != (None, None, None)


def is_frame(data: object) -> bool:
    """Return whether an object is a table in memory, of any library."""
    kind = type(data)
    if hasattr(kind, "__dataframe__") or _is_stacked(data):
        return True
    return hasattr(kind, "__arrow_c_stream__") and (
        hasattr(data, "columns") or hasattr(data, "schema")
    )


def _is_stacked(data: Any) -> bool:
    """Return whether an object is a pandas.Series with two keys for each value."""
    series = getattr(sys.modules.get("pandas"), "Series", ())
    return isinstance(data, series) and data.index.nlevels == 2


def open_frame(data: Any, options: ReadOptions) -> Source:
    """Return the source of a table in memory: a matrix, or a long table.

    Raises
    ------
    DataError
        If it could be either, or keys or values cannot be used.
    OptionError
        If it lacks a column that the options name.
    """
    import pandas as pd

    is_pandas = isinstance(data, pd.DataFrame | pd.Series)
    name = f"the {type(data).__name__}"
    frame = data if is_pandas else _as_pandas(data, name)
    if _is_stacked(data):
        if options.table is False:
            raise OptionError(
                f"{name} has two keys for each value, which table=False forbids; leave table out, "
                "or pass series.unstack()"
            )
        frame = data.to_frame("value" if data.name is None else data.name)
    pairs = frame.index.nlevels == 2 and frame.shape[1] == 1 and options.table is not False
    if pairs:
        keys = [
            level or usual for level, usual in zip(frame.index.names, DEFAULT_DIMS, strict=True)
        ]
        frame = frame.rename_axis(keys).reset_index(allow_duplicates=True)
    chosen = {options.rows, options.columns, options.values} - {None}
    if options.table is not False and chosen & set(frame.index.names):
        frame = frame.reset_index()
    all_names = [str(column) for column in frame.columns]
    labelled = not (frame.index.name is None and frame.index.dtype.kind in "iu")
    has_keys = False
    if len(all_names) == UNCLEAR_WIDTH + 1:
        (first, second), types = frame.dtypes.iloc[:2], pd.api.types
        repeats = frame.iloc[:, 0].duplicated().any()
        has_keys = may_be_keys(types.is_integer_dtype(first), repeats, types.is_float_dtype(second))
    if not pairs and not is_long(name, all_names, labelled, has_keys, options):
        return from_pandas(_labelled(frame, all_names))
    if len(set(all_names)) < len(all_names):
        raise DataError(f"{name} has two columns of one name: {', '.join(all_names)}; rename one")
    names = chosen_columns(name, all_names, options)
    columns = [frame.iloc[:, all_names.index(column)] for column in names]
    return _entries(name, names, columns, all_names)


def _labelled(frame: Any, all_names: list[str]) -> Any:
    """Return the frame with its first column as index, if that holds its only labels."""
    counted = type(frame.index).__name__ == "RangeIndex" and frame.index.name is None
    if counted and len(all_names) > 1 and frame.columns.nlevels == 1:
        first = frame.iloc[:, 0]
        if _holds_names(first) and {*map(_kind, frame.dtypes[1:])} == {"number"}:
            return frame.iloc[:, 1:].set_index(first)
    return frame


def _holds_names(column: Any) -> bool:
    """Return whether a column holds texts or dates, and not numbers as objects."""
    import pandas as pd

    kinds = ("string", "categorical", "date", "datetime", "datetime64")
    return _kind(column.dtype) == "key" and pd.api.types.infer_dtype(column) in kinds


def _as_pandas(data: Any, name: str) -> Any:
    """Convert a frame of another library; texts become categories."""
    import pandas as pd

    if find_spec("pyarrow") is None and hasattr(data, "__dataframe__"):
        return pd.api.interchange.from_dataframe(data)
    pa = require("pyarrow", "tables", f"tables such as {name}")
    if hasattr(data, "__arrow_c_stream__"):
        table = pa.table(data)
    else:
        from pyarrow.interchange import from_dataframe

        table = from_dataframe(data)
    return table.to_pandas(
        strings_to_categorical=True,
        date_as_object=False,
        integer_object_nulls=True,
        ignore_metadata=not isinstance(data, pa.Table),
    )


def _kind(dtype: Any) -> str:
    letter = getattr(dtype, "kind", "O")
    if letter in "iufb":
        return "number"
    return "key" if letter in "OUSTMm" else "other"


def _entries(
    table: str, names: Sequence[str], columns: Sequence[Any], all_names: Sequence[str]
) -> Source:
    """Return the source of columns of keys and, unless lines are counted, of values."""
    (rows, row_labels), (cols, col_labels) = (
        _numbered(keys_of(table, name, column))
        for name, column in zip(names[:2], columns, strict=False)
    )
    values = values_of(table, names[2], columns[2], all_names) if len(names) > 2 else None
    dims = usable_dims(*names[:2])
    sides = zip(dims, (row_labels, col_labels), strict=True)
    coords = [{dim: labels} for dim, labels in sides]

    def pieces(add: bool) -> Iterator[Piece]:
        data = np.broadcast_to(np.float32(1), rows.shape) if values is None else values
        yield from coordinate_pieces(rows, cols, data)

    return Source(
        SourceInfo("table", table=_recorded(names)),
        (len(row_labels), len(col_labels)),
        labels=Labels(*dims, coords[0], coords[1]),
        pieces=pieces,
        entries=rows.size,
        merges=True,
    )


def _numbered(keys: Keys) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the position of every key, and the keys in order of size or code point."""
    axis = Axis("key")
    axis.learn(keys)
    _, labels = axis.finish()
    return (np.empty(0, np.int64),) * 2 if labels is None else (axis.positions(keys), labels)


def long_file(table: str, columns: TableColumns, source: Source, options: ReadOptions) -> Source:
    """Return the source of a long table in a file."""
    names = chosen_columns(table, columns.names, options)
    recorded = _recorded([columns.names.index(name) for name in names]) | {"header": columns.header}
    return replace(source, info=replace(source.info, table=recorded))


def _recorded(columns: Sequence[Any]) -> dict[str, Any]:
    """Return the columns of keys and values as read options."""
    return dict(zip(ROLES, [*columns, False][:3], strict=True))
