"""Sparse matrices in Matrix Market files, read in pieces."""

import re
from collections.abc import Iterator
from inspect import signature
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from numpy.typing import NDArray

from daskfactor.data.adapters import Source
from daskfactor.data.coo import Piece, coordinate_pieces, text_array
from daskfactor.data.dialects import plain
from daskfactor.data.labels import Labels
from daskfactor.data.statistics import SourceInfo
from daskfactor.data.tenx import with_cells_as_rows
from daskfactor.errors import DataError
from daskfactor.urls import Location

TEXT_CHUNK = 2**24
"""Bytes of a file that are parsed together."""
LONGEST_LINE = 2**24
_BLANK_LINE = re.compile(rb"^[ \t]*(%.*)?\r?\n", re.MULTILINE)
"""Pattern of a blank line or comment."""


def open_matrix_market(location: Location) -> Source:
    """Return the source of a coordinate Matrix Market file, read in pieces."""
    with plain(location) as file:
        banner = file.readline(LONGEST_LINE)
        kinds = banner.decode("ascii", "replace").lower().split()
        if kinds[:2] != ["%%matrixmarket", "matrix"] or len(kinds) != 5:
            raise DataError(
                f"{location} is not a Matrix Market file: it begins with {banner[:40]!r}"
            )
        if kinds[2] != "coordinate" or kinds[3] == "complex":
            raise DataError(
                f"{location} holds a {kinds[2]} matrix of {kinds[3]} numbers; only "
                "coordinate matrices of real, integer or pattern entries are supported"
            )
        rows, cols, entries = _sizes(location, file)
        start = file.tell()

    def pieces(add: bool) -> Iterator[Piece]:
        count_read = 0
        with plain(location) as file:
            file.seek(start)
            while text := file.read(TEXT_CHUNK) + file.readline(LONGEST_LINE):
                text = _BLANK_LINE.sub(b"", text + b"\n")
                count = text.count(b"\n")
                count_read += count
                coo = _parsed(location, banner + b"%d %d %d\n" % (rows, cols, count) + text)
                yield from coordinate_pieces(coo.row, coo.col, coo.data)
        if count_read != entries:
            raise DataError(
                f"{location} says that it has {entries} entries, but has {count_read}; it was cut "
                "off or changed"
            )

    source = Source(
        SourceInfo("matrix market", location, lazy=True),
        (rows, cols),
        labels=Labels(
            row_coords=_read_labels(location, "row", "rows", rows),
            col_coords=_read_labels(location, "column", "columns", cols),
        ),
        pieces=pieces,
        entries=entries if kinds[4] == "general" else None,
    )
    return with_cells_as_rows(source, location)


def label_file(target: Path, side: str) -> Path:
    """Return the file in which `export` writes the labels of a side of a Matrix Market file."""
    stem = target.name.removesuffix(".gz").removesuffix(".bz2").removesuffix(".mtx")
    return target.with_name(f"{stem}.{side}.txt")


def _sizes(location: Location, file: IO[bytes]) -> tuple[int, int, int]:
    line = b"%"
    while line.startswith(b"%") or (line and not line.strip()):
        line = file.readline(LONGEST_LINE)
    try:
        rows, cols, entries = (int(field) for field in line.split())
    except ValueError:
        raise DataError(
            f"{location} has {line[:40]!r} where its numbers of rows, columns and entries should be"
        ) from None
    return rows, cols, entries


def _parsed(location: Location, text: bytes) -> Any:
    """Return the entries in some lines, parsed as a separate file."""
    from scipy.io import mmread

    # SciPy from 1.18 warns unless this option is passed; before 1.15 it does not exist.
    has_option = "spmatrix" in signature(mmread).parameters
    keywords: dict[str, Any] = {"spmatrix": False} if has_option else {}
    try:
        return mmread(BytesIO(text), **keywords)
    except Exception as error:
        raise DataError(f"{location} cannot be read as Matrix Market: {error}") from error


def _read_labels(location: Location, dim: str, side: str, size: int) -> dict[str, NDArray[Any]]:
    file = label_file(Path(location), side)
    if location.is_url or not file.is_file():
        return {}
    names = file.read_text(encoding="utf-8").splitlines()
    if len(names) != size:
        raise DataError(
            f"{file} has {len(names)} labels for {size} {side} of {location}; correct it, or "
            "move it away"
        )
    return {dim: text_array(names)}
