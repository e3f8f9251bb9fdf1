"""Which cells to watch: the caller's ways of naming them, turned into indices."""

from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import warn
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import DataWarning, OptionError

Cells = tuple[NDArray[np.int64], NDArray[np.int64]]

ALLOWED = (
    'monitor takes None, "missing", a boolean mask of the shape of V, or a pair (rows, columns) '
    "of integer positions"
)


def monitored_cells(monitor: Any, data: BlockedData) -> Cells | None:
    """Row and column positions of the cells to watch, in the caller's order.

    Parameters
    ----------
    monitor
        None, ``"missing"`` for every missing cell, a boolean mask (I, J), or a
        pair of integer arrays of equal length.

    Raises
    ------
    OptionError
        For anything else, and for positions outside the matrix.
    """
    if monitor is None:
        return None
    if isinstance(monitor, str):
        if monitor != "missing":
            raise OptionError(f"{ALLOWED}; got {monitor!r}")
        if data.n_missing == 0:
            warn(
                'monitor="missing", but no cell is missing: nothing is monitored',
                DataWarning,
            )
        return _or_none(data.missing_cells())
    if isinstance(monitor, xr.DataArray):
        monitor = monitor.transpose(data.labels.row_dim, data.labels.col_dim).values
    if isinstance(monitor, tuple) and len(monitor) == 2:
        return _or_none(_positions(monitor, data.shape))
    mask = np.asarray(monitor)
    if mask.dtype != np.bool_ or mask.shape != data.shape:
        raise OptionError(
            f"{ALLOWED}; got an array of dtype {mask.dtype} and shape {mask.shape}, "
            f"V has shape {data.shape}"
        )
    rows, cols = np.nonzero(mask)
    return _or_none((rows.astype(np.int64), cols.astype(np.int64)))


def _positions(pair: tuple[Any, Any], shape: tuple[int, int]) -> Cells:
    arrays = []
    for name, values, size in zip(("rows", "columns"), pair, shape, strict=True):
        index = np.atleast_1d(np.asarray(values))
        if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
            raise OptionError(f"{ALLOWED}; got {name} of dtype {index.dtype}, shape {index.shape}")
        if index.size and not (index.min() >= 0 and index.max() < size):
            raise OptionError(
                f"monitored {name} must lie between 0 and {size - 1}, got {index.min()} to "
                f"{index.max()}"
            )
        arrays.append(index.astype(np.int64))
    if arrays[0].size != arrays[1].size:
        raise OptionError(
            f"monitored rows and columns must be of equal length, got {arrays[0].size} and "
            f"{arrays[1].size}"
        )
    return arrays[0], arrays[1]


def _or_none(cells: Cells) -> Cells | None:
    return cells if cells[0].size else None
