"""Langevin dynamics with momentum on conflict-free parts, for real-valued models."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import positive_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Reshuffled, Schedule
from daskfactor.executors.plan import Op
from daskfactor.executors.state import FactorBand
from daskfactor.inference.base import (
    MOMENTS,
    ConstantStep,
    Sampler,
    Setup,
    Step,
    StepSize,
    Track,
    check_schedule,
    checked_step,
)
from daskfactor.inference.chain import Chain, Setting
from daskfactor.inference.gaussian import (
    HYPER_EVERY,
    GaussianChain,
    column_table,
    quadratic_form,
)
from daskfactor.inference.program import COLUMNS, ROWS, FactorProgram, finish_cycle
from daskfactor.kernels import blockwise
from daskfactor.kernels.momentum import drift, kick_drift, refresh
from daskfactor.kernels.views import Workspace
from daskfactor.models.gaussian import GaussianHyper

Array = NDArray[Any]

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
class GaussianProgram(FactorProgram):
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
            view, self.likelihood, rows.values, cols.values, scale, self.floor, workspace
        )
        self._move(op, rows, gradients[0], ROWS)
        self._move(op, cols, gradients[1], COLUMNS)
        if op.last:
            finish_cycle(op, rows, self._density(ROWS))
            finish_cycle(op, cols, self._density(COLUMNS))

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

    def _density(self, factor: int) -> Callable[[Array], float]:
        columns = self._columns[factor]
        return lambda values: quadratic_form(values, columns)

    def _reads(self, op: Op) -> tuple[str, ...]:
        del op
        return ("weights",)

    def _writes(self, op: Op) -> tuple[str, ...]:
        del op
        return ("momentum",)


@dataclass(frozen=True)
class SGHMC(Sampler):
    """Stochastic-gradient Hamiltonian Monte Carlo on conflict-free parts of the data.

    Every part kicks the momentum p and lets the factors drift; once a cycle the
    momentum is partly replaced by noise (D is the metric of a row, ε the step):

        p ← p + √ε D½ G,   x ← x + √ε D½ p,   p ← e^(-f) p + √(1 - e^(-2f)) z

    Parameters
    ----------
    step
        ``"auto"`` (a cycle of length √0.12 in units of the metric, whatever the
        number of blocks), a number, or a step such as ``ConstantStep``.
    friction
        f, without a unit: a cycle keeps the share e^(-f) of the momentum.
    schedule
        Order of the parts; reshuffled every cycle by default.

    Notes
    -----
    Chen, Fox and Guestrin 2014, "Stochastic gradient Hamiltonian Monte Carlo",
    section 3, in the splitting of Leimkuhler and Matthews 2013 ("BAOAB"), on the
    parts of Şimşekli et al. 2015, section 3.
    """

    step: Step = "auto"
    friction: float = CYCLE_FRICTION
    schedule: Schedule = field(default_factory=Reshuffled)

    nonnegative: ClassVar[bool] = False
    tempers: ClassVar[bool] = False
    learns_every: ClassVar[int | None] = HYPER_EVERY

    def __post_init__(self) -> None:
        object.__setattr__(self, "friction", positive_number("friction", self.friction))
        check_schedule(self.schedule)
        object.__setattr__(self, "step", checked_step(self.step))

    @property
    def arrays(self) -> tuple[str, ...]:
        return (*MOMENTS, "momentum", "weights")

    def carried(self, width: int) -> tuple[float, float]:
        """Count the weights as one column."""
        own = 4 + 1 / width
        return own, own

    def step_for(self, track: Track, blocks: int, n_components: int) -> StepSize:
        """The step of one track on a grid of ``blocks`` x ``blocks``."""
        del track
        if isinstance(self.step, str):
            return automatic_momentum_step(blocks, n_components)
        assert not isinstance(self.step, int | float)  # made a ConstantStep above
        return self.step

    def for_compilation(self) -> Self:
        return type(self)()

    def chain(self, setting: Setting, number: int) -> Chain:
        return GaussianChain(setting, number)

    def program(self, setup: Setup) -> GaussianProgram:
        return GaussianProgram(
            setup.model.likelihood,
            setup.floor,
            hyper=setup.hyper,
            biases=setup.model.biases,
            key=setup.key,
            step=setup.step,
            shrink=setup.shrink,
            friction=self.friction,
        )
