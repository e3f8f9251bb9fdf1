"""A chain of a `GaussianMF`: its start, its tables of columns, and what is drawn of its priors.

The full conditionals of the hyperparameters need sums of squares of the columns, which bands give
between segments, and the residual sum of squares. Every draw of them has an address,
(seed, chain, cycle).
"""

import math
from functools import cached_property, lru_cache, partial
from typing import Any, cast

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.base import Executor
from daskfactor.executors.state import ChainState, FactorBand, make_state
from daskfactor.inference.bands import pieces_of, take_array
from daskfactor.inference.chain import Arrays, Chain, TrackRun
from daskfactor.inference.inits import DRAWS
from daskfactor.inference.links import (
    LINK_PRECISIONS,
    LINKS,
    Draw,
    draw_link,
    observed_pieces,
    telling,
)
from daskfactor.inference.multiplicative import OnStep
from daskfactor.inference.passes import Place, evaluate
from daskfactor.inference.program import (
    COLUMNS,
    ROWS,
    SHIFT,
    ArraySpec,
    Fit,
    normalizer,
    prepare_state,
    unshifted,
)
from daskfactor.inference.program import Arrays as Specs
from daskfactor.inference.setting import Setting
from daskfactor.inference.starts import result_state
from daskfactor.inference.symmetries import Prior, draw_symmetries
from daskfactor.kernels.langevin import sums_of_squares
from daskfactor.machine import single_threaded_blas
from daskfactor.models.gaussian import BIAS_SHARE, NOISE_RATE, GaussianHyper, GaussianMF
from daskfactor.models.settings import EFFECTIVE
from daskfactor.random import Stream, generator

Array = NDArray[Any]
Counted = tuple[Array, int]
NO_FLOOR = -math.inf
HOLD = 20
"""First cycles at which the hyperparameters stay where they start: the factors, still
far from the data, would tell them that the components are not needed."""
SYMMETRIES_EVERY = 5
"""Cycles between draws of the sizes and levels that W and H share: each takes a millisecond."""
SPREAD = 0.3
"""Weight in a row's metric of the curvature that few observations concentrate."""
LEARN = 0.3
"""Weight of the latest segment in the metric's ratios, while they are learnt."""
LEAST_RATIO, LARGEST_RATIO = 0.1, 100.0
RUNAWAY = 1e3
"""A chain whose mean squared residual is this many times the data's variance has diverged."""


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


WEIGHTS: Specs = {"weights": ArraySpec(changes="never", columns=1)}
"""Amount of data of each row, for its metric."""


def warm_start(
    data: BlockedData,
    model: GaussianMF,
    seed: int,
    chain: int,
    executor: Executor,
    arrays: Specs = WEIGHTS,
    state: ChainState | None = None,
) -> tuple[ChainState, GaussianHyper]:
    """Prepare a first state, momentum at rest; without one it is drawn from the prior.

    With the hyperparameters that there are before there is a state.
    """
    variance = data.variance
    if not variance:
        nothing = [np.zeros((length, model.n_components)) for length in data.shape]
        at_mean = executor.hold(_packed(data, model, nothing))
        fit = evaluate(Place(executor, data, at_mean, NO_FLOOR), model.likelihood)
        variance = fit.pearson / data.total_mass
    hyper = model.start(data.mean, variance)
    factors = []
    for number, precisions in enumerate((hyper.precision_w, hyper.precision_h)):
        rng = generator(seed, chain, Stream.START, number)
        size = data.shape[number], model.n_components
        factors.append(rng.normal(size=size) / np.sqrt(precisions))
    state = executor.hold(state or _packed(data, model, factors))
    prepare_state(state, arrays)
    if "weights" in arrays:
        _weigh(state, data, model)
    return state, hyper


def _weigh(state: ChainState, data: BlockedData, model: GaussianMF) -> None:
    """Give every band the weights of its rows, one column."""
    _, rows, cols, row_squares, col_squares = data.mass
    for factor, (observed, squares) in enumerate(((rows, row_squares), (cols, col_squares))):
        weights = observation_weights(observed, model.n_components, squares).astype(data.dtype)
        state.each(
            partial(take_array, name="weights"), factor, pieces_of(data.grid, factor, weights)
        )


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
    for factor, precisions, other, ratio in (
        (ROWS, hyper.precision_w, hyper.precision_h, hyper.ratio_w),
        (COLUMNS, hyper.precision_h, hyper.precision_w, hyper.ratio_h),
    ):
        table = np.zeros((4, width))
        table[1] = 1.0
        table[1, :K] = precisions
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


