"""Sparse inputs as one stream of entries, in pieces: (row, column, value).

The grid and the balance of blocks follow from the number of entries, which must not depend
on how a matrix is written down: duplicates in a matrix are merged before anything else.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.data.decode import check_dtype, check_shape, matrix_shape
from daskfactor.data.grid import Block, Chunks
from daskfactor.data.keys import Keys
from daskfactor.data.labels import Labels, SourceInfo
from daskfactor.errors import DataError

IntArray = NDArray[np.integer[Any]]

FLOAT = np.dtype(np.float64)
PIECE = 2**19
"""Entries that are handled together: 25 MB or so on their way through."""

DENSE_PART = 2**24
LEAST_LINES = 256
"""Rows of a file that are read together: so many, or as many as hold so many cells."""


class Piece(NamedTuple):
    """Some entries; ``values`` is None where only the keys were asked for."""

    rows: Keys
    cols: Keys
    values: NDArray[Any] | None


class KeysAreText(Exception):  # noqa: N818 - a message between two modules, never shown
    """A key that is no whole number was met after others that were."""


@dataclass(frozen=True)
class SparseSource:
    """Something that yields the same entries in the same order as often as it is asked.

    Attributes
    ----------
    info
        What it is and where.
    pieces
        Starts the stream: ``pieces(values, add)``. Without ``values`` only keys are needed;
        without ``add`` a matrix refuses entries that name a cell again rather than adding
        them up.
    shape
        (I, J) if keys are positions; None if they are names to be learnt.
    labels
        Labels of rows and columns, or, where they are learnt, the names of the dimensions.
    entries
        How many entries there are, if that is known before they are read.
    unstored
        What the source itself says about entries that it does not store.
    chunks
        Lengths of its chunks of rows and of columns, if it has any.
    as_text
        Called when keys that looked like numbers turn out not to be; the source then
        gives texts. None where that cannot happen.
    matrix
        Of a source in memory: called with ``add``, all of it as compressed rows.
    dtype
        Type of its values, where that is known.
    """

    info: SourceInfo
    pieces: Callable[[bool, bool], Iterator[Piece]]
    shape: tuple[int, int] | None = None
    labels: Labels = field(default_factory=Labels)
    entries: int | None = None
    unstored: str | None = None
    chunks: Chunks | None = None
    as_text: Callable[[], None] | None = None
    matrix: Callable[[bool], Any] | None = None
    dtype: np.dtype[Any] = FLOAT


def from_scipy(matrix: Any) -> SparseSource:
    """A scipy sparse matrix or array of any format."""
    shape = matrix_shape(matrix.shape)
    check_dtype(matrix.dtype)
    return SparseSource(
        SourceInfo("scipy"),
        lambda values, add: compressed_pieces(canonical(matrix, add)),
        shape,
        matrix=lambda add: _by_rows(canonical(matrix, add)),
        dtype=matrix.dtype,
    )


def from_pydata(array: Any) -> SparseSource:
    """A two-dimensional array of the sparse package: COO, GCXS or DOK."""
    shape = matrix_shape(array.shape)
    check_dtype(array.dtype)
    return SparseSource(
        SourceInfo("sparse"),
        lambda values, add: compressed_pieces(canonical(_scipy_of(array), add)),
        shape,
        unstored=meaning_of_fill(array.fill_value),
        matrix=lambda add: _by_rows(canonical(_scipy_of(array), add)),
        dtype=array.dtype,
    )


def from_sparse_dask(array: Any, shape: tuple[int, int]) -> SparseSource:
    """A dask array whose chunks are sparse, computed one chunk after another."""
    meta = array._meta
    fill = meaning_of_fill(meta.fill_value) if is_pydata_sparse(meta) else None
    sizes = [tuple(int(size) for size in side) for side in array.chunks]
    rows, cols = (tuple(size for size in side if size) for side in sizes)
    return SparseSource(
        SourceInfo("dask", lazy=True),
        lambda values, add: _dask_pieces(array, sizes, fill, add),
        shape,
        unstored=fill,
        chunks=(rows, cols),
        dtype=array.dtype,
    )


def from_backed(dataset: Any) -> SparseSource:
    """A sparse dataset of AnnData that is left in its file: read a few rows at a time."""
    shape = matrix_shape(dataset.shape)
    check_dtype(dataset.dtype)
    return SparseSource(
        SourceInfo("anndata", lazy=True),
        lambda values, add: backed_pieces(dataset, shape, add),
        shape,
        dtype=dataset.dtype,
    )


def from_blocks(blocked: Any, view: Callable[[int, int], Any]) -> SparseSource:
    """The entries of a blocked store, or of sparse `BlockedData`, in the caller's order."""
    ordered = blocked.row_order is not None

    def pieces(values: bool, add: bool) -> Iterator[Piece]:
        for block in blocked.grid.all_blocks():
            found = view(*block)
            rows, cols = (part.start for part in blocked.grid.slices(Block(*block)))
            row = np.repeat(np.arange(found.m), np.diff(found.indptr)) + rows
            col = found.indices + np.int64(cols)
            if ordered:
                row, col = blocked.row_order[row], blocked.col_order[col]
            yield Piece(row, col, found.values.copy() if values else None)

    grid = blocked.grid
    location = getattr(blocked, "location", None) or getattr(blocked, "source", None)
    return SparseSource(
        SourceInfo("blocks", getattr(location, "location", location), lazy=True),
        pieces,
        grid.shape,
        blocked.labels,
        int(blocked.n_stored.sum()),
        blocked.unstored,
        None if ordered else (grid.rows.sizes, grid.cols.sizes),
    )


