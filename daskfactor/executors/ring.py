"""Segments on a cluster: one task per worker, column bands from worker to worker.

Every worker owns consecutive row bands for a segment and runs all their
operations in one task; column bands go to whichever worker has their next
operation, without the scheduler (Şimşekli et al. 2015, figure 4, with any order
of parts). The chain's state stays with the client: it is sent out at the start
of a segment and replaced at its end, so a lost worker costs one segment.
"""

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from distributed import Client

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import EngineError
from daskfactor.executors.base import BlockProgram, OnDone, RunReport, settle
from daskfactor.executors.cluster import Cluster, News, Patience
from daskfactor.executors.mapping import map_on_cluster
from daskfactor.executors.plan import Round
from daskfactor.executors.records import Outcome, bare, with_own, with_records
from daskfactor.executors.scheduler import SegmentLost, share_bands, tabulate
from daskfactor.executors.segment import Order, run_segment
from daskfactor.executors.serialization import Handle
from daskfactor.executors.state import ChainState, FactorBand
from daskfactor.executors.timeout import Waited
from daskfactor.executors.transfer_plan import travel_of
from daskfactor.executors.worker_plugin import PLUGIN, Post
from daskfactor.kernels.workspace import Workspace

logger = logging.getLogger(__name__)

AFTER_LOSS = 5.0
"""Seconds for workers to answer after a loss: a dead one may be listed for a while."""

T = TypeVar("T")
R = TypeVar("R")


class RingExecutor:
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
    reason = "as asked for"

    def __init__(
        self,
        client: Client,
        workers: Sequence[str] | None = None,
        lanes_per_worker: int | Literal["auto"] = "auto",
        patience: Patience | None = None,
    ) -> None:
        self.report = RunReport()
        self.patience = patience or Patience()
        self._lanes = None if lanes_per_worker == "auto" else lanes_per_worker
        self._cluster = Cluster(client, workers, self.patience)
        self._ready: set[str] = set()
        self._registered = False

    def run(
        self,
        plan: Sequence[Round],
        program: BlockProgram,
        state: ChainState,
        data: BlockedData,
        on_done: OnDone | None = None,
    ) -> ChainState:
        if not plan:
            return state
        started = time.perf_counter()
        handle = self._cluster.shares.handle(data)
        segment = _Segment(self, plan, program, state, handle, on_done)
        try:
            after, report = self._cluster.persist(segment.attempt, self.report)
        finally:
            self._cluster.forget(segment.token)
        report.wall_seconds = time.perf_counter() - started
        self.report.add(report)
        if on_done is not None:
            on_done(segment.total)
        return after

    def gang(self, fresh: bool) -> dict[str, int]:
        """Threads of the workers that will take part, all of them known to answer.

        ``fresh`` asks every one of them again, as is due after a loss.
        """
        if not self._registered:
            self._cluster.client.register_plugin(Post())
            self._registered = True
        waited = Waited()
        while True:
            found = self._cluster.await_workers()
            self._ready = set() if fresh else self._ready & set(found)
            new = sorted(set(found) - self._ready)
            if new:
                limit = AFTER_LOSS if fresh else self.patience.workers
                self._ready |= self._cluster.who_says_yes(_has_post, new, limit)
            members = {address: found[address] for address in sorted(self._ready)}
            if members:
                return members
            if waited.seconds() > self.patience.workers:
                raise EngineError(
                    f"none of {len(found)} workers answered within {self.patience.workers:g} s; "
                    "look at their logs"
                )
            time.sleep(0.1)

    def map(
        self,
        function: Callable[[T, Workspace], R],
        items: Sequence[T],
        name: str = "pass-over-data",
    ) -> list[R]:
        return map_on_cluster(self._cluster, self.report, function, items, name)

    def close(self) -> None:
        self._cluster.close()


