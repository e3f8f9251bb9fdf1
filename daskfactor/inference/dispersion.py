"""The dispersions of a run, one for each matrix: fixed, estimated from fits, or drawn."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import scipy

from daskfactor.coupled.source import CoupledData
from daskfactor.data.blocks import BlockedData
from daskfactor.executors.base import Executor
from daskfactor.executors.state import Array, ChainState, FactorBand
from daskfactor.inference.bands import column_sums, put_array
from daskfactor.inference.passes import Place, evaluate, fit_columns
from daskfactor.inference.program import (
    COLUMNS,
    DISPERSION,
    Fit,
    Tally,
    normalizer,
    tally,
    tally_columns,
)
from daskfactor.models.gamma_factors import GammaFactors
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.negative_binomial import OF_COLUMNS, NegativeBinomial
from daskfactor.models.rates import EVEN, draw_each, draw_positive
from daskfactor.models.tweedie_law import NORMAL

SEARCHED = 1e-4, 1e4
"""Dispersions between which a point estimate's is looked for."""
NEAR = 0.01
"""Largest distance of the logarithm of a point estimate's dispersion from the best one."""
FALLS, APART = 0.1, 0.2
"""A chain is still on its way if the excess of its counts over Poisson variation falls, from one
quarter of the looks to the next, by more than these shares of itself and of the largest excess
that Poisson counts may have, together."""
FEWEST_LOOKS = 3
"""Looks at draws without which a chain is taken to be still on its way."""
DRAWN = 1e-8, 1e8
"""Dispersions between which draws are."""
SLIGHT = 1e-3
"""Relative error of means that is tolerated: chains come no nearer to large counts in tuning."""
PAIRS = 4.0
"""Added to the number of pairs of events in one cell, of whose mean a few pairs are a poor
estimate."""
FEWEST = 100
"""Degrees of freedom without which counts are taken to be Poisson."""
NEARLY_POISSON, ERRORS = 0.1, 4.0
"""Counts that vary by this share more than Poisson counts, and so many standard errors, may yet be
Poisson counts."""
WIDTH = 4.0
"""Width of the intervals that columns' are drawn from, in units of their common spread."""


def typical_value(data: BlockedData) -> float:
    """Return a positive size of the entries: their level, or 1 if that is not positive."""
    return data.level if data.level > 0 else 1.0


@dataclass
class MatrixDispersion:
    """One matrix, as the rule for its dispersion needs it.

    Several matrices that share factors are divided by their means u: there a dispersion counts in
    units of the `scale`, and that of the data is ``phi / scale``.

    Attributes
    ----------
    law, weight, unit, scale
        Of its entries: their law, what a log-likelihood counts, u, and the dispersion that 1
        becomes when values are divided by u.
    requested
        The dispersion that the model or the sampler asks for, in units of the data; a word where
        it is estimated or drawn.
    count
        Number of observations, by weight.
    integer
        Whether these are whole numbers.
    name
        Of the matrix, "" of the only one.
    owner
        Which blocks are the matrix's, (B, B); None: all.
    """

    law: Likelihood
    requested: Any
    count: float
    integer: bool
    name: str = ""
    weight: float = 1.0
    unit: float = 1.0
    scale: float = 1.0
    owner: Array | None = None
    _tally: Tally | None = None

    def tally(self, data: BlockedData, executor: Executor) -> Tally:
        """Count how often each value occurs, in units of the data."""
        if self._tally is None:
            self._tally = tally(data, executor, self.owner)
            if self.unit != 1.0:
                values = np.rint(self._tally.values * self.unit)
                self._tally = self._tally._replace(values=values)
        return self._tally

    def normalizer(self, data: BlockedData, executor: Executor, dispersion: float) -> float:
        """Return what the fit leaves out of the log-likelihood; 0 where it takes a series.

        Of a density of values in units u, log u is taken off for each of them.
        """
        if isinstance(self.law, NegativeBinomial):
            values, numbers, _ = self.tally(data, executor)
            terms = self.law.log_normalizer(values, dispersion / self.scale)
            return self.weight * float(numbers @ terms)
        if not self.law.closed_form:
            return 0.0
        value = normalizer(data, dispersion, self.law, executor, self.owner)
        if self.unit != 1.0 and not self.law.counts:
            value -= self.count * math.log(self.unit)
        return self.weight * value


