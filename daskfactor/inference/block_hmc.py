"""Hamiltonian Monte Carlo row by row: exact at any size, in passes over the blocks.

Given H the rows of W are independent, and given W the columns of H are. So every row has a
path and a Metropolis test of its own, and its acceptance does not know how many others there
are. Along a path every pass adds up the gradients of one factor's rows, and at both ends their
fits; the last block of a pass that a band meets has all the others' shares before it, kicks
the band and lets it drift. The first pass of a path begins it, the last one decides.

Under a gamma prior of shape a < 1, whose density is infinite at zero, a path is one of y = θ^a:
exp(-λ θ) is all that the prior leaves of the density of y, finite and level at zero. Under
other priors chains of a power posterior p(V|θ)^t p(θ) go along y = log θ: where t v < 1 counts
hardly keep an entry from zero, but the slope of their log-likelihood is infinite there, so that
paths of θ itself that lead there are refused, and draws miss small entries.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import inner_share, positive_number, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Passes
from daskfactor.errors import OptionError
from daskfactor.executors.plan import Op
from daskfactor.executors.state import FactorBand
from daskfactor.inference.base import Data, Sampler, observations_per_parameter, pass_size
from daskfactor.inference.program import (
    COLUMNS,
    HYPER_EVERY,
    LOGARITHMS,
    RECORDED,
    STEPS,
    Arrays,
    ArraySpec,
    Kernel,
    Program,
    Visit,
    Work,
    band_prior,
    law_of,
    values_of,
)
from daskfactor.kernels import blockwise
from daskfactor.kernels.cuda.device import is_on_host
from daskfactor.kernels.paths import RowPaths
from daskfactor.kernels.steps import (
    average_square,
    fill_normals,
    leapfrog_drift,
    leapfrog_kick,
    level_places,
    on_device_of,
    row_energies,
    warped_drift,
    warped_kick,
    zeros_on_device_of,
)
from daskfactor.kernels.views import Block, Sums, Workspace
from daskfactor.models.settings import free_components, named_columns, preserve_columns
from daskfactor.runs.schema import Variable, statistic

Array = NDArray[Any]
Wide = NDArray[np.float64]
MASS = "mass"
"""Array of a band: the mass of each entry."""
GRADIENT, FITS, START, ENERGY = "gradient", "fits", "start", "energy"
PLACE, MOMENTUM, SPREAD = "place", "momentum", "spread"
KEPT: Arrays = {
    MASS: ArraySpec(changes="adapt"),
    STEPS: ArraySpec(changes="adapt", columns=3, wide=True),
}
PATH: Arrays = dict.fromkeys((GRADIENT, START, PLACE, MOMENTUM, SPREAD), ArraySpec("cycle"))
PATH |= dict.fromkeys((FITS, ENERGY), ArraySpec("cycle", columns=1, wide=True))
"""What a band has along a path alone."""
ADAPTED = "adapted"
"""Counts the cycles that step and mass were learnt from."""
ACCEPTANCE = "acceptance_rate"

STEP_SPREAD = 0.1
"""A path's step is ε times the exponential of so many normal deviations."""
CHANCE, WITHIN = 2, 4
"""Added to the factor in the address of the numbers that decide, and of those within rounding."""
HEADWAY, RECENT = 9, 3.0
"""Cycles that the first mass counts as; weights grow with the square of the cycle's number."""
GAMMA, OFFSET, DECAY = 0.05, 10.0, 0.75
"""Pull of log ε towards its start, number of cycles that are damped, decay of the weights."""
REACH = math.log(10.0)
"""Steps that are tried gravitate to ten times the first one: large ones are cheap to try."""
FIRST_STEP = 0.5
"""Step that tuning begins with, for one entry; d of them take d^(-1/4) as much."""


def check_leapfrog(options: Any) -> None:
    """Check ``step``, ``steps`` and ``target_accept`` of a frozen dataclass, as plain numbers."""
    step, target = options.step, options.target_accept
    if isinstance(step, str):
        if step != "auto":
            raise OptionError(f'step must be "auto" or a number, got {step!r}')
    else:
        object.__setattr__(options, "step", positive_number("step", step))
    object.__setattr__(options, "steps", whole_number("steps", options.steps, 1))
    inner_share("target_accept", target)
    object.__setattr__(options, "target_accept", float(target))


