"""Langevin dynamics with momentum on conflict-free parts, real-valued and non-negative.

Real-valued entries move in a metric of their row; non-negative ones move as squared lengths
of vectors (see `daskfactor.kernels.squares`), in the majoriser's metric.

Between segments of a real-valued model the driver has the whole state, and so all that the
full conditionals of the hyperparameters need: sums of squares of the columns and the residual
sum of squares. Every draw of them has an address, (seed, chain, cycle).
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import positive_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Cyclic, Reshuffled, Schedule
from daskfactor.errors import ModelError
from daskfactor.executors.base import Executor
from daskfactor.executors.plan import Op
from daskfactor.executors.state import ChainState, FactorBand, make_state
from daskfactor.inference.base import (
    HYPER_EVERY,
    METRIC,
    MOMENTS,
    Bands,
    ConstantStep,
    Sampler,
    Setting,
    Step,
    StepSize,
    Track,
    check_schedule,
    checked_step,
)
from daskfactor.inference.chain import Arrays, Chain, TrackRun, TweedieChain
from daskfactor.inference.links import LINKS, draw_link, telling
from daskfactor.inference.multiplicative import OnStep
from daskfactor.inference.program import (
    COLUMNS,
    ROWS,
    SHIFT,
    Fit,
    Program,
    evaluate,
    learn_metric,
    normalizer,
    prepare_state,
    unshifted,
)
from daskfactor.kernels.langevin import drift, kick_drift, refresh, sums_of_squares
from daskfactor.kernels.squares import flight, kick_flight, refresh_length
from daskfactor.kernels.views import Workspace
from daskfactor.models.gaussian import BIAS_SHARE, NOISE_RATE, GaussianHyper, GaussianMF
from daskfactor.models.settings import EFFECTIVE
from daskfactor.random import Stream, generator

Array = NDArray[Any]
Counted = tuple[Array, int]

LINK_PRECISIONS = ("link_precision_w", "link_precision_h")
NO_FLOOR = -math.inf
HOLD = 20
"""First cycles at which the hyperparameters stay where they start: the factors, still
far from the data, would tell them that the components are not needed."""
SPREAD = 0.3
"""Weight in a row's metric of the curvature that few observations concentrate."""
LEARN = 0.3
"""Weight of the latest segment in the metric's ratios, while they are learnt."""
LEAST_RATIO, LARGEST_RATIO = 0.1, 100.0
RUNAWAY = 1e3
"""A chain whose mean squared residual is this many times the data's variance has diverged."""
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
SQUARES_LENGTH, SQUARES_FRICTION, SHORT_LENGTH = 1.1, 0.2, 0.5
"""Length of a cycle of squared lengths, its friction, and its length for one or two components.

√2 is as far as leapfrog steps are stable where W and H move together; more friction than 0.3
shifts means, by the order of the parts, and less than 0.2 mixes no faster where data say little.
One component alone strays far from its mean, and the metric from what it would be there.
"""
LEAST_SHAPE = 0.5
SPIN = "spin"
"""Momentum across a vector whose squared length an entry is; ``"momentum"`` is that along it."""


def automatic_momentum_step(blocks: int, n_components: int) -> ConstantStep:
    """The step at which a cycle has the length √0.12 whatever the number of blocks.

    A row whose few entries lie in one block is kicked once a cycle, B times as hard,
    so that what bounds the step is the length of a cycle, B √step: the largest
    curvatures in the metric are about 4, and a cycle of length 1 is unstable. With one
    component, single entries stray further from their mean square.
    """
    return ConstantStep(CYCLE_STEP * min(1.0, n_components / 2) / blocks**2)


