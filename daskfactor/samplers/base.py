"""What every sampler is to a run: its timetable, and the operations of its chains."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from daskfactor.engine.base import BlockProgram
from daskfactor.engine.state import ChainState
from daskfactor.grid.schedules import SCHEDULES, Schedule
from daskfactor.models.tweedie import Hyperparameters
from daskfactor.samplers.steps import StepSize


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
    beta, hyper, floor
        The model's power and hyperparameters, and the smallest mean μ.
    key
        Two 32-bit words that key the chain's noise.
    step, shrink
        ε per iteration, and the factor it was reduced by after divergences.
    coarse
        Whether this is the coarse chain of a pair.
    blocks
        B, bands a side.
    """

    beta: float
    hyper: Hyperparameters
    floor: float
    key: tuple[int, int]
    step: StepSize
    shrink: float
    coarse: bool
    blocks: int


class Sampler(ABC):
    """A choice of algorithm with its options; immutable, and stored with the results."""

    models: ClassVar[tuple[str, ...]] = ("TweedieNMF",)
    tracks: ClassVar[tuple[Track, ...]] = (Track("chain", "posterior", 1),)
    schedule: Schedule

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

    def check_lengths(self, draws: int, tune: int) -> None:
        """Raise OptionError if a run cannot have this many cycles: most can."""
        del draws, tune

    @abstractmethod
    def warm_passes(self, entries: int, n_components: int) -> int:
        """Passes of the warm start for data with this many stored entries."""

    @abstractmethod
    def step_for(self, track: Track, blocks: int, n_components: int) -> StepSize:
        """The step of one track on a grid of ``blocks`` x ``blocks``."""

    def prepare(self, state: ChainState) -> None:
        """Give every band the arrays that the sampler's operations keep per entry."""
        del state

    def brief(self) -> "Sampler":
        """The same with the shortest warm start, to compile its kernels with."""
        return self

    def program(self, setup: Setup) -> BlockProgram:
        """The block operations of one chain of a `TweedieNMF`."""
        raise NotImplementedError

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
