"""`convert`: any table or file of a sparse matrix becomes a blocked store."""

import time
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from daskfactor.checks import warn, whole_number
from daskfactor.data.files import open_sparse
from daskfactor.data.grid import Grid
from daskfactor.data.sources import checked_options
from daskfactor.data.sparse import LoadOptions, Task, meaning_of_unstored
from daskfactor.data.sparse_source import SparseSource
from daskfactor.data.store_writer import StoreWriter, check_compression, writing_errors
from daskfactor.data.tables import Column, Wanted
from daskfactor.errors import DataWarning, OptionError
from daskfactor.machine import memory_budget
from daskfactor.progress import progress_bar


@dataclass(frozen=True)
class Conversion:
    """What a conversion made.

    Attributes
    ----------
    location
        Where the store is.
    shape
        (I, J).
    n_read, n_stored
        Entries of the source; entries stored, with duplicates merged and without those that
        say nothing (zeros or NaN, whichever is not stored).
    n_duplicates
        Entries that named a cell again.
    blocks
        B; the store holds B x B blocks.
    imbalance
        Entries of the largest block over the mean; 1 is even.
    unstored, dtype, balanced
        As they were asked for or chosen.
    nbytes
        Size of the store.
    seconds
        Time it took.
    """

    location: str
    shape: tuple[int, int]
    n_read: int
    n_stored: int
    n_duplicates: int
    blocks: int
    imbalance: float
    unstored: str
    dtype: str
    balanced: bool
    nbytes: int
    seconds: float

    @property
    def entries_per_second(self) -> float:
        """Entries read per second."""
        return self.n_read / self.seconds


def convert(
    source: Any,
    store: str | PathLike[str],
    *,
    rows: Column | None = None,
    columns: Column | None = None,
    values: Column | bool | None = None,
    header: bool | None = None,
    layer: str | None = None,
    shape: tuple[int, int] | None = None,
    unstored: str | None = None,
    blocks: int | Grid | None = None,
    balance: bool = False,
    dtype: DTypeLike = "float32",
    compression: str = "lz4",
    overwrite: bool = False,
    memory_limit: int | str | None = None,
    progressbar: bool = True,
) -> Conversion:
    """Turn a sparse matrix of any size into a blocked store that `sample` and `as_blocks` read.

    V[i, j] = value of the entry whose row key is the i-th and whose column key is the j-th

    The source is read twice, piece by piece: once for its keys and sizes, once for
    its entries, which wait block by block in memory or, beyond ``memory_limit``, in a
    scratch file (in dask's ``temporary-directory``). The store appears when it is
    whole; a conversion that fails or is interrupted leaves nothing.

    Parameters
    ----------
    source
        A table of (row key, column key, value) lines: ``.csv``, ``.tsv``, ``.txt`` or
        ``.dat``, with or without header, plain, ``.gz``, ``.bz2`` or ``.zst``; or ``.parquet``, one
        file or a folder. Or a matrix: Matrix Market (``.mtx``, ``.mtx.gz``), ``.npz`` of
        scipy or with arrays row, col, data, AnnData (``.h5ad``). Or an object in memory
        that `as_blocks` takes as sparse, or a blocked store. Files may be URLs (fsspec).
    store
        Path or URL of the store to make.
    rows, columns, values
        Columns of a table, by name or by position from 0; by default the first, the second
        and the third. ``values=False`` counts lines, and so does a table of two columns.
        Of an ``.npz`` file, names of arrays.
    header
        Whether the first line of a CSV file holds names; by default it does if there is
        no number in it where one is needed.
    layer
        Layer of an AnnData file instead of X.
    shape
        (I, J): keys are positions from 0, and rows and columns without entries stay. By
        default keys are names: rows and columns are those that occur, in ascending order
        (numbers by size, texts by code point), and the keys become labels.
    unstored : {None, "zero", "missing"}
        What a cell without entry means: an observed zero, as in counts, or missing, as in
        ratings. By default what the source says, else zero, with a warning.
    blocks
        B, the number of row bands and of column bands; chosen from the number of entries.
    balance
        Permute rows and columns so that blocks hold about equally many entries. Results
        come in the caller's order all the same.
    dtype : {"float32", "float64"}
        Type of the values.
    compression : {"lz4", "zstd", "none"}
        Fast and about half the size; slower and smaller; fastest where disks are fast.
    overwrite
        Whether a blocked store that is there already may be replaced. Nothing else ever is.
    memory_limit
        Bytes, or a text such as ``"4 GiB"``; default: half of the memory that is free.
    progressbar
        Whether to show progress on standard error.

    Returns
    -------
    Conversion
        Sizes, balance and speed.

    Raises
    ------
    DataError
        The source is not what it should be, has keys or values that cannot be used, or lacks
        a column.
    OptionError
        An argument outside what is allowed.
    StoreError
        Something that may not be replaced is there, or something cannot be read or written.

    Notes
    -----
    Of entries that name one cell more than once, the values are added up if unstored means
    zero; if it means missing, the last one of a file stays, with a warning, and a matrix in
    memory is refused. Stored zeros are dropped where unstored means zero. NaN and empty values
    are missing cells.
    """
    begun = time.perf_counter()
    kind = checked_options(dtype, unstored)
    check_compression(compression)
    limit = memory_budget(memory_limit)
    writer = StoreWriter(str(store), overwrite=overwrite)
    wanted = Wanted(rows, columns, values, header)
    entries = _with_shape(open_sparse(source, wanted, layer), shape)
    zeros = meaning_of_unstored(entries, unstored) == "zero"
    options = LoadOptions(
        blocks, kind, zeros, limit, balance=balance, allow_empty=True, exact=False
    )
    with writing_errors(writer.location), progress_bar(progressbar) as on_event:
        task = Task(entries, options, on_event)
        try:
            task.read_keys()
            task.read_entries()
            writer.begin(task.grid, task.counts, kind, compression, task.kept_shares())
            statistics = task.assemble(writer.put)
            if task.doubles and not zeros:
                warn(
                    f"{task.doubles} entries name a cell that was named before; the last value of "
                    'each cell was kept (with unstored="zero" they would be added up)',
                    DataWarning,
                )
            writer.finish(statistics, task.labels, task.layout)
        except BaseException:
            writer.abort()
            raise
        finally:
            task.close()
    stored = statistics.n_stored
    assert stored is not None
    return Conversion(
        location=writer.location,
        shape=task.grid.shape,
        n_read=task.entries,
        n_stored=int(stored.sum()),
        n_duplicates=task.doubles,
        blocks=task.grid.blocks,
        imbalance=float(stored.max() / stored.mean()) if stored.any() else 1.0,
        unstored=task.layout.unstored,
        dtype=str(kind),
        balanced=balance,
        nbytes=writer.nbytes(),
        seconds=time.perf_counter() - begun,
    )


def _with_shape(source: SparseSource, shape: tuple[int, int] | None) -> SparseSource:
    if shape is None:
        return source
    if np.shape(shape) != (2,):
        raise OptionError(f"shape must be two whole numbers (rows, columns), got {shape!r}")
    height, width = shape
    sides = (whole_number("shape", height, 1), whole_number("shape", width, 1))
    if source.shape not in (None, sides):
        raise OptionError(
            f"shape is {sides}, but the source says that it is {source.shape}; leave shape out: it "
            "is for tables whose keys are positions"
        )
    return replace(source, shape=sides)
