"""Langevin dynamics on whole gradients, and the pass over the data that they take.

On the schedule `Passes` every block adds its share of the gradient to both of its bands
and moves neither; the last block of a pass that a band meets has all the others' shares
before it, and moves it. Sums follow the plan, so every executor gives the same bits.
"""

from dataclasses import dataclass, field
from typing import Literal

from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Passes, Schedule
from daskfactor.executors.plan import Action, Op
from daskfactor.executors.state import FactorBand
from daskfactor.inference.base import Setup, Step, StepSize, Work, automatic_step
from daskfactor.inference.program import COLUMNS, ROWS, LangevinProgram
from daskfactor.inference.psgld import LangevinSampler, Preconditioner
from daskfactor.kernels import blockwise
from daskfactor.kernels.views import Workspace


class PassProgram(LangevinProgram):
    """Gradients over all blocks, and one step of both factors at the end of a pass.

    The noise of pass t has the address t, so that draws depend on the grid only through
    the order of sums.
    """

    def update(
        self, op: Op, data: BlockedData, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        self._add(op, data, rows, cols, workspace)
        blocks = data.grid.blocks
        if op.iteration % blocks == blocks - 1:
            number = op.iteration // blocks
            self._step(rows, ROWS, number)
            self._step(cols, COLUMNS, number)
        if op.last:
            self._finish(op, rows, ROWS)
            self._finish(op, cols, COLUMNS)

    def _add(
        self, op: Op, data: BlockedData, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        """Add the block's share of the gradients, and of the curvature while it is learnt."""
        view = data.view(op.block.row, op.block.col)
        scale = op.scale / self.hyper.dispersion
        block = (view, self.likelihood, rows.values, cols.values, scale, self.floor)
        curvatures = None
        if op.wanted.adapt and self.majorizer:
            curvatures = rows.arrays["gathered"], cols.arrays["gathered"]
        shares = blockwise.gradient(*block, workspace, curvatures)
        rows.arrays["gradient"] += shares[0]
        cols.arrays["gradient"] += shares[1]

    def _step(self, band: FactorBand, factor: int, number: int) -> None:
        gradient = band.arrays["gradient"]
        self._move(band, gradient, self.hyper.prior(factor)[0], number, factor)
        gradient[:] = 0

    def changes(self, op: Op) -> tuple[str, ...]:
        """Names of a band's arrays that an operation writes."""
        found = super().changes(op)
        return ("gradient", *found) if op.action == Action.UPDATE else found


class PassSampler(LangevinSampler):
    """A sampler that steps on gradients over all blocks."""

    @property
    def arrays(self) -> tuple[str, ...]:
        return (*super().arrays, "gradient")

    def program(self, setup: Setup) -> LangevinProgram:
        return PassProgram(**self._fields(setup))


@dataclass(frozen=True)
class LangevinDynamics(PassSampler):
    """Langevin dynamics on the gradient over all the data: one step a cycle.

    In the majoriser's metric (the default), with c the averaged denominator of the
    multiplicative update, y = ε / c, and a the shape of the prior, whose term (a - 1)/θ
    G leaves out:

        θ ← | θ + clip(y θ G, ±2√(2y(θ + y))) + a y + √(2yθ) z |

    With ``preconditioner="identity"``:

        θ ← | θ + clip(εG, ±2√(2ε)) + √(2ε) z |

    Nothing is subsampled, so that the only error is that of a finite step; for the same
    time in ε a cycle costs B times what one of :class:`PSGLD` does.

    Parameters
    ----------
    step
        ``"auto"`` (only in the majoriser's metric: 0.2, or 0.05 for one or two
        components, without a unit), a number, or a step such as ``ConstantStep`` or
        ``PolynomialStep``, which counts cycles.
    preconditioner
        ``"majorizer"`` or ``"identity"``.
    warm_start
        Passes of multiplicative updates before the chain starts; ``"auto"`` takes
        100, and down to 20 where a pass is dear (beyond 10⁹ entries times components).

    Raises
    ------
    OptionError
        If an option is not one of these.

    Notes
    -----
    Şimşekli et al. 2015, section 2 (equation 2), and Şimşekli et al. 2017, equation 6,
    with N entries in every step.
    """

    step: Step = "auto"
    preconditioner: Preconditioner = "majorizer"
    warm_start: int | Literal["auto"] = "auto"
    schedule: Schedule = field(default=Passes(1), init=False, repr=False)

    def automatic(self, blocks: int, n_components: int) -> StepSize:
        del blocks
        return automatic_step(1, n_components)

    def work(self, blocks: int) -> Work:
        del blocks
        return Work(1)
