"""Whole runs on a cluster: the draws of one machine, whoever dies."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.errors import OptionError
from tests.cluster import dying
from tests.cluster.support import alike, cluster, same
from tests.tiers import tiered

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wanted():
    return dying.sampled()


@pytest.mark.parametrize("executor", ["ring", "tasks", "auto"])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_cluster_gives_the_draws_of_one_machine(executor, threads, wanted):
    with cluster(1, processes=False, threads=threads) as client:
        assert same(dying.sampled(client=client, executor=executor), wanted)


def test_real_valued_models_and_stores_run_on_a_cluster(tmp_path):
    """From a store that workers open themselves, with hyperparameters drawn in the client."""
    store = str(tmp_path / "v.zarr")
    dfac.convert(dying.data(), store, unstored="missing", blocks=2, progressbar=False)
    settings = {"draws": 12, "tune": 6, "random_seed": 1, "progressbar": False}
    data = dfac.as_blocks(store, allow_empty=True)
    model = dfac.GaussianMF(3, covariates_h=np.arange(data.shape[1])[:, None])
    with cluster(2, processes=False) as client:
        assert alike(client, "ring", data, model, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "workers"), tiered([("ring", 3), ("tasks", 1)], lambda case: case[0] == "ring")
)
def test_a_killed_client_is_resumed_on_another_number_of_workers(
    executor, workers, wanted, tmp_path
):
    store = str(tmp_path / "run.zarr")
    done = subprocess.run(
        [sys.executable, dying.__file__, store, executor, "13"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    kept = int(dfac.open_run(store)["posterior"].sizes["draw"])
    assert 0 < kept < dying.SETTINGS["draws"]
    options = {"executor": executor, "progressbar": False}
    with cluster(workers, processes=False) as client:
        assert same(dfac.resume(store, V=dying.data(), client=client, **options), wanted)


def test_an_executor_of_this_process_with_a_client_is_refused():
    told = pytest.raises(OptionError, match="makes no use of client")
    with cluster(1, processes=False) as client, told:
        dying.sampled(client=client, executor="lanes")


@pytest.mark.parametrize("executor", ["ring", "tasks"])
def test_stochastic_descent_on_a_cluster_finds_what_one_machine_finds(executor):
    settings = {"blocks": 4, "unstored": "missing", "random_seed": 0, "progressbar": False}
    asked = (dying.data(), dfac.TweedieNMF(2), dfac.DSGD(max_iter=3))
    wanted = dfac.optimize(*asked, **settings)
    with cluster(2, processes=False) as client:
        found = dfac.optimize(*asked, client=client, executor=executor, **settings)
    for name in ("W", "H"):
        np.testing.assert_array_equal(found[name].values, wanted[name].values)
