"""A ring whose workers have a GPU each: the draws of one GPU, and bands that travel."""

import shutil

import numpy as np
import pytest
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import OptionError
from daskfactor.kernels.cuda import device
from tests.cluster.support import cluster, same
from tests.cluster.test_sample import SETTINGS
from tests.kernels.cuda import fake
from tests.refusals import refused
from tests.test_kill import counts

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
    pytest.mark.filterwarnings("ignore:around the means that:daskfactor.errors.DataWarning"),
]
MONITOR = np.array([1, 30, 41]), np.array([3, 20, 7])
PARTS = dfac.TweedieNMF(3), dfac.PSGLD(warm_start=3)


def install():
    """Have a worker's process find a device, for as long as it lives."""
    made = fake.HostDevice(fake.cupy())
    device._opened = lambda: made
    device.MOST_GROUPS, device.THREADS = 2, 32


def launched():
    """Count the kernels that a worker has compiled."""
    return len(device.current()._compiled)


@pytest.fixture
def client(client):
    client.run(install)
    return client


RUNS = {
    "parts": (counts, *PARTS),
    "rates": (counts, dfac.TweedieNMF(3, rate_w="row", rate_h="component"), dfac.PSGLD()),
    "momentum": (counts, dfac.TweedieNMF(3), dfac.SGHMC(warm_start=3)),
    "passes": (counts, dfac.TweedieNMF(3), dfac.LangevinDynamics(warm_start=3)),
    "paths": (counts, dfac.TweedieNMF(3), dfac.BlockHMC(warm_start=3)),
    "columns": (counts, dfac.NegativeBinomialNMF(3, dispersion="column"), dfac.PSGLD()),
    "sparse": (lambda: sparse.csr_array(np.nan_to_num(counts())), *PARTS),
}


@pytest.mark.quick("rates")
@pytest.mark.parametrize("name", RUNS)
def test_workers_give_the_draws_of_one_gpu(name, client, stand_in):
    values, model, sampler = RUNS[name]
    V = dfac.as_blocks(values(), blocks=4, unstored="zero" if name == "sparse" else None)
    settings = {**SETTINGS, "draws": 8, "tune": 8, "monitor": MONITOR, "blocks": None}
    one = dfac.sample(V, model, sampler, device="cuda", **settings)
    ring = dfac.sample(V, model, sampler, device="cuda", client=client, **settings)
    assert same(one, ring, statistics=())  # sums of densities are of other parts
    assert one.attrs["device"] == ring.attrs["device"]
    assert all(count > 1 for count in client.run(launched).values())


@pytest.mark.full
def test_data_beyond_the_limit_of_a_worker_stream(client, stand_in):
    run = (counts(), *PARTS, 8, 8)
    there = {"client": client, **SETTINGS}
    whole = dfac.sample(*run, device="cuda", **there)
    assert same(whole, dfac.sample(*run, device=dfac.CUDA(memory_limit=1), **there))


def test_workers_draw_new_rows(client, stand_in):
    run = {**SETTINGS, "blocks": None}
    trace = dfac.sample(counts(), *PARTS, 2, 8, **run)
    run |= {"device": "cuda", "blocks": 4}
    one, ring = (dfac.transform(trace, counts()[:20], client=own, **run) for own in (None, client))
    assert (one.values == ring.values).all()
    assert ring.attrs["device"] == "cuda: no GPU"


def test_tasks_have_no_gpu(client, stand_in):
    run = {"device": "cuda", "client": client, "executor": "tasks"} | SETTINGS
    words = "those of workers run a ring"
    refused(OptionError, words, dfac.sample, counts(), dfac.TweedieNMF(3), **run)


@pytest.mark.full
def test_a_worker_without_a_gpu_is_one_sentence():
    run = (counts(), dfac.TweedieNMF(3), dfac.PSGLD())
    told = pytest.raises(OptionError, match='device="cuda" needs')
    with cluster(2, processes=True) as client, told:
        dfac.sample(*run, device="cuda", client=client, **SETTINGS)
