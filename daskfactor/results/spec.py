"""What a run will hold, checked before its first draw: sizes, labels, arrays."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.errors import DataError, OptionError
from daskfactor.results.schema import (
    COARSE,
    COARSE_DRAWS,
    COLUMN,
    DENSITY,
    DISCREPANCIES,
    DRAWS,
    FORMAT_VERSION,
    LIBRARY,
    MONITOR,
    MONITORED,
    OBSERVED,
    RATES,
    RENAMED,
    ROW,
    STEPS,
    STREAMED,
    TUNING,
    WEIGHT,
    Kind,
    Variable,
    check_dims,
    names_in,
)


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What a run will hold: everything that must be known before its first draw.

    Parameters
    ----------
    shape : (I, J, K)
        Rows, columns and components.
    chains, draws, warmup_draws : int
        ``draws`` counts the draws *kept*, per chain.
    dims : (str, str)
        The user's names of rows and columns.
    coords : mapping
        Coordinates as xarray takes them: labels by dimension name, or
        ``(dim, values)`` for further ones.
    dtype : str
        dtype of the factors, ``"float32"`` or ``"float64"``.
    keep : {"draws", "moments"}
        Whether the posterior groups with the draws themselves exist.
    has_coarse : bool
        P-SGRRLD: ``posterior_coarse`` exists, with ``draws // 2`` draws.
    statistics : tuple of Variable
        What the algorithm tells of each draw besides the log density. With `WEIGHT` among
        them it is a run of particles, one chain of them with kept draws: there is a group
        ``stein``, and no ``posterior_moments``.
    constants : tuple of Variable
        What ``constant_data`` holds, taken from ``attrs``.
    monitor_rows, monitor_columns : array of int, (n_monitor,), optional
        Positions of the monitored cells.
    draw_index : array of int, (draws,), optional
        Cycle number of each kept draw; 0, 1, 2, ... when not given.
    components : tuple of str, (K,), optional
        Names of the components; 0, 1, 2, ... when not given.
    observed : array (I, J), optional
        The data, when they are to travel with the run.
    attrs : mapping
        JSON-able attributes of the root.

    Raises
    ------
    DataError
        If a dimension has no usable name, or labels do not fit.
    OptionError
        If a count is impossible.
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
    constants: tuple[Variable, ...] = RATES
    monitor_rows: NDArray[np.integer[Any]] | None = None
    monitor_columns: NDArray[np.integer[Any]] | None = None
    draw_index: NDArray[np.integer[Any]] | None = None
    observed: NDArray[Any] | None = None
    components: tuple[str, ...] | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_dims(self.dims)
        _check_counts(self)
        _check_particles(self)
        _check_monitor(self)
        _ = self.labels

    @property
    def n_monitor(self) -> int:
        return 0 if self.monitor_rows is None else len(self.monitor_rows)

    @property
    def cycles(self) -> NDArray[np.int64]:
        """Cycle number of every kept draw."""
        if self.draw_index is None:
            return np.arange(self.draws, dtype=np.int64)
        return np.asarray(self.draw_index, dtype=np.int64)

    @property
    def weighted(self) -> bool:
        """Whether the draws are particles, with weights."""
        return WEIGHT in self.statistics

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All that the run holds."""
        kept, warm = self.keep == "draws", self.warmup_draws > 0
        parts = (
            (DRAWS, kept),
            (COARSE_DRAWS, kept and self.has_coarse),
            (STREAMED, not self.weighted),
            (MONITORED, self.n_monitor > 0),
            ((DENSITY, *self.statistics), True),
            (TUNING, warm),
            (DISCREPANCIES, self.weighted),
            (OBSERVED, self.observed is not None),
            (self.constants, True),
        )
        return tuple(variable for part, present in parts if present for variable in part)

    def names(self, group: str) -> dict[str, str]:
        """What the user's dimensions and coordinates are called in a group."""
        return names_in(group, dict.fromkeys([*self.dims, *map(str, self.labels.coords)]))

    @property
    def root_attrs(self) -> dict[str, Any]:
        """Attributes of the root, complete."""
        renamed = {
            inner: name
            for group in ("posterior", MONITOR)
            for name, inner in self.names(group).items()
            if inner != name and (group != MONITOR or self.n_monitor)
        }
        own = {"inference_library": LIBRARY, "format_version": FORMAT_VERSION}
        own |= {RENAMED: json.dumps(renamed)} if renamed else {}
        return {**self.attrs, **own}

    @cached_property
    def labels(self) -> xr.Dataset:
        """The user's coordinates, checked, with string labels as text rather than objects."""
        try:
            dataset = xr.Dataset(coords={name: _values(v) for name, v in self.coords.items()})
        except (ValueError, TypeError) as error:
            raise DataError(f"the coordinates of the data cannot be used: {error}") from error
        lengths = dict(zip(self.dims, self.shape[:2], strict=True))
        for name, coord in dataset.coords.items():
            _check_coord(str(name), coord, lengths)
        return dataset.assign_coords(
            {name: (coord.dims, _as_text(str(name), coord)) for name, coord in _objects(dataset)}
        )


