"""Coordinates of simplex and orthant whose only boundary is zero, where paths are reflected.

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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import warn, whole_number
from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.executors.state import make_state
from daskfactor.inference.block_hmc import check_leapfrog, dual_average, first_step
from daskfactor.inference.passes import BOTH, Gathered, Place, SharePass, run_pass
from daskfactor.inference.run_loop import Values
from daskfactor.inference.singular import Pair
from daskfactor.machine import single_threaded_blas
from daskfactor.random import Stream, generator
from daskfactor.stein.ensemble import Ensemble, OnDone, Particle, ParticleMethod, Step, ignore
from daskfactor.stein.particles import SIDES, Posterior

Array = NDArray[np.float64]

DENOMINATOR: Final = "denominator kept"
"""Array of a band: the denominator of the multiplicative update."""
LIFT: Final = 1e-3
"""Floor of the entries of the start, as a share of the factor's mean."""
EXCESS: Final = 10.0
"""Shape a of the prior on the sum of a column."""
DOUBLINGS: Final = 200
"""Most doublings or halvings of a distance."""
JITTER: Final = 0.2
"""Half width of the uniform factor about 1 that each proposal multiplies ε by."""
FEW: Final = 0.1
"""Share of accepted proposals below which a warning is given."""


class HMCState(NamedTuple):
    """Position of the chain, the log density there, and its gradient.

    Positions are (I, K), g or W, and (K, J), H.
    """

    position: Pair
    log_density: float
    gradient: Pair

    @property
    def usable(self) -> bool:
        parts = (*self.position, *self.gradient)
        return math.isfinite(self.log_density) and all(np.isfinite(one).all() for one in parts)


def factors_at(posterior: Posterior, position: Pair) -> Pair:
    """Return W and H at some coordinates."""
    first, H = position
    return (first / first.sum(axis=0), H) if posterior.model.simplex else (first, H)


def coordinates(posterior: Posterior, W: Array, H: Array) -> Pair:
    """Return coordinates of factors, in which a column of g adds up to its prior mean, I.

    Entries at zero are lifted a little, or particles would share zeros for long.
    """
    first = W * len(W) if posterior.model.simplex else W
    position = []
    for side, values in zip(SIDES, (first, H.T), strict=True):
        lifted = np.maximum(values, LIFT * values.mean())
        frozen = posterior.frozen(side)
        lifted[:, frozen] = values[:, frozen]
        position.append(lifted)
    return position[0], np.ascontiguousarray(position[1].T)


def evaluate(posterior: Posterior, position: Pair) -> HMCState:
    r"""Compute the log density of the coordinates, and its gradient, in double precision.

    .. math:: \partial_{g_{ik}} = (s_{ik} - \sum_i w_{ik} s_{ik}) / S_k + a / S_k - r

    with s the score in W and r = (I + a) / I, so that S is about I.
    """
    W, H = factors_at(posterior, position)
    scores = posterior.scores(posterior.particles(W[None], H[None]))
    by_w, by_h = (np.asarray(one[0], dtype=np.float64) for one in (scores.W, scores.H))
    log_density = float(scores.log_density[0])
    if posterior.model.simplex:
        sums, rate = position[0].sum(axis=0), 1.0 + EXCESS / len(W)
        by_w = (by_w - (W * by_w).sum(axis=0) + EXCESS) / sums - rate
        log_density += float((EXCESS * np.log(sums) - rate * sums).sum())
    return HMCState(position, log_density, (by_w, by_h))


def widths(posterior: Posterior, position: Pair) -> Pair:
    """Return 1/√m of every coordinate, 1/m = (θ + 1/c) / c: the width of Gamma(cθ + 1, c).

    c is the denominator of the multiplicative update, in which metric no direction of
    one factor is narrower than 1 at a mode; 0 for constants.
    """
    data = posterior.data
    W, H = factors_at(posterior, position)
    least = float(posterior.divergences(posterior.particles(W[None], H[None]))[0])
    slope = typical_slope(posterior, least, W.size + H.size)
    state = make_state(data.grid, W.astype(data.dtype), H.T.astype(data.dtype))
    state = posterior.executor.distribute(state)
    keep = SharePass(posterior.model.likelihood, posterior.floor, BOTH, finish=keep_denominator)
    run_pass(Place(posterior.executor, data, state, posterior.floor), keep)
    result = []
    for side, values in zip(SIDES, (position[0], position[1].T), strict=True):
        c = slope * state.gather(side, DENOMINATOR).astype(np.float64)
        if side == "rows" and posterior.model.simplex:
            c = c / position[0].sum(axis=0) + 1.0 + EXCESS / len(W)
        else:
            c += posterior.prior(side)[0]
        width = np.sqrt((values + 1.0 / c) / c)
        width[:, posterior.frozen(side)] = 0.0
        result.append(width)
    return result[0], np.ascontiguousarray(result[1].T)


