"""Check single arguments, with the one sentence that each failure deserves; warn."""

import math
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import DaskfactorError, DataError, OptionError, StoreFormatError

Cells = tuple[NDArray[np.int64], NDArray[np.int64]]


class Match(NamedTuple):
    """Where labels are among others.

    Attributes
    ----------
    at
        Position of each label that is wanted among the known ones, -1 where it is none of them.
    unwanted
        Positions of known labels that nobody wants.
    twice
        First of the labels on both sides that occurs again among the wanted ones, and among the
        known ones; None: no label does, or both sides are the same.
    """

    at: NDArray[np.int64]
    unwanted: NDArray[np.int64]
    twice: tuple[Any, Any]


def match_labels(wanted: Any, known: Any) -> Match:
    """Find labels among others, by what they mean: times whatever their units, 1 where 1.0 is.

    Stacked dimensions have a label of each, in any order: a mapping from names to labels, or a
    MultiIndex. They are found among those of dimensions of the same names alone.
    """
    names, own_names = _names(wanted), _names(known)
    asked, own = _plain(wanted), _plain(known)
    if names != own_names:
        nowhere = np.full(len(asked), -1, np.int64)
        return Match(nowhere, np.arange(len(own)), (None, None))
    if asked == own:
        return Match(np.arange(len(own)), np.empty(0, np.int64), (None, None))
    place = first_places(own)
    both = place.keys() & set(asked)
    at = np.array([place.get(label, -1) for label in asked], np.int64)
    unwanted = np.flatnonzero([label not in both for label in own])
    return Match(at, unwanted, (_twice(asked, both), _twice(own, both)))


def refuse_repeated(match: Match, what: str, data: str) -> None:
    """Refuse labels that are not unique where data have them in another order than a run."""
    if match.twice != (None, None):
        raise DataError(
            f"the labels of {what} are not unique, and {data} is in another order than the run; "
            f"give every one of the {what} a label of its own, or pass {data} without labels, in "
            "the order of the run"
        )


def nearly_same(one: Any, other: Any) -> bool:
    """Compare two indexes; floats may differ by rounding that is far below any step of theirs."""
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


def first_places(labels: Sequence[Any]) -> dict[Any, int]:
    """Where each label is found first."""
    return {label: at for at, label in reversed([*enumerate(labels)])}


def _names(labels: Any) -> list[Any]:
    """Names of stacked dimensions, in an order of their own; of a single one none."""
    if getattr(labels, "nlevels", 1) > 1:
        return sorted(labels.names, key=str)
    return sorted(labels) if isinstance(labels, Mapping) else []


def _of_level(labels: Any, name: Any) -> Any:
    return labels[name] if isinstance(labels, Mapping) else labels.get_level_values(name)


def label_at(labels: Any, at: int) -> str:
    """How a message calls a label, or those of stacked dimensions at one place."""
    names = _names(labels)
    if not names:
        return repr(np.asarray(labels)[[at]].tolist()[0])
    return ", ".join(f"{name} {np.asarray(_of_level(labels, name))[at]!s}" for name in names)


def _plain(labels: Any) -> list[Any]:
    """Labels as plain values that are equal where they mean the same."""
    names = _names(labels)
    if names:
        return list(zip(*(_plain(_of_level(labels, name)) for name in names), strict=True))
    values = np.asarray(labels)
    return list((values.astype("M8[ns]") if values.dtype.kind == "M" else values).tolist())


def _twice(labels: list[Any], both: set[Any]) -> Any:
    """First of the labels on both sides that occurs more than once."""
    found = Counter(labels)
    return next((label for label, count in found.items() if count > 1 and label in both), None)


