"""Collapsed Gibbs sampling of hidden states, token by token: a check on the other methods.

    p(h | rest) ∝ prod_n (alpha_n + C[cell_n] + c_n) / (A_n + D[total_n] + d_n)

without the token itself; c_n and d_n count its own earlier draws from the same table.
Uniforms are addressed by (sweep, token).

Source: M. B. Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor
factorizations by simulating Pólya urns".
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import inline, jit_exact, stack_array
from daskfactor.kernels.variates import STREAM, start_cell, uniform
from daskfactor.random import noise_key
from tests.allocation.cases import log_f

Scalar = Any
Wide = NDArray[np.float64]
Places = NDArray[np.int64]


@inline
def _change(m, h, step, urns, counts, totals):
    """Put a token into its urns, or take it out of them."""
    row, column, total_row, total_column, _, _ = urns
    for n in range(row.shape[1]):
        counts[row[m, n] + column[n, h]] += step
        totals[total_row[m, n] + total_column[n, h]] += step


@inline
def _predictive(m, h, urns, counts, totals):
    """Probability of a token's draws one after the other; the urns are left as they were."""
    row, column, total_row, total_column, alpha, alpha_total = urns
    p = 1.0
    for n in range(row.shape[1]):
        cell, total = row[m, n] + column[n, h], total_row[m, n] + total_column[n, h]
        p *= (alpha[n] + counts[cell]) / (alpha_total[n] + totals[total])
        counts[cell] += 1
        totals[total] += 1
    _change(m, h, -1, urns, counts, totals)
    return p


@jit_exact
def gibbs_sweep(urns, cell, state, counts, totals, weight, key, sweep):
    """Draw the hidden state of every token given all others.

    Tokens lie in the observed cells ``cell`` (T,); a state of -1 is that of a token in no urn
    yet. States and the counts of the urns are overwritten, ``weight`` (H,) is scratch.
    """
    stream = stack_array(STREAM, np.uint64)
    last = weight.size - 1
    for t in range(cell.size):
        m = cell[t]
        if state[t] >= 0:
            _change(m, state[t], -1, urns, counts, totals)
        running = 0.0
        for h in range(weight.size):
            running += _predictive(m, h, urns, counts, totals)
            weight[h] = running
        start_cell(stream, key, sweep, t, 0)
        u = uniform(stream) * running
        h = 0
        while h < last and weight[h] <= u:
            h += 1
        state[t] = h
        _change(m, h, 1, urns, counts, totals)


def urns_of(compiled):
    names = "row", "column", "total_row", "total_column", "alpha", "alpha_total"
    return tuple(getattr(compiled, name) for name in names)


class GibbsResult(NamedTuple):
    """The log of the urns' law at the counts after every sweep, and the means of the counts."""

    log_f: Wide
    mean_counts: Wide


def run_gibbs(compiled, draws, tune, seed, chain=0):
    """Sweep over all tokens ``tune + draws`` times, at first into empty urns."""
    cell = np.repeat(np.arange(compiled.values.size), compiled.values)
    state = np.full(cell.size, -1, np.int64)
    counts, totals = np.zeros(compiled.cells, np.int64), np.zeros(compiled.totals, np.int64)
    weight, key = np.empty(compiled.states), noise_key(seed, chain)
    mean, logs = np.zeros(compiled.cells), np.empty(draws)
    for sweep in range(tune + draws):
        gibbs_sweep(urns_of(compiled), cell, state, counts, totals, weight, key, sweep)
        if sweep >= tune:
            mean += counts
            logs[sweep - tune] = log_f(compiled, counts)
    return GibbsResult(logs, mean / draws)
