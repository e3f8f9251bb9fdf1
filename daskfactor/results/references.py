"""What the components of a run are named after: a reference that all draws are matched with."""

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.errors import OptionError
from daskfactor.results.matching import (
    By,
    Law,
    Match,
    Reference,
    match,
    rearranged,
    reference_from,
)
from daskfactor.results.trace import each_draw, each_weighted_draw
from daskfactor.results.weights import relative

Array = NDArray[Any]

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
