"""Whole runs on a cluster: the draws of one machine, whoever dies."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import daskfactor as dfac
from daskfactor.errors import OptionError
from tests.cluster import dying
from tests.cluster.support import cluster
from tests.tiers import tiered

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


def same(found, wanted):
    for name in ("W", "H"):
        np.testing.assert_array_equal(
            found["posterior"][name].values, wanted["posterior"][name].values
        )
    for name in ("lp", "step_size"):
        np.testing.assert_array_equal(
            found["sample_stats"][name].values, wanted["sample_stats"][name].values
        )


@pytest.fixture(scope="module")
def wanted() -> xr.DataTree:
    return dfac.sample(
        dying.data(), dying.MODEL, dying.SAMPLER, executor="serial", **dying.SETTINGS
    )


@pytest.mark.parametrize(
    ("executor", "threads"),
    tiered(
        product(["ring", "tasks", "auto"], [1, 4]),
        {("ring", 4), ("tasks", 1), ("auto", 4)}.__contains__,
    ),
)
def test_a_cluster_gives_the_draws_of_one_machine(executor, threads, wanted):
    with cluster(1, processes=False, threads=threads) as client:
        found = dfac.sample(
            dying.data(),
            dying.MODEL,
            dying.SAMPLER,
            client=client,
            executor=executor,
            **dying.SETTINGS,
        )
    same(found, wanted)


def test_real_valued_models_and_stores_run_on_a_cluster(tmp_path):
    """From a store that workers open themselves, with hyperparameters drawn in the client."""
    store = str(tmp_path / "v.zarr")
    dfac.convert(dying.data(), store, unstored="missing", blocks=2, progressbar=False)
    settings = {"draws": 12, "tune": 6, "random_seed": 1, "progressbar": False}
    data = dfac.as_blocks(store, allow_empty=True)
    model = dfac.GaussianMF(3, covariates_h=np.arange(data.shape[1])[:, None])
    alone = dfac.sample(data, model, executor="serial", **settings)
    with cluster(2, processes=False) as client:
        found = dfac.sample(data, model, client=client, executor="ring", **settings)
    same(found, alone)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "workers"), tiered([("ring", 3), ("tasks", 1)], lambda case: case[0] == "ring")
)
def test_a_killed_client_is_resumed_on_another_number_of_workers(
    executor, workers, wanted, tmp_path
):
    store = str(tmp_path / "run.zarr")
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/cluster/dying.py"), store, executor, "13"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    before = dfac.open_run(store)
    kept = int(before["posterior"].sizes["draw"])
    assert 0 < kept < dying.SETTINGS["draws"]
    with cluster(workers, processes=False) as client:
        found = dfac.resume(
            store, V=dying.data(), client=client, executor=executor, progressbar=False
        )
    same(found, wanted)


def test_an_executor_of_this_process_with_a_client_is_refused():
    with (
        cluster(1, processes=False) as client,
        pytest.raises(OptionError, match="makes no use of client"),
    ):
        dfac.sample(dying.data(), dying.MODEL, client=client, executor="lanes", **dying.SETTINGS)


@pytest.mark.parametrize("executor", ["ring", "tasks"])
def test_stochastic_descent_on_a_cluster_finds_what_one_machine_finds(executor):
    settings = {"blocks": 4, "unstored": "missing", "random_seed": 0, "progressbar": False}
    asked = (dying.data(), dfac.TweedieNMF(2), dfac.DSGD(max_iter=3))
    wanted = dfac.optimize(*asked, **settings)
    with cluster(2, processes=False) as client:
        found = dfac.optimize(*asked, client=client, executor=executor, **settings)
    for name in ("W", "H"):
        np.testing.assert_array_equal(found[name].values, wanted[name].values)
