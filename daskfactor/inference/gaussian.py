"""Hyperparameters of real-valued models: where they start, and their Gibbs draws.

Between segments the driver has the whole state, and so all that the full
conditionals need: sums of squares of the columns and the residual sum of squares.
Every draw has an address, (seed, chain, cycle).
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.base import Executor
from daskfactor.executors.state import ChainState, FactorBand, make_state
from daskfactor.inference.base import MOMENTS
from daskfactor.inference.chain import Chain, Setting
from daskfactor.inference.passes import Fit, evaluate
from daskfactor.inference.program import COLUMNS, ROWS
from daskfactor.inference.run import OnStep
from daskfactor.inference.track import TrackRun
from daskfactor.kernels.momentum import sums_of_squares
from daskfactor.models.gaussian import BIAS_SHARE, GaussianHyper, GaussianMF
from daskfactor.random import Stream, generator

Array = NDArray[Any]

NO_FLOOR = -math.inf
HYPER_EVERY = 10
"""Cycles between draws of the hyperparameters: the longest segment of a chain."""
HOLD = 20
"""First cycles at which the hyperparameters stay where they start: the factors, still
far from the data, would tell them that the components are not needed."""
SPREAD = 0.3
"""Weight in a row's metric of the curvature that few observations concentrate."""
LEARN = 0.3
"""Weight of the latest segment in the metric's ratios, while they are learnt."""
LEAST_RATIO, LARGEST_RATIO = 0.1, 100.0
NOISE_RATE = 0.01
"""Rate of the gamma prior on one over the noise, in units of the noise it starts from."""


def observation_weights(observed: Array, n_components: int) -> Array:
    """Weigh the data of rows for their metric, by their observed entries (n,): (n, 1).

    n + 0.3 (K + 2 √(nK)): the observations of a row span at most n directions, in which
    the largest curvature is up to (√n + √K)² times an entry's (Marchenko and Pastur).
    """
    n = np.asarray(observed, dtype=np.float64)
    spread = SPREAD * (n_components + 2.0 * np.sqrt(n * n_components))
    return (n + np.where(n > 0, spread, 0.0))[:, None]


def warm_start(
    data: BlockedData, model: GaussianMF, seed: int, chain: int, executor: Executor
) -> tuple[ChainState, GaussianHyper]:
    """Draw the first state from the prior, momentum at rest, with its hyperparameters."""
    variance = _variance(data, model, executor)
    hyper = model.start(data.mean, variance)
    factors = []
    for number, (side, length, precisions) in enumerate(
        (("rows", data.shape[0], hyper.precision_w), ("columns", data.shape[1], hyper.precision_h))
    ):
        rng = generator(seed, chain, Stream.START, number)
        factor = rng.normal(size=(length, model.n_components)) / np.sqrt(precisions)
        bias = np.full(length, data.mean if side == "columns" else 0.0)
        packed = model.pack(side, factor, bias, data.mean)
        factors.append(packed.astype(data.dtype))
    state = make_state(data.grid, factors[0], factors[1])
    prepare_state(state, data, model)
    return state, hyper


def _variance(data: BlockedData, model: GaussianMF, executor: Executor) -> float:
    """Return the variance of the observed entries, from one pass."""
    nothing = [np.zeros((length, model.n_components), data.dtype) for length in data.shape]
    level = model.pack("columns", nothing[1], np.full(data.shape[1], data.mean), data.mean)
    rows = model.pack("rows", nothing[0], np.zeros(data.shape[0]), data.mean)
    state = make_state(data.grid, rows.astype(data.dtype), level.astype(data.dtype))
    fit = evaluate(executor, data, state, model.likelihood, NO_FLOOR)
    return fit.pearson / data.total_observed


def prepare_state(state: ChainState, data: BlockedData, model: GaussianMF) -> None:
    """Give every band its momentum, the weights of its rows, and room for its moments."""
    for bands, observed in ((state.rows, data.row_observed), (state.cols, data.col_observed)):
        for band in bands:
            stop = band.offset + len(band.values)
            weights = observation_weights(observed[band.offset : stop], model.n_components)
            band.arrays["weights"] = weights.astype(band.values.dtype)
            for name in ("momentum", *MOMENTS):
                band.arrays[name] = np.zeros_like(band.values)
            band.counts["moments"] = 0


