"""Masked multiplicative updates for any β: the samplers' warm start, and a verb of its own."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import warn, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import DataWarning, OptionError
from daskfactor.executors.base import Executor
from daskfactor.executors.state import ChainState, FactorBand, make_state
from daskfactor.inference.base import Algorithm
from daskfactor.inference.dispersion import DispersionRule, dispersion_rule, typical_value
from daskfactor.inference.program import Fit, column_sums, evaluate, shares
from daskfactor.models.gamma_factors import GammaFactors, Hyperparameters
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.rates import SHARED, Totals, log_sum
from daskfactor.models.settings import Mask, held
from daskfactor.random import Stream, generator

Array = NDArray[Any]
OnStep = Callable[[int, int], None]

SMALLEST = 1e-6
"""Smallest entry, as a share of the start's: with a < 1 the objective has no minimum."""
NEWTON_STEPS = 12


def gamma_update(
    theta: Array,
    numerator: Array,
    denominator: Array,
    pull: float,
    likelihood: Likelihood,
    smallest: float,
) -> Array:
    """The new θ, in double precision.

    Parameters
    ----------
    theta, numerator, denominator
        Of one band, (rows, K); the denominator with φ λ in it, positive.
    pull
        p = φ (a - 1), not zero.
    likelihood
        Its majoriser's powers (m, n) say what is solved: D r^m = num r^n + p / θ.
    smallest
        Least value of an entry, old or new.
    """
    old = np.maximum(theta.astype(np.float64), smallest)
    num = np.maximum(numerator.astype(np.float64), 0.0)
    den = denominator.astype(np.float64)
    share = np.abs(pull) / old
    if pull < 0:
        ratio = (num / (den + share)) ** likelihood.exponent
    elif likelihood.majorizer == (1.0, 0.0):
        ratio = (num + share) / den
    else:
        ratio = _root(num, den, share, likelihood)
    return np.asarray(np.maximum(old * ratio, smallest))


def _root(num: Array, den: Array, share: Array, likelihood: Likelihood) -> Array:
    """The one positive r with den r^m = num r^n + share, by Newton steps that never overshoot.

    den r^m - num r^n - share is concave for n < 0 and m = 1 and convex for m > 1 and n = 1,
    where it increases, and the steps begin below the root in the first case and above it in
    the second.
    """
    m, n = likelihood.majorizer
    alone, prior = (num / den) ** likelihood.exponent, share / den
    r = np.maximum(alone, prior) if n < 0 else alone + prior ** (1.0 / m)
    for _ in range(NEWTON_STEPS):
        value = den * r**m - num * r**n - share
        r = r - value / (m * den * r ** (m - 1.0) - n * num * r ** (n - 1.0))
    return np.asarray(r)


FIT_EVERY = 20
"""Iterations between looks at the fit (for the dispersion and for convergence)."""
FIRST_LOOK, LAST_LOOK = 5, 60
"""Iterations at which the dispersion is estimated first and last."""


class PointFit(NamedTuple):
    """A point estimate: factors, hyperparameters, fit, and the objective at iterations."""

    state: ChainState
    hyper: Any
    fit: Fit
    objective: list[tuple[int, float]]


class Optimizer(Algorithm, ABC):
    """A way to a point estimate; a subclass has the fields ``max_iter`` and ``tol``.

    Attributes
    ----------
    multiplicative
        Whether its own iterations are multiplicative updates.
    """

    multiplicative: ClassVar[bool] = False
    max_iter: int
    tol: float

    def __post_init__(self) -> None:
        whole_number("max_iter", self.max_iter, 1)
        if not (math.isfinite(self.tol) and self.tol >= 0):
            raise OptionError(f"tol must be zero or a small positive number, got {self.tol!r}")

    def check_model(self, model: Any) -> None:
        """Raise OptionError if this model is not one that it is right for."""
        del model

    @abstractmethod
    def fit(
        self,
        data: BlockedData,
        model: Any,
        executor: Executor,
        seed: int,
        on_step: OnStep,
        state: ChainState | None = None,
    ) -> PointFit:
        """Iterate; ``on_step`` is told how many iterations are done, of how many.

        It begins with ``state``, which may change in place, or with random factors.

        Raises
        ------
        OptionError
            If these data are not ones that it is right for.
        """


