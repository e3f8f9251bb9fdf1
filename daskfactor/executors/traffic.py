"""Foresee what a ring sends and how long it takes, by the rules of its own plan and transfers."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.executors.plan import Round
from daskfactor.executors.segment import Transfers, plan_transfers
from daskfactor.executors.state import Array, FactorBand
from daskfactor.executors.threads import share_bands

HOP: Final = 1.5e-3
"""Seconds that a message takes from worker to worker, however short it is."""


class Traffic(NamedTuple):
    """What a ring sends while it goes through a plan.

    Attributes
    ----------
    sent
        Bytes that every worker sends to others.
    hops
        Bytes that would be sent if every row band had a worker of its own.
    seconds
        From the first operation to the last.
    """

    sent: NDArray[np.float64]
    hops: float
    seconds: float


class RingClock:
    """A ring that goes through a plan with a clock in place of operations and messages.

    Operations take their time on a thread of the worker that owns their row band. A column band
    then goes to the owner of its next row band: a worker sends one message after the other, and
    takes in one after the other.

    Parameters
    ----------
    plan, program
        What the ring would run.
    band
        A column band of one row; its arrays have the names and sizes of those that travel.
    rows
        Rows of every column band.
    threads
        Threads of every worker.
    seconds
        Of an operation in every block, (B, B).
    network
        Bytes a second that a worker sends, and as many that it takes in.
    """

    def __init__(
        self,
        plan: Sequence[Round],
        program: Any,
        band: FactorBand,
        rows: Sequence[int],
        threads: Sequence[int],
        seconds: NDArray[np.float64],
        network: float = np.inf,
    ) -> None:
        transfers, _ = plan_transfers(plan, program, frozenset(band.arrays), frozenset(band.arrays))
        self.rounds, self.rows = len(plan), np.asarray(rows)
        self.seconds, self.network = seconds, network
        self.row_of = transfers.row_of
        self.col_of = np.argsort(self.row_of, axis=1)
        self.parts = list(_parts(transfers, band))
        shares = share_bands(len(rows), threads, None)
        self.owner = np.repeat(np.arange(len(threads)), shares)
        self.free = [min(own, share) for own, share in zip(threads, shares, strict=True)]
        self.sent, self.sending, self.taking = np.zeros((3, len(threads)))
        self.position = [0] * len(rows)
        self.here: set[tuple[int, int]] = set()
        self.ready: list[list[tuple[int, int]]] = [[] for _ in threads]
        self.events = [(0.0, False, 0, col) for col in range(len(rows))]

    def run(self) -> Traffic:
        """Go through the plan."""
        now = 0.0
        while self.events:
            now, done, number, at = heapq.heappop(self.events)
            worker = self._finish(now, number, at) if done else self._arrive(number, at)
            while self.free[worker] and self.ready[worker]:
                number, row = heapq.heappop(self.ready[worker])
                self.free[worker] -= 1
                lasts = self.seconds[row, self.col_of[number, row]]
                heapq.heappush(self.events, (now + lasts, True, number, row))
        return Traffic(self.sent, self._hops(), now)

    def _arrive(self, number: int, col: int) -> int:
        """Take a column band in for a round; return the worker that has it now."""
        self.here.add((number, col))
        row = int(self.row_of[number, col])
        if self.position[row] == number:
            heapq.heappush(self.ready[self.owner[row]], (number, row))
        return int(self.owner[row])

    def _finish(self, now: float, number: int, row: int) -> int:
        """Pass on the column band of an operation that is done; return the worker that did it."""
        worker, col = int(self.owner[row]), int(self.col_of[number, row])
        self.free[worker] += 1
        self.position[row] += 1
        for due, each in self.parts[number]:
            if due == self.rounds:
                continue  # it stays
            to, arrives = int(self.owner[self.row_of[due, col]]), now
            if to != worker:
                size = each * self.rows[col]
                arrives = max(now, self.sending[worker], self.taking[to]) + size / self.network
                self.sending[worker] = self.taking[to] = arrives
                self.sent[worker] += size
                arrives += HOP
            if due == number + 1:
                heapq.heappush(self.events, (arrives, False, due, col))
        if number + 1 < self.rounds:
            following = number + 1, int(self.col_of[number + 1, row])
            if following in self.here:
                heapq.heappush(self.ready[worker], (number + 1, row))
        return worker

    def _hops(self) -> float:
        leaves = (
            each * self.rows[self.row_of[due] != self.row_of[number]].sum()
            for number, parts in enumerate(self.parts)
            for due, each in parts
            if due < self.rounds
        )
        return float(sum(leaves))


def _parts(transfers: Transfers, band: FactorBand) -> Iterator[list[tuple[int, int]]]:
    """Say for each round into which parts a band is cut after it: when they are due, and bytes."""
    waiting: dict[int, dict[str, Array]] = {}
    for number in range(-1, len(transfers.row_of)):
        here = band.arrays if number < 0 else waiting.pop(number, {})
        found = []
        for due, part in transfers.split(replace(band, arrays=here), number):
            waiting.setdefault(due, {}).update(part.arrays)
            found.append((due, part.values.nbytes + sum(a.nbytes for a in part.arrays.values())))
        if number >= 0:
            yield found
