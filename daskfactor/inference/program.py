"""Operations of samplers on one block, and passes over all of them.

A `Kernel` has the operations of a sampler; a `Program` is a kernel at a chain's present
hyperparameters, which executors run. In a pass every band of a factor meets all of its blocks, in
the blocks' order and on one worker, so sums have the same bits on every executor.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Schedule
from daskfactor.data.loading import UNCERTAINTY
from daskfactor.executors.base import Executor
from daskfactor.executors.plan import Action, Op
from daskfactor.executors.state import BlockCells, ChainState, Evaluation, FactorBand
from daskfactor.inference.steps import ConstantStep, StepSize
from daskfactor.kernels import blockwise
from daskfactor.kernels.blockwise import observed_values
from daskfactor.kernels.philox import Address
from daskfactor.kernels.steps import accumulate_moments, on_device_of
from daskfactor.kernels.views import Workspace
from daskfactor.models.gamma_factors import Hyperparameters, Rate, clipped_gamma_log_density
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.settings import Mask, named_columns
from daskfactor.runs.schema import Variable

Array = NDArray[Any]
Bands = tuple[FactorBand, ...]
"""A band of W and one of H: what meets in a block."""


class ArraySpec(NamedTuple):
    """Declares an array that bands carry beside their values.

    Attributes
    ----------
    life
        "chain": as long as the chain; "tune": while it tunes; "cycle": made and used up within
        a cycle, so that it is in no state and travels with its band.
    changes
        Which operations write it: "never" any, "always" all, "record" those that end a cycle
        whose draw counts, "adapt" those of a cycle that learns, "adapted" the last one of these.
    columns
        Numbers for each row, or how many these are of a factor's width; None: as many as that.
    wide
        Whether numbers are in double precision.
    """

    life: Literal["chain", "tune", "cycle"] = "chain"
    changes: Literal["never", "always", "record", "adapt", "adapted"] = "always"
    columns: int | Callable[[int], int] | None = None
    wide: bool = False

    def size(self, width: int) -> float:
        """Return the size of the array, in units of a factor of so many columns."""
        columns = self.columns(width) if callable(self.columns) else self.columns
        return (1 + self.wide) * (1.0 if columns is None else columns / width)

    def changed_by(self, op: Op) -> bool:
        """Tell whether an operation writes the array."""
        adapts = op.options.adapt
        return {
            "never": False,
            "always": True,
            "record": op.last and op.options.record,
            "adapt": adapts,
            "adapted": adapts and op.last,
        }[self.changes]

    def touched_by(self, op: Op) -> bool:
        """Tell whether an operation reads or writes the array."""
        read = self.life == "chain" and self.changes != "record"
        return read or self.changed_by(op)


Arrays = dict[str, ArraySpec]


def relative_size(arrays: Arrays, width: int, life: str) -> float:
    """Return the size of the arrays of a life, in units of a factor of so many columns."""
    return math.fsum(spec.size(width) for spec in arrays.values() if spec.life == life)


MOMENTS = ("mean", "m2")
"""Running moments of every entry."""
RECORDED: Arrays = dict.fromkeys(MOMENTS, ArraySpec(changes="record"))
METRIC: Arrays = {
    "metric": ArraySpec(changes="adapted"),
    "curvature": ArraySpec("tune", "adapted"),
    "gathered": ArraySpec("tune", "adapt"),
}
"""The majoriser's metric, and what it is learnt from."""
HYPER_EVERY = 10
"""Cycles of the Langevin samplers between draws of hyperparameters: each ends a plan."""

RATE = "rate"
"""Array of a band whose rows have a prior rate each: one column, in double precision."""
DISPERSION = "dispersion"
"""Array of a band of columns that have a dispersion each: one column, in double precision."""
ROWS, COLUMNS = 0, 1
"""The two factors in the address of the noise: W and H."""
SHIFT = "shift"
"""Array of a band whose rows have covariates: what these add to the prior means."""
STEPS = "steps"
"""Array of a band whose rows have a step each: log ε, its average and the averaged δ - α of each
row, (n, 3) in double precision."""
LOGARITHMS = "logarithms"
"""Count of a band: 1 at the temperatures of an evidence, else 0."""


class Work(NamedTuple):
    """The work of one cycle on a grid of B x B blocks.

    Attributes
    ----------
    moves
        Steps of a cycle: the iterations that the step size counts.
    visits
        How often the cycle's operations come to every block.
    passes
        Work of the updates, in passes over all the data.
    passes_per_column
        Further ones for each column of the factors.
    """

    moves: int
    visits: int = 1
    passes: float = 1.0
    passes_per_column: float = 0.0


