"""``daskfactor fit`` and ``daskfactor resume``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from daskfactor.cli.inputs import read_input
from daskfactor.cli.options import (
    Blocks,
    Cluster,
    Components,
    Debug,
    ExecutorName,
    Input,
    Json,
    Keep,
    Meaning,
    ModelName,
    Precision,
    Quiet,
    Run,
    SamplerName,
    Seed,
    Store,
)
from daskfactor.cli.report import print_json, reporting
from daskfactor.errors import OptionError


def fit(
    input: Input,  # noqa: A002 - the name that the help shows
    store: Store,
    components: Components,
    model: Annotated[
        ModelName, typer.Option(help="tweedie: non-negative; gaussian: real-valued, with biases.")
    ] = ModelName.tweedie,
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
        SamplerName | None,
        typer.Option(
            help="psgld; psgrrld: less bias for half as much work again; gibbs: exact, for counts; "
            "hmc: exact, for small data; langevin, sgld: for comparison; sghmc: for gaussian.",
            show_default=False,
        ),
    ] = None,
    blocks: Blocks = None,
    unstored: Meaning = None,
    balance: Annotated[
        bool, typer.Option("--balance", help="Permute sparse rows and columns for even blocks.")
    ] = False,
    allow_empty: Annotated[
        bool,
        typer.Option("--allow-empty", help="Accept rows and columns with nothing observed."),
    ] = False,
    seed: Seed = 0,
    dtype: Annotated[Precision, typer.Option(help="Arithmetic.")] = Precision.float32,
    executor: Annotated[
        ExecutorName, typer.Option(help="Same draws from each.")
    ] = ExecutorName.auto,
    cluster: Cluster = None,
    keep: Annotated[
        Keep, typer.Option(help="All draws, only means and variances, or what fits 1 GiB.")
    ] = Keep.auto,
    monitor: Annotated[
        str | None,
        typer.Option(
            help="'missing': gather mean and variance of every missing cell.", show_default=False
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
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
        data = read_input(input)
        import daskfactor as dfac

        methods: dict[str, Callable[[], Any]] = {
            "psgld": dfac.PSGLD,
            "psgrrld": dfac.PSGRRLD,
            "gibbs": dfac.Gibbs,
            "hmc": dfac.HMC,
            "langevin": dfac.LangevinDynamics,
            "sgld": dfac.SGLD,
            "sghmc": dfac.SGHMC,
        }
        method = None if sampler is None else methods[sampler.value]()
        law: dfac.TweedieNMF | dfac.GaussianMF
        if model is ModelName.gaussian:
            if beta is not None:
                raise OptionError(f"--beta belongs to --model tweedie, got {beta:g} with gaussian")
            law = dfac.GaussianMF(components)
        else:
            law = dfac.TweedieNMF(components, beta=1.0 if beta is None else beta)
        with connected(cluster) as client:
            tree = dfac.sample(
                data,
                law,
                method,
                draws=draws,
                tune=tune,
                chains=chains,
                thin=thin,
                random_seed=seed,
                keep=keep.value,
                monitor=monitor,
                store=store,
                progressbar=not quiet,
                client=client,
                blocks=blocks,
                unstored=None if unstored is None else unstored.value,
                balance=balance,
                allow_empty=allow_empty,
                dtype=dtype.value,
                executor=executor.value,
            )
        print_run(tree, store, as_json)


def resume(
    run: Run,
    draws: Annotated[
        int | None,
        typer.Option(min=1, help="Draws to add; left out: finish what was planned."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="The input again, if the store says that it needs it."),
    ] = None,
    executor: Annotated[
        ExecutorName, typer.Option(help="Same draws from each.")
    ] = ExecutorName.auto,
    cluster: Cluster = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Go on with a run where it stopped: the draws that an unbroken run would have given.

    Without --draws it finishes what was planned; with it, it adds to what is there.

        daskfactor resume run.zarr

        daskfactor resume run.zarr --draws 1000
    """
    with reporting(debug, run):
        matrix = None if data is None else read_input(data)
        import daskfactor as dfac

        with connected(cluster) as client:
            tree = dfac.resume(
                run,
                draws=draws,
                V=matrix,
                progressbar=not quiet,
                client=client,
                executor=executor.value,
            )
        print_run(tree, run, as_json)


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """A client of the scheduler at an address; None without one."""
    if address is None:
        yield None
        return
    from daskfactor.executors.choice import connect

    client = connect(address)
    try:
        yield client
    finally:
        client.close()  # type: ignore[no-untyped-call]


def print_run(tree: object, store: str, as_json: bool) -> None:
    """What a run was and came to, as a table or as JSON."""
    import xarray as xr
    from rich.console import Console

    from daskfactor.cli.summary import run_summary, summary_table

    assert isinstance(tree, xr.DataTree)
    summary = run_summary(tree, store)
    if as_json:
        print_json(summary)
    else:
        Console().print(summary_table(summary))
