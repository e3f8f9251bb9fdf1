"""``daskfactor fit``, ``estimate-cost``, ``particles``, ``resume`` and ``select-rank``."""

import re
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from typer import Option

import daskfactor as dfac
from daskfactor.cli import options as o
from daskfactor.cli.output import write
from daskfactor.cli.show import summary_of
from daskfactor.cli.verb_options import VerbOptions
from daskfactor.errors import OptionError
from daskfactor.publish import check_free

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options for the model of the data."""

    model: Annotated[
        Literal["tweedie", "negative-binomial", "gaussian"],
        Option(
            help="Model of the data: tweedie for non-negative values, negative-binomial for "
            "overdispersed counts, gaussian for real values, with biases."
        ),
    ] = "tweedie"
    beta: o.Beta = None
    dispersion: o.ModelDispersion = None
    row_covariates: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Covariates of the rows: a table with one line of numbers per row of the matrix.",
        ),
    ] = None
    column_covariates: Annotated[
        str | None,
        Option(metavar="FILE", help="Covariates of the columns, as for --row-covariates."),
    ] = None

    def model_with(self, n_components: Any) -> Any:
        """Return the model with a number of components."""
        options = o.options_of_model(
            self.model,
            {
                "tweedie": {"beta": self.beta},
                "tweedie or negative-binomial": {"dispersion": self.dispersion},
            },
        )
        files = {"covariates_w": self.row_covariates, "covariates_h": self.column_covariates}
        for name, file in files.items():
            if file is not None:
                from daskfactor.data.opening import load
                from daskfactor.data.tables import ReadOptions

                options[name] = load(file, ReadOptions(table=False))
        models = {"gaussian": dfac.GaussianMF, "negative-binomial": dfac.NegativeBinomialNMF}
        return models.get(self.model, dfac.TweedieNMF)(n_components, **options)


CHAINS: Final = VerbOptions(
    "sample", "draws", "tune", "chains", "thin", "init", "starts", "keep", "monitor"
)
Sampler = Annotated[
    Any,
    Option(
        parser=o.parse_sampler,
        metavar="NAME",
        help="Sampler: auto (chosen by model, size and counts), blockhmc (exact, for any data), "
        "gibbs (exact, for counts and for gaussian), sghmc (with momentum, for large data), psgld "
        "(without momentum), psgrrld (less bias than psgld at 1.5 times the work), "
        "langevin or sgld (for comparison).",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Options for the machines and the network of a planned run."""

    panel: ClassVar = "Hardware"

    store: Annotated[
        bool, Option("--store/--no-store", help="Include the store that the run writes.")
    ] = True
    executor: Annotated[o.Arguments, o.EXECUTOR]
    workers: Annotated[
        int | None, Option(min=1, help="Number of worker processes; by default 1.")
    ] = None
    threads: Annotated[
        int | None,
        Option(min=1, help="Number of threads per worker; by default the cores of this machine."),
    ] = None
    network: Annotated[
        str | None,
        Option(metavar="RATE", help="Network bandwidth of a worker, such as '10 Gbit/s'."),
    ] = None
    block_seconds: Annotated[
        float | None,
        Option(help="Seconds per update of the largest block, as a run on a cluster reports."),
    ] = None

    def arguments(self) -> o.Arguments:
        """Return the options as arguments of `estimate_cost`."""
        options = asdict(self) | self.executor
        return options | {"store": self.store or None, "lanes": options.pop("threads")}


def fit(
    matrix: o.WeightedMatrix,
    execution: o.SeededDeviceExecution,
    store: o.Store,
    n_components: o.Rank,
    model: ModelOptions,
    chains: Annotated[o.Arguments, CHAINS],
    blocks: Annotated[o.Arguments, VerbOptions("as_blocks", "balance", "allow_empty", "dtype")],
    sampler: Sampler = "auto",
    overwrite: o.Overwrite = False,
) -> o.Answer:
    """Sample the factors of a matrix from their posterior and write them to a store.

    NaN, empty fields and NA are missing cells: they are ignored by the fit and can be predicted.
    After Ctrl-C or SIGTERM, resume continues from the store.

        daskfactor fit counts.csv --store run.zarr -k 10

        daskfactor fit counts.csv --store run.zarr -k auto

        daskfactor fit data.npz:V --store run.zarr -k 20 --beta 2 --chains 4

        daskfactor fit cube.nc:radiance --store run.zarr -k 8 --monitor missing --keep moments

        daskfactor fit cells.h5ad:counts --store run.zarr -k 10 --mask-var highly_variable

        daskfactor fit big.zarr --store run.zarr -k 50 --scheduler tcp://host:8786

        daskfactor fit ratings.csv --store run.zarr -k 20 --model gaussian --unstored missing
        --rows user --columns film --values stars
    """
    from daskfactor.inference.session import blocks_for
    from daskfactor.results.store import check_place

    if chains["monitor"] not in (None, "missing"):
        raise OptionError(f"--monitor must be 'missing', got {chains['monitor']!r}")
    factor_model = model.model_with(n_components)
    check_place(store, overwrite)  # before reading the data, which may take long
    blocks["allow_empty"] |= factor_model.covariates != (None, None)
    data = blocks_for(factor_model, matrix.input, **blocks, **matrix.arguments())
    with closing(data), execution.running(store) as running:
        options = chains | {"store": store, "overwrite": overwrite} | running
        tree = dfac.sample(data, factor_model, sampler, **options)
    return summary_of(tree, store)


