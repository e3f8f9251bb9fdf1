"""Columns of a table as keys and values of entries."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.coo import Keys
from daskfactor.data.labels import storable
from daskfactor.errors import DataError

KEY_KINDS = (
    *("string", "empty", "integer", "boolean"),
    *("datetime64", "datetime", "timedelta64", "timedelta", "period"),
)
"""Kinds of columns, in the words of `pandas.api.types.infer_dtype`, that may be keys."""
NUMBER_KINDS = "integer", "floating", "mixed-integer-float", "boolean", "decimal"
"""Kinds of columns of objects that are numbers, some of them missing."""
MAX_LISTED = 20


def keys_of(table: str, name: str, column: Any) -> Keys:
    """Return the keys in a column of pandas: integers, times, or categories that are texts.

    Raises
    ------
    DataError
        If a key is missing, or keys have several types or an unsupported one.
    """
    import pandas as pd

    if missing := int(column.isna().sum()):
        raise without_keys(table, name, missing)
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "iubmM":
        return np.asarray(column)
    is_categorical = isinstance(column.dtype, pd.CategoricalDtype)
    kind = pd.api.types.infer_dtype(column.cat.categories if is_categorical else column)
    if kind not in KEY_KINDS:
        raise DataError(
            f"column {name!r} of {table} holds {kind} data; keys must be whole numbers, texts or "
            "dates; convert it, or choose others with rows and columns; .astype(str) makes texts"
        )
    if is_categorical:
        codes, labels = column.cat.codes.to_numpy(), column.cat.categories
    else:
        codes, labels = pd.factorize(column)
    if kind not in ("string", "empty"):
        array = np.asarray(storable(name, np.asarray(labels)))
        if array.dtype.kind in "iubmM":
            keys: Keys = array[codes]
            return keys
        labels = array.tolist()
    return pd.Categorical.from_codes(codes, pd.Index(labels, dtype=object), validate=False)


def values_of(table: str, name: str, column: Any, all_names: Sequence[str]) -> NDArray[Any]:
    """Return the numbers in a column of pandas, NaN where it is empty.

    Raises
    ------
    DataError
        If they are no numbers; it lists all columns of the table.
    """
    if getattr(column.dtype, "kind", "O") not in "iufb":
        import pandas as pd

        kind = pd.api.types.infer_dtype(column)
        if kind not in NUMBER_KINDS:
            raise DataError(
                f"column {name!r} of {table} holds {kind} data; values must be numbers; choose "
                f"another with values, or values=False to count lines; it has {listed(all_names)}"
            )
        column = pd.to_numeric(column)
    if isinstance(column.dtype, np.dtype):
        return np.asarray(column, np.float32 if column.dtype == np.float16 else None)
    return np.asarray(column.to_numpy("float64", na_value=np.nan))


def without_keys(table: str, name: str, count: int) -> DataError:
    """Return the error for lines of a table without a key."""
    return DataError(
        f"{count} lines of {table} have nothing in the key column {name!r}; remove them, or "
        "fill it in"
    )


def listed(all_names: Sequence[str]) -> str:
    """Return the names of columns for a message."""
    listing = ", ".join(all_names[:MAX_LISTED])
    more = f" and {len(all_names) - MAX_LISTED} more" if len(all_names) > MAX_LISTED else ""
    return f"the columns {listing}{more}" if len(all_names) > 1 else f"the single column {listing}"
