"""Weights of cells: one weight for every cell, from an argument of `as_blocks`.

    q_ij = 1 / sigma_ij**2  for uncertainties,    q_ij = w_ij  for weights

A cell of weight 0 is missing. Weights of a dense matrix are a dense matrix on the same grid, read
chunk by chunk; weights of sparse blocks are looked up for the entries that these store.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from daskfactor.checks import input_name, is_number, match_labels, nearly_same
from daskfactor.data.adapters import Source, from_numpy, from_xarray
from daskfactor.data.blocks import BlockedData, lookup
from daskfactor.data.grid import Block, Grid
from daskfactor.data.loading import UNCERTAINTY, WEIGHTS, weights_of
from daskfactor.data.opening import open_source
from daskfactor.data.sparse import LoadOptions, block_of
from daskfactor.data.statistics import Layout, SourceInfo, StatisticsBuilder, Weighing, stored_cells
from daskfactor.data.storage import FloatArray, FloatType, Storage
from daskfactor.data.tables import ReadOptions
from daskfactor.errors import DataError, OptionError
from daskfactor.kernels.views import SparseBlock

ValuesAt = Callable[[Any, Any], Any]
"""Function from the caller's rows and columns of cells to values."""


class StoredWeights(NamedTuple):
    """Weights of existing blocks, as the argument ``weights`` of `as_blocks`."""

    kind: str
    values: Any


@dataclass(frozen=True)
class CellWeights:
    """The argument ``uncertainty`` or ``weights`` for the cells of a matrix.

    Attributes
    ----------
    kind
        ``"uncertainty"`` or ``"weights"``, the meaning of the values.
    values
        The argument that was passed.
    rule
        Conversion to weights, see `weights_of`.
    """

    kind: str
    values: Any
    rule: str

    def refuse(self, source: Source, dtype: FloatType, value: ValuesAt) -> Weighing:
        """Return the kind of the weights, and the error for an observed cell without any."""

        def error(row: int, col: int) -> DataError:
            got = np.ma.asarray(value(row, col)).reshape(-1)[0]
            name, allowed, remedy = "weight", "a finite number of at least 0", "0"
            if self.rule == UNCERTAINTY:
                name, allowed, remedy = "uncertainty", "a positive number", "infinity"
            return DataError(
                f"the {name} at {source.labels.cell(row, col)} is {got}, where V is observed; it "
                f"must be {allowed}, in the range of {dtype}; {remedy} makes a cell missing"
            )

        return Weighing(self.kind, error)

    def open(self, source: Source) -> Source:
        """Open the values as a matrix with the shape of the ``source`` that they belong to.

        Raises
        ------
        DataError
            If it is not such a matrix.
        """
        values, shape = self.values, source.shape
        assert shape is not None
        if isinstance(values, tuple):
            weights = self._of_pair(shape)
        elif type(values).__name__ == "DataArray" and source.stacking is not None:
            # `like` has compared the labels of every dimension.
            weights = replace(source.stacking.like(values, self.kind), labels=source.labels)
        elif type(values).__name__ == "DataArray":
            weights = from_xarray(self._like(source))
        elif is_number(values) or (type(values) is np.ndarray and values.ndim != 1):
            try:
                weights = from_numpy(np.broadcast_to(values, shape))
            except ValueError:
                raise self._unfit(f"shape {np.shape(values)}", source) from None
        elif np.ndim(values) == 1:
            raise self._unfit(f"shape {np.shape(values)}", source)
        else:
            weights = open_source(values, ReadOptions(table=False))
        if weights.shape != shape:
            raise self._unfit(f"shape {weights.shape}", source)
        self._agree(weights, source)
        return replace(weights, labels=source.labels)

    def _of_pair(self, shape: tuple[int, int]) -> Source:
        """Return the matrix of products of a row vector and a column vector."""
        rows, cols = self.vectors(shape)
        return Source(SourceInfo("numpy"), shape, read=lambda r, c: np.outer(rows[r], cols[c]))

    def vectors(self, shape: tuple[int, int]) -> tuple[FloatArray, FloatArray]:
        """Return the vector for rows and the vector for columns."""
        vectors = tuple(np.asarray(part, np.float64) for part in self.values)
        if tuple(part.shape for part in vectors) != ((shape[0],), (shape[1],)):
            raise DataError(
                f"a pair of vectors as {self.kind} must have one number for each of the "
                f"{shape[0]} rows and one for each of the {shape[1]} columns, got shapes "
                f"{' and '.join(str(part.shape) for part in vectors)}"
            )
        return vectors[0], vectors[1]

    def _like(self, source: Source) -> Any:
        """Return the DataArray with the dimensions of V in its order, missing ones added."""
        assert source.shape is not None
        dims = (source.labels.row_dim, source.labels.col_dim)
        if not set(self.values.dims) <= set(dims):
            raise self._unfit(f"dimensions {self.values.dims}", source)
        sizes = dict(zip(dims, source.shape, strict=True))
        missing = {dim: size for dim, size in sizes.items() if dim not in self.values.dims}
        return self.values.expand_dims(missing).transpose(*dims)

    def _agree(self, weights: Source, source: Source) -> None:
        """Refuse labels that differ from the labels of V."""
        pairs = zip(weights.labels.keys, source.labels.keys, strict=True)
        for axis, (labels, data_labels) in zip(("row", "column"), pairs, strict=True):
            if labels is None or data_labels is None:
                continue
            positions = match_labels(labels, data_labels).at
            if not (
                np.array_equal(positions, np.arange(positions.size))
                or nearly_same(labels, data_labels)
            ):
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


