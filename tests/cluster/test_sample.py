"""Whole runs on a cluster, with weights of cells too: the draws of one process, whoever dies."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse as sp
import zarr

import daskfactor as dfac
from tests.cluster.support import KillOnce, alike, same
from tests.random_sparse import random_array
from tests.tiers import tiered

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore:around the means that:daskfactor.errors.DataWarning"),
]

SETTINGS = {"random_seed": 3, "progressbar": False, "blocks": 4}
KINDS = dfac.Gibbs, dfac.LangevinDynamics, dfac.SGLD, dfac.SGHMC
SAMPLERS = [dfac.PSGLD(transition="cir", warm_start=3), *(kind(warm_start=3) for kind in KINDS)]
SAMPLERS += [kind(steps=2, warm_start=3) for kind in (dfac.HMC, dfac.BlockHMC)]


def counts():
    rng = np.random.default_rng(5)
    V = rng.poisson(rng.gamma(1, 1, (60, 4)) @ rng.gamma(1, 2, (4, 50))).astype(np.float32)
    V[rng.random(V.shape) < 0.1] = np.nan
    return V


@pytest.mark.libraries
@pytest.mark.parametrize("executor", ["ring", "tasks"])
@pytest.mark.parametrize("rates", [{}, {"rate_w": "row", "rate_h": "component"}], ids=str)
def test_the_draws_of_one_process(executor, rates, client):
    arguments = (counts(), dfac.TweedieNMF(3, **rates), dfac.PSGLD(warm_start=3), 12, 10)
    # Every operation is a task of dask: fewer blocks are a quarter of the time.
    options = SETTINGS | {"monitor": "missing", "blocks": 4 if executor == "ring" else 2}
    assert alike(client, executor, *arguments, **options)


@pytest.mark.parametrize("executor", ["ring", "tasks"])
def test_the_starts_of_one_process(executor, client, monkeypatch):
    for name in ("inits.SHORT", "starts.SHORT", "singular.FILL_ITERATIONS"):
        monkeypatch.setattr(f"daskfactor.inference.{name}", 4)  # each is a journey to workers
    arguments = (counts(), dfac.TweedieNMF(3), dfac.PSGLD(warm_start=3), 3, 2)
    point = dfac.optimize(counts(), dfac.TweedieNMF(3), progressbar=False, executor="serial")
    for asked in ({"init": "q-transform", "starts": 2}, {"init": point}):
        assert alike(client, executor, *arguments, **SETTINGS, **asked)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.name)
def test_what_bands_gather_travels_with_them(sampler, client):
    law = dfac.TweedieNMF(3, shape_w=2.0, dispersion=1.0)
    linked = dfac.GaussianMF(3, covariates_w=np.arange(120.0).reshape(60, 2))
    rates = dfac.TweedieNMF(3, dispersion=1.0, covariates_w=np.arange(60.0)[:, None] / 60)
    more = {"Gibbs": [linked, rates], "BlockHMC": [rates]}
    for model in (law, *more.get(sampler.name, [])):
        arguments = (counts(), model, sampler, 6, 4)
        assert alike(client, "ring", *arguments, monitor="missing", **SETTINGS)


def test_sparse_data_and_coupled_chains(client):
    V = random_array((80, 60), density=0.2, rng=np.random.default_rng(2))
    V.data[:] = np.ceil(5 * V.data)
    arguments = (V, dfac.TweedieNMF(2), dfac.PSGRRLD(warm_start=3), 8, 8)
    assert alike(client, "ring", *arguments, **SETTINGS, unstored="zero")


def test_a_worker_that_dies_during_a_run(client, tmp_path):
    """Killed on the first event of the draws; the run is stored, and whole."""
    arguments = (counts(), dfac.TweedieNMF(3), dfac.PSGLD(warm_start=3), 40, 20)
    kill = KillOnce(client)
    here = dfac.sample(*arguments, executor="lanes", **SETTINGS)
    options = {"executor": "ring", "client": client, "store": tmp_path / "run.zarr"}
    there = dfac.sample(*arguments, callback=kill, **options, **SETTINGS)
    assert kill.killed
    assert same(there, here)
    assert same(dfac.resume(tmp_path / "run.zarr", progressbar=False), here)


def test_what_takes_long_to_import_is_not_imported_before_it_is_used():
    code = (
        "import sys, daskfactor.inference.sampling\n"
        "assert not {'distributed', 'scipy.stats'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


RNG = np.random.default_rng(8)
V = RNG.gamma(1, 1, (60, 4)) @ RNG.gamma(1, 2, (4, 52))  # chunks below are blocks of four
V[RNG.random(V.shape) < 0.1] = np.nan
SIGMA = RNG.uniform(0.3, 3.0, V.shape)
NMF = dfac.TweedieNMF(3, beta=2)


def stored(values):
    rows, cols = np.nonzero(~np.isnan(V))
    return sp.csr_array((values[rows, cols], (rows, cols)), shape=V.shape)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Data and their uncertainties in every kind of place."""
    folder = tmp_path_factory.mktemp("data")
    dark = np.where(RNG.random(V.shape) < 0.05, np.inf, SIGMA)  # some cells vanish by them
    zarr.create_array(str(folder / "dark"), data=dark, chunks=(15, 13))
    for name, values in (("v", V), ("sigma", SIGMA)):
        zarr.create_array(str(folder / name), data=values, chunks=(15, 13))
        place = folder / f"{name}-sparse"
        dfac.convert(stored(values), place, unstored="missing", blocks=4, progressbar=False)
    path = str(folder)
    return {
        "memory": (V, SIGMA),
        "zarr": (f"{path}/v", f"{path}/sigma"),
        "zarr with cells that vanish": (f"{path}/v", f"{path}/dark"),
        "store": (f"{path}/v-sparse", f"{path}/sigma-sparse"),
    }


