"""Coordinates of simplex and orthant in which no boundary is left but zero, which is mirrored.

The paper samples columns of W on the simplex by a change of variables, after Betancourt
2012, and mirrors H at zero, after Patterson and Teh 2013. Betancourt's variables are ratios
of partial sums of independent gamma variables; here are such variables themselves:

    w_ik = g_ik / S_k,   S_k = Σ_i g_ik,   p(g_k) ∝ S_k^a e^(-r S_k), mirrored at zero as H is

As p(g) depends on the sum alone, the column is uniform on the simplex, Dirichlet(1), and
independent of its sum, Gamma(I + a, r). With the likelihood of W, which does not know of the
sum either, columns are exactly on their posterior, with no Jacobian; the sum is one variable
more, of no influence. All rows are alike here: no cumulative products, in which the first row
of many would move all others, and an entry of zero is a point like others. With a = 0 the
entries are independent, as in Patterson and Teh; a > 0 keeps the sum of few rows away from
zero, where the coordinates are narrow.

Source: Masood and Doshi-Velez, section 6.2; Patterson and Teh 2013, "Stochastic gradient
Riemannian Langevin dynamics on the probability simplex", section 3 (expanded mean).
"""

import math
import time
import warnings
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from daskfactor.checks import is_number, whole_number
from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.executors.state import make_state
from daskfactor.inference.hmc import FIRST_STEP, JITTER, DualAveraging
from daskfactor.inference.passes import shares
from daskfactor.machine import single_threaded_blas
from daskfactor.random import Stream, generator
from daskfactor.stein.kernel import stein_matrix
from daskfactor.stein.particles import SIDES
from daskfactor.stein.scores import ScoreTarget, divergences, scores
from daskfactor.stein.state import (
    Array,
    History,
    Made,
    OnProgress,
    Options,
    Pair,
    Problem,
    checked_step,
    given,
)
from daskfactor.stein.weights import discrepancy

LIFT: Final = 1e-3
"""Of a factor's mean, below which no entry of the start is."""
EXCESS: Final = 10.0
"""a, of the law of the sum of a column."""
DOUBLINGS: Final = 200
"""Of a distance, or halvings, until it is given up."""


class Spot(NamedTuple):
    """A point of the chain: positions, log density there, and its gradient.

    Positions are (I, K), g or W, and (K, J), H.
    """

    place: Pair
    log_density: float
    gradient: Pair

    @property
    def usable(self) -> bool:
        parts = (*self.place, *self.gradient)
        return math.isfinite(self.log_density) and all(np.isfinite(one).all() for one in parts)


@dataclass(frozen=True)
class Chart:
    """The coordinates of a chain, in double precision whatever the type of the data."""

    problem: Problem

    def factors(self, place: Pair) -> Pair:
        """W and H at some coordinates."""
        first, H = place
        return (first / first.sum(axis=0), H) if self.problem.simplex else (first, H)

    def place(self, W: Array, H: Array) -> Pair:
        """Coordinates of factors, the sum of a column of g being what it is a priori, I.

        Entries at zero are lifted a little: all particles share zeros otherwise for long.
        """
        first = W * len(W) if self.problem.simplex else W
        places = []
        for side, values in zip(SIDES, (first, H.T), strict=True):
            lifted = np.maximum(values, LIFT * values.mean())
            mask = self.problem.target.frozen(side)
            if mask is not None:
                lifted[:, mask] = values[:, mask]
            places.append(lifted)
        return places[0], np.ascontiguousarray(places[1].T)

    def look(self, place: Pair) -> Spot:
        r"""Log density of the coordinates, and its gradient.

        .. math:: \partial_{g_{ik}} = (s_{ik} - \sum_i w_{ik} s_{ik}) / S_k + a / S_k - r

        with s the score in W and r = (I + a) / I, so that S is about I.
        """
        problem = self.problem
        W, H = self.factors(place)
        particles = problem.particles(W[None], H[None])
        found = scores(problem.executor, problem.data, problem.target, particles)
        by_w, by_h = (np.asarray(one[0], dtype=np.float64) for one in (found.W, found.H))
        log_density = float(found.log_density[0])
        if problem.simplex:
            sums, rate = place[0].sum(axis=0), 1.0 + EXCESS / len(W)
            by_w = (by_w - (W * by_w).sum(axis=0) + EXCESS) / sums - rate
            log_density += float((EXCESS * np.log(sums) - rate * sums).sum())
        return Spot(place, log_density, (by_w, by_h))

    def spread(self, place: Pair) -> Pair:
        """1/√m of every coordinate, 1/m = (θ + 1/c) / c: the width of Gamma(cθ + 1, c).

        c is the denominator of the multiplicative update, in which metric no direction of
        one factor is narrower than 1 at a mode; 0 for constants.
        """
        problem = self.problem
        target, data = problem.target, problem.data
        W, H = self.factors(place)
        particles = problem.particles(W[None], H[None])
        found = divergences(problem.executor, data, target, particles)
        free = [target.frozen(side) for side in SIDES]
        slope = typical_slope(target, float(found[0]), W.size + H.size)
        state = make_state(data.grid, W.astype(data.dtype), H.T.astype(data.dtype))
        widths = []
        for side, values, mask in zip(SIDES, (place[0], H.T), free, strict=True):
            bands = shares(problem.executor, data, state, side, target.likelihood, target.floor)
            c = slope * np.concatenate([one.denominator for one in bands]).astype(np.float64)
            if side == "rows" and problem.simplex:
                c = c / place[0].sum(axis=0) + 1.0 + EXCESS / len(W)
            else:
                c += target.prior(side)[0]
            width = np.sqrt((values + 1.0 / c) / c)
            if mask is not None:
                width[:, mask] = 0.0
            widths.append(width)
        return widths[0], np.ascontiguousarray(widths[1].T)


