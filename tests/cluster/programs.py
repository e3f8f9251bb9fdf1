"""Programs that hurt the cluster they run on, and chains of segments that they are run in."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from daskfactor.data.grid import Block, Reshuffled
from daskfactor.errors import StoreError
from daskfactor.executors import SerialExecutor
from tests.executors.mixer import Mixer, begin, plan_of


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


def kill_one(client, which=0):
    """SIGKILL a worker process, whatever it is doing."""
    pids = {}
    while not pids:  # one that is dying is listed for a while, but does not answer
        client.wait_for_workers(1, timeout=60)
        pids = client.run(os.getpid, on_error="ignore")
    os.kill(pids[sorted(pids)[which % len(pids)]], signal.SIGKILL)


class Holding:
    """An executor whose states stay in the workers."""

    def __init__(self, executor):
        self.executor = executor

    def run(self, plan, program, state, data, on_done):
        return self.executor.run(plan, program, self.executor.distribute(state), data, on_done)


def oracle(**options):
    """The same chain on the serial executor."""
    return chain(SerialExecutor(), **options)
