"""A program whose bits betray any change of order, and what the engine's tests share."""

import math
from dataclasses import dataclass, field

import numpy as np

from daskfactor.data.grid import Bands, BlockAddress, Grid
from daskfactor.executors.plan import Action, CycleOptions, build_plan
from daskfactor.executors.state import Evaluation, make_state, place_cells

WEIGHTS, RATES = (0.37, 0.61, 0.83, 0.29), (1.7, 1.3, 1.1, 0.7)
TURNS, SIGNS = (np.cos, np.sin, np.cos, np.sin), (1, -1, -1, 1)


@dataclass(frozen=True)
class Mixer:
    """A program whose result depends on the order of every pair of operations with a band. No two
    factors are mixed alike, so that bands in a wrong order show, too."""

    fail_at: BlockAddress | None = field(default=None, kw_only=True)

    def update(self, op, data, bands, workspace):
        if op.block == self.fail_at and op.cycle == 1:
            raise ZeroDivisionError("on purpose")
        self.move(op, bands)
        for band in bands if op.last and op.options.keep else ():
            band.draws.append(band.values.copy())

    def move(self, op, bands):
        """Mix the bands of a block."""
        weighed = sum(band.values.sum() * own for band, own in zip(bands, WEIGHTS, strict=False))
        total = np.float32(weighed + op.iteration)
        for band, rate, turn, sign in zip(bands, RATES, TURNS, SIGNS, strict=False):
            band.values[:] = turn(band.values * np.float32(rate) + sign * total)

    def evaluate(self, op, data, bands, cells, workspace):
        if cells is not None:
            cells.count += 1
            each = [band.values[at] for band, at in zip(bands, cells.at, strict=True)]
            means = math.prod(each[1:], start=each[0]).sum(axis=1)
            cells.mean += (means - cells.mean) / cells.count
        return Evaluation(op.cycle, op.block, np.array([band.values.sum() for band in bands]))


@dataclass(frozen=True)
class HoardingMixer(Mixer):
    """A mixer with arrays of every kind: constant, of every update, of last ones, untouched."""

    def move(self, op, bands):
        super().move(op, bands)
        for band in bands:
            band.values += band.arrays["constant"]
            band.arrays["always"] += np.sin(band.values)
            if op.last:
                band.arrays["last"] += band.values * band.arrays["always"]

    def touches(self, op):
        return ("constant", *self.changes(op)) if op.action == Action.UPDATE else ()

    def changes(self, op):
        if op.action != Action.UPDATE:
            return ()
        return ("always", "last") if op.last else ("always",)


def hoard(state):
    """Give bands what a `HoardingMixer` needs."""
    for number, band in enumerate(state.bands()):
        for name in ("constant", "always", "last", "idle"):
            band.arrays[name] = np.cos(band.values * (number + len(name)))


def begin(blocks, factors=2, width=3):
    """A state with a few monitored cells."""
    rng = np.random.default_rng(blocks)
    lengths = (3 * blocks + 1, 2 * blocks + 2, blocks + 4, 2 * blocks + 1)[:factors]
    grid = Grid(*(Bands.even(length, blocks) for length in lengths))
    state = make_state(grid, *(rng.random((n, width), dtype=np.float32) for n in lengths))
    ends = [length - 1 for length in lengths]
    cells = [[0, ends[0], 2], [1, 0, ends[1]], *([end, 1, 0] for end in ends[2:])]
    state.cells = place_cells(grid, list(map(np.array, cells)), np.dtype(np.float32))
    return state


def plan_of(schedule, blocks, factors, cycles, seed=3):
    return build_plan(
        schedule,
        np.ones((blocks,) * factors, dtype=np.int64),
        cycles,
        lambda cycle: np.random.default_rng([seed, cycle]),
        lambda cycle: CycleOptions(record=True, keep=True, evaluate=cycle % 2 == 1),
    )


def run(executor, blocks, schedule, program=None, factors=2):
    state = begin(blocks, factors)
    if isinstance(program, HoardingMixer):
        hoard(state)
    plan = plan_of(schedule, blocks, factors, range(4))
    return executor.run(plan, program or Mixer(), state, None)


def bits(state):
    cells = [(b, c.mean.tobytes(), c.count) for b, c in sorted(state.cells.items())]
    evaluations = [(e.cycle, e.block, e.values.tobytes()) for e in state.evaluations]
    factors = range(state.n_factors)
    return [
        *[state.gather(factor).tobytes() for factor in factors],
        *[state.gather_draws(factor).tobytes() for factor in factors],
        *[(name, a.tobytes()) for band in state.bands() for name, a in sorted(band.arrays.items())],
        cells,
        evaluations,
    ]
