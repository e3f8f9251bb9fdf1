"""Predictions with error bars for any cells of the matrix, from a trace."""

import json
from typing import Any, Final, Literal

import dask.array as da
import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import stats

from daskfactor.errors import OptionError, StoreFormatError
from daskfactor.models import model_from_dict
from daskfactor.models.likelihood import Likelihood
from daskfactor.results.cells import (
    Lazy,
    draws_of,
    moments,
    per_cell,
    quantiles,
    select,
)
from daskfactor.results.schema import CELL_INDICES, COARSE, beside, factor_dims, own_names
from daskfactor.results.trace import (
    Trace,
    as_tree,
    draw_weights,
    extrapolated_moments,
    reads_here,
    require_draws,
)

Array = NDArray[np.float64]
Of = Literal["observation", "mean"]

map_blocks: Final[Any] = da.map_blocks  # dask's functions carry no types


def predict(
    trace: Trace,
    rows: Any = None,
    columns: Any = None,
    *,
    interval: float = 0.9,
    of: Of | None = None,
) -> xr.Dataset:
    r"""Posterior mean, standard deviation and interval of any cells, lazily.

    .. math:: \hat\mu = \mathrm{E}[(WH)_{ij}], \qquad
        \mathrm{Var}[v] = \mathrm{Var}[(WH)_{ij}] + \phi\, \hat\mu^{2-\beta}

    Nothing is computed until asked for (``.load()``, ``.to_zarr()``, ...). Blocks of
    the result are so small that all draws of one take at most 64 MB. With
    ``posterior_coarse``, mean and variance are extrapolated (2 fine - coarse), and
    quantiles of the fine chain are shifted and scaled to them.

    Particles count by their weight, and those of weight 0 are not read. The quantile at
    level p of M of them is the mean of the inverse distribution function over a window
    of width :math:`1/n` that starts at :math:`p (1 - 1/n)`, with the effective number
    :math:`n = 1 / \sum_m w_m^2`: of equal weights that is the usual quantile, linear
    between draws, and a small weight can never do much.

    Parameters
    ----------
    trace
        Result of a run that kept draws, or the path of its store.
    rows, columns
        None for all, a label, an array of labels, a slice of labels, or a boolean
        mask; integer positions where the data had no labels. Two
        `xarray.DataArray` that share their one dimension name single cells.
    interval
        Probability inside ``lower`` and ``upper``, half of the rest on each side.
    of
        ``"observation"``: ``sd`` and interval are those of a new observation, noise
        included. ``"mean"``: those of its mean mu. Left out: the first, where the model
        has a law of observations, and a `SILFNMF` has none.

    Returns
    -------
    Dataset
        ``mean``, ``sd``, ``lower``, ``upper`` in the unit of the data, float64,
        backed by dask.

    Raises
    ------
    OptionError
        If the run kept no draws, a label is unknown or an option is not allowed.

    References
    ----------
    Şimşekli et al. 2017, equations 1 and 11. Quantiles by weight: Akinshin 2023, "Weighted
    quantile estimators" (that of type 7), with Kish's effective number.
    """
    _check_options(interval, of)
    tree = require_draws(trace, "a prediction")
    dims = factor_dims(tree)
    model, dispersion, of = _model_of(tree, of)
    cells = select(*_labelled(tree, dims), rows, columns)
    fine = draws_of(tree["posterior"].to_dataset(), dims, cells, draw_weights(tree))
    own = wanted = per_cell(moments, fine)
    if COARSE in tree.children and tree[COARSE].sizes["draw"]:
        coarse = per_cell(moments, draws_of(tree[COARSE].to_dataset(), dims, cells))
        wanted = extrapolated_moments(own, coarse, model.nonnegative)
    mean, variance = wanted
    if of == "observation":
        law = {"likelihood": model.likelihood, "dispersion": dispersion, "interval": interval}
        sd, lower, upper = map_blocks(
            _of_observation,
            mean,
            variance,
            **law,
            new_axis=0,
            chunks=((3,), *mean.chunks),
            dtype=np.float64,
            meta=np.empty((0,) * (mean.ndim + 1)),
        )
    else:
        sd = da.sqrt(variance)
        tail = 0.5 * (1.0 - interval)
        ends = per_cell(quantiles, fine, levels=(tail, 1.0 - tail))
        lower, upper = _moved(ends, own, wanted, model.nonnegative)
    values = {"mean": mean, "sd": sd, "lower": lower, "upper": upper}
    named = [name for name in (*cells.coords.variables, *cells.dims) if isinstance(name, str)]
    names: dict[Any, str] = dict(beside(named, values))
    moved = {n: names[n] for n in cells.coords.variables.keys() | cells.coords.dims if n in values}
    along = [names.get(dim, dim) for dim in cells.dims]
    result = xr.Dataset({name: (along, value) for name, value in values.items()})
    result = result.assign_coords(cells.coords.rename(moved).coords)
    result = result.isel({names.get(dim, dim): 0 for dim in cells.dropped})
    return result.assign_attrs(of=of, interval=interval)


def _labelled(tree: xr.DataTree, dims: tuple[str, str]) -> tuple[xr.Dataset, dict[str, int]]:
    """Labels of rows and columns, and the lengths of both, all under the user's own names."""
    group, names = tree["posterior"].to_dataset(), own_names(tree)
    labels = {
        names.get(name, name): ([names.get(d, d) for d in coord.dims], coord.data, coord.attrs)
        for name, coord in group.coords.items()
        if set(coord.dims) <= set(dims)
    }
    return xr.Dataset(coords=labels), {names.get(dim, dim): group.sizes[dim] for dim in dims}


