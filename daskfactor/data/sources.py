"""`as_blocks`: any kind of matrix becomes `BlockedData`."""

from os import PathLike, fspath
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from daskfactor.checks import warn
from daskfactor.data.adapters import Source, open_source
from daskfactor.data.blocks import BlockedData, open_store
from daskfactor.data.grid import Grid, choose_grid
from daskfactor.data.loading import load, working_bytes
from daskfactor.data.sparse import LoadOptions, meaning_of_unstored, sparse_data
from daskfactor.data.sparse_source import from_blocks
from daskfactor.data.statistics import refuse_unobserved, unpermuted
from daskfactor.data.storage import ArrayFile, FloatType, Storage, scratch_directory, zero_copy
from daskfactor.data.store import BlockStore, is_blocked_store
from daskfactor.errors import DataError, DataWarning, OptionError
from daskfactor.machine import memory_budget

MOST_READ = 2**24
LEAST_READ = 2**20
NEGLIGIBLE = 2**26


def as_blocks(
    V: Any,
    blocks: int | Grid | None = None,
    *,
    dtype: DTypeLike = "float32",
    unstored: str | None = None,
    memory_limit: int | str | None = None,
    workers: int | None = None,
    balance: bool = False,
    allow_empty: bool = False,
) -> BlockedData:
    """Put a matrix on a B x B grid of decoded blocks and check it on the way.

    V = (V_bc),  b, c = 0 .. B-1

    One pass reads the input once, in the order of its chunks, refuses what
    cannot be factorized, and counts and sums what is observed. Blocks then live
    where they are (a writable, C-contiguous NumPy array of the right dtype), in
    a cache in memory, or in a scratch file on local disk (in dask's
    ``temporary-directory``), whichever ``memory_limit`` allows. Sparse input stays
    sparse: its blocks are compressed rows, and nothing as large as the dense matrix
    is ever made.

    Parameters
    ----------
    V : array_like, shape (I, J)
        NumPy array (NaN is missing) or masked array; scipy sparse matrix or array
        of any format, or two-dimensional array of the sparse package (duplicates
        are summed, a stored NaN is missing); dask array of any of these; zarr array
        or path or URL of one; path or URL of a blocked sparse store; xarray.DataArray
        (names kept); pandas.DataFrame; AnnData object (its ``X``, under the names of
        observations and variables; to use a layer, pass ``adata.layers[name]``, which
        has no names); or `BlockedData`, which is returned as it is, with its own dtype.
    blocks : int or Grid, optional
        B, the number of row bands and of column bands, or the grid itself. Left
        out, it is the chunk grid if that has 2 to 64 chunks on both sides and at
        most twice as many on one as on the other. Otherwise it follows from the
        shape alone, so that every machine chooses the same: the largest of 2, 4, 8
        that leaves at least 16,384 entries to a block and 16 rows and columns to a
        band; 16, 32 or 64 where blocks would exceed 2^24 entries. Of sparse input the
        stored entries are counted, and a blocked store keeps its own grid.
    dtype : {"float32", "float64"}
        Type of the blocks, and of all computation with them.
    unstored : {None, "zero", "missing"}
        What an entry means that a sparse input does not store: an observed zero, or
        a missing entry (then a stored zero is an observed zero). Left out, an array
        of the sparse package says it by its ``fill_value`` (0 or NaN) and a blocked
        store by itself; otherwise it is "zero", with a warning. Dense input stores
        every entry, and "missing" is refused for it.
    memory_limit : int or str, optional
        Bytes, or a text such as ``"4 GiB"``, for the blocks and the pass that
        makes them. Default: half of the memory that is free.
    workers : int, optional
        If ``blocks`` is left out: have at least two bands a worker, as far as
        bands and blocks stay large enough. Never counted from the machine.
    balance : bool
        Permute rows and columns of sparse input so that blocks store about equally
        many entries. Results come in the caller's order all the same. Dense blocks
        cost the same wherever they are and are left as they are.
    allow_empty : bool
        Accept rows and columns without any observed entry; nothing but the prior
        says something about their factors.

    Returns
    -------
    BlockedData
        The blocks, in units of V, with counts, moments and a fingerprint.

    Raises
    ------
    DataError
        Not two-dimensional, empty, not real numbers, infinite, too large for
        ``dtype``, a damaged sparse matrix, or a row or column without any observed
        entry.
    OptionError
        An argument outside what is allowed.
    StoreError
        The input cannot be read, or there is no room for the scratch file.

    Notes
    -----
    The grid of blocks is that of Şimşekli et al. 2017, definition 1. A NumPy
    array that is used where it is must not be changed afterwards. A dask array
    must say itself that its chunks are sparse (its ``meta``).
    """
    kind = checked_options(dtype, unstored, workers)
    if isinstance(V, BlockedData):
        return _agreeing(V, blocks, unstored, balance)
    limit = memory_budget(memory_limit)
    source = _blocked_store(V) or open_source(V)
    if isinstance(source, Source):
        if unstored == "missing":
            raise OptionError(
                'unstored is "missing", but the input is dense: it stores every entry, and its '
                "zeros are observed; mark missing entries with NaN or a mask, or pass a sparse "
                "matrix"
            )
        return _dense(source, blocks, kind, limit, workers, allow_empty)
    if isinstance(source, BlockStore):
        if _serves(source, blocks, unstored, balance):
            return _stored(source, kind, limit, allow_empty)
        source = from_blocks(source, source.read)
    if source.unstored == "missing" and unstored == "zero":
        raise OptionError(
            'unstored="zero", but the input says that entries it does not store are missing '
            '(fill_value NaN, or a store converted with unstored="missing"); leave unstored out, '
            "or make the input anew"
        )
    zeros = meaning_of_unstored(source, unstored) == "zero"
    return sparse_data(
        source, LoadOptions(blocks, kind, zeros, limit, workers, balance, allow_empty)
    )


