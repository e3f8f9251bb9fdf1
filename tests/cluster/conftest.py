from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client, default_client

from daskfactor.inference import setting
from tests.cluster import dying
from tests.cluster.support import EXECUTORS, IMPATIENT, cluster


@pytest.fixture(autouse=True)
def no_client_stays_behind() -> Iterator[None]:
    """A client that a failed test leaves as the default would hang every later computation."""
    yield
    while True:
        try:
            client = default_client()
        except ValueError:
            return
        client.close(timeout=5)


@pytest.fixture(autouse=True)
def frequent_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting, "LONGEST_SEGMENT", dying.LONGEST_SEGMENT)


@pytest.fixture(scope="module")
def here() -> Iterator[Client]:
    """Three workers of two threads in this process."""
    with cluster(3, processes=False, threads=2) as client:
        yield client


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Client]:
    """Two worker processes."""
    with cluster(2, processes=True) as client:
        yield client


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest, here: Client) -> Iterator[Any]:
    made = EXECUTORS[request.param](here, patience=IMPATIENT)
    yield made
    made.close()
