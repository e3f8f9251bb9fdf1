"""Gradient descent on the Stein discrepancy itself.

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

Source: Masood and Doshi-Velez, section 6.2 (there called DSGD, by automatic differentiation).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.stein.kernel import IMQ, Block, Multiquadric
from daskfactor.stein.particles import SIDES, Side
from daskfactor.stein.scores import TINY, BandScore, over_bands
from daskfactor.stein.state import (
    Array,
    Pair,
    Problem,
)
from daskfactor.stein.svgd import Ascent, Cloud, Descent, apart, gathered, held
from daskfactor.stein.svgd import direction as along_scores


def slopes(problem: Problem, values: Pair) -> Pair:
    """∇D of every particle: one pass over the data."""
    where = problem.executor, problem.data, problem.target, problem.particles(*values)

    def keep(side: Side, band: BandScore) -> NDArray[Any]:
        del side
        return band.gradient

    W, H = gathered(over_bands(*where, np.ones(len(values[0])), keep))
    return -W, -H


def norms(values: Array) -> Array:
    """Of every particle, (M,)."""
    return np.asarray(np.sqrt((values**2).sum(axis=(1, 2))))


def second_derivative(problem: Problem, values: Pair, v: Pair) -> Pair:
    """∇²D v of every particle: four passes over the data."""
    exact = problem.target.likelihood.real_valued
    share = 1.0 if exact else float(np.cbrt(np.finfo(problem.data.dtype).eps))
    total = [np.zeros_like(one) for one in values]
    for number in range(2):
        size = norms(v[number])
        distance = share * norms(values[number]) / np.where(size > 0, size, 1.0)
        h = np.where(size > 0, distance, 1.0)[:, None, None]
        ends = []
        for sign in (1.0, -1.0):
            moved = list(values)
            moved[number] = values[number] + sign * h * v[number]
            ends.append(slopes(problem, (moved[0], moved[1])))
        for out, up, down in zip(total, *ends, strict=True):
            out += (up - down) / (2.0 * h)
    return total[0], total[1]


def curvature(problem: Problem, cloud: Cloud, v: Pair) -> Pair:
    """∇²log p v of every particle, for v that is zero where components are constants."""
    target = problem.target
    _, slope, second = target.of(cloud.divergence)
    parts = [np.zeros_like(one) for one in v]
    if slope.any():
        for out, one in zip(parts, second_derivative(problem, cloud.values, v), strict=True):
            out += slope[:, None, None] * one
    if second.any():
        gradient = slopes(problem, cloud.values)
        inner = sum((a * b).sum(axis=(1, 2)) for a, b in zip(gradient, v, strict=True))
        for out, one in zip(parts, gradient, strict=True):
            out += (second * inner)[:, None, None] * one
    for side, out, values, one in zip(SIDES, parts, cloud.values, v, strict=True):
        excess = target.prior(side)[1]
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


def gradient(problem: Problem, cloud: Cloud, blocks: tuple[Block, Block], kernel: IMQ) -> Pair:
    """∇S² in every particle, of their shapes; zero where components are constants."""
    count = len(cloud.divergence)
    v = along_scores(problem, cloud, blocks, kernel)  # along the simplex if scores are
    gram = blocks[0].score + blocks[1].score
    total = []
    for own, block, values, scores, bent in zip(
        kernel.blocks,
        blocks,
        cloud.values,
        cloud.scores,
        curvature(problem, cloud, v),
        strict=True,
    ):
        found = 2.0 * count * bent + 4.0 * apart(in_distance(own, block, gram), values)
        found -= 4.0 * apart(own.slope(block.r2), scores)
        total.append(found / count**2)
    return held(problem, (total[0], total[1]))


def downhill(problem: Problem, cloud: Cloud, blocks: tuple[Block, Block], kernel: IMQ) -> Pair:
    """-∇S²."""
    W, H = gradient(problem, cloud, blocks, kernel)
    return -W, -H


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
    """

    def ascent(self, problem: Problem, size: float) -> Ascent:
        """Down the discrepancy; an automatic step goes nowhere else."""
        auto = isinstance(self.step, str)
        return Ascent(problem, downhill, self.steps, size, only_down=auto, keep_best=True)
