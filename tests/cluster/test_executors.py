"""Ring and tasks on a cluster leave the oracle's bits; errors come back as they are."""

import os
import re
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import dask
import numpy as np
import pytest
from dask.sizeof import sizeof
from distributed import Client, Event, LocalCluster
from distributed.security import Security

from daskfactor.data.grid import Block, Cyclic, Grid, NestedReshuffled, Proportional, Reshuffled
from daskfactor.data.sources import as_blocks
from daskfactor.errors import EngineError, OptionError, StoreError
from daskfactor.executors import choose_executor, make_executor
from daskfactor.executors import cluster as executors_of_clusters
from daskfactor.executors.cluster import ClusterTasksExecutor, Patience
from daskfactor.executors.plan import Action, CycleOptions, Op
from daskfactor.executors.ring import RingExecutor
from daskfactor.executors.segment import PLUGIN, BandMessage, SegmentRun, SegmentTask
from daskfactor.executors.state import FactorBand, Portion, make_state
from tests.cluster.programs import GATES, BrokenData, Gated, Holding, Reading, Slow, chain, oracle
from tests.cluster.support import EXECUTORS, cluster, executing, named
from tests.executors.mixer import Mixer, bits
from tests.refusals import refused
from tests.tiers import tiered

pytestmark = pytest.mark.cluster

SCHEDULES = [Reshuffled(), Cyclic(), Proportional(), NestedReshuffled(2)]
SHAPES = [
    *({"schedule": own, "blocks": blocks} for own in SCHEDULES for blocks in (2, 4, 8)),
    *({"factors": n, "blocks": blocks, "segments": 2} for n, blocks in ((3, 2), (3, 4), (4, 3))),
]


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("shape", tiered(SHAPES, lambda own: own["blocks"] == 4), ids=str)
def test_the_oracles_bits(executor, shape, held):
    state = chain(Holding(executor) if held else executor, cycles=2, **shape)
    assert bits(state.local()) == bits(oracle(cycles=2, **shape))
    assert executor.report.lost_segments == 0


def test_bands_of_every_factor_are_handed_on_alone(here, monkeypatch):
    monkeypatch.setattr(executors_of_clusters, "SPLIT_BYTES", 0)
    options = {"factors": 3, "blocks": 3, "cycles": 2, "segments": 1}
    with executing(here, "tasks") as executor:
        assert bits(chain(executor, **options)) == bits(oracle(**options))


@pytest.mark.parametrize(("factors", "blocks"), [(2, 5), (3, 3)])
@named
def test_the_oracles_bits_from_other_processes(name, factors, blocks, client):
    """Also where bands stay in the workers."""
    options = {"factors": factors, "blocks": blocks, "cycles": 2}
    expected = oracle(**options)
    with executing(client, name) as executor:
        assert bits(chain(executor, **options)) == bits(expected)
        assert executor.report.workers == 2
        assert 0 < executor.report.utilisation <= 1
        after = chain(Holding(executor), **options)
        assert bits(after.local()) == bits(expected)
        assert after._sources_by_name("0").keys() == expected._sources_by_name("0").keys()
        for side in ("rows", "columns", *range(2, factors)):
            assert after.gather(side).tobytes() == expected.gather(side).tobytes()
            found, wanted = (each.gather_draws(side, slice(2, 5)) for each in (after, expected))
            assert found.tobytes() == wanted.tobytes()
        assert after.recorded == expected.recorded == 6


def test_a_ring_gives_fewer_bands_to_a_straggler(client):
    """Four of eight bands at half speed: busy for 1 and 1/2; three of them: for 6/6 and 5/6."""
    pids = client.run(os.getpid)
    slow = max(pids, key=lambda address: pids[address])
    options = {"blocks": 8, "cycles": 1, "segments": 4}
    with executing(client) as executor:
        assert bits(chain(executor, Slow(0.01, pids[slow]), **options)) == bits(oracle(**options))
        shares, _ = executor.shares(8)
        assert shares[slow] < 4
        assert executor.report.balance > 0.85


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.full)])
def test_bands_of_every_size_between_processes(threads, client):
    """Small ones go inside a message, large ones beside it."""
    made = nullcontext(client) if threads == 1 else cluster(2, True, threads)
    with made as own, executing(own) as executor:
        for width in (3, 3000):
            options = {"blocks": 4, "cycles": 3, "segments": 1, "width": width}
            assert bits(chain(executor, **options)) == bits(oracle(**options))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full), 4])
