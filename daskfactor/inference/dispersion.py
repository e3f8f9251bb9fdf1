"""The dispersion of a run: fixed, estimated from fits, or drawn with the factors."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.base import Executor
from daskfactor.executors.state import ChainState, FactorBand
from daskfactor.inference.bands import column_sums, pieces_of, take_array
from daskfactor.inference.passes import evaluate, fit_columns
from daskfactor.inference.program import (
    COLUMNS,
    DISPERSION,
    Fit,
    normalizer,
    tally,
    tally_columns,
)
from daskfactor.models.gamma_factors import GammaFactors
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.negative_binomial import OF_COLUMNS, NegativeBinomial
from daskfactor.models.rates import EVEN, draw_each, draw_positive

Array = NDArray[Any]

SEARCHED = 1e-4, 1e4
"""Dispersions between which a point estimate's is looked for."""
NEAR = 0.01
"""How near the logarithm of a point estimate's dispersion is to the best one."""
DRAWN = 1e-8, 1e8
"""Dispersions between which draws are."""
FEWEST = 100
"""Degrees of freedom without which counts are taken to be Poisson."""
NEARLY_POISSON = 0.1
"""Counts whose dispersion is this near 1, or not surely further off, are taken to be Poisson."""
WIDTH = 4.0
"""Width of the intervals that columns' are drawn from, in units of their common spread."""


def typical_value(data: BlockedData) -> float:
    """Return a positive size of the entries: their level, or 1 if that is not positive."""
    return data.level if data.level > 0 else 1.0


class DispersionRule:
    """The rule for φ: fixed by the user, 1 for counts, or Pearson's statistic.

    φ̂ = Σ (v - μ)² μ^(β-2) / N at draws of the chain. The spread of the draws
    makes up for the degrees of freedom that the factors use; at a point estimate
    the divisor is N less the number of parameters.

    ``assumed``: what a sampler takes φ to be, whatever the model says.
    """

    drawn = False
    """Whether chains draw it, given their states."""

    def __init__(
        self, model: GammaFactors, data: BlockedData, assumed: float | None = None
    ) -> None:
        self.model, self.data = model, data
        self.count = data.effective
        components = min(model.n_components, *data.shape)
        self.parameters = components * (sum(data.shape) - components)
        if model.fixed != (None, None):
            self.parameters = _free_parameters(data.shape, model)
        self.counts = model.likelihood.counts and bool(data.is_integer)
        self.fixed = assumed
        if assumed is None and not isinstance(model.dispersion, str):
            self.fixed = float(model.dispersion)
        self.settled = self.fixed is not None

    def begin(self, state: ChainState, dispersion: float) -> None:
        """Give bands what they keep of the dispersion, at the start of a chain."""

    def log_prior(self, state: ChainState, dispersion: float) -> float:
        """Return the log prior density of what is drawn."""
        return 0.0

    @property
    def first(self) -> float:
        """What φ is taken to be before there is a fit: 0, under which the prior counts nothing."""
        return 0.0 if self.fixed is None else self.fixed

    def look(self, executor: Executor, state: ChainState, floor: float) -> tuple[Fit, float]:
        """Evaluate a point estimate, and estimate φ from its fit."""
        fit = evaluate(executor, self.data, state, self.model.likelihood, floor)
        return fit, self.estimate(fit)

    def normalizer(self, executor: Executor, dispersion: float) -> float:
        """Return what the fit leaves out of the log-likelihood; 0 where it takes a series."""
        law = self.model.likelihood
        return normalizer(self.data, dispersion, law, executor) if law.closed_form else 0.0

    @property
    def memory(self) -> Any:
        """What a checkpoint keeps of it: what is fixed."""
        return self.fixed

    def estimate(self, fit: Fit, at_point: bool = True) -> float:
        """Estimate φ from a fit: of a point estimate, or of a draw of the chain."""
        if self.fixed is not None:
            return self.fixed
        divisor: float = self.count
        if at_point:  # never below a tenth of the entries
            divisor = max(self.count - self.parameters, 0.1 * self.count)
        return max(fit.pearson / divisor, float(np.finfo(np.float32).tiny))

    def fade(self, model: GammaFactors, state: ChainState) -> None:
        """Count the parameters of those components that are left, where some fade."""
        if model.shares_rates:
            part = np.multiply(*column_sums(state))
            left = int(np.count_nonzero(part > EVEN * part.mean()))
            self.parameters = left * (sum(self.data.shape) - left)

    def settle(self, estimate: float, last: bool = True) -> None:
        """Fix φ = 1 for counts that the point fit does not show to be no Poisson counts.

        Pearson's statistic of Poisson counts has a variance of (2 + 1/μ) for
        each degree of freedom; five standard errors away from 1 is plain enough. A fit on
        its way may yet come closer: unless it is the ``last``, others may be looked at.
        """
        if self.settled:
            return
        given = estimate - 1, typical_value(self.data), self.count, self.parameters
        if self.counts and not surely_not_poisson(*given):
            self.fixed = 1.0
        self.settled = last or self.fixed is not None

    def told(self, dispersion: float) -> dict[str, float]:
        """Give the dispersion by the name that results have."""
        return {"dispersion": dispersion}


