"""Checks of single arguments, with the one sentence that each failure deserves."""

import math
from numbers import Integral, Real
from typing import Any

import numpy as np

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


def truth(name: str, value: Any) -> bool:
    """``value`` as a bool.

    Raises
    ------
    OptionError
        If it is neither True nor False.
    """
    if not isinstance(value, bool | np.bool_):
        raise OptionError(f"{name} must be True or False, got {value!r}")
    return bool(value)


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
