"""Traces: the result of a run as one xarray tree, from memory or from a run store."""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
import xarray as xr
import zarr
from numpy.typing import ArrayLike, NDArray

from daskfactor.errors import OptionError, StoreError, StoreFormatError
from daskfactor.results.committed import trimmed
from daskfactor.results.layout import Layout, group_coords, layouts
from daskfactor.results.schema import LIBRARY, factor_dims
from daskfactor.results.skeleton import CHECKPOINT, CONSTANTS, check_attrs, plain, read_root
from daskfactor.results.slots import Counts, counts_of
from daskfactor.results.spec import RunSpec
from daskfactor.results.weights import draw_weights, relative

Array = NDArray[Any]
Trace = xr.DataTree | str | PathLike[str]

_READ_BYTES: Final = 64 * 2**20
_FACTORS: Final = frozenset({"posterior", "posterior_coarse"})


def build_tree(
    spec: RunSpec,
    arrays: Mapping[str, Mapping[str, ArrayLike]],
    group_attrs: Mapping[str, Mapping[str, Any]] | None = None,
) -> xr.DataTree:
    """The tree of a run that was kept in memory; the same as a store of that run would give.

    Parameters
    ----------
    spec
        What the run holds.
    arrays
        Arrays by group and variable, with a leading chain axis. Column factors
        come as the engine holds them, rows first: ``H`` as (chain, draw, J, K),
        ``H_mean`` and ``H_var`` as (chain, J, K); they are transposed without a
        copy. The draw axis may be shorter than planned. Hyperparameters and
        observed data are taken from ``spec``.
    group_attrs
        Attributes by group, JSON-able.

    Raises
    ------
    OptionError
        If a variable is unknown or does not have the planned shape.
    """
    plan = {(layout.variable.group, layout.variable.name): layout for layout in layouts(spec)}
    for group, members in arrays.items():
        for name in members:
            if (group, name) not in plan:
                raise OptionError(f"this run has no variable {name!r} in group {group!r}")
    groups: dict[str, xr.Dataset] = {}
    for group in dict.fromkeys(group for group, _ in plan):
        found = _group_arrays(group, spec, plan, arrays.get(group, {}))
        if found:
            groups[group] = _dataset(group, spec, plan, found).assign_attrs(
                plain((group_attrs or {}).get(group, {}))
            )
    tree = xr.DataTree.from_dict(dict(groups))
    tree.attrs = plain(spec.root_attrs)
    return tree


def _group_arrays(
    group: str,
    spec: RunSpec,
    plan: Mapping[tuple[str, str], Layout],
    given: Mapping[str, ArrayLike],
) -> dict[str, ArrayLike]:
    if group == "observed_data" and spec.observed is not None:
        return {"V": spec.observed}
    if group == "constant_data":
        known = [name for name in CONSTANTS if name in spec.attrs and (group, name) in plan]
        return {name: spec.attrs[name] for name in known} | dict(given)
    return dict(given)


def _dataset(
    group: str,
    spec: RunSpec,
    plan: Mapping[tuple[str, str], Layout],
    given: Mapping[str, ArrayLike],
) -> xr.Dataset:
    variables = {}
    length: dict[str, int] = {}
    for name, values in given.items():
        layout = plan[group, name]
        array = np.asarray(values)
        if name.startswith("H"):
            array = np.swapaxes(array, -1, -2)
        for axis, dim in enumerate(layout.dims):
            if dim in ("draw", "warmup_draw") and array.ndim == len(layout.dims):
                length[dim] = array.shape[axis]
        expected = tuple(
            min(length.get(dim, size), size)
            for dim, size in zip(layout.dims, layout.shape, strict=True)
        )
        if array.shape != expected:
            raise OptionError(
                f"{layout.path} must have shape {expected} for {layout.dims}, got {array.shape}"
            )
        variables[name] = (layout.dims, array, {"description": layout.variable.doc})
    coords = group_coords(group, spec)
    trimmed = coords.isel({dim: slice(n) for dim, n in length.items() if dim in coords.sizes})
    return trimmed.assign(variables)


def open_run(path: str | PathLike[str]) -> xr.DataTree:
    """Open the run at ``path`` lazily: the draws that its last checkpoint vouches for.

    Works while the run is still going on and after it was killed. With chains at
    different lengths the tree holds the largest full rectangle of draws. Of particles
    there are those that are finished; ``lp``, ``weight`` and the group ``stein`` are left
    out until all of them are.

    Parameters
    ----------
    path
        Local path of a run store, or a URL that fsspec knows.

    Returns
    -------
    DataTree
        Backed by dask: nothing but coordinates has been read.

    Raises
    ------
    StoreError
        If there is nothing at ``path``.
    StoreFormatError
        If what is there is not a run store, is damaged or of a newer version.
    """
    return committed_tree(path, None)


def committed_tree(path: str | PathLike[str], counts: Counts | None) -> xr.DataTree:
    """The tree at ``path`` cut to ``counts``, or to what its newest checkpoint vouches for."""
    if "://" not in str(path):
        if not Path(path).exists():
            raise StoreError(f"there is no run store at {path}; check the path")
        read_root(Path(path))
    try:
        if counts is None:
            marker = zarr.open_group(
                str(path), path=CHECKPOINT, mode="r", use_consolidated=False
            ).attrs.asdict()
        tree = xr.open_datatree(str(path), engine="zarr", chunks={}, consolidated=True)
    except (OSError, ValueError, KeyError) as error:
        raise StoreFormatError(
            f"{path} cannot be read as a run store of {LIBRARY} ({error}); "
            "check the path, or restore it from a copy"
        ) from error
    check_attrs(path, tree.attrs)
    if counts is None:
        counts = counts_of(marker, tree["sample_stats"].sizes["chain"])
    return trimmed(tree, counts)


