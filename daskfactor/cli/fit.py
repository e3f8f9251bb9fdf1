"""``daskfactor fit``, ``particles``, ``resume`` and ``select-rank``: what takes long."""

import re
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

import daskfactor as dfac
from daskfactor.cli import options as o
from daskfactor.cli.show import summary_of
from daskfactor.errors import OptionError

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table


def _read(text: str) -> Any:
    """The matrix that an argument names."""
    from daskfactor.data.files import read_matrix  # NumPy and SciPy would make --help slow

    return read_matrix(text)


def fit(
    input: o.Input,  # noqa: A002 - the name that the help shows
    store: o.Store,
    components: o.Rank,
    model: Annotated[
        Literal["tweedie", "negative-binomial", "gaussian"],
        Option(
            help="tweedie: non-negative; negative-binomial: the same for counts that vary more "
            "than Poisson's; gaussian: real-valued, with biases."
        ),
    ] = "tweedie",
    beta: o.Beta = None,
    dispersion: o.OwnDispersion = None,
    row_covariates: Annotated[
        str | None, Option(metavar="FILE", help="A row of numbers for each row.")
    ] = None,
    column_covariates: Annotated[
        str | None, Option(metavar="FILE", help="A row of numbers for each column.")
    ] = None,
    draws: Annotated[int, Option(min=1, help="Draws per chain.")] = 500,
    tune: Annotated[int, Option(min=0, help="Cycles before the first draw.")] = 500,
    chains: Annotated[int, Option(min=1, help="Independent chains.")] = 1,
    thin: Annotated[int, Option(min=1, help="Cycles per draw.")] = 1,
    sampler: Annotated[
        Any,
        Option(
            parser=o.sampler_named,
            metavar="NAME",
            help="auto: by model, size and counts; or blockhmc: exact, for any data; gibbs: exact, "
            "for counts and for gaussian; sghmc: with momentum, for large data; psgld: without; "
            "psgrrld: its bias is less, for half as much work again; hmc: exact, for small data; "
            "langevin, sgld: for comparison.",
        ),
    ] = "auto",
    init: Annotated[
        str,
        Option(
            metavar="KIND|RUN",
            help="Where chains begin: multiplicative, random, q-transform, nndsvd, nndsvdar, or "
            "the store of a run, whose last draws are taken.",
        ),
    ] = "auto",
    starts: Annotated[
        int, Option(min=1, help="Short starts of each chain, of which the best goes on.")
    ] = 1,
    blocks: o.Blocks = None,
    unstored: o.Meaning = None,
    balance: o.Balance = False,
    allow_empty: Annotated[
        bool, Option("--allow-empty", help="Accept rows and columns with nothing observed.")
    ] = False,
    seed: o.Seed = 0,
    dtype: o.Arithmetic = "float32",
    executor: o.Executor = "auto",
    cluster: o.Cluster = None,
    keep: Annotated[
        o.Keep, Option(help="All draws, only means and variances, or what fits 1 GiB.")
    ] = "auto",
    monitor: Annotated[
        str | None, Option(help="'missing': gather mean and variance of every missing cell.")
    ] = None,
    overwrite: o.Overwrite = False,
    quiet: o.Quiet = False,
) -> o.Answer:
    """Draw factors of a matrix from their posterior and write them to a store.

    NaN, empty fields and NA are missing cells: they are left out of the fit, and can be
    predicted. Ctrl-C loses nothing that is in the store.

        daskfactor fit counts.csv --store run.zarr -k 10

        daskfactor fit counts.csv --store run.zarr -k auto

        daskfactor fit data.npz:V --store run.zarr -k 20 --beta 2 --chains 4

        daskfactor fit cube.nc:radiance --store run.zarr -k 8 --monitor missing --keep moments
    """
    if monitor not in (None, "missing"):
        raise OptionError(f"--monitor takes only 'missing', got {monitor!r}")
    asked = {"beta": beta, "dispersion": dispersion}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    owners = {"beta": ("tweedie",), "dispersion": ("tweedie", "negative-binomial")}
    for name, value in given.items():
        if model not in owners[name]:
            owner = " or ".join(owners[name])
            raise OptionError(f"--{name} belongs to --model {owner}, got {value} with {model}")
    sides = {"covariates_w": row_covariates, "covariates_h": column_covariates}
    linked = {name: _read(file) for name, file in sides.items() if file is not None}
    source = _read(input)
    law: Any
    if model == "gaussian":
        law = dfac.GaussianMF(components, **linked)
    elif model == "negative-binomial":
        law = dfac.NegativeBinomialNMF(components, **given, **linked)
    else:
        law = dfac.TweedieNMF(components, **given, **linked)
    empty = allow_empty or bool(linked)
    data = dfac.as_blocks(
        source, blocks, unstored=unstored, balance=balance, allow_empty=empty, dtype=dtype
    )
    with closing(data), o.running(store, quiet, executor, cluster) as options:
        tree = dfac.sample(
            data,
            law,
            sampler,
            draws=draws,
            tune=tune,
            chains=chains,
            thin=thin,
            init=init,
            starts=starts,
            random_seed=seed,
            keep=keep,
            monitor=monitor,
            store=store,
            overwrite=overwrite,
            **options,
        )
    return summary_of(tree, store)