@dataclass(frozen=True)
class HyperSampler:
    """Draws the hyperparameters of one chain, segment by segment.

    Attributes
    ----------
    model, data
        What is factorized, and how.
    priors
        The chain's first hyperparameters (those of `warm_start`): means of the gamma
        priors, and the values of what is fixed.
    seed, chain
        Address of the draws, with the cycle.
    """

    model: GaussianMF
    data: BlockedData
    priors: GaussianHyper
    seed: int
    chain: int

    def adapt(
        self, hyper: GaussianHyper, state: ChainState, fit: Fit, cycle: int, tuning: bool
    ) -> GaussianHyper:
        """Draw the hyperparameters of the next segment given the state.

        Parameters
        ----------
        fit
            Of the state.
        cycle
            Cycles done so far.
        tuning
            Whether the metric's ratios still learn.
        """
        if tuning:
            hyper = _learn_ratios(self.model, hyper, state, self.data)
            if cycle < HOLD:
                return hyper
        rng = generator(self.seed, self.chain, Stream.HYPER, cycle)
        if self.model.noise == "auto":
            rate = 0.5 * fit.pearson + NOISE_RATE * self.priors.noise
            noise = 1.0 / _gamma(rng, 1.0 + 0.5 * self.data.total_observed, rate)
            hyper = hyper._replace(noise=float(noise))
        hyper = _draw_precisions(self.model, hyper, self.priors, state, rng)
        if self.model.biases:
            hyper = _draw_biases(hyper, self.priors, state, self.model.n_components, rng)
        return hyper


def _gamma(rng: np.random.Generator, shape: Any, rate: Any) -> Any:
    return rng.gamma(shape, 1.0 / np.asarray(rate))


def _squares(bands: list[FactorBand], centre: Array) -> Array:
    """Return Σ (x - centre)² of every column, band by band."""
    total = np.zeros(len(centre))
    for band in bands:
        sums_of_squares(band.values, centre, total)
    return total


def _length(bands: list[FactorBand]) -> int:
    return sum(len(band.values) for band in bands)


def _draw_precisions(
    model: GaussianMF,
    hyper: GaussianHyper,
    priors: GaussianHyper,
    state: ChainState,
    rng: np.random.Generator,
) -> GaussianHyper:
    """Draw λ_k ~ Gamma(1 + n/2, 1/λ⁰ + ½ Σ x²), for both factors together or the free one."""
    K, still = model.n_components, np.zeros(model.width)
    squares = [_squares(bands, still)[:K] for bands in (state.rows, state.cols)]
    lengths = [_length(state.rows), _length(state.cols)]
    names = [name for name in ("precision_w", "precision_h") if getattr(model, name) == "auto"]
    if not names:
        return hyper
    if len(names) == 2:
        shape, half = 1.0 + 0.5 * sum(lengths), 0.5 * (squares[0] + squares[1])
    else:
        side = 0 if names[0] == "precision_w" else 1
        shape, half = 1.0 + 0.5 * lengths[side], 0.5 * squares[side]
    drawn = _gamma(rng, shape, 1.0 / np.asarray(getattr(priors, names[0])) + half)
    values: dict[str, Any] = dict.fromkeys(names, tuple(float(value) for value in drawn))
    return hyper._replace(**values)


def _draw_biases(
    hyper: GaussianHyper,
    priors: GaussianHyper,
    state: ChainState,
    n_components: int,
    rng: np.random.Generator,
) -> GaussianHyper:
    """Draw precisions of the biases, and the level that those of the columns are around."""
    K = n_components
    squares = (
        float(_squares(state.rows, np.zeros(K + 2))[K]),
        float(_squares(state.cols, np.full(K + 2, hyper.mean))[K + 1]),
    )
    lengths = _length(state.rows), _length(state.cols)
    precisions = [
        float(_gamma(rng, 1.0 + 0.5 * length, 1.0 / prior + 0.5 * square))
        for length, prior, square in zip(
            lengths,
            (priors.row_bias_precision, priors.column_bias_precision),
            squares,
            strict=True,
        )
    ]
    levels = (float(band.values[:, K + 1].sum(dtype=np.float64)) for band in state.cols)
    centre = sum(levels) / lengths[1]
    mean = centre + float(rng.normal()) / math.sqrt(lengths[1] * precisions[1])
    return hyper._replace(
        mean=mean, row_bias_precision=precisions[0], column_bias_precision=precisions[1]
    )


