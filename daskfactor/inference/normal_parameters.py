"""Parameters of a `GaussianMF`: noise, precisions, links and levels; and where its chains start.

Their full conditionals need sums of squares of the columns, which bands give between segments,
and the residual sum of squares. Every draw of them has an address, (seed, chain, cycle).
"""

import math
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from numpy.random import Generator

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.base import Executor
from daskfactor.executors.state import Array, ChainState, FactorBand, make_state
from daskfactor.inference.bands import pieces_of, put_array
from daskfactor.inference.inits import DRAWS
from daskfactor.inference.multiplicative import OnStep
from daskfactor.inference.parameters import (
    LINK_PRECISIONS,
    LINKS,
    LikelihoodParameter,
    Link,
    Parameter,
    Start,
    Values,
    View,
)
from daskfactor.inference.passes import Place, evaluate
from daskfactor.inference.program import (
    COLUMNS,
    ROWS,
    SHIFT,
    Arrays,
    ArraySpec,
    Fit,
    normalizer,
    prepare_state,
    unshifted,
)
from daskfactor.inference.setting import Setting
from daskfactor.inference.starts import result_state
from daskfactor.inference.symmetries import Prior, draw_symmetries
from daskfactor.kernels.langevin import sums_of_squares
from daskfactor.machine import single_threaded_blas
from daskfactor.models.gaussian import BIAS_SHARE, NOISE_RATE, GaussianHyper, GaussianMF
from daskfactor.models.settings import EFFECTIVE
from daskfactor.random import Stream, generator

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


WEIGHTS: Arrays = {"weights": ArraySpec(changes="never", columns=1)}
"""Amount of data of each row, for its metric."""


def warm_start(
    data: BlockedData,
    model: GaussianMF,
    seed: int,
    chain: int,
    executor: Executor,
    arrays: Arrays = WEIGHTS,
    state: ChainState | None = None,
) -> tuple[ChainState, GaussianHyper]:
    """Prepare a first state, momentum at rest; without one it is drawn from the prior.

    With the hyperparameters that there are before there is a state.
    """
    variance = data.variance
    if not variance:
        nothing = [np.zeros((length, model.n_components)) for length in data.shape]
        at_mean = executor.distribute(_packed(data, model, nothing))
        fit = evaluate(Place(executor, data, at_mean, NO_FLOOR), model.likelihood)
        variance = fit.pearson / data.total_mass
    hyper = model.start(data.mean, variance)
    factors = []
    for number, precisions in enumerate((hyper.precision_w, hyper.precision_h)):
        rng = generator(seed, chain, Stream.START, number)
        size = data.shape[number], model.n_components
        factors.append(rng.normal(size=size) / np.sqrt(precisions))
    state = executor.distribute(state or _packed(data, model, factors))
    prepare_state(state, arrays)
    if "weights" in arrays:
        _weigh(state, data, model)
    return state, hyper


def _weigh(state: ChainState, data: BlockedData, model: GaussianMF) -> None:
    """Give every band the weights of its rows, one column."""
    _, rows, cols, row_squares, col_squares = data.mass
    for factor, (observed, squares) in enumerate(((rows, row_squares), (cols, col_squares))):
        weights = observation_weights(observed, model.n_components, squares).astype(data.dtype)
        put_array(state, data.grid, factor, "weights", weights)


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
    K, curvature = len(hyper.precision_w), 1.0 / hyper.noise
    precisions = np.array([hyper.precision_w, hyper.precision_h])
    ratios = np.array([[hyper.ratio_w], [hyper.ratio_h]])
    tables = np.zeros((2, 4, width))
    tables[:, 1], tables[:, 2], tables[:, 3, :K] = 1.0, curvature, 1.0
    tables[:, 1, :K] = precisions
    tables[:, 2, :K] = ratios / (hyper.noise * precisions[::-1])
    if width == K + 2:  # there are biases
        tables[ROWS, :, K] = 0.0, hyper.row_bias_precision, curvature, 1.0
        tables[COLUMNS, :, K + 1] = hyper.mean, hyper.column_bias_precision, curvature, 1.0
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


