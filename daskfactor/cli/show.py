"""``daskfactor info``, ``annotate``, ``plot``, ``report``: what a store tells of a run."""

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
            help="Read all draws and tell what of them has converged, or what particles agree on.",
        ),
    ] = False,
) -> o.Answer:
    """Tell what a run is, how far it has come, whether it is healthy, and how to go on.

    Works on finished, running and interrupted runs; of a blocked store it tells what it holds.

        daskfactor info run.zarr

        daskfactor info run.zarr --diagnose

        daskfactor info run.zarr --json | python -m json.tool
    """
    from daskfactor.results.summary_cache import READ_AT_ONCE, cached_at

    if not diagnose and (ended := cached_at(run, READ_AT_ONCE)) is not None:
        return _shown(*ended, run)
    try:
        tree = dfac.open_run(run)
    except StoreFormatError:
        from daskfactor.data.store import is_blocked_store

        if not is_blocked_store(run):
            raise
        return _of_store(run)
    found = dfac.summarize(tree) if diagnose else None
    summary, table = summary_of(tree, run, found)
    if found is None:
        return summary, table
    summary["convergence"] = {
        "notes": found.notes,
        "functionals": found.to_dataframe().to_dict(orient="index"),
    }
    return summary, table, str(found).partition("\n\npredictions")[0], "\n".join(found.notes)


def _of_store(place: str) -> o.Answer:
    """Tell what a blocked store holds, of which no block is read."""
    with dfac.as_blocks(place, allow_empty=True) as data:
        told = {
            "store": place,
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
            ("store", place),
            ("matrix", data.describe().removesuffix(f" {data.place}")),
            ("values", f"from {data.minimum:g} to {data.maximum:g}, mean {data.mean:.4g}"),
            ("rows, columns", f"{data.labels.row_dim}, {data.labels.col_dim}"),
        ]
    return told, o.facts(lines)


def annotate(
    run: o.Run,
    data: Annotated[str, Argument(metavar="DATA", help="AnnData: .h5ad, or a .zarr of it.")],
    output: Annotated[str, Option("--output", "-o", help="File to write; may be DATA itself.")],
    key: Annotated[str, Option(help="Key in obsm, varm and uns.")] = "dfac",
    overwrite: o.Overwrite = False,
) -> o.Answer:
    """Write a result into an AnnData: means and sds into obsm and varm, settings into uns.

    Cells and genes are matched by name. Of the data nothing but names is read: the file is
    copied, whatever its size.

        daskfactor annotate run.zarr cells.h5ad -o annotated.h5ad

        daskfactor annotate run.zarr cells.h5ad -o cells.h5ad --overwrite
    """
    from daskfactor.results.annotation import annotate_file

    noted = annotate_file(run, data, output, key, overwrite=overwrite)
    return {"output": output, "key": key, **noted}, f"wrote obsm, varm and uns {key!r} to {output}"


def plot(
    run: o.Run,
    output: o.Picture = Path("run.png"),
    figure: Annotated[
        str, Option(help="Which figure to draw, or all; --list tells their names.")
    ] = "overview",
    components: Annotated[
        int | None, Option("--components", "-k", min=1, help="How many components to draw.")
    ] = None,
    factor: Annotated[
        Literal["W", "H"] | None, Option(help="Rows (W) or columns (H), where one is drawn.")
    ] = None,
    image_shape: Annotated[
        str | None, Option(help="HEIGHTxWIDTH, if rows or columns are pixels: draws pictures.")
    ] = None,
    overwrite: o.Overwrite = False,
    names: Annotated[bool, Option("--list", help="Tell what figures there are.")] = False,
) -> o.Answer:
    """Draw a figure of a run: by default the log density and the strongest components.

    Components come by weight, under the names that align gives them; dates are drawn as a
    course of time, numbers with a unit as a curve, coordinates as a map, many names as a list.

        daskfactor plot run.zarr -o run.png

        daskfactor plot run.zarr --figure top-entries -o words.svg

        daskfactor plot faces.zarr --figure maps --image-shape 112x92

        daskfactor plot run.zarr --figure all -o run.png    (run-overview.png, ...)
    """
    from daskfactor.plots.canvas import save
    from daskfactor.plots.registry import named

    if names:
        about = {name: kind.about for name, kind in sorted(dfac.plots.FIGURES.items())}
        return about, o.facts(about.items(), title="figures")
    given = {"count": components, "factor": factor, "image_shape": _shape(image_shape)}
    output = output or Path("run.png")
    if figure != "all":
        named(figure)
    every = {name: output.with_stem(f"{output.stem}-{name}") for name in dfac.plots.FIGURES}
    for path in every.values() if figure == "all" else [output]:
        check_free(path, overwrite)
    tree = dfac.open_run(run)
    if figure != "all":
        save(dfac.plots.draw(tree, figure, **given), output, overwrite)
        return {"picture": str(output)}, f"wrote {output}"
    written, left = [], {}
    for name, drawn in dfac.plots.draw_all(tree, **given):
        if isinstance(drawn, OptionError):
            left[name] = str(drawn)
            continue
        save(drawn, every[name], overwrite)
        written.append(str(every[name]))
    lines = [f"wrote {path}" for path in written]
    lines += [f"left {name} out: {why}" for name, why in left.items()]
    return {"pictures": written, "left_out": left}, "\n".join(lines)


