"""What checkpoints cost: a run kept in memory, in a folder, and in an object store.

The object store is an S3 server on loopback (moto) in a process of its own, which takes its share
of this machine: a real one would take none, and answer some tens of milliseconds later, which
``--delay`` adds to every request. Printed are wall times, commits, and the seconds from
the moment at which a checkpoint is due to the end of its commit, moments and draws included.

    python benchmarks/checkpoints.py [--rows 4000] [--columns 3000] [--components 32]
        [--draws 300] [--delay 0.03] [--json]
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import daskfactor as dfac
from daskfactor.results.store import RunStore
from tests.object_store import ObjectStore, slow


def serve(delay: float, pipe: Connection) -> None:
    server = ObjectStore()
    if delay:
        server.fault = slow(delay)
    pipe.send(server.environment)
    pipe.recv()


def timed(V: Any, components: int, draws: int, store: str | None) -> dict[str, Any]:
    """Wall seconds of a run, and what its checkpoints took."""
    costs: list[float] = []
    checkpoint = RunStore.checkpoint

    def watched(self: RunStore, *args: Any, **options: Any) -> None:
        checkpoint(self, *args, **options)
        costs.append(self.checkpoints._costs[1])

    RunStore.checkpoint = watched  # type: ignore[method-assign]
    model = dfac.TweedieNMF(components)
    options: dict[str, Any] = {"random_seed": 0, "progressbar": False, "keep": "moments"}
    begun = time.perf_counter()
    try:
        dfac.sample(V, model, dfac.PSGLD(), draws, draws // 4, store=store, **options)
    finally:
        RunStore.checkpoint = checkpoint  # type: ignore[method-assign]
    wall = time.perf_counter() - begun
    return {
        "seconds": round(wall, 1),
        "checkpoints": len(costs),
        "each": round(statistics.median(costs), 3) if costs else None,
        "share": round(sum(costs) / wall, 4) if costs else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--columns", type=int, default=3000)
    parser.add_argument("--components", type=int, default=32)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--delay", type=float, default=0.03)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    V = rng.poisson(3.0, (args.rows, args.columns)).astype(np.float32)
    timed(V[:60, :40], args.components, 4, None)  # compiles
    found = {}
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    server = context.Process(target=serve, args=(args.delay, other), daemon=True)
    server.start()
    os.environ.update(pipe.recv())
    with tempfile.TemporaryDirectory() as folder:
        places = {"memory": None, "folder": str(Path(folder) / "run"), "s3": "s3://runs/run"}
        for name, store in places.items():
            found[name] = timed(V, args.components, args.draws, store)
            if not args.json:
                print(f"{name:8}", *(f"{key} {value}" for key, value in found[name].items()))
    if args.json:
        print(json.dumps(found))
    pipe.send("enough")
    server.join()


if __name__ == "__main__":
    main()
