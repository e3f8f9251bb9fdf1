"""Non-negative matrix factorization under a Tweedie law (Şimşekli et al. 2017, section 2)."""

import operator
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from daskfactor.errors import DataError, ModelError
from daskfactor.models.divergence import check_beta
from daskfactor.models.priors import exponential_log_density

Auto = Literal["auto"]


class Hyperparameters(NamedTuple):
    """The numbers that ``"auto"`` was resolved to.

    ``dispersion`` has the unit of the data to the power beta; ``rate_w`` and
    ``rate_h`` are the rates of the exponential priors.
    """

    dispersion: float
    rate_w: float
    rate_h: float


@dataclass(frozen=True)
class TweedieNMF:
    r"""Tweedie non-negative matrix factorization with exponential priors.

    .. math:: v_{ij} \sim \mathrm{Tweedie}_\beta(\mu_{ij}, \phi), \quad \mu = W H, \quad
        w_{ik} \sim \mathrm{Exp}(\lambda_w), \quad h_{kj} \sim \mathrm{Exp}(\lambda_h)

    Parameters
    ----------
    n_components
        Number of components K, at least 1.
    beta
        Power of the law: 2 Gaussian, 1 Poisson, 0 gamma, between 0 and 1 compound
        Poisson; anything outside the open interval (1, 2).
    dispersion
        Dispersion phi: the variance of an observation is ``phi * mu**(2 - beta)``.
        ``"auto"`` estimates it from the data.
    rate_w, rate_h
        Rates of the exponential priors on W and H. ``"auto"`` makes the prior
        mean of ``mu`` equal to the mean of the data.

    Raises
    ------
    ModelError
        If one of them is not allowed.

    References
    ----------
    Şimşekli et al. 2017, section 2; Şimşekli et al. 2015, section 4.
    """

    n_components: int
    _: KW_ONLY
    beta: float = 1.0
    dispersion: float | Auto = "auto"
    rate_w: float | Auto = "auto"
    rate_h: float | Auto = "auto"

    def __post_init__(self) -> None:
        # A frozen dataclass is set through object: NumPy numbers become plain ones here,
        # so that two equal models compare equal and can be written as JSON.
        object.__setattr__(self, "n_components", _checked_count(self.n_components))
        object.__setattr__(self, "beta", check_beta(self.beta))
        for name in ("dispersion", "rate_w", "rate_h"):
            object.__setattr__(self, name, _checked_positive(name, getattr(self, name)))

    @property
    def width(self) -> int:
        """Columns of the factors: one for each component."""
        return self.n_components

    def to_dict(self) -> dict[str, Any]:
        """The model as plain JSON values, with its class under ``"type"``."""
        return {"type": type(self).__name__} | {
            field.name: getattr(self, field.name) for field in fields(self)
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
        known = {field.name for field in fields(cls)}
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

    def check_values(self, minimum: float, maximum: float) -> None:
        """Refuse data that this law cannot have produced.

        With beta = 2 negative values are accepted, because Gaussian noise around a
        small mean is negative now and then. The fit itself stays non-negative:
        structure below zero ends up in the residual.

        Parameters
        ----------
        minimum, maximum
            Over the observed entries (missing ones left out).

        Raises
        ------
        DataError
            If a value is not finite, negative with beta other than 2, or zero
            with beta <= 0.
        """
        if not (np.isfinite(minimum) and np.isfinite(maximum)):
            raise DataError(
                f"the data must be finite, got values from {minimum} to {maximum}; "
                "mark missing entries with NaN or a mask and remove infinities"
            )
        if minimum < 0 and self.beta != 2.0:
            raise DataError(
                f"beta={self.beta:g} allows no negative data, got a smallest value of {minimum:g}; "
                "mask or shift the negative values, or use beta=2"
            )
        if minimum == 0 and self.beta <= 0.0:
            raise DataError(
                f"beta={self.beta:g} allows positive data only, got a smallest value of 0; "
                "mark the zeros as missing, add a small offset, or use 0 < beta <= 1"
            )

    def log_prior(self, W: ArrayLike, H: ArrayLike, rate_w: float, rate_h: float) -> float:
        """Log-density of both factors under their exponential priors.

        Parameters
        ----------
        W, H
            Row and column factor, either way up; minus infinity if an entry is negative.
        rate_w, rate_h
            Rates, resolved (see `resolve`).

        References
        ----------
        Şimşekli et al. 2017, section 2.
        """
        return exponential_log_density(W, rate_w) + exponential_log_density(H, rate_h)

    def auto_rate(self, mean: float) -> float:
        """Rate ``sqrt(K / mean)`` for both priors, under which ``mu`` has the mean of the data.

        Raises
        ------
        DataError
            If the mean of the data is not positive.
        """
        if not 0.0 < mean < np.inf:
            raise DataError(
                f"cannot choose prior rates for data of mean {mean:g}: it must be positive; "
                "pass rate_w and rate_h as numbers, or check that the data are not all zero"
            )
        return float(np.sqrt(self.n_components / mean))

    def resolve(self, mean: float, dispersion: float) -> Hyperparameters:
        """Replace every ``"auto"`` by a number.

        Fixed settings win. If one rate is fixed, the other is ``K / (mean * fixed)``, so
        that the prior mean of ``mu``, ``K / (rate_w * rate_h)``, is the mean of the data.

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
        phi = dispersion if self.dispersion == "auto" else self.dispersion
        phi = _checked_number("dispersion", phi)
        rate_w, rate_h = self.rate_w, self.rate_h
        if rate_w == "auto" and rate_h == "auto":
            rate_w = rate_h = self.auto_rate(mean)
        elif rate_w == "auto":
            rate_w = self.auto_rate(mean) ** 2 / float(rate_h)
        elif rate_h == "auto":
            rate_h = self.auto_rate(mean) ** 2 / float(rate_w)
        return Hyperparameters(phi, float(rate_w), float(rate_h))


def _checked_count(value: Any) -> int:
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


def _checked_positive(name: str, value: Any) -> float | Auto:
    if isinstance(value, str):
        if value == "auto":
            return "auto"
        raise ModelError(f'{name} must be a positive number or "auto", got {value!r}')
    return _checked_number(name, value)


def _checked_number(name: str, value: Any) -> float:
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
