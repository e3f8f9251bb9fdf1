"""Long tables, with a line for each entry: how they are told from matrices, and those in memory.

A frame is a table in memory: of pandas, or of any library that gives out its columns by the
dataframe interchange protocol (``__dataframe__``) or as Arrow streams (``__arrow_c_stream__``).
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.adapters import Source, from_pandas
from daskfactor.data.entries import Piece, coordinate_pieces, text_array
from daskfactor.data.grid import inverse
from daskfactor.data.known import DEFAULT_DIMS, Labels, SourceInfo, storable, usable_dims
from daskfactor.data.tables import Look, Wanted, chosen_columns
from daskfactor.errors import DataError, OptionError


class UnclearTableError(DataError):
    """Error: a table that may be a matrix, or have a line for each entry."""


ROLES = ("rows", "columns", "values")
UNCLEAR = 3
"""Columns of a table that may be keys and values as well as a matrix."""


def is_long(
    where: str, names: Sequence[str], labelled: bool, has_keys: bool, wanted: Wanted
) -> bool:
    """Return whether a table has a line for each entry, and not one for each row of a matrix.

    It has if a column of it is asked for, or ``table`` says so.

    Parameters
    ----------
    where
        Name of the table in messages.
    names
        Of its columns.
    labelled
        Whether its rows have labels besides, so that no column holds keys.
    has_keys
        Whether the first two columns that have names may hold keys: the first one whole numbers,
        or anything more than once, the second one whole numbers or texts.

    Raises
    ------
    UnclearTableError
        If it has three columns, or keys in two of four (as where times follow ratings), and
        nothing says what it is.
    """
    if wanted.table is not None or asked_for(wanted):
        return wanted.table is not False
    named = [at for at, name in enumerate(names) if name]  # an index that was written has no name
    if not labelled and (len(named) == UNCLEAR or (len(named) == UNCLEAR + 1 and has_keys)):
        columns = [_called(names, at) for at in named[:UNCLEAR]]
        called = ", ".join(f"{role}={own}" for role, own in zip(ROLES, columns, strict=True))
        raise UnclearTableError(
            f"{where} could be a table with a line for each entry (row key, column key, value) or "
            f"a matrix of {len(named)} columns; say which: pass {called} (or table=True) if it has "
            "a line for each entry, table=False if it is a matrix"
        )
    return False


def _called(names: Sequence[str], at: int) -> str:
    """Return the name of a column, or its position if the file has no names."""
    return str(at) if names[at] == f"f{at}" else repr(names[at])


def asked_for(wanted: Wanted) -> bool:
    """Whether columns of a table were named."""
    return (wanted.rows, wanted.columns, wanted.values) != (None, None, None)


def is_frame(data: object) -> bool:
    """Whether an object is a table in memory, of whatever library."""
    kind = type(data)
    if hasattr(kind, "__dataframe__") or _is_stacked(data):
        return True
    return hasattr(kind, "__arrow_c_stream__") and (
        hasattr(data, "columns") or hasattr(data, "schema")
    )


def _is_stacked(data: Any) -> bool:
    """Whether this is a pandas.Series with two keys for each value."""
    series = getattr(sys.modules.get("pandas"), "Series", ())
    return isinstance(data, series) and data.index.nlevels == 2


def open_frame(data: Any, wanted: Wanted) -> Source:
    """A table in memory, as a matrix or as one with a line for each entry.

    Raises
    ------
    DataError
        If it may be either, or keys or values cannot be used.
    OptionError
        If it lacks a column that was asked for.
    """
    import pandas as pd

    known = isinstance(data, pd.DataFrame | pd.Series)
    name = f"the {type(data).__name__}"
    frame = data if known else _as_pandas(data, name)
    if _is_stacked(data):
        if wanted.table is False:
            raise OptionError(
                f"{name} has two keys for each value, which table=False forbids; leave table out, "
                "or pass series.unstack()"
            )
        frame = data.to_frame("value" if data.name is None else data.name)
    pairs = frame.index.nlevels == 2 and frame.shape[1] == 1 and wanted.table is not False
    if pairs:
        keys = [own or usual for own, usual in zip(frame.index.names, DEFAULT_DIMS, strict=True)]
        frame = frame.rename_axis(keys).reset_index(allow_duplicates=True)
    chosen = {wanted.rows, wanted.columns, wanted.values} - {None}
    if wanted.table is not False and chosen & set(frame.index.names):
        frame = frame.reset_index()
    given = [str(column) for column in frame.columns]
    labelled = not (frame.index.name is None and frame.index.dtype.kind in "iu")
    has_keys = False
    if len(given) > UNCLEAR:
        (first, second), types = frame.dtypes.iloc[:2], pd.api.types
        has_keys = types.is_integer_dtype(first) or frame.iloc[:, 0].duplicated().any()
        has_keys = has_keys and not types.is_float_dtype(second)
    if not pairs and not is_long(name, given, labelled, has_keys, wanted):
        return from_pandas(_labelled(frame, given))
    if len(set(given)) < len(given):
        raise DataError(f"{name} has two columns of one name: {', '.join(given)}; rename one")
    names = chosen_columns(name, given, wanted)
    columns = [frame.iloc[:, given.index(column)] for column in names]
    return _entries(name, names, columns)


def _labelled(frame: Any, given: list[str]) -> Any:
    """The frame with its first column as index, if that holds labels and it has no others."""
    counted = type(frame.index).__name__ == "RangeIndex" and frame.index.name is None
    if counted and len(given) > 1 and frame.columns.nlevels == 1:
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
    """A frame of another library; texts as categories, whose texts are there once."""
    import pandas as pd

    try:
        import pyarrow as pa
    except ImportError:
        if not hasattr(data, "__dataframe__"):
            raise OptionError(
                f"{name} is read with pyarrow, which is not installed here: run  "
                "pip install 'daskfactor[tables]', or pass a pandas.DataFrame"
            ) from None
        return pd.api.interchange.from_dataframe(data)
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


def _entries(where: str, names: Sequence[str], columns: Sequence[Any]) -> Source:
    """Entries from columns of keys and, unless lines are counted, of values."""
    (rows, row_labels), (cols, col_labels) = (
        _numbered(where, name, column) for name, column in zip(names[:2], columns, strict=False)
    )
    values = _numbers(where, names[2], columns[2]) if len(names) > 2 else None
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


def _numbered(where: str, name: str, column: Any) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The position of every key, and the keys in ascending order: by size, or by code point.

    Raises
    ------
    DataError
        If a key is missing, or they are of several types, or of one that is none for keys.
    """
    import pandas as pd

    missing = int(column.isna().sum())
    if missing:
        raise DataError(
            f"{missing} lines of {where} have nothing in the key column {name!r}; remove them, or "
            "fill it in"
        )
    if getattr(column.dtype, "kind", "O") == "f":
        raise DataError(
            f"column {name!r} of {where} holds {column.dtype}; keys must be whole numbers, texts "
            "or dates; convert it, or choose others with rows and columns"
        )
    codes, found = pd.factorize(column)
    if isinstance(found, pd.CategoricalIndex):
        found = found.astype(found.categories.dtype)
    labels = np.asarray(found)
    timed = isinstance(pd.Index(labels), pd.DatetimeIndex | pd.PeriodIndex)
    if labels.dtype.kind == "O" and not timed:
        kinds = {type(label).__name__ for label in labels}
        if kinds and kinds != {"str"}:
            raise DataError(
                f"the key column {name!r} of {where} holds {' and '.join(sorted(kinds))}; keys "
                "must be whole numbers, texts or dates, all of one type: convert them, for example "
                "with .astype(str)"
            )
        labels = text_array(labels.tolist())
    labels = np.asarray(storable(name, labels))
    order = np.argsort(labels, kind="stable")
    return inverse(order)[codes], labels[order]


def _numbers(where: str, name: str, column: Any) -> NDArray[Any]:
    """Numbers, NaN where there is nothing."""
    if _kind(column.dtype) != "number":
        raise DataError(
            f"column {name!r} of {where} holds {column.dtype}; values must be numbers; choose "
            "another with values, or values=False to count lines"
        )
    return _floats(column)


def _floats(column: Any) -> NDArray[Any]:
    """As an array of NumPy's, NaN where there is nothing."""
    if isinstance(column.dtype, np.dtype):
        return np.asarray(column.to_numpy())
    return np.asarray(column.to_numpy("float64", na_value=np.nan))


def long_file(where: str, look: Look, source: Source, wanted: Wanted) -> Source:
    """The source of a table in a file, once it is known to have a line for each entry."""
    names = chosen_columns(where, look.names, wanted)
    found = _recorded([look.names.index(name) for name in names]) | {"header": look.header}
    return replace(source, info=replace(source.info, table=found))


def _recorded(columns: Sequence[Any]) -> dict[str, Any]:
    """Columns of keys and of values as they are asked for again."""
    return dict(zip(ROLES, [*columns, False][:3], strict=True))
