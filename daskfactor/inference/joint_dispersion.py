"""The dispersions of a run of several matrices, and which rule a model's dispersion goes by."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.data.joined import JoinedData
from daskfactor.executors.base import Executor
from daskfactor.executors.state import ChainState
from daskfactor.inference.dispersion import (
    DRAWN,
    ColumnDispersions,
    DispersionRule,
    LearntDispersion,
    components_left,
    departures,
    most_likely,
    poisson_limit,
    still_falls,
)
from daskfactor.inference.passes import evaluate
from daskfactor.inference.program import Fit, Tally, normalizer, tally
from daskfactor.models.gamma_factors import GammaFactors
from daskfactor.models.negative_binomial import NegativeBinomial
from daskfactor.models.rates import draw_positive
from daskfactor.models.tweedie_law import NORMAL

if TYPE_CHECKING:
    from daskfactor.models.coupled import Coupled

Array = NDArray[Any]
Dispersions = tuple[float, ...]
"""One for each matrix, in units of their means."""


class JointDispersion(DispersionRule):
    """The dispersions of several matrices, one for each, in units of their means.

    Each goes by the rule of a matrix alone: fixed, 1 for counts that may be Poisson, or
    estimated, for which a factor that several share takes degrees of freedom from each by its
    entries.
    That of negative binomial counts is found, and then drawn, given the factors.
    """

    divides = False

    def __init__(
        self, model: GammaFactors, data: BlockedData, assumed: float | None = None
    ) -> None:
        self.coupled, self.joined = cast("Coupled", model), cast("JoinedData", data)
        self.model, self.data, self.count = model, data, data.effective
        self.joints, self.law = self.joined.joints, self.coupled.likelihood
        self.names = [own.name for own in self.joints]
        self.numbers = np.array([own.n_observed for own in self.joints], np.float64)
        self.freed = _parameters_of(model.n_components, self.joined)
        self.parameters, self.counts = int(self.freed.sum()), False
        self.tallied: dict[int, Tally] = {}
        self.given: list[Any] = []
        """Dispersions as they were asked for, in units of the data."""
        self.known: list[float | None] = []
        """Dispersions that are fixed, in units of means; None: it is estimated, or drawn."""
        self.poisson, self.learns, found = [], [], list[float]()
        for number, (law, own) in enumerate(zip(self.law.laws, self.joints, strict=True)):
            given = self.coupled.relation(own.name).dispersion if assumed is None else assumed
            known = None if given == "auto" else self._in_unit(number, float(given))
            self.given.append(given)
            self.known.append(known)
            self.poisson.append(known is None and law.counts and own.is_integer)
            self.learns.append(known is None and isinstance(law, NegativeBinomial))
            start = self._in_unit(number, 1.0) if law.counts or self.learns[-1] else 1.0
            found.append(start if known is None else known)
        self.found: Dispersions = tuple(found)
        self.limits = [1.0] * len(self.joints)
        self.drawn = any(self.learns)
        self.settled = None not in self.known

    def _in_unit(self, number: int, dispersion: float) -> float:
        return self.coupled.in_unit(self.names[number], dispersion)

    def _in_data(self, number: int, phi: float) -> float:
        return self.coupled.in_unit(self.names[number], phi, to=False)

    @property
    def fixed(self) -> Any:
        """All dispersions, if all are fixed."""
        known = [own for own in self.known if own is not None]
        return tuple(known) if len(known) == len(self.known) else None

    @fixed.setter
    def fixed(self, known: Any) -> None:
        self.known = list(known)

    @property
    def memory(self) -> Any:
        return list(self.known)

    @memory.setter
    def memory(self, known: Any) -> None:
        self.known = list(known)

    @property
    def estimates(self) -> bool:
        pairs = zip(self.known, self.learns, strict=True)
        return any(known is None and not learnt for known, learnt in pairs)

    def merged(self, own: Any, estimate: Any) -> Any:
        """Return estimates, what is fixed in their place, and of what is drawn a chain's own."""
        found = np.where(self.learns, own, estimate).tolist()
        pairs = zip(found, self.known, strict=True)
        return tuple(other if known is None else known for other, known in pairs)

    def fade(self, model: GammaFactors, state: ChainState) -> None:
        """Count what those components determine that are left, where some fade."""
        if model.shares_rates:
            left = components_left(state) / model.n_components
            self.freed = left * _parameters_of(model.n_components, self.joined)
            self.parameters = int(self.freed.sum())

    @property
    def first(self) -> Any:
        return self.found

    def look(self, executor: Executor, state: ChainState, floor: float) -> tuple[Fit, Any]:
        """Evaluate a point estimate, estimate dispersions from its fit, and give it at these."""

        def fit() -> Fit:
            return evaluate(executor, self.data, state, self.law.at(self.found)[0], floor)

        self.found = self.estimate(fit())
        for number in self._drawn():
            best = most_likely(self._density(number, executor, state, floor, self.found))
            self.found = _with(self.found, number, self._in_unit(number, best))
        return fit(), self.found

    def estimate(self, fit: Fit, at_point: bool = True) -> Any:
        divisors = self.numbers
        if at_point:
            divisors = np.maximum(self.numbers - self.freed, 0.1 * self.numbers)
        estimated = np.maximum(np.asarray(fit.pearson) / divisors, np.finfo(np.float32).tiny)
        return self.merged(self.found, estimated)

    def at_draw(self, executor: Executor, state: ChainState, floor: float, fit: Fit) -> Any:
        found = self.estimate(fit, at_point=False)
        return self._variations(executor, state, floor, found) if self.looks_again else found

    def _variations(
        self, executor: Executor, state: ChainState, floor: float, found: Dispersions
    ) -> Dispersions:
        """Put how much counts vary in the places of their dispersions, if these are not fixed."""
        laws = [
            NORMAL if own else law for own, law in zip(self.poisson, self.law.laws, strict=True)
        ]
        law, _ = replace(self.law, laws=tuple(laws)).at(self.found)
        fit = evaluate(executor, self.data, state, law, floor)
        for number, squares in enumerate(fit.pearson):
            if self.poisson[number] and self.known[number] is None:
                about = self.numbers[number], self.freed[number]
                total, self.limits[number] = poisson_limit(self._tally(number, executor), *about)
                varied = squares * self.joints[number].unit ** 2 / total
                found = _with(found, number, self._in_unit(number, varied))
        return found

    @property
    def looks_again(self) -> bool:
        pairs = zip(self.known, self.poisson, strict=True)
        return any(known is None and own for known, own in pairs)

    def mean_estimate(self, looks: Sequence[Any]) -> tuple[Any, Any]:
        waits = [False] * len(self.limits)
        for number, limit in enumerate(self.limits):
            ratios = [own[number] / self._in_unit(number, 1.0) for own in looks]
            waits[number] = self.poisson[number] and still_falls(ratios, limit)
        return tuple(np.mean(looks[len(looks) // 2 :], axis=0).tolist()), waits

    def pool(self, estimates: Sequence[tuple[Any, Any]]) -> Any:
        found = tuple(np.mean([values for values, _ in estimates], axis=0).tolist())
        for number, own in enumerate(self.poisson):
            if own:
                phi, waits = min((values[number], waits[number]) for values, waits in estimates)
                found = _with(found, number, self._in_unit(number, 1.0) if waits else phi)
        return found

    def snap_to_poisson(self, dispersion: Any) -> Any:
        for number, limit in enumerate(self.limits):
            one = self._in_unit(number, 1.0)
            if self.poisson[number] and dispersion[number] <= limit * one:
                dispersion = _with(dispersion, number, one)
        return dispersion

    def variations(self, estimate: Any, dispersion: Any) -> dict[str, float]:
        ones = [self._in_unit(number, 1.0) for number in range(len(self.limits))]
        return departures(
            {
                self.names[number]: (estimate[number] / one, dispersion[number] / one, limit)
                for number, (one, limit) in enumerate(zip(ones, self.limits, strict=True))
                if self.poisson[number] and self.known[number] is None
            }
        )

    def settle(
        self,
        executor: Executor,
        state: ChainState,
        floor: float,
        estimate: Any,
        last: bool = True,
    ) -> Any:
        if self.alone:
            estimate = self.reopen(estimate)
            self.known = [
                phi if own else known
                for phi, own, known in zip(estimate, self.poisson, self.known, strict=True)
            ]
        if self.looks_again:
            varied = self._variations(executor, state, floor, estimate)
            freedom = np.maximum(self.numbers - self.freed, 0.1 * self.numbers)
            fitted = np.where(self.poisson, varied * self.numbers / freedom, varied)
            estimate = self.snap_to_poisson(tuple(fitted.tolist()))
            for number, phi in enumerate(estimate):
                one = self._in_unit(number, 1.0)
                if self.poisson[number] and phi == one and not self.settled:
                    self.known[number] = one
        self.settled = self.settled or last or self.fixed is not None
        return self.merged(estimate, estimate)

    def reopen(self, estimate: Any) -> Any:
        for number, own in enumerate(self.poisson):
            if own:
                self.known[number] = None
                estimate = _with(estimate, number, self._in_unit(number, 1.0))
        return estimate

    def normalizer(self, executor: Executor, dispersion: Any) -> float:
        """Return what the fits leave out, of all matrices; 0 where it takes a series.

        Of a density of values in units u, log u is taken off for each of them.
        """
        total = 0.0
        for number, (law, phi) in enumerate(zip(self.law.laws, dispersion, strict=True)):
            if isinstance(law, NegativeBinomial):
                own = self._normalizer_of(number, executor, phi)
            elif law.closed_form:
                own = normalizer(self.data, phi, law, executor, self.joined.owner == number)
                if not law.counts:
                    own -= float(self.numbers[number]) * math.log(self.joints[number].unit)
            else:
                continue
            total += self.law.weights[number] * own
        return total

    def _normalizer_of(self, number: int, executor: Executor, phi: float) -> float:
        """Return the normaliser of negative binomial counts, at a dispersion in their unit."""
        values, counts, _ = self._tally(number, executor)
        law, alpha = self.law.laws[number], self._in_data(number, phi)
        return float(counts @ law.log_normalizer(values, alpha))

    def _tally(self, number: int, executor: Executor) -> Tally:
        """Count how often each value of a matrix of counts is there."""
        if number not in self.tallied:
            found = tally(self.data, executor, self.joined.owner == number)
            values = np.rint(found.values * self.joints[number].unit)
            self.tallied[number] = found._replace(values=values)
        return self.tallied[number]

    def log_prior(self, state: ChainState, dispersion: Any) -> float:
        return -sum(self._in_data(number, dispersion[number]) for number in self._drawn())

    def _drawn(self) -> list[int]:
        """Return the numbers of the matrices whose dispersions are drawn."""
        return [number for number, own in enumerate(self.learns) if own]

    def _density(
        self,
        number: int,
        executor: Executor,
        state: ChainState,
        floor: float,
        dispersions: Dispersions,
    ) -> Callable[[float], float]:
        """Return log p(V | factors, α) of a matrix but for a constant, as a function of its α."""

        def density(alpha: float) -> float:
            phi = self._in_unit(number, alpha)
            law, _ = self.law.at(_with(dispersions, number, phi))
            fit = evaluate(executor, self.data, state, law, floor)
            own = self._normalizer_of(number, executor, phi)
            return fit.negative_divergence + self.law.weights[number] * own

        return density

    def draw(
        self,
        executor: Executor,
        state: ChainState,
        floor: float,
        dispersion: Any,
        rng: np.random.Generator,
    ) -> Any:
        """Draw dispersions of negative binomial counts from their conditionals, one by one.

        The prior of each is Exponential(1).
        """
        for number in self._drawn():
            density = self._density(number, executor, state, floor, dispersion)
            drawn = draw_positive(density, self._in_data(number, dispersion[number]), rng, DRAWN)
            dispersion = _with(dispersion, number, self._in_unit(number, drawn))
        self.found = tuple(dispersion)
        return self.found

    def told(self, dispersion: Any) -> dict[str, Any]:
        """Give dispersions by their names; those that are fixed as they were asked for."""
        found = super().told(dispersion)
        for number, (name, given) in enumerate(zip(self.names, self.given, strict=True)):
            one = self.poisson[number] and math.isclose(
                dispersion[number], self._in_unit(number, 1.0)
            )
            if one or self.known[number] is not None:
                found[f"dispersion_{name}"] = 1.0 if given == "auto" else given
        return found


def _with(dispersions: Dispersions, number: int, phi: float) -> Dispersions:
    """Return dispersions with another one in the place of one."""
    return (*dispersions[:number], phi, *dispersions[number + 1 :])


def _parameters_of(n_components: int, data: JoinedData) -> Array:
    """Count what each of several matrices determines: of a factor by its share of the entries."""
    total = dict.fromkeys(data.axes, 0)
    for own in data.joints:
        for axis in own.axes:
            total[axis] += own.n_observed
    lengths = {name: n_components * axis.length for name, axis in data.axes.items()}
    shares = [
        [lengths[axis] * own.n_observed / max(total[axis], 1) for axis in own.axes]
        for own in data.joints
    ]
    return np.array([sum(own) for own in shares])


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
