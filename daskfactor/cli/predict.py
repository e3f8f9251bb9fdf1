"""``daskfactor predict``."""

import csv
import re
import sys
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from daskfactor.cli.options import Debug, Json, Run
from daskfactor.cli.report import print_json, reporting
from daskfactor.errors import OptionError

if TYPE_CHECKING:
    import xarray as xr


class Of(StrEnum):
    """What an interval is about."""

    mean = "mean"
    observation = "observation"


def predict(
    run: Run,
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
        Of | None,
        typer.Option(
            help="Interval of the mean WH, or of a new observation of the cell; left out, the "
            "latter where the model has one.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="File: .csv, .nc or .zarr; - is CSV on stdout.")
    ] = "-",
    as_json: Json = False,
    debug: Debug = False,
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

        tree = dfac.open_run(run)
        rows_wanted = named(tree, 0, rows, "--rows")
        columns_wanted = named(tree, 1, columns, "--columns")
        result = dfac.predict(
            tree,
            rows=rows_wanted,
            columns=columns_wanted,
            interval=interval,
            of=None if of is None else of.value,
        )
        result = with_positions(result, rows_wanted, columns_wanted)
        write(result, kind, output)
        if as_json:
            print_json({"output": output, "sizes": dict(result.sizes), "variables": list(result)})


def named(tree: "xr.DataTree", axis: int, text: str | None, option: str) -> Any:
    """Positions as `predict` wants them: labels, where the data had labels."""
    if text is None:
        return None
    from daskfactor.results.schema import factor_dims

    dim = factor_dims(tree)[axis]
    group = "posterior" if "posterior" in tree.children else "posterior_moments"
    factors = tree.children[group].to_dataset()
    chosen = positions(text, factors.sizes[dim], option)
    return factors[dim].values[chosen] if dim in factors.coords else chosen


def with_positions(result: "xr.Dataset", rows: Any, columns: Any) -> "xr.Dataset":
    """Positions as coordinates of chosen rows and columns that have no labels of their own."""
    dims = [str(dim) for dim in result["mean"].dims]
    chosen = zip(dims, (rows, columns), strict=True)
    new = {d: (d, at) for d, at in chosen if at is not None and d not in result.coords}
    return result.assign_coords(new)


def positions(text: str, size: int, option: str) -> list[int]:
    """``"0:3,7"`` as ``[0, 1, 2, 7]``.

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
    """One line a cell: its two labels, then every variable; computed and written by row chunks."""
    row_dim, column_dim = (str(dim) for dim in result["mean"].dims)
    names = list(_columns(result))
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([row_dim, column_dim, *names])
    column_labels = _labels(result, column_dim)
    start = 0
    for size in _row_chunks(result):
        part = result.isel({row_dim: slice(start, start + size)}).load()
        labels = product(_labels(part, row_dim, start), column_labels)
        cells = zip(*(_columns(part)[name] for name in names), strict=True)
        for label, cell in zip(labels, cells, strict=True):
            writer.writerow([*label, *(f"{value:.7g}" for value in cell)])
        start += size


def _row_chunks(result: "xr.Dataset") -> tuple[int, ...]:
    """Rows that are computed together anyway."""
    mean = result["mean"]
    return mean.chunks[0] if mean.chunks else (mean.shape[0],)


def _columns(result: "xr.Dataset") -> dict[str, Any]:
    """Every variable flattened over the cells."""
    return {str(name): array.data.ravel() for name, array in result.data_vars.items()}


def _labels(result: "xr.Dataset", dim: str, start: int = 0) -> list[Any]:
    if dim in result.coords:
        return list(result[dim].values.tolist())
    return list(range(start, start + result.sizes[dim]))