def _check_counts(spec: RunSpec) -> None:
    least = {"chains": 1, "draws": 0, "warmup_draws": 0}
    for name, low in least.items():
        if getattr(spec, name) < low:
            raise OptionError(f"{name} must be at least {low}, got {getattr(spec, name)}")
    if min(spec.shape) < 1:
        raise OptionError(f"shape must be three positive numbers (I, J, K), got {spec.shape}")
    if spec.dtype not in ("float32", "float64"):
        raise OptionError(f"dtype must be 'float32' or 'float64', got {spec.dtype!r}")
    if len(spec.cycles) != spec.draws:
        raise OptionError(
            f"draw_index must name the cycle of each of the {spec.draws} draws, "
            f"got {len(spec.cycles)} numbers"
        )
    if spec.observed is not None and spec.observed.shape != spec.shape[:2]:
        raise DataError(
            f"observed has shape {spec.observed.shape}, but the run is over {spec.shape[:2]}"
        )


def _check_particles(spec: RunSpec) -> None:
    others = {
        "chains": spec.chains != 1,
        "warmup_draws": spec.warmup_draws != 0,
        "keep": spec.keep != "draws",
        "has_coarse": spec.has_coarse,
        "monitor_rows": spec.n_monitor > 0,
    }
    if spec.weighted and any(others.values()):
        wrong = ", ".join(name for name, found in others.items() if found)
        raise OptionError(
            f"a run of particles is one chain with kept draws and nothing else; leave out {wrong}"
        )


def _check_monitor(spec: RunSpec) -> None:
    if (spec.monitor_rows is None) != (spec.monitor_columns is None):
        raise OptionError("monitored cells need both their row and their column positions")
    if spec.monitor_rows is None or spec.monitor_columns is None:
        return
    if len(spec.monitor_rows) != len(spec.monitor_columns):
        raise OptionError(
            f"monitored cells need one row and one column position each, got "
            f"{len(spec.monitor_rows)} rows and {len(spec.monitor_columns)} columns"
        )
    for name, index, size in (
        ("rows", spec.monitor_rows, spec.shape[0]),
        ("columns", spec.monitor_columns, spec.shape[1]),
    ):
        if len(index) and not 0 <= np.min(index) <= np.max(index) < size:
            raise OptionError(
                f"monitored {name} must lie in 0..{size - 1}, got {np.min(index)}..{np.max(index)}"
            )


def _values(value: Any) -> Any:
    """Labels as xarray takes them; pandas categories become what they stand for."""
    if isinstance(value, tuple) or isinstance(getattr(value, "dtype", None), np.dtype):
        return value
    return np.asarray(value)


def _check_coord(name: str, coord: xr.DataArray, lengths: Mapping[str, int]) -> None:
    if coord.ndim > 1 or not set(coord.dims) <= set(lengths):
        raise DataError(
            f"the coordinate {name!r} has dimensions {coord.dims}; "
            f"it must run along one of {tuple(lengths)}"
        )
    for dim in coord.dims:
        if coord.sizes[dim] != lengths[str(dim)]:
            raise DataError(
                f"the coordinate {name!r} has {coord.sizes[dim]} labels, "
                f"but {dim!r} has {lengths[str(dim)]} entries"
            )


def _objects(dataset: xr.Dataset) -> Iterator[tuple[Any, xr.DataArray]]:
    """Coordinates that numpy would hold as text or as objects."""
    return ((name, c) for name, c in dataset.coords.items() if c.dtype.kind not in "biufMm")


def _as_text(name: str, coord: xr.DataArray) -> NDArray[Any]:
    values = coord.values.ravel()
    if values.dtype.kind in "OUT" and all(isinstance(value, str) for value in values):
        return np.array([str(value) for value in values], dtype=str).reshape(coord.shape)
    raise DataError(
        f"the coordinate {name!r} has labels of dtype {coord.dtype}; "
        "labels must be text, numbers, booleans or dates: convert or drop it first"
    )


# Large enough that a file is worth its system calls, small enough that rewriting a
# chunk that is only partly new costs a few milliseconds.
CHUNK_BYTES = 8 * 2**20


class Layout(NamedTuple):
    """How one variable of a given run lies in memory or in a store."""

    variable: Variable
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]
    fill: float | int | bool

    @property
    def path(self) -> str:
        return f"{self.variable.group}/{self.variable.name}"


