"""The one pass over a dense source: read, decode, cut into blocks, scan.

Neighbouring chunks are read together up to a budget, and every chunk once. Its pieces go to
their blocks at once, so that what waits is never more than one region, whatever the chunks.
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
from daskfactor.data.known import (
    DENSE,
    Known,
    Labels,
    Locate,
    StatisticsBuilder,
    Weighing,
    check_dtype,
    check_shape,
    dense_cells,
    infinite,
)
from daskfactor.data.staging import joined
from daskfactor.data.storage import FloatArray, FloatType, Storage, zero_copy
from daskfactor.errors import DaskfactorError, DataError, DataWarning, StoreError

Region = tuple[slice, slice]

MOST_READ = 2**24
LEAST_READ = 2**20
UNCERTAINTY, WEIGHTS = "uncertainty", "weights"
"""What weights of cells are made from: standard deviations, or the weights themselves."""
LAZY_COPIES = 4
"""A chunk that is being decoded exists compressed, decompressed and in the region asked for."""


class Decoder:
    """Turns pieces of a source into floats, NaN where missing, and remembers what was lost."""

    def __init__(self, dtype: FloatType, labels: Labels) -> None:
        self._dtype = dtype
        self._labels = labels
        self._digits = np.finfo(dtype).nmant + 1
        self._rounded = 0
        self._vanished = 0

    def decode(self, raw: Any, row0: int, col0: int) -> FloatArray:
        """A piece whose first cell is (row0, col0) as floats, copied only if it has to be."""
        root = type(raw).__module__.partition(".")[0]
        if root == "sparse" or (root == "scipy" and hasattr(raw, "toarray")):
            raise DataError(
                f"a piece of the data is sparse ({type(raw).__module__}.{type(raw).__name__}), but "
                "the array says that it is dense; name the kind of its pieces where you make it, "
                "for example map_blocks(..., meta=scipy.sparse.csr_array((0, 0)))"
            )
        mask = np.ma.getmaskarray(raw) if isinstance(raw, np.ma.MaskedArray) else None
        given: NDArray[Any] = np.asarray(raw)
        return self.convert(given, dense_cells(row0, col0, given.shape[1]), mask)

    def convert(
        self, given: NDArray[Any], locate: Locate, mask: NDArray[np.bool_] | None = None
    ) -> FloatArray:
        """Entries as floats, those under ``mask`` as NaN; ``locate`` finds an entry's cell."""
        check_dtype(given.dtype)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            out: FloatArray = given.astype(self._dtype, order="C", copy=mask is not None)
        if mask is not None:
            out[mask] = np.nan
        if given.dtype.kind in "iu":
            self._count_rounded(given, mask)
        elif given.dtype.kind == "f" and given.dtype.itemsize > self._dtype.itemsize:
            self._check_narrowing(given, out, locate)
        return out

    def warn(self) -> None:
        """Say once, after the pass, what did not survive the conversion."""
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

    def _count_rounded(self, given: NDArray[Any], mask: NDArray[np.bool_] | None) -> None:
        """An integer is exact if, without its trailing zero bits, it has few enough digits."""
        if given.dtype.itemsize * 8 <= self._digits or not given.size:
            return
        if max(int(given.max()), -int(given.min())) <= 2**self._digits:
            return
        size = np.abs(given).astype(np.uint64)  # abs(int64 minimum) wraps to the right bits
        lowest_bit = size & (~size + np.uint64(1))
        inexact = ((size >> np.uint64(self._digits)) >= lowest_bit) & (size > 0)
        if mask is not None:
            inexact &= ~mask
        self._rounded += int(np.count_nonzero(inexact))

    def _check_narrowing(self, given: NDArray[Any], out: FloatArray, locate: Locate) -> None:
        overflown = np.isinf(out)
        if overflown.any():
            position = int(np.argmax(overflown))
            cell, value = locate(position), given.flat[position]
            if np.isinf(value):
                raise infinite(self._labels, cell, float(value))
            raise DataError(
                f"the entry at {self._labels.cell(*cell)} is {value}, outside "
                f"the range of {self._dtype} (up to {np.finfo(self._dtype).max:.3g}); "
                'pass dtype="float64" to as_blocks or convert, or rescale the data'
            )
        self._vanished += int(np.count_nonzero((out == 0) & (given != 0)))


