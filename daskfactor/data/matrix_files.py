"""Files that hold a sparse matrix by position: Matrix Market, NumPy archives, AnnData."""

import bz2
import gzip
import zipfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.keys import text_array
from daskfactor.data.labels import DEFAULT_DIMS, Labels, SourceInfo, usable_dims
from daskfactor.data.sparse_source import (
    Piece,
    SparseSource,
    backed_pieces,
    compressed_pieces,
    coordinate_pieces,
)
from daskfactor.data.tables import Wanted, opened, require
from daskfactor.errors import DataError

TEXT_CHUNK = 2**24
"""Bytes of a Matrix Market file that are parsed together."""


def open_matrix_market(location: str) -> SparseSource:
    """A Matrix Market file of coordinates, compressed or not, read in pieces."""
    with _text_file(location) as file:
        banner = file.readline()
        kinds = banner.decode("ascii", "replace").lower().split()
        if kinds[:2] != ["%%matrixmarket", "matrix"] or len(kinds) != 5:
            raise DataError(f"{location} is no Matrix Market file: it begins with {banner[:40]!r}")
        if kinds[2] != "coordinate" or kinds[3] == "complex":
            raise DataError(
                f"{location} holds a {kinds[2]} matrix of {kinds[3]} numbers; what is read here is "
                "coordinate real, integer or pattern"
            )
        rows, cols, entries = _sizes(location, file)
        start = file.tell()

    def pieces(values: bool, add: bool) -> Iterator[Piece]:
        found = 0
        for text in _line_chunks(location, start):
            coo, lines = _parsed(location, banner, (rows, cols), text)
            found += lines
            yield from coordinate_pieces(coo.row, coo.col, coo.data)
        if found != entries:
            raise DataError(
                f"{location} says that it has {entries} entries, but has {found}; it was cut off "
                "or changed"
            )

    return SparseSource(
        SourceInfo("matrix market", location, lazy=True),
        pieces,
        (rows, cols),
        Labels(
            row_coords=_labels_beside(location, "row", "rows", rows),
            col_coords=_labels_beside(location, "column", "columns", cols),
        ),
        entries=entries if kinds[4] == "general" else None,
    )


