r"""Search the best columns of every row by a score over all draws, skipping cells by a bound.

With draws of one row, a = (a_1, ..., a_D), and of one column, b, all of K components one after
another, the scores are functions of

    mu_d = a_d . b_d,    mean = sum_d w_d mu_d,    quantile of mu_d at a level

and every cell has an upper bound of its score. A cell whose bound is below the n-th best score of
its row cannot be among the n best. Ties go to the column with the smaller number, so that the
result does not depend on the order of the search.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import jit, jit_exact

Array = NDArray[Any]
Wide = NDArray[np.float64]
Ints = NDArray[np.int64]


@jit
def means_of_draws(a: Array, b: Array, out: Wide) -> None:
    """Compute mu_d of one cell, (D,), from draws of its row and its column, (D * K,)."""
    width = a.size // out.size
    for d in range(out.size):
        total = 0.0
        for k in range(d * width, (d + 1) * width):
            total += np.float64(a[k]) * np.float64(b[k])
        out[d] = total


@jit
def means_of_cells(rows: Array, columns: Array, out: Wide) -> None:
    """Compute mu of some draws of all cells, (D, R, C), from factors (D, R, K) and (D, C, K)."""
    for d in range(out.shape[0]):
        for r in range(out.shape[1]):
            for c in range(out.shape[2]):
                total = 0.0
                for k in range(rows.shape[2]):
                    total += np.float64(rows[d, r, k]) * np.float64(columns[d, c, k])
                out[d, r, c] = total


@jit_exact
def mean_of(mu: Wide, weights: Wide) -> float:
    """Return the sum of w_d mu_d."""
    total = 0.0
    for d in range(mu.size):
        total += weights[d] * mu[d]
    return total


@jit_exact
def quantile_of(mu: Wide, weights: Wide, level: float, equal: bool, order: Ints) -> float:
    """Return a quantile as defined in `results.predictive_moments`; sorts ``mu`` in place.

    With ``equal`` weights, interpolate linearly between draws; otherwise average the inverse
    distribution function over a window with a width of one over the effective number of draws.
    """
    count = mu.size
    if equal:
        mu.sort()
        place = level * (count - 1)
        below = int(place)
        above = min(below + 1, count - 1)
        return float(mu[below] + (place - below) * (mu[above] - mu[below]))
    for d in range(count):  # insertion sort, as few draws have weight
        at = d
        while at > 0 and mu[order[at - 1]] > mu[d]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = d
    width = 0.0
    for d in range(count):
        width += weights[d] * weights[d]
    low = level * (1.0 - width)
    reached, before, total, mass = 0.0, 0.0, 0.0, 0.0
    for d in order:
        reached += weights[d]
        inside = min(max(reached, low), low + width) - min(max(before, low), low + width)
        total += inside * mu[d]
        mass += inside
        before = reached
    return total / mass


@jit_exact
def is_among(numbers: Ints, low: int, high: int, number: int) -> bool:
    """Return True if a number is among the ascending ones from ``low`` up to ``high``."""
    stop = high
    while low < stop:
        middle = (low + stop) // 2
        if numbers[middle] < number:
            low = middle + 1
        else:
            stop = middle
    return bool(low < high and numbers[low] == number)


@jit_exact
def insert(scores: Wide, columns: Ints, score: float, column: int) -> None:
    """Insert a column into the n best of a row, and drop the last one."""
    at = scores.size - 1
    while at > 0 and (
        score > scores[at - 1] or (score == scores[at - 1] and column < columns[at - 1])
    ):
        scores[at], columns[at] = scores[at - 1], columns[at - 1]
        at -= 1
    scores[at], columns[at] = score, column


@jit_exact
def search(
    bounds: NDArray[np.float32],
    rows: Array,
    columns: Array,
    numbers: Ints,
    weights: Wide,
    level: float,
    equal: bool,
    starts: Ints,
    excluded: Ints,
    scores: Wide,
    best: Ints,
    mu: Wide,
    order: Ints,
) -> int:
    """Update the n best columns of some rows with more columns.

    Parameters
    ----------
    bounds : (R, C)
        Upper bounds of the scores.
    rows, columns : (R, D * K), (C, D * K)
        Draws of the factors.
    numbers : (C,)
        Numbers of the columns.
    weights : (D,)
        Masses of the draws, which add up to 1; ``equal`` if all are the same.
    level
        Level of the quantile that is the score; negative if the score is the mean.
    starts, excluded : (R + 1,), (E,)
        Excluded columns of each row, in ascending order.
    scores, best : (R, n)
        Best scores and columns so far, in descending order; minus infinity and -1 if missing.
    mu, order : (D,)
        Scratch arrays.

    Returns
    -------
    int
        Number of computed scores.
    """
    looked, last = 0, scores.shape[1] - 1
    for r in range(bounds.shape[0]):
        least = scores[r, last]
        for c in range(bounds.shape[1]):
            if bounds[r, c] < least:
                continue
            if is_among(excluded, starts[r], starts[r + 1], numbers[c]):
                continue
            means_of_draws(rows[r], columns[c], mu)
            if level < 0.0:
                score = mean_of(mu, weights)
            else:
                score = quantile_of(mu, weights, level, equal, order)
            looked += 1
            if score > least or (score == least and numbers[c] < best[r, last]):
                insert(scores[r], best[r], score, numbers[c])
                least = scores[r, last]
    return looked


@jit_exact
def describe(
    rows: Array,
    columns: Array,
    row_at: Ints,
    column_at: Ints,
    weights: Wide,
    levels: Wide,
    equal: bool,
    out: Wide,
    mu: Wide,
    order: Ints,
) -> None:
    """Compute mean, standard deviation and two quantiles of some cells, (p, 4)."""
    for p in range(row_at.size):
        means_of_draws(rows[row_at[p]], columns[column_at[p]], mu)
        mean, square = mean_of(mu, weights), 0.0
        for d in range(mu.size):
            square += weights[d] * (mu[d] - mean) ** 2
        out[p, 0], out[p, 1] = mean, np.sqrt(square)
        out[p, 2] = quantile_of(mu, weights, levels[0], equal, order)
        if not equal:  # equal weights do not depend on the order of the draws
            means_of_draws(rows[row_at[p]], columns[column_at[p]], mu)
        out[p, 3] = quantile_of(mu, weights, levels[1], equal, order)
