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
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from daskfactor.executors.state import make_state
from daskfactor.inference.passes import shares
from daskfactor.stein.scores import divergences, scores
from daskfactor.stein.source import SIDES
from daskfactor.stein.state import Array, Pair, Problem
from daskfactor.stein.targets import Target

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


def typical_slope(target: Target, least: float, entries: int) -> float:
    """-ℓ'(d) where a posterior of so many entries has its mass, if d is quadratic around its least.

    Each entry then takes half a unit of log-likelihood: -ℓ'(d) (d - d_0) = entries / 2. For
    a likelihood that is flat around the start, what bounds the posterior is further out.
    """

    def slope(d: float) -> float:
        return -float(target.slope(np.array([d]))[0])

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
