"""The passes of a conversion: keys, entries, blocks."""

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np

from daskfactor.data.buffer import Places, Spill
from daskfactor.data.decode import Decoder
from daskfactor.data.grid import Block, Grid, balanced_order, choose_grid
from daskfactor.data.keys import Axis, Learnt, PositionAxis, axis_for
from daskfactor.data.labels import Labels
from daskfactor.data.scratch import scratch_directory
from daskfactor.data.sparse_statistics import Orders, SparseStatisticsBuilder
from daskfactor.data.statistics import Statistics
from daskfactor.data.storage import FloatType
from daskfactor.data.store_writer import StoreWriter
from daskfactor.data.triples import KeysAreText, Piece, TripleSource
from daskfactor.errors import DaskfactorError, DataError, DataWarning, OptionError, StoreError
from daskfactor.kernels.triples import Compressed, compress, triple_type
from daskfactor.kernels.views import SparseBlock, index_type, pointer_type
from daskfactor.progress import OnEvent, RunEvent
from daskfactor.threads import available_cores

MOST_THREADS = 8
BLOCK_BYTES = 64
"""Memory per entry of a block while it is put together."""


class Task:
    """One conversion: what its passes hand on to each other."""

    def __init__(
        self,
        source: TripleSource,
        writer: StoreWriter,
        zeros: bool,
        dtype: FloatType,
        limit: int,
        on_event: OnEvent,
    ) -> None:
        self.source = source
        self.writer = writer
        self.zeros = zeros
        self.dtype = dtype
        self.limit = limit
        self.on_event = on_event
        self.entries = 0
        self.doubles = 0
        self._threads = min(MOST_THREADS, available_cores())
        self._spill: Spill | None = None

    def read_keys(self, balance: bool, blocks: int | Grid | None) -> None:
        """First pass: which rows and columns there are, and the grid."""
        source = self.source
        if source.shape is not None and source.entries is not None and not balance:
            self._axes = _position_axes(source.shape)
            self.entries = source.entries
        else:
            self._axes = self._learn()
        learnt = [axis.finish() for axis in self._axes]
        size = (learnt[0].size, learnt[1].size)
        if self.entries == 0 or 0 in size:
            where = source.info.location or f"the {source.info.kind} input"
            raise DataError(f"{where} has no entries; at least one is needed")
        self.labels = _labels(source, learnt)
        self.grid = _grid(size, blocks, self.entries)
        self.orders = Orders()
        if balance:
            self.orders = Orders(
                balanced_order(learnt[0].counts, self.grid.rows),
                balanced_order(learnt[1].counts, self.grid.cols, turning=True),
            )

    def read_entries(self) -> None:
        """Second pass: deal the entries out to blocks."""
        fits = self.entries * triple_type(self.dtype).itemsize <= self.limit // 2
        places = Places(self.grid, self.orders.rows, self.orders.cols)
        self._spill = Spill(places, self.dtype, None if fits else scratch_directory())
        decoder = Decoder(self.dtype, self.labels)
        lock = threading.Lock()
        spill = self._spill

        def deal(number: int, piece: Piece) -> int:
            rows = self._axes[0].positions(piece.rows)
            cols = self._axes[1].positions(piece.cols)
            assert piece.values is not None
            with lock:  # the decoder counts
                values = decoder.convert(
                    piece.values, None, lambda at: (int(rows[at]), int(cols[at]))
                )
            spill.add(number, rows, cols, values)
            return rows.size

        jobs = ((deal, (number, piece)) for number, piece in enumerate(read(self.source, True)))
        done = 0
        for size in _in_order(jobs, self._threads):
            done += size
            self.on_event(RunEvent("entries", done, max(done, self.entries)))
        if done != self.entries:
            raise _changed(self.source, self.entries, done)
        decoder.warn()

    def write(self, compression: str) -> Statistics:
        """Put every block in order and write it."""
        spill = self._spill
        assert spill is not None
        blocks = self.grid.all_blocks()
        ranked = sorted((b for b in blocks if spill.counts[b]), key=lambda b: int(spill.counts[b]))
        # How many entries are duplicates shows in a few blocks; chunks are made for that.
        ready = {b: self._compressed(b) for b in (ranked[0], ranked[len(ranked) // 2], ranked[-1])}
        shares = [found[2].size / int(spill.counts[b]) for b, found in ready.items()]
        kept = min(shares), max(shares)
        self.writer.begin(self.grid, spill.counts, self.dtype, compression, kept)
        builder = SparseStatisticsBuilder(self.grid, self.labels, self.zeros, self.orders)
        lock = threading.Lock()

        def finish(block: Block) -> int:
            found = ready.pop(block) if block in ready else self._compressed(block)
            indptr, columns, values, doubles = found
            m, n = self.grid.block_shape(block)
            pointers = indptr.astype(pointer_type(values.size))
            view = SparseBlock(pointers, columns.astype(index_type(n)), values, m, n, self.zeros)
            with lock:
                builder.scan(block, view)
                self.doubles += doubles
            self.writer.write(block, pointers, columns, values)
            return int(spill.counts[block])

        cost = int(spill.counts.max()) * BLOCK_BYTES
        threads = max(1, min(self._threads, self.limit // max(1, cost)))
        done = 0
        for size in _in_order(((finish, (block,)) for block in blocks), threads):
            done += size
            self.on_event(RunEvent("blocks", done, self.entries))
        statistics = builder.finish(allow_empty=True)
        self._warn_of_doubles()
        self.writer.finish(
            statistics,
            self.labels,
            "zero" if self.zeros else "missing",
            (self.orders.rows, self.orders.cols),
        )
        return statistics

    def close(self) -> None:
        """Give scratch space back."""
        if self._spill is not None:
            self._spill.close()

    def _learn(self) -> tuple[Axis, Axis]:
        try:
            return self._learn_once()
        except KeysAreText:
            assert self.source.as_text is not None
            self.source.as_text()
            return self._learn_once()

    def _learn_once(self) -> tuple[Axis, Axis]:
        self.entries = 0
        axes = None if self.source.shape is None else _position_axes(self.source.shape)
        with ThreadPoolExecutor(1) as helper:
            for piece in read(self.source, False):
                if axes is None:
                    axes = axis_for("row", piece.rows), axis_for("column", piece.cols)
                other = helper.submit(axes[0].learn, piece.rows)
                axes[1].learn(piece.cols)
                other.result()
                self.entries += _size(piece)
                self.on_event(RunEvent("keys", self.entries, self.source.entries or 0))
        self.on_event(RunEvent("keys", self.entries, self.entries))
        return axes or _position_axes((0, 0))

    def _compressed(self, block: Block) -> Compressed:
        assert self._spill is not None
        return compress(
            self._spill.gather(block),
            self.grid.block_shape(block),
            add=self.zeros,
            drop_zeros=self.zeros,
            drop_nans=not self.zeros,
        )

    def _warn_of_doubles(self) -> None:
        if self.doubles and not self.zeros:
            warnings.warn(
                f"{self.doubles} entries name a cell that was named before; the last value of each "
                'cell was kept (with unstored="zero" they would be added up)',
                DataWarning,
                stacklevel=4,
            )


def read(source: TripleSource, with_values: bool) -> Iterator[Piece]:
    """The pieces of a source; what goes wrong there is reported with its place."""
    pieces = source.pieces(with_values)
    for number in count():
        try:
            piece = next(pieces, None)
        except (DaskfactorError, MemoryError, KeysAreText):
            raise
        except Exception as error:
            where = source.info.location or f"the {source.info.kind} input"
            raise StoreError(
                f"reading {where} failed after {number} pieces: {type(error).__name__}: {error}; "
                "check that all of it can be read"
            ) from error
        if piece is None:
            return
        yield piece


def _in_order(jobs: Iterator[tuple[Callable[..., int], tuple[Any, ...]]], threads: int) -> Any:
    """Results of jobs done by some threads, a few jobs ahead of the caller."""
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[int]] = deque()
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


def _grid(shape: tuple[int, int], blocks: int | Grid | None, entries: int) -> Grid:
    if not isinstance(blocks, Grid):
        return choose_grid(shape, None, blocks, None, entries)
    if blocks.shape != shape:
        raise OptionError(
            f"the grid is for a matrix of shape {blocks.shape}, the source has shape {shape}"
        )
    return blocks


def _labels(source: TripleSource, learnt: list[Learnt]) -> Labels:
    given = source.labels
    rows, cols = (side.labels for side in learnt)
    return Labels(
        given.row_dim,
        given.col_dim,
        given.row_coords if rows is None else {given.row_dim: rows},
        given.col_coords if cols is None else {given.col_dim: cols},
        given.name,
    )


def _size(piece: Piece) -> int:
    keys = piece.rows
    return keys.size if isinstance(keys, np.ndarray) else keys.codes.size


def _changed(source: TripleSource, before: int, now: int) -> StoreError:
    where = source.info.location or f"the {source.info.kind} input"
    return StoreError(
        f"{where} had {before} entries when it was read the first time and {now} the second time; "
        "convert it again when nobody writes to it"
    )
