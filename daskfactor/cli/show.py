"""``daskfactor info`` and ``daskfactor plot``."""

import re
from pathlib import Path
from typing import Annotated

import typer

from daskfactor.cli import options as o
from daskfactor.cli.report import print_json, reporting
from daskfactor.errors import OptionError


def info(
    run: o.Run,
    diagnose: Annotated[
        bool,
        typer.Option(
            "--diagnose",
            help="Read all draws and tell what of them has converged, or what particles agree on.",
        ),
    ] = False,
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Tell what a run is, how far it has come, whether it is healthy, and how to go on.

    Works on finished, running and interrupted runs.

        daskfactor info run.zarr

        daskfactor info run.zarr --diagnose

        daskfactor info run.zarr --json | python -m json.tool
    """
    with reporting(debug):
        from rich.console import Console

        import daskfactor as dfac
        from daskfactor.cli.summary import run_summary, summary_table

        tree = dfac.open_run(run)
        summary = run_summary(tree, run)
        found = dfac.summarize(tree) if diagnose else None
        if found is not None:
            summary["convergence"] = {
                "verdict": found.verdict,
                "functionals": found.to_dataframe().to_dict(orient="index"),
            }
        if as_json:
            print_json(summary)
        else:
            Console().print(summary_table(summary))
            if found is not None:
                typer.echo(str(found))


def plot(
    run: o.Run,
    output: o.Picture = Path("run.png"),
    components: Annotated[
        int, typer.Option("--components", "-k", min=1, help="How many components to draw.")
    ] = 6,
    image_shape: Annotated[
        str | None,
        typer.Option(
            help="HEIGHTxWIDTH, if the rows are pixels: draws W as pictures.", show_default=False
        ),
    ] = None,
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Draw the trace of the log density and the strongest components with their spread.

    Components are those of the first chain, the one that carries most of the data on top;
    of particles, those of all of them, aligned and by weight.

        daskfactor plot run.zarr -o run.png

        daskfactor plot faces.zarr -o faces-components.png --image-shape 112x92
    """
    with reporting(debug):
        shape = None if image_shape is None else _shape(image_shape)
        import daskfactor as dfac
        from daskfactor.plots import overview
        from daskfactor.plots.canvas import save

        output = Path("run.png") if output is None else output
        tree = dfac.open_run(run)
        save(overview(tree, image_shape=shape, count=components, title=run), output)
        if as_json:
            print_json({"picture": str(output)})
        else:
            typer.echo(f"wrote {output}")


def _shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)[x,](\d+)", text)
    if match is None:
        raise OptionError(f"--image-shape is HEIGHTxWIDTH, for example 112x92, got {text!r}")
    return int(match[1]), int(match[2])
