"""Selection of rows and columns of a run, and output of results to files."""

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from daskfactor.cli import options as o
from daskfactor.errors import DataError, DataWarning, OptionError
from daskfactor.markup import visible
from daskfactor.publish import check_free, publishing

if TYPE_CHECKING:
    import xarray as xr

KINDS: Final = ("-", ".csv", ".parquet", ".nc", ".zarr")
"""Suffixes of output files; - is CSV on stdout."""
FORMULA: Final = r"^\s*[=@]|^\s*[+-](?!\s*[\d.]*(?:[eE][+-]?\d+)?\s*$)"
"""Pattern of text, other than a number, that spreadsheets evaluate as a formula."""


class Cells(o.Command):
    """Options that select rows and columns of a run.

    Parameters
    ----------
    rows
        Rows to select: positions such as 0:100 or 3,5,7, labels such as alice,bob, or both; by
        default all.
    columns
        Columns to select, as for --rows.
    by_label
        Read numbers in --rows and --columns as labels, not as positions.
    """

    rows: str | None = None
    columns: str | None = None
    by_label: bool = False

    def positions_in(self, tree: "xr.DataTree") -> dict[str, list[int]]:
        """Return the selected positions in a run by dimension, without fully selected ones."""
        from daskfactor.runs.schema import factor_dims
        from daskfactor.runs.trace import Run

        posterior = tree["posterior"].to_dataset()
        selected: dict[str, list[int]] = {}
        if Run(tree).axes is not None:
            if self.rows is not None or self.columns is not None:
                raise OptionError(
                    "--rows and --columns select cells of a matrix, got a run of a tensor; leave "
                    "them out to use all cells"
                )
            return selected
        for dim, axis in zip(factor_dims(tree), ("rows", "columns"), strict=True):
            text, labels = getattr(self, axis), posterior.indexes.get(dim)
            if text is not None:
                size = posterior.sizes[dim]
                selected[dim] = positions(text, size, f"--{axis}", labels, self.by_label)
        return selected


class Output(o.Command):
    """Options for the output of a result.

    Parameters
    ----------
    output
        File to write: .csv, .parquet, .nc or .zarr; - prints CSV.
    """

    output: str = "-"
    overwrite: bool = False

    @property
    def kind(self) -> str:
        """Suffix of the file, or - for CSV on stdout."""
        return "-" if self.output == "-" else Path(self.output).suffix.lower()

    def check_output(self, kinds: tuple[str, ...] = KINDS) -> None:
        """Refuse, before anything is computed, an output that cannot be written."""
        if self.as_json and self.output == "-":
            raise OptionError("--json cannot be combined with CSV on stdout; pass --output FILE")
        if self.kind not in kinds:
            *others, last = (kind for kind in kinds if kind != "-")
            files = f"a {', '.join(others)} or {last} file{', or -' if '-' in kinds else ''}"
            raise OptionError(f"--output must be {files}, got {self.output!r}")
        if self.kind != "-":
            check_free(self.output, self.overwrite, is_result)

    def put(self, result: "xr.Dataset") -> o.Answer | None:
        """Write a result, and return the answer of the command; None for CSV on stdout."""
        if self.kind == "-":
            write_csv(result, Terminal() if sys.stdout.isatty() else sys.stdout)
            return None
        write(result, self.output, self.overwrite)
        values = {"output": self.output, "sizes": dict(result.sizes), "variables": list(result)}
        return values, f"wrote {self.output}"


def positions(
    text: str, size: int, option: str, labels: Any = None, by_label: bool = False
) -> list[int]:
    """Parse ``"0:3,7"`` to ``[0, 1, 2, 7]``; text that is not a number is a label.

    Where labels are whole numbers, a number is a label, as in Python; a range counts positions.

    Raises
    ------
    OptionError
        If the text is not such a list, or names a position or label that does not exist.
    """
    if by_label and labels is None:
        raise OptionError(f"--by-label needs labels, but the {option[2:]} of the run have none")
    chosen: list[int] = []
    numbered = labels is not None and labels.dtype.kind in "iu"
    for part in next(csv.reader([text], skipinitialspace=True), []) or [""]:
        match = None if by_label else re.fullmatch(r"\s*(\d*)\s*(:\s*(\d*)\s*)?", part)
        match = None if numbered and match is not None and match[2] is None else match
        if match is None and labels is not None:
            chosen.extend(_label_positions(part, labels, option))
            continue
        if match is None or not (match[1] or match[2]):
            raise OptionError(f"{option} must be positions such as 0:100 or 3,5,7, got {text!r}")
        start = int(match[1] or 0)
        stop = start + 1 if match[2] is None else int(match[3] or size)
        if not 0 <= start < stop <= size:
            raise OptionError(f"{option} must lie within 0:{size}, got {part.strip()!r}")
        chosen.extend(range(start, stop))
    return chosen


def _label_positions(text: str, labels: Any, option: str) -> list[int]:
    """Return the positions of a label, given as text."""
    import numpy as np
    import pandas as pd

    from daskfactor.results.selection import near_labels

    try:
        matches = np.flatnonzero(labels == pd.Index([text]).astype(labels.dtype)[0])
    except (TypeError, ValueError):
        matches = np.zeros(0, int)
    if not matches.size:
        raise OptionError(
            f"{option}: there is no label {text!r} among the {len(labels)} labels of "
            f"{labels.name!r}; {near_labels(labels, text)}pass labels, or positions such as 0:100"
        )
    return [int(at) for at in matches]


class Terminal:
    """Standard output that escapes control characters."""

    def write(self, text: str) -> int:
        """Write text to standard output, with control characters escaped."""
        return sys.stdout.write(visible(text))


def is_result(path: str) -> bool:
    """Return whether a folder is a zarr store of a result, rather than of a run or of data."""
    from daskfactor.data.places import kind_of

    return kind_of(path) == "group"


def write(result: "xr.Dataset", output: str, overwrite: bool) -> None:
    """Write predictions in long form (CSV, Parquet), as netCDF, or as a zarr store.

    Raises
    ------
    DataError
        If the file cannot hold the labels.
    StoreError
        If the file exists and may not be replaced.
    """
    kind = Path(output).suffix.lower()
    if kind == ".nc" and (label := next(_matching_labels(result, "\0"), None)) is not None:
        raise DataError(
            f"netCDF cannot store NUL characters, got the label {label!r}; rename it, or pass "
            "--output with .zarr, .parquet or .csv"
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
            # Fixed-width text has no stable zarr format; text as objects has.
            texts = {k: c.astype(object) for k, c in result.coords.items() if c.dtype.kind == "U"}
            result.assign_coords(texts).to_zarr(draft, consolidated=False)


def _matching_labels(result: "xr.Dataset", pattern: str) -> Iterator[str]:
    """Yield the text labels that match a pattern."""
    for labels in result.coords.values():
        if labels.dtype.kind in "OUT":
            yield from (
                label
                for label in labels.values.ravel().tolist()
                if isinstance(label, str) and re.search(pattern, label)
            )


def write_csv(result: "xr.Dataset", file: Any) -> None:
    """Write one line per cell: its two labels, then every variable.

    Rows are computed and written by chunks, so that memory holds only one chunk.
    """
    if (label := next(_matching_labels(result, FORMULA), None)) is not None:
        from daskfactor.checks import warn

        warn(
            f"labels are written unchanged, but spreadsheets evaluate a label such as {label!r} as "
            "a formula; import that column as text, or write .parquet",
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
