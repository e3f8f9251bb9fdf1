"""Files that hold a matrix, by their endings: as entries for `convert`, or as one array.

A format is added here alone: functions that read it, and a line of `FORMATS`.
"""

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import BytesIO
from os import PathLike, fspath
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.adapters import Source, from_blocks, open_source
from daskfactor.data.blocks import BlockedData
from daskfactor.data.entries import (
    Piece,
    backed_pieces,
    compressed_pieces,
    coordinate_pieces,
    text_array,
)
from daskfactor.data.known import DEFAULT_DIMS, Labels, SourceInfo, usable_dims
from daskfactor.data.store import BlockStore, is_blocked_store, zarr_kind
from daskfactor.data.tables import Wanted, open_csv, open_parquet, opened, read_table, require
from daskfactor.errors import DataError, OptionError

PACKED = (".gz", ".bz2", ".zst")
KNOWN = (
    ".csv, .tsv, .txt, .dat or .mtx (also .gz), .parquet (file or folder), .npz, .h5ad, or a "
    "blocked store"
)
ARRAYS = ".npy, .npz, .csv, .tsv, .txt, .zarr or netCDF (.nc)"
UNREADABLE = (ValueError, EOFError, zipfile.BadZipFile)
"""What NumPy raises at files that are damaged, cut off, or none of its own."""
TEXT_CHUNK = 2**24
"""Bytes of a Matrix Market file that are parsed together."""
_NOTHING = re.compile(rb"^[ \t]*(%.*)?\r?\n", re.MULTILINE)
"""A blank line, or a comment."""


def open_sparse(source: Any, wanted: Wanted) -> Source:
    """The entries of a file or of a sparse matrix in memory.

    Raises
    ------
    DataError
        If it is neither.
    """
    if isinstance(source, str | PathLike):
        return _open_path(fspath(source), wanted)
    if wanted.layer is not None:
        source = _layer_of(source, wanted.layer)
    blocks = isinstance(source, BlockedData)
    if blocks and source.is_sparse:
        return from_blocks(source.known, source.view)
    found = None if blocks else open_source(source)
    if found is None or not found.is_sparse:
        what = "these blocks are" if found is None else f"the {found.info.kind} input is"
        raise DataError(
            f"{what} dense, and convert is for sparse matrices; pass the data to as_blocks or "
            "sample"
        )
    return found


def read_matrix(text: str) -> Any:
    """The matrix in a file or store that `sample` does not read by itself, opened or read.

    ``file.npz:name`` (or ``file.nc:name``, ``file.zarr:name``) picks one array of several; a
    file whose own name has a colon wins. What `sample` reads by its location is left to it.

    Raises
    ------
    DataError
        If the file holds no matrix, or not the one that was named.
    """
    if "://" in text:
        return text
    path, name = Path(text), None
    if ":" in text and not path.exists():
        head, _, name = text.rpartition(":")
        path = Path(head)
    if not path.exists():
        raise DataError(f"{path} does not exist; give a file or store: {ARRAYS}")
    suffix = path.suffix.lower()
    form = FORMATS.get(suffix)
    if suffix in PACKED or (form is not None and form.array is None):
        raise DataError(
            f"{path} holds a matrix that is converted first: daskfactor convert {path} "
            f"{path.with_suffix('.zarr')}, and then fit that store"
        )
    if form is not None and form.array is not None:
        if name is not None and suffix != ".npz":
            raise DataError(f"{path} holds one matrix, without a name, not {name!r}; give {path}")
        return form.array(path, name)
    if path.is_dir() and name is None and zarr_kind(str(path)) in ("blocks", "array", "run"):
        return str(path)  # as_blocks opens it, or refuses it with the right sentence
    return _read_labelled(path, name)


