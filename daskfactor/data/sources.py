"""`as_blocks`: conversion of any kind of matrix to `BlockedData`."""

from dataclasses import replace
from functools import partial
from typing import Any, Unpack, cast

import numpy as np
from numpy.typing import DTypeLike

from daskfactor.checks import input_name, one_of, warn
from daskfactor.data.adapters import Source
from daskfactor.data.blocks import BlockedData, filled, open_store
from daskfactor.data.grid import Grid, choose_grid
from daskfactor.data.labels import Labels
from daskfactor.data.loading import as_weights, load, read_budget, working_bytes
from daskfactor.data.opening import open_source, refuse_options
from daskfactor.data.sparse import LoadOptions, meaning_of_unstored, sparse_data
from daskfactor.data.stacking import drop_all_missing
from daskfactor.data.statistics import (
    DataInfo,
    Layout,
    SourceInfo,
    Statistics,
    matrix_shape,
    refuse_unobserved,
)
from daskfactor.data.storage import (
    ArrayFile,
    FloatType,
    Storage,
    block_bytes,
    zero_copy,
)
from daskfactor.data.store import BlockStore
from daskfactor.data.tables import ReadOptions
from daskfactor.data.weights import CellWeights, Pairing, cell_weights
from daskfactor.errors import DataError, DataWarning, OptionError
from daskfactor.machine import available_memory, memory_budget
from daskfactor.options import Weighing, verb
from daskfactor.urls import check_options, locate

NEGLIGIBLE = 2**26
OVERESTIMATE = 4
"""Factor by which a memory estimate may be too high."""


