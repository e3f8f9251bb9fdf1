"""Several matrices that share factors, each with a law of its own.

With factors F, one for each set of rows (cells, genes, users, items), and relations r between two
of them,

    v_ij ~ law_r(mu_ij, phi_r),   mu = u_r F_a F_b^T,   F_ik ~ Gamma(a, lambda)

where u_r is the mean of the relation's data, so that every factor is on one scale.

Source: Şimşekli et al. 2015, section 6 (coupled factorizations); Yılmaz, Cemgil and Şimşekli 2011.
"""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from daskfactor.checks import refuse_unknown
from daskfactor.errors import ModelError
from daskfactor.models.gamma_factors import GammaFactors, Hyperparameters
from daskfactor.models.likelihood import Array, Likelihood
from daskfactor.models.negative_binomial import DENSITIES, NegativeBinomialNMF
from daskfactor.models.settings import POSITIVE_OR_AUTO, Auto, Checked, Learnt, positive
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.models.tweedie_law import Tweedie, checked_power

BETAS = {"poisson": 1.0, "normal": 2.0, "gaussian": 2.0, "gamma": 0.0}
NEGATIVE_BINOMIAL = "negative binomial"


def _law_setting(name: str, value: Any) -> Any:
    """Check a likelihood: a power beta, the name of a likelihood, or ``"auto"``."""
    if isinstance(value, str):
        if value in (*BETAS, NEGATIVE_BINOMIAL, "auto"):
            return value
        laws = ", ".join(f'"{law}"' for law in ("auto", *BETAS, NEGATIVE_BINOMIAL))
        raise ModelError(f"{name} must be one of {laws}, or a power beta, got {value!r}")
    return checked_power(name, value)


def _factor_setting(name: str, value: Any) -> Any:
    """Check the name of a factor, or None."""
    if value is None or (isinstance(value, str) and value):
        return value
    raise ModelError(f"{name} of a relation is the name of a factor, got {value!r}")


@dataclass(frozen=True)
class Relation(Checked):
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

    rows: str | None = field(default=None, metadata={"check": _factor_setting})
    columns: str | None = field(default=None, metadata={"check": _factor_setting})
    _: KW_ONLY
    law: str | float = field(default="auto", metadata={"check": _law_setting})
    dispersion: float | Auto = field(default="auto", metadata=POSITIVE_OR_AUTO)
    weight: float = field(default=1.0, metadata=positive(advice="leave it out for 1"))

    def model(self, n_components: int, **settings: Any) -> GammaFactors:
        """Give the model of this matrix alone."""
        settings = {"dispersion": self.dispersion} | settings
        if self.law == NEGATIVE_BINOMIAL:
            return NegativeBinomialNMF(n_components, **settings)
        settings["beta"] = BETAS.get(str(self.law), self.law)
        return TweedieNMF(n_components, **settings)

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood; Poisson's where it is not chosen yet."""
        return Tweedie(1.0) if self.law == "auto" else self.model(1).likelihood

    def settled(self, is_integer: bool, minimum: float) -> "Relation":
        """Choose a law for data, if that is to be done."""
        if self.law != "auto":
            return self
        return replace(self, law="poisson" if is_integer and minimum >= 0 else "normal")


