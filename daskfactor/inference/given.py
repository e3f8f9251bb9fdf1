"""Draws of one factor and of hyperparameters, given which rows of the other are drawn."""

import json
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import whole_number
from daskfactor.errors import ModelError, OptionError, StoreFormatError
from daskfactor.inference.parameters import LINKS
from daskfactor.inference.program import COLUMNS, DISPERSION, ROWS
from daskfactor.inference.setting import DRAWS_BUDGET
from daskfactor.models import model_from_dict
from daskfactor.models.likelihood import Likelihood
from daskfactor.random import Stream, generator
from daskfactor.results.align import since_drawn
from daskfactor.results.schema import IDENTITY, factor_dims, own_names
from daskfactor.results.selection import select, stacked_keys
from daskfactor.results.trace import draw_weights, factors_of, require_draws, require_point

Array = NDArray[Any]
REPEATED = 100
"""Draws of new rows given a point estimate, if nobody says how many."""


class Condition(NamedTuple):
    """One draw of a factor, and of all else that rows of the other one are drawn given.

    Attributes
    ----------
    other
        (n, K'), the draw of the factor that is given.
    law, hyper
        Of an entry, and of the priors.
    dispersions
        Of the columns, (J,), where they have their own.
    link
        (F, K') to the covariates of new rows, if there are any.
    scale
        What aligning the trace has multiplied columns of the drawn factor with, (K',).
    """

    other: Array
    law: Likelihood
    hyper: Any
    dispersions: Array | None
    link: Array | None
    scale: Array | None


