"""Numbers of each draw that a run is judged by besides WH: densities, sizes, hyperparameters.

Those that components have come in one order of the components. All are as the run drew them,
whatever has been aligned since, so that every copy of a run is judged alike.
"""

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.results.align import as_drawn, best_order, since_drawn
from daskfactor.results.tensors import axis_factors
from daskfactor.results.trace import Law, Run
from daskfactor.results.verdict import MIN_SHARE

Array = NDArray[np.float64]

DENSITIES: Final = ("lp", "log_likelihood", "objective")
TITLES: Final = {
    "density": "log density",
    "balanced": "log density, balanced",
    "learnt": "sampled hyperparameters",
    "product": "W H",
    "scale": "size of W and of H",
    "part": "components in W, in H",
    "component": "components, as drawn",
    "aligned": "components, aligned",
}
"""Kinds of numbers, in words."""
MANY: Final = 32
"""Entries that are followed of a hyperparameter that has more."""


class Series(NamedTuple):
    """One number per draw.

    ``kind`` is ``"density"``; ``"balanced"``, a density as it would be with W and H of one
    weight; ``"learnt"``, a hyperparameter that is drawn; ``"product"``, of WH alone; ``"scale"``,
    which the priors alone hold in place; ``"component"``, one for each component in the order of
    the draws; ``"aligned"``, in one order; ``"part"``, in that order of W or of H alone.
    Of aligned ones there are the share of all draws in which they appear, of those of the chain
    that has it in the fewest, the number of chains that have it in most, and how alike it is.
    """

    name: str
    kind: str
    values: Array
    share: float = math.nan
    least_share: float = math.nan
    chains_with: float = math.nan
    agreement: float = math.nan


class Order(NamedTuple):
    """Components of all draws in one order.

    Attributes
    ----------
    names
        What they are called, (K,); biases, which come last, have no name.
    permutation
        Positions in each draw, (chain, draw, K').
    share, least_share, chains_with, agreement
        As in `Series`, (K',).
    """

    names: list[str]
    permutation: NDArray[np.int64]
    share: Array
    least_share: Array
    chains_with: Array
    agreement: Array

    def series(self, name: str, kind: str, values: Array, selection: Any = ...) -> list[Series]:
        """Follow numbers of components as drawn, (..., K), of the draws that are ``kept``."""
        moved = np.take_along_axis(values, self.permutation[selection][..., : len(self.names)], -1)
        series = [
            Series(f"{name}[{component}]", kind, moved[..., k])
            for k, component in enumerate(self.names)
        ]
        if kind not in ("component", "aligned"):
            return series
        facts = list(zip(*self[2:], strict=True))
        return [Series(*one[:3], *map(float, facts[k])) for k, one in enumerate(series)]


def component_names(group: xr.Dataset, law: Law) -> list[str]:
    """Return what components are called, biases left out."""
    return [str(label) for label in group["component"].values[: law.components].tolist()]


def order_of(aligned: Run, named: Run, alike: Array) -> Order:
    """Return the order of the components of a run.

    Parameters
    ----------
    aligned
        The run, aligned by itself.
    named
        A copy whose components have the names that are wanted; maybe aligned by something else.
    alike
        How alike each aligned component is in the halves of all chains.
    """
    alignment, law = aligned.group("alignment"), aligned.law
    permutation = alignment["permutation"].transpose("chain", "draw", "component").values
    by_chain = alignment["share_by_chain"].transpose("chain", "component").values
    shares = alignment["share"].values, np.nanmin(by_chain, axis=0)
    columns = [*shares, (by_chain >= MIN_SHARE).sum(axis=0), alike]
    if named.is_aligned:
        position, _ = since_drawn(named.group("alignment"))
        same = np.take_along_axis(np.argsort(position, axis=-1), permutation, -1)
        counts = np.zeros((alike.size, alike.size))
        np.add.at(counts, (same, np.broadcast_to(np.arange(alike.size), same.shape)), 1.0)
        place = best_order(-counts, law)
        permutation, columns = permutation[..., place], [column[place] for column in columns]
    else:
        named = aligned
    names = component_names(named.posterior, law)
    return Order(names, permutation, *columns)


