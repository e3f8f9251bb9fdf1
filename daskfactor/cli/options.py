"""Options that several commands share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Precision = Literal["float32", "float64"]
Unstored = Literal["zero", "missing"]
Keep = Literal["auto", "draws", "moments"]

Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Store of a run, for example run.zarr.", show_default=False),
]
Input = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="Matrix: .npy, .npz (dense or scipy sparse), .csv, .tsv, .zarr (also what convert "
        "wrote) or netCDF; FILE:NAME picks one of several.",
        show_default=False,
    ),
]
Store = Annotated[str, typer.Option(help="Store to write, a new directory.", show_default=False)]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the run that the store holds, if there is one.")
]
Components = Annotated[
    int, typer.Option("--components", "-k", min=1, help="Rank K.", show_default=False)
]
Blocks = Annotated[
    int | None, typer.Option(min=1, help="Bands per side; chosen from the data if left out.")
]
Meaning = Annotated[
    Unstored | None,
    typer.Option(
        help="What a cell that sparse input does not store is: zero in counts, missing in ratings.",
        show_default=False,
    ),
]
Arithmetic = Annotated[Precision, typer.Option(help="Arithmetic.")]
Executor = Annotated[
    str,
    typer.Option(
        metavar="auto|threads|serial|tasks|ring", help="Where blocks are updated; same draws."
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        help="Address of a Dask scheduler, such as tcp://host:8786; its workers do the work.",
        show_default=False,
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, help="Same seed, data and settings: same draws.")
]
Picture = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Picture to write (.png, .pdf, .svg).", show_default=False),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")]


def sampler_named(text: str) -> Any:
    """Make the sampler whose name begins with ``text``, in letters of any case."""
    from daskfactor.inference.samplers import samplers

    known = samplers()
    meant = [name for name in known if name.lower().startswith(text.lower())]
    meant = [name for name in meant if name.lower() == text.lower()] or meant
    if len(meant) != 1:
        raise typer.BadParameter(f"{text!r} names none of {', '.join(known)}, or more than one")
    return known[meant[0]]()


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Connect to the scheduler at an address; without one there is no client, None."""
    if address is None:
        yield None
        return
    from daskfactor.executors.choice import connect

    client = connect(address)
    try:
        yield client
    finally:
        client.close()  # type: ignore[no-untyped-call]
