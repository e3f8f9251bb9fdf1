"""What every sampler is to a run: its timetable, and the operations of its chains."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.data.schedules import SCHEDULES, Schedule
from daskfactor.executors.base import BlockProgram
from daskfactor.executors.state import ChainState
from daskfactor.inference.steps import StepSize
from daskfactor.models.tweedie import Hyperparameters


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
    frozen_w, frozen_h
        Which components of W and of H must stay as they are, (K,) booleans; None: none.
    observed
        Observed entries of every block, (B, B), for samplers that draw from them.
    """

    beta: float
    hyper: Hyperparameters
    floor: float
    key: tuple[int, int]
    step: StepSize
    shrink: float
    coarse: bool
    blocks: int
    frozen_w: NDArray[np.bool_] | None = None
    frozen_h: NDArray[np.bool_] | None = None
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
