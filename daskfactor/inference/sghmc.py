"""Langevin dynamics with momentum on conflict-free parts, for real-valued models."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from daskfactor.checks import positive_number
from daskfactor.data.schedules import SCHEDULES, Reshuffled, Schedule
from daskfactor.errors import OptionError
from daskfactor.inference.base import (
    Sampler,
    Track,
    schedule_from_dict,
    schedule_to_dict,
)
from daskfactor.inference.gaussian_program import CYCLE_FRICTION, automatic_momentum_step
from daskfactor.inference.steps import ConstantStep, StepSize, step_from_dict


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

    step: StepSize | float | Literal["auto"] = "auto"
    friction: float = CYCLE_FRICTION
    schedule: Schedule = field(default_factory=Reshuffled)

    models: ClassVar[tuple[str, ...]] = ("GaussianMF",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "friction", positive_number("friction", self.friction))
        if type(self.schedule).__name__ not in SCHEDULES:
            raise OptionError(
                f"schedule must be one of {', '.join(f'{name}()' for name in SCHEDULES)}, got "
                f"{self.schedule!r}"
            )
        if isinstance(self.step, str):
            if self.step != "auto":
                raise OptionError(
                    f'step must be "auto", a number or a step size, got {self.step!r}'
                )
        elif not callable(self.step):
            object.__setattr__(self, "step", ConstantStep(self.step))

    def warm_passes(self, entries: int, n_components: int) -> int:
        """None: a chain starts from a draw of its prior."""
        del entries, n_components
        return 0

    def step_for(self, track: Track, blocks: int, n_components: int) -> StepSize:
        """The step of one track on a grid of ``blocks`` x ``blocks``."""
        del track
        if isinstance(self.step, str):
            return automatic_momentum_step(blocks, n_components)
        assert not isinstance(self.step, int | float)  # made a ConstantStep above
        return self.step

    def to_dict(self) -> dict[str, Any]:
        automatic = isinstance(self.step, str)
        return {
            "type": self.name,
            "step": "auto" if automatic else self.step_for(self.tracks[0], 1, 1).to_dict(),
            "friction": self.friction,
            "schedule": schedule_to_dict(self.schedule),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        step = values["step"]
        return cls(
            step="auto" if isinstance(step, str) else step_from_dict(step),
            friction=values["friction"],
            schedule=schedule_from_dict(values["schedule"]),
        )
