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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import attrgetter
from typing import ClassVar, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import positive_or, whole_number
from daskfactor.errors import OptionError
from daskfactor.inference.run_loop import Values
from daskfactor.inference.singular import Pair, prepare_starts
from daskfactor.machine import single_threaded_blas
from daskfactor.stein.ensemble import OnDone, Particle, ParticleMethod, Step, ignore
from daskfactor.stein.kernel import IMQ, Block, Multiquadric, assemble
from daskfactor.stein.particles import SIDES, TINY, Posterior

Array = NDArray[np.float64]

MEMORY: Final = 0.9
"""Share of earlier steps in the average of squared gradients."""
GROWTH: Final = 1.1
"""Growth of an automatic step that led down."""
AUTO_STEP: Final = 0.01
"""Automatic step, as a share of the mean entry of each factor."""
MIN_STEP: Final = 1e-12
"""Step below which nothing moves any more."""


@dataclass(frozen=True)
class Cloud:
    """All particles, (M, I, K) and (M, K, J), in double precision, and their scores.

    Scores in W are along the simplex if those of the discrepancy are; ``divergence``
    (M,) is Σ d_β, ``usable`` (M,) marks particles for which all of that is finite.
    """

    posterior: Posterior
    values: Pair
    scores: Pair
    divergence: Array
    usable: NDArray[np.bool_]

    @classmethod
    def at(cls, posterior: Posterior, values: Pair) -> "Cloud":
        """Compute the scores of particles: two passes over the data."""
        scores = posterior.scores(posterior.particles(*values))
        W, H = (np.ascontiguousarray(one, np.float64) for one in (scores.W, scores.H))
        if posterior.tangent:
            W = W - W.mean(axis=1, keepdims=True)
        usable = np.isfinite(scores.divergence)
        for one in (W, H):
            usable &= np.isfinite(one).all(axis=(1, 2))
        return cls(posterior, values, (W, H), scores.divergence, usable)

    def or_else(self, other: "Cloud") -> "Cloud":
        """Replace particles that are not usable by those of another cloud."""
        if self.usable.all():
            return self
        wide = self.usable[:, None, None]
        values, scores = (
            (np.where(wide, mine[0], others[0]), np.where(wide, mine[1], others[1]))
            for mine, others in ((self.values, other.values), (self.scores, other.scores))
        )
        divergence = np.where(self.usable, self.divergence, other.divergence)
        return Cloud(self.posterior, values, scores, divergence, self.usable | other.usable)

    @cached_property
    def blocks(self) -> tuple[Block, Block]:
        """Inner products between particles, from which a Stein matrix is computed."""
        blocks = []
        for side, values, scores in zip(SIDES, self.values, self.scores, strict=True):
            x, s = values.reshape(len(values), -1), scores.reshape(len(scores), -1)
            gram = s @ s.T
            x, s = x - x.mean(axis=0), s - s.mean(axis=0)
            blocks.append(Block.of(x @ x.T, s @ x.T, gram, self.posterior.dimension(side)))
        return blocks[0], blocks[1]

    def parts(self, kernel: IMQ) -> Iterator[tuple[Multiquadric, Block, Array, Array]]:
        """Return the kernel, inner products, positions and scores, of W, then of H."""
        return zip(kernel.blocks, self.blocks, self.values, self.scores, strict=True)


def freeze(posterior: Posterior, move: Pair) -> Pair:
    """Set a direction of all particles to zero where components are constants."""
    W, H = move[0].swapaxes(1, 2), move[1]
    for side, one in zip(SIDES, (W, H), strict=True):
        one[:, posterior.frozen(side)] = 0.0
    return move


def equal_discrepancy(cloud: Cloud, kernel: IMQ) -> float:
    """Return the discrepancy of equally weighted particles, or infinity if it is not finite."""
    square = float(assemble(cloud.blocks, kernel).mean())
    return float(np.sqrt(max(0.0, square))) if np.isfinite(square) else np.inf


