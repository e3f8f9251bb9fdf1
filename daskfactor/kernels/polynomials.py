"""Logarithm, exponential, sine and cosine as polynomials, so that loops over them vectorise.

Only additions, multiplications, selects and bit shifts, without fused
multiply-adds: the same bits on every CPU, with the JIT on or off. Each
function has a float32 and a float64 form, chosen by the type of its argument.
Coefficients: S. L. Moshier, Cephes mathematical library (logf, log, sinf, sin).

    log(x) = e ln 2 + f + tail(f),     x = 2**e (1 + f),  f in [1/sqrt 2 - 1, sqrt 2 - 1)
    tail(f) = log(1 + f) - f           (free of cancellation: a deviance needs it)
"""

from functools import partial
from typing import Any

import numpy as np
from numba.core import types

from daskfactor.kernels.jit import INLINE_OPTIONS, inline, overload

inline_called = partial(inline, inner=False)  # Python calls these functions as well
Scalar = Any

F = np.float32
D = np.float64
_ROOT_HALF_32 = np.int32(0x3F3504F3)
_ROOT_HALF_64 = np.int64(0x3FE6A09E667F3BCD)


def _split_32(x: Scalar) -> Scalar:
    bits = np.float32(x).view(np.int32)
    exponent = np.int32(np.int32(bits - _ROOT_HALF_32) >> np.int32(23))
    mantissa = np.int32(bits - np.int32(exponent << np.int32(23))).view(np.float32)
    return mantissa - F(1), F(exponent)


def _split_64(x: Scalar) -> Scalar:
    bits = np.float64(x).view(np.int64)
    exponent = (bits - _ROOT_HALF_64) >> np.int64(52)
    mantissa = np.int64(bits - (exponent << np.int64(52))).view(np.float64)
    return mantissa - D(1), D(exponent)


def _log_tail_32(f: Scalar) -> Scalar:
    p = F(7.0376836292e-2) * f + F(-1.1514610310e-1)
    p = p * f + F(1.1676998740e-1)
    p = p * f + F(-1.2420140846e-1)
    p = p * f + F(1.4249322787e-1)
    p = p * f + F(-1.6668057665e-1)
    p = p * f + F(2.0000714765e-1)
    p = p * f + F(-2.4999993993e-1)
    p = p * f + F(3.3333331174e-1)
    square = f * f
    return p * f * square - F(0.5) * square


def _log_tail_64(f: Scalar) -> Scalar:
    p = D(1.01875663804580931796e-4) * f + D(4.97494994976747001425e-1)
    p = p * f + D(4.70579119878881725854)
    p = p * f + D(1.44989225341610930846e1)
    p = p * f + D(1.79368678507819816313e1)
    p = p * f + D(7.70838733755885391666)
    q = f + D(1.12873587189167450590e1)
    q = q * f + D(4.52279145837532221105e1)
    q = q * f + D(8.29875266912776603211e1)
    q = q * f + D(7.11544750618563894466e1)
    q = q * f + D(2.31251620126765340583e1)
    square = f * f
    return f * square * p / q - D(0.5) * square


def _sincos_32(angle: Scalar) -> Scalar:
    square = angle * angle
    s = F(-1.9515295891e-4) * square + F(8.3321608736e-3)
    s = s * square + F(-1.6666654611e-1)
    c = F(2.443315711809948e-5) * square + F(-1.388731625493765e-3)
    c = c * square + F(4.166664568298827e-2)
    return s * square * angle + angle, c * square * square - F(0.5) * square + F(1)