def as_tree(trace: Any) -> xr.DataTree:
    """The tree of a trace given as such or as the path of a run store."""
    if isinstance(trace, xr.DataTree):
        return trace
    if isinstance(trace, str | PathLike):
        return open_run(trace)
    if isinstance(trace, xr.Dataset) and {"W", "H"} <= set(trace.data_vars):
        raise OptionError(
            "a trace has draws, and this is the point estimate of daskfactor.optimize, which has "
            "none: its prediction is point['W'] @ point['H']; for intervals and alignment pass "
            "the result of daskfactor.sample"
        )
    raise OptionError(
        "a trace is the result of daskfactor.sample or the path of its store, got "
        f"{'None' if trace is None else type(trace).__name__}"
    )


def require_draws(trace: Trace, purpose: str) -> xr.DataTree:
    """The tree of a trace that holds draws.

    Raises
    ------
    OptionError
        If the run kept no draws, or has none yet.
    """
    tree = as_tree(trace)
    if "posterior" not in tree.children:
        raise OptionError(
            f"this run kept moments only, but {purpose} needs its draws; run again with "
            "keep='draws', or name the cells you need with monitor= "
        )
    if tree["posterior"].sizes["draw"] == 0:
        raise OptionError(f"this run has no draws yet, but {purpose} needs some; resume it first")
    return tree


def expectation(
    trace: Trace,
    function: Callable[[Array, Array], ArrayLike],
    chain: int | None = None,
) -> NDArray[np.float64]:
    r"""Posterior expectation of any function of the factors.

    .. math:: \hat f = \frac1T \sum_t f(W^{(t)}, H^{(t)}), \qquad
        \hat f = \sum_m w_m f(W_m, H_m), \qquad
        \hat f = 2\,\hat f_{\rm fine} - \hat f_{\rm coarse}

    the second for particles, where those of weight 0 are not read; the third where the
    trace has ``posterior_coarse``: the Richardson-Romberg estimate, free of the leading
    bias of the step size.

    Parameters
    ----------
    trace
        Result of a run, or the path of its store; read a few draws at a time.
    function
        Called with W (I, K) and H (K, J); returns numbers of one shape.
    chain
        One chain (its label), or all of them.

    Raises
    ------
    OptionError
        If there are no draws, no such chain, or none of its draws has any weight.

    References
    ----------
    Şimşekli et al. 2017, equation 11; Masood and Doshi-Velez, section 4.
    """
    tree = require_draws(trace, "an expectation")
    fine = _mean(tree["posterior"].to_dataset(), function, chain, draw_weights(tree))
    if "posterior_coarse" not in tree.children or tree["posterior_coarse"].sizes["draw"] == 0:
        return fine
    return 2.0 * fine - _mean(tree["posterior_coarse"].to_dataset(), function, chain)


def _mean(
    group: xr.Dataset,
    function: Callable[[Array, Array], ArrayLike],
    chain: int | None,
    weights: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    mean, total = np.zeros(()), 0.0
    for (W, H), mass in each_weighted_draw(group, chain, weights):
        total += mass
        mean = mean + (np.asarray(function(W, H), dtype=np.float64) - mean) / (total / mass)
    if total == 0:
        raise OptionError(
            f"no draw of chain {chain!r} has any weight, so that it has no expectation; leave "
            "chain= out"
        )
    return mean


def each_weighted_draw(
    group: xr.Dataset, chain: Any, weights: NDArray[np.float64] | None
) -> Iterator[tuple[tuple[Array, Array], float]]:
    """Draws that have mass, in units of the largest; those without are not read.

    Parameters
    ----------
    group
        With the factors.
    chain
        One chain (its label), or None for all of them.
    weights
        (chain, draw), or None where all draws count alike.
    """
    if weights is None:
        yield from ((draw, 1.0) for draw in each_draw(group, chain))
        return
    masses = relative(weights)
    labels = group["chain"].values.tolist()
    for at in _chain_positions(group, chain):
        kept = np.flatnonzero(masses[at] > 0)
        draws = each_draw(group.isel(draw=kept), labels[at])
        yield from zip(draws, masses[at][kept].tolist(), strict=True)


def each_draw(group: xr.Dataset, chain: int | None) -> Iterator[tuple[Array, Array]]:
    """Every draw of the factors, read a block of draws at a time."""
    row, column = factor_dims(xr.DataTree.from_dict({"posterior": group}))
    W = group["W"].transpose("chain", "draw", row, "component")
    H = group["H"].transpose("chain", "draw", "component", column)
    size = (prod(W.shape[2:]) + prod(H.shape[2:])) * W.dtype.itemsize
    step = max(1, _READ_BYTES // size)
    for at in _chain_positions(group, chain):
        for start in range(0, W.sizes["draw"], step):
            part = (at, slice(start, start + step))
            yield from zip(W[part].values, H[part].values, strict=True)


def _chain_positions(group: xr.Dataset, chain: int | None) -> list[int]:
    labels = group["chain"].values.tolist()
    if chain is None:
        return list(range(len(labels)))
    if chain not in labels:
        raise OptionError(f"there is no chain {chain!r}; this trace has the chains {labels}")
    return [labels.index(chain)]
