"""Uncertainties of cells in predictions, from the run or from an argument."""

from typing import Any, Final, cast

import dask.array as da
import numpy as np
import xarray as xr

from daskfactor.errors import DataError, OptionError
from daskfactor.results.selection import Cells, asarray, values_at
from daskfactor.runs.trace import Run

Lazy = Any  # dask.array.Array

broadcast_to: Final[Any] = da.broadcast_to  # dask's functions carry no types


def has_uncertainty(run: Run) -> bool:
    """Return True if the run has uncertainties of cells."""
    return bool(run.data.get("weighting") == "uncertainty")


def knows_variances(run: Run, uncertainty: Any) -> bool:
    """Return True if the variance of a new observation of every cell is available.

    Raises
    ------
    OptionError
        If uncertainties are passed for a run without.
    """
    if has_uncertainty(run):
        return uncertainty is not None or run.observed("weights") is not None
    if uncertainty is None:
        return True
    raise OptionError(
        "uncertainty is only for runs with uncertainties of cells, but this run has a common "
        "dispersion; leave uncertainty out"
    )


def variances(run: Run, cells: Cells, uncertainty: Any, mean: Any) -> Lazy:
    """Return squared uncertainties of a grid of cells (r, c), or of single cells (p,), lazily.

    Parameters
    ----------
    run
        Run with weights, if ``uncertainty`` is None.
    cells
        Positions of rows and columns.
    uncertainty
        Values that replace those of the run, as for `predict`.
    mean
        Array with the shape and chunks of the result.

    Raises
    ------
    DataError
        If ``uncertainty`` does not have the shape or the labels of the cells.
    """
    chunks = getattr(mean, "chunks", mean.shape)
    if uncertainty is None:
        weights = values_at(cast("xr.DataArray", run.observed("weights")), cells)
        return weights.map_blocks(_inverse, dtype=np.float64).rechunk(chunks)
    shape = tuple(at.size for at in cells if at.ndim)[: mean.ndim]
    try:
        if isinstance(uncertainty, xr.DataArray):
            uncertainty = _by_label(uncertainty, cells, shape)
        sigma = broadcast_to(asarray(uncertainty).astype(np.float64), shape)
    except ValueError as error:
        raise DataError(
            f"uncertainty of the predicted cells must be one number, an array of their shape, "
            f"{shape}, or a DataArray with their dimensions, got shape {np.shape(uncertainty)}"
        ) from error
    return (sigma**2).reshape(mean.shape).rechunk(chunks)


def _inverse(weights: Any) -> Any:
    """Return variances of cells from their weights; infinite for weight 0."""
    with np.errstate(divide="ignore"):
        return 1.0 / weights.astype(np.float64)


def _by_label(uncertainty: xr.DataArray, cells: Cells, shape: tuple[int, ...]) -> Any:
    """Return values in the order of the cells; NaN for missing labels."""
    for at in cells:
        levels = at.attrs.get("levels", {})
        if levels and levels.keys() <= set(uncertainty.dims):  # stacked dimensions of the run
            uncertainty = uncertainty.reindex(levels).sel({name: at[name] for name in levels})
    dims = dict.fromkeys(dim for at in cells for dim in at.dims)
    coords = {dim: at.coords[dim] for at in cells for dim in at.dims if dim in at.coords}
    plan = xr.DataArray(da.empty(shape), coords, tuple(dims))
    return (
        xr.align(plan, uncertainty, join="left")[1].broadcast_like(plan).transpose(*plan.dims).data
    )