class _Segment:
    """One call of ``run``: attempts at the same segment until one succeeds."""

    def __init__(
        self,
        executor: RingExecutor,
        plan: Sequence[Round],
        program: BlockProgram,
        state: ChainState,
        handle: Handle,
        on_done: OnDone | None,
    ) -> None:
        self.executor = executor
        self.cluster = executor._cluster
        self.program = program
        self.state = state
        self.handle = handle
        self.on_done = on_done
        self.token = uuid.uuid4().hex
        self.total = len(plan) * len(state.rows)
        self.table = tabulate(plan, len(state.rows))
        self.travel = travel_of(plan, program, state.cols)
        self.told = 0
        self.earlier: dict[int, tuple[str, ...]] = {}

    def attempt(self, number: int) -> tuple[ChainState, RunReport]:
        """Send the segment out, watch over it, and put together what comes back."""
        gang = self.executor.gang(fresh=number > 0)
        self._await_earlier()
        lanes = self.executor._lanes
        counts = share_bands(len(self.state.rows), list(gang.values()), lanes)
        members = tuple(a for a, count in zip(gang, counts, strict=True) if count)
        owner = tuple(
            rank for rank, n in enumerate(count for count in counts if count) for _ in range(n)
        )
        threads = [min(gang[a], owner.count(rank)) for rank, a in enumerate(members)]
        news = self.cluster.listen(self.token, number)
        self.earlier[number] = members
        futures: list[Any] = []
        try:
            for rank, count in enumerate(threads):
                future = self._submit(number, rank, members, owner, count)
                futures.append(future)  # at once, so that it is released whatever comes next
            watch = _Watch(self, news, members)
            self.cluster.wait(futures, watch.look)
            outcomes: list[Outcome] = self.cluster.gather(futures, watch.look)
        finally:
            for future in futures:
                future.release()
        report = RunReport(
            0.0, sum(outcome.busy for outcome in outcomes), sum(threads), len(members)
        )
        return self._assemble(outcomes), report

    def _submit(
        self, number: int, rank: int, members: tuple[str, ...], owner: tuple[int, ...], threads: int
    ) -> Any:
        state, travel = self.state, self.travel
        rows = [row for row, own in enumerate(owner) if own == rank]
        order = Order(
            (self.token, number),
            self.cluster.topic,
            rank,
            members,
            owner,
            self.table.rows(rows[0], rows[-1] + 1),
            self.program,
            self.handle,
            {row: travel.of_row(bare(state.rows[row])) for row in rows},
            [
                (col, due, part)
                for col, band in enumerate(state.cols)
                for due, part in travel.first_due(bare(band)).items()
                if owner[self.table.row_of[due, col]] == rank
            ],
            {col: travel.constants_of(band) for col, band in enumerate(state.cols)},
            travel,
            {block: cells for block, cells in state.cells.items() if owner[block.row] == rank},
            threads,
            self.executor.patience.stall,
        )
        key = f"ring-segment-{self.token}-{number}-{rank}"
        packed = self.cluster.shares.pack(order)
        return self.cluster.submit(
            run_segment, packed, key, key=key, workers=[members[rank]], priority=10
        )

    def _await_earlier(self) -> None:
        """Wait for survivors of an aborted attempt: they may be inside a long block."""
        waited = Waited()
        for number, members in self.earlier.items():
            news = self.cluster._news[self.token, number]
            while waited.seconds() < self.executor.patience.stall:
                alive = self.cluster.workers()
                running = {
                    members[rank] for rank in news.started - news.ended if members[rank] in alive
                }
                if not running:
                    break
                time.sleep(0.02)
        self.earlier.clear()

    def tell(self, news: News) -> None:
        """Pass progress on to the caller; never less than it has heard already."""
        done = sum(news.done.values())
        if self.on_done is not None and self.told < done < self.total:
            self.told = done
            self.on_done(done)

    def _assemble(self, outcomes: Sequence[Outcome]) -> ChainState:
        state = self.state
        rows: dict[int, FactorBand] = {}
        cols: dict[int, FactorBand] = {}
        cells = {block: own.copy() for block, own in state.cells.items()}
        for outcome in outcomes:
            rows.update(outcome.rows)
            cols.update(outcome.cols)
        for outcome in outcomes:
            for col, arrays in outcome.ended.items():
                cols[col].arrays.update(arrays)
            for block, moments in outcome.cells.items():
                cells[block].mean, cells[block].m2, cells[block].count = moments
        records = [outcome.records for outcome in outcomes]
        after = ChainState(
            [with_own(band, rows[row]) for row, band in enumerate(state.rows)],
            [with_records(band, cols[col], col, records) for col, band in enumerate(state.cols)],
            cells,
            list(state.evaluations),
        )
        settle(after, [found for outcome in outcomes for found in outcome.evaluations])
        return after


class _Watch:
    """Looks after the workers of one attempt while the client waits."""

    def __init__(self, segment: _Segment, news: News, members: tuple[str, ...]) -> None:
        self.segment = segment
        self.news = news
        self.members = members
        self.waited = Waited()
        self.checked = time.monotonic()

    def look(self) -> None:
        """Raise if a worker has gone, has not started, or nothing has moved for too long."""
        now = time.monotonic()
        patience = self.segment.executor.patience
        if now - self.checked > 0.5 or self.news.lost:
            self.segment.cluster.check_members(self.members)
            self.checked = now
        if self.news.lost:
            raise SegmentLost("workers lost their connection to each other")
        missing = set(range(len(self.members))) - self.news.started
        if self.waited.seconds() > patience.start and missing:
            names = ", ".join(self.members[rank] for rank in sorted(missing))
            raise EngineError(
                f"{len(missing)} of {len(self.members)} workers did not start their part of the "
                f"ring within {patience.start:g} s ({names}); a ring needs all its workers at "
                'once: free them from other work, name free ones, or use executor="tasks"'
            )
        self.segment.cluster.check_quiet(self.news.quiet, "block")
        self.segment.tell(self.news)


def _has_post(dask_worker: Any) -> bool:
    return PLUGIN in dask_worker.plugins
