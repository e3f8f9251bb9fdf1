"""Arrays in files of NumPy, and sparse matrices in its archives."""

import math
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.data.adapters import Source, from_matrix
from daskfactor.data.coo import coordinate_pieces
from daskfactor.data.grid import expand_chunks
from daskfactor.data.labels import DEFAULT_DIMS, Labels, usable_dims
from daskfactor.data.long_tables import names_columns
from daskfactor.data.statistics import SourceInfo, check_dtype, matrix_shape
from daskfactor.data.tables import ReadOptions
from daskfactor.errors import DaskfactorError, DataError
from daskfactor.machine import available_memory
from daskfactor.urls import Location, error_summary, is_url, safe_cause

STRIP = 2**23
"""Bytes of columns that are read together."""
UNREADABLE = (ValueError, EOFError, SyntaxError, TokenError, zipfile.BadZipFile)
"""Errors that NumPy raises for damaged, truncated or foreign files."""


def read_npy(location: Location, name: str | None, options: ReadOptions) -> Any:
    """Return the array of a file, which is read when it is used."""
    try:
        return _npy_at(location) if location.is_url else np.load(location, "r", False)
    except DaskfactorError:
        raise
    except UNREADABLE as error:
        raise DataError(
            f"{location} is not a readable NumPy array file: {_why(error, location)}"
        ) from safe_cause(error, location)


