"""Several matrices that share factors, each with a law of its own.

With factors F, one for each set of rows (cells, genes, users, items), and relations r between two
of them,

    v_ij ~ law_r(mu_ij, phi_r),   mu = u_r F_a F_b^T,   F_ik ~ Gamma(a, lambda)

where u_r is the mean of the relation's data, so that every factor is on one scale.

Source: Şimşekli et al. 2015, section 6 (coupled factorizations); Yılmaz, Cemgil and Şimşekli 2011.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from daskfactor.checks import refuse_unknown
from daskfactor.errors import ModelError
from daskfactor.models.gamma_factors import GammaFactors, Hyperparameters
from daskfactor.models.likelihood import Array, Entry, Likelihood
from daskfactor.models.negative_binomial import DENSITIES, NegativeBinomialNMF
from daskfactor.models.settings import POSITIVE_OR_AUTO, Auto, Learnt, PriorDraw, checked_number
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.models.tweedie_law import Tweedie

BETAS = {"poisson": 1.0, "normal": 2.0, "gaussian": 2.0, "gamma": 0.0}
NEGATIVE_BINOMIAL = "negative binomial"


def _law_setting(name: str, value: Any) -> Any:
    """A power beta, the name of a law, or ``"auto"``."""
    if isinstance(value, str):
        if value in (*BETAS, NEGATIVE_BINOMIAL, "auto"):
            return value
        known = ", ".join(f'"{own}"' for own in ("auto", *BETAS, NEGATIVE_BINOMIAL))
        raise ModelError(f"{name} must be one of {known}, or a power beta, got {value!r}")
    return TweedieNMF(1, beta=value).beta  # refuses what is no power of a law


@dataclass(frozen=True)
class Relation:
    """A matrix among several that share factors: between which, and under which law.

    Parameters
    ----------
    rows, columns
        Names of the factors that its rows and columns belong to. Left out, they are the names of
        its dimensions if it has any (xarray); else rows are shared with all others that
        do not name them, and columns are its own.
    law
        ``"poisson"``, ``"normal"``, ``"gamma"``, ``"negative binomial"``, or a power beta as
        :class:`TweedieNMF` has it. ``"auto"``: Poisson for whole numbers, else normal.
    dispersion
        As :class:`TweedieNMF` (:class:`NegativeBinomialNMF`) has it; ``"auto"`` estimates it.
    weight
        What its log-likelihood counts beside those of others.

    Raises
    ------
    ModelError
        If one of them is not allowed.

    Examples
    --------
    >>> import daskfactor as dfac
    >>> dfac.Relation("users", "items", law="poisson").law
    'poisson'
    >>> dfac.Relation("items", "features", weight=0.5).weight
    0.5
    """

    rows: str | None = None
    columns: str | None = None
    _: KW_ONLY
    law: str | float = field(default="auto", metadata={"check": _law_setting})
    dispersion: float | Auto = field(default="auto", metadata=POSITIVE_OR_AUTO)
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name, check in (
            ("law", _law_setting),
            ("dispersion", POSITIVE_OR_AUTO["check"]),
            ("weight", lambda name, value: checked_number(name, value, "leave it out for 1")),
        ):
            object.__setattr__(self, name, check(name, getattr(self, name)))
        for name in ("rows", "columns"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ModelError(f"{name} of a relation is the name of a factor, got {value!r}")

    def model(self, n_components: int, shape: float = 1.0, **rates: float) -> GammaFactors:
        """Give the model of this matrix alone."""
        given: dict[str, Any] = {"dispersion": self.dispersion, "shape_w": shape, "shape_h": shape}
        if self.law == NEGATIVE_BINOMIAL:
            return NegativeBinomialNMF(n_components, **given, **rates)
        beta = BETAS.get(str(self.law), self.law)
        return TweedieNMF(n_components, beta=beta, **given, **rates)  # type: ignore[arg-type]

    def alone(self, n_components: int, dispersion: float, **numbers: float) -> GammaFactors:
        """Give the model of this matrix alone, at what a run of several has come to."""
        shapes = {name: own for name, own in numbers.items() if name.startswith("shape")}
        rates = {name: own for name, own in numbers.items() if name.startswith("rate")}
        made = replace(self, dispersion=dispersion).model(n_components, **rates)
        return replace(made, **shapes)  # type: ignore[arg-type]

    def settled(self, is_integer: bool, minimum: float) -> "Relation":
        """Choose a law for data, if that is to be done."""
        if self.law != "auto":
            return self
        return replace(self, law="poisson" if is_integer and minimum >= 0 else "normal")


@dataclass(frozen=True)
class JointLaw(Likelihood):
    """The laws of several matrices in units u of their means, block by block.

    In these units a Tweedie law has the dispersion φ / u^β, and a negative binomial one α u, and
    its log-likelihood counts u times: the law's ``gain``.

    Attributes
    ----------
    laws, weights, gains, counts_of
        Of every relation: its law, its weight and gain, and its observed entries.
    owner
        The number of the relation that each block belongs to, -1 for none.
    dispersions
        Of every relation, in its unit.
    """

    laws: tuple[Likelihood, ...]
    weights: tuple[float, ...]
    gains: tuple[float, ...] = ()
    observed: tuple[int, ...] = ()
    owner: tuple[tuple[int, ...], ...] = ()
    dispersions: tuple[float, ...] = field(default=(), compare=False)

    has_density: ClassVar[bool] = True  # type: ignore[misc]

    def __str__(self) -> str:
        return f"several laws ({', '.join(map(str, self.laws))})"

    @property
    def counts(self) -> bool:  # type: ignore[override]
        return all(law.counts for law in self.laws)

    @property
    def closed_form(self) -> bool:  # type: ignore[override]
        return all(law.closed_form for law in self.laws)

    @property
    def majorizer(self) -> tuple[float, float]:  # type: ignore[override]
        return min(self.laws, key=lambda law: law.exponent).majorizer

    @property
    def exponent(self) -> float:
        return min(law.exponent for law in self.laws)

    @property
    def steepest_power(self) -> float:
        return max(law.steepest_power for law in self.laws)

    def visits_all(self, zeros: bool) -> bool:
        return any(law.visits_all(zeros) for law in self.laws)

    def at(self, dispersion: Any) -> tuple["JointLaw", float]:
        """Give the laws at dispersions, one each, or one for all."""
        given = np.broadcast_to(np.asarray(dispersion, np.float64), len(self.laws))
        return replace(self, dispersions=tuple(given.tolist())), 1.0

    @cached_property
    def parts(self) -> tuple[Likelihood, ...]:
        """The laws at their dispersions, with their shares."""
        found = []
        gains = self.gains or (1.0,) * len(self.laws)
        dispersions = self.dispersions or (1.0,) * len(self.laws)
        for law, phi, weight, gain in zip(self.laws, dispersions, self.weights, gains, strict=True):
            own, divisor = law.at(phi)
            found.append(own.shared(weight * gain / max(divisor, np.finfo(np.float64).tiny)))
        return tuple(found)

    def of(self, block: tuple[int, ...]) -> Likelihood:
        number = self.owner[block[0]][block[1]]
        return self.parts[max(number, 0)]  # in a block of no relation there is nothing

    def sums(self, block: tuple[int, ...], found: Array) -> Array:
        number = self.owner[block[0]][block[1]]
        out = np.zeros(1 + len(self.laws))
        if number >= 0:
            out[0], out[1 + number] = self.parts[number].share * found[0], found[1]
        return out

    def variance(self, mu: ArrayLike, dispersion: Any) -> Array:
        """Variance of an observation that says as much as one of all data does on average."""
        given = np.broadcast_to(np.asarray(dispersion, np.float64), len(self.laws)).tolist()
        each = zip(self.laws, given, self.observed, strict=True)
        told = sum(number / law.variance(mu, phi) for law, phi, number in each)
        return np.asarray(sum(self.observed) / told)

    def unit(self, mean: float) -> float:
        return 1.0

    def floor(self, typical: float) -> float:
        return min(law.floor(typical) for law in self.laws)

    def _refuse(self) -> ModelError:
        return ModelError(
            f"{self} are one for each matrix; take one of the run's matrices with view(run, name)"
        )

    def entry(self, arithmetic: Any) -> Entry:
        raise self._refuse()

    def deviance(self, v: ArrayLike, mu: ArrayLike) -> Array:
        raise self._refuse()

    def log_normalizer(self, v: ArrayLike, dispersion: Any) -> Array:
        raise self._refuse()

    def sample(self, rng: np.random.Generator, mu: ArrayLike, dispersion: float) -> Array:
        raise self._refuse()

    def observation_variance(
        self, mean: ArrayLike, variance_of_mean: ArrayLike, dispersion: float
    ) -> Array:
        raise self._refuse()

    def interval(
        self, mean: ArrayLike, variance_of_mean: ArrayLike, dispersion: float, level: float = 0.9
    ) -> tuple[Array, Array]:
        raise self._refuse()


@dataclass(frozen=True)
class Coupled(GammaFactors):
    r"""Several matrices that share factors: coupled non-negative factorization.

    .. math:: v^r_{ij} \sim \mathrm{law}_r(\mu^r_{ij}, \phi_r), \quad
        \mu^r = u_r F_{a(r)} F_{b(r)}^\top, \quad F_{ik} \sim \mathrm{Gamma}(a, \lambda)

    Views of the same rows (cells x genes and cells x proteins), or a chain of relations (users x
    items and items x features), sampled as one: what one matrix says of a shared factor, the
    others know. Matrices are passed by name, ``sample({"rna": V1, "adt": V2}, Coupled(10))``,
    as an xarray.Dataset or a MuData; rows that share a factor are matched by their labels, and
    may be missing from some of them. :func:`view` gives one of the matrices back from a run.

    Parameters
    ----------
    n_components
        Number of components K, which all factors have; ``"auto"`` as for :class:`TweedieNMF`.
    relations
        A :class:`Relation` for each matrix, by name; left out, each has one of its own.
    shape_w, shape_h
        Shapes of the priors of factors on either side of the joint matrix; see
        :class:`TweedieNMF`.
    rate_w, rate_h
        Rates of these priors: ``"auto"``, ``"component"`` or a number.
    dispersion
        Stays ``"auto"``: that of a matrix is its :class:`Relation`'s.
    fixed_w, fixed_h, covariates_w, covariates_h, link_precision_w, link_precision_h
        Are refused: a coupled model takes neither covariates nor frozen components yet.

    Notes
    -----
    Factors are put on two sides, so that every matrix has one on each: three factors with a
    matrix between any two are refused. Data are divided by their means :math:`u_r`.

    References
    ----------
    Şimşekli et al. 2015, section 6.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> rng = np.random.default_rng(0)
    >>> V = {"rna": rng.poisson(3.0, (20, 15)), "adt": rng.normal(3.0, 1.0, (20, 6))}
    >>> laws = {"rna": dfac.Relation(law="poisson"), "adt": dfac.Relation(law="normal")}
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.Coupled(2, relations=laws), **run)
    >>> dfac.view(trace, "adt")["posterior"]["H"].shape
    (1, 20, 2, 6)
    """

    joins: ClassVar[bool] = True
    has_scores: ClassVar[bool] = False
    conditional_sampler: ClassVar[str | None] = None
    evidence_data = None  # type: ignore[assignment]

    _: KW_ONLY
    relations: Mapping[str, Relation] | None = None
    places: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.relations is not None:
            self._put({"relations": _checked_relations(self.relations)})
        if self.dispersion != "auto":
            raise ModelError(
                "the dispersion of a matrix is that of its Relation; leave it out here"
            )
        for name, words in (("rate_w", ("row",)), ("rate_h", ("column",))):
            if getattr(self, name) in words:
                raise ModelError(f'{name} of a coupled model is "auto", "component" or a number')
        if self.covariates != (None, None) or self.fixed != (None, None):
            raise ModelError("a coupled model takes neither covariates nor frozen components yet")

    @property
    def likelihood(self) -> JointLaw:
        """The laws of all matrices, in units of their means."""
        relations = list((self.relations or {}).values())
        laws = [_law(own) for own in relations] or [Tweedie(1.0)]
        weights = tuple(own.weight for own in relations) or (1.0,)
        if self.places is None:
            return JointLaw(tuple(laws), weights)
        given = self.places["relations"]
        units = [own["unit"] for own in given]
        gains = [
            unit if own.law == NEGATIVE_BINOMIAL else 1.0
            for unit, own in zip(units, relations, strict=True)
        ]
        observed = tuple(own["n_observed"] for own in given)
        owner = tuple(map(tuple, self.places["owner"]))
        return JointLaw(tuple(laws), weights, tuple(gains), observed, owner)

    @property
    def learnt(self) -> tuple[Learnt, ...]:
        """What is drawn with the factors: of priors, and dispersions of overdispersed counts."""
        drawn = [
            Learnt(f"dispersion_{name}", (), f"alpha of the counts of {name}", passes=DENSITIES)
            for name, own in (self.relations or {}).items()
            if own.law == NEGATIVE_BINOMIAL and own.dispersion == "auto"
        ]
        return *super().learnt, *drawn

    def check_settled(self, purpose: str) -> None:
        """Refuse priors that are learnt; a point estimate tells a dispersion of each matrix."""
        told = {
            name: replace(own, dispersion=1.0) if own.law == NEGATIVE_BINOMIAL else own
            for name, own in (self.relations or {}).items()
        }
        super(Coupled, replace(self, relations=told or None)).check_settled(purpose)

    def _of_one(self, relation: Relation) -> Any:
        """Give the model of one matrix."""
        priors = {n: getattr(self, n) for n in ("rate_w", "rate_h", "shape_w", "shape_h")}
        return replace(relation.model(self.n_components), **priors)

    def placed(self, places: Mapping[str, Any] | None) -> Any:
        """Give the model of matrices in their places, with a law for each; of one, its own."""
        if places is None:
            return super().placed(places)
        known, found = self.relations or {}, {}
        for own in places["relations"]:
            relation = known.get(own["name"]) or Relation()
            found[own["name"]] = relation.settled(own["is_integer"], own["minimum"])
        if len(found) == 1:
            (relation,) = found.values()
            return self._of_one(relation)
        return replace(self, relations=found, places=places)

    def in_unit(self, name: str, dispersion: float, to: bool = True) -> float:
        """Give a relation's dispersion in its unit, or, if not ``to``, in that of the data."""
        assert self.places is not None
        (unit,) = (own["unit"] for own in self.places["relations"] if own["name"] == name)
        law = _law(self.relation(name))
        factor = unit**-law.beta if isinstance(law, Tweedie) else unit
        return float(dispersion * factor if to else dispersion / factor)

    def dispersion_attrs(self, dispersion: Any) -> dict[str, Any]:
        """Give dispersions, one for each matrix, by their names and in units of the data."""
        pairs = zip(self.relations or {}, dispersion, strict=True)
        found = {f"dispersion_{name}": self.in_unit(name, phi, to=False) for name, phi in pairs}
        return {"dispersion": 1.0} | found

    def with_dispersion_of(self, attrs: Mapping[Any, Any]) -> Self:
        drawn = {own.name for own in self.learnt}
        told = {
            name: replace(own, dispersion=float(attrs[key]))
            if (key := f"dispersion_{name}") not in drawn
            else own
            for name, own in (self.relations or {}).items()
        }
        return replace(self, relations=told)

    def relation(self, name: str) -> Relation:
        """Give a relation by name."""
        assert self.relations is not None
        return self.relations[name]

    def resolve(self, mean: float, dispersion: Any) -> Hyperparameters:
        """Choose rates; dispersions, one for each matrix, are those given."""
        shapes = self.starting_shapes
        given = np.broadcast_to(np.asarray(dispersion, np.float64), len(self.relations or "1"))
        return Hyperparameters(tuple(given.tolist()), *self.rates_under(mean, shapes), *shapes)

    def draw_prior(
        self, rng: np.random.Generator, shape: tuple[int, int], mean: float, variance: float
    ) -> PriorDraw:
        raise ModelError(
            "calibration is of a model of one matrix; several matrices have no shape of their own"
        )

    def check_values(self, minimum: float, maximum: float) -> None:
        """Refuse data, matrix by matrix, that their laws cannot have produced."""
        if self.places is None or self.relations is None:
            return
        for own in self.places["relations"]:
            try:
                _law(self.relations[own["name"]]).check_values(own["minimum"], own["maximum"])
            except Exception as error:
                raise type(error)(f"{own['name']}: {error}") from error

    def for_compilation(self, n_components: int = 2) -> Self:
        free: dict[str, Any] = {"shape_w": 1.0, "shape_h": 1.0, "n_components": n_components}
        return replace(self, rate_w=1.0, rate_h=1.0, **free)

    def to_dict(self) -> dict[str, Any]:
        """The model as plain JSON values; where matrices are, the data tell."""
        told = super().to_dict() | {"relations": None}
        del told["places"]
        if self.relations is not None:
            told["relations"] = {name: asdict(own) for name, own in self.relations.items()}
        return told


def _law(relation: Relation) -> Likelihood:
    """The law of a relation; Poisson where that is not settled yet."""
    if relation.law == "auto":
        return Tweedie(1.0)
    return relation.model(1).likelihood


def _checked_relations(given: Any) -> dict[str, Relation]:
    if not isinstance(given, Mapping) or not given:
        raise ModelError(f"relations are a dict of Relation by name, got {given!r}")
    found = {}
    for name, own in given.items():
        if isinstance(own, Mapping):
            known = [one.name for one in fields(Relation)]
            refuse_unknown(f"relation {name!r}", own, known, ModelError)
        made = Relation(**own) if isinstance(own, Mapping) else own
        if isinstance(own, Sequence) and not isinstance(own, str) and len(own) == 2:
            made = Relation(*own)
        if not isinstance(made, Relation):
            raise ModelError(
                f'relation {name!r} must be a Relation, such as Relation("cells", "genes", '
                f'law="poisson"), got {own!r}'
            )
        found[str(name)] = made
    return found
