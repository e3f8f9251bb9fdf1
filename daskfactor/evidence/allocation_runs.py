"""How an evidence of counts is run: data read, kernels compiled, an executor for its tasks."""

from contextlib import ExitStack
from typing import Any

import numpy as np

from daskfactor.allocation.compiled_model import compile_urns
from daskfactor.allocation.counts import Counts, as_counts
from daskfactor.errors import OptionError
from daskfactor.evidence.allocation import AllocationMethod, AllocationProblem
from daskfactor.evidence.base import Evidence
from daskfactor.executors import Executor, SerialExecutor
from daskfactor.executors.choice import Choice
from daskfactor.inference.session import session_of
from daskfactor.models.allocation import AllocationModel
from daskfactor.progress import OnEvent, RunEvent, ignore


def allocation_evidence(
    X: Any,
    model: AllocationModel,
    method: AllocationMethod,
    seed: int,
    *,
    unstored: str | None,
    client: Any,
    executor: str | Executor,
    progressbar: bool,
    callback: OnEvent | None,
) -> Evidence:
    """`log_evidence` of an `AllocationModel`."""
    if unstored not in (None, "zero"):
        raise OptionError(
            f"unstored={unstored!r} does not go with an AllocationModel, which has no missing "
            "cells: what its data do not store is zero; leave it out"
        )

    def load(stack: ExitStack) -> tuple[Counts, str]:
        del stack  # nothing is left open
        counts = as_counts(X, model)
        return counts, f"{counts.total} tokens in {len(counts.values)} cells"

    with session_of(
        load,
        _suits,
        random_seed=seed,
        progressbar=progressbar,
        client=client,
        executor=executor,
        callback=callback,
    ) as run:
        urns = method.prepared(run.data, model, seed)
        if run.executor.in_process:
            _compile(method, run.on_event)
        problem = AllocationProblem(model, urns, seed, run.executor, run.on_event)
        return method.estimate_counts(problem)


def _suits(client: Any, counts: Counts) -> Choice:
    """Tasks: what is spread over workers are pieces of work that know nothing of each other."""
    del client, counts
    return Choice("tasks", "the pieces of work are independent", "independent pieces")


_compiled: set[str] = set()


def _compile(method: AllocationMethod, on_event: OnEvent) -> None:
    """Three tokens through the same kernels, once per process, so that the wait has a name."""
    if method.name in _compiled:
        return
    on_event(RunEvent("compile", 0, 1, message="once per process"))
    model = AllocationModel.nmf(2)
    urns = compile_urns(model, as_counts(np.array([[1, 0], [1, 1]]), model))
    method.brief().estimate_counts(AllocationProblem(model, urns, 0, SerialExecutor(), ignore))
    _compiled.add(method.name)
    on_event(RunEvent("compile", 1, 1))
