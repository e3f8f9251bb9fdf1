"""Log-densities of the priors on the factors."""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from daskfactor.errors import ModelError


def exponential_log_density(factor: ArrayLike, rate: float) -> float:
    """Summed log-density of independent exponentials: ``sum(log(rate) - rate * factor)``.

    Parameters
    ----------
    factor
        Any shape; minus infinity is returned if an entry is negative.
    rate
        Rate of the exponential, one over its mean, in one over the unit of the factor.

    Returns
    -------
    float
        Sum over all entries, accumulated in double precision.

    Raises
    ------
    ModelError
        If the rate is not positive and finite.

    References
    ----------
    Şimşekli et al. 2017, section 2.
    """
    if not 0.0 < rate < np.inf:
        raise ModelError(f"the rate of an exponential prior must be positive, got {rate!r}")
    factor = np.asarray(factor)
    if np.any(factor < 0):
        return -np.inf
    return float(factor.size * np.log(rate) - rate * np.sum(factor, dtype=np.float64))


def gamma_log_density(factor: ArrayLike, rate: float, shape: float = 1.0) -> float:
    """Summed log-density of independent gamma variables.

    ``sum(shape log(rate) - log Gamma(shape) + (shape - 1) log(factor) - rate factor)``

    Parameters
    ----------
    factor
        Any shape; minus infinity is returned if an entry is negative, and also if one
        is zero with ``shape > 1``. With ``shape < 1`` the density at zero is infinite.
    rate
        Rate, in one over the unit of the factor.
    shape
        Shape; 1 is the exponential.

    Returns
    -------
    float
        Sum over all entries, accumulated in double precision.

    Raises
    ------
    ModelError
        If rate or shape is not positive and finite.
    """
    linear = exponential_log_density(factor, rate)
    if not 0.0 < shape < np.inf:
        raise ModelError(f"the shape of a gamma prior must be positive, got {shape!r}")
    if shape == 1.0 or linear == -np.inf:
        return linear
    factor = np.asarray(factor)
    with np.errstate(divide="ignore"):
        logs = float(np.sum(np.log(factor), dtype=np.float64))
    constant = factor.size * ((shape - 1.0) * math.log(rate) - math.lgamma(shape))
    return linear + constant + (shape - 1.0) * logs


def clipped_gamma_log_density(factor: NDArray[Any], rate: float, shape: float) -> float:
    """As `gamma_log_density` of a factor that a sampler has moved, always finite.

    Entries count as at least the smallest normal number: arithmetic of finite precision
    may put one on zero, where a gamma density has no finite logarithm.
    """
    if shape != 1.0:
        factor = np.maximum(factor, np.finfo(factor.dtype).tiny)
    total = float(np.sum(factor, dtype=np.float64))
    density = factor.size * math.log(rate) - rate * total
    if shape != 1.0:
        logs = float(np.sum(np.log(factor), dtype=np.float64))
        density += factor.size * ((shape - 1.0) * math.log(rate) - math.lgamma(shape))
        density += (shape - 1.0) * logs
    return density