def is_scipy_sparse(data: object) -> bool:
    """Whether an object is one of scipy's sparse matrices or arrays."""
    return bool(sparse.issparse(data))


def is_pydata_sparse(data: object) -> bool:
    """Whether an object is an array of the sparse package."""
    package = sys.modules.get("sparse")
    return package is not None and isinstance(data, package.SparseArray)


def is_sparse(data: object) -> bool:
    """Whether an object is a sparse matrix of either kind."""
    return is_scipy_sparse(data) or is_pydata_sparse(data)


def meaning_of_fill(fill: Any) -> str:
    """What an array with this fill value says about entries that it does not store."""
    if fill == 0:
        return "zero"
    if np.isnan(fill):
        return "missing"
    raise DataError(
        f"the sparse array has fill_value {fill}; it must be 0 (entries that are not stored are "
        "zeros) or NaN (they are missing); make a new array with one of these"
    )


def compressed_pieces(matrix: Any, row0: int = 0, col0: int = 0) -> Iterator[Piece]:
    """Compressed rows or columns, wherever their arrays lie, piece by piece."""
    pointers, total = matrix.indptr, int(matrix.indptr[-1])
    for start in range(int(pointers[0]), total, PIECE):
        stop = min(start + PIECE, total)
        first = int(np.searchsorted(pointers, start, side="right")) - 1
        last = int(np.searchsorted(pointers, stop, side="left"))
        edges = np.clip(pointers[first : last + 1].astype(np.int64), start, stop)
        major = np.repeat(np.arange(first, last, dtype=np.int64), np.diff(edges))
        minor = np.asarray(matrix.indices[start:stop]).astype(np.int64)
        rows, cols = (major, minor) if matrix.format == "csr" else (minor, major)
        yield Piece(rows + row0, cols + col0, np.asarray(matrix.data[start:stop]))


def coordinate_pieces(
    rows: NDArray[Any], cols: NDArray[Any], data: NDArray[Any]
) -> Iterator[Piece]:
    """Three arrays of the same length, piece by piece."""
    for start in range(0, data.size, PIECE):
        part = slice(start, start + PIECE)
        yield Piece(rows[part].astype(np.int64), cols[part].astype(np.int64), data[part])


def _dask_pieces(
    array: Any, sizes: list[tuple[int, ...]], fill: str | None, add: bool
) -> Iterator[Piece]:
    origins = [np.concatenate([[0], np.cumsum(side)]) for side in sizes]
    for i, j in np.ndindex(*map(len, sizes)):
        row0, col0 = int(origins[0][i]), int(origins[1][j])
        shape = sizes[0][i], sizes[1][j]
        if 0 in shape:
            continue
        chunk = array.blocks[i, j].compute()
        check_shape(chunk, shape, row0, col0)
        if is_pydata_sparse(chunk):
            if meaning_of_fill(chunk.fill_value) != fill:
                raise DataError(
                    f"a chunk of the dask array has fill_value {chunk.fill_value}, unlike the "
                    "array itself; give all chunks one fill_value"
                )
            chunk = _scipy_of(chunk)
        elif not is_scipy_sparse(chunk):  # operations on sparse chunks may give dense ones
            rows, cols = np.indices(shape).reshape(2, -1)
            pairs = (rows, cols)
            chunk = sparse.coo_array((np.asarray(chunk).ravel(), pairs), shape=shape)
        yield from compressed_pieces(canonical(chunk, add), row0, col0)


