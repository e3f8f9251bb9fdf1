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

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import inline, jit, jit_exact, stack_array
from daskfactor.kernels.philox import Address, Words, philox4x32
from daskfactor.kernels.rows import add_scaled, copy_row, dot_rows, prefetch_row
from daskfactor.kernels.views import (
    NO_WEIGHTS,
    AnyBlock,
    Block,
    Kernel,
    Law,
    SparseBlock,
    entry_kernels,
    floored,
    law_at,
    row_weights,
    weighed,
)
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]
Scalar = Any

CHUNK = 4096
"""Entries that are drawn before their gradients are added."""
AHEAD = 8
"""Number of entries by which a prefetch is ahead."""
UNIT = 2.0**-53
FIRST_STREAM = 16
"""The last counter word of block 0; those below are the noise of W and H, and
that of a tensor's other factors is at the end."""


def block_address(key: NDArray[np.uint32], iteration: int, block: Any) -> Address:
    """Return the address of the draws of a block; ``block`` numbers the grid's blocks row by row.

    Of several blocks, an array, it is the address of each.
    """
    return Address(key, iteration, FIRST_STREAM + block)


@inline
def place_among(count: int, draw: int, w: Words) -> int:
    """Return the whole number from 0 to count - 1 of the words of a draw."""
    high = np.uint64(w[2] if draw & 1 else w[0])
    low = np.uint64(w[3] if draw & 1 else w[1])
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))
    place = np.int64(np.float64(bits) * UNIT * np.float64(count))
    return min(place, np.int64(count - 1))  # type: ignore[return-value]


@inline
def candidate(count: int, draw: int, attempt: int, address: Address) -> int:
    """Draw a whole number from 0 to count - 1, uniform up to count / 2**53."""
    key = address.key
    w = philox4x32(attempt, draw >> 1, address.iteration, address.factor, key[0], key[1])
    return place_among(count, draw, w)


@inline
def _look_up(
    first: Array, second: Any, third: Any, n: int, zeros: bool, at: int
) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    """Return row, column and value of a candidate: a stored entry, or a cell of n columns.

    Last comes the place in the row, or among all stored entries, -1 if it is not stored.
    """
    if first.ndim == 2:
        i = at // n
        j = at - i * n
        return i, j, first[second + i, third + j], j
    elif not zeros:
        row = np.searchsorted(first, at, side="right") - 1
        return row, np.int64(second[at]), third[at], at
    else:
        i = at // n
        j = at - i * n
        low, end = np.int64(first[i]), np.int64(first[i + 1])
        high = end
        while low < high:
            middle = (low + high) // 2
            if np.int64(second[middle]) < j:
                low = middle + 1
            else:
                high = middle
        stored = low < end and np.int64(second[low]) == j
        return i, j, third[low] if stored else third.dtype.type(0), low if stored else np.int64(-1)


@inline
def _set_weight(first: Array, weights: Array, i: int, place: int, out: Array, t: int) -> None:
    """Set the weight of draw t; 1 of a cell that is not stored."""
    if weights.ndim < 3:
        out[t] = out.dtype.type(1) if place < 0 else row_weights(first, weights, i)[place]


@jit_exact
def _draw(
    block: tuple[Array, Any, Any, Any],
    n: int,
    zeros: bool,
    count: int,
    start: int,
    cells: Array,
    out: tuple[Array, Array, Array, Array],
    address: Address,
) -> None:
    """Make draws ``start``, ``start + 1``, ... of a block with at least one observed entry.

    Parameters
    ----------
    block : as kernels take it, of n columns
    zeros : True if cells that a sparse block does not store are observed zeros
    count : how many candidates there are
    cells : (draws,) int64, scratch
    out : rows, columns, values and weights, if any (draws,), overwritten: cells in the block
    address : of the random words
    """
    first, second, third, weights = block
    rows, cols, values, drawn_weights = out
    for t in range(cells.size):  # apart, so that it vectorises
        cells[t] = candidate(count, start + t, 0, address)
    for t in range(cells.size):
        attempt, at = 0, cells[t]
        while True:  # one look-up in the code, so that it is inlined once
            i, j, v, place = _look_up(first, second, third, n, zeros, at)
            if v == v:
                break
            attempt += 1
            at = candidate(count, start + t, attempt, address)
        rows[t], cols[t], values[t] = i, j, v
        _set_weight(first, weights, i, place, drawn_weights, t)