def squares_of(band: FactorBand, rows: Any, centre: Array) -> Counted:
    """Return Σ (x - centre)² of every column over some rows, less shifts; and how many these."""
    values, total = unshifted(band)[rows], np.zeros(len(centre))
    sums_of_squares(values, centre, total)
    return total, len(values)


def sum_of_column(band: FactorBand, rows: Any, column: int) -> tuple[float, int]:
    """Add up some rows of a column, less shifts; with how many these are."""
    values = unshifted(band)[rows][:, column]
    return float(values.sum(dtype=np.float64)), len(values)


def weighted_squares(band: FactorBand, counts: Array, n_components: int) -> float:
    """Return Σ n_i x_ik² over a band's rows i, counted n_i times, and its components."""
    squares = band.values[:, :n_components].astype(np.float64) ** 2
    return float((counts.astype(np.float64) @ squares).sum())


def take_residuals(
    band: FactorBand, rows: Array, residuals: Array, mean: Array, columns: Array
) -> None:
    """Put some rows of some columns at their prior means, plus what they are away from these."""
    at = np.ix_(rows, columns)
    band.values[at] = mean + band.arrays[SHIFT][at] + residuals


def log_prior_constant(model: GaussianMF, hyper: GaussianHyper, shape: tuple[int, int]) -> float:
    """Return what `quadratic_form` leaves out of log p(W) + log p(H), biases included."""
    result = 0.0
    for length, table in zip(shape, column_table(hyper, model.width), strict=True):
        free = table[3] > 0
        result += 0.5 * length * float(np.sum(np.log(table[1, free] / (2 * math.pi))))
    return result


def _gamma(rng: Generator, shape: float, rate: Any) -> Any:
    return rng.gamma(shape, 1.0 / np.asarray(rate))


