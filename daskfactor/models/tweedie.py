"""Non-negative matrix factorization under a Tweedie law (Şimşekli et al. 2017, section 2)."""

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from daskfactor.errors import DataError
from daskfactor.models.divergence import check_beta
from daskfactor.models.priors import exponential_log_density
from daskfactor.models.settings import (
    Auto,
    StoredModel,
    checked_count,
    checked_number,
    checked_positive,
)


class Hyperparameters(NamedTuple):
    """The numbers that ``"auto"`` was resolved to.

    ``dispersion`` has the unit of the data to the power beta; ``rate_w`` and
    ``rate_h`` are the rates of the exponential priors.
    """

    dispersion: float
    rate_w: float
    rate_h: float


@dataclass(frozen=True)
class TweedieNMF(StoredModel):
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
        object.__setattr__(self, "n_components", checked_count(self.n_components))
        object.__setattr__(self, "beta", check_beta(self.beta))
        for name in ("dispersion", "rate_w", "rate_h"):
            object.__setattr__(self, name, checked_positive(name, getattr(self, name)))

    @property
    def width(self) -> int:
        """Columns of the factors: one for each component."""
        return self.n_components

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
        phi = checked_number("dispersion", phi)
        rate_w, rate_h = self.rate_w, self.rate_h
        if rate_w == "auto" and rate_h == "auto":
            rate_w = rate_h = self.auto_rate(mean)
        elif rate_w == "auto":
            rate_w = self.auto_rate(mean) ** 2 / float(rate_h)
        elif rate_h == "auto":
            rate_h = self.auto_rate(mean) ** 2 / float(rate_w)
        return Hyperparameters(phi, float(rate_w), float(rate_h))
