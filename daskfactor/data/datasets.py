"""Variables of netCDF files, zarr groups and whatever else xarray opens."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from daskfactor.data.places import find_place
from daskfactor.data.statistics import NUMERIC
from daskfactor.data.tables import ReadOptions
from daskfactor.errors import DaskfactorError, DataError
from daskfactor.urls import Location, safe_cause

ARRAYS = ".npy, .npz, .csv, .tsv, .txt, .parquet, .zarr, .h5ad or netCDF (.nc)"


def read_file(location: Location, name: str | None, options: ReadOptions) -> Any:
    """Return a variable of a file of netCDF, or of another format that xarray reads."""
    import xarray as xr

    try:
        if location.is_url:
            dataset = xr.open_dataset(location.open(), engine="h5netcdf", chunks={})
        else:
            dataset = xr.open_dataset(str(location), chunks={})
    except DaskfactorError:
        raise
    except Exception as error:  # noqa: BLE001 - every backend raises errors of other types
        raise _unreadable(location, error) from safe_cause(error, location)
    return _variable(dataset, location, name)


def read_group(location: Location, name: str | None, options: ReadOptions) -> Any:
    """Return a variable of a zarr group, or an array without dimension names."""
    import xarray as xr

    group = find_place(location).node
    arguments: dict[str, Any] = {"engine": "zarr", "group": group.store.inside, "chunks": {}}
    try:
        try:  # a web server cannot list files, so metadata must be consolidated
            dataset = xr.open_dataset(group.store, consolidated=location.is_url, **arguments)
        except (KeyError, ValueError):
            dataset = xr.open_dataset(group.store, consolidated=False, **arguments)
    except DaskfactorError:
        raise
    except Exception as error:  # xarray refuses arrays without dimension names
        arrays = list[str]()
        with suppress(Exception):  # the first error is the one to report
            arrays = sorted(group.array_keys())
        if name in arrays:
            return group[name]
        if arrays:
            raise DataError(
                f"{location} holds {len(arrays)} zarr array{'s' if len(arrays) > 1 else ''} "
                f"({', '.join(arrays)}); name one as {location}:NAME"
            ) from error
        raise _unreadable(location, error) from safe_cause(error, location)
    return _variable(dataset, location, name)


def _unreadable(location: Location, error: Exception) -> DataError:
    """Return the error for a file or group that xarray does not open."""
    reason = " ".join(str(error).split())[:200]
    text = _if_text(location) if "did not find a match" in reason else f". xarray says: {reason}"
    return DataError(f"{location} cannot be read; give {ARRAYS}{text}")


def _variable(dataset: Any, location: Location, name: str | None) -> Any:
    """Return the variable of a dataset that ``name`` selects, or its only matrix."""
    # A store lists its arrays in arbitrary order.
    names = sorted(map(str, dataset.data_vars))
    bounds = {variable.attrs.get("bounds") for variable in dataset.variables.values()}
    large = [
        key
        for key in names
        if dataset[key].ndim >= 2 and key not in bounds and dataset[key].dtype.kind in NUMERIC
    ]
    matrices = [key for key in large if dataset[key].ndim == 2] or large
    if name is not None and name not in names:
        raise DataError(f"{location} has no variable {name!r}, only {', '.join(names)}")
    if name is None and len(matrices) != 1:
        raise DataError(
            f"{location} holds {len(matrices)} variables of two dimensions or more "
            f"({', '.join(matrices) or 'none'}); name one as {location}:NAME"
        )
    return dataset[name or matrices[0]]


def _if_text(location: Location) -> str:
    """Return advice for a file of unknown kind, if it holds text."""
    if location.is_url or not Path(location).is_file():
        return ""
    with location.open() as file:
        text = file.read(2**12)
    printable = bool(text) and not re.search(rb"[\x00-\x08\x0e-\x1f]", text)
    return "; if it is a table of text, copy it to a name that ends in .csv" if printable else ""
