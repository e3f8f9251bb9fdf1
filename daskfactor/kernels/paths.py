"""Many passes over one block in one compiled call: Hamiltonian paths, multiplicative updates."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import jit_exact, jit_exact_inner
from daskfactor.kernels.langevin import (
    average_square,
    leapfrog_drift,
    leapfrog_kick,
    multiply_share,
    row_energies,
    warped_drift,
    warped_kick,
)
from daskfactor.kernels.views import Kernel

Array = NDArray[Any]
Arrays = tuple[Array, ...]


class RowPaths(NamedTuple):
    """Rows of one factor on a Hamiltonian path, all of whose data are in one block.

    Attributes
    ----------
    theta, place, momentum, spread, gradient
        (n, K) as :func:`daskfactor.kernels.langevin.warped_kick` and ``warped_drift`` take them;
        where the power is 1, places are not looked at. Gradients are 0 before and after.
    mass
        (n, K), which learns from the gradient at the start.
    fits, change
        (n,) in double precision: zeros, and what the path adds to the energy.
    rates
        Of the prior, (n, K) or with axes of length 1, in double precision.
    free
        (K,), which columns move.
    prior
        Shape and power.
    precision, weight, steps
        One over the dispersion; what the gradient counts in the mass; steps of the path.
    """

    theta: Array
    place: Array
    momentum: Array
    spread: Array
    gradient: Array
    mass: Array
    fits: NDArray[np.float64]
    change: NDArray[np.float64]
    rates: NDArray[np.float64]
    free: NDArray[np.bool_]
    prior: tuple[float, float]
    precision: float
    weight: float
    steps: int


@lru_cache(maxsize=128)
def path_kernel(slope: Kernel, warped: bool) -> Kernel:
    """Make the kernel of a path from that of its gradients; ``warped``: its power is not 1.

    kernel(block, factors, law, path, each, share, work): ``each`` holds the path's gradient
    in the place of its factor and empty arrays in those of others, ``share`` is the law's; all
    but these and ``path`` as gradients take them.
    """

    @jit_exact_inner
    def kick(path: Any, momentum: Array, spread: Array, rate: float, size: float) -> None:
        shape, power = path.prior
        numbers = size, path.precision, rate, shape
        if warped:
            warped_kick(path.theta, momentum, path.gradient, spread, *numbers, power)
        else:
            leapfrog_kick(path.theta, momentum, path.gradient, spread, *numbers)

    @jit_exact
    def go(
        block: Any,
        factors: Arrays,
        law: Any,
        path: Any,
        each: Arrays,
        share: float,
        work: Any,
    ) -> None:
        theta, momentum, spread, gradient = path.theta, path.momentum, path.spread, path.gradient
        fits, rates, (shape, power) = path.fits, path.rates, path.prior
        nothing, energy = fits[:0], np.empty(len(theta))
        prior = shape, power, 1.0 / path.precision
        # Rates that vary are in the gradient, in its unit. Loops compile faster than array
        # expressions, which make a universal function each.
        vary, last = rates.size > 1, (rates.shape[0] - 1, rates.shape[1] - 1)
        rate, real = 0.0 if vary else rates[0, 0], theta.dtype.type
        for visit in range(path.steps + 1):
            end = visit == 0 or visit == path.steps
            for i in range(theta.shape[0]):
                fits[i] = 0
                for k in range(theta.shape[1]):
                    gradient[i, k] = 0
            slope(block, factors, share, law, (each, each, fits if end else nothing), work)
            for i in range(theta.shape[0]):
                fits[i] *= share
                if vary:
                    for k in range(theta.shape[1]):
                        pull = prior[2] * rates[min(i, last[0]), min(k, last[1])]
                        gradient[i, k] -= real(pull)
            if visit == 0:
                row_energies(theta, momentum, fits, rates, prior, path.free, path.change)
                if path.weight > 0.0:
                    square, ones = np.zeros_like(theta), np.ones_like(theta)
                    kick(path, square, ones, rate, 1.0)
                    average_square(path.mass, square, path.weight)
            kick(path, momentum, spread, rate, 0.5 if end else 1.0)
            if visit == path.steps:
                row_energies(theta, momentum, fits, rates, prior, path.free, energy)
            elif warped:
                warped_drift(theta, path.place, momentum, spread, 1.0, power)
            else:
                leapfrog_drift(theta, momentum, spread, 1.0)
        for i in range(energy.size):
            path.change[i] = energy[i] - path.change[i]

    return go


@lru_cache(maxsize=128)
def update_kernel(first: Kernel, second: Kernel) -> Kernel:
    """Make the kernel of multiplicative updates of W and H in turn, from those of their shares.

    kernel(block, factors, law, numerators, denominators, penalties, cycles, work): numerators and
    denominators are scratch of the shape of each factor, penalties those of `multiply_share`.
    """

    @jit_exact_inner
    def move(theta: Array, num: Array, den: Array, penalty: float) -> None:
        multiply_share(theta, num, den, penalty)
        for i in range(theta.shape[0]):
            for k in range(theta.shape[1]):
                num[i, k] = den[i, k] = 0

    @jit_exact
    def update(
        block: Any,
        factors: Arrays,
        law: Any,
        numerators: Arrays,
        denominators: Arrays,
        penalties: tuple[float, float],
        cycles: int,
        work: Any,
    ) -> None:
        (W, H), (a, b), (c, d) = factors, numerators, denominators
        none, fits = a[:0], np.empty(0)
        for _ in range(cycles):
            first(block, factors, 1.0, law, ((a, none), (c, none), fits), work)
            move(W, a, c, penalties[0])
            second(block, factors, 1.0, law, ((none, b), (none, d), fits), work)
            move(H, b, d, penalties[1])

    return update
