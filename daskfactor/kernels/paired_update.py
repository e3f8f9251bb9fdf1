"""Both rows of an entry moved at once, each by what the other was: one step of descent.

The two rows are read, moved and written vector by vector, K known when it is
compiled, so that nothing has to be kept of the old rows (see ``vectors.py`` on why
not in loops).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

from daskfactor.kernels.jit import JIT_ENABLED
from daskfactor.kernels.vectors import pieces

Array = NDArray[Any]
Scalar = Any

# Fused multiply-adds are allowed, reordering is not: sparse and dense give the same bits.
_FLAGS = ("contract",)
_INT32, _INT64 = ir.IntType(32), ir.IntType(64)


@lru_cache(maxsize=3)
def meeting(projected: bool, partly: bool = False) -> Any:
    """``meet(K, e, a, b, w, H, j, col_w, col_h)``, in place on w (K,) and H[j].

    With h = H[j] and both sides from the old values, projected:

        w <- max(w + e h - a pull_w, 0)       h <- max(h + e w - b pull_h, 0)

    or, ``partly``, with ``e free_w h`` and ``e free_h w`` in place of ``e h`` and ``e w``;
    and otherwise, with m, pull and free the rows of ``col_w`` and of ``col_h`` (3, K):

        w <- w + e free_w h - a pull_w (w - m_w)    h <- h + e free_h w - b pull_h (h - m_h)

    K must be a literal, or a constant that a closure holds; w is best a
    :func:`daskfactor.kernels.jit.stack_array`.
    """
    if not JIT_ENABLED:
        return _plain(projected)
    if not projected:
        return _compiled(_real_valued)
    return _compiled(_partly_projected if partly else _projected)


class _Numbers:
    """K numbers in memory, from a pointer on."""

    def __init__(self, builder: Any, data: Any, itemsize: int) -> None:
        self.builder, self.data, self.itemsize = builder, data, itemsize

    def row(self, index: Any, length: int) -> "_Numbers":
        """The row ``index`` of a C-contiguous (rows, length)."""
        offset = self.builder.mul(index, ir.Constant(_INT64, length))
        return _Numbers(self.builder, self.builder.gep(self.data, [offset]), self.itemsize)

    def _pointer(self, start: int, width: int) -> Any:
        address = self.builder.gep(self.data, [ir.Constant(_INT64, start)])
        real = self.data.type.pointee
        return self.builder.bitcast(address, ir.VectorType(real, width).as_pointer())

    def load(self, start: int, width: int) -> Any:
        return self.builder.load(self._pointer(start, width), align=self.itemsize)

    def store(self, value: Any, start: int, width: int) -> None:
        self.builder.store(value, self._pointer(start, width), align=self.itemsize)


def _broadcast(builder: Any, value: Any, width: int) -> Any:
    empty = ir.Constant(ir.VectorType(value.type, width), ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(_INT32, 0))
    lanes = ir.Constant(ir.VectorType(_INT32, width), [0] * width)
    return builder.shuffle_vector(first, empty, lanes)


def _multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.fadd(builder.fmul(x, y, flags=_FLAGS), z, flags=_FLAGS)


Column = tuple[Any, Any, Any]
Rule = Callable[[Any, Any, Any, Any, Any, Column], Any]


def _projected(builder: Any, e: Any, own: Any, other: Any, share: Any, column: Column) -> Any:
    moved = _multiply_add(builder, e, other, own)
    moved = builder.fsub(moved, builder.fmul(share, column[1]))
    zero = ir.Constant(moved.type, None)
    return builder.select(builder.fcmp_ordered(">", moved, zero), moved, zero)


def _partly_projected(
    builder: Any, e: Any, own: Any, other: Any, share: Any, column: Column
) -> Any:
    return _projected(builder, builder.fmul(e, column[2]), own, other, share, column)


def _real_valued(builder: Any, e: Any, own: Any, other: Any, share: Any, column: Column) -> Any:
    mean, pull, free = column
    moved = _multiply_add(builder, builder.fmul(e, free), other, own)
    away = builder.fmul(builder.fmul(share, pull), builder.fsub(own, mean))
    return builder.fsub(moved, away)


def _compiled(rule: Rule) -> Any:
    @intrinsic(prefer_literal=True)
    def meet(
        typingctx: Any,
        K: Any,
        e: Any,
        a: Any,
        b: Any,
        w: Any,
        H: Any,
        j: Any,
        col_w: Any,
        col_h: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            length = signature.args[0].literal_value
            size = context.get_abi_sizeof(context.get_data_type(H.dtype))
            left, whole, *tables = (
                _Numbers(builder, make_array(kind)(context, builder, args[at]).data, size)
                for at, kind in ((4, w), (5, H), (7, col_w), (8, col_h))
            )
            right = whole.row(args[6], length)
            columns = [[t.row(ir.Constant(_INT64, at), length) for at in range(3)] for t in tables]
            for piece in pieces(length, size):
                x, y = left.load(*piece), right.load(*piece)
                move, *shares = (_broadcast(builder, args[at], piece[1]) for at in (1, 2, 3))
                first, second = (tuple(row.load(*piece) for row in own) for own in columns)
                left.store(rule(builder, move, x, y, shares[0], first), *piece)
                right.store(rule(builder, move, y, x, shares[1], second), *piece)
            return context.get_dummy_value()

        real = H.dtype
        return types.void(K, real, real, real, w, H, types.intp, col_w, col_h), codegen

    return meet


def _plain(projected: bool) -> Callable[..., None]:
    def meet(
        K: int,
        e: Scalar,
        a: Scalar,
        b: Scalar,
        w: Array,
        H: Array,
        j: int,
        col_w: Array,
        col_h: Array,
    ) -> None:
        x, y = w.copy(), H[j].copy()
        for row, old, other, share, column in ((w, x, y, a, col_w), (H[j], y, x, b, col_h)):
            if projected:
                row[:] = np.maximum(old + e * column[2] * other - share * column[1], 0)
            else:
                row[:] = old + e * column[2] * other - share * column[1] * (old - column[0])

    return meet
