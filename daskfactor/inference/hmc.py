"""Hamiltonian Monte Carlo (HMC) on whole gradients, mirrored at zero."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np

from daskfactor.checks import is_number, positive_number, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.schedules import Passes, Schedule
from daskfactor.errors import OptionError
from daskfactor.executors.plan import Action, Op
from daskfactor.executors.state import BlockCells, ChainState, Evaluation, FactorBand
from daskfactor.inference.base import Sampler, Setup, Track
from daskfactor.inference.program import COLUMNS, ROWS, evaluate_block
from daskfactor.inference.psgld import warm_passes
from daskfactor.inference.steps import ConstantStep, StepSize
from daskfactor.kernels import blockwise
from daskfactor.kernels.hamiltonian import drift, kick
from daskfactor.kernels.workspace import Workspace
from daskfactor.models.tweedie import Hyperparameters

FIRST_STEP = 0.5
"""Step that tuning begins with, for one entry; d of them take d^(-1/4) as much."""


@dataclass(frozen=True)
class HamiltonianProgram:
    """The leapfrog steps of one proposal, on passes over the data.

    The first half kick and the first drift come before the plan; every pass but the last
    ends with a kick and a drift, the last one with the second half kick. Gradients are
    those of the log-likelihood at dispersion 1.

    Attributes
    ----------
    beta, hyper, floor
        The model, and the smallest mean μ.
    size
        ε, the time of a step.
    passes
        Passes of a cycle; 0 only adds the gradients up.
    """

    beta: float
    hyper: Hyperparameters
    floor: float
    size: float
    passes: int

    def update(
        self, op: Op, data: BlockedData, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        view = data.view(op.block.row, op.block.col)
        block = (view, self.beta, rows.values, cols.values, op.scale, self.floor)
        shares = blockwise.gradient(*block, workspace)
        rows.arrays["gradient"] += shares[0]
        cols.arrays["gradient"] += shares[1]
        blocks = data.grid.blocks
        if self.passes and op.iteration % blocks == blocks - 1:
            for band, factor in ((rows, ROWS), (cols, COLUMNS)):
                self.kick(band, factor, 0.5 if op.last else 1.0)
                if not op.last:
                    self.drift(band)

    def touches(self, op: Op) -> tuple[str, ...]:
        """Names of a band's arrays that an operation reads or writes."""
        return ("spread", *self.changes(op)) if op.action == Action.UPDATE else ()

    def changes(self, op: Op) -> tuple[str, ...]:
        """Names of a band's arrays that an operation writes."""
        return ("gradient", "momentum") if op.action == Action.UPDATE else ()

    def kick(self, band: FactorBand, factor: int, share: float) -> None:
        """A share of a kick."""
        arrays = band.arrays
        moved = (band.values, arrays["momentum"], arrays["gradient"], arrays["spread"])
        rate, shape = self.hyper.prior(factor)
        kick(*moved, share * self.size, 1.0 / self.hyper.dispersion, rate, shape)

    def drift(self, band: FactorBand) -> None:
        """A drift; the gradient is to be summed anew where it leads."""
        drift(band.values, band.arrays["momentum"], band.arrays["spread"], self.size)
        band.arrays["gradient"][:] = 0

    def evaluate(
        self,
        op: Op,
        data: BlockedData,
        rows: FactorBand,
        cols: FactorBand,
        cells: BlockCells | None,
        workspace: Workspace,
    ) -> Evaluation:
        return evaluate_block(op, data, rows, cols, cells, workspace, (self.beta, self.floor))


