"""Strong and weak scaling of the ring over worker processes of one machine.

Strong: the same sparse matrix on one single-thread worker and on two. Weak: the
matrix doubled in both directions (four times the entries, twice the bands) on
twice the workers, so that every worker has as many blocks in a part as before,
each of the same size. What is compared is the wall time of a cycle (strong) and
of a part (weak), over several segments, interleaved. Beside them stands what this machine
has to give: two runs of the single matrix on clusters of their own, which exchange nothing,
at the same time against one at a time.

    python benchmarks/scaling.py [--millions 8] [--components 32] [--cycles 20] [--rounds 3]

Şimşekli et al. 2015, section 4.3, is the model of both; this is one machine, so
the workers share its memory bandwidth and what else it does.
"""

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, LocalCluster
from scipy import sparse

import daskfactor as dfac
from daskfactor.executors import make_executor
from daskfactor.inference.setting import RunOptions, Setting

BLOCKS = 4
TWIN = "single, another"


def matrix(millions: float) -> sparse.csr_array:
    rng = np.random.default_rng(0)
    entries = int(1.05e6 * millions)
    shape = (int(2000 * millions), int(1000 * millions))
    rows, cols = (rng.integers(0, size, entries) for size in shape)
    found = sparse.coo_array((np.ones(entries, np.float32), (rows, cols)), shape=shape).tocsr()
    found.data = rng.integers(1, 6, found.nnz).astype(np.float32)
    return found


class Run:
    """A chain that goes on, segment by segment, on workers of its own."""

    def __init__(self, store: str, workers: int, components: int, cycles: int) -> None:
        self.cluster = LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            dashboard_address=":0",
            memory_limit="4GiB",
            silence_logs=50,
        )
        self.client = Client(self.cluster)
        self.executor = make_executor("ring", self.client)
        self.data = dfac.as_blocks(store, memory_limit="4 GiB")
        options = RunOptions(1000, 0, 1, 1, 0, "moments", 0, "float32")
        model = dfac.TweedieNMF(components, beta=1.0, dispersion=1.0)
        sampler = dfac.PSGLD(warm_start=0)
        setting = Setting(self.data, model, sampler, options, self.executor)
        self.chain: Any = sampler.chain(setting, 0)
        self.chain.start()
        self.cycles = cycles
        self.busy: list[float] = []
        self.segment()  # compiles on the workers and reads the blocks

    def segment(self) -> float:
        """Seconds of a cycle."""
        begun = time.perf_counter()
        self.chain.advance(self.chain.cycle + self.cycles)
        self.chain.forget()
        report = self.executor.report
        self.busy.append(report.utilisation)
        return (time.perf_counter() - begun) / self.cycles

    def close(self) -> None:
        self.executor.close()
        self.data.close()
        self.client.close()
        self.cluster.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=8)
    parser.add_argument("--components", type=int, default=32)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        single = matrix(arguments.millions)
        stores = [str(Path(folder) / name) for name in ("single.zarr", "doubled.zarr")]
        doubled = sparse.csr_array(sparse.block_array([[single, single], [single, single]]))
        for V, store, blocks in zip((single, doubled), stores, (BLOCKS, 2 * BLOCKS), strict=True):
            dfac.convert(V, store, unstored="missing", blocks=blocks, progressbar=False)
        print(f"{single.shape[0]} x {single.shape[1]}, {single.nnz / 1e6:.0f} M entries; doubled")
        runs = {
            name: Run(store, workers, arguments.components, arguments.cycles)
            for name, store, workers in (
                ("single, 1 worker", stores[0], 1),
                ("doubled, 1 worker", stores[1], 1),
                ("doubled, 2 workers", stores[1], 2),
                (TWIN, stores[0], 1),
            )
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        pair = [runs["single, 1 worker"], runs[TWIN]]
        together = []
        for _ in range(arguments.rounds):
            for name, run in runs.items():
                seconds[name].append(run.segment())
            with ThreadPoolExecutor(2) as pool:
                together.append(max(pool.map(Run.segment, pair)))
        for run in runs.values():
            run.close()
        busy = {name: run.busy[-1] for name, run in runs.items()}
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in middle.items():
        parts = 2 * BLOCKS if "doubled" in name else BLOCKS
        print(
            f"{name:20s} {value:7.3f} s a cycle, {1000 * value / parts:7.1f} ms a part, "
            f"workers busy {busy[name]:.2f} of the time"
        )
    strong = middle["doubled, 1 worker"] / middle["doubled, 2 workers"]
    weak = middle["doubled, 2 workers"] / 2 / middle["single, 1 worker"]
    print(f"strong scaling, 1 to 2 workers: {strong:.2f} times as fast")
    alone = statistics.mean([middle["single, 1 worker"], middle[TWIN]])
    limit = 2 * alone / statistics.median(together)
    print(f"two runs that exchange nothing, at once: {limit:.2f} times as fast as in turn")
    print(f"weak scaling: a part takes {weak:.2f} times as long on the doubled matrix")


if __name__ == "__main__":
    main()
