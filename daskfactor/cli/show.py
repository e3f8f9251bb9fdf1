"""``daskfactor info``, ``plot`` and ``predict``: what a store tells of a run."""

import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

from typer import Option

import daskfactor as dfac
from daskfactor.cli import options as o
from daskfactor.errors import OptionError, StoreFormatError

if TYPE_CHECKING:
    import xarray as xr


def info(
    run: o.Run,
    diagnose: Annotated[
        bool,
        Option(
            "--diagnose",
            help="Read all draws and tell what of them has converged, or what particles agree on.",
        ),
    ] = False,
) -> o.Answer:
    """Tell what a run is, how far it has come, whether it is healthy, and how to go on.

    Works on finished, running and interrupted runs.

        daskfactor info run.zarr

        daskfactor info run.zarr --diagnose

        daskfactor info run.zarr --json | python -m json.tool
    """
    tree = dfac.open_run(run)
    summary, table = summary_of(tree, run)
    if not diagnose:
        return summary, table
    found = dfac.summarize(tree)
    summary["convergence"] = {
        "verdict": found.verdict,
        "functionals": found.to_dataframe().to_dict(orient="index"),
    }
    return summary, table, str(found)


def plot(
    run: o.Run,
    output: o.Picture = Path("run.png"),
    components: Annotated[
        int, Option("--components", "-k", min=1, help="How many components to draw.")
    ] = 6,
    image_shape: Annotated[
        str | None, Option(help="HEIGHTxWIDTH, if the rows are pixels: draws W as pictures.")
    ] = None,
) -> o.Answer:
    """Draw the trace of the log density and the strongest components with their spread.

    Components are those of the first chain, the one that carries most of the data on top;
    of particles, those of all of them, aligned and by weight.

        daskfactor plot run.zarr -o run.png

        daskfactor plot faces.zarr -o faces-components.png --image-shape 112x92
    """
    shape = re.fullmatch(r"(\d+)[x,](\d+)", image_shape or "1x1")
    if shape is None:
        raise OptionError(f"--image-shape is HEIGHTxWIDTH, for example 112x92, got {image_shape!r}")
    from daskfactor.plots import overview
    from daskfactor.plots.canvas import save

    pixels = (int(shape[1]), int(shape[2])) if image_shape is not None else None
    figure = overview(dfac.open_run(run), image_shape=pixels, count=components, title=run)
    save(figure, output or Path("run.png"))
    return {"picture": str(output)}, f"wrote {output}"


def predict(
    run: o.Run,
    rows: Annotated[
        str | None, Option(help="Positions, as 0:100, 3,5,7 or a mixture; all if left out.")
    ] = None,
    columns: Annotated[str | None, Option(help="As --rows, for columns.")] = None,
    interval: Annotated[
        float, Option(min=0.0, max=1.0, help="Probability that an interval holds.")
    ] = 0.9,
    of: Annotated[
        Literal["mean", "observation"] | None,
        Option(
            help="Interval of the mean WH, or of a new observation of the cell; left out, the "
            "latter where the model has one."
        ),
    ] = None,
    output: Annotated[
        str, Option("--output", "-o", help="File: .csv, .nc or .zarr; - is CSV on stdout.")
    ] = "-",
    as_json: o.Json = False,
) -> o.Answer | None:
    """Predict cells: posterior mean, standard deviation and interval, observed or not.

    Rows and columns are counted from 0, and the end of a range is left out.

        daskfactor predict run.zarr --rows 0:3 --columns 5,7

        daskfactor predict run.zarr --of observation --interval 0.95 -o filled.nc
    """
    if as_json and output == "-":
        raise OptionError("--json and CSV on stdout exclude each other: give --output FILE")
    kind = "-" if output == "-" else Path(output).suffix.lower()
    if kind not in ("-", ".csv", ".nc", ".zarr"):
        raise OptionError(f"--output is a .csv, .nc or .zarr file, or -, got {output!r}")
    from daskfactor.results.schema import factor_dims
    from daskfactor.results.trace import require_draws

    tree = require_draws(dfac.open_run(run), "a prediction")
    given = zip(factor_dims(tree), (rows, columns), ("--rows", "--columns"), strict=True)
    at = {
        dim: positions(text, tree["posterior"].sizes[dim], option)
        for dim, text, option in given
        if text is not None
    }
    # The factors are cut, with their labels: positions are meant, and labels may repeat.
    result = dfac.predict(tree.isel(at, missing_dims="ignore"), interval=interval, of=of)
    for name, dim in zip(result["mean"].dims, factor_dims(tree), strict=True):
        if dim in at and name not in result.coords:
            result = result.assign_coords({name: at[dim]})
    write(result, kind, output)
    if not as_json:
        return None
    return {"output": output, "sizes": dict(result.sizes), "variables": list(result)}, ""


