"""Tensors: arrays of three or more axes by their observed entries, on a grid of blocks.

Every axis is cut into B bands, and a block is where one of each meets: compressed by the first
axis, with the places along all others. A dense array is kept by its observed entries, too, since
work and memory go by what is observed.

Results hold two factors, W of the first axis and H of all others, one axis behind another. So
does everything here that has a number for each row or column: counts, labels, orders.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.adapters import decoded, decoder, meaning_of_fill, zarr_array
from daskfactor.data.blocks import BlockedData
from daskfactor.data.frames import is_frame
from daskfactor.data.grid import (
    STORED_ENTRY,
    WORTHWHILE_BLOCK,
    Bands,
    TensorGrid,
    balanced_order,
    checked_blocks,
    inverse,
)
from daskfactor.data.joined import SIDES, JointLabels, stacked_labels
from daskfactor.data.known import (
    RESERVED,
    Known,
    Labels,
    Layout,
    SourceInfo,
    Statistics,
    check_dtype,
    refuse_unobserved,
)
from daskfactor.data.sources import checked_options
from daskfactor.data.storage import Storage, as_bytes
from daskfactor.errors import DataError, OptionError
from daskfactor.kernels.views import TensorBlock, index_type, pointer_type
from daskfactor.machine import memory_budget
from daskfactor.random import MAX_FACTORS

Index = NDArray[np.int64]
LARGEST_BLOCK = 2**23
"""Entries of a block beyond which more bands are worth their price."""
USUAL_BANDS, MOST_BANDS = 4, 16
UNEVEN = 1.5
"""Largest block over the mean from which on indices are dealt out evenly."""
NAMES = "axis_{}"
"""Names of axes that have none."""


class Entries(NamedTuple):
    """The entries of an array that are stored: places along each axis, values, and labels."""

    shape: tuple[int, ...]
    places: list[Index]
    values: NDArray[Any]
    unstored: str
    names: tuple[str, ...]
    labels: Mapping[str, NDArray[Any]] = {}
    kind: str = "numpy"


class TensorData(BlockedData):
    """A tensor on its blocks.

    Attributes
    ----------
    names
        Of the axes.
    labels_of
        Labels of the axes that have any, by name.
    """

    names: tuple[str, ...] = ()
    labels_of: Mapping[str, NDArray[Any]] = {}

    @cached_property
    def placed(self) -> dict[str, Any]:
        """What results keep of it, as JSON can have it: where each factor is, and its bands."""
        axes, starts = self.grid.sides, (0, *self.grid.starts)  # type: ignore[attr-defined]
        return {
            "relations": [],
            "offsets": [list(side.offsets) for side in axes],
            "factors": {
                name: {
                    "side": min(n, 1),
                    "span": [starts[n] if n else 0, (starts[n] if n else 0) + side.size],
                    **_told(self.labels_of.get(name)),
                }
                for n, (name, side) in enumerate(zip(self.names, axes, strict=True))
            },
        }

    def missing_cells(self) -> Any:
        """Refuse: those of a tensor are too many as a rule."""
        raise OptionError(
            "missing cells of a tensor are named by their places, for example "
            "monitor=(i, j, k), one array for each axis"
        )

    def describe(self) -> str:
        """One line for logs: shape, what is stored, grid, type and place."""
        sizes = " x ".join(str(side.size) for side in self.grid.sides)
        stored = int(self.n_stored.sum())
        return (
            f"{sizes} tensor, {stored} entries stored (others {self.unstored}), "
            f"{self.grid.blocks} bands along each axis, {self.dtype} {self.place}"
        )


def as_tensor(
    V: Any,
    blocks: int | TensorGrid | None = None,
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
        What entries mean that a sparse array does not store: ``"zero"`` (the default) or
        ``"missing"``.
    names
        Of the axes, in place of those that the array has.
    **others
        Other options of `as_blocks`: they are refused unless they are None or False.

    Returns
    -------
    BlockedData
        The blocks, in units of V.

    Raises
    ------
    DataError, OptionError, StoreError
        If they cannot be used.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(2.0, (8, 6, 5))
    >>> data = dfac.as_tensor(V, blocks=2, names=("user", "item", "week"))
    >>> [side.size for side in data.grid.sides]
    [8, 6, 5]
    """
    for name, own in others.items():
        if own is not None and own is not False:
            raise OptionError(f"{name} cannot be given for a tensor; leave it out")
    kind = checked_options(dtype, unstored)
    if isinstance(V, BlockedData):
        if not isinstance(V, TensorData):
            raise DataError("these are blocks of a matrix; a CP model takes three or more axes")
        return V
    entries = _checked(entries_of(V, unstored), names)
    entries = entries._replace(values=entries.values.astype(kind, copy=False))
    grid = _grid(entries, blocks)
    orders = _orders(entries, grid)
    positions = [inverse(order) for order in orders] if orders else None
    limit = memory_budget(memory_limit)
    size = entries.values.size * (kind.itemsize + 4 * (len(grid.axes) - 1))
    storage = Storage(grid, entries.unstored, nbytes=size, budget=limit)
    try:
        builder = _Builder(entries, grid)
        for block, view in _cut(entries, grid, positions):
            storage.put(block, view)  # type: ignore[arg-type]
            builder.scan(block, view)
        known = builder.finish(_stacked_orders(orders, grid), kind)
        refuse_unobserved(known, allow_empty)
        made = TensorData(known, storage)
    except BaseException:
        storage.close()
        raise
    made.names, made.labels_of = entries.names, entries.labels
    return made


