"""The interface of methods: what they are given, and the `Evidence` that they give back."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import xarray as xr

from daskfactor.executors.base import Executor
from daskfactor.progress import OnEvent, counted


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
class EvidenceProblem:
    """Data under a model, with nothing left to choose.

    Attributes
    ----------
    data
        What the model's ``evidence_data`` says: a matrix on its grid (`BlockedData`), a
        vector of observations, or `Counts`.
    model
        All of its settings are numbers.
    seed
        Root of all random numbers.
    executor
        Where independent pieces of work are mapped to.
    on_event
        Told how far the work is.
    """

    data: Any
    model: Any
    seed: int
    executor: Executor
    on_event: OnEvent

    def map(
        self,
        function: Any,
        items: Sequence[Any],
        name: str = "evidence",
        told: Callable[[Any], str] = lambda found: "",
    ) -> list[Any]:
        """Return ``function(item, workspace)`` of all items, telling of every one that is done.

        ``name`` is for a cluster's dashboard, ``told`` says more of what was found.
        """
        if self.executor.in_process:  # from elsewhere nobody could hear it
            function = counted(function, len(items), self.on_event, told)
        return self.executor.map(function, items, name)


class EvidenceMethod(ABC):
    """A way to compute a marginal likelihood; immutable.

    ``suits``: what the ``evidence_data`` of models may be that it is for.
    """

    suits: ClassVar[tuple[str, ...]] = ("matrix",)

    @property
    def name(self) -> str:
        return type(self).__name__

    def check(self, model: Any) -> None:
        """Raise ModelError if the method is not right for a model that it suits in kind."""
        del model

    def remedy(self, discretization: bool) -> str:
        """Say what makes an error smaller: that of the integral over temperatures, or the other."""
        del discretization
        return "raise draws"

    @abstractmethod
    def estimate(self, problem: EvidenceProblem) -> Evidence:
        """Log p(data)."""