def typical_slope(target: ScoreTarget, least: float, entries: int) -> float:
    """-ℓ'(d) where a posterior of so many entries has its mass, if d is quadratic around its least.

    Each entry then takes half a unit of log-likelihood: -ℓ'(d) (d - d_0) = entries / 2. For
    a likelihood that is flat around the start, what bounds the posterior is further out.
    """

    def slope(d: float) -> float:
        return -float(target.of(np.array([d])).slope[0])

    low, reach = least, max(1.0, abs(least))
    for _ in range(DOUBLINGS):
        if slope(least + reach) * reach >= 0.5 * entries:
            break
        reach *= 2.0
    high = least + reach
    for _ in range(DOUBLINGS):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        enough = slope(middle) * (middle - least) >= 0.5 * entries
        low, high = (low, middle) if enough else (middle, high)
    return slope(high)


# Hamiltonian Monte Carlo on the simplex and the orthant, thinned to a few particles.
#
# Source: Masood and Doshi-Velez, section 6.2; coordinates in ``chart.py``.


FEW: Final = 0.1
"""Share of accepted proposals below which a chain is warned of."""


def reflected(place: Array, momentum: Array) -> Pair:
    """|x|, and the momentum turned where x < 0: one leapfrog in p(|x|), folded back."""
    return np.abs(place), np.where(place < 0, -momentum, momentum)


def leapfrog(
    chart: Chart, spot: Spot, momentum: Pair, spread: Pair, size: float, steps: int
) -> tuple[Spot, Pair, int]:
    """Leapfrog steps, mirrored at zero: where they lead, the momentum there, and looks taken.

    Momenta are standard normal: u ← u + ½ε s G, x ← x + ε s u, u ← u + ½ε s G, s = 1/√m.
    Stops where density or gradient are not finite.

    References
    ----------
    Neal 2011, "MCMC using Hamiltonian dynamics", sections 5.2.3 and 5.5.1.5.
    """
    for step in range(steps):
        moved = []
        for x, u, g, s in zip(spot.place, momentum, spot.gradient, spread, strict=True):
            u = u + 0.5 * size * s * g
            moved.append(reflected(x + size * s * u, u))
        (first, first_u), (second, second_u) = moved
        spot = chart.look((first, second))
        kicked = [
            u + 0.5 * size * s * g
            for u, g, s in zip((first_u, second_u), spot.gradient, spread, strict=True)
        ]
        momentum = kicked[0], kicked[1]
        if not spot.usable:
            return spot, momentum, step + 1
    return spot, momentum, steps


def energy(spot: Spot, momentum: Pair) -> float:
    """-log density of position and momentum."""
    return 0.5 * sum(float((u**2).sum()) for u in momentum) - spot.log_density


