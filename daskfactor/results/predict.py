r"""Predictions with error bars for any cells of the matrix, from all draws of mu = WH, lazily.

A block of the result covers so few cells that all draws of it fit in memory. It is
one operation, which takes the rows of W and the columns of H of all draws and chains.

With weights w and their distribution function F, the quantile at level p is

.. math:: Q(p) = n \int_{p (1 - 1/n)}^{p (1 - 1/n) + 1/n} F^{-1}(u) \, du, \qquad
    n = \frac{1}{\sum_m w_m^2}.

For n equal weights the window of width 1/n overlaps two neighbouring steps of the inverse
of F, in the very shares in which `numpy.quantile` takes their mean. A weight of 0 is as
good as none, and a small one does little, however far off its value is. A value that is
split into two of half its weight counts as two draws: n rises, and the new window lies
within the old one. That cannot be otherwise: of 0, 0, 1, 1, all of one weight, the usual
quantile is not that of 0, 1.

Source: Akinshin 2023, "Weighted quantile estimators" (that of type 7); n is Kish's.
"""

import json
from collections.abc import Callable
from math import isqrt
from typing import Any, Final, Literal, NamedTuple

import dask
import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray
from scipy import special

from daskfactor.errors import OptionError, StoreFormatError
from daskfactor.machine import single_threaded_blas
from daskfactor.models import model_from_dict
from daskfactor.models.likelihood import Likelihood
from daskfactor.results.schema import (
    CELL_INDICES,
    COARSE,
    MOMENTS,
    beside,
    factor_dims,
    own_names,
)
from daskfactor.results.trace import (
    Running,
    Trace,
    as_tree,
    draw_weights,
    effective_number,
    extrapolated_moments,
    factors_of,
    reads_here,
    relative,
    require_draws,
)
from daskfactor.results.uncertainty import has_uncertainty, knows_variances, variances

Array = NDArray[Any]
Positions = NDArray[np.int64]
Of = Literal["observation", "mean"]
Lazy = Any  # dask.array.Array

# dask's functions carry no types.
map_blocks: Final[Any] = da.map_blocks
blockwise: Final[Any] = da.blockwise
from_array: Final[Any] = da.from_array
compute: Final[Any] = dask.compute  # type: ignore[attr-defined]
concatenate: Final[Any] = da.concatenate

BLOCK_BYTES: Final = 64 * 2**20
"""Draws of the cells of a block, at most."""
FACTOR_BYTES: Final = 2**28
"""Draws of the rows of a block, and of its columns, at most."""
_SLAB: Final = 2**18
"""Values that are sorted at a time: their order and weights take several times their room."""


