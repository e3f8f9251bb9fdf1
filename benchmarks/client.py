"""Peak memory of the client and of the workers of a run whose factors never pass through it.

A sparse matrix of ratings made up, with entries in every row and column, goes to Parquet and into
a blocked store. A ring of local workers samples from it into a run store, moments alone, in
a process of its own for every number of rows: those of ``--rows``. Printed are the peaks above
what processes have before, beside the bytes of the factors with all that travels with them and
what `estimate_cost` announces, and the seconds of the run and of its checkpoints.

    python benchmarks/client.py [--rows 1000000 10000000] [--columns 1000000] [--millions 100]
        [--components 32] [--blocks 4] [--workers 2] [--cycles 4] [--directory DIR]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from distributed import Client, LocalCluster

import daskfactor as dfac
from benchmarks.huge import resident
from daskfactor.results.store import RunStore

PIECE = 5_000_000


def write(path: Path, shape: tuple[int, int], entries: int) -> None:
    """Write entries at random, a piece at a time; the first ones meet all rows and columns."""
    rng = np.random.default_rng(0)
    with pq.ParquetWriter(
        path, pa.schema([("row", pa.int64()), ("column", pa.int64()), ("value", pa.float32())])
    ) as file:
        for start in range(0, entries, PIECE):
            number = np.arange(start, min(start + PIECE, entries))
            places = [
                np.where(number < size, number, rng.integers(0, size, number.size))
                for size in shape
            ]
            value = rng.integers(1, 6, number.size).astype(np.float32)
            file.write_table(pa.table({"row": places[0], "column": places[1], "value": value}))


def peak() -> int:
    return resident("VmHWM")


def restart_peak() -> int:
    """Begin to measure the peak anew; return what the process has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def child(V: str, options: argparse.Namespace) -> None:
    """Run once; print what was measured."""
    model = dfac.TweedieNMF(options.components, dispersion=1.0)
    sampler = dfac.PSGLD(warm_start=2)
    lengths: dict[str, Any] = {"draws": options.cycles, "tune": 2, "keep": "moments"}
    fixed: dict[str, Any] = lengths | {"progressbar": False, "random_seed": 0}
    saving, checkpoint = list[float](), RunStore.checkpoint

    def watched(self: RunStore, *args: Any) -> None:
        checkpoint(self, *args)
        saving.append(self.checkpoints._costs[1])  # with all that workers wrote for it

    RunStore.checkpoint = watched  # type: ignore[method-assign]
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as folder,
        LocalCluster(options.workers, threads_per_worker=1, memory_limit=0) as cluster,  # type: ignore[no-untyped-call]
        Client(cluster) as client,  # type: ignore[no-untyped-call]
    ):
        small = np.random.default_rng(0).poisson(2.0, (40, 40)).astype(np.float32)
        tiny = dfac.as_blocks(small, 2)
        dfac.sample(tiny, model, sampler, client=client, executor="ring", **fixed)
        told = dfac.estimate_cost(
            V, model, sampler, workers=options.workers, executor="ring", store="run", **lengths
        )
        before, begun = restart_peak(), time.perf_counter()
        theirs: dict[str, int] = client.run(restart_peak)  # type: ignore[no-untyped-call]
        store = f"{folder}/run.zarr"
        tree = dfac.sample(V, model, sampler, client=client, executor="ring", store=store, **fixed)
        seconds = time.perf_counter() - begun
        peaks: dict[str, int] = client.run(peak)  # type: ignore[no-untyped-call]
        found = {
            "client": peak() - before,
            "workers": [peaks[own] - theirs[own] for own in peaks],
            "announced": [told.client, told.worker],
            "seconds": seconds,
            "saving": saving,
            "lp": float(tree["sample_stats"]["lp"].values[0, -1]),
        }
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000_000, 10_000_000])
    parser.add_argument("--columns", type=int, default=1_000_000)
    parser.add_argument("--millions", type=float, default=100)
    parser.add_argument("--components", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--directory")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options)
        return
    for rows in options.rows:
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            table, V = Path(folder) / "table.parquet", str(Path(folder) / "v.zarr")
            shape = rows, options.columns
            write(table, shape, int(1e6 * options.millions))
            dfac.convert(table, V, unstored="missing", blocks=options.blocks, progressbar=False)
            table.unlink()
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.client", *sys.argv[1:], "--child", V],
                stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
        found = json.loads(done.stdout.splitlines()[-1])
        size = sum(shape) * options.components * 4
        mega = {name: [round(own / 2**20) for own in np.atleast_1d(found[name])]
                for name in ("client", "workers", "announced")}  # fmt: skip
        print(
            f"{rows:,} x {options.columns:,}: one copy of the factors {size / 2**20:,.0f} MiB; "
            f"peaks above the start: client {mega['client'][0]:,} MiB, workers {mega['workers']} "
            f"MiB; announced {mega['announced']}; {found['seconds']:.0f} s, checkpoints "
            f"{[round(own, 1) for own in found['saving']]} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
