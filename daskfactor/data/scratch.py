"""Scratch: decoded blocks in one raw local file, for matrices that do not fit in memory.

The file has no name where the system allows it (it is unlinked as soon as it
is open), so that it is gone with the process even if that is killed. It is read
with positioned reads into a buffer rather than mapped, so that neither address
space nor resident set grows with the matrix.
"""

import errno
import os
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.grid import Block, Grid
from daskfactor.data.storage import BlockView, FloatArray, FloatType
from daskfactor.errors import OptionError, StoreError

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class ScratchBlocks:
    """Blocks one after another, row by row of blocks, in an unnamed temporary file."""

    in_memory = False

    def __init__(self, grid: Grid, dtype: FloatType, directory: str) -> None:
        self._dtype = dtype
        self._directory = directory
        self._shapes = {block: grid.block_shape(block) for block in grid.all_blocks()}
        self._starts: dict[Block, int] = {}
        self._size = 0
        for block, (m, n) in self._shapes.items():
            self._starts[block] = self._size
            self._size += m * n * dtype.itemsize
        self._largest = max(m * n for m, n in self._shapes.values())
        self._own = threading.local()
        self._seek = threading.Lock()
        self._file = self._create()

    def put(self, block: Block, values: FloatArray) -> None:
        data = _bytes(np.ascontiguousarray(values, self._dtype))
        start = self._starts[block]
        try:
            while data.nbytes:
                written = self._write(data, start)
                data, start = data[written:], start + written
        except OSError as error:
            raise self._failed(error) from error

    def view(self, row: int, col: int, buffer: FloatArray | None) -> BlockView:
        block = Block(row, col)
        m, n = self._shapes[block]
        flat = self._checked(buffer) if buffer is not None else self._own_buffer()
        values = flat[: m * n].reshape(m, n)
        data, start = _bytes(values), self._starts[block]
        try:
            while data.nbytes:
                count = self._read(data, start)
                if count == 0:
                    raise StoreError(f"the scratch file in {self._directory} ends too early")
                data, start = data[count:], start + count
        except (OSError, ValueError) as error:
            raise StoreError(
                f"block ({row}, {col}) could not be read back from the scratch file in "
                f"{self._directory}: {error}; call as_blocks on the data again"
            ) from error
        return BlockView(values, 0, 0, m, n)

    def prefetch(self, row: int, col: int) -> None:
        if hasattr(os, "posix_fadvise") and not self._file.closed:
            m, n = self._shapes[Block(row, col)]
            size = m * n * self._dtype.itemsize
            start = self._starts[Block(row, col)]
            os.posix_fadvise(self._file.fileno(), start, size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        self._file.close()

    def _create(self) -> IO[bytes]:
        try:
            Path(self._directory).mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(  # noqa: SIM115 - lives as long as the blocks
                buffering=0, prefix="daskfactor-", suffix=".blocks", dir=self._directory
            )
        except OSError as error:
            raise self._failed(error) from error
        try:
            self._reserve(file.fileno())
        except OSError as error:
            file.close()
            raise self._failed(error) from error
        return file

    def _reserve(self, descriptor: int) -> None:
        """Take all the room at once, so that a full disk is noticed before the pass."""
        if not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(descriptor, 0, self._size)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise

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

    def _own_buffer(self) -> FloatArray:
        """The calling thread's buffer, which its next view overwrites."""
        buffer: FloatArray | None = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = np.empty(self._largest, self._dtype)
            self._own.buffer = buffer
        return buffer

    def _checked(self, buffer: FloatArray) -> FloatArray:
        fits = buffer.dtype == self._dtype and buffer.size >= self._largest
        if not fits or not buffer.flags.c_contiguous or not buffer.flags.writeable:
            raise OptionError(
                f"a buffer for blocks must be writeable, contiguous, {self._dtype} and of at least "
                f"{self._largest} entries, got {buffer.dtype} with {buffer.size} entries; use "
                "new_buffer()"
            )
        return buffer.reshape(-1)

    def _failed(self, error: OSError) -> StoreError:
        if error.errno in DISK_FULL:
            cause = "there is not enough room"
            remedy = "free some"
        else:
            cause = str(error)
            remedy = "make it writable"
        return StoreError(
            f"a scratch file of {self._size} bytes is needed in {self._directory}, but {cause}; "
            f"{remedy}, name another directory with the dask option 'temporary-directory', or "
            "raise memory_limit"
        )


def scratch_directory() -> str:
    """Where scratch files go: dask's own setting, or else the system's temporary directory."""
    import dask.config

    return str(dask.config.get("temporary-directory", None) or tempfile.gettempdir())


def _bytes(values: NDArray[Any]) -> memoryview:
    return values.reshape(-1).view(np.uint8).data
