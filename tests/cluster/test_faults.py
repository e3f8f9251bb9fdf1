"""Workers killed, lost, restarted and added: the same bits, and one segment at most for each."""

import dataclasses
import os
import random
import signal
import threading
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client

from daskfactor.data.grid import Block
from daskfactor.errors import EngineError
from daskfactor.executors.cluster import ClusterTasksExecutor, Patience, is_adaptive
from daskfactor.executors.ring import RingExecutor
from tests.cluster.faults import FAULTS, STORES, Bench, frequent_checkpoints, large, small
from tests.cluster.support import (
    EXECUTORS,
    GATES,
    IMPATIENT,
    SHORT,
    Gated,
    Killer,
    Slow,
    bare_worker,
    chain,
    cluster,
    named,
    oracle,
    wait_at_gate,
)
from tests.executors.mixer import bits
from tests.object_store import BUCKET
from tests.refusals import refused
from tests.tiers import FULL, tiered

pytestmark = pytest.mark.cluster

KILLS = 6 if FULL else 3
"""Workers that a long run loses; each takes about a second."""


QUICK = {("overdue", "ring", "local"), ("overdue", "tasks", "s3")}
"""Of `tests.cluster.faults`, what the quick tier runs; the tests above have the other faults."""
MATRIX = tiered(
    product((name for name, own in FAULTS.items() if own.strike), EXECUTORS, STORES),
    lambda case: case in QUICK,
)


def kill_one(client: Client, which: int = 0) -> None:
    """SIGKILL a worker process, whatever it is doing."""
    pids: dict[str, int] = {}
    while not pids:  # one that is dying is listed for a while, but does not answer
        client.wait_for_workers(1, timeout=60)
        pids = client.run(os.getpid, on_error="ignore")
    os.kill(pids[sorted(pids)[which % len(pids)]], signal.SIGKILL)


def test_a_killed_worker_costs_the_ring_one_segment(tmp_path: Path) -> None:
    with cluster(2, processes=True) as client:
        executor = RingExecutor(client, patience=IMPATIENT)
        program = Killer(str(tmp_path), frozenset({(5, 2, 1)}))
        assert bits(chain(executor, program)) == bits(oracle())
        assert executor.report.lost_segments == 1
        executor.close()


def test_dask_computes_again_what_a_killed_worker_held(tmp_path: Path) -> None:
    with cluster(2, processes=True) as client:
        executor = ClusterTasksExecutor(client, patience=IMPATIENT)
        program = Killer(str(tmp_path), frozenset({(5, 2, 1)}))
        assert bits(chain(executor, program)) == bits(oracle())
        assert executor.report.lost_segments <= 1
        executor.close()


@named
def test_remaining_workers_go_on_without_the_killed_one(name: str, tmp_path: Path) -> None:
    with cluster(0, processes=True) as client, bare_worker(client), bare_worker(client):
        client.wait_for_workers(2, timeout=60)
        executor = EXECUTORS[name](client, patience=IMPATIENT)
        program = Killer(str(tmp_path), frozenset({(5, 2, 1)}))
        assert bits(chain(executor, program)) == bits(oracle())
        assert executor.report.lost_segments <= 1
        assert executor.report.workers == 1
        executor.close()


@named
def test_a_worker_that_joins_is_used_and_changes_nothing(name: str) -> None:
    with cluster(0, processes=True) as client, bare_worker(client) as first:
        client.wait_for_workers(1, timeout=60)
        executor = EXECUTORS[name](client, patience=IMPATIENT)
        counts = []

        def join() -> None:
            counts.append(executor.report.workers)
            client.wait_for_workers(2, timeout=60)

        with bare_worker(client):
            assert bits(chain(executor, before=[lambda: None, join])) == bits(oracle())
            counts.append(executor.report.workers)
        assert counts[-1] == 2
        assert executor.report.lost_segments == 0
        assert first.poll() is None
        executor.close()


