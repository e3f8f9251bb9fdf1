"""Checks of single arguments, matching of labels, warnings."""

import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import DaskfactorError, DataError, OptionError, StoreFormatError

Cells = tuple[NDArray[np.int64], NDArray[np.int64]]
TENSOR_CELLS = (
    "cells of a tensor of shape {} must be a tuple of {} integer arrays of equal length, or a "
    "boolean mask of that shape"
)


class Match(NamedTuple):
    """Positions of labels among reference labels.

    Attributes
    ----------
    at
        Position of each label among the reference labels, -1 if it is not one of them.
    unmatched
        Positions of the reference labels that are not among the labels.
    repeated
        First common label that occurs more than once among the labels, and among the reference
        labels; None if there is none, or if both are equal.
    """

    at: NDArray[np.int64]
    unmatched: NDArray[np.int64]
    repeated: tuple[Any, Any]


def match_labels(labels: Any, reference: Any) -> Match:
    """Return the positions of labels among reference labels, compared by value.

    Times are equal in any unit, 1 equals 1.0, and NaN equals nothing. Labels of stacked dimensions
    are a MultiIndex, or a mapping from names to labels, in any order; they match only labels of
    dimensions with the same names.
    """
    index, reference_index = _index(labels), _index(reference)
    size = len(reference_index)
    if index.names != reference_index.names:
        return Match(np.full(len(index), -1, np.int64), np.arange(size), (None, None))
    if index.equals(reference_index):
        return Match(np.arange(size), np.empty(0, np.int64), (None, None))
    first = np.flatnonzero(~reference_index.duplicated())
    at = reference_index[first].get_indexer(index)
    at = np.where(at < 0, -1, first[at] if first.size else -1)
    common = reference_index.isin(index)
    repeated = _first_repeated(index, at >= 0), _first_repeated(reference_index, common)
    return Match(at, np.flatnonzero(~common), repeated)


def refuse_repeated(match: Match, what: str, data: str) -> None:
    """Refuse labels that are not unique if the data have another order than the run."""
    if match.repeated != (None, None):
        raise DataError(
            f"the labels of {what} are not unique, and {data} has another order than the run; "
            f"pass {data} with unique labels of {what}, or without labels in the order of the run"
        )


def nearly_same(one: Any, other: Any) -> bool:
    """Return whether two indexes are equal, up to rounding far below the steps between labels."""
    if getattr(one, "equals", lambda _: False)(other):
        return True
    a, b = np.asarray(one), np.asarray(other)
    if _names(one) or _names(other) or a.shape != b.shape or not a.size:
        return False
    if not a.dtype.kind == b.dtype.kind == "f" or not (np.isfinite(a) & np.isfinite(b)).all():
        return bool(np.array_equal(a, b))
    off, step = np.abs(a - b).max(), np.diff(np.unique(a)).min(initial=np.inf)
    rounding = max(np.finfo(a.dtype).eps, np.finfo(b.dtype).eps) * np.abs(a).max()
    return bool(off <= 16 * rounding and off < 1e-3 * step)


def _names(labels: Any) -> list[Any]:
    """Return the sorted names of stacked dimensions; none for a single dimension."""
    if getattr(labels, "nlevels", 1) > 1:
        return sorted(labels.names, key=str)
    return sorted(labels) if isinstance(labels, Mapping) else []


def _of_level(labels: Any, name: Any) -> Any:
    """Return the labels of one of several stacked dimensions."""
    return labels[name] if isinstance(labels, Mapping) else labels.get_level_values(name)


def label_at(labels: Any, at: int) -> str:
    """Write the label at a position for a message; for stacked dimensions, one per dimension."""
    names = _names(labels)
    if not names:
        return repr(np.asarray(labels)[[at]].tolist()[0])
    return ", ".join(f"{name} {np.asarray(_of_level(labels, name))[at]!s}" for name in names)


