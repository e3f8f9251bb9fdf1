"""The kernelised Stein matrix of a set of particles.

    K_p(x, y) = k s_x·s_y + s_x·∇_y k + s_y·∇_x k + tr ∇_x ∇_yᵀ k

The two middle terms are -2 κ' (s_x - s_y)·(x - y) (see ``kernel.py``), so that the matrix
follows from inner products between particles, scores and both. Those are summed over slabs
of coordinates: nothing of size particles² x dimension exists, nor are all scores there at
a time.

Source: Masood and Doshi-Velez, equations 3 and 7, and step 1 of algorithm 5.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.base import Executor
from daskfactor.stein.kernel import IMQ, Multiquadric
from daskfactor.stein.scores import BandScore, log_prior, over_bands
from daskfactor.stein.source import Particles, Side
from daskfactor.stein.targets import Target

Array = NDArray[np.float64]


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
    target: Target,
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

    found = over_bands(executor, data, target, particles, target.slope(divergence), sums)
    blocks, prior = [], np.zeros(particles.count)
    for side, length in (("rows", particles.rows.size), ("columns", particles.columns.size)):
        total = Products.total(own for where, own in found if where == side)
        mask = target.frozen("rows" if side == "rows" else "columns")
        width = particles.width if mask is None else int((~mask).sum())
        blocks.append(block_of(total, (length, width), tangent and side == "rows"))
        prior += total.log_prior
    kernel = kernel.resolve(blocks[0].r2, blocks[1].r2)
    matrix = assemble((blocks[0], blocks[1]), kernel)
    return Stein(matrix, kernel, target.log_likelihood(divergence) + prior)
