"""Predictions with error bars for any cells of the matrix, from a trace."""

import json
from typing import Any, Literal, NamedTuple

import dask.array as da
import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import stats

from daskfactor.errors import OptionError, StoreFormatError
from daskfactor.models import model_from_dict
from daskfactor.models.likelihood import Likelihood
from daskfactor.results.cells import (
    Cells,
    Draws,
    Lazy,
    blockwise,
    draws_of,
    moments,
    per_cell,
    quantiles,
    select,
)
from daskfactor.results.schema import CELL_INDICES, beside, factor_dims, own_names
from daskfactor.results.trace import (
    Trace,
    as_tree,
    draw_weights,
    extrapolated_moments,
    require_draws,
)

Of = Literal["observation", "mean"]


class _Law(NamedTuple):
    """What the prediction needs to know of the model."""

    likelihood: Likelihood
    dispersion: float
    nonnegative: bool
    observations: bool = True


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
    law = _law(tree)
    of = _what(of, law)
    cells = select(*_labelled(tree, dims), rows, columns)
    fine = draws_of(tree["posterior"].to_dataset(), dims, cells, draw_weights(tree))
    fine_moments = tuple(per_cell(moments, 2, fine))
    mean, variance = _extrapolated(tree, dims, cells, fine_moments, law)
    if of == "observation":
        sd, lower, upper = _of_observation(mean, variance, law, interval)
    else:
        sd = da.sqrt(variance)
        lower, upper = _of_mean(fine, fine_moments, (mean, variance), law, interval)
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


def _what(of: Of | None, law: _Law) -> Of:
    """What the interval is about."""
    if of == "observation" and not law.observations:
        raise OptionError(
            "of='observation' needs a law of new observations, and a SILFNMF has none: it only "
            "tells good factorizations from others; pass of='mean'"
        )
    return of or ("observation" if law.observations else "mean")


def _law(tree: xr.DataTree) -> _Law:
    try:
        model = model_from_dict(json.loads(tree.attrs["model"]))
        observed = model.has_observations
        dispersion = float(tree.attrs["dispersion"]) if observed else float("nan")
    except (KeyError, TypeError, ValueError) as error:
        raise StoreFormatError(
            "this trace does not say its model (attributes 'model' and 'dispersion'); "
            "pass the result of daskfactor.sample or the path of its store"
        ) from error
    return _Law(model.likelihood, dispersion, model.nonnegative, observed)


def _extrapolated(
    tree: xr.DataTree,
    dims: tuple[str, str],
    cells: Cells,
    fine: tuple[Lazy, Lazy],
    law: _Law,
) -> tuple[Lazy, Lazy]:
    """Mean and variance of mu: 2 fine - coarse where there is a coarse chain."""
    if "posterior_coarse" not in tree.children or tree["posterior_coarse"].sizes["draw"] == 0:
        return fine
    group = tree["posterior_coarse"].to_dataset()
    coarse = tuple(per_cell(moments, 2, draws_of(group, dims, cells)))
    return extrapolated_moments(fine, coarse, law.nonnegative)


def _of_observation(
    mean: Lazy, variance: Lazy, law: _Law, interval: float
) -> tuple[Lazy, Lazy, Lazy]:
    axes = tuple(range(mean.ndim))
    three = blockwise(
        _observation_block,
        (mean.ndim, *axes),
        mean,
        axes,
        variance,
        axes,
        new_axes={mean.ndim: 3},
        law=law,
        interval=interval,
        dtype=np.float64,
        meta=np.empty((0,) * (mean.ndim + 1)),
    )
    return three[0], three[1], three[2]


def _observation_block(
    mean: NDArray[np.float64], variance: NDArray[np.float64], law: _Law, interval: float
) -> NDArray[np.float64]:
    """Standard deviation, lower and upper end for a new observation."""
    total = law.likelihood.observation_variance(mean, variance, law.dispersion)
    ends = law.likelihood.interval(mean, variance, law.dispersion, interval)
    return np.stack([np.sqrt(total), *ends])


def _of_mean(
    fine: Draws,
    fine_moments: tuple[Lazy, Lazy],
    wanted: tuple[Lazy, Lazy],
    law: _Law,
    interval: float,
) -> tuple[Lazy, Lazy]:
    """Quantiles of mu, moved to the extrapolated mean and variance where these differ."""
    tail = 0.5 * (1.0 - interval)
    ends = tuple(per_cell(quantiles, 2, fine, levels=(tail, 1.0 - tail)))
    if wanted is fine_moments:
        return ends
    spread = da.where(fine_moments[1] > 0, fine_moments[1], 1.0)
    scale = da.where(fine_moments[1] > 0, da.sqrt(wanted[1] / spread), 1.0)
    moved = [wanted[0] + scale * (end - fine_moments[0]) for end in ends]
    if law.nonnegative:
        moved = [da.maximum(end, 0.0) for end in moved]
    return moved[0], moved[1]


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
    law = _law(tree)
    of = _what(of, law)
    group = tree["monitor"].to_dataset().load()
    mean, variance = _pooled(group)
    if of == "observation":
        sd, lower, upper = _observation_block(mean, variance, law, interval)
    else:
        sd = np.sqrt(variance)
        lower, upper = _matched_interval(mean, variance, law, interval)
    values = {"mean": mean, "sd": sd, "lower": lower, "upper": upper}
    own = {name: group[name].variable for name in CELL_INDICES}
    users = [n for n, coord in group.coords.items() if coord.dims == ("cell",) and n not in own]
    given = {name: str(own_names(tree).get(name, name)) for name in users}
    shown = beside(given.values(), {"cell", *own, *values})
    result = xr.Dataset({name: ("cell", value) for name, value in values.items()})
    result = result.assign_coords({shown[given[n]]: group[n].variable for n in users} | own)
    return result.assign_attrs(of=of, interval=interval)


def _pooled(group: xr.Dataset) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and population variance over all chains that have any cycles."""
    begun = group["count"].values > 0
    count = group["count"].values[begun, None].astype(np.float64)
    means, variances = group["mean"].values[begun], group["var"].values[begun]
    mean = (count * means).sum(axis=0) / count.sum()
    variance = (count * (variances + (means - mean) ** 2)).sum(axis=0) / count.sum()
    return mean, variance


def _matched_interval(
    mean: NDArray[np.float64], variance: NDArray[np.float64], law: _Law, interval: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    tails = np.array([0.5 * (1.0 - interval), 0.5 * (1.0 + interval)])[:, None]
    if not law.nonnegative:
        lower, upper = mean + np.sqrt(variance) * stats.norm.ppf(tails)
        return lower, upper
    certain = ~((mean > 0) & (variance > 0))
    m, s = np.where(certain, 1.0, mean), np.where(certain, 1.0, variance)
    lower, upper = np.where(certain, mean, stats.gamma.ppf(tails, m**2 / s, scale=s / m))
    return lower, upper
