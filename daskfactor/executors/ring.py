"""Ring executor: one task per worker and segment, column bands sent from worker to worker.

Every worker owns consecutive row bands for a segment, in proportion to its measured speed, and runs
all their operations in one task. Bands of columns, and of further factors, are sent directly to the
worker of their next operation, without the scheduler (Şimşekli et al. 2015, figure 4, with any
order of parts). Between segments bands stay on the workers.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

from distributed import Client

from daskfactor.errors import EngineError
from daskfactor.executors.balance import LoadBalancer, load_balance
from daskfactor.executors.base import OnDone, WaitTimer, Work
from daskfactor.executors.cluster import (
    Attempt,
    ClusterExecutor,
    Patience,
)
from daskfactor.executors.remote_state import RemoteState
from daskfactor.executors.segment import make_segment_tasks, run_segment


class RingExecutor(ClusterExecutor):
    """Runs plans on the workers of a `distributed` client.

    Parameters
    ----------
    client
        A synchronous client of a cluster whose workers can each run a task at the same time.
    workers
        Addresses of the workers; by default all that are connected when a segment starts.
    lanes_per_worker
        Minimum number of row bands per thread of a worker; with two or more, one band is sent
        while another is updated. ``"auto"`` takes as many as the grid allows when all useful
        threads have work.
    patience
        Time limits and the limit on retries.
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
        self._balance = LoadBalancer()

    def _share(self, blocks: int, threads: Mapping[str, int]) -> list[int]:
        return self._balance.share(blocks, threads, self._lanes)

    def _segment(self, work: Work, state: RemoteState) -> RemoteState:
        """Run a segment on the workers; return the state that they have stored."""
        shares, threads = self.shares(state.blocks)
        lanes = [min(threads[address], count) for address, count in shares.items()]
        with self.reporting() as (attempt, run_id, report_progress):
            tasks = make_segment_tasks(
                work, state, shares, lanes, run_id, report_progress, self.patience.stall
            )
            version = next(self.state_client.versions)
            for task in tasks:
                task.version = version
            jobs = dict(zip(shares, tasks, strict=True))
            check = partial(self._check_ring, work.on_done, list(shares), attempt, WaitTimer())
            parts = self.make_parts("ring-segment", run_segment, jobs, attempt, check)
        busy = {a: report.busy for a, (report, _) in zip(shares, parts, strict=True)}
        self._balance.record({a: len(work.plan) * count for a, count in shares.items()}, busy)
        self.report.balance = load_balance(busy, dict(zip(shares, lanes, strict=True)))
        self.report.busy_seconds += sum(busy.values())
        self.report.lanes, self.report.workers = sum(lanes), len(lanes)
        return state.with_reports(parts)

    def _check_ring(
        self, on_done: OnDone, members: Sequence[str], attempt: Attempt, timer: WaitTimer
    ) -> None:
        """Raise if a worker has not started in time; report progress."""
        missing = [address for rank, address in enumerate(members) if rank not in attempt.done]
        limit = self.patience.start
        if timer.seconds() > limit and missing:
            self.check_paused(missing)
            raise EngineError(
                f"{len(missing)} of {len(members)} workers did not start their part of the "
                f"ring within {limit:g} s ({', '.join(missing)}); a ring needs all its workers at "
                'once: free them from other work, name free ones, or use executor="tasks"'
            )
        on_done(sum(attempt.done.values()))
