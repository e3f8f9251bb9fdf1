"""What the machine is, as far as bits depend on it."""

import platform
from functools import lru_cache
from pathlib import Path

import threadpoolctl


@lru_cache(maxsize=1)
def machine_attrs() -> dict[str, str]:
    """CPU and BLAS: draws are the same to the bit on machines where these agree."""
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
        for library in threadpoolctl.threadpool_info()
        if library.get("user_api") == "blas"
    }
    return "; ".join(sorted(found)) or "unknown"
