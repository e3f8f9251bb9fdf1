"""``daskfactor info``, ``annotate``, ``plot`` and ``report``: results of a stored run."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from rich.markup import escape
from typer import Argument, Option

import daskfactor as dfac
from daskfactor.cli import options as o
from daskfactor.cli.wording import in_shell
from daskfactor.errors import DataError, OptionError, StoreFormatError
from daskfactor.publish import check_free

if TYPE_CHECKING:
    import xarray as xr

    from daskfactor.results.summary import Summary
    from daskfactor.results.summary_cache import CachedSummary


def info(
    run: o.Run,
    diagnose: Annotated[
        bool,
        Option(
            "--diagnose",
            help="Read all draws and report their convergence, or the agreement of particles.",
        ),
    ] = False,
) -> o.Answer:
    """Show the settings, progress and health of a run, and how to continue it.

    The run may be finished, running or interrupted. RUN may also be a store of data that convert
    wrote; then info shows its contents.

        daskfactor info run.zarr

        daskfactor info run.zarr --diagnose

        daskfactor info run.zarr --json | python -m json.tool
    """
    from daskfactor.results.summary_cache import READ_AT_ONCE, cached_at

    if not diagnose and (ended := cached_at(run, READ_AT_ONCE)) is not None:
        return _summary_table(*ended, run)
    try:
        tree = dfac.open_run(run)
    except StoreFormatError:
        from daskfactor.data.store import is_blocked_store

        if not is_blocked_store(run):
            raise
        return _data_store_info(run)
    diagnostics = dfac.summarize(tree) if diagnose else None
    summary, table = summary_of(tree, run, diagnostics)
    if diagnostics is None:
        return summary, table
    summary["convergence"] = {
        "notes": diagnostics.notes,
        "functionals": diagnostics.to_dataframe().to_dict(orient="index"),
    }
    text = str(diagnostics).partition("\n\npredictions")[0]
    return summary, table, text, "\n".join(diagnostics.notes)


def _data_store_info(store: str) -> o.Answer:
    """Describe the contents of a blocked store without reading a block."""
    with dfac.as_blocks(store, allow_empty=True) as data:
        values = {
            "store": store,
            "shape": list(data.shape),
            "entries": int(data.n_stored.sum()),
            "unstored": data.unstored,
            "blocks": data.grid.blocks,
            "imbalance": data.imbalance,
            "mean": data.mean,
            "minimum": data.minimum,
            "maximum": data.maximum,
            "fingerprint": data.fingerprint,
        }
        lines = [
            ("store", store),
            ("matrix", data.describe().removesuffix(f" {data.place}")),
            ("values", f"from {data.minimum:g} to {data.maximum:g}, mean {data.mean:.4g}"),
            ("rows, columns", f"{data.labels.row_dim}, {data.labels.col_dim}"),
        ]
    return values, o.facts(lines)


def annotate(
    run: o.Run,
    data: Annotated[str, Argument(metavar="DATA", help="AnnData to read: .h5ad or .zarr.")],
    output: Annotated[
        str, Option("--output", "-o", help="File to write; DATA itself with --overwrite.")
    ],
    key: Annotated[str, Option(help="Key of the result in obsm, varm and uns.")] = "dfac",
    overwrite: o.Overwrite = False,
) -> o.Answer:
    """Add the result of a run to an AnnData file.

    Means and standard deviations go to obsm and varm, settings to uns. Cells and genes are matched
    by name. Only the names are read: the file is copied, whatever its size.

        daskfactor annotate run.zarr cells.h5ad -o annotated.h5ad

        daskfactor annotate run.zarr cells.h5ad -o cells.h5ad --overwrite
    """
    from daskfactor.results.annotation import annotate_file

    places = annotate_file(run, data, output, key, overwrite=overwrite)
    return {"output": output, "key": key, **places}, f"wrote obsm, varm and uns {key!r} to {output}"


def plot(
    run: o.Run,
    output: o.Picture = Path("run.png"),
    figure: Annotated[
        str, Option(help="Name of the figure to draw, or all; see --list.")
    ] = "overview",
    components: Annotated[
        int | None, Option("--components", "-k", min=1, help="Number of components to draw.")
    ] = None,
    factor: Annotated[
        Literal["W", "H"] | None,
        Option(help="Factor to draw, in figures of one factor: W (rows) or H (columns)."),
    ] = None,
    image_shape: Annotated[
        str | None, Option(help="HEIGHTxWIDTH of an image whose pixels are the rows or columns.")
    ] = None,
    overwrite: o.Overwrite = False,
    names: Annotated[bool, Option("--list", help="List the figures and exit.")] = False,
) -> o.Answer:
    """Draw a figure of a run, by default the log density and the largest components.

    Components are sorted by weight and named as in align. Each axis is drawn according to its
    labels: dates as a time series, numbers with a unit as a curve, coordinates as a map, many
    names as a list.

        daskfactor plot run.zarr -o run.png

        daskfactor plot run.zarr --figure top-entries -o words.svg

        daskfactor plot faces.zarr --figure maps --image-shape 112x92

        daskfactor plot run.zarr --figure all -o run.png    (run-overview.png, ...)
    """
    from daskfactor.plots.canvas import save
    from daskfactor.plots.registry import figure_by_name

    if names:
        titles = {name: kind.title for name, kind in sorted(dfac.plots.FIGURES.items())}
        return titles, o.facts(titles.items(), title="figures")
    options = {
        "count": components,
        "factor": factor,
        "image_shape": _parse_image_shape(image_shape),
    }
    output = output or Path("run.png")
    if figure != "all":
        figure_by_name(figure)
    every = {name: output.with_stem(f"{output.stem}-{name}") for name in dfac.plots.FIGURES}
    for path in every.values() if figure == "all" else [output]:
        check_free(path, overwrite)
    tree = dfac.open_run(run)
    if figure != "all":
        save(dfac.plots.draw(tree, figure, **options), output, overwrite)
        return {"picture": str(output)}, f"wrote {output}"
    written, skipped = [], {}
    for name, drawing in dfac.plots.draw_all(tree, **options):
        if isinstance(drawing, OptionError):
            skipped[name] = str(drawing)
            continue
        save(drawing, every[name], overwrite)
        written.append(str(every[name]))
    lines = [f"wrote {path}" for path in written]
    lines += [f"skipped {name}: {reason}" for name, reason in skipped.items()]
    return {"pictures": written, "left_out": skipped}, "\n".join(lines)


def _parse_image_shape(text: str | None) -> tuple[int, int] | None:
    """Parse HEIGHTxWIDTH."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)[x,](\d+)", text)
    if match is None:
        raise OptionError(f"--image-shape must be HEIGHTxWIDTH, such as 112x92, got {text!r}")
    return int(match[1]), int(match[2])


