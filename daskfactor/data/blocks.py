"""A data matrix as a grid of decoded blocks, with the statistics of one pass over it.

Pickling it passes a small handle, which another process opens. Data in a store, or in a dense zarr
array, that other processes can open are read from there, block by block. Everything else is written
once to a file in dask's ``temporary-directory``, which the processes of the same machine map, so
that they share its pages.
"""

import contextlib
import hashlib
import os
import pickle
import socket
import threading
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from daskfactor.checks import Cells, cells_at
from daskfactor.data.grid import Block, inverse
from daskfactor.data.labels import Labels
from daskfactor.data.loading import WEIGHTS, Decoder, as_weights, mask_zero_weights, read
from daskfactor.data.statistics import DataInfo, WeightSums, stored_cells
from daskfactor.data.storage import (
    ArrayFile,
    Extent,
    FloatArray,
    FloatType,
    Storage,
    block_bytes,
    scratch_directory,
    sweep,
)
from daskfactor.data.store import BlockStore
from daskfactor.errors import OptionError, StoreError
from daskfactor.kernels.views import AnyBlock, BlockView, SparseBlock
from daskfactor.machine import memory_budget
from daskfactor.urls import Location

MAX_MISSING = 10_000_000
MAX_DENSE = 2**28
MAX_OPEN = 4
"""Number of shared data sets that a process keeps open."""
CELLS = "cells are integer positions of rows and columns"