def predict(
    trace: Trace,
    rows: Any = None,
    columns: Any = None,
    *,
    interval: float = 0.9,
    of: Of | None = None,
    uncertainty: Any = None,
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
        has a law of observations, and a `SILFNMF` has none; where cells have uncertainties,
        if they are known.
    uncertainty
        Standard deviation of a new observation of each of these cells, for a run that had
        uncertainties of cells: one number, an array of the shape of the result, or a DataArray,
        which is matched by label. Left out: the run's own, which it keeps with its
        ``observed_data``, as it does where they were dense in memory. Both are scaled by the
        dispersion. Where the run's own is infinite, so are ``sd`` and the interval: pass one
        for these cells, or ``of="mean"``.

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
    model, dispersion, of = _model_of(tree, of, uncertainty)
    cells = select(tree, dims, rows, columns)
    fine = draws_of(tree["posterior"].to_dataset(), cells, draw_weights(tree))
    own = wanted = per_cell(moments, fine)
    if COARSE in tree.children and tree[COARSE].sizes["draw"]:
        coarse = per_cell(moments, draws_of(tree[COARSE].to_dataset(), cells))
        wanted = extrapolated_moments(own, coarse, model.nonnegative)
    mean, variance = wanted
    if of == "observation":
        phi = _noise_of(tree, cells, dispersion, uncertainty, mean)
        sd, lower, upper = map_blocks(
            _of_observation,
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
        ends = per_cell(quantiles, fine, levels=(tail, 1.0 - tail))
        lower, upper = _moved(ends, own, wanted, model.nonnegative)
    values = {"mean": mean, "sd": sd, "lower": lower, "upper": upper}
    users = own_names(tree)
    along = cells[0].dims if _paired(cells) else [users.get(dim, dim) for dim in dims]
    coords = xr.Dataset(coords={**cells[0].coords, **cells[1].coords})
    named = [name for name in (*coords.coords, *along) if isinstance(name, str)]
    names: dict[Any, str] = dict(beside(named, values))
    moved = {n: names[n] for n in coords.variables.keys() | coords.dims if n in values}
    shown = [names.get(dim, dim) for dim in along]
    result = xr.Dataset({name: (shown, value) for name, value in values.items()})
    # One label is no dimension; but a label may be that of many rows: then all are meant.
    result = result.isel({dim: 0 for dim, at in zip(shown, cells, strict=False) if not at.ndim})
    result = result.assign_coords(coords.rename(moved).coords)
    return result.assign_attrs(of=of, interval=interval)


def select(
    tree: xr.DataTree, dims: tuple[str, str], rows: Any, columns: Any
) -> tuple[xr.DataArray, xr.DataArray]:
    """Find the positions of rows and of columns that a user names, with the labels they have.

    Parameters
    ----------
    tree
        A trace with draws.
    dims
        Names of rows and of columns in it.
    rows, columns
        None (all), a label, an array of labels, a slice, or a boolean mask; integer
        positions where there is no coordinate. Two DataArrays that share their one
        dimension name single cells, as in xarray's vectorised indexing.

    Raises
    ------
    OptionError
        If a label or position does not exist, or the two do not go together.
    """
    pointwise = all(isinstance(key, xr.DataArray) for key in (rows, columns))
    pointwise = pointwise and bool(set(rows.dims) & set(columns.dims))
    if pointwise and (rows.dims != columns.dims or rows.ndim != 1):
        raise OptionError(
            "rows and columns that name single cells must have the same single dimension, "
            f"got dimensions {rows.dims} and {columns.dims}"
        )
    chosen_rows, chosen_columns = (
        _chosen(_positions(tree, dim), key, what, pointwise)
        for dim, key, what in zip(dims, (rows, columns), ("rows", "columns"), strict=True)
    )
    if pointwise and chosen_rows.size != chosen_columns.size:
        raise OptionError(
            f"rows and columns that share the dimension {rows.dims[0]!r} must be equally long, "
            f"got {chosen_rows.size} and {chosen_columns.size}"
        )
    return chosen_rows, chosen_columns


def _paired(cells: tuple[xr.DataArray, xr.DataArray]) -> bool:
    """Whether rows and columns name single cells, and not a grid of them."""
    return bool(set(cells[0].dims) & set(cells[1].dims))


def _positions(tree: xr.DataTree, dim: str) -> xr.DataArray:
    """Positions of all rows, or columns, and their labels, under the user's own names."""
    group, names = tree["posterior"].to_dataset(), own_names(tree)
    own = names.get(dim, dim)
    labels = {
        names.get(name, name): ([own] * coord.ndim, coord.data, coord.attrs)
        for name, coord in group.coords.items()
        if set(coord.dims) <= {dim}
    }
    return xr.DataArray(np.arange(group.sizes[dim]), labels, (own,))


def _chosen(at: xr.DataArray, key: Any, what: str, pointwise: bool) -> xr.DataArray:
    """The positions, out of all of them, that a key names."""
    dim = at.dims[0]
    if key is None:
        return at
    if isinstance(key, xr.DataArray) and not pointwise:
        key = key.values
    if np.ndim(key) > 1:
        raise OptionError(f"{what} must be one-dimensional, got {np.ndim(key)} dimensions")
    if isinstance(key, list | tuple | set | pd.Index | pd.Series):
        key = np.asarray(list(key))
    mask = not isinstance(key, slice) and np.asarray(key).dtype == bool
    if pointwise and key.size in (0, at.size if mask else 0):
        # Positions: fewer than the mask is long, or none, of whatever type the labels are.
        chosen, mask = np.flatnonzero(key.values), True
        key = key[chosen].drop_vars(dim, errors="ignore").copy(data=chosen)
    elif np.ndim(key) == 1 and len(key) == 0:
        return at[:0]
    labelled = dim in at.coords and not mask
    try:
        found = at.sel({dim: key}) if labelled else at.isel({dim: key})
    except (KeyError, IndexError, TypeError, ValueError, pd.errors.InvalidIndexError) as error:
        raise OptionError(_unknown(at, key, what, labelled)) from error
    if pointwise and dim not in at.coords and dim not in key.dims:
        return found.assign_coords({dim: (key.dims, found.values)})
    return found


def _unknown(at: xr.DataArray, key: Any, what: str, labelled: bool) -> str:
    dim = at.dims[0]
    if not labelled:
        return (
            f"{what}={key!r} does not fit the {at.size} positions of {dim!r}, which has "
            f"no labels; pass integers from 0 to {at.size - 1}, a slice or a mask"
        )
    index = at.indexes[dim]
    first = ", ".join(repr(label) for label in index[:3].tolist())
    if not index.is_unique:
        return f"the labels of {dim!r} are not unique; select {what} with a boolean mask"
    wanted = [] if isinstance(key, slice) else np.atleast_1d(np.asarray(key)).tolist()
    missing = ", ".join(repr(label) for label in wanted if label not in index)
    got = missing[:200] or repr(key)
    return (
        f"{what}: there is no {got} among the {len(index)} labels of {dim!r} ({first}, ...); "
        "pass labels of that coordinate, a slice of them, or None for all"
    )


class Draws(NamedTuple):
    """Selected rows and columns of the factors, (chain, draw, row, component) and so on.

    ``weight`` (chain, draw) is in units of the largest, all positive; None where draws
    count alike. For points, W and H hold the rows and columns that occur, ``row_at`` and
    ``column_at`` (p,) say which of them each point takes; for a grid they are None.
    """

    W: Lazy
    H: Lazy
    row_at: Lazy | None
    column_at: Lazy | None
    weight: NDArray[np.float64] | None = None


def draws_of(
    group: xr.Dataset,
    cells: tuple[xr.DataArray, xr.DataArray],
    weights: NDArray[np.float64] | None = None,
) -> Draws:
    """Select factors lazily, cut into the rows and columns of the blocks of the result.

    Of draws with ``weights`` (chain, draw) those without mass are left out; where all
    others have the same, they count alike.
    """
    kept = None if weights is None or (weights > 0).all() else weights > 0
    if weights is not None:
        weights = relative(group, weights if kept is None else weights[kept][None])
        weights = None if (weights == 1.0).all() else weights
    W, H = (factor.data for factor in factors_of(group))
    n_draws = W.shape[0] * W.shape[1] if kept is None else int(kept.sum())
    block = max(1, BLOCK_BYTES // (n_draws * W.dtype.itemsize))
    rows, columns = (np.atleast_1d(at.values) for at in cells)
    if not _paired(cells):
        # With many components rows and columns may be larger than the cells they make.
        most = max(1, FACTOR_BYTES // (n_draws * W.shape[3] * W.dtype.itemsize))
        side = min(len(columns), isqrt(block) or 1, most)
        height = max(1, min(len(rows), block // max(1, side), most))
        width = max(1, min(len(columns), block // height, most))
        W = _cut(_take(W, 2, rows), 2, height, kept)
        return Draws(W, _cut(_take(H, 3, columns), 3, width, kept), None, None, weights)
    rows, row_at = np.unique(rows, return_inverse=True)
    columns, column_at = np.unique(columns, return_inverse=True)
    # A point gathers a row of W and a column of H: that may be larger than its draws.
    length = min(block, max(1, BLOCK_BYTES // (2 * W.shape[3] * W.dtype.itemsize)))
    return Draws(
        _cut(_take(W, 2, rows), 2, -1, kept),
        _cut(_take(H, 3, columns), 3, -1, kept),
        from_array(row_at.reshape(-1), chunks=length),
        from_array(column_at.reshape(-1), chunks=length),
        weights,
    )


def _take(array: Any, axis: int, at: Positions) -> Any:
    """Entries of one axis; without a copy where they are neighbours."""
    key: list[Any] = [slice(None)] * 4
    contiguous = len(at) > 0 and bool(np.all(np.diff(at) == 1))
    key[axis] = slice(int(at[0]), int(at[-1]) + 1) if contiguous else at
    return array[tuple(key)]


def _cut(array: Any, axis: int, length: int, kept: NDArray[np.bool_] | None) -> Lazy:
    """Chunks of some rows or columns and all components; draws lie as they are.

    Draws that are not ``kept`` go before chunks are joined, so that they are never read.
    """
    if isinstance(array, np.ndarray):
        # A random name: hashing the draws would read them all.
        chunks = [-1, -1, -1, -1]
        chunks[axis] = length
        array = from_array(array, chunks=tuple(chunks), name=False)
    if kept is not None:  # chosen draws of all chains one after the other, (1, draw, ...)
        chosen = [
            array[at : at + 1, np.flatnonzero(own)] for at, own in enumerate(kept) if own.any()
        ]
        array = concatenate(chosen, axis=1)
    return array.rechunk({2: -1, 3: -1} | {axis: length})


def per_cell(function: Callable[..., Array], draws: Draws, **options: Any) -> tuple[Lazy, Lazy]:
    """Compute two numbers of every cell from all draws of it, (cells), float64.

    Parameters
    ----------
    function
        `moments` or `quantiles`; called with W (chain, draw, r, K), H (chain, draw, K, c),
        the rows and columns of points or None, and the weights of the draws or None.
    """
    # Draws of W and of H have chunks of their own, and the letters s, d and t, u.
    axes = "p"
    arguments = [draws.W, "sdik", draws.H, "tulj", draws.row_at, "p", draws.column_at, "p"]
    if draws.row_at is None:
        axes = "rc"
        arguments = [draws.W, "sdrk", draws.H, "tulc", None, None, None, None]
    first, second = blockwise(
        function,
        "q" + axes,
        *arguments,
        new_axes={"q": 2},
        concatenate=True,
        align_arrays=False,
        weight=draws.weight,
        dtype=np.float64,
        meta=np.empty((0,) * (1 + len(axes))),
        **options,
    )
    return first, second


def _mu(W: Array, H: Array, row_at: Array | None, column_at: Array | None) -> Array:
    """Mu of one draw, (r, c) or (p,)."""
    if row_at is None:
        return np.asarray(W @ H)
    # With components last both gathers take neighbouring values.
    return np.asarray(np.einsum("pk,pk->p", W[row_at], np.ascontiguousarray(H.T)[column_at]))


def moments(
    W: Array, H: Array, row_at: Array | None, column_at: Array | None, *, weight: Array | None
) -> Array:
    """Mean and population variance of mu over chains and draws, by weight.

    Each chain's are taken in one pass (West 1979, with each weight 1 where there are none),
    and then those of their union (Chan, Golub and LeVeque 1983).
    """
    shape = (W.shape[2], H.shape[3]) if row_at is None else (len(row_at),)
    chains = [Running(shape) for _ in W]
    with single_threaded_blas():
        for at in np.ndindex(W.shape[:2]):
            mass = 1.0 if weight is None else float(weight[at])
            chains[at[0]].add(_mu(W[at], H[at], row_at, column_at), mass)
    means = np.stack([one.mean for one in chains])
    totals = np.reshape([one.total for one in chains], (-1, *(1,) * len(shape)))
    counts = np.broadcast_to(totals, means.shape)
    count = counts.sum(axis=0)
    mean = (counts * means).sum(axis=0) / count
    square = np.sum([one.square for one in chains], axis=0)
    square += (counts * (means - mean) ** 2).sum(axis=0)
    return np.stack([mean, square / count])


def quantiles(
    W: Array,
    H: Array,
    row_at: Array | None,
    column_at: Array | None,
    *,
    weight: Array | None,
    levels: tuple[float, float],
) -> Array:
    """Quantiles of mu over chains and draws, linear between draws as `numpy.quantile` has them.

    A full sort of neighbouring values is vectorised: measured seven times as fast
    as the partition along a strided axis that `numpy.quantile` does.
    """
    with single_threaded_blas():
        mu = np.stack([_mu(W[at], H[at], row_at, column_at) for at in np.ndindex(W.shape[:2])])
    if weight is not None:
        return weighted_quantiles(mu, weight.reshape(-1), levels)
    ordered = np.ascontiguousarray(np.moveaxis(mu, 0, -1))
    del mu
    ordered.sort(axis=-1)
    ends, count = [], ordered.shape[-1]
    for level in levels:
        below, share = divmod(level * (count - 1), 1.0)
        low = ordered[..., int(below)].astype(np.float64)
        high = ordered[..., min(int(below) + 1, count - 1)]
        ends.append(low + share * (high - low))
    return np.stack(ends)


def weighted_quantiles(
    values: Array, weights: NDArray[np.float64], levels: tuple[float, ...]
) -> NDArray[np.float64]:
    r"""Quantiles over the first axis, :math:`n \int F^{-1}` over windows of width 1/n.

    Parameters
    ----------
    values
        (M, ...), any unit.
    weights
        (M,), positive, of any sum.
    levels
        Between 0 and 1.

    Returns
    -------
    ndarray of float64
        (level, ...), in the unit of the values.

    References
    ----------
    Akinshin 2023.
    """
    masses = weights / weights.sum()
    width = 1.0 / effective_number(masses)
    count = len(values)
    flat = values.reshape(count, -1)
    out = np.empty((len(levels), flat.shape[1]))
    step = max(1, _SLAB // count)
    for start in range(0, flat.shape[1], step):
        part = np.ascontiguousarray(flat[:, start : start + step].T)
        order = np.argsort(part, axis=1, kind="stable")
        ordered = np.take_along_axis(part, order, axis=1).astype(np.float64)
        above = np.cumsum(masses[order], axis=1)
        for at, level in enumerate(levels):
            out[at, start : start + step] = _window_mean(ordered, above, level, width)
    return out.reshape(len(levels), *values.shape[1:])


def _window_mean(
    ordered: NDArray[np.float64], above: NDArray[np.float64], level: float, width: float
) -> NDArray[np.float64]:
    """Mean of each row's inverse distribution function over the window of a level."""
    low = level * (1.0 - width)
    inside = np.clip(above, low, low + width)
    inside[:, 1:] -= inside[:, :-1].copy()
    inside[:, 0] -= low
    first = ordered[:, :1]  # what is equal in all draws stays so to the last bit
    mean = np.einsum("nm,nm->n", inside, ordered - first) / inside.sum(axis=1)
    return np.asarray(first[:, 0] + mean)


def _check_options(interval: float, of: str | None) -> None:
    if not 0.0 < interval < 1.0:
        raise OptionError(
            f"interval must lie strictly between 0 and 1, got {interval!r}; 0.9 is 90 %"
        )
    if of not in ("observation", "mean", None):
        raise OptionError(f"of must be 'observation' or 'mean', got {of!r}; or leave it out")


def _model_of(tree: xr.DataTree, of: Of | None, uncertainty: Any) -> tuple[Any, Any, Of]:
    """The model of a run, its dispersion or those of columns, and what the interval is about."""
    try:
        model = model_from_dict(json.loads(tree.attrs["model"]))
        observed = model.has_observations
        dispersion: Any = float(tree.attrs["dispersion"]) if observed else float("nan")
        if MOMENTS in tree.children and "dispersion_mean" in tree[MOMENTS]:
            dispersion = tree[MOMENTS].to_dataset()["dispersion_mean"].values.mean(axis=0)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreFormatError(
            "this trace does not say its model (attributes 'model' and 'dispersion'); "
            "pass the result of daskfactor.sample or the path of its store"
        ) from error
    if not knows_variances(tree, uncertainty):
        if of == "observation":
            raise OptionError(
                "of='observation' needs the uncertainty of each of these cells, and the run did "
                "not keep those that it was given; pass them as uncertainty=, or of='mean'"
            )
        return model, dispersion, "mean"
    if of == "observation" and not observed:
        raise OptionError(
            "of='observation' needs a law of new observations, and a SILFNMF has none: it only "
            "tells good factorizations from others; pass of='mean'"
        )
    return model, dispersion, of or ("observation" if observed else "mean")


def _noise_of(tree: xr.DataTree, cells: Any, dispersion: Any, uncertainty: Any, mean: Any) -> Any:
    """The dispersion of a new observation of each of these cells, or one for all of them."""
    if np.ndim(dispersion):  # along the last axis of what is asked for
        dispersion = dispersion[np.atleast_1d(cells[1].values)]
        if isinstance(mean, da.Array):
            dispersion = from_array(dispersion, mean.chunks[-1:])
    if not has_uncertainty(tree):
        return dispersion
    return dispersion * variances(tree, cells, uncertainty, mean)


def _of_observation(
    mean: Array, variance: Array, dispersion: Any, likelihood: Likelihood, interval: float
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
def monitored(
    trace: Trace, *, interval: float = 0.9, of: Of | None = None, uncertainty: Any = None
) -> xr.Dataset:
    r"""Mean, standard deviation and interval at the cells that the run monitored.

    .. math:: m = \sum_c n_c m_c / n, \qquad
        s^2 = \sum_c n_c \left(s_c^2 + (m_c - m)^2\right) / n

    over chains c with n_c cycles each: every cycle counts, kept or not.

    Parameters
    ----------
    trace
        Result of a run with ``monitor=``, or the path of its store.
    interval, of, uncertainty
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
    model, dispersion, of = _model_of(tree, of, uncertainty)
    group = tree["monitor"].to_dataset().load()
    mean, variance = _pooled(group)
    if of == "observation":
        cells = group[CELL_INDICES[0]], group[CELL_INDICES[1]]
        (phi,) = compute(_noise_of(tree, cells, dispersion, uncertainty, mean))
        sd, lower, upper = _of_observation(mean, variance, phi, model.likelihood, interval)
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
        lower, upper = mean + np.sqrt(variance) * special.ndtri(tails)
        return lower, upper
    from scipy import stats  # takes a second to import

    certain = ~((mean > 0) & (variance > 0))
    m, s = np.where(certain, 1.0, mean), np.where(certain, 1.0, variance)
    lower, upper = np.where(certain, mean, stats.gamma.ppf(tails, m**2 / s, scale=s / m))
    return lower, upper
