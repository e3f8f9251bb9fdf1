"""Where decoded blocks live while a run reads them, and the view a kernel gets of one."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.grid import Block, Grid
from daskfactor.errors import StoreError
from daskfactor.kernels.views import BlockView, SparseBlock

__all__ = [
    "BlockCache",
    "BlockView",
    "Closed",
    "FloatArray",
    "FloatType",
    "SparseBlock",
    "Storage",
    "WholeArray",
    "zero_copy",
]

FloatArray = NDArray[np.floating[Any]]
FloatType = np.dtype[np.floating[Any]]


class Storage(Protocol):
    """What holds the blocks: the user's own array, a cache in memory, or a scratch file."""

    in_memory: bool

    def put(self, block: Block, values: Any) -> None:
        """Take over one finished block: an array, or a `SparseBlock`."""

    def view(self, row: int, col: int, buffer: NDArray[Any] | None) -> Any:
        """One block, for reading. Safe to call from several threads at once."""

    def prefetch(self, row: int, col: int) -> None:
        """Hint that a block will be read soon."""

    def close(self) -> None:
        """Give back memory or disk. Can be called again."""


class WholeArray:
    """The user's own array; blocks are windows of it and nothing is copied."""

    in_memory = True

    def __init__(self, grid: Grid, array: FloatArray) -> None:
        self._grid = grid
        self._array = array

    def put(self, block: Block, values: FloatArray) -> None:
        """Nothing to take over: the values are in the array already."""

    def view(self, row: int, col: int, buffer: FloatArray | None) -> BlockView:
        rows, cols = self._grid.rows, self._grid.cols
        return BlockView(
            self._array, rows.offsets[row], cols.offsets[col], rows.sizes[row], cols.sizes[col]
        )

    def prefetch(self, row: int, col: int) -> None:
        """Already in memory."""

    def close(self) -> None:
        """The array is the caller's."""


class BlockCache:
    """One contiguous array per block, in memory."""

    in_memory = True

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], FloatArray] = {}

    def put(self, block: Block, values: FloatArray) -> None:
        self._blocks[block] = values

    def view(self, row: int, col: int, buffer: FloatArray | None) -> BlockView:
        values = self._blocks[row, col]
        return BlockView(values, 0, 0, values.shape[0], values.shape[1])

    def prefetch(self, row: int, col: int) -> None:
        """Already in memory."""

    def close(self) -> None:
        self._blocks.clear()


class Closed:
    """What is left after ``close()``: every read says so."""

    in_memory = False

    def put(self, block: Block, values: FloatArray) -> None:
        raise _closed()

    def view(self, row: int, col: int, buffer: FloatArray | None) -> BlockView:
        raise _closed()

    def prefetch(self, row: int, col: int) -> None:
        """A hint to nobody."""

    def close(self) -> None:
        """Closed already."""


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


def _closed() -> StoreError:
    return StoreError("these blocks were closed; call as_blocks on the data again")
