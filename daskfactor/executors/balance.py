"""Load balancing: share row bands by the measured speeds of workers."""

import logging
import statistics
from collections.abc import Mapping

from daskfactor.executors.threads import share_bands

logger = logging.getLogger(__name__)

SMOOTHING = 0.5
"""Weight of the last segment in the moving average of speeds."""
IDLE_DECAY = 0.1
"""Decay per segment of the measured slowness of an idle worker, so that it is used again."""
MIN_SECONDS = 0.05
"""Seconds of operations in a segment below which speeds are not measured."""
MAX_TIME_RATIO = 0.9
"""Ratio of the expected times after and before a move of bands, below which they are moved."""


class LoadBalancer:
    """Measures the speeds of workers and shares row bands so that a segment takes least time.

    Bands move between segments only, and only if this saves a tenth of the time, because they have
    to be sent. Results do not depend on the shares.
    """

    def __init__(self) -> None:
        self._slowness: dict[str, float] = {}  # seconds of an operation over the median
        self._measured: set[str] = set()
        self._last: tuple[int, dict[str, int], list[int]] = (0, {}, [])

    def share(self, blocks: int, threads: Mapping[str, int], lanes: int | None) -> list[int]:
        """Return the number of row bands of each worker, from `share_bands` at measured speeds."""
        speeds = [1.0 / self._slowness.get(address, 1.0) for address in threads]
        counts = share_bands(blocks, list(threads.values()), lanes, speeds)
        last_blocks, last_threads, last = self._last
        if (last_blocks, last_threads) == (blocks, dict(threads)):
            rates = list(zip(threads.values(), speeds, strict=True))
            if _longest(counts, rates) > MAX_TIME_RATIO * _longest(last, rates):
                return last
            logger.info("row bands move: %s, now %s at speeds %s", last, counts, speeds)
        self._last = blocks, dict(threads), counts
        return counts

    def record(self, operations: Mapping[str, int], busy: Mapping[str, float]) -> None:
        """Update speeds by the number of operations of each worker in a segment, and their seconds.

        The first segment of a worker is not counted, because it compiles and reads data; nor are
        segments too short to measure.
        """
        times = {a: busy[a] / count for a, count in operations.items() if a in self._measured}
        self._measured |= operations.keys()
        if not times or statistics.median(busy.values()) < MIN_SECONDS:
            return
        median = statistics.median(times.values())
        for address, seconds in times.items():
            before = self._slowness.get(address, seconds / median)
            self._slowness[address] = before + SMOOTHING * (seconds / median - before)
        for idle in self._slowness.keys() - operations.keys():
            self._slowness[idle] **= 1 - IDLE_DECAY


def load_balance(busy: Mapping[str, float], lanes: Mapping[str, int]) -> float:
    """Return the mean over the maximum of the workers' busy seconds per thread: 1 if equal."""
    loads = [busy[address] / lanes[address] for address in busy]
    return statistics.mean(loads) / max(loads) if loads and max(loads) > 0 else 1.0


def _longest(counts: list[int], rates: list[tuple[int, float]]) -> float:
    """Return the time of a round, in units of an operation at speed 1."""
    return max(
        -(-count // threads) / speed for count, (threads, speed) in zip(counts, rates, strict=True)
    )
