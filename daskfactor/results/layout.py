"""How the variables of a given run lie in memory and on disk: dims, shapes, chunks, labels."""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from daskfactor.results.schema import COARSE, COLUMN, MONITOR, ROW, Kind, Variable
from daskfactor.results.spec import RunSpec

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
