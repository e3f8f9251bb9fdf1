"""How the tables of an `AllocationModel` lie in one flat array of counts, and back.

Axes that are observed are compacted to the values, or combinations of values, that
occur; axes along which some draw is hidden are laid out in full, as the fastest ones.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaln

from daskfactor.allocation.counts import Counts
from daskfactor.models.allocation import AllocationModel

IntArray = NDArray[np.int64]
Labels = Mapping[str, NDArray[Any]]
Counted = tuple["TableLayout", NDArray[np.float64]]

LARGEST_TABLE = 1_000_000
"""Cells of a table that is given whole."""


@dataclass(frozen=True, eq=False)
class TableLayout:
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
) -> tuple[TableLayout, list[Draw]]:
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
    layout = TableLayout(
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
    layout: TableLayout,
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


def mean_tables(counted: Sequence[Counted], labels: Labels) -> dict[str, xr.DataArray]:
    r"""Tables :math:`(\alpha + C) / (\alpha_+ + D)` by the first variable that draws from each.

    All are whole, or none is, so that they fit into one Dataset.
    """
    if all(math.prod(layout.sizes) <= LARGEST_TABLE for layout, _ in counted):
        return {layout.draws[0]: _whole(layout, counts, labels) for layout, counts in counted}
    reached: dict[str, NDArray[np.int64]] = {}
    for layout, _ in counted:
        if len(layout.slow) == 1:
            reached.setdefault(layout.dims[layout.slow[0]], layout.occupied[0])
    return {
        layout.draws[0]: _occupied(layout, counts, labels, reached) for layout, counts in counted
    }


def _whole(layout: TableLayout, counts: NDArray[np.float64], labels: Labels) -> xr.DataArray:
    """Every cell of a table."""
    axes = (*layout.slow, *layout.fast)
    C = np.zeros([layout.sizes[axis] for axis in axes])
    C[tuple(layout.occupied)] = counts.reshape(-1, *layout.fast_sizes)
    own = axes.index(len(layout.sizes) - 1)
    mean = (layout.alpha + C) / (layout.alpha_total + C.sum(axis=own, keepdims=True))
    dims = [layout.dims[axis] for axis in axes]
    coords = {dim: labels[dim] for dim in dims if dim in labels}
    return _finished(layout, xr.DataArray(mean, coords, dims), "all")


def _occupied(
    layout: TableLayout,
    counts: NDArray[np.float64],
    labels: Labels,
    reached: Mapping[str, NDArray[np.int64]],
) -> xr.DataArray:
    """The cells that data reach; ``reached`` are the indices that other tables' dims have."""
    totals = np.bincount(layout.owner, counts, layout.totals)[layout.owner]
    mean = (layout.alpha + counts) / (layout.alpha_total + totals)
    dims = [layout.dims[axis] for axis in layout.fast]
    if not layout.slow:
        return _finished(layout, xr.DataArray(mean.reshape(layout.fast_sizes), dims=dims), "all")
    values = {
        dim: labels[dim][places] if dim in labels else places
        for dim, places in zip(
            (layout.dims[axis] for axis in layout.slow), layout.occupied, strict=True
        )
    }
    (first, places), *others = zip(values, layout.occupied, strict=True)
    alone = not others and np.array_equal(places, reached[first])
    name = first if alone else f"cell_{layout.draws[0]}"
    coords = {(dim if alone else f"{dim}_of_{name}"): (name, own) for dim, own in values.items()}
    shaped = mean.reshape(-1, *layout.fast_sizes)
    return _finished(layout, xr.DataArray(shaped, coords, [name, *dims]), "occupied")


def _finished(layout: TableLayout, table: xr.DataArray, cells: str) -> xr.DataArray:
    """Axes in their order: parents, then the variable."""
    table.attrs.update(cells=cells, drawn_by=", ".join(layout.draws), pseudo_count=layout.alpha)
    table.name = layout.draws[0]
    known = [dim for dim in layout.dims if dim in table.dims]
    return table.transpose(*[dim for dim in table.dims if dim not in known], *known)
