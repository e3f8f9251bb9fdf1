"""Stein variational gradient descent on factorizations."""

from dataclasses import dataclass

import numpy as np

from daskfactor.stein.kernel import IMQ
from daskfactor.stein.state import (
    Array,
    Pair,
    Problem,
)
from daskfactor.stein.stein import Block
from daskfactor.stein.svgd_step import Ascent, Cloud, Descent, held


def weighed(table: Array, values: Array) -> Array:
    """Σ_n t_mn x_n of (M, ...) particles."""
    return np.asarray((table @ values.reshape(len(values), -1)).reshape(values.shape))


def apart(table: Array, values: Array) -> Array:
    """Σ_n t_mn (x_m - x_n)."""
    return np.asarray(table.sum(axis=1)[:, None, None] * values - weighed(table, values))


def direction(problem: Problem, cloud: Cloud, blocks: tuple[Block, Block], kernel: IMQ) -> Pair:
    r"""Where the Kullback-Leibler divergence falls fastest, in the kernel's function space.

    .. math:: \phi_m = \frac{1}{M} \sum_n \left[ k_{nm} s_n + \nabla_{\theta_n} k_{nm} \right],
        \quad \nabla_{\theta_n} k_{nm} = -2 \kappa'_{nm} (\theta_m - \theta_n)

    the gradient of k block by block; shapes of the particles, zero for constants.

    References
    ----------
    Liu and Wang 2016, equation 8; Masood and Doshi-Velez, equation 7.
    """
    kernels = kernel.blocks
    k = kernels[0].value(blocks[0].r2) + kernels[1].value(blocks[1].r2)
    W, H = (
        (weighed(k, scores) - 2.0 * apart(own.slope(block.r2), values)) / len(values)
        for own, block, values, scores in zip(
            kernels, blocks, cloud.values, cloud.scores, strict=True
        )
    )
    return held(problem, (W, H))


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
    """

    def ascent(self, problem: Problem, size: float) -> Ascent:
        """Along the scores of all particles, and away from each other."""
        return Ascent(problem, direction, self.steps, size)