@dataclass(frozen=True)
class HMC(Sampler):
    """Hamiltonian Monte Carlo on W and H: exact, at the price of several passes a draw.

    Each cycle draws momenta p ~ Normal(0, m), goes ``steps`` leapfrog steps

        p ← p + ½ε G,   θ ← θ + ε p / m,   p ← p + ½ε G

    and accepts where they lead with probability min(1, e^-ΔE); otherwise the draw is
    repeated. θ < 0 is the mirror image of -θ: an entry that passes zero comes back with
    its momentum turned. The mass m of an entry is the curvature of the log posterior at
    the mode, 1 / m = (θ + 1/c) / c with c the denominator of the multiplicative update.

    Parameters
    ----------
    step
        ``"auto"`` learns ε by dual averaging while tuning, then keeps it; a number, in
        units of the posterior's width, fixes it. Each cycle takes ε times a random
        factor from 0.8 to 1.2, so that no direction comes back to where it was.
    steps
        Leapfrog steps of a cycle, each a pass over the data.
    target_accept
        Mean acceptance rate that tuning aims at, between 0 and 1.
    warm_start
        Passes of multiplicative updates before the chain starts; ``"auto"`` takes
        100, and down to 20 where a pass is dear (beyond 10⁹ entries times components).

    Raises
    ------
    OptionError
        If an option is not one of these.

    Notes
    -----
    Neal 2011, "MCMC using Hamiltonian dynamics", section 5.3.2 and, for the reflection,
    5.5.1.5; Hoffman and Gelman 2014, "The No-U-Turn Sampler", section 3.2.1.
    """

    step: float | Literal["auto"] = "auto"
    steps: int = 10
    target_accept: float = 0.8
    warm_start: int | Literal["auto"] = "auto"
    schedule: Schedule = field(default=Passes(10), init=False, repr=False)

    proposes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.step, str):
            if self.step != "auto":
                raise OptionError(f'step must be "auto" or a number, got {self.step!r}')
        else:
            object.__setattr__(self, "step", positive_number("step", self.step))
        object.__setattr__(self, "steps", whole_number("steps", self.steps, 1))
        target: Any = self.target_accept
        if not is_number(target) or not 0 < target < 1:
            raise OptionError(f"target_accept must be a number between 0 and 1, got {target!r}")
        object.__setattr__(self, "target_accept", float(target))
        if self.warm_start != "auto":
            whole_number("warm_start", self.warm_start, 0)
        object.__setattr__(self, "schedule", Passes(self.steps))

    def warm_passes(self, entries: int, n_components: int) -> int:
        """Passes of the warm start for data with this many stored entries."""
        return warm_passes(self.warm_start, entries, n_components)

    def step_for(self, track: Track, blocks: int, n_components: int) -> StepSize:
        """The step that a chain begins with, of one entry (see `first_step`)."""
        del track, blocks, n_components
        return ConstantStep(FIRST_STEP if isinstance(self.step, str) else self.step)

    def first_step(self, entries: int) -> float:
        """ε at the first cycle for factors of so many entries."""
        if not isinstance(self.step, str):
            return self.step
        return FIRST_STEP * math.pow(entries, -0.25)

    def moves(self, blocks: int) -> int:
        del blocks
        return 1

    def visits(self, blocks: int) -> int:
        """Once for each step and once for the energy where they lead."""
        del blocks
        return self.steps + 1

    def work(self, blocks: int) -> float:
        del blocks
        return self.steps + 1 / 3

    @property
    def carried(self) -> tuple[float, float]:
        """Values, gradient, momentum, spread, moments; values and gradient to go back to."""
        return 8, 8

    def prepare(self, state: ChainState) -> None:
        for band in state.bands():
            for name in ("mean", "m2", "gradient", "momentum", "spread"):
                band.arrays.setdefault(name, np.zeros_like(band.values))
            band.counts.setdefault("moments", 0)

    def program(self, setup: Setup) -> HamiltonianProgram:
        return HamiltonianProgram(setup.beta, setup.hyper, setup.floor, setup.step(0), self.steps)

    def brief(self) -> Self:
        return replace(self, warm_start=2, steps=1)

    def to_dict(self) -> dict[str, Any]:
        return {
            "type": self.name,
            "step": self.step,
            "steps": self.steps,
            "target_accept": self.target_accept,
            "warm_start": self.warm_start,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**{name: value for name, value in values.items() if name != "type"})
