"""Whole runs on a cluster, with weights of cells too: the draws of one process, whoever dies."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from distributed import get_client, worker_client

import daskfactor as dfac
from daskfactor.errors import OptionError
from tests.cluster import dying
from tests.cluster.hosts import environment
from tests.cluster.support import KillOnce, alike, cluster, same
from tests.random_sparse import random_array
from tests.refusals import refused
from tests.test_kill import counts
from tests.tiers import tiered

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore:around the means that:daskfactor.errors.DataWarning"),
]

SETTINGS = {"random_seed": 3, "progressbar": False, "blocks": 4}
KINDS = dfac.Gibbs, dfac.LangevinDynamics, dfac.SGLD, dfac.SGHMC
SAMPLERS = [dfac.PSGLD(transition="euler", warm_start=3), *(kind(warm_start=3) for kind in KINDS)]
SAMPLERS += [dfac.BlockHMC(steps=2, warm_start=3)]


@pytest.mark.quick("{'rate_w': 'row', 'rate_h': 'component'}-ring", "{}-tasks")
@pytest.mark.libraries
@pytest.mark.parametrize("executor", ["ring", "tasks"])
@pytest.mark.parametrize("rates", [{}, {"rate_w": "row", "rate_h": "component"}], ids=str)
def test_the_draws_of_one_process(executor, rates, client):
    arguments = (counts(), dfac.TweedieNMF(3, **rates), dfac.PSGLD(warm_start=3), 12, 10)
    # Every operation is a task of dask: fewer blocks are a quarter of the time.
    options = SETTINGS | {"monitor": "missing", "blocks": 4 if executor == "ring" else 2}
    assert alike(client, executor, *arguments, **options)


@pytest.mark.full
@pytest.mark.parametrize("executor", ["ring", "tasks"])
def test_the_starts_of_one_process(executor, client, monkeypatch):
    for name in ("inits.SHORT", "starts.SHORT", "singular.FILL_ITERATIONS"):
        monkeypatch.setattr(f"daskfactor.inference.{name}", 4)  # each is a journey to workers
    arguments = (counts(), dfac.TweedieNMF(3), dfac.PSGLD(warm_start=3), 3, 2)
    point = dfac.optimize(counts(), dfac.TweedieNMF(3), progressbar=False, executor="serial")
    for asked in ({"init": "q-transform", "starts": 2}, {"init": point}):
        assert alike(client, executor, *arguments, **SETTINGS, **asked)


@pytest.mark.quick("BlockHMC", "SGHMC")
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.name)
def test_what_bands_gather_travels_with_them(sampler, client):
    law = dfac.TweedieNMF(3, shape_w=2.0, dispersion=1.0)
    linked = dfac.GaussianMF(3, covariates_w=np.arange(120.0).reshape(60, 2))
    rates = dfac.TweedieNMF(3, dispersion=1.0, covariates_w=np.arange(60.0)[:, None] / 60)
    more = {"Gibbs": [linked, rates], "BlockHMC": [rates]}
    for model in (law, *more.get(sampler.name, [])):
        arguments = (counts(), model, sampler, 6, 4)
        assert alike(client, "ring", *arguments, monitor="missing", **SETTINGS)


@pytest.mark.full
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


@pytest.fixture(scope="module")
def wanted():
    return dying.sampled()


@pytest.mark.quick("4-ring", "1-tasks", "4-auto")
@pytest.mark.parametrize("executor", ["ring", "tasks", "auto"])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_cluster_gives_the_draws_of_one_machine(executor, threads, wanted):
    with cluster(1, processes=False, threads=threads) as client:
        assert same(dying.sampled(client=client, executor=executor), wanted)


def test_real_valued_models_and_stores_run_on_a_cluster(here, tmp_path):
    """From a store that workers open themselves, with hyperparameters drawn in the client."""
    store = str(tmp_path / "v.zarr")
    dfac.convert(dying.data(), store, unstored="missing", blocks=2, progressbar=False)
    settings = {"draws": 12, "tune": 6, "random_seed": 1, "progressbar": False}
    data = dfac.as_blocks(store, allow_empty=True)
    model = dfac.GaussianMF(3, covariates_h=np.arange(data.shape[1])[:, None])
    assert alike(here, "ring", data, model, **settings)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "workers"), tiered([("ring", 3), ("tasks", 1)], lambda case: case[0] == "ring")
)
def test_a_killed_client_is_resumed_on_another_number_of_workers(
    executor, workers, wanted, tmp_path
):
    store = str(tmp_path / "run.zarr")
    command = [sys.executable, dying.__file__, store, executor, "13"]
    how = {"env": environment(), "capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(command, check=False, **how)
    assert done.returncode == -9, done.stderr
    kept = int(dfac.open_run(store)["posterior"].sizes["draw"])
    assert 0 < kept < dying.SETTINGS["draws"]
    options = {"executor": executor, "progressbar": False}
    with cluster(workers, processes=False) as client:
        assert same(dfac.resume(store, V=dying.data(), client=client, **options), wanted)


def test_an_executor_of_this_process_with_a_client_is_refused(here):
    refused(OptionError, "makes no use of client", dying.sampled, client=here, executor="lanes")


@pytest.mark.parametrize("executor", ["ring", "tasks"])
def test_stochastic_descent_on_a_cluster_finds_what_one_machine_finds(executor, here):
    settings = {"blocks": 4, "unstored": "missing", "random_seed": 0, "progressbar": False}
    asked = (dying.data(), dfac.TweedieNMF(2), dfac.DSGD(max_iter=3))
    wanted = dfac.optimize(*asked, **settings)
    found = dfac.optimize(*asked, client=here, executor=executor, **settings)
    for name in ("W", "H"):
        np.testing.assert_array_equal(found[name].values, wanted[name].values)


def test_what_takes_long_to_import_is_not_imported_before_it_is_used():
    code = (
        "import sys, daskfactor.inference.sampling\n"
        "assert not {'distributed', 'scipy.stats'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- names on the dashboard, and runs within a task -----------------------------------------------

SMALL = np.random.default_rng(0).poisson(3.0, (30, 20)).astype(np.float32)
IN_TASKS = ("update-block", "send-program", "start-rows", "start-columns", "start-cells")
OWN = {"ring": {"ring-segment"}, "tasks": {*IN_TASKS, "hand-on-cells", "leave-bands"}}
"""What an executor computes that others do not."""


def small_run(V=SMALL, **options):
    arguments = V, dfac.TweedieNMF(2, dispersion=1.0), dfac.PSGLD(warm_start=2), 4, 4
    return dfac.sample(*arguments, **SETTINGS | {"blocks": 3} | options)


@pytest.mark.parametrize("executor", OWN)
def test_the_dashboard_says_what_is_computed(executor):
    V = SMALL.copy()
    V[2, 3] = np.nan
    with cluster(1, processes=False) as client:
        small_run(V, client=client, executor=executor, monitor="missing")
        names = client.run_on_scheduler(lambda dask_scheduler: {*dask_scheduler.task_prefixes})
    parts = {"state", "report", "each-band", "drop-draws"}
    assert names == OWN[executor] | parts | {"log-normalizer"}


def sample_inside(how, executor):
    """On a worker: a run on the cluster that this task belongs to."""
    own = worker_client() if how == "worker_client" else contextlib.nullcontext(get_client())
    with own as client:
        return small_run(client=client, executor=executor)["posterior"]["W"].values.tobytes()


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("executor", "processes"), [("ring", True), ("tasks", True), ("ring", False), ("auto", False)]
)
def test_a_task_may_sample_on_its_own_cluster(executor, processes):
    """Its only thread is needed by the tasks that it waits for."""
    expected = small_run()["posterior"]["W"].values.tobytes()
    with cluster(1, processes=processes) as client:
        for how in ("get_client", "worker_client"):
            future = client.submit(sample_inside, how, executor, pure=False)
            assert future.result(timeout=50) == expected
        # The worker takes new tasks, as many at a time as before.
        assert client.submit(lambda: True, pure=False).result(timeout=10)


# -- weights of cells -----------------------------------------------------------------------------

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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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