def _index(labels: Any) -> Any:
    """Return labels as an index whose entries are equal if the labels mean the same."""
    import pandas as pd

    if names := _names(labels):
        levels = [_index(_of_level(labels, name)) for name in names]
        return pd.MultiIndex.from_arrays(levels, names=names)
    values = np.asarray(labels)
    if values.dtype.kind in "MT":
        values = values.astype("M8[ns]" if values.dtype.kind == "M" else object)
    if values.dtype.kind != "f" and values.dtype != np.uint64:
        return pd.Index(values)
    # pandas would round integers to compare them with these, and takes NaN as equal.
    exact = values.astype(object)
    for at in np.flatnonzero(np.isnan(values)):
        exact[at] = object()
    return pd.Index(exact, dtype=object)


def _first_repeated(index: Any, common: NDArray[np.bool_]) -> Any:
    """Return the first of the common labels that occurs more than once, or None."""
    return next(iter(index[index.duplicated(keep=False) & common].tolist()), None)


def refuse_unknown(
    what: str,
    values: Any,
    names: Iterable[str],
    error: type[DaskfactorError] = StoreFormatError,
) -> None:
    """Refuse stored options that this version does not know, rather than ignore them.

    Raises
    ------
    StoreFormatError
        Or ``error``, if ``values`` has other keys than ``names``, or is not a dict.
    """
    if not isinstance(values, Mapping):
        raise error(f"{what} must be a dict of options, got {values!r}")
    if unknown := sorted(map(str, values.keys() - set(names))):
        raise error(
            f"{what} has {', '.join(map(repr, unknown))}, which this version does not know (it "
            f"knows {', '.join(sorted(names))}); a newer version probably wrote it: upgrade "
            "daskfactor and try again"
        )


