"""Which rows and columns of a run are meant, and results as files."""

import csv
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from typer import Option

from daskfactor.cli import options as o
from daskfactor.errors import DataError, DataWarning, OptionError
from daskfactor.markup import visible
from daskfactor.publish import check_free, publishing

if TYPE_CHECKING:
    import xarray as xr

KINDS: Final = ("-", ".csv", ".parquet", ".nc", ".zarr")
"""Endings of files that are written; - is CSV on stdout."""
FORMULA: Final = r"^\s*[=@]|^\s*[+-](?!\s*[\d.]*(?:[eE][+-]?\d+)?\s*$)"
"""Text other than a number that spreadsheets take for a formula."""


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Some rows and columns of a run."""

    rows: Annotated[
        str | None,
        Option(
            help="Positions, as 0:100 or 3,5,7, labels, as alice,bob, or a mixture; all if left "
            "out.",
        ),
    ] = None
    columns: Annotated[str | None, Option(help="As --rows, for columns.")] = None
    by_label: Annotated[
        bool,
        Option("--by-label", help="Numbers in --rows and --columns are labels, not positions."),
    ] = False

    def of(self, tree: "xr.DataTree") -> dict[str, list[int]]:
        """Give the positions that are meant of a run, by dimension; all of one that is left out."""
        from daskfactor.results.schema import factor_dims
        from daskfactor.results.trace import Run

        posterior = tree["posterior"].to_dataset()
        found: dict[str, list[int]] = {}
        if Run(tree).axes is not None:
            if self.rows is not None or self.columns is not None:
                raise OptionError(
                    "--rows and --columns are those of a matrix, and this run is of a tensor; "
                    "leave them out for all of its cells"
                )
            return found
        for dim, side in zip(factor_dims(tree), ("rows", "columns"), strict=True):
            text, labels = getattr(self, side), posterior.indexes.get(dim)
            if text is not None:
                size = posterior.sizes[dim]
                found[dim] = positions(text, size, f"--{side}", labels, self.by_label)
        return found


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a result goes."""

    output: Annotated[
        str,
        Option("--output", "-o", help="File: .csv, .parquet, .nc or .zarr; - is CSV on stdout."),
    ] = "-"
    overwrite: o.Overwrite = False
    as_json: o.Json = False

    @property
    def kind(self) -> str:
        """The ending of the file, or - for CSV on stdout."""
        return "-" if self.output == "-" else Path(self.output).suffix.lower()

    def check(self, kinds: tuple[str, ...] = KINDS) -> None:
        """Refuse, before anything is computed, what cannot be written."""
        if self.as_json and self.output == "-":
            raise OptionError("--json and CSV on stdout exclude each other: give --output FILE")
        if self.kind not in kinds:
            *others, last = (kind for kind in kinds if kind != "-")
            files = f"a {', '.join(others)} or {last} file{', or -' if '-' in kinds else ''}"
            raise OptionError(f"--output is {files}, got {self.output!r}")
        if self.kind != "-":
            check_free(self.output, self.overwrite, is_result)

    def put(self, result: "xr.Dataset") -> o.Answer | None:
        """Write a result, and return the answer of the command."""
        if self.kind == "-":
            write_csv(result, Terminal() if sys.stdout.isatty() else sys.stdout)
            return None
        write(result, self.output, self.overwrite)
        told = {"output": self.output, "sizes": dict(result.sizes), "variables": list(result)}
        return told, f"wrote {self.output}"


def positions(
    text: str, size: int, option: str, labels: Any = None, by_label: bool = False
) -> list[int]:
    """Read ``"0:3,7"`` as ``[0, 1, 2, 7]``, and what is no number as a label.

    Where labels are whole numbers, a number is a label, as in Python; a range counts positions.

    Raises
    ------
    OptionError
        If the text is no such list, or names a position or label that does not exist.
    """
    if by_label and labels is None:
        raise OptionError(f"--by-label needs labels, and what {option} chooses from has none")
    chosen: list[int] = []
    numbered = labels is not None and labels.dtype.kind in "iu"
    for part in next(csv.reader([text], skipinitialspace=True), []) or [""]:
        match = None if by_label else re.fullmatch(r"\s*(\d*)\s*(:\s*(\d*)\s*)?", part)
        match = None if numbered and match is not None and match[2] is None else match
        if match is None and labels is not None:
            chosen.extend(_labelled(part, labels, option))
            continue
        if match is None or not (match[1] or match[2]):
            raise OptionError(f"{option} takes positions such as 0:100 or 3,5,7, got {text!r}")
        start = int(match[1] or 0)
        stop = start + 1 if match[2] is None else int(match[3] or size)
        if not 0 <= start < stop <= size:
            raise OptionError(f"{option} must lie within 0:{size}, got {part.strip()!r}")
        chosen.extend(range(start, stop))
    return chosen