class BlockedData:
    """A matrix of I rows and J columns on a B x B grid of blocks.

    Dense blocks are float arrays, NaN where missing; sparse ones are compressed
    rows (`SparseBlock`), and ``unstored`` says what an entry means that they do
    not store.

    Made by `as_blocks`. Reading is safe from several threads at once. Use it as
    a context manager, or call `close`, to give a scratch file back early; it
    goes in any case when the object does, however the process ends.

    Attributes
    ----------
    known : DataInfo
        Description of the data without the blocks.
    grid : Grid
        Row bands and column bands.
    shape : tuple of int
        (I, J).
    labels : Labels
        Dimension names and coordinates of the input, in the caller's order.
    statistics : Statistics
        Counts, moments and extremes.
    source : SourceInfo
        Kind and location of the input.
    dtype : numpy.dtype
        float32 or float64, the type of every block.
    is_sparse : bool
        True if blocks hold compressed rows.
    unstored : str or None
        ``"zero"``, ``"missing"``, or None if blocks are dense; ``"mixed"`` where they differ.
    row_order, col_order : numpy.ndarray or None
        The caller's row and column at each position of the grid, None if they
        were not permuted. Blocks, ``row_observed`` and ``col_observed`` are in
        the order of the grid, labels and all cells in that of the caller.
    n_stored, n_observed : numpy.ndarray
        Entries that every block stores, missing ones among them, and observed ones, (B, B).
    row_observed, col_observed : numpy.ndarray
        Observed entries of every row, (I,), and of every column, (J,).
    total_observed, n_missing : int
        Observed and missing entries of the whole matrix.
    total, mean, minimum, maximum : float
        Of the observed values.
    variance : float or None
        Variance that priors assume for the data; None: the actual one.
    is_integer : bool
        True if all observed values are whole numbers.
    fingerprint : str
        Shape, observed entries and a checksum of the decoded blocks, whatever the source.
    weights : BlockedData or None
        Weights of the cells, if they have any, on the same grid and in the same order: of
        sparse blocks those of stored entries. They do not enter the statistics above, except
        that a cell of weight 0 is missing.
    weighting : str or None
        Kind of the weights: ``"uncertainty"`` (one over the variance) or ``"weights"`` (factors of
        the log-likelihood).
    mass : WeightSums
        Sums of the weights of observed cells, of blocks, rows and columns in the order of the
        grid; without weights the numbers of observed entries.
    total_mass : float
        Sum over the matrix.
    """

    def __init__(
        self, info: DataInfo, storage: Storage, weights: "BlockedData | None" = None
    ) -> None:
        self.grid, self.labels, statistics, self.source, self.dtype, layout = info
        self.shape = self.grid.shape
        self.statistics = statistics
        same_everywhere = layout.unstored is None or isinstance(layout.unstored, str)
        self.unstored: Any = layout.unstored if same_everywhere else "mixed"
        self.is_balanced = layout.row_order is not None
        self.is_sparse = self.unstored is not None
        self.n_observed = statistics.n_observed
        self.total_observed = int(statistics.n_observed.sum())
        self.n_missing = self.grid.cells - self.total_observed
        self.total = statistics.total
        self.mean = self.total / max(1, self.total_observed)
        self.variance: float | None = None
        self.minimum = statistics.minimum
        self.maximum = statistics.maximum
        self.is_integer = statistics.is_integer
        self.fingerprint = statistics.fingerprint
        stored = statistics.n_stored
        self.n_stored = self.grid.areas if stored is None else stored
        self.weights, self.weighting = weights, statistics.kind
        mass: Any = self.n_observed if statistics.mass is None else statistics.mass.blocks
        self._mass_blocks, self.total_mass = mass, float(mass.sum())
        if weights is not None:
            self.fingerprint += f" {self.weighting} {weights.fingerprint}"
        self.known = info
        self._storage = storage
        self._finalizer = weakref.finalize(self, storage.close)
        self._handle: DataHandle | None = None
        self._unshare: weakref.finalize[..., Any] | None = None

    @property
    def placed(self) -> dict[str, Any] | None:
        """Return the relations and factors of several matrices, as results keep them; else None."""
        return None

    @property
    def level(self) -> float:
        """Return the scale of the values for priors of non-negative factors: their mean.

        Half the largest value if the mean is not positive, as for centred data.
        """
        return float(self.mean if self.mean > 0 else max(self.mean, self.maximum / 2.0))

    # Counts and orders of a store have one number per row, so they are read only on demand.

    def counts(self, factor: int) -> Any:
        """Return the observed entries of rows (0) or columns (1); read lazily from a store."""
        return (self.statistics.row_observed, self.statistics.col_observed)[factor]

    @property
    def row_observed(self) -> NDArray[np.int64]:
        return np.asarray(self.counts(0))

    @property
    def col_observed(self) -> NDArray[np.int64]:
        return np.asarray(self.counts(1))

    @property
    def row_order(self) -> NDArray[np.int64] | None:
        return np.asarray(self.known.layout.row_order) if self.is_balanced else None

    @property
    def col_order(self) -> NDArray[np.int64] | None:
        return np.asarray(self.known.layout.col_order) if self.is_balanced else None

    def order(self, axis: int) -> NDArray[np.int64] | slice:
        """Return an index that puts the caller's rows (or columns) in the grid's order."""
        order = (self.row_order, self.col_order)[axis]
        return slice(None) if order is None else order

    @property
    def mass(self) -> WeightSums:
        counts: Any = self.row_observed, self.col_observed
        return self.statistics.mass or WeightSums(self.n_observed, *counts, *counts)  # type: ignore[arg-type]

    @cached_property
    def observed_key(self) -> bytes:
        """Return `n_observed` as bytes, int64 row by row: one object, hashed once."""
        return np.ascontiguousarray(self.n_observed, np.int64).tobytes()

    @cached_property
    def mass_key(self) -> bytes:
        """Return the weights of observed cells by block as bytes, float64 row by row."""
        return np.ascontiguousarray(self._mass_blocks, np.float64).tobytes()

    @property
    def effective(self) -> float:
        """Return the number of observed cells, by weight if weights count repetitions."""
        return self.total_mass if self.weighting == WEIGHTS else self.total_observed

    @property
    def in_memory(self) -> bool:
        """Return whether blocks are in memory, not in a scratch file."""
        return self._storage.in_memory

    @property
    def place(self) -> str:
        """Return the location of the blocks, for logs."""
        return self._storage.place

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of every block with its weights, (B, B)."""
        n_stored = self.n_stored if self.is_sparse else None
        copies = 1 if self.weights is None else 2
        return copies * block_bytes(self.grid, self.dtype, n_stored)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all blocks, in memory or on disk."""
        return int(self.sizes.sum())

    @property
    def resident(self) -> int:
        """Return the bytes of memory that all blocks take once read, without the caller's array."""
        if self.weights is None:
            return min(self.nbytes, self._storage.budget)
        return min(self.nbytes // 2, self._storage.budget) + self.weights.resident

    @property
    def imbalance(self) -> float:
        """Return the largest number of stored entries in a block over the mean; 1 is even."""
        stored = self.n_stored
        return float(stored.max() / stored.mean()) if stored.any() else 1.0

    def view(self, *bands: int) -> AnyBlock:
        """Return block (row, col) for reading: a `SparseBlock`, or a `BlockView` if dense.

        A block from a scratch file is read into memory of the calling thread that the thread's next
        call overwrites. Blocks in memory are not copied. Never write to a block.
        """
        view = self._storage.view(*bands)
        if self.weights is None:
            if isinstance(view, BlockView) and self.n_observed[bands] == view.m * view.n:
                return view._replace(complete=True)
            return view
        weights = self.weights.view(*bands)
        return view._replace(
            weights=weights.values if isinstance(weights, SparseBlock) else weights.block
        )

    def missing_cells(self) -> Cells:
        """Return row and column indices of all missing entries, in row-major order.

        Raises
        ------
        OptionError
            If unstored entries are missing and more than 10 million of them are.
        """
        others = self.unstored == "missing"
        if others and self.n_missing > MAX_MISSING:
            raise OptionError(
                f"{self.n_missing} cells are missing, too many to list (at most {MAX_MISSING}); "
                "name the cells that you want, as (rows, columns)"
            )
        stored = []
        for block in self.grid.all_blocks():
            view = self.view(*block)
            if isinstance(view, BlockView):
                rows, cols = np.nonzero(np.isnan(view.block))
            elif others:
                rows, cols = stored_cells(view)
            else:
                rows, cols = (index[np.isnan(view.values)] for index in stored_cells(view))
            rows, cols = self._callers(block, rows, cols)
            stored.append(rows * self.shape[1] + cols)
        cells = np.concatenate(stored)
        cells.sort()
        if others:  # the k-th stored cell lies behind cells[k] - k missing ones
            missing = np.arange(self.n_missing)
            cells = missing + np.searchsorted(cells - np.arange(cells.size), missing, side="right")
        rows, cols = np.divmod(cells, self.shape[1])
        return rows, cols

    def values(self, rows: ArrayLike, cols: ArrayLike) -> FloatArray:
        """Return the entries at some cells, NaN where missing; reads every block at most once."""
        (row_band, row), (col_band, col) = map(
            self._placed, cells_at((rows, cols), self.shape, CELLS), (0, 1)
        )
        owner = row_band * self.grid.blocks + col_band
        out = np.full(row.size, np.nan, self.dtype)
        order = np.argsort(owner, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(owner[order])) + 1):
            if group.size:
                cells = row[group], col[group]
                view = self.view(int(row_band[group[0]]), int(col_band[group[0]]))
                if isinstance(view, BlockView):
                    out[group] = view.block[cells]
                else:
                    others = self.dtype.type(0 if view.zeros else np.nan)
                    out[group] = lookup(as_scipy(view), others)(*cells)
        return out

    def to_numpy(self) -> FloatArray:
        """Return the matrix as one new array in the caller's order, NaN where missing.

        Raises
        ------
        OptionError
            If blocks are sparse and the array would have more than 2^28 entries.
        """
        rows, cols = self.shape
        if self.is_sparse and rows * cols > MAX_DENSE:
            raise OptionError(
                f"a dense array of {rows} x {cols} = {_short(rows * cols)} entries is too large "
                f"(at most {_short(MAX_DENSE)}); use observed_sparse(), or values(rows, cols)"
            )
        out = np.full(self.shape, 0 if self.unstored == "zero" else np.nan, self.dtype)
        for block in self.grid.all_blocks():
            view, (row_part, col_part) = self.view(*block), self.grid.slices(block)
            if isinstance(view, BlockView) or self.unstored == "mixed":
                every = np.ogrid[row_part, col_part]
                out[self.known.layout.callers(*every)] = _dense(view)
            else:
                out[self._callers(block, *stored_cells(view))] = view.values
        return out

    def observed_sparse(self) -> Any:
        """Return the stored entries as a scipy ``csr_array`` in the caller's order.

        Entries that are missing although stored are NaN in it, so that `as_blocks` with the same
        ``unstored`` makes the same blocks again.

        Raises
        ------
        OptionError
            If blocks are dense.
        """
        from scipy import sparse

        index = np.int32 if max(self.shape) < 2**31 else np.int64
        parts = []
        for block in self.grid.all_blocks():
            view = self.view(*block)
            if isinstance(view, BlockView):
                raise OptionError("these blocks are dense; use to_numpy(), NaN where missing")
            rows, cols = self._callers(block, *stored_cells(view))
            parts.append((rows.astype(index), cols.astype(index), view.values.copy()))
        rows, cols, values = (np.concatenate(part) for part in zip(*parts, strict=True))
        parts.clear()
        return sparse.coo_array((values, (rows, cols)), shape=self.shape).tocsr()

    def describe(self) -> str:
        """Return one line for logs: shape, entries, grid, balance, type and place."""
        rows, cols = self.shape
        entries, balance = _short(rows * cols), ""
        if self.is_sparse:
            marked = self.n_missing if self.unstored == "zero" else 0
            aside = f", {_short(marked)} of them missing" if marked else ""
            order = ", rows and columns permuted" if self.is_balanced else ""
            contents = (
                f" sparse, {_short(int(self.n_stored.sum()))} stored of {entries}{aside} (others "
                f"{self.unstored})"
            )
            balance = f" (largest {self.imbalance:.2f} times the mean{order})"
        elif self.n_missing:
            contents = f", {_short(self.total_observed)} observed of {entries}"
        else:
            contents = f", all {entries} observed"
        blocks = self.grid.blocks
        grid = f"{blocks} x {blocks} blocks{balance}" if blocks > 1 else "one block"
        weighting = "" if self.weighting is None else f", with {self.weighting} of cells"
        return f"{rows} x {cols}{contents}{weighting}, {grid}, {self.dtype} {self.place}"

    def refuse_weights(self, consumer: str, other: str = "use sample() or optimize()") -> None:
        """Raise OptionError if cells have weights, which ``consumer`` does not support."""
        if self.weighting is not None:
            raise OptionError(
                f"{consumer} takes no {self.weighting} of cells, and these data have some; pass "
                f"data without, or {other}"
            )

    def share(self) -> "DataHandle":
        """Return a small handle by which other processes read these data; see `open_shared`.

        A shared file is written once. It is removed by `unshare`, by `close`, with these data, or
        with this process.

        Raises
        ------
        StoreError
            If there is no room for it.
        """
        if self._handle is None:
            handle, file = _shared(self.known, self._storage)
            if file is not None:
                self._unshare = weakref.finalize(self, file.remove)
            weights = None if self.weights is None else self.weights.share()
            self._handle = handle._replace(weights=weights)
        return self._handle

    def unshare(self) -> None:
        """Remove the file that was written for other processes."""
        if self._unshare is not None:
            self._unshare()
            self._handle = self._unshare = None
        if self.weights is not None:
            self.weights.unshare()
            self._handle = None

    def close(self) -> None:
        """Free the scratch file or the cache; the blocks cannot be read afterwards."""
        self.unshare()
        self._finalizer()
        if self.weights is not None:
            self.weights.close()

    def __reduce__(self) -> Any:
        """Pickle the handle; another process opens it once and reads the blocks it needs."""
        return open_shared, (self.share(),)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<BlockedData {self.describe()}>"

    def _callers(self, block: Block, rows: NDArray[Any], cols: NDArray[Any]) -> Cells:
        """Return cells of a block in the caller's row and column numbers."""
        row_part, col_part = self.grid.slices(block)
        rows, cols = rows + np.int64(row_part.start), cols + np.int64(col_part.start)
        return self.known.layout.callers(rows, cols)

    def _placed(self, at: NDArray[np.int64], axis: int) -> Cells:
        """Return the bands of the caller's rows (or columns), and their positions in the bands."""
        order = (self.row_order, self.col_order)[axis]
        place = at if order is None else inverse(order)[at]
        offsets = np.array((self.grid.rows, self.grid.cols)[axis].offsets)
        band = np.searchsorted(offsets, place, side="right") - 1
        return band, place - offsets[band]


