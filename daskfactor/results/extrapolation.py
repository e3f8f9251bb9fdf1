"""Richardson–Romberg extrapolation of moments, for predictions and streamed cells alike."""

from typing import Any, Final

import numpy as np

FLOOR: Final = 0.1
"""Least share of the fine chain's value that an extrapolated positive number keeps."""


def extrapolated_moments(
    fine: tuple[Any, Any], coarse: tuple[Any, Any], nonnegative: bool
) -> tuple[Any, Any]:
    """Mean and variance free of the bias of first order in ε: 2 fine - coarse, each.

    A variance is no expectation of a function, but its bias has an expansion in
    ε all the same. Noise can make the combination negative where the truth is
    not; both are kept at a tenth of the fine chain's value or more.

    Parameters
    ----------
    fine, coarse
        Mean and variance from each chain; NumPy or dask arrays.
    nonnegative
        Whether the mean cannot be negative.

    Notes
    -----
    Şimşekli et al. 2017, equation 11.
    """
    mean, variance = 2.0 * fine[0] - coarse[0], 2.0 * fine[1] - coarse[1]
    if nonnegative:
        mean = np.maximum(mean, FLOOR * fine[0])
    return mean, np.maximum(variance, FLOOR * fine[1])
