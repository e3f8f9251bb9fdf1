"""Masked multiplicative updates for any β: warm starts of samplers, and point estimates."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import warn, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import DataWarning, OptionError
from daskfactor.executors.base import Executor
from daskfactor.executors.plan import Op
from daskfactor.executors.state import ChainState, FactorBand, empty_state
from daskfactor.inference.bands import column_sums, height, lift, multiply, sum_band, sum_entries
from daskfactor.inference.base import Algorithm
from daskfactor.inference.dispersion import dispersion_rule, typical_value
from daskfactor.inference.passes import Gathered, Pass, Place, SharePass, evaluate, every, run_pass
from daskfactor.inference.program import Bands, Fit, law_of, values_of
from daskfactor.kernels import blockwise
from daskfactor.kernels.steps import multiply_by_share
from daskfactor.kernels.views import Workspace
from daskfactor.models.gamma_factors import GammaFactors, Hyperparameters
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.rates import SHARED, Totals
from daskfactor.models.settings import FixedComponents, Mask, preserve_columns
from daskfactor.random import Stream, generator

Array = NDArray[Any]
OnStep = Callable[[int, int], None]
OnCycle = Callable[[int], None]

SMALLEST = 1e-6
"""Smallest entry, as a share of the start's: with a < 1 the objective has no minimum."""

FIT_EVERY = 20
"""Iterations between looks at the fit (for the dispersion and for convergence)."""
SHORT_CALL = 1e8
"""Entries times components of cycles that are done in one call: a second, or less."""
FIRST_LOOK, LAST_LOOK = 5, 60
"""Iterations at which the dispersion is estimated first and last."""


NO_FIT = Fit(-math.inf, math.inf)


def report_nothing(done: int, total: int) -> None:
    """Leave the number of iterations done, and their largest number, unreported."""


@dataclass
class Descent:
    """A point estimate on its way.

    Attributes
    ----------
    data, model, executor
        The problem, and what runs the passes over the data.
    state
        Factors, which change in place.
    rule
        Estimates the dispersion, which the hyperparameters hold; that of the model unless there is
        another one.
    hyper
        Hyperparameters; at first those of the model, at the rule's first dispersion.
    objective
        Values of `loss`, each with its iteration.
    """

    data: BlockedData
    model: Any
    executor: Executor
    state: ChainState
    rule: Any = None
    hyper: Any = None
    fit: Fit = NO_FIT
    objective: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rule = rule = self.rule or dispersion_rule(self.model, self.data)
        if self.hyper is None:
            hyper = self.model.resolve(self.data.level, rule.fixed or 1.0)
            self.hyper = hyper._replace(dispersion=rule.first)

    @property
    def floor(self) -> float:
        """Smallest mean that gradients are taken at."""
        return mean_floor(self.data, self.model.likelihood)

    @property
    def place(self) -> Place:
        """The state as the rule looks at it."""
        return Place(self.executor, self.data, self.state, self.floor)

    @property
    def loss(self) -> float:
        """Objective at the present dispersion."""
        return objective(self.model, self.state, self.hyper, self.fit)

    @property
    def likelihood(self) -> Likelihood:
        """Likelihood of a cell at the present dispersion."""
        law: Likelihood = self.model.likelihood.at(self.hyper.dispersion)[0]
        return law

    def evaluate(self) -> None:
        """Evaluate the fit at the present dispersion."""
        self.fit = evaluate(self.place, self.likelihood)

    def correct_last(self) -> None:
        """Correct the last value of the objective, whose dispersion has changed since."""
        if self.objective:
            self.objective[-1] = (self.objective[-1][0], self.loss)

    def settle(self, dispersion: Any, last: bool = True) -> Any:
        """Return the dispersion that the rule settles on."""
        return self.rule.test_poisson(self.place, dispersion, last=last)

    def set_dispersion(self, dispersion: Any) -> None:
        """Take a dispersion, and the rates that follow from it and the factors."""
        self.hyper = self.hyper._replace(dispersion=dispersion)
        self.follow_rates()

    def follow_rates(self) -> None:
        """Set rates that both factors share to their means given these, so that components fade.

        Source: Tan and Févotte 2013, algorithm 1.
        """
        if self.model.shares_rates:
            data, totals = self.data, totals_of(self.model, self.state)
            level = self.hyper.dispersion, data.level, data.total_mass
            rates = self.model.mean_relevance(totals, *level)
            self.hyper = self.hyper._replace(rate_w=rates, rate_h=rates)