def refuse_unknown(
    what: str,
    values: Any,
    known: Iterable[str],
    error: type[DaskfactorError] = StoreFormatError,
) -> None:
    """Refuse stored options that this version does not know: without them it would be another run.

    Raises
    ------
    StoreFormatError
        Or ``error``, if there are any, or if ``values`` are no dict.
    """
    if not isinstance(values, Mapping):
        raise error(f"{what} must be a dict of options, got {values!r}")
    if unknown := sorted(map(str, values.keys() - set(known))):
        raise error(
            f"{what} has {', '.join(map(repr, unknown))}, which this version does not know (it "
            f"knows {', '.join(sorted(known))}); probably a newer version wrote it: upgrade "
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
    """Refuse a value that is none of a few words; None is not named in the sentence.

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
        If it is no number, or 0 or 1 or outside.
    """
    if not (is_number(value) and 0 < value < 1):
        percent = is_number(value) and 1 < value < 100
        meant = f"; {value:g} % is {value / 100:g}" if percent else ""
        raise OptionError(f"{name} must lie strictly between 0 and 1, got {value!r}{meant}")


def is_number(value: Any) -> bool:
    """Tell whether ``value`` is a real number; True and False are none."""
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
    """Return ``value`` as a float, or a word that may stand in its place.

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
    """Turn a DataArray mask to the dimensions of a matrix, and to its labels where both have any.

    Raises
    ------
    OptionError
        If it has other dimensions, or other labels.
    """
    if set(mask.dims) != set(dims):
        raise OptionError(
            f"{allowed}; got a mask with dimensions {', '.join(map(str, mask.dims))}, and V has "
            f"{', '.join(map(str, dims))}; rename them, or pass its values"
        )
    mask = mask.transpose(*dims)
    for dim, known in zip(dims, labels, strict=True):
        own = mask.indexes.get(dim)
        if own is None or known is None:
            continue
        found = match_labels(known, own)
        if (found.at < 0).any() or found.unwanted.size or found.twice != (None, None):
            raise OptionError(
                f"{allowed}; got a mask whose labels of {dim} are not those of V, or not unique "
                f"and in another order (it begins with {label_at(own, 0)}, V with "
                f"{label_at(known, 0)}); give it the labels of V, for example with "
                "reindex_like(V), or pass its values"
            )
        mask = mask.isel({dim: found.at})
    return np.asarray(mask.values)


def cells_of_tensor(cells: Any, shape: Sequence[int]) -> Cells | None:
    """Return cells of a tensor by the first axis and by place in its first unfolding.

    Parameters
    ----------
    cells
        A boolean mask of the tensor's shape, or a tuple of integer arrays of equal length, one
        for each axis.
    shape
        Of the tensor.

    Returns
    -------
    tuple of numpy.ndarray or None
        Places along the first axis, and along all others in row-major order, int64; None if
        there are no cells.

    Raises
    ------
    OptionError
        For anything else, and for places outside the tensor.
    """
    allowed = (
        f"cells of a tensor of shape {tuple(shape)} are a tuple of {len(shape)} integer arrays of "
        "equal length, or a boolean mask of that shape"
    )
    first, *others = cells_at(cells, shape, [f"axis {n}" for n in range(len(shape))], allowed)
    return (first, np.ravel_multi_index(others, tuple(shape[1:]))) if first.size else None


def cell_positions(
    cells: Any,
    shape: Sequence[int],
    dims: Sequence[str],
    allowed: str,
    labels: Sequence[Any] = (None, None),
) -> Cells:
    """Return rows and columns of the cells of a matrix that a mask or two lists name.

    Parameters
    ----------
    cells
        A boolean mask (I, J), a DataArray one in any order of its dimensions; or a pair of
        integer arrays of equal length.
    shape, dims
        Of the matrix; names of its dimensions.
    allowed
        How a sentence about it begins, such as ``monitor takes ...``.
    labels
        Of rows and of columns of the matrix, that those of a mask are matched to.

    Raises
    ------
    OptionError
        For anything else, and for positions outside the matrix.
    """
    if hasattr(cells, "dims"):
        cells = mask_in_order(cells, dims, labels, allowed)
    rows, columns = cells_at(cells, shape, ("rows", "columns"), allowed)
    return rows, columns


def cells_at(
    cells: Any, shape: Sequence[int], axes: Sequence[str], allowed: str
) -> tuple[NDArray[np.int64], ...]:
    """Return positions along each axis of the cells that a mask or lists name.

    Parameters
    ----------
    cells
        A boolean mask of the shape, or a tuple of integer arrays of equal length.
    shape, axes
        Of the array; names of its axes.
    allowed
        How a sentence about it begins.

    Raises
    ------
    OptionError
        For anything else, and for positions outside the array.
    """
    if not isinstance(cells, tuple) or len(cells) != len(shape):
        if isinstance(cells, tuple):
            raise OptionError(f"{allowed}; got a tuple of {len(cells)}")
        mask = np.asarray(cells)
        if mask.dtype != np.bool_ or mask.shape != tuple(shape):
            raise OptionError(
                f"{allowed}; got an array of dtype {mask.dtype} and shape {mask.shape}, "
                f"V has shape {tuple(shape)}"
            )
        return tuple(at.astype(np.int64) for at in np.nonzero(mask))
    found = []
    for name, values, size in zip(axes, cells, shape, strict=True):
        index = np.atleast_1d(np.asarray(values))
        if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
            raise OptionError(f"{allowed}; got {name} of dtype {index.dtype}, shape {index.shape}")
        if index.size and not (index.min() >= 0 and index.max() < size):
            raise OptionError(
                f"{allowed}; positions of {name} must lie between 0 and {size - 1}, got "
                f"{index.min()} to {index.max()}"
            )
        found.append(index.astype(np.int64))
    if len({at.size for at in found}) > 1:
        counts = " and ".join(str(at.size) for at in found)
        raise OptionError(f"{allowed}; {' and '.join(axes)} must be equally many, got {counts}")
    return tuple(found)


def warn(message: str, kind: type[Warning]) -> None:
    """Warn at the line outside this package from which it was called, however deep we are."""
    level, frame = 2, sys._getframe(1)
    inside = ("daskfactor", "contextlib")
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, kind, stacklevel=level)


def require(module: str, extra: str, what: str) -> Any:
    """Import an optional library, or say in a sentence how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise OptionError(
            f"{what} need {module.partition('.')[0]}, which is not installed here: "
            f"run  pip install 'daskfactor[{extra}]'"
        ) from error
