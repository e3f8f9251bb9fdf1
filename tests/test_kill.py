"""Runs that are killed with SIGKILL at random moments go on to the same bits."""

import random
import signal
import time
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr

import daskfactor as dfac
from daskfactor.inference import setting
from tests.results.writer import start

DRAWS, TUNE = 240, 60
SEGMENT = 20
"""Cycles between checkpoints, which a run this small would make more rarely."""


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
    setting.LONGEST_SEGMENT = SEGMENT
    make, model, sampler, monitor = CASES[name]
    options = {"callback": lambda event: pipe.send(event.phase), "progressbar": False}
    if Path(store).exists():
        dfac.resume(store, V=make(), **options)
    else:
        options |= {"random_seed": 11, "blocks": 2, "monitor": monitor, "store": store}
        dfac.sample(make(), model, sampler(warm_start=10), DRAWS, TUNE, **options)


def digest(store):
    """A digest of every value of a run."""
    tree = dfac.open_run(store)
    names = [(group, name) for group, node in tree.children.items() for name in node.data_vars]
    return {name: sha256(tree["/".join(name)].values.tobytes()).digest() for name in names}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::daskfactor.errors.DaskfactorWarning")  # a short run
@pytest.mark.quick("PSGRRLD")
@pytest.mark.parametrize("name", CASES)
def test_killed_runs_end_in_the_bits_of_an_unbroken_one(name, tmp_path, monkeypatch):
    monkeypatch.setattr(setting, "LONGEST_SEGMENT", SEGMENT)
    whole, store, rng, left = tmp_path / "whole.zarr", tmp_path / "run.zarr", random.Random(0), []
    run(name, whole, SimpleNamespace(send=bool))
    for kill in range(3):
        process, pipe = start(run, name, str(store))
        pipe.recv()
        draws = rng.randrange(3, 8) if kill else 0
        while draws:  # but the first one, which may die before there is a store
            draws -= pipe.recv() == "draw"
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        left.append(dfac.open_run(store)["sample_stats"].sizes["draw"] if store.exists() else 0)
    assert any(0 < draws < DRAWS for draws in left), f"no run was killed half-way: {left}"
    process, _pipe = start(run, name, str(store))
    process.join()
    assert process.exitcode == 0
    assert digest(store) == digest(whole)
