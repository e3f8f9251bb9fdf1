"""Runs that are killed with SIGKILL at random moments go on to the same bits."""

import math
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
from daskfactor.evidence import rank, thermodynamic
from daskfactor.inference import setting
from daskfactor.runs import files
from daskfactor.stein import posterior
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
    names = [name for name in names if name[1] != "seconds"]
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


METHODS = {
    "Ensemble": dfac.Ensemble(optimizer="multiplicative", max_iter=60, tol=0.0),
    "SimplexHMC": dfac.SimplexHMC(draws=60, tune=30, steps=4),
    "SVGD": dfac.SVGD(steps=60),
    "SteinDescent": dfac.SteinDescent(steps=40),
}


MADE = "particles"


def run_particles(name, store, pipe):
    """Make particles, or go on with them, and tell how far they are."""
    posterior.SEGMENT, files.CHEAP_SECONDS = 0.0, math.inf
    options = {"callback": lambda event: pipe.send((event.phase, event.done)), "progressbar": False}
    if Path(store).exists():
        dfac.resume(store, V=counts(), **options)
    else:
        options |= {"random_seed": 11, "blocks": 2, "particles": 4, "store": store}
        dfac.stein_posterior(counts(), dfac.TweedieNMF(3), METHODS[name], **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::daskfactor.errors.DaskfactorWarning")  # a short run
@pytest.mark.quick("SVGD")
@pytest.mark.parametrize("name", METHODS)
def test_killed_particles_end_in_the_bits_of_unbroken_ones(name, tmp_path):
    whole, store, rng, reached = tmp_path / "whole.zarr", tmp_path / "run.zarr", random.Random(1), 0
    run_particles(name, whole, SimpleNamespace(send=bool))
    for _ in range(3):
        process, pipe = start(run_particles, name, str(store))
        aim = rng.uniform(min(reached, 2.8), 2.9)
        reached = next(done for phase, done in iter(pipe.recv, None) if (phase, done) > (MADE, aim))
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    # The default method may end before the signal arrives.
    assert name == "Ensemble" or "weight" not in dfac.open_run(store)["sample_stats"]
    process, pipe = start(run_particles, name, str(store))
    steps = [done for phase, done in iter(pipe.recv, ("weights", 1)) if phase == MADE]
    process.join()
    assert process.exitcode == 0
    assert next(iter(steps[1:]), 4) > reached - 0.4, "steps are done again"
    assert digest(store) == digest(whole)


SHORT = {"temperatures": 4, "draws": 60, "tune": 30}
LADDERS = {
    "exact moves": dfac.ThermodynamicIntegration(**SHORT, every=2),
    "a pair": dfac.ThermodynamicIntegration(**SHORT, sampler=dfac.PSGRRLD(warm_start=10)),
    "ranks": dfac.ThermodynamicIntegration(**SHORT),
}


ROUNDS = 36
"""Rounds of a ladder: of three kills each leaves seven and, while the signal comes, some more."""


def evidences(name, **options):
    """The evidence of a rank, or evidences and scores of two."""
    options |= {"random_seed": 11, "progressbar": False}
    if name != "ranks":
        return repr(dfac.log_evidence(counts(), dfac.TweedieNMF(2), LADDERS[name], **options).value)
    table = dfac.select_rank(counts(), dfac.TweedieNMF(1), [1, 2], LADDERS[name], **options)
    return repr(table.drop_vars("seconds").to_dict())


def run_evidences(name, store, pipe):
    """Compute evidences, or go on with them, and tell of the rounds of ladders and the result."""
    thermodynamic.FIRST_ROUND = thermodynamic.SHORTEST_ROUND = 1 / ROUNDS
    thermodynamic.ROUND, files.CHEAP_SECONDS = 0.0, math.inf
    rank.DRAWS, rank.TUNE = 20, 30

    def tell(event):
        if (event.phase, event.total) == ("draw", 100):
            pipe.send(None)
            time.sleep(0.01)  # so that few rounds end before the signal comes

    pipe.send(evidences(name, store=store, callback=tell))
    pipe.send("")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::daskfactor.errors.DaskfactorWarning")  # short chains
@pytest.mark.quick("ranks")
@pytest.mark.parametrize("name", LADDERS)
def test_killed_evidences_have_the_value_of_unbroken_ones(name, tmp_path, monkeypatch):
    monkeypatch.setattr(rank, "DRAWS", 20)
    monkeypatch.setattr(rank, "TUNE", 30)
    store, rng = str(tmp_path / "evidence"), random.Random(2)
    for _ in range(3):
        process, pipe = start(run_evidences, name, store)
        for _ in range(rng.randrange(4, 8)):
            assert pipe.recv() is None
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    process, pipe = start(run_evidences, name, store)
    *rounds, value = iter(pipe.recv, "")
    assert value == evidences(name)
    assert len(rounds) <= ROUNDS * (2 if name == "ranks" else 1) - 9, "rounds are done again"
