"""Faults on a cluster: the bits of one process of threads, or a sentence and a resume with them.

A run on three workers of this machine, whose data and store are both in folders or both in an
object store (an S3 server on loopback), is struck while it draws. It goes on by itself, or it
ends with one sentence, and is resumed on a fresh cluster, or run again if it had not begun.

- ``kills``: random SIGKILLs of workers; their nannies start new ones.
- ``stopped``: a worker is stopped for some seconds and continues; it is waited for.
- ``overdue``: the same, but the scheduler gives it up first; the others go on without it.
- ``gone``: all workers and nannies are killed.
- ``scheduler``: the scheduler is killed.
- ``tls``: connections are encrypted; a worker is killed.
- ``paused``: factors outgrow the memory at which Dask pauses a worker.
- ``terminated``: they outgrow that at which a nanny kills it.
"""

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask
import numpy as np
import psutil
from distributed import Client
from distributed.security import Security
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import DaskfactorError
from daskfactor.runs.backends import view_of
from tests.cluster import dying
from tests.cluster.hosts import environment, start
from tests.cluster.support import EXECUTORS

WORKERS = 3


class Processes:
    """A scheduler and workers in processes of their own, and a client of them.

    Workers that die are started again if they have a ``nanny``; ``memory`` is the limit of each, as
    Dask takes it; with ``security`` all connections are encrypted.
    """

    def __init__(self, nanny=True, memory="0", security=None):
        self.nanny, self.memory, self.security = nanny, memory, security
        self._undo = ExitStack()
        self._all = []

    def __enter__(self):
        with ExitStack() as undo:
            undo.enter_context(dask.config.set(certificates(self.security)))
            self.folder = undo.enter_context(tempfile.TemporaryDirectory())
            undo.callback(self.kill_all)
            file = str(Path(self.folder, "scheduler.json"))
            protocol = "tls" if self.security else "tcp"
            where = ["--host", f"{protocol}://127.0.0.1", "--port", "0"]
            where += ["--no-dashboard", "--scheduler-file", file]
            self.scheduler = self._start("distributed.cli.dask_scheduler", *where)
            self.workers = [self._start_worker(file) for _ in range(WORKERS)]
            self.client = undo.enter_context(
                Client(scheduler_file=file, security=self.security, set_as_default=False)
            )
            self.client.wait_for_workers(WORKERS, timeout=120)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error):
        self._undo.__exit__(*error)

    def _start_worker(self, file):
        options = ["--nthreads", "1", "--no-dashboard", "--memory-limit", self.memory]
        options += ["--local-directory", self.folder, "--nanny" if self.nanny else "--no-nanny"]
        return self._start("distributed.cli.dask_worker", "--scheduler-file", file, *options)

    def _start(self, module, *options):
        command = [sys.executable, "-m", module, *options]
        with Path(self.folder, "log").open("ab") as log:
            process = start(command, env=environment(), stdout=log, stderr=log)
        self._all.append(process)
        return process

    def pids(self):
        """Workers that answer, in an order that does not change."""
        found = {}
        until = time.monotonic() + 60
        while not found and time.monotonic() < until:  # one that is dying is listed for a while
            found = self.client.run(os.getpid, on_error="ignore")
        return [pid for pid in found.values() if isinstance(pid, int)]

    def kill_workers(self):
        for process in self.workers:
            kill_family(process.pid)

    def kill_all(self):
        for process in self._all:
            kill_family(process.pid)
            process.wait()


def certificates(security):
    """Return settings by which other processes are of the same cluster."""
    if security is None:
        return {}
    found = {"distributed.comm.require-encryption": True}
    found["distributed.comm.tls.ca-file"] = security.tls_ca_file
    for role in ("client", "scheduler", "worker"):
        found[f"distributed.comm.tls.{role}.cert"] = getattr(security, f"tls_{role}_cert")
        found[f"distributed.comm.tls.{role}.key"] = getattr(security, f"tls_{role}_key")
    return found


def kill_family(pid):
    """SIGKILL a process and what it has started, which cannot start anything meanwhile."""
    try:
        parent = psutil.Process(pid)
        parent.suspend()
        for process in (*parent.children(recursive=True), parent):
            process.kill()
    except psutil.NoSuchProcess:
        pass


# -- what strikes ---------------------------------------------------------------------------------


def kill_one(cluster, rng, _):
    os.kill(rng.choice(cluster.pids()), signal.SIGKILL)


def stop_one(cluster, rng, seconds):
    """Stop a worker for some seconds; it has no nanny that would kill it meanwhile."""
    pid = rng.choice(cluster.pids())
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def kill_all_workers(cluster, *_):
    cluster.kill_workers()


