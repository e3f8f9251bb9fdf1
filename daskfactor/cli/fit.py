"""``daskfactor fit``, ``estimate-cost``, ``particles``, ``resume`` and ``select-rank``."""

import re
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from typer import Option

import daskfactor as dfac
from daskfactor.cli import options as o
from daskfactor.cli.output import write
from daskfactor.cli.show import summary_of
from daskfactor.errors import OptionError
from daskfactor.publish import check_free

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table


class Model(o.Command):
    """Options for the model of the data and the sampler.

    Parameters
    ----------
    n_components
        Number K of components; auto starts with many and removes those that the data do not need.
    model
        Model of the data: tweedie for non-negative values, negative-binomial for overdispersed
        counts, gaussian for real values, with biases.
    beta
        Power of the likelihood (tweedie): 1 for counts, 2 Gaussian, 0 gamma, 0.5 in between; by
        default 1.
    dispersion
        Dispersion of the model. By default, tweedie uses 1 for counts and estimates it for other
        data, and negative-binomial samples it; column samples one for each column.
    row_covariates
        Covariates of the rows: a table with one line of numbers per row of the matrix.
    column_covariates
        Covariates of the columns, as for --row-covariates.
    sampler
        Sampler: auto (chosen by model, size and counts), blockhmc (exact, for any data), gibbs
        (exact, for counts and for gaussian), sghmc (with momentum, for large data), psgld (without
        momentum), psgrrld (less bias than psgld at 1.5 times the work), langevin or sgld (for
        comparison).
    """

    verbs: ClassVar = {"sample": "draws tune chains thin init starts keep monitor"}

    n_components: o.Rank
    model: Literal["tweedie", "negative-binomial", "gaussian"] = "tweedie"
    beta: float | None = None
    dispersion: o.Dispersion = None
    row_covariates: str | None = None
    column_covariates: str | None = None
    sampler: o.Sampler = "auto"

    def factor_model(self) -> Any:
        """Return the model."""
        names = {"tweedie": "beta", "tweedie or negative-binomial": "dispersion"}
        options = self.model_options(self.model, names)
        files = {"covariates_w": self.row_covariates, "covariates_h": self.column_covariates}
        options |= {name: o.read_numbers(file) for name, file in files.items() if file is not None}
        models = {"gaussian": dfac.GaussianMF, "negative-binomial": dfac.NegativeBinomialNMF}
        return models.get(self.model, dfac.TweedieNMF)(self.n_components, **options)


class Fit(Model, o.WeightedMatrix, o.OnDevice, o.Seeded):
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

    verbs: ClassVar = {"as_blocks": "balance allow_empty dtype"}

    store: str
    overwrite: bool = False

    def __call__(self) -> o.Answer:
        """Fit the model."""
        from daskfactor.inference.session import blocks_for
        from daskfactor.runs.store import check_place

        monitor = self.arguments("sample")["monitor"]
        if monitor not in (None, "missing"):
            raise OptionError(f"--monitor must be 'missing', got {monitor!r}")
        model, reading = self.factor_model(), self.reading()
        check_place(self.store, self.overwrite)  # before reading the data, which may take long
        reading["allow_empty"] |= model.covariates != (None, None)
        data = blocks_for(model, self.input, **reading)
        with closing(data), self.running(self.store) as options:
            options |= {"store": self.store, "overwrite": self.overwrite}
            tree = dfac.sample(data, model, self.sampler, **options)
        return summary_of(tree, self.store)


class Hardware(o.Command):
    """Options for the machines and the network of a planned run.

    Parameters
    ----------
    store
        Include the store that the run writes.
    workers
        Number of worker processes; by default 1.
    threads
        Number of threads per worker; by default the cores of this machine.
    network
        Network bandwidth of a worker, such as '10 Gbit/s'.
    block_seconds
        Seconds per update of the largest block, as a run on a cluster reports.
    """

    panel = "Hardware"
    verbs: ClassVar = {"sample": "executor"}

    store: bool = True
    workers: int | None = None
    threads: int | None = None
    network: str | None = None
    block_seconds: float | None = None


