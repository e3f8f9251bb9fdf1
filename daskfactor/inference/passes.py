"""Passes over the data with both factors, as plans: evaluate a fit, gather sums for a step.

In a pass a band meets all blocks of its row or column, one in each round, and gathers sums, which
the operation with the last of them uses. Sums come in the order of the
plan, so they have the same bits on every executor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Passes
from daskfactor.executors.base import Executor
from daskfactor.executors.plan import Action, CycleOptions, Op, build_plan, plan_evaluation
from daskfactor.executors.state import ChainState, FactorBand
from daskfactor.inference.bands import drop_arrays, put_array
from daskfactor.inference.program import (
    COLUMNS,
    DISPERSION,
    LOGARITHMS,
    RATE,
    ROWS,
    Bands,
    Evaluates,
    Fit,
    Kernel,
    law_of,
    take_fits,
    values_of,
)
from daskfactor.kernels import blockwise
from daskfactor.kernels.steps import zeros_on_device_of
from daskfactor.kernels.views import Sums, Workspace
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]
Share = tuple[Array, ...]
"""Numerator and denominator of the multiplicative update of a band, or a block's part of them;
behind them the Gram matrix of the other factor, where that is gathered."""


class Place(NamedTuple):
    """A state, its data, what runs passes over these, and the smallest mean taken in them."""

    executor: Executor
    data: BlockedData
    state: ChainState
    floor: float


class Gathered(NamedTuple):
    """A band of a factor after all of its blocks in a cycle, with what it has gathered there."""

    band: FactorBand
    share: Share
    factor: int
    cycle: int


BOTH = ROWS, COLUMNS


def every(state: ChainState) -> tuple[int, ...]:
    """Return the numbers of all factors: two for a matrix."""
    return tuple(range(state.n_factors))


@dataclass(frozen=True)
class Pass(Evaluates):
    """Base of the programs of passes: the likelihood, and evaluations.

    Attributes
    ----------
    likelihood, floor
        The law of an entry given its mean μ, and the smallest μ that it is taken at.
    sides
        The factor whose bands gather in each visit of all blocks that a cycle makes.
    reads, writes
        Names of the arrays that the end of a visit reads and changes; sums that are gathered
        are made and used up on the way and need no name.
    """

    likelihood: Likelihood
    floor: float
    sides: tuple[int, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def place(self, op: Op, parts: int) -> tuple[int, bool, bool]:
        """Say which factor gathers in an operation, and whether it is its visit's first or last.

        ``parts`` are those of the grid: in each a band meets one of its blocks.
        """
        visit, position = divmod(op.iteration % (len(self.sides) * parts), parts)
        return self.sides[visit], position == 0, position == parts - 1

    def update(self, op: Op, data: BlockedData, bands: Bands, workspace: Workspace) -> None:
        """Refuse: a pass that gathers says how."""
        raise NotImplementedError

    def touches(self, op: Op) -> tuple[str, ...]:
        """Name the arrays of a band that an operation reads or writes."""
        return (DISPERSION, RATE, *self.reads, *self.changes(op))

    def changes(self, op: Op) -> tuple[str, ...]:
        """Name the arrays of a band that an operation writes."""
        return self.writes if op.action == Action.UPDATE else ()


@dataclass(frozen=True)
class SharePass(Pass):
    """Gathers the numerators and denominators of the multiplicative update.

    ``finish`` is called with those of a band, in the operation with its last block. ``gram``:
    gather the Gram matrix of a matrix's other factor, too.
    """

    finish: Callable[[Gathered], None] | None = None
    gram: bool = False

    def update(self, op: Op, data: BlockedData, bands: Bands, workspace: Workspace) -> None:
        """Add a block's share to what the band of the side has gathered."""
        factor, first, last = self.place(op, data.grid.parts)
        band, law = bands[factor], law_of(self.likelihood, op.block, bands[COLUMNS])
        names = (*GATHERED, GRAM) if self.gram else GATHERED
        if first:
            like = band.values, band.values.shape, band.values.dtype
            band.arrays |= {name: zeros_on_device_of(*like) for name in GATHERED}
            if self.gram:
                band.arrays[GRAM] = np.zeros((band.values.shape[1],) * 2)
        num, den, *_ = share = tuple(band.arrays[name] for name in names)
        block = data.view(*op.block), law, values_of(bands), self.floor
        sums = Sums.of(factor, len(bands), num, den)
        blockwise.accumulate(block, "ratio", sums, workspace)
        if self.gram:
            other = bands[1 - factor].values
            band.arrays[GRAM] += other.T @ other
        if last:
            drop_arrays(band, names)
            assert self.finish is not None
            self.finish(Gathered(band, share, factor, op.cycle))