class Visit(NamedTuple):
    """An operation with its block of the data, the bands that meet there, and buffers."""

    op: Op
    data: BlockedData
    bands: Bands
    workspace: Workspace


ONE_PASS, UNIT_STEP = Work(1), ConstantStep(1.0)


@dataclass(frozen=True)
class Kernel(ABC):
    """The operations of a sampler on the blocks of one kind of model.

    Attributes
    ----------
    options
        The sampler, with values in place of what ``"auto"`` stands for.
    schedule
        Order in which a cycle visits the parts of the data.
    arrays
        Arrays that bands carry besides their values, by name.
    work
        Work of a cycle on the grid of the data.
    step_size
        ε of every iteration; of two coupled chains that of the coarse one.
    statistics
        Numbers of every row that a draw has besides density, step and divergence: results have
        their means. Operations leave sums of them with a band, by cycle and name.
    learns_every
        Cycles between draws of hyperparameters that a model learns.
    rescales_every
        Cycles between draws of the scale that W and H of a component share, where the model
        learns no hyperparameters; None: it is never drawn. Masses and steps that are learnt
        stay as they are: with these every kernel leaves the posterior as it is, and so does the
        draw of the scale.
    adapts_always
        Whether it learns in every cycle of tuning, not in some of its first part.
    """

    options: Any
    schedule: Schedule
    arrays: Arrays
    work: Work = ONE_PASS
    step_size: StepSize = UNIT_STEP
    statistics: ClassVar[tuple[Variable, ...]] = ()
    learns_every: ClassVar[int] = 1
    rescales_every: ClassVar[int | None] = None
    adapts_always: ClassVar[bool] = False

    def init(self, band: FactorBand, factor: int, denominator: Array, hyper: Any) -> None:
        """Begin what is learnt of a band, by the denominator of its multiplicative update."""
        del factor, hyper
        if "curvature" in self.arrays:
            band.arrays["curvature"][:] = denominator
            band.counts["curvature"] = 1

    @abstractmethod
    def step(self, program: "Program", visit: Visit) -> None:
        """Change the bands of a block, in place."""

    def _gathered(self, visit: Visit) -> tuple[Array, ...] | None:
        """Return the arrays that gather the curvature, in a cycle that learns the metric."""
        if visit.op.options.adapt and "gathered" in self.arrays:
            return tuple(band.arrays["gathered"] for band in visit.bands)
        return None

    def _learn_metric(self, program: "Program", visit: Visit) -> None:
        """Learn the metric from what a cycle has gathered, where it ends."""
        if visit.op.last and self._gathered(visit) is not None:
            for factor, band in enumerate(visit.bands):
                learn_metric(band, program.hyper, factor, program.frozen[factor])

    def retune(self, band: FactorBand, factor: int, size: Array, hyper: Any) -> None:
        """Multiply a band's columns, and change what is learnt of it accordingly."""
        del factor, hyper
        band.values *= on_device_of(band.values, size.astype(band.values.dtype))

    def refresh(self, band: FactorBand, address: Address, shape: float = 1.0) -> None:
        """Draw the momentum of a band whose values are a draw; ``shape``: of its gamma prior."""
        del band, address, shape

    def log_prior(self, program: "Program", band: FactorBand, factor: int) -> float:
        """Return the log prior density of a band's entries that move."""
        mask, free = program.frozen[factor], band.values
        rate, shape = program.prior(band, factor)
        if mask is not None:
            free = free[:, named_columns(~mask)]
            if np.ndim(rate) and rate.shape[-1] == mask.size:
                rate = rate[..., named_columns(~mask)]
        return clipped_gamma_log_density(free, rate, shape)


class Fit(NamedTuple):
    """Sums over the observed entries: -Σ d_β(v|μ) and Σ (v - μ)² μ^(β-2).

    Of data that several laws share, the first is in units of their dispersions, and there is
    one of the second for each of them.
    """

    negative_divergence: float
    pearson: Any