class DataHandle(NamedTuple):
    """Reference by which another process reads blocked data.

    ``token`` identifies the data. ``kind`` is ``"file"`` (on this machine), ``"zarr"`` or
    ``"store"`` (by location). ``facts`` is the description of the data, or its extent in the file.
    ``weights`` is the handle of the weights of cells.
    """

    token: str
    kind: str
    location: str
    dtype: str
    facts: DataInfo | Extent | None
    weights: "DataHandle | None" = None

    @property
    def key(self) -> str:
        """Return the token of the data with their weights."""
        return self.token if self.weights is None else f"{self.token} {self.weights.token}"


Blocked = TypeVar("Blocked", bound=BlockedData)

_opened: OrderedDict[str, BlockedData] = OrderedDict()
_lock = threading.RLock()

blocks_budget: Callable[[], int | None] = partial(memory_budget, None)
"""Function that returns the bytes for decoded blocks of shared data; set on workers."""


def open_shared(handle: DataHandle, memory_limit: int | None = None) -> BlockedData:
    """Return the data of a handle, reused if this process still has them open.

    Decoded blocks take up to ``memory_limit`` bytes, by default `blocks_budget`. A file on this
    machine is mapped and needs none.

    Raises
    ------
    StoreError
        If this process cannot read the data, or they have changed (of a dense
        zarr array, only a change of its shape is noticed).
    """
    with _lock:
        data = _opened.get(handle.key)
        if data is None:
            reader = {"file": _mapped, "zarr": _from_zarr, "store": _from_store}[handle.kind]
            limit = memory_budget(blocks_budget() if memory_limit is None else memory_limit)
            weights = None
            if handle.weights is not None:
                limit //= 2
                weights = open_shared(handle.weights, limit)
            data = reader(handle, limit, weights)
            data._handle = handle
            _opened[handle.key] = data
        _opened.move_to_end(handle.key)
        while len(_opened) > MAX_OPEN:
            _opened.popitem(last=False)  # closed when its last reference is gone
        return data


