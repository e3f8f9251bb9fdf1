"""Set cells aside before a fit, to be predicted and compared with what they were."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import sparse

from daskfactor import markup
from daskfactor.checks import (
    cell_positions,
    cells_of_tensor,
    inner_share,
    mask_in_order,
    one_of,
)
from daskfactor.data.adapters import decoded, open_source
from daskfactor.data.annotated import UNSTORED, part_of
from daskfactor.data.blocks import BlockedData
from daskfactor.data.cells import StoredWeights
from daskfactor.data.entries import canonical
from daskfactor.data.known import DEFAULT_DIMS
from daskfactor.data.sources import as_blocks
from daskfactor.data.sparse import meaning_of_unstored
from daskfactor.data.tensor import entries_of
from daskfactor.errors import DataError, OptionError
from daskfactor.machine import available_memory
from daskfactor.options import Reading, verb
from daskfactor.random import resolve_seed

MOST_CELLS = 2**28
CELLS = "cells to hold out are (rows, columns) of integer positions, or a boolean mask of V's shape"


class HeldOut(NamedTuple):
    """A matrix without some of its entries, and those entries.

    ``train`` is of the kind that was passed, or a DataArray; ``cells`` is (rows, columns), of a
    tensor places along each axis, what ``sample(monitor=...)`` takes; ``values`` are the entries
    there.
    """

    train: Any
    cells: tuple[NDArray[np.int64], ...]
    values: NDArray[Any]

    def __repr__(self) -> str:
        return "\n".join(f"{name:<8}{told}" for name, told in self._rows())

    def _repr_html_(self) -> str:
        return markup.titled("Held out", markup.table(self._rows()))

    def _rows(self) -> list[tuple[str, str]]:
        """Name and kind of each part."""
        shape = " x ".join(map(str, getattr(self.train, "shape", ())))
        count, values = len(self.values), np.asarray(self.values, dtype=np.float64)
        axes = "rows and columns" if len(self.cells) == 2 else f"{len(self.cells)} places each"
        spread = f", {values.min():.4g} to {values.max():.4g}, mean {values.mean():.4g}"
        return [
            ("train", f"{type(self.train).__name__} {shape}, without them".replace("  ", " ")),
            ("cells", f"{axes} of {count:,} cells"),
            ("values", f"the {count:,} entries there{spread if count else ''}"),
        ]


@verb
def hold_out(
    V: Any,
    share: float = 0.1,
    *,
    cells: Any = None,
    keep_one: bool = True,
    random_seed: int | None = None,
    **reading: Unpack[Reading],
) -> HeldOut:
    """Set a random share of the observed entries aside, or the cells that are named.

    Single cells are taken, not rows or columns, so that every row and column
    keeps a factor of its own. The result's ``train`` and ``cells`` go straight
    into ``sample(held.train, model, monitor=held.cells)``.

    Parameters
    ----------
    V : array (I, J)
        Whatever `as_blocks` takes. Of a NumPy array (NaN = missing), an xarray.DataArray of
        one, a scipy sparse matrix or array, or an AnnData object with one of these as its
        ``X``, ``train`` is of the same kind. Anything else is put together in memory, and
        ``train`` is a DataArray, dense or sparse, under the names of V; of `BlockedData` it is
        on the same grid, with the same weights of cells.
    share
        Share of the observed entries, between 0 and 1.
    cells
        In place of a share: the cells to take, ``(rows, columns)`` by position, or a boolean
        mask of the shape of V; a DataArray mask of a V with names has its dimensions in any
        order. Rows and columns may lose all of their entries.
    unstored
        For sparse input, what an entry means that is not stored: ``"missing"``
        takes stored entries alone and drops them; ``"zero"`` takes cells of all
        kinds, zeros included, and stores NaN there. Left out, what `as_blocks` takes it for:
        what the input says itself (an AnnData: ``"zero"``), else ``"zero"``, with a warning;
        say ``"missing"`` of what a :class:`GaussianMF` takes. ``train`` says it itself.
    keep_one
        Whether every row and every column keeps at least one observed entry;
        otherwise fit with ``allow_empty=True``. Without effect under
        ``unstored="zero"``, where cells are taken from the whole matrix.
    random_seed
        Any whole number; the same seed takes the same cells.
    rows, columns, values, header, table, layer, mask_var, storage_options
        How V is read, as for `as_blocks`.

    Returns
    -------
    HeldOut
        ``train``, the data without them, ``cells``, their positions (rows, columns), and
        ``values``, what was observed there.

    Raises
    ------
    OptionError
        If ``share`` or ``unstored`` is not allowed, or leaves no cell to take, or one of the
        ``cells`` is missing.
    DataError
        If ``V`` is no matrix of real numbers, or there is no memory to put it together.
    StoreError
        If it cannot be read.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> held = dfac.hold_out(V, 0.1, random_seed=0)
    >>> held.values.size, int(np.isnan(held.train).sum())
    (30, 30)
    """
    inner_share("share", share)
    unstored = reading.get("unstored")
    chosen = any(own is not None for name, own in reading.items() if name != "unstored")
    one_of("unstored", unstored, (None, "zero", "missing"))
    in_memory = type(V).__name__ == "AnnData" and (sparse.issparse(V.X) or type(V.X) is np.ndarray)
    if in_memory and not chosen:
        import anndata  # the train is one again, so that names stay

        part = part_of(V)
        meaning = unstored or (part.unstored if sparse.issparse(part.matrix) else None)
        options: dict[str, Any] = {"keep_one": keep_one, "random_seed": random_seed}
        held = hold_out(part.matrix, share, cells=cells, unstored=meaning, **options)
        uns = {} if meaning is None else {UNSTORED: meaning}
        made = anndata.AnnData(held.train, obs=V.obs[[]], var=V.var[[]], uns=uns)
        return held._replace(train=made)
    wanted = float(share) if cells is None else cells
    rng = np.random.default_rng(resolve_seed(random_seed))
    if chosen:
        with as_blocks(V, dtype="float64", allow_empty=True, **reading) as data:
            return _from_blocks(data, wanted, keep_one, rng)
    if getattr(V, "ndim", 2) > 2:
        return _from_tensor(V, wanted, unstored, keep_one, rng)
    _check_matrix(V)
    V = decoded(V) if isinstance(V, xr.DataArray) else V
    if getattr(V, "ndim", 0) == len(getattr(V, "dims", ())) == 2:
        wanted = _in_order(wanted, V.dims, (V.indexes.get(V.dims[0]), V.indexes.get(V.dims[1])))
    if sparse.issparse(V):
        meaning = meaning_of_unstored(open_source(V), unstored)
        held = _from_sparse(V, wanted, meaning == "zero", keep_one, rng)
        held.train.unstored = meaning
        return held
    if isinstance(V, xr.DataArray) and isinstance(V.data, np.ndarray):
        held = _from_dense(np.asarray(V.values), wanted, keep_one, rng)
        return held._replace(train=V.copy(data=held.train))
    if isinstance(V, np.ndarray):
        filled = np.ma.filled(V.astype(np.result_type(V.dtype, np.float32)), np.nan)
        return _from_dense(filled, wanted, keep_one, rng)
    if isinstance(V, BlockedData):
        V = as_blocks(V, unstored=unstored)  # refuses what the blocks contradict
        held = _from_blocks(V, wanted, keep_one, rng)
        balance = V.is_balanced
        weights, own = None, V.weights
        if own is not None and V.weighting is not None:
            values = own.observed_sparse() if own.is_sparse else own.to_numpy()
            weights = StoredWeights(V.weighting, values)
        options = {"balance": balance, "allow_empty": True, "weights": weights}
        return held._replace(train=as_blocks(held.train, V.grid, dtype=V.dtype, **options))
    with as_blocks(V, dtype="float64", unstored=unstored, allow_empty=True) as data:
        return _from_blocks(data, wanted, keep_one, rng)


def _from_tensor(
    V: Any, wanted: Any, unstored: str | None, keep_one: bool, rng: np.random.Generator
) -> HeldOut:
    """Take cells of a tensor that are stored; ``train`` is of its kind, without them."""
    if unstored == "zero":
        raise OptionError(
            "cells of a sparse tensor are held out among those that it stores; leave unstored out, "
            'and pass unstored="missing" to sample()'
        )
    entries = entries_of(V, "missing" if hasattr(V, "todense") else None)
    count = entries.values.size
    if isinstance(wanted, float):
        chosen = rng.permutation(count)[: max(1, round(wanted * count))]
    else:
        found = cells_of_tensor(wanted, entries.shape)
        if found is None:
            raise OptionError("no cells were named; pass one array of places for each axis")
        sizes = entries.shape[1:]
        key = entries.places[0] * math.prod(sizes) + np.ravel_multi_index(entries.places[1:], sizes)
        chosen, gone = _found(key, found[0] * math.prod(sizes) + found[1])
        if gone.any():
            raise OptionError("one of the cells is missing; cells that are held out are observed")
        keep_one = False
    taken = np.zeros(count, bool)
    taken[chosen] = True
    if keep_one:
        _give_back(taken, entries.places, entries.shape)
    cells = tuple(place[taken] for place in entries.places)
    train = _train_of(V, cells, ~taken, entries)
    return HeldOut(train, cells, entries.values[taken])


def _give_back(
    taken: NDArray[np.bool_], places: Sequence[NDArray[np.int64]], shape: tuple[int, ...]
) -> None:
    """Leave every index of every axis that has entries at least one of them."""
    for place, size in zip(places, shape, strict=True):
        left = np.bincount(place[~taken], minlength=size)
        bare = np.flatnonzero(taken & (left[place] == 0))
        taken[bare[np.unique(place[bare], return_index=True)[1]]] = False


def _train_of(V: Any, cells: Any, kept: NDArray[np.bool_], entries: Any) -> Any:
    """Give the array without some cells, of its own kind where it is in memory."""
    if isinstance(V, xr.DataArray):
        return V.copy(data=_train_of(V.data, cells, kept, entries))
    if hasattr(V, "todense"):
        import sparse as pydata

        coords = np.stack([place[kept] for place in entries.places])
        return pydata.COO(coords, entries.values[kept], entries.shape, fill_value=V.fill_value)
    filled = np.ma.filled(np.ma.asarray(V).astype(np.result_type(V.dtype, np.float32)), np.nan)
    filled[cells] = np.nan
    return filled


def _in_order(wanted: Any, dims: tuple[Any, ...], labels: Sequence[Any]) -> Any:
    """Turn a mask with names to the dimensions and labels of V; all else is as it was."""
    return mask_in_order(wanted, dims, labels, CELLS) if hasattr(wanted, "dims") else wanted


def _check_matrix(V: Any) -> None:
    """Refuse what is no matrix of real numbers."""
    shape, dtype = getattr(V, "shape", None), getattr(V, "dtype", None)
    if shape is None or dtype is None:
        return  # refused by its type
    if len(shape) != 2 or np.dtype(dtype).kind not in "biuf":
        raise DataError(
            f"cells are held out of a matrix of real numbers, got shape {tuple(shape)} and dtype "
            f"{dtype}; select or reshape to two dimensions, convert to numbers; of a DataArray "
            "with more dimensions name those that are rows, rows=..."
        )


def _from_blocks(
    data: BlockedData, wanted: Any, keep_one: bool, rng: np.random.Generator
) -> HeldOut:
    """Of any data, by their blocks, as a DataArray with the names of the input."""
    labels = data.labels
    dims = labels.row_dim, labels.col_dim
    if dims != DEFAULT_DIMS or set(getattr(wanted, "dims", ())) == set(dims):
        wanted = _in_order(wanted, dims, labels.keys)
    if 3 * data.nbytes > available_memory():
        raise DataError(
            f"cells are held out in memory, where these data take {data.nbytes} bytes up to three "
            f"times and {available_memory()} are free; hold cells out of a part of the rows"
        )
    if data.is_sparse:
        import sparse as pydata

        held = _from_sparse(data.observed_sparse(), wanted, data.unstored == "zero", keep_one, rng)
        csr = held.train
        fill = csr.dtype.type(0 if data.unstored == "zero" else np.nan)
        parts = (csr.data, csr.indices, csr.indptr)
        train = pydata.GCXS(parts, shape=csr.shape, compressed_axes=(0,), fill_value=fill)
    else:
        held = _from_dense(data.to_numpy(), wanted, keep_one, rng)
        train = held.train
    array = xr.DataArray(train, labels.coords, dims, labels.name, labels.about)
    return held._replace(train=array)


def _from_dense(V: NDArray[Any], wanted: Any, keep_one: bool, rng: np.random.Generator) -> HeldOut:
    V = np.array(V, dtype=np.result_type(V.dtype, np.float32))
    rows, cols = np.nonzero(~np.isnan(V))
    chosen = _choose((rows, cols), V.shape, wanted, keep_one, rng)
    cells = rows[chosen].astype(np.int64), cols[chosen].astype(np.int64)
    values = V[cells]
    V[cells] = np.nan
    return HeldOut(V, cells, values)


def _from_sparse(
    V: Any, wanted: Any, zeros: bool, keep_one: bool, rng: np.random.Generator
) -> HeldOut:
    csr = sparse.csr_array(canonical(V, zeros)).astype(np.result_type(V.dtype, np.float32))
    if zeros:
        return _with_zeros(csr, wanted, rng)
    coo = csr.tocoo()
    if np.isnan(coo.data).any():  # marked as missing already
        seen = ~np.isnan(coo.data)
        where = coo.coords[0][seen], coo.coords[1][seen]
        coo = sparse.coo_array((coo.data[seen], where), shape=coo.shape)
    rows, cols = coo.coords
    chosen = _choose((rows, cols), V.shape, wanted, keep_one, rng)
    rest = np.ones(rows.size, bool)
    rest[chosen] = False
    train = sparse.coo_array((coo.data[rest], (rows[rest], cols[rest])), shape=coo.shape).tocsr()
    cells = rows[chosen].astype(np.int64), cols[chosen].astype(np.int64)
    return HeldOut(train, cells, coo.data[chosen])


def _with_zeros(csr: Any, wanted: Any, rng: np.random.Generator) -> HeldOut:
    """Any cells at all, each with a NaN of its own in the matrix that is left."""
    taken = _taken(csr.shape, wanted, rng)
    rows, cols = np.divmod(taken, csr.shape[1])
    values = np.asarray(csr[rows, cols]).ravel()
    known = ~np.isnan(values)  # the others are marked as missing already
    if not isinstance(wanted, float) and not known.all():
        raise _not_observed(rows[~known], cols[~known])
    taken, rows, cols, values = taken[known], rows[known], cols[known], values[known]
    coo = csr.tocoo()
    own = coo.coords[0].astype(np.int64) * csr.shape[1] + coo.coords[1]
    rest = ~np.isin(own, taken)
    data = np.concatenate([coo.data[rest], np.full(taken.size, np.nan, coo.data.dtype)])
    where = [
        np.concatenate([at[rest], new]) for at, new in zip(coo.coords, (rows, cols), strict=True)
    ]
    train = sparse.coo_array((data, (where[0], where[1])), shape=csr.shape).tocsr()
    return HeldOut(train, (rows, cols), values)


def _positions(wanted: Any, shape: tuple[int, int]) -> tuple[NDArray[np.int64], ...]:
    """Rows and columns of the cells that are named; a mask is in the order of V by now."""
    return cell_positions(getattr(wanted, "values", wanted), shape, (), CELLS)


def _taken(shape: tuple[int, int], wanted: Any, rng: np.random.Generator) -> NDArray[np.int64]:
    """Numbers of the cells to take, counted along rows."""
    if not isinstance(wanted, float):
        rows, cols = _positions(wanted, shape)
        return rows * shape[1] + cols
    total = shape[0] * shape[1]
    count = round(wanted * total)
    if not 0 < count <= MOST_CELLS:
        raise OptionError(
            f"share={wanted!r} of {total} cells is {count}; choose a share that takes between 1 "
            f"and {MOST_CELLS} cells"
        )
    return _distinct(total, count, rng)


def _found(numbers: NDArray[Any], wanted: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the positions of wanted cells among some by their numbers, and which are not there."""
    order = np.argsort(numbers)
    place = np.searchsorted(numbers, wanted, sorter=order)
    found = order[np.minimum(place, numbers.size - 1)].astype(np.int64)
    return found, numbers[found] != wanted


