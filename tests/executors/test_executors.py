"""One plan, several executors, the same bits; errors that name their block."""

import threading

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.data.grid import Block, Cyclic, Grid, NestedReshuffled, Reshuffled
from daskfactor.errors import EngineError, OptionError
from daskfactor.executors import SerialExecutor, TasksExecutor, ThreadsExecutor, make_executor
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.executors.state import make_state
from daskfactor.executors.tasks import group_rounds
from tests.executors.mixer import HoardingMixer, Mixer, bits, run

EXECUTORS = {
    "threads-2": lambda: ThreadsExecutor(2),
    "threads-5": lambda: ThreadsExecutor(5),
    "tasks-threads": lambda: TasksExecutor("threads", 3),
    "tasks-synchronous": lambda: TasksExecutor("synchronous"),
}


@pytest.mark.parametrize("name", EXECUTORS)
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


def test_an_order_of_factors_or_of_rounds_shows_in_the_bits_of_tensors():
    usual = bits(run(SerialExecutor(), 2, Reshuffled(), factors=3))
    assert bits(run(SerialExecutor(), 2, Reshuffled(), Swapped(), factors=3)) != usual
    assert bits(run(SerialExecutor(), 2, Cyclic(), factors=3)) != usual


def test_a_different_order_gives_other_bits():
    """The comparison above can fail: the mixer notices another schedule."""
    assert bits(run(SerialExecutor(), 4, Cyclic())) != bits(run(SerialExecutor(), 4, Reshuffled()))


def test_a_nested_schedule_makes_one_task_per_super_block():
    plan = build_plan(
        NestedReshuffled(2),
        np.ones((6, 6), dtype=np.int64),
        range(1),
        lambda cycle: np.random.default_rng(0),
        lambda cycle: CycleOptions(),
    )
    groups = group_rounds(plan)
    assert [len(group) for group in groups] == [2, 2]
    assert all(len(task.ops) == 9 for group in groups for task in group)


@pytest.mark.parametrize("name", [*EXECUTORS, "serial"])
def test_an_error_names_the_block_and_reaches_the_caller(name):
    executor = SerialExecutor() if name == "serial" else EXECUTORS[name]()
    with pytest.raises(EngineError, match=r"row band 1, column band 2.*cycle 1.*on purpose"):
        run(executor, 3, Reshuffled(), Mixer(fail_at=Block(1, 2)))
    again = run(executor, 3, Reshuffled())  # and the executor still works
    assert bits(again) == bits(run(SerialExecutor(), 3, Reshuffled()))
    executor.close()


def test_an_error_names_the_bands_of_all_factors():
    with pytest.raises(EngineError, match=r"row band 1, column band 2, factor-2 band 0\)"):
        run(SerialExecutor(), 3, Reshuffled(), Mixer(fail_at=(1, 2, 0)), factors=3)


def test_tasks_do_not_write_to_what_they_are_given():
    grid = Grid.even((4, 4), 2)
    state = make_state(grid, np.ones((4, 2)), np.ones((4, 2)))
    plan = build_plan(
        Cyclic(),
        np.ones((2, 2), dtype=np.int64),
        range(1),
        lambda cycle: np.random.default_rng(0),
        lambda cycle: CycleOptions(),
    )
    after = TasksExecutor().run(plan, Mixer(), state, None)
    assert np.all(state.gather("rows") == 1)
    assert np.all(after.gather("rows") != 1)


@pytest.mark.parametrize("name", ["serial", *EXECUTORS])
def test_map_keeps_the_order_of_its_items(name):
    executor = SerialExecutor() if name == "serial" else EXECUTORS[name]()
    assert executor.map(lambda item, work: item * item, range(20)) == [n * n for n in range(20)]
    executor.close()


def test_progress_counts_every_operation():
    for executor in (SerialExecutor(), ThreadsExecutor(2), TasksExecutor()):
        seen = []
        state = make_state(Grid.even((6, 6), 3), np.ones((6, 2)), np.ones((6, 2)))
        plan = build_plan(
            Cyclic(),
            np.ones((3, 3), dtype=np.int64),
            range(2),
            lambda cycle: np.random.default_rng(0),
            lambda cycle: CycleOptions(),
        )
        executor.run(plan, Mixer(), state, None, seen.append)
        assert seen == sorted(seen)
        assert seen[-1] == 18


def test_an_interrupt_stops_the_lanes():
    """An exception in the watching thread ends the run and leaves no lane behind."""
    executor = ThreadsExecutor(2)
    before = threading.active_count()

    def interrupt(done):
        raise KeyboardInterrupt

    state = make_state(Grid.even((6, 6), 3), np.ones((6, 2)), np.ones((6, 2)))
    plan = build_plan(
        Cyclic(),
        np.ones((3, 3), dtype=np.int64),
        range(2000),
        lambda cycle: np.random.default_rng(0),
        lambda cycle: CycleOptions(),
    )
    with pytest.raises(KeyboardInterrupt):
        executor.run(plan, Mixer(), state, None, interrupt)
    executor.close()
    assert threading.active_count() <= before


def test_an_unknown_executor_is_refused():
    with pytest.raises(OptionError, match=r'"threads", "serial", "tasks", "ring" or .*got \'mpi\''):
        make_executor("mpi")


def test_the_old_word_for_threads_still_works():
    assert dfac.LanesExecutor is ThreadsExecutor
    for word in ("threads", "lanes"):
        executor = make_executor(word)
        assert isinstance(executor, ThreadsExecutor)
        assert executor.name == "threads"
        executor.close()
