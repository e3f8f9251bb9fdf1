from contextlib import ExitStack
from pathlib import Path

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


class Shared:
    """Two worker processes that tests of this folder share, from the first that asks for them."""

    def __init__(self):
        self._undo = ExitStack()
        self._client = None

    def client(self):
        if self._client is None:
            self._client = self._undo.enter_context(running(2, processes=True))
        self._client.wait_for_workers(2, timeout=60)  # nannies start those again that were killed
        return self._client

    def close(self):
        self._client = None
        self._undo.close()


SHARED = Shared()


def pytest_runtest_teardown(item, nextitem):
    """Close the shared cluster when tests of another folder come, which may measure something."""
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        SHARED.close()


@pytest.fixture
def client():
    """Two worker processes, which tests may kill."""
    with dask.config.set(SHORT):
        yield SHARED.client()


@pytest.fixture(params=EXECUTORS)
def executor(request, here):
    with executing(here, request.param) as made:
        yield made