def poisson_limit(tally: Tally, count: float, parameters: float) -> tuple[float, float]:
    """Return Σ w v, and the largest ratio Σ w (v - μ)² / Σ w v that Poisson counts may have.

    w are the weights of cells, 1 where they have none. Σ w (v - μ)² - Σ w v has the mean 0 for
    Poisson counts, and the variance 2 Σ w² μ², of which Σ w² v (v - 1) is an estimate of half. At
    draws of a posterior that holds the same, as it does at the means that the data were drawn
    with. Means of a million may be off by a thousandth.

    Parameters
    ----------
    tally
        The values, and how often they are there.
    count, parameters
        Of the observations, by weight, and of what is fitted to them.
    """
    values, numbers, squares = tally
    total, pairs = float(values @ numbers), values * (values - 1)
    if count - parameters < max(0.1 * count, FEWEST) or not total:
        return max(total, 1.0), math.inf
    # A few pairs are a poor estimate of their mean; the largest weight may be that of the next.
    few = PAIRS * float(np.max(squares / np.maximum(numbers, np.finfo(float).tiny))) ** 2
    error = math.sqrt(2 * (float(pairs @ squares) + few)) / total
    return total, 1 + NEARLY_POISSON + ERRORS * error + SLIGHT**2 * float(pairs @ numbers) / total