def observation_weights(observed: Array, n_components: int, squares: Array | None = None) -> Array:
    """Weigh the data of rows for their metric, by their observed entries (n,): (n, 1).

    n + 0.3 (K + 2 √(nK)): the observations of a row span at most n directions, in which
    the largest curvature is up to (√n + √K)² times an entry's (Marchenko and Pastur). Of cells
    with weights n is the sum of these and, given their summed ``squares``, a row counts
    as n² / squares entries of weight squares / n.
    """
    n = np.asarray(observed, dtype=np.float64)
    heavy = np.ones_like(n)
    if squares is not None:
        np.divide(squares, n, out=heavy, where=n > 0)
    spread = SPREAD * (n_components * heavy + 2.0 * np.sqrt(n * heavy * n_components))
    return (n + np.where(n > 0, spread, 0.0))[:, None]


def warm_start(
    data: BlockedData,
    model: GaussianMF,
    seed: int,
    chain: int,
    executor: Executor,
    arrays: tuple[str, ...] = ("momentum", "weights", *MOMENTS),
) -> tuple[ChainState, GaussianHyper]:
    """Draw the first state from the prior, momentum at rest, with its hyperparameters."""
    nothing = [np.zeros((length, model.n_components)) for length in data.shape]
    fit = evaluate(executor, data, _packed(data, model, nothing), model.likelihood, NO_FLOOR)
    hyper = model.start(data.mean, data.variance or fit.pearson / data.total_mass)
    factors = []
    for number, precisions in enumerate((hyper.precision_w, hyper.precision_h)):
        rng = generator(seed, chain, Stream.START, number)
        size = data.shape[number], model.n_components
        factors.append(rng.normal(size=size) / np.sqrt(precisions))
    state = _packed(data, model, factors)
    prepare_state(state, [name for name in arrays if name != "weights"])
    if "weights" in arrays:
        _weigh(state, data, model)
    return state, hyper


def _weigh(state: ChainState, data: BlockedData, model: GaussianMF) -> None:
    """Give every band the weights of its rows, one column."""
    _, rows, cols, row_squares, col_squares = data.mass
    sides = (state.rows, rows, row_squares), (state.cols, cols, col_squares)
    for bands, observed, squares in sides:
        for band in bands:
            own = slice(band.offset, band.offset + len(band.values))
            weights = observation_weights(observed[own], model.n_components, squares[own])
            band.arrays["weights"] = weights.astype(band.values.dtype)


def _packed(data: BlockedData, model: GaussianMF, factors: list[Array]) -> ChainState:
    """Make the state of W and Hᵀ with biases at the mean of the data."""
    packed = [
        model.pack(side, factor, np.full(len(factor), level), data.mean).astype(data.dtype)
        for side, factor, level in zip(("rows", "columns"), factors, (0.0, data.mean), strict=True)
    ]
    return make_state(data.grid, *packed)


@lru_cache(maxsize=64)
def column_table(hyper: GaussianHyper, width: int) -> tuple[Array, Array]:
    """Make the tables of columns that the momentum kernels take, for W and for H: (4, K') each.

    Rows: prior mean, prior precision, curvature for each unit of data, 1 where it moves.
    ``width`` is K', which tells whether there are biases; the tables are not to be changed.
    """
    K = len(hyper.precision_w)
    biases = width == K + 2
    tables = []
    for factor, own, other, ratio in (
        (ROWS, hyper.precision_w, hyper.precision_h, hyper.ratio_w),
        (COLUMNS, hyper.precision_h, hyper.precision_w, hyper.ratio_h),
    ):
        table = np.zeros((4, width))
        table[1] = 1.0
        table[1, :K] = own
        table[2, :K] = ratio / (hyper.noise * np.asarray(other))
        table[2, K:] = 1.0 / hyper.noise
        table[3, :K] = 1.0
        if biases:
            rows = factor == ROWS
            mean = 0.0 if rows else hyper.mean
            precision = hyper.row_bias_precision if rows else hyper.column_bias_precision
            table[:, K if rows else K + 1] = mean, precision, 1.0 / hyper.noise, 1.0
        tables.append(table)
    return tables[0], tables[1]


def quadratic_form(values: Array, columns: Array) -> float:
    """Return -½ Σ λ (x - m)² over the columns that move: log-prior but for its constant."""
    mean, precision, _, free = columns
    squares = np.zeros(values.shape[1])
    sums_of_squares(values, mean, squares)
    return float(-0.5 * np.sum(free * precision * squares))


