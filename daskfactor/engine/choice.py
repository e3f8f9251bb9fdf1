"""Which executor suits a cluster: by what a block costs, what a hop costs, and who is there."""

import logging
from typing import TYPE_CHECKING, NamedTuple

from daskfactor.errors import OptionError
from daskfactor.io.blocks import BlockedData

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

SLOW_BLOCK = 0.1
"""Seconds from which on a block is worth a Dask task of its own."""
DENSE_SPEED = 4e10
"""Floating-point operations a second that a core does at least in dense blocks."""
SPARSE_SPEED = 1e9
"""Stored entries times components a second in sparse ones."""


class Choice(NamedTuple):
    """An executor's name, and the sentence that says why."""

    name: str
    reason: str


def block_seconds(data: BlockedData, width: int) -> float:
    """About how long the largest block's update takes on one core, from its size."""
    if data.is_sparse:
        return float(data.n_stored.max()) * width / SPARSE_SPEED
    rows, cols = max(data.grid.rows.sizes), max(data.grid.cols.sizes)
    return 6.0 * rows * cols * width / DENSE_SPEED


def choose_executor(client: "Client", data: BlockedData, width: int) -> Choice:
    """``"ring"`` or ``"tasks"`` for the workers of a client.

    A ring needs all its workers from the beginning of a segment to its end, and
    costs a millisecond or two a hop that hides behind the blocks; tasks cost some
    five milliseconds each, and go wherever there is a worker.
    """
    workers = len(client.scheduler_info(n_workers=-1)["workers"])
    seconds = block_seconds(data, width)
    if seconds >= SLOW_BLOCK:
        choice = Choice(
            "tasks",
            f"a block takes about {seconds:.2g} s, which is worth a Dask task on any of the "
            f"{workers} workers, also on those that come later",
        )
    else:
        choice = Choice(
            "ring",
            f"a block takes about {1000 * seconds:.2g} ms, less than Dask tasks are worth, so "
            f"bands pass from worker to worker ({workers} of them)",
        )
    logger.info('executor "%s": %s', *choice)
    return choice


def connect(address: str) -> "Client":
    """A client of the scheduler at an address.

    Raises
    ------
    OptionError
        If there is none that answers.
    """
    from distributed import Client

    try:
        return Client(address, timeout="10s")  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TimeoutError) as error:
        raise OptionError(
            f"no Dask scheduler answers at {address} ({type(error).__name__}: {error}); pass the "
            "address that `dask scheduler` prints, such as tcp://host:8786"
        ) from error
