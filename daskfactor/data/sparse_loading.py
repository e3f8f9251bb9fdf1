"""The pass over a sparse source: count, choose a grid and an order, deal out, put together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from daskfactor.data.decode import Decoder
from daskfactor.data.grid import Block, Grid, balanced_order, choose_grid
from daskfactor.data.scratch import ArrayFile, Spool, scratch_directory
from daskfactor.data.sparse_blocks import Assembler, Dealer, gathered
from daskfactor.data.sparse_source import Piece, SparseSource, doubled
from daskfactor.data.sparse_statistics import Orders, SparseStatisticsBuilder
from daskfactor.data.statistics import Statistics
from daskfactor.data.storage import FloatType, MemoryBlocks, ScratchBlocks
from daskfactor.errors import DaskfactorError, StoreError
from daskfactor.kernels.views import index_type

LEAST_SPOOL = 2**24


@dataclass(frozen=True)
class Wish:
    """What the caller asked for; ``limit`` is in bytes."""

    blocks: int | Grid | None
    dtype: FloatType
    zeros: bool
    limit: int
    workers: int | None = None
    balance: bool = False
    allow_empty: bool = False


class Loaded(NamedTuple):
    """Blocks and what is known about them."""

    grid: Grid
    orders: Orders
    statistics: Statistics
    storage: MemoryBlocks | ScratchBlocks


def load_sparse(source: SparseSource, wish: Wish) -> Loaded:
    """Put the entries of a sparse source on a grid of blocks.

    The source is read once. Where the grid or the order of rows and columns
    depends on the entries, those of a source that is not in memory wait in
    memory or in a temporary file until they are counted.
    """
    staged = Spool(max(wish.limit, LEAST_SPOOL))
    dealt = Spool(max(wish.limit, LEAST_SPOOL))
    try:
        counts, pieces = _counted(source, wish, staged)
        grid, orders = _layout(source, wish, counts)
        dealer = Dealer(grid, orders, dealt)
        storage = _storage(grid, wish, counts.entries)
        try:
            statistics = _fill(source, wish, pieces, (grid, orders, dealer, storage))
        except BaseException:
            storage.close()
            raise
        return Loaded(grid, orders, statistics, storage)
    finally:
        staged.close()
        dealt.close()


class _Counts:
    """Stored entries in all, and of every row and column if that is asked for."""

    def __init__(self, shape: tuple[int, int], zeros: bool, each: bool) -> None:
        self.entries = 0
        self.sides = [np.zeros(size if each else 0, np.int64) for size in shape]
        self._zeros = zeros
        self._each = each

    def add(self, piece: Piece) -> None:
        if self._zeros:
            keep = piece.values != 0
        elif piece.values.dtype.kind == "f":
            keep = ~np.isnan(piece.values)
        else:
            keep = np.ones(piece.values.size, bool)
        number = int(np.count_nonzero(keep))
        self.entries += number
        if self._each and number:
            for side, index in zip(self.sides, (piece.rows, piece.cols), strict=True):
                index = index if number == keep.size else index[keep]
                low = int(index.min())
                part = np.bincount(index - low)
                side[low : low + part.size] += part


def _counted(
    source: SparseSource, wish: Wish, staged: Spool
) -> tuple[_Counts, Callable[[], Iterator[Piece]]]:
    counts = _Counts(source.shape, wish.zeros, wish.balance)
    if not source.info.lazy:
        for piece in _read(source, wish.zeros):
            counts.add(piece)
        return counts, lambda: _read(source, wish.zeros)
    done = []
    for number, piece in enumerate(gathered(_read(source, wish.zeros))):
        counts.add(piece)
        staged.append(number, (piece.rows, piece.cols, piece.values))
        done.append(piece.done)

    def again() -> Iterator[Piece]:
        for number, last in enumerate(done):
            for rows, cols, values in staged.take(number):
                yield Piece(rows, cols, values, last)

    return counts, again


def _read(source: SparseSource, add: bool) -> Iterator[Piece]:
    """The pieces of a source; what goes wrong there is reported with its place."""
    pieces = source.pieces(add)
    for number in count():
        try:
            piece = next(pieces, None)
        except (DaskfactorError, MemoryError):
            raise
        except Exception as error:
            where = f" of {source.info.location}" if source.info.location else ""
            raise StoreError(
                f"reading piece {number}{where} ({source.info.kind} input) failed: "
                f"{type(error).__name__}: {error}; check that all of the input can be read"
            ) from error
        if piece is None:
            return
        yield piece


def _layout(source: SparseSource, wish: Wish, counts: _Counts) -> tuple[Grid, Orders]:
    if isinstance(wish.blocks, Grid):
        grid = wish.blocks
    else:
        # Bands of rows from all over the matrix have no edges in common with its chunks.
        chunks = None if wish.balance else source.chunks
        grid = choose_grid(source.shape, chunks, wish.blocks, wish.workers, counts.entries)
    if not wish.balance:
        return grid, Orders()
    rows, cols = counts.sides
    return grid, Orders(
        balanced_order(rows, grid.rows), balanced_order(cols, grid.cols, turning=True)
    )


def _storage(grid: Grid, wish: Wish, entries: int) -> MemoryBlocks | ScratchBlocks:
    if sparse_bytes(grid, entries, wish.dtype) <= wish.limit:
        return MemoryBlocks()
    unstored = "zero" if wish.zeros else "missing"
    return ScratchBlocks(grid, unstored, ArrayFile(scratch_directory()))


def sparse_bytes(grid: Grid, entries: int, dtype: FloatType) -> int:
    """Bytes that so many entries take in sparse blocks."""
    each = index_type(max(grid.cols.sizes)).itemsize + dtype.itemsize
    return entries * each + grid.blocks * (grid.shape[0] + grid.blocks) * 4


def _fill(
    source: SparseSource,
    wish: Wish,
    pieces: Callable[[], Iterator[Piece]],
    parts: tuple[Grid, Orders, Dealer, MemoryBlocks | ScratchBlocks],
) -> Statistics:
    grid, orders, dealer, storage = parts
    decoder = Decoder(wish.dtype, source.labels)
    builder = SparseStatisticsBuilder(grid, source.labels, wish.zeros, orders)
    assembler = Assembler(grid, orders, decoder, wish.zeros)
    finished = 0

    def finish(band: int) -> None:
        for col in range(grid.blocks):
            block = Block(band, col)
            view = assembler.assemble(block, dealer.take(block))
            builder.scan(block, view)
            storage.put(block, view)

    for piece in pieces():
        dealer.deal(piece)
        done = 0 if wish.balance else piece.done
        while finished < grid.blocks and grid.rows.offsets[finished + 1] <= done:
            finish(finished)
            finished += 1
    for band in range(finished, grid.blocks):
        finish(band)
    if assembler.doubles and not wish.zeros:
        raise doubled(assembler.doubles)
    statistics = builder.finish(wish.allow_empty)
    decoder.warn()
    return statistics
