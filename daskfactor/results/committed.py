"""What of a run store exists: the part of its planned size that a checkpoint vouches for."""

from typing import Any

import xarray as xr

from daskfactor.results.layout import planned_draws
from daskfactor.results.schema import STEIN, WEIGHTED
from daskfactor.results.slots import Counts


def trimmed(tree: xr.DataTree, counts: Counts) -> xr.DataTree:
    """The draws that exist in all of the chains that have most, and what belongs to them.

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
        lengths = {"draw": planned_draws(name, draws), "warmup_draw": warmup}
        dataset = node.to_dataset()
        if not weighted:
            if name == STEIN:
                continue
            if name == "sample_stats":
                dataset = dataset.drop_vars(WEIGHTED)
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
