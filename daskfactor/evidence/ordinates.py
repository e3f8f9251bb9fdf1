"""Posterior ordinates from Gibbs sweeps: how dense the conditionals are at a point.

The conditional of a factor given S and the other factor is a product of gamma
densities. Its density at a point, averaged over sweeps, is the factor's own posterior
density there (Rao and Blackwell). What is recorded of a sweep is the table

    A[k, l] = Σ_i log Gamma(point_ik; a + s_i.l, λ + rate_il)

of the point's component k under the conditional of the sampler's component l, from
which every way to name the components can be looked at.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.special import gammaln, logsumexp

from daskfactor.executors.state import FactorBand
from daskfactor.inference.gibbs import GibbsProgram
from daskfactor.inference.program import COLUMNS, ROWS
from daskfactor.kernels.multinomial import Wide
from daskfactor.kernels.permanent import log_permanent

POINT = "point"
"""Where a band carries its part of the point, in double precision."""

ALL_UP_TO = 11
"""Components up to which all permutations are summed over by default."""
SAMPLED = 2000
"""Permutations that stand for all where there are too many."""


@dataclass(frozen=True)
class OrdinateProgram(GibbsProgram):
    """Gibbs sweeps that record densities at a point of one factor, as draws of its bands.

    Of W the table A; of H, under a frozen W, the log-density of every row.
    """

    measured: int = ROWS

    def _conditional(self, band: FactorBand, factor: int) -> tuple[Wide, Wide]:
        shapes, rates = super()._conditional(band, factor)
        if factor == self.measured:
            point, frozen = band.arrays[POINT], self.frozen[COLUMNS]
            if factor == ROWS:
                band.draws.append(table(point, shapes, rates))
            else:
                each = entries(point, shapes, rates)
                band.draws.append((each if frozen is None else each[:, ~frozen]).sum(axis=1))
        return shapes, rates

    def touches(self, op: object) -> tuple[str, ...]:
        """Names of a band's arrays that an operation reads or writes."""
        del op
        return (POINT,)

    def changes(self, op: object) -> tuple[str, ...]:
        """Nothing that a state holds."""
        del op
        return ()


def entries(point: Wide, shapes: Wide, rates: Wide) -> Wide:
    """Log-density of every entry of the point under its gamma law."""
    found: Wide = shapes * np.log(rates) - gammaln(shapes)
    found += (shapes - 1.0) * _log(point) - rates * point
    return found


def _log(point: Wide) -> Wide:
    """Log of a point; frozen components may be zero, and are left out afterwards."""
    return np.log(np.maximum(point, np.finfo(np.float64).tiny))


def table(point: Wide, shapes: Wide, rates: Wide) -> Wide:
    """Log-densities of the point's columns under every column's gamma laws, (K, K)."""
    constant = (shapes * np.log(rates) - gammaln(shapes)).sum(axis=0)
    found: Wide = constant + _log(point).T @ (shapes - 1.0) - point.T @ rates
    return found


class Naming:
    """Which permutations of the components are looked at, and the average over them.

    Parameters
    ----------
    exchangeable
        (K,) which components have no name of their own: those that nothing is frozen of.
    free
        (K,) which components have a density: those that are not frozen in the factor.
    count
        ``"auto"``: all permutations up to ALL_UP_TO components, else SAMPLED of them;
        or a number of them.
    rng
        Draws the permutations.
    """

    def __init__(
        self,
        exchangeable: NDArray[np.bool_],
        free: NDArray[np.bool_],
        count: int | str,
        rng: np.random.Generator,
    ) -> None:
        self.exchangeable = np.flatnonzero(exchangeable)
        self.named = np.flatnonzero(free & ~exchangeable)
        size = self.exchangeable.size
        every = math.factorial(size)
        if count == "auto":
            count = every if size <= ALL_UP_TO else SAMPLED
        self.all = size <= 1 or (int(count) >= every and size <= 2 * ALL_UP_TO)
        self.count = every if self.all else int(count)
        self._scratch = np.empty(2**size if self.all else 0)
        self._sampled = (
            np.zeros((0, size), np.int64)
            if self.all
            else rng.permuted(np.tile(np.arange(size), (self.count - 1, 1)), axis=1)
        )

    def average(self, A: Wide) -> float:
        """Log of the mean over permutations of the density that a table A gives."""
        named = float(A[self.named, self.named].sum())
        own = np.ascontiguousarray(A[np.ix_(self.exchangeable, self.exchangeable)])
        if own.size == 0:
            return named
        if self.all:
            return named + float(log_permanent(own, self._scratch)) - _log_factorial(len(own))
        return named + self._stratified(own)

    def _stratified(self, A: Wide) -> float:
        """The best permutation for itself, and the rest by a sample of all: no bias."""
        every = np.arange(len(A))
        _, best = linear_sum_assignment(-A)
        top = float(A[every, best].sum()) - _log_factorial(len(A))
        others = A[every, self._sampled].sum(axis=1)
        others = others[(self._sampled != best).any(axis=1)]
        if not others.size:
            return top
        rest = float(logsumexp(others)) - math.log(len(self._sampled))
        return float(np.logaddexp(top, rest))


def _log_factorial(n: int) -> float:
    return math.lgamma(n + 1.0)


class Ordinate(NamedTuple):
    """Log of a posterior density at a point, from the log-densities of sweeps.

    Attributes
    ----------
    value, error
        The estimate, and its standard error by batch means.
    spread
        Standard deviation of the log-densities.
    effective
        Number of equal sweeps that the mean of their exponentials is worth, if sweeps
        are independent.
    parts
        The log-density of every sweep; or the estimates of all rows, which add up to the
        value (``spread`` and ``effective`` are then those of the worst row).
    """

    value: float
    error: float
    spread: float
    effective: float
    parts: Wide


class Averager:
    """Logs of means of exponentials, of columns of numbers that come batch by batch."""

    def __init__(self) -> None:
        self.batches: list[Wide] = []
        self.squares: list[Wide] = []
        self.moments: list[Wide] = []
        self.sizes: list[int] = []

    def add(self, logs: Wide) -> None:
        """Take in a batch, (sweeps, columns)."""
        self.batches.append(logsumexp(logs, axis=0))
        self.squares.append(logsumexp(2 * logs, axis=0))
        self.moments.append(np.stack([logs.sum(axis=0), (logs**2).sum(axis=0)]))
        self.sizes.append(len(logs))

    def result(self) -> Ordinate:
        """Of the product of all columns, taken to be independent."""
        sums, sizes = np.array(self.batches), np.array(self.sizes)
        total, count = logsumexp(sums, axis=0), int(sizes.sum())
        values = total - math.log(count)
        ratios = np.exp(sums - np.log(sizes)[:, None] - values)  # about 1
        errors = ratios.std(axis=0, ddof=1) / math.sqrt(len(sizes))
        first, second = np.sum(self.moments, axis=0) / count
        effective = np.exp(2 * total - logsumexp(np.array(self.squares), axis=0))
        return Ordinate(
            math.fsum(values),
            float(np.sqrt((errors**2).sum())),
            float(np.sqrt(np.maximum(second - first**2, 0.0).max())),
            float(effective.min()),
            values,
        )