def test_any_number_of_workers(workers):
    options = {"cycles": 2, "segments": 2}
    with cluster(workers, processes=False) as client:
        for name in EXECUTORS:
            with executing(client, name) as executor:
                assert bits(chain(executor, **options)) == bits(oracle(**options))


def test_only_the_workers_that_were_named(here):
    with executing(here, workers=sorted(here.nthreads())[:2]) as executor:
        assert bits(chain(executor)) == bits(oracle())
        assert executor.report.workers == 2


def test_a_large_state_travels_without_a_warning(executor):
    """Warnings are errors here; Dask warns of graphs above 10 MB."""
    wide = {"width": 600_000, "segments": 1, "cycles": 1, "blocks": 2}
    with dask.config.set({"distributed.comm.timeouts.connect": "30s"}):
        assert bits(chain(executor, **wide)) == bits(oracle(**wide))


def test_an_error_names_its_block_and_leaves_the_state_and_the_workers_as_they_were(executor):
    seen = []

    class Spy:
        def run(self, plan, program, state, data, on_done):
            seen[:] = state.copy(), state
            return executor.run(plan, program, state, data, on_done)

    words = r"row band 1, column band 2.*cycle 1.*on purpose"
    refused(EngineError, words, chain, Spy(), Mixer(fail_at=Block(1, 2)))
    for side in ("rows", "columns"):
        before, after = (state.gather(side).tobytes() for state in seen)
        assert before == after
    assert bits(chain(executor)) == bits(oracle())
    assert executor.report.lost_segments == 0


def test_a_block_that_cannot_be_read_is_named(executor):
    with pytest.raises(StoreError, match=r"chunk 3\.1 cannot be decoded") as caught:
        chain(executor, Reading(), data=BrokenData(Block(3, 1)))
    assert "row band 3, column band 1" in "".join(caught.value.__notes__)