def _not_observed(rows: Any, cols: Any) -> OptionError:
    return OptionError(
        f"{len(rows)} of the cells to hold out are missing in V, the first at row {rows[0]}, "
        f"column {cols[0]}; name cells that V has values at"
    )


def _distinct(total: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """``count`` different numbers below ``total``, ascending, in memory of the order of count."""
    if count > total // 2:
        kept = np.ones(total, bool)
        kept[_distinct(total, total - count, rng)] = False
        return np.flatnonzero(kept).astype(np.int64)
    found = np.empty(0, np.int64)
    while found.size < count:
        more = rng.integers(0, total, count - found.size + 16)
        found = np.unique(np.concatenate([found, more]))
    return np.sort(rng.permutation(found)[:count])


def _choose(
    observed: tuple[NDArray[Any], NDArray[Any]],
    shape: tuple[int, int],
    wanted: Any,
    keep_one: bool,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Positions of the entries to take: ascending, or in the order of the cells that are named."""
    rows, cols = observed
    if not isinstance(wanted, float):
        named = _positions(wanted, shape)
        own, asked = (at[0].astype(np.int64) * shape[1] + at[1] for at in (observed, named))
        found, gone = _found(own, asked)
        if gone.any():
            raise _not_observed(named[0][gone], named[1][gone])
        return found
    count = round(wanted * rows.size)
    order = rng.permutation(rows.size)
    if keep_one:
        kept = np.zeros(rows.size, bool)
        for index in (rows, cols):  # the first in random order of every row and column
            kept[order[np.unique(index[order], return_index=True)[1]]] = True
        order = order[~kept[order]]
    if not count > 0 or not order.size:
        raise OptionError(
            f"share={wanted!r} of {rows.size} observed entries leaves none to hold out; raise it, "
            "or pass keep_one=False and fit with allow_empty=True"
        )
    return np.sort(order[:count]).astype(np.int64)
