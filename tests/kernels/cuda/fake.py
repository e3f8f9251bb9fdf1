"""A GPU that is none: kernels compiled for processors, and CuPy's rules for arrays.

`HostArray` is refused wherever CuPy refuses its arrays: beside arrays of NumPy, in functions that
CuPy has not, and where NumPy would take it for one of its own.
"""

import ctypes
import hashlib
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

HERE = Path(__file__).parent
BUILD = Path(tempfile.gettempdir()) / "daskfactor-host-kernels"
TYPES = {
    "int": ctypes.c_int,
    "Size": ctypes.c_longlong,
    "Word": ctypes.c_ulonglong,
    "unsigned int": ctypes.c_uint,
    "double": ctypes.c_double,
}
SIGNATURE = re.compile(r'extern "C" __global__ void (\w+)\(([^{]*?)\)\s*\{', re.S)
MACRO = re.compile(r"^#define (\w+) (.*)$", re.M)


class HostArray(np.ndarray):
    """An array that passes for one on a device."""

    @property
    def device(self) -> str:  # type: ignore[override]
        return "a device"

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if "where" in options:
            raise TypeError("CuPy's functions take no where=")
        out = options.pop("out", ())
        given = [_plain(own) for own in inputs]
        if out:
            options["out"] = tuple(_plain(own) for own in out)
        return _wrapped(getattr(ufunc, method)(*given, **options), out[0] if out else None)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function.__name__ not in (
            "any",
            "all",
            "sum",
            "zeros_like",
            "maximum",
            "ndim",
            "isfinite",
            "where",
            "ones_like",
            "broadcast_to",
        ):
            raise TypeError(f"a device array was given to numpy.{function.__name__}")
        if function is np.ndim:
            return args[0].ndim
        return _wrapped(function(*map(_plain, args), **kwargs))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __getitem__(self, at: Any) -> Any:
        _refuse_arrays(at)
        return _wrapped(_plain(self)[at])

    def __setitem__(self, at: Any, value: Any) -> None:
        _refuse_arrays(at)
        _plain(self)[at] = _plain(value)

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        return _wrapped(_plain(self).sum(*args, **kwargs))

    def set(self, values: Any, stream: Any = None) -> None:
        _plain(self)[...] = values

    def __reduce__(self) -> Any:
        return _device, (np.array(_plain(self)),)


def _device(values: Any) -> HostArray:
    return np.array(values, order="C", copy=True).view(HostArray)


def _plain(value: Any) -> Any:
    if isinstance(value, HostArray):
        return value.view(np.ndarray)
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("an array of NumPy beside one of the device")
    return value


def _wrapped(value: Any, out: Any = None) -> Any:
    if out is not None:
        return out
    return (
        value.view(HostArray)
        if isinstance(value, np.ndarray)
        else np.asarray(value).view(HostArray)
    )


def _refuse_arrays(at: Any) -> None:
    for own in at if isinstance(at, tuple) else (at,):
        if type(own) is np.ndarray:
            raise TypeError("a device array was indexed by an array of NumPy")


# -- kernels -------------------------------------------------------------------------------


@cache
def compiled(text: str, options: tuple[str, ...]) -> tuple[ctypes.CDLL, dict[str, list[str]]]:
    """Compile kernels for this processor, each with a function that runs all threads."""
    macros = dict(MACRO.findall(text)) | dict(
        own[2:].split("=", 1) for own in options if own.startswith("-D")
    )
    known = {"REAL", "VALUE", "PTR"}

    def spelled(kind: str) -> str:
        kind = kind.replace("const", "").strip()
        if kind.endswith("*"):
            return "*"
        return (
            {"float": "float", "signed char": "char"}.get(macros[kind], macros[kind])
            if kind in known
            else kind
        )

    signatures, runners = {}, []
    # What was left out by the preprocessor is no kernel.
    shown = subprocess.run(
        ["g++", "-std=c++17", "-E", "-P", "-D__restrict__=", *_defines(options), "-x", "c++", "-"],
        input=text.replace("__global__", "GLOBAL_MARK"),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name, given in re.findall(
        r'extern "C" GLOBAL_MARK void (\w+)\(([^{]*?)\)\s*\{', shown, re.S
    ):
        kinds = []
        for own in " ".join(given.split()).split(","):
            kind = re.sub(r"\b\w+$", "", own.strip()).strip()
            kinds.append("*" if kind.endswith("*") else kind.replace("const ", "").strip())
        signatures[name] = kinds
        cast = [
            f"*(void **)a[{n}]" if kind == "*" else f"*({kind} *)a[{n}]"
            for n, kind in enumerate(kinds)
        ]
        full = [
            re.sub(r"\b\w+$", "", own.strip()).strip() for own in " ".join(given.split()).split(",")
        ]
        cast = [f"*({kind}*)a[{n}]" for n, kind in enumerate(full)]
        runners.append(
            f'extern "C" void run_{name}(unsigned groups, unsigned threads, void **a) {{\n'
            "  gridDim.x = groups; blockDim.x = threads;\n"
            "  for (unsigned g = 0; g < groups; ++g) for (unsigned t = 0; t < threads; ++t) {\n"
            f"    blockIdx.x = g; threadIdx.x = t; {name}({', '.join(cast)});\n  }}\n}}\n"
        )
    whole = "\n".join(((HERE / "host.h").read_text(), text, *runners))
    digest = hashlib.sha256("\0".join((whole, *options)).encode()).hexdigest()[:24]
    BUILD.mkdir(exist_ok=True)
    library = BUILD / f"{digest}.so"
    if not library.exists():
        source, fresh = BUILD / f"{digest}.cpp", BUILD / f"{digest}.{id(options)}.tmp"
        source.write_text(whole)
        command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
        made = subprocess.run(
            [*command, *_defines(options), str(source), "-o", str(fresh)],
            capture_output=True,
            text=True,
        )
        if made.returncode:
            raise RuntimeError(made.stderr[:4000])
        fresh.rename(library)
    return ctypes.CDLL(str(library)), signatures


def _defines(options: tuple[str, ...]) -> list[str]:
    return [own for own in options if own.startswith("-D")]


class RawModule:
    """Stands in for CuPy's."""

    def __init__(self, code: str, options: tuple[str, ...]) -> None:
        self.library, self.signatures = compiled(code, options)

    def get_function(self, name: str) -> Any:
        run, kinds = getattr(self.library, f"run_{name}"), self.signatures[name]

        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
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
                    if kind in ("float", "double"):
                        assert own.dtype.kind == "f", (name, kind, own.dtype)
                    held.append(ctypes.create_string_buffer(own.tobytes(), size))
            pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(own) for own in held))
            run(grid[0], block[0], pointers)

        return launch


