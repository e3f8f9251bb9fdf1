"""The pass over a sparse source: keys, a grid and an order, entries dealt out, blocks.

`as_blocks` and `convert` are the same passes; only what takes the finished blocks over differs.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from dask.system import cpu_count
from numpy.typing import NDArray

from daskfactor.checks import warn
from daskfactor.data.blocks import BlockedData
from daskfactor.data.decode import Decoder
from daskfactor.data.grid import Block, Grid, balanced_order, choose_grid, inverse
from daskfactor.data.keys import Axis, Learnt, PositionAxis, axis_for
from daskfactor.data.labels import Labels, SparseLayout
from daskfactor.data.sparse_source import KeysAreText, Piece, SparseSource, doubled
from daskfactor.data.sparse_statistics import SparseStatisticsBuilder, cell_of
from daskfactor.data.statistics import Statistics
from daskfactor.data.storage import ArrayFile, FloatType, Shelf, Storage, scratch_directory
from daskfactor.errors import DaskfactorError, DataError, DataWarning, OptionError, StoreError
from daskfactor.kernels.triples import Compressed, compress, count_blocks, deal_blocks, triple_type
from daskfactor.kernels.views import SparseBlock, index_type, pointer_type
from daskfactor.progress import OnEvent, RunEvent, ignore

MOST_THREADS = 8
BLOCK_BYTES = 64
"""Memory per entry of a block while it is put together."""
MOST_COLUMNS = 2**31 - 1


@dataclass(frozen=True)
class LoadOptions:
    """What the caller asked for; ``limit`` is in bytes.

    ``exact`` counts only entries that say something when a grid or an order is chosen, so that
    these do not depend on how a matrix is written down; the values are read for that.
    """

    blocks: int | Grid | None
    dtype: FloatType
    zeros: bool
    limit: int
    workers: int | None = None
    balance: bool = False
    allow_empty: bool = False
    exact: bool = True


def meaning_of_unstored(source: SparseSource, unstored: str | None) -> str:
    """What entries that are not stored mean: as asked, as the input says, or else zero."""
    if unstored is not None or source.unstored is not None:
        return unstored or source.unstored or "zero"
    warn(
        "cells without entry are taken to be observed zeros, as in counts; say "
        'unstored="zero" if that is meant, unstored="missing" if they are unknown, as in ratings',
        DataWarning,
    )
    return "zero"


def sparse_data(source: SparseSource, options: LoadOptions) -> BlockedData:
    """Read a sparse source once and keep its blocks."""
    if source.matrix is not None:
        return _sliced(source, source.matrix(options.zeros), options)
    task = Task(source, options)
    try:
        task.read_keys()
        task.read_entries()
        storage = _storage(task.grid, options, int(task.counts.sum()))
        try:
            statistics = task.assemble(storage.put)
            if task.doubles and not options.zeros:
                raise doubled(task.doubles)
        except BaseException:
            storage.close()
            raise
    finally:
        task.close()
    return BlockedData(
        task.grid, task.labels, statistics, source.info, options.dtype, storage, task.layout
    )


def _storage(grid: Grid, options: LoadOptions, entries: int) -> Storage:
    fits = sparse_bytes(grid, entries, options.dtype) <= options.limit
    file = None if fits else ArrayFile(scratch_directory())
    return Storage(grid, "zero" if options.zeros else "missing", file=file)


def sparse_bytes(grid: Grid, entries: int, dtype: FloatType) -> int:
    """Bytes that so many entries take in sparse blocks."""
    each = index_type(max(grid.cols.sizes)).itemsize + dtype.itemsize
    return entries * each + grid.blocks * (grid.shape[0] + grid.blocks) * 4


def _sliced(source: SparseSource, csr: Any, options: LoadOptions) -> BlockedData:
    """Cut compressed rows that are in memory into blocks, one band of rows after another."""
    keep = csr.data != 0 if options.zeros else ~np.isnan(csr.data)
    entries, counts = int(np.count_nonzero(keep)), []
    if options.balance:
        ends = np.concatenate([[0], np.cumsum(keep)])[csr.indptr]
        counts = [np.diff(ends), np.bincount(csr.indices[keep], minlength=csr.shape[1])]
    del keep
    grid, layout = _layout(csr.shape, source, options, entries, counts)
    storage = _storage(grid, options, entries)
    decoder = Decoder(options.dtype, source.labels)
    builder = SparseStatisticsBuilder(grid, source.labels, layout)
    try:
        for band in range(grid.blocks):
            rows = grid.rows.slice(band)
            part = csr[rows if layout.row_order is None else layout.row_order[rows]]
            if layout.col_order is not None:
                part = part[:, layout.col_order]
            for col in range(grid.blocks):
                cut = part[:, grid.cols.slice(col)]
                cut.sort_indices()
                view = _decoded(cut, Block(band, col), grid, layout, decoder)
                builder.scan(Block(band, col), view)
                storage.put(Block(band, col), view)
        statistics = builder.finish(options.allow_empty)
    except BaseException:
        storage.close()
        raise
    decoder.warn()
    return BlockedData(grid, source.labels, statistics, source.info, options.dtype, storage, layout)


def _decoded(
    csr: Any, block: Block, grid: Grid, layout: SparseLayout, decoder: Decoder
) -> SparseBlock:
    """Compressed rows as a block; what says nothing new is left out."""
    zeros = layout.unstored == "zero"

    def locate(position: int) -> tuple[int, int]:
        return layout.callers(*cell_of(grid, block, csr, position))

    values = decoder.convert(csr.data, None, locate)
    values = values + values.dtype.type(0)  # -0.0 becomes 0.0
    indptr, indices, missing = csr.indptr, csr.indices, np.isnan(values)
    values[missing] = np.nan  # one form of it, for the checksum
    keep = values != 0 if zeros else ~missing
    if not keep.all():
        before = np.concatenate([[0], np.cumsum(keep)])
        indptr, indices, values = before[indptr], indices[keep], values[keep]
    m, n = grid.block_shape(block)
    pointers = np.ascontiguousarray(indptr, pointer_type(values.size))
    return SparseBlock(pointers, np.ascontiguousarray(indices, index_type(n)), values, m, n, zeros)


def _layout(
    shape: tuple[int, int],
    source: SparseSource,
    options: LoadOptions,
    entries: int,
    counts: list[NDArray[np.int64]],
) -> tuple[Grid, SparseLayout]:
    """Choose the grid and, for a balanced one, the order of rows and columns."""
    grid = options.blocks
    if not isinstance(grid, Grid):
        # Bands of rows from all over the matrix have no edges in common with its chunks.
        chunks = source.chunks if options.exact and not options.balance else None
        grid = choose_grid(shape, chunks, grid, options.workers, entries)
    elif grid.shape != shape:
        raise OptionError(
            f"the grid is for a matrix of shape {grid.shape}, the data have shape {shape}"
        )
    if max(*grid.rows.sizes, *grid.cols.sizes) > MOST_COLUMNS:
        raise OptionError(
            f"blocks of {max(grid.rows.sizes)} x {max(grid.cols.sizes)} are too large: at most "
            f"{MOST_COLUMNS} rows and columns; pass a larger number of blocks"
        )
    unstored = "zero" if options.zeros else "missing"
    if not options.balance:
        return grid, SparseLayout(unstored)
    rows = balanced_order(counts[0], grid.rows)
    return grid, SparseLayout(unstored, rows, balanced_order(counts[1], grid.cols, turning=True))


class Task:
    """The passes over a source that is read piece by piece: keys, entries, blocks."""

    def __init__(
        self, source: SparseSource, options: LoadOptions, on_event: OnEvent = ignore
    ) -> None:
        self.options = options
        self.on_event = on_event
        self.entries = 0
        self.doubles = 0
        self.source = source
        self.counts: NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self._shelf = Shelf(options.limit // 2)
        self._threads = min(MOST_THREADS, cpu_count())
        self._dealt: list[tuple[Any, NDArray[np.int64]]] = []
        self._ready: dict[Block, Compressed] = {}

    def read_keys(self) -> None:
        """First pass: which rows and columns there are, and the grid."""
        source, options = self.source, self.options
        known = source.shape is not None and not options.balance
        free = options.exact and options.blocks is not None
        if source.shape is not None and known and (free or source.entries is not None):
            self._axes = _position_axes(source.shape)
            self.entries = source.entries or 0
        else:
            if options.exact and source.info.lazy:
                self.source = source = self._staged(source)
            self._axes = self._learn()
        learnt = [axis.finish() for axis in self._axes]
        size = (learnt[0].size, learnt[1].size)
        if not options.exact and (self.entries == 0 or 0 in size):
            raise DataError(f"{_where(source)} has no entries; at least one is needed")
        self.labels = _labels(source, learnt)
        counts = [axis.counts for axis in learnt]
        self.grid, self.layout = _layout(size, source, options, self.entries, counts)

    def read_entries(self) -> None:
        """Second pass: deal the entries out to blocks."""
        blocks = self.grid.blocks
        bands = [
            _places(self.grid.rows.offsets, self.layout.row_order),
            _places(self.grid.cols.offsets, self.layout.col_order),
        ]
        decoder = Decoder(self.options.dtype, self.labels)
        record = triple_type(self.options.dtype)
        lock = threading.Lock()

        def deal(piece: Piece) -> tuple[Any, NDArray[np.int64]]:
            rows = self._axes[0].positions(piece.rows)
            cols = self._axes[1].positions(piece.cols)
            assert piece.values is not None
            with lock:  # the decoder counts
                values = decoder.convert(
                    piece.values, None, lambda at: (int(rows[at]), int(cols[at]))
                )
            counts = np.zeros((blocks, blocks), np.int64)
            count_blocks(rows, cols, bands[0][0], bands[1][0], counts)
            edges = np.concatenate([[0], np.cumsum(counts.ravel())])
            nexts, out = edges[:-1].reshape(blocks, blocks).copy(), np.empty(rows.size, record)
            local = bands[0][0], bands[1][0], bands[0][1], bands[1][1]
            deal_blocks(rows, cols, values, *local, nexts, out)
            return self._shelf.put(out.view(np.uint8)), edges

        total, done = np.zeros(blocks**2, np.int64), 0
        jobs = ((deal, (piece,)) for piece in read(self.source, True, self.options.zeros))
        for kept, edges in _in_order(jobs, self._threads):
            self._dealt.append((kept, edges))
            total += np.diff(edges)
            done += int(edges[-1])
            self.on_event(RunEvent("entries", done, max(done, self.entries)))
        if not self.options.exact and done != self.entries:
            raise StoreError(
                f"{_where(self.source)} had {self.entries} entries when it was read the first time "
                f"and {done} the second time; convert it again when nobody writes to it"
            )
        self.counts = total.reshape(blocks, blocks)
        decoder.warn()

    def kept_shares(self) -> tuple[float, float]:
        """Which share of their entries blocks keep once duplicates are merged, as a few tell."""
        ranked = sorted((b for b in self.grid.all_blocks() if self.counts[b]), key=self._size)
        self._ready = {
            b: self._compressed(b) for b in (ranked[0], ranked[len(ranked) // 2], ranked[-1])
        }
        shares = [found[2].size / self._size(b) for b, found in self._ready.items()]
        return min(shares), max(shares)

    def assemble(self, put: Callable[[Block, SparseBlock], None]) -> Statistics:
        """Put every block together and hand it over to ``put``, which several threads call."""
        zeros = self.options.zeros
        builder = SparseStatisticsBuilder(self.grid, self.labels, self.layout)
        lock = threading.Lock()

        def finish(block: Block) -> int:
            found = self._ready.pop(block, None) or self._compressed(block)
            indptr, columns, values, doubles = found
            m, n = self.grid.block_shape(block)
            pointers = indptr.astype(pointer_type(values.size))
            view = SparseBlock(pointers, columns.astype(index_type(n)), values, m, n, zeros)
            with lock:
                builder.scan(block, view)
                self.doubles += doubles
            put(block, view)
            return self._size(block)

        cost = int(self.counts.max()) * BLOCK_BYTES
        threads = max(1, min(self._threads, self.options.limit // max(1, cost)))
        done, jobs = 0, ((finish, (block,)) for block in self.grid.all_blocks())
        for size in _in_order(jobs, threads):
            done += size
            self.on_event(RunEvent("blocks", done, self.entries))
        return builder.finish(self.options.allow_empty)

    def close(self) -> None:
        """Give memory and scratch space back."""
        self._dealt.clear()
        self._shelf.close()

    def _size(self, block: Block) -> int:
        return int(self.counts[block])

    def _compressed(self, block: Block) -> Compressed:
        flat, zeros = block.row * self.grid.blocks + block.col, self.options.zeros
        record = triple_type(self.options.dtype)
        out, start = np.empty(self._size(block), record), 0
        for kept, edges in self._dealt:
            low, high = edges[flat : flat + 2].tolist()
            if high > low:
                part = slice(low * record.itemsize, high * record.itemsize)
                out[start : start + high - low] = self._shelf.get(kept, part).view(record)
                start += high - low
        shape = self.grid.block_shape(block)
        return compress(out, shape, add=zeros, drop_zeros=zeros, drop_nans=not zeros)

    def _staged(self, source: SparseSource) -> SparseSource:
        """A source that is read once: the second time its pieces come from memory or scratch."""
        shelf, kept = self._shelf, deque[list[Any]]()

        def first() -> Iterator[Piece]:
            for piece in read(source, True, self.options.zeros):
                parts: tuple[Any, ...] = piece
                kept.append([shelf.put(np.ascontiguousarray(array)) for array in parts])
                yield piece

        def again() -> Iterator[Piece]:
            while kept:
                yield Piece._make(shelf.take(part) for part in kept.popleft())

        passes = iter((first, again))
        return replace(source, pieces=lambda values, add: next(passes)())

    def _learn(self) -> tuple[Axis, Axis]:
        try:
            return self._learn_once()
        except KeysAreText:
            assert self.source.as_text is not None
            self.source.as_text()
            return self._learn_once()

    def _learn_once(self) -> tuple[Axis, Axis]:
        self.entries = 0
        source, exact, zeros = self.source, self.options.exact, self.options.zeros
        axes = None if source.shape is None else _position_axes(source.shape)
        with ThreadPoolExecutor(1) as helper:
            for piece in read(source, exact, zeros):
                piece = _telling(piece, zeros) if exact else piece
                if axes is None:
                    axes = axis_for("row", piece.rows), axis_for("column", piece.cols)
                other = helper.submit(axes[0].learn, piece.rows)
                axes[1].learn(piece.cols)
                other.result()
                keys = piece.rows
                self.entries += keys.size if isinstance(keys, np.ndarray) else keys.codes.size
                self.on_event(RunEvent("keys", self.entries, source.entries or 0))
        self.on_event(RunEvent("keys", self.entries, self.entries))
        return axes or _position_axes((0, 0))


def _telling(piece: Piece, zeros: bool) -> Piece:
    """Only the entries that say something: no zero where others are, no NaN where others are."""
    assert piece.values is not None
    keep = piece.values != 0 if zeros else ~np.isnan(piece.values)
    if keep.all():
        return piece
    rows, cols = np.asarray(piece.rows), np.asarray(piece.cols)
    return Piece(rows[keep], cols[keep], piece.values[keep])


def _places(
    offsets: tuple[int, ...], order: NDArray[np.int64] | None
) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    """The band of each of the caller's rows (or columns), and its place in that band."""
    sizes = np.diff(offsets)
    band = np.repeat(np.arange(sizes.size, dtype=np.uint16), sizes)
    local = (np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)).astype(np.uint32)
    if order is None:
        return band, local
    position = inverse(order)
    return band[position], local[position]


