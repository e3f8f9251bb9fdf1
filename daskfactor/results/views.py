"""Parts of a run of several matrices: one of them as a run of its own, a factor, what explains it.

A run of a coupled model has the factors of one side behind one another, in units in which every
matrix has mean 1; its attribute ``data`` says where each of them is (``placed``).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from daskfactor.data.coupled import FACTOR, LABEL, SIDES
from daskfactor.errors import OptionError
from daskfactor.models import model_from_dict
from daskfactor.options import near_name
from daskfactor.results.schema import CELL_INDICES, MOMENTS, MONITOR, WARMUP, tree_of
from daskfactor.results.tensors import attrs_of_part, axis_factors, unfolding
from daskfactor.results.trace import Run, Trace

COMPONENT = "component"
ONE, OTHER = "daskfactor component", "daskfactor other component"
"""Dimensions that no factor of a user's is called like."""
UNSETTLED = "learnt_priors"
"""Attribute of a view whose run learnt rates or shapes of priors."""


def view(trace: Trace, name: str) -> xr.DataTree:
    r"""Give one matrix of a run of several, as a run of that matrix alone.

    .. math:: \mu = W H, \qquad W = F_{\text{rows}}, \quad H = u F_{\text{columns}}^\top

    with :math:`u` the unit of the matrix, its mean, so that what is predicted is in the unit of
    the data. Whatever takes a run takes it: :func:`predict`, :func:`summarize`,
    :func:`transform`, :func:`recommend`, :func:`to_anndata`, plots. Rows that the
    matrix lacks and others have are among its rows, and are predicted. Nothing is copied.

    Of a tensor it is the unfolding along an axis: a matrix of its indices against those of all
    other axes in row-major order, so that :func:`transform` takes new indices of that axis.

    Parameters
    ----------
    trace
        Result of :func:`sample` with a :class:`Coupled` model, or the path of its store.
    name
        Of the matrix, as it was passed; of a tensor, of the axis.

    Returns
    -------
    xarray.DataTree
        Groups as :func:`sample` gives them; dimensions have the names of the factors.

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
        return run.tree  # one matrix alone, which was passed by name
    place = _Place.of(run, name)
    groups = {own: place.factors(run.group(own)) for own in ("posterior", MOMENTS) if own in run}
    groups |= {own: run.group(own) for own in ("sample_stats", WARMUP) if own in run}
    if MONITOR in run:
        groups[MONITOR] = place.cells(run.group(MONITOR))
    told = {own: place.told[own] for own in ("dispersion", "rate_w", "rate_h") if own in place.told}
    groups["constant_data"] = xr.Dataset({own: float(value) for own, value in told.items()})
    return tree_of(groups, place.attrs())


def factors(trace: Trace) -> dict[str, xr.DataArray]:
    """Give the factors of a run of several matrices, or of a tensor, by name, with their labels.

    Parameters
    ----------
    trace
        Result of :func:`sample` with a :class:`Coupled` or :class:`CP` model, or the path of its
        store.

    Returns
    -------
    dict of DataArray
        (chain, draw, factor's own dimension, component), in units in which every matrix has
        mean 1; lazily from a store.

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
            "factors are those of draws, and the run kept none; "
            'view(run, name)["posterior_moments"] has their means and variances'
        )
    group, dims = run.posterior, run.dims
    return {name: _factor(group, "", placed, name, dims) for name in placed["factors"]}


