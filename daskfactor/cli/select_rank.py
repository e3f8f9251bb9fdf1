"""``daskfactor select-rank``."""

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from daskfactor.cli import options as o
from daskfactor.cli.inputs import read_input
from daskfactor.cli.report import print_json, reporting
from daskfactor.errors import OptionError

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table


def select_rank(
    input: o.Input,  # noqa: A002 - the name that the help shows
    ranks: Annotated[
        str, typer.Option(help="FIRST:LAST, both included, or a list such as 2,4,8.")
    ] = "1:10",
    model: Annotated[
        Literal["tweedie", "allocation"],
        typer.Option(help="tweedie: W H with a law of beta; allocation: sparse counts as tokens."),
    ] = "tweedie",
    beta: Annotated[
        float | None,
        typer.Option(
            help="Of tweedie: 1 counts (the default), 2 Gaussian, 0 gamma, 0.5 between.",
            show_default=False,
        ),
    ] = None,
    concentration: Annotated[
        float | None,
        typer.Option(
            help="Of allocation: pseudo-counts in each table; 1 if left out.", show_default=False
        ),
    ] = None,
    bound: Annotated[
        bool,
        typer.Option(
            "--bound",
            help="Of allocation: a variational lower bound, for more than 1000s of counts.",
        ),
    ] = False,
    dispersion: Annotated[
        float | None,
        typer.Option(
            help="Of tweedie: 1 for counts, else estimated once, if left out.", show_default=False
        ),
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=0.9,
            help="Of tweedie: share of cells left out and predicted; 0 none, 0.1 if left out.",
            show_default=False,
        ),
    ] = None,
    temperatures: Annotated[
        int | None,
        typer.Option(
            min=2, help="Of tweedie: steps of the ladder; 10 if left out.", show_default=False
        ),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(min=10, help="Of tweedie: draws at the full likelihood.", show_default=False),
    ] = None,
    output: o.Picture = None,
    blocks: o.Blocks = None,
    unstored: o.Meaning = None,
    seed: o.Seed = 0,
    executor: o.Executor = "auto",
    cluster: o.Cluster = None,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Compare numbers of components by their log evidence and by cells left out.

    Evidences come from thermodynamic integration, with both of their errors; of an
    allocation model from particles, in a time that follows the sum of the counts.

        daskfactor select-rank counts.csv --ranks 1:10

        daskfactor select-rank counts.csv --model allocation --concentration 10

        daskfactor select-rank data.npz:V --ranks 5,10,20,40 --held-out 0 -o ranks.png
    """
    with reporting(debug):
        numbers = _ranks(ranks)
        data = read_input(input)
        import daskfactor as dfac

        if model == "tweedie":
            _refuse(model, concentration=concentration, bound=bound or None)
            question, method = _factorization(numbers[0], beta, dispersion, temperatures, draws)
        else:
            _refuse(
                model,
                beta=beta,
                dispersion=dispersion,
                held_out=held_out,
                temperatures=temperatures,
                draws=draws,
            )
            total = 1.0 if concentration is None else concentration
            question = dfac.AllocationModel.nmf(numbers[0], concentration=total)
            method = dfac.VariationalBayes() if bound else dfac.SequentialMonteCarlo()
        with o.connected(cluster) as client:
            table = dfac.select_rank(
                data,
                question,
                numbers,
                method,
                "auto" if held_out is None else held_out,
                random_seed=seed,
                progressbar=not quiet,
                client=client,
                blocks=blocks,
                unstored=unstored,
                executor=executor,
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


def _factorization(
    rank: int,
    beta: float | None,
    dispersion: float | None,
    temperatures: int | None,
    draws: int | None,
) -> tuple[Any, Any]:
    """Make model and method of ``--model tweedie``."""
    import daskfactor as dfac

    model = dfac.TweedieNMF(
        rank,
        beta=1.0 if beta is None else beta,
        dispersion="auto" if dispersion is None else dispersion,
    )
    steps = 10 if temperatures is None else temperatures
    return model, dfac.ThermodynamicIntegration(temperatures=steps, draws=draws)


def _refuse(model: str, **options: float | None) -> None:
    """Refuse options that belong to the other model."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        other = "tweedie" if model == "allocation" else "allocation"
        raise OptionError(
            f"--{given[0].replace('_', '-')} belongs to --model {other}, got it with {model}; "
            "leave one of them out"
        )


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
    columns = {
        "log_evidence": "log evidence",
        "standard_error": "± Monte Carlo",
        "discretization_error": "± ladder",
        "seconds": "seconds",
    }
    names = [name for name in columns if name[-5:] != "error" or float(table[name].max()) > 0]
    titles = ["rank", *(columns[name] for name in names)]
    if "bound" in table.attrs:
        titles[1] = "lower bound"
    for title in titles + (["left out", "± to the best"] if scored else []):
        shown.add_column(title, justify="right")
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
