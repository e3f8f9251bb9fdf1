"""How much memory blocks may take: what the caller says, or half of what is free."""

import operator
import os
from pathlib import Path

from daskfactor.errors import OptionError

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


def memory_budget(limit: int | str | None) -> int:
    """Bytes that decoded blocks and the pass that makes them may take."""
    if limit is None:
        return available_memory() // 2
    try:
        number = _parsed(limit) if isinstance(limit, str) else operator.index(limit)
    except (TypeError, ValueError):
        raise _unusable(limit) from None
    if number < 0:
        raise _unusable(limit)
    return number


def available_memory() -> int:
    """Bytes that this process can still take without swapping, its control group respected."""
    return min([_machine(), *_control_groups()])


def _parsed(limit: str) -> int:
    from dask.utils import parse_bytes

    return int(parse_bytes(limit))


def _unusable(limit: object) -> OptionError:
    return OptionError(
        f"memory_limit must be a number of bytes, 0 or more, or a text such as '4 GiB', "
        f"got {limit!r}; leave it out for half of the free memory"
    )


def _machine() -> int:
    """What the kernel says is available; where it says nothing, half of what there is."""
    try:
        rows = [line.split() for line in MEMINFO.read_text().splitlines()]
    except OSError:
        rows = []
    for row in rows:
        if row[0] == "MemAvailable:":
            return int(row[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _control_groups() -> list[int]:
    """What is left in the control group of this process (version 2) and in those above it."""
    try:
        lines = OWN_GROUP.read_text().splitlines()
    except OSError:
        return []
    paths = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    groups = [CGROUP / path for path in paths]
    nested = [parent for group in groups for parent in [group, *group.parents]]
    return [left for group in nested if (left := _left(group)) is not None]


def _left(group: Path) -> int | None:
    """Limit minus use; cached file pages count as free, since the kernel gives them back."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        rows = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    cached = sum(int(value) for key, value in rows if key == "inactive_file")
    return max(0, int(limit) - used + cached)
