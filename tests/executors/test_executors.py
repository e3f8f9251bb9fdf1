"""One plan, several executors, the same bits; errors; which executor, and of which cluster."""

import re
import socket
import threading
from types import SimpleNamespace

import dask
import numpy as np
import pytest
from distributed import LocalCluster

import daskfactor as dfac
from daskfactor import as_blocks, executors
from daskfactor.data.grid import Block, Cyclic, Grid, NestedReshuffled, Reshuffled
from daskfactor.errors import EngineError, OptionError, SamplingWarning
from daskfactor.executors import SerialExecutor, TasksExecutor, ThreadsExecutor, connection
from daskfactor.executors.connection import check_versions, client_of, connect
from daskfactor.executors.state import make_state
from daskfactor.executors.tasks import group_rounds
from daskfactor.progress import NOTE_WIDTH
from tests.executors.mixer import HoardingMixer, Mixer, begin, bits, plan_of, run
from tests.refusals import refused

EXECUTORS = {
    "serial": SerialExecutor,
    "threads-2": lambda: ThreadsExecutor(2),
    "threads-5": lambda: ThreadsExecutor(5),
    "tasks-threads": lambda: TasksExecutor("threads", 3),
    "tasks-synchronous": lambda: TasksExecutor("synchronous"),
}


@pytest.mark.parametrize("name", [*EXECUTORS][1:])
@pytest.mark.parametrize(
    ("factors", "blocks", "schedule"),
    [(2, 1, Reshuffled()), (2, 6, NestedReshuffled(3)), (3, 3, Reshuffled()), (4, 2, Reshuffled())],
)
def test_every_executor_leaves_the_oracles_bits(name, factors, blocks, schedule):
    """What may differ between executors is checked in `test_audit.py`, operation by operation."""
    executor = EXECUTORS[name]()
    given = blocks, schedule, HoardingMixer(), factors
    assert bits(run(executor, *given)) == bits(run(SerialExecutor(), *given))
    executor.close()


class Swapped(Mixer):
    """Takes one further factor for another."""

    def update(self, op, data, bands, *rest):
        super().update(op, data, (bands[0], *bands[:0:-1]), *rest)


def test_an_order_of_factors_or_of_rounds_shows_in_the_bits():
    usual = bits(run(SerialExecutor(), 2, Reshuffled(), factors=3))
    assert bits(run(SerialExecutor(), 2, Reshuffled(), Swapped(), factors=3)) != usual
    assert bits(run(SerialExecutor(), 2, Cyclic(), factors=3)) != usual
    assert bits(run(SerialExecutor(), 4, Cyclic())) != bits(run(SerialExecutor(), 4, Reshuffled()))


def test_a_nested_schedule_makes_one_task_per_super_block():
    plan = plan_of(NestedReshuffled(2), 6, 2, range(1))
    groups = group_rounds(plan)
    assert [len(group) for group in groups] == [2, 2]
    assert all(len(task.ops) == 9 for group in groups for task in group)


