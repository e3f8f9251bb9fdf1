"""The choice of an executor for a cluster: by what a block costs and which workers are there."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import dask

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError
from daskfactor.executors.base import local_workspace, perform
from daskfactor.machine import single_threaded_blas

if TYPE_CHECKING:
    from distributed import Client

    from daskfactor.executors.base import BlockProgram
    from daskfactor.executors.plan import Op
    from daskfactor.executors.state import ChainState

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


class Choice(NamedTuple):
    """An executor's name, the sentence that says why, and the same for a status line."""

    name: str
    reason: str
    short: str


@dataclass(frozen=True)
class Trial:
    """One operation to be timed on a worker."""

    program: "BlockProgram"
    op: "Op"
    state: "ChainState"
    data: BlockedData


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
    seconds = block_seconds(data, width) if trial is None else _measure_seconds(client, trial)
    choice = _choose(client, seconds, "about " if trial is None else "")
    logger.info('executor "%s": %s', choice.name, choice.reason)
    return choice


def _choose(client: Any, seconds: float, about: str) -> Choice:
    workers = len(client.nthreads())
    duration = f"{about}{_duration(seconds)}"
    takes, blocks = f"a block takes {duration}", f"blocks of {duration}"
    if getattr(getattr(client, "cluster", None), "_adaptive", None) is not None:
        but = "" if seconds >= TASK_WORTHY else ", although a ring on a fixed cluster is faster"
        reason = f"the cluster grows and shrinks by itself; {takes}{but}"
        return Choice("tasks", reason, "adaptive cluster")
    if seconds >= LONG_BLOCK:
        return Choice(
            "tasks",
            f"{takes}, which is worth a Dask task on any of the {workers} workers, also on those "
            "that come later, and the less is lost with a worker",
            blocks,
        )
    return Choice(
        "ring",
        f"{takes}, less than Dask tasks are worth, so bands pass from worker to worker "
        f"({workers} of them)",
        blocks,
    )


def _duration(seconds: float) -> str:
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def _measure_seconds(client: "Client", trial: Trial) -> float:
    """Return the seconds of one operation on one of the client's workers."""
    from daskfactor.executors.base import RunReport
    from daskfactor.executors.cluster import Attempt, Cluster, pack

    cluster = Cluster(client, None, None)

    def work(attempt: "Attempt") -> float:
        cluster.await_workers()
        future = cluster.submit("time-block", _time_operation, pack(trial))
        (seconds,) = cluster.results([future], attempt)
        return float(seconds)

    return cluster.persist(work, RunReport())


def _time_operation(packed: Any) -> float:
    """Time one operation, on copies; the first run compiles and is not counted: the task."""
    from daskfactor.executors.cluster import unpack

    trial: Trial = unpack(packed)
    best = float("inf")
    with single_threaded_blas():
        for number in range(TIMES + 1):
            state = trial.state.copy()
            _, seconds = perform(trial.op, trial, state, local_workspace())
            if number:
                best = min(best, seconds)
    return best


def connect(address: str) -> "Client":
    """A client of the scheduler at an address.

    Raises
    ------
    OptionError
        If there is none that answers.
    """
    from distributed import Client

    before = dask.config.get("scheduler", None)
    try:
        return Client(address, timeout="10s")  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TimeoutError) as error:
        # A client that never came to be stays dask's default scheduler otherwise.
        dask.config.set({"scheduler": before})
        raise OptionError(
            f"no Dask scheduler answers at {address} ({type(error).__name__}: {error}); pass the "
            "address that `dask scheduler` prints, such as tcp://host:8786"
        ) from error
