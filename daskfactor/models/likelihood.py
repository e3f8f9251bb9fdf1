"""Likelihoods: the law of an observation given its mean.

Kernels are compiled from a likelihood's scalar functions (`Likelihood.entry`), and samplers,
predictions and evidences ask it what they need; nothing outside this package looks at the
law itself. `Tweedie` is the law of the models here. Another one is a frozen dataclass that
derives from `Likelihood`, with a model that has it.

Symbols: ``v`` observation, ``mu`` its mean. A likelihood has the density
``exp(-deviance(v, mu) / phi + log_normalizer(v, dispersion))``, with phi as `Likelihood.at`
has it: the dispersion itself, unless that is a number of the law's own.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from daskfactor.errors import DataError

Array = NDArray[np.float64]
Scalar = Any


class Entry(NamedTuple):
    """An observed entry as functions of numbers, of which kernels are made.

    They are compiled, so they hold to what numba knows of Python; results have the type of
    ``mu``. ``w`` is ``weight(v, mu)``. All of them take the law's `numbers`, if it has any, as
    further arguments, in float64.

    weight(v, mu)
        ``w`` in the slope of the log-density: d log p / d mu = (v - mu) w / phi.
    curvature(scale, v, mu, w), ratio(v, mu, w)
        Positive parts of that slope, (ratio - curvature) / phi: what the multiplicative
        update divides by, times ``scale``, and what it multiplies with.
    deviance(v, mu)
        Minus the log-density times phi, with its least value 0.
    fit(v, mu)
        A tuple: minus the deviance but for a function of v, ratio, curvature, in float64.
        With ``zeros="constant"`` the first leaves out -mu and the last is 0, which is what
        zeros have as well. Left out, it is made from the others.
    """

    weight: Callable[..., Scalar]
    curvature: Callable[..., Scalar]
    ratio: Callable[..., Scalar]
    deviance: Callable[..., Scalar]
    fit: Callable[..., Scalar] | None = None


class Frozen:
    """A frozen dataclass, whose attributes are set through ``object``."""

    def _put(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            object.__setattr__(self, name, value)


class Likelihood(Frozen, ABC):
    """The law of an observation given its mean; hashable, and small to pickle.

    Laws that differ in `numbers` alone are equal: the same kernels serve them.

    Attributes
    ----------
    numbers
        Numbers that may change while kernels stay, which take them when they run; one of them
        may be an array, with a number for each column of the block.
    zeros
        How zeros that are not stored add up: the curvature of a zero is 1 at every mean
        (``"constant"``) or the mean itself (``"linear"``), so that column sums or Gram
        matrices of the factors stand for all of them; None: each costs as much as a
        stored entry.
    counts
        Whole numbers have dispersion 1 unless they say otherwise: Poisson counts.
    normal
        The law is normal, and the dispersion the variance at every mean: means and observations
        may have any sign, and cells standard deviations of their own.
    majorizer
        Powers (m, n): with r the ratio of a new entry to the old one, the majoriser of the
        summed deviance has the slope den r^m - num r^n over r.
    exponent
        The power 1 / (m - n) under which the multiplicative update never lets the deviance rise.
    steepest_power
        The largest power of the data or the means that kernels compute with.
    has_density, closed_form
        Whether `log_density` and `sample` are known, and without a series per entry.
    share
        What the log-likelihood of its observations counts, beside that of others.
    """

    numbers: tuple[Any, ...] = ()
    zeros: Literal["constant", "linear"] | None = None
    counts: bool = False
    normal: bool = False
    has_density: bool = True
    closed_form: bool = True
    majorizer: tuple[float, float] = (1.0, 0.0)
    exponent: float = 1.0
    steepest_power: float = 2.0
    share: float = 1.0

    def information(self, mean: float) -> float:
        """Return the Fisher information of an observation about the logarithm of this mean.

        1 of laws whose dispersion the data have to tell, and which has a unit.
        """
        return mean if self.counts else 1.0

    def of(self, block: tuple[int, ...]) -> "Likelihood":
        """Give the law of the entries of a block, (row band, column band)."""
        return self

    def sums(self, block: tuple[int, ...], fit: Array) -> Array:
        """Give a block's sums of fit, as `Evaluation` adds them up over blocks.

        They are minus the divergence, by the law's share, and Pearson's statistic.
        """
        return fit

    def shared(self, share: float) -> Self:
        """Give the same law with a share; the same kernels serve it."""
        made = copy.copy(self)
        made._put(share=float(share))
        return made

    def visits_all(self, zeros: bool) -> bool:
        """Tell whether cells that sparse data do not store are visited, if those are ``zeros``."""
        return zeros and self.zeros is None

    def at(self, dispersion: Any) -> tuple["Likelihood", float]:
        """Give the law at a dispersion, and φ, which divides its divergences.

        The dispersion is φ itself, or one of the law's `numbers`, and φ is 1; then columns may
        have one each, (J,).
        """
        return self, dispersion

    @abstractmethod
    def __str__(self) -> str:
        """Name the law as sentences do, such as ``beta=1``."""

    @abstractmethod
    def entry(self, arithmetic: Any) -> Entry:
        """Make the scalar functions; ``arithmetic`` has log, expm1, power, split, log_tail."""

    def check_values(self, minimum: float, maximum: float) -> None:
        """Refuse data that the law cannot have produced; missing entries are left out.

        Raises
        ------
        DataError
            If a value is not finite, or not one of the law's.
        """
        if not (np.isfinite(minimum) and np.isfinite(maximum)):
            raise DataError(
                f"the data must be finite, got values from {minimum} to {maximum}; "
                "mark missing entries with NaN or a mask and remove infinities"
            )

    @abstractmethod
    def deviance(self, v: ArrayLike, mu: ArrayLike) -> Array:
        """Return the divergence of observations from their means, element by element."""

    @abstractmethod
    def variance(self, mu: ArrayLike, dispersion: float) -> Array:
        """Return the variance of an observation."""

    @abstractmethod
    def log_normalizer(self, v: ArrayLike, dispersion: Any) -> Array:
        """Return the part of the log-density without the mean; minus infinity off the support.

        Under a normal law each observation may have a dispersion of its own.
        """

    @abstractmethod
    def sample(self, rng: np.random.Generator, mu: ArrayLike, dispersion: float) -> Array:
        """Draw one observation for every mean; ``rng`` is advanced."""

    @abstractmethod
    def interval(
        self, mean: ArrayLike, variance_of_mean: ArrayLike, dispersion: float, level: float = 0.9
    ) -> tuple[Array, Array]:
        """Return the equal-tailed interval of a new observation whose mean is uncertain."""

    def log_density(self, v: ArrayLike, mu: ArrayLike, dispersion: float) -> Array:
        """Return the logarithm of the normalised density, element by element."""
        base, (law, phi) = self.log_normalizer(v, dispersion), self.at(dispersion)
        with np.errstate(invalid="ignore"):
            value = base - law.deviance(v, mu) / phi
        return np.where(base == -np.inf, -np.inf, value)

    def spacing(self, dispersion: Any) -> Any:
        """Return the spacing of possible values of an observation; 1 for continuous ones, too.

        A density over it is one for each unit of v, which dispersions can be compared by.
        """
        return 1.0

    def observation_variance(
        self, mean: ArrayLike, variance_of_mean: ArrayLike, dispersion: float
    ) -> Array:
        """Return the total variance of a new observation: that of its mean plus the likelihood's.

        Exact where the law's variance is linear in the mean or constant. Else it leaves out
        what the curvature of the variance adds; putting that in moved the coverage of
        `interval` further above its level for beta = 0 and -1.
        """
        return np.asarray(variance_of_mean, dtype=np.float64) + self.variance(mean, dispersion)

    def fit_constant(self, values: Array) -> float:
        """Sum over observations of what `Entry.fit` leaves out of minus the deviance."""
        return 0.0

    def floor(self, typical: float) -> float:
        """Return the smallest mean at which gradients are taken, for data of this typical size."""
        return 1e-6 * typical