def open_matrix_market(location: str, wanted: Wanted) -> Source:
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
        with _text_file(location) as file:
            file.seek(start)
            while text := file.read(TEXT_CHUNK) + file.readline():
                text = _NOTHING.sub(b"", text + b"\n")
                count = text.count(b"\n")
                found += count
                coo = _parsed(location, banner + b"%d %d %d\n" % (rows, cols, count) + text)
                yield from coordinate_pieces(coo.row, coo.col, coo.data)
        if found != entries:
            raise DataError(
                f"{location} says that it has {entries} entries, but has {found}; it was cut off "
                "or changed"
            )

    return Source(
        SourceInfo("matrix market", location, lazy=True),
        (rows, cols),
        labels=Labels(
            row_coords=_labels_beside(location, "row", "rows", rows),
            col_coords=_labels_beside(location, "column", "columns", cols),
        ),
        pieces=pieces,
        entries=entries if kinds[4] == "general" else None,
    )


def open_npz(location: str, wanted: Wanted) -> Source:
    """A sparse matrix in a NumPy archive.

    Either what scipy.sparse.save_npz writes; or compressed rows as ``data``,
    ``indices``, ``indptr``, ``shape``; or three arrays of positions and values,
    called row, col and data or as ``wanted`` says. Arrays ``row_labels`` and
    ``column_labels`` are labels.
    """
    try:
        with np.load(opened(location), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, *UNREADABLE) as error:
        raise DataError(
            f"{location} is no NumPy archive that can be read: {_why(error)}"
        ) from error
    dims = usable_dims(*arrays.get("dims", np.array(DEFAULT_DIMS)).tolist())
    labels = Labels(
        *dims, _labels(arrays, dims[0], "row_labels"), _labels(arrays, dims[1], "column_labels")
    )
    shape = tuple(int(side) for side in arrays["shape"]) if "shape" in arrays else None
    if {"data", "indices", "indptr"} <= arrays.keys() and wanted.rows is None:
        kind = arrays["format"].item() if "format" in arrays else "csr"
        kind = kind.decode() if isinstance(kind, bytes) else str(kind)
        if kind not in ("csr", "csc"):
            raise DataError(f"{location} holds a sparse matrix of format {kind}; save it as csr")
        parts = {name: arrays[name] for name in ("data", "indices", "indptr")}
        matrix = SimpleNamespace(format=kind, **parts)
        entries = int(matrix.indptr[-1])
        stream = partial(compressed_pieces, matrix)
    else:
        rows, cols, data = _triples(location, arrays, wanted)
        entries = data.size
        stream = partial(coordinate_pieces, rows, cols, data)
    return Source(
        SourceInfo("npz", location, lazy=True),
        None if shape is None else (shape[0], shape[1]),
        labels=Labels() if shape is None else labels,
        pieces=lambda values, add: stream(),
        entries=entries,
        unstored=str(arrays["unstored"]) if "unstored" in arrays else None,
    )


def open_h5ad(location: str, wanted: Wanted) -> Source:
    """The matrix X, or a layer, of an AnnData file; read in pieces, whatever its size."""
    io = require("anndata.io", "anndata", "AnnData files")
    key = "X" if wanted.layer is None else f"layers/{wanted.layer}"
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
        sides = [_index_of(io, file, name) for name in ("obs", "var")]

    def pieces(values: bool, add: bool) -> Iterator[Piece]:
        with _h5(location) as file:
            yield from backed_pieces(io.sparse_dataset(file[key]), shape)

    info = SourceInfo("h5ad", location, lazy=True)
    labels = Labels("obs", "var", sides[0], sides[1])
    return Source(info, shape, labels=labels, pieces=pieces, entries=entries)


def label_file(target: Path, side: str) -> Path:
    """Where `export` puts the labels of one side of a Matrix Market file."""
    stem = target.name.removesuffix(".gz").removesuffix(".bz2").removesuffix(".mtx")
    return target.with_name(f"{stem}.{side}.txt")


def _why(error: Exception) -> str:
    """What NumPy says, but for advice to load what may be anything."""
    foreign = any(word in str(error) for word in ("pickle", "Python objects"))
    return "it holds no numbers, or is no file of NumPy's" if foreign else str(error)