@verb
def as_blocks(
    V: Any,
    blocks: int | Grid | None = None,
    *,
    dtype: DTypeLike = "float32",
    memory_limit: int | str | None = None,
    workers: int | None = None,
    balance: bool = False,
    allow_empty: bool = False,
    **reading: Unpack[Weighing],
) -> BlockedData:
    """Put a matrix on a B x B grid of decoded blocks and check it on the way.

    V = (V_bc),  b, c = 0 .. B-1

    One pass reads the input once, in the order of its chunks, refuses what
    cannot be factorized, and counts and sums what is observed. Blocks then live
    in place (a writable, C-contiguous NumPy array of the right dtype), in
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
        (names kept); DataFrame of pandas or any library that gives out its columns (polars,
        pyarrow), either a matrix or a table with a line for each entry; path of such a table
        (CSV, TSV, Parquet), or of a matrix in a file (.npy, .npz, netCDF); AnnData object, in
        memory, backed or lazy, or path or URL of its ``.h5ad`` or ``.zarr`` (under the names of
        observations and variables; what is in a file is read piece by piece); or
        `BlockedData`, which is returned as it is, with its own dtype.
    blocks : int or Grid, optional
        Number B of row bands and of column bands; by default chosen from the data. Or the grid
        itself. Left out, it is 1 below four million entries, where several blocks cost more
        than they save. Of larger data it is the chunk grid if that has 2 to 64 chunks on both
        sides and at most twice as many on one as on the other, and else follows from the
        shape and the stored entries, so that every machine chooses the same: the largest of 2, 4, 8
        that leaves at least 2^20 entries to a block (at 10 components, which :func:`sample`
        adapts to its model) and 16 rows and columns to a
        band; 16, 32 or 64 where blocks would exceed 2^24 entries. Of sparse input the
        stored entries are counted, and a blocked store keeps its own grid.
    dtype : {"float32", "float64"}
        Data type of the blocks and of all computation with them.
    unstored : {None, "zero", "missing"}
        Meaning of entries that a sparse input does not store: observed zeros, or
        missing entries (then a stored zero is an observed zero). By default that of the input:
        the ``fill_value`` (0 or NaN) of an array of the sparse package, the meaning in a blocked
        store, "zero" for an AnnData; else "zero", too, with a warning.
        Dense input stores every entry, and "missing" is refused for it.
    memory_limit : int or str, optional
        Memory for the blocks and for building them, in bytes or as a text such as
        ``"4 GiB"``; by default half of the free memory.
    workers : int, optional
        If ``blocks`` is left out: have at least two bands a worker, as far as
        bands and blocks stay large enough. Never counted from the machine.
    balance : bool
        Permute rows and columns of sparse input internally so that blocks store about equally
        many entries; results keep your order. Dense blocks have equal costs and are not permuted.
    allow_empty : bool
        Accept rows and columns without any observed entry; only the prior
        determines their factors.
    uncertainty : array_like, optional
        Standard deviation of every cell, sigma_ij > 0, in the unit of the data; infinite
        makes a cell missing. Values are ignored where V is missing. For a dense V: any input of
        its shape; an xarray.DataArray with one or both of its dimensions; a pair of vectors
        (rows, columns) with product sigma; or one number. For a sparse V, with
        ``unstored="missing"``, a sparse matrix that stores the same entries, the path of a
        blocked store of one, or an array in memory or a pair of vectors. For models with
        a normal likelihood, whose dispersion is then 1 by default.
    weights : array_like, optional
        Weight of every cell's log-likelihood, w_ij >= 0; 0 makes the cell missing, 2 counts it
        twice. Forms as for ``uncertainty``. Zeros that a sparse V does not store have weight 1.
    layer : str, optional
        Layer of an AnnData to use instead of ``X``; ``"raw"`` is its ``raw``.
    mask_var : str or array_like of bool, optional
        Variables of an AnnData to use: the name of a boolean column of ``var``, such as
        ``"highly_variable"``, or one boolean for each variable.
    rows, columns : str or tuple of str, optional
        Dimensions of an xarray.DataArray that form the rows, or the columns; one of the two may
        be left out and then has all other dimensions. Several dimensions are stacked, and their
        positions without any observed entry (land, in a map of the sea) are left out, with a
        warning; this takes an additional pass. Weights and uncertainties may be a DataArray with
        any of the dimensions.
    rows, columns : str or int, optional
        Columns with the keys of rows and of columns, in a table with a line for each entry: by
        name or by position from 0, by default the first and the second. Keys are whole numbers,
        texts, categories or dates (which are texts if read from a file); they become labels, in
        ascending order.
    values : str, int or False, optional
        Column with values, in a table with a line for each entry; by default the third.
        ``values=False`` counts lines, and so does a table of two columns.
    header : bool, optional
        Take the first line of a CSV file as names of columns; by default if it has no
        number where one is needed.
    table : bool, optional
        Read a table with a line for each entry, or else with one for each row of the matrix.
        By default it has a line for each entry if ``rows``, ``columns`` or ``values`` is given,
        and a table of three columns is refused, and one of four where the first two may be keys.
    storage_options : dict, optional
        Options of fsspec for URLs (of V, weights or uncertainty), as for dask and pandas, for
        example ``{"anon": True}``. By default they come from the environment. Neither these nor
        a password or signature in a URL are written to results.

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
        An argument is invalid.
    StoreError
        The input cannot be read, or there is no room for the scratch file.

    Notes
    -----
    If lines of a table name one cell more than once, their values are added up if unstored
    means zero; if it means missing, the last one is used, with a warning. So does `convert`.

    The grid of blocks is that of Şimşekli et al. 2017, definition 1. A NumPy
    array that is used in place must not be changed afterwards. A dask array
    with sparse chunks must have a sparse ``meta``.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> from scipy import sparse
    >>> V = sparse.csr_array(np.random.default_rng(0).poisson(0.1, (300, 200)))
    >>> data = dfac.as_blocks(V, blocks=4, unstored="missing")
    >>> data.shape, data.grid.blocks
    ((300, 200), 4)
    """
    options: dict[str, Any] = {"dtype": dtype, "memory_limit": memory_limit, "workers": workers}
    return blocks_of(V, blocks, balance=balance, allow_empty=allow_empty, **options, **reading)