def _labelled(text: str, labels: Any, option: str) -> list[int]:
    """Positions of what has a label."""
    import numpy as np
    import pandas as pd

    from daskfactor.results.selection import near_labels

    try:
        found = np.flatnonzero(labels == pd.Index([text]).astype(labels.dtype)[0])
    except (TypeError, ValueError):
        found = np.zeros(0, int)
    if not found.size:
        raise OptionError(
            f"{option}: there is no label {text!r} among the {len(labels)} of {labels.name!r}; "
            f"{near_labels(labels, text)}give labels, or positions such as 0:100"
        )
    return [int(at) for at in found]


class Terminal:
    """Standard output to a terminal, without control characters."""

    def write(self, text: str) -> int:
        """Write text, with control characters as numbers."""
        return sys.stdout.write(visible(text))


def is_result(path: str) -> bool:
    """Whether a folder is a zarr store of a result, and neither a run nor data."""
    from daskfactor.data.store import zarr_kind

    return zarr_kind(path) == "group"


def write(result: "xr.Dataset", output: str, overwrite: bool) -> None:
    """Write predictions in long form (CSV, Parquet), as netCDF, or as a zarr store.

    Raises
    ------
    DataError
        If the file cannot hold the labels.
    StoreError
        If something is there already that is not to be replaced.
    """
    kind = Path(output).suffix.lower()
    if kind == ".nc" and (label := next(_texts(result, "\0"), None)) is not None:
        raise DataError(
            f"netCDF stores no NUL character, and there is one in the label {label!r}; give "
            "the label another name, or write .zarr, .parquet or .csv"
        )
    with publishing(output, overwrite, is_result) as draft:
        if kind == ".csv":
            with draft.open("w", newline="", encoding="utf-8") as file:
                write_csv(result, file)
        elif kind == ".parquet":
            result.to_dataframe().reset_index().to_parquet(draft)
        elif kind == ".nc":
            result.to_netcdf(draft)
        else:
            # Text of one fixed width has no settled zarr format; text as objects has.
            coords = result.coords.items()
            texts = {name: own.astype(object) for name, own in coords if own.dtype.kind == "U"}
            result.assign_coords(texts).to_zarr(draft, consolidated=False)


def _texts(result: "xr.Dataset", pattern: str) -> Iterator[str]:
    """Yield labels that are text with a pattern in it."""
    for labels in result.coords.values():
        if labels.dtype.kind in "OUT":
            yield from (
                one
                for one in labels.values.ravel().tolist()
                if isinstance(one, str) and re.search(pattern, one)
            )


def write_csv(result: "xr.Dataset", file: Any) -> None:
    """Write a line for each cell: its two labels, then every variable.

    Rows are computed and written by chunks, so that memory holds one chunk alone.
    """
    if (label := next(_texts(result, FORMULA), None)) is not None:
        from daskfactor.checks import warn

        warn(
            f"labels are written as they are, and spreadsheets take one such as {label!r} for a "
            "formula: let them read that column as text, or write .parquet",
            DataWarning,
        )
    dims = [str(dim) for dim in result["mean"].dims]
    mean, start = result["mean"], 0
    for size in mean.chunks[0] if mean.chunks else mean.shape[:1]:
        part = result.isel({dims[0]: slice(start, start + size)}).load()
        if dims[0] not in part.coords:
            part = part.assign_coords({dims[0]: range(start, start + size)})
        table = part.to_dataframe(dim_order=dims)[[str(name) for name in result.data_vars]]
        table.to_csv(file, header=not start, float_format="%.7g", lineterminator="\n")
        start += size
