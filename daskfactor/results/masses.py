"""Draws read as particles: masses under their labels, what follows from them, units of size."""

from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.errors import OptionError
from daskfactor.results.alignment import align
from daskfactor.results.matching import unit
from daskfactor.results.trace import Trace, require_draws
from daskfactor.results.weights import draw_weights

Array = NDArray[np.float64]


def draw_masses(trace: Trace) -> xr.DataArray:
    """Probability mass of every draw, adding up to 1; equal for a run whose draws have none.

    Parameters
    ----------
    trace
        Result of a run, or the path of its store. Of a selection of its draws the masses
        are made to add up to 1 again.

    Returns
    -------
    DataArray
        (chain, draw).

    Raises
    ------
    OptionError
        If there are no draws, or their masses are all 0.
    StoreFormatError
        If they are no masses, or not those of the draws.
    """
    tree = require_draws(trace, "a mass of every draw")
    group = tree["posterior"].to_dataset()
    found = draw_weights(tree)
    if found is None:
        shape = group.sizes["chain"], group.sizes["draw"]
        found = np.full(shape, 1.0 / (shape[0] * shape[1]))
    labels = {dim: group[dim].values for dim in ("chain", "draw")}
    return xr.DataArray(found, labels, ("chain", "draw"), name="weight")


def mean_and_sd(values: Array, weight: Array) -> tuple[Array, Array]:
    """Over the first axis, with probability masses (M,)."""
    mean = weight @ values
    return mean, np.sqrt(weight @ (values - mean) ** 2)


def aligned_trace(trace: Trace, purpose: str) -> xr.DataTree:
    """The tree of a trace that holds draws, aligned if it has not been."""
    tree = require_draws(trace, purpose)
    return tree if "alignment" in tree.children else align(tree)


def component_positions(group: xr.Dataset, component: Any) -> list[int]:
    """Positions of the components of these labels; of all for None.

    Raises
    ------
    OptionError
        If there is no such component.
    """
    known = group["component"].values.tolist()
    if component is None:
        return list(range(len(known)))
    wanted = np.atleast_1d(np.asarray(component)).tolist()
    missing = [one for one in wanted if one not in known]
    if missing or not wanted:
        raise OptionError(f"there is no component {missing}; this trace has the components {known}")
    return [known.index(one) for one in wanted]


def unit_size(components: NDArray[Any], signed: bool) -> Array:
    """Components (K, n) that add up to 1 each, of length 1 if they are real-valued."""
    values = components.astype(np.float64)
    if signed:
        return unit_length(values)
    total = values.sum(axis=1, keepdims=True)
    return np.asarray(values / np.where(total > 0, total, 1.0))


def unit_length(components: NDArray[Any]) -> Array:
    """Components (K, n) of length 1; of nothing but zeros as they are."""
    return unit(components.astype(np.float64), 1)
