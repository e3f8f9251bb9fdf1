"""A function over items on a cluster: a batch for every thread, results in order."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from daskfactor.executors.base import RunReport
from daskfactor.executors.cluster import Cluster
from daskfactor.executors.serialization import Packed
from daskfactor.executors.timeout import Waited
from daskfactor.executors.workspaces import local_workspace
from daskfactor.kernels.workspace import Workspace
from daskfactor.threads import single_threaded_blas

T = TypeVar("T")
R = TypeVar("R")


def same(packed: Packed) -> Packed:
    """What a function is sent to the cluster in: workers pass it on among themselves."""
    return packed


def unpack(packed: Packed) -> Any:
    """What was packed, as a result that workers can pass on."""
    return packed.load()


def call_batch(packed: Packed, items: Sequence[Any]) -> list[Any]:
    """The task: the function of every item of a batch."""
    function = packed.load()
    with single_threaded_blas():
        return [function(item, local_workspace()) for item in items]


def map_on_cluster(
    cluster: Cluster,
    report: RunReport,
    function: Callable[[T, Workspace], R],
    items: Sequence[T],
    name: str,
) -> list[R]:
    """``function`` of every item; run again when workers are lost."""
    if not items:
        return []
    packed = cluster.shares.pack(function)

    def attempt(number: int) -> list[R]:
        del number
        threads = sum(cluster.await_workers().values())
        batches = min(len(items), threads)
        edges = [len(items) * n // batches for n in range(batches + 1)]
        sent = cluster.submit(same, packed, key=f"send-{name}-{cluster.fresh()}")
        futures = [
            cluster.submit(call_batch, sent, list(items[low:high]), key=f"{name}-{cluster.fresh()}")
            for low, high in itertools.pairwise(edges)
        ]
        seen, finished, quiet = time.monotonic(), 0, Waited()

        def look() -> None:
            nonlocal seen, finished
            count = sum(future.status == "finished" for future in futures)
            if count > finished:
                finished = count
                quiet.restart()
            cluster.check_quiet(quiet, "share of a pass over the data")
            if time.monotonic() - seen > 1.0:
                cluster.await_workers()
                seen = time.monotonic()

        try:
            cluster.wait(futures, look)
            return [result for batch in cluster.gather(futures, look) for result in batch]
        finally:
            for future in (sent, *futures):
                future.release()

    return cluster.persist(attempt, report)
