"""Data at URLs on a cluster: workers read them by themselves, and the draws are those of one."""

import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from scipy import sparse

import daskfactor as dfac
from tests.cluster.support import cluster
from tests.object_store import BUCKET

pytestmark = pytest.mark.cluster

FIT: dict[str, Any] = {"draws": 2, "tune": 2, "progressbar": False, "random_seed": 1}


@pytest.fixture(scope="module")
def client(_object_store: Any) -> Iterator[Client]:
    pytest.importorskip("s3fs")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _object_store.environment.items():
            patch.setenv(name, value)
        with cluster(2, processes=True) as client:
            yield client


@pytest.mark.parametrize("kind", ["blocks", "zarr", "icechunk"])
def test_the_draws_of_one_process(kind: str, client: Client, s3: Any) -> None:
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
