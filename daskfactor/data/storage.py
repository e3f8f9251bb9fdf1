"""Storage of the blocks of a matrix during a run: in memory, in local files, or in a store.

A scratch file has no name (it is unlinked as soon as it is open), so it disappears with the process
even if that is killed. It is read with positioned reads into a buffer of the thread and not mapped,
so that neither address space nor resident set grows with the matrix. A file for other processes has
a name and is mapped, so that they share its pages.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.grid import Block, BlockAddress, Grid, block_at
from daskfactor.errors import DataError, StoreError, StoreFormatError
from daskfactor.kernels.views import (
    AnyBlock,
    BlockView,
    SparseBlock,
    TensorBlock,
    index_type,
    pointer_type,
)

FloatArray = NDArray[np.floating[Any]]
FloatType = np.dtype[np.floating[Any]]
Load = Callable[[Block], AnyBlock]

ALIGNMENT = 64
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
PREFIX = "daskfactor-shared-"
OLD = 60.0
"""Age in seconds after which a file without lock counts as abandoned."""
PAUSES = (0.1, 0.4)
"""Seconds between attempts to load a block."""


class Extent(NamedTuple):
    """Position, dtype and shape of an array in a file."""

    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class ArrayFile:
    """Arrays one after another in a local file, each at a multiple of 64 bytes.

    Safe to use from several threads. The file is created at the first write, and arrays passed to
    `put` stay in memory as far as the budget allows.

    Parameters
    ----------
    directory
        Directory of a new file, private to this user; the scratch directory by default.
    named
        Let other processes open the file by its ``path``. It stays locked, see `sweep`, until it
        is closed or the process ends.
    path
        An existing file to read.
    reserve
        Bytes to allocate at once, so that a full disk is noticed before the work.
    budget
        Bytes of arrays that may be kept in memory.
    """

    def __init__(
        self,
        directory: str = "",
        *,
        named: bool = False,
        path: str = "",
        reserve: int = 0,
        budget: int = 0,
    ) -> None:
        self.path = path
        self._size = 0
        self._directory = directory
        self._named = named
        self._reserved = reserve
        self._left = budget
        self._thread = threading.local()
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = open(path, "rb", buffering=0) if path else None  # noqa: PTH123, SIM115
        if named or reserve:
            self._make()

    def fits(self, nbytes: int) -> bool:
        """Take bytes from the budget if they are left, and return whether they were."""
        with self._lock:
            fits = nbytes <= self._left
            if fits:
                self._left -= nbytes
            return fits

    def put(self, array: NDArray[Any]) -> NDArray[Any] | Extent:
        """Keep a flat array in memory or in the file; pass the returned value to `get`."""
        return array if self.fits(array.nbytes) else self.append(array)

    def get(self, stored: NDArray[Any] | Extent, part: slice | None = None) -> NDArray[Any]:
        """Return a flat array or a part of it; a complete array in memory is released."""
        if isinstance(stored, np.ndarray):
            if part is None:
                self.fits(-stored.nbytes)
            return stored[part or slice(None)]
        if part is not None:
            start = stored.start + part.start * np.dtype(stored.dtype).itemsize
            stored = Extent(start, stored.dtype, (part.stop - part.start,))
        return self.read([stored])[0]

    def append(self, array: NDArray[Any]) -> Extent:
        """Write an array at the end."""
        extent = self.reserve(array.shape, array.dtype)
        self.write(extent, array)
        return extent

    def reserve(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Extent:
        """Reserve space for an array at the end."""
        with self._lock:
            if self._file is None:
                self._make()
            extent = Extent(_aligned(self._size), dtype.str, shape)
            self._size = extent.start + extent.nbytes
        return extent

    def write(self, extent: Extent, entries: NDArray[Any], first: int = 0) -> None:
        """Write entries of an array, starting at its entry ``first``."""
        data = as_bytes(np.ascontiguousarray(entries))
        position = extent.start + first * entries.itemsize
        try:
            while data.nbytes:
                written = os.pwrite(self._number, data, position)
                data, position = data[written:], position + written
        except OSError as error:
            raise self._failed(error) from error

    def read(self, extents: Sequence[Extent], reuse: bool = False) -> list[NDArray[Any]]:
        """Return arrays in new memory, or with ``reuse`` in the buffer of the thread."""
        ends = np.cumsum([_aligned(extent.nbytes) for extent in extents]).tolist()
        buffer: NDArray[np.uint8] | None = getattr(self._thread, "buffer", None) if reuse else None
        if buffer is None or buffer.size < ends[-1]:
            buffer = np.empty(ends[-1], np.uint8)
        if reuse:
            self._thread.buffer = buffer
        arrays = []
        for extent, offset in zip(extents, [0, *ends], strict=False):
            flat = buffer[offset : offset + extent.nbytes]
            data, position = flat.data, extent.start
            while data.nbytes:
                count = os.preadv(self._number, [data], position)
                if count == 0:
                    name = self.path or f"the scratch file in {self._directory}"
                    raise StoreError(f"{name} ends too early, at byte {position}")
                data, position = data[count:], position + count
            arrays.append(flat.view(extent.dtype).reshape(extent.shape))
        return arrays

    def forget(self) -> None:
        """Free the buffer of the calling thread."""
        self._thread.buffer = None

    def map(self, extents: Sequence[Extent]) -> list[NDArray[Any]]:
        """Return arrays without a copy, on pages shared with all processes that map the file.

        Pages are copied on a write, so the arrays count as writeable (compiled kernels are
        specialised on that) and the file cannot be changed through them.
        """
        pages = mmap.mmap(self._number, 0, access=mmap.ACCESS_COPY)
        return [
            np.ndarray(extent.shape, extent.dtype, pages if extent.nbytes else None, extent.start)
            for extent in extents
        ]

    def close(self) -> None:
        """Close the file; mapped arrays stay valid. Can be called again."""
        if self._file is not None:
            self._file.close()

    def remove(self) -> None:
        """Close the file and delete its name."""
        self.close()
        Path(self.path).unlink(missing_ok=True)

    @property
    def _number(self) -> int:
        assert self._file is not None
        return self._file.fileno()

    def _make(self) -> None:
        self._directory = self._directory or scratch_directory()
        try:
            Path(self._directory).mkdir(parents=True, exist_ok=True)
            if self._named:
                descriptor, self.path = tempfile.mkstemp(".blocks", PREFIX, self._directory)
                self._file = open(descriptor, "r+b", buffering=0)  # noqa: PTH123, SIM115
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            else:
                self._file = tempfile.TemporaryFile(  # noqa: SIM115
                    buffering=0, prefix="daskfactor-", dir=self._directory
                )
            if self._reserved and hasattr(os, "posix_fallocate"):  # macOS has none
                self._allocate(self._reserved)
        except OSError as error:
            raise self._failed(error) from error

    def _allocate(self, size: int) -> None:
        try:
            os.posix_fallocate(self._number, 0, size)
        except OSError as error:
            if error.errno in DISK_FULL:  # other errors: the file system cannot reserve
                self.close()
                raise

    def _failed(self, error: OSError) -> StoreError:
        full = error.errno in DISK_FULL
        cause = "there is not enough room" if full else str(error)
        remedy = "free some" if full else "make it writable"
        needed = str(self._reserved) if self._reserved else f"{self._size} or more"
        return StoreError(
            f"a scratch file of {needed} bytes is needed in {self._directory}, but {cause}; "
            f"{remedy}, name another directory with the dask option 'temporary-directory', or "
            "raise memory_limit"
        )


def as_bytes(array: NDArray[Any]) -> memoryview:
    """Return the bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def scratch_directory() -> str:
    """Return dask's ``temporary-directory``, else that of the system."""
    import dask.config

    return str(dask.config.get("temporary-directory", None) or tempfile.gettempdir())


