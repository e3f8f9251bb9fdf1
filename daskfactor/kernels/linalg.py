"""Matrix products inside nogil kernels, through SciPy's BLAS, and permanents.

Arrays are C-contiguous with the component index last. BLAS counts columns
first, so it sees each of them transposed, and every product below is computed
transposed: no copy is ever made.

=================  =====================  ==========================
function           computes               BLAS sees
=================  =====================  ==========================
matmul_nt          out = a @ b.T          out.T = op(b.T)' @ a.T
add_matmul_nn      out += a @ b           out.T += b.T @ a.T
add_matmul_tn      out += a.T @ b         out.T += b.T @ op(a.T)'
=================  =====================  ==========================

The routine is bound by symbol name, not by address, so that compiled kernels
can be cached on disk. BLAS may start its own threads: callers that run
several kernels at once set one BLAS thread first (threadpoolctl).
"""

from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import get_cython_function_address, intrinsic
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

from daskfactor.kernels.jit import jit, overload

Array = NDArray[Any]

_SYMBOLS = {types.float32: "daskfactor_sgemm", types.float64: "daskfactor_dgemm"}

for _routine in ("sgemm", "dgemm"):
    _address = get_cython_function_address("scipy.linalg.cython_blas", _routine)
    llvmlite.binding.add_symbol(f"daskfactor_{_routine}", _address)


@intrinsic(prefer_literal=True)
def _gemm_intrinsic(
    typingctx: Any, trans_a: Any, trans_b: Any, a: Any, b: Any, beta: Any, c: Any
) -> Any:
    """Compute ``c = op(a) @ op(b) + beta * c``, column-major, with scalars on the stack."""
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
            """Return data, leading dimension, and C-order shape."""
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
    """Compute ``out(t, n) = a(t, K) @ b(n, K).T``."""
    np.matmul(a, b.T, out=out)


def add_matmul_nn(a: Array, b: Array, out: Array) -> None:
    """Compute ``out(t, K) += a(t, n) @ b(n, K)``."""
    out += a @ b


def add_matmul_tn(a: Array, b: Array, out: Array) -> None:
    """Compute ``out(n, K) += a(t, n).T @ b(t, K)``."""
    out += a.T @ b


def _implement(function: Any, trans_a: str, trans_b: str, beta: int) -> None:
    """Let compiled code call BLAS in place of a product."""

    @overload(function)
    def choose(a: Array, b: Array, out: Array) -> Any:
        def implementation(a: Array, b: Array, out: Array) -> None:
            _gemm(trans_a, trans_b, b, a, beta, out)

        return implementation


_implement(matmul_nt, "T", "N", 0)
_implement(add_matmul_nn, "N", "N", 1)
_implement(add_matmul_tn, "N", "T", 1)


@jit
def log_permanent(logs: Array, table: Array) -> float:
    """Return ``log sum over permutations p of prod_k exp(logs[k, p(k)])``, nothing cancelled.

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
                rest = table[chosen ^ (1 << column)]
                total = np.logaddexp(total, rest + logs[row, column])
        table[chosen] = total
    return table[(1 << K) - 1]
