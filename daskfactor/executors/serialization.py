"""How data reach workers: as small handles that a worker opens once."""

import threading
import weakref
from collections import OrderedDict
from typing import Any

from daskfactor.data.blocks import BlockedData
from daskfactor.data.sharing import share

MOST_READERS = 4
"""Data sets that a worker process keeps open at a time."""
CACHE_SHARE = 0.4
"""Of a worker's memory limit, for decoded blocks; Dask starts to spill at 0.6."""

_handles: weakref.WeakKeyDictionary[BlockedData, Any] = weakref.WeakKeyDictionary()
_readers: OrderedDict[str, Any] = OrderedDict()
_lock = threading.Lock()


def handle_of(data: BlockedData) -> Any:
    """Return the handle of a data set, which goes with it."""
    with _lock:
        if data not in _handles:
            _handles[data] = share(data)
        return _handles[data]


def open_reader(handle: Any) -> Any:
    """Return the reader of a handle, from this process's few open ones if it is there."""
    with _lock:
        reader = _readers.get(handle.token)
        if reader is None:
            reader = _readers[handle.token] = handle.open(_memory_limit())
        _readers.move_to_end(handle.token)
        while len(_readers) > MOST_READERS:
            _readers.popitem(last=False)  # closed when its last user lets go of it
        return reader


def _memory_limit() -> int | None:
    """Return what decoded blocks may take; None outside of workers and without a limit."""
    from distributed import get_worker

    try:
        limit = get_worker().memory_manager.memory_limit
    except ValueError:
        return None
    return int(limit * CACHE_SHARE) if limit else None