def weights_of(given: Any, rule: str, dtype: FloatType) -> FloatArray:
    """Weights from standard deviations, 1 / sigma**2, or as they are; by ``rule``.

    NaN where there is none: for what is masked, NaN, negative, a standard deviation of zero,
    an infinite weight, and what ``dtype`` cannot hold.
    """
    values = np.ma.filled(np.ma.asarray(given, np.float64), np.nan)
    limits = np.finfo(dtype)
    with np.errstate(all="ignore"):
        found = np.where(values > 0, values, np.nan) ** -2 if rule == UNCERTAINTY else values
        real = (found >= limits.tiny) & (found <= limits.max)
        zero = values == np.inf if rule == UNCERTAINTY else values == 0
        return np.where(zero, 0, np.where(real, found, np.nan)).astype(dtype)


def weighed(source: Source, rule: str, dtype: FloatType) -> Source:
    """Return a dense source whose entries become weights of cells."""
    read = source.read
    assert read is not None
    return replace(
        source,
        info=replace(source.info, rule=rule),
        dtype=dtype,
        array=None,
        read=lambda rows, cols: weights_of(read(rows, cols), rule, dtype),
    )


def without(values: FloatArray, weights: FloatArray) -> FloatArray:
    """A copy of the values that is NaN where the weight is zero."""
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
) -> Known:
    """Fill ``storage`` from ``source``, reading at most about ``budget`` bytes at a time.

    ``weights`` are those of the cells, on blocks, and ``weighing`` is what they are.
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
                    piece = without(piece, weights.view(*block).block[inside])
                storage.write(block, inside, piece)
    for block in grid.all_blocks():
        view = storage.view(*block)
        if weights is not None:
            view = view._replace(weights=weights.view(*block).block)
        builder.scan(block, view)
    storage.forget()  # other threads read the blocks from here on
    known = builder.finish(source.info, dtype, allow_empty)
    decoder.warn()
    return known


def read_budget(limit: int) -> int:
    """Bytes to read at a time, where so many may be taken in all."""
    return min(MOST_READ, max(LEAST_READ, limit // 16))


def read(source: Source, region: Region) -> Any:
    """One region of a source; what goes wrong there is reported with its place."""
    rows, cols = region
    assert source.read is not None
    where = f" of {source.info.location}" if source.info.location else ""
    what = (
        f"rows {rows.start} to {rows.stop - 1}, columns {cols.start} to {cols.stop - 1}{where} "
        f"({source.info.kind} input) failed"
    )
    with reading_errors(what, "the chunks there"):
        found = source.read(*region)
        check_shape(found, (rows.stop - rows.start, cols.stop - cols.start), rows.start, cols.start)
    return found


@contextmanager
def reading_errors(what: str, checked: str) -> Iterator[None]:
    """Errors of other libraries while ``what`` is read, as errors of a source."""
    try:
        yield
    except (DaskfactorError, MemoryError):
        raise
    except Exception as error:
        raise StoreError(
            f"reading {what}: {type(error).__name__}: {error}; check that {checked} can be read"
        ) from error


def regions(source: Source, grid: Grid, budget: int) -> Iterator[Region]:
    """What to read, in this order: single chunks, or unions of them within the budget.

    No union is larger than a block, so that an error names where it was.
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
    parts = list(joined(cols, min(widest, entries // height)))
    width = max(part.stop - part.start for part in parts)
    for strip in joined(rows, min(tallest, entries // width)):
        for part in parts:
            yield strip, part


def working_bytes(source: Source, grid: Grid, dtype: FloatType, budget: int) -> int:
    """What the pass holds at once, at most: a region and its decoded copy, then a block."""
    region = max(
        int((rows.stop - rows.start) * (cols.stop - cols.start))
        for rows, cols in regions(source, grid, budget)
    )
    copies = LAZY_COPIES if source.info.lazy else 1
    block = max(grid.rows.sizes) * max(grid.cols.sizes)
    return region * (copies * source.dtype.itemsize + dtype.itemsize) + block * dtype.itemsize


def _cuts(grid: Grid, region: Region) -> Iterator[tuple[Block, Region, Region]]:
    """The blocks that share cells with a region: these cells inside the block and the region."""
    for row, (rows_inside, rows_outside) in _overlaps(grid.rows, region[0]):
        for col, (cols_inside, cols_outside) in _overlaps(grid.cols, region[1]):
            yield Block(row, col), (rows_inside, cols_inside), (rows_outside, cols_outside)


def _overlaps(bands: Bands, part: slice) -> Iterator[tuple[int, Region]]:
    first = int(np.searchsorted(bands.offsets, part.start, side="right")) - 1
    last = int(np.searchsorted(bands.offsets, part.stop, side="left"))
    for band in range(first, last):
        whole = bands.slice(band)
        low, high = max(whole.start, part.start), min(whole.stop, part.stop)
        yield (
            band,
            (
                slice(low - whole.start, high - whole.start),
                slice(low - part.start, high - part.start),
            ),
        )
