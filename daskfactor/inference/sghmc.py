"""Langevin dynamics with momentum on conflict-free parts, real-valued and non-negative.

Real-valued entries move in a metric of their row; non-negative ones move as squared lengths
of vectors (see `daskfactor.kernels.squares`), in the majoriser's metric.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

from numpy.typing import NDArray

from daskfactor.checks import positive_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Cyclic, Proportional, Reshuffled, Schedule
from daskfactor.errors import ModelError
from daskfactor.executors.plan import Op
from daskfactor.executors.state import FactorBand
from daskfactor.inference.base import Data, Sampler, check_schedule, count_parts
from daskfactor.inference.normal_parameters import WEIGHTS, column_table, quadratic_form
from daskfactor.inference.program import (
    HYPER_EVERY,
    METRIC,
    RECORDED,
    SHIFT,
    Arrays,
    ArraySpec,
    Kernel,
    Program,
    Visit,
    Work,
    unshifted,
)
from daskfactor.inference.steps import ConstantStep, Step, checked_step
from daskfactor.kernels.philox import Address
from daskfactor.kernels.steps import (
    drift,
    flight,
    kick_drift,
    kick_flight,
    refresh,
    refresh_length,
    to_host,
)

Array = NDArray[Any]

CYCLE_STEP = 0.12
"""Squared length of a cycle, in units of the metric: B² times the automatic step."""
CYCLE_FRICTION = 0.05
"""A cycle keeps exp(-friction) of the momentum.

Two things pull against each other. Directions that the data hold loosely cross their
spread in about friction / CYCLE_STEP cycles; and visiting the parts in random order
heats the momentum by about 0.05 CYCLE_STEP² / friction, which widens the posterior by
as much (measured on ratings with K = 32, B = 2 and 4, and on a small case against Gibbs
sampling: 2 to 3 % of the variance here, none with B = 1). A smaller step with less
friction mixes as fast with less heat, but takes longer to cool down from its start.
"""
SQUARES_LENGTH, SQUARES_FRICTION, SHORT_LENGTH, FEW_CELLS = 1.1, 0.2, 0.5, 20
"""Length of a cycle of squared lengths, its friction, and its length for one or two components,
or for fewer cells in a row or column than so many.

