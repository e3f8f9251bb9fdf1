"""Fetching memory before it is needed: for places that are known long before their turn."""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from daskfactor.kernels.jit import JIT_ENABLED

_READ, _KEEP, _DATA = 0, 3, 1  # arguments of LLVM's prefetch: to read, into all caches, no code


@intrinsic
def _prefetch(typingctx: Any, array: Any, row: Any, column: Any) -> Any:
    """Ask for the cache line of ``array[row, column]``: a hint, which reads nothing."""
    signature = types.void(array, row, column)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        held = make_array(signature.args[0])(context, builder, args[0])
        integer = context.get_value_type(types.intp)
        place = builder.ptrtoint(held.data, integer)
        strides = builder.extract_value(held.strides, 0), builder.extract_value(held.strides, 1)
        for index, stride in zip(args[1:], strides, strict=True):
            place = builder.add(place, builder.mul(builder.sext(index, integer), stride))
        pointer = ir.IntType(8).as_pointer()
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        flags = [ir.Constant(flag, value) for value in (_READ, _KEEP, _DATA)]
        builder.call(function, [builder.inttoptr(place, pointer), *flags])
        return context.get_dummy_value()

    return signature, codegen


def _nothing(array: Any, row: int, column: int) -> None:
    """Stand in for :func:`prefetch` when the JIT is off."""


# No bounds are checked and none need be: a hint about a wrong address has no effect.
prefetch: Any = _prefetch if JIT_ENABLED else _nothing
