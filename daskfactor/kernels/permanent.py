"""Sums over all matchings of rows with columns, in logarithms."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import jit

Array = NDArray[Any]


@jit
def _add_logs(a: float, b: float) -> float:
    """``log(exp(a) + exp(b))``."""
    if a < b:
        a, b = b, a
    return a if b == -np.inf else a + math.log1p(math.exp(b - a))


@jit
def log_permanent(logs: Array, table: Array) -> float:
    """``log sum over permutations p of prod_k exp(logs[k, p(k)])``, nothing cancelled.

    Over subsets of columns, K 2**(K - 1) additions: table[set] is the sum over the ways to
    match the first rows, as many as the set has columns, with the set.

    Parameters
    ----------
    logs : (K, K) float64
    table : (2**K,) float64, scratch

    Notes
    -----
    By the rule of Held and Karp; Ryser's formula is as fast but takes differences.
    """
    K = logs.shape[0]
    table[0] = 0.0
    for chosen in range(1, 1 << K):
        row = -1
        for column in range(K):
            row += (chosen >> column) & 1
        total = -np.inf
        for column in range(K):
            if (chosen >> column) & 1:
                total = _add_logs(total, table[chosen ^ (1 << column)] + logs[row, column])
        table[chosen] = total
    return table[(1 << K) - 1]
