"""Views of blocks for kernels, buffers of threads, and scalar functions of a law.

A block is a window of a dense array or compressed sparse rows. Buffers belong to one thread,
grow on demand and are then reused: fresh temporaries cost more than the arithmetic on them.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numba import types
from numpy.typing import DTypeLike, NDArray

from daskfactor.kernels import polynomials
from daskfactor.kernels.jit import INLINE_OPTIONS, inline, overload
from daskfactor.models.likelihood import Entry, Likelihood

Array = NDArray[Any]
Scalar = Any
Kernel = Callable[..., Any]

NARROW_COLUMNS = 65536
"""Blocks of at most this many columns keep their column numbers in 16 bits."""

# OpenBLAS multiplies matrices of up to a million terms without packing them first,
# which for narrow blocks or few components is a third faster.
UNPACKED_TERMS = 1_000_000
FEWEST_UNPACKED_ROWS = 48
MOST_ROWS = 512
PACKED_ROWS = 192
CACHE_LINE = 64
WIDE_ROWS = 64
TILE_BYTES = 4 * 1024 * 1024


NO_WEIGHTS = np.empty((0, 0, 0))
"""Stands for the weights of cells without any; its number of dimensions is 3."""


def weights_or_none(weights: Array | None) -> Array:
    """Return the weights of the cells of a block as kernels take them."""
    return NO_WEIGHTS if weights is None else weights


class BlockView(NamedTuple):
    """A block inside a C-contiguous array: ``array[row0:row0 + m, col0:col0 + n]``.

    NaN marks a missing entry. ``weights`` are those of the cells, (m, n), if they have any.
    ``complete``: no cell is missing or weighted.
    """

    array: Array
    row0: int
    col0: int
    m: int
    n: int
    weights: Array | None = None
    complete: bool = False

    @property
    def zeros(self) -> bool:
        """False: cells that are not observed are missing."""
        return False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.m, self.n

    @property
    def block(self) -> Array:
        """The m x n block alone, as a NumPy view."""
        return self.array[self.row0 : self.row0 + self.m, self.col0 : self.col0 + self.n]

    @property
    def stored(self) -> tuple[Array, ...]:
        """The stored arrays: all cells."""
        return (self.block,)

    @property
    def arguments(self) -> tuple[Array, int, int, Array]:
        """The block as kernels take it."""
        return self.array, self.row0, self.col0, weights_or_none(self.weights)


class SparseBlock(NamedTuple):
    """A block as compressed sparse rows: entries ``indptr[i]:indptr[i + 1]`` are row i's.

    Attributes
    ----------
    indptr
        (m + 1,) int32; int64 where the block holds 2**31 entries or more.
    indices
        (nnz,) columns inside the block, ascending in each row, none twice; uint16
        where n <= 65536, else int32.
    values
        (nnz,) float32 or float64, the dtype of the factors. A stored NaN is a
        missing entry; it has a meaning only where ``zeros`` is True.
    m, n
        Rows and columns of the block.
    zeros
        True: an entry that is not stored is an observed zero. False: it is missing.
    weights
        (nnz,) of the cells that are stored, if they have any; others have weight 1.
    """

    indptr: NDArray[np.integer[Any]]
    indices: NDArray[np.integer[Any]]
    values: Array
    m: int
    n: int
    zeros: bool
    weights: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.m, self.n

    @property
    def cells(self) -> int:
        """Cells of the block."""
        return self.m * self.n

    @property
    def stored(self) -> tuple[Array, ...]:
        """The stored arrays: row pointers, columns and values."""
        return self.indptr, self.indices, self.values

    @property
    def arguments(self) -> tuple[Array, Array, Array, Array]:
        """The block as kernels of a matrix take it."""
        return self.indptr, self.indices, self.values, weights_or_none(self.weights)

    @property
    def entries(self) -> tuple[Array, tuple[Array], Array, Array]:
        """The block as kernels of any number of factors take it."""
        return self.indptr, (self.indices,), self.values, weights_or_none(self.weights)


class TensorBlock(NamedTuple):
    """A block of a tensor by its entries: ``indptr[i]:indptr[i + 1]`` are row i's of factor 0.

    Attributes
    ----------
    indptr
        (I_0 + 1,), of `pointer_type`.
    indices
        An array (nnz,) for each further factor, of places inside the block, of `index_type`.
    values
        (nnz,) of the dtype of the factors. A stored NaN is a missing entry; it has a
        meaning only where ``zeros`` is True.
    shape
        Indices of the block along each factor.
    zeros
        True: an entry that is not stored is an observed zero. False: it is missing.
    """

    indptr: NDArray[np.integer[Any]]
    indices: tuple[NDArray[np.integer[Any]], ...]
    values: Array
    shape: tuple[int, ...]
    zeros: bool
    weights: None = None

    @property
    def cells(self) -> int:
        """Cells of the block."""
        return math.prod(self.shape)

    @property
    def stored(self) -> tuple[Array, ...]:
        """The stored arrays: row pointers, values, and places along each further factor."""
        return self.indptr, self.values, *self.indices

    @property
    def entries(self) -> tuple[Array, tuple[Array, ...], Array, Array]:
        """The block as kernels take it."""
        return self.indptr, self.indices, self.values, NO_WEIGHTS


AnyBlock = BlockView | SparseBlock
"""A block of a matrix, dense or sparse."""
Watched = tuple[tuple[Array, ...], Array, Array, int]
"""Monitored cells of a block: places along each factor, running mean and sum of squares, count."""
Law = tuple[float, tuple[Any, ...]]
"""The smallest mean, and `Likelihood.numbers`: one may be an array (n,), a number per column."""


Block = tuple[Any, Likelihood, tuple[Array, ...], float]
"""A view of a block, the law of its entries, whose share counts, the factors, and the smallest
mean; that may be -inf for means of any sign."""
Kind = Literal["score", "ratio"]
"""Terms of an entry: the slope of its log-likelihood, or the positive part of that."""
Each = tuple[Any, ...]
"""An array for each factor, or None."""
NONE: Each = ()


class Sums(NamedTuple):
    """Arrays that gain sums over the entries of a block, for each factor; None: not needed.

    With mu the mean, floored, M 1 where V is observed, w = weight(V, mu), and products of arrays
    entry by entry. Where cells have weights, those take the place of M. "By the others" stands
    for sums over a factor's rows of the product of the other factors' rows; of a matrix, whose
    mean is W H.T, ``X by the others`` is X H for W (m, K) and X.T W for H (n, K).

    Attributes
    ----------
    terms
        (I_n, K): R by the others. A "score" is R = scale M (V - mu) w, a "ratio", the numerator of
        the multiplicative update, R = M ratio(V, mu, w).
    curvatures
        (I_n, K): C by the others, with C = M curvature(V, mu, w).
    fits
        (I_n,) float64: minus M deviance(V, mu), summed over the other factors' rows.

    Source: Şimşekli et al. 2017, eq. 6 and 7; Şimşekli et al. 2015, sections 4 and 6.
    """

    terms: Each = NONE
    curvatures: Each = NONE
    fits: Each = NONE

    @classmethod
    def of(
        cls, factor: int, n_factors: int, term: Any, curvature: Any = None, fits: Any = None
    ) -> Self:
        """Make the sums of one factor."""
        each = (
            tuple(array if n == factor else None for n in range(n_factors))
            if array is not None
            else NONE
            for array in (term, curvature, fits)
        )
        return cls(*each)

    def zeros(self) -> Self:
        """Return zeros in the places of the arrays."""
        each = (
            tuple(None if array is None else np.zeros_like(array) for array in arrays)
            for arrays in self
        )
        return type(self)(*each)

    def add(self, share: float, more: "Sums") -> None:
        """Add a share of other sums to these."""
        for arrays, gains in zip(self, more, strict=True):
            for array, gain in zip(arrays, gains, strict=True):
                if array is not None:
                    array += share * gain


def index_type(n: int) -> np.dtype[Any]:
    """Return the dtype of column numbers in a sparse block of n columns."""
    return np.dtype(np.uint16 if n <= NARROW_COLUMNS else np.int32)


def pointer_type(entries: int) -> np.dtype[Any]:
    """Return the dtype of row pointers in a sparse block with so many entries."""
    return np.dtype(np.int32 if entries < 2**31 else np.int64)


@inline
def row_cells(first: Array, i: int, n: int) -> tuple[Any, Any]:
    """Return begin and end of row i of a block; ``first`` is that of the block's arguments.

    With `cell_at` it lets one kernel serve blocks of both kinds: what does not apply to a block
    is left out when the kernel is compiled.
    """
    if first.ndim == 2:
        return 0, n
    else:
        return np.int64(first[i]), np.int64(first[i + 1])


@inline
def cell_at(first: Array, second: Any, third: Any, i: int, at: int) -> tuple[Scalar, Scalar]:
    """Return column and value (NaN: missing) of entry ``at`` of row i of a block's arguments."""
    if first.ndim == 2:
        return at, first[second + i, third + at]
    else:
        return np.int64(second[at]), third[at]


