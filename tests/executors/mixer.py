"""A program whose bits betray any change of order, and what the engine's tests share."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from daskfactor.data.grid import Block, Grid, Schedule
from daskfactor.executors.plan import Action, CycleOptions, Op, build_plan
from daskfactor.executors.state import (
    BlockCells,
    ChainState,
    Evaluation,
    FactorBand,
    make_state,
    place_cells,
)
from daskfactor.kernels.views import Workspace


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


@dataclass(frozen=True)
class HoardingMixer(Mixer):
    """A mixer with arrays of every kind: constant, of every update, of last ones, untouched."""

    def update(
        self, op: Op, data: Any, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        super().update(op, data, rows, cols, workspace)
        for band in (rows, cols):
            band.values += band.arrays["constant"]
            band.arrays["always"] += np.sin(band.values)
            if op.last:
                band.arrays["last"] += band.values * band.arrays["always"]

    def touches(self, op: Op) -> tuple[str, ...]:
        return ("constant", *self.changes(op)) if op.action == Action.UPDATE else ()

    def changes(self, op: Op) -> tuple[str, ...]:
        if op.action != Action.UPDATE:
            return ()
        return ("always", "last") if op.last else ("always",)


def hoard(state: ChainState) -> None:
    """Give bands what a `HoardingMixer` needs."""
    for number, band in enumerate(state.bands()):
        for name in ("constant", "always", "last", "idle"):
            band.arrays[name] = np.cos(band.values * (number + len(name)))


def run(executor: Any, blocks: int, schedule: Schedule, program: Mixer | None = None) -> ChainState:
    rng = np.random.default_rng(blocks)
    grid = Grid.even((3 * blocks + 1, 2 * blocks + 2), blocks)
    state = make_state(
        grid,
        rng.random((grid.shape[0], 3), dtype=np.float32),
        rng.random((grid.shape[1], 3), dtype=np.float32),
    )
    cells = np.array([0, grid.shape[0] - 1, 2]), np.array([1, 0, grid.shape[1] - 1])
    if isinstance(program, HoardingMixer):
        hoard(state)
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
        *[(name, a.tobytes()) for band in state.bands() for name, a in sorted(band.arrays.items())],
        cells,
        evaluations,
    ]
