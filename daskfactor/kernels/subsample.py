"""Gradients from entries of a block that are drawn with replacement, by address.

Draw t of a block is a cell, uniform over the block's observed entries:

    u = 53 bits of philox(key; counter = (attempt, t // 2, iteration, 16 + block)),
    candidate = floor(u * candidates)

An attempt that meets a missing entry is rejected and the next one taken. Candidates are
the stored entries where the others are missing, all cells otherwise. Words 0 and 1 of a
counter serve an even t, words 2 and 3 an odd one.

Source: Welling and Teh 2011, "Bayesian learning via stochastic gradient Langevin
dynamics", equation 4; Şimşekli et al. 2015, section 2.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.entries import entry_kernels, floored
from daskfactor.kernels.jit import inline, jit, jit_exact, stack_array
from daskfactor.kernels.philox import philox4x32
from daskfactor.kernels.vectors import add_to_row, dot_row, load_row, prefetch_row
from daskfactor.kernels.views import AnyBlock, SparseBlock
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]
Scalar = Any
Kernel = Callable[..., None]

CHUNK = 4096
"""Entries that are drawn before their gradients are added."""
AHEAD = 8
"""How many entries before its turn a row is asked for."""
FIRST_STREAM = 16
"""The last counter word of block 0; those below are the factors' noise."""


class Address(NamedTuple):
    """Where the random words of a block's draws come from.

    ``key`` is (2,) uint32; ``block`` numbers the grid's blocks row by row.
    """

    key: NDArray[np.uint32]
    iteration: int
    block: int


@inline
def candidate(
    count: int, draw: int, attempt: int, key: NDArray[np.uint32], iteration: int, stream: int
) -> int:
    """A whole number from 0 to count - 1, uniform up to count / 2**53."""
    w = philox4x32(attempt, draw >> 1, iteration, stream, key[0], key[1])
    high = np.uint64(w[2] if draw & 1 else w[0])
    low = np.uint64(w[3] if draw & 1 else w[1])
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))
    found: Any = np.int64(np.float64(bits) * 2.0**-53 * np.float64(count))
    return min(found, np.int64(count - 1))  # type: ignore[no-any-return]


@jit_exact
def first_candidates(
    count: int, start: int, cells: Array, key: NDArray[np.uint32], iteration: int, stream: int
) -> None:
    """The first attempts of draws ``start``, ``start + 1``, ...: apart, so that they vectorise."""
    for t in range(cells.size):
        cells[t] = candidate(count, start + t, 0, key, iteration, stream)


@jit_exact
def draw_dense(
    array: Array,
    row0: int,
    col0: int,
    m: int,
    n: int,
    start: int,
    cells: Array,
    rows: Array,
    cols: Array,
    values: Array,
    key: NDArray[np.uint32],
    iteration: int,
    stream: int,
) -> None:
    """Draws ``start``, ``start + 1``, ... of a window of an array, NaN where missing.

    Parameters
    ----------
    array, row0, col0, m, n : the window; at least one of its entries is no NaN
    start : number of the first draw
    cells : (count,) int64, scratch
    rows, cols, values : (count,) int32, int32 and float, overwritten: cells in the window
    key, iteration, stream : address of the random words
    """
    first_candidates(m * n, start, cells, key, iteration, stream)
    for t in range(rows.size):
        attempt, cell = 0, cells[t]
        while True:
            i = cell // n
            j = cell - i * n
            v = array[row0 + i, col0 + j]
            if v == v:
                break
            attempt += 1
            cell = candidate(m * n, start + t, attempt, key, iteration, stream)
        rows[t], cols[t], values[t] = i, j, v


@jit_exact
def draw_stored(
    indptr: Array,
    indices: Array,
    stored: Array,
    start: int,
    cells: Array,
    rows: Array,
    cols: Array,
    values: Array,
    key: NDArray[np.uint32],
    iteration: int,
    stream: int,
) -> None:
    """As :func:`draw_dense`, from the stored entries of compressed rows."""
    first_candidates(stored.size, start, cells, key, iteration, stream)
    for t in range(rows.size):
        attempt, at = 0, cells[t]
        while stored[at] != stored[at]:
            attempt += 1
            at = candidate(stored.size, start + t, attempt, key, iteration, stream)
        rows[t] = np.searchsorted(indptr, at, side="right") - 1
        cols[t] = np.intp(indices[at])
        values[t] = stored[at]


@jit_exact
def draw_with_zeros(
    indptr: Array,
    indices: Array,
    stored: Array,
    n: int,
    start: int,
    cells: Array,
    rows: Array,
    cols: Array,
    values: Array,
    key: NDArray[np.uint32],
    iteration: int,
    stream: int,
) -> None:
    """As :func:`draw_dense`, from all cells of compressed rows: what is not stored is zero."""
    m = indptr.size - 1
    first_candidates(m * n, start, cells, key, iteration, stream)
    for t in range(rows.size):
        attempt, cell = 0, cells[t]
        while True:
            i = cell // n
            j = cell - i * n
            low, end = np.int64(indptr[i]), np.int64(indptr[i + 1])
            high = end
            while low < high:
                middle = (low + high) // 2
                if np.int64(indices[middle]) < j:
                    low = middle + 1
                else:
                    high = middle
            found = low < end and np.int64(indices[low]) == j
            v = stored[low] if found else stored.dtype.type(0)
            if v == v:
                break
            attempt += 1
            cell = candidate(m * n, start + t, attempt, key, iteration, stream)
        rows[t], cols[t], values[t] = i, j, v


