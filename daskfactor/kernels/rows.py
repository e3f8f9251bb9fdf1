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

from functools import reduce
from inspect import Parameter, Signature
from operator import mul
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.cgutils import get_or_insert_function
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

from daskfactor.kernels.jit import JIT_ENABLED, ask_for

Array = NDArray[Any]

VECTOR_BYTES = 64
CACHE_LINE = 64
MOST_PREFETCHED = 8 * CACHE_LINE
"""Longer rows are left to the hardware, which follows a stream by itself."""

# Fused by name where the processor can. Left to the compiler, which products are fused would
# depend on the code around them, and so the last bits on who calls a kernel.
# numba may be told to compile for another processor than this one.
_TARGET, _, _FEATURES = cpu_target.target_context.codegen().magic_tuple()
_FUSES = "+fma" in _FEATURES.split(",") or _TARGET.startswith(("aarch64", "arm64"))
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_BYTE_POINTER = ir.IntType(8).as_pointer()


def pieces(count: int, itemsize: int) -> list[tuple[int, int]]:
    """Return ``(start, width)`` of the vectors that cover ``count`` numbers; widths never grow."""
    result, start, width = [], 0, VECTOR_BYTES // itemsize
    while start < count:
        while width > count - start:
            width //= 2
        result.append((start, width))
        start += width
    return result


Call = tuple[Any, Any, Any, Any]
"""Context, builder, signature and arguments of code generation."""


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
    if not _FUSES:
        return builder.fadd(builder.fmul(a, b), c)
    lanes, real = a.type.count, {"float": "f32", "double": "f64"}[str(a.type.element)]
    kind = ir.FunctionType(a.type, [a.type] * 3)
    fma = get_or_insert_function(builder.module, kind, f"llvm.fma.v{lanes}{real}")
    return builder.call(fma, [a, b, c])


def dot_product(builder: Any, a: Row, b: Row) -> Any:
    """Return the sum of products: in vectors, then halved down; tails join at their width."""
    width, total = VECTOR_BYTES // a.itemsize, None
    ahead = a.pieces
    while True:
        while ahead and ahead[0][1] == width:
            x, y = a.load(*ahead[0]), b.load(*ahead[0])
            total = builder.fmul(x, y) if total is None else multiply_add(builder, x, y, total)
            del ahead[0]
        if width == 1:
            return builder.extract_element(total, ir.Constant(_INT32, 0))
        width //= 2
        if total is not None:
            low = _lanes(builder, total, list(range(width)))
            high = _lanes(builder, total, list(range(width, 2 * width)))
            total = builder.fadd(low, high)


def typed(result: Any, arguments: list[Any], codegen: Any) -> Any:
    """Return signature and code, if K is a constant and every array is C-contiguous."""
    arrays = [kind for kind in arguments if isinstance(kind, types.Array)]
    fits = isinstance(arguments[0], types.IntegerLiteral)
    if not fits or any(array.layout != "C" for array in arrays):
        return None
    return result(*arguments), codegen


def _operation(function: Any, plain: Any) -> Any:
    """Compile code generation; ``plain`` stands in when the JIT is off."""
    made: Any = intrinsic(prefer_literal=True)(function)
    made.plain = plain
    return made if JIT_ENABLED else plain


def _row(K: int, rows: Array, i: int) -> Array:
    return rows.reshape(-1, K)[i]


def _dot_rows(typingctx: Any, K: Any, a: Any, i: Any, b: Any, j: Any) -> Any:
    def codegen(*call: Any) -> Any:
        return dot_product(call[1], Row(call, 1, 2), Row(call, 3, 4))

    return typed(b.dtype, [K, a, types.intp, b, types.intp], codegen)


def _set_row(sources: int, scaled: bool = False, add: bool = False) -> Any:
    """Make the operation that sets a row to the product of others, or adds it.

    Its arguments are K, a number if ``scaled``, each of the ``sources``, and the row that is set.
    """

    def plain(K: int, *values: Any) -> None:
        pairs = zip(values[scaled::2], values[scaled + 1 :: 2], strict=True)
        *rows, target = [_row(K, *pair) for pair in pairs]
        product = reduce(mul, [*values[:scaled], *rows])
        target[:] = target + product if add else product

    def compiled(typingctx: Any, K: Any, *kinds: Any) -> Any:
        def codegen(*call: Any) -> Any:
            builder, values = call[1], []
            *rows, target = [Row(call, n, n + 1) for n in range(1 + scaled, len(call[3]), 2)]
            for piece in target.pieces:
                terms = [row.load(*piece) for row in rows]
                if scaled:
                    terms.insert(0, broadcast(builder, call[3][1], piece[1]))
                if add:
                    terms = [multiply_add(builder, terms[0], terms[1], target.load(*piece))]
                values.append(terms[0] if len(terms) == 1 else builder.fmul(*terms))
            for value, piece in zip(values, target.pieces, strict=True):
                target.store(value, *piece)
            return call[0].get_dummy_value()

        arrays = [kind for array in kinds[scaled::2] for kind in (array, types.intp)]
        numbers = [kinds[1].dtype] if scaled else []
        return typed(types.void, [K, *numbers, *arrays], codegen)

    # numba wants a fixed number of arguments.
    names = ["typingctx", "K", *(f"value{n}" for n in range(scaled + 2 * sources + 2))]
    parameters = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in names]
    vars(compiled)["__signature__"] = Signature(parameters)
    return _operation(compiled, plain)


def _prefetch_row(typingctx: Any, K: Any, rows: Any, i: Any) -> Any:
    def codegen(*call: Any) -> Any:
        builder, row = call[1], Row(call, 1, 2)
        base = builder.bitcast(row.data, _BYTE_POINTER)
        for offset in _prefetched(row.length * row.itemsize):
            ask_for(builder, builder.gep(base, [ir.Constant(_INT64, offset)]))
        return call[0].get_dummy_value()

    return typed(types.void, [K, rows, types.intp], codegen)


def _prefetched(size: int) -> list[int]:
    """Return offsets of bytes of a row that touch all its cache lines, however it is aligned."""
    if size > MOST_PREFETCHED:
        return [0]
    lines = list(range(0, size, CACHE_LINE))
    return lines if size % CACHE_LINE == 0 else [*lines, size - 1]


copy_row = _set_row(1)
"""``out[o] = a[i]``: ``copy_row(K, a, i, out, o)``."""
dot_rows = _operation(_dot_rows, lambda K, a, i, b, j: _row(K, a, i) @ _row(K, b, j))
"""``a[i] . b[j]``: ``dot_rows(K, a, i, b, j)``."""
multiply_rows = _set_row(2)
"""``out[o] = a[i] b[j]``: ``multiply_rows(K, a, i, b, j, out, o)``."""
add_products = _set_row(2, add=True)
"""``out[o] += a[i] b[j]``: ``add_products(K, a, i, b, j, out, o)``."""
scale_row = _set_row(1, scaled=True)
"""``out[o] = factor a[i]``: ``scale_row(K, factor, a, i, out, o)``."""
add_scaled = _set_row(1, scaled=True, add=True)
"""``out[o] += factor a[i]``: ``add_scaled(K, factor, a, i, out, o)``."""
prefetch_row = _operation(_prefetch_row, lambda K, rows, i: None)
"""Prefetch ``rows[i]``: ``prefetch_row(K, rows, i)``."""