class Optimizer(Algorithm, ABC):
    """A way to a point estimate; a subclass has the fields ``max_iter`` and ``tol``.

    Attributes
    ----------
    multiplicative
        Tells whether its iterations are multiplicative updates.
    """

    multiplicative: ClassVar[bool] = False
    max_iter: int
    tol: float

    def __post_init__(self) -> None:
        whole_number("max_iter", self.max_iter, 1)
        if not (math.isfinite(self.tol) and self.tol >= 0):
            raise OptionError(f"tol must be zero or a small positive number, got {self.tol!r}")

    def check_model(self, model: Any) -> None:
        """Raise OptionError if it does not fit this model."""

    def check_data(self, data: BlockedData) -> None:
        """Raise OptionError if it does not fit these data."""

    def fit(
        self,
        data: BlockedData,
        model: Any,
        executor: Executor,
        seed: int,
        on_step: OnStep,
        state: ChainState | None = None,
    ) -> Descent:
        """Return a point estimate, from a state, which may change in place, or random factors.

        ``on_step`` receives the number of iterations done, and their largest number.

        Raises
        ------
        OptionError
            If it does not fit these data.
        """
        self.check_data(data)
        descent = self.begin(data, model, executor, seed, state)
        descent.rule.alone = True
        self.descend(descent, seed, on_step)
        return descent

    def begin(
        self, data: BlockedData, model: Any, executor: Executor, seed: int, state: ChainState | None
    ) -> Descent:
        """Begin at a state, or at random factors."""
        state = state or start_state(data, model, seed, 0, executor=executor)
        return Descent(data, model, executor, state)

    @abstractmethod
    def descend(self, descent: Descent, seed: int, on_step: OnStep) -> None:
        """Iterate until the objective hardly falls any more, or ``max_iter`` is reached."""


class AlternatingUpdates(Optimizer):
    """Move W given H and H given W, in turn, by sums over the blocks."""

    @abstractmethod
    def update(self, descent: Descent, iterations: int, on_cycle: OnCycle | None) -> None:
        """Run some iterations."""

    def descend(self, descent: Descent, seed: int, on_step: OnStep) -> None:
        """Iterate by `run_updates`."""
        run_updates(descent, self.max_iter, self.tol, on_step, self.update)
        if self.max_iter < LAST_LOOK:
            phi = descent.settle(descent.hyper.dispersion)
            descent.hyper = descent.hyper._replace(dispersion=phi)
            if descent.likelihood.numbers:
                descent.evaluate()
            descent.correct_last()


