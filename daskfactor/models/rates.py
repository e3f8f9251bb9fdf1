"""Rates and shapes of gamma priors that are learnt: hyperpriors and full conditionals.

Entries that have a rate in common, n of them with the sum S, under a gamma prior of shape a:

    θ ~ Gamma(a, λ),   λ ~ Gamma(α, b),   λ | θ ~ Gamma(α + a n, b + S)

They are the row of W or the column of H (Gopalan et al. 2015, "Scalable recommendation with
hierarchical Poisson factorization", section 2), or a component of one factor, or one of both:
then a component whose rate grows fades from W and H alike (Tan and Févotte 2013, "Automatic
relevance determination in nonnegative matrix factorization with the β-divergence", section 3).

α is the least whole number under which the prior mean of μ is finite: 2 where a rate is one
factor's, E 1/λ = b / (α - 1), and 3 where it is shared, E 1/λ² = b² / ((α - 1) (α - 2)). b is
such that these are what 1 over the rate, and 1 over the product of both, are under ``"auto"``,
so that the prior mean of μ is the mean of the data.

A shape is drawn with the rates integrated out, which are drawn after it: shape and rate of few
entries hold each other fast. Its own prior is Exponential(1).

Dispersions of columns, positive numbers that no rate is conjugate to, have logarithms

    x_j ~ N(m, s²),   m | s² ~ N(c, s² / k),   s² ~ InverseGamma(a, b)

so that those of which the data say little are near the others' (`Common`).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import gammaln

from daskfactor.models.likelihood import Array

ALONE, SHARED = 2.0, 3.0
"""Shapes of the hyperprior of a rate of one factor, and of one that both share."""
SHAPES = 0.02, 50.0
"""Bounds of a learnt shape; under smaller ones hardly an entry is above `FLOOR`."""
FLOOR = 1e-37
"""The smallest entry that samplers tell from smaller ones, in either precision."""
EVEN, SUPPORT = 0.1, 3.0
WIDTH, TRIES = 0.5, 10
DEEP, GRID = 40.0, 1001


class Totals(NamedTuple):
    """Sums over a factor's free entries with one rate, for the conditionals of its prior.

    ``entries`` and ``total`` have a number for every rate; ``logs`` is the sum of all logarithms,
    and ``floored`` the number of entries of which only a bound is known (`count_floored`).
    """

    entries: Array
    total: Array
    logs: float = 0.0
    floored: int = 0

    @property
    def length(self) -> float:
        """Entries of the factor in a component, at least 1; where rates are those of components."""
        return max(float(self.entries.max()), 1.0)


class Gamma(NamedTuple):
    """A hyperprior: its shape α and its rate b."""

    shape: float
    rate: float

    @classmethod
    def alone(cls, rate: float) -> "Gamma":
        """Give the prior of rates of one factor that would be fixed at ``rate``."""
        return cls(ALONE, (ALONE - 1.0) * rate**-1)

    @classmethod
    def shared(cls, rate_w: float, rate_h: float) -> "Gamma":
        """Give the prior of rates that both factors share."""
        return cls(SHARED, math.sqrt((SHARED - 1.0) * (SHARED - 2.0) / (rate_w * rate_h)))

    def posterior(self, weight: Any, total: Any) -> "Gamma":
        """Return the law of λ given its power and the sum it multiplies in a density."""
        return Gamma(self.shape + weight, self.rate + total)

    def draw(self, rng: np.random.Generator, weight: Array, total: Array) -> Array:
        """Draw λ from its `posterior`."""
        shape, rate = self.posterior(weight, total)
        return np.asarray(rng.gamma(shape, 1.0 / rate))

    def log_density(self, rates: Array) -> float:
        """Return Σ log Gamma(λ; α, b)."""
        constant = self.shape * math.log(self.rate) - math.lgamma(self.shape)
        logs = (self.shape - 1.0) * np.log(rates) - self.rate * rates
        return float(rates.size * constant + np.sum(logs))

    def log_marginal(self, weight: Array, total: Array) -> float:
        """Return Σ log ∫ λ^weight exp(-λ total) Gamma(λ; α, b) dλ."""
        grown = self.shape + weight
        constant = self.shape * math.log(self.rate) - math.lgamma(self.shape)
        return float(np.sum(constant + gammaln(grown) - grown * np.log(self.rate + total)))


class Common(NamedTuple):
    """The prior of numbers x_j ~ N(m, s²) whose m and s² are learnt from all of them.

    Alone, a number has a t law around ``centre`` of 2 ``shape`` degrees of freedom.
    """

    shape: float
    scale: float
    centre: float
    weight: float

    def posterior(self, x: Array) -> "Common":
        """Return the law of m and s² given the numbers, of the same form."""
        n, mean = x.size, float(x.mean())
        weight, gap = self.weight + n, mean - self.centre
        spread = float(np.sum((x - mean) ** 2)) + self.weight * n / weight * gap**2
        centre = (self.weight * self.centre + n * mean) / weight
        return Common(self.shape + 0.5 * n, self.scale + 0.5 * spread, centre, weight)

    def draw(self, rng: np.random.Generator) -> tuple[float, float]:
        """Draw m and s."""
        s = math.sqrt(self.scale / rng.gamma(self.shape))
        return self.centre + s / math.sqrt(self.weight) * rng.standard_normal(), s

    def log_marginal(self, x: Array) -> float:
        """Return log p(x), m and s² integrated out."""
        after = self.posterior(x)
        result = math.lgamma(after.shape) - math.lgamma(self.shape)
        result += self.shape * math.log(self.scale) - after.shape * math.log(after.scale)
        result += 0.5 * math.log(self.weight / after.weight)
        return result - 0.5 * x.size * math.log(2.0 * math.pi)


def relevant(part: Array, information: float, entries: float) -> float:
    """Count the components that matter and that data support.

    A component is dead if its part of the mean is less than `EVEN` of an even share of all K,
    or if it explains less than `SUPPORT` for each of its entries, counts or as much information
    of another law: one that fits noise explains about one.

    Parameters
    ----------
    part
        Of a mean (or a variance) that each component makes up, (K,).
    information
        What the data say of each unit of these: of Poisson counts, how many they are.
    entries
        Entries of a component, in both factors.
    """
    least = max(SUPPORT * entries / information, EVEN * float(np.mean(part)))
    return float(np.count_nonzero(part > least))


def log_sum(values: Any) -> float:
    """Return Σ log θ, of entries that are at least `FLOOR`."""
    floor = values.dtype.type(FLOOR)
    return float(np.sum(np.log(np.maximum(values, floor)), dtype=np.float64))


def count_floored(values: Any) -> int:
    """Count entries that stand for themselves and all smaller ones: samplers write none below f.

    Such an entry has the probability ∫_0^f θ^(a-1) dθ = f^a / a in place of the density f^(a-1),
    as λ f is nothing. Of shape 0.02, in single precision, they are a sixth of all entries.
    """
    return int(np.count_nonzero(values <= values.dtype.type(FLOOR)))


def draw_prior_shape(rng: np.random.Generator) -> float:
    """Draw a from its prior, Exponential(1) between `SHAPES`."""
    return -math.log(rng.uniform(math.exp(-SHAPES[1]), math.exp(-SHAPES[0])))


def draw_positive(
    log_density: Callable[[float], float], a: float, rng: np.random.Generator, bounds: Any = SHAPES
) -> float:
    """Draw a between two bounds from Exponential(1) times a likelihood, by slices of log a.

    The first slice is `WIDTH` wide.

    Source: Neal 2003, "Slice sampling", section 4, stepping out.
    """

    def of_log(x: float) -> float:
        inside = math.log(bounds[0]) < x < math.log(bounds[1])
        return log_density(math.exp(x)) + x - math.exp(x) if inside else -math.inf

    x = math.log(a)
    level = of_log(x) - rng.exponential()
    if not math.isfinite(level):
        return a  # the chain has diverged, and will be seen to have
    low = x - WIDTH * rng.random()
    high = low + WIDTH
    while of_log(low) > level:
        low -= WIDTH
    while of_log(high) > level:
        high += WIDTH
    while True:
        new = rng.uniform(low, high)
        if of_log(new) > level:
            return math.exp(new)
        low, high = (new, high) if new < x else (low, new)


def draw_each(
    log_density: Callable[[Array], Array], x: Array, width: float, rng: np.random.Generator
) -> Array:
    """Draw every number from a density of its own, by slice sampling of all of them together.

    An interval of this width, laid around each number at random, shrinks towards it until a
    point of the slice is met, or stays where it is after `TRIES`, each at the price of a pass
    over the data: the way from one point of a slice to another is as likely as the way back,
    however long it may be.

    Source: Neal 2003, "Slice sampling", section 4, without stepping out.
    """
    level = log_density(x) - rng.exponential(size=x.size)
    low = x - width * rng.random(x.size)
    high, left = low + width, np.ones(x.size, bool)
    for _ in range(TRIES):
        new = np.where(left, rng.uniform(low, high), x)
        inside = left & (log_density(new) > level)
        low, high = np.where(new < x, new, low), np.where(new > x, new, high)
        x, left = np.where(inside, new, x), left & ~inside
        if not left.any():
            break
    return x


def draw_scales(power: float, rise: Array, fall: Array, uniform: Array) -> Array:
    """Draw c from p(c) ∝ c^(power - 1) exp(-rise c - fall / c), a number of each uniform one.

    W_k → c W_k and H_k → H_k / c change no mean, and that is what the gamma priors leave of c,
    with power = a_w I - a_h J, rise = Σ_i λ_w w_ik and fall = Σ_j λ_h h_kj: the density along
    the orbit, times the volume c^(I - J) and the measure dc / c that the group of scales leaves
    as it is (Liu and Sabatti 2000, "Generalised Gibbs sampler and multigrid Monte Carlo for
    Bayesian computation", theorem 1).

    The distribution function of x = log c is inverted on a grid of `GRID` points, down to `DEEP`
    nats below the mode. Around the mode of x the log
    density, which is concave, falls by R (e^x - 1 - x) + F (e^-x - 1 + x).
    """
    root = np.hypot(power, 2.0 * np.sqrt(rise * fall))
    mode = np.where(power > 0, (root + power) / (2.0 * rise), 2.0 * fall / (root - min(power, 0.0)))
    up, down = rise * mode, fall / mode

    def depth(x: Array) -> Array:
        with np.errstate(over="ignore"):
            return np.asarray(up * (np.expm1(x) - x) + down * (np.expm1(-x) + x))

    ends = []
    for sign in (-1.0, 1.0):
        x = sign / np.sqrt(up + down)
        while (shallow := depth(x) < DEEP).any():
            x = np.where(shallow, 2.0 * x, x)
        ends.append(x)
    x = np.linspace(ends[0], ends[1], GRID)
    density = np.exp(-depth(x))
    total = np.zeros_like(x)
    np.cumsum(0.5 * (density[1:] + density[:-1]), axis=0, out=total[1:])
    columns = zip(uniform, total.T, x.T, strict=True)
    drawn = [np.interp(u * integral[-1], integral, at) for u, integral, at in columns]
    return np.asarray(mode * np.exp(drawn))
