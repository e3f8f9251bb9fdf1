"""One pass over a dense source: read, decode, cut into blocks, scan.

Neighbouring chunks are read together up to a budget, and every chunk once. Each region is written
to its blocks immediately, so that only one region is in memory at a time, whatever the chunks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import warn
from daskfactor.data.adapters import Source
from daskfactor.data.grid import Bands, Block, Grid
from daskfactor.data.labels import Labels
from daskfactor.data.staging import join_intervals
from daskfactor.data.statistics import (
    DENSE,
    DataInfo,
    Locate,
    StatisticsBuilder,
    Weighing,
    cell_name,
    check_dtype,
    check_shape,
    dense_cells,
    infinite,
)
from daskfactor.data.storage import FloatArray, FloatType, Storage, zero_copy
from daskfactor.errors import DaskfactorError, DataError, DataWarning, StoreError

Region = tuple[slice, slice]

MAX_READ = 2**24
MIN_READ = 2**20
UNCERTAINTY, WEIGHTS = "uncertainty", "weights"
"""Rules for weights of cells: from standard deviations, or the values themselves."""
LAZY_COPIES = 4
"""Copies of a chunk while it is decoded: compressed, decompressed and in the region."""


class Decoder:
    """Conversion of source values to floats, NaN where missing; counts lossy conversions."""

    def __init__(self, dtype: FloatType, labels: Labels) -> None:
        self._dtype = dtype
        self._labels = labels
        self._digits = np.finfo(dtype).nmant + 1
        self._rounded = 0
        self._vanished = 0

    def decode(self, raw: Any, row0: int, col0: int) -> FloatArray:
        """Return a piece with first cell (row0, col0) as floats, copied only if necessary."""
        root = type(raw).__module__.partition(".")[0]
        if root == "sparse" or (root == "scipy" and hasattr(raw, "toarray")):
            raise DataError(
                f"a piece of the data is sparse ({type(raw).__module__}.{type(raw).__name__}), but "
                "the array says that it is dense; name the kind of its pieces where you make it, "
                "for example map_blocks(..., meta=scipy.sparse.csr_array((0, 0)))"
            )
        mask = np.ma.getmaskarray(raw) if isinstance(raw, np.ma.MaskedArray) else None
        array: NDArray[Any] = np.asarray(raw)
        return self.convert(array, dense_cells(row0, col0, array.shape[1]), mask)

    def convert(
        self, array: NDArray[Any], locate: Locate, mask: NDArray[np.bool_] | None = None
    ) -> FloatArray:
        """Return entries as floats, NaN under ``mask``; ``locate`` gives the cell of an entry."""
        check_dtype(array.dtype)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            out: FloatArray = array.astype(self._dtype, order="C", copy=mask is not None)
        if mask is not None:
            out[mask] = np.nan
        if array.dtype.kind in "iu":
            self._count_rounded(array, mask)
        elif array.dtype.kind == "f" and array.dtype.itemsize > self._dtype.itemsize:
            self._check_narrowing(array, out, locate)
        return out

    def warn(self) -> None:
        """Warn once, after the pass, of values that the conversion rounded or lost."""
        small = self._dtype.itemsize < 8
        advice = 'pass dtype="float64" to as_blocks or convert' if small else "rescale the data"
        if self._rounded:
            warn(
                f"{self._rounded} integer entries above 2**{self._digits} were rounded, because "
                f"{self._dtype} cannot hold them exactly; {advice} if that matters",
                DataWarning,
            )
        if self._vanished:
            warn(
                f"{self._vanished} entries other than zero became zero, because they are too small "
                f"for {self._dtype}; {advice} if that matters",
                DataWarning,
            )

    def _count_rounded(self, array: NDArray[Any], mask: NDArray[np.bool_] | None) -> None:
        """Count integers that the float type cannot hold.

        An integer is exact if it has few enough binary digits without its trailing zeros.
        """
        if array.dtype.itemsize * 8 <= self._digits or not array.size:
            return
        if max(int(array.max()), -int(array.min())) <= 2**self._digits:
            return
        size = np.abs(array).astype(np.uint64)  # abs(int64 minimum) wraps to the right bits
        lowest_bit = size & (~size + np.uint64(1))
        inexact = ((size >> np.uint64(self._digits)) >= lowest_bit) & (size > 0)
        if mask is not None:
            inexact &= ~mask
        self._rounded += int(np.count_nonzero(inexact))

    def _check_narrowing(self, array: NDArray[Any], out: FloatArray, locate: Locate) -> None:
        overflown = np.isinf(out)
        if overflown.any():
            position = int(np.argmax(overflown))
            cell, value = locate(position), array.flat[position]
            if np.isinf(value):
                raise infinite(self._labels, cell, float(value))
            raise DataError(
                f"the entry at {cell_name(self._labels, cell)} is {value}, outside "
                f"the range of {self._dtype} (up to {np.finfo(self._dtype).max:.3g}); "
                'pass dtype="float64" to as_blocks or convert, or rescale the data'
            )
        self._vanished += int(np.count_nonzero((out == 0) & (array != 0)))


def weights_of(array: Any, rule: str, dtype: FloatType) -> FloatArray:
    """Return weights of cells: 1 / sigma**2 of standard deviations, or the values, by ``rule``.

    Unusable values become NaN: masked, NaN or negative ones, a standard deviation of zero, an
    infinite weight, and weights that ``dtype`` cannot hold.
    """
    values = np.ma.filled(np.ma.asarray(array, np.float64), np.nan)
    limits = np.finfo(dtype)
    with np.errstate(all="ignore"):
        weights = np.where(values > 0, values, np.nan) ** -2 if rule == UNCERTAINTY else values
        real = (weights >= limits.tiny) & (weights <= limits.max)
        zero = values == np.inf if rule == UNCERTAINTY else values == 0
        return np.where(zero, 0, np.where(real, weights, np.nan)).astype(dtype)


def as_weights(source: Source, rule: str, dtype: FloatType) -> Source:
    """Return a dense source whose entries are converted to weights of cells."""
    read = source.read
    assert read is not None
    return replace(
        source,
        info=replace(source.info, rule=rule),
        dtype=dtype,
        array=None,
        read=lambda rows, cols: weights_of(read(rows, cols), rule, dtype),
    )


def mask_zero_weights(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Return a copy of the values that is NaN where the weight is zero."""
    return np.where(weights == 0, values.dtype.type(np.nan), values)


