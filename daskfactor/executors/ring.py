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
from daskfactor.executors.base import OnDone, RunReport, Work
from daskfactor.executors.cluster import (
    Attempt,
    ClusterExecutor,
    Patience,
    Teller,
    Waited,
    pack,
    rising,
)
from daskfactor.executors.exchange import PLUGIN, Exchange
from daskfactor.executors.plan import ops_by_row
from daskfactor.executors.scheduler import share_bands
from daskfactor.executors.segment import Order, Part, plain_ops, plan_transfers, run_segment
from daskfactor.executors.state import ChainState, bare, join_portions

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

    def _run(self, work: Work, state: ChainState) -> tuple[ChainState, RunReport]:
        total = len(work.plan) * len(state.rows)
        segment = _Segment(work, state, rising(work.on_done, 0, total))
        after, report = self._cluster.persist(partial(self._attempt, segment), self.report)
        work.on_done(total)
        return after, report

    def _attempt(self, segment: "_Segment", attempt: Attempt) -> tuple[ChainState, RunReport]:
        """Send the segment out, watch over it, and put together what comes back."""
        cluster = self._cluster
        threads = self.members(fresh=attempt.key[1] > 0)
        self._await_earlier(segment.attempts)
        counts = share_bands(len(segment.state.rows), list(threads.values()), self._lanes)
        shares = {a: count for a, count in zip(threads, counts, strict=True) if count}
        attempt.members = tuple(shares)
        owner = tuple(rank for rank, count in enumerate(shares.values()) for _ in range(count))
        lanes = [min(threads[address], count) for address, count in shares.items()]
        segment.attempts.append(attempt)
        teller = cluster.teller(attempt)
        futures: list[Any] = []
        try:
            for rank, address in enumerate(attempt.members):
                part = Part(rank, lanes[rank], owner)
                order = segment.order(attempt, teller, cluster.patience.stall, part)
                where = {"workers": [address], "priority": 10}
                futures.append(cluster.submit("ring-segment", run_segment, pack(order), **where))
            portions = cluster.results(
                futures, attempt, partial(self._look, segment, attempt, Waited())
            )
        finally:
            for future in futures:
                future.release()
        busy = sum(portion.busy for portion in portions)
        return join_portions(segment.state, portions), RunReport(0.0, busy, sum(lanes), len(lanes))

    def _look(self, segment: "_Segment", attempt: Attempt, waited: Waited) -> None:
        """Raise if a worker has not started in time, and pass progress on."""
        missing = sorted(set(range(len(attempt.members))) - attempt.started)
        limit = self._cluster.patience.start
        if waited.seconds() > limit and missing:
            names = ", ".join(attempt.members[rank] for rank in missing)
            raise EngineError(
                f"{len(missing)} of {len(attempt.members)} workers did not start their part of the "
                f"ring within {limit:g} s ({names}); a ring needs all its workers at "
                'once: free them from other work, name free ones, or use executor="tasks"'
            )
        segment.tell(sum(attempt.done.values()))

    def _await_earlier(self, attempts: list[Attempt]) -> None:
        """Wait for survivors of aborted attempts: they may be inside a long block."""
        waited = Waited()
        while attempts and waited.seconds() < self._cluster.patience.stall:
            alive = self._cluster.workers()
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
        cluster = self._cluster
        if not self._registered:
            cluster.client.register_plugin(Exchange())
            self._registered = True
        waited = Waited()
        while True:
            found = cluster.await_workers()
            self._ready = set() if fresh else self._ready & set(found)
            new = sorted(set(found) - self._ready)
            if new:
                limit = AFTER_LOSS if fresh else cluster.patience.workers
                self._ready |= cluster.responding_workers(_has_plugin, new, limit)
            members = {address: found[address] for address in sorted(self._ready)}
            if members:
                return members
            if waited.seconds() > cluster.patience.workers:
                raise EngineError(
                    f"none of {len(found)} workers answered within {cluster.patience.workers:g} s; "
                    "look at their logs"
                )
            time.sleep(0.1)


class _Segment:
    """What all attempts at one call of ``run`` share."""

    def __init__(self, work: Work, state: ChainState, tell: OnDone) -> None:
        self.work = work
        self.state = state
        self.tell = tell
        self.attempts: list[Attempt] = []
        self._ops = ops_by_row(work.plan)
        self._transfers, self._touched = plan_transfers(work.plan, work.program, state)

    def order(self, attempt: Attempt, teller: Teller, patience: float, part: Part) -> Order:
        """Write down one worker's part."""
        state, transfers, touched = self.state, self._transfers, self._touched
        owner, rows = part.owner, part.rows
        sent = [bare(band, touched & band.arrays.keys()) for band in state.cols]
        return Order(
            attempt.key,
            teller,
            part,
            attempt.members,
            patience,
            transfers,
            plain_ops(self._ops, rows),
            self.work.program,
            self.work.data,
            {row: bare(state.rows[row], touched & state.rows[row].arrays.keys()) for row in rows},
            [
                (col, due, piece)
                for col, band in enumerate(sent)
                for due, piece in transfers.split(band, -1)
                if owner[int(transfers.row_of[due, col])] == part.rank
            ],
            [
                {name: band.arrays[name] for name in transfers.constant & band.arrays.keys()}
                for band in state.cols
            ],
            {block: cells for block, cells in state.cells.items() if block.row in rows},
        )


def _has_plugin(dask_worker: Any) -> bool:
    return PLUGIN in dask_worker.plugins