def open_store(store: BlockStore, dtype: FloatType, budget: int) -> BlockedData:
    """Return the blocks of a store, read on demand and cached as far as ``budget`` allows."""
    return BlockedData(store.known._replace(dtype=dtype), store.blocks(dtype, budget))


def filled(
    storage: Storage,
    fill: Callable[[], DataInfo],
    weights: Callable[[], BlockedData | None] = lambda: None,
    make: type[Blocked] = BlockedData,  # type: ignore[assignment]
) -> Blocked:
    """Return data whose storage ``fill`` fills; the storage is closed on failure.

    ``weights`` returns the weights of the cells afterwards; ``make`` is the class of the data.
    """
    try:
        return make(fill(), storage, weights())
    except BaseException:
        storage.close()
        raise


def _shared(info: DataInfo, storage: Storage) -> tuple[DataHandle, ArrayFile | None]:
    """Make blocked data readable by other processes; return the handle and any new file."""
    dtype, location = info.dtype.name, info.source.location
    if location is not None and not location.startswith("memory:"):
        token = _token(location, info.statistics.fingerprint, dtype)
        if storage.load is not None:
            return DataHandle(token, "store", location, dtype, None), None
        if info.source.kind in ("zarr", "npy"):
            return DataHandle(token, "zarr", location, dtype, info), None
    token = uuid.uuid4().hex
    sweep(scratch_directory())
    file = ArrayFile(named=True)
    try:
        blocks = Storage(info.grid, file=file)
        for block in info.grid.all_blocks():
            blocks.put(block, storage.view(*block))
        # A location may carry credentials, which must not be written to a file.
        public_info = info
        if location is not None:
            public_info = info._replace(source=replace(info.source, location=str(location)))
        index = pickle.dumps((token, public_info, blocks.extents))
        extent = file.append(np.frombuffer(index, np.uint8))
    except BaseException:
        file.remove()
        raise
    return DataHandle(token, "file", file.path, dtype, extent), file


