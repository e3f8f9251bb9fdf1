"""How workers of unequal speed share bands: by the seconds that their operations took before."""

import logging
import statistics
from collections.abc import Mapping

from daskfactor.executors.threads import share_bands

logger = logging.getLogger(__name__)

NEWS = 0.5
"""Weight of the last segment; the rest is that of those before."""
FORGETTING = 0.1
"""Of what sets a worker without bands apart, lost by segment: one that was slow is tried again."""
SHORTEST = 0.05
"""Seconds within operations from which on a segment tells how fast workers are."""
WORTH = 0.9
"""Share of the time that a segment would take otherwise, for which bands are moved."""


class Balance:
    """Measures workers, and shares row bands out so that all finish soonest.

    Bands move from one segment to the next, never within one, and only for a tenth of the
    time or more: they have to be sent. Who does what changes no bits.
    """

    def __init__(self) -> None:
        self._slowness: dict[str, float] = {}  # seconds of an operation over those of most
        self._known: set[str] = set()
        self._last: tuple[int, dict[str, int], list[int]] = (0, {}, [])

    def share(self, blocks: int, threads: Mapping[str, int], lanes: int | None) -> list[int]:
        """Return the number of row bands of each worker: `share_bands`, at measured speeds."""
        speeds = [1.0 / self._slowness.get(address, 1.0) for address in threads]
        counts = share_bands(blocks, list(threads.values()), lanes, speeds)
        before, same, last = self._last
        if (before, same) == (blocks, dict(threads)):
            rates = list(zip(threads.values(), speeds, strict=True))
            if _longest(counts, rates) > WORTH * _longest(last, rates):
                return last
            logger.info("row bands move: %s, now %s at speeds %s", last, counts, speeds)
        self._last = blocks, dict(threads), counts
        return counts

    def note(self, operations: Mapping[str, int], busy: Mapping[str, float]) -> None:
        """Take in how many operations workers did in a segment, and the seconds within them.

        The first segment of a worker counts for nothing: it compiles, and reads the data. Nor
        do segments so short that their seconds say little.
        """
        found = {a: busy[a] / count for a, count in operations.items() if a in self._known}
        self._known |= operations.keys()
        if not found or statistics.median(busy.values()) < SHORTEST:
            return
        usual = statistics.median(found.values())
        for address, seconds in found.items():
            before = self._slowness.get(address, seconds / usual)
            self._slowness[address] = before + NEWS * (seconds / usual - before)
        for idle in self._slowness.keys() - operations.keys():
            self._slowness[idle] **= 1 - FORGETTING


def evenness(busy: Mapping[str, float], lanes: Mapping[str, int]) -> float:
    """Return the mean of the workers' busy seconds per thread over the largest: 1 if all alike."""
    each = [busy[address] / lanes[address] for address in busy]
    return statistics.mean(each) / max(each) if each and max(each) > 0 else 1.0


def _longest(counts: list[int], rates: list[tuple[int, float]]) -> float:
    """Return the time of a round, in operations of a worker of speed 1."""
    return max(
        -(-count // threads) / speed for count, (threads, speed) in zip(counts, rates, strict=True)
    )
