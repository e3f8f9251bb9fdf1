"""Draws with their components in another order and scale, as lazy as they were."""

from typing import Any, Final

import dask.array as da
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.results.cellwise import blockwise

Array = NDArray[Any]

_from_array: Final[Any] = da.from_array


def rearranged_draws(
    array: xr.DataArray, permutation: NDArray[np.int64], factor: NDArray[np.float64], axis: int
) -> xr.DataArray:
    """Components in their new order and scale; ``axis`` is theirs, 2 or 3."""
    if array.chunks is None:
        values = array.values
        out = np.empty_like(values)
        for at in np.ndindex(values.shape[:2]):
            out[at] = _rearrange_one(values[at], permutation[at], factor[at], axis)
        return array.copy(data=out)
    lazy: Any = array.data
    lazy = lazy.rechunk({axis: -1})
    chunks = (lazy.chunks[0], lazy.chunks[1], (permutation.shape[2],))
    out = blockwise(
        _rearrange_chunk,
        "cdxy",
        lazy,
        "cdxy",
        _from_array(permutation, chunks=chunks),
        "cdk",
        _from_array(factor, chunks=chunks),
        "cdk",
        axis=axis,
        concatenate=True,
        dtype=lazy.dtype,
        meta=np.empty((0, 0, 0, 0), dtype=lazy.dtype),
    )
    return array.copy(data=out)


def _rearrange_chunk(values: Array, permutation: Array, factor: Array, axis: int) -> Array:
    out = np.empty_like(values)
    for at in np.ndindex(values.shape[:2]):
        out[at] = _rearrange_one(values[at], permutation[at], factor[at], axis)
    return out


def _rearrange_one(values: Array, permutation: Array, factor: Array, axis: int) -> Array:
    factor = factor.astype(values.dtype)
    if axis == 3:
        return np.asarray(values[:, permutation] * factor)
    return np.asarray(values[permutation] * factor[:, None])