@inline
def written_row(first: Array, second: Any, third: Any, i: int, out: Array) -> Array:
    """Return row i of a block with all of its cells, given the block's arguments.

    Of a sparse block, whose unstored entries are zeros, it is written to ``out`` (n,).
    """
    if first.ndim == 2:
        return first[second + i, third : third + out.size]
    else:
        out[:] = 0
        for p in range(first[i], first[i + 1]):
            out[second[p]] = third[p]
        return out


@inline
def weight_row(first: Array, second: Any, weights: Array, i: int, out: Array) -> Array:
    """Return the weights of row i of a block as `written_row` does; `NO_WEIGHTS` without any."""
    if weights.ndim == 3:
        return weights
    elif first.ndim == 2:
        return weights[i]
    else:
        out[:] = 1
        for p in range(first[i], first[i + 1]):
            out[second[p]] = weights[p]
        return out


@inline
def row_weights(first: Array, weights: Array, i: int) -> Array:
    """Return the weights of row i of a block by the places of `row_cells`."""
    if first.ndim == 2 and weights.ndim == 2:
        return weights[i]
    else:
        return weights


@inline
def weighed(x: Scalar, weights: Array, at: int, seen: bool) -> Scalar:
    """Return the product with a weight, 0 where nothing is seen; ``x`` without weights."""
    if weights.ndim == 3:
        return x
    else:
        return x * weights[at] if seen else type(x)(0)


