"""Non-negative matrix factorization with gamma priors, whatever the law of an observation.

Source: Şimşekli et al. 2017, section 2.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import polygamma

from daskfactor.errors import DataError, ModelError
from daskfactor.models.covariates import COVARIATES, LINKED, SideInformation
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.log_linear import multiples
from daskfactor.models.rates import (
    Gamma,
    Totals,
    alone,
    draw_positive,
    draw_prior_shape,
    relevant,
    shared,
)
from daskfactor.models.settings import (
    EFFECTIVE,
    POSITIVE_OR_AUTO,
    Auto,
    FixedComponents,
    Learnt,
    Mask,
    OfDivergence,
    PriorDraw,
    Scales,
    check_length,
    checked_count,
    checked_fixed,
    checked_number,
    checked_positive,
)

FIXED = ("fixed_w", "fixed_h")
COMPONENTS = {"arrays": FixedComponents}
SHAPE = {"check": partial(checked_positive, advice="leave it at 1 for an exponential prior")}
MOST_COMPONENTS = 100
"""Components that ``"auto"`` begins with, at most."""
SIDES = ("row", "column")
"""What may have rates of its own in W and in H, besides components."""
Rate = Any
"""One rate for a factor, or rates that its entries (n, K) are repeated to: (K,) or (n, 1)."""


def gamma_log_density(factor: ArrayLike, rate: Rate, shape: float = 1.0) -> float:
    """Summed log-density of independent gamma variables.

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
    if not np.all(rate > 0.0) or not np.all(np.isfinite(rate)):
        raise ModelError(f"the rate of a gamma prior must be positive, got {rate!r}")
    if not 0.0 < shape < np.inf:
        raise ModelError(f"the shape of a gamma prior must be positive, got {shape!r}")
    # An array may be on a GPU, where NumPy must not ask for it.
    values: Any = factor if hasattr(factor, "dtype") else np.asarray(factor)
    if np.any(values < 0):
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
    """As `gamma_log_density` of a factor that a sampler has moved, always finite.

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
        """Rate and shape of the prior on W (``factor`` 0) or H (1, and further ones)."""
        rate = (self.rate_w, self.rate_h)[min(factor, 1)]
        shape = (self.shape_w, self.shape_h)[min(factor, 1)]
        return (np.array(rate) if isinstance(rate, tuple) else rate), shape


@dataclass(frozen=True)
class GammaFactors(SideInformation):
    r"""A non-negative factorization with gamma priors, whatever the law of an observation.

    A model of this kind adds its `likelihood` and the settings that this takes; the others
    are those of :class:`TweedieNMF`.
    """

    has_scores: ClassVar[bool] = True
    conditional_sampler: ClassVar[str | None] = "BlockHMC"
    from_data: ClassVar[tuple[str, ...]] = ("dispersion", "rate_w", "rate_h")

    n_components: Any = field(metadata={"check": partial(checked_count, word="auto")})
    _: KW_ONLY
    dispersion: float | Auto = field(default="auto", metadata=POSITIVE_OR_AUTO)
    rate_w: float | Literal["auto", "component", "row"] = field(
        default="auto", metadata={"check": partial(checked_positive, words=("component", "row"))}
    )
    rate_h: float | Literal["auto", "component", "column"] = field(
        default="auto", metadata={"check": partial(checked_positive, words=("component", "column"))}
    )
    shape_w: float | Auto = field(default=1.0, metadata=SHAPE)
    shape_h: float | Auto = field(default=1.0, metadata=SHAPE)
    fixed_w: FixedComponents | ArrayLike | None = field(default=None, metadata=COMPONENTS)
    fixed_h: FixedComponents | ArrayLike | None = field(default=None, metadata=COMPONENTS)
    covariates_w: Any = field(default=None, metadata=COVARIATES)
    covariates_h: Any = field(default=None, metadata=COVARIATES)
    link_precision_w: float | Auto = field(default="auto", metadata=POSITIVE_OR_AUTO)
    link_precision_h: float | Auto = field(default="auto", metadata=POSITIVE_OR_AUTO)
    evidence_data = "matrix"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_components == "auto":
            self._find_components()
        for name in FIXED:
            self._put({name: checked_fixed(name, getattr(self, name), self.n_components)})
        for side, rate, own in zip("wh", (self.rate_w, self.rate_h), self.covariates, strict=True):
            if own is not None and rate in SIDES:
                raise ModelError(
                    f"covariates_{side} say what the rates of {rate}s are, so that they do not go "
                    f'with rate_{side}="{rate}"; leave that out, or pass a number or "component"'
                )

    def _find_components(self) -> None:
        """Let components fade; refuse what says how many there are."""
        rates = {self.rate_w, self.rate_h}
        if not rates <= {"auto", "component"}:
            raise ModelError(
                'n_components="auto" gives every component one rate in W and H, got '
                f"rate_w={self.rate_w!r} and rate_h={self.rate_h!r}; leave these out, or pass a "
                "number of components"
            )
        if self.fixed_w is not None or self.fixed_h is not None:
            raise ModelError(
                'n_components="auto" does not go with fixed_w or fixed_h; pass a number of '
                'components, with rate_w="component" and rate_h="component" for the free ones'
            )
        self._put({"rate_w": "component", "rate_h": "component"})

    def sized(self, shape: Sequence[int], labels: Sequence[Any] = (None, None)) -> Self:
        """Give a model of ``"auto"`` components as many as data of a shape may have.

        3 √n of the shorter side n, at most n and at most 100.
        """
        found = super().sized(shape, labels)
        if self.n_components != "auto":
            return found
        least = min(shape)
        return found.with_components(min(least, round(3 * math.sqrt(least)), MOST_COMPONENTS))

    @property
    def learnt(self) -> tuple[Learnt, ...]:
        """What is drawn of the priors with the factors."""
        shapes = [
            Learnt(f"shape_{letter}", (), f"shape of the prior on {letter.upper()}")
            for letter in "wh"
            if getattr(self, f"shape_{letter}") == "auto"
        ]
        links = self.learnt_links("exponentials of covariates times it multiply prior means")
        if self.shares_rates:
            doc = "rate of the priors on a component of W and of H"
            return Learnt("rate", ("component",), doc), EFFECTIVE, *shapes, *links
        rates = [
            Learnt(f"rate_{letter}", (kind,), f"rate of the prior on a {kind} of {letter.upper()}")
            for letter, kind in zip("wh", self.rates_of, strict=True)
            if kind is not None
        ]
        return *rates, *shapes, *links

    def check_settled(self, purpose: str) -> None:
        if self.learnt:
            names = " and ".join(own.name for own in self.learnt)
            linked = self.covariates != (None, None)
            raise ModelError(
                f"{purpose} takes priors that are settled, and this model learns {names}; pass "
                'numbers for rates and shapes, or "auto" for rates'
                f"{', and leave covariates out' if linked else ''}"
            )

    @property
    def shares_rates(self) -> bool:
        """Whether a component has one rate in both factors."""
        return self.rate_w == self.rate_h == "component"

    @property
    def rates_of(self) -> tuple[str | None, str | None]:
        """What has learnt rates of its own in W and in H; None: a factor has one fixed rate.

        Under ``"auto"`` components have, where there are covariates.
        """
        pairs = zip(map(str, (self.rate_w, self.rate_h)), self.covariates, strict=True)
        asked = ("component" if rate == "auto" and own is not None else rate for rate, own in pairs)
        w, h = (rate if rate in ("component", *SIDES) else None for rate in asked)
        return w, h

    @property
    def fixed(self) -> tuple[FixedComponents | None, FixedComponents | None]:  # type: ignore[override]
        """Frozen components of W and of H."""
        return self.fixed_w, self.fixed_h  # type: ignore[return-value]  # see __post_init__

    @property
    def frozen(self) -> tuple[Mask, Mask]:  # type: ignore[override]
        """Which components of W and of H are frozen, (K,) each; None: none."""
        w, h = (None if own is None else own.mask(self.n_components) for own in self.fixed)
        return w, h

    def check_shape(self, shape: Sequence[int]) -> None:
        """Refuse data that frozen components or covariates do not belong to.

        Raises
        ------
        ModelError
            If the data have another number of rows or columns.
        """
        super().check_shape(shape)
        for name, own in zip(FIXED, self.fixed, strict=True):
            check_length(name, own, shape)

    def with_uncertainty(self) -> Self:
        if not self.likelihood.normal:
            raise ModelError(
                "uncertainty of cells takes the place of the dispersion of a normal law, beta=2, "
                f"and the model has {self.likelihood}; take TweedieNMF with beta=2, or pass "
                "weights to as_blocks, which are factors of log-likelihoods"
            )
        return replace(self, dispersion=1.0) if self.dispersion == "auto" else self

    def for_compilation(self, n_components: int = 2) -> Self:
        free: dict[str, Any] = dict.fromkeys((*FIXED, *LINKED)) | {"shape_w": 1.0, "shape_h": 1.0}
        free |= {"n_components": n_components, "dispersion": 1.0}
        return replace(self, rate_w=1.0, rate_h=1.0, **free)

    def log_prior(self, W: ArrayLike, H: ArrayLike, rate_w: float, rate_h: float) -> float:
        """Log-density of both factors under their gamma priors.

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
        entries = zip(shape, (float(self.shape_w), float(self.shape_h)), strict=True)
        own = ((n, (a - 1.0) ** 2 * float(polygamma(1, a)) + 2.0 - a) for n, a in entries)
        return math.sqrt(self.n_components * sum(n * max(one, 0.5) for n, one in own))

    def scale_density(
        self, size_w: NDArray[Any], size_h: NDArray[Any], scales: Scales
    ) -> NDArray[np.float64]:
        r"""Log prior less its value where both sums of a component cost alike.

        .. math:: -\sum_k \left(\sqrt{\lambda_w s_k} - \sqrt{\lambda_h t_k}\right)^2
            - \left(I (a_w - 1) - J (a_h - 1)\right) \sum_k \log c_k, \qquad
            c_k = \sqrt{\lambda_h t_k / \lambda_w s_k}

        with s and t the sums of w_k and h_k.
        """
        fixed = math.isfinite(scales.rate_w) and math.isfinite(scales.rate_h)
        if self.learnt or self.covariates != (None, None) or not fixed:
            return np.zeros(size_w.shape[:-1])
        alive = (size_w > 0) & (size_h > 0)
        cost_w = np.where(alive, scales.rate_w * size_w, 1.0)
        cost_h = np.where(alive, scales.rate_h * size_h, 1.0)
        entries = scales.shape[0] * (float(self.shape_w) - 1.0)
        entries -= scales.shape[1] * (float(self.shape_h) - 1.0)
        uneven = np.square(np.sqrt(cost_w) - np.sqrt(cost_h)) + 0.5 * entries * np.log(
            cost_h / cost_w
        )
        return np.asarray(-uneven.sum(axis=-1))

    def draw_prior(
        self, rng: np.random.Generator, shape: tuple[int, int], mean: float, variance: float
    ) -> PriorDraw:
        """Draw what is learnt and both factors; frozen components are what they are."""
        del variance
        dispersion = self.draw_prior_dispersion(rng, shape[1])
        shapes = [draw_prior_shape(rng) if a == "auto" else a for a in (self.shape_w, self.shape_h)]
        learnt: dict[str, Any] = {
            f"shape_{letter}": a
            for letter, a in zip("wh", shapes, strict=True)
            if getattr(self, f"shape_{letter}") == "auto"
        }
        rates, drawn = self._prior_rates(rng, shape, mean, (shapes[0], shapes[1]))
        learnt, factors = learnt | drawn, []
        for length, rate, a, own in zip(shape, rates, shapes, self.fixed, strict=True):
            factors.append(rng.gamma(a, 1.0 / rate, (length, self.n_components)))
            if own is not None:
                own.put(factors[-1], slice(None))
        if any(own.name == "dispersion" for own in self.learnt):
            learnt["dispersion"] = dispersion
        return PriorDraw(factors[0], factors[1].T, dispersion, learnt)

    def _prior_rates(
        self,
        rng: np.random.Generator,
        shape: tuple[int, int],
        mean: float,
        shapes: tuple[float, float],
    ) -> tuple[list[Any], dict[str, Any]]:
        """Draw rates that the entries of W and of Hᵀ are repeated to; and what of it is learnt."""
        learnt: dict[str, Any] = {}
        count = {"component": (1, self.n_components), "row": (shape[0], 1), "column": (shape[1], 1)}
        rates: list[Any] = list(self.rates_under(mean, shapes))
        hyperpriors = self.hyperpriors(mean, shapes)
        for side, (prior, of) in enumerate(zip(hyperpriors, self.rates_of, strict=True)):
            if prior is not None and of is not None:
                none = np.zeros(count[of])
                again = self.shares_rates and side == 1
                rates[side] = rates[0] if again else prior.draw(rng, none, none)
                learnt["rate" if self.shares_rates else f"rate_{'wh'[side]}"] = rates[side].ravel()
        sides = zip("wh", self.covariates, self.starting_ridges, strict=True)
        for side, (letter, covariates, ridge) in enumerate(sides):
            if covariates is not None:
                name = f"link_precision_{letter}"
                if getattr(self, name) == "auto":
                    ridge = learnt[name] = ridge * rng.exponential()
                link = rng.normal(size=(covariates.shape[1], self.n_components)) / math.sqrt(ridge)
                if (mask := self.frozen[side]) is not None:
                    link[:, mask] = 0.0
                rates[side] = rates[side] / multiples(covariates, link)
                learnt[f"link_{letter}"] = link
        return rates, learnt

    def draw_prior_dispersion(self, rng: np.random.Generator, columns: int) -> Any:
        """Draw the dispersion from its prior, or one for each column; a number is what it is.

        Raises
        ------
        ModelError
            If it is estimated from the data.
        """
        del rng, columns
        if self.dispersion == "auto":
            raise ModelError(
                'dispersion="auto" is estimated from the data and has no prior to be drawn from; '
                "pass a number, 1.0 for Poisson counts"
            )
        return float(self.dispersion)

    def of_divergence(self, divergence: NDArray[Any]) -> OfDivergence:
        """Take ℓ(d) = -d / φ and its derivatives."""
        flat, (_, phi) = np.zeros(len(divergence)), self.likelihood.at(float(self.dispersion))
        return OfDivergence(-divergence / phi, flat - 1.0 / phi, flat)

    @property
    def priors(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Rate and shape of the priors on W and on H; rates must be numbers."""
        shape_w, shape_h = self.starting_shapes
        return (float(self.rate_w), shape_w), (float(self.rate_h), shape_h)

    @property
    def starting_shapes(self) -> tuple[float, float]:
        """Shapes of the priors on W and H; 1 in place of one that is learnt."""
        w, h = (1.0 if a == "auto" else a for a in (self.shape_w, self.shape_h))
        return w, h

    def at(self, hyper: Hyperparameters) -> tuple[Likelihood, Hyperparameters]:
        """Give the law at these, and them with φ, which divides it, for the dispersion."""
        law, phi = self.likelihood.at(hyper.dispersion)
        return law, hyper._replace(dispersion=phi)

    def hyper_told(self, told: Mapping[str, Any], mean: float) -> Hyperparameters:
        """Give the hyperparameters of a draw; those of rows and columns are left where they start.

        Rates that follow from shapes are not told where shapes are drawn.
        """
        starting = zip(("shape_w", "shape_h"), self.starting_shapes, strict=True)
        shapes = [float(told.get(name, usual)) for name, usual in starting]
        rates: list[Any] = [told.get("rate", told.get(f"rate_{side}")) for side in "wh"]
        rates = [None if of in SIDES else own for of, own in zip(self.rates_of, rates, strict=True)]
        if any(own is None for own in rates):
            usual = self.rates_under(mean, (shapes[0], shapes[1]))
            rates = [own if told is None else told for told, own in zip(rates, usual, strict=True)]
        w, h = (tuple(map(float, own)) if np.ndim(own) else float(own) for own in rates)
        return Hyperparameters(float(told["dispersion"]), w, h, shapes[0], shapes[1])

    def linked_prior(self, covariates: Any, link: Any, rate: Any) -> dict[str, Any]:
        return {"rate": rate / multiples(covariates, link)}

    def prior_means(self, factor: int, hyper: Hyperparameters) -> Any:
        rate, shape = hyper.prior(factor)
        return shape / rate

    def with_numbers(self, mean: float, dispersion: float) -> Self:
        """Give the model with the numbers of `resolve` for every ``"auto"``."""
        numbers: dict[str, Any] = self.resolve(mean, dispersion)._asdict()
        return replace(self, **numbers)

    def for_optimizers(self) -> Self:
        """Give the model itself, whose maximum a posteriori optimisers look for."""
        return self

    def without_spikes(self) -> Self:
        """The same with shapes of at least 1, under which the posterior has a maximum."""
        shapes = self.starting_shapes
        if min(shapes) >= 1 and shapes == (self.shape_w, self.shape_h):
            return self
        return replace(self, shape_w=max(1.0, shapes[0]), shape_h=max(1.0, shapes[1]))

    def auto_rate(self, mean: float) -> float:
        """Rate ``sqrt(K / mean)`` for both priors, under which ``mu`` has the mean of the data.

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
        """Root of the ratio of W's prior mean to H's under ``"auto"`` rates.

        1 unless components are frozen: then their values say what the scale is.
        """
        usual = np.sqrt(mean / self.n_components) if mean > 0 else 1.0
        fixed_w, fixed_h = self.fixed
        if fixed_w is not None and fixed_w.mean > 0:
            return float(fixed_w.mean / usual)
        if fixed_h is not None and fixed_h.mean > 0:
            return float(usual / fixed_h.mean)
        return 1.0

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
        phi, shapes = checked_number("dispersion", phi), self.starting_shapes
        return Hyperparameters(phi, *self.rates_under(mean, shapes), *shapes)

    def rates_under(self, mean: float, shapes: tuple[float, float]) -> tuple[float, float]:
        """Return the rates of W and of H, as `resolve` chooses them, under these shapes."""
        rate_w, rate_h = self.rate_w, self.rate_h
        if isinstance(rate_w, str) and isinstance(rate_h, str):
            rate_w = shapes[0] * self.auto_rate(mean) / self.tilt(mean)
            rate_h = shapes[1] * self.auto_rate(mean) * self.tilt(mean)
        elif isinstance(rate_w, str):
            rate_w = shapes[0] * shapes[1] * self.auto_rate(mean) ** 2 / float(rate_h)
        elif isinstance(rate_h, str):
            rate_h = shapes[0] * shapes[1] * self.auto_rate(mean) ** 2 / float(rate_w)
        return float(rate_w), float(rate_h)

    # -- what is learnt --------------------------------------------------------

    def hyperpriors(self, mean: float, shapes: tuple[float, float]) -> list[Gamma | None]:
        """Priors of the rates of W and of H under these shapes; None where they are fixed."""
        rates = self.rates_under(mean, shapes)
        if self.shares_rates:
            return [shared(*rates)] * 2
        kinds = zip(self.rates_of, rates, strict=True)
        return [None if kind is None else alone(rate) for kind, rate in kinds]

    def draw_rates(
        self,
        mean: float,
        shapes: tuple[float, float],
        totals: Sequence[Totals],
        rng: np.random.Generator,
    ) -> Sequence[NDArray[np.float64] | None]:
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
        priors, weights = self.hyperpriors(mean, shapes), _weights(shapes, totals)
        if self.shares_rates and priors[0] is not None:
            return [priors[0].draw(rng, *self._shared(weights, totals))] * 2
        return [
            None if prior is None else prior.draw(rng, weight, own.total)
            for prior, weight, own in zip(priors, weights, totals, strict=True)
        ]

    def log_hyperprior(
        self,
        mean: float,
        shapes: tuple[float, float],
        rates: Sequence[NDArray[np.float64] | None],
    ) -> float:
        """Return the log prior density of what is learnt; rates as `draw_rates` gives them."""
        pairs = list(zip(self.hyperpriors(mean, shapes), rates, strict=True))
        known = zip((self.shape_w, self.shape_h), shapes, strict=True)
        result = -sum(value for given, value in known if given == "auto")
        return result + sum(
            prior.log_density(own)
            for prior, own in (pairs[:1] if self.shares_rates else pairs)
            if prior is not None and own is not None
        )

    def draw_shapes(
        self,
        mean: float,
        shapes: tuple[float, float],
        totals: Sequence[Totals],
        rng: np.random.Generator,
    ) -> tuple[float, float]:
        """Draw the shapes that are learnt, in turn, with learnt rates integrated out."""
        drawn = list(shapes)
        for factor, given in enumerate((self.shape_w, self.shape_h)):
            if given == "auto":

                def density(shape: float, factor: int = factor) -> float:
                    tried = [shape if side == factor else drawn[side] for side in (0, 1)]
                    return self.log_marginal(mean, (tried[0], tried[1]), totals)

                drawn[factor] = draw_positive(density, drawn[factor], rng)
        return drawn[0], drawn[1]

    def log_marginal(
        self, mean: float, shapes: tuple[float, float], totals: Sequence[Totals]
    ) -> float:
        """Return log p(W, H | shapes) with learnt rates integrated out."""
        rates, weights = self.rates_under(mean, shapes), _weights(shapes, totals)
        priors, result = self.hyperpriors(mean, shapes), 0.0
        for shape, rate, prior, weight, own in zip(
            shapes, rates, priors, weights, totals, strict=True
        ):
            result += (shape - 1.0) * own.logs - float(own.entries.sum()) * math.lgamma(shape)
            if own.floored:
                result -= own.floored * math.log(shape)
            if prior is None:
                result += float(np.sum(weight * math.log(rate) - rate * own.total))
            elif not self.shares_rates:
                result += prior.log_marginal(weight, own.total)
        if self.shares_rates and priors[0] is not None:
            result += priors[0].log_marginal(*self._shared(weights, totals))
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
        shapes = self.starting_shapes
        weights, prior = _weights(shapes, totals), shared(*self.rates_under(mean, shapes))
        entries, information = self._information(totals, dispersion, mean, observed)
        least = entries * math.sqrt(entries / information)
        rates = prior._replace(rate=max(prior.rate, least)).mean(*self._shared(weights, totals))
        return tuple(map(float, rates))

    def _information(
        self, totals: Sequence[Totals], dispersion: float, mean: float, observed: float
    ) -> tuple[float, float]:
        """Return entries of a component, and what N observations say of a unit of the mean."""
        lengths = (max(float(own.entries.max()), 1.0) for own in totals)
        return sum(lengths), observed * mean / float(self.likelihood.variance(mean, dispersion))

    @staticmethod
    def _shared(weights: Any, totals: Sequence[Totals]) -> tuple[Any, Any]:
        return weights[0] + weights[1], totals[0].total + totals[1].total

    def effective_components(
        self, totals: Sequence[Totals], dispersion: float, mean: float, observed: float
    ) -> float:
        """Count the components that data of this mean support; ``totals`` by component.

        The N observations say N μ_k m / (φ V(m)) of a component whose part of the mean m is
        μ_k, with φ V(m) the variance there: of counts, how many of them it explains.
        """
        rows, columns = (max(float(own.entries.max()), 1.0) for own in totals)
        part = totals[0].total * totals[1].total / (rows * columns)
        entries, information = self._information(totals, dispersion, mean, observed)
        return relevant(part, information, entries)


def _weights(shapes: tuple[float, float], totals: Sequence[Totals]) -> list[NDArray[np.float64]]:
    """Powers of the rates in the densities of both factors."""
    return [shape * own.entries for shape, own in zip(shapes, totals, strict=True)]
