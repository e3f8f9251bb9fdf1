"""``daskfactor info``, ``annotate``, ``plot`` and ``report``: results of a stored run."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from rich.markup import escape
from typer import Argument

import daskfactor as dfac
from daskfactor.cli import options as o
from daskfactor.cli.wording import in_shell
from daskfactor.errors import DataError, OptionError, StoreFormatError
from daskfactor.publish import check_free

if TYPE_CHECKING:
    import xarray as xr

    from daskfactor.results.summary import Summary
    from daskfactor.results.summary_cache import CachedSummary


class Info(o.Command):
    """Show the settings, progress and health of a run, and how to continue it.

    The run may be finished, running or interrupted. RUN may also be a store of data that convert
    wrote; then info shows its contents.

        daskfactor info run.zarr

        daskfactor info run.zarr --diagnose

        daskfactor info run.zarr --json | python -m json.tool

    Parameters
    ----------
    diagnose
        Read all draws and report their convergence, or the agreement of particles.
    """

    run: o.RunArgument
    diagnose: bool = False

    def __call__(self) -> o.Answer:
        """Describe the run."""
        from daskfactor.results.summary_cache import READ_AT_ONCE, cached_at

        if not self.diagnose and (ended := cached_at(self.run, READ_AT_ONCE)) is not None:
            return _summary_table(*ended, self.run)
        try:
            tree = dfac.open_run(self.run)
        except StoreFormatError:
            from daskfactor.data.places import kind_of

            if kind_of(self.run) != "blocks":
                raise
            return _data_store_info(self.run)
        diagnostics = dfac.summarize(tree) if self.diagnose else None
        summary, table = summary_of(tree, self.run, diagnostics)
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
        names = "unstored", "imbalance", "mean", "minimum", "maximum", "fingerprint"
        values = {name: getattr(data, name) for name in names}
        values |= {"store": store, "shape": list(data.shape), "blocks": data.grid.blocks}
        values["entries"] = int(data.n_stored.sum())
        lines = [
            ("store", store),
            ("matrix", data.describe().removesuffix(f" {data.place}")),
            ("values", f"from {data.minimum:g} to {data.maximum:g}, mean {data.mean:.4g}"),
            ("rows, columns", f"{data.labels.row_dim}, {data.labels.col_dim}"),
        ]
    return values, o.facts(lines)


class Annotate(o.Command):
    """Add the result of a run to an AnnData file.

    Means and standard deviations go to obsm and varm, settings to uns. Cells and genes are matched
    by name. Only the names are read: the file is copied, whatever its size.

        daskfactor annotate run.zarr cells.h5ad -o annotated.h5ad

        daskfactor annotate run.zarr cells.h5ad -o cells.h5ad --overwrite

    Parameters
    ----------
    data
        AnnData to read: .h5ad or .zarr.
    output
        File to write; DATA itself with --overwrite.
    key
        Key of the result in obsm, varm and uns.
    """

    run: o.RunArgument
    data: Annotated[str, Argument(metavar="DATA")]
    output: str
    key: str = "dfac"
    overwrite: bool = False

    def __call__(self) -> o.Answer:
        """Annotate the file."""
        from daskfactor.results.annotation import annotate_file

        output, key = self.output, self.key
        places = annotate_file(self.run, self.data, output, key, overwrite=self.overwrite)
        text = f"wrote obsm, varm and uns {key!r} to {output}"
        return {"output": output, "key": key, **places}, text


class Plot(o.Command):
    """Draw a figure of a run, by default the log density and the largest components.

    Components are sorted by weight and named as in align. Each axis is drawn according to its
    labels: dates as a time series, numbers with a unit as a curve, coordinates as a map, many
    names as a list.

        daskfactor plot run.zarr -o run.png

        daskfactor plot run.zarr --figure top-entries -o words.svg

        daskfactor plot faces.zarr --figure maps --image-shape 112x92

        daskfactor plot run.zarr --figure all -o run.png    (run-overview.png, ...)

    Parameters
    ----------
    output
        Image file to write (.png, .pdf, .svg).
    figure
        Name of the figure to draw, or all; see --list.
    components
        Number of components to draw.
    factor
        Factor to draw, in figures of one factor: W (rows) or H (columns).
    names
        List the figures and exit.
    """

    run: o.RunArgument
    output: Path | None = Path("run.png")
    figure: str = "overview"
    components: int | None = None
    factor: Literal["W", "H"] | None = None
    image_shape: str | None = None
    overwrite: bool = False
    names: bool = False

    def __call__(self) -> o.Answer:
        """Draw the figures."""
        from daskfactor.plots.canvas import save
        from daskfactor.plots.registry import figure_by_name

        if self.names:
            titles = {name: kind.title for name, kind in sorted(dfac.plots.FIGURES.items())}
            return titles, o.facts(titles.items(), title="figures")
        image_shape = _parse_image_shape(self.image_shape)
        options = {"count": self.components, "factor": self.factor, "image_shape": image_shape}
        output = self.output or Path("run.png")
        if self.figure != "all":
            figure_by_name(self.figure)
            check_free(output, self.overwrite)
            one = dfac.plots.draw(dfac.open_run(self.run), self.figure, **options)
            save(one, output, self.overwrite)
            return {"picture": str(output)}, f"wrote {output}"
        files = {name: output.with_stem(f"{output.stem}-{name}") for name in dfac.plots.FIGURES}
        for path in files.values():
            check_free(path, self.overwrite)
        written, skipped = [], {}
        for name, drawing in dfac.plots.draw_all(dfac.open_run(self.run), **options):
            if isinstance(drawing, OptionError):
                skipped[name] = str(drawing)
                continue
            save(drawing, files[name], self.overwrite)
            written.append(str(files[name]))
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


class Report(o.Command):
    """Write an HTML report about a run, for colleagues.

    The report covers data, model and settings, whether the results are reliable and how to improve
    them, the components with their intervals, and components that swap. It is one file without
    scripts, and loads nothing from the network.

        daskfactor report run.zarr -o report.html

        daskfactor report run.zarr --evidence ranks.nc

    Parameters
    ----------
    output
        HTML file to write.
    title
        Title of the page; by default the name of the store.
    evidence
        Table of ranks to include: an .nc file that select-rank wrote.
    """

    run: o.RunArgument
    output: Path = Path("report.html")
    title: str | None = None
    image_shape: str | None = None
    evidence: Path | None = None
    overwrite: bool = False

    def __call__(self) -> o.Answer:
        """Write the report."""
        options: o.Arguments = {"title": self.title or self.run, "overwrite": self.overwrite}
        options["image_shape"] = _parse_image_shape(self.image_shape)
        if self.evidence is not None:
            import xarray as xr

            try:
                options["evidence"] = xr.load_dataset(self.evidence)
            except ValueError as error:
                raise DataError(
                    "--evidence must be an .nc file that select-rank wrote, got "
                    f"{self.evidence}: {error}"
                ) from error
        dfac.report(dfac.open_run(self.run), self.output, **options)
        return {"page": str(self.output)}, f"wrote {self.output}"


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
