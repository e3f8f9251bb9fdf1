"""The command ``daskfactor``."""

import inspect
from typing import Annotated

import typer

from daskfactor.cli import convert, demo, fit, predict, select_rank, show
from daskfactor.cli.report import OPTIONS

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


COMMANDS = (
    demo.demo,
    convert.convert,
    fit.fit,
    fit.resume,
    fit.particles,
    predict.predict,
    select_rank.select_rank,
    show.info,
    show.plot,
)
for command in COMMANDS:
    app.command()(command)
    OPTIONS.update(inspect.signature(command).parameters)
