"""Foresee what a ring sends and how long it takes, by the rules of its own plan and transfers."""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.executors.plan import Round
from daskfactor.executors.segment import Transfers, plan_transfers
from daskfactor.executors.state import Array, FactorBand
from daskfactor.executors.threads import share_bands

HOP: Final = 1.5e-3
"""Seconds that a message takes from worker to worker, however short it is."""
ON_WIRE: Final = 1538 / 1448
"""Bytes that Ethernet and TCP send for one of data: a frame with the gap behind it."""


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


Pair = tuple[int, int]
"""Who sends, and to whom."""
Parcel = tuple[float, tuple[int, int] | None]
"""Bytes, and the round and column band that wait for them, if any does already."""


@dataclass
class Message:
    """Parcels on their way from a worker to another, and bytes of them that are still to go."""

    left: float
    parcels: list[Parcel]


def fair_rates(pairs: Sequence[Pair], card: float) -> dict[Pair, float]:
    """Share cards among messages: each has as much as the fullest card on its way has for one.

    What others leave of a card goes to those that can take more (max-min fairness).
    """
    found: dict[Pair, float] = {}
    senders, takers = (Counter(pair[end] for pair in pairs) for end in (0, 1))
    room = dict.fromkeys(senders, card), dict.fromkeys(takers, card)
    while len(found) < len(pairs):
        waiting = [pair for pair in pairs if pair not in found]
        each = [min(room[0][a] / senders[a], room[1][b] / takers[b]) for a, b in waiting]
        least = min(each)
        for (a, b), own in zip(waiting, each, strict=True):
            if own <= least:
                found[a, b] = least
                room[0][a] -= least
                room[1][b] -= least
                senders[a] -= 1
                takers[b] -= 1
    return found


class RingClock:
    """A ring that goes through a matrix's plan with a clock for operations and messages.

    Operations take their time on a thread of the worker that owns their row band. A column band
    then goes to the owner of its next row band. Between two workers there is one message at a time,
    and what queues up meanwhile goes in the next one; all bands of a message arrive together.
    Messages on their way share cards fairly, that of who sends and that of who takes in.

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
        (transfers,), _ = plan_transfers(plan, program, [frozenset(band.arrays)] * 2)
        self.rounds, self.rows = len(plan), np.asarray(rows)
        self.seconds, self.network = seconds, network
        self.row_of = transfers.row_of
        self.col_of = np.argsort(self.row_of, axis=1)
        self.parts = list(_parts(transfers, band))
        shares = share_bands(len(rows), threads, None)
        self.owner = np.repeat(np.arange(len(threads)), shares)
        self.free = [min(own, share) for own, share in zip(threads, shares, strict=True)]
        self.sent = np.zeros(len(threads))
        self.queues: dict[Pair, list[Parcel]] = {}
        self.messages: dict[Pair, Message] = {}
        self.rates: dict[Pair, float] = {}
        self.position = [0] * len(rows)
        self.here: set[tuple[int, int]] = set()
        self.ready: list[list[tuple[int, int]]] = [[] for _ in threads]
        self.events = [(0.0, False, 0, col) for col in range(len(rows))]

    def run(self) -> Traffic:
        """Go through the plan."""
        now = 0.0
        while self.events or self.messages:
            now, passed = self._next(now), now
            for pair, message in self.messages.items():
                message.left -= (now - passed) * self.rates[pair]
            if not self.events or now < self.events[0][0]:
                self._deliver(now)
                continue
            _, done, number, at = heapq.heappop(self.events)
            worker = self._finish(now, number, at) if done else self._arrive(number, at)
            while self.free[worker] and self.ready[worker]:
                number, row = heapq.heappop(self.ready[worker])
                self.free[worker] -= 1
                lasts = self.seconds[row, self.col_of[number, row]]
                heapq.heappush(self.events, (now + lasts, True, number, row))
        return Traffic(self.sent, self._hops(), now)

    def _next(self, now: float) -> float:
        """Return when something happens: an event, or the end of a message."""
        if not self.rates:
            self.rates = fair_rates(list(self.messages), self.network / ON_WIRE)
        ends = (now + max(0.0, m.left) / self.rates[pair] for pair, m in self.messages.items())
        return min(self.events[0][0] if self.events else np.inf, min(ends, default=np.inf))

    def _deliver(self, now: float) -> None:
        """Have messages arrive that are over, and what has queued up behind them go."""
        over = min(self.messages, key=lambda pair: self.messages[pair].left / self.rates[pair])
        for _, waiting in self.messages.pop(over).parcels:
            if waiting is not None:
                heapq.heappush(self.events, (now + HOP, False, *waiting))
        self._send(over)

    def _send(self, pair: Pair) -> None:
        """Begin a message of all that is queued between two workers, if none is under way."""
        if pair not in self.messages:
            self.rates = {}
            if parcels := self.queues.pop(pair, []):
                self.messages[pair] = Message(sum(size for size, _ in parcels), parcels)

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
            to, size = int(self.owner[self.row_of[due, col]]), each * self.rows[col]
            waiting = (due, col) if due == number + 1 else None
            self.sent[worker] += size if to != worker else 0
            if to != worker and self.network < np.inf:
                self.queues.setdefault((worker, to), []).append((size, waiting))
                self._send((worker, to))
            elif waiting is not None:
                arrives = now + (HOP if to != worker else 0)
                heapq.heappush(self.events, (arrives, False, *waiting))
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
