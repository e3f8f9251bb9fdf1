"""Where the decoded blocks of a matrix live while a run reads them.

A storage has ``view(row, col)``, which gives a block for reading, safe from several threads
at once; ``put(block, view)``, which takes a finished block over; ``in_memory``, ``place`` and
``close``. A view from a scratch file lies in memory of the calling thread, which the
thread's next view overwrites.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.grid import Block, Grid
from daskfactor.data.scratch import ArrayFile, Extent, scratch_directory
from daskfactor.errors import DataError, StoreError, StoreFormatError
from daskfactor.kernels.views import AnyBlock, BlockView, SparseBlock, index_type, pointer_type

FloatArray = NDArray[np.floating[Any]]
FloatType = np.dtype[np.floating[Any]]
Load = Callable[[Block], AnyBlock]

ATTEMPTS = 3
FIRST_PAUSE = 0.1


class Storage(Protocol):
    """What holds the blocks of a matrix."""

    in_memory: bool
    place: str

    def put(self, block: Block, view: AnyBlock) -> None:
        """Take over one finished block."""

    def view(self, row: int, col: int) -> AnyBlock:
        """One block, for reading. Safe to call from several threads at once."""

    def close(self) -> None:
        """Give back memory or disk. Can be called again."""


class WholeArray:
    """The user's own array; blocks are windows of it and nothing is copied."""

    in_memory = True
    place = "in memory"

    def __init__(self, grid: Grid, array: FloatArray) -> None:
        self._grid = grid
        self._array = array

    def put(self, block: Block, view: AnyBlock) -> None:
        """Nothing to take over: the values are in the array already."""

    def view(self, row: int, col: int) -> BlockView:
        rows, cols = self._grid.rows, self._grid.cols
        return BlockView(
            self._array, rows.offsets[row], cols.offsets[col], rows.sizes[row], cols.sizes[col]
        )

    def close(self) -> None:
        """The array is the caller's."""


class MemoryBlocks:
    """Blocks in memory."""

    in_memory = True
    place = "in memory"

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], AnyBlock] = {}

    def put(self, block: Block, view: AnyBlock) -> None:
        self._blocks[block] = view

    def view(self, row: int, col: int) -> AnyBlock:
        return self._blocks[row, col]

    def close(self) -> None:
        self._blocks.clear()


class ScratchBlocks:
    """Blocks in a local file: a scratch file without a name, or one that other processes map.

    ``unstored`` is None for dense blocks, else "zero" or "missing".
    """

    in_memory = False
    place = "in a scratch file"

    def __init__(self, grid: Grid, unstored: str | None, file: ArrayFile) -> None:
        self._grid = grid
        self._unstored = unstored
        self._file = file
        self.extents: dict[Block, list[Extent]] = {}

    def put(self, block: Block, view: AnyBlock) -> None:
        arrays = view[:3] if isinstance(view, SparseBlock) else (view.block,)
        self.extents[block] = [self._file.append(array) for array in arrays]

    def view(self, row: int, col: int) -> AnyBlock:
        try:
            arrays = self._file.read_again(self.extents[Block(row, col)])
        except (OSError, ValueError) as error:
            raise StoreError(
                f"block ({row}, {col}) could not be read back from its scratch file: {error}; "
                "call as_blocks on the data again"
            ) from error
        return self._viewed(Block(row, col), arrays)

    def close(self) -> None:
        self._file.close()

    def _viewed(self, block: Block, arrays: list[NDArray[Any]]) -> AnyBlock:
        m, n = self._grid.block_shape(block)
        if self._unstored is None:
            return BlockView(arrays[0], 0, 0, m, n)
        return SparseBlock(arrays[0], arrays[1], arrays[2], m, n, self._unstored == "zero")


class MappedBlocks(ScratchBlocks):
    """Blocks where they lie in a file that another process wrote."""

    in_memory = True
    place = "in a file of another process"

    def view(self, row: int, col: int) -> AnyBlock:
        block = Block(row, col)
        return self._viewed(block, [self._file.map(extent) for extent in self.extents[block]])


