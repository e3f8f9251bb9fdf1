import gc
import os
import random
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock
from hypothesis import settings

import daskfactor.random
from tests import kept

# Derandomized in CI: a run there fails because of a change, never because of luck.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

kept.set_up()
if "PYTEST_XDIST_WORKER" not in os.environ:
    kept.sweep()
pytest_plugins = ["tests.tiers"]

# ArviZ writes down once a day that it has warned, and processes that do so at once fail.
if "PYTEST_XDIST_WORKER" in os.environ:
    with (
        FileLock(Path(os.environ["DASKFACTOR_TESTS_FOLDER"]) / "arviz.lock"),
        warnings.catch_warnings(action="ignore"),
    ):
        import arviz  # noqa: F401


def pytest_collection_finish() -> None:
    """Leave all that is loaded by now out of every later search for garbage.

    Compilation makes so many objects that searching takes a seventh of its time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Make seeds that nobody passes from the name of the test: chance would fail it at times."""
    chosen = random.Random(item.nodeid)
    daskfactor.random.secrets = SimpleNamespace(randbits=chosen.getrandbits)


@pytest.fixture(scope="session")
def _object_store():
    moto = pytest.importorskip("moto.server", reason="an S3 server of its own needs moto[server]")
    del moto
    from tests.object_store import ObjectStore

    store = ObjectStore()
    yield store
    store.stop()


@pytest.fixture
def s3(_object_store, monkeypatch):
    """An S3 server on loopback, named in the environment as its users have it there."""
    for name, value in _object_store.environment.items():
        monkeypatch.setenv(name, value)
    return _object_store


@pytest.fixture
def stand_in():
    """A device of this process that is none: kernels are compiled for its processor."""
    from tests.kernels.cuda.fake import standing_in

    with standing_in() as made:
        yield made


@pytest.fixture
def gpu():
    """The GPU of this process."""
    from daskfactor.errors import OptionError
    from daskfactor.kernels.cuda.device import current

    try:
        return current()
    except OptionError as error:
        pytest.skip(f"no device: {error}")
