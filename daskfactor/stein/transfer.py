"""Transfer matrices: how factors of small synthetic matrices follow from singular vectors."""

import warnings
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.random import Stream, generator
from daskfactor.stein.singular import Singular, consistent_signs, whole_svd

Array = NDArray[np.float64]

SIZE: Final = 12
"""Rows and columns of a synthetic matrix, at least; more where the rank needs them."""
RESTARTS: Final = 5
"""Factorizations of every synthetic matrix."""
NOISE: Final = 0.05
"""Standard deviation of the noise, of the mean of the noiseless matrix."""
STREAM: Final = 7
"""Part of the address of the random numbers, so that no start of a fit shares them."""


class Transfer(NamedTuple):
    """Pairs of matrices: W ≈ U √Σ Q_w, H ≈ Q_h √Σ Vᵀ; (M, R, R) each."""

    w: Array
    h: Array


def halves(found: Singular, rank: int) -> tuple[Array, Array]:
    """U √Σ (I, R) and √Σ Vᵀ (R, J) of the leading triplets."""
    root = np.sqrt(found.values[:rank])
    return found.left[:, :rank] * root, found.right[:rank] * root[:, None]


@lru_cache(maxsize=16)
def learn_transfer(rank: int, count: int, seed: int = 0) -> Transfer:
    r"""Transfer matrices from non-negative factorizations of small synthetic matrices.

    .. math:: Q_w = \arg\min_Q \|W - U\sqrt\Sigma\, Q\|_F, \quad
        Q_h = \arg\min_Q \|H - Q \sqrt\Sigma V^\top\|_F

    Synthetic matrices are products of uniform random factors of the rank, with Gaussian
    noise cut off at zero; each is factorized from five random starts. What was learnt is
    kept for the life of the process: the matrices of a seed serve all data.

    Parameters
    ----------
    rank
        Transfer rank R.
    count
        Number of pairs M.
    seed
        Of the synthetic matrices and the starts.

    Returns
    -------
    Transfer
        Two arrays (M, R, R), which nobody may write to.

    References
    ----------
    Masood and Doshi-Velez, algorithm 2 and section 6.1 (R = 3, twenty 12 x 12 matrices).
    """
    size = max(SIZE, 4 * rank)
    pairs: list[tuple[Any, Any]] = []
    problem = 0
    while len(pairs) < count:
        rng = generator(seed, problem, Stream.START, STREAM, rank)
        X = rng.random((size, rank)) @ rng.random((rank, size))
        X = np.maximum(X + NOISE * X.mean() * rng.standard_normal(X.shape), 0.0)
        basis, weights = halves(consistent_signs(whole_svd(X, rank)), rank)
        for _ in range(min(RESTARTS, count - len(pairs))):
            W, H = _factorize(X, rank, int(rng.integers(2**31)))
            pairs.append(
                (
                    np.linalg.lstsq(basis, W, rcond=None)[0],
                    np.linalg.lstsq(weights.T, H.T, rcond=None)[0].T,
                )
            )
        problem += 1
    found = Transfer(*(np.stack(one) for one in zip(*pairs, strict=True)))
    for one in found:
        one.setflags(write=False)
    return found


def _factorize(X: Array, rank: int, seed: int) -> tuple[Array, Array]:
    """One factorization from a random start, W and H of equal length component by component."""
    from sklearn.decomposition import non_negative_factorization
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # what it has reached will do
        W, H, _ = non_negative_factorization(
            X, n_components=rank, init="random", solver="cd", max_iter=200, random_state=seed
        )
    size: Any = np.linalg.norm(W, axis=0), np.linalg.norm(H, axis=1)
    usable = (size[0] > 0) & (size[1] > 0)
    ratio = np.where(usable, size[1], 1.0) / np.where(usable, size[0], 1.0)
    return W * np.sqrt(ratio), H / np.sqrt(ratio)[:, None]
