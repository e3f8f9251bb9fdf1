"""Expected counts of hidden states: one sweep over observed cells shares each of them out.

The share of each state is in proportion to products of table entries, one factor for each draw
of a token:

    q(h | m) = prod_n weight[row[m, n] + column[n, h]] / norm[m]

Source: M. B. Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor
factorizations by simulating Pólya urns".
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import inline, jit
from daskfactor.kernels.polynomials import log

Scalar = Any
Wide = NDArray[np.float64]
Places = NDArray[np.int64]

FAINT = 1e-280
"""Products below which a cell is done again with logarithms: the tables' entries underflow."""
_HALF_LOG_TURN = 0.91893853320467274178  # log(2 pi) / 2


@inline
def _stirling(x: Scalar) -> Scalar:
    """Compute digamma and log-gamma of x > 0, from their asymptotic series at x + 8."""
    q = x * (x + 7.0)
    q1, q2, q3 = q + 6.0, q + 10.0, q + 12.0
    left, right = q * q1, q2 * q3
    slope = (2.0 * x + 7.0) * ((q + q1) / left + (q2 + q3) / right)
    y = x + 8.0
    inverse = 1.0 / y
    r = inverse * inverse
    p = 1.0 / 12.0 * r - 691.0 / 32760.0
    p = p * r + 1.0 / 132.0
    p = p * r - 1.0 / 240.0
    p = p * r + 1.0 / 252.0
    p = p * r - 1.0 / 120.0
    p = p * r + 1.0 / 12.0
    g = 1.0 / 156.0 * r - 691.0 / 360360.0
    g = g * r + 1.0 / 1188.0
    g = g * r - 1.0 / 1680.0
    g = g * r + 1.0 / 1260.0
    g = g * r - 1.0 / 360.0
    g = g * r + 1.0 / 12.0
    level = log(y)
    digamma = level - 0.5 * inverse - p * r - slope
    lgamma = (y - 0.5) * level - y + _HALF_LOG_TURN + g * inverse - (log(left) + log(right))
    return digamma, lgamma


@jit
def gamma_functions(shapes: Wide, counts: Wide, digamma: Wide) -> float:
    """Return the sum of log Gamma(shapes + counts); write their digamma into ``digamma``.

    Parameters
    ----------
    shapes, counts : (cells,), sums between 1e-300 and 1e30
    digamma : (cells,), overwritten
    """
    total = 0.0
    for cell in range(shapes.size):
        digamma[cell], lgamma = _stirling(shapes[cell] + counts[cell])
        total += lgamma
    return total


@jit
def add_up(owner: Places, counts: Wide, totals: Wide) -> None:
    """Add up the counts by total: ``owner`` (cells,) is the total that each adds to."""
    totals[:] = 0.0
    for cell in range(counts.size):
        totals[owner[cell]] += counts[cell]


@jit
def inner(x: Wide, y: Wide) -> float:
    """Return the sum of products, the same bits wherever the arrays lie in memory."""
    total = 0.0
    for cell in range(x.size):
        total += x[cell] * y[cell]
    return total


@inline
def _products(m: int, row: Places, column: Places, straight: Any, weight: Wide, share: Wide) -> Any:
    """Multiply table entries for one observed cell; return the sum of the products."""
    share[:] = 1.0
    for n in range(row.shape[1]):
        start = row[m, n]
        if straight[n]:
            for h in range(share.size):
                share[h] *= weight[start + h]
        else:
            for h in range(share.size):
                share[h] *= weight[start + column[n, h]]
    norm = 0.0
    for h in range(share.size):
        norm += share[h]
    return norm


@inline
def _faint_products(m: int, row: Places, column: Places, level: Wide, share: Wide) -> Any:
    """Do the same from logarithms, over the largest product; return the sum and that one's log."""
    share[:] = 0.0
    for n in range(row.shape[1]):
        for h in range(share.size):
            share[h] += level[row[m, n] + column[n, h]]
    top = share[0]
    for h in range(share.size):
        top = max(top, share[h])
    norm = 0.0
    for h in range(share.size):
        share[h] = np.exp(share[h] - top)
        norm += share[h]
    return norm, top


@jit
def share_out(
    row: Places,
    column: Places,
    straight: NDArray[np.bool_],
    values: Places,
    weight: Wide,
    level: Wide,
    share: Wide,
    counts: Wide,
) -> float:
    """Compute expected counts of all tables under q; return the sum of values times log norm.

    Parameters
    ----------
    row : (M, N)
    column : (N, H)
    straight : (N,), True where ``column[n]`` is 0, 1, ..., H - 1
    values : (M,) counts of the observed cells
    weight, level : (cells,), table entries and their logarithms
    share : (H,) scratch
    counts : (cells,), overwritten
    """
    counts[:] = 0.0
    total = 0.0
    for m in range(values.size):
        norm = _products(m, row, column, straight, weight, share)
        top = 0.0
        if not norm > FAINT:
            norm, top = _faint_products(m, row, column, level, share)
        scale = values[m] / norm
        for h in range(share.size):
            share[h] *= scale
        for n in range(row.shape[1]):
            start = row[m, n]
            if straight[n]:
                for h in range(share.size):
                    counts[start + h] += share[h]
            else:
                for h in range(share.size):
                    counts[start + column[n, h]] += share[h]
        total += values[m] * (np.log(norm) + top)
    return total
