"""Hold cells out of a fit, to compare predictions with their values."""

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
from daskfactor.data.coo import canonical
from daskfactor.data.entries import entries_of
from daskfactor.data.labels import DEFAULT_DIMS
from daskfactor.data.sources import as_blocks
from daskfactor.data.sparse import meaning_of_unstored
from daskfactor.data.weights import StoredWeights
from daskfactor.errors import DataError, OptionError
from daskfactor.machine import available_memory
from daskfactor.options import Reading, verb
from daskfactor.random import resolve_seed

MAX_CELLS = 2**28
CELLS = "cells to hold out are (rows, columns) of integer positions, or a boolean mask of V's shape"


class HeldOut(NamedTuple):
    """Matrix without some of its entries, and those entries.

    ``train`` has the type of the data, or is a DataArray; ``cells`` is (rows, columns), or
    positions along each axis of a tensor, for ``sample(monitor=...)``; ``values`` are the entries
    there.
    """

    train: Any
    cells: tuple[NDArray[np.int64], ...]
    values: NDArray[Any]

    def __repr__(self) -> str:
        return "\n".join(f"{name:<8}{text}" for name, text in self._rows())

    def _repr_html_(self) -> str:
        return markup.titled("Held out", markup.table(self._rows()))

    def _rows(self) -> list[tuple[str, str]]:
        """Return the name and a description of each part."""
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
    """Hold a random share of the observed entries out, or the cells that are named.

    Single cells are taken, not rows or columns, so that every row and column keeps a factor of its
    own. The result's ``train`` and ``cells`` go straight into ``sample(held.train, model,
    monitor=held.cells)``.

    Parameters
    ----------
    V : array (I, J)
        Anything that `as_blocks` takes. Of a NumPy array (NaN = missing), an xarray.DataArray of
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
        Meaning of entries that a sparse input does not store: ``"missing"``
        takes stored entries alone and drops them; ``"zero"`` takes cells of all
        kinds, zeros included, and stores NaN there. By default the meaning for `as_blocks`:
        that of the input (an AnnData: ``"zero"``), else ``"zero"``, with a warning; pass
        ``"missing"`` for a :class:`GaussianMF`. ``train`` carries the meaning itself.
    keep_one
        Leave every row and every column at least one observed entry; without this,
        fit with ``allow_empty=True``. It has no effect under
        ``unstored="zero"``, where cells are taken from the whole matrix.
    random_seed
        Any whole number; the same seed takes the same cells.
    rows, columns, values, header, table, layer, mask_var, storage_options
        Options to read V, as for `as_blocks`.

    Returns
    -------
    HeldOut
        ``train``, the data without them, ``cells``, their positions (rows, columns), and
        ``values``, the entries there.

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
    has_options = any(value is not None for name, value in reading.items() if name != "unstored")
    one_of("unstored", unstored, (None, "zero", "missing"))
    in_memory = type(V).__name__ == "AnnData" and (sparse.issparse(V.X) or type(V.X) is np.ndarray)
    if in_memory and not has_options:
        import anndata  # the train is an AnnData again, with the names

        part = part_of(V)
        meaning = unstored or (part.unstored if sparse.issparse(part.matrix) else None)
        options: dict[str, Any] = {"keep_one": keep_one, "random_seed": random_seed}
        result = hold_out(part.matrix, share, cells=cells, unstored=meaning, **options)
        uns = {} if meaning is None else {UNSTORED: meaning}
        adata = anndata.AnnData(result.train, obs=V.obs[[]], var=V.var[[]], uns=uns)
        return result._replace(train=adata)
    selection = float(share) if cells is None else cells
    rng = np.random.default_rng(resolve_seed(random_seed))
    if has_options:
        with as_blocks(V, dtype="float64", allow_empty=True, **reading) as data:
            return _from_blocks(data, selection, keep_one, rng)
    if getattr(V, "ndim", 2) > 2:
        return _from_tensor(V, selection, unstored, keep_one, rng)
    _check_matrix(V)
    V = decoded(V) if isinstance(V, xr.DataArray) else V
    if getattr(V, "ndim", 0) == len(getattr(V, "dims", ())) == 2:
        selection = _in_order(
            selection, V.dims, (V.indexes.get(V.dims[0]), V.indexes.get(V.dims[1]))
        )
    if sparse.issparse(V):
        meaning = meaning_of_unstored(open_source(V), unstored)
        result = _from_sparse(V, selection, meaning == "zero", keep_one, rng)
        result.train.unstored = meaning
        return result
    if isinstance(V, xr.DataArray) and isinstance(V.data, np.ndarray):
        result = _from_dense(np.asarray(V.values), selection, keep_one, rng)
        return result._replace(train=V.copy(data=result.train))
    if isinstance(V, np.ndarray):
        filled = np.ma.filled(V.astype(np.result_type(V.dtype, np.float32)), np.nan)
        return _from_dense(filled, selection, keep_one, rng)
    if isinstance(V, BlockedData):
        V = as_blocks(V, unstored=unstored)  # refuses options that contradict the blocks
        result = _from_blocks(V, selection, keep_one, rng)
        balance = V.is_balanced
        weights, weight_data = None, V.weights
        if weight_data is not None and V.weighting is not None:
            values = (
                weight_data.observed_sparse() if weight_data.is_sparse else weight_data.to_numpy()
            )
            weights = StoredWeights(V.weighting, values)
        options = {"balance": balance, "allow_empty": True, "weights": weights}
        return result._replace(train=as_blocks(result.train, V.grid, dtype=V.dtype, **options))
    with as_blocks(V, dtype="float64", unstored=unstored, allow_empty=True) as data:
        return _from_blocks(data, selection, keep_one, rng)


def _from_tensor(
    V: Any, selection: Any, unstored: str | None, keep_one: bool, rng: np.random.Generator
) -> HeldOut:
    """Hold cells of a tensor out that are stored; ``train`` has the type of the tensor."""
    if unstored == "zero":
        raise OptionError(
            "cells of a sparse tensor are held out among those that it stores; leave unstored out, "
            'and pass unstored="missing" to sample()'
        )
    entries = entries_of(V, "missing" if hasattr(V, "todense") else None)
    count = entries.values.size
    if isinstance(selection, float):
        chosen = rng.permutation(count)[: max(1, round(selection * count))]
    else:
        positions = cells_of_tensor(selection, entries.shape)
        if positions is None:
            raise OptionError("no cells were named; pass one array of places for each axis")
        sizes = entries.shape[1:]
        key = entries.places[0] * math.prod(sizes) + np.ravel_multi_index(entries.places[1:], sizes)
        chosen, is_absent = _find_cells(key, positions[0] * math.prod(sizes) + positions[1])
        if is_absent.any():
            raise OptionError("one of the cells is missing; cells that are held out are observed")
        keep_one = False
    is_taken = np.zeros(count, bool)
    is_taken[chosen] = True
    if keep_one:
        _give_back(is_taken, entries.places, entries.shape)
    cells = tuple(place[is_taken] for place in entries.places)
    train = _train_of(V, cells, ~is_taken, entries)
    return HeldOut(train, cells, entries.values[is_taken])


def _give_back(
    is_taken: NDArray[np.bool_], places: Sequence[NDArray[np.int64]], shape: tuple[int, ...]
) -> None:
    """Return entries to the training data, so that no index of an axis loses all of them."""
    for place, size in zip(places, shape, strict=True):
        left = np.bincount(place[~is_taken], minlength=size)
        bare = np.flatnonzero(is_taken & (left[place] == 0))
        is_taken[bare[np.unique(place[bare], return_index=True)[1]]] = False


def _train_of(V: Any, cells: Any, is_train: NDArray[np.bool_], entries: Any) -> Any:
    """Return the array without some cells, in its own type if it is in memory."""
    if isinstance(V, xr.DataArray):
        return V.copy(data=_train_of(V.data, cells, is_train, entries))
    if hasattr(V, "todense"):
        import sparse as pydata

        coords = np.stack([place[is_train] for place in entries.places])
        return pydata.COO(coords, entries.values[is_train], entries.shape, fill_value=V.fill_value)
    filled = np.ma.filled(np.ma.asarray(V).astype(np.result_type(V.dtype, np.float32)), np.nan)
    filled[cells] = np.nan
    return filled


def _in_order(selection: Any, dims: tuple[Any, ...], labels: Sequence[Any]) -> Any:
    """Return a mask with names in the order of V; other selections are unchanged."""
    return (
        mask_in_order(selection, dims, labels, CELLS) if hasattr(selection, "dims") else selection
    )


def _check_matrix(V: Any) -> None:
    """Refuse data that are not a matrix of real numbers."""
    shape, dtype = getattr(V, "shape", None), getattr(V, "dtype", None)
    if shape is None or dtype is None:
        return  # the type is refused later
    if len(shape) != 2 or np.dtype(dtype).kind not in "biuf":
        raise DataError(
            f"cells are held out of a matrix of real numbers, got shape {tuple(shape)} and dtype "
            f"{dtype}; select or reshape to two dimensions, convert to numbers; of a DataArray "
            "with more dimensions name those that are rows, rows=..."
        )


def _from_blocks(
    data: BlockedData, selection: Any, keep_one: bool, rng: np.random.Generator
) -> HeldOut:
    """Hold cells of any data out, by their blocks; ``train`` is a DataArray."""
    labels = data.labels
    dims = labels.row_dim, labels.col_dim
    if dims != DEFAULT_DIMS or set(getattr(selection, "dims", ())) == set(dims):
        selection = _in_order(selection, dims, labels.keys)
    if 3 * data.nbytes > available_memory():
        raise DataError(
            f"cells are held out in memory, where these data take {data.nbytes} bytes up to three "
            f"times and {available_memory()} are free; hold cells out of a part of the rows"
        )
    if data.is_sparse:
        import sparse as pydata

        result = _from_sparse(
            data.observed_sparse(), selection, data.unstored == "zero", keep_one, rng
        )
        csr = result.train
        fill = csr.dtype.type(0 if data.unstored == "zero" else np.nan)
        parts = (csr.data, csr.indices, csr.indptr)
        train = pydata.GCXS(parts, shape=csr.shape, compressed_axes=(0,), fill_value=fill)
    else:
        result = _from_dense(data.to_numpy(), selection, keep_one, rng)
        train = result.train
    array = xr.DataArray(train, labels.coords, dims, labels.name, labels.about)
    return result._replace(train=array)


def _from_dense(
    V: NDArray[Any], selection: Any, keep_one: bool, rng: np.random.Generator
) -> HeldOut:
    V = np.array(V, dtype=np.result_type(V.dtype, np.float32))
    rows, cols = np.nonzero(~np.isnan(V))
    chosen = _choose((rows, cols), V.shape, selection, keep_one, rng)
    cells = rows[chosen].astype(np.int64), cols[chosen].astype(np.int64)
    values = V[cells]
    V[cells] = np.nan
    return HeldOut(V, cells, values)


def _from_sparse(
    V: Any, selection: Any, zeros: bool, keep_one: bool, rng: np.random.Generator
) -> HeldOut:
    csr = sparse.csr_array(canonical(V, zeros)).astype(np.result_type(V.dtype, np.float32))
    if zeros:
        return _with_zeros(csr, selection, rng)
    coo = csr.tocoo()
    if np.isnan(coo.data).any():  # missing already
        observed = ~np.isnan(coo.data)
        coords = coo.coords[0][observed], coo.coords[1][observed]
        coo = sparse.coo_array((coo.data[observed], coords), shape=coo.shape)
    rows, cols = coo.coords
    chosen = _choose((rows, cols), V.shape, selection, keep_one, rng)
    rest = np.ones(rows.size, bool)
    rest[chosen] = False
    train = sparse.coo_array((coo.data[rest], (rows[rest], cols[rest])), shape=coo.shape).tocsr()
    cells = rows[chosen].astype(np.int64), cols[chosen].astype(np.int64)
    return HeldOut(train, cells, coo.data[chosen])


def _with_zeros(csr: Any, selection: Any, rng: np.random.Generator) -> HeldOut:
    """Hold any cells out; each of them is NaN in the remaining matrix."""
    numbers = _cell_numbers(csr.shape, selection, rng)
    rows, cols = np.divmod(numbers, csr.shape[1])
    values = np.asarray(csr[rows, cols]).ravel()
    observed = ~np.isnan(values)  # NaN: missing already
    if not isinstance(selection, float) and not observed.all():
        raise _not_observed(rows[~observed], cols[~observed])
    numbers, rows, cols, values = (
        numbers[observed],
        rows[observed],
        cols[observed],
        values[observed],
    )
    coo = csr.tocoo()
    stored_numbers = coo.coords[0].astype(np.int64) * csr.shape[1] + coo.coords[1]
    rest = ~np.isin(stored_numbers, numbers)
    data = np.concatenate([coo.data[rest], np.full(numbers.size, np.nan, coo.data.dtype)])
    coords = [
        np.concatenate([index[rest], new])
        for index, new in zip(coo.coords, (rows, cols), strict=True)
    ]
    train = sparse.coo_array((data, (coords[0], coords[1])), shape=csr.shape).tocsr()
    return HeldOut(train, (rows, cols), values)


def _positions(selection: Any, shape: tuple[int, int]) -> tuple[NDArray[np.int64], ...]:
    """Return rows and columns of the named cells; a mask is in the order of V already."""
    return cell_positions(getattr(selection, "values", selection), shape, (), CELLS)


def _cell_numbers(
    shape: tuple[int, int], selection: Any, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the numbers of the cells to take, counted along rows."""
    if not isinstance(selection, float):
        rows, cols = _positions(selection, shape)
        return rows * shape[1] + cols
    total = shape[0] * shape[1]
    count = round(selection * total)
    if not 0 < count <= MAX_CELLS:
        raise OptionError(
            f"share={selection!r} of {total} cells is {count}; choose a share that takes between 1 "
            f"and {MAX_CELLS} cells"
        )
    return _distinct(total, count, rng)


