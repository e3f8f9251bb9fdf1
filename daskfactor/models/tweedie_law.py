"""Tweedie laws: one likelihood for every power beta that has one."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from daskfactor.errors import DataError
from daskfactor.models import divergence, predictive
from daskfactor.models.entry import tweedie_entry
from daskfactor.models.likelihood import Array, Entry, Likelihood

_CLOSED = (2.0, 1.0, 0.5, 0.0, -1.0)


@dataclass(frozen=True)
class Tweedie(Likelihood):
    """The law with the variance ``phi * mu**(2 - beta)``.

    Parameters
    ----------
    beta
        Power: 2 Gaussian, 1 Poisson, between 0 and 1 compound Poisson of gammas, 0 gamma,
        -1 inverse Gaussian; anything outside the open interval (1, 2).

    Raises
    ------
    ModelError
        If no Tweedie law has this beta.
    """

    beta: float

    def __post_init__(self) -> None:
        beta = divergence.check_beta(self.beta)
        zeros = {1.0: "constant", 2.0: "linear"}.get(beta)
        settings: dict[str, Any] = {"beta": beta, "zeros": zeros, "counts": beta == 1.0}
        settings |= {"real_valued": beta == 2.0, "closed_form": beta in _CLOSED}
        settings |= {"has_density": divergence.has_density(beta)}
        settings |= {"majorizer": (1.0, beta - 1.0) if beta <= 1.0 else (beta, 1.0)}
        for name, value in settings.items():  # a frozen dataclass is set through object
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return f"beta={self.beta:g}"

    @property
    def exponent(self) -> float:
        return 1.0 / (2.0 - self.beta) if self.beta < 1.0 else 1.0 / max(self.beta - 1.0, 1.0)

    @property
    def steepest_power(self) -> float:
        return max(2.0, abs(2.0 - self.beta))

    def entry(self, arithmetic: Any) -> Entry:
        return tweedie_entry(self.beta, arithmetic)

    def unit(self, mean: float) -> float:
        return float(mean ** (2.0 - self.beta))

    def floor(self, typical: float) -> float:
        return (1e-6 if self.beta > 0 else 1e-9) * typical

    def check_values(self, minimum: float, maximum: float) -> None:
        """Refuse data that this law cannot have produced.

        With beta = 2 negative values are accepted, because Gaussian noise around a
        small mean is negative now and then.

        Raises
        ------
        DataError
            If a value is not finite, negative with beta other than 2, or zero
            with beta <= 0.
        """
        super().check_values(minimum, maximum)
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

    def deviance(self, v: ArrayLike, mu: ArrayLike) -> Array:
        return divergence.divergence(v, mu, self.beta)

    def variance(self, mu: ArrayLike, dispersion: float) -> Array:
        return divergence.variance(mu, dispersion, self.beta)

    def log_normalizer(self, v: ArrayLike, dispersion: float) -> Array:
        return divergence.log_normalizer(v, dispersion, self.beta)

    def sample(self, rng: np.random.Generator, mu: ArrayLike, dispersion: float) -> Array:
        return divergence.sample(rng, mu, dispersion, self.beta)

    def interval(
        self, mean: ArrayLike, variance_of_mean: ArrayLike, dispersion: float, level: float = 0.9
    ) -> tuple[Array, Array]:
        return predictive.observation_interval(mean, variance_of_mean, dispersion, self.beta, level)

    def fit_constant(self, values: Array) -> float:
        constant = -float(self.deviance(values, np.ones(1)).sum())
        if self.beta == 1.0:
            return constant + values.size
        if self.beta == 0.0:
            return constant + float(values.sum())
        return constant - float((values / (self.beta - 1) - 1 / self.beta).sum())


POISSON, NORMAL = Tweedie(1.0), Tweedie(2.0)
