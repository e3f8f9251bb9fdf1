"""Overdispersed counts: the negative binomial law, and non-negative factorizations under it.

Symbols: ``v`` observation, ``mu`` its mean, ``alpha`` the dispersion, ``r = 1 / alpha``. With
q = (1 + alpha v) / (1 + alpha mu),

    log p(v | mu) = -d(v | mu) + log p(v | v),    d(v | mu) = v log(v / mu) - (v + r) log q
    d log p / d mu = v / mu - q = (v - mu) / (mu (1 + alpha mu))

Near v = mu, where these cancel, with t(x) = log(1 + x) - x, x = v / mu - 1 and y = q - 1:

    d(v | mu) = (v - mu) x / (1 + alpha mu) + v t(x) - (v + r) t(y)
"""

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from daskfactor.errors import DataError, ModelError
from daskfactor.models.gamma_factors import GammaFactors
from daskfactor.models.likelihood import Array, Entry, Likelihood, Scalar
from daskfactor.models.rates import Common
from daskfactor.models.settings import Learnt, positive
from daskfactor.models.tweedie_law import LOG_2, POISSON, checked_dispersion, stirling

DENSITIES = 8
"""Log-likelihoods, each a pass over the data, that a draw takes; 6 to 10 were measured."""
DISPERSION = positive("auto", "column")
OF_COLUMNS = Common(2.0, 1.0, -0.58, 1.0)
"""Prior of log dispersions of columns; of one alone, about as wide as that of Exponential(1)."""


def _weight(v: Scalar, mu: Scalar, alpha: float) -> Scalar:
    one = type(mu)(1)
    return one / (mu * (one + type(mu)(alpha) * mu))


def _curvature(scale: Scalar, v: Scalar, mu: Scalar, w: Scalar, alpha: float) -> Scalar:
    return scale * (type(mu)(1) + type(mu)(alpha) * v) * mu * w


def _ratio(v: Scalar, mu: Scalar, w: Scalar, alpha: float) -> Scalar:
    return v / mu


def _checked(dispersion: Any) -> Any:
    """Refuse a dispersion, or one of several, that is not positive and finite."""
    for extreme in np.min, np.max:
        checked_dispersion(extreme(dispersion, initial=1.0))  # there may be none
    return dispersion


@dataclass(frozen=True)
class NegativeBinomial(Likelihood):
    """The law with the variance ``mu + alpha mu**2``; Poisson's for ``alpha`` near 0.

    Parameters
    ----------
    dispersion
        ``alpha``, one over the law's size r; positive. Or one for each column, (J,).
    """

    dispersion: Any = field(default=1.0, compare=False)

    def __str__(self) -> str:
        return "a negative binomial law"

    @property
    def numbers(self) -> tuple[Any, ...]:  # type: ignore[override]
        return (self.dispersion,)

    def information(self, mean: float) -> float:
        r"""Return :math:`\mu / (1 + \alpha \mu)`, that about the logarithm of a mean."""
        return mean / (1.0 + float(np.mean(self.dispersion)) * mean)

    def at(self, dispersion: Any) -> tuple[Self, float]:
        return replace(self, dispersion=dispersion), 1.0

    def entry(self, arithmetic: Any) -> Entry:
        split, log_tail = arithmetic.split, arithmetic.log_tail

        def deviance(v: Scalar, mu: Scalar, alpha: float) -> Scalar:
            real = type(mu)
            one, a, log_2 = real(1), real(alpha), real(LOG_2)
            x, below = (v - mu) / mu, one + a * mu
            y = a * (v - mu) / below
            f, first = split(v / mu)
            g, second = split((one + a * v) / below)
            f, g = x if first == 0 else f, y if second == 0 else g
            s, t, size = log_tail(f), log_tail(g), v + one / a
            near = (v - mu) * x / below + v * s - size * t
            far = v * (f + s + first * log_2) - size * (g + t + second * log_2)
            return near if first == 0 and second == 0 else far

        return Entry(_weight, _curvature, _ratio, deviance)

    def check_values(self, minimum: float, maximum: float) -> None:
        """Refuse negative data.

        Raises
        ------
        DataError
            If a value is not finite, or negative.
        """
        super().check_values(minimum, maximum)
        if minimum < 0:
            raise DataError(
                f"{self} is one of counts, got a smallest value of {minimum:g}; mask the negative "
                "values, or pass counts that are neither centred nor transformed"
            )

    def deviance(self, v: ArrayLike, mu: ArrayLike) -> Array:
        v, mu = np.asarray(v, dtype=np.float64), np.asarray(mu, dtype=np.float64)
        alpha = self.dispersion
        with np.errstate(divide="ignore", invalid="ignore"):
            growth = np.log1p(alpha * v) - np.log1p(alpha * mu)
            return np.asarray(special.rel_entr(v, mu) - (v + 1.0 / alpha) * growth, np.float64)

    def variance(self, mu: ArrayLike, dispersion: Any) -> Array:
        mu = np.asarray(mu, dtype=np.float64)
        return np.asarray(mu + _checked(dispersion) * mu**2)

    def observation_variance(
        self, mean: ArrayLike, variance_of_mean: ArrayLike, dispersion: Any
    ) -> Array:
        r"""Return the variance of a new observation: :math:`m + \alpha (m^2 + s^2) + s^2`."""
        variance = super().observation_variance(mean, variance_of_mean, dispersion)
        return np.asarray(variance + dispersion * np.asarray(variance_of_mean, dtype=np.float64))

    def log_normalizer(self, v: ArrayLike, dispersion: Any) -> Array:
        r"""Return the logarithm of p(v | v), element by element; minus infinity below zero.

        .. math:: -\tfrac12 \log(2 \pi v (1 + \alpha v)) + s(v + r) - s(r) - s(v)

        with s what Stirling's formula misses, so that nothing cancels for a large r. Between
        whole numbers the formula is the same, and the density not normalised.
        """
        alpha = _checked(dispersion)
        size = 1.0 / np.asarray(alpha)
        v = np.asarray(v, dtype=np.float64)
        positive = np.where(v > 0, v, 1.0)
        value = stirling(positive + size) - stirling(size) - 0.5 * np.log1p(alpha * positive)
        value = np.where(v > 0, value + POISSON.log_normalizer(positive, 1.0), 0.0)
        return np.where(np.isnan(v), np.nan, np.where(v < 0, -np.inf, value))

    def sample(self, rng: np.random.Generator, mu: ArrayLike, dispersion: Any) -> Array:
        mu = np.asarray(mu, dtype=np.float64)
        rates = rng.standard_gamma(1.0 / np.asarray(_checked(dispersion)), size=mu.shape)
        return np.asarray(rng.poisson(dispersion * rates * mu), dtype=np.float64)

    def interval(
        self, mean: ArrayLike, variance_of_mean: ArrayLike, dispersion: Any, level: float = 0.9
    ) -> tuple[Array, Array]:
        """Return the equal-tailed interval for a new count at every cell.

        Of the negative binomial law with the mean and the variance of `observation_variance`,
        which is exact where the mean is known. Ends are whole numbers, both inside, and the
        interval holds at least ``level``.
        """
        excess = self.observation_variance(mean, variance_of_mean, dispersion) - np.asarray(mean)
        return POISSON.interval(mean, excess, 1.0, level)


