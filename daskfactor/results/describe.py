"""Describe a run, its progress and its health: as values, and as text."""

import json
import math
from collections.abc import Mapping
from typing import Any

from daskfactor.errors import StoreFormatError

SETTINGS = (
    "dispersion",
    "rate_w",
    "rate_h",
    "chains",
    "tune",
    "draws",
    "thin",
    "keep",
    "dtype",
    "executor",
    "sampler_reason",
    "random_seed",
    "sampling_time",
    "created_at",
)
"""Attributes of a run that the description copies."""


def facts_of(attrs: Mapping[Any, Any], measured: Mapping[str, Any], store: str) -> dict[str, Any]:
    """Return settings and progress of a run, and the command that resumes it.

    Parameters
    ----------
    attrs
        Attributes of the root.
    measured
        Facts about the draws, from `daskfactor.results.finalize.measured`.
    store
        Name of the run.

    Raises
    ------
    StoreFormatError
        If the attributes lack data, model or sampler.
    """
    if missing := [name for name in ("data", "model", "sampler") if name not in attrs]:
        raise StoreFormatError(
            f"{store} does not record its {' and '.join(missing)}; it is damaged, or not a run of "
            "daskfactor"
        )
    facts = dict(measured)
    summary: dict[str, Any] = {
        "store": store,
        **{name: json.loads(attrs[name]) for name in ("data", "model", "sampler")},
        **{name: attrs.get(name) for name in SETTINGS},
        "daskfactor": attrs.get("inference_library_version"),
    }
    if (dims := facts.pop("dims", None)) is not None:
        summary["data"]["dims"] = dims
    summary |= facts
    if "particles" in summary:
        finished, more = summary["particles"]["with_weight"] is not None, None
    else:
        finished = summary["draws"] is None or summary["draws_done"] >= summary["draws"]
        more = f"daskfactor resume {store} --draws 500"
    summary["unfinished"] = not finished
    summary["resume"] = more if finished else f"daskfactor resume {store}"
    return summary


def description_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the title and text of each line of a description."""
    particles = summary.get("particles")
    made = f"seed {summary['random_seed']}, {summary['dtype']}, executor {summary['executor']}"
    if summary["sampling_time"] is not None:
        made += f", {summary['sampling_time']:.1f} s"
    supported = []
    if "effective_components" in summary:
        low, middle, high = summary["effective_components"]
        text = f"the data support {middle} (5 to 95 % of draws: {low} to {high})"
        supported.append(("components", text))
    return [
        ("data", _data(summary["data"])),
        ("model", _call(summary["model"])),
        ("resolved", _resolved(summary)),
        *supported,
        ("sampler", _call(summary["sampler"]) + _chosen(summary["sampler_reason"])),
        ("run", _run(summary)),
        ("weights", _weights(particles)) if particles else ("health", _health_line(summary)),
        ("made", f"{made}, daskfactor {summary['daskfactor']}, {summary['created_at']}"),
    ]


def _chosen(reason: str | None) -> str:
    return "" if reason in (None, "as asked for") else f", chosen: {reason}"


def _data(data: Mapping[str, Any]) -> str:
    rows, columns = data["shape"]
    dims = data.get("dims", ("row", "column"))
    observed, cells = data["n_observed"], rows * columns
    return (
        f"{rows} {dims[0]} x {columns} {dims[1]}, {observed:,} of {cells:,} cells observed "
        f"({observed / cells:.1%})"
    )


def _call(value: Any) -> str:
    """Return ``{"name": "PSGLD", "step": "auto"}`` as ``PSGLD(step=auto)``."""
    if not isinstance(value, Mapping):
        return str(value)
    rest = dict(value)
    names = [str(rest.pop(key)) for key in ("name", "type", "kind") if key in rest]
    arguments = ", ".join(f"{key}={_call(item)}" for key, item in rest.items() if item is not None)
    return f"{names[0] if names else ''}({arguments})"


def _figure(value: Any) -> str:
    finite = isinstance(value, int | float) and math.isfinite(value)
    return f"{value:.4g}" if finite else "not yet known"


def _resolved(summary: Mapping[str, Any]) -> str:
    dispersion, rate_w, rate_h = (summary[name] for name in ("dispersion", "rate_w", "rate_h"))
    if rate_w is None and summary["model"].get("type") == "GaussianMF":
        return f"noise variance {_figure(dispersion)}, precisions sampled"
    if summary["model"].get("type") == "SILFNMF":
        return f"threshold {_figure(summary.get('particles', {}).get('threshold'))}"
    model, rates = summary["model"], []
    for side, rate in (("w", rate_w), ("h", rate_h)):
        word, linked = model.get(f"rate_{side}"), model.get(f"covariates_{side}") is not None
        word = "component" if linked and word == "auto" else word
        learnt = isinstance(word, str) and word != "auto"
        text = f"learnt by {word}" if learnt else _figure(rate)
        rates.append(f"{text} and by covariates" if linked else text)
    of_w, of_h = rates
    text = f"{of_w} (W and H)" if of_w == of_h else f"{of_w} (W) and {of_h} (H)"
    return f"dispersion {_figure(dispersion)}, prior rates {text}"


def _run(summary: Mapping[str, Any]) -> str:
    if "particles" in summary:
        planned = summary["particles"]["planned"]
        of = "" if planned is None else f" of {planned}"
        return f"{summary['draws_done']}{of} particles done"
    text = f"{summary['draws_done']} of {summary['draws']} draws done, {summary['draws_kept']} kept"
    if summary["chains"] != 1:
        text += f", in each of {summary['chains']} chains"
    if summary["thin"] not in (None, 1):
        text += f", one every {summary['thin']} cycles"
    return text + f", after {summary['tune']} tuning cycles"


def _health_line(summary: Mapping[str, Any]) -> str:
    if summary["lp_mean"] is None:
        return "no draws yet"
    bad = summary["diverging"]
    text = f"{bad} divergences, rolled back" if bad else "no divergence"
    text += f"; log density {summary['lp_mean']:.6g} ± {summary['lp_sd']:.3g}"
    return text


def _weights(particles: Mapping[str, Any]) -> str:
    if particles["with_weight"] is None:
        return "none yet: particles have equal weights until all of them are finished"
    discrepancy, equal = particles["discrepancy"], particles["discrepancy_equal"]
    text = (
        f"{particles['with_weight']} particles with positive weight, effective number "
        f"{particles['effective']:.1f}, the largest weight {particles['largest_weight']:.0%}; "
        f"Stein discrepancy {_figure(discrepancy)} ({_figure(equal)} with equal weights)"
    )
    if particles["objective_min"] is not None:
        low, high = particles["objective_min"], particles["objective_max"]
        text += f"; objective {low:.4g} to {high:.4g}"
    return text
