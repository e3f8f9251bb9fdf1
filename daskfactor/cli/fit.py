"""``daskfactor fit``, ``particles``, ``resume`` and ``select-rank``: what takes long."""

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
from daskfactor.cli.verb_options import Shows
from daskfactor.errors import OptionError
from daskfactor.publish import check_free

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Law:
    """The model that `fit` takes the data for."""

    model: Annotated[
        Literal["tweedie", "negative-binomial", "gaussian"],
        Option(
            help="tweedie: non-negative; negative-binomial: the same for counts that vary more "
            "than Poisson's; gaussian: real-valued, with biases."
        ),
    ] = "tweedie"
    beta: o.Beta = None
    dispersion: o.OwnDispersion = None
    row_covariates: Annotated[
        str | None, Option(metavar="FILE", help="A row of numbers for each row.")
    ] = None
    column_covariates: Annotated[
        str | None, Option(metavar="FILE", help="A row of numbers for each column.")
    ] = None

    def of(self, components: Any) -> Any:
        """Make the model."""
        given = o.belonging(
            self.model,
            {
                "tweedie": {"beta": self.beta},
                "tweedie or negative-binomial": {"dispersion": self.dispersion},
            },
        )
        sides = {"covariates_w": self.row_covariates, "covariates_h": self.column_covariates}
        for name, file in sides.items():
            if file is not None:
                from daskfactor.data.files import read_matrix
                from daskfactor.data.tables import ReadOptions

                given[name] = read_matrix(file, ReadOptions(table=False))
        kinds = {"gaussian": dfac.GaussianMF, "negative-binomial": dfac.NegativeBinomialNMF}
        return kinds.get(self.model, dfac.TweedieNMF)(components, **given)


