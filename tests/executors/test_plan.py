"""Plans are plain data: every round free of conflicts, every block visited."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskfactor.data.grid import (
    Cyclic,
    NestedReshuffled,
    Proportional,
    Reshuffled,
    Schedule,
)
from daskfactor.executors.plan import Action, CycleOptions, Round, build_plan


def check_plan(plan: Sequence[Round], blocks: int) -> None:
    """Assert that every round touches every band of every factor exactly once."""
    everything = set(range(blocks))
    for number, part in enumerate(plan):
        touched = zip(*(op.block for op in part.ops), strict=True)
        if len(part.ops) != blocks or any(set(bands) != everything for bands in touched):
            raise AssertionError(f"round {number} is not free of conflicts: {part.ops}")


def shuffle(cycle: int) -> np.random.Generator:
    return np.random.default_rng([7, cycle])


def plan_of(
    schedule: Schedule, blocks: int, cycles: range, factors: int = 2, **options: bool
) -> tuple[Round, ...]:
    observed = np.ones((blocks,) * factors, dtype=np.int64)
    return build_plan(schedule, observed, cycles, shuffle, lambda cycle: CycleOptions(**options))


@given(
    st.integers(1, 8),
    st.sampled_from([Cyclic(), Reshuffled(), Proportional()]),
    st.booleans(),
)
def test_rounds_are_free_of_conflicts(blocks: int, schedule: Schedule, evaluate: bool) -> None:
    plan = plan_of(schedule, blocks, range(3), evaluate=evaluate)
    check_plan(plan, blocks)
    assert len(plan) == 3 * blocks * (2 if evaluate else 1)


@pytest.mark.parametrize(("groups", "blocks"), [(1, 4), (2, 4), (4, 4), (3, 6)])
def test_nested_rounds_are_free_of_conflicts(groups: int, blocks: int) -> None:
    check_plan(plan_of(NestedReshuffled(groups), blocks, range(2), evaluate=True), blocks)


def test_a_conflicting_round_is_found() -> None:
    plan = plan_of(Cyclic(), 3, range(1))
    broken = (plan[0]._replace(ops=(plan[0].ops[0], plan[0].ops[0], plan[0].ops[2])),)
    with pytest.raises(AssertionError, match=r"not free of conflicts"):
        check_plan(broken, 3)


def test_a_plan_in_two_pieces_is_the_plan_in_one() -> None:
    whole = plan_of(Reshuffled(), 4, range(6), evaluate=True)
    assert (
        plan_of(Reshuffled(), 4, range(2), evaluate=True)
        + plan_of(Reshuffled(), 4, range(2, 6), evaluate=True)
        == whole
    )


def test_iterations_number_the_parts_and_the_last_one_is_marked() -> None:
    plan = plan_of(Reshuffled(), 3, range(2, 4), evaluate=True)
    updates = [part.ops[0] for part in plan if part.ops[0].action == Action.UPDATE]
    assert [op.iteration for op in updates] == list(range(6, 12))
    assert [op.last for op in updates] == [False, False, True] * 2
    evaluations = [op for part in plan for op in part.ops if op.action == Action.EVALUATE]
    assert sorted((op.cycle, op.block) for op in evaluations) == sorted(
        (cycle, (row, col)) for cycle in (2, 3) for row in range(3) for col in range(3)
    )
