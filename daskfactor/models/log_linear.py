r"""Log-linear rates of gamma priors: links to covariates, and Hamiltonian draws of these.

Of one component, with covariates x_i of the rows,

    θ_i ~ Gamma(a, λ exp(-x_i γ)),    γ ~ Normal(0, I / τ),    λ fixed, or λ ~ Gamma(α, b)

so that exp(x_i γ) multiplies the prior mean a / λ of a row. What is drawn is γ, or where λ is
not fixed (γ, g) with g = -log λ, whose covariate is 1 everywhere. The density is log-concave,
and the expected information A = a XᵀX + τ I changes with neither θ nor the component: with A
for the mass, paths are of about unit length in every direction.

Source: McCullagh and Nelder 1989, "Generalized linear models", section 8.3; Neal 2011, "MCMC
using Hamiltonian dynamics", sections 2 and 4.1.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from daskfactor.models.covariates import Covariates
from daskfactor.models.likelihood import Array
from daskfactor.models.rates import Gamma
from daskfactor.models.settings import Pair

FARTHEST = 60.0
MOST_STEPS, NEAR = 25, 0.01
PATH, UNIT = 1.5, 4
SHORTEST, LONGEST = 0.3, 1.2


def multiples(covariates: Covariates, link: Array) -> Array:
    """Return exp(x_i γ_k), (n, K), by which covariates multiply prior means.

    Logarithms are at most `FARTHEST`.
    """
    return np.asarray(np.exp(np.clip(covariates.predicted(link), -FARTHEST, FARTHEST)))


@dataclass(frozen=True)
class LinkLaw:
    r"""The conditional of x = (γ, g), or of γ under a fixed λ, of K components at once.

    .. math:: \log p = -\sum_i (a \eta_i + \theta_i e^{-\eta_i}) - \tfrac\tau2 |\gamma|^2
        - \alpha g - b e^{-g}, \quad \eta = X \gamma + g

    Attributes
    ----------
    covariates
        X of the rows that have data, with ones last where λ is drawn, (n, F').
    factor
        Their entries θ, (n, K); times λ where that is fixed.
    shape, ridge
        a and τ.
    level
        Prior of λ; None where it is fixed.
    """

    covariates: Covariates
    factor: Array
    shape: float
    ridge: float
    level: Gamma | None

    @classmethod
    def of(
        cls, covariates: Covariates, factor: Array, prior: Pair, rate: Any, level: Gamma | None
    ) -> Self:
        """Make the law of covariates as they are, and of entries; ``prior`` is (a, τ)."""
        if level is None:
            return cls(covariates, factor * rate, *prior, None)
        return cls(covariates.with_ones, factor, *prior, level)

    @cached_property
    def ridges(self) -> Array:
        """Prior precisions of x, (F', 1): none of g, which has a law of its own."""
        column = np.full((self.covariates.shape[1], 1), self.ridge)
        if self.level is not None:
            column[-1] = 0.0
        return column

    def evaluate(self, x: Array) -> tuple[Array, Array]:
        """Return log p, (K,), and its gradient, (F', K)."""
        with np.errstate(over="ignore", invalid="ignore"):
            field = self.covariates.predicted(x)
            ratio = self.factor * np.exp(-field)
            value = -(self.shape * field + ratio).sum(axis=0)
            value -= 0.5 * (self.ridges * np.square(x)).sum(axis=0)
            slope = self.covariates.values.T @ (ratio - self.shape) - self.ridges * x
            if self.level is not None:
                pull = self.level.rate * np.exp(-x[-1])
                value -= self.level.shape * x[-1] + pull
                slope[-1] += pull - self.level.shape
        return value, np.asarray(slope)

    def scaled(self, slope: Array) -> Array:
        """Return A⁻¹ G."""
        return self.covariates.solve(slope, self.ridge / self.shape) / self.shape

    def centre(self) -> Array:
        """Return about where the density is largest: by scoring, in shorter steps if need be.

        It takes `MOST_STEPS` at most, or stops where less than `NEAR` of log p is to be gained.
        """
        x = np.zeros((self.covariates.shape[1], self.factor.shape[1]))
        if self.level is not None:
            among = self.shape * len(self.factor) + self.level.shape
            x[-1] = np.log((self.factor.sum(axis=0) + self.level.rate) / among)
        value, slope = self.evaluate(x)
        share = np.ones(x.shape[1])
        for _ in range(MOST_STEPS):
            way = self.scaled(slope)
            if not ((slope * way).sum(axis=0) > NEAR).any():
                break
            new_value, new_slope = self.evaluate(x + share * way)
            better = new_value >= value
            x = np.where(better, x + share * way, x)
            value = np.where(better, new_value, value)
            slope = np.where(better, new_slope, slope)
            share = np.where(better, np.minimum(1.0, 2.0 * share), 0.25 * share)
        return x

    def energy(self, value: Array, velocity: Array) -> Array:
        """Return minus the log density of x and of its velocity, Normal(0, A⁻¹)."""
        field = self.covariates.predicted(velocity)
        moving = self.shape * np.square(field).sum(axis=0)
        return np.asarray(0.5 * (moving + self.ridge * np.square(velocity).sum(axis=0)) - value)

    def draw(self, x: Array, rng: np.random.Generator) -> Array:
        """Draw x given the present one by a path that is refused, or not, for each component.

        A path is `PATH` long in units of the law's width, and its steps are 1 long for up to
        `UNIT` numbers. Every component takes a share of that between `SHORTEST` and `LONGEST`:
        where paths are too long, some are short.
        """
        count, K = x.shape
        size = min(1.0, (UNIT / count) ** 0.25)
        steps = math.ceil(PATH / size)
        size = size * rng.uniform(SHORTEST, LONGEST, K)
        nothing, precision = np.zeros(self.factor.shape), np.full(K, self.shape)
        velocity = self.covariates.draw_link(nothing, precision, self.ridge / self.shape, rng)
        value, slope = self.evaluate(x)
        before, new = self.energy(value, velocity), x
        with np.errstate(over="ignore", invalid="ignore"):
            push = 0.5 * size * self.scaled(slope)
            for _ in range(steps):
                velocity = velocity + push
                new = new + size * velocity
                value, slope = self.evaluate(new)
                push = 0.5 * size * self.scaled(slope)
                velocity = velocity + push
            change = self.energy(value, velocity) - before
        return np.where(change < rng.exponential(size=K), new, x)
