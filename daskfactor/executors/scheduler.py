"""Which block operation a ring worker does next, and where a column band goes after it.

A worker owns a range of row bands for a segment. Column bands come and go: one
that has been through n rounds may take part in the operation of round n, and
then belongs to whichever worker owns the row of its operation in round n + 1.
"""

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.grid import Block
from daskfactor.executors.plan import Action, CycleOptions, Op, Round
from daskfactor.executors.state import Array, FactorBand
from daskfactor.executors.transfer_plan import Travel, late

SHORTEST_PAUSE, LONGEST_PAUSE = 2e-5, 5e-4
"""Seconds between looks at channels while nothing can be done."""


class SegmentLost(Exception):  # noqa: N818  # no error of the caller's: the segment is run again
    """A worker or its work was lost and the segment has to be run again."""


def share_bands(blocks: int, threads: Sequence[int], lanes: int | None) -> list[int]:
    """How many consecutive row bands each worker gets; zero for workers that are not needed.

    Parameters
    ----------
    blocks
        Row bands to share out.
    threads
        Threads of each worker.
    lanes
        Fewest bands per thread; None for as many threads as have a share in
        the shortest possible round.
    """
    load = max(lanes or 1, -(-blocks // max(1, sum(threads))))
    slots = -(-blocks // load)
    used = [0] * len(threads)
    while slots > 0:  # one thread of every worker before a second one of any
        for number, most in enumerate(threads):
            if slots and used[number] < most:
                used[number] += 1
                slots -= 1
    total = sum(used)
    edges = [blocks * sum(used[:n]) // total for n in range(len(used) + 1)]
    return [high - low for low, high in itertools.pairwise(edges)]


class OpTable(NamedTuple):
    """The operations of some rows of a plan as arrays of shape (rounds, rows), to be sent.

    ``row_of`` is (rounds, B): the row band that each column band meets.
    """

    row_of: NDArray[np.int32]
    action: NDArray[np.int8]
    col: NDArray[np.int32]
    cycle: NDArray[np.int64]
    iteration: NDArray[np.int64]
    scale: NDArray[np.float64]
    last: NDArray[np.bool_]
    wanted: NDArray[np.int32]
    options: tuple[CycleOptions, ...]

    def rows(self, low: int, high: int) -> "OpTable":
        """The part of the table that the owner of rows ``low`` to ``high`` needs."""
        own: dict[str, Any] = {
            name: np.ascontiguousarray(getattr(self, name)[:, low:high])
            for name in ("action", "col", "cycle", "iteration", "scale", "last", "wanted")
        }
        return self._replace(**own)

    def op(self, number: int, row: int, low: int) -> Op:
        """The operation of a row in a round."""
        at = number, row - low
        return Op(
            Action(int(self.action[at])),
            Block(row, int(self.col[at])),
            int(self.cycle[at]),
            int(self.iteration[at]),
            float(self.scale[at]),
            bool(self.last[at]),
            self.options[self.wanted[at]],
        )


def tabulate(plan: Sequence[Round], blocks: int) -> OpTable:
    """A plan as arrays, rows in order."""
    options: dict[CycleOptions, int] = {}
    ops = [op for part in plan for op in part.ops]
    wanted = [options.setdefault(op.wanted, len(options)) for op in ops]
    rows = np.array([op.block.row for op in ops], np.int64).reshape(len(plan), blocks)
    cols = np.array([op.block.col for op in ops], np.int32).reshape(len(plan), blocks)
    order = np.argsort(rows, axis=1)

    def sort(values: list[Any], dtype: Any) -> NDArray[Any]:
        array = np.array(values, dtype).reshape(len(plan), blocks)
        return np.take_along_axis(array, order, axis=1)

    row_of = np.empty((len(plan), blocks), np.int32)
    np.put_along_axis(row_of, cols, rows.astype(np.int32), axis=1)
    return OpTable(
        row_of,
        sort([op.action for op in ops], np.int8),
        np.take_along_axis(cols, order, axis=1),
        sort([op.cycle for op in ops], np.int64),
        sort([op.iteration for op in ops], np.int64),
        sort([op.scale for op in ops], np.float64),
        sort([op.last for op in ops], np.bool_),
        sort(wanted, np.int32),
        tuple(options),
    )


@dataclass
class Mailbox:
    """Column bands that are here and free, by column, with the rounds they have been through.

    ``apart`` are arrays that came without their band, by column and by the round
    that needs them.
    """

    condition: threading.Condition = field(default_factory=threading.Condition)
    here: dict[int, tuple[int, Any]] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    apart: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    reason: str = ""

    def put(self, col: int, rounds: int, band: Any) -> None:
        """Take a band in; a second copy of one that has been here already is dropped."""
        with self.condition:
            if rounds <= self.seen.get(col, -1):
                return
            self.seen[col] = rounds
            self.here[col] = (rounds, band)
            self.condition.notify_all()

    def put_apart(self, col: int, rounds: int, part: Any) -> None:
        """Take in arrays that a round needs; a second copy is dropped."""
        with self.condition:
            parts = self.apart.setdefault((col, rounds), [])
            if not any(part.names() == known.names() for known in parts):
                parts.append(part)
            self.condition.notify_all()

    def wake(self) -> None:
        """Let everyone who waits look again."""
        with self.condition:
            self.condition.notify_all()

    def abort(self, reason: str) -> None:
        """Wake everyone who waits; the first reason stays."""
        with self.condition:
            self.reason = self.reason or reason
            self.condition.notify_all()


class Incoming(Protocol):
    """Where bands come from besides messages, which announce themselves."""

    @property
    def silent(self) -> bool:
        """Whether bands may have come that nobody is told of: one has to look for them."""
        ...

    def collect(self) -> None:
        """Put what has come into its mailbox."""
        ...


class Nothing:
    """Bands come by message alone."""

    silent = False

    def collect(self) -> None:
        """Nothing to look for."""


class Shipment(NamedTuple):
    """A band, or arrays of one, for the worker and the round that need it."""

    heir: int
    rounds: int
    band: FactorBand
    apart: bool


class Ledger:
    """What the threads of one worker share during a segment.

    ``ended`` are arrays of column bands that no operation needs any more, by column.
    """

    def __init__(
        self,
        table: OpTable,
        travel: Travel,
        owner: Sequence[int],
        rank: int,
        box: Mailbox,
        patience: float,
        incoming: Incoming | None = None,
    ) -> None:
        self.table = table
        self.travel = travel
        self.ended: dict[int, dict[str, Array]] = {}
        self.owner = owner
        self.rank = rank
        self.box = box
        self.patience = patience
        self.incoming = incoming or Nothing()
        self.rows = [row for row, own in enumerate(owner) if own == rank]
        self.rounds = len(table.row_of)
        self.row_round = dict.fromkeys(self.rows, 0)
        self.busy: set[int] = set()
        self.remaining = self.rounds * len(self.rows)
        self.failure: BaseException | None = None
        self.threads = 1

    def heir(self, col: int, rounds: int) -> int | None:
        """Who has a column band's next operation after ``rounds`` rounds; None at the end."""
        if rounds == self.rounds:
            return None
        return self.owner[int(self.table.row_of[rounds, col])]

    def _choose(self) -> tuple[int, int] | None:
        """The earliest ready operation; among equals one whose band must leave next."""
        best, best_rank = None, (self.rounds, False)
        here = self.box.here
        for row, number in self.row_round.items():
            if number > best_rank[0] or number == self.rounds or row in self.busy:
                continue
            col = int(self.table.col[number, row - self.rows[0]])
            if col not in here or here[col][0] != number or not self._complete(col, number):
                continue
            rank = (number, self.heir(col, number + 1) in (self.rank, None))
            if rank < best_rank:
                best, best_rank = (row, col), rank
        return best

    def _complete(self, col: int, number: int) -> bool:
        """Whether all arrays are here that an operation needs besides a band's values."""
        needed = self.travel.needed[number]
        if not needed:
            return True
        found = set(self.box.here[col][1].names())
        for part in self.box.apart.get((col, number), ()):
            found.update(part.names())
        return needed <= found

    def take(self) -> tuple[Op, int, list[Any]] | None:
        """The next operation, its round and the pieces of its column band; None at the end."""
        condition = self.box.condition
        pause, quiet_since = SHORTEST_PAUSE, time.monotonic()
        while True:
            self.incoming.collect()
            with condition:
                if not self.remaining or self.failure is not None:
                    return None
                if self.box.reason:
                    raise SegmentLost(self.box.reason)
                chosen = self._choose()
                if chosen is not None:
                    return self._start(*chosen)
                if time.monotonic() - quiet_since > self.patience:
                    raise SegmentLost(f"no band arrived within {self.patience:g} s")
                condition.wait(pause if self.incoming.silent else self.patience)
            pause = min(1.5 * pause, LONGEST_PAUSE)

    def _start(self, row: int, col: int) -> tuple[Op, int, list[Any]]:
        """Mark an operation as running, and hand out what it needs."""
        self.busy.add(row)
        number, band = self.box.here.pop(col)
        pieces = [band, *self.box.apart.pop((col, number), ())]
        return self.table.op(number, row, self.rows[0]), number, pieces

    def finish(self, op: Op, number: int, band: FactorBand) -> list[Shipment]:
        """Note an operation as done; what of the column band must be sent to others."""
        row, col = op.block
        heir = self.heir(col, number + 1)
        apart = self._apart(col, number, band)
        shipments = []
        with self.box.condition:
            self.busy.discard(row)
            self.row_round[row] = number + 1
            self.remaining -= 1
            if heir is None or heir == self.rank:
                self.box.seen[col] = number + 1
                self.box.here[col] = (number + 1, band)
            else:
                shipments.append(Shipment(heir, number + 1, band, apart=False))
            for due, part in apart.items():
                holder = self.heir(col, due)
                assert holder is not None  # what nobody needs has ended
                if holder == self.rank:
                    self.box.apart.setdefault((col, due), []).append(part)
                else:
                    shipments.append(Shipment(holder, due, part, apart=True))
            if self.threads > 1:
                self.box.condition.notify_all()
        return shipments

    def _apart(self, col: int, number: int, band: FactorBand) -> dict[int, FactorBand]:
        """Take off a band what does not go on with it; the arrays by the round that needs them."""
        apart: dict[int, FactorBand] = {}
        for name in list(band.arrays):
            due = None if name in self.travel.constant else self.travel.due(name, number)
            if due == number + 1:
                continue
            array = band.arrays.pop(name)
            if due is not None:
                apart.setdefault(due, late(band, {})).arrays[name] = array
            elif name not in self.travel.constant:
                self.ended.setdefault(col, {})[name] = array
        return apart

    def will_send(self, heir: int, number: int) -> bool:
        """Whether another operation of this round, ready or running, has a band for the same."""
        with self.box.condition:
            for row in self.rows:
                if self.row_round[row] != number:
                    continue
                col = int(self.table.col[number, row - self.rows[0]])
                here = self.box.here.get(col)
                ready = row in self.busy or (here is not None and here[0] == number)
                if ready and self.heir(col, number + 1) == heir:
                    return True
            return False

    def fail(self, error: BaseException) -> None:
        """Stop all threads; the first error stays."""
        with self.box.condition:
            self.failure = self.failure or error
            self.box.condition.notify_all()
