"""Matrix products inside nogil kernels, through SciPy's BLAS, short rows as vectors, permanents.

Products
--------
Arrays are C-contiguous with the component index last. BLAS counts columns
first, so it sees each of them transposed, and every product below is asked
for transposed: no copy is ever made.

=================  =====================  ==========================
function           computes               BLAS sees
=================  =====================  ==========================
matmul_nt          out = a @ b.T          out.T = op(b.T)' @ a.T
matmul_nn          out = a @ b            out.T = b.T @ a.T
add_matmul_nn      out += a @ b           out.T += b.T @ a.T
add_matmul_tn      out += a.T @ b         out.T += b.T @ op(a.T)'
=================  =====================  ==========================

The routine is bound by symbol name, not by address, so that compiled kernels
can be cached on disk. BLAS may start its own threads: callers that run
several kernels at once set one BLAS thread first (threadpoolctl).

Rows
----
Rows of a compile-time length K are loaded, multiplied and added without a loop.
The inner loops of the sparse kernels are K long, and K is small: a loop over it
costs more in set-up and remainders than in arithmetic. Here a row is cut into
vectors of 64 bytes and a tail of halves, quarters and so on. A row that is
worked on for a while lives in a :func:`daskfactor.kernels.jit.stack_array` of
length K, called registers below, which the compiler keeps in registers, since
nothing but these functions touches it. Written as loops of K steps the sparse
gradient ran at a half to an eighth of this speed for K from 16 to 128, K known
at compile time or not, and took no less time to compile.

K must be a literal, or a constant that a closure holds; row arrays are
C-contiguous (rows, K). With the JIT off, plain NumPy stands in.
"""

import math
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import get_cython_function_address, intrinsic
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

from daskfactor.kernels.jit import JIT_ENABLED, ask_for, jit, overload

Array = NDArray[Any]
Scalar = Any

_SYMBOLS = {types.float32: "daskfactor_sgemm", types.float64: "daskfactor_dgemm"}

for _routine in ("sgemm", "dgemm"):
    llvmlite.binding.add_symbol(
        f"daskfactor_{_routine}",
        get_cython_function_address("scipy.linalg.cython_blas", _routine),
    )


@intrinsic(prefer_literal=True)
def _gemm_intrinsic(
    typingctx: Any, trans_a: Any, trans_b: Any, a: Any, b: Any, beta: Any, c: Any
) -> Any:
    """Column-major ``c = op(a) @ op(b) + beta * c``; scalars live on the caller's stack."""
    dtype = c.dtype
    if dtype not in _SYMBOLS or a.dtype != dtype or b.dtype != dtype:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        real, int32, char = context.get_data_type(dtype), ir.IntType(32), ir.IntType(8)
        one = context.get_constant(types.intp, 1)

        def pointer(value: Any) -> Any:
            return cgutils.alloca_once_value(builder, value)

        def flag(value: Any) -> Any:
            return pointer(ir.Constant(char, ord(value.literal_value)))

        def integer(value: Any) -> Any:
            return pointer(builder.trunc(value, int32))

        def matrix(index: int) -> tuple[Any, Any, Any]:
            """Data, leading dimension, and C-order shape."""
            array = make_array(signature.args[index])(context, builder, args[index])
            shape = cgutils.unpack_tuple(builder, array.shape)
            positive = builder.icmp_signed(">", shape[1], one)
            return array.data, integer(builder.select(positive, shape[1], one)), shape

        (a_data, lda, _), (b_data, ldb, b_shape), (c_data, ldc, c_shape) = map(matrix, (2, 3, 5))
        inner = b_shape[0 if signature.args[1].literal_value == "T" else 1]
        operands = [
            flag(signature.args[0]),
            flag(signature.args[1]),
            *(integer(size) for size in (c_shape[1], c_shape[0], inner)),
            pointer(ir.Constant(real, 1.0)),
            *(a_data, lda, b_data, ldb),
            pointer(ir.Constant(real, float(signature.args[4].literal_value))),
            *(c_data, ldc),
        ]
        function_type = ir.FunctionType(ir.VoidType(), [value.type for value in operands])
        function = cgutils.get_or_insert_function(builder.module, function_type, _SYMBOLS[dtype])
        builder.call(function, operands)
        return context.get_dummy_value()

    return types.void(trans_a, trans_b, a, b, beta, c), codegen


