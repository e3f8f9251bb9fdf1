"""How text files are written: their packing, what separates fields, and where data begin."""

import csv
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader, TextIOWrapper
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

from daskfactor.checks import require
from daskfactor.errors import DaskfactorError, DataError
from daskfactor.machine import available_memory
from daskfactor.urls import binary, is_url, why

MISSING = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "none", "?"]
PACKINGS = (".gz", ".bz2", ".xz", ".zip", ".zst", ".lz4")
"""Endings of files that are read unpacked; of an archive, the only file in it."""
DOUBLED = "::"
SEPARATORS = ("\t", ";", ",", "|")
BLANK = " "
FIRST = 2**16
"""Bytes that tell how a file is written."""
COMPARED = 20
"""Lines that a separator divides into as many fields each."""
TEXT_COPIES = 32
"""Bytes of memory that a character of a dense table takes while it becomes numbers."""
RATING = ["user", "item", "rating", "time"]
COUNTED_WORDS = ["document", "word", "count"]
_UNIX_TIMES = range(10**8, 5 * 10**9)
"""Seconds from 1973 to 2128."""


class Dialect(NamedTuple):
    """How a text table is written.

    ``skipped`` lines come before it, among them a header that is a comment. ``names`` are those of
    its columns where they are known without a header of its own. ``lines`` are its first ones.
    """

    skipped: int
    separator: str
    names: list[str] | None
    lines: list[str]

    def fields(self, line: str) -> list[str]:
        """Return the fields of a line."""
        return next(iter(self.split([line])))[1] if line.strip() else []

    def split(self, lines: Iterator[str] | Sequence[str]) -> Iterator[tuple[int, list[str]]]:
        """Yield the number of each line, from 1 on, and its fields."""
        if self.separator in (BLANK, DOUBLED):
            blanks = None if self.separator == BLANK else DOUBLED
            for number, line in enumerate(lines, start=1):
                yield number, [field.strip() for field in line.split(blanks)]
            return
        table: Any = csv.reader(lines, delimiter=self.separator)
        for row in table:
            yield table.line_num, [field.strip() for field in row]


def dialect_of(location: str | PathLike[str]) -> Dialect:
    """Find how a text table is written, by its first lines.

    The separator is the one that divides all of them alike: a tab before a semicolon, and this
    before a comma, which may be a decimal one. Blanks separate where nothing else does.

    Raises
    ------
    DataError
        If the file cannot be read.
    """
    lines = _first_lines(fspath(location))
    skipped = next((n for n, line in enumerate(lines) if _holds_data(line)), len(lines))
    comments, lines = lines[:skipped], lines[skipped:]
    if _counts_words(lines):
        return Dialect(skipped + 3, BLANK, COUNTED_WORDS, lines[3:])
    separator = _separator(list(filter(str.strip, lines[:COMPARED])))
    found = Dialect(skipped, separator, None, lines)
    if not lines:
        return found
    first = found.fields(lines[0])
    if comments and all(map(is_number, first[1:])):
        text = comments[-1].lstrip("#% \t")
        corner = not is_number(first[0])  # names of columns may leave out the one of row names
        for header in (found.fields(text), text.split()):
            short = len(first) - len(header)
            named = header and not any(map(is_number, header[1:]))
            if named and len(first) > 1 and short in (0, int(corner)):
                return found._replace(names=[*[""] * short, *header])
    if _holds_ratings(list(map(found.fields, filter(str.strip, lines)))):
        return found._replace(names=RATING)
    return found


def _holds_data(line: str) -> bool:
    return bool(line.strip()) and not line.startswith(("#", "%"))


def _counts_words(lines: Sequence[str]) -> bool:
    """Whether a bag of words of the UCI repository follows: three sizes, then three numbers."""
    return len(lines) > 3 and all(
        len(line.split()) == count and line.replace(" ", "").strip().isdecimal()
        for line, count in zip(lines, (1, 1, 1, 3), strict=False)
    )


def _holds_ratings(table: Sequence[Sequence[str]]) -> bool:
    """Whether lines of a user, an item, a rating and its Unix time follow, as of MovieLens."""
    return all(
        len(fields) == len(RATING)
        and all(field.isdecimal() for field in (fields[0], fields[1], fields[3]))
        and int(fields[3]) in _UNIX_TIMES
        for fields in table
    )


def _separator(lines: Sequence[str]) -> str:
    if lines and all(DOUBLED in line for line in lines):
        return DOUBLED
    for mark in SEPARATORS[:2]:
        if len({line.count(mark) for line in lines}) == 1 and mark in lines[0]:
            return mark
    shared = [mark for mark in SEPARATORS if all(mark in line for line in lines)]
    first = lines[0] if lines else ""
    return max(shared or [*SEPARATORS, BLANK], key=first.count, default=BLANK)


