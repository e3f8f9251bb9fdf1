"""Blocks in one local file: any number of arrays per block, with an index at the end.

    magic | arrays, each at a multiple of 64 bytes | index (JSON) | its length | magic

The process that made the file reads it back in bounded memory (`read`); other
processes of the machine map it, so that they share the pages (`map`).
"""

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.grid import Block
from daskfactor.data.rawfile import ALIGNMENT, Extent, RawFile
from daskfactor.errors import StoreError, StoreFormatError

MAGIC = np.frombuffer(b"dfblocks", np.uint8)


class BlockFile:
    """Arrays by block: written once by one thread, then read by any number.

    Made empty in ``directory``, under ``name`` or without a name; or opened with
    `open_path`, with what was noted about it in ``about``.
    """

    def __init__(self, directory: str, name: str | None = None) -> None:
        self._file = RawFile(directory, name)
        self._extents: dict[Block, list[Extent]] = {}
        self._own = threading.local()
        self._largest = 0
        self.about: Mapping[str, Any] = {}
        self._file.append(MAGIC)

    @classmethod
    def open_path(cls, path: str) -> "BlockFile":
        """A finished file, for reading.

        Raises
        ------
        StoreError
            If it cannot be opened, is cut off, or is not a file of blocks.
        """
        self = cls.__new__(cls)
        try:
            self._file = RawFile(path=path)
        except OSError as error:
            raise StoreError(f"the blocks at {path} cannot be opened: {error}") from error
        self._own = threading.local()
        try:
            index = _read_index(self._file)
        except BaseException:
            self._file.close()
            raise
        self.about = index["about"]
        self._extents = {
            Block(row, col): [Extent(start, dtype, tuple(shape)) for start, dtype, shape in parts]
            for row, col, parts in index["blocks"]
        }
        self._largest = max((_span(parts) for parts in self._extents.values()), default=0)
        return self

    @property
    def path(self) -> str | None:
        """The name other processes open it by, if it has one."""
        return self._file.path

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self._file.size

    @property
    def largest(self) -> int:
        """Bytes that a buffer for `read` needs."""
        return self._largest

    def write(self, block: Block, arrays: Sequence[NDArray[Any]]) -> None:
        """Append the arrays of one block."""
        self._extents[block] = [self._file.append(array) for array in arrays]
        self._largest = max(self._largest, _span(self._extents[block]))

    def finish(self, about: Mapping[str, Any]) -> None:
        """Append the index, once all blocks are there; ``about`` is anything that JSON can hold."""
        self.about = about
        blocks = [[*block, parts] for block, parts in self._extents.items()]
        index = json.dumps({"about": about, "blocks": blocks}).encode()
        self._file.append(np.frombuffer(index, np.uint8))
        self._file.append(np.frombuffer(MAGIC.tobytes() + len(index).to_bytes(8, "little"), "u1"))

    def read(self, block: Block, buffer: NDArray[np.uint8] | None = None) -> list[NDArray[Any]]:
        """The arrays of one block, in ``buffer`` or in one of the calling thread.

        The thread's next call overwrites its own buffer.
        """
        extents = self._extents[block]
        buffer = self._own_buffer() if buffer is None else buffer
        found, start = [], 0
        try:
            for extent in extents:
                found.append(self._file.read(extent, buffer[start : start + extent.nbytes]))
                start += _aligned(extent.nbytes)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"block ({block.row}, {block.col}) could not be read back from its scratch file: "
                f"{error}; call as_blocks on the data again"
            ) from error
        return found

    def map(self, block: Block) -> list[NDArray[Any]]:
        """The arrays of one block where they lie in the file; writing to them changes nothing."""
        return [self._file.map(extent) for extent in self._extents[block]]

    def prefetch(self, block: Block) -> None:
        """Hint that a block will be read soon."""
        self._file.prefetch(self._extents[block])

    def hold(self) -> None:
        """Mark the file as in use for as long as this process has it open."""
        self._file.hold()

    @staticmethod
    def held(path: str) -> bool:
        """Whether a process has the file open and marked as in use."""
        return RawFile.held(path)

    def close(self) -> None:
        """Close it; a file without a name is gone then."""
        self._file.close()

    def remove(self) -> None:
        """Close it and delete it."""
        self._file.remove()

    def _own_buffer(self) -> NDArray[np.uint8]:
        buffer: NDArray[np.uint8] | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.size < self._largest:
            buffer = np.empty(self._largest, np.uint8)
            self._own.buffer = buffer
        return buffer


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _span(extents: Sequence[Extent]) -> int:
    return sum(_aligned(extent.nbytes) for extent in extents)


def _read_index(file: RawFile) -> Any:
    tail = Extent(file.size - 16, "|u1", (16,))
    end = file.read(tail).tobytes() if file.size >= 16 else b""
    length = int.from_bytes(end[8:], "little")
    start = (file.size - 16) // ALIGNMENT * ALIGNMENT - _aligned(length)
    if end[:8] != MAGIC.tobytes() or start < 0:
        raise StoreFormatError(
            f"{file.path} is not a finished file of blocks: it is cut off, or something else"
        )
    return json.loads(file.read(Extent(start, "|u1", (length,))).tobytes())
