"""Posteriors as functions of the summed divergence and of single entries: what scores need.

Both models have a log density of the form ℓ(d) + Σ log p(W) + Σ log p(H), d = Σ d_β(v|μ)
over the observed entries, so that the score is ℓ'(d) ∇d and a slope of the prior.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.base import Executor
from daskfactor.inference.multiplicative import mean_floor
from daskfactor.kernels import blockwise
from daskfactor.kernels.workspace import Workspace
from daskfactor.models.fixed import Mask
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.settings import OfDivergence
from daskfactor.models.tweedie import Hyperparameters
from daskfactor.stein.particles import SIDES, Particles, Side

Array = NDArray[Any]

TINY: Final = 1e-30
"""Where the slope of a gamma prior, (shape - 1)/θ, stops growing."""


@dataclass(frozen=True)
class ScoreTarget:
    """A posterior density, up to a constant, as a function of the summed divergence.

    Attributes
    ----------
    model
        One that answers `of_divergence`, with numbers for all that it needs.
    hyper
        Dispersion φ, rates and shapes of the priors.
    floor
        Smallest μ that the divergence is taken at.
    """

    model: Any
    hyper: Hyperparameters
    floor: float

    @property
    def likelihood(self) -> Likelihood:
        """Return the law whose divergence is summed."""
        law: Likelihood = self.model.likelihood
        return law

    def of(self, divergence: Array) -> OfDivergence:
        """Take ℓ(d), ℓ'(d) and ℓ''(d) of summed divergences d (M,)."""
        found: OfDivergence = self.model.of_divergence(divergence, self.hyper.dispersion)
        return found

    def prior(self, side: Side) -> tuple[float, float]:
        """Return λ and a - 1 of a prior whose log density is (a - 1) log θ - λ θ."""
        rate, shape = self.hyper.prior(SIDES.index(side))
        return rate, shape - 1.0

    def frozen(self, side: Side) -> Mask:
        """Return which components are constants, (K,); None: none."""
        mask: Mask = self.model.frozen[SIDES.index(side)]
        return mask


def make_target(data: BlockedData, model: Any, dispersion: float = math.nan) -> ScoreTarget:
    """Make the posterior of some data.

    Parameters
    ----------
    data
        Their mean sets the floor of μ, below which no gradient is taken (see
        `mean_floor`; none for real-valued means), and prior rates that are ``"auto"``.
    model
        A threshold must be a number.
    dispersion
        φ, where the model leaves it ``"auto"``.
    """
    law = model.likelihood
    floor = -math.inf if law.real_valued else mean_floor(data, law)
    return ScoreTarget(model, model.priors(data.mean, dispersion), floor)


# Scores of many pairs of factors: one pass over the data for all of them, band by band.
#
# A band of W is taken against all the blocks it meets, every block being read once for all
# particles, and the same for H. That computes each gradient twice, but leaves nothing larger
# than a band of the particles behind: what is made of scores can be made at once.


R = TypeVar("R")

SLAB_BYTES: Final = 2**21
"""Of the values of all particles that are in double precision at a time."""


class Scores(NamedTuple):
    """Gradients of the log posterior density.

    W (M, I, K) and H (M, K, J) in the order of the grid's rows and columns, in the type of
    the particles; ``log_density`` (M,) up to a constant that all share.
    """

    W: Array
    H: Array
    log_density: NDArray[np.float64]