@dataclass(frozen=True)
class JointLaw(Likelihood):
    """The laws of several matrices in units u of their means, block by block.

    In these units a Tweedie law has the dispersion φ / u^β, and a negative binomial one α u, and
    its log-likelihood counts u times.

    Attributes
    ----------
    laws, factors, observed
        Of every relation: its law, what its log-likelihood counts, and its observed entries.
    owner
        The number of the relation that each block belongs to, -1 for none.
    dispersions
        Of every relation, in its unit.
    """

    laws: tuple[Likelihood, ...]
    factors: tuple[float, ...]
    observed: tuple[int, ...] = ()
    owner: tuple[tuple[int, ...], ...] = ()
    dispersions: tuple[float, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        slowest = min(self.laws, key=lambda law: law.exponent)
        self._put(majorizer=slowest.majorizer, exponent=slowest.exponent)
        self._put(steepest_power=max(law.steepest_power for law in self.laws))
        self._put(counts=all(law.counts for law in self.laws))
        self._put(closed_form=all(law.closed_form for law in self.laws))

    def __str__(self) -> str:
        return f"several laws ({', '.join(map(str, self.laws))})"

    def visits_all(self, zeros: bool) -> bool:
        return any(law.visits_all(zeros) for law in self.laws)

    def at(self, dispersion: Any) -> tuple["JointLaw", float]:
        """Give the laws at dispersions, one each, or one for all."""
        return replace(self, dispersions=_for_each(self.laws, dispersion)), 1.0

    @cached_property
    def parts(self) -> tuple[Likelihood, ...]:
        """The laws at their dispersions, with their shares."""
        pairs = zip(self.laws, self.dispersions or _for_each(self.laws, 1.0), strict=True)
        each = zip((law.at(phi) for law, phi in pairs), self.factors, strict=True)
        tiny = np.finfo(np.float64).tiny
        return tuple(law.shared(factor / max(phi, tiny)) for (law, phi), factor in each)

    def of(self, block: tuple[int, ...]) -> Likelihood:
        number = self.owner[block[0]][block[1]]
        return self.parts[max(number, 0)]  # in a block of no relation there is nothing

    def sums(self, block: tuple[int, ...], fit: Array) -> Array:
        number = self.owner[block[0]][block[1]]
        out = np.zeros(1 + len(self.laws))
        if number >= 0:
            out[0], out[1 + number] = self.parts[number].share * fit[0], fit[1]
        return out

    def variance(self, mu: ArrayLike, dispersion: Any) -> Array:
        """Return the variance of an observation with the average information of all data."""
        each = zip(self.laws, _for_each(self.laws, dispersion), self.observed, strict=True)
        information = sum(number / law.variance(mu, phi) for law, phi, number in each)
        return np.asarray(sum(self.observed) / information)

    def floor(self, typical: float) -> float:
        return min(law.floor(typical) for law in self.laws)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ModelError(
            f"{self} are one for each matrix; take one of the run's matrices with view(run, name)"
        )

    entry = deviance = log_normalizer = sample = observation_variance = interval = _refuse


def _for_each(relations: Sized, dispersion: Any) -> tuple[float, ...]:
    """Return dispersions of all relations, which may share one."""
    values = np.broadcast_to(np.asarray(dispersion, np.float64), len(relations))
    return tuple(values.tolist())


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
            self._put(relations=_checked_relations(self.relations))
        if self.dispersion != "auto":
            raise ModelError("the dispersion of a matrix is that of its Relation; leave it out")
        if self.rate_w == "row" or self.rate_h == "column":
            raise ModelError('rates of a coupled model are "auto", "component" or numbers')

    @property
    def likelihood(self) -> JointLaw:
        """The laws of all matrices, in units of their means."""
        relations = list((self.relations or {"": Relation()}).values())
        laws = tuple(relation.likelihood for relation in relations)
        factors = [relation.weight for relation in relations]
        if self.places is None:
            return JointLaw(laws, tuple(factors))
        places = self.places["relations"]
        for number, relation in enumerate(relations):
            if relation.law == NEGATIVE_BINOMIAL:
                factors[number] *= places[number]["unit"]
        observed = tuple(place["n_observed"] for place in places)
        return JointLaw(laws, tuple(factors), observed, tuple(map(tuple, self.places["owner"])))

    @property
    def learnt(self) -> tuple[Learnt, ...]:
        """Hyperparameters of priors, and dispersions of overdispersed counts."""
        drawn = [
            Learnt(f"dispersion_{name}", (), f"alpha of the counts of {name}", passes=DENSITIES)
            for name, relation in (self.relations or {}).items()
            if relation.law == NEGATIVE_BINOMIAL and relation.dispersion == "auto"
        ]
        return *super().learnt, *drawn

    def placed(self, places: Mapping[str, Any] | None) -> Any:
        """Give the model of matrices in their places, with a law for each; of one, its own."""
        if places is None:
            return super().placed(places)
        relations = {}
        for place in places["relations"]:
            relation = (self.relations or {}).get(place["name"]) or Relation()
            relations[place["name"]] = relation.settled(place["is_integer"], place["minimum"])
        if len(relations) > 1:
            return replace(self, relations=relations, places=places)
        priors = {name: getattr(self, name) for name in ("rate_w", "rate_h", "shape_w", "shape_h")}
        (alone,) = relations.values()
        return alone.model(self.n_components, **priors)

    def in_unit(self, name: str, dispersion: float, to: bool = True) -> float:
        """Give a relation's dispersion in its unit, or, if not ``to``, in that of the data."""
        assert self.places is not None
        (unit,) = (place["unit"] for place in self.places["relations"] if place["name"] == name)
        law = (self.relations or {})[name].likelihood
        factor = unit**-law.beta if isinstance(law, Tweedie) else unit
        return float(dispersion * factor if to else dispersion / factor)

    def dispersion_attrs(self, dispersion: Any) -> dict[str, Any]:
        """Give dispersions, one for each matrix, by their names and in units of the data."""
        pairs = zip(self.relations or {}, dispersion, strict=True)
        each = {f"dispersion_{name}": self.in_unit(name, phi, to=False) for name, phi in pairs}
        return {"dispersion": 1.0} | each

    def with_dispersion_of(self, attrs: Mapping[Any, Any]) -> Self:
        drawn, relations = {one.name for one in self.learnt}, dict(self.relations or {})
        for name, relation in relations.items():
            if (key := f"dispersion_{name}") not in drawn:
                relations[name] = replace(relation, dispersion=float(attrs[key]))
        return replace(self, relations=relations)

    def resolve(self, mean: float, dispersion: Any) -> Hyperparameters:
        """Choose rates; dispersions, one for each matrix, are those given."""
        shapes, dispersions = self.starting_shapes, _for_each(self.relations or "1", dispersion)
        return Hyperparameters(dispersions, *self.rates_under(mean, shapes), *shapes)

    def check_values(self, minimum: float, maximum: float) -> None:
        """Refuse data, matrix by matrix, that their laws cannot have produced."""
        for place in (self.places or {"relations": []})["relations"]:
            try:
                law = (self.relations or {})[place["name"]].likelihood
                law.check_values(place["minimum"], place["maximum"])
            except Exception as error:
                raise type(error)(f"{place['name']}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the model as plain JSON values."""
        settings = super().to_dict()
        if self.relations is not None:
            settings["relations"] = {name: asdict(one) for name, one in self.relations.items()}
        return settings


def _checked_relations(value: Any) -> dict[str, Relation]:
    if not isinstance(value, Mapping) or not value:
        raise ModelError(f"relations are a dict of Relation by name, got {value!r}")
    return {str(name): _relation(name, relation) for name, relation in value.items()}


def _relation(name: Any, value: Any) -> Relation:
    """Make a relation of its settings, or of a pair of names."""
    if isinstance(value, Relation):
        return value
    if isinstance(value, Mapping):
        names = [field.name for field in fields(Relation)]
        refuse_unknown(f"relation {name!r}", value, names, ModelError)
        return Relation(**value)
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        return Relation(*value)
    raise ModelError(
        f'relation {name!r} must be a Relation, such as Relation("cells", "genes", '
        f'law="poisson"), got {value!r}'
    )
