"""Mean-field variational Bayes for allocation models: a lower bound of the log evidence.

Hidden parts of the tokens of one observed cell are multinomial under q, tables are
Dirichlet, the intensity is gamma, all independent of one another. With

    log q(h | m) = sum_n [psi(beta(cell_n)) - psi(sum beta(total_n))] + const
    beta = alpha + <C>

the bound at the beta that belongs to q is

    ELBO = log_factor + constant + log f(<C>) - sum_m X_m sum_h q(h | m) log q(h | m)

where log f is the law of the urns' counts, continued to real counts. Draws from one
shared table need nothing of their own: log theta enters the joint density linearly, so
<C> is the sum of the expected counts of all draws, and the formulas stay as they are.

Source: M. B. Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor
factorizations by simulating Pólya urns".
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from daskfactor.allocation.compiled_model import CompiledModel
from daskfactor.kernels.mean_field import (
    add_up,
    gamma_functions,
    inner,
    share_out,
)
from daskfactor.random import Stream, generator

Vector = NDArray[np.float64]
Map = Callable[[Callable[[int, Any], "Start"], Sequence[int]], "list[Start]"]

BLUNT = (1.0, 0.3, 3.0, 0.1, 0.6)
"""Pseudo-counts that starts begin with, in turn: large ones find what is coarse, small ones fine
structure; which bound is the largest depends on how much is counted a cell."""
BLUNT_SWEEPS = 100
SPREAD = 10.0
"""Shape of the gamma numbers that tables are made of at first, and jolted by later."""
KEPT = 2**27
"""Bytes of counts that all starts may send back; beyond it the best one is run again."""


class VBResult(NamedTuple):
    """What many starts came to.

    Attributes
    ----------
    elbo
        The largest bound, in nats.
    elbos
        Bounds of every start, (starts, iterations), NaN where a start had ended.
    iterations, converged
        Of every start: sweeps, and whether the bound had stopped to rise.
    best
        The start with the largest bound.
    mean_counts
        Expected counts of all urns under the best q, (cells,).
    """

    elbo: float
    elbos: Vector
    iterations: NDArray[np.int64]
    converged: NDArray[np.bool_]
    best: int
    mean_counts: Vector


class Start(NamedTuple):
    """What one start came to; ``counts`` may be left out."""

    elbos: Vector
    converged: bool
    counts: Vector | None


class Field(NamedTuple):
    """What a start needs of the `CompiledModel`: arrays alone, and little to send to a worker.

    Attributes
    ----------
    row, column, values, owner, alpha, alpha_total
        As in `CompiledModel`; pseudo-counts by place.
    straight : (N,)
        Whether a draw's hidden configurations are 0, 1, 2, ...
    level
        The bound's part that no q changes.
    """

    row: NDArray[np.int64]
    column: NDArray[np.int64]
    values: NDArray[np.int64]
    owner: NDArray[np.int64]
    alpha: Vector
    alpha_total: Vector
    straight: NDArray[np.bool_]
    level: float

    @classmethod
    def of(cls, compiled: CompiledModel) -> Self:
        """Take the arrays of a compiled problem."""
        alpha, alpha_total = compiled.cell_alpha, compiled.total_alpha
        cells, totals = np.zeros(compiled.cells), np.zeros(compiled.totals)
        empty = gamma_functions(alpha, cells, cells.copy())
        empty -= gamma_functions(alpha_total, totals, totals.copy())
        straight = (compiled.column == np.arange(compiled.states)).all(axis=1)
        level = compiled.log_factor + compiled.constant - empty
        rows = compiled.row, compiled.column, compiled.values, compiled.owner
        return cls(*rows, alpha, alpha_total, straight, level)


class Climb:
    """One ascent from random tables; ``elbo`` is the bound at ``counts`` after a sweep."""

    def __init__(self, field: Field, rng: np.random.Generator) -> None:
        self.field, self.rng = field, rng
        cells, totals = field.alpha.size, field.alpha_total.size
        self.share = np.empty(field.column.shape[1])
        self.counts, self.totals = np.zeros(cells), np.zeros(totals)
        self.digamma, self.total_digamma = np.empty(cells), np.empty(totals)
        self.weight, self.level = np.ones(cells), np.zeros(cells)
        self.elbo = -np.inf
        self._jolt()

    def blunt(self, pseudo: float, sweeps: int) -> None:
        """Sweep with posterior mean tables under larger pseudo-counts, then a small jolt.

        Expectations of logarithms under small pseudo-counts hold on to whatever the first
        sweep happened to share out. The jolt is for few tokens, where these sweeps end with
        hidden states that are all alike: no maximum under the model's own pseudo-counts.
        """
        alpha = np.maximum(self.field.alpha, pseudo)
        for _ in range(sweeps):
            self._share_out()
            np.add(alpha, self.counts, out=self.weight)
            add_up(self.field.owner, self.weight, self.totals)
            self.weight /= self.totals[self.field.owner]
            np.log(self.weight, out=self.level)
        self._jolt()

    def _jolt(self) -> None:
        self.weight *= self.rng.standard_gamma(SPREAD, self.weight.size)
        np.log(self.weight, out=self.level)

    def sweep(self) -> None:
        """Update q, the counts and pseudo-counts that belong to it, and their bound."""
        field = self.field
        norms = self._share_out()
        entropy = norms - inner(self.counts, self.level)
        add_up(field.owner, self.counts, self.totals)
        log_f = gamma_functions(field.alpha, self.counts, self.digamma)
        log_f -= gamma_functions(field.alpha_total, self.totals, self.total_digamma)
        self.elbo = field.level + log_f + entropy
        np.subtract(self.digamma, self.total_digamma[field.owner], out=self.level)
        np.exp(self.level, out=self.weight)

    def _share_out(self) -> float:
        """Expected counts under the q that belongs to the present tables."""
        field = self.field
        norms: float = share_out(
            field.row,
            field.column,
            field.straight,
            field.values,
            self.weight,
            self.level,
            self.share,
            self.counts,
        )
        return norms


def run_vb(
    compiled: CompiledModel,
    starts: int,
    limits: tuple[int, float],
    seed: int,
    map_function: Map,
) -> VBResult:
    """Climb from random tables many times, and take the best ascent.

    Parameters
    ----------
    compiled
        Of a model and counts.
    starts
        How many ascents.
    limits
        When one ends: after so many iterations, or when a sweep raises the bound by less
        than this share of its size.
    seed
        Every start has random numbers of its own, whoever runs it.
    map_function
        Calls ``function(item, workspace)`` for all items.
    """
    one = partial(_one_start, Field.of(compiled), limits, seed)
    light = starts * compiled.cells * 8 <= KEPT
    found = map_function(partial(one, light), range(starts))
    finals = np.array([start.elbos[-1] for start in found])
    best = int(finals.argmax())
    counts = found[best].counts
    if counts is None:
        counts = one(True, best).counts
    assert counts is not None
    iterations = np.array([start.elbos.size for start in found])
    elbos = np.full((starts, iterations.max()), np.nan)
    for row, start in zip(elbos, found, strict=True):
        row[: start.elbos.size] = start.elbos
    converged = np.array([start.converged for start in found])
    return VBResult(float(finals[best]), elbos, iterations, converged, best, counts)


def _one_start(
    field: Field,
    limits: tuple[int, float],
    seed: int,
    keep: bool,
    number: int,
    work: Any = None,
) -> Start:
    """Climb from one start; what an executor maps, on any machine."""
    del work
    most, tolerance = limits
    climb = Climb(field, generator(seed, number, Stream.START, field.column.shape[1]))
    climb.blunt(BLUNT[number % len(BLUNT)], BLUNT_SWEEPS)
    elbos = np.empty(most)
    converged, done = False, 0
    while done < most and not converged:
        before = climb.elbo
        climb.sweep()
        elbos[done] = climb.elbo
        done += 1
        converged = climb.elbo - before <= tolerance * abs(climb.elbo)
    return Start(elbos[:done].copy(), bool(converged), climb.counts if keep else None)
