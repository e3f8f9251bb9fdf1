"""Settings of models: checked one by one, kept as plain values or as arrays; frozen components."""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.checks import file_of, refuse_unknown
from daskfactor.errors import ModelError
from daskfactor.models.likelihood import Frozen, Likelihood

Array = NDArray[Any]
Pair = tuple[float, float]
Auto = Literal["auto"]
is_sparse: Callable[[Any], bool] = sparse.issparse
INITS = "multiplicative", "q_transform", "nndsvd", "nndsvdar", "random"
Mask = NDArray[np.bool_] | None
"""Mask of the frozen components of a factor, (K,); None: all are free."""


class Checked(Frozen):
    """A frozen dataclass whose fields hold what their ``metadata={"check": check}`` returns.

    Each check is called as ``check(name, value)``.
    """

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            if check := field.metadata.get("check"):
                # NumPy numbers become plain ones, so that two equal models compare equal and
                # can be written as JSON.
                self._put(**{field.name: check(field.name, getattr(self, field.name))})


@dataclass(frozen=True)
class StoredModel(Checked):
    """A frozen dataclass of settings that is written into results and read back.

    Attributes
    ----------
    evidence_data
        Kind of data that an evidence of the model takes: "matrix", "vector" or "counts"; None:
        the model has no evidence.
    default_evidence
        Name of the usual method to estimate it.
    """

    evidence_data: ClassVar[Literal["matrix", "vector", "counts"] | None] = None
    default_evidence: ClassVar[str] = "ThermodynamicIntegration"

    def changed(self, **settings: Any) -> Self:
        """Return the model with other settings."""
        return replace(self, **settings)

    def with_components(self, n_components: int) -> Self:
        """Return the model with another number of components."""
        return self.changed(n_components=n_components)

    def check_settled(self, purpose: str) -> None:
        """Refuse priors that are learnt with the factors; ``purpose`` begins the sentence.

        Raises
        ------
        ModelError
            If there are any.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return the model as JSON values, with its class under ``"type"``, without its arrays.

        Fields that do not count in comparisons are left out: they follow from the data.
        """
        settings = {one.name: getattr(self, one.name) for one in fields(self) if one.compare}
        described = {name: setting.described() for name, setting in self._stored_arrays().items()}
        return {"type": type(self).__name__} | settings | described

    def _stored_arrays(self) -> dict[str, "StoredArrays"]:
        """Return the settings that are arrays, by name."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: one for name, one in settings.items() if isinstance(one, StoredArrays)}

    def arrays(self) -> dict[str, Array]:
        """Return the arrays that a run's store keeps beside `to_dict`, by setting and part."""
        return {
            f"{name}/{part}": array
            for name, setting in self._stored_arrays().items()
            for part, array in setting.arrays().items()
        }

    def with_arrays(self, arrays: Mapping[str, Array]) -> Self:
        """Return the model of a stored run, made by `from_dict`, with these `arrays`."""
        settings = self._stored_arrays()
        return self.changed(**{name: settings[name].read(name, arrays) for name in settings})

    def with_frozen_of(self, W: Array, Ht: Array) -> Self:
        """Return the model of a stored run with the frozen components of its factors, (n, K)."""
        factors, settings = {"fixed_w": W, "fixed_h": Ht}, self._stored_arrays()
        return self.with_arrays(
            {
                f"{name}/values": factors[name][:, setting.described()].T.astype(np.float64)
                for name, setting in settings.items()
                if name in factors
            }
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild a model from `to_dict`, without its arrays.

        Raises
        ------
        ModelError
            If it is another model's, lacks a setting that has no default, or has keys
            that this version does not know.
        """
        settings = {field.name: field for field in fields(cls)}
        values = dict(values)
        kind = values.pop("type", None)
        if kind != cls.__name__:
            raise ModelError(f"expected a stored model of type {cls.__name__!r}, got {kind!r}")
        refuse_unknown("the stored model", values, settings, ModelError)
        for name, field in settings.items():
            if name not in values and field.default is MISSING and field.default_factory is MISSING:
                raise ModelError(f"the stored model lacks {name!r}")
            if "arrays" in field.metadata and values.get(name) is not None:
                values[name] = field.metadata["arrays"](tuple(values[name]))
        return cls(**values)


class StoredArrays(ABC):
    """A setting that is arrays: a few numbers of it go with the model, the arrays with its run.

    Subclasses are dataclasses with a tuple of these numbers as first field, and ``values``. A
    field of a model that may hold one has the class in its metadata, under ``"arrays"``.
    """

    values: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        first, second = self.arrays(), other.arrays()
        return (self.described(), first.keys()) == (other.described(), second.keys()) and all(
            np.array_equal(first[name], second[name]) for name in first
        )

    def __hash__(self) -> int:
        return hash(tuple(self.described()))

    @property
    @abstractmethod
    def length(self) -> int | None:
        """Number of rows (or columns) of the data that these belong to; None: any number."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of values of each row."""

    @abstractmethod
    def at(self, rows: Any) -> Self:
        """Return those of some rows, by position, mask or slice."""

    def described(self) -> list[int]:
        """Return the numbers that are stored with the model."""
        return list(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]

    def arrays(self) -> dict[str, Array]:
        """Return arrays by the names of their parts; none in the model of a stored run."""
        return {} if self.values is None else {"values": self.values}

    def read(self, name: str, arrays: Mapping[str, Array]) -> Self:
        """Return the setting of this name with its arrays from those of a run."""
        return replace(self, values=arrays.get(f"{name}/values"))  # type: ignore[type-var]


class Learnt(NamedTuple):
    """A hyperparameter that is drawn with the factors.

    ``dims`` is empty, or ``"component"``, ``"row"`` or ``"column"``: it is one number, or has
    one for each of these. ``averaged``: predictions go by its mean, which is kept even where
    draws are not. ``passes``: how many passes over the data a draw takes, about.
    """

    name: str
    dims: tuple[str, ...]
    doc: str
    averaged: bool = False
    passes: int = 0


class PriorDraw(NamedTuple):
    """Factors from a prior, and what the likelihood needs besides their product.

    Attributes
    ----------
    W, H
        (I, width) and (width, J), in double precision.
    dispersion
        Of an observation: a number, or one for each column, (J,).
    learnt
        Values of the hyperparameters of `FactorModel.learnt`, by name.
    """

    W: NDArray[np.float64]
    H: NDArray[np.float64]
    dispersion: Any
    learnt: Mapping[str, Any]


EFFECTIVE = Learnt("effective_components", (), "number of components that the data support")


class FactorModel(StoredModel, ABC):
    """A model of a matrix as a product of factors, with defaults for all that callers ask.

    Attributes
    ----------
    nonnegative
        Factors and means are not negative.
    joins
        Its data are several matrices, by name.
    tensor
        Its data are an array of three or more axes.
    has_observations
        The model has a law of new observations.
    default_optimizer
        Public name of the class that ``optimize`` takes where none is named.
    conditional_sampler
        Public name of the sampler whose steps draw rows of one factor given the other; None:
        there is none.
    inits
        Kinds of start that factors of this kind can have, the usual one first.
    has_scores
        The posterior is a function of the summed divergence and of the factors, so that
        `of_divergence`, `priors`, `with_numbers` and `for_optimizers` answer; particles can be
        weighed under it.
    simplex
        Columns of W add up to 1 by the model, so that no scale is free.
    rotates
        W and H may be turned together, by any rotation, without the posterior changing by much:
        single components mean nothing.
    from_data
        Settings that may be ``"auto"`` and are then chosen from the data; "threshold" where
        factorizations are good up to one of an objective.
    learnt
        Hyperparameters that are drawn with the factors.
    parameters
        Further subclasses of `daskfactor.inference.parameters.Parameter`, each by module and name
        within the package, such as "inference.temperature.Temperature".
    rates_of
        Groups of entries of W and of H that share a learnt rate: "component", "row", "column".
    fixed, frozen
        Frozen components of W and of H, and their masks, (K,); None: all are free.
    covariates
        Covariates of the rows and of the columns, or None.
    """

    nonnegative: ClassVar[bool] = True
    joins: ClassVar[bool] = False
    tensor: ClassVar[bool] = False
    has_observations: ClassVar[bool] = True
    default_optimizer: ClassVar[str] = "MultiplicativeUpdates"
    conditional_sampler: ClassVar[str | None] = None
    inits: ClassVar[tuple[str, ...]] = INITS
    has_scores: ClassVar[bool] = False
    simplex: ClassVar[bool] = False
    rotates: ClassVar[bool] = False
    from_data: ClassVar[tuple[str, ...]] = ()
    parameters: ClassVar[tuple[str, ...]] = ()
    learnt: Any = ()
    rates_of: Any = (None, None)
    n_components: int
    fixed: tuple[Any, Any] = (None, None)
    frozen: tuple[Any, Any] = (None, None)
    covariates: tuple[Any, Any] = (None, None)

    @property
    def parameter_classes(self) -> list[Any]:
        """The classes of `parameters`."""
        places = (place.rsplit(".", 1) for place in self.parameters)
        return [getattr(import_module(f"daskfactor.{module}"), kind) for module, kind in places]

    @property
    def extra_variables(self) -> tuple[Learnt, ...]:
        """The variables that these classes declare."""
        return tuple(one for kind in self.parameter_classes for one in kind.learnt)

    def draw_parameters(self, rng: np.random.Generator, hyper: Any, learnt: dict[str, Any]) -> Any:
        """Draw these variables from their priors into ``learnt``; return the hyperparameters."""
        values = hyper._asdict()
        for kind in self.parameter_classes:
            values |= kind.from_prior(rng, self, values)
        learnt |= {one.name: values[one.name] for one in self.extra_variables}
        return hyper._replace(**{name: values[name] for name in hyper._fields})

    def with_dispersion(self, dispersion: float) -> Self:
        """Return the model with this value of a dispersion that was estimated, not drawn."""
        drawn = "dispersion" in {one.name for one in self.learnt}
        estimated = getattr(self, "dispersion", None) == "auto" and not drawn
        return self.changed(dispersion=dispersion) if estimated else self

    def with_dispersion_of(self, attrs: Mapping[Any, Any]) -> Self:
        """Return the model with the dispersion in the attributes of its results."""
        return self.with_dispersion(float(attrs["dispersion"]))

    @property
    @abstractmethod
    def likelihood(self) -> Likelihood:
        """The law of an observation given its mean."""

    @property
    def width(self) -> int:
        """Columns of the factors: one for each component."""
        return self.n_components

    def free(self, factor: int) -> NDArray[np.bool_]:
        """Return the mask of the components of a factor that are not frozen, (K,)."""
        return free_components(self.frozen[min(factor, 1)], self.n_components)

    def component_names(self) -> tuple[str, ...] | None:
        """Return the names of the factors' columns; None for components by number."""
        return None

    def density_spread(self, shape: tuple[int, int]) -> float:
        """Bound the standard deviation that the log density of (I, J) data's posterior has."""
        return math.inf

    def draw_prior(
        self, rng: np.random.Generator, shape: tuple[int, int], mean: float, variance: float
    ) -> PriorDraw:
        """Draw what is learnt, and the factors of (I, J) data; ``rng`` is advanced.

        ``mean`` and ``variance`` stand for those of the data where priors go by these.

        Raises
        ------
        ModelError
            If something is chosen from the data that has no prior at all.
        """
        raise ModelError(f"{type(self).__name__} has no prior that could be drawn from")

    def check_values(self, minimum: float, maximum: float) -> None:
        """Refuse data that the law cannot have produced; missing ones are left out."""
        self.likelihood.check_values(minimum, maximum)

    def of_rows(self, rows: Any) -> Self:
        """Return the model with settings that are arrays at some rows of their factor."""
        settings = self._stored_arrays()
        return self.changed(**{name: setting.at(rows) for name, setting in settings.items()})

    def check_shape(self, shape: Sequence[int]) -> None:
        """Refuse data that frozen components or covariates do not belong to.

        Raises
        ------
        ModelError
            If the data have another number of rows or columns.
        """
        for name, setting in self._stored_arrays().items():
            side = int(name.endswith("h"))
            if setting.length not in (None, shape[side]):
                raise ModelError(
                    f"{name} must have one entry for each of the data's {shape[side]} "
                    f"{('rows', 'columns')[side]}, in their order, got {setting.length} for data "
                    f"of {shape[0]} x {shape[1]}"
                )

    def placed(self, places: Mapping[str, Any] | None) -> Any:
        """Return the model for several matrices, see `joins`.

        Raises
        ------
        ModelError
            If it is one of several and they are not, or the other way round.
        """
        if self.joins != (places is not None):
            raise ModelError(
                "several matrices go with a coupled model, and a coupled model with several: "
                'sample({"rna": V1, "adt": V2}, Coupled(10))'
            )
        return self

    def dispersion_attrs(self, dispersion: Any) -> dict[str, Any]:
        """Return dispersions by their names in results, in units of the data."""
        return {"dispersion": dispersion}

    def sized(self, shape: Sequence[int], labels: Sequence[Any] = (None, None)) -> Self:
        """Return the model with a number of components for data of this shape and labels."""
        return self

    def with_uncertainty(self) -> Self:
        """Return the model for data with standard deviations: an ``"auto"`` dispersion is 1.

        Raises
        ------
        ModelError
            If the likelihood is not normal.
        """
        if not self.likelihood.normal:
            raise ModelError(
                "uncertainty of cells takes the place of the dispersion of a normal law, and this "
                f"model has {self.likelihood}; take beta=2 or GaussianMF, or pass weights to "
                "as_blocks, which are factors of log-likelihoods"
            )
        return self.with_dispersion(1.0)

    def at(self, hyper: Any) -> tuple[Likelihood, Any]:
        """Give the law at these hyperparameters, and these with what divides its divergence."""
        return self.likelihood, hyper

    def hyper_of_draw(self, values: Mapping[str, Any], mean: float) -> Any:
        """Give the hyperparameters of a draw from its values in results, by name.

        ``mean`` is that of the data that the model was fitted to.

        Raises
        ------
        ModelError
            If rows of one factor cannot be drawn given the other.
        """
        raise ModelError(
            f"{type(self).__name__} has no law of a new row; pass a trace of a TweedieNMF, a "
            "NegativeBinomialNMF or a GaussianMF"
        )

    def prior_means(self, factor: int, hyper: Any) -> float | Array:
        """Give prior means of the entries of W (``factor`` 0) or H (1), without covariates."""
        return 0.0

    def with_constants(self, side: str, factor: Array, mean: float) -> Array:
        """Return the factor (n, width) of ``"rows"`` or ``"columns"`` of data with this mean.

        Columns that are constants of the data are as they are there.
        """
        return factor


def checked_count(name: str, value: Any, words: Sequence[str] = ()) -> Any:
    """Check a whole number of at least 1, or one of some words."""
    if isinstance(value, str) and value in words:
        return value
    try:
        count = 0 if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        kind = "a whole number of at least 1" + "".join(f' or "{word}"' for word in words)
        raise ModelError(f"{name} must be {kind}, got {value!r}")
    return count


def as_number(value: Any) -> float:
    """Return a plain float; NaN if the value is no number."""
    try:
        return math.nan if isinstance(value, (bool, np.bool_)) else float(value)
    except (TypeError, ValueError):
        return math.nan


def checked_positive(name: str, value: Any, words: Sequence[str] = (), advice: str = "") -> Any:
    """Check a positive, finite number, or one of some words."""
    if isinstance(value, str) and value in words:
        return value
    number = math.nan if isinstance(value, str) else as_number(value)
    if not 0.0 < number < math.inf:
        kind = "a positive, finite number" + "".join(f' or "{word}"' for word in words)
        advice = advice or f'leave {name}="auto" to have it chosen from the data'
        raise ModelError(f"{name} must be {kind}, got {value!r}; {advice}")
    return number


def positive(*words: str, advice: str = "") -> dict[str, Callable[[str, Any], Any]]:
    """Make the metadata of a field that is a positive, finite number, or one of some words."""
    return {"check": partial(checked_positive, words=words, advice=advice)}


COUNT, COUNT_OR_AUTO = {"check": checked_count}, {"check": partial(checked_count, words=("auto",))}
POSITIVE_OR_AUTO = positive("auto")


@dataclass(frozen=True, eq=False)
class FixedComponents(StoredArrays):
    """The frozen components of one factor.

    Attributes
    ----------
    frozen
        Their numbers, ascending.
    values
        Their values, (len(frozen), length), read-only; None for the model of a stored
        run whose arrays have not been read.
    """

    frozen: tuple[int, ...]
    values: NDArray[np.float64] | None = None

    def __repr__(self) -> str:
        length = "?" if self.length is None else self.length
        return f"FixedComponents({list(self.frozen)}, length={length})"

    @property
    def length(self) -> int | None:
        return None if self.values is None else self.values.shape[1]

    @property
    def width(self) -> int:
        return len(self.frozen)

    def mask(self, n_components: int) -> NDArray[np.bool_]:
        """Return the mask of the frozen ones among K components."""
        return np.isin(np.arange(n_components), self.frozen)

    def at(self, rows: Any) -> Self:
        return self if self.values is None else replace(self, values=self.values[:, rows])

    def put(self, factor: Array, rows: slice | NDArray[np.int64]) -> None:
        """Write the values of some of the caller's rows into a part (rows, K) of the factor."""
        if self.values is None:
            raise ModelError(
                "the values of the frozen components are not stored with the model, but with "
                "the state of its run; pass them again as fixed_w or fixed_h"
            )
        factor[:, list(self.frozen)] = self.values[:, rows].T


def checked_fixed(name: str, value: Any, n_components: int) -> FixedComponents | None:
    """Check frozen components: an array (I, F) for W, (F, J) for H.

    A component of NaN alone is free.

    Raises
    ------
    ModelError
        If it cannot be a part of a factor with K components.
    """
    if value is None:
        return None
    layout = "(rows, F)" if name == "fixed_w" else "(F, columns)"
    if isinstance(value, FixedComponents):
        components = np.zeros((1 + max(value.frozen), 0))
    else:
        table = as_table(name, value, layout)
        components = table.T if name == "fixed_w" else table
    if len(components) > n_components:
        raise ModelError(
            f"{name} has {len(components)} components {layout}, the model {n_components}; pass at "
            "most that many, or a larger n_components"
        )
    if isinstance(value, FixedComponents):
        return value
    missing = np.isnan(components)
    free = missing.all(axis=1)
    for number in np.flatnonzero(missing.any(axis=1) & ~free):
        raise ModelError(
            f"component {number} of {name} has {missing[number].sum()} NaN among its "
            f"{components.shape[1]} entries; a component is given whole, or is all NaN and free"
        )
    if free.all():
        raise ModelError(f"{name} is all NaN, so it freezes nothing; leave it out")
    values = np.ascontiguousarray(components[~free])
    for bad in values[~(np.isfinite(values) & (values >= 0))]:
        raise ModelError(f"{name} must hold finite values of at least 0, got {bad:g}")
    values.setflags(write=False)
    return FixedComponents(tuple(np.flatnonzero(~free).tolist()), values)


def as_table(name: str, value: Any, layout: str, compressed: bool = False) -> Any:
    """Return a table of real numbers in double precision, dense or in compressed rows.

    What is masked is NaN.

    Raises
    ------
    ModelError
        If it is none.
    """
    values: Any
    try:
        values = sparse.csr_array(value) if is_sparse(value) else np.ma.asanyarray(value)
    except (RuntimeError, TypeError, ValueError):  # of uneven lists, or an array of `sparse`
        values = np.ma.empty(0, dtype=object)
    problem = None
    if (file := file_of(value)) is not None:
        problem = f"{file}; pass its numbers as a table or an array, such as a .npy file"
    elif values.dtype.kind not in "biuf":
        problem = f"{type(value).__name__} of dtype {getattr(value, 'dtype', 'object')}"
        if compressed:
            problem += "; encode categories as columns of 0 and 1, pass sparse ones as scipy arrays"
    elif values.ndim != 2 or 0 in values.shape:
        problem = f"shape {values.shape}"
    if problem:
        raise ModelError(
            f"{name} must be an array of real numbers in two dimensions, {layout}, got {problem}"
        )
    values = values.astype(np.float64)
    if not is_sparse(values):
        return np.array(values.filled(np.nan), order="C")
    values.sum_duplicates()
    return values if compressed else values.toarray()


def free_components(frozen: Mask, count: int) -> NDArray[np.bool_]:
    """Return the mask of those of so many components that are not frozen."""
    return np.ones(count, bool) if frozen is None else ~frozen


def named_columns(mask: NDArray[np.bool_]) -> list[int]:
    """List the columns of a mask: arrays on a GPU are indexed by a list, too."""
    columns: list[int] = np.flatnonzero(mask).tolist()
    return columns


@contextmanager
def preserve_columns(values: Array, frozen: Mask) -> Iterator[None]:
    """Put the frozen columns of a band back after what is done inside."""
    if frozen is None:
        yield
        return
    columns = named_columns(frozen)
    before = values[:, columns]
    yield
    values[:, columns] = before
