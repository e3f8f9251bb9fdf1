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
from pathlib import Path
from typing import Any

import numpy as np

import daskfactor as dfac
from daskfactor.inference import setting

SETTINGS: dict[str, Any] = {"random_seed": 11, "progressbar": False, "monitor": "missing"}
SAMPLERS = [dfac.PSGLD(warm_start=10), dfac.PSGRRLD(warm_start=10)]
setting.LONGEST_SEGMENT = 40  # checkpoints more often than a run this small would have


def data() -> np.ndarray:
    rng = np.random.default_rng(5)
    V = rng.poisson(rng.gamma(1, 1, (60, 4)) @ rng.gamma(1, 2, (4, 50))).astype(np.float32)
    V[rng.random(V.shape) < 0.1] = np.nan
    return V


def begin(store: Path, sampler: dfac.PSGLD) -> None:
    dfac.sample(data(), dfac.TweedieNMF(4), sampler, 600, 100, store=store, blocks=2, **SETTINGS)


def in_child(work: Any) -> int:
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


def killed_after(seconds: float, work: Any) -> bool:
    """Whether the child had to be killed; False if it was done before."""
    child = in_child(work)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, f"the child failed with status {status}"
            return False
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def in_child_for_result(folder: Path, work: Any) -> Any:
    """What the work returns, computed in a child.

    The parent never reads a store itself: zarr and dask start threads, which a
    fork does not take along.
    """
    answer = folder / "answer.json"
    child = in_child(lambda: answer.write_text(json.dumps(work())))
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(answer.read_text())


def digest(store: Path) -> dict[str, str]:
    """A checksum of every value of a run."""
    tree = dfac.open_run(store)
    return {
        f"{group}/{name}": hashlib.sha256(variable.values.tobytes()).hexdigest()
        for group in sorted(tree.children)
        for name, variable in tree[group].data_vars.items()
    }


def committed(store: Path) -> int:
    return int(dfac.open_run(store)["sample_stats"].sizes["draw"])


def trial(folder: Path, number: int, whole: dict[str, str], seconds: float) -> dict[str, Any]:
    sampler = SAMPLERS[number % 2]
    store = folder / f"trial-{number}.zarr"
    rng = random.Random(number)
    kills, found = 0, []
    while True:
        limit = rng.uniform(0, 0.6 * seconds) if kills < 3 else 60.0
        if store.exists():
            again = killed_after(limit, lambda: dfac.resume(store, progressbar=False))
        else:
            again = killed_after(limit, lambda: begin(store, sampler))
        if not again:
            break
        kills += 1
        if store.exists():
            found.append(in_child_for_result(folder, lambda: committed(store)))
    same = in_child_for_result(folder, lambda: digest(store)) == whole
    return {"trial": number, "kills": kills, "draws": found, "same": same}


def main() -> None:
    folder, trials = Path(sys.argv[1]), int(sys.argv[2])
    wholes = []
    seconds = 0.0
    for number, sampler in enumerate(SAMPLERS):
        dfac.sample(  # compiles here, without threads, so that children inherit the kernels
            data(), dfac.TweedieNMF(4), sampler, 2, 2, blocks=2, executor="serial", **SETTINGS
        )
        child = in_child(lambda n=number, s=sampler: begin(folder / f"whole-{n}.zarr", s))
        started = time.monotonic()
        assert os.waitpid(child, 0)[1] == 0
        seconds = max(seconds, time.monotonic() - started)
        store = folder / f"whole-{number}.zarr"
        wholes.append(in_child_for_result(folder, lambda store=store: digest(store)))
    for number in range(trials):
        print(json.dumps(trial(folder, number, wholes[number % 2], seconds)), flush=True)


if __name__ == "__main__":
    main()
