"""Say what an algorithm is: its options, what a run asks of it, and its steps; find it by name."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self, cast

import daskfactor
from daskfactor.checks import positive_number, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import SCHEDULES, Schedule
from daskfactor.errors import OptionError, StoreFormatError
from daskfactor.executors.base import BlockProgram, Executor
from daskfactor.executors.state import ChainState
from daskfactor.models import check_model
from daskfactor.models.settings import FactorModel
from daskfactor.results.schema import Variable

if TYPE_CHECKING:
    from daskfactor.inference.chain import Chain
    from daskfactor.inference.options import Setting

MOMENTS = ("mean", "m2")
"""Running moments of every entry."""
METRIC = ("metric", "curvature", "gathered")
"""The majoriser's metric, and what it is learnt from."""
TUNING = METRIC[1:]
"""Arrays that only tuning needs."""


class StepSize(Protocol):
    """A step size for every iteration, counted from 0."""

    def __call__(self, iteration: int) -> float:
        """Return the step of one iteration."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with the class under ``"type"``."""
        return {"type": type(self).__name__, **vars(self)}


@dataclass(frozen=True)
class ConstantStep(StepSize):
    """ε_t = ε (Şimşekli et al. 2017, section 5)."""

    size: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", positive_number("the step size", self.size))

    def __call__(self, iteration: int) -> float:
        return self.size


@dataclass(frozen=True)
class PolynomialStep(StepSize):
    """ε_t = (a / (t + 1))^b with ½ < b ≤ 1 (Şimşekli et al. 2015, equation 4)."""

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

    A subclass is a frozen dataclass, in one module with its block operations. Nothing
    but ``daskfactor/__init__.pyi`` lists it.
    """

    @property
    def name(self) -> str:
        return type(self).__name__

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with the class under ``"type"``, that `from_dict` takes."""
        return {"type": self.name} | {name: _plain(getattr(self, name)) for name in _options(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Make what `to_dict` described; options that it lacks are the usual ones."""
        return cls(**{name: _made(values[name]) for name in _options(cls) if name in values})


class Sampler(Algorithm, ABC):
    """A way to draw from a posterior.

    Attributes
    ----------
    tracks
        Chains that run side by side from one start; more than one are extrapolated.
    schedule
        Order in which a cycle visits the parts of the data.
    step
        Its `Step`, checked.
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
    step: Any = "auto"
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
        coarsest = self.coarseness
        for name, value in (("draws", draws), ("tune", tune)):
            if value % coarsest:
                right = f"an even {name}" if coarsest == 2 else f"multiples of it as {name}"
                raise OptionError(
                    f"{self.name} takes {coarsest} fine cycles for each coarse one and needs "
                    f"{right}; got {value}, pass {value + coarsest - value % coarsest}"
                )

    # -- what a run needs to know ----------------------------------------------

    @property
    def coarseness(self) -> int:
        """Fine cycles for each cycle of the coarsest track."""
        return max(track.coarseness for track in self.tracks)

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

    def step_for(self, track: Track, blocks: int, n_components: int) -> StepSize:
        """Choose the step of one track on a grid of ``blocks`` x ``blocks``."""
        del track
        if self.step == "auto":
            return self.automatic(blocks, n_components)
        return cast("StepSize", self.step)  # see `checked_step`

    def automatic(self, blocks: int, n_components: int) -> StepSize:
        """Choose what ``step="auto"`` is."""
        return automatic_step(blocks, n_components)

    def for_compilation(self) -> Self:
        """Return the same with the shortest warm start, to compile its kernels with."""
        return self

    # -- what it does ----------------------------------------------------------

    @abstractmethod
    def chain(self, setting: "Setting", number: int) -> "Chain":
        """Make a chain of a run, not started yet."""

    @abstractmethod
    def program(self, chain: "Chain", track: Track) -> BlockProgram:
        """Make the block operations of one track at the chain's present hyperparameters."""


class PointFit(NamedTuple):
    """A point estimate: factors, hyperparameters, fit, and the objective at iterations."""

    state: ChainState
    hyper: Any
    fit: Any
    objective: list[tuple[int, float]]


class Descent(ABC):
    """A point estimate on its way.

    Attributes
    ----------
    finished
        Whether further iterations would change nothing worth while.
    """

    finished: bool = False

    @abstractmethod
    def advance(self, iteration: int) -> None:
        """Take one iteration; they are counted from 1."""

    @abstractmethod
    def result(self) -> PointFit:
        """Return where it has come to."""


def descend(
    descent: Descent, iterations: int, on_step: Callable[[int, int], None] | None = None
) -> PointFit:
    """Iterate until it is finished; ``on_step`` is told how many are done, of how many."""
    for iteration in range(1, iterations + 1):
        descent.advance(iteration)
        if on_step is not None:
            on_step(iteration, iterations)
        if descent.finished:
            break
    return descent.result()


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
    def descent(self, data: BlockedData, model: Any, executor: Executor, seed: int) -> Descent:
        """Make a descent from a random start.

        Raises
        ------
        OptionError
            If these data are not ones that it is right for.
        """


# -- the algorithms that there are: the package's public names are the one list of them -----


@cache
def known(base: Any) -> dict[str, Any]:
    """Return the public algorithms of a kind by name; imports whatever the package has."""
    values = (getattr(daskfactor, name) for name in dir(daskfactor))
    kinds = (value for value in values if isinstance(value, type) and issubclass(value, base))
    return {kind.__name__: kind for kind in kinds}


def algorithm_from_dict(base: Any, values: dict[str, Any], made_by: str) -> Any:
    """Make the algorithm that ``to_dict`` described; ``made_by`` is "the run was made by a …"."""
    name = values.get("type")
    kind = getattr(daskfactor, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise StoreFormatError(
            f"{made_by} called {name!r}, which this version does not have; it knows "
            f"{', '.join(known(base))}"
        )
    made: Any = kind
    return made.from_dict(values)


def chosen(base: Any, given: object, usual: str, argument: str) -> Any:
    """Return the algorithm given for an argument, or the usual one where there is none."""
    if given is None:
        given = getattr(daskfactor, usual)()
    if not isinstance(given, base):
        names = ", ".join(f"{name}(...)" for name in known(base))
        raise OptionError(f"{argument} must be one of {names}, got {given!r}")
    return given


def checked_sampler(model: FactorModel, sampler: object) -> Sampler:
    """Give the sampler, or a model's own; refuse what does not go together."""
    check_model(model)
    found: Sampler = chosen(Sampler, sampler, model.default_sampler, "sampler")
    if model.nonnegative != found.nonnegative:
        kinds = known(Sampler).items()
        right = [name for name, own in kinds if own.nonnegative == model.nonnegative]
        raise OptionError(
            f"{type(model).__name__} cannot be sampled by {found.name}: it takes "
            f"{' or '.join(f'{name}()' for name in right)}; leave sampler out for the right one"
        )
    found.check_model(model)
    return found


def _options(algorithm: Any) -> list[str]:
    return [field.name for field in fields(algorithm) if field.init]


def _plain(value: Any) -> Any:
    if type(value).__name__ in SCHEDULES:
        return {"type": type(value).__name__, **vars(value)}
    return value.to_dict() if hasattr(value, "to_dict") else value


def _made(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kinds = {"ConstantStep": ConstantStep, "PolynomialStep": PolynomialStep, **SCHEDULES}
    return kinds[value["type"]](**{name: own for name, own in value.items() if name != "type"})
