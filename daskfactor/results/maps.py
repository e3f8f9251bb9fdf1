"""Unstack results of arrays with many dimensions into maps: the verb ``unstack``."""

from typing import Any

import xarray as xr

from daskfactor.errors import OptionError
from daskfactor.runs.opening import open_run
from daskfactor.runs.schema import tree_of
from daskfactor.runs.stacks import unstacked
from daskfactor.runs.trace import Trace


def unstack(result: Trace | xr.Dataset | xr.DataArray) -> Any:
    """Unstack dimensions that were stacked as rows or columns, lazily.

    For data with the dimensions time, lat and lon and ``rows="time"``, ``posterior/H`` has the
    dimension lat_lon with a MultiIndex; the result has lat and lon, with all labels in their
    order, and NaN where the data have no observed entry.

    Parameters
    ----------
    result
        Run, path of its store, or Dataset or DataArray of a run, such as a mean over draws.

    Returns
    -------
    DataTree, Dataset or DataArray
        Same type as the input, and unchanged without stacked dimensions. Other verbs, such as
        `predict` and `align`, need the run before `unstack`.

    Raises
    ------
    OptionError
        If ``result`` has another type.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> import xarray as xr
    >>> V = np.random.default_rng(0).poisson(3.0, (12, 4, 5))
    >>> V = xr.DataArray(V, dims=("time", "lat", "lon"))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), rows="time", **run)
    >>> dfac.unstack(trace["posterior"]["H"].mean("draw")).dims
    ('chain', 'component', 'lat', 'lon')
    """
    if isinstance(result, xr.DataArray):
        name = "values" if result.name is None else result.name
        return unstacked(result.to_dataset(name=name))[name].rename(result.name)
    if isinstance(result, xr.Dataset):
        return unstacked(result)
    tree = result if isinstance(result, xr.DataTree) else open_run(_path(result))
    groups = {name: unstacked(node.to_dataset()) for name, node in tree.children.items()}
    return tree_of(groups, tree.attrs)


def _path(value: Any) -> Any:
    """Return the path of a run."""
    if not hasattr(value, "__fspath__") and not isinstance(value, str):
        raise OptionError(
            "unstack needs a run, the path of its store, or a Dataset or DataArray of it, "
            f"got {type(value).__name__}"
        )
    return value
