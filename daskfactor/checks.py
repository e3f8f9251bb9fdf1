"""Check single arguments, with the one sentence that each failure deserves; warn."""

import math
import sys
import warnings
from numbers import Integral, Real
from typing import Any

import numpy as np

from daskfactor.errors import OptionError


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


def warn(message: str, kind: type[Warning]) -> None:
    """Warn at the line outside this package from which it was called, however deep we are."""
    level, frame = 2, sys._getframe(1)
    inside = ("daskfactor", "contextlib")
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, kind, stacklevel=level)