class EstimateCost(Model, o.WeightedMatrix, Hardware):
    """Estimate the memory, disk space, tasks and time of a fit with the same options.

    For several workers, also estimate the network traffic, and the number of workers from which
    on the network limits the speed. Entries are read only if the sizes cannot be known otherwise.

        daskfactor estimate-cost counts.zarr -k 50

        daskfactor estimate-cost counts.zarr -k 50 --workers 16 --threads 8 --network "10 Gbit/s"
    """

    verbs: ClassVar = {"as_blocks": "balance dtype memory_limit"}

    def __call__(self) -> o.Answer:
        """Estimate the cost."""
        cost = dfac.estimate_cost(
            self.input,
            self.factor_model(),
            self.sampler,
            store=self.store or None,
            workers=self.workers,
            lanes=self.threads,
            network=self.network,
            block_seconds=self.block_seconds,
            **self.arguments("sample"),
            **self.reading(),
        )
        return asdict(cost), str(cost)


class Particles(o.Matrix, o.Seeded):
    """Find many good factorizations of a matrix, and weight them.

    Each particle is the result of an optimization from one of many diverse starts; the weights
    are those under which the particles are closest to the posterior. After the pilot runs, resume
    continues an interrupted run.

        daskfactor particles counts.csv --store modes.zarr -k 10

        daskfactor info modes.zarr --diagnose

    Parameters
    ----------
    beta
        Divergence: 2 for squared differences, 1 for counts, 0 for ratios.
    threshold
        Largest objective of a good factorization; by default from pilot runs.
    start
        Starting points of the optimizations.
    max_iter
        Maximum number of iterations per start; by default 200 or 300.
    """

    verbs: ClassVar = {"stein_posterior": "particles pilot", "as_blocks": "dtype"}

    store: str
    n_components: int
    beta: float = 2.0
    threshold: float | None = None
    start: Literal["q-transform", "random", "nndsvdar"] = "q-transform"
    max_iter: int | None = None
    overwrite: bool = False

    def __call__(self) -> o.Answer:
        """Compute the particles."""
        from daskfactor.runs.store import check_place

        threshold: Any = "auto" if self.threshold is None else self.threshold
        model = dfac.SILFNMF(self.n_components, beta=self.beta, threshold=threshold)
        method = dfac.Ensemble(start=self.start.replace("-", "_"), max_iter=self.max_iter)
        check_place(self.store, self.overwrite)
        data = dfac.as_blocks(self.input, **self.reading())
        with closing(data), self.running(self.store) as options:
            options |= {"store": self.store, "overwrite": self.overwrite}
            options |= self.arguments("stein_posterior")
            tree = dfac.stein_posterior(data, model, method, **options)
        return summary_of(tree, self.store)


class Resume(o.OnDevice):
    """Resume an interrupted run, or add draws to a finished one.

    The draws are those of an uninterrupted run. Without --draws, the planned draws are finished.

        daskfactor resume run.zarr

        daskfactor resume run.zarr --draws 1000
    """

    verbs: ClassVar = {"resume": "draws V"}

    run: o.RunArgument

    def __call__(self) -> o.Answer:
        """Resume the run."""
        with self.running(self.run, new=False) as options:
            tree = dfac.resume(self.run, **self.arguments("resume"), **options)
        return summary_of(tree, self.run)


