"""Say what an algorithm is, and find it by name."""

import ast
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

import daskfactor
from daskfactor.checks import positive_number, refuse_unknown, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import SCHEDULES, Schedule
from daskfactor.errors import DataError, ModelError, OptionError, StoreFormatError
from daskfactor.executors.plan import Op
from daskfactor.executors.state import FactorBand
from daskfactor.kernels.philox import Address
from daskfactor.kernels.steps import on_device_of
from daskfactor.kernels.views import Workspace
from daskfactor.models import check_model
from daskfactor.models.gamma_factors import clipped_gamma_log_density
from daskfactor.models.settings import FactorModel, named_columns
from daskfactor.results.schema import Variable

if TYPE_CHECKING:
    from daskfactor.inference.chain import Chain
    from daskfactor.inference.program import Program

Array = NDArray[Any]
Bands = tuple[FactorBand, ...]
"""A band of W and one of H: what meets in a block."""


class ArraySpec(NamedTuple):
    """Declares an array that bands carry beside their values.

    Attributes
    ----------
    life
        "chain": as long as the chain; "tune": while it tunes; "cycle": made and used up within
        a cycle, so that it is in no state and travels with its band.
    changes
        Which operations write it: "never" any, "always" all, "record" those that end a cycle
        whose draw counts, "adapt" those of a cycle that learns, "adapted" the last one of these.
    columns
        Numbers for each row, or how many these are of a factor's width; None: as many as that.
    wide
        Whether numbers are in double precision.
    """

    life: Literal["chain", "tune", "cycle"] = "chain"
    changes: Literal["never", "always", "record", "adapt", "adapted"] = "always"
    columns: int | Callable[[int], int] | None = None
    wide: bool = False

    def size(self, width: int) -> float:
        """Return the size of the array, in units of a factor of so many columns."""
        columns = self.columns(width) if callable(self.columns) else self.columns
        return (1 + self.wide) * (1.0 if columns is None else columns / width)

    def changed_by(self, op: Op) -> bool:
        """Tell whether an operation writes the array."""
        adapts = op.wanted.adapt
        return {
            "never": False,
            "always": True,
            "record": op.last and op.wanted.record,
            "adapt": adapts,
            "adapted": adapts and op.last,
        }[self.changes]

    def touched_by(self, op: Op) -> bool:
        """Tell whether an operation reads or writes the array."""
        read = self.life == "chain" and self.changes != "record"
        return read or self.changed_by(op)


