"""Series of draws that diagnostics use besides WH: densities, sizes, hyperparameters.

Series of components are in one order of the components. All describe the original draws, also if
a trace was aligned, so that every copy of a run has the same verdict.
"""

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.results.align import as_drawn, best_order, since_drawn
from daskfactor.results.tensors import axis_factors
from daskfactor.results.verdict import MIN_SHARE
from daskfactor.runs.trace import Run, Symmetries

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
"""Titles of the kinds of series."""
MANY: Final = 32
"""Largest number of entries of a hyperparameter in the summary."""


class Series(NamedTuple):
    """Series with one number per draw.

    ``kind`` is ``"density"``; ``"balanced"``, the density with W and H of equal size;
    ``"learnt"``, a sampled hyperparameter; ``"product"``, a quantity of WH; ``"scale"``, which only
    the priors determine; ``"component"``, a component in the order of the draws; ``"aligned"``, a
    component after alignment; ``"part"``, its share of W or of H.
    Aligned series have the share of all draws in which the component appears, the smallest such
    share of any chain, the number of chains in which it appears in most draws, and its agreement.
    """

    name: str
    kind: str
    values: Array
    share: float = math.nan
    least_share: float = math.nan
    chains_with: float = math.nan
    agreement: float = math.nan


class Order(NamedTuple):
    """Order of the components of all draws.

    Attributes
    ----------
    names
        Names of the components, (K,), without biases, which are last.
    permutation
        Positions of components in each draw, (chain, draw, K').
    share, least_share, chains_with, agreement
        Attributes of `Series`, (K',).
    """

    names: list[str]
    permutation: NDArray[np.int64]
    share: Array
    least_share: Array
    chains_with: Array
    agreement: Array

    def series(self, name: str, kind: str, values: Array, selection: Any = ...) -> list[Series]:
        """Return series of components from unaligned values, (..., K), of the selected draws."""
        moved = np.take_along_axis(values, self.permutation[selection][..., : len(self.names)], -1)
        series = [
            Series(f"{name}[{component}]", kind, moved[..., k])
            for k, component in enumerate(self.names)
        ]
        if kind not in ("component", "aligned"):
            return series
        facts = list(zip(*self[2:], strict=True))
        return [Series(*one[:3], *map(float, facts[k])) for k, one in enumerate(series)]


def component_names(group: xr.Dataset, symmetries: Symmetries) -> list[str]:
    """Return the names of components without biases."""
    return [str(label) for label in group["component"].values[: symmetries.components].tolist()]


def order_of(aligned: Run, named: Run, alike: Array) -> Order:
    """Return the order of the components of a run.

    Parameters
    ----------
    aligned
        Run after `align`.
    named
        Copy of the run that defines the names; it may be aligned to another reference.
    alike
        Agreement of each aligned component between the halves of all chains.
    """
    alignment, symmetries = aligned.group("alignment"), aligned.symmetries
    permutation = alignment["permutation"].transpose("chain", "draw", "component").values
    by_chain = alignment["share_by_chain"].transpose("chain", "component").values
    shares = alignment["share"].values, np.nanmin(by_chain, axis=0)
    columns = [*shares, (by_chain >= MIN_SHARE).sum(axis=0), alike]
    if named.is_aligned:
        position, _ = since_drawn(named.group("alignment"))
        same = np.take_along_axis(np.argsort(position, axis=-1), permutation, -1)
        counts = np.zeros((alike.size, alike.size))
        np.add.at(counts, (same, np.broadcast_to(np.arange(alike.size), same.shape)), 1.0)
        place = best_order(-counts, symmetries)
        permutation, columns = permutation[..., place], [column[place] for column in columns]
    else:
        named = aligned
    names = component_names(named.posterior, symmetries)
    return Order(names, permutation, *columns)


def in_place(group: xr.Dataset, symmetries: Symmetries, alike: Array) -> Order:
    """Return the order of components that cannot swap."""
    width, chains = alike.size, group.sizes["chain"]
    shape = chains, group.sizes["draw"], width
    unknown, everywhere = np.full(width, math.nan), np.full(width, float(chains))
    order = np.broadcast_to(np.arange(width), shape)
    return Order(component_names(group, symmetries), order, unknown, unknown, everywhere, alike)


def density_series(run: Run, selection: Any) -> Iterator[Series]:
    """Yield series of log densities and objectives."""
    for group in ("sample_stats", "log_likelihood"):
        for name, values in run.group(group).data_vars.items():
            if name in DENSITIES and set(values.dims) == {"chain", "draw"} and values.size:
                drawn = values.transpose("chain", "draw").values.astype(np.float64)
                yield Series(str(name), "density", drawn[selection])


def learnt_series(run: Run, selection: Any, order: Order | None) -> Iterator[Series]:
    """Yield series of sampled hyperparameters, with some entries of large ones.

    Hyperparameters of components are omitted without an ``order``.
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
    """Return sums of each component in each factor, (chain, draw, component)."""
    names = ("w", "h") if run.axes is None else run.axes.names
    return {
        f"{name}_sum": part.sum(dim, dtype=np.float64, skipna=False)
        .transpose("chain", "draw", "component")
        .compute(scheduler="threads")
        .values
        for name, (part, dim) in zip(names, axis_factors(run.posterior, run.axes), strict=True)
    }


def balanced_density(tree: xr.DataTree, sums: dict[str, Array] | None = None) -> Array | None:
    """Return the log density of a run (chain, draw), with W and H scaled to equal size.

    None without draws, or if the model does not support it. ``sums`` are `factor_sums` of the
    original draws, if available.
    """
    run = Run(as_drawn(tree))
    model, sizes = run.model, run.posterior.sizes
    if model is None or model.simplex or model.rotates or model.tensor or not run.has_draws:
        return None
    if sizes["draw"] == 0:
        return None
    of_w, of_h = (
        totals[..., run.symmetries.free] for totals in (sums or factor_sums(run)).values()
    )
    row, column = run.dims
    rates = tuple(float(run.attrs.get(name, math.nan)) for name in ("rate_w", "rate_h"))
    uneven = model.scale_density(of_w, of_h, (sizes[row], sizes[column]), rates)
    lp = run.stats["lp"].transpose("chain", "draw").values
    return lp - uneven if uneven.any() and lp.shape == uneven.shape else None
