"""Plans: what happens to which block, in which order, as plain tuples.

A plan is a sequence of rounds. An operation touches a band of every factor: a
matrix has two, rows and columns, and a tensor one for each of its axes. The
operations of a round share no band, and every round touches every band exactly
once, so an operation of round n may start as soon as all of its bands have been
through n rounds. That one rule is all an executor needs; it knows nothing of
what an operation computes.
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
    """Says what an operation does with its block."""

    UPDATE = 0
    EVALUATE = 1


@dataclass(frozen=True)
class CycleOptions:
    """Says what is to be done in one cycle besides the updates.

    ``adapt`` gathers curvature, ``record`` adds the state at the cycle's end to
    the moments, ``keep`` copies it as a draw, ``evaluate`` visits every block
    once more for the log-likelihood and the monitored cells.
    """

    adapt: bool = False
    record: bool = False
    keep: bool = False
    evaluate: bool = False


class Op(NamedTuple):
    """One block update or evaluation.

    ``iteration`` counts parts over the whole run and is the noise's address;
    ``last`` marks the last part of a cycle's updates, after which the bands are
    in the state that the cycle leaves behind.
    """

    action: Action
    block: BlockAddress
    cycle: int
    iteration: int
    scale: float
    last: bool
    wanted: CycleOptions


class Round(NamedTuple):
    """Operations without a band in common, and the super-part they belong to."""

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
        Says which parts a cycle visits.
    observed
        Observed entries per block, shape (B, B), or (B, B, B) and so on for a tensor;
        sizes on the diagonals, summed by the caller's choice of parts.
    cycles
        Numbers of the cycles, counted from the start of the run.
    shuffle
        The generator that belongs to a cycle's number.
    options
        Says what else a cycle is to do.
    """
    blocks = observed.shape[0]
    sizes = diagonal_sizes(observed)
    # To evaluate, every block once more, in an order that suits the schedule's super-blocks.
    order: Schedule = Cyclic()
    if isinstance(schedule, NestedReshuffled):
        order = NestedReshuffled(schedule.groups)
    visits: Sequence[Part] | None = None
    # A generator for each cycle takes 30 µs; where the order is fixed none is needed.
    fixed, parts = blocks == 1 or isinstance(schedule, Passes | Cyclic), None
    rounds: list[Round] = []
    for cycle in cycles:
        wanted = options(cycle)
        if parts is None or not fixed:
            parts = schedule.cycle(blocks, sizes, shuffle(cycle))
        rounds += _rounds(parts, cycle, wanted)
        if wanted.evaluate:
            visits = visits or order.cycle(blocks, sizes, np.random.default_rng(0))
            rounds += _rounds(visits, cycle, wanted, Action.EVALUATE)
    return tuple(rounds)


def plan_evaluation(observed: NDArray[np.int64]) -> tuple[Round, ...]:
    """Return the rounds that evaluate every block once, in an order that no chance decides."""
    sizes, rng = diagonal_sizes(observed), np.random.default_rng(0)
    return tuple(
        _rounds(Cyclic().cycle(len(observed), sizes, rng), 0, CycleOptions(), Action.EVALUATE)
    )


def _rounds(
    parts: Sequence[Part], cycle: int, wanted: CycleOptions, action: Action = Action.UPDATE
) -> list[Round]:
    """Make a round of each part; evaluations have no iteration, weight their entries alike."""
    rounds = []
    for position, part in enumerate(parts):
        rest: tuple[int, float, bool] = (-1, 1.0, False)
        if action == Action.UPDATE:
            rest = (cycle * len(parts) + position, part.scale, position == len(parts) - 1)
        ops = tuple([Op(action, block, cycle, *rest, wanted) for block in part.blocks])
        rounds.append(Round(ops, part.outer, part.size))
    return rounds


def ops_by_row(plan: Sequence[Round]) -> dict[int, list[Op]]:
    """Return every row band's operations, one of each round."""
    found: dict[int, list[Op]] = {}
    for part in plan:
        for op in part.ops:
            found.setdefault(op.block[0], []).append(op)
    return dict(sorted(found.items()))


def rows_met(plan: Sequence[Round], factor: int = 1) -> NDArray[np.int32]:
    """Return the row band that each band of a factor meets in each round, shape (rounds, B)."""
    found = np.empty((len(plan), len(plan[0].ops)), np.int32)
    for number, part in enumerate(plan):
        for op in part.ops:
            found[number, op.block[factor]] = op.block[0]
    return found
