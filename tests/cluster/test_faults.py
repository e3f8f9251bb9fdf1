"""Workers killed, lost, restarted and added: the same bits, and one segment at most for each."""

import dataclasses
import os
import random
import signal
import threading
import time
from functools import partial
from itertools import product

import dask
import pytest

from daskfactor.data.grid import Block
from daskfactor.errors import EngineError
from daskfactor.executors.cluster import Patience, is_adaptive
from daskfactor.runs import files
from daskfactor.runs.repository import RepositoryBackend
from tests.cluster.faults import EXECUTORS, FAULTS, large, small, strike_run
from tests.cluster.programs import GATES, Gated, Killer, Slow, chain, kill_one, oracle, wait_at_gate
from tests.cluster.support import IMPATIENT, SHORT, bare_worker, beside, cluster, executing, named
from tests.executors.mixer import bits
from tests.object_store import BUCKET
from tests.refusals import refused
from tests.tiers import FULL, tiered

pytestmark = pytest.mark.cluster

KILLS = 6 if FULL else 3
"""Workers that a long run loses; each takes about a second."""


QUICK = {("stopped", "ring", "local")}
"""Of `tests.cluster.faults`, what the quick tier runs; the tests above have the other faults."""
MATRIX = tiered(
    product((name for name, own in FAULTS.items() if own.strike), EXECUTORS, ["local", "s3"]),
    lambda case: case in QUICK,
)


@pytest.mark.quick("ring")
@named
def test_a_killed_worker_costs_one_segment_and_of_tasks_none_or_one(name, client, tmp_path):
    """Dask may compute again what it held."""
    program = Killer(str(tmp_path), frozenset({(5, 2, 1)}))
    with executing(client, name) as executor:
        assert bits(chain(executor, program)) == bits(oracle())
        assert executor.report.lost_segments in ([1] if name == "ring" else [0, 1])


@pytest.mark.quick("tasks")
@named
def test_remaining_workers_go_on_without_the_killed_one_and_one_that_joins_is_used(name, tmp_path):
    program = Killer(str(tmp_path), frozenset({(5, 2, 1)}))
    with cluster(0, processes=True) as client, bare_worker(client), bare_worker(client):
        client.wait_for_workers(2, timeout=60)
        with executing(client, name) as executor:
            assert bits(chain(executor, program)) == bits(oracle())
            assert executor.report.lost_segments <= 1
            assert executor.report.workers == 1
        join = partial(client.wait_for_workers, 2, timeout=60)
        with executing(client, name) as executor, bare_worker(client):
            assert bits(chain(executor, before=[lambda: None, join])) == bits(oracle())
            assert executor.report.workers == 2
            assert executor.report.lost_segments == 0


@pytest.mark.full
@named
def test_workers_that_go_politely(name):
    """Retired within a segment, as spot instances are that get a notice, and between two."""
    with cluster(3, processes=True) as client, executing(client, name) as executor:
        first, second, _ = sorted(client.nthreads())
        told = threading.Event()

        def retire(done):
            if done and not told.is_set():
                told.set()
                threading.Thread(target=client.retire_workers, args=([first],)).start()

        before = [lambda: None] * 2 + [lambda: client.retire_workers([second])]
        state = chain(executor, Slow(0.01), cycles=12, on_done=retire, before=before)
        assert bits(state) == bits(oracle(cycles=12))
        assert executor.report.lost_segments <= 1
        assert not {first, second} & set(client.nthreads())


@pytest.mark.quick("ring")
@named
def test_a_cluster_that_grows_and_shrinks_by_itself(name):
    """From no worker at all; it shrinks between segments, when nothing is to do."""
    with cluster(0, processes=True) as client:
        client.cluster.adapt(minimum=0, maximum=2, interval="100ms", wait_count=3)

        def idle():
            until = time.monotonic() + 30
            while client.nthreads() and time.monotonic() < until:
                time.sleep(0.1)

        options = {"cycles": 6, "segments": 2}
        with executing(client, name) as executor:
            state = chain(executor, Slow(0.01), before=[lambda: None, idle], **options)
            assert bits(state) == bits(oracle(**options))


@pytest.mark.parametrize("how", ["adapts", "retires"])
def test_a_cluster_that_is_reached_by_its_address_is_known_to_be_adaptive(how):
    """Retired workers are all that a scheduler knows of a cluster of another process."""
    with cluster(2, processes=False) as client, beside(client) as other:
        assert not is_adaptive(client)
        assert not is_adaptive(other)
        if how == "adapts":
            client.cluster.adapt(minimum=2, maximum=2)
            assert is_adaptive(client)
        else:
            client.retire_workers([next(iter(client.nthreads()))])
        assert is_adaptive(other)


@pytest.mark.full
def test_many_kills_in_one_run(tmp_path):
    """Operations at random kill their own worker; nannies start new ones meanwhile."""
    rng = random.Random(7)
    spots, options = set(), {"segments": 6, "cycles": 4}
    while len(spots) < KILLS:
        spots.add((rng.randrange(24), rng.randrange(4), rng.randrange(4)))
    program, patience = Killer(str(tmp_path), frozenset(spots)), Patience(losses=KILLS)
    with cluster(3, processes=True) as client, executing(client, patience=patience) as executor:
        assert bits(chain(executor, program, **options)) == bits(oracle(**options))
        assert len(list(tmp_path.iterdir())) == KILLS
        # Two of them may strike during the same attempt.
        assert executor.report.lost_segments <= KILLS


