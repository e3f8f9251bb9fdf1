"""Hundreds of millions of stored entries from a store on disk, within a memory limit.

A sparse matrix (yours with ``--data``, ratings made up without) is set side by
side with itself until it has the wanted number of entries, written as Parquet,
and converted into a blocked store. Then the same plan runs twice, each in a process of its own:
with a memory limit far below the decoded blocks, and without one. Printed are
the rates, their ratio, and the peak memory beside what `estimate_cost` said.

    python benchmarks/huge.py [--millions 300] [--components 16] [--limit "512 MiB"]
        [--cycles 3] [--directory DIR] [--blocks 16]

Physical limit: 6 to 8 bytes an entry come through the page cache at some GB/s;
while that is faster than the arithmetic (about 10 ns an entry and core at K = 16),
the run is bound by the arithmetic.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import sparse

import daskfactor as dfac
from daskfactor.executors import LanesExecutor
from daskfactor.inference.setting import RunOptions, Setting


def base(path: str | None) -> sparse.coo_array:
    """The matrix to repeat."""
    if path is not None:
        with np.load(path) as archive:
            parts = (archive["data"], archive["indices"].astype(np.int64), archive["indptr"])
            return sparse.csr_array(parts, shape=tuple(archive["shape"])).tocoo()
    rng = np.random.default_rng(0)
    rows = (6040 * rng.random(1_100_000) ** 1.5).astype(np.int64)
    cols = (3706 * rng.random(1_100_000) ** 2).astype(np.int64)
    found = sparse.coo_array((np.ones(rows.size), (rows, cols)), shape=(6040, 3706)).tocsr()
    found.data = rng.integers(1, 6, found.nnz).astype(np.float32)
    return found.tocoo()


def write(matrix: sparse.coo_array, side: int, path: Path) -> None:
    """Parquet with ``side`` x ``side`` copies of the matrix, one row group each."""
    rows, cols = (index.astype(np.int64) for index in matrix.coords)
    values = pa.array(matrix.data.astype(np.float32))
    writer = None
    for down in range(side):
        for across in range(side):
            table = pa.table(
                {
                    "row": rows + down * matrix.shape[0],
                    "column": cols + across * matrix.shape[1],
                    "value": values,
                }
            )
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
    assert writer is not None
    writer.close()


def resident(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise KeyError(field)


def warm_up(components: int) -> None:
    """Compile, so that neither the clock nor the memory sees it."""
    tiny = sparse.random_array((200, 100), density=0.2, rng=np.random.default_rng(0))
    for unstored in ("missing", "zero"):
        dfac.sample(
            dfac.as_blocks(tiny.tocsr(), unstored=unstored, allow_empty=True),
            dfac.TweedieNMF(components, dispersion=1.0),
            dfac.PSGLD(),
            draws=2,
            tune=2,
            progressbar=False,
        )


def child(store: str, components: int, cycles: int, limit: str | None) -> None:
    """One run; prints its seconds a cycle and its peak memory."""
    model = dfac.TweedieNMF(components, beta=1.0, dispersion=1.0)
    sampler = dfac.PSGLD(warm_start=0)
    executor = LanesExecutor()
    warm_up(components)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    cost = dfac.estimate_cost(
        store, model, sampler, draws=cycles, tune=1, keep="moments", memory_limit=limit
    )
    with dfac.as_blocks(store, memory_limit=limit) as data:
        options = RunOptions(cycles + 2, 1, 1, 1, 0, "moments", 0, "float32")
        chain = sampler.chain(Setting(data, model, sampler, options, executor), 0)
        chain.start()
        chain.advance(1)
        begun = time.perf_counter()
        chain.advance(1 + cycles)
        seconds = (time.perf_counter() - begun) / cycles
        entries = int(data.n_stored.sum())
        place = data.describe()
    executor.close()
    peak = resident("VmHWM") - before
    print(
        json.dumps(
            {
                "seconds": seconds,
                "rate": entries / seconds,
                "peak": peak,
                "estimate": cost.peak,
                "place": place,
            }
        )
    )


def in_child(arguments: argparse.Namespace, store: Path, limit: str | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", str(store)]
    command += ["--components", str(arguments.components), "--cycles", str(arguments.cycles)]
    command += [] if limit is None else ["--limit", limit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, default=300)
    parser.add_argument("--components", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--limit", default=None)
    parser.add_argument("--data", help="scipy .npz to repeat")
    parser.add_argument("--directory")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.components, arguments.cycles, arguments.limit)
        return
    folder = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        matrix = base(arguments.data)
        side = int(np.ceil(np.sqrt(1e6 * arguments.millions / matrix.nnz)))
        write(matrix, side, folder / "table.parquet")
        made = dfac.convert(
            folder / "table.parquet",
            folder / "store.zarr",
            unstored="missing" if arguments.data is None else "zero",
            blocks=arguments.blocks,
            memory_limit="2 GiB",
            progressbar=False,
        )
        print(f"{made.shape[0]} x {made.shape[1]}, {made.n_stored / 1e6:.0f} M entries")
        print(f"converted at {made.entries_per_second / 1e6:.1f} M entries/s, {made.nbytes} bytes")
        found = {}
        for limit in (arguments.limit or "512 MiB", None):
            own = found[limit] = in_child(arguments, folder / "store.zarr", limit)
            print(
                f"limit {limit}: {own['rate'] / 1e6:.0f} M entries/s, {own['seconds']:.2f} s a "
                f"cycle, peak {own['peak'] / 2**20:.0f} MiB, estimated "
                f"{own['estimate'] / 2**20:.0f} MiB ({own['place']})"
            )
        bounded, free = found.values()
        print(f"out of core at {bounded['rate'] / free['rate']:.2f} of the speed in memory")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
