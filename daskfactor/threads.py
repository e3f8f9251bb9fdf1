"""The threads of this machine, how many of them BLAS may use, and what its bits depend on."""

import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from threadpoolctl import ThreadpoolController, threadpool_info

_lock = threading.Lock()
_users = 0
_limiter: object | None = None
_known: tuple[int, ThreadpoolController] | None = None


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def _libraries() -> ThreadpoolController:
    """The BLAS libraries of this process; looked for again when modules have been imported.

    Looking takes 2 ms, a hundred times what setting the limit does.
    """
    global _known
    modules = len(sys.modules)
    if _known is None or _known[0] != modules:
        _known = modules, ThreadpoolController()
    return _known[1]


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Hold BLAS at one thread: parallelism is across blocks, and bits must not depend on it.

    The limit is process-wide, so nested and concurrent users share it and the
    last one to leave lifts it. With BLAS threads on top of ours, many small
    products take up to ten times as long.
    """
    global _users, _limiter
    with _lock:
        if _users == 0:
            _limiter = _libraries().limit(limits=1, user_api="blas")
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _limiter is not None:
                _limiter.restore_original_limits()  # type: ignore[attr-defined]
                _limiter = None


@lru_cache(maxsize=1)
def machine_attrs() -> dict[str, str]:
    """Return CPU and BLAS: draws are the same to the bit on machines where these agree."""
    return {"cpu": _cpu(), "blas": _blas()}


def _cpu() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _blas() -> str:
    found = {
        " ".join(
            str(library.get(key, "")) for key in ("internal_api", "version", "architecture")
        ).strip()
        for library in threadpool_info()
        if library.get("user_api") == "blas"
    }
    return "; ".join(sorted(found)) or "unknown"
