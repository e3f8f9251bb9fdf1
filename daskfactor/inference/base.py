"""What every sampler is to a run: its timetable, and the operations of its chains."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import positive_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.schedules import SCHEDULES, Schedule
from daskfactor.errors import OptionError
from daskfactor.executors.base import BlockProgram
from daskfactor.executors.state import ChainState

if TYPE_CHECKING:
    from daskfactor.inference.chain import ChainRun, Setting


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


@dataclass(frozen=True)
class Track:
    """One of the chains that a sampler runs side by side from the same start.

    ``coarseness`` is the number of cycles of the finest track that one cycle of
    this track stands for.
    """

    name: str
    group: str
    coarseness: int


class Setup(NamedTuple):
    """What a program of block operations is made from, beyond the sampler's own options.

    Attributes
    ----------
    model, hyper, floor
        The model, its present hyperparameters, and the smallest mean μ.
    key
        Two 32-bit words that key the chain's noise.
    step, shrink
        ε per iteration, and the factor it was reduced by after divergences.
    coarse
        Whether this is the coarse chain of a pair.
    blocks
        B, bands a side.
    observed
        Observed entries of every block, (B, B), for samplers that draw from them.
    """

    model: Any
    hyper: Any
    floor: float
    key: tuple[int, int]
    step: StepSize
    shrink: float
    coarse: bool
    blocks: int
    observed: NDArray[np.int64] | None = None


class Sampler(ABC):
    """A choice of algorithm with its options; immutable, and stored with the results."""

    models: ClassVar[tuple[str, ...]] = ("TweedieNMF",)
    tracks: ClassVar[tuple[Track, ...]] = (Track("chain", "posterior", 1),)
    proposes: ClassVar[bool] = False
    """Whether draws are proposed and accepted or repeated, at a rate that results hold."""
    schedule: Schedule
    dispersion: ClassVar[float | None] = None
    """The dispersion that the sampler takes for granted; None: the model's own."""

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def majorizer(self) -> bool:
        """Whether bands carry the majoriser's metric."""
        return False

    def check_model(self, model: Any) -> None:
        """Raise ModelError if this model is not one that the sampler is right for."""
        del model

    def check_data(self, data: BlockedData) -> None:
        """Raise DataError if these data are not ones that the sampler is right for."""
        del data

    def check_lengths(self, draws: int, tune: int) -> None:
        """Raise OptionError if a run cannot have this many cycles: most can."""
        del draws, tune

    @abstractmethod
    def warm_passes(self, entries: int, n_components: int) -> int:
        """Passes of the warm start for data with this many stored entries."""

    @abstractmethod
    def step_for(self, track: Track, blocks: int, n_components: int) -> StepSize:
        """The step of one track on a grid of ``blocks`` x ``blocks``."""

    def moves(self, blocks: int) -> int:
        """Steps of a cycle: the iterations that the step size counts."""
        return blocks

    def visits(self, blocks: int) -> int:
        """How often a cycle's operations come to every block."""
        del blocks
        return 1

    def work(self, blocks: int) -> float:
        """Work of a cycle's updates, in passes over all the data."""
        del blocks
        return 1.0

    @property
    def carried(self) -> tuple[float, float]:
        """Arrays of the factors' shape that a chain carries while it tunes, and after."""
        return (6, 4) if self.majorizer else (3, 3)

    @abstractmethod
    def chain(self, setting: "Setting", number: int) -> "ChainRun":
        """Make a chain of a run, not started yet."""

    def prepare(self, state: ChainState) -> None:
        """Give every band the arrays that the sampler's operations keep per entry."""
        del state

    def brief(self) -> "Sampler":
        """The same with the shortest warm start, to compile its kernels with."""
        return self

    @abstractmethod
    def program(self, setup: Setup) -> BlockProgram:
        """Make the block operations of one track at its present hyperparameters."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the class under ``"type"``, from which it is made again."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The sampler that ``to_dict`` described."""


def schedule_to_dict(schedule: Schedule) -> dict[str, Any]:
    """Plain values of a schedule."""
    return {"type": type(schedule).__name__, **vars(schedule)}


def schedule_from_dict(values: dict[str, Any]) -> Schedule:
    """The schedule that `schedule_to_dict` described."""
    options = dict(values)
    made: Schedule = SCHEDULES[options.pop("type")](**options)
    return made
