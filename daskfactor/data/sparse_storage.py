"""Where sparse blocks live while a run reads them: in memory, or in a scratch file."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blockfile import BlockFile
from daskfactor.data.grid import Block, Grid
from daskfactor.errors import OptionError
from daskfactor.kernels.views import SparseBlock


class SparseCache:
    """Sparse blocks in memory."""

    in_memory = True

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], SparseBlock] = {}

    def put(self, block: Block, values: SparseBlock) -> None:
        self._blocks[block] = values

    def view(self, row: int, col: int, buffer: NDArray[Any] | None) -> SparseBlock:
        return self._blocks[row, col]

    def prefetch(self, row: int, col: int) -> None:
        """Already in memory."""

    def close(self) -> None:
        self._blocks.clear()


class SparseScratch:
    """Sparse blocks in a temporary file without a name."""

    in_memory = False

    def __init__(self, grid: Grid, zeros: bool, directory: str) -> None:
        self._grid = grid
        self._zeros = zeros
        self._file = BlockFile(directory)

    def put(self, block: Block, values: SparseBlock) -> None:
        self._file.write(block, [values.indptr, values.indices, values.values])

    def view(self, row: int, col: int, buffer: NDArray[Any] | None) -> SparseBlock:
        if buffer is not None and (buffer.dtype != np.uint8 or buffer.size < self._file.largest):
            raise OptionError(
                f"a buffer for sparse blocks must be {self._file.largest} bytes of uint8, got "
                f"{buffer.dtype} with {buffer.size} entries; use new_buffer()"
            )
        block = Block(row, col)
        indptr, indices, values = self._file.read(block, buffer)
        return SparseBlock(indptr, indices, values, *self._grid.block_shape(block), self._zeros)

    def prefetch(self, row: int, col: int) -> None:
        self._file.prefetch(Block(row, col))

    def close(self) -> None:
        self._file.close()

    @property
    def largest(self) -> int:
        """Bytes that a buffer for a view needs."""
        return self._file.largest


class Spool:
    """Groups of arrays appended under keys and taken out again, in memory up to a budget.

    Beyond the budget everything goes to a temporary file, in runs as long as the
    budget made them.
    """

    def __init__(self, budget: int, directory: str) -> None:
        self._budget = budget
        self._directory = directory
        self._kept: dict[int, list[tuple[NDArray[Any], ...]]] = {}
        self._bytes = 0
        self._files: list[_SpoolFile] = []

    def append(self, key: int, arrays: tuple[NDArray[Any], ...]) -> None:
        """Keep these arrays; all groups of a key have the same number of them."""
        self._kept.setdefault(key, []).append(arrays)
        self._bytes += sum(array.nbytes for array in arrays)
        if self._bytes > self._budget:
            self._spill()

    def take(self, key: int) -> list[tuple[NDArray[Any], ...]]:
        """All groups of a key in the order they came, given away."""
        groups = [group for file in self._files for group in file.take(key)]
        kept = self._kept.pop(key, [])
        self._bytes -= sum(array.nbytes for group in kept for array in group)
        return groups + kept

    def close(self) -> None:
        """Give back memory and disk."""
        self._kept.clear()
        for file in self._files:
            file.close()

    def _spill(self) -> None:
        if not self._files:
            self._files.append(_SpoolFile(self._directory))
        for key, groups in self._kept.items():
            self._files[0].append(key, joined(groups))
        self._kept.clear()
        self._bytes = 0


class _SpoolFile:
    def __init__(self, directory: str) -> None:
        from daskfactor.data.rawfile import Extent, RawFile

        self._file = RawFile(directory)
        self._extents: dict[int, list[list[Extent]]] = {}

    def append(self, key: int, arrays: tuple[NDArray[Any], ...]) -> None:
        self._extents.setdefault(key, []).append([self._file.append(a) for a in arrays])

    def take(self, key: int) -> list[tuple[NDArray[Any], ...]]:
        groups = self._extents.pop(key, [])
        return [tuple(self._file.read(extent) for extent in group) for group in groups]

    def close(self) -> None:
        self._file.close()


def joined(groups: list[tuple[NDArray[Any], ...]]) -> tuple[NDArray[Any], ...]:
    """Groups of arrays as one group, each array as long as all its parts together."""
    if len(groups) == 1:
        return groups[0]
    return tuple(np.concatenate(parts) for parts in zip(*groups, strict=True))
