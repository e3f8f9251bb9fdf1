"""Exact evidence of an allocation model, for few tokens: a sum over allocations.

Labelled allocations of the tokens are added one token after another, and those that
led to the same counts of every urn that is still to be drawn from are merged. An urn
that no later token can reach leaves the state together with its factor of f.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from daskfactor.allocation.compiled_model import (
    AllocationMethod,
    CompiledModel,
    compile_model,
    rising,
)
from daskfactor.allocation.counts import coded
from daskfactor.checks import whole_number
from daskfactor.errors import DataError
from daskfactor.evidence.base import Evidence, EvidenceProblem

LIMIT = 1_000_000
"""States in memory at a time; a state costs some hundred bytes, and time about the same."""

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Enumerated:
    """Result of a sum over all allocations.

    Attributes
    ----------
    log_evidence
        Log p(X), in nats.
    mean_counts : array (cells,)
        Posterior mean of the flat counts.
    states
        The largest number of states in memory.
    """

    log_evidence: float
    mean_counts: FloatArray
    states: int


@dataclass(frozen=True)
class Enumeration(AllocationMethod):
    """The exact log evidence of few tokens: a sum over all allocations.

    Parameters
    ----------
    limit
        Intermediate states that may be in memory at a time; a state takes some hundred bytes.

    Notes
    -----
    Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor factorizations by
    simulating Pólya urns", marginal distribution of the allocation tensor.

    ``trace`` holds the exact posterior mean tables, such as ``table_r``. All numberings
    of hidden states are equally probable, so that the states look alike there.

    Examples
    --------
    >>> import daskfactor as dfac
    >>> model = dfac.AllocationModel.nmf(2)
    >>> X = dfac.simulate(model, (3, 4), total=9, random_seed=0).counts
    >>> dfac.log_evidence(X, model, dfac.Enumeration(), progressbar=False).total_error
    0.0
    """

    limit: int = LIMIT

    def __post_init__(self) -> None:
        whole_number("limit", self.limit, 1)

    def estimate(self, problem: EvidenceProblem) -> Evidence:
        compiled = compile_model(problem.model, problem.data)
        result = enumerate_allocations(compiled, self.limit)
        trace = self._trace(compiled, result.mean_counts, {})
        return Evidence(result.log_evidence, 0.0, 0.0, trace.assign_attrs(states=result.states))


def enumerate_allocations(compiled: CompiledModel, limit: int = LIMIT) -> Enumerated:
    r"""Sum over all allocations, in nats.

    .. math:: \ln p(X) = \ln \mathrm{NB}(T) + \ln T! - \sum \ln X! + \ln \sum_z f(C(z))

    Parameters
    ----------
    compiled
        The model at the data.
    limit
        States that may be in memory at a time.

    Raises
    ------
    DataError
        If there are too many of them.

    References
    ----------
    Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor factorizations by
    simulating Pólya urns", marginal distribution of the allocation tensor.
    """
    if (least := _least_states(compiled)) > limit:
        raise _too_many(compiled, least, limit)
    walk = _Walk(compiled, limit)
    for cell, tokens in enumerate(compiled.values):
        walk.open_urns(cell)
        for _ in range(int(tokens)):
            walk.add_token(cell)
        walk.close_urns(cell)
    means = np.zeros(compiled.cells)
    means[walk.closed] = walk.closed_means[0]
    log_sum = float(walk.log_weights[0])
    return Enumerated(compiled.log_factor + compiled.constant + log_sum, means, walk.most)


def count_allocations(compiled: CompiledModel) -> float:
    """Return log10 of the number of distinct allocations S of the observed counts."""
    H = compiled.states
    logs = [math.lgamma(x + H) - math.lgamma(x + 1) - math.lgamma(H) for x in compiled.values]
    return math.fsum(logs) / math.log(10)


class _Walk:
    """Distinct states after some of the tokens, with the weights of the allocations behind them."""

    def __init__(self, compiled: CompiledModel, limit: int) -> None:
        self.compiled, self.limit = compiled, limit
        self.alpha = np.concatenate([compiled.cell_alpha, compiled.total_alpha])
        self.last = _last_cells(compiled)
        self.open: IntArray = np.zeros(0, np.int64)
        """Counts and totals in the columns of ``states``."""
        self.states = np.zeros((1, 0), np.int32)
        self.log_weights = np.zeros(1)
        self.closed: IntArray = np.zeros(0, np.int64)
        self.closed_means = np.zeros((1, 0))
        self.most = 1

    def open_urns(self, cell: int) -> None:
        """Add the urns that are drawn from for the first time."""
        new = np.setdiff1d(_places(self.compiled, cell), self.open)
        self.open = np.concatenate([self.open, new])
        blank = np.zeros((len(self.states), len(new)), np.int32)
        self.states = np.concatenate([self.states, blank], axis=1)

    def add_token(self, cell: int) -> None:
        """Let the next token take every hidden configuration."""
        states = self.compiled.states
        if len(self.states) * states > self.limit:
            raise _too_many(self.compiled, len(self.states) * states, self.limit)
        column = np.zeros(len(self.alpha), np.int64)
        column[self.open] = np.arange(len(self.open))
        added = np.zeros((states, len(self.open)), np.int32)
        for place in _places(self.compiled, cell):
            np.add.at(added, (np.arange(states), column[place]), 1)
        grown = (self.states[:, None, :] + added).reshape(-1, len(self.open))
        parents = np.repeat(np.arange(len(self.states)), states)
        self._merge(grown, self.log_weights[parents], parents)

    def close_urns(self, cell: int) -> None:
        """Multiply by the factors of urns that no later token reaches, and drop these."""
        done = self.last[self.open] == cell
        urns, counts = self.open[done], self.states[:, done]
        is_cell = urns < self.compiled.cells
        weights = self.log_weights + rising(self.alpha[urns], counts) @ np.where(is_cell, 1.0, -1.0)
        self.closed = np.concatenate([self.closed, urns[is_cell]])
        self.closed_means = np.concatenate([self.closed_means, counts[:, is_cell]], axis=1)
        self.open = self.open[~done]
        self._merge(self.states[:, ~done], weights, np.arange(len(weights)))

    def _merge(self, states: NDArray[np.int32], logs: FloatArray, parents: IntArray) -> None:
        """Merge equal rows; ``parents`` are the rows of their means of closed counts."""
        _, first, group = np.unique(coded(states.T), return_index=True, return_inverse=True)
        top = np.full(len(first), -np.inf)
        np.maximum.at(top, group, logs)
        weights = np.exp(logs - top[group])
        sums = np.bincount(group, weights, len(first))
        share = csr_array((weights / sums[group], (group, parents)))
        self.closed_means = share @ self.closed_means
        self.states, self.log_weights = states[first], top + np.log(sums)
        self.most = max(self.most, len(first))


def _places(compiled: CompiledModel, cell: int) -> IntArray:
    """Return the places of a token of an observed cell, (2 N, H): counts, then totals."""
    counts = compiled.row[cell][:, None] + compiled.column
    totals = compiled.cells + compiled.total_row[cell][:, None] + compiled.total_column
    return np.concatenate([counts, totals])


def _last_cells(compiled: CompiledModel) -> IntArray:
    """Return the last observed cell that reaches each count and each total."""
    last = np.zeros(compiled.cells + compiled.totals, np.int64)
    for cell in range(len(compiled.values)):
        last[_places(compiled, cell)] = cell
    return last


def _least_states(compiled: CompiledModel) -> int:
    """Return a lower bound of the states: those of tables that every token draws from."""
    least = _choices(int(compiled.values.max()), len(np.unique(compiled.column, axis=1).T))
    alone = np.bincount(compiled.group)[compiled.group] == 1
    for n in np.flatnonzero(alone & (compiled.row == compiled.row[0]).all(axis=0)):
        least = max(least, _choices(compiled.total, len(np.unique(compiled.column[n]))))
    return least


def _choices(tokens: int, kinds: int) -> int:
    """Count the ways to share tokens out over kinds, up to about 1e300."""
    log = math.lgamma(tokens + kinds) - math.lgamma(tokens + 1) - math.lgamma(kinds)
    return round(math.exp(log)) if log < 690 else 10**300


def _too_many(compiled: CompiledModel, states: int, limit: int) -> DataError:
    size = f"{states:,}" if states < 10**15 else f"10^{math.log10(states):.0f}"
    ways = f"10^{count_allocations(compiled):.1f}"
    return DataError(
        f"the {compiled.total} tokens can be allocated in {ways} ways, which need "
        f"{size} states at a time or more, above the limit of {limit:,}; use "
        "SequentialMonteCarlo() or VariationalBayes() instead, or raise the limit"
    )
