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
    TENSOR_CELLS,
    cells_at,
    inner_share,
    mask_in_order,
    one_of,
)
from daskfactor.data.adapters import decoded, from_matrix
from daskfactor.data.annotated import UNSTORED, part_of
from daskfactor.data.blocks import BlockedData
from daskfactor.data.coo import canonical
from daskfactor.data.entries import entries_of
from daskfactor.data.labels import DEFAULT_DIMS
from daskfactor.data.sources import as_blocks
from daskfactor.data.sparse import meaning_of_unstored
from daskfactor.data.statistics import check_dtype
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
    is_tensor = getattr(V, "ndim", 2) > 2
    if is_tensor and unstored == "zero":
        raise OptionError(
            "cells of a sparse tensor are held out among those that it stores; leave unstored out, "
            'and pass unstored="missing" to sample()'
        )
    if not is_tensor:
        _check_matrix(V)
    if isinstance(V, xr.DataArray):
        V = decoded(V)
        if hasattr(selection, "dims"):
            selection = mask_in_order(
                selection, V.dims, [*map(V.indexes.get, V.dims)], _allowed(V.shape)
            )
        if is_tensor or isinstance(V.data, np.ndarray):
            array = _tensor_in_memory(V.data) if is_tensor else V.values
            result = _from_array(array, selection, keep_one, rng)
            return result._replace(train=V.copy(data=result.train))
    if sparse.issparse(V):
        meaning = meaning_of_unstored(from_matrix(V), unstored)
        result = _from_sparse(V, selection, meaning == "zero", keep_one, rng)
        result.train.unstored = meaning
        return result
    if is_tensor or isinstance(V, np.ndarray):
        array = _tensor_in_memory(V) if is_tensor else V
        return _from_array(array, selection, keep_one, rng)
    if isinstance(V, BlockedData):
        V = as_blocks(V, unstored=unstored)  # refuses options that contradict the blocks
        result = _from_blocks(V, selection, keep_one, rng)
        weights, weight_data = None, V.weights
        if weight_data is not None and V.weighting is not None:
            values = (
                weight_data.observed_sparse() if weight_data.is_sparse else weight_data.to_numpy()
            )
            weights = StoredWeights(V.weighting, values)
        options = {"balance": V.is_balanced, "allow_empty": True, "weights": weights}
        return result._replace(train=as_blocks(result.train, V.grid, dtype=V.dtype, **options))
    with as_blocks(V, dtype="float64", unstored=unstored, allow_empty=True) as data:
        return _from_blocks(data, selection, keep_one, rng)


def _tensor_in_memory(V: Any) -> Any:
    """Return a tensor as sparse.COO, or as an array of NumPy with NaN where it is missing."""
    if isinstance(V, np.ndarray):
        check_dtype(V.dtype)
        return V
    if hasattr(V, "todense"):
        return V if hasattr(V, "coords") else V.tocoo()
    entries = entries_of(V, None)
    array = np.full(entries.shape, np.nan, np.result_type(entries.values, np.float32))
    array[tuple(entries.places)] = entries.values
    return array


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
    mask_dims = set(getattr(selection, "dims", ()))
    if mask_dims and (dims != DEFAULT_DIMS or mask_dims == set(dims)):
        selection = mask_in_order(selection, dims, labels.keys, CELLS)
    if 3 * data.nbytes > available_memory():
        raise DataError(
            f"cells are held out in memory, where these data take {data.nbytes} bytes up to three "
            f"times and {available_memory()} are free; hold cells out of a part of the rows"
        )
    if data.is_sparse:
        import sparse as pydata

        zeros = data.unstored == "zero"
        result = _from_sparse(data.observed_sparse(), selection, zeros, keep_one, rng)
        csr = result.train
        fill = csr.dtype.type(0 if zeros else np.nan)
        parts = (csr.data, csr.indices, csr.indptr)
        train = pydata.GCXS(parts, shape=csr.shape, compressed_axes=(0,), fill_value=fill)
    else:
        result = _from_array(data.to_numpy(), selection, keep_one, rng)
        train = result.train
    array = xr.DataArray(train, labels.coords, dims, labels.name, labels.about)
    return result._replace(train=array)


def _from_sparse(
    V: Any, selection: Any, zeros: bool, keep_one: bool, rng: np.random.Generator
) -> HeldOut:
    csr = sparse.csr_array(canonical(V, zeros)).astype(np.result_type(V.dtype, np.float32))
    if zeros:
        return _with_zeros(csr, selection, rng)
    result = _from_array(csr.tocoo(), selection, keep_one, rng)
    return result._replace(train=result.train.tocsr())