def first_step(step: float | str, entries: int) -> float:
    """Return ε at the first proposal, for so many entries."""
    return FIRST_STEP * math.pow(entries, -0.25) if isinstance(step, str) else step


def dual_average(
    start: float, average: Any, error: Any, count: int, excess: Any
) -> tuple[Any, Any, Any]:
    """Return log ε, its average, and the averaged δ - α after cycle number ``count``, from 1.

    log ε ← log(10 ε₁) - √t / γ / (t + t₀) Σ (δ - α),  the average with weights t^(-κ)

    ``start`` is log ε₁, ``average`` and ``error`` are those of the cycle before, and ``excess``
    is this cycle's δ - α; numbers, or arrays of many steps'.

    Source: Hoffman and Gelman 2014, "The No-U-Turn Sampler", equation 6 and algorithm 5.
    """
    share, weight = 1.0 / (count + OFFSET), count**-DECAY
    error = (1.0 - share) * error + share * excess
    log_step = start + REACH - math.sqrt(count) / GAMMA * error
    return log_step, weight * log_step + (1.0 - weight) * average, error


def power_of(band: FactorBand, shape: float) -> float:
    """Return p of the paths y = θ^p of a band whose prior has this shape."""
    return shape if shape < 1 else 1.0 - band.counts.get(LOGARITHMS, 0)


QUICK, BEARABLE, ROW_PRICE = 4e5, 1e7, 20
"""Entries times components up to which a cycle takes 2 ms, and 50 ms; a row counts as 20 cells."""
INFORMED = 1.0
"""Observations for each number of the factors from which paths are worth their price."""
EFFICIENCY, LARGE_EFFICIENCY = 10.0, 2.0
ROW_STEPS = 6
"""Leapfrog steps of a path of rows given the other factor. Measured on faces, 25 components: 14
visits in two paths leave the correlation with the draw before that 20 do in four paths of 4. A
single longer path would, too, but one that is refused leaves all of the draw before."""


