"""The multiplicative update under a gamma prior.

With r = θ_new / θ, num and den of the multiplicative update, D = den + φ λ and
p = φ (a - 1), each update minimises a majoriser of Σ d_β(v|μ) + φ (λ θ - (a - 1) log θ)
that touches it at the old θ, so the objective never rises:

    a > 1, β ≤ 1:  D r = num r^(β-1) + p / θ         (Poisson: θ_new = (θ num + p) / D)
    a > 1, β ≥ 2:  D r^β = num r + p / θ
    a < 1:         r = (num / (D + |p| / θ))^γ(β)     (log θ lies below its tangent)

and with p = 0 all are r = (num / D)^γ(β), the update of Févotte and Idier 2011.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SMALLEST = 1e-6
"""Where entries stop, as a share of those of the start: with a < 1 the objective has no end."""
NEWTON_STEPS = 12


def gamma_update(
    theta: Array, numerator: Array, denominator: Array, pull: float, beta: float, smallest: float
) -> Array:
    """The new θ, in double precision.

    Parameters
    ----------
    theta, numerator, denominator
        Of one band, (rows, K); the denominator with φ λ in it, positive.
    pull
        p = φ (a - 1), not zero.
    beta
        Power of the divergence.
    smallest
        Least value of an entry, old or new.
    """
    old = np.maximum(theta.astype(np.float64), smallest)
    num = np.maximum(numerator.astype(np.float64), 0.0)
    den = denominator.astype(np.float64)
    share = np.abs(pull) / old
    if pull < 0:
        ratio = _power_root(num, den + share, beta)
    elif beta == 1.0:
        ratio = (num + share) / den
    else:
        ratio = _root(num, den, share, beta)
    return np.asarray(np.maximum(old * ratio, smallest))


def _power_root(num: Array, den: Array, beta: float) -> Array:
    """(num / den)^γ(β)."""
    power = 1.0 / (2.0 - beta) if beta < 1.0 else 1.0 / max(beta - 1.0, 1.0)
    return np.asarray((num / den) ** power)


def _root(num: Array, den: Array, share: Array, beta: float) -> Array:
    """The one positive r with den r^m = num r^n + share, by Newton steps that never overshoot.

    (m, n) is (1, β - 1) for β < 1 and (β, 1) for β ≥ 2. den r^m - num r^n - share is
    concave in the first case and convex in the second, where it increases, and the steps
    begin below the root in the first and above it in the second.
    """
    alone, prior = _power_root(num, den, beta), share / den
    if beta < 1.0:
        m, n, r = 1.0, beta - 1.0, np.maximum(alone, prior)
    else:
        m, n, r = beta, 1.0, alone + prior ** (1.0 / beta)
    for _ in range(NEWTON_STEPS):
        value = den * r**m - num * r**n - share
        r = r - value / (m * den * r ** (m - 1.0) - n * num * r ** (n - 1.0))
    return np.asarray(r)