class GaussianChain(Chain):
    """A chain of a `GaussianMF`."""

    hyper: GaussianHyper
    priors: GaussianHyper
    floor = NO_FLOOR

    def __init__(self, setting: Setting, number: int) -> None:
        super().__init__(setting, number)
        self.model, self.data = cast("GaussianMF", setting.model), setting.data
        self.linked = [at for at, table in enumerate(self.model.covariates) if table is not None]

    def start(self, on_step: OnStep | None = None, first: Chain | None = None) -> None:
        """Draw from the prior, whose scales fit mean and variance of the data, or take a result.

        Given the latter, hyperparameters are drawn.
        """
        del on_step, first
        setting, initial = self.setting, None
        seed, arrays = setting.options.seed, setting.kernel.arrays
        if setting.init.W is not None:
            initial = result_state(self.data, self.model, setting.init, self.number)
        start = self.data, self.model, seed, self.number, setting.executor, arrays
        state, self.hyper = warm_start(*start, initial)
        self.priors = self.hyper
        self.links = {
            name: np.zeros((table.shape[1], self.model.width))
            for name, table in zip(LINKS, self.model.covariates, strict=True)
            if table is not None
        }
        self.tracks = [TrackRun.of(setting.sampler.tracks[0], setting, state)]
        if initial is not None:
            fit = evaluate(self._place(state), self.model.likelihood)
            self.draw_hyper(state, fit, 0, tuning=False)
            if setting.init.kind == DRAWS:
                self._refresh(state)

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
        hyper_values = {"hyper": self.hyper.to_dict(), "priors": self.priors.to_dict()}
        return super().memory() | hyper_values

    def recall(self, memory: dict[str, Any]) -> None:
        self.hyper = GaussianHyper.from_dict(memory["hyper"])
        self.priors = GaussianHyper.from_dict(memory["priors"])
        super().recall(memory)

    def _learn(self, run: TrackRun) -> None:
        fit, tuning = run.fits[run.cycle - 1], run.cycle <= self.setting.frozen_from
        if not math.isfinite(fit.pearson):
            return  # the segment is run again
        self.draw_hyper(run.state, fit, run.cycle, tuning)

    def learnt(self, run: TrackRun) -> Arrays:
        """Return noise, links, and the precisions of all columns; NaN of those that do not move."""
        del run
        of_w, of_h = (np.where(table[3] > 0, table[1], np.nan) for table in self._tables)
        values = {"noise": np.asarray(self.hyper.noise), "precision_w": of_w, "precision_h": of_h}
        values |= {name: link.astype(self.data.dtype) for name, link in self.links.items()}
        for factor in self.linked:
            name = LINK_PRECISIONS[factor]
            values[name] = np.asarray(getattr(self.hyper, name))
        count = self.data.total_mass
        effective = self.model.effective_components(self.hyper, count, self.data.shape)
        return values | {EFFECTIVE.name: np.asarray(effective)}

    def _prior_constant(self) -> float:
        return log_prior_constant(self.model, self.hyper, self.setting.data.shape)

    def _ran_away(self, run: TrackRun) -> bool:
        data = self.setting.data
        variance = 1.0 / (BIAS_SHARE * self.priors.row_bias_precision)  # of data, says the prior
        limit = RUNAWAY * max(variance, (data.maximum - data.minimum) ** 2) * data.total_mass
        return any(fit.pearson > limit for fit in run.fits.values())

    def _lp(self, fit: Fit) -> float:
        """Return -Σ (v - μ)² / (2φ) - n/2 log(2πφ)."""
        noise, count = self.hyper.noise, self.setting.data.effective
        square = float(fit.pearson)
        if self.data.weights is not None:
            return -0.5 * square / noise - 0.5 * count * math.log(noise) + self.constant
        return -0.5 * square / noise - 0.5 * count * math.log(2 * math.pi * noise)

    @cached_property
    def constant(self) -> float:
        """Return the constant of the log-likelihood of cells with weights, at noise 1."""
        return normalizer(self.data, 1.0, self.model.likelihood, self.setting.executor)

    # -- hyperparameters -------------------------------------------------------

    def draw_hyper(self, state: ChainState, fit: Fit, cycle: int, tuning: bool) -> None:
        """Draw the hyperparameters of the next cycles, given a state, its fit and its cycle.

        ``tuning``: whether the metric's ratios still learn.
        """
        if tuning:
            if "weights" in self.setting.kernel.arrays:
                self._learn_ratios(state)
            if cycle < HOLD:
                return
        rng = generator(self.setting.options.seed, self.number, Stream.HYPER, cycle)
        if self.model.noise == "auto":
            rate = 0.5 * fit.pearson + NOISE_RATE * self.priors.noise
            self._set(noise=1.0 / _gamma(rng, 1.0 + 0.5 * self.data.effective, rate))
        self._draw_links(state, rng)
        self._draw_precisions(state, rng)
        if cycle and cycle % SYMMETRIES_EVERY == 0:  # a given start stays what it is
            self._draw_symmetries(state, cycle)
        if self.model.biases:
            self._draw_biases(state, rng)
        self._draw_unobserved(state, rng)

    def _set(self, **values: Any) -> None:
        """Change hyperparameters."""
        self.hyper = self.hyper._replace(**values)

    @property
    def _tables(self) -> tuple[Array, Array]:
        """Tables of the columns of W and of H, at the present hyperparameters."""
        return column_table(self.hyper, self.model.width)

    def _draw_links(self, state: ChainState, rng: Generator) -> None:
        """Draw the links B, and λ_β ~ Gamma(1 + n/2, 1/λ_β⁰ + ½ Σ λ_k B²) for n entries of B."""
        for factor in self.linked:
            table, name = self._tables[factor], LINK_PRECISIONS[factor]
            context = Draw(self.setting, state, rng)
            link = draw_link(context, factor, table, getattr(self.hyper, name))
            self.links = self.links | {LINKS[factor]: link}
            if getattr(self.model, name) == "auto":
                shape = 1.0 + 0.5 * link.shape[0] * np.count_nonzero(table[3])
                rate = 1.0 / getattr(self.priors, name) + 0.5 * float(table[1] @ (link**2).sum(0))
                self._set(**{name: _gamma(rng, shape, rate)})

    def _draw_unobserved(self, state: ChainState, rng: Generator) -> None:
        """Draw rows (columns) without any data from their prior, where they have covariates."""
        for factor in self.linked:
            mean, precision, _, free = self._tables[factor]
            columns, spread = np.flatnonzero(free), np.sqrt(precision)
            rows = [np.flatnonzero(~seen) for seen in observed_pieces(self.setting, factor)]
            away = [rng.normal(size=(part.size, columns.size)) / spread[columns] for part in rows]
            move = partial(take_residuals, mean=mean[columns], columns=columns)
            state.each(move, factor, rows, away)

    def _sums(self, state: ChainState, factor: int, centre: Array) -> Counted:
        """Return Σ (x - centre)² of every column, with λ_β Σ B² of its link.

        And how many numbers these are.
        """
        rows = telling(self.setting, factor)
        parts = state.each(partial(squares_of, centre=centre), factor, rows)
        total = np.sum([squares for squares, _ in parts], axis=0)
        count = sum(length for _, length in parts)
        if factor in self.linked:
            link = self.links[LINKS[factor]]
            total += getattr(self.hyper, LINK_PRECISIONS[factor]) * (link**2).sum(axis=0)
            count += len(link)
        return total, count

    def _draw_precisions(self, state: ChainState, rng: Generator) -> None:
        """Draw λ_k ~ Gamma(1 + n/2, 1/λ⁰ + ½ Σ x²), for both factors together or the free one."""
        names = ("precision_w", "precision_h")
        sides = [side for side in (ROWS, COLUMNS) if getattr(self.model, names[side]) == "auto"]
        if not sides:
            return
        K, still = self.model.n_components, np.zeros(self.model.width)
        sums = [self._sums(state, side, still) for side in sides]
        half = sum(0.5 * squares[:K] for squares, _ in sums)
        shape = 1.0 + 0.5 * sum(count for _, count in sums)
        prior = 1.0 / np.asarray(getattr(self.priors, names[sides[0]]))
        drawn = tuple(float(value) for value in _gamma(rng, shape, prior + half))
        self._set(**{names[side]: drawn for side in sides})

    def _draw_symmetries(self, state: ChainState, cycle: int) -> None:
        """Draw the sizes and levels that W and H share, links and mean with them."""
        K, priors = self.model.n_components, []
        for factor, table in enumerate(self._tables):
            link = None
            if factor in self.linked:
                link = self.links[LINKS[factor]], getattr(self.hyper, LINK_PRECISIONS[factor])
            bias = K + factor if self.model.biases else None
            priors.append(Prior(telling(self.setting, factor), table, bias, link))
        rng = generator(self.setting.options.seed, self.number, Stream.SCALE, cycle)
        with single_threaded_blas():  # the same bits whatever the machine does meanwhile
            scale, shift = draw_symmetries(state, (priors[ROWS], priors[COLUMNS]), K, rng)
        for factor in self.linked:
            sizes = np.ones(self.model.width)
            sizes[:K] = scale if factor == ROWS else 1.0 / scale
            self.links = self.links | {LINKS[factor]: self.links[LINKS[factor]] * sizes}
        self._set(mean=self.hyper.mean - shift)

    def _draw_biases(self, state: ChainState, rng: Generator) -> None:
        """Draw precisions of the biases, and the level that those of the columns are around."""
        K, priors, precisions = self.model.n_components, self.priors, []
        for factor, centre, prior in (
            (ROWS, 0.0, priors.row_bias_precision),
            (COLUMNS, self.hyper.mean, priors.column_bias_precision),
        ):
            squares, count = self._sums(state, factor, np.full(K + 2, centre))
            rate = 1.0 / prior + 0.5 * float(squares[K + factor])
            precisions.append(_gamma(rng, 1.0 + 0.5 * count, rate))
        rows = telling(self.setting, COLUMNS)
        levels = state.each(partial(sum_of_column, column=K + 1), COLUMNS, rows)
        cols = sum(count for _, count in levels)
        mean = sum(level for level, _ in levels) / cols
        mean += float(rng.normal()) / math.sqrt(cols * precisions[1])
        self._set(mean=mean, row_bias_precision=precisions[0], column_bias_precision=precisions[1])

    def _learn_ratios(self, state: ChainState) -> None:
        """Learn the mean squares of the factors where data are, against their prior variances."""
        K, data, hyper, ratios = self.model.n_components, self.data, self.hyper, []
        for factor, observed, precision, old in (
            (COLUMNS, data.mass.cols, hyper.precision_h, hyper.ratio_w),
            (ROWS, data.mass.rows, hyper.precision_w, hyper.ratio_h),
        ):
            counts = pieces_of(data.grid, factor, observed)
            total = sum(state.each(partial(weighted_squares, n_components=K), factor, counts))
            latest = total / data.total_mass / float(np.sum(1.0 / np.asarray(precision)))
            ratio = old + LEARN * (latest - old)
            ratios.append(min(max(ratio, LEAST_RATIO), LARGEST_RATIO))
        self._set(ratio_w=ratios[0], ratio_h=ratios[1])
