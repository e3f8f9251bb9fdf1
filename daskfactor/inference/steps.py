"""Step sizes, as functions of the iteration."""

from dataclasses import dataclass
from typing import Any, Protocol

from daskfactor.checks import positive_number
from daskfactor.errors import OptionError


class StepSize(Protocol):
    """A step size for every iteration, counted from 0."""

    def __call__(self, iteration: int) -> float:
        """The step of one iteration."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Plain values from which :func:`step_from_dict` makes it again."""
        ...


@dataclass(frozen=True)
class ConstantStep:
    """ε_t = ε (Şimşekli et al. 2017, section 5)."""

    size: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", positive_number("the step size", self.size))

    def __call__(self, iteration: int) -> float:
        return self.size

    def to_dict(self) -> dict[str, Any]:
        return {"type": "ConstantStep", "size": self.size}


@dataclass(frozen=True)
class PolynomialStep:
    """ε_t = (a / (t + 1))^b with ½ < b ≤ 1 (Şimşekli et al. 2015, equation 4)."""

    a: float
    b: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "a", positive_number("a of PolynomialStep", self.a))
        object.__setattr__(self, "b", positive_number("b of PolynomialStep", self.b))
        if not 0.5 < self.b <= 1:
            raise OptionError(f"b of PolynomialStep must be in (0.5, 1], got {self.b!r}")

    def __call__(self, iteration: int) -> float:
        return float((self.a / (iteration + 1)) ** self.b)

    def to_dict(self) -> dict[str, Any]:
        return {"type": "PolynomialStep", "a": self.a, "b": self.b}


def step_from_dict(values: dict[str, Any]) -> StepSize:
    """The step that ``to_dict`` described."""
    kinds = {"ConstantStep": ConstantStep, "PolynomialStep": PolynomialStep}
    arguments = {name: value for name, value in values.items() if name != "type"}
    step: StepSize = kinds[values["type"]](**arguments)
    return step


def automatic_step(blocks: int, n_components: int) -> ConstantStep:
    """The step of the majoriser metric: min(0.2, 1/B), at most 0.05 for one or two components.

    It has no unit: y = ε/c is a share of the multiplicative update's own step,
    whatever the scale of the data, and B·ε ≥ 4 would be visibly wrong.
    """
    largest = 0.05 if n_components <= 2 else 0.2
    return ConstantStep(min(largest, 1.0 / blocks))