@named
def test_workers_that_go_politely(name: str) -> None:
    """Retired within a segment, as spot instances are that get a notice, and between two."""
    with cluster(3, processes=True) as client:
        executor = EXECUTORS[name](client, patience=IMPATIENT)
        first, second, _ = sorted(client.nthreads())
        told = threading.Event()

        def retire(done: int) -> None:
            if done and not told.is_set():
                told.set()
                threading.Thread(target=client.retire_workers, args=([first],)).start()

        state = chain(
            executor,
            Slow(0.01),
            cycles=12,
            on_done=retire,
            before=[lambda: None] * 2 + [lambda: client.retire_workers([second])],
        )
        assert bits(state) == bits(oracle(cycles=12))
        assert executor.report.lost_segments <= 1
        assert first not in client.nthreads()
        assert second not in client.nthreads()
        executor.close()


@named
def test_a_cluster_that_grows_and_shrinks_by_itself(name: str) -> None:
    """From no worker at all; it shrinks between segments, when nothing is to do."""
    with cluster(0, processes=True) as client:
        client.cluster.adapt(minimum=0, maximum=2, interval="100ms", wait_count=3)

        def idle() -> None:
            until = time.monotonic() + 30
            while client.nthreads() and time.monotonic() < until:
                time.sleep(0.1)

        executor = EXECUTORS[name](client, patience=IMPATIENT)
        options: dict[str, Any] = {"cycles": 6, "segments": 2}
        state = chain(executor, Slow(0.01), before=[lambda: None, idle], **options)
        assert bits(state) == bits(oracle(**options))
        executor.close()


def test_a_cluster_that_is_reached_by_its_address_is_known_to_be_adaptive() -> None:
    with (
        cluster(2, processes=False) as client,
        Client(client.scheduler.address, set_as_default=False) as other,
    ):
        assert not is_adaptive(client)
        assert not is_adaptive(other)
        client.cluster.adapt(minimum=2, maximum=2)
        assert is_adaptive(client)
        assert is_adaptive(other)


def test_a_cluster_whose_workers_were_retired_is_taken_for_adaptive() -> None:
    """All that a scheduler knows of a cluster that is an object of another process."""
    with (
        cluster(2, processes=False) as client,
        Client(client.scheduler.address, set_as_default=False) as other,
    ):
        client.retire_workers([next(iter(client.nthreads()))])
        assert is_adaptive(other)


def test_many_kills_in_one_run(tmp_path: Path) -> None:
    """Operations at random kill their own worker; nannies start new ones meanwhile."""
    rng = random.Random(7)
    spots: set[tuple[int, int, int]] = set()
    while len(spots) < KILLS:
        spots.add((rng.randrange(24), rng.randrange(4), rng.randrange(4)))
    with cluster(3, processes=True) as client:
        executor = RingExecutor(client, patience=Patience(losses=KILLS))
        program = Killer(str(tmp_path), frozenset(spots))
        options: dict[str, Any] = {"segments": 6, "cycles": 4}
        assert bits(chain(executor, program, **options)) == bits(oracle(**options))
        assert len(list(tmp_path.iterdir())) == KILLS
        # Two of them may strike during the same attempt.
        assert executor.report.lost_segments <= KILLS
        executor.close()


@pytest.mark.full
def test_kills_from_outside_at_moments_of_their_own(tmp_path: Path) -> None:
    """At the start of a segment, on progress, and between segments."""
    with cluster(2, processes=True) as client:
        executor = RingExecutor(client, patience=IMPATIENT)
        kills = 0
        armed = threading.Event()

        def arm() -> None:
            armed.set()

        def strike(done: int) -> None:
            nonlocal kills
            if armed.is_set():
                armed.clear()
                kills += 1
                kill_one(client, kills % 2)

        def between() -> None:
            nonlocal kills
            kills += 1
            kill_one(client)

        state = chain(
            executor, segments=5, cycles=100, on_done=strike, before=[arm, between, arm, between]
        )
        assert bits(state) == bits(oracle(segments=5, cycles=100))
        assert executor.report.lost_segments <= kills
        executor.close()


def test_a_map_is_run_again_when_its_worker_dies(tmp_path: Path) -> None:
    def fatal(item: int, work: Any) -> int:
        spot = tmp_path / str(item)
        if item == 3 and not spot.exists():
            spot.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return item * item

    with cluster(2, processes=True) as client:
        executor = RingExecutor(client, patience=IMPATIENT)
        assert executor.map(fatal, range(6)) == [n * n for n in range(6)]
        executor.close()


