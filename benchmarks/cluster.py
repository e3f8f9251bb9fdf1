"""Clusters on one machine: what `sample` gets of two processes, and what checkpoints cost.

*Ring*: PSGLD on two workers of one thread. The useful share is half of what a cycle takes in one
process, over what it takes the ring. The floor is the same of two processes that have half of the
rows each, at the same time, and exchange nothing: what the machine has to give.

*Engines*: operations that sleep for so long, on two workers: what is lost is what the engine costs.

*Checkpoints*: an S3 server on loopback (moto) in a process of its own takes its share of this
machine; a real one would take none, and answer some tens of milliseconds later, as this one does.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zarr
from distributed import Client, LocalCluster
from scipy import sparse

import daskfactor as dfac
from benchmarks.harness import QUIET, Array, Figure, Run, cycle_seconds, line
from benchmarks.processes import child
from daskfactor.data.grid import Grid, Reshuffled
from daskfactor.executors import ThreadsExecutor
from daskfactor.executors.cluster import ClusterTasksExecutor
from daskfactor.executors.plan import CycleOptions, Op, build_plan
from daskfactor.executors.ring import RingExecutor
from daskfactor.executors.state import ChainState, FactorBand, make_state
from daskfactor.kernels.views import Workspace
from daskfactor.runs.store import RunStore
from tests.object_store import ObjectStore, slow

BLOCKS = 8


@contextmanager
def workers(count: int) -> Iterator[Client]:
    size: Any = {"n_workers": count, "threads_per_worker": 1, "memory_limit": 0}
    options: Any = {"dashboard_address": ":0", "silence_logs": 50}
    with LocalCluster(**size, **options) as cluster, Client(cluster) as client:
        yield client


def model_and_sampler(K: int) -> tuple[Any, Any]:
    return dfac.TweedieNMF(K, dispersion=1.0), dfac.PSGLD(warm_start=0)


def alone(store: str, blocks: int | None, K: int, cycles: int, at: float) -> float:
    """Return the seconds of a cycle in one thread, begun at a time; a process of its own."""
    tiny = dfac.as_blocks(np.ones((64, 32), np.float32), 2)
    cycle_seconds(tiny, *model_and_sampler(K), 2, executor="serial")
    with dfac.as_blocks(store, blocks, memory_limit="8 GiB") as data:
        cycle_seconds(data, *model_and_sampler(K), 2, executor="serial")
        time.sleep(max(0.0, at - time.time()))
        return cycle_seconds(data, *model_and_sampler(K), cycles, executor="serial")


def useful(stores: dict[str, str], blocks: int | None, K: int, cycles: int) -> Iterator[Figure]:
    """Compare a ring of two with one process and with two that exchange nothing."""

    given: dict[str, Any] = {"blocks": blocks, "K": K, "cycles": cycles}

    def both_halves() -> float:
        at = time.time() + 20
        with ThreadPoolExecutor(2) as pool:
            halves = (stores[name] for name in ("top", "bottom"))
            calls = [pool.submit(child, alone, store=half, at=at, **given) for half in halves]
            return max(float(call.result()) for call in calls)

    single, both, taken = child(alone, store=stores["all"], at=0.0, **given), both_halves(), {}
    for count in (1, 2):
        data = dfac.as_blocks(stores["all"], blocks, memory_limit="8 GiB")
        with workers(count) as client, data:
            options: Any = {"client": client, "executor": "ring"}
            cycle_seconds(data, *model_and_sampler(K), 2, **options)
            taken[count] = cycle_seconds(data, *model_and_sampler(K), cycles, **options)
    note, what = f"blocks of {1e3 * single / BLOCKS**2:.1f} ms", "useful share of two processes"
    share, floor = single / 2 / taken[2], single / 2 / both
    yield Figure(share, "", floor, what, "more", "ratio >= 0.9", beside="floor", note=note)
    yield Figure(taken[2], "s", taken[1], "a cycle of two workers", beside="one worker")


def rings(V: Any, K: int, cycles: int) -> Iterator[Figure]:
    """Write the data and both halves of the rows, and compare."""
    half = V.shape[0] // 2
    with tempfile.TemporaryDirectory() as folder:
        stores = {}
        for name, part in {"all": V, "top": V[:half], "bottom": V[half:]}.items():
            stores[name] = f"{folder}/{name}.zarr"
            if sparse.issparse(V):
                options: Any = {"unstored": "missing", "blocks": BLOCKS, "progressbar": False}
                dfac.convert(part, stores[name], **options)
            else:
                zarr.save_array(stores[name], part)
        yield from useful(stores, None if sparse.issparse(V) else BLOCKS, K, cycles)


@line("a ring of two processes: counts of faces' size, 10304 × 400, K = 100", minutes=0.9)
def ring_faces(run: Run) -> Iterator[Figure]:
    shape = run.pick((600, 80), (10304, 400))
    V = np.random.default_rng(0).poisson(110, shape).astype(np.float32)
    yield from rings(V, run.pick(8, 100), run.pick(4, 60))


@line("a ring of two processes: ten million stored entries, K = 32", minutes=1.0)
def ring_sparse(run: Run) -> Iterator[Figure]:
    rng, millions = np.random.default_rng(0), run.pick(0.05, 10, 100)
    entries, shape = int(1e6 * millions), (int(2000 * millions), int(1000 * millions))
    where = [rng.integers(0, size, entries, np.int32) for size in shape]
    values = rng.integers(1, 6, entries, np.uint8).astype(np.float32)
    V = sparse.coo_array((values, where), shape=shape).tocsr()
    yield from rings(V, 32, run.pick(3, 20))


# -- engines -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sleeper:
    """A program whose operations take a fixed time and no processor."""

    seconds: float

    def update(
        self, op: Op, data: Any, bands: tuple[FactorBand, ...], workspace: Workspace
    ) -> None:
        time.sleep(self.seconds)
        for band in bands:
            band.values[0, 0] += 1

    def evaluate(self, *given: Any) -> Any:
        raise AssertionError("nothing to evaluate")


@line("operations that sleep, two workers, B = 4: useful share", "the sleeps alone", minutes=0.3)
def engines(run: Run) -> Iterator[Figure]:
    blocks = 4
    factors = [np.ones((256 * blocks, 100), np.float32) for _ in range(2)]  # bands of .1 MB

    def plan(cycles: int) -> Any:
        ones = np.ones((blocks, blocks), np.int64)
        record = lambda cycle: CycleOptions(record=True)  # noqa: E731
        return build_plan(Reshuffled(), ones, range(cycles), np.random.default_rng, record)

    with workers(2) as client:
        makers: dict[str, Callable[[], Any]] = {
            "ring": lambda: RingExecutor(client),
            "a task for each block": lambda: ClusterTasksExecutor(client),
            "threads": lambda: ThreadsExecutor(2),
        }
        for milliseconds in run.pick((5,), (1, 5, 20)):
            seconds = milliseconds / 1000
            cycles = max(1, round(run.pick(0.5, 1.0) / (seconds * blocks * blocks / 2)))
            for name, make in makers.items():
                executor: Any = make()
                state: ChainState = make_state(Grid.even((256 * blocks,) * 2, blocks), *factors)
                state = executor.run(plan(1), Sleeper(0.0), state, None)
                begun = time.perf_counter()
                executor.run(plan(cycles), Sleeper(seconds), state, None)
                ideal = cycles * blocks * blocks * seconds / 2
                share = ideal / (time.perf_counter() - begun)
                executor.close()
                goal = ">= 0.9" if name != "a task for each block" else ""
                yield Figure(share, "", 1.0, f"{name}, {milliseconds} ms", "more", goal)


# -- checkpoints ---------------------------------------------------------------------------------


def serve(delay: float, pipe: Connection) -> None:
    """Answer as an object store until a message comes."""
    server = ObjectStore()
    server.fault = slow(delay)
    pipe.send(server.environment)
    pipe.recv()


def saved(V: Array, K: int, draws: int, store: str | None) -> tuple[float, list[float]]:
    """Return the seconds of a run, and of each of its checkpoints."""
    costs: list[float] = []
    checkpoint = RunStore.checkpoint

    def watched(self: RunStore, *args: Any, **options: Any) -> None:
        checkpoint(self, *args, **options)
        costs.append(self.checkpoints._costs[1])

    RunStore.checkpoint = watched  # type: ignore[method-assign]
    begun, options = time.perf_counter(), QUIET | {"keep": "moments", "store": store}
    try:
        dfac.sample(V, dfac.TweedieNMF(K), dfac.PSGLD(), draws, draws // 4, **options)
    finally:
        RunStore.checkpoint = checkpoint  # type: ignore[method-assign]
    return time.perf_counter() - begun, costs


@line("a run with a store, 4000 × 3000 counts, K = 32", "the run in memory", minutes=0.8)
def checkpoints(run: Run) -> Iterator[Figure]:
    shape, K, draws = run.pick(((100, 80), 4, 20), ((4000, 3000), 32, 40), ((4000, 3000), 32, 300))
    V = np.random.default_rng(0).poisson(3.0, shape).astype(np.float32)
    saved(V[:60, :40], K, 4, None)  # compiles
    context, before = multiprocessing.get_context("spawn"), dict(os.environ)
    pipe, other = context.Pipe()
    server = context.Process(target=serve, args=(0.03, other), daemon=True)
    server.start()
    os.environ.update(pipe.recv())
    try:
        whole, _ = saved(V, K, draws, None)
        with tempfile.TemporaryDirectory() as folder:
            for name, store in {"folder": f"{folder}/run", "s3": "s3://runs/run"}.items():
                seconds, costs = saved(V, K, draws, store)
                each = f" of {statistics.median(costs):.2f} s" if costs else ""
                note = f"{len(costs)} checkpoints{each}"
                yield Figure(seconds, "s", whole, f"in a {name}", note=note)
                share = 100 * sum(costs) / seconds
                yield Figure(share, "%", None, f"in a {name}, in checkpoints", goal="<= 3")
    finally:
        pipe.send("enough")
        server.join()
        os.environ.clear()
        os.environ.update(before)
