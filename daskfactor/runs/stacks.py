"""Stacked dimensions of results: their MultiIndex, and unstacking.

In a store the levels of a stack are coordinates along it, and an attribute of the root has all
labels of each level, including those of dropped entries. Trees have a MultiIndex of these.
"""

import json
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

import numpy as np
import pandas as pd
import xarray as xr

from daskfactor.data.labels import Stack
from daskfactor.runs.schema import tree_of

STACKS: Final = "stacks"
"""Attribute of a tree: stacked dimensions by name, as JSON."""


def stacks_of(attrs: Mapping[Any, Any]) -> dict[str, Stack]:
    """Return stacked dimensions by name."""
    stored = json.loads(attrs.get(STACKS, "{}"))
    return {dim: Stack.from_dict(one) for dim, one in stored.items()}


def indexed(tree: xr.DataTree) -> xr.DataTree:
    """Return a tree with a MultiIndex for stacked dimensions."""
    stacks = stacks_of(tree.attrs)
    if not stacks:
        return tree
    groups = {name: with_index(node.to_dataset(), stacks) for name, node in tree.children.items()}
    return tree_of(groups, tree.attrs)


def with_index(group: xr.Dataset, stacks: Mapping[str, Stack]) -> xr.Dataset:
    """Return a group with a MultiIndex for stacked dimensions."""
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
        if min(int(code.min(initial=0)) for code in codes) < 0:
            continue  # changed labels are not part of the stack
        index = pd.MultiIndex(indexes, codes, names=levels, verify_integrity=False)
        coords = xr.Coordinates.from_pandas_multiindex(index, dim)
        group = group.drop_vars(levels).assign_coords(coords)
        # xarray's unstack() cannot fill zarr's string type with NaN.
        texts = [n for n, of in group.coords.items() if of.dims == (dim,) and of.dtype.kind == "T"]
        plain_texts = {n: group[n].copy(data=np.asarray(group[n]).astype(object)) for n in texts}
        group = group.assign_coords(plain_texts)
        for name, attrs in about.items():
            group[name].attrs.update(attrs)
    return group


def plain(tree: xr.DataTree) -> xr.DataTree:
    """Return a tree with the levels of stacked dimensions as coordinates, without an index."""
    groups = {name: node.to_dataset() for name, node in tree.children.items()}
    stacked = {name: _stacked(group) for name, group in groups.items()}
    if not any(stacked.values()):
        return tree
    flat = {name: group.reset_index(stacked[name]) for name, group in groups.items()}
    return tree_of(flat, tree.attrs)


def _stacked(values: Any) -> list[Any]:
    """Return dimensions with a MultiIndex."""
    return [dim for dim in values.dims if isinstance(values.indexes.get(dim), pd.MultiIndex)]


def unstacked(values: xr.Dataset, dim: Any = None) -> xr.Dataset:
    """Replace dimensions with a MultiIndex by their levels, with all labels of each.

    Values are NaN where the stack has no entry; lazy arrays stay lazy, and a part of the result
    reads a part of the stack.

    Parameters
    ----------
    values
        Dataset with coordinates.
    dim
        Dimension with a MultiIndex; all of them by default.
    """
    for one in _stacked(values) if dim is None else [dim]:
        index: Any = values.indexes[one]
        codes = np.indices([len(level) for level in index.levels]).reshape(index.nlevels, -1)
        places = pd.MultiIndex(index.levels, list(codes), names=index.names)
        template = xr.Dataset(coords=xr.Coordinates.from_pandas_multiindex(places, one))
        flat, attrs = values, {name: values[name].attrs for name in index.names}
        # Reindex first, since unstack() of a sparse MultiIndex takes two steps.
        values = flat.reindex_like(template).unstack(one)
        for name in flat.variables.keys() - {one, *index.names}:
            dims = (index.names if dim == one else [dim] for dim in flat[name].dims)
            values[name] = values[name].transpose(*chain.from_iterable(dims))
        for name, level_attrs in attrs.items():
            values[name].attrs.update(level_attrs)
    return values
