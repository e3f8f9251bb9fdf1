"""Traces: results of runs as xarray trees, their attributes, and iteration over draws.

Draws of a sampler have equal weights. Particles have probability masses, of which many are zero.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, wraps
from math import prod
from os import PathLike
from typing import Any, Final, NamedTuple, Self, TypeVar, cast

import dask
import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from daskfactor.errors import ModelError, OptionError, StoreFormatError
from daskfactor.models import model_from_dict
from daskfactor.runs.opening import open_run
from daskfactor.runs.schema import COARSE, MOMENTS, SAMPLE_DIMS, factor_dims, tree_of
from daskfactor.runs.stacks import plain

Array = NDArray[Any]
Trace = xr.DataTree | str | PathLike[str]
Weights = NDArray[np.float64]
Draws = Iterator[tuple[Array, Array, Any]]
F = TypeVar("F", bound=Callable[..., Any])

_READ_BYTES: Final = 2**23
NOT_PER_CHAIN: Final = ("share", "discrepancy", "discrepancy_equal")
"""Variables without the dimensions chain and draw, in groups with these dimensions."""
NOT_PER_DRAW: Final = ("share_by_chain",)


def reads_in_threads(function: F) -> F:
    """Decorate a function to read a trace from a path with threads of this process.

    Workers of an active Dask client may not exist or not see the path.
    """

    @wraps(function)
    def reading(trace: Trace, *args: Any, **options: Any) -> Any:
        if not isinstance(trace, str | PathLike):
            return function(trace, *args, **options)
        with dask.config.set(scheduler="threads"):
            return function(trace, *args, **options)

    return cast("F", reading)


def as_tree(trace: Any) -> xr.DataTree:
    """Return the tree of a trace, or of the path of a run store, without a MultiIndex."""
    group = _group_of(trace)
    if group is not None:
        raise OptionError(
            f"a trace is the complete result of a run, got only its group {group!r}; pass trace, "
            f"not trace[{group!r}]"
        )
    if isinstance(trace, xr.DataTree):
        return plain(_with_sample_dims(trace))
    if isinstance(trace, str | PathLike):
        return plain(open_run(trace))
    if isinstance(trace, xr.Dataset) and {"W", "H"} <= set(trace.data_vars):
        kind = Run(trace).kind
        hint = ": its prediction is point['W'] @ point['H']"
        if kind is not None:
            hint = f" and is of {kind}, whose factors are concatenated in W and H"
        raise OptionError(
            "a trace has draws, but this is a point estimate of daskfactor.optimize, which has "
            f"none{hint}; for intervals and alignment pass the result of daskfactor.sample"
        )
    raise OptionError(
        "a trace is the result of daskfactor.sample or the path of its store, got "
        f"{'None' if trace is None else type(trace).__name__}"
    )


def _tree_of_point(point: Any) -> xr.DataTree:
    """Return a point estimate as the tree of a single draw."""
    expected = "a Dataset must be the point estimate of daskfactor.optimize"
    if not {"W", "H"} <= set(point.data_vars):
        got = ", ".join(map(str, point.data_vars)) or "nothing"
        raise OptionError(f"{expected}, with W and H, got {got}")
    if "draw" in point.dims:
        raise OptionError(f"{expected}, but this one has draws; pass the complete trace")
    group = point[["W", "H"]].drop_attrs(deep=False)
    return tree_of({"posterior": group.expand_dims(chain=[0], draw=[0])}, point.attrs)


def _group_of(value: Any) -> str | None:
    """Return the name of a single group of a trace; None for anything else."""
    if not isinstance(value, xr.DataTree | xr.Dataset) or len(getattr(value, "children", ())):
        return None
    if isinstance(value, xr.DataTree) and value.parent is not None:
        return str(value.name)
    return "posterior" if {"W", "H"} <= set(value.data_vars) and "draw" in value.dims else None


def _with_sample_dims(tree: xr.DataTree) -> xr.DataTree:
    """Restore the dimensions of a trace that selecting one chain or draw has dropped.

    Raises
    ------
    OptionError
        If the posterior lacks one of them, and its coordinate.
    """
    groups = {name: node.to_dataset() for name, node in tree.children.items()}
    complete = {name: _with_dims(group) for name, group in groups.items()}
    lost = {"chain", "draw"} - set(complete["posterior"].dims) if "posterior" in complete else set()
    if lost:
        raise OptionError(
            f"the posterior of a trace needs the dimensions chain and draw, but this one has no "
            f"{' and no '.join(sorted(lost))}; select with a list, trace.sel(chain=[0])"
        )
    if all(complete[name] is group for name, group in groups.items()):
        return tree
    return tree_of(complete, tree.attrs)


def _with_dims(group: xr.Dataset) -> xr.Dataset:
    """Return a group with dimensions of length 1 for a selected chain or draw."""
    dropped = [dim for dim in SAMPLE_DIMS if dim in group.coords and not group[dim].dims]
    if not dropped:
        return group
    alone = {name: group[name].drop_vars(dropped) for name in NOT_PER_CHAIN if name in group}
    per_chain = {name: group[name].drop_vars(dropped) for name in NOT_PER_DRAW if name in group}
    dims = [dim for dim in dropped if dim == "chain"]
    alone |= {name: variable.expand_dims(dims) for name, variable in per_chain.items()}
    group = group.drop_vars(list(alone)).expand_dims(dropped).assign(alone)
    return group.transpose(*SAMPLE_DIMS, ..., missing_dims="ignore")


@contextmanager
def describes_run() -> Iterator[None]:
    """Raise a StoreFormatError if attributes of a run are missing or invalid."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise StoreFormatError(
            "the trace does not record its model and data (attributes 'model', 'dispersion', "
            "'data'); pass the result of daskfactor.sample or the path of its store"
        ) from error


