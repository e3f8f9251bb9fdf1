"""Memory limits, single-threaded BLAS, and the properties of the machine that affect draws.

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

from daskfactor.errors import DaskfactorError, OptionError

CGROUP = Path("/sys/fs/cgroup")
PROCESS_CGROUP = Path("/proc/self/cgroup")
M_MMAP_THRESHOLD = -3
"""Number of the option in glibc's malloc.h."""
MMAP_THRESHOLD = 2**20
"""Bytes from which on the C library maps an array and returns it to the system when freed."""

_lock = threading.Lock()
_users = 0
_limiter: object | None = None
_controller: tuple[int, ThreadpoolController] | None = None


def memory_budget(limit: int | str | None) -> int:
    """Return the bytes for blocks and for building them: a limit, or half of the free memory.

    With a limit, large arrays are also returned to the system as soon as they are freed.
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
            f"memory_limit must be a number of bytes, 0 or more, or a text such as '4 GiB', got "
            f"{limit!r}; leave it out for half of the free memory"
        )
    return number


@lru_cache(maxsize=1)
def _return_freed() -> None:
    """Make glibc map arrays of a MiB or more, so that freed ones return to the system.

    By default its threshold rises to 32 MiB with the arrays that are freed, and the heap of each
    thread keeps freed memory: the measured peak was 400 MB instead of 240.
    """
    with suppress(OSError, AttributeError):
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)


def available_memory() -> int:
    """Return the bytes that this process can still use without swapping, within its cgroups."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_left_in_groups()])


def require_memory(
    nbytes: int, what: str, advice: str, error: type[DaskfactorError] = OptionError
) -> None:
    """Refuse to begin something for which there is not enough memory.

    Parameters
    ----------
    nbytes
        Bytes that it takes.
    what
        Subject of the sentence, with its verb, such as "3 draws take".
    advice
        What to do instead.
    error
        Type of the error.
    """
    free = available_memory()
    if nbytes > free:
        raise error(
            f"{what} {nbytes / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB of memory are free; "
            f"{advice}"
        )


def _left_in_groups() -> Iterator[int]:
    """Yield the free bytes in the control group of this process (version 2) and its parents.

    Free is the limit minus the use; cached file pages count as free, since the kernel can drop
    them.
    """
    try:
        lines = PROCESS_CGROUP.read_text().splitlines()
    except OSError:
        return
    groups = [CGROUP / line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    for group in [parent for path in groups for parent in (path, *path.parents)]:
        try:
            limit = int((group / "memory.max").read_text())  # no number where there is no limit
            used = int((group / "memory.current").read_text())
            rows = (line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = sum(int(value) for key, value in rows if key == "inactive_file")
        except (OSError, ValueError):
            continue
        yield max(0, limit - used + cached)


def _libraries() -> ThreadpoolController:
    """Return the BLAS libraries of this process; search again if modules have been imported.

    A search takes 2 ms, a hundred times as long as setting the limit.
    """
    global _controller
    modules = len(sys.modules)
    if _controller is None or _controller[0] != modules:
        _controller = modules, ThreadpoolController()
    return _controller[1]


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Limit BLAS to one thread: blocks run in parallel, and results must not depend on it.

    The limit is process-wide: nested and concurrent users share it, and the last one to exit
    restores it. With additional BLAS threads, many small products take up to ten times as long.
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
    """Return CPU and BLAS; draws are equal to the bit on machines where these agree."""
    return {"cpu": _cpu(), "blas": _blas()}


def _cpu() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _blas() -> str:
    libraries = {
        " ".join(
            str(library.get(key, "")) for key in ("internal_api", "version", "architecture")
        ).strip()
        for library in threadpool_info()
        if library.get("user_api") == "blas"
    }
    return "; ".join(sorted(libraries)) or "unknown"