def positions(text: str, size: int, option: str) -> list[int]:
    """Read ``"0:3,7"`` as ``[0, 1, 2, 7]``.

    Raises
    ------
    OptionError
        If the text is no such list, or names a position that does not exist.
    """
    chosen: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d*)\s*(:\s*(\d*)\s*)?", part)
        if match is None or not (match[1] or match[2]):
            raise OptionError(f"{option} takes positions such as 0:100 or 3,5,7, got {text!r}")
        start = int(match[1] or 0)
        stop = start + 1 if match[2] is None else int(match[3] or size)
        if not 0 <= start < stop <= size:
            raise OptionError(f"{option} must lie within 0:{size}, got {part.strip()!r}")
        chosen.extend(range(start, stop))
    return chosen


def write(result: "xr.Dataset", kind: str, output: str) -> None:
    """Write predictions as CSV in long form, as netCDF, or as a zarr store."""
    if kind == "-":
        write_csv(result, sys.stdout)
    elif kind == ".csv":
        with Path(output).open("w", newline="", encoding="utf-8") as file:
            write_csv(result, file)
    elif kind == ".nc":
        Path(output).open("ab").close()  # HDF5's own words for a refusal are long
        result.to_netcdf(output)
    else:
        if Path(output).exists():
            raise FileExistsError(17, "exists already; give another name", output)
        # Text of one fixed width has no settled zarr format; text as objects has.
        texts = {name: c.astype(object) for name, c in result.coords.items() if c.dtype.kind == "U"}
        result.assign_coords(texts).to_zarr(output, consolidated=False)


def write_csv(result: "xr.Dataset", file: TextIO) -> None:
    """Write a line for each cell: its two labels, then every variable.

    Rows are computed and written by chunks, so that memory holds one chunk alone.
    """
    dims = [str(dim) for dim in result["mean"].dims]
    mean, start = result["mean"], 0
    for size in mean.chunks[0] if mean.chunks else mean.shape[:1]:
        part = result.isel({dims[0]: slice(start, start + size)}).load()
        if dims[0] not in part.coords:
            part = part.assign_coords({dims[0]: range(start, start + size)})
        table = part.to_dataframe(dim_order=dims)[[str(name) for name in result.data_vars]]
        table.to_csv(file, header=not start, float_format="%.7g", lineterminator="\n")
        start += size


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
"""Attributes of a run that its summary takes over as they are."""


def summary_of(tree: "xr.DataTree", store: str) -> tuple[dict[str, Any], Any]:
    """Summarize data, model, sampler, draws and health of a run: as values, and as a table."""
    from daskfactor.results.trace import has_draws, is_particles

    attrs = tree.attrs
    if missing := [name for name in ("data", "model", "sampler") if name not in attrs]:
        raise StoreFormatError(
            f"{store} does not say what its {' and '.join(missing)} were; it is damaged, or no run "
            "of daskfactor"
        )
    summary: dict[str, Any] = {
        "store": store,
        **{name: json.loads(attrs[name]) for name in ("data", "model", "sampler")},
        **{name: attrs.get(name) for name in SETTINGS},
        "daskfactor": attrs.get("inference_library_version"),
        "draws_done": 0,
        "draws_kept": tree["posterior"].sizes["draw"] if has_draws(tree) else 0,
    }
    if {"posterior", "posterior_moments"} & set(tree.children):
        from daskfactor.results.schema import factor_dims

        summary["data"]["dims"] = list(factor_dims(tree))
    if is_particles(tree):
        found = summary["particles"] = _particles(tree)
        summary["draws_done"] = found["done"]
        finished, more = found["with_weight"] is not None, None
    else:
        if "posterior_moments" in tree.children:
            summary["draws_done"] = int(tree["posterior_moments"]["count"].min())
        finished = summary["draws"] is None or summary["draws_done"] >= summary["draws"]
        more = f"daskfactor resume {store} --draws 500"
    summary |= _health(tree) | _components(tree)
    lines = _lines(summary)
    if not finished:
        summary["resume"] = f"daskfactor resume {store}"
        lines.append(("to finish", summary["resume"]))
    elif more is not None:
        summary["resume"] = more
        lines.append(("more draws", more))
    return summary, o.facts(lines, title=store)


