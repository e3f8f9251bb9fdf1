"""Options shared by several commands, single and in groups, and tables of results.

A group is a dataclass whose fields are options or `VerbOptions`. A command that has a parameter of
the type of a group offers all its options and receives them as one object, see
`daskfactor.cli.main.command`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import typer
from rich import box
from rich.table import Table
from typer import Argument, Option

from daskfactor.cli.verb_options import VerbOptions
from daskfactor.errors import DaskfactorError, OptionError
from daskfactor.markup import visible
from daskfactor.urls import is_url

Answer = tuple[Any, ...]
"""Result of a command: the values that ``--json`` prints, then texts or tables for people."""

Arguments = dict[str, Any]
"""Values of `VerbOptions` by the names of parameters."""
Keep = Literal["auto", "draws", "moments"]

Run = Annotated[
    str,
    Argument(metavar="RUN", help="Store of a run, such as run.zarr or s3://bucket/run."),
]
Input = Annotated[
    str,
    Argument(
        metavar="INPUT",
        help="Matrix to read: .npy, .npz (dense or scipy sparse), .csv, .tsv, .parquet, .zarr "
        "(also a store that convert wrote), netCDF or AnnData (.h5ad, .zarr). FILE:NAME selects "
        "one of several arrays, or a layer. A .csv, .tsv or .parquet may also be a table with one "
        "line per entry: row key, column key, value.",
    ),
]
Store = Annotated[
    str, Option(help="Store to write: a new directory, or a URL such as s3://bucket/run.")
]
Overwrite = Annotated[
    bool, Option("--overwrite", help="Replace an existing result once the new one is complete.")
]
Components = Annotated[int, Option("--components", "-k", min=1, help="Number K of components.")]


def _parse_rank(text: str) -> int | str:
    """Parse a number of components, or ``auto``."""
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"must be a whole number of at least 1, or auto, got {text!r}")
    return int(text)


Rank = Annotated[
    Any,
    Option(
        "--components",
        "-k",
        parser=_parse_rank,
        metavar="K|auto",
        help="Number K of components; auto starts with many and removes those that the data do "
        "not need.",
    ),
]
Beta = Annotated[
    float | None,
    Option(
        help="Power of the likelihood (tweedie): 1 for counts, 2 Gaussian, 0 gamma, 0.5 in "
        "between; by default 1."
    ),
]
Scheduler = Annotated[
    str | None,
    Option(
        metavar="ADDRESS",
        help="Address of a Dask scheduler whose workers run the computation, such as "
        "tcp://host:8786; tls:// uses the certificates of Dask's configuration "
        "(distributed.comm.tls).",
    ),
]
Cluster = Annotated[
    str | None,
    Option(
        metavar="local:N",
        help="Start N worker processes on this machine, and stop them after the run.",
    ),
]
Dispersion = Annotated[
    float | None,
    Option(help="Dispersion (tweedie); by default 1 for counts, estimated for other data."),
]
Seed = Annotated[
    int,
    Option(
        "--seed",
        min=0,
        help="Seed of the random numbers: the same seed, data and settings give the same draws.",
    ),
]
Picture = Annotated[
    Path | None,
    Option("--output", "-o", help="Image file to write (.png, .pdf, .svg)."),
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Hide the progress bar.")]
Json = Annotated[
    bool, Option("--json", help="Print the result as one JSON object, and nothing else.")
]
Debug = Annotated[bool, Option("--debug", help="Print the full traceback of an error.")]


def _number_or_word(text: str) -> float | str:
    """Parse a number; return other text, which the model checks, unchanged."""
    try:
        return float(text)
    except ValueError:
        return text


ModelDispersion = Annotated[
    Any,
    Option(
        "--dispersion",
        parser=_number_or_word,
        metavar="NUMBER|auto|column",
        help="Dispersion of the model. By default, tweedie uses 1 for counts and estimates it for "
        "other data, and negative-binomial samples it; column samples one for each column.",
    ),
]


def options_of_model(model: str, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the options that are not None.

    Parameters
    ----------
    model
        Name of the model.
    options
        Values of options by the names of the models that have them, such as ``"tweedie or
        gaussian"``.

    Raises
    ------
    OptionError
        If an option of another model is not None.
    """
    used = {}
    for models, values in options.items():
        for name, value in values.items():
            if value is None:
                continue
            if model not in models.split(" or "):
                raise OptionError(
                    f"--{name.replace('_', '-')} belongs to --model {models}, got {value} with "
                    f"--model {model}; leave one of them out"
                )
            used[name] = value
    return used


def parse_sampler(text: str) -> Any:
    """Return the sampler whose name starts with ``text``, ignoring case; return "auto" as it is."""
    if text.lower() == "auto":
        return "auto"
    from daskfactor.inference.base import Sampler
    from daskfactor.inference.registry import algorithms

    samplers = algorithms(Sampler)
    matches = [name for name in samplers if name.lower().startswith(text.lower())]
    matches = [name for name in matches if name.lower() == text.lower()] or matches
    if len(matches) != 1:
        raise typer.BadParameter(
            f"must be one of {', '.join(samplers)}, or the start of exactly one of these names, "
            f"got {text!r}"
        )
    return samplers[matches[0]]()