class NormalParameter(Parameter):
    """A parameter of a `GaussianMF`."""

    def due(self, view: View) -> bool:
        """Wait at first: factors far from the data would tell that components are not needed."""
        return view.fit is not None and not (view.tuning and view.cycle < HOLD)

    def tables(self, values: Values) -> tuple[Array, Array]:
        """Return the tables of the columns of W and of H."""
        return column_table(self.hyper(values), self.model.width)

    def sums(self, state: ChainState, factor: int, centre: Array, values: Values) -> Counted:
        """Return Σ (x - centre)² of every column, with λ_β Σ B² of its link.

        And how many numbers these are.
        """
        rows = self.informative_rows(factor)
        parts = state.each(partial(squares_of, centre=centre), factor, rows)
        total = np.sum([squares for squares, _ in parts], axis=0)
        count = sum(length for _, length in parts)
        if factor in self.linked:
            link = values[LINKS[factor]]
            total += values[LINK_PRECISIONS[factor]] * (link**2).sum(axis=0)
            count += len(link)
        return total, count


class Ratios(NormalParameter):
    """The mean squares of the factors where data are, against their prior variances."""

    def due(self, view: View) -> bool:
        return view.tuning and "weights" in self.setting.kernel.arrays

    def update(self, view: View, values: Values) -> Values:
        K, data, ratios = self.model.n_components, self.data, {}
        for factor, observed, other, name in (
            (COLUMNS, data.mass.cols, "precision_h", "ratio_w"),
            (ROWS, data.mass.rows, "precision_w", "ratio_h"),
        ):
            counts, old = pieces_of(data.grid, factor, observed), values[name]
            total = sum(view.state.each(partial(weighted_squares, n_components=K), factor, counts))
            latest = total / data.total_mass / float(np.sum(1.0 / np.asarray(values[other])))
            ratio = old + LEARN * (latest - old)
            ratios[name] = min(max(ratio, LEAST_RATIO), LARGEST_RATIO)
        return ratios


class Noise(NormalParameter, LikelihoodParameter):
    """The noise φ, 1/φ ~ Gamma(1 + n/2, rate + ½ Σ (v - μ)²); with it the likelihood."""

    floor = NO_FLOOR

    def start(self, number: int, lead: Any, on_step: OnStep | None) -> Start:
        """Start from a result, at whose fit values are drawn, or from a draw of the prior.

        The scales of the prior fit mean and variance of the data.
        """
        del lead, on_step
        setting, data, initial, fit = self.setting, self.data, None, None
        arrays, executor = setting.kernel.arrays, setting.executor
        if setting.init.W is not None:
            initial = result_state(data, self.model, setting.init, number)
        seed = setting.options.seed
        state, hyper = warm_start(data, self.model, seed, number, executor, arrays, initial)
        if initial is not None:
            fit = evaluate(Place(executor, data, state, NO_FLOOR), self.model.likelihood)
            if setting.init.kind == DRAWS:
                self.refresh(number, state)
        links = {
            LINKS[factor]: np.zeros((self.covariates[factor].shape[1], self.model.width))
            for factor in self.linked
        }
        return Start(state, {"priors": hyper._asdict(), **hyper._asdict(), **links}, fit)

    def due(self, view: View) -> bool:
        return self.model.noise == "auto" and super().due(view)

    def update(self, view: View, values: Values) -> Values:
        assert view.fit is not None
        rate = 0.5 * view.fit.pearson + NOISE_RATE * values["priors"]["noise"]
        return {"noise": 1.0 / _gamma(view.rng, 1.0 + 0.5 * self.data.effective, rate)}

    def log_likelihood(self, fit: Fit, values: Values) -> float:
        """Return -Σ (v - μ)² / (2φ) - n/2 log(2πφ)."""
        noise: float = values["noise"]
        count, square = self.data.effective, float(fit.pearson)
        if self.data.weights is not None:
            return -0.5 * square / noise - 0.5 * count * math.log(noise) + self._constant
        return -0.5 * square / noise - 0.5 * count * math.log(2 * math.pi * noise)

    @cached_property
    def _constant(self) -> float:
        """Return the constant of the log-likelihood of cells with weights, at noise 1."""
        return normalizer(self.data, 1.0, self.model.likelihood, self.setting.executor)

    def has_diverged(self, fits: Any, state: ChainState, values: Values) -> bool:
        """Tell whether finite factors are beyond anything the data could mean."""
        data, bias = self.data, values["priors"]["row_bias_precision"]
        variance = 1.0 / (BIAS_SHARE * bias)  # of data, says the prior
        limit = RUNAWAY * max(variance, (data.maximum - data.minimum) ** 2) * data.total_mass
        return any(fit.pearson > limit for fit in fits)