class Symmetries(NamedTuple):
    """Symmetries of a factorization: changes of a draw that do not change WH.

    Attributes
    ----------
    free
        Positions of components in arbitrary order, (F,): all but frozen ones and biases.
    signed
        True if factors may be negative, so that signs of components are arbitrary.
    components
        Number of components K; further columns of factors are biases.
    simplex
        True if columns of W add up to 1, so that scales are not arbitrary.
    """

    free: NDArray[np.int64]
    signed: bool
    components: int
    simplex: bool = False


class Axes(NamedTuple):
    """Axes of a tensor: names, lengths, their first columns in H, and labels by name."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    labels: dict[str, NDArray[Any]]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Axes | None":
        """Return the axes from the data attribute of a result; None for a matrix."""
        placed = data.get("placed", {})
        if "offsets" not in placed:
            return None
        factors = placed["factors"]
        spans = [factor["span"] for factor in factors.values()]
        labels = {
            name: np.array(factor["values"]).astype(factor["labels"])
            for name, factor in factors.items()
            if factor.get("values")
        }
        sizes, starts = tuple(b - a for a, b in spans), tuple(a for a, _ in spans)
        return cls(tuple(factors), sizes, starts, labels)

    def coords(self, rows: Array, columns: NDArray[np.int64]) -> dict[str, Any]:
        """Return positions along each axis, as coordinates, from cells of the first unfolding."""
        at = zip(self.names, (rows, *self.fibres(columns)), strict=True)
        return {name: ("cell", positions) for name, positions in at}

    def columns(self, cells: xr.DataArray) -> NDArray[np.int64]:
        """Return columns of the first unfolding from positions along each axis."""
        at = tuple(cells.coords[name].values for name in self.names[1:])
        return np.asarray(np.ravel_multi_index(at, self.sizes[1:]), dtype=np.int64)

    def fibres(self, columns: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Return positions along each further axis from columns of the first unfolding."""
        return np.unravel_index(columns, self.sizes[1:])