# -- what is read ---------------------------------------------------------------------------


def entries_of(V: Any, unstored: str | None) -> Entries:
    """Read an array, whatever holds it, by its stored entries."""
    if is_frame(V):
        raise DataError(
            "a table is no tensor: make one of its keys and values, for example by "
            "sparse.COO([codes of each key], values), with pandas.factorize for the codes"
        )
    if hasattr(V, "dims") and hasattr(V, "coords") and hasattr(V, "data"):
        V = decoded(V)
        found, dims = entries_of(V.data, unstored), tuple(map(str, V.dims))
        labels = {dim: np.asarray(V[dim].values) for dim in dims if dim in V.coords}
        return found._replace(names=dims, labels=labels, kind="xarray")
    if isinstance(V, str | Path):
        V = np.load(V, mmap_mode="r") if str(V).endswith(".npy") else zarr_array(str(V))[0]
    if type(V).__module__.partition(".")[0] == "zarr" or isinstance(V, np.memmap):
        from dask.array import from_array

        decode = None if isinstance(V, np.memmap) else decoder(V)
        V = from_array(V)  # type: ignore[no-untyped-call]
        V = V if decode is None else V.map_blocks(decode)
    if hasattr(V, "dask") and hasattr(V, "numblocks"):
        return _of_chunks(V, unstored)
    if hasattr(V, "todense") and hasattr(V, "ndim"):
        return _of_sparse(V, unstored)
    return _of_dense(V, unstored)


def _of_sparse(V: Any, unstored: str | None) -> Entries:
    V = V if hasattr(V, "coords") else V.tocoo()
    own = meaning_of_fill(V.fill_value)
    if own == "missing" and unstored == "zero":
        raise OptionError(
            'unstored="zero", but the array says by its fill_value NaN that entries it does not '
            "store are missing; leave unstored out"
        )
    places = [np.asarray(place, np.int64) for place in V.coords]
    names = tuple(map(NAMES.format, range(V.ndim)))
    return Entries(V.shape, places, np.asarray(V.data), unstored or own, names, kind="sparse")


def _of_dense(V: Any, unstored: str | None) -> Entries:
    if unstored == "zero":
        raise OptionError(
            'unstored is "zero", but the input is dense: it stores every entry, and missing ones '
            "are NaN; leave unstored out"
        )
    array = np.ma.asarray(V) if isinstance(V, np.ma.MaskedArray) else np.asarray(V)
    check_dtype(array.dtype)
    if isinstance(array, np.ma.MaskedArray):
        seen = ~np.ma.getmaskarray(array)
        array = array.data
    else:
        seen = np.ones(array.shape, bool)
    if array.dtype.kind == "f":
        seen &= ~np.isnan(array)
    places = [np.asarray(own, np.int64) for own in np.nonzero(seen)]
    names = tuple(map(NAMES.format, range(array.ndim)))
    return Entries(array.shape, places, array[seen], "missing", names)


def _of_chunks(V: Any, unstored: str | None) -> Entries:
    """Read a dask array chunk by chunk, so that a dense one is never there as a whole."""
    starts = [np.cumsum([0, *sizes]) for sizes in V.chunks]
    parts = []
    for at in np.ndindex(V.numblocks):
        own = entries_of(V.blocks[at].compute(scheduler="threads"), unstored)
        here = [place + start[n] for place, start, n in zip(own.places, starts, at, strict=True)]
        parts.append(own._replace(places=here))
    if not parts:
        raise DataError(f"the data are empty, shape {V.shape}")
    places = [np.concatenate(own) for own in zip(*(part.places for part in parts), strict=True)]
    values = np.concatenate([part.values for part in parts])
    return parts[0]._replace(shape=V.shape, places=places, values=values, kind="dask")