def open_npz(location: str, wanted: Wanted) -> SparseSource:
    """A sparse matrix in a NumPy archive.

    Either what scipy.sparse.save_npz writes; or compressed rows as ``data``,
    ``indices``, ``indptr``, ``shape``; or three arrays of positions and values,
    called row, col and data or as ``wanted`` says. Arrays ``row_labels`` and
    ``column_labels`` are labels.
    """
    try:
        with np.load(opened(location), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{location} is no NumPy archive that can be read: {error}") from error
    info = SourceInfo("npz", location, lazy=True)
    row_dim, col_dim = usable_dims(*arrays.get("dims", np.array(DEFAULT_DIMS)).tolist())
    labels = Labels(
        row_dim,
        col_dim,
        _labels(arrays, row_dim, "row_labels"),
        _labels(arrays, col_dim, "column_labels"),
    )
    unstored = str(arrays["unstored"]) if "unstored" in arrays else None
    if {"data", "indices", "indptr"} <= arrays.keys() and wanted.rows is None:
        kind = _kind(arrays)
        if kind not in ("csr", "csc"):
            raise DataError(f"{location} holds a sparse matrix of format {kind}; save it as csr")
        shape = tuple(int(side) for side in arrays["shape"])
        parts = {name: arrays[name] for name in ("data", "indices", "indptr")}
        return SparseSource(
            info,
            lambda values, add: compressed_pieces(SimpleNamespace(format=kind, **parts)),
            (shape[0], shape[1]),
            labels,
            int(arrays["indptr"][-1]),
            unstored,
        )
    names = [
        _array(location, arrays, name, usual)
        for name, usual in (
            (wanted.rows, ("row", "rows")),
            (wanted.columns, ("col", "cols", "column", "columns")),
            (wanted.values, ("data", "values", "value")),
        )
    ]
    rows, cols, data = (arrays[name] for name in names)
    if not rows.shape == cols.shape == data.shape or rows.ndim != 1:
        raise DataError(
            f"the arrays {', '.join(names)} of {location} have shapes {rows.shape}, {cols.shape} "
            f"and {data.shape}; they must be as long as each other"
        )
    sides = tuple(int(side) for side in arrays["shape"]) if "shape" in arrays else None
    return SparseSource(
        info,
        lambda values, add: coordinate_pieces(rows, cols, data),
        None if sides is None else (sides[0], sides[1]),
        labels if sides is not None else Labels(),
        data.size,
        unstored,
    )


def open_h5ad(location: str, layer: str | None) -> SparseSource:
    """The matrix X, or a layer, of an AnnData file; read in pieces, whatever its size."""
    io = require("anndata.io", "anndata", "AnnData files")
    key = "X" if layer is None else f"layers/{layer}"
    with _h5(location) as file:
        if key not in file:
            layers = ", ".join(file.get("layers", {})) or "none"
            raise DataError(f"{location} has no {key}; its layers are: {layers}")
        if not hasattr(file[key], "keys"):
            raise DataError(
                f"{key} of {location} is dense; convert is for sparse matrices: pass it to "
                "as_blocks or sample as an array, or make it sparse first"
            )
        shape = io.sparse_dataset(file[key]).shape
        entries = int(file[key]["data"].shape[0])
        sides = {name: _index_of(io, file[name]) if name in file else {} for name in ("obs", "var")}

    def pieces(values: bool, add: bool) -> Iterator[Piece]:
        with _h5(location) as file:
            yield from backed_pieces(io.sparse_dataset(file[key]), shape)

    return SparseSource(
        SourceInfo("h5ad", location, lazy=True),
        pieces,
        shape,
        Labels("obs", "var", sides["obs"], sides["var"]),
        entries,
    )


def label_file(target: Path, side: str) -> Path:
    """Where `export` puts the labels of one side of a Matrix Market file."""
    stem = target.name.removesuffix(".gz").removesuffix(".bz2").removesuffix(".mtx")
    return target.with_name(f"{stem}.{side}.txt")


def _labels_beside(location: str, dim: str, side: str, size: int) -> dict[str, NDArray[Any]]:
    if "://" in location or not label_file(Path(location), side).is_file():
        return {}
    names = label_file(Path(location), side).read_text(encoding="utf-8").splitlines()
    if len(names) != size:
        raise DataError(
            f"{label_file(Path(location), side)} has {len(names)} labels for {size} {side} of "
            f"{location}; correct it, or move it away"
        )
    return {dim: text_array(names)}


def _sizes(location: str, file: IO[bytes]) -> tuple[int, int, int]:
    line = b"%"
    while line.startswith(b"%") or (line and not line.strip()):
        line = file.readline()
    try:
        rows, cols, entries = (int(field) for field in line.split())
    except ValueError:
        raise DataError(
            f"{location} has {line[:40]!r} where its numbers of rows, columns and entries should be"
        ) from None
    return rows, cols, entries


def _line_chunks(location: str, start: int) -> Iterator[bytes]:
    """Whole lines, about 16 MB together."""
    with _text_file(location) as file:
        file.seek(start)
        rest = b""
        while read := file.read(TEXT_CHUNK):
            whole, found, rest_of_line = read.rpartition(b"\n")
            if not found:
                rest += read
                continue
            yield rest + whole + found
            rest = rest_of_line
        if rest.strip():
            yield rest + b"\n"


def _parsed(location: str, banner: bytes, shape: tuple[int, int], text: bytes) -> tuple[Any, int]:
    """The entries in some lines, read as if they were a file of their own, and the lines."""
    from scipy.io import mmread

    if b"%" in text or b"\n\n" in text or text.startswith(b"\n") or b"\r" in text:
        kept = [line for line in text.splitlines() if line.strip() and line[:1] != b"%"]
        text = b"\n".join([*kept, b""])
    count = text.count(b"\n")
    try:
        return mmread(BytesIO(banner + b"%d %d %d\n" % (*shape, count) + text)), count
    except Exception as error:
        raise DataError(f"{location} cannot be read as Matrix Market: {error}") from error


def _text_file(location: str) -> Any:
    file: Any = opened(location)
    if location.lower().endswith(".gz"):
        return gzip.open(file, "rb")
    if location.lower().endswith(".bz2"):
        return bz2.open(file, "rb")
    return open(file, "rb") if isinstance(file, str) else file  # noqa: PTH123 - may be remote


def _kind(arrays: Mapping[str, NDArray[Any]]) -> str:
    found = arrays["format"].item() if "format" in arrays else "csr"
    return found.decode() if isinstance(found, bytes) else str(found)


def _labels(arrays: Mapping[str, NDArray[Any]], dim: str, name: str) -> dict[str, NDArray[Any]]:
    if name not in arrays:
        return {}
    array = arrays[name]
    return {dim: np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array}


def _array(
    location: str, arrays: Mapping[str, NDArray[Any]], wanted: object, usual: tuple[str, ...]
) -> str:
    names = usual if wanted is None else (str(wanted),)
    for name in names:
        if name in arrays:
            return name
    raise DataError(
        f"{location} has no array {' or '.join(names)}; it has {', '.join(arrays)}; name the "
        "arrays with rows, columns and values"
    )


def _h5(location: str) -> Any:
    import h5py

    try:
        return h5py.File(opened(location), "r")
    except OSError as error:
        raise DataError(f"{location} is no AnnData file that can be read: {error}") from error


def _index_of(io: Any, group: Any) -> dict[str, NDArray[Any]]:
    """Names of observations or variables, unless they are just 0, 1, 2, ..."""
    key = group.attrs.get("_index") if hasattr(group, "keys") else None
    names = io.read_elem(group).index if key is None else io.read_elem(group[key])
    texts = text_array([str(name) for name in np.asarray(names, object)])
    if all(name == str(number) for number, name in enumerate(texts)):
        return {}
    return {group.name.strip("/"): texts}
