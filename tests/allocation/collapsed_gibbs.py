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
def _change(m, h, step, row, column, total_row, total_column, counts, totals):
    """Put a token into its urns, or take it out of them."""
    for n in range(row.shape[1]):
        counts[row[m, n] + column[n, h]] += step
        totals[total_row[m, n] + total_column[n, h]] += step


@inline
def _predictive(m, h, row, column, total_row, total_column, alpha, alpha_total, counts, totals):
    """Probability of a token's draws one after the other; the urns are left as they were."""
    p = 1.0
    for n in range(row.shape[1]):
        cell, total = row[m, n] + column[n, h], total_row[m, n] + total_column[n, h]
        p *= (alpha[n] + counts[cell]) / (alpha_total[n] + totals[total])
        counts[cell] += 1
        totals[total] += 1
    _change(m, h, -1, row, column, total_row, total_column, counts, totals)
    return p


@jit_exact
def gibbs_sweep(
    row,
    column,
    total_row,
    total_column,
    alpha,
    alpha_total,
    cell,
    state,
    counts,
    totals,
    weight,
    key,
    sweep,
):
    """Draw the hidden state of every token given all others.

    Parameters
    ----------
    row, total_row : (M, N)
    column, total_column : (N, H)
    alpha, alpha_total : (N,)
    cell : (T,), observed cell of every token
    state : (T,), hidden states, or -1 for tokens that are in no urn yet; overwritten
    counts, totals : of the tokens' urns; overwritten
    weight : (H,) scratch
    key : (2,) uint32
    sweep : 0 <= sweep < 2**32
    """
    stream = stack_array(STREAM, np.uint64)
    last = weight.size - 1
    for t in range(cell.size):
        m = cell[t]
        if state[t] >= 0:
            _change(m, state[t], -1, row, column, total_row, total_column, counts, totals)
        running = 0.0
        for h in range(weight.size):
            running += _predictive(
                m, h, row, column, total_row, total_column, alpha, alpha_total, counts, totals
            )
            weight[h] = running
        start_cell(stream, key, sweep, t, 0)
        u = uniform(stream) * running
        h = 0
        while h < last and weight[h] <= u:
            h += 1
        state[t] = h
        _change(m, h, 1, row, column, total_row, total_column, counts, totals)


class GibbsResult(NamedTuple):
    """What a chain saw.

    Attributes
    ----------
    log_f : (draws,)
        Log of the urns' law at the counts after every sweep.
    mean_counts : (cells,)
        Mean of the counts over the sweeps.
    """

    log_f: Wide
    mean_counts: Wide


def run_gibbs(compiled, draws, tune, seed, chain=0):
    r"""Sweeps of :math:`h_t \sim p(h_t \mid h_{-t}, X)` over all tokens t.

    Parameters
    ----------
    urns
        Of a model and counts.
    draws, tune
        Sweeps that are averaged over, and sweeps before them. The first one puts tokens
        into empty urns one after the other.
    seed, chain
        Address of the random numbers.

    Notes
    -----
    Memory is 16 bytes a token, besides the counts; time is tokens times states a sweep.
    """
    cell = np.repeat(np.arange(compiled.values.size), compiled.values)
    state = np.full(cell.size, -1, np.int64)
    counts, totals = np.zeros(compiled.cells, np.int64), np.zeros(compiled.totals, np.int64)
    weight, key = np.empty(compiled.states), noise_key(seed, chain)
    mean, logs = np.zeros(compiled.cells), np.empty(draws)
    for sweep in range(tune + draws):
        gibbs_sweep(
            compiled.row,
            compiled.column,
            compiled.total_row,
            compiled.total_column,
            compiled.alpha,
            compiled.alpha_total,
            cell,
            state,
            counts,
            totals,
            weight,
            key,
            sweep,
        )
        if sweep >= tune:
            mean += counts
            logs[sweep - tune] = log_f(compiled, counts)
    return GibbsResult(logs, mean / draws)
