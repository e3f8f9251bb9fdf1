"""A model and its counts compiled to flat arrays, the input of every method of inference.

Axes of tables that are observed are compacted to the values, or combinations of values, that
occur; axes along which some draw is hidden are laid out in full, as the fastest ones.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaln

from daskfactor.allocation.counts import Counts, as_counts, distinct, stacked
from daskfactor.allocation.model import AllocationModel
from daskfactor.data.labels import free_name
from daskfactor.data.opening import ANYTHING
from daskfactor.data.tables import ReadOptions
from daskfactor.evidence.base import EvidenceMethod

IntArray = NDArray[np.int64]
Vector = NDArray[np.float64]
Labels = Mapping[str, NDArray[Any]]
Columns = Mapping[str, tuple[Sequence[str], Any]]
Draw = tuple[IntArray, IntArray, IntArray, IntArray]
"""Place of a draw in its table: ``row`` and ``column`` of a cell, then of its urn's total."""

LARGEST_TABLE = 1_000_000
"""Cells of a table that results hold in full."""


@dataclass(frozen=True, eq=False)
class TableLayout:
    """One table: parents, then the variable that draws from it, as far as data reach.

    Attributes
    ----------
    draws
        The variables that draw from it; several if they are tied.
    dims, sizes
        Parents and variable of the first of them, as results call them, and their sizes.
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
    dims: tuple[str, ...]
    sizes: tuple[int, ...]
    slow: tuple[int, ...]
    fast: tuple[int, ...]
    occupied: IntArray
    parent: IntArray
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
        return (int(self.parent.max()) + 1) * (math.prod(self.fast_sizes) // self.last_width)

    @property
    def last_width(self) -> int:
        """Neighbouring cells with the same parents: the size of the last axis if it is in full."""
        return self.sizes[-1] if len(self.sizes) - 1 in self.fast else 1

    @property
    def owner(self) -> IntArray:
        """Index of the total that each cell adds to, (cells,)."""
        width = math.prod(self.fast_sizes) // self.last_width
        within = np.repeat(np.arange(width, dtype=np.int64), self.last_width)
        return (self.parent[:, None] * width + within).ravel()

    def log_f(self, counts: Vector) -> float:
        r"""Return the log-probability of one sequence of draws with these counts (cells,), in nats.

        .. math:: \sum_{pa} \ln B(\alpha + C(:, pa)) - \ln B(\alpha)
        """
        totals = np.bincount(self.owner, counts, self.totals)
        return float(rising(self.alpha, counts).sum() - rising(self.alpha_total, totals).sum())


@dataclass(frozen=True, eq=False)
class CompiledModel:
    r"""The Pólya urns that the tokens of data draw from, one for each parent configuration.

    A token at observed cell m with the hidden configuration h makes N draws. Draw n takes
    from cell ``row[m, n] + column[n, h]`` of the flat counts C, in the urn with the total
    D at ``total_row[m, n] + total_column[n, h]``, so that its predictive is

    .. math:: \prod_n \frac{\alpha_n + C_n + c_n}{A_n + D_n + d_n}

    where c and d count earlier draws of the same token and ``group`` at the same cell and
    in the same urn. Only what the data's indices reach has a place; memory is
    proportional to M N + cells.

    Attributes
    ----------
    states
        Joint hidden configurations H, in C order over the hidden variables as the graph
        sorts them.
    cells, totals
        Lengths of the flat arrays C and D.
    row, total_row : arrays (M, N)
        Places of observed cell m.
    column, total_column : arrays (N, H)
        What a hidden configuration adds to them; ``arange(H)`` where all hidden
        variables are axes of the table.
    alpha, alpha_total : arrays (N,)
        Pseudo-counts of a cell and of an urn (all cells of the urn, occupied or not).
    group : array (N,)
        Number of the table; tied draws share one.
    values : array (M,)
        Tokens at each observed cell.
    constant
        Log f of the tables without hidden variables: the same for every allocation.
    log_factor
        Log NB(T) + log T! - Σ log X!, so that
        log p(X) = log_factor + constant + log Σ_z f(C(z)) over labelled allocations z.
    owner : array (cells,)
        The total that a cell adds to.
    cell_alpha, total_alpha : arrays (cells,), (totals,)
        Pseudo-counts by place.
    draws
        Names of the N variables.
    hidden
        Sizes of the hidden variables, slowest first.
    layouts, constant_layouts
        Tables with hidden variables, in the order of the flat counts, and those without,
        each with its counts.
    labels
        Labels along dims of the data.

    References
    ----------
    Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor factorizations by
    simulating Pólya urns", forward process and marginal of the allocation tensor.
    """

    states: int
    cells: int
    totals: int
    row: IntArray
    column: IntArray
    total_row: IntArray
    total_column: IntArray
    alpha: Vector
    alpha_total: Vector
    group: IntArray
    values: IntArray
    constant: float
    log_factor: float
    owner: IntArray
    cell_alpha: Vector
    total_alpha: Vector
    draws: tuple[str, ...]
    hidden: Mapping[str, int]
    layouts: tuple[TableLayout, ...]
    constant_layouts: tuple[tuple[TableLayout, Vector], ...]
    labels: Mapping[str, NDArray[Any]]

    @property
    def total(self) -> int:
        """Number of tokens T."""
        return int(self.values.sum())

    def tables(self, mean_counts: ArrayLike) -> dict[str, xr.DataArray]:
        r"""Return the posterior mean of every table, by the first variable that draws from it.

        .. math:: \mathrm{E}[\theta_n(i_n \mid i_{pa(n)})] =
            (\alpha + \mathrm{E}\,C) / (\alpha_+ + \mathrm{E}\,D)

        With posterior mean counts this is the posterior mean wherever D does not vary, and
        close to it elsewhere. Axes are the parents, then the variable, under the data's
        names and labels. If a table has more than 10^6 cells, all of them hold only what the
        data reach, as their attribute ``cells`` says ("all" or "occupied"): along an axis of
        the data the indices that occur, which are then its coordinate; where a table has two
        or more axes of the data, along one dim ``cell_<table>`` their combinations that
        occur, with the coordinates ``<axis>_of_cell_<table>``. All tables together fit into
        one Dataset.

        Parameters
        ----------
        mean_counts : array (cells,)
            Flat counts, usually their posterior mean.
        """
        edges = np.cumsum([layout.cells for layout in self.layouts])[:-1]
        parts = np.split(np.asarray(mean_counts, np.float64), edges)
        counted = [*zip(self.layouts, parts, strict=True), *self.constant_layouts]
        if all(math.prod(layout.sizes) <= LARGEST_TABLE for layout, _ in counted):
            return {layout.draws[0]: _full_table(layout, C, self.labels) for layout, C in counted}
        indices: dict[str, IntArray] = {}
        for layout, _ in counted:
            if len(layout.slow) == 1:
                indices.setdefault(layout.dims[layout.slow[0]], layout.occupied[0])
        return {
            layout.draws[0]: _occupied_cells(layout, C, self.labels, indices)
            for layout, C in counted
        }


def compile_model(model: AllocationModel, counts: Counts) -> CompiledModel:
    """Lay out the tables that the counts reach.

    Raises
    ------
    ModelError
        If the model does not fit the counts' shape.
    """
    layouts: list[TableLayout] = []
    constants, owners, drawn = [], [], []
    cells = totals = 0
    for group in model.groups:
        layout, draws = lay_out(model, group, counts)
        if not layout.fast:
            places = np.concatenate([row for row, *_ in draws])
            table = np.bincount(places, np.tile(counts.values, len(draws)), layout.cells)
            constants.append((layout, table.astype(np.float64)))
            continue
        for name, (row, column, total_row, total_column) in zip(group, draws, strict=True):
            shifted = row + cells, column, total_row + totals, total_column
            drawn.append((name, *shifted, len(layouts)))
        owners.append(layout.owner + totals)
        layouts.append(layout)
        cells, totals = cells + layout.cells, totals + layout.totals
    drawn.sort(key=lambda draw: model.network.order.index(draw[0]))
    names, rows, columns, total_rows, total_columns, numbers = zip(*drawn, strict=True)
    alpha = np.array([layout.alpha for layout in layouts])
    alpha_total = np.array([layout.alpha_total for layout in layouts])
    return CompiledModel(
        states=model.n_hidden_states,
        cells=cells,
        totals=totals,
        row=np.stack(rows, 1),
        column=np.stack(columns),
        total_row=np.stack(total_rows, 1),
        total_column=np.stack(total_columns),
        alpha=alpha[list(numbers)],
        alpha_total=alpha_total[list(numbers)],
        group=np.array(numbers, np.int64),
        values=counts.values,
        constant=math.fsum(layout.log_f(table) for layout, table in constants),
        log_factor=log_factor(model, counts),
        owner=np.concatenate(owners),
        cell_alpha=np.repeat(alpha, [layout.cells for layout in layouts]),
        total_alpha=np.repeat(alpha_total, [layout.totals for layout in layouts]),
        draws=names,
        hidden=model.hidden,
        layouts=tuple(layouts),
        constant_layouts=tuple(constants),
        labels=counts.labels,
    )


def log_factor(model: AllocationModel, counts: Counts) -> float:
    r"""Return log NB(T) + log T! - Σ log X!, in nats, which does not depend on the graph.

    .. math:: \ln\frac{\Gamma(a+T)}{\Gamma(a)} + a\ln\frac{b}{b+1} - T\ln(b+1)
        - \sum \ln X(i_V)!
    """
    a, b, total = model.total_shape, model.rate, counts.total
    result = math.lgamma(a + total) - math.lgamma(a) - a * math.log1p(1.0 / b)
    return float(result - total * math.log1p(b) - gammaln(counts.values + 1.0).sum())


def lay_out(
    model: AllocationModel, group: tuple[str, ...], counts: Counts
) -> tuple[TableLayout, list[Draw]]:
    """Lay out the table of some variables, and the place of each one's draws in it."""
    sizes, network = model.sizes(counts.shape), model.network
    families = [network.family(name) for name in group]
    first = families[0]
    hidden = {axis for family in families for axis, v in enumerate(family) if v in model.hidden}
    fast = sorted(hidden)
    if len(group) == 1:
        fast.sort(key=lambda axis: network.order.index(first[axis]))
    slow = tuple(axis for axis in range(len(first)) if axis not in hidden)
    observed = dict(zip(model.dims, counts.indices.T, strict=True))
    reached = [
        stacked((observed[family[axis]] for axis in slow), len(counts.values))
        for family in families
    ]
    occupied, place = distinct(np.concatenate(reached, axis=1))
    parents = slow[:-1] if slow and slow[-1] == len(first) - 1 else slow
    _, parent = distinct(occupied[: len(parents)])
    names = dict(zip(model.dims, counts.dims, strict=True))
    layout = TableLayout(
        group,
        tuple(names.get(name, name) for name in first),
        tuple(sizes[name] for name in first),
        slow,
        tuple(fast),
        occupied,
        parent,
        model.pseudo_counts(counts.shape)[group[0]],
    )
    places = np.split(place, len(group))
    return layout, [
        _draw(layout, family, each, model, observed)
        for family, each in zip(families, places, strict=True)
    ]