Arrays = dict[str, ArraySpec]
MOMENTS = ("mean", "m2")
"""Running moments of every entry."""
RECORDED: Arrays = dict.fromkeys(MOMENTS, ArraySpec(changes="record"))
METRIC: Arrays = {
    "metric": ArraySpec(changes="adapted"),
    "curvature": ArraySpec("tune", "adapted"),
    "gathered": ArraySpec("tune", "adapt"),
}
"""The majoriser's metric, and what it is learnt from."""
HYPER_EVERY = 10
"""Cycles of the Langevin samplers between draws of hyperparameters: each ends a plan."""


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
KINDS: dict[str, Any] = {
    "ConstantStep": ConstantStep,
    "PolynomialStep": PolynomialStep,
    **SCHEDULES,
}
"""Values of options that are stored under the name of their class."""


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
    passes_per_column
        Further ones for each column of the factors.
    """

    moves: int
    visits: int = 1
    passes: float = 1.0
    passes_per_column: float = 0.0


class Algorithm:
    """A choice of algorithm with its options; immutable, and stored with the results.

    A subclass is a frozen dataclass, in one module with its block operations. Nothing
    but ``daskfactor/__init__.pyi`` lists it.

    ``folders``: where in the package algorithms of its kind are. ``on_device``: whether its
    block operations can be done on a GPU.
    """

    folders: ClassVar[tuple[str, ...]] = ("inference",)
    on_device: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return type(self).__name__

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with the class under ``"type"``, that `from_dict` takes."""
        return {"type": self.name} | {name: _plain(getattr(self, name)) for name in _options(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Make what `to_dict` described; options that it lacks are the usual ones.

        Raises
        ------
        StoreFormatError
            If it has options that this version does not know.
        """
        refuse_unknown(f"the stored {cls.__name__}", values, ("type", *_options(cls)))
        return cls(**{name: _made(own) for name, own in values.items() if name != "type"})


class Sampler(Algorithm, ABC):
    """A way to draw from a posterior.

    Attributes
    ----------
    chain
        What makes a chain of a run, not started yet, from a `Setting` and a number.
    tracks
        Chains that run side by side from one start; more than one are extrapolated.
    schedule
        Order in which a cycle visits the parts of the data.
    step
        Its `Step`, checked.
    tensors
        Whether it samples the factors of tensors, too.
    statistics
        What it tells of a draw besides density, step and divergence.
    arrays
        What bands carry besides their values, by name.
    biased
        Whether draws of the group ``posterior`` are off by an amount that shrinks with the step.
    tempers
        Whether it samples powers of the likelihood, as evidences need them, soon enough for
        their claims.
    dispersion
        What it takes the dispersion to be; None: the model's own.
    rescales_every
        Cycles between draws of the scale that W and H of a component share, where the model
        learns no hyperparameters; None: it is never drawn. Masses and steps that are learnt
        stay as they are: with these held every kernel leaves the posterior as it is, and so
        does the draw of the scale.
    independent
        Whether it draws a factor from its conditional given the other one, whatever it was.
    learns_every
        Cycles between draws of hyperparameters that a model has learnt; None: it draws none.
    merit
        Why ``sampler="auto"`` chooses it, in a few words.
    """

    chain: ClassVar[type["Chain"]]
    tracks: ClassVar[tuple[Track, ...]] = (Track("chain", "posterior", 1),)
    schedule: Schedule
    step: Any = "auto"
    tensors: ClassVar[bool] = False
    statistics: ClassVar[tuple[Variable, ...]] = ()
    biased: ClassVar[bool] = True
    tempers: ClassVar[bool] = True
    dispersion: ClassVar[float | None] = None
    learns_every: ClassVar[int | None] = 1
    rescales_every: ClassVar[int | None] = None
    independent: ClassVar[bool] = False
    merit: ClassVar[str] = ""
    warm_start: int | Literal["auto"] = 0

    def __post_init__(self) -> None:
        if self.warm_start != "auto":
            whole_number("warm_start", self.warm_start, 0)

    # -- what it is right for --------------------------------------------------

    def suited(self, model: Any) -> "Sampler | None":
        """Return the sampler as it samples models of this kind; None where it does not."""
        return self if model.nonnegative else None

    def over(self, n_factors: int) -> Self:
        """Return the sampler as it moves so many factors: two of a matrix, more of a tensor.

        Raises
        ------
        OptionError
            If it moves those of a matrix only.
        """
        if n_factors > 2 and not self.tensors:
            raise OptionError(
                f"{self.name} samples matrices, and these data have {n_factors} axes; take "
                "PSGLD(), SGHMC(), BlockHMC() or LangevinDynamics(), or leave sampler out"
            )
        return self

    def check_model(self, model: Any) -> None:
        """Raise ModelError if this model is not one that the sampler is right for."""
        if self.learns_every is None or len(self.tracks) > 1:
            model.check_settled(self.name)

    def check_data(self, data: BlockedData) -> None:
        """Raise DataError if these data are not ones that the sampler is right for."""
        del data

    def worth(self, model: Any, data: Any) -> float:
        """Tell how well it suits a model and data; 0: only if asked for.

        About as many times as draws of `PSGLD` a second of its draws are worth, as
        ``python -m benchmarks --long --only accuracy.laws`` measures it; more if they are exact
        and soon there.
        """
        del model, data
        return 0.0

    def check_lengths(self, draws: int, tune: int) -> None:
        """Raise OptionError if a track cannot take its share of so many cycles."""
        coarsest = self.coarseness
        for name, value in (("draws", draws), ("tune", tune)):
            if value % coarsest:
                raise OptionError(
                    f"{self.name} takes {coarsest} fine cycles for each coarse one and needs "
                    f"an even {name}; got {value}, pass {value + coarsest - value % coarsest}"
                )

    # -- what a run needs to know ----------------------------------------------

    @property
    def coarseness(self) -> int:
        """Fine cycles for each cycle of the coarsest track."""
        return max(track.coarseness for track in self.tracks)

    @property
    def arrays(self) -> Arrays:
        return RECORDED

    def carried(self, width: int, *lives: str) -> float:
        """Count arrays of a factor's shape that bands hold beside it, of these lives."""
        return math.fsum(own.size(width) for own in self.arrays.values() if own.life in lives)

    def work(self, blocks: int) -> Work:
        """Tell what a cycle takes on a grid of ``blocks`` x ``blocks``."""
        return Work(blocks)

    @abstractmethod
    def step_for(self, track: Track, blocks: int, n_components: int) -> StepSize:
        """Choose the step of one track on a grid of ``blocks`` x ``blocks``."""

    def pair(self) -> "Sampler | None":
        """Return this sampler as two coupled chains, with half the step and with the whole one."""
        return None

    def for_compilation(self) -> Self:
        """Return the same with the shortest warm start, to compile its kernels with."""
        return replace(self, warm_start=2)  # type: ignore[type-var]  # subclasses are dataclasses

    # -- what it does ----------------------------------------------------------

    @abstractmethod
    def block_step(
        self, program: "Program", op: Op, data: BlockedData, bands: Bands, workspace: Workspace
    ) -> None:
        """Do what an update of a block does to its two bands, in place.

        In a cycle's last operation (``op.last``) it ends with ``program.finish_cycle``.
        """

    def begin(self, band: FactorBand, factor: int, denominator: Array, hyper: Any) -> None:
        """Give a band what it is to have before it moves, with a multiplicative denominator."""

    def conditional(self) -> Self:
        """Return the sampler as it draws rows of one factor given draws of the other one."""
        return self

    def resize(self, band: FactorBand, factor: int, size: Array, hyper: Any) -> None:
        """Multiply a band's columns, and change by it what it has beside them."""
        del factor, hyper
        band.values *= on_device_of(band.values, size.astype(band.values.dtype))

    def stir(self, band: FactorBand, address: Address, shape: float = 1.0) -> None:
        """Draw what a band carries besides values, where these are a draw; as after a cycle.

        ``shape`` is that of its gamma prior.
        """

    def log_prior(self, program: "Program", band: FactorBand, factor: int) -> float:
        """Return the log prior density of a band's entries that move."""
        mask, free = program.frozen[factor], band.values
        rate, shape = program.prior(band, factor)
        if mask is not None:
            free = free[:, named_columns(~mask)]
            if np.ndim(rate) and rate.shape[-1] == mask.size:
                rate = rate[..., named_columns(~mask)]
        return clipped_gamma_log_density(free, rate, shape)


# -- the algorithms that there are: the package's public names are the one list of them -----


@cache
def known(base: Any) -> dict[str, Any]:
    """Return the public algorithms of a kind by name; imports the folders that they stand in."""
    # Verbs, whose names are in small letters, need modules that take long to import.
    names = (name for name, home in _homes() if home in base.folders and name[0].isupper())
    values = (getattr(daskfactor, name) for name in names)
    kinds = (value for value in values if isinstance(value, type) and issubclass(value, base))
    return {kind.__name__: kind for kind in sorted(kinds, key=lambda kind: kind.__name__)}


@cache
def _homes() -> list[tuple[str, str]]:
    """Public names, each with the folder it is defined in."""
    stub = ast.parse(Path(daskfactor.__file__).with_suffix(".pyi").read_text())
    nodes = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module]
    folders = [(node, str(node.module).partition(".")[0]) for node in nodes]
    return [(alias.name, folder) for node, folder in folders for alias in node.names]


def judge(model: Any) -> Sampler:
    """Return the first sampler by name whose draws of this model are exact."""
    kinds: dict[str, type[Sampler]] = known(Sampler)
    suited = (kind().suited(model) for kind in kinds.values())
    return next(found for found in suited if found is not None and not found.biased)


def algorithm_from_dict(base: Any, values: dict[str, Any], made_by: str) -> Any:
    """Make the algorithm that ``to_dict`` described; ``made_by`` is "the run was made by a …"."""
    name = values.get("type")
    kind = getattr(daskfactor, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        advice = daskfactor.REMOVED.get(str(name)) or f"it knows {', '.join(known(base))}"
        raise StoreFormatError(
            f"{made_by} called {name!r}, which this version does not have; {advice}"
        )
    made: Any = kind
    return made.from_dict(values)


def chosen(base: Any, given: object, usual: str, argument: str) -> Any:
    """Return the algorithm given for an argument, or the usual one where there is none."""
    if given is None:
        given = getattr(daskfactor, usual)()
    if not isinstance(given, base):
        names = ", ".join(f"{name}()" for name in known(base))
        raise OptionError(f"{argument} must be one of {names}, got {given!r}")
    return given


def checked_sampler(model: FactorModel, sampler: object) -> Sampler:
    """Give the sampler as it samples a model; refuse what does not go together."""
    check_model(model)
    if not isinstance(sampler, Sampler):
        names = ", ".join(f"{name}()" for name in known(Sampler))
        raise OptionError(f'sampler must be "auto" or one of {names}, got {sampler!r}')
    given: Sampler = sampler
    found = given.suited(model)
    if found is None:
        right = [name for name, kind in known(Sampler).items() if kind().suited(model)]
        raise OptionError(
            f"{type(model).__name__} cannot be sampled by {given.name}: it takes "
            f"{' or '.join(f'{name}()' for name in right)}; leave sampler out for the right one"
        )
    found.check_model(model)
    return found


def visits_all(model: FactorModel, data: Any) -> bool:
    """Whether a pass over the data visits every cell, as in dense ones."""
    zeros = data.unstored == "zero"
    return not data.is_sparse or model.likelihood.visits_all(zeros)


def pass_size(model: FactorModel, data: Any) -> float:
    """Count entries that a pass visits, times components."""
    cells = data.shape[0] * data.shape[1] if visits_all(model, data) else data.n_stored.sum()
    return float(cells) * model.n_components


def told_each(model: FactorModel, data: Any) -> float:
    """Count observed cells for each number of the factors, by the information of their law.

    A dispersion of counts that is learnt is taken for 1, as in its prior.
    """
    information = data.total_observed * model.likelihood.information(data.mean)
    return float(information / (sum(data.shape) * model.n_components))


def asked_sampler(model: FactorModel, sampler: object) -> Sampler | None:
    """Check a sampler that was asked for; None: ``"auto"``, so that `best_sampler` chooses."""
    if sampler is None or (isinstance(sampler, str) and sampler == "auto"):
        check_model(model)
        return None
    return checked_sampler(model, sampler)


def best_sampler(model: FactorModel, data: BlockedData, device: bool = False) -> Sampler:
    """Choose the sampler that says of itself that it suits a model and data best.

    On a ``device`` it is one of those that run there.
    """
    takers = []
    for kind in known(Sampler).values():
        own: Sampler | None = kind().suited(model)
        with suppress(ModelError, DataError, OptionError):
            if own is not None:
                own.check_model(model)
                own = own.over(len(data.grid.sides))
                own.check_data(data)
                takers.append(own)
    # A model that has no place on a device is refused with a reason, whatever the sampler.
    takers = [own for own in takers if own.on_device or not device] or takers
    return max(takers, key=lambda own: own.worth(model, data))


def check_device(algorithm: Algorithm, model: FactorModel, unstored: str | None) -> None:
    """Refuse what does not run on a GPU.

    ``unstored`` says what cells are that sparse data do not store.

    Raises
    ------
    OptionError
        With what it is, and what does run there.
    """
    visited = unstored == "zero" and model.likelihood.visits_all(True)
    reasons = {
        f"{type(model).__name__} does not run on a GPU": model.tensor or model.joins,
        "models with covariates do not run on a GPU": model.covariates != (None, None),
        f"zeros that sparse data do not store do not run on a GPU under {model.likelihood}, whose "
        "terms have no closed form for them": visited,
        f"{algorithm.name} does not run on a GPU (PSGLD, PSGRRLD, SGHMC, SGLD, "
        "LangevinDynamics, BlockHMC and MultiplicativeUpdates do)": not algorithm.on_device,
    }
    for reason, holds in reasons.items():
        if holds:
            raise OptionError(f"{reason}; leave device out")


def _options(algorithm: Any) -> list[str]:
    return [field.name for field in fields(algorithm) if field.init]


def _plain(value: Any) -> Any:
    if type(value).__name__ in KINDS:
        return {"type": type(value).__name__, **vars(value)}
    return value.to_dict() if hasattr(value, "to_dict") else value


def _made(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    name = str(value.get("type"))
    refuse_unknown("the stored step or schedule", {name: value}, KINDS)
    refuse_unknown(f"the stored {name}", value, ("type", *_options(KINDS[name])))
    return KINDS[name](**{name: own for name, own in value.items() if name != "type"})
