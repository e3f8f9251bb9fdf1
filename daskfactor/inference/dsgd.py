"""Distributed stochastic gradient descent by strata: a point estimate from single entries.

A stratum is a part of the data without a row or a column in common between its
blocks, so its blocks can be descended at once, and that is what a plan's round is.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import positive_number, warn
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Reshuffled, Schedule
from daskfactor.errors import DataWarning, OptionError
from daskfactor.executors.base import Executor
from daskfactor.executors.plan import Action, CycleOptions, Op, Round, build_plan
from daskfactor.executors.state import ChainState, FactorBand
from daskfactor.inference.bands import drop_arrays
from daskfactor.inference.base import Arrays, ArraySpec, Bands, check_schedule
from daskfactor.inference.dispersion import DispersionRule, dispersion_rule, typical_value
from daskfactor.inference.gaussian_chain import NO_FLOOR, column_table, warm_start
from daskfactor.inference.multiplicative import (
    OnStep,
    Optimizer,
    PointFit,
    mean_floor,
    objective,
    start_state,
)
from daskfactor.inference.passes import evaluate
from daskfactor.inference.program import Fit, Program, take_fits
from daskfactor.kernels.descent import descent_kernel
from daskfactor.kernels.views import Workspace
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.random import Stream, generator

Array = NDArray[Any]
Columns = list[Array]
"""Tables of the columns of W and of H, (3, K'): prior mean, pull to it, 1 where it moves."""

GROWTH, REDUCTION = 1.05, 0.5
"""Factors of the step when the objective fell, and when it rose (the bold driver)."""
LOOKS = (5, 10, 15)
"""Iterations at which the dispersion is estimated; after the last it stays."""
LOOK_FLOOR = 1e-2
"""Smallest μ for that, as a share of the data's mean: a projected μ may be zero."""
UNEVEN = {True: 0.2, False: 0.01}
"""Share of cells that count by their weights, below which a descent is doubted: of non-negative
factors, which it sets to zero for good, and of others. Measured against converged fits."""
PATIENCE = 5
"""Iterations over which the objective must fall by more than ``tol``."""
MOST_TRIALS = 12
FIRST_TRIALS = (-4, -3)
"""Powers of two that the search for a first step begins with."""
SHARE = "share"
"""Name of a band's 1 / n_i: the part of its row's prior that one entry stands for."""


@dataclass(frozen=True)
class DSGD(Optimizer):
    """Maximum-a-posteriori fit by stochastic gradient descent, stratum by stratum.

    For every observed entry, rows in a fresh random order at each visit of a
    block, with r = (v - μ) μ^(β-2) and n_i, n_j observed entries of its row and
    column:

        w_i ← [w_i + ε (r h_j - φ λ_w / n_i)]₊     h_j ← [h_j + ε (r w_i - φ λ_h / n_j)]₊

    For a real-valued model without the [·]₊, and with the pull φ λ (x - m) / n of its
    Gaussian priors, whose precisions stay where a chain of its samplers starts.

    One iteration visits every entry once. Then the bold driver: if the objective
    fell, ε grows by 5 %; if it rose, the iteration is undone and ε halved.

    Parameters
    ----------
    max_iter
        Largest number of iterations, undone ones included; the search for a first
        step takes one or two more passes.
    step
        ε of the first iteration, in the unit of one entry's gradient; ``"auto"``
        tries several on the first stratum and takes the best.
    tol
        Stop when the objective falls by less than this share over 5 iterations;
        0 never stops early.
    schedule
        Order of the strata; reshuffled every iteration by default.

    Notes
    -----
    Gemulla, Nijkamp, Haas and Sismanis 2011, "Large-scale matrix factorization
    with distributed stochastic gradient descent", sections 3 to 5. ε r is clipped to
    ±1, so that entries of tiny mean do not throw their rows far off; where cells have
    weights, steps are implicit in its place (Toulis and Airoldi 2017, "Asymptotic and
    finite-sample properties of estimators based on stochastic gradients"). On few entries
    a row, the noise of single entries makes the bold driver stop short of where
    :class:`MultiplicativeUpdates` arrives.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> method = dfac.DSGD(max_iter=20)
    >>> point = dfac.optimize(V, dfac.TweedieNMF(2), method, random_seed=0, progressbar=False)
    >>> point["W"].shape, point["H"].shape
    ((20, 2), (2, 15))
    """

    max_iter: int = 50
    step: float | Literal["auto"] = "auto"
    tol: float = 1e-4
    schedule: Schedule = field(default_factory=Reshuffled)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.step, str):
            if self.step != "auto":
                raise OptionError(f'step must be "auto" or a positive number, got {self.step!r}')
        else:
            positive_number("step", self.step)
        check_schedule(self.schedule)

    def check_model(self, model: Any) -> None:
        """Refuse gamma priors that are not exponential: near zero their pull has no bounds.

        And covariates, whose link is sampled.
        """
        if model.joins:
            raise OptionError(
                "DSGD fits one matrix, not several; use MultiplicativeUpdates, or sample()"
            )
        if model.covariates != (None, None):
            raise OptionError(
                "DSGD learns no link to covariates; use sample(), or leave covariates_w and "
                "covariates_h out"
            )
        if model.nonnegative and (model.shape_w, model.shape_h) != (1.0, 1.0):
            raise OptionError(
                "DSGD descends under exponential priors only, got shape_w="
                f"{model.shape_w:g} and shape_h={model.shape_h:g}; use MultiplicativeUpdates"
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
        """Descend; refuse data most of whose observed entries are not stored."""
        if data.unstored == "zero":
            raise OptionError(
                "DSGD visits stored entries one by one, but here every entry that is not stored "
                'is an observed zero; use MultiplicativeUpdates, or pass unstored="missing" if '
                "that is what such an entry means"
            )
        squares = float(data.mass.row_squares.sum()) * data.total_observed
        share = data.total_mass**2 / squares if data.weighting is not None else 1.0
        if share < UNEVEN[model.nonnegative]:
            other = "MultiplicativeUpdates()" if model.nonnegative else "sample()"
            warn(
                f"the {data.weighting} of cells are so uneven that they count as {share:.2g} of "
                "their number would with equal ones, and DSGD, which takes one step for all of "
                f"them, may end far from the best fit; use {other}",
                DataWarning,
            )
        descent = StochasticDescent(data, model, self, executor, seed, state)
        for iteration in range(1, self.max_iter + 1):
            descent.advance(iteration)
            on_step(iteration, self.max_iter)
            if descent.finished:
                break
        return descent.result()

    def block_step(
        self, program: Program, op: Op, data: BlockedData, bands: Bands, workspace: Workspace
    ) -> None:
        """Descend along every entry of a block, its rows in random order.

        The program's hyperparameters are the tables of the columns, its shrink is ε.
        """
        del workspace
        rows, cols = bands
        view, projected = data.view(*op.block), math.isfinite(program.floor)
        rng = generator(program.key[0], 0, Stream.SCHEDULE, op.iteration, *op.block)
        order = rng.permutation(view.m)
        # The scale is B where every stratum comes up once, N / |stratum| where they are drawn.
        step = program.step_size(op.iteration) * op.scale / data.grid.blocks
        factors, shares = (rows.values, cols.values), (rows.arrays[SHARE], cols.arrays[SHARE])
        col_w, col_h = (table.astype(rows.values.dtype) for table in program.hyper)
        partly = not all(table[2].all() for table in program.hyper)
        descent = descent_kernel(program.likelihood, projected, rows.values.shape[1], partly)
        law = program.floor, program.likelihood.numbers
        descent(view.arguments, order, factors, shares, (col_w, col_h), step, law)

    @property
    def arrays(self) -> Arrays:
        return {SHARE: ArraySpec(changes="never", columns=1)}


class StochasticDescent:
    """A descent on its way: the best state so far, its fit, the step to take next.

    Until φ is known, how much the prior of non-negative factors counts against the likelihood
    is not, either: it counts nothing. Real-valued factors keep the precisions λ and the noise
    that a chain starts from until there is a better estimate of the noise.

    Attributes
    ----------
    finished
        Whether further iterations would change nothing worth while.
    """

    def __init__(
        self,
        data: BlockedData,
        model: Any,
        method: DSGD,
        executor: Executor,
        seed: int,
        state: ChainState | None = None,
    ) -> None:
        self.data, self.model, self.method = data, model, method
        self.executor, self.seed = executor, seed
        self.hyper: Any
        if model.nonnegative:
            self.rule, self.floor = dispersion_rule(model, data), mean_floor(data, model.likelihood)
            self.rule.alone = True
            self.state = state or start_state(data, model, seed, 0, executor=executor)
            hyper = model.resolve(data.level, self.rule.fixed or 1.0)
            self.hyper = hyper._replace(dispersion=self.rule.first)
        else:
            law = TweedieNMF(model.n_components, beta=2.0, dispersion=model.noise)
            self.rule, self.floor = DispersionRule(law, data), NO_FLOOR
            self.state, self.hyper = warm_start(data, model, seed, 0, executor, state=state)
            self.state.each(strip)
        share_priors(self.state, data, self.columns())
        self.fit = evaluate(executor, data, self.state, self.law[0], self.floor)
        self.step = 0.0 if isinstance(method.step, str) else float(method.step)
        self.history: list[tuple[int, float]] = []
        self.stalled, self.finished = 0, False

    @property
    def law(self) -> tuple[Likelihood, float]:
        """Return the law at the present dispersion, and φ."""
        law: tuple[Likelihood, float] = self.model.likelihood.at(self.hyper.dispersion)
        return law

    def columns(self) -> Columns:
        """Return the tables of the columns of W and of H at the present φ."""
        (_, phi), tables = self.law, []
        if not self.model.nonnegative:
            return [
                np.stack([mean, phi * precision * free, free])
                for mean, precision, _, free in column_table(self.hyper, self.model.width)
            ]
        for factor, frozen in enumerate(self.model.frozen):
            table = np.zeros((3, self.model.n_components))
            table[1], table[2] = phi * self.hyper.prior(factor)[0], 1.0
            if frozen is not None:
                table[1:, frozen] = 0.0
            tables.append(table)
        return tables

    def objective(self, state: ChainState, fit: Fit) -> float:
        """Return what `MultiplicativeUpdates` bring down, or Σ (v - μ)²/2 + φ Σ λ (x - m)²/2."""
        if self.model.nonnegative:
            return objective(self.model, state, self.hyper, fit)
        penalty = 0.0
        for factor, (mean, pull, _) in enumerate(self.columns()):
            for own in state.each(partial(weighted_distance, mean=mean, weights=pull), factor):
                penalty += 0.5 * own
        return -fit.negative_divergence + penalty

    def advance(self, iteration: int) -> None:
        """Visit every entry once; φ is estimated while the fit is young, and then stays."""
        if iteration == 1:
            self.choose_step()
        before = self.loss
        self.iterate(iteration)
        settled, tol = self.look(iteration), self.method.tol
        fell = before - self.loss > tol / PATIENCE * abs(before)
        self.stalled = 0 if fell else self.stalled + 1
        self.finished = settled and tol > 0 and self.stalled >= PATIENCE

    @property
    def loss(self) -> float:
        """Return the objective at the best state, under the present φ."""
        return self.objective(self.state, self.fit)

    def iterate(self, iteration: int) -> None:
        """Visit all strata once; undo it if the objective rose."""
        state, fit = self._run(self._plan(iteration), self.step)
        if self.objective(state, fit) < self.loss:
            self.state, self.fit = state, fit
            self.step *= GROWTH
            self.history.append((iteration, self.loss))
        else:
            self.step *= REDUCTION

    def look(self, iteration: int) -> bool:
        """Estimate φ anew while the fit is young; return whether it stays from now on."""
        last = min(LOOKS[-1], self.method.max_iter)
        if iteration in LOOKS or iteration == last:
            floor, nonnegative = self.floor, self.model.nonnegative
            if nonnegative:
                floor = max(floor, LOOK_FLOOR * typical_value(self.data))
            _, estimate = self.rule.look(self.executor, self.state, floor)
            if iteration == last:
                estimate = self.rule.settle(self.executor, self.state, floor, estimate)
            name = "dispersion" if nonnegative else "noise"
            self.hyper = self.hyper._replace(**{name: estimate})
            if (law := self.law[0]).numbers:  # the fit is another
                self.fit = evaluate(self.executor, self.data, self.state, law, self.floor)
        return iteration >= last

    def result(self) -> PointFit:
        self.state.each(partial(drop_arrays, names=(SHARE,)))
        history = self.history or [(0, self.loss)]  # the start was the best, or all is frozen
        return PointFit(self.state, self.hyper, self.fit, history)

    def choose_step(self) -> None:
        """Search, by factors of two, for the step that brings the first stratum down furthest.

        It begins below the step that moves the mean of a usual entry, at the start, all
        the way to its value: 1 / (m^(β-2) (|w|² + |h|²)), m the mean of the data.
        """
        if self.step:
            return
        first = self._plan(1)[0]
        again = tuple(op._replace(action=Action.EVALUATE) for op in first.ops)
        stratum = first, first._replace(ops=again)
        length = sum(
            sum(self.state.each(square, factor)) / size
            for factor, size in enumerate(self.data.shape)
        )
        weight = self.data.total_mass / self.data.total_observed
        unit = self.model.likelihood.unit(typical_value(self.data)) / (length * weight)
        found: dict[int, float] = {}

        def trial(exponent: int) -> None:
            """Find the loss after a visit with a step of ``unit`` 2^exponent."""
            loss = -self._run(stratum, unit * 2.0**exponent)[1].negative_divergence
            found[exponent] = loss if math.isfinite(loss) else math.inf

        for exponent in FIRST_TRIALS:
            trial(exponent)
        while len(found) < MOST_TRIALS:
            best = min(found, key=lambda exponent: found[exponent])
            new = [exponent for exponent in (best - 1, best + 1) if exponent not in found]
            if not new:
                break
            trial(new[0])
        self.step = unit * 2.0 ** min(found, key=lambda exponent: found[exponent])

    def _plan(self, iteration: int) -> tuple[Round, ...]:
        """Plan a visit of all strata, and the evaluation of all blocks."""
        return build_plan(
            self.method.schedule,
            self.data.n_observed,
            range(iteration, iteration + 1),
            lambda cycle: generator(self.seed, 0, Stream.SCHEDULE, cycle),
            lambda cycle: CycleOptions(evaluate=True),
        )

    def program(self, step: float) -> Program:
        """Make the block operations with a step at the present φ."""
        law, key = self.law[0], (self.seed, 0)
        return Program(self.method, law, self.floor, self.columns(), key, shrink=step)

    def _run(self, plan: tuple[Round, ...], step: float) -> tuple[ChainState, Fit]:
        """Run a plan from a copy of the best state; return it and the fit of what it evaluated."""
        state = self.executor.run(plan, self.program(step), self.state.copy(), self.data)
        (fit,) = take_fits(state).values()
        state.forget()
        return state, fit


def strip(band: FactorBand) -> None:
    """Leave a band nothing but its values."""
    band.arrays.clear()
    band.counts.clear()


def square(band: FactorBand) -> float:
    """Return the sum of the squares of all entries."""
    return float(np.vdot(band.values, band.values))


def weighted_distance(band: FactorBand, mean: Array, weights: Array) -> float:
    """Return Σ_k p_k Σ_i (x_ik - m_k)²."""
    return float(weights @ ((band.values.astype(np.float64) - mean) ** 2).sum(axis=0))


def share_priors(state: ChainState, data: BlockedData, columns: Columns) -> None:
    """Give every band 1 / n_i, and rows without any observed entry their prior's mode."""
    for factor, (mode, _, free) in enumerate(columns):
        state.each(partial(share_prior, data, factor, mode=mode, free=free), factor)


def share_prior(data: BlockedData, factor: int, band: FactorBand, mode: Array, free: Array) -> None:
    """Give a band 1 / n_i, and rows without any observed entry their prior's mode."""
    counts = data.counts(factor)[band.span]
    share = np.zeros(len(counts), band.values.dtype)
    np.divide(1.0, counts, out=share, where=counts > 0, casting="same_kind")
    band.arrays[SHARE] = share
    empty = np.flatnonzero(counts == 0)
    band.values[empty] = np.where(free > 0, mode, band.values[empty])
