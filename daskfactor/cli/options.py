"""Options that several commands share."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

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
Components = Annotated[
    int, typer.Option("--components", "-k", min=1, help="Rank K.", show_default=False)
]
Blocks = Annotated[
    int | None, typer.Option(min=1, help="Bands per side; chosen from the data if left out.")
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]
Seed = Annotated[
    int, typer.Option("--seed", min=0, help="Same seed, data and settings: same draws.")
]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="Picture to write (.png, .pdf, .svg).")
]


class ModelName(StrEnum):
    """Models by their names on the command line."""

    tweedie = "tweedie"
    gaussian = "gaussian"


class SamplerName(StrEnum):
    """Samplers by their names on the command line."""

    psgld = "psgld"
    psgrrld = "psgrrld"
    gibbs = "gibbs"
    hmc = "hmc"
    langevin = "langevin"
    sgld = "sgld"
    sghmc = "sghmc"


class ExecutorName(StrEnum):
    """Executors by their names on the command line."""

    auto = "auto"
    lanes = "lanes"
    serial = "serial"
    tasks = "tasks"
    ring = "ring"


class Unstored(StrEnum):
    """What an entry means that a sparse matrix does not store."""

    zero = "zero"
    missing = "missing"


Meaning = Annotated[
    Unstored | None,
    typer.Option(help="What an entry means that sparse input does not store."),
]


Cluster = Annotated[
    str | None,
    typer.Option(
        help="Address of a Dask scheduler, such as tcp://host:8786; its workers do the work.",
        show_default=False,
    ),
]


class Precision(StrEnum):
    """Types that can be computed in."""

    float32 = "float32"
    float64 = "float64"


class Keep(StrEnum):
    """What a run keeps."""

    auto = "auto"
    draws = "draws"
    moments = "moments"
