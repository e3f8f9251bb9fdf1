"""A dense zarr store four times as large as the memory the process may have.

The out-of-core run happens in a child process whose data segment the operating
system limits (RLIMIT_DATA) to what it has after compiling plus a quarter of the
store: one allocation too many is a MemoryError. The in-memory run gets the same
matrix as a NumPy array and no limit. Both run the same plan on the same grid,
in turn, and the ratio of their speeds is what counts.

    python benchmarks/out_of_core.py [--rows 16384] [--cols 8192] [--components 32]
        [--cycles 6] [--rounds 3] [--json]

Physical limit: a block of m x n entries takes 6 m n K flops and 4 m n bytes.
Out of core, blocks come from a scratch file through the page cache (about
5-10 GB/s), so at K = 32 reading is a tenth to a fifth of the arithmetic.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from daskfactor.data.sources import as_blocks
from daskfactor.executors import LanesExecutor
from daskfactor.inference.langevin import PSGLD
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.inference.tweedie_chain import TweedieChain
from daskfactor.models.tweedie import TweedieNMF

BLOCKS = 8


def status(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise KeyError(field)


def cycles_of(V: Any, components: int, cycles: int, limit: int | None) -> dict[str, float]:
    """Seconds per cycle and of loading, for one kind of input."""
    executor = LanesExecutor()
    started = time.perf_counter()
    with as_blocks(V, BLOCKS, memory_limit=limit) as data:
        loading = time.perf_counter() - started
        options = RunOptions(cycles + 1, 0, 1, 1, 0, "moments", 0, "float32")
        model = TweedieNMF(components, dispersion=1.0)
        chain = TweedieChain(Setting(data, model, PSGLD(warm_start=0), options, executor), 0)
        chain.start()
        chain.advance(1)
        begun = time.perf_counter()
        chain.advance(1 + cycles)
        seconds = (time.perf_counter() - begun) / cycles
        in_memory = float(data.in_memory)
    executor.close()
    return {"seconds": seconds, "loading": loading, "in_memory": in_memory}


def child(kind: str, path: str, components: int, cycles: int) -> None:
    array = zarr.open_array(path, mode="r")
    size = array.shape[0] * array.shape[1] * 4
    # Compiles, and lets BLAS set up its buffer for each lane: OpenBLAS hangs if it cannot later.
    cycles_of(np.ones((4096, 1024), np.float32), components, 2, None)
    if kind == "memory":
        print(json.dumps(cycles_of(np.asarray(array[:]), components, cycles, None)))
        return
    limit = size // 4
    before = status("VmData")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    resident = status("VmRSS")
    resource.setrlimit(resource.RLIMIT_DATA, (before + limit, before + limit))
    result = cycles_of(path, components, cycles, limit // 2)
    result["limit"] = limit
    result["peak"] = status("VmHWM") - resident
    print(json.dumps(result))


def run(kind: str, path: Path, arguments: argparse.Namespace) -> dict[str, float]:
    words = [kind, str(path), str(arguments.components), str(arguments.cycles)]
    done = subprocess.run(
        [sys.executable, __file__, "--child", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the {kind} run failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def make_store(path: Path, rows: int, cols: int) -> None:
    array = zarr.create_array(
        str(path), shape=(rows, cols), chunks=(rows // 8, cols // 8), dtype="float32"
    )
    rng = np.random.default_rng(0)
    for start in range(0, rows, rows // 8):
        block = rng.poisson(5.0, (rows // 8, cols)).astype(np.float32)
        array[start : start + rows // 8] = block


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--cols", type=int, default=8192)
    parser.add_argument("--components", type=int, default=32)
    parser.add_argument("--cycles", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "matrix.zarr"
        make_store(path, arguments.rows, arguments.cols)
        pairs = [
            (run("memory", path, arguments), run("store", path, arguments))
            for _ in range(arguments.rounds)
        ]
    size = arguments.rows * arguments.cols * 4
    report = {
        "matrix_mb": size / 1e6,
        "limit_mb": pairs[0][1]["limit"] / 1e6,
        "peak_above_start_mb": max(store["peak"] for _, store in pairs) / 1e6,
        "blocks_in_memory": bool(pairs[0][1]["in_memory"]),
        "loading_seconds": statistics.median(store["loading"] for _, store in pairs),
        "ms_per_pass_in_memory": 1e3 * statistics.median(m["seconds"] for m, _ in pairs),
        "ms_per_pass_out_of_core": 1e3 * statistics.median(s["seconds"] for _, s in pairs),
        "share_of_in_memory_throughput": statistics.median(
            memory["seconds"] / store["seconds"] for memory, store in pairs
        ),
    }
    if arguments.json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        print(
            f"{name:32} {value:12.3f}" if isinstance(value, float) else f"{name:32} {value!s:>12}"
        )


if __name__ == "__main__":
    main()