def estimate_cost(
    matrix: o.WeightedMatrix,
    n_components: o.Rank,
    model: ModelOptions,
    chains: Annotated[o.Arguments, CHAINS],
    blocks: Annotated[o.Arguments, VerbOptions("as_blocks", "balance", "dtype", "memory_limit")],
    hardware: Hardware,
    sampler: Sampler = "auto",
) -> o.Answer:
    """Estimate the memory, disk space, tasks and time of a fit with the same options.

    For several workers, also estimate the network traffic, and the number of workers from which
    on the network limits the speed. Entries are read only if the sizes cannot be known otherwise.

        daskfactor estimate-cost counts.zarr -k 50

        daskfactor estimate-cost counts.zarr -k 50 --workers 16 --threads 8 --network "10 Gbit/s"
    """
    cost = dfac.estimate_cost(
        matrix.input,
        model.model_with(n_components),
        sampler,
        **blocks,
        **hardware.arguments(),
        **chains,
        **matrix.arguments(),
    )
    return asdict(cost), str(cost)


def particles(
    matrix: o.Matrix,
    execution: o.SeededExecution,
    store: o.Store,
    n_components: o.Components,
    pilots: Annotated[
        o.Arguments,
        VerbOptions("stein_posterior", "particles", "pilot"),
    ],
    blocks: Annotated[o.Arguments, VerbOptions("as_blocks", "dtype")],
    beta: Annotated[
        float, Option(help="Divergence: 2 for squared differences, 1 for counts, 0 for ratios.")
    ] = 2.0,
    threshold: Annotated[
        float | None,
        Option(help="Largest objective of a good factorization; by default from pilot runs."),
    ] = None,
    start: Annotated[
        Literal["q-transform", "random", "nndsvdar"],
        Option(help="Starting points of the optimizations."),
    ] = "q-transform",
    max_iter: Annotated[
        int | None,
        Option(min=1, help="Maximum number of iterations per start; by default 200 or 300."),
    ] = None,
    overwrite: o.Overwrite = False,
) -> o.Answer:
    """Find many good factorizations of a matrix, and weight them.

    Each particle is the result of an optimization from one of many diverse starts; the weights
    are those under which the particles are closest to the posterior. After the pilot runs, resume
    continues an interrupted run.

        daskfactor particles counts.csv --store modes.zarr -k 10

        daskfactor info modes.zarr --diagnose
    """
    from daskfactor.results.store import check_place

    model = dfac.SILFNMF(
        n_components, beta=beta, threshold="auto" if threshold is None else threshold
    )
    method = dfac.Ensemble(start=start.replace("-", "_"), max_iter=max_iter)
    check_place(store, overwrite)
    data = dfac.as_blocks(matrix.input, **blocks, **matrix.arguments())
    with closing(data), execution.running(store) as options:
        tree = dfac.stein_posterior(
            data,
            model,
            method,
            store=store,
            overwrite=overwrite,
            **pilots,
            **options,
        )
    return summary_of(tree, store)


def resume(
    run: o.Run,
    execution: o.DeviceExecution,
    changes: Annotated[o.Arguments, VerbOptions("resume", "draws", "V")],
) -> o.Answer:
    """Resume an interrupted run, or add draws to a finished one.

    The draws are those of an uninterrupted run. Without --draws, the planned draws are finished.

        daskfactor resume run.zarr

        daskfactor resume run.zarr --draws 1000
    """
    with execution.running(run, new=False) as running:
        tree = dfac.resume(run, **changes, **running)
    return summary_of(tree, run)


