"""How fast a table becomes a blocked store, and how fast its blocks are read back.

Makes a Parquet file of ratings (whole-number keys with gaps, row and column
popularity as heavy-tailed as in real ratings, values 0.5 to 5), converts it with
every codec, and reads all blocks of each store back, checked and decoded, on one
thread and on two. Files are in the page cache, so disks are not measured.

    python benchmarks/convert.py [--millions 20] [--blocks 8] [--text] [--csv] [--json]

Physical limit: reading moves 6 bytes an entry (uncompressed) through one copy and
one checksum, both at several GB/s.
"""

import argparse
import json
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

import daskfactor as dfac
from daskfactor.data.store import COMPRESSIONS, BlockStore

BATCH = 2_000_000


def table(rng: np.random.Generator, entries: int, shape: tuple[int, int], text: bool) -> pa.Table:
    """Ratings of users and films whose popularity falls like a power of their rank."""
    rows = (shape[0] * rng.random(entries) ** 1.5).astype(np.int64)
    cols = (shape[1] * rng.random(entries) ** 3).astype(np.int64)
    keys = [rows * 3 + 7, cols * 11 + 1]
    if text:
        names = [pa.array(key).cast(pa.string()) for key in keys]
    else:
        names = [pa.array(key) for key in keys]
    stars = pa.array((rng.integers(1, 11, entries) / 2).astype(np.float32))
    return pa.table({"user": names[0], "film": names[1], "stars": stars})


def write_source(path: Path, entries: int, text: bool, as_csv: bool) -> None:
    rng = np.random.default_rng(1)
    shape = max(1000, entries // 100), max(500, entries // 1000)
    writer = None
    for start in range(0, entries, BATCH):
        part = table(rng, min(BATCH, entries - start), shape, text)
        if writer is None:
            make = pyarrow.csv.CSVWriter if as_csv else pq.ParquetWriter
            writer = make(path, part.schema)
        writer.write_table(part)
    assert writer is not None
    writer.close()


def read_back(path: Path, threads: int) -> float:
    """Seconds to read all blocks of a store."""
    store = BlockStore(str(path))
    blocks = store.known.grid.all_blocks()
    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda block: store.read(*block).values.size, blocks):
            pass
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=20)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--text", action="store_true", help="keys are texts")
    parser.add_argument("--csv", action="store_true", help="CSV in the place of Parquet")
    parser.add_argument("--rounds", type=int, default=3, help="readings per store; the best counts")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    entries = int(arguments.millions * 1e6)
    folder = Path(tempfile.mkdtemp(prefix="daskfactor-convert-"))
    results = []
    try:
        source = folder / ("table.csv" if arguments.csv else "table.parquet")
        write_source(source, entries, arguments.text, arguments.csv)
        options = {"unstored": "zero", "blocks": arguments.blocks, "progressbar": False}
        # Compiles the kernels.
        dfac.convert(source, folder / "warm.zarr", **options)
        for balance in (False, True):
            for codec in COMPRESSIONS:
                store = folder / f"{codec}-{balance}.zarr"
                done = dfac.convert(source, store, compression=codec, balance=balance, **options)
                reading = {
                    threads: min(read_back(store, threads) for _ in range(arguments.rounds))
                    for threads in (1, 2)
                }
                results.append(
                    {
                        "codec": codec,
                        "balance": balance,
                        "seconds": done.seconds,
                        "converted_per_second": done.entries_per_second,
                        "stored": done.n_stored,
                        "bytes_per_entry": done.nbytes / done.n_stored,
                        "imbalance": done.imbalance,
                        "read_per_second_1": done.n_stored / reading[1],
                        "read_per_second_2": done.n_stored / reading[2],
                    }
                )
                if not arguments.json:
                    print(line(results[-1]), flush=True)
                shutil.rmtree(store)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        print(json.dumps(results, indent=2))


def line(result: dict[str, float]) -> str:
    return (
        f"{result['codec']:5} {'balanced' if result['balance'] else '':8} converts "
        f"{result['converted_per_second'] / 1e6:5.1f} M entries/s ({result['seconds']:.1f} s), "
        f"{result['bytes_per_entry']:.2f} bytes an entry, imbalance {result['imbalance']:.2f}; "
        f"reads {result['read_per_second_1'] / 1e6:.0f} M entries/s on one thread, "
        f"{result['read_per_second_2'] / 1e6:.0f} on two"
    )


if __name__ == "__main__":
    main()
