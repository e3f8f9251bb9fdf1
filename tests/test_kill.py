"""Runs that are killed with SIGKILL at random moments go on to the same bits."""

import random
import time
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import daskfactor as dfac
from daskfactor.inference import setting
from tests.results.writer import start

DRAWS, TUNE = 600, 100
KILLS = 3


def with_gaps(V, rng):
    return np.where(rng.random(V.shape) < 0.1, np.nan, V).astype(np.float32)


def counts():
    rng = np.random.default_rng(5)
    return with_gaps(rng.poisson(rng.gamma(1, 1, (60, 4)) @ rng.gamma(1, 2, (4, 50))), rng)


def cube():
    rng = np.random.default_rng(6)
    return with_gaps(rng.poisson(rng.gamma(0.5, 2, (30, 16, 8))), rng)


def several():
    """Counts, and values with gaps of every other of their rows."""
    found = xr.DataArray(counts(), {"row": np.arange(60)}, ["row", "column"])
    values = found[::2, :20].rename(column="protein") + 0.5
    return {"counts": found.fillna(1).rename(column="gene"), "values": values}


CASES = {
    "PSGLD": (counts, dfac.TweedieNMF(4), dfac.PSGLD, "missing"),
    "PSGRRLD": (counts, dfac.TweedieNMF(4), dfac.PSGRRLD, "missing"),
    "CP": (cube, dfac.CP(3), dfac.PSGLD, ([0], [3], [2])),
    "Coupled": (several, dfac.Coupled(4), dfac.PSGLD, {"values": ([0], [3])}),
}


def run(name, store, pipe):
    """Begin a run, or go on with it, and tell its phases."""
    setting.LONGEST_SEGMENT = 40  # checkpoints more often than a run this small would have
    make, model, sampler, monitor = CASES[name]
    options = {"callback": lambda event: pipe.send(event.phase), "progressbar": False}
    if Path(store).exists():
        dfac.resume(store, V=make(), **options)
    else:
        options |= {"random_seed": 11, "blocks": 2, "monitor": monitor, "store": store}
        dfac.sample(make(), model, sampler(warm_start=10), DRAWS, TUNE, **options)


def launch(name, store, working=True):
    """Start a process, and return it when it has begun, or goes through the data."""
    process, pipe = start(run, name, str(store))
    while pipe.recv() not in ("tune", "draw") and working:
        pass
    return process


def digest(store):
    """The bits of every value of a run."""
    tree = dfac.open_run(store)
    names = [(group, name) for group, node in tree.children.items() for name in node.data_vars]
    return {(group, name): tree[group][name].values.tobytes() for group, name in names}


@pytest.mark.slow
@pytest.mark.quick("PSGRRLD")
@pytest.mark.parametrize("name", CASES)
def test_killed_runs_end_in_the_bits_of_an_unbroken_one(name, tmp_path):
    whole, store, rng = tmp_path / "whole.zarr", tmp_path / "run.zarr", random.Random(0)
    process, began, left = launch(name, whole), time.monotonic(), []
    process.join()
    assert process.exitcode == 0
    seconds = time.monotonic() - began
    while len(left) < KILLS or (not any(left) and len(left) < 3 * KILLS):
        # The first one may die before there is a store.
        process = launch(name, store, working=bool(left))
        process.join(rng.uniform(0.2, 0.5) * seconds)
        assert process.exitcode is None, "it was done before it was killed"
        process.kill()
        process.join()
        left.append(dfac.open_run(store)["sample_stats"].sizes["draw"] if store.exists() else 0)
    assert any(0 < n < DRAWS for n in left), f"no run was killed half-way: {left}"
    process, _ = start(run, name, str(store))
    process.join()
    assert process.exitcode == 0
    assert digest(store) == digest(whole)
