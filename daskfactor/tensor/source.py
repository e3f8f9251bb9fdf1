"""Tensors: the observed entries of arrays with three or more axes, on a grid of blocks.

Every axis is cut into B bands, and a block is the intersection of one band per axis, compressed by
the first axis, with coordinates along all others. A dense array is stored by its observed entries,
too, because work and memory are proportional to these.

Results hold two factors, W of the first axis and H of all other axes, one after another. Everything
here with a number for each row or column has this form, too: counts, labels, orders.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData, filled
from daskfactor.data.entries import Entries, entries_of
from daskfactor.data.grid import Bands, Grid, balanced_order, choose_grid, inverse
from daskfactor.data.labels import RESERVED, SIDES, JointLabels, Labels, stacked_labels
from daskfactor.data.loading import Decoder
from daskfactor.data.sources import checked_options
from daskfactor.data.statistics import (
    DataInfo,
    Layout,
    SourceInfo,
    StatisticsBuilder,
    check_dtype,
)
from daskfactor.data.storage import Storage
from daskfactor.errors import DataError, OptionError
from daskfactor.kernels.views import TensorBlock, index_type, pointer_type
from daskfactor.machine import memory_budget
from daskfactor.random import MAX_FACTORS

Index = NDArray[np.int64]
UNEVEN = 1.5
"""Largest block over the mean, above which indices are permuted to balance blocks."""


class TensorData(BlockedData):
    """Tensor on its blocks.

    Attributes
    ----------
    names
        Names of the axes.
    labels_of
        Labels of the axes that have any, by name.
    """

    names: tuple[str, ...] = ()
    labels_of: Mapping[str, NDArray[Any]] = {}

    @cached_property
    def placed(self) -> dict[str, Any]:
        """Return the position of each factor and its bands, as results keep them."""
        axes, starts = self.grid.sides, (0, *self.grid.starts)
        return {
            "relations": [],
            "offsets": [list(side.offsets) for side in axes],
            "factors": {
                name: {
                    "side": min(n, 1),
                    "span": [starts[n] if n else 0, (starts[n] if n else 0) + side.size],
                    **_label_dict(self.labels_of.get(name)),
                }
                for n, (name, side) in enumerate(zip(self.names, axes, strict=True))
            },
        }

    def missing_cells(self) -> Any:
        """Refuse to list missing cells, of which a tensor usually has too many."""
        raise OptionError(
            "missing cells of a tensor are named by their places, for example "
            "monitor=(i, j, k), one array for each axis"
        )

    def describe(self) -> str:
        """Return one line for logs: shape, stored entries, grid, type and place."""
        sizes = " x ".join(map(str, self.grid.sizes))
        stored = int(self.n_stored.sum())
        return (
            f"{sizes} tensor, {stored} entries stored (others {self.unstored}), "
            f"{self.grid.blocks} bands along each axis, {self.dtype} {self.place}"
        )


def as_tensor(
    V: Any,
    blocks: int | Grid | None = None,
    *,
    dtype: Any = "float32",
    memory_limit: int | str | None = None,
    allow_empty: bool = False,
    unstored: str | None = None,
    names: Sequence[str] | None = None,
    **others: Any,
) -> BlockedData:
    """Put a tensor on a grid of blocks, for a :class:`CP` model.

    Parameters
    ----------
    V
        NumPy array of three or more axes (NaN = missing), masked array, pydata/sparse array,
        dask array of either, zarr array or the path of one or of a ``.npy`` file,
        xarray.DataArray of any of these, or what this function returned.
    blocks
        Bands along every axis, by default 2 to 16 by the number of entries.
    dtype, memory_limit, allow_empty
        As for `as_blocks`.
    unstored
        Meaning of entries that a sparse array does not store: ``"zero"`` (the default) or
        ``"missing"``.
    names
        Names of the axes, in place of those of the array.
    **others
        Other options of `as_blocks`: they are refused unless they are None or False.

    Returns
    -------
    BlockedData
        The blocks, in units of V.

    Raises
    ------
    DataError, OptionError, StoreError
        If data or options cannot be used.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(2.0, (8, 6, 5))
    >>> data = dfac.as_tensor(V, blocks=2, names=("user", "item", "week"))
    >>> [side.size for side in data.grid.sides]
    [8, 6, 5]
    """
    for name, value in others.items():
        if value is not None and value is not False:
            raise OptionError(f"{name} cannot be given for a tensor; leave it out")
    kind = checked_options(dtype, unstored)
    if isinstance(V, BlockedData):
        if not isinstance(V, TensorData):
            raise DataError("these are blocks of a matrix; a CP model takes three or more axes")
        return V
    entries = _check_tensor(entries_of(V, unstored), names)
    labels = _labels(entries)
    decoder = Decoder(kind, labels)
    entries = entries._replace(values=decoder.convert(entries.values, entries.cell))
    decoder.warn()
    grid = choose_grid(entries.shape, None, blocks, None, entries.values.size)
    orders = _orders(entries, grid)
    positions = [inverse(order) for order in orders] if orders else None
    layout = Layout(entries.unstored, *_stacked_orders(orders, grid))
    size = entries.values.size * (kind.itemsize + 4 * (len(grid.sides) - 1))
    storage = Storage(grid, entries.unstored, nbytes=size, budget=memory_budget(memory_limit))

    def fill() -> DataInfo:
        builder = StatisticsBuilder(grid, labels, layout)
        builder.scan_all(_cut(entries, grid, positions), storage.put)
        return builder.finish(SourceInfo("tensor"), kind, allow_empty)

    data = filled(storage, fill, make=TensorData)
    data.names, data.labels_of = entries.names, entries.labels
    return data


def _check_tensor(entries: Entries, names: Sequence[str] | None) -> Entries:
    """Refuse anything but a tensor of finite numbers; drop entries that are marked missing."""
    shape = tuple(int(size) for size in entries.shape)
    if len(shape) < 3:
        raise DataError(
            f"the data have {len(shape)} axes, shape {shape}, and a CP model takes three or more; "
            "use TweedieNMF for a matrix"
        )
    if len(shape) > MAX_FACTORS:
        raise DataError(
            f"the data have {len(shape)} axes, and a CP model takes at most {MAX_FACTORS}; stack "
            "some of the axes into one"
        )
    if not all(shape):
        raise DataError(f"the data are empty, shape {' x '.join(map(str, shape))}")
    check_dtype(entries.values.dtype)
    if names is not None and len(names) != len(shape):
        raise OptionError(
            f"the model names {len(names)} factors ({', '.join(names)}), and the data have "
            f"{len(shape)} axes; name one for each"
        )
    axis_names = tuple(names or entries.names)
    if len(set(axis_names)) < len(axis_names) or (
        bad := [n for n in axis_names if n in (*RESERVED, SIDES[1])]
    ):
        bad_names = bad[0] if len(set(axis_names)) == len(axis_names) else axis_names
        raise OptionError(
            f"axes need different names that results do not reserve, got {bad_names!r}; pass "
            "CP(..., factors=(...))"
        )
    old_labels = entries.labels
    labels = {
        n: old_labels[o] for n, o in zip(axis_names, entries.names, strict=True) if o in old_labels
    }
    values = entries.values
    if values.dtype.kind == "f" and entries.unstored == "missing":
        seen = ~np.isnan(values)
        if not seen.all():
            places = [place[seen] for place in entries.places]
            entries = entries._replace(places=places, values=values[seen])
    return entries._replace(shape=shape, names=axis_names, labels=labels)


def _orders(entries: Entries, grid: Grid) -> list[Index] | None:
    """Return balanced orders of the axes if block sizes differ much, else None."""
    if entries.unstored == "missing" and entries.values.size == math.prod(entries.shape):
        return None
    counts = np.bincount(_codes(entries, grid, None), minlength=grid.blocks ** len(grid.sides))
    if counts.max() <= UNEVEN * max(counts.mean(), 1.0):
        return None
    orders = []
    for n, (place, bands) in enumerate(zip(entries.places, grid.sides, strict=True)):
        each = np.bincount(place, minlength=bands.size)
        orders.append(balanced_order(each, bands, turning=n > 0))
    return orders


def _stacked_orders(orders: list[Index] | None, grid: Grid) -> tuple[Any, Any]:
    """Return the caller's row, and column, at each position of the grid."""
    if orders is None:
        return None, None
    starts = grid.starts
    return orders[0], np.concatenate([order + starts[n] for n, order in enumerate(orders[1:])])


