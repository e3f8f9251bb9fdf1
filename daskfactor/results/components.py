r"""Components of a result for display: named, sorted by weight, in the unit of the data.

The scale of a component is arbitrary between its column of W and its row of H. Here columns of W
have mean 1 (root mean square 1 if factors have signs), so that rows of H are in the unit of the
data:

.. math:: w_{ik} \to w_{ik} / c_k, \qquad h_{kj} \to c_k h_{kj}, \qquad
    c_k = \frac1I \sum_i \mathrm{E}[w_{ik}]

and a row of H is the contribution of the component to a column of the data, averaged over rows.
The further axes of a tensor, which are concatenated in H, share c evenly.
"""

from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.data.labels import FACTOR, LABEL, SIDES
from daskfactor.errors import OptionError
from daskfactor.markup import visible
from daskfactor.results.align import align
from daskfactor.results.compare import intensity_shares
from daskfactor.results.predict import matched_interval
from daskfactor.results.tensors import axis_spans
from daskfactor.runs.schema import MOMENTS, component_labels
from daskfactor.runs.trace import Run, Trace

Array = NDArray[np.float64]

INTERVAL = 0.9
"""Probability of the displayed intervals."""
SURE = 0.95
"""Share of draws above which a component counts as present in nearly all draws."""


class Factor(NamedTuple):
    """Factor with the scale above.

    Attributes
    ----------
    name
        ``"W"`` or ``"H"``.
    dim
        Dimension of the data.
    labels
        Coordinates of this dimension.
    mean
        Posterior means, (component, entry).
    variance
        Posterior variances of the same shape; None for a point estimate.
    nonnegative
        True if values cannot be negative.
    """

    name: str
    dim: str
    labels: xr.Dataset
    mean: Array
    variance: Array | None
    nonnegative: bool

    def interval(self, component: int, at: Any = slice(None)) -> tuple[Array, Array] | None:
        """Return the interval of some entries from a distribution with their mean and variance."""
        if self.variance is None:
            return None
        mean, variance = self.mean[component, at], self.variance[component, at]
        return matched_interval(mean, variance, self.nonnegative, INTERVAL)

    def largest(self, component: int, count: int) -> NDArray[np.int64]:
        """Return positions of the entries with the largest absolute value, in descending order."""
        sizes = np.abs(self.mean[component])
        return np.asarray(np.argsort(-sizes, kind="stable")[:count], dtype=np.int64)

    @property
    def names(self) -> list[str]:
        """Names of the entries."""
        if self.dim in self.labels.coords:
            return [format_label(one) for one in self.labels[self.dim].values]
        sides = [side for side in SIDES if FACTOR.format(side) in self.labels.coords]
        if sides:  # several concatenated factors
            parts = (self.labels[form.format(sides[0])].values for form in (FACTOR, LABEL))
            return [f"{factor} {label}" for factor, label in zip(*parts, strict=True)]
        texts = [n for n, one in self.labels.coords.items() if one.dtype.kind in "OUT"]
        if texts:  # the only names
            return [format_label(one) for one in self.labels[texts[0]].values]
        numbers = [(str(n), one.values) for n, one in self.labels.coords.items()]
        if numbers:  # such as latitude and longitude
            return [
                ", ".join(f"{name} {format_label(values[at])}" for name, values in numbers)
                for at in range(self.mean.shape[1])
            ]
        return [f"{self.dim} {at}" for at in range(self.mean.shape[1])]


class Components(NamedTuple):
    """All components of a result, sorted by their share of the data.

    Attributes
    ----------
    W, H
        Both factors.
    labels, titles
        Labels and names of the components.
    weight
        Share of each component in the mean of the data; they add up to 1.
    present
        Share of the draws in which each appears; None without an alignment.
    present_by_chain
        The same for each chain, (chain, component).
    chain
        Label of the only chain; None for all of them.
    quantity
        Quantity and unit of the data, as text from `format_quantity`.
    """

    W: Factor
    H: Factor
    labels: list[Any]
    titles: list[str]
    weight: Array
    present: Array | None
    present_by_chain: Array | None
    chain: Any
    quantity: str

    def factor(self, name: str) -> Factor:
        """Return one factor by its name."""
        return self.W if name == "W" else self.H


def component_title(label: Any) -> str:
    """Return the name of a component from its label."""
    return f"component {label}" if str(label).isdecimal() else visible(str(label))


def format_label(label: Any) -> str:
    """Return a label as text: short dates and numbers, no control characters."""
    if isinstance(label, np.datetime64):
        return "no date" if np.isnat(label) else str(np.datetime_as_string(label, unit="auto"))
    return f"{label:.6g}" if isinstance(label, float | np.floating) else visible(str(label))


def format_quantity(attrs: Any, name: str) -> str:
    """Return name and unit of a coordinate, or of the data, preferring the long name."""
    quantity = str(attrs.get("long_name") or attrs.get("standard_name") or name).replace("_", " ")
    units = str(attrs.get("units") or "")
    return visible(f"{quantity} [{units}]" if units and units != "1" else quantity)


