"""``unstack``: results of arrays of many dimensions as maps, with the dimensions apart again."""

from typing import Any

import xarray as xr

from daskfactor.errors import OptionError
from daskfactor.results.opening import open_run
from daskfactor.results.schema import tree_of
from daskfactor.results.stacks import unstacked
from daskfactor.results.trace import Trace


def unstack(result: Trace | xr.Dataset | xr.DataArray) -> Any:
    """Put the dimensions that were stacked as rows or columns apart again, lazily.

    Of data with the dimensions time, lat and lon, of which ``rows="time"`` were the rows,
    ``posterior/H`` has the dimension lat_lon, with a MultiIndex; here it has lat and lon, with
    all their labels in their order, and NaN where the data had no observed entry at all.

    Parameters
    ----------
    result
        A run, the path of its store, or any Dataset or DataArray that was taken from it, such as
        a mean over draws.

    Returns
    -------
    DataTree, Dataset or DataArray
        Of the kind that was passed. What has no stacked dimension is as it was. To give a run to
        `predict`, `align` and the like, pass it as it was before.

    Raises
    ------
    OptionError
        If it is none of these.

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


def _path(given: Any) -> Any:
    """The path of a run."""
    if not hasattr(given, "__fspath__") and not isinstance(given, str):
        raise OptionError(
            "unstack takes a run, the path of its store, or a Dataset or DataArray taken from it, "
            f"got {type(given).__name__}"
        )
    return given
