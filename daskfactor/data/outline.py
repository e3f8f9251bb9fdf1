"""What a run's memory depends on of a matrix, from its metadata alone."""

from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import numpy as np
from dask.system import cpu_count
from numpy.typing import NDArray

from daskfactor.data.adapters import Source, open_source
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Grid, choose_grid
from daskfactor.data.loading import working_bytes
from daskfactor.data.sources import LEAST_READ, MOST_READ
from daskfactor.data.sparse import BLOCK_BYTES, MOST_THREADS, sparse_bytes
from daskfactor.data.sparse_source import PIECE, SparseSource
from daskfactor.data.statistics import TILE_ENTRIES
from daskfactor.data.storage import FloatType, block_bytes, zero_copy
from daskfactor.data.store import BlockStore, is_blocked_store
from daskfactor.errors import OptionError
from daskfactor.kernels.triples import triple_type
from daskfactor.kernels.views import index_type, pointer_type
from daskfactor.machine import memory_budget

PIECE_BYTES = 64
"""Bytes per entry of a piece while it is sorted by block: its parts, and what becomes of them."""
ASSEMBLY_BYTES = 48
"""Bytes per entry of a sparse block while it is put together."""
SCAN_BYTES = 24
"""Bytes per entry of a tile while statistics are taken."""


READING = 6
"""Blocks' worth of memory that a thread takes to read one from a store: compressed, decompressed,
decoded, and what zarr holds of them at once; measured."""


@dataclass(frozen=True)
class Outline:
    """Stands in for `BlockedData` where only sizes matter.

    Attributes
    ----------
    grid, dtype, unstored, n_stored
        As those of `BlockedData`; of a sparse source that has not been read,
        ``n_stored`` is the same for blocks of one size.
    decoded
        Bytes of all blocks, wherever they are.
    held
        Bytes of blocks that a run keeps in the memory of its process, the caller's
        own arrays not counted.
    loading
        Most bytes that reading takes at any time, finished blocks included.
    largest
        Bytes of the largest block.
    buffered
        Whether every thread needs a buffer for the block it works on.
    keeps_copy
        Whether results may keep a dense copy of the matrix.
    n_missing
        Missing cells, or None if that is not known without reading.
    """

    grid: Grid
    dtype: FloatType
    unstored: str | None
    n_stored: NDArray[np.int64]
    decoded: int
    held: int
    loading: int
    largest: int
    buffered: bool
    keeps_copy: bool
    n_missing: int | None

    @property
    def shape(self) -> tuple[int, int]:
        """(I, J)."""
        return self.grid.shape

    @property
    def is_sparse(self) -> bool:
        """Whether blocks hold compressed rows."""
        return self.unstored is not None


@dataclass(frozen=True)
class Wanted:
    """The options of `as_blocks`, as `outline` needs them; ``limit`` is in bytes."""

    blocks: int | Grid | None
    dtype: FloatType
    unstored: str | None
    balance: bool
    limit: int | str | None
    workers: int | None
    entries: int | None


def outline(V: Any, wanted: Wanted) -> Outline:
    """The outline of anything that `as_blocks` takes; no entry is read.

    Raises
    ------
    OptionError
        If ``V`` is sparse and does not say how many entries it stores.
    DataError, StoreError
        As from `as_blocks`.
    """
    if isinstance(V, BlockedData):
        return of_blocks(V)
    limit = memory_budget(wanted.limit)
    if isinstance(V, str | PathLike) and is_blocked_store(fspath(V)):
        return of_store(BlockStore(fspath(V)), wanted, limit)
    source = open_source(V)
    if isinstance(source, Source):
        return of_dense(source, wanted, limit)
    return of_sparse(source, V, wanted, limit)


def of_blocks(data: BlockedData) -> Outline:
    """Of data that are on their grid already: what they hold is the caller's."""
    return Outline(
        data.grid,
        data.dtype,
        data.unstored,
        data.n_stored,
        data.nbytes,
        0,
        0,
        largest_block(data.grid, data.n_stored, data.dtype, data.is_sparse),
        not data.in_memory,
        not (data.is_sparse or data.source.lazy),
        data.n_missing,
    )


def of_store(store: BlockStore, wanted: Wanted, limit: int) -> Outline:
    """Of a blocked sparse store that is used as it is: blocks are kept up to the limit."""
    grid = store.grid
    if wanted.blocks is not None and wanted.blocks not in (grid, grid.blocks):
        raise OptionError(
            f"blocks is {wanted.blocks!r}, but the store at {store.location} is on a grid of "
            f"{grid.blocks} x {grid.blocks} blocks; its cost on another grid is known once it is "
            "read: pass as_blocks(V, blocks) instead"
        )
    sizes = block_bytes(grid, wanted.dtype, store.n_stored)
    size = int(sizes.sum())
    rows, cols = grid.shape
    observed = int(store.statistics.n_observed.sum())
    return Outline(
        grid,
        wanted.dtype,
        store.unstored,
        store.n_stored,
        size,
        min(size, limit) + READING * int(sizes.max()) * cpu_count(),
        0,
        int(sizes.max()),
        size > limit,
        False,
        rows * cols - observed,
    )


