"""Buffers of one thread, grown on demand and then reused.

Fresh temporaries cost more than the arithmetic on them.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]

# OpenBLAS multiplies matrices of up to a million terms without packing them first,
# which for narrow blocks or few components is a third faster.
UNPACKED_TERMS = 1_000_000
FEWEST_UNPACKED_ROWS = 48
MOST_ROWS = 512
PACKED_ROWS = 192
CACHE_LINE = 64
WIDE_ROWS = 64
TILE_BYTES = 4 * 1024 * 1024


class Gradients(NamedTuple):
    """Scratch of one sparse block: GW (m, K); GH (n, K); gram (K, K).

    In float64 whatever the factors: sums (2, K, K) and wide (64, K).
    """

    GW: Array
    GH: Array
    gram: Array
    sums: Array
    wide: Array


class Buffers(NamedTuple):
    """Scratch of one block: tile, tile2 (T, n); GW (m, K); GH (n, K)."""

    tile: Array
    tile2: Array
    GW: Array
    GH: Array


def tile_rows(m: int, n: int, K: int, itemsize: int) -> int:
    """Rows of a tile: as many as BLAS multiplies unpacked, if that is enough rows, else 192.

    Depends on shape and dtype alone, since the order of sums depends on it.
    """
    unpacked = UNPACKED_TERMS // max(1, n * K) // 16 * 16
    fast = unpacked >= min(m, FEWEST_UNPACKED_ROWS)
    rows = min(unpacked, MOST_ROWS) if fast else PACKED_ROWS
    return max(1, min(m, rows, max(16, TILE_BYTES // (n * itemsize))))


def aligned(count: int, dtype: np.dtype[Any]) -> Array:
    """Uninitialised numbers that start on a cache line, so that no vector straddles two."""
    memory = np.empty(count * dtype.itemsize + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + count * dtype.itemsize].view(dtype)


class Workspace:
    """Kernel buffers of one thread. Not to be shared between threads.

    Parameters
    ----------
    dtype : float32 (default) or float64, the dtype of the factors
    """

    def __init__(self, dtype: DTypeLike = np.float32) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._start()

    def _start(self) -> None:
        self._flat = [np.empty(0, self.dtype) for _ in range(5)]
        self._sums = np.empty(0)

    def _use(self, dtype: DTypeLike | None) -> None:
        """Start anew with another dtype."""
        if dtype is not None and np.dtype(dtype) != self.dtype:
            self.dtype = np.dtype(dtype)
            self._start()

    def _view(self, index: int, rows: int, columns: int) -> Array:
        if self._flat[index].size < rows * columns:
            self._flat[index] = aligned(rows * columns, self.dtype)
        return self._flat[index][: rows * columns].reshape(rows, columns)

    def arrays(self, m: int, n: int, K: int, dtype: DTypeLike | None = None) -> Buffers:
        """C-contiguous buffers for an (m, n) block with K components, uninitialised.

        A ``dtype`` other than the last one starts new buffers.
        They are views of the same memory at every call: copy what must outlive the next one.
        """
        self._use(dtype)
        rows = tile_rows(m, n, K, self.dtype.itemsize)
        return Buffers(
            self._view(0, rows, n),
            self._view(1, rows, n),
            self._view(2, m, K),
            self._view(3, n, K),
        )

    def gradients(self, m: int, n: int, K: int, dtype: DTypeLike | None = None) -> Gradients:
        """Buffers for a sparse (m, n) block with K components: nothing as large as a tile.

        Otherwise as :meth:`arrays`, with which they share the gradients.
        """
        self._use(dtype)
        size = 2 * K * K
        if self._sums.size < size + WIDE_ROWS * K:
            self._sums = aligned(size + WIDE_ROWS * K, np.dtype(np.float64))
        sums = self._sums[:size].reshape(2, K, K)
        wide = self._sums[size : size + WIDE_ROWS * K].reshape(WIDE_ROWS, K)
        return Gradients(self._view(2, m, K), self._view(3, n, K), self._view(4, K, K), sums, wide)
