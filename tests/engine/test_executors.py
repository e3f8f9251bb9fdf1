"""One plan, several executors, the same bits; errors that name their block."""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskfactor.engine import LanesExecutor, SerialExecutor, TasksExecutor, make_executor
from daskfactor.engine.dask_tasks import group_rounds
from daskfactor.engine.plan import CycleOptions, Op, build_plan
from daskfactor.engine.state import (
    BlockCells,
    ChainState,
    Evaluation,
    FactorBand,
    make_state,
    place_cells,
)
from daskfactor.errors import EngineError, OptionError
from daskfactor.grid.bands import Block, Grid
from daskfactor.grid.schedules import Cyclic, NestedReshuffled, Reshuffled, Schedule
from daskfactor.kernels.workspace import Workspace


@dataclass(frozen=True)
class Mixer:
    """A program whose result depends on the order of every pair of operations with a band."""

    fail_at: Block | None = None

    def update(
        self, op: Op, data: Any, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        if op.block == self.fail_at and op.cycle == 1:
            raise ZeroDivisionError("on purpose")
        total = np.float32(rows.values.sum() * 0.37 + cols.values.sum() * 0.61 + op.iteration)
        rows.values[:] = np.cos(rows.values * np.float32(1.7) + total)
        cols.values[:] = np.sin(cols.values * np.float32(1.3) - total)
        if op.last and op.wanted.keep:
            rows.draws.append(rows.values.copy())
            cols.draws.append(cols.values.copy())

    def evaluate(
        self,
        op: Op,
        data: Any,
        rows: FactorBand,
        cols: FactorBand,
        cells: BlockCells | None,
        workspace: Workspace,
    ) -> Evaluation:
        if cells is not None:
            cells.count += 1
            means = (rows.values[cells.rows] * cols.values[cells.cols]).sum(axis=1)
            cells.mean += (means - cells.mean) / cells.count
        return Evaluation(op.cycle, op.block, np.array([rows.values.sum(), cols.values.sum()]))


def run(executor: Any, blocks: int, schedule: Schedule, program: Mixer | None = None) -> ChainState:
    rng = np.random.default_rng(blocks)
    grid = Grid.even((3 * blocks + 1, 2 * blocks + 2), blocks)
    state = make_state(
        grid,
        rng.random((grid.shape[0], 3), dtype=np.float32),
        rng.random((grid.shape[1], 3), dtype=np.float32),
    )
    cells = np.array([0, grid.shape[0] - 1, 2]), np.array([1, 0, grid.shape[1] - 1])
    state.cells = place_cells(grid, *cells, np.dtype(np.float32))
    plan = build_plan(
        schedule,
        np.ones((blocks, blocks), dtype=np.int64),
        range(4),
        lambda cycle: np.random.default_rng([3, cycle]),
        lambda cycle: CycleOptions(record=True, keep=True, evaluate=cycle % 2 == 1),
    )
    return executor.run(plan, program or Mixer(), state, None)


def bits(state: ChainState) -> list[Any]:
    cells = [(b, c.mean.tobytes(), c.count) for b, c in sorted(state.cells.items())]
    evaluations = [(e.cycle, e.block, e.values.tobytes()) for e in state.evaluations]
    draws = [state.gather_draws(side).tobytes() for side in ("rows", "columns")]
    return [
        state.gather("rows").tobytes(),
        state.gather("columns").tobytes(),
        *draws,
        cells,
        evaluations,
    ]


EXECUTORS = {
    "lanes-1": lambda: LanesExecutor(1),
    "lanes-2": lambda: LanesExecutor(2),
    "lanes-5": lambda: LanesExecutor(5),
    "tasks-threads": lambda: TasksExecutor("threads", 3),
    "tasks-synchronous": lambda: TasksExecutor("synchronous"),
}


@pytest.mark.parametrize("name", EXECUTORS)
@pytest.mark.parametrize("blocks", [1, 2, 5, 8])
def test_every_executor_leaves_the_oracles_bits(name: str, blocks: int) -> None:
    executor = EXECUTORS[name]()
    assert bits(run(executor, blocks, Reshuffled())) == bits(
        run(SerialExecutor(), blocks, Reshuffled())
    )
    executor.close()


@pytest.mark.parametrize("name", EXECUTORS)
@pytest.mark.parametrize(("groups", "blocks"), [(2, 4), (2, 6), (3, 6), (1, 3)])
def test_nested_schedules_too(name: str, groups: int, blocks: int) -> None:
    executor = EXECUTORS[name]()
    schedule = NestedReshuffled(groups)
    assert bits(run(executor, blocks, schedule)) == bits(run(SerialExecutor(), blocks, schedule))
    executor.close()


@settings(max_examples=25)
@given(st.integers(1, 7), st.integers(1, 4))
def test_lanes_never_depend_on_their_number(blocks: int, lanes: int) -> None:
    executor = LanesExecutor(lanes)
    assert bits(run(executor, blocks, Reshuffled())) == bits(
        run(SerialExecutor(), blocks, Reshuffled())
    )
    executor.close()


def test_a_different_order_gives_other_bits() -> None:
    """The comparison above can fail: the mixer notices another schedule."""
    assert bits(run(SerialExecutor(), 4, Cyclic())) != bits(run(SerialExecutor(), 4, Reshuffled()))


def test_a_nested_schedule_makes_one_task_per_super_block() -> None:
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
def test_an_error_names_the_block_and_reaches_the_caller(name: str) -> None:
    executor = SerialExecutor() if name == "serial" else EXECUTORS[name]()
    with pytest.raises(EngineError, match=r"row band 1, column band 2.*cycle 1.*on purpose"):
        run(executor, 3, Reshuffled(), Mixer(fail_at=Block(1, 2)))
    again = run(executor, 3, Reshuffled())  # and the executor still works
    assert bits(again) == bits(run(SerialExecutor(), 3, Reshuffled()))
    executor.close()


def test_tasks_do_not_write_to_what_they_are_given() -> None:
    grid = Grid.even((4, 4), 2)
    state = make_state(grid, np.ones((4, 2)), np.ones((4, 2)))
    plan = build_plan(
        Cyclic(),
        np.ones((2, 2), dtype=np.int64),
        range(1),
        lambda cycle: np.random.default_rng(0),
        lambda cycle: CycleOptions(),
    )
    after = TasksExecutor().run(plan, Mixer(), state, None)  # type: ignore[arg-type]
    assert np.all(state.gather("rows") == 1)
    assert np.all(after.gather("rows") != 1)


@pytest.mark.parametrize("name", ["serial", *EXECUTORS])
def test_map_keeps_the_order_of_its_items(name: str) -> None:
    executor = SerialExecutor() if name == "serial" else EXECUTORS[name]()
    assert executor.map(lambda item, work: item * item, range(20)) == [n * n for n in range(20)]
    executor.close()


def test_progress_counts_every_operation() -> None:
    for executor in (SerialExecutor(), LanesExecutor(2), TasksExecutor()):
        seen: list[int] = []
        state = make_state(Grid.even((6, 6), 3), np.ones((6, 2)), np.ones((6, 2)))
        plan = build_plan(
            Cyclic(),
            np.ones((3, 3), dtype=np.int64),
            range(2),
            lambda cycle: np.random.default_rng(0),
            lambda cycle: CycleOptions(),
        )
        executor.run(plan, Mixer(), state, None, seen.append)  # type: ignore[arg-type]
        assert seen == sorted(seen)
        assert seen[-1] == 18


def test_an_interrupt_stops_the_lanes() -> None:
    """An exception in the watching thread ends the run and leaves no lane behind."""
    executor = LanesExecutor(2)
    before = threading.active_count()

    def interrupt(done: int) -> None:
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
        executor.run(plan, Mixer(), state, None, interrupt)  # type: ignore[arg-type]
    executor.close()
    assert threading.active_count() <= before


def test_an_unknown_executor_is_refused() -> None:
    with pytest.raises(OptionError, match=r"'lanes', 'serial', 'tasks'.*got 'mpi'"):
        make_executor("mpi")
