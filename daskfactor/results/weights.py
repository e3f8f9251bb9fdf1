"""Weights of draws: probability masses of particles, and what they come to.

Draws of a sampler have no weights: each counts as much as any other. Those of a run of
particles have, and many of them are zero.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from daskfactor.errors import OptionError, StoreFormatError
from daskfactor.results.schema import STEIN

Array = NDArray[np.float64]

WEIGHT_TOLERANCE: Final = 1e-6
"""How far the sum of all weights may be from 1."""


def is_particles(tree: xr.DataTree) -> bool:
    """Whether the draws of a trace are particles, weighted already or not yet."""
    if "sample_stats" not in tree.children:
        return False
    return bool({"weight", "n_iter"} & set(tree["sample_stats"].data_vars))


def draw_weights(tree: xr.DataTree) -> Array | None:
    r"""Probability masses of the draws, or None where all draws count alike.

    .. math:: w_{cd} \ge 0, \qquad \sum_{cd} w_{cd} = 1

    Parameters
    ----------
    tree
        A trace with draws; of a part of a run, masses are taken anew to add up to 1.

    Returns
    -------
    ndarray of float64 or None
        (chain, draw), in the order of ``posterior``.

    Raises
    ------
    StoreFormatError
        If they are no masses, or are not those of the draws.
    OptionError
        If all draws that are there have mass 0.

    References
    ----------
    Masood and Doshi-Velez, section 4.
    """
    if "sample_stats" not in tree.children or "weight" not in tree["sample_stats"].data_vars:
        return None
    found = tree["sample_stats"]["weight"].transpose("chain", "draw")
    if "posterior" in tree.children:
        found = _of_draws(found, tree["posterior"].to_dataset())
    masses = np.asarray(found.values, dtype=np.float64)
    if masses.size == 0:
        return None
    if not (np.isfinite(masses).all() and masses.min() >= 0):
        raise StoreFormatError(
            "the weights of this trace must be finite and at least 0, got a smallest of "
            f"{masses.min():g}; restore sample_stats['weight'] as it was"
        )
    if not masses.sum() > 0:
        raise OptionError(
            "the draws of this trace have weights that are all 0, so that nothing is known of "
            "them together; take some that have weight"
        )
    return np.asarray(masses / masses.sum())


def _of_draws(weight: xr.DataArray, draws: xr.Dataset) -> xr.DataArray:
    """The weights of the draws that are there, by their labels where these differ."""
    try:
        return weight.sel(
            {dim: draws[dim] for dim in ("chain", "draw") if dim in draws.coords}
        ).transpose("chain", "draw")
    except KeyError as error:
        raise StoreFormatError(
            "draws and weights of this trace have different labels; relabel posterior and "
            "sample_stats alike"
        ) from error


def relative(weights: Array) -> Array:
    """Weights in units of the largest: exactly 1 each where all are equal."""
    return np.asarray(weights / weights.max())


def effective_number(weights: ArrayLike) -> float:
    r"""How many draws of equal weight spread as much mass: :math:`1 / \sum_m w_m^2`.

    Parameters
    ----------
    weights
        Probability masses, any shape, adding up to 1.

    Returns
    -------
    float
        Between 1 and the number of draws.

    Notes
    -----
    Kish 1965, section 11.7.
    """
    return float(1.0 / np.sum(np.square(np.asarray(weights, dtype=np.float64))))


def over_chains(tree: xr.DataTree, values: xr.Dataset) -> xr.Dataset:
    """Mean over chains, by the mass of each where draws have weights."""
    weights = draw_weights(tree)
    if weights is None:
        return values.mean("chain")
    masses = xr.DataArray(weights.sum(axis=1), dims="chain")
    kept = np.flatnonzero(masses > 0)  # of a chain without mass there are no means
    return values.isel(chain=kept).weighted(masses[kept]).mean("chain")


def check_weights(weights: NDArray[np.floating[Any]]) -> None:
    """Refuse weights that are no probability masses.

    Raises
    ------
    StoreFormatError
        If one is negative or not finite, or if they do not add up to 1 within 1e-6.
    """
    whole = weights.size > 0 and bool(np.isfinite(weights).all())
    if not (whole and weights.min() >= 0 and abs(weights.sum() - 1.0) <= WEIGHT_TOLERANCE):
        least = weights.min() if weights.size else np.nan
        raise StoreFormatError(
            f"weights of particles must be at least 0 and add up to 1, got a smallest of {least:g} "
            f"and a sum of {weights.sum():g}; write them anew, divided by their sum"
        )


def weighted_values(
    planned: int,
    done: int,
    weight: ArrayLike,
    lp: ArrayLike,
    stein_matrix: ArrayLike,
    discrepancies: tuple[float, float],
    attrs: Mapping[str, Any],
) -> dict[str, Any]:
    """Check what is known when all particles are there; by the paths of its variables.

    Raises
    ------
    OptionError
        If shapes do not fit, ``attrs`` is empty, or fewer than ``planned`` are ``done``.
    StoreFormatError
        If the weights are no probability masses.
    """
    masses, density, matrix = (
        np.asarray(one, dtype=np.float64) for one in (weight, lp, stein_matrix)
    )
    shapes = masses.shape, density.shape, matrix.shape
    if shapes != ((planned,), (planned,), (planned, planned)):
        raise OptionError(
            f"weight, lp and stein_matrix of {planned} particles have shapes ({planned},), "
            f"({planned},) and ({planned}, {planned}), got {shapes[0]}, {shapes[1]}, {shapes[2]}"
        )
    if done < planned:
        raise OptionError(
            f"only {done} of {planned} particles are there; write and checkpoint them all before "
            "their weights"
        )
    if not attrs:
        raise OptionError("attrs must tell of the kernel of the Stein matrix, got none")
    check_weights(masses)
    return {
        "sample_stats/lp": density[None],
        "sample_stats/weight": masses[None],
        f"{STEIN}/stein_matrix": matrix,
        f"{STEIN}/discrepancy": discrepancies[0],
        f"{STEIN}/discrepancy_equal": discrepancies[1],
    }