def sweep(directory: str) -> None:
    """Delete named files of processes that were killed: nobody has locked them."""
    for path in Path(directory).glob(f"{PREFIX}*.blocks"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            # A new file is not locked for a moment.
            if time.time() - path.stat().st_mtime > OLD:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


class Storage:
    """Blocks of a matrix, read by any number of threads.

    Blocks are put here when finished, or loaded on first use and decoded once. As many as fit into
    the budget stay in memory, the others go to a scratch file, if there is space. Blocks are never
    evicted: a run visits all of them cyclically, so least-recently-used would evict the block
    needed next. A failed load is retried, up to three attempts in all.

    Parameters
    ----------
    grid, unstored
        The grid of the blocks; None for dense ones, else "zero" or "missing", or by block.
    file
        A file for all blocks.
    load
        Function that reads and decodes a block.
    nbytes, budget
        Bytes of all blocks, and bytes that may be kept in memory.
    """

    def __init__(
        self,
        grid: Grid,
        unstored: str | Mapping[Block, str | None] | None = None,
        *,
        file: ArrayFile | None = None,
        load: Load | None = None,
        nbytes: int = 0,
        budget: int = sys.maxsize,
    ) -> None:
        self.in_memory = file is None and nbytes <= budget
        self.budget = 0 if file else budget
        self.load = load
        elsewhere = "in a scratch file" if load is None else "in a store"
        self.place = "in memory" if self.in_memory else elsewhere
        self.extents: dict[BlockAddress, list[Extent]] = {}
        self._cached: dict[BlockAddress, Any] = {}
        self._file = file or ArrayFile(budget=budget)
        self._room, self._loading = True, threading.Lock()
        self._grid = grid
        self._unstored = unstored

    def view(self, *bands: int) -> AnyBlock:
        """Return one block; one from a file is overwritten by the thread's next call."""
        cached: AnyBlock | None = self._cached.get(bands)
        if cached is not None:
            return cached
        block: Any = block_at(*bands)
        if block in self.extents:
            return self._read(block)
        if self.load is None:
            raise StoreError("these blocks were closed; call as_blocks on the data again")
        view = _load_with_retries(self.load, block)
        with self._loading:  # two threads may have loaded the same block
            if not (block in self._cached or block in self.extents):
                try:
                    self.put(block, view)
                except StoreError:  # a full disk: blocks that are not stored are loaded again
                    self._room = False
        return view

    def forget(self) -> None:
        """Free the memory of this thread's latest view, which becomes invalid."""
        self._file.forget()

    def put(self, block: BlockAddress, view: AnyBlock | TensorBlock) -> None:
        """Store one finished block."""
        arrays = view.stored
        if self._file.fits(sum(array.nbytes for array in arrays)):
            self._cached[block] = view
        elif self._room:
            self.extents[block] = [self._file.append(array) for array in arrays]

    def write(self, block: Block, part: tuple[slice, slice], values: FloatArray) -> None:
        """Store a piece of a dense block; its other entries are undefined until written."""
        shape, (rows, cols) = self._grid.block_shape(block), part
        if self.in_memory:
            if block not in self._cached:
                self._cached[block] = BlockView(np.empty(shape, values.dtype), 0, 0, *shape)
            self._cached[block][0][part] = values  # the array of the view
            return
        if block not in self.extents:
            self.extents[block] = [self._file.reserve(shape, values.dtype)]
        full_width = values.shape[1] == shape[1]
        for row, piece in [(rows.start, values)] if full_width else enumerate(values, rows.start):
            self._file.write(self.extents[block][0], piece, row * shape[1] + cols.start)

    def map(self, file: ArrayFile, extents: Mapping[BlockAddress, list[Extent]]) -> None:
        """Map the blocks in a file that another process wrote."""
        arrays = iter(file.map([extent for group in extents.values() for extent in group]))
        for block, group in extents.items():
            self._cached[block] = self._view_of(block_at(*block), [next(arrays) for _ in group])
        self.place = "in a file of another process"

    def close(self) -> None:
        """Free memory or disk. Can be called again."""
        self.in_memory, self.place, self.load = False, "closed", None
        self._cached.clear()
        self.extents.clear()
        self._file.close()

    def windows(self, array: FloatArray) -> None:
        """Use windows of the caller's own array as blocks, without copies."""
        for block in self._grid.all_blocks():
            rows, cols = self._grid.slices(block)
            shape = self._grid.block_shape(block)
            self._cached[block] = BlockView(array, rows.start, cols.start, *shape)
        self.budget = 0

    def _read(self, block: BlockAddress) -> AnyBlock:
        try:
            arrays = self._file.read(self.extents[block], reuse=True)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"block {tuple(block)} could not be read back from its scratch file: "
                f"{error}; call as_blocks on the data again"
            ) from error
        view: AnyBlock = self._view_of(block, arrays)
        return view

    def _view_of(self, block: Any, arrays: list[NDArray[Any]]) -> Any:
        if len(block) > 2:
            shape: Any = self._grid.block_shape(block)
            pointers, values, *places = arrays
            return TensorBlock(pointers, tuple(places), values, shape, self._unstored == "zero")
        m, n = self._grid.block_shape(block)
        meaning = self._unstored[block] if isinstance(self._unstored, Mapping) else self._unstored
        if meaning is None:
            return BlockView(arrays[0], 0, 0, m, n)
        return SparseBlock(arrays[0], arrays[1], arrays[2], m, n, meaning == "zero")


