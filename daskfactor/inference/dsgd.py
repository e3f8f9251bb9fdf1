"""Gradient descent part by part of the data: a point estimate by the steps of `PSGLD`, no noise.

The blocks of a part have no row or column in common, so that all of them move at once: a part
is a round of a plan.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import positive_number, warn
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Reshuffled, Schedule
from daskfactor.errors import DataWarning, OptionError
from daskfactor.executors.base import Executor
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.executors.state import ChainState, FactorBand
from daskfactor.inference.bands import drop_arrays
from daskfactor.inference.base import check_schedule
from daskfactor.inference.dispersion import DispersionRule, typical_value
from daskfactor.inference.multiplicative import Descent, OnStep, Optimizer
from daskfactor.inference.normal_parameters import (
    NO_FLOOR,
    WEIGHTS,
    column_table,
    quadratic_form,
    warm_start,
)
from daskfactor.inference.passes import SharePass, every, init_band, run_pass
from daskfactor.inference.program import (
    METRIC,
    Arrays,
    ArraySpec,
    Kernel,
    Program,
    Visit,
    learn_metric,
    prepare_state,
    refresh_metric,
    take_fits,
)
from daskfactor.models.gaussian import GaussianHyper
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.random import Stream, generator

Array = NDArray[Any]

GROWTH, REDUCTION = 1.05, 0.5
"""Factors of the step when the objective fell, and when it rose (the bold driver)."""
FIRST = 1.5
"""First step, in the unit of the metric, times the number of parts."""
LOOKS = (15, 40, 100)
"""Iterations at which the dispersion is estimated; after the last it stays."""
LOOK_FLOOR = 1e-2
"""Smallest μ for that, as a share of the data's mean."""
UNEVEN = {True: 0.2, False: 0.01}
"""Share of cells that count by their weights, below which a descent is doubted: of non-negative
factors, and of others."""
PATIENCE = 10
"""Iterations over which the objective must fall by more than ``tol``."""


ARRAYS: Arrays = WEIGHTS | dict.fromkeys(METRIC, ArraySpec())
"""Arrays of a descent's bands, which each block may write."""


class DescentKernel(Kernel):
    """Steps of gradient descent on the bands of a block."""

    def step(self, program: Program, visit: Visit) -> None:
        """Move both bands by the block's gradients, from the same old state."""
        op, bands, gathered, hyper = visit.op, visit.bands, None, program.hyper
        if "metric" in bands[0].arrays:  # of non-negative factors
            gathered = tuple(np.zeros_like(band.values) for band in bands)
        gradients = program.gradient(visit, gathered)
        size = program.step_size(op.iteration)
        for factor, band in enumerate(bands):
            values, gradient = band.values, gradients[factor]
            if gathered is None:
                table = column_table(hyper, values.shape[1])[factor].astype(values.dtype)
                mean, precision, curvature, free = table
                metric = precision + curvature * band.arrays["weights"]
                values += size * free * (gradient - precision * (values - mean)) / metric
                continue
            rate = np.asarray(program.prior(band, factor)[0], values.dtype)
            move, metric = size * (gradient - rate), band.arrays["metric"]
            np.divide(move, metric, out=move, where=metric > 0)
            values *= np.maximum(1 + move, 1) / np.maximum(1 - move, 1)
            weight = values.dtype.type(op.scale / visit.data.grid.parts)
            band.arrays["gathered"] += weight * gathered[factor]
            if op.last:  # by this iteration alone
                band.counts["curvature"] = 0
                learn_metric(band, hyper, factor, program.frozen[factor])

    def log_prior(self, program: Program, band: FactorBand, factor: int) -> float:
        """Return 0: a descent looks at the density by itself."""
        return 0.0


