"""Posterior mean tables of an allocation model as labelled arrays."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.allocation.layout import Layout

LARGEST_TABLE = 1_000_000
"""Cells of a table that is given whole."""

Labels = Mapping[str, NDArray[Any]]
Counted = tuple[Layout, NDArray[np.float64]]


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


def _whole(layout: Layout, counts: NDArray[np.float64], labels: Labels) -> xr.DataArray:
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
    layout: Layout,
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


def _finished(layout: Layout, table: xr.DataArray, cells: str) -> xr.DataArray:
    """Axes in their order: parents, then the variable."""
    table.attrs.update(cells=cells, drawn_by=", ".join(layout.draws), pseudo_count=layout.alpha)
    table.name = layout.draws[0]
    known = [dim for dim in layout.dims if dim in table.dims]
    return table.transpose(*[dim for dim in table.dims if dim not in known], *known)
