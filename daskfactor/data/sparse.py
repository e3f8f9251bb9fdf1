"""The pass over a sparse source: collect keys, choose a grid, distribute entries, make blocks.

`as_blocks` and `convert` make the same passes; only the destination of finished blocks differs.
Between passes, entries are records of `entry_type`: row and column inside their block, and value.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.checks import warn
from daskfactor.data.adapters import Source
from daskfactor.data.blocks import BlockedData, filled
from daskfactor.data.coo import Axis, Piece, doubled, summable
from daskfactor.data.grid import Block, Grid, balanced_order, choose_grid, inverse
from daskfactor.data.loading import Decoder, reading_errors
from daskfactor.data.statistics import DataInfo, Layout, StatisticsBuilder, Weighing, cell_of
from daskfactor.data.storage import ArrayFile, FloatType, Storage
from daskfactor.errors import DataError, DataWarning, OptionError, StoreError
from daskfactor.kernels.views import SparseBlock, index_type, pointer_type
from daskfactor.progress import OnEvent, RunEvent, ignore

MAX_THREADS = 8
BLOCK_BYTES = 64
"""Memory per entry of a block while it is assembled."""
DEAL_BYTES, MIN_DEALT = 64, 2**16
"""Memory per entry that is distributed to blocks, and the minimum number of entries at once."""
MAX_COLUMNS = 2**31 - 1


@dataclass(frozen=True)
class LoadOptions:
    """Options of the pass; ``limit`` is in bytes.

    With ``exact`` only informative entries count when a grid or an order is chosen, so that these
    do not depend on the representation of a matrix.
    """

    blocks: int | Grid | None
    dtype: FloatType
    zeros: bool
    limit: int
    workers: int | None = None
    components: int | None = None
    balance: bool = False
    allow_empty: bool = False
    exact: bool = True

    @property
    def unstored(self) -> str:
        """Return the meaning of entries that are not stored."""
        return "zero" if self.zeros else "missing"


def meaning_of_unstored(source: Source, unstored: str | None) -> str:
    """Return the meaning of unstored entries: from the caller, else the input, else the default."""
    meaning = unstored or source.unstored
    if meaning is None:
        zeros = source.usual == "zero"
        assumed = "observed zeros, as in counts" if zeros else "missing, as in ratings"
        warn(
            f"cells without entry are taken to be {assumed}; say "
            'unstored="zero" if they are zeros, unstored="missing" if they are unknown',
            DataWarning,
        )
    return meaning or source.usual


class WeightProvider(Protocol):
    """Provider of weights of cells for the blocks of a sparse matrix, while these are made."""

    weighing: Weighing

    def take(self, block: Block, view: SparseBlock) -> SparseBlock:
        """Return the block with its weights; entries of weight 0 are missing."""

    def finish(self) -> BlockedData:
        """Return the weights of all blocks."""


OpenWeights = Callable[[Grid, Layout], WeightProvider | None]
"""Function that opens the weights of cells, if any, for a grid and an order."""


def sparse_data(
    source: Source, options: LoadOptions, open_weights: OpenWeights = lambda grid, layout: None
) -> BlockedData:
    """Read a sparse source once, and return its blocks."""
    if source.matrix is not None:
        return _cut(source, source.matrix(options.zeros), options, open_weights)
    with SparseLoader(source, options, keeps=True) as loader:
        storage = _storage(loader.grid, options, int(loader.counts.sum()))
        provider = open_weights(loader.grid, loader.layout)
        weights = provider.finish if provider else lambda: None
        return filled(storage, lambda: loader.assemble(storage.put, provider), weights)


def sparse_bytes(grid: Grid, entries: int, dtype: FloatType) -> int:
    """Return the bytes that a number of entries take in sparse blocks."""
    each = index_type(max(grid.cols.sizes)).itemsize + dtype.itemsize
    return entries * each + grid.blocks * (grid.shape[0] + grid.blocks) * 4


def deal_threads() -> int:
    """Return the number of threads that distribute entries."""
    from dask.system import cpu_count  # not before a sparse matrix is read

    return min(MAX_THREADS, cpu_count())


def entry_type(value: np.dtype[Any]) -> np.dtype[Any]:
    """Return the record type of an entry: 12 bytes with float32 values, 16 with float64."""
    return np.dtype([("row", np.uint32), ("col", np.uint32), ("value", value)])


def compress(entries: NDArray[Any], shape: tuple[int, int], zeros: bool) -> tuple[SparseBlock, int]:
    """Return unordered entries of a block as compressed rows, and the number of duplicates.

    With ``zeros`` the values of one cell are added up in double precision, in the order of the
    source, else the last one is used; entries equal to unstored ones are dropped.
    """
    number = np.int32 if entries.size < 2**31 else np.int64
    numbers: Any = np.arange(entries.size, dtype=number)
    places = sparse.coo_array((numbers, (entries["row"], entries["col"])), shape=shape)
    places.has_canonical_format = True  # so that cells that are named twice are not merged
    # Two counting sorts, by column and then by row, which keep the order of equal keys.
    ordered = places.tocsc().tocsr()
    del places
    indptr: NDArray[Any] = ordered.indptr
    cols, values = ordered.indices, entries["value"][ordered.data]
    first = np.ones(entries.size, bool)
    first[1:] = cols[1:] != cols[:-1]
    starts = indptr[:-1]
    first[starts[starts < entries.size]] = True
    doubles = entries.size - int(np.count_nonzero(first))
    if doubles:
        if zeros:
            with np.errstate(over="ignore"):
                values = np.bincount(np.cumsum(first) - 1, values).astype(values.dtype)
        else:
            values = values[np.append(first[1:], True)]
        indptr, cols = _filtered_indptr(first, indptr), cols[first]
    return block_of(indptr, cols, values, shape, zeros), doubles


def block_of(
    indptr: NDArray[Any], cols: NDArray[Any], values: Any, shape: tuple[int, int], zeros: bool
) -> SparseBlock:
    """Return ordered compressed rows as a block, without entries equal to unstored ones."""
    values = values + values.dtype.type(0)  # a copy, in which -0.0 is 0.0
    missing = np.isnan(values)
    values[missing] = np.nan  # one form of it, for the checksum
    keep = values != 0 if zeros else ~missing
    if not keep.all():
        indptr, cols, values = _filtered_indptr(keep, indptr), cols[keep], values[keep]
    pointers = np.ascontiguousarray(indptr, pointer_type(values.size))
    indices = np.ascontiguousarray(cols, index_type(shape[1]))
    return SparseBlock(pointers, indices, values, *shape, zeros)


def _filtered_indptr(keep: NDArray[np.bool_], indptr: NDArray[Any]) -> NDArray[np.int64]:
    """Return the row pointers after dropping the entries that are not in ``keep``."""
    filtered: NDArray[np.int64] = np.concatenate([[0], np.cumsum(keep)])[indptr]
    return filtered


def _cut(
    source: Source, matrix: Any, options: LoadOptions, open_weights: OpenWeights
) -> BlockedData:
    """Cut compressed rows in memory into blocks, one band of rows after another."""
    kind = sparse.csr_array if matrix.format == "csr" else sparse.csc_array
    # scipy cannot slice half precision or foreign byte order.
    parts = (_native(matrix.data), matrix.indices, matrix.indptr)
    csr = kind(parts, shape=matrix.shape).tocsr()
    keep = csr.data != 0 if options.zeros else ~np.isnan(csr.data)
    entries, counts = int(np.count_nonzero(keep)), []
    if options.balance:
        counts = [np.diff(_filtered_indptr(keep, csr.indptr))]
        counts.append(np.bincount(csr.indices[keep], minlength=csr.shape[1]))
    del keep
    grid, layout = _layout(csr.shape, source, options, entries, counts)
    storage, provider = _storage(grid, options, entries), open_weights(grid, layout)

    decoder = Decoder(options.dtype, source.labels)

    def views() -> Iterator[tuple[Block, SparseBlock]]:
        for block, cut in _cuts(csr, grid, layout):
            values = decoder.convert(cut.data, partial(cell_of, grid, layout, block, cut))
            shape = grid.block_shape(block)
            view = block_of(cut.indptr, cut.indices, values, shape, options.zeros)
            yield block, provider.take(block, view) if provider else view

    def fill() -> DataInfo:
        weighing = provider.weighing if provider else None
        builder = StatisticsBuilder(grid, source.labels, layout, weighing)
        builder.scan_all(views(), storage.put)
        info = builder.finish(source.info, options.dtype, options.allow_empty)
        decoder.warn()
        return info

    return filled(storage, fill, provider.finish if provider else lambda: None)


def _cuts(csr: Any, grid: Grid, layout: Layout) -> Iterator[tuple[Block, Any]]:
    """Yield the blocks of compressed rows, with columns in ascending order."""
    for row in range(grid.blocks):
        rows = grid.rows.slice(row)
        band = csr[rows if layout.row_order is None else layout.row_order[rows]]
        if layout.col_order is not None:
            position = inverse(np.asarray(layout.col_order)).astype(band.indices.dtype)
            parts = (band.data, position[band.indices], band.indptr)
            band = sparse.csr_array(parts, shape=band.shape)
        band = band.tocsc()  # a band of columns of it lies in one piece
        for col in range(grid.blocks):
            yield Block(row, col), band[:, grid.cols.slice(col)].tocsr()


def _native(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype == np.float16:
        return summable(values)
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _storage(grid: Grid, options: LoadOptions, entries: int) -> Storage:
    fits = sparse_bytes(grid, entries, options.dtype) <= options.limit
    return Storage(grid, options.unstored, file=None if fits else ArrayFile())


def _layout(
    shape: tuple[int, int],
    source: Source,
    options: LoadOptions,
    entries: int,
    counts: list[NDArray[np.int64]],
) -> tuple[Grid, Layout]:
    """Choose the grid and, if it is balanced, the order of rows and columns."""
    # Balanced bands hold rows from all over the matrix, so chunk edges do not matter.
    chunks = source.chunks if options.exact and not options.balance else None
    request = options.blocks, options.workers, entries, options.components
    grid = choose_grid(shape, chunks, *request)
    if max(*grid.rows.sizes, *grid.cols.sizes) > MAX_COLUMNS:
        raise OptionError(
            f"blocks of {max(grid.rows.sizes)} x {max(grid.cols.sizes)} are too large: at most "
            f"{MAX_COLUMNS} rows and columns; pass a larger number of blocks"
        )
    if not options.balance:
        return grid, Layout(options.unstored)
    rows, cols = (
        balanced_order(counts[0], grid.rows),
        balanced_order(counts[1], grid.cols, turning=True),
    )
    return grid, Layout(options.unstored, rows, cols)


class SparseLoader:
    """Loader of a source that is read piece by piece: first keys, then entries, then blocks.

    As a context manager it reads the source, and frees memory and scratch space at the end. Entries
    wait for their blocks in memory, up to half of the limit; if blocks stay in memory, too
    (``keeps``), up to half of the rest.
    """

    def __init__(
        self,
        source: Source,
        options: LoadOptions,
        on_event: OnEvent = ignore,
        keeps: bool = False,
    ) -> None:
        self.source = source
        self.options = options
        self.on_event = on_event
        self.entries = 0
        self.doubles = 0
        self.counts: NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self._record = entry_type(options.dtype)
        self._file = ArrayFile(budget=options.limit // 2)
        self._threads = deal_threads()
        self._keeps = keeps
        self._dealt: list[tuple[Any, NDArray[np.int64]]] = []

    def __enter__(self) -> Self:
        try:
            self._read_keys()
            self._read_entries()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._dealt.clear()
        self._file.close()

    def _read_keys(self) -> None:
        """Collect the rows and columns, and choose the grid (first pass)."""
        source, options = self.source, self.options
        free = options.exact and options.blocks is not None
        if source.shape and not options.balance and (free or source.entries is not None):
            self._axes = _axes(source)
            self.entries = source.entries or 0
        else:
            if options.exact and source.info.lazy:
                self.source = self._staged(source)
            self._axes = self._learn()
        (row_counts, rows), (col_counts, cols) = (axis.finish() for axis in self._axes)
        size = row_counts.size, col_counts.size
        if not options.exact and (self.entries == 0 or 0 in size):
            raise DataError(f"{source.where} has no entries; at least one is needed")
        self.labels = labels = source.labels
        if rows is not None:
            self.labels = replace(self.labels, row_coords={labels.row_dim: rows})
        if cols is not None:
            self.labels = replace(self.labels, col_coords={labels.col_dim: cols})
        counts = [row_counts, col_counts]
        self.grid, self.layout = _layout(size, source, options, self.entries, counts)

    def _read_entries(self) -> None:
        """Distribute the entries to blocks (second pass)."""
        blocks = self.grid.blocks
        row_band, row_local = _places(self.grid.rows.offsets, self.layout.row_order)
        col_band, col_local = _places(self.grid.cols.offsets, self.layout.col_order)
        number = np.min_scalar_type(blocks**2)
        decoder, lock = Decoder(self.options.dtype, self.labels), threading.Lock()
        size = sparse_bytes(self.grid, self.entries, self.options.dtype)
        if self._keeps and size <= self.options.limit:
            block = self._threads * BLOCK_BYTES * self.entries // blocks**2
            left = max(0, self.options.limit - size - block)
            self._file.fits((self.options.limit - left) // 2)
        most = self.options.limit // (2 * DEAL_BYTES * (self._threads + 2))

        def deal(piece: Piece) -> tuple[Any, NDArray[np.int64]]:
            rows = self._axes[0].positions(piece.rows)
            cols = self._axes[1].positions(piece.cols)
            with lock:  # the decoder counts
                values = decoder.convert(piece.values, lambda at: (int(rows[at]), int(cols[at])))
            block = row_band[rows].astype(number) * number.type(blocks) + col_band[cols]
            order = np.argsort(block, kind="stable")
            edges = np.concatenate([[0], np.cumsum(np.bincount(block, minlength=blocks**2))])
            out = np.empty(rows.size, self._record)
            out["row"], out["col"] = row_local[rows[order]], col_local[cols[order]]
            out["value"] = values[order]
            return self._file.put(out.view(np.uint8)), edges

        total, done = np.zeros(blocks**2, np.int64), 0
        pieces = _split(read(self.source, self.options), max(MIN_DEALT, most))
        for stored, edges in _in_order(deal, pieces, self._threads):
            self._dealt.append((stored, edges))
            total += np.diff(edges)
            done += int(edges[-1])
            self.on_event(RunEvent("entries", done, max(done, self.entries)))
        if not self.options.exact and done != self.entries:
            raise StoreError(
                f"{self.source.where} had {self.entries} entries when it was read the first time "
                f"and {done} the second time; convert it again when nobody writes to it"
            )
        self.counts = total.reshape(blocks, blocks)
        decoder.warn()

    def unmerged_share(self) -> float:
        """Return the share of entries that remain in the largest block after merging."""
        largest = max(self.grid.all_blocks(), key=self.counts.__getitem__)
        return self._compressed(largest)[0].values.size / float(self.counts[largest])

    def assemble(
        self, put: Callable[[Block, SparseBlock], None], provider: WeightProvider | None = None
    ) -> DataInfo:
        """Assemble every block and pass it to ``put``, which several threads call."""
        weighing, lock = provider.weighing if provider else None, threading.Lock()
        builder = StatisticsBuilder(self.grid, self.labels, self.layout, weighing)

        def finish(block: Block) -> int:
            view, doubles = self._compressed(block)
            view = provider.take(block, view) if provider else view
            with lock:
                builder.scan(block, view)
                self.doubles += doubles
            put(block, view)
            return int(self.counts[block])

        cost = int(self.counts.max()) * BLOCK_BYTES
        threads = max(1, min(self._threads, self.options.limit // max(1, cost)))
        done = 0
        for size in _in_order(finish, self.grid.all_blocks(), threads):
            done += size
            self.on_event(RunEvent("blocks", done, self.entries))
        options = self.options
        info = builder.finish(self.source.info, options.dtype, options.allow_empty)
        if self.doubles and not options.zeros:
            if options.exact:
                raise doubled(self.doubles)
            warn(
                f"{self.doubles} entries name a cell that was named before; the last value of "
                'each cell was kept (with unstored="zero" they would be added up)',
                DataWarning,
            )
        return info

    def _compressed(self, block: Block) -> tuple[SparseBlock, int]:
        flat, each = block.row * self.grid.blocks + block.col, self._record.itemsize
        out, start = np.empty(int(self.counts[block]), self._record), 0
        for stored, edges in self._dealt:
            low, high = edges[flat : flat + 2].tolist()
            if high > low:
                part = self._file.get(stored, slice(low * each, high * each))
                out[start : start + high - low] = part.view(self._record)
                start += high - low
        return compress(out, self.grid.block_shape(block), self.options.zeros)

    def _staged(self, source: Source) -> Source:
        """Return a source that is read once; its second pass reads from memory or scratch."""
        file, stored_pieces = self._file, deque[list[Any]]()

        def first() -> Iterator[Piece]:
            for piece in read(source, self.options):
                parts: tuple[Any, ...] = piece
                stored_pieces.append([file.put(np.ascontiguousarray(array)) for array in parts])
                yield piece

        def again() -> Iterator[Piece]:
            while stored_pieces:
                yield Piece._make(file.get(part) for part in stored_pieces.popleft())

        passes = iter((first, again))
        return replace(source, pieces=lambda add: next(passes)())

    def _learn(self) -> tuple[Axis, Axis]:
        """Count the keys of all pieces."""
        self.entries = 0
        source, exact = self.source, self.options.exact
        axes = _axes(source)
        with ThreadPoolExecutor(1) as helper:
            for piece in read(source, self.options):
                piece = _informative(piece, self.options.zeros) if exact else piece
                other = helper.submit(axes[0].learn, piece.rows)
                axes[1].learn(piece.cols)
                other.result()
                self.entries += len(piece.rows)
                self.on_event(RunEvent("keys", self.entries, source.entries or 0))
        self.on_event(RunEvent("keys", self.entries, self.entries))
        return axes


def _axes(source: Source) -> tuple[Axis, Axis]:
    rows, cols = source.shape or (None, None)
    return Axis("row", rows), Axis("column", cols)


def _informative(piece: Piece, zeros: bool) -> Piece:
    """Return the entries of a piece that differ from unstored ones."""
    keep = piece.values != 0 if zeros else ~np.isnan(piece.values)
    if keep.all():
        return piece
    rows, cols = np.asarray(piece.rows), np.asarray(piece.cols)
    return Piece(rows[keep], cols[keep], piece.values[keep])


def _places(
    offsets: tuple[int, ...], order: NDArray[np.int64] | None
) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    """Return the band of each of the caller's rows (or columns), and its position in the band."""
    sizes = np.diff(offsets)
    band = np.repeat(np.arange(sizes.size, dtype=np.uint16), sizes)
    local = (np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)).astype(np.uint32)
    if order is None:
        return band, local
    position = inverse(np.asarray(order))
    return band[position], local[position]


def read(source: Source, options: LoadOptions) -> Iterator[Piece]:
    """Yield the pieces of a source; errors tell how far it was read."""
    assert source.pieces is not None
    pieces = source.pieces(options.zeros)
    for number in count():
        with reading_errors(f"{source.where} failed after {number} pieces", "all of it"):
            piece = next(pieces, None)
        if piece is None:
            return
        yield piece


def _split(pieces: Iterator[Piece], most: int) -> Iterator[Piece]:
    """Yield pieces of at most ``most`` entries."""
    for piece in pieces:
        for start in range(0, len(piece.rows), most):
            part = slice(start, start + most)
            yield Piece(piece.rows[part], piece.cols[part], piece.values[part])


def _in_order(function: Callable[..., Any], items: Iterable[Any], threads: int) -> Iterator[Any]:
    """Yield results of a function that several threads call, a few items ahead of the caller."""
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[Any]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