def particles(
    input: o.Input,  # noqa: A002 - the name that the help shows
    store: o.Store,
    components: o.Components,
    count: Annotated[int, Option("--particles", "-m", min=1, help="How many.")] = 50,
    beta: Annotated[
        float, Option(help="Divergence: 2 squared differences, 1 counts, 0 ratios.")
    ] = 2.0,
    threshold: Annotated[
        float | None,
        Option(help="Objective up to which a factorization is good; left out: from pilot runs."),
    ] = None,
    pilot: Annotated[int, Option(min=1, help="Pilot runs.")] = 10,
    start: Annotated[
        Literal["q-transform", "random", "nndsvdar"], Option(help="Where optimisations start.")
    ] = "q-transform",
    max_iter: Annotated[
        int | None, Option(min=1, help="Iterations of each at most; 200 or 300.")
    ] = None,
    blocks: o.Blocks = None,
    unstored: o.Meaning = None,
    seed: o.Seed = 0,
    dtype: o.Arithmetic = "float32",
    executor: o.Executor = "auto",
    cluster: o.Cluster = None,
    overwrite: o.Overwrite = False,
    quiet: o.Quiet = False,
) -> o.Answer:
    """Find many good factorizations of a matrix, and the weight of each.

    Ends of optimisations from diverse starts, with the probability masses under which they
    are nearest to the posterior. What Ctrl-C cuts short after the pilot runs, resume finishes.

        daskfactor particles counts.csv --store modes.zarr -k 10

        daskfactor info modes.zarr --diagnose
    """
    source = _read(input)
    model = dfac.SILFNMF(
        components, beta=beta, threshold="auto" if threshold is None else threshold
    )
    method = dfac.Ensemble(
        start=start.replace("-", "_"),
        max_iter=max_iter,
    )
    data = dfac.as_blocks(source, blocks, unstored=unstored, dtype=dtype)
    with closing(data), o.running(store, quiet, executor, cluster) as options:
        tree = dfac.stein_posterior(
            data,
            model,
            method,
            particles=count,
            pilot=pilot,
            random_seed=seed,
            store=store,
            overwrite=overwrite,
            **options,
        )
    return summary_of(tree, store)


def resume(
    run: o.Run,
    draws: Annotated[
        int | None, Option(min=1, help="Draws to add; left out: finish what was planned.")
    ] = None,
    data: Annotated[
        str | None, Option(help="The input again, if the store says that it needs it.")
    ] = None,
    executor: o.Executor = "auto",
    cluster: o.Cluster = None,
    quiet: o.Quiet = False,
) -> o.Answer:
    """Go on with a run where it stopped: the draws that an unbroken run would have given.

    Without --draws it finishes what was planned; with it, it adds to what is there.

        daskfactor resume run.zarr

        daskfactor resume run.zarr --draws 1000
    """
    matrix = None if data is None else _read(data)
    with o.running(run, quiet, executor, cluster) as options:
        tree = dfac.resume(run, draws=draws, V=matrix, **options)
    return summary_of(tree, run)


