"""Clusters that can be hurt, and programs that hurt them."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

import daskfactor as dfac
from daskfactor.data.grid import Block, Reshuffled
from daskfactor.errors import StoreError
from daskfactor.executors import SerialExecutor
from daskfactor.executors.cluster import ClusterTasksExecutor, Patience
from daskfactor.executors.ring import RingExecutor
from tests.executors.mixer import Mixer, begin, plan_of

EXECUTORS = {"ring": RingExecutor, "tasks": ClusterTasksExecutor}
named = pytest.mark.parametrize("name", EXECUTORS)
IMPATIENT = Patience(start=30.0, stall=60.0, workers=30.0, grace=10.0)

SHORT = {
    "distributed.comm.timeouts.connect": "3s",
    "distributed.comm.retry.count": 0,
    "distributed.scheduler.allowed-failures": 10,
    # LocalCluster gives a nanny up whose worker is down at this time after a loss.
    "distributed.deploy.lost-worker-timeout": "1h",
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
}


@contextmanager
def cluster(workers, processes, threads=1, memory=0, config=MappingProxyType({})):
    """A client of a fresh cluster on this machine, without a dashboard."""
    size = workers, processes, threads, memory
    with dask.config.set({**SHORT, **config}), running(*size) as client:
        yield client


@contextmanager
def running(workers, processes, threads=1, memory=0):
    """A client of a fresh cluster, with the settings of Dask that hold."""
    size = {"n_workers": workers, "threads_per_worker": threads, "memory_limit": memory}
    options = {"processes": processes, "dashboard_address": ":0", "silence_logs": 50}
    with LocalCluster(**size, **options) as made, Client(made, set_as_default=False) as client:
        yield client


@contextmanager
def bare_worker(client):
    """A worker process that no nanny starts again."""
    command = [sys.executable, "-m", "distributed.cli.dask_worker", client.scheduler.address]
    options = ["--no-nanny", "--nthreads", "1", "--no-dashboard", "--memory-limit", "0"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([*command, *options], env=env, **quiet)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class KillOnce:
    """A callback that kills a worker at the first event of the draws, or the first ``when``."""

    def __init__(self, client, when=lambda event: event.phase == "draw"):
        self.client, self.when, self.killed = client, when, []

    def __call__(self, event):
        if self.when(event) and not self.killed:
            pids = self.client.run(os.getpid)
            self.killed.append(pids[min(pids)])
            os.kill(self.killed[0], signal.SIGKILL)


@dataclass(frozen=True)
class Killer(Mixer):
    """A mixer whose worker kills itself at given operations, each only once.

    A spot is (cycle, row band, column band, ...); a file in ``folder`` remembers it.
    """

    folder: str
    spots: frozenset[tuple[int, ...]]

    def update(self, op, data, bands, workspace):
        spot = (op.cycle, *op.block)
        if spot in self.spots:
            try:
                Path(self.folder, "-".join(map(str, spot))).touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        super().update(op, data, bands, workspace)


@dataclass(frozen=True)
class Slow(Mixer):
    """A mixer whose operations take some time, twice as much in one process."""

    seconds: float
    straggler: int = -1

    def update(self, *arguments):
        time.sleep(self.seconds * (1 + (os.getpid() == self.straggler)))
        super().update(*arguments)


GATES = {}
"""Events that a program waits for, by name; for workers in this process."""


@dataclass(frozen=True)
class Gated(Mixer):
    """A mixer one block of which waits for a gate."""

    gate: str
    at: Block

    def update(self, op, data, bands, workspace):
        if op.block == self.at and op.cycle == 1:
            assert GATES[self.gate].wait(30)
        super().update(op, data, bands, workspace)


def wait_at_gate(gate, workspace):
    """A share of a pass that waits for a gate; for workers in this process."""
    assert GATES[gate].wait(30)


@dataclass(frozen=True)
class Reading(Mixer):
    """A mixer that looks at its block of data first."""

    def update(self, op, data, bands, workspace):
        data.view(*op.block)
        super().update(op, data, bands, workspace)


@dataclass(frozen=True)
class BrokenData:
    """Data one block of which cannot be read; a handle and its reader in one."""

    bad: Block
    token: str = "broken"

    def open(self, memory_limit=None):
        return self

    def view(self, row, col):
        if (row, col) == self.bad:
            raise StoreError(f"chunk {row}.{col} cannot be decoded; write the store again")
        return np.zeros((1, 1))


def chain(
    executor,
    program=None,
    *,
    blocks=4,
    factors=2,
    segments=3,
    cycles=4,
    schedule=None,
    data=None,
    width=3,
    on_done=None,
    before=(),
):
    """Several segments one after the other, as a chain runs them; draws and sums are kept.

    ``before[n]`` is called before segment n.
    """
    state = begin(blocks, factors, width)
    for segment in range(segments):
        if segment < len(before):
            before[segment]()
        span = range(segment * cycles, (segment + 1) * cycles)
        plan = plan_of(schedule or Reshuffled(), blocks, factors, span)
        state = executor.run(plan, program or Mixer(), state, data, on_done)
    return state


def oracle(**options):
    """The same chain on the serial executor."""
    return chain(SerialExecutor(), **options)


def executing(client, name="ring", patience=IMPATIENT, **options):
    """An executor for the time of a with statement."""
    return closing(EXECUTORS[name](client, patience=patience, **options))


def same(one, other):
    """Whether two runs have the same draws, moments and monitored cells, densities and steps."""
    groups = [group for group in one.children if group.startswith(("posterior", "monitor"))]
    assert groups
    pairs = [(one[group].to_dataset(), other[group].to_dataset()) for group in groups]
    names = ["lp", "step_size"]
    pairs.append(tuple(run["sample_stats"].to_dataset()[names] for run in (one, other)))
    return all(mine.equals(its) for mine, its in pairs)


def alike(client, executor, *arguments, **options):
    """Whether a run on a cluster is that of one process."""
    here = dfac.sample(*arguments, executor="serial", **options)
    return same(dfac.sample(*arguments, executor=executor, client=client, **options), here)


def beside(client):
    """Another client, which has the address of the cluster alone."""
    return Client(client.scheduler.address, set_as_default=False)
