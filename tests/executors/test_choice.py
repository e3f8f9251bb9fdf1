"""Which executor is chosen for a cluster, and what is said about it."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from daskfactor import executors
from daskfactor.data.sources import as_blocks
from daskfactor.executors import block_seconds, choose_executor
from daskfactor.progress import NOTE_WIDTH


def workers(adaptive=False):
    cluster = SimpleNamespace(_adaptive=object() if adaptive else None)
    return SimpleNamespace(nthreads=lambda: {"a": 2, "b": 2}, cluster=cluster)


@pytest.mark.parametrize(
    ("adaptive", "seconds", "name", "reason"),
    [
        (False, 0.02, "ring", r"takes about 20 ms, .* from worker to worker \(2 of them\)"),
        (False, 0.2, "ring", r"takes about 200 ms, "),
        (False, 2.0, "tasks", "takes about 2 s, which is worth a Dask task"),
        (True, 0.5, "tasks", "the cluster grows and shrinks by itself; a block takes .* ms$"),
        (True, 0.01, "tasks", "although a ring on a fixed cluster is faster"),
    ],
)
def test_by_the_block_and_the_cluster(adaptive, seconds, name, reason, monkeypatch):
    monkeypatch.setattr(executors, "block_seconds", lambda data, width: seconds)
    made = choose_executor(workers(adaptive), None, 10)
    assert made.name == name
    assert re.search(reason, made.reason)
    assert len(f"{made.name}: {made.short}") <= NOTE_WIDTH  # else the progress bar cuts it off


def test_the_estimate_grows_with_the_work():
    rng = np.random.default_rng(0)
    with as_blocks(rng.random((400, 200), dtype=np.float32), 2) as data:
        few, many = (block_seconds(data, width) for width in (10, 20))
        assert many == pytest.approx(2 * few)
        assert 1e-6 < few < 1e-2