def init_band(gathered: Gathered, kernel: Kernel, hyper: Any, tempered: bool = False) -> None:
    """Begin what a kernel learns of a band, by the denominator of its multiplicative update."""
    band, share, factor, _ = gathered
    if tempered:
        band.counts[LOGARITHMS] = 1
    kernel.init(band, factor, share[1], hyper)


GATHERED, GRAM = ("numerator", "denominator"), "gram"
TRIED, FITS = "tried", "fits of columns"


@dataclass(frozen=True)
class ColumnPass(Pass):
    """Gathers the fit of every column at a dispersion of its own that is tried."""

    sides: tuple[int, ...] = (COLUMNS,)
    reads: tuple[str, ...] = (TRIED,)
    writes: tuple[str, ...] = (FITS,)

    def update(self, op: Op, data: BlockedData, bands: Bands, workspace: Workspace) -> None:
        """Add the fits of a block's columns."""
        cols = bands[COLUMNS]
        law, _ = self.likelihood.at(cols.arrays[TRIED].copy())
        if self.place(op, data.grid.parts)[1]:
            cols.arrays[FITS] = zeros_on_device_of(cols.values, (len(cols.values),), np.float64)
        block = data.view(*op.block), law, values_of(bands), self.floor
        unused = np.zeros_like(cols.values)
        sums = Sums.of(COLUMNS, len(bands), unused, fits=cols.arrays[FITS])
        blockwise.accumulate(block, "score", sums, workspace)


def run_pass(
    place: Place, program: Pass, cycles: int = 1, on_cycle: Callable[[int], None] | None = None
) -> None:
    """Make a program's visits of all blocks, cycle by cycle, and change the state.

    ``on_cycle`` receives the number of every cycle that is done.
    """
    executor, data, state, _ = place
    options = CycleOptions()
    plan = build_plan(
        Passes(len(program.sides)),
        data.n_observed,
        range(cycles),
        lambda cycle: np.random.default_rng(0),  # passes have one order only
        lambda cycle: options,
    )
    reported, each = 0, len(program.sides) * data.n_observed.size

    def report(done: int) -> None:
        nonlocal reported
        while on_cycle is not None and (reported + 1) * each <= done:
            on_cycle(reported)
            reported += 1

    state.replace_with(executor.run(plan, program, state, data, report))


def evaluate(place: Place, likelihood: Likelihood) -> Fit:
    """Evaluate how well a state fits, summed over blocks in row-major order."""
    executor, data, state, floor = place
    plan = plan_evaluation(data.n_observed)
    state.replace_with(executor.run(plan, Pass(likelihood, floor), state, data))
    (fit,) = take_fits(state).values()
    return fit


def fit_columns(place: Place, likelihood: Likelihood, dispersions: Array) -> Array:
    """Return minus the divergence of every column at a dispersion of its own, (J,)."""
    _, data, state, floor = place
    put_array(state, data.grid, COLUMNS, TRIED, dispersions)
    run_pass(place, ColumnPass(likelihood, floor))
    fits = state.gather("columns", FITS)
    state.each(partial(drop_arrays, names=(TRIED, FITS)), COLUMNS)
    return fits
