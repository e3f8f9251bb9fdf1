"""The block operations of a Gibbs sweep: two passes over the data.

S is shared out among the components, then W moves, then H with the new W:

    s_ij. | W, H ~ Multinomial(v_ij; w_ik h_kj)
    w_ik | S, H ~ Gamma(a_w + sum_j s_ijk, λ_w + sum over observed j of h_kj)
    h_kj | S, W ~ Gamma(a_h + sum_i s_ijk, λ_h + sum over observed i of w_ik)

Every block adds its share to what its two bands carry. A band has met all its
blocks at the end of a pass, and moves there.

Source: A. T. Cemgil, "Bayesian inference for nonnegative matrix factorisation
models", Computational Intelligence and Neuroscience, 2009, section 3.
"""

from dataclasses import dataclass

import numpy as np

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.plan import Action, Op
from daskfactor.executors.state import BlockCells, Evaluation, FactorBand
from daskfactor.inference.program import COLUMNS, ROWS, evaluate_block, finish_cycle
from daskfactor.kernels.multinomial import Wide, add_rates, allocate
from daskfactor.kernels.variates import fill_gamma
from daskfactor.kernels.workspace import Workspace
from daskfactor.models.fixed import Mask, held
from daskfactor.models.tweedie import Hyperparameters

PASSES = 2
"""Passes over the data in a cycle: one in which W moves, one in which H does."""
ALLOCATED, RATES = "allocated", "rates"
"""Sums of S, and of the other factor, that a band gathers until it moves."""


@dataclass(frozen=True)
class GibbsProgram:
    """One chain's block operations; immutable, so that any executor may share it.

    Attributes
    ----------
    hyper
        Rates and shapes of the priors.
    floor
        Smallest mean μ that the fit is evaluated at.
    key
        Two 32-bit words that key the chain's numbers; they are addressed by the cycle
        and by global rows and columns.
    frozen
        Of W and of H, which components never move.
    """

    hyper: Hyperparameters
    floor: float
    key: tuple[int, int]
    frozen: tuple[Mask, Mask] = (None, None)

    def update(
        self, op: Op, data: BlockedData, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        del workspace
        blocks = data.grid.blocks
        position = op.iteration % (PASSES * blocks)
        view = data.view(op.block.row, op.block.col)
        if position < blocks:
            offsets, key = (rows.offset, cols.offset), np.array(self.key, dtype=np.uint32)
            sums = gathered(rows, ALLOCATED), gathered(cols, ALLOCATED)
            allocate(view, rows.values, cols.values, offsets, key, op.cycle, *sums)
            add_rates(view, True, cols.values, gathered(rows, RATES))
            if position == blocks - 1:
                self._move(rows, ROWS, op.cycle)
            return
        add_rates(view, False, rows.values, gathered(cols, RATES))
        if op.last:
            self._move(cols, COLUMNS, op.cycle)
            for band, factor in ((rows, ROWS), (cols, COLUMNS)):
                finish_cycle(op, band, *self.hyper.prior(factor), self.frozen[factor])

    def _move(self, band: FactorBand, factor: int, cycle: int) -> None:
        """Draw a band from its conditional."""
        shapes, rates = self._conditional(band, factor)
        key = np.array(self.key, dtype=np.uint32)
        with held(band.values, self.frozen[factor]):
            fill_gamma(shapes, rates, key, cycle, factor, band.offset, band.values)

    def _conditional(self, band: FactorBand, factor: int) -> tuple[Wide, Wide]:
        """Shapes and rates of a band's entries; what it had gathered is used up."""
        rate, shape = self.hyper.prior(factor)
        shapes, rates = band.arrays.pop(ALLOCATED), band.arrays.pop(RATES)
        shapes += shape
        np.maximum(rates, 0.0, out=rates)  # taking missing cells off again may round
        rates += rate
        return shapes, rates

    def touches(self, op: Op) -> tuple[str, ...]:
        """Names of a band's arrays that an operation reads or writes.

        Without the sums: they are made and used up inside a cycle, so they are in no
        state, and whatever has no name here travels with its band.
        """
        return self.changes(op)

    def changes(self, op: Op) -> tuple[str, ...]:
        """Names of a band's arrays that an operation writes."""
        moves = op.action == Action.UPDATE and op.last and op.wanted.record
        return ("mean", "m2") if moves else ()

    def evaluate(
        self,
        op: Op,
        data: BlockedData,
        rows: FactorBand,
        cols: FactorBand,
        cells: BlockCells | None,
        workspace: Workspace,
    ) -> Evaluation:
        return evaluate_block(op, data, rows, cols, cells, workspace, (1.0, self.floor))


def gathered(band: FactorBand, name: str) -> Wide:
    """Sums that a band carries until it moves, from zero; exact in double precision."""
    if name not in band.arrays:
        band.arrays[name] = np.zeros(band.values.shape)
    return band.arrays[name]