def _particles(tree: "xr.DataTree") -> dict[str, Any]:
    """Count particles and what they are worth."""
    from daskfactor.results.trace import draw_weights, effective_number

    def scalar(group: str, name: str, reduced: str = "max") -> float | None:
        if group not in tree.children or name not in tree[group] or not tree[group][name].size:
            return None
        return float(getattr(tree[group][name], reduced)())

    weights = draw_weights(tree)
    masses: dict[str, Any] = dict.fromkeys(("with_weight", "effective", "largest_weight"))
    if weights is not None:
        masses["with_weight"] = int((weights > 0).sum())
        masses["effective"] = effective_number(weights)
        masses["largest_weight"] = float(weights.max())
    return {
        "done": tree["sample_stats"].sizes["draw"],
        "planned": tree.attrs.get("particles"),
        **masses,
        "threshold": scalar("constant_data", "threshold"),
        "objective_min": scalar("sample_stats", "objective", "min"),
        "objective_max": scalar("sample_stats", "objective"),
        "discrepancy": scalar("stein", "discrepancy"),
        "discrepancy_equal": scalar("stein", "discrepancy_equal"),
    }


def _components(tree: "xr.DataTree") -> dict[str, Any]:
    """Sum up how many components the data support, where a run learnt that."""
    name = "effective_components"
    if "posterior" not in tree.children or name not in tree["posterior"]:
        return {}
    drawn = tree["posterior"][name]
    if not drawn.size:
        return {}
    return {name: list(map(int, drawn.quantile([0.05, 0.5, 0.95], method="nearest").values))}


def _health(tree: "xr.DataTree") -> dict[str, Any]:
    """Count divergences, and measure level and drift of the log density; None without draws."""
    stats = tree["sample_stats"].to_dataset() if "sample_stats" in tree.children else {}
    if "lp" not in stats or not stats["lp"].size or "particles" in tree.attrs:
        return dict.fromkeys(("diverging", "lp_mean", "lp_sd", "lp_drift"))
    rolled_back = tree.attrs.get("divergences")
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


def _lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Lay a summary out for people, a line per fact."""
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
    """Write ``{"name": "PSGLD", "step": "auto"}`` as ``PSGLD(step=auto)``."""
    if not isinstance(value, Mapping):
        return str(value)
    rest = dict(value)
    names = [str(rest.pop(key)) for key in ("name", "type", "kind") if key in rest]
    arguments = ", ".join(f"{key}={_call(item)}" for key, item in rest.items())
    return f"{names[0] if names else ''}({arguments})"


def _figure(value: Any) -> str:
    known = isinstance(value, int | float) and math.isfinite(value)
    return f"{value:.4g}" if known else "not yet known"


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
        told = f"learnt by {word}" if learnt else _figure(rate)
        rates.append(f"{told} and by covariates" if linked else told)
    of_w, of_h = rates
    told = f"{of_w} (W and H)" if of_w == of_h else f"{of_w} (W) and {of_h} (H)"
    return f"dispersion {_figure(dispersion)}, prior rates {told}"


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
    text = f"[red]{bad} divergences, rolled back[/red]" if bad else "[green]no divergence[/green]"
    text += f"; log density {summary['lp_mean']:.6g} ± {summary['lp_sd']:.3g}"
    if abs(summary["lp_drift"]) > 1.0:
        text += (
            f"; [yellow]it moved by {summary['lp_drift']:+.1f} sd between the halves of the run: "
            "tune longer[/yellow]"
        )
    return text


def _weights(found: Mapping[str, Any]) -> str:
    if found["with_weight"] is None:
        return "none yet: until all particles are there, they count alike"
    text = (
        f"{found['with_weight']} particles carry weight, worth {found['effective']:.1f} of equal "
        f"weight, the largest {found['largest_weight']:.0%}; Stein discrepancy "
        f"{_figure(found['discrepancy'])} ({_figure(found['discrepancy_equal'])} under equal "
        "weights)"
    )
    if found["objective_min"] is not None:
        text += f"; objective {found['objective_min']:.4g} to {found['objective_max']:.4g}"
    return text