CHAINS: Final = Shows(
    "sample", "draws", "tune", "chains", "thin", "init", "starts", "keep", "monitor"
)
Sampler = Annotated[
    Any,
    Option(
        parser=o.sampler_named,
        metavar="NAME",
        help="auto: by model, size and counts; or blockhmc: exact, for any data; gibbs: exact, "
        "for counts and for gaussian; sghmc: with momentum, for large data; psgld: without; "
        "psgrrld: its bias is less, for half as much work again; "
        "langevin, sgld: for comparison.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Where a run would happen, and what its network carries."""

    panel: ClassVar = "Where it would run"

    store: Annotated[bool, Option("--store/--no-store", help="Whether the run writes a store.")] = (
        True
    )
    executor: Annotated[o.Arguments, o.EXECUTOR]
    workers: Annotated[
        int | None, Option(min=1, help="Processes that share the work; 1 if left out.")
    ] = None
    threads: Annotated[
        int | None, Option(min=1, help="Threads of each; this machine's cores if left out.")
    ] = None
    network: Annotated[
        str | None, Option(metavar="RATE", help="What a worker sends at once, as '10 Gbit/s'.")
    ] = None
    block_seconds: Annotated[
        float | None, Option(help="Of an update of the largest block, as a run on a cluster tells.")
    ] = None

    def told(self) -> dict[str, Any]:
        """Give the options as arguments of Python."""
        given = asdict(self) | self.executor
        return given | {"store": self.store or None, "lanes": given.pop("threads")}


def fit(
    matrix: o.Weighed,
    place: o.SeededOnDevice,
    store: o.Store,
    n_components: o.Rank,
    law: Law,
    chains: Annotated[o.Arguments, CHAINS],
    blocks: Annotated[o.Arguments, Shows("as_blocks", "balance", "allow_empty", "dtype")],
    sampler: Sampler = "auto",
    overwrite: o.Overwrite = False,
) -> o.Answer:
    """Draw factors of a matrix from their posterior and write them to a store.

    NaN, empty fields and NA are missing cells: they are left out of the fit, and can be
    predicted. Ctrl-C and SIGTERM lose nothing that is in the store.

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
        raise OptionError(f"--monitor takes only 'missing', got {chains['monitor']!r}")
    model = law.of(n_components)
    check_place(store, overwrite)  # before what may take long to read
    blocks["allow_empty"] |= model.covariates != (None, None)
    data = blocks_for(model, matrix.input, **blocks, **matrix.told())
    with closing(data), place.running(store) as options:
        given = chains | {"store": store, "overwrite": overwrite} | options
        tree = dfac.sample(data, model, sampler, **given)
    return summary_of(tree, store)


def estimate_cost(
    matrix: o.Weighed,
    n_components: o.Rank,
    law: Law,
    chains: Annotated[o.Arguments, CHAINS],
    blocks: Annotated[o.Arguments, Shows("as_blocks", "balance", "dtype", "memory_limit")],
    place: Workers,
    sampler: Sampler = "auto",
) -> o.Answer:
    """Tell what a fit with the same options would take, before it is begun.

    Memory, disk, tasks and time; on several workers what these send each other, and from how
    many of them on the network is the limit. No entry is read where sizes are known without.

        daskfactor estimate-cost counts.zarr -k 50

        daskfactor estimate-cost counts.zarr -k 50 --workers 16 --threads 8 --network "10 Gbit/s"
    """
    cost = dfac.estimate_cost(
        matrix.input,
        law.of(n_components),
        sampler,
        **blocks,
        **place.told(),
        **chains,
        **matrix.told(),
    )
    return asdict(cost), str(cost)


def particles(
    matrix: o.Matrix,
    place: o.Seeded,
    store: o.Store,
    n_components: o.Components,
    pilots: Annotated[
        o.Arguments,
        Shows("stein_posterior", "particles", "pilot"),
    ],
    blocks: Annotated[o.Arguments, Shows("as_blocks", "dtype")],
    beta: Annotated[
        float, Option(help="Divergence: 2 squared differences, 1 counts, 0 ratios.")
    ] = 2.0,
    threshold: Annotated[
        float | None,
        Option(help="Objective up to which a factorization is good; left out: from pilot runs."),
    ] = None,
    start: Annotated[
        Literal["q-transform", "random", "nndsvdar"], Option(help="Where optimisations start.")
    ] = "q-transform",
    max_iter: Annotated[
        int | None, Option(min=1, help="Iterations of each at most; 200 or 300.")
    ] = None,
    overwrite: o.Overwrite = False,
) -> o.Answer:
    """Find many good factorizations of a matrix, and the weight of each.

    Ends of optimisations from diverse starts, with the probability masses under which they
    are nearest to the posterior. What Ctrl-C cuts short after the pilot runs, resume finishes.

        daskfactor particles counts.csv --store modes.zarr -k 10

        daskfactor info modes.zarr --diagnose
    """
    from daskfactor.results.store import check_place

    model = dfac.SILFNMF(
        n_components, beta=beta, threshold="auto" if threshold is None else threshold
    )
    method = dfac.Ensemble(start=start.replace("-", "_"), max_iter=max_iter)
    check_place(store, overwrite)
    data = dfac.as_blocks(matrix.input, **blocks, **matrix.told())
    with closing(data), place.running(store) as options:
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
    place: o.OnDevice,
    more: Annotated[o.Arguments, Shows("resume", "draws", "V")],
) -> o.Answer:
    """Go on with a run where it stopped: the draws that an unbroken run would have given.

    Without --draws it finishes what was planned; with it, it adds to what is there.

        daskfactor resume run.zarr

        daskfactor resume run.zarr --draws 1000
    """
    with place.running(run, new=False) as options:
        tree = dfac.resume(run, **more, **options)
    return summary_of(tree, run)


def select_rank(
    matrix: o.Matrix,
    place: o.Seeded,
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
    tune: Annotated[
        int | None, Option(min=0, help="Of tweedie: cycles of adaptation at each temperature.")
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            help="Picture to write (.png, .pdf, .svg), or the table (.nc) that report takes.",
        ),
    ] = None,
    overwrite: o.Overwrite = False,
) -> o.Answer:
    """Compare numbers of components by their log evidence and by cells left out.

    Evidences come from thermodynamic integration, with both of their errors, where cells left out
    do not decide between ranks; with --temperatures, --draws, --tune or --held-out 0 at every
    rank. Of an allocation model they come from particles, in a time that follows the sum of the
    counts.

        daskfactor select-rank counts.csv --ranks 1:10

        daskfactor select-rank counts.csv --model allocation --concentration 10

        daskfactor select-rank data.npz:V --ranks 5,10,20,40 --held-out 0 -o ranks.png
    """
    numbers = _ranks(ranks)
    if output is not None:
        check_free(output, overwrite)
    given = o.belonging(
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
    question: Any
    method: Any
    if model == "tweedie":
        question = dfac.TweedieNMF(
            numbers[0], beta=given.get("beta", 1.0), dispersion=given.get("dispersion", "auto")
        )
        method = None  # the evidence only where it is needed, unless something is said of it
        if any(own is not None for own in (temperatures, draws, tune)):
            method = dfac.ThermodynamicIntegration(temperatures or 10, draws=draws, tune=tune)
    else:
        question = dfac.AllocationModel.nmf(
            numbers[0], concentration=given.get("concentration", 1.0)
        )
        method = dfac.VariationalBayes() if bound else dfac.SequentialMonteCarlo()
    with place.running() as options:
        found = dfac.select_rank(
            matrix.input,
            question,
            numbers,
            method,
            given.get("held_out", "auto"),
            **matrix.told(),
            **options,
        )
    if output is not None and output.suffix == ".nc":
        write(found, str(output), overwrite)
    elif output is not None:
        dfac.plots.plot_ranks(found, output, overwrite)
    told = {str(name): found[name].values for name in ("rank", *found)} | found.attrs
    wrote = [] if output is None else [f"wrote {output}"]
    return told, _compared(found), found.attrs["verdict"], *wrote


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
    if table["log_evidence"].isnull().all():
        del columns["log_evidence"]
    found = {name: how for name, how in columns.items() if name in table.variables}
    rows = [
        [
            f"{table[name].values[row]:{form}}".replace("nan", "–")
            for name, (_, form) in found.items()
        ]
        for row in range(table.sizes["rank"])
    ]
    return o.comparison([title for title, _ in found.values()], rows, str(table.attrs["best"]))