def _draw(
    layout: TableLayout,
    family: tuple[str, ...],
    place: IntArray,
    model: AllocationModel,
    observed: dict[str, IntArray],
) -> Draw:
    """Return places along the fast axes, where an observed variable is one if tied to a hidden one.

    The last axis is the fastest one if it is fast: without it they are places of totals.
    """
    states = np.unravel_index(np.arange(model.n_hidden_states), tuple(model.hidden.values()))
    state = dict(zip(model.hidden, states, strict=True))
    within, column = np.zeros_like(place), np.zeros(model.n_hidden_states, np.int64)
    for axis in layout.fast:
        name, size = family[axis], layout.sizes[axis]
        within = within * size + observed.get(name, 0)
        column = column * size + state.get(name, 0)
    width, last = math.prod(layout.fast_sizes), layout.last_width
    total_row = layout.parent[place] * (width // last) + within // last
    return place * width + within, column, total_row, column // last


def rising(alpha: ArrayLike, counts: NDArray[Any]) -> Vector:
    """Return log Γ(α + C) - log Γ(α); most counts are 0 and cost nothing."""
    out = np.zeros(counts.shape)
    positive = counts != 0
    alphas = np.broadcast_to(np.asarray(alpha, np.float64), counts.shape)[positive]
    out[positive] = gammaln(alphas + counts[positive]) - gammaln(alphas)
    return out


def _full_table(layout: TableLayout, counts: Vector, labels: Labels) -> xr.DataArray:
    """Return every cell of a table."""
    axes = (*layout.slow, *layout.fast)
    C = np.zeros([layout.sizes[axis] for axis in axes])
    C[tuple(layout.occupied)] = counts.reshape(-1, *layout.fast_sizes)
    last = axes.index(len(layout.sizes) - 1)
    mean = (layout.alpha + C) / (layout.alpha_total + C.sum(axis=last, keepdims=True))
    dims = [layout.dims[axis] for axis in axes]
    coords = {dim: labels[dim] for dim in dims if dim in labels}
    return _finished(layout, xr.DataArray(mean, coords, dims), "all")


def _occupied_cells(
    layout: TableLayout,
    counts: Vector,
    labels: Labels,
    indices: Mapping[str, IntArray],
) -> xr.DataArray:
    """Return the cells that data reach; ``indices`` are those that other tables' dims have."""
    totals = np.bincount(layout.owner, counts, layout.totals)[layout.owner]
    mean = (layout.alpha + counts) / (layout.alpha_total + totals)
    dims = [layout.dims[axis] for axis in layout.fast]
    if not layout.slow:
        return _finished(layout, xr.DataArray(mean.reshape(layout.fast_sizes), dims=dims), "all")
    slow = [layout.dims[axis] for axis in layout.slow]
    alone = len(slow) == 1 and np.array_equal(layout.occupied[0], indices[slow[0]])
    name = slow[0] if alone else f"cell_{layout.draws[0]}"
    coords = {
        (dim if alone else f"{dim}_of_{name}"): (name, labels[dim][each] if dim in labels else each)
        for dim, each in zip(slow, layout.occupied, strict=True)
    }
    shaped = mean.reshape(-1, *layout.fast_sizes)
    return _finished(layout, xr.DataArray(shaped, coords, [name, *dims]), "occupied")


def _finished(layout: TableLayout, table: xr.DataArray, cells: str) -> xr.DataArray:
    """Give a table its name and attributes, and order its axes: parents, then the variable."""
    table.attrs.update(cells=cells, drawn_by=", ".join(layout.draws), pseudo_count=layout.alpha)
    table.name = layout.draws[0]
    last = [dim for dim in layout.dims if dim in table.dims]
    return table.transpose(*[dim for dim in table.dims if dim not in last], *last)


class AllocationMethod(EvidenceMethod):
    """Method for the evidence of an `AllocationModel`."""

    suits = ("counts",)

    def read(self, V: Any, model: Any, options: ReadOptions = ANYTHING) -> tuple[Any, str]:
        """Read counts."""
        counts = as_counts(V, model, options)
        return counts, f"{counts.total} tokens in {len(counts.values)} cells"

    def _trace(self, compiled: CompiledModel, mean_counts: Vector, columns: Columns) -> xr.Dataset:
        """Return the tables and the method's columns, under names that do not clash."""
        data = named_tables(compiled, mean_counts, "table")
        names = free_names(data, [name for dims, _ in columns.values() for name in dims])
        renamed = {
            name: (tuple(names[dim] for dim in dims), values)
            for name, (dims, values) in columns.items()
        }
        this: Any = self
        settings = {n: "none" if value is None else value for n, value in asdict(this).items()}
        return data.assign(renamed).assign_attrs(
            method=self.name, tokens=compiled.total, unit="nats", **settings
        )


def free_names(tables: xr.Dataset, names: Iterable[str]) -> dict[str, str]:
    """Map names of dimensions to names that the tables do not have already."""
    used = {*map(str, tables.dims), *map(str, tables.coords)}
    return {name: free_name(name, used) for name in names}


def named_tables(compiled: CompiledModel, mean_counts: ArrayLike, prefix: str) -> xr.Dataset:
    """Return posterior mean tables under names that begin with a prefix."""
    tables = compiled.tables(mean_counts)
    return xr.Dataset({f"{prefix}_{name}": table for name, table in tables.items()})