class EntryGradients(NamedTuple):
    """Kernels of one likelihood and K over entries (rows, cols, values), each (count,).

    gradient(entries..., W, H, scale, floor, GW, GH)
        GW[i] += r H[j] and GH[j] += r W[i], r = scale (v - mu) w
    curvature(entries..., W, H, share, floor, CW, CH)
        CW[i] += c H[j] and CH[j] += c W[i], c = share curvature
    """

    gradient: Kernel
    curvature: Kernel


@lru_cache(maxsize=64)
def entry_gradients(likelihood: Likelihood, K: int) -> EntryGradients:
    """Make the kernels of one likelihood and K."""
    weight, curve, _, _, _ = entry_kernels(likelihood)

    @jit
    def gradient(
        rows: Array,
        cols: Array,
        values: Array,
        W: Array,
        H: Array,
        scale: float,
        floor: float,
        GW: Array,
        GH: Array,
    ) -> None:
        real, last = W.dtype.type, rows.size - 1
        w = stack_array(K, W.dtype)
        for t in range(rows.size):
            i, j, later = np.intp(rows[t]), np.intp(cols[t]), min(t + AHEAD, last)
            prefetch_row(K, H, np.intp(cols[later]))
            prefetch_row(K, GH, np.intp(cols[later]))
            load_row(K, W, i, w)
            mu = floored(dot_row(K, w, H, j), real(floor))
            v = real(values[t])
            a = real(scale) * (v - mu) * weight(v, mu)
            add_to_row(K, a, w, GH, j)
            load_row(K, H, j, w)
            add_to_row(K, a, w, GW, i)

    @jit
    def curvature(
        rows: Array,
        cols: Array,
        values: Array,
        W: Array,
        H: Array,
        share: float,
        floor: float,
        CW: Array,
        CH: Array,
    ) -> None:
        real = W.dtype.type
        w = stack_array(K, W.dtype)
        for t in range(rows.size):
            i, j = np.intp(rows[t]), np.intp(cols[t])
            load_row(K, W, i, w)
            mu = floored(dot_row(K, w, H, j), real(floor))
            v = real(values[t])
            a = curve(real(share), v, mu, weight(v, mu))
            add_to_row(K, a, w, CH, j)
            load_row(K, H, j, w)
            add_to_row(K, a, w, CW, i)

    return EntryGradients(gradient, curvature)


def drawn_entries(
    view: AnyBlock, count: int, address: Address
) -> Iterator[tuple[Array, Array, Array]]:
    """Draws 0, ..., count - 1 of a block in chunks: rows, columns and values.

    The block must hold at least one observed entry. A chunk lasts until the next one.
    """
    size = min(count, CHUNK)
    rows, cols = np.empty(size, np.int32), np.empty(size, np.int32)
    values = np.empty(size, view.values.dtype if isinstance(view, SparseBlock) else np.float64)
    cells = np.empty(size, np.int64)
    tail = (address.key, address.iteration, FIRST_STREAM + address.block)
    for start in range(0, count, CHUNK):
        end = min(CHUNK, count - start)
        out = rows[:end], cols[:end], values[:end]
        if not isinstance(view, SparseBlock):
            draw_dense(*view, start, cells[:end], *out, *tail)
        elif view.zeros:
            block = (view.indptr, view.indices, view.values)
            draw_with_zeros(*block, view.n, start, cells[:end], *out, *tail)
        else:
            block = (view.indptr, view.indices, view.values)
            draw_stored(*block, start, cells[:end], *out, *tail)
        yield out


def add_subsample(
    view: AnyBlock,
    likelihood: Likelihood,
    W: Array,
    H: Array,
    count: int,
    address: Address,
    scale: float,
    floor: float,
    gradients: tuple[Array, Array],
    curvature: tuple[Array, Array, float] | None = None,
) -> None:
    """Add what ``count`` drawn entries of a block give to its gradients.

    GW[i] += r H[j], GH[j] += r W[i] with r = scale (v - mu) w

    Parameters
    ----------
    view : a block with at least one observed entry
    W, H : (m, K) and (n, K), C-contiguous, one float dtype
    count, address : how many entries, and the address of their random words
    scale, floor : N / entries drawn in all; smallest mu
    gradients : GW (m, K) and GH (n, K)
    curvature : CW, CH and a weight c; gain c curvature H[j] and its like
    """
    kernels = entry_gradients(likelihood, W.shape[1])
    for entries in drawn_entries(view, count, address):
        kernels.gradient(*entries, W, H, scale, floor, *gradients)
        if curvature is not None:
            CW, CH, weight = curvature
            kernels.curvature(*entries, W, H, weight, floor, CW, CH)
