"""Results of a tensor at selected cells: its first unfolding at their fibres.

The means of a tensor are a matrix WH of its first axis against all others, with the Khatri-Rao
product H = F_1 * ... * F_(N-1). Results store the factors of H; predictions compute H only at
requested fibres, and then treat it as a matrix.

Source: Kolda and Bader 2009, section 2.6 and equation 3.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import cells_of_tensor
from daskfactor.data.labels import FACTOR
from daskfactor.errors import OptionError
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.runs.schema import MONITOR, WARMUP, factor_dims, tree_of
from daskfactor.runs.trace import Axes, Run

MAX_CELLS = 2**24
MAX_COMPARED = 256
FIBRE = "fibre"
"""Dimension of the fibres of the cells."""
PLACES = "places"
"""Coordinate of compared fibres: their positions along the further axes."""
CHUNK_BYTES = 2**26


def axis_spans(run: Run, group: xr.Dataset) -> list[slice]:
    """Return the columns of H for each further axis of a tensor; one slice for matrices."""
    model, names = run.model, group.coords.get(FACTOR.format("column"))
    if names is None or not getattr(model, "tensor", False):
        return [slice(None)]
    edges = np.flatnonzero(names.values[1:] != names.values[:-1]) + 1
    return list(itertools.starmap(slice, itertools.pairwise([0, *edges.tolist(), names.size])))


class Chosen(NamedTuple):
    """Cells of a tensor as cells of a matrix of fibres.

    Attributes
    ----------
    run
        Run with lazy H (chain, draw, component, fibre).
    rows, columns
        Positions along both, with positions along each axis as coordinates.
    grid_axes
        Axes, if all cells are selected.
    """

    run: Run
    rows: xr.DataArray
    columns: xr.DataArray
    grid_axes: Axes | None

    def in_shape(self, result: xr.Dataset) -> xr.Dataset:
        """Reshape a result over cells to the tensor, if all cells are selected."""
        if self.grid_axes is None:
            return result
        names, sizes, _, labels = self.grid_axes
        values = {
            name: (names, one.data.reshape(sizes), one.attrs)
            for name, one in result.data_vars.items()
        }
        return xr.Dataset(values, coords=labels, attrs=result.attrs)


def chosen(run: Run, axes: Axes, cells: Any) -> Chosen:
    """Return selected cells of a tensor: a tuple of positions, or a mask; None for all.

    Raises
    ------
    OptionError
        If cells do not exist, or there are too many.
    """
    grid_axes = axes if cells is None else None
    if grid_axes is not None:
        if math.prod(axes.sizes) > MAX_CELLS:
            raise OptionError(
                f"the tensor has {math.prod(axes.sizes)} cells, too many to predict all; select "
                f"some with an array of positions for each of {', '.join(axes.names)}"
            )
        cells = tuple(axis_places.ravel() for axis_places in np.indices(axes.sizes))
    positions = cells_of_tensor(cells, axes.sizes)
    if positions is None:
        raise OptionError("no cells were selected; pass an array of positions for each axis")
    rows, columns = positions
    fibres, column_at = np.unique(columns, return_inverse=True)
    groups = {
        name: _unfolded(group, axes, fibres) if "H" in group else group
        for name, group in run.groups.items()
    }
    return Chosen(
        Run(tree_of(groups, run.attrs)),
        xr.DataArray(rows, axes.coords(rows, columns), ("cell",)),
        xr.DataArray(column_at.reshape(-1), dims="cell"),
        grid_axes,
    )


def _unfolded(
    group: xr.Dataset, axes: Axes, fibres: NDArray[np.int64], axis: int = 0
) -> xr.Dataset:
    """Return draws of the factor of an axis as W, and of H at fibres of the other axes."""
    row, column = factor_dims(group)
    shape = axes.sizes[0], axes.starts[-1] + axes.sizes[-1]
    if (group.sizes[row], group.sizes[column]) != shape:
        raise OptionError(
            f"the factors of this trace have {group.sizes[row]} and {group.sizes[column]} rows, "
            f"but those of the tensor {shape[0]} and {shape[1]}; pass the full trace, and select "
            "cells by positions along each axis"
        )
    factors = axis_factors(group, axes)
    W, dim = factors.pop(axis)
    others = [size for n, size in enumerate(axes.sizes) if n != axis]
    product: Any = 1
    for (factor, along), at in zip(factors, np.unravel_index(fibres, others), strict=True):
        draws = factor.transpose("chain", "draw", "component", along).data
        if isinstance(draws, np.ndarray):
            draws = da.from_array(draws, chunks=-1, name=False)  # type: ignore[no-untyped-call]
        product = product * draws[..., at]
    width = max(1, CHUNK_BYTES // (math.prod(product.shape[:3]) * product.dtype.itemsize))
    dims = ("chain", "draw", "component", FIBRE)
    H = (dims, product.rechunk({3: width}))
    coords = {n: c for n, c in group.coords.items() if column not in c.dims}
    W = W.drop_vars([n for n, c in W.coords.items() if column in c.dims])
    unfolded = xr.Dataset(
        {"W": W.transpose("chain", "draw", dim, "component"), "H": H}, attrs=group.attrs
    )
    return unfolded.assign_coords(coords)


def level_scales(group: xr.Dataset, axes: Axes) -> list[xr.DataArray]:
    """Return scales that give all factors of a component the same sum over rows, by draw.

    Returns
    -------
    list of DataArray
        Multiplier of the factor of each axis, (chain, draw, component). Means do not change, and
        only the order of components remains arbitrary.
    """
    sums = [part.sum(dim, dtype=np.float64) for part, dim in axis_factors(group, axes)]
    even: Any = 1.0
    for total in sums:
        even = even * total ** (1.0 / len(sums))
    usable = even > 0
    return [(even / total.where(usable, 1.0)).where(usable, 1.0) for total in sums]


def rescaled(group: xr.Dataset, axes: Axes, scales: Sequence[xr.DataArray]) -> xr.Dataset:
    """Multiply the factor of each axis with scales (chain, draw, component)."""
    W, *parts = (
        part * by.astype(part.dtype)
        for (part, _), by in zip(axis_factors(group, axes), scales, strict=True)
    )
    H = xr.concat(parts, factor_dims(group)[1]).transpose(*group["H"].dims)
    return group.assign(W=W.transpose(*group["W"].dims), H=H)


def axis_factors(group: xr.Dataset, axes: Axes | None) -> list[tuple[xr.DataArray, str]]:
    """Return the factor of each axis (W and H for a matrix), and the dimension of its rows."""
    row, column = factor_dims(group)
    if axes is None:
        return [(group["W"], row), (group["H"], column)]
    spans = zip(axes.starts[1:], axes.sizes[1:], strict=True)
    others = [group["H"].isel({column: slice(start, start + size)}) for start, size in spans]
    return [(group["W"], row), *((factor, column) for factor in others)]


def compared(run: Run, axes: Axes) -> Run:
    """Return the run as that of a matrix of some fibres, for comparisons between draws."""
    many = math.prod(axes.sizes[1:])
    fibres = np.arange(many)
    if many > MAX_COMPARED:
        drawn = np.random.default_rng(0).integers(0, many, MAX_COMPARED)
        fibres = np.unique(drawn)
    groups = {name: group for name, group in run.groups.items() if name != MONITOR}
    named = (FIBRE, [",".join(map(str, place)) for place in zip(*axes.fibres(fibres), strict=True)])
    groups["posterior"] = _unfolded(run.posterior, axes, fibres).assign_coords({PLACES: named})
    return Run(tree_of(groups, run.attrs | {"data": json.dumps(without_places(run.data))}))


def without_places(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return information on data without positions of concatenated factors."""
    gone = ("placed", "row_offsets", "column_offsets")
    return {name: value for name, value in data.items() if name not in gone}