def _load_with_retries(load: Load, block: Block) -> AnyBlock:
    attempt = 0
    while True:
        try:
            return load(block)
        except (DataError, StoreFormatError, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, StoreError) and error.errno is not None:
                raise  # from a URL, where the read was retried already
            if attempt == len(PAUSES):
                raise StoreError(
                    f"block {tuple(block)} could not be read in {attempt + 1} attempts: {error}"
                ) from error
        time.sleep(PAUSES[attempt])
        attempt += 1


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def zero_copy(array: NDArray[Any], dtype: FloatType) -> bool:
    """Return whether kernels can read this array without a copy.

    A read-only array is copied, because compiled kernels are specialised on writable ones; a
    memory-mapped one is copied, because reading it would fill the resident set without bound.
    """
    flags = array.flags
    usable = flags.c_contiguous and flags.aligned and flags.writeable
    owner: Any = array
    while isinstance(owner, np.ndarray) and not isinstance(owner, np.memmap):
        owner = owner.base
    mapped = isinstance(owner, np.memmap)
    return usable and array.dtype == dtype and array.dtype.isnative and not mapped


def block_bytes(
    grid: Grid, dtype: np.dtype[Any], n_stored: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """Return the bytes of every decoded block, (B, B); ``n_stored`` is None for dense ones."""
    if len(grid.sides) > 2 and n_stored is not None:
        first, *others = grid.sides
        each = dtype.itemsize + sum(index_type(max(side.sizes)).itemsize for side in others)
        heights = np.reshape(first.sizes, (-1, *(1,) * len(others)))
        of_tensor: NDArray[np.int64] = n_stored * each + (heights + 1) * 8
        return of_tensor
    rows, cols = np.array(grid.rows.sizes), np.array(grid.cols.sizes)
    if n_stored is None:
        return np.outer(rows, cols) * dtype.itemsize
    entry = np.array([index_type(n).itemsize for n in grid.cols.sizes]) + dtype.itemsize
    pointer = np.vectorize(lambda stored: pointer_type(stored).itemsize, otypes=[np.int64])
    nbytes: NDArray[np.int64] = n_stored * entry + (rows + 1)[:, None] * pointer(n_stored)
    return nbytes
