"""Finish a run: summarize its draws once, and cache the summary in its store."""

from typing import Any, Final

import dask
import numpy as np
import xarray as xr

from daskfactor.models.settings import EFFECTIVE
from daskfactor.results.describe import facts_of
from daskfactor.results.summary import Summary, cached_summary, compute_summary, of_particles
from daskfactor.results.summary_cache import CachedSummary, cache_attr, cached_in
from daskfactor.runs.run_writer import Sink
from daskfactor.runs.schema import MOMENTS
from daskfactor.runs.trace import Run

MAX_SUMMARIZED_BYTES: Final = 2**30
"""Largest size of draws in bytes that a run summarizes at its end (about ten seconds)."""
MAX_LOADED_BYTES: Final = 2**24
"""Largest size of draws in bytes that are loaded before a summary, which reads them repeatedly."""


def close_run(sink: Sink, attrs: dict[str, Any]) -> None:
    """Write the last attributes of a run, and the summary if it has a store; then close it."""
    if sink.checkpoints is not None:
        tree = sink.tree()
        tree.attrs |= attrs
        attrs = attrs | _summary_attr(tree)
    sink.finish(attrs)


def _summary_attr(tree: xr.DataTree) -> dict[str, str]:
    """Return the attribute with the summary; empty if the store has it."""
    if cached_in(tree) is not None:
        return {}
    with dask.config.set(scheduler="threads"):  # a Dask client may have no workers
        about_draws = measured(tree)
        if 0 < about_draws["draws_bytes"] <= MAX_LOADED_BYTES:
            tree["posterior"].load()
        large = about_draws["draws_bytes"] > MAX_SUMMARIZED_BYTES
        return cache_attr(
            CachedSummary(about_draws, None if large else compute_summary(tree).to_dict()), tree
        )


def facts(
    tree: xr.DataTree, name: str, aligned: xr.DataTree | None = None
) -> tuple[dict[str, Any], Summary]:
    """Return the description of a run, see `facts_of`, and its summary.

    ``aligned`` is the tree after `align`, if available.
    """
    cache = cached_in(tree)
    of_draws = measured(tree) if cache is None else cache.measured
    return facts_of(tree.attrs, of_draws, name), cached_summary(cache, tree, aligned)


def measured(tree: xr.DataTree) -> dict[str, Any]:
    """Return facts about the draws: counts, dimensions, weights of particles, log density."""
    run = Run(tree)
    facts: dict[str, Any] = {
        "draws_done": 0,
        "draws_kept": run.posterior.sizes["draw"] if run.has_draws else 0,
        "draws_bytes": run.posterior.nbytes if run.has_draws else 0,
    }
    if "posterior" in run or MOMENTS in run:
        facts["dims"] = list(run.dims)
    if run.is_particles:
        facts["particles"] = of_particles().facts_of_particles(run)
        facts["draws_done"] = facts["particles"]["done"]
    elif MOMENTS in run:
        facts["draws_done"] = int(run.group(MOMENTS)["count"].min())
    return facts | _health(run) | _components(run)


def _components(run: Run) -> dict[str, Any]:
    """Return quantiles of the number of supported components, if the run sampled it."""
    name = EFFECTIVE.name
    drawn = run.posterior.get(name)
    if drawn is None or not drawn.size:
        return {}
    return {name: list(map(int, drawn.quantile([0.05, 0.5, 0.95], method="nearest").values))}


@np.errstate(over="ignore", invalid="ignore")
def _health(run: Run) -> dict[str, Any]:
    """Return divergences, level and drift of the log density; None without draws."""
    stats = run.stats
    if "lp" not in stats or not stats["lp"].size or "particles" in run.attrs:
        return dict.fromkeys(("diverging", "lp_mean", "lp_sd", "lp_drift"))
    rolled_back = run.attrs.get("divergences")
    if rolled_back is None:
        rolled_back = stats["diverging"].sum() if "diverging" in stats else 0
    lp = stats["lp"].values.astype("float64")
    half, spread = lp.shape[1] // 2, float(lp.std())
    moved = half and spread > 0
    return {
        "diverging": int(rolled_back),
        "lp_mean": float(lp.mean()),
        "lp_sd": spread,
        "lp_drift": float(lp[:, half:].mean() - lp[:, :half].mean()) / spread if moved else 0.0,
    }
