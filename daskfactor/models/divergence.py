"""Tweedie laws: the beta-divergence, and the densities of which it is the exponent.

Symbols: ``v`` observation, ``mu`` its mean, ``phi`` the dispersion, ``beta`` the
power (the variance is ``phi * mu ** (2 - beta)``). A law has the density
``exp(-d_beta(v | mu) / phi + log_normalizer(v, phi))``; `density` finds what differs
between the laws.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[np.float64]

_LOG_TWO_PI = float(np.log(2.0 * np.pi))
_SERIES_REACH = 1e-3  # |v / mu - 1| below which the power series beats the closed form
_NODES = np.arange(-40.0, 41.0)  # summands around the largest one, in units of the stride
_CHUNK = 1 << 14  # values whose summands are held at once (11 MB)


def divergence(v: ArrayLike, mu: ArrayLike, beta: float) -> Array:
    r"""Beta-divergence of observations from their means, element by element.

    .. math:: d_\beta(v|\mu) = \frac{v^\beta}{\beta(\beta-1)}
        - \frac{v \mu^{\beta-1}}{\beta-1} + \frac{\mu^\beta}{\beta}

    with the limits at beta = 0 and 1. Both limits are approached without loss
    of digits, and so is ``v = mu``. At ``v = 0`` it is ``mu**beta / beta`` for
    positive beta and infinite otherwise.

    Parameters
    ----------
    v, mu
        Observations and means, any shapes that broadcast, in the unit of the
        data. NaN gives NaN; negative ``v`` gives NaN unless ``beta == 2``.
    beta
        Power of the law, a float outside the open interval (1, 2).

    Returns
    -------
    ndarray of float64
        Non-negative, of the broadcast shape, in the unit of the data to the beta.

    References
    ----------
    Şimşekli et al. 2017, section 2.
    """
    v, mu = np.asarray(v, dtype=np.float64), np.asarray(mu, dtype=np.float64)
    if beta == 2.0:
        return np.asarray(0.5 * (v - mu) ** 2)
    with np.errstate(all="ignore"):
        inside = mu**beta * _unit_divergence(v / mu, (v - mu) / mu, beta)
        if beta > 1.0:
            unreached = v**beta / (beta * (beta - 1.0))
        else:
            unreached = np.where(v > 0, np.inf, 0.0 if beta > 0.0 else np.inf)
    return np.asarray(np.where((mu == 0) & ~np.isnan(v), unreached, inside))


def _unit_divergence(ratio: Array, excess: Array, beta: float) -> Array:
    """d_beta(ratio | 1), ``excess = ratio - 1`` being given with all its digits.

    Two equal formulas, one stable near beta = 0 and one near 1; a series near ratio = 1.
    """
    log = np.where(np.abs(excess) < 0.5, np.log1p(excess), np.log(np.where(ratio > 0, ratio, 1.0)))
    if beta < 0.5:
        value = (excess - log * special.exprel(beta * log)) / (1.0 - beta)
    else:
        value = (ratio * log * special.exprel((beta - 1.0) * log) - excess) / beta
    factor: Any = 1.0
    for order in (7, 6, 5, 4, 3):
        factor = 1.0 + factor * (beta - order + 1.0) / order * excess
    value = np.where(np.abs(excess) < _SERIES_REACH, 0.5 * excess**2 * factor, value)
    value = np.where(ratio == 0, 1.0 / beta if beta > 0.0 else np.inf, value)
    return np.where(ratio < 0, np.nan, value)


class Density(NamedTuple):
    """Support, the part of a log-density that is free of the mean, and random draws."""

    support: Literal["real", "non-negative", "positive"]
    log_normalizer: Callable[[Array, float, float], Array]
    sample: Callable[[np.random.Generator, Array, float, float], Array]


def _stirling(x: Array) -> Array:
    """What Stirling's formula misses: log Gamma(x) - (x - 1/2) log x + x - log(2 pi) / 2."""
    with np.errstate(all="ignore"):
        near = special.gammaln(x) - (x - 0.5) * np.log(x) + x - 0.5 * _LOG_TWO_PI
        inverse = 1.0 / x**2
        far = (1 / 12 - inverse * (1 / 360 - inverse * (1 / 1260 - inverse / 1680))) / x
    return np.where(x < 16.0, near, far)


def _normal_normalizer(v: Array, phi: float, beta: float) -> Array:
    return np.full_like(v, -0.5 * (_LOG_TWO_PI + np.log(phi)))