def blocks_of(
    V: Any,
    blocks: int | Grid | None = None,
    *,
    usual: str | None = None,
    dtype: DTypeLike = "float32",
    memory_limit: int | str | None = None,
    workers: int | None = None,
    balance: bool = False,
    allow_empty: bool = False,
    components: int | None = None,
    **reading: Any,
) -> BlockedData:
    """Return the result of `as_blocks`; ``usual`` is the default meaning of unstored entries.

    ``components``: number of components of the model; sets the default number of blocks.
    """
    unstored, options = reading.get("unstored"), ReadOptions.of(reading)
    kind = checked_options(dtype, unstored, workers)
    inputs = V, reading.get("uncertainty"), reading.get("weights")
    check_options(options.storage_options, inputs)
    V, *cell_arguments = (locate(item, options.storage_options) for item in inputs)
    options, cells = replace(options, storage_options=None), cell_weights(*cell_arguments)
    if isinstance(V, BlockedData):
        refuse_options(V, options)
        return _check_blocks(V, blocks, unstored, balance, cells)
    limit = memory_budget(memory_limit) // (1 if cells is None else 2)
    source = open_source(V, options)
    if cells is None and _serves(source.store, blocks, unstored, balance):
        return _stored(source.store, kind, limit, allow_empty)
    source = source if usual is None else replace(source, usual=usual)
    if not source.is_sparse:
        if unstored == "missing":
            raise OptionError(
                'unstored is "missing", but the input is dense: it stores every entry, and its '
                "zeros are observed; mark missing entries with NaN or a mask, or pass a sparse "
                "matrix; for a table with a line for each entry pass rows, columns and values"
            )
        source = drop_all_missing(source, limit)
        grid = choose_grid(source.shape, source.chunks, blocks, workers, None, components)  # type: ignore[arg-type]
        return _dense(source, grid, kind, limit, allow_empty, cells)
    if source.unstored == "missing" and unstored == "zero":
        raise OptionError(
            'unstored="zero", but the input says that entries it does not store are missing '
            '(fill_value NaN, or a store converted with unstored="missing"); leave unstored out, '
            "or make a new input"
        )
    zeros = meaning_of_unstored(source, unstored) == "zero"
    load_options = LoadOptions(
        blocks, kind, zeros, limit, workers, components, balance, allow_empty, not source.merges
    )
    if cells is not None and source.shape is None:
        raise OptionError(
            f"{cells.kind} of the entries of a table in a file; read it into a DataFrame, or make "
            "a store of it with convert, and pass that"
        )
    if cells is None:
        return sparse_data(source, load_options)
    return sparse_data(source, load_options, partial(Pairing, cells, source, load_options))


def checked_options(
    dtype: DTypeLike, unstored: str | None, workers: int | None = None
) -> FloatType:
    """Return the dtype of the blocks; refuse invalid options."""
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise OptionError(f'dtype must be "float32" or "float64", got {dtype!r}')
    one_of("unstored", unstored, (None, "zero", "missing"))
    if workers is not None and workers < 1:
        raise OptionError(f"workers must be at least 1, got {workers!r}; leave it out if unsure")
    return cast("FloatType", kind)


def unread_source(
    V: Any, options: ReadOptions, blocks: int | Grid | None, entries: int | None
) -> Source | None:
    """Return the source of an input of known size that is not in memory, else None.

    It is also None for a blocked store whose ``blocks`` are used unchanged. ``V`` may be the shape
    of a matrix; ``entries`` is the number of stored entries of a sparse matrix.

    Raises
    ------
    OptionError
        If the input is sparse and its number of stored entries is not known.
    """
    if isinstance(V, tuple):
        return Source(SourceInfo("shape"), matrix_shape(V), entries=entries)
    source = open_source(V, options)
    if _serves(source.store, blocks, None, False) or source.shape is None or not source.info.lazy:
        return None
    if not source.is_sparse:
        return source
    count = entries or source.entries
    if count is None:
        raise OptionError(
            f"this sparse input ({type(V).__name__}) does not say how many entries it stores; pass "
            "entries=, or the result of as_blocks"
        )
    return replace(source, entries=count)


