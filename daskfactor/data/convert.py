"""`convert` any table or file of a sparse matrix to a blocked store; `export` it to a file."""

import contextlib
import gzip
import time
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import DTypeLike, NDArray

from daskfactor.checks import require, whole_number
from daskfactor.data.adapters import Source
from daskfactor.data.blocks import BlockedData, open_store
from daskfactor.data.grid import Grid
from daskfactor.data.labels import Labels
from daskfactor.data.matrix_market import label_file
from daskfactor.data.opening import open_source
from daskfactor.data.sources import checked_options
from daskfactor.data.sparse import LoadOptions, SparseLoader, meaning_of_unstored
from daskfactor.data.store import BlockStore, StoreWriter, writing_errors
from daskfactor.data.tables import ReadOptions
from daskfactor.errors import DataError, OptionError, StoreError
from daskfactor.machine import memory_budget
from daskfactor.options import Reading, verb
from daskfactor.progress import progress_bar
from daskfactor.publish import Publication, check_free


@dataclass(frozen=True)
class Conversion:
    """Summary of a conversion.

    Attributes
    ----------
    location
        Path or URL of the store.
    shape
        (I, J).
    n_read, n_stored
        Entries of the source; entries stored, with duplicates merged and without zeros
        or NaN, whichever is not stored.
    n_duplicates
        Entries of cells that had an entry already.
    blocks
        B; the store holds B x B blocks.
    imbalance
        Entries of the largest block over the mean; 1 is even.
    unstored, dtype, balanced
        Meaning of unstored entries, dtype of the values, and whether the grid is balanced.
    nbytes
        Size of the store.
    seconds
        Duration.
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
        """Return the entries read per second."""
        return self.n_read / self.seconds


@verb
def convert(
    source: Any,
    store: str | PathLike[str],
    *,
    shape: tuple[int, int] | None = None,
    blocks: int | Grid | None = None,
    balance: bool = False,
    dtype: DTypeLike = "float32",
    compression: str = "lz4",
    overwrite: bool = False,
    memory_limit: int | str | None = None,
    progressbar: bool = True,
    **reading: Unpack[Reading],
) -> Conversion:
    """Turn a sparse matrix of any size into a blocked store that `sample` and `as_blocks` read.

    V[i, j] = value of the entry whose row key is the i-th and whose column key is the j-th

    The source is read twice, piece by piece: once for its keys and sizes, once for
    its entries, which wait block by block in memory or, beyond ``memory_limit``, in a
    scratch file (in dask's ``temporary-directory``). The store appears when it is
    complete; a conversion that fails or is interrupted leaves nothing.

    Parameters
    ----------
    source
        A table of (row key, column key, value) lines: ``.csv``, ``.tsv``, ``.txt`` or
        ``.dat``, with or without header, plain, ``.gz``, ``.bz2`` or ``.zst``; or ``.parquet``, one
        file or a folder. Or a matrix: Matrix Market (``.mtx``, ``.mtx.gz``), ``.npz`` of
        scipy or with arrays row, col, data, AnnData (``.h5ad`` or ``.zarr``). Or an object in
        memory that `as_blocks` takes as sparse, or a blocked store. Files may be URLs (fsspec).
    store
        Path or URL of the store to make.
    rows, columns, values
        Columns of a table, by name or by position from 0; by default the first, the second
        and the third. ``values=False`` counts lines, and so does a table of two columns.
        Of an ``.npz`` file, names of arrays.
    header
        Take the first line of a CSV file as names of columns; by default if it has no
        number where one is needed.
    table, storage_options
        As for `as_blocks`.
    layer, mask_var
        Layer of an AnnData in place of X, and selection of variables; as for `as_blocks`.
    shape
        Numbers of rows and of columns: keys are then positions from 0, not names,
        and rows and columns without entries are kept. By default keys are names: rows and columns
        are those that occur, in ascending order (numbers by size, texts by code point), and the
        keys become labels.
    unstored : {None, "zero", "missing"}
        Meaning of a cell without entry: an observed zero, as in counts, or missing, as in
        ratings. By default the source decides, else zero, with a warning.
    blocks
        B, the number of row bands and of column bands; chosen from the number of entries.
    balance
        Permute rows and columns internally so that blocks hold similar numbers of entries;
        results keep your order.
    dtype : {"float32", "float64"}
        Data type of the values.
    compression : {"lz4", "zstd", "none"}
        Compression of the blocks: ``"lz4"`` is fast and halves the size, ``"zstd"`` is smaller
        and slower, ``"none"`` is fastest on fast disks.
    overwrite
        Replace an existing blocked store, once the new one is complete. Nothing else is ever
        replaced.
    memory_limit
        Memory to use, in bytes or as a text such as ``"4 GiB"``; by default half of the free
        memory.
    progressbar
        Show progress on standard error.

    Returns
    -------
    Conversion
        Sizes, balance and speed.

    Raises
    ------
    DataError
        The source is invalid, has keys or values that cannot be used, or lacks a column.
    OptionError
        An argument outside what is allowed.
    StoreError
        The store exists and may not be replaced, or source or store cannot be read or written.

    Notes
    -----
    Of entries that name one cell more than once, the values are added up if unstored means
    zero; if it means missing, the last one of a file stays, with a warning, and a matrix in
    memory is refused. Stored zeros are dropped where unstored means zero. NaN and empty values
    are missing cells.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> from tempfile import mkdtemp
    >>> from scipy import sparse
    >>> V = sparse.csr_array(np.random.default_rng(0).poisson(0.1, (300, 200)))
    >>> store = mkdtemp() + "/ratings.zarr"
    >>> converted = dfac.convert(V, store, unstored="missing", progressbar=False)
    >>> dfac.as_blocks(store).shape
    (300, 200)
    """
    start_time = time.perf_counter()
    unstored = reading.get("unstored")
    kind = checked_options(dtype, unstored)
    limit = memory_budget(memory_limit)
    with writing_errors(str(store)):
        writer = StoreWriter(str(store), compression, overwrite)
    with writer:
        entries = _with_shape(_sparse_source(source, ReadOptions.of(reading)), shape)
        zeros = meaning_of_unstored(entries, unstored) == "zero"
        options = LoadOptions(
            blocks, kind, zeros, limit, balance=balance, allow_empty=True, exact=False
        )
        with (
            writing_errors(writer.location),
            progress_bar(progressbar) as on_event,
            SparseLoader(entries, options, on_event) as loader,
        ):
            writer.begin(loader.grid, loader.counts, kind, loader.unmerged_share())
            info = loader.assemble(writer.put)
            writer.finish(info)
    stored = info.statistics.n_stored
    assert stored is not None
    return Conversion(
        location=writer.location,
        shape=loader.grid.shape,
        n_read=loader.entries,
        n_stored=int(stored.sum()),
        n_duplicates=loader.doubles,
        blocks=loader.grid.blocks,
        imbalance=float(stored.max() / stored.mean()) if stored.any() else 1.0,
        unstored=options.unstored,
        dtype=str(kind),
        balanced=balance,
        nbytes=writer.nbytes(),
        seconds=time.perf_counter() - start_time,
    )


def _sparse_source(source: Any, options: ReadOptions) -> Source:
    """Return the entries of a file or of a sparse matrix; tables have a line for each entry."""
    opened = open_source(source, options, as_table=True)
    if not opened.is_sparse:
        raise DataError(
            f"the {opened.info.kind} input is dense, and convert is for sparse matrices; pass the "
            "data to as_blocks or sample"
        )
    return opened


def _with_shape(source: Source, shape: tuple[int, int] | None) -> Source:
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


def export(
    source: str | PathLike[str] | BlockedData,
    path: str | PathLike[str],
    *,
    overwrite: bool = False,
) -> None:
    """Write a sparse matrix to a file, in the caller's order, with its labels.

    The matrix is put together in memory as compressed rows: 8 bytes an entry, and
    for some formats as much again.

    Parameters
    ----------
    source
        Path or URL of a blocked store, or sparse `BlockedData`.
    path
        ``.npz``: what `scipy.sparse.load_npz` reads, with arrays row_labels, column_labels and
        unstored beside the matrix. ``.mtx`` or ``.mtx.gz``: Matrix Market, with labels in
        ``NAME.rows.txt`` and ``NAME.columns.txt``. ``.h5ad``: AnnData.
    overwrite
        Replace existing files, once the new ones are complete.

    Raises
    ------
    OptionError
        If the kind of file is unknown, or a library it needs is not installed.
    DataError
        If the blocks are dense.
    StoreError
        If the store cannot be read, the file cannot be written, or something is there already: of
        a Matrix Market file without labels a file, too, that would be read as its labels.

    Notes
    -----
    `convert` reads all of these back. Entries that are missing although stored are NaN.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> from tempfile import mkdtemp
    >>> from scipy import sparse
    >>> V = sparse.csr_array(np.random.default_rng(0).poisson(0.1, (30, 20)))
    >>> file = mkdtemp() + "/ratings.npz"
    >>> dfac.export(dfac.as_blocks(V, unstored="missing", allow_empty=True), file)
    >>> sparse.load_npz(file).shape
    (30, 20)
    """
    target = Path(path)
    writers = {".npz": _npz, ".mtx": _matrix_market, ".mtx.gz": _matrix_market, ".h5ad": _h5ad}
    write = next((writers[end] for end in writers if target.name.lower().endswith(end)), None)
    if write is None:
        raise OptionError(f"export writes {', '.join(writers)}, got {str(path)!r}")
    check_free(target, overwrite)
    if isinstance(source, BlockedData):
        data = source
    else:
        store = BlockStore(str(source))
        data = open_store(store, store.known.dtype, memory_budget(None))
    if not data.is_sparse:
        raise DataError("these blocks are dense; use to_numpy() and NumPy's own save")
    labels = _label_files(data, target) if write is _matrix_market else {}
    for file, text in labels.items():
        if text is None and file.exists():
            raise StoreError(f"{file} would be read as labels of {target}; move it away")
        check_free(file, overwrite)
    with writing_errors(str(target)), contextlib.ExitStack() as stack:
        publications = [stack.enter_context(Publication(target))]
        write(data, publications[0].draft)
        for file, text in labels.items():
            if text is not None:
                publications.append(stack.enter_context(Publication(file)))
                publications[-1].draft.write_text(text, encoding="utf-8")
        for publication in reversed(publications):
            publication.publish(overwrite)


def _label_files(data: BlockedData, target: Path) -> dict[Path, str | None]:
    """Return the label files of a Matrix Market file with contents; None without labels."""
    sides = zip(("rows", "columns"), _index_labels(data.labels), strict=True)
    return {
        label_file(target, side): None
        if labels is None
        else "".join(f"{label}\n" for label in labels)
        for side, labels in sides
    }


def _npz(data: BlockedData, making: Path) -> None:
    matrix, labels = data.observed_sparse(), data.labels
    arrays: dict[str, NDArray[Any]] = {
        "format": np.array(b"csr"),
        "shape": np.array(matrix.shape),
        "data": matrix.data,
        "indices": matrix.indices,
        "indptr": matrix.indptr,
        "unstored": np.array(data.unstored),
        "dims": np.array([labels.row_dim, labels.col_dim]),
    }
    sides = zip(("row_labels", "column_labels"), _index_labels(labels), strict=True)
    arrays |= {name: side for name, side in sides if side is not None}
    with making.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _matrix_market(data: BlockedData, making: Path) -> None:
    from scipy.io import mmwrite

    matrix = data.observed_sparse()
    if data.is_integer and not np.isnan(matrix.data).any():
        matrix = matrix.astype(np.int64)
    packed = making.name.lower().endswith(".gz")
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(making.open("wb"))
        if packed:
            file = stack.enter_context(gzip.GzipFile(making.name, "wb", 6, file, mtime=0))
        mmwrite(file, matrix, comment=f"entries that are not stored: {data.unstored}")


def _h5ad(data: BlockedData, making: Path) -> None:
    anndata = require("anndata", "anndata", "AnnData files")
    import pandas as pd

    frames = []
    for coords, dim, size in (
        (data.labels.row_coords, data.labels.row_dim, data.shape[0]),
        (data.labels.col_coords, data.labels.col_dim, data.shape[1]),
    ):
        index = coords.get(dim, np.arange(size))
        others = {name: column for name, column in coords.items() if name != dim}
        frames.append(pd.DataFrame(others, index=pd.Index(index.astype(str))))
    adata = anndata.AnnData(data.observed_sparse(), *frames, uns={"unstored": data.unstored})
    adata.write_h5ad(making)


def _index_labels(labels: Labels) -> list[NDArray[Any] | None]:
    """Return the labels of rows and columns, texts at fixed width, None without labels."""
    return [
        side.astype(np.str_) if side is not None and side.dtype.kind in "OT" else side
        for side in labels.index
    ]
