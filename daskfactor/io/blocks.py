"""A data matrix as a grid of decoded blocks, with what one pass over it found out."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from daskfactor.errors import OptionError
from daskfactor.grid.bands import Block, Grid
from daskfactor.io.labels import Labels
from daskfactor.io.statistics import Statistics
from daskfactor.io.storage import BlockView, Closed, FloatArray, FloatType, Storage

__all__ = ["BlockView", "BlockedData", "SourceInfo"]


@dataclass(frozen=True)
class SourceInfo:
    """Where a matrix came from.

    ``kind`` is ``"numpy"``, ``"dask"``, ``"zarr"``, ``"xarray"`` or ``"pandas"``;
    ``location`` is a path or URL that ``as_blocks`` accepts again, or None;
    ``lazy`` tells that the input itself was not in memory.
    """

    kind: str
    location: str | None = None
    lazy: bool = False


class BlockedData:
    """A matrix of I rows and J columns on a B x B grid of float blocks, NaN where missing.

    Made by `as_blocks`. Reading is safe from several threads at once. Use it as
    a context manager, or call `close`, to give a scratch file back early; it
    goes in any case when the object does, however the process ends.

    Attributes
    ----------
    grid : Grid
        Row bands and column bands.
    labels : Labels
        Dimension names and coordinates of the input.
    statistics : Statistics
        Counts, moments and extremes; its fields are attributes here too.
    source : SourceInfo
        Kind and location of the input.
    dtype : numpy.dtype
        float32 or float64, the type of every block.
    """

    def __init__(
        self,
        grid: Grid,
        labels: Labels,
        statistics: Statistics,
        source: SourceInfo,
        dtype: FloatType,
        storage: Storage,
    ) -> None:
        self.grid = grid
        self.labels = labels
        self.statistics = statistics
        self.source = source
        self.dtype = dtype
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

    def view(self, row: int, col: int, buffer: FloatArray | None = None) -> BlockView:
        """Block (row, col) for reading.

        From a scratch file the block is read into ``buffer`` (see `new_buffer`)
        or, without one, into a buffer of the calling thread that the thread's
        next call overwrites. In memory nothing is copied. Never write to it.
        """
        return self._storage.view(row, col, buffer)

    def prefetch(self, row: int, col: int) -> None:
        """Hint that block (row, col) will be viewed soon."""
        self._storage.prefetch(row, col)

    def new_buffer(self) -> FloatArray:
        """A flat buffer that every block fits, for `view`."""
        return np.empty(max(self.grid.rows.sizes) * max(self.grid.cols.sizes), self.dtype)

    def missing_cells(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and column indices of all missing entries, in row-major order."""
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
        row_band = np.searchsorted(self.grid.rows.offsets, row_index, side="right") - 1
        col_band = np.searchsorted(self.grid.cols.offsets, col_index, side="right") - 1
        owner = row_band * self.grid.blocks + col_band
        out = np.empty(row_index.size, self.dtype)
        buffer = None if self.in_memory else self.new_buffer()
        order = np.argsort(owner, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(owner[order])) + 1):
            if group.size:
                row, col = int(row_band[group[0]]), int(col_band[group[0]])
                block = self.view(row, col, buffer).block
                row0, col0 = self.grid.rows.offsets[row], self.grid.cols.offsets[col]
                out[group] = block[row_index[group] - row0, col_index[group] - col0]
        return out

    def to_numpy(self) -> FloatArray:
        """The whole matrix as one new array: for data that fit in memory."""
        out = np.empty(self.shape, self.dtype)
        for band in range(self.grid.blocks):
            for block, values in self._blocks(band):
                out[self.grid.slices(block)] = values
        return out

    def describe(self) -> str:
        """One line for logs: shape, observed entries, grid, type and place."""
        rows, cols = self.shape
        entries = rows * cols
        observed = (
            f"{_short(self.total_observed)} observed of {_short(entries)}"
            if self.n_missing
            else f"all {_short(entries)} observed"
        )
        blocks = self.grid.blocks
        place = "in memory" if self.in_memory else "in a scratch file"
        return f"{rows} x {cols}, {observed}, {blocks} x {blocks} blocks, {self.dtype} {place}"

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
            yield Block(band, col), self.view(band, col, buffer).block

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


def _short(count: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)