def surely_not_poisson(excess: float, mean: float, count: float, parameters: float) -> bool:
    """Tell whether a dispersion that exceeds 1 by so much shows counts to be no Poisson counts."""
    freedom = count - parameters
    error = math.sqrt((2 + 1 / mean) / max(freedom, 1))
    return freedom >= max(0.1 * count, FEWEST) and abs(excess) > NEARLY_POISSON + 5 * error


def most_likely(log_likelihood: Callable[[float], float]) -> float:
    """Return the dispersion at which a log-likelihood, less the dispersion, is largest."""

    def loss(x: float) -> float:
        return math.exp(x) - log_likelihood(math.exp(x))

    ends = math.log(SEARCHED[0]), math.log(SEARCHED[1])
    best = scipy.optimize.minimize_scalar(
        loss, bounds=ends, method="bounded", options={"xatol": NEAR}
    )
    return math.exp(best.x)


class LearntDispersion(DispersionRule):
    """The dispersion as one of a law's own numbers, given its conditional: found, or drawn.

    log p(V | W, H, α) - α, the prior being Exponential(1)
    """

    drawn = True
    found = 1.0
    counted: tuple[Array, Array] | None = None

    @property
    def first(self) -> float:
        return self.found

    def log_prior(self, state: ChainState, dispersion: float) -> float:
        return -dispersion

    def estimate(self, fit: Fit, at_point: bool = True) -> float:
        del fit, at_point
        return self.found

    def normalizer(self, executor: Executor, dispersion: float) -> float:
        self.counted = self.counted or tally(self.data, executor)
        values, numbers = self.counted
        return float(numbers @ self.model.likelihood.log_normalizer(values, dispersion))

    def log_likelihood(
        self, executor: Executor, state: ChainState, floor: float, dispersion: float
    ) -> float:
        """Return log p(V | W, H, α); a pass over the data."""
        law, phi = self.model.likelihood.at(dispersion)
        fit = evaluate(executor, self.data, state, law, floor)
        return fit.negative_divergence / phi + self.normalizer(executor, dispersion)

    def look(self, executor: Executor, state: ChainState, floor: float) -> tuple[Fit, float]:
        """Find the dispersion at which the conditional is largest, and evaluate at it."""
        self.found = most_likely(partial(self.log_likelihood, executor, state, floor))
        law, _ = self.model.likelihood.at(self.found)
        return evaluate(executor, self.data, state, law, floor), self.found

    def draw(
        self,
        executor: Executor,
        state: ChainState,
        floor: float,
        dispersion: float,
        rng: np.random.Generator,
    ) -> float:
        """Draw the dispersion from its conditional; each density is a pass over the data."""
        density = partial(self.log_likelihood, executor, state, floor)
        return draw_positive(density, dispersion, rng, DRAWN)


def same_dispersions(band: FactorBand, dispersion: float) -> None:
    """Give the columns of a band one dispersion."""
    band.arrays[DISPERSION] = np.full((len(band.values), 1), dispersion)


class ColumnDispersions(LearntDispersion):
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

    def draw(
        self,
        executor: Executor,
        state: ChainState,
        floor: float,
        dispersion: float,
        rng: np.random.Generator,
    ) -> float:
        """Draw all dispersions from their conditionals, and return their geometric mean."""
        x = np.log(state.gather("columns", DISPERSION)[:, 0])
        m, s = self.prior.given(x).draw(rng)
        place = executor, self.data, state, self.model.likelihood, floor

        def log_density(x: Array) -> Array:
            tried = np.exp(np.clip(x, *np.log(DRAWN)))
            found = fit_columns(*place, tried) + self.normalizers(executor, tried)
            return np.asarray(found - 0.5 * ((x - m) / s) ** 2)

        x = draw_each(log_density, x, WIDTH * s, rng)
        self.columns = np.exp(x)
        pieces = pieces_of(self.data.grid, COLUMNS, self.columns[:, None].copy())
        state.each(partial(take_array, name=DISPERSION), COLUMNS, pieces)
        return float(np.exp(x.mean()))


