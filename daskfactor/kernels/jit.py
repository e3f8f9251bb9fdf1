"""The one place where numba's compiler options are set.

No ``parallel=True``: parallelism is across blocks, and two threads inside one
parallel kernel can abort the process. NaN marks missing entries, so the
``nnan`` and ``ninf`` fast-math flags stay off. Set ``DASKFACTOR_JIT_CACHE=1``
to keep compiled kernels on disk between processes.

Two grades of arithmetic: :func:`jit` may reorder and fuse (gradients, sums);
:func:`jit_exact` follows IEEE 754 operation by operation, so the noise and the
updates have the same bits on every CPU and however rows are split into bands.
"""

import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, cast
from uuid import uuid4

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])

FAST = {"contract": True, "reassoc": True, "nsz": True}  # in one order, unlike a set
# fastmath=False is not idle: left unset, numba takes the flags of whichever kernel happens
# to compile the function first, and bits would depend on the order of the first calls.
EXACT: Any = {"fastmath": False, "error_model": "numpy"}
INLINE_OPTIONS: Any = EXACT | {"forceinline": True}
CACHE = os.environ.get("DASKFACTOR_JIT_CACHE", "") == "1"
# getattr: numba fills its configuration in at run time, where type checkers do not see it.
JIT_ENABLED = not getattr(numba.config, "DISABLE_JIT", False)


@cache
def _code(code: CodeType) -> str:
    """What a function does, nested ones included, wherever it is written."""
    constants = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _content(value: Any, seen: set[int]) -> str:
    """All that a compiled function follows from: code, options, cells, and globals that it names.

    Raises
    ------
    TypeError
        If it uses an object that cannot be told apart from others between processes.
    """
    made = getattr(value, "_defn", value)  # of an intrinsic
    function = getattr(made, "py_func", made)
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, type):
        return f"{value} {list(value) if issubclass(value, Enum) else vars(value).get('_fields')}"
    if not isinstance(function, FunctionType):
        if " at 0x" in (text := repr(value)):
            raise TypeError(f"{text} has no description that holds in another process")
        return text
    if id(function) in seen:
        return function.__name__
    seen.add(id(function))
    used = {name: function.__globals__.get(name) for name in _names(function.__code__)}
    used |= {
        name: cell.cell_contents
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        )
    }
    parts = [f"{name}: {_content(used[name], seen)}" for name in sorted(used)]
    options = sorted((getattr(made, "targetoptions", None) or {}).items())
    return f"{_code(function.__code__)} {options} {parts}"


def _names(code: CodeType) -> set[str]:
    nested = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*nested)


class _DiskCache(FunctionCache):
    """Compiled functions on disk, each in a file that is named after all that it follows from.

    numba's own cache knows a closure by its cells, and kernels in them change their names from
    process to process; and it numbers its files in an index, in which processes that write at
    the same time lose or exchange each other's, so that code for other types is loaded. A file
    begins with the SHA-256 of the rest: one that is damaged is written anew.
    """

    def __init__(self, made: Any) -> None:
        super().__init__(made.py_func)
        self._made = made

    @cached_property
    def _content(self) -> str:
        # Not before the first call: a function may name globals that come after it.
        function = self._py_func
        # What is kept names the module that it is loaded into.
        names = f"{function.__module__}.{function.__qualname__}"
        content = f"{names} {_content(self._made, set())}"
        if function.__closure__ is not None:
            # The linker knows functions by name: those of several processes must not share one.
            name = function.__qualname__.partition("#")[0]
            function.__qualname__ = f"{name}#{sha256(content.encode()).hexdigest()[:16]}"
        return content

    def _file(self, signature: Any, codegen: Any) -> Path:
        target = codegen.magic_tuple(), getattr(numba.config, "BOUNDSCHECK", None)
        versions = sys.implementation.cache_tag, numba.__version__, llvmlite.__version__
        text = f"{self._content} {signature} {target} {versions}"
        name = self._py_func.__name__.strip("_")
        return Path(self.cache_path, f"{name}-{sha256(text.encode()).hexdigest()[:32]}.nbc")

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        with suppress(OSError, TypeError):
            kept = self._file(sig, target_context.codegen()).read_bytes()
            if sha256(kept[32:]).digest() == kept[:32]:
                return self._impl.rebuild(target_context, pickle.loads(kept[32:]))
        return None

    def _save_overload(self, sig: Any, data: Any) -> None:
        if not self._impl.check_cachable(data):
            return
        with suppress(OSError, TypeError):  # a kernel that cannot be kept is compiled all the same
            file = self._file(sig, data.codegen)
            self._impl.locator.ensure_cache_path()
            begun = file.with_suffix(f".{uuid4().hex}")
            compiled = dumps(self._impl.reduce(data))
            try:
                begun.write_bytes(sha256(compiled).digest() + compiled)
                begun.replace(file)
            finally:
                begun.unlink(missing_ok=True)


