"""``daskfactor fit``, ``particles`` and ``resume``."""

from contextlib import closing
from typing import Annotated, Any, Literal

import typer

from daskfactor.cli import options as o
from daskfactor.cli.inputs import read_input
from daskfactor.cli.report import print_run, reporting
from daskfactor.errors import OptionError


def fit(
    input: o.Input,  # noqa: A002 - the name that the help shows
    store: o.Store,
    components: o.Components,
    model: Annotated[
        Literal["tweedie", "gaussian"],
        typer.Option(help="tweedie: non-negative; gaussian: real-valued, with biases."),
    ] = "tweedie",
    beta: Annotated[
        float | None,
        typer.Option(
            help="Of tweedie: 1 counts and intensities (the default), 2 Gaussian, 0 gamma, 0.5 "
            "between.",
            show_default=False,
        ),
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Draws per chain.")] = 500,
    tune: Annotated[int, typer.Option(min=0, help="Cycles before the first draw.")] = 500,
    chains: Annotated[int, typer.Option(min=1, help="Independent chains.")] = 1,
    thin: Annotated[int, typer.Option(min=1, help="Cycles per draw.")] = 1,
    sampler: Annotated[
        Any,
        typer.Option(
            parser=o.sampler_named,
            metavar="NAME",
            help="psgld; psgrrld: less bias for half as much work again; gibbs: exact, for counts; "
            "hmc: exact, for small data; langevin, sgld: for comparison; sghmc: for gaussian.",
            show_default=False,
        ),
    ] = None,
    blocks: o.Blocks = None,
    unstored: o.Meaning = None,
    balance: Annotated[
        bool, typer.Option("--balance", help="Permute sparse rows and columns for even blocks.")
    ] = False,
    allow_empty: Annotated[
        bool,
        typer.Option("--allow-empty", help="Accept rows and columns with nothing observed."),
    ] = False,
    seed: o.Seed = 0,
    dtype: o.Arithmetic = "float32",
    executor: o.Executor = "auto",
    cluster: o.Cluster = None,
    keep: Annotated[
        o.Keep, typer.Option(help="All draws, only means and variances, or what fits 1 GiB.")
    ] = "auto",
    monitor: Annotated[
        str | None,
        typer.Option(
            help="'missing': gather mean and variance of every missing cell.", show_default=False
        ),
    ] = None,
    overwrite: o.Overwrite = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Draw factors of a matrix from their posterior and write them to a store.

    NaN, empty fields and NA are missing cells: they are left out of the fit, and can be
    predicted. Ctrl-C loses nothing that is in the store.

        daskfactor fit counts.csv --store run.zarr -k 10

        daskfactor fit data.npz:V --store run.zarr -k 20 --beta 2 --chains 4

        daskfactor fit cube.nc:radiance --store run.zarr -k 8 --monitor missing --keep moments
    """
    with reporting(debug, store):
        if monitor not in (None, "missing"):
            raise OptionError(f"--monitor takes only 'missing', got {monitor!r}")
        if beta is not None and model == "gaussian":
            raise OptionError(f"--beta belongs to --model tweedie, got {beta:g} with gaussian")
        source = read_input(input)
        import daskfactor as dfac

        law: Any = (
            dfac.GaussianMF(components)
            if model == "gaussian"
            else dfac.TweedieNMF(components, beta=1.0 if beta is None else beta)
        )
        data = dfac.as_blocks(
            source,
            blocks,
            unstored=unstored,
            balance=balance,
            allow_empty=allow_empty,
            dtype=dtype,
        )
        with closing(data), o.connected(cluster) as client:
            tree = dfac.sample(
                data,
                law,
                sampler,
                draws=draws,
                tune=tune,
                chains=chains,
                thin=thin,
                random_seed=seed,
                keep=keep,
                monitor=monitor,
                store=store,
                overwrite=overwrite,
                progressbar=not quiet,
                client=client,
                executor=executor,
            )
        print_run(tree, store, as_json)


def particles(
    input: o.Input,  # noqa: A002 - the name that the help shows
    store: o.Store,
    components: o.Components,
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
        Literal["q-transform", "random", "nndsvdar"],
        typer.Option(help="Where optimisations start."),
    ] = "q-transform",
    max_iter: Annotated[
        int | None,
        typer.Option(min=1, help="Iterations of each at most; 200 or 300.", show_default=False),
    ] = None,
    blocks: o.Blocks = None,
    unstored: o.Meaning = None,
    seed: o.Seed = 0,
    dtype: o.Arithmetic = "float32",
    executor: o.Executor = "auto",
    cluster: o.Cluster = None,
    overwrite: o.Overwrite = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Find many good factorizations of a matrix, and the weight of each.

    Ends of optimisations from diverse starts, with the probability masses under which they
    are nearest to the posterior. What Ctrl-C cuts short after the pilot runs, resume finishes.

        daskfactor particles counts.csv --store modes.zarr -k 10

        daskfactor info modes.zarr --diagnose
    """
    with reporting(debug, store):
        source = read_input(input)
        import daskfactor as dfac

        model = dfac.SILFNMF(
            components, beta=beta, threshold="auto" if threshold is None else threshold
        )
        method = dfac.Ensemble(
            start=start.replace("-", "_"),  # type: ignore[arg-type]
            max_iter=max_iter,
        )
        data = dfac.as_blocks(source, blocks, unstored=unstored, dtype=dtype)
        with closing(data), o.connected(cluster) as client:
            tree = dfac.stein_posterior(
                data,
                model,
                method,
                particles=count,
                pilot=pilot,
                random_seed=seed,
                store=store,
                overwrite=overwrite,
                progressbar=not quiet,
                client=client,
                executor=executor,
            )
        print_run(tree, store, as_json)


def resume(
    run: o.Run,
    draws: Annotated[
        int | None,
        typer.Option(min=1, help="Draws to add; left out: finish what was planned."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="The input again, if the store says that it needs it."),
    ] = None,
    executor: o.Executor = "auto",
    cluster: o.Cluster = None,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Go on with a run where it stopped: the draws that an unbroken run would have given.

    Without --draws it finishes what was planned; with it, it adds to what is there.

        daskfactor resume run.zarr

        daskfactor resume run.zarr --draws 1000
    """
    with reporting(debug, run):
        matrix = None if data is None else read_input(data)
        import daskfactor as dfac

        with o.connected(cluster) as client:
            tree = dfac.resume(
                run,
                draws=draws,
                V=matrix,
                progressbar=not quiet,
                client=client,
                executor=executor,
            )
        print_run(tree, run, as_json)
