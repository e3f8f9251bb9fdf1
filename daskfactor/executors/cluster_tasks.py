"""Block updates as Dask tasks on a `distributed` cluster, of any size at any moment.

Dask places the tasks and computes again what a lost worker held; what it gives
up is run again from the client's state. Good where a task takes 100 ms or more
and where workers come and go.
"""

import sys
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from distributed import get_worker

from daskfactor.executors.base import OnDone, RunReport, Work
from daskfactor.executors.cluster import (
    Attempt,
    ClusterExecutor,
    Teller,
    large_graphs,
    pack,
    rising,
    unpack,
)
from daskfactor.executors.state import ChainState
from daskfactor.executors.tasks import Context, SuperBlock, build_graph, group_rounds, split_state

MOST_TASKS = 4000
"""Tasks of one graph: the scheduler remembers them all until the graph is done."""
SPLIT_BYTES = 2**20
"""Row bands of more bytes than this are not sent along with column bands."""


class ClusterTasksExecutor(ClusterExecutor):
    """Runs plans as Dask graphs on the workers of a `distributed` client.

    Parameters
    ----------
    client
        A synchronous client of any cluster.
    workers
        Addresses of the workers to start with; all by default. Tasks may be moved to others.
    patience
        Limits on waiting and on trying again.
    """

    name = "tasks"

    def _run(self, work: Work, state: ChainState) -> tuple[ChainState, RunReport]:
        done, busy = 0, 0.0
        for groups in _portions(group_rounds(work.plan)):
            operations = sum(len(task.ops) for group in groups for task in group)
            tell = rising(work.on_done, done, operations)
            attempt = partial(self._attempt, groups, work, state, tell)
            state, seconds = self._cluster.persist(attempt, self.report)
            done += operations
            busy += seconds
        work.on_done(done)
        threads = self._cluster.workers().values()
        return state, RunReport(0.0, busy, sum(threads) or 1, len(threads) or 1)

    def _attempt(
        self,
        groups: Sequence[Sequence[SuperBlock]],
        work: Work,
        state: ChainState,
        tell: OnDone,
        attempt: Attempt,
    ) -> tuple[ChainState, float]:
        """Send a graph and what it starts from, wait, and put the state together."""
        cluster, size, token = self._cluster, groups[0][0].size, f"-{uuid.uuid4().hex}"
        cluster.await_workers()
        futures: list[Any] = []

        def send(name: str, value: Any) -> Any:
            """Give the scheduler a value of its own, so that no graph holds it."""
            futures.append(cluster.submit(name, unpack, pack(value)))
            return futures[-1]

        try:
            shared = _Sent(cluster.teller(attempt), pack((work.program, work.data)))
            context = send("send-program", shared)
            found = split_state(state, size)
            starts = {key: send(key[0], value) for key, value in found.items()}
            wide = max(map(sys.getsizeof, state.rows)) * size > SPLIT_BYTES
            graph, ends = build_graph(groups, context, starts, token, wide)
            keys = [key for kind in ends for key in kind]
            wanted = [key for key in keys if isinstance(key, tuple)]
            with large_graphs():
                made = cluster.client.get(graph, wanted, sync=False)
            futures.extend(made)
            for future in made:
                cluster.watch(future)
            by_key = dict(zip(wanted, made, strict=True))
            ready = [by_key[key] if isinstance(key, tuple) else key for key in keys]
            results = cluster.results(ready, attempt, lambda: tell(sum(attempt.done.values())))
        finally:
            for future in futures:
                future.release()
        return ends.join(state, results)


class _Sent(NamedTuple):
    """The context of a graph's tasks as it is sent to workers."""

    teller: Teller
    work: Any

    def load(self) -> Context:
        """Open it in a task, which tells the client what it has done."""
        program, data = unpack(self.work)
        return Context(program, data, partial(self.teller.tell, get_worker(), "progress"))


def _portions(groups: Sequence[list[SuperBlock]]) -> Iterator[list[list[SuperBlock]]]:
    """Cut groups into portions that one graph may hold."""
    portion: list[list[SuperBlock]] = []
    tasks = 0
    for group in groups:
        if portion and tasks + len(group) > MOST_TASKS:
            yield portion
            portion, tasks = [], 0
        portion.append(group)
        tasks += len(group)
    yield portion
