"""Functions of one band of a state, for `ChainState.each`, which calls them where the band lies.

They go to other processes where the bands are there, and what they return comes back: sums,
numbers and flags, nothing that grows with a factor.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from daskfactor.data.grid import Grid
from daskfactor.executors.state import Array, ChainState, FactorBand, split_factor
from daskfactor.models.rates import count_floored, log_sum
from daskfactor.models.settings import Mask, free_components, preserve_columns


def pieces_of(grid: Grid, factor: int, values: Array) -> list[Array]:
    """Cut what has a number or a row for each of a factor's, in the grid's order, into bands'."""
    return split_factor(values, grid.sides[factor].offsets)


def take_values(band: FactorBand, values: Array) -> None:
    """Take values over."""
    band.values[:] = values


def take_array(band: FactorBand, array: Array, name: str) -> None:
    """Take an array over that travels with a band."""
    band.arrays[name] = array


def put_array(state: ChainState, grid: Grid, factor: int, name: str, values: Array) -> None:
    """Put an array, a row for each of a factor's in the grid's order, into the bands."""
    state.each(partial(take_array, name=name), factor, pieces_of(grid, factor, values))


def fill_array(band: FactorBand, name: str, value: float) -> None:
    """Set all numbers of an array."""
    band.arrays[name][:] = value


def drop_arrays(band: FactorBand, names: Sequence[str]) -> None:
    """Drop arrays, as far as there are any by these names."""
    for name in names:
        band.arrays.pop(name, None)


def take_counts(band: FactorBand, counts: dict[str, int]) -> None:
    """Set counters."""
    band.counts |= counts


def is_finite(band: FactorBand) -> bool:
    """Tell whether all values are finite."""
    return bool(np.isfinite(band.values).all())


def height(band: FactorBand) -> int:
    """Count the rows of a band."""
    return len(band.values)


def moving(values: Array, frozen: Mask) -> Array:
    """Return the columns of a band that are not frozen."""
    return values if frozen is None else values[:, ~frozen]


def sum_columns(band: FactorBand) -> Array:
    """Add up every column, (K,)."""
    return np.asarray(band.values.sum(axis=0, dtype=np.float64))


class Entries(NamedTuple):
    """Sums over some rows of a factor.

    Attributes
    ----------
    length
        Number of rows.
    columns
        Sums of all columns, (K,).
    size, total
        Number of entries that are not frozen, and their sum.
    logs, floored
        Sum of their logarithms, and number of those of which only a bound is known; on request.
    rows
        Sums of them in each row, on request.
    """

    length: int
    columns: Array
    size: int
    total: float
    logs: float
    floored: int
    rows: Array | None


def sum_entries(values: Array, frozen: Mask, logs: bool = False, by_rows: bool = False) -> Entries:
    """Add up the entries of some rows; a zero's logarithm is that of a tiny number."""
    free, columns = moving(values, frozen), values.sum(axis=0, dtype=np.float64)
    size, total = free.size, float(free.sum(dtype=np.float64))
    if logs or by_rows:  # sums depend on the order in memory: a copy, also if nothing is frozen
        free = values[:, free_components(frozen, values.shape[1])]
    rows = free.sum(axis=1, dtype=np.float64) if by_rows else None
    of_logs = (log_sum(free), count_floored(free)) if logs else (0.0, 0)
    return Entries(len(values), columns, size, total, *of_logs, rows)


def sum_band(band: FactorBand, **options: Any) -> Entries:
    """Add up a band, as `sum_entries`."""
    return sum_entries(band.values, **options)


def multiply(band: FactorBand, by: Any) -> None:
    """Multiply columns by numbers, or all of them by one."""
    band.values *= np.asarray(by).astype(band.values.dtype)


def lift(band: FactorBand, by: float, frozen: Mask) -> None:
    """Add a number to all entries that are not frozen."""
    with preserve_columns(band.values, frozen):
        band.values += band.values.dtype.type(by)


def column_sums(state: ChainState) -> list[Array]:
    """Add up the columns of every factor, of W and of Hᵀ first, (K,) each."""
    parts, count = state.each(sum_columns), state.n_factors
    each = len(parts) // count
    return [np.sum(parts[n * each : (n + 1) * each], axis=0) for n in range(count)]
