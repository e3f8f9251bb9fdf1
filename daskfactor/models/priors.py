"""Log-densities of the priors on the factors."""

import numpy as np
from numpy.typing import ArrayLike

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
