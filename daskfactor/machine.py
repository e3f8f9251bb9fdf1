"""Memory that a run may take, BLAS held to one thread, and the machine's part in the bits of draws.

The number of cores comes from `dask.system`.
"""

import ctypes
import operator
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from threadpoolctl import ThreadpoolController, threadpool_info

from daskfactor.errors import OptionError

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")
M_MMAP_THRESHOLD = -3
"""Number of the option in glibc's malloc.h."""
MAPPED = 2**20

_lock = threading.Lock()
_users = 0
_limiter: object | None = None
_known: tuple[int, ThreadpoolController] | None = None


def memory_budget(limit: int | str | None) -> int:
    """Bytes that blocks and the pass that makes them may take: as said, or half of what is free.

    Who says it also has large arrays given back to the system as soon as they are freed.
    """
    if limit is None:
        return available_memory() // 2
    _return_freed()
    try:
        if isinstance(limit, str):
            from dask.utils import parse_bytes

            limit = int(parse_bytes(limit))
        number = operator.index(limit)
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        raise OptionError(
            f"memory_limit must be a number of bytes, 0 or more, or a text such as '4 GiB', "
            f"got {limit!r}; leave it out for half of the free memory"
        )
    return number


@lru_cache(maxsize=1)
def _return_freed() -> None:
    """Let the C library map arrays of a MiB or more by themselves, where it is glibc.

    Otherwise its threshold rises to 32 MiB with the arrays that are freed, and each thread's
    heap keeps some of what it once had: measured, 400 MB at the peak instead of 240.
    """
    with suppress(OSError, AttributeError):
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, MAPPED)


def available_memory() -> int:
    """Bytes that this process can still take without swapping, its control group respected."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """What is left in the control group of this process (version 2) and in those above it.

    Limit minus use; cached file pages count as free, since the kernel gives them back.
    """
    try:
        lines = OWN_GROUP.read_text().splitlines()
    except OSError:
        return
    own = [CGROUP / line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    for group in [parent for path in own for parent in (path, *path.parents)]:
        try:
            limit = int((group / "memory.max").read_text())  # no number where there is no limit
            used = int((group / "memory.current").read_text())
            rows = (line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = sum(int(value) for key, value in rows if key == "inactive_file")
        except (OSError, ValueError):
            continue
        yield max(0, limit - used + cached)


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