√2 is as far as leapfrog steps are stable where W and H move together; more friction than 0.3
shifts means, by the order of the parts, and less than 0.2 mixes no faster where data say little.
One component alone strays far from its mean, and the metric from what it would be there; so do
sums over few cells: of 3 x 4 to 6 x 6 with four components, a length of 1.1 made variances 1.0
(Poisson) to 2.1 (gamma) times as large and 0.6 0.98 to 1.01; of 12 x 12 1.1 makes 0.99 to 1.04.
"""
WITH_REPLACEMENT = 64
"""Part of the step where parts are drawn with replacement: their noise heats the momentum in
proportion to it (twice the variance at the whole step, 1.2 times at a fifth, with B = 3)."""
LEAST_SHAPE = 0.5
EFFICIENCY, SHORT_EFFICIENCY = 5.0, 1.5
"""2 to 16 times the draws of `PSGLD` a second, 5 as a rule; fewer at short steps."""
MOMENTUM, SPIN = "momentum", "spin"
"""Momentum along a vector whose squared length an entry is, and across it."""
REAL_VALUED: Arrays = RECORDED | WEIGHTS | {MOMENTUM: ArraySpec()}
SQUARES: Arrays = RECORDED | dict.fromkeys((MOMENTUM, SPIN), ArraySpec()) | METRIC
ACROSS = 2
"""Added to the factor in the address of the numbers that refresh it."""


def automatic_momentum_step(blocks: int, n_components: int) -> ConstantStep:
    """Return the step at which a cycle has the length √0.12 for any number of blocks.

    A row whose few entries lie in one block is kicked once a cycle, B times as hard,
    so that what bounds the step is the length of a cycle, B √step: the largest
    curvatures in the metric are about 4, and a cycle of length 1 is unstable. With one
    component, single entries stray further from their mean square.
    """
    return ConstantStep(CYCLE_STEP * min(1.0, n_components / 2) / blocks**2)


def slowed(step: ConstantStep, schedule: object) -> ConstantStep:
    """Return the step that suits an order of the parts, given that of orders that visit all."""
    drawn = isinstance(schedule, Proportional)
    return ConstantStep(step.size / WITH_REPLACEMENT) if drawn else step


@dataclass(frozen=True)
class SGHMC(Sampler):
    r"""Stochastic-gradient Hamiltonian Monte Carlo on conflict-free parts of the data.

    Every part kicks the momentum p and lets the factors drift; once a cycle the
    momentum is partly replaced by noise. Of a :class:`GaussianMF` (D is the metric of a row,
    ε the step):

        p ← p + √ε D½ G,   x ← x + √ε D½ p,   p ← e^(-f) p + √(1 - e^(-2f)) z

    Entries of non-negative models with gamma priors of shape a are squared lengths,
    θ = \|u\|² / (4c), of vectors of 2a dimensions, with c the averaged denominator of the
    multiplicative update. That takes zero for a place like any other, and every entry to
    about the same scale; the diffusion of u is the one of which :class:`PSGLD` takes steps:

        p ← p + √ε √(θ/c) (G - λ) u / \|u\|,   u ← u + √ε p,   p ← e^(-f) p + √(1 - e^(-2f)) z

    A kick is at most 1 + \|u\|. Parts come in the same order in every cycle:
    errors then are of second order in √ε, where a random order would heat the momentum.
    On 2 x 2 data of laws of β = 0 and -1 with one component, variances of WH come out 1.1 to 2.6
    times as large at the automatic step, and right at half of it; on 4 x 4 within 15 %.
    ``sampler="auto"`` takes :class:`BlockHMC` for such data.

    Parameters
    ----------
    step
        ``"auto"`` (a cycle of length √0.12 in units of the metric, of 1.1 for non-negative
        models, 0.5 if these have one or two components, rows or columns of less than 20 observed
        cells, or parts in random order; an eighth of it where parts are drawn with replacement;
        whatever the number of blocks), a number, or a step such as ``ConstantStep``.
    friction
        f, without a unit: a cycle keeps the share e^(-f) of the momentum; ``"auto"`` is 0.05,
        0.2 for non-negative models.
    schedule
        Order of the parts; ``"auto"`` reshuffles it every cycle, and is ``Cyclic()`` for
        non-negative models.
    warm_start
        Passes of multiplicative updates before a chain of a non-negative model starts, as for
        :class:`PSGLD`. A chain of a :class:`GaussianMF` starts from the prior.

    Raises
    ------
    ModelError
        When used with a prior of shape below ½.

    See Also
    --------
    Gibbs : Exact draws of a `GaussianMF`, at many times the price of each.
    BlockHMC : Draws of non-negative models without any bias, in several passes each.

    Notes
    -----
    Chen, Fox and Guestrin 2014, "Stochastic gradient Hamiltonian Monte Carlo",
    section 3, in the splitting of Leimkuhler and Matthews 2013 ("BAOAB"), on the
    parts of Şimşekli et al. 2015, section 3. Squared lengths are our own.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), dfac.SGHMC(), **run)
    >>> trace["posterior"]["H"].shape
    (1, 20, 2, 15)
    """

    step: Step = "auto"
    friction: float | Literal["auto"] = "auto"
    schedule: Schedule | Literal["auto"] = "auto"
    warm_start: int | Literal["auto"] = "auto"

    on_device: ClassVar[bool] = True
    _real_valued: ClassVar[bool] = True
    reason: ClassVar[str] = "momentum makes the most of a pass over the data"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.friction != "auto":
            object.__setattr__(self, "friction", positive_number("friction", self.friction))
        if self.schedule != "auto":
            check_schedule(self.schedule)
        object.__setattr__(self, "step", checked_step(self.step))

    def efficiency(self, model: Any, data: BlockedData) -> float:
        """Return the most: draws of `Gibbs` take ten times as long and forget twice as fast."""
        long = not model.nonnegative or takes_long_steps(model, data)
        return EFFICIENCY if long else SHORT_EFFICIENCY

    def kernel(self, model: Any, data: Data = None, on_device: bool = False) -> Kernel:
        squares = bool(model.nonnegative)
        self._check(model, data, on_device, tensors=squares)
        friction, warm_start = self.friction, self.warm_start if squares else 0
        if friction == "auto":
            friction = SQUARES_FRICTION if squares else CYCLE_FRICTION
        schedule: Any = self.schedule
        if schedule == "auto":
            schedule = Cyclic() if squares else Reshuffled()
        values = {"friction": friction, "schedule": schedule, "warm_start": warm_start}
        options, parts, step = replace(self, **values), count_parts(data), cast("Any", self.step)
        if squares:
            _check_shapes(model)
        if step == "auto" and (squares or data is None):  # without data it is not taken
            step = squares_step(model, data, schedule)
        elif step == "auto":
            step = slowed(automatic_momentum_step(parts, model.n_components), schedule)
        kind, arrays = (SquaresKernel, SQUARES) if squares else (MomentumKernel, REAL_VALUED)
        return kind(options, schedule, arrays, Work(parts), step)


def _check_shapes(model: Any) -> None:
    """Refuse priors whose vectors have, or may come to have, less than one dimension."""
    for name in ("shape_w", "shape_h"):
        shape = getattr(model, name)
        if shape == "auto" or shape < LEAST_SHAPE:
            raise ModelError(
                f"SGHMC() takes gamma priors of shape 0.5 or more, got {name}={shape!r}; pass "
                "such a number, or use PSGLD(), which takes any"
            )


class MomentumKernel(Kernel):
    """Kicks and drifts of real-valued entries, in a metric of their row."""

    learns_every: ClassVar[int] = HYPER_EVERY

    def step(self, program: Program, visit: Visit) -> None:
        """Kick and drift both bands; at a cycle's end refresh the momentum in between."""
        gradients = program.gradient(visit, self._gathered(visit))
        for factor, band in enumerate(visit.bands):
            self._move(program, visit.op, band, gradients[factor], factor)
        self._learn_metric(program, visit)

    def _move(self, program: Program, op: Op, band: FactorBand, grad: Array, factor: int) -> None:
        table = column_table(program.hyper, band.values.shape[1])[factor]
        columns = table.astype(band.values.dtype)
        momentum, weights = band.arrays[MOMENTUM], band.arrays["weights"]
        if SHIFT in band.arrays:  # the kernel's prior means are the same for all rows
            grad += columns[1] * band.arrays[SHIFT]
        size = program.step_size(op.iteration)
        share = 0.5 if op.last else 1.0
        kick_drift(band.values, momentum, grad, weights, columns, size, share)
        if op.last:
            address = program.address(band, op.iteration, factor)
            self.refresh(band, address, keep=math.exp(-self.options.friction))
            drift(band.values, momentum, weights, columns, size, share)

    def refresh(
        self, band: FactorBand, address: Address, shape: float = 1.0, keep: float = 0.0
    ) -> None:
        """Draw the momentum anew, but for the share ``keep`` of it that a cycle keeps."""
        refresh(band.arrays[MOMENTUM], keep, *address)

    def log_prior(self, program: Program, band: FactorBand, factor: int) -> float:
        """Return the log prior density of a band, but for its constant."""
        table = column_table(program.hyper, band.values.shape[1])[factor]
        return quadratic_form(to_host(unshifted(band)), table)