def components_of(result: Trace | xr.Dataset, chain: int | None = None) -> Components:
    """Return the components of a run, of particles or of a point estimate.

    Draws are aligned if they are not, and chains are combined. Of a run that stored only moments,
    one chain is used, since components of different chains do not correspond.

    Parameters
    ----------
    result
        Result of `sample`, `resume`, `stein_posterior`, `open_run`, `align` or `optimize`, or the
        path of a store.
    chain
        Position of the only chain to use.

    Raises
    ------
    OptionError
        If there are no factors, or no such chain.
    """
    run = Run.of(result, point=True)
    if not run.is_point:
        run = Run(with_names(run.tree))
    group = run.group(MOMENTS if MOMENTS in run else "posterior")
    count = group.sizes["chain"]
    if chain is not None and not 0 <= chain < count:
        raise OptionError(f"chain must be a position from 0 to {count - 1}, got {chain}")
    alone = chain if chain is not None or run.is_aligned else 0
    factors = {name: factor_moments(run, name, alone) for name in "WH"}
    least = min(float(mean.min()) for mean, _ in factors.values())
    nonnegative = least >= 0 if run.model is None else bool(run.model.nonnegative)
    label = None if alone is None or count == 1 else group["chain"].values[alone].item()
    W, H = (
        _factor(name, dim, group, mean, None if run.is_point else sd, nonnegative)
        for (name, (mean, sd)), dim in zip(factors.items(), run.dims, strict=True)
    )
    return _ordered(W, H, group, run, label)


def with_names(tree: xr.DataTree) -> xr.DataTree:
    """Return a trace with aligned components, if it has draws."""
    run = Run(tree)
    return tree if run.is_aligned or not run.has_draws else align(tree)


def _factor(
    name: str, dim: str, group: xr.Dataset, mean: Array, sd: Array | None, nonnegative: bool
) -> Factor:
    labels = group[[key for key, one in group.coords.items() if one.dims == (dim,)]]
    if dim in labels.indexes and labels.indexes[dim].nlevels > 1:  # the levels have the same labels
        labels = labels.reset_index(dim)
    return Factor(name, dim, labels, mean, None if sd is None else sd**2, nonnegative)


def _ordered(W: Factor, H: Factor, group: xr.Dataset, run: Run, chain: Any) -> Components:
    """Scale both factors and sort the components."""
    spans = axis_spans(run, group)
    weight = intensity_shares(W.mean.T, H.mean, not W.nonnegative, spans)
    order = np.argsort(-weight, kind="stable")
    size = W.mean.mean(axis=1) if W.nonnegative else np.sqrt(np.square(W.mean).mean(axis=1))
    size = np.where(size > 0, size, 1.0)
    labels = group["component"].values.tolist()
    titles = [component_title(label) for label in component_labels(group)]
    present: list[Array | None] = [None, None]
    if run.is_aligned:
        alignment = run.group("alignment")
        shares = alignment["share"], alignment["share_by_chain"]
        present = [one.transpose(..., "component").values[..., order] for one in shares]
    return Components(
        _scaled(W, 1.0 / size, order),
        _scaled(H, size ** (1.0 / len(spans)), order),
        [labels[k] for k in order],
        [titles[k] for k in order],
        weight[order],
        present[0],
        present[1],
        chain,
        format_quantity(run.data, run.data.get("name") or "value"),
    )


def _scaled(factor: Factor, by: Array, order: NDArray[np.intp]) -> Factor:
    variance = factor.variance
    if variance is not None:
        variance = (variance * np.square(by)[:, None])[order]
    return factor._replace(mean=(factor.mean * by[:, None])[order], variance=variance)


def factor_moments(run: Run, name: str, chain: int | None) -> tuple[Array, Array]:
    """Return mean and standard deviation of factor ``W`` or ``H``, (component, row or column).

    Use one chain, or with None all chains of an aligned trace. Particles have their weights.
    """
    if chain is None and not run.is_aligned:
        raise OptionError(
            "components have no common order across chains; pass the number of one chain, or "
            "align(trace)"
        )
    if chain is None:
        moments = run.group(MOMENTS).astype(np.float64)
        means = moments[[f"{name}_mean"]]
        mean = run.over_chains(means)[f"{name}_mean"]
        between = run.over_chains((means - mean) ** 2)[f"{name}_mean"]
        variance = run.over_chains(moments[[f"{name}_var"]])[f"{name}_var"] + between
    elif MOMENTS in run:
        moments = run.group(MOMENTS).isel(chain=chain)
        mean, variance = moments[f"{name}_mean"], moments[f"{name}_var"]
    else:
        mean, variance = _over_draws(run, name, chain)
    each = (one.transpose("component", ...).values.astype(np.float64) for one in (mean, variance))
    return next(each), np.sqrt(next(each))


def _over_draws(run: Run, name: str, chain: int) -> tuple[xr.DataArray, xr.DataArray]:
    """Return mean and variance over the draws of a chain; draws without weight are not read."""
    draws, weights = run.posterior[name].isel(chain=chain), run.weights
    if draws.sizes["draw"] == 0:
        raise OptionError("the run has no draws yet; resume it first")
    mass = np.ones(draws.sizes["draw"]) if weights is None else weights[chain]
    weighted_draws = np.flatnonzero(mass > 0)
    if not weighted_draws.size:
        raise OptionError(f"no draw of chain {chain} has a positive weight; pass another chain")
    if weighted_draws.size < mass.size:
        draws, mass = draws.isel(draw=weighted_draws), mass[weighted_draws]
    if (mass == mass[0]).all():
        return draws.mean("draw"), draws.var("draw")
    weighted = draws.weighted(xr.DataArray(mass, dims="draw"))
    return weighted.mean("draw"), weighted.var("draw")
