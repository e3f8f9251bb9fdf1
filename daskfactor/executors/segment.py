"""What one worker does in a ring: its rows of a segment's plan, from start to end.

Column bands come and go: one that has been through n rounds may take part in the
operation of round n, and then belongs to whichever worker owns the row of its
operation in round n + 1. Only what an operation touches travels with it: arrays
that nobody changes in a plan are copied to every worker once, and those that
later rounds alone need go straight to where they will be needed.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from distributed import get_worker
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Block
from daskfactor.executors.base import BlockProgram, SegmentLost, local_workspace, perform
from daskfactor.executors.cluster import Teller, unpack
from daskfactor.executors.exchange import PLUGIN, AttemptKey, Exchange, Parcel
from daskfactor.executors.plan import Op, Round, row_of_columns
from daskfactor.executors.scheduler import BandScheduler
from daskfactor.executors.state import (
    Array,
    BlockCells,
    ChainState,
    Evaluation,
    FactorBand,
    Portion,
    bare,
)
from daskfactor.machine import single_threaded_blas

TELL_EVERY = 0.25
"""Seconds between a worker's news."""


class Transfers(NamedTuple):
    """Where column bands and their arrays have to be during a plan.

    Attributes
    ----------
    row_of
        The row band that each column band meets in each round, shape (rounds, B).
    following
        By name of an array that operations change, and by round: the next round
        that touches it, the number of rounds where none does.
    constant
        Arrays that are read but never changed.
    """

    row_of: NDArray[np.int32]
    following: dict[str, NDArray[np.int32]]
    constant: frozenset[str]

    def needed(self, number: int) -> set[str]:
        """Return the names of what an operation of a round cannot do without."""
        found = {name for name, ahead in self.following.items() if ahead[number] == number}
        return found | {""}

    def split(self, band: FactorBand, after: int) -> Iterator[tuple[int, FactorBand]]:
        """Cut what was with a band after a round (-1: the start) into parts by next need.

        An array that the plan does not know is needed always: an operation made it.
        """
        rounds = len(self.row_of)
        parts = {after + 1: bare(band, ())}
        for name, array in band.arrays.items():
            if name in self.constant:
                continue
            ahead = self.following.get(name)
            due = after + 1 if ahead is None or after + 1 == rounds else int(ahead[after + 1])
            part = parts.setdefault(due, FactorBand(band.offset, band.values[:0]))
            part.arrays[name] = array
        yield from parts.items()


def plan_transfers(
    plan: Sequence[Round], program: Any, state: ChainState
) -> tuple[Transfers, frozenset[str]]:
    """Say what a program's operations need of column bands, and all that they touch."""
    names = frozenset().union(*(band.arrays for band in state.bands()))
    touched, changed = [names] * len(plan), names
    if hasattr(program, "touches"):
        touched = [frozenset(program.touches(part.ops[0])) for part in plan]
        changed = frozenset().union(*(program.changes(part.ops[0]) for part in plan))
    every = frozenset().union(*touched)
    following = {}
    for name in sorted(changed):
        rounds = np.array([name in found for found in touched], bool)
        ahead = np.where(rounds, np.arange(len(plan)), len(plan))
        following[name] = np.minimum.accumulate(ahead[::-1])[::-1].astype(np.int32)
    return Transfers(row_of_columns(plan), following, every - changed), every


class Part(NamedTuple):
    """One worker's place in a ring: its rank, its threads, every row band's owner's rank."""

    rank: int
    threads: int
    owner: tuple[int, ...]

    @property
    def rows(self) -> list[int]:
        """The worker's row bands."""
        return [row for row, own in enumerate(self.owner) if own == self.rank]


class Order(NamedTuple):
    """One worker's part of one attempt at a segment.

    ``cols`` are parts of column bands and the rounds that need them; ``constants`` are
    arrays of every column that nobody changes. ``ops`` are plain tuples, which are
    quicker to send than named ones.
    """

    attempt: AttemptKey
    teller: Teller
    part: Part
    addresses: tuple[str, ...]
    patience: float
    transfers: Transfers
    ops: dict[int, list[Any]]
    program: BlockProgram
    data: BlockedData
    rows: dict[int, FactorBand]
    cols: list[tuple[int, int, FactorBand]]
    constants: list[dict[str, Array]]
    cells: dict[Block, BlockCells]


