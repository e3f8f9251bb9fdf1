"""A data matrix as a grid of decoded blocks, with what one pass over it found out."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from daskfactor.data import sparse_reading
from daskfactor.data.grid import Block, Grid
from daskfactor.data.labels import Labels, SourceInfo, SparseLayout
from daskfactor.data.sharing import About, DataHandle, share
from daskfactor.data.sparse_reading import short
from daskfactor.data.statistics import Statistics
from daskfactor.data.storage import Closed, FloatArray, FloatType, Storage, block_bytes
from daskfactor.errors import OptionError
from daskfactor.kernels.views import BlockView, SparseBlock

MOST_OPEN = 4
"""Data sets that a process keeps open for others that it works for."""


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
        self._sparse = sparse
        self._storage = storage
        self._finalizer = weakref.finalize(self, storage.close)
        self._handle: DataHandle | None = None
        self._unshare: weakref.finalize[..., Any] | None = None

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
        n_stored = self.n_stored if self.is_sparse else None
        return int(block_bytes(self.grid, self.dtype, n_stored).sum())

    @property
    def imbalance(self) -> float:
        """Largest number of entries stored in a block over the mean; 1 is even."""
        stored = self.n_stored
        return float(stored.max() / stored.mean()) if stored.any() else 1.0

    @property
    def place(self) -> str:
        """Where blocks are, as a log would say it."""
        return self._storage.place

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

    def view(self, row: int, col: int) -> BlockView | SparseBlock:
        """Block (row, col) for reading: a `SparseBlock` if ``is_sparse``, else a `BlockView`.

        From a scratch file the block is read into memory of the calling thread that the
        thread's next call overwrites. In memory nothing is copied. Never write to it.
        """
        return self._storage.view(row, col)

    def share(self) -> DataHandle:
        """A small handle by which other processes read these data; see `open_shared`.

        What has to be written for them is written once. It goes with `unshare`, with `close`,
        with these data, or with this process.

        Raises
        ------
        StoreError
            If there is no room for it.
        """
        if self._handle is None:
            about = About(
                self.grid, self.labels, self.statistics, self.source, self.dtype, self._sparse
            )
            self._handle, remove = share(about, self._storage)
            self._unshare = weakref.finalize(self, remove)
        return self._handle

    def unshare(self) -> None:
        """Remove what was written for other processes."""
        if self._unshare is not None:
            self._unshare()
            self._handle = self._unshare = None

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
        order = np.argsort(owner, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(owner[order])) + 1):
            if group.size:
                row, col = int(row_band[group[0]]), int(col_band[group[0]])
                block = self._dense(row, col)
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
        self.unshare()
        self._finalizer()
        self._storage = Closed()

    def __reduce__(self) -> Any:
        """Pickle the handle: another process opens it once, and reads the blocks it needs."""
        return open_shared, (self.share(),)

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
        for col in range(self.grid.blocks):
            yield Block(band, col), self._dense(band, col)

    def _dense(self, row: int, col: int) -> FloatArray:
        view = self._storage.view(row, col)
        assert isinstance(view, BlockView)
        return view.block

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


_opened: OrderedDict[str, BlockedData] = OrderedDict()
_lock = threading.Lock()


def open_shared(handle: DataHandle, memory_limit: int | None = None) -> BlockedData:
    """The data of a handle, from the few that this process has open if they are there.

    Decoded blocks take up to ``memory_limit`` bytes, by default what `blocks_budget` says.

    Raises
    ------
    StoreError
        If this process cannot read the data, or they have changed.
    """
    with _lock:
        data = _opened.get(handle.token)
        if data is None:
            limit = memory_limit if memory_limit is not None else blocks_budget()
            about, storage = handle.open(limit)
            data = BlockedData(
                about.grid, about.labels, about.statistics, about.source, about.dtype, storage,
                about.sparse,
            )  # fmt: skip
            data._handle = handle
            _opened[handle.token] = data
        _opened.move_to_end(handle.token)
        while len(_opened) > MOST_OPEN:
            _opened.popitem(last=False)  # closed when its last user lets go of it
        return data


def _half_of_what_is_free() -> int | None:
    return None


blocks_budget: Callable[[], int | None] = _half_of_what_is_free
"""Bytes for the decoded blocks of data that another process shared; executors set it on workers."""
