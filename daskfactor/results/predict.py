"""Lazy predictions with intervals for any cells, from all draws of mu = WH."""

import json
from collections.abc import Hashable, Mapping
from typing import Any, Final, Literal

import dask
import dask.array as da
import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import special

from daskfactor.checks import inner_share, one_of
from daskfactor.data.labels import Stack
from daskfactor.errors import OptionError
from daskfactor.models.likelihood import Likelihood
from daskfactor.results.predictive_moments import (
    draws_of,
    from_array,
    map_blocks,
    moments,
    per_cell,
    quantiles,
)
from daskfactor.results.selection import Cells, paired, select
from daskfactor.results.tensors import chosen
from daskfactor.results.uncertainty import has_uncertainty, knows_variances, variances
from daskfactor.runs.schema import (
    CELL_INDICES,
    CELL_NAMES,
    COARSE,
    IDENTITY,
    MONITOR,
    tree_of,
)
from daskfactor.runs.stacks import stacks_of, unstacked, with_index
from daskfactor.runs.trace import Run, Trace, reads_in_threads

Array = NDArray[Any]
Of = Literal["observation", "mean"]

compute: Final[Any] = dask.compute  # type: ignore[attr-defined]  # carries no types


def predict(
    trace: Trace,
    rows: Any = None,
    columns: Any = None,
    *,
    interval: float = 0.9,
    of: Of | None = None,
    uncertainty: Any = None,
) -> xr.Dataset:
    r"""Return posterior mean, standard deviation and interval of any cells, lazily.

    .. math:: \hat\mu = \mathrm{E}[(WH)_{ij}], \qquad
        \mathrm{Var}[v] = \mathrm{Var}[(WH)_{ij}] + \phi\, \hat\mu^{2-\beta}

    Compute the result with ``.load()``, ``.to_zarr()`` and the like; all draws of one block take
    at most 64 MB. For :class:`PSGRRLD` the draws of the fine chain are used; :func:`expectation`
    extrapolates.

    Particles have their weights, and those of weight 0 are not read. The quantile at level p of M
    particles is the mean of the inverse distribution function over a window of width
    :math:`1/n` that starts at :math:`p (1 - 1/n)`, with the effective number
    :math:`n = 1 / \sum_m w_m^2`: for equal weights this is the usual quantile, linear between
    draws, and a small weight has a small effect.

    Parameters
    ----------
    trace
        Result of a run that kept draws, or the path of its store.
    rows, columns
        None for all, a label, an array or slice of labels, or a boolean mask; integer positions
        if the data have no labels; or the result of :func:`transform`, for all new rows or
        columns. Integers are labels if the labels are integers; for positions select from the
        trace, ``trace.isel(user=[0, 1])``. Two `xarray.DataArray` with the same single dimension
        name single cells.
    interval
        Probability of the interval from ``lower`` to ``upper``, which has equal tails.
    of : {"observation", "mean"}, optional
        Quantity that the standard deviation and the interval describe: a new ``"observation"``
        of the cell, with noise, or its ``"mean"``; by default the observation, if the model
        defines one. A `SILFNMF` has
        none, and neither have cells whose uncertainties are not known.
    uncertainty
        Standard deviation of a new observation of each of these cells, for a run with
        uncertainties: one number, an array (rows, columns), one (cells,) for single cells, or
        a DataArray with the dimensions of the result, which is matched by label. By default
        that of the run, which is in its ``observed_data`` if it was dense in memory. Both are
        scaled by the dispersion. If the uncertainty of the run is infinite, so are ``sd`` and
        the interval: pass ``uncertainty`` for these cells, or ``of="mean"``.

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

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> prediction = dfac.predict(trace, rows=[0, 1], columns=[2, 3, 5], interval=0.9)
    >>> prediction["mean"].shape, bool((prediction["lower"] <= prediction["upper"]).all())
    ((2, 3), True)
    """
    _check_options(interval, of)
    run = Run.of(trace, "a prediction", ", or with monitor=(rows, columns) for a few cells")
    if run.axes is not None:
        if columns is not None:
            raise OptionError(
                "cells of a tensor are one tuple of positions along each axis; leave columns out "
                f"and pass predict(trace, ({', '.join(run.axes.names)}))"
            )
        tensor = chosen(run, run.axes, rows)
        cells = tensor.rows, tensor.columns
        return tensor.in_shape(predict_at(tensor.run, cells, interval, of, uncertainty))
    run.require_matrix("predict")
    run, rows = with_new(run, "W", rows)
    run, columns = with_new(run, "H", columns)
    cells = select(run, rows, columns)
    result = predict_at(run, cells, interval, of, uncertainty)
    return _with_stacks(result, stacks_of(run.attrs), (rows, columns), cells)


