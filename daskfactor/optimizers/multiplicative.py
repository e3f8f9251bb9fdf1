"""Masked multiplicative updates for any β: the samplers' warm start, and a verb of its own."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import whole_number
from daskfactor.engine.base import Executor
from daskfactor.engine.state import ChainState, FactorBand, make_state
from daskfactor.errors import OptionError
from daskfactor.io.blocks import BlockedData
from daskfactor.models.tweedie import Hyperparameters, TweedieNMF
from daskfactor.optimizers.passes import Fit, Share, evaluate, shares, total
from daskfactor.random import Stream, generator

Array = NDArray[Any]
OnIteration = Callable[[int, float], None]

FIT_EVERY = 20
"""Iterations between looks at the fit (for the dispersion and for convergence)."""
FIRST_LOOK, LAST_LOOK = 5, 60
"""Iterations at which the dispersion is estimated first and last."""


@dataclass(frozen=True)
class MultiplicativeUpdates:
    """Maximum-a-posteriori fit by multiplicative updates of W and H in turn.

    W ← W ⊙ [ ((M ⊙ V ⊙ μ^(β-2)) Hᵀ) / ((M ⊙ μ^(β-1)) Hᵀ + φ λ_w) ]^γ(β), and the
    same for H with μ = W H taken anew; γ = 1/(2 - β) for β < 1, 1/(β - 1) for
    β > 2, and 1 between, which never lets the objective rise.

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

    max_iter: int = 300
    tol: float = 1e-4

    def __post_init__(self) -> None:
        whole_number("max_iter", self.max_iter, 1)
        if not (math.isfinite(self.tol) and self.tol >= 0):
            raise OptionError(f"tol must be zero or a small positive number, got {self.tol!r}")

    @property
    def name(self) -> str:
        return type(self).__name__


@dataclass(slots=True)
class PointFit:
    """A point estimate on its way: the factors, the dispersion, and the objective so far."""

    state: ChainState
    hyper: Hyperparameters
    fit: Fit
    objective: list[tuple[int, float]]


def exponent(beta: float) -> float:
    """γ(β), the power under which the multiplicative update is monotone."""
    if beta < 1:
        return 1.0 / (2.0 - beta)
    return 1.0 / (beta - 1.0) if beta > 2 else 1.0


def mean_floor(data: BlockedData, beta: float) -> float:
    """Smallest μ that gradients are taken at: 10⁻⁶ of the data's mean, 10⁻⁹ for β ≤ 0."""
    return (1e-6 if beta > 0 else 1e-9) * typical_value(data)


def typical_value(data: BlockedData) -> float:
    """A positive size of the entries: their mean, or 1 if that is not positive."""
    return float(data.mean) if data.mean > 0 else 1.0


def initial_state(
    data: BlockedData, n_components: int, seed: int, chain: int, stream: Stream = Stream.START
) -> ChainState:
    """Random positive factors under which μ has about the mean of the data."""
    size = math.sqrt(typical_value(data) / n_components)
    factors = []
    for side, length in enumerate(data.shape):
        rng = generator(seed, chain, stream, side)
        factor = size * (0.5 + rng.random((length, n_components)))
        factors.append(factor.astype(data.dtype))
    return make_state(data.grid, factors[0], factors[1])


class DispersionRule:
    """Where φ comes from: fixed by the user, 1 for counts, or Pearson's statistic.

    φ̂ = Σ (v - μ)² μ^(β-2) / N at draws of the chain. The spread of the draws
    makes up for the degrees of freedom that the factors use; at a point estimate
    the divisor is N less the number of parameters.
    """

    def __init__(self, model: TweedieNMF, data: BlockedData) -> None:
        self.data = data
        self.count = data.total_observed
        components = min(model.n_components, *data.shape)
        self.parameters = components * (sum(data.shape) - components)
        self.counts = model.beta == 1.0 and bool(data.is_integer)
        self.fixed: float | None = None
        self.settled = model.dispersion != "auto"
        if model.dispersion != "auto":
            self.fixed = float(model.dispersion)

    @property
    def _freedom(self) -> float:
        """Entries less parameters, but never below a tenth of the entries."""
        return max(self.count - self.parameters, 0.1 * self.count)

    def at_point(self, fit: Fit) -> float:
        """Estimate from a point fit."""
        if self.fixed is not None:
            return self.fixed
        return max(fit.pearson / self._freedom, float(np.finfo(np.float32).tiny))

    def at_draw(self, fit: Fit) -> float:
        """Estimate from a draw of the chain."""
        if self.fixed is not None:
            return self.fixed
        return max(fit.pearson / self.count, float(np.finfo(np.float32).tiny))

    def settle(self, estimate: float) -> None:
        """Fix φ = 1 for counts that the point fit does not show to be no Poisson counts.

        Pearson's statistic of Poisson counts has a variance of (2 + 1/μ) for
        each degree of freedom; five standard errors away from 1 is plain enough.
        """
        if self.settled:
            return
        self.settled = True
        freedom = self.count - self.parameters
        enough = freedom >= max(0.1 * self.count, FEWEST)
        error = math.sqrt((2 + 1 / typical_value(self.data)) / max(freedom, 1))
        if self.counts and not (enough and abs(estimate - 1) > NEARLY_POISSON + 5 * error):
            self.fixed = 1.0

    def follow(self, other: "DispersionRule") -> None:
        """Decide as another chain of the same run has decided."""
        self.fixed, self.settled = other.fixed, other.settled


