"""Processes that write to a store: forks of a server that has imported what takes a second."""

import multiprocessing
import os
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from daskfactor.runs.schema import MOMENTS
from daskfactor.runs.store import RunStore
from tests.results.runs import factors, put_moments

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([__name__])


def start(target, *arguments):
    """Run a function in a process of its own; it gets the other end of a pipe besides."""
    ours, other = SERVER.Pipe()
    process = SERVER.Process(target=_told, args=(dict(os.environ), target, *arguments, other))
    process.start()
    other.close()
    return process, ours


def _told(environment, target, *arguments):
    """Call a function in the caller's environment, not in that of the server's first process."""
    take(environment)
    target(*arguments)


def take(environment):
    """Take over the variables of another process."""
    os.environ.update(environment)


def state_of(draw):
    return {"W": np.random.default_rng(draw).random((50, 3)), "count": np.array(draw)}


def write_until_killed(path, pipe):
    with RunStore.open(path) as store:
        draw = sum(store.committed.draws)
        if draw:
            arrays, meta = store.load_checkpoint()
            draw = meta["draws"]
            assert arrays["count"] == draw
        pipe.send("ready")
        while True:
            if draw + 3 > store.draws:
                store.extend(np.arange(store.draws + 6))
            store.write_draws(0, draw, *factors(0, draw, 3))
            store.write_stats(0, draw, {"lp": np.arange(draw, draw + 3) + 0.5})
            draw += 3
            W, Ht = factors(1, draw, 1)
            found = {"W_mean": W[0], "W_var": W[0], "H_mean": Ht[0].T, "H_var": Ht[0].T}
            put_moments(store, MOMENTS, 0, found, draw)
            store.checkpoint(state_of(draw), {"draws": draw})


def open_and_wait(path, pipe):
    """Open a store for writing, say how that went, and stay until something is said or nobody."""
    try:
        store = RunStore.open(path)
    except Exception as error:
        pipe.send(str(error))
        return
    pipe.send("open")
    pipe.recv()
    store.close()


class Killed(Exception):
    """Raised where a process would have been killed."""


@contextmanager
def killed_at(fatal, before=True):
    """Die before or after the replacement of a file by its number; tell whether that came."""
    real, left, died = Path.replace, [fatal], []

    def replace(self, target):
        if not before and left[0] >= 0:
            real(self, target)
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        return real(self, target) if before else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        try:
            yield died
        except Killed:
            died.append(True)