class NormalLink(NormalParameter, Link):
    """The link B of a factor, and its precision.

    λ_β ~ Gamma(1 + n/2, 1/λ_β⁰ + ½ Σ λ_k B²) for n entries of B.
    """

    def update(self, view: View, values: Values) -> Values:
        """Draw both; what the link adds to prior means goes into the bands."""
        setting, factor, table = self.setting, self.factor, self.tables(values)[self.factor]
        moving: Any = table[3] > 0
        covariates = self.covariates[factor]
        observed_covariates = setting.observed_covariates[factor]
        residual = (self.observed_rows(view.state, factor) - table[0])[:, moving]
        link, ridge = np.zeros((covariates.shape[1], len(moving))), values[self.of_name]
        with single_threaded_blas():  # the same bits whatever the machine does meanwhile
            drawn = observed_covariates.draw_link(residual, table[1, moving], ridge, view.rng)
            link[:, moving] = drawn
            shift = covariates.predicted(link)
        self.put(view.state, factor, SHIFT, shift)
        if getattr(self.model, self.of_name) == "auto":
            shape = 1.0 + 0.5 * link.shape[0] * np.count_nonzero(moving)
            start = values["priors"][self.of_name]
            rate = 1.0 / start + 0.5 * float(table[1] @ (link**2).sum(0))
            ridge = _gamma(view.rng, shape, rate)
        return {self.name: link, self.of_name: ridge}

    def results(self, state: ChainState, values: Values) -> Values:
        return {self.name: values[self.name].astype(self.data.dtype)}


class Precisions(NormalParameter):
    """λ_k ~ Gamma(1 + n/2, 1/λ⁰ + ½ Σ x²), of both factors together or of the free one."""

    def update(self, view: View, values: Values) -> Values:
        names = ("precision_w", "precision_h")
        sides = [side for side in (ROWS, COLUMNS) if getattr(self.model, names[side]) == "auto"]
        if not sides:
            return {}
        K, still = self.model.n_components, np.zeros(self.model.width)
        sums = [self.sums(view.state, side, still, values) for side in sides]
        half = sum(0.5 * squares[:K] for squares, _ in sums)
        shape = 1.0 + 0.5 * sum(count for _, count in sums)
        prior = 1.0 / np.asarray(values["priors"][names[sides[0]]])
        drawn = tuple(float(value) for value in _gamma(view.rng, shape, prior + half))
        return {names[side]: drawn for side in sides}

    def log_prior(self, state: ChainState, values: Values) -> float:
        return log_prior_constant(self.model, self.hyper(values), self.data.shape)

    def results(self, state: ChainState, values: Values) -> Values:
        """Return the precisions of all columns, NaN of those that do not move."""
        of_w, of_h = (np.where(table[3] > 0, table[1], np.nan) for table in self.tables(values))
        of_data = self.data.total_mass, self.data.shape
        effective = self.model.effective_components(self.hyper(values), *of_data)
        return {"precision_w": of_w, "precision_h": of_h, EFFECTIVE.name: effective}

    def attrs(self, values: Values) -> Values:
        return {name: float(np.mean(values[name])) for name in ("precision_w", "precision_h")}