def select_rank(
    input: o.Input,  # noqa: A002 - the name that the help shows
    ranks: Annotated[
        str, Option(help="FIRST:LAST, both included, or a list such as 2,4,8.")
    ] = "1:10",
    model: Annotated[
        Literal["tweedie", "allocation"],
        Option(help="tweedie: W H with a law of beta; allocation: sparse counts as tokens."),
    ] = "tweedie",
    beta: o.Beta = None,
    concentration: Annotated[
        float | None, Option(help="Of allocation: pseudo-counts in each table; 1 if left out.")
    ] = None,
    bound: Annotated[
        bool,
        Option(
            "--bound",
            help="Of allocation: a variational lower bound, for more than 1000s of counts.",
        ),
    ] = False,
    dispersion: o.Dispersion = None,
    held_out: Annotated[
        float | None,
        Option(
            min=0.0,
            max=0.9,
            help="Of tweedie: share of cells left out and predicted; 0 none, 0.1 if left out.",
        ),
    ] = None,
    temperatures: Annotated[
        int | None, Option(min=2, help="Of tweedie: steps of the ladder; 10 if left out.")
    ] = None,
    draws: Annotated[
        int | None, Option(min=10, help="Of tweedie: draws at the full likelihood.")
    ] = None,
    output: o.Picture = None,
    blocks: o.Blocks = None,
    unstored: o.Meaning = None,
    seed: o.Seed = 0,
    executor: o.Executor = "auto",
    cluster: o.Cluster = None,
    quiet: o.Quiet = False,
) -> o.Answer:
    """Compare numbers of components by their log evidence and by cells left out.

    Evidences come from thermodynamic integration, with both of their errors; of an
    allocation model from particles, in a time that follows the sum of the counts.

        daskfactor select-rank counts.csv --ranks 1:10

        daskfactor select-rank counts.csv --model allocation --concentration 10

        daskfactor select-rank data.npz:V --ranks 5,10,20,40 --held-out 0 -o ranks.png
    """
    numbers = _ranks(ranks)
    data = _read(input)
    asked = {"beta": beta, "dispersion": dispersion, "held_out": held_out, "draws": draws}
    asked |= {"temperatures": temperatures, "concentration": concentration, "bound": bound or None}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    for name in given:
        owner = "allocation" if name in ("concentration", "bound") else "tweedie"
        if owner != model:
            raise OptionError(
                f"--{name.replace('_', '-')} belongs to --model {owner}, got it with {model}; "
                "leave one of them out"
            )
    question: Any
    method: Any
    if model == "tweedie":
        question = dfac.TweedieNMF(
            numbers[0], beta=given.get("beta", 1.0), dispersion=given.get("dispersion", "auto")
        )
        method = dfac.ThermodynamicIntegration(
            temperatures=given.get("temperatures", 10), draws=draws
        )
    else:
        question = dfac.AllocationModel.nmf(
            numbers[0], concentration=given.get("concentration", 1.0)
        )
        method = dfac.VariationalBayes() if bound else dfac.SequentialMonteCarlo()
    with o.running(None, quiet, executor, cluster) as options:
        table = dfac.select_rank(
            data,
            question,
            numbers,
            method,
            given.get("held_out", "auto"),
            random_seed=seed,
            blocks=blocks,
            unstored=unstored,
            **options,
        )
    if output is not None:
        dfac.plots.plot_ranks(table, output)
    values = {str(name): table[name].values for name in ("rank", *table)} | table.attrs
    return values, _compared(table), table.attrs["verdict"]


def _ranks(text: str) -> list[int]:
    span = re.fullmatch(r"([1-9]\d*):(\d+)", text)
    if span is not None and int(span[1]) <= int(span[2]):
        return list(range(int(span[1]), int(span[2]) + 1))
    if re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        return [int(number) for number in text.split(",")]
    raise OptionError(
        f"--ranks is FIRST:LAST or a list such as 2,4,8, each at least 1, got {text!r}"
    )


def _compared(table: "xr.Dataset") -> "Table":
    """Lay out what was found at each rank; an error that is 0 at all of them is left out."""
    columns = {
        "rank": ("rank", "d"),
        "log_evidence": ("lower bound" if "bound" in table.attrs else "log evidence", ".2f"),
        "standard_error": ("± Monte Carlo", ".2f"),
        "discretization_error": ("± ladder", ".2f"),
        "seconds": ("seconds", ".2f"),
        "held_out_log_score": ("left out", ".4f"),
        "held_out_difference_error": ("± to the best", ".4f"),
    }
    for name in ("standard_error", "discretization_error"):
        if not float(table[name].max()) > 0:
            del columns[name]
    found = {name: how for name, how in columns.items() if name in table.variables}
    rows = [
        [f"{table[name].values[row]:{form}}" for name, (_, form) in found.items()]
        for row in range(table.sizes["rank"])
    ]
    return o.comparison([title for title, _ in found.values()], rows, str(table.attrs["best"]))