def _poisson_normalizer(v: Array, phi: float, beta: float) -> Array:
    count = v / phi
    return np.asarray(-0.5 * (_LOG_TWO_PI + np.log(count)) - _stirling(count))


def _gamma_normalizer(v: Array, phi: float, beta: float) -> Array:
    shape = np.asarray(1.0 / phi)
    constant = 0.5 * (np.log(shape) - _LOG_TWO_PI) - _stirling(shape)
    return np.asarray(constant - np.log(v))


def _inverse_gaussian_normalizer(v: Array, phi: float, beta: float) -> Array:
    return np.asarray(-0.5 * (_LOG_TWO_PI + np.log(phi)) - 1.5 * np.log(v))


def _half_normalizer(v: Array, phi: float, beta: float) -> Array:
    """The compound Poisson series summed: a Bessel function (beta = 1/2 only)."""
    root = np.sqrt(v)
    return np.asarray(np.log(2.0 / phi) - np.log(root) + np.log(special.i1e(4.0 * root / phi)))


def _compound_normalizer(v: Array, phi: float, beta: float) -> Array:
    r"""Compound Poisson series, summed around its largest term.

    With ``s = beta / (1 - beta)`` and ``m = v**beta / (phi beta)``, Stirling's
    formula turns the n-th summand, together with the part of the divergence that
    is free of the mean, into

    ``exp(-(1 + s) d_1(n | m) - stirling(n) - stirling(n s)) sqrt(s) / (2 pi v)``

    in which nothing large cancels. The summand is a smooth bump of standard
    deviation ``sqrt(m (1 - beta))`` around ``m``, so every stride-th summand times the
    stride is the sum to rounding, and 81 summands serve any argument.
    """
    out = np.empty(v.size)
    flat = v.ravel()
    for start in range(0, v.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        out[part] = _compound_sum(flat[part], phi, beta) - np.log(flat[part])
    return out.reshape(v.shape)


def _compound_sum(v: Array, phi: float, beta: float) -> Array:
    slope = beta / (1.0 - beta)
    largest = (v**beta / (phi * beta))[:, None]
    stride = np.maximum(1.0, np.floor(0.5 * np.sqrt(largest * (1.0 - beta))))
    counts = np.maximum(1.0, np.round(largest)) + stride * _NODES
    counted = counts >= 1.0
    counts = np.where(counted, counts, 1.0)
    log_terms = -(1.0 + slope) * divergence(counts, largest, 1.0)
    log_terms -= _stirling(counts) + _stirling(counts * slope)
    log_terms = np.where(counted, log_terms + np.log(stride), -np.inf)
    total = special.logsumexp(log_terms, axis=1)
    return np.asarray(total + 0.5 * np.log(slope) - _LOG_TWO_PI, dtype=np.float64)


def _sample_normal(rng: np.random.Generator, mu: Array, phi: float, beta: float) -> Array:
    return rng.normal(mu, np.sqrt(phi))


def _sample_poisson(rng: np.random.Generator, mu: Array, phi: float, beta: float) -> Array:
    return np.asarray(phi * rng.poisson(mu / phi), dtype=np.float64)


def _sample_compound(rng: np.random.Generator, mu: Array, phi: float, beta: float) -> Array:
    jumps = rng.poisson(mu**beta / (phi * beta))
    scale = phi * (1.0 - beta) * mu ** (1.0 - beta)
    return np.asarray(scale * rng.standard_gamma(jumps * beta / (1.0 - beta)))


def _sample_gamma(rng: np.random.Generator, mu: Array, phi: float, beta: float) -> Array:
    return phi * mu * rng.standard_gamma(1.0 / phi, size=mu.shape)


def _sample_inverse_gaussian(rng: np.random.Generator, mu: Array, phi: float, beta: float) -> Array:
    return np.asarray(rng.wald(mu, 1.0 / phi, size=mu.shape), dtype=np.float64)


_COMPOUND = Density("non-negative", _compound_normalizer, _sample_compound)
_LAWS: dict[float, Density] = {
    2.0: Density("real", _normal_normalizer, _sample_normal),
    1.0: Density("non-negative", _poisson_normalizer, _sample_poisson),
    0.5: Density("non-negative", _half_normalizer, _sample_compound),
    0.0: Density("positive", _gamma_normalizer, _sample_gamma),
    -1.0: Density("positive", _inverse_gaussian_normalizer, _sample_inverse_gaussian),
}


def density(beta: float) -> Density | None:
    """Find what is known of the law with this beta; None: its density has no form here."""
    return _LAWS.get(beta, _COMPOUND if 0.0 < beta < 1.0 else None)