SIZES = {
    "int": 4,
    "unsigned int": 4,
    "Size": 8,
    "Word": 8,
    "float": 4,
    "double": 8,
    "long long": 8,
}


class _Context:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_Context":
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _at(pointer: int, kind: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Numbers at an address; strides are in numbers."""
    size = np.dtype(kind).itemsize
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    memory = (ctypes.c_char * (last * size)).from_address(pointer)
    flat = np.frombuffer(memory, kind)
    return np.lib.stride_tricks.as_strided(flat, shape, [step * size for step in strides])


def _gemm(kind: Any) -> Any:
    """Multiply stacks of matrices whose columns are contiguous, as cuBLAS does."""

    def multiply(
        handle: int,
        turn_a: int,
        turn_b: int,
        m: int,
        n: int,
        k: int,
        alpha: int,
        a: int,
        lda: int,
        stride_a: int,
        b: int,
        ldb: int,
        stride_b: int,
        beta: int,
        c: int,
        ldc: int,
        stride_c: int,
        count: int,
    ) -> None:
        first = _at(a, kind, (count, *((k, m) if turn_a else (m, k))), (stride_a, 1, lda))
        second = _at(b, kind, (count, *((n, k) if turn_b else (k, n))), (stride_b, 1, ldb))
        out = _at(c, kind, (count, m, n), (stride_c, 1, ldc))
        first = first.swapaxes(1, 2) if turn_a else first
        second = second.swapaxes(1, 2) if turn_b else second
        by, more = _at(alpha, kind, (), ()), _at(beta, kind, (), ())
        product = by * (second.swapaxes(1, 2) @ first.swapaxes(1, 2)).swapaxes(1, 2)
        out[...] = product + (more * out if more else 0)

    return multiply


def asarray(values: Any, dtype: Any = None) -> HostArray:
    return _device(np.asarray(values, dtype))


def cupy(free: int = 2**33) -> SimpleNamespace:
    """The part of CuPy's module that is used."""
    runtime = SimpleNamespace(
        memGetInfo=lambda: (free, free),
        getDeviceCount=lambda: 1,
        getDevice=lambda: 0,
        getDeviceProperties=lambda number: {"name": b"no GPU"},
    )
    pool = SimpleNamespace(free_bytes=lambda: 0, free_all_blocks=lambda: None)
    return SimpleNamespace(
        asarray=asarray,
        asnumpy=lambda own: np.array(own.view(np.ndarray)),
        empty=lambda shape, dtype: np.full(shape, 77, dtype).view(HostArray),
        zeros=lambda shape, dtype: np.zeros(shape, dtype).view(HostArray),
        RawModule=RawModule,
        get_default_memory_pool=lambda: pool,
        get_default_pinned_memory_pool=lambda: pool,
        cuda=SimpleNamespace(
            Stream=_Context,
            Event=_Context,
            get_current_stream=_Context,
            runtime=runtime,
            cublas=SimpleNamespace(
                sgemmStridedBatched=_gemm(np.float32), dgemmStridedBatched=_gemm(np.float64)
            ),
            device=SimpleNamespace(get_cublas_handle=lambda: 0),
            alloc_pinned_memory=lambda size: bytearray(size),
        ),
    )