@inline
def floored(mu: Scalar, floor: Scalar) -> Scalar:
    """Return the larger of the two; NaN stays NaN, so that a divergence can be seen."""
    least = type(mu)(floor)
    return least if mu < least else mu


def law_at(law: Any, j: Any) -> Any:
    """Return the law of column j of a block."""
    by_column = any(isinstance(number, np.ndarray) for number in law[1])
    return _of_column(law, j) if by_column else law


def _of_column(law: Any, j: Any) -> Any:
    return law[0], (law[1][0][j],)


def _of_all(law: Any, j: Any) -> Any:
    return law


@overload(law_at, **INLINE_OPTIONS)
def _law_at(law: Any, j: Any) -> Any:
    return _of_column if any(isinstance(number, types.Array) for number in law[1]) else _of_all


@lru_cache(maxsize=64)
def entry_kernels(likelihood: Likelihood) -> Entry:
    """Compile the scalar functions of a likelihood, merged into the loops that call them."""
    functions: list[Any] = [each and inline(each) for each in likelihood.entry(polynomials)]
    return Entry(*functions)


@lru_cache(maxsize=256)
def tile_rows(m: int, n: int, K: int, itemsize: int) -> int:
    """Return the rows of a tile: as many as BLAS multiplies unpacked, if those are enough, or 192.

    Depends on shape and dtype alone, since the order of sums depends on it.
    """
    unpacked = UNPACKED_TERMS // max(1, n * K) // 16 * 16
    fast = unpacked >= min(m, FEWEST_UNPACKED_ROWS)
    rows = min(unpacked, MOST_ROWS) if fast else PACKED_ROWS
    return max(1, min(m, rows, max(16, TILE_BYTES // (n * itemsize))))


def aligned(count: int, dtype: np.dtype[Any]) -> Array:
    """Make uninitialised numbers that start on a cache line, so that no vector straddles two."""
    memory = np.empty(count * dtype.itemsize + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + count * dtype.itemsize].view(dtype)


class Workspace:
    """Kernel buffers of one thread. Not to be shared between threads.

    They are views of the same memory at every call: copy what must outlive the next one.
    """

    def __init__(self) -> None:
        self._flat: dict[str, Array] = {}
        self._views: dict[str, tuple[Any, Array]] = {}

    def _view(self, name: str, dtype: DTypeLike, *shape: int) -> Array:
        key, (last, view) = (dtype, shape), self._views.get(name, (None, None))
        if view is None or key != last:
            kind, count = np.dtype(dtype), math.prod(shape)
            flat = self._flat.get(name)
            if flat is None or flat.dtype != kind or flat.size < count:
                flat = self._flat[name] = aligned(count, kind)
            view = flat[:count].reshape(shape)
            self._views[name] = key, view
        return view

    def gradients(self, shape: tuple[int, ...], K: int, dtype: DTypeLike) -> tuple[Array, ...]:
        """Return an uninitialised gradient (I_n, K) for each factor, C-contiguous."""
        return tuple(self._view(f"G{n}", dtype, size, K) for n, size in enumerate(shape))

    def tiles(self, m: int, n: int, K: int, dtype: DTypeLike) -> tuple[Array, Array, Array]:
        """Return two tiles (T, n) and two lines, scratch of a block whose cells are all visited."""
        rows = tile_rows(m, n, K, np.dtype(dtype).itemsize)
        tiles = self._view("tile", dtype, rows, n), self._view("tile2", dtype, rows, n)
        return (*tiles, self._view("line", dtype, 2, n))

    def sums(
        self, N: int, K: int, rows: int, dtype: DTypeLike
    ) -> tuple[Array, Array, Array, Array]:
        """Return scratch of a sparse block: part (rows, K), gram (K, K).

        In float64 sums (N, K, K) and wide (64, K).
        """
        part, gram = self._view("part", dtype, rows, K), self._view("gram", dtype, K, K)
        sums = self._view("sums", np.float64, N, K, K)
        return part, gram, sums, self._view("wide", np.float64, WIDE_ROWS, K)
