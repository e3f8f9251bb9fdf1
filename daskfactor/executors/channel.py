"""Messages between two processes of one machine through memory that both have mapped.

One process writes, the other reads; neither waits, and no event loop takes part. A
message through a cluster's own connections costs either end about half a millisecond,
as much as a small block; one through here costs the copying of its bytes.

The two positions are plain numbers, each written by one side only, after the bytes that
it speaks of. That is enough where processors keep the order of stores as x86-64 does;
elsewhere there are no channels, and messages take the cluster's connections.
"""

import contextlib
import mmap
import os
import platform
import tempfile
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

LEAST, MOST = 2**20, 2**28
"""Bytes of a channel."""
MESSAGES = 8
"""Messages of the size known so far that a channel is made for."""
_LINE = 8
"""Numbers on a line of a processor's cache: what either side writes is on a line of its own."""
_WRITTEN, _READ, _ATTACHED, _CLOSED = (line * _LINE for line in range(4))
_HEADER = 4 * _LINE * 8
_SKIP = -1
_SUITABLE = platform.machine().lower() in ("x86_64", "amd64")


class _Mapped:
    """Header and ring of one file."""

    def __init__(self, handle: int, capacity: int) -> None:
        memory = mmap.mmap(handle, _HEADER + capacity)
        self.header = np.frombuffer(memory, np.int64, 4 * _LINE)
        self.ring = np.frombuffer(memory, np.uint8, capacity, _HEADER)
        self.lengths = self.ring.view(np.int64)
        self.capacity = capacity


class Writer:
    """The end that messages are put in; its file lasts until `close`."""

    def __init__(self, largest: int) -> None:
        """Make room for some messages of ``largest`` bytes; OSError if there is none."""
        if not _SUITABLE:
            raise OSError("this processor may change the order of stores")
        self._made = time.monotonic()
        self.capacity = int(min(max(MESSAGES * largest, LEAST), MOST)) // 4096 * 4096
        handle, path = tempfile.mkstemp(prefix="daskfactor-", dir=_memory_folder())
        self.path = path
        try:
            # Room is taken now: later, a full file system would end the process.
            os.posix_fallocate(handle, 0, _HEADER + self.capacity)
            self._mapped = _Mapped(handle, self.capacity)
        except BaseException:
            Path(path).unlink()
            raise
        finally:
            os.close(handle)

    @property
    def ready(self) -> bool:
        """Whether the other end is there."""
        return bool(self._mapped.header[_ATTACHED])

    @property
    def age(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._made

    def put(self, heads: bytes, body: Bytes) -> bool:
        """Put a message in; False if there is no room for it now."""
        mapped, ring = self._mapped, self._mapped.ring
        size = _padded(16 + len(heads) + body.size)
        written = int(mapped.header[_WRITTEN])
        at = written % self.capacity
        skipped = self.capacity - at if at + size > self.capacity else 0
        if skipped + size > self.capacity - (written - int(mapped.header[_READ])):
            return False
        if skipped:
            mapped.lengths[at // 8] = _SKIP
            at = 0
        mapped.lengths[at // 8] = len(heads)
        mapped.lengths[at // 8 + 1] = body.size
        middle = at + 16 + len(heads)
        ring[at + 16 : middle] = np.frombuffer(heads, np.uint8)
        ring[middle : middle + body.size] = body
        mapped.header[_WRITTEN] = written + skipped + size
        return True

    def close(self) -> None:
        """Tell the other end, and remove the file if it is still there."""
        self._mapped.header[_CLOSED] = 1
        with contextlib.suppress(OSError):
            Path(self.path).unlink()


class Reader:
    """The end that messages are taken out of."""

    def __init__(self, path: str, capacity: int) -> None:
        """Map a file of the other end's, which nobody needs to find again; OSError if gone."""
        handle = os.open(path, os.O_RDWR)
        try:
            self._mapped = _Mapped(handle, capacity)
        finally:
            os.close(handle)
        Path(path).unlink()
        self._lock = threading.Lock()
        self._mapped.header[_ATTACHED] = 1

    @property
    def over(self) -> bool:
        """Whether the other end has closed and everything has been taken out."""
        header = self._mapped.header
        return bool(header[_CLOSED]) and header[_READ] == header[_WRITTEN]

    def take(self) -> list[tuple[bytes, Bytes]]:
        """All messages that are there; none while another thread is taking them."""
        header = self._mapped.header
        if header[_READ] == header[_WRITTEN] or not self._lock.acquire(blocking=False):
            return []
        try:
            found: list[tuple[bytes, Bytes]] = []
            read, written = int(header[_READ]), int(header[_WRITTEN])
            while read < written:
                read += self._message(read % self._mapped.capacity, found)
                header[_READ] = read
            return found
        finally:
            self._lock.release()

    def _message(self, at: int, found: list[tuple[bytes, Bytes]]) -> int:
        """Take out what is at a place; how many bytes it took there."""
        mapped = self._mapped
        length = int(mapped.lengths[at // 8])
        if length == _SKIP:
            return mapped.capacity - at
        count = int(mapped.lengths[at // 8 + 1])
        middle = at + 16 + length
        found.append(
            (mapped.ring[at + 16 : middle].tobytes(), mapped.ring[middle : middle + count].copy())
        )
        return _padded(16 + length + count)


def _padded(size: int) -> int:
    return -(-size // 8) * 8


@lru_cache(maxsize=1)
def this_machine() -> str:
    """What processes that can map the same memory agree on."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {boot}"
    return platform.node()


def _memory_folder() -> str | None:
    """Where a file is memory and nothing else; the usual folder where there is no such place."""
    folder = "/dev/shm"
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def message_size(fields: dict[str, Any]) -> int:
    """Bytes that a message takes."""
    return len(fields["heads"]) + int(fields["body"].size)
