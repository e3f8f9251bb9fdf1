r"""Which component of one draw is which of a reference: order, sign and scale.

W, H here are one draw, (I, K) and (K, J). The cosine of two rank-one matrices is
the product of the cosines of their factors,

.. math:: \cos(w h^T, w' h'^T) = \cos(w, w') \cos(h, h'),

which no scale and no common change of sign alters; the order that makes the sum of
these largest is found by the Hungarian method. Masood and Doshi-Velez compare columns
of W alone, and minimise the sum of the angles between them (section 7.2, footnote 5).
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from daskfactor.errors import OptionError
from daskfactor.results.trace import each_draw, each_weighted_draw
from daskfactor.results.weights import relative

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


ROUNDS: Final = 6
"""Passes over all draws after which the reference is taken as it is."""


class Cost(NamedTuple):
    """What may be changed of a draw, and how components are compared."""

    law: Law
    threshold: float
    by: By = "both"

    def match(self, W: Array, H: Array, reference: Reference) -> Match:
        return match(W, H, reference, self.law, self.threshold, self.by)


class Draws(NamedTuple):
    """A group of draws, the user's names of rows and columns, masses (chain, draw) if any."""

    group: xr.Dataset
    dims: tuple[str, str]
    weights: NDArray[np.float64] | None

    @property
    def row_factor(self) -> xr.DataArray:
        return self.group["W"].transpose("chain", "draw", self.dims[0], "component")

    @property
    def column_factor(self) -> xr.DataArray:
        return self.group["H"].transpose("chain", "draw", "component", self.dims[1])

    @property
    def chains(self) -> list[Any]:
        return list(self.group["chain"].values.tolist())

    def of_chain(self, chain: Any) -> Iterator[tuple[Array, Array]]:
        return each_draw(self.group, chain)

    def with_mass(self, chain: Any) -> Iterator[tuple[tuple[Array, Array], float]]:
        """Draws that have any, and how much in units of the largest."""
        return each_weighted_draw(self.group, chain, self.weights)

    @property
    def masses(self) -> NDArray[np.float64]:
        """In units of the largest, (chain, draw); 1 where draws count alike."""
        if self.weights is None:
            return np.ones((self.group.sizes["chain"], self.group.sizes["draw"]))
        return relative(self.weights)


def best_draw(tree: xr.DataTree, weights: NDArray[np.float64] | None) -> tuple[Any, int]:
    """Label of the chain and position of the draw of most weight, then of highest density."""
    draws = tree["posterior"].to_dataset()
    labels = draws["chain"].values.tolist()
    heaviest = None if weights is None else weights == weights.max()
    first = (labels[0], draws.sizes["draw"] - 1)
    if heaviest is not None:
        chain, draw = np.argwhere(heaviest)[0]
        first = (labels[chain], int(draw))
    if "sample_stats" not in tree.children or "lp" not in tree["sample_stats"].data_vars:
        return first
    lp = tree["sample_stats"]["lp"].transpose("chain", "draw")
    try:
        values = lp.sel(chain=draws["chain"], draw=draws["draw"]).values
    except KeyError:  # labels were changed: any draw will do for a start
        return first
    if heaviest is not None:
        values = np.where(heaviest, values, np.nan)
    if not np.isfinite(values).any():
        return first
    chain, draw = np.unravel_index(np.nanargmax(values), values.shape)
    return labels[int(chain)], int(draw)


def iterated_mean(draws: Draws, cost: Cost, start: tuple[Any, int]) -> Reference:
    """The mean of the aligned draws, each component over the draws in which it appears."""
    label, position = start
    one = draws.group.isel(draw=[position])
    W, H = next(each_draw(one, label))
    reference = reference_from(W, H)
    reference, _ = _round(draws, [label], reference, cost._replace(threshold=0.0))
    before: list[bytes] = []
    for _ in range(ROUNDS):
        reference, orders = _round(draws, draws.chains, reference, cost)
        if orders == before:
            break
        before = orders
    return reference


def _round(
    draws: Draws, chains: Iterable[Any], reference: Reference, cost: Cost
) -> tuple[Reference, list[bytes]]:
    """The next reference, and the order of every draw with mass under this one.

    With a threshold of zero every draw counts: the start is a single, noisy draw.
    """
    sum_w, sum_h = np.zeros(reference.W.shape), np.zeros(reference.H.shape)
    orders = []
    for chain in chains:
        for (W, H), mass in draws.with_mass(chain):
            found = cost.match(W, H, reference)
            new_w, new_h = rearranged(W, H, found)
            counted = found.matched if cost.threshold > 0 else np.ones(len(found.matched))
            weight = mass * counted
            sum_w += new_w * weight
            sum_h += new_h * np.asarray(weight)[:, None]
            orders.append(found.permutation.tobytes())
    mean = reference_from(sum_w, sum_h)
    # A component that no draw has any more stays what it was.
    lost = ~(np.abs(sum_w).any(axis=0) & np.abs(sum_h).any(axis=1))
    mean.W[:, lost], mean.H[lost] = reference.W[:, lost], reference.H[lost]
    dtype = reference.W.dtype
    return Reference(mean.W.astype(dtype), mean.H.astype(dtype)), orders


def given_reference(factors: tuple[Array, Array], draws: Draws) -> Reference:
    """The reference that the caller named, checked.

    Raises
    ------
    OptionError
        If it is of another shape, or not finite.
    """
    W, H = factors
    shapes = (draws.row_factor.shape[2:], draws.column_factor.shape[2:])
    if (W.shape, H.shape) != shapes:
        raise OptionError(
            f"the reference has W and H of shapes {W.shape} and {H.shape}, the trace "
            f"{shapes[0]} and {shapes[1]}: pass one of the same data and number of components"
        )
    if not (np.isfinite(W).all() and np.isfinite(H).all()):
        raise OptionError("the reference holds values that are not finite; pass finite factors")
    dtype = draws.row_factor.dtype
    return reference_from(W.astype(dtype), H.astype(dtype))