class Evaluates:
    """Adds up fits; base of what executors run."""

    likelihood: Likelihood
    floor: float

    def evaluate(
        self,
        op: Op,
        data: BlockedData,
        bands: Bands,
        cells: BlockCells | None,
        workspace: Workspace,
    ) -> Evaluation:
        """Add up the fit over a block, and move the moments of its monitored cells."""
        watched = None
        if cells is not None and op.options.record:
            cells.count += 1
            watched = (cells.at, cells.mean, cells.m2, cells.count)
        sums, law = np.zeros(2), law_of(self.likelihood, op.block, bands[COLUMNS])
        block = data.view(*op.block), law, values_of(bands), self.floor
        blockwise.evaluate(block, sums, workspace, watched)
        return Evaluation(op.cycle, op.block, self.likelihood.sums(op.block, sums))


@dataclass(frozen=True)
class Program(Evaluates):
    """A kernel at a chain's present hyperparameters; immutable, so that any executor may share it.

    Attributes
    ----------
    kernel
        The operations of a sampler or an optimizer.
    likelihood
        The law of an entry given its mean μ.
    floor
        Smallest μ that gradients and the fit are taken at.
    hyper
        Hyperparameters; the program holds for as long as they stay as they are.
    key
        Two words that key the chain's random numbers.
    frozen
        Of W and of H, which components never move.
    step, shrink
        ε per iteration, and the factor it was reduced by after divergences.
    coarse
        Whether this is the coarse chain of a Richardson–Romberg pair.
    common
        Whether all rows have the numbers of the first one, so that none knows its place; rows
        whose conditional mean is known take that.
    """

    kernel: Kernel
    likelihood: Likelihood
    floor: float
    hyper: Any
    key: tuple[int, int]
    frozen: tuple[Mask, ...] = (None, None)
    step: StepSize = UNIT_STEP
    shrink: float = 1.0
    coarse: bool = False
    common: bool = False

    def step_size(self, iteration: int) -> float:
        """Return ε at an iteration, reductions included."""
        return self.step(iteration) * self.shrink

    def address(self, band: FactorBand, iteration: int, factor: int, stream: int = 0) -> Address:
        """Say which random numbers move a band; a sampler's further ones are of another stream."""
        offset = 0 if self.common else band.offset
        key = np.array(self.key, dtype=np.uint32)
        return Address(key, iteration, factor_word(factor) + stream, offset)

    def prior(self, band: FactorBand, factor: int) -> tuple[Rate, float]:
        """Return rate and shape of the prior of a band's entries; the rate may vary among these."""
        return band_prior(band, self.hyper, factor)

    def prior_of(
        self, band: FactorBand, factor: int, gradient: Array, unit: float = 1.0
    ) -> tuple[Array, tuple[float, float]]:
        """Return a gradient with the prior's rate and shape, as kernels take them: numbers.

        Rates that vary are taken off the gradient, and 0 is left; they are in ``unit``.
        """
        rate, shape = self.prior(band, factor)
        if np.ndim(rate):
            gradient, rate = gradient - (unit * rate).astype(gradient.dtype), 0.0
        return gradient, (float(rate), float(shape))

    def gradient(
        self, visit: Visit, curvatures: tuple[Array, ...] | None = None
    ) -> tuple[Array, ...]:
        """Return the block's share of the gradients of the log-likelihood, scaled by its ``op``."""
        op, data, bands, workspace = visit
        scale = op.scale / self.hyper.dispersion
        law = law_of(self.likelihood, op.block, bands[COLUMNS])
        block = data.view(*op.block), law, values_of(bands), self.floor
        return blockwise.gradient(block, scale, workspace, curvatures)

    def update(self, op: Op, data: BlockedData, bands: Bands, workspace: Workspace) -> None:
        """Move the bands of a block, in place; record what a cycle's last operation leaves."""
        self.kernel.step(self, Visit(op, data, bands, workspace))
        if op.last:
            for factor, band in enumerate(bands):
                finish_band(band, self, op, factor)

    def touches(self, op: Op) -> tuple[str, ...]:
        """Name the arrays of a band that an operation reads or writes."""
        if op.action != Action.UPDATE:
            return (DISPERSION,)
        return (*self._named(op, ArraySpec.touched_by), RATE, SHIFT, DISPERSION)

    def changes(self, op: Op) -> tuple[str, ...]:
        """Name the arrays of a band that an operation writes."""
        return self._named(op, ArraySpec.changed_by) if op.action == Action.UPDATE else ()

    def _named(self, op: Op, concerned: Callable[[ArraySpec, Op], bool]) -> tuple[str, ...]:
        arrays = self.kernel.arrays.items()
        return tuple(name for name, spec in arrays if spec.life != "cycle" and concerned(spec, op))