def _codes(entries: Entries, grid: Grid, positions: list[Index] | None) -> NDArray[Any]:
    """Return the number of the block of every entry, in row-major order."""
    many = grid.blocks ** len(grid.sides)
    code: Any = np.zeros(entries.values.size, np.uint16 if many <= 2**16 else np.int64)
    for n, (place, bands) in enumerate(zip(entries.places, grid.sides, strict=True)):
        band = np.repeat(np.arange(len(bands)), bands.sizes).astype(code.dtype)
        band = band if positions is None else band[positions[n]]
        code *= code.dtype.type(grid.blocks)
        code += band[place]
    return np.asarray(code)


def _cut(
    entries: Entries, grid: Grid, positions: list[Index] | None
) -> Iterator[tuple[tuple[int, ...], TensorBlock]]:
    """Yield the blocks, each with its entries in row-major order."""
    codes = _codes(entries, grid, positions)
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=grid.blocks ** len(grid.sides)))
    del codes
    for block, low, high in zip(grid.all_blocks(), [0, *ends], ends, strict=False):
        which, local = order[low:high], []
        for n, (place, bands) in enumerate(zip(entries.places, grid.sides, strict=True)):
            position = place[which] if positions is None else positions[n][place[which]]
            local.append(position - bands.offsets[block[n]])
        yield block, _block(entries, grid.block_shape(block), which, local)


