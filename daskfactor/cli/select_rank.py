"""``daskfactor select-rank``."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from daskfactor.cli.fit import connected
from daskfactor.cli.inputs import read_input
from daskfactor.cli.options import Cluster, Debug, ExecutorName, Json, Quiet, Seed, Unstored
from daskfactor.cli.report import print_json, reporting
from daskfactor.errors import OptionError

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table


def select_rank(
    input: Annotated[  # noqa: A002 - the name that the help shows
        str,
        typer.Argument(
            metavar="INPUT",
            help="Matrix, as for fit; FILE:NAME picks one of several.",
            show_default=False,
        ),
    ],
    ranks: Annotated[
        str, typer.Option(help="FIRST:LAST, both included, or a list such as 2,4,8.")
    ] = "1:10",
    beta: Annotated[float, typer.Option(help="1 counts, 2 Gaussian, 0 gamma, 0.5 between.")] = 1.0,
    dispersion: Annotated[
        float | None,
        typer.Option(help="Of the data; 1 for counts, else estimated once.", show_default=False),
    ] = None,
    held_out: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Share of cells left out and predicted; 0 none.")
    ] = 0.1,
    temperatures: Annotated[int, typer.Option(min=2, help="Steps of the ladder.")] = 10,
    draws: Annotated[
        int | None,
        typer.Option(min=10, help="Draws at the full likelihood.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Picture to write (.png, .pdf, .svg)."),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Bands per side; chosen from the data if left out.")
    ] = None,
    unstored: Annotated[
        Unstored | None,
        typer.Option(help="What an entry means that sparse input does not store."),
    ] = None,
    seed: Seed = 0,
    executor: Annotated[
        ExecutorName, typer.Option(help="Same numbers from each.")
    ] = ExecutorName.auto,
    cluster: Cluster = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare numbers of components by their log evidence and by cells left out.

    Evidences come from thermodynamic integration, with both of their errors.

        daskfactor select-rank counts.csv --ranks 1:10

        daskfactor select-rank data.npz:V --ranks 5,10,20,40 --held-out 0 -o ranks.png
    """
    with reporting(debug):
        numbers = _ranks(ranks)
        data = read_input(input)
        import daskfactor as dfac

        model = dfac.TweedieNMF(
            numbers[0], beta=beta, dispersion="auto" if dispersion is None else dispersion
        )
        with connected(cluster) as client:
            table = dfac.select_rank(
                data,
                model,
                numbers,
                dfac.ThermodynamicIntegration(temperatures=temperatures, draws=draws),
                held_out,
                seed,
                blocks=blocks,
                unstored=None if unstored is None else unstored.value,
                client=client,
                executor=executor.value,
                progressbar=not quiet,
            )
        if output is not None:
            from daskfactor.plots import plot_ranks

            plot_ranks(table, output)
        if as_json:
            columns = {str(name): table[name].values for name in ("rank", *table)}
            print_json({**columns, **table.attrs})
        else:
            from rich.console import Console

            Console().print(_printed(table))
            typer.echo(table.attrs["verdict"])


def _ranks(text: str) -> list[int]:
    span = re.fullmatch(r"(\d+):(\d+)", text)
    if span is not None and int(span[1]) <= int(span[2]):
        return list(range(int(span[1]), int(span[2]) + 1))
    if re.fullmatch(r"\d+(,\d+)*", text):
        return [int(number) for number in text.split(",")]
    raise OptionError(f"--ranks is FIRST:LAST or a list such as 2,4,8, got {text!r}")


def _printed(table: "xr.Dataset") -> "Table":
    from rich.table import Table

    shown = Table(box=None, header_style="bold")
    scored = "held_out_log_score" in table
    titles = ["rank", "log evidence", "± Monte Carlo", "± ladder", "seconds"]
    for title in titles + (["left out", "± to the best"] if scored else []):
        shown.add_column(title, justify="right")
    names = ["log_evidence", "standard_error", "discretization_error", "seconds"]
    for row in range(table.sizes["rank"]):
        own = table.isel(rank=row)
        cells = [str(int(own["rank"]))] + [f"{float(own[name]):.2f}" for name in names]
        if scored:
            cells += [
                f"{float(own[name]):.4f}"
                for name in ("held_out_log_score", "held_out_difference_error")
            ]
        best = int(own["rank"]) == table.attrs["best"]
        shown.add_row(*cells, style="bold" if best else None)
    return shown
