"""What people see of a cluster run: names on the dashboard, calls from inside a task."""

from contextlib import nullcontext

import numpy as np
import pytest
from distributed import get_client, worker_client

import daskfactor as dfac
from tests.cluster.support import cluster

pytestmark = pytest.mark.cluster

SETTINGS = {"random_seed": 3, "progressbar": False, "blocks": 3}
MODEL = dfac.TweedieNMF(2, dispersion=1.0)
PSGLD = dfac.PSGLD(warm_start=2)
IN_TASKS = ("update-block", "send-program", "start-rows", "start-columns", "start-cells")
OWN = {"ring": {"ring-segment"}, "tasks": {*IN_TASKS, "hand-on-cells", "leave-bands"}}
"""What an executor computes that others do not."""


def prefixes(dask_scheduler):
    """On the scheduler: how the dashboard names tasks."""
    return sorted(dask_scheduler.task_prefixes)


@pytest.mark.parametrize("executor", OWN)
def test_the_dashboard_says_what_is_computed(executor):
    V = np.random.default_rng(0).poisson(3.0, (30, 20)).astype(np.float32)
    V[2, 3] = np.nan
    with cluster(1, processes=False) as client:
        dfac.sample(
            V, MODEL, PSGLD, 4, 4, client=client, executor=executor, monitor="missing", **SETTINGS
        )
        names = set(client.run_on_scheduler(prefixes))
    held = {"daskfactor-hold", "each-band"}
    assert names == OWN[executor] | held | {"log-normalizer", "send-log-normalizer"}


def sample_inside(how, executor):
    """On a worker: a run on the cluster that this task belongs to."""
    V = np.random.default_rng(0).poisson(3.0, (30, 20)).astype(np.float32)
    options = {**SETTINGS, "executor": executor}
    with worker_client() if how == "worker_client" else nullcontext(get_client()) as client:
        trace = dfac.sample(V, MODEL, PSGLD, 4, 4, client=client, **options)
    return bytes(trace["posterior"]["W"].values.tobytes())


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("executor", "processes"), [("ring", True), ("tasks", True), ("ring", False), ("auto", False)]
)
def test_a_task_may_sample_on_its_own_cluster(executor, processes):
    """Its only thread is needed by the tasks that it waits for."""
    V = np.random.default_rng(0).poisson(3.0, (30, 20)).astype(np.float32)
    expected = dfac.sample(V, MODEL, PSGLD, 4, 4, **SETTINGS)["posterior"]["W"].values.tobytes()
    with cluster(1, processes=processes) as client:
        for how in ("get_client", "worker_client"):
            future = client.submit(sample_inside, how, executor, pure=False)
            assert future.result(timeout=50) == expected
        assert free(client)


def free(client):
    """Whether the worker takes new tasks, as many at a time as before."""
    return bool(client.submit(lambda: True, pure=False).result(timeout=10))