@dataclass(frozen=True)
class MultiplicativeUpdates(AlternatingUpdates):
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

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> method = dfac.MultiplicativeUpdates(max_iter=20)
    >>> point = dfac.optimize(V, dfac.TweedieNMF(2), method, random_seed=0, progressbar=False)
    >>> point["W"].shape, point["H"].shape
    ((20, 2), (2, 15))
    """

    multiplicative: ClassVar[bool] = True
    on_device: ClassVar[bool] = True
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

    def update(self, descent: Descent, iterations: int, on_cycle: OnCycle | None) -> None:
        """Run multiplicative updates."""
        update(descent, iterations, on_cycle)


def mean_floor(data: BlockedData, likelihood: Likelihood) -> float:
    """Return the smallest μ that gradients are taken at."""
    return likelihood.floor(typical_value(data))


def initial_state(
    data: BlockedData,
    n_components: int,
    seed: int,
    chain: int,
    attempt: int = 0,
    executor: Executor | None = None,
) -> ChainState:
    """Return random positive factors under which μ has about the mean of the data.

    Every band draws its own rows, where an executor holds it, if there is one.
    """
    state, grid = empty_state(data.grid, n_components, data.dtype), data.grid
    state = state if executor is None else executor.distribute(state)
    size = nth_root(typical_value(data) / n_components, len(grid.sides))
    for factor, side in enumerate(grid.sides):
        address = seed, chain, Stream.START, factor, *([attempt] if attempt else [])
        state.each(partial(draw_rows, size=size, address=address), factor, side.sizes)
    return state


def nth_root(value: float, n: int) -> float:
    """Return the size of each of n numbers whose product is a value."""
    return math.sqrt(value) if n == 2 else float(value ** (1.0 / n))


def draw_rows(band: FactorBand, length: int, size: float, address: Sequence[Any]) -> None:
    """Draw a band's rows: numbers of a factor's stream from its first row on."""
    rng, width = generator(*address), band.values.shape[1]
    rng.bit_generator.advance(band.offset * width)  # type: ignore[attr-defined]
    drawn = size * (0.5 + rng.random((length, width)))
    band.values = drawn.astype(band.values.dtype)


def run_updates(
    descent: Descent,
    iterations: int,
    tol: float = 0.0,
    on_step: OnStep = report_nothing,
    move: Callable[[Descent, int, OnCycle | None], None] | None = None,
) -> Descent:
    """Update W and H in turn, in place, by `update` or ``move``.

    Until the first estimate of φ, after five iterations, the prior counts nothing, because
    how much it counts against the likelihood depends on φ. After 60 iterations φ stays as it
    is, and only then can the objective be compared with itself. Priors of shapes below 1 count
    nothing until then: they drive entries to zero, where nothing is to be learnt of φ, and the
    more so the larger φ is taken to be.
    """
    model, rule, done = descent.model, descent.rule, 0
    history, spiked = descent.objective, min(model.starting_shapes) < 1
    for stop in sorted({*range(FIT_EVERY, iterations, FIT_EVERY), FIRST_LOOK, iterations}):
        if stop > iterations:
            continue
        follow = model.shares_rates and (done >= LAST_LOOK or rule.fixed is not None)
        while done < stop:
            if follow:
                descent.follow_rates()
            count = 1 if follow else stop - done
            (move or update)(descent, count, report_from(on_step, done, iterations))
            done += count
        rule.fade(model, descent.state)
        phi = descent.hyper.dispersion
        if done <= LAST_LOOK:
            descent.fit, phi = rule.estimate_at(descent.place)
        else:
            descent.evaluate()
        if done >= LAST_LOOK:
            settled = descent.settle(phi, last=False)
            phi = settled if done == LAST_LOOK or rule.fixed is not None else phi
        elif spiked and done < iterations:
            phi = rule.first
        descent.hyper = descent.hyper._replace(dispersion=phi)
        history.append((done, descent.loss))
        if done > LAST_LOOK + FIT_EVERY and tol:
            before, value = history[-2][1], history[-1][1]
            if before - value <= tol * abs(before):
                break
    return descent


def report_from(on_step: OnStep, before: int, total: int) -> OnCycle:
    """Turn the numbers of a plan's cycles into numbers of iterations for ``on_step``."""
    return lambda cycle: on_step(before + cycle + 1, total)


def update(descent: Descent, iterations: int = 1, on_cycle: OnCycle | None = None) -> None:
    """Update W and H in turn by multiplication; φ says how much their priors count."""
    (likelihood, hyper), data = descent.model.at(descent.hyper), descent.data
    factors = every(descent.state)
    size = nth_root(typical_value(data) / descent.model.n_components, len(factors))
    priors = [pull_of(hyper, factor) for factor in factors]
    floor = mean_floor(data, likelihood)
    if in_one_call(descent, likelihood, priors, iterations):
        penalties = float(priors[0][0]), float(priors[1][0])
        updates = WholeUpdates(likelihood, floor, (0,), penalties=penalties, cycles=iterations)
        run_pass(descent.place, updates)
        if on_cycle is not None:
            on_cycle(iterations - 1)
        return
    move = partial(
        move_by_share,
        priors=priors,
        frozen=descent.model.frozen,
        likelihood=likelihood,
        smallest=SMALLEST * size,
    )
    program = SharePass(likelihood, floor, factors, finish=move)
    run_pass(descent.place, program, iterations, on_cycle)