class LoadedBlocks:
    """Blocks that are loaded when they are wanted, and decoded once.

    What fits in the budget is kept in memory, the rest in a scratch file of decoded blocks,
    if there is room for one. A run visits all blocks in every cycle: throwing out the oldest
    for the newest would hardly ever keep a block until its next turn, so what is kept first
    stays. What fails is tried again, three times in all.
    """

    def __init__(
        self,
        grid: Grid,
        load: Load,
        sizes: NDArray[np.int64],
        budget: int,
        unstored: str | None = None,
    ) -> None:
        self._load = load
        self._left = budget
        self._kept: dict[tuple[int, int], AnyBlock] = {}
        self._lock = threading.Lock()
        self._scratch: ScratchBlocks | None = None
        self._room = True
        self._grid = grid
        self._unstored = unstored
        self.in_memory = bool(sizes.sum() <= budget)
        self.place = "in memory" if self.in_memory else "in a store"

    def put(self, block: Block, view: AnyBlock) -> None:
        """Nothing to take over: the blocks are where they are loaded from."""

    def view(self, row: int, col: int) -> AnyBlock:
        found = self._kept.get((row, col))
        if found is not None:
            return found
        scratch, block = self._scratch, Block(row, col)
        if scratch is not None and block in scratch.extents:
            return scratch.view(row, col)
        view = self._tried(block)
        with self._lock:
            self._keep(block, view)
        return view

    def close(self) -> None:
        self._kept.clear()
        if self._scratch is not None:
            self._scratch.close()

    def _tried(self, block: Block) -> AnyBlock:
        for attempt in range(ATTEMPTS):
            try:
                return self._load(block)
            except (DataError, StoreFormatError, MemoryError):
                raise
            except Exception as error:
                if attempt + 1 == ATTEMPTS:
                    raise StoreError(
                        f"block ({block.row}, {block.col}) could not be read in {ATTEMPTS} "
                        f"attempts: {error}"
                    ) from error
            time.sleep(FIRST_PAUSE * 4**attempt)
        raise AssertionError("not reached")

    def _keep(self, block: Block, view: AnyBlock) -> None:
        if block in self._kept or (self._scratch is not None and block in self._scratch.extents):
            return
        size = view_bytes(view)
        if size <= self._left:
            self._kept[block] = view
            self._left -= size
        elif self._room:
            try:
                if self._scratch is None:
                    file = ArrayFile(scratch_directory())
                    self._scratch = ScratchBlocks(self._grid, self._unstored, file)
                self._scratch.put(block, view)
            except StoreError:  # a full disk: what is not in the file is loaded again
                self._room = False


class Closed:
    """What is left after ``close()``: every read says so."""

    in_memory = False
    place = "closed"

    def put(self, block: Block, view: AnyBlock) -> None:
        raise _closed()

    def view(self, row: int, col: int) -> AnyBlock:
        raise _closed()

    def close(self) -> None:
        """Closed already."""


def _closed() -> StoreError:
    return StoreError("these blocks were closed; call as_blocks on the data again")


def zero_copy(array: NDArray[Any], dtype: FloatType) -> bool:
    """Whether kernels can read this array where it is.

    A read-only array is copied, because compiled kernels are specialised on
    writable ones; a memory-mapped one is copied, because reading it would fill
    the resident set without bound.
    """
    flags = array.flags
    usable = flags.c_contiguous and flags.aligned and flags.writeable
    return usable and array.dtype == dtype and array.dtype.isnative and not _is_mapped(array)


def _is_mapped(array: object) -> bool:
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return True
        array = array.base
    return False


def view_bytes(view: AnyBlock) -> int:
    """Bytes that a view keeps in memory."""
    if isinstance(view, SparseBlock):
        return view.indptr.nbytes + view.indices.nbytes + view.values.nbytes
    return view.array.nbytes


def block_bytes(
    grid: Grid, dtype: np.dtype[Any], n_stored: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """Bytes of every decoded block, (B, B); ``n_stored`` is None for dense ones."""
    rows, cols = np.array(grid.rows.sizes), np.array(grid.cols.sizes)
    if n_stored is None:
        return np.outer(rows, cols) * dtype.itemsize
    entry = np.array([index_type(n).itemsize for n in grid.cols.sizes]) + dtype.itemsize
    pointer = np.vectorize(lambda stored: pointer_type(stored).itemsize, otypes=[np.int64])
    found: NDArray[np.int64] = n_stored * entry + (rows + 1)[:, None] * pointer(n_stored)
    return found
