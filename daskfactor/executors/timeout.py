"""Measuring how long one has waited."""

import time

LONGEST_STEP = 2.0
"""Seconds between two looks beyond which this process must have been stopped itself."""


class Waited:
    """Seconds waited, without those that the whole machine or process was stopped for.

    A laptop that was closed or a client that was paused must not take the time
    away for other processes' silence.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._last = time.monotonic()

    def seconds(self) -> float:
        """Seconds so far; to be called at least every second or so."""
        now = time.monotonic()
        self._seconds += min(now - self._last, LONGEST_STEP)
        self._last = now
        return self._seconds

    def restart(self) -> None:
        """Begin at zero."""
        self._seconds = 0.0
        self._last = time.monotonic()
