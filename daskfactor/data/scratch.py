"""Local files of blocks: what does not fit in memory, and what other processes are to read.

A scratch file has no name (it is unlinked as soon as it is open), so that it is gone with
the process even if that is killed. It is read with positioned reads into a buffer of the
thread rather than mapped, so that neither address space nor resident set grows with the
matrix. A file for other processes has a name and is mapped, so that they share its pages.
"""

import errno
import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import StoreError

ALIGNMENT = 64
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Extent(NamedTuple):
    """Where an array lies in a file, and what it is."""

    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class ArrayFile:
    """Arrays one after another in a local file, each at a multiple of 64 bytes.

    Safe to use from several threads at once.

    Parameters
    ----------
    directory
        Where a new file is made; without ``name`` it has none.
    name
        Name of a file that other processes open.
    path
        A file that exists, to be read.
    reserve
        Bytes that are taken at once, so that a full disk is noticed before the work.
    """

    def __init__(
        self, directory: str = "", *, name: str = "", path: str = "", reserve: int = 0
    ) -> None:
        self.path = path or (str(Path(directory) / name) if name else "")
        self.size = 0
        self._directory = directory or str(Path(path).parent)
        self._reserved = reserve
        self._own = threading.local()
        self._map: mmap.mmap | None = None
        self._lock = threading.Lock()
        if path:
            self._file: IO[bytes] = open(path, "rb", buffering=0)  # noqa: PTH123, SIM115
            self.size = os.fstat(self._file.fileno()).st_size
            return
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._file = _private(self.path) if name else _unnamed(directory)
            if reserve:
                self._reserve(reserve)
        except OSError as error:
            raise self._failed(error) from error

    def append(self, array: NDArray[Any]) -> Extent:
        """Write an array behind what is there."""
        array = np.ascontiguousarray(array)
        data = as_bytes(array)
        with self._lock:
            start = position = -(-self.size // ALIGNMENT) * ALIGNMENT
            self.size = start + array.nbytes
        try:
            while data.nbytes:
                written = os.pwrite(self._file.fileno(), data, position)
                data, position = data[written:], position + written
        except OSError as error:
            raise self._failed(error) from error
        return Extent(start, array.dtype.str, array.shape)

    def read(self, extents: Sequence[Extent]) -> list[NDArray[Any]]:
        """Arrays in new memory."""
        return self._read(extents, np.empty(span(extents), np.uint8))

    def read_again(self, extents: Sequence[Extent]) -> list[NDArray[Any]]:
        """Arrays in memory of the calling thread, which its next call overwrites."""
        buffer: NDArray[np.uint8] | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.size < span(extents):
            buffer = self._own.buffer = np.empty(span(extents), np.uint8)
        return self._read(extents, buffer)

    def map(self, extent: Extent) -> NDArray[Any]:
        """The array at an extent without a copy: pages shared with all who map the file.

        Pages are copied on a write, so the array counts as writeable (compiled
        kernels are specialised on that) and the file cannot be changed through it.
        """
        if extent.nbytes == 0:
            return np.empty(extent.shape, extent.dtype)
        with self._lock:
            if self._map is None:
                self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        count = extent.nbytes // np.dtype(extent.dtype).itemsize
        flat = np.frombuffer(self._map, extent.dtype, count, extent.start)
        return flat.reshape(extent.shape)

    def hold(self) -> None:
        """Mark the file as in use until it is closed or the process ends."""
        fcntl.flock(self._file.fileno(), fcntl.LOCK_SH)

    @staticmethod
    def held(path: str) -> bool:
        """Whether some process holds a file."""
        with open(path, "rb") as file:  # noqa: PTH123 - its descriptor is what counts
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
            return False

    def close(self) -> None:
        """Close it; arrays that were mapped stay valid. Can be called again."""
        self._map = None
        self._file.close()

    def remove(self) -> None:
        """Close it and take its name away, if it has one."""
        self.close()
        if self.path:
            Path(self.path).unlink(missing_ok=True)

    def _read(self, extents: Sequence[Extent], buffer: NDArray[np.uint8]) -> list[NDArray[Any]]:
        found, offset = [], 0
        for extent in extents:
            flat = buffer[offset : offset + extent.nbytes]
            data, position = flat.data, extent.start
            while data.nbytes:
                count = os.preadv(self._file.fileno(), [data], position)
                if count == 0:
                    raise StoreError(f"{self._name()} ends too early, at byte {position}")
                data, position = data[count:], position + count
            found.append(flat.view(extent.dtype).reshape(extent.shape))
            offset += -(-extent.nbytes // ALIGNMENT) * ALIGNMENT
        return found

    def _reserve(self, size: int) -> None:
        if not hasattr(os, "posix_fallocate"):  # macOS
            return
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as error:
            if error.errno in DISK_FULL:  # file systems that cannot reserve say something else
                self._file.close()
                raise

    def _name(self) -> str:
        return self.path or f"the scratch file in {self._directory}"

    def _failed(self, error: OSError) -> StoreError:
        full = error.errno in DISK_FULL
        cause = "there is not enough room" if full else str(error)
        remedy = "free some" if full else "make it writable"
        needed = str(self._reserved) if self._reserved else f"{self.size} or more"
        return StoreError(
            f"a scratch file of {needed} bytes is needed in {self._directory}, but {cause}; "
            f"{remedy}, name another directory with the dask option 'temporary-directory', or "
            "raise memory_limit"
        )


class Shelf:
    """Flat arrays put down and read again, in memory up to a budget, beyond it in a scratch file.

    From any thread.
    """

    def __init__(self, budget: int) -> None:
        self._left = budget
        self._file: ArrayFile | None = None
        self._lock = threading.Lock()

    def put(self, array: NDArray[Any]) -> NDArray[Any] | Extent:
        """Keep an array; what is returned is for `get` and `take`."""
        with self._lock:
            if array.nbytes <= self._left:
                self._left -= array.nbytes
                return array
            if self._file is None:
                self._file = ArrayFile(scratch_directory())
            return self._file.append(array)

    def get(self, kept: NDArray[Any] | Extent, part: slice) -> NDArray[Any]:
        """Part of an array."""
        if isinstance(kept, np.ndarray):
            return kept[part]
        assert self._file is not None
        each = np.dtype(kept.dtype).itemsize
        extent = Extent(kept.start + part.start * each, kept.dtype, (part.stop - part.start,))
        return self._file.read([extent])[0]

    def take(self, kept: NDArray[Any] | Extent) -> NDArray[Any]:
        """An array, given away."""
        if isinstance(kept, Extent):
            return self.get(kept, slice(0, kept.shape[0]))
        with self._lock:
            self._left += kept.nbytes
        return kept

    def close(self) -> None:
        """Give disk space back."""
        if self._file is not None:
            self._file.close()


def scratch_directory() -> str:
    """Where scratch files go: dask's own setting, or else the system's temporary directory."""
    import dask.config

    return str(dask.config.get("temporary-directory", None) or tempfile.gettempdir())


def as_bytes(array: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def span(extents: Sequence[Extent]) -> int:
    """Bytes of a buffer for these arrays, each of them aligned."""
    return sum(-(-extent.nbytes // ALIGNMENT) * ALIGNMENT for extent in extents)


def _unnamed(directory: str) -> Any:
    return tempfile.TemporaryFile(
        buffering=0, prefix="daskfactor-", suffix=".blocks", dir=directory
    )


def _private(path: str) -> Any:
    """A new file for nobody but this user."""
    return open(path, "x+b", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600))
