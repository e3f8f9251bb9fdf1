"""Executors and plans: where and in which order block operations run."""

from collections.abc import Callable

from daskfactor.engine.base import Executor
from daskfactor.engine.dask_tasks import TasksExecutor
from daskfactor.engine.lanes import LanesExecutor
from daskfactor.engine.serial import SerialExecutor
from daskfactor.errors import OptionError

__all__ = ["Executor", "LanesExecutor", "SerialExecutor", "TasksExecutor", "make_executor"]

_KINDS: dict[str, Callable[[], Executor]] = {
    "lanes": LanesExecutor,
    "serial": SerialExecutor,
    "tasks": TasksExecutor,
}


def make_executor(executor: str | Executor) -> Executor:
    """An executor from its name, or the object itself."""
    if not isinstance(executor, str) and hasattr(executor, "run"):
        return executor
    kind = _KINDS.get(executor) if isinstance(executor, str) else None
    if kind is None:
        raise OptionError(
            f"executor must be one of {', '.join(map(repr, _KINDS))} or an executor object, got "
            f"{executor!r}"
        )
    return kind()