@named
def test_a_segment_that_is_always_lost_ends_with_a_clear_error(name: str, tmp_path: Path) -> None:
    class Fatal:
        def update(self, op: Any, *_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    with cluster(0, processes=True) as client, bare_worker(client), bare_worker(client):
        client.wait_for_workers(2, timeout=60)
        executor = EXECUTORS[name](client, patience=Patience(losses=1, workers=1.0))
        refused(EngineError, r"lost 2 times in a row|no worker was there", chain, executor, Fatal())
        executor.close()


@named
def test_a_client_that_lost_its_scheduler_says_so(name: str) -> None:
    with (
        cluster(2, processes=False) as client,
        Client(client.scheduler.address, set_as_default=False) as own,
    ):
        executor = EXECUTORS[name](own, patience=IMPATIENT)
        with pytest.raises(EngineError, match=r"the client has lost its scheduler"):
            chain(executor, on_done=lambda done: own.close())
        executor.close()


@named
@pytest.mark.parametrize("what", ["block", "share of a pass"])
def test_work_that_never_ends_is_given_up(name: str, what: str) -> None:
    GATES["never"] = threading.Event()
    impatient = dataclasses.replace(IMPATIENT, stall=0.5)
    with cluster(1, processes=False) as client:
        executor = EXECUTORS[name](client, patience=impatient)
        try:
            work = partial(chain, executor, Gated("never", Block(0, 0)))
            if what != "block":
                work = partial(executor.map, wait_at_gate, ["never"] * 2)
            refused(EngineError, rf"no {what}.* was finished anywhere for 0\.5 s", work)
        finally:
            GATES["never"].set()
            executor.close()


@named
@pytest.mark.parametrize("what", ["block", "pass"])
def test_workers_that_are_paused_for_want_of_memory_are_named(name: str, what: str) -> None:
    full = {"distributed.worker.memory.pause": 1e-6}
    impatient = dataclasses.replace(IMPATIENT, start=1.0)
    with cluster(1, processes=False, memory="1 GB", config=full) as client:
        executor = EXECUTORS[name](client, patience=impatient)
        (address,) = client.nthreads()
        work = partial(chain, executor) if what == "block" else partial(executor.map, add, [1, 2])
        until = time.monotonic() + 30
        while statuses(client) != ["paused"] and time.monotonic() < until:
            time.sleep(0.05)
        refused(EngineError, rf"paused .* for 1 s: {address} \(.* of .*\); give", work)
        executor.close()


def statuses(client: Client) -> list[str]:
    known = client.scheduler_info()["workers"]
    return [own["status"] for own in known.values()]


def add(item: int, workspace: Any) -> int:
    return item + 1


@pytest.mark.parametrize(("fault", "executor", "store"), MATRIX)
def test_the_same_bits_or_a_sentence_and_a_resume_with_them(
    fault: str, executor: str, store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if store == "s3":
        pytest.importorskip("icechunk", reason="runs at URLs need the extra cloud")
        request.getfixturevalue("s3")
    place = str(tmp_path) if store == "local" else f"s3://{BUCKET}/{fault}-{executor}"
    with dask.config.set(SHORT), frequent_checkpoints():
        bench = Bench(small(48), place, dataclasses.replace(IMPATIENT, workers=10.0), 8.0)
        found = bench.run(fault, executor, times=KILLS if fault == "kills" else 1)
    assert found.struck
    assert found.same, found
    assert bool(found.sentence) == (fault in ("gone", "scheduler"))
    if fault == "overdue":
        assert found.losses


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", [name for name, told in FAULTS.items() if told.limited])
@named
def test_factors_that_outgrow_the_memory_of_workers(name: str, fault: str, tmp_path: Path) -> None:
    with frequent_checkpoints():
        bench = Bench(large(), str(tmp_path), Patience(), 8.0)
        found = bench.run(fault, name, memory="500MB")
    assert found.same, found