def _learn_ratios(
    model: GaussianMF, hyper: GaussianHyper, state: ChainState, data: BlockedData
) -> GaussianHyper:
    """Learn the mean squares of the factors where data are, against their prior variances."""
    K = model.n_components
    ratios = []
    for bands, observed, precision, old in (
        (state.cols, data.col_observed, hyper.precision_h, hyper.ratio_w),
        (state.rows, data.row_observed, hyper.precision_w, hyper.ratio_h),
    ):
        total = 0.0
        for band in bands:
            counts = observed[band.offset : band.offset + len(band.values)].astype(np.float64)
            total += float((counts @ band.values[:, :K].astype(np.float64) ** 2).sum())
        latest = total / data.total_observed / float(np.sum(1.0 / np.asarray(precision)))
        ratio = old + LEARN * (latest - old)
        ratios.append(min(max(ratio, LEAST_RATIO), LARGEST_RATIO))
    return hyper._replace(ratio_w=ratios[0], ratio_h=ratios[1])


def column_table(hyper: GaussianHyper, biases: bool) -> tuple[Array, Array]:
    """Make the tables of columns that the momentum kernels take, for W and for H: (4, K') each.

    Rows: prior mean, prior precision, curvature for each unit of data, 1 where it moves.
    """
    K = len(hyper.precision_w)
    width = K + (2 if biases else 1)
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
    for length, table in zip(shape, column_table(hyper, model.biases), strict=True):
        free = table[3] > 0
        result += 0.5 * length * float(np.sum(np.log(table[1, free] / (2 * math.pi))))
    return result


def log_prior(model: GaussianMF, hyper: GaussianHyper, state: ChainState) -> float:
    """Return the log-density of the factors and biases given the hyperparameters."""
    tables = column_table(hyper, model.biases)
    result = log_prior_constant(model, hyper, (_length(state.rows), _length(state.cols)))
    for bands, table in zip((state.rows, state.cols), tables, strict=True):
        result += sum(quadratic_form(band.values, table) for band in bands)
    return result


def log_likelihood(fit: Fit, n_observed: int, noise: float) -> float:
    """Return -Σ (v - μ)² / (2φ) - n/2 log(2πφ)."""
    return -0.5 * fit.pearson / noise - 0.5 * n_observed * math.log(2 * math.pi * noise)


RUNAWAY = 1e3
"""A chain whose mean squared residual is this many times the data's variance has diverged."""


class GaussianChain(Chain):
    """A chain of a `GaussianMF`."""

    hyper: GaussianHyper
    priors: GaussianHyper
    model: GaussianMF
    floor = NO_FLOOR

    def __init__(self, setting: Setting, number: int) -> None:
        super().__init__(setting, number)
        self.model = cast("GaussianMF", setting.model)
        self.noise_sum = 0.0
        self.noise_draws = 0

    def start(self, on_step: OnStep | None = None, first: Chain | None = None) -> None:
        """Draw from the prior, whose scales fit mean and variance of the data."""
        del on_step, first
        setting = self.setting
        state, self.hyper = warm_start(
            setting.data, self.model, setting.options.seed, self.number, setting.executor
        )
        self.priors = self.hyper
        self.tracks = [TrackRun(setting.sampler.tracks[0], state)]

    def attrs(self) -> dict[str, float]:
        """Return hyperparameters; the noise is the mean over the draws, as predictions take it."""
        noise = self.noise_sum / self.noise_draws if self.noise_draws else self.hyper.noise
        values = {
            "dispersion": noise,
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
        }

    def recall(self, memory: dict[str, Any]) -> None:
        self.hyper = GaussianHyper.from_dict(memory["hyper"])
        self.priors = GaussianHyper.from_dict(memory["priors"])
        self.noise_sum, self.noise_draws = memory["noise"]

    def _between(self, run: TrackRun, start: int, stop: int) -> None:
        setting = self.setting
        draws = sum(setting.options.draw_index(cycle) is not None for cycle in range(start, stop))
        self.noise_sum += draws * self.hyper.noise
        self.noise_draws += draws
        if stop % HYPER_EVERY:
            return  # a segment's end must leave no trace in the draws
        sampler = HyperSampler(
            self.model, setting.data, self.priors, setting.options.seed, self.number
        )
        self.hyper = sampler.adapt(
            self.hyper, run.state, run.fits[stop - 1], stop, stop <= setting.frozen_from
        )

    def _prior_constant(self) -> float:
        return log_prior_constant(self.model, self.hyper, self.setting.data.shape)

    def _ran_away(self, run: TrackRun) -> bool:
        count = self.setting.data.total_observed
        variance = 1.0 / (BIAS_SHARE * self.priors.row_bias_precision)  # of the data
        limit = RUNAWAY * variance * count
        return any(fit.pearson > limit for fit in run.fits.values())

    def _lp(self, fit: Fit) -> float:
        return log_likelihood(fit, self.setting.data.total_observed, self.hyper.noise)
