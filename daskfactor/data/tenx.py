"""Counts as 10x Genomics writes them: a folder with a Matrix Market file, or one HDF5 file.

Both hold genes as rows and cells as columns. They are read with cells as rows, as AnnData has them.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from daskfactor.checks import warn
from daskfactor.data.adapters import Source, from_chunked, from_compressed
from daskfactor.data.annotated import Compressed, open_hdf5
from daskfactor.data.dialects import plain
from daskfactor.data.entries import Piece, text_array
from daskfactor.data.known import NAMED, NUMERIC, Labels, SourceInfo
from daskfactor.errors import DataError, DataWarning
from daskfactor.urls import is_url

MATRIX = "matrix.mtx"
PACKINGS = ("", ".gz")
CELLS, GENES = "barcodes.tsv", ("features.tsv", "genes.tsv")


def matrix_in(folder: str) -> str | None:
    """The matrix in a folder of 10x Genomics; None if it is no such folder."""
    if is_url(folder) or not Path(folder).is_dir():
        return None
    found = [Path(folder) / f"{MATRIX}{packing}" for packing in PACKINGS]
    return next((str(path) for path in found if path.is_file()), None)


def with_cells_as_rows(source: Source, location: str) -> Source:
    """The transpose of a Matrix Market file, labelled, if names of cells and genes lie beside it.

    Raises
    ------
    DataError
        If there are more or fewer names than rows or columns.
    """
    path = Path(location)
    prefix, middle, _ = path.name.partition(MATRIX)
    if is_url(location) or not middle:
        return source
    cells = _lines(path.with_name(prefix + CELLS))
    genes = next(filter(None, (_lines(path.with_name(prefix + name)) for name in GENES)), None)
    if not cells or not genes:
        return source
    assert source.shape is not None
    assert source.pieces is not None
    pieces, (rows, columns) = source.pieces, source.shape
    if (len(genes), len(cells)) != (rows, columns):
        raise DataError(
            f"{location} has {rows} rows and {columns} columns, but the files beside it name "
            f"{len(genes)} genes and {len(cells)} cells; move them away, or the right ones here"
        )
    warn(
        f"the columns of {location} are taken for rows, because the file {CELLS} beside it names "
        f"them: {columns} cells and {rows} genes",
        DataWarning,
    )

    def transposed(add: bool) -> Iterator[Piece]:
        for piece in pieces(add):
            yield Piece(piece.cols, piece.rows, piece.values)

    ids, names = zip(*((line[0], line[min(1, len(line) - 1)]) for line in genes), strict=True)
    labels = _labels([line[0] for line in cells], ids, names)
    return replace(source, shape=(columns, rows), labels=labels, pieces=transposed)


def _lines(path: Path) -> list[list[str]]:
    """The fields of each line of a file, packed or not; none if there is no such file."""
    for packing in PACKINGS:
        packed = path.with_name(path.name + packing)
        if packed.is_file():
            with plain(packed) as file:
                text = file.read().decode("utf-8")
            return [line.split("\t") for line in text.splitlines() if line.strip()]
    return []


def _labels(cells: Any, genes: Any, names: Any = ()) -> Labels:
    """Labels of cells and genes; names of genes, which need not be unique, are a coordinate."""
    more = {"name": text_array(list(names))} if len(names) else {}
    var = {"var": text_array(list(genes))} | more
    return Labels("obs", "var", {"obs": text_array(list(cells))}, var)


def is_netcdf(location: str) -> bool:
    """Tell whether an HDF5 file has the dimensions of netCDF, by which xarray reads it."""
    with open_hdf5(location) as root:
        if "_NCProperties" in root.attrs:
            return True
        scales = "DIMENSION_SCALE", b"DIMENSION_SCALE"
        return any(
            "DIMENSION_LIST" in own.attrs or own.attrs.get("CLASS") in scales
            for own in root.values()
        )


def is_hdf5(location: str) -> bool:
    """Tell whether a local file is HDF5, by how it begins; those of MATLAB have a text before."""
    if is_url(location) or not Path(location).is_file():
        return False
    with Path(location).open("rb") as file:
        start = file.read(520)
    return b"\x89HDF\r\n\x1a\n" in (start[:8], start[512:])


def read_hdf5(location: str, name: str | None) -> Source:
    """A matrix of 10x Genomics in an HDF5 file, or a dataset of two dimensions in any other.

    Raises
    ------
    DataError
        If there is none, or it is not said which of several is meant.
    """
    root = open_hdf5(location)
    if root.attrs.get("encoding-type") == "anndata":
        raise DataError(f"{location} is a file of anndata: give it a name that ends in .h5ad")
    groups = [own for own in root.values() if hasattr(own, "keys") and "barcodes" in own]
    whole = len(groups) == 1 and {"data", "indices", "indptr"} <= groups[0].keys()
    if whole and name in (None, groups[0].name.strip("/")):
        return _of_10x(location, groups[0])
    if len(groups) > 1:
        genomes = {own.name.strip("/"): own for own in groups}
        if name in genomes:
            return _of_10x(location, genomes[name])
        raise DataError(
            f"{location} holds counts of {len(genomes)} genomes; name one as "
            f"{location}:{next(iter(genomes))} (it has {', '.join(genomes)})"
        )
    found: dict[str, Any] = {}

    def note(key: str, node: Any) -> None:
        if hasattr(node, "shape") and node.dtype.kind in NUMERIC and node.ndim > 1:
            found[key] = node

    root.visititems(note)
    if name is None:
        matrices = [key for key, node in found.items() if node.ndim == 2]
        if len(matrices) != 1:
            listed = [f"{key} {node.shape}" for key, node in found.items()][: 2 * NAMED]
            if not found:
                raise DataError(
                    f"{location} holds no matrix of numbers, nor counts of 10x Genomics"
                )
            raise DataError(
                f"{location} holds {len(matrices)} matrices ({', '.join(listed) or 'none'}); "
                + (f"name one as {location}:NAME, or pass" if matrices else "pass")
                + f" an array of it in Python: xarray.DataArray(h5py.File({location!r})[NAME][...])"
            )
        (name,) = matrices
    if name not in found:
        raise DataError(f"{location} has no matrix {name!r}, only {', '.join(found) or 'none'}")
    return from_chunked(found[name], "hdf5", f"{location}:{name}")


def _of_10x(location: str, group: Any) -> Source:
    """Compressed columns of genes × cells are compressed rows of cells × genes."""
    genes, cells = (int(size) for size in group["shape"][:])
    arrays = (group[key] for key in ("data", "indices", "indptr"))
    source = from_compressed(Compressed("csr", (cells, genes), *arrays))
    features = group.get("features")
    keys = ("genes", "gene_names") if features is None else ("id", "name")
    told = [(group if features is None else features)[key] for key in keys]
    labels = _labels(*(np.asarray(own.asstr()[:]) for own in (group["barcodes"], *told)))
    return replace(
        source, labels=labels, info=SourceInfo("10x", location, lazy=True), unstored="zero"
    )
