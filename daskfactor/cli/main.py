"""The command ``daskfactor``."""

from typing import Annotated

import typer

from daskfactor.cli import convert, demo, fit, info, particles, plot, predict, select_rank

app = typer.Typer(
    name="daskfactor",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"daskfactor {version('daskfactor')}")
        raise typer.Exit


@app.callback()
def daskfactor(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print it and stop."
        ),
    ] = False,
) -> None:
    """Bayesian non-negative matrix factorization for data that does not fit in memory.

    A first look:  `daskfactor demo faces`

    Your own data:  `daskfactor fit table.csv --store run.zarr -k 10`,
    then `info`, `plot` or `predict` run.zarr.

    Exit codes: 0 done, 1 unexpected error, 2 wrong usage, 3 data, model or options that
    cannot be used, 4 trouble with a file or store, 5 the chain diverged, 130 interrupted.
    """


app.command()(demo.demo)
app.command()(convert.convert)
app.command()(fit.fit)
app.command()(fit.resume)
app.command()(particles.particles)
app.command()(predict.predict)
app.command()(select_rank.select_rank)
app.command()(info.info)
app.command()(plot.plot)