def predict_at(
    run: Run, cells: Cells, interval: float, of: Of | None = None, uncertainty: Any = None
) -> xr.Dataset:
    """Return the prediction of a grid of cells, or of single cells, see `predict`."""
    model, dispersion, of = _model_of(run, of, uncertainty)
    draws = draws_of(run.posterior, cells, run.weights)
    mean, variance = per_cell(moments, draws)
    if of == "observation":
        phi = _dispersion_of(run, cells, dispersion, uncertainty, mean)
        sd, lower, upper = map_blocks(
            _observation_interval,
            mean,
            variance,
            phi,
            likelihood=model.likelihood,
            interval=interval,
            new_axis=0,
            chunks=((3,), *mean.chunks),
            dtype=np.float64,
            meta=np.empty((0,) * (mean.ndim + 1)),
        )
    else:
        sd = da.sqrt(variance)
        tail = 0.5 * (1.0 - interval)
        lower, upper = per_cell(quantiles, draws, levels=(tail, 1.0 - tail))
    along = cells[0].dims if paired(cells) else run.dims
    result = _result(run, along, (mean, sd, lower, upper), of, interval)
    # A single label drops its dimension, unless it is the label of several rows.
    result = result.isel({dim: 0 for dim, at in zip(along, cells, strict=False) if not at.ndim})
    return result.assign_coords({**cells[0].coords, **cells[1].coords})


def _result(
    run: Run, along: tuple[Hashable, ...], values: tuple[Any, ...], of: Of, interval: float
) -> xr.Dataset:
    """Return mean, standard deviation and interval in the unit of the data."""
    units = run.data.get("units")
    attrs = {} if units is None else {"units": units}
    names = ("mean", "sd", "lower", "upper")
    variables = {name: (along, one, attrs) for name, one in zip(names, values, strict=True)}
    return xr.Dataset(variables, attrs={"of": of, "interval": interval})


def with_new(run: Run, name: str, new: Any) -> tuple[Run, Any]:
    """Replace the rows (or columns) of a run by new ones, and return the key to select them.

    Keys other than factors from `transform` are returned unchanged.

    Raises
    ------
    OptionError
        If they belong to other draws, or only one of trace and factors is aligned.
    """
    if not (isinstance(new, xr.DataArray) and "component" in new.dims):
        return run, new
    what, each = {"W": ("rows", "row"), "H": ("columns", "column")}[name]
    if new.name != name or not {"chain", "draw"} <= set(new.dims):
        raise OptionError(
            f"{what} must be draws of new {what}, as daskfactor.transform(trace, V, "
            f'axis="{each}") returns them, got {new.name} with dimensions {new.dims}'
        )
    aligned = int(run.is_aligned)
    if new.attrs.get("aligned", aligned) != aligned:
        raise OptionError(
            f"only one of new {what} and trace is aligned, so that their components differ; pass "
            "the same trace to both calls"
        )
    for name_in_run, name_in_new in IDENTITY.items():
        if name_in_new in new.attrs and new.attrs[name_in_new] != run.attrs.get(name_in_run):
            raise _other_trace_error(what)
    try:
        group = run.posterior.sel(chain=new["chain"].values, draw=new["draw"].values)
    except KeyError as error:
        raise _other_trace_error(what) from error
    old = run.dims["WH".index(name)]
    if len(new.dims) != 4:
        raise OptionError(
            f"new {what} need one dimension besides chain, draw and component, got {new.dims}; "
            f"select with a list to keep it: new.isel({{{old!r}: [0]}})"
        )
    if new.sizes["component"] != group.sizes["component"]:
        raise OptionError(
            f"the new {what} have {new.sizes['component']} components, but the run "
            f"{group.sizes['component']}; pass the result of daskfactor.transform for this run"
        )
    group = group.drop_dims(old).assign({name: new.drop_vars("weight", errors="ignore")})
    gone = (COARSE, "observed_data")
    groups = {key: node for key, node in run.groups.items() if key not in gone}
    # The observed data belong to the replaced rows.
    about = {key: value for key, value in run.data.items() if key != "n_observed"}
    attrs = run.attrs | ({"data": json.dumps(about)} if about else {})
    return Run(tree_of(groups | {"posterior": group}, attrs)), None