@pytest.mark.full
def test_kills_from_outside_at_moments_of_their_own(tmp_path):
    """At the start of a segment, on progress, and between segments."""
    with cluster(2, processes=True) as client, executing(client) as executor:
        kills, armed = [], threading.Event()

        def strike(done):
            if armed.is_set():
                armed.clear()
                kills.append(done)
                kill_one(client, len(kills) % 2)

        def between():
            kills.append(None)
            kill_one(client)

        options = {"segments": 5, "cycles": 100}
        before = [armed.set, between, armed.set, between]
        state = chain(executor, on_done=strike, before=before, **options)
        assert bits(state) == bits(oracle(**options))
        assert executor.report.lost_segments <= len(kills)


def test_a_map_is_run_again_when_its_worker_dies(client, tmp_path):
    def fatal(item, work):
        spot = tmp_path / str(item)
        if item == 3 and not spot.exists():
            spot.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return item * item

    with executing(client) as executor:
        assert executor.map(fatal, range(6)) == [n * n for n in range(6)]


@pytest.mark.quick("tasks")
@named
def test_a_segment_that_is_always_lost_ends_with_a_clear_error(name):
    class Fatal:
        def update(self, op, *_):
            os.kill(os.getpid(), signal.SIGKILL)

    words, patience = r"lost 2 times in a row|no worker was there", Patience(losses=1, workers=1.0)
    with cluster(0, processes=True) as client, bare_worker(client), bare_worker(client):
        client.wait_for_workers(2, timeout=60)
        with executing(client, name, patience) as executor:
            refused(EngineError, words, chain, executor, Fatal())


@named
def test_a_client_that_lost_its_scheduler_says_so(name):
    words = r"the client has lost its scheduler"
    with cluster(2, False) as client, beside(client) as own, executing(own, name) as executor:
        refused(EngineError, words, chain, executor, on_done=lambda done: own.close())


@pytest.mark.quick("block-ring", "block-tasks", "share of a pass-ring")
@named
@pytest.mark.parametrize("what", ["block", "share of a pass"])
def test_work_that_never_ends_is_given_up(name, what):
    GATES["never"] = threading.Event()
    impatient = dataclasses.replace(IMPATIENT, stall=0.5)
    with cluster(1, processes=False) as client, executing(client, name, impatient) as executor:
        work = partial(chain, executor, Gated("never", Block(0, 0)))
        if what != "block":
            work = partial(executor.map, wait_at_gate, ["never"] * 2)
        try:
            refused(EngineError, rf"no {what}.* was finished anywhere for 0\.5 s", work)
        finally:
            GATES["never"].set()


@pytest.mark.quick("block-ring", "block-tasks", "pass-tasks")
@named
@pytest.mark.parametrize("what", ["block", "pass"])
def test_workers_that_are_paused_for_want_of_memory_are_named(name, what):
    limited = {"memory": "1 GB", "config": {"distributed.worker.memory.pause": 1e-6}}
    impatient = dataclasses.replace(IMPATIENT, start=1.0)
    with cluster(1, False, **limited) as client, executing(client, name, impatient) as executor:
        (address,) = client.nthreads()
        work = partial(chain, executor) if what == "block" else partial(executor.map, add, [1, 2])
        until = time.monotonic() + 30
        while statuses(client) != ["paused"] and time.monotonic() < until:
            time.sleep(0.05)
        refused(EngineError, rf"paused .* for 1 s: {address} \(.* of .*\); give", work)


def statuses(client):
    known = client.scheduler_info()["workers"]
    return [own["status"] for own in known.values()]


def add(item, workspace):
    return item + 1


@pytest.fixture
def every_segment_is_saved(monkeypatch):
    monkeypatch.setattr(RepositoryBackend, "checkpoint_interval", 1e-9)
    monkeypatch.setattr(files, "MAX_COST_SHARE", 1e9)


@pytest.mark.usefixtures("every_segment_is_saved")
@pytest.mark.parametrize(("fault", "executor", "store"), MATRIX)
def test_the_same_bits_or_a_sentence_and_a_resume_with_them(
    fault, executor, store, tmp_path, request
):
    if store == "s3":
        pytest.importorskip("icechunk", reason="runs at URLs need the extra cloud")
        request.getfixturevalue("s3")
    place = str(tmp_path) if store == "local" else f"s3://{BUCKET}/{fault}-{executor}"
    # One that is stopped for less than Dask's five seconds is waited for.
    seconds, times = 3.0 if fault == "stopped" else 8.0, KILLS if fault == "kills" else 1
    patience = dataclasses.replace(IMPATIENT, workers=10.0)
    with dask.config.set(SHORT):
        found = strike_run(fault, executor, small(), place, patience, seconds, times)
    assert found.struck
    assert found.same, found
    assert bool(found.sentence) == (fault in ("gone", "scheduler"))
    if fault == "overdue":
        assert found.losses


@pytest.mark.full
@pytest.mark.usefixtures("every_segment_is_saved")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", [name for name, told in FAULTS.items() if told.limited])
@named
def test_factors_that_outgrow_the_memory_of_workers(name, fault, tmp_path):
    found = strike_run(fault, name, large(), str(tmp_path), Patience(), memory="500MB")
    assert found.same, found
