"""Checks of single arguments, with the one sentence that each failure deserves."""

import math
from numbers import Integral, Real
from typing import Any

from daskfactor.errors import OptionError


def whole_number(name: str, value: Any, least: int) -> int:
    """``value`` as an int.

    Raises
    ------
    OptionError
        If it is not a whole number of at least ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise OptionError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def positive_number(name: str, value: Any) -> float:
    """``value`` as a float.

    Raises
    ------
    OptionError
        If it is not a positive finite number.
    """
    if not (is_number(value) and math.isfinite(value) and value > 0):
        raise OptionError(f"{name} must be a positive finite number, got {value!r}")
    return float(value)
