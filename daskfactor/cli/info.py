"""``daskfactor info``."""

from daskfactor.cli.options import Debug, Json, Run
from daskfactor.cli.report import print_json, reporting


def info(run: Run, as_json: Json = False, debug: Debug = False) -> None:
    """Tell what a run is, how far it has come, whether it is healthy, and how to go on.

    Works on finished, running and interrupted runs.

        daskfactor info run.zarr

        daskfactor info run.zarr --json | python -m json.tool
    """
    with reporting(debug):
        from rich.console import Console

        import daskfactor as dfac
        from daskfactor.cli.summary import run_summary, summary_table

        summary = run_summary(dfac.open_run(run), run)
        if as_json:
            print_json(summary)
        else:
            Console().print(summary_table(summary))