def log_prior_constant(model: GaussianMF, hyper: GaussianHyper, shape: tuple[int, int]) -> float:
    """Return what `quadratic_form` leaves out of log p(W) + log p(H), biases included."""
    result = 0.0
    for length, table in zip(shape, column_table(hyper, model.width), strict=True):
        free = table[3] > 0
        result += 0.5 * length * float(np.sum(np.log(table[1, free] / (2 * math.pi))))
    return result


def _gamma(rng: np.random.Generator, shape: Any, rate: Any) -> Any:
    return rng.gamma(shape, 1.0 / np.asarray(rate))


class GaussianChain(Chain):
    """A chain of a `GaussianMF`."""

    hyper: GaussianHyper
    priors: GaussianHyper
    floor = NO_FLOOR

    def __init__(self, setting: Setting, number: int) -> None:
        super().__init__(setting, number)
        self.model, self.data = cast("GaussianMF", setting.model), setting.data
        self.linked = [at for at, own in enumerate(self.model.covariates) if own is not None]
        self.links: Arrays = {}

    def start(self, on_step: OnStep | None = None, first: Chain | None = None) -> None:
        """Draw from the prior, whose scales fit mean and variance of the data."""
        del on_step, first
        setting = self.setting
        seed, arrays = setting.options.seed, setting.sampler.arrays
        state, self.hyper = warm_start(
            setting.data, self.model, seed, self.number, setting.executor, arrays
        )
        self.priors = self.hyper
        self.links = {
            name: np.zeros((own.shape[1], self.model.width))
            for name, own in zip(LINKS, self.model.covariates, strict=True)
            if own is not None
        }
        self.tracks = [TrackRun.of(setting.sampler.tracks[0], setting, state)]

    def attrs(self) -> dict[str, float]:
        """Return hyperparameters; the noise is the mean over the draws, as predictions take it."""
        values = {
            "dispersion": self.mean_dispersion,
            "precision_w": float(np.mean(self.hyper.precision_w)),
            "precision_h": float(np.mean(self.hyper.precision_h)),
        }
        if self.model.biases:
            values["row_bias_precision"] = self.hyper.row_bias_precision
            values["column_bias_precision"] = self.hyper.column_bias_precision
        return values

    def memory(self) -> dict[str, Any]:
        return {
            "hyper": self.hyper.to_dict(),
            "priors": self.priors.to_dict(),
            "noise": [self.noise_sum, self.noise_draws],
            **self.links,
            **self.means,
        }

    def recall(self, memory: dict[str, Any]) -> None:
        self.hyper = GaussianHyper.from_dict(memory["hyper"])
        self.priors = GaussianHyper.from_dict(memory["priors"])
        self.noise_sum, self.noise_draws = memory["noise"]
        self.links = {name: memory[name] for name in LINKS if name in memory}
        means = (f"{name}_mean" for name in LINKS)
        self.means = {name: memory[name] for name in means if name in memory}

    def _note(self, run: TrackRun, cycle: int, fit: Fit, learnt: Arrays) -> None:
        super()._note(run, cycle, fit, learnt)
        draw = run.options.draw_index(cycle)
        if draw is not None:  # one by one: the same bits wherever a segment ends
            for name, link in self.links.items():
                before = self.means.get(f"{name}_mean", np.zeros_like(link))
                mean = before + (link - before) / (draw + 1)
                self.means = self.means | {f"{name}_mean": mean}

    def _learn(self, run: TrackRun) -> None:
        fit, tuning = run.fits[run.cycle - 1], run.cycle <= self.setting.frozen_from
        if not math.isfinite(fit.pearson):
            return  # the segment is run again
        self.hyper = self.draw_hyper(self.hyper, run.state, fit, run.cycle, tuning)

    def learnt(self, run: TrackRun) -> Arrays:
        """Return noise, links, and the precisions of all columns; NaN of those that do not move."""
        del run
        tables = column_table(self.hyper, self.model.width)
        of_w, of_h = (np.where(table[3] > 0, table[1], np.nan) for table in tables)
        found = {"noise": np.asarray(self.hyper.noise), "precision_w": of_w, "precision_h": of_h}
        found |= {name: link.astype(self.data.dtype) for name, link in self.links.items()}
        for factor in self.linked:
            name = LINK_PRECISIONS[factor]
            found[name] = np.asarray(getattr(self.hyper, name))
        count = self.data.total_mass
        effective = self.model.effective_components(self.hyper, count, self.data.shape)
        return found | {EFFECTIVE.name: np.asarray(effective)}

    def _prior_constant(self) -> float:
        return log_prior_constant(self.model, self.hyper, self.setting.data.shape)

    def _ran_away(self, run: TrackRun) -> bool:
        count = self.setting.data.total_mass
        variance = 1.0 / (BIAS_SHARE * self.priors.row_bias_precision)  # of the data
        limit = RUNAWAY * variance * count
        return any(fit.pearson > limit for fit in run.fits.values())

    def _lp(self, fit: Fit) -> float:
        """Return -Σ (v - μ)² / (2φ) - n/2 log(2πφ)."""
        noise, count = self.hyper.noise, self.setting.data.effective
        if self.data.weights is not None:
            return -0.5 * fit.pearson / noise - 0.5 * count * math.log(noise) + self.constant
        return -0.5 * fit.pearson / noise - 0.5 * count * math.log(2 * math.pi * noise)

    @cached_property
    def constant(self) -> float:
        """What log-likelihoods of cells with weights have besides their residuals, at noise 1."""
        return normalizer(self.data, 1.0, self.model.likelihood, self.setting.executor)

    # -- hyperparameters -------------------------------------------------------

    def draw_hyper(
        self, hyper: GaussianHyper, state: ChainState, fit: Fit, cycle: int, tuning: bool
    ) -> GaussianHyper:
        """Draw the hyperparameters of the next cycles, given a state, its fit and its cycle.

        ``tuning``: whether the metric's ratios still learn.
        """
        if tuning:
            if "weights" in self.setting.sampler.arrays:
                hyper = self._learn_ratios(hyper, state)
            if cycle < HOLD:
                return hyper
        rng = generator(self.setting.options.seed, self.number, Stream.HYPER, cycle)
        if self.model.noise == "auto":
            rate = 0.5 * fit.pearson + NOISE_RATE * self.priors.noise
            noise = 1.0 / _gamma(rng, 1.0 + 0.5 * self.data.effective, rate)
            hyper = hyper._replace(noise=float(noise))
        hyper = self._draw_links(hyper, state, rng)
        hyper = self._draw_precisions(hyper, state, rng)
        if self.model.biases:
            hyper = self._draw_biases(hyper, state, rng)
        self._draw_unobserved(hyper, state, rng)
        return hyper

    def _draw_links(
        self, hyper: GaussianHyper, state: ChainState, rng: np.random.Generator
    ) -> GaussianHyper:
        """Draw the links B, and λ_β ~ Gamma(1 + n/2, 1/λ_β⁰ + ½ Σ λ_k B²) for n entries of B."""
        for factor in self.linked:
            table, name = column_table(hyper, self.model.width)[factor], LINK_PRECISIONS[factor]
            ridge = getattr(hyper, name)
            link = draw_link(self.setting, state, factor, table, ridge, rng)
            self.links = self.links | {LINKS[factor]: link}
            if getattr(self.model, name) == "auto":
                shape = 1.0 + 0.5 * link.shape[0] * np.count_nonzero(table[3])
                rate = 1.0 / getattr(self.priors, name) + 0.5 * float(table[1] @ (link**2).sum(0))
                drawn: Any = {name: float(_gamma(rng, shape, rate))}
                hyper = hyper._replace(**drawn)
        return hyper

    def _draw_unobserved(
        self, hyper: GaussianHyper, state: ChainState, rng: np.random.Generator
    ) -> None:
        """Draw rows (columns) without any data from their prior, where they have covariates."""
        for factor in self.linked:
            mean, precision, _, free = column_table(hyper, self.model.width)[factor]
            columns = np.flatnonzero(free)
            for band, seen, _ in telling(self.setting, state, factor):
                rows = np.flatnonzero(~seen)
                z = rng.normal(size=(rows.size, columns.size)) / np.sqrt(precision[columns])
                centre = mean[columns] + band.arrays[SHIFT][np.ix_(rows, columns)]
                band.values[np.ix_(rows, columns)] = centre + z

    def _sums(self, hyper: GaussianHyper, state: ChainState, factor: int, centre: Array) -> Counted:
        """Return Σ (x - centre)² of every column, band by band, with λ_β Σ B² of its link.

        And how many numbers these are.
        """
        total, count = np.zeros(len(centre)), 0
        for _, _, rows in telling(self.setting, state, factor):
            sums_of_squares(rows, centre, total)
            count += len(rows)
        if factor in self.linked:
            link = self.links[LINKS[factor]]
            total += getattr(hyper, LINK_PRECISIONS[factor]) * (link**2).sum(axis=0)
            count += len(link)
        return total, count

    def _draw_precisions(
        self, hyper: GaussianHyper, state: ChainState, rng: np.random.Generator
    ) -> GaussianHyper:
        """Draw λ_k ~ Gamma(1 + n/2, 1/λ⁰ + ½ Σ x²), for both factors together or the free one."""
        names = ("precision_w", "precision_h")
        sides = [side for side in (ROWS, COLUMNS) if getattr(self.model, names[side]) == "auto"]
        if not sides:
            return hyper
        K, still = self.model.n_components, np.zeros(self.model.width)
        sums = [self._sums(hyper, state, side, still) for side in sides]
        half = sum(0.5 * squares[:K] for squares, _ in sums)
        shape = 1.0 + 0.5 * sum(count for _, count in sums)
        prior = 1.0 / np.asarray(getattr(self.priors, names[sides[0]]))
        drawn = tuple(float(value) for value in _gamma(rng, shape, prior + half))
        values: dict[str, Any] = {names[side]: drawn for side in sides}
        return hyper._replace(**values)

    def _draw_biases(
        self, hyper: GaussianHyper, state: ChainState, rng: np.random.Generator
    ) -> GaussianHyper:
        """Draw precisions of the biases, and the level that those of the columns are around."""
        K, priors, precisions = self.model.n_components, self.priors, []
        for factor, centre, prior in (
            (ROWS, 0.0, priors.row_bias_precision),
            (COLUMNS, hyper.mean, priors.column_bias_precision),
        ):
            squares, count = self._sums(hyper, state, factor, np.full(K + 2, centre))
            rate = 1.0 / prior + 0.5 * float(squares[K + factor])
            precisions.append(float(_gamma(rng, 1.0 + 0.5 * count, rate)))
        told = [rows[:, K + 1] for _, _, rows in telling(self.setting, state, COLUMNS)]
        cols = sum(map(len, told))
        mean = sum(float(levels.sum(dtype=np.float64)) for levels in told) / cols
        mean += float(rng.normal()) / math.sqrt(cols * precisions[1])
        return hyper._replace(
            mean=mean, row_bias_precision=precisions[0], column_bias_precision=precisions[1]
        )

    def _learn_ratios(self, hyper: GaussianHyper, state: ChainState) -> GaussianHyper:
        """Learn the mean squares of the factors where data are, against their prior variances."""
        K, data, ratios = self.model.n_components, self.data, []
        for bands, observed, precision, old in (
            (state.cols, data.mass.cols, hyper.precision_h, hyper.ratio_w),
            (state.rows, data.mass.rows, hyper.precision_w, hyper.ratio_h),
        ):
            total = 0.0
            for band in bands:
                counts = observed[band.offset : band.offset + len(band.values)].astype(np.float64)
                total += float((counts @ band.values[:, :K].astype(np.float64) ** 2).sum())
            latest = total / data.total_mass / float(np.sum(1.0 / np.asarray(precision)))
            ratio = old + LEARN * (latest - old)
            ratios.append(min(max(ratio, LEAST_RATIO), LARGEST_RATIO))
        return hyper._replace(ratio_w=ratios[0], ratio_h=ratios[1])


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

    Parameters
    ----------
    step
        ``"auto"`` (a cycle of length √0.12 in units of the metric, of 1.1 for non-negative
        models, 0.5 if these have one or two components, whatever the number of blocks), a
        number, or a step such as ``ConstantStep``.
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
    Gibbs : exact draws of a `GaussianMF`, at many times the price of each.
    BlockHMC : draws of non-negative models without any bias, in several passes each.

    Notes
    -----
    Chen, Fox and Guestrin 2014, "Stochastic gradient Hamiltonian Monte Carlo",
    section 3, in the splitting of Leimkuhler and Matthews 2013 ("BAOAB"), on the
    parts of Şimşekli et al. 2015, section 3. Squared lengths are our own.
    """

    step: Step = "auto"
    friction: float | Literal["auto"] = "auto"
    schedule: Schedule | Literal["auto"] = "auto"  # type: ignore[assignment]
    warm_start: int | Literal["auto"] = "auto"

    chain: ClassVar[type[Chain]] = GaussianChain
    nonnegative: ClassVar[bool] = False
    tempers: ClassVar[bool] = False
    learns_every: ClassVar[int | None] = HYPER_EVERY

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.friction != "auto":
            object.__setattr__(self, "friction", positive_number("friction", self.friction))
        if self.schedule != "auto":
            check_schedule(self.schedule)
        object.__setattr__(self, "step", checked_step(self.step))

    def suited(self, model: Any) -> "SGHMC":
        """Return the sampler of this kind of model, with what ``"auto"`` is for it."""
        squares = bool(model.nonnegative)
        kind: type[SGHMC] = SquaresSGHMC if squares else type(self)
        friction, schedule, warm = self.friction, self.schedule, self.warm_start if squares else 0
        if friction == "auto":
            friction = SQUARES_FRICTION if squares else CYCLE_FRICTION
        if schedule == "auto":
            schedule = Cyclic() if squares else Reshuffled()
        return kind(self.step, friction, schedule, warm)

    @property
    def keep(self) -> float:
        """Share of the momentum that a cycle keeps."""
        return math.exp(-cast("float", self.friction))

    @property
    def arrays(self) -> tuple[str, ...]:
        return (*MOMENTS, "momentum", "weights")

    def carried(self, width: int) -> tuple[float, float]:
        """Count the weights as one column."""
        own = 4 + 1 / width
        return own, own

    def step_for(self, track: Track, blocks: int, n_components: int) -> StepSize:
        del track
        given: Any = self.step
        return automatic_momentum_step(blocks, n_components) if given == "auto" else given

    def for_compilation(self) -> Self:
        return replace(super().for_compilation(), step="auto", schedule=Cyclic())

    def block_step(
        self, program: Program, op: Op, data: BlockedData, bands: Bands, workspace: Workspace
    ) -> None:
        """Kick and drift both bands; at a cycle's end refresh the momentum in between."""
        gradients = program.gradient(op, data, bands, workspace)
        for factor, band in enumerate(bands):
            self._move(program, op, band, gradients[factor], factor)
        if op.last:
            program.finish_cycle(op, bands)

    def _move(
        self, program: Program, op: Op, band: FactorBand, gradient: Array, factor: int
    ) -> None:
        table = column_table(program.hyper, band.values.shape[1])[factor]
        columns = table.astype(band.values.dtype)
        momentum, weights = band.arrays["momentum"], band.arrays["weights"]
        if SHIFT in band.arrays:  # the kernel's prior means are the same for all rows
            gradient += columns[1] * band.arrays[SHIFT]
        size = program.step_size(op.iteration)
        share = 0.5 if op.last else 1.0
        kick_drift(band.values, momentum, gradient, weights, columns, size, share)
        if op.last:
            refresh(momentum, self.keep, *program.address(band, op.iteration, factor))
            drift(band.values, momentum, weights, columns, size, share)

    def reads(self) -> tuple[str, ...]:
        return ("weights",)

    def writes(self, op: Op) -> tuple[str, ...]:
        del op
        return ("momentum",)

    def log_prior(self, program: Program, band: FactorBand, factor: int) -> float:
        """Return the log prior density of a band, but for its constant."""
        table = column_table(program.hyper, band.values.shape[1])[factor]
        return quadratic_form(unshifted(band), table)


