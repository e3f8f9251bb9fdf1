"""Probability masses of particles from their Stein matrix, and what is left of discrepancy.

Source: Masood and Doshi-Velez, equation 4 and algorithm 5; Liu and Lee 2016.
"""

import warnings
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize

from daskfactor.errors import OptionError, SamplingWarning

Array = NDArray[np.float64]

SYMMETRIC: Final = 1e-8
"""Relative asymmetry from which on a matrix is refused."""
NEGATIVE: Final = 1e-6
"""Eigenvalue below zero, of the largest, from which on weights are not to be trusted."""


def checked_matrix(matrix: ArrayLike) -> Array:
    """A Stein matrix, symmetric and finite.

    Raises
    ------
    OptionError
        If it is not.
    """
    K = np.asarray(matrix, dtype=np.float64)
    square = K.ndim == 2 and K.shape[0] == K.shape[1] and K.size > 0
    if not (square and np.isfinite(K).all()):
        raise OptionError(
            f"a Stein matrix must be a finite square matrix, got shape {K.shape} with "
            f"{int((~np.isfinite(K)).sum())} values that are not finite; leave particles out that "
            "have no finite score"
        )
    if np.abs(K - K.T).max() > SYMMETRIC * np.abs(K).max():
        raise OptionError("a Stein matrix must be symmetric, got one that is not; pass (K + K.T)/2")
    return (K + K.T) / 2.0


def checked_weights(weights: Any, count: int) -> Array:
    """Probability masses (M,) that add up to 1 exactly.

    Raises
    ------
    OptionError
        If there are not M of them, one is negative, or they do not add up to 1.
    """
    w = np.asarray(weights, dtype=np.float64)
    if w.shape != (count,):
        raise OptionError(
            f"weights must be one number for each of the {count} particles, got shape {w.shape}"
        )
    if not (np.isfinite(w).all() and w.min() >= 0 and abs(w.sum() - 1.0) < 1e-6):
        raise OptionError(
            f"weights must be at least 0 and add up to 1, got a smallest of {w.min():g} and a sum "
            f"of {w.sum():g}; divide them by their sum"
        )
    return np.asarray(w / w.sum())


def discrepancy(matrix: ArrayLike, weights: ArrayLike | None = None) -> float:
    r"""Kernelised Stein discrepancy :math:`\sqrt{w^\top K w}` of weighted particles.

    Parameters
    ----------
    matrix
        Stein matrix K (M, M).
    weights
        Probability masses (M,); left out, all are equal.

    Returns
    -------
    float
        At least 0: rounding below is taken for 0. The paper's figures show its square.

    References
    ----------
    Masood and Doshi-Velez, equation 4.
    """
    K = checked_matrix(matrix)
    w = np.full(len(K), 1.0 / len(K)) if weights is None else checked_weights(weights, len(K))
    return float(np.sqrt(max(0.0, float(w @ K @ w))))


def stein_weights(matrix: ArrayLike) -> Array:
    r"""Probability masses of least discrepancy: :math:`\min_w w^\top K w` on the simplex.

    With :math:`K = L^\top L` the solution of the non-negative least squares problem
    :math:`L w = 0, \; 1^\top w = 1` is that of the quadratic programme but for its scale.

    Parameters
    ----------
    matrix
        Stein matrix K (M, M), positive semidefinite but for rounding.

    Returns
    -------
    ndarray of float64
        (M,), non-negative with sum 1; never worse than equal weights, or than any single
        particle. Where several are equally good (K singular), one of them.

    Raises
    ------
    OptionError
        If the matrix is not symmetric and finite, or has a negative diagonal.

    Notes
    -----
    L comes from the eigenvalues of K after its diagonal was scaled to 1, which keeps the
    digits of good particles beside very bad ones. Eigenvalues that are negative or within
    rounding of 0 (M ε of the largest) are set to 0; nothing is added to the others.

    Masood and Doshi-Velez, equation 4 and algorithm 5, who use a conic solver.
    """
    K = checked_matrix(matrix)
    count = len(K)
    diagonal = np.diag(K)
    if diagonal.min() < 0:
        raise OptionError(
            f"a Stein matrix has no negative diagonal, got {diagonal.min():g}; check the scores"
        )
    single = np.zeros(count)
    single[int(diagonal.argmin())] = 1.0
    candidates = [np.full(count, 1.0 / count), single]
    if diagonal.min() > 0:
        try:
            candidates.append(_least_squares(K, np.sqrt(diagonal)))
        except RuntimeError as error:  # more iterations than scipy allows
            warnings.warn(
                f"no best weights were found ({error}); equal weights or the best single particle "
                "are returned, whichever is better",
                SamplingWarning,
                stacklevel=2,
            )
    return min(candidates, key=lambda w: float(w @ K @ w))


def _least_squares(K: Array, size: Array) -> Array:
    """The weights by NNLS, for u = w times ``size``, in which the diagonal is 1."""
    values, vectors = np.linalg.eigh(K / size / size[:, None])
    if values[0] < -NEGATIVE * values[-1]:
        warnings.warn(
            "the Stein matrix has negative eigenvalues, so that rounding has taken its digits: "
            "weights and discrepancy are not to be trusted; leave out the particles with the "
            "largest entries on its diagonal, or rescale the data",
            SamplingWarning,
            stacklevel=3,
        )
    values[values < len(K) * np.finfo(np.float64).eps * values[-1]] = 0.0
    root = np.sqrt(values)[:, None] * vectors.T
    system = np.vstack([root, size.min() / size])
    goal = np.zeros(len(system))
    goal[-1] = 1.0
    u, _ = optimize.nnls(system, goal, maxiter=30 * len(K))
    w = u / size
    return np.asarray(w / w.sum())
