"""Open the store of a run as a tree, cut to the draws of the last checkpoint."""

from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.errors import OptionError, StoreError, StoreFormatError
from daskfactor.runs.backends import FolderView, View, view_of
from daskfactor.runs.files import MARKER, SEAL, Counts, counts_of, read_marker
from daskfactor.runs.metadata import INDEX, LIBRARY, attributes_of, nodes_of, read_root
from daskfactor.runs.schema import (
    GROUP_ATTRS,
    MOMENTS,
    MONITOR,
    STEIN,
    WARMUP,
    planned_draws,
    tree_of,
)
from daskfactor.runs.stacks import indexed

if TYPE_CHECKING:
    from daskfactor.runs.zarr_stores import CheckedStore

ATTEMPTS = 5
"""Times that a run is opened again because a checkpoint was committed meanwhile."""


def open_run(path: str | PathLike[str], snapshot: str | None = None) -> xr.DataTree:
    """Open the run at ``path`` lazily, with the draws of its last checkpoint.

    The run may still be active, or may have been killed. If chains have different lengths, the
    tree has the largest full rectangle of draws. Particles are those that are finished; ``lp``,
    ``weight`` and the group ``stein`` are missing until all of them are.

    Parameters
    ----------
    path
        Local path of a run store, a URL that one was written to (``s3://``, ``gs://``, ``az://``,
        ``memory://``), or an fsspec URL of a copy of a local run. Credentials come from the
        environment.
    snapshot
        Id of an earlier checkpoint of a run at a URL, from
        ``icechunk.Repository.ancestry(branch="main")`` or from the error message for an unknown
        id; by default the newest. Older ones expire: the newest two are kept, and those of the
        last ten minutes while the run is active.

    Returns
    -------
    DataTree
        Backed by dask; only coordinates are read.

    Raises
    ------
    StoreError
        If there is no store at ``path``.
    StoreFormatError
        If it is not a run store, is damaged or has a newer version.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> from tempfile import mkdtemp
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> store = mkdtemp() + "/run.zarr"
    >>> run = {"tune": 10, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), draws=10, store=store, **run)
    >>> dfac.open_run(store)["posterior"].sizes["draw"]
    10
    """
    if not isinstance(path, str | PathLike):
        raise OptionError(
            f"open_run needs the path of a run store, got a {type(path).__name__}; a result in "
            "memory is already a trace"
        )
    view = view_of(path, snapshot)
    for _ in range(ATTEMPTS):
        # A commit meanwhile would give moments of a later checkpoint than draws.
        commit = _commit(view)
        tree = committed_tree(view, None)
        if _commit(view) == commit:
            break
    return tree


def _commit(view: View) -> dict[str, Any]:
    """Return the marker of a folder, which each commit replaces; other views are of one commit."""
    return attributes_of(view, MARKER) if isinstance(view, FolderView) else {}


def committed_tree(view: View, counts: Counts | None) -> xr.DataTree:
    """Open the tree of a run, cut to ``counts`` or to the draws of its newest checkpoint."""
    document = read_root(view)
    marker = _marker(view, document)
    if counts is None:
        counts = counts_of(marker, nodes_of(document)["sample_stats/lp"]["shape"][0])
    store: Any = checked_store(view, document, marker["attributes"].get("moments"))
    try:
        tree = xr.open_datatree(store, engine="zarr", chunks={}, consolidated=True)
    except StoreError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise StoreFormatError(
            f"{view.name} cannot be read as a run store of {LIBRARY} ({error}); "
            "check the path, or restore it from a copy"
        ) from error
    tree = indexed(trimmed(tree, counts))
    store.partial |= {
        name
        for name in (MOMENTS, MONITOR)
        if name in tree.children and bool((tree[name]["count"] == 0).any())
    }
    return tree


def _marker(view: View, document: dict[str, Any]) -> dict[str, Any]:
    """Read the marker of the newest checkpoint of a run store."""
    try:
        return read_marker(view)
    except StoreFormatError as error:
        if SEAL in document[INDEX]:
            raise
        raise StoreFormatError(
            f"{view.name} was written by xarray (trace.to_zarr), not by {LIBRARY}; open it with "
            f"xarray.open_datatree({view.name!r}, engine='zarr') and pass the result as the trace"
        ) from error


def checked_store(view: View, document: dict[str, Any], layer: str | None = None) -> "CheckedStore":
    """Open a run store for reading, with checks of checksums; ``layer`` has the newest moments."""
    from daskfactor.runs.zarr_stores import CheckedStore

    checked = [
        name
        for name, node in nodes_of(document).items()
        if any(codec["name"] == "crc32c" for codec in node.get("codecs", ()))
    ]
    run = document["attributes"].get("trace_id")
    return CheckedStore(view.chunks(), view.name, checked, run, list(filter(None, [layer])))


def trimmed(tree: xr.DataTree, counts: Counts) -> xr.DataTree:
    """Cut a tree to the largest full rectangle of draws, with their statistics.

    Parameters
    ----------
    tree
        Run store at its full planned size.
    counts
        Draws of its checkpoint.
    """
    draws, chains = _rectangle(counts.draws)
    # Particles have weights once their group has attributes, which are written last.
    stein = tree.children.get(STEIN)
    weighed = stein is not None and set(stein.attrs) - set(GROUP_ATTRS)
    unweighted = stein is not None and not (weighed and draws == stein.sizes["draw"])
    warmup = min((counts.warmup_draws[chain] for chain in chains), default=0)
    groups: dict[str, Any] = {}
    for name, node in tree.children.items():
        cut: dict[str, Any] = {"draw": slice(planned_draws(name, draws))}
        if name == WARMUP:  # in other groups it may be a dimension of the user
            cut = {"warmup_draw": slice(warmup)}
        if len(chains) < len(counts.draws):
            cut["chain"] = chains
        dataset = node.to_dataset()
        if unweighted and name == STEIN:
            continue
        if unweighted and name == "sample_stats":
            dataset = dataset.drop_vars(["lp", "weight"], errors="ignore")
        dataset = dataset.isel(cut, missing_dims="ignore")
        # A count of 0: there are none yet, or an earlier version was killed while it wrote them.
        if "count" in dataset:
            dataset["count"] = dataset["count"].compute(scheduler="synchronous")
            if not bool((dataset["count"] > 0).any()):
                continue
        groups[name] = dataset
    return tree_of(groups, tree.attrs)


def _rectangle(draws: tuple[int, ...]) -> tuple[int, list[int]]:
    """Return number of draws, and chains, of the largest full rectangle of draws."""
    ordered = sorted(draws, reverse=True)
    height = max(range(len(ordered)), key=lambda at: ((at + 1) * ordered[at], at))
    least = ordered[height]
    return least, [chain for chain, count in enumerate(draws) if count >= least]


def check_weights(weights: NDArray[np.floating[Any]]) -> None:
    """Refuse weights that are not probability masses.

    Raises
    ------
    StoreFormatError
        If one is negative or not finite, or if they do not add up to 1 within 1e-6.
    """
    complete = weights.size > 0 and bool(np.isfinite(weights).all())
    if not (complete and weights.min() >= 0 and abs(weights.sum() - 1.0) <= 1e-6):
        least = weights.min() if weights.size else np.nan
        raise StoreFormatError(
            f"weights of particles must be at least 0 and add up to 1, got a smallest of {least:g} "
            f"and a sum of {weights.sum():g}; divide them by their sum"
        )
