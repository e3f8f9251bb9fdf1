r"""Which component of one draw is which of a reference: order, sign and scale.

W, H here are one draw, (I, K) and (K, J). The cosine of two rank-one matrices is
the product of the cosines of their factors,

.. math:: \cos(w h^T, w' h'^T) = \cos(w, w') \cos(h, h'),

which no scale and no common change of sign alters; the order that makes the sum of
these largest is found by the Hungarian method. Masood and Doshi-Velez compare columns
of W alone, and minimise the sum of the angles between them (section 7.2, footnote 5).
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

Array = NDArray[Any]
By = Literal["both", "w"]


class Law(NamedTuple):
    """What of a draw may be changed without changing WH.

    Attributes
    ----------
    free
        Positions of the components that may change places, (F,): all but frozen ones
        and biases.
    signed
        Whether factors may be negative, so that a component may change its sign.
    components
        Number of components K; columns of factors beyond it are biases.
    simplex
        Whether columns of W add up to 1 by the model, so that no scale is free.
    """

    free: NDArray[np.int64]
    signed: bool
    components: int
    simplex: bool = False


class Reference(NamedTuple):
    """What draws are compared with: columns of W, rows of H, of length one (or zero)."""

    W: Array
    H: Array


class Match(NamedTuple):
    """How a draw has to be changed: W_k = W[:, permutation_k] factor_k, H_k likewise / factor_k.

    Attributes
    ----------
    permutation, factor, similarity
        Over components, (K,); the similarity is cos(w) cos(h) of what is put there, or
        cos(w) where W alone is compared.
    present
        Whether any component of the draw has all these cosines at the threshold or above.
    matched
        Whether the one that is put there has.
    """

    permutation: NDArray[np.int64]
    factor: NDArray[np.float64]
    similarity: NDArray[np.float64]
    present: NDArray[np.bool_]
    matched: NDArray[np.bool_]


def reference_from(W: Array, H: Array) -> Reference:
    """The reference that a pair of factors is."""
    return Reference(unit(W, 0), unit(H, 1))


def unit(factor: Array, axis: int) -> Array:
    """The vectors along an axis made of length 1; of nothing but zeros as they are."""
    length = np.linalg.norm(factor, axis=axis, keepdims=True)
    return np.asarray(factor / np.where(length > 0, length, 1.0))


def match(
    W: Array, H: Array, reference: Reference, law: Law, threshold: float, by: By = "both"
) -> Match:
    """Order, sign and scale of one draw.

    Parameters
    ----------
    W, H
        The draw, (I, K) and (K, J).
    reference
        Of the same shape.
    law
        Which components may move.
    threshold
        Cosine from which on a component is taken to be the reference's.
    by
        ``"both"``: the sum of the products of cosines is made largest; ``"w"``: the sum
        of the angles between columns of W (their lines, where they have signs), least.
    """
    count = W.shape[1]
    cos_w = np.asarray(reference.W.T @ unit(W, 0), dtype=np.float64)
    cos_h = np.asarray(reference.H @ unit(H, 1).T, dtype=np.float64)
    if by == "w":  # as if H were alike everywhere
        cos_h = np.where(cos_w < 0, -1.0, 1.0) if law.signed else np.ones_like(cos_w)
    both = cos_w * cos_h
    cost = np.arccos(np.clip(both, -1.0, 1.0)) if by == "w" else -both
    permutation = np.arange(count)
    if law.free.size > 1:
        inside = np.ix_(law.free, law.free)
        permutation[law.free] = law.free[linear_sum_assignment(cost[inside])[1]]
    each = np.arange(count)
    chosen_w, chosen_h = cos_w[each, permutation], cos_h[each, permutation]
    factor = np.ones(count)
    if not law.simplex:
        factor[law.free] = _scale(W, H, law)[permutation[law.free]]
    if law.signed:
        turned = (chosen_w + chosen_h)[law.free] < 0
        factor[law.free[turned]] *= -1.0
    nearness = np.maximum(np.minimum(cos_w, cos_h), np.minimum(-cos_w, -cos_h))
    alike: NDArray[np.bool_] = np.asarray(nearness >= threshold)
    mine = np.zeros((count, count), dtype=bool)
    mine[np.ix_(law.free, law.free)] = True
    np.fill_diagonal(mine, True)
    return Match(
        permutation,
        factor,
        both[each, permutation],
        np.asarray((alike & mine).any(axis=1)),
        alike[each, permutation],
    )


def _scale(W: Array, H: Array, law: Law) -> NDArray[np.float64]:
    """What to multiply each w_k by (and divide h_k by) so that both have one size."""
    of_w, of_h = sizes(W, H, law.signed)
    usable = (of_w > 0) & (of_h > 0)
    ratio = np.where(usable, of_h, 1.0) / np.where(usable, of_w, 1.0)
    return np.asarray(np.sqrt(ratio))


def sizes(W: Array, H: Array, signed: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums over the columns of W and rows of H; their lengths where factors have signs."""
    if signed:
        return (
            np.linalg.norm(W.astype(np.float64), axis=0),
            np.linalg.norm(H.astype(np.float64), axis=1),
        )
    return W.sum(axis=0, dtype=np.float64), H.sum(axis=1, dtype=np.float64)


def rearranged(W: Array, H: Array, found: Match) -> tuple[Array, Array]:
    """The draw in the reference's order, sign and scale; copies of the same dtype."""
    factor = found.factor.astype(W.dtype)
    return W[:, found.permutation] * factor, H[found.permutation] / factor[:, None]
