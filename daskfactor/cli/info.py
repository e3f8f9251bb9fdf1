"""``daskfactor info``."""

from typing import Annotated

import typer

from daskfactor.cli.options import Debug, Json, Run
from daskfactor.cli.report import print_json, reporting


def info(
    run: Run,
    diagnose: Annotated[
        bool,
        typer.Option(
            "--diagnose",
            help="Read all draws and tell what of them has converged, or what particles agree on.",
        ),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
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