def _checked(entries: Entries, names: Sequence[str] | None) -> Entries:
    """Refuse what is no tensor of finite numbers; drop entries that say that they are missing."""
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
    own = tuple(names or entries.names)
    if len(set(own)) < len(own) or (bad := [n for n in own if n in (*RESERVED, SIDES[1])]):
        shown = bad[0] if len(set(own)) == len(own) else own
        raise OptionError(
            f"axes need names of their own, which results do not use for something else, got "
            f"{shown!r}; pass CP(..., factors=(...))"
        )
    given = entries.labels
    labels = {n: given[o] for n, o in zip(own, entries.names, strict=True) if o in given}
    values = entries.values
    if values.dtype.kind == "f":
        if np.isinf(values).any():
            where = int(np.flatnonzero(np.isinf(values))[0])
            at = ", ".join(str(int(place[where])) for place in entries.places)
            raise DataError(
                f"the entry at ({at}) is infinite; entries must be finite, NaN where missing"
            )
        seen = ~np.isnan(values)
        if entries.unstored == "missing" and not seen.all():
            places = [place[seen] for place in entries.places]
            entries = entries._replace(places=places, values=values[seen])
    return entries._replace(shape=shape, names=own, labels=labels)


# -- the grid -------------------------------------------------------------------------------


def _grid(entries: Entries, blocks: int | TensorGrid | None) -> TensorGrid:
    """Choose as many bands along every axis, by the number of entries."""
    shape, axes = entries.shape, len(entries.shape)
    if isinstance(blocks, TensorGrid):
        if tuple(side.size for side in blocks.axes) != shape:
            raise OptionError(f"the grid is for a tensor of another shape than {shape}")
        return blocks
    if blocks is None:
        most, count, size = min(MOST_BANDS, *shape), 1, entries.values.size
        while (
            2 * count <= min(USUAL_BANDS, most)
            and STORED_ENTRY * size >= WORTHWHILE_BLOCK * (2 * count) ** axes
        ):
            count *= 2
        while 2 * count <= most and size > LARGEST_BLOCK * count**axes:
            count *= 2
    else:
        count = checked_blocks(blocks, shape)
    return TensorGrid(axes=tuple(Bands.even(size, count) for size in shape))


def _orders(entries: Entries, grid: TensorGrid) -> list[Index] | None:
    """Deal indices out evenly where blocks would hold very different numbers of entries."""
    if entries.unstored == "missing" and entries.values.size == math.prod(entries.shape):
        return None
    counts = np.bincount(_codes(entries, grid, None), minlength=grid.blocks ** len(grid.axes))
    if counts.max() <= UNEVEN * max(counts.mean(), 1.0):
        return None
    found = []
    for n, (place, bands) in enumerate(zip(entries.places, grid.axes, strict=True)):
        each = np.bincount(place, minlength=bands.size)
        found.append(balanced_order(each, bands, turning=n > 0))
    return found


def _stacked_orders(orders: list[Index] | None, grid: TensorGrid) -> tuple[Any, Any]:
    """The caller's row, and column, at each position of the grid."""
    if orders is None:
        return None, None
    starts = grid.starts
    return orders[0], np.concatenate([own + starts[n] for n, own in enumerate(orders[1:])])


# -- blocks ---------------------------------------------------------------------------------


def _codes(entries: Entries, grid: TensorGrid, positions: list[Index] | None) -> NDArray[Any]:
    """Number the block of every entry, in row-major order."""
    many = grid.blocks ** len(grid.axes)
    code: Any = np.zeros(entries.values.size, np.uint16 if many <= 2**16 else np.int64)
    for n, (place, bands) in enumerate(zip(entries.places, grid.axes, strict=True)):
        band = np.repeat(np.arange(len(bands)), bands.sizes).astype(code.dtype)
        band = band if positions is None else band[positions[n]]
        code *= code.dtype.type(grid.blocks)
        code += band[place]
    return np.asarray(code)


