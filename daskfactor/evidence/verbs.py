"""The public verb ``log_evidence``, and how a model's settings are fixed for it."""

from typing import Any

from daskfactor.errors import ModelError, OptionError
from daskfactor.evidence.allocation import AllocationMethod, SequentialMonteCarlo
from daskfactor.evidence.allocation_runs import allocation_evidence
from daskfactor.evidence.base import AnyModel, Evidence, Method, Problem
from daskfactor.evidence.chains import without_choices
from daskfactor.evidence.thermodynamic import ThermodynamicIntegration
from daskfactor.executors import Executor
from daskfactor.inference.point import chosen_dispersion
from daskfactor.inference.session import session, verb
from daskfactor.models.additive import GaussianAdditive
from daskfactor.models.allocation import AllocationModel
from daskfactor.progress import OnEvent
from daskfactor.random import resolve_seed

EvidenceModel = AnyModel | AllocationModel


@verb
def log_evidence(
    V: Any,
    model: EvidenceModel,
    method: Method | None = None,
    *,
    random_seed: int | None = None,
    progressbar: bool = True,
    client: Any = None,
    blocks: int | None = None,
    unstored: str | None = None,
    executor: str | Executor = "auto",
    callback: OnEvent | None = None,
) -> Evidence:
    r"""Log marginal likelihood of data: log p(V) = log ∫ p(V | W, H) p(W, H) dW dH.

    Parameters
    ----------
    V : array (I, J)
        As for :func:`sample`; for a :class:`GaussianAdditive` a vector of observations;
        for an :class:`AllocationModel` counts of any number of dimensions, dense or sparse,
        of which what is not stored is zero.
    model
        A :class:`TweedieNMF` (beta = 2, 0, -1 or 0 < beta <= 1), a
        :class:`GaussianAdditive` or an :class:`AllocationModel`.
    method
        :class:`ThermodynamicIntegration` by default, or :class:`Chib`; for an
        :class:`AllocationModel` :class:`SequentialMonteCarlo` by default, or
        :class:`VariationalBayes`, :class:`Enumeration`.
    random_seed
        Any whole number; the same seed gives the same estimate on every executor.
    progressbar, client, blocks, unstored, executor, callback
        As for :func:`sample`. What is spread over lanes or workers are whole chains, one
        for each temperature; islands of particles or starts for an
        :class:`AllocationModel`, which has no use for ``blocks``.

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
    """
    check_evidence_model(model)
    method = checked_method(method, model)
    seed = resolve_seed(random_seed)
    if isinstance(model, AllocationModel):
        assert isinstance(method, AllocationMethod)
        refuse_blocks(blocks)
        return allocation_evidence(
            V,
            model,
            method,
            seed,
            unstored=unstored,
            client=client,
            executor=executor,
            progressbar=progressbar,
            callback=callback,
        )
    if isinstance(model, GaussianAdditive):
        return method.estimate_additive(V, model, seed)
    with session(
        V,
        model,
        blocks,
        unstored,
        random_seed=seed,
        progressbar=progressbar,
        client=client,
        executor=executor,
        callback=callback,
    ) as run:
        phi = chosen_dispersion(run.data, model, seed, run.executor)
        decided = without_choices(model, run.data, phi)
        return method.estimate(Problem(run.data, decided, seed, run.executor, run.on_event))


def check_evidence_model(model: object) -> None:
    """Refuse what no evidence is known of."""
    if not isinstance(model, EvidenceModel):
        raise OptionError(
            "an evidence is known of a TweedieNMF(n_components=...), of an AllocationModel and of "
            f"a GaussianAdditive, got {model!r}"
        )


def checked_method(method: object, model: EvidenceModel) -> Method:
    """The method, or the usual one; refuses one that is not for the model."""
    counts = isinstance(model, AllocationModel)
    if method is None:
        return SequentialMonteCarlo() if counts else ThermodynamicIntegration()
    if not isinstance(method, Method):
        raise OptionError(
            f"method must be an estimate of evidence such as ThermodynamicIntegration(), got "
            f"{method!r}"
        )
    if isinstance(method, AllocationMethod) != counts:
        right = (
            "SequentialMonteCarlo(), VariationalBayes() or Enumeration()"
            if counts
            else "ThermodynamicIntegration()"
        )
        kind = type(model).__name__
        raise ModelError(
            f"{method.name}() does not give the evidence of {_article(kind)} {kind}; use {right}, "
            "or leave method out for the right one"
        )
    if not isinstance(model, AllocationModel):
        method.check(model)
    return method


def refuse_blocks(blocks: int | None) -> None:
    """An allocation model knows tokens, and no blocks."""
    if blocks is not None:
        raise OptionError(
            f"blocks={blocks!r} does not go with an AllocationModel, whose counts are taken token "
            "by token; leave it out"
        )


def _article(kind: str) -> str:
    return "an" if kind[0] in "AEIOU" else "a"
