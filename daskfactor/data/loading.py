"""The one pass over a source: read, decode, cut into blocks, scan, store.

Edges that the chunk grid and the block grid have in common cut the matrix into
cells, and no chunk and no block reaches over a cell's edge. Inside a cell,
neighbouring chunks are read together up to a budget, and a block is handed over
as soon as its last piece has arrived. So every chunk is read once; where blocks
are made of whole chunks one block is open at a time, else about one band.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from daskfactor.data.adapters import Source
from daskfactor.data.decode import Decoder, check_shape
from daskfactor.data.grid import Bands, Block, Grid
from daskfactor.data.statistics import Statistics, StatisticsBuilder
from daskfactor.data.storage import FloatArray, FloatType, Storage, zero_copy
from daskfactor.errors import DaskfactorError, StoreError
from daskfactor.kernels.views import BlockView

Region = tuple[slice, slice]

# A chunk that is being decoded exists compressed, decompressed and in the region asked for.
LAZY_COPIES = 4


def load(
    source: Source,
    grid: Grid,
    dtype: FloatType,
    storage: Storage,
    budget: int,
    allow_empty: bool = False,
) -> Statistics:
    """Fill ``storage`` from ``source``, reading at most about ``budget`` bytes at a time."""
    builder = StatisticsBuilder(grid, source.labels)
    if source.array is not None and zero_copy(source.array, dtype):
        storage.windows(source.array)
        for block in grid.all_blocks():
            builder.scan(block, source.array[grid.slices(block)])
        return builder.finish(allow_empty)
    decoder = Decoder(dtype, source.labels)
    assembly = _Assembly(grid, dtype, builder, storage)
    for region in regions(source, grid, budget):
        raw = read(source, region)
        assembly.place(region, decoder.decode(raw, region[0].start, region[1].start))
        del raw
    statistics = builder.finish(allow_empty)
    decoder.warn()
    return statistics


def read(source: Source, region: Region) -> Any:
    """One region of the source; what goes wrong there is reported with its place."""
    try:
        found = source.read(*region)
        sides = (region[0].stop - region[0].start, region[1].stop - region[1].start)
        check_shape(found, sides, region[0].start, region[1].start)
        return found
    except (DaskfactorError, MemoryError):
        raise
    except Exception as error:
        rows, cols = region
        where = f" of {source.info.location}" if source.info.location else ""
        raise StoreError(
            f"reading rows {rows.start} to {rows.stop - 1}, columns {cols.start} to "
            f"{cols.stop - 1}{where} ({source.info.kind} input) failed: "
            f"{type(error).__name__}: {error}; check that the chunks there can be read"
        ) from error


def regions(source: Source, grid: Grid, budget: int) -> Iterator[Region]:
    """What to read, in this order: unions of whole chunks that cover the matrix once."""
    for cell in _cells(source, grid):
        yield from cell.regions(max(1, budget // source.dtype.itemsize))


def working_bytes(source: Source, grid: Grid, dtype: FloatType, budget: int) -> int:
    """What the pass holds at once, at most: a region, its decoded copy, and open blocks."""
    region, waiting = 0, 0
    for cell in _cells(source, grid):
        shapes = [
            (rows.stop - rows.start, cols.stop - cols.start)
            for rows, cols in cell.regions(max(1, budget // source.dtype.itemsize))
        ]
        region = max(region, *(height * width for height, width in shapes), 0)
        waiting = max(waiting, cell.open_entries(grid, shapes))
    copies = LAZY_COPIES if source.info.lazy else 1
    return region * (copies * source.dtype.itemsize + dtype.itemsize) + waiting * dtype.itemsize


@dataclass(frozen=True)
class _Cell:
    """Chunk edges of a cell, and how many bands of blocks the cell spans."""

    rows: list[int]
    cols: list[int]
    row_bands: int
    col_bands: int
    divisible: bool

    def regions(self, entries: int) -> Iterator[Region]:
        """Unions of neighbouring chunks of at most ``entries`` entries, or single chunks."""
        rows, cols = self.rows, self.cols
        if self.divisible:
            step = max(1, entries // (cols[-1] - cols[0]))
            rows = [*range(rows[0], rows[-1], step), rows[-1]]
        tallest = max(high - low for low, high in pairwise(rows))
        wide = list(_runs(cols, max(1, entries // tallest)))
        widest = max(part.stop - part.start for part in wide)
        strips = list(_runs(rows, max(1, entries // widest)))
        if self.row_bands == 1:
            # Down before across, so that blocks side by side need not be open together.
            return ((strip, part) for part in wide for strip in strips)
        return ((strip, part) for strip in strips for part in wide)

    def open_entries(self, grid: Grid, shapes: list[tuple[int, int]]) -> int:
        """Entries of the blocks that are begun and not finished at any one time, at most."""
        height, width = self.rows[-1] - self.rows[0], self.cols[-1] - self.cols[0]
        tallest, widest = (max(sizes) for sizes in zip(*shapes, strict=True))
        if self.row_bands > 1:
            height = min(height, tallest + 2 * max(grid.rows.sizes))
        elif self.col_bands > 1:
            width = min(width, widest + 2 * max(grid.cols.sizes))
        return height * width


@dataclass
class _OpenBlock:
    """A block of which ``left`` entries have not arrived yet, in a flat buffer."""

    buffer: FloatArray
    values: FloatArray
    left: int


class _Assembly:
    """Puts regions together to blocks, and hands each block over when it is complete.

    Buffers of blocks that were written to disk are used again: fresh ones every
    time would leave the heap in pieces, and much larger.
    """

    def __init__(
        self, grid: Grid, dtype: FloatType, builder: StatisticsBuilder, storage: Storage
    ) -> None:
        self._grid = grid
        self._dtype = dtype
        self._builder = builder
        self._storage = storage
        self._largest = max(grid.rows.sizes) * max(grid.cols.sizes)
        self._open: dict[Block, _OpenBlock] = {}
        self._spare: list[FloatArray] = []

    def place(self, region: Region, values: FloatArray) -> None:
        for row, rows in _overlaps(self._grid.rows, region[0]):
            for col, cols in _overlaps(self._grid.cols, region[1]):
                self._add(Block(row, col), (rows, cols), region, values)

    def _add(self, block: Block, cut: Region, region: Region, values: FloatArray) -> None:
        begun = self._open.get(block) or self._begin(block)
        piece = values[_shifted(cut, region)]
        begun.values[_shifted(cut, self._grid.slices(block))] = piece
        begun.left -= piece.size
        if begun.left:
            return
        del self._open[block]
        self._builder.scan(block, begun.values)
        self._storage.put(block, BlockView(begun.values, 0, 0, *begun.values.shape))
        if not self._storage.in_memory:
            self._spare.append(begun.buffer)

    def _begin(self, block: Block) -> _OpenBlock:
        m, n = self._grid.block_shape(block)
        size = m * n if self._storage.in_memory else self._largest
        buffer = self._spare.pop() if self._spare else np.empty(size, self._dtype)
        begun = _OpenBlock(buffer, buffer[: m * n].reshape(m, n), m * n)
        self._open[block] = begun
        return begun


def _cells(source: Source, grid: Grid) -> Iterator[_Cell]:
    chunks = source.chunks
    row_chunks = grid.rows if chunks is None else Bands.from_sizes(chunks[0])
    col_chunks = grid.cols if chunks is None else Bands.from_sizes(chunks[1])
    for rows, row_bands in _shared(row_chunks, grid.rows):
        for cols, col_bands in _shared(col_chunks, grid.cols):
            yield _Cell(rows, cols, row_bands, col_bands, source.chunks is None)


def _shared(chunks: Bands, blocks: Bands) -> Iterator[tuple[list[int], int]]:
    """Chunk edges grouped by the intervals between edges that blocks have too."""
    common = set(blocks.offsets)
    group = [0]
    for edge in chunks.offsets[1:]:
        group.append(edge)
        if edge in common:
            yield group, sum(group[0] < offset <= edge for offset in blocks.offsets)
            group = [edge]


def _runs(edges: list[int], longest: int) -> Iterator[slice]:
    """Neighbouring intervals joined up to a length, at least one at a time."""
    start = edges[0]
    for edge, following in zip(edges[1:], [*edges[2:], None], strict=True):
        if following is None or following - start > longest:
            yield slice(start, edge)
            start = edge


def _overlaps(bands: Bands, part: slice) -> Iterator[tuple[int, slice]]:
    first = int(np.searchsorted(bands.offsets, part.start, side="right")) - 1
    for band in range(first, len(bands)):
        whole = bands.slice(band)
        if whole.start >= part.stop:
            return
        yield band, slice(max(whole.start, part.start), min(whole.stop, part.stop))


def _shifted(part: Region, origin: Region) -> Region:
    rows, cols = part
    return (
        slice(rows.start - origin[0].start, rows.stop - origin[0].start),
        slice(cols.start - origin[1].start, cols.stop - origin[1].start),
    )
