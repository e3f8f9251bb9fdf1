"""Results of a tensor, cell by cell: its first unfolding at those fibres that are asked for.

A tensor of means is a matrix W H of its first axis against all others, with
H = F_1 * ... * F_(N-1) row by row (the Khatri-Rao product). Results keep the factors of H; what
is predicted needs H only where cells are asked for, and is then that of a matrix.

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
from daskfactor.data.coupled import FACTOR
from daskfactor.errors import OptionError
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.results.schema import MONITOR, WARMUP, factor_dims, tree_of
from daskfactor.results.trace import Axes, Run

MOST_CELLS = 2**24
MOST_COMPARED = 256
FIBRE = "fibre"
"""Dimension of the fibres that cells are on."""
PLACES = "places"
"""Coordinate of fibres that are compared: their places along the further axes."""
CHUNK_BYTES = 2**26


def axis_spans(run: Run, group: xr.Dataset) -> list[slice]:
    """Return the columns of H of each further axis of a tensor; of matrices all in one."""
    model, names = run.model, group.coords.get(FACTOR.format("column"))
    if names is None or not getattr(model, "tensor", False):
        return [slice(None)]
    edges = np.flatnonzero(names.values[1:] != names.values[:-1]) + 1
    return list(itertools.starmap(slice, itertools.pairwise([0, *edges.tolist(), names.size])))


class Chosen(NamedTuple):
    """Cells of a tensor as those of a matrix of fibres.

    Attributes
    ----------
    run
        With H (chain, draw, component, fibre), lazily.
    rows, columns
        Positions along both, with the cells' places along each axis as coordinates.
    whole
        The axes, if all cells are meant.
    """

    run: Run
    rows: xr.DataArray
    columns: xr.DataArray
    whole: Axes | None

    def in_shape(self, found: xr.Dataset) -> xr.Dataset:
        """Give a result along cells the shape of the tensor, if all of these are meant."""
        if self.whole is None:
            return found
        names, sizes, _, labels = self.whole
        values = {n: (names, own.data.reshape(sizes)) for n, own in found.data_vars.items()}
        return xr.Dataset(values, coords=labels, attrs=found.attrs)


def chosen(run: Run, axes: Axes, cells: Any) -> Chosen:
    """Find cells of a tensor: a tuple of places along each axis, or a mask; None: all.

    Raises
    ------
    OptionError
        If they are none of its cells, or too many to name all.
    """
    whole = axes if cells is None else None
    if whole is not None:
        if math.prod(axes.sizes) > MOST_CELLS:
            raise OptionError(
                f"the tensor has {math.prod(axes.sizes)} cells, too many to predict all; name "
                f"some, one array of places for each of {', '.join(axes.names)}"
            )
        cells = tuple(own.ravel() for own in np.indices(axes.sizes))
    found = cells_of_tensor(cells, axes.sizes)
    if found is None:
        raise OptionError("no cells were named; pass one array of places for each axis")
    rows, columns = found
    fibres, column_at = np.unique(columns, return_inverse=True)
    at = (rows, *axes.fibres(columns))
    coords = {name: ("cell", own) for name, own in zip(axes.names, at, strict=True)}
    groups = {
        name: _unfolded(group, axes, fibres) if "H" in group else group
        for name, group in run.groups.items()
    }
    return Chosen(
        Run(tree_of(groups, run.attrs)),
        xr.DataArray(rows, coords, ("cell",)),
        xr.DataArray(column_at.reshape(-1), dims="cell"),
        whole,
    )


def _unfolded(group: xr.Dataset, axes: Axes, fibres: NDArray[np.int64]) -> xr.Dataset:
    """Draws of W, and of H at some fibres."""
    row, column = factor_dims(group)
    whole = axes.sizes[0], axes.starts[-1] + axes.sizes[-1]
    if (group.sizes[row], group.sizes[column]) != whole:
        raise OptionError(
            f"the factors of this trace have {group.sizes[row]} and {group.sizes[column]} rows, "
            f"and the tensor's {whole[0]} and {whole[1]}; pass the whole trace, and name cells by "
            "their places along each axis"
        )
    H = group["H"].transpose("chain", "draw", "component", column).data
    if isinstance(H, np.ndarray):
        H = da.from_array(H, chunks=-1, name=False)  # type: ignore[no-untyped-call]
    product: Any = 1
    for start, own in zip(axes.starts[1:], axes.fibres(fibres), strict=True):
        product = product * H[..., start + own]
    width = max(1, CHUNK_BYTES // (math.prod(H.shape[:3]) * H.dtype.itemsize))
    dims = ("chain", "draw", "component", FIBRE)
    coords = {n: c for n, c in group.coords.items() if column not in c.dims}
    W = group["W"].transpose("chain", "draw", row, "component")
    found = xr.Dataset({"W": W, "H": (dims, product.rechunk({3: width}))}, attrs=group.attrs)
    return found.assign_coords(coords)


def level_scales(group: xr.Dataset, axes: Axes) -> list[xr.DataArray]:
    """Find what gives all factors of a component the same sum over their rows, draw by draw.

    Returns
    -------
    list of DataArray
        For each axis, (chain, draw, component): what its factor is to be multiplied with, so
        that no mean changes. What is left to tell draws apart by are the order of components
        and the factors themselves.
    """
    sums = [part.sum(dim, dtype=np.float64) for part, dim in axis_factors(group, axes)]
    even: Any = 1.0
    for own in sums:
        even = even * own ** (1.0 / len(sums))
    usable = even > 0
    return [(even / own.where(usable, 1.0)).where(usable, 1.0) for own in sums]


def rescaled(group: xr.Dataset, axes: Axes, scales: Sequence[xr.DataArray]) -> xr.Dataset:
    """Multiply the factor of each axis with a number for each draw and component."""
    W, *parts = (
        part * by.astype(part.dtype)
        for (part, _), by in zip(axis_factors(group, axes), scales, strict=True)
    )
    H = xr.concat(parts, factor_dims(group)[1]).transpose(*group["H"].dims)
    return group.assign(W=W.transpose(*group["W"].dims), H=H)


def axis_factors(group: xr.Dataset, axes: Axes | None) -> list[tuple[xr.DataArray, str]]:
    """Return the factor of each axis, W and H of a matrix, and the dimension of its rows."""
    row, column = factor_dims(group)
    if axes is None:
        return [(group["W"], row), (group["H"], column)]
    spans = zip(axes.starts[1:], axes.sizes[1:], strict=True)
    others = [group["H"].isel({column: slice(start, start + size)}) for start, size in spans]
    return [(group["W"], row), *((own, column) for own in others)]


def compared(run: Run, axes: Axes) -> Run:
    """Give the run as that of a matrix of some fibres, for what is compared between draws."""
    many = math.prod(axes.sizes[1:])
    fibres = np.arange(many)
    if many > MOST_COMPARED:
        drawn = np.random.default_rng(0).integers(0, many, MOST_COMPARED)
        fibres = np.unique(drawn)
    groups = {name: group for name, group in run.groups.items() if name != MONITOR}
    named = (FIBRE, [",".join(map(str, own)) for own in zip(*axes.fibres(fibres), strict=True)])
    groups["posterior"] = _unfolded(run.posterior, axes, fibres).assign_coords({PLACES: named})
    return Run(tree_of(groups, run.attrs | {"data": json.dumps(without_places(run.data))}))


def without_places(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of data without where several factors lie behind one another."""
    gone = ("placed", "row_offsets", "column_offsets")
    return {name: value for name, value in data.items() if name not in gone}