def keep_denominator(gathered: Gathered) -> None:
    """Keep the denominator of the multiplicative update."""
    gathered.band.arrays[DENOMINATOR] = gathered.share[1]


def typical_slope(posterior: Posterior, least: float, entries: int) -> float:
    """Return -ℓ'(d) in the mass of a posterior of so many entries, if d is quadratic at its least.

    Each entry then takes half a unit of log-likelihood: -ℓ'(d) (d - d_0) = entries / 2. For
    a likelihood that is flat around the start, the bound of the posterior is further out.
    """

    def slope(d: float) -> float:
        return -float(posterior.model.of_divergence(np.array([d]))[1][0])

    low, distance = least, max(1.0, abs(least))
    for _ in range(DOUBLINGS):
        if slope(least + distance) * distance >= 0.5 * entries:
            break
        distance *= 2.0
    high = least + distance
    for _ in range(DOUBLINGS):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        enough = slope(middle) * (middle - least) >= 0.5 * entries
        low, high = (low, middle) if enough else (middle, high)
    return slope(high)


def leapfrog(
    posterior: Posterior, state: HMCState, momentum: Pair, spread: Pair, size: float, steps: int
) -> tuple[HMCState, Pair, int]:
    """Take leapfrog steps, reflected at zero; return the end, its momentum, and their number.

    Momenta are standard normal: u ← u + ½ε s G, x ← x + ε s u, u ← u + ½ε s G, s = 1/√m.
    Stops where density or gradient are not finite. A reflection changes the sign of x and u:
    one leapfrog in p(|x|), folded back.

    References
    ----------
    Neal 2011, "MCMC using Hamiltonian dynamics", sections 5.2.3 and 5.5.1.5.
    """
    half, full = ([share * size * s for s in spread] for share in (0.5, 1.0))
    u = list(momentum)
    count = 0
    for _ in range(steps):
        count += 1
        u = [u + h * g for u, h, g in zip(u, half, state.gradient, strict=True)]
        moved = [x + s * u for x, s, u in zip(state.position, full, u, strict=True)]
        u = [np.where(x < 0, -u, u) for x, u in zip(moved, u, strict=True)]
        state = evaluate(posterior, (np.abs(moved[0]), np.abs(moved[1])))
        u = [u + h * g for u, h, g in zip(u, half, state.gradient, strict=True)]
        if not state.usable:
            break
    return state, (u[0], u[1]), count


def energy(state: HMCState, momentum: Pair) -> float:
    """Return -log density of position and momentum."""
    return 0.5 * sum(float((u**2).sum()) for u in momentum) - state.log_density