@dataclass(frozen=True)
class MultiplicativeUpdates(Optimizer):
    """Maximum-a-posteriori fit by multiplicative updates of W and H in turn.

    W ← W ⊙ [ ((M ⊙ V ⊙ μ^(β-2)) Hᵀ) / ((M ⊙ μ^(β-1)) Hᵀ + φ λ_w) ]^γ(β), and the
    same for H with μ = W H taken anew; γ = 1/(2 - β) for β < 1, 1/(β - 1) for
    β > 2, and 1 between, which never lets the objective rise. Under a gamma prior of
    shape a it neither rises; for β = 1 and a > 1 the update is W ← (W ⊙ num + φ (a - 1))
    / (den + φ λ_w).

    With a < 1 the posterior density is infinite wherever an entry is zero, and there is
    no maximum: entries stop at 10⁻⁶ of the start's, and where the estimate ends says
    little of the posterior. A warning tells so; sample instead.

    Parameters
    ----------
    max_iter
        Largest number of iterations; one is two passes over the data.
    tol
        Stop when the objective falls by less than this share over 20
        iterations; 0 never stops early.

    Notes
    -----
    Févotte and Idier 2011, sections 3 and 4; the mask leaves missing entries out
    of both sums. Exact zeros stay zero.
    """

    multiplicative: ClassVar[bool] = True
    max_iter: int = 300
    tol: float = 1e-4

    def check_model(self, model: Any) -> None:
        """Refuse factors of any sign, and tell where there is no maximum."""
        if not model.nonnegative:
            raise OptionError(
                f"MultiplicativeUpdates keep factors non-negative, those of {type(model).__name__} "
                "are not; use DSGD(), or leave method out"
            )
        for name in ("shape_w", "shape_h"):
            shape = getattr(model, name)
            if shape < 1:
                warn(
                    f"with {name}={shape:g} the posterior density is infinite wherever an entry is "
                    f"zero, so there is no maximum: entries stop at {SMALLEST:g} of the start's; "
                    f"draw from the posterior with sample(), or take {name} of at least 1",
                    DataWarning,
                )

    def fit(
        self,
        data: BlockedData,
        model: Any,
        executor: Executor,
        seed: int,
        on_step: OnStep,
        state: ChainState | None = None,
    ) -> PointFit:
        state, rule = state or start_state(data, model, seed, 0), dispersion_rule(model, data)
        return run_updates(data, model, state, executor, rule, self.max_iter, self.tol, on_step)


def mean_floor(data: BlockedData, likelihood: Likelihood) -> float:
    """Return the smallest μ that gradients are taken at."""
    return likelihood.floor(typical_value(data))


def initial_state(
    data: BlockedData, n_components: int, seed: int, chain: int, attempt: int = 0
) -> ChainState:
    """Random positive factors under which μ has about the mean of the data."""
    size = math.sqrt(typical_value(data) / n_components)
    factors = []
    for side, length in enumerate(data.shape):
        rng = generator(seed, chain, Stream.START, side, *([attempt] if attempt else []))
        factor = size * (0.5 + rng.random((length, n_components)))
        factors.append(factor.astype(data.dtype))
    return make_state(data.grid, factors[0], factors[1])


def run_updates(
    data: BlockedData,
    model: GammaFactors,
    state: ChainState,
    executor: Executor,
    rule: DispersionRule,
    iterations: int,
    tol: float = 0.0,
    on_step: OnStep | None = None,
) -> PointFit:
    """Update W and H in turn from a state, which changes in place.

    Until the first look at φ, after five iterations, the prior counts nothing, because
    how much it counts against the likelihood depends on φ. After 60 iterations φ
    stays as it is, and only then can the objective be compared with itself.
    """
    floor = mean_floor(data, model.likelihood)
    hyper = model.resolve(data.mean, rule.fixed or 1.0)._replace(dispersion=rule.first)
    history: list[tuple[int, float]] = []
    fit = Fit(-math.inf, math.inf)
    for iteration in range(1, iterations + 1):
        if iteration > LAST_LOOK or rule.settled:
            hyper = relevance(data, model, state, hyper)
        law, _ = model.at(hyper)
        for factor in (0, 1):
            update(data, model, state, executor, hyper, factor)
        finished = False
        if iteration % FIT_EVERY == 0 or iteration in (FIRST_LOOK, iterations):
            rule.fade(model, state)
            if iteration <= LAST_LOOK:
                fit, phi = rule.look(executor, state, floor)
            else:
                fit, phi = evaluate(executor, data, state, law, floor), hyper.dispersion
            if iteration >= LAST_LOOK:
                rule.settle(rule.estimate(fit), last=False)
                phi = rule.fixed or phi
            hyper = hyper._replace(dispersion=phi)
            value = objective(model, state, hyper, fit)
            if iteration > LAST_LOOK + FIT_EVERY and tol:
                before = history[-1][1]
                finished = before - value <= tol * abs(before)
            history.append((iteration, value))
        if on_step is not None:
            on_step(iteration, iterations)
        if finished:
            break
    return PointFit(state, hyper, fit, history)


