"""Long tables, with a line for each entry: how they are told from matrices, and those in memory.

A frame is a table in memory: of pandas, or of any library that gives out its columns by the
dataframe interchange protocol (``__dataframe__``) or as Arrow streams (``__arrow_c_stream__``).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import warn
from daskfactor.data.adapters import Source, from_pandas
from daskfactor.data.entries import Piece, coordinate_pieces, text_array
from daskfactor.data.grid import inverse
from daskfactor.data.key_names import (
    holds_ids,
    is_time,
    names_of_keys,
    taken_for_labels,
    usual_meaning,
)
from daskfactor.data.known import DEFAULT_DIMS, Labels, SourceInfo, storable, usable_dims
from daskfactor.data.tables import FEW, Look, Wanted, all_whole, chosen_columns
from daskfactor.errors import DataError, DataWarning, OptionError


def is_long(
    where: str,
    names: Sequence[str],
    kinds: Sequence[str],
    repeats: bool | Callable[[], bool],
    labelled: bool,
    wanted: Wanted,
) -> bool:
    """Whether a table has a line for each entry, and not one for each row of a matrix.

    It is one if a column of it is asked for, if its first two columns are called as keys of rows
    and columns usually are, or if they hold what only keys can be: texts in both, or in the
    first, one more than once, beside whole numbers in the second.

    Parameters
    ----------
    where
        How messages call it.
    names, kinds
        Of its columns.
        The latter are ``"key"`` (texts or dates), ``"whole"``, ``"rounded"`` (floats that are
        whole numbers, or NaN), ``"number"`` or ``"other"``.
    repeats
        Whether the first column holds anything twice, or what tells it.
    labelled
        Whether its rows have labels of their own, so that two whole numbers are no keys.
    wanted
        What was asked for.

    Raises
    ------
    DataError
        If it may be either.
    """
    if wanted.table is not None or asked_for(wanted):
        return bool(wanted.table is not False)
    if _are_entries(where, names, kinds, repeats, labelled):
        return True
    refuse_keys(where, names, kinds)
    return False


def _are_entries(
    where: str,
    names: Sequence[str],
    kinds: Sequence[str],
    repeats: bool | Callable[[], bool],
    labelled: bool,
) -> bool:
    """Whether the first two columns are keys; a DataError if they may be."""
    values = kinds[2] if len(kinds) > 2 else "number"
    if len(kinds) < 2 or values not in NUMBERS:
        return False
    if not {*kinds[:2]} <= {"key", "whole", "rounded"} or {*kinds} == {"rounded"}:
        return False
    if "rounded" in kinds[:2]:
        # A key that a line lacks makes floats of all of them.
        if len(kinds) > 3 or labelled or "key" in kinds[:2]:
            return False
        raise either(where, names, kinds, (0, 1))
    pair = tuple(kinds[:2])
    if names_of_keys(*names[:2]):
        return True
    if pair == ("key", "key"):
        if sum(kind in NUMBERS for kind in kinds[2:]) <= MOST_VALUES:
            return True
        raise either(where, names, kinds, (0, 1))
    if pair == ("whole", "key"):
        return len(kinds) > 2
    if pair == ("key", "whole") and len(kinds) < 4:
        if repeats() if callable(repeats) else repeats:
            return True
    elif pair != ("whole", "whole") or len(kinds) > 3 or labelled:
        return False
    raise either(where, names, kinds, (0, 1))


def refuse_keys(where: str, names: Sequence[str], kinds: Sequence[str]) -> None:
    """Refuse a narrow table with two columns anywhere that are called as keys usually are.

    Raises
    ------
    DataError
        If it has them, and what they hold may be keys.
    """
    if len(names) > FEW:
        return
    usable = [at for at, kind in enumerate(kinds) if kind in ("key", "whole", "rounded")]
    for keys in permutations(usable, 2):
        if names_of_keys(*(names[at] for at in keys)):
            raise either(where, names, kinds, keys)


def either(
    where: str, names: Sequence[str], kinds: Sequence[str], keys: Sequence[int]
) -> DataError:
    """What is said of a table that may be one of entries, with keys in these columns."""
    rest = [
        at
        for at, kind in enumerate(kinds)
        if at not in keys and kind in NUMBERS and not is_time(names[at])
    ]
    chosen = [*keys, *[at for at in rest if at > max(keys)], *rest][: 2 + bool(rest)]
    told = [f"{role}={_called(names, at)}" for role, at in zip(ROLES, chosen, strict=False)]
    whole = " (or table=True)"
    if len(told) == 2 and len(kinds) > 2:
        told, whole = [*told, "values=False"], ""
    floats = [names[at] for at in keys if kinds[at] == "rounded"]
    two = [kinds[at] for at in keys] == ["key", "key"] and [*keys] == [0, 1]
    matrix = "table=False if it is a matrix"
    if two:
        matrix = (
            "or, if it is a matrix whose rows have two labels, join these into one column, or pass "
            "a pandas.DataFrame with both as its index"
        )
    convert = (
        f", once lines without a key are removed and {' and '.join(map(repr, floats))} converted "
        "to whole numbers"
        if floats
        else ""
    )
    return DataError(
        f"{where} could be a table with a line for each entry (row key, column key"
        f"{', value' if rest else ''}) or a matrix of {len(kinds)} columns; say which: "
        f"pass {', '.join(told)}{whole if chosen == [*range(len(chosen))] else ''} if it has a "
        f"line for each entry{convert}, {matrix}"
    )


def _called(names: Sequence[str], at: int, before: str = "") -> str:
    """Return the name of a column, or its position if the file has no names."""
    return f"{before}{at}" if names[at] == f"f{at}" else repr(names[at])


ROLES = ("rows", "columns", "values")
MOST_VALUES = 2
"""Columns of numbers behind two of texts: where there are more, they may be those of a matrix."""
NUMBERS = ("whole", "rounded", "number")
"""Kinds of columns that may be values."""


def asked_for(wanted: Wanted) -> bool:
    """Whether columns of a table were named."""
    return (wanted.rows, wanted.columns, wanted.values) != (None, None, None)


def note(where: str, names: Sequence[str], wanted: Wanted) -> None:
    """Say what a table was taken for, unless its columns were named."""
    if wanted.table or asked_for(wanted):
        return
    called = [_called(names, at, "column ") for at in range(min(3, len(names)))]
    values = f"values in {called[2]}" if len(names) > 2 else "lines are counted"
    warn(
        f"{where} is taken for a table with a line for each entry: keys of rows in "
        f"{called[0]}, of columns in {called[1]}, {values}; "
        "pass rows=, columns= and values= to name others, or table=False if it is a matrix",
        DataWarning,
    )


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
    if wanted.table is not False and set(_named(wanted)) & set(frame.index.names) - {None}:
        frame = frame.reset_index()
    given = [str(column) for column in frame.columns]
    if not pairs and not _is_long_frame(name, frame, given, wanted):
        return from_pandas(_labelled(name, frame, given))
    if len(set(given)) < len(given):
        raise DataError(f"{name} has two columns of one name: {', '.join(given)}; rename one")
    names = chosen_columns(name, given, wanted)
    note(name, names, wanted)
    columns = [frame.iloc[:, given.index(column)] for column in names]
    return _entries(name, names, columns)


def _labelled(name: str, frame: Any, given: list[str]) -> Any:
    """The frame with its first column as index, if that holds labels and it has no others."""
    counted = type(frame.index).__name__ == "RangeIndex" and frame.index.name is None
    if counted and len(given) > 1 and frame.columns.nlevels == 1:
        first = frame.iloc[:, 0]
        if _holds_names(first) and {*map(_kind, frame.dtypes[1:])} <= {*NUMBERS}:
            return frame.iloc[:, 1:].set_index(first)
        if _kind(first.dtype) == "whole" and holds_ids(given[0], _floats(first)):
            taken_for_labels(name, given[0])
            return frame.iloc[:, 1:].set_index(first)
    return frame


def _holds_names(column: Any) -> bool:
    """Return whether a column holds texts or dates, and not numbers as objects."""
    import pandas as pd

    kinds = ("string", "categorical", "date", "datetime", "datetime64")
    return _kind(column.dtype) == "key" and pd.api.types.infer_dtype(column) in kinds


def _is_long_frame(name: str, frame: Any, given: list[str], wanted: Wanted) -> bool:
    """Whether a table has keys among its columns, or in its index, which is refused."""
    import pandas as pd

    index = frame.index
    labelled = not (index.name is None and index.dtype.kind in "iu")
    kinds = _kinds(frame)

    def repeats() -> bool:
        return bool(frame.iloc[:, 0].duplicated().any())

    if is_long(name, given, kinds, repeats, labelled, wanted):
        return True
    if wanted.table is None and None not in index.names and len(given) < FEW:
        both = [*map(str, index.names), *given]
        levels = pd.DataFrame({n: index.get_level_values(n) for n in range(index.nlevels)})
        refuse_keys(name, both, [*_kinds(levels), *kinds])
    return False


def _kinds(frame: Any) -> list[str]:
    """What each column holds; of a wide table, floats are not looked at."""
    kinds = [_kind(dtype) for dtype in frame.dtypes]
    if len(kinds) > FEW:
        return kinds
    return [
        "rounded" if dtype.kind == "f" and all_whole(_floats(column)) else kind
        for kind, dtype, (_, column) in zip(kinds, frame.dtypes, frame.items(), strict=True)
    ]


def _named(wanted: Wanted) -> list[Any]:
    return [name for name in (wanted.rows, wanted.columns, wanted.values) if name is not None]


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
    if letter in "iu":
        return "whole"
    if letter in "fb":
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

    def pieces(wants: bool, add: bool) -> Iterator[Piece]:
        data = np.broadcast_to(np.float32(1), rows.shape) if values is None else values
        yield from coordinate_pieces(rows, cols, data)

    return Source(
        SourceInfo("table", table=_recorded(names)),
        (len(row_labels), len(col_labels)),
        labels=Labels(*dims, coords[0], coords[1]),
        pieces=pieces,
        entries=rows.size,
        usual=usual_meaning(names),
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
    if _kind(column.dtype) not in ("whole", "number"):
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
    note(where, names, wanted)
    found = _recorded([look.names.index(name) for name in names]) | {"header": look.header}
    return replace(source, info=replace(source.info, table=found))


def _recorded(columns: Sequence[Any]) -> dict[str, Any]:
    """Columns of keys and of values as they are asked for again."""
    return dict(zip(ROLES, [*columns, False][:3], strict=True))