@dataclass(frozen=True)
class PosteriorDraws:
    """Draws of one factor of a run, and of the hyperparameters, as new rows of the other need them.

    Attributes
    ----------
    model
        As the run says it; frozen components with their values, covariates without.
    factor
        Which factor new rows are of: 0 for rows of W, 1 for columns of H.
    mean
        Of the data of the run.
    other
        The other factor, (chain, draw, n, K').
    params, constants
        Hyperparameters of each draw, (chain, draw, ...), and of all of them alike.
    scale
        As for a `Condition`, (chain, draw, K').
    coords
        Labels of chains, draws and components, and the draws' weights if they have any.
    dims
        The run's names of its rows and columns.
    labels
        Of the entries of the factor that is given; None: they have none.
    ordered
        Whether draws come one from another, so that rows may, too.
    attrs
        What results tell of all this.
    unstored
        What cells meant that the run's sparse data did not store.
    weighting
        What the run was given for every cell: ``"uncertainty"``, ``"weights"`` or None.
    """

    model: Any
    factor: int
    mean: float
    other: Array
    params: dict[str, Array]
    constants: dict[str, float]
    scale: Array | None
    coords: xr.Dataset
    dims: tuple[str, str]
    labels: Any
    ordered: bool
    attrs: dict[str, Any]
    unstored: str | None
    weighting: str | None

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of chains and of draws."""
        return self.other.shape[0], self.other.shape[1]

    @property
    def _of_columns(self) -> bool:
        """True if columns have dispersions of their own."""
        return DISPERSION in self.params and self.params[DISPERSION].ndim > 2

    def at(self, chain: int, draw: int) -> Condition:
        """Give all that one draw says."""
        params: dict[str, Any] = {name: array[chain, draw] for name, array in self.params.items()}
        dispersions = params.pop(DISPERSION) if self._of_columns else None
        hyper = self.model.hyper_of_draw(self.constants | params, self.mean)
        law, hyper = self.model.at(hyper)
        scale = None if self.scale is None else self.scale[chain, draw]
        link = params.get(LINKS[self.factor])
        return Condition(self.other[chain, draw], law, hyper, dispersions, link, scale)

    @property
    def floor(self) -> float:
        """Smallest mean that gradients are taken at, as in the run."""
        return float(self.model.likelihood.floor(self.mean if self.mean > 0 else 1.0))

    @property
    def learns_rows(self) -> bool:
        """True if every new row has a rate of its own, which is drawn with it."""
        return self.model.rates_of[self.factor] in ("row", "column")

    def prior_means(self, hyper: Any) -> Any:
        """Give prior means of the entries of a new row."""
        return self.model.prior_means(self.factor, hyper)

    def rate_law(self, hyper: Any) -> tuple[float, float, Array]:
        """Give α + a K and b of a row's rate, Gamma(α + a K, b + Σ θ); and which are free."""
        mask = self.model.frozen[self.factor]
        free = np.ones(self.model.n_components, bool) if mask is None else ~mask
        shapes = hyper.shape_w, hyper.shape_h
        prior = self.model.hyperpriors(self.mean, shapes)[self.factor]
        return prior.shape + shapes[self.factor] * float(free.sum()), prior.rate, free

    def within(self, budget: int, rows: int) -> "PosteriorDraws":
        """Give as many of the draws as new rows have room for in so many bytes."""
        chains, draws, _, width = self.other.shape
        fewer = max(1, budget // (rows * width * self.other.itemsize * chains))
        if fewer >= draws or "weight" in self.coords.coords:
            return self
        at = _spread(draws, fewer)
        params = {name: array[:, at] for name, array in self.params.items()}
        scale = None if self.scale is None else self.scale[:, at]
        coords = self.coords.isel(draw=at)
        return replace(self, other=self.other[:, at], params=params, scale=scale, coords=coords)

    def taking(self, entries: Array) -> "PosteriorDraws":
        """Give the same with some entries of the factor that is given, in another order."""
        if np.array_equal(entries, np.arange(self.other.shape[2])):
            return self
        params = dict(self.params)
        if self.factor == ROWS and self._of_columns:
            params[DISPERSION] = params[DISPERSION][:, :, entries]
        return replace(self, params=params, other=np.take(self.other, entries, axis=2))


def read_posterior(trace: Any, axis: int, draws: int | None, most: int | None) -> PosteriorDraws:
    """Read what a trace or a point estimate says of one factor.

    Parameters
    ----------
    trace
        As for :func:`transform`.
    axis
        The factor that new rows are of.
    draws
        How many of each chain, evenly spaced; None: all, or as many as memory has room for.
    most
        If nobody says how many: most draws over all chains.

    Raises
    ------
    OptionError
        If it has no draws, or not as many.
    ModelError
        If its model has no law of a new row.
    """
    if isinstance(trace, xr.Dataset) and {"W", "H"} <= set(trace.data_vars):
        return _of_point(
            trace, axis, REPEATED if draws is None else whole_number("draws", draws, 1)
        )
    tree = require_draws(trace, "a new row")
    group, weights = tree["posterior"].to_dataset(), draw_weights(tree)
    if most is None:
        sizes, dims = group.sizes, factor_dims(tree)
        most = DRAWS_BUDGET // (sizes[dims[1 - axis]] * sizes["component"] * 8)
    at = _positions(group, weights, draws, most)
    group = group.isel(draw=at)
    coords = group[["chain", "draw", "component"]]
    if weights is not None:
        masses = weights[:, at] / weights[:, at].sum()
        coords = coords.assign_coords(weight=(("chain", "draw"), masses))
    scale = None
    if "alignment" in tree.children:
        alignment = tree["alignment"].to_dataset()
        alignment = alignment.sel(chain=group["chain"], draw=group["draw"])
        scale = since_drawn(alignment)[1][:, :, 0]
    result = _read(group, tree.attrs, axis, factor_dims(tree), scale)
    users = own_names(tree)
    stacked = stacked_keys(select(tree, factor_dims(tree), None, None)[1 - axis])
    if stacked is not None:
        result = replace(result, labels=stacked)
    dims = users.get(result.dims[0], result.dims[0]), users.get(result.dims[1], result.dims[1])
    ordered = not {"weight", "n_iter"} & set(tree["sample_stats"].data_vars)
    return replace(result, coords=coords, dims=dims, ordered=ordered)


def _positions(group: xr.Dataset, weights: Any, draws: int | None, most: int) -> NDArray[np.int64]:
    """Positions of the draws that are taken of each chain."""
    count = group.sizes["draw"]
    if weights is not None:
        if draws is not None:
            raise OptionError(
                "particles have weights, and those that have any are all taken; leave draws out"
            )
        return np.flatnonzero((weights > 0).any(axis=0))
    if draws is None:
        draws = max(1, min(count, most // group.sizes["chain"]))
    elif whole_number("draws", draws, 1) > count:
        raise OptionError(
            f"the run has {count} draws in each chain, got draws={draws}; take fewer, or leave "
            "draws out for all"
        )
    return _spread(count, draws)


def _spread(count: int, draws: int) -> NDArray[np.int64]:
    """Positions of so many of ``count`` draws, evenly spaced, the last one among them."""
    return (np.arange(1, draws + 1) * count) // draws - 1


def _of_point(point: xr.Dataset, axis: int, draws: int) -> PosteriorDraws:
    """Read a point estimate, repeated as if it were so many draws."""
    group = require_point(point)[["W", "H"]].expand_dims({"chain": 1, "draw": np.arange(draws)})
    dims = factor_dims(group)
    base = _read(group.isel(draw=[0]), point.attrs, axis, dims, None)
    other = np.broadcast_to(base.other, (1, draws, *base.other.shape[2:]))
    params = {
        name: np.broadcast_to(arr, (1, draws, *arr.shape[2:])) for name, arr in base.params.items()
    }
    coords = group.assign_coords(chain=[0])[["chain", "draw", "component"]]
    return replace(base, other=other, params=params, coords=coords, ordered=True)


def _read(
    group: xr.Dataset, attrs: Any, axis: int, dims: tuple[str, str], scale: Array | None
) -> PosteriorDraws:
    """Read factors and all that is told with them; undo the scales of an alignment."""
    try:
        model = model_from_dict(json.loads(attrs["model"]))
        constants = {n: value for n, value in attrs.items() if isinstance(value, float | int)}
        about = json.loads(attrs.get("data", "{}"))
        attributes = attrs | about
        mean = float(attributes["level" if model.nonnegative and "level" in attributes else "mean"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoreFormatError(
            "this trace does not say its model and the mean of its data (attributes 'model' and "
            "'data'); pass the result of daskfactor.sample or the path of its store"
        ) from error
    if model.conditional_sampler is None:
        model.hyper_of_draw(constants, mean)
    W, H = (factor.compute(scheduler="threads").values for factor in factors_of(group))
    each = W, H.swapaxes(2, 3)
    model = model.with_arrays(
        {
            f"{name}/values": factor[0, 0][:, mask].T.astype(np.float64)
            for name, factor, mask in zip(("fixed_w", "fixed_h"), each, model.frozen, strict=True)
            if mask is not None
        }
    )
    params = _read_variables(group, model)
    if axis == COLUMNS and DISPERSION in params and params[DISPERSION].ndim > 2:
        raise ModelError(
            "every column of this model has a dispersion of its own, which new columns would need "
            'too, and these are not drawn; fit with dispersion="auto", or with these columns'
        )
    other = each[1 - axis]
    if scale is not None:  # as they were drawn
        by = scale[:, :, None].astype(other.dtype)
        other = other * by if axis == ROWS else other / by
        parts = scale, 1.0 / scale
        if not model.nonnegative:
            for name, part in zip(LINKS, parts, strict=True):
                if name in params:
                    params[name] = params[name] / part[:, :, None]
        scale = parts[axis]
    if axis == COLUMNS:
        params |= _level(model, params, group, H, attrs)
    label = dims[1 - axis]
    labels: Any = group[label].values if label in group.coords else None
    if getattr(group.indexes.get(label), "nlevels", 1) > 1:
        labels = group.indexes[label]
    contiguous = np.ascontiguousarray(other)
    none = xr.Dataset()
    of: dict[str, Any] = {"aligned": int(scale is not None)}
    of |= {key: attrs[name] for name, key in IDENTITY.items() if name in attrs}
    return PosteriorDraws(
        model,
        axis,
        mean,
        contiguous,
        params,
        constants,
        scale,
        none,
        dims,
        labels,
        False,
        of,
        about.get("unstored"),
        about.get("weighting"),
    )


def _read_variables(group: xr.Dataset, model: Any) -> dict[str, Array]:
    """Read what was drawn of the hyperparameters, (chain, draw, ...)."""
    names = {variable.name for variable in model.learnt} | {*LINKS}
    arrays = group[[name for name in names if name in group.data_vars]]
    arrays = arrays.transpose("chain", "draw", ..., "component", missing_dims="ignore")
    return {str(name): array.values for name, array in arrays.compute(scheduler="threads").items()}


def _level(
    model: Any, params: dict[str, Array], group: xr.Dataset, H: Array, attrs: Any
) -> dict[str, Array]:
    """Draw the level that column biases are around, which results do not keep, given these."""
    at = getattr(model, "n_components", 0) + 1
    if "precision_h" not in params or not getattr(model, "biases", False):
        return {}
    if model.covariates[1] is not None:
        raise ModelError(
            "new columns of a GaussianMF with covariates of columns cannot be drawn yet; refit "
            "with these columns, without entries if they have none"
        )
    precision = params["precision_h"][..., at] * H.shape[2]
    seed, rng = int(attrs.get("random_seed", 0)), generator
    z = rng(seed, 0, Stream.TRANSFORM).standard_normal(precision.shape)
    return {"level": H[..., at].mean(axis=-1, dtype=np.float64) + z / np.sqrt(precision)}
