"""A process that lets its children be killed in the middle of a run.

Run as a script by ``test_kill.py``. It compiles the kernels once and then
forks: a child samples into a store, is killed with SIGKILL at a random moment,
and the next child goes on with what it left, until a run is whole. Prints one
JSON line per trial.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

import daskfactor as dfac
from daskfactor.inference import setting

SETTINGS = {"random_seed": 11, "progressbar": False, "blocks": 2}


def data():
    rng = np.random.default_rng(5)
    V = rng.poisson(rng.gamma(1, 1, (60, 4)) @ rng.gamma(1, 2, (4, 50))).astype(np.float32)
    V[rng.random(V.shape) < 0.1] = np.nan
    return V


def several():
    """Counts, and values with gaps of every other of their rows."""
    found = xr.DataArray(data(), {"row": np.arange(60)}, ["row", "column"])
    counts = found.fillna(1).rename(column="gene")
    return {"counts": counts, "values": found[::2, :20].rename(column="protein") + 0.5}


def counts_of_three():
    """A tensor of counts with missing cells."""
    rng = np.random.default_rng(6)
    V = rng.poisson(rng.gamma(0.5, 2, (30, 16, 8))).astype(np.float32)
    V[rng.random(V.shape) < 0.1] = np.nan
    return V


class Case(NamedTuple):
    """A run to be killed, and what resuming it needs."""

    make: Callable[[], Any]
    model: Any
    sampler: dfac.PSGLD
    settings: dict[str, Any]
    again: bool = False


ONE, WARM = dfac.TweedieNMF(4), {"warm_start": 10}
CASES = [
    Case(data, ONE, dfac.PSGLD(**WARM), {"monitor": "missing"}),
    Case(data, ONE, dfac.PSGRRLD(**WARM), {"monitor": "missing"}),
    Case(counts_of_three, dfac.CP(3), dfac.PSGLD(**WARM), {"monitor": ([0], [3], [2])}, True),
    Case(several, dfac.Coupled(4), dfac.PSGLD(**WARM), {"monitor": {"values": ([0], [3])}}, True),
]


def run(case, draws, tune, **options):
    given = SETTINGS | case.settings | options
    dfac.sample(case.make(), case.model, case.sampler, draws, tune, **given)


def begin(store, case):
    run(case, 600, 100, store=store)


def go_on(store, case):
    dfac.resume(store, V=case.make() if case.again else None, progressbar=False)


def in_child(work):
    """Fork, do the work in the child, and return its process id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def killed_after(seconds, work, place=None):
    """Whether the child had to be killed; False if it was done before.

    The clock starts with the child, or when something is at the place, whatever else runs.
    """
    child = in_child(work)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if place is not None and not place.exists():
            deadline = time.monotonic() + seconds
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, f"the child failed with status {status}"
            return False
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def in_child_for_result(folder, work):
    """What the work returns, computed in a child.

    The parent never reads a store itself: zarr and dask start threads, which a
    fork does not take along.
    """
    answer = folder / "answer.json"
    child = in_child(lambda: answer.write_text(json.dumps(work())))
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(answer.read_text())


def digest(store):
    """A checksum of every value of a run."""
    tree = dfac.open_run(store)
    return {
        f"{group}/{name}": hashlib.sha256(variable.values.tobytes()).hexdigest()
        for group in sorted(tree.children)
        for name, variable in tree[group].data_vars.items()
    }


def committed(store):
    return int(dfac.open_run(store)["sample_stats"].sizes["draw"])


def trial(folder, number, whole, seconds):
    case = CASES[number % len(CASES)]
    store = folder / f"trial-{number}.zarr"
    rng = random.Random(number)
    kills, found = 0, []
    while True:
        limit = rng.uniform(0, 0.4 * seconds) if kills < 3 else 60.0
        if store.exists():
            again = killed_after(limit, lambda: go_on(store, case))
        else:
            began = store if number % 2 else None
            again = killed_after(limit, lambda: begin(store, case), began)
        if not again:
            break
        kills += 1
        if store.exists():
            found.append(in_child_for_result(folder, lambda: committed(store)))
    same = in_child_for_result(folder, lambda: digest(store)) == whole
    return {"trial": number, "kills": kills, "draws": found, "same": same}


def main():
    folder, trials = Path(sys.argv[1]), int(sys.argv[2])
    setting.LONGEST_SEGMENT = 40  # checkpoints more often than a run this small would have
    wholes, seconds = [], []
    for number, case in enumerate(CASES[:trials]):
        # Compiles here, without threads, so that children inherit the kernels.
        run(case, 2, 2, executor="serial")
        child = in_child(lambda n=number, own=case: begin(folder / f"whole-{n}.zarr", own))
        started = time.monotonic()
        assert os.waitpid(child, 0)[1] == 0
        seconds.append(time.monotonic() - started)
        store = folder / f"whole-{number}.zarr"
        wholes.append(in_child_for_result(folder, lambda store=store: digest(store)))
    for number in range(trials):
        case = number % len(CASES)
        print(json.dumps(trial(folder, number, wholes[case], seconds[case])), flush=True)


if __name__ == "__main__":
    main()
