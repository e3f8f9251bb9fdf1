"""The dispersion of a run: fixed, estimated from fits, or drawn with the factors."""

import math
from collections.abc import Callable, Sequence
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
    Tally,
    normalizer,
    tally,
    tally_columns,
)
from daskfactor.models.gamma_factors import GammaFactors
from daskfactor.models.negative_binomial import OF_COLUMNS
from daskfactor.models.rates import EVEN, draw_each, draw_positive
from daskfactor.models.tweedie_law import NORMAL

Array = NDArray[Any]

SEARCHED = 1e-4, 1e4
"""Dispersions between which a point estimate's is looked for."""
NEAR = 0.01
"""How near the logarithm of a point estimate's dispersion is to the best one."""
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


class DispersionRule:
    """The rule for φ: fixed by the user, 1 for counts that may be Poisson, or estimated.

    Pearson's φ̂ = Σ (v - μ)² μ^(β-2) / N at draws of the chain; of whole numbers under β = 1
    φ̂ = Σ (v - μ)² / Σ v, on which cells of tiny means have no hold. The spread of the draws
    makes up for the degrees of freedom that the factors use; at a point estimate the divisor
    is N less the number of parameters.

    ``assumed``: what a sampler takes φ to be, whatever the model says.
    """

    drawn = False
    """Whether chains draw it, given their states."""
    divides = True
    """Whether it does no more than divide gradients and divergences."""
    counted: Tally | None = None
    """The values of the data, and how often they are there."""
    alone = False
    """Whether a point estimate is all that there will be."""
    limit = 1.0
    """How many times as much as Poisson counts counts vary at most that may be Poisson."""

    def __init__(
        self, model: GammaFactors, data: BlockedData, assumed: float | None = None
    ) -> None:
        self.model, self.data = model, data
        self.count = data.effective
        components = min(model.n_components, *data.shape)
        self.parameters = components * (sum(data.shape) - components)
        if (more := len(data.grid.sides) - 1) > 1:  # scales of components alone are free
            self.parameters = model.n_components * (sum(data.shape) - more)
        if model.fixed != (None, None):
            self.parameters = _free_parameters(data.shape, model)
        self.fixed = assumed
        if assumed is None and not isinstance(model.dispersion, str):
            self.fixed = float(model.dispersion)
        self.settled = self.fixed is not None
        self.counts = not self.settled and model.likelihood.counts and bool(data.is_integer)
        """Whether these are whole numbers of which the run is to tell whether they are Poisson."""

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

    @memory.setter
    def memory(self, known: Any) -> None:
        self.fixed = known

    @property
    def estimates(self) -> bool:
        """Whether chains estimate something of it."""
        return self.fixed is None and not self.drawn

    def merged(self, own: Any, estimate: Any) -> Any:
        """Return an estimate, with a chain's own values where these are drawn or fixed."""
        del own
        return estimate

    def estimate(self, fit: Fit, at_point: bool = True) -> float:
        """Estimate φ from a fit: of a point estimate, or of a draw of the chain."""
        if self.fixed is not None:
            return self.fixed
        divisor = self.freedom if at_point else float(self.count)
        return max(float(fit.pearson) / divisor, float(np.finfo(np.float32).tiny))

    @property
    def freedom(self) -> float:
        """Degrees of freedom of a point estimate: never fewer than a tenth of the entries."""
        return max(float(self.count - self.parameters), 0.1 * self.count)

    def at_draw(self, executor: Executor, state: ChainState, floor: float, fit: Fit) -> Any:
        """Estimate φ from a draw of the chain, and its fit."""
        if self.counts:
            return self.variation(executor, state, floor)
        return self.estimate(fit, at_point=False)

    def variation(self, executor: Executor, state: ChainState, floor: float) -> float:
        """Return how many times as much counts vary around their means as Poisson counts do."""
        fit = evaluate(executor, self.data, state, NORMAL, floor)
        self.counted = self.counted or tally(self.data, executor)
        total, self.limit = poisson_limit(self.counted, self.count, self.parameters)
        return float(fit.pearson) / total

    @property
    def looks_again(self) -> bool:
        """Whether a look at a state is a pass over the data of its own."""
        return bool(self.counts) and self.fixed is None

    def mean_estimate(self, looks: Sequence[Any]) -> tuple[Any, Any]:
        """Return the mean of the later half of the estimates at draws, in the order of these.

        And, of counts, whether they may yet come to vary as Poisson counts do.
        """
        waits = self.counts and still_falls(looks, self.limit)
        return float(np.mean(looks[len(looks) // 2 :])), waits

    def pool(self, estimates: Sequence[tuple[Any, Any]]) -> Any:
        """Return the mean over chains of their `mean_estimate`; of counts the smallest.

        A chain that is stuck at means far from the counts says nothing of how much these vary.
        It is 1 while that with the smallest is still on its way.
        """
        if not self.counts:
            return float(np.mean([estimate for estimate, _ in estimates]))
        estimate, waits = min(estimates)
        return 1.0 if waits else estimate

    def snap_to_poisson(self, dispersion: Any) -> Any:
        """Return an estimate: 1 for counts that do not vary more than Poisson counts may."""
        return 1.0 if self.counts and dispersion <= self.limit else dispersion

    def variations(self, estimate: Any, dispersion: Any) -> dict[str, float]:
        """Return how many times as much as Poisson counts counts vary, where that is not once.

        By the name of their matrix, "" if there is one. ``dispersion`` is what `snap_to_poisson`
        makes of an ``estimate``.
        """
        pairs = {"": (float(estimate), float(dispersion), self.limit)} if self.counts else {}
        return departures(pairs)

    def fade(self, model: GammaFactors, state: ChainState) -> None:
        """Count the parameters of those components that are left, where some fade."""
        if model.shares_rates:
            left = components_left(state)
            self.parameters = left * (sum(self.data.shape) - left)

    def settle(
        self,
        executor: Executor,
        state: ChainState,
        floor: float,
        estimate: Any,
        last: bool = True,
    ) -> Any:
        """Return a point's φ: fixed at 1 for counts that it does not show to be no Poisson counts.

        A fit on its way may yet come closer: unless it is the ``last``, others may be looked at.
        Where it is all that there will be, nothing tells its lack of fit from dispersion.
        """
        if self.counts and self.alone:
            self.fixed = 1.0
        if self.looks_again:
            varied = self.variation(executor, state, floor) * self.count / self.freedom
            estimate = self.snap_to_poisson(varied)
            if estimate == 1.0 and not self.settled:
                self.fixed = 1.0
        self.settled = self.settled or last or self.fixed is not None
        return estimate if self.fixed is None else self.fixed

    def reopen(self, estimate: Any) -> Any:
        """Leave it to draws whether counts are Poisson, and begin as if they were."""
        if not self.counts:
            return estimate
        self.fixed = None
        return 1.0

    def told(self, dispersion: Any) -> dict[str, Any]:
        """Give the dispersion by the name that results have."""
        return self.model.told(dispersion)


def departures(known: dict[str, tuple[float, float, float]]) -> dict[str, float]:
    """Return the ratios, of estimates, dispersions and limits by name, that are not 1.

    Counts that vary less than Poisson counts may are told so, though their dispersion is 1.
    """
    ratios = {
        name: ratio if ratio < 2 - limit else dispersion
        for name, (ratio, dispersion, limit) in known.items()
    }
    return {name: ratio for name, ratio in ratios.items() if ratio != 1}


def components_left(state: ChainState) -> int:
    """Count the components of a state that have not faded."""
    part = np.multiply(*column_sums(state))
    return int(np.count_nonzero(part > EVEN * part.mean()))


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
    divides = False
    found = 1.0

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
        values, numbers, _ = self.counted
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


def _free_parameters(shape: tuple[int, int], model: GammaFactors) -> int:
    """Count entries that move, less one for each way to mix components free on both sides."""
    moving = [np.ones(model.n_components, bool) if mask is None else ~mask for mask in model.frozen]
    count = sum(length * int(own.sum()) for length, own in zip(shape, moving, strict=True))
    return max(0, count - int((moving[0] & moving[1]).sum()) ** 2)
