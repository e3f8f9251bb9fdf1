"""An NVIDIA GPU as kernels need it: arrays, compiled functions, copies that wait for nobody.

CuPy is used here and nowhere else, and of it what is old and plain. A device is one per
process; a cluster has a worker for each.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from daskfactor.errors import OptionError
from daskfactor.kernels.cuda.source import Source

DeviceArray = Any
"""An array on the device; CuPy has no types."""
Host = NDArray[Any]
Calls = list[tuple[Callable[..., Any], tuple[Any, ...], Any]]
"""Recorded calls of a device: functions, arguments, and objects that have to stay alive."""

THREADS = 256
MOST_GROUPS = 4096
"""Groups of threads of a launch at most; each thread then takes several items."""
STANDARD = "-std=c++17"
FULL, TF32 = 0, 3
"""Modes of cuBLAS."""
NEEDS_CUPY = (
    'device="cuda" needs CuPy, which cannot be imported here ({}); install it with '
    'pip install "daskfactor[cuda]", or leave device out'
)
NEEDS_GPU = (
    'device="cuda" needs an NVIDIA GPU with its driver, and CUDA says: {}; leave device out to '
    "run on processors"
)


class Device:
    """A GPU: memory, products and launches.

    Parameters
    ----------
    cupy
        The module ``cupy``.

    Attributes
    ----------
    lanes
        Threads of a warp.
    tf32
        Whether products of float32 may be rounded to 10 bits on their way, by tensor cores.
    """

    lanes = 32
    tf32 = False

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self._compiled: dict[Source, Any] = {}
        self._functions: dict[tuple[Source, str], Callable[..., None]] = {}
        self._compiling = threading.Lock()
        self._thread = threading.local()  # each thread records its calls
        self._copies = cupy.cuda.Stream(non_blocking=True)

    # -- arrays ------------------------------------------------------------------------

    def put(self, values: ArrayLike, dtype: DTypeLike | None = None) -> DeviceArray:
        """Copy numbers to the device, C-contiguous."""
        return self.cupy.asarray(np.ascontiguousarray(values, dtype))

    def take(self, array: DeviceArray) -> Host:
        """Copy an array to this process."""
        return np.asarray(self.cupy.asnumpy(array))

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """Make an uninitialised array."""
        return self.cupy.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """Make an array of zeros."""
        return self.cupy.zeros(shape, dtype)

    def clear(self, array: DeviceArray) -> None:
        """Set all numbers to zero."""
        self._do(array.fill, 0, keep=array)

    def products(
        self,
        a: DeviceArray,
        b: DeviceArray,
        transposed: tuple[bool, bool] = (False, False),
        out: DeviceArray | None = None,
        add: bool = False,
    ) -> DeviceArray:
        """Multiply stacks of matrices by cuBLAS: out[i] = a[i] b[i], or that is added.

        ``transposed`` says which matrices are transposed. Rows must be contiguous, and
        follow each other; matrices may be apart, as those of a slice of rows are. Nothing is
        copied, which `cupy.matmul` does with every transpose.
        """
        (B, *rows), kind = a.shape, a.dtype
        p, q = reversed(rows) if transposed[0] else rows
        r = b.shape[1] if transposed[1] else b.shape[2]
        out = self.empty((B, p, r), kind) if out is None else out
        cublas, real = self.cupy.cuda.cublas, kind.type
        multiply = cublas.sgemmStridedBatched if real is np.float32 else cublas.dgemmStridedBatched
        handle = self.cupy.cuda.device.get_cublas_handle()
        one, more = np.array(1, kind), np.array(int(add), kind)

        def place(stack: DeviceArray) -> tuple[int, int, int]:
            return stack.data.ptr, stack.shape[2], stack.strides[0] // kind.itemsize

        tf32 = self.tf32  # another thread may change it
        if tf32:
            self._do(cublas.setMathMode, handle, TF32)
        # cuBLAS counts along columns first: out.T = b.T a.T.
        first, second = map(int, reversed(transposed))
        sides = one.ctypes.data, *place(b), *place(a)
        rest = more.ctypes.data, *place(out), B
        memory = one, more, a, b, out
        self._do(multiply, handle, first, second, r, p, q, *sides, *rest, keep=memory)
        if tf32:
            self._do(cublas.setMathMode, handle, FULL)
        return out

    # -- kernels -----------------------------------------------------------------------

    def launch(self, source: Source, name: str, threads: int, *arguments: Any) -> None:
        """Run a kernel with about so many threads; None stands for no array.

        Numbers must have the kernel's types: `numpy.float32` is no ``double``.
        """
        groups = min(max(1, -(-threads // THREADS)), MOST_GROUPS)
        values = tuple(np.uint64(0) if value is None else value for value in arguments)
        self._do(self.function(source, name), (groups,), (THREADS,), values)

    def _do(self, function: Callable[..., Any], *arguments: Any, keep: Any = None) -> None:
        """Call a function of the device, and record the call if this thread records.

        ``keep`` is the memory that the arguments point to.
        """
        function(*arguments)
        calls: Calls | None = getattr(self._thread, "calls", None)
        if calls is not None:
            calls.append((function, arguments, keep))

    @contextmanager
    def recording(self) -> Iterator[Calls]:
        """Record launches and products, for `again`."""
        calls: Calls = []
        self._thread.calls = calls
        try:
            yield calls
        finally:
            self._thread.calls = None

    def again(self, calls: Calls) -> None:
        """Repeat recorded calls, with the same arrays and numbers.

        That takes a tenth of the time of preparing them.
        """
        for function, arguments, _ in calls:
            function(*arguments)

    def function(self, source: Source, name: str) -> Callable[..., None]:
        """Compile a source, once, and find one of its kernels."""
        function = self._functions.get((source, name))
        if function is None:
            with self._compiling:
                if source not in self._compiled:
                    options = (STANDARD, *source.options)
                    module = self.cupy.RawModule(code=source.text, options=options)
                    self._compiled[source] = module
                function = self._compiled[source].get_function(name)
                self._functions[source, name] = function
        return function

    @property
    def warps(self) -> int:
        """Number of warps of the largest launch, and of partial sums."""
        return MOST_GROUPS * THREADS // self.lanes

    def wait(self) -> None:
        """Wait until all calls are done."""
        self.cupy.cuda.get_current_stream().synchronize()

    @property
    def name(self) -> str:
        """Type of the GPU, such as ``NVIDIA H100 80GB HBM3``."""
        runtime = self.cupy.cuda.runtime
        return str(runtime.getDeviceProperties(runtime.getDevice())["name"], "utf-8")

    # -- memory and copies ---------------------------------------------------------------

    @property
    def free_memory(self) -> int:
        """Number of bytes that are free on the device, or reserved by this process and unused."""
        free, _ = self.cupy.cuda.runtime.memGetInfo()
        pool = self.cupy.get_default_memory_pool()
        return int(free) + int(pool.free_bytes())

    def pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> Host:
        """Make an array in memory from which the device copies by itself.

        CuPy uses such memory again for what has exactly its size, so that sizes are rounded up to
        eighths of a power of two.

        Raises
        ------
        MemoryError
            If this machine has no more memory that it can lock.
        """
        kind, count = np.dtype(dtype), int(np.prod(shape))
        size = max(64, count * kind.itemsize)
        grain = 1 << max(0, size.bit_length() - 4)
        try:
            memory = self.cupy.cuda.alloc_pinned_memory(-(-size // grain) * grain)
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            raise MemoryError(f"no page-locked memory of {size} bytes: {error}") from error
        return np.frombuffer(memory, kind, count).reshape(shape)

    def release(self) -> None:
        """Free unused memory of the device and unused page-locked memory."""
        self.cupy.get_default_memory_pool().free_all_blocks()
        self.release_pinned()

    def release_pinned(self) -> None:
        """Free unused page-locked memory."""
        self.cupy.get_default_pinned_memory_pool().free_all_blocks()

    def mark(self) -> Any:
        """Mark the calls so far, for `begin_copies`."""
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record()
        return event

    def begin_copies(self, pinned: list[Host], after: Any = None) -> tuple[list[DeviceArray], Any]:
        """Copy arrays while other work runs; return them and the event of their end.

        Copies may overwrite memory that was dropped before, so they wait for all work before the
        mark ``after``, which needs that later work reads nothing that was dropped since. Without
        a mark they wait for all calls so far, and memory is reserved first: another thread may
        drop a part that its latest work still reads.
        """
        with self._copies:
            arrays = [self.cupy.empty(host.shape, host.dtype) for host in pinned]
        self._copies.wait_event(self.mark() if after is None else after)
        with self._copies:
            for array, host in zip(arrays, pinned, strict=True):
                array.set(host, stream=self._copies)
            done = self.cupy.cuda.Event(disable_timing=True)
            done.record(self._copies)
        return arrays, done

    def wait_for_copies(self, done: Any) -> None:
        """Let later work wait for copies."""
        self.cupy.cuda.get_current_stream().wait_event(done)


def current() -> Device:
    """Return the GPU of this process, which is opened the first time.

    Raises
    ------
    OptionError
        If there is no CuPy or no GPU.
    """
    return _opened()


@cache
def _opened() -> Device:
    try:
        import cupy  # type: ignore[import-not-found]
    except ImportError as error:
        raise OptionError(NEEDS_CUPY.format(error)) from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise OptionError(NEEDS_GPU.format(error)) from error
    if not count:
        raise OptionError(NEEDS_GPU.format("there is none"))
    return Device(cupy)


def is_on_host(array: Any) -> bool:
    """Return True if an array lies in the memory of this process, as NumPy's do."""
    return bool(array.device == "cpu")
