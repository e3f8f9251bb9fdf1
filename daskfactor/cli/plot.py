"""``daskfactor plot``."""

import re
from pathlib import Path
from typing import Annotated

import typer

from daskfactor.cli.options import Debug, Json, Output, Run
from daskfactor.cli.report import print_json, reporting
from daskfactor.errors import OptionError


def plot(
    run: Run,
    output: Output = Path("run.png"),
    components: Annotated[
        int, typer.Option("--components", "-k", min=1, help="How many components to draw.")
    ] = 6,
    image_shape: Annotated[
        str | None,
        typer.Option(
            help="HEIGHTxWIDTH, if the rows are pixels: draws W as pictures.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
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
