"""A model and its counts compiled to flat arrays: what every method of inference works on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaln

from daskfactor.allocation.counts import Counts
from daskfactor.allocation.layout import TableLayout, lay_out, mean_tables
from daskfactor.models.allocation import AllocationModel


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
    layouts, settled
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
    row: NDArray[np.int64]
    column: NDArray[np.int64]
    total_row: NDArray[np.int64]
    total_column: NDArray[np.int64]
    alpha: NDArray[np.float64]
    alpha_total: NDArray[np.float64]
    group: NDArray[np.int64]
    values: NDArray[np.int64]
    constant: float
    log_factor: float
    owner: NDArray[np.int64]
    cell_alpha: NDArray[np.float64]
    total_alpha: NDArray[np.float64]
    draws: tuple[str, ...]
    hidden: Mapping[str, int]
    layouts: tuple[TableLayout, ...]
    settled: tuple[tuple[TableLayout, NDArray[np.float64]], ...]
    labels: Mapping[str, NDArray[Any]]

    @property
    def total(self) -> int:
        """Number of tokens T."""
        return int(self.values.sum())

    def log_f(self, counts: ArrayLike) -> NDArray[np.float64]:
        r"""Log-probability of one labelled sequence of tokens, by flat counts (..., cells).

        .. math:: \ln f(C) = \sum_{\mathrm{urns}} \ln B(\alpha + C) - \ln B(\alpha)

        over the tables with hidden variables; in nats, one number for each array of counts.
        """
        C = np.asarray(counts, np.float64)
        result = np.zeros(C.shape[:-1])
        for layout, own in zip(self.layouts, self._parts(C), strict=True):
            result += layout.log_f(own)
        return result

    def tables(self, mean_counts: ArrayLike) -> dict[str, xr.DataArray]:
        r"""Posterior mean of every table, by the first variable that draws from it.

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
        C = np.asarray(mean_counts, np.float64)
        parts = zip(self.layouts, self._parts(C), strict=True)
        return mean_tables([*parts, *self.settled], self.labels)

    def _parts(self, counts: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        edges = np.cumsum([layout.cells for layout in self.layouts])[:-1]
        return np.split(counts, edges, axis=-1)


def compile_model(model: AllocationModel, counts: Counts) -> CompiledModel:
    """Lay out the tables that the counts reach.

    Raises
    ------
    ModelError
        If the model does not fit the counts' shape.
    """
    order = model.network.order
    laid = [(*lay_out(model, group, counts), group) for group in model.groups]
    layouts = [layout for layout, _, _ in laid if layout.fast]
    cells = np.cumsum([0, *(layout.cells for layout in layouts)])
    totals = np.cumsum([0, *(layout.totals for layout in layouts)])
    settled = []
    found = {}
    for layout, draws, group in laid:
        if not layout.fast:
            where = np.concatenate([draw.row for draw in draws])
            weights = np.tile(counts.values, len(draws))
            own = np.bincount(where, weights, layout.cells).astype(np.float64)
            settled.append((layout, own))
            continue
        number = layouts.index(layout)
        for draw, name in zip(draws, group, strict=True):
            found[name] = (number, draw)
    names = tuple(name for name in order if name in found)
    numbers = np.array([found[name][0] for name in names], np.int64)
    drawn = [found[name][1] for name in names]
    return CompiledModel(
        states=model.n_hidden_states,
        cells=int(cells[-1]),
        totals=int(totals[-1]),
        row=np.stack([draw.row for draw in drawn], 1) + cells[numbers],
        column=np.stack([draw.column for draw in drawn]),
        total_row=np.stack([draw.total_row for draw in drawn], 1) + totals[numbers],
        total_column=np.stack([draw.total_column for draw in drawn]),
        alpha=np.array([layouts[number].alpha for number in numbers]),
        alpha_total=np.array([layouts[number].alpha_total for number in numbers]),
        group=numbers,
        values=counts.values,
        constant=math.fsum(float(layout.log_f(own)) for layout, own in settled),
        log_factor=log_factor(model, counts),
        owner=np.concatenate(
            [layout.owner + start for layout, start in zip(layouts, totals, strict=False)]
        ),
        cell_alpha=np.repeat([layout.alpha for layout in layouts], np.diff(cells)),
        total_alpha=np.repeat([layout.alpha_total for layout in layouts], np.diff(totals)),
        draws=names,
        hidden=model.hidden,
        layouts=tuple(layouts),
        settled=tuple(settled),
        labels=counts.labels,
    )


def log_factor(model: AllocationModel, counts: Counts) -> float:
    r"""Log NB(T) + log T! - Σ log X!, in nats: what does not depend on the graph.

    .. math:: \ln\frac{\Gamma(a+T)}{\Gamma(a)} + a\ln\frac{b}{b+1} - T\ln(b+1)
        - \sum \ln X(i_V)!
    """
    a, b, total = model.total_shape, model.rate, counts.total
    result = math.lgamma(a + total) - math.lgamma(a) - a * math.log1p(1.0 / b)
    return float(result - total * math.log1p(b) - gammaln(counts.values + 1.0).sum())