def _read_npy(path: Path, name: str | None) -> Any:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except UNREADABLE as error:
        raise DataError(f"{path} is no NumPy array file that can be read: {_why(error)}") from error


def _read_npz(path: Path, name: str | None) -> Any:
    """An array of an archive, or what `scipy.sparse.save_npz` wrote."""
    from scipy import sparse

    try:
        with np.load(path, allow_pickle=False) as archive:
            names = list(archive.files)
            if name is None and {"format", "shape", "data"} <= set(names):
                return sparse.load_npz(path)
            if names and name in (None, *names):
                return archive[name or names[0]]
    except UNREADABLE as error:
        raise DataError(f"{path} is no NumPy archive that can be read: {_why(error)}") from error
    if not names:
        raise DataError(f"{path} holds no array")
    raise DataError(f"{path} has no array {name!r}, only {', '.join(names)}")


def _bare_arrays(path: Path) -> list[str]:
    """Names of the arrays in a zarr group whose dimensions have none, which xarray refuses."""
    inside = sorted(path.iterdir()) if path.is_dir() else []
    return [own.name for own in inside if own.is_dir() and zarr_kind(str(own)) == "array"]


def _read_labelled(path: Path, name: str | None) -> Any:
    """A variable of a file that xarray reads."""
    import xarray as xr

    try:
        # Consolidated metadata is only a shortcut; asking for it warns where there is none.
        zarr_options: Any = {"engine": "zarr", "consolidated": False} if path.is_dir() else {}
        dataset = xr.open_dataset(path, chunks={}, **zarr_options)
    except Exception as error:  # every backend has errors of its own
        arrays = _bare_arrays(path)
        if name in arrays:
            return str(path / name)
        if arrays:
            raise DataError(
                f"{path} holds {len(arrays)} zarr array{'s' if len(arrays) > 1 else ''} "
                f"({', '.join(arrays)}); name one as {path}:NAME"
            ) from error
        reason = " ".join(str(error).split())[:200]
        told = "" if "did not find a match" in reason else f". xarray says: {reason}"
        raise DataError(f"{path} cannot be read; give {ARRAYS}{told}") from error
    # A store lists its arrays in no order of its own.
    names = sorted(map(str, dataset.data_vars))
    matrices = [key for key in names if dataset[key].ndim == 2]
    if name is not None and name not in names:
        raise DataError(f"{path} has no variable {name!r}, only {', '.join(names)}")
    if name is None and len(matrices) != 1:
        raise DataError(
            f"{path} holds {len(matrices)} two-dimensional variables "
            f"({', '.join(matrices) or 'none'}); name one as {path}:NAME"
        )
    return dataset[name or matrices[0]]


class Format(NamedTuple):
    """How files with one ending are read: as entries for `convert`, as an array, or both."""

    entries: Callable[[str, Wanted], Source] | None = None
    array: Callable[[Path, str | None], Any] | None = None


_TABLE = Format(open_csv, lambda path, name: read_table(path))

FORMATS = {
    ".csv": _TABLE,
    ".tsv": _TABLE,
    ".txt": _TABLE,
    ".dat": Format(open_csv),
    ".parquet": Format(open_parquet),
    ".pq": Format(open_parquet),
    ".mtx": Format(open_matrix_market),
    ".h5ad": Format(open_h5ad),
    ".npz": Format(open_npz, _read_npz),
    ".npy": Format(array=_read_npy),
}


def _open_path(location: str, wanted: Wanted) -> Source:
    location = location.removeprefix("file://")
    if "://" not in location:
        location = str(Path(location).expanduser())
        if not Path(location).exists():
            raise DataError(f"{location} does not exist; convert reads {KNOWN}")
    name = location.lower().rstrip("/")
    for ending in PACKED:
        name = name.removesuffix(ending)
    suffix = Path(name).suffix
    if wanted.layer is not None and suffix != ".h5ad":
        raise OptionError(f"layer is for AnnData (.h5ad), not for {location}")
    form = FORMATS.get(suffix)
    if form is not None and form.entries is not None:
        return form.entries(location, wanted)
    if is_blocked_store(location):
        store = BlockStore(location)
        return from_blocks(store.known, store.read)
    if zarr_kind(location) == "run":
        raise DataError(
            f"{location} is a run of daskfactor, not data; pass the data that it was made from"
        )
    if Path(location).is_dir() and any(Path(location).rglob("*.parquet")):
        return open_parquet(location, wanted)
    raise DataError(
        f"{location} is no kind of file that convert reads: {KNOWN}; arrays with an entry in "
        "every cell need no conversion: pass them to as_blocks, sample or daskfactor fit"
    )


