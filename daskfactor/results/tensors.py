"""Results of a tensor, cell by cell: its first unfolding at those fibres that are asked for.

A tensor of means is a matrix W H of its first axis against all others, with
H = F_1 * ... * F_(N-1) row by row (the Khatri-Rao product). Results keep the factors of H; what
is predicted needs H only where cells are asked for, and is then that of a matrix.

Source: Kolda and Bader 2009, section 2.6 and equation 3.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import cells_of_tensor
from daskfactor.errors import OptionError
from daskfactor.results.schema import factor_dims

MOST_CELLS = 2**24
FIBRE = "fibre"
"""Dimension of the fibres that cells are on."""
CHUNK_BYTES = 2**26


class Axes(NamedTuple):
    """The axes of a tensor: names, lengths, and the first column of each in H."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, attrs: Mapping[Any, Any]) -> "Axes | None":
        """Read them from what results say of their data; None of a matrix."""
        placed = json.loads(str(attrs.get("data", "{}"))).get("placed", {})
        if "offsets" not in placed:
            return None
        names, spans = zip(*((n, own["span"]) for n, own in placed["factors"].items()), strict=True)
        return cls(names, tuple(b - a for a, b in spans), tuple(a for a, _ in spans))

    def fibres(self, columns: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Places along each further axis of columns of the first unfolding."""
        return np.unravel_index(columns, self.sizes[1:])


class Chosen(NamedTuple):
    """Cells of a tensor as those of a matrix of fibres.

    Attributes
    ----------
    tree
        The run, with H (chain, draw, component, fibre), lazily.
    rows, columns
        Positions along both, with the cells' places along each axis as coordinates.
    whole
        The axes, if all cells are meant.
    """

    tree: xr.DataTree
    rows: xr.DataArray
    columns: xr.DataArray
    whole: Axes | None

    def in_shape(self, found: xr.Dataset) -> xr.Dataset:
        """Give a result along cells the shape of the tensor, if all of these are meant."""
        if self.whole is None:
            return found
        names, sizes, _ = self.whole
        values = {n: (names, own.data.reshape(sizes)) for n, own in found.data_vars.items()}
        return xr.Dataset(values, attrs=found.attrs)


def chosen(tree: xr.DataTree, axes: Axes, cells: Any) -> Chosen:
    """Find cells of a tensor: a tuple of places along each axis, or a mask; None: all.

    Raises
    ------
    OptionError
        If they are none of its cells, or too many to name all.
    """
    whole = axes if cells is None else None
    if whole is not None:
        if math.prod(axes.sizes) > MOST_CELLS:
            raise OptionError(
                f"the tensor has {math.prod(axes.sizes)} cells, too many to predict all; name "
                f"some, one array of places for each of {', '.join(axes.names)}"
            )
        cells = tuple(own.ravel() for own in np.indices(axes.sizes))
    found = cells_of_tensor(cells, axes.sizes)
    if found is None:
        raise OptionError("no cells were named; pass one array of places for each axis")
    rows, columns = found
    fibres, column_at = np.unique(columns, return_inverse=True)
    at = (rows, *axes.fibres(columns))
    coords = {name: ("cell", own) for name, own in zip(axes.names, at, strict=True)}
    groups = {
        name: _unfolded(group.to_dataset(), axes, fibres) if "H" in group.data_vars else group
        for name, group in tree.children.items()
    }
    matrix = xr.DataTree.from_dict({"/": xr.Dataset(attrs=tree.attrs), **groups})
    return Chosen(
        matrix,
        xr.DataArray(rows, coords, ("cell",)),
        xr.DataArray(column_at.reshape(-1), dims="cell"),
        whole,
    )


def _unfolded(group: xr.Dataset, axes: Axes, fibres: NDArray[np.int64]) -> xr.Dataset:
    """Draws of W, and of H at some fibres."""
    row, column = factor_dims(group)
    H = group["H"].transpose("chain", "draw", "component", column).data
    if isinstance(H, np.ndarray):
        H = da.from_array(H, chunks=-1, name=False)  # type: ignore[no-untyped-call]
    product: Any = 1
    for start, own in zip(axes.starts[1:], axes.fibres(fibres), strict=True):
        product = product * H[..., start + own]
    width = max(1, CHUNK_BYTES // (math.prod(H.shape[:3]) * H.dtype.itemsize))
    dims = ("chain", "draw", "component", FIBRE)
    coords = {n: c for n, c in group.coords.items() if column not in c.dims}
    W = group["W"].transpose("chain", "draw", row, "component")
    attrs = {name: own for name, own in group.attrs.items()}
    found = xr.Dataset({"W": W, "H": (dims, product.rechunk({3: width}))}, attrs=attrs)
    return found.assign_coords(coords)