@pytest.mark.parametrize("name", EXECUTORS)
def test_an_error_names_the_block_and_the_executor_still_works_and_maps(name):
    executor = EXECUTORS[name]()
    with pytest.raises(EngineError, match=r"row band 1, column band 2.*cycle 1.*on purpose"):
        run(executor, 3, Reshuffled(), Mixer(fail_at=Block(1, 2)))
    with pytest.raises(EngineError, match=r"row band 1, column band 2, factor-2 band 0\)"):
        run(executor, 3, Reshuffled(), Mixer(fail_at=(1, 2, 0)), factors=3)
    again = run(executor, 3, Reshuffled())  # and the executor still works
    assert bits(again) == bits(run(SerialExecutor(), 3, Reshuffled()))
    seen, plan = [], plan_of(Cyclic(), 3, 2, range(2))
    executor.run(plan, Mixer(), begin(3), None, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 27  # evaluations of the second cycle, too
    assert executor.map(lambda item, work: item * item, range(20)) == [n * n for n in range(20)]
    executor.close()


def test_tasks_do_not_write_to_what_they_are_given():
    state = make_state(Grid.even((4, 4), 2), np.ones((4, 2)), np.ones((4, 2)))
    after = TasksExecutor().run(plan_of(Cyclic(), 2, 2, range(1)), Mixer(), state, None)
    assert np.all(state.gather("rows") == 1)
    assert np.all(after.gather("rows") != 1)


def test_an_interrupt_stops_the_lanes():
    """An exception in the watching thread ends the run and leaves no lane behind."""
    executor = ThreadsExecutor(2)
    before = threading.active_count()

    def interrupt(done):
        raise KeyboardInterrupt

    plan = plan_of(Cyclic(), 3, 2, range(2000))
    refused(KeyboardInterrupt, None, executor.run, plan, Mixer(), begin(3), None, interrupt)
    executor.close()
    assert threading.active_count() <= before


def test_executors_are_made_from_words_and_the_old_one_for_threads_still_works():
    assert dfac.LanesExecutor is ThreadsExecutor
    for word in ("threads", "lanes"):
        executor = executors.make_executor(word)
        assert isinstance(executor, ThreadsExecutor)
        assert executor.name == "threads"
        executor.close()
    words = r'"threads", "serial", "tasks", "ring" or .*got \'mpi\''
    refused(OptionError, words, executors.make_executor, "mpi")


def workers(adaptive=False):
    cluster = SimpleNamespace(_adaptive=object() if adaptive else None)
    return SimpleNamespace(nthreads=lambda: {"a": 2, "b": 2}, cluster=cluster)


@pytest.mark.parametrize(
    ("adaptive", "seconds", "name", "reason"),
    [
        (
            False,
            0.02,
            "ring",
            r"takes about 20 ms, too short for Dask tasks, so 2 workers pass bands",
        ),
        (False, 0.2, "ring", r"takes about 200 ms, "),
        (False, 2.0, "tasks", "takes about 2 s, long enough for Dask tasks"),
        (True, 0.5, "tasks", "the cluster grows and shrinks by itself; a block takes .* ms$"),
        (True, 0.01, "tasks", "although a ring on a fixed cluster is faster"),
    ],
)
def test_by_the_block_and_the_cluster(adaptive, seconds, name, reason, monkeypatch):
    block_seconds = executors.block_seconds
    monkeypatch.setattr(executors, "block_seconds", lambda data, width: seconds)
    data = SimpleNamespace(grid=SimpleNamespace(blocks=8))
    made = executors.choose_executor(workers(adaptive), data, 10)
    assert made.name == name
    assert re.search(reason, made.reason)
    assert len(f"{made.name}: {made.short}") <= NOTE_WIDTH  # else the progress bar cuts it off
    data.grid.blocks = 1
    made = executors.choose_executor(workers(adaptive), data, 10)
    assert (
        "only 1 of 2 workers are used, one per band of rows; pass blocks=4 to use all"
        in made.reason
    )
    V = np.random.default_rng(0).random((400, 200), dtype=np.float32)
    with as_blocks(V, 2) as data:  # the estimate grows with the work
        few, many = (block_seconds(data, width) for width in (10, 20))
        assert many == pytest.approx(2 * few)
        assert 1e-6 < few < 1e-2


def test_texts_that_name_no_cluster_and_two_clusters_at_a_time():
    for text in ("nowhere://1", "local:0", "local:x", "host", "", "tcp://host"):
        words = f"such as tcp://host.* local:N.*{re.escape(text)}"
        refused(OptionError, words, client_of(None, text).__enter__)
    words = "leave one of them out"
    refused(OptionError, words, client_of("tcp://host:8786", "local:2").__enter__)


@pytest.mark.parametrize("mute", [True, False])
def test_an_address_where_nobody_answers_or_without_certificates(mute, monkeypatch):
    monkeypatch.setattr(connection, "ANSWERS_WITHIN", 0.5)
    with socket.socket() as taken:  # a peer that listens and says nothing, or nobody at all
        taken.bind(("127.0.0.1", 0))
        if mute:
            taken.listen()
        words, port = r"no Dask scheduler answers at tcp://.* 0\.5 s", taken.getsockname()[1]
        refused(OptionError, words, connect, f"tcp://127.0.0.1:{port}")
    assert dask.config.get("scheduler", None) is None
    refused(OptionError, r"distributed\.comm\.tls", connect, "tls://127.0.0.1:1")


def versions_told(**versions):
    usual = {"daskfactor": "0.2.0", "python": "3.11.7.final.0", "numpy": "2.0.0", "numba": "0.60.0"}
    usual |= {"dask": "1", "distributed": "1"}
    own, other = ({"packages": each} for each in (usual, usual | versions))
    return {"client": own, "workers": {"tcp://a:1": own, "tcp://b:1": other}}


@pytest.mark.parametrize(
    ("versions", "sentence"),
    [
        ({"daskfactor": None}, "daskfactor is 0.2.0 here and missing on the worker tcp://b:1"),
        ({"daskfactor": "0.1.0"}, "daskfactor is 0.2.0 here and 0.1.0 on the worker"),
        ({"python": "3.12.1.final.0"}, "python is 3.11 here and 3.12 on the worker"),
    ],
)
def test_workers_that_cannot_do_the_work(versions, sentence):
    refused(OptionError, sentence, check_versions, versions_told(**versions))


def test_workers_that_may_do_it_otherwise():
    check_versions(versions_told(python="3.11.9.final.0"))
    with pytest.warns(SamplingWarning, match="numpy is 2.0.0 here and 2.1.0 on the worker") as seen:
        check_versions(versions_told(numpy="2.1.0", numba="0.61.0"))
    assert len(seen) == 1


@pytest.mark.cluster
def test_a_cluster_that_is_there_and_one_for_the_time_of_the_run():
    quiet = {"n_workers": 1, "processes": False, "dashboard_address": ":0", "protocol": "tcp"}
    with LocalCluster(**quiet) as own, client_of(own.scheduler_address, None) as client:
        assert client.submit(int, 3).result() == 3
    with client_of(None, "local:2") as client:
        assert len(client.nthreads()) == 2
        where = client.cluster.scheduler_address
    assert client.status == "closed"
    assert where
