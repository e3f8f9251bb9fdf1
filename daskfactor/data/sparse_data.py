"""`BlockedData` of sparse blocks: from a stream of entries, or from a blocked store."""

import warnings
from collections.abc import Iterator
from typing import cast

import numpy as np
from numpy.typing import DTypeLike

from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Block, Grid
from daskfactor.data.labels import SourceInfo, SparseLayout
from daskfactor.data.memory import memory_budget
from daskfactor.data.sharing import about_store
from daskfactor.data.sparse_loading import Wish, load_sparse
from daskfactor.data.sparse_reading import row_of_entries
from daskfactor.data.sparse_source import Piece, SparseSource
from daskfactor.data.sparse_statistics import Orders
from daskfactor.data.statistics import refuse_unobserved, unpermuted
from daskfactor.data.storage import FloatType
from daskfactor.data.store import BlockStore
from daskfactor.errors import DataError, DataWarning, OptionError

WHERE_TO_WARN = 3


def meaning_of_unstored(source: SparseSource, unstored: str | None) -> str:
    """What entries that are not stored mean: as asked, as the input says, or else zero."""
    if source.unstored == "missing" and unstored == "zero":
        raise OptionError(
            'unstored="zero", but the input says that entries it does not store are missing '
            '(fill_value NaN, or a store converted with unstored="missing"); leave unstored out, '
            "or make the input anew"
        )
    if unstored is not None:
        return unstored
    if source.unstored is not None:
        return source.unstored
    warnings.warn(
        "entries that the sparse matrix does not store are taken to be observed zeros; say "
        'unstored="zero" if that is meant, unstored="missing" if they are not observed '
        "(ratings, for example)",
        DataWarning,
        stacklevel=WHERE_TO_WARN,
    )
    return "zero"


def sparse_data(source: SparseSource, wish: Wish) -> BlockedData:
    """Read a sparse source once and keep its blocks."""
    if isinstance(wish.blocks, Grid) and wish.blocks.shape != source.shape:
        raise OptionError(
            f"the grid is for a matrix of shape {wish.blocks.shape}, the data have shape "
            f"{source.shape}"
        )
    grid, orders, statistics, storage = load_sparse(source, wish)
    layout = SparseLayout("zero" if wish.zeros else "missing", orders.rows, orders.cols)
    return BlockedData(grid, source.labels, statistics, source.info, wish.dtype, storage, layout)


def serves(
    store: BlockStore, blocks: int | Grid | None, unstored: str | None, balance: bool
) -> bool:
    """Whether the blocks of a store can be used as they are."""
    fits = blocks is None or blocks in (store.grid, store.grid.blocks)
    ordered = not balance or store.row_order is not None
    return fits and ordered and unstored in (None, store.unstored)


def stored_blocks(
    store: BlockStore, dtype: FloatType, limit: int, allow_empty: bool
) -> BlockedData:
    """The blocks of a store, read when they are wanted and kept as far as memory allows."""
    largest = max(abs(store.statistics.minimum), abs(store.statistics.maximum))
    if largest > np.finfo(dtype).max:
        raise DataError(
            f"the store at {store.location} has entries up to {largest:g} in size, outside the "
            f'range of {dtype}; pass dtype="float64", or rescale the data'
        )
    found = store.statistics
    refuse_unobserved(
        found.n_observed,
        unpermuted(found.row_observed, store.row_order),
        unpermuted(found.col_observed, store.col_order),
        store.labels,
        allow_empty,
    )
    grid, labels, statistics, source, dtype, sparse = about_store(store, dtype)
    return BlockedData(grid, labels, statistics, source, dtype, store.blocks(dtype, limit), sparse)


def open_blocked_store(
    location: str,
    *,
    dtype: DTypeLike | None = None,
    memory_limit: int | str | None = None,
    allow_empty: bool = True,
) -> BlockedData:
    """A blocked store as `BlockedData` whose blocks are read when they are wanted.

    Parameters
    ----------
    location
        Path or URL.
    dtype
        float32 or float64; by default that of the store.
    memory_limit
        Bytes of blocks that are kept once they were read, so that a store of any size
        can be used; by default half of the free memory.
    allow_empty
        Whether rows and columns without any observed entry are accepted.

    Raises
    ------
    StoreError, StoreFormatError
        As for `BlockStore`.
    DataError
        If a row or column has no observed entry and ``allow_empty`` is False.
    """
    store = BlockStore(location)
    kind = cast("FloatType", np.dtype(dtype or store.dtype))
    return stored_blocks(store, kind, memory_budget(memory_limit), allow_empty)


def store_source(store: BlockStore) -> SparseSource:
    """The entries of a store, for other blocks than its own."""
    return SparseSource(
        store.grid.shape,
        store.dtype,
        store.labels,
        SourceInfo("blocks", store.location, lazy=True),
        lambda add=True: _store_pieces(store),
        store.unstored,
        None if store.row_order is not None else (store.grid.rows.sizes, store.grid.cols.sizes),
    )


def _store_pieces(store: BlockStore) -> Iterator[Piece]:
    orders = Orders(store.row_order, store.col_order)
    last = store.grid.blocks - 1
    for block in store.grid.all_blocks():
        view = store.read(*block)
        rows, cols = store.grid.slices(Block(*block))
        row = row_of_entries(view) + rows.start
        col = view.indices + np.int64(cols.start)
        if orders.rows is not None:
            row = orders.rows[row]
        if orders.cols is not None:
            col = orders.cols[col]
        done = rows.stop if orders.rows is None and block.col == last else 0
        yield Piece(row, col, view.values, done)
