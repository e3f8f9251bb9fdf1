"""Step sizes of samplers: the options that users pass, and the automatic one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from daskfactor.checks import positive_number
from daskfactor.errors import OptionError

StepSize = Callable[[int], float]
"""A step size for every iteration, counted from 0."""


@dataclass(frozen=True)
class ConstantStep:
    """The same step at every iteration: ε_t = ε (Şimşekli et al. 2017, section 5).

    Parameters
    ----------
    size
        ε, positive.

    Examples
    --------
    >>> import daskfactor as dfac
    >>> dfac.PSGLD(step=dfac.ConstantStep(0.1)).step
    ConstantStep(size=0.1)
    """

    size: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", positive_number("the step size", self.size))

    def __call__(self, iteration: int) -> float:
        return self.size


@dataclass(frozen=True)
class PolynomialStep:
    """A step that falls: ε_t = (a / (t + 1))^b (Şimşekli et al. 2015, equation 4).

    Parameters
    ----------
    a
        Scale of the steps, positive.
    b
        How fast they fall, ½ < b ≤ 1.

    Examples
    --------
    >>> import daskfactor as dfac
    >>> step = dfac.PolynomialStep(a=0.1, b=0.51)
    >>> dfac.PSGLD(step=step).step == step
    True
    """

    a: float
    b: float

    def __post_init__(self) -> None:
        for name in ("a", "b"):
            value = positive_number(f"{name} of PolynomialStep", getattr(self, name))
            object.__setattr__(self, name, value)
        if not 0.5 < self.b <= 1:
            raise OptionError(f"b of PolynomialStep must be in (0.5, 1], got {self.b!r}")

    def __call__(self, iteration: int) -> float:
        return float((self.a / (iteration + 1)) ** self.b)


Step = ConstantStep | PolynomialStep | float | Literal["auto"]


def automatic_step(blocks: int, n_components: int) -> ConstantStep:
    """Choose the step of the majoriser metric: min(0.2, 1/B), at most 0.05 for K of 1 or 2.

    It has no unit: y = ε/c is a share of the multiplicative update's own step,
    whatever the scale of the data, and B·ε ≥ 4 would be visibly wrong.
    """
    largest = 0.05 if n_components <= 2 else 0.2
    return ConstantStep(min(largest, 1.0 / blocks))


def checked_step(step: Step) -> ConstantStep | PolynomialStep | Literal["auto"]:
    """Return a step option as a step size, or ``"auto"``; a number becomes a constant step.

    Raises
    ------
    OptionError
        If it is none of these.
    """
    if isinstance(step, str):
        if step == "auto":
            return "auto"
        raise OptionError(f'step must be "auto", a number or a step size, got {step!r}')
    if isinstance(step, ConstantStep | PolynomialStep):
        return step
    if callable(step):
        raise OptionError(
            f'step must be "auto", a number, ConstantStep or PolynomialStep, got {step!r}'
        )
    return ConstantStep(step)
