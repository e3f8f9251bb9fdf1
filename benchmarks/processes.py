"""Call functions of benchmarks in processes of their own, and read what memory these take."""

import importlib
import json
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT


def child(function: Callable[..., Any], **options: Any) -> Any:
    """Call a function of a benchmark in a process of its own; return what it returns, by JSON."""
    name = f"{function.__module__}:{function.__name__}"
    command = [sys.executable, "-m", "benchmarks.processes", name, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])


def memory(field_name: str) -> int:
    """Return a field of /proc/self/status, such as VmRSS, in bytes."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(field_name + ":"):
            return 1024 * int(text.split()[1])
    raise KeyError(field_name)


def restart_peak() -> int:
    """Begin to measure the peak of memory anew; return what the process has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def limit_data(more: int) -> None:
    """Forbid the process to allocate more than so many bytes beside what it has."""
    bound = memory("VmData") + more
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


if __name__ == "__main__":
    module, _, function_name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), function_name)
    with warnings.catch_warnings(action="ignore"):
        print(json.dumps(function(**json.loads(sys.argv[2]))))
