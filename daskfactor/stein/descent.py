"""Particles that move together: Stein variational gradient descent, and on the discrepancy.

Descent on the squared discrepancy itself,

    M² S² = Σ_mn F_mn,   F = k s_m·s_n + Σ [-2 κ' (s_m - s_n)·(θ_m - θ_n) - 2 d κ' - 4 r² κ'']

summed over the blocks W and H, depends on a particle through its position and through its
score s. The derivative in the score, v = 2 M φ, is the direction of SVGD, so that

    ∇_m M² S² = ∇²log p(θ_m) v_m + Σ_n [4 g_mn (θ_m - θ_n) - 4 κ'_mn (s_m - s_n)]

with g = ∂F/∂r². With ℓ the log-likelihood as a function of the summed divergence D,

    ∇²log p v = ℓ'(D) ∇²D v + ℓ''(D) (∇D·v) ∇D - (a - 1) v / θ²

where ∇²D v is a central difference of ∇D along v, in W and in H one after the other. Along
one factor ∇D is a polynomial of second degree at most for β = 2, for which that is exact at
any distance, and is taken far away, where rounding is least. For other β the distance is
∛ε of the factor, and the relative error about ε^(2/3): 4e-11 in double and 3e-5 in single
precision.

Source: Masood and Doshi-Velez, section 6.2 ("scaling and non-negativity constraints after
every gradient step"; descent on the discrepancy is called DSGD there, and differentiated
automatically); Liu and Wang 2016 for the step sizes.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import positive_or, whole_number
from daskfactor.errors import OptionError
from daskfactor.inference.singular import Pair, prepare_starts
from daskfactor.machine import single_threaded_blas
from daskfactor.stein.ensemble import OnDone, Particle, ParticleMethod, ignore
from daskfactor.stein.kernel import IMQ, Block, Multiquadric, assemble
from daskfactor.stein.particles import SIDES, TINY, Posterior

Array = NDArray[np.float64]

MEMORY: Final = 0.9
"""Share of earlier steps in the average of squared gradients."""
GROWTH: Final = 1.1
"""Of an automatic step that led down."""
AUTO_STEP: Final = 0.01
"""Of the mean entry of each factor."""
LEAST: Final = 1e-12
"""Steps below which nothing moves any more."""


@dataclass(frozen=True)
class Cloud:
    """All particles, (M, I, K) and (M, K, J), in double precision, and their scores.

    Scores in W are along the simplex where the discrepancy takes them so; ``divergence``
    (M,) is Σ d_β, ``usable`` (M,) whether all of that is finite.
    """

    posterior: Posterior
    values: Pair
    scores: Pair
    divergence: Array
    usable: NDArray[np.bool_]

    @classmethod
    def at(cls, posterior: Posterior, values: Pair) -> "Cloud":
        """Particles with their scores: two passes over the data."""
        found = posterior.scores(posterior.particles(*values))
        W, H = (np.ascontiguousarray(one, np.float64) for one in (found.W, found.H))
        if posterior.tangent:
            W = W - W.mean(axis=1, keepdims=True)
        usable = np.isfinite(found.divergence)
        for one in (W, H):
            usable &= np.isfinite(one).all(axis=(1, 2))
        return cls(posterior, values, (W, H), found.divergence, usable)

    def or_else(self, other: "Cloud") -> "Cloud":
        """These particles where they are usable, others elsewhere."""
        if self.usable.all():
            return self
        wide = self.usable[:, None, None]
        values, scores = (
            (np.where(wide, own[0], its[0]), np.where(wide, own[1], its[1]))
            for own, its in ((self.values, other.values), (self.scores, other.scores))
        )
        divergence = np.where(self.usable, self.divergence, other.divergence)
        return Cloud(self.posterior, values, scores, divergence, self.usable | other.usable)

    @cached_property
    def blocks(self) -> tuple[Block, Block]:
        """Inner products between particles, as a Stein matrix is made of them."""
        made = []
        for side, values, scores in zip(SIDES, self.values, self.scores, strict=True):
            x, s = values.reshape(len(values), -1), scores.reshape(len(scores), -1)
            gram = s @ s.T
            x, s = x - x.mean(axis=0), s - s.mean(axis=0)
            made.append(Block.of(x @ x.T, s @ x.T, gram, self.posterior.dimension(side)))
        return made[0], made[1]

    def parts(self, kernel: IMQ) -> Iterator[tuple[Multiquadric, Block, Array, Array]]:
        """Of W, then of H: the kernel, inner products, positions and scores."""
        return zip(kernel.blocks, self.blocks, self.values, self.scores, strict=True)


def held(posterior: Posterior, move: Pair) -> Pair:
    """A direction of all particles, zero where components are constants."""
    W, H = move[0].swapaxes(1, 2), move[1]
    for side, one in zip(SIDES, (W, H), strict=True):
        one[:, posterior.frozen(side)] = 0.0
    return move


def equal_discrepancy(cloud: Cloud, kernel: IMQ) -> float:
    """The discrepancy of equally weighted particles; infinite where it is not finite."""
    square = float(assemble(cloud.blocks, kernel).mean())
    return float(np.sqrt(max(0.0, square))) if np.isfinite(square) else np.inf


def onto_simplex(values: Array) -> Array:
    """The nearest point of the simplex for every column of (M, I, K).

    References
    ----------
    Duchi et al. 2008, "Efficient projections onto the l1-ball", figure 1.
    """
    falling = -np.sort(-values, axis=1)
    over = np.cumsum(falling, axis=1) - 1.0
    count = np.arange(1, values.shape[1] + 1)[:, None]
    last = (falling * count > over).sum(axis=1, keepdims=True)
    shift = np.take_along_axis(over, last - 1, axis=1) / last
    return np.asarray(np.maximum(values - shift, 0.0))


def weighed(table: Array, values: Array) -> Array:
    """Σ_n t_mn x_n of (M, ...) particles."""
    return np.asarray((table @ values.reshape(len(values), -1)).reshape(values.shape))


def apart(table: Array, values: Array) -> Array:
    """Σ_n t_mn (x_m - x_n)."""
    return np.asarray(table.sum(axis=1)[:, None, None] * values - weighed(table, values))


def along_scores(cloud: Cloud, kernel: IMQ) -> Pair:
    r"""Where the Kullback-Leibler divergence falls fastest, in the kernel's function space.

    .. math:: \phi_m = \frac{1}{M} \sum_n \left[ k_{nm} s_n + \nabla_{\theta_n} k_{nm} \right],
        \quad \nabla_{\theta_n} k_{nm} = -2 \kappa'_{nm} (\theta_m - \theta_n)

    the gradient of k block by block; shapes of the particles, zero for constants.

    References
    ----------
    Liu and Wang 2016, equation 8; Masood and Doshi-Velez, equation 7.
    """
    k = np.asarray(sum(own.value(block.r2) for own, block, _, _ in cloud.parts(kernel)))
    W, H = (
        (weighed(k, scores) - 2.0 * apart(own.slope(block.r2), values)) / len(values)
        for own, block, values, scores in cloud.parts(kernel)
    )
    return held(cloud.posterior, (W, H))


def slopes(posterior: Posterior, values: Pair) -> Pair:
    """∇D of every particle: one pass over the data."""
    particles = posterior.particles(*values)
    sides = posterior.over_bands(particles, np.ones(particles.count), attrgetter("gradient"))
    W, Ht = (-np.concatenate(bands, axis=1).astype(np.float64) for bands in sides)
    return W, np.ascontiguousarray(Ht.swapaxes(1, 2))


def norms(values: Array) -> Array:
    """Of every particle, (M,)."""
    return np.asarray(np.sqrt((values**2).sum(axis=(1, 2))))


def second_derivative(posterior: Posterior, values: Pair, v: Pair) -> Pair:
    """∇²D v of every particle: four passes over the data."""
    exact = posterior.model.likelihood.normal
    share = 1.0 if exact else float(np.cbrt(np.finfo(posterior.data.dtype).eps))
    total = [np.zeros_like(one) for one in values]
    for number in range(2):
        size = norms(v[number])
        distance = share * norms(values[number]) / np.where(size > 0, size, 1.0)
        h = np.where(size > 0, distance, 1.0)[:, None, None]
        ends = []
        for sign in (1.0, -1.0):
            moved = list(values)
            moved[number] = values[number] + sign * h * v[number]
            ends.append(slopes(posterior, (moved[0], moved[1])))
        for out, up, down in zip(total, *ends, strict=True):
            out += (up - down) / (2.0 * h)
    return total[0], total[1]


def curvature(cloud: Cloud, v: Pair) -> Pair:
    """∇²log p v of every particle, for v that is zero where components are constants."""
    posterior = cloud.posterior
    _, slope, second = posterior.model.of_divergence(cloud.divergence)
    parts = [np.zeros_like(one) for one in v]
    if slope.any():
        for out, one in zip(parts, second_derivative(posterior, cloud.values, v), strict=True):
            out += slope[:, None, None] * one
    if second.any():
        gradient = slopes(posterior, cloud.values)
        inner = sum((a * b).sum(axis=(1, 2)) for a, b in zip(gradient, v, strict=True))
        for out, one in zip(parts, gradient, strict=True):
            out += (second * inner)[:, None, None] * one
    for side, out, values, one in zip(SIDES, parts, cloud.values, v, strict=True):
        excess = posterior.prior(side)[1]
        if excess:
            out -= excess * one / np.maximum(values, TINY) ** 2
    return parts[0], parts[1]


def in_distance(kernel: Multiquadric, block: Block, gram: Array) -> Array:
    """The derivative ∂F/∂r² (M, M) of one block, ``gram`` the inner products of whole scores."""
    bend = kernel.bend(block.r2)
    third = bend * (kernel.power - 2.0) / (kernel.scale**2 + block.r2)
    return np.asarray(
        kernel.slope(block.r2) * gram
        - 2.0 * bend * (block.cross + block.dimension + 2.0)
        - 4.0 * block.r2 * third
    )


def gradient(cloud: Cloud, kernel: IMQ) -> Pair:
    """∇S² in every particle, of their shapes; zero where components are constants."""
    count = len(cloud.divergence)
    bends = curvature(cloud, along_scores(cloud, kernel))  # along the simplex if scores are
    gram = cloud.blocks[0].score + cloud.blocks[1].score
    W, H = (
        (
            2.0 * count * bent
            + 4.0 * apart(in_distance(own, block, gram), values)
            - 4.0 * apart(own.slope(block.r2), scores)
        )
        / count**2
        for (own, block, values, scores), bent in zip(cloud.parts(kernel), bends, strict=True)
    )
    return held(cloud.posterior, (W, H))


@dataclass(frozen=True)
class Descent(ParticleMethod):
    """What methods have in common whose particles move together, step by step.

    Each step is scaled by the root of averaged squares: entries of W move by about ``step``
    times the mean entry of W, those of H likewise, and by less as the end comes near.
    Under a `SILFNMF` a column of W has one scale, so that the nearest point of the simplex,
    which ends the step, is nearest in the metric of the step; entries that are free have a
    scale each, and end at zero if they fall below.
    """

    downhill: ClassVar[bool] = False
    """Whether the discrepancy is to fall: an automatic step then goes nowhere but down."""

    steps: int = 1000
    step: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole_number("steps", self.steps, 1))
        object.__setattr__(self, "step", positive_or("step", self.step))

    @abstractmethod
    def direction(self, cloud: Cloud, kernel: IMQ) -> Pair:
        """Where all particles go, of their shapes."""

    def particles(
        self, posterior: Posterior, numbers: range, seed: int, on_done: OnDone = ignore
    ) -> Iterator[Particle]:
        """All at once, from random starts, as in Masood and Doshi-Velez, section 6.2."""
        begun, count = time.perf_counter(), numbers.stop
        data, law = posterior.data, posterior.model.for_optimizers()
        start = prepare_starts(posterior.executor, data, law, "random", count, seed)
        W, H = (np.stack(side) for side in zip(*map(start, range(count)), strict=True))
        made, taken = self.move(posterior, (W, H), lambda share: on_done(count * share))
        seconds = (time.perf_counter() - begun) / count
        for number in numbers:
            yield Particle(number, made[0][number], made[1][number], seconds, taken)

    @single_threaded_blas()
    @np.errstate(all="ignore")  # what runs away is put back
    def move(
        self, posterior: Posterior, starts: Pair, on_share: Callable[[float], None] = ignore
    ) -> tuple[Pair, int]:
        """Where W (M, I, K) and H (M, K, J) end, in the type of the data, and steps taken.

        Of a descent the best particles that were seen.

        Raises
        ------
        OptionError
            If the starts cannot be used.
        """
        here = Cloud.at(posterior, posterior.in_double(*starts))
        if not here.usable.all():
            raise OptionError(
                f"start {int(here.usable.argmin())} has no finite density or score under the "
                "model; leave it out"
            )
        units = [np.float64(one.mean()) for one in here.values]
        kernel = posterior.kernel.resolve(here.blocks[0].r2, here.blocks[1].r2)
        level = equal_discrepancy(here, kernel)
        best = level, here.values
        auto = isinstance(self.step, str)
        only_down = auto and self.downhill
        sizes = np.full(len(here.usable), AUTO_STEP if auto else self.step)
        move: Pair | None = None
        squares: list[Array] = []
        for number in range(1, self.steps + 1):
            if move is None:
                move = scaled(self.direction(here, kernel), squares, posterior.model.simplex)
            share = 1.0 if only_down else 1.0 - (number - 1) / self.steps
            W, H = (
                values + (share * sizes * unit)[:, None, None] * one
                for values, unit, one in zip(here.values, units, move, strict=True)
            )
            W = onto_simplex(W) if posterior.model.simplex else np.maximum(W, 0)
            there = Cloud.at(posterior, (W, np.maximum(H, 0)))
            sizes = np.where(there.usable, sizes, 0.5 * sizes)
            there = there.or_else(here)
            reached = equal_discrepancy(there, kernel)
            if only_down and not reached < level:
                sizes = 0.5 * sizes
            else:
                here, level, move = there, reached, None
                sizes = GROWTH * sizes if only_down else sizes
            best = min(best, (level, here.values), key=itemgetter(0))
            if number == self.steps or not sizes.max() > LEAST:
                break
            on_share(number / self.steps)
        on_share(1.0)
        ends = best[1] if self.downhill else here.values
        by_w, by_h = (np.ascontiguousarray(one, posterior.data.dtype) for one in ends)
        return (by_w, by_h), number


def scaled(move: Pair, squares: list[Array], simplex: bool) -> Pair:
    """The direction in units of its own size, ``squares`` being averages over the steps."""
    own = []
    for number, one in enumerate(move):
        square = one**2
        if number == 0 and simplex:
            square = square.mean(axis=1, keepdims=True)
        if len(squares) <= number:
            squares.append(square)
        squares[number] = kept = MEMORY * squares[number] + (1.0 - MEMORY) * square
        ratio = np.divide(one, np.sqrt(kept), out=np.zeros_like(one), where=kept > 0)
        own.append(np.where(np.isfinite(ratio), ratio, 0.0))
    return own[0], own[1]


@dataclass(frozen=True)
class SVGD(Descent):
    r"""Particles that move together: along kernel-averaged scores, and away from each other.

    After every step entries below zero become zero and, under a :class:`SILFNMF`, columns of
    W the nearest point of the simplex.

    Parameters
    ----------
    steps
        Each of which computes all scores once.
    step
        Size of a step, in units of the mean entry of each factor of the starts: entries move
        by about that, however steep the density. ``"auto"`` is 0.01.

    Raises
    ------
    OptionError
        If an option is not one of these.

    Notes
    -----
    Steps are divided by the root of an average of squared gradients, nine tenths of which is
    what it was. Particles whose density is not finite after a step go back, and take half
    of it from then on.

    Liu and Wang 2016, "Stein variational gradient descent", algorithm 1; Masood and
    Doshi-Velez, section 6.2.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"random_seed": 0, "progressbar": False}
    >>> model = dfac.SILFNMF(2, threshold=3000.0)
    >>> modes = dfac.stein_posterior(V, model, dfac.SVGD(steps=50), 4, **run)
    >>> modes["posterior"]["W"].shape
    (1, 4, 20, 2)
    """

    def direction(self, cloud: Cloud, kernel: IMQ) -> Pair:
        """Along the scores of all particles, and away from each other."""
        return along_scores(cloud, kernel)


@dataclass(frozen=True)
class SteinDescent(Descent):
    r"""Particles by gradient descent on their own Stein discrepancy.

    .. math:: S^2 = \frac{1}{M^2} \sum_{mn} K_{mn}

    with the constraints of :class:`SVGD` after every step. The best particles that were seen
    are returned, so that the discrepancy never ends above that of the starts.

    Parameters
    ----------
    steps
        Each of which computes all scores once, and up to five more gradients where the
        likelihood is not flat.
    step
        Size of a step, in units of the mean entry of each factor of the starts. ``"auto"``
        begins with 0.01, takes no step that leads up, halves it instead, and otherwise lets
        it grow by a tenth; a number fixes it.

    Raises
    ------
    OptionError
        If an option is not one of these.

    Notes
    -----
    A kernel scale that is ``"median"`` is that of the starts throughout.

    Masood and Doshi-Velez, section 6.2.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"random_seed": 0, "progressbar": False}
    >>> model = dfac.SILFNMF(2, threshold=3000.0)
    >>> modes = dfac.stein_posterior(V, model, dfac.SteinDescent(steps=50), 4, **run)
    >>> modes["posterior"]["W"].shape
    (1, 4, 20, 2)
    """

    downhill: ClassVar[bool] = True

    def direction(self, cloud: Cloud, kernel: IMQ) -> Pair:
        """Down the discrepancy."""
        W, H = gradient(cloud, kernel)
        return -W, -H
