"""The verb ``log_evidence``, the interface of its methods, and their result, `Evidence`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Unpack

import xarray as xr

from daskfactor import markup
from daskfactor.data.opening import ANYTHING, refuse_options
from daskfactor.data.tables import ReadOptions
from daskfactor.errors import ModelError, OptionError
from daskfactor.evidence.call_store import CallStore, call_store, identity_of
from daskfactor.executors import Choice, Executor
from daskfactor.inference.base import Algorithm
from daskfactor.inference.point import chosen_dispersion
from daskfactor.inference.registry import algorithms, requested_algorithm
from daskfactor.inference.sampling import PathText
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
        One standard deviation of the Monte Carlo part.
    discretization_error
        Size of the error of the integral over temperatures, or 0 for a method
        without one.
    trace
        Intermediate results; for thermodynamic integration, along the
        dim ``temperature``: mean and variance of the log-likelihood, their standard
        errors, effective sample sizes and quadrature weights; for an allocation model
        the posterior mean tables too, such as ``table_r``.
    bound
        True if the value is a lower bound of log p(V) and not an estimate of it.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> X = np.array([[2, 1], [0, 1]])
    >>> model = dfac.AllocationModel.nmf(1)
    >>> evidence = dfac.log_evidence(X, model, dfac.Enumeration(), progressbar=False)
    >>> print(evidence)
    log evidence -7.98 nats (exact)
    >>> evidence.total_error, evidence.bound
    (0.0, False)
    """

    value: float
    standard_error: float
    discretization_error: float
    trace: xr.Dataset
    bound: bool = False

    @property
    def total_error(self) -> float:
        """Standard deviation of both errors together: the root of the sum of their squares."""
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
            (str(name), f"{float(values.min()):.4g}", f"{float(values.max()):.4g}")
            for name, values in self.trace.data_vars.items()
            if values.dtype.kind == "f" and values.size
        ]
        made_from = markup.table(rows, ("trace", "least", "largest"), numbers=(1, 2))
        return markup.titled(str(self), markup.collapsible("made from", made_from) if rows else "")


@dataclass(frozen=True)
class EvidenceProblem:
    """Data and a model whose settings are all numbers.

    Attributes
    ----------
    data
        By the model's ``evidence_data``: a matrix on its grid (`BlockedData`), a vector of
        observations, or `Counts`.
    model
        All of its settings are numbers.
    seed
        Root of all random numbers.
    executor
        Runs independent pieces of work.
    on_event
        Called with progress.
    store, piece
        Store of the checkpoints, and the name of this evidence there.
    """

    data: Any
    model: Any
    seed: int
    executor: Executor
    on_event: OnEvent
    store: CallStore | None = None
    piece: str = ""

    def map(
        self,
        function: Any,
        items: Sequence[Any],
        name: str = "evidence",
        message: Callable[[Any], str] = lambda result: "",
    ) -> list[Any]:
        """Return ``function(item, workspace)`` of all items, and report progress.

        ``name`` is for a cluster's dashboard, ``message`` describes a result.
        """
        if self.executor.in_process:  # other processes cannot report
            function = counted(function, len(items), self.on_event, message)
        return self.executor.map(function, items, name)


class EvidenceMethod(Algorithm, ABC):
    """Method to compute a marginal likelihood; immutable.

    ``suits``: ``evidence_data`` of the models that it is for. ``resumes``: it makes checkpoints.
    """

    suits: ClassVar[tuple[str, ...]] = ("matrix",)
    resumes: ClassVar[bool] = False

    def read(self, V: Any, model: Any, options: ReadOptions = ANYTHING) -> tuple[Any, str]:
        """Read data that are no matrix, and describe their size."""
        refuse_options(V, options)
        x = model.check_observations(V)
        return x, f"{x.size} observations"

    def check(self, model: Any) -> None:
        """Raise ModelError if the method is not right for a model of the kind that it suits."""
        del model

    def remedy(self, discretization: bool) -> str:
        """Return advice that reduces the error of the integral over temperatures, or the other."""
        del discretization
        return "raise draws"

    @abstractmethod
    def estimate(self, problem: EvidenceProblem) -> Evidence:
        """Estimate log p(data)."""