class BandScore(NamedTuple):
    """One band of all particles and what its scores are made of.

    ``values`` (M, m, K); ``gradient`` of the negative divergence, of that shape; ``slope``
    (M,), its factor in the score; ``rate`` and ``excess`` of the prior, λ and a - 1;
    ``free`` (K,), zero for components that are constants.
    """

    values: Array
    gradient: Array
    slope: NDArray[np.float64]
    rate: float
    excess: float
    free: NDArray[np.float64]

    def slabs(self) -> Iterator[tuple[slice, NDArray[np.float64], NDArray[np.float64]]]:
        """A few rows at a time: which, values and scores in double precision, (M, rows, K)."""
        count, rows, width = self.values.shape
        step = max(1, SLAB_BYTES // (8 * count * width))
        for at in range(0, rows, step):
            part = slice(at, at + step)
            values = self.values[:, part].astype(np.float64)
            score = self.gradient[:, part] * -self.slope[:, None, None]
            score -= self.rate
            if self.excess:
                score += self.excess / np.maximum(values, TINY)
            score *= self.free
            yield part, values, score


def divergences(
    executor: Executor, data: BlockedData, target: ScoreTarget, particles: Particles
) -> NDArray[np.float64]:
    """Σ d_β(v|μ) over the observed entries, of every particle: (M,).

    Every block is read once; sums are taken in the blocks' order, whatever the executor.
    """

    def one_row(row: int, work: Workspace) -> NDArray[np.float64]:
        own = particles.band("rows", row)
        sums = np.zeros((data.grid.blocks, particles.count, 2))
        for col in range(data.grid.blocks):
            theirs = particles.band("columns", col)
            view = data.view(row, col)
            for W, H, out in zip(own, theirs, sums[col], strict=True):
                blockwise.evaluate(view, target.likelihood, W, H, target.floor, out, None, work)
        return sums[..., 0]

    table = np.concatenate(executor.map(one_row, range(data.grid.blocks), "divergence"))
    total: NDArray[np.float64] = -table.sum(axis=0)
    return total


def _gradient(
    side: Side, number: int, data: BlockedData, target: ScoreTarget, particles: Particles, work: Any
) -> tuple[Array, Array]:
    """One band of all particles and the gradient of -Σ d_β there, (M, m, K) each."""
    by_rows = side == "rows"
    own = particles.band(side, number)
    gradient = np.zeros(own.shape, own.dtype)
    for other in range(data.grid.blocks):
        theirs = particles.band("columns" if by_rows else "rows", other)
        view = data.view(number, other) if by_rows else data.view(other, number)
        for mine, its, out in zip(own, theirs, gradient, strict=True):
            factors = (mine, its) if by_rows else (its, mine)
            found = blockwise.gradient(view, target.likelihood, *factors, 1.0, target.floor, work)
            out += found[0] if by_rows else found[1]
    return own, gradient


def over_bands(
    executor: Executor,
    data: BlockedData,
    target: ScoreTarget,
    particles: Particles,
    slope: NDArray[np.float64],
    use: Callable[[Side, BandScore], R],
) -> list[tuple[Side, R]]:
    """What ``use`` makes of the scores of every band: of W's bands, then of H's.

    Parameters
    ----------
    slope
        (M,): ``target.slope`` at the particles' divergences.
    use
        Called where the band was computed, with arrays that are its own.
    """
    masks = {side: target.frozen(side) for side in SIDES}
    free = {
        side: np.ones(particles.width) if mask is None else (~mask).astype(np.float64)
        for side, mask in masks.items()
    }

    def one(item: tuple[Side, int], work: Workspace) -> tuple[Side, R]:
        side, number = item
        found = _gradient(side, number, data, target, particles, work)
        return side, use(side, BandScore(*found, slope, *target.prior(side), free[side]))

    bands = range(data.grid.blocks)
    items: list[tuple[Side, int]] = [(side, number) for side in SIDES for number in bands]
    return executor.map(one, items, "gradient")


def scores(
    executor: Executor, data: BlockedData, target: ScoreTarget, particles: Particles
) -> Scores:
    r"""Scores of all particles as arrays, as large as the particles themselves.

    .. math:: \nabla \log p(W, H | V) = \ell'(d) \nabla d - \lambda + (a - 1) / \theta

    with :math:`\ell = -C\,\mathrm{SILF}(f)` for a :class:`SILFNMF`, -d/φ for a
    :class:`TweedieNMF`. Components that are constants have a score of 0.

    References
    ----------
    Masood and Doshi-Velez, equation 3 and section 5.
    """
    found = divergences(executor, data, target, particles)
    slope = target.of(found).slope

    def keep(side: Side, band: BandScore) -> tuple[Array, NDArray[np.float64]]:
        del side
        prior = np.zeros(particles.count)
        for part, values, score in band.slabs():
            prior += log_prior(band, values)
            band.gradient[:, part] = score
        return band.gradient, prior

    bands = over_bands(executor, data, target, particles, slope, keep)
    rows = np.concatenate([score for side, (score, _) in bands if side == "rows"], axis=1)
    cols = np.concatenate([score for side, (score, _) in bands if side == "columns"], axis=1)
    prior = np.sum([own for _, (_, own) in bands], axis=0)
    return Scores(rows, cols.swapaxes(1, 2), target.of(found).value + prior)


def log_prior(band: BandScore, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Σ (a - 1) log θ - λ θ over the free entries of some rows, constants left out: (M,)."""
    total = -band.rate * (values * band.free).sum(axis=(1, 2))
    if band.excess:
        logs = np.log(np.maximum(values, TINY)) * band.free
        total += band.excess * logs.sum(axis=(1, 2))
    return np.asarray(total)