@dataclass(frozen=True)
class DSGD(Optimizer):
    """Maximum-a-posteriori fit by stochastic gradient descent, part by part of the data.

    The steps are those of :class:`PSGLD` without noise. With G the gradient of the log posterior
    density by the cells of a part, times the number of parts, and c the denominator of the
    multiplicative update, both in units of 1/φ:

        r = ε G / c,    θ ← θ (1 + max(r, 0)) / (1 + max(-r, 0))

    For a real-valued model x ← x + ε G / D in the metric D of :class:`SGHMC`; precisions stay
    where a chain of its samplers starts.

    One iteration visits every cell once. Then the bold driver: if the objective
    fell, ε grows by 5 %; if it rose, the iteration is undone and ε halved.

    Parameters
    ----------
    max_iter
        Largest number of iterations, undone ones included.
    step
        ε of the first iteration, without a unit; ``"auto"`` is 1.5 over the number of
        parts.
    tol
        Stop when the objective falls by less than this share over 10 iterations;
        0 never stops early.
    schedule
        Order of the parts; reshuffled every iteration by default.

    Notes
    -----
    Gemulla, Nijkamp, Haas and Sismanis 2011, "Large-scale matrix factorization
    with distributed stochastic gradient descent", sections 3 to 5, with one step for each
    block in place of one for each cell.

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

    max_iter: int = 200
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
        """Refuse several matrices, covariates, and gamma priors that are not exponential."""
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

    def begin(
        self, data: BlockedData, model: Any, executor: Executor, seed: int, state: ChainState | None
    ) -> Descent:
        """Begin a descent; warn of cells whose weights are very uneven."""
        squares = float(data.mass.row_squares.sum()) * data.total_observed
        share = data.total_mass**2 / squares if data.weighting is not None else 1.0
        if share < UNEVEN[model.nonnegative]:
            other = "MultiplicativeUpdates()" if model.nonnegative else "sample()"
            warn(
                f"the {data.weighting} of cells are so uneven that they count as {share:.2g} of "
                "their number would with equal ones, and DSGD may need many more iterations than "
                f"{self.max_iter} to come near the best fit; raise max_iter, or use {other}",
                DataWarning,
            )
        if model.nonnegative:
            descent = super().begin(data, model, executor, seed, state)
            prepare_state(descent.state, METRIC)
            program = SharePass(
                model.likelihood,
                descent.floor,
                every(descent.state),
                (),
                tuple(METRIC),
                partial(init_band, kernel=DescentKernel(self, self.schedule, ARRAYS), hyper=None),
            )
            run_pass(descent.place, program)
            refresh_metric(descent.state, unit_hyper(descent), model.frozen)
            modes = [(0.0, model.free(factor)) for factor in range(2)]
        else:
            rule = DispersionRule(
                TweedieNMF(model.n_components, beta=2.0, dispersion=model.noise), data
            )
            state, hyper = warm_start(data, model, seed, 0, executor, WEIGHTS, state)
            descent = NormalDescent(data, model, executor, state, rule, hyper)
            modes = [(table[0], table[3] > 0) for table in column_table(hyper, model.width)]
        for factor, (mode, free) in enumerate([] if model.tensor else modes):
            fill = partial(fill_empty_rows, data, factor, mode=mode, free=free)
            descent.state.each(fill, factor)
        return descent

    def descend(self, descent: Descent, seed: int, on_step: OnStep) -> None:
        """Iterate; estimate φ while the fit is young, and keep it from then on."""
        first: float = FIRST / descent.data.grid.parts if self.step == "auto" else float(self.step)
        step, stalled, settled = first, 0, descent.rule.fixed is not None
        descent.evaluate()
        for iteration in range(1, self.max_iter + 1):
            before = descent.loss
            latest = self._visit(descent, seed, iteration, step)
            fell = latest.loss < before
            step *= GROWTH if fell else REDUCTION
            if fell:
                descent.state, descent.fit = latest.state, latest.fit
                descent.objective.append((iteration, descent.loss))
            on_step(iteration, self.max_iter)
            falls = before - descent.loss > self.tol / PATIENCE * abs(before)
            stalled = 0 if falls else stalled + 1
            ended = self.tol > 0 and stalled >= PATIENCE
            if settled and ended:
                break
            if not settled and (ended or iteration in (*LOOKS, self.max_iter)):
                settled = ended or iteration >= min(LOOKS[-1], self.max_iter)
                estimate_dispersion(descent, settled)
                descent.correct_last()
                step, stalled = first, 0  # the objective is another one
        descent.state.each(partial(drop_arrays, names=(*METRIC, *WEIGHTS)))
        # The start was the best, or everything is frozen.
        descent.objective = descent.objective or [(0, descent.loss)]

    def _visit(self, descent: Descent, seed: int, iteration: int, step: float) -> Descent:
        """Visit every cell once, and evaluate the fit, from a copy of the best state."""
        plan = build_plan(
            self.schedule,
            descent.data.n_observed,
            range(iteration, iteration + 1),
            lambda cycle: generator(seed, 0, Stream.SCHEDULE, cycle),
            lambda cycle: CycleOptions(evaluate=True),
        )
        law, hyper, model = descent.likelihood, unit_hyper(descent), descent.model
        key, frozen = (seed, 0), model.frozen
        kernel = DescentKernel(self, self.schedule, ARRAYS)
        program = Program(kernel, law, descent.floor, hyper, key, frozen, shrink=step)
        state = descent.executor.run(plan, program, descent.state.copy(), descent.data)
        (fit,) = take_fits(state).values()
        state.clear_records()
        return replace(descent, state=state, fit=fit)


class NormalDescent(Descent):
    """A descent of a `GaussianMF`, whose dispersion is the noise."""

    hyper: GaussianHyper

    @property
    def floor(self) -> float:
        return NO_FLOOR

    @property
    def loss(self) -> float:
        """Σ (v - μ)²/2 + φ Σ λ (x - m)²/2."""
        densities = [
            density
            for factor, table in enumerate(column_table(self.hyper, self.model.width))
            for density in self.state.each(partial(band_density, columns=table), factor)
        ]
        return float(-self.fit.negative_divergence - self.hyper.noise * math.fsum(densities))


def band_density(band: FactorBand, columns: Array) -> float:
    """Return the log prior density of a band under normal priors, but for its constant."""
    return quadratic_form(band.values, columns)


def unit_hyper(descent: Descent) -> Any:
    """Return hyperparameters in units of 1/φ, which may be 0 at first: then no prior counts."""
    if isinstance(descent, NormalDescent):
        return descent.hyper
    hyper = descent.model.at(descent.hyper)[1]
    rates = {name: hyper.dispersion * getattr(hyper, name) for name in ("rate_w", "rate_h")}
    return hyper._replace(dispersion=1.0, **rates)


def estimate_dispersion(descent: Descent, last: bool) -> None:
    """Estimate φ from the fit, and evaluate anew where the law depends on it."""
    floor, normal = descent.floor, isinstance(descent, NormalDescent)
    if not normal:
        floor = max(floor, LOOK_FLOOR * typical_value(descent.data))
    place = descent.place._replace(floor=floor)
    _, phi = descent.rule.estimate_at(place)
    if last:
        phi = descent.rule.test_poisson(place, phi)
    name = "noise" if normal else "dispersion"
    descent.hyper = descent.hyper._replace(**{name: phi})
    if descent.likelihood.numbers:
        descent.evaluate()


def fill_empty_rows(data: BlockedData, factor: int, band: FactorBand, mode: Any, free: Any) -> None:
    """Put the free entries of rows without any observed cell at the mode of their prior."""
    empty = np.flatnonzero(data.counts(factor)[band.span] == 0)
    band.values[empty] = np.where(free, mode, band.values[empty])
