"""The inverse multiquadric kernel over pairs of factors, and its derivatives.

Everything is a function of squared distances: with r² = |x - y|² and κ(r²) = k(x, y),

    ∇_x k = 2 κ' (x - y) = -∇_y k        tr ∇_x ∇_yᵀ k = -2 d κ' - 4 r² κ''

so that no difference of two particles is ever formed.

Source: Masood and Doshi-Velez, section 6.1 and equation 7; Gorham and Mackey 2017.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from daskfactor.checks import is_number, positive_number
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError
from daskfactor.executors.base import Executor
from daskfactor.stein.particles import Particles, Side
from daskfactor.stein.scores import BandScore, ScoreTarget, log_prior, over_bands

Array = NDArray[Any]
Scale = float | Literal["median"]


@dataclass(frozen=True)
class Multiquadric:
    r"""One block of the kernel: :math:`\kappa(r^2) = (c^2 + r^2)^b / (2 (c^2)^b)`.

    Half at distance zero and falling from there. All methods take squared distances of any
    shape, in the unit of c².
    """

    scale: float
    power: float

    def _part(self, r2: ArrayLike) -> Array:
        return 1.0 + np.asarray(r2, dtype=np.float64) / self.scale**2

    def value(self, r2: ArrayLike) -> Array:
        """κ."""
        return np.asarray(0.5 * self._part(r2) ** self.power)

    def slope(self, r2: ArrayLike) -> Array:
        """κ', the derivative in r²: ∇_x k = 2 κ' (x - y)."""
        factor = 0.5 * self.power / self.scale**2
        return np.asarray(factor * self._part(r2) ** (self.power - 1.0))

    def bend(self, r2: ArrayLike) -> Array:
        """κ'', the second derivative in r²."""
        factor = 0.5 * self.power * (self.power - 1.0) / self.scale**4
        return np.asarray(factor * self._part(r2) ** (self.power - 2.0))

    def trace(self, r2: ArrayLike, dimension: int) -> Array:
        """Σ_i ∂²k / ∂x_i ∂y_i = -2 d κ' - 4 r² κ'', d the number of coordinates."""
        r2 = np.asarray(r2, dtype=np.float64)
        return np.asarray(-2.0 * dimension * self.slope(r2) - 4.0 * r2 * self.bend(r2))


@dataclass(frozen=True)
class IMQ:
    r"""Inverse multiquadric kernel of two pairs of factors, a sum over W and H.

    .. math:: k = \frac{(c_W^2 + \|W - W'\|^2)^{b_W}}{2 (c_W^2)^{b_W}}
        + \frac{(c_H^2 + \|H - H'\|^2)^{b_H}}{2 (c_H^2)^{b_H}}

    Between 0 and 1, and 1 for equal pairs.

    Parameters
    ----------
    scale_w, scale_h
        :math:`c_W` and :math:`c_H`, the distances over which the kernel falls off, in the
        units of W and of H; or ``"median"``: the median distance between the particles at
        hand (1 if they are all the same). Two sets of particles can be compared only under
        the same numbers.
    power_w, power_h
        :math:`b_W` and :math:`b_H`, between -1 and 0.

    Raises
    ------
    OptionError
        If one of them is not allowed.

    References
    ----------
    Masood and Doshi-Velez, equation 7; the defaults are those of section 6.1.
    """

    scale_w: Scale = 1e-2
    scale_h: Scale = 1e3
    power_w: float = -0.5
    power_h: float = -0.5

    def __post_init__(self) -> None:
        for name in ("scale_w", "scale_h"):
            value = getattr(self, name)
            if isinstance(value, str):
                if value != "median":
                    raise OptionError(
                        f'{name} must be a positive number or "median", got {value!r}'
                    )
                continue
            object.__setattr__(self, name, positive_number(name, value))
        for name in ("power_w", "power_h"):
            value = getattr(self, name)
            if not (is_number(value) and -1.0 < value < 0.0):
                raise OptionError(
                    f"{name} must be a number between -1 and 0, got {value!r}; -0.5 is usual"
                )
            object.__setattr__(self, name, float(value))

    def resolve(self, r2_w: ArrayLike, r2_h: ArrayLike) -> Self:
        """The same with every ``"median"`` a number.

        Parameters
        ----------
        r2_w, r2_h
            Squared distances between particles in W and in H, (M, M).
        """
        scale_w = self.scale_w if is_number(self.scale_w) else median_distance(r2_w)
        scale_h = self.scale_h if is_number(self.scale_h) else median_distance(r2_h)
        return replace(self, scale_w=scale_w, scale_h=scale_h)

    @property
    def blocks(self) -> tuple[Multiquadric, Multiquadric]:
        """The kernels of W and of H; scales must be numbers."""
        scales = self.scale_w, self.scale_h
        if isinstance(scales[0], str) or isinstance(scales[1], str):
            raise OptionError(
                'a "median" scale must be resolved from distances first; use kernel.resolve(...)'
            )
        return Multiquadric(scales[0], self.power_w), Multiquadric(scales[1], self.power_h)


def median_distance(r2: ArrayLike) -> float:
    """Median distance between two different particles, from squared distances (M, M).

    1 where there is none: of a single particle, or of particles that are all the same.
    """
    table = np.asarray(r2, dtype=np.float64)
    pairs = table[np.triu_indices(len(table), 1)]
    median = float(np.median(np.sqrt(pairs))) if pairs.size else 0.0
    return median if median > 0.0 else 1.0


