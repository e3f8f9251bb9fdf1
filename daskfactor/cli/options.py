"""What several commands share: options, alone and in groups, a connection to a cluster, tables.

A group is a dataclass whose fields are options or tables of parameters of a verb: a command that
has a parameter of its type has all of them (`daskfactor.cli.main.command` sees to it) and gets them
together.
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

from daskfactor.cli.verb_options import Shows
from daskfactor.errors import DaskfactorError, OptionError
from daskfactor.markup import visible
from daskfactor.urls import is_url

Answer = tuple[Any, ...]
"""What a command returns: the values that ``--json`` prints, then text or tables for people."""

Arguments = dict[str, Any]
"""Values of the options that a table shows, by the names of parameters."""
Keep = Literal["auto", "draws", "moments"]

Run = Annotated[
    str,
    Argument(metavar="RUN", help="Store of a run, for example run.zarr or s3://bucket/run."),
]
Input = Annotated[
    str,
    Argument(
        metavar="INPUT",
        help="Matrix: .npy, .npz (dense or scipy sparse), .csv, .tsv, .parquet, .zarr (also what "
        "convert wrote), netCDF or AnnData (.h5ad, .zarr); FILE:NAME picks one of several, or a "
        "layer. A .csv, .tsv or .parquet may also have a line for each entry: row key, column "
        "key, value.",
    ),
]
Store = Annotated[str, Option(help="Store to write: a new directory or s3://bucket/run.")]
Overwrite = Annotated[
    bool, Option("--overwrite", help="Replace what is there, once the new one is whole.")
]
Components = Annotated[int, Option("--components", "-k", min=1, help="Rank K.")]


def _rank(text: str) -> int | str:
    """Read a rank, which may also be called for with ``auto``."""
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is neither a whole number of at least 1 nor 'auto'")
    return int(text)


Rank = Annotated[
    Any,
    Option(
        "--components",
        "-k",
        parser=_rank,
        metavar="K|auto",
        help="Rank K; auto begins with many components, of which those fade that are not needed.",
    ),
]
Beta = Annotated[
    float | None,
    Option(help="Of tweedie: 1 counts (the default), 2 Gaussian, 0 gamma, 0.5 between."),
]
Scheduler = Annotated[
    str | None,
    Option(
        metavar="ADDRESS",
        help="Dask scheduler whose workers do the work, such as tcp://host:8786; for tls:// "
        "certificates come from Dask's configuration (distributed.comm.tls).",
    ),
]
Cluster = Annotated[
    str | None,
    Option(
        metavar="local:N",
        help="Begin N worker processes on this machine, and end them with the run.",
    ),
]
Dispersion = Annotated[
    float | None, Option(help="Of tweedie: left out, 1 for counts, estimated for other data.")
]
Seed = Annotated[int, Option("--seed", min=0, help="Same seed, data and settings: same draws.")]
Picture = Annotated[
    Path | None,
    Option("--output", "-o", help="Picture to write (.png, .pdf, .svg)."),
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="No progress bar.")]
Json = Annotated[
    bool, Option("--json", help="Print one JSON object on stdout and nothing else there.")
]
Debug = Annotated[bool, Option("--debug", help="Show the full traceback of an error.")]


def _number_or_word(text: str) -> float | str:
    """Read a number, or leave a word, which the model judges."""
    try:
        return float(text)
    except ValueError:
        return text


OwnDispersion = Annotated[
    Any,
    Option(
        "--dispersion",
        parser=_number_or_word,
        metavar="NUMBER|auto|column",
        help="Of tweedie: left out, 1 for counts, estimated for other data. Of negative-binomial: "
        "left out, drawn; column: one for each, drawn.",
    ),
]


def belonging(model: str, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Give the options that are not None; refuse those that belong to other models."""
    given = {}
    for owners, own in options.items():
        for name, value in own.items():
            if value is None:
                continue
            if model not in owners.split(" or "):
                raise OptionError(
                    f"--{name.replace('_', '-')} belongs to --model {owners}, got {value} with "
                    f"{model}; leave one of them out"
                )
            given[name] = value
    return given


def sampler_named(text: str) -> Any:
    """Make the sampler whose name begins with ``text``, in letters of any case; leave "auto"."""
    if text.lower() == "auto":
        return "auto"
    from daskfactor.inference.base import Sampler
    from daskfactor.inference.registry import algorithms

    samplers = algorithms(Sampler)
    meant = [name for name in samplers if name.lower().startswith(text.lower())]
    meant = [name for name in meant if name.lower() == text.lower()] or meant
    if len(meant) != 1:
        raise typer.BadParameter(f"{text!r} names none of {', '.join(samplers)}, or more than one")
    return samplers[meant[0]]()


