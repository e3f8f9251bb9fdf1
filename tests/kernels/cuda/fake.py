"""A GPU that is none: kernels compiled for processors, and CuPy's rules for arrays.

`HostArray` is refused wherever CuPy refuses its arrays: beside arrays of NumPy, in functions that
CuPy has not, and where NumPy would take it for one of its own. Copies on a stream of their own
come to be only when something waits for them, as late as a GPU may make them.
"""

import ctypes
import re
import shutil
import subprocess
import weakref
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace

import numpy as np
import pytest

from daskfactor.kernels.cuda import device
from daskfactor.kernels.cuda.device import Device
from tests import kept

HERE = Path(__file__).parent
SIZES = {"int": 4, "unsigned int": 4, "Size": 8, "Word": 8, "float": 4, "double": 8}
"""Bytes of the numbers that kernels take, by their names in C++."""
OURS = ("any", "all", "sum", "zeros_like", "ones_like", "maximum", "where", "broadcast_to", "ndim")
OURS += ("isfinite", "repeat")
"""Functions of NumPy that hand arrays of CuPy on to it."""
GARBAGE = 77
"""What memory holds that nobody has written to."""


class HostArray(np.ndarray):
    """An array that passes for one on a device."""

    @property
    def device(self):  # type: ignore[override]
        return "a device"

    @property
    def data(self):  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        if "where" in options:
            raise TypeError("CuPy's functions take no where=")
        out = options.pop("out", ())
        given = [_plain(own) for own in inputs]
        if out:
            options["out"] = tuple(_plain(own) for own in out)
        with np.errstate(all="ignore"):  # a GPU does not warn
            found = getattr(ufunc, method)(*given, **options)
        return _wrapped(found, out[0] if out else None)

    def __array_function__(self, function, types, args, kwargs):
        if function.__name__ not in OURS:
            raise TypeError(f"a device array was given to numpy.{function.__name__}")
        if function is np.ndim:
            return args[0].ndim
        return _wrapped(function(*map(_plain, args), **kwargs))

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __getitem__(self, at):
        _refuse_arrays(at)
        return _wrapped(_plain(self)[at])

    def __setitem__(self, at, value):
        _refuse_arrays(at)
        _plain(self)[at] = _plain(value)

    def sum(self, *args, **kwargs):
        return _wrapped(_plain(self).sum(*args, **kwargs))

    def set(self, values, stream):
        """Ask for a copy from this process, on a stream."""
        stream.asked.append((self, weakref.ref(values)))

    def __reduce__(self):
        return _device, (np.array(_plain(self)),)


def _device(values):
    return np.array(values, order="C", copy=True).view(HostArray)


def _plain(value):
    if isinstance(value, HostArray):
        return value.view(np.ndarray)
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("an array of NumPy beside one of the device")
    return value


def _wrapped(value, out=None):
    return np.asarray(value).view(HostArray) if out is None else out


def _refuse_arrays(at):
    for own in at if isinstance(at, tuple) else (at,):
        if type(own) is np.ndarray:
            raise TypeError("a device array was indexed by an array of NumPy")


# -- kernels -------------------------------------------------------------------------------


@cache
def compiled(text, options):
    """Compile kernels for this processor, each with a function that runs all threads.

    Also returned are the types of each kernel's arguments; ``*`` is any pointer.
    """
    defines = [own for own in options if own.startswith("-D")]
    # What the preprocessor leaves out is no kernel.
    marked = text.replace("__global__", "GLOBAL_MARK")
    told = [*defines, "-D__restrict__="]  # which is no part of a type
    command = ["g++", "-std=c++17", "-E", "-P", *told, "-x", "c++", "-"]
    shown = _run(command, marked)
    signatures, runners = {}, []
    found = re.findall(r'extern "C" GLOBAL_MARK void (\w+)\(([^{]*?)\)\s*\{', shown, re.DOTALL)
    for name, given in found:
        parameters = [own.strip() for own in " ".join(given.split()).split(",")]
        kinds = [re.sub(r"\b\w+$", "", own).strip() for own in parameters]
        signatures[name] = ["*" if kind.endswith("*") else kind for kind in kinds]
        taken = ", ".join(f"*({kind}*)a[{n}]" for n, kind in enumerate(kinds))
        runners.append(
            f'extern "C" void run_{name}(unsigned groups, unsigned threads, void **a) {{\n'
            "  gridDim.x = groups; blockDim.x = threads;\n"
            "  for (unsigned g = 0; g < groups; ++g) for (unsigned t = 0; t < threads; ++t) {\n"
            f"    blockIdx.x = g; threadIdx.x = t; {name}({taken});\n  }}\n}}\n"
        )
    whole = "\n".join(((HERE / "host.h").read_text(), text, *runners))
    # Optimised as little as is fast enough, and without fused multiply-adds.
    rules = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w", *defines]
    library = kept.named("host-kernels", whole, *rules, _compiler())

    def build():
        with NamedTemporaryFile(suffix=".so") as file:
            _run(["g++", *rules, "-x", "c++", "-", "-o", file.name], whole)
            return Path(file.name).read_bytes()

    kept.kept(library, build)  # what a library ends with is not read by the linker
    return ctypes.CDLL(str(library)), signatures


@cache
def _compiler():
    """Return what g++ says of itself and of the machine that it compiles for."""
    return _run(["g++", "-v", "--version"], "") + _run(["g++", "-dumpmachine"], "")


def _run(command, text):
    made = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(made.stderr[:4000])
    return made.stdout