@dataclass(frozen=True)
class SimplexHMC(Options):
    r"""Particles that are draws of one Hamiltonian Monte Carlo chain, evenly thinned.

    Columns of W stay on the simplex under a :class:`SILFNMF`, as normalised gamma variables;
    these, H, and W under a :class:`TweedieNMF`, are mirrored at zero. The chain is exact:
    nothing but its length is approximate.

    Parameters
    ----------
    draws
        Of the chain after tuning; the particles are spread evenly over them.
    tune
        Proposals before, during which the step is learnt; none of them is kept.
    steps
        Leapfrog steps of a proposal, each of which computes the score once.
    step
        ``"auto"`` learns ε by dual averaging while tuning, then keeps it; a number, in
        units of the posterior's width, fixes it. Each proposal takes ε times a random
        factor from 0.8 to 1.2.
    target_accept
        Mean acceptance rate that tuning aims at, between 0 and 1.

    Raises
    ------
    OptionError
        If an option is not one of these.

    Notes
    -----
    Positions are in double precision, densities in the type of the data: in single precision
    the chain is exact for a density that is rounded, and large sums of squares may cost
    proposals.

    Masood and Doshi-Velez, section 6.2; Betancourt 2012, "Cruising the simplex"; Patterson
    and Teh 2013; Hoffman and Gelman 2014, section 3.2.1.
    """

    draws: int = 1000
    tune: int = 200
    steps: int = 20
    step: float | Literal["auto"] = "auto"
    target_accept: float = 0.8

    def __post_init__(self) -> None:
        for name, least in (("draws", 1), ("tune", 0), ("steps", 1)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        object.__setattr__(self, "step", checked_step(self.step))
        target: Any = self.target_accept
        if not is_number(target) or not 0 < target < 1:
            raise OptionError(f"target_accept must be a number between 0 and 1, got {target!r}")
        object.__setattr__(self, "target_accept", float(target))

    def check_count(self, count: int) -> None:
        """Refuse more particles than there are draws."""
        if count > self.draws:
            raise OptionError(
                f"{count} particles are more than draws={self.draws} of the chain; pass "
                f"draws={count} or more"
            )

    def make(
        self,
        problem: Problem,
        count: int,
        seed: int,
        on_progress: OnProgress,
        history: History | None = None,
    ) -> Made:
        """``count`` draws from the first start.

        Raises
        ------
        OptionError
            If there are more particles than draws, or the start has no finite density.
        """
        self.check_count(count)
        with single_threaded_blas():
            return Chain(self, problem, seed).run(count, on_progress, history)


class Chain:
    """A run of `SimplexHMC`."""

    def __init__(self, options: SimplexHMC, problem: Problem, seed: int) -> None:
        self.started = time.perf_counter()
        self.options, self.seed = options, seed
        self.problem, self.chart = problem, Chart(problem)
        W, H = given(problem._replace(starts=tuple(one[:1] for one in problem.starts)), 1, seed)
        place = self.chart.place(W[0], H[0])
        self.spot = self.chart.look(place)
        if not self.spot.usable:
            raise OptionError(
                "the start has no finite log density or score under the model; pass another one"
            )
        self.spread = self.chart.spread(place)
        self.looks = 0
        entries = sum(one.size for one in place)
        first = FIRST_STEP * entries**-0.25 if isinstance(options.step, str) else options.step
        self.averaging = DualAveraging.at(first)

    def size(self, number: int, jitter: float) -> float:
        """The step of a proposal, its random factor included."""
        options = self.options
        if not isinstance(options.step, str):
            base = options.step
        elif number < options.tune:
            base = math.exp(self.averaging.log_step)
        else:
            base = math.exp(self.averaging.log_average)
        return base * (1.0 + JITTER * (2.0 * jitter - 1.0))

    def propose(self, number: int) -> float:
        """One proposal, taken or not; the probability that it is taken."""
        rng = generator(self.seed, 0, Stream.ACCEPTANCE, number)
        jitter, threshold = rng.random(2)
        momentum = tuple(rng.standard_normal(one.shape) for one in self.spot.place)
        before = energy(self.spot, (momentum[0], momentum[1]))
        with np.errstate(all="ignore"):  # a proposal may run away: it is then rejected
            end, momentum, looks = leapfrog(
                self.chart,
                self.spot,
                (momentum[0], momentum[1]),
                self.spread,
                self.size(number, jitter),
                self.options.steps,
            )
            change = energy(end, momentum) - before if end.usable else math.inf
        self.looks += looks
        probability = math.exp(min(0.0, -change)) if math.isfinite(change) else 0.0
        if threshold < probability:
            self.spot = end
        if number < self.options.tune:
            self.averaging = self.averaging.after(probability, self.options.target_accept)
        return probability

    def run(self, count: int, on_progress: OnProgress, history: History | None) -> Made:
        """All proposals; of the draws after tuning every (draws/count)-th."""
        tune, draws = self.options.tune, self.options.draws
        wanted = {tune + (number + 1) * draws // count - 1 for number in range(count)}
        kept: list[Pair] = []
        seconds, looks, accepted = [0.0], [0], 0.0
        for number in range(tune + draws):
            probability = self.propose(number)
            accepted += probability if number >= tune else 0.0
            if number in wanted:
                kept.append(self.chart.factors(self.spot.place))
                seconds.append(time.perf_counter() - self.started)
                looks.append(self.looks)
            on_progress(number + 1, tune + draws)
        if accepted < FEW * draws:
            warnings.warn(
                f"only {accepted / draws:.1%} of the proposals were taken, so that many particles "
                "are equal; pass a smaller step, or step='auto' with more tune",
                SamplingWarning,
                stacklevel=3,
            )
        stacked = tuple(np.stack(one) for one in zip(*kept, strict=True))
        if history is not None:
            history += _history(self.problem, (stacked[0], stacked[1]), seconds[1:])
        return self.problem.made((stacked[0], stacked[1]), np.diff(seconds), np.diff(looks))


def _history(problem: Problem, values: Pair, seconds: list[float]) -> History:
    """Discrepancies of the first draw, of the first two and so on, at the time of the last."""
    particles = problem.particles(*values)
    d = divergences(problem.executor, problem.data, problem.target, particles)
    where = (problem.executor, problem.data, problem.target, particles)
    K = stein_matrix(*where, d, problem.kernel, problem.tangent).matrix
    return [(at, discrepancy(K[:count, :count])) for count, at in enumerate(seconds, start=1)]
