"""``daskfactor convert``."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from daskfactor.cli import options as o
from daskfactor.cli.report import print_json, reporting

if TYPE_CHECKING:
    from rich.table import Table

    from daskfactor.data.convert import Conversion


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help=".csv, .tsv, .mtx (also .gz), .parquet (file or folder), .npz, .h5ad or a store.",
            show_default=False,
        ),
    ],
    store: Annotated[
        str,
        typer.Argument(
            metavar="STORE", help="Store to make, for example data.zarr.", show_default=False
        ),
    ],
    unstored: o.Meaning = None,
    rows: Annotated[
        str | None,
        typer.Option(help="Column with row keys: name, or position from 0.", show_default="first"),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Column with column keys.", show_default="second")
    ] = None,
    values: Annotated[
        str | None, typer.Option(help="Column with values.", show_default="third")
    ] = None,
    count: Annotated[
        bool, typer.Option("--count", help="No values: count the lines of each cell.")
    ] = False,
    header: Annotated[
        bool | None,
        typer.Option(
            "--header/--no-header",
            help="Whether the first line of a CSV file holds names; found out if left out.",
            show_default=False,
        ),
    ] = None,
    shape: Annotated[
        tuple[int, int] | None,
        typer.Option(
            help="Rows and columns: keys are positions from 0 then, not names.",
            show_default=False,
        ),
    ] = None,
    layer: Annotated[
        str | None, typer.Option(help="Layer of an .h5ad file, not X.", show_default=False)
    ] = None,
    blocks: o.Blocks = None,
    balance: Annotated[
        bool,
        typer.Option("--balance", help="Permute rows and columns, unseen, for even blocks."),
    ] = False,
    dtype: Annotated[o.Precision, typer.Option(help="Type of the values.")] = "float32",
    compression: Annotated[
        Literal["lz4", "zstd", "none"], typer.Option(help="zstd is smaller, none is read fastest.")
    ] = "lz4",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace STORE if it is a blocked store.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory to use, as 4GiB; half of what is free if left out."),
    ] = None,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Turn a table or file of a sparse matrix into a store that can be fitted, of any size.

    A table has a line per entry: a row key, a column key, a value. Keys may be names or
    numbers and become labels, in ascending order. A key that occurs nowhere is no row.
    Entries that name a cell again are added up where unstored cells are zero; where they
    are missing, the last one counts.

        daskfactor convert ratings.csv ratings.zarr --unstored missing

        daskfactor convert events/ counts.zarr --unstored zero --rows user --columns page --count

        daskfactor convert cells.h5ad cells.zarr --unstored zero --layer counts --balance

        daskfactor convert matrix.mtx.gz matrix.zarr --unstored zero --blocks 16

    Then:  daskfactor fit ratings.zarr --store run.zarr -k 20

    The source is read twice and may be larger than memory. An interrupted conversion
    leaves nothing; begin again.
    """
    with reporting(debug):
        from rich.console import Console

        import daskfactor as dfac
        from daskfactor.errors import OptionError

        if count and values is not None:
            raise OptionError("--count and --values exclude each other")
        done = dfac.convert(
            source,
            store,
            rows=rows,
            columns=columns,
            values=False if count else values,
            header=header,
            layer=layer,
            shape=shape,
            unstored=unstored,
            blocks=blocks,
            balance=balance,
            dtype=dtype,
            compression=compression,
            overwrite=overwrite,
            memory_limit=memory,
            progressbar=not quiet,
        )
        if as_json:
            from dataclasses import asdict

            print_json({**asdict(done), "entries_per_second": done.entries_per_second})
        else:
            Console().print(conversion_table(done))


def conversion_table(done: "Conversion") -> "Table":
    """Tell what was made, a line per fact."""
    from rich.filesize import decimal
    from rich.table import Table

    others = "observed zeros" if done.unstored == "zero" else "missing"
    balanced = ", balanced" if done.balanced else ""
    read = f" of {done.n_read:,} read" if done.n_read != done.n_stored else ""
    again = f", {done.n_duplicates:,} of them for a cell once more" if done.n_duplicates else ""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("store", done.location)
    table.add_row("shape", f"{done.shape[0]:,} x {done.shape[1]:,}, other cells {others}")
    table.add_row("entries", f"{done.n_stored:,}{read}{again}, {done.dtype}")
    table.add_row(
        "blocks",
        f"{done.blocks} x {done.blocks}, the largest {done.imbalance:.2f} times the mean{balanced}",
    )
    each = done.nbytes / max(1, done.n_stored)
    table.add_row("size", f"{decimal(done.nbytes)}, {each:.1f} bytes an entry")
    table.add_row(
        "time", f"{done.seconds:.1f} s, {done.entries_per_second / 1e6:.2g} M entries a second"
    )
    return table
