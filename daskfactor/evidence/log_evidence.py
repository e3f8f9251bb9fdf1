"""The public verb ``log_evidence``, and the problem that it hands to a method."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Unpack

import daskfactor
from daskfactor.allocation.counts import as_counts
from daskfactor.errors import ModelError, OptionError
from daskfactor.evidence.base import Evidence, EvidenceMethod, EvidenceProblem
from daskfactor.executors import Executor
from daskfactor.executors.choice import Choice
from daskfactor.inference.point import chosen_dispersion
from daskfactor.inference.session import Options, session, session_of, verb
from daskfactor.progress import OnEvent


@verb
def log_evidence(
    V: Any,
    model: Any,
    method: EvidenceMethod | None = None,
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
        As for :func:`sample`; only a matrix has a use for ``blocks`` and ``unstored``. What is
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
    """
    method = checked_method(method, model)
    with _opened(
        V,
        model,
        blocks,
        unstored,
        random_seed=random_seed,
        progressbar=progressbar,
        client=client,
        executor=executor,
        callback=callback,
    ) as problem:
        return method.estimate(problem)


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
            "an evidence is known of a TweedieNMF(n_components=...), of an AllocationModel and of "
            f"a GaussianAdditive, got {model!r}"
        )
    if method is None:
        method = getattr(daskfactor, model.default_evidence)()
    if not isinstance(method, EvidenceMethod):
        raise OptionError(
            f"method must be an estimate of evidence such as ThermodynamicIntegration(), got "
            f"{method!r}"
        )
    if model.evidence_data not in method.suits:
        names = (name for name, kind in _methods().items() if model.evidence_data in kind.suits)
        right = sorted(names, key=lambda name: name != model.default_evidence)
        raise ModelError(
            f"{method.name}() does not give the evidence of {type(model).__name__}; use "
            f"{' or '.join(f'{name}()' for name in right)}, or leave method out for the first one"
        )
    method.check(model)
    return method


def _methods() -> dict[str, type[EvidenceMethod]]:
    """Return all methods by name: the package's public names are the one list of them."""
    values = (getattr(daskfactor, name) for name in dir(daskfactor))
    kinds = (own for own in values if isinstance(own, type) and issubclass(own, EvidenceMethod))
    return {kind.__name__: kind for kind in kinds}


@contextmanager
def _opened(
    V: Any, model: Any, blocks: int | None, unstored: str | None, **options: Unpack[Options]
) -> Iterator[EvidenceProblem]:
    """Open the data as the model takes them, and turn its settings into numbers."""
    if model.evidence_data == "matrix":
        with session(V, model, blocks, unstored, **options) as run:
            phi = chosen_dispersion(run.data, model, run.seed, run.executor)
            hyper = model.resolve(run.data.mean, phi)
            decided = replace(
                model, dispersion=hyper.dispersion, rate_w=hyper.rate_w, rate_h=hyper.rate_h
            )
            yield EvidenceProblem(run.data, decided, run.seed, run.executor, run.on_event)
        return
    refuse_matrix_options(model, blocks, unstored)

    def load(stack: ExitStack) -> tuple[Any, str]:
        del stack  # nothing is left open
        return read_whole(V, model)

    with session_of(load, _suits, **options) as given:
        yield EvidenceProblem(given.data, model, given.seed, given.executor, given.on_event)


def read_whole(V: Any, model: Any) -> tuple[Any, str]:
    """Read data that are no matrix, and say how large they are."""
    if model.evidence_data == "vector":
        x = model.check_observations(V)
        return x, f"{x.size} observations"
    counts = as_counts(V, model)
    return counts, f"{counts.total} tokens in {len(counts.values)} cells"


def _suits(client: Any, data: Any) -> Choice:
    """Tasks: what is spread over workers are pieces of work that know nothing of each other."""
    del client, data
    return Choice("tasks", "the pieces of work are independent", "independent pieces")


def refuse_matrix_options(model: Any, blocks: int | None, unstored: str | None) -> None:
    """Refuse options of a matrix for data that are none."""
    name = type(model).__name__
    if blocks is not None:
        raise OptionError(
            f"blocks={blocks!r} does not go with {name}, whose data are not cut into blocks; "
            "leave it out"
        )
    if unstored not in (None, "zero"):
        raise OptionError(
            f"unstored={unstored!r} does not go with {name}, which has no missing "
            "cells: what its data do not store is zero; leave it out"
        )