def unfolding(run: Run, axes: Axes, name: str) -> xr.DataTree:
    """Return the run of the unfolding along an axis, as that of a matrix; see `daskfactor.view`.

    Raises
    ------
    OptionError
        If there is no such axis.
    """
    if name not in axes.names:
        raise OptionError(f"the tensor has no axis {name!r}; it has {', '.join(axes.names)}")
    n = axes.names.index(name)
    others = [m for m in range(len(axes.names)) if m != n]
    fibres = math.prod(axes.sizes[m] for m in others)
    if "posterior" not in run:
        raise OptionError(
            "the unfolding of a tensor needs draws, but the run stored only moments; run again "
            "with keep='draws', or use monitored(trace)"
        )
    group = _unfolded(run.posterior, axes, np.arange(fibres), n)
    row, _ = run.dims
    group = group.drop_vars([key for key, coord in group.coords.items() if row in coord.dims])
    group = group.rename({group["W"].dims[2]: name, FIBRE: "_".join(axes.names[m] for m in others)})
    if name in axes.labels:
        group = group.assign_coords({name: axes.labels[name]})
    groups = {"posterior": group}
    groups |= {group: run.group(group) for group in ("sample_stats", WARMUP) if group in run}
    attrs, model = run.attrs, run.document("model")
    model = TweedieNMF(
        model["n_components"], beta=model["beta"], dispersion=float(attrs["dispersion"]),
        rate_w=float(attrs["rate_h" if n else "rate_w"]), rate_h=float(attrs["rate_h"]),
        shape_w=float(attrs["shape_h" if n else "shape_w"]), shape_h=float(attrs["shape_h"]),
    ).to_dict()  # fmt: skip
    data = {
        "shape": [axes.sizes[n], fibres],
        "fingerprint": f"{run.data['fingerprint']} along {name}",
    }
    return tree_of(groups, attrs_of_part(run, name, model, data))


def attrs_of_part(
    run: Run, name: str, model: dict[str, Any], data: dict[str, Any]
) -> dict[str, Any]:
    """Return the attributes of a part of a run, as those of a run of one matrix.

    Parameters
    ----------
    run
        Run of all parts.
    name
        Name of the part.
    model, data
        Model of the part, and information on its data that differs from the run.
    """
    documents = {
        "model": model,
        "data": without_places(run.data) | data,
        "run": run.document("run") | {"model": model},
    }
    texts = {key: json.dumps(value) for key, value in documents.items()}
    return run.attrs | texts | {"trace_id": f"{run.attrs['trace_id']}-{name}"}
