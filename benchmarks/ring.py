"""Executors on a `distributed` cluster: useful kernel time over wall time.

- ``faces`` and ``sparse``: P-SGLD on a 10304 x 400 matrix of counts (K = 100, B = 8) and on a
  sparse one of ``--millions`` entries (K = 32, B = 8), float32, on two workers of one thread.
  Useful time is what either worker takes for its share of the operations, by itself while the
  other idles and with its own copy of all bands. Beside the executors stands what the machine has
  to give, the floor: both do so at the same time, and exchange nothing. All of them take turns;
  printed are medians of ``--repeats``.
- ``simulated``: ``--workers`` of one thread whose operations sleep, with column bands of 0.1 MB,
  on a grid of two bands a worker. Useful time is the sum of the sleeps; what is lost is what the
  engine costs. Two cores have to do the work of all workers' event loops, which a real cluster
  has not.
- ``network``: four hosts of their own, at each of the rates ``--hosts`` (1 and 10 Gbit/s), with
  operations that sleep and column bands of some sizes: the seconds of a cycle beside those that
  `estimate_cost` foresees (for root; see tests/cluster/hosts.py).
- ``straggler``: four such workers, in processes, one of them at half speed, on 32 x 32 blocks;
  segment by segment, beside what all of them could do together.

    python -m benchmarks.ring [faces] [sparse] [simulated] [straggler] [network]
        [--executors ring,tasks] [--millions 100] [--hosts 1gbit 10gbit]

``--hosts`` runs faces and sparse between hosts of their own at these rates, too (for root; see
tests/cluster/hosts.py), and counts the bytes that a host sends in a cycle.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import numpy as np
import zarr
from distributed import Client, LocalCluster
from scipy import sparse

import daskfactor as dfac
from daskfactor.data.grid import Cyclic, Grid, NestedReshuffled, Reshuffled, Schedule
from daskfactor.executors.base import Executor, Work, perform
from daskfactor.executors.cluster import ClusterTasksExecutor, pack, unpack
from daskfactor.executors.plan import CycleOptions, Op, Round, build_plan
from daskfactor.executors.ring import RingExecutor
from daskfactor.executors.state import BlockCells, ChainState, Evaluation, FactorBand, make_state
from daskfactor.executors.traffic import RingClock
from daskfactor.inference.base import ConstantStep
from daskfactor.inference.langevin import PSGLD
from daskfactor.inference.program import Program, prepare_state
from daskfactor.kernels.views import Workspace
from daskfactor.machine import single_threaded_blas
from daskfactor.models.gamma_factors import Hyperparameters
from daskfactor.models.tweedie_law import Tweedie
from tests.cluster.hosts import Bed, HostedCluster

SCHEDULES: dict[str, Any] = {
    "reshuffled": lambda blocks, groups: Reshuffled(),
    "cyclic": lambda blocks, groups: Cyclic(),
    "nested": lambda blocks, groups: NestedReshuffled(groups),
}
RATES = ("1gbit", "10gbit")
BLOCKS = 8
"""Bands of faces and sparse, each way."""


@dataclass(frozen=True)
class Sleeper:
    """A program whose operations take a fixed time and no processor; twice that in one process."""

    seconds: float
    straggler: int = -1

    def update(
        self, op: Op, data: Any, bands: tuple[FactorBand, ...], workspace: Workspace
    ) -> None:
        time.sleep(self.seconds * (1 + (os.getpid() == self.straggler)))
        for band in bands:
            band.values[0, 0] += 1

    def evaluate(
        self,
        op: Op,
        data: Any,
        bands: tuple[FactorBand, ...],
        cells: BlockCells | None,
        workspace: Workspace,
    ) -> Evaluation:
        raise AssertionError("nothing to evaluate")


def plan_of(schedule: Schedule, blocks: int, cycles: range) -> tuple[Round, ...]:
    return build_plan(
        schedule,
        np.ones((blocks, blocks), np.int64),
        cycles,
        np.random.default_rng,
        lambda cycle: CycleOptions(record=True),
    )


def executor_named(name: str, client: Client) -> Executor:
    return RingExecutor(client) if name == "ring" else ClusterTasksExecutor(client)


@contextlib.contextmanager
def local(workers: int, processes: bool = True) -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=processes,
            dashboard_address=":0",
            silence_logs=50,
            memory_limit=0,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def sleeping_state(blocks: int) -> ChainState:
    """Bands of 0.1 MB."""
    factors = [np.ones((256 * blocks, 100), np.float32) for _ in range(2)]
    return make_state(Grid.even((256 * blocks,) * 2, blocks), *factors)


def simulated(names: Sequence[str], options: Any) -> None:
    print(f"simulated workers in {'processes' if options.processes else 'threads'}")
    for workers in options.workers:
        blocks = 2 * workers
        with local(workers, options.processes) as client:
            for milliseconds, kind in itertools.product(options.milliseconds, options.schedules):
                seconds = milliseconds / 1000
                cycles = max(1, round(options.seconds / (seconds * blocks * blocks / workers)))
                plan = plan_of(SCHEDULES[kind](blocks, workers), blocks, range(cycles))
                for name in names:
                    executor = executor_named(name, client)
                    run: Callable[..., ChainState] = executor.run
                    state = run(plan[:blocks], Sleeper(0.0), sleeping_state(blocks), None)
                    began = time.perf_counter()
                    run(plan, Sleeper(seconds), state, None)
                    wall = time.perf_counter() - began
                    ideal = len(plan) * blocks * seconds / workers
                    print(
                        f"{workers} workers, B = {blocks}, {milliseconds:3d} ms blocks, "
                        f"{kind:10s} {name:6s} ideal {ideal:6.2f} s, took {wall:6.2f} s: "
                        f"{ideal / wall:.2f}",
                        flush=True,
                    )
                    executor.close()


def straggler() -> None:
    workers, blocks, seconds = 4, 32, 0.01
    with local(workers) as client:
        program = Sleeper(seconds, max(client.run(os.getpid).values()))
        executor = RingExecutor(client)
        run: Callable[..., ChainState] = executor.run
        state = run(plan_of(Cyclic(), blocks, range(1)), Sleeper(0.0), sleeping_state(blocks), None)
        ideal = blocks * blocks * seconds / (workers - 0.5)
        for number in range(6):
            began = time.perf_counter()
            state = run(plan_of(Cyclic(), blocks, range(number, number + 1)), program, state, None)
            wall = time.perf_counter() - began
            print(
                f"{workers} workers, one at half speed, B = {blocks}, segment {number}: ideal "
                f"{ideal:.2f} s, took {wall:.2f} s: {ideal / wall:.2f}, "
                f"busy alike to {executor.report.balance:.2f}",
                flush=True,
            )
        executor.close()


def network(options: Any) -> None:
    workers, blocks, seconds, width = 4, 8, 0.01, 64
    cycles = 5, 25  # what a segment costs in any case is not counted
    plans = [plan_of(Reshuffled(), blocks, range(each)) for each in cycles]
    with Bed() as bed, HostedCluster(bed) as cluster:
        cluster.start_workers(workers)
        for rate, megabytes in itertools.product(options.hosts or RATES, (0.1, 1.0, 4.0)):
            bed.set_rate(rate)
            rows = max(1, round(1e6 * megabytes / 4 / width))
            executor = RingExecutor(cluster.client)
            run: Callable[..., ChainState] = executor.run
            factors = [np.ones((size, width), np.float32) for size in (blocks, rows * blocks)]
            state = make_state(Grid.even((blocks, rows * blocks), blocks), *factors)
            state = run(plans[0], Sleeper(0.0), state, None)
            walls, foreseen = [], []
            for plan in plans:
                began = time.perf_counter()
                state = run(plan, Sleeper(seconds), state, None)
                walls.append(time.perf_counter() - began)
                band = FactorBand(0, np.ones((1, width), np.float32))
                each = np.full((blocks, blocks), seconds)
                speed = float(rate.removesuffix("gbit")) * 1e9 / 8
                sizes, threads = [rows] * blocks, [1] * workers
                clock = RingClock(plan, Sleeper(seconds), band, sizes, threads, each, speed)
                foreseen.append(clock.run().seconds)
            wall, model = (
                (many - few) / (cycles[1] - cycles[0]) for few, many in (walls, foreseen)
            )
            print(
                f"{workers} hosts at {rate}, {1000 * seconds:.0f} ms blocks, bands of "
                f"{megabytes:g} MB: a cycle took {wall:.3f} s, foreseen {model:.3f} s: "
                f"{wall / model:.2f}",
                flush=True,
            )
            executor.close()


@dataclass(frozen=True)
class Problem:
    """Data in a store that all workers can read, and what is done with them."""

    name: str
    data: Any
    components: int
    cycles: int

    @classmethod
    def faces(cls, folder: str, cycles: int) -> "Problem":
        path = f"{folder}/faces.zarr"
        V = np.random.default_rng(0).poisson(110, (10304, 400)).astype(np.float32)
        zarr.save_array(path, V)
        return cls("faces", dfac.as_blocks(path, BLOCKS), 100, cycles)

    @classmethod
    def sparse(cls, folder: str, cycles: int, millions: float) -> "Problem":
        path, rng = f"{folder}/sparse.zarr", np.random.default_rng(0)
        entries, shape = int(1e6 * millions), (int(2000 * millions), int(1000 * millions))
        where = [rng.integers(0, size, entries, np.int32) for size in shape]
        values = rng.integers(1, 6, entries, np.uint8).astype(np.float32)
        V = sparse.coo_array((values, where), shape=shape)
        V.sum_duplicates()
        dfac.convert(V, path, unstored="missing", blocks=BLOCKS, progressbar=False)
        data = dfac.as_blocks(path, memory_limit="8 GiB")
        return cls(f"sparse, {V.nnz / 1e6:.0f} M entries", data, 32, cycles)

    @property
    def program(self) -> Program:
        return Program(
            PSGLD(0.1, "identity"),
            likelihood=Tweedie(1.0),
            hyper=Hyperparameters(1.0, 1.0, 1.0),
            floor=1e-6,
            key=(1, 2),
            step=ConstantStep(1e-3),
        )

    def fresh(self) -> ChainState:
        rng = np.random.default_rng(1)
        factors = [
            rng.gamma(1.0, 1.0, (size, self.components)).astype(np.float32)
            for size in self.data.shape
        ]
        state = make_state(self.data.grid, *factors)
        prepare_state(state)
        return state


def do_share(packed: Any, begin: float) -> float:
    """Do the operations of some row bands, and exchange nothing; return the seconds. A task."""
    plan, rows, work, state = unpack(packed)
    workspace = Workspace()
    time.sleep(max(0.0, begin - time.time()))
    began = time.perf_counter()
    with single_threaded_blas():
        for part in plan:
            for op in part.ops:
                if op.block.row in rows:
                    perform(op, work, state, workspace)
    return time.perf_counter() - began


def shares_of_two(
    problem: Problem, client: Client, plan: Sequence[Round]
) -> Callable[[Sequence[int]], float]:
    """Return a function that lets workers do their shares at the same time: the longest one's s."""
    halves = [range(BLOCKS // 2), range(BLOCKS // 2, BLOCKS)]
    work = Work((), problem.program, problem.data)
    packed = [
        client.scatter(pack((plan, half, work, problem.fresh())), workers=[address])
        for half, address in zip(halves, sorted(client.nthreads()), strict=True)
    ]

    def do(which: Sequence[int]) -> float:
        begin = time.time() + 1.0
        addresses = sorted(client.nthreads())
        futures = [
            client.submit(do_share, packed[n], begin, workers=[addresses[n]], pure=False)
            for n in which
        ]
        return float(max(client.gather(futures)))

    return do


def pair(problem: Problem, client: Client, names: Sequence[str], options: Any) -> list[str]:
    """Compare executors on two workers with the floor; returns the lines to print."""
    plan = plan_of(NestedReshuffled(2), BLOCKS, range(problem.cycles))
    do = shares_of_two(problem, client, plan)
    executors = {name: executor_named(name, client) for name in names}
    states = {}
    for name, executor in executors.items():  # compiles and reads
        held = executor.hold(problem.fresh())  # between segments, too, as in a run
        states[name] = executor.run(plan[:BLOCKS], problem.program, held, problem.data)
    found: dict[str, list[float]] = {name: [] for name in ("alone", "floor", *names)}
    inside: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}

    def spent() -> float:
        return float(sum(client.run(time.process_time).values()))

    for _ in range(options.repeats):
        alone = do([0]) + do([1])
        found["alone"].append(alone)
        before = spent()
        found["floor"].append(alone / 2 / do([0, 1]))
        own = spent() - before
        for name, executor in executors.items():
            executor.report.wall_seconds = executor.report.busy_seconds = 0.0
            before = spent()
            states[name] = executor.run(plan, problem.program, states[name], problem.data)
            processor[name].append((spent() - before) / own)
            found[name].append(alone / 2 / executor.report.wall_seconds)
            inside[name].append(executor.report.utilisation)
    for executor in executors.values():
        executor.close()
    middle = {name: statistics.median(values) for name, values in found.items()}
    operation = middle["alone"] / len(plan) / BLOCKS
    head = f"{problem.name}, 2 workers, blocks of {1000 * operation:.1f} ms"
    lines = []
    for name in ("floor", *names):
        low, high = min(found[name]), max(found[name])
        lines.append(f"{head}: {name:5s} {middle[name]:.2f} useful ({low:.2f} to {high:.2f})")
        if name in inside:
            beside = [own / floor for own, floor in zip(found[name], found["floor"], strict=True)]
            lines[-1] += f", {statistics.median(beside):.2f} of the floor"
            lines[-1] += f", {statistics.median(processor[name]):.2f} of its processor time"
            lines[-1] += f", inside operations {statistics.median(inside[name]):.2f}"
    return lines


def between_hosts(problem: Problem, names: Sequence[str], options: Any) -> None:
    with Bed() as bed, HostedCluster(bed) as cluster:
        cluster.start_workers(2)
        for rate in options.hosts:
            bed.set_rate(rate)
            before = bed.hosts["worker0"].sent()
            lines = pair(problem, cluster.client, names, options)
            sent = bed.hosts["worker0"].sent() - before
            cycles = problem.cycles * options.repeats * len(names)
            print(f"hosts at {rate}, {sent / cycles / 2**20:.2f} MiB sent by each in a cycle")
            print("\n".join(lines), flush=True)


def pairs(names: Sequence[str], options: Any) -> None:
    # Hosts have a /tmp of their own.
    with tempfile.TemporaryDirectory(dir="/var/tmp" if options.hosts else None) as folder:
        problems = []
        if "faces" in options.what:
            problems.append(Problem.faces(folder, options.cycles))
        if "sparse" in options.what:
            cycles = max(2, round(7 * options.cycles / options.millions))
            problems.append(Problem.sparse(folder, cycles, options.millions))
        for problem in problems:
            with local(2) as client:
                print("\n".join(pair(problem, client, names, options)), flush=True)
            if options.hosts:
                between_hosts(problem, names, options)
            problem.data.close()


def main() -> None:
    usual = ("faces", "sparse", "simulated", "straggler")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", default=usual)
    parser.add_argument("--executors", default="ring,tasks")
    parser.add_argument("--cycles", type=int, default=60, help="of every segment of faces")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--millions", type=float, default=10, help="entries of sparse")
    parser.add_argument("--hosts", nargs="*", default=[], help="rates, such as 1gbit")
    parser.add_argument("--seconds", type=float, default=4.0, help="of every simulated run")
    parser.add_argument("--workers", type=int, nargs="*", default=[16, 32, 64], help="simulated")
    parser.add_argument("--milliseconds", type=int, nargs="*", default=[20, 5])
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES), help="of simulated")
    parser.add_argument("--processes", action="store_true", help="simulated workers in processes")
    options = parser.parse_args()
    names = options.executors.split(",")
    with (
        tempfile.TemporaryDirectory() as folder,
        dask.config.set({"temporary-directory": str(Path(folder))}),
    ):
        if {"faces", "sparse"} & set(options.what):
            pairs(names, options)
        if "simulated" in options.what:
            simulated(names, options)
        if "straggler" in options.what:
            straggler()
        if "network" in options.what:
            network(options)


if __name__ == "__main__":
    main()
