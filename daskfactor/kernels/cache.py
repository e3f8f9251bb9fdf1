"""Compiled kernels on disk, between processes and for all processes of a user.

A kernel is compiled once on a machine: the next process, and every worker process of a
cluster, reads it. Files lie in one folder, the first of these that is named:

1. ``DASKFACTOR_JIT_CACHE=/path`` (``DASKFACTOR_JIT_CACHE=0`` keeps nothing);
2. ``daskfactor`` in numba's own folder, ``NUMBA_CACHE_DIR``;
3. ``daskfactor/kernels`` in ``XDG_CACHE_HOME``, or in ``~/.cache``.

A file is named after all that its code follows from: the kernel and everything that it
calls or names, the types of its arguments, the processor, the versions of Python, NumPy,
numba and llvmlite. So a file never needs to be replaced, processes that write at the same
time write the same, and checkouts, versions and machines share a folder. It begins with the
SHA-256 of the rest: one that is damaged is written anew. Where nothing can be read or written,
kernels are compiled as if there were no cache.

Files that no process has read for 30 days go, and the least recently used ones where all
take more than 512 MiB. Files are unpickled: keep the folder to yourself.
"""

import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from uuid import uuid4

import llvmlite
import numba
import numpy as np
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

from daskfactor.errors import OptionError

VARIABLE = "DASKFACTOR_JIT_CACHE"
HOUR = 3600.0
UNUSED = 30 * 24 * HOUR
MOST_BYTES = 512 * 2**20
DIGEST = 32
SWEPT = "swept"
"""Name of the file whose age is the time since files were last removed."""

OVERLOADS: dict[Callable[..., Any], tuple[Callable[..., Any], Any]] = {}
"""Implementation of a Python function in compiled code, and its compiler options."""

# Settings of numba that change what is compiled, or what it needs to run.
_VECTORIZE = ("USING_SVML", "LOOP_VECTORIZE", "SLP_VECTORIZE")
_SETTINGS = ("BOUNDSCHECK", "OPT", "DEBUGINFO_DEFAULT", *_VECTORIZE)
_PACKAGE = __name__.partition(".")[0]


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels, None where they are not cached.

    Raises
    ------
    OptionError
        If ``DASKFACTOR_JIT_CACHE`` is neither 0, 1 nor an absolute path.
    """
    setting = os.environ.get(VARIABLE, "").strip()
    if setting == "0":
        return None
    with suppress(RuntimeError):  # of a user without a home
        if setting not in ("", "1"):
            folder = Path(setting).expanduser()
            if not folder.is_absolute():
                raise OptionError(
                    f"{VARIABLE} is {setting!r}; it must be 0 (keep no compiled kernels), 1 (keep "
                    f"them in the usual folder) or the absolute path of a folder for them"
                )
            return folder
        # getattr: numba fills its configuration in at run time, unseen by type checkers.
        if of_numba := getattr(numba.config, "CACHE_DIR", ""):
            return Path(of_numba, "daskfactor").absolute()
        of_user = os.environ.get("XDG_CACHE_HOME", "")
        # Relative paths are invalid there, and to be ignored (XDG Base Directory Specification).
        base = Path(of_user) if Path(of_user).is_absolute() else Path.home() / ".cache"
        return base / "daskfactor" / "kernels" if base.is_absolute() else None
    return None


@cache
def _code(code: CodeType) -> str:
    """Return the text of a function's code, nested functions included, wherever it is written."""
    constants = [_code(c) if isinstance(c, CodeType) else _plain(c) for c in code.co_consts]
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars
    return f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {arguments} {names} {constants}"


def _plain(value: Any) -> str:
    """Return the text of a constant, sets sorted: their order changes between processes."""
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _names(code: CodeType) -> set[str]:
    nested = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*nested)


def _content(value: Any, names: Iterable[str], seen: dict[int, int]) -> str:
    """Return all that code with such names may take from a value that it uses.

    ``seen`` numbers functions and classes that the description has already.
    """
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, tuple | list | dict):
        items = value.items() if isinstance(value, dict) else value
        return f"{type(value)} {[_content(each, names, seen) for each in items]}"
    made = getattr(value, "_defn", value)  # of an intrinsic
    function = getattr(made, "py_func", made)
    if isinstance(function, ModuleType):
        return f"{function.__name__} {_of_module(function, names, seen)}"
    if isinstance(function, type | FunctionType):
        if id(function) in seen:
            return f"{function.__name__} {seen[id(function)]}"
        seen[id(function)] = len(seen)
    if isinstance(function, type):
        return f"{function} {_of_class(function, seen)}"
    if isinstance(function, FunctionType):
        options = sorted((getattr(made, "targetoptions", None) or {}).items())
        return f"{options} {_of_function(function, seen)}"
    if " at 0x" in (text := _plain(value)):
        raise TypeError(f"{text} has no description that holds in another process")
    return f"{text} {_content(type(value), (), seen)}" if _is_ours(type(value).__module__) else text


def _is_ours(module: str) -> bool:
    """Tell whether a module is of this package; versions stand for all others."""
    return module.startswith(f"{_PACKAGE}.")


def _of_module(module: ModuleType, names: Iterable[str], seen: dict[int, int]) -> list[str]:
    """Return what code with such names may take from a module of this package."""
    if not _is_ours(module.__name__):
        return []
    used = {name: vars(module)[name] for name in sorted(set(names) & vars(module).keys())}
    below = set(names) - used.keys()  # of modules within modules
    return [f"{name}: {_content(value, below, seen)}" for name, value in used.items()]


_NO_CODE = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__"}
_NO_CODE |= {"__firstlineno__", "__static_attributes__"}
"""Attributes of a class from which no compiled code follows."""