def dispersion_rule(
    model: GammaFactors, data: BlockedData, assumed: float | None = None
) -> DispersionRule:
    """Make the rule of a model; ``assumed`` is what a sampler takes the dispersion to be."""
    if model.joins:
        return JointDispersion(model, data, assumed)
    dims = [own.dims for own in model.learnt if own.name == "dispersion"]
    if not dims:
        return DispersionRule(model, data, assumed)
    return (ColumnDispersions if dims[0] else LearntDispersion)(model, data, assumed)


def _free_parameters(shape: tuple[int, int], model: GammaFactors) -> int:
    """Count entries that move, less one for each way to mix components free on both sides."""
    moving = [np.ones(model.n_components, bool) if mask is None else ~mask for mask in model.frozen]
    count = sum(length * int(own.sum()) for length, own in zip(shape, moving, strict=True))
    return max(0, count - int((moving[0] & moving[1]).sum()) ** 2)


class JointDispersion(DispersionRule):
    """The dispersions of several matrices, one for each, in units of their means.

    Each goes by the rule of a matrix alone: fixed, 1 for counts, or Pearson's statistic, of which
    a factor that several share takes from each as many degrees of freedom as it has of the
    entries. That of negative binomial counts is found, and then drawn, given the factors.
    """

    def __init__(self, model: Any, data: Any, assumed: float | None = None) -> None:
        self.model, self.data = model, data
        joints = data.joints
        self.count = data.effective
        self.names = [own.name for own in joints]
        self.counted: dict[int, tuple[Array, Array]] = {}  # type: ignore[assignment]
        self.numbers = np.array([own.n_observed for own in joints], np.float64)
        self.freed = _parameters_of(model.n_components, data)
        self.parameters = int(self.freed.sum())
        self.counts = False
        relations = [model.relations[name] for name in self.names]
        self.kinds = [
            law.counts and own.is_integer for law, own in zip(self.laws, joints, strict=True)
        ]
        self.learns = [
            isinstance(law, NegativeBinomial) and own.dispersion == "auto"
            for law, own in zip(self.laws, relations, strict=True)
        ]
        self.drawn = any(self.learns)
        given = [own.dispersion if assumed is None else assumed for own in relations]
        self.known = [
            None if phi == "auto" else self._in_unit(r, phi) for r, phi in enumerate(given)
        ]
        self.found = tuple(
            self._in_unit(r, 1.0) if own is None and (counts or learns) else (own or 1.0)
            for r, (own, counts, learns) in enumerate(
                zip(self.known, self.kinds, self.learns, strict=True)
            )
        )
        self.settled = all(own is not None for own in self.known)

    @property
    def laws(self) -> tuple[Likelihood, ...]:
        laws: tuple[Likelihood, ...] = self.model.likelihood.laws
        return laws

    def _in_unit(self, number: int, dispersion: float) -> float:
        found: float = self.model.in_unit(self.names[number], dispersion)
        return found

    @property
    def fixed(self) -> Any:  # type: ignore[override]
        """All dispersions, if all are fixed."""
        return None if None in self.known else tuple(self.known)

    @fixed.setter
    def fixed(self, known: Any) -> None:
        self.known = list(known) if known is not None else self.known

    @property
    def memory(self) -> Any:
        return list(self.known)

    @property
    def first(self) -> Any:
        return self.found

    def look(self, executor: Executor, state: ChainState, floor: float) -> tuple[Fit, Any]:
        """Evaluate a point estimate, estimate dispersions from its fit, and give it at these."""
        law, _ = self.model.likelihood.at(self.found)
        self.found = self.estimate(evaluate(executor, self.data, state, law, floor))
        for number in np.flatnonzero(self.learns):
            self._seek(int(number), executor, state, floor)
        law, _ = self.model.likelihood.at(self.found)
        return evaluate(executor, self.data, state, law, floor), self.found

    def estimate(self, fit: Fit, at_point: bool = True) -> Any:
        divisors = self.numbers
        if at_point:
            divisors = np.maximum(self.numbers - self.freed, 0.1 * self.numbers)
        least, found = float(np.finfo(np.float32).tiny), []
        for number, (known, total) in enumerate(zip(self.known, fit.pearson, strict=True)):
            own = max(total / divisors[number], least)
            found.append(self.found[number] if self.learns[number] else own)
            found[-1] = found[-1] if known is None else known
        return tuple(map(float, found))

    def settle(self, estimate: Any, last: bool = True) -> None:
        if self.settled:
            return
        for number, phi in enumerate(estimate):
            if self.known[number] is not None or not self.kinds[number] or self.learns[number]:
                continue
            one = self._in_unit(number, 1.0)
            count, freed = self.numbers[number], self.freed[number]
            excess, mean = phi / one - 1.0, max(self.data.joints[number].mean, 1e-300)
            if not surely_not_poisson(excess, mean, count, freed):
                self.known[number] = one
        self.settled = last or self.fixed is not None

    def normalizer(self, executor: Executor, dispersion: Any) -> float:
        """Return what the fits leave out, of all relations; 0 where it takes a series.

        Of densities of values in units u, log u is taken off for each of them.
        """
        total = 0.0
        for number, (law, phi) in enumerate(zip(self.laws, dispersion, strict=True)):
            weight = self.model.likelihood.weights[number]
            if isinstance(law, NegativeBinomial):
                total += weight * self._normalizer_of(number, executor, phi)
            elif law.closed_form:
                own = normalizer(self.data, phi, law, executor, self.data.owner == number)
                jacobian = 0.0 if law.counts else self.numbers[number]
                total += weight * (own - jacobian * math.log(self.data.joints[number].unit))
        return total

    def _normalizer_of(self, number: int, executor: Executor, phi: float) -> float:
        """Return the normaliser of negative binomial counts, at a dispersion in their unit."""
        if number not in self.counted:
            values, counts = tally(self.data, executor, self.data.owner == number)
            unit = self.data.joints[number].unit
            self.counted[number] = np.rint(values * unit), counts
        values, counts = self.counted[number]
        alpha = self.model.in_unit(self.names[number], phi, to=False)
        return float(counts @ self.laws[number].log_normalizer(values, alpha))

    def log_prior(self, state: ChainState, dispersion: Any) -> float:
        names = [
            (n, phi) for n, phi, own in zip(self.names, dispersion, self.learns, strict=True) if own
        ]
        return -sum(self.model.in_unit(name, phi, to=False) for name, phi in names)

    def _density(
        self, number: int, executor: Executor, state: ChainState, floor: float, dispersions: Any
    ) -> Callable[[float], float]:
        """Return log p(V | factors, α) of one matrix, as a function of α in the data's unit."""

        def density(alpha: float) -> float:
            phi = self.model.in_unit(self.names[number], alpha)
            tried = tuple(phi if n == number else own for n, own in enumerate(dispersions))
            law, _ = self.model.likelihood.at(tried)
            fit = evaluate(executor, self.data, state, law, floor)
            weight = self.model.likelihood.weights[number]
            return fit.negative_divergence + weight * self._normalizer_of(number, executor, phi)

        return density

    def _seek(self, number: int, executor: Executor, state: ChainState, floor: float) -> None:
        density = self._density(number, executor, state, floor, self.found)
        best = most_likely(density)
        phi = self._in_unit(number, best)
        self.found = tuple(phi if n == number else own for n, own in enumerate(self.found))

    def draw(
        self,
        executor: Executor,
        state: ChainState,
        floor: float,
        dispersion: Any,
        rng: np.random.Generator,
    ) -> Any:
        """Draw dispersions of negative binomial counts from their conditionals, one by one."""
        for number in np.flatnonzero(self.learns).tolist():
            density = self._density(number, executor, state, floor, dispersion)
            alpha = self.model.in_unit(self.names[number], dispersion[number], to=False)
            drawn = self._in_unit(number, draw_positive(density, alpha, rng, DRAWN))
            dispersion = tuple(drawn if n == number else own for n, own in enumerate(dispersion))
        self.found = tuple(dispersion)
        return self.found

    def told(self, dispersion: Any) -> dict[str, float]:
        """Give dispersions in units of the data, by the names that results have."""
        pairs = zip(self.names, dispersion, strict=True)
        own = {f"dispersion_{name}": self.model.in_unit(name, phi, to=False) for name, phi in pairs}
        return {"dispersion": 1.0} | own


def _parameters_of(n_components: int, data: Any) -> Array:
    """Count what each of several matrices determines: of a factor by its share of the entries."""
    total = dict.fromkeys(data.axes, 0)
    for own in data.joints:
        for axis in own.axes:
            total[axis] += own.n_observed
    return np.array(
        [
            sum(
                n_components * data.axes[axis].length * own.n_observed / max(total[axis], 1)
                for axis in own.axes
            )
            for own in data.joints
        ]
    )