def update(
    data: BlockedData,
    model: GammaFactors,
    state: ChainState,
    executor: Executor,
    hyper: Hyperparameters,
    factor: int,
) -> None:
    """Update one factor; φ says how much its prior counts."""
    likelihood, hyper = model.at(hyper)
    frozen, power = model.frozen[factor], likelihood.exponent
    side, bands = (("rows", state.rows), ("columns", state.cols))[factor]
    rate, shape = hyper.prior(factor)
    penalty, pull = hyper.dispersion * rate, hyper.dispersion * (shape - 1.0)
    smallest = SMALLEST * math.sqrt(typical_value(data) / model.n_components)
    floor = mean_floor(data, likelihood)
    found = shares(executor, data, state, side, likelihood, floor)
    for band, (numerator, denominator) in zip(bands, found, strict=True):
        theta, total = band.values, denominator + penalty
        with held(theta, frozen):
            if pull:
                positive = np.maximum(total, np.finfo(theta.dtype).tiny)
                theta[:] = gamma_update(theta, numerator, positive, pull, likelihood, smallest)
                continue
            ratio = np.zeros_like(numerator)  # 0 / 0 counts as 0
            np.divide(numerator, total, out=ratio, where=total > 0)
            np.maximum(ratio, 0, out=ratio)
            theta *= ratio if power == 1.0 else ratio**power


def totals_of(model: GammaFactors, sides: Sequence[Sequence[Array]]) -> list[Totals]:
    """Sum up the free entries of both factors as the conditionals of their priors need it.

    ``sides`` are the entries of W and of Hᵀ, band by band, in units of what covariates multiply
    their prior means by.
    """
    found = []
    shapes = model.shape_w, model.shape_h
    for factor, bands in enumerate(sides):
        mask, by = model.frozen[factor], model.rates_of[factor]
        free = np.ones(model.n_components, bool) if mask is None else ~mask
        length, logs = sum(map(len, bands)), 0.0
        if shapes[factor] == "auto":
            logs = math.fsum(log_sum(values[:, free]) for values in bands)
        sums = np.sum([values.sum(axis=0, dtype=np.float64) for values in bands], axis=0)
        count, total = length * free.astype(np.float64), np.where(free, sums, 0.0)
        if by is None:
            count, total = count.sum(keepdims=True), total.sum(keepdims=True)
        elif by != "component":
            rows = [values[:, free].sum(axis=1, dtype=np.float64) for values in bands]
            count, total = np.full(length, float(free.sum())), np.concatenate(rows)
        found.append(Totals(count, total, logs))
    return found


def entries_of(state: ChainState) -> list[list[Array]]:
    """Give the entries of W and of Hᵀ, band by band."""
    return [[band.values for band in bands] for bands in (state.rows, state.cols)]


def relevance(
    data: BlockedData, model: GammaFactors, state: ChainState, hyper: Hyperparameters
) -> Hyperparameters:
    """Set rates that both factors share by their means given these, so that components fade.

    Source: Tan and Févotte 2013, algorithm 1.
    """
    if not model.shares_rates:
        return hyper
    about = hyper.dispersion, data.mean, data.total_mass
    rates = model.mean_relevance(totals_of(model, entries_of(state)), *about)
    return hyper._replace(rate_w=rates, rate_h=rates)


