"""What one worker does in a ring: its rows of a segment's plan, from start to end."""

import contextlib
import threading
import time
from typing import Any, NamedTuple, cast

from distributed import get_worker

from daskfactor.data.grid import Block
from daskfactor.executors.base import BlockProgram, perform
from daskfactor.executors.messages import Attempt, Parcel, opened
from daskfactor.executors.plan import Op
from daskfactor.executors.records import Moments, Outcome, Records
from daskfactor.executors.scheduler import Ledger, OpTable, SegmentLost
from daskfactor.executors.serialization import Handle, Packed, open_reader
from daskfactor.executors.state import Array, BlockCells, Evaluation, FactorBand
from daskfactor.executors.transfer_plan import Travel
from daskfactor.executors.worker_plugin import PLUGIN, Post
from daskfactor.kernels.workspace import Workspace
from daskfactor.threads import single_threaded_blas

SHORT = 0.003
"""Seconds of an operation below which it pays to send bands together."""
TELL_EVERY = 0.25
"""Seconds between a worker's news."""


class Order(NamedTuple):
    """One worker's part of one attempt at a segment.

    ``cols`` are column bands for round 0, and arrays of theirs for later ones: the
    column, the round, and what it needs. ``constants`` are arrays of all columns that
    nobody changes.
    """

    attempt: Attempt
    topic: str
    rank: int
    addresses: tuple[str, ...]
    owner: tuple[int, ...]
    table: OpTable
    program: BlockProgram
    handle: Handle
    rows: dict[int, FactorBand]
    cols: list[tuple[int, int, FactorBand]]
    constants: dict[int, dict[str, Array]]
    travel: Travel
    cells: dict[Block, BlockCells]
    threads: int
    patience: float


class SegmentRun:
    """The threads of one worker on their way through a segment."""

    def __init__(self, order: Order, post: Post, box: Any) -> None:
        self.order = order
        self.post = post
        self.ledger = Ledger(
            order.table,
            order.travel,
            order.owner,
            order.rank,
            box,
            order.patience,
            post,
        )
        self.records = Records()
        self.reader: Any = None
        # Own copies: within one process what was sent may be the sender's memory.
        self.rows = {row: band.copy() for row, band in order.rows.items()}
        self.cells = {block: cells.copy() for block, cells in order.cells.items()}
        self.total = self.ledger.remaining
        self._told = 0.0
        self._lock = threading.Lock()
        self._held: dict[int, list[Parcel]] = {}
        self._most_held = max(1, len(self.rows) // 2)
        self.ledger.threads = order.threads
        for col, rounds, band in order.cols:
            if rounds:
                box.put_apart(col, rounds, band.copy())
            else:
                box.put(col, 0, band.copy())

    def run(self) -> Outcome:
        """Run all operations; raises the first error, or SegmentLost if others failed."""
        self.reader = open_reader(self.order.handle)
        started = time.perf_counter()
        results: list[tuple[list[Evaluation], float]] = []
        threads = [
            threading.Thread(target=self._lane, args=(results,), name="daskfactor-ring")
            for _ in range(self.order.threads - 1)
        ]
        with single_threaded_blas():
            for thread in threads:
                thread.start()
            self._lane(results)
            for thread in threads:
                thread.join()
        if self.ledger.failure is not None:
            raise self.ledger.failure
        seconds = time.perf_counter() - started
        self._tell(self.total)
        box = self.ledger.box
        return Outcome(
            {row: self.order.travel.changed_of(band) for row, band in self.rows.items()},
            {col: band for col, (_, band) in box.here.items()},
            self.ledger.ended,
            {block: Moments(c.mean, c.m2, c.count) for block, c in self.cells.items()},
            [evaluation for found, _ in results for evaluation in found],
            self.records,
            sum(busy for _, busy in results),
            seconds,
        )

    def _lane(self, results: list[tuple[list[Evaluation], float]]) -> None:
        workspace = self._workspace()
        evaluations: list[Evaluation] = []
        busy = 0.0
        try:
            while (taken := self.ledger.take()) is not None:
                op, number, pieces = taken
                band = opened(pieces)
                band.arrays.update(self.order.constants[op.block.col])
                begun = time.perf_counter()
                found = self._perform(op, band, workspace)
                seconds = time.perf_counter() - begun
                busy += seconds
                if found is not None:
                    evaluations.append(found)
                self._pass_on(op, number, band, seconds)
        except BaseException as error:  # noqa: BLE001  # raised again by the worker's task
            self.ledger.fail(error)
        self.post.workspaces.append(workspace)
        results.append((evaluations, busy))

    def _workspace(self) -> Workspace:
        with contextlib.suppress(IndexError):
            return self.post.workspaces.pop()
        return Workspace()

    def _perform(self, op: Op, band: FactorBand, workspace: Workspace) -> Evaluation | None:
        return perform(
            op,
            self.order.program,
            self.reader,
            self.rows[op.block.row],
            band,
            self.cells.get(op.block),
            workspace,
        )

    def _pass_on(self, op: Op, number: int, band: FactorBand, seconds: float) -> None:
        self.records.strip(op.block.col, number, band)
        for heir, rounds, part, apart in self.ledger.finish(op, number, band):
            parcel = Parcel(self.order.attempt, op.block.col, rounds, part, apart=apart)
            if apart:
                self.post.send(self.order.addresses[heir], [parcel])
            else:
                self._send(heir, number, parcel, seconds)
        now = time.monotonic()
        if now - self._told > TELL_EVERY:
            self._told = now
            self._tell(self.total - self.ledger.remaining)

    def _send(self, heir: int, number: int, parcel: Parcel, seconds: float) -> None:
        """Send a band; short operations' bands wait for each other, as a message has its price."""
        address = self.order.addresses[heir]
        with self._lock:
            held = self._held.setdefault(heir, [])
            held.append(parcel)
            if (
                not self.post.has_channel(address)
                and len(held) < self._most_held
                and seconds < SHORT
                and self.ledger.will_send(heir, number)
            ):
                return
            del self._held[heir]
        self.post.send(address, held)

    def _tell(self, done: int) -> None:
        self.post.tell(self.order.topic, news(self.order, "progress", done))


def news(order: Order, kind: str, done: int = 0) -> dict[str, Any]:
    """A message for the client that runs this segment."""
    token, attempt = order.attempt
    return {"kind": kind, "token": token, "attempt": attempt, "rank": order.rank, "done": done}


def run_segment(packed: Packed, key: str) -> Outcome:
    """The task: one worker's part of one attempt."""
    order: Order = packed.load()
    post = cast("Post", get_worker().plugins[PLUGIN])
    box = post.open(order.attempt, key, order.addresses, order.topic)
    post.tell(order.topic, news(order, "started"))
    try:
        return SegmentRun(order, post, box).run()
    except BaseException as error:
        if not isinstance(error, SegmentLost):
            reason = f"worker {order.addresses[order.rank]} failed: {type(error).__name__}"
            post.abort_peers(order.attempt, order.addresses, reason)
        raise
    finally:
        post.close(order.attempt)
        post.tell(order.topic, news(order, "ended"))