class RawModule:
    """Stands in for CuPy's; a kernel gets what it takes, or it is an error."""

    def __init__(self, code, options):
        self.library, self.signatures = compiled(code, options)

    def get_function(self, name):
        run, kinds = getattr(self.library, f"run_{name}"), self.signatures[name]

        def launch(grid, block, arguments):
            assert len(arguments) == len(kinds), (name, len(arguments), len(kinds))
            held = []
            for own, kind in zip(arguments, kinds, strict=True):
                if isinstance(own, HostArray):
                    assert kind == "*", (name, kind)
                    assert own.flags.c_contiguous, name
                    held.append(ctypes.c_void_p(own.ctypes.data))
                else:
                    size = 8 if kind == "*" else SIZES[kind]
                    assert isinstance(own, np.generic), (name, own)
                    assert own.dtype.itemsize == size, (name, kind, own.dtype)
                    assert (own.dtype.kind == "f") == (kind in ("float", "double")), (name, kind)
                    held.append(ctypes.create_string_buffer(own.tobytes(), size))
            pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(own) for own in held))
            run(grid[0], block[0], pointers)

        return launch


# -- streams and products ------------------------------------------------------------------


class Stream(nullcontext):
    """Copies that were asked for, and are made when something waits for them."""

    def __init__(self, non_blocking=False):
        super().__init__()
        self.asked = []

    def wait_event(self, event):
        event.synchronize()

    def synchronize(self):
        for array, source in self.asked:
            values = source()
            if values is None:
                raise RuntimeError("memory was given back before it was copied")
            _plain(array)[...] = values
        self.asked.clear()


class Event:
    """What marks a place among the work of a stream."""

    def __init__(self, disable_timing=False):
        self.stream = None

    def record(self, stream=None):
        self.stream = stream

    def synchronize(self):
        if self.stream is not None:
            self.stream.synchronize()


def _at(pointer, kind, shape, strides):
    """Return numbers at an address; strides are in numbers."""
    size = np.dtype(kind).itemsize
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    memory = (ctypes.c_char * (last * size)).from_address(pointer)
    flat = np.frombuffer(memory, kind)
    return np.lib.stride_tricks.as_strided(flat, shape, [step * size for step in strides])


def _gemm(kind):
    """Multiply stacks of matrices whose columns are contiguous, as cuBLAS does."""

    def multiply(handle, turn_a, turn_b, m, n, k, alpha, *rest):
        a, lda, stride_a, b, ldb, stride_b, beta, c, ldc, stride_c, count = rest
        first = _at(a, kind, (count, *((k, m) if turn_a else (m, k))), (stride_a, 1, lda))
        second = _at(b, kind, (count, *((n, k) if turn_b else (k, n))), (stride_b, 1, ldb))
        out = _at(c, kind, (count, m, n), (stride_c, 1, ldc))
        first = first.swapaxes(1, 2) if turn_a else first
        second = second.swapaxes(1, 2) if turn_b else second
        by, more = _at(alpha, kind, (), ()), _at(beta, kind, (), ())
        with np.errstate(all="ignore"):  # a GPU does not warn
            product = by * (second.swapaxes(1, 2) @ first.swapaxes(1, 2)).swapaxes(1, 2)
            out[...] = product + (more * out if more else 0)

    return multiply


def _asarray(values):
    return _device(np.asarray(values))


def _empty(shape, dtype):
    return np.full(shape, GARBAGE, dtype).view(HostArray)


def _pinned(size):
    """Make memory that holds huge numbers, whatever their type is."""
    return bytearray(b"\x7f" * size)


def _asnumpy(array):
    return np.array(array.view(np.ndarray))


def cupy(free=2**33):
    """Make the part of CuPy's module that is used; ``free``: bytes that are on the device."""
    runtime = SimpleNamespace(
        memGetInfo=lambda: (free, free),
        getDeviceCount=lambda: 1,
        getDevice=lambda: 0,
        getDeviceProperties=lambda number: {"name": b"no GPU"},
    )
    pool = SimpleNamespace(free_bytes=lambda: 0, free_all_blocks=lambda: None)
    cublas = SimpleNamespace(
        sgemmStridedBatched=_gemm(np.float32), dgemmStridedBatched=_gemm(np.float64), modes=[]
    )
    cublas.setMathMode = lambda handle, mode: cublas.modes.append(mode)
    return SimpleNamespace(
        asarray=_asarray,
        asnumpy=_asnumpy,
        empty=_empty,
        zeros=lambda shape, dtype: np.zeros(shape, dtype).view(HostArray),
        RawModule=RawModule,
        get_default_memory_pool=lambda: pool,
        get_default_pinned_memory_pool=lambda: pool,
        cuda=SimpleNamespace(
            Stream=Stream,
            Event=Event,
            get_current_stream=Stream,
            runtime=runtime,
            cublas=cublas,
            device=SimpleNamespace(get_cublas_handle=lambda: 0),
            alloc_pinned_memory=_pinned,
        ),
    )


class HostDevice(Device):
    """A device of one-lane warps."""

    lanes = 1


@contextmanager
def standing_in():
    """Have the package find a device of one-lane warps, with few threads that take several items.

    Tests are skipped where there is no compiler for its kernels.
    """
    if shutil.which("g++") is None:
        pytest.skip("kernels for the stand-in of a GPU are compiled by g++, which is not here")
    made = HostDevice(cupy())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "_opened", lambda: made)
        patch.setattr(device, "MOST_GROUPS", 2)
        patch.setattr(device, "THREADS", 32)
        yield made
