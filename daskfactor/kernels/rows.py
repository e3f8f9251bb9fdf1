"""Rows of K numbers combined entry by entry, as vectors, where K is known to the compiler.

Every row is (array, index): row ``index`` of a C-contiguous array of rows, or numbers
``index K : (index + 1) K`` of a 1-D one, such as scratch on the stack.
"""

from typing import Any

from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from daskfactor.kernels.jit import JIT_ENABLED
from daskfactor.kernels.linalg import Row, broadcast, dot_product, multiply_add, typed

Array = NDArray[Any]
Scalar = Any


@intrinsic(prefer_literal=True)
def _dot_rows(typingctx: Any, K: Any, a: Any, i: Any, b: Any, j: Any) -> Any:
    def codegen(*call: Any) -> Any:
        return dot_product(call[1], Row(call, 1, 2), Row(call, 3, 4))

    return typed(b.dtype, [K, a, types.intp, b, types.intp], codegen)


@intrinsic(prefer_literal=True)
def _multiply_rows(typingctx: Any, K: Any, a: Any, i: Any, b: Any, j: Any, out: Any, o: Any) -> Any:
    def codegen(*call: Any) -> Any:
        left, right, target = Row(call, 1, 2), Row(call, 3, 4), Row(call, 5, 6)
        for piece in left.pieces:
            target.store(call[1].fmul(left.load(*piece), right.load(*piece)), *piece)
        return call[0].get_dummy_value()

    return typed(types.void, [K, a, types.intp, b, types.intp, out, types.intp], codegen)


@intrinsic(prefer_literal=True)
def _add_products(typingctx: Any, K: Any, a: Any, i: Any, b: Any, j: Any, out: Any, o: Any) -> Any:
    def codegen(*call: Any) -> Any:
        left, right, target = Row(call, 1, 2), Row(call, 3, 4), Row(call, 5, 6)
        for piece in left.pieces:
            terms = left.load(*piece), right.load(*piece), target.load(*piece)
            target.store(multiply_add(call[1], *terms), *piece)
        return call[0].get_dummy_value()

    return typed(types.void, [K, a, types.intp, b, types.intp, out, types.intp], codegen)


@intrinsic(prefer_literal=True)
def _scale_row(typingctx: Any, K: Any, factor: Any, a: Any, i: Any, out: Any, o: Any) -> Any:
    def codegen(*call: Any) -> Any:
        source, target = Row(call, 2, 3), Row(call, 4, 5)
        for piece in source.pieces:
            scale = broadcast(call[1], call[3][1], piece[1])
            target.store(call[1].fmul(scale, source.load(*piece)), *piece)
        return call[0].get_dummy_value()

    return typed(types.void, [K, a.dtype, a, types.intp, out, types.intp], codegen)


@intrinsic(prefer_literal=True)
def _add_scaled(typingctx: Any, K: Any, factor: Any, a: Any, i: Any, out: Any, o: Any) -> Any:
    def codegen(*call: Any) -> Any:
        source, target = Row(call, 2, 3), Row(call, 4, 5)
        for piece in source.pieces:
            scale = broadcast(call[1], call[3][1], piece[1])
            terms = scale, source.load(*piece), target.load(*piece)
            target.store(multiply_add(call[1], *terms), *piece)
        return call[0].get_dummy_value()

    return typed(types.void, [K, a.dtype, a, types.intp, out, types.intp], codegen)


def _row(K: int, rows: Array, i: int) -> Array:
    return rows.reshape(-1, K)[i]


def _plain_dot_rows(K: int, a: Array, i: int, b: Array, j: int) -> Scalar:
    return _row(K, a, i) @ _row(K, b, j)


def _plain_multiply_rows(K: int, a: Array, i: int, b: Array, j: int, out: Array, o: int) -> None:
    _row(K, out, o)[:] = _row(K, a, i) * _row(K, b, j)


def _plain_add_products(K: int, a: Array, i: int, b: Array, j: int, out: Array, o: int) -> None:
    _row(K, out, o)[:] += _row(K, a, i) * _row(K, b, j)


def _plain_scale_row(K: int, factor: Scalar, a: Array, i: int, out: Array, o: int) -> None:
    _row(K, out, o)[:] = factor * _row(K, a, i)


def _plain_add_scaled(K: int, factor: Scalar, a: Array, i: int, out: Array, o: int) -> None:
    _row(K, out, o)[:] += factor * _row(K, a, i)


dot_rows: Any = _dot_rows if JIT_ENABLED else _plain_dot_rows
"""``a[i] . b[j]``: ``dot_rows(K, a, i, b, j)``."""
multiply_rows: Any = _multiply_rows if JIT_ENABLED else _plain_multiply_rows
"""``out[o] = a[i] b[j]``: ``multiply_rows(K, a, i, b, j, out, o)``."""
add_products: Any = _add_products if JIT_ENABLED else _plain_add_products
"""``out[o] += a[i] b[j]``: ``add_products(K, a, i, b, j, out, o)``."""
scale_row: Any = _scale_row if JIT_ENABLED else _plain_scale_row
"""``out[o] = factor a[i]``: ``scale_row(K, factor, a, i, out, o)``."""
add_scaled: Any = _add_scaled if JIT_ENABLED else _plain_add_scaled
"""``out[o] += factor a[i]``: ``add_scaled(K, factor, a, i, out, o)``."""