def _check_options(interval: float, of: str | None) -> None:
    if not 0.0 < interval < 1.0:
        raise OptionError(
            f"interval must lie strictly between 0 and 1, got {interval!r}; 0.9 is 90 %"
        )
    if of not in ("observation", "mean", None):
        raise OptionError(f"of must be 'observation' or 'mean', got {of!r}; or leave it out")


def _model_of(tree: xr.DataTree, of: Of | None) -> tuple[Any, float, Of]:
    """The model of a run, its dispersion, and what the interval is about."""
    try:
        model = model_from_dict(json.loads(tree.attrs["model"]))
        observed = model.has_observations
        dispersion = float(tree.attrs["dispersion"]) if observed else float("nan")
    except (KeyError, TypeError, ValueError) as error:
        raise StoreFormatError(
            "this trace does not say its model (attributes 'model' and 'dispersion'); "
            "pass the result of daskfactor.sample or the path of its store"
        ) from error
    if of == "observation" and not observed:
        raise OptionError(
            "of='observation' needs a law of new observations, and a SILFNMF has none: it only "
            "tells good factorizations from others; pass of='mean'"
        )
    return model, dispersion, of or ("observation" if observed else "mean")


def _of_observation(
    mean: Array, variance: Array, likelihood: Likelihood, dispersion: float, interval: float
) -> Array:
    """Standard deviation, lower and upper end for a new observation."""
    total = likelihood.observation_variance(mean, variance, dispersion)
    ends = likelihood.interval(mean, variance, dispersion, interval)
    return np.stack([np.sqrt(total), *ends])


def _moved(
    ends: tuple[Lazy, Lazy], own: tuple[Lazy, Lazy], wanted: tuple[Lazy, Lazy], nonnegative: bool
) -> tuple[Lazy, Lazy]:
    """Quantiles of mu, moved from its own mean and variance to the extrapolated ones."""
    spread = da.where(own[1] > 0, own[1], 1.0)
    scale = da.where(own[1] > 0, da.sqrt(wanted[1] / spread), 1.0)
    low, high = (wanted[0] + scale * (end - own[0]) for end in ends)
    return (da.maximum(low, 0.0), da.maximum(high, 0.0)) if nonnegative else (low, high)


@reads_here
def monitored(trace: Trace, *, interval: float = 0.9, of: Of | None = None) -> xr.Dataset:
    r"""Mean, standard deviation and interval at the cells that the run monitored.

    .. math:: m = \sum_c n_c m_c / n, \qquad
        s^2 = \sum_c n_c \left(s_c^2 + (m_c - m)^2\right) / n

    over chains c with n_c cycles each: every cycle counts, kept or not.

    Parameters
    ----------
    trace
        Result of a run with ``monitor=``, or the path of its store.
    interval, of
        As in `predict`. With ``of="mean"`` the interval is that of a gamma law
        (normal, for real-valued models) with the streamed mean and variance.

    Returns
    -------
    Dataset
        ``mean``, ``sd``, ``lower``, ``upper`` over ``cell``, in the unit of the data.

    Raises
    ------
    OptionError
        If the run monitored no cells, or an option is not allowed.
    """
    _check_options(interval, of)
    tree = as_tree(trace)
    if "monitor" not in tree.children:
        raise OptionError(
            "this run monitored no cells: none were asked for with monitor=, or none was missing"
        )
    model, dispersion, of = _model_of(tree, of)
    group = tree["monitor"].to_dataset().load()
    mean, variance = _pooled(group)
    if of == "observation":
        sd, lower, upper = _of_observation(mean, variance, model.likelihood, dispersion, interval)
    else:
        sd = np.sqrt(variance)
        lower, upper = _matched_interval(mean, variance, model.nonnegative, interval)
    values = {"mean": mean, "sd": sd, "lower": lower, "upper": upper}
    own = {name: group[name].variable for name in CELL_INDICES}
    users = [n for n, coord in group.coords.items() if coord.dims == ("cell",) and n not in own]
    given = {name: str(own_names(tree).get(name, name)) for name in users}
    shown = beside(given.values(), {"cell", *own, *values})
    result = xr.Dataset({name: ("cell", value) for name, value in values.items()})
    result = result.assign_coords({shown[given[n]]: group[n].variable for n in users} | own)
    return result.assign_attrs(of=of, interval=interval)


def _pooled(group: xr.Dataset) -> tuple[Array, Array]:
    """Mean and population variance over all chains that have any cycles."""
    begun = group["count"].values > 0
    count = group["count"].values[begun, None].astype(np.float64)
    means, variances = group["mean"].values[begun], group["var"].values[begun]
    mean = (count * means).sum(axis=0) / count.sum()
    variance = (count * (variances + (means - mean) ** 2)).sum(axis=0) / count.sum()
    return mean, variance


def _matched_interval(
    mean: Array, variance: Array, nonnegative: bool, interval: float
) -> tuple[Array, Array]:
    tails = np.array([0.5 * (1.0 - interval), 0.5 * (1.0 + interval)])[:, None]
    if not nonnegative:
        lower, upper = mean + np.sqrt(variance) * stats.norm.ppf(tails)
        return lower, upper
    certain = ~((mean > 0) & (variance > 0))
    m, s = np.where(certain, 1.0, mean), np.where(certain, 1.0, variance)
    lower, upper = np.where(certain, mean, stats.gamma.ppf(tails, m**2 / s, scale=s / m))
    return lower, upper