@lru_cache(maxsize=128)
def entry_gradients(likelihood: Likelihood, K: int, curved: bool) -> Kernel:
    """Make ``add(entries, W, H, scale, law, (GW, GH))`` of one likelihood and K.

    For entries (rows, cols, values, weights), each (count,): GW[i] += r H[j] and
    GH[j] += r W[i] with r = scale (v - mu) w or, ``curved``, r = scale curvature, by weight.
    """
    weight, curve, _, _, _ = entry_kernels(likelihood)

    @jit
    def add(
        entries: tuple[Array, Array, Array, Array],
        W: Array,
        H: Array,
        scale: float,
        law: Law,
        out: tuple[Array, Array],
    ) -> None:
        rows, cols, values, weights = entries
        GW, GH = out
        real, last = W.dtype.type, rows.size - 1
        w = stack_array(K, W.dtype)
        for t in range(rows.size):
            i, j, later = np.intp(rows[t]), np.intp(cols[t]), min(t + AHEAD, last)
            prefetch_row(K, H, np.intp(cols[later]))
            prefetch_row(K, GH, np.intp(cols[later]))
            copy_row(K, W, i, w, 0)
            floor, numbers = law_at(law, j)
            mu = floored(dot_rows(K, w, 0, H, j), floor)
            v = real(values[t])
            if curved:
                a = curve(real(scale), v, mu, weight(v, mu, *numbers), *numbers)
            else:
                a = real(scale) * (v - mu) * weight(v, mu, *numbers)
            a = weighed(a, weights, t, True)
            add_scaled(K, a, w, 0, GH, j)
            copy_row(K, H, j, w, 0)
            add_scaled(K, a, w, 0, GW, i)

    return add


def drawn_entries(
    view: AnyBlock, count: int, address: Address
) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Yield draws 0, ..., count - 1 of a block in chunks: rows, columns, values, weights.

    The block must hold at least one observed entry. A chunk lasts until the next one.
    """
    size = min(count, CHUNK)
    candidates, kind = view.m * view.n, np.dtype(np.float64)
    if isinstance(view, SparseBlock):
        kind = view.values.dtype
        candidates = candidates if view.zeros else view.values.size
    dtypes = np.int64, np.int32, np.int32, kind
    arrays: list[Array] = [np.empty(size, dtype) for dtype in dtypes]
    arrays.append(NO_WEIGHTS if view.weights is None else np.empty(size, view.weights.dtype))
    for start in range(0, count, CHUNK):
        cells, rows, cols, values, weights = (array[: count - start] for array in arrays)
        out = rows, cols, values, weights
        _draw(view.arguments, view.n, view.zeros, candidates, start, cells, out, address)
        yield out


def add_subsample(
    block: Block,
    draws: tuple[int, Address],
    scale: float,
    gradients: tuple[Array, ...],
    curvature: tuple[tuple[Array, ...], float] | None = None,
) -> None:
    """Add the terms of drawn entries of a block to its gradients.

    GW[i] += r H[j], GH[j] += r W[i] with r = scale (v - mu) w

    Parameters
    ----------
    block : at least one entry of it is observed; of W and H, (m, K) and (n, K)
    draws : how many entries, and the address of their random words, see `block_address`
    scale : N / entries drawn in all
    gradients : GW (m, K) and GH (n, K)
    curvature : CW, CH and a weight c; gain c curvature H[j] and its like
    """
    view, likelihood, (W, H), floor = block
    K, law = W.shape[1], (floor, likelihood.numbers)
    for entries in drawn_entries(view, *draws):
        entry_gradients(likelihood, K, False)(entries, W, H, scale, law, gradients)
        if curvature is not None:
            gathered, weight = curvature
            entry_gradients(likelihood, K, True)(entries, W, H, weight, law, gathered)
