"""Triples dealt out to the blocks of a grid, in memory or in a local scratch file.

Pieces of the source arrive in any order and from any thread; each is sorted by
block and kept whole, with a table of where each block's part begins. A block is
then gathered from its parts in the order of the source.
"""

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.grid import Block, Grid
from daskfactor.data.keys import Positions
from daskfactor.data.scratch import ArrayFile, Extent
from daskfactor.kernels.triples import count_blocks, deal_blocks, triple_type


class Places:
    """Block and position inside it of every row and column of the caller."""

    def __init__(
        self,
        grid: Grid,
        row_order: NDArray[np.int64] | None = None,
        col_order: NDArray[np.int64] | None = None,
    ) -> None:
        self.blocks = grid.blocks
        self.row_band, self.row_local = _places(grid.rows.offsets, row_order)
        self.col_band, self.col_local = _places(grid.cols.offsets, col_order)


class Spill:
    """Triples by block.

    Parameters
    ----------
    places
        What goes where.
    dtype
        Type of the values.
    directory
        Where the scratch file goes; None keeps everything in memory.
    """

    def __init__(self, places: Places, dtype: np.dtype[Any], directory: str | None) -> None:
        self._places = places
        self._record = triple_type(dtype)
        self._file = ArrayFile(directory) if directory is not None else None
        self._lock = threading.Lock()
        self._kept: dict[int, NDArray[Any] | int] = {}
        self._edges: dict[int, NDArray[np.int64]] = {}
        self.counts = np.zeros((places.blocks, places.blocks), np.int64)

    def add(self, number: int, rows: Positions, cols: Positions, values: NDArray[Any]) -> None:
        """Take over piece ``number`` of the source. From any thread."""
        places, blocks = self._places, self._places.blocks
        counts = np.zeros((blocks, blocks), np.int64)
        count_blocks(rows, cols, places.row_band, places.col_band, counts)
        edges = np.concatenate([[0], np.cumsum(counts.ravel())])
        records = np.empty(rows.size, self._record)
        deal_blocks(
            rows,
            cols,
            values,
            places.row_band,
            places.col_band,
            places.row_local,
            places.col_local,
            edges[:-1].reshape(blocks, blocks).copy(),
            records,
        )
        with self._lock:
            if self._file is not None:
                self._kept[number] = self._file.append(records.view(np.uint8)).start
            else:
                self._kept[number] = records
            self._edges[number] = edges
            self.counts += counts

    def gather(self, block: Block) -> NDArray[Any]:
        """All triples of one block, in the order of the source. From any thread."""
        flat = block.row * self._places.blocks + block.col
        out = np.empty(int(self.counts[block]), self._record)
        start = 0
        for number in sorted(self._kept):
            low, high = self._edges[number][flat : flat + 2].tolist()
            if high > low:
                self._copy(number, low, out[start : start + high - low])
                start += high - low
        return out

    def close(self) -> None:
        """Give memory or disk back."""
        self._kept.clear()
        if self._file is not None:
            self._file.close()

    def _copy(self, number: int, low: int, out: NDArray[Any]) -> None:
        kept = self._kept[number]
        if isinstance(kept, np.ndarray):
            out[:] = kept[low : low + out.size]
            return
        assert self._file is not None
        extent = Extent(kept + low * self._record.itemsize, "|u1", (out.nbytes,))
        out.view(np.uint8)[:] = self._file.read([extent])[0]


def _places(
    offsets: tuple[int, ...], order: NDArray[np.int64] | None
) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    sizes = np.diff(offsets)
    band = np.repeat(np.arange(sizes.size, dtype=np.uint16), sizes)
    local = (np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)).astype(np.uint32)
    if order is None:
        return band, local
    by_row, by_local = np.empty_like(band), np.empty_like(local)
    by_row[order], by_local[order] = band, local
    return by_row, by_local
