"""Sparse entries in pieces, with their keys, before they are in blocks.

Positions follow the order of the keys (numbers by size, texts by code point), so that they do not
depend on the order of the lines of a file.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.errors import DataError, StoreError

if TYPE_CHECKING:
    import pandas as pd

Positions = NDArray[np.int64]
IntArray = NDArray[np.integer[Any]]

PIECE = 2**19
"""Entries per piece: about 25 MB during processing."""
TABLE = 4
"""Use a lookup table for integers whose range is below this multiple of their number."""
FAR = 2**62
"""Size of keys from which differences could overflow."""
TEXTS, NUMBERS = "texts", "whole numbers"
DENSE_PART = 2**22
MIN_LINES = 16
"""Minimum number of rows of a file that are read together."""


Keys: TypeAlias = "NDArray[Any] | pd.Categorical"
"""Keys that are integers, times or booleans, or text keys as codes and categories."""


class Piece(NamedTuple):
    """Some entries: row keys, column keys and values."""

    rows: Keys
    cols: Keys
    values: NDArray[Any]


class Axis:
    """Keys of the rows or of the columns, and their positions.

    Keys are collected in a first pass, piece by piece; `finish` ends it. Then `positions` can be
    called from any thread.

    Parameters
    ----------
    side
        Name of one of them in messages.
    size
        Number of positions, if keys are positions from 0. Otherwise keys are names: integers such
        as user ids, or texts, according to the first piece.
    """

    def __init__(self, side: str, size: int | None = None) -> None:
        self._side = side
        self._size = size
        self._kind = None if size is None else NUMBERS
        self._counts = np.zeros(size or 0, np.int64)
        self._counted_keys: list[pd.Series[int]] = []
        self._index: Any = None
        self._low = 0
        self._places: Positions | None = None

    def learn(self, keys: Keys) -> None:
        """Count some keys."""
        if self._size is not None:
            np.add.at(self._counts, self.positions(keys), 1)
        elif len(keys):
            import pandas as pd  # not before keys are names

            self._kind = self._kind_of(keys)
            if isinstance(keys, np.ndarray):
                key_counts = _counted(_as_integers(keys))
            else:
                counts = np.bincount(keys.codes, minlength=len(keys.categories))
                (used,) = np.nonzero(counts)
                # Categories would be merged in their own order.
                key_counts = pd.Series(counts[used], pd.Index(keys.categories[used], dtype=object))
            self._counted_keys.append(key_counts)
            if sum(map(len, self._counted_keys[1:])) > len(self._counted_keys[0]):
                self._merge()

    def finish(self) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Return the number of entries at each position, and the labels of keys that are names."""
        if not self._counted_keys:
            return self._counts, None
        self._merge()
        (key_counts,) = self._counted_keys
        is_text, index = self._kind == TEXTS, key_counts.index
        labels = text_array(index.tolist()) if is_text else index.to_numpy()
        order = np.argsort(labels, kind="stable")
        labels, self._index = labels[order], index[order]
        if not is_text and _is_compact(labels):
            self._low, high = int(labels[0]), int(labels[-1])
            self._places = np.full(high - self._low + 3, -1)
            self._places[labels.astype(np.int64) - self._low + 1] = np.arange(labels.size)
        else:
            self._index.get_indexer(self._index[:1])  # builds its hash table before threads use it
        labels = labels if self._kind in (TEXTS, NUMBERS) else labels.astype(self._kind)
        return key_counts.to_numpy(np.int64)[order], labels

    def positions(self, keys: Keys) -> Positions:
        """Return the position of each key."""
        if self._kind_of(keys) != TEXTS:
            keys = _as_integers(keys)
        if self._size is None:
            out: Positions
            if self._places is None:
                out = self._index.get_indexer(keys).astype(np.int64, copy=False)
            else:  # the table begins and ends with -1, the place of keys beyond it
                numbers = np.asarray(keys).astype(np.int64, copy=False)
                out = self._places.take(numbers - (self._low - 1), mode="clip")
            if out.size and out.min() < 0:
                raise StoreError(
                    f"the source has a {self._side} key that was not there when it was read the "
                    "first time; it was changed meanwhile, so convert it again when nobody writes "
                    "to it"
                )
            return out
        numbers = np.asarray(keys).astype(np.int64, copy=False)
        wrong = numbers[(numbers < 0) | (numbers >= self._size)]
        if wrong.size:
            raise DataError(
                f"an entry is in {self._side} {wrong[0]}, but the matrix has "
                f"{self._side}s 0 to {self._size - 1}; correct the source, or leave "
                "out shape if these numbers are names rather than positions"
            )
        return numbers

    def _kind_of(self, keys: Keys) -> str:
        """Return the kind of keys, a dtype if they are times or booleans; refuse a mixture."""
        kind = TEXTS
        if isinstance(keys, np.ndarray):
            kind = NUMBERS if keys.dtype.kind in "iu" else str(keys.dtype)
        if self._kind not in (None, kind):
            raise DataError(
                f"the keys of {self._side}s are {self._kind} in one file and {kind} in another; "
                "write them all as one type"
            )
        return kind

    def _merge(self) -> None:
        """Sum the counts collected so far."""
        import pandas as pd

        if len(self._counted_keys) > 1:
            merged = pd.concat(self._counted_keys).groupby(level=0, sort=False).sum()
            self._counted_keys = [merged]


def _as_integers(keys: Any) -> IntArray:
    """Return keys that are no texts as integers."""
    kind = keys.dtype.kind
    integers: IntArray = keys if kind in "iu" else keys.view(np.int8 if kind == "b" else np.int64)
    return integers


