"""``daskfactor predict``."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from daskfactor.cli import options as o
from daskfactor.cli.report import print_json, reporting
from daskfactor.errors import OptionError

if TYPE_CHECKING:
    import xarray as xr


def predict(
    run: o.Run,
    rows: Annotated[
        str | None,
        typer.Option(
            help="Positions, as 0:100, 3,5,7 or a mixture; all if left out.", show_default=False
        ),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="As --rows, for columns.", show_default=False)
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Probability that an interval holds.")
    ] = 0.9,
    of: Annotated[
        Literal["mean", "observation"] | None,
        typer.Option(
            help="Interval of the mean WH, or of a new observation of the cell; left out, the "
            "latter where the model has one.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="File: .csv, .nc or .zarr; - is CSV on stdout.")
    ] = "-",
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Predict cells: posterior mean, standard deviation and interval, observed or not.

    Rows and columns are counted from 0, and the end of a range is left out.

        daskfactor predict run.zarr --rows 0:3 --columns 5,7

        daskfactor predict run.zarr --of observation --interval 0.95 -o filled.nc
    """
    with reporting(debug):
        if as_json and output == "-":
            raise OptionError("--json and CSV on stdout exclude each other: give --output FILE")
        kind = "-" if output == "-" else Path(output).suffix.lower()
        if kind not in ("-", ".csv", ".nc", ".zarr"):
            raise OptionError(f"--output is a .csv, .nc or .zarr file, or -, got {output!r}")
        import daskfactor as dfac

        tree, labels = unlabelled(dfac.open_run(run))
        chosen = {
            dim: None if text is None else positions(text, size, option)
            for (dim, size), (text, option) in zip(
                factor_sizes(tree).items(),
                ((rows, "--rows"), (columns, "--columns")),
                strict=True,
            )
        }
        at_rows, at_columns = chosen.values()
        result = dfac.predict(tree, rows=at_rows, columns=at_columns, interval=interval, of=of)
        result = labelled(result, chosen, labels)
        write(result, kind, output)
        if as_json:
            print_json({"output": output, "sizes": dict(result.sizes), "variables": list(result)})


def factor_sizes(tree: "xr.DataTree") -> dict[str, int]:
    """Give the numbers of rows and of columns under the names of the data."""
    from daskfactor.results.schema import factor_dims

    group = "posterior" if "posterior" in tree.children else "posterior_moments"
    sizes = tree.children[group].to_dataset().sizes
    return {dim: sizes[dim] for dim in factor_dims(tree)}


def unlabelled(tree: "xr.DataTree") -> tuple["xr.DataTree", dict[str, Any]]:
    """Take the labels of rows and columns away: positions are meant, and labels may repeat."""
    dims = list(factor_sizes(tree))
    labels: dict[str, Any] = {}
    for group in tree.children.values():
        labels |= {dim: group.coords[dim] for dim in dims if dim in group.coords}
    bare = tree.map_over_datasets(lambda group: group.drop_vars(dims, errors="ignore"))
    bare.attrs |= tree.attrs
    return bare, labels


def labelled(
    result: "xr.Dataset", chosen: dict[str, list[int] | None], labels: dict[str, Any]
) -> "xr.Dataset":
    """Give predictions the labels of their cells, or else the positions that were asked for."""
    for dim, at in chosen.items():
        if dim in labels:
            values = labels[dim].values
            result = result.assign_coords({dim: values if at is None else values[at]})
        elif at is not None:
            result = result.assign_coords({dim: at})
    return result


def positions(text: str, size: int, option: str) -> list[int]:
    """Read ``"0:3,7"`` as ``[0, 1, 2, 7]``.

    Raises
    ------
    OptionError
        If the text is no such list, or names a position that does not exist.
    """
    chosen: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d*)\s*(:\s*(\d*)\s*)?", part)
        if match is None or not (match[1] or match[2]):
            raise OptionError(f"{option} takes positions such as 0:100 or 3,5,7, got {text!r}")
        start = int(match[1] or 0)
        stop = start + 1 if match[2] is None else int(match[3] or size)
        if not 0 <= start < stop <= size:
            raise OptionError(f"{option} must lie within 0:{size}, got {part.strip()!r}")
        chosen.extend(range(start, stop))
    return chosen


def write(result: "xr.Dataset", kind: str, output: str) -> None:
    """Write predictions as CSV in long form, as netCDF, or as a zarr store."""
    if kind == "-":
        write_csv(result, sys.stdout)
    elif kind == ".csv":
        with Path(output).open("w", newline="", encoding="utf-8") as file:
            write_csv(result, file)
    elif kind == ".nc":
        result.to_netcdf(output)
    else:
        if Path(output).exists():
            raise FileExistsError(17, "exists already; give another name", output)
        # Text of one fixed width has no settled zarr format; text as objects has.
        texts = {name: c.astype(object) for name, c in result.coords.items() if c.dtype.kind == "U"}
        result.assign_coords(texts).to_zarr(output, consolidated=False)


def write_csv(result: "xr.Dataset", file: TextIO) -> None:
    """Write a line for each cell: its two labels, then every variable.

    Rows are computed and written by chunks, so that memory holds one chunk alone.
    """
    dims = [str(dim) for dim in result["mean"].dims]
    mean, start = result["mean"], 0
    for size in mean.chunks[0] if mean.chunks else mean.shape[:1]:
        part = result.isel({dims[0]: slice(start, start + size)}).load()
        if dims[0] not in part.coords:
            part = part.assign_coords({dims[0]: range(start, start + size)})
        table = part.to_dataframe(dim_order=dims)[[str(name) for name in result.data_vars]]
        table.to_csv(file, header=not start, float_format="%.7g", lineterminator="\n")
        start += size