def _other_trace_error(what: str) -> OptionError:
    return OptionError(
        f"new {what} were drawn for another trace; pass the same trace to both calls"
    )


def _with_stacks(
    result: xr.Dataset,
    stacks: dict[str, Stack],
    keys: tuple[Any, Any],
    cells: Cells,
) -> xr.Dataset:
    """Unstack dimensions that were selected by level; add a MultiIndex to the others."""
    if paired(cells):
        return result
    result = with_index(result, stacks)
    for key, at in zip(keys, cells, strict=True):
        dim: Any = next(iter(at.dims), None)
        if dim not in stacks or dim not in result.indexes:
            continue
        if isinstance(key, Mapping) or (key is None and stacks[dim].maps):
            result = unstacked(result, dim)
            result = result.sel(key) if isinstance(key, Mapping) else result
    return result


def _check_options(interval: float, of: str | None) -> None:
    inner_share("interval", interval)
    one_of("of", of, ("observation", "mean", None), "; or leave it out")


def require_noise(run: Run, model: Any, purpose: str, uncertainty: Any, other: str = "") -> None:
    """Refuse a run that does not tell the noise of an observation; ``other`` is an alternative.

    Raises
    ------
    OptionError
        If the model has no observations, or uncertainties are unknown.
    """
    if not model.has_observations:
        advice = f"pass {other}" if other else "use another model"
        raise OptionError(
            f"{purpose} needs a likelihood of observations, which {type(model).__name__} does not "
            f"have; {advice}"
        )
    if not knows_variances(run, uncertainty):
        raise OptionError(
            f"{purpose} needs the uncertainty of each of these cells, which the result does not "
            f"have; pass them as uncertainty={other and f', or {other}'}"
        )


def _model_of(run: Run, of: Of | None, uncertainty: Any) -> tuple[Any, Any, Of]:
    """Return the model of a run, its dispersion(s), and the target of the interval."""
    model, dispersion = run.law
    has_noise = knows_variances(run, uncertainty) and model.has_observations
    if of == "observation":
        require_noise(run, model, "of='observation'", uncertainty, "of='mean'")
    return model, dispersion, of or ("observation" if has_noise else "mean")


def _dispersion_of(run: Run, cells: Any, dispersion: Any, uncertainty: Any, mean: Any) -> Any:
    """Return the dispersion of a new observation, for each cell or for all of them."""
    if np.ndim(dispersion):  # along the last axis of the result
        dispersion = dispersion[np.atleast_1d(cells[1].values)]
        if isinstance(mean, da.Array):
            dispersion = from_array(dispersion, mean.chunks[-1:])
    if not has_uncertainty(run):
        return dispersion
    return dispersion * variances(run, cells, uncertainty, mean)