def explained_variance(trace: Trace) -> xr.DataArray:
    r"""Tell what share of the variance of each matrix a component explains.

    .. math:: R_k = \frac{\mathrm{Cov}(\mu_k, \mu)}{\mathrm{Var}(\mu) + \overline{\phi V(\mu)}},
        \qquad \mu_k = w_k h_k

    over all cells of a matrix, with the law's variance of observations at their means: shares of
    components add up to what the model explains, and the rest is noise.

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
        raise OptionError("shares of variance are those of draws of equal weight, not of particles")
    runs = {"data": run}
    if run.axes is not None:
        found = [_shares(run, factors(run.tree))]
    else:
        if "placed" in run.data:
            runs = {name: Run(view(run.tree, name)) for name in _names(_placed(run))}
        found = [
            _shares(own, {dim: factor for factor, dim in axis_factors(own.posterior, None)})
            for own in runs.values()
        ]
    return xr.concat(found, xr.Variable("view", list(runs))).transpose(
        "chain", "draw", "view", COMPONENT
    )


def _shares(run: Run, parts: Mapping[str, xr.DataArray]) -> xr.DataArray:
    """Shares of the components of one array, from sums over the rows of each of its factors.

    ``parts`` are these factors, by their own dimensions.
    """
    both: Any = 1.0
    means: Any = 1.0
    for dim, factor in parts.items():
        own = factor.rename({COMPONENT: ONE}).astype(np.float64)
        both = both * (xr.dot(own, own.rename({ONE: OTHER}), dim=dim) / own.sizes[dim])
        means = means * own.mean(dim)
    total = means.sum(ONE)
    explained = both.sum(OTHER) - means * total
    model = model_from_dict(run.document("model"))
    spread = explained.sum(ONE)
    noise = _noise(model.likelihood, float(run.attrs["dispersion"]), total.values, spread.values)
    shares: xr.DataArray = (explained / (spread + noise)).rename({ONE: COMPONENT})
    return shares


def _noise(likelihood: Any, dispersion: float, level: Any, spread: Any) -> xr.DataArray:
    """Mean of the law's variance, (chain, draw), over means of this level and variance.

    By its slope and curvature at the level: exact where it is constant, linear or a square.
    """
    step = np.where(level == 0, 1.0, 0.5 * np.abs(level))
    low, at, high = (
        likelihood.variance(level + side * step, dispersion) for side in (-1.0, 0.0, 1.0)
    )
    return xr.DataArray(at + 0.5 * spread * (high - 2 * at + low) / step**2, dims=("chain", "draw"))


# -- places ---------------------------------------------------------------------------------


def _placed(run: Run) -> dict[str, Any]:
    placed = run.data.get("placed")
    if placed is None:
        raise OptionError(
            "this is a run of one matrix; one of several, sample({...}, Coupled(...)), has views"
        )
    found: dict[str, Any] = placed
    return found


def _names(placed: Mapping[str, Any]) -> list[str]:
    return [own["name"] for own in placed["relations"]]


def _factor(
    group: xr.Dataset, suffix: str, placed: Mapping[str, Any], name: str, dims: tuple[str, str]
) -> xr.DataArray:
    """A factor by name: (..., its own dimension, component), with its labels if it has any."""
    own = placed["factors"][name]
    side, (start, stop) = own["side"], own["span"]
    dim = dims[side]
    values = group["WH"[side] + suffix].isel({dim: slice(start, stop)})
    labels = values.coords.get(LABEL.format(SIDES[side]))
    for coord in (FACTOR, LABEL):
        values = values.drop_vars(coord.format(SIDES[side]), errors="ignore")
    values = values.rename({dim: name}) if dim != name else values
    if labels is not None and own["labels"] is not None:
        kept = (
            labels.values if own["labels"].startswith("|O") else labels.values.astype(own["labels"])
        )
        values = values.assign_coords({name: kept})
    leading = [d for d in values.dims if d not in (name, COMPONENT)]
    return values.transpose(*leading, name, COMPONENT)


class _Place:
    """Where a matrix is in a run of several, and what results of it alone say."""

    def __init__(self, run: Run, placed: dict[str, Any], own: dict[str, Any]) -> None:
        self.run, self.placed, self.own = run, placed, own
        self.name, self.unit, self.axes = own["name"], float(own["unit"]), own["axes"]
        self.dims = run.dims
        self.sizes = [np.ptp(placed["factors"][axis]["span"]).item() for axis in self.axes]
        attrs, model = run.attrs, model_from_dict(run.document("model"))
        self.learnt = any(not own.name.startswith("dispersion") for own in model.learnt)
        shapes = [attrs.get("shape_w", 1.0), attrs.get("shape_h", 1.0)]
        rates: list[Any] = [attrs.get("rate_w"), attrs.get("rate_h")]
        if own["turned"]:
            shapes, rates = shapes[::-1], rates[::-1]
        known = None not in rates
        self.told: dict[str, Any] = {"dispersion": attrs[f"dispersion_{self.name}"]}
        self.told |= {"shape_w": shapes[0], "shape_h": shapes[1]}
        if known:
            self.told |= {"rate_w": rates[0], "rate_h": rates[1] / self.unit}
        given = {n: float(v) for n, v in self.told.items() if n.startswith(("rate", "shape"))}
        self.model = model.relations[self.name].model(
            next(run.group(n).sizes[COMPONENT] for n in ("posterior", MOMENTS) if n in run),
            dispersion=float(self.told["dispersion"]),
            **given,
        )

    @classmethod
    def of(cls, run: Run, name: str) -> "_Place":
        placed = _placed(run)
        for own in placed["relations"]:
            if own["name"] == name:
                return cls(run, placed, own)
        near = near_name(str(name), _names(placed))
        raise OptionError(
            f"the run has no matrix {name!r}{near and f', did you mean {near!r}?'}; it has "
            f"{', '.join(_names(placed))}"
        )

    def attrs(self) -> dict[str, Any]:
        """Attributes of the whole tree."""
        data = {name: self.own[name] for name in ("n_observed", "mean", "unstored")}
        data |= {
            "shape": self.sizes,
            "level": self.unit if self.own["mean"] <= 0 else self.own["mean"],
            "fingerprint": f"{self.run.data['fingerprint']} {self.name}",
            "name": self.name,
        }
        attrs = attrs_of_part(self.run, self.name, self.model.to_dict(), data)
        attrs = {name: own for name, own in attrs.items() if not name.startswith("dispersion")}
        return attrs | self.told | ({UNSETTLED: 1} if self.learnt else {})

    def factors(self, group: xr.Dataset) -> xr.Dataset:
        """Draws or moments of both factors; what else is in the group and has no rows."""
        found = {}
        for variable in ("W", "H"):
            for suffix in ("", "_mean", "_var"):
                if variable + suffix in group:
                    found[variable + suffix] = self._one(group, variable, suffix)
        others = {
            str(name): own
            for name, own in group.data_vars.items()
            if str(name)[:1] not in "WH"
            and not set(own.dims) & set(self.dims)
            and not str(name).startswith(("rate", "shape"))
        }
        return xr.Dataset(found | others, attrs=group.attrs)

    def _one(self, group: xr.Dataset, variable: str, suffix: str) -> xr.DataArray:
        axis = self.axes["WH".index(variable)]
        values = _factor(group, suffix, self.placed, axis, self.dims)
        if variable == "W":
            return values
        unit = values.dtype.type(self.unit) ** (2 if suffix == "_var" else 1)
        leading = [dim for dim in values.dims if dim not in (axis, COMPONENT)]
        scaled: xr.DataArray = (values * unit).transpose(*leading, COMPONENT, axis)
        return scaled

    def _span(self, side: int) -> tuple[int, int]:
        """First and last position on a side of the joint matrix."""
        axis = next(n for n in self.axes if self.placed["factors"][n]["side"] == side)
        start, stop = self.placed["factors"][axis]["span"]
        return start, stop

    def cells(self, group: xr.Dataset) -> xr.Dataset:
        """Monitored cells of this matrix, at their places in it."""
        places = [group[name].values for name in CELL_INDICES]
        here = np.ones(group.sizes["cell"], bool)
        for side, own in enumerate(places):
            low, high = self._span(side)
            here &= (low <= own) & (own < high)
        found = group.isel(cell=np.flatnonzero(here))
        of_joint = [n for n in found.coords if n not in CELL_INDICES and found[n].dims == ("cell",)]
        found = found.drop_vars(of_joint)
        for side, own in enumerate(places):
            name = CELL_INDICES[1 - side if self.own["turned"] else side]
            found[name] = ("cell", own[here] - self._span(side)[0])
        found["mean"] = found["mean"] * self.unit
        found["var"] = found["var"] * self.unit**2
        return found