def _block(
    entries: Entries, shape: tuple[int, ...], which: Index, local: list[Index]
) -> TensorBlock:
    inside = np.lexsort(local[::-1]) if math.prod(shape) >= 2**62 else None
    if inside is None:
        key = np.ravel_multi_index(local, shape) if which.size else np.empty(0, np.int64)
        inside = np.argsort(key, kind="stable")
        twice = np.flatnonzero(np.diff(key[inside]) == 0)
        if twice.size:
            raise DataError(
                f"the cell {entries.cell(which[inside[twice[0]]])} is stored more than once; add "
                "up what belongs to one cell before, as sparse.COO(coords, data, shape) does"
            )
    rows = local[0][inside]
    pointers = np.searchsorted(rows, np.arange(shape[0] + 1)).astype(pointer_type(which.size))
    places = tuple(
        place[inside].astype(index_type(size))
        for place, size in zip(local[1:], shape[1:], strict=True)
    )
    values = entries.values[which[inside]]
    return TensorBlock(pointers, places, values, shape, entries.unstored == "zero")


def _labels(entries: Entries) -> Labels:
    """Return the labels of the first axis, and those of all others as text, one after another."""
    first, *others = entries.names
    rows = {first: entries.labels[first]} if first in entries.labels else {}
    factors = [
        (name, length, entries.labels.get(name))
        for name, length in zip(others, entries.shape[1:], strict=True)
    ]
    columns = stacked_labels(SIDES[1], factors)
    return JointLabels(first, SIDES[1], rows, columns)


def _label_dict(labels: NDArray[Any] | None) -> dict[str, Any]:
    """Return the labels of an axis as a JSON-compatible dict: dtype, and text."""
    if labels is None:
        return {"labels": None}
    return {"labels": labels.dtype.str, "values": labels.astype(str).tolist()}


def grid_of(offsets: Sequence[Sequence[int]]) -> Grid:
    """Return the grid for offsets along each axis, as results keep them."""
    return Grid(*(Bands(tuple(edges)) for edges in offsets))
