"""Views of runs of several matrices: single matrices, factors, explained variance.

A run of a coupled model has concatenated factors, in units in which every matrix has mean 1; its
attribute ``data`` has the position of each (``placed``).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from daskfactor.data.labels import FACTOR, LABEL, SIDES
from daskfactor.errors import OptionError
from daskfactor.options import near_name
from daskfactor.results.tensors import attrs_of_part, axis_factors, unfolding
from daskfactor.runs.schema import CELL_INDICES, MOMENTS, MONITOR, WARMUP, tree_of
from daskfactor.runs.trace import Run, Trace

COMPONENT = "component"
ONE, OTHER = "daskfactor component", "daskfactor other component"
"""Temporary dimensions with names that users do not use."""
UNSETTLED = "learnt_priors"
"""Attribute of a view whose run sampled rates or shapes of priors."""


def view(trace: Trace, name: str) -> xr.DataTree:
    r"""Return one matrix of a run of several, as a run of that matrix.

    .. math:: \mu = W H, \qquad W = F_{\text{rows}}, \quad H = u F_{\text{columns}}^\top

    with the unit :math:`u` of the matrix, its mean, so that predictions are in the unit of the
    data. The view works with :func:`predict`, :func:`summarize`, :func:`transform`,
    :func:`recommend`, :func:`to_anndata` and plots. It includes rows that only other matrices
    have, and predicts them. It does not copy draws.

    For a tensor it is the unfolding along an axis: a matrix of its indices against those of all
    other axes in row-major order, so that :func:`transform` accepts new indices of the axis.

    Parameters
    ----------
    trace
        Result of :func:`sample` with a :class:`Coupled` model, or the path of its store.
    name
        Name of the matrix, or of the axis of a tensor.

    Returns
    -------
    xarray.DataTree
        Groups as in the result of :func:`sample`; dimensions have the names of the factors.

    Raises
    ------
    OptionError
        If the run has no such matrix.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(2.0, (8, 6, 5))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.CP(2, factors=("user", "item", "week")), **run)
    >>> dfac.view(trace, "user")["posterior"]["W"].shape
    (1, 20, 8, 2)
    """
    run = Run.of(trace)
    if run.axes is not None:
        return unfolding(run, run.axes, name)
    if "placed" not in run.data and run.data.get("name") == name:
        return run.tree  # a single matrix, passed by name
    place = _MatrixView.of(run, name)
    groups = {key: place.factors(run.group(key)) for key in ("posterior", MOMENTS) if key in run}
    groups |= {key: run.group(key) for key in ("sample_stats", WARMUP) if key in run}
    if MONITOR in run:
        groups[MONITOR] = place.cells(run.group(MONITOR))
    constants = {
        key: place.constants[key]
        for key in ("dispersion", "rate_w", "rate_h")
        if key in place.constants
    }
    groups["constant_data"] = xr.Dataset({key: float(value) for key, value in constants.items()})
    return tree_of(groups, place.attrs())


def factors(trace: Trace) -> dict[str, xr.DataArray]:
    """Return the factors of a run of several matrices, or of a tensor, by name.

    Parameters
    ----------
    trace
        Result of :func:`sample` with a :class:`Coupled` or :class:`CP` model, or the path of its
        store.

    Returns
    -------
    dict of DataArray
        Factors with labels, (chain, draw, dimension of the factor, component), in units in which
        every matrix has mean 1; lazy for a store.

    Raises
    ------
    OptionError
        If the run is of one matrix, or kept no draws.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(2.0, (8, 6, 5))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.CP(2), **run)
    >>> list(dfac.factors(trace))
    ['axis_0', 'axis_1', 'axis_2']
    """
    run = Run.of(trace)
    placed = _placed(run)
    if "posterior" not in run:
        raise OptionError(
            "factors needs draws, but the run stored none; use "
            'view(run, name)["posterior_moments"] for means and variances'
        )
    group, dims = run.posterior, run.dims
    return {name: _factor(group, "", placed, name, dims) for name in placed["factors"]}


def explained_variance(trace: Trace) -> xr.DataArray:
    r"""Return the share of each component in the variance of each matrix.

    .. math:: R_k = \frac{\mathrm{Cov}(\mu_k, \mu)}{\mathrm{Var}(\mu) + \overline{\phi V(\mu)}},
        \qquad \mu_k = w_k h_k

    over all cells of a matrix, with the variance of observations under the likelihood: shares of
    components add up to the explained variance, and the rest is noise.

    Parameters
    ----------
    trace
        Result of :func:`sample` that kept draws, of several matrices or of one, or the path of
        its store.

    Returns
    -------
    DataArray
        (chain, draw, view, component); ``.mean(("chain", "draw"))`` and ``.quantile`` are the
        posterior mean and intervals.

    Raises
    ------
    OptionError
        If no draws were kept.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> shares = dfac.explained_variance(trace)
    >>> shares.dims
    ('chain', 'draw', 'view', 'component')
    >>> bool(shares.sum("component").mean() < 1)
    True
    """
    run = Run.of(trace, "a share of variance")
    if run.weights is not None:
        raise OptionError("explained_variance needs draws of equal weight, not particles")
    runs = {"data": run}
    if run.axes is not None:
        shares = [_shares(run, factors(run.tree))]
    else:
        if "placed" in run.data:
            runs = {name: Run(view(run.tree, name)) for name in _names(_placed(run))}
        shares = [
            _shares(part, {dim: factor for factor, dim in axis_factors(part.posterior, None)})
            for part in runs.values()
        ]
    return xr.concat(shares, xr.Variable("view", list(runs))).transpose(
        "chain", "draw", "view", COMPONENT
    )


def _shares(run: Run, parts: Mapping[str, xr.DataArray]) -> xr.DataArray:
    """Return the shares of components for one array, from sums over rows of its factors.

    ``parts`` are these factors, by their own dimensions.
    """
    both: Any = 1.0
    means: Any = 1.0
    for dim, factor in parts.items():
        scaled = factor.rename({COMPONENT: ONE}).astype(np.float64)
        both = both * (xr.dot(scaled, scaled.rename({ONE: OTHER}), dim=dim) / scaled.sizes[dim])
        means = means * scaled.mean(dim)
    total = means.sum(ONE)
    explained = both.sum(OTHER) - means * total
    spread = explained.sum(ONE)
    dispersion = float(run.attrs["dispersion"])
    noise = _noise(run.model.likelihood, dispersion, total.values, spread.values)
    shares: xr.DataArray = (explained / (spread + noise)).rename({ONE: COMPONENT})
    return shares


def _noise(likelihood: Any, dispersion: float, level: Any, spread: Any) -> xr.DataArray:
    """Return the mean variance of observations, (chain, draw), by a second-order expansion.

    It is exact if the variance function is constant, linear or quadratic.
    """
    step = np.where(level == 0, 1.0, 0.5 * np.abs(level))
    low, at, high = (
        likelihood.variance(level + side * step, dispersion) for side in (-1.0, 0.0, 1.0)
    )
    return xr.DataArray(at + 0.5 * spread * (high - 2 * at + low) / step**2, dims=("chain", "draw"))


# -- places ---------------------------------------------------------------------------------


def _placed(run: Run) -> dict[str, Any]:
    if run.data.get("placed") is None:
        raise OptionError(
            "the run has a single matrix; views need a run of sample({...}, Coupled(...))"
        )
    return dict(run.data["placed"])


def _names(placed: Mapping[str, Any]) -> list[str]:
    return [relation["name"] for relation in placed["relations"]]


def _factor(
    group: xr.Dataset, suffix: str, placed: Mapping[str, Any], name: str, dims: tuple[str, str]
) -> xr.DataArray:
    """Return a factor by name, (..., its dimension, component), with its labels if any."""
    factor = placed["factors"][name]
    side, (start, stop) = factor["side"], factor["span"]
    dim = dims[side]
    values = group["WH"[side] + suffix].isel({dim: slice(start, stop)})
    labels = values.coords.get(LABEL.format(SIDES[side]))
    for coord in (FACTOR, LABEL):
        values = values.drop_vars(coord.format(SIDES[side]), errors="ignore")
    values = values.rename({dim: name}) if dim != name else values
    if labels is not None and factor["labels"] is not None:
        dtype = object if factor["labels"].startswith("|O") else factor["labels"]
        values = values.assign_coords({name: labels.values.astype(dtype)})
    return values.transpose(..., name, COMPONENT)


class _MatrixView:
    """Matrix of a run of several: its position, unit, model and attributes."""

    def __init__(self, run: Run, placed: dict[str, Any], relation: dict[str, Any]) -> None:
        self.run, self.placed, self.relation = run, placed, relation
        self.name, self.axes = relation["name"], relation["axes"]
        self.unit = float(relation["unit"])
        self.dims = run.dims
        self.sizes = [np.ptp(placed["factors"][axis]["span"]).item() for axis in self.axes]
        attrs, model = run.attrs, run.model
        self.learnt = any(not one.name.startswith("dispersion") for one in model.learnt)
        shapes = [attrs.get("shape_w", 1.0), attrs.get("shape_h", 1.0)]
        rates: list[Any] = [attrs.get("rate_w"), attrs.get("rate_h")]
        if relation["turned"]:
            shapes, rates = shapes[::-1], rates[::-1]
        has_rates = None not in rates
        self.constants: dict[str, Any] = {"dispersion": attrs[f"dispersion_{self.name}"]}
        self.constants |= {"shape_w": shapes[0], "shape_h": shapes[1]}
        if has_rates:
            self.constants |= {"rate_w": rates[0], "rate_h": rates[1] / self.unit}
        priors = {n: float(v) for n, v in self.constants.items() if n.startswith(("rate", "shape"))}
        self.model = model.relations[self.name].model(
            next(run.group(n).sizes[COMPONENT] for n in ("posterior", MOMENTS) if n in run),
            dispersion=float(self.constants["dispersion"]),
            **priors,
        )

    @classmethod
    def of(cls, run: Run, name: str) -> "_MatrixView":
        placed = _placed(run)
        for relation in placed["relations"]:
            if relation["name"] == name:
                return cls(run, placed, relation)
        near = near_name(str(name), _names(placed))
        raise OptionError(
            f"the run has no matrix {name!r}{near and f', did you mean {near!r}?'}; it has "
            f"{', '.join(_names(placed))}"
        )

    def attrs(self) -> dict[str, Any]:
        """Return the attributes of the view."""
        data = {name: self.relation[name] for name in ("n_observed", "mean", "unstored")}
        data |= {
            "shape": self.sizes,
            "level": self.unit if self.relation["mean"] <= 0 else self.relation["mean"],
            "fingerprint": f"{self.run.data['fingerprint']} {self.name}",
            "name": self.name,
        }
        attrs = attrs_of_part(self.run, self.name, self.model.to_dict(), data)
        attrs = {name: value for name, value in attrs.items() if not name.startswith("dispersion")}
        return attrs | self.constants | ({UNSETTLED: 1} if self.learnt else {})

    def factors(self, group: xr.Dataset) -> xr.Dataset:
        """Return draws or moments of both factors, and variables without rows or columns."""
        factors = {
            variable + suffix: self._one(group, variable, suffix)
            for variable in "WH"
            for suffix in ("", "_mean", "_var")
            if variable + suffix in group
        }
        others = {
            str(name): array
            for name, array in group.data_vars.items()
            if str(name)[:1] not in "WH"
            and not set(array.dims) & set(self.dims)
            and not str(name).startswith(("rate", "shape"))
        }
        return xr.Dataset(factors | others, attrs=group.attrs)

    def _one(self, group: xr.Dataset, variable: str, suffix: str) -> xr.DataArray:
        axis = self.axes["WH".index(variable)]
        values = _factor(group, suffix, self.placed, axis, self.dims)
        if variable == "W":
            return values
        unit = values.dtype.type(self.unit) ** (2 if suffix == "_var" else 1)
        scaled: xr.DataArray = (values * unit).transpose(..., COMPONENT, axis)
        return scaled

    def _span(self, side: int) -> tuple[int, int]:
        """Return start and stop on one side of the joint matrix."""
        axis = next(n for n in self.axes if self.placed["factors"][n]["side"] == side)
        start, stop = self.placed["factors"][axis]["span"]
        return start, stop

    def cells(self, group: xr.Dataset) -> xr.Dataset:
        """Return the monitored cells of this matrix, with positions in it."""
        places = [group[name].values for name in CELL_INDICES]
        inside = np.ones(group.sizes["cell"], bool)
        for side, at in enumerate(places):
            low, high = self._span(side)
            inside &= (low <= at) & (at < high)
        selected = group.isel(cell=np.flatnonzero(inside))
        labels = [name for name, coord in selected.coords.items() if coord.dims == ("cell",)]
        selected = selected.drop_vars(set(labels) - {*CELL_INDICES})
        for side, at in enumerate(places):
            name = CELL_INDICES[1 - side if self.relation["turned"] else side]
            selected[name] = ("cell", at[inside] - self._span(side)[0])
        selected["mean"] = selected["mean"] * self.unit
        selected["var"] = selected["var"] * self.unit**2
        return selected