def _layer_of(source: Any, layer: str) -> Any:
    """An AnnData object with a layer in the place of X."""
    if type(source).__name__ != "AnnData":
        raise OptionError(f"layer is for AnnData, not for {type(source).__name__}")
    if layer not in source.layers:
        names = ", ".join(source.layers) or "none"
        raise DataError(f"the AnnData object has no layer {layer!r}; its layers are: {names}")
    import anndata

    return anndata.AnnData(source.layers[layer], obs=source.obs[[]], var=source.var[[]])


def _text_file(location: str) -> Any:
    """A text file, wherever it lies and however it is compressed."""
    import fsspec

    return fsspec.open(location, "rb", compression="infer")


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


def _parsed(location: str, text: bytes) -> Any:
    """The entries in some lines, read as if they were a file of their own."""
    from scipy.io import mmread

    try:
        return mmread(BytesIO(text))
    except Exception as error:
        raise DataError(f"{location} cannot be read as Matrix Market: {error}") from error


def _labels_beside(location: str, dim: str, side: str, size: int) -> dict[str, NDArray[Any]]:
    beside = label_file(Path(location), side)
    if "://" in location or not beside.is_file():
        return {}
    names = beside.read_text(encoding="utf-8").splitlines()
    if len(names) != size:
        raise DataError(
            f"{beside} has {len(names)} labels for {size} {side} of {location}; correct it, or "
            "move it away"
        )
    return {dim: text_array(names)}


def _labels(arrays: Mapping[str, NDArray[Any]], dim: str, name: str) -> dict[str, NDArray[Any]]:
    if name not in arrays:
        return {}
    array = arrays[name]
    return {dim: np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array}


def _triples(
    location: str, arrays: Mapping[str, NDArray[Any]], wanted: Wanted
) -> list[NDArray[Any]]:
    """Rows, columns and values of an archive that holds an array of each."""
    names = []
    for choice, usual in (
        (wanted.rows, ("row", "rows")),
        (wanted.columns, ("col", "cols", "column", "columns")),
        (wanted.values, ("data", "values", "value")),
    ):
        allowed = usual if choice is None else (str(choice),)
        found = [name for name in allowed if name in arrays]
        if not found:
            raise DataError(
                f"{location} has no array {' or '.join(allowed)}; it has {', '.join(arrays)}; name "
                "the arrays with rows, columns and values"
            )
        names.append(found[0])
    shapes = [arrays[name].shape for name in names]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise DataError(
            f"the arrays {', '.join(names)} of {location} have shapes {shapes[0]}, {shapes[1]} "
            f"and {shapes[2]}; they must be as long as each other"
        )
    return [arrays[name] for name in names]


def _h5(location: str) -> Any:
    import h5py

    try:
        return h5py.File(opened(location), "r")
    except OSError as error:
        raise DataError(f"{location} is no AnnData file that can be read: {error}") from error


def _index_of(io: Any, file: Any, side: str) -> dict[str, NDArray[Any]]:
    """Names of observations or variables, unless they are just 0, 1, 2, ..."""
    if side not in file:
        return {}
    group = file[side]
    key = group.attrs.get("_index") if hasattr(group, "keys") else None
    names = io.read_elem(group).index if key is None else io.read_elem(group[key])
    texts = text_array([str(name) for name in np.asarray(names, object)])
    counted = all(name == str(number) for number, name in enumerate(texts))
    return {} if counted else {side: texts}
