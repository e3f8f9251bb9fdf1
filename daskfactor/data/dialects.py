"""Dialects of text files: compression, separator of fields, and the first line of data."""

import csv
import lzma
import math
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
from daskfactor.urls import PACKINGS, Location, error_summary, is_url

MISSING = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "none", "?"]
DOUBLE_COLON = "::"
BLANK = " "
SEPARATORS = ("\t", ";", ",", "|", DOUBLE_COLON, BLANK)
"""Separators; among those that split lines equally well, the first one is used."""
UNIT = "\x1f"
"""Replacement of two colons where a separator must be one character."""
HEAD_BYTES = 2**16
"""Bytes for the detection of a dialect, or more if they hold fewer than two lines of data."""
SAMPLED_LINES = 20
TEXT_COPIES = 32
"""Bytes of memory per character of a dense table during conversion to numbers."""
WORD_COUNTS = ["document", "word", "count"]


class Dialect(NamedTuple):
    """Dialect of a text table.

    ``skipped`` lines precede the table, among them a header in a comment. ``names`` are column
    names that come from elsewhere than a header line. ``lines`` are the first lines.
    """

    skipped: int
    separator: str
    names: list[str] | None
    lines: list[str]

    def fields(self, line: str) -> list[str]:
        """Return the fields of a line."""
        return _fields(line, self.separator)

    def split(self, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
        """Yield the number of each line, from 1 on, and its fields."""
        if self.separator in (BLANK, DOUBLE_COLON):
            for number, line in enumerate(lines, start=1):
                yield number, self.fields(line)
            return
        table: Any = csv.reader(lines, delimiter=self.separator)
        for row in table:
            yield table.line_num, [field.strip() for field in row]

    @property
    def mark(self) -> str:
        """Return the one-character separator of fields in the blocks of `blocks_of_text`."""
        return UNIT if self.separator == DOUBLE_COLON else self.separator


def _fields(line: str, separator: str) -> list[str]:
    if not line.strip():
        return []
    if separator in (BLANK, DOUBLE_COLON):
        parts = line.split(None if separator == BLANK else separator)
    else:
        try:
            parts = next(csv.reader([line], delimiter=separator), [])
        except csv.Error:  # a field above 128 kB: reported when the table is read
            parts = line.split(separator)
    return [field.strip() for field in parts]


def dialect_of(location: str | PathLike[str]) -> Dialect:
    """Detect the dialect of a text table from its first lines.

    The separator splits all of them into equally many fields, of which as many as possible after
    the first are numbers. Lines before the table that begin with ``#`` or ``%`` are comments,
    unless they are split like those of the table, with numbers after the first field.

    Raises
    ------
    DataError
        If the file cannot be read.
    """
    lines = _first_lines(fspath(location))
    skipped = next((n for n, line in enumerate(lines) if _holds_data(line)), None)
    if skipped is None:  # all of them look like comments
        skipped = next((n for n, line in enumerate(lines) if line.strip()), 0)
    if _counts_words(lines[skipped:]):
        return Dialect(skipped + 3, BLANK, WORD_COUNTS, lines[skipped + 3 :])
    sampled = list(filter(str.strip, lines[skipped:]))[:SAMPLED_LINES]
    separator = _separator(sampled)
    width = len(_fields(sampled[-1], separator)) if sampled else 0
    skipped = next(
        (n for n in range(skipped) if _is_row(_fields(lines[n], separator), width)), skipped
    )
    dialect = Dialect(skipped, separator, None, lines[skipped:])
    if not sampled:
        return dialect
    names = _commented_header(lines[:skipped], dialect.fields(lines[skipped]), separator)
    return dialect._replace(names=names)


def _holds_data(line: str) -> bool:
    return bool(line.strip()) and not line.startswith(("#", "%"))


def _is_row(fields: Sequence[str], width: int) -> bool:
    """Return whether a line has the width of the table, and numbers after the first field."""
    return len(fields) == width > 1 and all(map(is_number, fields[1:]))


def _commented_header(
    comments: Sequence[str], first: Sequence[str], separator: str
) -> list[str] | None:
    """Return names of columns from the last comment before a table, if it holds them."""
    if not comments or len(first) < 2 or not all(map(is_number, first[1:])):
        return None
    text = re.sub(r"^#+\s*|^%+\s+", "", comments[-1])
    corner = not is_number(first[0])  # a header may lack the name of the row names
    divided = [_fields(text, separator)]
    if separator in ("\t", BLANK):
        divided.append(text.split())
    for header in divided:
        short = len(first) - len(header)
        if header and short in (0, int(corner)) and not any(map(is_number, header[1:])):
            return [*[""] * short, *header]
    return None


def _counts_words(lines: Sequence[str]) -> bool:
    """Return whether lines are a bag of words of the UCI repository.

    It begins with the numbers of documents, words and entries; triples follow.
    """
    table = [line.split() for line in lines if line.strip()]
    if len(table) < 4 or [len(line) for line in table[:3]] != [1, 1, 1]:
        return False
    if not all(field.isdecimal() for line in table for field in line):
        return False
    documents, words, entries = (int(line[0]) for line in table[:3])
    return entries >= len(table) - 3 and all(
        len(line) == 3 and 1 <= int(line[0]) <= documents and 1 <= int(line[1]) <= words
        for line in table[3:]
    )


def _separator(lines: Sequence[str]) -> str:
    """Return the separator of the fields of some lines."""
    best, most = None, -1.0
    for mark in SEPARATORS:
        table = [_fields(line, mark) for line in lines]
        widths = {len(fields) for fields in table[1:]} or {len(fields) for fields in table[:1]}
        if len(widths) != 1 or (width := widths.pop()) < 2:
            continue
        if len(table[0]) not in (width, width - 1):  # a header may lack the corner
            continue
        behind = [field for fields in table[len(table) > 1 :] for field in fields[1:]]
        share = sum(is_number(field) or has_decimal_comma(field) for field in behind) / len(behind)
        if share > most:
            best, most = mark, share
    if best is not None or not lines:
        return best or ","
    plain_marks = [mark for mark in SEPARATORS if len(mark) == 1 and mark in lines[0]]
    return max(plain_marks, key=lambda mark: (mark != BLANK, lines[0].count(mark)), default=BLANK)


def _first_lines(location: str) -> list[str]:
    """Return the first complete lines of a text file, with two lines of data if possible."""
    raw, last, lines = b"", False, list[str]()
    with readable(location), plain(location) as stream:
        while not last:
            part = stream.read(max(HEAD_BYTES, len(raw)))
            raw, last = raw + part, not part
            if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise DataError(f"{location} is UTF-16 text; save it as UTF-8")
            if len(raw) > max(HEAD_BYTES, available_memory() // TEXT_COPIES):
                raise _too_large(location)
            if b"\0" in part:
                raise DataError(f"{location} is not a text file")
            # Invalid UTF-8 is refused when it is read, not in columns that are not used.
            lines = list(raw.decode("utf-8-sig", "replace").splitlines())
            complete_lines = lines if last or raw.endswith(b"\n") else lines[:-1]
            if sum(map(_holds_data, complete_lines)) > 1:
                return complete_lines
    return lines


def blocks_of_text(file: Any, dialect: Dialect, size: int) -> Iterator[bytes]:
    """Yield whole lines of a table, in which `Dialect.mark` separates fields."""
    for _ in range(dialect.skipped):
        file.readline()
    while text := file.read(size) + file.readline():
        if dialect.separator == BLANK:
            text = re.sub(rb"[ \t]*(\r?\n|$)", rb"\1", re.sub(rb"(?m)^[ \t]+", b"", text))
            text = re.sub(rb"[ \t]+", b" ", text)
        elif dialect.separator == DOUBLE_COLON:
            text = text.replace(b"::", UNIT.encode())
        yield text


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
    """Raise errors of reading a text file as DataError."""
    try:
        yield
    except DaskfactorError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"{location} is not UTF-8 text: {error}; save it as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{location} is not a text table: {error}") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise unreadable(fspath(location), error) from error


def unreadable(location: str, error: BaseException) -> DataError:
    """Return the DataError of a table that cannot be read."""
    reason = (
        error_summary(error, location) if is_url(location) else " ".join(str(error).split())[:200]
    )
    return DataError(f"{location} cannot be read as a table: {reason}")


@contextmanager
def plain(location: str | PathLike[str]) -> Iterator[Any]:
    """Open a local or remote file for reading, decompressed according to its ending."""
    from fsspec.compression import compr

    packing = Path(fspath(location).lower()).suffix
    with Location.of(location).open() as packed:
        if packing == ".zip":
            with (
                zipfile.ZipFile(packed) as archive,
                archive.open(_only_member(archive, location)) as file,
            ):
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


def _only_member(archive: zipfile.ZipFile, location: str | PathLike[str]) -> str:
    """Return the name of the one file in an archive."""
    names = [
        name
        for name in archive.namelist()
        if name.rpartition("/")[2] and not re.search(r"(^|/)(\.|__MACOSX)", name)
    ]
    if len(names) != 1:
        listed = ", ".join(names[:4]) + " ..." * (len(names) > 4)
        raise DataError(
            f"{location} holds {len(names)} files ({listed}); unpack it, and pass one of them"
        )
    return names[0]


def _limited(file: TextIOWrapper, location: str) -> Iterator[str]:
    """Yield the lines of a text, limited to the amount that fits into memory as numbers."""
    left = available_memory() // TEXT_COPIES
    while line := file.readline(left + 1):
        left -= len(line)
        if left < 0:
            raise _too_large(location)
        yield line


def _too_large(location: str) -> DataError:
    return DataError(
        f"{location} is too large for the memory that is free, where all of it is read at once; "
        "write it as a zarr array, or as a table with a line for each entry"
    )


_NO_NUMBER = frozenset(text.lower() for text in MISSING)
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d{1,6}")


def has_decimal_comma(field: str) -> bool:
    """Return whether a field is a number with a comma where Python has a point."""
    return _DECIMAL_COMMA.fullmatch(field) is not None


def is_number(field: str) -> bool:
    """Return whether a field is a number or a code for a missing value."""
    try:
        float(field)
    except ValueError:
        return field.lower() in _NO_NUMBER
    return True


def fault_of(location: str, line: int, fields: Sequence[str], width: int) -> str | None:
    """Return the error in a line of a matrix or of a long table; None if there is none.

    ``width`` is the number of fields of the lines before it.
    """
    if fields and len(fields) != width:
        problem = (
            f"has {len(fields)} fields, the lines before it {width}; write {width} on every line"
        )
        return f"{location}, line {line} {problem}, with nothing in one whose value is missing"
    for position, field in enumerate(fields, start=1):
        if is_number(field) and math.isinf(number(field)):
            return (
                f"{location}, line {line}, field {position} is {field!r}: correct it, or write NaN"
            )
    return None


def number(field: str) -> float:
    """Return the number in a field, NaN for a code of a missing value."""
    return float("nan") if field.lower() in _NO_NUMBER else float(field)


def numbers(location: str, line: int, fields: Sequence[str], first: int, mark: str) -> list[float]:
    """Return the numbers of a line; errors name its position in the file."""
    for position, field in enumerate(fields[first:], start=first + 1):
        if not is_number(field):
            raise DataError(
                f"{location}, line {line}, field {position}: {field!r} is not a number"
                f"{_hint(field, fields, mark)}"
            )
    return list(map(number, fields[first:]))


def _hint(field: str, fields: Sequence[str], mark: str) -> str:
    if has_decimal_comma(field):
        mark = r"\s+" if mark == BLANK else mark
        call = f"pandas.read_csv(..., sep={mark!r}, decimal=',')"
        return f"; write numbers with a point, or pass what {call} reads"
    if len(fields) > 2 and field == fields[1]:
        return "; for a table with a line for each entry pass rows, columns and values"
    return ""