# The kernelised Stein matrix of a set of particles.
#
#     K_p(x, y) = k s_x·s_y + s_x·∇_y k + s_y·∇_x k + tr ∇_x ∇_yᵀ k
#
# The two middle terms are -2 κ' (s_x - s_y)·(x - y) (see ``kernel.py``), so that the matrix
# follows from inner products between particles, scores and both. Those are summed over slabs
# of coordinates: nothing of size particles² x dimension exists, nor are all scores there at
# a time.
#
# Source: Masood and Doshi-Velez, equations 3 and 7, and step 1 of algorithm 5.


class Products(NamedTuple):
    """Sums over coordinates of one block of the particles (W or H).

    ``distance`` (M, M), |θ_i - θ_j|² before `squared_distances`: Gram matrix of the centred
    particles; ``cross`` (M, M), of centred scores with them; ``score`` (M, M), of scores as
    they are; ``score_sums`` and ``value_sums`` (M, K), over rows; ``log_prior`` (M,).
    """

    distance: Array
    cross: Array
    score: Array
    score_sums: Array
    value_sums: Array
    log_prior: Array

    @classmethod
    def total(cls, parts: Iterable["Products"]) -> "Products":
        """Added up in the order in which they come, one at a time."""
        ordered = iter(parts)
        sums = cls(*(np.array(one) for one in next(ordered)))
        for part in ordered:
            for total, one in zip(sums, part, strict=True):
                total += one
        return sums


def products_of(band: BandScore) -> Products:
    """Sums over one band, slab by slab in double precision.

    Particles and, for ``cross``, scores are centred coordinate by coordinate first: only
    differences matter there, and small ones do not cancel out of large inner products.
    """
    return Products.total(_slab_products(band, values, score) for _, values, score in band.slabs())


def _slab_products(band: BandScore, values: Array, score: Array) -> Products:
    prior = log_prior(band, values)
    values -= values.mean(axis=0)
    score_sums, value_sums = score.sum(axis=1), values.sum(axis=1)
    x, s = values.reshape(len(values), -1), score.reshape(len(score), -1)
    gram = s @ s.T
    s -= s.mean(axis=0)
    return Products(x @ x.T, s @ x.T, gram, score_sums, value_sums, prior)


def squared_distances(gram: Array) -> Array:
    """|x_i - x_j|² from the Gram matrix of centred points, exactly 0 on the diagonal."""
    norms = np.diag(gram)
    table = np.maximum(norms[:, None] + norms - 2.0 * gram, 0.0)
    np.fill_diagonal(table, 0.0)
    return np.asarray(table)


class Block(NamedTuple):
    """One block as the matrix needs it: r², (s_i - s_j)·(θ_i - θ_j), s_i·s_j, and d."""

    r2: Array
    cross: Array
    score: Array
    dimension: int

    def terms(self, kernel: Multiquadric) -> Array:
        """What this block adds to the matrix besides k s_i·s_j."""
        return kernel.trace(self.r2, self.dimension) - 2.0 * kernel.slope(self.r2) * self.cross


def block_of(products: Products, shape: tuple[int, int], tangent: bool = False) -> Block:
    """A block of m x K' free coordinates from its sums.

    ``tangent`` takes scores along the simplex of every column only: their column means are
    subtracted, and each column has a dimension less.
    """
    rows, width = shape
    cross, score = products.cross, products.score
    dimension = rows * width
    if tangent:
        means = products.score_sums / rows
        score = score - rows * means @ means.T
        cross = cross - (means - means.mean(axis=0)) @ products.value_sums.T
        dimension = (rows - 1) * width
    own = np.diag(cross)
    differences = own[:, None] + own - cross - cross.T
    return Block(squared_distances(products.distance), differences, score, dimension)


def assemble(blocks: tuple[Block, Block], kernel: IMQ) -> Array:
    """The Stein matrix (M, M) from both blocks; the kernel's scales are numbers."""
    kernels = kernel.blocks
    value = sum(own.value(block.r2) for own, block in zip(kernels, blocks, strict=True))
    matrix = value * (blocks[0].score + blocks[1].score)
    for own, block in zip(kernels, blocks, strict=True):
        matrix = matrix + block.terms(own)
    return np.asarray((matrix + matrix.T) / 2.0)


class Stein(NamedTuple):
    """A Stein matrix (M, M), the kernel it is under, and the particles' log densities (M,)."""

    matrix: Array
    kernel: IMQ
    log_density: Array


def stein_matrix(
    executor: Executor,
    data: BlockedData,
    target: ScoreTarget,
    particles: Particles,
    divergence: Array,
    kernel: IMQ,
    tangent: bool = False,
) -> Stein:
    """Kernelised Stein matrix of all particles, summed over bands in a fixed order.

    Parameters
    ----------
    divergence
        (M,), Σ d_β of every particle.
    tangent
        Take the score in W along the simplex only.

    Returns
    -------
    Stein
        The same bits from every executor on the same grid.
    """

    def sums(side: Side, band: BandScore) -> Products:
        del side
        return products_of(band)

    found = over_bands(executor, data, target, particles, target.of(divergence).slope, sums)
    blocks, prior = [], np.zeros(particles.count)
    for side, length in (("rows", particles.rows.size), ("columns", particles.columns.size)):
        total = Products.total(own for where, own in found if where == side)
        mask = target.frozen("rows" if side == "rows" else "columns")
        width = particles.width if mask is None else int((~mask).sum())
        blocks.append(block_of(total, (length, width), tangent and side == "rows"))
        prior += total.log_prior
    kernel = kernel.resolve(blocks[0].r2, blocks[1].r2)
    matrix = assemble((blocks[0], blocks[1]), kernel)
    return Stein(matrix, kernel, target.of(divergence).value + prior)
