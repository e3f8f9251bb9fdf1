"""Sparse inputs seen as one stream of entries: (row, column, value), in pieces.

A matrix is copied before the pass only if it has duplicates, or a format that may
have them: the grid and the balance of blocks follow from the number of entries,
which must not depend on how a matrix is written down.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.data.decode import check_dtype, check_shape, matrix_shape
from daskfactor.data.grid import Chunks
from daskfactor.data.labels import Labels, SourceInfo
from daskfactor.errors import DataError

IntArray = NDArray[np.integer[Any]]

PIECE = 2**20
"""Entries that are handled together."""

DENSE_PART = 2**24
LEAST_LINES = 256
"""Rows of a file that are read together: so many, or as many as hold so many cells."""


class Piece(NamedTuple):
    """Some entries of a matrix; all that lie above row ``done`` have come with this piece."""

    rows: IntArray
    cols: IntArray
    values: NDArray[Any]
    done: int = 0


@dataclass(frozen=True)
class SparseSource:
    """A matrix of which only some entries are stored.

    ``unstored`` is what the input itself says about the others, or None;
    ``pieces`` starts the stream anew at every call; called with False it refuses entries
    that name a cell again rather than adding them up.
    """

    shape: tuple[int, int]
    dtype: np.dtype[Any]
    labels: Labels
    info: SourceInfo
    pieces: Callable[..., Iterator[Piece]]
    unstored: str | None = None
    chunks: Chunks | None = None


def from_scipy(matrix: Any) -> SparseSource:
    """A scipy sparse matrix or array of any format."""
    shape = matrix_shape(matrix.shape)
    check_dtype(matrix.dtype)
    once = cache(lambda add: canonical(matrix, add))
    return SparseSource(
        shape,
        matrix.dtype,
        Labels(),
        SourceInfo("scipy"),
        lambda add=True: _compressed(once(add)),
    )


def from_pydata(array: Any) -> SparseSource:
    """A two-dimensional array of the sparse package: COO, GCXS or DOK."""
    shape = matrix_shape(array.shape)
    check_dtype(array.dtype)
    return SparseSource(
        shape,
        array.dtype,
        Labels(),
        SourceInfo("sparse"),
        lambda add=True: pydata_pieces(array),
        meaning_of_fill(array.fill_value),
    )


def from_sparse_dask(array: Any, shape: tuple[int, int]) -> SparseSource:
    """A dask array whose chunks are sparse, computed one chunk after another."""
    meta = array._meta
    fill = meaning_of_fill(meta.fill_value) if is_pydata_sparse(meta) else None
    sizes = [tuple(int(size) for size in side) for side in array.chunks]
    rows, cols = (tuple(size for size in side if size) for side in sizes)
    return SparseSource(
        shape,
        array.dtype,
        Labels(),
        SourceInfo("dask", lazy=True),
        lambda add=True: _dask_pieces(array, sizes, fill, add),
        fill,
        (rows, cols),
    )


def from_backed(dataset: Any) -> SparseSource:
    """A sparse dataset of AnnData that is left in its file: read a few rows at a time."""
    shape = matrix_shape(dataset.shape)
    check_dtype(dataset.dtype)
    return SparseSource(
        shape,
        dataset.dtype,
        Labels(),
        SourceInfo("anndata", lazy=True),
        lambda add=True: _backed_pieces(dataset, shape, add),
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


def sparse_pieces(data: Any, add: bool = True) -> Iterator[Piece]:
    """The entries of a sparse matrix of either kind."""
    return scipy_pieces(data, add) if is_scipy_sparse(data) else pydata_pieces(data)


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


def scipy_pieces(matrix: Any, add: bool = True) -> Iterator[Piece]:
    """The stored entries of a scipy matrix, duplicates summed, explicit zeros among them."""
    return _compressed(canonical(matrix, add))


def pydata_pieces(array: Any) -> Iterator[Piece]:
    """The stored entries of an array of the sparse package."""
    coo = array if type(array).__name__ == "COO" else array.asformat("coo")
    rows, cols = coo.coords
    return _coordinates(rows, cols, coo.data, coo.shape)


def _dask_pieces(
    array: Any, sizes: list[tuple[int, ...]], fill: str | None, add: bool
) -> Iterator[Piece]:
    row0 = 0
    for i, height in enumerate(sizes[0]):
        col0 = 0
        for j, width in enumerate(sizes[1]):
            if height and width:
                chunk = array.blocks[i, j].compute()
                check_shape(chunk, (height, width), row0, col0)
                last = j == len(sizes[1]) - 1
                yield from _moved(_chunk_pieces(chunk, fill, add), row0, col0)
                if last:
                    yield _nothing(array.dtype, row0 + height)
            col0 += width
        row0 += height


def _chunk_pieces(chunk: Any, fill: str | None, add: bool) -> Iterator[Piece]:
    if is_pydata_sparse(chunk) and meaning_of_fill(chunk.fill_value) != fill:
        raise DataError(
            f"a chunk of the dask array has fill_value {chunk.fill_value}, unlike the array "
            "itself; give all chunks one fill_value"
        )
    if is_sparse(chunk):
        return sparse_pieces(chunk, add)
    # Operations on sparse chunks may give dense ones.
    dense = np.asarray(chunk)
    rows, cols = np.indices(dense.shape).reshape(2, -1)
    return _coordinates(rows, cols, dense.ravel(), chunk.shape)


def _backed_pieces(dataset: Any, shape: tuple[int, int], add: bool) -> Iterator[Piece]:
    by_rows = dataset.format == "csr"
    length, width = shape if by_rows else shape[::-1]
    step = max(LEAST_LINES, DENSE_PART // width)
    for start in range(0, length, step):
        part = slice(start, min(length, start + step))
        if by_rows:
            yield from _moved(scipy_pieces(dataset[part], add), start, 0)
            yield _nothing(dataset.dtype, part.stop)
        else:
            yield from _moved(scipy_pieces(dataset[:, part], add), 0, start)


def _moved(pieces: Iterator[Piece], row0: int, col0: int) -> Iterator[Piece]:
    for piece in pieces:
        yield Piece(_shifted(piece.rows, row0), _shifted(piece.cols, col0), piece.values)


def _shifted(index: IntArray, by: int) -> IntArray:
    return index + np.int64(by) if by else index


def _nothing(dtype: Any, done: int) -> Piece:
    """No entries, but word that all above a row have come."""
    return Piece(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, dtype), done)


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


def _compressed(matrix: Any) -> Iterator[Piece]:
    """Whole rows of a CSR matrix, or whole columns of a CSC matrix, together at a time."""
    pointers, indices, values = matrix.indptr, matrix.indices, matrix.data
    by_rows = matrix.format == "csr"
    length = matrix.shape[0 if by_rows else 1]
    start = 0
    while start < length:
        stop = int(np.searchsorted(pointers, int(pointers[start]) + PIECE, side="right")) - 1
        stop = min(length, max(stop, start + 1))
        part = slice(int(pointers[start]), int(pointers[stop]))
        counts = np.diff(pointers[start : stop + 1])
        long = np.repeat(np.arange(start, stop, dtype=_index_type(length)), counts)
        if by_rows:
            yield Piece(long, indices[part], values[part], stop)
        else:
            yield Piece(indices[part], long, values[part])
        start = stop


def _coordinates(
    rows: IntArray, cols: IntArray, values: NDArray[Any], shape: tuple[int, int]
) -> Iterator[Piece]:
    _check_indices(rows, shape[0], "row")
    _check_indices(cols, shape[1], "column")
    for start in range(0, len(values), PIECE):
        part = slice(start, start + PIECE)
        yield Piece(rows[part], cols[part], values[part])


def _index_type(size: int) -> type[np.integer[Any]]:
    return np.int32 if size < 2**31 else np.int64


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
