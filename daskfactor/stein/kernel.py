"""The inverse multiquadric kernel over pairs of factors, Stein matrices, and weights from them.

Everything is a function of squared distances: with r² = |x - y|² and κ(r²) = k(x, y),

    ∇_x k = 2 κ' (x - y) = -∇_y k        tr ∇_x ∇_yᵀ k = -2 d κ' - 4 r² κ''

so that no difference of two particles is ever formed. The kernelised Stein matrix

    K_p(x, y) = k s_x·s_y + s_x·∇_y k + s_y·∇_x k + tr ∇_x ∇_yᵀ k

has -2 κ' (s_x - s_y)·(x - y) for its two middle terms, and follows from inner products
between particles, scores and both.

Source: Masood and Doshi-Velez, section 6.1, equations 3, 4 and 7, and algorithm 5; Gorham and
Mackey 2017; Liu and Lee 2016.
"""

from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from daskfactor.checks import is_number, positive_or, warn
from daskfactor.errors import OptionError, SamplingWarning

Array = NDArray[Any]
Scale = float | Literal["median"]

SYMMETRIC: Final = 1e-8
"""Relative asymmetry from which on a matrix is refused."""
NEGATIVE: Final = 1e-6
"""Eigenvalue below zero, of the largest, from which on weights are not to be trusted."""


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
        """Return κ."""
        return np.asarray(0.5 * self._part(r2) ** self.power)

    def slope(self, r2: ArrayLike) -> Array:
        """Return κ', the derivative in r²: ∇_x k = 2 κ' (x - y)."""
        factor = 0.5 * self.power / self.scale**2
        return np.asarray(factor * self._part(r2) ** (self.power - 1.0))

    def bend(self, r2: ArrayLike) -> Array:
        """Return κ'', the second derivative in r²."""
        factor = 0.5 * self.power * (self.power - 1.0) / self.scale**4
        return np.asarray(factor * self._part(r2) ** (self.power - 2.0))

    def trace(self, r2: ArrayLike, dimension: int) -> Array:
        """Return Σ_i ∂²k / ∂x_i ∂y_i = -2 d κ' - 4 r² κ'', d the number of coordinates."""
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

    Examples
    --------
    >>> import daskfactor as dfac
    >>> kernel = dfac.IMQ(scale_w=0.1, scale_h=100.0)
    >>> kernel.power_w
    -0.5
    """

    scale_w: Scale = 1e-2
    scale_h: Scale = 1e3
    power_w: float = -0.5
    power_h: float = -0.5

    def __post_init__(self) -> None:
        for name in ("scale_w", "scale_h"):
            value = positive_or(name, getattr(self, name), "median")
            object.__setattr__(self, name, value)
        for name in ("power_w", "power_h"):
            value = getattr(self, name)
            if not (is_number(value) and -1.0 < value < 0.0):
                raise OptionError(
                    f"{name} must be a number between -1 and 0, got {value!r}; -0.5 is usual"
                )
            object.__setattr__(self, name, float(value))

    def resolve(self, r2_w: ArrayLike, r2_h: ArrayLike) -> Self:
        """Return the kernel with a number for every ``"median"``.

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
        """Kernels of W and of H; scales must be numbers."""
        scales = self.scale_w, self.scale_h
        if isinstance(scales[0], str) or isinstance(scales[1], str):
            raise OptionError(
                'a "median" scale must be resolved from distances first; use kernel.resolve(...)'
            )
        return Multiquadric(scales[0], self.power_w), Multiquadric(scales[1], self.power_h)


def median_distance(r2: ArrayLike) -> float:
    """Return the median distance between two particles, from squared distances (M, M).

    It is 1 for a single particle, or particles that are all the same.
    """
    table = np.asarray(r2, dtype=np.float64)
    pairs = table[np.triu_indices(len(table), 1)]
    median = float(np.median(np.sqrt(pairs))) if pairs.size else 0.0
    return median if median > 0.0 else 1.0


