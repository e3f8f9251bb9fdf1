"""Summaries of a run, as plain values and as a table."""

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table


def run_summary(tree: "xr.DataTree", store: str | None = None) -> dict[str, Any]:
    """Summarize data, model, sampler, draws and health of a run, in JSON's own types."""
    attrs = tree.attrs
    summary: dict[str, Any] = {
        "store": store,
        "data": _data(tree),
        "model": _decoded(attrs.get("model")),
        "sampler": _decoded(attrs.get("sampler")),
        "dispersion": attrs.get("dispersion"),
        "rate_w": attrs.get("rate_w"),
        "rate_h": attrs.get("rate_h"),
    }
    for name in ("chains", "tune", "draws", "thin", "keep", "dtype", "executor", "random_seed"):
        summary[name] = attrs.get(name)
    summary["draws_done"] = draws_done(tree)
    particles = particle_summary(tree)
    if particles is not None:
        summary["particles"] = particles
    summary["draws_kept"] = (
        int(tree["posterior"].sizes["draw"]) if "posterior" in tree.children else 0
    )
    summary |= _health(tree)
    summary["sampling_time"] = attrs.get("sampling_time")
    summary["created_at"] = attrs.get("created_at")
    summary["daskfactor"] = attrs.get("inference_library_version")
    if store is not None and not _finished(summary):
        summary["resume"] = f"daskfactor resume {store}"
    elif store is not None and particles is None:
        summary["resume"] = f"daskfactor resume {store} --draws 500"
    return summary


def _finished(summary: Mapping[str, Any]) -> bool:
    """Tell whether all that was planned is there."""
    if "particles" in summary:
        return summary["particles"]["with_weight"] is not None
    planned = summary["draws"]
    return planned is None or summary["draws_done"] >= planned


def draws_done(tree: "xr.DataTree") -> int:
    """Count the draws that every chain of a run has taken, kept or not."""
    if _is_particles(tree):
        return int(tree["sample_stats"].sizes["draw"])
    if "posterior_moments" in tree.children:
        return int(tree.children["posterior_moments"].to_dataset()["count"].values.min())
    return 0


def _is_particles(tree: "xr.DataTree") -> bool:
    from daskfactor.results.weights import is_particles

    return is_particles(tree)


def particle_summary(tree: "xr.DataTree") -> dict[str, Any] | None:
    """Count particles and what they are worth; None for draws of a sampler."""
    if not _is_particles(tree):
        return None
    from daskfactor.results.weights import draw_weights, effective_number

    stats = tree.children["sample_stats"].to_dataset()
    constants = tree["constant_data"].to_dataset() if "constant_data" in tree.children else {}
    weights = draw_weights(tree)
    found: dict[str, Any] = {
        "done": int(stats.sizes["draw"]),
        "planned": tree.attrs.get("particles"),
        "with_weight": None if weights is None else int((weights > 0).sum()),
        "effective": None if weights is None else effective_number(weights),
        "largest_weight": None if weights is None else float(weights.max()),
        "threshold": float(constants["threshold"]) if "threshold" in constants else None,
        "objective_min": None,
        "objective_max": None,
    }
    if "objective" in stats and stats["objective"].size:
        found["objective_min"] = float(stats["objective"].min())
        found["objective_max"] = float(stats["objective"].max())
    stein = tree["stein"].to_dataset() if "stein" in tree.children else {}
    for name in ("discrepancy", "discrepancy_equal"):
        found[name] = float(stein[name]) if name in stein else None
    return found


def _data(tree: "xr.DataTree") -> dict[str, Any]:
    """Read what the run says of its data, with the names of rows and columns."""
    data = dict(_decoded(tree.attrs.get("data")) or {})
    if {"posterior", "posterior_moments"} & set(tree.children):
        from daskfactor.results.schema import factor_dims

        data["dims"] = list(factor_dims(tree))
    return data


