"""Executors and plans: where and in which order block operations run."""

from typing import TYPE_CHECKING, Any

from daskfactor.errors import OptionError
from daskfactor.executors.base import Executor
from daskfactor.executors.dask_tasks import TasksExecutor
from daskfactor.executors.serial import SerialExecutor
from daskfactor.executors.threads import LanesExecutor

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["Executor", "LanesExecutor", "SerialExecutor", "TasksExecutor", "make_executor"]

KINDS = ("lanes", "ring", "serial", "tasks")


def make_executor(executor: str | Executor, client: "Client | None" = None) -> Executor:
    """An executor from its name, or the object itself.

    Parameters
    ----------
    executor
        ``"serial"`` and ``"lanes"`` run in this process; ``"tasks"`` on a
        scheduler of this process or, with a client, on its cluster; ``"ring"``
        on a client's cluster.
    client
        A `distributed` client.

    Raises
    ------
    OptionError
        If the name is unknown, or does not go with having a client or none.
    """
    if not isinstance(executor, str) and hasattr(executor, "run"):
        return executor
    if executor not in KINDS:
        raise OptionError(
            f"executor must be one of {', '.join(map(repr, KINDS))} or an executor object, got "
            f"{executor!r}"
        )
    if client is not None:
        return _on_cluster(str(executor), client)
    if executor == "ring":
        raise OptionError(
            'executor="ring" runs on the workers of a cluster; pass client=Client(...) too, or '
            'use executor="lanes" on this machine'
        )
    kinds: dict[str, Any] = {
        "lanes": LanesExecutor,
        "serial": SerialExecutor,
        "tasks": TasksExecutor,
    }
    made: Executor = kinds[str(executor)]()
    return made


def _on_cluster(name: str, client: "Client") -> Executor:
    """Imports `distributed`, which costs a second and is not needed without a client."""
    if name == "ring":
        from daskfactor.executors.ring import RingExecutor

        return RingExecutor(client)
    if name == "tasks":
        from daskfactor.executors.cluster_tasks import ClusterTasksExecutor

        return ClusterTasksExecutor(client)
    raise OptionError(
        f'executor={name!r} runs in this process and makes no use of client=; use "ring" or '
        '"tasks" with a client, or leave client out'
    )
