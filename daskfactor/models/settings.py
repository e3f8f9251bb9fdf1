"""Settings of models: checked one by one, and kept as plain JSON values."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import ModelError
from daskfactor.models.likelihood import Likelihood

Auto = Literal["auto"]


@dataclass(frozen=True)
class StoredModel:
    """A frozen dataclass of settings that is written into results and read back.

    Attributes
    ----------
    evidence_data
        What an evidence of the model is of: a "matrix", a "vector" or "counts"; None: no
        evidence is known of it.
    default_evidence
        Name of the method that gives it if nobody asks for another.
    """

    n_components: int
    evidence_data: ClassVar[Literal["matrix", "vector", "counts"] | None] = None
    default_evidence: ClassVar[str] = "ThermodynamicIntegration"

    def with_components(self, n_components: int) -> Self:
        """The same model with another number of components."""
        return replace(self, n_components=n_components)

    def to_dict(self) -> dict[str, Any]:
        """The model as plain JSON values, with its class under ``"type"``."""
        return {"type": type(self).__name__} | {
            field.name: getattr(self, field.name) for field in fields(self) if field.init
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild a model from `to_dict`.

        Raises
        ------
        ModelError
            If it is another model's, lacks ``n_components``, or has keys that this
            version does not know.
        """
        known = {field.name for field in fields(cls) if field.init}
        given = dict(values)
        kind = given.pop("type", None)
        if kind != cls.__name__:
            raise ModelError(f"expected a stored model of type {cls.__name__!r}, got {kind!r}")
        if unknown := sorted(given.keys() - known):
            raise ModelError(
                f"the stored model has unknown settings {unknown}; {cls.__name__} knows "
                f"{sorted(known)}. It may be of a newer version: upgrade and try again"
            )
        if "n_components" not in given:
            raise ModelError("the stored model lacks 'n_components'")
        return cls(given.pop("n_components"), **given)


class OfDivergence(NamedTuple):
    """A log-likelihood ℓ as a function of the summed divergence d: ℓ(d), ℓ'(d), ℓ''(d), (M,)."""

    value: NDArray[np.float64]
    slope: NDArray[np.float64]
    bend: NDArray[np.float64]


class FactorModel(StoredModel, ABC):
    """A model of a matrix as a product of factors, and what is asked of every such model.

    Attributes
    ----------
    nonnegative
        Factors and means are not negative.
    has_observations
        The model has a law of new observations.
    default_sampler, default_optimizer
        Public names of the classes that ``sample`` and ``optimize`` take where none is named.
    has_scores
        The posterior is a function of the summed divergence and of the factors, so that
        `of_divergence`, `priors`, `with_numbers` and `for_optimizers` answer; particles can be
        weighed under it.
    simplex
        Columns of W add up to 1 by the model, so that no scale is free.
    has_threshold
        Factorizations are good up to a threshold of an objective.
    from_data
        Settings that may be ``"auto"`` and are then chosen from the data.
    fixed, frozen
        Frozen components of W and of H, and which they are, (K,); None: none.
    """

    nonnegative: ClassVar[bool] = True
    has_observations: ClassVar[bool] = True
    default_sampler: ClassVar[str] = "PSGLD"
    default_optimizer: ClassVar[str] = "MultiplicativeUpdates"
    has_scores: ClassVar[bool] = False
    simplex: ClassVar[bool] = False
    has_threshold: ClassVar[bool] = False
    from_data: ClassVar[tuple[str, ...]] = ()
    fixed: tuple[Any, Any] = (None, None)
    frozen: tuple[Any, Any] = (None, None)

    @property
    @abstractmethod
    def likelihood(self) -> Likelihood:
        """The law of an observation given its mean."""

    @property
    def width(self) -> int:
        """Columns of the factors: one for each component."""
        return self.n_components

    def component_names(self) -> tuple[str, ...] | None:
        """Names of the factors' columns; None: they are the components, by number."""
        return None

    def check_values(self, minimum: float, maximum: float) -> None:
        """Refuse data that the law cannot have produced; missing ones are left out."""
        self.likelihood.check_values(minimum, maximum)

    def check_shape(self, shape: Sequence[int]) -> None:
        """Refuse data whose rows or columns the model does not fit."""

    def fixed_arrays(self) -> dict[str, NDArray[Any]]:
        """Values of frozen components by setting, for a run that has no state yet."""
        return {}

    def with_fixed_values(self, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """The model of a stored run that has no state yet, its frozen components' values known."""
        del arrays
        return self

    def for_compilation(self) -> Self:
        """The same with two components and nothing to choose: what kernels are compiled with."""
        return replace(self, n_components=2)


def checked_count(value: Any) -> int:
    """A number of components, as a plain int."""
    try:
        count = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < 1:
        raise ModelError(
            f"n_components must be a whole number of at least 1, got {value!r}; "
            "it is the number of components of the factorization"
        )
    return count


def checked_positive(name: str, value: Any) -> float | Auto:
    """A positive number, or ``"auto"``."""
    if isinstance(value, str):
        if value == "auto":
            return "auto"
        raise ModelError(f'{name} must be a positive number or "auto", got {value!r}')
    return checked_number(name, value)


def checked_shape(name: str, value: Any) -> float:
    """The shape of a gamma prior, as a plain float."""
    try:
        number = float("nan") if isinstance(value, (bool, np.bool_)) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0.0 < number < np.inf:
        raise ModelError(
            f"{name} must be a positive, finite number, got {value!r}; "
            "leave it at 1 for an exponential prior"
        )
    return number


def checked_number(name: str, value: Any) -> float:
    """A positive, finite number, as a plain float."""
    try:
        number = float("nan") if isinstance(value, (bool, np.bool_)) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0.0 < number < np.inf:
        raise ModelError(
            f"{name} must be a positive, finite number, got {value!r}; "
            f'leave {name}="auto" to have it chosen from the data'
        )
    return number