class Symmetries(NormalParameter):
    """The sizes and levels that W and H share, links and mean with them."""

    def due(self, view: View) -> bool:
        """Leave a result that a chain starts from as it is."""
        return view.cycle > 0 and view.cycle % SYMMETRIES_EVERY == 0 and super().due(view)

    def update(self, view: View, values: Values) -> Values:
        K, priors = self.model.n_components, []
        for factor, table in enumerate(self.tables(values)):
            link = None
            if factor in self.linked:
                link = values[LINKS[factor]], values[LINK_PRECISIONS[factor]]
            bias = K + factor if self.model.biases else None
            priors.append(Prior(self.informative_rows(factor), table, bias, link))
        rng = view.generator(Stream.SCALE)
        with single_threaded_blas():  # the same bits whatever the machine does meanwhile
            scale, shift = draw_symmetries(view.state, (priors[ROWS], priors[COLUMNS]), K, rng)
        sizes = np.ones((2, self.model.width))
        sizes[:, :K] = scale, 1.0 / scale
        links = {LINKS[at]: values[LINKS[at]] * sizes[at] for at in self.linked}
        return {"mean": values["mean"] - shift, **links}


class Biases(NormalParameter):
    """Precisions of the biases, and the level that those of the columns are around."""

    names = ("row_bias_precision", "column_bias_precision")

    def update(self, view: View, values: Values) -> Values:
        K, precisions = self.model.n_components, []
        for factor, centre in ((ROWS, 0.0), (COLUMNS, values["mean"])):
            squares, count = self.sums(view.state, factor, np.full(K + 2, centre), values)
            rate = 1.0 / values["priors"][self.names[factor]] + 0.5 * float(squares[K + factor])
            precisions.append(_gamma(view.rng, 1.0 + 0.5 * count, rate))
        rows = self.informative_rows(COLUMNS)
        levels = view.state.each(partial(sum_of_column, column=K + 1), COLUMNS, rows)
        cols = sum(count for _, count in levels)
        mean = sum(level for level, _ in levels) / cols
        mean += float(view.rng.normal()) / math.sqrt(cols * precisions[1])
        return {"mean": mean, **dict(zip(self.names, precisions, strict=True))}

    def attrs(self, values: Values) -> Values:
        return {name: values[name] for name in self.names}


class NormalRows(NormalParameter):
    """Rows (columns) without any data, drawn from their prior where they have covariates."""

    def update(self, view: View, values: Values) -> Values:
        for factor in self.linked:
            mean, precision, _, free = self.tables(values)[factor]
            columns, spread = np.flatnonzero(free), np.sqrt(precision)
            rows = self.without_data(factor)
            sizes = ((part.size, columns.size) for part in rows)
            away = [view.rng.normal(size=size) / spread[columns] for size in sizes]
            move = partial(take_residuals, mean=mean[columns], columns=columns)
            view.state.each(move, factor, rows, away)
        return {}


def normal_parameters(setting: Setting) -> tuple[Noise, list[Parameter]]:
    """Return the noise, and all parameters of a `GaussianMF` in the order of their draws."""
    noise, model = Noise(setting), setting.model
    links = [NormalLink(setting, factor) for factor in noise.linked]
    biases = [Biases(setting)] if getattr(model, "biases", False) else []
    first, last = [Ratios(setting), noise, *links, Precisions(setting)], NormalRows(setting)
    extra = [kind(setting) for kind in noise.model.parameter_classes]
    return noise, [*first, Symmetries(setting), *biases, *extra, last]