# An intrinsic is called without its typing context, which type checkers cannot know.
_gemm: Any = _gemm_intrinsic


def matmul_nt(a: Array, b: Array, out: Array) -> None:
    """``out(t, n) = a(t, K) @ b(n, K).T``."""
    np.matmul(a, b.T, out=out)


def matmul_nn(a: Array, b: Array, out: Array) -> None:
    """``out(t, K) = a(t, n) @ b(n, K)``."""
    np.matmul(a, b, out=out)


def add_matmul_nn(a: Array, b: Array, out: Array) -> None:
    """``out(t, K) += a(t, n) @ b(n, K)``."""
    out += a @ b


def add_matmul_tn(a: Array, b: Array, out: Array) -> None:
    """``out(n, K) += a(t, n).T @ b(t, K)``."""
    out += a.T @ b


def _product(trans_a: str, trans_b: str, beta: int) -> Any:
    """Implementation of a product as BLAS sees it."""

    def implementation(a: Array, b: Array, out: Array) -> None:
        _gemm(trans_a, trans_b, b, a, beta, out)

    return implementation


@overload(matmul_nt)
def _matmul_nt(a: Array, b: Array, out: Array) -> Any:
    return _product("T", "N", 0)


@overload(matmul_nn)
def _matmul_nn(a: Array, b: Array, out: Array) -> Any:
    return _product("N", "N", 0)


@overload(add_matmul_nn)
def _add_matmul_nn(a: Array, b: Array, out: Array) -> Any:
    return _product("N", "N", 1)


@overload(add_matmul_tn)
def _add_matmul_tn(a: Array, b: Array, out: Array) -> Any:
    return _product("N", "T", 1)


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


def _copy(context: Any, builder: Any, source: Row, target: Row) -> Any:
    for piece in source.pieces:
        target.store(source.load(*piece), *piece)
    return context.get_dummy_value()


def _add_scaled(context: Any, builder: Any, factor: Any, source: Row, target: Row) -> Any:
    sums = []
    for piece in source.pieces:
        scale = broadcast(builder, factor, piece[1])
        sums.append(multiply_add(builder, scale, source.load(*piece), target.load(*piece)))
    for value, piece in zip(sums, source.pieces, strict=True):
        target.store(value, *piece)
    return context.get_dummy_value()


def typed(result: Any, arguments: list[Any], codegen: Any) -> Any:
    """Signature and code, if K is a constant and every array is C-contiguous."""
    arrays = [kind for kind in arguments if isinstance(kind, types.Array)]
    fits = isinstance(arguments[0], types.IntegerLiteral)
    if not fits or any(array.layout != "C" for array in arrays):
        return None
    return result(*arguments), codegen


@intrinsic(prefer_literal=True)
def _load_row(typingctx: Any, K: Any, rows: Any, i: Any, registers: Any) -> Any:
    def codegen(*call: Any) -> Any:
        return _copy(call[0], call[1], Row(call, 1, 2), Row(call, 3))

    return typed(types.void, [K, rows, types.intp, registers], codegen)


@intrinsic(prefer_literal=True)
def _store_row(typingctx: Any, K: Any, registers: Any, rows: Any, i: Any) -> Any:
    def codegen(*call: Any) -> Any:
        return _copy(call[0], call[1], Row(call, 1), Row(call, 2, 3))

    return typed(types.void, [K, registers, rows, types.intp], codegen)


