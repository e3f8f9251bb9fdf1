"""Traces: the result of a run as one xarray tree, from memory or from a run store."""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray
from zarr.storage import FsspecStore, LocalStore

from daskfactor.errors import OptionError, StoreFormatError
from daskfactor.results.checkpoint import Counts, counts_of, read_marker
from daskfactor.results.files import CheckedStore
from daskfactor.results.schema import LIBRARY, MOMENTS, MONITOR, STEIN, WARMUP, factor_dims
from daskfactor.results.skeleton import nodes_of, read_root
from daskfactor.results.spec import planned_draws
from daskfactor.results.weights import draw_weights, relative

Array = NDArray[Any]
Trace = xr.DataTree | str | PathLike[str]

_READ_BYTES: Final = 64 * 2**20
_FACTORS: Final = frozenset({"posterior", "posterior_coarse"})


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
    """Open the tree at ``path``, cut to ``counts`` or to what its newest checkpoint vouches for."""
    document = read_root(path)
    if counts is None:
        chains = nodes_of(document)["sample_stats/lp"]["shape"][0]
        counts = counts_of(read_marker(path), chains)
    store: Any = checked_store(path, document)
    try:
        tree = xr.open_datatree(store, engine="zarr", chunks={}, consolidated=True)
    except StoreFormatError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise StoreFormatError(
            f"{path} cannot be read as a run store of {LIBRARY} ({error}); "
            "check the path, or restore it from a copy"
        ) from error
    tree = trimmed(tree, counts)
    store.partial |= {
        name
        for name in (MOMENTS, MONITOR)
        if name in tree.children and bool((tree[name]["count"] == 0).any())
    }
    return tree


def checked_store(path: str | PathLike[str], document: Mapping[str, Any]) -> CheckedStore:
    """Open the chunks of a run store to read them, each as it was written."""
    if "://" in str(path):
        store: Any = FsspecStore.from_url(str(path), read_only=True)
    else:
        store = LocalStore(Path(path), read_only=True)
    checked = [
        name
        for name, node in nodes_of(dict(document)).items()
        if any(codec["name"] == "crc32c" for codec in node.get("codecs", ()))
    ]
    return CheckedStore(store, str(path), checked)


def trimmed(tree: xr.DataTree, counts: Counts) -> xr.DataTree:
    """Cut a tree to the draws that all of the chains have that have most, and what belongs to them.

    Parameters
    ----------
    tree
        A run store at its full planned size.
    counts
        Draws that its checkpoint vouches for.
    """
    draws, chains = _rectangle(counts.draws)
    weighted = _weighted(tree, draws)
    warmup = min((counts.warmup_draws[chain] for chain in chains), default=0)
    groups: dict[str, xr.Dataset] = {}
    for name, node in tree.children.items():
        lengths = {"draw": planned_draws(name, draws)}
        if name == WARMUP:  # elsewhere it may be the user's own dimension
            lengths = {"warmup_draw": warmup}
        dataset = node.to_dataset()
        if not weighted:
            if name == STEIN:
                continue
            if name == "sample_stats":
                dataset = dataset.drop_vars([name for name in ("lp", "weight") if name in dataset])
        cut: dict[Any, Any] = {dim: slice(n) for dim, n in lengths.items() if dim in dataset.sizes}
        if "chain" in dataset.sizes and len(chains) < dataset.sizes["chain"]:
            cut["chain"] = chains
        dataset = dataset.isel(cut)
        # Moments are rewritten in place; a count of 0 says that this was cut short.
        if "count" in dataset:
            dataset["count"] = dataset["count"].compute(scheduler="synchronous")
            if not bool((dataset["count"] > 0).any()):
                continue
        groups[name] = dataset
    cut_down = xr.DataTree.from_dict(dict(groups))
    cut_down.attrs = dict(tree.attrs)
    return cut_down


def _weighted(tree: xr.DataTree, draws: int) -> bool:
    """False for particles that have no weights yet: attributes of their group come last."""
    if STEIN not in tree.children:
        return True
    return bool(tree[STEIN].attrs) and draws == tree[STEIN].sizes["draw"]


def _rectangle(draws: tuple[int, ...]) -> tuple[int, list[int]]:
    """Draws and chains of the largest block of draws that every chain in it has."""
    ordered = sorted(draws, reverse=True)
    height = max(range(len(ordered)), key=lambda at: ((at + 1) * ordered[at], at))
    least = ordered[height]
    return least, [chain for chain, count in enumerate(draws) if count >= least]


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


FLOOR: Final = 0.1
"""Least share of the fine chain's value that an extrapolated positive number keeps."""


def extrapolated_moments(
    fine: tuple[Any, Any], coarse: tuple[Any, Any], nonnegative: bool
) -> tuple[Any, Any]:
    """Mean and variance free of the bias of first order in ε: 2 fine - coarse, each.

    A variance is no expectation of a function, but its bias has an expansion in
    ε all the same. Noise can make the combination negative where the truth is
    not; both are kept at a tenth of the fine chain's value or more.

    Parameters
    ----------
    fine, coarse
        Mean and variance from each chain; NumPy or dask arrays.
    nonnegative
        Whether the mean cannot be negative.

    Notes
    -----
    Şimşekli et al. 2017, equation 11.
    """
    mean, variance = 2.0 * fine[0] - coarse[0], 2.0 * fine[1] - coarse[1]
    if nonnegative:
        mean = np.maximum(mean, FLOOR * fine[0])
    return mean, np.maximum(variance, FLOOR * fine[1])