@pytest.mark.parametrize("place", ["memory", "zarr", "zarr with cells that vanish", "store"])
def test_weights_of_cells_give_the_draws_of_one_process(place, client, places):
    values, sigma = places[place]
    arguments = (values, NMF, dfac.PSGLD(warm_start=3), 8, 6)
    options = SETTINGS | {"uncertainty": sigma}
    if place != "store":
        options["monitor"] = "missing"
    here = dfac.sample(*arguments, executor="serial", **options)
    for executor in ("ring", "tasks"):
        assert same(dfac.sample(*arguments, executor=executor, client=client, **options), here)


@pytest.mark.parametrize(
    ("model", "sampler"),
    [
        (NMF, dfac.BlockHMC(steps=2, warm_start=3)),
        (dfac.GaussianMF(3), dfac.SGHMC(warm_start=3)),
        (dfac.GaussianMF(3), dfac.Gibbs()),
        (dfac.NegativeBinomialNMF(3), dfac.PSGLD(warm_start=3)),
    ],
    ids=["BlockHMC", "SGHMC", "Gibbs", "negative binomial"],
)
def test_what_bands_gather_by_weight_travels_with_them(model, sampler, client):
    data = dfac.as_blocks(np.rint(V), 4, weights=SIGMA)
    arguments = (data, model, sampler, 6, 4)
    assert alike(client, "ring", *arguments, **SETTINGS)


@pytest.mark.parametrize("place", tiered(["zarr", "store"], lambda place: place == "store"))
def test_a_worker_dies_and_the_run_goes_on_from_its_store(place, client, tmp_path, places):
    values, sigma = places[place]
    arguments = (values, NMF, dfac.PSGLD(warm_start=3), 30, 15)
    options = SETTINGS | {"uncertainty": sigma}
    kill = KillOnce(client)

    def stop(event):
        if kill.killed and event.phase == "draw" and event.done > 20:
            raise KeyboardInterrupt
        kill(event)

    store = tmp_path / "run.zarr"
    where = {"executor": "ring", "client": client, "callback": stop}
    with contextlib.suppress(KeyboardInterrupt):
        dfac.sample(*arguments, store=store, **where, **options)
    assert kill.killed
    here = dfac.sample(*arguments, executor="lanes", **options)
    assert same(dfac.resume(store, progressbar=False), here)