READING_PANEL: Final = "How the input is read"
READING: Final = Shows(
    "as_blocks",
    *("blocks", "unstored", "layer", "mask_var"),
    *("rows", "columns", "values", "header", "table"),
    panel=READING_PANEL,
)
WEIGHING: Final = Shows("as_blocks", "uncertainty", "weights", panel=READING_PANEL)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a matrix is read: what `as_blocks`, `convert` and all verbs on a matrix take by name."""

    panel: ClassVar = READING_PANEL

    reading: Annotated[Arguments, READING]
    count: Annotated[
        bool,
        Option("--count", help="Of a table with a line for each entry: count the lines of a cell."),
    ] = False

    def told(self) -> Arguments:
        """Give the options as arguments of Python."""
        if not self.count:
            return self.reading
        if self.reading["values"] is not None:
            raise OptionError("--count and --values exclude each other")
        return self.reading | {"values": False}


@dataclass(frozen=True, kw_only=True)
class Matrix(Reading):
    """A matrix in a file or a store, and how it is read."""

    input: Input


@dataclass(frozen=True, kw_only=True)
class Weighed(Matrix):
    """The same, and what its cells count for."""

    weighing: Annotated[Arguments, WEIGHING]

    def told(self) -> Arguments:
        """Give the options as arguments of Python."""
        own = {k: _cellwise(text) for k, text in self.weighing.items() if text is not None}
        return super().told() | own


def _cellwise(text: str) -> Any:
    """Read a number for all cells, or a matrix with one for each."""
    number = _number_or_word(text)
    if isinstance(number, float):
        return number
    from daskfactor.data.files import read_matrix
    from daskfactor.data.tables import ReadOptions

    return read_matrix(text, ReadOptions(table=False))


RUNNING_PANEL: Final = "How it runs"
EXECUTOR: Final = Shows("sample", "executor", panel=RUNNING_PANEL)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a command does its work, and whether it shows how far it is."""

    panel: ClassVar = RUNNING_PANEL

    executor: Annotated[Arguments, EXECUTOR]
    scheduler: Scheduler = None
    cluster: Cluster = None
    quiet: Quiet = False

    def told(self) -> Arguments:
        """Give the options as arguments of Python, but for the cluster."""
        return {"progressbar": not self.quiet, **self.executor}

    @contextmanager
    def running(self, store: str | None = None, new: bool = True) -> Iterator[Arguments]:
        """Yield the arguments that a verb takes; after Ctrl-C, say how to go on with its store."""
        with resumable(store, new), self._client() as client:
            yield {**self.told(), "client": client}

    def _client(self) -> AbstractContextManager[Any]:
        if self.scheduler is None and self.cluster is None:
            return nullcontext()
        from daskfactor.executors.connection import client_of

        return client_of(self.scheduler, self.cluster)


@contextmanager
def resumable(store: str | None, new: bool = True) -> Iterator[None]:
    """Say how to go on with the run of a store after Ctrl-C.

    ``new``: the run of the store begins now, in place of what is there.
    """
    before = _run_at(store) if new else None
    try:
        yield
    except KeyboardInterrupt as error:
        if store is None:
            raise
        how = " before anything was written"
        if before is not None and _run_at(store) == before:
            how = f" before the first checkpoint; {store} is as it was"
        elif is_url(store) or Path(store).exists():
            how = f"; go on with: daskfactor resume {store}"
        raise type(error)(f"interrupted{how}") from None


def _run_at(store: str | None) -> str | None:
    """Return the id of the run that a folder holds, or None."""
    from daskfactor.results.metadata import read_root

    if store is None or is_url(store):
        return None
    with suppress(DaskfactorError):
        from daskfactor.results.places import view_of

        return str(read_root(view_of(store))["attributes"]["trace_id"])
    return None


@dataclass(frozen=True, kw_only=True)
class Seeded(Place):
    """The same, and what random numbers begin with."""

    seed: Seed = 0

    def told(self) -> dict[str, Any]:
        """Give the options as arguments of Python, but for the cluster."""
        return {**super().told(), "random_seed": self.seed}


@dataclass(frozen=True, kw_only=True)
class OnDevice(Place):
    """Where a command does its work that may do it on a GPU."""

    device: Annotated[Arguments, Shows("sample", "device", panel=RUNNING_PANEL)]

    def told(self) -> Arguments:
        """Give the options as arguments of Python, but for the cluster."""
        return {**super().told(), **self.device}


@dataclass(frozen=True, kw_only=True)
class SeededOnDevice(OnDevice, Seeded):
    """The same, and what random numbers begin with."""


def facts(lines: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """Lay facts out for people, a line for each."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, title=title)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(*map(visible, line))
    return table


def comparison(
    titles: Sequence[str], rows: Iterable[Sequence[str]], best: str, title: str | None = None
) -> Table:
    """Lay figures out in columns; the row that begins with ``best`` is bold."""
    table = Table(box=box.SIMPLE_HEAD, title=title)
    for name in titles:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(visible, row), style="bold" if row[0] == best else None)
    return table