def test_progress_never_goes_back_and_ends_with_all(executor):
    seen = []
    chain(executor, segments=1, on_done=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 4 * 16 + 2 * 16


def test_a_slow_block_is_waited_for(executor):
    """The gate opens when others have told of progress, while this block holds them all up."""
    GATES["slow"] = gate = threading.Event()
    state = chain(executor, Gated("slow", Block(1, 2)), on_done=lambda done: gate.set())
    assert bits(state) == bits(oracle())
    assert executor.report.lost_segments == 0


def test_an_interrupt_frees_the_workers(executor):
    GATES["interrupt"] = gate = threading.Event()

    def interrupt(done):
        gate.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chain(executor, Gated("interrupt", Block(1, 2)), on_done=interrupt)
    assert bits(chain(executor)) == bits(oracle())


def test_an_interrupt_stops_workers_that_wait_for_each_other(here):
    """One may be held up inside its block; the others end at once."""
    GATES["held"] = gate = threading.Event()

    def interrupt(done):
        raise KeyboardInterrupt

    def running(dask_worker):
        return len(dask_worker.plugins[PLUGIN]._segments)

    with executing(here) as executor:
        try:
            held = Gated("held", Block(1, 2))
            refused(KeyboardInterrupt, None, chain, executor, held, blocks=6, on_done=interrupt)
            until = time.monotonic() + 10
            while sum(here.run(running).values()) > 1:
                assert time.monotonic() < until, "workers go on waiting"
        finally:
            gate.set()
        assert bits(chain(executor)) == bits(oracle())


def test_a_task_given_up_before_it_opened_its_box_does_not_wait(here):
    def open_late(dask_worker):
        plugin, reasons = dask_worker.plugins[PLUGIN], []
        task = SimpleNamespace(run_id="run")
        segment = SimpleNamespace(task=task, dask_key="early", abort=reasons.append)
        plugin.open(segment)  # Dask has no task of this key
        plugin.close(segment)
        return str(*reasons)

    with executing(here) as executor:
        chain(executor, segments=1)  # registers the plugin
        assert set(here.run(open_late).values()) == {"the client has given this attempt up"}


@pytest.mark.parametrize("large", [False, True])
def test_messages_wait_with_their_sender_for_an_attempt_and_go_in_order(client, large):
    """They are refused before it is open and once it is over; arrays come writable and whole."""

    def receiver(dask_worker):
        plugin = dask_worker.plugins[PLUGIN]
        plugin.arrived, task = [], SimpleNamespace(run_id="run")
        segment = SimpleNamespace(task=task, dask_key="", receive=plugin.arrived.append)
        segment.abort = lambda reason: None
        plugin.close(segment)
        plugin.late_open = lambda: plugin.open(segment)

    def send(to, sizes, dask_worker):
        plugin = dask_worker.plugins[PLUGIN]
        ops = {0: [(0, 0, 0, 0, 1.0, True, None)]}
        ends = (0, 1), (dask_worker.address, to)
        segment = SegmentRun(SegmentTask("run", 0, 1, *ends, 9.0, None, (), ops=ops), plugin)
        plugin._is_running = lambda segment: True
        for number, size in enumerate(sizes):
            band = FactorBand(number, np.full((size, 2), number, np.float32))
            plugin.send(segment, to, BandMessage.from_band((1, number), 0, band))
        plugin.sender = segment

    def left(dask_worker):
        segment = dask_worker.plugins[PLUGIN].sender
        return len(segment.unsent), str(segment.scheduler.failure)

    def arrived(dask_worker):
        found = dask_worker.plugins[PLUGIN].arrived
        whole = all((m.band.values == m.at[1]).all() for m in found)
        return [(m.at[1], len(m.band.values)) for m in found], whole

    with executing(client) as executor:
        chain(executor, segments=1)  # registers the plugin
    here, there = sorted(client.nthreads())
    sizes = [100_000 if large else 10] * 5 + [3]
    client.run(receiver, workers=[there])
    client.run(send, there, sizes, workers=[here])
    assert client.run(left, workers=[here])[here] == (1, "None")
    assert client.run(arrived, workers=[there])[there] == ([], True)
    client.run(lambda dask_worker: dask_worker.plugins[PLUGIN].late_open(), workers=[there])
    until = time.monotonic() + 30
    while client.run(left, workers=[here])[here] != (0, "None"):
        assert time.monotonic() < until, "messages were not sent"
        time.sleep(0.02)
    assert client.run(arrived, workers=[there])[there] == (list(enumerate(sizes)), True)
    client.run(send, "tcp://127.0.0.1:1", sizes, workers=[here])
    while "cannot be reached" not in client.run(left, workers=[here])[here][1]:
        assert time.monotonic() < until, "nobody was told"
        time.sleep(0.02)
    client.run(
        lambda dask_worker: delattr(dask_worker.plugins[PLUGIN], "_is_running"), workers=[here]
    )


def test_a_ring_says_so_when_workers_are_busy(here):
    busy, release = Event("busy", client=here), Event("release", client=here)

    def occupy(address):
        Event("busy").set()
        Event("release").wait(60)

    address = sorted(here.nthreads())[0]
    others = [here.submit(occupy, f"{address}{n}", workers=[address], pure=False) for n in range(2)]
    with executing(here, patience=Patience(start=2.0)) as executor:
        try:
            assert busy.wait(20)
            words = r"1 of 3 workers did not start.*within 2 s"
            refused(EngineError, words, chain, executor, blocks=6)
        finally:
            release.set()
            for future in others:
                future.result(30)
        assert bits(chain(executor)) == bits(oracle())


def test_an_address_without_a_worker_does_not_hang(here):
    nowhere = {"workers": ["tcp://127.0.0.1:1"], "patience": Patience(workers=0.5)}
    for name in EXECUTORS:
        began = time.monotonic()
        with executing(here, name, **nowhere) as executor:
            refused(EngineError, r"no worker was there within 0\.5 s", chain, executor)
            with pytest.raises(EngineError, match=r"no worker was there"):
                executor.map(lambda item, work: item, range(3))
        assert time.monotonic() - began < 20


def test_map_keeps_the_order_of_its_items_and_brings_errors_back(executor):
    assert executor.map(lambda item, work: item * item, range(20)) == [n * n for n in range(20)]
    assert executor.map(lambda item, work: item, []) == []

    def fail(item, work):
        raise StoreError(f"item {item} cannot be read; look for it")

    refused(StoreError, r"item \d cannot be read", executor.map, fail, range(5))
    refused(EngineError, r"ZeroDivisionError", executor.map, lambda item, work: 1 // 0, range(5))


def test_an_item_does_not_wait_for_the_one_before_it(executor):
    """Each is a task, so that a thread does not do two dear ones while others have none."""
    GATES["second"] = threading.Event()

    def meet(item, work):
        from tests.cluster.programs import GATES as gates

        if item == 1:
            gates["second"].set()
        return gates["second"].wait(20)

    assert executor.map(meet, range(12)) == [True] * 12


def test_map_carries_data_and_state_along(executor):
    """What the passes over the data do: a closure over blocked data and a factor."""
    V = np.random.default_rng(0).random((40, 30), dtype=np.float32)
    with as_blocks(V, 3) as data:
        factor = np.arange(30.0)

        def row_sum(row, work):
            return sum(
                float(data.view(row, col).block.sum()) + factor[col]
                for col in range(data.grid.blocks)
            )

        expected = [row_sum(row, None) for row in range(3)]
        assert executor.map(row_sum, range(3)) == expected
        assert executor.map(row_sum, range(3)) == expected  # from the reader that is open now


def test_which_executors_take_a_client_and_what_is_none(here):
    words = r"must be a dask.distributed Client, got 'tcp://here'"
    refused(OptionError, words, make_executor, "ring", "tcp://here")
    refused(OptionError, r"pass client=Client\(\.\.\.\)", make_executor, "ring")
    assert isinstance(make_executor("ring", here), RingExecutor)
    assert isinstance(make_executor("tasks", here), ClusterTasksExecutor)
    refused(OptionError, r"executor='threads' runs in this process", make_executor, "threads", here)


def test_a_block_is_timed_on_a_worker_and_a_ring_is_chosen(client):
    rng = np.random.default_rng(0)
    state = make_state(Grid.even((6, 6), 2), rng.random((6, 2)), rng.random((6, 2)))
    op = Op(Action.UPDATE, Block(1, 0), 0, 0, 1.0, False, CycleOptions())
    before = state.gather("rows").tobytes()
    data = SimpleNamespace(grid=SimpleNamespace(blocks=8))
    made = choose_executor(client, data, 2, (Mixer(), op, state, None))
    assert made.name == "ring"
    assert re.match(r"a block takes 0?\.\d+ ms, .* 2 workers pass bands", made.reason)
    assert state.gather("rows").tobytes() == before


def test_workers_know_how_large_our_objects_are(client):
    """Dask measures a plain object at some fifty bytes, and spills too late."""
    band = FactorBand(0, np.zeros((1000, 10)), {"metric": np.zeros((1000, 10))})
    assert sizeof(band) >= 160_000
    assert sizeof(Portion({(0, 0): band, (1, 0): band})) >= 320_000

    def there(dask_worker):
        from dask.sizeof import sizeof as size_there  # the worker's own, with what it registered

        return int(size_there(band))

    with executing(client, "tasks") as executor:
        chain(executor, segments=1)
        assert min(client.run(there).values()) >= 160_000


def test_an_asynchronous_client_is_refused(here):
    address = here.scheduler.address

    async def make():
        async with Client(address, asynchronous=True, set_as_default=False) as client:
            refused(OptionError, "asynchronous=True", RingExecutor, client)

    here.sync(make)


def test_an_encrypted_cluster():
    """Bands go through the cluster's own connections, so its security holds for them."""
    pytest.importorskip("cryptography")
    own = {"protocol": "tls", "security": Security.temporary(), "dashboard_address": ":0"}
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, **own) as made,
        Client(made, security=own["security"], set_as_default=False) as client,
        executing(client) as executor,
    ):
        assert all(address.startswith("tls://") for address in client.nthreads())
        assert bits(chain(executor)) == bits(oracle())