def report(
    run: o.Run,
    output: Annotated[Path, Option("--output", "-o", help="HTML file to write.")] = Path(
        "report.html"
    ),
    title: Annotated[
        str | None, Option(help="Title of the page; by default the name of the store.")
    ] = None,
    image_shape: Annotated[
        str | None, Option(help="HEIGHTxWIDTH of an image whose pixels are the rows or columns.")
    ] = None,
    evidence: Annotated[
        Path | None, Option(help="Table of ranks to include: an .nc file that select-rank wrote.")
    ] = None,
    overwrite: o.Overwrite = False,
) -> o.Answer:
    """Write an HTML report about a run, for colleagues.

    The report covers data, model and settings, whether the results are reliable and how to improve
    them, the components with their intervals, and components that swap. It is one file without
    scripts, and loads nothing from the network.

        daskfactor report run.zarr -o report.html

        daskfactor report run.zarr --evidence ranks.nc
    """
    options: dict[str, Any] = {
        "title": title or run,
        "image_shape": _parse_image_shape(image_shape),
    }
    if evidence is not None:
        import xarray as xr

        try:
            options["evidence"] = xr.load_dataset(evidence)
        except ValueError as error:
            raise DataError(
                f"--evidence must be an .nc file that select-rank wrote, got {evidence}: {error}"
            ) from error
    dfac.report(dfac.open_run(run), output, overwrite=overwrite, **options)
    return {"page": str(output)}, f"wrote {output}"


def summary_of(
    tree: "xr.DataTree", store: str, diagnostics: "Summary | None" = None
) -> tuple[dict[str, Any], Any]:
    """Summarize data, model, sampler, draws and health of a run, as values and as a table.

    Parameters
    ----------
    tree
        The run.
    store
        Its path or URL.
    diagnostics
        Result of `summarize`. By default the summary that the run has cached, or one that is
        computed from its draws if these are small.
    """
    from daskfactor.results.finalize import measured
    from daskfactor.results.summary_cache import CachedSummary, cached_in

    cache = cached_in(tree) or CachedSummary(measured(tree), None)
    done = cache.measured["draws_kept"] or cache.measured["draws_done"]
    quick = cache.measured["draws_bytes"] <= QUICKLY_READ and "sample_stats" in tree.children
    if diagnostics is None and cache.summary is None and done and quick:
        diagnostics = dfac.summarize(tree)
    if diagnostics is not None:
        cache = cache._replace(summary=diagnostics.to_dict())
    return _summary_table(tree.attrs, cache, store)


def _summary_table(
    attrs: Mapping[Any, Any], cache: "CachedSummary", store: str
) -> tuple[dict[str, Any], Any]:
    """Return the summary of a run as values and as a table."""
    from daskfactor.results.describe import description_lines, facts_of

    summary = facts_of(attrs, cache.measured, store)
    lines = [*description_lines(summary), *_lights(summary, cache, store)]
    if summary["resume"] is not None:
        lines.append(("to finish" if summary["unfinished"] else "more draws", summary["resume"]))
    return summary, o.facts(lines, title=store)


QUICKLY_READ: Final = 2**26
"""Largest size of draws, in bytes, that are summarized without ``--diagnose``: a second or two."""
STYLES: Final = {"green": "green", "amber": "yellow", "red": "red", "none": "dim"}


def _lights(summary: dict[str, Any], cache: "CachedSummary", store: str) -> list[tuple[str, str]]:
    """Return a line for each light of the verdict, and add the lights to the summary."""
    from daskfactor.results.verdict import LIGHTS, lights_in

    size = summary.pop("draws_bytes")
    if cache.summary is None:
        text = f"pass --diagnose to compute it from {size / 1e9:.1f} GB of draws"
        return [("verdict", text)] if size > QUICKLY_READ else []
    lights = lights_in(cache.summary["attrs"])
    summary["lights"] = {name: light.as_dict() for name, light in lights.items()}
    lines = []
    for name, light in lights.items():
        advice = in_shell(light.advice, shlex.quote(store))
        text = "\n".join(filter(None, (*light.reasons, advice)))
        word = f"[{STYLES[light.status]}]{light.status.upper()}[/]"
        lines.append((LIGHTS[name], f"{word}  {escape(text)}"))
    return lines
