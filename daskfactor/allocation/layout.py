"""Where the tables of an `AllocationModel` lie in one flat array of counts.

Axes that are observed are compacted to the values, or combinations of values, that
occur; axes along which some draw is hidden are laid out in full, as the fastest ones.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaln

from daskfactor.allocation.counts import Counts
from daskfactor.models.allocation import AllocationModel

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Layout:
    """One table: parents, then the variable that draws from it, as far as data reach.

    Attributes
    ----------
    draws
        The variables that draw from it; several if they are tied.
    axes, dims, sizes
        Parents and variable of the first of them, what results call them, their sizes.
    slow, fast
        Positions of the compacted axes and of those in full, the latter slowest first.
    occupied : array (len(slow), U)
        Combinations of values along the slow axes that occur.
    parent : array (U,)
        Which of the U' combinations of slow parents each of them belongs to.
    alpha
        Pseudo-count per cell.
    """

    draws: tuple[str, ...]
    axes: tuple[str, ...]
    dims: tuple[str, ...]
    sizes: tuple[int, ...]
    slow: tuple[int, ...]
    fast: tuple[int, ...]
    occupied: IntArray
    parent: IntArray
    n_parents: int
    alpha: float

    @property
    def alpha_total(self) -> float:
        """Pseudo-count of one parent configuration."""
        return self.alpha * self.sizes[-1]

    @property
    def fast_sizes(self) -> tuple[int, ...]:
        """Sizes of the axes in full."""
        return tuple(self.sizes[axis] for axis in self.fast)

    @property
    def cells(self) -> int:
        """Length of its part of the flat counts."""
        return len(self.parent) * math.prod(self.fast_sizes)

    @property
    def totals(self) -> int:
        """Length of its part of the totals per parent configuration."""
        return self.n_parents * (math.prod(self.fast_sizes) // self.own_width)

    @property
    def own_width(self) -> int:
        """Neighbouring cells with the same parents: the size of the last axis if it is in full."""
        return self.sizes[-1] if len(self.sizes) - 1 in self.fast else 1

    @property
    def owner(self) -> IntArray:
        """Which total each cell adds to, (cells,)."""
        width = math.prod(self.fast_sizes) // self.own_width
        within = np.repeat(np.arange(width, dtype=np.int64), self.own_width)
        return (self.parent[:, None] * width + within).ravel()

    def log_f(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        r"""Log-probability of one sequence of draws with these counts (..., cells), in nats.

        .. math:: \sum_{pa} \ln B(\alpha + C(:, pa)) - \ln B(\alpha)
        """
        rows = counts.reshape(-1, self.cells)
        place = self.owner + self.totals * np.arange(len(rows))[:, None]
        totals = np.bincount(place.ravel(), rows.ravel(), self.totals * len(rows))
        totals = totals.reshape(len(rows), -1)
        result = rising(self.alpha, rows).sum(axis=1) - rising(self.alpha_total, totals).sum(axis=1)
        return np.reshape(result, counts.shape[:-1])


class Draw(NamedTuple):
    """What one variable adds to its table: a place of the cell plus one of the hidden state."""

    row: IntArray
    column: IntArray
    total_row: IntArray
    total_column: IntArray


def lay_out(
    model: AllocationModel, group: tuple[str, ...], counts: Counts
) -> tuple[Layout, list[Draw]]:
    """The table of some variables, and what each of them adds to it."""
    sizes, network = model.sizes(counts.shape), model.network
    families = [network.family(name) for name in group]
    own = families[0]
    hidden = {axis for family in families for axis, v in enumerate(family) if v in model.hidden}
    fast = sorted(hidden)
    if len(group) == 1:
        fast.sort(key=lambda axis: network.order.index(own[axis]))
    slow = tuple(axis for axis in range(len(own)) if axis not in hidden)
    observed = dict(zip(model.dims, counts.indices.T, strict=True))
    where = np.concatenate([_stacked(family, slow, observed, counts) for family in families], 1)
    occupied, place = distinct(where)
    parents = slow[:-1] if slow and slow[-1] == len(own) - 1 else slow
    combinations, parent = distinct(occupied[: len(parents)])
    names = dict(zip(model.dims, counts.dims, strict=True))
    layout = Layout(
        group,
        own,
        tuple(names.get(name, name) for name in own),
        tuple(sizes[name] for name in own),
        slow,
        tuple(fast),
        occupied,
        parent,
        combinations.shape[1],
        model.pseudo_counts(counts.shape)[group[0]],
    )
    places = np.split(place, len(group))
    return layout, [
        _draw(layout, family, mine, model, observed)
        for family, mine in zip(families, places, strict=True)
    ]


def distinct(columns: IntArray) -> tuple[IntArray, IntArray]:
    """Distinct columns of (A, M), in lexicographic order (A, U), and which each one is (M,)."""
    code = np.zeros(columns.shape[1], np.int64)
    for values in columns:
        found, inverse = np.unique(values, return_inverse=True)
        _, code = np.unique(code * len(found) + inverse, return_inverse=True)
    _, first = np.unique(code, return_index=True)
    return columns[:, first], code.astype(np.int64)


def _stacked(
    family: tuple[str, ...], axes: tuple[int, ...], observed: dict[str, IntArray], counts: Counts
) -> IntArray:
    chosen = [observed[family[axis]] for axis in axes]
    return np.stack(chosen) if chosen else np.zeros((0, len(counts.values)), np.int64)


def _draw(
    layout: Layout,
    family: tuple[str, ...],
    place: IntArray,
    model: AllocationModel,
    observed: dict[str, IntArray],
) -> Draw:
    """Strides of the fast axes; an observed variable may go along one too, if tied to hidden."""
    states = np.unravel_index(np.arange(model.n_hidden_states), tuple(model.hidden.values()))
    state = dict(zip(model.hidden, states, strict=True))
    width = math.prod(layout.fast_sizes)
    row, total_row = place * width, layout.parent[place] * (width // layout.own_width)
    column, total_column = np.zeros((2, model.n_hidden_states), np.int64)
    stride = width
    for axis in layout.fast:
        name = family[axis]
        stride //= layout.sizes[axis]
        last = axis == len(family) - 1
        if name in state:
            column += state[name] * stride
            total_column += 0 if last else state[name] * (stride // layout.own_width)
        else:
            row += observed[name] * stride
            total_row += 0 if last else observed[name] * (stride // layout.own_width)
    return Draw(row, column, total_row, total_column)


def rising(alpha: ArrayLike, counts: NDArray[Any]) -> NDArray[np.float64]:
    """Log Γ(α + C) - log Γ(α); most counts are 0 and cost nothing."""
    out = np.zeros(counts.shape)
    held = counts != 0
    own = np.broadcast_to(np.asarray(alpha, np.float64), counts.shape)[held]
    out[held] = gammaln(own + counts[held]) - gammaln(own)
    return out
