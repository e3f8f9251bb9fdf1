"""Plans: the operations on blocks in their order, as plain tuples.

A plan is a sequence of rounds. An operation touches one band of every factor: a matrix has two
factors, rows and columns, and a tensor one for each axis. The operations of a round share no band,
and every round touches every band exactly once. So an operation of round n may start when all of
its bands have finished n rounds: the only rule that executors rely on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.grid import (
    BlockAddress,
    Cyclic,
    NestedReshuffled,
    Part,
    Passes,
    Schedule,
    diagonal_sizes,
)

Shuffle = Callable[[int], np.random.Generator]


class Action(IntEnum):
    """Kind of an operation."""

    UPDATE = 0
    EVALUATE = 1


@dataclass(frozen=True)
class CycleOptions:
    """Options of one cycle besides the updates.

    ``adapt`` gathers curvature, ``record`` adds the state at the end of the cycle to the moments,
    ``keep`` copies it as a draw, and ``evaluate`` visits every block once more for the
    log-likelihood and the monitored cells.
    """

    adapt: bool = False
    record: bool = False
    keep: bool = False
    evaluate: bool = False


class Op(NamedTuple):
    """One block update or evaluation.

    ``iteration`` counts parts over the whole run and is part of the key of the random numbers;
    ``last`` marks the last part of a cycle's updates, after which the bands are in the final state
    of the cycle.
    """

    action: Action
    block: BlockAddress
    cycle: int
    iteration: int
    scale: float
    last: bool
    options: CycleOptions


class Round(NamedTuple):
    """Operations without a common band, and the super-part that they belong to."""

    ops: tuple[Op, ...]
    outer: int
    size: int


def build_plan(
    schedule: Schedule,
    observed: NDArray[np.int64],
    cycles: range,
    shuffle: Shuffle,
    options: Callable[[int], CycleOptions],
) -> tuple[Round, ...]:
    """Return the rounds of a range of cycles.

    Parameters
    ----------
    schedule
        Schedule of the parts that a cycle visits.
    observed
        Number of observed entries of each block, of shape (B, B), or (B, B, B) and so on for a
        tensor.
    cycles
        Numbers of the cycles, counted from the start of the run.
    shuffle
        Function that returns the random generator of a cycle.
    options
        Function that returns the options of a cycle.
    """
    blocks = observed.shape[0]
    sizes = diagonal_sizes(observed)
    # Evaluations visit every block once, in an order that suits the schedule's super-blocks.
    order: Schedule = Cyclic()
    if isinstance(schedule, NestedReshuffled):
        order = NestedReshuffled(schedule.groups)
    visits: Sequence[Part] | None = None
    # A generator takes 30 µs per cycle and is not needed for a fixed order.
    fixed, parts = blocks == 1 or isinstance(schedule, Passes | Cyclic), None
    rounds: list[Round] = []
    for cycle in cycles:
        cycle_options = options(cycle)
        if parts is None or not fixed:
            parts = schedule.cycle(blocks, sizes, shuffle(cycle))
        rounds += _rounds(parts, cycle, cycle_options)
        if cycle_options.evaluate:
            visits = visits or order.cycle(blocks, sizes, np.random.default_rng(0))
            rounds += _rounds(visits, cycle, cycle_options, Action.EVALUATE)
    return tuple(rounds)


def plan_evaluation(observed: NDArray[np.int64]) -> tuple[Round, ...]:
    """Return the rounds that evaluate every block once, in a fixed order."""
    sizes, rng = diagonal_sizes(observed), np.random.default_rng(0)
    return tuple(
        _rounds(Cyclic().cycle(len(observed), sizes, rng), 0, CycleOptions(), Action.EVALUATE)
    )


def _rounds(
    parts: Sequence[Part], cycle: int, options: CycleOptions, action: Action = Action.UPDATE
) -> list[Round]:
    """Return a round for each part; evaluations have no iteration number and unit scale."""
    rounds = []
    for position, part in enumerate(parts):
        rest: tuple[int, float, bool] = (-1, 1.0, False)
        if action == Action.UPDATE:
            rest = (cycle * len(parts) + position, part.scale, position == len(parts) - 1)
        ops = tuple([Op(action, block, cycle, *rest, options) for block in part.blocks])
        rounds.append(Round(ops, part.outer, part.size))
    return rounds


def ops_by_row(plan: Sequence[Round]) -> dict[int, list[Op]]:
    """Return the operations of every row band, one per round."""
    ops: dict[int, list[Op]] = {}
    for part in plan:
        for op in part.ops:
            ops.setdefault(op.block[0], []).append(op)
    return dict(sorted(ops.items()))


def row_band_by_round(plan: Sequence[Round], factor: int = 1) -> NDArray[np.int32]:
    """Return the row band of each band's operation in each round, of shape (rounds, B)."""
    row_of = np.empty((len(plan), len(plan[0].ops)), np.int32)
    for number, part in enumerate(plan):
        for op in part.ops:
            row_of[number, op.block[factor]] = op.block[0]
    return row_of
