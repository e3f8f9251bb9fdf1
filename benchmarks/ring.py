"""Executors on a `distributed` cluster: useful kernel time over wall time.

Two figures, neither of which needs more than two cores:

- ``faces``: P-SGLD on a 10304 x 400 matrix of counts (K = 100, B = 8, float32)
  on two worker processes of one thread. Useful time is what one core takes for
  the same operations one after the other (and, beside it, what the workers'
  threads spent inside operations).
- ``simulated``: 16 workers of one thread whose operations sleep, with column
  bands of 0.1 MB on a 32 x 32 grid, two lanes a worker. Useful time is the sum
  of the sleeps; what is lost is what the engine costs. The two cores have to do
  the work of 16 workers' event loops, which a real cluster has not.

    python benchmarks/ring.py [faces] [simulated] [--executors ring,tasks]
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client, LocalCluster

from daskfactor.data.grid import Cyclic, Grid, NestedReshuffled, Reshuffled, Schedule
from daskfactor.executors import SerialExecutor
from daskfactor.executors.base import Executor
from daskfactor.executors.cluster import ClusterTasksExecutor
from daskfactor.executors.plan import CycleOptions, Op, Round, build_plan
from daskfactor.executors.ring import RingExecutor
from daskfactor.executors.state import BlockCells, ChainState, Evaluation, FactorBand, make_state
from daskfactor.inference.base import ConstantStep
from daskfactor.inference.langevin import PSGLD
from daskfactor.inference.program import Program, prepare_state
from daskfactor.kernels.views import Workspace
from daskfactor.models.gamma_factors import Hyperparameters
from daskfactor.models.tweedie_law import Tweedie

SCHEDULES: dict[str, Any] = {
    "reshuffled": lambda blocks, groups: Reshuffled(),
    "cyclic": lambda blocks, groups: Cyclic(),
    "nested": lambda blocks, groups: NestedReshuffled(groups),
}


@dataclass(frozen=True)
class Sleeper:
    """A program whose operations take a fixed time and no processor."""

    seconds: float

    def update(
        self, op: Op, data: Any, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        time.sleep(self.seconds)
        rows.values[0, 0] += 1
        cols.values[0, 0] += 1

    def evaluate(
        self,
        op: Op,
        data: Any,
        rows: FactorBand,
        cols: FactorBand,
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


def simulated(names: Sequence[str], workers: int, blocks: int, options: Any) -> None:
    print(f"simulated workers in {'processes' if options.processes else 'threads'}")
    cluster = LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        processes=options.processes,
        dashboard_address=":0",
    )
    with cluster, Client(cluster) as client:
        for milliseconds in options.milliseconds:
            seconds = milliseconds / 1000
            cycles = max(1, round(options.seconds / (seconds * blocks * blocks / workers)))
            for kind, make in SCHEDULES.items():
                plan = plan_of(make(blocks, workers), blocks, range(cycles))
                for name in names:
                    executor = executor_named(name, client)
                    state = make_state(
                        Grid.even((256 * blocks,) * 2, blocks),
                        *(np.ones((256 * blocks, 100), np.float32) for _ in range(2)),
                    )
                    executor.run(plan[:blocks], Sleeper(0.0), state, None)  # type: ignore[arg-type]
                    began = time.perf_counter()
                    executor.run(plan, Sleeper(seconds), state, None)  # type: ignore[arg-type]
                    wall = time.perf_counter() - began
                    ideal = len(plan) * blocks * seconds / workers
                    print(
                        f"{workers} workers, B = {blocks}, {milliseconds:3d} ms blocks, "
                        f"{kind:10s} {name:6s} ideal {ideal:6.2f} s, took {wall:6.2f} s: "
                        f"{ideal / wall:.2f}",
                        flush=True,
                    )
                    executor.close()


def faces(names: Sequence[str], segments: int, cycles: int) -> None:
    from daskfactor.data.sources import as_blocks

    V = np.random.default_rng(0).poisson(110, (10304, 400)).astype(np.float32)
    blocks, components = 8, 100
    data = as_blocks(V, blocks)
    program = Program(
        PSGLD(0.1, "identity"),
        likelihood=Tweedie(1.0),
        hyper=Hyperparameters(1.0, 1.0, 1.0),
        floor=1e-6,
        key=(1, 2),
        step=ConstantStep(0.1),
    )

    def fresh() -> ChainState:
        rng = np.random.default_rng(1)
        state = make_state(
            data.grid,
            rng.gamma(1.0, 1.0, (10304, components)).astype(np.float32),
            rng.gamma(1.0, 1.0, (400, components)).astype(np.float32),
        )
        prepare_state(state)
        return state

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        executors = {"serial": SerialExecutor(), **{n: executor_named(n, client) for n in names}}
        for kind, make in SCHEDULES.items():
            plans = [
                plan_of(make(blocks, 2), blocks, range(n * cycles, (n + 1) * cycles))
                for n in range(segments)
            ]
            serial = 0.0
            for name, executor in executors.items():
                state = executor.run(plans[0][:blocks], program, fresh(), data)
                executor.report.wall_seconds = executor.report.busy_seconds = 0.0
                began = time.perf_counter()
                for plan in plans:
                    state = executor.run(plan, program, state, data)
                wall = time.perf_counter() - began
                serial = serial or executor.report.busy_seconds
                print(
                    f"faces, 2 processes, B = {blocks}, {kind:10s} {name:6s} {wall:5.2f} s, "
                    f"inside operations {executor.report.utilisation:.2f} of it, "
                    f"of half the serial time {serial / 2 / wall:.2f}",
                    flush=True,
                )
        for executor in executors.values():
            executor.close()
    data.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", default=["faces", "simulated"])
    parser.add_argument("--executors", default="ring,tasks")
    parser.add_argument("--seconds", type=float, default=4.0, help="of every simulated run")
    parser.add_argument("--milliseconds", type=int, nargs="*", default=[20, 5])
    parser.add_argument("--processes", action="store_true", help="simulated workers in processes")
    parser.add_argument("--segments", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=60, help="of every segment of faces")
    options = parser.parse_args()
    names = options.executors.split(",")
    with (
        tempfile.TemporaryDirectory() as folder,
        dask.config.set({"temporary-directory": str(Path(folder))}),
    ):
        if "faces" in options.what:
            faces(names, options.segments, options.cycles)
        if "simulated" in options.what:
            simulated(names, 16, 32, options)


if __name__ == "__main__":
    main()