def _of_class(kind: type, seen: dict[int, int]) -> list[str]:
    """Return the values of an enumeration, the fields of a tuple, the methods of a class of ours.

    Functions that generate code call such methods.
    """
    if issubclass(kind, Enum):
        return [repr(value) for value in kind]
    parts = [str(vars(kind).get("_fields"))]
    if _is_ours(kind.__module__):
        parts += [_content(base, (), seen) for base in kind.__bases__]
        for name, value in sorted(vars(kind).items()):
            getters = (getattr(value, getter, None) for getter in ("__func__", "fget", "func"))
            function = next((each for each in getters if isinstance(each, FunctionType)), value)
            if isinstance(function, FunctionType):
                try:
                    parts.append(f"{name}: {_content(function, (), seen)}")
                except TypeError:  # as of a named tuple's constructor, which calls that of tuples
                    parts.append(f"{name}: {_code(function.__code__)}")
            elif name not in _NO_CODE and " at 0x" not in (text := _plain(value)):
                parts.append(f"{name}: {text}")
    return parts


def _of_function(function: FunctionType, seen: dict[int, int]) -> str:
    """Return code, defaults, cells, globals that the code names, and the compiled overload."""
    code = function.__code__
    names = _names(code)
    used = {name: function.__globals__.get(name) for name in names}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    used |= {name: cell.cell_contents for name, cell in cells}
    parts = [f"{name}: {_content(used[name], names, seen)}" for name in sorted(used)]
    defaults = _content((function.__defaults__, function.__kwdefaults__), names, seen)
    implementation, options = OVERLOADS.get(function, (None, {}))
    overloaded = f"{_content(implementation, (), seen)} {sorted(options.items())}"
    return f"{_code(code)} {defaults} {parts} {overloaded}"


def description(dispatcher: Any) -> str:
    """Describe all that a compiled function follows from, the same in every process.

    Raises
    ------
    TypeError
        If it uses an object without a description that is the same in all processes.
    """
    return _content(dispatcher, (), {})


class KernelCache(NullCache):
    """The cache of a compiled function, in the form that numba calls.

    numba's own cache knows a closure by its cells, and kernels in them change their names from
    process to process; and it numbers its files in an index, in which processes that write at
    the same time lose or exchange each other's, so that code for other types is loaded.
    """

    def __init__(self, dispatcher: Any, folder: Path) -> None:
        self._dispatcher, self._function = dispatcher, dispatcher.py_func
        self._folder = folder

    @cached_property
    def _content(self) -> str:
        # Not before the first call: a function may name globals that come after it.
        function = self._function
        # What is kept names the module that it is loaded into.
        names = f"{function.__module__}.{function.__qualname__}"
        content = f"{names} {description(self._dispatcher)}"
        if function.__closure__ is not None:
            # The linker knows functions by name: those of several processes must not share one.
            name = function.__qualname__.partition("#")[0]
            function.__qualname__ = f"{name}#{sha256(content.encode()).hexdigest()[:16]}"
        return content

    def _file(self, signature: Any, codegen: Any) -> Path:
        if " at 0x" in (types := str(signature)):
            raise TypeError(f"{types} has no description that holds in another process")
        settings = [getattr(numba.config, name, None) for name in _SETTINGS]
        versions = sys.implementation.cache_tag, np.__version__, numba.__version__
        text = f"{self._content} {types} {codegen.magic_tuple()} {settings} {versions}"
        digest = sha256(f"{text} {llvmlite.__version__}".encode()).hexdigest()
        return self._folder / f"{self._function.__name__.strip('_')}-{digest[:32]}.nbc"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code that was compiled for a signature, None where there is none."""
        with suppress(Exception):  # of any content that is not ours: the file is written anew
            data = _read(self._file(sig, target_context.codegen()))
            if sha256(data[DIGEST:]).digest() == data[:DIGEST]:
                # Compiled code needs no more of numba than this. Its own cache prepares for
                # compilation here, which takes longer than all kernels of a run take to load.
                rtsys.initialize(target_context)
                return CompileResult._rebuild(target_context, *pickle.loads(data[DIGEST:]))
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save the code that was compiled for a signature, if other processes can use it."""
        if data.library.has_dynamic_globals or any(not each.can_cache for each in data.lifted):
            return
        with suppress(OSError, TypeError, pickle.PicklingError):  # is compiled all the same
            file = self._file(sig, data.codegen)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished = file.with_suffix(f".{uuid4().hex}")
            compiled = dumps(data._reduce())
            try:
                unfinished.write_bytes(sha256(compiled).digest() + compiled)
                unfinished.replace(file)
            finally:
                unfinished.unlink(missing_ok=True)
            sweep(self._folder)


def _read(file: Path) -> bytes:
    """Read a file, and say by its time once a day that it is in use."""
    with file.open("rb") as opened:
        if time.time() - os.fstat(opened.fileno()).st_mtime > 24 * HOUR:
            with suppress(OSError):  # a folder of somebody else's
                os.utime(file)
        return opened.read()


def sweep(folder: Path, unused: float = UNUSED, most: int = MOST_BYTES) -> None:
    """Remove files that nobody used for long, and the oldest of too many; once an hour at most.

    A process that is reading one reads on, and one that comes late compiles.
    """
    marker, now = folder / SWEPT, time.time()
    with suppress(FileNotFoundError):
        if now - marker.stat().st_mtime < HOUR:
            return
    marker.touch()
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            # One that was listed may be gone, removed by another process.
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                files.append((status.st_mtime, status.st_size, entry.name))
    total = 0
    for used, size, name in sorted(files, reverse=True):
        total += size
        longest = unused if name.endswith(".nbc") else HOUR  # others: their process was killed
        if name != SWEPT and (now - used > longest or total > most):
            with suppress(OSError):
                (folder / name).unlink()