def _sincos_64(angle: Scalar) -> Scalar:
    square = angle * angle
    s = D(1.58962301576546568060e-10) * square + D(-2.50507477628578072866e-8)
    s = s * square + D(2.75573136213857245213e-6)
    s = s * square + D(-1.98412698295895385996e-4)
    s = s * square + D(8.33333333332211858878e-3)
    s = s * square + D(-1.66666666666666307295e-1)
    c = D(-1.13585365213876817300e-11) * square + D(2.08757008419747316778e-9)
    c = c * square + D(-2.75573141792967388112e-7)
    c = c * square + D(2.48015872888517045348e-5)
    c = c * square + D(-1.38888888888730564116e-3)
    c = c * square + D(4.16666666666665929218e-2)
    return s * square * angle + angle, c * square * square - D(0.5) * square + D(1)


def split(x: Scalar) -> Scalar:
    """Return ``(f, e)`` with ``x = 2**e (1 + f)``, both in the type of x; x = 0 gives (0, -127)."""
    return _split_32(x) if isinstance(x, np.float32) else _split_64(np.float64(x))


def log_tail(f: Scalar) -> Scalar:
    """Return ``log(1 + f) - f`` for f in [1/sqrt 2 - 1, sqrt 2 - 1), relatively accurate near 0."""
    return _log_tail_32(f) if isinstance(f, np.float32) else _log_tail_64(np.float64(f))


def sincos(angle: Scalar) -> Scalar:
    """Return sine and cosine of an angle in [-pi/4, pi/4]."""
    return _sincos_32(angle) if isinstance(angle, np.float32) else _sincos_64(np.float64(angle))


@overload(split, **INLINE_OPTIONS)
def _split(x: Scalar) -> Any:
    return _split_32 if x == types.float32 else _split_64


@overload(log_tail, **INLINE_OPTIONS)
def _log_tail(f: Scalar) -> Any:
    return _log_tail_32 if f == types.float32 else _log_tail_64


@overload(sincos, **INLINE_OPTIONS)
def _sincos(angle: Scalar) -> Any:
    return _sincos_32 if angle == types.float32 else _sincos_64


@inline_called
def log(x: Scalar) -> Scalar:
    """Return the natural logarithm of a positive normal number."""
    f, exponent = split(x)
    real = type(x)
    tail = log_tail(f) + exponent * real(-2.12194440054690582767e-4)
    return f + tail + exponent * real(0.693359375)


@inline
def _exp_parts(x: Scalar) -> Scalar:
    """Return ``(2**k, exp(r) - 1)``, x = k ln 2 + r, |r| <= ln(2) / 2; x is clipped to +-708."""
    x = D(708) if x > D(708) else x
    x = D(-708) if x < D(-708) else x
    k = np.floor(x * D(1.4426950408889634074) + D(0.5))
    r = x - k * D(0.693145751953125) - k * D(1.42860682030941723212e-6)
    p = D(1 / 6227020800) * r + D(1 / 479001600)
    p = p * r + D(1 / 39916800)
    p = p * r + D(1 / 3628800)
    p = p * r + D(1 / 362880)
    p = p * r + D(1 / 40320)
    p = p * r + D(1 / 5040)
    p = p * r + D(1 / 720)
    p = p * r + D(1 / 120)
    p = p * r + D(1 / 24)
    p = p * r + D(1 / 6)
    p = p * r + D(0.5)
    scale = np.int64((np.int64(k) + np.int64(1023)) << np.int64(52)).view(np.float64)
    return scale, p * r * r + r


@inline_called
def expm1(x: Scalar) -> Scalar:
    """Return ``exp(x) - 1`` in float64, accurate near 0; x is clipped to +-708."""
    scale, growth = _exp_parts(x)
    return scale * growth + (scale - D(1))


@inline_called
def exp(x: Scalar) -> Scalar:
    """``exp(x)``, in the type of x, through float64; x is held within +-708."""
    scale, growth = _exp_parts(D(x))
    return type(x)(scale + scale * growth)


@inline_called
def power(x: Scalar, exponent: Scalar) -> Scalar:
    """Return ``x ** exponent`` of a positive x, in the type of x, through float64."""
    scale, growth = _exp_parts(D(exponent) * log(D(x)))
    return type(x)(scale + scale * growth)
