"""What several commands share: options, a connection to a cluster, tables."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.table import Table
from typer import Argument, Option

Answer = tuple[Any, ...]
"""What a command returns: the values that ``--json`` prints, then text or tables for people."""

Precision = Literal["float32", "float64"]
Unstored = Literal["zero", "missing"]
Keep = Literal["auto", "draws", "moments"]

Run = Annotated[
    str,
    Argument(metavar="RUN", help="Store of a run, for example run.zarr."),
]
Input = Annotated[
    str,
    Argument(
        metavar="INPUT",
        help="Matrix: .npy, .npz (dense or scipy sparse), .csv, .tsv, .zarr (also what convert "
        "wrote) or netCDF; FILE:NAME picks one of several.",
    ),
]
Store = Annotated[str, Option(help="Store to write, a new directory.")]
Overwrite = Annotated[
    bool, Option("--overwrite", help="Replace what the store holds, a run or data.")
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
Blocks = Annotated[
    int | None, Option(min=1, help="Bands per side; chosen from the data if left out.")
]
Meaning = Annotated[
    Unstored | None,
    Option(
        help="What a cell that sparse input does not store is: zero in counts, missing in ratings."
    ),
]
Balance = Annotated[
    bool, Option("--balance", help="Permute sparse rows and columns, unseen, for even blocks.")
]
Beta = Annotated[
    float | None,
    Option(help="Of tweedie: 1 counts (the default), 2 Gaussian, 0 gamma, 0.5 between."),
]
Arithmetic = Annotated[Precision, Option(help="Arithmetic.")]
Executor = Annotated[
    str,
    Option(metavar="auto|threads|serial|tasks|ring", help="Where blocks are updated; same draws."),
]
Cluster = Annotated[
    str | None,
    Option(help="Address of a Dask scheduler, such as tcp://host:8786; its workers do the work."),
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


def sampler_named(text: str) -> Any:
    """Make the sampler whose name begins with ``text``, in letters of any case; leave "auto"."""
    if text.lower() == "auto":
        return "auto"
    from daskfactor.inference.base import Sampler, known

    samplers = known(Sampler)
    meant = [name for name in samplers if name.lower().startswith(text.lower())]
    meant = [name for name in meant if name.lower() == text.lower()] or meant
    if len(meant) != 1:
        raise typer.BadParameter(f"{text!r} names none of {', '.join(samplers)}, or more than one")
    return samplers[meant[0]]()


@contextmanager
def running(
    store: str | None, quiet: bool, executor: str = "auto", cluster: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the arguments that every run takes; after Ctrl-C, say how to go on with its store."""
    client = None
    if cluster is not None:
        from daskfactor.executors import connect

        client = connect(cluster)
    try:
        yield {"progressbar": not quiet, "executor": executor, "client": client}
    except KeyboardInterrupt:
        if store is None:
            raise
        if "://" in store or Path(store).exists():
            raise KeyboardInterrupt(f"interrupted; go on with: daskfactor resume {store}") from None
        raise KeyboardInterrupt("interrupted before anything was written") from None
    finally:
        if client is not None:
            client.close()  # type: ignore[no-untyped-call]


def facts(lines: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """Lay facts out for people, a line for each."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, title=title)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def comparison(
    titles: Sequence[str], rows: Iterable[Sequence[str]], best: str, title: str | None = None
) -> Table:
    """Lay figures out in columns; the row that begins with ``best`` is bold."""
    table = Table(box=box.SIMPLE_HEAD, title=title)
    for name in titles:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == best else None)
    return table