class Block(NamedTuple):
    """Terms of one block of the matrix: r², (s_i - s_j)·(θ_i - θ_j), s_i·s_j, and d."""

    r2: Array
    cross: Array
    score: Array
    dimension: int

    @classmethod
    def of(cls, gram: Array, cross: Array, score: Array, dimension: int) -> Self:
        """Compute it from inner products of centred particles, centred scores with them, scores."""
        diagonal = np.diag(cross)
        differences = diagonal[:, None] + diagonal - cross - cross.T
        return cls(squared_distances(gram), differences, score, dimension)

    def terms(self, kernel: Multiquadric) -> Array:
        """Return the terms of this block besides k s_i·s_j."""
        return kernel.trace(self.r2, self.dimension) - 2.0 * kernel.slope(self.r2) * self.cross


def squared_distances(gram: Array) -> Array:
    """Return |x_i - x_j|² from the Gram matrix of centred points, exactly 0 on the diagonal."""
    norms = np.diag(gram)
    table = np.maximum(norms[:, None] + norms - 2.0 * gram, 0.0)
    np.fill_diagonal(table, 0.0)
    return np.asarray(table)


def assemble(blocks: tuple[Block, Block], kernel: IMQ) -> Array:
    """Return the Stein matrix (M, M) of both blocks; the kernel's scales are numbers."""
    pairs = list(zip(kernel.blocks, blocks, strict=True))
    value = sum(part.value(block.r2) for part, block in pairs)
    matrix = value * (blocks[0].score + blocks[1].score)
    for part, block in pairs:
        matrix = matrix + block.terms(part)
    return np.asarray((matrix + matrix.T) / 2.0)


def checked_matrix(matrix: ArrayLike) -> Array:
    """Return a Stein matrix, symmetric and finite.

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
            f"{int((~np.isfinite(K)).sum())} values that are not finite; leave out particles "
            "without a finite score"
        )
    if np.abs(K - K.T).max() > SYMMETRIC * np.abs(K).max():
        raise OptionError("a Stein matrix must be symmetric, got one that is not; pass (K + K.T)/2")
    return (K + K.T) / 2.0


def checked_weights(weights: Any, count: int) -> Array:
    """Return probability masses (M,) that add up to 1 exactly.

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
    r"""Return the kernelised Stein discrepancy :math:`\sqrt{w^\top K w}` of weighted particles.

    Parameters
    ----------
    matrix
        Stein matrix K (M, M).
    weights
        Probability masses (M,); left out, all are equal.

    Returns
    -------
    float
        At least 0: negative rounding errors become 0. The paper's figures show its square.

    References
    ----------
    Masood and Doshi-Velez, equation 4.
    """
    K = checked_matrix(matrix)
    w = np.full(len(K), 1.0 / len(K)) if weights is None else checked_weights(weights, len(K))
    return float(np.sqrt(max(0.0, float(w @ K @ w))))


def stein_weights(matrix: ArrayLike) -> Array:
    r"""Return the masses of least discrepancy: :math:`\min_w w^\top K w` on the simplex.

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
            warn(
                f"no best weights were found ({error}); equal weights or the best single particle "
                "are returned, whichever is better",
                SamplingWarning,
            )
    return min(candidates, key=lambda w: float(w @ K @ w))


def _least_squares(K: Array, size: Array) -> Array:
    """Compute the weights by NNLS, for u = w times ``size``, in which the diagonal is 1."""
    values, vectors = np.linalg.eigh(K / size / size[:, None])
    if values[0] < -NEGATIVE * values[-1]:
        warn(
            "the Stein matrix has negative eigenvalues, so that rounding has taken its digits: "
            "weights and discrepancy are not to be trusted; leave out the particles with the "
            "largest entries on its diagonal, or rescale the data",
            SamplingWarning,
        )
    values[values < len(K) * np.finfo(np.float64).eps * values[-1]] = 0.0
    root = np.sqrt(values)[:, None] * vectors.T
    system = np.vstack([root, size.min() / size])
    goal = np.zeros(len(system))
    goal[-1] = 1.0
    u, _ = scipy.optimize.nnls(system, goal, maxiter=30 * len(K))
    w = u / size
    return np.asarray(w / w.sum())