def _cut(
    entries: Entries, grid: TensorGrid, positions: list[Index] | None
) -> Iterator[tuple[tuple[int, ...], TensorBlock]]:
    """The blocks one after another, each with its entries in row-major order."""
    codes = _codes(entries, grid, positions)
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=grid.blocks ** len(grid.axes)))
    del codes
    for block, low, high in zip(grid.all_blocks(), [0, *ends], ends, strict=False):
        which, local = order[low:high], []
        for n, (place, bands) in enumerate(zip(entries.places, grid.axes, strict=True)):
            own = place[which] if positions is None else positions[n][place[which]]
            local.append(own - bands.offsets[block[n]])
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
            at = which[inside[twice[0]]]
            cell = ", ".join(str(int(place[at])) for place in entries.places)
            raise DataError(
                f"the cell ({cell}) is stored more than once; add up what belongs to one cell "
                "before, as sparse.COO(coords, data, shape) does"
            )
    rows = local[0][inside]
    pointers = np.searchsorted(rows, np.arange(shape[0] + 1)).astype(pointer_type(which.size))
    places = tuple(
        own[inside].astype(index_type(size)) for own, size in zip(local[1:], shape[1:], strict=True)
    )
    values = entries.values[which[inside]]
    return TensorBlock(pointers, places, values, shape, entries.unstored == "zero")


class _Builder:
    """Counts, sums and a checksum of a tensor, block by block."""

    def __init__(self, entries: Entries, grid: TensorGrid) -> None:
        self.entries, self.grid = entries, grid
        shape = (grid.blocks,) * len(grid.axes)
        self.stored, self.missing = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.sums: list[float] = []
        self.counts = [np.zeros(side.size, np.int64) for side in grid.axes]
        self.digest = hashlib.blake2b(digest_size=16)
        self.digest.update(repr((grid.axes, entries.unstored)).encode())

    def scan(self, block: tuple[int, ...], view: TensorBlock) -> None:
        """Add one block."""
        missing = np.isnan(view.values)
        counted = missing if view.zeros else ~missing
        self.stored[block], self.missing[block] = missing.size, missing.sum()
        slices = self.grid.slices(block)
        rows = np.repeat(np.arange(view.shape[0]), np.diff(view.indptr))
        for n, own in enumerate((rows, *view.indices)):
            self.counts[n][slices[n]] += np.bincount(own[counted], minlength=view.shape[n])
        self.sums.append(float(view.values[~missing].astype(np.float64).sum()))
        for array in view.stored:
            self.digest.update(as_bytes(np.ascontiguousarray(array)))

    def finish(self, orders: tuple[Any, Any], dtype: Any) -> Known:
        """Return what is known of the whole tensor."""
        entries, grid, counts = self.entries, self.grid, self.counts
        observed = self.stored - self.missing
        values = entries.values[~np.isnan(entries.values)]
        ends = [float(values.min()), float(values.max())] if values.size else [math.nan, math.nan]
        if entries.unstored == "zero":
            observed = grid.areas - self.missing
            counts = [grid.cells // missing.size - missing for missing in counts]
            if observed.sum() > values.size:
                ends = [float(np.fmin(ends[0], 0.0)), float(np.fmax(ends[1], 0.0))]
        statistics = Statistics(
            n_observed=observed,
            row_observed=counts[0],
            col_observed=np.concatenate(counts[1:]),
            total=math.fsum(self.sums),
            minimum=ends[0],
            maximum=ends[1],
            is_integer=bool((values == np.floor(values)).all()),
            fingerprint=f"{'x'.join(map(str, entries.shape))} {int(observed.sum())} "
            f"{self.digest.hexdigest()}",
            n_stored=self.stored,
        )
        layout = Layout(entries.unstored, *orders)
        return Known(grid, _labels(entries), statistics, SourceInfo("tensor"), dtype, layout)


def _labels(entries: Entries) -> Labels:
    """Labels of the first axis, and of all others behind one another as text."""
    first, *others = entries.names
    rows = {first: entries.labels[first]} if first in entries.labels else {}
    factors = [
        (name, length, entries.labels.get(name))
        for name, length in zip(others, entries.shape[1:], strict=True)
    ]
    columns = stacked_labels(SIDES[1], factors)
    return JointLabels(first, SIDES[1], rows, columns)


def _told(labels: NDArray[Any] | None) -> dict[str, Any]:
    """Labels of an axis as JSON can have them: their type, and as text."""
    if labels is None:
        return {"labels": None}
    return {"labels": labels.dtype.str, "values": labels.astype(str).tolist()}


def grid_of(offsets: Sequence[Sequence[int]]) -> TensorGrid:
    """The grid of these offsets along each axis, as results keep them."""
    return TensorGrid(axes=tuple(Bands(tuple(own)) for own in offsets))