class Path(NamedTuple):
    """A band on its way: what moves it, by which prior, and the p of y = θ^p, 0 for log θ."""

    sampler: "BlockHMC"
    program: Program
    band: FactorBand
    factor: int
    cycle: int
    power: float

    def numbers(self, width: int, stream: int) -> Array:
        """Draw normal numbers, a row for each of the band's."""
        values, common = self.band.values, self.program.common
        length = len(values)
        # In the band's precision: a second one would be compiled for these alone.
        out = zeros_on_device_of(values, (1 if common else length, width), values.dtype)
        fill_normals(out, *self.program.address(self.band, self.cycle, self.factor, stream))
        return np.repeat(out, length, axis=0) if common else out

    @property
    def chance(self) -> Array:
        """Normal numbers of each row: of its step, and two that decide whether it moves."""
        return self.numbers(3, CHANCE)

    def begin(self, adapt: bool, chance: Array) -> None:
        """Draw momenta and steps, and note where the path begins."""
        band, arrays = self.band, self.band.arrays
        arrays[START], dtype = band.values.copy(), band.values.dtype
        arrays[MOMENTUM] = self.numbers(band.values.shape[1], 0)
        size: Any = self.sampler.step
        if isinstance(size, str):
            size = np.exp(arrays[STEPS][:, :1] if adapt else arrays[STEPS][:, 1:2])
        size = size * np.exp(STEP_SPREAD * chance[:, :1]) * self.program.step_size(0)
        arrays[SPREAD] = (size / np.sqrt(arrays[MASS])).astype(dtype)
        frozen = self.program.frozen[self.factor]
        if frozen is not None:
            arrays[SPREAD][:, named_columns(frozen)] = 0
        if self.power != 1:
            arrays[PLACE] = self._place()

    @property
    def weight(self) -> float:
        """Return the weight of a cycle's gradient in the mass, which averages the information."""
        return RECENT / (self.band.counts[ADAPTED] + 1 + HEADWAY)

    def _place(self) -> Array:
        """Return y; where θ has no number for so small a power, y is level below it."""
        values, smallest = self.band.values, np.finfo(self.band.values.dtype).tiny
        if not self.power:
            logarithms: Array = np.log(np.maximum(values, smallest))
            return logarithms
        place: Array = values**self.power
        if (values <= smallest).any():
            level_places(place, values, smallest, self.numbers(values.shape[1], WITHIN))
        return place

    def kick(self, momentum: Array, spread: Array, share: float) -> None:
        """Kick momenta for a share of a step."""
        band, phi = self.band, self.program.hyper.dispersion
        arguments = band, self.factor, band.arrays[GRADIENT], phi
        gradient, prior = self.program.prior_of(*arguments)
        moved = band.values, momentum, gradient, spread, share, 1.0 / phi, *prior
        if self.power == 1:
            leapfrog_kick(*moved)
        else:
            warped_kick(*moved, self.power)

    def drift(self) -> None:
        """Let the band drift; its gradient is to be summed anew where it leads."""
        values, arrays = self.band.values, self.band.arrays
        moved = arrays[MOMENTUM], arrays[SPREAD], 1.0
        if self.power == 1:
            leapfrog_drift(values, *moved)
        else:
            warped_drift(values, arrays[PLACE], *moved, self.power)
        arrays[GRADIENT][:] = 0
        arrays[FITS][:] = 0

    def energy(self) -> Wide:
        """Return -log p(y | ...) of every row but for a constant, and its momenta's energy."""
        values, arrays, (rates, free, prior) = self.band.values, self.band.arrays, self._prior()
        out: Wide = zeros_on_device_of(values, (len(values),), np.float64)
        numbers = *prior, float(self.program.hyper.dispersion)
        row_energies(values, arrays[MOMENTUM], arrays[FITS], rates, numbers, free, out)
        return out

    def _prior(self) -> tuple[Wide, Array, tuple[float, float]]:
        """Return the rates of the prior, in two dimensions, which columns move; shape and power."""
        values, mask = self.band.values, self.program.frozen[self.factor]
        rates, shape = self.program.prior(self.band, self.factor)
        rates = on_device_of(values, np.atleast_2d(np.asarray(rates, np.float64)))
        free = on_device_of(values, free_components(mask, values.shape[1]))
        return rates, free, (float(shape), float(self.power))

    def end(self, op: Op, change: Wide, chance: Array) -> None:
        """Accept or go back, row by row; learn the steps; drop what belongs to the path."""
        band, arrays = self.band, self.band.arrays
        _, first, second = chance.T
        back = ~(change < 0.5 * (first**2 + second**2))  # exponential; NaN goes back
        if self.power != 1:
            with preserve_columns(band.values, self.program.frozen[self.factor]):
                np.maximum(band.values, np.finfo(band.values.dtype).tiny, out=band.values)
        band.values[:] = np.where(back[:, None], arrays[START], band.values)
        probability = np.exp(-np.fmax(np.where(np.isnan(change), np.inf, change), 0.0))
        if op.options.evaluate:
            band.sums[op.cycle, ACCEPTANCE] = float(probability.sum())
        if op.options.adapt:
            self._learn_step(probability)
        for name in PATH:
            arrays.pop(name, None)

    def go(self, block: Block, op: Op, workspace: Workspace) -> None:
        """Go the whole path in one call, where a single block has all data of the rows."""
        adapt, theta, chance = op.options.adapt, self.band.values, self.chance
        self.begin(adapt, chance)
        arrays, change = self.band.arrays, np.empty(len(theta))
        moving = arrays[MOMENTUM], arrays[SPREAD], arrays[GRADIENT], arrays[MASS], arrays[FITS]
        precision = 1.0 / self.program.hyper.dispersion
        numbers = precision, self.weight if adapt else 0.0, self.sampler.steps
        path = RowPaths(theta, arrays.get(PLACE, theta), *moving, change, *self._prior(), *numbers)
        blockwise.go_path(block, self.factor, path, workspace)
        self.end(op, change, chance)

    def add_slope(self, block: Block, visit: int, workspace: Workspace) -> None:
        """Add a block's share of the gradient, and at the path's ends of the fits."""
        arrays = self.band.arrays
        fits = arrays[FITS] if visit in (0, self.sampler.steps) else None
        sums = Sums.of(self.factor, len(block[2]), arrays[GRADIENT], fits=fits)
        blockwise.accumulate(block, "score", sums, workspace)

    def move(self, visit: int, op: Op) -> None:
        """Drift, kick or decide at the end of pass number ``visit`` of the path."""
        steps, arrays, adapt = self.sampler.steps, self.band.arrays, op.options.adapt
        if visit == 0:
            self.begin(adapt, self.chance)
            arrays[ENERGY] = self.energy()
            if adapt:
                pull = np.zeros_like(self.band.values)
                self.kick(pull, np.ones_like(pull), 1.0)
                average_square(arrays[MASS], pull, self.weight)
        self.kick(arrays[MOMENTUM], arrays[SPREAD], 0.5 if visit in (0, steps) else 1.0)
        if visit < steps:
            self.drift()
        else:
            self.end(op, self.energy() - arrays[ENERGY], self.chance)

    def _learn_step(self, probability: Wide) -> None:
        """Take one step of every row's dual averaging."""
        band, sampler = self.band, self.sampler
        start = math.log(first_step(sampler.step, band.values.shape[1]))
        steps = band.arrays[STEPS]
        _, average, error = steps.T
        band.counts[ADAPTED] += 1
        excess = sampler.target_accept - probability
        learnt = dual_average(start, average, error, band.counts[ADAPTED], excess)
        for column, values in enumerate(learnt):
            steps[:, column] = values