READING_PANEL: Final = "Reading the input"
READING: Final = VerbOptions(
    "as_blocks",
    *("blocks", "unstored", "layer", "mask_var"),
    *("rows", "columns", "values", "header", "table"),
    panel=READING_PANEL,
)
WEIGHTING: Final = VerbOptions("as_blocks", "uncertainty", "weights", panel=READING_PANEL)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Options for reading a matrix, which `as_blocks`, `convert` and all verbs on a matrix take."""

    panel: ClassVar = READING_PANEL

    reading: Annotated[Arguments, READING]
    count: Annotated[
        bool,
        Option(
            "--count",
            help="Use the number of lines of a cell as its value, in a table with one line per "
            "entry.",
        ),
    ] = False

    def arguments(self) -> Arguments:
        """Return the options as arguments of a verb."""
        if not self.count:
            return self.reading
        if self.reading["values"] is not None:
            raise OptionError("--count cannot be combined with --values; leave one of them out")
        return self.reading | {"values": False}


@dataclass(frozen=True, kw_only=True)
class Matrix(Reading):
    """A matrix in a file or a store, with options for reading it."""

    input: Input


@dataclass(frozen=True, kw_only=True)
class WeightedMatrix(Matrix):
    """A matrix with uncertainties or weights of its cells."""

    weighting: Annotated[Arguments, WEIGHTING]

    def arguments(self) -> Arguments:
        """Return the options as arguments of a verb."""
        texts = {name: text for name, text in self.weighting.items() if text is not None}
        weights = {name: _number_or_matrix(text) for name, text in texts.items()}
        return super().arguments() | weights


def _number_or_matrix(text: str) -> Any:
    """Parse a number for all cells, or read a matrix with a number for each cell."""
    number = _number_or_word(text)
    if isinstance(number, float):
        return number
    from daskfactor.data.opening import load
    from daskfactor.data.tables import ReadOptions

    return load(text, ReadOptions(table=False))


EXECUTION_PANEL: Final = "Execution"
EXECUTOR: Final = VerbOptions("sample", "executor", panel=EXECUTION_PANEL)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Options for the executor, the cluster and the progress bar."""

    panel: ClassVar = EXECUTION_PANEL

    executor: Annotated[Arguments, EXECUTOR]
    scheduler: Scheduler = None
    cluster: Cluster = None
    quiet: Quiet = False

    def arguments(self) -> Arguments:
        """Return the options, except those of the cluster, as arguments of a verb."""
        return {"progressbar": not self.quiet, **self.executor}

    @contextmanager
    def running(self, store: str | None = None, new: bool = True) -> Iterator[Arguments]:
        """Yield the arguments for a verb; after Ctrl-C, raise with advice on resuming the store."""
        with resumable(store, new), self._client() as client:
            yield {**self.arguments(), "client": client}

    def _client(self) -> AbstractContextManager[Any]:
        if self.scheduler is None and self.cluster is None:
            return nullcontext()
        from daskfactor.executors.connection import client_of

        return client_of(self.scheduler, self.cluster)


@contextmanager
def resumable(store: str | None, new: bool = True) -> Iterator[None]:
    """Raise Ctrl-C again with advice on how to resume the run of a store.

    Parameters
    ----------
    store
        Path or URL of the store, or None.
    new
        Whether a new run replaces the run in the store.
    """
    previous = _run_id(store) if new else None
    try:
        yield
    except KeyboardInterrupt as error:
        if store is None:
            raise
        advice = " before anything was written"
        if previous is not None and _run_id(store) == previous:
            advice = f" before the first checkpoint; {store} is unchanged"
        elif is_url(store) or Path(store).exists():
            advice = f"; to continue, run: daskfactor resume {store}"
        raise type(error)(f"interrupted{advice}") from None


def _run_id(store: str | None) -> str | None:
    """Return the id of the run in a local store; None without store, run, or for a URL."""
    from daskfactor.results.metadata import read_root

    if store is None or is_url(store):
        return None
    with suppress(DaskfactorError):
        from daskfactor.results.backends import view_of

        return str(read_root(view_of(store))["attributes"]["trace_id"])
    return None


@dataclass(frozen=True, kw_only=True)
class SeededExecution(Execution):
    """Options for execution, and the seed."""

    seed: Seed = 0

    def arguments(self) -> Arguments:
        """Return the options, except those of the cluster, as arguments of a verb."""
        return {**super().arguments(), "random_seed": self.seed}


@dataclass(frozen=True, kw_only=True)
class DeviceExecution(Execution):
    """Options for execution, and the device."""

    device: Annotated[Arguments, VerbOptions("sample", "device", panel=EXECUTION_PANEL)]

    def arguments(self) -> Arguments:
        """Return the options, except those of the cluster, as arguments of a verb."""
        return {**super().arguments(), **self.device}


@dataclass(frozen=True, kw_only=True)
class SeededDeviceExecution(DeviceExecution, SeededExecution):
    """Options for execution, the device and the seed."""


def facts(lines: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """Return a table of facts, one per line."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, title=title)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(*map(visible, line))
    return table


def comparison(
    titles: Sequence[str], rows: Iterable[Sequence[str]], best: str, title: str | None = None
) -> Table:
    """Return a table of numbers in columns; the row that starts with ``best`` is bold."""
    table = Table(box=box.SIMPLE_HEAD, title=title)
    for name in titles:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(visible, row), style="bold" if row[0] == best else None)
    return table
