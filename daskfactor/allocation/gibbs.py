"""Collapsed Gibbs sampling of hidden states, token by token: a check on the other methods.

Source: M. B. Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor
factorizations by simulating Pólya urns".
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.collapsed import gibbs_sweep
from daskfactor.random import noise_key

if TYPE_CHECKING:
    from daskfactor.allocation.compiled_model import Urns

Vector = NDArray[np.float64]


class GibbsResult(NamedTuple):
    """What a chain saw.

    Attributes
    ----------
    log_f : (draws,)
        Log of the urns' law at the counts after every sweep.
    mean_counts : (cells,)
        Mean of the counts over the sweeps.
    """

    log_f: Vector
    mean_counts: Vector


def run_gibbs(urns: "Urns", draws: int, tune: int, seed: int, chain: int = 0) -> GibbsResult:
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
    cell = np.repeat(np.arange(urns.values.size), urns.values)
    state = np.full(cell.size, -1, np.int64)
    counts, totals = np.zeros(urns.cells, np.int64), np.zeros(urns.totals, np.int64)
    weight, key = np.empty(urns.states), noise_key(seed, chain)
    mean, log_f = np.zeros(urns.cells), np.empty(draws)
    for sweep in range(tune + draws):
        gibbs_sweep(
            urns.row,
            urns.column,
            urns.total_row,
            urns.total_column,
            urns.alpha,
            urns.alpha_total,
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
            log_f[sweep - tune] = urns.log_f(counts)
    return GibbsResult(log_f, mean / draws)