def cell_weights(uncertainty: Any, weights: Any) -> CellWeights | None:
    """Return the weights of cells that one of the two arguments gives; None without any."""
    if uncertainty is not None and weights is not None:
        raise OptionError(
            "uncertainty and weights were both given; pass one of them: an uncertainty of sigma is "
            "a weight of 1 / sigma**2 at dispersion 1"
        )
    if isinstance(weights, StoredWeights):
        return CellWeights(weights.kind, weights.values, WEIGHTS)
    if uncertainty is not None:
        return CellWeights(UNCERTAINTY, uncertainty, UNCERTAINTY)
    return None if weights is None else CellWeights(WEIGHTS, weights, WEIGHTS)


class Pairing:
    """Weights of the entries that sparse blocks store, looked up while these are made.

    They are compressed rows of the same pattern, which share the pattern's memory.
    """

    def __init__(
        self, request: CellWeights, source: Source, options: LoadOptions, grid: Grid, layout: Layout
    ) -> None:
        dtype, opened = options.dtype, request.open(source)
        if request.kind == UNCERTAINTY and options.zeros:
            raise OptionError(
                "uncertainty= needs a value for every observed cell, but implicit zeros have none; "
                'pass unstored="missing" (if unknown), a dense matrix, or weights='
            )
        self._rule, self._dtype, self._grid, self._layout = request.rule, dtype, grid, layout
        self._at = _lookup_of(request, opened)
        weights_layout = Layout("missing", layout.row_order, layout.col_order)
        self.weighing = request.refuse(source, dtype, self._at)
        self._info = replace(opened.info, rule=request.rule)
        self._storage = Storage(grid, "missing", budget=options.limit)
        self._builder, self._lock = (
            StatisticsBuilder(grid, source.labels, weights_layout),
            threading.Lock(),
        )

    def take(self, block: Block, view: SparseBlock) -> SparseBlock:
        """Return the block with its weights; entries of weight 0 are missing."""
        rows, cols = stored_cells(view)
        corner = [np.int64(part.start) for part in self._grid.slices(block)]
        raw = self._at(*self._layout.callers(rows + corner[0], cols + corner[1]))
        weights = weights_of(raw, self._rule, self._dtype)
        if (weights == 0).any():
            values = np.where(weights == 0, np.nan, view.values).astype(view.values.dtype)
            shape = self._grid.block_shape(block)
            view, stored_weights = (
                block_of(view.indptr, view.indices, values, shape, view.zeros),
                weights,
            )
            weights = stored_weights if view.zeros else stored_weights[stored_weights != 0]
        with self._lock:
            weights_view = view._replace(values=weights, zeros=False)
            self._builder.scan(block, weights_view)
        self._storage.put(block, weights_view)
        return view._replace(weights=weights)

    def finish(self) -> BlockedData:
        """Return the weights of all blocks."""
        info = self._builder.finish(self._info, self._dtype, allow_empty=True)
        return BlockedData(info, self._storage)


def _lookup_of(request: CellWeights, source: Source) -> ValuesAt:
    """Return the function that gives values at cells, NaN where a sparse matrix stores none.

    Raises
    ------
    OptionError
        If it is not in memory.
    """
    if isinstance(request.values, tuple):
        assert source.shape is not None
        by_row, by_col = request.vectors(source.shape)
        return lambda rows, cols: by_row[rows] * by_col[cols]
    if source.matrix is not None:
        return lookup(source.matrix(False).tocsr(), np.nan)
    array = source.array
    if array is None:
        raise OptionError(
            f"{request.kind} of a sparse matrix must be sparse with the entries that it stores, or "
            "an array, both in memory, or a pair of vectors (rows, columns), got "
            f"{input_name(request.values)}, which is not in memory; pass its contents as a scipy "
            "matrix"
        )
    return lambda rows, cols: array[rows, cols]