def read(source: SparseSource, values: bool, add: bool) -> Iterator[Piece]:
    """The pieces of a source; what goes wrong there is reported with its place."""
    pieces = source.pieces(values, add)
    for number in count():
        try:
            piece = next(pieces, None)
        except (DaskfactorError, MemoryError, KeysAreText):
            raise
        except Exception as error:
            raise StoreError(
                f"reading {_where(source)} failed after {number} pieces: "
                f"{type(error).__name__}: {error}; check that all of it can be read"
            ) from error
        if piece is None:
            return
        yield piece


def _where(source: SparseSource) -> str:
    return source.info.location or f"the {source.info.kind} input"


def _in_order(jobs: Iterator[tuple[Callable[..., Any], tuple[Any, ...]]], threads: int) -> Any:
    """Results of jobs done by some threads, a few jobs ahead of the caller."""
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[Any]] = deque()
        try:
            for function, arguments in jobs:
                waiting.append(pool.submit(function, *arguments))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _position_axes(shape: tuple[int, int]) -> tuple[Axis, Axis]:
    return PositionAxis("row", shape[0]), PositionAxis("column", shape[1])


def _labels(source: SparseSource, learnt: list[Learnt]) -> Labels:
    given = source.labels
    rows, cols = (side.labels for side in learnt)
    return Labels(
        given.row_dim,
        given.col_dim,
        given.row_coords if rows is None else {given.row_dim: rows},
        given.col_coords if cols is None else {given.col_dim: cols},
        given.name,
    )