def onto_simplex(values: Array) -> Array:
    """Return the nearest point of the simplex for every column of (M, I, K).

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


def weighted_sum(table: Array, values: Array) -> Array:
    """Return Σ_n t_mn x_n of (M, ...) particles."""
    return np.asarray((table @ values.reshape(len(values), -1)).reshape(values.shape))


def sum_differences(table: Array, values: Array) -> Array:
    """Return Σ_n t_mn (x_m - x_n)."""
    return np.asarray(table.sum(axis=1)[:, None, None] * values - weighted_sum(table, values))


def along_scores(cloud: Cloud, kernel: IMQ) -> Pair:
    r"""Return the steepest descent of the Kullback-Leibler divergence in the kernel's space.

    .. math:: \phi_m = \frac{1}{M} \sum_n \left[ k_{nm} s_n + \nabla_{\theta_n} k_{nm} \right],
        \quad \nabla_{\theta_n} k_{nm} = -2 \kappa'_{nm} (\theta_m - \theta_n)

    the gradient of k block by block; shapes of the particles, zero for constants.

    References
    ----------
    Liu and Wang 2016, equation 8; Masood and Doshi-Velez, equation 7.
    """
    k = np.asarray(sum(part.value(block.r2) for part, block, _, _ in cloud.parts(kernel)))
    W, H = (
        (weighted_sum(k, scores) - 2.0 * sum_differences(part.slope(block.r2), values))
        / len(values)
        for part, block, values, scores in cloud.parts(kernel)
    )
    return freeze(cloud.posterior, (W, H))


def slopes(posterior: Posterior, values: Pair) -> Pair:
    """Return ∇D of every particle: one pass over the data."""
    particles = posterior.particles(*values)
    sides = posterior.over_bands(particles, np.ones(particles.count), attrgetter("gradient"))
    W, Ht = (-np.concatenate(bands, axis=1).astype(np.float64) for bands in sides)
    return W, np.ascontiguousarray(Ht.swapaxes(1, 2))


def second_derivative(posterior: Posterior, values: Pair, v: Pair) -> Pair:
    """Return ∇²D v of every particle: four passes over the data."""
    exact = posterior.model.likelihood.normal
    share = 1.0 if exact else float(np.cbrt(np.finfo(posterior.data.dtype).eps))
    total = [np.zeros_like(one) for one in values]
    for number in range(2):
        size, length = (np.sqrt((one[number] ** 2).sum(axis=(1, 2))) for one in (v, values))
        distance = share * length / np.where(size > 0, size, 1.0)
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
    """Return ∇²log p v of every particle, for v that is zero where components are constants."""
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
    """Return ∂F/∂r² (M, M) of one block, ``gram`` the inner products of scores in both blocks."""
    bend = kernel.bend(block.r2)
    third = bend * (kernel.power - 2.0) / (kernel.scale**2 + block.r2)
    return np.asarray(
        kernel.slope(block.r2) * gram
        - 2.0 * bend * (block.cross + block.dimension + 2.0)
        - 4.0 * block.r2 * third
    )


def gradient(cloud: Cloud, kernel: IMQ) -> Pair:
    """Return ∇S² in every particle, of their shapes; zero where components are constants."""
    count = len(cloud.divergence)
    bends = curvature(cloud, along_scores(cloud, kernel))  # along the simplex if scores are
    gram = cloud.blocks[0].score + cloud.blocks[1].score
    W, H = (
        (
            2.0 * count * bent
            + 4.0 * sum_differences(in_distance(part, block, gram), values)
            - 4.0 * sum_differences(part.slope(block.r2), scores)
        )
        / count**2
        for (part, block, values, scores), bent in zip(cloud.parts(kernel), bends, strict=True)
    )
    return freeze(cloud.posterior, (W, H))


@dataclass(frozen=True)
class Descent(ParticleMethod):
    """Base of methods whose particles move together, step by step.

    Each step is scaled by the root of averaged squares: entries of W move by about ``step``
    times the mean entry of W, those of H likewise, and by less as the end comes near.
    Under a `SILFNMF` a column of W has one scale, so that the nearest point of the simplex,
    which ends the step, is nearest in the metric of the step; entries that are free have a
    scale each, and end at zero if they fall below.
    """

    downhill: ClassVar[bool] = False
    """True if the discrepancy is to fall: an automatic step then never leads up."""

    steps: int = 1000
    step: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole_number("steps", self.steps, 1))
        object.__setattr__(self, "step", positive_or("step", self.step))

    @abstractmethod
    def direction(self, cloud: Cloud, kernel: IMQ) -> Pair:
        """Return the direction of all particles, of their shapes."""

    def run(
        self,
        posterior: Posterior,
        numbers: range,
        seed: int,
        on_done: OnDone = ignore,
        state: Values | None = None,
    ) -> Iterator[Step]:
        """Move all particles from random starts, as in Masood and Doshi-Velez, section 6.2."""
        started, count = time.perf_counter(), numbers.stop
        if state:
            started -= state["seconds"]
            motion = Motion.of(posterior, state["motion"])
        else:
            data, law = posterior.data, posterior.model.for_optimizers()
            start = prepare_starts(posterior.executor, data, law, "random", count, seed)
            W, H = (np.stack(side) for side in zip(*map(start, range(count)), strict=True))
            motion = Motion.start(posterior, (W, H), self.auto)
        while self.goes_on(motion):
            motion = self.step_from(motion)
            on_done(count * self.share(motion))
            seconds = time.perf_counter() - started
            yield Step([], {"motion": motion.values(), "seconds": seconds})
        (W, H), seconds = self.ends(motion), (time.perf_counter() - started) / count
        yield Step([Particle(n, W[n], H[n], seconds, motion.number) for n in numbers])

    @property
    def auto(self) -> float:
        """Step at first, as a share of the mean entry of each factor."""
        return AUTO_STEP if isinstance(self.step, str) else self.step

    def share(self, motion: "Motion") -> float:
        """Return the share of the steps that are done."""
        return motion.number / self.steps if self.goes_on(motion) else 1.0

    def goes_on(self, motion: "Motion") -> bool:
        """Return True if a step is left that moves something."""
        moves = motion.number == 0 or bool(motion.sizes.max() > MIN_STEP)
        return moves and motion.number < self.steps

    def ends(self, motion: "Motion") -> Pair:
        """Return the particles at the end, of a descent the best of all steps."""
        ends = motion.best if self.downhill else motion.cloud.values
        W, H = (np.ascontiguousarray(one, motion.cloud.posterior.data.dtype) for one in ends)
        return W, H

    @single_threaded_blas()
    @np.errstate(all="ignore")  # particles that diverge are put back
    def step_from(self, motion: "Motion") -> "Motion":
        """Take one step with all particles."""
        cloud, kernel, sizes, move, squares = motion[:5]
        posterior = cloud.posterior
        simplex, only_down = posterior.model.simplex, self.downhill and isinstance(self.step, str)
        if move is None:
            move, squares = scaled(self.direction(cloud, kernel), squares, simplex)
        share = 1.0 if only_down else 1.0 - motion.number / self.steps
        W, H = (
            values + (share * sizes * unit)[:, None, None] * one
            for values, unit, one in zip(cloud.values, motion.units, move, strict=True)
        )
        W = onto_simplex(W) if simplex else np.maximum(W, 0)
        moved = Cloud.at(posterior, (W, np.maximum(H, 0)))
        sizes = np.where(moved.usable, sizes, 0.5 * sizes)
        moved = moved.or_else(cloud)
        level = equal_discrepancy(moved, kernel)
        motion = motion._replace(number=motion.number + 1, squares=squares)
        if only_down and not level < motion.level:
            return motion._replace(sizes=0.5 * sizes, move=move)
        sizes = GROWTH * sizes if only_down else sizes
        motion = motion._replace(cloud=moved, level=level, sizes=sizes, move=None)
        better = level < motion.best_level
        return motion._replace(best=moved.values, best_level=level) if better else motion


class Motion(NamedTuple):
    """Particles on their way: where they are, the best of all steps, and what the next one needs.

    ``units`` are mean entries of the starts, ``squares`` averages of squared directions; ``move``
    is a direction that is taken again by a smaller step.
    """

    cloud: Cloud
    kernel: IMQ
    sizes: Array
    move: Pair | None
    squares: Pair | None
    units: tuple[float, float]
    level: float
    best: Pair
    best_level: float
    number: int

    @classmethod
    @single_threaded_blas()
    @np.errstate(all="ignore")
    def start(cls, posterior: Posterior, starts: Pair, step: float) -> "Motion":
        """Return particles at their starts.

        Raises
        ------
        OptionError
            If the starts cannot be used.
        """
        cloud = Cloud.at(posterior, posterior.in_double(*starts))
        if not cloud.usable.all():
            raise OptionError(
                f"start {int(cloud.usable.argmin())} has no finite density or score under the "
                "model; leave it out"
            )
        W, H = cloud.values
        kernel = posterior.kernel.resolve(cloud.blocks[0].r2, cloud.blocks[1].r2)
        level = equal_discrepancy(cloud, kernel)
        units = float(W.mean()), float(H.mean())
        sizes = np.full(len(cloud.usable), step)
        return cls(cloud, kernel, sizes, None, None, units, level, cloud.values, level, 0)

    def values(self) -> Values:
        """Return the state to resume from; see `of`."""
        cloud = self.cloud
        state = cloud.values, cloud.scores, cloud.divergence, cloud.usable
        return self._asdict() | {"cloud": state, "kernel": asdict(self.kernel)}

    @classmethod
    def of(cls, posterior: Posterior, saved: Values) -> "Motion":
        """Return the particles of a state that `values` gave."""
        made = {"cloud": Cloud(posterior, *saved["cloud"]), "kernel": IMQ(**saved["kernel"])}
        return cls(**saved | made)


def scaled(move: Pair, squares: Pair | None, simplex: bool) -> tuple[Pair, Pair]:
    """Return a direction divided by its size, and the averages of squares after this step."""
    result, averages = [], []
    for number, one in enumerate(move):
        square = one**2
        if number == 0 and simplex:
            square = square.mean(axis=1, keepdims=True)
        mean = square if squares is None else squares[number]
        mean = MEMORY * mean + (1.0 - MEMORY) * square
        ratio = np.divide(one, np.sqrt(mean), out=np.zeros_like(one), where=mean > 0)
        result.append(np.where(np.isfinite(ratio), ratio, 0.0))
        averages.append(mean)
    return (result[0], result[1]), (averages[0], averages[1])


@dataclass(frozen=True)
class SVGD(Descent):
    r"""Particles that move together: along kernel-averaged scores, and away from each other.

    After every step entries below zero become zero and, under a :class:`SILFNMF`, columns of
    W the nearest point of the simplex.

    Parameters
    ----------
    steps
        Number of steps, each of which computes all scores once.
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
        """Return the direction along the scores of all particles, and away from each other."""
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
        Number of steps, each of which computes all scores once, and up to five more gradients
        where the likelihood is not flat.
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
        """Return the direction down the discrepancy."""
        W, H = gradient(cloud, kernel)
        return -W, -H
