"""``daskfactor particles``."""

from enum import StrEnum
from typing import Annotated

import typer

from daskfactor.cli.fit import connected, print_run
from daskfactor.cli.inputs import read_input
from daskfactor.cli.options import (
    Blocks,
    Cluster,
    Components,
    Debug,
    ExecutorName,
    Input,
    Json,
    Meaning,
    Precision,
    Quiet,
    Seed,
    Store,
)
from daskfactor.cli.report import reporting


class StartName(StrEnum):
    """Starts by their names on the command line."""

    q_transform = "q-transform"
    random = "random"
    nndsvdar = "nndsvdar"


def particles(
    input: Input,  # noqa: A002 - the name that the help shows
    store: Store,
    components: Components,
    count: Annotated[int, typer.Option("--particles", "-m", min=1, help="How many.")] = 50,
    beta: Annotated[
        float, typer.Option(help="Divergence: 2 squared differences, 1 counts, 0 ratios.")
    ] = 2.0,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Objective up to which a factorization is good; left out: from pilot runs.",
            show_default=False,
        ),
    ] = None,
    pilot: Annotated[int, typer.Option(min=1, help="Pilot runs.")] = 10,
    start: Annotated[
        StartName, typer.Option(help="Where optimisations start.")
    ] = StartName.q_transform,
    max_iter: Annotated[
        int | None,
        typer.Option(min=1, help="Iterations of each at most; 200 or 300.", show_default=False),
    ] = None,
    blocks: Blocks = None,
    unstored: Meaning = None,
    seed: Seed = 0,
    dtype: Annotated[Precision, typer.Option(help="Arithmetic.")] = Precision.float32,
    executor: Annotated[
        ExecutorName, typer.Option(help="Same particles from each.")
    ] = ExecutorName.auto,
    cluster: Cluster = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find many good factorizations of a matrix, and the weight of each.

    Ends of optimisations from diverse starts, with the probability masses under which they
    are nearest to the posterior. What Ctrl-C cuts short after the pilot runs, resume finishes.

        daskfactor particles counts.csv --store modes.zarr -k 10

        daskfactor info modes.zarr --diagnose
    """
    with reporting(debug, store):
        data = read_input(input)
        import daskfactor as dfac

        model = dfac.SILFNMF(
            components, beta=beta, threshold="auto" if threshold is None else threshold
        )
        method = dfac.Ensemble(
            start=start.value.replace("-", "_"),  # type: ignore[arg-type]
            max_iter=max_iter,
        )
        with connected(cluster) as client:
            tree = dfac.stein_posterior(
                data,
                model,
                method,
                particles=count,
                pilot=pilot,
                random_seed=seed,
                store=store,
                progressbar=not quiet,
                client=client,
                blocks=blocks,
                unstored=None if unstored is None else unstored.value,
                dtype=dtype.value,
                executor=executor.value,
            )
        print_run(tree, store, as_json)
