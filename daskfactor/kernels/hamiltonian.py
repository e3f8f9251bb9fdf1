"""Leapfrog steps of one factor band, mirrored at zero, in place.

Momenta are in units in which they are standard normal: with mass m and s = 1/√m,
u = p / √m, so that a kick is u += ε s G and a drift x += ε s u. An entry with s = 0
does not move.
"""

from typing import Any

from numpy.typing import NDArray

from daskfactor.kernels.jit import jit_exact

Scalar = Any
_TINY = 1e-30
"""Where the pull of a gamma prior, (shape - 1) / theta, stops growing."""


@jit_exact
def kick(
    theta: NDArray[Any],
    momentum: NDArray[Any],
    grad: NDArray[Any],
    spread: NDArray[Any],
    size: float,
    precision: float,
    rate: float,
    shape: float,
) -> None:
    """Change the momentum by the gradient of the log posterior.

    u <- u + size s (precision grad - rate + (shape - 1) / theta)

    Parameters
    ----------
    theta, momentum, grad, spread : (n, K), C-contiguous, one float dtype; ``grad`` of the
        log-likelihood at dispersion 1, ``spread`` s = 1 / sqrt(mass)
    size : time, in units in which ``spread`` is a length
    precision : 1 / dispersion
    rate, shape : of the gamma prior

    Source: Neal 2011, "MCMC using Hamiltonian dynamics", equation 2.28.
    """
    real = theta.dtype.type
    x, u = theta.reshape(theta.size), momentum.reshape(theta.size)
    g, s = grad.reshape(theta.size), spread.reshape(theta.size)
    excess, tiny = real(shape) - real(1), real(_TINY)
    for i in range(x.size):
        pull = real(precision) * g[i] - real(rate)
        if excess != 0:
            pull += excess / (x[i] if x[i] > tiny else tiny)
        u[i] += real(size) * s[i] * pull


@jit_exact
def drift(theta: NDArray[Any], momentum: NDArray[Any], spread: NDArray[Any], size: float) -> None:
    """Move along the momentum; an entry that passes zero comes back, and its momentum turns.

    x = theta + size s u;  theta <- |x|,  u <- -u where x < 0

    That is a drift in the mirrored density p(|x|), folded back: reversible, and volumes
    stay. Parameters as for :func:`kick`.
    """
    real = theta.dtype.type
    x, u = theta.reshape(theta.size), momentum.reshape(theta.size)
    s = spread.reshape(theta.size)
    for i in range(x.size):
        moved = x[i] + real(size) * s[i] * u[i]
        back = moved < 0
        x[i] = -moved if back else moved
        u[i] = -u[i] if back else u[i]
