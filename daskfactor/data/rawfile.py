"""A local file of raw arrays: appended once, read back by position or mapped.

Either without a name where the system allows it (unlinked as soon as it is open,
so that it is gone with the process even if that is killed), or with one, for
other processes of the machine.
"""

import contextlib
import errno
import importlib
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

fcntl: Any = None  # not on every system; without it files are not marked as in use
with contextlib.suppress(ImportError):
    fcntl = importlib.import_module("fcntl")

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

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


class RawFile:
    """Arrays one after another, each at a multiple of 64 bytes.

    Appending is for one thread; reading is safe from several at once. ``path``
    opens a file that exists; ``directory`` makes a new one, with a name (``name``)
    or without.
    """

    def __init__(
        self, directory: str = "", name: str | None = None, path: str | None = None
    ) -> None:
        self.path = path
        self._directory = directory or str(Path(path or "").parent)
        self._seek = threading.Lock()
        self._map: mmap.mmap | None = None
        if path is not None:
            self._file: IO[bytes] = _opened(path, "rb")
            self.size = os.fstat(self._file.fileno()).st_size
            return
        self.size = 0
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            if name is None:
                self._file = tempfile.TemporaryFile(  # noqa: SIM115 - lives as long as the object
                    buffering=0, prefix="daskfactor-", suffix=".blocks", dir=directory
                )
            else:
                self.path = str(Path(directory) / name)
                self._file = _opened(self.path, "x+b")
        except OSError as error:
            raise self._failed(error, 0) from error

    def append(self, array: NDArray[Any]) -> Extent:
        """Write an array behind what is there."""
        array = np.ascontiguousarray(array)
        start = -(-self.size // ALIGNMENT) * ALIGNMENT
        position, data = start, as_bytes(array)
        try:
            while data.nbytes:
                written = self._write(data, position)
                data, position = data[written:], position + written
        except OSError as error:
            raise self._failed(error, array.nbytes) from error
        self.size = position
        return Extent(start, array.dtype.str, array.shape)

    def read(self, extent: Extent, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """The array at an extent, in new memory or in ``out``, flat bytes that are long enough."""
        if out is None:
            out = np.empty(extent.nbytes, np.uint8)
        data, position = out[: extent.nbytes].data, extent.start
        while data.nbytes:
            count = self._read(data, position)
            if count == 0:
                raise StoreError(f"the file {self._name()} ends too early, at byte {position}")
            data, position = data[count:], position + count
        return out[: extent.nbytes].view(extent.dtype).reshape(extent.shape)

    def map(self, extent: Extent) -> NDArray[Any]:
        """The array at an extent without a copy: pages shared with all who map the file.

        Pages are copied on a write, so the array counts as writeable (compiled
        kernels are specialised on that) and the file cannot be changed through it.
        """
        if extent.nbytes == 0:
            return np.empty(extent.shape, extent.dtype)
        if extent.stop > self.size:
            raise StoreError(f"the file {self._name()} is cut off at byte {self.size}")
        with self._seek:
            if self._map is None:
                self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        count = extent.nbytes // np.dtype(extent.dtype).itemsize
        flat = np.frombuffer(self._map, extent.dtype, count, extent.start)
        return flat.reshape(extent.shape)

    def prefetch(self, extents: Sequence[Extent]) -> None:
        """Hint that these arrays will be read soon."""
        if extents and hasattr(os, "posix_fadvise") and not self._file.closed:
            start, stop = extents[0].start, extents[-1].stop
            os.posix_fadvise(self._file.fileno(), start, stop - start, os.POSIX_FADV_WILLNEED)

    def hold(self) -> None:
        """Mark the file as in use, where the system can, until it is closed or the process ends."""
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file.fileno(), fcntl.LOCK_SH)

    @staticmethod
    def held(path: str) -> bool:
        """Whether some process holds a file; True where the system cannot say."""
        if fcntl is None:
            return True
        with Path(path).open("rb") as file:
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
        if self.path is not None:
            Path(self.path).unlink(missing_ok=True)

    def _write(self, data: memoryview, start: int) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self._file.fileno(), data, start)
        with self._seek:
            self._file.seek(start)
            return self._file.write(data)

    def _read(self, data: memoryview, start: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [data], start)
        with self._seek:
            self._file.seek(start)
            piece = self._file.read(data.nbytes)
            data[: len(piece)] = piece
            return len(piece)

    def _name(self) -> str:
        return self.path or f"in {self._directory}"

    def _failed(self, error: OSError, size: int) -> StoreError:
        full = error.errno in DISK_FULL
        cause = "there is not enough room" if full else str(error)
        remedy = "free some" if full else "make it writable"
        return StoreError(
            f"a scratch file of {self.size + size} bytes and more is needed in {self._directory}, "
            f"but {cause}; {remedy}, or name another directory with the dask option "
            "'temporary-directory'"
        )


def _opened(path: str, mode: str) -> Any:
    """A file for nobody but this user."""
    return open(path, mode, buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600))


def as_bytes(array: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data
