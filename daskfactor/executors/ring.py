"""Segments on a cluster: one task per worker, bands of columns from worker to worker.

Every worker owns consecutive row bands for a segment, as many as suit its speed in
those before, and runs all their operations in one task; bands of columns, and of further
factors, go to whichever worker has their next operation, without the scheduler (Şimşekli
et al. 2015, figure 4, with any order of parts). Bands stay in the workers between
segments; the client knows where they are.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from distributed import Client

from daskfactor.errors import EngineError
from daskfactor.executors.balance import Balance, evenness
from daskfactor.executors.base import OnDone, Waited, Work
from daskfactor.executors.cluster import (
    Attempt,
    ClusterExecutor,
    Patience,
)
from daskfactor.executors.held import HeldState
from daskfactor.executors.segment import make_orders, run_segment
from daskfactor.executors.store import pack


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
        self._balance = Balance()

    def _share(self, blocks: int, threads: Mapping[str, int]) -> list[int]:
        return self._balance.share(blocks, threads, self._lanes)

    def _segment(self, work: Work, state: HeldState, attempt: Attempt) -> HeldState:
        """Have workers do their parts, watch over them, and note what they leave."""
        shares, threads = self.shares(state.blocks)
        self._await_earlier()
        attempt.members = tuple(shares)
        lanes = [min(threads[address], count) for address, count in shares.items()]
        self._unended.append(attempt)
        orders = make_orders(
            work, state, shares, lanes, attempt.key, self.teller(attempt), self.patience.stall
        )
        version = self.keeper.next_version()
        futures: list[Any] = []
        try:
            for order in orders:
                order.token, order.version = self.keeper.token, version
                where = {"workers": [order.addresses[order.rank]], "priority": 10}
                futures.append(self.submit("ring-segment", run_segment, pack(order), **where))
            look = partial(self._look_at_ring, work.on_done, attempt, Waited())
            reports = self.results(futures, attempt, look)
        finally:
            for future in futures:
                future.release()
        self._unended.remove(attempt)
        busy = {a: report.busy for a, report in zip(shares, reports, strict=True)}
        self._balance.note({a: len(work.plan) * count for a, count in shares.items()}, busy)
        self.report.balance = evenness(busy, dict(zip(shares, lanes, strict=True)))
        self.report.busy_seconds += sum(busy.values())
        self.report.lanes, self.report.workers = sum(lanes), len(lanes)
        return state.after(reports, version)

    def _look_at_ring(self, on_done: OnDone, attempt: Attempt, waited: Waited) -> None:
        """Raise if a worker has not started in time, and pass progress on."""
        missing = sorted(set(range(len(attempt.members))) - attempt.started)
        limit = self.patience.start
        if waited.seconds() > limit and missing:
            self.check_paused([attempt.members[rank] for rank in missing])
            names = ", ".join(attempt.members[rank] for rank in missing)
            raise EngineError(
                f"{len(missing)} of {len(attempt.members)} workers did not start their part of the "
                f"ring within {limit:g} s ({names}); a ring needs all its workers at "
                'once: free them from other work, name free ones, or use executor="tasks"'
            )
        on_done(sum(attempt.done.values()))

    def _await_earlier(self) -> None:
        """Wait for survivors of aborted attempts: they may be inside a long block."""
        waited = Waited()
        while self._unended and waited.seconds() < self.patience.stall:
            alive = self.workers()
            first = self._unended[0]
            if any(first.members[rank] in alive for rank in first.started - first.ended):
                time.sleep(0.02)
            else:
                del self._attempts[self._unended.pop(0).key]
