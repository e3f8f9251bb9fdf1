"""Stacked dimensions of results: their MultiIndex, and maps with the dimensions apart again.

In a store the levels of a stack are coordinates along it, and an attribute of the root holds all
labels of each, those of places that were left out among them. Trees have a MultiIndex of these.
"""

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from daskfactor.data.known import Stack
from daskfactor.results.schema import tree_of

STACKS: Final = "stacks"
"""Attribute of a tree: stacked dimensions by the user's names, as JSON."""

map_blocks: Final[Any] = da.map_blocks
concatenate: Final[Any] = da.concatenate
full: Final[Any] = da.full


def stacks_of(attrs: Mapping[Any, Any]) -> dict[str, Stack]:
    """Stacked dimensions by the user's names."""
    stored = json.loads(attrs.get(STACKS, "{}"))
    return {dim: Stack.from_dict(one) for dim, one in stored.items()}


def indexed(tree: xr.DataTree) -> xr.DataTree:
    """A tree whose stacked dimensions have a MultiIndex."""
    stacks = stacks_of(tree.attrs)
    if not stacks:
        return tree
    groups = {name: with_index(node.to_dataset(), stacks) for name, node in tree.children.items()}
    return tree_of(groups, tree.attrs)


def with_index(group: xr.Dataset, stacks: Mapping[str, Stack]) -> xr.Dataset:
    """A group whose stacked dimensions have a MultiIndex."""
    for dim in list(group.dims):
        stack = stacks.get(str(dim))
        along = {name for name, coord in group.coords.items() if coord.dims == (dim,)}
        if stack is None or dim in group.indexes or not set(stack.levels) <= along:
            continue
        levels = list(stack.levels)
        about = {name: group[name].attrs for name in levels}
        indexes = [pd.Index(labels) for labels in stack.levels.values()]
        codes = [
            index.get_indexer(pd.Index(group[name].values))
            for index, name in zip(indexes, levels, strict=True)
        ]
        if min(int(own.min(initial=0)) for own in codes) < 0:
            continue  # labels that were changed are nothing of the stack
        whole = pd.MultiIndex(indexes, codes, names=levels, verify_integrity=False)
        coords = xr.Coordinates.from_pandas_multiindex(whole, dim)
        group = group.drop_vars(levels).assign_coords(coords)
        # xarray's unstack() cannot fill zarr's texts with NaN.
        texts = [n for n, of in group.coords.items() if of.dims == (dim,) and of.dtype.kind == "T"]
        plain_texts = {n: group[n].copy(data=np.asarray(group[n]).astype(object)) for n in texts}
        group = group.assign_coords(plain_texts)
        for name, attrs in about.items():
            group[name].attrs.update(attrs)
    return group


def plain(tree: xr.DataTree) -> xr.DataTree:
    """A tree whose stacked dimensions have no index, but their levels as coordinates."""
    groups = {name: node.to_dataset() for name, node in tree.children.items()}
    stacked = {name: _stacked(group) for name, group in groups.items()}
    if not any(stacked.values()):
        return tree
    flat = {name: group.reset_index(stacked[name]) for name, group in groups.items()}
    return tree_of(flat, tree.attrs)


def _stacked(values: Any) -> list[Any]:
    """Dimensions that have a MultiIndex."""
    return [dim for dim in values.dims if isinstance(values.indexes.get(dim), pd.MultiIndex)]


def unstacked(values: xr.Dataset, dim: Any = None) -> xr.Dataset:
    """Put the levels of a MultiIndex in place of its dimension, with all labels of each.

    Values are NaN at places that the stack does not have; what is lazy stays so, and a part of
    the result takes a part of the stack.

    Parameters
    ----------
    values
        With coordinates.
    dim
        A dimension with a MultiIndex; all of them if left out.
    """
    for one in _stacked(values) if dim is None else [dim]:
        index: Any = values.indexes[one]
        sizes = tuple(len(level) for level in index.levels)
        at: Any = np.ravel_multi_index(tuple(map(np.asarray, index.codes)), sizes)
        order = np.argsort(at, kind="stable")
        if (np.diff(order) < 0).any():
            values, at = values.isel({one: order}), at[order]
        others = [
            n for n, of in values.coords.items() if one in of.dims and n not in (one, *index.names)
        ]
        levels = {
            name: ((name,), level.to_numpy(), values[name].attrs)
            for name, level in zip(index.names, index.levels, strict=True)
        }
        flat = values.drop_vars([one, *index.names])
        spread = {
            name: _spread(flat[name].variable, one, levels, at)
            for name in flat.variables
            if one in flat[name].dims
        }
        kept = flat.drop_vars(list(spread))
        data = {name: of for name, of in spread.items() if name not in others}
        values = kept.assign(data).assign_coords({n: spread[n] for n in others} | levels)[
            list(flat.data_vars)
        ]
    return values


def _spread(
    variable: xr.Variable, dim: Any, levels: Mapping[Any, Any], at: NDArray[np.int64]
) -> xr.Variable:
    """A variable on the grid of the levels, of which it has the places ``at``, rising."""
    shape = tuple(len(labels) for _, labels, _ in levels.values())
    axis = variable.dims.index(dim)
    dims = (*variable.dims[:axis], *levels, *variable.dims[axis + 1 :])
    data = variable.data
    dtype, fill = xr.core.dtypes.maybe_promote(data.dtype)
    if len(at) == math.prod(shape):
        dtype = data.dtype
    if not isinstance(data, da.Array):
        values = on_grid(np.asarray(data), axis=axis, at=at, shape=shape, kind=dtype, fill=fill)
        return xr.Variable(dims, values, variable.attrs)
    inner = math.prod(shape[1:])
    count = min(shape[0], data.numblocks[axis])
    lines = np.linspace(0, shape[0], count + 1).astype(int)
    parts = []
    for first, last in pairwise(lines.tolist()):
        low, high = np.searchsorted(at, (first * inner, last * inner))
        grid = (last - first, *shape[1:])
        part = data[(slice(None),) * axis + (slice(int(low), int(high)),)].rechunk({axis: -1})
        chunks = (*part.chunks[:axis], *((size,) for size in grid), *part.chunks[axis + 1 :])
        if low == high:
            parts.append(full([sum(own) for own in chunks], fill, dtype=dtype, chunks=chunks))
            continue
        parts.append(
            map_blocks(
                on_grid,
                part,
                axis=axis,
                at=at[low:high] - first * inner,
                shape=grid,
                kind=dtype,
                fill=fill,
                drop_axis=axis,
                new_axis=list(range(axis, axis + len(grid))),
                chunks=chunks,
                meta=np.empty((0,) * len(chunks), dtype),
            )
        )
    return xr.Variable(dims, concatenate(parts, axis=axis), variable.attrs)


def on_grid(
    values: NDArray[Any],
    *,
    axis: int,
    at: NDArray[np.int64],
    shape: tuple[int, ...],
    kind: Any,
    fill: Any,
) -> NDArray[Any]:
    """Values along an axis at their places on a grid of this shape; ``fill`` elsewhere."""
    before, after = values.shape[:axis], values.shape[axis + 1 :]
    found = np.full((*before, math.prod(shape), *after), fill, kind)
    found[(slice(None),) * axis + (at,)] = values
    return found.reshape(*before, *shape, *after)