def takes_long_steps(model: Any, data: Any) -> bool:
    """Return whether sums over components, and over a row's or column's cells, are of many."""
    cells = data.total_observed
    return bool(model.n_components > 2 and cells >= FEW_CELLS * max(data.shape))


def squares_step(model: Any, data: BlockedData | None, schedule: object) -> ConstantStep:
    """Return the step at which a cycle has the length that suits model, data and schedule."""
    drawn = isinstance(schedule, Proportional)
    long = data is not None and takes_long_steps(model, data)
    long &= drawn or isinstance(schedule, Cyclic)  # random orders heat, long steps most
    length = SQUARES_LENGTH if long else SHORT_LENGTH
    return slowed(ConstantStep((length / count_parts(data)) ** 2), schedule)


class SquaresKernel(MomentumKernel):
    """Kicks and flights of non-negative entries, which are squared lengths of vectors."""

    rescales_every: ClassVar[int | None] = HYPER_EVERY
    log_prior = Kernel.log_prior

    def _move(self, program: Program, op: Op, band: FactorBand, grad: Array, factor: int) -> None:
        along, across, metric = (band.arrays[name] for name in (MOMENTUM, SPIN, "metric"))
        grad, (rate, shape) = program.prior_of(band, factor, grad)
        size = math.sqrt(program.step_size(op.iteration))
        share = 0.5 if op.last else 1.0
        kick_flight(band.values, along, across, grad, metric, rate, size, share)
        if not op.last:
            return
        address = program.address(band, op.iteration, factor)
        self.refresh(band, address, shape, math.exp(-self.options.friction))
        flight(band.values, along, across, metric, share * size)

    def refresh(
        self, band: FactorBand, address: Address, shape: float = 1.0, keep: float = 0.0
    ) -> None:
        super().refresh(band, address, shape, keep)
        key, iteration, factor, row = address
        if shape == 1.0:  # one dimension across, of either sign
            refresh(band.arrays[SPIN], keep, key, iteration, factor + ACROSS, row)
        else:
            refresh_length(band.arrays[SPIN], keep, shape, *address)
