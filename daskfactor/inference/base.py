"""Say what an algorithm is: its options, what a run asks of it, and its steps."""

import math
from abc import ABC, abstractmethod
from dataclasses import Field, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import positive_number, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import SCHEDULES, Schedule
from daskfactor.errors import OptionError
from daskfactor.executors.base import BlockProgram, Executor
from daskfactor.results.schema import Variable

if TYPE_CHECKING:
    from daskfactor.inference.chain import Chain, Setting
    from daskfactor.inference.run import Descent


MOMENTS = ("mean", "m2")
"""Running moments of every entry."""
METRIC = ("metric", "curvature", "gathered")
"""The majoriser's metric, and what it is learnt from."""
TUNING = METRIC[1:]
"""Arrays that only tuning needs."""


class StepSize(Protocol):
    """A step size for every iteration, counted from 0."""

    def __call__(self, iteration: int) -> float:
        """The step of one iteration."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with the class under ``"type"``."""
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


Step = StepSize | float | Literal["auto"]


def automatic_step(blocks: int, n_components: int) -> ConstantStep:
    """Choose the step of the majoriser metric: min(0.2, 1/B), at most 0.05 for K of 1 or 2.

    It has no unit: y = ε/c is a share of the multiplicative update's own step,
    whatever the scale of the data, and B·ε ≥ 4 would be visibly wrong.
    """
    largest = 0.05 if n_components <= 2 else 0.2
    return ConstantStep(min(largest, 1.0 / blocks))


def checked_step(step: Step) -> StepSize | Literal["auto"]:
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
    if not callable(step):
        return ConstantStep(step)
    if not hasattr(step, "to_dict"):
        raise OptionError(
            f'step must be "auto", a number, ConstantStep or PolynomialStep, got {step!r}'
        )
    return step


def check_schedule(schedule: object) -> None:
    """Refuse what is no order of the parts."""
    if type(schedule).__name__ not in SCHEDULES:
        known = ", ".join(f"{name}()" for name in SCHEDULES)
        raise OptionError(f"schedule must be one of {known}, got {schedule!r}")


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
    """All that a program of block operations is made from, beyond the sampler's own options.

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


class Work(NamedTuple):
    """The work of one cycle on a grid of B x B blocks.

    Attributes
    ----------
    moves
        Steps of a cycle: the iterations that the step size counts.
    visits
        How often the cycle's operations come to every block.
    passes
        Work of the updates, in passes over all the data.
    """

    moves: int
    visits: int = 1
    passes: float = 1.0


class Algorithm:
    """A choice of algorithm with its options; immutable, and stored with the results.

    A subclass is a frozen dataclass, alone in its module with its block operations. Nothing
    but ``daskfactor/__init__.pyi`` lists it.
    """

    @property
    def name(self) -> str:
        return type(self).__name__

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with the class under ``"type"``, that `from_dict` takes."""
        options = {field.name: getattr(self, field.name) for field in _options(self)}
        return {"type": self.name} | {name: _plain(value) for name, value in options.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Make what `to_dict` described; options that it lacks are the usual ones."""
        own = {field.name for field in _options(cls)}
        return cls(**{name: _made(value) for name, value in values.items() if name in own})


class Sampler(Algorithm, ABC):
    """A way to draw from a posterior.

    Attributes
    ----------
    tracks
        Chains that run side by side from one start; more than one are extrapolated.
    schedule
        Order in which a cycle visits the parts of the data.
    nonnegative
        Whether it samples non-negative factors, or real-valued ones.
    statistics
        What it tells of a draw besides density, step and divergence.
    biased
        Whether draws are off by an amount that shrinks with the step.
    tempers
        Whether it samples powers of the likelihood.
    dispersion
        What it takes the dispersion to be; None: the model's own.
    learns_every
        Cycles between draws of hyperparameters; None: none are drawn.
    """

    tracks: ClassVar[tuple[Track, ...]] = (Track("chain", "posterior", 1),)
    schedule: Schedule
    nonnegative: ClassVar[bool] = True
    statistics: ClassVar[tuple[Variable, ...]] = ()
    biased: ClassVar[bool] = True
    tempers: ClassVar[bool] = True
    dispersion: ClassVar[float | None] = None
    learns_every: ClassVar[int | None] = None
    warm_start: int | Literal["auto"] = 0

    # -- what it is right for --------------------------------------------------

    def check_model(self, model: Any) -> None:
        """Raise ModelError if this model is not one that the sampler is right for."""
        del model

    def check_data(self, data: BlockedData) -> None:
        """Raise DataError if these data are not ones that the sampler is right for."""
        del data

    def check_lengths(self, draws: int, tune: int) -> None:
        """Raise OptionError if a track cannot take its share of so many cycles."""
        coarsest = max(track.coarseness for track in self.tracks)
        for name, value in (("draws", draws), ("tune", tune)):
            if value % coarsest:
                right = f"an even {name}" if coarsest == 2 else f"multiples of it as {name}"
                raise OptionError(
                    f"{self.name} takes {coarsest} fine cycles for each coarse one and needs "
                    f"{right}; got {value}, pass {value + coarsest - value % coarsest}"
                )

    # -- what a run needs to know ----------------------------------------------

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of what bands carry for each entry, besides its value."""
        return MOMENTS

    def carried(self, width: int) -> tuple[float, float]:
        """Count arrays of a factor's shape that a chain holds while it tunes, and after."""
        del width
        count = 1 + len(self.arrays)
        return count, count - sum(name in self.arrays for name in TUNING)

    def work(self, blocks: int) -> Work:
        """Tell what a cycle takes on a grid of ``blocks`` x ``blocks``."""
        return Work(blocks)

    @abstractmethod
    def step_for(self, track: Track, blocks: int, n_components: int) -> StepSize:
        """Choose the step of one track on a grid of ``blocks`` x ``blocks``."""

    def for_compilation(self) -> Self:
        """Return the same with the shortest warm start, to compile its kernels with."""
        return self

    # -- what it does ----------------------------------------------------------

    @abstractmethod
    def chain(self, setting: "Setting", number: int) -> "Chain":
        """Make a chain of a run, not started yet."""

    @abstractmethod
    def program(self, setup: Setup) -> BlockProgram:
        """Make the block operations of one track at its present hyperparameters."""


class Optimizer(Algorithm, ABC):
    """A way to a point estimate; a subclass has the fields ``max_iter`` and ``tol``."""

    max_iter: int
    tol: float

    def __post_init__(self) -> None:
        whole_number("max_iter", self.max_iter, 1)
        if not (math.isfinite(self.tol) and self.tol >= 0):
            raise OptionError(f"tol must be zero or a small positive number, got {self.tol!r}")

    def check_model(self, model: Any) -> None:
        """Raise OptionError if this model is not one that it is right for."""
        del model

    @abstractmethod
    def descent(self, data: BlockedData, model: Any, executor: Executor, seed: int) -> "Descent":
        """Make a descent from a random start.

        Raises
        ------
        OptionError
            If these data are not ones that it is right for.
        """


def _options(sampler: Any) -> list[Field[Any]]:
    return [field for field in fields(sampler) if field.init]


def _plain(value: Any) -> Any:
    if type(value).__name__ in SCHEDULES:
        return {"type": type(value).__name__, **vars(value)}
    return value.to_dict() if hasattr(value, "to_dict") else value


def _made(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kinds = {"ConstantStep": ConstantStep, "PolynomialStep": PolynomialStep, **SCHEDULES}
    return kinds[value["type"]](**{name: own for name, own in value.items() if name != "type"})
