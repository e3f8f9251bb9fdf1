"""Rows of K numbers copied, multiplied and added as vectors, where K is known to the compiler.

Every row is (array, index): row ``index`` of a C-contiguous array of rows, or numbers
``index K : (index + 1) K`` of a 1-D one, such as scratch on the stack.

The inner loops of the sparse kernels are K long, and K is small: a loop over it
costs more in set-up and remainders than in arithmetic. Here a row is cut into
vectors of 64 bytes and a tail of halves, quarters and so on. A row that is
worked on for a while lives in a :func:`daskfactor.kernels.jit.stack_array` of
length K, which the compiler keeps in registers, since
nothing but these functions touches it. Written as loops of K steps the sparse
gradient ran at a half to an eighth of this speed for K from 16 to 128, K known
at compile time or not, and took no less time to compile.

K must be a literal, or a constant that a closure holds. With the JIT off, plain NumPy stands in.
"""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

from daskfactor.kernels.jit import JIT_ENABLED, ask_for

Array = NDArray[Any]
Scalar = Any

VECTOR_BYTES = 64
CACHE_LINE = 64
MOST_PREFETCHED = 8 * CACHE_LINE
"""Longer rows are left to the hardware, which follows a stream by itself."""

# Fused multiply-adds are allowed, reordering is not: one order of sums per K.
_FLAGS = ("contract",)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_BYTE_POINTER = ir.IntType(8).as_pointer()


def pieces(count: int, itemsize: int) -> list[tuple[int, int]]:
    """``(start, width)`` of the vectors that cover ``count`` numbers; widths never grow."""
    result, start, width = [], 0, VECTOR_BYTES // itemsize
    while start < count:
        while width > count - start:
            width //= 2
        result.append((start, width))
        start += width
    return result


Call = tuple[Any, Any, Any, Any]
"""Context, builder, signature and arguments: what code generation is given."""


class Row:
    """K numbers in memory: a row of an array argument, or all of a 1-D array.

    ``index`` is the number of the argument that says which row, or that row as a constant.
    """

    def __init__(self, call: Call, argument: int, index: Any = None) -> None:
        context, builder, signature, args = call
        array_type = signature.args[argument]
        self.builder = builder
        self.real = context.get_data_type(array_type.dtype)
        self.itemsize = context.get_abi_sizeof(self.real)
        self.length = signature.args[0].literal_value
        self.data = make_array(array_type)(context, builder, args[argument]).data
        if index is not None:
            length = ir.Constant(_INT64, self.length)
            row = args[index] if isinstance(index, int) else index
            self.data = builder.gep(self.data, [builder.mul(row, length)])

    @property
    def pieces(self) -> list[tuple[int, int]]:
        return pieces(self.length, self.itemsize)

    def _pointer(self, start: int, width: int) -> Any:
        address = self.builder.gep(self.data, [ir.Constant(_INT64, start)])
        return self.builder.bitcast(address, ir.VectorType(self.real, width).as_pointer())

    def load(self, start: int, width: int) -> Any:
        return self.builder.load(self._pointer(start, width), align=self.itemsize)

    def store(self, value: Any, start: int, width: int) -> None:
        self.builder.store(value, self._pointer(start, width), align=self.itemsize)


def _lanes(builder: Any, vector: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def broadcast(builder: Any, value: Any, width: int) -> Any:
    empty = ir.Constant(ir.VectorType(value.type, width), ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(_INT32, 0))
    return _lanes(builder, first, [0] * width)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=_FLAGS), c, flags=_FLAGS)


def dot_product(builder: Any, a: Row, b: Row) -> Any:
    """Sum of products: in vectors, then halved down, tails joining at their own width."""
    width, total = VECTOR_BYTES // a.itemsize, None
    ahead = a.pieces
    while True:
        while ahead and ahead[0][1] == width:
            x, y = a.load(*ahead[0]), b.load(*ahead[0])
            product = builder.fmul(x, y, flags=_FLAGS)
            total = product if total is None else builder.fadd(total, product, flags=_FLAGS)
            del ahead[0]
        if width == 1:
            return builder.extract_element(total, ir.Constant(_INT32, 0))
        width //= 2
        if total is not None:
            low = _lanes(builder, total, list(range(width)))
            high = _lanes(builder, total, list(range(width, 2 * width)))
            total = builder.fadd(low, high, flags=_FLAGS)


def typed(result: Any, arguments: list[Any], codegen: Any) -> Any:
    """Signature and code, if K is a constant and every array is C-contiguous."""
    arrays = [kind for kind in arguments if isinstance(kind, types.Array)]
    fits = isinstance(arguments[0], types.IntegerLiteral)
    if not fits or any(array.layout != "C" for array in arrays):
        return None
    return result(*arguments), codegen


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
        source, target, sums = Row(call, 2, 3), Row(call, 4, 5), []
        for piece in source.pieces:
            scale = broadcast(call[1], call[3][1], piece[1])
            sums.append(multiply_add(call[1], scale, source.load(*piece), target.load(*piece)))
        for value, piece in zip(sums, source.pieces, strict=True):
            target.store(value, *piece)
        return call[0].get_dummy_value()

    return typed(types.void, [K, a.dtype, a, types.intp, out, types.intp], codegen)


@intrinsic(prefer_literal=True)
def _copy_row(typingctx: Any, K: Any, a: Any, i: Any, out: Any, o: Any) -> Any:
    def codegen(*call: Any) -> Any:
        source, target = Row(call, 1, 2), Row(call, 3, 4)
        for piece in source.pieces:
            target.store(source.load(*piece), *piece)
        return call[0].get_dummy_value()

    return typed(types.void, [K, a, types.intp, out, types.intp], codegen)


@intrinsic(prefer_literal=True)
def _prefetch_row(typingctx: Any, K: Any, rows: Any, i: Any) -> Any:
    def codegen(*call: Any) -> Any:
        builder, row = call[1], Row(call, 1, 2)
        base = builder.bitcast(row.data, _BYTE_POINTER)
        for offset in _prefetched(row.length * row.itemsize):
            ask_for(builder, builder.gep(base, [ir.Constant(_INT64, offset)]))
        return call[0].get_dummy_value()

    return typed(types.void, [K, rows, types.intp], codegen)


def _prefetched(size: int) -> list[int]:
    """Bytes of a row that touch all its cache lines, however it is aligned."""
    if size > MOST_PREFETCHED:
        return [0]
    lines = list(range(0, size, CACHE_LINE))
    return lines if size % CACHE_LINE == 0 else [*lines, size - 1]


def _row(K: int, rows: Array, i: int) -> Array:
    return rows.reshape(-1, K)[i]


def _plain_copy_row(K: int, a: Array, i: int, out: Array, o: int) -> None:
    _row(K, out, o)[:] = _row(K, a, i)


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


def _plain_prefetch_row(K: int, rows: Array, i: int) -> None:
    pass


copy_row: Any = _copy_row if JIT_ENABLED else _plain_copy_row
"""``out[o] = a[i]``: ``copy_row(K, a, i, out, o)``."""
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
prefetch_row: Any = _prefetch_row if JIT_ENABLED else _plain_prefetch_row
"""Ask for ``rows[i]`` to be in the cache soon: ``prefetch_row(K, rows, i)``."""
