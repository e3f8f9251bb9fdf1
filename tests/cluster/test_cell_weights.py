"""Weights of cells on a cluster: the draws of one process, wherever data and weights are read."""

import contextlib

import numpy as np
import pytest
import scipy.sparse as sp
import zarr

import daskfactor as dfac
from daskfactor.data.convert import convert
from tests.cluster.support import KillOnce, alike, same
from tests.tiers import tiered

pytestmark = pytest.mark.cluster

SETTINGS = {"random_seed": 3, "progressbar": False, "blocks": 4}
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
        convert(stored(values), place, unstored="missing", blocks=4, progressbar=False)
    path = str(folder)
    return {
        "memory": (V, SIGMA),
        "zarr": (f"{path}/v", f"{path}/sigma"),
        "zarr with cells that vanish": (f"{path}/v", f"{path}/dark"),
        "store": (f"{path}/v-sparse", f"{path}/sigma-sparse"),
    }


@pytest.mark.parametrize("place", ["memory", "zarr", "zarr with cells that vanish", "store"])
def test_the_draws_of_one_process(place, client, places):
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
