"""How functions and data reach workers: packed functions, and data as handles.

Data never travel inside a task. Where a function or a run refers to them, what
is sent is a small handle; a worker opens it once and keeps the reader.
"""

import io
import pickle
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData

MOST_READERS = 4
"""Data sets that a worker process keeps open at a time."""

CACHE_SHARE = 0.4
"""Of a worker's memory limit, for decoded blocks; Dask starts to spill at 0.6."""
ALIGNMENT = 16


@runtime_checkable
class Handle(Protocol):
    """A small picklable thing that opens to a reader on a worker."""

    token: str

    def open(self, memory_limit: int | None = None) -> Any:
        """The reader; it may keep as many bytes of decoded blocks."""
        ...


class InPlace:
    """A handle of something small that is sent as it is (or of nothing at all)."""

    __slots__ = ("token", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.token = ""

    def open(self, memory_limit: int | None = None) -> Any:
        del memory_limit
        return self.value


@dataclass(frozen=True, slots=True)
class Packed:
    """A pickled object with its arrays beside it, so that they are sent without a copy."""

    head: bytes
    buffers: tuple[NDArray[np.uint8], ...]

    def load(self) -> Any:
        """The object; its arrays may share memory with the buffers."""
        return pickle.loads(self.head, buffers=[_placed(buffer) for buffer in self.buffers])


def _placed(buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A buffer where compiled kernels expect arrays: frames of a message start anywhere."""
    usable = buffer.ctypes.data % ALIGNMENT == 0 and buffer.flags.writeable
    return buffer if usable else buffer.copy()


class Shares:
    """Handles of the data an executor was given, each made once and closed with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[int, tuple[weakref.ref[Any], Handle]] = {}

    def handle(self, data: Any) -> Handle:
        """The handle of a data set; anything that is not one is sent as it is."""
        if isinstance(data, Handle) and not isinstance(data, BlockedData):
            return data
        if not isinstance(data, BlockedData):
            return InPlace(data)
        with self._lock:
            known = self._handles.get(id(data))
            if known is not None and known[0]() is data:
                return known[1]
            made = _share(data)
            self._handles[id(data)] = (weakref.ref(data, self._forget(id(data))), made)
            return made

    def _forget(self, number: int) -> Any:
        own = weakref.ref(self)

        def forget(_: Any) -> None:
            shares = own()
            known = shares._handles.pop(number, None) if shares is not None else None
            if known is not None:
                _close(known[1])

        return forget

    def pack(self, value: Any) -> Packed:
        """Pickle anything, closures too; data sets inside become their handles."""
        file = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        _Pickler(file, self, buffers).dump(value)
        raw = tuple(np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers)
        return Packed(file.getvalue(), raw)

    def close(self) -> None:
        """Remove what was written for workers."""
        with self._lock:
            handles = [handle for _, handle in self._handles.values()]
            self._handles.clear()
        for handle in handles:
            _close(handle)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self, file: io.BytesIO, shares: Shares, buffers: list[pickle.PickleBuffer]
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._shares = shares

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, BlockedData):
            return open_reader, (self._shares.handle(value),)
        return super().reducer_override(value)


_readers: OrderedDict[str, Any] = OrderedDict()
_readers_lock = threading.Lock()


def open_reader(handle: Handle) -> Any:
    """The reader of a handle, from this process's few open ones if it is there.

    On a worker it may fill a share of the memory that the worker may use.
    """
    if isinstance(handle, InPlace):
        return handle.value
    with _readers_lock:
        reader = _readers.get(handle.token)
        if reader is None:
            reader = _readers[handle.token] = handle.open(_memory_limit())
        _readers.move_to_end(handle.token)
        while len(_readers) > MOST_READERS:
            _readers.popitem(last=False)  # closed when its last user lets go of it
        return reader


def _memory_limit() -> int | None:
    """What decoded blocks may take; None outside of workers and on those without a limit."""
    from distributed import get_worker

    try:
        limit = get_worker().memory_manager.memory_limit
    except ValueError:
        return None
    return int(limit * CACHE_SHARE) if limit else None


def _share(data: BlockedData) -> Handle:
    from daskfactor.data.sharing import share

    handle: Handle = share(data)
    return handle


def _close(handle: Handle) -> None:
    close = getattr(handle, "close", None)
    if close is not None:
        close()
