"""Files that ``daskfactor fit`` reads, turned into something that ``sample`` takes."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daskfactor.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr
    from numpy.typing import NDArray

TABLES = (".csv", ".tsv", ".txt")
_MISSING = {"", "na", "nan", "null", "none", "?"}
TO_CONVERT = (".parquet", ".mtx", ".h5ad", ".gz")
KINDS = ".npy, .npz, .csv, .tsv, .txt, .zarr or netCDF (.nc)"


def read_input(text: str) -> Any:
    """The matrix that an argument of the command line names.

    ``file.npz:name`` (or ``file.nc:name``, ``file.zarr:name``) picks one array of several.

    Raises
    ------
    DataError
        If the file holds no matrix, or not the one that was named.
    """
    if "://" in text:
        return text
    path, name = split_name(text)
    if not path.exists():
        raise DataError(f"{path} does not exist; give a file or store: {KINDS}")
    suffix = path.suffix.lower()
    if suffix in TO_CONVERT:
        raise DataError(
            f"{path} holds a matrix that is converted first: daskfactor convert {path} "
            f"{path.with_suffix('.zarr')}, and then fit that store"
        )
    if suffix == ".npy":
        return _read_npy(path)
    if suffix == ".npz":
        return _read_npz(path, name)
    if suffix in TABLES:
        return read_table(path)
    if path.is_dir() and name is None and _is_matrix_store(path):
        return str(path)
    return _read_labelled(path, name)


def split_name(text: str) -> tuple[Path, str | None]:
    """``file.npz:name`` as its two parts; a file whose own name has a colon wins."""
    if Path(text).exists() or ":" not in text:
        return Path(text), None
    head, _, name = text.rpartition(":")
    return Path(head), name


def _read_npy(path: Path) -> Any:
    import numpy as np

    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path} is no NumPy array file that can be read: {error}") from error


def _read_npz(path: Path, name: str | None) -> Any:
    import zipfile

    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as archive:
            names = list(archive.files)
            if name is None and {"format", "shape", "data"} <= set(names):
                return _read_scipy(path)
            if not names:
                raise DataError(f"{path} holds no array")
            if name is not None and name not in names:
                raise DataError(f"{path} has no array {name!r}, only {', '.join(names)}")
            return archive[name or names[0]]
    except (ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is no NumPy archive that can be read: {error}") from error


def _read_scipy(path: Path) -> Any:
    """A sparse matrix that ``scipy.sparse.save_npz`` wrote."""
    from scipy import sparse

    return sparse.load_npz(path)


def _is_matrix_store(path: Path) -> bool:
    """Whether a folder is something that `as_blocks` opens, or refuses with the right sentence."""
    from daskfactor.data.store import zarr_kind

    return zarr_kind(str(path)) in ("blocks", "array", "run")


def _read_labelled(path: Path, name: str | None) -> "xr.DataArray":
    import xarray as xr

    try:
        # Consolidated metadata is only a shortcut; asking for it warns where there is none.
        zarr_options: Any = {"engine": "zarr", "consolidated": False} if path.is_dir() else {}
        dataset = xr.open_dataset(path, chunks={}, **zarr_options)
    except Exception as error:  # every backend has errors of its own
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path} cannot be read; give {KINDS}. xarray says: {reason}") from error
    # A store lists its arrays in no order of its own.
    matrices = sorted(str(key) for key, array in dataset.data_vars.items() if array.ndim == 2)
    if name is not None:
        if name not in dataset.data_vars:
            listing = ", ".join(sorted(str(key) for key in dataset.data_vars))
            raise DataError(f"{path} has no variable {name!r}, only {listing}")
        return dataset[name]
    if len(matrices) != 1:
        raise DataError(
            f"{path} holds {len(matrices)} two-dimensional variables "
            f"({', '.join(matrices) or 'none'}); name one as {path}:NAME"
        )
    return dataset[matrices[0]]


def read_table(path: Path) -> "xr.DataArray | NDArray[np.float64]":
    """A table of numbers as text; a header line and a column of row names are recognised.

    Empty fields, ``NA``, ``NaN``, ``null``, ``none`` and ``?`` are missing cells. A first line
    with anything that is no number, its first field aside, is a header; a first column whose
    header is empty, or that holds anything that is no number, holds the row names.

    Raises
    ------
    DataError
        If lines differ in length or a cell is no number; it names the line.
    """
    import numpy as np
    import xarray as xr

    rows = _read_fields(path)
    # A first field that is no number may as well be the name of the first row.
    tell_tale = rows[0][1][1:] or rows[0][1]
    header = rows.pop(0)[1] if any(_number(field) is None for field in tell_tale) else None
    if not rows:
        raise DataError(f"{path} has a header and no line of numbers")
    _check_lengths(path, rows)
    named = (header is not None and len(header) == len(rows[0][1]) and not header[0]) or any(
        _number(fields[0]) is None for _, fields in rows
    )
    index = [fields[0] for _, fields in rows] if named else None
    first = 1 if named else 0
    # Some writers leave the corner above the row names out altogether.
    skip = first if header is not None and len(header) == len(rows[0][1]) else 0
    values = np.array([_numbers(path, line, fields, first) for line, fields in rows])
    if header is None and index is None:
        return values
    columns = header[skip:] if header is not None else None
    if columns is not None and len(columns) != values.shape[1]:
        raise DataError(
            f"{path} has {len(columns)} names in its header, "
            f"but {values.shape[1]} columns of numbers"
        )
    labels = {"row": index, "column": columns}
    return xr.DataArray(
        values,
        dims=("row", "column"),
        coords={dim: names for dim, names in labels.items() if names is not None},
    )


def _check_lengths(path: Path, rows: list[tuple[int, list[str]]]) -> None:
    expected = len(rows[0][1])
    for line, fields in rows:
        if len(fields) != expected:
            raise DataError(
                f"{path}, line {line} has {len(fields)} fields, the lines before it {expected}"
            )


def _read_fields(path: Path) -> list[tuple[int, list[str]]]:
    """Line numbers and fields of all lines that are not blank."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            delimiter = _delimiter(file.readline())
            file.seek(0)
            lines: Any = file
            if delimiter is None:
                reader = ((n, line.split()) for n, line in enumerate(lines, start=1))
                return _nonempty(path, list(reader))
            table = csv.reader(lines, delimiter=delimiter)
            return _nonempty(path, [(table.line_num, fields) for fields in table])
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is no text table: {error}") from error


def _delimiter(line: str) -> str | None:
    """The separator that the first line uses most; None for blanks."""
    best = max(",;\t", key=line.count)
    return best if line.count(best) else None


def _nonempty(path: Path, rows: list[tuple[int, list[str]]]) -> list[tuple[int, list[str]]]:
    full = [
        (line, [field.strip() for field in fields])
        for line, fields in rows
        if any(field.strip() for field in fields)
    ]
    if not full:
        raise DataError(f"{path} is empty")
    return full


def _number(field: str) -> float | None:
    if field.lower() in _MISSING:
        return float("nan")
    try:
        return float(field)
    except ValueError:
        return None


def _numbers(path: Path, line: int, fields: list[str], first: int) -> list[float]:
    values = []
    for position, field in enumerate(fields[first:], start=first + 1):
        value = _number(field)
        if value is None:
            raise DataError(f"{path}, line {line}, field {position}: {field!r} is no number")
        values.append(value)
    return values