class SelectRank(o.Matrix, o.Seeded):
    """Compare numbers of components by held-out cells and by log evidence.

    For the tweedie model, thermodynamic integration computes the evidence and its errors. It runs
    where held-out cells do not decide between ranks, or at every rank with --temperatures, --draws,
    --tune or --held-out 0. For the allocation model, particles compute the evidence, in a time
    proportional to the sum of the counts.

        daskfactor select-rank counts.csv --ranks 1:10

        daskfactor select-rank counts.csv --model allocation --concentration 10

        daskfactor select-rank data.npz:V --ranks 5,10,20,40 --held-out 0 -o ranks.png

    Parameters
    ----------
    ranks
        Numbers of components: FIRST:LAST (inclusive) or a list such as 2,4,8.
    model
        Model of the data: tweedie, or allocation for sparse counts as tokens.
    beta
        Power of the likelihood (tweedie): 1 for counts, 2 Gaussian, 0 gamma, 0.5 in between; by
        default 1.
    concentration
        Pseudo-counts in each table (allocation); by default 1.
    bound
        Compute a variational lower bound (allocation), for many thousands of counts.
    dispersion
        Dispersion (tweedie); by default 1 for counts, estimated for other data.
    held_out
        Fraction of cells to hold out and predict (tweedie); by default 0.1, 0 for none.
    temperatures
        Number of temperatures (tweedie); by default 10.
    draws
        Number of draws at the full likelihood (tweedie).
    tune
        Number of tuning cycles per temperature (tweedie).
    output
        File to write: a figure (.png, .pdf, .svg), or the table (.nc) for report.
    """

    ranks: str = "1:10"
    model: Literal["tweedie", "allocation"] = "tweedie"
    beta: float | None = None
    concentration: float | None = None
    bound: bool = False
    dispersion: float | None = None
    held_out: Annotated[float | None, Option(min=0.0, max=0.9)] = None
    temperatures: Annotated[int | None, Option(min=2)] = None
    draws: Annotated[int | None, Option(min=10)] = None
    tune: int | None = None
    output: Path | None = None
    overwrite: bool = False

    def __call__(self) -> o.Answer:
        """Compare the ranks."""
        ranks, output = _parse_ranks(self.ranks), self.output
        if output is not None:
            check_free(output, self.overwrite)
        model, method, share = self._model_and_method(ranks[0])
        with self.running() as running:
            options = self.reading() | running
            table = dfac.select_rank(self.input, model, ranks, method, share, **options)
        if output is not None and output.suffix == ".nc":
            write(table, str(output), self.overwrite)
        elif output is not None:
            dfac.plots.plot_ranks(table, output, self.overwrite)
        values = {str(name): table[name].values for name in ("rank", *table)} | table.attrs
        paths = [] if output is None else [f"wrote {output}"]
        return values, _rank_table(table), table.attrs["verdict"], *paths

    def _model_and_method(self, rank: int) -> tuple[Any, Any, Any]:
        """Return the model with a rank, the method (None: automatic) and the held-out share."""
        names = {
            "tweedie": "beta dispersion held_out temperatures draws tune",
            "allocation": "concentration bound",
        }
        options = self.model_options(self.model, names)
        share = options.pop("held_out", "auto")
        if self.model == "allocation":
            bound = options.pop("bound", False)
            method: Any = dfac.VariationalBayes() if bound else dfac.SequentialMonteCarlo()
            tables = dfac.AllocationModel.nmf(rank, **{"concentration": 1.0, **options})
            return tables, method, share
        path = {name: options.pop(name) for name in names["tweedie"].split()[3:] if name in options}
        model = dfac.TweedieNMF(rank, **{"beta": 1.0, **options})
        return model, dfac.ThermodynamicIntegration(**path) if path else None, share


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
    """Return the results at each rank as a table, without columns that are 0 or empty."""
    columns = {
        "rank": ("rank", "d"),
        "log_evidence": ("lower bound" if "bound" in table.attrs else "log evidence", ".2f"),
        "standard_error": ("± Monte Carlo", ".2f"),
        "discretization_error": ("± temperatures", ".2f"),
        "seconds": ("seconds", ".2f"),
        "held_out_log_score": ("held-out score", ".4f"),
        "held_out_difference_error": ("± vs. best", ".4f"),
    }
    filled = [name for name in columns if name in table and table[name].fillna(0).any()]
    columns = {name: columns[name] for name in ("rank", *filled)}
    rows = [
        [
            f"{table[name].values[row]:{form}}".replace("nan", "–")
            for name, (_, form) in columns.items()
        ]
        for row in range(table.sizes["rank"])
    ]
    return o.comparison([title for title, _ in columns.values()], rows, str(table.attrs["best"]))