def _decoded(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _health(tree: "xr.DataTree") -> dict[str, Any]:
    """Count divergences, and measure level and drift of the log density; None without draws."""
    import numpy as np

    known = "sample_stats" in tree.children and "lp" in tree["sample_stats"].data_vars
    if not known or not tree["sample_stats"].sizes.get("draw") or _is_particles(tree):
        return {"diverging": None, "lp_mean": None, "lp_sd": None, "lp_drift": None}
    stats = tree.children["sample_stats"].to_dataset()
    rolled_back = tree.attrs.get("divergences")
    if rolled_back is None:
        rolled_back = stats["diverging"].values.sum() if "diverging" in stats else 0
    lp = np.asarray(stats["lp"].values, dtype=np.float64)
    half = lp.shape[1] // 2
    spread = float(lp.std())
    drift = 0.0
    if half and spread > 0:
        drift = float(lp[:, half:].mean() - lp[:, :half].mean()) / spread
    return {
        "diverging": int(rolled_back),
        "lp_mean": float(lp.mean()),
        "lp_sd": spread,
        "lp_drift": drift,
    }


def summary_table(summary: Mapping[str, Any]) -> "Table":
    """Lay the summary out for people."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=False, title=summary["store"] or "run")
    table.add_column(style="bold")
    table.add_column()
    for name, text in _lines(summary):
        table.add_row(name, text)
    return table


def _lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = [
        ("data", _data_line(summary["data"])),
        ("model", _call(summary["model"])),
        ("resolved", _resolved(summary)),
        ("sampler", _call(summary["sampler"])),
        ("run", _run_line(summary)),
        ("weights", _weights_line(summary["particles"]))
        if "particles" in summary
        else ("health", _health_line(summary)),
        ("made", _made_line(summary)),
    ]
    if "resume" in summary:
        more = summary["resume"].endswith("--draws 500")
        lines.append(("more draws" if more else "to finish", summary["resume"]))
    return lines


def _data_line(data: Mapping[str, Any]) -> str:
    shape = data.get("shape") or ["?", "?"]
    dims = data.get("dims") or ["row", "column"]
    text = f"{shape[0]} {dims[0]} x {shape[1]} {dims[1]}"
    observed = data.get("n_observed")
    if observed is not None and all(isinstance(n, int) for n in shape):
        cells = math.prod(shape)
        text += f", {observed:,} of {cells:,} cells observed ({observed / cells:.1%})"
    return text


def _call(value: Any) -> str:
    """Write ``{"name": "PSGLD", "step": "auto"}`` as ``PSGLD(step=auto)``."""
    if not isinstance(value, Mapping):
        return str(value)
    name = next((str(value[key]) for key in ("name", "type", "kind") if key in value), "")
    rest = {key: item for key, item in value.items() if key not in ("name", "type", "kind")}
    return name + "(" + ", ".join(f"{key}={_short(item)}" for key, item in rest.items()) + ")"


def _short(value: Any) -> str:
    return _call(value) if isinstance(value, Mapping) else str(value)


def _figure(value: Any) -> str:
    known = isinstance(value, int | float) and math.isfinite(value)
    return f"{value:.4g}" if known else "not yet known"


def _resolved(summary: Mapping[str, Any]) -> str:
    if summary["rate_w"] is None and summary["model"].get("type") == "GaussianMF":
        return f"noise variance {_figure(summary['dispersion'])}, precisions sampled"
    if summary["model"].get("type") == "SILFNMF":
        return f"threshold {_figure(summary.get('particles', {}).get('threshold'))}"
    return (
        f"dispersion {_figure(summary['dispersion'])}, prior rates "
        f"{_figure(summary['rate_w'])} (W) and {_figure(summary['rate_h'])} (H)"
    )


def _run_line(summary: Mapping[str, Any]) -> str:
    if "particles" in summary:
        planned = summary["particles"]["planned"]
        of = "" if planned is None else f" of {planned}"
        return f"{summary['particles']['done']}{of} particles done"
    chains = summary["chains"]
    text = f"{summary['draws_done']} of {summary['draws']} draws done, {summary['draws_kept']} kept"
    if chains != 1:
        text += f", in each of {chains} chains"
    if summary["thin"] not in (None, 1):
        text += f", one every {summary['thin']} cycles"
    return text + f", after {summary['tune']} tuning cycles"


def _health_line(summary: Mapping[str, Any]) -> str:
    if summary["lp_mean"] is None:
        return "no draws yet"
    bad = summary["diverging"]
    text = (
        "[green]no divergence[/green]" if not bad else f"[red]{bad} divergences, rolled back[/red]"
    )
    text += f"; log density {summary['lp_mean']:.6g} ± {summary['lp_sd']:.3g}"
    if abs(summary["lp_drift"]) > 1.0:
        text += (
            f"; [yellow]it moved by {summary['lp_drift']:+.1f} sd between the halves of the run: "
            "tune longer[/yellow]"
        )
    return text


def _weights_line(particles: Mapping[str, Any]) -> str:
    if particles["with_weight"] is None:
        return "none yet: until all particles are there, they count alike"
    text = (
        f"{particles['with_weight']} particles carry weight, worth {particles['effective']:.1f} "
        f"of equal weight, the largest {particles['largest_weight']:.0%}; Stein discrepancy "
        f"{_figure(particles['discrepancy'])} ({_figure(particles['discrepancy_equal'])} under "
        "equal weights)"
    )
    if particles["objective_min"] is not None:
        low, high = particles["objective_min"], particles["objective_max"]
        text += f"; objective {low:.4g} to {high:.4g}"
    return text


def _made_line(summary: Mapping[str, Any]) -> str:
    text = f"seed {summary['random_seed']}, {summary['dtype']}, executor {summary['executor']}"
    if isinstance(summary["sampling_time"], int | float):
        text += f", {summary['sampling_time']:.1f} s"
    return text + f", daskfactor {summary['daskfactor']}, {summary['created_at']}"