def _from_array(V: Any, selection: Any, keep_one: bool, rng: np.random.Generator) -> HeldOut:
    """Hold observed cells out of an array of NumPy, or coordinates of scipy or sparse.COO."""
    train: Any
    dtype = np.result_type(V.dtype, np.float32)
    if isinstance(V, np.ndarray):
        train = np.asarray(np.ma.filled(V.astype(dtype), np.nan))
        observed = np.nonzero(~np.isnan(train))
        chosen = _choose(observed, V.shape, selection, keep_one, rng)
        cells = tuple(at[chosen] for at in observed)
        values = train[cells]
        train[cells] = np.nan
        return HeldOut(train, cells, values)
    is_train = ~np.isnan(V.data)
    observed = tuple(at[is_train].astype(np.int64) for at in V.coords)
    chosen = _choose(observed, V.shape, selection, keep_one, rng)
    number = np.flatnonzero(is_train)[chosen]
    is_train[number] = False
    left, values = tuple(at[is_train] for at in V.coords), V.data.astype(dtype)
    if not hasattr(V, "fill_value"):
        train = sparse.coo_array((values[is_train], left), shape=V.shape)
    else:
        train = type(V)(np.stack(left), values[is_train], V.shape, fill_value=V.fill_value)
    return HeldOut(train, tuple(at[chosen] for at in observed), values[number])


def _with_zeros(csr: Any, selection: Any, rng: np.random.Generator) -> HeldOut:
    """Hold any cells out; each of them is NaN in the remaining matrix."""
    if isinstance(selection, float):
        total = math.prod(csr.shape)
        count = round(selection * total)
        if not 0 < count <= MAX_CELLS:
            raise OptionError(
                f"share={selection!r} of {total} cells is {count}; choose a share that takes "
                f"between 1 and {MAX_CELLS} cells"
            )
        cells = np.unravel_index(_distinct(total, count, rng), csr.shape)
    else:
        cells = _named_cells(selection, csr.shape)
    values = np.asarray(csr[cells]).ravel()
    is_missing = np.isnan(values)
    if is_missing.any():
        if not isinstance(selection, float):
            raise _not_observed(cells, is_missing)
        cells, values = tuple(at[~is_missing] for at in cells), values[~is_missing]
    coo = csr.tocoo()
    stored, selected = (np.ravel_multi_index(at, csr.shape) for at in (coo.coords, cells))
    rest = ~np.isin(stored, selected)
    data = np.concatenate([coo.data[rest], np.full(values.size, np.nan, coo.data.dtype)])
    coords = tuple(
        np.concatenate([index[rest], new]) for index, new in zip(coo.coords, cells, strict=True)
    )
    train = sparse.coo_array((data, coords), shape=csr.shape).tocsr()
    return HeldOut(train, cells, values)


def _allowed(shape: Sequence[int]) -> str:
    """Return the start of messages about cells of an array that are named."""
    return CELLS if len(shape) == 2 else TENSOR_CELLS.format(tuple(shape), len(shape))


def _named_cells(selection: Any, shape: Sequence[int]) -> tuple[NDArray[np.int64], ...]:
    """Return the positions of cells in the order in which they are named, each of them once."""
    cells = cells_at(selection, shape, _allowed(shape))
    if not cells[0].size:
        raise OptionError("cells names no cell; name at least one, or pass a share instead")
    _, first = np.unique(np.ravel_multi_index(cells, tuple(shape)), return_index=True)
    return tuple(at[np.sort(first)] for at in cells)


def _not_observed(cells: Sequence[NDArray[Any]], is_missing: NDArray[np.bool_]) -> OptionError:
    first = tuple(int(at[is_missing][0]) for at in cells)
    return OptionError(
        f"{np.count_nonzero(is_missing)} of the cells to hold out are missing in V, the first at "
        f"position {first}; name cells that V has values at"
    )


def find_cells(
    numbers: NDArray[Any], requested: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the positions of requested cells among numbers, and a mask of the absent ones."""
    order = np.argsort(numbers)
    place = np.searchsorted(numbers, requested, sorter=order)
    if not numbers.size:
        return np.zeros(requested.size, np.int64), np.ones(requested.size, bool)
    positions = order[np.minimum(place, numbers.size - 1)].astype(np.int64)
    return positions, numbers[positions] != requested


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
    observed: Sequence[NDArray[Any]],
    shape: tuple[int, ...],
    selection: Any,
    keep_one: bool,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Return the positions of the entries to take: ascending, or in the order of named cells."""
    size = observed[0].size
    if not isinstance(selection, float):
        cells = _named_cells(selection, shape)
        numbers, requested = (np.ravel_multi_index(tuple(at), shape) for at in (observed, cells))
        positions, is_absent = find_cells(numbers, requested)
        if is_absent.any():
            raise _not_observed(cells, is_absent)
        return positions
    count = round(selection * size)
    order = rng.permutation(size)
    if keep_one:
        is_train = np.zeros(size, bool)
        for index in observed:  # the first in random order at every position of an axis
            is_train[order[np.unique(index[order], return_index=True)[1]]] = True
        order = order[~is_train[order]]
    if not count > 0 or not order.size:
        raise OptionError(
            f"share={selection!r} of {size} observed entries leaves none to hold out; raise "
            "it, or pass keep_one=False and fit with allow_empty=True"
        )
    return np.sort(order[:count]).astype(np.int64)