def unread_blocks(
    source: Source,
    blocks: int | Grid | None,
    dtype: DTypeLike,
    unstored: str | None,
    memory_limit: int | str | None,
    components: int | None,
    weighting: str | None = None,
) -> BlockedData:
    """Return blocks of the size of a source, for estimates: statistics without values.

    They have no fingerprint. Stored entries are spread evenly over the blocks of a sparse source,
    and all of them are 1.
    """
    kind, shape, count = checked_options(dtype, unstored), source.shape, source.entries
    assert shape is not None
    grid = choose_grid(shape, source.chunks, blocks, None, count, components)
    meaning = None if count is None else unstored or source.unstored or source.usual
    stored = grid.areas if count is None else np.ceil(count * grid.areas / grid.cells).astype(int)
    observed = stored if meaning == "missing" else grid.areas
    rows, cols = (
        np.broadcast_to(np.int64(observed.sum() // side.size), side.size) for side in grid.sides
    )
    statistics = Statistics(
        observed, rows, cols, float(stored.sum()), 0.0, 1.0, True, "", stored, kind=weighting
    )
    info = DataInfo(grid, Labels(), statistics, source.info, kind, Layout(meaning))
    size = int(block_bytes(grid, kind, None if count is None else stored).sum())
    fits = size * (1 if weighting is None else 2) <= memory_budget(memory_limit)
    storage = Storage(grid, meaning, file=None if fits else ArrayFile())
    weights = None if weighting is None else BlockedData(info, storage)
    return BlockedData(info, storage, weights)


def _stored(store: BlockStore, dtype: FloatType, limit: int, allow_empty: bool) -> BlockedData:
    """Return the blocks of a store, read on demand and cached as far as memory allows."""
    data = open_store(store, dtype, limit)
    largest = max(abs(data.minimum), abs(data.maximum))
    if largest > np.finfo(dtype).max:
        raise DataError(
            f"the store at {store.location} has entries up to {largest:g} in size, outside the "
            f'range of {dtype}; pass as_blocks(V, dtype="float64"), or rescale the data'
        )
    refuse_unobserved(data.known, allow_empty)
    return data


def _dense(
    source: Source,
    grid: Grid,
    kind: FloatType,
    limit: int,
    allow_empty: bool,
    cells: CellWeights | None = None,
) -> BlockedData:
    """Return the blocks of a dense matrix, and the weights of its cells, which are read first."""
    weights = weighing = None
    if cells is not None:
        opened = cells.open(source)
        if opened.is_sparse or opened.read is None:
            raise OptionError(
                f"{cells.kind} of a dense matrix must be dense, too, because every cell has one, "
                f"got {input_name(cells.values)}"
            )
        read = opened.read
        weights = _dense(as_weights(opened, cells.rule, kind), grid, kind, limit, True)
        weighing = cells.refuse(
            source, kind, lambda row, col: read(slice(row, row + 1), slice(col, col + 1))
        )
        # Missing cells are marked in a copy, never in the caller's array.
        source = replace(source, array=None) if weights.minimum == 0 else source
    storage, budget = _storage(source, grid, kind, limit), read_budget(limit)
    rest = storage, budget, allow_empty, weights, weighing
    return filled(storage, lambda: load(source, grid, kind, *rest), lambda: weights)


def _serves(
    store: BlockStore | None, blocks: int | Grid | None, unstored: str | None, balance: bool
) -> bool:
    """Return whether there is a store whose blocks can be used unchanged."""
    if store is None:
        return False
    grid, layout = store.known.grid, store.known.layout
    fits = blocks is None or blocks in (grid, grid.blocks)
    ordered = not balance or layout.row_order is not None
    return fits and ordered and unstored in (None, layout.unstored)


def _check_blocks(
    data: BlockedData,
    blocks: int | Grid | None,
    unstored: str | None,
    balance: bool,
    cells: CellWeights | None,
) -> BlockedData:
    if cells is not None:
        raise OptionError(
            f"{cells.kind} cannot be added to blocks; pass it to as_blocks with the matrix that "
            f"these were made from: as_blocks(V, {cells.kind}=...)"
        )
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
    if data.is_sparse and balance and not data.is_balanced:
        raise OptionError(
            "these data were made without balance=True; leave it out, or call as_blocks on the "
            "original data"
        )
    return data


def _storage(source: Source, grid: Grid, dtype: FloatType, limit: int) -> Storage:
    size, working = (
        grid.cells * dtype.itemsize,
        working_bytes(source, grid, dtype, read_budget(limit)),
    )
    borrowed = source.array is not None and zero_copy(source.array, dtype)
    if borrowed or size + working <= limit:
        return Storage(grid)
    if working > max(OVERESTIMATE * available_memory(), NEGLIGIBLE):
        raise DataError(
            f"one block and the chunks it is read from need {working} bytes, far more than is "
            f"free; rewrite {source.where} with smaller chunks"
        )
    if working > max(limit, NEGLIGIBLE):
        warn(
            f"memory_limit allows {limit} bytes, but one block and the chunks it is read from "
            f"need {working}; going on with more; smaller chunks or more blocks (now "
            f"{grid.blocks}) need less",
            DataWarning,
        )
    return Storage(grid, file=ArrayFile(reserve=size))