class Run:
    """Result of a run, with its parsed attributes and groups.

    Values are read from a store when needed, and cached.

    Parameters
    ----------
    result
        Tree without a MultiIndex (see `as_tree`), or Dataset of a point estimate.
    """

    is_point = False
    """True for a point estimate, which has one draw."""

    def __init__(self, result: Any) -> None:
        self.tree: xr.DataTree = result
        self.attrs: dict[str, Any] = {str(name): value for name, value in result.attrs.items()}

    @classmethod
    def of(
        cls, trace: Any, purpose: str | None = None, other: str = "", *, point: bool = False
    ) -> Self:
        """Return the run of a trace, or of the path of a run store.

        Parameters
        ----------
        trace
            Result of a run.
        purpose
            Description of the operation that needs draws; None if draws are not needed.
        other
            Further advice in the message for a run without draws.
        point
            Accept a point estimate, as a run of a single draw.

        Raises
        ------
        OptionError
            If draws are needed but the run stored none, or has none yet; if a Dataset lacks
            factors, or has draws of them.
        """
        is_point = point and isinstance(trace, xr.Dataset)
        run = cls(_tree_of_point(trace) if is_point else as_tree(trace))
        run.is_point = is_point
        if purpose is not None:
            run.require_draws(purpose, other)
        return run

    def require_draws(self, purpose: str, other: str = "") -> None:
        """Refuse a run without draws; see `of` for the parameters.

        Raises
        ------
        OptionError
            If the run stored none, or has none yet.
        """
        if not self.has_draws:
            raise OptionError(
                f"the run stored only moments, but {purpose} needs draws; run again with "
                f'keep="draws"{other}'
            )
        if not self.posterior.sizes["draw"]:
            raise OptionError(
                f"the run has no draws yet, but {purpose} needs some; resume it first"
            )

    def document(self, name: str) -> dict[str, Any]:
        """Return a JSON attribute as a dict, empty if there is none."""
        stored = self.attrs.get(name, "{}")
        return dict(json.loads(stored) if isinstance(stored, str) else stored)

    @cached_property
    def data(self) -> dict[str, Any]:
        """Information on the data."""
        return self.document("data")

    @cached_property
    def model(self) -> Any:
        """Model without frozen values; None for factors from other sources."""
        try:
            return model_from_dict(self.document("model"))
        except (ModelError, TypeError, ValueError):
            return None

    @cached_property
    def law(self) -> tuple[Any, Any]:
        """Model, and the dispersion of observations or those of columns, (J,); NaN if none.

        Raises
        ------
        StoreFormatError
            If the run does not record them.
        """
        with describes_run():
            model = model_from_dict(self.document("model"))
            dispersion: Any = float(self.attrs["dispersion"] if model.has_observations else "nan")
        moments = self.group(MOMENTS)
        if "dispersion_mean" in moments:
            dispersion = moments["dispersion_mean"].values.mean(axis=0)
        return model, dispersion

    @cached_property
    def axes(self) -> Axes | None:
        """Axes of a tensor; None for a matrix."""
        return Axes.of(self.data)

    @property
    def kind(self) -> str | None:
        """Kind of the data in words; None for a single matrix."""
        if self.model is None or not (self.model.tensor or self.model.joins):
            return None
        return "a tensor" if self.model.tensor else "several matrices"

    def require_matrix(self, verb: str) -> None:
        """Refuse a run that is not of a single matrix.

        Raises
        ------
        OptionError
            If the run, or the point estimate, is of a tensor or of several matrices.
        """
        kind, placed = self.kind, self.data.get("placed")
        if kind is None:
            return
        if placed is None:
            raise OptionError(
                f"{verb} needs the result of one matrix, got a point estimate of {kind}; pass "
                "view(run, name) of a run of daskfactor.sample"
            )
        if "offsets" in placed:
            names, which = list(placed["factors"]), "axis"
            way = "which has all other axes in row-major order as columns, "
        else:
            names, which, way = [relation["name"] for relation in placed["relations"]], "name", ""
        raise OptionError(
            f"{verb} needs a run of one matrix, got a run of {kind}; pass "
            f"view(run, {which}), {way}with one of {', '.join(names)}"
        )

    def __contains__(self, name: str) -> bool:
        """Return True if the run has a group of this name."""
        return name in getattr(self.tree, "children", ())

    def group(self, name: str) -> xr.Dataset:
        """Return a group, empty if there is none."""
        return self.tree[name].to_dataset() if name in self else xr.Dataset()

    @property
    def groups(self) -> dict[str, xr.Dataset]:
        """Copies of all groups by name."""
        return {str(name): node.to_dataset() for name, node in self.tree.children.items()}

    @cached_property
    def posterior(self) -> xr.Dataset:
        """Draws of the posterior."""
        return self.group("posterior")

    @cached_property
    def stats(self) -> xr.Dataset:
        """Statistics of the draws."""
        return self.group("sample_stats")

    @property
    def dims(self) -> tuple[str, str]:
        """Dimension names of rows and columns."""
        return factor_dims(self.tree)

    @property
    def has_draws(self) -> bool:
        """True if the run stored draws of the factors."""
        return "W" in self.posterior

    @property
    def is_aligned(self) -> bool:
        """True if the run is aligned."""
        return "alignment" in self

    @property
    def is_particles(self) -> bool:
        """True if draws are particles, with or without weights."""
        return bool({"weight", "n_iter"} & set(self.stats.data_vars))

    def observed(self, name: str) -> xr.DataArray | None:
        """Return the data ``"V"`` or ``"weights"`` of their cells, if the result has them."""
        return self.group("observed_data").get(name)

    @cached_property
    def weights(self) -> Weights | None:
        r"""Probability masses of the draws, (chain, draw), or None for equal weights.

        .. math:: w_{cd} \ge 0, \qquad \sum_{cd} w_{cd} = 1

        Masses of a part of a run are normalised.

        Raises
        ------
        StoreFormatError
            If weights are invalid, or do not match the draws.
        OptionError
            If all draws have weight 0.

        References
        ----------
        Masood and Doshi-Velez, section 4.
        """
        if "weight" not in self.stats:
            return None
        weight = self.stats["weight"]
        labels = {dim: coord for dim, coord in self.posterior.coords.items() if dim in SAMPLE_DIMS}
        try:
            weight = weight.sel(labels)
        except KeyError as error:
            raise StoreFormatError(
                "draws and weights of the trace have different labels; use the same labels in "
                "posterior and sample_stats"
            ) from error
        masses = np.asarray(weight.transpose("chain", "draw").values, dtype=np.float64)
        if masses.size == 0:
            return None
        if not (np.isfinite(masses).all() and masses.min() >= 0):
            raise StoreFormatError(
                "weights of a trace must be finite and at least 0, got a smallest of "
                f"{masses.min():g}; restore sample_stats['weight']"
            )
        if not masses.sum() > 0:
            raise OptionError(
                "all draws of the trace have weight 0; select draws with positive weight"
            )
        return np.asarray(masses / masses.sum())

    @property
    def masses(self) -> xr.DataArray:
        """Probability mass of every draw, (chain, draw); equal if draws have no weights."""
        labels = {dim: self.posterior[dim].values for dim in ("chain", "draw")}
        shape = tuple(map(len, labels.values()))
        masses = np.full(shape, 1.0 / prod(shape)) if self.weights is None else self.weights
        return xr.DataArray(masses, labels, ("chain", "draw"), name="weight")

    @cached_property
    def symmetries(self) -> Symmetries:
        """Symmetries of the factorization, from the model of the run."""
        width, model = self.posterior.sizes["component"], self.model
        if model is None:  # all components are free
            return Symmetries(np.arange(width), False, width)
        count = min(model.n_components, width)
        free = np.arange(width) < count
        for mask in model.frozen:
            if mask is not None:
                free[: len(mask)] &= ~np.asarray(mask, dtype=bool)[:width]
        return Symmetries(np.flatnonzero(free), not model.nonnegative, count, model.simplex)

    def over_chains(self, values: xr.Dataset) -> xr.Dataset:
        """Return means over chains, weighted by their masses."""
        if self.weights is None:
            return values.mean("chain")
        masses = xr.DataArray(self.weights.sum(axis=1), dims="chain")
        weighted = np.flatnonzero(masses > 0)  # chains without mass have no mean
        return values.isel(chain=weighted).weighted(masses[weighted]).mean("chain")

    def mean_factors(self, moments: xr.Dataset) -> tuple[Array, Array]:
        """Return the means of W (I, K) and of H (K, J) over chains, from those of each chain."""
        means = self.over_chains(moments[["W_mean", "H_mean"]])
        W, H = means["W_mean"], means["H_mean"]
        return W.transpose(..., "component").values, H.transpose("component", ...).values


