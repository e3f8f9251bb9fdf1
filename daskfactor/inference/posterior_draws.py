"""Draws of one factor and of the hyperparameters, from which rows of the other factor follow."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import whole_number
from daskfactor.errors import ModelError, OptionError
from daskfactor.inference.parameters import LINKS
from daskfactor.inference.program import COLUMNS, DISPERSION, ROWS
from daskfactor.inference.setting import DRAWS_BUDGET
from daskfactor.models import model_from_dict
from daskfactor.models.likelihood import Likelihood
from daskfactor.random import Stream, generator
from daskfactor.results.align import since_drawn
from daskfactor.results.selection import keys_of, select
from daskfactor.runs.schema import IDENTITY
from daskfactor.runs.trace import Run, describes_run, factors_of

Array = NDArray[Any]
Values = dict[str, Array]
"""Arrays of values of each draw by name, (chain, draw, ...)."""
OTHER, SCALE = "other", "scale"
"""Names of the values that results do not have: see `PosteriorDraw`."""
REPEATS = 100
"""Draws of new rows of a point estimate by default."""


class PosteriorDraw(NamedTuple):
    """One draw of a factor and of the hyperparameters.

    Attributes
    ----------
    other
        Factor that the data share with the run, (n, K').
    likelihood, hyper
        Likelihood of a cell, and hyperparameters of the priors.
    dispersions
        Dispersions of the columns, (J,); None: all cells have one.
    link
        Link from covariates to the factor of the new rows, (F, K'); None: there is none.
    scale
        Factors by which aligning the trace multiplied the components of new rows, (K',).
    """

    other: Array
    likelihood: Likelihood
    hyper: Any
    dispersions: Array | None
    link: Array | None
    scale: Array | None


@dataclass(frozen=True)
class PosteriorDraws:
    """Draws of one factor of a run and of its hyperparameters.

    Attributes
    ----------
    model
        Model of the run; frozen components have their values, covariates have none.
    factor
        Factor of the new rows: 0 for rows of W, 1 for columns of H.
    mean
        Mean of the data of the run.
    values
        Values of each draw: the other factor, hyperparameters that are drawn, scales.
    constants
        Hyperparameters that all draws share.
    labels
        Labels of the other factor's entries; None: there are none.
    attrs
        Attributes that results of these draws have.
    unstored, weighting
        Meaning of cells that sparse data of the run did not store, and the kind of numbers that
        every cell had: ``"uncertainty"``, ``"weights"`` or None.
    coords
        Labels of chains, draws and components, and weights of particles.
    dims
        User's names of rows and columns.
    ordered
        Tells whether draws follow one another, so that draws of new rows may, too.
    """

    model: Any
    factor: int
    mean: float
    values: Values
    constants: dict[str, float]
    labels: Any
    attrs: dict[str, Any]
    unstored: str | None
    weighting: str | None
    coords: xr.Dataset
    dims: tuple[str, str]
    ordered: bool = True

    @property
    def other(self) -> Array:
        """Draws of the other factor, (chain, draw, n, K')."""
        return self.values[OTHER]

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of chains and of draws."""
        return self.other.shape[0], self.other.shape[1]

    @property
    def masses(self) -> Array:
        """Probability masses of the draws, (chain, draw)."""
        if "weight" in self.coords.coords:
            return self.coords["weight"].values
        return np.full(self.shape, 1.0 / (self.shape[0] * self.shape[1]))

    def at(self, chain: int, draw: int) -> PosteriorDraw:
        """Return one draw."""
        values: dict[str, Any] = {name: array[chain, draw] for name, array in self.values.items()}
        by_column = DISPERSION in values and values[DISPERSION].ndim > 0
        dispersions = values.pop(DISPERSION) if by_column else None
        hyper = self.model.hyper_of_draw(self.constants | values, self.mean)
        likelihood, hyper = self.model.at(hyper)
        link, scale = values.get(LINKS[self.factor]), values.get(SCALE)
        return PosteriorDraw(values[OTHER], likelihood, hyper, dispersions, link, scale)

    @cached_property
    def floor(self) -> float:
        """Smallest mean that gradients are taken at, as in the run."""
        return float(self.model.likelihood.floor(self.mean if self.mean > 0 else 1.0))

    def within(self, budget: int, rows: int) -> Self:
        """Return as many of the draws as leave draws of so many rows within so many bytes."""
        chains, draws, _, width = self.other.shape
        fewer = max(1, budget // (rows * width * self.other.itemsize * chains))
        if fewer >= draws or "weight" in self.coords.coords:
            return self
        at = _spread(draws, fewer)
        values = {name: array[:, at] for name, array in self.values.items()}
        return replace(self, values=values, coords=self.coords.isel(draw=at))

    def with_entries(self, entries: Array) -> Self:
        """Return the draws with these entries of the other factor, in this order."""
        if np.array_equal(entries, np.arange(self.other.shape[2])):
            return self
        selected = {
            name: np.take(self.values[name], entries, axis=2)
            for name in (OTHER, DISPERSION)
            if name in self.values and self.values[name].ndim > 2
        }
        return replace(self, values=self.values | selected)


def read_posterior(run: Run, axis: int, draws: int | None, most: int | None) -> PosteriorDraws:
    """Read draws of one factor from a run, or from a point estimate.

    Parameters
    ----------
    run
        Run with draws.
    axis
        Factor of the new rows.
    draws
        Number of draws of each chain, evenly spaced; None: all, or as many as memory has room for.
    most
        Largest number of draws over all chains where ``draws`` is None.

    Raises
    ------
    OptionError
        If it does not have as many draws.
    ModelError
        If its model has no law of a new row.
    """
    group, dims = run.posterior, run.dims
    if run.is_point:
        repeats = REPEATS if draws is None else whole_number("draws", draws, 1)
        one = _read(run, group, axis, group.indexes.get(dims[1 - axis]))
        values = {
            name: np.broadcast_to(array, (1, repeats, *array.shape[2:]))
            for name, array in one.values.items()
        }
        coords = one.coords.isel(draw=np.zeros(repeats, int)).assign_coords(draw=np.arange(repeats))
        return replace(one, values=values, coords=coords)
    weights = run.weights
    if most is None:
        most = DRAWS_BUDGET // (group.sizes[dims[1 - axis]] * group.sizes["component"] * 8)
    at = _positions(group, weights, draws, most)
    labels = keys_of(select(run, None, None)[1 - axis])
    result = _read(run, group.isel(draw=at), axis, labels)
    if weights is not None:
        masses = ("chain", "draw"), weights[:, at] / weights[:, at].sum()
        result = replace(result, coords=result.coords.assign_coords(weight=masses))
    return replace(result, ordered=not run.is_particles)


def _positions(group: xr.Dataset, weights: Any, draws: int | None, most: int) -> NDArray[np.int64]:
    """Return positions of the draws to take of each chain."""
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
    """Return positions of so many of ``count`` draws, evenly spaced, with the last one."""
    return (np.arange(1, draws + 1) * count) // draws - 1


def _read(run: Run, group: xr.Dataset, axis: int, labels: Any) -> PosteriorDraws:
    """Read factors and hyperparameters of some draws, in the scale that they were drawn in."""
    attrs, scale = run.attrs, None
    if run.is_aligned:
        alignment = run.group("alignment").sel(chain=group["chain"], draw=group["draw"])
        scale = since_drawn(alignment)[1][:, :, 0]
    with describes_run():
        model = model_from_dict(run.document("model"))
        constants = {n: value for n, value in attrs.items() if isinstance(value, float | int)}
        moments = attrs | run.data
        mean = float(moments["level" if model.nonnegative and "level" in moments else "mean"])
    if model.conditional_sampler is None:
        model.hyper_of_draw(constants, mean)  # raises
    W, H = (factor.compute(scheduler="threads").values for factor in factors_of(group))
    factors = W, H.swapaxes(2, 3)
    model = model.with_frozen_of(factors[0][0, 0], factors[1][0, 0])
    names = {variable.name for variable in model.learnt} | {*LINKS}
    drawn = group[[name for name in names if name in group.data_vars]]
    drawn = drawn.transpose("chain", "draw", ..., "component", missing_dims="ignore")
    values = {str(n): one.values for n, one in drawn.compute(scheduler="threads").items()}
    if axis == COLUMNS and DISPERSION in values and values[DISPERSION].ndim > 2:
        raise ModelError(
            "every column of this model has a dispersion of its own, which new columns would need "
            'too, and these are not drawn; fit with dispersion="auto", or with these columns'
        )
    other = factors[1 - axis]
    if scale is not None:
        by = scale[:, :, None].astype(other.dtype)
        other = other * by if axis == ROWS else other / by
        scales = scale, 1.0 / scale
        for name, part in zip(LINKS, scales, strict=True):
            if name in values and not model.nonnegative:
                values[name] = values[name] / part[:, :, None]
        values[SCALE] = scales[axis]
    if axis == COLUMNS and getattr(model, "biases", False) and "precision_h" in values:
        values["level"] = _draw_level(model, values["precision_h"], H, attrs)
    about: dict[str, Any] = {"aligned": int(scale is not None)}
    about |= {key: attrs[name] for name, key in IDENTITY.items() if name in attrs}
    values[OTHER] = np.ascontiguousarray(other)
    return PosteriorDraws(
        model,
        axis,
        mean,
        values,
        constants,
        labels,
        about,
        run.data.get("unstored"),
        run.data.get("weighting"),
        group[["chain", "draw", "component"]],
        run.dims,
    )


def _draw_level(model: Any, precisions: Array, H: Array, attrs: Any) -> Array:
    """Draw the mean of the column biases, which results do not have, given the biases.

    ``precisions`` are (chain, draw, component), and H is (chain, draw, component, column).
    """
    if model.covariates[1] is not None:
        raise ModelError(
            "new columns of a GaussianMF with covariates of columns cannot be drawn yet; refit "
            "with these columns, without entries if they have none"
        )
    bias = model.n_components + 1
    precision = precisions[..., bias] * H.shape[3]
    rng = generator(int(attrs.get("random_seed", 0)), 0, Stream.TRANSFORM)
    mean = H[:, :, bias].mean(axis=-1, dtype=np.float64)
    return np.asarray(mean + rng.standard_normal(precision.shape) / np.sqrt(precision))
