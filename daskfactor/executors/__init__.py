"""Executors, which run plans of block operations, and the choice between them."""

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError
from daskfactor.executors.base import BlockProgram, Executor, Work, run_operation
from daskfactor.executors.plan import Op
from daskfactor.executors.state import ChainState
from daskfactor.executors.tasks import TasksExecutor
from daskfactor.executors.threads import SerialExecutor, ThreadsExecutor
from daskfactor.kernels.views import Workspace

if TYPE_CHECKING:
    from distributed import Client

    from daskfactor.executors.device import CUDA

__all__ = [
    "Choice",
    "Executor",
    "LanesExecutor",
    "SerialExecutor",
    "TasksExecutor",
    "ThreadsExecutor",
    "Trial",
    "choose_executor",
    "device_options",
    "make_executor",
    "on_device",
]

LanesExecutor = ThreadsExecutor
"""Name of `ThreadsExecutor` in version 0.1."""

Trial = tuple[BlockProgram, Op, ChainState, BlockedData]
"""Operation to be timed on a worker, with its program, state and data."""

logger = logging.getLogger(__name__)

LONG_BLOCK = 1.0
"""Seconds of a block above which a segment (one cycle or more) is too expensive to lose."""
TASK_SECONDS = 0.1
"""Seconds of a block above which the overhead of a Dask task is small."""
DENSE_SPEED = 4e10
"""Floating-point operations per second of a core in dense blocks, a lower bound."""
SPARSE_SPEED = 1e9
"""Stored entries times components per second of a core in sparse blocks."""
N_TIMINGS = 3
"""Number of timings of an operation, of which the shortest is used."""

_LOCAL_EXECUTORS: dict[str, Any] = {
    "serial": SerialExecutor,
    "tasks": TasksExecutor,
    "threads": ThreadsExecutor,
    "lanes": ThreadsExecutor,
}


def make_executor(executor: str | Executor, client: "Client | None" = None) -> Executor:
    """Return the executor with a name; return an executor object unchanged.

    Parameters
    ----------
    executor
        ``"serial"`` and ``"threads"`` (formerly ``"lanes"``) run in this process; ``"tasks"`` on a
        scheduler of this process or, with a client, on its cluster; ``"ring"`` on a client's
        cluster.
    client
        A `distributed` client.

    Raises
    ------
    OptionError
        If the name is unknown, or needs a client, or cannot be used with one.
    """
    if isinstance(executor, Executor):
        return executor
    if type(executor).__name__ == "Client":
        raise OptionError("executor is a Client; pass it as client=")
    if executor not in (*_LOCAL_EXECUTORS, "ring"):
        raise OptionError(
            'executor must be one of "threads", "serial", "tasks", "ring" or an executor object, '
            f"got {executor!r}"
        )
    if client is None and executor == "ring":
        raise OptionError(
            'executor="ring" runs on the workers of a cluster; pass client=Client(...) too, or '
            'use executor="threads" on this machine'
        )
    if client is not None and executor not in ("ring", "tasks"):
        raise OptionError(
            f'executor={executor!r} runs in this process and makes no use of client=; use "ring" '
            'or "tasks" with a client, or leave client out'
        )
    if client is None:
        local: Executor = _LOCAL_EXECUTORS[str(executor)]()
        return local
    # `distributed` takes a second to import and is needed only with a client.
    if executor == "ring":
        from daskfactor.executors.ring import RingExecutor

        return RingExecutor(client)
    from daskfactor.executors.cluster import ClusterTasksExecutor

    return ClusterTasksExecutor(client)


def device_options(device: Any) -> "CUDA | None":
    """Return the options of the GPU; None for processors.

    Raises
    ------
    OptionError
        If ``device`` is neither None, nor ``"cuda"``, nor a :class:`CUDA`.
    """
    if device is None:
        return None
    from daskfactor.executors.device import CUDA

    if device == "cuda":
        return CUDA()
    if not isinstance(device, CUDA):
        raise OptionError(
            'device takes None for processors, "cuda" for an NVIDIA GPU, or '
            f"CUDA(memory_limit=...), got {device!r}"
        )
    return device