def _npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, order (whether by columns) and type of the array in a ``.npy`` file."""
    headers = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version[0] not in headers:
        raise ValueError(f"its version is {version}")
    return headers[version[0]](file)


def _npy_at(location: Location) -> Any:
    """Return the source of a ``.npy`` file at a URL, which is read in parts; a tensor is read."""
    with location.open() as file:
        shape, by_column, dtype = _npy_header(file)
        start = file.tell()
        if len(shape) > 2 and math.prod(shape) * dtype.itemsize <= available_memory():
            file.seek(0)
            return np.load(file, allow_pickle=False)
    shape, dtype = matrix_shape(shape), check_dtype(dtype)
    # A file in column-major order is read in strips of columns.
    width = max(1, STRIP // (shape[0] * dtype.itemsize))
    return Source(
        SourceInfo("npy", location, lazy=True),
        shape,
        dtype,
        chunks=expand_chunks(shape, (shape[0], min(width, shape[1]))) if by_column else None,
        read=partial(_part_of_npy, location, start, shape, dtype, by_column),
    )


def _part_of_npy(
    location: Location,
    start: int,
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    by_column: bool,
    rows: slice,
    cols: slice,
) -> NDArray[Any]:
    major, minor, length = (cols, rows, shape[0]) if by_column else (rows, cols, shape[1])
    size = (major.stop - major.start) * length * dtype.itemsize
    with location.open() as file:
        file.seek(start + major.start * length * dtype.itemsize)
        raw = file.read(size)
    if len(raw) < size:
        raise DataError(f"{location} ends too early; it was cut off, or is still being written")
    part = np.frombuffer(raw, dtype).reshape(-1, length)[:, minor]
    return part.T if by_column else part


def read_npz(location: Location, name: str | None, options: ReadOptions) -> Any:
    """Return an array of an archive, or the sparse matrix in several of them."""
    with _archive(location) as archive:
        names = list(archive.files)
        names_given = options.table or names_columns(options)
        kinds = {"format", "data"}, {"data", "indices", "indptr"}, {"row", "col", "data"}
        if name is None and (names_given or any(kind <= {*names} for kind in kinds)):
            return _sparse_archive(location, {key: archive[key] for key in names}, options)
        if name is None:
            chosen = _matrices(archive)
            if len(chosen) == 1:
                return archive[chosen[0]]
        elif name in names:
            return archive[name]
    if not names:
        raise DataError(f"{location} holds no array")
    if name is None:
        raise DataError(
            f"{location} holds {len(chosen) or 'no'} matrices of numbers (its arrays are "
            f"{', '.join(chosen or names)}); name one as {location}:NAME"
        )
    raise DataError(f"{location} has no array {name!r}, only {', '.join(names)}")


def _sparse_archive(location: Location, arrays: Mapping[str, Any], options: ReadOptions) -> Source:
    """Return the sparse matrix in the arrays of a NumPy archive.

    The archive is one of three kinds: from scipy.sparse.save_npz; compressed rows as ``data``,
    ``indices``, ``indptr``, ``shape``; or three arrays of positions and values, named row, col and
    data or as ``options`` say. Arrays ``row_labels`` and ``column_labels`` are labels.
    """
    dims = usable_dims(*arrays.get("dims", np.array(DEFAULT_DIMS)).tolist())
    coords = _labels(arrays, dims[0], "row_labels"), _labels(arrays, dims[1], "column_labels")
    shared: dict[str, Any] = {
        "info": SourceInfo("npz", location),
        "unstored": str(arrays["unstored"]) if "unstored" in arrays else None,
    }
    if options.rows is None and ("format" in arrays or "indptr" in arrays):
        if "format" in arrays:
            with location.open() as file:
                matrix = sparse.load_npz(file)
        else:
            parts = arrays["data"], arrays["indices"], arrays["indptr"]
            matrix = sparse.csr_array(parts, shape=tuple(arrays["shape"].tolist()))
        return replace(from_matrix(matrix), labels=Labels(*dims, *coords), **shared)
    rows, cols, data = _triples(location, arrays, options)
    shape = tuple(arrays["shape"].tolist()) if "shape" in arrays else None
    return Source(
        shape=shape,
        labels=Labels() if shape is None else Labels(*dims, *coords),
        pieces=lambda add: coordinate_pieces(rows, cols, data),
        entries=data.size,
        **shared,
    )


def _why(error: BaseException, location: Location) -> str:
    """Return the reason of a NumPy error, without its advice to allow pickles."""
    foreign = any(word in str(error) for word in ("pickle", "Python objects"))
    text = error_summary(error, location) if is_url(location) else str(error)
    return "it holds no numbers, or is not a NumPy file" if foreign else text


@contextmanager
def _archive(location: Location) -> Iterator[Any]:
    """Open a NumPy archive, refused if its arrays exceed free memory."""
    try:
        with location.open() as file:
            with zipfile.ZipFile(file) as members:
                size = sum(member.file_size for member in members.infolist())
            if size > available_memory():
                raise DataError(
                    f"{location} holds arrays of {size} bytes, which are read whole, and less is "
                    "free; write it as a zarr array, or as a table that convert reads"
                )
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                yield archive
    except DaskfactorError:
        raise
    except (OSError, MemoryError, *UNREADABLE) as error:
        raise DataError(
            f"{location} is not a readable NumPy archive: {_why(error, location)}"
        ) from safe_cause(error, location)


def _matrices(archive: Any) -> list[str]:
    """Return the names of numeric matrices in an archive, or of arrays with more dimensions."""
    kinds_of: dict[str, tuple[int, str]] = {}
    for name in archive.files:
        with archive.zip.open(f"{name}.npy") as file:
            shape, _, dtype = _npy_header(file)
            kinds_of[name] = len(shape), dtype.kind
    several = {name for name, (n, kind) in kinds_of.items() if n >= 2 and kind in "biuf"}
    matrices = {name for name in several if kinds_of[name][0] == 2 and kinds_of[name][1] != "b"}
    names = kinds_of.keys() if len(kinds_of) == 1 else matrices or several
    return [name for name in kinds_of if name in names]


def _labels(arrays: Mapping[str, NDArray[Any]], dim: str, name: str) -> dict[str, NDArray[Any]]:
    if name not in arrays:
        return {}
    array = arrays[name]
    return {dim: np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array}


def _triples(
    location: Location, arrays: Mapping[str, NDArray[Any]], options: ReadOptions
) -> list[NDArray[Any]]:
    """Return rows, columns and values from an archive with an array for each."""
    names = []
    for choice, usual in (
        (options.rows, ("row", "rows")),
        (options.columns, ("col", "cols", "column", "columns")),
        (options.values, ("data", "values", "value")),
    ):
        candidates = usual if choice is None else (str(choice),)
        present = [name for name in candidates if name in arrays]
        if not present:
            raise DataError(
                f"{location} has no array {' or '.join(candidates)}; it has {', '.join(arrays)}; "
                "name the arrays with rows, columns and values"
            )
        names.append(present[0])
    shapes = [arrays[name].shape for name in names]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise DataError(
            f"the arrays {', '.join(names)} of {location} have shapes {shapes[0]}, {shapes[1]} "
            f"and {shapes[2]}; they must have the same length"
        )
    return [arrays[name] for name in names]