FEWEST = 100
"""Degrees of freedom without which counts are taken to be Poisson."""
NEARLY_POISSON = 0.1
"""Counts whose dispersion is this near 1, or not surely further off, are taken to be Poisson."""


def multiply(band: FactorBand, share: Share, penalty: float, power: float) -> None:
    """θ ← θ (numerator / (denominator + penalty))^power, in place; 0 / 0 counts as 0."""
    denominator = share.denominator + penalty
    ratio = np.divide(
        share.numerator,
        denominator,
        out=np.zeros_like(share.numerator),
        where=denominator > 0,
    )
    np.maximum(ratio, 0, out=ratio)
    band.values *= ratio if power == 1.0 else ratio**power


def run_updates(
    data: BlockedData,
    model: TweedieNMF,
    state: ChainState,
    executor: Executor,
    rule: DispersionRule,
    iterations: int,
    tol: float = 0.0,
    on_iteration: OnIteration | None = None,
) -> PointFit:
    """Iterate from a state; φ is looked at anew every few iterations until it stays.

    Until the first look, after five iterations, the prior counts nothing, because
    how much it counts against the likelihood depends on φ. After 60 iterations φ
    stays as it is, and only then can the objective be compared with itself.
    """
    beta, floor = model.beta, mean_floor(data, model.beta)
    hyper = model.resolve(data.mean, rule.fixed or 1.0)
    weight = hyper.dispersion if rule.fixed is not None else 0.0
    history: list[tuple[int, float]] = []
    fit = Fit(-math.inf, math.inf)
    for iteration in range(1, iterations + 1):
        for side, bands, rate in (
            ("rows", state.rows, hyper.rate_w),
            ("columns", state.cols, hyper.rate_h),
        ):
            for band, share in zip(
                bands, shares(executor, data, state, side, beta, floor), strict=True
            ):
                multiply(band, share, weight * rate, exponent(beta))
        if iteration % FIT_EVERY == 0 or iteration in (FIRST_LOOK, iterations):
            fit = evaluate(executor, data, state, beta, floor)
            if iteration <= LAST_LOOK:
                weight = rule.at_point(fit)
            if iteration == LAST_LOOK:
                rule.settle(weight)
                weight = rule.fixed or weight
            hyper = hyper._replace(dispersion=weight)
            history.append((iteration, objective(state, hyper, fit)))
            if on_iteration is not None:
                on_iteration(iteration, history[-1][1])
            if iteration > LAST_LOOK + FIT_EVERY and _converged(history, tol):
                break
        elif on_iteration is not None:
            on_iteration(iteration, math.nan)
    return PointFit(state, hyper, fit, history)


def _converged(history: list[tuple[int, float]], tol: float) -> bool:
    if len(history) < 2 or tol == 0:
        return False
    before, now = history[-2][1], history[-1][1]
    return before - now <= tol * abs(before)


def objective(state: ChainState, hyper: Hyperparameters, fit: Fit) -> float:
    """Σ d_β(v|μ) + φ (λ_w ΣW + λ_h ΣH): what the updates bring down at a given φ."""
    prior = hyper.rate_w * total(state.rows) + hyper.rate_h * total(state.cols)
    return -fit.negative_divergence + hyper.dispersion * prior


def balance(state: ChainState) -> None:
    """Rescale so that Σ_i w_ik = Σ_j h_kj for every k, and lift exact zeros.

    μ does not change by the first; the second adds 10⁻³ of each factor's mean,
    because a step whose size is in proportion to θ cannot leave zero quickly.
    """
    sums = [
        np.sum([band.values.sum(axis=0, dtype=np.float64) for band in bands], axis=0)
        for bands in (state.rows, state.cols)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.sqrt(sums[1] / sums[0])
    ratio = np.where(np.isfinite(ratio) & (ratio > 0), ratio, 1.0)
    for bands, factor in ((state.rows, ratio), (state.cols, 1.0 / ratio)):
        for band in bands:
            band.values *= factor.astype(band.values.dtype)
        count = sum(band.values.size for band in bands)
        lift = 1e-3 * total(bands) / count
        for band in bands:
            band.values += band.values.dtype.type(lift)