def finish_band(band: FactorBand, program: Program, op: Op, factor: int) -> None:
    """Record what a cycle left in a band: moments, a draw, the log prior density.

    It does what ``op.options`` asks for; `prepare_state` makes the arrays.
    """
    if op.options.record:
        band.counts["moments"] += 1
        moments = band.arrays["mean"], band.arrays["m2"]
        accumulate_moments(band.values, band.counts["moments"], *moments)
    if op.options.keep:
        band.draws.append(band.values.copy())
    if op.options.evaluate:
        band.sums[op.cycle] = program.kernel.log_prior(program, band, factor)


def factor_word(factor: int) -> int:
    """Return a factor's number in the address of its noise, 0 <= factor < MAX_FACTORS.

    Samplers add 2, 4 or 6 to it for further noise of the same factor. W and H have 0 to 7; blocks
    whose entries are drawn have 16 and more (`daskfactor.kernels.subsample`). The other factors of
    a tensor have eight numbers each among the last 2**8 of the 2**32, which differ in their last
    eight bits as well: `daskfactor.kernels.variates.start_entry` looks at these alone.
    """
    return factor if factor < 2 else 2**32 - 2**8 + 8 * factor


def values_of(bands: Bands) -> tuple[Array, ...]:
    """Return the values of the bands of a block, as kernels take them."""
    return tuple([band.values for band in bands])


def law_of(likelihood: Likelihood, block: tuple[int, ...], columns: FactorBand) -> Likelihood:
    """Return the law of a block: at the dispersions of its columns, if these have their own."""
    law, dispersions = likelihood.of(block), columns.arrays.get(DISPERSION)
    return law if dispersions is None else law.at(dispersions[:, 0].copy())[0]


def unshifted(band: FactorBand) -> Array:
    """Return a band's values less what covariates add to their prior means."""
    return band.values - band.arrays[SHIFT] if SHIFT in band.arrays else band.values


def prepare_state(state: ChainState, arrays: Arrays = RECORDED) -> None:
    """Give every band those of these arrays that have a number for each entry, of zeros."""
    names = tuple(n for n, spec in arrays.items() if spec.columns is None and spec.life != "cycle")
    state.each(partial(prepare_band, names=names))


def prepare_band(band: FactorBand, names: Iterable[str]) -> None:
    """Give a band arrays of zeros by these names, and its counters."""
    for name in names:
        band.arrays.setdefault(name, np.zeros_like(band.values))
    band.counts.setdefault("moments", 0)
    band.counts.setdefault("curvature", 0)


def band_prior(band: FactorBand, hyper: Hyperparameters, factor: int) -> tuple[Rate, float]:
    """Return rate and shape of the prior of a band's entries; the rate may vary among these."""
    rate, shape = hyper.prior(factor)
    return on_device_of(band.values, band.arrays.get(RATE, rate)), shape


def set_metric(band: FactorBand, hyper: Hyperparameters, factor: int, frozen: Mask) -> None:
    """Set C = curvature / φ + λ, the denominator of the multiplicative update.

    Infinite for frozen components, which leaves them where they are.
    """
    metric = band.arrays["metric"]
    np.multiply(band.arrays["curvature"], 1.0 / hyper.dispersion, out=metric)
    rate = band_prior(band, hyper, factor)[0]
    metric += rate.astype(metric.dtype) if np.ndim(rate) else metric.dtype.type(rate)
    if frozen is not None:
        metric[:, named_columns(frozen)] = np.inf


def learn_metric(band: FactorBand, hyper: Hyperparameters, factor: int, frozen: Mask) -> None:
    """Average what a cycle has gathered into the curvature, and set the metric by it."""
    band.counts["curvature"] += 1
    gathered, curvature = band.arrays["gathered"], band.arrays["curvature"]
    curvature += (gathered - curvature) / band.counts["curvature"]
    gathered[:] = 0
    set_metric(band, hyper, factor, frozen)


def refresh_metric(
    state: ChainState, hyper: Hyperparameters, frozen: tuple[Mask, ...] = (None, None)
) -> None:
    """Recompute every band's metric, as is due when the dispersion has changed."""
    for factor, mask in enumerate(frozen):
        state.each(partial(set_metric, hyper=hyper, factor=factor, frozen=mask), factor)


# -- passes over all blocks ----------------------------------------------------------------