def _is_compact(keys: IntArray) -> bool:
    """Return whether integers are dense enough for a lookup table over their range."""
    low, high = int(keys.min()), int(keys.max())
    return high - low < TABLE * keys.size + PIECE and max(-low, high) < FAR


def _counted(keys: IntArray) -> "pd.Series[int]":
    """Return the count of each number; counts by a table if numbers are dense."""
    import pandas as pd

    if not _is_compact(keys):
        return pd.Series(keys).value_counts(sort=False)
    low = int(keys.min())
    counts = np.bincount(keys.astype(np.int64, copy=False) - low)
    (offsets,) = np.nonzero(counts)
    return pd.Series(counts[offsets], index=(offsets + low).astype(keys.dtype))


def text_array(names: list[str]) -> NDArray[Any]:
    """Return texts as a fixed-width array, or as objects if one long text would waste memory."""
    longest = max(map(len, names), default=0)
    roomy = longest > 64 and longest * len(names) > 4 * sum(map(len, names))
    array: NDArray[Any] = np.array(names, dtype=object if roomy else np.str_)
    return array


def compressed_pieces(matrix: Any, row0: int = 0, col0: int = 0) -> Iterator[Piece]:
    """Yield the entries of compressed rows or columns, in memory or a file, in pieces."""
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
    """Yield the entries of three arrays of the same length, in pieces."""
    for start in range(0, data.size, PIECE):
        part = slice(start, start + PIECE)
        yield Piece(rows[part].astype(np.int64), cols[part].astype(np.int64), data[part])


def canonical(matrix: Any, add: bool = True) -> Any:
    """Return compressed rows or columns without duplicates; the matrix itself if possible.

    Diagonals (dia) and small dense blocks (bsr) are padded with zeros, which are dropped.

    Raises
    ------
    DataError
        If the matrix is damaged, or has duplicates and they may not be added up.
    """
    compressed_matrix: Any
    if matrix.format == "coo":
        _check_indices(matrix.row, matrix.shape[0], "row")
        _check_indices(matrix.col, matrix.shape[1], "column")
        pairs = (matrix.row, matrix.col)
        compressed_matrix = sparse.coo_array(
            (summable(matrix.data), pairs), shape=matrix.shape
        ).tocsr()
        stored = matrix.data.size
    elif matrix.format not in ("csr", "csc"):
        compressed_matrix = matrix.tocsr()
        if matrix.format in ("bsr", "dia"):
            compressed_matrix.eliminate_zeros()
        return compressed_matrix
    else:
        by_rows = matrix.format == "csr"
        length, width = matrix.shape if by_rows else matrix.shape[::-1]
        parts = matrix.data, matrix.indices, matrix.indptr
        check_pointers(matrix.indptr, matrix.indices, matrix.data, length)
        _check_indices(matrix.indices, width, "column" if by_rows else "row")
        kind = sparse.csr_array if by_rows else sparse.csc_array
        # Shares the arrays, but not the flags of the matrix.
        compressed_matrix = kind(parts, shape=matrix.shape)
        if compressed_matrix.has_canonical_format:
            return compressed_matrix
        compressed_matrix = kind((summable(parts[0]), *parts[1:]), shape=matrix.shape, copy=True)
        stored = compressed_matrix.nnz
        compressed_matrix.sum_duplicates()
    if not add and compressed_matrix.nnz < stored:
        raise doubled(stored - compressed_matrix.nnz)
    return compressed_matrix


def doubled(count: int) -> DataError:
    """Return the error for duplicate entries in data that allow one value per cell."""
    return DataError(
        f"{count} entries name a cell that another entry names already, but with "
        'unstored="missing" (ratings, for example) a cell has one value; keep one of each, or add '
        "them up yourself first, for example with the matrix's sum_duplicates(); counts, which "
        'add up by themselves, go with unstored="zero"'
    )


def summable(values: NDArray[Any]) -> NDArray[Any]:
    """Return values in a dtype that scipy supports and in which duplicates can be summed."""
    if values.dtype.kind in "bi" or (values.dtype.kind == "u" and values.dtype.itemsize < 8):
        return values.astype(np.int64, copy=False)
    if values.dtype == np.float16:
        return values.astype(np.float32)
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def check_pointers(
    pointers: IntArray, indices: IntArray, values: NDArray[Any], length: int
) -> None:
    """Check the row pointers of compressed rows, which may be wrong if made by hand."""
    wrong, sizes = "", (indices.shape[0], values.shape[0])
    if pointers.shape != (length + 1,) or pointers[0] != 0:
        wrong = f"indptr must have {length + 1} entries, the first of them 0"
    elif (np.diff(pointers) < 0).any():
        wrong = f"indptr falls after position {int(np.argmax(np.diff(pointers) < 0))}"
    elif not pointers[-1] <= min(sizes):
        wrong = f"indptr ends at {pointers[-1]}, with {sizes[0]} indices and {sizes[1]} values"
    if wrong:
        raise DataError(f"the sparse matrix is damaged: {wrong}; make it anew from its entries")


def _check_indices(indices: IntArray, size: int, side: str) -> None:
    low, high = (int(indices.min()), int(indices.max())) if len(indices) else (0, 0)
    if len(indices) and (low < 0 or high >= size):
        raise DataError(
            f"the sparse matrix is damaged: its {side} indices go from {low} to {high}, but it "
            f"has {size} {side}s; make it anew from its entries"
        )
