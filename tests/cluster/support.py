"""Clusters that can be hurt, executors on them, and runs that are compared."""

import subprocess
import sys
from contextlib import closing, contextmanager
from types import MappingProxyType

import dask
import pytest
from distributed import Client, LocalCluster

import daskfactor as dfac
from daskfactor.executors.cluster import ClusterTasksExecutor, Patience
from daskfactor.executors.ring import RingExecutor
from tests.cluster.hosts import environment
from tests.cluster.programs import kill_one

EXECUTORS = {"ring": RingExecutor, "tasks": ClusterTasksExecutor}
named = pytest.mark.parametrize("name", EXECUTORS)
IMPATIENT = Patience(start=30.0, stall=60.0, workers=30.0)

SHORT = {
    "distributed.comm.timeouts.connect": "3s",
    "distributed.comm.retry.count": 0,
    "distributed.scheduler.allowed-failures": 10,
    # LocalCluster gives a nanny up whose worker is down at this time after a loss.
    "distributed.deploy.lost-worker-timeout": "1h",
}
SHORT |= {f"distributed.worker.memory.{own}": False for own in ("target", "spill", "pause")}
SHORT["distributed.worker.memory.terminate"] = False


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
    process = subprocess.Popen([*command, *options], env=environment(), **quiet)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class KillOnce:
    """A callback that kills a worker at the first event of the draws, or the first ``when``."""

    def __init__(self, client, when=lambda event: event.phase == "draw"):
        self.client, self.when, self.killed = client, when, False

    def __call__(self, event):
        if self.when(event) and not self.killed:
            self.killed = True
            kill_one(self.client)


def executing(client, name="ring", patience=IMPATIENT, **options):
    """An executor for the time of a with statement."""
    return closing(EXECUTORS[name](client, patience=patience, **options))


def same(one, other, statistics=("lp", "step_size")):
    """Whether runs have the same draws, moments, monitored cells and statistics of draws."""
    groups = [group for group in one.children if group.startswith(("posterior", "monitor"))]
    assert groups
    pairs = [(one[group].to_dataset(), other[group].to_dataset()) for group in groups]
    pairs.append([run["sample_stats"].to_dataset()[list(statistics)] for run in (one, other)])
    return all(mine.equals(its) for mine, its in pairs)


def alike(client, executor, *arguments, **options):
    """Whether a run on a cluster is that of one process."""
    here = dfac.sample(*arguments, executor="serial", **options)
    return same(dfac.sample(*arguments, executor=executor, client=client, **options), here)


def beside(client):
    """Another client, which has the address of the cluster alone."""
    return Client(client.scheduler.address, set_as_default=False)