@dataclass(frozen=True)
class BlockHMC(Sampler):
    """Hamiltonian Monte Carlo on every row of W given H, then on every column of H given W.

    Exact, in parallel, and with an acceptance that does not fall with the size of the data:
    given the other factor rows are independent, so each goes ``steps`` leapfrog steps

        p ← p + ½ε G,   θ ← θ + ε p / m,   p ← p + ½ε G

    with a step ε of its own and accepts where they lead by a test of its own. θ < 0 is the
    mirror image of -θ: an entry that passes zero comes back with its momentum turned. Under
    priors of shape a < 1 the path is one of θ^a, and at the temperatures of an evidence one of
    log θ. The mass m of an entry is the mean square of
    its gradient, which is the information, and at zero what the prior and the data push with.

    Steps and masses are learnt while tuning, in every cycle of it, and then kept: a few hundred
    tuning cycles make them good. ``step_size`` in the results is the mean of all rows' steps,
    ``acceptance_rate`` that of their acceptance probabilities.

    Parameters
    ----------
    step
        ``"auto"`` learns ε of every row by dual averaging; a number, in units of 1/√m,
        fixes it for all. Each path takes ε times a random factor e^(0.1 z).
    steps
        Leapfrog steps of a path. A cycle takes twice one more passes over the data, each two
        of the three matrix products of a gradient.
    target_accept
        Mean acceptance rate of every row that tuning aims at, between 0 and 1.
    warm_start
        Passes of multiplicative updates before the chain starts; ``"auto"`` takes
        100, down to 20 where a pass is dear (beyond 10⁹ entries times components), and up to
        2000 where it is cheap, while the log density still rises.

    Raises
    ------
    OptionError
        If an option is not one of these.

    Notes
    -----
    Neal 2011, "MCMC using Hamiltonian dynamics", section 5.3.2 and, for the reflection,
    5.5.1.5; Hoffman and Gelman 2014, "The No-U-Turn Sampler", section 3.2.1. Rows that are
    independent given the other factor: Şimşekli et al. 2017, section 2.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), dfac.BlockHMC(steps=4), **run)
    >>> trace["posterior"]["H"].shape
    (1, 20, 2, 15)
    """

    on_device: ClassVar[bool] = True
    biased: ClassVar[bool] = False
    reason: ClassVar[str] = "exact, and quick enough on data of this size"
    step: float | Literal["auto"] = "auto"
    steps: int = 4
    target_accept: float = 0.8
    warm_start: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_leapfrog(self)

    def efficiency(self, model: Any, data: BlockedData) -> float:
        """Return the most for runs of seconds, 0 for runs of hours, else a measured value."""
        size = pass_size(model, data) + ROW_PRICE * sum(data.shape) * model.n_components
        if size <= QUICK and observations_per_parameter(model, data) >= INFORMED:
            return EFFICIENCY
        return LARGE_EFFICIENCY if size <= BEARABLE else 0.0

    def kernel(self, model: Any, data: Data = None, on_device: bool = False) -> Kernel:
        self._check(model, data, on_device)
        visits, factors = self.steps + 1, 2 if data is None else len(data.grid.sides)
        alone = data is not None and data.grid.parts == 1
        # A visit is two thirds of a gradient; both ends of a path take fits, too.
        work = Work(1, factors * (1 if alone else visits), visits + 2 / 3)
        schedule = Passes(factors * visits, factors)
        return BlockHMCKernel(self, schedule, RECORDED | KEPT | PATH, work)


