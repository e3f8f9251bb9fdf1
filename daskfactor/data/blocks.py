"""A data matrix as a grid of decoded blocks, with what one pass over it found out."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from daskfactor.data import sparse_reading
from daskfactor.data.grid import Block, Grid
from daskfactor.data.labels import Labels
from daskfactor.data.sparse_reading import short
from daskfactor.data.statistics import Statistics
from daskfactor.data.storage import (
    BlockView,
    Closed,
    FloatArray,
    FloatType,
    SparseBlock,
    Storage,
)
from daskfactor.errors import OptionError
from daskfactor.kernels.views import index_type, pointer_type

__all__ = ["BlockView", "BlockedData", "SourceInfo", "SparseBlock", "SparseLayout"]


@dataclass(frozen=True)
class SourceInfo:
    """Where a matrix came from.

    ``kind`` is ``"numpy"``, ``"dask"``, ``"zarr"``, ``"xarray"``, ``"pandas"``,
    ``"scipy"``, ``"sparse"``, ``"anndata"`` or ``"blocks"`` (a blocked sparse store);
    ``location`` is a path or URL that ``as_blocks`` accepts again, or None;
    ``lazy`` tells that the input itself was not in memory.
    """

    kind: str
    location: str | None = None
    lazy: bool = False


class SparseLayout(NamedTuple):
    """What is particular to sparse blocks.

    ``unstored`` is ``"zero"`` or ``"missing"``; ``row_order`` (I,) and ``col_order``
    (J,) hold the caller's row and column at each position of the grid, None if
    they were not permuted.
    """

    unstored: str
    row_order: NDArray[np.int64] | None = None
    col_order: NDArray[np.int64] | None = None


class BlockedData:
    """A matrix of I rows and J columns on a B x B grid of blocks.

    Dense blocks are float arrays, NaN where missing; sparse ones are compressed
    rows (`SparseBlock`), and ``unstored`` says what an entry means that they do
    not store.

    Made by `as_blocks`. Reading is safe from several threads at once. Use it as
    a context manager, or call `close`, to give a scratch file back early; it
    goes in any case when the object does, however the process ends.

    Attributes
    ----------
    grid : Grid
        Row bands and column bands.
    labels : Labels
        Dimension names and coordinates of the input, in the caller's order.
    statistics : Statistics
        Counts, moments and extremes; its fields are attributes here too.
    source : SourceInfo
        Kind and location of the input.
    dtype : numpy.dtype
        float32 or float64, the type of every block.
    unstored : str or None
        ``"zero"``, ``"missing"``, or None if blocks are dense.
    row_order, col_order : numpy.ndarray or None
        The caller's row and column at each position of the grid, None if they
        were not permuted. Blocks, ``row_observed`` and ``col_observed`` are in
        the order of the grid, labels and all cells in that of the caller.
    """

    def __init__(
        self,
        grid: Grid,
        labels: Labels,
        statistics: Statistics,
        source: SourceInfo,
        dtype: FloatType,
        storage: Storage,
        sparse: SparseLayout | None = None,
    ) -> None:
        self.grid = grid
        self.labels = labels
        self.statistics = statistics
        self.source = source
        self.dtype = dtype
        self.unstored = None if sparse is None else sparse.unstored
        self.row_order = None if sparse is None else sparse.row_order
        self.col_order = None if sparse is None else sparse.col_order
        self._storage = storage
        self._finalizer = weakref.finalize(self, storage.close)

    @property
    def shape(self) -> tuple[int, int]:
        """(I, J)."""
        return self.grid.shape

    @property
    def in_memory(self) -> bool:
        """Whether blocks are in memory rather than in a scratch file."""
        return self._storage.in_memory

    @property
    def is_sparse(self) -> bool:
        """Whether blocks hold compressed rows."""
        return self.unstored is not None

    @property
    def n_stored(self) -> NDArray[np.int64]:
        """Entries that every block stores, missing ones among them, (B, B)."""
        if self.statistics.n_stored is not None:
            return self.statistics.n_stored
        return np.outer(self.grid.rows.sizes, self.grid.cols.sizes).astype(np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes that the blocks take, in memory or on disk."""
        if not self.is_sparse:
            return self.shape[0] * self.shape[1] * self.dtype.itemsize
        return sum(
            sparse_block_bytes(self.grid.block_shape(block), int(stored), self.dtype)
            for block, stored in zip(self.grid.all_blocks(), self.n_stored.flat, strict=True)
        )

    @property
    def imbalance(self) -> float:
        """Largest number of entries stored in a block over the mean; 1 is even."""
        stored = self.n_stored
        return float(stored.max() / stored.mean()) if stored.any() else 1.0

    @property
    def place(self) -> str:
        """Where blocks are, as a log would say it."""
        default = "in memory" if self.in_memory else "in a scratch file"
        return str(getattr(self._storage, "place", default))

    @property
    def n_observed(self) -> NDArray[np.int64]:
        """Observed entries of every block, (B, B)."""
        return self.statistics.n_observed

    @property
    def row_observed(self) -> NDArray[np.int64]:
        """Observed entries of every row, (I,)."""
        return self.statistics.row_observed

    @property
    def col_observed(self) -> NDArray[np.int64]:
        """Observed entries of every column, (J,)."""
        return self.statistics.col_observed

    @property
    def total_observed(self) -> int:
        """Observed entries of the whole matrix."""
        return int(self.n_observed.sum())

    @property
    def n_missing(self) -> int:
        """Missing entries of the whole matrix."""
        return self.shape[0] * self.shape[1] - self.total_observed

    @property
    def total(self) -> float:
        """Sum of the observed values."""
        return self.statistics.total

    @property
    def mean(self) -> float:
        """Mean of the observed values."""
        return self.total / self.total_observed

    @property
    def minimum(self) -> float:
        """Smallest observed value."""
        return self.statistics.minimum

    @property
    def maximum(self) -> float:
        """Largest observed value."""
        return self.statistics.maximum

    @property
    def is_integer(self) -> bool:
        """Whether all observed values are whole numbers."""
        return self.statistics.is_integer

    @property
    def fingerprint(self) -> str:
        """Shape, observed entries and a checksum of the decoded blocks, whatever the source."""
        return self.statistics.fingerprint

    def view(
        self, row: int, col: int, buffer: NDArray[Any] | None = None
    ) -> BlockView | SparseBlock:
        """Block (row, col) for reading: a `SparseBlock` if ``is_sparse``, else a `BlockView`.

        From a scratch file the block is read into ``buffer`` (see `new_buffer`)
        or, without one, into a buffer of the calling thread that the thread's
        next call overwrites. In memory nothing is copied. Never write to it.
        """
        found: BlockView | SparseBlock = self._storage.view(row, col, buffer)
        return found

    def reads(self, kind: type) -> bool:
        """Whether blocks come straight from a storage of this kind."""
        return isinstance(self._storage, kind)

    def prefetch(self, row: int, col: int) -> None:
        """Hint that block (row, col) will be viewed soon."""
        self._storage.prefetch(row, col)

    def new_buffer(self) -> NDArray[Any]:
        """A flat buffer that every block fits, for `view`."""
        if self.is_sparse:
            return np.empty(getattr(self._storage, "largest", 0), np.uint8)
        return np.empty(max(self.grid.rows.sizes) * max(self.grid.cols.sizes), self.dtype)

    def missing_cells(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and column indices of all missing entries, in row-major order.

        Raises
        ------
        OptionError
            If unstored entries are missing and more than 10 million of them are.
        """
        if self.is_sparse:
            return sparse_reading.missing_cells(self)
        found_rows: list[NDArray[np.int64]] = []
        found_cols: list[NDArray[np.int64]] = []
        for band, offset in enumerate(self.grid.rows.offsets[:-1]):
            pairs = [
                (row + offset, col + self.grid.cols.offsets[block.col])
                for block, values in self._blocks(band)
                for row, col in [np.nonzero(np.isnan(values))]
            ]
            rows = np.concatenate([pair[0] for pair in pairs])
            order = np.argsort(rows, kind="stable")
            found_rows.append(rows[order])
            found_cols.append(np.concatenate([pair[1] for pair in pairs])[order])
        return np.concatenate(found_rows), np.concatenate(found_cols)

    def values(self, rows: ArrayLike, cols: ArrayLike) -> FloatArray:
        """Entries at the given cells, NaN where missing; every block is read at most once."""
        row_index, col_index = self._indices(rows, 0), self._indices(cols, 1)
        if row_index.shape != col_index.shape:
            raise OptionError(
                f"cells need as many rows as columns, got {row_index.size} rows and "
                f"{col_index.size} columns"
            )
        if self.is_sparse:
            return sparse_reading.values(self, row_index, col_index)
        row_band = np.searchsorted(self.grid.rows.offsets, row_index, side="right") - 1
        col_band = np.searchsorted(self.grid.cols.offsets, col_index, side="right") - 1
        owner = row_band * self.grid.blocks + col_band
        out = np.empty(row_index.size, self.dtype)
        buffer = None if self.in_memory else self.new_buffer()
        order = np.argsort(owner, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(owner[order])) + 1):
            if group.size:
                row, col = int(row_band[group[0]]), int(col_band[group[0]])
                block = self._storage.view(row, col, buffer).block
                row0, col0 = self.grid.rows.offsets[row], self.grid.cols.offsets[col]
                out[group] = block[row_index[group] - row0, col_index[group] - col0]
        return out

    def to_numpy(self) -> FloatArray:
        """The whole matrix as one new array, in the caller's order, NaN where missing.

        Raises
        ------
        OptionError
            If blocks are sparse and the array would have more than 2^28 entries.
        """
        if self.is_sparse:
            return sparse_reading.to_numpy(self)
        out = np.empty(self.shape, self.dtype)
        for band in range(self.grid.blocks):
            for block, values in self._blocks(band):
                out[self.grid.slices(block)] = values
        return out

    def observed_sparse(self) -> Any:
        """The stored entries as a scipy ``csr_array``, rows and columns in the caller's order.

        Entries that are missing although stored are NaN in it, so that `as_blocks`
        with the same ``unstored`` makes the same blocks of it again.

        Raises
        ------
        OptionError
            If blocks are dense.
        """
        if not self.is_sparse:
            raise OptionError("these blocks are dense; use to_numpy(), NaN where missing")
        return sparse_reading.to_scipy(self)

    def describe(self) -> str:
        """One line for logs: shape, observed entries, grid, type and place."""
        if self.is_sparse:
            return sparse_reading.describe(self)
        rows, cols = self.shape
        entries = rows * cols
        observed = (
            f"{short(self.total_observed)} observed of {short(entries)}"
            if self.n_missing
            else f"all {short(entries)} observed"
        )
        blocks = self.grid.blocks
        place = f"{self.dtype} {self.place}"
        return f"{rows} x {cols}, {observed}, {blocks} x {blocks} blocks, {place}"

    def close(self) -> None:
        """Give back the scratch file or the cache; the blocks cannot be read afterwards."""
        self._finalizer()
        self._storage = Closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<BlockedData {self.describe()}>"

    def _blocks(self, band: int) -> Iterator[tuple[Block, FloatArray]]:
        buffer = None if self.in_memory else self.new_buffer()
        for col in range(self.grid.blocks):
            yield Block(band, col), self._storage.view(band, col, buffer).block

    def _indices(self, index: ArrayLike, axis: int) -> NDArray[np.int64]:
        array = np.atleast_1d(np.asarray(index))
        if array.size == 0:
            return np.zeros(0, np.int64)
        low, high = array.min(), array.max()
        if array.dtype.kind not in "iu" or array.ndim != 1 or low < 0 or high >= self.shape[axis]:
            side = ("row", "column")[axis]
            raise OptionError(
                f"{side} indices of cells must be a list of whole numbers from 0 to "
                f"{self.shape[axis] - 1}, got {array.dtype} values of shape {array.shape} "
                f"from {low} to {high}"
            )
        return array.astype(np.int64)


def sparse_block_bytes(shape: tuple[int, int], stored: int, dtype: FloatType) -> int:
    """Bytes of a sparse block of m rows and n columns with so many entries."""
    each = index_type(shape[1]).itemsize + dtype.itemsize
    return stored * each + (shape[0] + 1) * pointer_type(stored).itemsize
