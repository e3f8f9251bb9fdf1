"""Base class of commands, groups of options that several commands have, and tables of results.

A command is a class: its annotated attributes are its options, described in the section Parameters
of its docstring, and it inherits the options of groups. The table ``verbs`` names the parameters of
verbs that are options, too; see `daskfactor.cli.verb_options.options_of`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import typer
from rich import box
from rich.table import Table
from typer import Argument, Option

from daskfactor.errors import DaskfactorError, OptionError
from daskfactor.markup import visible
from daskfactor.urls import is_url

Answer = tuple[Any, ...]
"""Result of a command: the values that ``--json`` prints, then texts or tables for people."""
Arguments = dict[str, Any]
"""Arguments of a verb by name."""
Keep = Literal["auto", "draws", "moments"]
RunArgument = Annotated[str, Argument(metavar="RUN")]


def _number_or_word(text: str) -> float | str:
    """Parse a number; return other text, which the model checks, unchanged."""
    try:
        return float(text)
    except ValueError:
        return text


class Command:
    """Base class of commands.

    Parameters
    ----------
    run
        Store of a run, such as run.zarr or s3://bucket/run.
    store
        Store to write: a new directory, or a URL such as s3://bucket/run.
    n_components
        Number K of components.
    overwrite
        Replace an existing result once the new one is complete.
    seed
        Seed of the random numbers: the same seed, data and settings give the same draws.
    image_shape
        HEIGHTxWIDTH of an image whose pixels are the rows or columns.
    quiet
        Hide the progress bar.
    as_json
        Print the result as one JSON object, and nothing else.
    debug
        Print the full traceback of an error.
    """

    panel: ClassVar[str | None] = None
    verbs: ClassVar[Mapping[str, str]] = {}

    as_json: bool = False
    debug: bool = False

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __call__(self) -> Answer | None:
        """Run the command, and return its answer, or None if the result is already written."""
        raise NotImplementedError

    def arguments(self, verb: str) -> Arguments:
        """Return the values of the parameters of a verb in the tables of the command."""
        tables = (vars(group).get("verbs", {}) for group in type(self).__mro__)
        names = (name for table in tables for name in table.get(verb, "").split())
        return {name: getattr(self, name) for name in names}

    def model_options(self, model: str, names: Mapping[str, str]) -> Arguments:
        """Return the options of a model that have a value.

        Parameters
        ----------
        model
            Name of the model.
        names
            Names of options by the names of the models that have them, such as ``"tweedie or
            gaussian"``.

        Raises
        ------
        OptionError
            If an option of another model has a value.
        """
        used: Arguments = {}
        for models, text in names.items():
            values = {name: getattr(self, name) for name in text.split()}
            values = {k: one for k, one in values.items() if one is not None and one is not False}
            if values and model not in models.split(" or "):
                name, value = next(iter(values.items()))
                raise OptionError(
                    f"--{name.replace('_', '-')} belongs to --model {models}, got {value} with "
                    f"--model {model}; leave one of them out"
                )
            used |= values
        return used


class Reading(Command):
    """Options for reading a matrix, which `as_blocks`, `convert` and all verbs on a matrix take.

    Parameters
    ----------
    count
        Use the number of lines of a cell as its value, in a table with one line per entry.
    """

    panel = "Reading the input"
    verbs: ClassVar = {
        "as_blocks": "blocks unstored layer mask_var rows columns values header table"
    }

    count: bool = False

    def reading(self) -> Arguments:
        """Return the options as arguments of a verb."""
        reading = self.arguments("as_blocks")
        if not self.count:
            return reading
        if reading["values"] is not None:
            raise OptionError("--count cannot be combined with --values; leave one of them out")
        return reading | {"values": False}


class Matrix(Reading):
    """A matrix in a file or a store, with options for reading it.

    Parameters
    ----------
    input
        Matrix to read: .npy, .npz (dense or scipy sparse), .csv, .tsv, .parquet, .zarr (also a
        store that convert wrote), netCDF or AnnData (.h5ad, .zarr). FILE:NAME selects one of
        several arrays, or a layer. A .csv, .tsv or .parquet may also be a table with one line per
        entry: row key, column key, value.
    """

    input: Annotated[str, Argument(metavar="INPUT")]


class WeightedMatrix(Matrix):
    """A matrix with uncertainties or weights of its cells."""

    panel = Reading.panel
    verbs: ClassVar = {"as_blocks": "uncertainty weights"}

    def reading(self) -> Arguments:
        """Return the options as arguments of a verb; weights are a number or a matrix."""
        reading = super().reading()
        for name in ("uncertainty", "weights"):
            text = reading.pop(name)
            if text is not None:
                number = _number_or_word(text)
                reading[name] = read_numbers(text) if isinstance(number, str) else number
        return reading


def read_numbers(file: str) -> Any:
    """Read a matrix of numbers, which is no table with one line per entry."""
    from daskfactor.data.opening import load
    from daskfactor.data.tables import ReadOptions

    return load(file, ReadOptions(table=False))


class Execution(Command):
    """Options for the executor, the cluster and the progress bar.

    Parameters
    ----------
    scheduler
        Address of a Dask scheduler whose workers run the computation, such as tcp://host:8786;
        tls:// uses the certificates of Dask's configuration (distributed.comm.tls).
    cluster
        Start N worker processes on this machine, and stop them after the run.
    """

    panel = "Execution"
    verbs: ClassVar = {"sample": "executor"}

    scheduler: str | None = None
    cluster: str | None = None
    quiet: bool = False

    @contextmanager
    def running(self, store: str | None = None, new: bool = True) -> Iterator[Arguments]:
        """Yield the arguments for a verb; after Ctrl-C, raise with advice on resuming the store."""
        client: Any = nullcontext()
        if self.scheduler is not None or self.cluster is not None:
            from daskfactor.executors.connection import client_of

            client = client_of(self.scheduler, self.cluster)
        seed = {"random_seed": self.seed} if isinstance(self, Seeded) else {}
        running = {"progressbar": not self.quiet, **seed, **self.arguments("sample")}
        with resumable(store, new), client as connection:
            yield {**running, "client": connection}


class OnDevice(Execution):
    """Options for execution, and the device."""

    panel = Execution.panel
    verbs: ClassVar = {"sample": "device"}


class Seeded(Execution):
    """Options for execution, and the seed."""

    panel = Execution.panel

    seed: int = 0


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
    from daskfactor.runs.metadata import read_root

    if store is None or is_url(store):
        return None
    with suppress(DaskfactorError):
        from daskfactor.runs.backends import view_of

        return str(read_root(view_of(store))["attributes"]["trace_id"])
    return None


def _parse_rank(text: str) -> int | str:
    """Parse a number of components, or ``auto``."""
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"must be a whole number of at least 1, or auto, got {text!r}")
    return int(text)


def _parse_sampler(text: str) -> Any:
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


Rank = Annotated[Any, Option(parser=_parse_rank, metavar="K|auto")]
Dispersion = Annotated[Any, Option(parser=_number_or_word, metavar="NUMBER|auto|column")]
Sampler = Annotated[Any, Option(parser=_parse_sampler, metavar="NAME")]


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