def kill_scheduler(cluster, *_):
    cluster.scheduler.kill()


@dataclass(frozen=True)
class Fault:
    """What happens to a run, on what cluster; ``strike`` is given the seconds of a stop."""

    strike: Callable[[Processes, random.Random, float], None] | None
    nanny: bool = True
    tls: bool = False
    limited: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


FAULTS = {
    "kills": Fault(kill_one),
    "stopped": Fault(stop_one, nanny=False),
    # Dask gives a worker up after five seconds at the earliest; this is how often it looks.
    "overdue": Fault(stop_one, nanny=False, config={"distributed.scheduler.worker-ttl": "1s"}),
    "gone": Fault(kill_all_workers),
    "scheduler": Fault(kill_scheduler),
    "tls": Fault(kill_one, tls=True),
    "paused": Fault(None, limited=True, config={"distributed.worker.memory.terminate": False}),
    "terminated": Fault(None, limited=True, config={"distributed.worker.memory.pause": False}),
}


class Striker:
    """Strikes when a run has done given shares of its draws, each time in a thread of its own.

    All of it is over before the last draws.
    """

    def __init__(self, fault, cluster, times, seed, seconds):
        self.fault, self.cluster, self.seconds = fault, cluster, seconds
        self.rng = random.Random(seed)
        self.shares = sorted(self.rng.uniform(0.05, 0.9) for _ in range(times))
        self.struck = 0
        self.threads = []

    def __call__(self, event):
        if self.fault.strike is None or event.phase != "draw":
            return
        while self.shares and event.done >= self.shares[0] * event.total:
            self.shares.pop(0)
            thread = threading.Thread(target=self._strike)
            thread.start()
            self.threads.append(thread)
        if event.done >= 0.95 * event.total:
            self.join()

    def join(self):
        for thread in self.threads:
            thread.join()

    def _strike(self):
        self.fault.strike(self.cluster, self.rng, self.seconds)
        self.struck += 1


# -- runs ----------------------------------------------------------------------------------------


def small():
    """A run of small segments, so that a loss may come in any of them."""
    return (dying.data(), dying.MODEL, dying.SAMPLER), {"draws": 48, "tune": 12, "random_seed": 5}


def large():
    """Factors of 26 MB each, moments of twice that, and a copy of either on its way."""
    rng, size = np.random.default_rng(2), 100_000
    rows, cols = rng.integers(0, size, (2, size))
    values = np.ones(size, np.float32)
    data = sparse.csr_array((values, (rows, cols)), (size, size))
    settings = {"draws": 4, "tune": 4, "random_seed": 5, "keep": "moments"}
    return (data, dfac.TweedieNMF(64, dispersion=1.0), dfac.PSGLD(warm_start=0)), settings


@dataclass
class Outcome:
    """What came of a run; ``sentence``: what it ended with before it was resumed."""

    struck: int = 0
    losses: int = 0
    sentence: str = ""
    same: bool = False


def strike_run(name, executor, load, place, patience, seconds=8.0, times=1, memory=""):
    """Strike a run whose data and store are at a place; resume it if it ended with a sentence."""
    (V, *rest), settings = load
    fault, found, store, data = FAULTS[name], Outcome(), f"{place}/run", f"{place}/v"
    given, options = (data, *rest), {"progressbar": False, "monitor": ([0, 1, 2], [0, 1, 2])}
    dfac.convert(V, data, unstored="zero", blocks=4, progressbar=False)
    options |= settings
    wanted = dying.digest(dfac.sample(*given, executor="threads", **options))
    security = Security.temporary() if fault.tls else None
    limit = memory if fault.limited else "0"
    with dask.config.set(fault.config), Processes(fault.nanny, limit, security) as cluster:
        made = EXECUTORS[executor](cluster.client, patience=patience)
        striker = Striker(fault, cluster, times, 1, seconds)
        try:
            tree = dfac.sample(*given, store=store, executor=made, callback=striker, **options)
            found.same = dying.digest(tree) == wanted
        except DaskfactorError as error:
            found.sentence = str(error)
        striker.join()
        found.struck, found.losses = striker.struck, made.report.lost_segments
        if cluster.client.status == "running":
            made.close()
    if found.sentence:
        with Processes() as another:
            again = {"client": another.client, "executor": executor}
            if view_of(store).exists():
                tree = dfac.resume(store, progressbar=False, **again)
            else:  # it failed before it began
                tree = dfac.sample(*given, **again, **options)
            found.same = dying.digest(tree) == wanted
    return found