@dataclass(frozen=True)
class WholeUpdates(Pass):
    """Does cycles of `update` in one operation, where one block has all data."""

    penalties: tuple[float, float] = (0.0, 0.0)
    cycles: int = 1

    def update(self, op: Op, data: BlockedData, bands: Bands, workspace: Workspace) -> None:
        """Update both factors."""
        law = law_of(self.likelihood, op.block, bands[1])
        block = data.view(*op.block), law, values_of(bands), self.floor
        blockwise.update_block(block, self.penalties, self.cycles, workspace)


def in_one_call(
    descent: Descent, likelihood: Likelihood, priors: Sequence[tuple[Any, float]], iterations: int
) -> bool:
    """Return whether all updates fit in one call: one small block, one penalty for each factor."""
    data, model = descent.data, descent.model
    in_one_block = data.n_observed.shape == (1, 1) and not descent.executor.on_device
    short = iterations * float(data.n_observed.sum()) * model.n_components <= SHORT_CALL
    plain = all(not pull and not np.ndim(penalty) for penalty, pull in priors)
    plain = plain and likelihood.exponent == likelihood.share == 1.0
    return in_one_block and short and plain and all(mask is None for mask in model.frozen)


def pull_of(hyper: Hyperparameters, factor: int) -> tuple[Any, float]:
    """Return φ λ and φ (a - 1) of the prior of a factor."""
    rate, shape = hyper.prior(factor)
    return hyper.dispersion * rate, hyper.dispersion * (shape - 1.0)


def move_by_share(
    gathered: Gathered,
    priors: Any,
    frozen: Sequence[Mask],
    likelihood: Likelihood,
    smallest: float,
    everywhere: bool = False,
) -> None:
    """Move a band by its share; ``priors`` hold φ λ and φ (a - 1) of every factor.

    Entries are at least ``smallest`` where there is a pull, or ``everywhere``.
    """
    band, share, factor, _ = gathered
    penalty, pull = priors[factor]
    with preserve_columns(band.values, frozen[factor]):
        multiply_by_share(band.values, share, penalty, pull, likelihood, smallest)
        if everywhere:
            np.maximum(band.values, smallest, out=band.values)


def totals_of(
    model: GammaFactors, state: ChainState, unlinked: Mapping[int, Array] | None = None
) -> list[Totals]:
    """Sum up the free entries of both factors as the conditionals of their priors need it.

    ``unlinked``: by factor, the entries that count in place of the state's, in units of what
    covariates multiply their prior means by.
    """
    totals, shapes = [], (model.shape_w, model.shape_h)
    for factor, by in enumerate(model.rates_of):
        mask, free = model.frozen[factor], model.free(factor)
        by_rows = by is not None and by != "component"
        options: Any = {"frozen": mask, "logs": shapes[factor] == "auto", "by_rows": by_rows}
        if unlinked and factor in unlinked:
            parts = [sum_entries(unlinked[factor], **options)]
        else:
            parts = state.each(partial(sum_band, **options), factor)
        length, logs = sum(part.length for part in parts), math.fsum(part.logs for part in parts)
        sums = np.sum([part.columns for part in parts], axis=0)
        count, total = length * free.astype(np.float64), np.where(free, sums, 0.0)
        if by is None:
            count, total = count.sum(keepdims=True), total.sum(keepdims=True)
        elif by_rows:
            count = np.full(length, float(free.sum()))
            total = np.concatenate([part.rows for part in parts])
        totals.append(Totals(count, total, logs, sum(part.floored for part in parts)))
    return totals