def still_falls(looks: Sequence[float], limit: float) -> bool:
    """Tell whether a chain is still on its way to the means of counts.

    It is if the variation falls from draw to draw, or is within the limit at some of them.
    ``looks`` are variations at draws, as multiples of that of Poisson counts, in order; the later
    half counts. ``limit`` is that of `poisson_limit`.
    """
    recent = looks[len(looks) // 2 :]
    half = len(recent) // 2
    if len(looks) < FEWEST_LOOKS:
        return True
    before, now = (float(np.mean(part)) for part in (recent[:half], recent[-half:]))
    near = now > 1 and min(recent) <= limit
    return near or bool(before - now > FALLS * max(now - 1, 0) + APART * (limit - 1))


def map_dispersion(log_likelihood: Callable[[float], float]) -> float:
    """Return the dispersion at which a log-likelihood, less the dispersion, is largest."""

    def loss(x: float) -> float:
        return math.exp(x) - log_likelihood(math.exp(x))

    ends = math.log(SEARCHED[0]), math.log(SEARCHED[1])
    how: Any = {"method": "bounded", "options": {"xatol": NEAR}}
    best = scipy.optimize.minimize_scalar(loss, bounds=ends, **how)
    return math.exp(best.x)


class DispersionRule:
    """The rule for the dispersions φ of a run: one for each matrix, of which most runs have one.

    A dispersion is fixed by the user, 1 for counts that may be Poisson, drawn given the factors
    if the law is negative binomial, or else estimated by Pearson's φ̂ = Σ (v - μ)² μ^(β-2) / N at
    draws of the chain; of whole numbers under β = 1 φ̂ = Σ (v - μ)² / Σ v, on which cells of tiny
    means have no hold. The spread of the draws makes up for the degrees of freedom that the
    factors use; at a point estimate the divisor is N less the number of parameters.

    A dispersion is a number, or a tuple for several matrices, in units of their means.

    Attributes
    ----------
    matrices
        Of each matrix, in order; what follows has a number for each of them.
    n_observed, scale
        As `MatrixDispersion` has them: its ``count``, and its ``scale``.
    counts, drawn_each
        Whether these are counts of which the run is to tell whether they are Poisson, and
        whether chains draw the dispersion.
    memory
        The dispersion where that is settled, else NaN; a checkpoint keeps these.
    n_parameters
        How many parameters it determines; a checkpoint keeps these.
    current
        The latest dispersion of one that is drawn.
    limit
        How many times as much as Poisson counts these may vary and still be Poisson.
    alone
        Whether a point estimate is all that there will be.
    settled
        Whether a point estimate no longer decides if counts are Poisson.
    """

    alone = False

    def __init__(
        self, model: GammaFactors, data: BlockedData, assumed: float | None = None
    ) -> None:
        """Make the rule; ``assumed`` is what a sampler takes φ to be, whatever the model says."""
        self.model, self.data = model, data
        if model.joins:
            matrices = joined_matrices(model, cast("CoupledData", data), assumed)
        else:
            requested = model.dispersion if assumed is None else assumed
            integer = bool(data.is_integer)
            matrices = [MatrixDispersion(model.likelihood, requested, data.effective, integer)]
        self.matrices = matrices
        self.n_observed = np.array([matrix.count for matrix in matrices])
        self.scale = np.array([matrix.scale for matrix in matrices])
        numbers = [math.nan if isinstance(m.requested, str) else m.requested for m in matrices]
        self.memory = np.array(numbers, np.float64) * self.scale
        free, of_counts = np.isnan(self.memory), np.array([m.law.counts for m in matrices])
        self.drawn_each = free & [isinstance(m.law, NegativeBinomial) for m in matrices]
        self.counts = free & of_counts & [matrix.integer for matrix in matrices]
        self.current = self._merge(np.where(of_counts | self.drawn_each, self.scale, 1.0))
        self.limit = np.ones(len(matrices))
        self._count_parameters(model.n_components)
        self.settled = self.fixed is not None

    def _count_parameters(self, components: int) -> None:
        """Count what so many components determine, of each matrix."""
        model, data, shape = self.model, self.data, self.data.shape
        if model.joins:
            self.n_parameters = parameters_of_matrices(components, cast("CoupledData", data))
            return
        fewer = min(components, *shape)
        number = fewer * (sum(shape) - fewer)
        if model.fixed != (None, None) and components == model.n_components:
            number = free_parameters(shape, model)
        elif (axes := len(data.grid.sides)) > 2:  # scales of components alone are free
            number = components * (sum(shape) - axes + 1)
        self.n_parameters = np.array([number])

    def _value(self, dispersions: Any) -> Any:
        """Return the dispersions of all matrices as hyperparameters have them."""
        values = np.asarray(dispersions).tolist()
        return tuple(values) if self.model.joins else values[0]

    def _merge(self, estimates: Array, present: Array | None = None) -> Array:
        """Return estimates; what is fixed, and the present values of those that are drawn."""
        drawn = estimates if present is None else np.where(self.drawn_each, present, estimates)
        return np.where(np.isnan(self.memory), drawn, self.memory)

    def _snap(self, dispersions: Array) -> Array:
        """Return the estimates: 1 for counts that do not vary more than Poisson counts may."""
        poisson = self.counts & (dispersions <= self.limit * self.scale)
        return np.where(poisson, self.scale, dispersions)

    @property
    def parameters(self) -> int:
        """Number of parameters that the data determine."""
        return int(self.n_parameters.sum())

    @property
    def drawn(self) -> bool:
        """Tell whether chains draw one of them, given their states."""
        return bool(self.drawn_each.any())

    @property
    def divides(self) -> bool:
        """Tell whether it does no more than divide gradients and divergences."""
        return not (self.drawn or self.model.joins)

    @property
    def fixed(self) -> Any:
        """The dispersion, if all of it is fixed; else None."""
        return None if np.isnan(self.memory).any() else self._value(self.memory)

    @property
    def first(self) -> Any:
        """Return what φ is taken to be before there is a fit.

        0 for the one of a single matrix that is to be estimated: the prior then counts nothing.
        """
        if self.divides and self.fixed is None:
            return 0.0
        return self._value(self.current)

    @property
    def estimates(self) -> bool:
        """Tell whether chains estimate one of them."""
        return bool((np.isnan(self.memory) & ~self.drawn_each).any())

    @property
    def undecided(self) -> Array:
        """Tell which are counts of which nothing says yet whether they are Poisson.

        An estimate of theirs takes a pass over the data of its own.
        """
        return np.asarray(self.counts & np.isnan(self.memory))

    # -- at a point, or at a draw ------------------------------------------------

    def _fit(self, place: Place) -> Fit:
        law, _ = self.model.likelihood.at(self._value(self.current))
        return evaluate(place, law)

    def estimate_at(self, place: Place) -> tuple[Fit, Any]:
        """Evaluate a point estimate, and estimate φ from its fit, or where it is most likely."""
        fit = None
        if not self.drawn_each.all():
            fit = self._fit(place)
            self.current = self._estimates(fit)
        for number in np.flatnonzero(self.drawn_each).tolist():
            best = map_dispersion(self._density(number, place))
            self.current[number] = best * self.scale[number]
        if fit is None or not self.divides:
            fit = self._fit(place)
        return fit, self._value(self.current)

    @property
    def _freedom(self) -> Array:
        """Degrees of freedom of a point estimate: never fewer than a tenth of the entries."""
        left: Array = self.n_observed - self.n_parameters
        return np.maximum(left, 0.1 * self.n_observed)

    def _estimates(self, fit: Fit, at_point: bool = True) -> Array:
        """Estimate dispersions by Pearson's statistic; those that are known stay what they are."""
        divisor = self._freedom if at_point else self.n_observed
        phi = np.maximum(np.atleast_1d(fit.pearson) / divisor, np.finfo(np.float32).tiny)
        return self._merge(phi, self.current)

    def estimate(self, fit: Fit, at_point: bool = True) -> Any:
        """Estimate φ from a fit: of a point estimate, or of a draw of the chain."""
        return self._value(self._estimates(fit, at_point))

    def at_draw(self, place: Place, fit: Fit) -> Any:
        """Estimate φ from a draw of the chain, and its fit."""
        return self._value(self.variation(place, self._estimates(fit, at_point=False)))

    def variation(self, place: Place, estimates: Array) -> Array:
        """Put how much undecided counts vary around their means in the places of their estimates.

        In units of what Poisson counts do.
        """
        if not self.undecided.any():
            return estimates
        law: Likelihood = NORMAL
        if self.model.joins:
            joint: Any = self.model.likelihood
            pairs = zip(self.counts, self.matrices, strict=True)
            laws = tuple(NORMAL if counts else matrix.law for counts, matrix in pairs)
            law, _ = replace(joint, laws=laws).at(self.current)
        squares, result = np.atleast_1d(evaluate(place, law).pearson), estimates.copy()
        for number in np.flatnonzero(self.undecided):
            matrix, parameters = self.matrices[number], self.n_parameters[number]
            values = matrix.tally(self.data, place.executor)
            total, self.limit[number] = poisson_limit(values, matrix.count, parameters)
            result[number] = squares[number] * matrix.unit**2 / total * matrix.scale
        return result

    def test_poisson(self, place: Place, estimate: Any, last: bool = True) -> Any:
        """Return a point's φ: fixed at 1 for counts that it does not show to be no Poisson counts.

        A fit on its way may yet come closer: unless it is the ``last``, others may be looked at.
        Where it is all that there will be, nothing tells its lack of fit from dispersion.
        """
        if self.alone:
            self.memory = np.where(self.counts, self.scale, self.memory)
        phi = np.atleast_1d(estimate)
        if (undecided := self.undecided).any():
            phi = self.variation(place, phi)
            phi = np.where(undecided, self._snap(phi * self.n_observed / self._freedom), phi)
            if not self.settled:
                poisson = self.counts & (phi == self.scale)
                self.memory = np.where(poisson, self.scale, self.memory)
        self.settled = self.settled or last or self.fixed is not None
        return self._value(self._merge(phi))

    def reopen(self, estimate: Any) -> Any:
        """Leave it to draws whether counts are Poisson, and begin as if they were."""
        self.memory = np.where(self.counts, math.nan, self.memory)
        return self._value(np.where(self.counts, self.scale, estimate))

    def fade(self, model: GammaFactors, state: ChainState) -> None:
        """Count the parameters of those components that are left, where some fade."""
        if model.shares_rates:
            part = np.multiply(*column_sums(state))
            self._count_parameters(int(np.count_nonzero(part > EVEN * part.mean())))

    # -- of several draws, and of several chains -----------------------------------

    def mean_estimate(self, looks: Sequence[Any]) -> tuple[Any, list[bool]]:
        """Return the mean of the later half of the estimates at draws, in the order of these.

        And, of counts, whether they may yet come to vary as Poisson counts do.
        """
        series = np.reshape(looks, (len(looks), -1)).T
        mean = [np.mean(each[len(looks) // 2 :]) for each in series]
        ratios = zip(self.counts, series / self.scale[:, None], self.limit, strict=True)
        return self._value(mean), [bool(c) and still_falls(each, most) for c, each, most in ratios]

    def pool(self, estimates: Sequence[tuple[Any, list[bool]]]) -> Array:
        """Return the mean over chains of their `mean_estimate`; of counts the smallest.

        A chain that is stuck at means far from the counts says nothing of how much these vary.
        It is 1 while that with the smallest is still on its way.
        """
        phis = np.array([np.atleast_1d(phi) for phi, _ in estimates])
        pooled = [np.mean(each) for each in phis.T]
        for number in np.flatnonzero(self.counts):
            waits_of_chains = [waits[number] for _, waits in estimates]
            phi, waits = min(zip(phis[:, number], waits_of_chains, strict=True))
            pooled[number] = self.scale[number] if waits else phi
        return np.array(pooled)

    def agree(self, estimates: Sequence[Any], present: Any) -> tuple[Any, dict[str, float]]:
        """Return the dispersion that chains agree on: 1 for counts that may be Poisson.

        A chain keeps its present values where these are drawn or fixed. And how many times as
        much as Poisson counts counts vary, where that is not once, by the name of their matrix,
        "" if there is one. Those that vary less than Poisson counts may are told so, though their
        dispersion is 1.
        """
        pooled = self.pool(estimates)
        phi = self._snap(pooled)
        ratios = np.where(pooled / self.scale < 2 - self.limit, pooled, phi) / self.scale
        unusual = np.flatnonzero(self.undecided & (ratios != 1))
        variations = {self.matrices[number].name: float(ratios[number]) for number in unusual}
        return self._value(self._merge(phi, np.atleast_1d(present))), variations

    # -- densities, and draws ------------------------------------------------------

    def begin(self, state: ChainState, dispersion: float) -> None:
        """Give bands what they keep of the dispersion, at the start of a chain."""

    def log_prior(self, state: ChainState, dispersion: Any) -> float:
        """Return the log prior density of what is drawn: Exponential(1) each."""
        return -float(sum((np.atleast_1d(dispersion) / self.scale)[self.drawn_each]))

    def normalizer(self, executor: Executor, dispersion: Any) -> float:
        """Return what the fit leaves out of the log-likelihood; 0 where it takes a series."""
        pairs = zip(self.matrices, np.atleast_1d(dispersion).tolist(), strict=True)
        return sum(matrix.normalizer(self.data, executor, phi) for matrix, phi in pairs)

    def _density(self, number: int, place: Place) -> Callable[[float], float]:
        """Return log p(V | factors, α) of a matrix but for a constant, as a function of its α."""
        matrix, scale = self.matrices[number], float(self.scale[number])

        def density(alpha: float) -> float:
            present = self.current[number]
            self.current[number] = alpha * scale
            fit = self._fit(place).negative_divergence
            value = fit + matrix.normalizer(self.data, place.executor, alpha * scale)
            self.current[number] = present
            return value

        return density

    def draw(self, place: Place, dispersion: Any, rng: np.random.Generator) -> Any:
        """Draw from their conditionals, one by one; each density is a pass over the data."""
        self.current = np.array(dispersion, np.float64, ndmin=1)
        for number in np.flatnonzero(self.drawn_each).tolist():
            scale, density = self.scale[number], self._density(number, place)
            alpha = float(self.current[number] / scale)
            self.current[number] = draw_positive(density, alpha, rng, DRAWN) * scale
        return self._value(self.current)

    def attrs(self, dispersion: Any) -> dict[str, Any]:
        """Name dispersions as results do, in units of the data; fixed ones as they were given."""
        values = self.model.dispersion_attrs(dispersion)
        poisson = self.counts & np.isclose(dispersion, self.scale, rtol=1e-9, atol=0.0)
        settled = poisson | ~np.isnan(self.memory)
        for matrix, is_settled in zip(self.matrices, settled, strict=True):
            if is_settled:
                name = f"dispersion_{matrix.name}" if self.model.joins else "dispersion"
                values[name] = 1.0 if isinstance(matrix.requested, str) else matrix.requested
        return values


def joined_matrices(model: Any, data: CoupledData, assumed: float | None) -> list[MatrixDispersion]:
    """Describe the matrices of a `Coupled` model."""
    matrices, laws = [], model.likelihood.laws
    for number, (joint, law) in enumerate(zip(data.joints, laws, strict=True)):
        relation = model.relations[joint.name]
        requested = relation.dispersion if assumed is None else assumed
        about = float(joint.n_observed), joint.is_integer, joint.name, relation.weight, joint.unit
        scale, owner = model.in_unit(joint.name, 1.0), data.owner == number
        matrices.append(MatrixDispersion(law, requested, *about, scale, owner))
    return matrices


def parameters_of_matrices(n_components: int, data: CoupledData) -> Array:
    """Count what each of several matrices determines: of a factor by its share of the entries."""
    total = dict.fromkeys(data.axes, 0)
    for relation in data.joints:
        for axis in relation.axes:
            total[axis] += relation.n_observed
    lengths = {name: n_components * axis.length for name, axis in data.axes.items()}
    shares = [
        [lengths[axis] * relation.n_observed / max(total[axis], 1) for axis in relation.axes]
        for relation in data.joints
    ]
    return np.array([sum(counts) for counts in shares])


def free_parameters(shape: tuple[int, int], model: GammaFactors) -> int:
    """Count entries that move, less one for each way to mix components free on both sides."""
    moving = model.free(0), model.free(1)
    count = sum(length * int(free.sum()) for length, free in zip(shape, moving, strict=True))
    return max(0, count - int((moving[0] & moving[1]).sum()) ** 2)


def same_dispersions(band: FactorBand, dispersion: float) -> None:
    """Give the columns of a band one dispersion."""
    band.arrays[DISPERSION] = np.full((len(band.values), 1), dispersion)


class ColumnDispersions(DispersionRule):
    """A dispersion α_j for every column, which the column's band keeps: log α_j ~ N(m, s²).

    m and s are drawn anew whenever the dispersions are. A point estimate has one for all
    columns, with which chains start.
    """

    prior = OF_COLUMNS
    tallied: tuple[Array, Array, Array] | None = None
    columns: Array | None = None

    def begin(self, state: ChainState, dispersion: float) -> None:
        state.each(partial(same_dispersions, dispersion=dispersion), COLUMNS)

    def log_prior(self, state: ChainState, dispersion: float) -> float:
        """Return the log prior density of the logarithms."""
        return self.prior.log_marginal(np.log(state.gather("columns", DISPERSION)[:, 0]))

    def normalizers(self, executor: Executor, dispersions: Array) -> Array:
        """Return what the fits of columns leave out of their log-likelihoods, (J,)."""
        self.tallied = self.tallied or tally_columns(self.data, executor)
        columns, values, counts = self.tallied
        terms = self.model.likelihood.log_normalizer(values, dispersions[columns])
        return np.bincount(columns, counts * terms, self.data.shape[1])

    def normalizer(self, executor: Executor, dispersion: float) -> float:
        if self.columns is None:
            return super().normalizer(executor, dispersion)
        return float(self.normalizers(executor, self.columns).sum())

    def draw(self, place: Place, dispersion: float, rng: np.random.Generator) -> float:
        """Draw all dispersions from their conditionals, and return their geometric mean."""
        executor, state = place.executor, place.state
        x = np.log(state.gather("columns", DISPERSION)[:, 0])
        m, s = self.prior.posterior(x).draw(rng)

        def log_density(x: Array) -> Array:
            tried = np.exp(np.clip(x, *np.log(DRAWN)))
            fits = fit_columns(place, self.model.likelihood, tried)
            fits = fits + self.normalizers(executor, tried)
            return np.asarray(fits - 0.5 * ((x - m) / s) ** 2)

        x = draw_each(log_density, x, WIDTH * s, rng)
        self.columns = np.exp(x)
        put_array(state, self.data.grid, COLUMNS, DISPERSION, self.columns[:, None].copy())
        return float(np.exp(x.mean()))


def dispersion_rule(
    model: GammaFactors, data: BlockedData, assumed: float | None = None
) -> DispersionRule:
    """Make the rule of a model; ``assumed`` is what a sampler takes the dispersion to be."""
    by_column = any(variable.name == "dispersion" and variable.dims for variable in model.learnt)
    return (ColumnDispersions if by_column else DispersionRule)(model, data, assumed)