def _shape(text: str | None) -> tuple[int, int] | None:
    """Read HEIGHTxWIDTH."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)[x,](\d+)", text)
    if found is None:
        raise OptionError(f"--image-shape is HEIGHTxWIDTH, for example 112x92, got {text!r}")
    return int(found[1]), int(found[2])


def report(
    run: o.Run,
    output: Annotated[Path, Option("--output", "-o", help="Page to write (.html).")] = Path(
        "report.html"
    ),
    title: Annotated[
        str | None, Option(help="Headline; the name of the store if left out.")
    ] = None,
    image_shape: Annotated[
        str | None, Option(help="HEIGHTxWIDTH, if rows or columns are pixels.")
    ] = None,
    evidence: Annotated[
        Path | None, Option(help="Table of ranks (.nc) that select-rank -o wrote.")
    ] = None,
    overwrite: o.Overwrite = False,
) -> o.Answer:
    """Write one page about a run that can be handed to a colleague.

    Data, model, settings, whether it may be relied on and what to do about it, components with
    their intervals, and which of them swap places. The page is one file, without scripts, and
    asks no server for anything.

        daskfactor report run.zarr -o report.html

        daskfactor report run.zarr --evidence ranks.nc
    """
    given: dict[str, Any] = {"title": title or run, "image_shape": _shape(image_shape)}
    if evidence is not None:
        import xarray as xr

        try:
            given["evidence"] = xr.load_dataset(evidence)
        except ValueError as error:
            raise DataError(f"{evidence} is no table of select-rank: {error}") from error
    dfac.report(dfac.open_run(run), output, overwrite=overwrite, **given)
    return {"page": str(output)}, f"wrote {output}"


def summary_of(
    tree: "xr.DataTree", store: str, judged: "Summary | None" = None
) -> tuple[dict[str, Any], Any]:
    """Summarize data, model, sampler, draws and health of a run: as values, and as a table.

    ``judged`` is what `summarize` says of it; without it, what the run has cached, or what can be
    said of draws that are quickly read.
    """
    from daskfactor.results.finalize import measured
    from daskfactor.results.summary_cache import CachedSummary, cached_in

    cache = cached_in(tree) or CachedSummary(measured(tree), None)
    done = cache.measured["draws_kept"] or cache.measured["draws_done"]
    quick = cache.measured["draws_bytes"] <= QUICKLY_READ and "sample_stats" in tree.children
    if judged is None and cache.summary is None and done and quick:
        judged = dfac.summarize(tree)
    if judged is not None:
        cache = cache._replace(summary=judged.to_dict())
    return _shown(tree.attrs, cache, store)


def _shown(
    attrs: Mapping[Any, Any], cache: "CachedSummary", store: str
) -> tuple[dict[str, Any], Any]:
    from daskfactor.results.describe import description_lines, facts_of

    summary = facts_of(attrs, cache.measured, store)
    lines = [*description_lines(summary), *_lights(summary, cache, store)]
    if summary["resume"] is not None:
        lines.append(("to finish" if summary["unfinished"] else "more draws", summary["resume"]))
    return summary, o.facts(lines, title=store)


QUICKLY_READ: Final = 2**26
"""Bytes of draws that are judged without being asked for it: a second or two."""
STYLES: Final = {"green": "green", "amber": "yellow", "red": "red", "none": "dim"}


def _lights(summary: dict[str, Any], cache: "CachedSummary", store: str) -> list[tuple[str, str]]:
    """A line for each light over what a run gave; they are put into the summary, too."""
    from daskfactor.results.verdict import LIGHTS, lights_in

    size = summary.pop("draws_bytes")
    if cache.summary is None:
        told = f"--diagnose reads {size / 1e9:.1f} GB of draws for it"
        return [("verdict", told)] if size > QUICKLY_READ else []
    found = lights_in(cache.summary["attrs"])
    summary["lights"] = {name: light.as_dict() for name, light in found.items()}
    lines = []
    for name, light in found.items():
        advice = in_shell(light.advice, shlex.quote(store))
        said = "\n".join(filter(None, (*light.reasons, advice)))
        word = f"[{STYLES[light.status]}]{light.status.upper()}[/]"
        lines.append((LIGHTS[name], f"{word}  {escape(said)}"))
    return lines
