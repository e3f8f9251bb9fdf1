"""Finish a run: count and judge its draws once, and cache what was found with the run."""

from typing import Any, Final

import dask
import numpy as np
import xarray as xr

from daskfactor.models.settings import EFFECTIVE
from daskfactor.results.describe import facts_of
from daskfactor.results.run_writer import Sink
from daskfactor.results.schema import MOMENTS, STEIN
from daskfactor.results.summary import Summary, cached_summary, compute_summary
from daskfactor.results.summary_cache import CachedSummary, cache_attr, cached_in
from daskfactor.results.trace import Run, effective_number

MOST_JUDGED: Final = 2**30
"""Bytes of draws that a run judges at its end: what ``keep="auto"`` keeps, some ten seconds."""
HELD: Final = 2**24
"""Bytes of draws that are read once and held meanwhile: judging goes through them many times."""


def close_run(sink: Sink, attrs: dict[str, Any]) -> None:
    """Write the last attributes of a run, and its verdict where others may want it; then close."""
    if sink.checkpoints is not None:
        tree = sink.tree()
        tree.attrs |= attrs
        attrs = attrs | _verdict(tree)
    sink.finish(attrs)


def _verdict(tree: xr.DataTree) -> dict[str, str]:
    """The attribute that holds it; none if it is there."""
    if cached_in(tree) is not None:
        return {}
    with dask.config.set(scheduler="threads"):  # a client that is about may have no workers
        found = measured(tree)
        if 0 < found["draws_bytes"] <= HELD:
            tree["posterior"].load()
        large = found["draws_bytes"] > MOST_JUDGED
        return cache_attr(
            CachedSummary(found, None if large else compute_summary(tree).to_dict()), tree
        )


def facts(
    tree: xr.DataTree, name: str, aligned: xr.DataTree | None = None
) -> tuple[dict[str, Any], Summary]:
    """Say what a run is and how far it has come, see `facts_of`; and judge it.

    ``aligned`` is the tree aligned by itself, if somebody has done that.
    """
    cache = cached_in(tree)
    of_draws = measured(tree) if cache is None else cache.measured
    return facts_of(tree.attrs, of_draws, name), cached_summary(cache, tree, aligned)


def measured(tree: xr.DataTree) -> dict[str, Any]:
    """Count draws, name dimensions, and sum up weights of particles or level of the log density."""
    run = Run(tree)
    found: dict[str, Any] = {
        "draws_done": 0,
        "draws_kept": run.posterior.sizes["draw"] if run.has_draws else 0,
        "draws_bytes": run.posterior.nbytes if run.has_draws else 0,
    }
    if "posterior" in run or MOMENTS in run:
        found["dims"] = list(run.dims)
    if run.is_particles:
        found["particles"] = _particles(run)
        found["draws_done"] = found["particles"]["done"]
    elif MOMENTS in run:
        found["draws_done"] = int(run.group(MOMENTS)["count"].min())
    return found | _health(run) | _components(run)


def _particles(run: Run) -> dict[str, Any]:
    """Count particles and what they are worth."""

    def scalar(group: str, name: str, reduced: str = "max") -> float | None:
        values = run.group(group).get(name)
        return float(getattr(values, reduced)()) if values is not None and values.size else None

    weights = run.weights
    masses: dict[str, Any] = dict.fromkeys(("with_weight", "effective", "largest_weight"))
    if weights is not None:
        masses["with_weight"] = int((weights > 0).sum())
        masses["effective"] = effective_number(weights)
        masses["largest_weight"] = float(weights.max())
    return {
        "done": run.stats.sizes["draw"],
        "planned": run.attrs.get("particles"),
        **masses,
        "threshold": scalar("constant_data", "threshold"),
        "objective_min": scalar("sample_stats", "objective", "min"),
        "objective_max": scalar("sample_stats", "objective"),
        "discrepancy": scalar(STEIN, "discrepancy"),
        "discrepancy_equal": scalar(STEIN, "discrepancy_equal"),
    }


def _components(run: Run) -> dict[str, Any]:
    """Sum up how many components the data support, where a run learnt that."""
    name = EFFECTIVE.name
    drawn = run.posterior.get(name)
    if drawn is None or not drawn.size:
        return {}
    return {name: list(map(int, drawn.quantile([0.05, 0.5, 0.95], method="nearest").values))}


@np.errstate(over="ignore", invalid="ignore")
def _health(run: Run) -> dict[str, Any]:
    """Count divergences, and measure level and drift of the log density; None without draws."""
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