def objective(model: GammaFactors, state: ChainState, hyper: Hyperparameters, fit: Fit) -> float:
    """Return the objective of the updates at the present φ.

    Σ d_β(v|μ) + φ (λ_w ΣW + λ_h ΣH - (a_w - 1) Σ log W - (a_h - 1) Σ log H), the
    penalties over the entries that are not frozen. Of rates that follow the factors, with
    (α + n_k) / (b + S_k), it is (α + n_k) log (b + S_k), the density without these rates.
    """
    prior, (_, hyper) = 0.0, model.at(hyper)
    for factor, mask in enumerate(model.frozen):
        rate, shape = hyper.prior(factor)
        parts = state.each(partial(sum_band, frozen=mask, logs=shape != 1.0), factor)
        if isinstance(rate, np.ndarray):
            length = sum(part.length for part in parts)
            prior -= (SHARED / 2 + shape * length) * float(np.sum(np.log(rate)))
        else:
            prior += rate * sum(part.total for part in parts)
        if shape != 1.0:
            prior -= (shape - 1.0) * math.fsum(part.logs for part in parts)
    return float(-fit.negative_divergence + hyper.dispersion * prior)


def balance(state: ChainState, frozen: tuple[Mask, ...] = (None, None)) -> None:
    """Rescale so that Σ_i w_ik = Σ_j h_kj for every k, and so on, and lift exact zeros.

    μ does not change by the first; the second adds 10⁻³ of each factor's mean,
    because a step whose size is in proportion to θ cannot leave zero quickly. A
    component that is frozen on either side keeps its scale, and frozen entries keep
    their values.
    """
    moves = even_scales(column_sums(state))
    for mask in frozen:
        if mask is not None:
            for by in moves:
                by[mask] = 1.0
    for factor, (by, mask) in enumerate(zip(moves, frozen, strict=True)):
        state.each(partial(multiply, by=by), factor)
        parts = state.each(partial(sum_band, frozen=mask), factor)
        count = sum(part.size for part in parts)
        more = 1e-3 * sum(part.total for part in parts) / max(count, 1)
        state.each(partial(lift, by=more, frozen=mask), factor)


def even_scales(sums: Sequence[Array]) -> list[Array]:
    """Return what makes sums of the columns of all factors equal; their product is 1.

    Where one of them is zero it is 1 for all.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        if len(sums) == 2:
            first = np.sqrt(sums[1] / sums[0])
        else:
            first = np.prod([total / sums[0] for total in sums[1:]], axis=0) ** (1.0 / len(sums))
        good = np.isfinite(first) & (first > 0)
        first = np.where(good, first, 1.0)
        others = [first * (sums[0] / total) for total in sums[1:-1]]
    moves = [first, *(np.where(good, scale, 1.0) for scale in others)]
    return [*moves, 1.0 / np.prod(moves, axis=0)]


def even_out(state: ChainState) -> None:
    """Rescale a balanced state so that W and H have the same mean, as under one prior rate."""
    lengths = [sum(state.each(height, factor)) for factor in (0, 1)]
    scale = math.sqrt(lengths[0] / lengths[1])
    for factor, by in enumerate((scale, 1.0 / scale)):
        state.each(partial(multiply, by=by), factor)


def start_state(
    data: BlockedData,
    model: GammaFactors,
    seed: int,
    chain: int,
    attempt: int = 0,
    executor: Executor | None = None,
) -> ChainState:
    """Return random positive factors under which μ has about the mean of the data.

    Of those of an ``attempt``, from 0; frozen components have their values.
    """
    state = initial_state(data, model.n_components, seed, chain, attempt, executor)
    return with_fixed(state, data, model)


def with_fixed(
    state: ChainState, data: BlockedData, model: Any, rescale: bool = True
) -> ChainState:
    """Put the values of frozen components into a state, in the grid's order.

    With ``rescale`` the free ones, which have one scale in both factors, go on theirs.
    """
    if model.fixed == (None, None):
        return state
    tilt = model.tilt(data.level) if rescale else 1.0
    for factor, (fixed, by) in enumerate(zip(model.fixed, (tilt, 1.0 / tilt), strict=True)):
        state.each(partial(multiply, by=by), factor)
        if fixed is not None:
            spans = map(data.grid.sides[factor].slice, range(data.grid.blocks))
            placed = fixed.at(data.order(factor))
            state.each(put_fixed, factor, [placed.at(span) for span in spans])
    return state


def put_fixed(band: FactorBand, fixed: FixedComponents) -> None:
    """Put the values of frozen components into a band; these are of its rows."""
    fixed.put(band.values, slice(None))