class BlockHMCKernel(Kernel):
    """Paths of all rows of a factor given the others, one factor after the other."""

    statistics: ClassVar[tuple[Variable, ...]] = (
        statistic(ACCEPTANCE, "acceptance probability of the proposal"),
    )
    rescales_every: ClassVar[int | None] = HYPER_EVERY
    adapts_always: ClassVar[bool] = True

    def init(self, band: FactorBand, factor: int, denominator: Array, hyper: Any) -> None:
        """Give a band the masses m = c / (θ + 1/c), and the first step.

        These masses are no less than the expected information.
        """
        band.counts.setdefault(LOGARITHMS, 0)
        rate, shape = band_prior(band, hyper, factor)
        c = denominator / hyper.dispersion + rate
        near = band.values + 1.0 / c
        power = power_of(band, shape)
        steep = near if not power else near ** (1.0 - power) / power
        mass = c / near * (1.0 if power == 1 else steep) ** 2
        band.arrays[MASS] = mass.astype(band.values.dtype)
        start = math.log(first_step(self.options.step, band.values.shape[1]))
        steps = np.repeat([[start, start, 0.0]], len(band.values), axis=0)
        band.arrays[STEPS] = on_device_of(band.values, steps)
        band.counts[ADAPTED] = 0

    def retune(self, band: FactorBand, factor: int, size: Array, hyper: Any) -> None:
        """Multiply a band's columns; masses go with them."""
        super().retune(band, factor, size, hyper)
        power = power_of(band, float(hyper.prior(factor)[1]))
        by = (size ** (-2.0 * power)).astype(band.values.dtype)
        band.arrays[MASS] *= on_device_of(band.values, by)

    def step(self, program: Program, visit: Visit) -> None:
        """Add the block's share of one side's gradient; move that side at a pass's end.

        A single block has all of a row's data: a path is then one operation.
        """
        op, data, bands, workspace = visit
        parts = data.grid.parts
        visits = self.options.steps + 1 if parts > 1 else 1
        number, position = divmod(op.iteration % (len(bands) * visits * parts), parts)
        factor, passed = divmod(number, visits)
        band = bands[factor]
        power = power_of(band, float(program.hyper.prior(factor)[1]))
        path = Path(self.options, program, band, factor, op.cycle, power)
        law = law_of(program.likelihood, op.block, bands[COLUMNS])
        block = data.view(*op.block), law, values_of(bands), program.floor
        if passed == 0 and position == 0:
            band.arrays[GRADIENT] = np.zeros_like(band.values)
            band.arrays[FITS] = zeros_on_device_of(band.values, (len(band.values),), np.float64)
        with np.errstate(all="ignore"):  # a path may run away: it is then not accepted
            if parts == 1 and is_on_host(band.values):
                path.go(block, op, workspace)
                return
            for visited in range(self.options.steps + 1) if parts == 1 else (passed,):
                path.add_slope(block, visited, workspace)
                if position == parts - 1:
                    path.move(visited, op)
