"""The verb ``log_evidence``, the interface of its methods, and the `Evidence` that they give."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Unpack

import xarray as xr

from daskfactor import markup
from daskfactor.data.files import ANYTHING, refuse_columns
from daskfactor.data.tables import Wanted
from daskfactor.errors import ModelError, OptionError
from daskfactor.executors import Choice, Executor
from daskfactor.inference.base import Algorithm
from daskfactor.inference.point import chosen_dispersion
from daskfactor.inference.registry import algorithms, requested_algorithm
from daskfactor.inference.session import session, session_of
from daskfactor.options import OnMatrix, split, verb
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

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> X = np.array([[2, 1], [0, 1]])
    >>> model = dfac.AllocationModel.nmf(1)
    >>> found = dfac.log_evidence(X, model, dfac.Enumeration(), progressbar=False)
    >>> print(found)
    log evidence -7.98 nats (exact)
    >>> found.total_error, found.bound
    (0.0, False)
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

    def _repr_html_(self) -> str:
        rows = [
            (str(name), *(f"{part:.4g}" for part in (own.min(), own.max())))
            for name, own in self.trace.data_vars.items()
            if own.dtype.kind == "f" and own.size
        ]
        made_from = markup.table(rows, ("trace", "least", "largest"), numbers=(1, 2))
        return markup.titled(str(self), markup.collapsible("made from", made_from) if rows else "")


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


class EvidenceMethod(Algorithm, ABC):
    """A way to compute a marginal likelihood; immutable.

    ``suits``: what the ``evidence_data`` of models may be that it is for.
    """

    suits: ClassVar[tuple[str, ...]] = ("matrix",)

    def read(self, V: Any, model: Any, wanted: Wanted = ANYTHING) -> tuple[Any, str]:
        """Read data that are no matrix, and say how large they are."""
        refuse_columns(V, wanted)
        x = model.check_observations(V)
        return x, f"{x.size} observations"

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


@verb
def log_evidence(
    V: Any,
    model: Any,
    method: EvidenceMethod | None = None,
    *,
    random_seed: int | None = None,
    **options: Unpack[OnMatrix],
) -> Evidence:
    r"""Log marginal likelihood of data: log p(V) = log ∫ p(V | W, H) p(W, H) dW dH.

    Parameters
    ----------
    V : array (I, J)
        As for :func:`sample`; for a :class:`GaussianAdditive` a vector of observations;
        for an :class:`AllocationModel` counts of any number of dimensions, dense or sparse,
        of which what is not stored is zero.
    model
        A :class:`TweedieNMF` or a :class:`CP` (beta = 2, 0, -1 or 0 < beta <= 1), a
        :class:`GaussianAdditive` or an :class:`AllocationModel`.
    method
        :class:`ThermodynamicIntegration` by default, or :class:`Chib`; for an
        :class:`AllocationModel` :class:`SequentialMonteCarlo` by default, or
        :class:`VariationalBayes`, :class:`Enumeration`.
    random_seed
        Any whole number; the same seed gives the same estimate on every executor.
    options
        Where it runs, and how V is read, as for :func:`sample`; only a matrix has a use for
        ``blocks`` and ``unstored``. What is
        spread over threads or workers are whole chains, one for each temperature, or
        batches of particles, or starts.

    Returns
    -------
    Evidence
        ``value``, ``standard_error`` and ``discretization_error`` in nats, ``trace``.

    Raises
    ------
    DataError, ModelError, OptionError
        If data, model or method cannot be used.

    Notes
    -----
    Evidences can be compared only if they are of the same data under priors and a
    dispersion that are the same everywhere within each model. So ``"auto"`` settings are
    turned into numbers once, before the first chain, and are the same at all
    temperatures: prior rates from K and the mean of the data (that is part of what a
    model with K components is: the prior mean of μ is the data's at every K), and the
    dispersion 1 for whole-number data under beta = 1 (Poisson), otherwise Pearson's
    estimate at a point fit of this model. That last one depends on K: to compare ranks
    pass one number, as :func:`select_rank` does for you. Whatever is estimated from the
    data makes the evidence an empirical Bayes one, slightly too large.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (4, 3))
    >>> model = dfac.TweedieNMF(1, dispersion=1)
    >>> run = {"random_seed": 0, "progressbar": False}
    >>> found = dfac.log_evidence(V, model, dfac.Chib(500, 200), **run)
    >>> found.value < 0, found.total_error > 0
    (True, True)
    """
    method = checked_method(method, model)
    matrix = model.evidence_data == "matrix"
    running, reading = split(options)
    wanted = ANYTHING if matrix else wanted_of(model, reading)
    with (
        session(V, model, random_seed=random_seed, **options)
        if matrix
        else session_of(lambda _: method.read(V, model, wanted), _suits, random_seed, **running)
    ) as run:
        if matrix:
            model = model.placed(run.data.placed)
            phi = chosen_dispersion(run.data, model, run.seed, run.executor)
            hyper = model.resolve(run.data.level, phi)
            model = replace(model, **hyper._asdict())
        problem = EvidenceProblem(run.data, model, run.seed, run.executor, run.on_event)
        return run.executor.until_kept(partial(method.estimate, problem))


def checked_method(method: object, model: Any) -> EvidenceMethod:
    """Return the method, or the model's usual one; refuse one that is not for the model.

    Raises
    ------
    OptionError
        If no evidence is known of the model, or the method is none.
    ModelError
        If they do not go together.
    """
    if getattr(model, "evidence_data", None) is None or isinstance(model, type):
        raise OptionError(
            "an evidence is known of a TweedieNMF, a NegativeBinomialNMF, a CP, an AllocationModel "
            f"and a GaussianAdditive, got {model!r}; compare others by hold_out() and predict()"
        )
    usual = model.default_evidence
    found: EvidenceMethod = requested_algorithm(EvidenceMethod, method, usual, "method")
    if model.evidence_data not in found.suits:
        kinds = algorithms(EvidenceMethod).items()
        names = (name for name, kind in kinds if model.evidence_data in kind.suits)
        right = sorted(names, key=lambda name: name != model.default_evidence)
        raise ModelError(
            f"{found.name}() does not give the evidence of {type(model).__name__}; use "
            f"{' or '.join(f'{name}()' for name in right)}, or leave method out for the first one"
        )
    model.check_settled(found.name)
    found.check(model)
    return found


def _suits(client: Any, data: Any) -> Choice:
    """Tasks: what is spread over workers are pieces of work that know nothing of each other."""
    del client, data
    return Choice("tasks", "the pieces of work are independent", "independent pieces")


def wanted_of(model: Any, reading: Mapping[str, Any]) -> Wanted:
    """What is to be read of data that are no matrix on a grid; refuses options of such a matrix."""
    name = type(model).__name__
    if reading.get("blocks") is not None:
        raise OptionError(
            f"blocks={reading['blocks']!r} does not go with {name}, whose data are not cut into "
            "blocks; leave it out"
        )
    if reading.get("unstored") not in (None, "zero"):
        raise OptionError(
            f"unstored={reading['unstored']!r} does not go with {name}, which has no missing "
            "cells: what its data do not store is zero; leave it out"
        )
    return Wanted.of(reading)