def in_place(group: xr.Dataset, law: Law, alike: Array) -> Order:
    """Return the order of components that do not move."""
    width, chains = alike.size, group.sizes["chain"]
    shape = chains, group.sizes["draw"], width
    unknown, everywhere = np.full(width, math.nan), np.full(width, float(chains))
    order = np.broadcast_to(np.arange(width), shape)
    return Order(component_names(group, law), order, unknown, unknown, everywhere, alike)


def density_series(run: Run, selection: Any) -> Iterator[Series]:
    """Follow log densities and objectives."""
    for group in ("sample_stats", "log_likelihood"):
        for name, values in run.group(group).data_vars.items():
            if name in DENSITIES and set(values.dims) == {"chain", "draw"} and values.size:
                drawn = values.transpose("chain", "draw").values.astype(np.float64)
                yield Series(str(name), "density", drawn[selection])


def learnt_series(run: Run, selection: Any, order: Order | None) -> Iterator[Series]:
    """Follow hyperparameters that are drawn; of one with many entries, some.

    Those that components have are left out where there is no ``order`` of these.
    """
    for name, values in run.posterior.drop_vars(["W", "H"], errors="ignore").data_vars.items():
        if not {"chain", "draw"} <= set(values.dims) or not values.size:
            continue
        others = [dim for dim in values.dims if dim not in ("chain", "draw", "component")]
        at = {
            dim: np.unique(np.linspace(0, n - 1, MANY).astype(int))
            for dim in others
            if (n := values.sizes[dim])
        }
        each = values.isel(at).transpose("chain", "draw", *others, ...).values.astype(np.float64)
        for place in np.ndindex(each.shape[2 : 2 + len(others)]):
            drawn = each[(slice(None), slice(None), *place)]
            position = [str(at[dim][n]) for dim, n in zip(others, place, strict=True)]
            label = f"{name}[{','.join(position)}]" if position else str(name)
            if "component" not in values.dims:
                yield Series(label, "learnt", drawn[selection])
            elif order is not None:
                yield from order.series(label, "learnt", drawn[selection], selection)


def factor_sums(run: Run) -> dict[str, Array]:
    """Sum the entries of each component in each factor, (chain, draw, component)."""
    names = ("w", "h") if run.axes is None else run.axes.names
    return {
        f"{name}_sum": part.sum(dim, dtype=np.float64, skipna=False)
        .transpose("chain", "draw", "component")
        .compute(scheduler="threads")
        .values
        for name, (part, dim) in zip(names, axis_factors(run.posterior, run.axes), strict=True)
    }


def balanced_density(tree: xr.DataTree, sums: dict[str, Array] | None = None) -> Array | None:
    """Return the log density of a run (chain, draw) as it would be with W and H of one weight.

    None where there are no draws, or where the model does not tell. ``sums`` are the
    `factor_sums` of the run as drawn, if these are known.
    """
    run = Run(as_drawn(tree))
    model, sizes = run.model, run.posterior.sizes
    if model is None or model.simplex or model.rotates or model.tensor or not run.has_draws:
        return None
    if sizes["draw"] == 0:
        return None
    of_w, of_h = (totals[..., run.law.free] for totals in (sums or factor_sums(run)).values())
    row, column = run.dims
    rates = tuple(float(run.attrs.get(name, math.nan)) for name in ("rate_w", "rate_h"))
    uneven = model.scale_density(of_w, of_h, (sizes[row], sizes[column]), rates)
    lp = run.stats["lp"].transpose("chain", "draw").values
    return lp - uneven if uneven.any() and lp.shape == uneven.shape else None
