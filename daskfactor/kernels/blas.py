"""Matrix products inside nogil kernels, through SciPy's BLAS.

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
"""

from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import get_cython_function_address, intrinsic, overload
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

_SYMBOLS = {types.float32: "daskfactor_sgemm", types.float64: "daskfactor_dgemm"}

for _routine in ("sgemm", "dgemm"):
    llvmlite.binding.add_symbol(
        f"daskfactor_{_routine}",
        get_cython_function_address("scipy.linalg.cython_blas", _routine),
    )


@intrinsic(prefer_literal=True)
def _gemm_intrinsic(
    typingctx: Any,
    trans_a: Any,
    trans_b: Any,
    m: Any,
    n: Any,
    k: Any,
    a: Any,
    b: Any,
    beta: Any,
    c: Any,
) -> Any:
    """Column-major ``c = op(a) @ op(b) + beta * c``; scalars live on the caller's stack."""
    dtype = c.dtype
    if dtype not in _SYMBOLS or a.dtype != dtype or b.dtype != dtype:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        real, int32, char = context.get_data_type(dtype), ir.IntType(32), ir.IntType(8)

        def pointer(value: Any) -> Any:
            return cgutils.alloca_once_value(builder, value)

        def flag(value: Any) -> Any:
            return pointer(ir.Constant(char, ord(value.literal_value)))

        def integer(value: Any) -> Any:
            return pointer(builder.trunc(value, int32))

        def matrix(index: int) -> tuple[Any, Any]:
            array = make_array(signature.args[index])(context, builder, args[index])
            columns = cgutils.unpack_tuple(builder, array.shape)[1]
            one = context.get_constant(types.intp, 1)
            positive = builder.icmp_signed(">", columns, one)
            return array.data, integer(builder.select(positive, columns, one))

        (a_data, lda), (b_data, ldb), (c_data, ldc) = (matrix(i) for i in (5, 6, 8))
        operands = [
            flag(signature.args[0]),
            flag(signature.args[1]),
            *(integer(args[i]) for i in (2, 3, 4)),
            pointer(ir.Constant(real, 1.0)),
            a_data,
            lda,
            b_data,
            ldb,
            pointer(ir.Constant(real, float(signature.args[7].literal_value))),
            c_data,
            ldc,
        ]
        function_type = ir.FunctionType(ir.VoidType(), [value.type for value in operands])
        function = cgutils.get_or_insert_function(builder.module, function_type, _SYMBOLS[dtype])
        builder.call(function, operands)
        return context.get_dummy_value()

    intp = types.intp
    return types.void(trans_a, trans_b, intp, intp, intp, a, b, beta, c), codegen


# An intrinsic is called without its typing context, which type checkers cannot know.
_gemm: Any = _gemm_intrinsic


def matmul_nt(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None:
    """``out(t, n) = a(t, K) @ b(n, K).T``."""
    np.matmul(a, b.T, out=out)


def matmul_nn(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None:
    """``out(t, K) = a(t, n) @ b(n, K)``."""
    np.matmul(a, b, out=out)


def add_matmul_nn(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None:
    """``out(t, K) += a(t, n) @ b(n, K)``."""
    out += a @ b


def add_matmul_tn(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None:
    """``out(n, K) += a(t, n).T @ b(t, K)``."""
    out += a.T @ b


def _product(trans_a: str, trans_b: str, inner: int, beta: int) -> Any:
    """Implementation of a product; ``inner`` is the axis of ``a`` that is summed over."""

    def implementation(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None:
        _gemm(trans_a, trans_b, out.shape[1], out.shape[0], a.shape[inner], b, a, beta, out)

    return implementation


@overload(matmul_nt)
def _matmul_nt(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> Any:
    return _product("T", "N", 1, 0)


@overload(matmul_nn)
def _matmul_nn(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> Any:
    return _product("N", "N", 1, 0)


@overload(add_matmul_nn)
def _add_matmul_nn(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> Any:
    return _product("N", "N", 1, 1)


@overload(add_matmul_tn)
def _add_matmul_tn(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> Any:
    return _product("N", "T", 0, 1)