@dataclass(frozen=True)
class SquaresSGHMC(SGHMC):
    """What `SGHMC` is for non-negative models: entries move as squared lengths."""

    friction: float | Literal["auto"] = SQUARES_FRICTION
    schedule: Schedule | Literal["auto"] = field(default_factory=Cyclic)

    chain: ClassVar[type[Chain]] = TweedieChain
    nonnegative: ClassVar[bool] = True
    tempers: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return SGHMC.__name__

    @property
    def arrays(self) -> tuple[str, ...]:
        return (*MOMENTS, "momentum", SPIN, *METRIC)

    carried = Sampler.carried
    log_prior = Sampler.log_prior

    def check_model(self, model: Any) -> None:
        """Refuse priors whose vectors have, or may come to have, less than one dimension."""
        super().check_model(model)
        for name in ("shape_w", "shape_h"):
            shape = getattr(model, name)
            if shape == "auto" or shape < LEAST_SHAPE:
                raise ModelError(
                    f"SGHMC() takes gamma priors of shape 0.5 or more, got {name}={shape!r}; pass "
                    "such a number, or use PSGLD(), which takes any"
                )

    def step_for(self, track: Track, blocks: int, n_components: int) -> StepSize:
        del track
        given: Any = self.step
        length = SQUARES_LENGTH if n_components > 2 else SHORT_LENGTH
        return ConstantStep((length / blocks) ** 2) if given == "auto" else given

    def block_step(
        self, program: Program, op: Op, data: BlockedData, bands: Bands, workspace: Workspace
    ) -> None:
        """Kick both bands and let them drift; gather curvature while the metric is learnt."""
        rows, cols = bands
        adapt = op.wanted.adapt
        gathered = (rows.arrays["gathered"], cols.arrays["gathered"]) if adapt else None
        gradients = program.gradient(op, data, bands, workspace, gathered)
        for factor, band in enumerate(bands):
            self._move(program, op, band, gradients[factor], factor)
            if op.last and adapt:
                learn_metric(band, program.hyper, factor, program.frozen[factor])
        if op.last:
            program.finish_cycle(op, bands)

    def _move(
        self, program: Program, op: Op, band: FactorBand, gradient: Array, factor: int
    ) -> None:
        along, across, metric = (band.arrays[name] for name in ("momentum", SPIN, "metric"))
        gradient, (rate, shape) = program.prior_of(band, factor, gradient)
        size = math.sqrt(program.step_size(op.iteration))
        share = 0.5 if op.last else 1.0
        kick_flight(band.values, along, across, gradient, metric, rate, size, share)
        if not op.last:
            return
        key, iteration, _, row = program.address(band, op.iteration, factor)
        refresh(along, self.keep, key, iteration, factor, row)
        if shape == 1.0:  # one dimension across, of either sign
            refresh(across, self.keep, key, iteration, factor + 2, row)
        else:
            refresh_length(across, self.keep, shape, key, iteration, factor, row)
        flight(band.values, along, across, metric, share * size)

    def reads(self) -> tuple[str, ...]:
        return ("metric",)

    def writes(self, op: Op) -> tuple[str, ...]:
        own = ("momentum", SPIN)
        if not op.wanted.adapt:
            return own
        return (*own, "gathered", *(("curvature", "metric") if op.last else ()))
