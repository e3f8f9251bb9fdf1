"""The block update of real-valued models: Langevin dynamics with momentum.

With the packed factors of `GaussianMF` (biases and the overall level are columns like
any other, their partners are columns of ones that never move), for a block of a part

    G_W = s R Hᵀ / φ,  G_H = s Wᵀ R / φ,  R = M ⊙ (V - W H)

from the same old state, then a kick and a drift of both bands; the noise comes once
a cycle, in the middle of the last part's drift. So a cycle is one step of length
B √step of the splitting scheme BAOAB for the whole posterior, its kick split over
the parts, and the cost of noise does not grow with B.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.plan import Action, Op
from daskfactor.executors.state import BlockCells, Evaluation, FactorBand
from daskfactor.inference.program import COLUMNS, ROWS, evaluate_block
from daskfactor.inference.steps import ConstantStep, StepSize
from daskfactor.kernels import blockwise
from daskfactor.kernels.langevin import accumulate_moments
from daskfactor.kernels.momentum import drift, kick_drift, refresh, sums_of_squares
from daskfactor.kernels.workspace import Workspace
from daskfactor.models.gaussian import GaussianHyper

Array = NDArray[Any]
NO_FLOOR = -math.inf

CYCLE_STEP = 0.12
"""Squared length of a cycle, in units of the metric: B² times the automatic step."""
CYCLE_FRICTION = 0.05
"""A cycle keeps exp(-friction) of the momentum.

Two things pull against each other. Directions that the data hold loosely cross their
spread in about friction / CYCLE_STEP cycles; and visiting the parts in random order
heats the momentum by about 0.05 CYCLE_STEP² / friction, which widens the posterior by
as much (measured on ratings with K = 32, B = 2 and 4, and on a small case against Gibbs
sampling: 2 to 3 % of the variance here, none with B = 1). A smaller step with less
friction mixes as fast with less heat, but takes longer to cool down from its start.
"""


def automatic_momentum_step(blocks: int, n_components: int) -> ConstantStep:
    """The step at which a cycle has the length √0.12 whatever the number of blocks.

    A row whose few entries lie in one block is kicked once a cycle, B times as hard,
    so that what bounds the step is the length of a cycle, B √step: the largest
    curvatures in the metric are about 4, and a cycle of length 1 is unstable. With one
    component, single entries stray further from their mean square.
    """
    return ConstantStep(CYCLE_STEP * min(1.0, n_components / 2) / blocks**2)


@dataclass(frozen=True)
class GaussianProgram:
    """One chain's block operations; immutable, so that any executor may share it.

    Attributes
    ----------
    hyper
        Hyperparameters; the program holds for as long as they stay as they are.
    biases
        Whether the factors carry biases (see `GaussianMF.pack`).
    key
        Two 32-bit words that key the chain's noise.
    step, shrink
        Squared time step of one part, and the factor it was reduced by after
        divergences.
    friction
        A cycle keeps exp(-friction) of the momentum.
    """

    hyper: GaussianHyper
    biases: bool
    key: tuple[int, int]
    step: StepSize
    shrink: float = 1.0
    friction: float = CYCLE_FRICTION

    def step_size(self, iteration: int) -> float:
        """The step at an iteration, reductions included."""
        return self.step(iteration) * self.shrink

    @cached_property
    def _columns(self) -> tuple[Array, Array]:
        """Mean, precision, curvature and freedom of the columns of W and of H, (4, K') each."""
        return column_table(self.hyper, self.biases)

    def update(
        self, op: Op, data: BlockedData, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        view = data.view(op.block.row, op.block.col)
        scale = op.scale / self.hyper.noise
        gradients = blockwise.gradient(
            view, 2.0, rows.values, cols.values, scale, NO_FLOOR, workspace
        )
        self._move(op, rows, gradients[0], ROWS)
        self._move(op, cols, gradients[1], COLUMNS)
        if op.last:
            self._finish_cycle(op, rows, ROWS)
            self._finish_cycle(op, cols, COLUMNS)

    def _move(self, op: Op, band: FactorBand, gradient: Array, factor: int) -> None:
        columns = self._columns[factor].astype(band.values.dtype)
        momentum, weights = band.arrays["momentum"], band.arrays["weights"]
        size = self.step_size(op.iteration)
        share = 0.5 if op.last else 1.0
        kick_drift(band.values, momentum, gradient, weights, columns, size, share)
        if op.last:
            key = np.array(self.key, dtype=np.uint32)
            keep = math.exp(-self.friction)
            refresh(momentum, keep, key, op.iteration, factor, band.offset)
            drift(band.values, momentum, weights, columns, size, share)

    def _finish_cycle(self, op: Op, band: FactorBand, factor: int) -> None:
        """Bookkeeping of a band once the cycle's last part has moved it."""
        if op.wanted.record:
            for name in ("mean", "m2"):
                if name not in band.arrays:
                    band.arrays[name] = np.zeros_like(band.values)
            band.counts["moments"] = band.counts.get("moments", 0) + 1
            accumulate_moments(
                band.values, band.counts["moments"], band.arrays["mean"], band.arrays["m2"]
            )
        if op.wanted.keep:
            band.draws.append(band.values.copy())
        if op.wanted.evaluate:
            band.sums[op.cycle] = quadratic_form(band.values, self._columns[factor])

    def evaluate(
        self,
        op: Op,
        data: BlockedData,
        rows: FactorBand,
        cols: FactorBand,
        cells: BlockCells | None,
        workspace: Workspace,
    ) -> Evaluation:
        return evaluate_block(op, data, rows, cols, cells, workspace, (2.0, NO_FLOOR))

    def touches(self, op: Op) -> tuple[str, ...]:
        """Names of a band's arrays that an operation reads or writes."""
        return ("weights", *self.changes(op)) if op.action == Action.UPDATE else ()

    def changes(self, op: Op) -> tuple[str, ...]:
        """Names of a band's arrays that an operation writes."""
        if op.action != Action.UPDATE:
            return ()
        return ("momentum", *(("mean", "m2") if op.last and op.wanted.record else ()))


def column_table(hyper: GaussianHyper, biases: bool) -> tuple[Array, Array]:
    """What the momentum kernels need of each column, for W and for H: (4, K') each.

    Rows: prior mean, prior precision, curvature for each unit of data, 1 where it moves.
    """
    K = len(hyper.precision_w)
    width = K + (2 if biases else 1)
    tables = []
    for factor, own, other, ratio in (
        (ROWS, hyper.precision_w, hyper.precision_h, hyper.ratio_w),
        (COLUMNS, hyper.precision_h, hyper.precision_w, hyper.ratio_h),
    ):
        table = np.zeros((4, width))
        table[1] = 1.0
        table[1, :K] = own
        table[2, :K] = ratio / (hyper.noise * np.asarray(other))
        table[2, K:] = 1.0 / hyper.noise
        table[3, :K] = 1.0
        if biases:
            rows = factor == ROWS
            mean = 0.0 if rows else hyper.mean
            precision = hyper.row_bias_precision if rows else hyper.column_bias_precision
            table[:, K if rows else K + 1] = mean, precision, 1.0 / hyper.noise, 1.0
        tables.append(table)
    return tables[0], tables[1]


def quadratic_form(values: Array, columns: Array) -> float:
    """-½ Σ λ (x - m)² over the columns that move: log-prior but for its constant."""
    mean, precision, _, free = columns
    squares = np.zeros(values.shape[1])
    sums_of_squares(values, mean, squares)
    return float(-0.5 * np.sum(free * precision * squares))