@dataclass(frozen=True)
class NegativeBinomialNMF(GammaFactors):
    r"""Non-negative factorization of counts that vary more than Poisson's, with gamma priors.

    .. math:: v_{ij} \sim \mathrm{NB}(\mu_{ij}, \alpha), \quad
        \mathrm{Var}\, v_{ij} = \mu_{ij} + \alpha \mu_{ij}^2, \quad \mu = W H, \quad
        w_{ik} \sim \mathrm{Gamma}(a_w, \lambda_w), \quad
        h_{kj} \sim \mathrm{Gamma}(a_h, \lambda_h)

    It samples by every sampler of non-negative factors but :class:`Gibbs`, which would have to
    draw a rate for every cell, zeros among them. Every zero is visited, stored or not: a pass
    over a sparse matrix costs what it does over the dense one (see :func:`estimate_cost`), but
    no dense copy is made.

    Parameters
    ----------
    n_components
        Number of components K, at least 1.
    dispersion
        The dispersion α of all cells, as DESeq2, scanpy and statsmodels name it: one over the
        size r. ``"auto"`` draws it with the factors, from its full conditional under
        α ~ Exponential(1); point estimates maximise that conditional, and evidences take α
        from one. :class:`PSGRRLD` keeps what it is when its two chains part. ``"column"`` draws
        one for every column (a gene, a word): logarithms are normal around a mean that is drawn
        as well, so that columns of few counts are near the others. A draw of all of them takes
        about ten passes over the data, and the chain remembers how often a column has
        each value.
    rate_w, rate_h, shape_w, shape_h, fixed_w, fixed_h
        As for :class:`TweedieNMF`.
    covariates_w, covariates_h, link_precision_w, link_precision_h
        As for :class:`TweedieNMF`.

    Raises
    ------
    ModelError
        If one of them is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.NegativeBinomialNMF(2), **run)
    >>> bool((trace["posterior"]["dispersion"] > 0).all())
    True
    """

    _: KW_ONLY
    dispersion: float | Literal["auto", "column"] = field(default="auto", metadata=DISPERSION)  # type: ignore[assignment]

    @property
    def learnt(self) -> tuple[Learnt, ...]:
        if not isinstance(self.dispersion, str):
            return super().learnt
        drawn = Learnt("dispersion", (), "dispersion of a count", passes=DENSITIES)
        if self.dispersion == "column":
            drawn = drawn._replace(dims=("column",), doc="dispersion of a column", averaged=True)
        return *super().learnt, drawn

    def draw_prior_dispersion(self, rng: np.random.Generator, columns: int) -> Any:
        """Draw α ~ Exponential(1), or those of columns."""
        if self.dispersion == "column":
            m, s = OF_COLUMNS.draw(rng)
            return np.exp(m + s * rng.standard_normal(columns))
        if self.dispersion == "auto":
            return float(rng.exponential())
        return super().draw_prior_dispersion(rng, columns)

    def check_settled(self, purpose: str) -> None:
        """Refuse priors that are learnt: a point estimate tells one dispersion, not columns'."""
        if self.dispersion == "column":
            raise ModelError(
                f"{purpose} takes one dispersion for all cells, and the model has one for every "
                'column; pass dispersion="auto", or draw from the posterior with sample()'
            )
        super().check_settled(purpose)

    @property
    def likelihood(self) -> Likelihood:
        """The negative binomial law, at the dispersion if that is a number."""
        return NegativeBinomial(1.0 if isinstance(self.dispersion, str) else self.dispersion)
