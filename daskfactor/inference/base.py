"""Samplers as users choose them: options, checks, and the choice of the best one."""

from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

from daskfactor.checks import refuse_unknown, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import SCHEDULES
from daskfactor.errors import DataError, ModelError, OptionError
from daskfactor.inference.program import Kernel
from daskfactor.inference.registry import algorithms, calls
from daskfactor.inference.steps import ConstantStep, PolynomialStep
from daskfactor.models import check_model
from daskfactor.models.settings import FactorModel

Data = BlockedData | None
"""Data, if there are any yet."""
KINDS: dict[str, Any] = {
    "ConstantStep": ConstantStep,
    "PolynomialStep": PolynomialStep,
    **SCHEDULES,
}
"""Values of options that are stored under the name of their class."""


def check_schedule(schedule: object) -> None:
    """Refuse what is no order of the parts."""
    if type(schedule).__name__ not in SCHEDULES:
        names = ", ".join(f"{name}()" for name in SCHEDULES)
        raise OptionError(f"schedule must be one of {names}, got {schedule!r}")


@dataclass(frozen=True)
class Track:
    """One of the chains that a sampler runs side by side from the same start.

    ``stride`` is the number of cycles of the finest track that one cycle of this track stands for.
    """

    name: str
    group: str
    stride: int


class Algorithm:
    """A choice of algorithm with its options; immutable, and stored with the results.

    A subclass is a frozen dataclass; `daskfactor.inference.registry` lists it. ``on_device`` tells
    whether it runs on a GPU.
    """

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
        return cls(**{name: _made(value) for name, value in values.items() if name != "type"})


class Sampler(Algorithm, ABC):
    """The options of a way to draw from a posterior; `kernel` returns what runs.

    Attributes
    ----------
    tracks
        Chains that run side by side from one start; more than one are extrapolated.
    biased
        Whether draws of the group ``posterior`` are off by an amount that shrinks with the step.
    dispersion
        The only dispersion that it samples of non-negative models, and no powers of their
        likelihood; None: any.
    reason
        Why ``sampler="auto"`` chooses it, in a few words.
    """

    tracks: ClassVar[tuple[Track, ...]] = (Track("chain", "posterior", 1),)
    biased: ClassVar[bool] = True
    dispersion: ClassVar[float | None] = None
    reason: ClassVar[str] = ""
    warm_start: int | Literal["auto"] = 0
    _real_valued: ClassVar[bool] = False  # whether it samples models of real numbers, too

    def __post_init__(self) -> None:
        if self.warm_start != "auto":
            whole_number("warm_start", self.warm_start, 0)

    @abstractmethod
    def kernel(self, model: Any, data: Data = None, on_device: bool = False) -> Kernel:
        """Return what runs on a model and data, with all that options left open.

        Without data only the model is checked, and the kernel is one of a matrix in one block.

        Raises
        ------
        OptionError, ModelError, DataError
            If the sampler is not right for the model, the data or a GPU.
        """

    def efficiency(self, model: Any, data: BlockedData) -> float:
        """Return how well it suits a model and data that it takes; 0: never chosen for a user.

        About as many times as draws of `PSGLD` a second of its draws are worth, as
        ``python -m benchmarks --long --only accuracy.laws`` measures it; more if they are exact
        and soon there.
        """
        return 0.0

    def _check(self, model: Any, data: Data, on_device: bool, tensors: bool = True) -> None:
        """Refuse kinds of models and data; ``tensors``: whether it moves more than two factors."""
        if not (model.nonnegative or self._real_valued):
            kinds = algorithms(Sampler).items()
            names = [name for name, kind in kinds if kind._real_valued]
            raise OptionError(
                f"{type(model).__name__} cannot be sampled by {self.name}: it takes "
                f"{' or '.join(f'{name}()' for name in names)}; leave sampler out for the right one"
            )
        if len(self.tracks) > 1:
            model.check_settled(self.name)
        if data is not None and len(data.grid.sides) > 2 and not tensors:
            raise OptionError(
                f"{self.name} samples matrices, and these data have {len(data.grid.sides)} axes; "
                "take PSGLD(), SGHMC(), BlockHMC() or LangevinDynamics(), or leave sampler out"
            )
        if on_device:
            check_device(self, model, None if data is None else data.unstored)


def count_parts(data: Data) -> int:
    """Return the number of parts of the data, 1 where there are no data yet."""
    return 1 if data is None else data.grid.parts


def longest_stride(sampler: Sampler) -> int:
    """Return the number of fine cycles for each cycle of the coarsest track."""
    return max(track.stride for track in sampler.tracks)


def reference_sampler(model: Any) -> Sampler:
    """Return the first sampler by name whose draws of this model are exact."""
    kinds = algorithms(Sampler).values()
    exact: Sampler = next(
        kind() for kind in kinds if not kind.biased and (model.nonnegative or kind._real_valued)
    )
    return exact


def checked_sampler(model: FactorModel, sampler: object) -> Sampler:
    """Return a sampler; refuse what does not go together with a model."""
    check_model(model)
    if not isinstance(sampler, Sampler):
        raise OptionError(f'sampler must be "auto" or one of {calls(Sampler)}, got {sampler!r}')
    sampler.kernel(model)
    return sampler


def requested_sampler(model: FactorModel, sampler: object) -> Sampler | None:
    """Return a sampler that a user passed, checked; None for ``"auto"``: see `choose_kernel`."""
    if sampler is None or (isinstance(sampler, str) and sampler == "auto"):
        check_model(model)
        return None
    return checked_sampler(model, sampler)


def choose_kernel(
    sampler: Sampler | None, model: FactorModel, data: BlockedData, on_device: bool = False
) -> Kernel:
    """Return the kernel of a sampler, or of the most efficient one where that is None."""
    if sampler is not None:
        return sampler.kernel(model, data, on_device)
    kernels: list[Kernel] = []
    for kind in algorithms(Sampler).values():
        with suppress(ModelError, DataError, OptionError):
            kernels.append(kind().kernel(model, data, on_device))
    if on_device and not kernels:  # the model has no place there, whatever the sampler
        usual: Sampler = choose_kernel(None, model, data).options
        return usual.kernel(model, data, on_device)
    return max(kernels, key=lambda kernel: kernel.options.efficiency(model, data))


def is_dense_pass(model: FactorModel, data: Any) -> bool:
    """Return whether a pass over the data visits every cell, as in dense ones."""
    zeros = data.unstored == "zero"
    return not data.is_sparse or model.likelihood.visits_all(zeros)


def pass_size(model: FactorModel, data: Any) -> float:
    """Count entries that a pass visits, times components."""
    cells = data.shape[0] * data.shape[1] if is_dense_pass(model, data) else data.n_stored.sum()
    return float(cells) * model.n_components


def observations_per_parameter(model: FactorModel, data: Any) -> float:
    """Return the number of observations per factor entry; for counts, events per factor entry.

    A dispersion of counts that is learnt is taken for 1, as in its prior.
    """
    information = data.total_observed * model.likelihood.information(data.mean)
    return float(information / (sum(data.shape) * model.n_components))


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
    return [option.name for option in fields(algorithm) if option.init]


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
    return KINDS[name](**{key: option for key, option in value.items() if key != "type"})