def _token(location: str, fingerprint: str, dtype: str) -> str:
    """Return an identifier that is equal for equal data, so that a worker opens them once."""
    return hashlib.blake2b(f"{location}\x00{fingerprint}\x00{dtype}".encode()).hexdigest()[:32]


def _mapped(handle: DataHandle, budget: int, weights: BlockedData | None) -> BlockedData:
    assert isinstance(handle.facts, Extent)
    try:
        with contextlib.closing(ArrayFile(path=handle.location)) as file:
            raw = file.read([handle.facts])[0].tobytes()
            # Unpickling is safe: another process of this user has just written the file.
            token, info, extents = pickle.loads(raw)
            if token != handle.token:
                raise ValueError("it is another file")
            storage = Storage(info.grid, info.layout.unstored)
            storage.map(file, extents)
    except (OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise StoreError(
            f"{_worker_name()} cannot read the shared data at {handle.location}: data in the "
            "client's memory can only be shared with workers on the same machine, for as long as "
            "the client lives; for workers elsewhere make a store that all of them can read, with "
            "daskfactor convert, and pass its location"
        ) from error
    return BlockedData(info, storage, weights)


def _from_zarr(handle: DataHandle, budget: int, weights: BlockedData | None) -> BlockedData:
    from daskfactor.data.opening import open_source  # circular at module level

    info = handle.facts
    assert isinstance(info, DataInfo)
    grid, dtype = info.grid, info.dtype
    try:
        source = open_source(Location(handle.location))
    except StoreError as error:
        raise _unreachable(handle, error) from error
    if source.is_sparse or source.shape != grid.shape:
        raise StoreError(
            f"the array at {handle.location} is not the one that was shared: its shape is "
            f"{source.shape}, not {grid.shape}; leave it as it is while a run reads it"
        )
    if info.source.rule is not None:
        source = as_weights(source, info.source.rule, dtype)

    def load(block: Block) -> BlockView:
        rows, cols = grid.slices(block)
        raw = read(source, (rows, cols))
        values = Decoder(dtype, Labels()).decode(raw, rows.start, cols.start)
        if weights is not None and weights.minimum == 0:
            values = mask_zero_weights(values, weights.view(*block).block)  # type: ignore[union-attr]
        return BlockView(np.require(values, requirements=["C", "W"]), 0, 0, *values.shape)

    nbytes = grid.shape[0] * grid.shape[1] * dtype.itemsize
    return BlockedData(info, Storage(grid, load=load, nbytes=nbytes, budget=budget), weights)


def _from_store(handle: DataHandle, budget: int, weights: BlockedData | None) -> BlockedData:
    del weights  # a matrix with weights is never read from its store directly
    try:
        store = BlockStore(Location(handle.location))
    except StoreError as error:
        raise _unreachable(handle, error) from error
    if _token(handle.location, store.known.statistics.fingerprint, handle.dtype) != handle.token:
        raise StoreError(
            f"the store at {handle.location} is not the one that was shared: its blocks are "
            "others; leave it as it is while a run reads it"
        )
    return open_store(store, np.dtype(handle.dtype), budget)


def _worker_name() -> str:
    return f"the worker in process {os.getpid()} on {socket.gethostname()}"


def _unreachable(handle: DataHandle, error: StoreError) -> StoreError:
    return StoreError(
        f"{_worker_name()} cannot open the data at {handle.location}, which the client reads from: "
        f"{error}; put them where all workers can read them under one location"
    )


def _dense(view: AnyBlock) -> FloatArray:
    """Return a block as an array, NaN where missing."""
    if isinstance(view, BlockView):
        block: FloatArray = view.block
        return block
    out = np.full((view.m, view.n), 0 if view.zeros else np.nan, view.values.dtype)
    out[stored_cells(view)] = view.values
    return out


def as_scipy(view: SparseBlock, values: NDArray[Any] | None = None) -> Any:
    """Return a sparse block as compressed rows of scipy, with other ``values`` if passed."""
    from scipy import sparse

    pattern = view.indices.astype(np.int64), view.indptr.astype(np.int64)
    return sparse.csr_array((view.values if values is None else values, *pattern), view.shape)


def lookup(matrix: Any, default: Any) -> Callable[[NDArray[Any], NDArray[Any]], FloatArray]:
    """Return a function for the stored values of compressed rows at cells, else ``default``."""
    from scipy import sparse

    values = matrix.data
    numbers = np.arange(1, values.size + 1)
    table = sparse.csr_array((numbers, matrix.indices, matrix.indptr), shape=matrix.shape)

    def at(rows: NDArray[Any], cols: NDArray[Any]) -> FloatArray:
        if not values.size:
            return np.full(np.size(rows), default)
        number = np.asarray(table[rows, cols]).ravel()
        return np.asarray(np.where(number > 0, values[number - 1], default))

    return at


def _short(count: int) -> str:
    """Return a count with about three digits and a unit."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)
