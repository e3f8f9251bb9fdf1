"""Plans are plain data: every round free of conflicts, every block visited."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskfactor.data.grid import Cyclic, NestedReshuffled, Passes, Proportional, Reshuffled
from daskfactor.errors import GridError
from daskfactor.executors.plan import Action, CycleOptions, Op, build_plan, rows_met


def check_plan(plan, blocks):
    """Assert that every round touches every band of every factor exactly once."""
    everything = set(range(blocks))
    for number, part in enumerate(plan):
        touched = zip(*(op.block for op in part.ops), strict=True)
        if len(part.ops) != blocks or any(set(bands) != everything for bands in touched):
            raise AssertionError(f"round {number} is not free of conflicts: {part.ops}")


def shuffle(cycle):
    return np.random.default_rng([7, cycle])


def plan_of(schedule, blocks, cycles, factors=2, **options):
    observed = np.ones((blocks,) * factors, dtype=np.int64)
    return build_plan(schedule, observed, cycles, shuffle, lambda cycle: CycleOptions(**options))


@given(st.integers(1, 8), st.sampled_from([Cyclic(), Reshuffled(), Proportional()]), st.booleans())
def test_rounds_are_free_of_conflicts(blocks, schedule, evaluate):
    plan = plan_of(schedule, blocks, range(3), evaluate=evaluate)
    check_plan(plan, blocks)
    assert len(plan) == 3 * blocks * (2 if evaluate else 1)


@given(
    st.integers(2, 4),
    st.integers(1, 4),
    st.sampled_from([Cyclic(), Reshuffled(), Proportional(), Passes()]),
    st.booleans(),
)
def test_rounds_of_any_number_of_factors(factors, blocks, schedule, evaluate):
    """Free of conflicts, every band once a round, every block once a cycle."""
    plan = plan_of(schedule, blocks, range(2), factors, evaluate=evaluate)
    check_plan(plan, blocks)
    every = sorted(itertools.product(range(blocks), repeat=factors))
    visits = {0: list[Op](), 1: list[Op](), -1: list[Op]()}
    for op in itertools.chain.from_iterable(part.ops for part in plan):
        visits[op.cycle if op.action == Action.UPDATE else -1].append(op)
    for cycle in (0, 1):
        assert len(visits[cycle]) == blocks**factors
        if not isinstance(schedule, Proportional):
            assert sorted(op.block for op in visits[cycle]) == every
        scale = 1.0 if isinstance(schedule, Passes) else blocks ** (factors - 1)
        assert {op.scale for op in visits[cycle]} == {scale}
    assert sorted(op.block for op in visits[-1]) == sorted(2 * evaluate * every)
    for factor in range(1, factors):
        met = rows_met(plan, factor)
        for number, part in enumerate(plan):
            assert [met[number, op.block[factor]] for op in part.ops] == list(range(blocks))


@pytest.mark.parametrize(("groups", "blocks"), [(1, 4), (2, 4), (4, 4), (3, 6)])
def test_nested_rounds_are_free_of_conflicts(groups, blocks):
    check_plan(plan_of(NestedReshuffled(groups), blocks, range(2), evaluate=True), blocks)


def test_a_conflicting_round_is_found():
    plan = plan_of(Cyclic(), 3, range(1))
    broken = (plan[0]._replace(ops=(plan[0].ops[0], plan[0].ops[0], plan[0].ops[2])),)
    with pytest.raises(AssertionError, match=r"not free of conflicts"):
        check_plan(broken, 3)


def test_a_conflict_of_a_further_factor_is_found():
    plan = plan_of(Cyclic(), 3, range(1), 3)
    ops = [op._replace(block=(*op.block[:2], min(op.block[2], 1))) for op in plan[0].ops]
    with pytest.raises(AssertionError, match=r"not free of conflicts"):
        check_plan([plan[0]._replace(ops=tuple(ops))], 3)


def test_a_nested_order_is_for_matrices():
    with pytest.raises(GridError, match=r"the two axes of a matrix, got 3 axes; use Reshuffled"):
        plan_of(NestedReshuffled(2), 4, range(1), 3)


def test_a_plan_in_two_pieces_is_the_plan_in_one():
    whole = plan_of(Reshuffled(), 4, range(6), evaluate=True)
    assert (
        plan_of(Reshuffled(), 4, range(2), evaluate=True)
        + plan_of(Reshuffled(), 4, range(2, 6), evaluate=True)
        == whole
    )


def test_iterations_number_the_parts_and_the_last_one_is_marked():
    plan = plan_of(Reshuffled(), 3, range(2, 4), evaluate=True)
    updates = [part.ops[0] for part in plan if part.ops[0].action == Action.UPDATE]
    assert [op.iteration for op in updates] == list(range(6, 12))
    assert [op.last for op in updates] == [False, False, True] * 2
    evaluations = [op for part in plan for op in part.ops if op.action == Action.EVALUATE]
    assert sorted((op.cycle, op.block) for op in evaluations) == sorted(
        (cycle, (row, col)) for cycle in (2, 3) for row in range(3) for col in range(3)
    )
