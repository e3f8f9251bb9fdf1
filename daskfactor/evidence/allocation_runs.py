"""How an evidence of counts is run: data read, kernels compiled, an executor for its tasks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from daskfactor.allocation.compiled_model import compile_urns
from daskfactor.allocation.counts import as_counts
from daskfactor.errors import OptionError
from daskfactor.evidence.allocation import AUDIBLE, AllocationMethod, AllocationProblem
from daskfactor.evidence.base import Evidence
from daskfactor.executors import Executor, SerialExecutor, make_executor
from daskfactor.inference.setup import listener
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
    with ExitStack() as stack:
        on_event = stack.enter_context(listener(progressbar, callback))
        on_event(RunEvent("load", 0, 1))
        counts = as_counts(X, model)
        told = f"{counts.total} tokens in {len(counts.values)} cells"
        on_event(RunEvent("load", 1, 1, message=told))
        urns = method.prepared(counts, model, seed)
        runner = stack.enter_context(_mapping(executor, client))
        if runner.name in AUDIBLE:
            _compile(method, on_event)
        return method.estimate_counts(AllocationProblem(model, urns, seed, runner, on_event))


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


@contextmanager
def _mapping(executor: str | Executor, client: Any) -> Iterator[Executor]:
    """An executor for independent tasks, closed afterwards unless it is the caller's own."""
    if isinstance(executor, str) and executor == "auto":
        executor = "lanes" if client is None else "tasks"
    made = make_executor(executor, client)
    try:
        yield made
    finally:
        if made is not executor:
            made.close()
