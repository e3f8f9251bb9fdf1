"""Executors and plans: where and in which order block operations run, and which one suits."""

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError
from daskfactor.executors.base import BlockProgram, Executor, Work, perform
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
"""The name of version 0.1."""

Trial = tuple[BlockProgram, Op, ChainState, BlockedData]
"""One operation to be timed on a worker, and what it is done with."""

logger = logging.getLogger(__name__)

LONG_BLOCK = 1.0
"""Seconds from which on a segment, a cycle at least, is too long to lose as a whole."""
TASK_WORTHY = 0.1
"""Seconds from which on a block is worth a Dask task of its own."""
DENSE_SPEED = 4e10
"""Floating-point operations a second that a core does at least in dense blocks."""
SPARSE_SPEED = 1e9
"""Stored entries times components a second in sparse ones."""
TIMES = 3
"""Times that an operation is timed; the shortest counts."""

_HERE: dict[str, Any] = {
    "serial": SerialExecutor,
    "tasks": TasksExecutor,
    "threads": ThreadsExecutor,
    "lanes": ThreadsExecutor,
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
    if executor not in (*_HERE, "ring"):
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
        here: Executor = _HERE[str(executor)]()
        return here
    # `distributed` costs a second to import and is not needed without a client.
    if executor == "ring":
        from daskfactor.executors.ring import RingExecutor

        return RingExecutor(client)
    from daskfactor.executors.cluster import ClusterTasksExecutor

    return ClusterTasksExecutor(client)


def device_options(device: Any) -> "CUDA | None":
    """Say how a GPU is used, None where none is.

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
    """Make the executor of a GPU.

    Parameters
    ----------
    device
        How it is used.
    executor, client
        As the caller gave them. With a client every worker uses the GPU that it sees, which
        `dask-cuda` makes a different one for each.

    Raises
    ------
    OptionError
        If there is no GPU here, without a client, or these options do not go together.
    """
    from daskfactor.executors.device import DeviceExecutor, OnWorkers, gpu_name

    if client is not None and executor in ("auto", "ring"):
        ring = make_executor("ring", client)
        names: dict[str, str] = client.run(gpu_name)
        ring.place = OnWorkers(device)
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
    """An executor's name, the sentence that says why, and the same for a status line."""

    name: str
    reason: str
    short: str


def block_seconds(data: BlockedData, width: int) -> float:
    """About how long the largest block's update takes on one core, from its size."""
    if data.is_sparse:
        return float(data.n_stored.max()) * width / SPARSE_SPEED
    rows, cols = max(data.grid.rows.sizes), max(data.grid.cols.sizes)
    return 6.0 * rows * cols * width / DENSE_SPEED


def choose_executor(
    client: "Client", data: BlockedData, width: int, trial: Trial | None = None
) -> Choice:
    """``"ring"`` or ``"tasks"`` for the workers of a client.

    A ring needs all its workers from the beginning of a segment to its end, and
    costs a millisecond or two a hop that hides behind the blocks; tasks cost some
    five milliseconds each, and go wherever there is a worker. So tasks suit
    clusters that grow and shrink by themselves, and blocks so long that a ring's
    segment would be dear to lose.

    Parameters
    ----------
    client
        A synchronous client.
    data, width
        What a block update's cost is estimated from.
    trial
        An operation to time on a worker instead.
    """
    from daskfactor.executors.cluster import is_adaptive

    if trial is None:
        seconds, about = block_seconds(data, width), "about "
    else:
        # Sent inside a function, which is packed: arrays lie where compiled kernels expect them.
        timed = partial(_time_trial, trial)
        (seconds,), about = make_executor("tasks", client).map(timed, [None], "time-block"), ""
    workers = len(client.nthreads())  # type: ignore[no-untyped-call]
    takes = f"a block takes {about}{_duration(seconds)}"
    choice = Choice(
        "ring",
        f"{takes}, less than Dask tasks are worth, so bands pass from worker to worker "
        f"({workers} of them)",
        f"blocks of {about}{_duration(seconds)}",
    )
    if is_adaptive(client):
        but = "" if seconds >= TASK_WORTHY else ", although a ring on a fixed cluster is faster"
        reason = f"the cluster grows and shrinks by itself; {takes}{but}"
        choice = Choice("tasks", reason, "adaptive cluster")
    elif seconds >= LONG_BLOCK:
        reason = (
            f"{takes}, which is worth a Dask task on any of the {workers} workers, also on those "
            "that come later, and the less is lost with a worker"
        )
        choice = choice._replace(name="tasks", reason=reason)
    if data.grid.blocks < workers:
        few = f"{data.grid.blocks} of {workers} workers, for want of blocks"
        more = f"only {few}; pass blocks={2 * workers} to use all of them"
        choice = choice._replace(reason=f"{choice.reason}; {more}")
    logger.info('executor "%s": %s', choice.name, choice.reason)
    return choice


def _duration(seconds: float) -> str:
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def _time_trial(trial: Trial, item: None, workspace: Workspace) -> float:
    """Time one operation, on copies; the first run compiles and is not counted."""
    del item
    program, op, state, data = trial
    work = Work((), program, data)
    seconds = [perform(op, work, state.copy(), workspace)[1] for _ in range(TIMES + 1)]
    return min(seconds[1:])
