"""What stochastic gradient descent goes down: a model's loss, its penalties, its start."""

import math
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.base import Executor
from daskfactor.executors.state import ChainState
from daskfactor.inference.gaussian import column_table, warm_start
from daskfactor.inference.multiplicative import (
    DispersionRule,
    mean_floor,
    objective,
    start_state,
)
from daskfactor.inference.passes import Fit
from daskfactor.models.gaussian import GaussianMF
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.tweedie import TweedieNMF

Array = NDArray[Any]


class Columns(NamedTuple):
    """Of the columns of W and of H, (3, K') each: prior mean, pull to it, 1 where it moves."""

    rows: Array
    cols: Array


class Target(Protocol):
    """A model as a sum over entries, and what its ``"auto"`` is resolved to so far.

    ``projected`` tells that factors are non-negative under exponential priors, whose
    pull φ λ is the same everywhere; else priors are Gaussian and pull with φ λ (x - m).
    """

    likelihood: Likelihood
    floor: float
    projected: bool
    hyper: Any
    rule: DispersionRule

    def start(self, executor: Executor, seed: int) -> ChainState:
        """A random start; resolves the hyperparameters."""
        ...

    def set_dispersion(self, dispersion: float) -> None:
        """Take over an estimate of φ."""
        ...

    def columns(self) -> Columns:
        """Prior means and pulls at the present φ, in double precision."""
        ...

    def objective(self, state: ChainState, fit: Fit) -> float:
        """Σ d_β(v|μ) and the penalties at the present φ."""
        ...


class NonNegative:
    """A `TweedieNMF`: as :class:`MultiplicativeUpdates` sees it.

    Until φ is known, how much the prior counts against the likelihood is not, either:
    it counts nothing.
    """

    projected = True

    def __init__(self, data: BlockedData, model: TweedieNMF) -> None:
        self.data, self.model = data, model
        self.likelihood, self.floor = model.likelihood, mean_floor(data, model.likelihood)
        self.rule = DispersionRule(model, data)
        self.hyper = model.resolve(data.mean, self.rule.fixed or 1.0)
        self.set_dispersion(self.rule.fixed or 0.0)

    def start(self, executor: Executor, seed: int) -> ChainState:
        del executor
        return start_state(self.data, self.model, seed, 0)

    def set_dispersion(self, dispersion: float) -> None:
        self.hyper = self.hyper._replace(dispersion=dispersion)

    def columns(self) -> Columns:
        tables = []
        for factor, frozen in enumerate(self.model.frozen):
            table = np.zeros((3, self.model.n_components))
            table[1], table[2] = self.hyper.dispersion * self.hyper.prior(factor)[0], 1.0
            if frozen is not None:
                table[1:, frozen] = 0.0
            tables.append(table)
        return Columns(*tables)

    def objective(self, state: ChainState, fit: Fit) -> float:
        return objective(state, self.hyper, fit, self.model.frozen)


class RealValued:
    """A `GaussianMF`, its precisions where a chain starts: Σ (v - μ)²/2 + φ Σ λ (x - m)²/2."""

    floor, projected = -math.inf, False

    def __init__(self, data: BlockedData, model: GaussianMF) -> None:
        self.data, self.model, self.likelihood = data, model, model.likelihood
        law = TweedieNMF(model.n_components, beta=2.0, dispersion=model.noise)
        self.rule = DispersionRule(law, data)

    def start(self, executor: Executor, seed: int) -> ChainState:
        state, self.hyper = warm_start(self.data, self.model, seed, 0, executor)
        for band in state.bands():
            band.arrays.clear()
            band.counts.clear()
        return state

    def set_dispersion(self, dispersion: float) -> None:
        self.hyper = self.hyper._replace(noise=dispersion)

    def columns(self) -> Columns:
        tables = []
        for mean, precision, _, free in column_table(self.hyper, self.model.biases):
            tables.append(np.stack([mean, self.hyper.noise * precision * free, free]))
        return Columns(*tables)

    def objective(self, state: ChainState, fit: Fit) -> float:
        penalty = 0.0
        for bands, (mean, pull, _) in zip((state.rows, state.cols), self.columns(), strict=True):
            for band in bands:
                squares = ((band.values.astype(np.float64) - mean) ** 2).sum(axis=0)
                penalty += 0.5 * float(pull @ squares)
        return -fit.negative_divergence + penalty


def make_target(data: BlockedData, model: TweedieNMF | GaussianMF) -> Target:
    """What descending on a model means."""
    if isinstance(model, GaussianMF):
        return RealValued(data, model)
    return NonNegative(data, model)