def _find_cells(
    numbers: NDArray[Any], requested: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the positions of requested cells among numbers, and a mask of the absent ones."""
    order = np.argsort(numbers)
    place = np.searchsorted(numbers, requested, sorter=order)
    positions = order[np.minimum(place, numbers.size - 1)].astype(np.int64)
    return positions, numbers[positions] != requested


def _not_observed(rows: Any, cols: Any) -> OptionError:
    return OptionError(
        f"{len(rows)} of the cells to hold out are missing in V, the first at row {rows[0]}, "
        f"column {cols[0]}; name cells that V has values at"
    )


def _distinct(total: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return ``count`` different numbers below ``total``, ascending, in memory O(count)."""
    if count > total // 2:
        is_chosen = np.ones(total, bool)
        is_chosen[_distinct(total, total - count, rng)] = False
        return np.flatnonzero(is_chosen).astype(np.int64)
    numbers = np.empty(0, np.int64)
    while numbers.size < count:
        more = rng.integers(0, total, count - numbers.size + 16)
        numbers = np.unique(np.concatenate([numbers, more]))
    return np.sort(rng.permutation(numbers)[:count])


def _choose(
    observed: tuple[NDArray[Any], NDArray[Any]],
    shape: tuple[int, int],
    selection: Any,
    keep_one: bool,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Return the positions of the entries to take: ascending, or in the order of named cells."""
    rows, cols = observed
    if not isinstance(selection, float):
        named = _positions(selection, shape)
        observed_numbers, requested_numbers = (
            at[0].astype(np.int64) * shape[1] + at[1] for at in (observed, named)
        )
        positions, is_absent = _find_cells(observed_numbers, requested_numbers)
        if is_absent.any():
            raise _not_observed(named[0][is_absent], named[1][is_absent])
        return positions
    count = round(selection * rows.size)
    order = rng.permutation(rows.size)
    if keep_one:
        is_train = np.zeros(rows.size, bool)
        for index in (rows, cols):  # the first in random order of every row and column
            is_train[order[np.unique(index[order], return_index=True)[1]]] = True
        order = order[~is_train[order]]
    if not count > 0 or not order.size:
        raise OptionError(
            f"share={selection!r} of {rows.size} observed entries leaves none to hold out; raise "
            "it, or pass keep_one=False and fit with allow_empty=True"
        )
    return np.sort(order[:count]).astype(np.int64)