def of_dense(source: Source, wanted: Wanted, limit: int) -> Outline:
    """Of a dense matrix: used where it is, decoded into memory, or into a scratch file."""
    grid, dtype = wanted.blocks, wanted.dtype
    if not isinstance(grid, Grid):
        grid = choose_grid(source.shape, source.chunks, grid, wanted.workers)
    size = source.shape[0] * source.shape[1] * dtype.itemsize
    stored = np.outer(grid.rows.sizes, grid.cols.sizes).astype(np.int64)
    working = working_bytes(source, grid, dtype, min(MOST_READ, max(LEAST_READ, limit // 16)))
    borrowed = source.array is not None and zero_copy(source.array, dtype)
    held = size if not borrowed and size + working <= limit else 0
    scan = SCAN_BYTES * max(TILE_ENTRIES, *grid.cols.sizes)
    return Outline(
        grid,
        dtype,
        None,
        stored,
        size,
        held,
        scan + (0 if borrowed else held + working),
        largest_block(grid, stored, dtype, False),
        not (borrowed or held),
        not source.info.lazy,
        None if source.array is None else missing_of(source.array),
    )


def of_sparse(source: SparseSource, V: Any, wanted: Wanted, limit: int) -> Outline:
    """Of a sparse matrix, whose entries are taken to lie evenly."""
    entries, dtype = wanted.entries or stored_entries(V), wanted.dtype
    grid, shape = wanted.blocks, source.shape
    assert shape is not None
    if not isinstance(grid, Grid):
        chunks = None if wanted.balance else source.chunks
        grid = choose_grid(shape, chunks, grid, wanted.workers, entries)
    area = np.outer(grid.rows.sizes, grid.cols.sizes)
    stored = np.ceil(entries * (area / area.sum())).astype(np.int64)
    decoded = sparse_bytes(grid, entries, dtype)
    held = decoded if decoded <= limit else 0
    unstored = wanted.unstored or source.unstored or "zero"
    cells = shape[0] * shape[1]
    return Outline(
        grid,
        dtype,
        unstored,
        stored,
        decoded,
        held,
        sparse_loading(source, V, (grid, wanted.balance), entries, (held, limit)),
        largest_block(grid, stored, dtype, True),
        not held,
        False,
        cells - entries if unstored == "missing" else 0,
    )


def sparse_loading(
    source: SparseSource, V: Any, layout: tuple[Grid, bool], entries: int, memory: tuple[int, int]
) -> int:
    """Most bytes while entries are put on their blocks; ``memory`` is (held, limit)."""
    grid, balance = layout
    held, limit = memory
    value, block = source.dtype.itemsize, -(-entries // grid.blocks**2)
    if source.matrix is not None:
        # A copy in rows unless it is that already; what says something; a band, as it is cut and
        # permuted (measured: three to four copies of it with what scipy holds meanwhile).
        copied = 0 if getattr(V, "format", None) == "csr" else entries * (16 + value)
        told = entries * (9 if balance else 2)
        band = (4 if balance else 3) * -(-entries // grid.blocks) * (8 + value)
        return copied + max(told, band + ASSEMBLY_BYTES * block + held)
    threads = min(MOST_THREADS, cpu_count())
    piece = PIECE_BYTES * min(entries, PIECE) * (threads + 2)
    shelf = min(limit // 2, entries * (16 + value + triple_type(np.dtype(float)).itemsize))
    return shelf + max(piece, held + threads * BLOCK_BYTES * block)


def stored_entries(V: Any) -> int:
    """Entries that a sparse input says it stores."""
    for owner in (V, getattr(V, "X", None)):
        count = getattr(owner, "nnz", None)
        if isinstance(count, int | np.integer):
            return int(count)
    raise OptionError(
        f"this sparse input ({type(V).__name__}) does not say how many entries it stores; pass "
        "entries=, or the result of as_blocks"
    )


def largest_block(grid: Grid, stored: NDArray[np.int64], dtype: FloatType, is_sparse: bool) -> int:
    """Bytes of the largest block."""
    if not is_sparse:
        return max(grid.rows.sizes) * max(grid.cols.sizes) * dtype.itemsize
    most = int(stored.max())
    each = dtype.itemsize + index_type(max(grid.cols.sizes)).itemsize
    return most * each + (max(grid.rows.sizes) + 1) * pointer_type(most).itemsize


def missing_of(array: NDArray[Any]) -> int:
    """Missing entries of an array in memory, a few rows at a time."""
    if array.dtype.kind != "f":
        return 0
    rows = max(1, TILE_ENTRIES // array.shape[1])
    return sum(
        int(np.count_nonzero(np.isnan(array[start : start + rows])))
        for start in range(0, array.shape[0], rows)
    )