def objective(model: GammaFactors, state: ChainState, hyper: Hyperparameters, fit: Fit) -> float:
    """Return what the updates bring down at a given φ.

    Σ d_β(v|μ) + φ (λ_w ΣW + λ_h ΣH - (a_w - 1) Σ log W - (a_h - 1) Σ log H), the
    penalties over the entries that are not frozen. Of rates that follow the factors, with
    (α + n_k) / (b + S_k), it is (α + n_k) log (b + S_k), the density without these rates.
    """
    prior, (_, hyper) = 0.0, model.at(hyper)
    for factor, bands in enumerate((state.rows, state.cols)):
        rate, shape = hyper.prior(factor)
        free = _moving(bands, model.frozen[factor])
        if isinstance(rate, np.ndarray):
            length = sum(len(values) for values in free)
            prior -= (SHARED / 2 + shape * length) * float(np.sum(np.log(rate)))
        else:
            prior += rate * _total(free)
        if shape != 1.0:
            tiny = np.finfo(free[0].dtype).tiny  # a zero counts as the smallest normal number
            logs = (np.log(np.maximum(values, tiny)).sum(dtype=np.float64) for values in free)
            prior -= (shape - 1.0) * math.fsum(map(float, logs))
    return -fit.negative_divergence + hyper.dispersion * prior


def _moving(bands: list[FactorBand], frozen: Mask) -> list[Array]:
    """Return the columns of bands that are not frozen."""
    return [band.values if frozen is None else band.values[:, ~frozen] for band in bands]


def _total(parts: list[Array]) -> float:
    return float(sum(float(values.sum(dtype=np.float64)) for values in parts))


def balance(state: ChainState, frozen: tuple[Mask, Mask] = (None, None)) -> None:
    """Rescale so that Σ_i w_ik = Σ_j h_kj for every k, and lift exact zeros.

    μ does not change by the first; the second adds 10⁻³ of each factor's mean,
    because a step whose size is in proportion to θ cannot leave zero quickly. A
    component that is frozen on either side keeps its scale, and frozen entries keep
    their values.
    """
    sums = column_sums(state)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.sqrt(sums[1] / sums[0])
    ratio = np.where(np.isfinite(ratio) & (ratio > 0), ratio, 1.0)
    for mask in frozen:
        if mask is not None:
            ratio[mask] = 1.0
    for bands, factor, mask in zip(
        (state.rows, state.cols), (ratio, 1.0 / ratio), frozen, strict=True
    ):
        for band in bands:
            band.values *= factor.astype(band.values.dtype)
        free = _moving(bands, mask)
        count = sum(values.size for values in free)
        lift = 1e-3 * _total(free) / max(count, 1)
        for band in bands:
            with held(band.values, mask):
                band.values += band.values.dtype.type(lift)


def even_out(state: ChainState) -> None:
    """Rescale a balanced state so that W and H have the same mean, as under one prior rate."""
    lengths = [sum(len(band.values) for band in bands) for bands in (state.rows, state.cols)]
    factor = math.sqrt(lengths[0] / lengths[1])
    for bands, scale in ((state.rows, factor), (state.cols, 1.0 / factor)):
        for band in bands:
            band.values *= band.values.dtype.type(scale)


def start_state(
    data: BlockedData, model: GammaFactors, seed: int, chain: int, attempt: int = 0
) -> ChainState:
    """Random positive factors under which μ has about the mean of the data.

    Of those of an ``attempt``, from 0; frozen components have their values.
    """
    state = initial_state(data, model.n_components, seed, chain, attempt)
    return with_fixed(state, data, model)


def with_fixed(
    state: ChainState, data: BlockedData, model: Any, rescale: bool = True
) -> ChainState:
    """Put the values of frozen components into a state, in the grid's order.

    With ``rescale`` the free ones, which have one scale in both factors, go on theirs.
    """
    if model.fixed == (None, None):
        return state
    tilt = model.tilt(data.mean) if rescale else 1.0
    for bands, fixed, order, scale in (
        (state.rows, model.fixed[0], data.row_order, tilt),
        (state.cols, model.fixed[1], data.col_order, 1.0 / tilt),
    ):
        for band in bands:
            band.values *= band.values.dtype.type(scale)
            if fixed is not None:
                fixed.put(band.values, band.span if order is None else order[band.span])
    return state
