"""Gibbs sampling of Poisson factorizations: exact, no step to choose."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Passes, Schedule
from daskfactor.errors import DataError, ModelError
from daskfactor.executors.plan import Op
from daskfactor.executors.state import FactorBand
from daskfactor.inference.base import Bands, ConstantStep, Sampler, Track, Work
from daskfactor.inference.chain import TweedieChain
from daskfactor.inference.program import COLUMNS, ROWS, Program
from daskfactor.kernels.multinomial import Wide, add_rates, allocate
from daskfactor.kernels.variates import fill_gamma
from daskfactor.kernels.views import Workspace
from daskfactor.models.settings import held

PASSES = 2
"""Passes over the data in a cycle: one in which W moves, one in which H does."""
ALLOCATED, RATES = "allocated", "rates"
"""Sums of S, and of the other factor, that a band gathers until it moves."""


def gathered(band: FactorBand, name: str) -> Wide:
    """Sums that a band carries until it moves, from zero; exact in double precision."""
    if name not in band.arrays:
        band.arrays[name] = np.zeros(band.values.shape)
    return band.arrays[name]


LARGEST_COUNT = 2**31
"""Counts up to which binomials are drawn without loss."""

WORK = 20.0
"""Passes of multiplications that sharing out the counts is about as dear as: 10 if most are
small, 60 if all are large."""


@dataclass(frozen=True)
class Gibbs(Sampler):
    r"""Gibbs sampling for Poisson counts: draws from the exact posterior, no step to choose.

    .. math:: s_{ij\cdot} \sim \mathrm{Mult}(v_{ij}; w_{ik} h_{kj}), \quad
        w_{ik} \sim \mathrm{Gamma}(a_w + s_{i+k}, \lambda_w + \textstyle\sum_j h_{kj}), \quad
        h_{kj} \sim \mathrm{Gamma}(a_h + s_{+jk}, \lambda_h + \textstyle\sum_i w_{ik})

    with sums over observed entries. Each draw is a sweep, two passes over the data, at
    a price in proportion to the stored entries that are not zero, times K. The model
    must have ``beta=1``; ``dispersion="auto"`` is then exactly 1, because that is what
    Poisson counts have. ``step_size`` in the results is always 1.

    Parameters
    ----------
    warm_start
        Passes of multiplicative updates before the chain starts; ``"auto"`` takes
        100, and down to 20 where a pass is dear (beyond 10⁹ entries times components).

    Raises
    ------
    ModelError
        When used with another ``beta``, or a ``dispersion`` other than 1.
    DataError
        When used on data that are not whole numbers up to 2³¹.

    Notes
    -----
    Cemgil 2009, "Bayesian inference for nonnegative matrix factorisation models",
    section 3. The allocation ties W and H to each other from sweep to sweep, so the scale
    that they share in a component moves slowly where counts are large.
    """

    warm_start: int | Literal["auto"] = "auto"

    chain = TweedieChain
    # A sweep has no step; 1 stands in the results.
    step: ClassVar[ConstantStep] = ConstantStep(1.0)  # type: ignore[misc]
    dispersion: ClassVar[float | None] = 1.0
    biased: ClassVar[bool] = False
    tempers: ClassVar[bool] = False
    schedule: ClassVar[Schedule] = Passes(PASSES)  # type: ignore[misc]

    def check_model(self, model: Any) -> None:
        """Refuse any law but Poisson's."""
        if not model.likelihood.counts:
            raise ModelError(
                f"Gibbs() samples Poisson counts, beta=1, and the model has {model.likelihood}; "
                "use PSGLD() for any other power"
            )
        if model.dispersion not in ("auto", 1.0):
            raise ModelError(
                "Gibbs() samples Poisson counts, whose dispersion is 1, and the model has "
                f'dispersion={model.dispersion:g}; leave it at "auto", or use PSGLD() for '
                "counts that vary more"
            )

    def check_data(self, data: BlockedData) -> None:
        """Refuse what are no counts."""
        if not data.is_integer:
            raise DataError(
                "Gibbs() takes whole numbers, got data with fractions; round or rescale them to "
                "counts, or use PSGLD(), which takes any non-negative numbers"
            )
        if data.maximum > LARGEST_COUNT:
            raise DataError(
                f"Gibbs() takes counts up to 2**31, got one of {data.maximum:.6g}; use PSGLD(), "
                "or count in larger units"
            )

    def work(self, blocks: int) -> Work:
        """A sweep is one step; random numbers are dear."""
        del blocks
        return Work(1, PASSES, WORK)

    def carried(self, width: int) -> tuple[float, float]:
        """Count values, two moments, and two sums in double precision."""
        del width
        return 7, 7

    def step_for(self, track: Track, blocks: int, n_components: int) -> ConstantStep:
        del track, blocks, n_components
        return self.step

    # The sums that bands gather are made and used up inside a cycle, so they are in no state,
    # and `reads` and `writes` do not name them: whatever has no name there travels with its
    # band. Random numbers are addressed by the cycle and by global rows and columns.

    def block_step(
        self, program: Program, op: Op, data: BlockedData, bands: Bands, workspace: Workspace
    ) -> None:
        """Gather one side's sums; in the first pass rows move at the end, in the second columns."""
        del workspace
        rows, cols = bands
        if program.hyper.dispersion != 1.0:
            raise ModelError(
                "Gibbs() samples the posterior of Poisson counts, of dispersion 1 at temperature "
                "1, and was asked for a dispersion over temperature of "
                f"{program.hyper.dispersion:g}; use PSGLD() for tempered posteriors"
            )
        blocks, view = data.grid.blocks, data.view(*op.block)
        position = op.iteration % (PASSES * blocks)
        if position < blocks:
            offsets, key = (rows.offset, cols.offset), np.array(program.key, dtype=np.uint32)
            sums = gathered(rows, ALLOCATED), gathered(cols, ALLOCATED)
            allocate(view, rows.values, cols.values, offsets, key, op.cycle, *sums)
            add_rates(view, True, cols.values, gathered(rows, RATES))
            if position == blocks - 1:
                self._move(program, rows, ROWS, op.cycle)
            return
        add_rates(view, False, rows.values, gathered(cols, RATES))
        if op.last:
            self._move(program, cols, COLUMNS, op.cycle)
            program.finish_cycle(op, bands)

    def _move(self, program: Program, band: FactorBand, factor: int, cycle: int) -> None:
        """Draw a band from its conditional."""
        shapes, rates = self._conditional(program, band, factor)
        with held(band.values, program.frozen[factor]):
            fill_gamma(shapes, rates, *program.address(band, cycle, factor), band.values)

    def _conditional(self, program: Program, band: FactorBand, factor: int) -> tuple[Wide, Wide]:
        """Shapes and rates of a band's entries; what it had gathered is used up."""
        rate, shape = program.hyper.prior(factor)
        shapes, rates = band.arrays.pop(ALLOCATED), band.arrays.pop(RATES)
        shapes += shape
        np.maximum(rates, 0.0, out=rates)  # taking missing cells off again may round
        rates += rate
        return shapes, rates