def relative(group: xr.Dataset, weights: Weights | None) -> Weights:
    """Return masses of draws (chain, draw) in units of the largest; exactly 1 if equal."""
    if weights is None:
        return np.ones((group.sizes["chain"], group.sizes["draw"]))
    return np.asarray(weights / weights.max())


class Running:
    """Running mean and sum of squared deviations (West 1979).

    Attributes
    ----------
    total
        Sum of masses.
    mean, square
        Mean and sum of squared deviations, double precision.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.total = 0.0
        self.mean, self.square = np.zeros((2, *shape))

    def add(self, values: Array, mass: float = 1.0) -> None:
        """Add a value; ignore it if it has no mass."""
        if mass == 0.0:
            return
        self.total += mass
        delta = values - self.mean
        self.mean += delta / (self.total / mass)
        if mass != 1.0:
            delta *= mass
        self.square += delta * (values - self.mean)


def effective_number(weights: ArrayLike) -> float:
    r"""Return the effective number of weighted draws, :math:`1 / \sum_m w_m^2`.

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


@reads_in_threads
def expectation(
    trace: Trace,
    function: Callable[[Array, Array], ArrayLike],
    chain: int | None = None,
) -> NDArray[np.float64]:
    r"""Return the posterior expectation of any function of the factors.

    .. math:: \hat f = \frac1T \sum_t f(W^{(t)}, H^{(t)}), \qquad
        \hat f = \sum_m w_m f(W_m, H_m), \qquad
        \hat f = 2\,\hat f_{\rm fine} - \hat f_{\rm coarse}

    The second is for particles, of which those with weight 0 are not read; the third is for traces
    with ``posterior_coarse`` (aligned ones have none): the Richardson-Romberg estimate without the
    leading bias of the step size.

    Parameters
    ----------
    trace
        Result of a run, or the path of its store; read a few draws at a time.
    function
        Function of W (I, K) and H (K, J) that returns numbers of a fixed shape.
    chain
        Label of a chain; all chains by default.

    Returns
    -------
    array of float64
        Expectation with the shape of the values of ``function``.

    Raises
    ------
    OptionError
        If there are no draws, no such chain, or none of its draws has a positive weight.

    References
    ----------
    Şimşekli et al. 2017, equation 11; Masood and Doshi-Velez, section 4.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> total = dfac.expectation(trace, lambda W, H: (W @ H).sum())  # of the mean
    >>> bool(0.8 < total / V.sum() < 1.2)
    True
    """
    run = Run.of(trace, "an expectation")
    run.require_matrix("expectation")
    group, coarse, weights = run.posterior, run.group(COARSE), run.weights
    if chain is not None:
        labels = group["chain"].values.tolist()
        if chain not in labels:
            raise OptionError(f"there is no chain {chain!r}; the trace has the chains {labels}")
        at = [labels.index(chain)]
        group, coarse = (draws.isel(chain=at, missing_dims="ignore") for draws in (group, coarse))
        weights = None if weights is None else weights[at]
        if weights is not None and not weights.any():
            raise OptionError(
                f"no draw of chain {chain!r} has a positive weight; pass another chain, or leave "
                "chain= out"
            )
    fine = _mean(group, function, weights)
    return 2.0 * fine - _mean(coarse, function, None) if coarse.sizes.get("draw") else fine