class SegmentRun:
    """The threads of one worker on their way through a segment."""

    def __init__(self, order: Order, exchange: Exchange | Any) -> None:
        self.order = order
        self.exchange = exchange
        ops = {row: [_op(row, values) for values in found] for row, found in order.ops.items()}
        self.scheduler = BandScheduler(ops, order.part.threads, self._leaves, order.patience)
        # Own copies: within one process what was sent may be the sender's memory.
        self.portion = Portion(
            {row: band.copy() for row, band in order.rows.items()},
            {},
            {block: cells.copy() for block, cells in order.cells.items()},
        )
        self._waiting: dict[tuple[int, int], dict[tuple[str, ...], Parcel]] = {}
        self._begun: dict[int, int] = {}
        self._lock = threading.Lock()
        self._told = 0
        self._told_at = 0.0
        for col, due, part in order.cols:
            self._keep(col, due, part.copy())

    def _holder(self, col: int, number: int) -> int:
        """Return the rank of the worker that has a column band's operation of a round."""
        row_of = self.order.transfers.row_of
        ended = number == len(row_of)  # what nobody needs any more stays
        return self.order.part.rank if ended else self.order.part.owner[int(row_of[number, col])]

    def _leaves(self, col: int, number: int) -> bool:
        return self._holder(col, number) != self.order.part.rank

    def _keep(self, col: int, due: int, part: FactorBand) -> None:
        names = (*(("",) if len(part.values) else ()), *part.arrays)
        self.arrive(Parcel(self.order.attempt, col, due, names, part))

    def arrive(self, parcel: Parcel) -> None:
        """Take in a part of a column band; a second copy of one is dropped."""
        _, col, due, names, _, _ = parcel
        transfers = self.order.transfers
        with self._lock:
            if due <= self._begun.get(col, -1):
                return
            parts = self._waiting.setdefault((col, due), {})
            parts.setdefault(names, parcel)
            here = {name for found in parts for name in found}
        if due < len(transfers.row_of) and transfers.needed(due) <= here:
            self.scheduler.arrive(col, due)

    def abort(self, reason: str) -> None:
        """Give the segment up."""
        self.scheduler.fail(SegmentLost(reason))

    def lose(self, reason: str) -> None:
        """Give the segment up since a worker has gone, and tell the client."""
        self.abort(reason)
        self.order.teller.tell(self.exchange.worker, "lost", self.order.part.rank)

    def _collect(self, col: int, due: int) -> FactorBand:
        """Put a column band together from the parts that came for a round."""
        with self._lock:
            self._begun[col] = due
            parcels = self._waiting.pop((col, due)).values()
        parts = [parcel.open() for parcel in parcels]
        band: FactorBand = max(parts, key=lambda part: len(part.values))
        for part in parts:
            band.arrays.update(part.arrays)
        return band

    def operate(self, op: Op) -> tuple[Evaluation | None, float]:
        """Do one operation, and pass its column band on."""
        row, col = op.block
        number = self.scheduler.position[row]
        band = self.portion.cols[col] = self._collect(col, number)
        band.arrays.update(self.order.constants[col])
        found, seconds = perform(op, self.order, self.portion, local_workspace())
        with self._lock:
            self.portion.strip(col, number)
            del self.portion.cols[col]
        for due, part in self.order.transfers.split(band, number):
            holder = self._holder(col, due)
            if holder == self.order.part.rank:
                self._keep(col, due, part)
            else:
                names = (*(("",) if len(part.values) else ()), *part.arrays)
                parcel = Parcel(self.order.attempt, col, due, names, part)
                self.exchange.send(self.order.addresses[holder], parcel)
        return found, seconds

    def run(self) -> Portion:
        """Do all operations; raise the first error, or SegmentLost if others failed."""
        with single_threaded_blas():
            self.scheduler.run(
                self.exchange.pool, self.order.part.threads, self.operate, self._tell
            )
        return self.result()

    def result(self) -> Portion:
        """Return what the segment leaves here."""
        portion, constant = self.portion, self.order.transfers.constant
        for band in portion.rows.values():
            band.arrays = {n: array for n, array in band.arrays.items() if n not in constant}
        rounds = len(self.order.transfers.row_of)
        for col, due in list(self._waiting):
            assert due == rounds, "a part of a band was not used"
            portion.cols[col] = self._collect(col, due)
        portion.evaluations, portion.busy = self.scheduler.evaluations, self.scheduler.busy
        return portion

    def _tell(self, done: int) -> None:
        """Tell the client of progress, and of nothing else: silence means that all hang."""
        due = time.monotonic() - self._told_at > TELL_EVERY or done == self.scheduler.total
        if due and done > self._told:
            self._told, self._told_at = done, time.monotonic()
            self.order.teller.tell(self.exchange.worker, "progress", self.order.part.rank, done)


def _op(row: int, values: Sequence[Any]) -> Op:
    action, col, *rest = values
    return Op(action, Block(row, col), *rest)


def plain_ops(ops: Mapping[int, Sequence[Op]], rows: Sequence[int]) -> dict[int, list[Any]]:
    """Return operations of some rows as tuples that are quick to send."""
    return {row: [(op.action, op.block.col, *op[2:]) for op in ops[row]] for row in rows}


def run_segment(packed: NDArray[np.uint8]) -> Portion:
    """Do one worker's part of one attempt: the task."""
    order: Order = unpack(packed)
    worker = get_worker()
    exchange = cast("Exchange", worker.plugins[PLUGIN])
    order.teller.tell(worker, "started", order.part.rank)
    segment = SegmentRun(order, exchange)
    exchange.open(order.attempt, str(worker.get_current_task()), order.addresses, segment)
    try:
        return segment.run()
    except BaseException as error:
        if not isinstance(error, SegmentLost):
            reason = f"worker {order.addresses[order.part.rank]} failed: {type(error).__name__}"
            exchange.abort_peers(order.attempt, reason)
        raise
    finally:
        exchange.close(order.attempt)
        order.teller.tell(worker, "ended", order.part.rank)
