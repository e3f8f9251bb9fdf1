"""Stored entries of arrays of any kind, with any number of axes, by their positions."""

from collections.abc import Mapping
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.adapters import decoded, decoder, unstored_of_fill
from daskfactor.data.long_tables import is_frame
from daskfactor.data.opening import load
from daskfactor.data.statistics import check_dtype
from daskfactor.errors import DataError, OptionError
from daskfactor.urls import locate

Index = NDArray[np.int64]
NAMES = "axis_{}"
"""Default names of axes."""


class Entries(NamedTuple):
    """Stored entries of an array: positions along each axis, values, and labels."""

    shape: tuple[int, ...]
    places: list[Index]
    values: NDArray[Any]
    unstored: str
    names: tuple[str, ...]
    labels: Mapping[str, NDArray[Any]] = {}

    def cell(self, position: int) -> tuple[int, ...]:
        """Return the cell of an entry."""
        return tuple([int(place[position]) for place in self.places])


def entries_of(V: Any, unstored: str | None) -> Entries:
    """Return the stored entries of an array of any kind."""
    if isinstance(V, str | PathLike):
        location, V = V, load(locate(V))
        if not hasattr(V, "ndim"):
            raise DataError(
                f"{locate(location)} holds a matrix; a CP model takes three or more axes"
            )
    if is_frame(V):
        raise DataError(
            "a table is no tensor: make one of its keys and values, for example by "
            "sparse.COO([codes of each key], values), with pandas.factorize for the codes"
        )
    if hasattr(V, "dims") and hasattr(V, "coords") and hasattr(V, "data"):
        V = decoded(V)
        entries, dims = entries_of(V.data, unstored), tuple(map(str, V.dims))
        labels = {dim: np.asarray(V[dim].values) for dim in dims if dim in V.coords}
        return entries._replace(names=dims, labels=labels)
    if type(V).__module__.partition(".")[0] in ("zarr", "h5py") or isinstance(V, np.memmap):
        from dask.array import from_array

        decode = None if isinstance(V, np.memmap) else decoder(V)
        V = from_array(V)  # type: ignore[no-untyped-call]
        V = V if decode is None else V.map_blocks(decode)
    if hasattr(V, "dask") and hasattr(V, "numblocks"):
        return _of_chunks(V, unstored)
    if hasattr(V, "todense") and hasattr(V, "ndim"):
        return _of_sparse(V, unstored)
    return _of_dense(V, unstored)


def _of_sparse(V: Any, unstored: str | None) -> Entries:
    V = V if hasattr(V, "coords") else V.tocoo()
    fill_meaning = unstored_of_fill(V.fill_value)
    if fill_meaning == "missing" and unstored == "zero":
        raise OptionError(
            'unstored="zero", but the array says by its fill_value NaN that entries it does not '
            "store are missing; leave unstored out"
        )
    places = [np.asarray(place, np.int64) for place in V.coords]
    names = tuple(map(NAMES.format, range(V.ndim)))
    return Entries(V.shape, places, np.asarray(V.data), unstored or fill_meaning, names)


def _of_dense(V: Any, unstored: str | None) -> Entries:
    if unstored == "zero":
        raise OptionError(
            'unstored is "zero", but the input is dense: it stores every entry, and missing ones '
            "are NaN; leave unstored out"
        )
    masked = np.ma.asarray(V)
    array, seen = masked.data, ~np.ma.getmaskarray(masked)
    if check_dtype(array.dtype).kind == "f":
        seen &= ~np.isnan(array)
    places = [np.asarray(index, np.int64) for index in np.nonzero(seen)]
    names = tuple(map(NAMES.format, range(array.ndim)))
    return Entries(array.shape, places, array[seen], "missing", names)


def _of_chunks(V: Any, unstored: str | None) -> Entries:
    """Return the entries of a dask array, read chunk by chunk to limit memory."""
    starts = [np.cumsum([0, *sizes]) for sizes in V.chunks]
    parts = []
    for number in np.ndindex(V.numblocks):
        chunk = entries_of(V.blocks[number].compute(scheduler="threads"), unstored)
        places = [
            place + start[n] for place, start, n in zip(chunk.places, starts, number, strict=True)
        ]
        parts.append(chunk._replace(places=places))
    if not parts:
        raise DataError(f"the data are empty, shape {V.shape}")
    places = [np.concatenate(chunk) for chunk in zip(*(part.places for part in parts), strict=True)]
    values = np.concatenate([part.values for part in parts])
    return parts[0]._replace(shape=V.shape, places=places, values=values)
