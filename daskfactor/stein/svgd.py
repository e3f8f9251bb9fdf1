"""Steps of all particles together: gradients, step sizes, constraints, and what went wrong.

Source: Masood and Doshi-Velez, section 6.2 ("scaling and non-negativity constraints after
every gradient step"); Liu and Wang 2016 for the step sizes.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import whole_number
from daskfactor.errors import OptionError
from daskfactor.machine import single_threaded_blas
from daskfactor.stein.kernel import IMQ, Block, assemble, squared_distances
from daskfactor.stein.particles import SIDES, Side
from daskfactor.stein.scores import BandScore, divergences, over_bands
from daskfactor.stein.state import (
    Array,
    History,
    Made,
    OnProgress,
    Options,
    Pair,
    Problem,
    checked_step,
    given,
)

MEMORY: Final = 0.9
"""Share of earlier steps in the average of squared gradients."""
GROWTH: Final = 1.1
"""Of an automatic step that led down."""
AUTO_STEP: Final = 0.01
"""Of the mean entry of each factor."""
LEAST: Final = 1e-12
"""Steps below which nothing moves any more."""


class Cloud(NamedTuple):
    """All particles, (M, I, K) and (M, K, J), in double precision, and their scores.

    Scores in W are along the simplex where the discrepancy takes them so; ``divergence``
    (M,) is Σ d_β, ``usable`` (M,) whether all of that is finite.
    """

    values: Pair
    scores: Pair
    divergence: Array
    usable: NDArray[np.bool_]

    def but(self, keep: NDArray[np.bool_], other: "Cloud") -> "Cloud":
        """These particles where ``keep`` (M,), others elsewhere."""
        if keep.all():
            return self
        wide = keep[:, None, None]

        def merged(own: Pair, theirs: Pair) -> Pair:
            first, second = (np.where(wide, a, b) for a, b in zip(own, theirs, strict=True))
            return first, second

        return Cloud(
            merged(self.values, other.values),
            merged(self.scores, other.scores),
            np.where(keep, self.divergence, other.divergence),
            np.where(keep, self.usable, other.usable),
        )


def gathered(bands: Iterable[tuple[Side, NDArray[Any]]]) -> Pair:
    """Bands (M, m, K) of both factors as (M, I, K) and (M, K, J), in double precision."""
    parts: dict[Side, list[NDArray[Any]]] = {"rows": [], "columns": []}
    for side, own in bands:
        parts[side].append(own)
    rows, columns = (np.concatenate(parts[side], axis=1).astype(np.float64) for side in SIDES)
    return rows, np.ascontiguousarray(columns.swapaxes(1, 2))


def along_simplex(values: Array) -> Array:
    """(M, I, K) less the means over rows."""
    return np.asarray(values - values.mean(axis=1, keepdims=True))


def evaluate(problem: Problem, values: Pair) -> Cloud:
    """Particles with their scores: two passes over the data."""
    where = problem.executor, problem.data, problem.target, problem.particles(*values)
    d = divergences(*where)

    def keep(side: Side, band: BandScore) -> NDArray[Any]:
        del side
        for part, _, score in band.slabs():
            band.gradient[:, part] = score
        return band.gradient

    found = gathered(over_bands(*where, problem.target.of(d).slope, keep))
    if problem.tangent:
        found = along_simplex(found[0]), found[1]
    usable = np.isfinite(d)
    for one in found:
        usable &= np.isfinite(one).all(axis=(1, 2))
    return Cloud(values, found, d, usable)


def blocks_of(problem: Problem, cloud: Cloud) -> tuple[Block, Block]:
    """Inner products between particles, as a Stein matrix is made of them."""
    made = []
    for side, values, scores in zip(SIDES, cloud.values, cloud.scores, strict=True):
        x, s = values.reshape(len(values), -1), scores.reshape(len(scores), -1)
        gram = s @ s.T
        x, s = x - x.mean(axis=0), s - s.mean(axis=0)
        cross = s @ x.T
        own = np.diag(cross)
        mask = problem.target.frozen(side)
        width = problem.model.n_components if mask is None else int((~mask).sum())
        length = problem.data.shape[SIDES.index(side)] - (problem.tangent and side == "rows")
        distances = squared_distances(x @ x.T)
        differences = own[:, None] + own - cross - cross.T
        made.append(Block(distances, differences, gram, length * width))
    return made[0], made[1]


def held(problem: Problem, move: Pair) -> Pair:
    """A direction of all particles, zero where components are constants."""
    W, H = move[0].swapaxes(1, 2), move[1]
    for side, one in zip(SIDES, (W, H), strict=True):
        mask = problem.target.frozen(side)
        if mask is not None:
            one[:, mask] = 0.0
    return move


def equal_discrepancy(blocks: tuple[Block, Block], kernel: IMQ) -> float:
    """The discrepancy of equally weighted particles; infinite where it is not finite."""
    square = float(assemble(blocks, kernel).mean())
    return float(np.sqrt(max(0.0, square))) if np.isfinite(square) else np.inf


def onto_simplex(values: Array) -> Array:
    """The nearest point of the simplex for every column of (M, I, K).

    References
    ----------
    Duchi et al. 2008, "Efficient projections onto the l1-ball", figure 1.
    """
    falling = -np.sort(-values, axis=1)
    over = np.cumsum(falling, axis=1) - 1.0
    count = np.arange(1, values.shape[1] + 1)[:, None]
    last = (falling * count > over).sum(axis=1, keepdims=True)
    shift = np.take_along_axis(over, last - 1, axis=1) / last
    return np.asarray(np.maximum(values - shift, 0.0))


Direction = Callable[[Problem, Cloud, tuple[Block, Block], IMQ], Pair]
"""Where all particles go, of their shapes."""


@dataclass
class Ascent:
    """A run of steps along a direction, each scaled by the root of averaged squares.

    Entries of W move by about ``step`` times the mean entry of W, those of H likewise, and
    by less as the end comes near.
    Under a `SILFNMF` a column of W has one scale, so that the nearest point of the simplex,
    which ends the step, is nearest in the metric of the step; entries that are free have a
    scale each, and end at zero if they fall below.
    """

    problem: Problem
    direction: Direction
    steps: int
    step: float
    only_down: bool = False
    keep_best: bool = False
    squares: list[Array] = field(default_factory=list)

    def scaled(self, move: Pair) -> list[Array]:
        """The direction in units of its own size."""
        own = []
        for number, one in enumerate(move):
            square = one**2
            if number == 0 and self.problem.simplex:
                square = square.mean(axis=1, keepdims=True)
            if len(self.squares) <= number:
                self.squares.append(square)
            kept = self.squares[number]
            self.squares[number] = kept = MEMORY * kept + (1.0 - MEMORY) * square
            ratio = np.divide(one, np.sqrt(kept), out=np.zeros_like(one), where=kept > 0)
            own.append(np.where(np.isfinite(ratio), ratio, 0.0))
        return own

    def moved(self, cloud: Cloud, move: list[Array], sizes: Array) -> Pair:
        """Particles after a step of ``sizes`` (M,), within the constraints."""
        W, H = (
            values + (sizes * unit)[:, None, None] * one
            for values, unit, one in zip(cloud.values, self.units, move, strict=True)
        )
        return (onto_simplex(W) if self.problem.simplex else np.maximum(W, 0)), np.maximum(H, 0)

    def run(self, count: int, seed: int, on_progress: OnProgress, history: History | None) -> Made:
        """All steps; the particles that they lead to, or the best of all that were seen."""
        with single_threaded_blas(), np.errstate(all="ignore"):  # what runs away is put back
            return self._run(count, seed, on_progress, history)

    def _run(self, count: int, seed: int, on_progress: OnProgress, history: History | None) -> Made:
        started = time.perf_counter()
        problem = self.problem
        here = evaluate(problem, given(problem, count, seed))
        if not here.usable.all():
            raise OptionError(
                f"start {int(here.usable.argmin())} has no finite density or score under the "
                "model; leave it out"
            )
        self.units = [np.float64(one.mean()) for one in here.values]
        blocks = blocks_of(problem, here)
        kernel = problem.kernel.resolve(blocks[0].r2, blocks[1].r2)
        level = equal_discrepancy(blocks, kernel)
        best, best_level = here.values, level
        sizes, move = np.full(count, self.step), None
        seen, taken = [(time.perf_counter() - started, level)], 0
        for number in range(self.steps):
            if move is None:
                move = self.scaled(self.direction(problem, here, blocks, kernel))
            share = 1.0 if self.only_down else 1.0 - number / self.steps
            there = evaluate(problem, self.moved(here, move, share * sizes))
            sizes = np.where(there.usable, sizes, 0.5 * sizes)
            there = there.but(there.usable, here)
            found = blocks_of(problem, there)
            reached = equal_discrepancy(found, kernel)
            if self.only_down and not reached < level:
                sizes = 0.5 * sizes
            else:
                here, blocks, level, move = there, found, reached, None
                sizes = GROWTH * sizes if self.only_down else sizes
            if level < best_level:
                best, best_level = here.values, level
            seen.append((time.perf_counter() - started, level))
            taken = number + 1
            if taken == self.steps or not sizes.max() > LEAST:
                break
            on_progress(taken, self.steps)
        on_progress(self.steps, self.steps)
        if history is not None:
            history += seen
        share = (time.perf_counter() - started) / count
        values = best if self.keep_best else here.values
        return problem.made(values, np.full(count, share), np.full(count, taken))


@dataclass(frozen=True)
class Descent(Options, ABC):
    """What methods have in common whose particles move together, step by step."""

    steps: int = 1000
    step: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole_number("steps", self.steps, 1))
        object.__setattr__(self, "step", checked_step(self.step))

    @abstractmethod
    def ascent(self, problem: Problem, size: float) -> Ascent:
        """The run of steps of a method."""

    def make(
        self,
        problem: Problem,
        count: int,
        seed: int,
        on_progress: OnProgress,
        history: History | None = None,
    ) -> Made:
        """``count`` particles; ``history`` is given seconds and discrepancy of every step.

        Raises
        ------
        OptionError
            If the starts cannot be used.
        """
        size = AUTO_STEP if isinstance(self.step, str) else self.step
        return self.ascent(problem, size).run(count, seed, on_progress, history)


def weighed(table: Array, values: Array) -> Array:
    """Σ_n t_mn x_n of (M, ...) particles."""
    return np.asarray((table @ values.reshape(len(values), -1)).reshape(values.shape))


def apart(table: Array, values: Array) -> Array:
    """Σ_n t_mn (x_m - x_n)."""
    return np.asarray(table.sum(axis=1)[:, None, None] * values - weighed(table, values))


def direction(problem: Problem, cloud: Cloud, blocks: tuple[Block, Block], kernel: IMQ) -> Pair:
    r"""Where the Kullback-Leibler divergence falls fastest, in the kernel's function space.

    .. math:: \phi_m = \frac{1}{M} \sum_n \left[ k_{nm} s_n + \nabla_{\theta_n} k_{nm} \right],
        \quad \nabla_{\theta_n} k_{nm} = -2 \kappa'_{nm} (\theta_m - \theta_n)

    the gradient of k block by block; shapes of the particles, zero for constants.

    References
    ----------
    Liu and Wang 2016, equation 8; Masood and Doshi-Velez, equation 7.
    """
    kernels = kernel.blocks
    k = kernels[0].value(blocks[0].r2) + kernels[1].value(blocks[1].r2)
    W, H = (
        (weighed(k, scores) - 2.0 * apart(own.slope(block.r2), values)) / len(values)
        for own, block, values, scores in zip(
            kernels, blocks, cloud.values, cloud.scores, strict=True
        )
    )
    return held(problem, (W, H))


@dataclass(frozen=True)
class SVGD(Descent):
    r"""Particles that move together: along kernel-averaged scores, and away from each other.

    After every step entries below zero become zero and, under a :class:`SILFNMF`, columns of
    W the nearest point of the simplex.

    Parameters
    ----------
    steps
        Each of which computes all scores once.
    step
        Size of a step, in units of the mean entry of each factor of the starts: entries move
        by about that, however steep the density. ``"auto"`` is 0.01.

    Raises
    ------
    OptionError
        If an option is not one of these.

    Notes
    -----
    Steps are divided by the root of an average of squared gradients, nine tenths of which is
    what it was. Particles whose density is not finite after a step go back, and take half
    of it from then on.

    Liu and Wang 2016, "Stein variational gradient descent", algorithm 1; Masood and
    Doshi-Velez, section 6.2.
    """

    def ascent(self, problem: Problem, size: float) -> Ascent:
        """Along the scores of all particles, and away from each other."""
        return Ascent(problem, direction, self.steps, size)