def _serves(
    store: BlockStore, blocks: int | Grid | None, unstored: str | None, balance: bool
) -> bool:
    """Whether the blocks of a store can be used as they are."""
    fits = blocks is None or blocks in (store.grid, store.grid.blocks)
    ordered = not balance or store.row_order is not None
    return fits and ordered and unstored in (None, store.unstored)


def _stored(store: BlockStore, dtype: FloatType, limit: int, allow_empty: bool) -> BlockedData:
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
    return open_store(store, dtype, limit)


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
    return _stored(store, kind, memory_budget(memory_limit), allow_empty)


def _dense(
    source: Source,
    blocks: int | Grid | None,
    kind: FloatType,
    limit: int,
    workers: int | None,
    allow_empty: bool,
) -> BlockedData:
    grid = _grid(source, blocks, workers)
    budget = min(MOST_READ, max(LEAST_READ, limit // 16))
    storage = _storage(source, grid, kind, limit, budget)
    try:
        statistics = load(source, grid, kind, storage, budget, allow_empty)
        return BlockedData(grid, source.labels, statistics, source.info, kind, storage)
    except BaseException:
        storage.close()
        raise


def _blocked_store(V: Any) -> BlockStore | None:
    if isinstance(V, str | PathLike) and is_blocked_store(fspath(V)):
        return BlockStore(fspath(V))
    return None


def checked_options(
    dtype: DTypeLike, unstored: str | None, workers: int | None = None
) -> FloatType:
    """The type of the blocks; refuses options that are none."""
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise OptionError(f'dtype must be "float32" or "float64", got {dtype!r}')
    if unstored not in (None, "zero", "missing"):
        raise OptionError(f'unstored must be None, "zero" or "missing", got {unstored!r}')
    if workers is not None and workers < 1:
        raise OptionError(f"workers must be at least 1, got {workers!r}; leave it out if unsure")
    return cast("FloatType", kind)


def _grid(source: Source, blocks: int | Grid | None, workers: int | None) -> Grid:
    if not isinstance(blocks, Grid):
        return choose_grid(source.shape, source.chunks, blocks, workers)
    if blocks.shape != source.shape:
        raise OptionError(
            f"the grid is for a matrix of shape {blocks.shape}, the data have shape {source.shape}"
        )
    return blocks


def _agreeing(
    data: BlockedData, blocks: int | Grid | None, unstored: str | None, balance: bool
) -> BlockedData:
    if blocks is not None and blocks not in (data.grid, data.grid.blocks):
        raise OptionError(
            f"blocks is {blocks!r}, but these data are on a grid of {data.grid.blocks} x "
            f"{data.grid.blocks} blocks already; leave it out, or call as_blocks on the original "
            "data"
        )
    if data.is_sparse and unstored not in (None, data.unstored):
        raise OptionError(
            f"unstored is {unstored!r}, but these data were made with {data.unstored!r}; leave it "
            "out, or call as_blocks on the original data"
        )
    if data.is_sparse and balance and data.row_order is None:
        raise OptionError(
            "these data were made without balance=True; leave it out, or call as_blocks on the "
            "original data"
        )
    return data


def _storage(source: Source, grid: Grid, dtype: FloatType, limit: int, budget: int) -> Storage:
    if source.array is not None and zero_copy(source.array, dtype):
        return Storage(grid)
    working = working_bytes(source, grid, dtype, budget)
    size = source.shape[0] * source.shape[1] * dtype.itemsize
    if size + working <= limit:
        return Storage(grid)
    if working > max(limit, NEGLIGIBLE):
        warn(
            f"memory_limit allows {limit} bytes, but one block and the chunks it is read from "
            f"need {working}; going on with more; smaller chunks or more blocks (now "
            f"{grid.blocks}) need less",
            DataWarning,
        )
    return Storage(grid, file=ArrayFile(scratch_directory(), reserve=size))