def unfolding(run: Run, axes: Axes, name: str) -> xr.DataTree:
    """Give the run as that of a matrix, the unfolding along an axis: see `daskfactor.view`.

    Raises
    ------
    OptionError
        If there is no such axis.
    """
    if name not in axes.names:
        raise OptionError(f"the tensor has no axis {name!r}; it has {', '.join(axes.names)}")
    n = axes.names.index(name)
    others = tuple(m for m in range(len(axes.names)) if m != n)
    if "posterior" not in run:
        raise OptionError(
            "an unfolding of a tensor is of draws, and this run kept moments only; run again with "
            "keep='draws', or take monitored(trace)"
        )
    groups = {"posterior": _along(run.posterior, axes, n, others)}
    groups |= {own: run.group(own) for own in ("sample_stats", WARMUP) if own in run}
    attrs, model = run.attrs, run.document("model")
    known = TweedieNMF(
        model["n_components"], beta=model["beta"], dispersion=float(attrs["dispersion"]),
        rate_w=float(attrs["rate_h" if n else "rate_w"]), rate_h=float(attrs["rate_h"]),
        shape_w=float(attrs["shape_h" if n else "shape_w"]), shape_h=float(attrs["shape_h"]),
    ).to_dict()  # fmt: skip
    data = {
        "shape": [axes.sizes[n], math.prod(axes.sizes[m] for m in others)],
        "fingerprint": f"{run.data['fingerprint']} along {name}",
    }
    return tree_of(groups, attrs_of_part(run, name, known, data))


def attrs_of_part(
    run: Run, name: str, model: dict[str, Any], data: dict[str, Any]
) -> dict[str, Any]:
    """Return the attributes of a part of a run, as those of a run of one matrix alone.

    Parameters
    ----------
    run
        The whole.
    name
        Of the part.
    model, data
        Its model, and what is known of its data other than of the whole.
    """
    documents = {
        "model": model,
        "data": without_places(run.data) | data,
        "run": run.document("run") | {"model": model},
    }
    texts = {key: json.dumps(value) for key, value in documents.items()}
    return run.attrs | texts | {"trace_id": f"{run.attrs['trace_id']}-{name}"}


def _along(group: xr.Dataset, axes: Axes, n: int, others: tuple[int, ...]) -> xr.Dataset:
    """The factor of an axis as W, and all others' rows multiplied, in row-major order, as H."""
    row, column = factor_dims(group)
    W = group["W"].transpose("chain", "draw", "component", row).data
    H = group["H"].transpose("chain", "draw", "component", column).data
    if isinstance(H, np.ndarray):
        W, H = (da.from_array(own, chunks=-1, name=False) for own in (W, H))  # type: ignore[no-untyped-call]

    def factor(m: int) -> Any:
        return W if m == 0 else H[..., axes.starts[m] : axes.starts[m] + axes.sizes[m]]

    product: Any = factor(others[0])
    for m in others[1:]:
        more = factor(m)
        product = product[..., :, None] * more[..., None, :]
        product = product.reshape(*product.shape[:3], -1)
    first = np.moveaxis(factor(n), 2, 3)
    name, fibre = axes.names[n], "_".join(axes.names[m] for m in others)
    found = xr.Dataset(
        {
            "W": (("chain", "draw", name, "component"), first),
            "H": (("chain", "draw", "component", fibre), product),
        },
        attrs=group.attrs,
    )
    kept = {own: c for own, c in group.coords.items() if not {row, column} & set(c.dims)}
    return found.assign_coords(kept | ({name: axes.labels[name]} if name in axes.labels else {}))
