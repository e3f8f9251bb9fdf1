"""P-SGLD's block update by exact Cox-Ingersoll-Ross transitions (Baker et al. 2018).

Both factors move from the same old state, by `daskfactor.kernels.cir` instead of a step
in the majoriser's metric; gradients, metric and bookkeeping are those of `LangevinProgram`.
"""

from dataclasses import dataclass

import numpy as np

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.plan import Op
from daskfactor.executors.state import FactorBand
from daskfactor.inference.program import COLUMNS, ROWS, LangevinProgram
from daskfactor.kernels import blockwise
from daskfactor.kernels.cir import cir_step
from daskfactor.kernels.workspace import Workspace


@dataclass(frozen=True)
class CirProgram(LangevinProgram):
    """One chain's block operations, with exact transitions in the majoriser's metric."""

    def update(
        self, op: Op, data: BlockedData, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        view, blocks = data.view(op.block.row, op.block.col), data.grid.blocks
        scale = op.scale / self.hyper.dispersion
        curvatures = np.zeros_like(rows.values), np.zeros_like(cols.values)
        gradients = blockwise.gradient_curvature(
            view, self.beta, rows.values, cols.values, scale, self.floor, *curvatures, workspace
        )
        key, size = np.array(self.key, dtype=np.uint32), self.step_size(op.iteration)
        for factor, band in ((ROWS, rows), (COLUMNS, cols)):
            if op.wanted.adapt:
                weight = band.values.dtype.type(op.scale / blocks)
                band.arrays["gathered"] += weight * curvatures[factor]
            cir_step(
                band.values,
                gradients[factor],
                curvatures[factor],
                band.arrays["metric"],
                scale,
                size,
                *self.hyper.prior(factor),
                key,
                op.iteration,
                factor,
                band.offset,
            )
        if op.last:
            self._finish(op, rows, ROWS)
            self._finish(op, cols, COLUMNS)
