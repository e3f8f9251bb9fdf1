"""From unordered (row, column, value) triples to blocks of compressed sparse rows.

Two counting sorts: one that deals triples out to the blocks of a grid, and one
that orders a block by row and column. Both keep the order of equal keys, so the
order of the source decides between duplicates, whatever the threads do.

A triple in the making is a record of `triple_type`: row and column inside its
block, and its value.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import jit_exact

Array = NDArray[Any]
Compressed = tuple[Array, Array, Array, int]
"""``indptr``, columns, values, and how many duplicates were merged."""


def triple_type(value: np.dtype[Any]) -> np.dtype[Any]:
    """The record of one triple: 12 bytes with float32 values, 16 with float64."""
    return np.dtype([("row", np.uint32), ("col", np.uint32), ("value", value)])


@jit_exact
def count_blocks(rows: Array, cols: Array, row_band: Array, col_band: Array, counts: Array) -> None:
    """Triples per block: ``counts`` (B, B) int64 goes up; bands are given per row and column."""
    for entry in range(rows.size):
        counts[row_band[rows[entry]], col_band[cols[entry]]] += 1


@jit_exact
def deal_blocks(
    rows: Array,
    cols: Array,
    values: Array,
    row_band: Array,
    col_band: Array,
    row_local: Array,
    col_local: Array,
    nexts: Array,
    out: Array,
) -> None:
    """Write each triple to its block's part of ``out``; ``nexts`` (B, B) says where, and moves."""
    out_row, out_col, out_value = out["row"], out["col"], out["value"]
    for entry in range(rows.size):
        row, col = rows[entry], cols[entry]
        band, strip = row_band[row], col_band[col]
        place = nexts[band, strip]
        nexts[band, strip] = place + 1
        out_row[place] = row_local[row]
        out_col[place] = col_local[col]
        out_value[place] = values[entry]


@jit_exact
def is_sorted(triples: Array) -> bool:
    """Whether triples are in strictly ascending order of row and column."""
    rows, cols = triples["row"], triples["col"]
    for entry in range(1, triples.size):
        row, before = rows[entry], rows[entry - 1]
        if row < before or (row == before and cols[entry] <= cols[entry - 1]):
            return False
    return True


@jit_exact
def order_by_column(triples: Array, starts: Array, out: Array) -> None:
    """Stable counting sort by column; ``starts`` (n + 1,) int64 of zeros is used up."""
    cols = triples["col"]
    for entry in range(triples.size):
        starts[cols[entry] + 1] += 1
    for col in range(1, starts.size):
        starts[col] += starts[col - 1]
    for entry in range(triples.size):
        col = cols[entry]
        out[starts[col]] = triples[entry]
        starts[col] += 1


@jit_exact
def order_by_row(triples: Array, indptr: Array, columns: Array, values: Array) -> None:
    """Stable counting sort by row into compressed rows; ``indptr`` (m + 1,) of zeros is filled."""
    rows, cols, given = triples["row"], triples["col"], triples["value"]
    for entry in range(triples.size):
        indptr[rows[entry]] += 1
    start = 0
    for row in range(indptr.size):
        count = indptr[row]
        indptr[row] = start
        start += count
    for entry in range(triples.size):
        row = rows[entry]
        place = indptr[row]
        columns[place] = cols[entry]
        values[place] = given[entry]
        indptr[row] = place + 1
    for row in range(indptr.size - 1, 0, -1):
        indptr[row] = indptr[row - 1]
    indptr[0] = 0


@jit_exact
def merge_duplicates(
    indptr: Array, columns: Array, values: Array, add: bool, drop_zeros: bool, drop_nans: bool
) -> int:
    """Make ordered rows strictly ascending, in place, and return how many entries were doubles.

    Of equal columns in a row the values are added up in float64 (``add``) or the
    last one stays. Zeros or NaN are then left out if asked; ``indptr`` says what is left.
    """
    kept, doubles, stop = 0, 0, np.int64(indptr[0])
    for row in range(indptr.size - 1):
        entry, stop = stop, np.int64(indptr[row + 1])
        indptr[row] = kept
        while entry < stop:
            column, value = columns[entry], np.float64(values[entry])
            entry += 1
            while entry < stop and columns[entry] == column:
                value = value + values[entry] if add else np.float64(values[entry])
                doubles += 1
                entry += 1
            missing = np.isnan(value)
            if (drop_zeros and value == 0) or (drop_nans and missing):
                continue
            columns[kept] = column
            # One form of NaN and of zero, so that equal blocks have equal bits.
            values[kept] = np.nan if missing else value + 0.0
            kept += 1
    indptr[indptr.size - 1] = kept
    return doubles


def compress(
    triples: Array, shape: tuple[int, int], *, add: bool, drop_zeros: bool, drop_nans: bool
) -> Compressed:
    """Triples of one block as ``indptr`` (int64), columns (uint32), values, and doubles merged."""
    m, n = shape
    if not is_sorted(triples):
        ordered = np.empty_like(triples)
        order_by_column(triples, np.zeros(n + 1, np.int64), ordered)
        triples = ordered
    indptr = np.zeros(m + 1, np.int64)
    columns = np.empty(triples.size, np.uint32)
    values = np.empty(triples.size, triples.dtype["value"])
    order_by_row(triples, indptr, columns, values)
    doubles = merge_duplicates(indptr, columns, values, add, drop_zeros, drop_nans)
    kept = int(indptr[-1])
    return indptr, columns[:kept], values[:kept], int(doubles)


@jit_exact
def count_keys(keys: Array, low: int, counts: Array) -> None:
    """Occurrences of whole-number keys: ``counts[key - low]`` goes up."""
    for entry in range(keys.size):
        counts[keys[entry] - low] += 1


@jit_exact
def look_up(keys: Array, low: int, table: Array, out: Array) -> bool:
    """``out = table[keys - low]``; False if a key is outside the table or has -1 there."""
    known = True
    for entry in range(keys.size):
        place = keys[entry] - low
        code = table[place] if 0 <= place < table.size else -1
        known = known and code >= 0
        out[entry] = code
    return known
