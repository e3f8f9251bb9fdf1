from contextlib import ExitStack

import dask
import pytest
from distributed import default_client

from daskfactor.inference import setting
from tests import several
from tests.cluster import dying
from tests.cluster.support import EXECUTORS, SHORT, cluster, executing, running

several_blocks = several.several_blocks


@pytest.fixture(autouse=True)
def no_client_stays_behind():
    """A client that a failed test leaves as the default would hang every later computation."""
    yield
    while True:
        try:
            client = default_client()
        except ValueError:
            return
        client.close(timeout=5)


@pytest.fixture(autouse=True)
def frequent_checkpoints(monkeypatch):
    monkeypatch.setattr(setting, "LONGEST_SEGMENT", dying.LONGEST_SEGMENT)


@pytest.fixture(scope="module")
def here():
    """Three workers of two threads in this process."""
    with cluster(3, processes=False, threads=2) as client:
        yield client


@pytest.fixture(scope="package")
def pair():
    """Two worker processes that all tests of this folder share, and no others."""
    with ExitStack() as stack:
        with dask.config.set(SHORT):
            client = stack.enter_context(running(2, processes=True))
        yield client


@pytest.fixture
def client(pair):
    """Two worker processes, which tests may kill: their nannies start them again."""
    with dask.config.set(SHORT):
        pair.wait_for_workers(2, timeout=60)
        yield pair


@pytest.fixture(params=EXECUTORS)
def executor(request, here):
    with executing(here, request.param) as made:
        yield made