def take_fits(state: ChainState) -> dict[int, Fit]:
    """Take a state's evaluations off it, added up over the blocks of each cycle."""
    sums: dict[int, Any] = {}
    for evaluation in state.evaluations:
        sums[evaluation.cycle] = sums.get(evaluation.cycle, 0.0) + evaluation.values
    state.evaluations.clear()
    fits = {}
    for cycle, total in sums.items():
        divergence, *pearson = total.tolist()
        fits[cycle] = Fit(divergence, pearson[0] if len(pearson) == 1 else tuple(pearson))
    return fits


def tally_columns(data: BlockedData, executor: Executor) -> tuple[Array, Array, Array]:
    """Count how often a column has each positive value, by weight: (columns, values, counts)."""

    def one_band(number: int, work: Workspace) -> tuple[Array, ...]:
        del work
        tallies = [(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))]
        for row in range(data.grid.blocks):
            for values, weights, _, columns in observed_values(data.view(row, number), True):
                mass = np.ones(values.size) if weights is None else weights
                keep = values > 0
                tallies.append((columns[keep], values[keep], mass[keep]))
        at, values, weights = (np.concatenate(parts) for parts in zip(*tallies, strict=True))
        distinct, which = np.unique(values, return_inverse=True)
        pairs, each = np.unique(at * max(distinct.size, 1) + which, return_inverse=True)
        where, value = np.divmod(pairs, max(distinct.size, 1))
        offset = data.grid.cols.offsets[number]
        return where + offset, distinct[value], np.bincount(each, weights, pairs.size)

    tallies = executor.map(one_band, range(data.grid.blocks), "tally-columns")
    at, values, counts = (np.concatenate(parts) for parts in zip(*tallies, strict=True))
    return at, values, counts


class Tally(NamedTuple):
    """Distinct observed values, ascending, with sums over the cells that have them."""

    values: Array
    counts: Array
    """Sums of weights: numbers of cells where these have none."""
    squares: Array
    """Sums of squared weights."""


def tally(data: BlockedData, executor: Executor, only: Array | None = None) -> Tally:
    """Count how often each value is observed, by weight.

    ``only``: which blocks, (B, B); None: all.
    """

    def one_row(row: int, work: Workspace) -> Tally:
        del work
        tallies = [Tally(np.zeros(0), np.zeros(0), np.zeros(0))]
        for values, weights, zeros, _ in _values_of_row(data, row, only):
            mass = np.ones(values.size) if weights is None else weights
            rest = np.array([zeros])  # cells of weight 1
            tallies += [_added([Tally(values, mass, mass**2)]), Tally(np.zeros(1), rest, rest)]
        return _added(tallies)

    return _added(executor.map(one_row, range(data.grid.blocks), "tally"))


def _values_of_row(data: BlockedData, row: int, only: Array | None) -> Iterator[Any]:
    """Yield the observed values of the blocks of a row band, all or ``only`` some, by parts."""
    for others in np.ndindex(data.n_observed.shape[1:]):
        if only is None or only[row, *others]:
            yield from observed_values(data.view(row, *others))


def _added(tallies: Iterable[Tally]) -> Tally:
    values, counts, squares = (np.concatenate(parts) for parts in zip(*tallies, strict=True))
    values, where = np.unique(values, return_inverse=True)
    return Tally(values, np.bincount(where, counts), np.bincount(where, squares))


def normalizer(
    data: BlockedData,
    dispersion: float,
    likelihood: Likelihood,
    executor: Executor,
    only: Array | None = None,
) -> float:
    """Return Σ log p(v | μ) + d_β(v | μ) / φ over the observed entries, for laws with a density.

    Of ``only`` some blocks, (B, B), if that is given. By weight, if cells have any; those from
    uncertainties divide φ instead.
    """

    def one_row(row: int, work: Workspace) -> float:
        del work
        total = 0.0
        for values, weights, zeros, _ in _values_of_row(data, row, only):
            if weights is None:
                total += float(likelihood.log_normalizer(values, dispersion).sum())
            elif data.weighting == UNCERTAINTY:
                total += float(likelihood.log_normalizer(values, dispersion / weights).sum())
            else:
                total += float(weights @ likelihood.log_normalizer(values, dispersion))
            if zeros:
                total += zeros * float(likelihood.log_normalizer(np.zeros(1), dispersion)[0])
        return total

    return float(sum(executor.map(one_row, range(data.grid.blocks), "log-normalizer")))