@verb
def log_evidence(
    V: Any,
    model: Any,
    method: EvidenceMethod | None = None,
    *,
    random_seed: int | None = None,
    store: PathText | None = None,
    **options: Unpack[OnMatrix],
) -> Evidence:
    r"""Estimate the log marginal likelihood of data: log p(V) = log ∫ p(V | W, H) p(W, H) dW dH.

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
    store
        Directory for checkpoints of :class:`ThermodynamicIntegration`: after a kill the same call,
        with the same store, goes on from the last one, to the same estimate.
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
    StoreError
        If the store is of another call, or cannot be written.

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
    >>> evidence = dfac.log_evidence(V, model, dfac.Chib(500, 200), **run)
    >>> evidence.value < 0, evidence.total_error > 0
    (True, True)
    """
    method = checked_method(method, model)
    if store is not None and not method.resumes:
        raise OptionError(
            f"store= keeps the chains of ThermodynamicIntegration(), and {method.name}() has "
            "none that go on; leave store out"
        )
    with call_store(store) as open_store:
        return estimate_evidence(V, model, method, random_seed, open_store, **options)


def estimate_evidence(
    V: Any,
    model: Any,
    method: EvidenceMethod,
    random_seed: int | None,
    store: CallStore | None,
    piece: str = "",
    **options: Unpack[OnMatrix],
) -> Evidence:
    """Estimate an evidence; with a ``piece`` it is a part of the call that the store is of."""
    matrix = model.evidence_data == "matrix"
    running, reading = split(options)
    columns = ANYTHING if matrix else read_options(model, reading)
    seed = random_seed if store is None else store.seed(random_seed)
    with (
        session(V, model, random_seed=seed, **options)
        if matrix
        else session_of(lambda _: method.read(V, model, columns), _choose, seed, **running)
    ) as run:
        if store is not None and not piece:
            call = identity_of(run.data, model) | {"method": method.to_dict()}
            store.begin(function="log_evidence", **call, random_seed=run.seed)
        if matrix:
            model = model.placed(run.data.placed)
            phi = chosen_dispersion(run.data, model, run.seed, run.executor)
            hyper = model.resolve(run.data.level, phi)
            model = replace(model, **hyper._asdict())
        problem = EvidenceProblem(
            run.data, model, run.seed, run.executor, run.on_event, store, piece
        )
        return run.executor.retry_on_loss(partial(method.estimate, problem))


def checked_method(method: object, model: Any) -> EvidenceMethod:
    """Return the method, or the model's default; refuse one that is not for the model.

    Raises
    ------
    OptionError
        If the model has no evidence, or the method is no method.
    ModelError
        If they do not go together.
    """
    if getattr(model, "evidence_data", None) is None or isinstance(model, type):
        raise OptionError(
            "model must be a TweedieNMF, a NegativeBinomialNMF, a CP, an AllocationModel "
            f"or a GaussianAdditive, got {model!r}; compare others by hold_out() and predict()"
        )
    default = model.default_evidence
    chosen: EvidenceMethod = requested_algorithm(EvidenceMethod, method, default, "method")
    if model.evidence_data not in chosen.suits:
        kinds = algorithms(EvidenceMethod).items()
        names = (name for name, kind in kinds if model.evidence_data in kind.suits)
        right = sorted(names, key=lambda name: name != default)
        raise ModelError(
            f"{chosen.name}() does not give the evidence of {type(model).__name__}; use "
            f"{' or '.join(f'{name}()' for name in right)}, or leave method out for the first one"
        )
    model.check_settled(chosen.name)
    chosen.check(model)
    return chosen


def _choose(client: Any, data: Any) -> Choice:
    """Choose tasks, because the pieces of work are independent of each other."""
    del client, data
    return Choice("tasks", "the pieces of work are independent", "independent pieces")


def read_options(model: Any, reading: Mapping[str, Any]) -> ReadOptions:
    """Return the columns to read of data that are no matrix; refuse options of a matrix."""
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
    return ReadOptions.of(reading)