def _compiled(function: F, **options: Any) -> F:
    made: Any = numba.njit(nogil=True, **options)(function)
    if CACHE and JIT_ENABLED:
        with suppress(OSError, RuntimeError):  # no source file, or no folder to write to
            made._cache = _DiskCache(made)
    return cast("F", made)


def jit(function: F) -> F:
    """Compile ``function`` without the GIL and with NaN-respecting fast math."""
    return _compiled(function, fastmath=FAST, error_model="numpy")


def jit_exact(function: F) -> F:
    """Compile ``function`` without the GIL and with strict IEEE 754 arithmetic."""
    return _compiled(function, **EXACT)


def inline(function: F) -> F:
    """Compile a scalar helper as :func:`jit_exact` does, merged into the loops that call it.

    LLVM leaves large helpers out of line, and a loop with a call does not vectorise.
    """
    return _compiled(function, **INLINE_OPTIONS)


@intrinsic(prefer_literal=True)
def _stack_array(typingctx: Any, count: Any, dtype: Any) -> Any:
    """Array of a compile-time length on the stack of the calling kernel."""
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


def _heap_array(count: int, dtype: Any) -> NDArray[Any]:
    """Stand in for :func:`stack_array` when the JIT is off."""
    return np.empty(count, dtype)


# Scratch for one kernel call: private to the thread, no allocation, and the
# compiler knows that nothing else points at it. Never return such an array.
stack_array: Any = _stack_array if JIT_ENABLED else _heap_array


def ask_for(builder: Any, pointer: Any) -> None:
    """Let generated code ask for the cache line of a byte: a hint, which reads nothing."""
    flag = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag])
    function = builder.module.declare_intrinsic("llvm.prefetch", (pointer.type,), kind)
    # To be read, kept in all caches, data.
    builder.call(function, [pointer, *(ir.Constant(flag, value) for value in (0, 3, 1))])


@intrinsic
def _prefetch(typingctx: Any, array: Any, row: Any, column: Any) -> Any:
    """Ask for the cache line of ``array[row, column]``."""
    signature = types.void(array, row, column)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        held = make_array(signature.args[0])(context, builder, args[0])
        integer = context.get_value_type(types.intp)
        place = builder.ptrtoint(held.data, integer)
        strides = builder.extract_value(held.strides, 0), builder.extract_value(held.strides, 1)
        for index, stride in zip(args[1:], strides, strict=True):
            place = builder.add(place, builder.mul(builder.sext(index, integer), stride))
        ask_for(builder, builder.inttoptr(place, ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return signature, codegen


def _nothing(array: Any, row: int, column: int) -> None:
    """Stand in for :func:`prefetch` when the JIT is off."""


# No bounds are checked and none need be: a hint about a wrong address has no effect.
prefetch: Any = _prefetch if JIT_ENABLED else _nothing