def whole_number(name: str, value: Any, least: int) -> int:
    """Return ``value`` as an int.

    Raises
    ------
    OptionError
        If it is not a whole number of at least ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise OptionError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def truth(name: str, value: Any) -> bool:
    """Return ``value`` as a bool.

    Raises
    ------
    OptionError
        If it is neither True nor False.
    """
    if not isinstance(value, bool | np.bool_):
        raise OptionError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def one_of(name: str, value: Any, allowed: Sequence[str | None], advice: str = "") -> None:
    """Refuse a value that is not one of a few words; the message does not list None.

    Raises
    ------
    OptionError
        If it is none of them.
    """
    if value not in allowed:
        *others, last = (f'"{word}"' for word in allowed if word is not None)
        words = f"{', '.join(others)} or {last}" if others else last
        raise OptionError(f"{name} must be {words}, got {value!r}{advice}")


def inner_share(name: str, value: Any) -> None:
    """Refuse a value that does not lie between 0 and 1.

    Raises
    ------
    OptionError
        If it is not a number, or not strictly between 0 and 1.
    """
    if not (is_number(value) and 0 < value < 1):
        percent = is_number(value) and 1 < value < 100
        hint = f"; {value:g} % is {value / 100:g}" if percent else ""
        raise OptionError(f"{name} must lie strictly between 0 and 1, got {value!r}{hint}")


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a real number; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def positive_number(name: str, value: Any) -> float:
    """Return ``value`` as a float.

    Raises
    ------
    OptionError
        If it is not a positive finite number.
    """
    if not (is_number(value) and math.isfinite(value) and value > 0):
        raise OptionError(f"{name} must be a positive finite number, got {value!r}")
    return float(value)


def positive_or(name: str, value: Any, word: str = "auto") -> Any:
    """Return ``value`` as a float, or unchanged if it is a certain word.

    Raises
    ------
    OptionError
        If it is neither that word nor a positive finite number.
    """
    if not isinstance(value, str):
        return positive_number(name, value)
    if value != word:
        raise OptionError(f'{name} must be "{word}" or a positive number, got {value!r}')
    return value


def mask_in_order(
    mask: Any, dims: Sequence[Any], labels: Sequence[Any], allowed: str
) -> NDArray[Any]:
    """Return the values of a DataArray mask in the order of the dimensions and labels of a matrix.

    Raises
    ------
    OptionError
        If it has other dimensions, or other labels.
    """
    if set(mask.dims) != set(dims):
        raise OptionError(
            f"{allowed}; got a mask with dimensions {', '.join(map(str, mask.dims))}, but V has "
            f"{', '.join(map(str, dims))}; rename them, or pass the values of the mask"
        )
    mask = mask.transpose(*dims)
    for dim, reference in zip(dims, labels, strict=True):
        index = mask.indexes.get(dim)
        if index is None or reference is None:
            continue
        match = match_labels(reference, index)
        if (match.at < 0).any() or match.unmatched.size or match.repeated != (None, None):
            raise OptionError(
                f"{allowed}; got a mask whose labels of {dim} differ from those of V, or are not "
                f"unique and in another order (they start with {label_at(index, 0)}, those of V "
                f"with {label_at(reference, 0)}); pass a mask with the labels of V, for example "
                "with reindex_like(V), or its values"
            )
        mask = mask.isel({dim: match.at})
    return np.asarray(mask.values)


def cells_of_tensor(cells: Any, shape: Sequence[int]) -> Cells | None:
    """Return cells of a tensor as positions along the first axis and in its first unfolding.

    Parameters
    ----------
    cells, shape
        See `cells_at`.

    Returns
    -------
    tuple of numpy.ndarray or None
        Positions along the first axis, and along all others in row-major order, int64; None if
        there are no cells.
    """
    first, *others = cells_at(cells, shape, TENSOR_CELLS.format(tuple(shape), len(shape)))
    return (first, np.ravel_multi_index(others, tuple(shape[1:]))) if first.size else None


def cells_at(
    cells: Any,
    shape: Sequence[int],
    allowed: str,
    dims: Sequence[Any] = (),
    labels: Sequence[Any] = (),
) -> tuple[NDArray[np.int64], ...]:
    """Return the positions of cells along each axis.

    Parameters
    ----------
    cells
        A boolean mask of the shape, or a tuple of integer arrays of equal length. A DataArray
        mask may have its dimensions and labels in any order.
    shape
        Shape of the array.
    allowed
        Start of error messages, such as ``monitor takes ...``.
    dims, labels
        Dimensions and labels of the array, which order those of a DataArray mask; without
        ``dims`` its values are used as they are.

    Raises
    ------
    OptionError
        For anything else, and for positions outside the array.
    """
    if dims and hasattr(cells, "dims"):
        cells = mask_in_order(cells, dims, labels or [None] * len(dims), allowed)
    if isinstance(cells, tuple):
        if len(cells) != len(shape):
            raise OptionError(f"{allowed}; got a tuple of {len(cells)}")
        axes = ["rows", "columns"] if len(shape) == 2 else [f"axis {n}" for n in range(len(shape))]
        positions = [np.atleast_1d(np.asarray(at)) for at in cells]
        for axis, at, size in zip(axes, positions, shape, strict=True):
            if at.ndim != 1 or (at.size and at.dtype.kind not in "iu"):
                raise OptionError(f"{allowed}; got {axis} of dtype {at.dtype}, shape {at.shape}")
            if at.size and not (at.min() >= 0 and at.max() < size):
                raise OptionError(
                    f"{allowed}; positions of {axis} must lie between 0 and {size - 1}, got "
                    f"{at.min()} to {at.max()}"
                )
        if len({at.size for at in positions}) > 1:
            counts = " and ".join(str(at.size) for at in positions)
            raise OptionError(
                f"{allowed}; {' and '.join(axes)} must have equal lengths, got {counts}"
            )
        return tuple(at.astype(np.int64) for at in positions)
    mask = np.asarray(cells)
    if mask.dtype != np.bool_ or mask.shape != tuple(shape):
        raise OptionError(
            f"{allowed}; got an array of dtype {mask.dtype} and shape {mask.shape}, but "
            f"V has shape {tuple(shape)}"
        )
    return tuple(at.astype(np.int64) for at in np.nonzero(mask))


def warn(message: str, kind: type[Warning]) -> None:
    """Issue a warning for the line of the caller outside this package, at any depth of calls."""
    level, frame = 2, sys._getframe(1)
    inside = ("daskfactor", "contextlib")
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, kind, stacklevel=level)


def require(module: str, extra: str, what: str) -> Any:
    """Import an optional library, or raise an error that tells how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise OptionError(
            f"{what} need {module.partition('.')[0]}, which is not installed: "
            f"run  pip install 'daskfactor[{extra}]'"
        ) from error