def load(
    source: Source,
    grid: Grid,
    dtype: FloatType,
    storage: Storage,
    budget: int,
    allow_empty: bool = False,
    weights: Any = None,
    weighing: Weighing | None = None,
) -> DataInfo:
    """Fill ``storage`` from ``source``, reading at most about ``budget`` bytes at a time.

    ``weights`` are the weights of the cells on the same blocks; ``weighing`` describes them.
    """
    vanish = weights is not None and weights.minimum == 0
    decoder = Decoder(dtype, source.labels)
    builder = StatisticsBuilder(grid, source.labels, DENSE, weighing)
    if source.array is not None and zero_copy(source.array, dtype):
        storage.windows(source.array)
    else:
        for region in regions(source, grid, budget):
            rows, cols = region
            values = decoder.decode(read(source, region), rows.start, cols.start)
            for block, inside, outside in _cuts(grid, region):
                piece = values[outside]
                if vanish:
                    piece = mask_zero_weights(piece, weights.view(*block).block[inside])
                storage.write(block, inside, piece)
    for block in grid.all_blocks():
        view = storage.view(*block)
        if weights is not None:
            view = view._replace(weights=weights.view(*block).block)
        builder.scan(block, view)
    storage.forget()  # other threads read the blocks from here on
    info = builder.finish(source.info, dtype, allow_empty)
    decoder.warn()
    return info


def read_budget(limit: int) -> int:
    """Return the bytes to read at a time under a memory limit."""
    return min(MAX_READ, max(MIN_READ, limit // 16))


def read(source: Source, region: Region) -> Any:
    """Return one region of a source; errors name the region."""
    rows, cols = region
    assert source.read is not None
    location = f" of {source.info.location}" if source.info.location else ""
    region_text = (
        f"rows {rows.start} to {rows.stop - 1}, columns {cols.start} to {cols.stop - 1}{location} "
        f"({source.info.kind} input) failed"
    )
    with reading_errors(region_text, "the chunks there"):
        values = source.read(*region)
        check_shape(
            values, (rows.stop - rows.start, cols.stop - cols.start), rows.start, cols.start
        )
    return values


@contextmanager
def reading_errors(what: str, checked: str) -> Iterator[None]:
    """Raise errors of other libraries while reading ``what`` as StoreError."""
    try:
        yield
    except (DaskfactorError, MemoryError):
        raise
    except Exception as error:
        raise StoreError(
            f"reading {what}: {type(error).__name__}: {error}; check that {checked} can be read"
        ) from error


def regions(source: Source, grid: Grid, budget: int) -> Iterator[Region]:
    """Yield the regions to read, in order: chunks, joined up to the budget.

    No region is larger than a block, so that an error names a small part of the source.
    """
    entries = max(1, budget // source.dtype.itemsize)
    tallest, widest = max(grid.rows.sizes), max(grid.cols.sizes)
    chunks = source.chunks if source.steps is None else source.steps
    if chunks is None:
        height, width = grid.shape
        widest = width
        rows, cols = [*range(0, height, max(1, entries // width)), height], [0, width]
    else:
        rows, cols = (list(Bands.from_sizes(sizes).offsets) for sizes in chunks)
    height = max(high - low for low, high in pairwise(rows))
    parts = list(join_intervals(cols, min(widest, entries // height)))
    width = max(part.stop - part.start for part in parts)
    for strip in join_intervals(rows, min(tallest, entries // width)):
        for part in parts:
            yield strip, part


def working_bytes(source: Source, grid: Grid, dtype: FloatType, budget: int) -> int:
    """Return the peak memory of the pass: a region, its decoded copy and a block."""
    region = max(
        int((rows.stop - rows.start) * (cols.stop - cols.start))
        for rows, cols in regions(source, grid, budget)
    )
    copies = LAZY_COPIES if source.info.lazy else 1
    block = max(grid.rows.sizes) * max(grid.cols.sizes)
    return region * (copies * source.dtype.itemsize + dtype.itemsize) + block * dtype.itemsize


def _cuts(grid: Grid, region: Region) -> Iterator[tuple[Block, Region, Region]]:
    """Yield the blocks that overlap a region: address, slices in the block and in the region."""
    for row, rows_inside, rows_outside in grid.rows.overlaps(region[0]):
        for col, cols_inside, cols_outside in grid.cols.overlaps(region[1]):
            yield Block(row, col), (rows_inside, cols_inside), (rows_outside, cols_outside)
