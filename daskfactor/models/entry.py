"""The Tweedie laws entry by entry, as functions of numbers that kernels compile.

    weight     mu**(beta - 2)          curvature  mu**(beta - 1)
    ratio      v * mu**(beta - 2)      deviance   d_beta(v | mu)

beta = 2, 1, 0.5, 0 and -1 need no power.

Source: Şimşekli et al. 2017, eq. 2 to 4; Şimşekli et al. 2015, section 4.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from daskfactor.models.likelihood import Entry

Scalar = Any
Function = Callable[..., Scalar]

_LOG_2 = math.log(2.0)
_SERIES_RANGE = 0.03  # |v / mu - 1| below which the power series has no cancellation


def tweedie_entry(beta: float, arithmetic: Any) -> Entry:
    """Make the functions of one beta; for ``arithmetic`` see `Likelihood.entry`."""
    weight = _WEIGHTS.get(beta) or _general_weight(beta, arithmetic.power)
    if beta in (0.0, 1.0):
        deviance = _logarithmic_deviance(beta, arithmetic)
    else:
        deviance = _DEVIANCES.get(beta) or _general_deviance(beta, arithmetic)
    return Entry(weight, _curvature, _ratio, deviance, _FITS.get(beta) or _general_fit(beta))


def _curvature(scale: Scalar, v: Scalar, mu: Scalar, w: Scalar) -> Scalar:
    return scale * mu * w


def _ratio(v: Scalar, mu: Scalar, w: Scalar) -> Scalar:
    return v * w


def _weight_2(v: Scalar, mu: Scalar) -> Scalar:
    return type(mu)(1)


def _weight_1(v: Scalar, mu: Scalar) -> Scalar:
    return type(mu)(1) / mu


def _weight_half(v: Scalar, mu: Scalar) -> Scalar:
    return type(mu)(1) / (mu * np.sqrt(mu))


def _weight_0(v: Scalar, mu: Scalar) -> Scalar:
    return type(mu)(1) / (mu * mu)


def _weight_minus_1(v: Scalar, mu: Scalar) -> Scalar:
    return type(mu)(1) / (mu * mu * mu)


def _general_weight(beta: float, power: Function) -> Function:
    exponent = beta - 2.0

    def weight(v: Scalar, mu: Scalar) -> Scalar:
        return power(mu, exponent)

    return weight


def _deviance_2(v: Scalar, mu: Scalar) -> Scalar:
    return type(mu)(0.5) * (v - mu) * (v - mu)


def _deviance_half(v: Scalar, mu: Scalar) -> Scalar:
    """2 (sqrt v - sqrt mu)**2 / sqrt mu."""
    root = np.sqrt(mu)
    difference = (v - mu) / (np.sqrt(v) + root)
    return type(mu)(2) * difference * difference / root


def _deviance_minus_1(v: Scalar, mu: Scalar) -> Scalar:
    difference = (v - mu) / mu
    return type(mu)(0.5) * difference * difference / v


def _logarithmic_deviance(beta: float, arithmetic: Any) -> Function:
    """Beta = 1: mu (r log r - x); beta = 0: x - log r; with r = v / mu and x = r - 1.

    Near r = 1 they are put together from log r - x, which does not cancel.
    """
    split, log_tail = arithmetic.split, arithmetic.log_tail

    def deviance_1(v: Scalar, mu: Scalar) -> Scalar:
        ratio = v / mu
        x = (v - mu) / mu
        f, exponent = split(ratio)
        f = x if exponent == 0 else f
        tail = log_tail(f)
        near = x * (x + tail) + tail
        far = ratio * (f + tail + exponent * type(mu)(_LOG_2)) - x
        return mu * (near if exponent == 0 else far)

    def deviance_0(v: Scalar, mu: Scalar) -> Scalar:
        x = (v - mu) / mu
        f, exponent = split(v / mu)
        f = x if exponent == 0 else f
        tail = log_tail(f)
        return -tail if exponent == 0 else x - f - tail - exponent * type(mu)(_LOG_2)

    return deviance_1 if beta == 1.0 else deviance_0


def _general_deviance(beta: float, arithmetic: Any) -> Function:
    """``mu**beta g(r)``, r = 1 + x = v / mu.

    Near r = 1: g = x**2 / 2 (1 + (beta - 2) x / 3 (1 + (beta - 3) x / 4 (...))).
    Elsewhere through expm1, of beta log r where beta is nearer 0 than 1 and of
    (beta - 1) log r otherwise, so that the limits at 0 and 1 are approached smoothly.
    """
    near_zero = abs(beta) < abs(beta - 1.0)
    exponent = beta if near_zero else beta - 1.0
    log, expm1, power = arithmetic.log, arithmetic.expm1, arithmetic.power

    def deviance(v: Scalar, mu: Scalar) -> Scalar:
        data, mean = np.float64(v), np.float64(mu)
        x = (data - mean) / mean
        ratio = data / mean
        growth = expm1(exponent * log(ratio)) / exponent
        far = (growth - x) / (beta - 1.0) if near_zero else (ratio * growth - x) / beta
        far = far if data > 0.0 else 1.0 / beta
        g = 1.0 + (beta - 10.0) * x / 11.0
        g = 1.0 + (beta - 9.0) * x / 10.0 * g
        g = 1.0 + (beta - 8.0) * x / 9.0 * g
        g = 1.0 + (beta - 7.0) * x / 8.0 * g
        g = 1.0 + (beta - 6.0) * x / 7.0 * g
        g = 1.0 + (beta - 5.0) * x / 6.0 * g
        g = 1.0 + (beta - 4.0) * x / 5.0 * g
        g = 1.0 + (beta - 3.0) * x / 4.0 * g
        g = 1.0 + (beta - 2.0) * x / 3.0 * g
        near = 0.5 * x * x * g
        return power(mean, beta) * (near if abs(x) < _SERIES_RANGE else far)

    return deviance


def _fit_2(v: Scalar, mu: Scalar) -> Scalar:
    return v * mu - 0.5 * mu * mu, v, mu


def _fit_1(v: Scalar, mu: Scalar) -> Scalar:
    """The part -mu, which zeros have as well, is left to sums over rows."""
    return v * math.log(mu), v / mu, 0.0


def _fit_0(v: Scalar, mu: Scalar) -> Scalar:
    return -v / mu - math.log(mu), v / (mu * mu), 1.0 / mu


def _general_fit(beta: float) -> Function:
    def fit(v: Scalar, mu: Scalar) -> Scalar:
        power = mu ** (beta - 1.0)
        return v * power / (beta - 1.0) - power * mu / beta, v * power / mu, power

    return fit


_WEIGHTS: dict[float, Function] = {
    2.0: _weight_2,
    1.0: _weight_1,
    0.5: _weight_half,
    0.0: _weight_0,
    -1.0: _weight_minus_1,
}
_DEVIANCES: dict[float, Function] = {
    2.0: _deviance_2,
    0.5: _deviance_half,
    -1.0: _deviance_minus_1,
}
_FITS: dict[float, Function] = {2.0: _fit_2, 1.0: _fit_1, 0.0: _fit_0}
