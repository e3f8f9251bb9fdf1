"""Schema of a run: table of variables, their names, and the plan of a run.

Names and dimensions follow ArviZ where possible. ``{row}`` and ``{column}`` stand for the
dimension names of the user. Algorithms declare the statistics of their draws as `Variable`s;
everything else is here. A `RunSpec` is checked before the first draw; `layouts` and `group_coords`
derive arrays and coordinates from it, in memory or in a store.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

import daskfactor
from daskfactor.errors import DataError, OptionError, StoreFormatError
from daskfactor.runs.metadata import FORMAT_VERSION, LIBRARY

ROW: Final = "{row}"
COLUMN: Final = "{column}"

Kind = Literal["factor", "real", "count", "flag", "data"]


class Variable(NamedTuple):
    """Variable of a run: group, name, dimensions, kind and description."""

    group: str
    name: str
    dims: tuple[str, ...]
    kind: Kind
    doc: str


def _table(group: str, *rows: tuple[str, str, Kind, str]) -> tuple[Variable, ...]:
    """Return the variables of a group, from names, dimensions (one text), kinds, descriptions."""
    return tuple(
        Variable(group, name, tuple(dims.split()), kind, doc) for name, dims, kind, doc in rows
    )


def statistic(name: str, doc: str, kind: Kind = "real") -> Variable:
    """Declare a statistic of each draw of an algorithm."""
    return Variable("sample_stats", name, ("chain", "draw"), kind, doc)


def _factors(group: str, doc: str) -> tuple[Variable, ...]:
    return _table(
        group,
        ("W", "chain draw {row} component", "factor", f"row factor, {doc}"),
        ("H", "chain draw component {column}", "factor", f"column factor, {doc}"),
    )


MOMENTS: Final = "posterior_moments"
MONITOR: Final = "monitor"
STEIN: Final = "stein"
COARSE: Final = "posterior_coarse"
WARMUP: Final = "warmup_sample_stats"

DRAWS: Final = _factors("posterior", "one draw per kept cycle")
COARSE_DRAWS: Final = _factors(COARSE, "of the chain with twice the step (P-SGRRLD)")
STREAMED: Final = _table(
    MOMENTS,
    ("W_mean", "chain {row} component", "factor", "mean of W over cycles"),
    ("W_var", "chain {row} component", "factor", "population variance of W"),
    ("H_mean", "chain component {column}", "factor", "mean of H over cycles"),
    ("H_var", "chain component {column}", "factor", "population variance of H"),
    ("count", "chain", "count", "cycles averaged; 0: nothing valid yet"),
)
MONITORED: Final = _table(
    MONITOR,
    ("mean", "chain cell", "real", "mean of WH at a monitored cell"),
    ("var", "chain cell", "real", "population variance of WH there"),
    ("count", "chain", "count", "cycles averaged; 0: nothing valid yet"),
)
DENSITY: Final = statistic("lp", "log density of data and factors, up to a constant")
STEPS: Final = (
    statistic("step_size", "step size of the cycle"),
    statistic("diverging", "the cycle diverged and was rolled back", "flag"),
)
WEIGHT: Final = statistic("weight", "probability mass of the particle; all add up to 1")
PARTICLES: Final = (
    WEIGHT,
    statistic("seconds", "time its start and optimisation took, in s"),
    statistic("n_iter", "iterations of its optimisation", "count"),
)
OBJECTIVE: Final = statistic("objective", "objective f of the particle")
TUNING: Final = _table(
    WARMUP,
    ("lp", "chain warmup_draw", "real", "as in sample_stats, while tuning"),
    ("step_size", "chain warmup_draw", "real", "step size while tuning"),
)
DISCREPANCIES: Final = _table(
    STEIN,
    ("stein_matrix", "draw other_draw", "real", "Stein kernel of two particles"),
    ("discrepancy", "", "real", "Stein discrepancy under the weights"),
    ("discrepancy_equal", "", "real", "Stein discrepancy under equal weights"),
)
OBSERVED: Final = _table(
    "observed_data", ("V", "{row} {column}", "data", "the data; NaN = missing")
)
WEIGHED: Final = _table(
    "observed_data", ("weights", "{row} {column}", "data", "weight of a cell, 1 / sigma^2 of sigma")
)
RATES: Final = _table(
    "constant_data",
    ("dispersion", "", "real", "dispersion of an observation"),
    ("rate_w", "", "real", "prior rate of W"),
    ("rate_h", "", "real", "prior rate of H"),
)
THRESHOLD: Final = _table(
    "constant_data", ("threshold", "", "real", "objective up to which all is alike")
)

FEATURES: Final = ("row_feature", "column_feature")
"""Dimensions of the covariates of rows and of columns."""
CELL_INDICES: Final = ("row_index", "column_index")
BIASED: Final = "biased"
"""Attribute of a tree: 1 if draws have a bias that convergence diagnostics do not show."""
SAMPLE_DIMS: Final = ("chain", "draw", "warmup_draw")
IDENTITY: Final = {"trace_id": "trace_id", "created_at": "trace_created_at"}
"""Attributes that identify a run, and their names in factors of new rows."""
GROUP_ATTRS: Final = (
    "created_at",
    "inference_library",
    "inference_library_version",
    "creation_library",
    "creation_library_version",
    "creation_library_language",
    "sample_dims",
)
"""Attributes of every group; groups without draws lack the last."""


def group_attrs(attrs: Mapping[str, Any], dims: Collection[Any]) -> dict[str, Any]:
    """Return ArviZ's attributes of a group, from the attributes of the run.

    ``dims`` are those of the group; those of draws become ``sample_dims``.
    """
    library_attrs = {
        "inference_library": LIBRARY,
        "creation_library": LIBRARY,
        "creation_library_version": daskfactor.__version__,
        "creation_library_language": "Python",
        "sample_dims": [dim for dim in SAMPLE_DIMS if dim in dims],
    }
    shared = {name: attrs[name] for name in GROUP_ATTRS if name in attrs} | library_attrs
    return {name: shared[name] for name in GROUP_ATTRS if shared.get(name)}


COMPONENT_NAME: Final = "component_name"
"""Coordinate with the names of components, which identifies biases."""
CELL_NAMES: Final = {"var": "var_"}
"""Names of coordinates of monitored cells that would clash with variables."""


def tree_of(groups: Mapping[str, Any], attrs: Mapping[Any, Any]) -> xr.DataTree:
    """Return a tree of groups, with attributes of the root."""
    tree = xr.DataTree.from_dict(groups)
    tree.attrs = dict(attrs)
    return tree


def component_labels(group: Any) -> list[Any]:
    """Return the labels of components: 0, 1, 2, ..., and names of biases.

    Text labels, as in runs of version 0.1.0 with biases, are returned unchanged.
    """
    numbers: list[Any] = group["component"].values.tolist()
    if COMPONENT_NAME not in group.coords:
        return numbers
    names = map(str, group[COMPONENT_NAME].values.tolist())
    return [at if name.isdecimal() else name for at, name in zip(numbers, names, strict=True)]


def factor_dims(trace: xr.DataTree | xr.Dataset) -> tuple[str, str]:
    """Return the dimension names of rows and columns in a trace, or in a group with W and H.

    Raises
    ------
    StoreFormatError
        If the tree has neither draws nor moments of the factors.
    OptionError
        If factors are unstacked.
    """
    reserved = {"chain", "draw", "component"}
    groups = {"posterior": trace} if isinstance(trace, xr.Dataset) else trace.children
    for group, w, h in (("posterior", "W", "H"), (MOMENTS, "W_mean", "H_mean")):
        if group in groups and {w, h} <= set(groups[group].data_vars):
            dims = [[d for d in groups[group][name].dims if d not in reserved] for name in (w, h)]
            if len(dims[0]) == len(dims[1]) == 1:
                return str(dims[0][0]), str(dims[1][0])
            if max(map(len, dims)) > 1:
                raise OptionError(
                    f"rows of {w} or columns of {h} have several dimensions, as "
                    "daskfactor.unstack returns them; pass the run before unstack"
                )
    raise StoreFormatError(
        f"the tree has the groups {sorted(groups)} but no factors; "
        "pass the result of daskfactor.sample or the path of a run store"
    )


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Plan of a run: everything that is determined before its first draw.

    Options and data have been checked.

    Parameters
    ----------
    shape : (I, J, K)
        Rows, columns and components.
    chains, draws, warmup_draws : int
        Numbers per chain; ``draws`` counts stored draws.
    dims : (str, str)
        Dimension names of rows and columns.
    coords : mapping
        Coordinates along one of these dimensions, ``(dim, values)`` by name, or with attributes.
    dtype : str
        dtype of the factors, ``"float32"`` or ``"float64"``.
    keep : {"draws", "moments"}
        ``"draws"`` for groups with draws of the factors, ``"moments"`` without.
    has_coarse : bool
        True for P-SGRRLD: there is a ``posterior_coarse`` with ``draws // 2`` draws.
    statistics : tuple of Variable
        Statistics of each draw besides the log density. With `WEIGHT` it is a run of particles,
        one chain with stored draws, with a group ``stein`` and without ``posterior_moments``.
    learnt : tuple of Variable
        Sampled variables besides the factors.
    features : mapping
        Labels of the covariates by their dimension.
    constants : tuple of Variable
        Variables of ``constant_data``, with values from ``attrs``.
    monitor_rows, monitor_columns : array of int, (n_monitor,), optional
        Positions of the monitored cells.
    unfolds : bool
        True if columns of cells are those of the first unfolding of a tensor, and not of H.
    draw_index : array of int, (draws,), optional
        Cycle number of each stored draw; 0, 1, 2, ... by default.
    components : tuple of str, (K,), optional
        Names of the components, if some are biases.
    observed, weights : array (I, J), optional
        Data, and weights of their cells, to store with the run.
    attrs : mapping
        JSON-able attributes of the root.

    Raises
    ------
    DataError
        If labels cannot be stored.
    """

    shape: tuple[int, int, int]
    chains: int
    draws: int
    warmup_draws: int = 0
    dims: tuple[str, str] = ("row", "column")
    coords: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    keep: Literal["draws", "moments"] = "draws"
    has_coarse: bool = False
    statistics: tuple[Variable, ...] = STEPS
    learnt: tuple[Variable, ...] = ()
    features: Mapping[str, Any] = field(default_factory=dict)
    constants: tuple[Variable, ...] = RATES
    monitor_rows: NDArray[np.integer[Any]] | None = None
    monitor_columns: NDArray[np.integer[Any]] | None = None
    unfolds: bool = False
    draw_index: NDArray[np.integer[Any]] | None = None
    observed: NDArray[Any] | None = None
    weights: NDArray[Any] | None = None
    components: tuple[str, ...] | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _ = self.labels

    @property
    def n_monitor(self) -> int:
        return 0 if self.monitor_rows is None else len(self.monitor_rows)

    @property
    def cycles(self) -> NDArray[np.int64]:
        """Cycle number of every stored draw."""
        index = np.arange(self.draws) if self.draw_index is None else self.draw_index
        return np.asarray(index, dtype=np.int64)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All variables of the run."""
        with_draws, weighted = self.keep == "draws", WEIGHT in self.statistics
        return (
            *(DRAWS if with_draws else ()),
            *(COARSE_DRAWS if with_draws and self.has_coarse else ()),
            *self.learnt,
            *(() if weighted else STREAMED),
            *(MONITORED if self.n_monitor else ()),
            *(DENSITY, *self.statistics),
            *(TUNING if self.warmup_draws else ()),
            *(DISCREPANCIES if weighted else ()),
            *(() if self.observed is None else OBSERVED),
            *(() if self.weights is None else WEIGHED),
            *self.constants,
        )

    @property
    def root_attrs(self) -> dict[str, Any]:
        """All attributes of the root."""
        return {
            **self.attrs,
            "inference_library": LIBRARY,
            "format_version": FORMAT_VERSION,
        }

    @cached_property
    def labels(self) -> xr.Dataset:
        """Coordinates of the user, with string labels as text instead of objects."""
        user_coords = xr.Dataset(coords=self.coords)
        labels = {
            name: (coord.dims, _storable_labels(str(name), coord.values), coord.attrs)
            for name, coord in user_coords.coords.items()
        }
        return user_coords.assign_coords(labels)


def _storable_labels(name: str, labels: NDArray[Any]) -> NDArray[Any]:
    """Return the labels of a coordinate, as text unless they are numbers, flags or dates."""
    if labels.dtype.kind in "biufMm":
        return labels
    if labels.dtype.kind in "OUT" and all(isinstance(label, str) for label in labels):
        return labels.astype(str)
    raise DataError(
        f"the coordinate {name!r} has labels of dtype {labels.dtype}; "
        "labels must be text, numbers, booleans or dates; convert or drop them"
    )


# Large enough to amortise system calls, small enough that rewriting a partial chunk takes a few
# milliseconds.
CHUNK_BYTES = 8 * 2**20


class Layout(NamedTuple):
    """Array layout of one variable of a run, in memory or in a store."""

    variable: Variable
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]
    fill: float | int | bool
    value: Any
    """Initial value; None for values that the run writes."""


def planned_draws(group: str, draws: int) -> int:
    """Return the number of draws of a group; the coarse chain has half as many."""
    return draws // 2 if group == COARSE else draws


def layouts(spec: RunSpec) -> dict[str, Layout]:
    """Return the layout of every variable of a run, by path."""
    sizes = dict(zip((ROW, COLUMN, "component"), spec.shape, strict=True)) | {
        "chain": spec.chains,
        "other_draw": spec.draws,
        "warmup_draw": spec.warmup_draws,
        "cell": spec.n_monitor,
        **{dim: len(labels) for dim, labels in spec.features.items()},
    }
    data = spec.dtype if spec.observed is None else spec.observed.dtype
    dtypes = {"factor": spec.dtype, "real": "f8", "count": "i8", "flag": "?", "data": data}
    values = {variable: spec.attrs.get(variable.name) for variable in spec.constants}
    values |= dict.fromkeys(OBSERVED, spec.observed) | dict.fromkeys(WEIGHED, spec.weights)
    names = dict(zip((ROW, COLUMN), spec.dims, strict=True))
    result = {}
    for variable in spec.variables:
        sizes["draw"] = planned_draws(variable.group, spec.draws)
        dtype = np.dtype(dtypes[variable.kind])
        shape = tuple(sizes[dim] for dim in variable.dims)
        result[f"{variable.group}/{variable.name}"] = Layout(
            variable,
            tuple(names.get(dim, dim) for dim in variable.dims),
            shape,
            dtype,
            _chunks(variable.dims, shape, dtype.itemsize),
            {"b": False, "i": 0, "u": 0}.get(dtype.kind, float("nan")),
            values.get(variable),
        )
    return result


def _chunks(dims: tuple[str, ...], shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return chunks of at most ``CHUNK_BYTES``, with one chain each.

    Components fill a chunk first, then rows or columns, then draws, so that a chunk has many
    small draws or a part of a large one.
    """
    rank = {"component": 0, "draw": 2, "chain": 3}
    budget = max(1, CHUNK_BYTES // itemsize)
    chunks = [1] * len(dims)
    for axis in sorted(range(len(dims)), key=lambda axis: (rank.get(dims[axis], 1), -axis)):
        if dims[axis] != "chain":
            # An empty axis may grow when the run is extended.
            chunks[axis] = max(1, min(shape[axis] or 64, budget // prod(chunks)))
    return tuple(chunks)


def group_coords(group: str, spec: RunSpec) -> xr.Dataset:
    """Return the coordinates of a group: those of the user and of the run."""
    dims = {dim for variable in spec.variables if variable.group == group for dim in variable.dims}
    every = {
        "chain": np.arange(spec.chains),
        # Draw t of the coarse chain ends where the fine chain ends its draw 2t + 1.
        "draw": spec.cycles[1::2] if group == COARSE else spec.cycles,
        "other_draw": spec.cycles,
        "component": np.arange(spec.shape[2]),
        "warmup_draw": np.arange(spec.warmup_draws),
        **{dim: _storable_labels(dim, np.array(names)) for dim, names in spec.features.items()},
    }
    coords: dict[str, Any] = {dim: values for dim, values in every.items() if dim in dims}
    if spec.components is not None and "component" in dims:
        coords[COMPONENT_NAME] = ("component", np.array(spec.components))
    # Dimension and positions of the labels of rows and of columns.
    reserved: dict[str, tuple[str, Any]] = {
        name: (name, slice(None))
        for axis, name in zip((ROW, COLUMN), spec.dims, strict=True)
        if axis in dims
    }
    if group == MONITOR:
        cells = (np.asarray(at, np.int64) for at in (spec.monitor_rows, spec.monitor_columns))
        coords |= {name: ("cell", at) for name, at in zip(CELL_INDICES, cells, strict=True)}
        reserved = {dim: coords[name] for dim, name in zip(spec.dims, CELL_INDICES, strict=True)}
        if spec.unfolds:  # columns of an unfolding are not those of H
            del reserved[spec.dims[1]]
    names = CELL_NAMES if group == MONITOR else {}
    users: dict[str, Any] = {}
    for name, coord in spec.labels.coords.items():
        if coord.dims[0] in reserved:
            along, at = reserved[str(coord.dims[0])]
            users[names.get(str(name), str(name))] = (along, coord.values[at], coord.attrs)
    users_coords = xr.Dataset(coords=users).assign_coords(coords)
    return users_coords.assign_attrs(group_attrs(spec.attrs, dims))
