"""The one place where numba's compiler options are set.

No ``parallel=True``: parallelism is across blocks, and two threads inside one
parallel kernel can abort the process. NaN marks missing entries, so the
``nnan`` and ``ninf`` fast-math flags stay off. What is compiled is kept on disk
(:mod:`daskfactor.kernels.cache`).

Two grades of arithmetic: :func:`jit` may reorder and fuse (gradients, sums);
:func:`jit_exact` follows IEEE 754 operation by operation, so the noise and the
updates have the same bits on every CPU and however rows are split into bands.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.extending import overload as numba_overload
from numba.np.arrayobj import make_array, populate_array

from daskfactor.kernels.cache import OVERLOADS, KernelCache, cache_folder

F = TypeVar("F", bound=Callable[..., Any])

FAST = {"contract": True, "reassoc": True, "nsz": True}  # in one order, unlike a set
# fastmath=False is not idle: left unset, numba takes the flags of whichever kernel happens
# to compile the function first, and bits would depend on the order of the first calls.
EXACT: Any = {"fastmath": False, "error_model": "numpy"}
INLINE_OPTIONS: Any = EXACT | {"forceinline": True}
CACHE = cache_folder()
# getattr: numba fills its configuration in at run time, where type checkers do not see it.
JIT_ENABLED = not getattr(numba.config, "DISABLE_JIT", False)


def _refuse(*_: Any, **__: Any) -> Any:
    raise TypeError("this function is for compiled functions to call: Python cannot")


def _compiled(function: F, inner: bool, **options: Any) -> F:
    ways_in: Any = {"no_cfunc_wrapper": True, "no_cpython_wrapper": inner}
    dispatcher: Any = numba.njit(nogil=True, **ways_in, **options)(function)
    if JIT_ENABLED:
        typed = dispatcher.get_call_template
        # A kernel that passes 0 to another would have it compiled for this number alone and,
        # where the number changes in a loop, for all integers as well.
        dispatcher.get_call_template = lambda args, named: typed(
            [types.unliteral(each) for each in args],
            {name: types.unliteral(each) for name, each in named.items()},
        )
        if inner:  # or else a call from Python, through an address of 0, would end the process
            dispatcher._insert, dispatcher._compile_for_args = lambda *_, **__: None, _refuse
        if CACHE:
            dispatcher._cache = KernelCache(dispatcher, CACHE)
    return cast("F", dispatcher)


def jit(function: F, inner: bool = False) -> F:
    """Compile ``function`` without the GIL and with NaN-respecting fast math.

    Only compiled functions can call an ``inner`` one: it has no Python wrapper, which saves up to
    0.1 s, and it becomes a part of its callers. As a function of its own it would be there twice,
    alone and in the caller's file, optimized differently, and whether a kernel is compiled or
    read from the cache would decide which of them is called.
    """
    return _compiled(function, inner, fastmath=FAST, error_model="numpy", forceinline=inner)


def jit_exact(function: F, inner: bool = False) -> F:
    """Compile ``function`` without the GIL and with strict IEEE 754 arithmetic.

    An ``inner`` one has no Python wrapper; its bits are the same however it is optimized.
    """
    return _compiled(function, inner, **EXACT)


jit_inner, jit_exact_inner = partial(jit, inner=True), partial(jit_exact, inner=True)


def inline(function: F, inner: bool = True) -> F:
    """Compile a scalar helper as :func:`jit_exact` does, merged into the loops that call it.

    LLVM leaves large helpers out of line, and a loop with a call does not vectorise.
    """
    return _compiled(function, inner, **INLINE_OPTIONS)


def overload(function: Callable[..., Any], **options: Any) -> Callable[[F], F]:
    """Let compiled code call the result of the decorated function in place of ``function``."""

    def register(choose: F) -> F:
        OVERLOADS[function] = choose, options
        jit_options: Any = options
        made: Any = numba_overload(function, jit_options=jit_options)(choose)
        return cast("F", made)

    return register


@intrinsic(prefer_literal=True)
def _stack_array(typingctx: Any, count: Any, dtype: Any) -> Any:
    """Make an array of a compile-time length on the stack of the calling kernel."""
    array_type = types.Array(dtype.dtype, 1, "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        length = signature.args[0].literal_value
        element = context.get_data_type(array_type.dtype)
        data = cgutils.alloca_once(builder, element, size=length)
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(element))
        array = make_array(array_type)(context, builder)
        populate_array(
            array,
            data=data,
            shape=[context.get_constant(types.intp, length)],
            strides=[itemsize],
            itemsize=itemsize,
            meminfo=None,
        )
        return array._getvalue()

    return array_type(count, dtype), codegen


# Scratch for one kernel call: private to the thread, no allocation, and the
# compiler knows that nothing else points at it. Never return such an array.
stack_array: Any = _stack_array if JIT_ENABLED else np.empty


def ask_for(builder: Any, pointer: Any) -> None:
    """Let generated code prefetch the cache line of a byte: a hint, which reads nothing."""
    flag = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag])
    function = builder.module.declare_intrinsic("llvm.prefetch", (pointer.type,), kind)
    # To be read, kept in all caches, data.
    builder.call(function, [pointer, *(ir.Constant(flag, value) for value in (0, 3, 1))])


@intrinsic
def _prefetch(typingctx: Any, array: Any, row: Any, column: Any) -> Any:
    """Prefetch the cache line of ``array[row, column]``."""
    signature = types.void(array, row, column)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, args[0])
        integer = context.get_value_type(types.intp)
        place = builder.ptrtoint(data.data, integer)
        strides = builder.extract_value(data.strides, 0), builder.extract_value(data.strides, 1)
        for index, stride in zip(args[1:], strides, strict=True):
            place = builder.add(place, builder.mul(builder.sext(index, integer), stride))
        ask_for(builder, builder.inttoptr(place, ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return signature, codegen


# No bounds are checked and none need be: a hint about a wrong address has no effect.
prefetch: Any = _prefetch if JIT_ENABLED else lambda array, row, column: None
