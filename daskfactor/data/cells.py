"""Weights of cells: what a caller gives beside a matrix becomes one weight for every cell of it.

    q_ij = 1 / sigma_ij**2  for uncertainties,    q_ij = w_ij  for weights

A cell of weight 0 is missing. Weights of a dense matrix are a dense matrix on the same grid,
read as it is, chunk by chunk; those of sparse blocks are looked up for what these store.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from os import fspath
from typing import Any, NamedTuple

import numpy as np

from daskfactor.checks import is_number, match_labels, nearly_same
from daskfactor.data.adapters import Source, from_blocks, from_numpy, from_xarray
from daskfactor.data.blocks import BlockedData, lookup
from daskfactor.data.files import open_input
from daskfactor.data.grid import Block, Grid
from daskfactor.data.known import (
    Layout,
    SourceInfo,
    StatisticsBuilder,
    Weighing,
    stored_cells,
)
from daskfactor.data.loading import UNCERTAINTY, WEIGHTS, weights_of
from daskfactor.data.sparse import LoadOptions, block_of
from daskfactor.data.storage import FloatArray, FloatType, Storage
from daskfactor.data.store import BlockStore, is_blocked_store
from daskfactor.errors import DataError, OptionError
from daskfactor.kernels.views import SparseBlock

At = Callable[[Any, Any], Any]
"""Values at cells, as the caller numbers them."""


class StoredWeights(NamedTuple):
    """Weights as blocks hold them, for the argument ``weights`` of `as_blocks` to take again."""

    kind: str
    values: Any


@dataclass(frozen=True)
class Asked:
    """What a caller gave for the cells of a matrix.

    Attributes
    ----------
    kind
        ``"uncertainty"`` or ``"weights"``: what they mean.
    given
        What was passed.
    rule
        How it becomes weights, see `weights_of`.
    """

    kind: str
    given: Any
    rule: str

    def refuse(self, source: Source, dtype: FloatType, value: At) -> Weighing:
        """Give the kind of the weights, and the error for an observed cell without any."""

        def error(row: int, col: int) -> DataError:
            found = np.ma.asarray(value(row, col)).reshape(-1)[0]
            name, allowed, remedy = "weight", "a finite number of at least 0", "0"
            if self.rule == UNCERTAINTY:
                name, allowed, remedy = "uncertainty", "a positive number", "infinity"
            return DataError(
                f"the {name} at {source.labels.cell(row, col)} is {found}, where V is observed; it "
                f"must be {allowed}, in the range of {dtype}; {remedy} makes a cell missing"
            )

        return Weighing(self.kind, error)

    def opened(self, source: Source) -> Source:
        """Open what was given as a matrix of the shape of the ``source`` that it belongs to.

        Raises
        ------
        DataError
            If it is none.
        """
        given, shape = self.given, source.shape
        assert shape is not None
        if is_blocked_store(given):
            store = BlockStore(fspath(given))
            found = from_blocks(store.known, store.read)
        elif isinstance(given, tuple):
            found = self._of_pair(shape)
        elif type(given).__name__ == "DataArray" and source.fold is not None:
            # A fold has compared the labels of every dimension.
            found = replace(source.fold.like(given, self.kind), labels=source.labels)
        elif type(given).__name__ == "DataArray":
            found = from_xarray(self._like(source))
        elif is_number(given) or (type(given) is np.ndarray and given.ndim != 1):
            try:
                found = from_numpy(np.broadcast_to(given, shape))
            except ValueError:
                raise self._unfit(f"shape {np.shape(given)}", source) from None
        elif np.ndim(given) == 1:
            raise self._unfit(f"shape {np.shape(given)}", source)
        else:
            found = open_input(given)
        if found.shape != shape:
            raise self._unfit(f"shape {found.shape}", source)
        self._agree(found, source)
        return replace(found, labels=source.labels)

    def _of_pair(self, shape: tuple[int, int]) -> Source:
        """Products of one number for each row and one for each column."""
        rows, cols = self.vectors(shape)
        return Source(SourceInfo("numpy"), shape, read=lambda r, c: np.outer(rows[r], cols[c]))

    def vectors(self, shape: tuple[int, int]) -> tuple[FloatArray, FloatArray]:
        """Numbers for rows and for columns."""
        found = tuple(np.asarray(part, np.float64) for part in self.given)
        if tuple(part.shape for part in found) != ((shape[0],), (shape[1],)):
            raise DataError(
                f"a pair of vectors as {self.kind} must have one number for each of the "
                f"{shape[0]} rows and one for each of the {shape[1]} columns, got shapes "
                f"{' and '.join(str(part.shape) for part in found)}"
            )
        return found[0], found[1]

    def _like(self, source: Source) -> Any:
        """A DataArray with the dimensions of V, in its order; those that it lacks are added."""
        assert source.shape is not None
        dims = (source.labels.row_dim, source.labels.col_dim)
        if not set(self.given.dims) <= set(dims):
            raise self._unfit(f"dimensions {self.given.dims}", source)
        sizes = dict(zip(dims, source.shape, strict=True))
        missing = {dim: size for dim, size in sizes.items() if dim not in self.given.dims}
        return self.given.expand_dims(missing).transpose(*dims)

    def _agree(self, found: Source, source: Source) -> None:
        """Refuse labels that are not those of V."""
        pairs = zip(found.labels.keys, source.labels.keys, strict=True)
        for axis, (own, other) in zip(("row", "column"), pairs, strict=True):
            if own is None or other is None:
                continue
            at = match_labels(own, other).at
            if not (np.array_equal(at, np.arange(at.size)) or nearly_same(own, other)):
                raise DataError(
                    f"the {axis} labels of {self.kind} are not those of V, or in another "
                    "order; bring them into the order of V, for example with reindex_like(V)"
                )

    def _unfit(self, got: str, source: Source) -> DataError:
        labels, shape = source.labels, source.shape
        return DataError(
            f"{self.kind} must have the shape of V, {shape}, or be a DataArray with dimensions "
            f"among {labels.row_dim!r} and {labels.col_dim!r}, a pair of vectors (rows, columns) "
            f"whose product it is, or one number; got {got}"
        )


def asked(uncertainty: Any, weights: Any) -> Asked | None:
    """What was given for cells, of the two arguments that there are for it."""
    if uncertainty is not None and weights is not None:
        raise OptionError(
            "uncertainty and weights were both given; pass one of them: an uncertainty of sigma is "
            "a weight of 1 / sigma**2 at dispersion 1"
        )
    if isinstance(weights, StoredWeights):
        return Asked(weights.kind, weights.values, WEIGHTS)
    if uncertainty is not None:
        return Asked(UNCERTAINTY, uncertainty, UNCERTAINTY)
    return None if weights is None else Asked(WEIGHTS, weights, WEIGHTS)


class Pairing:
    """Weights of what sparse blocks store, looked up as these are made.

    They are compressed rows of the same pattern, which share the pattern's memory.
    """

    def __init__(
        self, given: Asked, source: Source, options: LoadOptions, grid: Grid, layout: Layout
    ) -> None:
        dtype, found = options.dtype, given.opened(source)
        if given.kind == UNCERTAINTY and options.zeros:
            raise OptionError(
                "uncertainty= needs a value for every observed cell, and zeros that are not stored "
                'have none; pass unstored="missing" (if unknown), a dense matrix, or weights='
            )
        self._rule, self._dtype, self._grid, self._layout = given.rule, dtype, grid, layout
        self._at = _pointwise(given, found)
        own = Layout("missing", layout.row_order, layout.col_order)
        self.weighing = given.refuse(source, dtype, self._at)
        self._info = replace(found.info, rule=given.rule)
        self._storage = Storage(grid, "missing", budget=options.limit)
        self._builder, self._lock = StatisticsBuilder(grid, source.labels, own), threading.Lock()

    def take(self, block: Block, view: SparseBlock) -> SparseBlock:
        """The block with its weights; what has weight 0 is missing."""
        rows, cols = stored_cells(view)
        corner = [np.int64(part.start) for part in self._grid.slices(block)]
        given = self._at(*self._layout.callers(rows + corner[0], cols + corner[1]))
        weights = weights_of(given, self._rule, self._dtype)
        if (weights == 0).any():
            values = np.where(weights == 0, np.nan, view.values).astype(view.values.dtype)
            shape = self._grid.block_shape(block)
            view, before = block_of(view.indptr, view.indices, values, shape, view.zeros), weights
            weights = before if view.zeros else before[before != 0]
        with self._lock:
            kept = view._replace(values=weights, zeros=False)
            self._builder.scan(block, kept)
        self._storage.put(block, kept)
        return view._replace(weights=weights)

    def finish(self) -> BlockedData:
        """The weights of all blocks."""
        known = self._builder.finish(self._info, self._dtype, allow_empty=True)
        return BlockedData(known, self._storage)


def _pointwise(given: Asked, source: Source) -> At:
    """Return the values at cells of what is in memory, NaN where a sparse matrix stores none.

    Raises
    ------
    OptionError
        If it is not in memory.
    """
    if isinstance(given.given, tuple):
        assert source.shape is not None
        by_row, by_col = given.vectors(source.shape)
        return lambda rows, cols: by_row[rows] * by_col[cols]
    if source.matrix is not None:
        return lookup(source.matrix(False).tocsr(), np.nan)
    array = source.array
    if array is None:
        raise OptionError(
            f"{given.kind} of a sparse matrix must be sparse with the entries that it stores, or "
            "an array, both in memory, or a pair of vectors (rows, columns), got "
            f"{type(given.given).__name__}, which is read from where it is; pass what is there as "
            "a scipy matrix"
        )
    return lambda rows, cols: array[rows, cols]