def select_rank(
    matrix: o.Matrix,
    execution: o.SeededExecution,
    ranks: Annotated[
        str, Option(help="Numbers of components: FIRST:LAST (inclusive) or a list such as 2,4,8.")
    ] = "1:10",
    model: Annotated[
        Literal["tweedie", "allocation"],
        Option(help="Model of the data: tweedie, or allocation for sparse counts as tokens."),
    ] = "tweedie",
    beta: o.Beta = None,
    concentration: Annotated[
        float | None,
        Option(help="Pseudo-counts in each table (allocation); by default 1."),
    ] = None,
    bound: Annotated[
        bool,
        Option(
            "--bound",
            help="Compute a variational lower bound (allocation), for many thousands of counts.",
        ),
    ] = False,
    dispersion: o.Dispersion = None,
    held_out: Annotated[
        float | None,
        Option(
            min=0.0,
            max=0.9,
            help="Fraction of cells to hold out and predict (tweedie); by default 0.1, 0 for none.",
        ),
    ] = None,
    temperatures: Annotated[
        int | None,
        Option(min=2, help="Number of temperatures (tweedie); by default 10."),
    ] = None,
    draws: Annotated[
        int | None,
        Option(min=10, help="Number of draws at the full likelihood (tweedie)."),
    ] = None,
    tune: Annotated[
        int | None,
        Option(min=0, help="Number of tuning cycles per temperature (tweedie)."),
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            help="File to write: a figure (.png, .pdf, .svg), or the table (.nc) for report.",
        ),
    ] = None,
    overwrite: o.Overwrite = False,
) -> o.Answer:
    """Compare numbers of components by held-out cells and by log evidence.

    For the tweedie model, thermodynamic integration computes the evidence and its errors. It runs
    where held-out cells do not decide between ranks, or at every rank with --temperatures, --draws,
    --tune or --held-out 0. For the allocation model, particles compute the evidence, in a time
    proportional to the sum of the counts.

        daskfactor select-rank counts.csv --ranks 1:10

        daskfactor select-rank counts.csv --model allocation --concentration 10

        daskfactor select-rank data.npz:V --ranks 5,10,20,40 --held-out 0 -o ranks.png
    """
    numbers = _parse_ranks(ranks)
    if output is not None:
        check_free(output, overwrite)
    options = o.options_of_model(
        model,
        {
            "tweedie": {
                "beta": beta,
                "dispersion": dispersion,
                "held_out": held_out,
                "temperatures": temperatures,
                "draws": draws,
                "tune": tune,
            },
            "allocation": {"concentration": concentration, "bound": bound or None},
        },
    )
    factor_model: Any
    method: Any
    if model == "tweedie":
        factor_model = dfac.TweedieNMF(
            numbers[0], beta=options.get("beta", 1.0), dispersion=options.get("dispersion", "auto")
        )
        method = None  # compute the evidence only where it is needed
        if any(option is not None for option in (temperatures, draws, tune)):
            method = dfac.ThermodynamicIntegration(temperatures or 10, draws=draws, tune=tune)
    else:
        factor_model = dfac.AllocationModel.nmf(
            numbers[0], concentration=options.get("concentration", 1.0)
        )
        method = dfac.VariationalBayes() if bound else dfac.SequentialMonteCarlo()
    with execution.running() as running:
        table = dfac.select_rank(
            matrix.input,
            factor_model,
            numbers,
            method,
            options.get("held_out", "auto"),
            **matrix.arguments(),
            **running,
        )
    if output is not None and output.suffix == ".nc":
        write(table, str(output), overwrite)
    elif output is not None:
        dfac.plots.plot_ranks(table, output, overwrite)
    values = {str(name): table[name].values for name in ("rank", *table)} | table.attrs
    paths = [] if output is None else [f"wrote {output}"]
    return values, _rank_table(table), table.attrs["verdict"], *paths


def _parse_ranks(text: str) -> list[int]:
    """Parse ``FIRST:LAST`` or a list of numbers."""
    span = re.fullmatch(r"([1-9]\d*):(\d+)", text)
    if span is not None and int(span[1]) <= int(span[2]):
        return list(range(int(span[1]), int(span[2]) + 1))
    if re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        return [int(number) for number in text.split(",")]
    raise OptionError(
        f"--ranks must be FIRST:LAST or a list such as 2,4,8, each at least 1, got {text!r}"
    )


def _rank_table(table: "xr.Dataset") -> "Table":
    """Return the results at each rank as a table, without errors that are 0 at all ranks."""
    columns = {
        "rank": ("rank", "d"),
        "log_evidence": ("lower bound" if "bound" in table.attrs else "log evidence", ".2f"),
        "standard_error": ("± Monte Carlo", ".2f"),
        "discretization_error": ("± temperatures", ".2f"),
        "seconds": ("seconds", ".2f"),
        "held_out_log_score": ("held-out score", ".4f"),
        "held_out_difference_error": ("± vs. best", ".4f"),
    }
    for name in ("standard_error", "discretization_error"):
        if not float(table[name].max()) > 0:
            del columns[name]
    if table["log_evidence"].isnull().all():
        del columns["log_evidence"]
    columns = {name: column for name, column in columns.items() if name in table.variables}
    rows = [
        [
            f"{table[name].values[row]:{form}}".replace("nan", "–")
            for name, (_, form) in columns.items()
        ]
        for row in range(table.sizes["rank"])
    ]
    return o.comparison([title for title, _ in columns.values()], rows, str(table.attrs["best"]))
