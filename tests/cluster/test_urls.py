"""Data at URLs on a cluster: workers read them by themselves, and the draws are those of one."""

import os
import uuid

import numpy as np
import pytest
import zarr
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import StoreError
from tests.cluster.support import cluster
from tests.object_store import BUCKET, SECRETS
from tests.refusals import refused
from tests.results.writer import take

pytestmark = pytest.mark.cluster

FIT = {"draws": 2, "tune": 2, "progressbar": False, "random_seed": 1}


@pytest.mark.quick("zarr")
@pytest.mark.parametrize("kind", ["blocks", "zarr", "icechunk"])
def test_the_draws_of_one_process(kind, client, s3):
    pytest.importorskip("s3fs")
    client.run(take, s3.environment)
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/v"
    rng = np.random.default_rng(2)
    values = 1 + rng.poisson(2.0, (40, 32)).astype(np.float32)
    if kind == "blocks":
        values = sparse.csr_array(values * (rng.random(values.shape) < 0.4))
        dfac.convert(values, url, unstored="zero", blocks=2, progressbar=False)
    elif kind == "zarr":
        zarr.create_array(url, data=values, chunks=(20, 16))
    else:
        icechunk = pytest.importorskip("icechunk")
        from daskfactor.data.icechunks import icechunk_storage

        repository = icechunk.Repository.create(icechunk_storage(url))
        session = repository.writable_session("main")
        zarr.create_array(session.store, name="v", data=values, chunks=(20, 16))
        session.commit("all of it")
        url += "/v"
    model = dfac.TweedieNMF(2, dispersion=1.0)
    with dfac.as_blocks(url) as data:
        assert data.share().kind == ("store" if kind == "blocks" else "zarr")
        here = dfac.sample(data, model, executor="serial", **FIT)
    for executor in ("ring", "tasks") if kind == "blocks" else ("ring",):
        there = dfac.sample(url, model, executor=executor, client=client, **FIT)
        assert there["posterior"].to_dataset().equals(here["posterior"].to_dataset())


def without_credentials():
    for name in SECRETS:
        os.environ.pop(name)


@pytest.mark.full
@pytest.mark.parametrize(("what", "executor"), [("data", "tasks"), ("run", "ring")])
def test_a_worker_without_credentials_is_named(what, executor, s3):
    pytest.importorskip("s3fs")
    pytest.importorskip("icechunk")
    place = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    values = sparse.csr_array(np.ones((40, 32), np.float32))
    data, store = dfac.as_blocks(values, blocks=2, unstored="zero"), None
    if what == "run":
        store = f"{place}/run"
    else:
        dfac.convert(data, f"{place}/v", progressbar=False)
        data = f"{place}/v"
    model = dfac.TweedieNMF(2, dispersion=1.0)
    with cluster(2, processes=True) as own:
        first, _ = sorted(own.nthreads())
        (pid,) = own.run(os.getpid, workers=[first]).values()
        own.run(without_credentials, workers=[first])
        cannot = f"{first} cannot write results" if what == "run" else f"process {pid} on .* cannot"
        words = f"the worker (in )?{cannot}.*s3://.*no credentials"
        run = {"store": store, "client": own, "executor": executor}
        refused(StoreError, words, dfac.sample, data, model, **run, **FIT)