def backed_pieces(dataset: Any, shape: tuple[int, int], add: bool | None = None) -> Iterator[Piece]:
    """A sparse dataset in a file, some rows or columns at a time; None leaves duplicates."""
    by_rows = dataset.format == "csr"
    length, width = shape if by_rows else shape[::-1]
    step = max(LEAST_LINES, DENSE_PART // width)
    for start in range(0, length, step):
        part = slice(start, min(length, start + step))
        found = dataset[part] if by_rows else dataset[:, part]
        found = found if add is None else canonical(found, add)
        yield from compressed_pieces(found, *((start, 0) if by_rows else (0, start)))


def _scipy_of(array: Any) -> Any:
    """An array of the sparse package as coordinates; what it does not store is left open."""
    coo = array if type(array).__name__ == "COO" else array.asformat("coo")
    values = summable(coo.data) if coo.data.dtype == np.float16 else coo.data
    return sparse.coo_array((values, tuple(coo.coords)), shape=coo.shape)


def _by_rows(matrix: Any) -> Any:
    """Compressed rows with values of a type that scipy can cut."""
    plain = summable(matrix.data) if matrix.dtype == np.float16 else matrix.data
    plain = plain.astype(plain.dtype.newbyteorder("="), copy=False)
    kind = sparse.csr_array if matrix.format == "csr" else sparse.csc_array
    return kind((plain, matrix.indices, matrix.indptr), shape=matrix.shape).tocsr()


def canonical(matrix: Any, add: bool = True) -> Any:
    """Compressed rows or columns without duplicates: the matrix itself if it is that already.

    Diagonals (dia) and small dense blocks (bsr) are padded with zeros that nobody
    stored on purpose, so theirs are left out.

    Raises
    ------
    DataError
        If the matrix is damaged, or has duplicates and they may not be added up.
    """
    found: Any
    if matrix.format == "coo":
        _check_indices(matrix.row, matrix.shape[0], "row")
        _check_indices(matrix.col, matrix.shape[1], "column")
        pairs = (matrix.row, matrix.col)
        found = sparse.coo_array((summable(matrix.data), pairs), shape=matrix.shape).tocsr()
        return _unless_doubled(found, matrix.data.size, add)
    if matrix.format not in ("csr", "csc"):
        found = matrix.tocsr()
        if matrix.format in ("bsr", "dia"):
            found.eliminate_zeros()
        return found
    by_rows = matrix.format == "csr"
    length, width = matrix.shape if by_rows else matrix.shape[::-1]
    parts = matrix.data, matrix.indices, matrix.indptr
    _check_pointers(matrix.indptr, matrix.indices, matrix.data, length)
    _check_indices(matrix.indices, width, "column" if by_rows else "row")
    kind = sparse.csr_array if by_rows else sparse.csc_array
    found = kind(parts, shape=matrix.shape)  # shares the arrays, but not what was noted about them
    if not found.has_canonical_format:
        found = kind((summable(parts[0]), *parts[1:]), shape=matrix.shape, copy=True)
        stored = found.nnz
        found.sum_duplicates()
        return _unless_doubled(found, stored, add)
    return found


def _unless_doubled(found: Any, stored: int, add: bool) -> Any:
    if not add and found.nnz < stored:
        raise doubled(stored - found.nnz)
    return found


def doubled(count: int) -> DataError:
    """The error for entries that name a cell again where a cell has one value."""
    return DataError(
        f"{count} entries name a cell that another entry names already, but with "
        'unstored="missing" (ratings, for example) a cell has one value; keep one of each, or add '
        "them up yourself first, for example with the matrix's sum_duplicates(); counts, which "
        'add up by themselves, go with unstored="zero"'
    )


def summable(values: NDArray[Any]) -> NDArray[Any]:
    """Values in a type in which duplicates can be summed and that scipy knows."""
    if values.dtype.kind in "bi" or (values.dtype.kind == "u" and values.dtype.itemsize < 8):
        return values.astype(np.int64, copy=False)
    if values.dtype == np.float16:
        return values.astype(np.float32)
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _check_pointers(
    pointers: IntArray, indices: IntArray, values: NDArray[Any], length: int
) -> None:
    """What makes compressed rows readable at all; matrices made by hand may lack it."""
    wrong = ""
    if pointers.shape != (length + 1,) or pointers[0] != 0:
        wrong = f"indptr must have {length + 1} entries, the first of them 0"
    elif (np.diff(pointers) < 0).any():
        wrong = f"indptr falls after position {int(np.argmax(np.diff(pointers) < 0))}"
    elif not pointers[-1] <= min(len(indices), len(values)):
        wrong = (
            f"indptr ends at {pointers[-1]}, with {len(indices)} indices and {len(values)} values"
        )
    if wrong:
        raise DataError(f"the sparse matrix is damaged: {wrong}; make it anew from its entries")


def _check_indices(indices: IntArray, size: int, side: str) -> None:
    if len(indices) == 0:
        return
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= size:
        raise DataError(
            f"the sparse matrix is damaged: its {side} indices go from {low} to {high}, but it "
            f"has {size} {side}s; make it anew from its entries"
        )