def _observation_interval(
    mean: Array, variance: Array, dispersion: Any, likelihood: Likelihood, interval: float
) -> Array:
    """Return standard deviation, lower and upper end for a new observation."""
    total = likelihood.observation_variance(mean, variance, dispersion)
    ends = likelihood.interval(mean, variance, dispersion, interval)
    return np.stack([np.sqrt(total), *ends])


@reads_in_threads
def monitored(
    trace: Trace, *, interval: float = 0.9, of: Of | None = None, uncertainty: Any = None
) -> xr.Dataset:
    r"""Return mean, standard deviation and interval of the cells that the run monitored.

    .. math:: m = \sum_c n_c m_c / n, \qquad
        s^2 = \sum_c n_c \left(s_c^2 + (m_c - m)^2\right) / n

    over chains c with n_c cycles each, including cycles without a stored draw.

    Parameters
    ----------
    trace
        Result of a run with ``monitor=``, or the path of its store.
    interval, of, uncertainty
        As in `predict`. With ``of="mean"`` the interval is that of a gamma distribution
        (normal for real-valued models) with the streamed mean and variance.

    Returns
    -------
    Dataset
        ``mean``, ``sd``, ``lower``, ``upper`` over ``cell``, in the unit of the data.

    Raises
    ------
    OptionError
        If the run monitored no cells, or an option is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> held = dfac.hold_out(V, 0.1, random_seed=0)
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(held.train, dfac.TweedieNMF(2), monitor=held.cells, **run)
    >>> dfac.monitored(trace)["mean"].size == held.values.size
    True
    """
    _check_options(interval, of)
    run = Run.of(trace)
    if MONITOR not in run:
        raise OptionError("the run monitored no cells; run again with monitor=(rows, columns)")
    if run.axes is None:
        run.require_matrix("monitored")
    model, dispersion, of = _model_of(run, of, uncertainty)
    group = run.group(MONITOR).load()
    mean, variance = _pooled(group)
    cells = group[CELL_INDICES[0]], group[CELL_INDICES[1]]
    if of == "observation":
        (phi,) = compute(_dispersion_of(run, cells, dispersion, uncertainty, mean))
        sd, lower, upper = _observation_interval(mean, variance, phi, model.likelihood, interval)
    else:
        sd = np.sqrt(variance)
        lower, upper = matched_interval(mean, variance, model.nonnegative, interval)
    names = {inner: name for name, inner in CELL_NAMES.items()}
    result = _result(run, ("cell",), (mean, sd, lower, upper), of, interval)
    if run.axes is not None:
        return result.assign_coords(run.axes.coords(*(at.values for at in cells)))
    return result.assign_coords(
        {
            names.get(str(name), name): coord.variable
            for name, coord in group.coords.items()
            if coord.dims == ("cell",)
        }
    )


def _pooled(group: xr.Dataset) -> tuple[Array, Array]:
    """Return mean and population variance over all chains with cycles."""
    started = group["count"].values > 0
    count = group["count"].values[started, None].astype(np.float64)
    means, variances = group["mean"].values[started], group["var"].values[started]
    mean = (count * means).sum(axis=0) / count.sum()
    variance = (count * (variances + (means - mean) ** 2)).sum(axis=0) / count.sum()
    return mean, variance


def matched_interval(
    mean: Array, variance: Array, nonnegative: bool, interval: float
) -> tuple[Array, Array]:
    """Return an interval of the gamma (or normal) distribution with these moments."""
    tails = np.array([0.5 * (1.0 - interval), 0.5 * (1.0 + interval)])[:, None]
    if not nonnegative:
        lower, upper = mean + np.sqrt(variance) * special.ndtri(tails)
        return lower, upper
    from scipy import stats  # takes a second to import

    certain = ~((mean > 0) & (variance > 0))
    m, s = np.where(certain, 1.0, mean), np.where(certain, 1.0, variance)
    lower, upper = np.where(certain, mean, stats.gamma.ppf(tails, m**2 / s, scale=s / m))
    return lower, upper