@intrinsic(prefer_literal=True)
def _dot_row(typingctx: Any, K: Any, registers: Any, rows: Any, i: Any) -> Any:
    def codegen(*call: Any) -> Any:
        return dot_product(call[1], Row(call, 1), Row(call, 2, 3))

    return typed(rows.dtype, [K, registers, rows, types.intp], codegen)


@intrinsic(prefer_literal=True)
def _add_row(typingctx: Any, K: Any, factor: Any, rows: Any, i: Any, registers: Any) -> Any:
    def codegen(*call: Any) -> Any:
        return _add_scaled(call[0], call[1], call[3][1], Row(call, 2, 3), Row(call, 4))

    return typed(types.void, [K, rows.dtype, rows, types.intp, registers], codegen)


@intrinsic(prefer_literal=True)
def _add_to_row(typingctx: Any, K: Any, factor: Any, registers: Any, rows: Any, i: Any) -> Any:
    def codegen(*call: Any) -> Any:
        return _add_scaled(call[0], call[1], call[3][1], Row(call, 2), Row(call, 3, 4))

    return typed(types.void, [K, rows.dtype, registers, rows, types.intp], codegen)


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


def _plain_load_row(K: int, rows: Array, i: int, registers: Array) -> None:
    registers[:] = rows[i]


def _plain_store_row(K: int, registers: Array, rows: Array, i: int) -> None:
    rows[i] = registers


def _plain_dot_row(K: int, registers: Array, rows: Array, i: int) -> Scalar:
    return registers @ rows[i]


def _plain_add_row(K: int, factor: Scalar, rows: Array, i: int, registers: Array) -> None:
    registers += factor * rows[i]


def _plain_add_to_row(K: int, factor: Scalar, registers: Array, rows: Array, i: int) -> None:
    rows[i] += factor * registers


def _plain_prefetch_row(K: int, rows: Array, i: int) -> None:
    pass


load_row: Any = _load_row if JIT_ENABLED else _plain_load_row
"""``registers = rows[i]``: ``load_row(K, rows, i, registers)``."""
store_row: Any = _store_row if JIT_ENABLED else _plain_store_row
"""``rows[i] = registers``: ``store_row(K, registers, rows, i)``."""
dot_row: Any = _dot_row if JIT_ENABLED else _plain_dot_row
"""``registers . rows[i]``: ``dot_row(K, registers, rows, i)``."""
add_row: Any = _add_row if JIT_ENABLED else _plain_add_row
"""``registers += factor rows[i]``: ``add_row(K, factor, rows, i, registers)``."""
add_to_row: Any = _add_to_row if JIT_ENABLED else _plain_add_to_row
"""``rows[i] += factor registers``: ``add_to_row(K, factor, registers, rows, i)``."""
prefetch_row: Any = _prefetch_row if JIT_ENABLED else _plain_prefetch_row
"""Ask for ``rows[i]`` to be in the cache soon: ``prefetch_row(K, rows, i)``."""


@jit
def _add_logs(a: float, b: float) -> float:
    """``log(exp(a) + exp(b))``."""
    if a < b:
        a, b = b, a
    return a if b == -np.inf else a + math.log1p(math.exp(b - a))


@jit
def log_permanent(logs: Array, table: Array) -> float:
    """``log sum over permutations p of prod_k exp(logs[k, p(k)])``, nothing cancelled.

    Over subsets of columns, K 2**(K - 1) additions: table[set] is the sum over the ways to
    match the first rows, as many as the set has columns, with the set.

    Parameters
    ----------
    logs : (K, K) float64
    table : (2**K,) float64, scratch

    Notes
    -----
    By the rule of Held and Karp; Ryser's formula is as fast but takes differences.
    """
    K = logs.shape[0]
    table[0] = 0.0
    for chosen in range(1, 1 << K):
        row = -1
        for column in range(K):
            row += (chosen >> column) & 1
        total = -np.inf
        for column in range(K):
            if (chosen >> column) & 1:
                total = _add_logs(total, table[chosen ^ (1 << column)] + logs[row, column])
        table[chosen] = total
    return table[(1 << K) - 1]
