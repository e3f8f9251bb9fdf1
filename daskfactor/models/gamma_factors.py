"""Non-negative matrix factorization with gamma priors, whatever the law of an observation.

Source: Şimşekli et al. 2017, section 2.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import polygamma

from daskfactor.errors import DataError, ModelError
from daskfactor.models.covariates import COVARIATES, LinkPrior, SideInformation, both
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.log_linear import multiples
from daskfactor.models.rates import Gamma, Totals, draw_positive, draw_prior_shape, relevant
from daskfactor.models.settings import (
    COUNT_OR_AUTO,
    EFFECTIVE,
    POSITIVE_OR_AUTO,
    Array,
    Auto,
    FixedComponents,
    Learnt,
    Pair,
    PriorDraw,
    checked_fixed,
    checked_positive,
    positive,
)

COMPONENTS = {"arrays": FixedComponents}
SHAPE = positive("auto", advice="leave it at 1 for an exponential prior")
ROWS, COLUMNS = positive("auto", "component", "row"), positive("auto", "component", "column")
MAX_COMPONENTS = 100
SIDES = ("row", "column")
Rate = Any
"""One rate for a factor, or rates that its entries (n, K) are repeated to: (K,) or (n, 1)."""


def gamma_log_density(factor: ArrayLike, rate: Rate, shape: float = 1.0) -> float:
    """Return the summed log-density of independent gamma variables.

    ``sum(shape log(rate) - log Gamma(shape) + (shape - 1) log(factor) - rate factor)``

    Parameters
    ----------
    factor
        Any shape; minus infinity is returned if an entry is negative, and also if one
        is zero with ``shape > 1``. With ``shape < 1`` the density at zero is infinite.
    rate
        Rate, in one over the unit of the factor; or rates, which are repeated along the axes
        where they have length 1.
    shape
        Shape; 1 is the exponential.

    Returns
    -------
    float
        Sum over all entries, accumulated in double precision.

    Raises
    ------
    ModelError
        If rate or shape is not positive and finite.

    References
    ----------
    Şimşekli et al. 2017, section 2.
    """
    for name, value in ("rate", rate), ("shape", shape):
        valid = (value > 0.0) & (value < math.inf)
        if not (valid if isinstance(valid, bool) else valid.all()):
            raise ModelError(f"the {name} of a gamma prior must be positive, got {value!r}")
    # An array may be on a GPU, where NumPy must not ask for it.
    values: Any = factor if hasattr(factor, "dtype") else np.asarray(factor)
    if (values < 0).any():
        return -np.inf
    if np.ndim(rate):
        log_rate = float(np.sum(np.log(rate), dtype=np.float64)) / max(rate.size, 1)
        linear = values.size * log_rate - float(np.sum(rate * values, dtype=np.float64))
    else:
        log_rate = math.log(rate)
        linear = float(values.size * log_rate - rate * np.sum(values, dtype=np.float64))
    if shape == 1.0:
        return float(linear)
    with np.errstate(divide="ignore"):
        logs = float(np.sum(np.log(values), dtype=np.float64))
    constant = values.size * ((shape - 1.0) * log_rate - math.lgamma(shape))
    return float(linear + constant + (shape - 1.0) * logs)


def clipped_gamma_log_density(factor: NDArray[Any], rate: Rate, shape: float) -> float:
    """Return `gamma_log_density` of a factor that a sampler has moved, always finite.

    Entries count as at least the smallest normal number: arithmetic of finite precision
    may put one on zero, where a gamma density has no finite logarithm.
    """
    if shape != 1.0:
        factor = np.maximum(factor, np.finfo(factor.dtype).tiny)
    return gamma_log_density(factor, rate, shape)


class Hyperparameters(NamedTuple):
    """The numbers that ``"auto"`` was resolved to.

    ``dispersion`` has the unit of the data to the power beta, and is one for each of several
    matrices; ``rate_w`` and
    ``rate_h`` are the rates of the gamma priors, ``shape_w`` and ``shape_h`` their
    shapes (1: exponential). Rates are one for all, or one for each component; where each row
    or column has its own, these travel with the bands (`daskfactor.inference.program.RATE`).
    """

    dispersion: Any
    rate_w: float | tuple[float, ...]
    rate_h: float | tuple[float, ...]
    shape_w: float = 1.0
    shape_h: float = 1.0

    def prior(self, factor: int) -> tuple[Any, float]:
        """Return rate and shape of the prior on W (``factor`` 0) or H (1, and further ones)."""
        rate = (self.rate_w, self.rate_h)[min(factor, 1)]
        shape = (self.shape_w, self.shape_h)[min(factor, 1)]
        return (np.array(rate) if isinstance(rate, tuple) else rate), shape


@dataclass(frozen=True)
class GammaPrior(LinkPrior):
    """The settings of the gamma prior of one factor.

    Attributes
    ----------
    rate, shape, fixed
        As the model has them.
    """

    rate: float | str
    shape: float | Auto
    fixed: FixedComponents | None

    @property
    def rate_of(self) -> str | None:
        """Group of entries that share a learnt rate: "component", "row", "column"; None: fixed.

        Components have rates under ``"auto"`` where there are covariates.
        """
        if self.rate == "auto" and self.covariates is not None:
            return "component"
        return str(self.rate) if self.rate in ("component", *SIDES) else None

    @property
    def starting_shape(self) -> float:
        """The shape; 1 in place of one that is learnt."""
        return 1.0 if self.shape == "auto" else float(self.shape)

    def draw_shape(self, rng: np.random.Generator, learnt: dict[str, Any]) -> float:
        """Draw the shape from its prior into ``learnt``; a number is what it is."""
        if self.shape == "auto":
            learnt[f"shape_{self.side}"] = draw_prior_shape(rng)
        return float(learnt.get(f"shape_{self.side}", self.starting_shape))

    def draw_rates(
        self, rng: np.random.Generator, n_components: int, rate: Any, learnt: dict[str, Any]
    ) -> Any:
        """Draw the link from its prior into ``learnt``, and return the rates that follow."""
        if self.covariates is None:
            return rate
        link = self.draw_link(rng, np.ones(n_components), learnt)
        if self.fixed is not None:
            link[:, self.fixed.mask(n_components)] = 0.0
        learnt[f"link_{self.side}"] = link
        return rate / multiples(self.covariates, link)

    def draw_factor(
        self, rng: np.random.Generator, size: tuple[int, int], rate: Any, shape: float
    ) -> Array:
        """Draw the factor, (length, K), from its prior; frozen components are what they are."""
        factor = rng.gamma(shape, 1.0 / rate, size)
        if self.fixed is not None:
            self.fixed.put(factor, slice(None))
        return factor


@dataclass(frozen=True)
class GammaFactors(SideInformation):
    r"""A non-negative factorization with gamma priors, whatever the law of an observation.

    A model of this kind adds its `likelihood` and the settings that this takes; the others
    are those of :class:`TweedieNMF`.
    """

    has_scores: ClassVar[bool] = True
    conditional_sampler: ClassVar[str | None] = "BlockHMC"
    from_data: ClassVar[tuple[str, ...]] = ("dispersion", "rate_w", "rate_h")
    prior_kind: ClassVar[type[LinkPrior]] = GammaPrior

    n_components: Any = field(metadata=COUNT_OR_AUTO)
    _: KW_ONLY
    dispersion: float | Auto = field(default="auto", metadata=POSITIVE_OR_AUTO)
    rate_w: float | Literal["auto", "component", "row"] = field(default="auto", metadata=ROWS)
    rate_h: float | Literal["auto", "component", "column"] = field(default="auto", metadata=COLUMNS)
    shape_w: float | Auto = field(default=1.0, metadata=SHAPE)
    shape_h: float | Auto = field(default=1.0, metadata=SHAPE)
    fixed_w: FixedComponents | ArrayLike | None = field(default=None, metadata=COMPONENTS)
    fixed_h: FixedComponents | ArrayLike | None = field(default=None, metadata=COMPONENTS)
    covariates_w: Any = field(default=None, metadata=COVARIATES)
    covariates_h: Any = field(default=None, metadata=COVARIATES)
    link_precision_w: float | Auto = field(default="auto", metadata=POSITIVE_OR_AUTO)
    link_precision_h: float | Auto = field(default="auto", metadata=POSITIVE_OR_AUTO)
    evidence_data = "matrix"
    hyper_type = Hyperparameters
    fixed = both("fixed", "Frozen components of W and of H, or None.")
    rates_of = both("rate_of", "Groups of entries that share a learnt rate, or None.")
    starting_shapes = both("starting_shape", "Shapes of the priors; 1 for one that is learnt.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_components == "auto":
            frozen = self.fixed_w is not None or self.fixed_h is not None
            if frozen or not {self.rate_w, self.rate_h} <= {"auto", "component"}:
                raise ModelError(
                    'n_components="auto" gives every component one rate in W and H and freezes '
                    f"none, got rate_w={self.rate_w!r} and rate_h={self.rate_h!r}; leave these, "
                    "fixed_w and fixed_h out, or pass a number of components"
                )
            self._put(rate_w="component", rate_h="component")
        for prior in self.factor_priors:
            name = f"fixed_{prior.side}"
            self._put(**{name: checked_fixed(name, prior.fixed, self.n_components)})
            if prior.covariates is not None and prior.rate in SIDES:
                raise ModelError(
                    f"covariates_{prior.side} say what the rates of {prior.rate}s are, so that "
                    f'they do not go with rate_{prior.side}="{prior.rate}"; leave that out, or '
                    'pass a number or "component"'
                )
        plain = "a coupled model" if self.joins else "a CP model" if self.tensor else ""
        if plain and (*self.covariates, *self.fixed) != (None,) * 4:
            raise ModelError(f"{plain} takes neither covariates nor frozen components yet")

    def sized(self, shape: Sequence[int], labels: Sequence[Any] = (None, None)) -> Self:
        """Give a model of ``"auto"`` components as many as data of a shape may have.

        3 √n of the shorter side n, at most n and at most `MAX_COMPONENTS`.
        """
        model, shorter = super().sized(shape, labels), min(shape)
        if self.n_components != "auto":
            return model
        most = min(shorter, round(3 * math.sqrt(shorter)), MAX_COMPONENTS)
        return model.with_components(most)

    @property
    def learnt(self) -> tuple[Learnt, ...]:
        """Hyperparameters of the priors that are drawn with the factors."""
        rates, shapes, links = [], [], []
        for prior in self.factor_priors:
            group, side, factor = prior.rate_of, prior.side, prior.side.upper()
            if group is not None:
                doc = f"rate of the prior on a {group} of {factor}"
                rates.append(Learnt(f"rate_{side}", (group,), doc))
            if prior.shape == "auto":
                shapes.append(Learnt(f"shape_{side}", (), f"shape of the prior on {factor}"))
            links += prior.learnt_link("exponentials of covariates times it multiply prior means")
        if self.shares_rates:
            doc = "rate of the priors on a component of W and of H"
            rates = [Learnt("rate", ("component",), doc), EFFECTIVE]
        return *rates, *shapes, *links, *self.extra_variables

    def check_settled(self, purpose: str) -> None:
        """Refuse learnt priors; point estimates tell a dispersion for all cells."""
        if names := [one.name for one in self.learnt if not one.name.startswith("dispersion")]:
            advice = ", and leave covariates out" if self.covariates != (None, None) else ""
            raise ModelError(
                f"{purpose} takes priors that are settled, and this model learns "
                f'{" and ".join(names)}; pass numbers for rates and shapes, or "auto" for '
                f"rates{advice}"
            )

    @property
    def shares_rates(self) -> bool:
        """Tell whether a component has one rate in both factors."""
        return self.rate_w == self.rate_h == "component"

    @property
    def frozen(self) -> tuple[Any, Any]:  # type: ignore[override]
        """Masks of the frozen components of W and of H, (K,) each; None: all are free."""
        w, h = (None if fixed is None else fixed.mask(self.n_components) for fixed in self.fixed)
        return w, h

    def log_prior(self, W: ArrayLike, H: ArrayLike, rate_w: float, rate_h: float) -> float:
        """Return the log-density of both factors under their gamma priors.

        Parameters
        ----------
        W, H
            Row and column factor, either way up; minus infinity if an entry is negative.
            Frozen components have no prior: leave them out.
        rate_w, rate_h
            Rates, resolved (see `resolve`).

        References
        ----------
        Şimşekli et al. 2017, section 2.
        """
        shape_w, shape_h = self.starting_shapes
        return gamma_log_density(W, rate_w, shape_w) + gamma_log_density(H, rate_h, shape_h)

    def density_spread(self, shape: tuple[int, int]) -> float:
        """Bound it by what the entries would have if the data said nothing, and if they said all.

        A log gamma density of shape a varies by (a - 1)² ψ'(a) + 2 - a; data that determine an
        entry leave ½ of it. Where hyperparameters are drawn, nothing bounds it.
        """
        if self.learnt:
            return math.inf
        each = [(a - 1.0) ** 2 * float(polygamma(1, a)) + 2.0 - a for a in self.starting_shapes]
        spread = sum(n * max(one, 0.5) for n, one in zip(shape, each, strict=True))
        return math.sqrt(self.n_components * spread)

    def scale_density(
        self, size_w: Array, size_h: Array, shape: tuple[int, int], rates: Pair
    ) -> Array:
        r"""Log prior less its value where both sums of a component cost alike.

        .. math:: -\sum_k \left(\sqrt{\lambda_w s_k} - \sqrt{\lambda_h t_k}\right)^2
            - \left(I (a_w - 1) - J (a_h - 1)\right) \sum_k \log c_k, \qquad
            c_k = \sqrt{\lambda_h t_k / \lambda_w s_k}

        with s and t the sums of w_k and h_k, (..., K). WH does not know the scale of a component,
        which only the priors hold in place, and loosely. 0 where priors are learnt.
        """
        if self.learnt or not np.isfinite(rates).all():
            return np.zeros(size_w.shape[:-1])
        alive, (a, b) = (size_w > 0) & (size_h > 0), self.starting_shapes
        cost_w = np.where(alive, rates[0] * size_w, 1.0)
        cost_h = np.where(alive, rates[1] * size_h, 1.0)
        half = 0.5 * (shape[0] * (a - 1.0) - shape[1] * (b - 1.0))
        uneven = np.square(np.sqrt(cost_w) - np.sqrt(cost_h)) + half * np.log(cost_h / cost_w)
        return np.asarray(-uneven.sum(axis=-1))

    def draw_prior(
        self, rng: np.random.Generator, shape: tuple[int, int], mean: float, variance: float
    ) -> PriorDraw:
        """Draw hyperparameters and both factors; frozen components are what they are."""
        if self.joins or self.tensor:
            raise ModelError(
                "calibration is of a model of one matrix; several matrices have no shape of their "
                "own, and a tensor has more than two axes"
            )
        K, priors, learnt = self.n_components, self.factor_priors, dict[str, Any]()
        dispersion = self.draw_prior_dispersion(rng, shape[1])
        w, h = (prior.draw_shape(rng, learnt) for prior in priors)
        rates: list[Any] = list(self.rates_under(mean, (w, h)))
        sizes = zip(self.rates_of, shape, strict=True)
        none = [np.zeros((1, K) if of == "component" else (n, 1)) for of, n in sizes]
        drawn = self.draw_rates(mean, (w, h), [Totals(zeros, zeros) for zeros in none], rng)
        for side, rate in enumerate(drawn):
            if rate is not None:
                rates[side] = rate
                learnt["rate" if self.shares_rates else f"rate_{'wh'[side]}"] = rate.ravel()
        hyper = Hyperparameters(dispersion, rates[0], rates[1], w, h)
        dispersion, *rates, w, h = self.draw_parameters(rng, hyper, learnt)
        rates = [p.draw_rates(rng, K, rate, learnt) for p, rate in zip(priors, rates, strict=True)]
        W = priors[0].draw_factor(rng, (shape[0], K), rates[0], w)
        H = priors[1].draw_factor(rng, (shape[1], K), rates[1], h)
        if "dispersion" in {one.name for one in self.learnt}:
            learnt["dispersion"] = dispersion
        return PriorDraw(W, H.T, dispersion, learnt)

    def draw_prior_dispersion(self, rng: np.random.Generator, columns: int) -> Any:
        """Draw the dispersion from its prior, or one for each column; a number is what it is.

        Raises
        ------
        ModelError
            If it is estimated from the data.
        """
        if self.dispersion == "auto":
            raise ModelError(
                'dispersion="auto" is estimated from the data and has no prior to be drawn from; '
                "pass a number, 1.0 for Poisson counts"
            )
        return float(self.dispersion)

    def of_divergence(self, divergence: Array) -> tuple[Array, Array, Array]:
        """Return ℓ(d) = -d / φ of summed divergences d, and its first two derivatives."""
        flat, (_, phi) = np.zeros(len(divergence)), self.likelihood.at(float(self.dispersion))
        return -divergence / phi, flat - 1.0 / phi, flat

    @property
    def priors(self) -> tuple[Pair, Pair]:
        """Rate and shape of the priors on W and on H; rates must be numbers."""
        shape_w, shape_h = self.starting_shapes
        return (float(self.rate_w), shape_w), (float(self.rate_h), shape_h)

    def at(self, hyper: Hyperparameters) -> tuple[Likelihood, Hyperparameters]:
        """Give the law at these, and them with φ, which divides it, for the dispersion."""
        law, phi = self.likelihood.at(hyper.dispersion)
        return law, hyper._replace(dispersion=phi)

    def hyper_of_draw(self, values: Mapping[str, Any], mean: float) -> Hyperparameters:
        """Give the hyperparameters of a draw; those of rows and columns are left where they start.

        Results have no rates that follow from shapes where shapes are drawn.
        """
        w, h = (float(values.get(f"shape_{p.side}", p.starting_shape)) for p in self.factor_priors)
        rates: list[Any] = [
            None if p.rate_of in SIDES else values.get("rate", values.get(f"rate_{p.side}"))
            for p in self.factor_priors
        ]
        if any(rate is None for rate in rates):
            usual = self.rates_under(mean, (w, h))
            rates = [a if rate is None else rate for a, rate in zip(usual, rates, strict=True)]
        rate_w, rate_h = (tuple(map(float, r)) if np.ndim(r) else float(r) for r in rates)
        return Hyperparameters(float(values["dispersion"]), rate_w, rate_h, w, h)

    def linked_prior(self, covariates: Any, link: Any, rate: Any) -> dict[str, Any]:
        """Give the rates that covariates of rows lead to, (n, width), as bands keep them."""
        return {"rate": rate / multiples(covariates, link)}

    def prior_means(self, factor: int, hyper: Hyperparameters) -> Any:
        rate, shape = hyper.prior(factor)
        return shape / rate

    def with_numbers(self, mean: float, dispersion: float) -> Self:
        """Give the model with the numbers of `resolve` for every ``"auto"``."""
        return self.changed(**self.resolve(mean, dispersion)._asdict())

    def for_optimizers(self) -> Self:
        """Give the model itself, whose maximum a posteriori optimisers look for."""
        return self

    def without_spikes(self) -> Self:
        """Return the model with shapes of at least 1, under which the posterior has a maximum."""
        w, h = (max(1.0, shape) for shape in self.starting_shapes)
        return self.changed(shape_w=w, shape_h=h)

    def auto_rate(self, mean: float) -> float:
        """Return the rate ``sqrt(K / mean)``, under which ``mu`` has the mean of the data.

        A prior of shape ``a`` takes ``a`` times as much.

        Raises
        ------
        DataError
            If the mean of the data is not positive.
        """
        if not 0.0 < mean < np.inf:
            raise DataError(
                f"cannot choose prior rates for data of mean {mean:g}: it must be positive; "
                "check that the data are not all zero, or pass rate_w and rate_h as numbers"
            )
        return float(np.sqrt(self.n_components / mean))

    def tilt(self, mean: float) -> float:
        """Return the square root of W's prior mean over H's under ``"auto"`` rates.

        1 unless components are frozen: then their values say what the scale is.
        """
        usual = np.sqrt(mean / self.n_components) if mean > 0 else 1.0
        values = (None if fixed is None else fixed.values for fixed in self.fixed)
        w, h = (0.0 if some is None else float(some.mean()) for some in values)
        return float(w / usual if w > 0 else usual / h if h > 0 else 1.0)

    def resolve(self, mean: float, dispersion: float) -> Hyperparameters:
        """Replace every ``"auto"`` by a number, and what is learnt by where it starts.

        Fixed settings win, and learnt rates count as ``"auto"``. If one rate is fixed, the
        other is such that the prior mean of ``mu``, ``K shape_w shape_h / (rate_w rate_h)``, is
        the mean of the data; if none is, both priors have the same mean, but for frozen
        components' scale (`tilt`).

        Parameters
        ----------
        mean
            Mean of the observed entries.
        dispersion
            The estimate to use if the dispersion is ``"auto"``.

        Raises
        ------
        DataError
            If a rate has to be chosen and the mean is not positive.
        ModelError
            If the dispersion that results is not positive and finite.
        """
        phi = dispersion if isinstance(self.dispersion, str) else self.dispersion
        phi, shapes = checked_positive("dispersion", phi), self.starting_shapes
        return Hyperparameters(phi, *self.rates_under(mean, shapes), *shapes)

    def rates_under(self, mean: float, shapes: Pair) -> Pair:
        """Return the rates of W and of H, as `resolve` chooses them, under these shapes."""
        (a, b), w, h = shapes, self.rate_w, self.rate_h
        if isinstance(w, str) and isinstance(h, str):
            w = a * self.auto_rate(mean) / self.tilt(mean)
            h = b * self.auto_rate(mean) * self.tilt(mean)
        elif isinstance(w, str):
            w = a * b * self.auto_rate(mean) ** 2 / float(h)
        elif isinstance(h, str):
            h = a * b * self.auto_rate(mean) ** 2 / float(w)
        return float(w), float(h)

    # -- what is learnt --------------------------------------------------------

    def hyperpriors(self, mean: float, shapes: Pair) -> list[Gamma | None]:
        """Return the priors of the rates of W and of H under these shapes; None where fixed."""
        rates = self.rates_under(mean, shapes)
        if self.shares_rates:
            return [Gamma.shared(*rates)] * 2
        groups = zip(self.rates_of, rates, strict=True)
        return [None if group is None else Gamma.alone(rate) for group, rate in groups]

    def _conditionals(
        self, mean: float, shapes: Pair, totals: Sequence[Totals]
    ) -> list[tuple[Any, Any, Any]]:
        """Return hyperpriors, powers of the rates, and the sums that rates multiply in the density.

        One for each factor, or a single one where both share rates.
        """
        weights, sums = _weights(shapes, totals), [sums.total for sums in totals]
        hyperpriors = self.hyperpriors(mean, shapes)
        if self.shares_rates:
            return [(hyperpriors[0], weights[0] + weights[1], sums[0] + sums[1])]
        return list(zip(hyperpriors, weights, sums, strict=True))

    def draw_rates(
        self, mean: float, shapes: Pair, totals: Sequence[Totals], rng: np.random.Generator
    ) -> Sequence[Array | None]:
        """Draw the rates of both factors from their conditionals; None where they are fixed.

        Parameters
        ----------
        mean
            Mean of the data.
        shapes
            Of the priors on W and on H.
        totals
            Of both factors.
        rng
            Is advanced.
        """
        each = self._conditionals(mean, shapes, totals)
        drawn = [prior and prior.draw(rng, weight, total) for prior, weight, total in each]
        return drawn * 2 if self.shares_rates else drawn

    def log_hyperprior(self, mean: float, shapes: Pair, rates: Sequence[Array | None]) -> float:
        """Return the log prior density of learnt shapes and rates, as `draw_rates` gives these."""
        settings = zip((self.shape_w, self.shape_h), shapes, strict=True)
        result = -sum(shape for setting, shape in settings if setting == "auto")
        pairs = list(zip(self.hyperpriors(mean, shapes), rates, strict=True))
        pairs = pairs[:1] if self.shares_rates else pairs
        return result + sum(
            prior.log_density(rate) for prior, rate in pairs if prior and rate is not None
        )

    def draw_shapes(
        self, mean: float, shapes: Pair, totals: Sequence[Totals], rng: np.random.Generator
    ) -> Pair:
        """Draw the shapes that are learnt, in turn, with learnt rates integrated out."""
        w, h = shapes
        if self.shape_w == "auto":
            w = draw_positive(lambda a: self.log_marginal(mean, (a, h), totals), w, rng)
        if self.shape_h == "auto":
            h = draw_positive(lambda b: self.log_marginal(mean, (w, b), totals), h, rng)
        return w, h

    def log_marginal(self, mean: float, shapes: Pair, totals: Sequence[Totals]) -> float:
        """Return log p(W, H | shapes) with learnt rates integrated out."""
        result, rates = 0.0, self.rates_under(mean, shapes)
        for a, sums in zip(shapes, totals, strict=True):
            result += (a - 1.0) * sums.logs - float(sums.entries.sum()) * math.lgamma(a)
            result -= sums.floored * math.log(a)
        each = self._conditionals(mean, shapes, totals)
        for rate, (prior, weight, total) in zip(rates, each, strict=False):
            if prior is None:
                result += float(np.sum(weight * math.log(rate) - rate * total))
            else:
                result += prior.log_marginal(weight, total)
        return result

    def mean_relevance(
        self, totals: Sequence[Totals], dispersion: float, mean: float, observed: float
    ) -> tuple[float, ...]:
        """Return the conditional means of rates that both factors share, for a point estimate.

        A density gains by all entries of a component that go to zero together, and a point does
        not see that they have less room there: it would give up components that data of few
        counts do support. So rates are at most what a component has that explains one count, or
        as much information of another law, for each of its entries.
        """
        (prior, weight, total), *_ = self._conditionals(mean, self.starting_shapes, totals)
        entries = sum(sums.length for sums in totals)
        least = entries * math.sqrt(entries / self._information(mean, dispersion, observed))
        rates = (prior.shape + weight) / (max(prior.rate, least) + total)
        return tuple(map(float, rates))

    def _information(self, mean: float, dispersion: float, observed: float) -> float:
        """Return the information of N observations about a unit of the mean."""
        return observed * mean / float(self.likelihood.variance(mean, dispersion))

    def effective_components(
        self, totals: Sequence[Totals], dispersion: float, mean: float, observed: float
    ) -> float:
        """Count the components that data of this mean support; ``totals`` by component.

        The N observations say N μ_k m / (φ V(m)) of a component whose part of the mean m is
        μ_k, with φ V(m) the variance there: of counts, how many of them it explains.
        """
        rows, columns = (sums.length for sums in totals)
        part = totals[0].total * totals[1].total / (rows * columns)
        return relevant(part, self._information(mean, dispersion, observed), rows + columns)


def _weights(shapes: Pair, totals: Sequence[Totals]) -> list[NDArray[np.float64]]:
    """Return the powers of the rates in the densities of both factors."""
    return [shape * sums.entries for shape, sums in zip(shapes, totals, strict=True)]
