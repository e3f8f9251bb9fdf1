r"""Quantiles of weighted values.

With weights w and their distribution function F, the quantile at level p is

.. math:: Q(p) = n \int_{p (1 - 1/n)}^{p (1 - 1/n) + 1/n} F^{-1}(u) \, du, \qquad
    n = \frac{1}{\sum_m w_m^2}.

For n equal weights the window of width 1/n overlaps two neighbouring steps of the inverse
of F, in the very shares in which `numpy.quantile` takes their mean. A weight of 0 is as
good as none, and a small one does little, however far off its value is. A value that is
split into two of half its weight counts as two draws: n rises, and the new window lies
within the old one. That cannot be otherwise: of 0, 0, 1, 1, all of one weight, the usual
quantile is not that of 0, 1.

Source: Akinshin 2023, "Weighted quantile estimators" (that of type 7); n is Kish's.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from daskfactor.results.weights import effective_number

Array = NDArray[Any]

_SLAB: Final = 2**18
"""Values that are sorted at a time: their order and weights take several times their room."""


def weighted_quantiles(
    values: Array, weights: NDArray[np.float64], levels: tuple[float, ...]
) -> NDArray[np.float64]:
    r"""Quantiles over the first axis, :math:`n \int F^{-1}` over windows of width 1/n.

    Parameters
    ----------
    values
        (M, ...), any unit.
    weights
        (M,), positive, of any sum.
    levels
        Between 0 and 1.

    Returns
    -------
    ndarray of float64
        (level, ...), in the unit of the values.

    References
    ----------
    Akinshin 2023.
    """
    masses = weights / weights.sum()
    width = 1.0 / effective_number(masses)
    count = len(values)
    flat = values.reshape(count, -1)
    out = np.empty((len(levels), flat.shape[1]))
    step = max(1, _SLAB // count)
    for start in range(0, flat.shape[1], step):
        part = np.ascontiguousarray(flat[:, start : start + step].T)
        order = np.argsort(part, axis=1, kind="stable")
        ordered = np.take_along_axis(part, order, axis=1).astype(np.float64)
        above = np.cumsum(masses[order], axis=1)
        for at, level in enumerate(levels):
            out[at, start : start + step] = _window_mean(ordered, above, level, width)
    return out.reshape(len(levels), *values.shape[1:])


def _window_mean(
    ordered: NDArray[np.float64], above: NDArray[np.float64], level: float, width: float
) -> NDArray[np.float64]:
    """Mean of each row's inverse distribution function over the window of a level."""
    low = level * (1.0 - width)
    inside = np.clip(above, low, low + width)
    inside[:, 1:] -= inside[:, :-1].copy()
    inside[:, 0] -= low
    first = ordered[:, :1]  # what is equal in all draws stays so to the last bit
    mean = np.einsum("nm,nm->n", inside, ordered - first) / inside.sum(axis=1)
    return np.asarray(first[:, 0] + mean)
