"""Executors and plans: where and in which order block operations run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from daskfactor.errors import OptionError
from daskfactor.executors.base import Executor
from daskfactor.executors.tasks import TasksExecutor
from daskfactor.executors.threads import SerialExecutor, ThreadsExecutor

if TYPE_CHECKING:
    from distributed import Client

__all__ = [
    "Executor",
    "LanesExecutor",
    "SerialExecutor",
    "TasksExecutor",
    "ThreadsExecutor",
    "make_executor",
]

LanesExecutor = ThreadsExecutor
"""The name of version 0.1."""

_HERE: dict[str, Any] = {
    "serial": SerialExecutor,
    "tasks": TasksExecutor,
    "threads": ThreadsExecutor,
    "lanes": ThreadsExecutor,
}
_CLUSTER = {
    "ring": ("ring", "RingExecutor"),
    "tasks": ("cluster_tasks", "ClusterTasksExecutor"),
}


def make_executor(executor: str | Executor, client: "Client | None" = None) -> Executor:
    """Make an executor from its name; return an object as it is.

    Parameters
    ----------
    executor
        ``"serial"`` and ``"threads"`` (or ``"lanes"``, as it was called) run in this
        process; ``"tasks"`` on a scheduler of this process or, with a client, on its
        cluster; ``"ring"`` on a client's cluster.
    client
        A `distributed` client.

    Raises
    ------
    OptionError
        If the name is unknown, or does not go with having a client or none.
    """
    if not isinstance(executor, str) and hasattr(executor, "run"):
        return executor
    if executor not in (*_HERE, *_CLUSTER):
        raise OptionError(
            'executor must be one of "threads", "serial", "tasks", "ring" or an executor object, '
            f"got {executor!r}"
        )
    if client is None and executor == "ring":
        raise OptionError(
            'executor="ring" runs on the workers of a cluster; pass client=Client(...) too, or '
            'use executor="threads" on this machine'
        )
    if client is not None and executor not in _CLUSTER:
        raise OptionError(
            f'executor={executor!r} runs in this process and makes no use of client=; use "ring" '
            'or "tasks" with a client, or leave client out'
        )
    if client is None:
        here: Executor = _HERE[str(executor)]()
        return here
    # `distributed` costs a second to import and is not needed without a client.
    module, name = _CLUSTER[str(executor)]
    made: Executor = getattr(import_module(f"daskfactor.executors.{module}"), name)(client)
    return made
