from collections.abc import Iterator

import pytest
from distributed import default_client


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