def layouts(spec: RunSpec) -> list[Layout]:
    """Dims, shape, dtype, chunks and fill value of every variable of a run."""
    return [_layout(variable, spec) for variable in spec.variables]


def planned_draws(group: str, draws: int) -> int:
    """Draws of a group when the run keeps ``draws``: the coarse chain takes half as many."""
    return draws // 2 if group == COARSE else draws


def _layout(variable: Variable, spec: RunSpec) -> Layout:
    rows, columns, components = spec.shape
    sizes = {
        ROW: rows,
        COLUMN: columns,
        "component": components,
        "chain": spec.chains,
        "draw": planned_draws(variable.group, spec.draws),
        "other_draw": spec.draws,
        "warmup_draw": spec.warmup_draws,
        "cell": spec.n_monitor,
    }
    dtype = _dtype(variable.kind, spec)
    shape = tuple(sizes[dim] for dim in variable.dims)
    chunks = _chunks(variable.dims, shape, dtype.itemsize)
    inner = spec.names(variable.group)
    names = {ROW: inner[spec.dims[0]], COLUMN: inner[spec.dims[1]]}
    dims = tuple(names.get(dim, dim) for dim in variable.dims)
    fill: float | int | bool = {"b": False, "i": 0, "u": 0}.get(dtype.kind, float("nan"))
    return Layout(variable, dims, shape, dtype, chunks, fill)


def _dtype(kind: Kind, spec: RunSpec) -> np.dtype[Any]:
    if kind == "data":
        return np.dtype(spec.dtype if spec.observed is None else spec.observed.dtype)
    return np.dtype({"factor": spec.dtype, "real": "f8", "count": "i8", "flag": "?"}[kind])


def _chunks(dims: tuple[str, ...], shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Chunks of at most ``CHUNK_BYTES``: one chain each, whole draws while they fit.

    Axes are filled in an order of their own: components first, then rows or
    columns, then draws, so that a chunk holds many small draws or a part of a
    large one.
    """
    order = sorted(range(len(dims)), key=lambda axis: (_FILL_ORDER.get(dims[axis], 1), -axis))
    budget = max(1, CHUNK_BYTES // itemsize)
    chunks = [1] * len(dims)
    for axis in order:
        if dims[axis] != "chain":
            # An axis still empty may grow when the run is extended.
            chunks[axis] = max(1, min(shape[axis] or 64, budget // prod(chunks)))
    return tuple(chunks)


_FILL_ORDER = {"component": 0, "draw": 2, "chain": 3}


def group_coords(group: str, spec: RunSpec) -> xr.Dataset:
    """Coordinates of one group, the user's own and the run's."""
    if group == "constant_data":
        return xr.Dataset()
    dims = {dim for variable in spec.variables if variable.group == group for dim in variable.dims}
    own: dict[str, Any] = {}
    if "chain" in dims:
        own["chain"] = np.arange(spec.chains)
    if "draw" in dims:
        # Draw t of the coarse chain ends where the fine chain ends its draw 2t + 1.
        own["draw"] = spec.cycles[1::2] if group == COARSE else spec.cycles
    if "other_draw" in dims:
        own["other_draw"] = spec.cycles
    if "component" in dims:
        own["component"] = (
            np.arange(spec.shape[2]) if spec.components is None else np.array(spec.components)
        )
    if "warmup_draw" in dims:
        own["warmup_draw"] = np.arange(spec.warmup_draws)
    index: dict[str, Any] = {
        n: None for dim, n in zip((ROW, COLUMN), spec.dims, strict=True) if dim in dims
    }
    if group == MONITOR:
        own["row_index"] = ("cell", np.asarray(spec.monitor_rows, dtype=np.int64))
        own["column_index"] = ("cell", np.asarray(spec.monitor_columns, dtype=np.int64))
        index = dict(zip(spec.dims, (own["row_index"], own["column_index"]), strict=True))
    users = _user_coords(group, spec, index) if index else {}
    return xr.Dataset(coords=users).assign_coords(own)


def _user_coords(group: str, spec: RunSpec, index: Mapping[str, Any]) -> dict[str, Any]:
    """The user's labels along the dimensions in ``index``, under their names in a group.

    ``index`` says which of them are taken, and along which dimension they then are; None: all.
    """
    inner = spec.names(group)
    found: dict[str, Any] = {}
    for name, coord in spec.labels.coords.items():
        dim = str(coord.dims[0]) if coord.dims else None
        if dim is None:
            found[inner[str(name)]] = ((), coord.values)
        elif dim in index:
            along, at = index[dim] or (inner[dim], slice(None))
            found[inner[str(name)]] = (along, coord.values[at])
    return found