def _first_lines(location: str) -> list[str]:
    """Whole lines that a text file begins with."""
    with readable(location), plain(location) as stream:
        raw = stream.read(FIRST)
        if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise DataError(f"{location} is UTF-16 text; save it as UTF-8")
        if b"\0" in raw:
            raise DataError(f"{location} holds no text, though its name says so")
        if len(raw) == FIRST and b"\n" in raw:
            raw = raw[: raw.rindex(b"\n")]  # the last line may go on
        return list(raw.decode("utf-8-sig").splitlines())


def lines_of(location: str | PathLike[str], dialect: Dialect) -> list[tuple[int, list[str]]]:
    """Return numbers and fields of the lines of a text table that are not blank."""
    with (
        readable(location),
        plain(location) as raw,
        TextIOWrapper(raw, "utf-8-sig", newline="") as file,
    ):
        rest = _limited(file, str(location))
        for _ in range(dialect.skipped):
            next(rest, None)
        lines = list(dialect.split(rest))
    full = [(dialect.skipped + number, fields) for number, fields in lines if any(fields)]
    if not full:
        raise DataError(f"{location} is empty")
    return full


@contextmanager
def readable(location: str | PathLike[str]) -> Iterator[None]:
    """Say in one sentence of a DataError why a text file cannot be read."""
    try:
        yield
    except DaskfactorError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"{location} is no UTF-8 text: {error}; save it as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{location} is no text table: {error}") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise unreadable(fspath(location), error) from error


def unreadable(location: str, error: BaseException) -> DataError:
    """Return what is said of a table that cannot be read."""
    reason = why(error, location) if is_url(location) else " ".join(str(error).split())[:200]
    return DataError(f"{location} cannot be read as a table: {reason}")


@contextmanager
def plain(location: str | PathLike[str]) -> Iterator[Any]:
    """Open a file for reading, wherever it lies, unpacked as its name says."""
    from fsspec.compression import compr

    packing = Path(fspath(location).lower()).suffix
    with binary(location) as packed:
        if packing == ".zip":
            with zipfile.ZipFile(packed) as archive, archive.open(_only(archive, location)) as file:
                yield file
        elif packing in (".gz", ".bz2", ".xz"):
            names = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz"}
            with compr[names[packing]](packed, mode="rb") as file:
                yield file
        elif packing in PACKINGS:
            pa = require("pyarrow", "tables", f"{packing} files")
            names = {".zst": "zstd", ".lz4": "lz4"}
            with BufferedReader(pa.input_stream(packed, compression=names[packing])) as file:
                yield file
        else:
            yield packed


def _only(archive: zipfile.ZipFile, location: str | PathLike[str]) -> str:
    """Return the name of the one file in an archive."""
    names = [
        name
        for name in archive.namelist()
        if not name.endswith("/") and not name.startswith("__MACOSX")
    ]
    if len(names) != 1:
        listed = ", ".join(names[:4]) + " ..." * (len(names) > 4)
        raise DataError(
            f"{location} holds {len(names)} files ({listed}); unpack it, and pass one of them"
        )
    return names[0]


def _limited(file: TextIOWrapper, location: str) -> Iterator[str]:
    """The lines of a text, as long as what becomes of them fits into memory."""
    left = available_memory() // TEXT_COPIES
    while line := file.readline(left + 1):
        left -= len(line)
        if left < 0:
            raise DataError(
                f"{location} is too large for the memory that is free, where all of it is read at "
                "once; write it as a zarr array, or as a table with a line for each entry"
            )
        yield line


_NO_NUMBER = frozenset(text.lower() for text in MISSING)
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d{1,6}")


def has_decimal_comma(field: str) -> bool:
    """Return whether a field is a number with a comma where Python has a point."""
    return _DECIMAL_COMMA.fullmatch(field) is not None


def is_number(field: str) -> bool:
    """Return whether a field is a number, or says that there is none."""
    try:
        float(field)
    except ValueError:
        return field.lower() in _NO_NUMBER
    return True


def number(field: str) -> float:
    """Return the number in a field, NaN if it says that there is none."""
    return float("nan") if field.lower() in _NO_NUMBER else float(field)


def numbers(location: str, line: int, fields: Sequence[str], first: int) -> list[float]:
    """Return the numbers of a line, whose position in the file errors tell."""
    for position, field in enumerate(fields[first:], start=first + 1):
        if not is_number(field):
            raise DataError(
                f"{location}, line {line}, field {position}: {field!r} is no number"
                f"{_hint(field, fields)}"
            )
    return list(map(number, fields[first:]))


def _hint(field: str, fields: Sequence[str]) -> str:
    if has_decimal_comma(field):
        return "; write numbers with a point, or read it with pandas.read_csv(..., decimal=',')"
    if len(fields) == 3 and is_number(fields[2]):
        return "; of a table with a line for each entry name rows, columns and values"
    return ""
