"""Parallel stochastic-gradient Langevin dynamics (P-SGLD)."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np

from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Reshuffled, Schedule
from daskfactor.errors import DataError, OptionError
from daskfactor.executors.plan import Op
from daskfactor.executors.state import FactorBand
from daskfactor.inference.base import (
    METRIC,
    MOMENTS,
    Setup,
    Step,
    StepSize,
    Track,
    automatic_step,
    check_schedule,
    checked_step,
)
from daskfactor.inference.program import COLUMNS, ROWS, LangevinProgram
from daskfactor.inference.tweedie_chain import NonNegativeSampler
from daskfactor.kernels import blockwise
from daskfactor.kernels.langevin import cir_step
from daskfactor.kernels.philox import Address
from daskfactor.kernels.views import Workspace


@dataclass(frozen=True)
class CirProgram(LangevinProgram):
    """One chain's block operations, with exact transitions in the majoriser's metric."""

    def update(
        self, op: Op, data: BlockedData, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        view, blocks = data.view(op.block.row, op.block.col), data.grid.blocks
        scale = op.scale / self.hyper.dispersion
        curvatures = np.zeros_like(rows.values), np.zeros_like(cols.values)
        gradients = blockwise.gradient(
            view,
            self.likelihood,
            rows.values,
            cols.values,
            scale,
            self.floor,
            workspace,
            curvatures,
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
                self.hyper.prior(factor),
                Address(key, op.iteration, factor, band.offset),
            )
        if op.last:
            self._finish(op, rows, ROWS)
            self._finish(op, cols, COLUMNS)


Preconditioner = Literal["majorizer", "identity"]
Transition = Literal["euler", "cir"]


class LangevinSampler(NonNegativeSampler):
    """Options that all samplers share which take Langevin steps.

    A subclass is a frozen dataclass with the fields ``step``, ``preconditioner`` and
    ``warm_start``.
    """

    step: Step
    preconditioner: Preconditioner

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preconditioner not in ("majorizer", "identity"):
            raise OptionError(
                f'preconditioner must be "majorizer" or "identity", got {self.preconditioner!r}'
            )
        object.__setattr__(self, "step", checked_step(self.step))
        if self.step == "auto" and not self.majorizer:
            raise OptionError(
                "the plain step has no automatic size; pass a number such as step=1e-5, or use "
                'preconditioner="majorizer"'
            )

    @property
    def majorizer(self) -> bool:
        """Tell whether steps are taken in the majoriser's metric."""
        return self.preconditioner == "majorizer"

    @property
    def arrays(self) -> tuple[str, ...]:
        return (*MOMENTS, *METRIC) if self.majorizer else MOMENTS

    def for_compilation(self) -> Self:
        step: Step = "auto" if self.majorizer else 1e-3
        return replace(super().for_compilation(), step=step)  # type: ignore[type-var]

    def automatic(self, blocks: int, n_components: int) -> StepSize:
        """Choose what ``step="auto"`` is."""
        return automatic_step(blocks, n_components)

    def step_for(self, track: Track, blocks: int, n_components: int) -> StepSize:
        del track
        if isinstance(self.step, str):
            return self.automatic(blocks, n_components)
        assert not isinstance(self.step, int | float)  # see `checked_step`
        return self.step

    def _fields(self, setup: Setup) -> dict[str, Any]:
        """Return the arguments of a `LangevinProgram`."""
        return {
            "likelihood": setup.model.likelihood,
            "hyper": setup.hyper,
            "floor": setup.floor,
            "key": setup.key,
            "step": setup.step,
            "shrink": setup.shrink,
            "majorizer": self.majorizer,
            "coarse": setup.coarse,
            "frozen": setup.model.frozen,
        }


@dataclass(frozen=True)
class PSGLD(LangevinSampler):
    """Langevin dynamics on conflict-free parts of the data.

    In the majoriser's metric (the default), with c the averaged denominator of
    the multiplicative update and y = ε / c:

        θ ← | θ + clip(y θ G, ±2√(2y(θ + y))) + a y + √(2yθ) z |

    where a is the shape of the prior and G leaves its term (a - 1)/θ out. With
    ``preconditioner="identity"``, the papers' plain step:

        θ ← | θ + clip(εG, ±2√(2ε)) + √(2ε) z |

    With ``transition="cir"`` the metric's diffusion is not stepped through but drawn
    from exactly, numerator and denominator of the multiplicative update held:

        τ = ε den/c,  n ~ Poisson(den θ / (e^τ - 1)),
        θ ← Gamma(θ num + a + n, rate den / (1 - e^(-τ)))

    so that θ stays positive without clip and mirror. Its random numbers cost about 150
    times as much, 0.4 µs an entry. On Poisson counts the bias of second moments is a
    small part of the other's at the same step; on strongly skewed laws (β = 0) it is
    about the same at small steps and grows faster from ε = 0.2 on.

    Parameters
    ----------
    step
        ``"auto"`` (only in the majoriser's metric: min(0.2, 1/B), without a
        unit), a number, or a step such as ``ConstantStep`` or ``PolynomialStep``.
    preconditioner
        ``"majorizer"`` or ``"identity"``.
    schedule
        Order of the parts; reshuffled every cycle by default.
    warm_start
        Passes of multiplicative updates before the chain starts; ``"auto"`` takes
        100, and down to 20 where a pass is dear (beyond 10⁹ entries times components).
    transition
        ``"euler"``, the step above, or ``"cir"``: only in the majoriser's metric, and
        for data without negative entries.

    Notes
    -----
    Şimşekli et al. 2017, equations 12 and 13, and Şimşekli et al. 2015,
    equations 7 to 9; the mirror of section 4 there. The clip and the metric are
    this package's own. Exact transitions: Baker, Fearnhead, Fox and Nemeth 2018,
    "Large-scale stochastic sampling from the probability simplex".
    """

    step: Step = "auto"
    preconditioner: Preconditioner = "majorizer"
    schedule: Schedule = field(default_factory=Reshuffled)
    warm_start: int | Literal["auto"] = "auto"
    transition: Transition = "euler"

    def __post_init__(self) -> None:
        if self.transition not in ("euler", "cir"):
            raise OptionError(f'transition must be "euler" or "cir", got {self.transition!r}')
        super().__post_init__()
        if self.transition == "cir" and self.preconditioner != "majorizer":
            raise OptionError(
                'transition="cir" is a transition of the diffusion in the majoriser\'s metric; '
                'leave preconditioner at "majorizer", or transition at "euler"'
            )
        check_schedule(self.schedule)

    def check_data(self, data: BlockedData) -> None:
        """Refuse negative data under exact transitions: no gamma law has their numerator."""
        if self.transition == "cir" and data.minimum < 0:
            raise DataError(
                f'transition="cir" takes non-negative data, got a smallest value of '
                f'{data.minimum:g}; leave transition at "euler", or mask the negative values'
            )

    def for_compilation(self) -> Self:
        return replace(super().for_compilation(), schedule=Reshuffled())

    def program(self, setup: Setup) -> LangevinProgram:
        kind = CirProgram if self.transition == "cir" else LangevinProgram
        return kind(**self._fields(setup))
