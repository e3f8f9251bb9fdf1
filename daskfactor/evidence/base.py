"""What every estimate of a marginal likelihood gives back, and what every method is given."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import xarray as xr

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.base import Executor
from daskfactor.models.additive import GaussianAdditive
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.progress import OnEvent

AnyModel = TweedieNMF | GaussianAdditive


@dataclass(frozen=True)
class Evidence:
    """An estimate of log p(V), in nats.

    Attributes
    ----------
    value
        The estimate.
    standard_error
        Of the Monte Carlo part: one standard deviation.
    discretization_error
        Size of what is left of the integral over temperatures, or 0 for a method
        without one.
    trace
        What the estimate was made from; for thermodynamic integration, along the
        dim ``temperature``: mean and variance of the log-likelihood, their standard
        errors, effective sample sizes and quadrature weights; for an allocation model
        the posterior mean tables too, such as ``table_r``.
    bound
        Whether the value is a lower bound of log p(V) and not an estimate of it.
    """

    value: float
    standard_error: float
    discretization_error: float
    trace: xr.Dataset
    bound: bool = False

    @property
    def total_error(self) -> float:
        """Both errors together, as one standard deviation: the root of their squares' sum."""
        return math.hypot(self.standard_error, self.discretization_error)

    def __str__(self) -> str:
        if self.bound:
            return f"log evidence at least {self.value:.2f} nats (a variational bound)"
        if not self.total_error:
            return f"log evidence {self.value:.2f} nats (exact)"
        text = f"log evidence {self.value:.2f} ± {self.standard_error:.2f} (Monte Carlo)"
        if self.discretization_error:
            text += f" ± {self.discretization_error:.2f} (discretization)"
        return f"{text} nats"


@dataclass(frozen=True)
class Problem:
    """A factorization problem with nothing left to choose.

    Attributes
    ----------
    data
        The matrix on its grid.
    model
        All of its settings are numbers.
    seed
        Root of all random numbers.
    executor
        Where independent pieces of work are mapped to.
    on_event
        Told how far the work is.
    """

    data: BlockedData
    model: TweedieNMF
    seed: int
    executor: Executor
    on_event: OnEvent


class Method(ABC):
    """A way to compute a marginal likelihood; immutable."""

    @property
    def name(self) -> str:
        return type(self).__name__

    def check(self, model: AnyModel) -> None:
        """Raise ModelError if the method is not right for a model."""
        del model

    def remedy(self, discretization: bool) -> str:
        """Say what makes an error smaller: that of the integral over temperatures, or the other."""
        del discretization
        return "raise draws"

    @abstractmethod
    def estimate(self, problem: Problem) -> Evidence:
        """Log p(V) of a factorization."""

    def estimate_additive(self, x: Any, model: GaussianAdditive, seed: int) -> Evidence:
        """Log p(x) of a `GaussianAdditive`, if the method knows how."""
        raise NotImplementedError