@dataclass(frozen=True)
class SimplexHMC(ParticleMethod):
    r"""Particles that are draws of one Hamiltonian Monte Carlo chain, evenly thinned.

    Columns of W stay on the simplex under a :class:`SILFNMF`, as normalised gamma variables;
    these, H, and W under a :class:`TweedieNMF`, are mirrored at zero. The chain is exact:
    nothing but its length is approximate.

    Parameters
    ----------
    draws
        Number of draws after tuning; the particles are spread evenly over them.
    tune
        Proposals before, during which the step is adapted; none of them is kept.
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

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"particles": 4, "pilot": 2, "random_seed": 0, "progressbar": False}
    >>> method = dfac.SimplexHMC(draws=20, tune=20, steps=5)
    >>> modes = dfac.stein_posterior(V, dfac.SILFNMF(2), method, **run)
    >>> modes["posterior"]["W"].shape
    (1, 4, 20, 2)
    """

    draws: int = 1000
    tune: int = 200
    steps: int = 20
    step: float | Literal["auto"] = "auto"
    target_accept: float = 0.8

    def __post_init__(self) -> None:
        for name, least in (("draws", 1), ("tune", 0)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        check_leapfrog(self)

    def check_count(self, count: int) -> None:
        """Refuse more particles than there are draws."""
        if count > self.draws:
            raise OptionError(
                f"{count} particles are more than draws={self.draws} of the chain; pass "
                f"draws={count} or more"
            )

    def run(
        self,
        posterior: Posterior,
        numbers: range,
        seed: int,
        on_done: OnDone = ignore,
        state: Values | None = None,
    ) -> Iterator[Step]:
        """Start at the end of an optimisation, as in Masood and Doshi-Velez, section 6.2."""
        if state:
            begin: Pair | Values = state
        else:
            [optimum] = Ensemble(start="random").particles(posterior, range(1), seed)
            begin = optimum.W[None], optimum.H[None]
        for step in self.chain(posterior, begin, numbers.stop, seed, on_done):
            yield step._replace(particles=[one for one in step.particles if one.number in numbers])

    def chain(
        self,
        posterior: Posterior,
        begin: "Pair | Values",
        count: int,
        seed: int,
        on_done: OnDone = ignore,
    ) -> Iterator[Step]:
        """Draw; every (draws/count)-th draw after tuning is a particle.

        ``begin`` is W (1, I, K) and H (1, K, J), or the state of an earlier step.

        Raises
        ------
        OptionError
            If the start has no finite density.
        """
        started, evaluations, accepted, at = time.perf_counter(), 0, 0.0, begin
        if isinstance(at, dict):
            started -= at["seconds"]
            evaluations, accepted = at["evaluations"], at["accepted"]
        ends = [self.tune + (number + 1) * self.draws // count - 1 for number in range(count)]
        total = self.tune + self.draws
        for walk in self.walk(posterior, at, seed):
            evaluations += walk.evaluations
            accepted += walk.probability if walk.number > self.tune else 0.0
            on_done(count * walk.number / total)
            made = []
            for number in (n for n, end in enumerate(ends) if end == walk.number - 1):
                factors = factors_at(posterior, walk.state.position)
                W, H = (np.ascontiguousarray(one, posterior.data.dtype) for one in factors)
                made.append(Particle(number, W, H, time.perf_counter() - started, evaluations))
                started, evaluations = time.perf_counter(), 0
            sums = {"evaluations": evaluations, "accepted": accepted}
            seconds = time.perf_counter() - started
            yield Step(made, {"walk": walk, "seconds": seconds, **sums})
        if accepted < FEW * self.draws:
            warn(
                f"only {accepted / self.draws:.1%} of the proposals were taken, so that many "
                "particles are equal; pass a smaller step, or step='auto' with more tune",
                SamplingWarning,
            )

    def walk(self, posterior: Posterior, begin: "Pair | Values", seed: int) -> "Iterator[Walk]":
        """Yield the chain after every proposal."""
        if isinstance(begin, dict):
            state, *rest = begin["walk"]
            walk = Walk(HMCState(*state), *rest)
        else:
            W, H = posterior.in_double(*begin)
            with single_threaded_blas():
                state = evaluate(posterior, coordinates(posterior, W[0], H[0]))
                if not state.usable:
                    raise OptionError(
                        "the start has no finite log density or score under the model; pass "
                        "another one"
                    )
                spread = posterior.executor.retry_on_loss(
                    partial(widths, posterior, state.position)
                )
            first = math.log(first_step(self.step, sum(one.size for one in spread)))
            walk = Walk(state, spread, first, first, first, 0.0, 0)
        while walk.number < self.tune + self.draws:
            walk = self._propose(posterior, walk, seed)
            yield walk

    def _propose(self, posterior: Posterior, walk: "Walk", seed: int) -> "Walk":
        """Make one proposal, and take it or not."""
        state, spread, number = walk.state, walk.spread, walk.number
        rng, tuning = generator(seed, 0, Stream.ACCEPTANCE, number), number < self.tune
        jitter, threshold = rng.random(2)
        u, v = (rng.standard_normal(one.shape) for one in state.position)
        before = energy(state, (u, v))
        size = self.step
        if isinstance(size, str):
            size = math.exp(walk.log_step if tuning else walk.average)
        size *= 1.0 + JITTER * (2.0 * jitter - 1.0)
        # A proposal may diverge: it is then rejected.
        with single_threaded_blas(), np.errstate(all="ignore"):
            end, momentum, steps = leapfrog(posterior, state, (u, v), spread, size, self.steps)
            change = energy(end, momentum) - before if end.usable else math.inf
        probability = math.exp(min(0.0, -change)) if math.isfinite(change) else 0.0
        adapted = walk.log_step, walk.average, walk.error
        if tuning:
            excess = self.target_accept - probability
            adapted = dual_average(walk.first, *adapted[1:], number + 1, excess)
        end = end if threshold < probability else state
        return Walk(end, spread, walk.first, *adapted, number + 1, probability, steps)


class Walk(NamedTuple):
    """The chain after ``number`` proposals, with the widths and steps of the next one.

    ``probability`` and ``evaluations`` are those of the last proposal.
    """

    state: HMCState
    spread: Pair
    first: float
    log_step: float
    average: float
    error: float
    number: int
    probability: float = 0.0
    evaluations: int = 0