def on_device(device: "CUDA", executor: str | Executor, client: "Client | None") -> Executor:
    """Return the executor of a GPU.

    Parameters
    ----------
    device
        Options of the GPU.
    executor, client
        The caller's arguments. With a client every worker uses its visible GPU; with `dask-cuda`
        each worker has another one.

    Raises
    ------
    OptionError
        If there is no GPU in this process (without a client), or the options are incompatible.
    """
    from daskfactor.executors.device import DeviceExecutor, WorkerPlacement, gpu_name

    if client is not None and executor in ("auto", "ring"):
        ring = make_executor("ring", client)
        names: dict[str, str] = client.run(gpu_name)
        ring.placement = WorkerPlacement(device)
        ring.device = f"cuda: {', '.join(sorted(set(names.values())))}"
        ring.reason = "the GPUs of a cluster's workers"
        return ring
    if executor != "auto":
        raise OptionError(
            "a GPU of this process has an executor of its own, and those of workers run a ring: "
            f"leave executor={executor!r} or device out"
        )
    return DeviceExecutor(device)


class Choice(NamedTuple):
    """Name of the chosen executor, and the reason: as a sentence and short for a status line."""

    name: str
    reason: str
    short: str


def block_seconds(data: BlockedData, width: int) -> float:
    """Return the estimated seconds to update the largest block on one core, from its size."""
    if data.is_sparse:
        return float(data.n_stored.max()) * width / SPARSE_SPEED
    rows, cols = max(data.grid.rows.sizes), max(data.grid.cols.sizes)
    return 6.0 * rows * cols * width / DENSE_SPEED


def choose_executor(
    client: "Client", data: BlockedData, width: int, trial: Trial | None = None
) -> Choice:
    """Return ``"ring"`` or ``"tasks"`` for the workers of a client, with the reason.

    A ring needs all its workers during a segment. A transfer between workers takes one or two
    milliseconds, which overlap with block updates. A task has an overhead of about five
    milliseconds and can run on any worker. So tasks suit adaptive clusters, and blocks so long
    that the loss of a ring's segment is expensive.

    Parameters
    ----------
    client
        A synchronous client.
    data, width
        Data and number of components, from which the time of a block update is estimated.
    trial
        Operation to time on a worker instead of the estimate.
    """
    from daskfactor.executors.cluster import is_adaptive

    if trial is None:
        seconds, about = block_seconds(data, width), "about "
    else:
        # The function is pickled with the arrays, so that they are aligned on the worker.
        timed = partial(_time_trial, trial)
        (seconds,), about = make_executor("tasks", client).map(timed, [None], "time-block"), ""
    workers = len(client.nthreads())  # type: ignore[no-untyped-call]
    takes = f"a block takes {about}{_duration(seconds)}"
    choice = Choice(
        "ring",
        f"{takes}, too short for Dask tasks, so {workers} workers pass bands to each other",
        f"blocks of {about}{_duration(seconds)}",
    )
    if is_adaptive(client):
        but = "" if seconds >= TASK_SECONDS else ", although a ring on a fixed cluster is faster"
        reason = f"the cluster grows and shrinks by itself; {takes}{but}"
        choice = Choice("tasks", reason, "adaptive cluster")
    elif seconds >= LONG_BLOCK:
        reason = (
            f"{takes}, long enough for Dask tasks, which also run on workers that come later and "
            "lose less with a worker"
        )
        choice = choice._replace(name="tasks", reason=reason)
    if data.grid.blocks < workers:
        used = f"only {data.grid.blocks} of {workers} workers are used, one per band of rows"
        more = f"{used}; pass blocks={2 * workers} to use all of them"
        choice = choice._replace(reason=f"{choice.reason}; {more}")
    logger.info('executor "%s": %s', choice.name, choice.reason)
    return choice


def _duration(seconds: float) -> str:
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def _time_trial(trial: Trial, item: None, workspace: Workspace) -> float:
    """Return the shortest time of an operation on copies, after a first run that compiles."""
    del item
    program, op, state, data = trial
    work = Work((), program, data)
    seconds = [run_operation(op, work, state.copy(), workspace)[1] for _ in range(N_TIMINGS + 1)]
    return min(seconds[1:])