def _mean(
    group: xr.Dataset, function: Callable[[Array, Array], ArrayLike], weights: Weights | None
) -> NDArray[np.float64]:
    mean, total = np.zeros(()), 0.0
    for W, H, mass in each_draw(group, weights):
        total += mass
        mean = mean + (np.asarray(function(W, H), dtype=np.float64) - mean) / (total / mass)
    return mean


def each_draw(group: xr.Dataset, weights: Weights | None = None) -> Draws:
    """Yield W, H and mass of each draw of a group; see `batches_of_draws`."""
    for W, H, masses in batches_of_draws(group, weights):
        yield from zip(W, H, masses.tolist(), strict=True)


def batches_of_draws(group: xr.Dataset, weights: Weights | None = None) -> Draws:
    """Yield draws with mass, a few at a time: W (d, I, K), H (d, K, J) and masses (d,).

    Parameters
    ----------
    group
        Group with the factors; draws without mass are not read.
    weights
        Weights (chain, draw), or None for equal weights. Masses are in units of the largest.
    """
    for at, masses in enumerate(relative(group, weights)):
        part, weighted = group.isel(chain=[at]), np.flatnonzero(masses > 0)
        if weighted.size < masses.size:
            part = part.isel(draw=weighted)
        W, H = factors_of(part)
        size = (prod(W.shape[2:]) + prod(H.shape[2:])) * W.dtype.itemsize
        step = max(1, _READ_BYTES // size)
        for start in range(0, weighted.size, step):
            some = slice(start, start + step)
            yield W[0, some].values, H[0, some].values, masses[weighted[some]]


def draw_at(group: xr.Dataset, chain: int, draw: int) -> tuple[Array, Array]:
    """Return W and H of one draw by its position."""
    W, H = factors_of(group)
    return W[chain, draw].values, H[chain, draw].values


def factors_of(group: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Return W (chain, draw, row, component) and H (chain, draw, component, column).

    Raises
    ------
    StoreFormatError
        If the group has no factors.
    """
    row, column = factor_dims(group)
    W = group["W"].transpose("chain", "draw", row, "component")
    return W, group["H"].transpose("chain", "draw", "component", column)


FLOOR: Final = 0.1
"""Lower limit of an extrapolated positive quantity, as a share of its fine-chain value."""


def extrapolated_moments(fine: tuple[Any, Any], coarse: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return mean and variance without the first-order bias in ε: 2 fine - coarse.

    A variance is not an expectation of a function, but its bias also has an expansion in ε. Noise
    can make the combination negative; the lower limit is a tenth of the value of the fine chain.

    Parameters
    ----------
    fine, coarse
        Mean and variance of a non-negative quantity from each chain.

    Notes
    -----
    Şimşekli et al. 2017, equation 11.
    """
    mean, variance = (
        np.maximum(2.0 * value - other, FLOOR * value)
        for value, other in zip(fine, coarse, strict=True)
    )
    return mean, variance
