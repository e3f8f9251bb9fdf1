"""Segments on a cluster: one task per worker, column bands from worker to worker.

Every worker owns consecutive row bands for a segment and runs all their
operations in one task; column bands go to whichever worker has their next
operation, without the scheduler (Şimşekli et al. 2015, figure 4, with any order
of parts). The chain's state stays with the client: it is sent out at the start
of a segment and replaced at its end, so a lost worker costs one segment.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from distributed import Client

from daskfactor.errors import EngineError
from daskfactor.executors.base import OnDone, Work
from daskfactor.executors.cluster import (
    Attempt,
    ClusterExecutor,
    Patience,
    Waited,
    pack,
)
from daskfactor.executors.segment import (
    PLUGIN,
    Exchange,
    make_orders,
    run_segment,
)
from daskfactor.executors.state import ChainState, join_portions
from daskfactor.executors.threads import share_bands

AFTER_LOSS = 5.0
"""Seconds for workers to answer after a loss: a dead one may be listed for a while."""


class RingExecutor(ClusterExecutor):
    """Runs plans on the workers of a `distributed` client.

    Parameters
    ----------
    client
        A synchronous client of a cluster whose workers can all run one task at
        the same time.
    workers
        Addresses of the workers to use; by default all that are there when a
        segment starts.
    lanes_per_worker
        Fewest row bands per thread of a worker; with two or more a band is on
        its way while another is worked on. ``"auto"``: as many as the grid has
        to give while all threads that help are used.
    patience
        Limits on waiting and on trying again.
    """

    name = "ring"

    def __init__(
        self,
        client: Client,
        workers: Sequence[str] | None = None,
        lanes_per_worker: int | Literal["auto"] = "auto",
        patience: Patience | None = None,
    ) -> None:
        super().__init__(client, workers, patience)
        self._lanes = None if lanes_per_worker == "auto" else lanes_per_worker
        self._ready: set[str] = set()
        self._registered = False

    def _run(self, work: Work, state: ChainState) -> ChainState:
        after = self.persist(partial(self._attempt, work, state, []))
        work.on_done(len(work.plan) * len(state.rows))
        return after

    def _attempt(
        self, work: Work, state: ChainState, earlier: list[Attempt], attempt: Attempt
    ) -> ChainState:
        """Send the segment out, watch over it, and put together what comes back."""
        threads = self.members(fresh=attempt.key[1] > 0)
        self._await_earlier(earlier)
        counts = share_bands(len(state.rows), list(threads.values()), self._lanes)
        shares = {a: count for a, count in zip(threads, counts, strict=True) if count}
        attempt.members = tuple(shares)
        lanes = [min(threads[address], count) for address, count in shares.items()]
        earlier.append(attempt)
        orders = make_orders(
            work, state, shares, lanes, attempt.key, self.teller(attempt), self.patience.stall
        )
        futures: list[Any] = []
        try:
            for order in orders:
                where = {"workers": [order.addresses[order.rank]], "priority": 10}
                futures.append(self.submit("ring-segment", run_segment, pack(order), **where))
            look = partial(self._look_at_ring, work.on_done, attempt, Waited())
            portions = self.results(futures, attempt, look)
        finally:
            for future in futures:
                future.release()
        self.report.busy_seconds += sum(portion.busy for portion in portions)
        self.report.lanes, self.report.workers = sum(lanes), len(lanes)
        return join_portions(state, portions)

    def _look_at_ring(self, on_done: OnDone, attempt: Attempt, waited: Waited) -> None:
        """Raise if a worker has not started in time, and pass progress on."""
        missing = sorted(set(range(len(attempt.members))) - attempt.started)
        limit = self.patience.start
        if waited.seconds() > limit and missing:
            names = ", ".join(attempt.members[rank] for rank in missing)
            raise EngineError(
                f"{len(missing)} of {len(attempt.members)} workers did not start their part of the "
                f"ring within {limit:g} s ({names}); a ring needs all its workers at "
                'once: free them from other work, name free ones, or use executor="tasks"'
            )
        on_done(sum(attempt.done.values()))

    def _await_earlier(self, attempts: list[Attempt]) -> None:
        """Wait for survivors of aborted attempts: they may be inside a long block."""
        waited = Waited()
        while attempts and waited.seconds() < self.patience.stall:
            alive = self.workers()
            first = attempts[0]
            if any(first.members[rank] in alive for rank in first.started - first.ended):
                time.sleep(0.02)
            else:
                attempts.pop(0)
        attempts.clear()

    def members(self, fresh: bool) -> dict[str, int]:
        """Return the threads of the workers that will take part, all of them known to answer.

        ``fresh`` asks every one of them again, as is due after a loss.
        """
        if not self._registered:
            self.client.register_plugin(Exchange())
            self._registered = True
        waited = Waited()
        while True:
            found = self.await_workers()
            self._ready = set() if fresh else self._ready & set(found)
            new = sorted(set(found) - self._ready)
            if new:
                limit = AFTER_LOSS if fresh else self.patience.workers
                self._ready |= self.responding_workers(_has_plugin, new, limit)
            members = {address: found[address] for address in sorted(self._ready)}
            if members:
                return members
            if waited.seconds() > self.patience.workers:
                raise EngineError(
                    f"none of {len(found)} workers answered within {self.patience.workers:g} s; "
                    "look at their logs"
                )
            time.sleep(0.1)


def _has_plugin(dask_worker: Any) -> bool:
    return PLUGIN in dask_worker.plugins
